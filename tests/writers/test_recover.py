"""Recovery: after any sudden end every acknowledged row is there, and everything adds up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import canonical
from actds.format.readouts import Readouts
from actds.publish.sealing import seal
from actds.store import layout, open_for_writing
from actds.store.local import LocalStore, lock_dataset
from actds_testing.independent import validator as independent
from actds_testing.recovery import (
    N_POSITIONS,
    accounts,
    check_values,
    clean,
    contents,
    harvest_and_kill,
    kill,
    prompts,
    serve_three_shards,
    shard_records,
)
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for, writer_stopped
from actds_writers.harvest.prepare import finished_rows
from actds_writers.harvest.recover import recover, recover_runs, require_accounted
from actds_writers.ipc.messages import ClientFacts, PromptFact
from actds_writers.sampling import Regime

pytestmark = pytest.mark.standard


if TYPE_CHECKING:
    from actds_writers.harvest.prepare import Plan

HOOKS = (("resid_post", 1), ("resid_post", 2))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset whose writer and census were killed in the middle; read only."""
    out = tmp_path_factory.mktemp("killed") / "acts"
    harvest_and_kill(out, "census", "writer", facts=ClientFacts(prompts(3)))
    return out


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "acts"))


def test_keeps_every_acknowledged_row_and_accounts_for_the_rest(copy: Path) -> None:
    n_shards = len(shard_records(copy))
    found = recover(copy)
    [run] = found.runs
    assert run.outcome == "recovered"
    assert sorted(run.chains.values()) == ["open", "open"]
    assert run.n_segments > 0
    assert found.seal is not None
    dataset = clean(copy)
    assert len(dataset.shards) == n_shards >= 3
    assert dataset.n_rows == run.n_rows == run.totals["captured"] >= 120
    assert dataset.n_rows + run.totals["aborted"] > (run.totals["requests"] - 1) * N_POSITIONS
    assert set(dataset.requests()["external_id"].to_pylist()) >= {"name 0", "name 1", "name 2"}
    check_values(dataset)


def test_a_second_recovery_changes_nothing(copy: Path) -> None:
    first = recover(copy)
    before = contents(copy)
    second = recover(copy)
    assert contents(copy) == before
    assert second.seal == first.seal
    assert [run.outcome for run in second.runs] == ["accounted"]


def test_leftovers_are_cleared_only_when_asked(copy: Path) -> None:
    stray = copy / "shards" / "w-uncommitted-000000" / "tokens.parquet"
    stray.parent.mkdir()
    stray.write_bytes(b"x" * 10)
    temporary = copy / "shards" / ".tmp-0123456789abcdef"
    temporary.write_bytes(b"y" * 7)
    mine = copy / "shards-notes.txt"
    mine.write_text("not theirs to remove")
    found = recover(copy)
    assert found.unreachable["shards/w-uncommitted-000000/tokens.parquet"] == 10
    assert found.unreachable["shards/.tmp-0123456789abcdef"] == 7
    assert any(path.startswith("journal/") for path in found.unreachable)
    assert stray.exists()
    clean(copy)
    again = recover(copy, clear=True)
    assert again.unreachable.keys() == found.unreachable.keys()
    assert not stray.exists()
    assert not temporary.exists()
    assert not (copy / "journal").exists()
    assert mine.exists()
    mine.unlink()
    clean(copy, warnings=frozenset())
    assert recover(copy).unreachable == {}


