"""The writer's tables beside the shards: drops, stalls and readouts.

Drops and stalls are committed at the end of a run. Readouts arrive through their own lane, on
thread ``actds-readouts``, also while the rows wait for the disk; no row is committed before its
readouts are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.commit import commit_part, in_parts
from actds.dataset.ledger import Chain
from actds.errors import ActdsError
from actds.format import tables
from actds.format.readouts import Readouts
from actds.format.schema import PartTable
from actds.store import Store
from actds_writers.ipc.link import attach_memory, view_memory
from actds_writers.ipc.messages import (
    HookSpec,
    RingFree,
    StageState,
    Stall,
    StepAttention,
    StepDropped,
    StepReadouts,
)
from actds_writers.monitor.watch import Watch
from actds_writers.shards import Interval, disagreement
from actds_writers.sizing import READOUT_PART_NBYTES as PART_NBYTES

PACKED_ROWS = 2048
"""A row takes 0.5 to 1 kB as an object, about a tenth of it packed."""
_SAME = ("step", "requests", "positions", "token_ids")


class TableLog:
    def __init__(self, name: PartTable) -> None:
        self._name: PartTable = name
        self._rows: list[dict[str, Any]] = []
        self._packed: list[pa.Table] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows.extend(rows)
        if len(self._rows) >= PACKED_ROWS:
            self._pack()

    def keep(self, kept: pc.Expression) -> pa.Table:
        self._pack()
        self._packed = [table.filter(kept) for table in self._packed]
        return pa.concat_tables([tables.empty(self._name), *self._packed])

    def commit(self, store: Store, chain: Chain, run: str) -> None:
        """Commit the rows in parts, if there are any."""
        self._pack()
        if not self._packed:
            return
        for n, piece in in_parts(pa.concat_tables(self._packed)):
            commit_part(store, chain, self._name, run, n, piece)

    def _pack(self) -> None:
        if self._rows:
            names = tables.SCHEMAS[self._name].names
            columns: dict[str, object] = {n: [row[n] for row in self._rows] for n in names}
            self._packed.append(tables.build(self._name, columns))
            self._rows.clear()


class DropLog(TableLog):
    """Collects the drops of a run, as in spec 0.1 section 6.3."""

    def __init__(self) -> None:
        super().__init__("drops")
        self._n_events = 0
        self._last_step = -1
        self.n_tokens = 0

    def drop(
        self, dropped: StepDropped, intervals: list[Interval], state: dict[str, int | float | None]
    ) -> None:
        """Log one dropped step, and the intervals of it that would have been stored.

        ``state``: columns with depths and latencies of the queues.
        """
        n_tokens = sum(interval.stop - interval.start for interval in intervals)
        event = {
            "drop": self._n_events,
            "t_ns": dropped.t_ns,
            "step": dropped.rows.step,
            "drop_reason": dropped.reason,
            "policy": dropped.policy,
            "n_tokens": n_tokens,
            "batch_tokens": len(dropped.rows.positions),
            "max_seq_len": int(dropped.rows.positions.max()) + 1,
            **state,
        }
        self.add({**event, **interval._asdict()} for interval in intervals)
        self._n_events += bool(intervals)
        self._last_step = dropped.rows.step
        self.n_tokens += n_tokens

    def keep_through(self, step: int) -> None:
        """Remove the drops of later steps whose readouts are missing: they count as aborted."""
        if self._last_step > step:
            without = pc.field("drop_reason") == tables.READOUTS_FULL
            kept = self.keep((pc.field("step") <= step) | without)
            lengths = pc.subtract(kept["stop"], kept["start"])
            self.n_tokens = int(pc.sum(lengths).as_py() or 0)


class AttentionLog:
    """Collects the attention of a run, and commits what is of steps that the census has."""

    def __init__(self, store: Store, chain: Chain, run: str) -> None:
        self._store, self._chain, self._run = store, chain, run
        self._pending: list[tuple[int, pa.Table]] = []
        self._lock = threading.Lock()
        self._n_parts = 0

    def add(self, message: StepAttention) -> None:
        table = tables.build("attention", message.columns)
        with self._lock:
            self._pending.append((message.step, table))

    def commit_through(self, step: int) -> None:
        """Commit the lines of steps up to one; E503 where the disk refuses."""
        with self._lock:
            ready = [table for of, table in self._pending if of <= step]
            self._pending = [piece for piece in self._pending if piece[0] > step]
            for _, piece in in_parts(pa.concat_tables(ready)) if ready else ():
                n = self._n_parts
                commit_part(self._store, self._chain, "attention", self._run, n, piece)
                self._n_parts += 1


STAGE = "readouts"
LANE_TIMEOUT_S = 60.0


class LaneReader:
    """The lane of one pipeline stage: its shared memory, and what has come through it."""

    def __init__(self, hooks: Sequence[HookSpec], path: str, nbytes: int) -> None:
        self.hooks = [hook.name for hook in hooks]
        self.memory, self.nbytes = attach_memory(Path(path), nbytes), nbytes
        self.depth: int | None = None
        self.arrived: deque[tuple[StepReadouts, np.ndarray]] = deque()
        """Steps that wait for the other stages."""
        self.given_up: set[int] = set()
        """Steps whose readouts of this stage there are not."""
        self.ended = False


class ReadoutLog:
    """Collects and commits the readouts of a run: of the steps about which all stages agree.

    Lanes are by pipeline stage, usually one. Spec: 0.1 sections 7.8 and 9.1.
    """

    def __init__(
        self,
        store: Store,
        chain: Chain,
        run: str,
        readouts: Readouts,
        lanes: Mapping[int, LaneReader],
        before_commit: Callable[[int], None],
        watch: Watch | None = None,
    ) -> None:
        self._before_commit, self._watch = before_commit, watch
        self._store, self._chain, self._run = store, chain, run
        self._readouts, self._lanes = readouts, lanes
        self._n_taken = self._stall_ns = 0
        self._pending: list[tuple[LaneReader, StepReadouts, np.ndarray]] = []
        self._pending_nbytes = 0
        self._last_step = -1
        self._limit: int | None = None
        self._n_parts = self._n_alert_parts = 0
        self._commit_lock = threading.Lock()
        self._changed = threading.Condition()
        self.nbytes = 0
        self.stalls: list[Stall] = []
        self.error: ActdsError | None = None
        self.fault: ActdsError | None = None
        """How the stages disagree; nothing is taken from there on."""

    def take(self, message: StepReadouts, stage: int = 0) -> None:
        """Copy the readouts of a step out of a stage's lane; commits a part when it is full."""
        lane = self._lanes[stage]
        shape = (len(lane.hooks), len(message.positions), self._readouts.width)
        values = view_memory(lane.memory, message.offset, shape, np.dtype(np.float32)).copy()
        with self._changed:
            lane.depth = message.depth - 1
            self._n_taken += 1
            self.nbytes += message.nbytes
            if message.stall is not None:
                self.stalls.append(message.stall)
                self._stall_ns += message.stall.duration_ns
            if self._limit is None or message.step <= self._limit:
                lane.given_up.update(message.given_up)
                lane.arrived.append((message, values))
                self._join()
            self._changed.notify_all()
            full = self._pending_nbytes >= PART_NBYTES
        if full:
            try:
                self._commit()
            except ActdsError as error:
                self.error = error

    @property
    def state(self) -> StageState:
        with self._changed:
            depths = [lane.depth for lane in self._lanes.values() if lane.depth is not None]
            return StageState(
                STAGE,
                depth=sum(depths) if depths else None,
                capacity_nbytes=sum(lane.nbytes for lane in self._lanes.values()),
                entry_nbytes=self.nbytes / max(1, self._n_taken),
                moved_nbytes=self.nbytes,
                n_stalls=len(self.stalls),
                stall_ns=self._stall_ns,
            )

    def end(self, stage: int = 0) -> None:
        with self._changed:
            self._lanes[stage].ended = True
            self._changed.notify_all()

    def end_at(self, step: int) -> None:
        """Discard and refuse the readouts of later steps, which the stages have not in common."""
        with self._changed:
            self._limit = step if self._limit is None else min(step, self._limit)
            self._last_step = min(self._last_step, self._limit)
            self._pending = [piece for piece in self._pending if piece[1].step <= self._limit]
            if self._watch is not None:
                self._watch.forget_after(self._limit)
            for lane in self._lanes.values():
                while lane.arrived and lane.arrived[-1][0].step > self._limit:
                    lane.arrived.pop()
            self._changed.notify_all()

    @property
    def last_step(self) -> int:
        with self._changed:
            return self._last_step

    def commit_through(self, step: int) -> int:
        """Commit all readouts up to a step, before its rows; return the last step with readouts.

        A killed engine may have sent the rows of its last steps and not yet their readouts. Raises
        E503 where the disk refused, E506 when there are none in time.
        """
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._last_step >= step or not self._expects_more, LANE_TIMEOUT_S
            )
        if not arrived:
            raise ActdsError(
                "E506", "readouts", got=f"nothing for step {step}", expected="its readouts"
            )
        if self.error is not None:
            raise self.error
        self._commit()
        return min(step, self.last_step)

    def wait(self) -> None:
        """Wait for the end of the lanes, as their workers are gone."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(lane.ended for lane in self._lanes.values()), LANE_TIMEOUT_S
            )

    def finish(self) -> None:
        """Wait for the end of the lanes and commit what is left; E503 where the disk refuses."""
        self.wait()
        if self.error is not None:
            raise self.error
        self._commit()

    @property
    def _expects_more(self) -> bool:
        """Whether another step may become complete; under the lock."""
        if self._limit is not None and self._last_step >= self._limit:
            return False
        return not any(lane.ended and not lane.arrived for lane in self._lanes.values())

    def _join(self) -> None:
        """Take the steps that have arrived from every stage; under the lock."""
        lanes = self._lanes.values()
        while all(lane.arrived for lane in lanes):
            heads = {stage: lane.arrived[0][0] for stage, lane in self._lanes.items()}
            if self._drop_given_up(min(message.step for message in heads.values())):
                continue
            fault = disagreement(heads, _SAME, "readouts of ")
            if fault is not None:
                self.fault = fault
                self.end_at(self._last_step)
                return
            of_hooks: dict[str, np.ndarray] = {}
            for lane in lanes:
                message, values = lane.arrived.popleft()
                of_hooks.update(zip(lane.hooks, values, strict=True))
                if self.error is None and values.size:
                    self._pending.append((lane, message, values))
                    self._pending_nbytes += values.nbytes + 3 * message.positions.nbytes
            self._last_step = message.step
            if self._watch is not None:
                self._watch.take(_with_entropy(heads.values()), of_hooks)

    def _drop_given_up(self, step: int) -> bool:
        """Discard the next step where a stage gave up its readouts; return whether one did."""
        lanes = self._lanes.values()
        is_lost = any(step in lane.given_up for lane in lanes)
        for lane in lanes:
            lane.given_up = {later for later in lane.given_up if later > step}
            if is_lost and lane.arrived[0][0].step == step:
                lane.arrived.popleft()
        return is_lost

    def _commit(self) -> None:
        with self._commit_lock:
            with self._changed:
                pieces, self._pending = self._pending, []
                self._pending_nbytes = 0
                alerts = [] if self._watch is None else self._watch.lines()
            if pieces:
                self._before_commit(max(message.step for _, message, _ in pieces))
                table = pa.concat_tables(
                    self._table(lane, [(m, values) for owner, m, values in pieces if owner is lane])
                    for lane in dict.fromkeys(owner for owner, _, _ in pieces)
                )
                commit_part(self._store, self._chain, "readouts", self._run, self._n_parts, table)
                self._n_parts += 1
            if alerts:
                names = tables.SCHEMAS["alerts"].names
                lines = tables.build("alerts", {n: [line[n] for line in alerts] for n in names})
                n, chain = self._n_alert_parts, self._chain
                commit_part(self._store, chain, "alerts", self._run, n, lines)
                self._n_alert_parts += 1

    def _table(self, lane: LaneReader, pieces: list[tuple[StepReadouts, np.ndarray]]) -> pa.Table:
        keys = {
            "request": np.concatenate([message.requests for message, _ in pieces]),
            "position": np.concatenate([message.positions for message, _ in pieces]),
            "token_id": np.concatenate([message.token_ids for message, _ in pieces]),
            "step": np.concatenate([np.full(len(m.positions), m.step) for m, _ in pieces]),
        }
        n = len(keys["request"])
        values = np.concatenate([values for _, values in pieces], axis=1)
        values = values.reshape(len(lane.hooks) * n, self._readouts.width)
        edge = 1 + self._readouts.n_projections
        columns: dict[str, object] = {
            name: np.tile(column, len(lane.hooks)) for name, column in keys.items()
        }
        columns |= {
            "hook": np.repeat(np.array(lane.hooks, object), n),
            "norm": values[:, 0],
            "projections": _lists(values[:, 1:edge]),
            "probes": _lists(values[:, edge:]),
        }
        return tables.build("readouts", columns)


def _with_entropy(messages: Collection[StepReadouts]) -> StepReadouts:
    """Return the message of the stage that read the logits, of the first where none did."""
    first = next(iter(messages))
    return next((message for message in messages if message.entropy is not None), first)


def _lists(values: np.ndarray) -> pa.Array:
    n, width = values.shape
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), pa.float32()))


class LaneEnd:
    """The writer's end of the lanes: a listener, and a thread for each pipeline stage."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._log: ReadoutLog | None = None
        self._ready = threading.Event()
        threading.Thread(target=self._accept, name="actds-lanes", daemon=True).start()

    def open(self, log: ReadoutLog) -> None:
        """Start taking readouts; until then they wait in the lane."""
        self._log = log
        self._ready.set()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="actds-readouts", daemon=True
                ).start()

    def _serve(self, connection: Connection) -> None:
        stage = 0
        try:
            stage = int(connection.recv())
            while True:
                message = connection.recv()
                self._ready.wait()
                self._take(message, stage, connection)
        except (EOFError, OSError):
            pass  # the worker is gone; all that it sent is in the log
        connection.close()
        if self._ready.wait(0) and self._log is not None:
            self._log.end(stage)

    def _take(self, message: object, stage: int, connection: Connection) -> None:
        if self._log is not None and isinstance(message, StepReadouts):
            self._log.take(message, stage)
            connection.send(RingFree(message.offset))
