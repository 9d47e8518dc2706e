"""Disks that misbehave, injected for real: slow, stalled, full, failing; under every policy.

Writer and census are the real processes. The engine is the synthetic one, and once the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import actds
from actds.errors import ActdsError
from actds.format.readouts import Readouts
from actds.format.tables import READOUTS_FULL
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.faulty_disk import FaultyDisk, unavailable, wait_until
from actds_testing.recovery import shard_records
from actds_testing.synthetic_engine import GENERATED, PROMPT_LEN, SyntheticEngine, pipeline_for
from actds_testing.tiny import make_tiny_model
from actds_validators.validate.validation import validate
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.recover import recover
from actds_writers.ipc.messages import ClientFacts
from actds_writers.sampling import POLICIES

pytestmark = pytest.mark.full

DROPPING = [name for name in POLICIES if name != "block"]
N_POSITIONS = PROMPT_LEN + GENERATED - 1
MAX_REQUESTS = 320
"""Requests that no test needs: one that serves so many is not getting where it should. The engine's
rows say whose they are in bits that are NaN from request 326 on."""
SLOW_BYTES_PER_S = 10_000
"""So slow that the engine is faster on any machine, however busy."""

Faults = Callable[[FaultyDisk], None]
EIO: dict[str, Faults] = {
    "write": lambda disk: disk.fail_write(2),
    "fsync": lambda disk: disk.fail_sync(2),
    "close": lambda disk: disk.fail_close(2),
}


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    if why := unavailable():
        pytest.skip(why)
    return FaultyDisk(tmp_path / "acts", tmp_path / "control")


class Harness:
    """One run on a disk: its pipeline, its engine, and how many requests were served."""

    def __init__(self, out: Path, pipeline: Pipeline) -> None:
        self.out, self.pipeline = out, pipeline
        self.engine = SyntheticEngine(pipeline)
        self.n_requests = 0
        self._closed = False

    def serve(self, n: int) -> None:
        for _ in range(n):
            assert self.n_requests < MAX_REQUESTS, "what was waited for does not come"
            self.engine.request(self.n_requests)
            self.n_requests += 1

    def serve_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.serve(1)

    def serve_in_step_until(self, condition: Callable[[], bool]) -> None:
        """Serve at the writer's pace up to the request that it no longer takes."""
        while not condition():
            self.serve(1)
            wait_until(lambda: condition() or self.is_drained(), "the writer")

    def is_drained(self) -> bool:
        self.pipeline.poll()
        written = self.pipeline.written
        return written is not None and written.last_step == self.engine.n_steps - 1

    def serve_gently_until(self, condition: Callable[[], bool]) -> None:
        """Serve at the writer's pace, so that nothing is lost and nothing waits."""
        while not condition():
            self.serve(1)
            self.engine.drain(self.pipeline)

    def n_shards(self) -> int:
        """Return the shards that are committed, which their records say and no manifest."""
        return len(shard_records(self.out))

    def is_held_up(self) -> bool:
        """Return whether a step waits for room in the host ring, as it may under ``block``."""
        waits = self.pipeline.link.settings.overflow == "block"
        return waits and "ring" in self.engine.stages.waiting

    def end(self) -> None:
        """End a run that went well, and check that everything agrees."""
        self.engine.drain(self.pipeline)
        self.close_engine()
        self.pipeline.send_client_facts(ClientFacts())
        self.pipeline.finish("finished")
        self.pipeline.poll()

    def close_engine(self) -> None:
        if not self._closed:
            self._closed = True
            self.engine.close()

    def end_failed(self) -> None:
        self.close_engine()
        self.pipeline.finish("failed")


@contextmanager
def harness(disk: FaultyDisk, policy: str, **settings: Any) -> Iterator[Harness]:
    with disk.injected():
        pipeline = pipeline_for(disk.folder, policy, **settings)
    with pipeline:
        run = Harness(disk.folder, pipeline)
        try:
            yield run
        finally:
            # A test that fails must not leave a writer that waits for its disk or its engine.
            disk.release()
            disk.throttle(0)
            run.close_engine()


