"""Close a dataset and give it to others: seal, card, and the hub."""
