"""Strata: whether more of a kind of token was lost than the losses of its time explain."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.events import Floats, as_floats

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

    Raises:
        ValueError: shapes that differ, a value that is not finite, more lost than computed.
    """
    count = as_floats(n, "n")
    gone = as_floats(lost, "lost", count.shape)
    share = as_floats(rate, "rate", count.shape[1:])
    if np.any(gone < 0) or np.any(gone > count) or np.any((share < 0) | (share > 1)):
        raise ValueError("lost tokens must lie between 0 and the computed ones, rates in [0, 1]")
    found = np.ones(len(count))
    there = count > 0
    own = np.divide(gone, count, out=np.zeros_like(gone), where=there)
    touched = np.where(there, np.minimum(1.0, count * share), 0.0)
    for cut in CUTS:
        hit = there & (own >= cut)
        chance = np.where(there, np.minimum(touched, share / cut), 0.0)
        hits = hit.sum(axis=1)
        p = np.where(hits >= MIN_HITS, poisson_binomial_tail(chance, hits), 1.0)
        found = np.minimum(found, p)
    return np.minimum(1.0, len(CUTS) * found)


def poisson_binomial_tail(chance: Floats, hits: ArrayLike) -> Floats:
    """Return the tail of a Poisson binomial: so many successes or more.

    Args:
        chance: ``(n_strata, n_trials)``, of each trial.
        hits: ``(n_strata,)``.
    """
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
