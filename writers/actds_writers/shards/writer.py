"""The writer, stage 3 of the data path: from slices of the ring to committed shards.

Full buffers become shards in the background: the writer's loop does not wait for the disk as long
as a spare buffer is left; then the ring fills and the overflow policy decides.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from actds.dataset.info import recorded_cast
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.format import schema
from actds.format.readouts import Readouts
from actds.format.schema import CloseReason, Genesis, Hook, ProvenanceField, RunBody, RunRecord
from actds.store import Buffer, NewFile, Put, Store, layout
from actds_writers.config import WriterSettings
from actds_writers.ipc import ring
from actds_writers.ipc.messages import (
    Fact,
    HookSpec,
    QueueState,
    RingFree,
    StageState,
    Stall,
    StepDropped,
    StepRows,
    StepsDropped,
    WorkerHello,
)
from actds_writers.ipc.ring import QueuePage, RowLayout
from actds_writers.monitor.metrics import DiskMeter, Meters
from actds_writers.shards.assembly import Assembly, ShardBuffer
from actds_writers.shards.committer import CommitPlan, Committer
from actds_writers.shards.logs import DropLog, LaneReader, ReadoutLog, TableLog
from actds_writers.sizing import Geometry, Sizes, memory_bound


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
    """Writes one run.

    Args:
        before_commit: makes the census of a step durable, before any row of it.
        probes: the bytes of their file.

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
        self.disk = DiskMeter()
        self._settings, self._store = settings, TimedStore.around(store, self.disk)
        store = self._store
        self._before_commit = before_commit
        self._hooks = hello.hooks
        self._planned = Readouts.from_field(settings.readouts, "capture.readouts")
        stages = hello.stages or (hello,)
        self._rings: list[tuple[RowLayout, mmap.mmap]] = [
            (RowLayout(stage.hooks), ring.attach(Path(stage.ring_path), stage.ring_nbytes))
            for stage in stages
        ]
        self._queues = [QueuePage.beside(Path(stage.ring_path)) for stage in stages]
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
        harvest, n_threads = settings.harvest, settings.n_threads
        raw_nbytes = harvest.raw_threshold_nbytes
        plan = CommitPlan(settings.run, harvest.order, harvest.seed, n_threads, raw_nbytes)
        self.committer = Committer(
            store, self._chain, plan, buffers, self._make_durable, self.publish
        )
        self._filling: dict[str, ShardBuffer] = {phase: self.committer.spare() for phase in PHASES}
        self.meters = Meters(hello, self.row_nbytes, self.committer.occupancy)
        self._assembly = Assembly(settings.tokens)
        self._stalls = TableLog("stalls")
        self._losses = DropLog()
        self.last_step = -1

    @property
    def error(self) -> ActdsError | None:
        return self.committer.error or (self.readouts.error if self.readouts else None)

    def stages(self) -> tuple[StageState, ...]:
        lane = () if self.readouts is None else (self.readouts.state,)
        return (*self.meters.states(), *lane)

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

    def dropped(self, message: StepsDropped) -> RingFree:
        for loss in message.losses:
            self._log_loss(loss)
        return self.free(None)

    def _log_loss(self, message: StepDropped) -> None:
        self._stalls.add(map(asdict, message.rows.stalls))
        self.meters.step(message.rows)
        self.last_step = message.rows.step
        intervals = self._assembly.lost(message.rows)
        queues = message.queues or QueueState(0, 0, None)
        state = {
            "queue_depth_stage1": message.depth_stage1,
            "queue_depth_stage2": message.depth_stage2,
            **queues._asdict(),
            "cache_hit_ratio": self._assembly.cache_hit_ratio,
        }
        self._losses.add(message, intervals, state)

    def finish(self, reason: CloseReason) -> dict[str, int]:
        """Commit all buffers and close the chain; return its totals, E503 if the disk refused."""
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
        place = (self._store, self._chain, self._settings.run)
        self._losses.commit(*place)
        self.meters.commit(*place)
        self._stalls.commit(*place)
        totals = {"rows": self.committer.n_rows, "dropped_tokens": self._losses.n_tokens}
        if reason == "finished":
            # A writer that was cut off has not seen every step that the scheduler has.
            totals["recomputed_tokens"] = self._assembly.recomputed_tokens
        self._chain.close(reason, totals)
        return totals

    def _take(self, message: StepRows) -> None:
        rows = tuple(
            array
            for (layout, memory), part in zip(self._rings, message.parts or (message,), strict=True)
            for array in layout.arrays(memory, part.offset, part.n_kept)
        )
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
            self._secure(last_step)
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
        return ReadoutLog(self._store, self._chain, run, self._planned, lanes, self._secure)

    def _own_nbytes(self, hello: WorkerHello) -> int:
        geometry = Geometry.of(self._hooks, self._planned.width if self._planned else 0)
        sizes = Sizes(
            hello.max_step_rows,
            self._settings.rows_per_shard,
            hello.ring_nbytes,
            n_threads=self._settings.n_threads,
            holds_files=self._store.holds_new_files,
        )
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
        self.cast = recorded_cast(record)
        put = self._store.put_new(layout.run_path(self._settings.run), [schema.to_bytes(record)])
        self._chain.append("run", RunBody(run=self._settings.run, sha256=put.sha256))


def _genesis(store: Store, settings: WriterSettings, specs: tuple[HookSpec, ...]) -> str:
    """Write the genesis of a new dataset, or compare with the existing one; return its id."""
    hooks = [
        Hook(name=h.name, kind=h.kind, layer=h.layer, d_model=h.d_model, dtype=h.dtype)
        for h in specs
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
