"""Every family's rows are those of transformers, or nothing is stored: rerun, and as documented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actds_testing.families import layouts, table
from actds_testing.families.models import FAMILIES, Family

pytestmark = pytest.mark.matrix
RESULTS = json.loads(table.RESULTS.read_text("utf-8"))
COMPARED = set(layouts.compared(whole=False))
DOCUMENTED = {f["family"]: f for f in RESULTS["families"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all families at once, side by side."""
    return table.run(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.slug)
def test_rows_are_those_of_transformers_or_nothing_is_stored(
    family: Family, found: dict[str, Any]
) -> None:
    assert family.name in found, "its process left no result"
    result = found[family.name]
    assert result["outcome"] in ("right", "refused", "not started"), result
    if result["outcome"] == "right":
        assert result["n_rows"] > 250
        # The same tokens again, one request at a time: a row for each, and those of transformers.
        assert result["replay"]["outcome"] == "right", result["replay"]
        assert result["replay"]["n_rows"] >= result["n_rows"] + result["n_cached"]
        # Chunks and hits are what rows are lost and mixed up by, so they must have happened.
        cached = "enable_prefix_caching=false" not in family.engine
        assert (result["n_cached"] > 0) is cached


SLUGS = table.slugs_in_graphs(RESULTS)
IN_GRAPHS = [family for family in FAMILIES if family.slug in SLUGS]


@pytest.fixture(scope="module")
def in_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the families that are right in the eager engine compiled, and in graphs."""
    return table.run(tmp_path_factory.mktemp("graphs"), SLUGS, graphs=True)


@pytest.mark.parametrize("family", IN_GRAPHS, ids=lambda family: family.slug)
def test_rows_of_graphs_are_those_of_transformers(
    family: Family, in_graphs: dict[str, Any]
) -> None:
    """Of the same hooks: none that the eager engine has is refused, or loses a row."""
    assert family.name in in_graphs, "its process left no result"
    result, eager = in_graphs[family.name], DOCUMENTED[family.name]
    assert result["outcome"] == "right", result
    assert set(result["relative_l2"]) == set(eager["relative_l2"]) & COMPARED
    assert result["n_rows"] > 250
    assert not result["graphs"]["moved"]
    if result["graphs"]["captured"]:  # vLLM does not compile every class
        assert result["graphs"]["steps"]["piecewise"] > 0 and result["graphs"]["replayed"] > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.slug)
def test_the_docs_say_what_a_run_gives(family: Family, found: dict[str, Any]) -> None:
    """After an update of vLLM: python -m actds_testing.families.table, and look at what changed."""
    if (here := table.setting()) != {name: RESULTS[name] for name in here}:
        pytest.skip(f"the page was made with other versions or on another processor: {here}")
    was, now = DOCUMENTED[family.name], found[family.name]
    names = ("outcome", "code", "vllm_class", "transformers_class", "note")
    assert {name: now.get(name) for name in names} == {name: was.get(name) for name in names}
    for name in ("relative_l2", "refused_hooks"):
        assert set(now.get(name, ())) == set(was.get(name, ())) & COMPARED, name
