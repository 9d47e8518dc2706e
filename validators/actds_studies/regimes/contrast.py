"""A contrast: two arms row by row, paired by token, else by request and position, else unpaired.

What comes out is a plan for one pass over each arm: which rows, in which strata, of which group of
requests, and how much each counts. Groups of requests are what a jackknife leaves out and what a
test exchanges; the two arms share them, matched requests in the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

from actds.errors import ActdsError
from actds.format.positions import Keys, pair_key, position_key, split_key
from actds_studies.regimes.arms import Arm, ArmRows, match, need_requests, read_arm
from actds_studies.regimes.entropies import Entropies
from actds_studies.regimes.result import ALL, MIN_REQUESTS
from actds_studies.regimes.strata import (
    Layer,
    Side,
    Strata,
    Stratum,
    entropy_edges,
    fine_bands,
    strata_of,
)
from actds_validators.arrays import Bools, Floats, Ints, Whole, narrow

Pairing = Literal["token", "position", "unpaired"]
MAX_GROUPS = 32
_ENOUGH = 0.5  # of the pairs by position that decide must be the same token, to pair by token
_UNION_AXES = ("decode step", "role", "entropy", "margin")  # what a partner may tell of a row
_OF_TEXT = ("entropy", "margin")  # what follows from the tokens of an arm, and chooses among them


@dataclass(frozen=True)
class Contrast:
    """Two arms at a hook.

    Args:
        strata: all strata; layers name them by index.
        pairs: indices ``(n_pairs,)`` into the two sides, of rows that belong together; empty where
            the arms are unpaired.
        coverage: share of the second arm's rows that have something to be compared with.
        adjusted: whether the reference is weighted to the second arm's tokens and positions:
            adjusted, not matched.
        parted: of each pair whether another token was sampled after it, -1 unknown ``(n_pairs,)``;
            None where an arm does not say what it sampled.
        repeats: of either arm ``ArmRows.repeats``.
    """

    pairing: Pairing
    first: Side
    second: Side
    strata: tuple[Stratum, ...]
    n_groups: int
    pairs: tuple[Whole, Whole]
    coverage: float
    adjusted: bool = False
    parted: npt.NDArray[np.int8] | None = None
    repeats: tuple[tuple[Whole, Whole], ...] = ()


def contrast(
    first: Arm,
    second: Arm,
    hook: str,
    *,
    pairing: Pairing | None = None,
    adjust: bool = True,
    seed: int = 0,
    entropies: Entropies | None = None,
) -> tuple[Contrast, ArmRows, ArmRows]:
    """Return two arms at a hook, and their rows; no activation is read.

    Args:
        pairing: how to pair; None pairs by token where at least half of the rows of a common
            request and position are the same token with the same prefix, else by request and
            position, else not. Where some of these rows are at decode steps, they alone decide:
            a prompt that both arms were given says nothing of what came after it. Pairs of fewer
            requests than an estimate needs are none.
        adjust: weight an unpaired reference to the second arm's token ids and positions.
        entropies: computes those that were not recorded; None without.

    Raises:
        ActdsError: E014 a hook that one of them lacks or that differs in width; too few requests;
            or no pair of the kind that was asked for.
    """
    for arm in (first, second):
        if hook not in arm.dataset.hooks:
            got, expected = f"hook {hook!r}", f"one of {', '.join(arm.dataset.hooks)}"
            raise ActdsError("E014", f"arm {arm.name}", got=got, expected=expected)
    widths = [arm.dataset.hooks[hook].d_model for arm in (first, second)]
    if widths[0] != widths[1]:
        got, expected = f"rows of {widths[1]} channels", f"{widths[0]}, as arm {first.name} has"
        raise ActdsError("E014", f"arm {second.name} at {hook}", got=got, expected=expected)
    rows = []
    for arm in (first, second):
        arm_rows = read_arm(arm, hook)
        if entropies is not None:
            arm_rows = entropies.filled(arm.dataset, hook, arm_rows)
        rows.append(arm_rows)
    for arm, arm_rows in zip((first, second), rows, strict=True):
        need_requests(arm, hook, arm_rows, MIN_REQUESTS)
    runs = [arm_rows.requests.runs_of(arm_rows.request) for arm_rows in rows]
    planned = plan(
        *rows,
        same_dataset=first.dataset is second.dataset and not runs[0].isdisjoint(runs[1]),
        pairing=pairing,
        adjust=adjust,
        seed=seed,
        place=f"arms {first.name} and {second.name} at {hook}",
    )
    return planned, rows[0], rows[1]


def plan(
    first: ArmRows,
    second: ArmRows,
    *,
    same_dataset: bool = False,
    pairing: Pairing | None = None,
    adjust: bool = True,
    seed: int = 0,
    place: str = "arms",
) -> Contrast:
    """Return the contrast of rows that are known; arguments are those of `contrast`.

    Args:
        same_dataset: whether both number the same requests: they are of one dataset, and share a
            run.
    """
    matched = matched_requests(first, second, same_dataset)
    by_position = _pairs_by_position(first, second, matched, same_dataset)
    by_token = _pairs_by_token(first, second, by_position)
    chosen = pairing or _chosen(first, second, by_token, by_position)
    pairs = {"token": by_token, "position": by_position}.get(chosen, _NO_PAIRS)
    del by_token, by_position
    if chosen != "unpaired" and not len(pairs[0]):
        got = f"no rows in common to pair by {chosen}"
        raise ActdsError("E014", place, got=got, expected="some")
    of_pairs = chosen == "token"
    edges = entropy_edges(first, second, of_pairs=of_pairs)
    clusters = _clusters(first, second, matched, pairs if of_pairs else _NO_PAIRS)
    placed, other = (
        _Placed(rows, strata_of(rows, edges, of_pairs=of_pairs), narrow(cluster)[rows.request])
        for rows, cluster in zip((first, second), clusters, strict=True)
    )
    if chosen == "unpaired":
        return _unpaired(placed, other, adjust, seed)
    return _paired(chosen, placed, other, pairs, seed)


@dataclass(frozen=True)
class _Placed:
    """The rows of an arm, where they stand in strata, and the cluster of each ``(n,)``."""

    rows: ArmRows
    strata: Strata
    cluster: Whole


Pairs = tuple[Whole, Whole]
_NO_PAIRS: Pairs = (np.empty(0, np.int64), np.empty(0, np.int64))


def _chosen(first: ArmRows, second: ArmRows, by_token: Pairs, by_position: Pairs) -> Pairing:
    """Return the closest pairing of which there is enough, by the pairs at decode steps if any.

    Pairs of too few requests, as the first tokens of a template, would leave nothing to estimate.
    """
    n_token, n_position = (
        int(((first.decode_step[left] > 0) | (second.decode_step[right] > 0)).sum())
        for left, right in (by_token, by_position)
    )
    if not n_token and not n_position:
        n_token, n_position = len(by_token[0]), len(by_position[0])
    many_token, many_position = (
        len(np.unique(first.request[left])) >= MIN_REQUESTS for left, _ in (by_token, by_position)
    )
    if many_token and n_token and n_token >= _ENOUGH * n_position:
        return "token"
    return "position" if many_position and n_position else "unpaired"


def matched_requests(first: ArmRows, second: ArmRows, same_dataset: bool) -> Ints:
    """Return for each request of the second arm the first's of the same origin, -1 if none."""
    if same_dataset:
        return np.arange(len(second.requests))
    present, other = (
        np.bincount(rows.request, minlength=len(rows.requests)) > 0 for rows in (first, second)
    )
    return match(first.requests, second.requests, (present, other))


