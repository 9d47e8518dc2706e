"""The command ``actds plan --probes``: what linear probes cost a generated token."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.readouts import DEFAULT_PROJECTIONS, MAX_WIDTH
from actds.format.schema import DType
from actds.text import counted, format_nbytes
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.config import MIB, ProbeSettings, keywords_of
from actds_writers.engine_protocol import find_engine
from actds_writers.ipc.messages import HookSpec
from actds_writers.model_folder import model_config
from actds_writers.sizing.needs import Geometry, Sizes, memory_bound
from actds_writers.sizing.probe_fit import (
    RING_MIB,
    SHARD_NBYTES,
    Arm,
    Clock,
    Interval,
    ProbeFit,
    Timed,
    Timing,
    TimingTask,
    Way,
    counts_timed,
    fit,
)
from actds_writers.sizing.weights import Weights, read_weights

PROBE_ITEMSIZE = 4
"""Probes and scores are float32, whatever the rows are."""


@dataclass(frozen=True)
class Attention:
    """Attention of a generated token over the positions before it.

    Args:
        flops: operations of queries with keys and of weights with values, all layers.
        kv_nbytes: bytes of keys and values that are read for it.
        unknown: why both are not known, and then 0; ``None`` where they are.
    """

    flops: float
    kv_nbytes: float
    unknown: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], context: int, itemsize: int) -> Attention:
        """Return the attention at a context.

        Args:
            context: positions that a token attends to, its own included.
            itemsize: bytes of a key's or value's number.
        """
        heads = config.get("num_attention_heads")
        odd = [name for name in config if name.startswith(("mamba", "ssm_", "kv_lora", "linear_"))]
        if not isinstance(heads, int) or odd:
            return cls(0.0, 0.0, f"config.json has {odd[0] if odd else 'no num_attention_heads'}")
        n_layers = int(config["num_hidden_layers"])
        kinds = config.get("layer_types") or ["full_attention"] * n_layers
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False or not isinstance(window, int):
            window = None
        if window is not None and "layer_types" not in config and window < context:
            return cls(0.0, 0.0, "a sliding window, and no layer_types")
        if set(kinds) - {"full_attention", "sliding_attention"}:
            return cls(0.0, 0.0, f"layers of {', '.join(sorted(set(kinds)))}")
        width = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        positions = sum(
            min(context, window) if kind == "sliding_attention" and window else context
            for kind in kinds
        )
        return cls(4.0 * heads * width * positions, 2.0 * kv_heads * width * positions * itemsize)


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a decode step of ``batch`` requests.

    Args:
        weights: weights of the model that are read.
        kv: keys and values that are read.
        probes: weights of the probes.
        scores: what the probes say, from the device to the host.
    """

    batch: int
    weights: float
    kv: float
    probes: int
    scores: int

    @property
    def ratio(self) -> float:
        """Return bytes of probes and scores over those of the forward pass."""
        return (self.probes + self.scores) / (self.weights + self.kv)


