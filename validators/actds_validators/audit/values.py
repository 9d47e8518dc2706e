"""Values: one pass over the readouts of a run, down to sums per tick, block and cell.

Beside the tokens' pass, and of the same form: norm, projections and probes of every computed row
and their squares about the middle, over all and over the lost ones; for the weights, over the
stored ones by cell; and how many lie in the tails. Imports the tokens' cells, `lookup`, `scale`,
`sources` and the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds_validators.audit.cell_sums import CellSums, cell_sums, joined
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.result import Covariate
from actds_validators.audit.scale import Scale, Widths, read_values
from actds_validators.audit.sources import Part
from actds_validators.audit.tokens import CellEdges
from actds_validators.audit.words import column

__all__ = ["ValuePass", "ValueSums", "value_covariates"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TICKED = ("n", "x", "xx")
BLOCKED = ("n_lost", "lost_x", "lost_xx", "x3", "x4", "cell_n", "cell_x", "cell_xx", "tails")


def value_covariates(hook: str, widths: Widths) -> list[Covariate]:
    """Return the covariates of a hook's readouts: each number, then the square of each."""
    return [
        Covariate(name=f"{hook} {word}{name}", label=f"{label}{word} at {hook}", unit=unit,
                  group="values")
        for name, label, unit in (
            ("", "", "activation units"),
            (" squared", "squared deviation of ", "activation units, squared"),
        )
        for word in widths.words
    ]  # fmt: skip


class ValueSums:
    """Sums over readouts, by hook and value, about the middle of the scale until `centred`.

    Per tick stands only what is moved along the run: all that intervals need is per block.

    Args:
        n_hooks: hooks.
        n_values: of a readout.
        n_ticks: length of the series.
        n_blocks: blocks of the jackknife.
        n_cells: of load and complexity.
    """

    def __init__(
        self, n_hooks: int, n_values: int, n_ticks: int, n_blocks: int, n_cells: int
    ) -> None:
        self.low, self.high = n_ticks, 0
        shape = n_hooks, n_values
        self.n, self.x, self.xx = (np.zeros((*shape, n_ticks)) for _ in range(3))
        self.n_lost, self.lost_x, self.lost_xx, self.x3, self.x4 = (
            np.zeros((*shape, n_blocks)) for _ in range(5)
        )
        self.cell_n, self.cell_x, self.cell_xx = (
            np.zeros((*shape, n_blocks, n_cells)) for _ in range(3)
        )
        self.tails = np.zeros((2, 2, *shape, n_blocks))  # stored or lost, below or above
        self.within: list[list[CellSums]] = [[] for _ in range(n_hooks)]

    def cut(self) -> ValueSums:
        """Return the same without the ticks that nothing fell into: `add` knows where they are."""
        self.low = min(self.low, self.high)
        for name in TICKED:
            setattr(self, name, getattr(self, name)[..., self.low : self.high].copy())
        self.within = [[joined(parts)] if parts else [] for parts in self.within]
        return self

    def add(self, other: ValueSums) -> None:
        """Add what `cut` returned."""
        for name in TICKED:
            getattr(self, name)[..., other.low : other.high] += getattr(other, name)
        for name in BLOCKED:
            getattr(self, name)[...] += getattr(other, name)
        for mine, parts in zip(self.within, other.within, strict=True):
            mine += parts

    def centred(self, block: Ints) -> Floats:
        """Put the sums about the mean of all readouts, and return how far that was.

        The powers of x - d follow from those of x: the middle need not be known before the pass.

        Args:
            block: of each tick.
        """
        total = self.n.sum(axis=2)
        found = np.zeros_like(total)
        np.divide(self.x.sum(axis=2), total, out=found, where=total > 0)
        d = found[..., np.newaxis]
        n, x, xx = (
            np.apply_along_axis(_by_block, 2, held, block, self.x4.shape[2])
            for held in (self.n, self.x, self.xx)
        )
        self.x4 += -4 * d * self.x3 + 6 * d**2 * xx - 4 * d**3 * x + d**4 * n
        self.x3 += -3 * d * xx + 3 * d**2 * x - d**3 * n
        for square, one, count in (
            (self.xx, self.x, self.n),
            (self.lost_xx, self.lost_x, self.n_lost),
            (self.cell_xx, self.cell_x, self.cell_n),
        ):
            away = d if one.ndim == 3 else d[..., np.newaxis]
            for at in np.ndindex(*found.shape):  # in place: these are the largest arrays
                square[at] += -2 * away[at] * one[at] + away[at] ** 2 * count[at]
                one[at] -= away[at] * count[at]
        return np.asarray(found, np.float64)

    def take_within(self, hook: int) -> list[CellSums]:
        """Return the sums of a hook by step and request, and forget them."""
        parts, self.within[hook] = self.within[hook], []
        return parts


