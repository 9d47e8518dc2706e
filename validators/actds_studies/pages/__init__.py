"""The pages of the studies, drawn with the parts of ``actds_validators.pages``."""
