"""Loading: datasets, lazy arrays, the training loader, torch and HF ``datasets``."""
