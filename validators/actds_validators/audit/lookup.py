"""Lookup: what the audit knows of a step, a request and a token id, as arrays.

Small tables against which rows are read; they travel to every worker of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.multiplicity import Servings
from actds.executor import Executor
from actds.format.positions import Index
from actds.format.sampled import Sampled
from actds.format.tables import FLAG_SPECIAL
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit import data
from actds_validators.audit.covariates import (
    LOAD,
    MAX_BITS,
    NO_BITS,
    CovariateDef,
    RunSteps,
    Series,
    Widths,
    columns_of,
    defined,
)

INCLUSION_COLUMN = "inclusion"
MAX_SOURCES = 8
MAX_ROWS = 1 << 19
"""Rows of steps that lost a part that are looked at one by one, about, at most, over all runs."""
MAX_VALUES = 1 << 24
"""The same times the numbers of a row: 4 bytes each."""


class Vocabulary:
    """The token ids that were computed, over all runs; the last of each array is an unknown one's.

    Args:
        counts: how often each id was computed.
    """

    def __init__(self, ids: Ints, counts: Floats, special: Bools) -> None:
        self.index, self.counts = Index(ids), counts
        rarity = -np.log2(counts / max(1.0, float(counts.sum())))
        self.rarity = np.append(rarity, np.nan)
        """Surprise of each token in the run's own counts, in bits."""
        self.special = np.append(special, False)
        bits = np.minimum(np.floor(rarity), MAX_BITS).astype(np.int64)
        self.bits = np.append(bits, NO_BITS)


_ALWAYS = ("request", "prompt_len", "generated_len", "source")


@dataclass(frozen=True)
class RunRows:
    """The requests of a run and the positions that it lost.

    Args:
        columns: of the requests, ``(n_requests,)`` each: tokens of the prompt, positions owed
            (``request_len``), prompt source (``None`` unknown), and what a covariate reads.
    """

    steps: Index
    requests: Index
    columns: dict[str, npt.NDArray[Any]]
    first_step: Ints  # place of the step in which each began; the number of steps where none
    losses: data.StepRanges
    recomputed: Recomputed
    is_thinned: bool  # rows were not drawn, which no other table has: stored ones represent them


@dataclass(frozen=True)
class Lookup(RunRows):
    """What is known of the steps, requests and token ids of one run."""

    run: str
    tick: Ints  # tick of the series, (n_steps,)
    block: Ints  # block of the jackknife, (n_steps,)
    load: npt.NDArray[np.float32]  # load of the step as the cells see it, (n_steps,) float32
    system: dict[str, Floats]  # system covariates of the step, (n_steps,) each
    lossy: Bools
    within: Bools
    of_request: dict[str, Floats | Bools]  # content covariates by name, (n_requests,) each
    request_block: Ints  # block of the jackknife in which each request began, (n_requests,)
    token_slot: Ints  # place among the ids that `strata` counts by block, -1 another, (n_ids + 1,)
    vocabulary: Vocabulary
    has_ids: bool
    lost_ids: Ints  # id of each dropped position, -1 where no readout has it; empty without ids
    servings: Servings
    labels: data.Labels | None
    sampled: Sampled | None
    n_ticks: int
    n_blocks: int

    @cached_property
    def n_slots(self) -> int:
        return int(self.token_slot.max(initial=-1)) + 1


