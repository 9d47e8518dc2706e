"""The committer: turns full buffers into durable shards, on thread ``actds-commit``.

The writer's loop does not wait for the disk as long as a spare buffer is left; then the ring fills
and the overflow policy decides. A shard is written raw when too much waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from actds.commit import ShardRows, commit_shard
from actds.errors import ActdsError
from actds.ledger import Chain
from actds.store import Store
from actds_writers.monitor.meters import CommitMeter, Occupancy
from actds_writers.shards.assembly import ShardBuffer

Order = Literal["permuted", "sequence"]


@dataclass(frozen=True)
class CommitPlan:
    """How shards are written.

    Args:
        seed: seed of the run; every shard's permutation seed follows from it.
        n_threads: encoding threads.
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

    def latency_p99(self) -> float | None:
        """Return the 99th percentile of the last commits in seconds, ``None`` before the first."""
        return self.meter.totals.p99_s

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