def _pairs_by_token(first: ArmRows, second: ArmRows, by_position: Pairs) -> Pairs:
    """Return rows that have the same tokens up to the same position; some by digests alone."""
    left, right = _common(first.prefix, second.prefix)
    same = first.prefix[left] != 0
    same &= first.position[left] == second.position[right]
    same &= first.token_id[left] == second.token_id[right]
    left, right = left[same], right[same]
    if first.prefix.all() and second.prefix.all():
        return left, right
    more = _alike(first, second, by_position)
    more &= ~np.isin(by_position[0], left) & ~np.isin(by_position[1], right)
    left = np.concatenate([left, by_position[0][more]])
    right = np.concatenate([right, by_position[1][more]])
    order = np.argsort(left, kind="stable")
    return left[order], right[order]


def _alike(first: ArmRows, second: ArmRows, pairs: Pairs) -> Bools:
    """Return which pairs by request and position are equal tokens behind equal prefixes.

    Where rows before were lost, and no readout tells their tokens, equal digests of two requests'
    tokens still do.
    """
    left, right = pairs
    prefix, other_prefix = first.prefix[left], second.prefix[right]
    code = {digest: n for n, digest in enumerate(first.requests.token_digest) if digest}
    ours, theirs = (
        np.array([code.get(digest or "", -1) for digest in rows.requests.token_digest], np.int64)
        for rows in (first, second)
    )
    ours, theirs = ours[first.request[left]], theirs[second.request[right]]
    by_digest = (ours >= 0) & (ours == theirs)
    # A digest ends before a last token that was fed and whose successor was not sampled.
    by_digest &= first.position[left] < first.requests.n_fed[first.request[left]]
    known = (prefix != 0) & (other_prefix != 0)
    mask: Bools = np.where(known, prefix == other_prefix, by_digest)
    mask &= first.token_id[left] == second.token_id[right]
    return mask


