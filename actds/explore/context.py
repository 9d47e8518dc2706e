"""Requests as they were served: tokens and rows of every position, from the cache or not."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.explore.lazy import LazyArray
from actds.format.labels import Label, label_words, parse_labels
from actds.format.positions import Intervals, Keys, difference, position_key, union
from actds.format.shard import Shard
from actds.format.tables import TableName

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
    captured_spans = spans.filter(pc.equal(kinds, "captured"))
    hits = spans.filter(pc.and_(pc.equal(kinds, "cache_ref"), pc.is_valid(spans["ref_request"])))
    start = np.concatenate([_keys(captured_spans, "request"), _keys(hits, "request")])
    rows = np.concatenate([_keys(captured_spans, "request"), _keys(hits, "ref_request")])
    length = np.concatenate([_lengths(captured_spans), _lengths(hits)])
    captured = union(
        rows[: captured_spans.num_rows],
        rows[: captured_spans.num_rows] + length[: captured_spans.num_rows],
    )
    # A hit may name rows that were lost.
    number, first, after = captured.cut(rows, rows + length)
    return start[number] + (first - rows[number]), first, after - first


def _keys(spans: pa.Table, request: str) -> Keys:
    """Return the key of the first position of each span, under one of its two requests."""
    return position_key(spans[request].to_numpy(), spans["start"].to_numpy())


def _lengths(spans: pa.Table) -> Keys:
    length: Keys = pc.subtract(spans["stop"], spans["start"]).to_numpy().astype(np.uint64)
    return length


Ints = npt.NDArray[np.int64]
_MAX_ROWS = 1 << 24  # rows of token tables that stay in memory


class Tokenizer(Protocol):
    """What decodes tokens, as those of ``transformers`` do."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""


