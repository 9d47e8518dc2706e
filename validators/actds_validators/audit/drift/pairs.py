"""Pairs of rows of the same token: same prefix, same position, computed twice.

After the selections, before the measures. A row depends on its whole prefix, so equal token ids
at one position are not enough. Imports the format only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actds.format.positions import position_key
from actds.format.shard import Shard
from actds.load.dataset import Dataset
from actds_validators.audit.drift.selection import Found, Requests, Selection, find_rows

__all__ = ["Prefixes", "distinct", "pair", "repeats"]

Ints = npt.NDArray[np.int64]
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
        wanted: npt.NDArray[np.bool_],
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


def distinct(found: Found, prefixes: Prefixes) -> npt.NDArray[np.bool_]:
    """Return which rows to keep so that each prefix counts once ``(n,)``.

    Requests that share a system prompt hold the same values there: as units of a test they would
    not be independent. A row whose prefix is not known in full is kept.
    """
    hashes, kept = _hashes(found, prefixes)
    kept = ~kept
    known = np.flatnonzero(~kept)
    kept[known[np.unique(hashes[known], return_index=True)[1]]] = True
    return kept


def _hashes(
    found: Found, prefixes: Prefixes
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
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


def _references(dataset: Dataset, requests: Requests, wanted: npt.NDArray[np.bool_]) -> Ints:
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
