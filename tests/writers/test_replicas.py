"""Data-parallel replicas: several engines harvest one dataset, and no prompt twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import actds
from actds import ActdsError
from actds.explore.dataset import Dataset
from actds.format.schema import RowCounts
from actds_testing import harvest as h
from actds_testing import toy
from actds_writers.config import WriteSettings
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest import replicas
from actds_writers.harvest.prepare import Plan, make_plan
from actds_writers.harvest.replicas import shares
from actds_writers.harvest.result import Observer, Totals
from actds_writers.ipc.messages import CommitTotals
from actds_writers.monitor.progress import Snapshot, Stage, summed

N_REQUESTS = 13
PROMPTS = [
    {"id": f"q{n}", "prompt": "all work and no play makes a dull toy"[: 2 + 2 * n]}
    for n in range(N_REQUESTS)
]
OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0,2", "--max-tokens", "4",
           "--engine-arg", "max_num_seqs=2")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the toy in this process and in those it starts."""
    site = toy.register(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(site))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS)


def plan_of(model: Path, prompts: Path) -> tuple[WriteSettings, Plan]:
    settings = WriteSettings.of(
        {"out": "nowhere", "model": model, "prompts": str(prompts), "hooks": "resid_post:0",
         "engine": "toy", "max_tokens": 4}
    )  # fmt: skip
    return settings, make_plan(settings, find_engine("toy").options({}))


def test_every_prompt_has_one_replica_and_skips_belong_to_the_first(
    model: Path, prompts: Path
) -> None:
    settings, plan = plan_of(model, prompts)
    plan = replace(plan, encoded=(replace(plan.encoded[0], skip="E004"), *plan.encoded[1:]))
    parts = shares(settings, plan, 4)
    indexes = [[e.prompt.index for e in part.encoded] for part in parts]
    assert sorted(index for own in indexes for index in own) == list(range(N_REQUESTS))
    assert {len(own) for own in indexes} == {3, 4} and 0 in indexes[0]
    for part, own in zip(parts, indexes, strict=True):
        assert [int(fact.key[1:]) for fact in part.client] == own
    assert len(shares(settings, plan, 99)) == N_REQUESTS - 1


def test_progress_and_totals_are_those_of_all_replicas() -> None:
    stages = (
        Stage("staging", 5, 1, 4, 0.25),
        Stage("ring", 3, None),
        Stage("pool", 2, 0, 1, 0.0, 3),
    )
    one = Snapshot(
        2.0, 3, 10, rows=7, dropped={"queue_full": 2}, stages=stages, memory_nbytes=100,
        commits=CommitTotals(
            2, 0, 6, 50, 40, 1.5, (1, 2), 0.1, 0.2, 9, {"q.0": RowCounts(not_finite=3, zero=1)}
        ),
    )  # fmt: skip
    other = replace(one, elapsed_s=3.0, dropped={"queue_full": 1, "dma_backpressure": 4}, lane=None)
    both = summed([one, other])
    assert (both.elapsed_s, both.requests_done, both.requests_total, both.rows) == (3.0, 6, 20, 14)
    assert both.dropped == {"queue_full": 3, "dma_backpressure": 4}
    assert both.stages[0] == Stage("staging", 10, 2, 8, 0.25)
    assert both.stages[1].depth is None and both.stages[2].n_stalls == 6
    assert (both.commits.n_rows, both.commits.buckets, both.memory_nbytes) == (12, (2, 4), 200)
    values = {"q.0": RowCounts(not_finite=6, zero=2)}
    assert both.commits.values == values
    counts = dict.fromkeys(("scheduled", "captured"), 5) | dict.fromkeys(
        ("recomputed", "cache_ref", "dropped", "aborted", "aborted_uncomputed", "filtered",
         "unresolved"), 0
    )  # fmt: skip
    totals = Totals(
        path="acts", elapsed_s=1.0, requests={"stop": 1}, n_hooks=2, n_shards=3, row_nbytes=4,
        stored_nbytes=5, seal=None, values=one.commits.values, **counts,
    )  # fmt: skip
    twice = totals.plus(replace(totals, requests={"length": 2}))
    assert twice.requests == {"stop": 1, "length": 2}
    assert (twice.scheduled, twice.n_shards, twice.n_hooks) == (10, 6, 2)
    assert twice.values == values


def finished(dataset: Dataset) -> Counter[int]:
    """Return how often each prompt was served to its end."""
    rows = dataset.requests(run=True).to_pylist()
    return Counter(r["source_row"] for r in rows if r["finish_reason"] == "length")


