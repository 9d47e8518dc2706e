"""Passes: every row of a run read part by part, into sums that add up whatever the parts are.

One pass takes the stored rows, the lost positions and the readouts of a run, and sums the
covariates of each row by tick of the series, block of the jackknife and cell of the weights;
another draws the sample that says where the readouts lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds.format.tables import TableName
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.covariates import (
    N_BANDS,
    N_BITS,
    CovariateDef,
    Widths,
    position_band,
    squares,
)
from actds_validators.audit.data import CLASSES, TablePart, explode, places
from actds_validators.audit.lookup import INCLUSION_COLUMN, CellEdges, Lookup, Rows, Scale
from actds_validators.audit.result import Covariate
from actds_validators.statistics.intervals import Blocks

Numbers = Floats | Bools
CONTENT = "content"
"""The group of the covariates of stored and lost rows; every hook's readouts are another."""


# rows of steps that lost a part ---------------------------------------------------------------


@dataclass(frozen=True)
class PartialRows:
    """Rows of the steps that lost a part, ``(n_rows,)`` each."""

    step: Ints
    request: Ints
    position: Ints
    lost: Bools
    values: npt.NDArray[np.floating[Any]]  # about the middle, (n_numbers, n_rows); NaN for none

    @classmethod
    def together(cls, parts: Sequence[PartialRows], n_numbers: int) -> PartialRows:
        nothing = np.zeros(0, np.int64)
        none = cls(nothing, nothing, nothing, nothing > 0, np.zeros((n_numbers, 0), np.float32))
        every = zip(*(vars(part).values() for part in parts or [none]), strict=True)
        return cls(*(np.concatenate(arrays, axis=-1) for arrays in every))


# sums -----------------------------------------------------------------------------------------


SPECIAL, SHARED, PROMPT, GENERATED = range(len(CLASSES))


class ClassCounts:
    """Positions by class, band and rarity, ``(n_classes, N_BANDS, N_BITS)``.

    A stored row counts as 1 over its inclusion: for those like it that were not drawn, too.

    Args:
        labels: names of classes that somebody gave; they come after `CLASSES`.
    """

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self.words = (*CLASSES, *labels)
        shape = len(self.words), N_BANDS, N_BITS
        self.stored, self.reused, self.lost = (np.zeros(shape) for _ in range(3))
        self.answered = np.zeros(N_BANDS, np.int64)
        """Servings from the prefix cache whose row is stored, by band."""
        self.repeated = 0.0
        self.largest = 0
        self.inverses = self.squares = 0.0
        """Over stored rows, sums of w (1/m - 1) and w (w m^2 - 1), m how often one was served."""

    def count(
        self,
        special: Bools,
        prefill: Bools,
        band: Ints,
        bits: Ints,
        served: Ints | None,
        label: Ints | None,
        weight: Floats | None = None,
    ) -> None:
        """Count rows.

        Args:
            served: how often the prefix cache served it; ``None`` for lost rows.
            label: place of its label, -1 without one; ``None`` when there are no labels.
            weight: of each row; ``None``: 1.
        """
        word = np.where(prefill, PROMPT, GENERATED)
        if served is not None:
            word[served > 0] = SHARED
        word[special] = SPECIAL
        if label is not None:
            word = np.where(label >= 0, len(CLASSES) + label, word)
        at = (word * N_BANDS + band) * N_BITS + bits
        target = self.lost if served is None else self.stored
        target += np.bincount(at, weight, minlength=target.size).reshape(target.shape)
        if weight is not None:
            self.squares += float((weight * (weight - 1)).sum())
        if served is not None and len(again := np.flatnonzero(served)):
            more = served[again].astype(np.float64)
            w = np.ones(len(again)) if weight is None else weight[again]
            again_served = np.bincount(at[again], weights=w * more, minlength=target.size)
            self.reused += again_served.reshape(target.shape)
            self.answered += np.bincount(band[again], more, N_BANDS).astype(np.int64)
            self.repeated += float(w.sum())
            self.largest = max(self.largest, int(served.max()))
            self.inverses -= float((w * more / (1 + more)).sum())
            self.squares += float((w**2 * more * (2 + more)).sum())

    def add(self, other: ClassCounts) -> None:
        self.largest = max(self.largest, other.largest)
        for name in (*("stored", "reused", "lost", "answered"), "repeated", "inverses", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True)
