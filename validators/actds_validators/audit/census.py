"""Census: what became of every position, and what was computed and lost over time.

``actds validate`` accounts position by position; here counts and sums of positions and of their
squares stand for the sets, so that a hundred million rows need no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.dataset.fates import NEVER, FateCounts, fate_counts
from actds.format import tables
from actds.format.positions import Index, position_key, union
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.covariates import LOAD, columns_of, defined
from actds_validators.audit.data import (
    Read,
    RunSource,
    TablePart,
    column,
    is_known,
    numbers,
    places,
)
from actds_validators.audit.result import Accounting, Finding, WaterfallStep
from actds_validators.statistics.intervals import Blocks, blocks
from actds_validators.statistics.series import correlation_steps, count_events, effective_events

_COUNTED = ("step", "t_ns", "captured_tokens", "dropped_tokens")
MAX_TICKS = 1 << 17
"""Longest series; a longer run is looked at several steps at a time."""


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run that computed a token, in order.

    Args:
        covariates: values of the system covariates, ``(n_steps,)`` each.
    """

    run: str
    step: Ints
    t_ns: Ints
    computed: Floats
    lost: Floats
    covariates: dict[str, Floats]


@dataclass(frozen=True)
class Series:
    """All runs one after the other, as ticks of one or more steps.

    Args:
        t_s: seconds since the first step of the first run, without the time between runs.
        system: system covariate to sums ``(2, n_ticks)``: x and its square over the tokens; and
            of x over the lost ones, ``(3, n_ticks)`` in all.
        offsets: first tick of each run, and the number of ticks.
        effective_events: events of equal size that a mean over the lost tokens rests on.
    """

    runs: tuple[str, ...]
    run: Ints
    t_s: Floats
    seconds: Floats
    computed: Floats
    lost: Floats
    load: Floats
    system: dict[str, Floats]
    blocks: Blocks
    offsets: Ints
    steps_per_tick: int
    n_events: int
    effective_events: float
    n_steps: int
    n_lost_steps: int
    n_partial_steps: int

    @property
    def n_ticks(self) -> int:
        return len(self.run)

    @property
    def share(self) -> Floats:
        return np.divide(
            self.lost, self.computed, out=np.zeros(self.n_ticks), where=self.computed > 0
        )


