"""Sums: a covariate over the ticks of the series, as the estimates and tests take it.

After the passes over tokens and readouts. Imports the sums of both, the result and the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_validators.audit.result import Covariate
from actds_validators.audit.tokens import TokenSums
from actds_validators.audit.values import ValueSums
from actds_validators.statistics.intervals import Blocks

__all__ = ["CovariateSums", "content_sums", "value_sums"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CovariateSums:
    """One covariate over the series.

    Args:
        covariate: which.
        n: tokens that have a value, ``(n_ticks,)``.
        sums: ``(3, n_ticks)``: x and its square over all computed tokens, x over the lost ones.
        n_lost: lost tokens that have a value, ``(n_ticks,)``.
    """

    covariate: Covariate
    n: Floats
    sums: Floats
    n_lost: Floats


def content_sums(sums: TokenSums, covariates: Mapping[str, Covariate]) -> list[CovariateSums]:
    """Return the sums of the content covariates over all runs."""
    found = []
    for k, name in enumerate(sums.names):
        stored, lost = sums.known if name == "rarity" else sums.n
        x = np.stack([sums.x[:, k].sum(axis=0), sums.xx[:, k].sum(axis=0), sums.x[1, k]])
        found.append(CovariateSums(covariates[name], stored + lost, x, lost))
    return found


def value_sums(
    sums: ValueSums, covariates: Sequence[Sequence[Covariate]], middle: Floats, blocks: Blocks
) -> list[CovariateSums]:
    """Return the sums of the readouts over all runs: of each number, then of each square.

    Numbers are about the middle of the scale; their means are put back. What is known by block
    only stands at the first tick of the block: nobody asks for it tick by tick, and what is 0
    takes no memory.

    Args:
        sums: of every hook.
        covariates: of each hook, in order.
        middle: of the scale, ``(n_hooks, n_values)``.
        blocks: of the jackknife.
    """
    first = np.searchsorted(blocks.labels, np.arange(blocks.n_blocks))
    found = []
    for hook, of_hook in enumerate(covariates):
        n_values = sums.n.shape[1]
        for k, covariate in enumerate(of_hook):
            j, c = k % n_values, middle[hook, k % n_values]
            n, x, xx = sums.n[hook, j], sums.x[hook, j], sums.xx[hook, j]
            n_lost, lost_x = sums.n_lost[hook, j], sums.lost_x[hook, j]
            three = np.zeros((3, len(n)))
            gone = np.zeros(len(n))
            gone[first] = n_lost
            if k < n_values:
                three[0] = x + c * n
                by_block = [np.bincount(blocks.labels, weights=v) for v in (n, x, xx)]
                three[1, first] = by_block[2] + 2 * c * by_block[1] + c * c * by_block[0]
                three[2, first] = lost_x + c * n_lost
            else:
                three[0] = xx
                three[1, first] = sums.x4[hook, j]
                three[2, first] = sums.lost_xx[hook, j]
            found.append(CovariateSums(covariate, n, three, gone))
    return found
