"""A few runs of the calibration of regimes; `python -m actds_testing.calibration.regimes`: all."""

from __future__ import annotations

import pytest

from actds_testing.calibration.regimes import SCENARIOS, World, run_one, table, unpaired
from actds_validators.regimes.result import Limits
from actds_validators.regimes.run import conclude


@pytest.mark.standard
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_one_run_finds_what_is_planted_and_nothing_else(scenario: str) -> None:
    record = run_one((scenario, 17))
    assert record["found"] == (SCENARIOS[scenario][1] == "least")
    assert SCENARIOS[scenario][0] in table([record])


@pytest.mark.standard
@pytest.mark.parametrize(("planted", "trend"), [("position", 0.5), ("mix", 0.0)])
def test_without_weights_a_position_or_token_effect_is_blamed_on_decode(
    planted: str, trend: float
) -> None:
    found = []
    for adjust in (True, False):
        limits = Limits(seed=17)
        measured = unpaired(World(17, trend=trend), limits, planted, adjust)
        values = conclude([measured], limits)[0]
        found.append(any(value.outcome == "shifts" for value in values))
    assert found == [False, True]


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_eight_runs_keep_their_goal(scenario: str) -> None:
    found = sum(run_one((scenario, 100 + n))["found"] for n in range(8))
    # More than 4 of 8 at 9 %, and fewer than 5 of 8 at 95 %, are rarer than one in two thousand.
    assert found <= 4 if SCENARIOS[scenario][1] == "most" else found >= 5
