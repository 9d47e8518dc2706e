"""A dataset on a hub: its card, its Croissant metadata, and the way there and back."""
