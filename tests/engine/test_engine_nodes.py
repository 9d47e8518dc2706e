"""Tensor-parallel ranks of a real engine on two nodes: the rows of one, and what one node lacks.

The second node is a set of namespaces: network, host name, shared memory and System V memory of
its own, with a veth pair to this machine. Each node forks its commands from a process that has
imported vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.server import LAUNCH, Server
from actds_testing.tiny import make_random_model
from actds_testing.warm_engine import WarmEngine

pytestmark = [pytest.mark.engine, pytest.mark.full]
SPACE, HEAD, OTHER = "actds-node", "10.231.78.1", "10.231.78.2"
OPTIONS = ("--hooks", "resid_post:all;q:1;z:2;resid_mid:1", "--max-tokens", "6",
           "--rows-per-shard", "200", "--attention", "1", "--every", "2",
           "--attention-share", "1.0")  # fmt: skip
DRAWN = ("--overflow", "thin", "--keep", "position 0-8: 1; decode: 0.75; 0.25")
ENGINE = {"dtype": "float32", "block_size": 32, "max_model_len": 512, "enforce_eager": True,
          "max_num_batched_tokens": 64, "max_num_seqs": 8, "tensor_parallel_size": 2}  # fmt: skip
REACHED = {"VLLM_HOST_IP": HEAD, "GLOO_SOCKET_IFNAME": "actds-n0"}
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
        h.warm_engine()  # both import vLLM at the same time
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
    names = ("t", "up")
    records = [
        {"id": f"{names[i % 2]}{i}", "prompt": f"{prefix}and number {i} " + "x" * (11 * i)}
        for i in range(8)
    ]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vector that is added in half of the requests."""
    folder = tmp_path_factory.mktemp("edits")
    np.save(folder / "v.npy", np.random.default_rng(0).normal(size=64).astype(np.float32))
    edit = {"hook": "resid_mid.1", "op": "add", "vector": "v.npy", "strength": 2.5}
    item = {"name": "up", "edits": [edit], "requests": ["id up*"]}
    path = folder / "edits.json"
    path.write_text(json.dumps({"schema": "actds.interventions/1", "interventions": [item]}))
    return path


def engine_args(**options: Any) -> tuple[str, ...]:
    given = {**ENGINE, **options}
    return tuple(w for k, v in given.items() for w in ("--engine-arg", f"{k}={json.dumps(v)}"))


def head_args(port: int, **options: Any) -> tuple[str, ...]:
    joined = {"nnodes": 2, "node_rank": 0, "master_addr": HEAD, "master_port": port}
    return engine_args(**joined, **options)


def serve_words(**options: Any) -> list[str]:
    """Return the engine's options as those of ``vllm serve``."""
    words: list[str] = []
    for name, value in {**ENGINE, **options}.items():
        option = f"--{name.replace('_', '-')}"
        words += [option, str(value)] if not isinstance(value, bool) else [option] * value
    return words


class Node:
    """The second node of an engine: the command that a user starts there, in the background."""

    def __init__(
        self, elsewhere: WarmEngine, model: Path, port: int, *, told: bool = True, **options: Any
    ) -> None:
        words = ["serve", "--model", str(model), "--headless", *serve_words(**options),
                 "--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--master-port",
                 str(port)]  # fmt: skip
        if told:
            words += ["--additional-config", '{"actds": {}}']
        self.ended: subprocess.CompletedProcess[str] | None = None
        own = h.environment(ACTDS_FORK_WORKERS="1", VLLM_HOST_IP=OTHER,
                            GLOO_SOCKET_IFNAME="actds-n1", VLLM_LOGGING_LEVEL="INFO")  # fmt: skip
        self._run = lambda: elsewhere.run(["-c", f"{IMPATIENT}\n{LAUNCH}", *words], own, 400)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.ended = self._run()
        except subprocess.TimeoutExpired as late:
            print(late.stdout, late.stderr)

    def end(self) -> subprocess.CompletedProcess[str]:
        self._thread.join(430)
        assert self.ended is not None
        return self.ended


@contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind((HEAD, 0))
        port = free.getsockname()[1]
    yield port


def head(out: Path, model: Path, prompts: Path, *options: str, patch: str = "") -> Any:
    return h.run_forked(out, model, prompts, *options, patch=patch, **REACHED)


