"""A reader and a validator of format 0.1, written from the text in ``spec/0.1`` alone.

They share no code with actds, and are the proof that the text suffices: what the text leaves open
they could not have. They keep positions one by one: for small datasets only. A module a section:
``layout`` (2), ``documents`` (their shapes), ``arrays`` (4), ``manifests`` (5), ``tables`` (6),
``conservation`` and ``readouts`` (7), ``ledger`` (8); ``reader`` and ``validator`` use them all.
"""

from actds_testing.independent.findings import Breach, Finding
from actds_testing.independent.reader import IndependentReader
from actds_testing.independent.validator import validate

__all__ = ["Breach", "Finding", "IndependentReader", "validate"]
