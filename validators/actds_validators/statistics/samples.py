"""Two sets of rows, of other tokens or of the same: variances, a classifier, distances, channels.

Tests exchange or average whole requests: the rows of one request are not independent. A *unit* is
what one request has on one side; labels say per unit which side it stands on, so a permutation
costs a sum over units.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr  # type: ignore[import-untyped]

from actds_validators.statistics.events import Bools, Floats, Ints

Labels = Bools
Rows = npt.NDArray[np.float32]

N_FOLDS = 5
_RIDGE = 0.01  # of the mean variance of a direction
_TINY = 1e-12


@dataclass(frozen=True)
class Units:
    """What requests have on the two sides.

    Args:
        of_row: unit of each row ``(n,)``.
        request: request of each unit ``(n_units,)``.
        side: whether a unit stands on the second side ``(n_units,)``.
    """

    of_row: Ints
    request: Ints
    side: Labels

    def __len__(self) -> int:
        return len(self.request)

    def on_side(self, second: bool) -> tuple[Bools, Units]:
        """Return which rows one side has, and its units."""
        kept = self.side == second
        rows = kept[self.of_row]
        renumbered = np.cumsum(kept) - 1
        return rows, Units(renumbered[self.of_row[rows]], self.request[kept], self.side[kept])


def make_units(request: Ints, second: Labels) -> Units:
    """Return the units of rows: one per request and side.

    Args:
        request: request of each row ``(n,)``.
        second: whether a row is of the second side ``(n,)``.
    """
    key, of_row = np.unique(request * 2 + second, return_inverse=True)
    return Units(of_row.astype(np.int64), key // 2, key % 2 == 1)


def exchanges(units: Units, n: int, seed: int) -> Labels:
    """Return random relabellings ``(n, n_units)`` that the null hypothesis makes alike.

    A request on both sides swaps its two units or does not; the sides of the others are
    permuted among them.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    _, which, counts = np.unique(units.request, return_inverse=True, return_counts=True)
    both = counts[which] == 2
    labels = np.tile(units.side, (n, 1))
    swap = rng.random((n, len(counts))) < 0.5
    labels[:, both] ^= swap[:, which[both]]
    labels[:, ~both] = rng.permuted(labels[:, ~both], axis=1)
    return labels


