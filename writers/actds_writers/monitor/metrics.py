"""What is counted of a harvest: the meters of its writer process, and its metrics over HTTP.

Meters of commits, stalls and queue depths count and never wait. Prometheus scrapes run on threads
of the server.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from actds.dataset.commit import commit_part
from actds.dataset.info import HookValues
from actds.dataset.ledger import Chain
from actds.errors import ActdsError, not_installed
from actds.format import tables
from actds.format.schema import RowCounts
from actds.store import Store
from actds_writers.ipc.link import aligned
from actds_writers.ipc.messages import (
    CommitTotals,
    RunInfo,
    StageState,
    Stall,
    StepRows,
    WorkerHello,
)
from actds_writers.monitor.progress import Snapshot, summed

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LATENCIES_KEPT = 512


class CommitMeter:
    """Counts the commits; the commit thread writes, any thread reads."""

    def __init__(self) -> None:
        self.totals = CommitTotals()
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
        added = CommitTotals(
            n_shards=1,
            n_raw_shards=int(raw),
            n_rows=n_rows,
            nbytes_in=nbytes_in,
            nbytes_out=nbytes_out,
            seconds=seconds,
            buckets=tuple(int(seconds <= limit_s) for limit_s in LATENCY_BUCKETS_S),
            last_ns=time.time_ns(),
            values=values,
        )
        with self._lock:
            self._latencies.append(seconds)
            p50, p99 = np.quantile(list(self._latencies), (0.5, 0.99)).tolist()
            self.totals = replace(summed([self.totals, added]), p50_s=p50, p99_s=p99)


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


class SnapshotCollector:
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import core

        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        now = self._snapshot()
        for kind, name, meaning, value in _metrics(now):
            if isinstance(value, tuple):
                label, values = value
                family: Any = kinds[kind](f"actds_{name}", meaning, labels=[label])
                for of, known in values.items():
                    if known is not None:  # it has no sample: zero would be a value
                        family.add_metric([of], known)
                yield family
            elif value is not None:
                yield kinds[kind](f"actds_{name}", meaning, value=value)
        labels = RunInfo._fields
        runs = core.GaugeMetricFamily("actds_run_info", "1, of each run.", labels=labels)
        for run in now.runs:
            runs.add_metric(run, 1)
        yield runs
        commits = now.commits
        counts = commits.buckets or (0,) * len(LATENCY_BUCKETS_S)
        buckets = [(str(le), n) for le, n in zip(LATENCY_BUCKETS_S, counts, strict=True)]
        yield core.HistogramMetricFamily(
            "actds_commit_latency_seconds",
            "From a full buffer to a durable shard.",
            buckets=[*buckets, ("+Inf", commits.n_shards)],
            sum_value=commits.seconds,
        )

    def describe(self) -> list[Metric]:
        """Return nothing, so that the registry takes no snapshot before there is one."""
        return []


class MetricsServer:
    """The HTTP server; a context manager."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(host: str, port: int, snapshot: Callable[[], Snapshot]) -> MetricsServer:
    """Serve the metrics of a harvest at ``http://host:port/metrics``.

    Uses its own registry: no metrics of other libraries are served.

    Args:
        host: address to listen on; there is no authentication.

    Raises:
        ActdsError: E009 when the address cannot be used; E011 without the extra ``metrics``.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise not_installed("prometheus-client", "metrics", "metrics_port") from None
    registry = CollectorRegistry()
    collector: Any = SnapshotCollector(snapshot)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        got, expected = f"{host}:{port}: {words}", "an address and a port that are free"
        raise ActdsError("E009", f"metrics_port {port}", got=got, expected=expected) from None
    return MetricsServer(server, thread)


_STAGES = (
    (
        "stage_bytes",
        "nbytes",
        "Bytes that left a stage: captured, taken from ring or lane, committed; files on disk.",
    ),
    ("stalls", "n_stalls", "Times that a stage made the one before it wait."),
    ("stall_seconds", "stall_s", "Time that a stage made the one before it wait."),
    ("queue_depth", "depth", "Entries in a stage's queue."),
    ("queue_capacity", "capacity", "Capacity of a stage's queue, in entries."),
    ("queue_fill_ratio", "fill", "Fill of a stage's queue, 0 to 1."),
)
"""Name, field of ``Stage`` and meaning of each metric; those of the queue are gauges."""
_VALUES = (
    ("not_finite", "with a value that is NaN or infinite"),
    ("overflowed", "that the cast to the stored type made infinite"),
    ("zero", "with only zeros"),
)

Number = float | None
OfMetric = tuple[str, str, str, Number | tuple[str, Mapping[str, Number]]]


def _metrics(now: Snapshot) -> Iterator[OfMetric]:
    """Yield kind, name, meaning, and the value, or a label and its values; None is not known."""
    c = now.commits
    again = "Of these, computed again after a preemption."
    looked_up = "Prompt tokens looked up in the prefix cache."
    yield "counter", "scheduled_tokens", "Tokens computed by the engine.", now.scheduled_tokens
    yield "counter", "recomputed_tokens", again, now.recomputed_tokens
    yield "counter", "cached_tokens", "Prompt tokens from the prefix cache.", now.cached_tokens
    yield "counter", "queried_tokens", looked_up, now.queried_tokens
    dropped = dict(sorted({"queue_full": 0, **now.dropped}.items()))
    yield "counter", "dropped_tokens", "Rows lost to an overflow policy.", ("reason", dropped)
    for name, words, n_tokens in (
        ("filtered", "Positions that a sampling rule leaves out.", now.filtered_tokens),
        ("thinned", "Positions that the draw under load left out.", now.thinned),
        ("undelivered", "Positions computed past the end of a request.", now.undelivered_tokens),
        ("aborted", "Positions that requests ended before.", now.aborted_tokens),
    ):
        yield "counter", f"{name}_tokens", words, n_tokens
    capturing = "1 while rows are captured, 0 once it ended or is switched off; serving goes on."
    yield "gauge", "capturing", capturing, int(now.is_capturing)
    taken = "Rows per hook: taken by the writer, durable on disk."
    yield "counter", "rows", taken, ("stage", {"ring": now.rows, "disk": c.n_rows})
    of_run = [HookValues.of_run(hook, c.n_rows, n, now.cast) for hook, n in c.values.items()]
    for name, words in _VALUES:
        counts = {value.hook: getattr(value, name) for value in of_run}
        yield "counter", f"{name}_rows", f"Durable rows of a hook {words}.", ("hook", counts)
    yield "counter", "requests_finished", "Requests that have ended.", now.requests_done
    yield "gauge", "requests_planned", "Requests to serve.", now.requests_total
    yield "gauge", "requests_running", "Running requests.", now.running
    yield "gauge", "requests_waiting", "Requests waiting in the scheduler.", now.waiting
    yield "gauge", "elapsed_seconds", "Seconds since the start.", now.elapsed_s
    stages = (*now.stages, *([now.lane] if now.lane else []))
    for name, field, meaning in _STAGES:
        kind = "gauge" if name.startswith("queue") else "counter"
        of_stage: dict[str, Number] = {stage.name: getattr(stage, field) for stage in stages}
        disk = {"disk": c.nbytes_out} if field == "nbytes" else {}
        yield kind, name, meaning, ("stage", of_stage | disk)
    bound = "Bound on the memory of all stages."
    yield "gauge", "compression_backlog_bytes", "Bytes waiting to be encoded.", now.backlog_nbytes
    yield "gauge", "memory_bound_bytes", bound, now.memory_nbytes
    shards = {"normal": c.n_shards - c.n_raw_shards, "raw": c.n_raw_shards}
    yield "counter", "shards", "Shards committed.", ("compression", shards)
    if (watched := now.watched) is not None:
        left = "Requests that left the regime of the profile, by the hook that was furthest off."
        yield (
            "gauge",
            "profile",
            "The profile beside which rows are looked at.",
            ("sha256", {watched.profile: 1}),
        )
        yield "counter", "watched_requests", "Requests that were looked at.", watched.n_requests
        yield "counter", "looks", "Rows that were compared with the profile.", watched.n_looks
        yield "counter", "alerts", left, ("hook", watched.alerts)
        yield "counter", "alerts_not_sent", "Alerts that no URL has taken.", watched.n_unsent
    silent = "Seconds since the last message of the writer."
    yield (
        "gauge",
        "last_commit_age_seconds",
        "Seconds since the last commit.",
        now.last_commit_age_s,
    )
    yield "gauge", "writer_silent_seconds", silent, now.writer_silent_s