def read_steps(source: RunSource) -> RunSteps:
    """Return the steps of a run that computed something new; the load counts the others, too."""
    definitions = defined("step")
    more = [name for name in columns_of(definitions) if name not in _COUNTED]
    columns = source.columns("steps", [*_COUNTED, *more])
    order = np.argsort(columns["step"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    lost = columns["dropped_tokens"].astype(np.float64)
    computed = columns["captured_tokens"] + lost
    floats = {name: np.asarray(columns[name], np.float64) for name in columns_of(definitions)}
    covariates = {
        covariate.name: np.asarray(covariate.values(floats), np.float64)
        for covariate in definitions
    }
    kept = computed > 0
    return RunSteps(
        source.run,
        columns["step"][kept],
        columns["t_ns"][kept],
        computed[kept],
        lost[kept],
        {name: values[kept] for name, values in covariates.items()},
    )


def make_series(runs: list[RunSteps], n_blocks: int) -> Series | None:
    """Return the series of some runs, ``None`` when no token was computed."""
    runs = [run for run in runs if len(run.step)]
    n_steps = sum(len(run.step) for run in runs)
    if not n_steps:
        return None
    width = -(-n_steps // MAX_TICKS)
    starts = [np.arange(0, len(run.step), width) for run in runs]
    labels = np.repeat(np.arange(len(runs)), [len(s) for s in starts])

    def summed(values: list[Floats]) -> Floats:
        parts = [np.add.reduceat(v, s, axis=-1) for v, s in zip(values, starts, strict=True)]
        return np.concatenate(parts, axis=-1)

    computed, lost = summed([r.computed for r in runs]), summed([r.lost for r in runs])
    system = {
        name: summed([_sums(r, r.covariates[name]) for r in runs]) for name in runs[0].covariates
    }
    t_s, seconds = _clock(runs, starts)
    share = np.divide(lost, computed)
    n_events, effective = _events(lost, share, labels)
    return Series(
        runs=tuple(run.run for run in runs),
        run=labels,
        t_s=t_s,
        seconds=seconds,
        computed=computed,
        lost=lost,
        load=system[LOAD][0] / computed,
        system=system,
        blocks=blocks(len(labels), labels, share, n_blocks, min(20, n_blocks)),
        offsets=np.cumsum([0, *(len(s) for s in starts)]),
        steps_per_tick=width,
        n_events=n_events,
        effective_events=effective,
        n_steps=n_steps,
        n_lost_steps=sum(int((r.lost > 0).sum()) for r in runs),
        n_partial_steps=sum(int(((r.lost > 0) & (r.lost < r.computed)).sum()) for r in runs),
    )


def _events(lost: Floats, share: Floats, labels: Ints) -> tuple[int, float]:
    """Return the independent loss events, and how many of equal size they are worth.

    The correlation is that of the share lost: lost tokens go with the size of the steps as well.
    Where most ticks lose something there are no gaps to count: then as many as there are
    correlation times.
    """
    if not lost.any():
        return 0, 0.0
    time = correlation_steps(share, labels)
    if np.count_nonzero(lost) <= len(lost) / 2:
        gap = math.ceil(time)
        return count_events(lost, labels, gap), effective_events(lost, labels, gap)
    n_events = max(1, int(len(lost) / time))
    return n_events, float(n_events)


def _sums(run: RunSteps, x: Floats) -> Floats:
    return np.stack([run.computed * x, run.computed * x * x, run.lost * x])


def _clock(runs: list[RunSteps], starts: list[Ints]) -> tuple[Floats, Floats]:
    """Return seconds since the first step, runs put one behind the other, and tick lengths."""
    times, lengths, base = [], [], 0.0
    for run, start in zip(runs, starts, strict=True):
        t = (np.maximum.accumulate(run.t_ns[start]) - run.t_ns[0]) / 1e9
        last = (max(int(run.t_ns[-1]), int(run.t_ns[0])) - int(run.t_ns[0])) / 1e9
        end = max(last, float(t[-1]))
        times.append(base + t)
        lengths.append(np.diff(t, append=end))
        base += end
    return np.concatenate(times), np.concatenate(lengths)


MAX_FINDINGS = 20


@dataclass(frozen=True)
class _KeySums:
    """Sums over ranges of positions by a key, which stand for the sets of positions.

    Equal sums over the same key are equal sets but for cancellations that no fault makes by chance.

    Args:
        sums: ``(3, n)``, over [start, stop) of 1, of 2p + 1 and of 3p^2 + 3p + 1, which are
            differences of stop, its square and its cube; modulo 2^64.
    """

    keys: Ints
    sums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Ints, sums: npt.NDArray[np.uint64]) -> _KeySums:
        known, at = np.unique(keys, return_inverse=True)
        total = np.zeros((len(sums), len(known)), np.uint64)
        for row, values in zip(total, sums, strict=True):
            np.add.at(row, at.reshape(-1), values)
        return cls(known, total)

    @classmethod
    def of_ranges(cls, keys: Ints, start: Ints, stop: Ints) -> _KeySums:
        a, b = start.astype(np.uint64), stop.astype(np.uint64)
        return cls.of(keys, np.stack([b - a, b * b - a * a, b * b * b - a * a * a]))

    @classmethod
    def of_counts(cls, keys: Ints, n: npt.NDArray[Any]) -> _KeySums:
        some = n != 0
        return cls.of(keys[some], n[some].astype(np.int64).astype(np.uint64)[np.newaxis])

    @classmethod
    def together(cls, parts: Sequence[_KeySums]) -> _KeySums:
        return cls.of(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.sums for part in parts], axis=1),
        )

    def counts(self) -> _KeySums:
        return _KeySums(self.keys, self.sums[:1])

    def differing(self, other: _KeySums) -> list[tuple[int, int, int]]:
        """Return key and both numbers of positions where the sums differ, the first ones."""
        keys = np.union1d(self.keys, other.keys)
        sides = np.zeros((2, len(self.sums), len(keys)), np.uint64)
        for side, part in enumerate((self, other)):
            sides[side][:, np.searchsorted(keys, part.keys)] = part.sums
        wrong = np.flatnonzero((sides[0] != sides[1]).any(axis=0))[:MAX_FINDINGS]
        n = sides[:, 0].astype(np.int64)
        return [(int(keys[k]), int(n[0, k]), int(n[1, k])) for k in wrong]


def _sum_rows(part: TablePart) -> tuple[_KeySums, _KeySums]:
    by_request = [_KeySums.of_ranges(*np.zeros((3, 0), np.int64))]
    by_step = [by_request[0].counts()]
    for batch in part.batches(["request", "step", "position"]):
        request, step = column(batch, "request"), column(batch, "step")
        p = column(batch, "position").astype(np.uint64)
        keys, at = places(request)
        n, first, second = (_exact(at, values, len(keys)) for values in (None, p, p * p))
        sums = np.stack([n, 2 * first + n, 3 * second + 3 * first + n])
        by_request.append(_KeySums(keys, sums))
        keys, at = places(step)
        by_step.append(_KeySums(keys, _exact(at, None, len(keys))[np.newaxis]))
    return _KeySums.together(by_request), _KeySums.together(by_step)


