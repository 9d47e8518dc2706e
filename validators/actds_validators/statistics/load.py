"""The load that a step met, and how long after it a loss comes.

A full queue is the work of many steps: the tokens of the same step miss it. Imports `runs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len  # type: ignore[import-untyped]
from scipy.signal import lfilter  # type: ignore[import-untyped]

from actds_validators.statistics.runs import Floats, Ints, as_floats, slices

__all__ = ["LagCorrelation", "ewma", "lag_correlation"]


@dataclass(frozen=True)
class LagCorrelation:
    """Correlation of the load with the loss some steps later.

    Args:
        lags: ``(2 max_lag + 1,)``, steps that the loss comes after the load.
        correlation: ``(2 max_lag + 1,)``.
    """

    lags: Ints
    correlation: Floats


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
    load: ArrayLike, loss_share: ArrayLike, run: ArrayLike, max_lag: int
) -> LagCorrelation | None:
    """Return the correlation of the load with the loss h steps later, h from -max_lag to max_lag.

    ``sum_s a[s] b[s+h] / sqrt(sum a² sum b²)`` over pairs of one run, a and b about their runs' own
    means: the sample cross-correlation function (Box & Jenkins 1970, chapter 11). None when either
    does not vary.

    Args:
        load: ``(n_steps,)``.
        loss_share: ``(n_steps,)``.
        run: ``(n_steps,)``, label of the run.
        max_lag: steps, at least 0.

    Raises:
        ValueError: shapes that differ, a value that is not finite, or a negative lag.
    """
    x = as_floats(load, "load")
    y = as_floats(loss_share, "loss_share", x.shape)
    if max_lag < 0 or x.shape != np.asarray(run).shape:
        raise ValueError(f"load has shape {x.shape}, labels {np.asarray(run).shape}, {max_lag=}")
    sums = np.zeros(2 * max_lag + 1)
    squares = np.zeros(2)
    scale = np.array([float(x @ x), float(y @ y)])
    for part in slices(run):
        a, b = x[part] - x[part].mean(), y[part] - y[part].mean()
        n, reach = len(a), min(max_lag, len(a) - 1)
        size = next_fast_len(2 * n - 1, real=True)
        crossed = np.fft.irfft(np.conj(np.fft.rfft(a, size)) * np.fft.rfft(b, size), size)
        sums[max_lag - reach : max_lag + reach + 1] += np.roll(crossed, reach)[: 2 * reach + 1]
        squares += a @ a, b @ b
    if np.any(squares <= 1e-18 * scale):
        return None
    return LagCorrelation(
        np.arange(-max_lag, max_lag + 1), np.clip(sums / np.sqrt(squares[0] * squares[1]), -1, 1)
    )
