"""Mean, variance and norm of a hook's rows, in float64 and bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.load.lazy import LazyArray

__all__ = ["Stats", "stats_of"]

_BLOCK_NBYTES = 1 << 24  # float64 rows that are held at a time

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stats:
    """Moments of the stored rows of a hook, each row counted once.

    Args:
        count: rows.
        mean: per channel, ``(d_model,)``; nan without rows.
        variance: per channel, ``(d_model,)``: mean squared deviation from ``mean``, over all rows.
        mean_norm: mean Euclidean norm of a row.
    """

    count: int
    mean: Vector
    variance: Vector
    mean_norm: float

    @property
    def std(self) -> Vector:
        """Return the standard deviation per channel, ``(d_model,)``."""
        return np.sqrt(self.variance)


def stats_of(array: LazyArray) -> Stats:
    """Return the moments of an array from one pass over it.

    Blocks are joined by their means and squared deviations (Chan, Golub and LeVeque 1979), so that
    a mean far from zero costs no digits.

    Args:
        array: the rows.
    """
    n_rows, d_model = array.shape
    step = max(1, _BLOCK_NBYTES // (8 * d_model))
    count, norms = 0, 0.0
    mean, squares = np.zeros(d_model), np.zeros(d_model)
    for start in range(0, n_rows, step):
        block = array[start : start + step].astype(np.float64)
        n = len(block)
        norms += float(np.sqrt(np.einsum("ij,ij->i", block, block)).sum())
        middle = block.mean(axis=0)
        block -= middle
        squares += np.einsum("ij,ij->j", block, block)
        shift = middle - mean
        total = count + n
        squares += shift * shift * (count * n / total)
        mean += shift * (n / total)
        count = total
    if not count:
        nothing = np.full(d_model, np.nan)
        return Stats(0, nothing, nothing.copy(), float("nan"))
    return Stats(count, mean, squares / count, norms / count)
