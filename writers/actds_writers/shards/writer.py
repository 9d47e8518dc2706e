"""The writer, stage 3 of the data path: from slices of the ring to committed shards.

Full buffers become shards on thread ``actds-commit``: the writer's loop does not wait for the disk
as long as a spare buffer is left; then the ring fills and the overflow policy decides. A shard is
written raw when too much waits.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from actds import layout, schema
from actds.commit import ShardRows, commit_shard
from actds.errors import ActdsError
from actds.format.readouts import Readouts
from actds.ledger import Chain
from actds.reading import read_genesis
from actds.schema import CloseReason, Genesis, Hook, ProvenanceField, RunBody, RunRecord
from actds.store import Store
from actds_writers.config import Order, WriterSettings
from actds_writers.ipc import ring
from actds_writers.ipc.messages import (
    Fact,
    HookSpec,
    RingFree,
    StageState,
    Stall,
    StepDropped,
    StepRows,
    StepsDropped,
    WorkerHello,
)
from actds_writers.ipc.ring import RowLayout
from actds_writers.monitor.meters import CommitMeter, Meters, Occupancy
from actds_writers.shards.assembly import Assembly, ShardBuffer
from actds_writers.shards.logs import DropLog, ReadoutLog, TableLog
from actds_writers.sizing.needs import Geometry, Sizes, memory_bound


@dataclass(frozen=True)
class CommitPlan:
    """How shards are written.

    Args:
        seed: seed of the run; every shard's permutation seed follows from it.
        raw_threshold_nbytes: backlog from which shards are written raw; 0 never.
    """

    run: str
    order: Order
    seed: int
    n_threads: int
    raw_threshold_nbytes: int = 0


class Committer:
    """Commits buffers in the order in which they were handed over.

    Args:
        buffers: spare buffers; together with those being filled they bound the memory.
        before_commit: called with the last step of a buffer before any of it is written, to make
            durable what must be so no later than the rows. Returns the last step for which that
            succeeded; rows of later ones are not written.
    """

    def __init__(
        self,
        store: Store,
        chain: Chain,
        plan: CommitPlan,
        buffers: list[ShardBuffer],
        before_commit: Callable[[int], int] = lambda last_step: last_step,
    ) -> None:
        self._store, self._chain, self._plan = store, chain, plan
        self._before_commit = before_commit
        self._spare: queue.Queue[ShardBuffer] = queue.Queue()
        for buffer in buffers:
            self._spare.put(buffer)
        self._full: queue.Queue[tuple[str, ShardBuffer] | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(plan.n_threads, thread_name_prefix="actds-encode")
        self.meter = CommitMeter()
        self.occupancy = Occupancy("pool", max(0, len(buffers) - 1))
        # Sizes of the buffers that are not yet committed; the first one is being committed.
        self._pending: deque[int] = deque()
        self._pending_lock = threading.Lock()
        self.fallback = RawFallback(plan.raw_threshold_nbytes)
        self._n_shards = 0
        self.n_rows = 0
        self.error: ActdsError | None = None
        self._observe()
        self._thread = threading.Thread(target=self._work, name="actds-commit", daemon=True)
        self._thread.start()

    def spare(self) -> ShardBuffer:
        """Return an empty buffer; waits while there is none."""
        # A backlog matters only when a buffer is needed, not at the end of a run.
        with self._pending_lock:
            self.fallback.waiting(sum(self._pending) - sum(islice(self._pending, 1)))
        return self._spare.get()

    @property
    def has_spare(self) -> bool:
        """Return whether there is an empty buffer."""
        return not self._spare.empty()

    def commit(self, phase: str, buffer: ShardBuffer) -> None:
        """Hand over a buffer; it becomes a shard in the background."""
        with self._pending_lock:
            self._pending.append(buffer.nbytes)
            self._observe()
        self._full.put((phase, buffer))

    def finish(self) -> None:
        """Wait until everything handed over is committed or the disk has failed."""
        self._full.put(None)
        self._thread.join()
        self._pool.shutdown()
        self._observe()

    @property
    def queue_depth(self) -> int:
        """Return the number of full buffers that wait."""
        return self._full.qsize()

    @property
    def backlog_nbytes(self) -> int:
        """Return the bytes handed over and not yet committed."""
        with self._pending_lock:
            return sum(self._pending)

    def _observe(self) -> None:
        # The first of the pending buffers is being committed, the others wait.
        self.occupancy.observe(max(0, len(self._pending) - 1), time.monotonic_ns())

    def _work(self) -> None:
        while (handed := self._full.get()) is not None:
            phase, buffer = handed
            try:
                if self.error is None:
                    self._commit(phase, buffer)
            except ActdsError as error:
                self.error = error
            except Exception as error:  # the writer's loop must get every error
                self.error = ActdsError(
                    "E901", "commit thread", got=repr(error)[:500], expected="a committed shard"
                )
            with self._pending_lock:
                self._pending.popleft()
                self._observe()
            buffer.clear()
            self._spare.put(buffer)

    def _commit(self, phase: str, buffer: ShardBuffer) -> None:
        buffer.keep_through(self._before_commit(buffer.last_step))
        if not buffer.n_rows:
            return
        raw = self.fallback.take()
        began = time.monotonic()
        manifest = commit_shard(
            self._store,
            self._chain,
            self._shard_rows(phase, buffer),
            shard=f"{self._chain.chain}-{self._n_shards:06d}",
            run=self._plan.run,
            order=self._plan.order,
            seed=(self._plan.seed + self._n_shards) % 2**63,
            raw=raw,
            pool=self._pool,
        )
        took_s = time.monotonic() - began
        nbytes_out = sum(entry.nbytes for entry in manifest.files)
        self.meter.committed(buffer.n_rows, buffer.nbytes, nbytes_out, took_s, raw=raw)
        self.fallback.learn(buffer.nbytes, took_s, raw=raw)
        self._n_shards += 1
        self.n_rows += buffer.n_rows

    @staticmethod
    def _shard_rows(phase: str, buffer: ShardBuffer) -> ShardRows:
        columns = {
            **buffer.columns(),
            "phase": np.full(buffer.n_rows, phase, dtype=object),
        }
        return ShardRows(
            hooks=buffer.rows_by_hook(),
            dtypes={hook.name: hook.dtype for hook in buffer.hooks},
            tokens=columns,
            phase="prefill" if phase == "prefill" else "decode",
            first_step=buffer.first_step or 0,
            last_step=buffer.last_step,
        )


N_REMEMBERED = 4
"""Commits of each kind whose cost is remembered."""
RETRY_AFTER = 8
"""Shards that stay compressed before raw, which was no faster, is tried again."""


class RawFallback:
    """Decides shard by shard whether the next one is written raw.

    A shard is written raw when at least ``threshold_nbytes`` waited behind the shard before it
    while the writer's loop asked for an empty buffer. Encoding is not always the bottleneck: a raw
    shard has 1.4 times the bytes to hash and to write, and with two encoding threads it took longer
    than a compressed one (measured). So shards stay raw only while that is faster.

    Args:
        threshold_nbytes: bytes of waiting rows; 0 never writes raw.
    """

    def __init__(self, threshold_nbytes: int) -> None:
        self._threshold_nbytes = threshold_nbytes
        self.is_wanted = False
        """Whether enough bytes waited for the next shard to be raw."""
        self._cost: dict[bool, deque[float]] = {
            raw: deque(maxlen=N_REMEMBERED) for raw in (False, True)
        }
        self._n_refused = 0

    def waiting(self, nbytes: int) -> None:
        """Note how many bytes wait behind the shard being committed."""
        if 0 < self._threshold_nbytes <= nbytes:
            self.is_wanted = True

    def take(self) -> bool:
        """Return whether to write the next shard raw; resets ``is_wanted``."""
        wanted, self.is_wanted = self.is_wanted, False
        if not wanted:
            return False
        if self._pays():
            return True
        self._n_refused += 1
        if self._n_refused >= RETRY_AFTER:
            self._n_refused = 0
            self._cost[True].clear()
        return False

    def learn(self, nbytes: int, seconds: float, *, raw: bool) -> None:
        """Note how long a commit of so many bytes of rows took."""
        if nbytes:
            self._cost[raw].append(seconds / nbytes)

    def _pays(self) -> bool:
        """Return whether raw is faster, or has not been tried yet."""
        normal, raw = self._cost[False], self._cost[True]
        if not normal or not raw:
            return True
        return sum(raw) / len(raw) < sum(normal) / len(normal)


PHASES = ("prefill", "decode")
SPARE_BUFFERS = 1
"""Buffers beside the two being filled."""


class Writer:
    """Writes one run.

    Args:
        before_commit: makes the census of a step durable, before any row of it.
        probes: the user's probes as the bytes of their file.

    Raises:
        ActdsError: E010 when the dataset has other hooks, E503 when the disk refuses.
    """

    def __init__(
        self,
        store: Store,
        settings: WriterSettings,
        hello: WorkerHello,
        before_commit: Callable[[int], None] = lambda last_step: None,
        probes: bytes | None = None,
    ) -> None:
        self._settings, self._store = settings, store
        self._before_commit = before_commit
        self._hooks = hello.hooks
        self._planned = Readouts.from_field(settings.readouts, "capture.readouts")
        self._memory: mmap.mmap = ring.attach(Path(hello.ring_path), hello.ring_nbytes)
        self._layout = RowLayout(hello.hooks)
        dataset = _genesis(store, settings, hello.hooks)
        self._chain = Chain.begin(store, dataset, settings.run, "writer", settings.software)
        if probes is not None:
            store.put_new(layout.probes_path(settings.run), [probes])
        capacity = settings.rows_per_shard + hello.max_step_rows
        self.memory_nbytes = hello.memory_nbytes + self._own_nbytes(hello)
        self._begin_run(dataset, hello)
        self.readouts = self._readout_log(hello)
        buffers = [ShardBuffer(hello.hooks, capacity) for _ in range(len(PHASES) + SPARE_BUFFERS)]
        plan = CommitPlan(
            settings.run,
            settings.harvest.order,
            settings.harvest.seed,
            settings.n_threads,
            settings.harvest.raw_threshold_nbytes,
        )
        self.committer = Committer(store, self._chain, plan, buffers, self._make_durable)
        self._filling: dict[str, ShardBuffer] = {phase: self.committer.spare() for phase in PHASES}
        self.meters = Meters(hello, self.row_nbytes, self.committer.occupancy)
        self._assembly = Assembly(settings.tokens)
        self._stalls = TableLog("stalls")
        self._losses = DropLog()
        self.last_step = -1

    @property
    def error(self) -> ActdsError | None:
        """Return the error that ended the commits, if any."""
        return self.committer.error or (self.readouts.error if self.readouts else None)

    def stages(self) -> tuple[StageState, ...]:
        """Return the queues of all stages, and of the readouts if there are any."""
        lane = () if self.readouts is None else (self.readouts.state,)
        return (*self.meters.states(), *lane)

    @property
    def row_nbytes(self) -> int:
        """Return the bytes of one row over all hooks."""
        return self._layout.row_nbytes

    def step(self, message: StepRows) -> RingFree:
        """Take the rows of a step out of the ring; return the acknowledgement.

        After the disk has failed the rows are discarded, so that the engine can end; the census
        calls them aborted.
        """
        self._stalls.add(map(asdict, message.stalls))
        self.meters.step(message)
        if self.error is None:
            self._take(message)
        self.last_step = message.step
        return self._taken(message.offset if message.nbytes else None)

    def _taken(self, offset: int | None) -> RingFree:
        return RingFree(
            offset=offset,
            queue_depth_stage3=self.committer.queue_depth,
            compression_backlog_bytes=self.committer.backlog_nbytes,
            disk_write_latency_p99=self.committer.meter.totals.p99_s,
        )

    def dropped(self, message: StepsDropped) -> RingFree:
        """Log dropped steps; return the acknowledgement."""
        for loss in message.losses:
            self._log_loss(loss)
        return self._taken(None)

    def _log_loss(self, message: StepDropped) -> None:
        self._stalls.add(map(asdict, message.rows.stalls))
        self.meters.step(message.rows)
        self.last_step = message.rows.step
        taken = self._taken(None)
        state = {
            "queue_depth_stage1": message.rows.depth_stage1,
            "queue_depth_stage2": message.depth,
            "queue_depth_stage3": taken.queue_depth_stage3,
            "disk_write_latency_p99": taken.disk_write_latency_p99,
            "compression_backlog_bytes": taken.compression_backlog_bytes,
            "cache_hit_ratio": None,
        }
        self._losses.add(message, self._assembly.lost(message.rows), state)

    def finish(self, reason: CloseReason) -> dict[str, int]:
        """Commit all buffers, close the chain; return its totals.

        Raises:
            ActdsError: E503 when the disk refuses or has refused.
        """
        for phase, buffer in self._filling.items():
            if buffer.n_rows:
                self.committer.commit(phase, buffer)
        self.committer.finish()
        if self.error is not None:
            raise self.error
        if self.readouts is not None:
            self.readouts.finish()
            self._losses.keep_through(self.readouts.last_step)
            self._stalls.add(map(asdict, self.readouts.stalls))
        if self.last_step >= 0:
            self._before_commit(self.last_step)
        self._losses.commit(self._store, self._chain, self._settings.run)
        self.meters.commit(self._store, self._chain, self._settings.run)
        self._stalls.commit(self._store, self._chain, self._settings.run)
        totals = {"rows": self.committer.n_rows, "dropped_tokens": self._losses.n_tokens}
        if reason == "finished":
            # A writer that was cut off has not seen every step that the scheduler has.
            totals["recomputed_tokens"] = self._assembly.recomputed_tokens
        self._chain.close(reason, totals)
        return totals

    def _take(self, message: StepRows) -> None:
        rows = self._layout.arrays(self._memory, message.offset, message.n_kept)
        slices = self._assembly.slices(message, rows)
        self.meters.taken(sum(piece.n_rows for piece in slices.values()), message.nbytes)
        for phase, piece in slices.items():
            buffer = self._filling[phase]
            buffer.append(piece)
            if buffer.n_rows >= self._settings.rows_per_shard:
                self.committer.commit(phase, buffer)
                self._filling[phase] = self._spare(message.step)

    def _spare(self, step: int) -> ShardBuffer:
        """Return an empty buffer; waiting for it is a stall of the pool."""
        began, began_ns, depth = time.monotonic_ns(), time.time_ns(), self.committer.queue_depth
        waits = not self.committer.has_spare
        buffer = self.committer.spare()
        if waits:
            stall = Stall("pool", began_ns, time.monotonic_ns() - began, depth, step)
            self._stalls.add([asdict(stall)])
            self.meters.stalled(stall)
        return buffer

    def _make_durable(self, last_step: int) -> int:
        """Make readouts and census durable up to a step; return the last step where both are."""
        if self.readouts is not None:
            last_step = self.readouts.commit_through(last_step)
        if last_step >= 0:
            self._before_commit(last_step)
        return last_step

    def _readout_log(self, hello: WorkerHello) -> ReadoutLog | None:
        if self._planned is None or hello.lane_path is None:
            return None
        lane = (hello.lane_path, hello.lane_nbytes)
        run = self._settings.run
        return ReadoutLog(
            self._store, self._chain, run, self._hooks, self._planned, lane, self._before_commit
        )

    def _own_nbytes(self, hello: WorkerHello) -> int:
        """Return the bound on the writer's own memory: buffers, copies of one shard, readouts."""
        geometry = Geometry.of(self._hooks, self._planned.width if self._planned else 0)
        sizes = Sizes(hello.max_step_rows, self._settings.rows_per_shard, hello.ring_nbytes)
        return memory_bound(geometry, sizes).writer_nbytes

    def _begin_run(self, dataset: str, hello: WorkerHello) -> None:
        memory = Fact("capture.memory_nbytes", self.memory_nbytes, "observed")
        facts = (*self._settings.facts, *hello.facts, memory)
        fields = {fact.name: fact for fact in facts}
        record = RunRecord(
            dataset=dataset,
            run=self._settings.run,
            started_ns=self._settings.started_ns,
            fields={
                name: ProvenanceField(value=f.value, origin=f.origin, reason=f.reason)
                for name, f in sorted(fields.items())
            },
        )
        put = self._store.put_new(layout.run_path(self._settings.run), [schema.to_bytes(record)])
        self._chain.append("run", RunBody(run=self._settings.run, sha256=put.sha256))


def _genesis(store: Store, settings: WriterSettings, found: tuple[HookSpec, ...]) -> str:
    """Write the genesis of a new dataset, or compare with the existing one; return its id."""
    hooks = [
        Hook(name=h.name, kind=h.kind, layer=h.layer, d_model=h.d_model, dtype=h.dtype)
        for h in found
    ]
    if not settings.resume:
        genesis = Genesis(
            dataset=settings.dataset,
            created_ns=settings.started_ns,
            writer=settings.software,
            hooks=hooks,
        )
        try:
            store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
            return settings.dataset
        except ActdsError as error:
            if error.code != "E309" or not settings.shared:
                raise  # else another engine created it, and this one joins
    present = read_genesis(store)
    if present.hooks != hooks:
        raise ActdsError(
            "E010",
            "hooks",
            got=", ".join(f"{h.name} {h.dtype}" for h in hooks),
            expected=", ".join(f"{h.name} {h.dtype}" for h in present.hooks),
        )
    return present.dataset
