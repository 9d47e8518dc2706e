"""What N linear probes at each hook cost a generated token, on paper and by the clock.

    python benchmarks/bench_probes.py [--model demo/model] [--hooks resid_post:10] [--probes 1000]
        [--measure [FOLDER]] [--engine-arg enforce_eager=true] [--json]

With ``--measure`` a vLLM engine runs, and decode steps are timed as ``probe_timing.py`` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_weights import Attention, read_weights
from probe_cost import (
    RING_MIB,
    SHARD_NBYTES,
    Arm,
    ProbeArithmetic,
    ProbeCost,
    TimingTask,
    counts_timed,
    fitted,
)

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.readouts import DEFAULT_PROJECTIONS, MAX_WIDTH
from actds.text import format_nbytes
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.config import MIB
from actds_writers.engine_protocol import parse_words
from actds_writers.ipc.messages import HookSpec
from actds_writers.model_folder import computed_dtype, model_config
from actds_writers.sizing import Geometry, Sizes, free_nbytes, memory_bound

BATCHES = (1, 8, 32)
STEP_ROWS, SHARD_ROWS = 2048, 65_536
"""Sizes for which memory is checked before an engine starts."""
MAX_NAIVE = 2048
"""Naive probes at all hooks that are timed; what more of them cost is on their line."""
N_NAIVE_COUNTS = (0, 16)
MIN_ROUNDS = 5
"""Of fewer, the median has no interval of 95 %."""


def on_paper(
    model: Path,
    n_probes: int,
    hooks: str = "resid_post:all",
    context: int = 1024,
    batches: Sequence[int] = BATCHES,
) -> ProbeCost:
    """Return what probes cost by operations and bytes.

    Raises E005, E007, E009: no model, an unknown hook, weights that cannot be counted.
    """
    config = model_config(model)
    computed = computed_dtype(config)
    specs = hook_specs(parse_hooks(hooks, int(config["num_hidden_layers"])), config, computed)
    arithmetic = ProbeArithmetic(
        n_probes,
        [hook.d_model for hook in specs],
        read_weights(model),
        Attention.of(config, context, DTYPES[computed].itemsize),
        context,
        tuple(dict.fromkeys(batches)),
    )
    return ProbeCost(specs, arithmetic)


def by_the_clock(
    paper: ProbeCost, model: Path, engine_args: Mapping[str, Any], n_rounds: int, folder: Path
) -> ProbeCost:
    """Return the same with timed decode steps; leaves nothing behind in the folder.

    Raises E009, E012, E015: what cannot be timed; E504: an engine that does not start.
    """
    from probe_timing import time_probes

    arms = arms_of(paper.hooks, paper.arithmetic.n_probes, engine_args)
    with tempfile.TemporaryDirectory(
        prefix=".actds-probes-", dir=folder, ignore_cleanup_errors=True
    ) as place:
        task = TimingTask(
            model, engine_args, paper.hooks, arms, tuple(paper.arithmetic.batches), n_rounds,
            Path(place),
        )  # fmt: skip
        require_memory(task)
        timing = time_probes(task, lambda line: print(line, file=sys.stderr))
    return fitted(paper.hooks, paper.arithmetic, timing)


def arms_of(
    hooks: tuple[HookSpec, ...], n_probes: int, engine_args: Mapping[str, Any]
) -> tuple[Arm, ...]:
    if n_probes > MAX_WIDTH:
        expected = f"at most {MAX_WIDTH:,} a hook, which a dataset can store"
        raise ActdsError("E009", "probes", got=f"{n_probes:,}", expected=expected)
    widths = sorted({hook.d_model for hook in hooks})
    if len(widths) > 1:
        got = f"hooks of {' and '.join(map(str, widths))} channels"
        raise ActdsError("E015", "hooks", got=got, expected="hooks of one width")
    largest = max(1, min(n_probes, MAX_NAIVE // len(hooks)))
    naive = sorted({n for n in N_NAIVE_COUNTS if n < largest} | {largest})
    eager = engine_args.get("enforce_eager") is True
    packed = counts_timed(n_probes, restarts=not eager)
    return (
        Arm("none"),
        Arm("again"),
        *(Arm("packed", n) for n in packed),
        *(Arm("naive", n) for n in naive),
    )


def require_memory(task: TimingTask) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--probes", type=int, default=1000, help="at each hook")
    parser.add_argument("--hooks", default="resid_post:10")
    parser.add_argument("--context", type=int, default=1024, help="positions attended to")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--rounds", type=int, default=8, help=f"at least {MIN_ROUNDS}")
    parser.add_argument(
        "--measure", type=Path, nargs="?", const=Path(), help="time steps; datasets go there"
    )
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.probes, args.context, *args.batch) < 1 or args.rounds < MIN_ROUNDS:
        parser.error(f"probes, context and batches from 1, rounds from {MIN_ROUNDS}")
    cost = on_paper(args.model, args.probes, args.hooks, args.context, args.batch)
    if args.measure is not None:
        engine_args = parse_words(args.engine_arg)
        cost = by_the_clock(cost, args.model, engine_args, args.rounds, args.measure)
    print(json.dumps(cost.as_json(), indent=2) if args.json else "\n".join(cost.lines()))


if __name__ == "__main__":
    main()
