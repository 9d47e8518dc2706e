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
import pyarrow.compute as pc

from actds.dataset.multiplicity import Servings
from actds.format.positions import Index
from actds.format.sampled import Sampled
from actds.format.tables import FLAG_SPECIAL
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.census import RunSteps, Series
from actds_validators.audit.covariates import (
    LOAD,
    MAX_BITS,
    NO_BITS,
    CovariateDef,
    columns_of,
    defined,
)
from actds_validators.audit.data import Labels, Part, Read, RunSource, StepRanges, column, is_known

MAX_SOURCES = 8
MAX_ROWS = 1 << 19
"""Rows of steps that lost a part that are looked at one by one, about, at most, over all runs."""
MAX_VALUES = 1 << 24
"""The same times the numbers of a row: 4 bytes each."""


class Vocabulary:
    """The token ids that were computed, over all runs."""

    def __init__(self, ids: Ints, counts: Floats, special: Bools) -> None:
        self._index = Index(ids)
        self._counts = counts
        rarity = -np.log2(counts / max(1.0, float(counts.sum())))
        self._rarity = np.append(rarity, np.nan)
        self._special = np.append(special, False)
        bits = np.minimum(np.floor(rarity), MAX_BITS).astype(np.int64)
        self._bits = np.append(bits, NO_BITS)

    def __len__(self) -> int:
        return len(self._index)

    def ids(self, at: Ints) -> Ints:
        return self._index.numbers(at)

    def counts(self) -> Floats:
        return self._counts

    def places(self, token_id: npt.NDArray[np.integer]) -> Ints:
        """Return the place of each id, -1 (the last of each array) for an unknown one."""
        return self._index.of(token_id)

    def rarity(self, at: Ints) -> Floats:
        """Return the surprise of each token in the run's own counts, in bits; NaN unknown."""
        return self._rarity[at]

    def special(self, at: Ints) -> Bools:
        """Return whether each token is special; an unknown one is not."""
        return self._special[at]

    def bits(self, at: Ints) -> Ints:
        """Return the rarity in whole bits, `MAX_BITS` for more, `NO_BITS` unknown."""
        return self._bits[at]


@dataclass(frozen=True)
class Lookup:
    """What is known of the steps, requests and token ids of one run.

    Args:
        steps: places of the steps that computed something, of which the arrays below speak.
        tick: tick of the series, ``(n_steps,)``.
        block: block of the jackknife, ``(n_steps,)``.
        load: load of the step as the cells see it, ``(n_steps,)`` float32.
        system: system covariates of the step, ``(n_steps,)`` each.
        requests: places of the requests, of which the arrays below speak.
        request_len: positions owed, ``(n_requests,)``.
        source_names: prompt source of each request, None unknown.
        of_request: content covariates of the requests by name, ``(n_requests,)`` each.
        request_block: block of the jackknife in which each request began, ``(n_requests,)``.
        token_slot: place of each token id among those of `strata` that are counted block by
            block, -1 another, ``(n_ids + 1,)``.
        lost_ids: token id of each dropped position, -1 where its readout is missing; empty
            without ids.
    """

    run: str
    steps: Index
    tick: Ints
    block: Ints
    load: npt.NDArray[np.float32]
    system: dict[str, Floats]
    lossy: Bools
    within: Bools
    requests: Index
    prompt_len: Ints
    request_len: Ints
    source_names: list[str | None]
    of_request: dict[str, Floats | Bools]
    request_block: Ints
    token_slot: Ints
    vocabulary: Vocabulary
    has_ids: bool
    losses: StepRanges
    recomputed: Recomputed
    lost_ids: Ints
    servings: Servings
    labels: Labels | None
    sampled: Sampled | None
    n_ticks: int
    n_blocks: int

    def entropy_after(self, request: Ints, position: Ints) -> Floats:
        """Return the entropy over the token after some positions, in bits; NaN unknown."""
        if self.sampled is None:
            return np.full(len(request), np.nan)
        nats = self.sampled.after("entropy", self.requests.numbers(request), position)
        found: Floats = nats.to_numpy(zero_copy_only=False).astype(np.float64) / np.log(2)
        return found

    @cached_property
    def n_slots(self) -> int:
        return int(self.token_slot.max(initial=-1)) + 1


