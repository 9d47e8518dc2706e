"""Interruptions and failures of a real harvest: a clear error, nothing committed lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import actds
from actds.dataset.reading import read_dataset
from actds.errors import ActdsError
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.faulty_disk import wait_until
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

OPTIONS = ("--hooks", "resid_post:1", *h.TINY, *h.EAGER, "--engine-arg", "max_model_len=512")
ALONE = (*OPTIONS, *h.ALONE)
SLOW = ("--engine-arg", "max_num_seqs=2", "--rows-per-shard", "64", "--max-tokens", "48")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", dtype="float32", tokenizer=True
    )


def many_prompts(path: Path, n: int) -> Path:
    return h.write_prompts(path, [{"id": f"m{i}", "prompt": f"number {i} " * 9} for i in range(n)])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + h.TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the harvest did not come that far"
        time.sleep(0.02)


def n_shards(out: Path) -> int:
    return len(list(out.glob("shards/*/shard.json")))


def start(
    out: Path, model: Path, prompts: Path, *options: str, **extra: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        h.command(out, model, prompts, *options),
        env=h.environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.full
def test_an_interrupted_harvest_is_sealed_and_resumes_without_redoing(
    model: Path, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 500)
    process = start(out, model, prompts, *OPTIONS, *SLOW)
    # Beside a busy disk the engine may be far ahead of the second commit.
    wait_for(lambda: n_shards(out) >= 2, process)
    # What a terminal does: the signal goes to every process of the group.
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=h.TIMEOUT_S)
    assert process.returncode == 1, stderr
    assert "--resume" in stderr
    first = h.validated(out)
    reasons = first.requests()["finish_reason"].to_pylist()
    assert "abort" in reasons
    kept = {r["external_id"] for r in first.requests().to_pylist()
            if r["finish_reason"] == "length"}  # fmt: skip
    assert 0 < len(kept) < 500

    resumed = h.harvest_alone(out, model, prompts, *OPTIONS, "--max-tokens", "48", "--resume")
    requests = resumed.requests(run=True).to_pylist()
    second = [run for run in resumed.runs if run not in first.runs]
    again = {r["external_id"] for r in requests if r["run"] in second}
    assert len(resumed.runs) == 2
    assert again.isdisjoint(kept)
    assert again | kept == {f"m{i}" for i in range(500)}

    nothing = h.run(out, model, prompts, *OPTIONS, "--max-tokens", "48", "--resume")
    assert nothing.returncode == 0
    assert "finished" in nothing.stdout
    other = h.run(out, model, prompts, *OPTIONS, "--max-tokens", "5", "--resume")
    assert other.returncode == 2
    assert "E010 sampling.max_tokens" in other.stderr


@pytest.mark.full
def test_a_signal_to_every_process_of_a_job_leaves_what_was_computed(
    model: Path, tmp_path: Path
) -> None:
    """Slurm's at a time limit, or a supervisor's: vLLM's processes end at once, ours do not."""
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 100)
    process = start(out, model, prompts, *ALONE, *SLOW)
    wait_for(lambda: n_shards(out) >= 2, process)
    for pid in (process.pid, *h.descendants(process.pid), process.pid):
        os.kill(pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=h.TIMEOUT_S)
    assert process.returncode in (1, 4) and "--resume" in stderr, stderr
    first = h.validated(out)
    assert "still behind" not in stderr and first.n_rows, stderr
    resumed = h.harvest_alone(out, model, prompts, *OPTIONS, "--max-tokens", "48", "--resume")
    assert len(resumed.runs) == 2


def test_a_killed_writer_ends_the_harvest_with_what_was_committed(
    model: Path, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 400)
    process = start(out, model, prompts, *ALONE, *SLOW, **h.ONE_PROCESS)
    wait_for(lambda: n_shards(out) >= 3, process)
    os.kill(writer_of(out), signal.SIGKILL)
    _, stderr = process.communicate(timeout=h.TIMEOUT_S)
    assert process.returncode == 4
    assert "E502" in stderr
    assert "Traceback" not in stderr
    dataset = h.validated(out)
    spans = dataset.spans().to_pylist()
    lost = [s for s in spans if s["disposition"] == "aborted" and s["step"] is not None]
    assert dataset.n_rows >= 3 * 64
    assert {s["reason"] for s in lost} == {"writer_ended"}


