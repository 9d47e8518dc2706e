"""What this machine can do: its rates, measured with the real encoder and store on random rows, and
a short harvest under adversarial lengths with the user's model and sizes, before the real harvest.

Uniform traffic never fills a queue. Under stress most requests are short, some much longer, and one
in sixteen as long as the model allows, with the other long ones behind it; their tokens are random.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import time
import timeit
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.format import encoding
from actds.format.tables import is_served
from actds.store import open_store
from actds.text import counted, format_nbytes, format_seconds
from actds_writers.config import MIB, PlanSettings, WriteSettings
from actds_writers.engine_protocol import Engine, find_engine
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.prepare import Plan, make_plan, request_key
from actds_writers.harvest.run import harvest_plan
from actds_writers.ipc.messages import PromptFact
from actds_writers.model_folder import model_config
from actds_writers.monitor.progress import beside
from actds_writers.prompts.encoding import Encoded
from actds_writers.sizing import GB, Rate, Sizes, windows

WINDOW_S = 2.0
"""Seconds over which a rate is taken, at least; a tenth of the measurement where that is less."""
N_STEADY = 4
FALL, STEADY = 0.7, 1.2
"""A rate has fallen when it is below this share of the burst; it is steady again when the fastest
of the last windows is at most so many times the slowest."""
KEPT_SHARE = 0.25
"""Of the free space: what is written beyond it takes the place of the oldest files."""


@dataclass(frozen=True)
class DiskRates:
    """What a drive took, written without a pause: in its fastest window, and in the last ones.

    Args:
        sustained_gbps: the last windows together.
        cache_nbytes: bytes before the rate fell, ``None`` when it did not.
    """

    burst_gbps: float
    sustained_gbps: float
    cache_nbytes: int | None
    is_steady: bool
    nbytes: int
    seconds: float

    @property
    def words(self) -> str:
        wrote = f"{format_nbytes(self.nbytes)} in {self.seconds:.0f} s"
        rates = f"burst {self.burst_gbps:.3g} GB/s, sustained {self.sustained_gbps:.3g} GB/s"
        if self.cache_nbytes is None:
            return f"{rates}; no fall in {wrote}: a larger cache would not show"
        fell = f"{rates}, after {format_nbytes(self.cache_nbytes)}; {wrote}"
        return fell if self.is_steady else f"{fell}, and not steady yet"


def measure_disk(folder: Path, seconds: float, nbytes: int) -> DiskRates:
    """Return the rates of the drive under a folder; leaves nothing behind.

    Args:
        seconds: how long to write at most; less when the rate has fallen and is steady again.
        nbytes: bytes of a file, as a shard has.
    """
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data
    kept: deque[str] = deque()
    numbers = itertools.count()
    with _temporary(folder, "measure") as place:
        store = open_store(place)
        room = max(1, int(shutil.disk_usage(place).free * KEPT_SHARE) // nbytes)

        def write() -> int:
            if len(kept) >= room:
                store.remove(kept.popleft())
            kept.append(f"shards/try-{next(numbers)}")
            store.put_new(kept[-1], [data])
            return nbytes

        return until_sustained(write, seconds)


def until_sustained(
    write: Callable[[], int], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> DiskRates:
    window_s = min(WINDOW_S, seconds / 10)
    windows: list[tuple[float, int]] = []
    began = mark = clock()
    pending = 0
    while True:
        pending += write()
        now = clock()
        over = now - began >= seconds
        if now - mark >= window_s or (over and not windows):
            windows.append((now - mark, pending))
            mark, pending = now, 0
        last = windows[-N_STEADY:]
        burst = max((nbytes / took for took, nbytes in windows), default=0.0)
        fell = bool(last) and _rate(last) < FALL * burst
        if over or (fell and _is_steady(last)):
            break
    return DiskRates(
        burst_gbps=burst / GB,
        sustained_gbps=_rate(last) / GB,
        cache_nbytes=_before_the_fall(windows) if fell else None,
        is_steady=_is_steady(last),
        nbytes=sum(nbytes for _, nbytes in windows) + pending,
        seconds=clock() - began,
    )


def _before_the_fall(windows: list[tuple[float, int]]) -> int | None:
    """Return the bytes before the rate went down and stayed there on the whole."""
    rates = [_rate([window]) for window in windows]
    fastest = rates.index(max(rates))
    low = FALL * rates[fastest]
    for i in range(fastest + 1, len(windows)):
        if rates[i] < low and _rate(windows[i:]) < low:
            return sum(nbytes for _, nbytes in windows[:i])
    return None


def _rate(windows: list[tuple[float, int]]) -> float:
    return sum(nbytes for _, nbytes in windows) / sum(seconds for seconds, _ in windows)


def _is_steady(windows: list[tuple[float, int]]) -> bool:
    rates = [nbytes / seconds for seconds, nbytes in windows]
    return len(rates) == N_STEADY and max(rates) <= STEADY * min(rates)


def shared_with(folder: Path, root: Path = Path("/")) -> list[str]:
    """Return what else uses the drive under a folder: temporary files, swap, logs."""
    drives = _drives(os.stat(folder).st_dev, root)
    places = [("temporary files", Path(tempfile.gettempdir())), ("logs", root / "var/log")]
    sharing = [
        f"{what} ({path})"
        for what, path in places
        if path.is_dir() and drives & _drives(os.stat(path).st_dev, root)
    ]
    return [*sharing, *(f"swap ({path})" for path, device in _swaps(root) if drives & device)]


def _swaps(root: Path) -> list[tuple[str, frozenset[str]]]:
    try:
        lines = (root / "proc/swaps").read_text().splitlines()[1:]
    except OSError:
        return []
    swaps = []
    for line in lines:
        path, kind = line.split()[:2]
        try:
            status = os.stat(path.replace("\\040", " "))
        except OSError:  # in another namespace than ours
            continue
        device = status.st_rdev if kind == "partition" else status.st_dev
        swaps.append((path, _drives(device, root)))
    return swaps


def _drives(device: int, root: Path) -> frozenset[str]:
    number = f"{os.major(device)}:{os.minor(device)}"
    place = root / "sys/dev/block" / number
    if not place.exists():
        return frozenset([number])
    return _under(place.resolve())


def _under(place: Path) -> frozenset[str]:
    if (place / "partition").exists():
        place = place.parent
    parts = list((place / "slaves").iterdir()) if (place / "slaves").is_dir() else []
    if not parts:
        return frozenset([place.name])
    return frozenset().union(*(_under(part.resolve()) for part in parts))


DEFAULTS = {"d2h": 20.0, "copy": 5.0, "encode": 1.0, "disk": 1.0}
"""GB/s: a pinned copy over PCIe 4, a memory copy, one core of a server, one NVMe disk."""
MEASURED_NBYTES = 64 << 20
N_TRIES = 3


def rates_of(given: Mapping[str, float | None], measured: Mapping[str, float]) -> dict[str, Rate]:
    """Return the rates of a machine: given ones before measured ones before assumed ones.

    ``d2h`` is from the device into the host ring, ``copy`` from the ring into a shard buffer on one
    thread, ``encode`` permuting and encoding rows on one thread, and ``disk`` hashing, writing and
    syncing files, one after the other.
    """
    rates = {name: Rate(gbps, "assumed") for name, gbps in DEFAULTS.items()}
    rates |= {name: Rate(gbps, "measured") for name, gbps in measured.items()}
    return rates | {name: Rate(gbps, "given") for name, gbps in given.items() if gbps is not None}


def measure(
    folder: Path, seconds: float, nbytes: int = MEASURED_NBYTES
) -> tuple[dict[str, float], DiskRates]:
    """Return the rates of this machine in GB/s, and those of its disk; leaves nothing behind.

    The rate of the disk is the sustained one.
    """
    _require_folder(folder, "measure")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((nbytes // 4096, 2048), dtype=np.float32)
    rows = (values.view(np.uint32) >> 16).astype(np.uint16)
    order, target = rng.permutation(len(rows)), np.empty_like(rows)
    encoder = encoding.ArrayEncoder(rows, "bfloat16", order=order)
    chunk = np.empty(encoder.capacity, np.uint8)

    def encode() -> None:
        digest = hashlib.sha256()
        for index in range(encoder.n_chunks):
            digest.update(chunk.data[: encoder.encode(index, chunk)])

    rates = {
        "copy": _gbps(lambda: np.copyto(target, rows), rows.nbytes),
        "encode": _gbps(encode, rows.nbytes),
    }
    rates["d2h"] = _d2h_gbps(rows) or rates["copy"]
    disk = measure_disk(folder, seconds, nbytes)
    return {**rates, "disk": disk.sustained_gbps}, disk


def _gbps(work: Callable[[], object], nbytes: int) -> float:
    return nbytes / min(timeit.repeat(work, number=1, repeat=N_TRIES)) / GB


def _d2h_gbps(rows: np.ndarray) -> float | None:
    """Return the rate from a CUDA device into pinned memory, ``None`` without one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    device = torch.from_numpy(rows.view(np.int16)).cuda()
    host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)

    def copy() -> None:
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return _gbps(copy, rows.nbytes)


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

    def lines(self) -> list[tuple[str, str]]:
        median, p99, longest = self.prompt_len
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        if self.peak_tokens_per_s is not None:
            rate += f", {self.peak_tokens_per_s:,.0f} in the busiest second"
        memory = "not known" if self.peak_nbytes is None else format_nbytes(self.peak_nbytes)
        prompts = f"{median:,} tokens (median), {p99:,} (p99), {longest:,} (longest)"
        lines = [
            ("stress", f"{self.n_requests:,} requests of random tokens; prompts {prompts}"),
            ("", f"{self.n_tokens:,} tokens in {format_seconds(self.seconds)}: {rate}"),
            ("", f"peak memory {memory}, all processes with the model"),
        ]
        if self.device_nbytes is not None:
            words = f"peak on the GPUs {format_nbytes(self.device_nbytes)}, with model and KV cache"
            lines.append(("", words))
        if self.capture_nbytes is not None:
            lines.append(
                ("", f"reserved by capture and writer: {format_nbytes(self.capture_nbytes)}")
            )
        for queue in self.queues:
            what = counted(queue.depth, "shard" if queue.stage == "pool" else "step")
            line = f"{queue.stage}: at most {what}"
            if queue.n_stalls:
                line += f"; {queue.n_stalls:,} waits, {format_seconds(queue.stall_s)}"
            lines.append(("", line))
        if self.disk_p99_s is not None:
            lines.append(("", f"slowest p99 of a write: {format_seconds(self.disk_p99_s)}"))
        lost = f"{self.dropped:,} ({self.dropped / max(1, self.n_tokens):.1%})"
        lines.append(("", f"drop_newest: {lost if self.dropped else 'no'} rows lost"))
        return lines