def _pairs_by_position(first: ArmRows, second: ArmRows, matched: Ints, same_dataset: bool) -> Pairs:
    if same_dataset:  # one request has one row at a position
        return _NO_PAIRS
    common = matched[second.request]
    present = np.flatnonzero(common >= 0)
    if not len(present):
        return _NO_PAIRS
    left, right = _common(
        position_key(first.request, first.position),
        position_key(common[present], second.position[present]),
    )
    return left, narrow(present[right])


def _common(first: Keys, second: Keys) -> Pairs:
    """Return where either has the same key, the first place of each, in the order of the first.

    As ``np.intersect1d`` does, with a third of its memory: there is a key for each row.
    """
    order = np.argsort(first, kind="stable")
    ordered = first[order]
    place = np.searchsorted(ordered, second)
    np.minimum(place, max(len(ordered) - 1, 0), out=place)
    right = np.flatnonzero(ordered[place] == second) if len(ordered) else np.empty(0, np.int64)
    del ordered
    left, right = narrow(order[place[right]]), narrow(right)
    del order, place
    at = np.argsort(left, kind="stable")
    left, right = left[at], right[at]
    once = np.concatenate([[True], left[1:] != left[:-1]]) if len(left) else np.empty(0, np.bool_)
    return (left, right) if once.all() else (left[once], right[once])


def _clusters(first: ArmRows, second: ArmRows, matched: Ints, pairs: Pairs) -> tuple[Ints, Ints]:
    """Return the cluster of each request of either arm: what is matched or paired shares one."""
    n = len(first.requests)
    with_origin = np.flatnonzero(matched >= 0)
    tied = split_key(np.unique(pair_key(first.request[pairs[0]], second.request[pairs[1]])))
    edges = [np.stack([matched[with_origin], n + with_origin]), np.stack([tied[0], n + tied[1]])]
    left, right = np.concatenate(edges, axis=1)
    size = n + len(second.requests)
    graph = coo_array((np.ones(len(left), np.int8), (left, right)), shape=(size, size))
    label = connected_components(graph, directed=False)[1].astype(np.int64)
    return label[:n], label[n:]


