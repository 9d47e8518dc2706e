"""What a harvest needs, in bytes, and what it loses when a stage is too slow.

Arithmetic only; worker and writer reserve memory by the same formulas, and tests compare them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from actds.dataset.write_threads import N_HELD, window
from actds.format.arrays import DTYPES
from actds.format.encoding import encoded_nbytes
from actds.text import counted
from actds_writers.config import MIB
from actds_writers.ipc.link import PAGE, aligned
from actds_writers.ipc.messages import HookSpec

PADDING_ROWS = 1024
"""Padding rows that a batch may have above the scheduler's limit."""
NARROW_STEPS = 4
NARROW_NBYTES = 4 << 20
"""Largest steps whose identity and readouts may wait on the device, and at least so many bytes:
only a full lane should make the engine wait for these."""
LANE_NBYTES = 32 << 20
"""Readouts that may wait for the writer before the engine waits, or gives up steps if it serves:
under a drop policy a stalled disk costs rows first."""
N_BUFFERS = 3
"""Two buffers being filled, one per phase, and one being encoded."""
TOKEN_COLUMNS_NBYTES = 38
READOUT_PART_NBYTES = 32 << 20
"""Readouts collected before a part is committed, in addition to the part being written."""

CENSUS_REQUEST_NBYTES, CENSUS_STEP_NBYTES, CENSUS_TOKEN_NBYTES = 300, 40, 3
"""Packed bytes that the census keeps per ended request, step and token until the run ends; a test
checks these bounds."""

BUFFER_BUDGET_NBYTES = 4 << 30
"""Memory of all shard buffers, when the number of rows per shard is not given."""
MIN_ROWS_PER_SHARD = 1024
DEFAULT_ROWS_PER_SHARD = 65_536


@dataclass(frozen=True)
class Width:
    """The row of one hook: its channels, and bytes per channel as stored."""

    d_model: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.d_model * self.itemsize


@dataclass(frozen=True)
class Geometry:
    """The size of one token: the width of each hook, and its readouts."""

    hooks: tuple[Width, ...]
    n_readouts: int = 0

    @classmethod
    def of(cls, hooks: Sequence[HookSpec], n_readouts: int = 0) -> Geometry:
        widths = (Width(hook.d_model, DTYPES[hook.dtype].itemsize) for hook in hooks)
        return cls(tuple(widths), n_readouts)

    @property
    def n_hooks(self) -> int:
        return len(self.hooks)

    @property
    def row_nbytes(self) -> int:
        return sum(hook.nbytes for hook in self.hooks)

    @property
    def readout_nbytes(self) -> int:
        return 4 * self.n_hooks * self.n_readouts


@dataclass(frozen=True)
class Sizes:
    """The sizes of a harvest's buffers.

    Args:
        max_step_rows: tokens of the largest step, vLLM's ``max_num_batched_tokens``.
        ring_nbytes: host ring; at least two steps.
        staging_nbytes: staging ring on the device; at least one step, with more than one in flight
            one more than these.
        lane_nbytes: lane of the readouts; at least two steps.
        n_threads: threads of the writer that encode, hash and write.
        n_choices: selections of hooks that requests may make beside all.
        holds_files: whether the store keeps a file in memory until it is put.
        in_flight: most steps whose rows wait for their results; asynchronous scheduling has 2.
        padding: further rows that a forward may have.
        on_gpu: whether the model is on a GPU.
    """

    max_step_rows: int
    rows_per_shard: int
    ring_nbytes: int
    staging_nbytes: int = 0
    lane_nbytes: int = 0
    n_threads: int = 1
    n_choices: int = 0
    holds_files: bool = False
    in_flight: int = 1
    padding: int = PADDING_ROWS
    on_gpu: bool = False


def staged_steps(in_flight: int) -> int:
    """Return the largest steps that the staging ring has room for at least.

    A step is contiguous: with others held, one more than these must fit.
    """
    return 1 if in_flight == 1 else in_flight + 1


