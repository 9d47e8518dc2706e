"""A dataset and its replays read as one, each position once: between selection and order.

Where the dataset drew its rows, a row comes with the probability that the union has its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.drawn import Shares, columns_of
from actds.dataset.multiplicity import Servings
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import RowRanges, lacking
from actds.format.inclusion import Design, draws_rows, inclusion_of, is_drawn
from actds.format.positions import (
    Index,
    Intervals,
    Ints,
    Keys,
    difference,
    position_key,
    split_key,
    union,
    values_at,
)
from actds.loader.filters import bad
from actds.loader.mixture import Mixture
from actds.loader.selection import Floats, RowFilter, Selection

_NOT_DRAWN = ("thinned", "dropped")


def read_once(mixture: Mixture, *, served: bool) -> Mixture:
    """Return a mixture that has each position of a dataset and its replays once.

    A row of a replay is read where it stands for a position of which neither the source nor a
    replay before it has a row: its own position, or that of a prefix-cache hit on it.

    Where the source drew its rows, the inclusion of each row is that in the union: of the draw of
    the run and those of its replays, which are independent. Unless ``served``, a hit on a row that
    was not drawn is no position of its own.

    Args:
        served: let the row come once for each of these positions.

    Raises:
        ActdsError: E014 when none of the datasets is a replay of another one, a part of the
            mixture has no further row, or the inclusion in the union is not known.

    Spec: 0.1 sections 6.3, 7.5 and 7.10.
    """
    hooks = [hook.name for hook in mixture.hooks]
    sources = _Sources({item.catalog.genesis.dataset: item for item in mixture.datasets}, hooks, {})
    filters = {item.dataset.path: item.filter for part in mixture.parts for item in part}
    further = {
        run: _further(dataset, run, sources, filters[dataset.path], served=served)
        for dataset in mixture.datasets
        for run in dataset.catalog.run_ids
    }
    if all(item is None for item in further.values()):
        got = "no dataset that is a replay of another one of them"
        raise bad("once", got, "a dataset and its replays, as [source, missing]")
    for source in sources.replayed.values():
        source.check()
    parts = []
    for part in mixture.parts:
        read = [_with_further(item, further, sources, served=served) for item in part]
        parts.append([item for item in read if item.n_kept])
        if not parts[-1]:
            got = f"no further row in {', '.join(item.dataset.path for item in part)}"
            raise bad("once", got, "replays of what the source lost")
    return replace(mixture, parts=parts, once=True)


def are_replays(datasets: Sequence[Dataset]) -> bool:
    ids = pa.array([dataset.catalog.genesis.dataset for dataset in datasets])
    return len(datasets) > 1 and any(
        pc.any(pc.is_in(dataset.catalog.table("origins")["source_dataset"], ids)).as_py()
        for dataset in datasets
    )


class _Source:
    """A run that is replayed, and what its replays have of it; keys are those of its positions.

    Attributes:
        known: the positions of which it, or a replay that was read, has a row with all hooks.
    """

    def __init__(self, dataset: Dataset, run: str, hooks: Sequence[str]) -> None:
        self._dataset, self.run = dataset, run
        self._catalog = dataset.catalog
        self.known = RowRanges.of(self._catalog, run, hooks=hooks).positions
        record = dataset.runs.get(run)
        self._design = Design.of(record)
        self.draws = self._design is not None
        policy = None if record is None else record.fields.get("capture.overflow_policy")
        # Then whatever is not drawn lacks a row, which makes a replay serve its request.
        self._drops = policy is not None and policy.value == "drop_newest"
        self._stored = self.known
        self._covers: dict[str, list[tuple[Keys, Keys]]] = {}
        self._draw_of: dict[str, tuple[str, int, float]] = {}
        if self.draws:
            self._not_drawn = RowRanges.of(self._catalog, run, *_NOT_DRAWN, hooks=hooks)

    @property
    def hits(self) -> Intervals:
        at = self._not_drawn.start != self._not_drawn.row
        start, length = self._not_drawn.start[at], self._not_drawn.length[at]
        return union(start, start + length)

    def add(self, replay: Dataset, run: str, request: Ints, start: Keys, stop: Keys) -> None:
        """Note which requests a run of a replay served, and the ranges that it has rows of."""
        if not self.draws:
            return
        record = replay.runs.get(run)
        names = ("replay.only", "replay.seed", "replay.fraction")
        fields = [None if record is None else record.fields.get(name) for name in names]
        values = ["" if f is None or f.value is None else str(f.value) for f in fields]
        only, seed, fraction = values
        if not all(values) or draws_rows(record):
            raise self._unknown(f"{replay.path}, whose run {run} draws rows, or says no fraction")
        draw = (only, int(seed), float(fraction))
        dataset = self._catalog.genesis.dataset
        if self._draw_of.setdefault(replay.path, draw) != draw:
            raise self._unknown(f"{replay.path}, whose runs were drawn differently")
        if not is_drawn(draw[1], dataset, self.run, request, draw[2]).all():
            raise self._unknown(f"{replay.path}, which has requests that it did not draw")
        self._covers.setdefault(replay.path, []).append((start, stop))

    def check(self) -> None:
        """Refuse a union of which not every position has a known inclusion (E014)."""
        if self._design is None:
            return
        if self._lost_drawn(self._design):
            raise self._unknown("a source that also lost rows which it had drawn")
        start, length = self._not_drawn.start, self._not_drawn.length
        owed = union(
            np.concatenate([self._stored.start, start]),
            np.concatenate([self._stored.stop, start + length]),
        )
        for path, (only, seed, fraction) in self._draw_of.items():
            request, _ = split_key(owed.start)
            wanted = is_drawn(seed, self._catalog.genesis.dataset, self.run, request, fraction)
            if only == "missing":
                if self._design.keep or not self._drops:
                    raise self._unknown(f"{path}, of the requests alone that lack a row")
                lacks, _ = split_key(lacking(self._catalog, self.run).start)
                wanted &= np.isin(request, lacks)
            ends = [np.concatenate(end) for end in zip(*self._covers[path], strict=True)]
            left = difference(Intervals(owed.start[wanted], owed.stop[wanted]), union(*ends))
            if left.n_keys:
                got = f"{path}, which lacks {left.n_keys:,} positions of requests that it drew"
                raise self._unknown(got)

    def _lost_drawn(self, design: Design) -> bool:
        """Return whether rows were lost that had been drawn: nobody knows which others would be."""
        spans = self._catalog.table("spans", self.run).sort_by(_PLACE)
        spans = spans.filter(pc.is_valid(spans["step"]))
        request, step = (spans[name].to_numpy().astype(np.int64) for name in ("request", "step"))
        if design.unit == "request":  # the inclusion is that of its first step
            _, first, of = np.unique(request, return_index=True, return_inverse=True)
            step = step[first][of]
        lost = pc.and_(pc.is_in(spans["disposition"], _LOST), pc.is_null(spans["inclusion"]))
        steps = self._catalog.table("steps", self.run).sort_by("step")
        inclusion = steps["inclusion"].fill_null(0.0).to_numpy()
        at = Index(steps["step"].to_numpy()).of(step[lost.to_numpy()])
        return bool(len(at) and (design.keep or (inclusion[at] < 1).any()))

    def _unknown(self, got: str) -> ActdsError:
        path = self._dataset.path
        expected = f"known inclusion in {path}, which draws its rows, and its replays together"
        step = f"Load {path} alone, or replay it: actds replay {path} OUT --model FOLDER"
        return ActdsError("E014", "once", got=got, expected=expected, next_step=step)

    def in_union(self, inclusion: Floats) -> Floats:
        by_seed: dict[int, float] = {}  # with one seed a smaller part lies in a larger one
        for _, seed, fraction in self._draw_of.values():
            by_seed[seed] = max(fraction, by_seed.get(seed, 0.0))
        out = float(np.prod([1 - fraction for fraction in by_seed.values()]))
        return np.minimum(inclusion + (1 - inclusion) * (1 - out), 1.0)

    def of_lacking(self, keys: Keys) -> Floats:
        row, would_have = self._not_drawn.find(keys)
        inclusion = np.zeros(len(keys))
        inclusion[would_have] = self._inclusion_of(row[would_have])
        return self.in_union(inclusion)

    def _inclusion_of(self, keys: Keys) -> Floats:
        assert self._design is not None
        spans = self._catalog.table("spans", self.run)
        spans = spans.filter(pc.is_valid(spans["inclusion"]))
        start = position_key(spans["request"].to_numpy(), spans["start"].to_numpy())
        stop = position_key(spans["request"].to_numpy(), spans["stop"].to_numpy())
        order = np.argsort(start)
        at = order[np.searchsorted(start[order], keys, side="right") - 1]
        # Others were lost: those that would have been stored whatever was drawn.
        inclusion: Floats = np.where(keys < stop[at], spans["inclusion"].to_numpy()[at], 0.0)
        if not self._design.keep:
            return inclusion
        design, catalog = self._design, self._catalog
        aside = {
            name: catalog.table(name, self.run) for name in ("requests", *columns_of(design, ()))
        }
        lines = aside["requests"] = aside["requests"].sort_by("request")
        prompt_len = lines["prompt_len"].to_numpy().astype(np.int64)
        shares = Shares.of(design, Index(lines["request"].to_numpy()).of, prompt_len, aside)
        return inclusion * shares.of_positions(*split_key(keys))


_LOST = pa.array(["dropped", "aborted"])
_PLACE = [("request", "ascending"), ("start", "ascending")]


@dataclass(frozen=True)
class _Sources:
    datasets: Mapping[str, Dataset]
    """By id."""
    hooks: Sequence[str]
    replayed: dict[tuple[str, str], _Source]
    """By id and run."""

    def of(self, name: tuple[str, str]) -> _Source:
        if name not in self.replayed:
            self.replayed[name] = _Source(self.datasets[name[0]], name[1], self.hooks)
        return self.replayed[name]


@dataclass(frozen=True)
class _Positions:
    """Positions that are new of a source, as ranges: their keys there, and where the rows are."""

    source: _Source
    row: Keys
    first: Keys
    length: Ints

    def weights(self, fraction: float) -> tuple[Keys, Floats]:
        """Return the row of each position, and 1 over the position's inclusion in the union.

        Args:
            fraction: inclusion of those whose source stores every row.
        """
        nth = np.arange(self.length.sum()) - np.repeat(
            np.cumsum(self.length) - self.length, self.length
        )
        row, key = (
            np.repeat(a, self.length) + nth.astype(np.uint64) for a in (self.row, self.first)
        )
        if not self.source.draws:
            return row, np.full(len(row), 1 / fraction)
        return row, 1 / self.source.of_lacking(key)


@dataclass(frozen=True)
class _Further:
    """For how many positions that are not known each row of a run of a replay stands, and which."""

    times: Servings
    positions: Sequence[_Positions]
    fraction: float

    def weights(self) -> tuple[Keys, Floats] | None:
        """Return the rows, sorted, and what each weighs; None where no source draws its rows."""
        if not any(part.source.draws for part in self.positions):
            return None
        rows, weights = zip(*(part.weights(self.fraction) for part in self.positions), strict=True)
        known, at = np.unique(np.concatenate(rows), return_inverse=True)
        return known, np.bincount(at, np.concatenate(weights), len(known)).astype(np.float64)


def _further(
    dataset: Dataset, run: str, sources: _Sources, chosen: RowFilter, *, served: bool
) -> _Further | None:
    """Return for how many positions that are not known each row of a replay stands.

    None of a run that replays none of the sources. Adds the positions to those that are known.
    """
    catalog = dataset.catalog
    origins = catalog.table("origins", run).sort_by("request")
    origins = origins.filter(pc.is_in(origins["source_dataset"], pa.array(list(sources.datasets))))
    if not origins.num_rows:
        return None
    names = list(
        zip(origins["source_dataset"].to_pylist(), origins["source_run"].to_pylist(), strict=True)
    )
    ranges = RowRanges.of(catalog, run, hooks=sources.hooks)
    request, position = split_key(ranges.start)
    line = Index(origins["request"].to_numpy()).of(request)
    replayed, counts = line >= 0, np.ones(len(line), np.bool_)
    if served and chosen.split is not None:  # the positions of its requests, whoever has the rows
        counts = np.isin(request, chosen.requests_of(run))
    rows, length = ranges.row[replayed], ranges.length[replayed]
    line, counts = line[replayed], counts[replayed]
    requests = origins["source_request"].to_numpy().astype(np.int64)
    start = position_key(requests[line], position[replayed])
    positions, further = [], []
    for name in dict.fromkeys(names):
        is_of = np.array([label == name for label in names])
        source, of_run = sources.of(name), is_of[line]
        begin, end = start[of_run], start[of_run] + length[of_run]
        source.add(dataset, run, requests[is_of], begin, end)
        of_run &= counts
        begin, end = start[of_run], start[of_run] + length[of_run]
        new = difference(union(begin, end), source.known)
        if source.draws and not served:
            new = difference(new, source.hits)
        number, first, after = new.cut(begin, end)
        new_rows = rows[of_run][number] + (first - begin[number])
        new_length = (after - first).astype(np.int64)
        row, at = split_key(new_rows)
        further.append((row, at, at + new_length))
        positions.append(_Positions(source, new_rows, first, new_length))
        source.known = union(
            np.concatenate([source.known.start, begin]), np.concatenate([source.known.stop, end])
        )
    times = Servings(*(np.concatenate(column) for column in zip(*further, strict=True)))
    return _Further(times, positions, inclusion_of(dataset.runs.get(run)))


def _with_further(
    selection: Selection, further: Mapping[str, _Further | None], sources: _Sources, *, served: bool
) -> Selection:
    weights = {run: of.weights() for run in selection.runs if (of := further[run]) is not None}
    dataset = selection.dataset.catalog.genesis.dataset
    counts, draws = [], any(source.draws for source in sources.replayed.values())
    in_union = selection.inclusion() if draws else []
    for n, (shard, count) in enumerate(zip(selection.shards, selection.counts, strict=True)):
        replay, source = further[shard.run], sources.replayed.get((dataset, shard.run))
        if source is not None and source.draws:
            in_union[n] = source.in_union(in_union[n])
        if replay is not None:
            tokens = shard.tokens(["request", "position"])
            request, position = (tokens[name].to_numpy() for name in ("request", "position"))
            new = replay.times.of(request, position)
            new = new if served else np.minimum(new, 1)
            if (known := weights[shard.run]) is not None:
                of_row = values_at(position_key(request, position), *known)
                in_union[n] = np.where(np.isnan(of_row), 1.0, new / of_row)
            new = new if count is None else np.where(count > 0, new, 0)
            count = new.astype(np.min_scalar_type(int(new.max(initial=0))))
        counts.append(count)
    n_kept = sum(
        shard.n_rows if count is None else int(np.count_nonzero(count))
        for shard, count in zip(selection.shards, counts, strict=True)
    )
    return replace(selection, counts=counts, n_kept=n_kept, in_union=in_union or None)