def _exact(at: Ints, values: npt.NDArray[np.uint64] | None, size: int) -> npt.NDArray[np.uint64]:
    """Return the sums of whole numbers by place, modulo 2^64; of 1 each without numbers.

    Of numbers up to 2^38 a batch adds up below 2^53, where floats are exact; larger ones go by
    halves of 32 bits.
    """
    if values is None:
        return np.bincount(at, minlength=size).astype(np.uint64)
    if not len(values) or int(values.max()) < 1 << 38:
        return np.bincount(at, weights=values, minlength=size).astype(np.uint64)
    low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
    sums = (np.bincount(at, weights=half, minlength=size).astype(np.uint64) for half in (low, high))
    return next(sums) + (next(sums) << np.uint64(32))


def account_run(
    source: RunSource, read: Read = map
) -> tuple[FateCounts, Counter[str], list[Finding]]:
    """Return positions by fate and reason, other counts, and what does not add up.

    The fate is the disposition, or ``never computed``.
    """
    table = source.table("spans", ["request", "start", "stop", "step", "disposition", "reason"])
    spans = numbers(table)
    length = spans["stop"] - spans["start"]
    is_computed = is_known(spans["step"])
    # Section 7.2: an aborted position without a step is owed, and no step computed it.
    never = (spans["disposition"] == "aborted") & ~is_computed
    fates = fate_counts(table)
    steps = source.columns("steps", ["step", "batch_tokens", *_FATES.values()])
    counts = Counter(
        requests=source.n_rows("requests"),
        steps=source.n_rows("steps"),
        recomputed=int(steps["recomputed_tokens"].sum()),
        unresolved=_unresolved(source) - fates["cache_ref", tables.EXTERNAL],
        never_computed_requests=len(np.unique(spans["request"][never & (length > 0)])),
    )
    return fates, counts, _findings(source, spans, is_computed, steps, read)


_FATES = {
    "captured": "captured_tokens",
    "dropped": "dropped_tokens",
    "aborted": "aborted_tokens",
    "filtered": "filtered_tokens",
    "undelivered": "undelivered_tokens",
    "recomputed": "recomputed_tokens",
    "rejected": "rejected_tokens",
}
"""Columns of the steps by what became of a token."""


def _findings(
    source: RunSource,
    spans: dict[str, npt.NDArray[Any]],
    is_computed: Bools,
    steps: dict[str, npt.NDArray[Any]],
    read: Read,
) -> list[Finding]:
    """Return where positions by request, or numbers of tokens by step and in all, are not equal."""

    def ranges(disposition: str) -> _KeySums:
        chosen = spans["disposition"] == disposition
        return _KeySums.of_ranges(*(spans[n][chosen] for n in ("request", "start", "stop")))

    def counted(*names: str) -> _KeySums:
        return _KeySums.of_counts(steps["step"], np.sum([steps[name] for name in names], axis=0))

    parts = list(read(_sum_rows, source.parts["tokens"]))
    nothing = _KeySums.of_ranges(*np.zeros((3, 0), np.int64))
    rows = _KeySums.together([nothing, *(by_request for by_request, _ in parts)])
    n_rows = _KeySums.together([nothing.counts(), *(by_step for _, by_step in parts)])
    drops = source.columns("drops", ["request", "step", "start", "stop"])
    every = _KeySums.of_ranges(spans["request"], spans["start"], spans["stop"])
    dropped = _KeySums.of_ranges(drops["request"], drops["start"], drops["stop"])
    n_dropped = _KeySums.of_counts(drops["step"], drops["stop"] - drops["start"])
    owed, batch, became = (
        _owed(source, spans, is_computed),
        counted("batch_tokens"),
        _FATES.values(),
    )
    census, of_census = f"census/{source.run}", "the census'"
    shards, losses = f"shards (run {source.run}) rows of", f"losses/{source.run} drops of"
    captured, lost = counted("captured_tokens"), counted("dropped_tokens")
    partition = "spans that partition the request's positions"
    compared = (
        ("E404", f"{census}/spans request", every, owed, partition),
        ("E406", f"{shards} request", rows, ranges("captured"), f"{of_census} captured positions"),
        ("E408", f"{losses} request", dropped, ranges("dropped"), f"{of_census} dropped positions"),
        ("E412", f"{shards} step", n_rows, captured, f"{of_census} captured_tokens"),
        ("E408", f"{losses} step", n_dropped, lost, f"{of_census} dropped_tokens"),
        ("E409", f"{census}/steps step", batch, counted(*became), "the sum of what became of them"),
    )
    findings = [
        _finding(code, f"{place} {key}", n, n_wanted, expected)
        for code, place, got, wanted, expected in compared
        for key, n, n_wanted in got.differing(wanted)
    ]
    length = spans["stop"] - spans["start"]
    for word in ("aborted", "filtered", "undelivered"):  # of these no row tells the step
        n = int(length[(spans["disposition"] == word) & is_computed].sum())
        n_wanted = int(steps[_FATES[word]].sum())
        if n != n_wanted:
            place = f"{census}/spans {word} in all: steps"
            findings.append(_finding("E409", place, n, n_wanted, f"{of_census} {word}_tokens"))
    return findings