@dataclass(frozen=True)
class Rows:
    """Rows with what the lookup knows of them; every array is a place in the lookup."""

    lookup: Lookup
    step: Ints
    request: Ints
    position: Ints
    token: Ints  # place of the token id, -1 unknown
    weight: Floats | None = None  # 1 over the inclusion of each; None where all are 1

    @classmethod
    def read(cls, lookup: Lookup, batch: pa.RecordBatch | pa.Table) -> tuple[Rows, Bools]:
        """Return the rows of a batch, and whether their step and request are known."""
        step = lookup.steps.of(data.column(batch, "step"))
        request = lookup.requests.of(data.column(batch, "request"))
        token = lookup.vocabulary.index.of(data.column(batch, "token_id"))
        weight = None
        if lookup.is_thinned and INCLUSION_COLUMN in batch.schema.names:
            weight = 1 / batch[INCLUSION_COLUMN].to_numpy(zero_copy_only=False)
        rows = cls(lookup, step, request, data.column(batch, "position"), token, weight)
        return rows, (step >= 0) & (request >= 0)

    @cached_property
    def prefill(self) -> Bools:
        return self.position < self.lookup.columns["prompt_len"][self.request]

    @cached_property
    def special(self) -> Bools:
        return self.lookup.vocabulary.special[self.token]

    @property
    def log_position(self) -> Floats:
        return np.asarray(np.log2(self.position + 1.0), np.float64)

    @property
    def is_special(self) -> Floats | Bools:
        """Return whether each is a special token, NaN where its id is not on record."""
        known = self.token >= 0
        return self.special if known.all() else np.where(known, self.special, np.nan)

    @cached_property
    def rarity(self) -> Floats:
        return self.lookup.vocabulary.rarity[self.token]

    @cached_property
    def entropy(self) -> Floats:
        """Return the entropy over the token after each, in bits; NaN where none was sampled."""
        sampled, numbers = self.lookup.sampled, self.lookup.requests.numbers
        if sampled is None:
            return np.full(len(self.request), np.nan)
        nats = sampled.after("entropy", numbers(self.request), self.position)
        bits: Floats = nats.to_numpy(zero_copy_only=False).astype(np.float64) / np.log(2)
        return bits

    def take(self, some: npt.NDArray[Any]) -> Rows:
        step, request = self.step[some], self.request[some]
        weight = None if self.weight is None else self.weight[some]
        return Rows(self.lookup, step, request, self.position[some], self.token[some], weight)

    def values(self, covariate: CovariateDef) -> Floats | Bools:
        """Return a content covariate, NaN where a row has none; of a share whether it is 1."""
        if covariate.source == "request":
            return self.lookup.of_request[covariate.name][self.request]
        return covariate.typed(covariate.values(self))


@dataclass(frozen=True)
class CellEdges:
    """Cells of load by complexity."""

    load: tuple[float, ...]
    complexity: str  # rarity or, where lost tokens have no ids, position
    edges: tuple[float, ...]
    entropy: tuple[float, ...] = ()  # inner edges; where it is known it comes before the complexity

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.load) + 1, self.n_entropies + len(self.edges) + 1 + self.has_unknown

    @property
    def n_entropies(self) -> int:
        return len(self.entropy) + 1 if self.entropy else 0

    @property
    def words(self) -> str:
        return f"entropy, else {self.complexity}" if self.entropy else self.complexity

    @property
    def has_unknown(self) -> bool:
        return self.complexity == "rarity"

    @property
    def n_cells(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, rows: Rows) -> Ints:
        """Return the cell of each row, ``load * n_complexities + complexity``."""
        lookup, step = rows.lookup, rows.step
        # Once per step of the batch; rows of an unknown one (-1) get any: nobody counts them.
        low = max(0, int(step.min(initial=len(lookup.load) - 1)))
        loads = lookup.load[low : max(low, int(step.max(initial=0))) + 1]
        of_step = np.searchsorted(np.array(self.load, np.float32), loads, side="right")
        load = of_step[np.maximum(step, low) - low]
        value = rows.rarity if self.has_unknown else rows.position
        other = np.searchsorted(np.array(self.edges), value, side="right")
        if self.has_unknown:
            other = np.where(np.isnan(value), len(self.edges) + 1, other)
        if self.entropy:
            known = np.searchsorted(np.array(self.entropy), rows.entropy, side="right")
            other = np.where(np.isnan(rows.entropy), self.n_entropies + other, known)
        return np.asarray(load * self.shape[1] + other, np.int64)


@dataclass(frozen=True)
class Shared:
    """What the lookups of all runs have in common."""

    series: Series
    vocabulary: Vocabulary
    definitions: tuple[CovariateDef, ...]
    token_slot: Ints
    has_ids: bool
    every: int  # of the steps that lost a part, every so many-th is looked into