@dataclass(frozen=True)
class Rows:
    """Rows with what the lookup knows of them; every array is a place in the lookup.

    Args:
        token: place of the token id, -1 unknown.
    """

    lookup: Lookup
    step: Ints
    request: Ints
    position: Ints
    token: Ints

    @cached_property
    def prefill(self) -> Bools:
        return self.position < self.lookup.prompt_len[self.request]

    @cached_property
    def special(self) -> Bools:
        return self.lookup.vocabulary.special(self.token)

    @cached_property
    def special_or_unknown(self) -> Floats | Bools:
        """Return whether each is a special token, NaN where its id is not on record."""
        known = self.token >= 0
        return self.special if known.all() else np.where(known, self.special, np.nan)

    @cached_property
    def rarity(self) -> Floats:
        return self.lookup.vocabulary.rarity(self.token)

    @cached_property
    def entropy(self) -> Floats:
        """Return the entropy over the token after each, in bits; NaN where none was sampled."""
        return self.lookup.entropy_after(self.request, self.position)

    def take(self, some: npt.NDArray[Any]) -> Rows:
        arrays = self.step, self.request, self.position, self.token
        return Rows(self.lookup, *(held[some] for held in arrays))

    def values(self, one: CovariateDef) -> Floats | Bools:
        """Return a content covariate, NaN where a row has none; of a share whether it is 1."""
        if one.source == "request":
            return self.lookup.of_request[one.name][self.request]
        return one.typed(one.values(self))


