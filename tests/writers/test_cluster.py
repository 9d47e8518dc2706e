"""A harvest on a Ray cluster: nodes are killed or stand still, and every prompt is served once."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actds import ActdsError
from actds.explore.dataset import Dataset
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing import toy
from actds_validators.validate.validation import validate
from actds_writers.config import WriteSettings
from actds_writers.harvest.prepare import finished_of

pytestmark = pytest.mark.full
N_PROMPTS = 300  # those of an engine that starts late are not served before it begins
PROMPTS = [{"id": f"q{n}", "prompt": "all work and no play makes a dull toy"[: 2 + n % 30]}
           for n in range(N_PROMPTS)]  # fmt: skip
OPTIONS = ("--engine", "toy", "--hooks", "resid_post:0", "--max-tokens", "4", "--rows-per-shard",
           "16", "--engine-arg", "max_num_seqs=2", "--engine-arg", "step_s=0.1",
           "--executor", "ray")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the toy in this process and in those it starts."""
    site = toy.register(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(str(site))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def cluster(installed: None) -> Iterator[Any]:
    """Yield a cluster of this machine: a head that serves nothing."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture(params=["folder", "ceph"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "acts")
    root: str = request.getfixturevalue("ceph_root")
    return root


@pytest.fixture
def nodes(cluster: Any, out: str) -> Iterator[list[Any]]:
    """Yield four nodes, each with room for one engine, in the environment of the store."""
    made = [cluster.add_node(num_cpus=1) for _ in range(4)]
    yield made
    for node in made:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def processes(node: Any) -> list[int]:
    """Return all processes of a node: those of Ray, of the engine, of its writer and census."""
    roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [pid for root in roots for pid in (root, *h.descendants(root))]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def begin(cluster: Any, out: str, model: Path, prompts: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        h.command(out, model, prompts, *OPTIONS),
        env=h.environment(RAY_ADDRESS=cluster.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_writers(out: str, n_writers: int, command: subprocess.Popen[str]) -> None:
    """Wait until so many engines have shards: each has prompts that are handed out again."""
    deadline = time.monotonic() + 180
    while len({path.split("/")[1].rpartition("-")[0] for path in shards_of(out)}) < n_writers:
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)


def shards_of(out: str) -> list[str]:
    store = open_store(out)
    return store.list("shards") if store.exists("actds.json") else []


def ended(command: subprocess.Popen[str], out: str) -> tuple[Dataset, str]:
    """Return the dataset of a command that succeeds, and what it said."""
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 0, said
    return h.validated(out), said


def whole(dataset: Dataset) -> Counter[object]:
    """Return how often each prompt was served with every row it owes."""
    return Counter(p for run in dataset.runs for p in finished_of(dataset.catalog, run))


def test_nodes_that_die_or_stand_still_cost_no_prompt_and_serve_none_twice(
    cluster: Any, nodes: list[Any], out: str, model: Path, prompts: Path
) -> None:
    command = begin(cluster, out, model, prompts)
    await_writers(out, 4, command)
    stopped = [pid for root in processes(nodes[2]) for pid in h.descendants(root)]
    signal_all(stopped, signal.SIGSTOP)
    for node in nodes[:2]:
        signal_all(processes(node), signal.SIGKILL)
        cluster.worker_nodes.discard(node)
        time.sleep(1)
    signal_all(stopped, signal.SIGCONT)
    dataset, said = ended(command, out)
    left = [finding.line() for finding in validate(out).warnings if finding.code == "E105"]
    assert not left, "nothing of the dead runs is left"
    assert whole(dataset) == Counter(range(N_PROMPTS))
    assert said.count("is gone") == said.count("handed out again") == 2, said
    states = Counter(chain.state for chain in dataset.catalog.chains.values())
    assert states["open"] == 0 and states["fenced"] >= 1, said


@pytest.mark.parametrize("wrong", [{"engines": 2}, {"ray_options": {"num_cpus": 2}}])
def test_options_of_a_cluster_are_for_a_cluster(wrong: dict[str, object]) -> None:
    with pytest.raises(ActdsError, match=r"E009.*executor"):
        WriteSettings.of(
            {"out": "x", "model": Path(), "prompts": "p", "hooks": "resid_post:0", **wrong}
        )


def test_engines_that_find_no_place_are_refused(
    cluster: Any, model: Path, prompts: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        h.command(tmp_path / "acts", model, prompts, *OPTIONS),
        env=h.environment(RAY_ADDRESS=cluster.address),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "E009 --ray-option: no place" in done.stderr, done.stderr
    assert not (tmp_path / "acts").exists()
