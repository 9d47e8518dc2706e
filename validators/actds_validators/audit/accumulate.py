"""Accumulate: sums over rows that add up, whatever parts the rows came in.

What is summed are the covariates of each row, by tick of the series, block of the jackknife and
cell of the weights; and counts of classes, bins, strata and tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.covariates import N_BANDS, N_BITS, CovariateDef
from actds_validators.audit.data import CLASSES, places
from actds_validators.audit.lookup import Rows
from actds_validators.audit.result import Covariate
from actds_validators.statistics.intervals import Blocks

Numbers = Floats | Bools
CONTENT = "content"
"""The group of the covariates of stored and lost rows; every hook's readouts are another."""


# rows of steps that lost a part ---------------------------------------------------------------


@dataclass(frozen=True)
class PartialRows:
    """Rows of the steps that lost a part, ``(n_rows,)`` each.

    Args:
        values: of each number, about the middle of the sums ``(n_numbers, n_rows)``; NaN where a
            row has none.
    """

    step: Ints
    request: Ints
    position: Ints
    lost: Bools
    values: npt.NDArray[np.floating[Any]]

    @classmethod
    def together(cls, parts: Sequence[PartialRows], n_numbers: int = 0) -> PartialRows:
        if not parts:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, nothing, nothing > 0, np.zeros((n_numbers, 0)))
        names = ("step", "request", "position", "lost", "values")
        return cls(*(np.concatenate([getattr(p, n) for p in parts], axis=-1) for n in names))


# sums -----------------------------------------------------------------------------------------


SPECIAL, SHARED, PROMPT, GENERATED = range(len(CLASSES))


class ClassCounts:
    """Positions by class, band and rarity, ``(n_classes, N_BANDS, N_BITS)``.

    Args:
        labels: names of classes that somebody gave; they come after `CLASSES`.
    """

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self.words = (*CLASSES, *labels)
        shape = len(self.words), N_BANDS, N_BITS
        self.stored, self.reused, self.lost = (np.zeros(shape, np.int64) for _ in range(3))
        self.repeated = 0
        self.largest = 0
        self.inverses = self.squares = 0.0
        """Over stored rows, sums of 1/m - 1 and of m^2 - 1, m how often a row was served."""

    def count(
        self,
        *,
        special: Bools,
        prefill: Bools,
        served: Ints | None,
        label: Ints | None,
        band: Ints,
        bits: Ints,
    ) -> None:
        """Count rows.

        Args:
            served: how often the prefix cache served it; ``None`` for lost rows.
            label: place of its label, -1 without one; ``None`` when there are no labels.
        """
        word = np.where(prefill, PROMPT, GENERATED)
        if served is not None:
            word[served > 0] = SHARED
        word[special] = SPECIAL
        if label is not None:
            word = np.where(label >= 0, len(CLASSES) + label, word)
        at = (word * N_BANDS + band) * N_BITS + bits
        target = self.lost if served is None else self.stored
        target += np.bincount(at, minlength=target.size).reshape(target.shape)
        if served is not None and len(again := np.flatnonzero(served)):
            weights = served[again].astype(np.float64)
            again_served = np.bincount(at[again], weights=weights, minlength=target.size)
            self.reused += again_served.reshape(target.shape).astype(np.int64)
            self.repeated += len(again)
            self.largest = max(self.largest, int(served.max()))
            self.inverses -= float((weights / (1 + weights)).sum())
            self.squares += float((weights * (2 + weights)).sum())

    def add(self, other: ClassCounts) -> None:
        self.stored += other.stored
        self.reused += other.reused
        self.lost += other.lost
        self.repeated += other.repeated
        self.largest = max(self.largest, other.largest)
        self.inverses += other.inverses
        self.squares += other.squares


@dataclass(frozen=True)
class CovariateSums:
    """One covariate over the series.

    Args:
        n: tokens that have a value, ``(n_ticks,)``.
        sums: ``(3, n_ticks)``: x and its square over all computed tokens, x over the lost ones.
            What is known by block only stands at the first tick of the block: nobody asks for it
            tick by tick, and what is 0 takes no memory.
        n_lost: lost tokens that have a value, ``(n_ticks,)``, likewise.
    """

    covariate: Covariate
    n: Floats
    sums: Floats
    n_lost: Floats


@dataclass
class Bands:
    """Computed and lost tokens of each block by the bins of a covariate.

    Args:
        n: computed tokens ``(n_blocks, n_bins)``.
        edges: low and high of each bin, ``None`` for classes.
    """

    labels: list[str]
    n: Floats
    lost: Floats
    edges: list[tuple[float, float] | None] = field(default_factory=list)


