"""Rows of two selections: samples of whole requests, and pairs of rows of the same token.

Reads token, request and step tables, shard by shard, and no activation. A row depends on its whole
prefix, so equal token ids at one position do not make a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from actds.format.positions import position_key
from actds.format.shard import Shard
from actds.load.dataset import Dataset
from actds_validators.regimes.requests import Requests
from actds_validators.statistics.events import Bools, Ints

Column = Literal["phase", "kernel_mode", "run", "source"]
"""What a dataset can be divided by."""
COLUMNS: tuple[Column, ...] = get_args(Column)
MIN_REQUESTS = 40
"""Requests that a sample should have; with fewer, long requests give some of their rows only."""
_NEIGHBOURS = 16  # requests drawn together: served together, they stand in the same few chunks


@dataclass(frozen=True)
class Selection:
    """Rows of a dataset: all, or those with one value in a column.

    Args:
        dataset: the dataset.
        name: words for a reader.
        column: column that selects, None for all rows.
        value: the value it must have.
    """

    dataset: Dataset
    name: str
    column: Column | None = None
    value: str | None = None


@dataclass(frozen=True)
class Found:
    """Rows that were looked up.

    Args:
        row: number in the hook's array ``(n,)``, ascending.
        request: index of its request in ``Requests`` ``(n,)``.
        position: position in the request ``(n,)``.
        token_id: token fed there ``(n,)``.
    """

    row: Ints
    request: Ints
    position: Ints
    token_id: Ints

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: npt.NDArray[Any]) -> Found:
        """Return some of the rows."""
        return Found(
            self.row[which], self.request[which], self.position[which], self.token_id[which]
        )


def values_of(dataset: Dataset, column: Column) -> list[str]:
    """Return the values of a column, those of most steps or requests first; null is left out."""
    if column == "phase":
        return list(dataset.phases)
    if column == "run":
        there = {shard.run for shard in dataset.shards}
        return [run for run in dataset.catalog.run_ids if run in there]
    read = dataset.steps if column == "kernel_mode" else dataset.requests
    counts = [
        (entry["counts"], entry["values"])
        for entry in read(run=False)[column].value_counts().to_pylist()
        if entry["values"] is not None
    ]
    return [value for _, value in sorted(counts, key=lambda pair: (-pair[0], pair[1]))]


def count_rows(selection: Selection, shards: list[Shard], requests: Requests) -> Ints:
    """Return the rows that each request has in a selection ``(n_requests,)``."""
    counts = np.zeros(len(requests), np.int64)
    for _, _, request, _ in _selected(selection, shards, requests, ["request"]):
        counts += np.bincount(request, minlength=len(requests))
    return counts


def find_rows(
    selection: Selection, shards: list[Shard], requests: Requests, wanted: Bools
) -> Found:
    """Return the rows of the wanted requests ``(n_requests,)`` in a selection.

    Args:
        selection: what is searched.
        shards: the shards of a hook, in the order of its array.
        requests: the dataset's requests.
        wanted: whether each is wanted.
    """
    parts: list[Found] = []
    columns = ["request", "position", "token_id"]
    for start, where, request, table in _selected(selection, shards, requests, columns):
        mine = wanted[request]
        if mine.any():
            rows = where[mine]
            position, token_id = (
                table[name].to_numpy()[rows].astype(np.int64) for name in columns[1:]
            )
            parts.append(Found(start + rows, request[mine], position, token_id))
    parts.append(Found(*(np.empty(0, np.int64) for _ in range(4))))
    names = ("row", "request", "position", "token_id")
    return Found(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def draw(counts: Ints, rows: int, seed: int) -> Ints:
    """Draw requests until a side has ``rows`` rows, and return how many rows each may give.

    A request on both sides gives each the same number of rows, so that swapping its sides
    changes no group's size. Neighbours are drawn together, as they stand in the same chunks.

    Args:
        counts: rows of each cluster on the two sides ``(2, n_clusters)``.
        rows: rows that a side has at most.
        seed: of the draw.

    Returns:
        Rows of each cluster on the two sides ``(2, n_clusters)``; 0 for those not drawn.
    """
    quota = balanced(counts)
    n_there = int((quota.sum(axis=0) > 0).sum())
    drawn = _walk(quota, rows, seed)
    enough = min(MIN_REQUESTS, n_there)
    capped = quota
    if int(drawn.sum()) < enough:
        capped = np.minimum(quota, max(1, rows // enough))
        drawn = _walk(capped, rows, seed)
    there = (quota > 0).sum(axis=1)
    missed = (quota[:, drawn] > 0).sum(axis=1) < np.minimum(there, MIN_REQUESTS // 2)
    if missed.any():
        # The other side, on which its requests may stand as well, was full before enough of them
        # came: half of the room is theirs.
        capped = np.minimum(quota, max(1, rows // (2 * enough)))
        theirs = capped[missed].any(axis=0)
        drawn = _walk(capped * theirs, max(1, rows // 2), seed)
        drawn |= _walk(capped * ~theirs, rows // 2, seed)
    return np.where(drawn, capped, 0)


def balanced(counts: Ints) -> Ints:
    """Return counts ``(2, n_clusters)`` with the smaller one on both sides, unless it is 0."""
    both = counts.min(axis=0)
    return np.where(both > 0, both, counts)


def thinned(cluster: Ints, quota: Ints, seed: int) -> Ints:
    """Return which rows to keep, ascending: of each cluster a random ``quota[cluster]``."""
    rng = np.random.Generator(np.random.Philox(seed))
    order = np.lexsort((rng.random(len(cluster)), cluster))
    ordered = cluster[order]
    first = np.searchsorted(ordered, ordered, side="left")
    kept: Ints = np.sort(order[np.arange(len(order)) - first < quota[ordered]])
    return kept


def _walk(quota: Ints, rows: int, seed: int) -> Bools:
    """Return which clusters fit, in random order of blocks; a full side takes no more."""
    rng = np.random.Generator(np.random.Philox(seed))
    there = np.flatnonzero(quota.sum(axis=0) > 0)
    blocks = np.array_split(there, max(1, -(-len(there) // _NEIGHBOURS)))
    drawn = np.zeros(quota.shape[1], np.bool_)
    left, full = [rows, rows], [False, False]
    for block in rng.permutation(len(blocks)).tolist():
        for cluster in blocks[block].tolist():
            need = [int(n) for n in quota[:, cluster]]
            full = [was or n > room for was, n, room in zip(full, need, left, strict=True)]
            if any(closed and n for closed, n in zip(full, need, strict=True)):
                continue
            drawn[cluster] = True
            left = [room - n for room, n in zip(left, need, strict=True)]
        if all(full):
            break
    return drawn


def _selected(
    selection: Selection, shards: list[Shard], requests: Requests, columns: list[str]
) -> Iterator[tuple[int, Ints, Ints, Any]]:
    """Yield per shard its first row, the selected rows, their requests and the token table."""
    by_step = _steps_of(selection) if selection.column == "kernel_mode" else {}
    of_source = None
    if selection.column == "source":
        of_source = np.array([source == selection.value for source in requests.source], np.bool_)
    start = 0
    for shard in shards:
        begin, start = start, start + shard.n_rows
        if (
            selection.column in ("phase", "run")
            and getattr(shard, selection.column) != selection.value
        ):
            continue
        step = ["step"] if selection.column == "kernel_mode" else []
        table = shard.tokens(columns + step)
        request = requests.index(shard.run, table["request"].to_numpy())
        where = np.arange(shard.n_rows)
        if step:
            where = np.flatnonzero(np.isin(table["step"].to_numpy(), by_step[shard.run]))
        elif of_source is not None:
            where = np.flatnonzero(of_source[request])
        yield begin, where, request[where], table


def _steps_of(selection: Selection) -> dict[str, npt.NDArray[Any]]:
    """Return per run the steps of the selected kernel mode."""
    catalog = selection.dataset.catalog
    found = {}
    for run in catalog.run_ids:
        steps = catalog.table("steps", run)
        mode = np.asarray(steps["kernel_mode"].to_pylist(), object)
        found[run] = steps["step"].to_numpy()[mode == selection.value]
    return found


_MULTIPLIER, _MASK = 6364136223846793005, 2**64 - 1


class Prefixes:
    """The token ids of some requests, as their rows and the rows they refer to say.

    Args:
        dataset: the dataset.
        shards: shards of a hook.
        requests: the dataset's requests.
        wanted: whether each request is wanted ``(n_requests,)``.
    """

    def __init__(
        self,
        dataset: Dataset,
        shards: list[Shard],
        requests: Requests,
        wanted: Bools,
    ) -> None:
        self._requests = requests
        references = _references(dataset, requests, wanted)
        looked_up = wanted.copy()
        looked_up[references[:, 3]] = True
        found = find_rows(Selection(dataset, ""), shards, requests, looked_up)
        length = np.where(looked_up, requests.n_fed, 0)
        np.maximum.at(length, found.request, found.position + 1)
        np.maximum.at(length, references[:, 0], references[:, 2])
        self._start = np.zeros(len(requests) + 1, np.int64)
        np.cumsum(length, out=self._start[1:])
        self._ids = np.full(int(self._start[-1]), -1, np.int64)
        self._ids[self._start[found.request] + found.position] = found.token_id
        for request, start, stop, origin in references.tolist():
            known = self.of(origin)[start:stop]
            self.of(request)[start : start + len(known)] = known

    def of(self, request: int) -> Ints:
        """Return the token ids of a request from position 0, -1 where no row tells."""
        return self._ids[self._start[request] : self._start[request + 1]]

    def digest(self, request: int) -> tuple[str | None, int]:
        """Return the SHA-256 of a request's token ids, if the census has it, and of how many."""
        return self._requests.token_digest[request], int(self._requests.n_fed[request])


