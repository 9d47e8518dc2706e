"""Between steps that lost a part: whether their share lost goes with a covariate, over blocks.

Imports `distributions`, `jackknife`, `runs` and `shift`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.statistics.distributions import student_two_sided
from actds_validators.statistics.jackknife import Blocks, block_sums
from actds_validators.statistics.runs import Floats, slices
from actds_validators.statistics.shift import about_mean, shares_and_sums

__all__ = ["block_score"]


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
    k the blocks that carry the squares (as in `jackknife.jackknife`).

    Shifts take the share lost of a step for something that would have been the same elsewhere. It
    is, where steps are lost whole. Where a request is lost, its share of a step is the larger the
    fewer others there are, and lasts as long as it does: shifts then reject up to a quarter of
    harmless losses at 5 %. Blocks keep the losses where they were.

    1 for a covariate without variation.

    Args:
        blocks: of `jackknife.blocks`.
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
    return student_two_sided(float(unit.sum()) / math.sqrt(squares), freedom)