def make_lookup(
    source: data.RunSource,
    steps: RunSteps,
    rows: RunRows,
    shared: Shared,
    lost_ids: Ints,
    labels: data.Labels | None,
) -> Lookup:
    series = shared.series
    index = series.runs.index(steps.run)
    tick = series.offsets[index] + np.arange(len(steps.step)) // series.steps_per_tick
    block = series.blocks.labels[tick].astype(np.int64)
    sampled = None
    if source.n_rows("sampled"):
        sampled = Sampled(source.table("sampled", ["request", "position", "entropy"]))
    within = np.zeros(len(steps.step), bool)
    within[np.flatnonzero(_partial(steps))[:: shared.every]] = True
    served = source.spans("cache_ref", ["ref_request"])
    known = data.is_known(served["ref_request"])
    referenced = (served[name][known] for name in ("ref_request", "start", "stop"))
    return Lookup(
        **vars(rows),
        run=steps.run,
        tick=tick,
        block=block,
        load=steps.covariates[LOAD].astype(np.float32),
        system=steps.covariates,
        lossy=steps.lost > 0,
        within=within,
        of_request={
            covariate.name: covariate.typed(covariate.values(rows.columns))
            for covariate in shared.definitions
            if covariate.source == "request"
        },
        request_block=block[np.minimum(rows.first_step, len(block) - 1)],
        token_slot=shared.token_slot,
        vocabulary=shared.vocabulary,
        has_ids=shared.has_ids,
        lost_ids=lost_ids,
        servings=Servings(*(values.astype(np.int64) for values in referenced)),
        labels=labels,
        sampled=sampled,
        n_ticks=series.n_ticks,
        n_blocks=series.blocks.n_blocks,
    )


def thinning(runs: list[RunSteps], n_numbers: int) -> int:
    """Return n: every n-th of the steps that lost a part is looked into, to keep to the limits."""
    n_rows = sum(float(run.computed[_partial(run)].sum()) for run in runs)
    return max(1, int(np.ceil(n_rows / min(MAX_ROWS, MAX_VALUES / n_numbers))))


def _partial(steps: RunSteps) -> Bools:
    return (steps.lost > 0) & (steps.lost < steps.computed)


@dataclass(frozen=True)
class WordCounts:
    """Token ids of a part."""

    ids: Ints
    counts: Ints
    special: Ints
    lost: Ints  # numbers of dropped positions, as StepRanges.find has them
    lost_ids: Ints


@dataclass(frozen=True)
class WordPass:
    """Counts the token ids of a part of the table ``tokens`` or ``readouts``."""

    rows: RunRows
    hook: str | None  # whose readouts to count; None to count stored rows

    def __call__(self, part: data.TablePart) -> WordCounts:
        ids, counts, special, lost, lost_ids = ([np.zeros(0, np.int64)] for _ in range(5))
        more = ["flags"] if self.hook is None else ["request", "position", "step", "hook"]
        for batch in part.batches(["token_id", *more]):
            if self.hook is None:
                token = data.column(batch, "token_id")
                special.append(np.unique(token[data.column(batch, "flags") & FLAG_SPECIAL != 0]))
            else:
                lines = batch.filter(pc.equal(batch["hook"], self.hook))
                step = self.rows.steps.of(data.column(lines, "step"))
                request = self.rows.requests.of(data.column(lines, "request"))
                position, token = data.column(lines, "position"), data.column(lines, "token_id")
                at = self.rows.losses.find(step, request, position)
                lost.append(at[at >= 0])
                lost_ids.append(token[at >= 0])
                token = token[self.rows.recomputed.count(step, request, position)]
            known, at = data.places(token)
            ids.append(known)
            counts.append(np.bincount(at, minlength=len(known)))
        return WordCounts(*_counted(ids, counts), *map(np.concatenate, (special, lost, lost_ids)))


def _counted(ids: list[Ints], counts: list[Ints]) -> tuple[Ints, Ints]:
    known, at = data.places(np.concatenate(ids))
    n = np.bincount(at, weights=np.concatenate(counts), minlength=len(known))
    return known, n.astype(np.int64)


def knows_ids(sources: list[data.RunSource]) -> bool:
    """Return whether the ids of every computed token are known, those of lost ones as well."""
    return all(s.hooks or not s.n_rows("drops") for s in sources)


def knows_entropy(sources: list[data.RunSource]) -> bool:
    return any(source.n_rows("sampled") for source in sources)


