"""A short harvest under adversarial lengths, with a model and the sizes of ``actds plan``.

    python benchmarks/bench_stress.py [FOLDER] [--seconds 60] [--json] [OPTIONS OF actds plan]

Uniform traffic never fills a queue. Here most requests are short, some much longer, and one in
sixteen as long as the model allows, with the other long ones behind it; their tokens are random.
What is running at the end is aborted, and the dataset in FOLDER is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.compute as pc

import actds
from actds.cli.command import SettingsCommand
from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format.tables import is_served
from actds.store import open_store
from actds.text import counted, format_nbytes, format_seconds
from actds_writers.config import MIB, PlanSettings, WriteSettings
from actds_writers.engine_protocol import Engine, find_engine, parse_words
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.plan import PlanResult
from actds_writers.harvest.prepare import Plan, make_plan, request_key
from actds_writers.harvest.run import harvest_plan
from actds_writers.ipc.messages import PromptFact
from actds_writers.model_folder import model_config
from actds_writers.monitor.progress import beside
from actds_writers.prompts.encoding import Encoded
from actds_writers.sizing import windows

BLOCK = 16
"""Requests that come sorted by length; the first is as long as the model allows."""
MAX_REQUESTS, MAX_TOKENS = 4096, 2_000_000
SHORTEST, PROMPT_TAIL = 16, 0.8
"""A prompt is longer than n times the shortest with probability n ** -0.8: one in 50 more than 130
times, and the mean is made by the longest."""
MAX_GENERATED, GENERATED_TAIL = 256, 1.0
SAMPLE_S = 0.5


@dataclass(frozen=True)
class Queue:
    stage: str
    depth: int
    n_stalls: int
    stall_s: float


@dataclass(frozen=True)
class StressResult:
    """What became of the requests.

    Args:
        peak_nbytes: main memory of all processes at its highest, shared pages once; ``None`` where
            the system does not say it.
        device_nbytes: memory in use on all GPUs at its highest, with the model, its KV cache and
            what other processes have; ``None`` where no GPU says it.
        capture_nbytes: what capture and writer have reserved, by the run record; on a CPU a part
            of ``peak_nbytes``.
        dropped: rows lost because a queue was full, under ``drop_newest``.
        disk_p99_s: slowest 99th percentile of a write that was seen; ``None`` without a commit.
    """

    n_requests: int
    prompt_len: tuple[int, int, int]
    n_tokens: int
    seconds: float
    peak_tokens_per_s: float | None
    peak_nbytes: int | None
    device_nbytes: int | None
    capture_nbytes: int | None
    queues: tuple[Queue, ...]
    dropped: int
    disk_p99_s: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds if self.seconds else 0.0

    def lines(self) -> list[str]:
        median, p99, longest = self.prompt_len
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        if self.peak_tokens_per_s is not None:
            rate += f", {self.peak_tokens_per_s:,.0f} in the busiest second"
        memory = "not known" if self.peak_nbytes is None else format_nbytes(self.peak_nbytes)
        prompts = f"{median:,} tokens (median), {p99:,} (p99), {longest:,} (longest)"
        lines = [
            f"{self.n_requests:,} requests of random tokens; prompts {prompts}",
            f"{self.n_tokens:,} tokens in {format_seconds(self.seconds)}: {rate}",
            f"peak memory {memory}, all processes with the model",
        ]
        if self.device_nbytes is not None:
            words = f"peak on the GPUs {format_nbytes(self.device_nbytes)}, with model and KV cache"
            lines.append(words)
        if self.capture_nbytes is not None:
            lines.append(f"reserved by capture and writer: {format_nbytes(self.capture_nbytes)}")
        for queue in self.queues:
            what = counted(queue.depth, "shard" if queue.stage == "pool" else "step")
            line = f"{queue.stage}: at most {what}"
            if queue.n_stalls:
                line += f"; {queue.n_stalls:,} waits, {format_seconds(queue.stall_s)}"
            lines.append(line)
        if self.disk_p99_s is not None:
            lines.append(f"slowest p99 of a write: {format_seconds(self.disk_p99_s)}")
        lost = f"{self.dropped:,} ({self.dropped / max(1, self.n_tokens):.1%})"
        lines.append(f"drop_newest: {lost if self.dropped else 'no'} rows lost")
        return lines


def stress(needs: PlanResult, folder: Path, seconds: float) -> StressResult:
    """Return what became of a short harvest with the sizes of a plan; leaves nothing behind."""
    inputs, sizes = needs.settings, needs.capacity.sizes
    assert inputs.model is not None
    with tempfile.TemporaryDirectory(
        prefix=".actds-stress-", dir=folder, ignore_cleanup_errors=True
    ) as place:
        prompt = Path(place) / "prompt.txt"
        prompt.write_text("stress\n", encoding="utf-8")
        settings = WriteSettings(
            out=f"{place}/acts",
            model=inputs.model,
            prompts=str(prompt),
            hooks=inputs.hooks,
            engine=inputs.engine,
            engine_args=_with_step(inputs.engine, inputs.engine_args, sizes.max_step_rows),
            rows_per_shard=sizes.rows_per_shard,
            ring_mib=max(1, -(-sizes.ring_nbytes // MIB)),
            staging_mib=max(1, -(-sizes.staging_nbytes // MIB)),
            overflow="drop_newest",
            readouts=inputs.readouts > 0,
            max_tokens=MAX_GENERATED,
        )
        plan, kind = long_tailed(settings), find_engine(inputs.engine)
        if kind.replicas(plan.engine) > 1:  # each has a machine of its own: one tells of all
            plan = replace(plan, engine=kind.of_replica(plan.engine, 0))
        with _peak(_memory) as peak, _peak(device_memory) as device:
            harvest_plan(settings, plan, feed=_timed(seconds))
        catalog = read_catalog(open_store(settings.out))
        return _result(catalog, plan, max(peak, default=None), max(device, default=None))


def _with_step(engine: str, given: dict[str, Any], max_step_rows: int) -> dict[str, Any]:
    sized = {"max_num_batched_tokens": max_step_rows, **given}
    try:
        find_engine(engine).checked(sized)
    except ActdsError:
        find_engine(engine).checked(given)
        return given
    return sized


def long_tailed(settings: WriteSettings) -> Plan:
    """Return the plan of requests whose lengths are those of the worst traffic."""
    plan = make_plan(settings, find_engine(settings.engine).checked(settings.engine_args))
    config = model_config(plan.engine.files(settings.model).config)
    limit = plan.engine.max_model_len or int(config.get("max_position_embeddings") or 4096)
    vocabulary = np.setdiff1d(np.arange(int(config["vocab_size"])), plan.tokens.special)
    rng = np.random.default_rng(settings.seed)
    (first, *_) = plan.encoded
    encoded: list[Encoded] = []
    n_tokens = 0
    while len(encoded) < MAX_REQUESTS and n_tokens < MAX_TOKENS:
        prompts = np.sort(_tail(rng, SHORTEST, PROMPT_TAIL, max(1, limit - 8)))[::-1]
        prompts[0] = max(1, limit - 8)
        for length, generated in zip(
            prompts.tolist(), _tail(rng, 8, GENERATED_TAIL, MAX_GENERATED).tolist(), strict=True
        ):
            number = len(encoded)
            ids = rng.choice(vocabulary, length).tolist()
            prompt = replace(first.prompt, index=number, row=number, external_id=f"row-{number}")
            room = limit - length
            encoded.append(Encoded(prompt, ids, max(1, min(generated, room)), None))
            n_tokens += length + min(generated, room)
    client = tuple(
        PromptFact(request_key(e.prompt.index), e.prompt.external_id, "stress", e.prompt.row)
        for e in encoded
    )
    return replace(plan, encoded=tuple(encoded), client=client)


def _tail(
    rng: np.random.Generator, shortest: int, tail: float, longest: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    lengths = shortest * (1 - rng.random(BLOCK)) ** (-1 / tail)
    return np.minimum(lengths, longest).astype(np.int64)


def _timed(seconds: float) -> type[Feed]:

    class Timed(Feed):
        def serve(self, engine: Engine) -> None:
            self._until = time.monotonic() + seconds
            super().serve(engine)

        def step(self, engine: Engine) -> None:
            super().step(engine)
            self.interrupted = self.interrupted or time.monotonic() > self._until

    return Timed


@contextmanager
def _peak(memory: Callable[[], int | None]) -> Iterator[list[int]]:
    """Sample a memory; the list has each new peak."""
    peaks: list[int] = []

    def watch(ended: threading.Event) -> None:
        while not ended.wait(SAMPLE_S):
            nbytes = memory()
            if nbytes is not None and nbytes > max(peaks, default=0):
                peaks.append(nbytes)

    with beside(watch, "actds-memory"):
        yield peaks


def _memory() -> int | None:
    """Return the main memory of this process and all below it, shared pages counted once."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold spaces.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    ours = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= more
    total = 0
    for process in ours:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total or None


