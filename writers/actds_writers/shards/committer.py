"""The committer: from full buffers to committed shards, several of them on their way at a time.

Thread ``actds-begin`` takes full buffers in order and gives them to the write threads, which
encode, hash and write them; a buffer is empty again as soon as its rows are encoded. Thread
``actds-commit`` waits for the files and commits shard after shard in the same order: 'committed up
to step s' stays exact per phase. A shard is written raw when too much waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from actds.dataset.commit import BegunShard, ShardRows, begin_shard
from actds.dataset.ledger import Chain
from actds.dataset.write_threads import N_HELD, N_OPEN, WriteThreads
from actds.errors import ActdsError
from actds.store import Store
from actds_writers.config import Order
from actds_writers.monitor.metrics import CommitMeter, Occupancy
from actds_writers.shards.assembly import ShardBuffer

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
            dtypes={hook.name: hook.dtype for hook in buffer.hooks},
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
        if self._pays():
            return True
        self._n_refused += 1
        if self._n_refused >= RETRY_AFTER:
            self._n_refused = 0
            self._cost[True].clear()
        return False

    def learn(self, nbytes: int, seconds: float, *, raw: bool) -> None:
        if nbytes:
            self._cost[raw].append(seconds / nbytes)

    def _pays(self) -> bool:
        normal, raw = self._cost[False], self._cost[True]
        if not normal or not raw:
            return True
        return sum(raw) / len(raw) < sum(normal) / len(normal)
