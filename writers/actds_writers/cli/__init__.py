"""The commands ``actds write``, ``actds recover`` and ``actds plan``."""
