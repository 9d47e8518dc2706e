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
    one = next(v for v in changed["cross"] if v["value"] is not None)
    one["value"] += 0.25
    assert page.page(changed) != before
    for use in ("FVU", "AUROC of means"):
        changed = json.loads(json.dumps(figures))
        one = next(v for v in changed["corpora"]["cross"] if (v["use"], v["rows"]) == (use, "all"))
        one["value"] += 0.25
        assert page.page(changed) != before


def test_a_result_becomes_a_page_with_what_became_of_the_features(
    page: ModuleType, figures: Any
) -> None:
    result = json.loads(made(("cached", "uncached", "weighted", "dropped", "hybrid")).to_json())
    summary = page.summary(figures["setting"], result)
    source = page.page({**summary, "corpora": figures["corpora"]})
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
    told = [v for v in (*figures["cross"], *figures["corpora"]["cross"]) if v["low"] is not None]
    told += [v["difference"] for v in told if v["difference"] is not None]
    assert told and all(one["low"] <= one["value"] <= one["high"] for one in told)


def test_prompts_answers_and_half_of_each_are_scored_alike(figures: Any) -> None:
    told = figures["corpora"]
    arms = [arm["name"] for arm in told["arms"]]
    assert arms == ["prefill", "decode", "hybrid"] and told["limits"]["seeds"] >= 6
    by = {(v["use"], v["trained_on"], v["rows_of"], v["rows"]): v for v in told["cross"]}
    for rows in ("all", *(f"decode step {band}" for band in ("1", "6 to 10", "40 to 60"))):
        scored = {by["FVU", arm, "decode", rows]["n_rows"] for arm in arms}
        assert len(scored) == 1
    assert all(("AUROC of means", arm, of, "all") in by for arm in (*arms, "raw rows")
               for of in arms)  # fmt: skip
