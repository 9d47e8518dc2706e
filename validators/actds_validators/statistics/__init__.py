"""Statistics of dependent data: arrays in, numbers out; knows no dataset."""