def groups_of(clusters: tuple[Whole, Whole], seed: int) -> tuple[int, Whole]:
    """Return how many groups there are, and the group of each cluster of either arm's rows."""
    left, right = (np.unique(side) for side in clusters)
    shared = np.intersect1d(left, right)
    alone = [np.setdiff1d(side, shared) for side in (left, right)]
    n = min(MAX_GROUPS, len(left), len(right))
    group = np.full(int(max(left.max(), right.max())) + 1, -1, np.int64)
    rng = np.random.Generator(np.random.Philox(seed))
    for part, start in ((shared, 0), *((side, len(shared)) for side in alone)):
        group[part[rng.permutation(len(part))]] = (start + np.arange(len(part))) % n
    return n, narrow(group)


def _paired(pairing: Pairing, first: _Placed, second: _Placed, pairs: Pairs, seed: int) -> Contrast:
    """Return the contrast of pairs: both rows of one stand in the same strata.

    But for what each text says of itself: of other tokens each row stands where its own entropy
    is, and only pairs of which both have one.
    """
    left, right = pairs
    if pairing == "position":
        # The same token behind the same prefix tells of the computation, not of who wrote it.
        unlike = ~_alike(first.rows, second.rows, pairs)
        left, right = (left[unlike], right[unlike]) if unlike.any() else (left, right)
    cluster = first.cluster[left]
    n_groups, group_of = groups_of((cluster, cluster), seed)
    codes: list[tuple[Whole, Whole]] = []
    for axis, of_axis in second.strata.codes.items():
        ours, code = first.strata.codes[axis][left], of_axis[right]
        if axis in _OF_TEXT and pairing == "position":
            # Rows that the other text chose would differ from the rest of their own arm as well.
            has_both = (ours >= 0) & (code >= 0)
            codes.append((np.where(has_both, ours, -1), np.where(has_both, code, -1)))
            continue
        if axis in _UNION_AXES:
            code = np.where(code >= 0, code, ours)
        codes.append((code, code))
    sides, place = [], []
    # Both rows of a pair have to be drawn: each stands for as many pairs as the product.
    weights = [_represented(first.rows, left), _represented(second.rows, right)]
    known = [weight for weight in weights if weight is not None]
    of_pair = np.prod(known, axis=0).astype(np.float32) if known else None
    for n, (rows, index) in enumerate(((first.rows, left), (second.rows, right))):
        order = np.argsort(rows.row[index], kind="stable")
        layers = tuple(
            Layer(code[n][order], None if of_pair is None else of_pair[order]) for code in codes
        )
        row, token_id, of_pairs = rows.row[index], rows.token_id[index], cluster[order]
        sides.append(Side(row[order], of_pairs, group_of[of_pairs], layers, token_id[order]))
        inverse = np.empty(len(order), left.dtype)
        inverse[order] = np.arange(len(order))
        place.append(inverse)
    parted = None
    if first.rows.sampled is not None and second.rows.sampled is not None:
        ours, code = first.rows.sampled.token_id[left], second.rows.sampled.token_id[right]
        parted = np.where((ours >= 0) & (code >= 0), ours != code, -1).astype(np.int8)
    return Contrast(
        pairing,
        sides[0],
        sides[1],
        first.strata.strata,
        n_groups,
        (place[0], place[1]),
        len(right) / max(len(second.rows), 1),
        parted=parted,
        repeats=(first.rows.repeats, second.rows.repeats),
    )


