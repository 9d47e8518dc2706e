"""Roles of the positions of a request as one string: a letter each, or packed by their runs."""

from __future__ import annotations

import re
from itertools import groupby

LETTERS = {
    "system": "s",
    "user": "u",
    "assistant": "a",
    "thinking": "k",
    "tool": "o",
    "template": "t",
}
"""The letter of each role of spec 6.3."""
UNKNOWN = "-"
_PACKED = re.compile(rf"(?:[{''.join(LETTERS.values())}{UNKNOWN}][0-9]{{1,9}})*")
_NAMES = {letter: role for role, letter in LETTERS.items()}


def packed(labels: str) -> str:
    """Return labels by their runs: ``t3u5t2`` for ``tttuuuuutt``."""
    return "".join(f"{label}{sum(1 for _ in run)}" for label, run in groupby(labels))


def count(runs: str) -> int:
    """Return how many positions packed labels have; raises ValueError for another text."""
    if not _PACKED.fullmatch(runs):
        raise ValueError(f"no packed labels: {runs!r:.80}")
    return sum(int(length) for length in re.findall(r"\d+", runs))


def intervals(runs: str) -> list[tuple[int, int, str]]:
    """Return first position, position after the last and role of packed labels that are known."""
    places: list[tuple[int, int, str]] = []
    start = 0
    for label, length in re.findall(r"(\D)(\d+)", runs):
        stop = start + int(length)
        if places and places[-1][1:] == (start, _NAMES.get(label)):
            places[-1] = (places[-1][0], stop, places[-1][2])
        elif label != UNKNOWN:
            places.append((start, stop, _NAMES[label]))
        start = stop
    return places
