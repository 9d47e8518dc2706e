"""Series: what was computed and lost over time, step by step or a few steps at a time.

Second stage of the audit: from the census alone, before any token is looked at. Imports `sources`
and the statistics of load, blocks and events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_validators.audit.sources import RunSource
from actds_validators.statistics.events import (
    correlation_steps,
    count_events,
    effective_events,
)
from actds_validators.statistics.intervals import Blocks, blocks
from actds_validators.statistics.shift import ewma

__all__ = ["LOAD_STEPS", "MAX_TICKS", "RunSteps", "Series", "make_series", "read_steps"]

MAX_TICKS = 1 << 17
"""Longest series; a longer run is looked at several steps at a time."""
LOAD_STEPS = (8, 32, 128)
"""Time constants of the load, in steps."""
SYSTEM = {
    "batch_tokens": ("tokens in the step", "tokens"),
    "load_8": ("tokens per step, last 8 steps", "tokens"),
    "load_32": ("tokens per step, last 32 steps", "tokens"),
    "load_128": ("tokens per step, last 128 steps", "tokens"),
    "requests": ("requests in the step", "requests"),
    "waiting": ("requests waiting", "requests"),
    "max_seq_len": ("longest context of the step", "tokens"),
}
"""Covariates of the serving system: label and unit."""

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
        load: mean of ``load_8`` of the tick's tokens.
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
    found = source.columns(
        "select step::bigint step, t_ns, (captured_tokens + dropped_tokens)::double computed, "
        "dropped_tokens::double lost, batch_tokens::double batch_tokens, "
        "n_requests::double requests, waiting::double waiting, max_seq_len::double max_seq_len "
        "from steps order by step"
    )
    batch = found["batch_tokens"]
    label = np.zeros(len(batch), np.int64)
    loads = {f"load_{n}": ewma(batch, label, n) for n in LOAD_STEPS}
    covariates = {
        name: loads[name] if name in loads else found[name].astype(np.float64) for name in SYSTEM
    }
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
    system = {name: summed([_sums(r, r.covariates[name]) for r in runs]) for name in SYSTEM}
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
        load=system["load_8"][0] / computed,
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
