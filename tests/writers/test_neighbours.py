"""Several programs at one dataset without a lock: what one of them does ends no other.

Real commands of the toy engine, on an S3-speaking server and in a folder where ``flock`` sees
nobody, as one that several machines share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import actds
from actds.dataset import heartbeat
from actds.dataset.ledger import Chain, read_ledger
from actds.dataset.reading import read_genesis
from actds.errors import ActdsError
from actds.store import layout, open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_testing.recovery import accounts, clean
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.harvest import recover as recovery
from actds_writers.harvest.processes import Pipeline
from actds_writers.harvest.recover import recover

pytestmark = pytest.mark.standard

N_PROMPTS, GENERATED = 40, 6
WITHOUT_LOCKS = """
import fcntl, os, time
fcntl.flock = lambda *arguments: None
mkdir = os.mkdir
def meet(path, *arguments, **named):
    # Commands that are told of a number of others make the folder when all of them are here.
    wanted = int(os.environ.get("TEST_MEET", "0"))
    if wanted and os.fspath(path).endswith("/acts"):
        here = os.environ["TEST_MEET_AT"]
        open(f"{here}/{os.getpid()}", "w").close()
        while len(os.listdir(here)) < wanted:
            time.sleep(0.01)
    return mkdir(path, *arguments, **named)
os.mkdir = meet
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the toy in the commands, and take the locks from them and from this process."""
    site = toy.register(tmp_path / "site")
    (site / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("fcntl.flock", lambda *arguments: None)


@pytest.fixture(params=["object store", "shared folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "object store":
        return str(request.getfixturevalue("s3_root"))
    return str(tmp_path / "acts")


@pytest.fixture
def line(place: str, tmp_path: Path) -> list[str]:
    """Return the command of a harvest that takes some seconds."""
    model = toy.write_model(tmp_path / "model")
    prompts = write_prompts(tmp_path, N_PROMPTS)
    words = ["--engine", "toy", "--hooks", "resid_post:0", "--max-tokens", str(GENERATED)]
    words += ["--engine-arg", "max_num_seqs=2", "--engine-arg", "step_s=0.1"]
    return h.command(place, model, prompts, *words, "--rows-per-shard", "64")


def write_prompts(folder: Path, n: int) -> Path:
    named = [{"id": f"q{number}", "prompt": "all work"} for number in range(n)]
    return h.write_prompts(folder / "prompts.jsonl", named)


def started(line: list[str], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line, env=h.environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def chains(place: str) -> dict[str, str]:
    store = open_store(place)
    ledger = read_ledger(store, read_genesis(store).dataset)
    return {chain: state.state for chain, state in ledger.items()}


def until_it_writes(place: str, process: subprocess.Popen[str]) -> None:
    store = open_store(place)
    while not any(path.startswith("shards/") for path in store.list()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def check_whole(place: str, process: subprocess.Popen[str]) -> None:
    """Check that a harvest ended well, with every row."""
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, f"{output}\n{errors}"
    check_rows(place)


def check_rows(place: str) -> None:
    dataset = clean(place, warnings=frozenset())
    assert len(dataset.requests(run=True)) == N_PROMPTS
    lengths = dataset.requests().select(["prompt_len", "generated_len"]).to_pylist()
    assert dataset.n_rows == sum(r["prompt_len"] + r["generated_len"] - 1 for r in lengths)


def test_of_several_new_harvests_one_is_whole_and_the_others_end_nothing(
    place: str, line: list[str], tmp_path: Path
) -> None:
    (tmp_path / "meet").mkdir()
    together = {"TEST_MEET": "3", "TEST_MEET_AT": str(tmp_path / "meet")}
    writers = [started(line, **together) for _ in range(3)]
    said = {writer: "\n".join(writer.communicate(timeout=300)) for writer in writers}
    [winner] = [writer for writer in writers if writer.returncode == 0]
    for loser in said.keys() - {winner}:
        errors = said[loser]
        assert "E309" in errors
        living = "is not sealed: E010" in errors and "may still write" in errors
        # Before the winner has opened a chain there is nothing that could be sealed, and after
        # its end everything is.
        early = "is not sealed: E305 ledger: no chain" in errors
        assert living or early or "is not sealed" not in errors, errors
    check_rows(place)
    assert set(chains(place).values()) == {"closed"}
    assert len(chains(place)) == 2  # the losers left nothing there


def test_what_is_refused_ends_nobody(place: str, line: list[str], tmp_path: Path) -> None:
    """A resume with other settings, one with the same, and a recovery, beside a live harvest."""
    write_prompts(tmp_path, 100 * N_PROMPTS)
    harvest = started(line)
    until_it_writes(place, harvest)
    before = chains(place)
    assert set(before.values()) == {"open"}
    other = ["9" if word == str(GENERATED) else word for word in line]
    hooks = ["resid_post:1" if word == "resid_post:0" else word for word in line]
    refused = {
        "sampling.max_tokens": started([*other, "--resume"]),
        "--hooks": started([*hooks, "--resume"]),
        "run r-": started([*line, "--resume"]),
        "may still write": started([sys.executable, "-m", "actds", "recover", place, "--clear"]),
    }
    for says, process in refused.items():
        _, errors = process.communicate(timeout=900)
        assert process.returncode != 0 and "E010" in errors and says in errors, errors
    assert harvest.poll() is None
    assert chains(place) == before
    harvest.send_signal(signal.SIGTERM)
    _, errors = harvest.communicate(timeout=900)
    assert "E308" not in errors, errors
    dataset = clean(place, warnings=frozenset())
    assert set(chains(place).values()) == {"closed"}
    spans = dataset.spans().to_pylist()
    assert {s["disposition"] for s in spans if s["step"] is not None} == {"captured"}


def test_a_killed_harvest_is_recovered_at_once_and_resumed_to_the_end(
    place: str, line: list[str]
) -> None:
    harvest = started(line)
    until_it_writes(place, harvest)
    h.kill(harvest)
    resumed = started([*line, "--resume"])
    _, errors = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, errors
    dataset = clean(place)
    finished = dataset.requests(run=True).to_pylist()
    assert {r["external_id"] for r in finished if r["finish_reason"] == "length"} == {
        f"q{n}" for n in range(N_PROMPTS)
    }
    assert set(chains(place).values()) == {"closed", "fenced"}


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take every process but this one for one of another machine."""
    monkeypatch.setattr(heartbeat, "_machine", lambda: "another machine")
    yield


