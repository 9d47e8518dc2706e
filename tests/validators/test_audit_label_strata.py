"""The user's labels: what they say of prompts is a stratum of losses, and of what was skipped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from actds.format.labels import dump_labels
from actds_testing.audit_tokens import audited, tables_of
from actds_testing.simulate import SCENARIOS, simulate


def labelled(tables: dict[str, pa.Table], by_loss: bool) -> dict[str, pa.Table]:
    """Return tables whose requests have a label that says what was lost, or nothing of it."""
    requests = tables["requests"]
    drops, number = tables["drops"], requests["request"].to_numpy()
    length = drops["stop"].to_numpy().astype(int) - drops["start"].to_numpy()
    n_lost = np.bincount(drops["request"].to_numpy(), weights=length, minlength=number.max() + 1)
    owed = requests["prompt_len"].to_numpy() + requests["generated_len"].to_numpy()
    lost = n_lost[number] > 0.25 * owed
    if not by_loss:
        lost = np.random.default_rng(0).random(len(lost)) < lost.mean()
    column = [dump_labels({"domain": "code" if one else "web", "n": 3}) for one in lost]
    at = requests.schema.get_field_index("labels")
    field = requests.schema.field("labels")
    return tables | {"requests": requests.set_column(at, field, pa.array(column, pa.string()))}


@pytest.mark.parametrize("by_loss", [True, False])
def test_a_label_that_lost_most_is_named(by_loss: bool) -> None:
    scenario = replace(SCENARIOS["mcar_steps"], n_steps=3000, rate=0.04)
    found = audited(labelled(tables_of(simulate(scenario, 1)), by_loss)).missingness
    assert found is not None
    named = [s for s in found.worst_strata if s.kind.startswith("label")]
    assert [s.kind for s in named] == (["label domain"] if by_loss else [])
    if named:
        assert named[0].label == "code" and named[0].rate > 0.05