class CovariateSums:
    """One covariate over the series.

    Args:
        sums: ``(3, n_ticks)``: x and its square over all computed tokens, x over the lost ones.
            What is known by block only stands at the first tick of the block: nobody asks for it
            tick by tick, and what is 0 takes no memory.
    """

    covariate: Covariate
    n: Floats  # tokens that have a value, (n_ticks,)
    sums: Floats
    n_lost: Floats  # lost tokens that have a value, (n_ticks,), likewise


@dataclass
class Bands:
    """Computed and lost tokens of each block by the bins of a covariate."""

    labels: list[str]
    n: Floats  # computed tokens (n_blocks, n_bins)
    lost: Floats
    edges: list[tuple[float, float] | None]  # low and high of each bin, None for classes


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
        sums = self._powers(at, values, len(groups), rows.weight)
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

    def _powers(
        self, at: Ints, values: Sequence[Numbers], size: int, weight: Floats | None
    ) -> Floats:
        sums = np.empty((1 + 2 * self.order, len(values), size))  # powers from 0 on
        sums[0] = np.bincount(at, weight, minlength=size)
        for k, x in enumerate(values):
            if x.dtype == bool:  # every power of 0 and 1 is the same
                once = x if weight is None else x * weight
                sums[1:, k] = np.bincount(at, weights=once, minlength=size)
                continue
            known, place, w = np.isfinite(x), at, weight
            if not known.all():
                place, x, w = at[known], x[known], None if w is None else w[known]
                sums[0, k] = np.bincount(place, w, minlength=size)
            power = x if w is None else w * x
            for p in range(1, 1 + 2 * self.order):
                power = power if p == 1 else power * x
                sums[p, k] = np.bincount(place, weights=power, minlength=size)
        return sums

    def cut(self) -> None:
        """Leave out the ticks that nothing fell into: `add` knows where they are."""
        self.low = min(self.low, self.high)
        self.ticks = self.ticks[..., self.low : self.high].copy()
        self.within = [self.take_within()] if self.within else []

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
    """What rows add up to; of two, the stored rows and the lost ones."""

    moments: dict[str, Moments]  # of each group that is summed: of `CONTENT` and the hooks
    classes: ClassCounts
    bands: dict[str, Floats]  # of each covariate in bins (2, n_blocks, n_bins)
    cell_n: Floats  # rows (2, n_blocks, n_cells)
    cell_system: Floats  # system covariates over the stored rows (n_system, n_blocks, n_cells)
    strata: Floats  # (2, n_strata, n_blocks), where the request began: special tokens, classes, ids
    tails: Floats  # by the same block (2, 2, n_hooks, n_values, n_blocks), below and above

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
            if covariate.unit == "share":  # the sums tell how many there are, and are 1
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


ExecutorName = Literal["threads", "ray"]
"""The executors of ``actds.executor`` that an audit may name in its result."""


