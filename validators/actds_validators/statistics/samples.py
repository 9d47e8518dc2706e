"""Distances of pairs of rows, random halves of requests, and random rows of keys or requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from actds_validators.arrays import Bools, Floats, Ints, Rows, Whole

MANY = 40
"""Requests that some of the rows are taken of, if there are as many."""
_N_ROWS = 2048  # rows that are held as float64 at a time


def halves(n_units: int, n: int, seed: int) -> Bools:
    """Return random halves ``(n, n_units)`` of the units of one side."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.permuted(np.tile(np.arange(n_units) < n_units // 2, (n, 1)), axis=1)


def drawn(key: Whole, quota: Ints, rng: np.random.Generator) -> Bools:
    """Return which rows are drawn ``(n,)``: of each key so many random ones, or all it has.

    Args:
        key: of each row ``(n,)``, from 0.
        quota: rows to draw of each key ``(n_keys,)``.
    """
    shuffled = np.lexsort((rng.random(len(key)), key))
    ordered = key[shuffled]
    place = np.arange(len(ordered)) - np.searchsorted(ordered, ordered, side="left")
    is_drawn = np.zeros(len(key), np.bool_)
    is_drawn[shuffled[place < quota[ordered]]] = True
    return is_drawn


def some_rows(cluster: Whole, order: Ints, n_rows: int, rng: np.random.Generator) -> Ints:
    """Return which rows to keep, ascending: of whole requests, unless fewer than 40 would fit.

    Args:
        order: numbers of the clusters; the first that fit are taken.
        rng: chooses rows of clusters that are too long.
    """
    counts = np.bincount(cluster, minlength=len(order))
    used = order[counts[order] > 0]
    many = min(MANY, len(used))
    if int((np.cumsum(counts[used]) <= n_rows).sum()) < many:
        counts = np.minimum(counts, max(1, n_rows // many))
    quota = np.zeros(len(counts), np.int64)
    fits = used[np.cumsum(counts[used]) <= n_rows]
    quota[fits] = counts[fits]
    return np.flatnonzero(drawn(cluster, quota, rng))


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
    unit, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (first, second))
    distance: Floats = np.square(unit - other).sum(axis=1) / 2
    return distance
