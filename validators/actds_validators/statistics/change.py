"""Whether the loss rate changed in time.

Imports `distributions`, `jackknife` and `runs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.distributions import kolmogorov_tail
from actds_validators.statistics.jackknife import Blocks, block_sums
from actds_validators.statistics.runs import Floats, as_floats

__all__ = ["Change", "change", "long_run_variance"]


@dataclass(frozen=True)
class Change:
    """The CUSUM test of the loss rate.

    Args:
        statistic: ``max |cumulative (lost - rate n)|`` over the ends of blocks, in standard
            deviations of its sum over the run: Kolmogorov's scale.
        p: by permutation of the blocks.
        asymptotic_p: from Kolmogorov's distribution; for comparison, it does not decide.
        at: the step after which the cumulative sum is farthest from 0.
        before: share lost up to there.
        after: share lost from there.
        n_blocks: blocks.
    """

    statistic: float
    p: float
    asymptotic_p: float
    at: int
    before: float
    after: float
    n_blocks: int


def change(
    n: ArrayLike,
    lost: ArrayLike,
    blocks: Blocks,
    *,
    n_draws: int = 2000,
    seed: int = 0,
) -> Change | None:
    """Return whether the loss rate changed in time.

    The statistic is the CUSUM ``max_b |sum_{i<=b} (lost_i - rate n_i)|`` (Page 1954; Ploberger &
    Krämer 1992) over blocks that are long against the correlation of the loss. Its p comes from
    permutations of the blocks, exact when they are exchangeable (Kirch 2007, block permutation for
    change points): few heavy bursts among many empty blocks are then what they are, while
    Kolmogorov's limit, which needs many, is off. The Kolmogorov p with a long-run variance is
    returned beside it.

    None with fewer than two blocks, when nothing or everything was lost.

    Args:
        n: ``(n_steps,)``, computed tokens, in time order.
        lost: ``(n_steps,)``, lost tokens.
        blocks: of `jackknife.blocks`.
        n_draws: seeded permutations.
        seed: of the permutations.

    Raises:
        ValueError: shapes that differ or a value that is not finite.
    """
    gone = as_floats(lost, "lost", blocks.labels.shape)
    computed = as_floats(n, "n", blocks.labels.shape)
    total, total_lost = computed.sum(), gone.sum()
    if blocks.n_blocks < 2 or total_lost <= 0 or total_lost >= total:
        return None
    away = gone - total_lost / total * computed
    steps = block_sums(away, blocks.labels, blocks.n_blocks)
    path = np.abs(np.cumsum(steps))[:-1]
    observed = float(path.max())
    if observed <= 1e-9 * float(np.abs(steps).sum()):
        observed = 0.0
    random = np.random.default_rng(seed)
    order = random.random((n_draws, blocks.n_blocks)).argsort(axis=1)
    drawn = np.abs(np.cumsum(steps[order], axis=1))[:, :-1].max(axis=1)
    p = (1 + int(np.sum(drawn >= observed * (1 - 1e-9)))) / (1 + n_draws)
    variance = long_run_variance(steps)
    statistic = observed / math.sqrt(blocks.n_blocks * variance) if variance > 0 else 0.0
    end = int(np.searchsorted(blocks.labels, int(path.argmax()), side="right"))
    return Change(
        statistic=statistic,
        p=p,
        asymptotic_p=kolmogorov_tail(statistic),
        at=end,
        before=_share(gone[:end], computed[:end]),
        after=_share(gone[end:], computed[end:]),
        n_blocks=blocks.n_blocks,
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