def device_memory() -> int | None:
    """Return the memory that is in use on all GPUs, by whatever process; ``None`` without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
        return sum(int(line) << 20 for line in answer.split()) or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _result(
    catalog: Catalog, plan: Plan, peak_nbytes: int | None, device_nbytes: int | None
) -> StressResult:
    (run,) = catalog.runs_with_data
    steps, drops = catalog.table("steps", run), catalog.table("drops", run)
    t_ns, tokens = steps["t_ns"].to_numpy(), steps["batch_tokens"].to_numpy()
    busiest = windows([(t_ns, tokens)], 1.0)
    lengths = np.array([len(encoded.token_ids) for encoded in plan.encoded])
    requests = catalog.table("requests", run)
    fed = requests.filter(is_served(requests))["source_row"].drop_null().to_numpy()
    median, p99, longest = np.quantile(lengths[fed], (0.5, 0.99, 1.0)).astype(int).tolist()
    slowest = pc.max(steps["disk_write_latency_p99"]).as_py()
    reserved = catalog.runs[run].fields["capture.memory_nbytes"].value
    return StressResult(
        n_requests=len(fed),
        prompt_len=(median, p99, longest),
        n_tokens=int(tokens.sum()),
        seconds=(int(t_ns.max()) - int(t_ns.min())) / 1e9,
        peak_tokens_per_s=None if busiest is None else busiest.max,
        peak_nbytes=peak_nbytes,
        device_nbytes=device_nbytes,
        capture_nbytes=reserved if isinstance(reserved, int) else None,
        queues=tuple(_queues(catalog, run)),
        dropped=int(pc.sum(pc.subtract(drops["stop"], drops["start"])).as_py() or 0),
        disk_p99_s=slowest,
    )


def _queues(catalog: Catalog, run: str) -> Iterator[Queue]:
    stalls = catalog.table("stalls", run).to_pylist()
    lines = catalog.table("occupancy", run).to_pylist()
    for stage in ("staging", "ring", "pool"):
        depths = [line for line in lines if line["stage"] == stage]
        waits = [stall["duration_ns"] for stall in stalls if stall["stage"] == stage]
        if depths:
            depth = max(line["depth"] for line in depths)
            yield Queue(stage, depth, len(waits), sum(waits) / 1e9)


@click.command(cls=SettingsCommand, settings=lambda: PlanSettings)
@click.argument("folder", type=click.Path(path_type=Path, exists=True), default=".")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Serve so long.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def main(
    folder: Path, seconds: float, as_json: bool, engine_args: tuple[str, ...], **settings: Any
) -> None:
    """Serve the model of a plan requests of random tokens and long-tailed lengths."""
    settings["model"] = settings["model"] or "demo/model"
    if not (settings["prefill_rate"] or settings["decode_rate"] or settings["profile"]):
        settings["prefill_rate"] = 1000.0
    needs = actds.plan(engine_args=parse_words(engine_args), **settings)
    result = stress(needs, folder, seconds)
    facts = {**asdict(result), "tokens_per_s": result.tokens_per_s}
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(result.lines()))


if __name__ == "__main__":
    main()
