"""What probes cost by the clock: steps timed with and without them, and a line through the times.

``T(N) / T(0) = 1 + s + m N``: ``T(0)`` is a decode step of the engine alone, ``s`` what is paid for
being there with no probe, ``m`` what each probe adds. An engine times the steps; this module knows
what was timed, and fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actds.text import counted
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

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, order=True)
class Arm:
    """A way to run probes, and how many at each hook."""

    way: Way
    n_probes: int = 0


@dataclass(frozen=True)
class TimingTask:
    """What an engine is asked to time.

    Args:
        hooks: where the probes read, with the width of each.
        arms: in any order; rounds shuffle them.
        batches: requests that decode together.
        n_rounds: times that each arm is timed at each batch.
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
        """Return whether the options ask for an engine without compiled graphs."""
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
    """What an engine timed.

    Args:
        facts: what ran, by name: versions, device, mode, threads.
    """

    timed: tuple[Timed, ...]
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Interval:
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ProbeFit:
    """The line of one way at one batch, by one clock.

    Args:
        batch: requests that decode together.
        step_s: median step of the engine alone.
        ratios: median of ``T(N) / T(0) - 1`` over the rounds, by N.
        s: fixed cost, in steps.
        m: cost of a probe at each hook, in steps.
        noise: what the engine alone costs more than itself.
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
        """Return the share of a step below which nothing was measured."""
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
        """Return which N costs 1 % of a step, as a sentence."""
        if not self.is_measured:
            largest = max(self.ratios)
            below = max(self.floor, self.m.high * largest)
            return f"not measurable: {counted(largest, 'probe')} cost less than {below:.1%}"
        more = self.n_for(ONE_PERCENT)
        assert more is not None
        said = f"1 % more: {more:,.0f} probes"
        whole = self.n_for(ONE_PERCENT, self.s.value)
        if whole is not None:
            return f"1 % in all: {whole:,.0f} probes; {said}"
        surely = "s alone exceeds it" if self.s.low > ONE_PERCENT else "s alone may exceed it"
        return f"1 % in all: none, {surely}; {said}"

    def as_json(self) -> dict[str, Any]:
        """Return the line as JSON; an N that there is not is null."""
        return {
            "way": self.way,
            "clock": self.clock,
            "batch": self.batch,
            "n_rounds": self.n_rounds,
            "step_s": self.step_s,
            "ratios": [{"n_probes": n, "ratio": ratio} for n, ratio in sorted(self.ratios.items())],
            "s": vars(self.s),
            "m": vars(self.m),
            "noise": vars(self.noise),
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

    Raises:
        ValueError: fewer than two N, or no whole round.
    """
    rounds: dict[int, dict[Arm, float]] = {}
    for one in timed:
        if one.batch == batch:
            rounds.setdefault(one.round, {})[one.arm] = getattr(one, clock)
    counts = sorted({arm.n_probes for found in rounds.values() for arm in found if arm.way == way})
    wanted = [Arm("none"), Arm("again"), *(Arm(way, n) for n in counts)]
    whole = [found for found in rounds.values() if all(arm in found for arm in wanted)]
    if len(counts) < 2 or not whole:
        raise ValueError(f"{way}: {len(counts)} N in {len(whole)} whole rounds")
    seconds = np.array([[found[arm] for arm in wanted] for found in whole])
    alone = seconds[:, :2].mean(axis=1)
    ratios = seconds[:, 2:] / alone[:, None] - 1
    again = seconds[:, 1] / seconds[:, 0] - 1
    n = np.array(counts, np.float64)
    drawn = np.random.default_rng(seed).integers(len(whole), size=(N_RESAMPLES, len(whole)))
    s, m = _line(n, np.median(ratios, axis=0))
    all_s, all_m = _line(n, np.median(ratios[drawn], axis=1))
    return ProbeFit(
        way=way,
        clock=clock,
        batch=batch,
        n_rounds=len(whole),
        step_s=float(np.median(alone)),
        ratios=dict(zip(counts, np.median(ratios, axis=0).tolist(), strict=True)),
        s=_interval(float(s), all_s),
        m=_interval(float(m), all_m),
        noise=_interval(float(np.median(again)), np.median(again[drawn], axis=1)),
    )


def _line(n: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return intercept and slope of least squares, of ``y`` ``(..., len(n))``."""
    centred = n - n.mean()
    slope = (y * centred).sum(axis=-1) / (centred**2).sum()
    return y.mean(axis=-1) - slope * n.mean(), slope


def _interval(value: float, resampled: Floats) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(value, float(low), float(high))