def left_of(place: str) -> list[str]:
    """Return the files that no record names, temporary ones too."""
    return [path for path, _ in recovery._unreachable(open_store(place))]  # noqa: SLF001


def stop_within_a_shard(place: str, pipeline: Pipeline, engine: SyntheticEngine) -> list[str]:
    """Stop writer and census when files of a shard are there and its record is not; return them."""
    for number in range(400):
        engine.request(number)
        for process in pipeline.processes.values():
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.02)
        half = [path for path in left_of(place) if path.startswith("shards/")]
        if half:
            return half
        for process in pipeline.processes.values():
            os.kill(process.pid, signal.SIGCONT)
    raise AssertionError("a shard is never seen half")


@pytest.mark.usefixtures("elsewhere")
def test_what_a_stalled_run_left_is_removed_and_it_still_ends_at_the_fence_when_it_comes_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SILENCE_S", 1.5)
    pipeline, store = pipeline_for(place), open_store(place)
    try:
        engine = SyntheticEngine(pipeline)
        while not store.exists("actds.json"):
            time.sleep(0.1)
        half = stop_within_a_shard(place, pipeline, engine)
        done = recover(place)
        assert [run.outcome for run in done.runs] == ["recovered"] and half
        other = layout.manifest_path("w-of-nobody-known-000000")
        store.put_new(other, [b"stays"])
        recovery.clear_ended(store, done.runs)
        assert {path for path in left_of(place) if "/.tmp-" not in path} == {other}
        store.remove(other)
        kept = accounts(place)
        clean(place, warnings=frozenset())
        for process in pipeline.processes.values():
            os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(ActdsError, match=r"E308.*a fence: process \d+ on .* no sign of life"):
            for number in range(400, 1000):
                engine.request(number)
                pipeline.poll()
        engine.close()
    finally:
        pipeline.__exit__()
    assert accounts(place) == kept
    clean(place)


@pytest.mark.usefixtures("elsewhere")
def test_a_process_of_another_machine_is_ended_only_when_it_is_silent(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_for(place)
    processes = [process.pid for process in pipeline.processes.values()]
    try:
        engine = SyntheticEngine(pipeline)
        for number in range(20):
            engine.request(number)
        engine.drain(pipeline)
        while len(chains(place)) < 2:
            time.sleep(0.1)
        before, lines = chains(place), list[str]()
        with pytest.raises(ActdsError, match=r"E010.* run r-test, which process \d+ on "):
            recover(place, say=lines.append)  # an idle engine: only its heart beats
        assert chains(place) == before and "Watching run r-test" in lines[0]
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(recovery, "SILENCE_S", 1.5)
        [found] = recover(place).runs
        assert found.outcome == "recovered"
        kept = accounts(place)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(ActdsError, match=r"E308.*a fence: process \d+ on .* no sign of life"):
            for number in range(20, 600):
                engine.request(number)
                pipeline.poll()
        engine.close()
    finally:
        pipeline.__exit__()
    assert accounts(place) == kept
    clean(place)


def test_a_chain_of_this_process_is_gone_when_nobody_has_it_any_more(place: str) -> None:
    pipeline = pipeline_for(place)
    engine = SyntheticEngine(pipeline)
    engine.request(0)
    engine.drain(pipeline)
    engine.close()
    pipeline.finish("finished")
    pipeline.__exit__()
    store = open_store(place)
    chain = Chain.begin(store, read_genesis(store).dataset, "r-test", "tool", "test")
    with pytest.raises(ActdsError, match=f"E010.*process {os.getpid()} on"):
        recover(place)
    del chain
    assert recover(place).seal is not None
    assert not [path for path in store.list() if path.startswith("journal/")]
    assert actds.open(place).n_rows
