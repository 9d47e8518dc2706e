"""Rows of a real engine that are drawn by hash, while the writer stands still.

Which rows there must be follows from the forwards that the witness saw, from the recorded
probabilities, and from a hash in Python's integers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds_testing import harvest as h
from actds_testing import witness
from actds_testing.independent import validator as independent
from actds_testing.witness import CROWDED, NGRAM, compare, compare_rows, counts, harvest

pytestmark = pytest.mark.engine

SMALL: dict[str, Any] = {
    "hooks": "resid_post:all;mlp_in:all;mlp_out:all;attn_out:all", "ring_mib": 1, "staging_mib": 1,
    "rows_per_shard": 64, "seed": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def under_pressure(where: Path, model: Path, prompts: Path, **task: Any) -> witness.Harvest:
    """Harvest with a writer that stands still for most of it; both validators find nothing."""
    where.mkdir(exist_ok=True)
    settings = {**SMALL, **task.pop("settings")}
    one = harvest(where, model, prompts, settings=settings, stopped=(4, 60), **task)
    assert not [f for f in independent.validate(where / "acts", deep=True) if f.severity == "error"]
    return one


@pytest.mark.parametrize(
    ("drawn", "task"),
    [
        ({"temperature": 1.0}, {}),
        ({"thin_unit": "request", "temperature": 1.0}, {"asynchronous": True}),
        ({}, {"engine": {"speculative_config": NGRAM}}),
    ],
)
def test_what_is_captured_or_thinned_is_what_the_engine_computed(
    drawn: dict[str, Any], task: dict[str, Any], model: Path, prompts: Path, tmp_path: Path
) -> None:
    engine = {**CROWDED, **task.pop("engine", {})}
    one = under_pressure(
        tmp_path, model, prompts, settings={"overflow": "thin", **drawn}, leave=0.005,
        engine=engine, **task,
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    found = counts(one)
    assert found["preempted"] and found["recomputed"] and found["hits"] and found["left"]
    assert found["chunks"]
    assert one.total("thinned") > 100 and not one.total("dropped")
    steps = one.table("steps")
    assert h.total(steps, "thinned_tokens") == one.total("thinned")
    shares = steps["inclusion"].to_pylist()
    assert 1 / 64 <= min(shares) < 0.5 and max(shares) == 1


def test_rows_that_are_drawn_are_bit_for_bit_those_of_a_run_that_stores_all(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Nobody leaves, and the sampling is greedy: both engines are fed the same."""
    (tmp_path / "whole").mkdir()
    whole = harvest(tmp_path / "whole", model, prompts, engine=CROWDED, settings=SMALL)
    part = under_pressure(
        tmp_path / "part", model, prompts, engine=CROWDED, settings={"overflow": "thin"}
    )
    compare(part)
    assert part.facts.fed == whole.facts.fed
    assert part.total("captured") + part.total("thinned") == whole.total("captured")
    assert part.total("thinned") > 100
    for hook in whole.dataset.hooks:
        want, got = (h.rows_of(one.dataset, hook) for one in (whole, part))
        assert len(got) == part.total("captured")
        assert all(np.array_equal(row, want[key]) for key, row in got.items())
