"""Dictionaries that people have: what they hold, as arrays, and what they do to rows."""

from actds_studies.dictionaries.dictionary import Dictionary, Source
from actds_studies.dictionaries.formats import load_dictionary

__all__ = ["Dictionary", "Source", "load_dictionary"]