@dataclass(frozen=True)
class ValuePass:
    """Sums one part of the table ``readouts``.

    A number that is not finite counts for nothing, as does one that a run does not have.

    Args:
        lookup: of the run.
        hooks: names of the hooks, in order.
        widths: of a readout.
        scale: where the readouts lie.
        cells: of the weights.
    """

    lookup: Lookup
    hooks: tuple[str, ...]
    widths: Widths
    scale: Scale
    cells: CellEdges

    def sums(self) -> ValueSums:
        """Return sums of nothing."""
        return ValueSums(
            len(self.hooks),
            self.widths.n_values,
            self.lookup.n_ticks,
            self.lookup.n_blocks,
            self.cells.n_cells,
        )

    def __call__(self, part: Part) -> ValueSums:
        """Return the sums of a part."""
        sums = self.sums()
        columns = ["request", "position", "token_id", "step", "hook", *self.widths.columns]
        for batch in part.batches(columns):
            lookup = self.lookup
            step = lookup.steps.of(column(batch, "step"))
            request = lookup.requests.of(column(batch, "request"))
            position = column(batch, "position")
            values = read_values(batch, self.widths)
            kept = (step >= 0) & (request >= 0)
            kept &= lookup.excluded.find(step, request, position) < 0
            lost = np.zeros(len(step), bool)
            at = np.flatnonzero(kept & lookup.lossy[step])
            lost[at] = lookup.losses.find(step[at], request[at], position[at]) >= 0
            token = lookup.vocabulary.places(column(batch, "token_id"))
            cell = self.cells.of(lookup, step, position, token)
            for number, hook in enumerate(self.hooks):
                mine = np.flatnonzero(kept & pc.equal(batch["hook"], hook).to_numpy(False))
                if len(mine):
                    some = _Rows(
                        step[mine], request[mine], cell[mine],
                        values[:, mine] - self.scale.middle[number][:, np.newaxis], lost[mine],
                    )  # fmt: skip
                    _add(sums, lookup, number, some)
                    _add_cells(sums, lookup, number, some)
                    _add_tails(sums, lookup, number, some, self.scale)
        return sums.cut()


@dataclass(frozen=True)
class _Rows:
    """Readouts of one hook about the middle; steps and requests are places in the lookup."""

    step: Ints
    request: Ints
    cell: Ints
    values: Floats
    lost: npt.NDArray[np.bool_]


def _add(sums: ValueSums, lookup: Lookup, hook: int, rows: _Rows) -> None:
    step, values, lost = rows.step, rows.values, rows.lost
    tick, block = lookup.tick[step], lookup.block[step]
    low = int(tick.min())
    tick = tick - low
    n, n_blocks = np.bincount(tick), lookup.n_blocks
    here = slice(low, low + len(n))
    sums.low, sums.high = min(sums.low, here.start), max(sums.high, here.stop)
    for k, x in enumerate(values):
        at, of_block, gone, n_known = tick, block, lost, n
        known = np.isfinite(x)
        if not known.all():
            x, at, of_block, gone = x[known], tick[known], block[known], lost[known]
            n_known = np.bincount(at, minlength=len(n))
        xx = x * x
        sums.n[hook, k, here] += n_known
        sums.x[hook, k, here] += np.bincount(at, weights=x, minlength=len(n))
        sums.xx[hook, k, here] += np.bincount(at, weights=xx, minlength=len(n))
        sums.x3[hook, k] += np.bincount(of_block, weights=xx * x, minlength=n_blocks)
        sums.x4[hook, k] += np.bincount(of_block, weights=xx * xx, minlength=n_blocks)
        if gone.any():
            which = of_block[gone]
            sums.n_lost[hook, k] += np.bincount(which, minlength=n_blocks)
            sums.lost_x[hook, k] += np.bincount(which, weights=x[gone], minlength=n_blocks)
            sums.lost_xx[hook, k] += np.bincount(which, weights=xx[gone], minlength=n_blocks)
    inside = np.flatnonzero(lookup.within[step])
    if len(inside):
        some = values[:, inside]
        sums.within[hook].append(
            cell_sums(
                step[inside], rows.request[inside], [*some, *(x * x for x in some)], lost[inside]
            )
        )


def _add_cells(sums: ValueSums, lookup: Lookup, hook: int, rows: _Rows) -> None:
    """Add the stored rows by block and cell."""
    shape = sums.cell_n.shape[2:]
    size = shape[0] * shape[1]
    at = lookup.block[rows.step] * shape[1] + rows.cell
    stored = ~rows.lost
    if not stored.all():
        at = at[stored]
    n = np.bincount(at, minlength=size).reshape(shape)
    for k, values in enumerate(rows.values):
        x = values if stored.all() else values[stored]
        known = np.isfinite(x)
        here, n_known = at, n
        if not known.all():
            x, here = x[known], at[known]
            n_known = np.bincount(here, minlength=size).reshape(shape)
        sums.cell_n[hook, k] += n_known
        sums.cell_x[hook, k] += np.bincount(here, weights=x, minlength=size).reshape(shape)
        sums.cell_xx[hook, k] += np.bincount(here, weights=x * x, minlength=size).reshape(shape)


def _add_tails(sums: ValueSums, lookup: Lookup, hook: int, rows: _Rows, scale: Scale) -> None:
    """Add what lies in the tails, by the block in which the request began."""
    block = lookup.request_block[rows.request]
    for k, x in enumerate(rows.values):
        middle = scale.middle[hook, k]
        for side, tail in enumerate((x < scale.low[hook, k] - middle,
                                     x > scale.high[hook, k] - middle)):  # fmt: skip
            at = np.flatnonzero(tail)
            if len(at):
                gone = rows.lost[at]
                for lost, some in enumerate((at[~gone], at[gone])):
                    n = np.bincount(block[some], minlength=lookup.n_blocks)
                    sums.tails[lost, side, hook, k] += n


def _by_block(row: Floats, block: Ints, n_blocks: int) -> Floats:
    return np.bincount(block, weights=row, minlength=n_blocks).astype(np.float64)
