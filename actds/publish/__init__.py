"""Close a dataset and give it to others: seal, card, hub, and who signed it."""
