"""Object stores after a crash: recovery and resume keep what was acknowledged, as on a disk."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from click.testing import CliRunner
from s3_server import BUCKET, s3_environment
from synthetic_engine import GENERATED, PROMPT_LEN, SyntheticEngine, pipeline_for
from test_recover import accounts, check_values, kill

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.readouts import Readouts
from actds.seal import seal
from actds.store import open_store
from actds.store.s3 import S3Store
from actds_validators.validate import validate
from actds_writers.messages import ClientFacts, PromptFact
from actds_writers.pipeline import Pipeline
from actds_writers.recover import recover
from actds_writers.resume import finished_rows

if TYPE_CHECKING:
    from actds_writers.plan import Plan

N_POSITIONS = PROMPT_LEN + GENERATED - 1
N_PROMPTS = 30
PROMPTS = tuple(PromptFact(f"p{n}", f"name {n}", "source", n) for n in range(N_PROMPTS))


def commit_three_shards(pipeline: Pipeline, engine: SyntheticEngine) -> int:
    """Serve requests until three shards are acknowledged; return how many were served."""
    number = 0
    while pipeline.written is None or pipeline.written.commits.n_shards < 3:
        engine.request(number)
        engine.drain(pipeline)
        pipeline.poll()
        number += 1
    return number


def harvest_and_kill(root: str, *names: str, readouts: Readouts | None = None) -> int:
    """Harvest onto an object store, kill processes in the middle; return the requests served."""
    pipeline = pipeline_for(root, readouts=readouts)
    try:
        pipeline.tell_client_facts(ClientFacts(PROMPTS))
        engine = SyntheticEngine(pipeline)
        n_requests = commit_three_shards(pipeline, engine)
        kill(pipeline, *names)
        engine.close()
    finally:
        pipeline.__exit__()
    return n_requests


def clean(root: str, *, warnings: frozenset[str] = frozenset({"E105"})) -> actds.Dataset:
    report = validate(root, level="deep")
    assert not report.errors, report.errors
    assert {finding.code for finding in report.warnings} <= warnings
    return actds.open(root)


def contents(root: str) -> dict[str, bytes]:
    store = open_store(root)
    return {path: store.read(path) for path in store.list()}


def acknowledged(root: str) -> int:
    records = (data for path, data in contents(root).items() if path.startswith("ledger/w-"))
    found = (json.loads(data) for data in records)
    return sum(r["body"]["n_rows"] for r in found if r["type"] == "shard")


@pytest.fixture(scope="module")
def killed(s3_port: int) -> dict[str, bytes]:
    """Return the objects of a dataset whose writer and census were killed in the middle."""
    root = f"s3://{BUCKET}/killed"
    with pytest.MonkeyPatch.context() as patch:
        s3_environment(patch, s3_port)
        harvest_and_kill(root, "census", "writer", readouts=Readouts(2, 5))
        return contents(root)


@pytest.fixture
def copy(killed: dict[str, bytes], s3_root: str) -> str:
    """Return where a copy of it stands."""
    upload(killed, s3_root)
    return s3_root


def test_recovery_keeps_every_row_that_the_store_acknowledged(copy: str) -> None:
    n_rows = acknowledged(copy)
    assert n_rows >= 120
    [run] = recover(copy).runs
    assert (run.outcome, run.n_rows, run.totals["captured"]) == ("recovered", n_rows, n_rows)
    assert run.totals["captured"] + run.totals["aborted"] == run.totals["scheduled_tokens"]
    dataset = clean(copy)
    assert dataset.n_rows == n_rows
    check_values(dataset)
    before = contents(copy)
    assert [run.outcome for run in recover(copy).runs] == ["accounted"]
    assert contents(copy) == before


def test_a_census_that_was_killed_alone_is_recovered(s3_root: str) -> None:
    harvest_and_kill(s3_root, "census")
    n_rows = acknowledged(s3_root)
    [run] = recover(s3_root).runs
    assert run.totals["captured"] == n_rows >= 120
    check_values(clean(s3_root))


class Cut(BaseException):
    """The recovery ends here, as if it were killed."""


def recover_until(root: str, n_puts: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Recover, but die after some puts; return whether it came so far."""
    put_new, done = S3Store.put_new, [0]

    def put(self: S3Store, *arguments: object) -> object:
        result = put_new(self, *arguments)  # type: ignore[arg-type]
        done[0] += 1
        if done[0] > n_puts:
            raise Cut
        return result

    with monkeypatch.context() as patch:
        patch.setattr(S3Store, "put_new", put)
        try:
            recover(root)
        except Cut:
            return True
    return False