def _add_runs(target: Floats, where: Ints, sums: Floats) -> None:
    """Add sums ``(..., n)`` at places ``(n,)`` of the last axis, equal ones side by side."""
    starts = np.flatnonzero(np.diff(where, prepend=-1))
    if len(starts):
        target[..., where[starts]] += np.add.reduceat(sums, starts, axis=-1)


class Moments:
    """Sums of powers of some numbers of each row, about a middle.

    Per tick stands only what is moved along the run: all that intervals need is per block. Of
    ``order`` 2 the squares are covariates as well, so that every sum goes twice as far.
    """

    def __init__(
        self, n_numbers: int, order: int, n_ticks: int, n_blocks: int, n_cells: int
    ) -> None:
        self.order = order
        self.low, self.high = n_ticks, 0
        self.ticks = np.zeros((1 + order, n_numbers, n_ticks))  # powers 0 to order
        self.blocks = np.zeros((order, n_numbers, n_blocks))  # the powers beyond, to 2 order
        self.lost = np.zeros((1 + order, n_numbers, n_blocks))
        self.cells = np.zeros((1 + order, n_numbers, n_blocks, n_cells))  # of stored rows
        self.within: list[PartialRows] = []

    def count(self, rows: Rows, values: Sequence[Numbers], lost: Bools, cell: Ints) -> None:
        """Add rows.

        Args:
            values: each number of the rows, NaN where one has none; booleans as they are.
            cell: of each, ``block * n_cells + cell``.
        """
        lookup, n_cells = rows.lookup, self.cells.shape[3]
        tick = lookup.tick[rows.step]
        low, high = int(tick.min()), int(tick.max()) + 1
        self.low, self.high = min(self.low, low), max(self.high, high)
        # Rows of a tick, a cell and a fate are summed once, and their sums wherever they belong.
        key = ((tick - low) * n_cells + cell % n_cells) * 2 + lost
        groups, at = places(key)
        of_tick, of_cell = low + groups // (2 * n_cells), groups // 2 % n_cells
        block = np.empty(len(groups), np.int64)
        block[at] = lookup.block[rows.step]
        sums = self._powers(at, values, len(groups))
        first, beyond = sums[: 1 + self.order], sums[1 + self.order :]
        _add_runs(self.ticks, of_tick, first)
        _add_runs(self.blocks, block, beyond)
        is_lost = groups % 2 == 1
        _add_runs(self.lost, block[is_lost], first[..., is_lost])
        of_cell += block * n_cells
        stored = np.flatnonzero(~is_lost)
        stored = stored[np.argsort(of_cell[stored], kind="stable")]
        cells = self.cells.reshape(*self.cells.shape[:2], -1)
        _add_runs(cells, of_cell[stored], first[..., stored])
        inside = np.flatnonzero(lookup.within[rows.step])
        if len(inside):
            # Readouts are 32 bits wide where they are stored.
            kind = np.float32 if self.order == 2 else np.float64
            some = np.stack([np.asarray(x[inside], kind) for x in values])
            inner = rows.take(inside)
            self.within.append(
                PartialRows(inner.step, inner.request, inner.position, lost[inside], some)
            )

    def _powers(self, at: Ints, values: Sequence[Numbers], size: int) -> Floats:
        sums = np.empty((1 + 2 * self.order, len(values), size))  # powers from 0 on
        sums[0] = np.bincount(at, minlength=size)
        for k, x in enumerate(values):
            if x.dtype == bool:  # every power of 0 and 1 is the same
                sums[1:, k] = np.bincount(at, weights=x, minlength=size)
                continue
            known, place = np.isfinite(x), at
            if not known.all():
                place, x = at[known], x[known]
                sums[0, k] = np.bincount(place, minlength=size)
            power = x
            for p in range(1, 1 + 2 * self.order):
                power = x if p == 1 else power * x
                sums[p, k] = np.bincount(place, weights=power, minlength=size)
        return sums

    def cut(self) -> None:
        """Leave out the ticks that nothing fell into: `add` knows where they are."""
        self.low = min(self.low, self.high)
        self.ticks = self.ticks[..., self.low : self.high].copy()
        self.within = [PartialRows.together(self.within)] if self.within else []

    def add(self, other: Moments) -> None:
        self.ticks[..., other.low : other.high] += other.ticks
        self.blocks += other.blocks
        self.lost += other.lost
        self.cells += other.cells
        self.within += other.within

    def take_within(self) -> PartialRows:
        """Return the rows of the steps that lost a part, and forget them: each run has its own."""
        parts, self.within = self.within, []
        return PartialRows.together(parts, self.ticks.shape[1])

    def centre(self, block: Ints) -> Floats:
        """Put the sums about the mean of all rows, and return how far that was.

        The powers of x - d follow from those of x: the middle need not be known before the pass.
        """
        n, x = self.ticks[:2].sum(axis=2)
        middle = np.divide(x, n, out=np.zeros_like(x), where=n > 0)
        d = middle[:, np.newaxis]
        n, x, xx = (self._by_block(power, block) for power in self.ticks)
        x3, x4 = self.blocks
        x4 += -4 * d * x3 + 6 * d**2 * xx - 4 * d**3 * x + d**4 * n
        x3 += -3 * d * xx + 3 * d**2 * x - d**3 * n
        for sums in (self.ticks, self.lost, self.cells):
            count, total, square = sums
            for k, shift in enumerate(middle):  # in place: these are the largest arrays
                square[k] += -2 * shift * total[k] + shift**2 * count[k]
                total[k] -= shift * count[k]
        return np.asarray(middle, np.float64)

    def covariate_sums(
        self, covariates: Sequence[Covariate], middle: Floats, blocks: Blocks
    ) -> list[CovariateSums]:
        """Return each covariate over the series: the numbers, then their squares.

        Args:
            middle: about which the sums are, ``(n_numbers,)``; the means are put back.
        """
        first = np.searchsorted(blocks.labels, np.arange(blocks.n_blocks))
        every = []
        for number, covariate in enumerate(covariates):
            k, is_square = number % len(middle), number >= len(middle)
            power, c = 1 + is_square, 0.0 if is_square else middle[k]
            n, x, n_lost = self.ticks[0, k], self.ticks[power, k], self.lost[0, k]
            twice = self.blocks[-1, k]
            if self.order == 2 and not is_square:
                twice = np.bincount(blocks.labels, weights=self.ticks[2, k])
            three, of_lost = np.zeros((3, len(n))), np.zeros(len(n))
            of_lost[first] = n_lost
            three[0], three[1, first] = x, twice
            three[2, first] = self.lost[power, k]
            if c:
                by_block = [np.bincount(blocks.labels, weights=v) for v in (n, x)]
                three[0] += c * n
                three[1, first] += 2 * c * by_block[1] + c * c * by_block[0]
                three[2, first] += c * n_lost
            every.append(CovariateSums(covariate, n, three, of_lost))
        return every

    def _by_block(self, ticked: Floats, block: Ints) -> Floats:
        size = self.blocks.shape[2]
        return np.stack([np.bincount(block, weights=row, minlength=size) for row in ticked])


