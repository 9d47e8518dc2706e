"""Meters of the writer process: commits, stalls and queue depths; they count and never wait."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from actds.dataset.commit import commit_part
from actds.dataset.ledger import Chain
from actds.format import tables
from actds.format.schema import RowCounts
from actds.store import Store
from actds_writers.ipc.link import aligned
from actds_writers.ipc.messages import CommitTotals, StageState, Stall, StepRows, WorkerHello

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LATENCIES_KEPT = 512


class CommitMeter:
    """Counts the commits; the commit thread writes, any thread reads."""

    def __init__(self) -> None:
        self.totals = CommitTotals()
        self._buckets = [0] * len(LATENCY_BUCKETS_S)
        self._latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._lock = threading.Lock()

    def committed(
        self,
        n_rows: int,
        nbytes_in: int,
        nbytes_out: int,
        seconds: float,
        *,
        raw: bool = False,
        values: Mapping[str, RowCounts] = MappingProxyType({}),
    ) -> None:
        with self._lock:
            first = bisect_left(LATENCY_BUCKETS_S, seconds)
            for index in range(first, len(LATENCY_BUCKETS_S)):
                self._buckets[index] += 1
            self._latencies.append(seconds)
            t = self.totals
            p50, p99 = np.quantile(list(self._latencies), (0.5, 0.99))
            self.totals = CommitTotals(
                n_shards=t.n_shards + 1,
                n_raw_shards=t.n_raw_shards + raw,
                n_rows=t.n_rows + n_rows,
                nbytes_in=t.nbytes_in + nbytes_in,
                nbytes_out=t.nbytes_out + nbytes_out,
                seconds=t.seconds + seconds,
                buckets=tuple(self._buckets),
                p50_s=float(p50),
                p99_s=float(p99),
                last_ns=time.time_ns(),
                values=RowCounts.by_hook([t.values, values]),
            )


DISK_WINDOW_S = 10.0
DISK_QUANTILE_AGE_S = 0.1


class DiskMeter:
    """What the disk takes for each file: writing and syncing alone, over the last ten seconds.

    A file that is being written counts with what it has taken so far, so that a disk which stalls
    is seen while it does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done: deque[tuple[float, float]] = deque()
        self._spent: dict[object, float] = {}
        self._began: dict[object, float] = {}
        self._p99: tuple[float, float | None] = (-math.inf, None)
        self._lock = threading.Lock()

    @contextmanager
    def asked(self, file: object) -> Iterator[None]:
        """Take the time of one call for a file; one at a time."""
        with self._lock:
            self._began[file] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                took = self._clock() - self._began.pop(file)
                self._spent[file] = self._spent.get(file, 0.0) + took

    def ended(self, file: object) -> None:
        with self._lock:
            if file in self._spent:
                self._done.append((self._clock(), self._spent.pop(file)))

    def p99(self) -> float | None:
        """Return the 99th percentile, one that occurred; ``None`` without any file in the window.

        At most a tenth of a second old.
        """
        with self._lock:
            now = self._clock()
            if now - self._p99[0] < DISK_QUANTILE_AGE_S:
                return self._p99[1]
            while self._done and self._done[0][0] < now - DISK_WINDOW_S:
                self._done.popleft()
            took = [seconds for _, seconds in self._done]
            for file in self._spent.keys() | self._began.keys():
                took.append(self._spent.get(file, 0.0) + now - self._began.get(file, now))
            value = float(np.quantile(took, 0.99, method="higher")) if took else None
            self._p99 = (now, value)
            return value