def halves(n_units: int, n: int, seed: int) -> Labels:
    """Return random halves ``(n, n_units)`` of the units of one side."""
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.permuted(np.tile(np.arange(n_units) < n_units // 2, (n, 1)), axis=1)


def permutation_p(value: float, under_null: Floats) -> float:
    """Return the share of relabellings at least as large, the observed one among them."""
    return float((1 + np.sum(under_null >= value - 1e-12)) / (1 + len(under_null)))


def standardised(rows: Rows) -> Rows:
    """Return rows whose channels have mean 0 and variance 1; constant channels are left out."""
    mean = rows.mean(axis=0, dtype=np.float64)
    sd = rows.std(axis=0, dtype=np.float64)
    varies = sd > 1e-6 * (np.abs(mean) + _TINY)
    scaled: Rows = (rows[:, varies] - mean[varies].astype(np.float32)) / sd[varies].astype(
        np.float32
    )
    return scaled


def leading_subspace(rows: Rows, n: int, seed: int) -> Rows:
    """Return coordinates ``(n_rows, n)`` in the subspace of the largest variances.

    Randomised subspace iteration; the sides of the rows play no part in it.
    """
    n = min(n, rows.shape[1])
    rng = np.random.Generator(np.random.Philox(seed))
    n_probe = min(rows.shape[1], n + 8)
    basis = rng.standard_normal((rows.shape[1], n_probe), dtype=np.float32)
    for _ in range(3):
        basis = np.linalg.qr(rows.T @ (rows @ basis))[0]
    small = rows @ basis
    _, vectors = np.linalg.eigh((small.T @ small).astype(np.float64))
    leading: Rows = small @ vectors[:, ::-1][:, :n].astype(np.float32)
    return leading


def log_variance_ratio(rows: Rows, units: Units, labels: Labels) -> Floats:
    """Return the rms over channels of ln(variance second / variance first), per labelling.

    Args:
        rows: standardised rows ``(n, d)``.
        units: their units.
        labels: ``(n_labellings, n_units)``.
    """
    sums = _unit_powers(rows, units, 2)
    first, second = (_moments(sums, units, side) for side in (~labels, labels))
    ratio = np.log(np.maximum(second[1], _TINY) / np.maximum(first[1], _TINY))
    rms: Floats = np.sqrt(np.mean(np.square(ratio), axis=1))
    return rms


def kurtosis_gap(rows: Rows, units: Units, labels: Labels) -> tuple[Floats, tuple[float, float]]:
    """Return how far the median channel's excess kurtosis differs, and its two values.

    The two values are those of the first labelling.
    """
    sums = _unit_powers(rows, units, 4)
    medians = []
    for side in (~labels, labels):
        mean, variance, third, fourth = _moments(sums, units, side)
        central = fourth - 4 * mean * third + 6 * mean**2 * (variance + mean**2) - 3 * mean**4
        excess = central / np.maximum(variance, _TINY) ** 2 - 3
        medians.append(np.median(excess, axis=1))
    return np.abs(medians[1] - medians[0]), (float(medians[0][0]), float(medians[1][0]))


def covariance_distance(rows: Rows, units: Units, labels: Labels) -> Floats:
    """Return the affine-invariant distance of the two covariances, per labelling.

    It is the rms of the logarithms of their generalised eigenvalues: 0 for equal ones, and the
    same whatever the axes and scales of the rows.

    Args:
        rows: rows ``(n, k)`` in few directions.
        units: their units.
        labels: ``(n_labellings, n_units)``.
    """
    k = rows.shape[1]
    values = rows.astype(np.float64)
    counts = np.bincount(units.of_row, minlength=len(units)).astype(np.float64)
    outer = np.zeros((len(units), k, k))
    for unit, which in enumerate(_rows_of(units)):
        outer[unit] = values[which].T @ values[which]
    sums = _unit_powers(rows, units, 1)[0]
    covariances = []
    for side in (~labels, labels):
        weight = side.astype(np.float64)
        n = np.maximum(weight @ counts, 1)[:, None, None]
        mean = (weight @ sums)[:, :, None] / n
        second = (weight @ outer.reshape(len(units), k * k)).reshape(-1, k, k) / n
        covariance = second - mean @ mean.transpose(0, 2, 1)
        trace = np.trace(covariance, axis1=1, axis2=2)[:, None, None] / k
        covariances.append(covariance + (1e-6 * trace + _TINY) * np.eye(k))
    root = np.linalg.cholesky(covariances[0])
    half = np.linalg.solve(root, covariances[1])
    whitened = np.linalg.solve(root, half.transpose(0, 2, 1))
    eigenvalues = np.linalg.eigvalsh((whitened + whitened.transpose(0, 2, 1)) / 2)
    distance: Floats = np.sqrt(np.mean(np.log(np.maximum(eigenvalues, _TINY)) ** 2, axis=1))
    return distance


def rate_gap(flag: Labels, units: Units, labels: Labels) -> Floats:
    """Return how far the share of flagged rows differs between the sides, per labelling."""
    counts = np.bincount(units.of_row, minlength=len(units)).astype(np.float64)
    flagged = np.bincount(units.of_row, weights=flag, minlength=len(units))
    rates = [
        (side.astype(np.float64) @ flagged) / np.maximum(side.astype(np.float64) @ counts, 1)
        for side in (~labels, labels)
    ]
    gap: Floats = np.abs(rates[1] - rates[0])
    return gap


def grouped_auc(rows: Rows, units: Units, labels: Labels, seed: int) -> Floats:
    """Return how well a linear discriminant tells the sides apart, per labelling.

    Ridge-regularised linear discriminant, trained on the requests of four folds and scored on
    those of the fifth; folds hold whole requests. Training on the total scatter gives the
    direction that the within-class scatter would, and does not depend on the labels.

    Args:
        rows: standardised rows ``(n, d)``.
        units: their units.
        labels: ``(n_labellings, n_units)``.
        seed: of the folds.

    Returns:
        Area under the ROC curve ``(n_labellings,)``: 0.5 for sides that cannot be told apart.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    known, which = np.unique(units.request, return_inverse=True)
    fold_of_request = rng.permutation(np.arange(len(known)) % N_FOLDS)
    fold = fold_of_request[which][units.of_row]
    order = np.argsort(fold, kind="stable")
    rows, unit, fold = rows[order], units.of_row[order], fold[order]
    edges = np.searchsorted(fold, np.arange(N_FOLDS + 1))
    parts = [_Fold(rows[a:b], labels[:, unit[a:b]]) for a, b in pairwise(edges.tolist())]
    total = [sum(part.sums[i] for part in parts) for i in range(4)]
    n_rows, areas, weights = len(rows), [], []
    for part in parts:
        scatter, row_sum, second_sum, n_second = (
            everything - own for everything, own in zip(total, part.sums, strict=True)
        )
        n = n_rows - len(part.rows)
        mean = row_sum / max(n, 1)
        covariance = scatter / max(n, 1) - np.outer(mean, mean)
        covariance += _RIDGE * (np.trace(covariance) / len(mean) + _TINY) * np.eye(len(mean))
        first_sum = row_sum[:, None] - second_sum
        gap = second_sum / np.maximum(n_second, 1) - first_sum / np.maximum(n - n_second, 1)
        direction = np.linalg.solve(covariance, gap).astype(np.float32)
        area, weight = ranked_areas(part.rows @ direction, part.labels)
        areas.append(area)
        weights.append(weight)
    weight = np.array(weights)
    mean_area: Floats = (np.array(areas) * weight).sum(axis=0) / np.maximum(weight.sum(axis=0), 1)
    mean_area[weight.sum(axis=0) == 0] = 0.5
    return mean_area


class _Fold:
    """The rows of a fold, their labels ``(n_labellings, n)`` and the sums that training needs."""

    def __init__(self, rows: Rows, labels: Labels) -> None:
        self.rows, self.labels = rows, labels
        second = labels.T.astype(np.float32)
        self.sums: tuple[Any, ...] = (
            (rows.T @ rows).astype(np.float64),
            rows.sum(axis=0, dtype=np.float64),
            (rows.T @ second).astype(np.float64),
            labels.sum(axis=1).astype(np.float64),
        )


def ranked_areas(scores: Rows, labels: Labels) -> tuple[Floats, Floats]:
    """Return the area under the ROC curve per labelling, ties counted half, and its pairs."""
    areas, pairs = np.full(len(labels), 0.5), np.zeros(len(labels))
    for i, second in enumerate(labels):
        column = np.ascontiguousarray(scores[:, i])
        above, below = column[second], np.sort(column[~second])
        pairs[i] = float(len(above)) * len(below)
        if pairs[i]:
            less = np.searchsorted(below, above, side="left").sum()
            at_most = np.searchsorted(below, above, side="right").sum()
            areas[i] = (less + at_most) / 2 / pairs[i]
    return areas, pairs


def _unit_powers(rows: Rows, units: Units, n_powers: int) -> list[Floats]:
    """Return the sums over each unit of the powers 1 .. n of the rows, ``(n_units, d)`` each."""
    sums = [np.zeros((len(units), rows.shape[1])) for _ in range(n_powers)]
    for unit, which in enumerate(_rows_of(units)):
        value = rows[which].astype(np.float64)
        power = value
        for n, out in enumerate(sums):
            power = value if n == 0 else power * value
            out[unit] = power.sum(axis=0)
    return sums


def _rows_of(units: Units) -> list[Ints]:
    """Return the rows of each unit."""
    order = np.argsort(units.of_row, kind="stable")
    counts = np.bincount(units.of_row, minlength=len(units))
    return np.split(order, np.cumsum(counts)[:-1])


def _moments(sums: list[Floats], units: Units, side: Labels) -> list[Floats]:
    """Return per labelling mean, variance and the raw moments from the third of one side."""
    counts = np.bincount(units.of_row, minlength=len(units)).astype(np.float64)
    weight = side.astype(np.float64)
    n = np.maximum(weight @ counts, 1)[:, None]
    raw = [(weight @ power) / n for power in sums]
    return [raw[0], raw[1] - raw[0] ** 2, *raw[2:]]


_N_ROWS = 2048  # rows that are held as float64 at a time


@dataclass(frozen=True)
class ChannelShift:
    """The mean difference of each channel and its test.

    Args:
        mean: mean over requests ``(d_model,)``.
        p: two-sided p of a t test over requests ``(d_model,)``.
        n_requests: requests it rests on.
    """

    mean: Floats
    p: Floats
    n_requests: int


def relative_l2(first: Rows, second: Rows) -> Floats:
    """Return ``|second - first| / |first|`` per row, shape (n,).

    Args:
        first: rows ``(n, d_model)``, none of them zero.
        second: the same tokens' rows.
    """
    return _by_rows(first, second, _relative_l2)


def cosine_distance(first: Rows, second: Rows) -> Floats:
    """Return one minus the cosine per row, shape (n,); exactly 0 for equal rows."""
    return _by_rows(first, second, _cosine_distance)


def relative_shift(first: Rows, second: Rows) -> Rows:
    """Return ``second - first`` over the root mean square of the first row, ``(n, d_model)``.

    Rounding goes with the size of a row, so rows of very different norms get one scale.
    """
    scale = np.sqrt(np.mean(np.square(first, dtype=np.float64), axis=1, keepdims=True))
    shift: Rows = (second - first) / scale.astype(np.float32)
    return shift


def request_means(values: npt.NDArray[Any], request: Ints) -> Floats:
    """Return the mean of the rows of each request ``(n_requests, d_model)``, in their order."""
    order = np.argsort(request, kind="stable")
    _, starts = np.unique(request[order], return_index=True)
    parts = np.split(order, starts[1:])
    means: Floats = np.stack([values[rows].mean(axis=0, dtype=np.float64) for rows in parts])
    return means


def channel_shift(means: Floats) -> ChannelShift:
    """Test in each channel whether the mean over requests is zero (t test, two-sided).

    Args:
        means: one mean difference per request ``(n_requests, d_model)``, at least two requests.
    """
    n = len(means)
    mean = means.mean(axis=0)
    error = means.std(axis=0, ddof=1) / np.sqrt(n)
    # Rounding of the mean itself is no spread: a channel that does not vary is equal or not.
    flat = error <= 1e-12 * np.abs(mean)
    t = np.divide(mean, error, out=np.zeros_like(mean), where=~flat)
    p = 2 * stdtr(n - 1, -np.abs(t))
    return ChannelShift(mean, np.where(flat, (mean == 0).astype(np.float64), p), n)


def sign_flips(n_requests: int, n_splits: int, seed: int) -> Floats:
    """Return signs ``(n_splits, n_requests)``: one half of the requests against the other."""
    rng = np.random.Generator(np.random.Philox(seed))
    signs = np.where(np.arange(n_requests) < n_requests // 2, -1.0, 1.0)
    return rng.permuted(np.tile(signs, (n_splits, 1)), axis=1)


def _by_rows(first: Rows, second: Rows, measure: Any) -> Floats:
    parts = [
        measure(
            first[at : at + _N_ROWS].astype(np.float64), second[at : at + _N_ROWS].astype(float)
        )
        for at in range(0, len(first), _N_ROWS)
    ]
    return np.concatenate([np.empty(0), *parts])


def _relative_l2(first: Floats, second: Floats) -> Floats:
    distance: Floats = np.linalg.norm(second - first, axis=1) / np.linalg.norm(first, axis=1)
    return distance


def _cosine_distance(first: Floats, second: Floats) -> Floats:
    one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (first, second))
    distance: Floats = np.square(one - other).sum(axis=1) / 2
    return distance
