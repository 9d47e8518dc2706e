"""``examples/steering``: its page is what its figures say, and a small run of it works."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from actds_studies.steer.result import Steering
from actds_testing.harvest import ONE_PROCESS, environment
from actds_testing.places import EXAMPLES
from actds_testing.tiny import make_random_model

FOLDER = EXAMPLES / "steering"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steering_example_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(folder: Path) -> Steering:
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    del figures["texts"], figures["seconds"]
    return Steering.model_validate({"dataset": "acts", **figures})


def test_the_page_is_what_the_figures_say(run: ModuleType) -> None:
    text, tables = (FOLDER / "README.md").read_text(), dict(run.tables(result_of(FOLDER)))
    assert set(tables) == {"answer", "decay", "divergence", "components", "survival"}
    for name, table in tables.items():
        assert f"<!-- begin: {name} -->\n\n{table}\n\n<!-- end: {name} -->" in text, name


def test_every_way_and_control_has_figures_to_step_200() -> None:
    result = result_of(FOLDER)
    assert {e.step for e in result.effects} == {1, 10, 50, 200}
    assert {e.way for e in result.effects} == {"pulse", "kept", "held"}
    assert {e.vector for e in result.effects} == {"vector", "negative", "random"}
    values = [e.divergence for e in result.effects] + [s.share for s in result.survival]
    assert all(v is not None and v.low <= v.value <= v.high for v in values)
    assert result.floor is not None and result.floor.high < 1e-6


@pytest.mark.engine
@pytest.mark.full
def test_a_small_run_writes_the_page(run: ModuleType, tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "model")
    page = tmp_path / "README.md"
    page.write_text(
        "".join((run.BEGIN + run.END).format(name, name) for name in ("answer", "decay"))
    )
    words = ["--model", model, "--out", tmp_path / "out", "--page", tmp_path, "--texts", 40]
    words += ["--requests", 4, "--at", "1,8", "--hook", "resid_post.1", "--survival", 20]
    words += ["--longest", 200, "--limit", "random=1", "--limit", "nats=0.005"]
    command = [sys.executable, FOLDER / "run.py", *words]
    done = subprocess.run(
        list(map(str, command)), env=environment(**ONE_PROCESS), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = result_of(tmp_path)
    assert result.components is not None and result.n_requests == 4
    assert result.answer.words in page.read_text()
    assert "</svg>" in (tmp_path / "out" / "steering.html").read_text()
