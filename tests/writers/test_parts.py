"""Parts: several commands harvest one dataset at a time, each with its share of the prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import actds
from actds import ActdsError
from actds.cli import cli
from actds.dataset.heartbeat import Heartbeat, heartbeats
from actds.dataset.ledger import read_ledger
from actds.dataset.reading import read_catalog, read_genesis
from actds.explore.dataset import Dataset
from actds.format.schema import parse_part
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_writers.harvest.prepare import finished_of

N_PROMPTS = 25
PROMPTS = [{"id": f"q{n}", "prompt": "all work and no play makes a dull toy"[: 2 + n]}
           for n in range(N_PROMPTS)]  # fmt: skip
OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0,2", "--max-tokens", "4",
           "--engine-arg", "max_num_seqs=2")  # fmt: skip
SLOW = ("--engine-arg", "step_s=1.5")


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


STANDARD, FULL = pytest.mark.standard, pytest.mark.full
FOLDER, S3 = (pytest.param(name, marks=STANDARD) for name in ("folder", "s3"))
CEPH = pytest.param("ceph", marks=FULL)


@pytest.fixture(params=[FOLDER, S3, CEPH])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where a dataset is to be, in a folder and on stores that speak S3."""
    if request.param == "folder":
        return str(tmp_path / "acts")
    root: str = request.getfixturevalue(f"{request.param}_root")
    return root


