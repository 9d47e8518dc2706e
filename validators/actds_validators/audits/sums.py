"""Sums: a covariate over the ticks of the series, as the estimates and tests take it.

After the passes over tokens and readouts. Imports the sums of both and the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds_validators.audits.result import Covariate
from actds_validators.audits.tokens import TokenSums
from actds_validators.audits.values import ValueSums

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


def value_sums(sums: ValueSums, covariates: Sequence[Sequence[Covariate]]) -> list[CovariateSums]:
    """Return the sums of the readouts over all runs.

    Args:
        sums: of every hook.
        covariates: of each hook, in order.
    """
    return [
        CovariateSums(
            covariate,
            sums.n[hook, k],
            np.stack([sums.x[hook, k], sums.xx[hook, k], sums.lost_x[hook, k]]),
            sums.n_lost[hook, k],
        )
        for hook, values in enumerate(covariates)
        for k, covariate in enumerate(values)
    ]
