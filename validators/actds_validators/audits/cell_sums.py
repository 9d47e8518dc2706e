"""Cell sums: tokens of a step and request together, for what selects within a step.

Beside the tokens' pass. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["CellSums", "RunCells", "cell_sums", "joined"]

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

        def summed(j: int, k: int) -> Floats:
            rows = [p.sums[j, k] for p in self.parts]
            weights = np.concatenate([np.zeros(0), *rows])
            return np.bincount(at, weights=weights, minlength=len(step)).astype(np.float64)

        n, x, n_lost, lost_x = (summed(j, k) for j in range(4))
        if self.away is not None and k >= len(self.away):
            d, number = self.away[k - len(self.away)], k - len(self.away)
            x += -2 * d * summed(1, number) + d**2 * n
            lost_x += -2 * d * summed(3, number) + d**2 * n_lost
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
