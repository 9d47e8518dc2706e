"""A census of a long run stays small, and says the same whatever of it is packed."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actds_writers.census import log as log_module
from actds_writers.census.census import Census, CensusTables
from actds_writers.census.log import StepLog, pack, unpack
from actds_writers.ipc.messages import (
    ClientFacts,
    LeftOut,
    PromptFact,
    Reference,
    RequestArrived,
    RequestFinished,
    StepExecuted,
    StepLost,
    StepScheduled,
)
from actds_writers.sizing import census_nbytes

PROMPT_LEN, N_BLOCKS = 20, 2


class Traffic:
    """A stand-in for scheduler and worker: requests come, decode one token a step, and go."""

    def __init__(self, census: Census, *, batch: int, life: int, seed: int = 0) -> None:
        self.census, self.batch, self.life = census, batch, life
        self.rng = np.random.default_rng(seed)
        self.live: list[list[int]] = []  # number, position, end
        self.n_requests = self.n_steps = self.n_tokens = 0

    def arrive(self, left_out: LeftOut) -> None:
        number, rng = self.n_requests, self.rng
        digests = tuple(rng.bytes(32) for _ in range(N_BLOCKS))
        self.census.observe(
            RequestArrived(
                number, f"cmpl-{rng.bytes(8).hex()}-0-{number:08x}", f"cmpl-{number}-0",
                PROMPT_LEN, 10**18 + int(rng.integers(10**15)), '{"max_tokens":24}', digests,
                left_out,
            )
        )  # fmt: skip
        self.live.append([number, 0, PROMPT_LEN + int(rng.integers(1, 2 * self.life))])
        self.n_requests += 1

    def step(self, *, odd: bool = False) -> None:
        """Make one step; ``odd`` for one with losses, references, rules and preemptions."""
        rng, told = self.rng, self.census
        while len(self.live) < self.batch:
            rule = LeftOut(prefill="sampling:phase") if odd and rng.random() < 0.3 else LeftOut()
            self.arrive(rule)
        references, preempted = [], []
        for one in self.live:
            if odd and one[1] == 0 and one[0] and rng.random() < 0.5:
                references.append(Reference(one[0], 0, 8, int(rng.integers(one[0]))))
                one[1] = 8
            elif odd and one[1] > PROMPT_LEN and rng.random() < 0.02:
                preempted.append(one[0])
                one[1] = int(rng.integers(one[1]))
        who, start = (np.array([one[i] for one in self.live], np.int64) for i in (0, 1))
        n = np.maximum(PROMPT_LEN - start, 1)
        scheduled = StepScheduled(
            self.n_steps, 10**18 + 30_000_000 * self.n_steps + int(rng.integers(10**6)), who, start,
            n, tuple(references), int(rng.integers(5)), len(who), tuple(preempted), rng.random(),
        )  # fmt: skip
        executed = StepExecuted(
            self.n_steps, int(rng.integers(10**7, 2 * 10**7)),
            "eager" if rng.random() < 0.9 else "compiled", int(n.sum()) + 3,
            int(rng.integers(3)), int(rng.integers(9)), None if odd and rng.random() < 0.5 else 1,
            float(rng.random()), int(rng.integers(10**7)),
        )  # fmt: skip
        pair = [scheduled, executed]
        for message in pair if rng.random() < 0.5 else reversed(pair):
            told.observe(message)
        if odd and rng.random() < 0.2:
            told.observe(StepLost(self.n_steps, ("queue_full", "dma_backpressure")[len(who) % 2]))
        for one, count in zip(self.live, n.tolist(), strict=True):
            one[1] += count
        for one in [one for one in self.live if one[1] >= one[2]]:
            told.observe(
                RequestFinished(one[0], self.n_steps, "length", one[2] - PROMPT_LEN + 1, "0" * 64)
            )
            self.live.remove(one)
        self.n_steps += 1
        self.n_tokens += int(n.sum())


def small_blocks(monkeypatch: pytest.MonkeyPatch, pieces: int, steps: int, requests: int) -> None:
    monkeypatch.setattr(log_module, "BLOCK_PIECES", pieces)
    monkeypatch.setattr(log_module, "BLOCK_STEPS", steps)
    monkeypatch.setattr(log_module, "BATCH_REQUESTS", requests)


def tables_of(seed: int) -> CensusTables:
    census = Census()
    traffic = Traffic(census, batch=5, life=12, seed=seed)
    for _ in range(200):
        traffic.step(odd=True)
    for _ in range(2):
        traffic.arrive(LeftOut())  # one that is aborted in the queue, one that is there still
    census.observe(RequestFinished(traffic.n_requests - 2, 200, "abort", 0, "0" * 64))
    client = ClientFacts(
        (PromptFact("cmpl-3-0", "mine", "file", 7), PromptFact("x", "x", "file", 8, "E006 long")),
        {"cmpl-4-0": 8},
    )
    logged = frozenset(step for step in range(200) if step % 3)
    return census.tables({("prefill", None): 190, ("decode", None): 180}, client, logged)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_packing_changes_no_table(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 10**9, 10**4, 10**9)
    whole = tables_of(seed)
    small_blocks(monkeypatch, 7, 4, 3)
    packed = tables_of(seed)
    assert packed.totals == whole.totals
    for name in ("requests", "steps", "spans"):
        assert getattr(packed, name).equals(getattr(whole, name)), name
    found = set(whole.spans["disposition"].to_pylist())
    assert found == {"captured", "cache_ref", "dropped", "aborted", "filtered"}
    assert {"engine_ended", "request_aborted"} < set(whole.spans["reason"].to_pylist())
    assert max(whole.requests["n_preemptions"].to_pylist()) > 0


@pytest.mark.parametrize(("batch", "life"), [(1, 60), (16, 20), (16, 1_000)])
def test_memory_grows_as_stated_while_a_run_goes_on(
    batch: int, life: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1024, 128, 16)
    traffic = Traffic(Census(), batch=batch, life=life)
    measured: list[tuple[int, int, int, int]] = []
    tracemalloc.start()
    try:
        for _ in range(3):
            for _ in range(768):
                traffic.step()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            measured.append((held, traffic.n_requests, traffic.n_steps, traffic.n_tokens))
    finally:
        tracemalloc.stop()
    first, *_, last = measured
    held, n_requests, n_steps, n_tokens = (b - a for a, b in zip(first, last, strict=True))
    stated = census_nbytes(n_requests, n_steps, n_tokens)
    # Pieces, steps and requests that are not packed yet are a constant, give or take this.
    assert held < stated + 100_000
    assert stated < 150 * n_steps + 400 * n_requests + 3 * n_tokens


# A long run's memory: long for a check before each commit.
pytestmark = pytest.mark.standard

MATRICES = st.integers(1, 3).flatmap(
    lambda n_columns: st.integers(0, 20).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n),
            min_size=n_columns,
            max_size=n_columns,
        )
    )
)


@given(MATRICES)
def test_packed_columns_come_back(values: list[list[int]]) -> None:
    columns = np.array(values, np.int64).reshape(len(values), -1)
    assert np.array_equal(unpack(pack(columns), len(values)), columns)


def test_a_packed_block_takes_no_more_memory_than_its_bytes() -> None:
    columns = np.tile(np.arange(50_000), (7, 1))
    tracemalloc.start()
    try:
        kept = pack(columns)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < len(kept) + 5_000 < 20_000


def step_values(log: StepLog, name: str) -> list[Any]:
    return log.table("t_ns")[1][name].to_pylist()


def test_a_step_is_known_late_and_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "BLOCK_STEPS", 2)
    log = StepLog()
    for step in (0, 1, 5, 9, 4, 20):
        log.put(step, {"t_ns": step * 10, "kv_usage": step / 8, "kernel_mode": "eager"})
    log.put(0, {"duration_ns": 7, "kernel_mode": "compiled", "kv_usage": None})
    log.put(3, {"duration_ns": 8})  # the scheduler never told of it
    assert log.table("t_ns")[0].tolist() == [0, 1, 4, 5, 9, 20]
    assert step_values(log, "t_ns") == [0, 10, 40, 50, 90, 200]
    assert step_values(log, "duration_ns") == [7, None, None, None, None, None]
    assert step_values(log, "kv_usage") == [None, 0.125, 0.5, 0.625, 1.125, 2.5]
    assert step_values(log, "kernel_mode") == ["compiled", *["eager"] * 5]
    assert (log.get(9, "t_ns"), log.get(3, "t_ns"), log.get(99, "t_ns")) == (90, None, None)
