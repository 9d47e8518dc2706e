"""Strata and cells: how far two distributions over them lie apart, what each lost, and weights.

Whether more of a kind of token was lost than the losses of its time explain; loss rates drawn to a
common one; weights that put stored rows in the place of lost ones of the same cell.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.arrays import Floats
from actds_validators.statistics.series import as_floats

CUTS = (0.05, 0.2, 0.5, 0.9)
"""Shares of a block's tokens from which on the block counts as hit; each is tried."""
MIN_HITS = 3
"""Blocks that a loss has to hit before it is held against anything: fewer are events."""


def stratum_p(n: ArrayLike, lost: ArrayLike, rate: ArrayLike) -> Floats:
    """Return how likely each stratum loses so much where losses know nothing of it.

    A block is a stretch of the run; each request belongs to the one in which it began, so that
    neither a burst nor a request that was lost as a whole counts twice. Under the null the
    tokens of a stratum are lost at the rate of their block in expectation, however they cluster
    there: in steps, in requests, or one by one. By Markov's inequality

        P(share lost of the stratum's tokens in block b >= c) <= min(1, rate_b / c, n_b rate_b),

    the last because a share above 0 needs one lost token. Blocks being independent, the number of
    blocks hit is at most Poisson binomial (stochastically), and its tail is the p of c. The
    smallest over `CUTS` counts, times their number (Bonferroni). Nothing is assumed of the losses
    within a block, so that the test is conservative.

    Fewer than `MIN_HITS` hit blocks give 1.

    Args:
        n: ``(n_strata, n_blocks)``, computed tokens.
        lost: ``(n_strata, n_blocks)``, lost ones.
        rate: ``(n_blocks,)``, share lost of all tokens of the block.
    """
    count = as_floats(n, "n")
    lost_tokens = as_floats(lost, "lost", count.shape)
    share = as_floats(rate, "rate", count.shape[1:])
    if np.any(lost_tokens < 0) or np.any(lost_tokens > count) or np.any((share < 0) | (share > 1)):
        raise ValueError("lost tokens must lie between 0 and the computed ones, rates in [0, 1]")
    least = np.ones(len(count))
    used = count > 0
    lost_share = np.divide(lost_tokens, count, out=np.zeros_like(lost_tokens), where=used)
    touched = np.where(used, np.minimum(1.0, count * share), 0.0)
    for cut in CUTS:
        hit = used & (lost_share >= cut)
        chance = np.where(used, np.minimum(touched, share / cut), 0.0)
        hits = hit.sum(axis=1)
        p = np.where(hits >= MIN_HITS, poisson_binomial_tail(chance, hits), 1.0)
        least = np.minimum(least, p)
    return np.minimum(1.0, len(CUTS) * least)


def poisson_binomial_tail(chance: Floats, hits: ArrayLike) -> Floats:
    """Return the tail of a Poisson binomial: so many successes or more."""
    n_strata, n_trials = chance.shape
    exactly = np.zeros((n_strata, n_trials + 1))
    exactly[:, 0] = 1.0
    for p in chance.T:
        moved = exactly[:, :-1] * p[:, np.newaxis]
        exactly *= 1 - p[:, np.newaxis]
        exactly[:, 1:] += moved
    # Summed from the far end: a tail of 1e-20 is not 1 less something.
    tails = np.cumsum(exactly[:, ::-1], axis=1)[:, ::-1]
    wanted = np.clip(np.asarray(hits, np.int64), 0, n_trials)
    return np.asarray(np.minimum(1.0, tails[np.arange(n_strata), wanted]), np.float64)


