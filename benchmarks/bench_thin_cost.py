"""What drawing rows costs: ``thin`` against ``block``, bytes into the ring, bytes of ``spans``.

    python benchmarks/bench_thin_cost.py [--rounds 7] [--requests 200]

Real writer and census behind the real stages, without a model: requests of one prefill, as fast as
they are taken. In each round ``block`` and ``thin`` at a fixed inclusion of 1, 1/2, 1/8 and 1/64
take turns, each from the start in another place; ratios are within a round, their median and
range. CPU is that of engine, writer and census.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_run import Producer, cpu_s

from actds.format.readouts import Readouts
from actds_testing.synthetic_engine import pipeline_for
from actds_writers.ipc.messages import ClientFacts, HookSpec

SHARES = (None, 1.0, 1 / 2, 1 / 8, 1 / 64)
"""Inclusion of every step; ``None`` for ``block``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--step-rows", type=int, default=256)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--hooks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[float | None, list[dict[str, float]]] = {share: [] for share in SHARES}
    for number in range(options.rounds):
        turn = number % len(SHARES)
        for share in (*SHARES[turn:], *SHARES[:turn]):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                found[share].append(run(Path(folder) / "acts", share, options))
    lines = [summary(share, found[share], found[None]) for share in SHARES]
    if options.json:
        print(json.dumps(lines))
        return
    print("| " + " | ".join(lines[0]) + " |\n|" + " ---: |" * len(lines[0]))
    for line in lines:
        print("| " + " | ".join(map(str, line.values())) + " |")


def run(out: Path, share: float | None, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one run."""
    hooks = tuple(
        HookSpec(f"resid_post.{i}", "resid_post", i, options.d_model, "bfloat16")
        for i in range(options.hooks)
    )
    of_draw: dict[str, Any] = {} if share is None else {"thin_min": share}
    pipeline = pipeline_for(
        out, "block" if share is None else "thin", readouts=Readouts(8, 0), lane_nbytes=32 << 20,
        hooks=hooks, ring_nbytes=64 << 20, rows_per_shard=8192, **of_draw,
    )  # fmt: skip
    n_bytes = 0
    with pipeline:
        engine = Producer(pipeline, hooks=hooks, max_rows=options.step_rows)
        engine.fill(options.step_rows, 0)
        place = engine.stages.handover.place

        def counted(entry: object, nbytes: int) -> int | None:
            nonlocal n_bytes
            n_bytes += nbytes
            return place(entry, nbytes)  # type: ignore[arg-type]

        engine.stages.handover.place = counted  # type: ignore[method-assign]
        if share is not None:
            draws = engine.stages._draws
            assert draws is not None
            draws._controller = lambda fill, step: share
        pids = [os.getpid(), *(process.pid for process in pipeline.processes.values())]
        began, cpu = time.monotonic(), sum(map(cpu_s, pids))
        for number in range(options.requests):
            engine.prefill(number)
            pipeline.poll()
        engine.drain(pipeline)
        wall, cpu = time.monotonic() - began, sum(map(cpu_s, pids)) - cpu
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        n_rows = pipeline.finish("finished")["writer"]["rows"]
    n_spans = sum(path.stat().st_size for path in out.glob("census/*/spans-*.parquet"))
    return {"wall": wall, "cpu": cpu, "ring": n_bytes, "rows": n_rows, "spans": n_spans}


def summary(
    share: float | None, found: list[dict[str, float]], block: list[dict[str, float]]
) -> dict[str, object]:
    """Return a line of the table."""

    def ratio(name: str) -> str:
        ratios = [a[name] / b[name] for a, b in zip(found, block, strict=True)]
        return f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"

    first = found[0]
    return {
        "run": "block" if share is None else f"thin, inclusion {share:g}",
        "wall, of block": ratio("wall"),
        "CPU, of block": ratio("cpu"),
        "bytes into the ring, of block": f"{first['ring'] / block[0]['ring']:.4f}",
        "rows stored": f"{first['rows']:,.0f}",
        "bytes of spans per stored row": f"{first['spans'] / first['rows']:.2f}",
    }


if __name__ == "__main__":
    main()
