"""Means of rows by turn of a conversation, or by request: what a probe of answers is trained on.

Every row is read once, in the order of the shards. A row that the prefix cache served to others
counts for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.explore.dataset import Dataset, OpenOptions, open
from actds.explore.lazy import LazyArray
from actds.explore.requests import RowRanges
from actds.format.positions import Intervals, Keys, position_key
from actds.format.tables import ROLES
from actds.loader.filters import bad
from actds.loader.mixture import Side
from actds.loader.selection import Selection, checked_split, held_out_requests, select

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
By = Literal["turn", "request"]
_Wanted = tuple[Keys, Keys, Ints]
"""Ranges of rows: first key, key after the last, and the group that they are of."""
ROWS_AT_A_TIME = 1 << 14


@dataclass(frozen=True)
class PooledRows:
    """Means of the rows of a hook, by group; ``n`` groups.

    Args:
        acts: the means ``(n, d_model)``.
        table: by group ``run``, ``request``, ``conversation``, ``turn`` (from 0, null before the
            first), ``role`` (null for whole requests), ``positions`` that it has, and ``rows``, of
            which the mean is: fewer where rows were lost, not drawn or not wanted.
    """

    acts: Floats
    table: pa.Table

    def __len__(self) -> int:
        return len(self.acts)


def pool(
    source: str | Path | Dataset,
    hook: str,
    by: By = "turn",
    *,
    history: bool = False,
    where: str | None = None,
    exclude: str | Sequence[str] = (),
    split: Side | None = None,
    held_out: float = 0.0,
    **how: Unpack[OpenOptions],
) -> PooledRows:
    """Return the mean of a hook's rows over each turn of chats, by role, or over each request.

    Rows that were drawn with different probabilities count ``1 / inclusion`` each (Hajek).

    Args:
        by: ``turn`` needs known roles; one that a message has of its own is a group, without the
            template's positions. ``request`` takes all positions of a request.
        history: earlier turns as well, which a later request repeats; by default each request has
            only its last one, so that a conversation has each turn once.
        where: which rows, an expression as of a ``Loader``.
        exclude: rows to leave out, by name.
        split: of which requests; a conversation is on one side.
        held_out: share of the requests that are held out.

    Raises:
        ActdsError: E014 no such hook, nothing to pool, or an argument that cannot be used; and as
            ``actds.open`` and ``Loader``.

    Spec: 0.1 sections 6.3, 7.2, 7.4 and 10.3.
    """
    if by not in ("turn", "request"):
        raise bad("by", repr(by)[:80], "turn or request")
    dataset = source if isinstance(source, Dataset) else open(source, **how)
    side = checked_split(split, held_out)
    selection = select(dataset, hook, where=where, exclude=exclude)
    parts = []
    for run in selection.runs:
        ranges = _turns(dataset, run, history=history) if by == "turn" else _requests(dataset, run)
        if side is not None:
            number, is_held_out = held_out_requests(dataset, run, side[1])
            chosen = number[is_held_out == (side[0] == "held_out")]
            ranges = ranges.filter(np.isin(ranges["request"].to_numpy(), chosen))
        parts.append(_of_run(selection, run, ranges))
    table = pa.concat_tables([part.table for part in parts])
    if not len(table):
        raise bad("by", f"{by}, of which no row is", "request, or chats whose roles are known")
    return PooledRows(np.concatenate([part.acts for part in parts]), table)


def _requests(dataset: Dataset, run: str) -> pa.Table:
    lines = dataset.catalog.table("requests", run, ["request", "prompt_len", "generated_len"])
    n = len(lines)
    sampled = pc.max_element_wise(lines["generated_len"], 1)
    stop = pc.add(lines["prompt_len"], pc.subtract(sampled, 1))  # the last one is not fed
    columns = {"request": lines["request"], "start": np.zeros(n, np.uint32), "stop": stop}
    nothing = {"role": pa.nulls(n, pa.string()), "turn": pa.nulls(n, pa.uint32())}
    return pa.table(columns | nothing)


def _turns(dataset: Dataset, run: str, *, history: bool) -> pa.Table:
    """Return ``request``, ``start``, ``stop``, ``role`` and ``turn`` of each message."""
    roles = dataset.catalog.table("roles", run)
    roles = roles.filter(pc.not_equal(roles["role"], "template"))
    roles = roles.sort_by([("request", "ascending"), ("start", "ascending")])
    request = roles["request"].to_numpy().astype(np.int64)
    is_user = np.array(pc.equal(roles["role"], "user").to_pylist(), np.bool_)
    first = np.diff(request, prepend=-1) != 0
    begins = is_user & (first | ~np.roll(is_user, 1))
    # Turns begun before a request are those of others.
    turn = np.cumsum(begins) - 1
    of_request = np.cumsum(first) - 1
    turn -= (turn - begins + 1)[first][of_request]
    roles = roles.append_column("turn", pa.array(turn, pa.uint32(), mask=turn < 0))
    if history or not len(request):
        return roles
    last = np.maximum.reduceat(turn, np.flatnonzero(first))[of_request]
    return roles.filter(pa.array(turn == last))


def _of_run(selection: Selection, run: str, ranges: pa.Table) -> PooledRows:
    catalog, hook = selection.dataset.catalog, selection.hooks[0]
    role = pc.fill_null(pc.index_in(ranges["role"], pa.array(ROLES)), -1).to_numpy()
    turn = pc.fill_null(ranges["turn"].cast(pa.int64()), -1).to_numpy()
    request = ranges["request"].to_numpy().astype(np.int64)
    key = ((request << 28) + turn + 1 << 3) + role + 1
    _, firsts, group = np.unique(key, return_index=True, return_inverse=True)
    start, stop = (position_key(request, ranges[name]) for name in ("start", "stop"))
    n_positions = np.zeros(len(firsts), np.int64)
    np.add.at(n_positions, group, (stop - start).astype(np.int64))
    sums = _Sums(len(firsts), hook.d_model)
    sums.add_rows(selection, run, _rows_of(RowRanges.of(catalog, run), start, stop, group))
    lines = catalog.table("requests", run, ["request", "conversation"])
    groups = ranges.take(pa.array(firsts))
    at = pc.index_in(groups["request"], lines["request"].combine_chunks())
    table = pa.table(
        {
            "run": pa.array([run] * len(firsts), pa.string()),
            "request": groups["request"],
            "conversation": lines["conversation"].take(at),
            "turn": groups["turn"],
            "role": groups["role"],
            "positions": pa.array(n_positions, pa.uint32()),
            "rows": pa.array(sums.n, pa.uint32()),
        }
    )
    has = sums.n > 0
    return PooledRows(sums.total[has] / sums.weight[has, None], table.filter(pa.array(has)))


def _rows_of(rows: RowRanges, start: Keys, stop: Keys, group: Ints) -> _Wanted:
    """Return where the rows of ranges of positions are."""
    at_range, first, after = Intervals(rows.start, rows.start + rows.length).cut(start, stop)
    at = np.searchsorted(rows.start, first, side="right") - 1
    row = rows.row[at] + (first - rows.start[at])
    return row, row + (after - first), group[at_range]


class _Sums:
    """Weighted sums of rows by group."""

    def __init__(self, n: int, d_model: int) -> None:
        self.total = np.zeros((n, d_model), np.float32)
        self.weight = np.zeros(n, np.float32)
        self.n = np.zeros(n, np.int64)

    def add_rows(self, selection: Selection, run: str, wanted: _Wanted) -> None:
        """Add rows of a run to the groups that want them."""
        first, after, group = wanted
        for shard, count in zip(selection.shards, selection.counts, strict=True):
            if shard.run != run:
                continue
            [share] = selection.dataset.inclusion([shard]) or [np.ones(shard.n_rows)]
            tokens = shard.tokens(["request", "position"])
            keys = position_key(tokens["request"], tokens["position"])
            order = np.argsort(keys)
            low, high = (np.searchsorted(keys, edge, sorter=order) for edge in (first, after))
            n = high - low
            of_group: Ints = np.repeat(group, n)
            nth = np.arange(len(of_group)) - np.repeat(np.cumsum(n) - n, n)
            row = order[np.repeat(low, n) + nth]
            if count is not None:
                of_group, row = of_group[count[row] > 0], row[count[row] > 0]
            array = LazyArray(selection.hooks[0], [shard])
            by_row = np.argsort(row, kind="stable")
            for at in range(0, len(row), ROWS_AT_A_TIME):
                some = by_row[at : at + ROWS_AT_A_TIME]
                self._add(array, row[some], of_group[some], 1 / share[row[some]])
            array.files.close()

    def _add(self, array: LazyArray, row: Ints, group: Ints, weight: Weights) -> None:
        distinct, at = np.unique(row, return_inverse=True)
        order = np.argsort(group, kind="stable")
        groups, begin, n = np.unique(group[order], return_index=True, return_counts=True)
        values = array[distinct][at[order]] * weight[order, None].astype(np.float32)
        self.total[groups] += np.add.reduceat(values, begin, axis=0)
        self.weight[groups] += np.add.reduceat(weight[order], begin)
        self.n[groups] += n
