"""Features: how often those of a dictionary are active over all rows that were drawn from.

Beside the means of `actds_validators.audit.sample`, and from the same rows: values that are 0 in
most of them, where an interval has to be honest of what few rows or none have. Of the rows that a
drop policy never touched, with which features it kept them.

Spec: 0.1 section 14.13.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special  # type: ignore[import-untyped]

from actds.dataset.catalog import Catalog
from actds.text import storable
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.follow_up import CONFIDENCE
from actds_validators.audit.result import Efficiency, Estimate, FeatureRates
from actds_validators.dictionaries import Dictionary, by_hook
from actds_validators.dictionaries.formats import load_dictionary
from actds_validators.sections import recorded
from actds_validators.statistics.design import RateSums, Units, exact_share

MAX_LISTED = 10
"""Features of a hook that are listed as kept unlike the others."""
_CLUSTERS, _SPREAD = (64, 1024), 1 << 21
"""Clusters of requests, from and to, and how many numbers their sums have in between."""


def dictionaries_of(
    catalog: Catalog, sae: Sequence[str | os.PathLike[str]], model: str | None
) -> dict[str, Dictionary]:
    """Return the dictionaries of ``[HOOK=]PATH`` by hook; errors are those of `by_hook`.

    Args:
        model: what they call the model of the rows; the name in the run records by default.
    """
    names = recorded(catalog, "model.name")
    name = model or (names[0] if len(names) == 1 else None)
    return by_hook(
        "sae",
        sae,
        {hook.name: hook.d_model for hook in catalog.genesis.hooks},
        lambda path, hook, width: load_dictionary(path, hook, width, model=name),
    )


@dataclass
class FeatureSums:
    """Sums over stored rows, and of each feature how many rows of the lane have it.

    Args:
        lane: those rows, and those of them that the policy kept, ``(2, d)``.
        n_lane: the same over all rows of the lane, ``(2,)``.
    """

    dictionary: Dictionary
    rates: RateSums
    lane: Ints
    n_lane: Ints

    @classmethod
    def of(cls, dictionary: Dictionary, by_request: bool) -> FeatureSums:
        d = dictionary.n_features
        few, most = _CLUSTERS
        rates = RateSums.of(d, min(most, max(few, _SPREAD // d)) if by_request else 0)
        return cls(dictionary, rates, np.zeros((2, d), np.int64), np.zeros(2, np.int64))

    def add(
        self,
        rows: npt.NDArray[np.floating],
        inclusion: Floats,
        units: Units | None,
        in_lane: Bools,
        kept: Bools,
    ) -> None:
        """Add rows ``(n, d_model)``; those with a value that is not finite are left out."""
        finite: Bools = np.asarray(np.isfinite(rows).all(axis=1))
        features = self.dictionary.encode_sparse(rows[finite])
        inclusion, in_lane, kept = inclusion[finite], in_lane[finite], kept[finite]
        if units is not None:
            cluster = units.cluster * len(self.rates.spread_size) // _CLUSTERS[1]
            units = Units(units.n, cluster, units.sign).take(finite)
        self.rates.add(features, inclusion, units)
        for nth, of in enumerate((in_lane, in_lane & kept)):
            self.n_lane[nth] += of.sum()
            if of.any():
                self.lane[nth] += np.bincount(features[of].indices, minlength=self.lane.shape[1])

    def merge(self, other: FeatureSums) -> None:
        self.rates.merge(other.rates)
        self.lane += other.lane
        self.n_lane += other.n_lane


def rates_of(sums: Mapping[str, FeatureSums], least: float) -> list[FeatureRates]:
    """Return how often each feature of each hook is active, over all rows that were drawn from.

    Args:
        least: lowest inclusion of a row that was drawn from.
    """
    n_values = sum(of.dictionary.n_features for of in sums.values())
    sections = []
    for hook, of in sums.items():
        rates = of.rates
        ends = rates.rates(CONFIDENCE, n_values, least)
        mean, half = rates.means(CONFIDENCE, n_values)
        rate, low, high = (list(map(_rounded, values)) for values in ends)
        sections.append(
            FeatureRates(
                hook=hook,
                path=storable(of.dictionary.source.path),
                sha256=of.dictionary.source.sha256,
                n_features=of.dictionary.n_features,
                n_rows=rates.n,
                confidence=CONFIDENCE,
                n_active=rates.n_active.tolist(),
                rate=rate,
                low=low,
                high=high,
                mean=[_rounded(x) if np.isfinite(x) else None for x in mean],
                mean_half=[_rounded(x) if np.isfinite(x) else None for x in half],
            )
        )
    return sections


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def efficiencies(hook: str, sums: FeatureSums) -> tuple[list[Efficiency], float]:
    """Return with which features rows of the lane were kept most unlike all, and the p of it.

    Rows of the lane are draws each by itself: those kept of the rows with a feature are binomial
    where it does not matter. The p is the smallest of all features, times their number.
    """
    n, kept = sums.lane
    of_all, kept_of_all = sums.n_lane.tolist()
    share, d = kept_of_all / max(1, of_all), len(n)
    if share in (0, 1):
        return [], 1.0
    sides = [
        np.where(k > 0, special.betainc(np.maximum(k, 1), n - k + 1, q), 1)  # k of n, or more
        for k, q in ((kept, share), (n - kept, 1 - share))
    ]
    p = np.minimum(1, 2 * np.minimum(*sides))
    far = np.abs(kept / np.maximum(n, 1) - share)
    listed = [at for at in np.lexsort((-far, p)).tolist() if n[at]][:MAX_LISTED]
    low, high = exact_share(kept[listed], n[listed], 1 - (1 - CONFIDENCE) / d)
    points = [
        Efficiency(
            kind=f"feature at {hook}",
            label=f"feature {at}",
            n=int(n[at]),
            kept=Estimate(
                value=kept[at] / n[at], low=float(a), high=float(b), confidence=CONFIDENCE
            ),
        )
        for at, a, b in zip(listed, low, high, strict=True)
    ]
    return points, min(1.0, float(p.min()) * d)