def test_a_recovery_that_is_cut_anywhere_is_recovered_to_the_same(
    killed: dict[str, bytes], s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(killed, s3_root)
    recover(s3_root)
    wanted, n_cuts = accounts(s3_root), 0
    while True:
        copy = f"{s3_root}-{n_cuts}"
        upload(killed, copy)
        if not recover_until(copy, n_cuts, monkeypatch):
            break
        n_cuts += 3  # at every write on a local disk: test_recover
        assert recover(copy).seal is not None
        assert accounts(copy) == wanted
    assert n_cuts >= 8  # fences, open, three parts with their records, close, seal


def upload(files: dict[str, bytes], root: str) -> None:
    store = open_store(root)
    for path, data in files.items():
        store.put_new(path, [data])


def test_a_writer_that_lives_after_all_is_fenced_and_loses_nothing_that_was_acknowledged(
    s3_root: str,
) -> None:
    """There is no lock to see it by: recovery ends it, as the documentation says."""
    pipeline = pipeline_for(s3_root)
    try:
        engine = SyntheticEngine(pipeline)
        number = commit_three_shards(pipeline, engine)
        writer = pipeline._processes["writer"].pid
        os.kill(writer, signal.SIGSTOP)
        [run] = recover(s3_root).runs
        assert run.outcome == "recovered"
        n_rows, before = clean(s3_root).n_rows, contents(s3_root)
        os.kill(writer, signal.SIGCONT)
        with pytest.raises(ActdsError, match="E308"):
            for later in range(number, 600):
                engine.request(later)
                pipeline.poll()
        engine.close()
    finally:
        pipeline.__exit__()
    after = contents(s3_root)
    assert {path: after[path] for path in before} == before
    assert clean(s3_root).n_rows == n_rows
    assert [run.outcome for run in recover(s3_root).runs] == ["accounted"]


def test_the_command_recovers_and_clears_an_object_store(copy: str) -> None:
    stray = "shards/w-uncommitted-000000/tokens.parquet"
    open_store(copy).put_new(stray, [b"x" * 10])
    told = CliRunner().invoke(cli, ["recover", copy])
    assert told.exit_code == 0, told.output
    assert "run r-test: recovered" in told.output
    assert "--clear removes them" in told.output
    assert stray in contents(copy)
    cleared = CliRunner().invoke(cli, ["recover", copy, "--clear", "--json"])
    facts = json.loads(cleared.output)
    assert facts["unreachable"][stray] == 10
    assert facts["cleared"] is True
    assert not [p for p in contents(copy) if p == stray or p.startswith("journal/")]
    clean(copy, warnings=frozenset())
    again = CliRunner().invoke(cli, ["recover", copy, "--json"])
    assert json.loads(again.output)["unreachable"] == {}


def test_recovery_refuses_a_prefix_without_a_dataset(s3_root: str) -> None:
    done = CliRunner().invoke(cli, ["recover", s3_root])
    assert done.exit_code == 3
    assert "E101" in done.output


def test_a_resume_serves_what_is_missing_and_nothing_twice(copy: str) -> None:
    nothing_changed = cast("Plan", SimpleNamespace(facts=()))
    n_rows = acknowledged(copy)
    done = finished_rows(copy, nothing_changed)
    assert {0, 1} <= done
    left = [
        replace(prompt, key=f"p{number}")
        for number, prompt in enumerate(p for p in PROMPTS if p.source_row not in done)
    ]
    with pipeline_for(copy, run="r-second", resume=True) as pipeline:
        pipeline.tell_client_facts(ClientFacts(tuple(left)))
        engine = SyntheticEngine(pipeline)
        for number in range(len(left)):
            engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.finish("finished")
    seal(open_store(copy))
    dataset = clean(copy)
    assert sorted(dataset.runs) == ["r-second", "r-test"]
    assert dataset.n_rows == n_rows + len(left) * N_POSITIONS
    check_values(dataset)
    assert finished_rows(copy, nothing_changed) == set(range(N_PROMPTS))
    requests = dataset.requests(run=True).to_pylist()
    second = [row["source_row"] for row in requests if row["run"] == "r-second"]
    assert sorted(second) == sorted(set(range(N_PROMPTS)) - done)
