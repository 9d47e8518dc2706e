"""Queue occupancy: time at each depth, counted exactly, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.format import tables
from actds_writers.ipc.messages import Fact, Stall, StepRows, WorkerHello
from actds_writers.monitor.metrics import (
    EXACT_DEPTHS,
    LATENCY_BUCKETS_S,
    CommitMeter,
    Meters,
    Occupancy,
    depth_bin,
    occupancy_table,
)


def test_time_is_counted_at_the_depth_that_stood() -> None:
    ring = Occupancy("ring", 8)
    for depth, t_ns in [(0, 100), (3, 110), (3, 150), (1, 160), (3, 165), (0, 200)]:
        ring.observe(depth, t_ns)
    assert ring.rows() == [(0, 10, 2), (1, 5, 1), (3, 85, 2)]
    assert ring.depth == 0


def test_a_clock_that_goes_back_takes_no_time_away() -> None:
    ring = Occupancy("ring", 8)
    for depth, t_ns in [(1, 100), (2, 90), (1, 130)]:
        ring.observe(depth, t_ns)
    assert ring.rows() == [(1, 0, 2), (2, 30, 1)]


def test_table_has_the_columns_of_the_spec_and_no_row_for_an_unseen_queue() -> None:
    ring, pool = Occupancy("ring", 8), Occupancy("pool", 1)
    ring.observe(2, 5)
    ring.observe(0, 9)
    table = occupancy_table([ring, pool])
    assert table.schema == tables.bare_schema("occupancy")
    assert table.to_pylist() == [
        {"stage": "ring", "depth": 0, "capacity": 8, "duration_ns": 0, "n_visits": 1},
        {"stage": "ring", "depth": 2, "capacity": 8, "duration_ns": 4, "n_visits": 1},
    ]
    assert occupancy_table([pool]).num_rows == 0
    path = tables.to_parquet("occupancy", table)
    assert tables.from_parquet("occupancy", path, "test").equals(table)


def test_the_ring_is_less_deep_once_the_writer_has_taken_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = (Fact("capture.staging_nbytes", 1 << 10, "observed"),)
    meters = Meters(WorkerHello((), facts, "ring", 1 << 12, 4), 100, Occupancy("pool", 2))
    none = np.empty(0, np.int64)
    stall = Stall("ring", 5, 1_500, 3, 0)
    now = 0
    monkeypatch.setattr("actds_writers.monitor.metrics.time.time_ns", lambda: now)
    for step, (t_ns, depth, taken_ns) in enumerate([(10, 1, 12), (20, 3, 25), (22, 2, 30)]):
        message = StepRows(
            step, 0, 100, none, none, none, none, none, (), (stall,), None, t_ns, 1, depth
        )
        meters.step(message)
        now = taken_ns
        meters.taken(4, 400)
    staging, ring, pool = meters.states()
    # 1 from 10 to 12, 0 to 20, 3 to 25, 2 to 30: no time for what was said about an earlier time.
    assert meters.queues["ring"].rows() == [(0, 8, 1), (1, 2, 2), (2, 5, 1), (3, 5, 1)]
    assert (staging.depth, staging.capacity) == (1, 8)  # slices are multiples of 64 bytes
    assert (ring.depth, ring.capacity, ring.capacity_nbytes) == (1, 32, 1 << 12)
    assert (ring.n_stalls, ring.stall_ns, ring.entry_nbytes) == (3, 4_500, 400.0)
    assert (pool.depth, pool.n_stalls) == (None, 0)
    assert (meters.n_rows, meters.ring_nbytes) == (12, 1_200)


def test_commits_are_counted_in_their_latency_buckets() -> None:
    meter = CommitMeter()
    assert meter.totals.p99_s is None and meter.totals.last_ns is None
    for seconds in (0.005, 0.3, 0.3, 100.0):
        meter.committed(10, 1_000, 700, seconds, raw=seconds > 1)
    totals = meter.totals
    assert (totals.n_shards, totals.n_raw_shards, totals.n_rows) == (4, 1, 40)
    assert (totals.nbytes_in, totals.nbytes_out) == (4_000, 2_800)
    assert totals.seconds == pytest.approx(100.605) and totals.p50_s == pytest.approx(0.3)
    counts = dict(zip(LATENCY_BUCKETS_S, totals.buckets, strict=True))
    assert (counts[0.01], counts[0.25], counts[0.5], counts[60.0]) == (1, 1, 3, 3)


@pytest.mark.parametrize("depth", [0, 1, EXACT_DEPTHS - 1, EXACT_DEPTHS, 255, 256, 1000, 10**6])
def test_a_bin_is_exact_when_small_and_close_when_large(depth: int) -> None:
    found = depth_bin(depth)
    assert found <= depth < found + max(1, depth / (EXACT_DEPTHS / 2))
    assert depth_bin(found) == found
    assert found == depth or depth >= EXACT_DEPTHS


def test_a_deep_queue_has_few_bins() -> None:
    assert len({depth_bin(depth) for depth in range(1_000_000)}) < 1000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1000)), min_size=1))
def test_every_nanosecond_is_counted_once(seen: list[tuple[int, int]]) -> None:
    ring, t_ns, n_changes = Occupancy("ring", 300), 0, 0
    for depth, passed in seen:
        t_ns += passed
        n_changes += depth != ring.depth
        ring.observe(depth, t_ns)
    assert sum(ns for _, ns, _ in ring.rows()) == t_ns - seen[0][1]
    assert sum(visits for *_, visits in ring.rows()) == n_changes
