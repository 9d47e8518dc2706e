"""Weights: what would make the stored rows stand for all that were computed.

The remedy of the audit: inverse-probability weights by cells of load and complexity, shrunk to the
common loss rate. They mend what goes with load and complexity, and nothing else. Imports the sums
of the tokens' pass, the statistics and the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actds_validators.audits.result import WeightCell, Weighting
from actds_validators.audits.series import Series
from actds_validators.audits.tokens import CellEdges, TokenSums
from actds_validators.statistics.runs import Floats
from actds_validators.statistics.weighting import (
    effective_rows,
    inverse_probability,
    shrunken_rates,
)

__all__ = [
    "Cells",
    "cell_edges",
    "counted_cells",
    "weigh",
    "weighted_totals",
    "weighting",
]

N_LOADS = 10
RARITY_EDGES = (4.0, 6.0, 8.0, 10.0, 12.0)
POSITION_EDGES = (16.0, 64.0, 256.0, 1024.0)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cells:
    """The cells: load by complexity.

    Args:
        edges: of load and complexity.
        load_max: largest load.
        n: computed tokens ``(n_loads, n_complexities)``.
        lost: lost ones.
        rates: share lost, shrunk; ``None`` before `weigh`.
        weights: of a stored row; ``None`` before `weigh` or when nothing is stored.
    """

    edges: CellEdges
    load_max: float
    n: Floats
    lost: Floats
    rates: Floats | None = None
    weights: Floats | None = None


def cell_edges(series: Series, *, has_ids: bool) -> CellEdges:
    """Return the edges of a series' cells: deciles of the load over tokens."""
    order = np.argsort(series.load, kind="stable")
    reached = np.cumsum(series.computed[order]) / series.computed.sum()
    at = np.searchsorted(reached, np.arange(1, N_LOADS) / N_LOADS)
    load = tuple(float(e) for e in np.unique(series.load[order][at].astype(np.float32)))
    name, inner = ("rarity", RARITY_EDGES) if has_ids else ("position", POSITION_EDGES)
    return CellEdges(load, name, inner)


def counted_cells(edges: CellEdges, series: Series, sums: TokenSums) -> Cells:
    """Return the cells with their computed and lost tokens."""
    stored, lost = (sums.cell_n[k].sum(axis=0).reshape(edges.shape) for k in (0, 1))
    return Cells(edges, float(series.load.max()), stored + lost, lost)


def weigh(cells: Cells, event_tokens: float) -> Cells:
    """Return the cells with their weights.

    Args:
        cells: counted.
        event_tokens: tokens of an independent loss event: so many tokens count as one draw when
            the rates are shrunk.
    """
    unit = max(1.0, event_tokens)
    n, lost = cells.n / unit, cells.lost / unit
    return replace(cells, rates=shrunken_rates(n, lost), weights=inverse_probability(n, lost))


def weighted_totals(sums: TokenSums, cells: Cells) -> dict[str, Floats]:
    """Return sums of w and w x of the stored rows over blocks, ``(2, n_blocks)`` a covariate."""
    assert cells.weights is not None
    weights = cells.weights.reshape(-1)
    known = {"rarity": sums.cell_known}
    return {
        name: np.stack([known.get(name, sums.cell_n[0]) @ weights, sums.cell_x[k] @ weights])
        for k, name in enumerate(sums.names)
    }


def weighting(cells: Cells) -> Weighting | None:
    """Return the section, ``None`` without weights."""
    if cells.weights is None or cells.rates is None:
        return None
    stored = cells.n - cells.lost
    lows, highs = (0.0, *cells.edges.load), (*cells.edges.load, cells.load_max)
    listed = [
        WeightCell(
            load_low=lows[i],
            load_high=highs[i],
            label=_label(cells, j),
            n=int(cells.n[i, j]),
            n_lost=int(cells.lost[i, j]),
            rate=float(cells.rates[i, j]),
            weight=float(cells.weights[i, j]),
        )
        for i in range(cells.n.shape[0])
        for j in range(cells.n.shape[1])
        if cells.n[i, j]
    ]
    empty = int(((stored == 0) & (cells.n > 0)).sum())
    claim = "MAR-consistent after weighting: true if losses go with load and complexity alone"
    if empty:
        claim = f"{empty} cells lost every row: no weight can stand for them"
    return Weighting(
        n_cells=len(listed),
        n_rows=int(stored.sum()),
        effective_rows=effective_rows(cells.weights.reshape(-1), stored.reshape(-1)),
        largest=float(cells.weights.max()),
        complexity=cells.edges.complexity,
        cells=listed,
        claim=claim,
    )


def _label(cells: Cells, j: int) -> str:
    name, edges = cells.edges.complexity, cells.edges.edges
    unit = "bits" if name == "rarity" else "tokens"
    low = edges[j - 1] if j else 0
    if j == len(edges):
        return f"{name} from {low:g} {unit}"
    return f"{name} {low:g} to {edges[j]:g} {unit}"
