"""Weights: what would make the stored rows stand for all that were computed, and their file.

The remedy of the audit: inverse-probability weights by cells of load and complexity; the rates of
the cells are shrunk to those of their load, and these to the common one. They fix what depends on
load and complexity, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError
from actds.format.row_weights import FORMAT, GROUP_ROWS, SCHEMA, VERSION
from actds.format.shard import Shard
from actds.store import refuse_within_dataset
from actds.store.folders import replaced
from actds_validators.arrays import Floats
from actds_validators.audit import result
from actds_validators.audit.covariates import Series
from actds_validators.audit.lookup import CellEdges, Lookup, Rows
from actds_validators.audit.missingness import unbounded
from actds_validators.audit.passes import Sums
from actds_validators.statistics.intervals import Interval, from_replicates, smd
from actds_validators.statistics.strata import (
    effective_rows,
    inverse_probability,
    nested_rates,
    shrunken_rates,
)

N_LOADS = 10
RARITY_EDGES = (4.0, 6.0, 8.0, 10.0, 12.0)
POSITION_EDGES = (16.0, 64.0, 256.0, 1024.0)
ENTROPY_EDGES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
"""Bits."""


@dataclass(frozen=True)
class Cells:
    """The cells: load by complexity."""

    edges: CellEdges
    load_max: float
    n: Floats
    lost: Floats
    rates: Floats | None = None  # share lost, shrunk; None before `weigh`
    weights: Floats | None = None  # of a stored row; None before `weigh` or when nothing is stored


def cell_edges(series: Series, *, has_ids: bool, has_entropy: bool = False) -> CellEdges:
    order = np.argsort(series.load, kind="stable")
    reached = np.cumsum(series.computed[order]) / series.computed.sum()
    at = np.searchsorted(reached, np.arange(1, N_LOADS) / N_LOADS)
    load = tuple(float(e) for e in np.unique(series.load[order][at].astype(np.float32)))
    name, inner = ("rarity", RARITY_EDGES) if has_ids else ("position", POSITION_EDGES)
    return CellEdges(load, name, inner, ENTROPY_EDGES if has_entropy else ())


def counted_cells(edges: CellEdges, series: Series, n: Floats) -> Cells:
    return _counted(edges, float(series.load.max()), n.sum(axis=1))


def _counted(edges: CellEdges, load_max: float, n: Floats) -> Cells:
    """Return cells of stored and lost tokens ``(2, n_cells)``.

    Lost tokens whose id nobody knows are spread over the cells of their load as the known ones
    are, or the stored ones where none is known.
    """
    stored, lost = (side.reshape(edges.shape).copy() for side in n)
    if edges.has_unknown and lost[:, -1].any():
        ids = slice(edges.n_entropies, -1)
        known = lost[:, ids].sum(axis=1, keepdims=True)
        like = np.where(known > 0, lost[:, ids], stored[:, ids])
        total = like.sum(axis=1, keepdims=True)
        share = np.divide(like, total, out=np.zeros_like(like), where=total > 0)
        spread = share * lost[:, -1:]
        lost[:, ids] += spread
        lost[:, -1] -= spread.sum(axis=1)
        lost[np.abs(lost) < 1e-9] = 0
    return Cells(edges, load_max, stored + lost, lost)


def weigh(cells: Cells) -> Cells:
    rates = nested_rates(cells.n, cells.lost)
    if cells.edges.has_unknown:  # of any complexity: like their load
        rates[:, -1] = shrunken_rates(cells.n.sum(axis=1), cells.lost.sum(axis=1))
    return replace(cells, rates=rates, weights=inverse_probability(cells.n, cells.lost, rates))


@dataclass(frozen=True)
class StoredCells:
    """A covariate over the stored rows, by block and cell."""

    n: Floats  # rows that have a value, (n_blocks, n_cells)
    x: Floats


def stored_cells(sums: Sums, middles: Mapping[str, Floats]) -> list[StoredCells]:
    """Return every covariate over the stored rows: of the steps, then of each group."""
    covariates = [StoredCells(sums.cell_n[0], x) for x in sums.cell_system]
    for group, middle in middles.items():
        n, *powers = sums.moments[group].cells
        covariates += [StoredCells(n[k], powers[0][k] + c * n[k]) for k, c in enumerate(middle)]
        covariates += [StoredCells(n[k], x) for square in powers[1:] for k, x in enumerate(square)]
    return covariates


def after_weighting(
    cells: Cells, n: Floats, stored: Sequence[StoredCells], totals: Floats
) -> list[result.Estimate | None]:
    """Return how far the weighted rows lie from all, one covariate after the other.

    The jackknife leaves a block out of the weights as well: they are made of the same losses.

    Args:
        n: stored and lost tokens of which the cells were counted, ``(2, n_blocks, n_cells)``.
        totals: n, sx, sxx, ... over all computed tokens, ``(5, n_covariates, n_blocks)``.
    """
    if cells.weights is None:
        return [None] * len(stored)
    all_of_it = n.sum(axis=1)
    without = [
        weigh(_counted(cells.edges, cells.load_max, all_of_it - n[:, block])).weights
        for block in range(totals.shape[2])
        if (all_of_it - n[:, block]).sum() > 0
    ]
    replicates = len(without) == totals.shape[2] > 1 and all(w is not None for w in without)
    w = cells.weights.reshape(-1)
    sums = totals[:3].sum(axis=2)
    values = smd(np.stack([*sums, *_weighted(stored, lambda s: s.sum(axis=0) @ w)]))
    intervals: list[Interval | None] = [None] * len(stored)
    if replicates:
        weights = np.stack([np.asarray(x).reshape(-1) for x in without])
        left = sums[:, :, np.newaxis] - totals[:3]
        parts = _weighted(stored, lambda s: ((s.sum(axis=0) - s) * weights).sum(axis=1))
        intervals = from_replicates(values, smd(np.stack([*left, *parts])))
    return [
        result.Estimate.of(interval)
        or unbounded(float(value), float(n_all), effective_rows(w, x.n.sum(axis=0)))
        for interval, value, n_all, x in zip(intervals, values, sums[0], stored, strict=True)
    ]


def _weighted(
    stored: Sequence[StoredCells], weigh_sums: Callable[[Floats], Floats]
) -> Iterator[Floats]:
    for name in ("n", "x"):
        yield np.stack([weigh_sums(getattr(covariate, name)) for covariate in stored])


def weighting(
    cells: Cells, differences: Sequence[result.Difference], negligible: float
) -> result.Weighting | None:
    if cells.weights is None or cells.rates is None:
        return None
    stored = cells.n - cells.lost
    lows, highs = (0.0, *cells.edges.load), (*cells.edges.load, cells.load_max)
    listed = [
        result.WeightCell(
            load_low=lows[i],
            load_high=highs[i],
            label=_label(cells, j),
            n=round(cells.n[i, j]),
            n_lost=round(cells.lost[i, j]),
            rate=float(cells.rates[i, j]),
            weight=float(cells.weights[i, j]),
        )
        for i in range(cells.n.shape[0])
        for j in range(cells.n.shape[1])
        if cells.n[i, j]
    ]
    of_stored = cells.weights[stored > 0]
    empty = int(((stored == 0) & (cells.n > 0)).sum())
    claim = "MAR-consistent after weighting if losses depend on load and complexity alone"
    if empty:
        claim = f"{empty} cells lost every row: no weight can make up for them"
    elif np.ptp(of_stored) < 1e-9:
        claim = "every weight is 1: no load and no complexity lost more than chance"
    changes = _changes(differences)
    return result.Weighting(
        n_cells=len(listed),
        n_rows=round(stored.sum()),
        effective_rows=effective_rows(cells.weights.reshape(-1), stored.reshape(-1)),
        largest=float(cells.weights.max()),
        complexity=cells.edges.words,
        cells=listed,
        balance=list(_balance(changes)),
        worse=_worse(changes, negligible),
        claim=claim,
    )


def _changes(differences: Sequence[result.Difference]) -> list[result.Worse]:
    return [
        result.Worse(
            label=d.covariate.label,
            group=d.covariate.group,
            before=abs(d.before_weighting.value),
            after=abs(d.after_weighting.value),
        )
        for d in differences
        if d.before_weighting and d.after_weighting
    ]


def _worse(changes: Sequence[result.Worse], negligible: float) -> list[result.Worse]:
    """Return the covariates whose bias the weights make larger and not negligible, worst first.

    A tenth of what is negligible is no growth.

    The bias before and after is of the same rows: most of its noise is in both, and what an
    interval of either allows would hide a bias that grew by a quarter.
    """
    grown = [x for x in changes if x.after > max(negligible, x.before + negligible / 10)]
    return sorted(grown, key=lambda change: change.before - change.after)


def _balance(changes: Sequence[result.Worse]) -> Iterator[result.Balance]:
    for group in get_args(result.Group):
        some = [change for change in changes if change.group == group]
        if some:
            before, after = max(x.before for x in some), max(x.after for x in some)
            yield result.Balance(group=group, before=before, after=after)


def _label(cells: Cells, j: int) -> str:
    name, edges = cells.edges.complexity, cells.edges.edges
    if (place := j - cells.edges.n_entropies) < 0:
        name, edges = "entropy", cells.edges.entropy
    else:
        j = place
    unit = "tokens" if name == "position" else "bits"
    if j > len(edges):
        return f"{name} unknown"
    low = edges[j - 1] if j else 0
    if j == len(edges):
        return f"{name} from {low:g} {unit}"
    return f"{name} {low:g} to {edges[j]:g} {unit}"


def write_weights(
    out: str | Path,
    catalog: Catalog,
    lookups: Mapping[str, Lookup],
    cells: Cells | None,
    claim: str,
) -> int:
    """Write the weight of every stored row, and return the number of rows.

    The file appears whole or not at all; one that is there already is replaced. About a million
    rows are in memory at a time, or those of the largest shard.

    Args:
        lookups: of its runs, by name; none when nothing was dropped.
        cells: with their weights; ``None`` when nothing was dropped, and every weight is 1.

    Raises:
        ActdsError: E009 a path inside a dataset; E412 rows of an unknown step; E503 the disk
            refuses; what ``Shard.tokens`` raises.

    Spec: 0.1 section 14.11.
    """
    path = Path(out)
    refuse_within_dataset(path, "weights")
    words = {
        "format": FORMAT,
        "version": VERSION,
        "dataset": catalog.genesis.dataset,
        "digest": catalog.digest,
        "claim": claim,
    }
    n_rows = 0
    options = {"compression": "zstd", "store_schema": False, "write_page_checksum": True}
    encodings = {"row": "DELTA_BINARY_PACKED"}
    with (
        replaced(path) as temporary,
        pq.ParquetWriter(
            temporary,
            SCHEMA,
            use_dictionary=["shard", "weight"],
            column_encoding=encodings,
            **options,
        ) as file,
    ):
        file.add_key_value_metadata({f"actds.{key}": value for key, value in words.items()})
        for table in _in_groups(_tables(catalog, lookups, cells)):
            file.write_table(table, row_group_size=GROUP_ROWS)
            n_rows += table.num_rows
    return n_rows


def _tables(
    catalog: Catalog, lookups: Mapping[str, Lookup], cells: Cells | None
) -> Iterator[pa.Table]:
    for manifest in sorted(catalog.shards, key=lambda manifest: manifest.shard):
        shard = Shard(catalog.store, manifest, parse=catalog.parse)
        weights = _weights(lookups.get(shard.run), shard, cells)
        rows = np.arange(shard.n_rows, dtype=np.uint32)
        yield pa.table([pa.repeat(shard.name, shard.n_rows), rows, weights], schema=SCHEMA)


def _weights(lookup: Lookup | None, shard: Shard, cells: Cells | None) -> npt.NDArray[np.float32]:
    if cells is None or cells.weights is None:
        return np.ones(shard.n_rows, np.float32)
    tokens = shard.tokens(["step", "request", "position", "token_id"])
    rows = Rows.read(lookup, tokens)[0] if lookup else None
    n_known = int((rows.step >= 0).sum()) if rows else 0
    if rows is None or n_known < shard.n_rows:
        got = f"{n_known} of {shard.n_rows} rows whose step computed something"
        raise ActdsError("E412", f"shards/{shard.name}", got=got, expected="every row")
    return cells.weights.reshape(-1)[cells.edges.of(rows)].astype(np.float32)


def _in_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    waiting: list[pa.Table] = []
    n_rows = 0
    for table in tables:
        waiting.append(table)
        n_rows += table.num_rows
        if n_rows >= GROUP_ROWS:
            joined, rest = pa.concat_tables(waiting), n_rows % GROUP_ROWS
            yield joined.slice(0, n_rows - rest)
            waiting, n_rows = [joined.slice(n_rows - rest)], rest
    if n_rows:
        yield pa.concat_tables(waiting)
