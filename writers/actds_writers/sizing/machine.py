"""Rates of a machine (memory, encoder, disk), and which stage of a harvest saturates first.

Rates are given, measured with the real encoder and store on random rows, or assumed.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from actds.errors import ActdsError
from actds.format import encoding
from actds.text import counted
from actds_writers.config import MIB
from actds_writers.sizing.disk import GB, DiskRates, measure_disk
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
        """Return the rates by name."""
        return {"d2h": self.d2h, "copy": self.copy, "encode": self.encode, "disk": self.disk}


DEFAULTS = {"d2h": 20.0, "copy": 5.0, "encode": 1.0, "disk": 1.0}
"""GB/s: a pinned copy over PCIe 4, a memory copy, one core of a server, one NVMe disk."""


def machine(given: dict[str, float | None], measured: dict[str, float], n_threads: int) -> Machine:
    """Return the rates: given ones before measured before assumed."""

    def rate(name: str) -> Rate:
        value = given.get(name)
        if value is not None:
            return Rate(value, "given")
        if name in measured:
            return Rate(measured[name], "measured")
        return Rate(DEFAULTS[name], "assumed")

    return Machine(rate("d2h"), rate("copy"), rate("encode"), rate("disk"), n_threads)


def usual_threads() -> int:
    """Return the default number of encoding threads."""
    return max(1, (os.cpu_count() or 2) // 2)


def measure(
    folder: Path, seconds: float, nbytes: int = MEASURED_NBYTES
) -> tuple[dict[str, float], DiskRates]:
    """Return the rates of this machine in GB/s, and those of its disk; leaves nothing behind.

    The rate of the disk is the sustained one.

    Args:
        folder: an existing folder on the target disk.
        seconds: how long to write to the disk at most.
        nbytes: bytes of the rows that are copied, encoded and written at once.

    Raises:
        ActdsError: E009 when the folder does not exist, E503 when the disk refuses.
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

    found = {
        "copy": _gbps(lambda: np.copyto(target, rows), rows.nbytes),
        "encode": _gbps(encode, rows.nbytes),
    }
    found["d2h"] = _d2h_gbps(rows) or found["copy"]
    disk = measure_disk(folder, seconds, nbytes)
    return {**found, "disk": disk.sustained_gbps}, disk


def _gbps(work: Callable[[], object], nbytes: int) -> float:
    """Return the rate of the fastest try: other load can only slow it down."""
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
    """A stage and its load.

    Args:
        name: ``staging``, ``link``, ``ring``, ``encode`` or ``disk``.
        nbytes_per_token: bytes that pass it per computed token.
        max_tokens: tokens per second at which it saturates; infinite when not modelled.
        origin: where its rate comes from.
    """

    name: str
    what: str
    nbytes_per_token: float
    max_tokens: float
    origin: str

    def gbps(self, tokens_per_s: float) -> float:
        """Return the GB/s at a load."""
        return self.nbytes_per_token * tokens_per_s / GB


@dataclass(frozen=True)
class Capacity:
    """What a load needs, by stage.

    Args:
        stages: in the order of the data path.
        bottleneck: the one that saturates first.
        stored: bytes on disk per token, by purpose.
        ring_burst_nbytes: ring that holds the worst burst; infinite when the mean is too much.
        ring_stall_nbytes: ring that holds a disk stall at the mean load.
        ring_nbytes: ring that holds both at once, with headroom.
        stalls: cost of stalls with the ring of ``sizes``.
        memory: of one engine. The rings are those of one pipeline stage, which are all of one size.
        parts: what each pipeline stage has of a token.
        by_stage: its memory; of the bound, hooks, staging, narrow, ring and lane are its own.
        n_replicas: engines that share the load.
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
        """Return the bytes on disk per token."""
        return sum(self.stored.values())

    @property
    def sustained_share(self) -> float:
        """Return the share of the mean load that the slowest stage carries, at most 1."""
        return min(1.0, self.bottleneck.max_tokens / self.load.mean)

    @property
    def fits(self) -> bool:
        """Return whether every stage carries the mean load."""
        return self.bottleneck.max_tokens >= self.load.mean

    @property
    def fits_burst(self) -> bool:
        """Return whether every stage carries the strongest burst without a queue."""
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
        parts: what each pipeline stage has of a token; one has all when empty.
        n_replicas: engines that share the load.
    """
    parts = tuple(parts) or (geometry,)
    stored = stored_nbytes_per_token(geometry, overhead, load, sizes.rows_per_shard)
    stages = _stages(geometry, machine, sum(stored.values()))
    bottleneck = min(stages, key=lambda stage: stage.max_tokens)
    service = bottleneck.max_tokens
    # A stage has the same tokens in its ring as the others, and the widest decides the size.
    ring_row = max(part.row_nbytes for part in parts) / n_replicas
    both = peak_queue(load, service, stall_s) * ring_row * RING_HEADROOM
    proposed = int(_whole_mib(both)) if math.isfinite(both) else 0
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
        ring_nbytes=_whole_mib(both),
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