def _finding(code: str, place: str, got: int, wanted: int, expected: str) -> Finding:
    return Finding(
        code=code,
        place=place,
        got=f"{got} tokens" if got != wanted else f"{got} tokens, at other positions",
        expected=f"{wanted}, {expected}",
        severity="error",
    )


def _owed(source: RunSource, spans: dict[str, npt.NDArray[Any]], is_computed: Bools) -> _KeySums:
    """Return the positions that each request owes, from 0 on.

    Section 7.1: a request that an engine computed past its end owes that as well.
    """
    requests = source.columns(
        "requests", ["request", "prompt_len", "generated_len", "finish_reason"]
    )
    known, at = np.unique(requests["request"], return_inverse=True)
    reached = np.zeros(len(known) + 1, np.int64)
    place = Index(known).of(spans["request"][is_computed])
    np.maximum.at(reached, place, spans["stop"][is_computed])  # the last for requests of no line
    reached[-1] = 0
    n = requests["prompt_len"] + np.maximum(requests["generated_len"], 1) - 1
    n = np.maximum(n, reached[at.reshape(-1)])
    n[np.isin(requests["finish_reason"].astype(str), tables.UNSERVED)] = 0
    some = n > 0
    return _KeySums.of_ranges(requests["request"][some], np.zeros_like(n[some]), n[some])


def _unresolved(source: RunSource) -> int:
    """Return how many referenced positions no captured span holds."""
    served, kept = source.spans("cache_ref", ["ref_request"]), source.spans("captured", ["request"])
    stored = union(*(position_key(kept["request"], kept[name]) for name in ("start", "stop")))
    known = is_known(served["ref_request"])
    request = served["ref_request"][known].astype(np.int64)
    before, up_to = (
        stored.n_below(position_key(request, served[name][known])) for name in ("start", "stop")
    )
    return int((served["stop"] - served["start"]).sum() - (up_to - before).sum())


def accounting(sources: list[RunSource], read: Read) -> Accounting:
    spans: FateCounts = Counter()
    counts: Counter[str] = Counter()
    findings = []
    for source in sources:
        fates, more, wrong = account_run(source, read)
        spans += fates
        counts += more
        findings += wrong
    total = sum(spans.values())
    by = Counter[str]()
    for (disposition, _), n in spans.items():
        by[disposition] += n
    computed = by["captured"] + by["dropped"] + by["aborted"]
    waterfall = [WaterfallStep(name="positions", n_positions=total, share=1.0 if total else 0.0)]
    for name in ("cache_ref", "filtered", "undelivered", NEVER, "aborted", "dropped", "captured"):
        for (disposition, reason), n in sorted(spans.items(), key=lambda item: str(item[0])):
            if disposition == name and n:
                waterfall.append(
                    WaterfallStep(name=name, reason=reason, n_positions=n, share=n / total)
                )
    return Accounting(
        positions=total,
        computed=computed,
        captured=by["captured"],
        cache_ref=by["cache_ref"],
        dropped=by["dropped"],
        aborted=by["aborted"],
        never_computed=by[NEVER],
        never_computed_requests=counts["never_computed_requests"],
        filtered=by["filtered"],
        undelivered=by["undelivered"],
        recomputed=counts["recomputed"],
        unresolved=counts["unresolved"],
        external=spans["cache_ref", tables.EXTERNAL],
        requests=counts["requests"],
        steps=counts["steps"],
        loss_share=(by["dropped"] + by["aborted"]) / computed if computed else 0.0,
        waterfall=waterfall,
        findings=findings,
    )
