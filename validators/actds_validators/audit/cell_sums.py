"""Cell sums: tokens of a step and request together, for what selects within a step.

Beside the tokens' pass. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.format.positions import pair_key, split_key

__all__ = ["CellSums", "RunCells", "cell_sums", "joined"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CellSums:
    """Sums over the tokens of each (step, request).

    Args:
        step: place of the step, ``(n_cells,)``.
        request: place of the request, ``(n_cells,)``.
        counts: ``(2, n_counts, n_cells)``: tokens that have a value, computed and lost ones.
            Nearly all covariates have one of every token: their counts stand once.
        of: which of the counts is each covariate's, ``(n_covariates,)``.
        x: ``(2, n_covariates, n_cells)``, sum of the values, over the computed and the lost ones.
    """

    step: Ints
    request: Ints
    counts: Floats
    of: Ints
    x: Floats

    @property
    def sums(self) -> Floats:
        """Return n, x, n of the lost and x of the lost, ``(4, n_covariates, n_cells)``."""
        n, n_lost = self.counts[:, self.of]
        return np.stack([n, self.x[0], n_lost, self.x[1]])


class RunCells:
    """The sums of a run, part by part as they came: side by side they would be held twice.

    Args:
        parts: in their order; a step and request may stand in several.
        away: how far the middle of each number lies from where its squares were taken, ``(n,)``;
            the covariates are n numbers, then their squares. ``None`` where none is a square.
    """

    def __init__(self, parts: list[CellSums], away: Floats | None = None) -> None:
        self.parts, self.away = parts, away
        self._groups: tuple[Ints, Ints, Ints] | None = None

    def columns(self, k: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arguments of ``statistics.within.within_cells`` for a covariate."""
        if self._groups is None:
            empty = np.zeros(0, np.int64)
            self._groups = _groups(
                np.concatenate([empty, *(p.step for p in self.parts)]),
                np.concatenate([empty, *(p.request for p in self.parts)]),
            )
        step, request, at = self._groups

        def summed(rows: list[Floats]) -> Floats:
            weights = np.concatenate([np.zeros(0), *rows])
            return np.bincount(at, weights=weights, minlength=len(step)).astype(np.float64)

        def values(lost: int, k: int) -> Floats:
            return summed([p.x[lost, k] for p in self.parts])

        n, n_lost = (summed([p.counts[lost, p.of[k]] for p in self.parts]) for lost in (0, 1))
        x, lost_x = values(0, k), values(1, k)
        if self.away is not None and k >= len(self.away):
            d, number = self.away[k - len(self.away)], k - len(self.away)
            x += -2 * d * values(0, number) + d**2 * n
            lost_x += -2 * d * values(1, number) + d**2 * n_lost
        used = n > 0
        named = {"n": n, "sx": x, "n_lost": n_lost, "lx": lost_x}
        return {
            "step": step[used],
            "request": request[used],
            **{name: values[used] for name, values in named.items()},
        }


def cell_sums(
    step: Ints, request: Ints, values: Sequence[Floats], lost: npt.NDArray[np.bool_]
) -> CellSums:
    """Return the sums of tokens.

    Args:
        step: place of the step of each token.
        request: place of the request.
        values: of each covariate; NaN where a token has none.
        lost: whether it was lost.
    """
    first, second, at = _groups(step, request)
    size = len(first)
    counts = [_counted(at, lost, size)]
    of = np.zeros(len(values), np.int64)
    x = np.zeros((2, len(values), size))
    for k, one in enumerate(values):
        known = ~np.isnan(one)
        if not known.all():
            of[k] = len(counts)
            counts.append(_counted(at[known], lost[known], size))
        for j, mask in enumerate((known, known & lost)):
            x[j, k] = np.bincount(at[mask], weights=one[mask], minlength=size)
    return CellSums(first, second, np.stack(counts, axis=1), of, x)


def joined(parts: Sequence[CellSums]) -> CellSums:
    """Return the sums of several, added in their order."""
    if len(parts) == 1:
        return parts[0]
    first, second, at = _groups(
        np.concatenate([p.step for p in parts]), np.concatenate([p.request for p in parts])
    )
    size = len(first)

    def summed(rows: list[Floats]) -> Floats:
        return np.bincount(at, weights=np.concatenate(rows), minlength=size).astype(np.float64)

    alone = np.flatnonzero(np.any([p.of > 0 for p in parts], axis=0))
    of = np.zeros(len(parts[0].of), np.int64)
    of[alone] = 1 + np.arange(len(alone))
    counts = np.zeros((2, 1 + len(alone), size))
    x = np.zeros((2, len(of), size))
    for lost in (0, 1):
        counts[lost, 0] = summed([p.counts[lost, 0] for p in parts])
        for k in alone:
            counts[lost, of[k]] = summed([p.counts[lost, p.of[k]] for p in parts])
        for k in range(len(of)):
            x[lost, k] = summed([p.x[lost, k] for p in parts])
    return CellSums(first, second, counts, of, x)


def _counted(at: Ints, lost: npt.NDArray[np.bool_], size: int) -> Floats:
    """Return the tokens of each cell, computed and lost ones, ``(2, n_cells)``."""
    return np.stack([np.bincount(some, minlength=size) for some in (at, at[lost])]).astype(float)


def _groups(step: Ints, request: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the pairs that there are, rising, and the place of each row's among them."""
    pairs, at = np.unique(pair_key(step, request), return_inverse=True)
    return *split_key(pairs), at.reshape(-1)
