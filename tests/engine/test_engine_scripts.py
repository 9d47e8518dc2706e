"""Scripts as people write them: no main guard, an event loop that runs, harvests in a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actds_testing.harvest import environment, validated, write_prompts

pytest.importorskip("vllm")
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

NOTEBOOK = """
import asyncio, json, sys, threading

import actds
from actds_writers.monitor.progress import Observer

model, prompts, *outs = sys.argv[1:]
ASKED = dict(
    model=model, prompts=prompts, hooks="resid_post:1", max_tokens=3, temperature=0,
    engine_args=dict(enforce_eager=True, max_model_len=256, block_size=32, dtype="float32",
                     load_format="dummy"))
refused = []


class Beside(Observer):
    def starting(self, words):
        beside = threading.Thread(target=self.ask)
        beside.start()
        beside.join()
        return super().starting(words)

    def ask(self):
        try:
            actds.write(out=outs[0] + "-beside", **ASKED)
        except actds.ActdsError as error:
            refused.append(str(error))


async def cell(out):
    return actds.write(out=out, observer=Beside(), **ASKED).seal.totals["rows"]


rows = [asyncio.run(cell(out)) for out in outs]
print(json.dumps([rows, refused]))
"""


def test_a_script_without_a_main_guard_in_an_event_loop_may_harvest_twice(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", n_layers=3, dtype="float32", tokenizer=True)
    prompts = write_prompts(
        tmp_path / "p.jsonl", [{"id": f"p{n}", "prompt": "hello " * (n + 2)} for n in range(3)]
    )
    outs = [tmp_path / "first", tmp_path / "second"]
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, script, model, prompts, *outs],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows, refused = json.loads(done.stdout.splitlines()[-1])
    for out, n in zip(outs, rows, strict=True):
        assert validated(str(out)).n_rows == n > 0
    assert rows[0] == rows[1]
    # Beside each of them another one was asked for.
    assert len(refused) == 2
    for words in refused:
        assert words.startswith("E009 actds.write: a second harvest in this process")
    assert not (tmp_path / "first-beside").exists()
