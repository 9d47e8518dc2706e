"""Rows of the same token computed twice: how far apart they are, and in which channels.

Pure functions on numpy arrays: no dataset and no table. Requests are the independent units; the
rows of one request are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr  # type: ignore[import-untyped]

__all__ = [
    "ChannelShift",
    "channel_shift",
    "cosine_distance",
    "relative_l2",
    "relative_shift",
    "request_means",
    "sign_flips",
]

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]
_N_ROWS = 2048  # rows that are held as float64 at a time


@dataclass(frozen=True)
class ChannelShift:
    """The mean difference of each channel and its test.

    Args:
        mean: mean over requests ``(d_model,)``.
        p: two-sided p of a t test over requests ``(d_model,)``.
        n_requests: requests it rests on.
    """

    mean: Floats
    p: Floats
    n_requests: int


def relative_l2(first: Rows, second: Rows) -> Floats:
    """Return ``|second - first| / |first|`` per row, shape (n,).

    Args:
        first: rows ``(n, d_model)``, none of them zero.
        second: the same tokens' rows.
    """
    return _by_rows(first, second, _relative_l2)


def cosine_distance(first: Rows, second: Rows) -> Floats:
    """Return one minus the cosine per row, shape (n,); exactly 0 for equal rows."""
    return _by_rows(first, second, _cosine_distance)


def relative_shift(first: Rows, second: Rows) -> Rows:
    """Return ``second - first`` over the root mean square of the first row, ``(n, d_model)``.

    Rounding goes with the size of a row, so rows of very different norms get one scale.
    """
    scale = np.sqrt(np.mean(np.square(first, dtype=np.float64), axis=1, keepdims=True))
    shift: Rows = (second - first) / scale.astype(np.float32)
    return shift


def request_means(values: npt.NDArray[Any], request: npt.NDArray[np.int64]) -> Floats:
    """Return the mean of the rows of each request ``(n_requests, d_model)``, in their order."""
    order = np.argsort(request, kind="stable")
    _, starts = np.unique(request[order], return_index=True)
    parts = np.split(order, starts[1:])
    means: Floats = np.stack([values[rows].mean(axis=0, dtype=np.float64) for rows in parts])
    return means


def channel_shift(means: Floats) -> ChannelShift:
    """Test in each channel whether the mean over requests is zero (t test, two-sided).

    Args:
        means: one mean difference per request ``(n_requests, d_model)``, at least two requests.
    """
    n = len(means)
    mean = means.mean(axis=0)
    error = means.std(axis=0, ddof=1) / np.sqrt(n)
    # Rounding of the mean itself is no spread: a channel that does not vary is equal or not.
    flat = error <= 1e-12 * np.abs(mean)
    t = np.divide(mean, error, out=np.zeros_like(mean), where=~flat)
    p = 2 * stdtr(n - 1, -np.abs(t))
    return ChannelShift(mean, np.where(flat, (mean == 0).astype(np.float64), p), n)


def sign_flips(n_requests: int, n_splits: int, seed: int) -> Floats:
    """Return signs ``(n_splits, n_requests)``: one half of the requests against the other."""
    rng = np.random.Generator(np.random.Philox(seed))
    signs = np.where(np.arange(n_requests) < n_requests // 2, -1.0, 1.0)
    return rng.permuted(np.tile(signs, (n_splits, 1)), axis=1)


def _by_rows(first: Rows, second: Rows, measure: Any) -> Floats:
    parts = [
        measure(
            first[at : at + _N_ROWS].astype(np.float64), second[at : at + _N_ROWS].astype(float)
        )
        for at in range(0, len(first), _N_ROWS)
    ]
    return np.concatenate([np.empty(0), *parts])


def _relative_l2(first: Floats, second: Floats) -> Floats:
    distance: Floats = np.linalg.norm(second - first, axis=1) / np.linalg.norm(first, axis=1)
    return distance


def _cosine_distance(first: Floats, second: Floats) -> Floats:
    one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (first, second))
    distance: Floats = np.square(one - other).sum(axis=1) / 2
    return distance
