"""The table of model families in the docs: generated, and never *wrong*."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actds_testing.families import table
from actds_testing.families.layouts import KINDS
from actds_testing.families.table import verified_kinds
from actds_writers.engines.vllm.options import VERIFIED, VERIFIED_KINDS

# GELU computed in another way; bfloat16, where rounding can send a token to another expert.
BOUNDS = {"Bloom": 1e-3, "Qwen3-Next": 0.05}

MEANS = {"MiniCPM 3": 3e-5}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(table.RESULTS.read_text("utf-8"))
    return found


def test_the_page_is_what_the_results_give(results: dict[str, Any]) -> None:
    assert table.PAGE.read_text("utf-8") == table.render(results)


def test_no_family_is_wrong_and_each_refusal_has_its_reason(results: dict[str, Any]) -> None:
    outcomes = [family["outcome"] for family in results["families"]]
    assert set(outcomes) == {"right", "refused", "not started"}
    assert outcomes.count("right") >= 60
    for family in results["families"]:
        if family["outcome"] == "right":
            bound = BOUNDS.get(family["family"], 1e-4)
            assert max(family["relative_l2"].values()) <= bound
            assert bound == 1e-4 or family["note"]
            if bound == 1e-4:
                assert max(family["mean_l2"].values()) <= MEANS.get(family["family"], 1e-5)
            assert all(family["refused_hooks"].values()), "a hook that the writer would have taken"
        else:
            assert family["reason"]
        assert ("code" in family) is (family["outcome"] == "refused")


def test_every_class_that_counts_as_verified_was_right_here(results: dict[str, Any]) -> None:
    right = {f["vllm_class"] for f in results["families"] if f["outcome"] == "right"}
    assert set(VERIFIED) <= right


def test_every_kind_that_counts_as_verified_was_right_in_all_families_of_its_class(
    results: dict[str, Any],
) -> None:
    assert verified_kinds(results) == {c: set(kinds) for c, kinds in VERIFIED_KINDS.items()}


def test_every_kind_was_compared_on_many_families(results: dict[str, Any]) -> None:
    right = [family for family in results["families"] if family["outcome"] == "right"]
    for kind in KINDS:
        n = sum(any(h.startswith(f"{kind}.") for h in f["relative_l2"]) for f in right)
        assert n >= {"attn_out_post": 8, "mlp_out_post": 6, "router": 15}.get(kind, 50), kind
