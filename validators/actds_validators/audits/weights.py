"""Weights: what would make the stored rows stand for all that were computed.

The remedy of the audit: inverse-probability weights by cells of load and complexity; the rates of
the cells are shrunk to those of their load, and these to the common one. They mend what goes with
load and complexity, and nothing else. Imports the passes' sums, the statistics and the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from actds_validators.audits.result import (
    Balance,
    Covariate,
    Difference,
    Group,
    WeightCell,
    Weighting,
)
from actds_validators.audits.series import SYSTEM, Series
from actds_validators.audits.tokens import CellEdges, TokenSums
from actds_validators.audits.values import ValueSums
from actds_validators.statistics.runs import Floats
from actds_validators.statistics.weighting import (
    effective_rows,
    inverse_probability,
    nested_rates,
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


def weigh(cells: Cells) -> Cells:
    """Return the counted cells with their rates and weights."""
    rates = nested_rates(cells.n, cells.lost)
    return replace(cells, rates=rates, weights=inverse_probability(cells.n, cells.lost, rates))


def weighted_totals(
    weights: Floats,
    tokens: TokenSums,
    values: ValueSums | None,
    covariates: Sequence[Sequence[Covariate]],
) -> dict[str, Floats]:
    """Return sums of w and w x of the stored rows over blocks, ``(2, n_blocks)`` a covariate.

    Args:
        weights: of the cells, any shape.
        tokens: sums of the tokens' pass.
        values: of the readouts, if there are any.
        covariates: of each hook of the readouts.
    """
    w = weights.reshape(-1)
    n = tokens.cell_n[0] @ w
    known = {"rarity": tokens.cell_known @ w}
    found = {name: np.stack([n, tokens.cell_system[k] @ w]) for k, name in enumerate(SYSTEM)}
    for k, name in enumerate(tokens.names):
        found[name] = np.stack([known.get(name, n), tokens.cell_x[k] @ w])
    if values is not None:
        for hook, of_hook in enumerate(covariates):
            for k, one in enumerate(of_hook):
                sums = values.cell_n[hook, k], values.cell_x[hook, k]
                found[one.name] = np.stack([s @ w for s in sums])
    return found


def weighting(cells: Cells, differences: Sequence[Difference]) -> Weighting | None:
    """Return the section, ``None`` without weights.

    Args:
        cells: with their weights.
        differences: of the covariates, before and after weighting.
    """
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
    held = cells.weights[stored > 0]
    empty = int(((stored == 0) & (cells.n > 0)).sum())
    claim = "MAR-consistent after weighting: true if losses go with load and complexity alone"
    if empty:
        claim = f"{empty} cells lost every row: no weight can stand for them"
    elif np.ptp(held) < 1e-9:
        claim = "every weight is 1: no load and no complexity lost more than chance"
    return Weighting(
        n_cells=len(listed),
        n_rows=int(stored.sum()),
        effective_rows=effective_rows(cells.weights.reshape(-1), stored.reshape(-1)),
        largest=float(cells.weights.max()),
        complexity=cells.edges.complexity,
        cells=listed,
        balance=_balance(differences),
        claim=claim,
    )


def _balance(differences: Sequence[Difference]) -> list[Balance]:
    """Return the largest bias of each group of covariates, before and after weighting."""
    found = []
    for group in get_args(Group):
        pairs = [
            (abs(d.before_weighting.value), abs(d.after_weighting.value))
            for d in differences
            if d.covariate.group == group and d.before_weighting and d.after_weighting
        ]
        if pairs:
            before, after = (max(side) for side in zip(*pairs, strict=True))
            found.append(Balance(group=group, before=before, after=after))
    return found


def _label(cells: Cells, j: int) -> str:
    name, edges = cells.edges.complexity, cells.edges.edges
    unit = "bits" if name == "rarity" else "tokens"
    low = edges[j - 1] if j else 0
    if j == len(edges):
        return f"{name} from {low:g} {unit}"
    return f"{name} {low:g} to {edges[j]:g} {unit}"
