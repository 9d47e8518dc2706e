"""Tensor-parallel ranks of a real engine on two nodes: the rows of one, and what one node lacks.

The second node is a set of namespaces: network, host name, shared memory and System V memory of
its own, with a veth pair to this machine. Each node forks its commands from a process that has
imported vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds.dataset.ledger import read_ledger
from actds.dataset.reading import read_genesis
from actds.explore.dataset import Dataset
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.server import LAUNCH
from actds_testing.tiny import make_random_model
from actds_testing.warm_engine import WarmEngine

pytestmark = [pytest.mark.engine, pytest.mark.full]
SPACE, HEAD, OTHER = "actds-node", "10.231.78.1", "10.231.78.2"
OPTIONS = ("--hooks", "resid_post:all;q:1;z:2;resid_mid:1", "--max-tokens", "6",
           "--rows-per-shard", "200", "--attention", "1", "--every", "2",
           "--attention-share", "1.0")  # fmt: skip
ENGINE = {"dtype": "float32", "block_size": 32, "max_model_len": 512, "enforce_eager": True,
          "max_num_batched_tokens": 64, "max_num_seqs": 8, "tensor_parallel_size": 2}  # fmt: skip
IMPATIENT = "from actds_writers.engines.vllm import runner; runner.NODES_TIMEOUT_S = 4"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[WarmEngine]:
    """Yield a process of another node, which shares files and nothing else with this one."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid():
        pytest.skip("network namespaces need root, ip and unshare")
    try:
        ip("netns", "add", SPACE)
        ip("link", "add", "actds-n0", "type", "veth", "peer", "name", "actds-n1", "netns", SPACE)
        ip("addr", "add", f"{HEAD}/30", "dev", "actds-n0")
        for words in (
            ("link", "set", "actds-n0", "up"),
            ("-n", SPACE, "addr", "add", f"{OTHER}/30", "dev", "actds-n1"),
            ("-n", SPACE, "link", "set", "actds-n1", "up"),
            ("-n", SPACE, "link", "set", "lo", "up"),
        ):
            ip(*words)
        script = 'hostname far-node; mount -t tmpfs none /dev/shm; exec "$@"'
        within = ("ip", "netns", "exec", SPACE, "unshare", "--uts", "--ipc", "--mount",
                  "sh", "-c", script, "sh")  # fmt: skip
        engine = WarmEngine(h.environment(), within)
        yield engine
        engine.close()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be connected here: {error.stderr!r}")
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], capture_output=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny", n_heads=4, n_kv_heads=2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = "a shared beginning that fills three blocks of the prefix cache " * 2
    records = [{"id": f"t{i}", "prompt": f"{prefix}and number {i} " + "x" * (11 * i)}
               for i in range(8)]  # fmt: skip
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vector that is added in half of the requests."""
    folder = tmp_path_factory.mktemp("edits")
    np.save(folder / "v.npy", np.random.default_rng(0).normal(size=64).astype(np.float32))
    edit = {"hook": "resid_mid.1", "op": "add", "vector": "v.npy", "strength": 2.5}
    item = {"name": "up", "edits": [edit], "requests": [f"id t{i}" for i in (1, 3, 5, 7)]}
    path = folder / "edits.json"
    path.write_text(json.dumps({"schema": "actds.interventions/1", "interventions": [item]}))
    return path


def engine_args(**options: Any) -> tuple[str, ...]:
    given = {**ENGINE, **options}
    return tuple(w for k, v in given.items() for w in ("--engine-arg", f"{k}={json.dumps(v)}"))


def head_args(port: int, **options: Any) -> tuple[str, ...]:
    joined = {"nnodes": 2, "node_rank": 0, "master_addr": HEAD, "master_port": port}
    return engine_args(**joined, **options)


class Node:
    """The second node of an engine: the command that a user starts there, in the background."""

    def __init__(
        self, elsewhere: WarmEngine, model: Path, port: int, *, told: bool = True, **options: Any
    ) -> None:
        words = ["serve", "--model", str(model), "--headless", "--nnodes", "2", "--node-rank", "1",
                 "--master-addr", HEAD, "--master-port", str(port)]  # fmt: skip
        for name, value in {**ENGINE, **options}.items():
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
        if told:
            words += ["--additional-config", '{"actds": {}}']
        # What the command line of the CPU build asks for, it has to have where workers fork, too.
        self.ended: subprocess.CompletedProcess[str] | None = None
        own = h.environment(ACTDS_FORK_WORKERS="1", VLLM_HOST_IP=OTHER,
                            GLOO_SOCKET_IFNAME="actds-n1", VLLM_LOGGING_LEVEL="INFO")  # fmt: skip
        self._run = lambda: elsewhere.run(["-c", f"{IMPATIENT}\n{LAUNCH}", *words], own, 300)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        self.ended = self._run()

    def end(self) -> subprocess.CompletedProcess[str]:
        self._thread.join(330)
        assert self.ended is not None
        return self.ended


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind((HEAD, 0))
        port = free.getsockname()[1]
    yield port


def head(out: Path, model: Path, prompts: Path, *options: str, patch: str = "") -> Any:
    reached = {"VLLM_HOST_IP": HEAD, "GLOO_SOCKET_IFNAME": "actds-n0"}
    return h.run_forked(out, model, prompts, *options, patch=patch, **reached)


def both(
    elsewhere: WarmEngine, out: Path, model: Path, prompts: Path, *options: str,
    other: dict[str, Any] | None = None, other_model: Path | None = None, told: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Run a harvest over two nodes to its end; return what the first and the second node said."""
    with free_port() as port:
        node = Node(elsewhere, other_model or model, port, told=told, **(other or {}))
        done = head(out, model, prompts, *options, *head_args(port), patch=IMPATIENT)
        if not told:  # a plain vLLM, which waits for its first node for ever
            end_all(elsewhere)
        return done, node.end()


def end_all(elsewhere: WarmEngine) -> None:
    for pid in h.descendants(elsewhere.pid):
        os.kill(pid, signal.SIGKILL)


def test_rows_of_ranks_on_two_nodes_are_those_of_one(
    elsewhere: WarmEngine, model: Path, prompts: Path, edits: Path, tmp_path: Path
) -> None:
    options = (*OPTIONS, "--intervene", str(edits))
    done, node = both(elsewhere, tmp_path / "two", model, prompts, *options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{node.stdout}\n{node.stderr}"
    assert node.returncode == 0, node.stderr  # it has ended with the first
    assert "far-node" not in done.stderr
    one = h.run_forked(tmp_path / "one", model, prompts, *options, *engine_args())
    assert one.returncode == 0, f"{one.stdout}\n{one.stderr}"
    two, one = h.validated(tmp_path / "two"), h.validated(tmp_path / "one")
    (record,) = two.runs.values()
    assert record.fields["serving.tensor_parallel"].value == 2
    assert record.fields["serving.nodes"].value == 2
    compare(two, one)
    h.compare_attention(two, one)


def compare(ours: Dataset, theirs: Dataset) -> None:
    worst = 0.0
    for hook in ours.hooks:
        mine, other = h.rows_of(ours, hook), h.rows_of(theirs, hook)
        common = sorted(set(mine) & set(other))
        assert len(common) > 300
        got, want = (np.stack([side[key] for key in common]) for side in (mine, other))
        worst = max(worst, float(h.relative_l2(got, want).max()))
    print(f"{len(common)} positions, {len(ours.hooks)} hooks: at most {worst:.2g} apart")
    assert worst < 1e-5
