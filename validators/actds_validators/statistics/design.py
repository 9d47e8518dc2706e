"""Design-based estimates: a sample of known probabilities, and no model of what was lost.

Rows or whole requests are drawn, each by itself and with a known probability. What is uncertain is
which were drawn, and nothing else, so an interval holds whatever the rows depend on: behind the
follow-up of an audit, and its means of a run whose rows were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from actds_validators.arrays import Bools, Floats, Ints


@dataclass(frozen=True)
class SampleMean:
    """Means of a population of rows, estimated from the rows of drawn clusters.

    Args:
        mean: of each variable, ``(d,)``.
        error: standard error of each.
        skew: third standardised moment of the clusters' residuals over the root of their number.
        freedom: effective degrees of freedom of the errors.
    """

    mean: Floats
    error: Floats
    skew: Floats
    freedom: float

    def interval(self, confidence: float, n_values: int) -> tuple[Floats, Floats]:
        """Return both ends of intervals that hold for ``n_values`` means at once.

        Student's t with Bonferroni's correction, and where residuals are skewed as far as Hall's
        transformation of t reaches (1992): of a mean that few clusters carry t alone holds too
        seldom (89 % where a tenth of 80 clusters carries it; so 97 %).
        """
        t = -special.stdtrit(self.freedom, (1 - confidence) / 2 / n_values)
        low, high = -self._hall(t), -self._hall(-t)
        with np.errstate(invalid="ignore"):  # an infinite error times 0
            return (
                self.mean + self.error * np.minimum(low, -t),
                self.mean + self.error * np.maximum(high, t),
            )

    def _hall(self, t: float) -> Floats:
        skew = np.where(np.abs(self.skew) < 1e-6, 1e-6, self.skew)
        return np.asarray(3 / skew * (np.cbrt(1 + skew * (t - skew / 6)) - 1), np.float64)


def mean_of_clusters(n: Floats, total: Floats, fraction: float) -> SampleMean:
    """Return the means over all rows of a population of which clusters were drawn.

    Args:
        n: rows of each drawn cluster, ``(k,)``, at least one in each.
        total: their sums, ``(k, d)``.
        fraction: probability with which each cluster was drawn; of 1 there is no error.
    """
    size, root = float(n.sum()), np.sqrt(1 - fraction)
    mean = total.sum(axis=0) / size
    residual = root * (total - n[:, None] * mean)
    freedom = size**2 / float((n**2).sum()) - 1.0
    return _linearised(mean, size, residual, n / size, freedom, root)


def _linearised(
    mean: Floats,
    size: float,
    residual: Floats,
    share: Floats,
    freedom: float,
    root: float,
    beside: Floats | float = 0.0,
) -> SampleMean:
    """Return means with the errors that the residuals of drawn clusters give.

    The ratio of sums, whose variance is that of the linearised residuals of whole clusters under
    Poisson sampling (Särndal, Swensson, Wretman 1992, 5.7 and 3.4), each divided by one less its
    share of the rows, as the jackknife does: rows that are drawn together count as one draw.
    Degrees of freedom are those of as many equal clusters as they are worth, by Kish, less one.

    Args:
        size: rows of the population, or of the sample where all have one probability.
        residual: of each cluster, ``(k, d)``, times the root of one less its probability.
        share: of each cluster of the size, ``(k,)``.
        root: the root of one less the probability, of the clusters that make the error.
        beside: variance of the sums that the residuals leave out, ``(d,)``.
    """
    none = np.zeros_like(mean)
    freedom = max(freedom, 1.0)
    if root == 0:
        return SampleMean(mean, none, none, freedom)
    if len(share) == 1:  # its residual is zero by construction, and says nothing
        return SampleMean(mean, np.full_like(mean, np.inf), none, freedom)
    residual = residual / (1 - share)[:, None]
    squares = (residual**2).sum(axis=0)
    variance = np.maximum(squares + beside, 0.0)
    skew = np.divide(root * (residual**3).sum(axis=0), variance**1.5, out=none, where=variance > 0)
    return SampleMean(mean, np.sqrt(variance) / size, skew, freedom)


@dataclass
class SampleSums:
    """Sums over rows that were drawn with probabilities of their own, the *inclusion* of each.

    A *unit* is what was drawn by itself: a row, or a request with all its rows. Units share
    clusters at random, so that sums of each are in memory, however many units there are.

    Args:
        n: rows.
        size, total, squares: sums of w, w y and w y^2 over the rows, w = 1 / inclusion.
        plain: sums of y, each row once.
        spread_size, spread: sums of a and a y by cluster, ``(k,)`` and ``(k, d)``, with
            a = w sqrt(1 - inclusion).
        weight: sums of w by cluster.
        linear: sums of a^2 m y, ``(d,)``, m the rows of the unit.
        scalars: sums of w^2, a^2, a^2 m, a^4 m and a^2 (1 - inclusion).
    """

    n: int
    size: float
    total: Floats
    squares: Floats
    plain: Floats
    spread_size: Floats
    spread: Floats
    weight: Floats
    linear: Floats
    scalars: Floats

    @classmethod
    def of(cls, d: int, n_clusters: int) -> SampleSums:
        total, squares, plain, linear = np.zeros((4, d))
        spread_size, weight = np.zeros((2, n_clusters))
        spread = np.zeros((n_clusters, d))
        return cls(0, 0.0, total, squares, plain, spread_size, spread, weight, linear, np.zeros(5))

    def add(self, rows: Floats, inclusion: Floats, cluster: Ints, n_unit: Floats) -> None:
        """Add rows ``(n, d)``; those with a value that is not finite are left out.

        Args:
            inclusion: probability with which each was drawn, ``(n,)``.
            cluster: the cluster of its unit.
            n_unit: rows of its unit that were drawn; 1 where rows are the units.
        """
        finite: Bools = np.asarray(np.isfinite(rows).all(axis=1))
        if not finite.all():
            rows, cluster = rows[finite], cluster[finite]
            inclusion, n_unit = inclusion[finite], n_unit[finite]
        w, rest = 1 / inclusion, 1 - inclusion
        a2 = w**2 * rest
        self.n += len(w)
        self.size += float(w.sum())
        self.total += w @ rows
        self.squares += w @ rows**2
        self.plain += rows.sum(axis=0)
        self.linear += (a2 * n_unit) @ rows
        powers = w**2, a2, a2 * n_unit, a2**2 * n_unit, a2 * rest
        self.scalars += [power.sum() for power in powers]
        k = len(self.weight)
        self.weight += np.bincount(cluster, w, minlength=k)
        uncertain = np.flatnonzero(a2)
        a, at = np.sqrt(a2[uncertain]), cluster[uncertain]
        self.spread_size += np.bincount(at, a, minlength=k)
        shape = k, len(uncertain)
        self.spread += csr_array((a, (at, np.arange(len(at)))), shape=shape) @ rows[uncertain]

    def merge(self, other: SampleSums) -> None:
        for name, values in vars(other).items():
            setattr(self, name, getattr(self, name) + values)

    @property
    def effective(self) -> float:
        """Return how many rows of equal weight say as much, by Kish."""
        return self.size**2 / float(self.scalars[0]) if self.n else 0.0

    @property
    def sd(self) -> Floats:
        """Return the standard deviation over all rows that were drawn from."""
        variance = self.squares / self.size - (self.total / self.size) ** 2
        return np.asarray(np.sqrt(np.maximum(variance, 0)), np.float64)

    def mean(self) -> SampleMean:
        """Return the means over all rows that were drawn from.

        Clusters of many units add up units that have nothing to do with each other, about a mean
        that is that of all only where all have one inclusion: it is taken out, and what it stands
        for is added by unit.
        """
        _, of_rows, second, fourth, rest = self.scalars.tolist()
        mean = self.total / self.size
        used = self.spread_size > 0
        if not used.any():
            return _linearised(mean, self.size, self.spread[:0], self.weight[:0], 1.0, 0.0)
        n = self.spread_size[used]
        residual = self.spread[used] - n[:, None] * mean
        middle = residual.sum(axis=0) / n.sum()
        beside = 2 * middle * (self.linear - mean * second) - middle**2 * second
        residual -= n[:, None] * middle
        share = self.weight[used] / self.size
        freedom = min(of_rows**2 / fourth, float(used.sum())) - 1.0
        root = float(np.sqrt(rest / of_rows))
        return _linearised(mean, self.size, residual, share, freedom, root, beside)


def wilson(n_hits: int, n: int, confidence: float) -> tuple[float, float]:
    """Return both ends of Wilson's interval for a share, of draws each by itself."""
    z = float(special.ndtri((1 + confidence) / 2))
    share, room = n_hits / n, z**2 / n
    middle = (share + room / 2) / (1 + room)
    half = z / (1 + room) * float(np.sqrt(share * (1 - share) / n + room / n / 4))
    return max(0.0, middle - half), min(1.0, middle + half)