def within_patience(work: Callable[[], None], disk: FaultyDisk) -> None:
    """Do what may never wait for the disk; a hang ends the test instead of hanging it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    hangs = thread.is_alive()
    if hangs:
        disk.release()
    assert not hangs, "the engine waits for the disk"


def agreed(out: Path, n_requests: int) -> actds.Dataset:
    """Return the sealed dataset when rows, drop log and census name the same positions."""
    seal(open_store(out))
    report = validate(out, level="deep")
    assert not report.errors, report.errors
    # A shard that failed half way leaves files that nothing names; they are no data.
    assert {finding.code for finding in report.warnings} <= {"E105", "E421"}
    dataset = actds.open(out)
    census: dict[str, set[tuple[int, int]]] = {
        "captured": set(),
        "dropped": set(),
        "aborted": set(),
    }
    for span in dataset.spans().to_pylist():
        places = positions(span)
        assert not any(places & others for others in census.values())
        census[span["disposition"]] |= places
    tokens = dataset.tokens().to_pylist()
    rows = {(row["request"], row["position"]) for row in tokens}
    drops = dataset.drops().to_pylist()
    lost = [place for drop in drops for place in positions(drop)]
    assert len(rows) == len(tokens) == dataset.n_rows
    assert rows == census["captured"]
    assert len(lost) == len(set(lost))
    assert set(lost) == census["dropped"]
    computed = {(r, p) for r in range(n_requests) for p in range(N_POSITIONS)}
    assert set.union(*census.values()) == computed
    # And step by step: a step is stored or dropped, never half.
    assert {row["step"] for row in tokens}.isdisjoint(drop["step"] for drop in drops)
    return dataset


def positions(interval: dict[str, int]) -> set[tuple[int, int]]:
    return {(interval["request"], p) for p in range(interval["start"], interval["stop"])}


def assert_policy_kept(run: Harness, dataset: actds.Dataset, policy: str) -> None:
    """Assert that steps were lost under the drop policies only, and nothing waited under them.

    That the engine may wait for a thread of its own process is no matter of the disk.
    """
    drops = dataset.drops().to_pylist()
    assert {drop["step"] for drop in drops} == set(run.engine.drops)
    assert {drop["policy"] for drop in drops} == ({policy} - {"block"})
    if policy != "block":
        assert "staging" not in stages_that_stalled(dataset)


def stages_that_stalled(dataset: actds.Dataset) -> set[str]:
    return {stall["stage"] for stall in dataset.stalls().to_pylist()}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_disk_slows_the_engine_or_costs_logged_steps(disk: FaultyDisk, policy: str) -> None:
    with harness(disk, policy) as run:
        disk.throttle(SLOW_BYTES_PER_S)
        run.serve_until(lambda: run.is_held_up() or len(run.engine.drops) >= 60)
        disk.throttle(0)
        run.serve(5)
        run.end()
        dataset = agreed(disk.folder, run.n_requests)
        assert_policy_kept(run, dataset, policy)
        if policy == "block":
            assert dataset.n_rows == run.n_requests * N_POSITIONS
            assert "ring" in stages_that_stalled(dataset)


@pytest.mark.parametrize("policy", DROPPING)
def test_a_stalled_disk_never_holds_up_an_engine_that_may_drop(
    disk: FaultyDisk, policy: str
) -> None:
    with harness(disk, policy) as run:
        run.serve_gently_until(lambda: run.n_shards() >= 2)
        disk.stall()
        # Not faster than the writer, or a busy machine is what loses the steps.
        run.serve_in_step_until(lambda: disk.read("n_waiting") > 0)
        within_patience(lambda: run.serve(200), disk)
        assert disk.read("stalled") and disk.read("n_waiting") > 0
        lost_in_stall = len(run.engine.drops)
        disk.release()
        run.engine.drain(run.pipeline)
        run.serve(1)
        run.end()
        dataset = agreed(disk.folder, run.n_requests)
        assert_policy_kept(run, dataset, policy)
        assert lost_in_stall > 0
        # After the stall the run goes on: its last request is stored whole.
        kept = dataset.tokens()["request"].to_pylist()
        assert kept.count(run.n_requests - 1) == N_POSITIONS


@pytest.mark.parametrize("policy", DROPPING)
def test_a_stalled_disk_never_holds_up_a_server_that_keeps_readouts(
    disk: FaultyDisk, policy: str
) -> None:
    # So wide that a part of them is full, and then the lane, after some hundred requests.
    wide = Readouts(2000, 1)
    with harness(disk, policy, readouts=wide, lane_nbytes=8 << 20, live=True) as run:
        run.serve_gently_until(lambda: run.n_shards() >= 2)
        disk.stall()
        run.serve_in_step_until(lambda: disk.read("n_waiting") > 0)
        lane, reasons = run.engine.stages.lane, run.engine.drop_reasons
        assert lane is not None
        while not reasons:  # as long as the writer takes readouts, rows alone are lost
            run.serve(1)
            wait_until(lambda: not lane.depth, "the writer to take readouts")
        within_patience(lambda: run.serve_until(lambda: READOUTS_FULL in reasons), disk)
        within_patience(lambda: run.serve(20), disk)
        assert disk.read("stalled") and disk.read("n_waiting") > 0
        disk.release()
        run.engine.drain(run.pipeline)
        run.serve(1)
        run.end()
    dataset = agreed(disk.folder, run.n_requests)
    assert_policy_kept(run, dataset, policy)
    assert "readouts" not in stages_that_stalled(dataset)
    unread, read = set[tuple[int, int]](), set[tuple[int, int]]()
    for drop in dataset.drops().to_pylist():
        (unread if drop["drop_reason"] == READOUTS_FULL else read).update(positions(drop))
    rows = {(row["request"], row["position"]) for row in dataset.tokens().to_pylist()}
    table = dataset.readouts().select(["request", "position"])
    lines = set(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))
    assert unread and read and lines == rows | read
    # After the stall the run goes on: its last request is stored whole.
    assert {(run.n_requests - 1, p) for p in range(N_POSITIONS)} <= rows


def test_a_stalled_disk_holds_up_an_engine_that_must_not_lose(disk: FaultyDisk) -> None:
    with harness(disk, "block") as run:
        run.serve_gently_until(lambda: run.n_shards() >= 2)
        disk.stall()
        # More than every stage together holds, so that it cannot be served while the disk stands.
        thread = threading.Thread(target=run.serve, args=[250], daemon=True)
        thread.start()
        wait_until(lambda: run.engine.stages.waiting == {"ring", "staging"}, "full rings")
        assert disk.read("n_waiting") > 0
        assert thread.is_alive()
        disk.release()
        thread.join()
        run.serve(2)
        run.end()
        dataset = agreed(disk.folder, run.n_requests)
        assert_policy_kept(run, dataset, "block")
        assert dataset.n_rows == run.n_requests * N_POSITIONS
        assert {"ring", "staging"} <= stages_that_stalled(dataset)


def failed(run: Harness, code: str, words: str, place: str) -> None:
    """Serve until the run fails; assert that the error says what and where."""
    with pytest.raises(ActdsError, match=words) as caught:
        run.serve_gently_until(lambda: False)
    assert caught.value.code == code
    assert caught.value.place.startswith(place)


def lose_some(run: Harness, disk: FaultyDisk, policy: str) -> None:
    """Under a drop policy, go into the failure with losses behind."""
    run.serve_gently_until(lambda: run.n_shards() >= 2)
    if policy != "block":
        disk.stall()
        run.serve_until(lambda: len(run.engine.drops) > 0)
        disk.release()
        run.engine.drain(run.pipeline)


def assert_ends_accounted(run: Harness, disk: FaultyDisk, policy: str) -> None:
    n_committed, n_manifests = run.n_shards(), len(list(run.out.glob("shards/*/shard.json")))
    run.serve(20)  # the engine is not held up by a writer that has failed
    run.end_failed()
    dataset = agreed(disk.folder, run.n_requests)
    spans = dataset.spans().to_pylist()
    assert 2 <= n_committed <= len(dataset.shards) <= n_manifests
    assert {s["reason"] for s in spans if s["disposition"] == "aborted"} == {"writer_ended"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_disk_ends_the_run_with_what_was_committed(disk: FaultyDisk, policy: str) -> None:
    with harness(disk, policy) as run:
        lose_some(run, disk, policy)
        disk.fill(30_000)
        failed(run, "E503", "No space left on device", "")
        disk.make_room()  # as the census has by what it held back from the beginning
        assert_ends_accounted(run, disk, policy)


@pytest.mark.parametrize(
    ("policy", "fault", "place"),
    [
        ("block", "write", "shards/"),
        ("drop_oldest", "fsync", "shards/"),
        ("drop_newest", "close", "shards/"),
        ("block", "fsync", "journal/"),
    ],
)
def test_a_failing_disk_ends_the_run_with_what_was_committed(
    disk: FaultyDisk, policy: str, fault: str, place: str
) -> None:
    with harness(disk, policy) as run:
        lose_some(run, disk, policy)
        disk.only(f"/{place}")
        EIO[fault](disk)
        failed(run, "E503", "Input/output error", place)
        assert disk.read("n_failed") == 1
        assert_ends_accounted(run, disk, policy)


@pytest.mark.parametrize("place", ["losses/", "ledger/w-", "census/", "ledger/c-"])
def test_an_error_in_the_last_writes_reaches_the_command(disk: FaultyDisk, place: str) -> None:
    with harness(disk, "drop_newest") as run:
        lose_some(run, disk, "drop_newest")
        disk.only(f"/{place}")
        disk.fail_write(1)
        run.close_engine()
        run.pipeline.send_client_facts(ClientFacts())
        run.pipeline.finish("finished")
        with pytest.raises(ActdsError, match=r"E503.*Input/output error") as caught:
            run.pipeline.poll()
        assert disk.read("n_failed") == 1
        assert caught.value.place.startswith(place)
        if place in ("losses/", "ledger/w-"):  # the census lived to say what became of it
            dataset = agreed(disk.folder, run.n_requests)
            lost = [s for s in dataset.spans().to_pylist() if s["disposition"] == "aborted"]
            assert {span["reason"] for span in lost} == {"writer_ended"}
        n_requests = run.n_requests
    if place in ("census/", "ledger/c-"):  # the journal has what the census could not commit
        recover(disk.folder)
        agreed(disk.folder, n_requests)


@pytest.mark.parametrize("place", ["", "/ledger/c-"])
def test_a_disk_that_stalls_from_the_beginning_holds_up_no_engine_that_may_drop(
    disk: FaultyDisk, place: str
) -> None:
    disk.only(place)
    disk.stall()
    with harness(disk, "drop_newest") as run:
        within_patience(lambda: run.serve(300), disk)
        assert disk.read("stalled")
        disk.release()
        run.engine.drain(run.pipeline)
        run.end()
        dataset = agreed(disk.folder, run.n_requests)
        assert_policy_kept(run, dataset, "drop_newest")


@pytest.mark.engine
def test_a_slow_disk_costs_a_real_engine_logged_steps_only(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    # Wide rows, so that a few steps fill the rings however slow the machine is.
    model = make_tiny_model(tmp_path / "wide", hidden=512, dtype="float32", tokenizer=True)
    prompts = h.write_prompts(
        tmp_path / "p.jsonl", [{"id": f"s{i}", "prompt": f"number {i} " * 9} for i in range(60)]
    )
    disk.throttle(1_000_000)
    dataset = h.harvest_alone(
        disk.folder, model, prompts, "--hooks", "resid_post:all", *h.TINY, *h.EAGER,
        "--engine-arg", "max_model_len=512", "--engine-arg", "max_num_batched_tokens=128",
        "--rows-per-shard", "64", "--max-tokens", "48", "--overflow", "drop_newest",
        "--ring-mib", "1", "--staging-mib", "1",
        **disk.environment(),
    )  # fmt: skip
    drops = dataset.drops().to_pylist()
    lost = sum(drop["stop"] - drop["start"] for drop in drops)
    stored = dataset.n_rows
    owed = sum(r["prompt_len"] + r["generated_len"] - 1 for r in dataset.requests().to_pylist())
    referred = [s for s in dataset.spans().to_pylist() if s["disposition"] == "cache_ref"]
    assert lost > 0
    assert stored + lost + sum(s["stop"] - s["start"] for s in referred) == owed
    assert {drop["policy"] for drop in drops} == {"drop_newest"}
    assert "staging" not in stages_that_stalled(dataset)
