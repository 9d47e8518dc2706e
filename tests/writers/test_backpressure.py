"""The backpressure example: its page from datasets that are there, without an engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import actds
from actds_testing.places import EXAMPLES

pytest.importorskip("duckdb", reason="needs the extra actds[audit]")
pytest.importorskip("scipy", reason="needs the extra actds[audit]")

from actds_testing.simulate import SCENARIOS, Scenario, simulate, write_dataset

pytestmark = pytest.mark.standard


EXAMPLE = EXAMPLES / "backpressure"
PICTURES = ("differences.svg", "loss_rates.svg", "speed.svg", "timeline.svg")
# So little traffic that the engine idles between bursts of requests.
QUIET = {
    "n_steps": 1000,
    "mean_batch_tokens": 1.0,
    "prompt_median": 20.0,
    "generated_median": 12.0,
    "length_sigma": 0.5,
}
NOTHING_LOST = replace(SCENARIOS["none"], **QUIET)
LOST_UNDER_LOAD = replace(SCENARIOS["mar_load"], rate=0.3, strength=2.0, **QUIET)
ARMS = {
    "plain": NOTHING_LOST,
    "block": NOTHING_LOST,
    "drop_oldest": LOST_UNDER_LOAD,
    "drop_newest": NOTHING_LOST,
    "plain-again": NOTHING_LOST,
}


def write_arms(out: Path, arms: dict[str, Scenario]) -> Path:
    for name, scenario in arms.items():
        write_dataset(simulate(scenario, 1), out / name)
    setting = json.loads((EXAMPLE / "figures.json").read_text())["setting"]
    (out / "setting.json").write_text(json.dumps(setting))
    return out


def write_page(out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", EXAMPLE / "run.py", "--again"]
    command += ["--out", out, "--page", out / "page"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return datasets of five arms, one of which lost steps under load, and their page."""
    out = write_arms(tmp_path_factory.mktemp("backpressure"), ARMS)
    done = write_page(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def figures(arms: Path) -> dict[str, Any]:
    return dict(json.loads((arms / "page" / "figures.json").read_text()))


def contexts(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the context lengths of the stored and of the lost tokens."""
    dataset = actds.open(path)
    stored = dataset.tokens()["position"].to_numpy().astype(float) + 1
    drops = dataset.drops().to_pylist()
    lost = [p + 1.0 for drop in drops for p in range(drop["start"], drop["stop"])]
    return stored, np.array(lost)


def test_shares_and_differences_are_those_of_the_tables(
    arms: Path, figures: dict[str, Any]
) -> None:
    stored, lost = contexts(arms / "drop_oldest")
    every = np.concatenate([stored, lost])
    assert len(lost) > 500
    share = figures["lost_share"]["drop_oldest"]
    assert share["value"] == pytest.approx(len(lost) / len(every), rel=1e-9)
    found = figures["difference"]["drop_oldest"]["context"]["smd"]
    wanted = (lost.mean() - every.mean()) / every.std()
    assert found["value"] == pytest.approx(wanted, rel=1e-9)
    assert found["low"] < wanted < found["high"]


def test_a_loss_that_follows_the_load_is_called_higher(arms: Path, figures: dict[str, Any]) -> None:
    load = figures["difference"]["drop_oldest"]["recent_load"]
    assert load["smd"]["low"] > 0.1
    assert load["p"] < 0.05
    page = (arms / "page" / "README.md").read_text()
    assert re.search(r"\| tokens per step, last 8 steps \| `drop_oldest` \| .* \| higher \|", page)


def test_a_policy_that_lost_nothing_is_given_no_difference(
    arms: Path, figures: dict[str, Any]
) -> None:
    assert figures["lost_share"]["drop_newest"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    found = figures["difference"]["drop_newest"]
    assert all(one == {"smd": None, "p": None} for one in found.values())
    page = (arms / "page" / "README.md").read_text()
    assert "| context length | `drop_newest` | none | none | not settled |" in page
    assert "context length not settled (no SMD)" in page


def test_runs_of_the_same_steps_differ_in_no_speed(figures: dict[str, Any]) -> None:
    again = figures["relative_speed"]["plain again"]
    assert [again[name] for name in ("value", "low", "high")] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("folder", ["made", "committed"])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_whole_and_every_place_is_a_number(name: str, folder: str, arms: Path) -> None:
    path = (EXAMPLE if folder == "committed" else arms / "page") / name
    root = ElementTree.parse(path).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    title = root.find("svg:title", space)
    assert title is not None
    assert title.text
    for size, names in (("width", {"x", "x1", "x2", "cx"}), ("height", {"y", "y1", "y2", "cy"})):
        places = [
            float(value)
            for element in root.iterfind("*", space)
            for key, value in element.attrib.items()
            if key in names
        ]
        assert len(places) > 20
        assert all(0 <= place <= float(root.attrib[size]) for place in places)  # no NaN either


def test_the_committed_page_shows_the_committed_pictures() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (EXAMPLE / "README.md").read_text())
    assert sorted(shown) == sorted(PICTURES)


def test_refuses_a_run_without_a_second_burst(tmp_path: Path) -> None:
    """One burst has no other to be compared with: an interval would be of no width."""
    busy = replace(NOTHING_LOST, mean_batch_tokens=30.0, n_steps=200)
    done = write_page(write_arms(tmp_path, dict.fromkeys(ARMS, busy)))
    assert done.returncode != 0
    assert "one burst; expected at least two" in done.stderr
    assert not (tmp_path / "page").exists()