@dataclass(frozen=True)
class CellEdges:
    """Cells of load by complexity.

    Args:
        complexity: ``rarity`` or, where lost tokens have no ids, ``position``.
        entropy: inner edges of the entropy over the next token, which comes before the
            complexity where it is known; none without.
    """

    load: tuple[float, ...]
    complexity: str
    edges: tuple[float, ...]
    entropy: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of loads and of complexities; the last is that of unknown tokens."""
        return len(self.load) + 1, self.n_entropies + len(self.edges) + 1 + self.has_unknown

    @property
    def n_entropies(self) -> int:
        return len(self.entropy) + 1 if self.entropy else 0

    @property
    def words(self) -> str:
        return f"entropy, else {self.complexity}" if self.entropy else self.complexity

    @property
    def has_unknown(self) -> bool:
        """Return whether a token may have no complexity: a rarity needs its id."""
        return self.complexity == "rarity"

    @property
    def n_cells(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, lookup: Lookup, step: Ints, request: Ints, position: Ints, token: Ints) -> Ints:
        """Return the cell of each row, ``load * n_complexities + complexity``."""
        # Once per step of the batch; rows of an unknown one (-1) get any: nobody counts them.
        low = max(0, int(step.min(initial=len(lookup.load) - 1)))
        loads = lookup.load[low : max(low, int(step.max(initial=0))) + 1]
        of_step = np.searchsorted(np.array(self.load, np.float32), loads, side="right")
        load = of_step[np.maximum(step, low) - low]
        value = lookup.vocabulary.rarity(token) if self.has_unknown else position
        other = np.searchsorted(np.array(self.edges), value, side="right")
        if self.has_unknown:
            other = np.where(np.isnan(value), len(self.edges) + 1, other)
        if self.entropy:
            bits = lookup.entropy_after(request, position)
            known = np.searchsorted(np.array(self.entropy), bits, side="right")
            other = np.where(np.isnan(bits), self.n_entropies + other, known)
        found: Ints = load * self.shape[1] + other
        return found


def make_lookup(
    source: RunSource,
    steps: RunSteps,
    series: Series,
    rows: RunRows,
    vocabulary: Vocabulary,
    lost_ids: Ints,
    definitions: Sequence[CovariateDef],
    labels: Labels | None,
    token_slot: Ints,
    *,
    has_ids: bool,
    every: int,
) -> Lookup:
    index = series.runs.index(steps.run)
    tick = series.offsets[index] + np.arange(len(steps.step)) // series.steps_per_tick
    block = series.blocks.labels[tick].astype(np.int64)
    return Lookup(
        run=steps.run,
        steps=rows.steps,
        tick=tick,
        block=block,
        load=steps.covariates[LOAD].astype(np.float32),
        system=steps.covariates,
        lossy=steps.lost > 0,
        within=_within(steps, every),
        requests=rows.requests,
        prompt_len=rows.columns["prompt_len"],
        request_len=rows.columns["request_len"],
        source_names=rows.columns["source"].tolist(),
        of_request={
            one.name: one.typed(one.values(rows.columns))
            for one in definitions
            if one.source == "request"
        },
        request_block=block[np.minimum(rows.first_step, len(block) - 1)],
        token_slot=token_slot,
        vocabulary=vocabulary,
        has_ids=has_ids,
        losses=rows.losses,
        lost_ids=lost_ids,
        recomputed=rows.recomputed,
        servings=_servings(source),
        labels=labels,
        sampled=_sampled(source),
        n_ticks=series.n_ticks,
        n_blocks=series.blocks.n_blocks,
    )


def _sampled(source: RunSource) -> Sampled | None:
    if not source.n_rows("sampled"):
        return None
    return Sampled(source.table("sampled", ["request", "position", "entropy"]))


def thinning(runs: list[RunSteps], n_numbers: int) -> int:
    """Return n: every n-th of the steps that lost a part is looked into, to keep to the limits."""
    n_rows = sum(float(run.computed[_partial(run)].sum()) for run in runs)
    return max(1, int(np.ceil(n_rows / min(MAX_ROWS, MAX_VALUES / n_numbers))))


def _partial(steps: RunSteps) -> Bools:
    return (steps.lost > 0) & (steps.lost < steps.computed)


def _within(steps: RunSteps, every: int) -> Bools:
    chosen = np.zeros(len(steps.step), bool)
    chosen[np.flatnonzero(_partial(steps))[::every]] = True
    return chosen


def _servings(source: RunSource) -> Servings:
    found = source.spans("cache_ref", ["ref_request"])
    there = is_known(found["ref_request"])
    request, start, stop = (found[name][there] for name in ("ref_request", "start", "stop"))
    return Servings(request.astype(np.int64), start, stop)


MAX_DENSE = 1 << 22


@dataclass(frozen=True)
class WordCounts:
    """Token ids of a part.

    Args:
        lost: numbers of dropped positions, as ``StepRanges.find`` has them.
    """

    ids: Ints
    counts: Ints
    special: Ints
    lost: Ints
    lost_ids: Ints


@dataclass(frozen=True)
class WordPass:
    """Counts the token ids of a part of the table ``tokens`` or ``readouts``.

    Args:
        hook: whose readouts to count; ``None`` to count stored rows.
    """

    rows: RunRows
    hook: str | None

    def __call__(self, part: Part) -> WordCounts:
        counts = _IdCounts()
        special: list[Ints] = []
        lost: list[Ints] = []
        lost_ids: list[Ints] = []
        if self.hook is None:
            for batch in part.batches(["token_id", "flags"]):
                ids = column(batch, "token_id")
                counts.count(ids)
                marked = column(batch, "flags") & FLAG_SPECIAL != 0
                special.append(np.unique(ids[marked]))
        else:
            for batch in part.batches(["request", "position", "token_id", "step", "hook"]):
                mine = batch.filter(pc.equal(batch["hook"], self.hook))
                step = self.rows.steps.of(column(mine, "step"))
                request = self.rows.requests.of(column(mine, "request"))
                position, token = column(mine, "position"), column(mine, "token_id")
                kept = self.rows.recomputed.count(step, request, position)
                counts.count(token[kept])
                at = self.rows.losses.find(step, request, position)
                lost.append(at[at >= 0])
                lost_ids.append(token[at >= 0])
        return WordCounts(
            *counts.total(), np.unique(_joined(special)), _joined(lost), _joined(lost_ids)
        )


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])


class _IdCounts:
    """Counts by id: in an array by id, or one by one where ids are beyond it."""

    def __init__(self) -> None:
        self._dense = np.zeros(0, np.int64)
        self._ids, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def count(self, ids: Ints) -> None:
        low = ids[ids < MAX_DENSE]
        self._grow(np.bincount(low, minlength=len(self._dense)))
        if len(low) < len(ids):
            self._add_sparse(*np.unique(ids[ids >= MAX_DENSE], return_counts=True))

    def add(self, ids: Ints, counts: Ints) -> None:
        """Add counts of ids, rising."""
        n = int(np.searchsorted(ids, MAX_DENSE))
        if n:
            found = np.zeros(max(len(self._dense), int(ids[n - 1]) + 1), np.int64)
            found[ids[:n]] = counts[:n]
            self._grow(found)
        if n < len(ids):
            self._add_sparse(ids[n:], counts[n:])

    def total(self) -> tuple[Ints, Ints]:
        low = np.flatnonzero(self._dense)
        return np.concatenate([low, self._ids]), np.concatenate([self._dense[low], self._counts])

    def _grow(self, found: Ints) -> None:
        found[: len(self._dense)] += self._dense
        self._dense = found

    def _add_sparse(self, ids: Ints, counts: Ints) -> None:
        both = np.concatenate([self._ids, ids])
        self._ids, at = np.unique(both, return_inverse=True)
        total = np.zeros(len(self._ids), np.int64)
        np.add.at(total, at.reshape(-1), np.concatenate([self._counts, counts]))
        self._counts = total


def knows_ids(sources: list[RunSource]) -> bool:
    """Return whether the ids of every computed token are known, those of lost ones as well."""
    return all(s.hooks or not s.n_rows("drops") for s in sources)


def knows_entropy(sources: list[RunSource]) -> bool:
    return any(source.n_rows("sampled") for source in sources)


def read_vocabulary(
    runs: list[tuple[RunSource, RunRows]], read: Read, *, has_ids: bool
) -> tuple[Vocabulary, list[Ints]]:
    """Return the vocabulary of all runs, and the ids of each run's lost positions."""
    counts, special = _IdCounts(), _IdCounts()
    lost_ids = []
    for source, rows in runs:
        ids = np.full(rows.losses.n_positions if has_ids else 0, -1, np.int64)
        for part in read(WordPass(rows, None), source.parts["tokens"]):
            special.count(part.special)
            if not source.hooks:
                counts.add(part.ids, part.counts)
        if source.hooks:
            for part in read(WordPass(rows, source.hooks[0]), source.parts["readouts"]):
                counts.add(part.ids, part.counts)
                if has_ids:
                    ids[part.lost] = part.lost_ids
        lost_ids.append(ids)
    known, n = counts.total()
    return Vocabulary(known, n.astype(np.float64), np.isin(known, special.total()[0])), lost_ids


