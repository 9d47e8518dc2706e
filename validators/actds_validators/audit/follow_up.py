"""Follow-up: how far the lost rows lie from the stored ones, by a replay of a random part of them.

Hansen and Hurwitz's double sampling (1946): of those that did not answer a random part is asked
again, and the mean over all is then known without a model of who answers. The only part of an
audit that reads activations: the stored rows of the dataset once, and those of the replay.

Spec: 0.1 section 14.12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.executor import Threads
from actds.explore.requests import RowRanges, lacking
from actds.format.arrays import widen
from actds.format.inclusion import (
    draws_rows,
    inclusion_of,
    inclusion_of_rows,
    is_drawn,
    salt_of,
    uniform,
)
from actds.format.positions import Intervals, Keys, difference, position_key, split_key
from actds.format.schema import RunRecord
from actds.format.shard import Shard
from actds.publish.sealing import check_provenance
from actds.store import open_store
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.data import N_THREADS
from actds_validators.audit.result import Estimate, FollowUp, FollowUpHook
from actds_validators.statistics.design import SampleMean, mean_of_clusters

MAX_CLUSTERS = 1024
"""Drawn requests beyond so many share clusters at random: sums of each are in memory."""
MAX_SHARED, MAX_SHARED_NBYTES = 1 << 14, 1 << 26
"""Positions with a row in both that are compared, and the bytes of their rows: a random part."""
BLOCK = 2048
"""Rows that are read at a time."""
CONFIDENCE = 0.95
SAME_MODEL = ("model.weights_sha256", "model.config_sha256", "tokenizer.sha256")


@dataclass(frozen=True)
class _Design:
    """How the requests of a replay were drawn, as its run records say."""

    fraction: float
    seed: int
    dataset: str

    @classmethod
    def of(cls, replay: Catalog, dataset: str, place: str) -> _Design:
        drawn = {(_fact(r, "replay.fraction"), _fact(r, "replay.seed")) for r in _records(replay)}
        if len(drawn) != 1 or None in (first := next(iter(drawn))):
            got = "no run record that says how its requests were drawn"
            raise _unusable(place, got if len(drawn) < 2 else "runs that were drawn differently")
        return cls(float(first[0] or 1), int(first[1] or 0), dataset)

    def includes(self, run: str, request: Ints) -> Bools:
        return is_drawn(self.seed, self.dataset, run, request, self.fraction)

    def draw(self, run: str, owed: Intervals) -> _Drawn:
        request, _ = split_key(owed.start)
        included = self.includes(run, request)
        positions = Intervals(owed.start[included], owed.stop[included])
        return _Drawn(np.unique(request[included]), positions)


@dataclass(frozen=True)
class _Drawn:
    """The drawn requests of a run that lack a row, and the positions that do."""

    requests: Ints
    positions: Intervals


def _records(catalog: Catalog) -> list[RunRecord]:
    return [catalog.runs[run] for run in catalog.runs_with_data]


def _fact(record: RunRecord, name: str) -> str | None:
    field = record.fields.get(name)
    return None if field is None or field.value is None else str(field.value)


def _unusable(place: str, got: str, expected: str = "") -> ActdsError:
    return ActdsError(
        "E009",
        "follow_up",
        got=f"{place}: {got}",
        expected=expected or "a replay of the dataset, of a random part of its requests",
        next_step="actds replay DATASET OUT --model FOLDER --only missing --fraction F --seed S",
    )


@dataclass(frozen=True)
class _Targets:
    """Positions of drawn requests, ``(n,)``: which cluster each is of, and where its rows are.

    Args:
        stored: key of the position in the dataset, then of its row there where one is asked for.
        again: the same in the replay.
    """

    run: str
    again_run: str
    cluster: Ints
    stored: Keys
    again: Keys

    @classmethod
    def of(
        cls, run: str, again_run: str, source: Ints, request: Ints, positions: Intervals
    ) -> _Targets:
        whole = (position_key(source, at) for at in (0, 0xFFFFFFFF))
        of_request, first, after = positions.cut(*whole)
        n = (after - first).astype(np.int64)
        nth = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        key = np.repeat(first, n) + nth.astype(np.uint64)
        number, position = split_key(key)
        again = position_key(np.repeat(request[of_request], n), position)
        cluster = uniform(salt_of("cluster", run), number) * MAX_CLUSTERS
        return cls(run, again_run, cluster.astype(np.int64), key, again)

    def __len__(self) -> int:
        return len(self.again)

    def take(self, at: npt.NDArray[np.integer | np.bool_]) -> _Targets:
        return replace(self, cluster=self.cluster[at], stored=self.stored[at], again=self.again[at])

    def of_some(self, n: int) -> _Targets:
        if len(self) <= n:
            return self
        number = uniform(salt_of("shared", self.run), *split_key(self.stored))
        return self.take(np.argpartition(number, n)[:n])

    def with_rows(self, again: RowRanges, stored: RowRanges | None = None) -> _Targets:
        rows, has = again.find(self.again)
        targets = replace(self, again=rows)
        if stored is not None:
            rows, is_stored = stored.find(self.stored)
            targets, has = replace(targets, stored=rows), has & is_stored
        return targets.take(has)


def follow_up(catalog: Catalog, place: str) -> FollowUp:
    """Estimate from a replay how far the stored rows of a dataset are off by its losses.

    Args:
        place: the replay.

    Raises:
        ActdsError: E009 it is no replay of the dataset, of another model, or of requests that its
            fraction and seed did not draw; and as opening a dataset.

    Spec: 0.1 section 14.12.
    """
    replay = read_catalog(open_store(place), apart=True)
    if not replay.is_sealed:
        raise replay.not_sealed(place)
    check_provenance(replay)
    _require_same_model(catalog, replay, place)
    design = _Design.of(replay, catalog.genesis.dataset, place)
    owed = {run: _lost(catalog, run) for run in catalog.run_ids}
    drawn = {run: design.draw(run, positions) for run, positions in owed.items()}
    pairs = list(_pairs(catalog, replay, design, drawn, place))
    lost, shared = [pair.lost for pair in pairs], [pair.shared for pair in pairs]
    hooks = {h.name: h.d_model for h in catalog.genesis.hooks}
    hooks = {h.name: h.d_model for h in replay.genesis.hooks if hooks.get(h.name) == h.d_model}
    for shard in catalog.shards if any(map(catalog.has_choices, drawn)) else ():
        # What was lost of a hook that some requests did not choose is less than all that was lost.
        hooks = {hook: d_model for hook, d_model in hooks.items() if hook in shard.hooks}
    n_answered = sum(map(len, lost))
    if not hooks or not n_answered:
        got = "no hook that all rows have" if not hooks else "no row of a position that lacks one"
        raise _unusable(place, got, "rows of lost positions, at hooks that the dataset has")
    n_missing = sum(positions.n_keys for positions in owed.values())
    compared = Compared(n_missing, design.fraction, sum(d + 1 for d in hooks.values()))
    stored = _stored(catalog, list(hooks))
    again, apart = ClusterSums.of_each(hooks), ClusterSums.of_each(hooks)
    for hook, cluster, row, rows in _rows(replay, list(hooks), lost):
        again[hook].add(cluster, row, rows)
    for hook, cluster, row, rows in _differences(catalog, replay, list(hooks), shared):
        apart[hook].add(cluster, row, rows)
    n_stored = max(moments.n for moments in stored.values())
    return FollowUp(
        path=place,
        digest=replay.digest,
        fraction=design.fraction,
        seed=design.seed,
        n_missing=n_missing,
        share=n_missing / (n_missing + n_stored),
        n_requests=sum(len(part.requests) for part in drawn.values()),
        n_drawn=sum(part.positions.n_keys for part in drawn.values()),
        n_answered=n_answered,
        n_shared=sum(map(len, shared)),
        hooks=[compared.hook(h, stored[h], again[h], apart[h]) for h in hooks],
    )


def _require_same_model(catalog: Catalog, replay: Catalog, place: str) -> None:
    for name in SAME_MODEL:
        values = {_fact(r, name) for of in (catalog, replay) for r in _records(of)} - {None}
        if len(values) > 1:
            raise _unusable(place, f"{name} differs", "the model of the dataset")


# which positions ------------------------------------------------------------------------------


def _lost(catalog: Catalog, run: str) -> Intervals:
    missing = lacking(catalog, run)
    if not draws_rows(catalog.runs.get(run)):
        return missing
    return difference(missing, RowRanges.of(catalog, run, "dropped", drawn=True).positions)


@dataclass(frozen=True)
class _Pair:
    """A run of the dataset, and one of the replay with requests of it."""

    lost: _Targets
    shared: _Targets


def _pairs(
    catalog: Catalog, replay: Catalog, design: _Design, drawn: dict[str, _Drawn], place: str
) -> Iterator[_Pair]:
    widest = max(hook.d_model + 1 for hook in catalog.genesis.hooks)
    n_shared = min(MAX_SHARED, max(256, MAX_SHARED_NBYTES // (8 * widest)))
    served = dict.fromkeys(drawn, np.zeros(0, np.int64))
    for again_run in replay.run_ids:
        rows = RowRanges.of(replay, again_run)
        origins = replay.table("origins", again_run)
        origins = origins.filter(pc.equal(origins["source_dataset"], design.dataset))
        for run in pc.unique(origins["source_run"]).to_pylist():
            lines = origins.filter(pc.equal(origins["source_run"], run))
            source, request = (
                lines[name].to_numpy().astype(np.int64) for name in ("source_request", "request")
            )
            if run not in drawn or not design.includes(run, source).all():
                got = "requests that its fraction and seed did not draw, or of another dataset"
                raise _unusable(place, got)
            new = ~np.isin(source, served[run])  # a resumed replay may serve a request again
            served[run] = np.concatenate([served[run], source])
            owed = _Targets.of(run, again_run, source[new], request[new], drawn[run].positions)
            stored = RowRanges.of(catalog, run)
            shared = _Targets.of(run, again_run, source[new], request[new], stored.positions)
            yield _Pair(owed.with_rows(rows), shared.of_some(n_shared).with_rows(rows, stored))


# what their rows are --------------------------------------------------------------------------


@dataclass
class StoredSums:
    """Sums over all rows of a hook: of each channel and of the norm, ``(d + 1,)``, finite rows.

    Of rows that were drawn each counts as 1 over its inclusion, in ``n`` too.
    """

    n: float
    total: Floats
    squares: Floats

    @classmethod
    def empty(cls, d_model: int) -> StoredSums:
        return cls(0, np.zeros(d_model + 1), np.zeros(d_model + 1))

    def add(self, rows: Floats, weight: Floats | None = None) -> None:
        finite: Bools = np.asarray(np.isfinite(rows).all(axis=1))
        rows = rows[finite]
        w = np.ones(len(rows)) if weight is None else weight[finite]
        self.n += float(w.sum())
        self.total += w @ rows
        self.squares += w @ rows**2

    def merge(self, other: StoredSums) -> None:
        self.n += other.n
        self.total += other.total
        self.squares += other.squares


@dataclass
class ClusterSums:
    """The same by cluster of drawn requests, ``(MAX_CLUSTERS,)`` and ``(MAX_CLUSTERS, d + 1)``."""

    n: Floats
    total: Floats
    squares: Floats

    @classmethod
    def of_each(cls, hooks: dict[str, int]) -> dict[str, ClusterSums]:
        k = MAX_CLUSTERS
        return {
            hook: cls(np.zeros(k), np.zeros((k, d + 1)), np.zeros(d + 1))
            for hook, d in hooks.items()
        }

    def add(self, cluster: Ints, row: Ints, rows: Floats) -> None:
        """Add positions: of which cluster each is, and which of some rows is its row."""
        finite: Bools = np.asarray(np.isfinite(rows).all(axis=1))
        kept = finite[row]
        places = (cluster[kept], (np.cumsum(finite) - 1)[row[kept]])
        rows = rows[finite]
        shape = (MAX_CLUSTERS, len(rows))
        # One row may be that of a prefix of a thousand requests: it is counted, not copied.
        counts = csr_array((np.ones(len(places[0])), places), shape=shape)
        self.n += counts.sum(axis=1)
        self.total += counts @ rows
        self.squares += counts.sum(axis=0) @ rows**2

    def mean(self, fraction: float) -> SampleMean | None:
        used = self.n > 0
        return mean_of_clusters(self.n[used], self.total[used], fraction) if used.any() else None


def values_of(bits: np.ndarray, dtype: str) -> Floats:
    """Return rows and their norm, float64 ``(n, d + 1)``."""
    rows = widen(bits, dtype).astype(np.float64)
    return np.concatenate([rows, np.linalg.norm(rows, axis=1, keepdims=True)], axis=1)


def _stored(catalog: Catalog, hooks: Sequence[str]) -> dict[str, StoredSums]:
    d_model = {hook.name: hook.d_model for hook in catalog.genesis.hooks}

    def of_shard(shard: Shard) -> dict[str, StoredSums]:
        parts, record = {}, catalog.runs.get(shard.run)
        weight = None
        if draws_rows(record):  # in a replay of a part that of the row alone
            weight = inclusion_of(record) / inclusion_of_rows(shard, record)
        for hook in set(hooks) & set(shard.hooks):
            parts[hook] = StoredSums.empty(d_model[hook])
            with shard.array(hook) as reader:
                for start, stop in pairwise([*range(0, shard.n_rows, BLOCK), shard.n_rows]):
                    w = None if weight is None else weight[start:stop]
                    parts[hook].add(values_of(reader.read(start, stop), reader.dtype), w)
        return parts

    total = {hook: StoredSums.empty(d_model[hook]) for hook in hooks}
    shards = [shard for run in catalog.runs_with_data for shard in catalog.shards_of(run)]
    for parts in Threads(N_THREADS).map(of_shard, shards):
        for hook, part in parts.items():
            total[hook].merge(part)
    return total


def _read(
    catalog: Catalog, run: str, hooks: Sequence[str], keys: Keys
) -> Iterator[tuple[str, Ints, Floats]]:
    """Yield rows of a run, some at a time: hook, which of the sorted keys each is of, values."""
    for shard in catalog.shards_of(run):
        tokens = shard.tokens(["request", "position"])
        present = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
        at = np.minimum(np.searchsorted(keys, present), max(len(keys) - 1, 0))
        rows = np.flatnonzero(keys[at] == present) if len(keys) else at[:0]
        for hook in (h for h in hooks if h in shard.hooks and len(rows)):
            with shard.array(hook) as reader:
                for start in range(0, len(rows), BLOCK):
                    part = rows[start : start + BLOCK]
                    yield hook, at[part], values_of(reader.gather(part), reader.dtype)


Block = tuple[str, Ints, Ints, Floats]
"""Hook, cluster of each position, which of the rows is that of each, and the rows."""


def _rows(replay: Catalog, hooks: Sequence[str], lost: Sequence[_Targets]) -> Iterator[Block]:
    for targets in lost:
        keys, n = np.unique(targets.again, return_counts=True)
        order = np.argsort(targets.again, kind="stable")
        ends = np.cumsum(n)
        for hook, at, rows in _read(replay, targets.again_run, hooks, keys):
            repeats = n[at]
            nth = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            place = order[np.repeat(ends[at] - repeats, repeats) + nth]
            yield hook, targets.cluster[place], np.repeat(np.arange(len(at)), repeats), rows


def _differences(
    catalog: Catalog, replay: Catalog, hooks: Sequence[str], shared: Sequence[_Targets]
) -> Iterator[Block]:
    for targets in shared:
        keys, at = np.unique(targets.stored, return_inverse=True)
        again_keys, again_at = np.unique(targets.again, return_inverse=True)
        for hook in hooks:
            stored = _all(_read(catalog, targets.run, [hook], keys), len(keys))
            again = _all(_read(replay, targets.again_run, [hook], again_keys), len(again_keys))
            if stored is not None and again is not None:
                yield hook, targets.cluster, np.arange(len(at)), again[again_at] - stored[at]


def _all(parts: Iterator[tuple[str, Ints, Floats]], n: int) -> Floats | None:
    values: Floats | None = None
    for _, at, rows in parts:
        if values is None:
            values = np.full((n, rows.shape[1]), np.nan)
        values[at] = rows
    return values


# what follows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """How means of lost and stored rows are compared.

    Args:
        n_missing: positions of the dataset without a row.
        n_values: means of all hooks, whose intervals hold at once.
    """

    n_missing: int
    fraction: float
    n_values: int

    def hook(
        self, name: str, stored: StoredSums, again: ClusterSums, apart: ClusterSums
    ) -> FollowUpHook:
        """Return the mean that may be the farthest off, of the channels of a hook and the norm."""
        sample = again.mean(self.fraction)
        if sample is None:
            raise _unusable(name, "no row of a lost position that is finite")
        if not np.isfinite(sample.error).all():
            got = "lost rows of one request, which say nothing of others"
            raise _unusable(name, got, "those of several")
        share = self.n_missing / (self.n_missing + stored.n)
        n_rows = int(again.n.sum())
        mean_stored = stored.total / max(1, stored.n)
        mean = (1 - share) * mean_stored + share * sample.mean
        square = (1 - share) * stored.squares / max(1, stored.n) + share * again.squares / n_rows
        sd = np.sqrt(np.maximum(square - mean**2, 0))
        scale = np.divide(share, sd, out=np.zeros_like(sd), where=sd > 0)
        bias = scale * (mean_stored - sample.mean)
        low, high = sample.interval(CONFIDENCE, self.n_values)
        low, high = scale * (mean_stored - high), scale * (mean_stored - low)
        floor, numerics = apart.mean(self.fraction), None
        if floor is not None and np.isfinite(floor.error).all():
            ends = floor.interval(CONFIDENCE, self.n_values)
            numerics = scale * np.maximum(*np.abs(ends))
        beside = np.zeros_like(bias) if numerics is None else numerics
        reach = np.maximum(-low, high) + beside
        near = np.maximum(low, -high) - beside
        at = int(np.argmax(reach))
        return FollowUpHook(
            hook=name,
            n_channels=len(bias) - 1,
            n_rows=n_rows,
            n_clusters=int((again.n > 0).sum()),
            variable="norm" if at == len(bias) - 1 else f"channel {at}",
            bias=Estimate(
                value=float(bias[at]),
                low=float(low[at]),
                high=float(high[at]),
                confidence=CONFIDENCE,
            ),
            numerics=None if numerics is None else float(numerics[at]),
            proven=max(0.0, float(near.max())),
        )
