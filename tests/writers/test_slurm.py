"""examples/deploy/write.sbatch in a real Slurm: what ends a task, and what happens then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actds.dataset.ledger import read_ledger
from actds.dataset.reading import read_genesis
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_testing.slurm import Cluster, slurm, slurm_lacks
from actds_writers.harvest.prepare import finished_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(slurm_lacks() is not None, reason="needs Slurm: make slurm"),
]

SBATCH = Path(__file__).parents[2] / "examples" / "deploy" / "write.sbatch"
N_PROMPTS = 16 * 12
# This machine has no GPU, and less memory than a node.
HERE = ("--gres=none", "--cpus-per-task=1", "--mem=0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as opened:
        yield opened


class Harvest:
    """Prompts in 16 parts, which a toy engine of two requests at a time answers."""

    def __init__(self, cluster: Cluster, folder: Path, step_s: float) -> None:
        site, self.out, self._cluster, self._folder = (
            toy.register(folder / "site"),
            folder / "acts",
            cluster,
            folder,
        )
        words = [{"id": f"q{n}", "prompt": "all work"} for n in range(N_PROMPTS)]
        self._environment = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "OUT": str(self.out),
            "MODEL": str(toy.write_model(folder / "toy")),
            "PROMPTS": str(h.write_prompts(folder / "prompts.jsonl", words)),
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
        }
        options = "--engine toy --hooks resid_post:0 --max-tokens 4 --rows-per-shard 16"
        slow = f"--engine-arg max_num_seqs=2 --engine-arg step_s={step_s}"
        actds = folder / "actds"
        actds.write_text(
            f'#!/bin/bash\n[ $1 = write ] && set -- "$@" {options} {slow}\n'
            f'exec {sys.executable} -m actds "$@"\n'
        )
        actds.chmod(0o755)

    def sbatch(self, *options: str) -> str:
        """Queue something with the options of this machine; return its number."""
        words = ("sbatch", "--parsable", f"--output={self._folder}/%A_%a.out", *HERE, *options)
        return self._cluster.call(*words, environment=self._environment)

    def said(self, array: str, task: int) -> str:
        path = self._folder / f"{array}_{task}.out"
        return path.read_text() if path.exists() else ""

    def n_committed(self) -> int:
        return len(list(self.out.glob("shards/*/shard.json")))

    def chain_states(self) -> set[str]:
        store = open_store(self.out)
        return {chain.state for chain in read_ledger(store, read_genesis(store).dataset).values()}

    def served(self) -> list[int]:
        """Return the rows of prompts that were answered, of the sealed and valid dataset."""
        dataset = h.validated(self.out)
        return sorted(row for run in dataset.runs for row in finished_of(dataset.catalog, run))


def await_that(condition: Callable[[], object], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def state(cluster: Cluster, array: str, task: int = 3) -> tuple[str, str]:
    """Return the state of a task, and how often it was queued again."""
    fields = cluster.jobs(array)[task]
    return fields["JobState"], fields["Restarts"]


OF_TASK_3 = list(range(2, N_PROMPTS, 16))


def test_parts_are_sealed_when_the_last_of_the_array_has_ended(
    cluster: Cluster, tmp_path: Path
) -> None:
    harvest = Harvest(cluster, tmp_path, step_s=0.2)
    array = harvest.sbatch(str(SBATCH))
    last = harvest.sbatch(f"--dependency=afterok:{array}", "--wrap", 'actds seal "$OUT"')
    await_that(harvest.n_committed)
    cluster.signal(f"{array}_2")
    await_that(lambda: "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", last), 900)
    states = {task: state(cluster, array, task) for task in range(1, 17)}
    assert states.pop(2) == ("COMPLETED", "1")
    assert set(states.values()) == {("COMPLETED", "0")}
    assert harvest.served() == list(range(N_PROMPTS))


def test_a_task_that_its_time_limit_ends_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    harvest = Harvest(cluster, tmp_path, step_s=4)
    array = harvest.sbatch("--array=3", "--time=2", "--signal=B:TERM@60", str(SBATCH))
    await_that(lambda: state(cluster, array)[1] == "1")
    assert harvest.chain_states() == {"closed"}, harvest.said(array, 3)
    await_that(lambda: state(cluster, array)[0] == "COMPLETED", 600)
    seal(harvest.out)
    assert harvest.served() == OF_TASK_3


def test_a_task_that_is_preempted_drains_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    harvest = Harvest(cluster, tmp_path, step_s=1)
    array = harvest.sbatch("--array=3", str(SBATCH))
    await_that(harvest.n_committed)
    first = harvest.sbatch("--partition=first", "--exclusive", "--wrap", "sleep 1")
    await_that(lambda: state(cluster, array)[1] == "1")
    assert harvest.chain_states() == {"closed"}, harvest.said(array, 3)
    await_that(lambda: state(cluster, array)[0] == "COMPLETED")
    assert "JobState=COMPLETED" in cluster.call("scontrol", "show", "job", first)
    seal(harvest.out)
    assert harvest.served() == OF_TASK_3


def test_a_task_whose_node_is_gone_is_queued_again_by_slurm(
    cluster: Cluster, tmp_path: Path
) -> None:
    harvest = Harvest(cluster, tmp_path, step_s=1)
    array = harvest.sbatch("--array=3", str(SBATCH))
    await_that(harvest.n_committed)
    cluster.call("scontrol", "update", "NodeName=localhost", "State=down", "Reason=test")
    await_that(lambda: state(cluster, array)[1] == "1")
    await_that(lambda: state(cluster, array)[0] == "COMPLETED")
    seal(harvest.out)
    assert harvest.served() == OF_TASK_3


def test_a_task_that_somebody_cancelled_stays_ended_until_it_is_submitted(
    cluster: Cluster, tmp_path: Path
) -> None:
    harvest = Harvest(cluster, tmp_path, step_s=1)
    array = harvest.sbatch("--array=3", str(SBATCH))
    await_that(harvest.n_committed)
    cluster.call("scancel", f"{array}_3")
    await_that(lambda: state(cluster, array)[0] == "CANCELLED")
    again = harvest.sbatch("--array=3", str(SBATCH))
    await_that(lambda: state(cluster, again)[0] == "COMPLETED")
    assert state(cluster, array) == ("CANCELLED", "0")
    seal(harvest.out)
    assert harvest.served() == OF_TASK_3