@dataclass(frozen=True)
class ProbeArithmetic:
    """What probes cost on paper.

    Args:
        n_probes: at each hook.
        context: positions that a generated token attends to.
        widths: channels of each hook.
        steps: bytes, by batch.
    """

    n_probes: int
    context: int
    widths: tuple[int, ...]
    weights: Weights
    attention: Attention
    steps: tuple[StepBytes, ...]

    @classmethod
    def of(
        cls,
        n_probes: int,
        widths: Sequence[int],
        weights: Weights,
        attention: Attention,
        context: int,
        batches: Sequence[int],
    ) -> ProbeArithmetic:
        """Return the cost at some batches."""
        steps = tuple(
            StepBytes(
                batch=batch,
                weights=weights.step_nbytes(batch),
                kv=batch * attention.kv_nbytes,
                probes=PROBE_ITEMSIZE * n_probes * sum(widths),
                scores=PROBE_ITEMSIZE * n_probes * len(widths) * batch,
            )
            for batch in batches
        )
        return cls(n_probes, context, tuple(widths), weights, attention, steps)

    @property
    def forward_flops(self) -> float:
        """Return the operations of a generated token, without probes."""
        return 2 * self.weights.n_active + self.attention.flops

    @property
    def probe_flops(self) -> int:
        """Return the operations of all probes on a generated token."""
        return 2 * self.n_probes * sum(self.widths)

    @property
    def ratio(self) -> float:
        """Return operations of the probes over those of the forward pass: the floor."""
        return self.probe_flops / self.forward_flops

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; what is not known is null."""
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


class Bar(NamedTuple):
    """A bar: its label, and its length in percent; ``None`` or not above 0 has no bar."""

    label: str
    percent: float | None


def log_bars(bars: Sequence[Bar], width: int = WIDTH) -> list[str]:
    """Return the axis, then a line for each bar; no line without a value above 0.

    The axis has whole decades, from the one below the smallest value to the one above the largest.

    Args:
        width: characters of the axis.
    """
    values = [bar.percent for bar in bars if bar.percent is not None and bar.percent > 0]
    if not values:
        return []
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    label = max(len(bar.label) for bar in bars)
    figures = [_figure(bar.percent) for bar in bars]
    room = max(map(len, figures))
    every = -(-8 * (high - low) // width)
    axis = [" "] * (width + 8)
    for decade in range(low, high + 1, every):
        at = round(width * (decade - low) / (high - low))
        words = f"{10.0**decade:g}"
        axis[at : at + len(words)] = words
    lines = [f"{'':<{label}}  {'':>{room}}  {''.join(axis).rstrip()}"]
    for bar, figure in zip(bars, figures, strict=True):
        filled = 0
        if bar.percent is not None and bar.percent > 0:
            filled = max(1, round(width * (math.log10(bar.percent) - low) / (high - low)))
        lines.append(f"{bar.label:<{label}}  {figure:>{room}}  {'#' * filled}".rstrip())
    return lines


def _figure(percent: float | None) -> str:
    if percent is None:
        return "-"
    return f"{percent:.2g} %" if 0 < percent < 10 else f"{percent:.0f} %"


LABEL = 9
STEP_ROWS, SHARD_ROWS = 2048, 65_536
"""Sizes for which memory is checked before an engine starts."""
MAX_NAIVE = 2048
"""Naive probes at all hooks that are timed; what more of them cost is on their line."""
N_NAIVE_COUNTS = (0, 16)


@dataclass(frozen=True)
class ProbeCost:
    """What probes cost.

    Args:
        arithmetic: operations and bytes.
        fits: lines through measured steps, by way, clock and batch; empty without a measurement.
        facts: what ran.
    """

    settings: ProbeSettings
    hooks: tuple[HookSpec, ...]
    arithmetic: ProbeArithmetic
    fits: tuple[ProbeFit, ...] = ()
    facts: dict[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON; what was not measured is null."""
        measured = None
        if self.facts is not None:
            measured = {
                "ran": self.facts,
                "fits": [fit.as_json() for fit in self.fits],
            }
        hooks = [hook.name for hook in self.hooks]
        return {"probes": {**self.arithmetic.as_json(), "hooks": hooks, "measured": measured}}

    def lines(self) -> list[str]:
        """Return the text, line by line."""
        return [
            *self._paper(),
            *self._clock(),
            "",
            f"{self.arithmetic.n_probes:,} probes, in % of a decode step, log scale:",
            *log_bars(self._bars()),
        ]

    def _paper(self) -> list[str]:
        paper, weights = self.arithmetic, self.arithmetic.weights
        experts = ""
        if weights.n_experts:
            experts = f", {weights.top_k} of {weights.n_experts} experts"
        attention = f"attention over {counted(paper.context, 'position')}"
        if paper.attention.unknown is not None:
            attention = f"attention not counted: {paper.attention.unknown}"
        per_hook = (
            f"{counted(paper.n_probes, 'probe')} at each of {counted(len(self.hooks), 'hook')}"
        )
        one = paper.ratio / (paper.n_probes * len(self.hooks))
        lines = [
            _line("probes", f"{per_hook}, float32, in one product with the rows"),
            _line("forward", f"{_flops(paper.forward_flops)} a generated token"),
            _line("", f"{weights.n_active:,.0f} of {weights.n_params:,} weights{experts}; "
                  f"{attention}"),
            _line("floor", f"{_flops(paper.probe_flops)} = {paper.ratio:.3%} of it; "
                  f"one probe {one:.1e}"),
        ]  # fmt: skip
        for step in paper.steps:
            moved = f"{format_nbytes(step.weights)} weights + {format_nbytes(step.kv)} KV"
            lines.append(
                _line("bytes" if step is paper.steps[0] else "", f"batch {step.batch}: {moved}; "
                      f"{format_nbytes(step.probes)} probes + {format_nbytes(step.scores)} scores: "
                      f"{step.ratio:.3%}")
            )  # fmt: skip
        return lines

    def _clock(self) -> list[str]:
        if self.facts is None:
            return [_line("clock", "not measured")]
        ran = self.facts
        graphs = "" if ran["cudagraphs"] == "none" else f", CUDA graphs {ran['cudagraphs']}"
        lines = [
            _line("measured", f"{ran['engine']}, {ran['device']}, {ran['mode']}{graphs}, "
                  f"{ran['dtype']}, threads: {ran['threads']} of {ran['cores']} cores; "
                  f"positions {ran['positions']}"),
            _line("", "T(N) / T(0) = 1 + s + m N, with 95 % intervals"),
        ]  # fmt: skip
        for clock, batch in dict.fromkeys((one.clock, one.batch) for one in self.fits):
            mine = [one for one in self.fits if (one.clock, one.batch) == (clock, batch)]
            lines += [
                "",
                f"batch {batch}, {_CLOCKS[clock]}: step {1e3 * mine[0].step_s:.3g} ms, "
                f"{counted(mine[0].n_rounds, 'round')}; twice the engine alone differs by "
                f"{_percent(mine[0].noise)}",
            ]
            for one in mine:
                lines += [
                    _line(one.way, f"s = {_percent(one.s)}   m = {_percent(one.m, 3)}"),
                    _line("", one.words()),
                ]
        return lines

    def _bars(self) -> list[Bar]:
        paper = self.arithmetic
        bars = [Bar("operations", 100 * paper.ratio)]
        bars += [Bar(f"bytes, batch {step.batch}", 100 * step.ratio) for step in paper.steps]
        for one in self.fits:
            measured = one.ratios.get(paper.n_probes)
            words = "" if measured is not None else ", by its line"
            if measured is None:
                measured = one.s.value + one.m.value * paper.n_probes
            if abs(measured) < one.floor:
                words += ", in the noise"
            label = f"{one.way}, batch {one.batch}, {_CLOCKS[one.clock]}{words}"
            bars.append(Bar(label, 100 * measured))
        return bars


