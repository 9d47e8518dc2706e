"""Dictionaries that people have: what they hold, as arrays, and what they do to rows."""

from actds_validators.dictionaries.dictionary import Dictionary, Source
from actds_validators.dictionaries.load import load_dictionary

__all__ = ["Dictionary", "Source", "load_dictionary"]
