"""Quantiles of distances in one pass: counts in bins of equal ratio, and the largest value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actds_validators.arrays import Floats, Ints
from actds_validators.regimes.result import Quantiles
from actds_validators.regimes.strata import MIN_REQUESTS, Stratum

LOWEST = 1e-12
"""Distances below count as 0."""
PER_DECADE = 200
"""Bins: a quantile is off by 0.6 % of itself at most."""
_DECADES = 15


class Histogram:
    """Counts of values by stratum."""

    def __init__(self, n_strata: int) -> None:
        self._n_strata = n_strata
        self._counts: dict[str, Ints] = {}
        self._largest: dict[str, Floats] = {}

    @property
    def names(self) -> list[str]:
        """Return what was counted."""
        return list(self._counts)

    def add(self, name: str, values: Floats, strata: Sequence[Ints]) -> None:
        """Count values ``(n,)`` in the strata of each axis ``(n,)``, -1 for none."""
        n_bins = _DECADES * PER_DECADE + 2
        if name not in self._counts:
            self._counts[name] = np.zeros((self._n_strata, n_bins), np.int64)
            self._largest[name] = np.zeros(self._n_strata)
        positive = np.maximum(np.nan_to_num(values), LOWEST / 10)
        place = np.floor(np.log10(positive / LOWEST) * PER_DECADE).astype(np.int64) + 1
        place = np.clip(place, 0, n_bins - 1)
        for stratum in strata:
            mine = stratum >= 0
            np.add.at(self._counts[name], (stratum[mine], place[mine]), 1)
            np.maximum.at(self._largest[name], stratum[mine], values[mine])

    def count(self, name: str, stratum: int) -> int:
        """Return how many values a stratum has."""
        return int(self._counts[name][stratum].sum())

    def quantile(self, name: str, stratum: int, share: float) -> float:
        """Return a quantile; share 1 gives the largest value itself."""
        largest = float(self._largest[name][stratum])
        if share >= 1:
            return largest
        counts = np.cumsum(self._counts[name][stratum])
        place = int(np.searchsorted(counts, share * counts[-1], side="left"))
        if place == 0:
            return 0.0
        return min(float(LOWEST * 10 ** ((place - 0.5) / PER_DECADE)), largest)


def quantile_lines(histogram: Histogram, strata: Sequence[Stratum], hook: str) -> list[Quantiles]:
    """Return the quantiles at 50, 90, 99 and 100 % of every stratum of at least eight pairs."""
    return [
        Quantiles(
            hook=hook,
            axis=stratum.axis,
            stratum=stratum.name,
            measure=name,
            n_pairs=histogram.count(name, n),
            p50=histogram.quantile(name, n, 0.5),
            p90=histogram.quantile(name, n, 0.9),
            p99=histogram.quantile(name, n, 0.99),
            p100=histogram.quantile(name, n, 1.0),
        )
        for name in histogram.names
        for n, stratum in enumerate(strata)
        if histogram.count(name, n) >= MIN_REQUESTS
    ]
