"""Rows of two datasets that belong together: the same tokens up to the same position.

The harvests may differ in everything else: model, engine, batching, what was lost, and which
request computed a prefix that several share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.explore.dataset import Dataset
from actds.format.inclusion import mixed
from actds.format.positions import position_key
from actds.format.schema import Hook
from actds.format.shard import Shard

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Partners:
    """A hook of another dataset, and where the partners of rows are.

    Args:
        name: what a batch calls the hook.
        hook: the hook, as the other dataset has it.
        shards: the shards of the other dataset that hold it.
        starts: number of the first row of each of them, and of the row after the last.
        rows: per shard of this dataset the number of each row's partner, int64 ``(n_rows,)``; -1
            where it has none.
    """

    name: str
    hook: Hook
    shards: Sequence[Shard]
    starts: Ints
    rows: Sequence[Ints]

    @property
    def n_pairs(self) -> int:
        return sum(int((rows >= 0).sum()) for rows in self.rows)


def find_partners(
    hashes: Hashes, shards: Sequence[Shard], label: str, other: Dataset, hook: str
) -> Partners:
    """Return for each row of shards the row of another dataset with the same tokens up to it.

    Holds some 50 bytes for each row of both while it works, and 8 for each row of the first after
    that.

    Args:
        mine: ``prefix_hashes`` of this dataset's shards.
        shards: these shards, whose rows are asked for.
        label: what a batch calls the other dataset.
        other: the other dataset.
        hook: its hook, whose rows are the partners.

    Raises:
        ActdsError: E014 the other dataset has no such hook; and as ``Shard.tokens``.
    """
    other_shards = other.shards_of(hook)
    theirs = prefix_hashes(other, other_shards)
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    starts = np.cumsum([0, *(shard.n_rows for shard in other_shards)], dtype=np.int64)
    at = np.minimum(np.searchsorted(ordered, hashes), max(len(ordered) - 1, 0))
    paired = (
        (hashes != 0) & (ordered[at] == hashes) if len(ordered) else np.zeros(len(hashes), bool)
    )
    partner = np.where(paired, order[at] if len(ordered) else 0, -1).astype(np.int64)
    bounds = np.cumsum([shard.n_rows for shard in shards])[:-1]
    name = f"{label}/{hook}"
    return Partners(name, other.hooks[hook], other_shards, starts, np.split(partner, bounds))


def prefix_hashes(dataset: Dataset, shards: Sequence[Shard]) -> Hashes:
    """Return a hash of the tokens up to each row, over all shards; 0 where one is not known."""
    hashes = np.zeros(sum(shard.n_rows for shard in shards), np.uint64)
    starts = np.cumsum([0, *(shard.n_rows for shard in shards)])
    for run in sorted({shard.run for shard in shards}):
        numbers = [i for i, shard in enumerate(shards) if shard.run == run]
        # A prefix is known by the rows of all phases, and of hooks that others have.
        known = {shard.name: shard for shard in dataset.shards if shard.run == run}
        tokens = _Tokens([*map(_columns, known.values()), *_of_readouts(dataset, run)])
        tokens.add_references(dataset, run)
        for i in numbers:
            key, _ = _columns(shards[i])
            hashes[starts[i] : starts[i + 1]] = tokens.of(key)
    return hashes


def prefix_sums(token_id: Ints) -> Hashes:
    """Return a hash of the tokens up to each position of a request, uint64 ``(n,)``."""
    return np.cumsum(_terms(np.arange(len(token_id)), token_id), dtype=np.uint64)


def _columns(shard: Shard) -> tuple[Hashes, TokenIds]:
    table = shard.tokens(["request", "position", "token_id"])
    key = position_key(table["request"].to_numpy(), table["position"].to_numpy())
    return key, table["token_id"].to_numpy().astype(np.uint32)


def _of_readouts(dataset: Dataset, run: str) -> list[tuple[Hashes, TokenIds]]:
    """Return keys and tokens of all computed rows, the lost ones too, where readouts have them."""
    if (run, "readouts") not in dataset.catalog.parts:
        return []
    table = dataset.catalog.table("readouts", run)
    key = position_key(table["request"].to_numpy(), table["position"].to_numpy())
    return [(key, table["token_id"].to_numpy().astype(np.uint32))]


class _Tokens:
    """Hashes of the tokens up to each stored position of a run.

    The hash of a prefix is the sum of a random number for each position and its token, modulo
    2^64. So what a request computed itself is a running sum, and what it got from another's
    prefix is one number to add.

    Args:
        parts: keys and tokens of the rows of each shard.
    """

    def __init__(self, parts: Sequence[tuple[Hashes, TokenIds]]) -> None:
        key = np.concatenate([part[0] for part in parts])
        token = np.concatenate([part[1] for part in parts])
        order = np.argsort(key, kind="stable")
        key, token = key[order], token[order]
        del order
        # Shards of several stages have the same rows; a row that was computed again is the same.
        first = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.empty(0, bool)
        if not first.all():
            key, token = key[first], token[first]
        self._key = key
        self._sum = mixed(key << np.uint64(32) | token)
        # A stretch is a run of positions of one request without a hole.
        begins = np.concatenate([[True], key[1:] != key[:-1] + np.uint64(1)])[: len(key)]
        at = np.flatnonzero(begins)
        self._stretch = np.cumsum(begins, dtype=np.int32)
        self._stretch -= 1
        terms = self._sum[at]
        np.cumsum(self._sum, out=self._sum)
        self._sum -= (self._sum[at] - terms)[self._stretch]
        self._start = key[at]
        # What comes before a stretch: nothing where it begins at position 0.
        self._base = np.zeros(len(at), np.uint64)
        self._known = np.asarray(key[at] & np.uint64(0xFFFFFFFF) == 0)

    def of(self, key: Hashes) -> Hashes:
        """Return the hash of the tokens up to each key; 0 where it is not known."""
        if not len(self._key):
            return np.zeros(len(key), np.uint64)
        at = np.minimum(np.searchsorted(self._key, key), len(self._key) - 1)
        stretch = self._stretch[at]
        known = (self._key[at] == key) & self._known[stretch]
        # 0 says that it is not known; one hash in 2^64 is moved.
        whole = np.maximum(self._sum[at] + self._base[stretch], np.uint64(1))
        return np.where(known, whole, np.uint64(0))

    def add_references(self, dataset: Dataset, run: str) -> None:
        """Learn what comes before stretches that begin where a prefix-cache reference ends."""
        spans = dataset.catalog.table("spans", run)
        kind = np.asarray(spans["disposition"].to_pylist()) == "cache_ref"
        owner = spans["ref_request"].to_numpy(zero_copy_only=False)
        kind &= np.asarray([value is not None and value == value for value in owner.tolist()], bool)
        request, stop = (spans[name].to_numpy()[kind] for name in ("request", "stop"))
        after = position_key(request, stop)
        last = position_key(owner[kind].astype(np.int64), stop.astype(np.int64) - 1)
        at = np.searchsorted(self._start, after)
        inside = at < len(self._start)
        inside[inside] &= self._start[at[inside]] == after[inside]
        at, last = at[inside], last[inside]
        # An owner may have got its own prefix from another one: as many rounds as that is deep.
        while True:
            hashes = self.of(last)
            new = (hashes != 0) & ~self._known[at]
            if not new.any():
                return
            self._base[at[new]] = hashes[new]
            self._known[at[new]] = True


def _terms(position: Ints, token_id: Ints) -> Hashes:
    return mixed(position.astype(np.uint64) << np.uint64(32) | token_id.astype(np.uint64))
