"""Metrics, occupancy and display of a real pipeline under pressure: they say what became of it."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from test_progress import CAST, COUNTED, NOW, ODD, WITH_LANE, WRITTEN, snapshot

import actds
from actds.errors import ActdsError
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.ipc.messages import ClientFacts, RunInfo
from actds_writers.monitor.metrics import LATENCY_BUCKETS_S, serve_metrics
from actds_writers.monitor.progress import Snapshot, format_line, show_progress, take_snapshot

pytestmark = pytest.mark.standard


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
N_STALLED = 120


def scrape(port: int) -> tuple[Samples, frozenset[str]]:
    """Return every sample, and the names of those that may only grow."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples
    }
    assert all(family.documentation for family in families)
    growing = {s.name for f in families for s in f.samples if f.type in ("counter", "histogram")}
    return samples, frozenset(growing)


def served(now: Snapshot) -> Samples:
    with serve_metrics("127.0.0.1", 0, lambda: now) as server:
        return scrape(server.port)[0]


def test_every_metric_has_the_value_of_the_snapshot() -> None:
    dropped = {"queue_full": 1_200, "dma_backpressure": 34}
    lost = {"filtered_tokens": 700, "undelivered_tokens": 20, "aborted_tokens": 9}
    counted = dataclasses.replace(COUNTED, dropped=dropped, **lost)
    written = dataclasses.replace(WRITTEN, not_drawn={"thinned": 44})
    samples = served(snapshot(written, counted))

    def value(name: str, **labels: str) -> float:
        return samples[f"actds_{name}", tuple(sorted(labels.items()))]

    assert value("scheduled_tokens_total") == 40_000
    assert value("cached_tokens_total") == 12_345
    assert value("queried_tokens_total") == 60_000
    assert value("recomputed_tokens_total") == 3
    assert value("dropped_tokens_total", reason="queue_full") == 1_200
    assert value("dropped_tokens_total", reason="dma_backpressure") == 34
    assert value("filtered_tokens_total") == 700
    assert value("undelivered_tokens_total") == 20
    assert value("aborted_tokens_total") == 9
    assert value("thinned_tokens_total") == 44
    assert value("capturing") == 1
    assert value("rows_total", stage="ring") == 39_000
    assert value("rows_total", stage="disk") == 36_000
    assert value("stage_bytes_total", stage="staging") == 40_000 * 2_304
    assert value("stage_bytes_total", stage="ring") == 90_000_000
    assert value("stage_bytes_total", stage="pool") == 82_944_000
    assert value("stage_bytes_total", stage="disk") == 56_600_000
    assert value("queue_depth", stage="ring") == 15
    assert value("queue_capacity", stage="ring") == 110_000
    assert value("queue_fill_ratio", stage="ring") == pytest.approx(0.6)
    assert value("stalls_total", stage="ring") == 3
    assert value("stall_seconds_total", stage="ring") == pytest.approx(1.2)
    assert value("compression_backlog_bytes") == 15_000_000
    assert value("memory_bound_bytes") == 1_900_000_000
    assert value("last_commit_age_seconds") == 4.0
    assert value("shards_total", compression="normal") == 4
    assert value("shards_total", compression="raw") == 1
    assert value("commit_latency_seconds_count") == 5
    assert value("commit_latency_seconds_sum") == 1.75
    assert value("commit_latency_seconds_bucket", le="0.5") == 4
    assert value("commit_latency_seconds_bucket", le="+Inf") == 5
    assert value("requests_planned") == 256
    assert value("requests_finished_total") == 128
    assert len(LATENCY_BUCKETS_S) + 1 == sum(
        name == "actds_commit_latency_seconds_bucket" for name, _ in samples
    )


def test_the_lane_of_readouts_is_a_stage_of_its_own_where_there_is_one() -> None:
    samples = served(snapshot(WITH_LANE, dataclasses.replace(COUNTED, lane_depth=304)))
    lane = (("stage", "readouts"),)
    assert samples["actds_queue_depth", lane] == 304
    assert samples["actds_queue_fill_ratio", lane] == pytest.approx(0.95)
    assert samples["actds_stage_bytes_total", lane] == 8_000_000
    assert samples["actds_stalls_total", lane] == 7
    assert samples["actds_stall_seconds_total", lane] == 2.5
    assert not [key for key in served(NOW) if key[1] == lane]


