"""Missingness: per covariate, how what was lost differs from what there was.

Fourth stage of the audit: sums to estimates with intervals. Imports the statistics and the result.
"""

from __future__ import annotations

import numpy as np

from actds_validators.audit.bands import Bands
from actds_validators.audit.result import (
    Bound,
    BoundPoint,
    Covariate,
    Difference,
    Estimate,
    Missingness,
    Stratum,
)
from actds_validators.audit.series import SYSTEM, Series
from actds_validators.audit.sums import CovariateSums
from actds_validators.statistics.distributions import (
    farthest_mean,
    jensen_shannon,
    total_variation,
    worst_case,
)
from actds_validators.statistics.events import Floats
from actds_validators.statistics.intervals import (
    Blocks,
    Interval,
    at_least,
    difference_sums,
    error_of_draws,
    jackknife_many,
    loss_rate,
    smd,
    smd_of_stored,
)

__all__ = [
    "block_totals",
    "bound",
    "differences",
    "estimate",
    "missingness",
    "strata",
    "system_sums",
    "unbounded",
]

CURVE = (0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)


def estimate(interval: Interval | None) -> Estimate | None:
    """Return an interval as the result has it."""
    if interval is None:
        return None
    return Estimate(
        value=interval.value,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
    )


def unbounded(value: float, n: float, effective: float) -> Estimate | None:
    """Return a mean's distance whose jackknife says nothing, with the worst case about it.

    Args:
        value: in standard deviations of all rows.
        n: rows in all.
        effective: effective rows of the mean.
    """
    if not np.isfinite(value) or effective <= 0:
        return None
    far = farthest_mean(n, effective)
    return Estimate(value=value, low=-far, high=far, confidence=1.0)


def system_sums(series: Series) -> list[CovariateSums]:
    """Return the covariates of the serving system, which need no token."""
    return [
        CovariateSums(
            Covariate(name=name, label=label, unit=unit, group="system"),
            series.computed,
            series.system[name],
            series.lost,
        )
        for name, (label, unit) in SYSTEM.items()
    ]


def block_totals(blocks: Blocks, sums: list[CovariateSums]) -> Floats:
    """Return n, sx, sxx, n_lost and lx over blocks, ``(5, n_covariates, n_blocks)``."""
    # One by one: all of them side by side would be the largest arrays of an audit.
    each = [
        difference_sums(blocks, s.n, s.sums[:1], s.sums[1:2], s.n_lost, s.sums[2:]) for s in sums
    ]
    return np.concatenate(each, axis=1)


def differences(
    sums: list[CovariateSums], blocks: Blocks, bands: dict[str, Bands], n_events: float
) -> list[Difference]:
    """Return the difference of every covariate that varies and of which something was lost.

    Where the jackknife has no interval, as when one block holds all losses, that of the worst case
    stands in its place, with confidence 1, and there is none for the equivalence test.

    Args:
        sums: of the covariates.
        blocks: of the jackknife.
        bands: computed and lost tokens by bands, by covariate name, where there are any.
        n_events: effective events of the loss.
    """
    if not sums:
        return []
    totals = block_totals(blocks, sums)
    found = []
    lost_against_all = jackknife_many(totals, smd)
    stored_against_all = jackknife_many(totals, smd_of_stored)
    for k, one in enumerate(sums):
        n, sx, sxx, n_lost, lx = whole = totals[:, k].sum(axis=1)
        interval = lost_against_all[k]
        lost = estimate(interval) or unbounded(float(smd(whole)), n, n_lost)
        if lost is None:
            continue
        stored = stored_against_all[k]
        banded = bands.get(one.covariate.name)
        found.append(
            Difference(
                covariate=one.covariate,
                mean_all=sx / n,
                sd_all=float(np.sqrt(max(0.0, sxx / n - (sx / n) ** 2))),
                mean_lost=lx / n_lost,
                smd=lost,
                equivalence=estimate(
                    # Of losses in one block the stored rows have a jackknife, too narrow by far.
                    at_least(stored, error_of_draws(n, n_lost, n_events), 0.9)
                    if stored and interval
                    else None
                ),
                before_weighting=estimate(stored)
                or unbounded(float(smd_of_stored(whole)), n, n - n_lost),
                total_variation=_distance(total_variation, banded),
                jensen_shannon=_distance(jensen_shannon, banded),
                strata=strata(banded) if banded else [],
            )
        )
    return found


def strata(bands: Bands) -> list[Stratum]:
    """Return the loss rate of each band, with its interval over blocks."""
    sums = np.stack([bands.n.T, bands.lost.T])
    rates = jackknife_many(sums, loss_rate)
    found = []
    for k, label in enumerate(bands.labels):
        n, n_lost = float(bands.n[:, k].sum()), float(bands.lost[:, k].sum())
        if not n:
            continue
        edges = bands.edges[k] if bands.edges else None
        rate = estimate(rates[k]) or Estimate(value=n_lost / n, low=0.0, high=1.0)
        found.append(
            Stratum(
                label=label,
                low=edges[0] if edges else None,
                high=edges[1] if edges else None,
                n=int(n),
                n_lost=int(n_lost),
                rate=Estimate(value=rate.value, low=max(0.0, rate.low), high=min(1.0, rate.high)),
            )
        )
    return found


def bound(loss_share: float) -> Bound:
    """Return the worst case of a share of loss, and the curve it lies on."""
    share = min(loss_share, 1 - 1e-9)
    return Bound(
        loss_share=loss_share,
        bias=worst_case(share),
        curve=[BoundPoint(loss_share=s, bias=worst_case(s)) for s in CURVE],
    )


def missingness(
    found: list[Difference], loss_share: float, *, has_values: bool, has_ids: bool
) -> Missingness:
    """Return the section: differences, the bound, and which questions could be asked."""
    asked = ["whether losses go with the load, the batch and the time"]
    asked.append("whether losses go with position, length, phase and source")
    not_asked = []
    ids = "whether losses go with the tokens themselves (rarity, special tokens)"
    values = "whether losses go with the values of the rows, which is what MNAR means"
    if has_ids:
        asked.append(ids)
    else:
        not_asked.append(f"{ids}: the ids of lost tokens are only known with readouts")
    if has_values:
        asked.append(values)
    else:
        not_asked.append(f"{values}: the run has no readouts, so lost rows left no trace")
    not_asked.append(
        "whether losses go with the model's entropy over the next token: no table records it"
    )
    return Missingness(
        differences=found, bound=bound(loss_share), could_ask=asked, could_not_ask=not_asked
    )


def _distance(measure: object, bands: Bands | None) -> float | None:
    if bands is None or not callable(measure):
        return None
    found = measure(bands.lost.sum(axis=0), bands.n.sum(axis=0))
    return None if found is None else float(found)