@pytest.mark.full
def test_a_killed_engine_ends_the_harvest_with_what_was_committed(
    model: Path, tmp_path: Path
) -> None:
    """As when memory runs out: vLLM's client hears of it, and would wait for ever."""
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 2000)
    process = start(out, model, prompts, *OPTIONS, *SLOW, "--entropy")
    wait_for(lambda: n_shards(out) >= 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    [engine] = [pid for pid in children
                if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::")]  # fmt: skip
    os.kill(int(engine), signal.SIGKILL)
    try:
        _, stderr = process.communicate(timeout=h.FORKED_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 4
    assert "E504 engine" in stderr and "Traceback" not in stderr
    dataset = h.validated(out)
    assert dataset.n_rows >= 2 * 64
    assert "unfinished" in dataset.requests()["finish_reason"].to_pylist()


def test_an_engine_whose_command_was_killed_ends_its_run_in_order(
    model: Path, tmp_path: Path
) -> None:
    """As an out-of-memory killer does: vLLM's engine core would wait for requests for ever."""
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 2000)
    process = start(out, model, prompts, *OPTIONS, *SLOW)
    wait_for(lambda: n_shards(out) >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=h.FORKED_TIMEOUT_S)  # until nobody has its standard output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def states() -> set[str]:
        return {chain.state for chain in read_dataset(open_store(out)).chains.values()}

    wait_until(lambda: states() == {"closed"}, "writer and census")  # which have an output apart
    [run] = actds.recover(out).runs
    assert run.outcome == "accounted"
    assert h.validated(out).n_rows >= 2 * 64


def writer_of(out: Path) -> int:
    """Return the writer process of a dataset."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    candidates = [int(line.split()[0]) for line in listed.splitlines()
                  if "actds_writers.writer_process" in line]  # fmt: skip
    [found] = [pid for pid in candidates if writes(pid, out)]
    return found


@pytest.mark.full
def test_a_stalled_writer_under_a_drop_policy_costs_recorded_steps_only(tmp_path: Path) -> None:
    # Wide rows, so that a few steps fill the ring however slow the machine is.
    model = make_tiny_model(tmp_path / "wide", hidden=512, dtype="float32", tokenizer=True)
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 400)
    options = ("--hooks", "resid_post:all", *h.TINY, *h.EAGER, "--engine-arg", "max_model_len=512",
               "--engine-arg", "max_num_seqs=16", "--rows-per-shard", "64", "--max-tokens", "48",
               "--overflow", "drop_newest", "--ring-mib", "1",
               "--engine-arg", "max_num_batched_tokens=128", *h.ALONE)  # fmt: skip
    process = start(out, model, prompts, *options, **h.ONE_PROCESS)
    wait_for(lambda: n_shards(out) >= 2, process)
    writer = writer_of(out)
    os.kill(writer, signal.SIGSTOP)
    time.sleep(8)
    os.kill(writer, signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=h.TIMEOUT_S)
    assert process.returncode == 0, stderr
    dataset = h.validated(out)
    drops = dataset.drops().to_pylist()
    lost = sum(drop["stop"] - drop["start"] for drop in drops)
    assert lost > 0
    assert f"{lost:,} dropped" in stdout
    # The first losses may come while the transfer has not met the full ring yet.
    reasons = {drop["drop_reason"] for drop in drops}
    assert "queue_full" in reasons <= {"queue_full", "dma_backpressure"}
    full = [drop for drop in drops if drop["drop_reason"] == "queue_full"]
    # The ring may have been emptied a moment before the transfer that waits for it wakes up.
    assert sum(drop["queue_depth_stage2"] > 0 for drop in full) > len(full) / 2
    # The writer waits, and what is behind it; the engine never does.
    assert "staging" not in dataset.stalls()["stage"].to_pylist()
    assert set(dataset.requests()["finish_reason"].to_pylist()) == {"length"}


def writes(pid: int, out: Path) -> bool:
    """Return whether a process holds the lock of a dataset."""
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        return any(os.readlink(fd) == str(out) for fd in descriptors)
    except OSError:
        return False


@pytest.mark.full
def test_a_full_disk_is_a_clear_error_and_loses_nothing_committed(
    model: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        prompts = many_prompts(tmp_path / "p.jsonl", 600)
        hooks = ("--hooks", "resid_post:all", *h.TINY, *h.EAGER, "--max-tokens", "64",
                 "--engine-arg", "max_model_len=512", "--rows-per-shard", "1024")  # fmt: skip
        done = h.run_alone(disk / "acts", model, prompts, *hooks)
        assert done.returncode == 4, done.stderr
        assert "E503" in done.stderr
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        dataset = h.validated(disk / "acts")
        assert dataset.n_rows >= 1024
    finally:
        subprocess.run(["umount", str(disk)], check=True)


BROKEN_HOOK = """
import sys
from actds_writers.capture import op as capture
calls = 0
def forgetful(*tensors):
    global calls
    calls += 1
    if calls < 40:
        real(*tensors)
real = capture.capture_and_read
capture.library.impl("capture_and_read", forgetful, "CPU")
from actds.cli import main
sys.argv = ["actds", *sys.argv[1:]]
sys.exit(main())
"""


def test_rows_that_differ_from_the_schedule_stop_the_harvest(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 30)
    arguments = h.command(out, model, prompts, *ALONE, *SLOW)[3:]
    environment = h.environment(**h.ONE_PROCESS)
    done = h.warm_engine().run(["-c", BROKEN_HOOK, *arguments], environment, h.TIMEOUT_S)
    assert done.returncode == 4, done.stderr
    assert re.search(r"E501 step \d+: 0 rows at one hook; expected \d+ scheduled rows", done.stderr)
    assert h.validated(out).n_rows > 0


INERT = """
import sys
from importlib.metadata import entry_points
[entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "actds"]
before = set(sys.modules)
entry.load()()
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"torch", "vllm", "pyarrow", "zarr"}, loaded
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker
for function in (Worker.load_model, Worker.execute_model, Scheduler.schedule,
                 Scheduler.add_request, Scheduler._free_request, Scheduler.__init__):
    assert "actds_writers" not in function.__code__.co_filename, function
"""


def test_the_plugin_is_inert_outside_a_harvest() -> None:
    environment = {k: v for k, v in h.environment().items() if k != "ACTDS_LINK"}
    done = subprocess.run(
        [sys.executable, "-c", INERT], env=environment, capture_output=True, text=True,
        timeout=h.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_an_engine_that_cannot_start_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 2)
    done = h.run_alone(out, model, prompts, *OPTIONS, "--engine-arg", "quantization=awq")
    assert done.returncode == 4
    assert "E504 engine" in done.stderr
    assert not out.exists()


@pytest.mark.full
def test_an_unsealed_dataset_does_not_open(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "acts", many_prompts(tmp_path / "p.jsonl", 4000)
    process = start(out, model, prompts, *ALONE, *SLOW, **h.ONE_PROCESS)
    wait_for(lambda: n_shards(out) >= 2, process)
    with pytest.raises(ActdsError, match="E306"):
        actds.open(out)
    second = h.run(out, model, prompts, *ALONE, *SLOW, "--resume")
    assert second.returncode == 2
    assert "E010" in second.stderr
    # The command itself is killed: writer and census end the run on their own.
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=h.TIMEOUT_S)
    deadline = time.monotonic() + h.TIMEOUT_S
    while subprocess.run(
        [sys.executable, "-m", "actds", "seal", str(out)], capture_output=True
    ).returncode:
        assert time.monotonic() < deadline, "the chains were never closed"
        time.sleep(1.0)
    assert h.validated(out).n_rows >= 2 * 64