def prompt_sources(sources: list[RunSource]) -> tuple[str, ...]:
    """Return the prompt sources, the most used first; none when there is only one."""
    n: Counter[str] = Counter()
    for source in sources:
        names = source.served_requests(["source"])["source"]
        n.update(sorted(name for name in names if name is not None))
    return tuple(name for name, _ in n.most_common()) if len(n) > 1 else ()


_ALWAYS = ("request", "prompt_len", "generated_len", "source")


@dataclass(frozen=True)
class RunRows:
    """The requests of a run and the positions that it lost.

    Args:
        columns: of the requests, ``(n_requests,)`` each: tokens of the prompt, positions owed
            (``request_len``), prompt source (``None`` unknown), and what a covariate reads.
        first_step: place of the step in which each began, ``(n_requests,)``; the number of steps
            where it never did.
    """

    steps: Index
    requests: Index
    columns: dict[str, npt.NDArray[Any]]
    first_step: Ints
    losses: StepRanges
    recomputed: Recomputed


def read_rows(source: RunSource, steps: RunSteps) -> RunRows:
    """Return the requests and losses of a run.

    Spec: 0.1 section 7.8.
    """
    derived = ("request_len",)
    more = [n for n in columns_of(defined("request")) if n not in (*_ALWAYS, *derived)]
    found = source.served_requests([*_ALWAYS, *more])
    numbers, first = np.unique(found["request"], return_index=True)
    found["request_len"] = found["prompt_len"] + np.maximum(found["generated_len"], 1) - 1
    index, requests = Index(steps.step), Index(numbers)
    losses = _losses(source, index, requests)
    return RunRows(
        steps=index,
        requests=requests,
        columns={name: values[first] for name, values in found.items() if name != "request"},
        first_step=_first_steps(source, steps.step, requests),
        losses=losses,
        recomputed=Recomputed(source, index, requests, losses),
    )


