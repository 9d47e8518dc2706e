"""Dominance: whether one row that was served often makes up what multiplicity weights see.

A prefix is stored once and served a thousand times, and its first token is an attention sink whose
norm is many times that of the others: weighted as often as it was served, it alone may be all that
a variance is made of. One pass over the readouts of stored rows, where the prefix cache served any.
Imports the lookup, `scale`, `sources` and the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds.format.positions import Keys, pair_key, split_key
from actds_validators.audit.executor import Engine
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.result import Dominant
from actds_validators.audit.scale import Widths, scale_of
from actds_validators.audit.sources import Part, RunSource
from actds_validators.audit.words import column

__all__ = ["SINK", "dominant_cell"]

SINK = 10.0
"""Times the median norm above which a row is a sink: what the loader calls ``sink``."""
MAX_CELLS = 1 << 16
"""Cells of a hook that are told apart, those of the largest squares; the others are dropped."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class _Cells:
    """Sums by token id and position; the columns are rows, w, w x and w x².

    Args:
        keys: ``pair_key`` of token id and position, rising.
        sums: ``(n_cells, 4)``.
        special: whether the token is special.
        whole: the same four over every stored row.
    """

    keys: Keys
    sums: Floats
    special: npt.NDArray[np.bool_]
    whole: Floats

    def add(self, other: _Cells) -> None:
        """Add the sums of other rows."""
        both = np.concatenate([self.keys, other.keys])
        self.keys, first, at = np.unique(both, return_index=True, return_inverse=True)
        sums = np.zeros((len(self.keys), 4))
        np.add.at(sums, at.reshape(-1), np.concatenate([self.sums, other.sums]))
        self.sums, self.whole = sums, self.whole + other.whole
        self.special = np.concatenate([self.special, other.special])[first]
        if len(self.keys) > MAX_CELLS:
            largest = np.sort(np.argsort(-self.sums[:, 3], kind="stable")[:MAX_CELLS])
            self.keys, self.sums = self.keys[largest], self.sums[largest]
            self.special = self.special[largest]


def _no_cells() -> _Cells:
    return _Cells(np.zeros(0, np.uint64), np.zeros((0, 4)), np.zeros(0, bool), np.zeros(4))


@dataclass(frozen=True)
class _DominancePass:
    """Sums the norms of stored rows by token id and position, of those that may stand out.

    Cells are kept of rows that a loader can leave out by name: first positions, special tokens, and
    sinks.
    """

    lookup: Lookup
    hooks: tuple[str, ...]
    median: Floats

    def __call__(self, part: Part) -> list[_Cells]:
        lookup, found = self.lookup, [_no_cells() for _ in self.hooks]
        for batch in part.batches(["request", "position", "token_id", "step", "hook", "norm"]):
            step = lookup.steps.of(column(batch, "step"))
            request = lookup.requests.of(column(batch, "request"))
            position, token = column(batch, "position"), column(batch, "token_id")
            norm = batch["norm"].to_numpy(zero_copy_only=False).astype(np.float64)
            kept = (step >= 0) & (request >= 0) & np.isfinite(norm)
            kept &= lookup.excluded.find(step, request, position) < 0
            kept[kept] &= lookup.losses.find(step[kept], request[kept], position[kept]) < 0
            for number, hook in enumerate(self.hooks):
                mine = np.flatnonzero(kept & pc.equal(batch["hook"], hook).to_numpy(False))
                x, at, id_ = norm[mine], position[mine], token[mine]
                served = lookup.servings.of(lookup.requests.numbers(request[mine]), at)
                w = 1.0 + served
                special = lookup.vocabulary.special(lookup.vocabulary.places(id_))
                some = np.flatnonzero((at == 0) | special | (x > SINK * self.median[number]))
                four = np.stack([np.ones(len(x)), w, w * x, w * x * x], axis=1)
                keys, first, of = np.unique(
                    pair_key(id_[some], at[some]), return_index=True, return_inverse=True
                )
                sums = np.zeros((len(keys), 4))
                np.add.at(sums, of.reshape(-1), four[some])
                found[number].add(_Cells(keys, sums, special[some][first], four.sum(axis=0)))
        return found


def dominant_cell(
    runs: Sequence[tuple[RunSource, Lookup]], hooks: tuple[str, ...], engine: Engine
) -> Dominant | None:
    """Return the token id and position that hold most of the squared deviation of the norm.

    Each stored row counts as often as it was served, about the mean that this gives. None where
    nothing was served again, or no readout says how large a row is.

    Args:
        runs: with the lookup of each.
        hooks: with readouts.
        engine: where the parts are read.
    """
    reused = any(len(lookup.servings) for _, lookup in runs)
    if not hooks or not reused:
        return None
    parts = [part for source, _ in runs for part in source.parts["readouts"]]
    median = scale_of(parts, hooks, Widths(0, 0), engine).median[:, 0]
    total = [_no_cells() for _ in hooks]
    for source, lookup in runs:
        one = _DominancePass(lookup, hooks, median)
        for cells in engine.map(one, source.parts["readouts"]):
            for mine, more in zip(total, cells, strict=True):
                mine.add(more)
    found = [
        cell
        for hook, cells, middle in zip(hooks, total, median.tolist(), strict=True)
        if (cell := _largest(hook, cells, middle)) is not None
    ]
    return max(found, key=lambda cell: cell.share, default=None)


def _largest(hook: str, cells: _Cells, median: float) -> Dominant | None:
    _, w, wx, wxx = cells.whole
    if w <= 0 or not len(cells.keys):
        return None
    mean = wx / w
    whole = wxx - w * mean**2
    if whole <= 1e-10 * wxx:
        return None
    n, of_w, of_x, of_xx = cells.sums.T
    share = np.clip((of_xx - 2 * mean * of_x + mean**2 * of_w) / whole, 0.0, 1.0)
    k = int(np.argmax(share))
    token_id, position = (int(number) for number in split_key(cells.keys[k]))
    names = ["first_position"] if position == 0 else ["special"] * bool(cells.special[k])
    if of_x[k] / of_w[k] > SINK * median:
        names.append("sink")
    return Dominant(
        hook=hook,
        token_id=token_id,
        position=position,
        n_rows=int(n[k]),
        n_served=int(of_w[k]),
        share=float(share[k]),
        exclude=names,
    )
