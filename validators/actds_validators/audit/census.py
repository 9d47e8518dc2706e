"""Series: what was computed and lost over time, step by step or a few steps at a time.

Second stage of the audit: from the census alone, before any token is looked at. Imports `sources`
and the statistics of load, blocks and events.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_validators.audit.covariates import LOAD, columns_of, defined
from actds_validators.audit.data import RunSource
from actds_validators.audit.result import Accounting, Finding, WaterfallStep
from actds_validators.statistics.events import (
    correlation_steps,
    count_events,
    effective_events,
)
from actds_validators.statistics.intervals import Blocks, blocks

__all__ = [
    "MAX_TICKS",
    "RunSteps",
    "Series",
    "account_run",
    "accounting",
    "make_series",
    "read_steps",
]

MAX_TICKS = 1 << 17
"""Longest series; a longer run is looked at several steps at a time."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run that computed a token, in order.

    Args:
        run: the run.
        step: number of each step, ``(n_steps,)``.
        t_ns: when it was scheduled.
        computed: captured and dropped tokens.
        lost: dropped tokens.
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
        runs: the runs, in order.
        run: label of each tick, ``(n_ticks,)``.
        t_s: seconds since the first step of the first run, without the time between runs.
        seconds: until the next tick; 0 for a run's last one.
        computed: tokens.
        lost: tokens.
        load: mean load of the tick's tokens.
        system: system covariate to sums ``(2, n_ticks)``: x and its square over the tokens; and
            of x over the lost ones, ``(3, n_ticks)`` in all.
        blocks: of the jackknife.
        offsets: first tick of each run, and the number of ticks.
        steps_per_tick: at most.
        n_events: independent loss events.
        effective_events: events of equal size that a mean over the lost tokens rests on.
        n_steps: steps in all.
        n_lost_steps: steps that lost a token.
        n_partial_steps: steps that lost some of their tokens.
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
        """Return the length of the series."""
        return len(self.run)

    @property
    def share(self) -> Floats:
        """Return the share lost of each tick."""
        return np.divide(
            self.lost, self.computed, out=np.zeros(self.n_ticks), where=self.computed > 0
        )


def read_steps(source: RunSource) -> RunSteps:
    """Return the steps of a run that computed something new; the load counts the others, too."""
    definitions = defined("step")
    columns = "".join(f", {name}::double {name}" for name in columns_of(definitions))
    found = source.columns(
        "select step::bigint step, t_ns, (captured_tokens + dropped_tokens)::double computed, "
        f"dropped_tokens::double lost{columns} from steps order by step"
    )
    covariates = {one.name: np.asarray(one.values(found), np.float64) for one in definitions}
    kept = found["computed"] > 0
    return RunSteps(
        source.run,
        found["step"][kept],
        found["t_ns"][kept],
        found["computed"][kept],
        found["lost"][kept],
        {name: values[kept] for name, values in covariates.items()},
    )


def make_series(runs: list[RunSteps], n_blocks: int) -> Series | None:
    """Return the series of some runs, ``None`` when no token was computed.

    Args:
        runs: the steps of each.
        n_blocks: blocks of the jackknife at most.
    """
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
    found = max(1, int(len(lost) / time))
    return found, float(found)


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
Counts = Counter[tuple[str, str | None]]