@dataclass(frozen=True)
class WorkerMemory:
    """The memory that one worker takes for capture, in bytes, reserved once.

    Args:
        hooks: buffers and directions of the hooks, on the device.
        narrow: identity and readouts of waiting steps, on the device.
        gathered: rows of a step that are stored, on a GPU, where a rule or a rejected draft leaves
            out others of it.
        identified: identity and readouts of one step, in host memory.
    """

    hooks: int
    staging: int
    narrow: int
    gathered: int
    ring: int
    lane: int
    identified: int

    @property
    def device_nbytes(self) -> int:
        return self.hooks + self.staging + self.narrow + self.gathered

    @property
    def shared_nbytes(self) -> int:
        return self.ring + self.lane

    @property
    def pinned_nbytes(self) -> int:
        return self.ring + self.identified

    @property
    def nbytes(self) -> int:
        return self.device_nbytes + self.shared_nbytes + self.identified


def worker_memory(geometry: Geometry, sizes: Sizes) -> WorkerMemory:
    g, rows = geometry, sizes.max_step_rows
    step_nbytes = aligned(g.row_nbytes * rows)
    readout_step = aligned(g.readout_nbytes * rows)
    narrow_step = narrow_nbytes(rows, g.n_hooks, g.readout_nbytes)
    lane = max(sizes.lane_nbytes, 2 * readout_step) if g.n_readouts else 0
    hooks = (rows + sizes.padding) * (g.row_nbytes + g.readout_nbytes) + 8 * g.n_hooks
    if g.n_readouts:
        # The rows of the widest hook in float32, and the directions.
        hooks += 4 * max(hook.d_model for hook in g.hooks) * (rows + sizes.padding)
        hooks += 4 * sum(hook.d_model for hook in g.hooks) * (g.n_readouts - 1)
    return WorkerMemory(
        hooks=hooks,
        staging=max(sizes.staging_nbytes, staged_steps(sizes.in_flight) * step_nbytes),
        narrow=max(NARROW_NBYTES, max(NARROW_STEPS, sizes.in_flight + 1) * narrow_step),
        gathered=step_nbytes if sizes.on_gpu else 0,
        # Two steps at least, so that the writer reads one while the transfer fills the other.
        ring=aligned(max(sizes.ring_nbytes, 2 * step_nbytes), PAGE),
        lane=aligned(lane, PAGE),
        identified=narrow_step,
    )


def narrow_nbytes(n_rows: int, n_hooks: int, readout_nbytes: int) -> int:
    """Return the bytes of a step's token ids, positions, rows seen by each hook, and readouts."""
    return aligned(16 * n_rows) + aligned(8 * n_hooks) + aligned(readout_nbytes * n_rows)


@dataclass(frozen=True)
class MemoryBound(WorkerMemory):
    """The bound on memory by stage, in bytes, reserved once: the worker's, and the writer's.

    Args:
        buffers: shard buffers of the writer.
        encode: encoded chunks that wait to be hashed and written, what each thread works on, and
            orders and token tables of the shards being written; files that an object store is
            given as a whole.
        readouts: readouts collected for the next part, and the part being written.
    """

    buffers: int
    encode: int
    readouts: int

    @property
    def writer_nbytes(self) -> int:
        return self.buffers + self.encode + self.readouts

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.writer_nbytes


def n_buffers(n_choices: int) -> int:
    """Return the shard buffers of a writer, two more for each selection of hooks."""
    return N_BUFFERS + 2 * n_choices


def memory_bound(geometry: Geometry, sizes: Sizes) -> MemoryBound:
    """Return the memory of all stages.

    Not included: interpreters, page cache, and the census (``census_nbytes``).
    """
    capacity = sizes.rows_per_shard + sizes.max_step_rows
    buffer_nbytes = capacity * (geometry.row_nbytes + TOKEN_COLUMNS_NBYTES)
    return MemoryBound(
        **vars(worker_memory(geometry, sizes)),
        buffers=n_buffers(sizes.n_choices) * buffer_nbytes,
        encode=_encode_nbytes(geometry, sizes, capacity),
        readouts=2 * READOUT_PART_NBYTES if geometry.n_readouts else 0,
    )


def joined_memory(stages: Sequence[MemoryBound], writer: MemoryBound) -> MemoryBound:
    return replace(
        writer,
        **{
            field.name: sum(getattr(stage, field.name) for stage in stages)
            for field in fields(WorkerMemory)
        },
    )


