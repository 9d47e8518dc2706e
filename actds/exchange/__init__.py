"""Files of other libraries: export to what a trainer takes, import of sets made elsewhere."""