@pytest.mark.standard
def test_replicas_are_runs_of_one_dataset_with_the_rows_of_one_engine(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    alone = h.harvest_warm(tmp_path / "alone", model, prompts, *OPTIONS)
    replicas = ("--engine-arg", "replicas=2", "--canary", "1")
    done = h.run_warm(tmp_path / "two", model, prompts, *OPTIONS, *replicas)
    assert done.returncode == 0, done.stderr
    # The summary is of both: every request, every position.
    assert f"requests   {N_REQUESTS} = {N_REQUESTS} length" in done.stdout
    assert f"positions  {alone.n_rows:,} = {alone.n_rows:,} captured" in done.stdout
    assert done.stdout.count("replayed alone") == 2
    two = h.validated(tmp_path / "two")
    assert len(two.runs) == 2 and set(finished(two).values()) == {1}
    assert sorted(two.requests(run=True)["run"].value_counts().field(1).to_pylist()) == [6, 7]
    for hook in two.hooks:
        ours, theirs = h.rows_of(two, hook), h.rows_of(alone, hook)
        assert set(ours) == set(theirs)
        assert all((ours[key] == theirs[key]).all() for key in ours)
    again = h.run_warm(tmp_path / "two", model, prompts, *OPTIONS, *replicas, "--resume")
    assert (
        "Every prompt is finished" in again.stdout and len(actds.open(tmp_path / "two").runs) == 2
    )


@pytest.mark.full
def test_a_replica_that_dies_ends_the_others_in_order_and_no_prompt_is_harvested_twice(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    two = ("--engine-arg", "replicas=2")
    slow = ("--engine-arg", "step_s=0.3")
    done = h.run(out, model, prompts, *OPTIONS, *two, *slow, "--engine-arg", "dies=1")
    assert done.returncode != 0 and "E504 toy: its time has come" in done.stderr
    first = finished(h.validated(out))
    assert len(first) < N_REQUESTS and set(first.values()) <= {1}
    three = ("--engine-arg", "replicas=3")
    done = h.run(out, model, prompts, *OPTIONS, *three, "--resume")
    assert done.returncode == 0, done.stderr
    whole = h.validated(out)
    assert len(whole.runs) == 5
    assert finished(whole) == Counter(range(N_REQUESTS))


class NoProcess:
    """Stands for the process of a replica: keeps its end of the connection, and the signals."""

    def __init__(self, *_: object, pass_fds: tuple[int, int], **__: object) -> None:
        self.connection = Connection(os.dup(pass_fds[1]))
        self.signals: list[int] = []
        made.append(self)

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)

    def wait(self, timeout: float | None = None) -> int:
        return 1


made: list[NoProcess] = []


def test_a_replica_that_starts_hears_of_an_interrupt_when_it_heeds_them(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, plan = plan_of(model, prompts)
    monkeypatch.setattr(subprocess, "Popen", NoProcess)
    one, other = (replicas.Replica(replicas.Work(settings, plan, 0, n, 2)) for n in range(2))
    process, other_process = made[-2:]
    one.interrupt()
    assert process.signals == []  # it would end the process, and not the run
    process.connection.send(replicas.Began("r-1"))
    one.take(Observer())
    assert process.signals == [signal.SIGTERM]
    one.interrupt()
    assert process.signals == [signal.SIGTERM] * 2
    other.interrupt()
    other.interrupt()
    assert other_process.signals == [signal.SIGTERM]  # twice is at once, whatever it is doing


class Display(Observer):
    """Looks at the counters at once."""

    def harvesting(self, snapshot: Callable[[], Snapshot]) -> AbstractContextManager[object]:
        return nullcontext(snapshot())


class Failing(NoProcess):
    """Ends with an error before it has served anything."""

    def __init__(self, *_: object, pass_fds: tuple[int, int], **__: object) -> None:
        super().__init__(pass_fds=pass_fds)
        refused = ActdsError("E012", "engine option x", got="one value", expected="another")
        self.connection.send(replicas.Ended.failed(refused))


def test_replicas_that_all_fail_before_they_have_counters_end_with_their_reasons(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, plan = plan_of(model, prompts)
    monkeypatch.setattr(subprocess, "Popen", Failing)
    ended = replicas.harvest_replicas(settings, [plan, plan], 0, Display())
    assert [one.failure and one.failure.code for one in ended] == ["E012", "E012"]


@pytest.mark.full
def test_ctrl_c_ends_every_replica_in_order(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    words = h.command(out, model, prompts, *OPTIONS, "--engine-arg", "replicas=2",
                      "--engine-arg", "step_s=0.3")  # fmt: skip
    process = subprocess.Popen(words, env=h.environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "actds.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)  # one has just begun, and the other may be far behind
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and said.count("draining") == 1, said
    dataset = h.validated(out)
    assert len(finished(dataset)) < N_REQUESTS
    lines = dataset.requests(run=True).to_pylist()
    assert {line["finish_reason"] for line in lines} <= {"length", "abort", "unbegun"}
    # Each run has its own share of the records, and all of it.
    shares_of = [{r["source_row"] for r in lines if r["run"] == run} for run in dataset.runs]
    assert sum(map(len, shares_of)) == len(lines) == len(set.union(*shares_of))
    evens = set(range(0, N_REQUESTS, 2))
    assert all(share in (evens, set(range(N_REQUESTS)) - evens) for share in shares_of)
