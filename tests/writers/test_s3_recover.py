"""Object stores after a crash: recovery and resume keep what was acknowledged, as on a disk."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from click.testing import CliRunner

from actds.cli import cli
from actds.format.readouts import Readouts
from actds.publish.sealing import seal
from actds.store import open_store
from actds.store.s3 import S3Store
from actds_testing.recovery import (
    N_POSITIONS,
    accounts,
    check_values,
    clean,
    contents,
    harvest_and_kill,
    prompts,
    shard_records,
)
from actds_testing.s3_server import BUCKET, SERVERS, s3_environment
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.harvest.prepare import finished_rows
from actds_writers.harvest.recover import recover
from actds_writers.ipc.messages import ClientFacts

pytestmark = pytest.mark.parametrize("s3_port", SERVERS, indirect=True)


if TYPE_CHECKING:
    from actds_writers.harvest.prepare import Plan

N_PROMPTS = 30
PROMPTS = prompts(N_PROMPTS)
HOOKS = (("resid_post", 1), ("resid_post", 2))


def acknowledged(root: str) -> int:
    """Return how many rows are acknowledged."""
    return sum(record["body"]["n_rows"] for record in shard_records(root))


def harvest_onto_store_and_kill(root: str, *names: str, readouts: Readouts | None = None) -> None:
    """Harvest onto an object store, and kill processes in the middle."""
    facts = ClientFacts(PROMPTS)
    harvest_and_kill(root, *names, facts=facts, drained=True, readouts=readouts)


@pytest.fixture(scope="module")
def killed(s3_port: int) -> dict[str, bytes]:
    """Return the objects of a dataset whose writer and census were killed in the middle."""
    root = f"s3://{BUCKET}/killed"
    with pytest.MonkeyPatch.context() as patch:
        s3_environment(patch, s3_port)
        harvest_onto_store_and_kill(root, "census", "writer", readouts=Readouts(2, 5))
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
    harvest_onto_store_and_kill(s3_root, "census")
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
    nothing_changed = cast("Plan", SimpleNamespace(facts=(), hooks=HOOKS))
    n_rows = acknowledged(copy)
    done = finished_rows(copy, nothing_changed)
    assert {0, 1} <= done
    left = [
        replace(prompt, key=f"p{number}")
        for number, prompt in enumerate(p for p in PROMPTS if p.source_row not in done)
    ]
    with pipeline_for(copy, run="r-second", resume=True) as pipeline:
        pipeline.send_client_facts(ClientFacts(tuple(left)))
        engine = SyntheticEngine(pipeline)
        for number in range(len(left)):
            engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.finish("finished")
    seal(open_store(copy))
    dataset = clean(copy, warnings=frozenset())  # and nothing is left of the first run
    assert sorted(dataset.runs) == ["r-second", "r-test"]
    assert dataset.n_rows == n_rows + len(left) * N_POSITIONS
    check_values(dataset)
    assert finished_rows(copy, nothing_changed) == set(range(N_PROMPTS))
    requests = dataset.requests(run=True).to_pylist()
    second = [row["source_row"] for row in requests if row["run"] == "r-second"]
    assert sorted(second) == sorted(set(range(N_PROMPTS)) - done)
