"""Cell sums: tokens of a step and request together, for what selects within a step.

Beside the tokens' pass. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["CellSums", "cell_sums", "joined", "no_cells"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CellSums:
    """Sums over the tokens of each (step, request).

    Args:
        step: place of the step, ``(n_cells,)``.
        request: place of the request, ``(n_cells,)``.
        sums: ``(4, n_covariates, n_cells)``: tokens that have a value and the sum of their values,
            over all computed ones and over the lost ones.
    """

    step: Ints
    request: Ints
    sums: Floats

    def centred(self, away: Floats) -> CellSums:
        """Return the same with squares about another middle, ``away`` from where they were.

        The first half of the covariates are numbers, the second their squares.

        Args:
            away: of each number, ``(n_covariates / 2,)``.
        """
        n = len(away)
        sums = self.sums.copy()
        for count in (0, 2):
            x, d = self.sums[count + 1, :n], away[:, np.newaxis]
            sums[count + 1, n:] += -2 * d * x + d**2 * self.sums[count, :n]
        return CellSums(self.step, self.request, sums)

    def columns(self, k: int) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arguments of ``statistics.within.within_cells`` for a covariate."""
        n, sx, n_lost, lx = self.sums[:, k]
        used = n > 0
        named = {"n": n, "sx": sx, "n_lost": n_lost, "lx": lx}
        return {
            "step": self.step[used],
            "request": self.request[used],
            **{name: values[used] for name, values in named.items()},
        }


def no_cells(n_covariates: int) -> CellSums:
    """Return the sums over nothing."""
    empty = np.zeros(0, np.int64)
    return CellSums(empty, empty, np.zeros((4, n_covariates, 0)))


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
    sums = np.zeros((4, len(values), len(first)))
    for k, x in enumerate(values):
        known = ~np.isnan(x)
        for j, mask in ((0, known), (2, known & lost)):
            where = at[mask]
            sums[j, k] = np.bincount(where, minlength=len(first))
            sums[j + 1, k] = np.bincount(where, weights=x[mask], minlength=len(first))
    return CellSums(first, second, sums)


def joined(parts: Sequence[CellSums]) -> CellSums:
    """Return the sums of several, added in their order."""
    if len(parts) == 1:
        return parts[0]
    first, second, at = _groups(
        np.concatenate([p.step for p in parts]), np.concatenate([p.request for p in parts])
    )
    flat = np.concatenate([p.sums for p in parts], axis=2)
    sums = np.zeros((*flat.shape[:2], len(first)))
    for j in range(flat.shape[0]):
        for k in range(flat.shape[1]):
            sums[j, k] = np.bincount(at, weights=flat[j, k], minlength=len(first))
    return CellSums(first, second, sums)


def _groups(step: Ints, request: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the pairs that there are, rising, and the place of each row's among them."""
    pairs, at = np.unique((step << 32) | request, return_inverse=True)
    return pairs >> 32, pairs & 0xFFFFFFFF, at.reshape(-1)
