"""Whether losses go with something, without shifts: over blocks, within steps, and in time.

Tests of one family (a question) are rearranged together: each draw moves the losses once, for all
of them. So what they have in common costs nothing, and the least p of the family is that of its
draws.

The naive tests take tokens for independent draws. They are not: these never decide anything, and
are shown beside the tests that do, because they are what a reader would have computed: whole-step
losses in bursts make them reject nearly always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special  # type: ignore[import-untyped]  # scipy.stats takes a second to import

from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.statistics.intervals import Blocks, benjamini_hochberg, block_sums, blocks
from actds_validators.statistics.series import (
    about_mean,
    as_floats,
    loss_share,
    shares_and_sums,
    slices,
)

TAIL = 0.05
"""Share of the draws that is the tail by which statistics are made comparable."""
MAX_DRAWS = 20_000


def draws_for(n_families: int, fdr: float, least: int) -> int:
    """Return how many random draws a family needs for its p to be rejected with room to spare.

    The least p of n draws is ``1 / (n + 1)``, ``n_families / (n + 1)`` after adjustment over the
    families: that is to be a fifth of the rate, `MAX_DRAWS` at most.
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
        return 0 if self._largest is None else len(self._largest)

    def adjusted(self) -> Floats:
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
    """
    inside = [as_floats(p, "p") for p in adjusted]
    if not inside:
        return [], np.zeros(0)
    families = benjamini_hochberg([p.min() for p in inside])
    selected, n = np.sort(families), np.arange(1, len(families) + 1)
    tests = []
    for p, of_family in zip(inside, families, strict=True):
        # At q = selected[r - 1] there are r families at least.
        least = np.maximum(np.maximum(selected, of_family), len(n) * p[:, np.newaxis] / n)
        tests.append(np.minimum(least.min(axis=1), 1.0))
    return tests, families


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
        self.units, lost_at = taken[kept], np.flatnonzero(lost[taken[kept]])
        self.stratum, first, size = _runs(at[kept])
        of_lost = self.stratum[lost_at]
        turn = (random.random((n_draws, len(size)), np.float32) * size).astype(np.int32)
        turn = np.concatenate([np.zeros((1, len(size)), np.int32), np.minimum(turn, size - 1)])
        place = lost_at.astype(np.int32) + turn[:, of_lost]
        place -= np.where(place >= (first + size)[of_lost], size[of_lost], 0)
        self._place, self._size = place, size

    def sums(self, values: Floats) -> Floats:
        """Return the sums over the lost units of each draw, ``(n_values, 1 + n_draws)``.

        Args:
            values: of `units`, ``(n_values, len(units))``; taken about the mean of their stratum.
        """
        middle = np.stack([np.bincount(self.stratum, row, len(self._size)) for row in values])
        x = (values - (middle / self._size)[:, self.stratum]).T
        sums = np.empty((x.shape[1], len(self._place)))
        # An eighth of the units at least is lost: a dense product is faster than a sparse one.
        for k in range(0, len(self._place), self.CHUNK):
            some = self._place[k : k + self.CHUNK]
            drawn = np.zeros((len(some), len(x)))
            np.put_along_axis(drawn, some, 1.0, axis=1)
            sums[:, k : k + self.CHUNK] = (drawn @ x).T
        return sums


def _some_strata(stratum: Ints, lost: Bools, most: int) -> Ints:
    known, at, n_lost = _counted(stratum, lost)
    partial = np.flatnonzero((n_lost > 0) & (n_lost < np.bincount(at, minlength=len(known))))
    every = max(1, int(np.ceil(n_lost[partial].sum() / most)))
    used = np.zeros(len(known), bool)
    used[partial[::every]] = True
    return np.flatnonzero(used[at])


def _counted(stratum: Ints, lost: Bools) -> tuple[Ints, Ints, Ints]:
    known, at = np.unique(stratum, return_inverse=True)
    return known, at, np.bincount(at, lost, len(known)).astype(np.int64)


def _runs(rising: Ints) -> tuple[Ints, Ints, Ints]:
    _, first, at, size = np.unique(
        rising, return_index=True, return_inverse=True, return_counts=True
    )
    return at, first.astype(np.int32), size.astype(np.int32)


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
    numerator that `series.circular_shift` ranks, rate and mean those of the run. Their sum is held
    against ``sqrt(sum of squares)``, Student's t with ``min(n - 1, 3 k - 1)`` degrees of freedom,
    k the blocks that carry the squares (as in `intervals.jackknife`).

    Shifts take the share lost of a step for something that would have been the same elsewhere. It
    is, where steps are lost whole. Where a request is lost, its share of a step is the larger the
    fewer others there are, and lasts as long as it does: shifts then reject up to a quarter of
    harmless losses at 5 %. Blocks keep the losses where they were.

    1 for a covariate without variation.

    Args:
        value_sum: ``(n_steps,)`` or ``(n_covariates, n_steps)``, sums over the computed tokens.
        weight: tokens that the sums are over, as ``value_sum`` or ``(n_steps,)``; by default ``n``.
    """
    share, values, weights = shares_and_sums(n, lost, value_sum, weight)
    parts = slices(run)
    score = about_mean(values, weights, parts)
    for part in parts:
        total = weights[:, part].sum(axis=1, keepdims=True)
        rate = np.divide(
            weights[:, part] @ share[part][:, np.newaxis],
            total,
            out=np.zeros_like(total),
            where=total > 0,
        )
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
    """
    count = as_floats(n, "n")
    total, missing, gone_x = (
        as_floats(v, name, count.shape) for v, name in ((sx, "sx"), (n_lost, "n_lost"), (lx, "lx"))
    )
    steps, requests = np.asarray(step, np.int64), np.asarray(request, np.int64)
    if steps.shape != count.shape or requests.shape != count.shape:
        raise ValueError(f"n has shape {count.shape}, step {steps.shape}, request {requests.shape}")
    if np.any(missing < 0) or np.any(missing > count):
        raise ValueError("lost tokens must lie between 0 and the computed tokens of each cell")
    used = count > 0
    if not used.any():
        return None
    _, at = np.unique(steps[used], return_inverse=True)
    who, by = np.unique(requests[used], return_inverse=True)
    count, total, missing, gone_x = count[used], total[used], missing[used], gone_x[used]
    shared = np.bincount(at)
    in_step, in_step_lost = np.bincount(at, weights=count), np.bincount(at, weights=missing)
    partial = (in_step_lost > 0) & (in_step_lost < in_step) & (shared > 1)
    keep = partial[at]
    if not keep.any():
        return None
    rate = (in_step_lost / in_step)[at]
    mean = (np.bincount(at, weights=total) / in_step)[at]
    score = gone_x - mean * missing - rate * (total - mean * count)
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
    by_steps = float((by_step**2).sum() - ((score * spread) ** 2).sum()) / largest**2
    t = float(score.sum()) / (largest * math.sqrt(squares + max(by_steps, 0.0)))
    fourth = float(((v / largest) ** 4).sum())
    freedom = max(1.0, min(g - 1.0, int(partial.sum()) - 1.0, 3 * squares**2 / fourth - 1))
    information = float(
        (in_step * (in_step_lost / in_step) * (1 - in_step_lost / in_step))[partial].sum()
    )
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
    n: ArrayLike, lost: ArrayLike, run: ArrayLike, *, n_draws: int = 2000, seed: int = 0
) -> Change | None:
    """Return whether the loss rate changed in time.

    The statistic is the CUSUM ``max_b |sum_{i<=b} (share_i - mean)|`` of the share lost of a step
    (Page 1954; Ploberger & Krämer 1992), in which every step counts the same, over 8 to 50 blocks
    of `intervals.blocks`, long against the correlation of the loss. Its p comes from permutations
    of the blocks, exact when they are exchangeable (Kirch 2007, block permutation for change
    points). Kolmogorov's limit needs many blocks that lost something: with a long-run variance and
    ten bursts it rejected in 0 to 1 % of harmless runs at 5 %.

    None with fewer than `_N_BLOCKS_MIN` blocks, when nothing or everything was lost.
    """
    share = loss_share(n, lost)
    lost_tokens, computed = as_floats(lost, "lost"), as_floats(n, "n")
    total, total_lost = computed.sum(), lost_tokens.sum()
    if len(share) < _N_BLOCKS_MIN or total_lost <= 0 or total_lost >= total:
        return None
    cut = blocks(len(share), run, share, _N_BLOCKS_MAX, _N_BLOCKS_MIN)
    used = computed > 0
    about = np.where(used, share - share[used].mean(), 0.0)
    steps = block_sums(about, cut.labels, cut.n_blocks)
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
        before=_share(lost_tokens[:end], computed[:end]),
        after=_share(lost_tokens[end:], computed[end:]),
        n_blocks=cut.n_blocks,
        long_enough=cut.long_enough,
    )


def long_run_variance(series: ArrayLike) -> float:
    """Return the long-run variance of a series about its mean, 0 for one without variation.

    Bartlett's kernel (Newey & West 1987) with Andrews' (1991) bandwidth for it,
    ``1.1447 (4 r² / (1 - r²)² n)^(1/3)``, r the first autocorrelation.
    """
    x = as_floats(series, "series")
    centred = x - x.mean() if len(x) else x
    n = len(centred)
    energy = float(centred @ centred)
    if n < 2 or energy <= 1e-24 * max(1.0, float(x @ x)):
        return 0.0
    first = min(0.97, abs(float(centred[1:] @ centred[:-1]) / energy))
    width = 1.1447 * (4 * first**2 / (1 - first**2) ** 2 * n) ** (1 / 3)
    variance = energy / n
    for lag in range(1, min(n - 1, math.floor(width)) + 1):
        variance += 2 * (1 - lag / (width + 1)) * float(centred[lag:] @ centred[:-lag]) / n
    return max(variance, 0.0)


def _share(lost: Floats, n: Floats) -> float:
    total = float(n.sum())
    return float(lost.sum()) / total if total > 0 else 0.0


def naive_z(sums: ArrayLike) -> float | None:
    """Return the p of lost against stored tokens as if they were independent; never decides.

    The score test ``z = r sqrt(n)``, r the correlation of the covariate with being lost. None when
    nothing or everything was lost, or without variation.

    Args:
        sums: ``(5,)``: n, sx, sxx, n_lost, lx.
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
