"""Class counts: positions by token class, band of position and rarity.

Beside the tokens' pass, for the coverage map. Pure numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["CLASSES", "NOWHERE", "N_BANDS", "N_BITS", "ClassCounts", "position_band"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CLASSES = ("special", "shared prefix", "prompt", "generated")
NOWHERE = "reference without a row"
"""Class of the positions that were served from the cache and of which no row is stored."""
SPECIAL, SHARED, PROMPT, GENERATED = range(4)
N_BANDS = 33
"""Powers of two of a position or a length, ``floor(log2(n + 1))``."""
N_BITS = 26
"""Rarities in whole bits, 24 for more, and one place for an unknown one."""


def position_band(position: Ints) -> Ints:
    """Return the power of two of each position."""
    found: Ints = np.frexp(position + 1.0)[1].astype(np.int64) - 1
    return found


class ClassCounts:
    """Positions by class, band and rarity, ``(n_classes, N_BANDS, N_BITS)``.

    Args:
        labels: names of classes that somebody gave; they come after `CLASSES`.
    """

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self.words = (*CLASSES, *labels)
        shape = len(self.words), N_BANDS, N_BITS
        self.stored, self.reused, self.lost = (np.zeros(shape, np.int64) for _ in range(3))
        self.repeated = 0
        self.largest = 0

    def count(
        self,
        *,
        special: Bools,
        prefill: Bools,
        served: Ints | None,
        label: Ints | None,
        band: Ints,
        bits: Ints,
    ) -> None:
        """Count rows.

        Args:
            special: whether each is a special token.
            prefill: whether it is of the prompt.
            served: how often the prefix cache served it; ``None`` for lost rows.
            label: place of its label, -1 without one; ``None`` when there are no labels.
            band: of the position.
            bits: of the rarity.
        """
        word = np.where(prefill, PROMPT, GENERATED)
        if served is not None:
            word[served > 0] = SHARED
        word[special] = SPECIAL
        if label is not None:
            word = np.where(label >= 0, len(CLASSES) + label, word)
        at = (word * N_BANDS + band) * N_BITS + bits
        target = self.lost if served is None else self.stored
        target += np.bincount(at, minlength=target.size).reshape(target.shape)
        if served is not None and len(again := np.flatnonzero(served)):
            weights = served[again].astype(np.float64)
            found = np.bincount(at[again], weights=weights, minlength=target.size)
            self.reused += found.reshape(target.shape).astype(np.int64)
            self.repeated += len(again)
            self.largest = max(self.largest, int(served.max()))

    def add(self, other: ClassCounts) -> None:
        """Add the counts of other rows."""
        self.stored += other.stored
        self.reused += other.reused
        self.lost += other.lost
        self.repeated += other.repeated
        self.largest = max(self.largest, other.largest)
