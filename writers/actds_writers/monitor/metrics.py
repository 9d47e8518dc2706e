"""Prometheus metrics of a harvest, over HTTP; scrapes run on threads of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from actds.dataset.info import HookValues
from actds.errors import ActdsError, not_installed
from actds_writers.monitor.meters import LATENCY_BUCKETS_S
from actds_writers.monitor.progress import Snapshot

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError:
    raise not_installed("prometheus-client", "metrics", "metrics_port") from None


class SnapshotCollector(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield from _tokens(now)
        yield from _stages(now)
        yield from _commits(now)

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
        ActdsError: E009 when the address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ActdsError(
            "E009",
            f"metrics_port {port}",
            got=f"{host}:{port}: {words}",
            expected="an address and a port that are free",
        ) from None
    return MetricsServer(server, thread)


def _tokens(now: Snapshot) -> Iterator[Metric]:
    yield _counter("scheduled_tokens", "Tokens computed by the engine.", now.scheduled_tokens)
    again = "Of these, computed again after a preemption."
    yield _counter("recomputed_tokens", again, now.recomputed_tokens)
    yield _counter("cached_tokens", "Prompt tokens from the prefix cache.", now.cached_tokens)
    looked_up = "Prompt tokens looked up in the prefix cache."
    yield _counter("queried_tokens", looked_up, now.queried_tokens)
    dropped = sorted({"queue_full": 0, **now.dropped}.items())
    lost = "Rows lost to an overflow policy."
    yield _by(CounterMetricFamily, "dropped_tokens", lost, "reason", dropped)
    rows = [("ring", now.rows), ("disk", now.commits.n_rows)]
    taken = "Rows per hook: taken by the writer, durable on disk."
    yield _by(CounterMetricFamily, "rows", taken, "stage", rows)
    values = [
        HookValues.of_run(hook, now.commits.n_rows, counts, now.cast)
        for hook, counts in now.commits.values.items()
    ]
    for name, words in (
        ("not_finite", "with a value that is NaN or infinite"),
        ("overflowed", "that the cast to the stored type made infinite"),
        ("zero", "with only zeros"),
    ):
        counts = [(value.hook, getattr(value, name)) for value in values]
        meaning = f"Durable rows of a hook {words}."
        yield _by(CounterMetricFamily, f"{name}_rows", meaning, "hook", counts)
    yield _counter("requests_finished", "Requests that have ended.", now.requests_done)
    if now.requests_total is not None:
        yield _gauge("requests_planned", "Requests to serve.", now.requests_total)
    yield _gauge("requests_running", "Running requests.", now.running)
    yield _gauge("requests_waiting", "Requests waiting in the scheduler.", now.waiting)
    yield _gauge("elapsed_seconds", "Seconds since the start.", now.elapsed_s)


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


def _stages(now: Snapshot) -> Iterator[Metric]:
    stages = (*now.stages, *([now.lane] if now.lane else []))
    for name, field, meaning in _STAGES:
        kind = GaugeMetricFamily if name.startswith("queue") else CounterMetricFamily
        values = [(stage.name, getattr(stage, field)) for stage in stages]
        disk = [("disk", now.commits.nbytes_out)] if field == "nbytes" else []
        yield _by(kind, name, meaning, "stage", [*values, *disk])
    yield _gauge("compression_backlog_bytes", "Bytes waiting to be encoded.", now.backlog_nbytes)
    if now.memory_nbytes is not None:
        yield _gauge("memory_bound_bytes", "Bound on the memory of all stages.", now.memory_nbytes)


def _commits(now: Snapshot) -> Iterator[Metric]:
    c = now.commits
    shards = [("normal", c.n_shards - c.n_raw_shards), ("raw", c.n_raw_shards)]
    yield _by(CounterMetricFamily, "shards", "Shards committed.", "compression", shards)
    counts = c.buckets or (0,) * len(LATENCY_BUCKETS_S)
    buckets = [(str(le), n) for le, n in zip(LATENCY_BUCKETS_S, counts, strict=True)]
    yield HistogramMetricFamily(
        "actds_commit_latency_seconds",
        "From a full buffer to a durable shard.",
        buckets=[*buckets, ("+Inf", c.n_shards)],
        sum_value=c.seconds,
    )
    age, silent_s = now.last_commit_age_s, now.writer_silent_s
    if age is not None:
        yield _gauge("last_commit_age_seconds", "Seconds since the last commit.", age)
    if silent_s is not None:
        meaning = "Seconds since the last message of the writer."
        yield _gauge("writer_silent_seconds", meaning, silent_s)


def _by(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    meaning: str,
    label: str,
    values: Iterable[tuple[str, float | None]],
) -> Metric:
    """Return a value for each label; what is not known has no sample: zero would be a value."""
    family = kind(f"actds_{name}", meaning, labels=[label])
    for of, value in values:
        if value is not None:
            family.add_metric([of], value)
    return family


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"actds_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"actds_{name}", meaning, value=value)