_CLOCKS: dict[Clock, str] = {"wall": "by the clock", "cpu": "CPU time"}


@keywords_of(ProbeSettings)
def probe_cost(*, said: Callable[[str], None] = lambda line: None, **settings: Any) -> ProbeCost:
    """Return what linear probes cost a generated token, on paper and, if asked, by the clock.

    Args:
        said: hears of progress.
        settings: the fields of ``ProbeSettings``, options of ``actds plan``.

    Raises:
        ActdsError: E005 no model, E007 unknown hook, E009 a bad setting or weights that cannot be
            counted, E012 an engine whose steps cannot be timed, E015 hooks of several widths,
            E504 an engine that does not start.

    Example:
        >>> found = actds.probe_cost(model="models/small", probes=100, hooks="resid_post:10")
        >>> f"{found.arithmetic.ratio:.1e}"
        '3.4e-04'
    """
    asked = ProbeSettings.of(settings)
    kind = find_engine(asked.engine)
    kind.options(asked.engine_args)
    config = model_config(asked.model)
    own = config.get("dtype") or config.get("torch_dtype")
    computed: DType = own if own in DTYPES else "bfloat16"
    places = parse_hooks(asked.hooks, int(config["num_hidden_layers"]))
    hooks = hook_specs(places, config, computed)
    batches = tuple(dict.fromkeys(asked.batches)) or (1,)
    arithmetic = ProbeArithmetic.of(
        asked.probes,
        [hook.d_model for hook in hooks],
        read_weights(asked.model),
        Attention.of(config, asked.context, DTYPES[computed].itemsize),
        asked.context,
        batches,
    )
    if asked.measure is None:
        return ProbeCost(asked, hooks, arithmetic)
    task = _task(asked, hooks, batches)
    _require_memory(task)
    place = Path(tempfile.mkdtemp(prefix=".actds-probes-", dir=asked.measure))
    try:
        timing = kind.time_probes(TimingTask(**{**vars(task), "folder": place}), said)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return fitted(asked, hooks, arithmetic, timing)