def interruptions(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield copies of a dataset after a recovery that died at its n-th write, for every n."""
    for n in range(100):
        copy = Path(shutil.copytree(path, path.parent / f"cut-{n}"))
        if not dies(copy, n):
            return
        yield copy, n
    raise AssertionError("recovery does not end")


def dies(path: Path, at: int) -> bool:
    """Run a recovery in a child that is killed at its n-th put; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            put_new, count = LocalStore.put_new, [0]

            def put(self: LocalStore, *arguments: object) -> object:
                done = put_new(self, *arguments)
                count[0] += 1
                if count[0] > at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return done

            LocalStore.put_new = put
            recover(path)
            os._exit(0)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_recovery_that_is_killed_anywhere_is_recovered_to_the_same(
    copy: Path, tmp_path: Path
) -> None:
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    recover(whole)
    clean(whole)
    wanted, deaths = accounts(whole), 0
    for cut, _ in interruptions(copy):
        deaths += 1
        assert recover(cut).seal is not None
        assert accounts(cut) == wanted
        shutil.rmtree(cut)
    assert deaths >= 8  # fences, open, three parts with their records, close, seal


def test_a_census_that_was_killed_alone_is_recovered(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    pipeline = pipeline_for(out)
    try:
        engine = SyntheticEngine(pipeline)
        number = serve_three_shards(pipeline, engine, out)
        kill(pipeline, "census")
        with pytest.raises((ActdsError, OSError)):
            for later in range(number, 600):
                engine.request(later)
                pipeline.poll()
        engine.close()
    finally:
        pipeline.__exit__()
    [run] = recover(out).runs
    assert run.outcome == "recovered"
    check_values(clean(out))


def test_the_readouts_of_a_killed_run_agree_with_its_census(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    harvest_and_kill(out, "writer", "census", readouts=Readouts(2, 5))
    recover(out)
    assert clean(out, warnings=frozenset({"E105", "E416"})).n_rows >= 120


def test_drops_that_nobody_logged_are_aborted(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    pipeline = pipeline_for(out, "drop_oldest")
    try:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline):
            for number in range(1, 60):
                engine.request(number)
        before = len(shard_records(out))
        while len(shard_records(out)) < before + 3:
            number += 1
            engine.request(number)
            engine.drain(pipeline)
        kill(pipeline, "writer", "census")
        assert engine.drops
        engine.close()
    finally:
        pipeline.__exit__()
    recover(out)
    dataset = clean(out)
    assert set(dataset.spans()["disposition"].to_pylist()) == {"captured", "aborted"}
    check_values(dataset)


@pytest.mark.parametrize("victims", [("writer",), ("census",), ("writer", "census"), ()])
@pytest.mark.parametrize(
    ("policy", "of_draw"),
    [
        ("thin", {}),
        ("thin", {"thin_unit": "request"}),
        ("drop_newest", {"always": 1 / 32}),
        ("thin", {"keep": "label topic=a* and role user: 0.5; decode: 0.75; 0.125"}),
    ],
)
def test_rows_that_are_drawn_are_the_right_ones_after_a_kill(
    policy: str, of_draw: dict[str, Any], victims: tuple[str, ...], tmp_path: Path
) -> None:
    """Without a victim the engine and the command die, with steps of every probability waiting."""
    out = tmp_path / "acts"
    pipeline = pipeline_for(out, policy, **of_draw)
    prompts = [
        PromptFact(f"p{n}", f"q{n}", "s", n, roles="t1u9", labels='{"topic":"art"}')
        for n in range(400)
    ]
    try:
        engine = SyntheticEngine(pipeline)
        engine.regime = Regime("t1u9", {0: True})
        pipeline.send_client_facts(ClientFacts(tuple(prompts)))
        number = serve_three_shards(pipeline, engine, out)
        with writer_stopped(pipeline):
            for later in range(number, number + 60):
                engine.request(later)
        with contextlib.suppress(ActdsError, OSError):
            for later in range(number + 60, number + 120):
                engine.request(later)
        kill(pipeline, *victims)
        engine.close()
    finally:
        pipeline.__exit__()
    [run] = recover(out).runs
    assert run.outcome == ("recovered" if "census" in victims else "accounted")
    dataset = clean(out)
    check_values(dataset)
    assert not [f for f in independent.validate(out, deep=True) if f.severity == "error"]
    assert min(dataset.steps()["inclusion"].drop_null().to_pylist()) < 0.5


def test_refuses_while_a_process_is_alive(copy: Path) -> None:
    lock = lock_dataset(copy)
    before = contents(copy)
    try:
        with pytest.raises(ActdsError, match="E010"):
            recover(copy)
    finally:
        os.close(lock)
    assert contents(copy) == before


def test_beside_an_engine_that_starts_the_dead_are_recovered_and_nothing_is_sealed_or_cleared(
    copy: Path,
) -> None:
    lock = lock_dataset(copy, shared=True)
    try:
        with pytest.raises(ActdsError, match="E010"):
            recover(copy, clear=True)
        done = recover(copy)
    finally:
        os.close(lock)
    assert [run.outcome for run in done.runs] == ["recovered"] and done.seal is None
    assert recover(copy).seal is not None
    clean(copy)


def remove_one(copy: Path) -> None:
    (copy / layout.journal_path("r-test", 0)).unlink()


def cut_short(copy: Path) -> None:
    """Leave a journal that is whole in itself, and ends before the rows do."""
    first, *others = sorted((copy / "journal/r-test").iterdir())
    for path in others:
        path.unlink()
    header, *lines = zstandard.decompress(first.read_bytes()).splitlines(keepends=True)
    fewer = {**json.loads(header), "n_messages": 3}
    first.write_bytes(zstandard.compress(canonical.dump(fewer) + b"".join(lines[:3])))


def remove_all(copy: Path) -> None:
    shutil.rmtree(copy / "journal")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_one, "no segment"),
        # Which messages come first is chance: three may hold no schedule at all.
        (cut_short, "no message for step|neither census nor journal"),
        (remove_all, "no journal"),
    ],
)
def test_a_journal_that_lacks_something_is_said_and_nothing_is_made_up(
    damage: Callable[[Path], None], says: str, copy: Path
) -> None:
    assert len(list((copy / "journal/r-test").iterdir())) > 1
    damage(copy)
    done = CliRunner().invoke(cli, ["recover", str(copy)])
    assert done.exit_code != 0
    assert "E312" in done.output
    assert re.search(says, done.output)
    assert not list(copy.glob("census/**/*.parquet"))
    catalog = read_catalog(LocalStore(copy))
    assert sum(manifest.n_rows for manifest in catalog.shards) >= 120
    assert catalog.seal is None


