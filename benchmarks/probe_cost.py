"""What linear probes cost a generated token: operations and bytes on paper, the line through timed
steps, and the report. ``bench_probes.py`` asks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from model_weights import Attention, Weights

from actds.text import counted, format_nbytes
from actds_writers.ipc.messages import HookSpec

Way = Literal["none", "again", "packed", "naive"]
"""``none``: the engine alone. ``again``: the same, once more, which shows what noise is.
``packed``: as ``actds write --probes`` runs them. ``naive``: a Python hook, with a product and a
copy for each probe."""
Clock = Literal["wall", "cpu"]
RING_MIB, SHARD_NBYTES = 32, 64 << 20
"""Sizes of the harvests of packed probes."""
ONE_PERCENT = 0.01
LEVEL = 0.95
N_RESAMPLES = 2000


@dataclass(frozen=True, order=True)
class Arm:
    """A way to run probes, and how many at each hook."""

    way: Way
    n_probes: int = 0


@dataclass(frozen=True)
class TimingTask:
    """What an engine is asked to time.

    Args:
        arms: in any order; rounds shuffle them.
        folder: existing folder for datasets, which whoever asks removes.
    """

    model: Path
    engine_args: Mapping[str, Any]
    hooks: tuple[HookSpec, ...]
    arms: tuple[Arm, ...]
    batches: tuple[int, ...]
    n_rounds: int
    folder: Path
    seed: int = 0

    @property
    def is_eager(self) -> bool:
        return self.engine_args.get("enforce_eager") is True


@dataclass(frozen=True)
class Timed:
    """The median decode step of one arm in one round.

    Args:
        wall: seconds from the engine's call to its return.
        cpu: CPU seconds of the engine's process meanwhile, which other programs do not lengthen;
            where the model runs on a GPU, they say little.
    """

    arm: Arm
    batch: int
    round: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Timing:
    timed: tuple[Timed, ...]
    facts: dict[str, str]


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ProbeFit:
    """The line of one way at one batch, by one clock.

    Args:
        step_s: median step of the engine alone.
        ratios: median of ``T(N) / T(0) - 1`` over the rounds, by N.
        s: fixed cost, in steps.
        m: cost of a probe at each hook, in steps.
    """

    way: Way
    clock: Clock
    batch: int
    n_rounds: int
    step_s: float
    ratios: dict[int, float]
    s: Interval
    m: Interval
    noise: Interval

    @property
    def floor(self) -> float:
        return max(abs(self.noise.low), abs(self.noise.high))

    @property
    def is_measured(self) -> bool:
        """Return whether the cost of a probe differs from 0, and that of the most from noise."""
        return self.m.low > 0 and self.m.value * max(self.ratios) > self.floor

    def n_for(self, share: float, fixed: float = 0.0) -> float | None:
        """Return the N that costs a share of a step above ``fixed``.

        ``None`` where the cost of a probe was not measured, or ``fixed`` exceeds the share.
        """
        if not self.is_measured or fixed >= share:
            return None
        return (share - fixed) / self.m.value

    def words(self) -> str:
        if not self.is_measured:
            largest = max(self.ratios)
            below = max(self.floor, self.m.high * largest)
            return f"not measurable: {counted(largest, 'probe')} cost less than {below:.1%}"
        beyond = f"1 % more: {self.n_for(ONE_PERCENT):,.0f} probes"
        whole = self.n_for(ONE_PERCENT, self.s.value)
        if whole is not None:
            return f"1 % in all: {whole:,.0f} probes; {beyond}"
        surely = "s alone exceeds it" if self.s.low > ONE_PERCENT else "s alone may exceed it"
        return f"1 % in all: none, {surely}; {beyond}"

    def as_json(self) -> dict[str, Any]:
        """Return the line as JSON; an N that there is not is null."""
        return {
            **asdict(self),
            "ratios": [{"n_probes": n, "ratio": ratio} for n, ratio in sorted(self.ratios.items())],
            "is_measured": self.is_measured,
            "n_for_1_percent": self.n_for(ONE_PERCENT, self.s.value),
            "n_for_1_percent_more": self.n_for(ONE_PERCENT),
            "words": self.words(),
        }


def counts_timed(n_probes: int, *, restarts: bool) -> tuple[int, ...]:
    """Return the N to time: 0, powers of 4 and the N asked for; three where each is an engine."""
    if restarts:
        return tuple(sorted({0, n_probes // 8, n_probes}))
    return tuple(sorted({n for n in (0, 1, 16, 64, 256) if n < n_probes} | {n_probes}))


def fit(
    timed: Iterable[Timed], way: Way, batch: int, clock: Clock = "wall", *, seed: int = 0
) -> ProbeFit:
    """Return the line of least squares through the medians over the rounds.

    Intervals are percentiles of lines through resampled rounds: a round has every arm, so what
    slows the machine for a while slows all of them. ``T(0)`` is the mean of the engine alone, which
    each round has twice.

    Args:
        timed: rounds that have both and every N of the way; others are left out.
    """
    rounds: dict[int, dict[Arm, float]] = defaultdict(dict)
    for step in timed:
        if step.batch == batch:
            rounds[step.round][step.arm] = getattr(step, clock)
    counts = sorted({arm.n_probes for arm in set().union(*rounds.values()) if arm.way == way})
    wanted = [Arm("none"), Arm("again"), *(Arm(way, n) for n in counts)]
    whole = [by_arm for by_arm in rounds.values() if all(arm in by_arm for arm in wanted)]
    if len(counts) < 2 or not whole:
        raise ValueError(f"{way}: {len(counts)} N in {len(whole)} whole rounds")
    seconds = np.array([[by_arm[arm] for arm in wanted] for by_arm in whole])
    alone = seconds[:, :2].mean(axis=1)
    ratios = seconds[:, 2:] / alone[:, None] - 1
    again = seconds[:, 1] / seconds[:, 0] - 1
    drawn = np.random.default_rng(seed).integers(len(whole), size=(N_RESAMPLES, len(whole)))
    medians = np.median(ratios, axis=0)
    m, s = np.polyfit(counts, medians, 1)
    all_m, all_s = np.polyfit(counts, np.median(ratios[drawn], axis=1).T, 1)
    return ProbeFit(
        way=way,
        clock=clock,
        batch=batch,
        n_rounds=len(whole),
        step_s=float(np.median(alone)),
        ratios=dict(zip(counts, medians.tolist(), strict=True)),
        s=_interval(float(s), all_s),
        m=_interval(float(m), all_m),
        noise=_interval(float(np.median(again)), np.median(again[drawn], axis=1)),
    )


def _interval(value: float, resampled: np.ndarray) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(value, float(low), float(high))


PROBE_ITEMSIZE = 4
"""Probes and scores are float32, whatever the rows are."""


@dataclass(frozen=True)
class StepBytes:
    batch: int
    weights: float
    kv: float
    probes: int
    scores: int

    @property
    def ratio(self) -> float:
        return (self.probes + self.scores) / (self.weights + self.kv)


@dataclass(frozen=True)
class ProbeArithmetic:
    n_probes: int
    widths: Sequence[int]
    weights: Weights
    attention: Attention
    context: int
    batches: Sequence[int]

    @property
    def steps(self) -> list[StepBytes]:
        of_probe = PROBE_ITEMSIZE * self.n_probes
        return [
            StepBytes(
                batch=batch,
                weights=self.weights.step_nbytes(batch),
                kv=batch * self.attention.kv_nbytes,
                probes=of_probe * sum(self.widths),
                scores=of_probe * len(self.widths) * batch,
            )
            for batch in self.batches
        ]

    @property
    def forward_flops(self) -> float:
        return 2 * self.weights.n_active + self.attention.flops

    @property
    def probe_flops(self) -> int:
        return 2 * self.n_probes * sum(self.widths)

    @property
    def ratio(self) -> float:
        """Return operations of the probes over those of the forward pass: the floor."""
        return self.probe_flops / self.forward_flops

    def as_json(self) -> dict[str, Any]:
        known = self.attention.unknown is None
        return {
            "n_probes": self.n_probes,
            "n_hooks": len(self.widths),
            "context": self.context,
            "n_params": self.weights.n_params,
            "n_active": self.weights.n_active,
            "n_experts": self.weights.n_experts,
            "experts_per_token": self.weights.top_k,
            "forward_flops": self.forward_flops,
            "attention_flops": self.attention.flops if known else None,
            "attention_unknown": self.attention.unknown,
            "probe_flops": self.probe_flops,
            "ratio": self.ratio,
            "ratio_of_one_probe": self.ratio / max(1, self.n_probes * len(self.widths)),
            "steps": [
                {**vars(step), "kv": step.kv if known else None, "ratio": step.ratio}
                for step in self.steps
            ],
        }


WIDTH = 48


def log_bars(bars: Mapping[str, float], width: int = WIDTH) -> list[str]:
    """Return the axis, then a line for each bar, in percent; no line without a value above 0.

    The axis has whole decades, from the one below the smallest value to the one above the largest.
    """
    values = [percent for percent in bars.values() if percent > 0]
    if not values:
        return []
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    figures = [f"{n:.2g} %" if 0 < n < 10 else f"{n:.0f} %" for n in bars.values()]
    label, room = max(map(len, bars)), max(map(len, figures))

    def place(decade: float) -> int:
        return round(width * (decade - low) / (high - low))

    axis = [" "] * (width + 8)
    for decade in range(low, high + 1, -(-8 * (high - low) // width)):
        words = f"{10.0**decade:g}"
        axis[place(decade) : place(decade) + len(words)] = words
    lines = [f"{'':<{label}}  {'':>{room}}  {''.join(axis).rstrip()}"]
    for (name, percent), figure in zip(bars.items(), figures, strict=True):
        filled = max(1, place(math.log10(percent))) if percent > 0 else 0
        lines.append(f"{name:<{label}}  {figure:>{room}}  {'#' * filled}".rstrip())
    return lines


LABEL = 9


@dataclass(frozen=True)
class ProbeCost:
    """What probes cost."""

    hooks: tuple[HookSpec, ...]
    arithmetic: ProbeArithmetic
    fits: tuple[ProbeFit, ...] = ()
    facts: dict[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        measured: dict[str, Any] | None = None
        if self.facts is not None:
            measured = {"ran": self.facts, "fits": [fit.as_json() for fit in self.fits]}
        hooks = [hook.name for hook in self.hooks]
        return {"probes": {**self.arithmetic.as_json(), "hooks": hooks, "measured": measured}}

    def lines(self) -> list[str]:
        return [
            *self._paper(),
            *self._clock(),
            "",
            f"{self.arithmetic.n_probes:,} probes, in % of a decode step, log scale:",
            *log_bars(self._bars()),
        ]

    def _paper(self) -> list[str]:
        paper, weights = self.arithmetic, self.arithmetic.weights
        experts = f", {weights.top_k} of {weights.n_experts} experts" if weights.n_experts else ""
        attention = f"attention over {counted(paper.context, 'position')}"
        if paper.attention.unknown is not None:
            attention = f"attention not counted: {paper.attention.unknown}"
        probes = counted(paper.n_probes, "probe")
        probes += f" at each of {counted(len(self.hooks), 'hook')}"
        of_one = paper.ratio / (paper.n_probes * len(self.hooks))
        active = f"{weights.n_active:,.0f} of {weights.n_params:,}"
        floor = f"{_flops(paper.probe_flops)} = {paper.ratio:.3%}"
        lines = [
            _line("probes", f"{probes}, float32, in one product with the rows"),
            _line("forward", f"{_flops(paper.forward_flops)} a generated token"),
            _line("", f"{active} weights{experts}; {attention}"),
            _line("floor", f"{floor} of it; one probe {of_one:.1e}"),
        ]
        for number, step in enumerate(paper.steps):
            moved = f"{format_nbytes(step.weights)} weights + {format_nbytes(step.kv)} KV"
            more = f"{format_nbytes(step.probes)} probes + {format_nbytes(step.scores)} scores"
            words = f"batch {step.batch}: {moved}; {more}: {step.ratio:.3%}"
            lines.append(_line("" if number else "bytes", words))
        return lines

    def _clock(self) -> list[str]:
        if self.facts is None:
            return [_line("clock", "not measured")]
        ran = self.facts
        graphs = "" if ran["cudagraphs"] == "none" else f", CUDA graphs {ran['cudagraphs']}"
        machine = f"{ran['engine']}, {ran['device']}, {ran['mode']}{graphs}, {ran['dtype']}, "
        machine += f"threads: {ran['threads']} of {ran['cores']} cores"
        lines = [
            _line("measured", f"{machine}; positions {ran['positions']}"),
            _line("", "T(N) / T(0) = 1 + s + m N, with 95 % intervals"),
        ]
        for clock, batch in dict.fromkeys((line.clock, line.batch) for line in self.fits):
            fits = [line for line in self.fits if (line.clock, line.batch) == (clock, batch)]
            lines += [
                "",
                f"batch {batch}, {_CLOCKS[clock]}: step {1e3 * fits[0].step_s:.3g} ms, "
                f"{counted(fits[0].n_rounds, 'round')}; twice the engine alone differs by "
                f"{_percent(fits[0].noise)}",
            ]
            for line in fits:
                costs = f"s = {_percent(line.s)}   m = {_percent(line.m, 3)}"
                lines += [_line(line.way, costs), _line("", line.words())]
        return lines

    def _bars(self) -> dict[str, float]:
        paper = self.arithmetic
        bars = {"operations": 100 * paper.ratio}
        bars |= {f"bytes, batch {step.batch}": 100 * step.ratio for step in paper.steps}
        for line in self.fits:
            measured, words = line.ratios.get(paper.n_probes), ""
            if measured is None:
                measured, words = line.s.value + line.m.value * paper.n_probes, ", by its line"
            if abs(measured) < line.floor:
                words += ", in the noise"
            label = f"{line.way}, batch {line.batch}, {_CLOCKS[line.clock]}{words}"
            bars[label] = 100 * measured
        return bars


_CLOCKS: dict[Clock, str] = {"wall": "by the clock", "cpu": "CPU time"}


def fitted(hooks: tuple[HookSpec, ...], arithmetic: ProbeArithmetic, timing: Timing) -> ProbeCost:
    # On a GPU the engine's process waits for it, and its CPU time is not what a step takes.
    clocks: tuple[Clock, ...] = ("wall", "cpu") if timing.facts["device"] == "cpu" else ("wall",)
    ways: tuple[Way, ...] = ("packed", "naive")
    fits = tuple(
        fit(timing.timed, way, batch, clock)
        for clock, batch, way in product(clocks, arithmetic.batches, ways)
    )
    return ProbeCost(hooks, arithmetic, fits, timing.facts)


def _line(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


def _flops(flops: float) -> str:
    power = max(0, min(4, int(math.log10(max(flops, 1)) // 3)))
    return f"{flops / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}FLOP"


def _percent(interval: Interval, digits: int = 1) -> str:
    return f"{interval.value:+.{digits}%} [{interval.low:+.{digits}%}, {interval.high:+.{digits}%}]"