def stress(inputs: PlanSettings, sizes: Sizes) -> StressResult:
    """Return what became of a short harvest; leaves nothing behind."""
    folder, engine = inputs.stress, inputs.engine
    assert folder is not None
    if inputs.model is None:
        expected = "the model that is to be harvested"
        raise ActdsError("E009", "stress", got="no model", expected=expected)
    _require_folder(folder, "stress")
    with _temporary(folder, "stress") as place:
        prompt = Path(place) / "prompt.txt"
        prompt.write_text("stress\n", encoding="utf-8")
        settings = WriteSettings(
            out=f"{place}/acts",
            model=inputs.model,
            prompts=str(prompt),
            hooks=inputs.hooks,
            engine=engine,
            engine_args=_with_step(engine, inputs.engine_args, sizes.max_step_rows),
            rows_per_shard=sizes.rows_per_shard,
            ring_mib=max(1, -(-sizes.ring_nbytes // MIB)),
            staging_mib=max(1, -(-sizes.staging_nbytes // MIB)),
            overflow="drop_newest",
            readouts=inputs.readouts > 0,
            max_tokens=MAX_GENERATED,
        )
        plan, kind = long_tailed(settings), find_engine(engine)
        if kind.replicas(plan.engine) > 1:  # each has a machine of its own: one tells of all
            plan = replace(plan, engine=kind.of_replica(plan.engine, 0))
        with _peak(_memory) as peak, _peak(device_memory) as device:
            harvest_plan(settings, plan, feed=_timed(inputs.stress_seconds))
        catalog = Catalog.read(open_store(settings.out))
        return _result(catalog, plan, max(peak, default=None), max(device, default=None))


def _require_folder(folder: Path, place: str) -> None:
    if not folder.is_dir():
        got, expected = f"{folder}: no such folder", "a folder on the target disk"
        raise ActdsError("E009", place, got=got, expected=expected)


def _temporary(folder: Path, what: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        prefix=f".actds-{what}-", dir=folder, ignore_cleanup_errors=True
    )


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
