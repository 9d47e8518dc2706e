"""Rates of a machine (memory, encoder, disk), and which stage of a harvest saturates first.

Rates are given, measured with the real encoder and store on random rows, or assumed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from actds.errors import ActdsError
from actds.format import encoding
from actds.store import open_store
from actds.text import counted, format_nbytes
from actds_writers.config import MIB
from actds_writers.sizing.needs import (
    Geometry,
    Load,
    MemoryBound,
    Overhead,
    Sizes,
    Stalled,
    joined_memory,
    memory_bound,
    peak_queue,
    stalled,
    stored_nbytes_per_token,
)

GB = 1e9
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
    place = Path(tempfile.mkdtemp(prefix=".actds-measure-", dir=folder))
    room = max(1, int(shutil.disk_usage(place).free * KEPT_SHARE) // nbytes)
    kept: deque[str] = deque()
    numbers = itertools.count()
    try:
        store = open_store(place)

        def write() -> int:
            if len(kept) >= room:
                store.remove(kept.popleft())
            kept.append(f"shards/try-{next(numbers)}")
            store.put_new(kept[-1], [data])
            return nbytes

        return until_sustained(write, seconds)
    finally:
        shutil.rmtree(place, ignore_errors=True)


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


Origin = Literal["assumed", "given", "measured"]
MEASURED_NBYTES = 64 << 20
N_TRIES = 3


@dataclass(frozen=True)
class Rate:
    """Bytes per second, in GB/s, and where the figure comes from."""

    gbps: float
    origin: Origin


@dataclass(frozen=True)
class Machine:
    """Rates of a machine.

    Args:
        d2h: from the device into the host ring.
        copy: from the ring into a shard buffer, one thread.
        encode: permuting and encoding rows, one thread.
        disk: hashing, writing and syncing files, one after the other.
    """

    d2h: Rate
    copy: Rate
    encode: Rate
    disk: Rate
    n_threads: int

    @property
    def rates(self) -> dict[str, Rate]:
        return {"d2h": self.d2h, "copy": self.copy, "encode": self.encode, "disk": self.disk}


DEFAULTS = {"d2h": 20.0, "copy": 5.0, "encode": 1.0, "disk": 1.0}
"""GB/s: a pinned copy over PCIe 4, a memory copy, one core of a server, one NVMe disk."""


def machine(given: dict[str, float | None], measured: dict[str, float], n_threads: int) -> Machine:
    def rate(name: str) -> Rate:
        value = given.get(name)
        if value is not None:
            return Rate(value, "given")
        if name in measured:
            return Rate(measured[name], "measured")
        return Rate(DEFAULTS[name], "assumed")

    return Machine(rate("d2h"), rate("copy"), rate("encode"), rate("disk"), n_threads)


def usual_threads() -> int:
    return max(1, (os.cpu_count() or 2) // 2)


def measure(
    folder: Path, seconds: float, nbytes: int = MEASURED_NBYTES
) -> tuple[dict[str, float], DiskRates]:
    """Return the rates of this machine in GB/s, and those of its disk; leaves nothing behind.

    The rate of the disk is the sustained one.
    """
    if not folder.is_dir():
        raise ActdsError(
            "E009",
            "measure",
            got=f"{folder}: no such folder",
            expected="a folder on the target disk",
        )
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
    best = min(_seconds(work) for _ in range(N_TRIES))
    return nbytes / best / GB


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


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


RING_HEADROOM = 1.25
"""Rings are taken in slices of whole steps, and a slice must not wrap around the end."""


@dataclass(frozen=True)
class StageNeed:
    """A stage and its load."""

    name: str
    what: str
    nbytes_per_token: float
    max_tokens: float
    origin: str

    def gbps(self, tokens_per_s: float) -> float:
        return self.nbytes_per_token * tokens_per_s / GB


@dataclass(frozen=True)
class Capacity:
    """What a load needs, by stage.

    Args:
        ring_burst_nbytes: ring that holds the worst burst; infinite when the mean is too much.
        ring_stall_nbytes: ring that holds a disk stall at the mean load.
        ring_nbytes: ring that holds both at once, with headroom.
        stalls: cost of stalls with the ring of ``sizes``.
        memory: of one engine. The rings are those of one pipeline stage, which are all of one size.
        parts: what each pipeline stage has of a token.
    """

    geometry: Geometry
    sizes: Sizes
    load: Load
    stages: tuple[StageNeed, ...]
    bottleneck: StageNeed
    stored: dict[str, float]
    memory: MemoryBound
    stall_s: float
    ring_burst_nbytes: float
    ring_stall_nbytes: float
    ring_nbytes: float
    stalls: tuple[Stalled, ...]
    parts: tuple[Geometry, ...]
    by_stage: tuple[MemoryBound, ...]
    n_replicas: int = 1

    @property
    def stored_nbytes(self) -> float:
        return sum(self.stored.values())

    @property
    def sustained_share(self) -> float:
        return min(1.0, self.bottleneck.max_tokens / self.load.mean)

    @property
    def fits(self) -> bool:
        return self.bottleneck.max_tokens >= self.load.mean

    @property
    def fits_burst(self) -> bool:
        return self.bottleneck.max_tokens >= self.load.peak


def capacity(
    geometry: Geometry,
    sizes: Sizes,
    load: Load,
    machine: Machine,
    overhead: Overhead,
    *,
    stall_s: float,
    parts: Sequence[Geometry] = (),
    n_replicas: int = 1,
) -> Capacity:
    """Return what a load needs.

    Args:
        sizes: sizes to check; a ring of 0 for the one that burst and stall need.
    """
    parts = tuple(parts) or (geometry,)
    stored = stored_nbytes_per_token(geometry, overhead, load, sizes.rows_per_shard)
    stages = _stages(geometry, machine, sum(stored.values()))
    bottleneck = min(stages, key=lambda stage: stage.max_tokens)
    service = bottleneck.max_tokens
    # A stage has the same tokens in its ring as the others, and the widest decides the size.
    ring_row = max(part.row_nbytes for part in parts) / n_replicas
    queue_nbytes = peak_queue(load, service, stall_s) * ring_row * RING_HEADROOM
    proposed = int(_whole_mib(queue_nbytes)) if math.isfinite(queue_nbytes) else 0
    chosen = replace(sizes, ring_nbytes=sizes.ring_nbytes or proposed)
    own_threads = replace(chosen, n_threads=max(1, chosen.n_threads // n_replicas))
    by_stage = tuple(memory_bound(part, own_threads) for part in parts)
    memory = joined_memory(by_stage, memory_bound(geometry, own_threads))
    ring_tokens = n_replicas * min(
        bound.ring / part.row_nbytes for bound, part in zip(by_stage, parts, strict=True)
    )
    return Capacity(
        geometry=geometry,
        sizes=chosen,
        load=load,
        stages=stages,
        bottleneck=bottleneck,
        stored=stored,
        memory=memory,
        stall_s=stall_s,
        ring_burst_nbytes=peak_queue(load, service) * ring_row,
        ring_stall_nbytes=load.mean * stall_s * ring_row,
        ring_nbytes=_whole_mib(queue_nbytes),
        stalls=tuple(stalled(load, ring_tokens, stall_s * n) for n in (1, 2, 5, 10)),
        parts=parts,
        by_stage=by_stage,
        n_replicas=n_replicas,
    )


def _stages(g: Geometry, machine: Machine, stored: float) -> tuple[StageNeed, ...]:
    moved = g.row_nbytes + g.readout_nbytes
    encode = machine.encode.gbps * machine.n_threads * GB / g.row_nbytes
    disk = machine.disk.gbps * GB / stored
    threads = counted(machine.n_threads, "thread")
    return (
        StageNeed("staging", "copy on the device", moved, math.inf, "not modelled"),
        StageNeed(
            "link", "device to ring", moved, machine.d2h.gbps * GB / moved, machine.d2h.origin
        ),
        StageNeed(
            "ring",
            "ring to shard buffer",
            g.row_nbytes,
            machine.copy.gbps * GB / g.row_nbytes,
            machine.copy.origin,
        ),
        StageNeed(
            "encode",
            f"compress and hash, {threads}",
            g.row_nbytes,
            encode,
            machine.encode.origin,
        ),
        StageNeed("disk", "write, fsync", stored, disk, machine.disk.origin),
    )


def _whole_mib(nbytes: float) -> float:
    return math.ceil(nbytes / MIB) * MIB if math.isfinite(nbytes) else nbytes
