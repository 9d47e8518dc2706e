"""The load that a step met, and how long after it a loss comes.

A full queue is the work of many steps: the tokens of the same step miss it. Imports `runs` and
`shift`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len  # type: ignore[import-untyped]
from scipy.signal import lfilter  # type: ignore[import-untyped]

from actds_validators.statistics.runs import Floats, Ints, as_floats, slices
from actds_validators.statistics.shift import N_DRAWS, effective_shifts, shifted_sums

__all__ = ["LagCorrelation", "ewma", "lag_correlation"]


@dataclass(frozen=True)
class LagCorrelation:
    """Correlation of the load with the loss some steps later.

    Args:
        lags: ``(2 max_lag + 1,)``, steps that the loss comes after the load.
        correlation: ``(2 max_lag + 1,)``.
        low: lower end of the band that holds ``confidence`` of the correlations at any one lag when
            load and loss have nothing to do with each other.
        high: its upper end.
        confidence: of the band.
        n_shifts: shifts that the band rests on, the observed position among them.
        n_effective: effectively independent ones of them (`shift.effective_shifts`).
    """

    lags: Ints
    correlation: Floats
    low: float
    high: float
    confidence: float
    n_shifts: int
    n_effective: float


def ewma(x: ArrayLike, run: ArrayLike, steps: float) -> Floats:
    """Return the exponentially weighted moving average up to and with each step.

    ``level = (1 - 1/steps) level + x / steps``, from 0 at the start of each run: an engine that
    starts has no work behind it.

    Args:
        x: ``(n_steps,)`` or ``(k, n_steps)``.
        run: ``(n_steps,)``, label of the run.
        steps: time constant, at least 1; 1 returns x.

    Raises:
        ValueError: shapes that differ, a value that is not finite, or less than one step.
    """
    values = as_floats(x, "x")
    if steps < 1 or values.shape[-1] != len(np.asarray(run)):
        raise ValueError(f"x has shape {values.shape}, {len(np.asarray(run))} labels, {steps=}")
    found = np.empty_like(values)
    for part in slices(run):
        found[..., part] = lfilter([1 / steps], [1, 1 / steps - 1], values[..., part])
    return found


def lag_correlation(
    load: ArrayLike,
    loss_share: ArrayLike,
    run: ArrayLike,
    max_lag: int,
    *,
    confidence: float = 0.95,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> LagCorrelation | None:
    """Return the correlation of the load with the loss h steps later, h from -max_lag to max_lag.

    ``sum_s a[s] b[s+h] / sqrt(sum a² sum b²)`` over pairs of one run, a and b about their runs' own
    means: the sample cross-correlation function (Box & Jenkins 1970, chapter 11). None when either
    does not vary.

    The band is what correlations look like when the loss lies anywhere: the losses of each run are
    moved along it in a circle, as in `shift.circular_shift`, and at most half of
    ``1 - confidence`` of the shifts lie outside at either end. Both series keep their own
    correlation in time. ``±2 / sqrt(n)`` would not do: the variance of the correlation of two
    unrelated series is ``sum_j rho_a(j) rho_b(j) / n`` (Bartlett 1955; Box & Jenkins 1970, section
    11.1), which the variance over the shifts estimates, and for few bursts it is far from normal,
    which quantiles need not be told. If load and loss are independent and stationary, the observed
    position is one shift of many alike, so that the band holds at each lag with ``confidence``, but
    for the seam (Davison & Hinkley 1997, section 4.4). It is pointwise: of 129 lags six lie outside
    by chance, neighbours together. An association is itself among the shifts, and widens the
    band if it lasts for much of the run: it errs to the side of showing nothing.

    One run: all its shifts. Several: ``n_draws`` seeded tuples of one shift a run.

    Args:
        load: ``(n_steps,)``.
        loss_share: ``(n_steps,)``.
        run: ``(n_steps,)``, label of the run.
        max_lag: steps, at least 0.
        confidence: of the band, at each lag.
        n_draws: tuples of shifts, where there are several runs.
        seed: of the tuples.

    Raises:
        ValueError: shapes that differ, a value that is not finite, a negative lag, or a confidence
            outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected a number between 0 and 1")
    x = as_floats(load, "load")
    y = as_floats(loss_share, "loss_share", x.shape)
    if max_lag < 0 or x.shape != np.asarray(run).shape:
        raise ValueError(f"load has shape {x.shape}, labels {np.asarray(run).shape}, {max_lag=}")
    sums = np.zeros(2 * max_lag + 1)
    squares = np.zeros(2)
    scale = np.array([float(x @ x), float(y @ y)])
    away = np.empty((2, len(x)))
    for part in slices(run):
        a, b = x[part] - x[part].mean(), y[part] - y[part].mean()
        away[:, part] = a, b
        n, reach = len(a), min(max_lag, len(a) - 1)
        size = next_fast_len(2 * n - 1, real=True)
        crossed = np.fft.irfft(np.conj(np.fft.rfft(a, size)) * np.fft.rfft(b, size), size)
        sums[max_lag - reach : max_lag + reach + 1] += np.roll(crossed, reach)[: 2 * reach + 1]
        squares += a @ a, b @ b
    if np.any(squares <= 1e-18 * scale):
        return None
    size = np.sqrt(squares[0] * squares[1])
    shifted = np.sort(shifted_sums(run, away[1], away[:1], n_draws=n_draws, seed=seed)[0]) / size
    n_out = int((1 - confidence) / 2 * len(shifted))
    return LagCorrelation(
        lags=np.arange(-max_lag, max_lag + 1),
        correlation=np.clip(sums / size, -1, 1),
        low=max(-1.0, float(shifted[n_out])),
        high=min(1.0, float(shifted[-1 - n_out])),
        confidence=confidence,
        n_shifts=len(shifted),
        n_effective=min(len(shifted), float(effective_shifts(run, away[1], away[:1])[0])),
    )
