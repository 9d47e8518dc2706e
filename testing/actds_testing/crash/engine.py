"""Kills of a real engine: vLLM with a tiny model, in the command's own process.

Importing vLLM takes longer than the harvest, so it is imported once, and every harvest is a fork.
Rows are compared with those of a harvest that nobody killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import actds
from actds_testing import harvest as h
from actds_testing.crash.harness import Acknowledged, Figures, ended, examined, fork, visible
from actds_testing.tiny import make_tiny_model

HOOK = "resid_post.1"
N_PROMPTS = 40
END_TIMEOUT_S = 240.0
VICTIMS = (("engine",), ("engine",), ("writer",), ("census",), ("engine", "writer", "census"))
Tell = Callable[[str, Figures, int], None]


def run(work: Path, n_kills: int, rng: random.Random, figures: Figures, tell: Tell) -> None:
    """Kill so many harvests at random; every one is recovered and examined."""
    os.environ.update({**h.ENGINE_ENVIRONMENT, **h.ONE_PROCESS})
    work.mkdir(parents=True)
    model = make_tiny_model(work / "model", dtype="float32", tokenizer=True)
    prompts = h.write_prompts(
        work / "p.jsonl",
        [{"id": f"m{i}", "prompt": f"number {i} " * (1 + i % 9)} for i in range(N_PROMPTS)],
    )
    warm_up(work, model, prompts)
    wanted = rows_of(work / "reference")
    for number in range(n_kills):
        out = work / f"engine-{number}"
        kill_one(out, model, prompts, rng, figures, wanted)
        tell("engine kills", figures, n_kills)
        if not figures.faults:
            shutil.rmtree(out, ignore_errors=True)


def start(out: Path, model: Path, prompts: Path, before_exit: Callable[[], None]) -> int:
    """Fork a harvest; return its pid."""

    def body() -> int:
        from actds.cli import cli

        os.setsid()
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = ("--hooks", "resid_post:1", "--rows-per-shard", "64", "--max-tokens", "24",
                   "--engine-arg", "max_num_seqs=4", "--engine-arg", "max_model_len=512",
                   *h.TINY, *h.EAGER, *h.ALONE)  # fmt: skip
        sys.argv = h.command(out, model, prompts, *options)[2:]
        try:
            cli(sys.argv[1:], prog_name="actds")
        except SystemExit as leaving:
            before_exit()
            return int(leaving.code or 0)
        return 0

    return fork(body)


def warm_up(work: Path, model: Path, prompts: Path) -> None:
    """Run the reference harvest, then import here what it had imported."""
    names = work / "modules.json"
    before = set(sys.modules)

    def note() -> None:
        names.write_text(json.dumps(sorted(set(sys.modules) - before)))

    pid = start(work / "reference", model, prompts, note)
    _, status = os.waitpid(pid, 0)
    log = (work / "reference.log").read_text()
    assert status == 0, log
    for name in json.loads(names.read_text()):
        with contextlib.suppress(Exception):  # some modules are made by code, not found by name
            importlib.import_module(name)


def kill_one(
    out: Path,
    model: Path,
    prompts: Path,
    rng: random.Random,
    figures: Figures,
    wanted: dict[tuple[str, int], np.ndarray],
) -> None:
    """One harvest, killed somewhere at random."""
    pids = {"engine": start(out, model, prompts, lambda: None)}
    n_shards = rng.choice((0, 1, 2, 3, 5, 8))
    deadline = time.monotonic() + END_TIMEOUT_S
    while not {"writer", "census"} <= pids.keys() and time.monotonic() < deadline:
        pids.update(helpers(pids["engine"]))
        time.sleep(0.01)
    while len(visible(out)) < n_shards and time.monotonic() < deadline:
        if ended(pids["engine"]):
            break
        time.sleep(0.005)
    time.sleep(rng.random() * (0.3 if n_shards else 3.0))
    noted = visible(out)
    victims = rng.choice(VICTIMS)
    for victim in victims:
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(pids[victim], signal.SIGKILL)
    for pid in pids.values():
        while not ended(pid):
            if time.monotonic() > deadline + END_TIMEOUT_S:
                figures.faults.append(f"{out.name}: {victims} killed, and {pids} do not end")
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def look(dataset: actds.Dataset, there: list[Acknowledged], found: dict[str, Any]) -> None:
        compare(dataset, there, found, wanted)

    found = examined(out, noted, look)
    found["faults"] = [f"{out.name} {victims}: {fault}" for fault in found["faults"]]
    figures.add(noted, found)


def helpers(engine: int) -> dict[str, int]:
    """Return the writer and the census of a command, by role."""
    found = {}
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_text()
            for role in ("writer", "census"):
                if re.search(rf"actds_writers\.{role}[._]process", command):
                    found[role] = int(pid)
    return found


def rows_of(out: Path) -> dict[tuple[str, int], np.ndarray]:
    """Return the rows of a dataset by request and position."""
    return h.rows_of(actds.open(out), HOOK)


def compare(
    dataset: actds.Dataset,
    noted: list[Acknowledged],
    found: dict[str, Any],
    wanted: dict[tuple[str, int], np.ndarray],
) -> None:
    """Count rows that the undisturbed harvest has not, and acknowledged ones that are missing."""
    for key, row in h.rows_of(dataset, HOOK).items():
        want = wanted.get(key)
        if want is None or np.linalg.norm(row - want) > 1e-3 * np.linalg.norm(want):
            found["phantom"] += 1
    there = {shard.name: shard.n_rows for shard in dataset.shards}
    for one in noted:
        found["lost"] += one.n_rows - min(there.get(one.shard, 0), one.n_rows)
