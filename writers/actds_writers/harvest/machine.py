"""What this machine can do: its rates, measured with the real encoder and store on random rows."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import time
import timeit
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actds.errors import ActdsError
from actds.format import encoding
from actds.store import open_store
from actds.text import format_nbytes
from actds_writers.sizing import GB, Rate

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
    with tempfile.TemporaryDirectory(
        prefix=".actds-measure-", dir=folder, ignore_cleanup_errors=True
    ) as place:
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
    if not folder.is_dir():
        got, expected = f"{folder}: no such folder", "a folder on the target disk"
        raise ActdsError("E009", "measure", got=got, expected=expected)
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
