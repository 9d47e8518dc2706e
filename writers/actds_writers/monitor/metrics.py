"""Prometheus metrics of a harvest, over HTTP; scrapes run on threads of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
    yield _counter(
        "recomputed_tokens", "Of these, computed again after a preemption.",
        now.recomputed_tokens,
    )  # fmt: skip
    yield _counter("cached_tokens", "Prompt tokens from the prefix cache.", now.cached_tokens)
    yield _counter(
        "queried_tokens", "Prompt tokens looked up in the prefix cache.", now.queried_tokens
    )
    dropped = CounterMetricFamily(
        "actds_dropped_tokens", "Rows lost to an overflow policy.", labels=["reason"]
    )
    for reason, n_tokens in sorted({"queue_full": 0, **now.dropped}.items()):
        dropped.add_metric([reason], n_tokens)
    yield dropped
    rows = CounterMetricFamily(
        "actds_rows", "Rows per hook: taken by the writer, durable on disk.", labels=["stage"]
    )
    rows.add_metric(["ring"], now.rows)
    rows.add_metric(["disk"], now.commits.n_rows)
    yield rows
    values = [
        HookValues.of_run(hook, now.commits.n_rows, counts, now.cast)
        for hook, counts in now.commits.values.items()
    ]
    for name, words in (
        ("not_finite", "with a value that is NaN or infinite"),
        ("overflowed", "that the cast to the stored type made infinite"),
        ("zero", "with only zeros"),
    ):
        counts = CounterMetricFamily(
            f"actds_{name}_rows", f"Durable rows of a hook {words}.", labels=["hook"]
        )
        for of_hook in values:
            counts.add_metric([of_hook.hook], getattr(of_hook, name))
        yield counts
    yield _counter("requests_finished", "Requests that have ended.", now.requests_done)
    if now.requests_total is not None:
        yield _gauge("requests_planned", "Requests to serve.", now.requests_total)
    yield _gauge("requests_running", "Running requests.", now.running)
    yield _gauge("requests_waiting", "Requests waiting in the scheduler.", now.waiting)
    yield _gauge("elapsed_seconds", "Seconds since the start.", now.elapsed_s)


def _stages(now: Snapshot) -> Iterator[Metric]:
    nbytes = CounterMetricFamily(
        "actds_stage_bytes",
        "Bytes that left a stage: captured, taken from ring or lane, committed; files on disk.",
        labels=["stage"],
    )
    stalls = CounterMetricFamily(
        "actds_stalls", "Times that a stage made the one before it wait.", labels=["stage"]
    )
    stalled = CounterMetricFamily(
        "actds_stall_seconds", "Time that a stage made the one before it wait.", labels=["stage"]
    )
    depth = GaugeMetricFamily("actds_queue_depth", "Entries in a stage's queue.", labels=["stage"])
    capacity = GaugeMetricFamily(
        "actds_queue_capacity", "Capacity of a stage's queue, in entries.", labels=["stage"]
    )
    fill = GaugeMetricFamily(
        "actds_queue_fill_ratio", "Fill of a stage's queue, 0 to 1.", labels=["stage"]
    )
    for stage in (*now.stages, *([now.lane] if now.lane else [])):
        label = [stage.name]
        nbytes.add_metric(label, stage.nbytes)
        stalls.add_metric(label, stage.n_stalls)
        stalled.add_metric(label, stage.stall_s)
        # What is not known yet has no sample: zero would be a value.
        for family, value in ((depth, stage.depth), (capacity, stage.capacity), (fill, stage.fill)):
            if value is not None:
                family.add_metric(label, value)
    nbytes.add_metric(["disk"], now.commits.nbytes_out)
    yield from (nbytes, stalls, stalled, depth, capacity, fill)
    yield _gauge("compression_backlog_bytes", "Bytes waiting to be encoded.", now.backlog_nbytes)
    if now.memory_nbytes is not None:
        yield _gauge("memory_bound_bytes", "Bound on the memory of all stages.", now.memory_nbytes)


def _commits(now: Snapshot) -> Iterator[Metric]:
    c = now.commits
    shards = CounterMetricFamily("actds_shards", "Shards committed.", labels=["compression"])
    shards.add_metric(["normal"], c.n_shards - c.n_raw_shards)
    shards.add_metric(["raw"], c.n_raw_shards)
    yield shards
    counts = c.buckets or (0,) * len(LATENCY_BUCKETS_S)
    buckets = [(str(le), n) for le, n in zip(LATENCY_BUCKETS_S, counts, strict=True)]
    yield HistogramMetricFamily(
        "actds_commit_latency_seconds",
        "From a full buffer to a durable shard.",
        buckets=[*buckets, ("+Inf", c.n_shards)],
        sum_value=c.seconds,
    )
    if now.last_commit_age_s is not None:
        yield _gauge(
            "last_commit_age_seconds", "Seconds since the last commit.", now.last_commit_age_s
        )
    if now.writer_silent_s is not None:
        yield _gauge(
            "writer_silent_seconds",
            "Seconds since the last message of the writer.",
            now.writer_silent_s,
        )


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"actds_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"actds_{name}", meaning, value=value)