def _task(
    asked: ProbeSettings, hooks: tuple[HookSpec, ...], batches: tuple[int, ...]
) -> TimingTask:
    """Return what is to be timed.

    Raises:
        ActdsError: E009 no folder, or more probes than a dataset stores; E015 hooks of several
            widths.
    """
    assert asked.measure is not None
    if not asked.measure.is_dir():
        got, expected = f"{asked.measure}: no such folder", "a folder for datasets"
        raise ActdsError("E009", "measure", got=got, expected=expected)
    if asked.probes > MAX_WIDTH:
        expected = f"at most {MAX_WIDTH:,} a hook, which a dataset can store"
        raise ActdsError("E009", "probes", got=f"{asked.probes:,}", expected=expected)
    widths = sorted({hook.d_model for hook in hooks})
    if len(widths) > 1:
        got = f"hooks of {' and '.join(map(str, widths))} channels"
        raise ActdsError("E015", "hooks", got=got, expected="hooks of one width")
    largest = max(1, min(asked.probes, MAX_NAIVE // len(hooks)))
    naive = sorted({n for n in N_NAIVE_COUNTS if n < largest} | {largest})
    eager = asked.engine_args.get("enforce_eager") is True
    arms = [Arm("none"), Arm("again")]
    arms += [Arm("packed", n) for n in counts_timed(asked.probes, restarts=not eager)]
    arms += [Arm("naive", n) for n in naive]
    return TimingTask(
        model=asked.model,
        engine_args=asked.engine_args,
        hooks=hooks,
        arms=tuple(arms),
        batches=batches,
        n_rounds=asked.rounds,
        folder=asked.measure,
    )


def _require_memory(task: TimingTask) -> None:
    """Refuse more probes than main memory has room for; raises E009."""
    given = task.engine_args.get("max_num_batched_tokens")
    step_rows = given if isinstance(given, int) else STEP_ROWS
    each = []
    for arm in task.arms:
        if arm.way == "packed":
            geometry = Geometry.of(task.hooks, 1 + DEFAULT_PROJECTIONS + arm.n_probes)
            rows = min(SHARD_ROWS, max(1, SHARD_NBYTES // geometry.row_nbytes))
            each.append(memory_bound(geometry, Sizes(step_rows, rows, RING_MIB * MIB)).nbytes)
    # An eager engine has all of them at once.
    needed = sum(each) if task.is_eager else max(each)
    free = free_nbytes()
    if needed > free:
        got = f"{format_nbytes(needed)} for the probes, and {format_nbytes(free)} free"
        raise ActdsError("E009", "probes", got=got, expected="fewer probes, or fewer hooks")


def free_nbytes() -> int:
    """Return the main memory that programs can still have."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fitted(
    asked: ProbeSettings,
    hooks: tuple[HookSpec, ...],
    arithmetic: ProbeArithmetic,
    timing: Timing,
) -> ProbeCost:
    """Return the cost with a line for each way, clock and batch of a timing."""
    # On a GPU the engine's process waits for it, and its CPU time is not what a step takes.
    clocks: tuple[Clock, ...] = ("wall", "cpu") if timing.facts["device"] == "cpu" else ("wall",)
    timed: Sequence[Timed] = timing.timed
    ways: tuple[Way, ...] = ("packed", "naive")
    at = [(clock, step.batch) for clock in clocks for step in arithmetic.steps]
    return ProbeCost(
        asked,
        hooks,
        arithmetic,
        tuple(fit(timed, way, batch, clock) for clock, batch in at for way in ways),
        timing.facts,
    )


def _line(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


def _flops(flops: float) -> str:
    power = max(0, min(4, int(math.log10(max(flops, 1)) // 3)))
    return f"{flops / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}FLOP"


def _percent(found: Interval, digits: int = 1) -> str:
    return f"{found.value:+.{digits}%} [{found.low:+.{digits}%}, {found.high:+.{digits}%}]"