def read_vocabulary(
    runs: list[tuple[data.RunSource, RunRows]], read: data.Read, *, has_ids: bool
) -> tuple[Vocabulary, list[Ints]]:
    """Return the vocabulary of all runs, and the ids of each run's lost positions."""
    known = n = special = np.zeros(0, np.int64)
    lost_ids = []
    for source, rows in runs:
        ids = np.full(rows.losses.n_positions if has_ids else 0, -1, np.int64)
        for part in read(WordPass(rows, None), source.parts["tokens"]):
            special = np.union1d(special, part.special)
            if not source.hooks:
                known, n = _counted([known, part.ids], [n, part.counts])
        if source.hooks:
            for part in read(WordPass(rows, source.hooks[0]), source.parts["readouts"]):
                known, n = _counted([known, part.ids], [n, part.counts])
                if has_ids:
                    ids[part.lost] = part.lost_ids
        lost_ids.append(ids)
    return Vocabulary(known, n.astype(np.float64), np.isin(known, special)), lost_ids


def prompt_sources(sources: list[data.RunSource]) -> tuple[str, ...]:
    n: Counter[str] = Counter()
    for source in sources:
        names = source.served_requests(["source"])["source"]
        n.update(sorted(name for name in names if name is not None))
    return tuple(name for name, _ in n.most_common()) if len(n) > 1 else ()


def read_rows(source: data.RunSource, steps: RunSteps) -> RunRows:
    """Return the requests and losses of a run.

    Spec: 0.1 section 7.8.
    """
    more = [n for n in columns_of(defined("request")) if n not in (*_ALWAYS, "request_len")]
    columns = source.served_requests([*_ALWAYS, *more])
    numbers, first = np.unique(columns["request"], return_index=True)
    columns["request_len"] = columns["prompt_len"] + np.maximum(columns["generated_len"], 1) - 1
    index, requests = Index(steps.step), Index(numbers)
    drops = source.columns("drops", ["step", "request", "start", "stop"])
    drops |= {"step": index.of(drops["step"]), "request": requests.of(drops["request"])}
    known = (drops["step"] >= 0) & (drops["request"] >= 0) & (drops["stop"] > drops["start"])
    losses = data.StepRanges(*(values[known] for values in drops.values()))
    return RunRows(
        steps=index,
        requests=requests,
        columns={name: values[first] for name, values in columns.items() if name != "request"},
        first_step=_first_steps(source, steps.step, requests),
        losses=losses,
        recomputed=Recomputed(source, index, requests, losses),
        is_thinned=len(source.spans("thinned", [])["start"]) > 0,
    )


def _first_steps(source: data.RunSource, steps: Ints, requests: Index) -> Ints:
    spans = source.columns("spans", ["request", "step"])
    known = data.is_known(spans["step"])
    place = requests.of(spans["request"][known])
    step = np.searchsorted(steps, spans["step"][known].astype(np.int64))
    first = np.full(len(requests), len(steps), np.int64)
    np.minimum.at(first, place[place >= 0], step[place >= 0])
    return first


class Recomputed:
    """Which readouts are of a stored or a dropped row.

    A row that a preemption made the engine compute again has several readouts, and an aborted one
    may have some. Of the requests that had either, only the readouts of stored and of dropped rows
    count, each at its own step. Nearly all requests may have: per position this is four bytes.
    """

    def __init__(
        self, source: data.RunSource, steps: Index, requests: Index, losses: data.StepRanges
    ) -> None:
        given = source.columns("requests", ["request", "n_preemptions"])
        aborted = source.table("spans", ["request", "disposition"])
        aborted = aborted.filter(pc.equal(aborted["disposition"], "aborted"))["request"].to_numpy()
        repeated = np.union1d(given["request"][given["n_preemptions"] > 0], aborted)
        self._losses = losses
        self._is_odd = np.zeros(len(requests) + 1, bool)  # the last for one that is not known
        if source.hooks:
            self._is_odd[requests.of(repeated)] = True
            self._is_odd[-1] = False
        captured = source.spans("captured", ["request"])
        self._length = np.zeros(len(self._is_odd), np.int64)
        np.maximum.at(self._length, requests.of(captured["request"]), captured["stop"])
        self._length[~self._is_odd] = 0
        self._first = np.cumsum(self._length) - self._length
        # The step that stored each position; the last for what is beyond.
        self._step = np.full(int(self._length.sum()) + 1, -1, np.int32)
        if self._is_odd.any():
            for part in source.parts["tokens"]:
                for batch in part.batches(["step", "request", "position"]):
                    request = requests.of(data.column(batch, "request"))
                    odd = self._is_odd[request]
                    at = self._places(request[odd], data.column(batch, "position")[odd])
                    self._step[at] = steps.of(data.column(batch, "step")[odd])
            self._step[-1] = -1

    def count(self, step: Ints, request: Ints, position: Ints) -> Bools:
        counts = (step >= 0) & (request >= 0)
        odd = np.flatnonzero(self._is_odd[request] & counts)
        at = odd[self._step[self._places(request[odd], position[odd])] != step[odd]]
        if len(at):
            counts[at] = self._losses.find(step[at], request[at], position[at]) >= 0
        return counts

    def _places(self, request: Ints, position: Ints) -> Ints:
        inside = position < self._length[request]
        return np.where(inside, self._first[request] + position, len(self._step) - 1)


