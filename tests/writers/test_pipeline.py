"""Writer and census as real processes, fed by a synthetic engine: conservation and sudden ends.

The engine here is a stand-in that speaks the same messages; the same pipeline behind the real
engine is tested in ``test_engine_*``.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.publish.sealing import seal
from actds.store import open_store
from actds.store.local import lock_dataset
from actds_testing.faulty_disk import wait_until
from actds_testing.recovery import shard_records
from actds_testing.synthetic_engine import (
    D_MODEL,
    GENERATED,
    PROMPT_LEN,
    SyntheticEngine,
    pipeline_for,
    writer_stopped,
)
from actds_validators.validate.validation import validate
from actds_writers.ipc.messages import ClientFacts, HookSpec, LeftOut, RequestArrived

pytestmark = pytest.mark.standard


def clean(path: Path) -> actds.Dataset:
    report = validate(path, level="deep")
    assert not report.errors, report.errors
    # A killed writer leaves files of a shard that it never committed; they are no data.
    assert {finding.code for finding in report.warnings} <= {"E105", "E421"}
    return actds.open(path)


def continue_when_all_wait(writer: int, engine: SyntheticEngine) -> None:
    try:
        wait_until(lambda: engine.stages.waiting == {"ring", "staging"}, "an engine that waits")
    finally:
        os.kill(writer, signal.SIGCONT)


def test_every_row_arrives_under_its_own_name(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = SyntheticEngine(pipeline)
        for number in range(12):
            engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        ended = pipeline.finish("finished")
    seal(open_store(out))
    dataset = clean(out)
    n_positions = 12 * (PROMPT_LEN + GENERATED - 1)
    assert ended["census"]["captured"] == ended["writer"]["rows"] == dataset.n_rows == n_positions
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        label = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 1
        for index, hook in enumerate(("resid_post.1", "resid_post.2")):
            rows = shard.array(hook).read_all()
            assert np.array_equal(rows, np.repeat((label + index)[:, None], D_MODEL, axis=1))


def test_a_killed_writer_costs_only_what_was_not_committed(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = SyntheticEngine(pipeline)
        number = 0
        # The ledger says what is committed: a manifest may stand there without its record.
        while len(shard_records(out)) < 3:
            engine.request(number)
            number += 1
        os.kill(pipeline.processes["writer"].pid, signal.SIGKILL)
        engine.close()
        with pytest.raises(ActdsError, match="E502"):
            pipeline.finish("failed")
            pipeline.poll()
    seal(open_store(out))
    dataset = clean(out)
    aborted = [s for s in dataset.spans().to_pylist() if s["disposition"] == "aborted"]
    lost = sum(s["stop"] - s["start"] for s in aborted)
    assert dataset.n_rows >= 3 * 40
    assert dataset.n_rows + lost == number * (PROMPT_LEN + GENERATED - 1)


def test_an_engine_that_dies_leaves_an_accounted_run(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.scheduler.send(RequestArrived(1, "p1-x", "p1", PROMPT_LEN, 1, None, None))
        engine.step(1, 0, 7)
        engine.drain(pipeline)
        engine.close()
        pipeline.finish("failed")
    seal(open_store(out))
    reasons = clean(out).requests()["finish_reason"].to_pylist()
    assert reasons == ["length", "unfinished"]


def test_the_processes_end_the_run_when_the_command_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    pipeline = pipeline_for(out)
    engine = SyntheticEngine(pipeline)
    engine.request(0)
    engine.drain(pipeline)
    engine.close()
    pipeline.__exit__()  # leaves without a word, as a killed command does
    seal(open_store(out))
    assert clean(out).n_rows == PROMPT_LEN + GENERATED - 1


def test_a_second_run_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out), pytest.raises(ActdsError, match="E010"):
        lock_dataset(out)


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_stalled_writer_costs_whole_steps_and_each_is_logged(policy: str, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out, policy) as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline):
            for number in range(1, 120):
                engine.request(number)  # never waits: that is the policy's promise
                engine.settle()  # a model would compute: the transfer beside it gets its turn
        engine.drain(pipeline)
        engine.request(120)
        engine.drain(pipeline)
        engine.close()
        ended = pipeline.finish("finished")
    seal(open_store(out))
    dataset = clean(out)
    drops = dataset.drops().to_pylist()
    lost = sum(drop["stop"] - drop["start"] for drop in drops)
    assert engine.stalls == 0
    assert ended["census"]["dropped"] == ended["writer"]["dropped_tokens"] == lost > 0
    assert dataset.n_rows + lost == 121 * (PROMPT_LEN + GENERATED - 1)
    assert {drop["policy"] for drop in drops} == {policy}
    assert {drop["step"] for drop in drops} == set(engine.drops)
    # The policy decides which end of the stall is missing.
    kept = set(dataset.tokens()["step"].to_pylist())
    stalled = range(GENERATED, 120 * GENERATED)
    early, late = stalled[: len(stalled) // 8], stalled[-len(stalled) // 8 :]
    n_early, n_late = (len(kept.intersection(steps)) for steps in (early, late))
    assert (n_early > n_late) == (policy == "drop_newest")


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
def test_hooks_of_other_widths_and_types_go_the_same_way(policy: str, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    hooks = tuple(
        HookSpec(f"resid_post.{n}", "resid_post", n, d_model, dtype)
        for n, (d_model, dtype) in enumerate(
            [(33, "bfloat16"), (7, "float32"), (33, "bfloat16"), (1, "float16")]
        )
    )
    decoded = LeftOut(prefill="sampling:phase")
    with pipeline_for(out, policy, hooks=hooks) as pipeline:
        engine = SyntheticEngine(pipeline, hooks=hooks)
        writer = pipeline.processes["writer"].pid
        for number in range(60):
            engine.request(number, decoded if number % 3 == 1 else LeftOut())
            if number == 20 and policy != "block":
                os.kill(writer, signal.SIGSTOP)
        os.kill(writer, signal.SIGCONT)
        engine.drain(pipeline)
        engine.close()
        ended = pipeline.finish("finished")
    assert (ended["census"]["dropped"] > 0) == (policy != "block")
    seal(open_store(out))
    dataset = clean(out)
    assert [(h.d_model, h.dtype) for h in dataset.hooks.values()] == [
        (hook.d_model, hook.dtype) for hook in hooks
    ]
    for i, hook in enumerate(hooks):
        for shard in dataset.shards:
            tokens = shard.tokens(["request", "position"])
            whose = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 1 + i
            with shard.array(hook.name) as reader:
                rows = reader.read_all()
            assert rows.shape == (len(whose), hook.d_model)
            assert (rows == whose[:, None]).all()


def test_drops_that_the_writer_never_logged_count_as_aborted(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out, "drop_newest") as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline):
            for number in range(1, 120):
                engine.request(number)
            engine.close()  # dies with steps and drops in its queue
        ended = pipeline.finish("failed")
    seal(open_store(out))
    dataset = clean(out)
    assert len(engine.drops) > 0
    assert ended["census"]["dropped"] == ended["writer"]["dropped_tokens"]
    assert ended["census"]["aborted"] > 0
    assert dataset.n_rows + ended["census"]["dropped"] + ended["census"]["aborted"] == 120 * (
        PROMPT_LEN + GENERATED - 1
    )


def test_an_engine_that_waits_for_a_writer_learns_of_its_death(tmp_path: Path) -> None:
    with pipeline_for(tmp_path / "acts") as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        writer = pipeline.processes["writer"].pid
        os.kill(writer, signal.SIGSTOP)
        kill = threading.Timer(0.5, os.kill, (writer, signal.SIGKILL))
        kill.start()
        with pytest.raises(ActdsError, match="E502"):
            for number in range(1, 120):
                engine.request(number)
        kill.join()
        engine.close()


def test_blocking_makes_the_engine_wait_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        writer = pipeline.processes["writer"].pid
        os.kill(writer, signal.SIGSTOP)
        # The ring fills, then what waits before it; the engine waits last.
        wake = threading.Thread(target=continue_when_all_wait, args=(writer, engine))
        wake.start()
        for number in range(1, 120):
            engine.request(number)
        engine.drain(pipeline)
        engine.close()
        ended = pipeline.finish("finished")
        wake.join()
    seal(open_store(out))
    dataset = clean(out)
    assert ended["census"]["dropped"] == 0
    assert dataset.n_rows == 120 * (PROMPT_LEN + GENERATED - 1)
    stalls = dataset.stalls().to_pylist()
    assert engine.stalls > 0
    assert {"ring", "staging"} <= {stall["stage"] for stall in stalls}
