"""Pipeline stages: their steps become one, or the run stops."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.format.readouts import Readouts
from actds.format.tables import READOUTS_FULL
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.synthetic_engine import (
    GENERATED,
    HOOKS,
    PROMPT_LEN,
    StagedEngine,
    pipeline_for,
    writer_stopped,
)
from actds_validators.validate.validation import validate
from actds_writers.capture.transfer import Lane
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import RingSpace
from actds_writers.ipc.messages import (
    ClientFacts,
    Fact,
    RequestArrived,
    StepDropped,
    StepRows,
    StepsDropped,
    WorkerHello,
)
from actds_writers.shards import StageJoin, joined_facts

PLACES = [(hook.kind, hook.layer) for hook in HOOKS]
N_POSITIONS = PROMPT_LEN + GENERATED - 1


def hello(stage: int, *facts: Fact) -> WorkerHello:
    return WorkerHello((replace(HOOKS[stage], stage=stage),), facts, f"ring-{stage}", 64, 4)


def rows(step: int, offset: int = 0, **changes: Any) -> StepRows:
    one = np.array([7], np.int64)
    return replace(
        StepRows(step, offset, 8, one, one * 0 + 2, one, np.arange(2), np.arange(2) + 50, ()),
        **changes,
    )


def lost(*steps: StepRows, reason: str = "queue_full") -> StepsDropped:
    empty = np.empty(0, np.int64)
    return StepsDropped(
        tuple(
            StepDropped(
                replace(s, offset=0, nbytes=0, token_ids=empty), reason, "drop_newest", 1, 1, 1
            )
            for s in steps
        )
    )


def two_stages() -> StageJoin:
    join = StageJoin(PLACES)
    assert join.meet(hello(1)) is None
    whole = join.meet(hello(0))
    assert whole is not None and [h.name for h in whole.hooks] == [h.name for h in HOOKS]
    return join


def test_one_worker_with_every_hook_is_the_whole_engine() -> None:
    join = StageJoin(PLACES)
    alone = WorkerHello(HOOKS, (), "ring-0", 64, 4)
    assert join.meet(alone) is alone
    join.add(0, rows(0, 128))
    (step,) = join.steps()
    assert isinstance(step.step, StepRows) and step.step.parts == ()
    assert dict(step.places) == {0: 128}


def test_a_step_is_joined_when_every_stage_has_sent_it() -> None:
    join = two_stages()
    join.add(0, rows(3, 64, depth_stage2=2))
    assert list(join.steps()) == []
    join.add(1, rows(3, 192, depth_stage2=5))
    (joined,) = join.steps()
    assert isinstance(joined.step, StepRows)
    assert [part.offset for part in joined.step.parts] == [64, 192]
    assert (joined.step.nbytes, joined.step.depth_stage2) == (16, 5)
    assert dict(joined.places) == {0: 64, 1: 192}
    assert join.late() is None


def test_a_step_that_one_stage_dropped_is_dropped_for_all() -> None:
    join = two_stages()
    join.add(0, rows(0, 64))
    join.add(0, lost(rows(1), reason="dma_backpressure"))
    join.add(1, lost(rows(0), rows(1)))
    first, second = join.steps()
    assert isinstance(first.step, StepDropped) and first.step.reason == "queue_full"
    # One message told of both; its acknowledgement comes with the second.
    assert dict(first.places) == {0: 64} and dict(second.places) == {0: None, 1: None}
    assert isinstance(second.step, StepDropped) and second.step.reason == "dma_backpressure"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"positions": np.arange(2) + 1}, "positions"),
        ({"token_ids": np.arange(2) + 51}, "token_ids"),
        ({"requests": np.array([8], np.int64)}, "requests"),
        ({"n_rows": np.array([1], np.int64)}, "n_rows"),
        ({"kept": np.array([True, False])}, "kept"),
        ({"finished": (3,)}, "finished"),
        ({"step": 4}, "step"),
    ],
)
def test_stages_that_disagree_stop_the_run(changes: dict[str, Any], word: str) -> None:
    join = two_stages()
    join.add(0, rows(3))
    join.add(1, replace(rows(3), **changes))
    with pytest.raises(ActdsError, match=f"E501 step 3: other .*{word}.* in stage 1"):
        list(join.steps())
    assert dict(join.abandon()) == {0: 0, 1: 0}  # nobody waits for an acknowledgement


def test_a_second_worker_of_a_stage_stops_the_run() -> None:
    join = two_stages()
    with pytest.raises(ActdsError, match=r"E501 stage 1: .*resid_post.2"):
        join.meet(hello(1))


def test_who_is_late_is_named() -> None:
    join = StageJoin(PLACES)
    assert join.late() is None
    join.meet(hello(0))
    late = join.late()
    assert late is not None and late[0] == -1 and "E501 start: no worker" in str(late[2])
    join.add(0, rows(5))
    late = join.late()
    assert late is not None and late[:2] == (5, set())
    assert "no worker with resid_post.2" in str(late[2])
    join.meet(hello(1))
    late = join.late()
    assert late is not None and late[:2] == (5, {1})
    assert "rows of stage 0; none of stage 1" in str(late[2])


def test_facts_of_stages_are_sums_agreement_or_unknown() -> None:
    def check(against: str, hook: str, distance: str, bound: str = "0.001") -> Fact:
        value = {"against": against, "bound": bound, "hooks": {hook: distance}, "rows": 41,
                 "eager": distance}  # fmt: skip
        if against != "transformers":
            value["reason"] = "dummy"
        return Fact("capture.check", json.dumps(value), "observed")

    def of(stage: int) -> list[Fact]:
        return [
            Fact("engine.name", "vllm", "observed"),
            Fact("model.n_layers", 2 + stage, "observed"),
            Fact("machine.processor", f"cpu {stage}", "observed"),
            check(("transformers", "engine")[stage], f"resid_post.{stage}", f"1e-0{6 + stage}"),
        ]

    found = {fact.name: fact for fact in joined_facts([of(0), of(1)])}
    assert found["engine.name"].value == "vllm" and found["model.n_layers"].value == 5
    assert found["machine.processor"].origin == "unknown"
    assert json.loads(str(found["capture.check"].value)) == {
        "against": "engine", "bound": "0.001", "reason": "dummy", "rows": 41, "eager": "1e-06",
        "hooks": {"resid_post.0": "1e-06", "resid_post.1": "1e-07"},
    }  # fmt: skip


def clean(path: Path) -> actds.Dataset:
    report = validate(path, level="deep")
    assert not report.errors, report.errors
    return actds.open(path)


def end(pipeline: Pipeline, engine: StagedEngine) -> dict[str, dict[str, int]]:
    engine.close()
    pipeline.send_client_facts(ClientFacts())
    ended = pipeline.finish("finished")
    pipeline.poll()
    return ended


def check_values(dataset: actds.Dataset) -> None:
    """Check that the rows of every hook are those of their request and position."""
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        whose = tokens["request"].to_numpy() * 100 + tokens["position"].to_numpy() + 1
        for number, hook in enumerate(HOOKS):
            bits = shard.array(hook.name).read_all()
            assert (bits == (whose + number).astype(bits.dtype)[:, None]).all()


@pytest.mark.standard
@pytest.mark.parametrize("policy", ["block", "drop_newest", "drop_oldest"])
def test_rows_of_two_stages_are_one_row_and_losses_are_of_whole_steps(
    policy: str, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    # Norms of the largest rows of many requests are below what float32 squares.
    readouts = Readouts(2, 1) if policy == "block" else None
    with pipeline_for(out, policy, readouts=readouts) as pipeline:
        engine = StagedEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        if policy != "block":
            with writer_stopped(pipeline):
                for number in range(1, 300):  # more than both rings hold
                    engine.request(number)
        else:
            for number in range(1, 9):
                engine.request(number)
        engine.drain(pipeline)
        ended = end(pipeline, engine)
    seal(open_store(out))
    dataset = clean(out)
    check_values(dataset)
    n = ended["census"]
    assert dataset.n_rows + n["dropped"] == n["requests"] * N_POSITIONS
    assert (n["dropped"] > 0) == (policy != "block")
    assert {tuple(shard.manifest.hooks) for shard in dataset.shards} == {
        tuple(hook.name for hook in HOOKS)
    }
    if readouts is not None:
        hooks = dataset.readouts()["hook"].to_pylist()
        assert {hooks.count(hook.name) for hook in HOOKS} == {n["scheduled_tokens"]}


@pytest.mark.standard
def test_readouts_that_one_stage_has_no_room_for_are_missing_at_every_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "acts"
    full = {("lane-0", 3), ("lane-1", 6), ("lane-0", 8), ("lane-1", 8), ("lane-0", 24)}
    put, now = Lane.put, threading.local()

    def putting(lane: Lane, step: int, *values: Any) -> bool:
        now.full = (lane.path.name, step) in full
        return put(lane, step, *values)

    monkeypatch.setattr(Lane, "put", putting)
    monkeypatch.setattr(RingSpace, "has_room", lambda *_: not now.full)
    with pipeline_for(out, "drop_newest", readouts=Readouts(2, 1), live=True) as pipeline:
        engine = StagedEngine(pipeline)
        for number in range(5):
            engine.request(number)
            engine.drain(pipeline)
        ended = end(pipeline, engine)
    seal(open_store(out))
    dataset = clean(out)
    drops = dataset.drops().to_pylist()
    assert {(drop["step"], drop["drop_reason"]) for drop in drops} == {
        (step, READOUTS_FULL) for _, step in full
    }
    assert not {step for _, step in full} & set(dataset.readouts()["step"].to_pylist())
    hooks = dataset.readouts()["hook"].to_pylist()
    assert {hooks.count(hook.name) for hook in HOOKS} == {dataset.n_rows}
    assert dataset.n_rows + ended["census"]["dropped"] == 5 * N_POSITIONS


@pytest.mark.standard
def test_a_stage_that_stops_fails_the_run_and_keeps_what_was_whole(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out, stage_timeout_s=1.0) as pipeline:
        engine = StagedEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        engine.running = 1
        engine.request(1)
        with pytest.raises(ActdsError, match="E501 step 5: rows of stage 0; none of stage 1"):
            engine.drain(pipeline)
        engine.close()
        ended = pipeline.finish("failed")
    assert ended["census"]["aborted"] == N_POSITIONS
    seal(open_store(out))
    dataset = clean(out)
    assert dataset.n_rows == N_POSITIONS


@pytest.mark.standard
def test_a_missing_stage_fails_the_run_at_its_end_at_the_latest(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = StagedEngine(pipeline, stages=[0])
        engine.request(0)
        engine.close()
        with pytest.raises(ActdsError, match=r"E501 .*no worker with resid_post.2"):
            pipeline.finish("finished")
            pipeline.poll()
    assert not (out / "actds.json").exists()


@pytest.mark.standard
def test_an_engine_that_dies_between_its_stages_leaves_an_accounted_run(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out) as pipeline:
        engine = StagedEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        engine.scheduler.send(RequestArrived(1, "p1-x", "p1", PROMPT_LEN, 1, None, None))
        engine.running = 1
        engine.step(1, 0, PROMPT_LEN)
        engine.close()
        ended = pipeline.finish("interrupted")
        pipeline.poll()
    assert ended["census"]["captured"] == N_POSITIONS
    seal(open_store(out))
    assert clean(out).n_rows == N_POSITIONS


@pytest.mark.standard
@pytest.mark.parametrize("fault", ["token_ids", "positions"])
def test_readouts_of_stages_that_disagree_are_not_stored(fault: str, tmp_path: Path) -> None:
    """From the step on at which they differ; also where the rows themselves come too late."""
    out = tmp_path / "acts"
    with pipeline_for(out, readouts=Readouts(2, 1)) as pipeline:
        engine = StagedEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        second = engine.workers[1].stages
        hand_over = second.hand_over

        def faulty(step: Any, token_ids: Any, positions: Any, **rest: Any) -> None:
            shift = (1, 0) if fault == "token_ids" else (0, 1)
            hand_over(step, token_ids + shift[0], positions + shift[1], **rest)

        second.hand_over = faulty  # type: ignore[method-assign]
        engine.request(1)
        # Rows or readouts, whichever of the two come first.
        said = rf"E501 step 5: (readouts of )?other {fault} in stage 1 than in stage 0"
        with pytest.raises(ActdsError, match=said):
            engine.drain(pipeline)
        engine.close()
        ended = pipeline.finish("failed")
    assert ended["census"]["aborted"] == N_POSITIONS
    seal(open_store(out))
    dataset = clean(out)
    assert dataset.n_rows == N_POSITIONS
    assert max(dataset.readouts()["step"].to_pylist()) == 4
    assert dataset.readouts().num_rows == 2 * N_POSITIONS