# where the readouts lie -----------------------------------------------------------------------

TAIL = 0.01
"""Share of the rows in a tail."""
SAMPLE = 1 << 16
"""Rows of a hook in the sample, about, at most."""
MAX_PARTS, MAX_PART_ROWS = 16, 1 << 20
"""Parts of all runs that the sample is of, evenly spaced, where all have more rows than that."""
MIN_SAMPLE = 200
"""Fewer rows of a hook have no tail."""


@dataclass(frozen=True)
class Scale:
    """Where readouts lie, ``(n_hooks, n_values)`` each; NaN where there are too few."""

    middle: Floats  # sums are about it: the median of the sample, after the pass the mean of all
    median: Floats
    low: Floats  # a hundredth of the rows lies below
    high: Floats


@dataclass(frozen=True)
class _SamplePass:
    hooks: tuple[str, ...]
    widths: Widths
    every: int

    def __call__(self, part: data.TablePart) -> list[npt.NDArray[np.float32]]:
        samples: list[list[npt.NDArray[np.float32]]] = [[] for _ in self.hooks]
        seen = [0] * len(self.hooks)
        for batch in part.batches(["hook", *self.widths.columns]):
            for number, hook in enumerate(self.hooks):
                at = np.flatnonzero(pc.equal(batch["hook"], hook).to_numpy(False))
                chosen = at[-seen[number] % self.every :: self.every]
                seen[number] += len(at)
                if len(chosen):
                    some = self.widths.read(batch.take(pa.array(chosen)))
                    samples[number].append(some.astype(np.float32))
        empty = np.zeros((self.widths.n_values, 0), np.float32)
        return [np.concatenate([empty, *of_hook], axis=1) for of_hook in samples]


def scale_of(
    parts: Sequence[data.TablePart], hooks: tuple[str, ...], widths: Widths, executor: Executor
) -> Scale:
    """Return the scale of the readouts in some parts, from an even sample of them.

    The sample knows nothing of the losses: it is of all computed rows.
    """
    some = [part for part in parts if part.n_rows]
    n_parts = len(some) if sum(part.n_rows for part in some) <= MAX_PART_ROWS else MAX_PARTS
    at = np.unique(np.linspace(0, len(some) - 1, min(n_parts, len(some))).astype(int))
    chosen = [some[k] for k in at.tolist()]
    n_rows = sum(part.n_rows for part in chosen) // max(1, len(hooks))
    sample = _SamplePass(hooks, widths, max(1, n_rows // SAMPLE))
    drawn = list(executor.map(sample, chosen))
    shape = len(hooks), widths.n_values
    median, low, high = (np.full(shape, np.nan) for _ in range(3))
    for number in range(len(hooks)):
        values = [of_part[number] for of_part in drawn]
        for k, row in enumerate(np.concatenate(values, axis=1) if values else ()):
            x = np.sort(row[~np.isnan(row)].astype(np.float64))
            if len(x):
                median[number, k] = np.median(x)
            if len(x) >= MIN_SAMPLE and x[0] < x[-1]:
                low[number, k], high[number, k] = np.quantile(x, [TAIL, 1 - TAIL])
    # Not the mean: fourth powers about one that a few outliers moved would lose all digits.
    return Scale(np.nan_to_num(median), median, low, high)