def test_rows_that_are_not_finite_or_zero_are_counted_by_hook() -> None:
    commits = dataclasses.replace(WRITTEN.commits, values=ODD)
    odd = dataclasses.replace(WRITTEN, commits=commits)
    samples = served(snapshot(odd))
    cast = served(snapshot(dataclasses.replace(odd, cast=CAST)))
    for hook, counts in ODD.items():
        # A hook without one has a zero, so that an alert sees the first one come.
        labels = (("hook", hook),)
        assert samples["actds_not_finite_rows_total", labels] == counts.not_finite
        assert samples["actds_zero_rows_total", labels] == counts.zero
        assert samples["actds_overflowed_rows_total", labels] == 0
        assert cast["actds_overflowed_rows_total", labels] == counts.infinite


def test_a_run_is_named_once_and_not_on_every_series() -> None:
    run = RunInfo("r-1f0c", "org/tiny", "0123abcd", "live")
    samples = served(snapshot(dataclasses.replace(WRITTEN, of_run=run)))
    assert samples["actds_run_info", tuple(sorted(run._asdict().items()))] == 1
    assert not [key for key in samples if "run" in dict(key[1]) and key[0] != "actds_run_info"]
    assert not [name for name, _ in served(snapshot(None)) if name == "actds_run_info"]


def test_rows_that_a_reserve_has_lost_are_dropped_because_the_queue_was_full() -> None:
    written = dataclasses.replace(WRITTEN, not_drawn={"dropped": 7})
    samples = served(snapshot(written, dataclasses.replace(COUNTED, dropped={"queue_full": 10})))
    assert samples["actds_dropped_tokens_total", (("reason", "queue_full"),)] == 17
    assert samples["actds_thinned_tokens_total", ()] == 0


def test_what_nobody_knows_yet_has_no_sample() -> None:
    names = {name for name, _ in served(snapshot(None, None, requests_total=None))}
    assert "actds_scheduled_tokens_total" in names
    unknown = {"queue_depth", "queue_capacity", "last_commit_age_seconds", "requests_planned"}
    assert not names & {f"actds_{name}" for name in unknown}


def test_the_registry_is_one_of_its_own() -> None:
    names = {name for name, _ in served(NOW)}
    assert names and all(name.startswith("actds_") for name in names)
    assert not any(family.name.startswith("actds_") for family in REGISTRY.collect())


def test_a_port_that_is_taken_is_refused_and_one_that_is_given_back_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ActdsError, match="E009 metrics_port"):
            serve_metrics("127.0.0.1", taken.getsockname()[1], lambda: NOW)
    with pytest.raises(ActdsError, match="E009 metrics_port"):
        serve_metrics("192.0.2.1", 0, lambda: NOW)  # an address that no machine has
    with serve_metrics("127.0.0.1", 0, lambda: NOW) as first:
        port = first.port
    with serve_metrics("127.0.0.1", port, lambda: NOW) as second:
        assert scrape(second.port)[0]


def test_without_the_extra_the_option_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from actds.errors import ActdsError\n"
        "from actds_writers.monitor.metrics import serve_metrics\n"
        "try: serve_metrics('127.0.0.1', 0, lambda: None)\n"
        "except ActdsError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.stdout.startswith("E011 metrics_port")
    assert ".[metrics]" in told.stdout


@dataclasses.dataclass
class Watched:
    """A run with a writer that stood still for a while, and what was seen of it."""

    out: Path
    scrapes: list[Samples]
    growing: frozenset[str]
    last: Snapshot
    ended: dict[str, dict[str, int]]
    shown: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    out, stream = tmp_path_factory.mktemp("watched") / "acts", io.StringIO()
    with pipeline_for(out, "drop_newest") as pipeline:
        engine = SyntheticEngine(pipeline)
        done = 0

        def present() -> Snapshot:
            return take_snapshot(
                pipeline.written,
                pipeline.counted,
                elapsed_s=1.0 + done,
                requests_done=done,
                requests_total=N_STALLED + 1,
            )

        scrapes: list[Samples] = []
        with serve_metrics("127.0.0.1", 0, present) as server:

            def look() -> None:
                pipeline.poll()
                samples, names = scrape(server.port)
                scrapes.append(samples)
                growing.update(names)

            growing: set[str] = set()
            look()
            with show_progress(present, stream, terminal=False, interval_s=0.05):
                engine.request(0)
                engine.drain(pipeline)
                look()
                stop_and_go(pipeline.processes["writer"].pid, lambda: requests(engine))
                done = N_STALLED + 1
                engine.drain(pipeline)
                look()
                engine.close()
                pipeline.send_client_facts(ClientFacts())
                ended = pipeline.finish("finished")
                look()
        last = present()
    seal(open_store(out))
    totals = ended
    return Watched(out, scrapes, frozenset(growing), last, totals, stream.getvalue())


