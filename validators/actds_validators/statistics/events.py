"""Loss events: how many independent ones, and over how many steps one loss knows of the next."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len  # type: ignore[import-untyped]

from actds_validators.arrays import Floats, Ints


def slices(run: ArrayLike) -> list[slice]:
    """Return the stretches of equal labels, in order.

    Args:
        run: ``(n_steps,)``, any labels. One that comes back after another is a new stretch.

    Raises:
        ValueError: not one-dimensional.
    """
    labels = np.asarray(run)
    if labels.ndim != 1:
        raise ValueError(f"run labels have shape {labels.shape}; expected (n_steps,)")
    if not len(labels):
        return []
    cuts = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    edges = [0, *cuts.tolist(), len(labels)]
    return [slice(a, b) for a, b in pairwise(edges)]


def as_floats(values: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> Floats:
    """Return values as float64, checked.

    Raises:
        ValueError: a value is not finite, or the shape is not the expected one.
    """
    found = np.asarray(values, dtype=np.float64)
    if shape is not None and found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}; expected {shape}")
    if not np.isfinite(found).all():
        raise ValueError(f"{name} has a value that is not finite")
    return found


_WINDOW = 5.0
"""Sokal's c: the sum stops at the first lag of at least c correlation times."""


def integrated_time(correlation: Floats) -> float:
    """Return the integrated autocorrelation time of an autocorrelation function, at least 1.

    ``1 + 2 sum_{h=1}^{M} rho(h)``, M the smallest with ``M >= 5 tau(M)`` (A. Sokal, Monte Carlo
    Methods in Statistical Mechanics, 1989, section 3): n values of such a series tell as much of
    their mean as n / tau independent ones.

    Args:
        correlation: ``(n_lags,)``, from lag 0, which is 1.
    """
    sums = 2 * np.cumsum(correlation) - 1
    stop = np.flatnonzero(np.arange(len(sums)) >= _WINDOW * np.maximum(sums, 1.0))
    return max(1.0, float(sums[stop[0]] if len(stop) else sums.max()))


def correlation_steps(series: ArrayLike, run: ArrayLike) -> float:
    """Return the integrated autocorrelation time of a series, in steps, at least 1.

    Autocovariances are taken within runs, about each run's own mean, and added over runs; the
    window is Sokal's (see `integrated_time`). 1 for a series without variation.

    Args:
        series: ``(n_steps,)``, for instance the share lost of each step.
        run: ``(n_steps,)``, label of the run.

    Raises:
        ValueError: a value that is not finite, or shapes that differ.
    """
    x = as_floats(series, "series")
    parts = slices(run)
    if x.shape != np.asarray(run).shape:
        raise ValueError(f"series has shape {x.shape}, run labels {np.asarray(run).shape}")
    longest = max((part.stop - part.start for part in parts), default=0)
    covariance = np.zeros(longest)
    for part in parts:
        centred = x[part] - x[part].mean()
        n = len(centred)
        size = next_fast_len(2 * n - 1, real=True)
        power = np.abs(np.fft.rfft(centred, size)) ** 2
        covariance[:n] += np.fft.irfft(power, size)[:n]
    if longest < 2 or covariance[0] <= 1e-18 * max(1.0, float(x @ x)):
        return 1.0
    return integrated_time(covariance / covariance[0])


def count_events(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> int:
    """Return the number of independent loss events.

    Lost steps of one run that lie at most ``gap`` steps apart are one event, as clusters of
    exceedances are declustered in the theory of extremes (runs declustering, Smith & Weissman
    1994).

    Args:
        lost: ``(n_steps,)``, lost tokens or the share lost; a step with more than 0 is a lost one.
        run: ``(n_steps,)``, label of the run.
        gap: steps, at least 1; by default the correlation time of the series.

    Raises:
        ValueError: a gap below 1, a value that is not finite, or shapes that differ.
    """
    return len(_events(as_floats(lost, "lost"), run, gap))


def effective_events(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> float:
    """Return how many events of equal size a mean over the lost tokens rests on.

    ``(sum of sizes)² / sum of their squares`` (Kish 1965), 0 without an event: thirty events of
    which one has nearly all that was lost are worth little more than one.

    Args:
        lost: ``(n_steps,)``, lost tokens.
        run: ``(n_steps,)``, label of the run.
        gap: as for `count_events`.

    Raises:
        ValueError: as `count_events`.
    """
    x = as_floats(lost, "lost")
    sizes = np.array([x[at].sum() for at in _events(x, run, gap)])
    return float(sizes.sum() ** 2 / (sizes @ sizes)) if len(sizes) else 0.0


def one_per_event(lost: ArrayLike, run: ArrayLike, gap: int | None = None) -> Floats:
    """Return the series divided by its sum over each event, so that every event weighs 1.

    Args:
        lost: ``(n_steps,)``, as for `count_events`.
        run: ``(n_steps,)``, label of the run.
        gap: as for `count_events`.

    Raises:
        ValueError: as `count_events`.
    """
    x = as_floats(lost, "lost")
    found = np.zeros_like(x)
    for at in _events(x, run, gap):
        found[at] = x[at] / x[at].sum()
    return found


def _events(x: Floats, run: ArrayLike, gap: int | None) -> list[Ints]:
    """Return the lost steps of each event."""
    if gap is None:
        gap = math.ceil(correlation_steps(x, run))
    if gap < 1:
        raise ValueError(f"gap is {gap}; expected at least 1 step")
    found: list[Ints] = []
    for part in slices(run):
        at = part.start + np.flatnonzero(x[part] > 0)
        if len(at):
            found += np.split(at, np.flatnonzero(np.diff(at) > gap) + 1)
    return found
