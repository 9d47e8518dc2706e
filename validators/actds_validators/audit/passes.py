"""Passes: every row of a run read part by part.

One pass takes the stored rows, the lost positions and the readouts of a run; another draws the
sample that says where the readouts lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.executor import Executor
from actds.format.tables import TableName
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.accumulate import CONTENT, ClassCounts, Moments, Sums
from actds_validators.audit.covariates import CovariateDef, Widths, position_band
from actds_validators.audit.data import TablePart, explode, places
from actds_validators.audit.lookup import CellEdges, Lookup, Rows

ExecutorName = Literal["threads", "ray"]
"""The executors of ``actds.executor`` that an audit may name in its result."""
TAIL = 0.01
"""Share of the rows in a tail."""
SAMPLE = 1 << 16
"""Rows of a hook in the sample, about, at most."""
MAX_PARTS, MAX_ROWS = 16, 1 << 20
"""Parts of all runs that the sample is of, evenly spaced, where all have more rows than that."""
MIN_SAMPLE = 200
"""Fewer rows of a hook have no tail."""
NO_WIDTHS = Widths(0, 0, ())


# the pass -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPass:
    """Sums one part of a table, or some of the lost positions.

    Args:
        cells: of the weights; ``None`` where nothing was lost: then classes alone are counted.
        scale: where the readouts lie, with readouts and losses.
    """

    lookup: Lookup
    definitions: tuple[CovariateDef, ...]
    cells: CellEdges | None
    hooks: tuple[str, ...] = ()
    widths: Widths = NO_WIDTHS
    scale: Scale | None = None

    @property
    def groups(self) -> list[str]:
        if self.cells is None:
            return []
        return [CONTENT, *(self.hooks if self.scale else ())]

    def sums(self, groups: Sequence[str] | None = None) -> Sums:
        groups = self.groups if groups is None else groups
        lookup, labels = self.lookup, self.lookup.labels.words if self.lookup.labels else ()
        n_blocks, n_cells = lookup.n_blocks, self.cells.n_cells if self.cells else 0
        n_values = self.widths.n_values if self.scale else 0
        moments = {
            group: Moments(
                len(self.definitions) if group == CONTENT else n_values,
                1 + (group != CONTENT),
                lookup.n_ticks,
                n_blocks,
                n_cells,
            )
            for group in groups
        }
        return Sums(
            moments,
            ClassCounts(labels),
            {
                d.name: np.zeros((2, n_blocks, d.bins.n))
                for d in self.definitions
                if d.bins and d.unit != "share" and CONTENT in groups
            },
            np.zeros((2, n_blocks, n_cells)),
            np.zeros((len(lookup.system), n_blocks, n_cells)),
            np.zeros((2, 1 + len(labels) + lookup.n_slots, n_blocks)),
            np.zeros((2, 2, len(self.hooks), n_values, n_blocks)),
        )

    def pieces(self, parts: Mapping[TableName, Sequence[TablePart]]) -> list[TablePart | range]:
        readouts = parts["readouts"] if self.cells and self.scale else ()
        return [*parts["tokens"], *lost_pieces(self.lookup), *readouts]

    def __call__(self, piece: TablePart | range) -> Sums:
        if isinstance(piece, TablePart) and piece.of == "readouts":
            return self._readouts(piece)
        sums = self.sums(self.groups[:1])
        lost = isinstance(piece, range)
        for rows in self._lost(piece) if isinstance(piece, range) else self._stored(piece):
            label = _add_classes(sums.classes, rows, lost=lost)
            if self.cells is not None and len(rows.step):
                _add_strata(sums, rows, label, int(lost))
                self._add(sums, rows, self.cells, int(lost))
        return sums.cut()

    def _stored(self, part: TablePart) -> Iterator[Rows]:
        for batch in part.batches(["request", "position", "token_id", "step"]):
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
        sums.cell_n[lost] += np.bincount(at, minlength=n_blocks * n_cells).reshape(n_blocks, -1)
        if not lost:
            _add_system(sums, rows, cell)
        values = [rows.values(covariate) for covariate in self.definitions]
        for x, covariate in zip(values, self.definitions, strict=True):
            if covariate.bins is not None and covariate.name in sums.bands:
                known, size, at_block = np.isfinite(x), covariate.bins.n, block
                if not known.all():
                    x, at_block = x[known], block[known]
                n = np.bincount(at_block * size + covariate.bins.of(x), minlength=n_blocks * size)
                sums.bands[covariate.name][lost] += n.reshape(n_blocks, -1)
        sums.moments[CONTENT].count(rows, values, np.full(len(at), bool(lost)), at)

    def _readouts(self, part: TablePart) -> Sums:
        """Return the sums of a part of ``readouts``.

        A number that is not finite counts for nothing, as does one that a run does not have.
        """
        assert self.cells is not None and self.scale is not None
        lookup, sums = self.lookup, self.sums(self.hooks)
        n_cells = sums.cell_n.shape[2]
        columns = ["request", "position", "token_id", "step", "hook", *self.widths.columns]
        for batch in part.batches(columns):
            rows, kept = Rows.read(lookup, batch)
            values = self.widths.read(batch)
            kept &= lookup.recomputed.count(rows.step, rows.request, rows.position)
            lost = np.zeros(len(kept), bool)
            at = np.flatnonzero(kept & lookup.lossy[rows.step])
            some = rows.take(at)
            lost[at] = lookup.losses.find(some.step, some.request, some.position) >= 0
            cell = self.cells.of(rows) + lookup.block[rows.step] * n_cells
            for number, hook in enumerate(self.hooks):
                of_hook = np.flatnonzero(kept & pc.equal(batch["hook"], hook).to_numpy(False))
                if len(of_hook):
                    values_of_hook = values[:, of_hook] - self.scale.middle[number][:, np.newaxis]
                    some = rows.take(of_hook)
                    sums.moments[hook].count(some, values_of_hook, lost[of_hook], cell[of_hook])
                    _add_tails(sums, number, some, values_of_hook, lost[of_hook], self.scale)
        return sums.cut()


def accumulate(
    total: Sums, row_pass: RowPass, parts: Mapping[TableName, Sequence[TablePart]], on: Executor
) -> None:
    for sums in on.map(row_pass, row_pass.pieces(parts)):
        total.add(sums)


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
            n = np.bincount(at, minlength=sums.strata[lost].size)
            sums.strata[lost] += n.reshape(sums.strata.shape[1:])


def _add_classes(counts: ClassCounts, rows: Rows, *, lost: bool) -> Ints | None:
    lookup = rows.lookup
    number = lookup.requests.numbers(rows.request)
    label = lookup.labels.of(number, rows.position) if lookup.labels else None
    counts.count(
        special=rows.special,
        prefill=rows.prefill,
        served=None if lost else lookup.servings.of(number, rows.position),
        label=label,
        band=position_band(rows.position),
        bits=lookup.vocabulary.bits[rows.token],
    )
    return label


def _add_system(sums: Sums, rows: Rows, cell: Ints) -> None:
    lookup, (n_blocks, n_cells) = rows.lookup, sums.cell_system.shape[1:]
    pairs, of_pair = places(rows.step * n_cells + cell)
    n, step = np.bincount(of_pair), pairs // n_cells
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


# where the readouts lie -----------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Where readouts lie, ``(n_hooks, n_values)`` each; NaN where there are too few.

    Args:
        middle: about which sums are taken: the median of the sample, and after the pass the mean
            of all.
        low: a hundredth of the rows lies below.
    """

    middle: Floats
    median: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class _SamplePass:
    hooks: tuple[str, ...]
    widths: Widths
    every: int

    def __call__(self, part: TablePart) -> list[npt.NDArray[np.float32]]:
        samples: list[list[npt.NDArray[np.float32]]] = [[] for _ in self.hooks]
        seen = [0] * len(self.hooks)
        for batch in part.batches(["hook", *self.widths.columns]):
            for number, hook in enumerate(self.hooks):
                at = np.flatnonzero(pc.equal(batch["hook"], hook).to_numpy(False))
                chosen = at[-seen[number] % self.every :: self.every]
                seen[number] += len(at)
                if len(chosen):
                    some = self.widths.read(batch.take(pa.array(chosen)))
                    samples[number].append(some.astype(np.float32))
        empty = np.zeros((self.widths.n_values, 0), np.float32)
        return [np.concatenate([empty, *of_hook], axis=1) for of_hook in samples]


