"""The command ``actds plan``: what a harvest needs at every stage, as text and as JSON."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.inclusion import Design
from actds.format.tables import is_served
from actds.store import Store, open_store
from actds.text import counted, format_nbytes, format_seconds
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.config import MIB, PlanSettings, keywords_of
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest.machine import (
    DEFAULTS,
    DiskRates,
    measure,
    rates_of,
    shared_with,
)
from actds_writers.harvest.nodes import Nodes, nodes_of
from actds_writers.ipc.messages import HookSpec
from actds_writers.model_folder import computed_dtype, model_config
from actds_writers.sampling import POLICIES, keep_rules
from actds_writers.sizing import (
    LANE_NBYTES,
    MEASURED,
    Burst,
    Capacity,
    Geometry,
    Load,
    Overhead,
    Rate,
    Sizes,
    Windows,
    capacity,
    census_nbytes,
    rows_per_shard,
    staged_steps,
    usual_threads,
    windows,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LABEL = 9
FOLD = 76
_LOSING = ", ".join(sorted(name for name in POLICIES if name.startswith("drop")))
USUAL_LOAD = {"prefill": 0.0, "decode": 0.0, "tokens_per_request": 512.0, "tokens_per_step": 512.0}


WINDOWS_S = (1.0, 10.0)
FEW_WINDOWS = 20


@dataclass(frozen=True)
class Profile:
    """Load and bytes of an earlier harvest.

    Args:
        is_short: whether there are too few windows for a 99th percentile.
    """

    windows: tuple[Windows, ...]
    load: Load
    overhead: Overhead
    is_short: bool


def read_profile(store: Store) -> Profile:
    catalog = read_catalog(store)
    steps = [catalog.table("steps", run) for run in catalog.run_ids]
    series = [(s["t_ns"].to_numpy(), s["batch_tokens"].to_numpy()) for s in steps]
    lengths = tuple(w for seconds in WINDOWS_S if (w := windows(series, seconds)) is not None)
    if not lengths or not catalog.shards:
        got = f"{sum(s.num_rows for s in steps)} steps in less than two seconds, or no shard"
        expected = "a harvest of at least a few seconds"
        step = "Give prefill_rate, decode_rate and bursts instead."
        raise ActdsError("E009", f"profile {store.uri}", got=got, expected=expected, next_step=step)
    prefill = sum(int(s["prefill_tokens"].to_numpy().sum()) for s in steps)
    decode = sum(int(s["decode_tokens"].to_numpy().sum()) for s in steps)
    n_steps = sum(s.num_rows for s in steps)
    requests = [catalog.table("requests", run) for run in catalog.run_ids]
    n_served = sum(pc.sum(is_served(table)).as_py() or 0 for table in requests)
    total, mean = prefill + decode, lengths[0].mean
    return Profile(
        windows=lengths,
        load=Load(
            prefill=mean * prefill / total,
            decode=mean * decode / total,
            tokens_per_request=total / max(1, n_served),
            tokens_per_step=total / n_steps,
            bursts=tuple(w.burst for w in lengths),
        ),
        overhead=overhead_of(catalog, store, sum(table.num_rows for table in requests), n_steps),
        is_short=lengths[0].n < FEW_WINDOWS,
    )


def overhead_of(catalog: Catalog, store: Store, n_requests: int, n_steps: int) -> Overhead:
    hooks = {hook.name: hook for hook in catalog.genesis.hooks}
    sizes = {hook: h.d_model * DTYPES[h.dtype].itemsize for hook, h in hooks.items()}
    n_rows = sum(shard.n_rows for shard in catalog.shards)
    rows = sum(shard.n_rows * sizes[hook] for shard in catalog.shards for hook in shard.hooks)
    frames = _nbytes(catalog, lambda path: path.endswith("/c/0/0"))
    tokens = _nbytes(catalog, lambda path: path == "tokens.parquet")
    parts: dict[str, int] = {}
    for (_run, table), bodies in catalog.parts.items():
        parts[table] = parts.get(table, 0) + sum(body.file.nbytes for body in bodies)
    requests = parts.get("requests", 0) + parts.get("spans", 0)
    return replace(
        MEASURED,
        ratio=rows / max(1, frames),
        token=tokens / max(1, n_rows),
        request=requests / max(1, n_requests),
        step=parts.get("steps", 0) / max(1, n_steps),
        source=f"measured: {n_rows:,} rows of {store.uri}",
    )


def _nbytes(catalog: Catalog, wanted: Callable[[str], bool]) -> int:
    return sum(e.nbytes for shard in catalog.shards for e in shard.files if wanted(e.path))


@dataclass(frozen=True)
class PlanResult:
    """What a harvest needs.

    Args:
        shared: what else uses its drive.
        stages: number and layers of each pipeline stage that captures, as ``capacity.parts``.
    """

    settings: PlanSettings
    capacity: Capacity
    rates: dict[str, Rate]
    measured: dict[str, float]
    overhead: Overhead
    profile: Profile | None
    disk: DiskRates | None = None
    shared: tuple[str, ...] = ()
    stages: tuple[tuple[int, range], ...] = ()
    nodes: Nodes | None = None

    @property
    def fits(self) -> bool:
        return self.capacity.fits and (self.nodes is None or self.nodes.fits)

    @property
    def command(self) -> list[str]:
        settings, sizes = self.settings, self.capacity.sizes
        model = "FOLDER" if settings.model is None else str(settings.model)
        words = ["actds", "write", "OUT", "--model", model, "--prompts", "SOURCE"]
        words += ["--hooks", settings.hooks or "HOOKS"]
        given = {"max_num_batched_tokens": sizes.max_step_rows, **settings.engine_args}
        for key, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--engine-arg", f"{key}={text}"]
        words += ["--rows-per-shard", str(sizes.rows_per_shard)]
        words += ["--ring-mib", str(max(1, -(-sizes.ring_nbytes // MIB)))]
        words += ["--staging-mib", str(max(1, -(-sizes.staging_nbytes // MIB)))]
        words += ["--keep", settings.keep] if settings.keep else []
        return [*words, "--overflow", "block"]

    @property
    def sample(self) -> Sample | None:
        """Return what rules for a share of the rows would store, ``None`` without any."""
        if not self.settings.keep:
            return None
        return Sample.of(self.settings.keep, self.capacity.load, self.settings.tokens)

    def lines(self) -> list[str]:
        needs, overhead, n_tokens = self.capacity, self.overhead, self.settings.tokens
        g, load = needs.geometry, needs.load
        bursts = ", ".join(f"{b.factor:.3g}x for {b.seconds:g} s" for b in load.bursts) or "none"
        rates = ", ".join(
            f"{name} {rate.gbps:.3g} ({rate.origin})" for name, rate in self.rates.items()
        )
        rates = f"{rates} GB/s"
        parts = f"{load.prefill:,.0f} prefill + {load.decode:,.0f} decode"
        lines = [
            _line("row", f"{g.row_nbytes:,} bytes per token: {_hooks(g)}"),
            _line("load", f"{load.mean:,.0f} tokens/s = {parts}"),
            _line("bursts", bursts),
            "",
            f"{'stage':<{LABEL}}{'what':<22}{'bytes/token':>11}{'mean':>12}{'burst':>12}"
            f"{'tokens/s':>12}",
        ]
        for stage in needs.stages:
            limit = "-" if math.isinf(stage.max_tokens) else _tokens(stage.max_tokens)
            lines.append(
                f"{stage.name:<{LABEL}}{stage.what:<22}{stage.nbytes_per_token:>11,.0f}"
                f"{_rate(stage.gbps(load.mean)):>12}{_rate(stage.gbps(load.peak)):>12}{limit:>12}"
            )
        lines += [_line("rates", rates), *self._measured_lines(), "", *_bottleneck(needs), ""]
        lines += [
            *_needs(needs, overhead, n_tokens),
            *(self.sample.lines(needs.stored_nbytes) if self.sample else []),
            *self._workers(),
            *(itertools.starmap(_line, self.nodes.lines()) if self.nodes else []),
            "",
            *_stalls(needs),
            "",
            *_folded(self.command),
        ]
        return lines

    def _workers(self) -> list[str]:
        """Return what each pipeline stage and each replica needs, where there are several."""
        needs, lines = self.capacity, []
        in_flight, memory = needs.sizes.in_flight, needs.memory
        if in_flight > 1:
            staged = staged_steps(in_flight)
            words = f"{staged} of the largest steps, on each stage"
            lines.append(_line("staging", f"{words}: rows of {in_flight} may wait for results"))
        several = len(self.stages) > 1
        for (number, layers), part, bound in zip(
            self.stages, needs.parts, needs.by_stage, strict=True
        ):
            if several:
                words = f"stage {number}: layers {layers.start}-{layers.stop - 1}, "
                words += f"{counted(part.n_hooks, 'hook')}: {format_nbytes(bound.device_nbytes)} "
                words += f"device, {format_nbytes(bound.shared_nbytes)} shared"
                lines.append(_line("" if number != self.stages[0][0] else "stages", words))
        n = needs.n_replicas
        if n > 1:
            words = f"{n}, each with 1/{n} of the load and the memory above"
            lines.append(_line("engines", f"{words}: {format_nbytes(n * memory.nbytes)} in all"))
        return lines

    def _measured_lines(self) -> list[str]:
        if self.disk is None:
            return []
        lines = [_line("", f"disk measured: {self.disk.words}")]
        if self.shared:
            lines += [
                _line("WARNING", f"{self.settings.measure} shares its drive with:"),
                *(_line("", what) for what in self.shared),
                _line("", "what they write stalls the harvest; put OUT on a drive of its own"),
            ]
        return lines

    def as_json(self) -> dict[str, Any]:
        needs, n_tokens, memory = self.capacity, self.settings.tokens, self.capacity.memory
        load, overhead = needs.load, self.overhead
        stages = [
            {
                "name": stage.name,
                "nbytes_per_token": stage.nbytes_per_token,
                "mean_gbps": stage.gbps(load.mean),
                "burst_gbps": stage.gbps(load.peak),
                "max_tokens_per_s": _finite(stage.max_tokens),
                "rate": stage.origin,
            }
            for stage in needs.stages
        ]
        pipeline = [
            {
                "stage": number,
                "layers": [layers.start, layers.stop],
                "n_hooks": part.n_hooks,
                "row_nbytes": part.row_nbytes,
                "staging_nbytes": bound.staging,
                "device_nbytes": bound.device_nbytes,
                "ring_nbytes": bound.ring,
                "shared_nbytes": bound.shared_nbytes,
            }
            for (number, layers), part, bound in zip(
                self.stages, needs.parts, needs.by_stage, strict=True
            )
        ]
        stalls = [
            {name: _finite(value) for name, value in asdict(stall).items()}
            for stall in needs.stalls
        ]
        return {
            "geometry": _with(needs.geometry, "n_hooks", "row_nbytes"),
            "load": _with(load, "mean", "peak"),
            "stages": stages,
            "rates": {name: asdict(rate) for name, rate in self.rates.items()},
            "measured_disk": self.disk and asdict(self.disk),
            "shares_drive_with": list(self.shared),
            "n_threads": needs.sizes.n_threads,
            "bottleneck": needs.bottleneck.name,
            "fits_mean": needs.fits,
            "fits_burst": needs.fits_burst,
            "sustained_share": needs.sustained_share,
            "disk": {
                "nbytes_per_token": needs.stored_nbytes,
                "by_part": needs.stored,
                "n_tokens": n_tokens,
                "nbytes": needs.stored_nbytes * n_tokens,
                "ratio": overhead.ratio,
                "source": overhead.source,
            },
            "sample": self.sample and _with(self.sample, "error_of_mean", "error_of_rate"),
            "ring": {
                "burst_nbytes": _finite(needs.ring_burst_nbytes),
                "stall_nbytes": _finite(needs.ring_stall_nbytes),
                "nbytes": _finite(needs.ring_nbytes),
                "stall_s": needs.stall_s,
            },
            "memory": {
                **_with(memory, *_MEMORY_SUMS),
                "census_nbytes": _census_nbytes(load, n_tokens),
            },
            "engines": {
                "n": needs.n_replicas,
                "in_flight": needs.sizes.in_flight,
                "nbytes": needs.n_replicas * memory.nbytes,
                "stages": pipeline,
            },
            "nodes": self.nodes and _with(self.nodes, "written_gbps", "read_gbps", "most", "fits"),
            "stalls": stalls,
            "options": self.command,
        }


@dataclass(frozen=True)
class Sample:
    """What rules for a share of the rows give, of requests of the mean length.

    Args:
        n_tokens: positions that are sampled from.
        n_rows: rows that are expected to be stored.
        n_effective: equally weighted rows that would be as precise.
        unknown: what rules ask that is not known here: they are taken to hold nowhere.
    """

    n_tokens: int
    n_rows: float
    n_effective: float
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, rules: str, load: Load, n_tokens: int) -> Sample:
        design = Design(np.uint64(0), 1.0, keep=keep_rules(rules))
        length = max(1, round(load.tokens_per_request))
        prompt_len = np.full(length, round(length * load.prefill / load.mean))
        shares = design.shares(np.arange(length), prompt_len)
        n_rows, n_effective = n_tokens * shares.mean(), n_tokens / (1 / shares).mean()
        by_kind = {
            "sampled tokens": design.reads_sampled,
            "roles": design.reads_roles,
            "requests": design.reads_requests,
        }
        unknown = tuple(name for name, is_read in by_kind.items() if is_read)
        return cls(n_tokens, float(n_rows), float(n_effective), unknown)

    @property
    def error_of_mean(self) -> float:
        """Return half of a 95 % interval of a mean, in standard deviations of a row."""
        return 1.96 / math.sqrt(self.n_effective)

    @property
    def error_of_rate(self) -> float:
        """Return half of a 95 % interval of a rate of ``RARE``, as a share of it."""
        return 1.96 * math.sqrt((1 - RARE) / (RARE * self.n_effective))

    def lines(self, row_nbytes: float) -> list[str]:
        share, size = self.n_rows / self.n_tokens, format_nbytes(self.n_rows * row_nbytes)
        effective = f"{self.n_effective:,.0f} of them effective"
        precise = f"a mean to {self.error_of_mean:.2g} SD, a rate of {RARE:g} to "
        lines = [
            _line("sample", f"{share:.2%} of the positions: {self.n_rows:,.0f} rows, {size}"),
            _line("", f"{effective}: {precise}{self.error_of_rate:.2g} of itself, at 95 %,"),
            _line("", "if rows were independent: those of one request are not"),
        ]
        if self.unknown:
            words = ", ".join(self.unknown)
            lines.append(_line("", f"taken to hold nowhere: rules for {words}"))
        return lines


RARE = 1e-4
"""The rate whose precision a plan names."""


def _with(facts: DataclassInstance, *properties: str) -> dict[str, Any]:
    return {**asdict(facts), **{name: getattr(facts, name) for name in properties}}


_MEMORY_SUMS = ("device_nbytes", "shared_nbytes", "pinned_nbytes", "writer_nbytes", "nbytes")


@keywords_of(PlanSettings)
def plan(**settings: Any) -> PlanResult:
    """Size a harvest: bytes per second at every stage, disk, rings, memory.

    Args:
        settings: the fields of ``PlanSettings``, the options of ``actds plan``.

    Raises:
        ActdsError: E005 no model, E007 unknown hook, E009 a missing or bad setting, E503 a disk
            that cannot be measured; any error of the dataset of ``profile``.

    Example:
        >>> found = actds.plan(
        ...     d_model=2048, layers=24, hooks="resid_post:10,20",
        ...     prefill_rate=9_000, decode_rate=1_000, bursts=["4:10"], threads=4,
        ... )
        >>> found.capacity.bottleneck.name
        'disk'
    """
    inputs = PlanSettings.of(settings)
    kind = find_engine(inputs.engine)
    options = kind.options(inputs.engine_args)
    workers, n_replicas = kind.workers(options), kind.replicas(options)
    hooks, n_layers = _hook_specs(inputs)
    geometry = Geometry.of(hooks, inputs.readouts)
    stages = [
        (number, layers, of_stage)
        for number, layers in enumerate(workers.layers(n_layers))
        if (of_stage := [hook for hook in hooks if hook.layer in layers])
    ]
    load, overhead, profile = _load(inputs)
    sizes = Sizes(
        max_step_rows=inputs.max_step_rows,
        rows_per_shard=inputs.rows_per_shard or rows_per_shard(geometry.row_nbytes),
        ring_nbytes=(inputs.ring_mib or 0) * MIB,
        staging_nbytes=inputs.staging_mib * MIB,
        lane_nbytes=LANE_NBYTES,
        n_threads=inputs.threads or usual_threads(),
        in_flight=workers.in_flight,
        on_gpu=True,
    )
    measured: dict[str, float] = {}
    disk: DiskRates | None = None
    shared: tuple[str, ...] = ()
    if inputs.measure is not None:
        measured, disk = measure(inputs.measure, inputs.measure_seconds)
        shared = tuple(shared_with(inputs.measure))
    given = {name: getattr(inputs, f"{name}_gbps") for name in DEFAULTS}
    rates = rates_of(given, measured)
    needs = capacity(
        geometry,
        sizes,
        load,
        rates,
        overhead,
        stall_s=inputs.stall,
        parts=[Geometry.of(of_stage, inputs.readouts) for _, _, of_stage in stages],
        n_replicas=n_replicas,
    )
    places = tuple((number, layers) for number, layers, _ in stages)
    together = nodes_of(inputs, needs)
    return PlanResult(
        inputs, needs, rates, measured, overhead, profile, disk, shared, places, together
    )


def _hook_specs(settings: PlanSettings) -> tuple[tuple[HookSpec, ...], int]:
    """Return the hooks and the number of layers, from a model folder or from numbers."""
    given = {"hidden_size": settings.d_model, "num_hidden_layers": settings.layers}
    config: dict[str, Any] = dict(given)
    if settings.model is not None:
        config = {
            **model_config(settings.model),
            **{k: v for k, v in given.items() if v is not None},
        }
    if None in (config["hidden_size"], config["num_hidden_layers"]):
        got, expected = "neither a model folder nor a shape", "model, or d_model and layers"
        raise ActdsError("E009", "model", got=got, expected=expected)
    places = parse_hooks(settings.hooks, config["num_hidden_layers"])
    return hook_specs(places, config, computed_dtype(config), settings.dtype), config[
        "num_hidden_layers"
    ]


def _load(settings: PlanSettings) -> tuple[Load, Overhead, Profile | None]:
    """Return load and bytes: given ones before the profile's before assumed ones.

    Raises:
        ActdsError: E009 when no rate is known; as ``read_profile``.
    """
    given = {
        "prefill": settings.prefill_rate,
        "decode": settings.decode_rate,
        "tokens_per_request": settings.tokens_per_request,
        "tokens_per_step": settings.tokens_per_step,
    }
    known = {name: value for name, value in given.items() if value is not None}
    bursts = tuple(_burst(text) for text in settings.bursts)
    if settings.profile is not None:
        profile = read_profile(open_store(settings.profile))
        load = profile.load
        facts = {name: getattr(load, name) for name in given}
        load = Load(**{**facts, **known}, bursts=bursts or load.bursts)
        return load, profile.overhead, profile
    if not known.get("prefill", 0.0) + known.get("decode", 0.0):
        got, expected = "no rate", 'tokens per second, or profile="DATASET"'
        raise ActdsError("E009", "prefill_rate, decode_rate", got=got, expected=expected)
    return Load(**{**USUAL_LOAD, **known}, bursts=bursts), MEASURED, None


def _burst(text: str) -> Burst:
    try:
        factor, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        factor = seconds = 0.0
    if not (1.0 <= factor < 1e6 and 0.0 < seconds < 1e9):
        got = ascii(text)[:80]
        expected = "FACTOR:SECONDS with a factor of at least 1, for example 4:10"
        raise ActdsError("E009", "bursts", got=got, expected=expected)
    return Burst(factor, seconds)


def _line(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


def _bottleneck(needs: Capacity) -> list[str]:
    limit, load = needs.bottleneck.max_tokens, needs.load
    times = f"{limit / load.mean:.2f} times the mean"
    if load.bursts:
        times += f", {limit / load.peak:.2f} times the strongest burst"
    lines = [
        _line("first", f"{needs.bottleneck.name} saturates first, at {_tokens(limit)} tokens/s"),
        _line("", times),
    ]
    if not needs.fits:
        lost = 1 - needs.sustained_share
        lines += [
            _line("", f"block: the engine slows to {needs.sustained_share:.0%}"),
            _line("", f"{_LOSING}: {lost:.0%} of the rows are lost"),
            _line("", "no ring helps: fewer hooks, a faster stage, or fewer tokens"),
        ]
    elif not needs.fits_burst:
        lines.append(_line("", "the ring must hold the rest of the burst"))
    return lines


def _folded(command: list[str]) -> list[str]:
    """Return a command as continued shell lines, options on the line of their values."""
    lines, line = [], ""
    words = [shlex.quote(word) for word in command]
    starts = [i for i, word in enumerate(words) if word.startswith("--")] + [len(words)]
    groups = [words[: starts[0]], *(words[a:b] for a, b in itertools.pairwise(starts))]
    for group in map(" ".join, groups):
        if line and len(line) + len(group) > FOLD:
            lines.append(f"{line} \\")
            line = " "
        line = f"{line} {group}" if line else group
    return [*lines, line]


def _needs(needs: Capacity, overhead: Overhead, n_tokens: int) -> list[str]:
    stored, memory, load = needs.stored, needs.memory, needs.load
    parts = " + ".join(f"{value:,.1f} {name}" for name, value in stored.items() if value >= 0.05)
    whole = f"{format_nbytes(needs.stored_nbytes * n_tokens)} for {n_tokens:,} tokens"
    lines = [
        _line("disk", f"{needs.stored_nbytes:,.0f} bytes per token = {parts}"),
        _line("", f"{whole}, {format_nbytes(needs.stored_nbytes * load.mean)}/s"),
        _line("", f"rows at {overhead.ratio:.3g}x"),
        _line("", overhead.source),
    ]
    if math.isinf(needs.ring_nbytes):
        lines.append(_line("ring", "no size is large enough"))
    else:
        bursts = f"{format_nbytes(needs.ring_burst_nbytes)} for the bursts"
        stall = f"{format_nbytes(needs.ring_stall_nbytes)} for a stall of {needs.stall_s:g} s"
        lines += [
            _line("ring", f"{bursts}, {stall}"),
            _line("", f"{needs.ring_nbytes / MIB:,.0f} MiB for both at once, plus a quarter"),
        ]
    nbytes = {
        "device": memory.device_nbytes,
        "shared": memory.shared_nbytes,
        "worker": memory.identified,
        "writer": memory.writer_nbytes,
    }
    summands = " + ".join(f"{format_nbytes(n)} {name}" for name, n in nbytes.items())
    census = format_nbytes(_census_nbytes(load, n_tokens))
    lines += [
        _line("memory", f"{format_nbytes(memory.nbytes)} at most = {summands}"),
        _line("", f"{format_nbytes(memory.pinned_nbytes)} of it page-locked, beside a GPU"),
        _line("", f"{census} more for the census, growing with the run"),
    ]
    slow = min((r for r in (load.prefill, load.decode) if r > 0), default=0.0)
    if slow:
        seconds = format_seconds(needs.sizes.rows_per_shard / slow)
        words = f"up to {needs.sizes.rows_per_shard:,} rows per phase"
        lines.append(_line("at risk", f"{words}, not durable for up to {seconds}"))
    return lines


def _census_nbytes(load: Load, n_tokens: int) -> float:
    n_requests, n_steps = n_tokens / load.tokens_per_request, n_tokens / load.tokens_per_step
    return census_nbytes(n_requests, n_steps, n_tokens)


def _stalls(needs: Capacity) -> list[str]:
    n_rings = len(needs.parts) * needs.n_replicas
    ring = format_nbytes(needs.by_stage[0].ring)
    rings = f"a ring of {ring}" if n_rings == 1 else f"{n_rings} rings of up to {ring}"
    lines = [
        f"disk stalls at the mean load, with {rings}:",
        f"{'stall':<{LABEL}}{'ring full after':<18}{'block: engine waits':<22}{_LOSING}: rows lost",
    ]
    for stall in needs.stalls:
        full = "never" if stall.filled_s >= stall.stall_s else format_seconds(stall.filled_s)
        lost = f"{stall.lost_tokens:,.0f} ({stall.lost_share:.0%})" if stall.lost_tokens else "none"
        waits = format_seconds(stall.engine_waits_s) if stall.engine_waits_s else "no"
        lines.append(f"{f'{stall.stall_s:g} s':<{LABEL}}{full:<18}{waits:<22}{lost}")
    return lines


def _hooks(geometry: Geometry) -> str:
    return " + ".join(
        f"{n} hooks x {width.d_model} channels x {width.itemsize} bytes"
        for width, n in Counter(geometry.hooks).items()
    )


def _tokens(rate: float) -> str:
    return f"{rate:,.0f}" if rate < 1e7 else f"{rate / 1e6:,.0f} M"


def _rate(gbps: float) -> str:
    return f"{format_nbytes(gbps * 1e9)}/s"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
