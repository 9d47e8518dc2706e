"""Whether the loss rate changed in time.

Imports `distributions`, `jackknife`, `shift` and `runs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.distributions import kolmogorov_tail
from actds_validators.statistics.jackknife import block_sums, blocks
from actds_validators.statistics.runs import Floats, as_floats
from actds_validators.statistics.shift import loss_share

__all__ = ["Change", "change", "long_run_variance"]

_N_BLOCKS_MIN = 8
"""Fewer than the jackknife has: 8 blocks have 40,320 orders, and long ones matter more here."""
_N_BLOCKS_MAX = 50


@dataclass(frozen=True)
class Change:
    """The CUSUM test of the loss rate.

    Args:
        statistic: ``max |cumulative (share - mean)|`` over the ends of blocks, in standard
            deviations of its sum over the run: Kolmogorov's scale.
        p: by permutation of the blocks.
        asymptotic_p: from Kolmogorov's distribution; for comparison, it does not decide.
        at: the step after which the cumulative sum is farthest from 0.
        before: share lost up to there.
        after: share lost from there.
        n_blocks: blocks.
        long_enough: whether they are 10 correlation times long; if not, bursts spill over their
            ends and p is too small.
    """

    statistic: float
    p: float
    asymptotic_p: float
    at: int
    before: float
    after: float
    n_blocks: int
    long_enough: bool


def change(
    n: ArrayLike,
    lost: ArrayLike,
    run: ArrayLike,
    *,
    n_draws: int = 2000,
    seed: int = 0,
) -> Change | None:
    """Return whether the loss rate changed in time.

    The statistic is the CUSUM ``max_b |sum_{i<=b} (share_i - mean)|`` of the share lost of a step
    (Page 1954; Ploberger & Krämer 1992), in which every step counts the same, over 8 to 50 blocks
    of `jackknife.blocks`, long against the correlation of the loss. Its p comes from permutations
    of the blocks, exact when they are exchangeable (Kirch 2007, block permutation for change
    points). Kolmogorov's limit needs many blocks that lost something: with a long-run variance and
    ten bursts it rejected in 0 to 1 % of harmless runs at 5 %, so its p is returned for comparison
    alone.

    None with fewer than `_N_BLOCKS_MIN` blocks, when nothing or everything was lost.

    Args:
        n: ``(n_steps,)``, computed tokens, in time order.
        lost: ``(n_steps,)``, lost tokens.
        run: ``(n_steps,)``, label of the run.
        n_draws: seeded permutations.
        seed: of the permutations.

    Raises:
        ValueError: shapes that differ, a value that is not finite, negative counts, more lost than
            computed.
    """
    share = loss_share(n, lost)
    gone, computed = as_floats(lost, "lost"), as_floats(n, "n")
    total, total_lost = computed.sum(), gone.sum()
    if len(share) < _N_BLOCKS_MIN or total_lost <= 0 or total_lost >= total:
        return None
    cut = blocks(len(share), run, share, _N_BLOCKS_MAX, _N_BLOCKS_MIN)
    held = computed > 0
    away = np.where(held, share - share[held].mean(), 0.0)
    steps = block_sums(away, cut.labels, cut.n_blocks)
    path = np.abs(np.cumsum(steps))[:-1]
    observed = float(path.max())
    if observed <= 1e-9 * float(np.abs(steps).sum()):
        observed = 0.0
    random = np.random.default_rng(seed)
    order = random.random((n_draws, cut.n_blocks)).argsort(axis=1)
    drawn = np.abs(np.cumsum(steps[order], axis=1))[:, :-1].max(axis=1)
    p = (1 + int(np.sum(drawn >= observed * (1 - 1e-9)))) / (1 + n_draws)
    variance = long_run_variance(steps)
    statistic = observed / math.sqrt(cut.n_blocks * variance) if variance > 0 else 0.0
    end = int(np.searchsorted(cut.labels, int(path.argmax()), side="right"))
    return Change(
        statistic=statistic,
        p=p,
        asymptotic_p=kolmogorov_tail(statistic),
        at=end,
        before=_share(gone[:end], computed[:end]),
        after=_share(gone[end:], computed[end:]),
        n_blocks=cut.n_blocks,
        long_enough=cut.long_enough,
    )


def long_run_variance(series: ArrayLike) -> float:
    """Return the long-run variance of a series about its mean, 0 for one without variation.

    Bartlett's kernel (Newey & West 1987) with Andrews' (1991) bandwidth for it,
    ``1.1447 (4 r² / (1 - r²)² n)^(1/3)``, r the first autocorrelation.

    Args:
        series: ``(n,)``.

    Raises:
        ValueError: a value that is not finite.
    """
    x = as_floats(series, "series")
    centred = x - x.mean() if len(x) else x
    n = len(centred)
    energy = float(centred @ centred)
    if n < 2 or energy <= 1e-24 * max(1.0, float(x @ x)):
        return 0.0
    first = min(0.97, abs(float(centred[1:] @ centred[:-1]) / energy))
    width = 1.1447 * (4 * first**2 / (1 - first**2) ** 2 * n) ** (1 / 3)
    found = energy / n
    for lag in range(1, min(n - 1, math.floor(width)) + 1):
        found += 2 * (1 - lag / (width + 1)) * float(centred[lag:] @ centred[:-lag]) / n
    return max(found, 0.0)


def _share(lost: Floats, n: Floats) -> float:
    total = float(n.sum())
    return float(lost.sum()) / total if total > 0 else 0.0