def scale_of(
    parts: Sequence[TablePart], hooks: tuple[str, ...], widths: Widths, executor: Executor
) -> Scale:
    """Return the scale of the readouts in some parts, from an even sample of them.

    The sample knows nothing of the losses: it is of all computed rows.
    """
    some = [part for part in parts if part.n_rows]
    n_parts = len(some) if sum(part.n_rows for part in some) <= MAX_ROWS else MAX_PARTS
    at = np.unique(np.linspace(0, len(some) - 1, min(n_parts, len(some))).astype(int))
    chosen = [some[k] for k in at.tolist()]
    n_rows = sum(part.n_rows for part in chosen) // max(1, len(hooks))
    sample = _SamplePass(hooks, widths, max(1, n_rows // SAMPLE))
    drawn = list(executor.map(sample, chosen))
    shape = len(hooks), widths.n_values
    median, low, high = (np.full(shape, np.nan) for _ in range(3))
    for number in range(len(hooks)):
        values = [of_part[number] for of_part in drawn]
        for k, row in enumerate(np.concatenate(values, axis=1) if values else ()):
            x = np.sort(row[~np.isnan(row)].astype(np.float64))
            if len(x):
                median[number, k] = np.median(x)
            if len(x) >= MIN_SAMPLE and x[0] < x[-1]:
                low[number, k], high[number, k] = np.quantile(x, [TAIL, 1 - TAIL])
    # Not the mean: fourth powers about one that a few outliers moved would lose all digits.
    return Scale(np.nan_to_num(median), median, low, high)
