"""Scale: where the readouts of each hook lie, from a sample: a middle, and where the tails begin.

Before the readouts' pass, which counts what lies in the tails and sums squares about the middle.
The sample knows nothing of the losses: it is of all computed rows. Imports `sources` and the
lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds_validators.audit.executor import Engine
from actds_validators.audit.sources import Part

__all__ = ["MAX_PROBES", "TAIL", "Scale", "Widths", "read_values", "scale_of"]

TAIL = 0.01
"""Share of the rows in a tail."""
MAX_PROBES = 16
"""User's probes of a hook that are tested, the first ones."""
SAMPLE = 1 << 16
"""Rows of a hook in the sample, about, at most."""
MAX_PARTS, MAX_ROWS = 16, 1 << 20
"""Parts of all runs that the sample is of, evenly spaced, where all have more rows than that."""
MIN_SAMPLE = 200
"""Fewer rows of a hook have no tail."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Widths:
    """Numbers of a readout that are looked at.

    Args:
        n_projections: of a readout.
        n_probes: user's probes, `MAX_PROBES` at most.
    """

    n_projections: int
    n_probes: int

    @property
    def n_values(self) -> int:
        """Return how many numbers that are: the norm too."""
        return 1 + self.n_projections + self.n_probes

    @property
    def columns(self) -> list[str]:
        """Return the columns that hold them."""
        lists = ["projections"] * (self.n_projections > 0) + ["probes"] * (self.n_probes > 0)
        return ["norm", *lists]

    @property
    def words(self) -> list[str]:
        """Return their names."""
        projections = [f"projection {k}" for k in range(self.n_projections)]
        return ["norm", *projections, *(f"probe {k}" for k in range(self.n_probes))]


@dataclass(frozen=True)
class Scale:
    """Where readouts lie, ``(n_hooks, n_values)`` each; NaN where there are too few.

    Args:
        middle: about which sums are taken: the median of the sample, and after the pass the mean
            of all.
        median: of the sample.
        low: a hundredth of the rows lies below.
        high: and above.
    """

    middle: Floats
    median: Floats
    low: Floats
    high: Floats


def read_values(batch: pa.RecordBatch, widths: Widths) -> Floats:
    """Return the numbers of readouts ``(n_values, n_rows)``; NaN where there is none."""
    found = np.full((widths.n_values, batch.num_rows), np.nan)
    found[0] = batch["norm"].to_numpy(zero_copy_only=False)
    first = 1
    for name, width in (("projections", widths.n_projections), ("probes", widths.n_probes)):
        if not width:
            continue
        lists = batch[name]
        flat = lists.values.to_numpy(zero_copy_only=False)
        ends = lists.offsets.to_numpy()
        for k in range(width):
            at = ends[:-1] + k
            there = np.flatnonzero(at < ends[1:])
            found[first + k, there] = flat[at[there]]
        first += width
    found[~np.isfinite(found)] = np.nan
    return found


@dataclass(frozen=True)
class _SamplePass:
    """Takes every n-th readout of a part, for each hook."""

    hooks: tuple[str, ...]
    widths: Widths
    every: int

    def __call__(self, part: Part) -> list[npt.NDArray[np.float32]]:
        found: list[list[npt.NDArray[np.float32]]] = [[] for _ in self.hooks]
        seen = [0] * len(self.hooks)
        for batch in part.batches(["hook", *self.widths.columns]):
            for number, hook in enumerate(self.hooks):
                mine = np.flatnonzero(pc.equal(batch["hook"], hook).to_numpy(False))
                chosen = mine[-seen[number] % self.every :: self.every]
                seen[number] += len(mine)
                if len(chosen):
                    some = read_values(batch.take(pa.array(chosen)), self.widths)
                    found[number].append(some.astype(np.float32))
        empty = np.zeros((self.widths.n_values, 0), np.float32)
        return [np.concatenate([empty, *of_hook], axis=1) for of_hook in found]


def scale_of(
    parts: Sequence[Part], hooks: tuple[str, ...], widths: Widths, engine: Engine
) -> Scale:
    """Return the scale of the readouts in some parts, from an even sample of them.

    Args:
        parts: of the table ``readouts``, of all runs.
        hooks: names of the hooks.
        widths: of a readout.
        engine: where the parts are read.
    """
    some = [part for part in parts if part.n_rows]
    n_parts = len(some) if sum(part.n_rows for part in some) <= MAX_ROWS else MAX_PARTS
    at = np.unique(np.linspace(0, len(some) - 1, min(n_parts, len(some))).astype(int))
    chosen = [some[k] for k in at.tolist()]
    n_rows = sum(part.n_rows for part in chosen) // max(1, len(hooks))
    sample = _SamplePass(hooks, widths, max(1, n_rows // SAMPLE))
    drawn = list(engine.map(sample, chosen))
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
