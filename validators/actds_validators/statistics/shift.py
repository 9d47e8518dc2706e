"""Between steps: whether losses lie where a covariate is high or low, against moved losses.

Imports `events` and `runs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import next_fast_len  # type: ignore[import-untyped]

from actds_validators.statistics.events import correlation_steps
from actds_validators.statistics.runs import Floats, as_floats, slices

__all__ = [
    "Shift",
    "about_mean",
    "circular_shift",
    "effective_shifts",
    "loss_share",
    "shares_and_sums",
    "shifted_sums",
]

N_DRAWS = 2000
"""Random tuples of shifts, where there are several runs."""
_SHORT = 1000
"""Steps up to which a transform of any length is cheap."""


@dataclass(frozen=True)
class Shift:
    """The circular-shift test of several covariates.

    Args:
        difference: ``(n_covariates,)``, mean of what the lost steps held less the mean of all,
            about each run's own mean, in the covariate's unit. What is ranked is its numerator.
        p: ``(n_covariates,)``.
        n_effective: ``(n_covariates,)``, effectively independent shifts (`effective_shifts`). A
            p below ``1 / n_effective`` may come, but an effect that lasts as long as the
            correlation cannot count on one.
        n_shifts: shifts compared with, the observed one among them.
        minimal_p: the smallest p possible, ``1 / n_shifts``.
    """

    difference: Floats
    p: Floats
    n_effective: Floats
    n_shifts: int
    minimal_p: float


def circular_shift(
    run: ArrayLike,
    n: ArrayLike,
    lost: ArrayLike,
    value_sum: ArrayLike,
    *,
    weight: ArrayLike | None = None,
    n_draws: int = N_DRAWS,
    seed: int = 0,
) -> Shift | None:
    """Return whether the share lost of a step goes with what the step held.

    With ``share = lost / n`` and m the step's mean of the covariate, of weight w, the statistic is
    ``|sum_s share[s+k] w[s] (m[s] - mean)|`` at k = 0, held against every circular shift k. Both
    series keep their own correlation in time, bursts and all; only where one lies against the other
    is changed. Under stationarity the shifts are a group, and
    ``p = #{k: statistic(k) >= statistic(0)} / #k``, k = 0 among them, is exact but for the seam
    where a run is closed to a circle (Politis & Romano 1992 on circular blocks; Davison & Hinkley
    1997, section 4.4, on group randomisation).

    It is not divided by ``sum_s share[s+k] w[s]``: where steps hold 15 to 512 tokens, shifts that
    put the losses on a few narrow steps make that small and the ratio large, whatever the losses go
    with, and the ratio of a true dependence is not among the largest.

    Weights of 1 (with the steps' means for sums) make every step count the same: for a covariate of
    the step itself, which has one value however many tokens share it.

    All shifts count, near ones too. Leaving out those nearer than the correlation time would let a
    p come out near ``1 / n_steps`` although only ``n_effective`` shifts are independent: with 25
    of them, p <= 0.002 came in 2 % of harmless runs.

    Each run is shifted by itself about its own mean. One run: all shifts, by Fourier transform (of
    a length without large prime factors: at most 2 % of empty steps are added). Several:
    ``n_draws`` seeded tuples of one shift a run, ``p = (1 + #) / (1 + n_draws)``.

    None when the share lost varies within no run: nothing lost, all lost, or one step a run.

    Args:
        run: ``(n_steps,)``, label of the run.
        n: ``(n_steps,)``, computed tokens.
        lost: ``(n_steps,)``, lost tokens.
        value_sum: ``(n_steps,)`` or ``(n_covariates, n_steps)``, sums over the computed tokens.
        weight: tokens that the sums are over, as ``value_sum`` or ``(n_steps,)``; by default ``n``.
        n_draws: tuples of shifts, where there are several runs.
        seed: of the tuples.

    Raises:
        ValueError: shapes that differ, a value that is not finite, negative counts, more lost than
            computed.
    """
    share, values, weights = shares_and_sums(n, lost, value_sum, weight)
    if weights.min(initial=0.0) < 0:
        raise ValueError("weight has a negative value")
    parts = slices(run)
    if all(np.ptp(share[part]) == 0 for part in parts):
        return None
    away = about_mean(values, weights, parts)
    found = shifted_sums(run, share, away, n_draws=n_draws, seed=seed)
    mass = np.broadcast_to(weights @ share, len(values))
    size = np.abs(found)
    # Sums by Fourier transform: equal ones differ by rounding.
    reached = size >= size[:, :1] - 1e-9 * size.max(axis=1, keepdims=True)
    n_shifts = size.shape[1]
    return Shift(
        difference=np.divide(found[:, 0], mass, out=np.zeros(len(values)), where=mass > 0),
        p=reached.sum(axis=1) / n_shifts,
        n_effective=np.minimum(effective_shifts(run, share, away), n_shifts),
        n_shifts=n_shifts,
        minimal_p=1 / n_shifts,
    )


def shares_and_sums(
    n: ArrayLike, lost: ArrayLike, value_sum: ArrayLike, weight: ArrayLike | None
) -> tuple[Floats, Floats, Floats]:
    """Return share lost ``(n_steps,)``, sums and weights ``(n_covariates or 1, n_steps)``.

    Args:
        n: ``(n_steps,)``, computed tokens.
        lost: ``(n_steps,)``, lost tokens.
        value_sum: ``(n_steps,)`` or ``(n_covariates, n_steps)``.
        weight: as ``value_sum`` or ``(n_steps,)``; ``n`` when ``None``.

    Raises:
        ValueError: as `loss_share`, or shapes that differ.
    """
    share = loss_share(n, lost)
    values = np.atleast_2d(as_floats(value_sum, "value_sum"))
    weights = np.atleast_2d(as_floats(n if weight is None else weight, "weight"))
    if values.shape[1] != len(share) or weights.shape not in {values.shape, (1, len(share))}:
        raise ValueError(
            f"value_sum has shape {values.shape}, weight {weights.shape}; {len(share)} steps"
        )
    return share, values, weights


def loss_share(n: ArrayLike, lost: ArrayLike) -> Floats:
    """Return the share lost of each step, 0 for a step without a token.

    Raises:
        ValueError: shapes that differ, a value that is not finite, negative counts, more lost than
            computed.
    """
    computed = as_floats(n, "n")
    gone = as_floats(lost, "lost", computed.shape)
    if computed.ndim != 1 or np.any(gone < 0) or np.any(gone > computed):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each step")
    return np.divide(gone, computed, out=np.zeros_like(gone), where=computed > 0)


def shifted_sums(
    run: ArrayLike,
    share: Floats,
    values: Floats,
    *,
    n_draws: int = N_DRAWS,
    seed: int = 0,
    every: bool = True,
) -> Floats:
    """Return ``sum_s share[s+k] values[s]``, ``(n_values, n_shifts)``, each run shifted by itself.

    The first shift is none.

    Args:
        run: ``(n_steps,)``, label of the run.
        share: ``(n_steps,)``, what is moved.
        values: ``(n_values, n_steps)``, what stays.
        n_draws: seeded random shifts beside the observed one, a tuple of one a run.
        seed: of the shifts; the same seed gives the same shifts for other values.
        every: with one run, all its shifts and no draw.
    """
    parts = slices(run)
    if len(parts) == 1 and (every or len(share) <= n_draws + 1):
        return _all_shifts(share, values)
    random = np.random.default_rng(seed)
    total = np.zeros((len(values), n_draws + 1))
    for part in parts:
        drawn = random.integers(0, part.stop - part.start, n_draws)
        if share[part].any():
            sums = _all_shifts(share[part], values[:, part])
            total += sums[:, np.concatenate([[0], drawn])]
    return total


def effective_shifts(run: ArrayLike, share: Floats, values: Floats) -> Floats:
    """Return how many shifts of each value are effectively independent, at least 1.

    The sums of `shifted_sums` go together along the shift over about the correlation times of both
    series added: their autocovariance is the convolution of the two. The steps of a run over that
    time, multiplied over the runs in which the share varies.

    Args:
        run: ``(n_steps,)``, label of the run.
        share: ``(n_steps,)``, what is moved.
        values: ``(n_values, n_steps)``, what stays.
    """
    own = correlation_steps(share, run)
    times = np.array([own + correlation_steps(row, run) - 1 for row in values])
    found = np.ones(len(values))
    for part in slices(run):
        if np.ptp(share[part]) > 0:
            # The cap only keeps the product of many runs finite.
            found = np.minimum(found * np.maximum(1.0, (part.stop - part.start) / times), 1e15)
    return found


def _all_shifts(share: Floats, values: Floats) -> Floats:
    n = len(share)
    if n > _SHORT:
        # Empty steps, at most 2 %, close the circle: a prime length takes 5 times as long.
        n = next_fast_len(n)
    spectrum = np.conj(np.fft.rfft(values, n, axis=1))
    spectrum *= np.fft.rfft(share, n)
    return np.asarray(np.fft.irfft(spectrum, n, axis=1), np.float64)


def about_mean(values: Floats, weights: Floats, parts: list[slice]) -> Floats:
    """Return the sums about each run's own mean, exactly 0 for a covariate without variation."""
    found = np.zeros_like(values)
    for part in parts:
        total = np.broadcast_to(weights[:, part].sum(axis=1), len(values))
        mean = np.divide(
            values[:, part].sum(axis=1), total, out=np.zeros(len(values)), where=total > 0
        )
        away = values[:, part] - mean[:, np.newaxis] * weights[:, part]
        scale = np.abs(values[:, part]).max(axis=1, initial=0.0)
        away[np.abs(away).max(axis=1, initial=0.0) <= 1e-12 * scale] = 0.0
        found[:, part] = away
    return found