def stop_and_go(writer: int, work: Callable[[], None]) -> None:
    os.kill(writer, signal.SIGSTOP)
    try:
        work()
    finally:
        os.kill(writer, signal.SIGCONT)


def requests(engine: SyntheticEngine) -> None:
    for number in range(1, N_STALLED + 1):
        engine.request(number)


def test_counters_never_fall(watched: Watched) -> None:
    assert len(watched.scrapes) == 4 and watched.growing
    for before, after in zip(watched.scrapes, watched.scrapes[1:], strict=False):
        for (name, labels), value in before.items():
            if name in watched.growing:
                assert after[name, labels] >= value, (name, labels)
    first, last = watched.scrapes[0], watched.scrapes[-1]
    key = ("actds_scheduled_tokens_total", ())
    assert last[key] > first[key] == 0


def test_the_last_scrape_is_the_summary(watched: Watched) -> None:
    last, dataset = watched.scrapes[-1], actds.open(watched.out)
    census, writer = watched.ended["census"], watched.ended["writer"]

    def value(name: str, *labels: tuple[str, str]) -> float:
        return last[f"actds_{name}", labels]

    assert value("scheduled_tokens_total") == census["scheduled_tokens"]
    assert (
        value("dropped_tokens_total", ("reason", "queue_full"))
        + last.get(("actds_dropped_tokens_total", (("reason", "dma_backpressure"),)), 0)
        == census["dropped"]
        == writer["dropped_tokens"]
        > 0
    )
    assert value("rows_total", ("stage", "ring")) == writer["rows"]
    assert value("rows_total", ("stage", "disk")) == writer["rows"] == dataset.n_rows
    n_shards = value("shards_total", ("compression", "normal"))
    assert n_shards + value("shards_total", ("compression", "raw")) == len(dataset.shards)
    assert value("commit_latency_seconds_count") == len(dataset.shards)
    stored = sum(entry.nbytes for shard in dataset.shards for entry in shard.manifest.files)
    assert value("stage_bytes_total", ("stage", "disk")) == stored
    row_nbytes = watched.last.row_nbytes
    assert value("stage_bytes_total", ("stage", "pool")) == dataset.n_rows * row_nbytes
    assert value("stage_bytes_total", ("stage", "ring")) == dataset.n_rows * row_nbytes
    assert value("queue_depth", ("stage", "pool")) == 0
    assert value("compression_backlog_bytes") == 0


def test_occupancy_is_in_the_dataset(watched: Watched) -> None:
    rows = actds.open(watched.out).occupancy().to_pylist()
    by_stage = {stage: [r for r in rows if r["stage"] == stage] for stage in ("ring", "pool")}
    for stage, found in by_stage.items():
        assert sum(row["duration_ns"] for row in found) > 0, stage
        assert all(0 <= row["depth"] <= row["capacity"] for row in found), stage
        assert len({row["depth"] for row in found}) == len(found), stage
    # While the writer stood still the ring filled up.
    assert max(row["depth"] for row in by_stage["ring"]) > 10


def test_the_display_of_a_real_run_ends_with_its_totals(watched: Watched) -> None:
    lines = watched.shown.splitlines()
    assert lines[-1] == format_line(watched.last)
    assert f"{watched.ended['writer']['rows']:,} rows" in lines[-1]
    assert lines[-1].endswith(f"{watched.ended['census']['dropped']:,} dropped")
    assert watched.last.memory_nbytes is not None and watched.last.last_commit_age_s is not None
