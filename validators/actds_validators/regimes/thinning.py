"""Smaller contrasts: of no more rows than are to be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actds_validators.regimes.arms import ArmRows
from actds_validators.regimes.contrast import Contrast, Layer, Side, groups_of, matched_requests
from actds_validators.statistics.events import Ints, Whole
from actds_validators.statistics.samples import drawn

__all__ = ["MANY", "some_requests", "some_rows", "thinned"]

MANY = 40
"""Requests that some of the rows are taken of, if there are as many."""


def some_requests(
    first: ArmRows, second: ArmRows, n_rows: int, seed: int = 0, *, same_dataset: bool = False
) -> tuple[ArmRows, ArmRows]:
    """Return arms of at most so many rows each: whole requests, which both keep or leave together.

    For rows that are not paired by token: what has the same tokens may stand in another request.

    Args:
        first: rows of the reference.
        second: rows of the other arm.
        n_rows: rows of each at most; more where 40 requests have more.
        seed: of the draw.
        same_dataset: whether both number the same requests.
    """
    if max(len(first), len(second)) <= n_rows:
        return first, second
    matched = matched_requests(first, second, same_dataset)
    name = np.where(matched >= 0, matched, len(first.requests) + np.arange(len(matched)))
    rng = np.random.Generator(np.random.Philox(seed))
    place = rng.permutation(len(first.requests) + len(second.requests))
    return (
        _first_requests(first, place[: len(first.requests)], n_rows),
        _first_requests(second, place[name], n_rows),
    )


def _first_requests(rows: ArmRows, place: Ints, n_rows: int) -> ArmRows:
    """Return the rows of the first requests, by their places, that fit."""
    counts = np.bincount(rows.request, minlength=len(place))
    order = np.argsort(place)
    order = order[counts[order] > 0]
    fits = np.cumsum(counts[order]) <= n_rows
    fits[:MANY] = True
    kept = np.zeros(len(place), np.bool_)
    kept[order[fits]] = True
    return rows.take(np.flatnonzero(kept[rows.request]))


def thinned(told: Contrast, n_rows: int, seed: int = 0) -> Contrast:
    """Return a contrast of at most so many rows a side: those of some requests, pairs together.

    Requests come whole unless fewer than 40 would fit: then long ones give some of their rows.

    Args:
        told: the contrast.
        n_rows: rows of each side at most.
        seed: of the draw.
    """
    if max(len(told.first), len(told.second)) <= n_rows:
        return told
    sides = told.first, told.second
    rng = np.random.Generator(np.random.Philox(seed))
    # Both sides take requests in one order: those that stand on both are kept or left together.
    order = rng.permutation(1 + max(int(side.cluster.max(initial=0)) for side in sides))
    if told.pairing == "unpaired":
        chosen = [_compared(side) for side in sides]
        chosen = [
            rows[some_rows(side.cluster[rows], order, n_rows, rng)]
            for side, rows in zip(sides, chosen, strict=True)
        ]
        pairs, parted = told.pairs, told.parted
    else:
        kept = some_rows(told.first.cluster[told.pairs[0]], order, n_rows, rng)
        one, other = told.pairs[0][kept], told.pairs[1][kept]
        chosen = [np.sort(one), np.sort(other)]
        pairs = np.searchsorted(chosen[0], one), np.searchsorted(chosen[1], other)
        parted = None if told.parted is None else told.parted[kept]
    clusters = [side.cluster[rows] for side, rows in zip(sides, chosen, strict=True)]
    n_groups, group_of = groups_of((clusters[0], clusters[1]), seed)
    fewer = [
        Side(side.row[rows], mine, group_of[mine], tuple(_at(layer, rows) for layer in side.layers))
        for side, rows, mine in zip(sides, chosen, clusters, strict=True)
    ]
    one_side, other_side = fewer
    return replace(
        told, first=one_side, second=other_side, n_groups=n_groups, pairs=pairs, parted=parted
    )


def _compared(side: Side) -> Ints:
    """Return the rows of a side that have something to be compared with; all where none has."""
    found = np.flatnonzero(side.layers[0].stratum >= 0)
    return found if len(found) else np.arange(len(side))


def _at(layer: Layer, rows: Ints) -> Layer:
    weight = None if layer.weight is None else layer.weight[rows]
    return Layer(layer.stratum[rows], weight, None if layer.even is None else layer.even[rows])


def some_rows(cluster: Whole, order: Ints, n_rows: int, rng: np.random.Generator) -> Ints:
    """Return which rows to keep, ascending: of whole requests, unless fewer than 40 would fit.

    Args:
        cluster: of each row ``(n,)``.
        order: numbers of the clusters; the first that fit are taken.
        n_rows: rows at most.
        rng: chooses rows of clusters that are too long.
    """
    counts = np.bincount(cluster, minlength=len(order))
    there = order[counts[order] > 0]
    many = min(MANY, len(there))
    if int((np.cumsum(counts[there]) <= n_rows).sum()) < many:
        counts = np.minimum(counts, max(1, n_rows // many))
    quota = np.zeros(len(counts), np.int64)
    fits = there[np.cumsum(counts[there]) <= n_rows]
    quota[fits] = counts[fits]
    return np.flatnonzero(drawn(cluster, quota, rng))