def _encode_nbytes(g: Geometry, sizes: Sizes, capacity: int) -> int:
    chunk = max(encoded_nbytes(hook.d_model, hook.itemsize) for hook in g.hooks)
    chunks = window(sizes.n_threads) + 2 * sizes.n_threads
    orders = N_BUFFERS * capacity * (8 + 2 * TOKEN_COLUMNS_NBYTES)
    kept_nbytes = max(hook.nbytes for hook in g.hooks) * capacity if sizes.holds_files else 0
    return chunks * chunk + orders + 2 * N_HELD * kept_nbytes


def census_nbytes(n_requests: float, n_steps: float, n_tokens: float) -> float:
    """Return the bound on the growth of a census, packed, until the end of the run.

    Args:
        n_tokens: computed tokens; each may be a piece of its own, and every prefix block of a
            prompt, of 16 tokens or more, has an entry of 32 bytes.
    """
    return (
        CENSUS_REQUEST_NBYTES * n_requests
        + CENSUS_STEP_NBYTES * n_steps
        + CENSUS_TOKEN_NBYTES * n_tokens
    )


def rows_per_shard(row_nbytes: int, n_choices: int = 0) -> int:
    """Return the default rows per shard: 65,536, fewer when the buffers would be too large."""
    rows, nbytes = DEFAULT_ROWS_PER_SHARD, row_nbytes * n_buffers(n_choices)
    while rows > MIN_ROWS_PER_SHARD and rows * nbytes > BUFFER_BUDGET_NBYTES:
        rows //= 2
    return rows


@dataclass(frozen=True)
class Overhead:
    """Bytes on disk other than rows, and how well rows compress.

    Args:
        ratio: bytes of the rows per byte of their frames.
        readout: bytes of the readouts per row and hook, in addition to 4 per value.
        shard: bytes of manifest and ledger record per shard.
        shard_hook: bytes of metadata and manifest entries per shard and hook.
    """

    ratio: float
    token: float
    request: float
    step: float
    readout: float
    shard: float
    shard_hook: float
    source: str


MEASURED = Overhead(
    ratio=1.45,
    token=4.8,
    request=154.0,
    step=145.0,
    readout=5.3,
    shard=1_000.0,
    shard_hook=950.0,
    source="measured on 256 chat requests, 2 hooks of SmolLM2-135M; readouts simulated",
)


@dataclass(frozen=True)
class Burst:
    """A load of ``factor`` times the mean for ``seconds``."""

    factor: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """The load: tokens per second that the engine computes."""

    prefill: float
    decode: float
    tokens_per_request: float
    tokens_per_step: float
    bursts: tuple[Burst, ...] = ()

    @property
    def mean(self) -> float:
        return self.prefill + self.decode

    @property
    def peak(self) -> float:
        return self.mean * max((1.0, *(burst.factor for burst in self.bursts)))


def stored_nbytes_per_token(
    geometry: Geometry, overhead: Overhead, load: Load, rows_in_shard: int
) -> dict[str, float]:
    g, o = geometry, overhead
    per_shard = o.shard + o.shard_hook * g.n_hooks
    return {
        "rows": g.row_nbytes / o.ratio,
        "tokens": o.token,
        "readouts": g.n_hooks * (4 * g.n_readouts + o.readout) if g.n_readouts else 0.0,
        "census": o.request / load.tokens_per_request + o.step / load.tokens_per_step,
        "manifests": per_shard / rows_in_shard,
    }


def peak_queue(load: Load, service: float, stall_s: float = 0.0) -> float:
    """Return the peak of the queue in tokens, infinite when the mean load is too much.

    The worst burst begins together with a disk stall; the queue is empty before.

    Args:
        service: tokens per second that leave the queue, except during the stall.
    """
    if load.mean > service:
        return math.inf
    peak = 0.0
    for burst in (Burst(1.0, 0.0), *load.bursts):
        queue, now = 0.0, 0.0
        for until in sorted({stall_s, burst.seconds}):
            served = service * max(0.0, until - max(now, stall_s))
            extra = (burst.factor - 1) * (min(until, burst.seconds) - min(now, burst.seconds))
            arrived = load.mean * (until - now + extra)
            queue = max(0.0, queue + arrived - served)
            peak, now = max(peak, queue), max(now, until)
    return peak