def both(
    elsewhere: WarmEngine, out: Path, model: Path, prompts: Path, *options: str,
    other: dict[str, Any] | None = None, ours: dict[str, Any] | None = None,
    other_model: Path | None = None, told: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Run a harvest over two nodes to its end; return what the first and the second node said."""
    with free_port() as port:
        node = Node(elsewhere, other_model or model, port, told=told, **(other or {}))
        done = head(
            out, model, prompts, *options, *head_args(port, **(ours or {})), patch=IMPATIENT
        )
        if done.returncode and not told:  # a plain vLLM, which waits for its first node for ever
            end_all(elsewhere)
        return done, node.end()


def end_all(elsewhere: WarmEngine) -> None:
    for pid in h.descendants(elsewhere.pid):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "eager", "least"),
    [
        pytest.param((*OPTIONS, "--intervene", "EDITS"), True, 1400, id="edits, attention"),
        pytest.param((*OPTIONS[:6], "--entropy", *DRAWN), False, 20, id="compiled, drawn"),
    ],
)
def test_rows_of_ranks_on_two_nodes_are_those_of_one(
    options: tuple[str, ...], eager: bool, least: int, elsewhere: WarmEngine, model: Path,
    prompts: Path, edits: Path, tmp_path: Path,
) -> None:  # fmt: skip
    options = tuple(str(edits) if word == "EDITS" else word for word in options)
    mode = {"enforce_eager": eager}
    two_nodes = both(elsewhere, tmp_path / "two", model, prompts, *options, ours=mode, other=mode)
    for done in two_nodes:  # the second has ended with the first
        assert done.returncode == 0, "\n".join(done.stderr for done in two_nodes)
    done = h.run_forked(tmp_path / "one", model, prompts, *options, *engine_args(**mode))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    two, one = h.validated(tmp_path / "two"), h.validated(tmp_path / "one")
    (record,) = two.runs.values()
    assert record.fields["serving.tensor_parallel"].value == 2
    assert record.fields["serving.nodes"].value == 2
    compare(two, one, least)
    if "--attention" in options:
        h.compare_attention(two, one)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param({"told": False}, "E506 nodes: .*nothing of rank 1 of another", id="plain"),
        pytest.param({"other": {"max_num_seqs": 4}},
                     "E012 nodes serving.max_num_seqs: 4 at rank 1 on far-node; expected 8",
                     id="option"),
        pytest.param({"other_model": True}, "E012 nodes weights: .* at rank 1 on far-node",
                     id="weights"),
    ],
)  # fmt: skip
def test_a_node_that_is_not_as_the_first_is_refused_before_weights_are_loaded(
    other: dict[str, Any], said: str, elsewhere: WarmEngine, model: Path, prompts: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    if "other_model" in other:
        from safetensors.numpy import load_file, save_file

        copy = shutil.copytree(model, tmp_path / "tiny")
        (weights,) = copy.glob("*.safetensors")
        save_file({name: 1.01 * rows for name, rows in load_file(weights).items()}, weights)
        other = {"other_model": copy}
    done, node = both(elsewhere, tmp_path / "acts", model, prompts, *OPTIONS, **other)
    assert done.returncode and re.search(said, done.stderr), f"{done.stderr}\n{node.stderr}"
    assert not (tmp_path / "acts").exists()


def test_a_node_that_dies_ends_the_run_and_what_was_committed_is_there_when_it_resumes(
    elsewhere: WarmEngine, model: Path, tmp_path: Path
) -> None:
    out, n = tmp_path / "acts", 40
    records = [{"id": f"m{i}", "prompt": f"number {i} " * 9} for i in range(n)]
    prompts = h.write_prompts(tmp_path / "p.jsonl", records)
    options = ("--hooks", "resid_post:1,3;z:1", "--max-tokens", "24", "--rows-per-shard", "64")
    ended: list[Any] = []
    with free_port() as port:
        node = Node(elsewhere, model, port, max_num_seqs=2)
        words = (*options, *head_args(port, max_num_seqs=2))
        harvest = threading.Thread(target=lambda: ended.append(head(out, model, prompts, *words)))
        harvest.start()
        deadline = time.monotonic() + 300
        while len(list(out.glob("shards/*/shard.json"))) < 2:
            assert harvest.is_alive() and time.monotonic() < deadline, ended
            time.sleep(0.1)
        end_all(elsewhere)
        harvest.join()
    print(ended[0].returncode, ended[0].stderr)
    assert ended[0].returncode and re.search(r"E5\d\d", ended[0].stderr), ended[0].stderr
    assert node.end().returncode
    first = h.validated(out)
    kept = {
        r["external_id"]
        for r in first.requests(run=True).to_pylist()
        if r["finish_reason"] == "length"
    }
    assert first.n_rows and len(kept) < n
    done, _ = both(elsewhere, out, model, prompts, *options, "--resume", other={"max_num_seqs": 2},
                   ours={"max_num_seqs": 2})  # fmt: skip
    assert done.returncode == 0, done.stderr
    dataset = h.validated(out)
    served = Counter(
        r["external_id"]
        for r in dataset.requests(run=True).to_pylist()
        if r["finish_reason"] == "length"
    )
    assert served == Counter(f"m{i}" for i in range(n))
    assert len(dataset.runs) == 2 and dataset.catalog.is_sealed


def test_a_server_over_two_nodes_is_captured(
    elsewhere: WarmEngine, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    capture = {"out": str(out), "hooks": "resid_post:all;z:1", "rows_per_shard": 64}
    with free_port() as port:
        words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", HEAD]
        words += ["--master-port", str(port), "--shutdown-timeout", "120"]
        words += serve_words(load_format="auto")
        node = Node(elsewhere, model, port, load_format="auto")
        server = Server(model, tmp_path / "log", capture, *words, ACTDS_FORK_WORKERS="1", **REACHED)
        try:
            for text in ("one two three", "a longer prompt of more words than that"):
                server.post("/v1/completions", {"prompt": text, "max_tokens": 8, "temperature": 0})
            assert server.stop() == 0, server.log.read_text()
        finally:
            server.kill()
        node.end()
    actds.seal(out)
    dataset = h.validated(out)
    assert len(dataset.requests()) == 2 and dataset.n_rows
    (record,) = dataset.runs.values()
    assert record.fields["serving.nodes"].value == 2


def compare(ours: Dataset, theirs: Dataset, least: int) -> None:
    worst = 0.0
    for hook in ours.hooks:
        mine, other = h.rows_of(ours, hook), h.rows_of(theirs, hook)
        common = sorted(set(mine) & set(other))
        assert len(common) > least
        got, want = (np.stack([side[key] for key in common]) for side in (mine, other))
        worst = max(worst, float(h.relative_l2(got, want).max()))
    print(f"{len(common)} positions, {len(ours.hooks)} hooks: at most {worst:.2g} apart")
    assert worst < 1e-5