def begin(out: str, model: Path, prompts: Path, *options: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(
        h.command(out, model, prompts, *OPTIONS, *options),
        env=h.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(command: subprocess.Popen[str]) -> None:
    """Kill a command and every process that it has started, as the loss of its machine does."""
    processes = [command.pid, *h.descendants(command.pid)]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    command.wait()


def await_rows(out: str, part: str, n_shards: int = 1) -> str:
    """Wait until the run of a part has committed shards; return its id."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        store = open_store(out)
        if store.exists("actds.json"):
            for state in read_ledger(store, read_genesis(store).dataset).values():
                n = sum(record.type == "shard" for record in state.records)
                if n >= n_shards and read_catalog(store).runs[state.run].part == part:
                    return state.run
        time.sleep(0.1)
    raise AssertionError(f"part {part} has committed nothing")


def finished(dataset: Dataset) -> Counter[object]:
    """Return how often each prompt was served to its end, with every row that it owes."""
    return Counter(p for run in dataset.runs for p in finished_of(dataset.catalog, run))


def sealed(out: str) -> str:
    """Seal a dataset with the command; return what it says."""
    done = CliRunner().invoke(cli, ["seal", out])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("out", [pytest.param("folder", marks=FULL), S3, CEPH], indirect=True)
def test_three_at_a_time_are_one_dataset_after_one_was_killed_and_went_on(
    out: str, model: Path, prompts: Path
) -> None:
    small = ("--rows-per-shard", "8")
    commands = [
        begin(out, model, prompts, "--part", f"{k}/3", *small, "--engine-arg", f"step_s={pause}")
        for k, pause in ((1, 0), (2, 3), (3, 0.8))  # the second is killed long before its end
    ]
    killed = await_rows(out, "2/3")
    kill(commands[1])
    other = await_rows(out, "3/3", 2)
    again = h.run(out, model, prompts, *OPTIONS, *small, "--part", "2/3", "--resume")
    assert again.returncode == 0, again.stderr
    assert "not sealed" not in again.stderr and "actds seal" in again.stdout
    # The run of the third part was at work, and was not touched.
    chains = read_ledger(open_store(out), read_genesis(open_store(out)).dataset).values()
    assert {state.state for state in chains if state.run == killed} == {"fenced", "closed"}
    assert all(state.state != "fenced" for state in chains if state.run == other)
    for command in (commands[0], commands[2]):
        _, said = command.communicate(timeout=120)
        assert command.returncode == 0, said
    assert "missing" not in sealed(out)
    dataset = h.validated(out)
    assert finished(dataset) == Counter(range(N_PROMPTS)) and len(dataset.runs) == 4
    for run in dataset.runs:
        number, n_parts = parse_part(dataset.catalog.runs[run].part)
        rows = {line["source_row"] for line in dataset.requests(run=True).to_pylist()
                if line["run"] == run}  # fmt: skip
        assert rows <= set(range(number - 1, N_PROMPTS, n_parts)) and n_parts == 3


@STANDARD
def test_seal_says_which_parts_are_missing_and_takes_them_later(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    out = str(tmp_path / "acts")
    # A job that was queued again may ask to resume what has not begun, the first of all as well.
    for part in ("2/4", "4/4"):
        done = h.run_warm(out, model, prompts, *OPTIONS, "--part", part, "--resume")
        assert done.returncode == 0, done.stderr
    assert "2 parts of the prompts missing: 1/4, 3/4" in sealed(out)
    for part in ("1/4", "3/4"):
        done = h.run_warm(out, model, prompts, *OPTIONS, "--part", part)
        assert done.returncode == 0, done.stderr
    assert "missing" not in sealed(out)
    assert finished(h.validated(out)) == Counter(range(N_PROMPTS))
    taken = h.run_warm(out, model, prompts, *OPTIONS, "--part", "1/4")
    assert taken.returncode and "E008" in taken.stderr and "resume" in taken.stderr
    other = h.run_warm(out, model, prompts, *OPTIONS, "--part", "1/5")
    assert other.returncode and "E010 prompts.part" in other.stderr
    again = h.run_warm(out, model, prompts, *OPTIONS, "--part", "1/4", "--resume")
    assert "Every prompt of this part is finished" in again.stdout, again.stderr


@STANDARD
def test_what_parts_have_left_is_served_by_a_resume_of_all(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    out = str(tmp_path / "acts")
    assert h.run_warm(out, model, prompts, *OPTIONS, "--part", "1/3").returncode == 0
    done = h.run_warm(out, model, prompts, *OPTIONS, "--resume")
    assert done.returncode == 0, done.stderr
    assert finished(h.validated(out)) == Counter(range(N_PROMPTS))
    assert "missing" not in sealed(out)


@pytest.mark.parametrize("out", [S3, CEPH], indirect=True)
def test_a_part_has_one_run_at_a_time(out: str, model: Path, prompts: Path) -> None:
    slow = ("--engine-arg", "step_s=4")  # it does not end before a busy machine starts the second
    first = begin(out, model, prompts, "--part", "1/2", *slow, "--rows-per-shard", "4")
    run = await_rows(out, "1/2")
    second = h.run(out, model, prompts, *OPTIONS, "--part", "1/2", "--resume")
    assert second.returncode and "E010" in second.stderr and run in second.stderr
    # Also one that had looked before the first one began.
    with pytest.raises(ActdsError, match=r"E010.*part 1/2"):
        Heartbeat(open_store(out), "r-late", "w-late", "1/2")
    assert all(other != "r-late" for other, _, _ in heartbeats(open_store(out)))
    chains = read_ledger(open_store(out), read_genesis(open_store(out)).dataset).values()
    assert first.poll() is None and {state.run for state in chains} == {run}
    assert all(state.state == "open" for state in chains), "the first one is at work as before"
    kill(first)


@pytest.mark.parametrize("out", [FOLDER, CEPH], indirect=True)
def test_recover_takes_the_dead_and_leaves_the_living(out: str, model: Path, prompts: Path) -> None:
    small = ("--rows-per-shard", "4")
    dead, living = (begin(out, model, prompts, "--part", f"{k}/2", *SLOW, *small) for k in (1, 2))
    gone, there = await_rows(out, "1/2"), await_rows(out, "2/2")
    none = CliRunner().invoke(cli, ["recover", out])
    assert none.exit_code and "E010" in none.output
    kill(dead)
    done = CliRunner().invoke(cli, ["recover", out, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {run["run"]: run["outcome"] for run in document["runs"]} == {
        gone: "recovered", there: "at work"
    }  # fmt: skip
    assert document["seal"] is None
    _, said = living.communicate(timeout=120)
    assert living.returncode == 0, said
    sealed(out)
    dataset = h.validated(out)
    assert set(finished(dataset)) >= set(range(1, N_PROMPTS, 2))


@STANDARD
@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0", "01/3"])
def test_a_part_that_is_none_is_refused(part: str, model: Path, prompts: Path) -> None:
    with pytest.raises(ActdsError, match=r"E009.*part"):
        actds.write(out="nowhere", model=model, prompts=prompts, hooks="resid_post:0", part=part)
