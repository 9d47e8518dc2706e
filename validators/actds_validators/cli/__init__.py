"""The commands ``actds validate`` and ``actds audit``."""
