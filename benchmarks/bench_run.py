"""A long run of the whole pipeline without a model: rate, slowest stage, memory, CPU, commits.

    python benchmarks/bench_run.py [--seconds 600] [--d-model 2048] [--step-rows 256]

Real writer and census behind the real stages; only the model is missing, so that nothing slows
them down: policy ``block``, steps as fast as they are taken. Memory is what each process has
for itself (RssAnon), once a second. Array files are removed some seconds after their commit, to
spare the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from actds.format.readouts import Readouts, compute, matrix
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.harvest import machine
from actds_writers.ipc.messages import HookSpec, RequestArrived, RequestFinished
from actds_writers.monitor.progress import take_snapshot

KEEP_S = 10.0


class Producer(SyntheticEngine):
    """Steps of one request each, whose rows are the same random numbers over and over."""

    def fill(self, n_rows: int, seed: int) -> None:
        """Leave normal rows and their readouts in the buffers, for every step to come."""
        shape = (len(self.hooks), n_rows, self.hooks[0].d_model)
        rows = np.random.default_rng(seed).standard_normal(shape, np.float32)
        for buffer, values in zip(self.buffers.rows, torch.from_numpy(rows), strict=True):
            buffer.copy_(values)
        if self.readouts is not None:
            packed = matrix(self.readouts, None, len(self.hooks), shape[2])
            for hook in range(len(self.hooks)):
                stored = self.buffers.rows[hook].float().numpy()
                self.buffers.readouts[hook].copy_(torch.from_numpy(compute(stored, packed[hook])))

    def prefill(self, number: int) -> None:
        """Serve a request that is one prefill and one token of its own."""
        n = len(self.buffers.rows[0])
        self.scheduler.send(RequestArrived(number, f"p{number}-x", f"p{number}", n, 1, None, None))
        self.step(number, 0, n, prompt_len=n)
        self.scheduler.send(RequestFinished(number, 2, "length", 1, "0" * 64))
        self.finished = (number,)

    def leave(self, number: int, positions: np.ndarray) -> None:
        """Say how many rows there are; the rows lie there already."""
        self.buffers.seen.fill_(len(positions))


@dataclass
class Watch:
    """Memory of processes, once a second, MiB by name; ends when ``over`` is set."""

    pids: dict[str, int]
    over: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """Look once a second."""
        while not self.over.wait(1.0):
            for name, pid in self.pids.items():
                self.seen.setdefault(name, []).append(rss_anon_mib(pid))


def rss_anon_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spare_disk(folder: Path, over: threading.Event) -> None:
    """Remove array files a while after their commit."""
    while not over.wait(2.0):
        before = time.time() - KEEP_S
        for path in folder.glob("shards/*/arrays/*/c/0/0"):
            if path.stat().st_mtime < before and (path.parents[4] / "shard.json").exists():
                path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--d-model", type=int, default=2048)
    parser.add_argument("--hooks", type=int, default=2)
    parser.add_argument("--step-rows", type=int, default=256)
    parser.add_argument("--ring-mib", type=int, default=256)
    parser.add_argument("--rows-per-shard", type=int, default=8192)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        isolated, _ = machine.measure(Path(folder), seconds=20)
        found = run(Path(folder) / "acts", options)
    found["isolated_gbps"] = isolated
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found))


def run(out: Path, options: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one run."""
    hooks = tuple(
        HookSpec(f"resid_post.{i}", "resid_post", i, options.d_model, "bfloat16")
        for i in range(options.hooks)
    )
    pipeline = pipeline_for(
        out,
        readouts=Readouts(n_projections=8, seed=0),
        lane_nbytes=32 << 20,
        hooks=hooks,
        ring_nbytes=options.ring_mib << 20,
        rows_per_shard=options.rows_per_shard,
    )
    with pipeline:
        engine = Producer(pipeline, hooks=hooks, max_rows=options.step_rows)
        engine.fill(options.step_rows, 0)
        pids = {name: process.pid for name, process in pipeline.processes.items()}
        watch = Watch({"engine": os.getpid(), **pids})
        threads = [
            threading.Thread(target=watch.run),
            threading.Thread(target=spare_disk, args=(out, watch.over)),
        ]
        for thread in threads:
            thread.start()
        began, cpu, number = time.monotonic(), cpu_s(pids["writer"]), 0
        while time.monotonic() - began < options.seconds:
            engine.prefill(number)
            number += 1
            if number % 16 == 0:
                pipeline.poll()
        engine.drain(pipeline)
        wall = time.monotonic() - began
        cpu = cpu_s(pids["writer"]) - cpu
        census = cpu_s(pids["census"])
        now = take_snapshot(
            pipeline.written,
            pipeline.counted,
            elapsed_s=wall,
            requests_done=number,
            requests_total=None,
        )
        watch.over.set()
        for thread in threads:
            thread.join()
        engine.close()
        pipeline.finish("finished")
    nbytes = number * options.step_rows * options.hooks * options.d_model * 2
    commits = now.commits
    return {
        "seconds": wall,
        "gigabytes": nbytes / 1e9,
        "gbps": nbytes / wall / 1e9,
        "steps": number,
        "stalls": {s.name: (s.n_stalls, s.stall_s) for s in now.stages},
        "writer_cpu_s_per_gb": cpu / (nbytes / 1e9),
        "census_cpu_ms_per_step": census / number * 1e3,
        "commits": commits.n_shards,
        "raw": commits.n_raw_shards,
        "commit_p50_s": commits.p50_s,
        "commit_p99_s": commits.p99_s,
        "ratio": commits.nbytes_in / max(1, commits.nbytes_out),
        "memory_bound_mib": (now.memory_nbytes or 0) / 2**20,
        "memory_mib": {name: minutes(seen) for name, seen in watch.seen.items()},
    }


def minutes(seen: list[float]) -> list[float]:
    """Return the median of each minute."""
    return [round(statistics.median(seen[k : k + 60]), 1) for k in range(0, len(seen), 60)]


def table(found: dict[str, object]) -> str:
    lines = ["| what | value |", "| --- | --- |"]
    for name, value in found.items():
        text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        lines.append(f"| {name.replace('_', ' ')} | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
