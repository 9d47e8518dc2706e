"""A covariate is one object: one that is registered from outside is audited like our own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from actds.cli import cli
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_validators.audit.covariates import COVARIATES, Bins, CovariateDef, halves

TOYS = {
    "queue": CovariateDef(
        "toy_step",
        "toy of a step",
        "toys",
        "step",
        lambda steps: steps["dropped_tokens"] + 0.01 * steps["running"],
        columns=("dropped_tokens", "running"),
        is_load=True,
        sides=("toy times", "toyless times"),
    ),
    "few_events": CovariateDef(
        "toy_request",
        "toy of a request",
        "toys",
        "request",
        lambda requests: np.arange(len(requests["prompt_len"])) + requests["n_preemptions"],
        columns=("prompt_len", "n_preemptions"),
        bins=Bins(20, "toy bin {}".format),
    ),
    "mnar_rarity": CovariateDef(
        "toy_token",
        "toy of a token",
        "share",
        "token",
        lambda rows: rows.rarity > 8,
        bins=halves("no toy", "a toy"),
        needs_ids=True,
    ),
    "mnar_projection": CovariateDef(
        "toy",
        "toy of a readout",
        "toys",
        "readout",
        lambda batch, n: pc.list_element(batch["projections"], 0).to_numpy(False),
        columns=("projections",),
    ),
}


@pytest.mark.parametrize("scenario", list(TOYS))
def test_a_covariate_from_outside_is_in_result_terminal_and_page(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = TOYS[scenario]
    monkeypatch.setitem(COVARIATES, toy.name, toy)
    run = simulate(
        replace(SCENARIOS[scenario], n_steps=400, rate=0.05, readouts=scenario != "few_events"), 3
    )
    path, page, out = write_dataset(run, tmp_path / "d"), tmp_path / "p.html", tmp_path / "a.json"
    arguments = ["audit", str(path), "--html", str(page), "--json", str(out)]
    told = CliRunner().invoke(cli, [*arguments, "--fail-on", "never"], prog_name="actds")
    assert told.exit_code == 0, told.output
    result = json.loads(out.read_text())
    found = [
        one
        for one in result["missingness"]["differences"]
        if one["covariate"]["label"].startswith(toy.label)
    ]
    assert found and found[0]["covariate"]["unit"] == toy.unit
    assert found[0]["covariate"]["group"] == toy.group
    labels = {one["label"] for one in found[0]["strata"]}
    assert bool(labels) == (toy.bins is not None)
    if toy.bins is not None:
        assert labels <= {toy.bins.label(k) for k in range(toy.bins.n)}
    tests = {
        test["name"]
        for test in result["mechanism"]["tests"]
        if toy.label in test["covariate"]["label"]
    }
    assert "shift" in tests
    assert toy.label in told.stdout and toy.label in page.read_text()