def _unpaired(first: _Placed, second: _Placed, adjust: bool, seed: int) -> Contrast:
    n_groups, group_of = groups_of((first.cluster, second.cluster), seed)
    nowhere = np.zeros(len(first.rows), np.int64), np.zeros(len(second.rows), np.int64)
    cells = _cells(first.rows, second.rows) if adjust else nowhere
    rng = np.random.Generator(np.random.Philox(seed))
    ones = np.ones(len(first.rows)), np.ones(len(second.rows))
    represented = tuple(
        same if arm.rows.represents is None else arm.rows.represents.astype(np.float64)
        for same, arm in zip(ones, (first, second), strict=True)
    )
    layers: tuple[list[Layer], list[Layer]] = ([], [])
    coverage = 1.0
    for axis, code in second.strata.codes.items():
        reference = first.strata.codes[axis]
        bands: list[tuple[Whole, Whole]] = [(reference, code)]
        if axis == "decode step" and not (reference >= 0).any():
            # A prompt has no decode steps: all of it is weighted to the rows of each of them.
            bands = [
                (np.full(len(reference), band, np.int8), np.where(code == band, code, -1))
                for band in np.unique(code[code >= 0])
            ]
        for codes in bands:
            pair = _balanced(codes, cells, represented, rng)
            for n, (side, layer) in enumerate(zip(layers, pair, strict=True)):
                of_arm = (first, second)[n].rows.represents
                side.append(layer if adjust else Layer(codes[n], of_arm, layer.even))
            if axis == ALL and adjust:
                assert pair[1].weight is not None
                coverage = float(pair[1].weight.sum() / represented[1].sum())
    sides = [
        Side(arm.rows.row, arm.cluster, group_of[arm.cluster], tuple(made), arm.rows.token_id)
        for arm, made in zip((first, second), layers, strict=True)
    ]
    return Contrast(
        "unpaired",
        sides[0],
        sides[1],
        first.strata.strata,
        n_groups,
        _NO_PAIRS,
        coverage,
        adjusted=adjust,
    )


def _represented(rows: ArmRows, index: Whole) -> Floats | None:
    return None if rows.represents is None else rows.represents[index].astype(np.float64)


def _cells(first: ArmRows, second: ArmRows) -> tuple[Ints, Ints]:
    keys = [
        position_key(rows.token_id, fine_bands(rows.position)).astype(np.uint64)
        for rows in (first, second)
    ]
    place = np.unique(np.concatenate(keys), return_inverse=True)[1].reshape(-1)
    return place[: len(first)], place[len(first) :]


def _balanced(
    codes: tuple[Whole, Whole],
    cells: tuple[Ints, Ints],
    represented: Sequence[Floats],
    rng: np.random.Generator,
) -> tuple[Layer, Layer]:
    """Return layers in which both arms have the same tokens at the same positions.

    A row of the reference weighs (rows of the second arm in its cell) / (rows of the reference in
    it); rows in cells that one arm lacks weigh 0. Even are as many of either arm in each cell.
    Rows that were drawn count and weigh what they represent, but for the even ones.
    """
    n_cells = 1 + max(int(cell.max(initial=0)) for cell in cells)
    keys = [
        np.where(code >= 0, code.astype(np.int64) * n_cells + cell, -1)
        for code, cell in zip(codes, cells, strict=True)
    ]
    known, place = np.unique(np.concatenate(keys), return_inverse=True)
    place = place.reshape(-1)
    places = place[: len(codes[0])], place[len(codes[0]) :]
    counts = [np.bincount(index, minlength=len(known)).astype(np.float64) for index in places]
    mass = [
        np.bincount(index, weight, len(known))
        for index, weight in zip(places, represented, strict=True)
    ]
    shared = (counts[0] > 0) & (counts[1] > 0) & (known >= 0)
    ratio = np.divide(mass[1], mass[0], out=np.zeros(len(known)), where=shared)
    weights: list[Floats] = [ratio[places[0]] * represented[0], shared[places[1]] * represented[1]]
    least = np.where(shared, np.minimum(*counts), 0).astype(np.int64)
    return tuple(  # type: ignore[return-value]
        Layer(
            np.where(weight > 0, code, -1).astype(np.int8),
            weight.astype(np.float32),
            drawn(place, least, rng),
        )
        for code, weight, place in zip(codes, weights, places, strict=True)
    )


# rows and requests that are drawn ---------------------------------------------------------------


MANY = 40
"""Requests that some of the rows are taken of, if there are as many."""


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
