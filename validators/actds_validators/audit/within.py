"""Within: whether lost tokens differ from those that shared their step, and so their load.

Two tests of each covariate, of which the larger p counts. One draws the losses anew among the
tokens of each step: exact for losses that hit tokens, the tokens of a request in a step, or whole
requests, however rare or heavy-tailed the covariate. The other takes scores clustered by request
and step: it needs many, and holds for losses that lie side by side in any way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actds.format.positions import Keys, pair_key, position_key, split_key
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.passes import CONTENT, PartialRows
from actds_validators.audit.result import Covariate
from actds_validators.statistics.association import JointDraws, Turns, Within, within_cells
from actds_validators.statistics.intervals import benjamini_hochberg

MIN_REQUESTS = 10
"""Requests with a token in a step that lost a part, at least: of fewer nothing is tested."""
LEAST_DRAWS = 500


@dataclass(frozen=True)
class WithinTest:
    """The test of one covariate.

    Args:
        p: the larger of both.
        inside: adjusted over the family: by the largest of all tests in each draw, and after
            Benjamini and Hochberg; the larger.
    """

    covariate: Covariate
    scores: Within
    p: float
    inside: float


@dataclass(frozen=True)
class RowsOfSteps:
    """Rows of the steps that lost a part, of all runs, in an order that no reader decides.

    Args:
        step: number of the step of each, ``(n_rows,)``, another in each run.
        began: block of the jackknife in which the request began.
        keys: of each run, request and position of these.
    """

    step: Ints
    request: Ints
    began: Ints
    lost: Bools
    orders: list[Ints]
    keys: list[Keys]

    def values(self, runs: Sequence[PartialRows]) -> Floats:
        every = []
        for order, keys, run in zip(self.orders, self.keys, runs, strict=True):
            positions = position_key(run.request, run.position)
            by_key = np.argsort(positions, kind="stable")
            at = np.searchsorted(positions[by_key], keys)
            known = np.flatnonzero(at < len(positions))
            known = known[positions[by_key[at[known]]] == keys[known]]
            x = np.full((len(run.values), len(order)), np.nan)
            x[:, known] = run.values[:, by_key[at[known]]]
            every.append(x)
        return np.concatenate(every, axis=1)


def all_rows(runs: Sequence[PartialRows], began: Sequence[Ints]) -> RowsOfSteps:
    orders = [np.lexsort((run.position, run.request, run.step)) for run in runs]
    some = list(enumerate(zip(runs, orders, strict=True)))
    return RowsOfSteps(
        step=np.concatenate([run.step[order] + (k << 40) for k, (run, order) in some]),
        request=np.concatenate([run.request[order] + (k << 40) for k, (run, order) in some]),
        began=np.concatenate([began[k][run.request[order]] for k, (run, order) in some]),
        lost=np.concatenate([run.lost[order] for _, (run, order) in some]),
        orders=orders,
        keys=[position_key(run.request[order], run.position[order]) for _, (run, order) in some],
    )


class _Numbers(Sequence[Floats]):
    """The numbers of the rows of a group, and of a hook their squared deviations after them.

    Args:
        away: how far the mean of each lies from 0; ``None`` where squares are no covariates.
    """

    def __init__(self, values: Floats, shift: Floats | None) -> None:
        self._values, self._is_squared = values, shift is not None
        if shift is not None:
            values -= shift[:, np.newaxis]

    def __len__(self) -> int:
        return len(self._values) * (1 + self._is_squared)

    def __getitem__(self, k: Any) -> Any:
        """Return one number of the rows: side by side the squares would be held as well."""
        if not 0 <= k < len(self):
            raise IndexError(k)
        x = self._values[k % len(self._values)]
        return x if k < len(self._values) else x * x


class Units:
    """What is lost together, told by the losses alone: tokens, cells or whole requests.

    A cell is the tokens of a request in a step. Requests are lost whole where most of those that
    lost a token, of two at least, lost all of these; cells likewise. A unit counts as lost where
    most of its tokens are.
    """

    def __init__(self, rows: RowsOfSteps, n_draws: int, seed: int) -> None:
        self.n_rows = len(rows.step)
        self.step, self.request = _numbered(rows.step), _numbered(rows.request)
        pairs, cell = np.unique(pair_key(self.step, self.request), return_inverse=True)
        self.cell: Ints = cell.reshape(-1)
        self.lost = rows.lost
        self.kind = "tokens"
        unit, stratum = np.arange(self.n_rows), self.step
        if _lost_whole(self.request, rows.lost):
            self.kind, unit, stratum = "requests", self.request, rows.began
        elif _lost_whole(self.cell, rows.lost):
            self.kind, unit = "cells", self.cell
        self.unit, self.size = unit, np.bincount(unit)
        of_unit = np.zeros(len(self.size), np.int64)
        of_unit[unit] = stratum
        is_lost = 2 * np.bincount(unit, rows.lost) > self.size
        self.turns = Turns(of_unit, is_lost, n_draws, seed)
        self.pairs = split_key(pairs)

    def about_step(self, x: Floats) -> Floats:
        known = ~np.isnan(x)
        at = self.step[known]
        mean = np.bincount(at, x[known]) / np.maximum(np.bincount(at), 1)
        about = np.zeros_like(x)
        about[known] = x[known] - mean[at]
        return about

    def drawn(self, numbers: Iterable[Floats]) -> Floats:
        """Return sums over the lost units of each draw ``(n_numbers, 1 + n_draws)``.

        Of requests each counts the same: of a stored one only the tokens are here that shared a
        step with lost ones, and sums over fewer tokens would vary less than those of lost ones.
        """
        of_units = []
        for x in numbers:
            about = self.about_step(x)
            if self.kind != "tokens":
                about = np.bincount(self.unit, about).astype(np.float64)
            if self.kind == "requests":
                about /= self.size
            of_units.append(about[self.turns.units])
        return self.turns.sums(np.stack(of_units))

    def scores(self, x: Floats) -> Within | None:
        known = ~np.isnan(x)
        n = len(self.pairs[0])
        sums = []
        for some in (known, known & self.lost):
            at = self.cell[some]
            sums += [np.bincount(at, minlength=n), np.bincount(at, x[some], n)]
        used = sums[0] > 0
        return within_cells(*(v[used] for v in (*self.pairs, *sums)))


def _lost_whole(unit: Ints, lost: Bools) -> bool:
    n, n_lost = np.bincount(unit), np.bincount(unit, lost)
    hit = (n_lost > 0) & (n > 1)
    n_hit, n_part = (int(np.count_nonzero(some)) for some in (hit, hit & (n_lost < n)))
    return n_hit > 0 and 2 * n_part <= n_hit


def _numbered(values: Ints) -> Ints:
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def selections(
    runs: dict[str, list[PartialRows]],
    covariates: dict[str, list[Covariate]],
    means: dict[str, Floats],
    began: Sequence[Ints],
    n_draws: int,
    seed: int,
) -> Iterator[tuple[list[WithinTest], int]]:
    """Yield the tests of content, then those of the values of all hooks, and their draws."""
    rows = all_rows(runs[CONTENT], began)
    if len(np.unique(rows.step)) < 2:
        return
    units = Units(rows, n_draws, seed)
    for groups in ([CONTENT], [g for g in runs if g != CONTENT]):
        joint, tests = JointDraws(), []
        for group in groups:
            numbers = _Numbers(rows.values(runs[group]), means.get(group))
            scores = [units.scores(x) for x in numbers]
            kept = [k for k, t in enumerate(scores) if t and t.n_requests >= MIN_REQUESTS]
            if kept:
                sizes = np.abs(units.drawn(numbers[k] for k in kept))
                joint.add(sizes)
                reached = sizes >= sizes[:, :1] - 1e-9 * sizes.max(axis=1, keepdims=True)
                of = [covariates[group][k] for k in kept]
                tests += list(zip(of, (scores[k] for k in kept), reached.mean(axis=1), strict=True))
        if tests:
            clustered = benjamini_hochberg([t.p for _, t, _ in tests if t])
            inside = np.maximum(joint.adjusted(), clustered)
            yield (
                [
                    WithinTest(covariate, t, max(t.p, float(p)), float(q))
                    for (covariate, t, p), q in zip(tests, inside, strict=True)
                    if t
                ],
                joint.n_draws,
            )