def total_variation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return ``1/2 sum |p - q|``: 0 equal, 1 disjoint; None when a histogram is empty."""
    pair = _normalised(first, second)
    return None if pair is None else min(1.0, float(np.abs(pair[0] - pair[1]).sum() / 2))


def jensen_shannon(first: ArrayLike, second: ArrayLike) -> float | None:
    """Return the Jensen-Shannon distance, base 2: 0 equal, 1 disjoint; None when one is empty.

    ``sqrt(KL(p, m) / 2 + KL(q, m) / 2)`` with ``m = (p + q) / 2`` (Lin 1991; its root is a metric:
    Endres & Schindelin 2003). Between finite samples of one distribution it is above 0, by about
    ``sqrt((n_bins - 1) (1/n_1 + 1/n_2) / (8 ln 2))``.
    """
    pair = _normalised(first, second)
    if pair is None:
        return None
    middle = (pair[0] + pair[1]) / 2
    divergence = 0.0
    for p in pair:
        used = p > 0
        divergence += float((p[used] * np.log2(p[used] / middle[used])).sum()) / 2
    return math.sqrt(min(max(divergence, 0.0), 1.0))


def _normalised(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats] | None:
    p = as_floats(first, "first")
    q = as_floats(second, "second", p.shape)
    if np.any(p < 0) or np.any(q < 0):
        raise ValueError("a histogram has a negative weight")
    if p.sum() <= 0 or q.sum() <= 0:
        return None
    return p / p.sum(), q / q.sum()


def effective_rows(weights: ArrayLike, rows: ArrayLike | None = None) -> float:
    """Return ``(sum w)² / sum w²``: as many rows of equal weight have a mean as exact (Kish 1965).

    0 without a weight above 0.

    Args:
        rows: ``(k,)``, rows that have each weight; one each by default.
    """
    w = as_floats(weights, "weights")
    n = np.ones_like(w) if rows is None else as_floats(rows, "rows", w.shape)
    if np.any(w < 0) or np.any(n < 0):
        raise ValueError("weights and rows must be at least 0")
    squares = float((n * w**2).sum())
    return float((n * w).sum()) ** 2 / squares if squares > 0 else 0.0


def prior_strength(n: ArrayLike, n_lost: ArrayLike) -> float:
    """Return the tokens that the common loss rate counts for, beta-binomial method of moments.

    With ``S = sum n (r - r̄)² / (r̄ (1 - r̄))`` over the g cells of rate r, ``N = sum n`` and r̄ the
    common rate, ``E S = (g - 1) (1 - ρ) + ρ (N - sum n² / N)`` where ρ is the correlation of two
    tokens of one cell (Kleinman 1973, with weights n); the strength is ``1 / ρ - 1``, the α + β of
    the beta distribution. Several rows of cells, each with a common rate of its own, share one ρ:
    both sides are summed over the rows. Infinite when cells differ by no more than chance, or no
    row has two cells with a token and a part lost.

    A token counts as one draw. Losses come in bursts, so cells differ by more than their
    propensities do, and the strength is rather too small than too large.

    Args:
        n: ``(..., g)``, computed tokens.
    """
    count, lost_tokens = _counts(n, n_lost)
    if not count.ndim:
        raise ValueError("counts have no axis of cells")
    total = count.sum(axis=-1, keepdims=True)
    common = _ratio(lost_tokens.sum(axis=-1, keepdims=True), total)
    free = (count > 0).sum(axis=-1) - 1
    varies = (free > 0) & (common > 0).all(axis=-1) & (common < 1).all(axis=-1)
    scale = np.where(varies[..., np.newaxis], common * (1 - common), 1.0)
    spread = (count * (_ratio(lost_tokens, count) - common) ** 2 / scale).sum(axis=-1)
    room = (total[..., 0] - _ratio((count**2).sum(axis=-1), total[..., 0]))[varies].sum()
    chance = float(free[varies].sum())
    if room <= chance:
        return math.inf
    rho = float((spread[varies].sum() - chance) / (room - chance))
    return math.inf if rho <= 0 else max(0.0, 1 / rho - 1)


def shrunken_rates(n: ArrayLike, n_lost: ArrayLike, toward: ArrayLike | None = None) -> Floats:
    """Return the loss rate of each cell, drawn to a common rate.

    ``(n_lost + strength r̄) / (n + strength)``: the posterior mean of a beta-binomial model
    (empirical Bayes, Robbins 1956; Morris 1983), with `prior_strength`. A cell without a token has
    the common rate.

    Args:
        toward: the common rates, of a shape that fits; that of all cells by default.
    """
    count, lost_tokens = _counts(n, n_lost)
    if count.sum() <= 0:
        raise ValueError("no cell has a token")
    common = lost_tokens.sum() / count.sum() if toward is None else as_floats(toward, "toward")
    if np.any((common < 0) | (common > 1)):
        raise ValueError("rates to draw toward must lie in [0, 1]")
    shrunken = np.broadcast_to(common, count.shape).astype(np.float64)
    flat = toward is None
    strength = prior_strength(*((c.ravel() if flat else c) for c in (count, lost_tokens)))
    if math.isinf(strength):
        return shrunken
    mass = count + strength
    np.divide(lost_tokens + strength * shrunken, mass, out=shrunken, where=mass > 0)
    return shrunken


def nested_rates(n: ArrayLike, n_lost: ArrayLike) -> Floats:
    """Return the loss rate of each cell, drawn to its row's, which is drawn to the common one.

    Two stages of `shrunken_rates`: what differs between rows is kept where cells alone are too
    small to show it.
    """
    count, lost_tokens = _counts(n, n_lost)
    if count.ndim != 2:
        raise ValueError(f"counts have shape {count.shape}; expected (n_rows, n_cells)")
    rows = shrunken_rates(count.sum(axis=1), lost_tokens.sum(axis=1))
    return shrunken_rates(count, lost_tokens, toward=rows[:, np.newaxis])


def inverse_probability(n: ArrayLike, n_lost: ArrayLike, rates: ArrayLike) -> Floats | None:
    """Return the weight of a stored row of each cell, 1 in the mean over stored rows.

    ``1 / (1 - rate)`` (Horvitz & Thompson 1952), divided by its mean over the stored rows
    (Hájek 1971). 0 for a cell without a stored row: nothing can stand for what it lost. None when
    no row is stored.

    The rates are those of the losses that happened, not those of a propensity: with them the
    weighted rows of a cell stand for its computed ones (post-stratification, Holt & Smith 1979),
    which is at least as precise as the true propensity (Hirano, Imbens & Ridder 2003).

    Args:
        rates: share lost of each cell, below 1 where a row is stored.
    """
    count, lost_tokens = _counts(n, n_lost)
    rate = as_floats(rates, "rates", count.shape)
    stored = count - lost_tokens
    if stored.sum() <= 0:
        return None
    if np.any((rate < 0) | (rate >= 1) & (stored > 0)):
        raise ValueError("rates must lie in [0, 1) where a row is stored")
    weights = np.divide(1.0, 1 - rate, out=np.zeros(count.shape), where=stored > 0)
    return np.asarray(weights * (stored.sum() / (weights * stored).sum()), np.float64)


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _counts(n: ArrayLike, n_lost: ArrayLike) -> tuple[Floats, Floats]:
    count = as_floats(n, "n")
    lost_tokens = as_floats(n_lost, "n_lost", count.shape)
    if np.any(lost_tokens < 0) or np.any(lost_tokens > count):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each cell")
    return count, lost_tokens
