"""Whether losses go with something, without shifts: over blocks, within steps, and in time.

The naive tests take tokens for independent draws. They are not: these never decide anything, and
are shown beside the tests that do, because they are what a reader would have computed: whole-step
losses in bursts make them reject nearly always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # type: ignore[import-untyped]  # scipy.stats takes a second to import

from actds_validators.arrays import Floats
from actds_validators.statistics.events import as_floats, slices
from actds_validators.statistics.intervals import Blocks, block_sums, blocks
from actds_validators.statistics.shift import about_mean, loss_share, shares_and_sums


def block_score(
    blocks: Blocks,
    run: ArrayLike,
    n: ArrayLike,
    lost: ArrayLike,
    value_sum: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Floats:
    """Return p of a t-test over blocks that the share lost of a step goes with what it held.

    The score of a block is ``sum_s (share[s] - rate) w[s] (m[s] - mean)``, the parts of the
    numerator that `shift.circular_shift` ranks, rate and mean those of the run. Their sum is held
    against ``sqrt(sum of squares)``, Student's t with ``min(n - 1, 3 k - 1)`` degrees of freedom,
    k the blocks that carry the squares (as in `intervals.jackknife`).

    Shifts take the share lost of a step for something that would have been the same elsewhere. It
    is, where steps are lost whole. Where a request is lost, its share of a step is the larger the
    fewer others there are, and lasts as long as it does: shifts then reject up to a quarter of
    harmless losses at 5 %. Blocks keep the losses where they were.

    1 for a covariate without variation.

    Args:
        blocks: of `intervals.blocks`.
        run: ``(n_steps,)``, label of the run.
        n: ``(n_steps,)``, computed tokens.
        lost: ``(n_steps,)``, lost tokens.
        value_sum: ``(n_steps,)`` or ``(n_covariates, n_steps)``, sums over the computed tokens.
        weight: tokens that the sums are over, as ``value_sum`` or ``(n_steps,)``; by default ``n``.

    Raises:
        ValueError: shapes that differ, a value that is not finite, negative counts, more lost than
            computed.
    """
    share, values, weights = shares_and_sums(n, lost, value_sum, weight)
    parts = slices(run)
    score = about_mean(values, weights, parts)
    for part in parts:
        total = weights[:, part].sum(axis=1, keepdims=True)
        rate = np.divide(
            weights[:, part] @ share[part][:, np.newaxis], total,
            out=np.zeros_like(total), where=total > 0,
        )  # fmt: skip
        score[:, part] *= share[part] - rate
    sums = block_sums(score, blocks.labels, blocks.n_blocks)
    return np.array([_two_sided(row) for row in sums])


def _two_sided(scores: Floats) -> float:
    largest = float(np.abs(scores).max(initial=0.0))
    if len(scores) < 2 or largest == 0:
        return 1.0
    unit = scores / largest
    squares, fourth = float((unit**2).sum()), float((unit**4).sum())
    freedom = max(1.0, min(len(scores) - 1.0, 3 * squares**2 / fourth - 1))
    return _student(float(unit.sum()) / math.sqrt(squares), freedom)


def _student(t: float, freedom: float) -> float:
    return float(2 * special.stdtr(freedom, -abs(t)))


@dataclass(frozen=True)
class Within:
    """The test of selection within steps.

    Args:
        difference: mean of the lost less mean of the others, within steps, in the covariate's unit:
            the score over ``sum n rate (1 - rate)``.
        t: the score over its standard error, clustered by request and step.
        p: two-sided, Student's t.
        n_requests: requests with a token in a partially lost step.
        n_steps: partially lost steps that two requests or more shared.
    """

    difference: float
    t: float
    p: float
    freedom: float
    n_requests: int
    n_steps: int


def within_cells(
    step: ArrayLike,
    request: ArrayLike,
    n: ArrayLike,
    sx: ArrayLike,
    n_lost: ArrayLike,
    lx: ArrayLike,
) -> Within | None:
    """Return whether, among tokens of one step, the lost ones differ from the others.

    The score of a request is ``u_g = sum (lost - rate_s)(x - mean_s)`` over its tokens in partially
    lost steps s: the score of a logistic regression with one intercept a step. Its sum is held
    against a standard error clustered by request (Liang & Zeger 1986) and by step, for rows that
    lie side by side are lost together: ``V = sum v_g² + max(0, sum u_s² - sum v_gs²)`` over
    requests, steps and cells (Cameron, Gelbach & Miller 2011), where v is u with each step's part
    times ``sqrt(m / (m - 1))``: the m requests of a step share its mean and rate, and without it
    the variance would be too small by that factor (for two, by half). Student's t with
    ``min(requests, steps) - 1`` degrees of freedom, ``3 k - 1`` where few requests carry the
    squares, ``k = (sum v²)² / sum v⁴`` (as in `intervals.jackknife`): of the norm a
    few sinks have nearly all, and where whole requests are lost, the lost ones.
    Measured size at 5 %: 1 to 4 %; clustered by
    request alone 8 to 9 %.

    A token counts as much as its request's others: a request with many tokens in one step is one
    unit. None with fewer than two requests in partial steps, or no variation within them.

    Args:
        step: ``(n_cells,)``, integer; each (step, request) once.
        request: ``(n_cells,)``, integer.
        n: ``(n_cells,)``, computed tokens.
        sx: ``(n_cells,)``, sum of the covariate.
        n_lost: ``(n_cells,)``, lost tokens.
        lx: ``(n_cells,)``, sum of the covariate over the lost ones.

    Raises:
        ValueError: shapes that differ, a value that is not finite, more lost than computed.
    """
    count = as_floats(n, "n")
    total, gone, gone_x = (
        as_floats(v, name, count.shape) for v, name in ((sx, "sx"), (n_lost, "n_lost"), (lx, "lx"))
    )
    steps, requests = np.asarray(step, np.int64), np.asarray(request, np.int64)
    if steps.shape != count.shape or requests.shape != count.shape:
        raise ValueError(f"n has shape {count.shape}, step {steps.shape}, request {requests.shape}")
    if np.any(gone < 0) or np.any(gone > count):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each cell")
    used = count > 0
    if not used.any():
        return None
    _, at = np.unique(steps[used], return_inverse=True)
    who, by = np.unique(requests[used], return_inverse=True)
    count, total, gone, gone_x = count[used], total[used], gone[used], gone_x[used]
    shared = np.bincount(at)
    in_step, in_step_lost = np.bincount(at, weights=count), np.bincount(at, weights=gone)
    partial = (in_step_lost > 0) & (in_step_lost < in_step) & (shared > 1)
    keep = partial[at]
    if not keep.any():
        return None
    rate = (in_step_lost / in_step)[at]
    mean = (np.bincount(at, weights=total) / in_step)[at]
    score = gone_x - mean * gone - rate * (total - mean * count)
    # Rounding of sums of large values is no variation.
    noise = 1e-12 * (np.abs(gone_x) + np.abs(mean) * count)
    score = np.where(keep & (np.abs(score) > noise), score, 0.0)
    spread = np.sqrt(shared / np.maximum(shared - 1, 1))[at]
    v = np.bincount(by, weights=score * spread, minlength=len(who))
    by_step = np.bincount(at, weights=score)
    taking_part = np.bincount(by, weights=keep, minlength=len(who)) > 0
    g = int(taking_part.sum())
    largest = float(np.abs(v).max())
    if g < 2 or largest == 0:
        return None
    squares = float(((v / largest) ** 2).sum())
    both = float((by_step**2).sum() - ((score * spread) ** 2).sum()) / largest**2
    t = float(score.sum()) / (largest * math.sqrt(squares + max(both, 0.0)))
    fourth = float(((v / largest) ** 4).sum())
    freedom = max(1.0, min(g - 1.0, int(partial.sum()) - 1.0, 3 * squares**2 / fourth - 1))
    information = float((in_step * (in_step_lost / in_step) * (1 - in_step_lost / in_step))[
        partial
    ].sum())  # fmt: skip
    return Within(
        difference=float(score.sum()) / information,
        t=t,
        p=_student(t, freedom),
        freedom=freedom,
        n_requests=g,
        n_steps=int(partial.sum()),
    )


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
        at: the step after which the cumulative sum is farthest from 0.
        before: share lost up to there.
        after: share lost from there.
        long_enough: whether they are 10 correlation times long; if not, bursts spill over their
            ends and p is too small.
    """

    statistic: float
    p: float
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
    of `intervals.blocks`, long against the correlation of the loss. Its p comes from permutations
    of the blocks, exact when they are exchangeable (Kirch 2007, block permutation for change
    points). Kolmogorov's limit needs many blocks that lost something: with a long-run variance and
    ten bursts it rejected in 0 to 1 % of harmless runs at 5 %.

    None with fewer than `_N_BLOCKS_MIN` blocks, when nothing or everything was lost.

    Args:
        n: ``(n_steps,)``, computed tokens, in time order.
        lost: ``(n_steps,)``, lost tokens.
        run: ``(n_steps,)``, label of the run.

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


def naive_z(sums: ArrayLike) -> float | None:
    """Return the p of lost against stored tokens as if they were independent; never decides.

    The score test ``z = r sqrt(n)``, r the correlation of the covariate with being lost. None when
    nothing or everything was lost, or without variation.

    Args:
        sums: ``(5,)``: n, sx, sxx, n_lost, lx.

    Raises:
        ValueError: another shape or a value that is not finite.
    """
    n, sx, sxx, n_lost, lx = as_floats(sums, "sums", (5,)).tolist()
    if not 0 < n_lost < n:
        return None
    variance = sxx / n - (sx / n) ** 2
    if variance <= 1e-10 * sxx / n:
        return None
    rate = n_lost / n
    covariance = lx / n - rate * sx / n
    z = covariance / math.sqrt(variance * rate * (1 - rate)) * math.sqrt(n)
    return float(2 * special.ndtr(-abs(z)))
