"""Plan page: the answer of ``actds plan`` as a page for a person and as facts for a program.

Before the token's way; pure.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from dataclasses import asdict
from typing import Any

from actds_writers.monitor.dashboard import format_nbytes, format_seconds
from actds_writers.sizing.capacity import MIB, Capacity
from actds_writers.sizing.machine import Machine
from actds_writers.sizing.needs import Geometry, Load, Overhead, census_nbytes

__all__ = ["as_json", "page", "write_options"]

LABEL = 9
FOLD = 76


def write_options(found: Capacity, hooks: str | None, model: str | None) -> list[str]:
    """Return the ``actds write`` command that follows, as words."""
    words = ["actds", "write", "OUT", "--model", model or "FOLDER", "--prompts", "SOURCE"]
    words += ["--hooks", hooks or "HOOKS"]
    words += ["--engine", f"max_num_batched_tokens={found.sizes.max_step_rows}"]
    words += ["--rows-per-shard", str(found.sizes.rows_per_shard)]
    words += ["--ring-mib", str(max(1, -(-found.sizes.ring_nbytes // MIB)))]
    words += ["--staging-mib", str(max(1, -(-found.sizes.staging_nbytes // MIB)))]
    return [*words, "--overflow", "block"]


def page(
    found: Capacity, machine: Machine, overhead: Overhead, n_tokens: int, command: list[str]
) -> list[str]:
    """Return the page, line by line.

    Args:
        found: the answer.
        machine: its rates.
        overhead: bytes beside the rows, and their source.
        n_tokens: tokens that are to be stored.
        command: as ``write_options`` returns it.
    """
    g, load = found.geometry, found.load
    bursts = ", ".join(f"{b.factor:.3g}x for {b.seconds:g} s" for b in load.bursts) or "none"
    rates = ", ".join(
        f"{name} {rate.gbps:.3g} ({rate.origin})" for name, rate in machine.rates.items()
    )
    rates = f"{rates} GB/s"
    lines = [
        _line("row", f"{g.row_nbytes:,} bytes per token: {_hooks(g)}"),
        _line("load", f"{load.mean:,.0f} tokens/s = {load.prefill:,.0f} prefill + "
              f"{load.decode:,.0f} decode"),
        _line("bursts", bursts),
        "",
        f"{'stage':<{LABEL}}{'what':<22}{'bytes/token':>11}{'mean':>12}{'burst':>12}"
        f"{'tokens/s':>12}",
    ]  # fmt: skip
    for stage in found.stages:
        limit = "-" if math.isinf(stage.max_tokens) else _tokens(stage.max_tokens)
        lines.append(
            f"{stage.name:<{LABEL}}{stage.what:<22}{stage.nbytes_per_token:>11,.0f}"
            f"{_rate(stage.gbps(load.mean)):>12}{_rate(stage.gbps(load.peak)):>12}{limit:>12}"
        )
    lines += [_line("rates", rates), "", *_bottleneck(found), ""]
    lines += [*_needs(found, overhead, n_tokens), "", *_stalls(found), "", *_folded(command)]
    return lines


def as_json(
    found: Capacity, machine: Machine, overhead: Overhead, n_tokens: int, command: list[str]
) -> dict[str, Any]:
    """Return the same facts, without infinities: what has no limit is null."""
    memory = found.memory
    return {
        "format": "actds.plan",
        "version": "1",
        "geometry": {
            **asdict(found.geometry),
            "n_hooks": found.geometry.n_hooks,
            "row_nbytes": found.geometry.row_nbytes,
        },
        "load": {**asdict(found.load), "mean": found.load.mean, "peak": found.load.peak},
        "stages": [
            {
                "name": stage.name,
                "nbytes_per_token": stage.nbytes_per_token,
                "mean_gbps": stage.gbps(found.load.mean),
                "burst_gbps": stage.gbps(found.load.peak),
                "max_tokens_per_s": _finite(stage.max_tokens),
                "rate": stage.origin,
            }
            for stage in found.stages
        ],
        "rates": {name: asdict(rate) for name, rate in machine.rates.items()},
        "n_threads": machine.n_threads,
        "bottleneck": found.bottleneck.name,
        "fits_mean": found.fits,
        "fits_burst": found.fits_burst,
        "sustained_share": found.sustained_share,
        "disk": {
            "nbytes_per_token": found.stored_nbytes,
            "by_part": found.stored,
            "n_tokens": n_tokens,
            "nbytes": found.stored_nbytes * n_tokens,
            "ratio": overhead.ratio,
            "source": overhead.source,
        },
        "ring": {
            "burst_nbytes": _finite(found.ring_burst_nbytes),
            "stall_nbytes": _finite(found.ring_stall_nbytes),
            "nbytes": _finite(found.ring_nbytes),
            "stall_s": found.stall_s,
        },
        "memory": {
            **asdict(memory),
            "device_nbytes": memory.device_nbytes,
            "shared_nbytes": memory.shared_nbytes,
            "writer_nbytes": memory.writer_nbytes,
            "nbytes": memory.nbytes,
            "census_nbytes": _census_nbytes(found.load, n_tokens),
        },
        "stalls": [
            {name: _finite(value) for name, value in asdict(stall).items()}
            for stall in found.stalls
        ],
        "options": command,
    }


def _line(label: str, words: str) -> str:
    return f"{label:<{LABEL}}{words}"


def _bottleneck(found: Capacity) -> list[str]:
    limit, load = found.bottleneck.max_tokens, found.load
    times = f"{limit / load.mean:.2f} times the mean"
    if load.bursts:
        times += f", {limit / load.peak:.2f} times the strongest burst"
    lines = [
        _line("first", f"{found.bottleneck.name} saturates first, at {_tokens(limit)} tokens/s"),
        _line("", times),
    ]
    if not found.fits:
        lost = 1 - found.sustained_share
        lines += [
            _line("", f"block: the engine slows to {found.sustained_share:.0%}"),
            _line("", f"drop_newest, drop_oldest: {lost:.0%} of the rows are lost"),
            _line("", "no ring helps: fewer hooks, a faster stage, or fewer tokens"),
        ]
    elif not found.fits_burst:
        lines.append(_line("", "the ring has to hold the rest of the burst"))
    return lines


def _folded(command: list[str]) -> list[str]:
    """Return a command in lines that a shell takes as one, options kept beside their values."""
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


def _needs(found: Capacity, overhead: Overhead, n_tokens: int) -> list[str]:
    stored, memory, load = found.stored, found.memory, found.load
    parts = " + ".join(f"{value:,.1f} {name}" for name, value in stored.items() if value >= 0.05)
    lines = [
        _line("disk", f"{found.stored_nbytes:,.0f} bytes per token = {parts}"),
        _line("", f"{format_nbytes(found.stored_nbytes * n_tokens)} for {n_tokens:,} tokens, "
              f"{format_nbytes(found.stored_nbytes * load.mean)}/s"),
        _line("", f"rows at {overhead.ratio:.3g}x"),
        _line("", overhead.source),
    ]  # fmt: skip
    if math.isinf(found.ring_nbytes):
        lines.append(_line("ring", "none is large enough"))
    else:
        lines += [
            _line("ring", f"{format_nbytes(found.ring_burst_nbytes)} for the bursts, "
                  f"{format_nbytes(found.ring_stall_nbytes)} for a stall of {found.stall_s:g} s"),
            _line("", f"{found.ring_nbytes / MIB:,.0f} MiB for both at once, and a quarter more"),
        ]  # fmt: skip
    lines += [
        _line("memory", f"{format_nbytes(memory.nbytes)} at most = "
              f"{format_nbytes(memory.device_nbytes)} device + "
              f"{format_nbytes(memory.shared_nbytes)} shared + "
              f"{format_nbytes(memory.writer_nbytes)} writer"),
        _line("", f"{format_nbytes(_census_nbytes(load, n_tokens))} more for the census, little "
              "by little"),
    ]  # fmt: skip
    slow = min((r for r in (load.prefill, load.decode) if r > 0), default=0.0)
    if slow:
        seconds = found.sizes.rows_per_shard / slow
        lines.append(
            _line("at risk", f"up to {found.sizes.rows_per_shard:,} rows per phase, not durable "
                  f"for up to {format_seconds(seconds)}")
        )  # fmt: skip
    return lines


def _census_nbytes(load: Load, n_tokens: int) -> float:
    n_requests, n_steps = n_tokens / load.tokens_per_request, n_tokens / load.tokens_per_step
    return census_nbytes(n_requests, n_steps, n_tokens)


def _stalls(found: Capacity) -> list[str]:
    ring = format_nbytes(found.memory.ring)
    lines = [
        f"a stall of the disk, at the mean load, with a ring of {ring}:",
        f"{'stall':<{LABEL}}{'ring full after':<18}{'block: engine waits':<22}"
        "drop_newest, drop_oldest: rows lost",
    ]
    for stall in found.stalls:
        full = "never" if stall.filled_s >= stall.stall_s else format_seconds(stall.filled_s)
        lost = f"{stall.lost_tokens:,.0f} ({stall.lost_share:.0%})" if stall.lost_tokens else "none"
        waits = format_seconds(stall.engine_waits_s) if stall.engine_waits_s else "no"
        lines.append(f"{f'{stall.stall_s:g} s':<{LABEL}}{full:<18}{waits:<22}{lost}")
    return lines


def _hooks(geometry: Geometry) -> str:
    """Return how many hooks there are of each width."""
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
