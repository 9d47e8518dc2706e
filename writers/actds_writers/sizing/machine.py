"""Machine: how fast memory, encoder and disk are; measured here, given, or assumed.

Before the token's way; runs the real encoder and the real store on made-up rows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from actds.errors import ActdsError
from actds.format import arrays
from actds.store import open_store

__all__ = ["DEFAULTS", "Machine", "Rate", "measure"]

Origin = Literal["assumed", "given", "measured"]
GB = 1e9
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
        n_threads: threads that encode.
    """

    d2h: Rate
    copy: Rate
    encode: Rate
    disk: Rate
    n_threads: int

    @property
    def rates(self) -> dict[str, Rate]:
        """Return the rates by name."""
        return {"d2h": self.d2h, "copy": self.copy, "encode": self.encode, "disk": self.disk}


DEFAULTS = {"d2h": 20.0, "copy": 5.0, "encode": 1.0, "disk": 1.0}
"""GB/s: a pinned copy over PCIe 4, a memory copy, one core of a server, one NVMe disk."""


def machine(given: dict[str, float | None], measured: dict[str, float], n_threads: int) -> Machine:
    """Return the rates: given before measured before assumed."""

    def rate(name: str) -> Rate:
        value = given.get(name)
        if value is not None:
            return Rate(value, "given")
        if name in measured:
            return Rate(measured[name], "measured")
        return Rate(DEFAULTS[name], "assumed")

    return Machine(rate("d2h"), rate("copy"), rate("encode"), rate("disk"), n_threads)


def usual_threads() -> int:
    """Return the threads that encode when nobody says how many."""
    return max(1, (os.cpu_count() or 2) // 2)


def measure(folder: Path, nbytes: int = MEASURED_NBYTES) -> dict[str, float]:
    """Return the rates of this machine in GB/s; takes seconds, and leaves nothing behind.

    Args:
        folder: an existing folder on the disk that is to be written to.
        nbytes: bytes of one try.

    Raises:
        ActdsError: E009 when the folder does not exist, E503 when the disk refuses.
    """
    if not folder.is_dir():
        raise ActdsError(
            "E009", "--measure", got=f"{folder}: no folder", expected="a folder on the target disk"
        )
    rng = np.random.default_rng(0)
    values = rng.standard_normal((nbytes // 4096, 2048), dtype=np.float32)
    rows = (values.view(np.uint32) >> 16).astype(np.uint16)
    order, target = rng.permutation(len(rows)), np.empty_like(rows)

    def encode() -> None:
        arrays.encode_array(rows[order], "bfloat16")

    found = {
        "copy": _gbps(lambda: np.copyto(target, rows), rows.nbytes),
        "encode": _gbps(encode, rows.nbytes),
        "disk": _disk_gbps(folder, rows),
    }
    found["d2h"] = _d2h_gbps(rows) or found["copy"]
    return found


def _gbps(work: Callable[[], object], nbytes: int) -> float:
    """Return the rate of the fastest try: what else runs can only slow it down."""
    best = min(_seconds(work) for _ in range(N_TRIES))
    return nbytes / best / GB


def _disk_gbps(folder: Path, rows: np.ndarray) -> float:
    """Return the rate over all tries: a disk's cache makes single ones too fast."""
    place = Path(tempfile.mkdtemp(prefix=".actds-measure-", dir=folder))
    try:
        store = open_store(place)
        seconds = [
            _seconds(lambda n=n: store.put_new(f"shards/try-{n}", [rows.data]))  # type: ignore[misc]
            for n in range(N_TRIES)
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return N_TRIES * rows.nbytes / sum(seconds) / GB


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
