"""Weights: what would make the stored rows stand for all that were computed.

The remedy of the audit: inverse-probability weights by cells of load and complexity, shrunk to the
common loss rate. They mend what goes with load and complexity, and nothing else. Imports the
tokens' pass, the statistics and the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actds_validators.audits.result import WeightCell, Weighting
from actds_validators.audits.series import Series
from actds_validators.audits.sources import RunSource
from actds_validators.audits.tokens import MAY_BE_NULL, Tokens
from actds_validators.statistics.runs import Floats
from actds_validators.statistics.weighting import (
    effective_rows,
    inverse_probability,
    shrunken_rates,
)

__all__ = [
    "Cells",
    "cell_expression",
    "empty_cells",
    "fill_cells",
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
        load_edges: inner edges of the load, rising.
        load_max: largest load.
        complexity: ``rarity`` or, where lost tokens have no ids, ``position``.
        edges: inner edges of the complexity.
        n: computed tokens ``(n_loads, n_complexities)``.
        lost: lost ones.
        rates: share lost, shrunk; ``None`` before `weigh`.
        weights: of a stored row; ``None`` before `weigh` or when nothing is stored.
    """

    load_edges: tuple[float, ...]
    load_max: float
    complexity: str
    edges: tuple[float, ...]
    n: Floats
    lost: Floats
    rates: Floats | None = None
    weights: Floats | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the number of loads and of complexities."""
        return len(self.load_edges) + 1, len(self.edges) + 1


def empty_cells(series: Series, *, has_ids: bool) -> Cells:
    """Return the cells of a series, nothing counted: deciles of the load over tokens."""
    order = np.argsort(series.load, kind="stable")
    reached = np.cumsum(series.computed[order]) / series.computed.sum()
    at = np.searchsorted(reached, np.arange(1, N_LOADS) / N_LOADS)
    edges = tuple(float(e) for e in np.unique(series.load[order][at].astype(np.float32)))
    name, inner = ("rarity", RARITY_EDGES) if has_ids else ("position", POSITION_EDGES)
    shape = len(edges) + 1, len(inner) + 1
    return Cells(edges, float(series.load.max()), name, inner, np.zeros(shape), np.zeros(shape))


def cell_expression(cells: Cells) -> str:
    """Return the SQL of a token's cell, ``load * n_complexities + complexity``."""
    load, other = _bucket("load", cells.load_edges), _bucket(cells.complexity, cells.edges)
    return f"({load}) * {cells.shape[1]} + ({other})"


def fill_cells(cells: Cells, counts: dict[int, tuple[int, int]]) -> None:
    """Count computed and lost tokens into the cells, by the number of `cell_expression`."""
    for cell, (n, lost) in counts.items():
        cells.n.reshape(-1)[cell] += n
        cells.lost.reshape(-1)[cell] += lost


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


def weighted_totals(
    source: RunSource, tokens: Tokens, cells: Cells, n_blocks: int
) -> dict[str, Floats]:
    """Return sums of w and w x of the stored rows over blocks, ``(2, n_blocks)`` a covariate."""
    assert cells.weights is not None
    values = ", ".join(f"({k}, {w!r})" for k, w in enumerate(cells.weights.reshape(-1).tolist()))
    columns = ", ".join(
        f"coalesce(sum(w){_where(name, e)}, 0) as w_{k}, coalesce(sum(w * ({e})), 0) as wx_{k}"
        for k, (name, (_, e)) in enumerate(tokens.covariates.items())
    )
    found = source.columns(
        f"select block, {columns} from (select *, {cell_expression(cells)} as cell from stored) s "
        f"join (values {values}) weighed(cell, w) using (cell) group by block"
    )
    block = found["block"].astype(int)
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros((2, n_blocks)))
    for k, (covariate, _) in enumerate(tokens.covariates.values()):
        sums[covariate.name][0, block] += found[f"w_{k}"]
        sums[covariate.name][1, block] += found[f"wx_{k}"]
    return dict(sums)


def weighting(cells: Cells) -> Weighting | None:
    """Return the section, ``None`` without weights."""
    if cells.weights is None or cells.rates is None:
        return None
    stored = cells.n - cells.lost
    lows, highs = (0.0, *cells.load_edges), (*cells.load_edges, cells.load_max)
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
        for i in range(cells.shape[0])
        for j in range(cells.shape[1])
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
        complexity=cells.complexity,
        cells=listed,
        claim=claim,
    )


def _where(name: str, expression: str) -> str:
    return f" filter (({expression}) is not null)" if name == MAY_BE_NULL else ""


def _bucket(name: str, edges: tuple[float, ...]) -> str:
    """Return SQL that counts the edges at or below a value; null counts none."""
    return " + ".join(["0", *(f"(coalesce({name}, 0) >= {edge!r})::int" for edge in edges)])


def _label(cells: Cells, j: int) -> str:
    unit = "bits" if cells.complexity == "rarity" else "tokens"
    low = cells.edges[j - 1] if j else 0
    if j == len(cells.edges):
        return f"{cells.complexity} from {low:g} {unit}"
    return f"{cells.complexity} {low:g} to {cells.edges[j]:g} {unit}"
