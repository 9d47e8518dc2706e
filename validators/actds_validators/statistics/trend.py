"""Whether the loss rate rises or falls with the load.

Imports `runs` and `shift`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.runs import Floats, Ints, as_floats
from actds_validators.statistics.shift import effective_shifts, loss_share, shifted_sums

__all__ = ["Trend", "isotonic", "load_groups", "trend"]


@dataclass(frozen=True)
class Trend:
    """The isotonic trend of the loss rate over groups of load.

    Args:
        direction: of the monotone fit, to the mean share lost of a step, that explains more.
        statistic: what it explains, ``sum_g n_g (fit_g - rate)² / (rate² sum n_g)`` over n_g
            steps: the squared coefficient of variation of the fitted share.
        explained: share of the weighted variance between groups that the fit explains.
        p: by circular shifts of the losses against the load.
        n_effective: effectively independent shifts, as in `shift.Shift`.
        n_shifts: shifts compared with, the observed one among them.
        groups: ``(n_steps,)``, group of each step; 0 for those without a token.
        load: ``(n_groups,)``, mean load of the computed tokens.
        n: ``(n_groups,)``, computed tokens.
        n_lost: ``(n_groups,)``, lost tokens.
        rate: ``(n_groups,)``, share of the tokens lost.
        fitted: ``(n_groups,)``, the monotone fit to it, in that direction.
    """

    direction: Literal["increasing", "decreasing"]
    statistic: float
    explained: float
    p: float
    n_effective: float
    n_shifts: int
    groups: Ints
    load: Floats
    n: Floats
    n_lost: Floats
    rate: Floats
    fitted: Floats


def isotonic(values: ArrayLike, weights: ArrayLike) -> Floats:
    """Return the increasing sequence nearest to values in weighted least squares.

    By the max-min formula ``fit_i = max_{a<=i} min_{b>=i} mean(a..b)`` (Robertson, Wright &
    Dykstra 1988, theorem 1.4.4), which equals the result of pooling adjacent violators and, unlike
    it, is free of branches: many sequences at once. Time and memory grow with the square of g.

    Args:
        values: ``(..., g)``.
        weights: ``(g,)`` or as values, above 0.

    Raises:
        ValueError: a value that is not finite, or a weight not above 0.
    """
    y = as_floats(values, "values")
    w = np.broadcast_to(as_floats(weights, "weights"), y.shape)
    if np.any(w <= 0):
        raise ValueError("a weight is not above 0")
    g = y.shape[-1]
    nothing = np.zeros((*y.shape[:-1], 1))
    sums = np.concatenate([nothing, np.cumsum(w * y, axis=-1)], axis=-1)
    mass = np.concatenate([nothing, np.cumsum(w, axis=-1)], axis=-1)
    # lowest[a, ..., i]: the least mean of a..b over b >= i.
    lowest = np.full((g, *y.shape), -np.inf)
    for a in range(g):
        means = (sums[..., a + 1 :] - sums[..., a : a + 1]) / (
            mass[..., a + 1 :] - mass[..., a : a + 1]
        )
        lowest[a, ..., a:] = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    # The mean over b >= i of a stretch that begins after i does not count (-inf above).
    return np.asarray(lowest.max(axis=0), np.float64)


def load_groups(load: ArrayLike, n_groups: int = 10) -> Ints:
    """Return the quantile group of each step, from 0; equal edges fall together.

    Args:
        load: ``(n_steps,)``.
        n_groups: most groups, at least 1; deciles by default.

    Raises:
        ValueError: no step, a load that is not finite, or less than one group.
    """
    x = as_floats(load, "load")
    if not len(x) or n_groups < 1:
        raise ValueError(f"{len(x)} steps in {n_groups} groups; expected at least one of each")
    edges = np.unique(np.quantile(x, np.linspace(0, 1, n_groups + 1)[1:-1]))
    # A group is (edge, next edge]; renumbered, for an edge may be the least or the greatest value.
    found = np.searchsorted(edges, x, side="left")
    return np.unique(found, return_inverse=True)[1].astype(np.int64)


def trend(
    run: ArrayLike,
    n: ArrayLike,
    lost: ArrayLike,
    load: ArrayLike,
    *,
    n_groups: int = 10,
    n_draws: int = 2000,
    seed: int = 0,
) -> Trend | None:
    """Return whether the loss rate is monotone in the load.

    Steps are grouped by quantiles of the load, and every step counts the same, however many tokens
    it holds: where these are 15 to 512, a few wide steps would else decide. The statistic is the
    between-group variance that an isotonic fit to the mean share lost of a step explains (Barlow,
    Bartholomew, Bremner & Brunk 1972), the larger of the increasing and the decreasing one,
    relative to the square of the mean share. Its distribution comes from circular shifts of the
    share lost against the load, which keep the bursts of both (see `shift.circular_shift`): all
    shifts of one run of at most ``n_draws`` steps, else ``n_draws`` seeded ones;
    ``p = #{statistic >= observed} / #``, the observed one among them.

    None when the share lost varies within no run, or the load is the same everywhere.

    Args:
        run: ``(n_steps,)``, label of the run.
        n: ``(n_steps,)``, computed tokens.
        lost: ``(n_steps,)``, lost tokens.
        load: ``(n_steps,)``, for instance a moving average of the tokens per step.
        n_groups: most groups.
        n_draws: random shifts.
        seed: of the shifts.

    Raises:
        ValueError: shapes that differ, a value that is not finite, negative counts, more lost than
            computed.
    """
    share = loss_share(n, lost)
    computed = as_floats(n, "n")
    x = as_floats(load, "load", computed.shape)
    if not len(x) or _constant(share, run):
        return None
    held = computed > 0
    groups = np.zeros(len(x), np.int64)
    groups[held] = load_groups(x[held], n_groups)
    mass = np.bincount(groups, weights=computed).astype(np.float64)
    gone = np.bincount(groups, weights=as_floats(lost, "lost")).astype(np.float64)
    if len(mass) < 2:
        return None
    inside = np.where(groups == np.arange(len(mass))[:, np.newaxis], held, 0.0)
    steps = inside.sum(axis=1)
    moved = shifted_sums(run, share, inside, n_draws=n_draws, seed=seed, every=False)
    rates = np.maximum(moved.T, 0.0) / steps
    mean = (rates * steps).sum(axis=1, keepdims=True) / steps.sum()
    rising = isotonic(rates, steps)
    falling = -isotonic(-rates, steps)
    # A shift may put all losses on steps without a token: nothing to explain, but rounding.
    some = mean > 1e-9 * mean[0]
    scale = np.where(some, steps / steps.sum() / np.where(some, mean, 1.0) ** 2, 0.0)
    up = ((rising - mean) ** 2 * scale).sum(axis=1)
    down = ((falling - mean) ** 2 * scale).sum(axis=1)
    size = np.maximum(up, down)
    total = float((((rates[0] - mean[0]) ** 2) * scale[0]).sum())
    increasing = bool(up[0] >= down[0])
    rate = gone / mass
    return Trend(
        direction="increasing" if increasing else "decreasing",
        statistic=float(size[0]),
        explained=min(1.0, float(size[0]) / total) if total > 1e-18 else 0.0,
        p=float(np.mean(size >= size[0] * (1 - 1e-9) - 1e-15)),
        n_effective=float(min(effective_shifts(run, share, x[np.newaxis])[0], len(size))),
        n_shifts=len(size),
        groups=groups,
        load=np.bincount(groups, weights=computed * x) / mass,
        n=mass,
        n_lost=gone,
        rate=rate,
        fitted=isotonic(rate, mass) if increasing else -isotonic(-rate, mass),
    )


def _constant(share: Floats, run: ArrayLike) -> bool:
    labels = np.asarray(run)
    return bool(np.all((labels[1:] != labels[:-1]) | (share[1:] == share[:-1])))
