"""Families of tests: one p for a question, however many tests ask it, and the questions together.

Tests of one family are rearranged together: each draw moves the losses once, for all of them. So
what they have in common costs nothing, and the least p of the family is that of its draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.statistics.events import as_floats
from actds_validators.statistics.intervals import benjamini_hochberg

TAIL = 0.05
"""Share of the draws that is the tail by which statistics are made comparable."""
MAX_DRAWS = 20_000


def draws_for(n_families: int, fdr: float, least: int) -> int:
    """Return how many random draws a family needs for its p to be rejected with room to spare.

    The least p of n draws is ``1 / (n + 1)``, ``n_families / (n + 1)`` after adjustment over the
    families: that is to be a fifth of the rate, `MAX_DRAWS` at most.

    Args:
        least: draws at least.
    """
    return int(min(MAX_DRAWS, max(least, np.ceil(5 * n_families / fdr))))


def tail_scores(sizes: Floats) -> Floats:
    """Return statistics of several tests on one scale: excess over the tail, in mean excesses.

    ``(x - u) / mean(x - u | x > u)``, u the quantile of each row at ``1 - TAIL``. Where tails fall
    exponentially the scores of two tests are equally rare at equal values; in standard deviations
    a heavy-tailed covariate would be the largest of most draws and hide all others. Ranks would
    not do: of m tests each has a draw at rank 1, and none could be below m times the least p. Any
    function that takes all draws alike leaves `JointDraws` exact (Westfall & Young 1993).

    ``-inf`` for a row of which no draw lies beyond its quantile.

    Args:
        sizes: ``(n_tests, n_draws)``, larger ones speak against the null.
    """
    n_draws = sizes.shape[1]
    k = min(n_draws - 1, int(np.ceil((1 - TAIL) * n_draws)))
    ordered = np.partition(sizes, k, axis=1)
    edge = ordered[:, k : k + 1]
    beyond = np.maximum(ordered[:, k:] - edge, 0.0)
    n_beyond = (beyond > 1e-9 * edge).sum(axis=1, keepdims=True)
    mean = beyond.sum(axis=1, keepdims=True) / np.maximum(n_beyond, 1)
    scores = np.full(sizes.shape, -np.inf)
    np.divide(sizes - edge, mean, out=scores, where=np.broadcast_to(n_beyond > 0, sizes.shape))
    return scores


class JointDraws:
    """The single-step max-T of Westfall & Young (1993) over draws that all tests share.

    The adjusted p of a test is the share of the draws, the observed one among them, whose largest
    score over all tests is at least the test's observed one. It holds the family-wise error under
    any dependence between the tests, as far as the draws are exchangeable with what was observed.
    """

    def __init__(self) -> None:
        self._largest: Floats | None = None
        self._observed: list[Floats] = []

    def add(self, sizes: Floats) -> None:
        """Add tests ``(n_tests, n_draws)``, the observed statistic first."""
        scores = tail_scores(sizes)
        largest = scores.max(axis=0)
        self._largest = largest if self._largest is None else np.maximum(self._largest, largest)
        self._observed.append(scores[:, 0])

    @property
    def n_draws(self) -> int:
        """Return the draws, the observed one among them; 0 without a test."""
        return 0 if self._largest is None else len(self._largest)

    def adjusted(self) -> Floats:
        """Return the adjusted p of each test, ``(n_tests,)``, in the order that they came."""
        if self._largest is None:
            return np.zeros(0)
        observed, ordered = np.concatenate(self._observed), np.sort(self._largest)
        # Sums by Fourier transform: equal ones differ by rounding.
        room = 1e-9 * (1 + np.abs(np.where(np.isfinite(observed), observed, 0.0)))
        reached = len(ordered) - np.searchsorted(ordered, observed - room, side="left")
        return np.asarray(reached / len(ordered), np.float64)


def over_families(adjusted: Sequence[ArrayLike]) -> tuple[list[Floats], Floats]:
    """Return the p of each test and of each family, adjusted over the families.

    The p of a family is its smallest. Families are selected after Benjamini & Hochberg (1995) at
    q, and of R selected ones of K the tests up to ``q R / K`` are rejected: over the selected
    families the error is q on average (Benjamini & Bogomolov 2014), and where nothing depends on
    anything the probability of any rejection is q at most. Every selected family has a rejected
    test. A value returned is the smallest q at which the test, or the family, is rejected.

    Args:
        adjusted: of each family the p of its tests, adjusted within it; none is empty.

    Raises:
        ValueError: a p outside 0 to 1.
    """
    inside = [as_floats(p, "p") for p in adjusted]
    if not inside:
        return [], np.zeros(0)
    families = benjamini_hochberg([p.min() for p in inside])
    selected, n = np.sort(families), np.arange(1, len(families) + 1)
    found = []
    for p, of_family in zip(inside, families, strict=True):
        # At q = selected[r - 1] there are r families at least.
        asked = np.maximum(np.maximum(selected, of_family), len(n) * p[:, np.newaxis] / n)
        found.append(np.minimum(asked.min(axis=1), 1.0))
    return found, families


def least_over_families(families: ArrayLike, number: int, least: float) -> float:
    """Return the smallest adjusted p that a family could have had, the others as they are.

    Args:
        families: smallest p of each family, adjusted within it.
        least: the smallest p that its draws can give.
    """
    p = as_floats(families, "families").copy()
    p[number] = least
    return float(benjamini_hochberg(p)[number])


class Turns:
    """Draws of which units are lost: as many of each stratum as were, the observed ones first.

    The units of each stratum stand in a random order on a circle, which each draw turns. If the
    losses of a stratum could as well have hit any others of its units, the turns are a group, and
    what was observed is one draw of many alike (Davison & Hinkley 1997, section 4.4). That holds
    for some of a stratum's stored units, drawn at random, as for all of them (as controls of a
    case-control study within risk sets are, Goldstein & Langholz 1992).

    Args:
        stratum: of each unit, ``(n_units,)``.
        lost: whether it was lost, ``(n_units,)``.
    """

    CONTROLS, MAX_LOST, CHUNK = 7, 3000, 64
    """Stored units for each lost one at most; lost units at most, of evenly spaced strata."""

    def __init__(self, stratum: Ints, lost: Bools, n_draws: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        taken = _some_strata(stratum, lost, self.MAX_LOST)
        _, at, n_lost = _counted(stratum[taken], lost[taken])
        # Of each stratum in a random order, the lost ones first: those up to the limit are kept.
        order = np.lexsort((random.random(len(taken)), ~lost[taken], at))
        rank = np.arange(len(order)) - np.searchsorted(at[order], at[order], side="left")
        kept = order[rank < (1 + self.CONTROLS) * n_lost[at[order]]]
        kept = kept[np.lexsort((random.random(len(kept)), at[kept]))]
        self.units, gone = taken[kept], np.flatnonzero(lost[taken[kept]])
        self.stratum, first, size = _runs(at[kept])
        which = self.stratum[gone]
        turn = (random.random((n_draws, len(size)), np.float32) * size).astype(np.int32)
        turn = np.concatenate([np.zeros((1, len(size)), np.int32), np.minimum(turn, size - 1)])
        place = gone.astype(np.int32) + turn[:, which]
        place -= np.where(place >= (first + size)[which], size[which], 0)
        self._place, self._size = place, size

    def sums(self, values: Floats) -> Floats:
        """Return the sums over the lost units of each draw, ``(n_values, 1 + n_draws)``.

        Args:
            values: of `units`, ``(n_values, len(units))``; taken about the mean of their stratum.
        """
        middle = np.stack([np.bincount(self.stratum, row, len(self._size)) for row in values])
        x = (values - (middle / self._size)[:, self.stratum]).T
        found = np.empty((x.shape[1], len(self._place)))
        # An eighth of the units at least is lost: a dense product is faster than a sparse one.
        for k in range(0, len(self._place), self.CHUNK):
            some = self._place[k : k + self.CHUNK]
            drawn = np.zeros((len(some), len(x)))
            np.put_along_axis(drawn, some, 1.0, axis=1)
            found[:, k : k + self.CHUNK] = (drawn @ x).T
        return found


def _some_strata(stratum: Ints, lost: Bools, most: int) -> Ints:
    """Return the units of strata that lost a part, evenly spaced where they lost too many."""
    known, at, n_lost = _counted(stratum, lost)
    partial = np.flatnonzero((n_lost > 0) & (n_lost < np.bincount(at, minlength=len(known))))
    every = max(1, int(np.ceil(n_lost[partial].sum() / most)))
    used = np.zeros(len(known), bool)
    used[partial[::every]] = True
    return np.flatnonzero(used[at])


def _counted(stratum: Ints, lost: Bools) -> tuple[Ints, Ints, Ints]:
    """Return the strata, the number of each unit's, and the lost units of each."""
    known, at = np.unique(stratum, return_inverse=True)
    at = at.reshape(-1)
    return known, at, np.bincount(at, lost, len(known)).astype(np.int64)


def _runs(rising: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the number of each run of equal values, where each begins, and its length."""
    _, first, at, size = np.unique(
        rising, return_index=True, return_inverse=True, return_counts=True
    )
    return at.reshape(-1), first.astype(np.int32), size.astype(np.int32)