class Meters:
    """Follows the queues of one run."""

    def __init__(self, hello: WorkerHello, row_nbytes: int, pool: Occupancy) -> None:
        facts = {fact.name: fact.value for fact in hello.facts}
        staging = facts.get("capture.staging_nbytes")
        self._nbytes = {
            "staging": staging if isinstance(staging, int) else 0,
            "ring": hello.ring_nbytes,
        }
        smallest = aligned(row_nbytes)
        queues = [Occupancy(stage, n // smallest) for stage, n in self._nbytes.items()]
        self.queues = {queue.stage: queue for queue in (*queues, pool)}
        self._stalls: dict[str, tuple[int, int]] = {}
        self._ring_depth = 0
        self._n_slices = 0
        self.n_rows = 0
        self.ring_nbytes = 0

    def step(self, message: StepRows) -> None:
        """Note depths and stalls of a step, taken or dropped."""
        self.queues["staging"].observe(message.depth_stage1, message.t_ns)
        self.queues["ring"].observe(message.depth_stage2, message.t_ns)
        self._ring_depth = message.depth_stage2
        for stall in message.stalls:
            self.stalled(stall)

    def taken(self, n_rows: int, nbytes: int) -> None:
        self.queues["ring"].observe(max(0, self._ring_depth - 1), time.time_ns())
        self._n_slices += 1
        self.n_rows += n_rows
        self.ring_nbytes += nbytes

    def stalled(self, stall: Stall) -> None:
        n, duration_ns = self._stalls.get(stall.stage, (0, 0))
        self._stalls[stall.stage] = (n + 1, duration_ns + stall.duration_ns)

    def states(self) -> tuple[StageState, ...]:
        return tuple(
            StageState(
                stage,
                queue.depth,
                queue.capacity,
                self._nbytes.get(stage),
                self.ring_nbytes / max(1, self._n_slices),
                *self._stalls.get(stage, (0, 0)),
            )
            for stage, queue in self.queues.items()
        )

    def commit(self, store: Store, chain: Chain, run: str) -> None:
        """Commit the occupancy histograms; nothing when no queue was observed.

        Spec: 0.1 section 6.3.
        """
        table = occupancy_table(self.queues.values())
        if table.num_rows:
            commit_part(store, chain, "occupancy", run, 0, table)


EXACT_DEPTHS = 128
"""Depths below this are exact; larger ones keep their seven leading bits, so a queue of a million
entries has under a thousand bins, each with an error of at most 1.6 %."""


def depth_bin(depth: int) -> int:
    shift = max(0, depth.bit_length() - EXACT_DEPTHS.bit_length() + 1)
    return depth >> shift << shift


class Occupancy:
    """A time-weighted histogram of one queue's depth; any thread may observe."""

    def __init__(self, stage: str, capacity: int) -> None:
        self.stage, self.capacity = stage, capacity
        self.depth: int | None = None
        self._since_ns = 0
        self._duration_ns: dict[int, int] = {}
        self._n_visits: dict[int, int] = {}
        self._lock = threading.Lock()

    def observe(self, depth: int, t_ns: int) -> None:
        """Note that the queue has a depth from ``t_ns`` on."""
        with self._lock:
            if self.depth is None:
                self._since_ns = t_ns
            else:
                self._duration_ns[depth_bin(self.depth)] += max(0, t_ns - self._since_ns)
            if self.depth != depth:
                lower = depth_bin(depth)
                self._duration_ns.setdefault(lower, 0)
                self._n_visits[lower] = self._n_visits.get(lower, 0) + 1
            self.depth = depth
            self._since_ns = max(self._since_ns, t_ns)

    def rows(self) -> list[tuple[int, int, int]]:
        with self._lock:
            return [(d, ns, self._n_visits[d]) for d, ns in sorted(self._duration_ns.items())]


def occupancy_table(queues: Iterable[Occupancy]) -> pa.Table:
    """Return the histograms as the ``occupancy`` table; a queue never observed has no row."""
    rows = [(queue, *row) for queue in queues for row in queue.rows()]
    return tables.build(
        "occupancy",
        {
            "stage": [queue.stage for queue, *_ in rows],
            "depth": [depth for _, depth, _, _ in rows],
            "capacity": [queue.capacity for queue, *_ in rows],
            "duration_ns": [duration for _, _, duration, _ in rows],
            "n_visits": [visits for *_, visits in rows],
        },
    )
