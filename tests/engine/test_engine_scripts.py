"""Scripts as people write them: no main guard, an event loop that runs, harvests in a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import actds
from actds_testing.harvest import ONE_PROCESS, environment, validated, write_prompts
from actds_testing.places import BENCHMARKS, DEMO_MODEL, EXAMPLES

pytest.importorskip("vllm")
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

NOTEBOOK = """
import asyncio, json, sys, threading

import actds
from actds_writers.harvest.result import Observer

model, prompts, *outs = sys.argv[1:]
ASKED = dict(
    model=model, prompts=prompts, hooks="resid_post:1", max_tokens=3, temperature=0,
    engine_args=dict(enforce_eager=True, max_model_len=256, block_size=32, dtype="float32",
                     load_format="dummy", distributed_executor_backend="uni"))
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


@pytest.mark.full
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


def test_the_tutorial_goes_from_prompts_to_a_dictionary_with_its_audit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    cells = json.loads((EXAMPLES / "tutorial.ipynb").read_text("utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs: numbers get old"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    folder = tmp_path / "examples"
    folder.mkdir()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model").symlink_to(DEMO_MODEL)
    values = "print(json.dumps([losses, unexplained, len(rows), check.answer]))"
    (folder / "tutorial.py").write_text("\n".join([*code, values]))
    done = subprocess.run(
        [sys.executable, "tutorial.py"],
        cwd=folder,
        env=environment(**ONE_PROCESS),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses, unexplained, n_served, answer = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 100 and losses[-1] < losses[0] / 2 and 0 < unexplained < 0.6
    dataset = validated(str(folder / "tutorial" / "acts"))
    chosen = {"split": "held_out", "held_out": 0.25, "drop_last": False}
    with actds.Loader(dataset, "resid_post.10", provenance=("request",), **chosen) as loader:
        held_out = {int(request) for _, rows in loader for request in rows["request"]}
    requests = dataset.requests().select(["request", "prompt_len", "generated_len"]).to_pylist()
    # The last token is sampled and never fed; the first position is left out.
    lengths = {row["request"]: row["prompt_len"] + row["generated_len"] - 2 for row in requests}
    assert n_served == sum(lengths[request] for request in held_out) and len(held_out) < 24
    saved = torch.load(folder / "tutorial" / "sae.pt")
    assert saved["data"]["digest"] == dataset.digest
    page = (folder / "tutorial" / "audit.html").read_text("utf-8")
    assert dataset.digest in page and answer in page


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the steps of the first hour on a GPU share."""
    return tmp_path_factory.mktemp("hour")


@pytest.mark.full
@pytest.mark.parametrize("step", ["vllm", "harvest", "graphs", "cost"])
def test_a_step_of_the_first_hour_on_a_gpu_is_rehearsed_on_a_cpu(step: str, hour: Path) -> None:
    """With the real engine, and graphs that replay; nothing in it is a figure of a GPU."""
    variables = {"PY": sys.executable, "OUT": str(hour), "DEVICE": "cpu", "LIMIT": "1800",
                 "CARRY": str(hour / "none"), "SITE": str(hour / "site")}  # fmt: skip
    done = subprocess.run(
        ["bash", BENCHMARKS / "gpu" / "run.sh", step],
        env=environment(**variables), capture_output=True, text=True, timeout=1900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    title, *lines = (hour / f"gpu-{step}.md").read_text().splitlines()
    assert "a rehearsal" in title and any("none of a GPU" in line for line in lines)
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    outcomes = [cells[1] for cells in tables[2:] if len(cells) == 3]
    assert outcomes and set(outcomes) == {"done"}
    distances = [float(cells[3]) for cells in tables if len(cells) == 4 and "." in cells[3]]
    if step in ("harvest", "graphs"):
        assert max(distances) < 2e-6 and any("'piecewise':" in line for line in lines)
    if step == "cost":
        assert sum("2 hooks" in cells[0] for cells in tables) == 1