@dataclass(frozen=True)
class Stalled:
    """The cost of a disk stall.

    Args:
        filled_s: time until the ring is full; infinite if never.
        engine_waits_s: time that the engine waits under ``block``; no row is lost.
        lost_tokens: rows that ``drop_newest`` loses, the ones computed last; ``drop_oldest``
            loses as many, the ones that waited longest.
        lost_share: share of the tokens computed during the stall.
    """

    stall_s: float
    filled_s: float
    engine_waits_s: float
    lost_tokens: float
    lost_share: float


def stalled(load: Load, ring_tokens: float, stall_s: float) -> Stalled:
    """Return the cost of a stall at the mean load that begins with an empty ring."""
    filled_s = ring_tokens / load.mean if load.mean else math.inf
    waits = max(0.0, stall_s - filled_s)
    lost = waits * load.mean
    total = load.mean * stall_s
    return Stalled(stall_s, filled_s, waits, lost, lost / total if total else 0.0)


@dataclass(frozen=True)
class Windows:
    """Tokens per second over windows of one length.

    ``mean``, ``p50``, ``p99`` and ``max`` are those of their rates, in tokens per second.
    """

    seconds: float
    n: int
    mean: float
    p50: float
    p99: float
    max: float

    @property
    def burst(self) -> Burst:
        return Burst(max(1.0, self.p99 / self.mean), self.seconds)


def windows(runs: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], seconds: float) -> Windows | None:
    """Return the rates over whole windows, ``None`` with fewer than two."""
    rates: list[np.ndarray] = []
    for t_ns, n_tokens in runs:
        t = np.asarray(t_ns, np.int64)
        if not len(t):
            continue
        index = (t - t.min()) // int(seconds * 1e9)
        sums = np.bincount(index, weights=np.asarray(n_tokens, np.float64))
        rates.append(sums[:-1] / seconds)  # the last window is cut by the end of the run
    of_windows = np.concatenate(rates) if rates else np.empty(0)
    if len(of_windows) < 2 or not of_windows.sum():
        return None
    p50, p99 = np.quantile(of_windows, (0.5, 0.99))
    figures = of_windows.mean(), p50, p99, of_windows.max()
    return Windows(seconds, len(of_windows), *map(float, figures))


GB = 1e9
Origin = Literal["assumed", "given", "measured"]


@dataclass(frozen=True)
class Rate:
    """Bytes per second, in GB/s, and where the figure comes from."""

    gbps: float
    origin: Origin


def usual_threads() -> int:
    return max(1, (os.cpu_count() or 2) // 2)


def free_nbytes() -> int:
    """Return the main memory that processes can still take, here and in their control group."""
    free = 0
    with suppress(OSError, ValueError, IndexError):
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, max(int(limit) - used, 0)) if limit != "max" else free
    return free


RING_HEADROOM = 1.25
"""Rings are taken in slices of whole steps, and a slice must not wrap around the end."""


@dataclass(frozen=True)
class StageNeed:
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
    rates: Mapping[str, Rate],
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
    stages = _stages(geometry, rates, sizes.n_threads, sum(stored.values()))
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


def _stages(
    g: Geometry, rates: Mapping[str, Rate], n_threads: int, stored: float
) -> tuple[StageNeed, ...]:
    moved, rows = g.row_nbytes + g.readout_nbytes, g.row_nbytes

    def stage(name: str, what: str, nbytes: float, rate: str, n: int = 1) -> StageNeed:
        max_tokens = rates[rate].gbps * n * GB / nbytes
        return StageNeed(name, what, nbytes, max_tokens, rates[rate].origin)

    threads = counted(n_threads, "thread")
    return (
        StageNeed("staging", "copy on the device", moved, math.inf, "not modelled"),
        stage("link", "device to ring", moved, "d2h"),
        stage("ring", "ring to shard buffer", rows, "copy"),
        stage("encode", f"compress and hash, {threads}", rows, "encode", n_threads),
        stage("disk", "write, fsync", stored, "disk"),
    )


def _whole_mib(nbytes: float) -> float:
    return math.ceil(nbytes / MIB) * MIB if math.isfinite(nbytes) else nbytes
