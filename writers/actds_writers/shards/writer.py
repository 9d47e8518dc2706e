"""The writer, stage 3 of the data path: from slices of the ring to committed shards.

The writer's loop does not wait for the disk as long as a spare buffer is left; then the ring fills
and the overflow policy decides. Thread ``actds-begin`` takes full buffers in order and gives them
to the write threads, which encode, hash and write them; a buffer is empty again as soon as its rows
are encoded. Thread ``actds-commit`` waits for the files and commits shard after shard in the same
order: 'committed up to step s' stays exact per phase. A shard is written raw when too much waits.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from actds.dataset.commit import BegunShard, ShardRows, begin_shard
from actds.dataset.info import recorded_cast
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_genesis
from actds.dataset.write_threads import N_HELD, N_OPEN, WriteThreads
from actds.errors import ActdsError
from actds.format import schema, tables
from actds.format.inclusion import INCLUSION
from actds.format.profile import Profile
from actds.format.readouts import Readouts
from actds.format.schema import CloseReason, Genesis, Hook, ProvenanceField, RunBody, RunRecord
from actds.format.telemetry import ATTENTION, PROFILE, profile_field
from actds.store import Buffer, NewFile, Put, Store, layout
from actds_writers.config import Order, WriterSettings
from actds_writers.ipc.link import QueuePage, RowLayout, attach_memory
from actds_writers.ipc.messages import (
    Fact,
    HookSpec,
    QueueState,
    RingFree,
    RunInfo,
    StageState,
    Stall,
    StepDropped,
    StepRows,
    WorkerHello,
)
from actds_writers.ipc.scores import ScorePage
from actds_writers.monitor.metrics import CommitMeter, DiskMeter, Meters, Occupancy
from actds_writers.monitor.watch import Watch
from actds_writers.sampling import Lot
from actds_writers.shards import Assembly, Interval, ShardBuffer
from actds_writers.shards.logs import AttentionLog, DropLog, LaneReader, ReadoutLog, TableLog
from actds_writers.sizing import Geometry, Sizes, memory_bound

TELL_INTERVAL_S = 0.05
N_UNCOMMITTED = 4
"""Shards whose rows are encoded, and which wait for the disk or for the shard before them."""


@dataclass(frozen=True)
class CommitPlan:
    """How shards are written.

    Args:
        seed: of the run; every shard's permutation seed follows from it.
        raw_threshold_nbytes: backlog from which shards are written raw; 0 never.
    """

    run: str
    order: Order
    seed: int
    n_threads: int
    raw_threshold_nbytes: int = 0


@dataclass(frozen=True)
class _Begun:
    shard: BegunShard
    n_rows: int
    nbytes: int
    began: float
    raw: bool


class Committer:
    """Commits buffers in the order in which they were handed over.

    Args:
        buffers: spare buffers; together with those being filled they bound the memory.
        before_commit: called with the last step of a buffer before any of it is written, to make
            durable what must be so no later than the rows. Returns the last step for which that
            succeeded; rows of later ones are not written.
        on_change: called when the queue of full buffers has changed.
    """

    def __init__(
        self,
        store: Store,
        chain: Chain,
        plan: CommitPlan,
        buffers: list[ShardBuffer],
        before_commit: Callable[[int], int] = lambda last_step: last_step,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._chain, self._plan = store, chain, plan
        self._before_commit, self._on_change = before_commit, on_change
        self._spare: queue.Queue[ShardBuffer] = queue.Queue()
        for buffer in buffers:
            self._spare.put(buffer)
        self._full: queue.Queue[tuple[str, ShardBuffer] | None] = queue.Queue()
        self._begun: queue.Queue[_Begun | None] = queue.Queue(N_UNCOMMITTED)
        self._encoding = WriteThreads(plan.n_threads, N_HELD if store.holds_new_files else N_OPEN)
        self.meter = CommitMeter()
        self.occupancy = Occupancy("pool", max(0, len(buffers) - 1))
        # Bytes of the buffers that are not yet encoded, and of those nobody has begun to encode.
        self._pending: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._pending_lock = threading.Lock()
        self.fallback = RawFallback(plan.raw_threshold_nbytes)
        self._n_shards = 0
        self.n_rows = 0
        self.error: ActdsError | None = None
        self._observe()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._begin_all, "actds-begin"), (self._end_all, "actds-commit"))
        ]
        for thread in self._threads:
            thread.start()

    def spare(self) -> ShardBuffer:
        """Return an empty buffer; waits while there is none, and tells how the queue is."""
        # A backlog matters only when a buffer is needed, not at the end of a run.
        with self._pending_lock:
            self.fallback.waiting(sum(islice(self._pending.values(), 1, None)))
        while True:
            try:
                return self._spare.get(timeout=TELL_INTERVAL_S)
            except queue.Empty:
                self._on_change()

    @property
    def has_spare(self) -> bool:
        return not self._spare.empty()

    def commit(self, phase: str, buffer: ShardBuffer) -> None:
        with self._pending_lock:
            self._pending[id(buffer)] = buffer.nbytes
            self._waiting[id(buffer)] = buffer.nbytes
            self._observe()
        self._on_change()
        self._full.put((phase, buffer))

    def finish(self) -> None:
        self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._encoding.close()

    @property
    def queue_depth(self) -> int:
        with self._pending_lock:
            return max(0, len(self._pending) - 1)

    @property
    def backlog_nbytes(self) -> int:
        with self._pending_lock:
            return sum(self._waiting.values()) + self._encoding.waiting_nbytes

    def _observe(self) -> None:
        # The first of the pending buffers is being encoded, the others wait.
        self.occupancy.observe(max(0, len(self._pending) - 1), time.monotonic_ns())

    # thread actds-begin: from a full buffer to the write threads---------------------------------

    def _begin_all(self) -> None:
        while (handed := self._full.get()) is not None:
            phase, buffer = handed
            begun = None
            try:
                if self.error is None:
                    begun = self._begin(phase, buffer)
            except Exception as error:  # the writer's loop must get every error
                self._fail(error)
            if begun is None:
                self._empty(buffer)
            else:
                begun.shard.rows_read.add_done_callback(lambda _, b=buffer: self._empty(b))  # type: ignore[misc]
                self._begun.put(begun)
        self._begun.put(None)

    def _begin(self, phase: str, buffer: ShardBuffer) -> _Begun | None:
        buffer.keep_through(self._before_commit(buffer.last_step))
        if not buffer.n_rows:
            return None
        # Not before there is a thread for it: the longer it waits, the better it is known whether
        # it should be raw.
        self._encoding.wait_until_hungry()
        raw, began = self.fallback.take(), time.monotonic()
        with self._pending_lock:
            del self._waiting[id(buffer)]  # the threads count its rows from now on
        shard = begin_shard(
            self._store,
            self._chain,
            self._shard_rows(phase, buffer),
            shard=f"{self._chain.chain}-{self._n_shards:06d}",
            run=self._plan.run,
            order=self._plan.order,
            seed=(self._plan.seed + self._n_shards) % 2**63,
            raw=raw,
            threads=self._encoding,
        )
        self._n_shards += 1
        return _Begun(shard, buffer.n_rows, buffer.nbytes, began, raw)

    def _empty(self, buffer: ShardBuffer) -> None:
        with self._pending_lock:
            del self._pending[id(buffer)]
            self._waiting.pop(id(buffer), None)
            self._observe()
        self._on_change()
        buffer.clear()
        self._spare.put(buffer)

    @staticmethod
    def _shard_rows(phase: str, buffer: ShardBuffer) -> ShardRows:
        return ShardRows(
            hooks=buffer.rows_by_hook(),
            dtypes=buffer.dtypes,
            tokens=buffer.columns(),
            phase="prefill" if phase == "prefill" else "decode",
            first_step=buffer.first_step or 0,
            last_step=buffer.last_step,
        )

    # thread actds-commit: from durable files to the record of the ledger -----------------------

    def _end_all(self) -> None:
        ended = 0.0
        while (begun := self._begun.get()) is not None:
            try:
                if self.error is None:
                    self._end(begun, ended)
            except Exception as error:  # as above
                self._fail(error)
            ended = time.monotonic()

    def _end(self, begun: _Begun, ended: float) -> None:
        manifest = begun.shard.commit()
        now = time.monotonic()
        nbytes_out = sum(entry.nbytes for entry in manifest.files)
        sizes = (begun.n_rows, begun.nbytes, nbytes_out)
        self.meter.committed(*sizes, now - begun.began, raw=begun.raw, values=manifest.values)
        # While shards overlap, one costs what passes between the commits.
        self.fallback.learn(begun.nbytes, now - max(begun.began, ended), raw=begun.raw)
        self.n_rows += begun.n_rows

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ActdsError):
            got = repr(error)[:500]
            error = ActdsError("E901", "commit thread", got=got, expected="a committed shard")
        self.error = self.error or error


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
        if 0 < self._threshold_nbytes <= nbytes:
            self.is_wanted = True

    def take(self) -> bool:
        """Return whether to write the next shard raw; resets ``is_wanted``."""
        wanted, self.is_wanted = self.is_wanted, False
        if not wanted:
            return False
        normal, raw = self._cost[False], self._cost[True]
        if not normal or not raw or sum(raw) / len(raw) < sum(normal) / len(normal):
            return True
        self._n_refused += 1
        if self._n_refused >= RETRY_AFTER:
            self._n_refused = 0
            self._cost[True].clear()
        return False

    def learn(self, nbytes: int, seconds: float, *, raw: bool) -> None:
        if nbytes:
            self._cost[raw].append(seconds / nbytes)


class TimedStore:
    """A store that tells a meter how long each of its files takes to be written and synced.

    Files that are put as a whole are small, or an object store's: their digests count as well.
    """

    def __init__(self, store: Store, meter: DiskMeter) -> None:
        self._store, self._meter = store, meter

    @classmethod
    def around(cls, store: Store, meter: DiskMeter) -> Store:
        return cast(Store, cls(store, meter))

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        key = object()
        try:
            with self._meter.asked(key):
                return self._store.put_new(path, parts)
        finally:
            self._meter.ended(key)

    def begin(self, path: str) -> NewFile:
        return _TimedFile(self._store.begin(path), self._meter)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)


class _TimedFile(NewFile):
    def __init__(self, file: NewFile, meter: DiskMeter) -> None:
        self._file, self._meter = file, meter

    def hash(self, parts: Sequence[Buffer]) -> None:
        self._file.hash(parts)

    def write(self, parts: Sequence[Buffer]) -> None:
        with self._meter.asked(self):
            self._file.write(parts)

    def commit(self) -> Put:
        try:
            with self._meter.asked(self):
                return self._file.commit()
        finally:
            self._meter.ended(self)

    def abandon(self) -> None:
        self._file.abandon()
        self._meter.ended(self)


PHASES = ("prefill", "decode")
SPARE_BUFFERS = 1
"""Buffers beside the two being filled."""


class Writer:
    """Writes one run; raises E010 when the dataset has other hooks, E503 when the disk refuses.

    Args:
        before_commit: makes the census of a step durable, before any row of it.
        probes: the bytes of their file.
        profile: the profile beside which the run is looked at; its scores are put beside the file.
    """

    def __init__(
        self,
        store: Store,
        settings: WriterSettings,
        hello: WorkerHello,
        before_commit: Callable[[int], None] = lambda last_step: None,
        probes: bytes | None = None,
        profile: Path | None = None,
    ) -> None:
        self.disk = DiskMeter()
        self._settings, self._store = settings, TimedStore.around(store, self.disk)
        store = self._store
        self._before_commit = before_commit
        self._hooks = hello.hooks
        self._planned = Readouts.from_field(settings.readouts, "capture.readouts")
        self._design = settings.harvest.design(settings.run)
        stages = hello.stages or (hello,)
        self._rings: list[tuple[RowLayout, mmap.mmap]] = [
            (RowLayout(stage.hooks), attach_memory(Path(stage.ring_path), stage.ring_nbytes))
            for stage in stages
        ]
        self._queues = [QueuePage.beside(Path(stage.ring_path)) for stage in stages]
        self._layout = RowLayout(hello.hooks)
        self.memory_nbytes = hello.memory_nbytes + self._own_nbytes(hello)
        data = None if profile is None else profile.read_bytes()
        record = self._record(hello, data)
        self.cast = recorded_cast(record)
        # What is of another regime is refused before anything is written.
        self.watch = None if profile is None else self._watch_beside(profile, record)
        dataset = _genesis(store, settings, hello.hooks)
        self._chain = Chain.begin(
            store, dataset, settings.run, "writer", settings.software, part=settings.part
        )
        if probes is not None:
            store.put_new(layout.probes_path(settings.run), [probes])
        capacity = settings.rows_per_shard + hello.max_step_rows
        if data is not None:
            store.put_new(layout.profile_path(settings.run), [data])
        self._begin_run(record.model_copy(update={"dataset": dataset}))
        model, mode = (record.fields[name].value for name in ("model.name", "serving.mode"))
        self.of_run = RunInfo(settings.run, str(model or ""), dataset, str(mode or ""))
        self.readouts = self._readout_log(hello)
        self.attention = AttentionLog(store, self._chain, settings.run)
        further = ["inclusion"] * (self._design is not None)
        further += ["intervention"] * (settings.harvest.intervene is not None)
        n_lots = len(PHASES) * (1 + len(settings.harvest.choices))
        buffers = [
            ShardBuffer(hello.hooks, capacity, further) for _ in range(n_lots + SPARE_BUFFERS)
        ]
        harvest, n_threads = settings.harvest, settings.n_threads
        raw_nbytes = harvest.raw_threshold_nbytes
        plan = CommitPlan(settings.run, harvest.order, harvest.seed, n_threads, raw_nbytes)
        self.committer = Committer(
            store, self._chain, plan, buffers, self._make_durable, self.publish
        )
        self._filling: dict[Lot, ShardBuffer] = {}
        self._filling_since: dict[Lot, float] = {}
        self.meters = Meters(hello, self.row_nbytes, self.committer.occupancy)
        self._assembly = Assembly(settings.tokens)
        self._stalls = TableLog("stalls")
        self._losses = DropLog()
        self.n_not_drawn = 0
        self.last_step = -1

    @property
    def error(self) -> ActdsError | None:
        return self.committer.error or (self.readouts.error if self.readouts else None)

    def stages(self) -> tuple[StageState, ...]:
        lane = () if self.readouts is None else (self.readouts.state,)
        return (*self.meters.states(), *lane)

    @property
    def not_drawn(self) -> dict[str, int]:
        overflow = self._settings.harvest.overflow
        return {"thinned" if overflow == "thin" else "dropped": self.n_not_drawn}

    @property
    def row_nbytes(self) -> int:
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
        return self.free(message.offset if message.nbytes else None)

    def free(self, offset: int | None) -> RingFree:
        """Return an acknowledgement, after the workers can see the state of the queues."""
        self.publish()
        return RingFree(offset)

    def publish(self) -> None:
        depth, backlog = self.committer.queue_depth, self.committer.backlog_nbytes
        for page in self._queues:
            page.publish(QueueState(depth, backlog, self.disk.p99()))

    def dropped(self, message: StepDropped) -> RingFree:
        self._stalls.add(map(asdict, message.rows.stalls))
        self.meters.step(message.rows)
        self.last_step = message.rows.step
        self._log_loss(message, self._assembly.lost(message.rows))
        if self._settings.harvest.overflow == "thin":  # else the scheduler counts them as dropped
            self.n_not_drawn += self._assembly.n_not_drawn(message.rows)
        self._log_not_drawn(message.rows)
        return self.free(None)

    def _log_not_drawn(self, rows: StepRows) -> None:
        """Log what a drop policy with a reserve has lost of a step, if it has."""
        harvest = self._settings.harvest
        if harvest.always is not None:
            depths = (rows.depth_stage1, rows.depth_stage2)
            loss = StepDropped(rows, tables.QUEUE_FULL, harvest.overflow, rows.t_ns, *depths)
            self._log_loss(loss, self._assembly.not_drawn(rows))

    def _log_loss(self, loss: StepDropped, intervals: list[Interval]) -> None:
        queues = loss.queues or QueueState(0, 0, None)
        state = {
            "queue_depth_stage1": loss.depth_stage1,
            "queue_depth_stage2": loss.depth_stage2,
            **queues._asdict(),
            "cache_hit_ratio": self._assembly.cache_hit_ratio,
        }
        self._losses.drop(loss, intervals, state)

    def finish(self, reason: CloseReason) -> dict[str, int]:
        """Commit all buffers and close the chain; return its totals, E503 if the disk refused."""
        for (phase, _), buffer in self._filling.items():
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
            self.attention.commit_through(self.last_step)
        place = (self._store, self._chain, self._settings.run)
        self._losses.commit(*place)
        self.meters.commit(*place)
        self._stalls.commit(*place)
        totals = {"rows": self.committer.n_rows, "dropped_tokens": self._losses.n_tokens}
        if reason == "finished":
            # A writer that was cut off has not seen every step that the scheduler has.
            totals["recomputed_tokens"] = self._assembly.recomputed_tokens
        if self.watch is not None:
            self.watch.close()
        self._chain.close(reason, totals)
        return totals

    def _take(self, message: StepRows) -> None:
        rows = tuple(
            array if (select := _kept_of(message, part)) is None else array[:, select]
            for (layout, memory), part in zip(self._rings, message.parts or (message,), strict=True)
            for array in layout.arrays(memory, part.offset, part.n_kept)
        )
        slices = self._assembly.slices(message, rows)
        self.meters.taken(sum(piece.n_rows for piece in slices.values()), message.nbytes)
        for lot, piece in slices.items():
            if (buffer := self._filling.get(lot)) is None:
                buffer = self._filling[lot] = self._spare(message.step)
                buffer.clear(lot[1])
                self._filling_since[lot] = time.monotonic()
            buffer.append(piece)
            if buffer.n_rows >= self._settings.rows_per_shard:
                self._commit(lot)
        self.n_not_drawn += self._assembly.n_not_drawn(message)
        self._log_not_drawn(message)

    def commit_old(self) -> None:
        """Commit the rows that have waited for as long as the settings allow."""
        limit, now = self._settings.harvest.commit_seconds, time.monotonic()
        if limit is None or self.error is not None:
            return
        for lot, since in list(self._filling_since.items()):
            # Not while others wait: shards would only get smaller.
            if now - since >= limit and self.committer.has_spare:
                self._commit(lot)

    def _commit(self, lot: Lot) -> None:
        self.committer.commit(lot[0], self._filling.pop(lot))
        del self._filling_since[lot]

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
            self._secure(last_step)
            self.attention.commit_through(last_step)
        return last_step

    def _secure(self, last_step: int) -> None:
        """Make the census of a step durable: it writes and syncs, on the same disk."""
        with self.disk.asked(key := object()):
            self._before_commit(last_step)
        self.disk.ended(key)

    def _readout_log(self, hello: WorkerHello) -> ReadoutLog | None:
        lanes = {
            stage.stage: LaneReader(stage.hooks, stage.lane_path, stage.lane_nbytes)
            for stage in hello.stages or (hello,)
            if stage.lane_path is not None
        }
        if self._planned is None or not lanes:
            return None
        run = self._settings.run
        place = (self._store, self._chain, run)
        return ReadoutLog(*place, self._planned, lanes, self._secure, self.watch)

    def _own_nbytes(self, hello: WorkerHello) -> int:
        geometry = Geometry.of(self._hooks, self._planned.width if self._planned else 0)
        sizes = Sizes(
            hello.max_step_rows,
            self._settings.rows_per_shard,
            hello.ring_nbytes,
            n_threads=self._settings.n_threads,
            n_choices=len(self._settings.harvest.choices),
            holds_files=self._store.holds_new_files,
        )
        return memory_bound(geometry, sizes).writer_nbytes

    def _record(self, hello: WorkerHello, profile: bytes | None) -> RunRecord:
        """Return the run record, of a new dataset."""
        memory = Fact("capture.memory_nbytes", self.memory_nbytes, "observed")
        facts = [*self._settings.facts, *hello.facts, memory]
        if self._design is not None:
            facts.append(Fact(INCLUSION, self._design.as_field(), "declared"))
        attending = self._settings.harvest.attending(self._settings.run)
        if attending is not None:
            facts.append(Fact(ATTENTION, attending.as_field(), "declared"))
        if profile is not None:
            facts.append(Fact(PROFILE, profile_field(profile), "declared"))
        fields = {fact.name: fact for fact in facts}
        return RunRecord(
            dataset=self._settings.dataset,
            run=self._settings.run,
            started_ns=self._settings.started_ns,
            fields={
                name: ProvenanceField(value=f.value, origin=f.origin, reason=f.reason)
                for name, f in sorted(fields.items())
            },
        )

    def _begin_run(self, record: RunRecord) -> None:
        put = self._store.put_new(layout.run_path(record.run), [schema.to_bytes(record)])
        self._chain.append("run", RunBody(run=record.run, sha256=put.sha256))

    def _watch_beside(self, profile: Path, record: RunRecord) -> Watch:
        harvest = self._settings.harvest
        return Watch(
            Profile.read(profile),
            record,
            _schema_hooks(self._hooks),
            page=ScorePage.create(profile.parent) if self._settings.shared else None,
            url=harvest.alert_url,
            logs=self._settings.shared,
        )


def _kept_of(whole: StepRows, part: StepRows) -> np.ndarray | None:
    """Return the rows of a stage in the ring that every stage has kept, ``None`` for all."""
    if part is whole or whole.kept is None:
        return None
    here = whole.kept if part.kept is None else whole.kept[part.kept]
    return None if here.all() else np.flatnonzero(here)


def _schema_hooks(specs: Sequence[HookSpec]) -> list[Hook]:
    return [
        Hook(name=h.name, kind=h.kind, layer=h.layer, d_model=h.d_model, dtype=h.dtype)
        for h in specs
    ]


def _genesis(store: Store, settings: WriterSettings, specs: tuple[HookSpec, ...]) -> str:
    """Write the genesis of a new dataset, or compare with the existing one; return its id."""
    hooks = _schema_hooks(specs)
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
            if error.code != "E309" or not settings.may_join:
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
