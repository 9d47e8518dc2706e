"""The page of ``examples/regimes``: every number in it is of figures.json, and adds up."""

from __future__ import annotations

import importlib.util
import json
import math
from types import ModuleType
from typing import Any

import pytest

from actds_testing.places import EXAMPLES

FOLDER = EXAMPLES / "regimes"


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The module that writes the page; the other example has one of the same name."""
    spec = importlib.util.spec_from_file_location("regimes_example_page", FOLDER / "page.py")
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
    value = next(v for v in changed["arms"][0]["values"] if v["measure"] == page.FVU)
    value["value"] += 0.1
    assert page.page(changed) != before


def test_differences_are_those_of_the_arms_and_lie_in_their_intervals(
    page: ModuleType, figures: Any
) -> None:
    told = [v for one in figures["arms"] for v in one["values"] if v["measure"] == page.FVU]
    assert {one["name"] for one in figures["arms"]} == set(page.ABOUT)
    for value in (v for v in told if v["value"] is not None):
        first, second = value["arms"]
        assert math.isclose(second - first, value["value"], rel_tol=1e-4, abs_tol=2e-6)
        assert value["low"] <= value["value"] <= value["high"]


def test_quantiles_of_the_ladder_ascend(figures: Any) -> None:
    for one in figures["ladder"]:
        assert one["pairing"] == "token"
        assert list(one["distance"]) == ["p50", "p90", "p99", "p100"]
        assert list(one["distance"].values()) == sorted(one["distance"].values())