NEVER = "never computed"
# Section 7.2: an aborted position without a step is owed, and no step computed it.
_FATE = f"case when disposition = 'aborted' and step is null then '{NEVER}' else disposition end"
_LENGTH = "stop::bigint - start"
# Sums over [start, stop) of 1, of 2p + 1 and of 3p^2 + 3p + 1 are differences of stop, its square
# and its cube.
_SPAN = (
    f"sum({_LENGTH}) n, sum(stop::hugeint * stop - start::hugeint * start) s1, "
    "sum(stop::hugeint * stop * stop - start::hugeint * start * start) s2"
)
_ROW = (
    "count(*) n, 2 * sum(position) + count(*) s1, "
    "3 * sum(position::ubigint * position) + 3 * sum(position) + count(*) s2"
)
_REQUEST = "n, n * n s1, n * n * n s2"  # of one span from 0 to n
# Section 7.1: a request that an engine computed past its end owes that as well.
_OWED = (
    "select request, case when finish_reason = 'skipped' then 0::hugeint else greatest("
    "prompt_len::hugeint + greatest(generated_len, 1) - 1, coalesce(reached, 0)) end n "
    "from requests left join (select request, max(stop) reached from spans "
    "where step is not null group by request) using (request)"
)
_NO_SUMS = "0 s1, 0 s2"
# Each: code, what differs, left query, right query, expected. Equal counts and sums over the same
# key are equal sets but for cancellations that no fault makes by chance.
_CHECKS = (
    (
        "E404",
        "census/{run}/spans request",
        f"select request k, {_SPAN} from spans group by request",
        f"select request k, {_REQUEST} from ({_OWED}) where n > 0",
        "spans that partition the request's positions",
    ),
    (
        "E406",
        "shards (run {run}) rows of request",
        f"select request k, {_ROW} from tokens group by request",
        f"select request k, {_SPAN} from spans where disposition = 'captured' group by request",
        "the census' captured positions",
    ),
    (
        "E408",
        "losses/{run} drops of request",
        f"select request k, {_SPAN} from drops group by request",
        f"select request k, {_SPAN} from spans where disposition = 'dropped' group by request",
        "the census' dropped positions",
    ),
    (
        "E412",
        "shards (run {run}) rows of step",
        f"select step k, count(*) n, {_NO_SUMS} from tokens group by step",
        f"select step k, captured_tokens n, {_NO_SUMS} from steps where captured_tokens > 0",
        "the census' captured_tokens",
    ),
    (
        "E408",
        "losses/{run} drops of step",
        f"select step k, sum({_LENGTH}) n, {_NO_SUMS} from drops group by step",
        f"select step k, dropped_tokens n, {_NO_SUMS} from steps where dropped_tokens > 0",
        "the census' dropped_tokens",
    ),
    (
        "E409",
        "census/{run}/steps step",
        f"select step k, batch_tokens n, {_NO_SUMS} from steps",
        "select step k, captured_tokens::bigint + dropped_tokens + aborted_tokens "
        f"+ filtered_tokens + recomputed_tokens n, {_NO_SUMS} from steps",
        "the sum of what became of them",
    ),
    *(
        (
            "E409",
            f"census/{{run}}/spans {word} in all:",
            f"select 'steps' k, coalesce(sum({_LENGTH}), 0) n, {_NO_SUMS} from spans "
            f"where disposition = '{word}' and step is not null",
            f"select 'steps' k, coalesce(sum({word}_tokens), 0) n, {_NO_SUMS} from steps",
            f"the census' {word}_tokens",
        )
        for word in ("aborted", "filtered")
    ),
)


def account_run(source: RunSource) -> tuple[Counts, Counter[str], list[Finding]]:
    """Return positions by fate and reason, other counts, and what does not add up.

    The fate is the disposition, or ``never computed``.
    """
    spans: Counts = Counter()
    for disposition, reason, n in source.rows(
        f"select {_FATE} fate, reason, sum(stop::bigint - start) from spans group by all"
    ):
        spans[disposition, reason] += int(n)
    [never] = source.one(
        f"select count(distinct request) from spans where {_FATE} = '{NEVER}' and stop > start"
    )
    [requests, steps, recomputed] = source.one(
        "select (select count(*) from requests), (select count(*) from steps), "
        "(select coalesce(sum(recomputed_tokens), 0) from steps)"
    )
    [unresolved] = source.one(
        "with served as (select ref_request, start, stop from spans where disposition = "
        "'cache_ref'), kept as (select request, start, stop from spans where disposition = "
        "'captured') select (select coalesce(sum(stop::bigint - start), 0) from served) - "
        "coalesce(sum(greatest(0, least(s.stop, k.stop)::bigint "
        "- greatest(s.start, k.start)::bigint)), 0) "
        "from served s join kept k on s.ref_request = k.request"
    )
    counts = Counter(
        requests=int(requests),
        steps=int(steps),
        recomputed=int(recomputed),
        unresolved=int(unresolved),
        never_computed_requests=int(never),
    )
    return spans, counts, [f for check in _CHECKS for f in _differing(source, *check)]


def accounting(spans: Counts, counts: Counter[str], findings: list[Finding]) -> Accounting:
    """Return the section over all runs."""
    total = sum(spans.values())
    by = Counter[str]()
    for (disposition, _), n in spans.items():
        by[disposition] += n
    computed = by["captured"] + by["dropped"] + by["aborted"]
    waterfall = [WaterfallStep(name="positions", n_positions=total, share=1.0 if total else 0.0)]
    for name in ("cache_ref", "filtered", NEVER, "aborted", "dropped", "captured"):
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
        recomputed=counts["recomputed"],
        unresolved=counts["unresolved"],
        requests=counts["requests"],
        steps=counts["steps"],
        loss_share=(by["dropped"] + by["aborted"]) / computed if computed else 0.0,
        waterfall=waterfall,
        findings=findings,
    )


def _differing(
    source: RunSource, code: str, place: str, left: str, right: str, expected: str
) -> list[Finding]:
    rows = source.rows(
        f"select coalesce(l.k, r.k) k, coalesce(l.n, 0), coalesce(r.n, 0) from ({left}) l "
        f"full join ({right}) r on l.k = r.k where "
        + " or ".join(f"coalesce(l.{c}, 0) <> coalesce(r.{c}, 0)" for c in ("n", "s1", "s2"))
        + f" order by k limit {MAX_FINDINGS}"
    )
    return [
        Finding(
            code=code,
            place=f"{place.format(run=source.run)} {key}",
            got=f"{got} tokens" if got != wanted else f"{got} tokens, at other positions",
            expected=f"{wanted}, {expected}",
            severity="error",
        )
        for key, got, wanted in rows
    ]