@dataclass(frozen=True)
class RequestRows:
    """The positions that a request owes, and where their rows are; ``n`` of them.

    Args:
        run: run of the request.
        request: number of the request.
        token_id: token of each position, int64 ``(n,)``; -1 where neither a row nor a readout has
            it.
        row: number of its row in ``Dataset.array(hook)``, int64 ``(n,)``; -1 where none is stored.
        owner: request that computed the position, int64 ``(n,)``: another one where the prefix
            cache served it; -1 where nothing says which.
        disposition: what became of each position: ``captured``, ``cache_ref``, ``dropped``,
            ``aborted``, ``filtered``, ``undelivered``; ``(n,)``.
        role: who wrote each position of a chat, empty where that is not known; ``(n,)``.
        labels: what the user said of the prompt, by name.
        array: the rows of the hook.
    """

    run: str
    request: int
    token_id: Ints
    row: Ints
    owner: Ints
    disposition: npt.NDArray[np.str_]
    role: npt.NDArray[np.str_]
    labels: dict[str, Label]
    array: LazyArray

    def __len__(self) -> int:
        return len(self.token_id)

    def __repr__(self) -> str:
        n_rows = int((self.row >= 0).sum())
        words = f"request {self.request} of {self.run}: {len(self)} positions, {n_rows} with a row"
        return f"<{'; '.join([words, *label_words(self.labels)])}>"

    def acts(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Return the positions that have a row, and these rows, float32 ``(n_rows, d_model)``."""
        positions = np.flatnonzero(self.row >= 0)
        return positions, self.array[self.row[positions]]

    def text(self, tokenizer: Tokenizer, start: int = 0, stop: int | None = None) -> str:
        """Return the text of positions; a token that is not known ends one piece of it: ``�``."""
        return "".join(self.pieces(tokenizer, start, stop))

    def pieces(self, tokenizer: Tokenizer, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the text of each position, ``�`` where its token is not known."""
        ids = self.token_id[start:stop].tolist()
        return ["�" if token < 0 else tokenizer.decode([token]) for token in ids]


@dataclass(frozen=True)
class Context:
    """The tokens around a row.

    Args:
        run: run of the request.
        request: request that computed the row.
        position: its position.
        start: position of the first token.
        token_id: tokens from ``start`` on, int64 ``(n,)``; -1 where one is not known.
        pieces: the text of each token; None without a tokenizer.
    """

    run: str
    request: int
    position: int
    start: int
    token_id: Ints
    pieces: tuple[str, ...] | None

    @property
    def text(self) -> str:
        """Return the text, the row's own token as ``⟦token⟧``; empty without a tokenizer."""
        at = self.position - self.start
        return "".join(f"⟦{p}⟧" if i == at else p for i, p in enumerate(self.pieces or ()))


class RowPlaces:
    """Finds the rows of requests in the shards of a hook. For one thread.

    The first question reads the numbers of the requests of every shard; after that, only shards
    that hold rows of the request are read, and the most recent ones stay in memory.

    Args:
        catalog: the tables.
        array: the rows of the hook.
    """

    def __init__(self, catalog: Catalog, array: LazyArray) -> None:
        self._catalog, self.array = catalog, array
        self._shards = array.shards
        self._starts = np.cumsum([0, *(shard.n_rows for shard in self._shards)])
        self._ranges: list[tuple[int, int]] | None = None
        self._kept: OrderedDict[int, tuple[Ints, Ints, Ints]] = OrderedDict()
        self._tables: dict[tuple[str, str], Any] = {}

    def where(self, row: int) -> tuple[str, int, int]:
        """Return run, request and position of a row."""
        if not -len(self.array) <= row < len(self.array):
            raise IndexError(f"row {row} of {len(self.array)}")
        row %= len(self.array)
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        shard, at = self._shards[number], row - int(self._starts[number])
        line = shard.tokens(["request", "position"]).slice(at, 1).to_pylist()[0]
        return shard.run, line["request"], line["position"]

    def request(self, run: str, request: int) -> RequestRows:
        """Return the positions of a request, with the rows of those who served its prefix."""
        labels = self._labels(run, request)
        owner, disposition = self._owners(run, request)
        n = len(owner)
        token_id, row = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
        for server in np.unique(owner[owner >= 0]).tolist():
            position, token, place = self._rows(run, server)
            served = (position < n) & (owner[np.minimum(position, n - 1)] == server)
            token_id[position[served]], row[position[served]] = token[served], place[served]
        self._fill(run, owner, token_id)
        role = self._roles(run, request, n)
        places = (token_id, row, owner, disposition, role)
        return RequestRows(run, request, *places, labels, self.array)

    def context(
        self, row: int, before: int, after: int, tokenizer: Tokenizer | None = None
    ) -> Context:
        """Return the tokens from ``before`` positions before a row to ``after`` after it."""
        run, request, position = self.where(row)
        rows = self.request(run, request)
        start, stop = max(0, position - before), min(len(rows), position + after + 1)
        pieces = None if tokenizer is None else tuple(rows.pieces(tokenizer, start, stop))
        return Context(run, request, position, start, rows.token_id[start:stop], pieces)

    def _labels(self, run: str, request: int) -> dict[str, Label]:
        """Return the labels of a request; raises E014 for one that the run does not have."""
        requests = self._table(run, "requests")
        at = np.flatnonzero(requests["request"].to_numpy() == request)
        if not len(at):
            raise ActdsError(
                "E014",
                "request",
                got=f"request {request} of run {run}",
                expected=f"one of {len(requests)} requests of the run",
            )
        text = requests["labels"][int(at[0])].as_py()
        return {} if text is None else parse_labels(text, f"request {request} labels")

    def _table(self, run: str, name: TableName) -> Any:
        if (run, name) not in self._tables:
            table = self._catalog.table(name, run)
            columns = ["request", "labels"] if name == "requests" else table.column_names
            self._tables[run, name] = table.select(columns)
        return self._tables[run, name]

    def _owners(self, run: str, request: int) -> tuple[Ints, npt.NDArray[np.str_]]:
        """Return who computed each position that a request owes, and what became of it."""
        spans = self._table(run, "spans")
        lines = spans.filter(pc.equal(spans["request"], request)).to_pylist()
        n = max((span["stop"] for span in lines), default=0)
        owner = np.full(n, -1, np.int64)
        disposition = np.full(n, "", dtype="<U11")
        for span in lines:
            kind, places = span["disposition"], slice(span["start"], span["stop"])
            disposition[places] = kind
            if kind != "cache_ref":
                owner[places] = request
            elif span["ref_request"] is not None:
                owner[places] = span["ref_request"]
        return owner, disposition

    def _roles(self, run: str, request: int, n: int) -> npt.NDArray[np.str_]:
        roles = self._table(run, "roles")
        role = np.full(n, "", dtype="<U11")
        for line in roles.filter(pc.equal(roles["request"], request)).to_pylist():
            role[line["start"] : line["stop"]] = line["role"]
        return role

    def _rows(self, run: str, request: int) -> tuple[Ints, Ints, Ints]:
        parts: list[tuple[Ints, Ints, Ints]] = []
        for number, (low, high) in enumerate(self._request_ranges()):
            if self._shards[number].run != run or not low <= request <= high:
                continue
            requests, positions, tokens = self._columns(number)
            at = np.flatnonzero(requests == request)
            parts.append((positions[at], tokens[at], at + int(self._starts[number])))
        empty = np.empty(0, np.int64)
        if not parts:
            return empty, empty, empty
        position, token, row = (np.concatenate(column) for column in zip(*parts, strict=True))
        return position, token, row

    def _request_ranges(self) -> list[tuple[int, int]]:
        if self._ranges is None:
            self._ranges = [_range(shard) for shard in self._shards]
        return self._ranges

    def _columns(self, number: int) -> tuple[Ints, Ints, Ints]:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        table = self._shards[number].tokens(["request", "position", "token_id"])
        request, position, token = (
            table[name].to_numpy().astype(np.int64) for name in ("request", "position", "token_id")
        )
        self._kept[number] = request, position, token
        while sum(len(k[0]) for k in self._kept.values()) > _MAX_ROWS and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return self._kept[number]

    def _fill(self, run: str, owner: Ints, token_id: Ints) -> None:
        """Take tokens of positions without a row from the readouts, which lost rows have, too."""
        missing = np.flatnonzero((token_id < 0) & (owner >= 0))
        if not missing.size or (run, "readouts") not in self._catalog.parts:
            return
        table = self._table(run, "readouts")
        table = table.filter(
            pc.is_in(table["request"], pc.cast(np.unique(owner[missing]), "uint32"))
        )
        request, position, token = (
            table[name].to_numpy().astype(np.int64) for name in ("request", "position", "token_id")
        )
        inside = position < len(owner)
        known = inside & (owner[np.where(inside, position, 0)] == request)
        wanted = known & (token_id[np.where(inside, position, 0)] < 0)
        token_id[position[wanted]] = token[wanted]


def _range(shard: Shard) -> tuple[int, int]:
    request = shard.tokens(["request"])["request"].to_numpy()
    return (int(request.min()), int(request.max())) if len(request) else (0, -1)
