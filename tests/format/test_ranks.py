"""Ranks of torch.distributed: each row of an epoch comes once over all, and resume is exact."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actds_testing.synthetic import make_dataset

pytestmark = pytest.mark.standard

# What a training script does under torchrun: rank and world from the process group, rows gathered
# step by step, the state of rank 0 saved as JSON.
SCRIPT = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
import actds

path, state_path, steps, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, world = dist.get_rank(), dist.get_world_size()
loader = actds.Loader(
    path, "resid_post.0", batch=16, lanes=8, epochs=1, window_rows=64, seed=5,
    rank=rank, world=world, provenance=True, where="position >= 1",
)
if state_path != "-":
    loader.load_state_dict(json.load(open(state_path)))
seen, n = [], 0
for acts, rows in loader:
    mine = list(zip(rows["run"].tolist(), rows["request"].tolist(), rows["position"].tolist(),
                    acts.view(torch.int16).tolist()))
    every = [None] * world
    dist.all_gather_object(every, mine)
    seen.append([row for part in every for row in part])
    n += 1
    if n == steps:
        break
states = [None] * world
dist.all_gather_object(states, loader.state_dict())
assert all(state == states[0] for state in states)
if rank == 0:
    json.dump({"steps": seen, "state": states[0], "n_rows": loader.n_rows}, open(out, "w"))
loader.close()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(folder: Path, path: Path, world: int, state: object, steps: int) -> dict:
    """Run as many ranks as torchrun would, with its variables; return what rank 0 gathered."""
    script, out, saved = folder / "train.py", folder / "out.json", folder / "state.json"
    script.write_text(SCRIPT)
    saved.write_text(json.dumps(state))
    out.unlink(missing_ok=True)
    port = str(free_port())
    ranks = []
    for rank in range(world):
        named = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        start = "-" if state is None else str(saved)
        command = [sys.executable, str(script), str(path), start, str(steps), str(out)]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **named}, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        errors = [one.communicate(timeout=300)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0] * world, "\n".join(errors)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("ranks") / "dataset", n_requests=16, seed=2)


@pytest.fixture(scope="module")
def alone(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list]]:
    """Return the steps of an epoch of one rank."""
    steps = train(tmp_path_factory.mktemp("alone"), path, 1, None, -1)["steps"]
    assert len(steps) > 8
    return steps


@pytest.mark.parametrize("world", [2, 4])
def test_every_row_of_an_epoch_comes_once_over_all_ranks(
    path: Path, alone: list[list[list]], tmp_path: Path, world: int
) -> None:
    found = train(tmp_path, path, world, None, -1)
    rows = [tuple(row[:3]) for step in found["steps"] for row in step]
    assert len(rows) == len(set(rows)) and 0 <= found["n_rows"] - len(rows) < 16
    assert found["steps"] == alone


def test_a_state_continues_on_another_number_of_ranks(
    path: Path, alone: list[list[list]], tmp_path: Path
) -> None:
    first = train(tmp_path, path, 2, None, 3)
    second = train(tmp_path, path, 4, first["state"], 2)
    rest = train(tmp_path, path, 1, second["state"], -1)
    assert first["steps"] + second["steps"] + rest["steps"] == alone
