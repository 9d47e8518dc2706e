"""The page of ``examples/stability``: it is what the figures say, and these hold together."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest

from actds_testing.places import EXAMPLES
from actds_testing.stability_results import made

FOLDER = EXAMPLES / "stability"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The module that writes the page; the other examples have one of the same name."""
    spec = importlib.util.spec_from_file_location("stability_example_page", FOLDER / "page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads((FOLDER / "figures.json").read_text())


def test_the_page_is_what_the_figures_say(page: ModuleType, figures: Any) -> None:
    assert (FOLDER / "README.md").read_text() == page.page(figures)


def test_a_figure_that_changes_changes_the_page(page: ModuleType, figures: Any) -> None:
    before = page.page(figures)
    changed = json.loads(json.dumps(figures))
    one = next(v for v in changed["cross"] if v["fvu"] is not None)
    one["fvu"] += 0.25
    assert page.page(changed) != before


def test_a_result_becomes_a_page_with_what_became_of_the_features(
    page: ModuleType, figures: Any
) -> None:
    result = json.loads(made(("cached", "uncached", "weighted", "dropped", "hybrid")).to_json())
    source = page.page(page.summary(figures["setting"], result))
    assert "| second dictionary | kept | split | merged | gone |" in source
    assert "| *uncached*, other seed | 45% [45%, 45%] | 5% [5%, 5%] | 3% [3%, 3%] |" in source


def test_every_arm_has_rows_and_is_compared_with_both_floors(figures: Any) -> None:
    arms = [arm["name"] for arm in figures["arms"]]
    assert arms == ["cached", "uncached", "weighted", "dropped", "hybrid"]
    assert {arm["n_rows"] for arm in figures["arms"]} == {figures["n_rows"]}
    compared = {(c["arm"], c["floor"]) for c in figures["comparisons"]}
    assert compared == {(a, f) for a in arms[1:] for f in ("other seed", "other order")}
    assert [v["arm"] for v in figures["verdicts"]] == arms[1:]
    hybrid = next(arm for arm in figures["arms"] if arm["name"] == "hybrid")
    assert hybrid["shares"]["prefill"] == pytest.approx(hybrid["shares"]["decode"], abs=1)


def test_likenesses_lie_between_least_and_largest_and_fvu_in_its_interval(figures: Any) -> None:
    for pair in figures["pairs"]:
        for name in ("matched", "share_70", "share_90"):
            mean, low, high = pair[name]
            assert low <= mean <= high
    told = [one for one in figures["cross"] if one["low"] is not None]
    assert told and all(one["low"] <= one["fvu"] <= one["high"] for one in told)