def pair(
    first: tuple[Found, Prefixes], second: tuple[Found, Prefixes], match: Ints
) -> tuple[Ints, Ints]:
    """Return which rows of the first and second stand for the same token and prefix.

    Args:
        first: the rows and prefixes of one side.
        second: those of the other.
        match: for each request of the second its request of the first, -1 if none.

    Returns:
        Two arrays ``(n_pairs,)`` of indices, in the order of the first.
    """
    (here, ours), (there, theirs) = first, second
    common = match[there.request]
    candidates = np.flatnonzero(common >= 0)
    key = position_key(here.request, here.position)
    other_key = position_key(common[candidates], there.position[candidates])
    _, one, other = np.intersect1d(key, other_key, assume_unique=True, return_indices=True)
    other = candidates[other]
    alike = np.zeros(len(match), np.int64)
    for request in np.unique(there.request[other]).tolist():
        alike[request] = _common_prefix(ours, int(match[request]), theirs, request)
    same = here.token_id[one] == there.token_id[other]
    same &= there.position[other] < alike[there.request[other]]
    one, other = one[same], other[same]
    order = np.argsort(one)
    return one[order], other[order]


def repeats(found: Found, prefixes: Prefixes) -> tuple[Ints, Ints]:
    """Return rows of one selection that stand for the same token and prefix twice.

    Args:
        found: rows of one regime.
        prefixes: the prefixes of their requests.

    Returns:
        Two arrays ``(n_pairs,)`` of indices: of each prefix the first row, and the next one, of
        another request.
    """
    hashes, known = _hashes(found, prefixes)
    rows = np.flatnonzero(known)
    _, first, which = np.unique(hashes[rows], return_index=True, return_inverse=True)
    later = np.setdiff1d(np.arange(len(rows)), first)
    _, second = np.unique(which[later], return_index=True)
    second = later[second]
    one, other = rows[first[which[second]]], rows[second]
    same = found.token_id[one] == found.token_id[other]
    same &= found.position[one] == found.position[other]
    return one[same], other[same]


