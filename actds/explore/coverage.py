"""Which positions of a run have a row, and which ought to have one and have none.

A position has a row when it was captured, or when it is a prefix-cache hit on one that was.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.reading import Catalog
from actds.format.positions import Intervals, Keys, difference, position_key, union

_LOST = pa.array(["dropped", "aborted"])


def covered(catalog: Catalog, run: str) -> Intervals:
    """Return the positions of a run that have a row, their own or that of a prefix-cache hit.

    Spec: 0.1 sections 7.2 and 7.4.
    """
    start, _, length = rows_of_positions(catalog, run)
    return union(start, start + length)


def lacking(catalog: Catalog, run: str) -> Intervals:
    """Return the positions of a run that ought to have a row, and have none.

    These were computed and lost, or served from a prefix cache or from KV from outside without a
    stored row of them. Positions that a rule left out, or that were never computed, are not.

    Spec: 0.1 sections 7.2 and 7.4.
    """
    spans = catalog.table("spans", run)
    lost = pc.and_(pc.is_in(spans["disposition"], _LOST), pc.is_valid(spans["step"]))
    owed = spans.filter(pc.or_(lost, pc.equal(spans["disposition"], "cache_ref")))
    start = _keys(owed, "request")
    return difference(union(start, start + _lengths(owed)), covered(catalog, run))


def rows_of_positions(catalog: Catalog, run: str) -> tuple[Keys, Keys, Keys]:
    """Return ranges of positions that have a row, and where these rows are, ``(n,)`` each.

    Returns:
        The first position of each range, that of its rows, and its length: the two differ for
        prefix-cache hits.
    """
    spans = catalog.table("spans", run)
    kinds = spans["disposition"]
    own = spans.filter(pc.equal(kinds, "captured"))
    hits = spans.filter(pc.and_(pc.equal(kinds, "cache_ref"), pc.is_valid(spans["ref_request"])))
    start = np.concatenate([_keys(own, "request"), _keys(hits, "request")])
    rows = np.concatenate([_keys(own, "request"), _keys(hits, "ref_request")])
    length = np.concatenate([_lengths(own), _lengths(hits)])
    captured = union(rows[: own.num_rows], rows[: own.num_rows] + length[: own.num_rows])
    # A hit may name rows that were lost.
    which, first, after = captured.cut(rows, rows + length)
    return start[which] + (first - rows[which]), first, after - first


def _keys(spans: pa.Table, request: str) -> Keys:
    """Return the key of the first position of each span, under one of its two requests."""
    return position_key(spans[request].to_numpy(), spans["start"].to_numpy())


def _lengths(spans: pa.Table) -> Keys:
    length: Keys = pc.subtract(spans["stop"], spans["start"]).to_numpy().astype(np.uint64)
    return length
