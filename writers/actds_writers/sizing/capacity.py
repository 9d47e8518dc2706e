"""Capacity: stage by stage, what a load needs and what a machine gives; which saturates first.

Before the token's way; pure. Imports sizing and the rates of a machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from actds_writers.sizing.machine import GB, Machine
from actds_writers.sizing.needs import (
    Geometry,
    Load,
    MemoryBound,
    Overhead,
    Sizes,
    Stalled,
    memory_bound,
    peak_queue,
    stalled,
    stored_nbytes_per_token,
)

__all__ = ["Capacity", "StageNeed", "capacity"]

MIB = 1 << 20
RING_HEADROOM = 1.25
"""Rings are taken in slices of whole steps, and a slice must not wrap around the end."""


@dataclass(frozen=True)
class StageNeed:
    """A stage and what it is asked for.

    Args:
        name: ``staging``, ``link``, ``ring``, ``encode``, ``disk`` or ``pool``.
        what: what it does, in words.
        nbytes_per_token: bytes that pass it per computed token.
        max_tokens: tokens per second at which it saturates; infinite where no figure is used.
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
    """The answer of ``actds plan``.

    Args:
        stages: in the token's way.
        bottleneck: the one that saturates first.
        stored: bytes on disk per token, by what they are for.
        memory: bound of all stages.
        ring_burst_nbytes: ring that holds the worst burst; infinite when the mean is too much.
        ring_stall_nbytes: ring that holds a stall of the disk at the mean load.
        ring_nbytes: ring that holds both at once, with headroom.
        stalls: what stalls cost with the ring of the options.
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

    @property
    def stored_nbytes(self) -> float:
        """Return the bytes on disk per token."""
        return sum(self.stored.values())

    @property
    def sustained_share(self) -> float:
        """Return the share of the mean load that the slowest stage carries, 1 at most."""
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
) -> Capacity:
    """Return what a load needs.

    Args:
        geometry: what one token is.
        sizes: options to judge; a ring of 0 for the one that burst and stall ask for.
        load: the load.
        machine: rates.
        overhead: bytes beside the rows.
        stall_s: stall of the disk that no row may be lost to.
    """
    stored = stored_nbytes_per_token(geometry, overhead, load, sizes.rows_per_shard)
    stages = _stages(geometry, machine, sum(stored.values()))
    bottleneck = min(stages, key=lambda stage: stage.max_tokens)
    service, row = bottleneck.max_tokens, geometry.row_nbytes
    both = peak_queue(load, service, stall_s) * row * RING_HEADROOM
    proposed = int(_whole_mib(both)) if math.isfinite(both) else 0
    chosen = replace(sizes, ring_nbytes=sizes.ring_nbytes or proposed)
    memory = memory_bound(geometry, chosen)
    ring_tokens = memory.ring / row
    return Capacity(
        geometry=geometry,
        sizes=chosen,
        load=load,
        stages=stages,
        bottleneck=bottleneck,
        stored=stored,
        memory=memory,
        stall_s=stall_s,
        ring_burst_nbytes=peak_queue(load, service) * row,
        ring_stall_nbytes=load.mean * stall_s * row,
        ring_nbytes=_whole_mib(both),
        stalls=tuple(stalled(load, ring_tokens, stall_s * n) for n in (1, 2, 5, 10)),
    )


def _stages(g: Geometry, machine: Machine, stored: float) -> tuple[StageNeed, ...]:
    moved = g.row_nbytes + g.readout_nbytes
    encode = machine.encode.gbps * machine.n_threads * GB / g.row_nbytes
    disk = machine.disk.gbps * GB / stored
    threads = f"{machine.n_threads} thread{'' if machine.n_threads == 1 else 's'}"
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
        StageNeed("encode", f"compress, {threads}", g.row_nbytes, encode, machine.encode.origin),
        StageNeed("disk", "hash, write, fsync", stored, disk, machine.disk.origin),
        # One commit thread encodes a shard, then writes it: the two times add up.
        StageNeed("pool", "encode, then disk", g.row_nbytes, 1 / (1 / encode + 1 / disk), "both"),
    )


def _whole_mib(nbytes: float) -> float:
    return math.ceil(nbytes / MIB) * MIB if math.isfinite(nbytes) else nbytes
