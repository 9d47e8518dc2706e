"""Design-based estimates: a sample of known probabilities, and no model of what was lost.

Rows or whole requests are drawn, each by itself and with a known probability. What is uncertain is
which were drawn, and nothing else, so an interval holds whatever the rows depend on: behind the
follow-up of an audit, and its means of a run whose rows were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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


MIN_DRAWS = 100
"""Equal draws that an error has to be known as well as from, for an interval of a mean."""


class Units(NamedTuple):
    """What was drawn together, of rows ``(n,)``: its rows, a cluster, and a random sign."""

    n: Floats
    cluster: Ints
    sign: Floats

    def take(self, some: slice | Bools) -> Units:
        return Units(self.n[some], self.cluster[some], self.sign[some])


@dataclass
class RateSums:
    """Sums over drawn rows of values of which most are 0: of x, of a = w sqrt(1 - inclusion).

    Those of rows that were drawn one by one are exact. Units of several rows share clusters, each
    with a random sign, so that the square of a cluster's sum is that of its units on average.

    Args:
        n, size: rows, and the sum of w = 1 / inclusion.
        n_active: rows where each x is not 0, ``(d,)``.
        total: sums of w and w x over these, ``(2, d)``.
        single: sums of a^2, a^2 x and a^2 x^2 over these, of rows drawn one by one, ``(3, d)``.
        draws: sums of a^2 and a^4 over these, of all rows, ``(2, d)``.
        spread: signed sums of a and a x by cluster, of the other rows, ``(2, k, d)``.
        spread_size: signed sums of a by cluster over all other rows, ``(k,)``.
        scalars: sums of a^2 over rows drawn one by one; of a^2, a^2 m and a^4 m over all, m the
            rows of the unit.
    """

    n: int
    size: float
    n_active: Ints
    total: Floats
    single: Floats
    draws: Floats
    spread: Floats
    spread_size: Floats
    scalars: Floats

    @classmethod
    def of(cls, d: int, n_clusters: int) -> RateSums:
        """Return sums of no row; clusters are for units of several rows, else 0 of them will do."""
        spread, size = np.zeros((2, n_clusters, d)), np.zeros(n_clusters)
        (total, draws), single = np.zeros((2, 2, d)), np.zeros((3, d))
        n_active = np.zeros(d, np.int64)
        return cls(0, 0.0, n_active, total, single, draws, spread, size, np.zeros(4))

    def add(self, values: csr_array, inclusion: Floats, units: Units | None = None) -> None:
        """Add rows ``(n, d)``, finite ones.

        Args:
            inclusion: probability with which each was drawn, ``(n,)``.
            units: what was drawn together; ``None`` where each row was by itself.
        """
        d, w = values.shape[1], 1 / inclusion
        a2, m = w**2 * (1 - inclusion), np.ones(len(w)) if units is None else units.n
        row = np.repeat(np.arange(len(w)), np.diff(values.indptr))
        at, x = values.indices, values.data.astype(np.float64)
        self.n += len(w)
        self.size += float(w.sum())
        self.n_active += np.bincount(at, minlength=d)
        self.total += [np.bincount(at, v, d) for v in (w[row], w[row] * x)]
        self.draws += [np.bincount(at, v[row], d) for v in (a2, a2**2)]
        self.scalars[1:] += [a2.sum(), (a2 * m).sum(), (a2**2 * m).sum()]
        if units is None:
            self.scalars[0] += a2.sum()
            self.single += [np.bincount(at, a2[row] * v, d) for v in (1, x, x**2)]
            return
        a = units.sign * np.sqrt(a2)
        self.spread_size += np.bincount(units.cluster, a, minlength=len(self.spread_size))
        place = units.cluster[row] * d + at
        for sums, v in zip(self.spread, (1, x), strict=True):
            np.add.at(sums.reshape(-1), place, a[row] * v)

    def merge(self, other: RateSums) -> None:
        for name, values in vars(other).items():
            setattr(self, name, getattr(self, name) + values)

    def rates(self, confidence: float, n_values: int, least: float) -> tuple[Floats, ...]:
        """Return how often each value is not 0 over all rows, and both ends of its interval.

        As Clopper and Pearson's (1934) the ends are those of a beta distribution, here of the
        mean and variance that the design gives with one more unit of the largest weight: one that
        is not 0 for the upper end, one that is 0 for the lower (Fay and Feuer 1997, of rates whose
        weights differ). So of a value that no drawn row has there is an upper end as well.

        Args:
            n_values: intervals hold for so many values at once.
            least: lowest inclusion of any row that was drawn from.
        """
        tail = (1 - confidence) / 2 / n_values
        low, high = (self._end(is_active, least, tail) for is_active in (False, True))
        return self.total[0] / self.size, low, high

    def means(self, confidence: float, n_values: int) -> tuple[Floats, Floats]:
        """Return the means where values are not 0, and how far each may be off; NaN for none.

        And NaN where fewer than `MIN_DRAWS` equal draws say as much of the error.
        """
        y, x = self.total
        with np.errstate(invalid="ignore", divide="ignore"):
            r = x / y
            a2, a2_x, a2_xx = self.single
            variance = a2_xx - 2 * r * a2_x + r**2 * a2
            variance += ((self.spread[1] - r * self.spread[0]) ** 2).sum(axis=0)
            error = np.sqrt(np.maximum(variance, 0)) / y
        freedom = self._n_draws() if self.scalars[1] else np.full_like(r, np.inf)
        if len(self.spread_size):
            freedom = np.minimum(freedom, len(self.spread_size))
        t = -special.stdtrit(np.maximum(freedom - 1, 1), (1 - confidence) / 2 / n_values)
        return r, np.where(freedom >= MIN_DRAWS, t * error, np.nan)

    def _end(self, is_active: bool, least: float, tail: float) -> Floats:
        product, squares = self.spread_size @ self.spread[0], (self.spread[0] ** 2).sum(axis=0)
        unit = self._rows_of_a_unit(1) / least
        size = self.size + unit
        p = (self.total[0] + unit * is_active) / size
        variance = (self.single[0] * (1 - 2 * p)) + p**2 * self.scalars[0]
        variance += squares - 2 * p * product + p**2 * float((self.spread_size**2).sum())
        z = float(-special.ndtri(tail))
        variance = np.maximum(variance, 0) * (self._t(tail) / z) ** 2
        variance = (variance + (unit * (is_active - p)) ** 2) / size**2
        end = np.full_like(p, float(is_active))
        with np.errstate(invalid="ignore", divide="ignore"):
            n = p * (1 - p) / variance - 1  # rows drawn alike that say as much
            half = z * np.sqrt(variance)
        known, many = n > 0, n > 1e7
        a, b = p[known] * n[known], (1 - p[known]) * n[known]
        upper = 1 - special.betaincinv(b, a, tail)
        end[known] = upper if is_active else special.betaincinv(a, b, tail)
        end[many] = (p + half if is_active else p - half)[many]
        return np.asarray(np.clip(end, 0, 1), np.float64)

    def _rows_of_a_unit(self, more: int = 0) -> Floats:
        """Return how many rows with each value the unit of such a row has, on average.

        Args:
            more: so many further rows are counted, of units of which every row has the value.
        """
        _, second, of_units, _ = self.scalars
        all_rows = np.full(len(self.n_active), of_units / second if second else 1.0)
        rows = self.single[0] + (self.spread[0] ** 2).sum(axis=0)
        some = self.draws[0] > 0
        mean = np.divide(rows, self.draws[0], out=all_rows.copy(), where=some)
        n = np.maximum(self.n_active, 1)
        return np.asarray(np.maximum(1.0, (mean * n + all_rows * more) / (n + more)), np.float64)

    def _t(self, tail: float) -> Floats:
        """Return Student's t of the degrees of freedom that the error of each rate has.

        Those of the draw, of the clusters, or of the drawn units that have the value; where these
        have one row with it each, their variance is not estimated from them.
        """
        _, second, _, fourth = self.scalars
        rows, n = self._rows_of_a_unit(), self._n_draws()
        several = (rows > 1) & (n > 0)
        freedom = np.full(len(rows), second**2 / fourth - 1 if second else np.inf)
        if self.spread_size.any():
            freedom = np.minimum(freedom, float(len(self.spread_size)))
        of_value = n[several] * rows[several] / (rows[several] - 1)
        freedom[several] = np.minimum(freedom[several], of_value)
        return np.asarray(-special.stdtrit(np.maximum(freedom, 1.0), tail), np.float64)

    def _n_draws(self) -> Floats:
        """Return of how many equal draws the error of each value is; 0 where none was uncertain."""
        second, fourth = self.draws
        n = np.divide(second**2, fourth, out=np.zeros_like(second), where=second > 0)
        return np.asarray(n / self._rows_of_a_unit(), np.float64)


def exact_share(n_hits: Ints, n: Ints, confidence: float) -> tuple[Floats, Floats]:
    """Return both ends of Clopper and Pearson's intervals for shares, of draws each by itself."""
    tail, k = (1 - confidence) / 2, n_hits.astype(np.float64)
    rest = n - k
    low = np.where(k > 0, special.betaincinv(np.maximum(k, 1), rest + 1, tail), 0)
    high = np.where(rest > 0, 1 - special.betaincinv(np.maximum(rest, 1), k + 1, tail), 1)
    return low, high


def wilson(n_hits: int, n: int, confidence: float) -> tuple[float, float]:
    """Return both ends of Wilson's interval for a share, of draws each by itself."""
    z = float(special.ndtri((1 + confidence) / 2))
    share, room = n_hits / n, z**2 / n
    middle = (share + room / 2) / (1 + room)
    half = z / (1 + room) * float(np.sqrt(share * (1 - share) / n + room / n / 4))
    return max(0.0, middle - half), min(1.0, middle + half)