def distinct(found: Found, prefixes: Prefixes) -> Bools:
    """Return which rows to keep so that each prefix counts once ``(n,)``.

    Requests that share a system prompt hold the same values there: as units of a test they would
    not be independent. A row whose prefix is not known in full is kept.
    """
    hashes, kept = _hashes(found, prefixes)
    kept = ~kept
    known = np.flatnonzero(~kept)
    kept[known[np.unique(hashes[known], return_index=True)[1]]] = True
    return kept


def _hashes(found: Found, prefixes: Prefixes) -> tuple[npt.NDArray[np.uint64], Bools]:
    """Return a hash of each row's prefix, and whether all of its tokens are known."""
    hashes = np.zeros(len(found), np.uint64)
    known = np.zeros(len(found), np.bool_)
    order = np.argsort(found.request, kind="stable")
    requests, starts = np.unique(found.request[order], return_index=True)
    for request, rows in zip(requests.tolist(), np.split(order, starts[1:]), strict=True):
        chain = _chain(prefixes.of(request))
        inside = rows[found.position[rows] < len(chain)]
        hashes[inside] = chain[found.position[inside]]
        known[inside] = True
    return hashes, known


def _common_prefix(ours: Prefixes, one: int, theirs: Prefixes, other: int) -> int:
    """Return how many positions from 0 are known to hold the same tokens."""
    left, right = ours.of(one), theirs.of(other)
    digest, n_digested = ours.digest(one)
    # A digest ends before a last token that was fed and whose successor was not sampled.
    same = n_digested if digest and ours.digest(one) == theirs.digest(other) else 0
    n = min(len(left), len(right))
    unlike = np.flatnonzero((left[same:n] != right[same:n]) | (left[same:n] < 0))
    return same + int(unlike[0]) if len(unlike) else n


def _chain(ids: Ints) -> npt.NDArray[np.uint64]:
    """Return a hash of each prefix, up to the first position that no row tells."""
    state, out = 0xC2B2AE3D27D4EB4F, []
    for token in ids.tolist():
        if token < 0:
            break
        state = ((state ^ (state >> 29)) * _MULTIPLIER + token + 1) & _MASK
        out.append(state)
    return np.array(out, np.uint64)


def _references(dataset: Dataset, requests: Requests, wanted: Bools) -> Ints:
    """Return request, start, stop and origin of the wanted requests' references, ``(n, 4)``."""
    parts = [np.empty((0, 4), np.int64)]
    for run in dataset.catalog.run_ids:
        if not wanted[requests.of_run(run)].any():
            continue
        spans = dataset.catalog.table("spans", run)
        origin = spans["ref_request"]
        spans = spans.filter(origin.is_valid())
        request, origin = (
            requests.index(run, spans[name].to_numpy()) for name in ("request", "ref_request")
        )
        columns = [request, *(spans[name].to_numpy() for name in ("start", "stop")), origin]
        lines = np.stack([column.astype(np.int64) for column in columns], axis=1)
        parts.append(lines[wanted[request]])
    return np.concatenate(parts)