@dataclass(frozen=True)
class Sums:
    """What rows add up to; of two, the stored rows and the lost ones.

    Args:
        moments: of each group of covariates that is summed: of `CONTENT` and the hooks.
        bands: of each covariate in bins ``(2, n_blocks, n_bins)``.
        cell_n: rows ``(2, n_blocks, n_cells)``.
        cell_system: system covariates over the stored rows ``(n_system, n_blocks, n_cells)``.
        strata: by the block in which the request began ``(2, n_strata, n_blocks)``: special tokens,
            the classes and the ids.
        tails: by the same block ``(2, 2, n_hooks, n_values, n_blocks)``, below and above.
    """

    moments: dict[str, Moments]
    classes: ClassCounts
    bands: dict[str, Floats]
    cell_n: Floats
    cell_system: Floats
    strata: Floats
    tails: Floats

    def cut(self) -> Sums:
        for moments in self.moments.values():
            moments.cut()
        return self

    def add(self, other: Sums) -> None:
        for group, moments in other.moments.items():
            self.moments[group].add(moments)
        for name, counts in other.bands.items():
            self.bands[name] += counts
        for name in ("cell_n", "cell_system", "strata", "tails"):
            getattr(self, name)[...] += getattr(other, name)
        self.classes.add(other.classes)

    def bands_of(self, definitions: Sequence[CovariateDef]) -> dict[str, Bands]:
        bands = {}
        moments = self.moments[CONTENT]
        for k, covariate in enumerate(definitions):
            if covariate.bins is None:
                continue
            if (
                covariate.unit == "share"
            ):  # the sums tell: how many there are, and of how many it is 1
                parts = moments.cells[:, k].sum(axis=2), moments.lost[:, k]
                stored, lost = (np.stack([n - yes, yes], axis=1) for n, yes in parts)
            else:
                stored, lost = self.bands[covariate.name]
            computed = stored + lost
            numbers = np.flatnonzero(computed.sum(axis=0)).tolist()
            if numbers:
                bands[covariate.name] = Bands(
                    [covariate.bins.label(k) for k in numbers],
                    computed[:, numbers],
                    lost[:, numbers],
                    [covariate.bins.edges(k) for k in numbers],
                )
        return bands
