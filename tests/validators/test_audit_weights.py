"""Weights where something is not known or cannot be had: ids, intervals, rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from actds_testing.audit_tokens import audited, changed, tables_of
from actds_testing.simulate import SCENARIOS, simulate
from actds_validators.audit.run import Sections
from actds_validators.statistics.intervals import (
    farthest_mean,
    from_replicates,
    jackknife_many,
    worst_case,
)


def made(name: str, seed: int, **changes: Any) -> dict[str, Any]:
    return tables_of(simulate(replace(SCENARIOS[name], **changes), seed))


def without_lost_readouts(run: dict[str, Any], share: float) -> dict[str, Any]:
    """Return the tables without the readouts of a share of the lost rows, drawn at random."""
    stored = run["tokens"].to_pandas()[["request", "position"]].assign(stored=True)
    random = np.random.default_rng(1)

    def kept(frame: pd.DataFrame) -> pd.DataFrame:
        lost = frame.merge(stored, on=["request", "position"], how="left")["stored"].isna()
        gone = lost.to_numpy() & (random.random(len(frame)) < share)
        assert lost.sum() > 300 and gone.any()
        return frame[~gone]

    return changed(run, "readouts", kept)


def bias(found: Sections, name: str) -> tuple[float, float]:
    assert found.missingness is not None
    d = next(d for d in found.missingness.differences if d.covariate.name == name)
    assert d.before_weighting is not None and d.after_weighting is not None
    return d.before_weighting.value, d.after_weighting.value


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_lost_rows_of_unknown_ids_are_taken_for_no_rarity(share: float) -> None:
    run = made("mar_load", 5, n_steps=3000, rate=0.03)
    whole, some = audited(run), audited(without_lost_readouts(run, share))
    assert whole.weighting is not None and some.weighting is not None
    assert some.weighting.n_rows == whole.weighting.n_rows
    cells = some.weighting.cells
    assert abs(sum(c.n for c in cells) - sum(c.n for c in whole.weighting.cells)) <= len(cells)
    commonest = [
        sum(c.n_lost for c in found.weighting.cells if c.label.startswith("rarity 0 to 4"))
        for found in (whole, some)
        if found.weighting
    ]
    assert commonest[1] < 1.3 * commonest[0] + 5
    # Of each load as much was lost as before: its weights stay.
    for name in ("load_8", "load_32"):
        assert bias(some, name)[1] == pytest.approx(bias(whole, name)[1], abs=1e-3)
    if share < 1:  # with none, nobody can say how rare the lost ones were
        assert abs(bias(some, "rarity")[1]) < 0.002


def test_losses_in_one_block_have_the_interval_of_the_worst_case() -> None:
    run = made("few_events", 3, n_steps=2000, rate=0.01, n_events=1, burst_steps=4)
    found = audited(run)
    assert found.missingness is not None and found.weighting is not None
    differences = found.missingness.differences
    assert {d.covariate.group for d in differences} == {"system", "content", "values"}
    alone = [d for d in differences if d.smd.confidence == 1]
    assert alone
    for d in alone:
        assert d.equivalence is None
        for one in (d.smd, d.before_weighting, d.after_weighting):
            assert one is not None and one.low <= one.value <= one.high
        share = found.accounting.loss_share
        if d.covariate.name != "rarity":
            assert d.smd.high == pytest.approx(np.sqrt((1 - share) / share))
    assert {b.group for b in found.weighting.balance} == {"system", "content", "values"}


def test_no_mean_lies_farther_than_its_effective_rows_allow() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        n = int(random.integers(2, 40))
        w = random.exponential(size=n) * (random.random(n) < 0.7)
        if not w.any():
            continue
        x = random.normal(size=n)
        far = farthest_mean(n, w.sum() ** 2 / (w**2).sum())
        assert abs(np.average(x, weights=w) - x.mean()) <= far * x.std() * (1 + 1e-9)
        if w.std() > 0:  # as far as it goes for the function that is the weight itself
            at = (np.average(w, weights=w) - w.mean()) / w.std()
            assert at == pytest.approx(far)
    assert farthest_mean(100, 95) == pytest.approx(worst_case(0.05))
    assert farthest_mean(10, 10) == 0
    for effective in (0.0, 11.0):
        with pytest.raises(ValueError, match="effective rows"):
            farthest_mean(10, effective)


def test_replicates_give_the_interval_of_the_sums_they_come_from() -> None:
    sums = np.random.default_rng(2).random((2, 3, 8))

    def ratio(s: np.ndarray) -> np.ndarray:
        return np.asarray(s[0] / s[1])

    total = sums.sum(axis=2)
    value, without = ratio(total), ratio(total[..., np.newaxis] - sums)
    assert from_replicates(value, without) == jackknife_many(sums, ratio)
    without[1, 3] = np.nan
    assert from_replicates(value, without)[1] is None
    with pytest.raises(ValueError, match="expected"):
        from_replicates(value, without[:2])