# the pass -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What is summed of each row.

    Args:
        cells: of the weights; None where nothing was lost: classes alone are counted
    """

    definitions: tuple[CovariateDef, ...]
    cells: CellEdges | None
    hooks: tuple[str, ...]
    widths: Widths
    scale: Scale | None = None  # where readouts lie; None where nothing was lost or no run has any

    @property
    def covariates(self) -> dict[str, list[Covariate]]:
        """Return the covariates of each group: of `CONTENT`, and of each hook with readouts."""
        groups = {CONTENT: [covariate.facts() for covariate in self.definitions]}
        for hook in self.hooks if self.scale else ():
            numbers = self.widths.facts(hook)
            groups[hook] = [*numbers, *squares(numbers)]
        return groups if self.cells else {}

    @property
    def middles(self) -> dict[str, Floats]:
        of_hooks = dict(zip(self.hooks, self.scale.middle, strict=True)) if self.scale else {}
        return {CONTENT: np.zeros(len(self.definitions)), **of_hooks}


@dataclass(frozen=True)
class RowPass:
    """Sums one part of a table, or some of the lost positions."""

    lookup: Lookup
    measured: Measured

    def sums(self, groups: Sequence[str]) -> Sums:
        lookup, cells = self.lookup, self.measured.cells
        labels = lookup.labels.words if lookup.labels else ()
        n_blocks, n_cells = lookup.n_blocks, cells.n_cells if cells else 0
        n_values = self.measured.widths.n_values if self.measured.scale else 0
        shape = lookup.n_ticks, n_blocks, n_cells
        sizes = {group: (n_values, 2) for group in groups}
        sizes |= {CONTENT: (len(self.measured.definitions), 1)} if CONTENT in groups else {}
        moments = {group: Moments(*size, *shape) for group, size in sizes.items()}
        return Sums(
            moments,
            ClassCounts(labels),
            {
                d.name: np.zeros((2, n_blocks, d.bins.n))
                for d in self.measured.definitions
                if d.bins and d.unit != "share" and CONTENT in groups
            },
            np.zeros((2, n_blocks, n_cells)),
            np.zeros((len(lookup.system), n_blocks, n_cells)),
            np.zeros((2, 1 + len(labels) + lookup.n_slots, n_blocks)),
            np.zeros((2, 2, len(self.measured.hooks), n_values, n_blocks)),
        )

    def pieces(self, parts: Mapping[TableName, Sequence[TablePart]]) -> list[TablePart | range]:
        readouts = parts["readouts"] if self.measured.scale else ()
        return [*parts["tokens"], *lost_pieces(self.lookup), *readouts]

    def __call__(self, piece: TablePart | range) -> Sums:
        if isinstance(piece, TablePart) and piece.of == "readouts":
            return self._readouts(piece)
        sums = self.sums([*self.measured.covariates][:1])
        lost = isinstance(piece, range)
        for rows in self._lost(piece) if isinstance(piece, range) else self._stored(piece):
            label = _add_classes(sums.classes, rows, lost=lost)
            if self.measured.cells is not None and len(rows.step):
                _add_strata(sums, rows, label, int(lost))
                self._add(sums, rows, self.measured.cells, int(lost))
        return sums.cut()

    def _stored(self, part: TablePart) -> Iterator[Rows]:
        for batch in part.batches(["request", "position", "token_id", "step", INCLUSION_COLUMN]):
            rows, known = Rows.read(self.lookup, batch)
            yield rows if known.all() else rows.take(known)

    def _lost(self, piece: range) -> Iterator[Rows]:
        losses = self.lookup.losses
        some = slice(piece.start, piece.stop)
        for of_range, position in explode(losses.start[some], losses.stop[some]):
            step, request = losses.step[some][of_range], losses.request[some][of_range]
            token = np.full(len(step), -1, np.int64)
            if self.lookup.has_ids:
                ids = self.lookup.lost_ids[losses.find(step, request, position)]
                token = self.lookup.vocabulary.index.of(ids)
            yield Rows(self.lookup, step, request, position, token)

    def _add(self, sums: Sums, rows: Rows, cells: CellEdges, lost: int) -> None:
        lookup, (n_blocks, n_cells) = self.lookup, sums.cell_n.shape[1:]
        cell = cells.of(rows)
        block = lookup.block[rows.step]
        at = block * n_cells + cell
        n = np.bincount(at, rows.weight, minlength=n_blocks * n_cells)
        sums.cell_n[lost] += n.reshape(n_blocks, -1)
        if not lost:
            _add_system(sums, rows, cell)
        values = [rows.values(covariate) for covariate in self.measured.definitions]
        for x, covariate in zip(values, self.measured.definitions, strict=True):
            if covariate.bins is not None and covariate.name in sums.bands:
                known, size, at_block, w = np.isfinite(x), covariate.bins.n, block, rows.weight
                if not known.all():
                    x, at_block, w = x[known], block[known], None if w is None else w[known]
                bins = at_block * size + covariate.bins.of(x)
                n = np.bincount(bins, w, minlength=n_blocks * size)
                sums.bands[covariate.name][lost] += n.reshape(n_blocks, -1)
        sums.moments[CONTENT].count(rows, values, np.full(len(at), bool(lost)), at)

    def _readouts(self, part: TablePart) -> Sums:
        """Return the sums of a part of ``readouts``.

        A number that is not finite counts for nothing, as does one that a run does not have.
        """
        hooks, widths, cells = self.measured.hooks, self.measured.widths, self.measured.cells
        scale = self.measured.scale
        assert cells is not None and scale is not None
        lookup, sums = self.lookup, self.sums(hooks)
        n_cells = sums.cell_n.shape[2]
        columns = ["request", "position", "token_id", "step", "hook", *widths.columns]
        for batch in part.batches(columns):
            rows, kept = Rows.read(lookup, batch)
            values = widths.read(batch)
            kept &= lookup.recomputed.count(rows.step, rows.request, rows.position)
            lost = np.zeros(len(kept), bool)
            at = np.flatnonzero(kept & lookup.lossy[rows.step])
            some = rows.take(at)
            lost[at] = lookup.losses.find(some.step, some.request, some.position) >= 0
            cell = cells.of(rows) + lookup.block[rows.step] * n_cells
            for number, hook in enumerate(hooks):
                of_hook = np.flatnonzero(kept & pc.equal(batch["hook"], hook).to_numpy(False))
                if len(of_hook):
                    values_of_hook = values[:, of_hook] - scale.middle[number][:, np.newaxis]
                    some = rows.take(of_hook)
                    sums.moments[hook].count(some, values_of_hook, lost[of_hook], cell[of_hook])
                    _add_tails(sums, number, some, values_of_hook, lost[of_hook], scale)
        return sums.cut()


def lost_pieces(lookup: Lookup, size: int = 1 << 18) -> list[range]:
    lengths = lookup.losses.stop - lookup.losses.start
    if not len(lengths):
        return []
    number = (np.cumsum(lengths) - lengths) // size
    firsts = np.flatnonzero(np.diff(number, prepend=-1))
    return [range(int(a), int(b)) for a, b in zip(firsts, [*firsts[1:], len(lengths)], strict=True)]


def _add_strata(sums: Sums, rows: Rows, label: Ints | None, lost: int) -> None:
    lookup, n_blocks = rows.lookup, sums.strata.shape[2]
    slots = [(np.zeros(len(rows.step), np.int64), rows.special)]
    if label is not None:
        slots.append((1 + label, label >= 0))
    if lookup.n_slots:
        slot = lookup.token_slot[rows.token]
        slots.append((slot + sums.strata.shape[1] - lookup.n_slots, slot >= 0))
    for slot, used in slots:
        some = np.flatnonzero(used)
        if len(some):
            at = slot[some] * n_blocks + lookup.request_block[rows.request[some]]
            weight = None if rows.weight is None else rows.weight[some]
            n = np.bincount(at, weight, minlength=sums.strata[lost].size)
            sums.strata[lost] += n.reshape(sums.strata.shape[1:])


def _add_classes(counts: ClassCounts, rows: Rows, *, lost: bool) -> Ints | None:
    lookup = rows.lookup
    number = lookup.requests.numbers(rows.request)
    label = lookup.labels.of(number, rows.position) if lookup.labels else None
    served = None if lost else lookup.servings.of(number, rows.position)
    band, bits = position_band(rows.position), lookup.vocabulary.bits[rows.token]
    counts.count(rows.special, rows.prefill, band, bits, served, label, rows.weight)
    return label


def _add_system(sums: Sums, rows: Rows, cell: Ints) -> None:
    lookup, (n_blocks, n_cells) = rows.lookup, sums.cell_system.shape[1:]
    pairs, of_pair = places(rows.step * n_cells + cell)
    n, step = np.bincount(of_pair, rows.weight), pairs // n_cells
    at = lookup.block[step] * n_cells + pairs % n_cells
    for k, values in enumerate(lookup.system.values()):
        total = np.bincount(at, weights=n * values[step], minlength=n_blocks * n_cells)
        sums.cell_system[k] += total.reshape(n_blocks, n_cells)


def _add_tails(
    sums: Sums, hook: int, rows: Rows, values: Floats, lost: Bools, scale: Scale
) -> None:
    block = rows.lookup.request_block[rows.request]
    for k, x in enumerate(values):
        middle = scale.middle[hook, k]
        tails = x < scale.low[hook, k] - middle, x > scale.high[hook, k] - middle
        for side, tail in enumerate(tails):
            at = np.flatnonzero(tail)
            if len(at):
                is_lost = lost[at]
                for fate, some in enumerate((at[~is_lost], at[is_lost])):
                    n = np.bincount(block[some], minlength=rows.lookup.n_blocks)
                    sums.tails[fate, side, hook, k] += n
