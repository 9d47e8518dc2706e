"""Values: one pass over the readouts of a run, down to sums per tick and cell.

Beside the tokens' pass, and of the same form: norm and projections of every computed row, over all
and over the lost ones; for the weights, over the stored ones by cell. Imports the tokens' cells,
`lookup`, `sources` and the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds_validators.audits.cell_sums import CellSums, cell_sums, joined, no_cells
from actds_validators.audits.lookup import Lookup
from actds_validators.audits.result import Covariate
from actds_validators.audits.sources import Part
from actds_validators.audits.tokens import CellEdges
from actds_validators.audits.words import column

__all__ = ["ValuePass", "ValueSums", "value_covariates"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def value_covariates(hook: str, n_projections: int) -> list[Covariate]:
    """Return the covariates of a hook's readouts: the norm and the projections."""
    words = ["norm", *(f"projection {k}" for k in range(n_projections))]
    return [
        Covariate(
            name=f"{hook} {word}",
            label=f"{word} at {hook}",
            unit="activation units",
            group="values",
        )
        for word in words
    ]


class ValueSums:
    """Sums over readouts, by hook and value.

    Args:
        n_hooks: hooks.
        n_values: of a readout: the norm and the projections.
        n_ticks: length of the series.
        n_blocks: blocks of the jackknife.
        n_cells: of load and complexity.
    """

    def __init__(
        self, n_hooks: int, n_values: int, n_ticks: int, n_blocks: int, n_cells: int
    ) -> None:
        self.low, self.high = n_ticks, 0
        shape = n_hooks, n_values, n_ticks
        self.n, self.n_lost = np.zeros(shape), np.zeros(shape)
        self.x, self.xx, self.lost_x = (np.zeros(shape) for _ in range(3))
        self.cell_n, self.cell_x = (
            np.zeros((n_hooks, n_values, n_blocks, n_cells)) for _ in range(2)
        )
        self.within: list[list[CellSums]] = [[] for _ in range(n_hooks)]

    def cut(self) -> ValueSums:
        """Return the same without the ticks that nothing fell into: `add` knows where they are."""
        self.low = min(self.low, self.high)
        for name in ("n", "n_lost", "x", "xx", "lost_x"):
            setattr(self, name, getattr(self, name)[..., self.low : self.high].copy())
        self.within = [[joined(parts)] if parts else [] for parts in self.within]
        return self

    def add(self, other: ValueSums) -> None:
        """Add what `cut` returned."""
        for name in ("n", "n_lost", "x", "xx", "lost_x"):
            getattr(self, name)[..., other.low : other.high] += getattr(other, name)
        self.cell_n += other.cell_n
        self.cell_x += other.cell_x
        for mine, parts in zip(self.within, other.within, strict=True):
            mine += parts

    def take_within(self, hook: int) -> CellSums:
        """Return the sums of a hook by step and request, and forget them."""
        parts, self.within[hook] = self.within[hook], []
        return joined(parts) if parts else no_cells(self.x.shape[1])


@dataclass(frozen=True)
class ValuePass:
    """Sums one part of the table ``readouts``.

    A number that is not finite counts for nothing, as does one that a run does not have.

    Args:
        lookup: of the run.
        hooks: names of the hooks, in order.
        n_projections: of a readout.
        cells: of the weights.
    """

    lookup: Lookup
    hooks: tuple[str, ...]
    n_projections: int
    cells: CellEdges

    def sums(self) -> ValueSums:
        """Return sums of nothing."""
        return ValueSums(
            len(self.hooks),
            1 + self.n_projections,
            self.lookup.n_ticks,
            self.lookup.n_blocks,
            self.cells.n_cells,
        )

    def __call__(self, part: Part) -> ValueSums:
        """Return the sums of a part."""
        sums = self.sums()
        columns = ["request", "position", "token_id", "step", "hook", "norm", "projections"]
        for batch in part.batches(columns):
            lookup = self.lookup
            step = lookup.steps.of(column(batch, "step"))
            request = lookup.requests.of(column(batch, "request"))
            position = column(batch, "position")
            values = _values(batch, self.n_projections)
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
                    some = _Rows(step[mine], request[mine], cell[mine], values[:, mine], lost[mine])
                    _add(sums, lookup, number, some)
                    _add_cells(sums, lookup, number, some)
        return sums.cut()


@dataclass(frozen=True)
class _Rows:
    """Readouts of one hook; steps and requests are places in the lookup."""

    step: Ints
    request: Ints
    cell: Ints
    values: Floats
    lost: npt.NDArray[np.bool_]


def _add(sums: ValueSums, lookup: Lookup, hook: int, rows: _Rows) -> None:
    step, values, lost = rows.step, rows.values, rows.lost
    tick = lookup.tick[step]
    low = int(tick.min())
    tick = tick - low
    n = np.bincount(tick)
    here = slice(low, low + len(n))
    sums.low, sums.high = min(sums.low, here.start), max(sums.high, here.stop)
    for k, x in enumerate(values):
        at, gone, n_known = tick, lost, n
        known = np.isfinite(x)
        if not known.all():
            x, at, gone = x[known], tick[known], lost[known]
            n_known = np.bincount(at, minlength=len(n))
        sums.n[hook, k, here] += n_known
        sums.x[hook, k, here] += np.bincount(at, weights=x, minlength=len(n))
        sums.xx[hook, k, here] += np.bincount(at, weights=x * x, minlength=len(n))
        if gone.any():
            sums.n_lost[hook, k, here] += np.bincount(at[gone], minlength=len(n))
            sums.lost_x[hook, k, here] += np.bincount(at[gone], weights=x[gone], minlength=len(n))
    inside = np.flatnonzero(lookup.within[step])
    if len(inside):
        sums.within[hook].append(
            cell_sums(step[inside], rows.request[inside], list(values[:, inside]), lost[inside])
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


def _values(batch: pa.RecordBatch, n_projections: int) -> Floats:
    """Return norm and projections ``(1 + n_projections, n_rows)``; NaN where there is none."""
    found = np.full((1 + n_projections, batch.num_rows), np.nan)
    found[0] = batch["norm"].to_numpy(zero_copy_only=False)
    lists = batch["projections"]
    flat = lists.values.to_numpy(zero_copy_only=False)
    ends = lists.offsets.to_numpy()
    for k in range(n_projections):
        at = ends[:-1] + k
        there = np.flatnonzero(at < ends[1:])
        found[1 + k, there] = flat[at[there]]
    found[~np.isfinite(found)] = np.nan
    return found