@pytest.mark.parametrize("where", [".", "journal", "shards"])
def test_folders_of_any_depth_are_passed_over(where: str, copy: Path) -> None:
    deep = copy / where / "deep"
    deep.mkdir(parents=True)
    make = "import os\nfor _ in range(5000):\n os.mkdir('d')\n os.chdir('d')\n"
    subprocess.run([sys.executable, "-c", make], cwd=deep, check=True)
    try:
        assert [run.outcome for run in recover(copy, clear=True).runs] == ["recovered"]
        assert (deep / "d").is_dir()
    finally:
        subprocess.run(["rm", "-rf", str(deep)], check=True)


def test_the_command_says_what_it_found(copy: Path) -> None:
    told = CliRunner().invoke(cli, ["recover", str(copy)])
    assert told.exit_code == 0, told.output
    assert "run r-test: recovered" in told.output
    assert "acknowledged rows" in told.output
    assert "--clear removes them" in told.output
    facts = json.loads(CliRunner().invoke(cli, ["recover", str(copy), "--json"]).output)
    assert (facts["format"], facts["version"]) == ("actds.recover", "1")
    assert [run["outcome"] for run in facts["runs"]] == ["accounted"]
    assert facts["seal"] == 1
    assert facts["error"] is None
    cleared = CliRunner().invoke(cli, ["recover", str(copy), "--clear"])
    assert "removed" in cleared.output


def test_refuses_what_is_no_dataset(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["recover", str(tmp_path)])
    assert done.exit_code == 3
    assert "E101" in done.output


def test_queue_meters_without_rows_need_no_journal(tmp_path: Path) -> None:
    """The census dies before it saw anything; the writer still tells of its queues, and closes."""
    out = tmp_path / "acts"
    pipeline = pipeline_for(out)
    try:
        engine = SyntheticEngine(pipeline)
        while not list(out.glob("runs/*.json")):
            time.sleep(0.01)
        kill(pipeline, "census")
        engine.close()
    finally:
        pipeline.__exit__()
    assert list(out.glob("losses/*/occupancy-*.parquet"))
    [run] = recover(out).runs
    assert (run.outcome, run.n_rows, run.n_segments) == ("recovered", 0, 0)
    assert clean(out).n_rows == 0


def test_a_resume_recovers_first_and_knows_what_is_finished(copy: Path) -> None:
    """The prompts' facts stand in the journal, so nothing that is finished is served again."""
    plan = cast("Plan", SimpleNamespace(facts=(), hooks=HOOKS))
    done = finished_rows(copy, plan)
    assert {0, 1} <= done
    seal(copy)
    dataset = clean(copy, warnings=frozenset())  # and nothing is left of the run
    spans = dataset.spans().to_pylist()
    incomplete = {span["request"] for span in spans if span["disposition"] == "aborted"}
    rows = dataset.requests().to_pylist()
    whole = {row["source_row"] for row in rows if row["request"] not in incomplete}
    assert done - {None} == whole - {None}  # a prompt of no file is none to be served again


def test_a_resume_is_refused_when_a_run_cannot_be_accounted_for(copy: Path) -> None:
    remove_all(copy)
    with pytest.raises(ActdsError, match="E312"):
        finished_rows(copy, cast("Plan", SimpleNamespace(facts=(), hooks=HOOKS)))


def test_a_writer_that_died_before_its_run_record_left_an_empty_run(copy: Path) -> None:
    [writer] = copy.glob("ledger/w-*")
    for record in list(writer.iterdir()):
        if record.name > "00000000.json":
            record.unlink()
    shutil.rmtree(copy / "runs")
    [run] = recover(copy, clear=True).runs
    assert run.outcome == "empty"
    assert clean(copy, warnings=frozenset()).n_rows == 0


def test_a_harvest_does_not_go_on_in_an_imported_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "resid_post.1.npy", np.ones((4, 8), np.float32))
    actds.import_foreign(tmp_path / "resid_post.1.npy", tmp_path / "acts")
    found = recover_runs(open_for_writing(tmp_path / "acts"))
    assert [run.outcome for run in found] == ["imported"]
    with pytest.raises(ActdsError, match=r"E403[\s\S]*dataset of its own"):
        require_accounted(found)
