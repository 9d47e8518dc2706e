"""Whether lost tokens differ from others of their step, by rare and heavy-tailed numbers too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from actds_testing.calibration.parts import Way, made_rows, selections_of
from actds_validators.audit.mechanism import Units, all_rows
from actds_validators.audit.passes import CONTENT, PartialRows


def smallest(n_lost: int, seed: int, way: Way = "tokens", **more: Any) -> tuple[float, float]:
    """Return the smallest p of content and values, and that of the clustered scores alone."""
    found = selections_of(made_rows(n_lost, np.random.default_rng(seed), way, **more), 100, 1)
    inside = min(one.inside for family in found for one in family)
    return inside, min(one.scores.p for family in found for one in family)


@pytest.mark.parametrize(("way", "n"), [("tokens", 60), ("tokens", 150), ("cells", 200)])
def test_losses_by_coin_are_rarely_rejected_where_a_few_rows_have_most_of_the_variance(
    way: Way, n: int
) -> None:
    found = np.array([smallest(n, 100 + seed, way, width=12) for seed in range(24)])
    # Two families at 2.5 % each: 5 or more of 24 come with a probability of 1 in 150.
    assert (found[:, 0] <= 0.025).sum() <= 4
    if way == "tokens":  # the clustered scores alone take sinks that happened to stay for a sign
        assert (found[:, 1] <= 1e-3).sum() >= 6


def test_whole_requests_lost_by_coin_are_rarely_rejected() -> None:
    found = np.array([smallest(1200, 300 + seed, "requests")[0] for seed in range(24)])
    assert (found <= 0.025).sum() <= 4


def test_rare_rows_that_are_lost_more_often_are_found() -> None:
    found = [smallest(2000, 500 + seed, sinks=12.0)[0] for seed in range(5)]
    assert np.median(found) <= 0.01


@pytest.mark.parametrize("way", ["tokens", "cells", "requests"])
def test_what_is_drawn_anew_is_what_the_losses_took(way: Way) -> None:
    runs, began = made_rows(400, np.random.default_rng(7), way)
    units = Units(all_rows(runs[CONTENT], [began]), 5, 0)
    assert units.kind == way


def test_the_order_of_the_rows_and_of_the_readouts_changes_nothing() -> None:
    runs, began = made_rows(200, np.random.default_rng(8), n_hooks=2)
    again = {}
    for k, (group, (rows,)) in enumerate(runs.items()):
        order = np.random.default_rng(k).permutation(len(rows.step))
        parts = (rows.step, rows.request, rows.position, rows.lost, rows.values)
        again[group] = [type(rows)(*(p[..., order] for p in parts))]
    first, second = selections_of((runs, began), 50, 3), selections_of((again, began), 50, 3)
    for one, other in zip(first, second, strict=True):
        assert [s.inside for s in one] == pytest.approx([s.inside for s in other])
        assert [s.scores.t for s in one] == pytest.approx([s.scores.t for s in other])


def test_one_flag_in_one_stratum_has_the_p_of_fisher() -> None:
    """Of 40 tokens of two like steps 8 are lost; the turns are a sample of all ways to do so."""
    n = 20
    step, request = np.repeat([0, 1], n), np.arange(2 * n)
    lost, flag = np.zeros(2 * n, bool), np.zeros((1, 2 * n))
    lost[[0, 1, 2, 3, 20, 21, 22, 23]] = True
    flag[0, [0, 1, 10, 20, 21, 30]] = 1

    rows = all_rows([PartialRows(step, request, np.zeros(2 * n, int), lost, flag)], [request * 0])
    p = []
    for seed in range(40):
        sizes = np.abs(Units(rows, 499, seed).drawn(flag))[0]
        p.append((sizes >= sizes[0] - 1e-9).mean())
    ways = stats.hypergeom(n, 3, 4).pmf(np.arange(4))
    both = np.add.outer(np.arange(4), np.arange(4)) - 2 * 3 * 4 / n
    exact = np.outer(ways, ways)[np.abs(both) >= 4 - 1.2 - 1e-9].sum()
    assert np.mean(p) == pytest.approx(exact, abs=0.02)
