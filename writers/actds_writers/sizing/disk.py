"""The drive under a folder: its rate in a burst and sustained, and who else uses it.

A drive takes the first gigabytes into a faster cache. A harvest writes for hours, so the rate that
counts is the one that is left when the cache is full.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actds.store import open_store
from actds.text import format_nbytes

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
    """What a drive took, written without a pause.

    Args:
        burst_gbps: the fastest window.
        sustained_gbps: the last windows together.
        cache_nbytes: bytes before the rate fell, ``None`` when it did not.
        is_steady: whether the last windows were alike; else the time was over before.
        nbytes: bytes written.
        seconds: how long that took.
    """

    burst_gbps: float
    sustained_gbps: float
    cache_nbytes: int | None
    is_steady: bool
    nbytes: int
    seconds: float

    @property
    def words(self) -> str:
        """Return it in a sentence."""
        wrote = f"{format_nbytes(self.nbytes)} in {self.seconds:.0f} s"
        said = f"burst {self.burst_gbps:.3g} GB/s, sustained {self.sustained_gbps:.3g} GB/s"
        if self.cache_nbytes is None:
            return f"{said}; no fall in {wrote}: a larger cache would not show"
        fell = f"{said}, after {format_nbytes(self.cache_nbytes)}; {wrote}"
        return fell if self.is_steady else f"{fell}, and not steady yet"


def measure_disk(folder: Path, seconds: float, nbytes: int) -> DiskRates:
    """Return the rates of the drive under a folder; leaves nothing behind.

    Args:
        folder: an existing folder.
        seconds: how long to write at most; less when the rate has fallen and is steady again.
        nbytes: bytes of a file, as a shard has.

    Raises:
        ActdsError: E503 when the disk refuses.
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
    """Return the rates of writes that follow each other without a pause.

    Args:
        write: writes something durable; returns its bytes.
        seconds: how long to go on at most.
        clock: the time in seconds.
    """
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
    """Return what else uses the drive under a folder: temporary files, swap, logs.

    Args:
        folder: an existing folder.
        root: where ``sys``, ``proc`` and ``var`` are.
    """
    mine = _drives(os.stat(folder).st_dev, root)
    others = [("temporary files", Path(tempfile.gettempdir())), ("logs", root / "var/log")]
    found = [
        f"{what} ({path})"
        for what, path in others
        if path.is_dir() and mine & _drives(os.stat(path).st_dev, root)
    ]
    return [*found, *(f"swap ({path})" for path, device in _swaps(root) if mine & device)]


def _swaps(root: Path) -> list[tuple[str, frozenset[str]]]:
    try:
        lines = (root / "proc/swaps").read_text().splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        path, kind = line.split()[:2]
        try:
            status = os.stat(path.replace("\\040", " "))
        except OSError:  # in another namespace than ours
            continue
        device = status.st_rdev if kind == "partition" else status.st_dev
        found.append((path, _drives(device, root)))
    return found


def _drives(device: int, root: Path) -> frozenset[str]:
    """Return the names of the drives that a device lies on; of one without a drive its number.

    A partition lies on its drive, a mapped volume or a RAID on those of its parts.
    """
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