def _first_steps(source: RunSource, steps: Ints, requests: Index) -> Ints:
    found = source.columns("spans", ["request", "step"])
    there = is_known(found["step"])
    place = requests.of(found["request"][there])
    step = np.searchsorted(steps, found["step"][there].astype(np.int64))
    first = np.full(len(requests), len(steps), np.int64)
    np.minimum.at(first, place[place >= 0], step[place >= 0])
    return first


def _losses(source: RunSource, steps: Index, requests: Index) -> StepRanges:
    found = source.columns("drops", ["step", "request", "start", "stop"])
    step, request = steps.of(found["step"]), requests.of(found["request"])
    known = (step >= 0) & (request >= 0) & (found["stop"] > found["start"])
    return StepRanges(step[known], request[known], found["start"][known], found["stop"][known])


class Recomputed:
    """Which readouts are of a stored or a dropped row.

    A row that a preemption made the engine compute again has several readouts, and an aborted one
    may have some. Of the requests that had either, only the readouts of stored and of dropped rows
    count, each at its own step. Nearly all requests may have: per position this is four bytes.
    """

    def __init__(
        self, source: RunSource, steps: Index, requests: Index, losses: StepRanges
    ) -> None:
        given = source.columns("requests", ["request", "n_preemptions"])
        aborted = source.table("spans", ["request", "disposition"])
        aborted = aborted.filter(pc.equal(aborted["disposition"], "aborted"))["request"].to_numpy()
        odd = np.union1d(given["request"][given["n_preemptions"] > 0], aborted)
        self._losses = losses
        self._is_odd = np.zeros(len(requests) + 1, bool)  # the last for one that is not known
        if source.hooks:
            self._is_odd[requests.of(odd)] = True
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
                    request = requests.of(column(batch, "request"))
                    mine = self._is_odd[request]
                    at = self._places(request[mine], column(batch, "position")[mine])
                    self._step[at] = steps.of(column(batch, "step")[mine])
            self._step[-1] = -1

    def count(self, step: Ints, request: Ints, position: Ints) -> Bools:
        """Return whether each readout counts; those of an unknown step or request do not."""
        found = (step >= 0) & (request >= 0)
        odd = np.flatnonzero(self._is_odd[request] & found)
        at = odd[self._step[self._places(request[odd], position[odd])] != step[odd]]
        if len(at):
            found[at] = self._losses.find(step[at], request[at], position[at]) >= 0
        return found

    def _places(self, request: Ints, position: Ints) -> Ints:
        inside = position < self._length[request]
        return np.where(inside, self._first[request] + position, len(self._step) - 1)
