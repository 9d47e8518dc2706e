"""Requests as they were served: tokens and rows of every position, from the cache or not.

Tokens come from rows, from the rows that prefix-cache references name, and from readouts, which
lost rows have too. Rows of two datasets belong together where the tokens up to them are the same:
the harvests may differ in model, engine, batching, and in which request computed a prefix.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError
from actds.explore.lazy import LazyArray, Recent
from actds.format.inclusion import mixed
from actds.format.labels import Label, label_words, parse_labels
from actds.format.positions import Intervals, Keys, difference, pair_key, position_key, union
from actds.format.roles import Roles
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import UNSERVED, TableName

Ints = npt.NDArray[np.int64]
TokenIds = npt.NDArray[np.uint32]

_LOST = pa.array(["dropped", "aborted"])
_MAX_ROWS = 1 << 24  # rows of token tables that stay in memory
_TOKEN_COLUMNS = ["request", "position", "token_id"]


class Opened(Protocol):
    """An open ``Dataset``, which is made of what stands here."""

    catalog: Catalog
    shards: list[Shard]
    hooks: dict[str, Hook]

    def shards_of(self, hook: str) -> list[Shard]: ...


def lacking(catalog: Catalog, run: str) -> Intervals:
    """Return the positions of a run that ought to have a row, and have none.

    These were computed and lost, or served from a prefix cache or from KV from outside without a
    stored row of them. Positions that a rule left out, that were not drawn or never computed, are
    not.

    Spec: 0.1 sections 7.2, 7.4 and 7.10.
    """
    spans = catalog.table("spans", run)
    lost = pc.and_(pc.is_in(spans["disposition"], _LOST), pc.is_valid(spans["step"]))
    owed = spans.filter(pc.or_(lost, pc.equal(spans["disposition"], "cache_ref")))
    start = _keys(owed, "request")
    owed_positions = union(start, start + _lengths(owed))
    return difference(owed_positions, RowRanges.of(catalog, run, "captured", "thinned").positions)


@dataclass(frozen=True)
class RowRanges:
    """Where positions have their rows, as sorted ranges: rows of a prefix belong to another.

    Args:
        start: first position of each range, as a key ``(n,)``.
        row: that of its rows.
        length: positions of the range.
    """

    start: Keys
    row: Keys
    length: Keys

    @classmethod
    def of(
        cls, catalog: Catalog, run: str, *fates: str, drawn: bool = False, hooks: Sequence[str] = ()
    ) -> RowRanges:
        """Return where the rows of a run are; of fates, where they would be.

        Args:
            drawn: only those whose fate a draw of known probability decided.
            hooks: only rows that have all of these, where requests choose them.

        Spec: 0.1 sections 7.2 and 7.4.
        """
        spans = catalog.table("spans", run)
        is_hit = pc.equal(spans["disposition"], "cache_ref")
        hits = spans.filter(pc.and_(is_hit, pc.is_valid(spans["ref_request"])))
        hit, row, n_hit = _keys(hits, "request"), _keys(hits, "ref_request"), _lengths(hits)
        parts: list[tuple[Keys, Keys, Keys]] = []
        for fate in fates or ("captured",):
            computed = spans.filter(pc.equal(spans["disposition"], fate))
            if drawn:
                computed = computed.filter(pc.is_valid(computed["inclusion"]))
            start, length = _keys(computed, "request"), _lengths(computed)
            # A hit may name rows that were lost.
            number, first, after = union(start, start + length).cut(row, row + n_hit)
            parts.append((start, start, length))
            parts.append((hit[number] + (first - row[number]), first, after - first))
        start, row, length = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(start, kind="stable")
        if hooks and catalog.has_choices(run):
            lines = catalog.table("requests", run, ["request", "hooks"]).to_pydict()
            chosen = zip(lines["request"], lines["hooks"], strict=True)
            has_all = [n for n, text in chosen if not text or {*hooks}.issubset(text.split(","))]
            order = order[np.isin(row[order] >> np.uint64(32), has_all)]
        return cls(start[order], row[order], length[order])

    @property
    def positions(self) -> Intervals:
        """Return the positions that have a row, their own or that of a prefix-cache hit."""
        return union(self.start, self.start + self.length)

    def find(self, keys: Keys) -> tuple[Keys, npt.NDArray[np.bool_]]:
        """Return the key of the row of each position, and whether it has one."""
        if not len(self.start):
            return keys, np.zeros(len(keys), np.bool_)
        at = np.maximum(np.searchsorted(self.start, keys, side="right") - 1, 0)
        offset = keys - self.start[at]
        has = (keys >= self.start[at]) & (offset < self.length[at])
        return self.row[at] + offset, has


def _keys(spans: pa.Table, request: str) -> Keys:
    return position_key(spans[request].to_numpy(), spans["start"].to_numpy())


def _lengths(spans: pa.Table) -> Keys:
    length: Keys = pc.subtract(spans["stop"], spans["start"]).to_numpy().astype(np.uint64)
    return length


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
        row: number of its row in ``Dataset.array(hook)``, int64 ``(n,)``; -1 where none is stored,
            or only one of other hooks, which its owner chose.
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
        request: request that computed the row.
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
    """

    def __init__(self, catalog: Catalog, array: LazyArray) -> None:
        self._catalog, self.array = catalog, array
        self._starts = np.cumsum([0, *(shard.n_rows for shard in array.shards)])
        # Requests that chose other hooks have tokens, and no row of this one.
        chosen = (run for run in catalog.run_ids if catalog.has_choices(run))
        shards = (shard for run in chosen for shard in catalog.shards_of(run))
        self._shards = [*array.shards, *(s for s in shards if array.hook.name not in s.hooks)]
        self._ranges: list[tuple[int, int]] | None = None
        self._recent = Recent[int, tuple[Ints, ...]](_MAX_ROWS)
        self._tables: dict[tuple[str, str], Any] = {}

    def where(self, row: int) -> tuple[str, int, int]:
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
        parts = [[np.empty(0, np.int64)] * 3]
        if self._ranges is None:
            self._ranges = [_range(shard) for shard in self._shards]
        for number, (low, high) in enumerate(self._ranges):
            if self._shards[number].run != run or not low <= request <= high:
                continue
            requests, positions, tokens = self._columns(number)
            at = np.flatnonzero(requests == request)
            has_hook = number < len(self.array.shards)
            row = np.where(has_hook, at + int(self._starts[number * has_hook]), -1)
            parts.append([positions[at], tokens[at], row])
        position, token, row = (np.concatenate(column) for column in zip(*parts, strict=True))
        return position, token, row

    def _columns(self, number: int) -> tuple[Ints, ...]:
        shard = self._shards[number]
        return self._recent.get(
            number, lambda: _integers(shard.tokens(_TOKEN_COLUMNS)), shard.n_rows
        )

    def _fill(self, run: str, owner: Ints, token_id: Ints) -> None:
        """Take tokens of positions without a row from the readouts, which lost rows have, too."""
        missing = np.flatnonzero((token_id < 0) & (owner >= 0))
        if not missing.size or (run, "readouts") not in self._catalog.parts:
            return
        table = self._table(run, "readouts")
        table = table.filter(
            pc.is_in(table["request"], pc.cast(np.unique(owner[missing]), "uint32"))
        )
        request, position, token = _integers(table)
        inside = position < len(owner)
        known = inside & (owner[np.where(inside, position, 0)] == request)
        wanted = known & (token_id[np.where(inside, position, 0)] < 0)
        token_id[position[wanted]] = token[wanted]


def _integers(table: pa.Table) -> tuple[Ints, ...]:
    return tuple(table[name].to_numpy().astype(np.int64) for name in _TOKEN_COLUMNS)


def _range(shard: Shard) -> tuple[int, int]:
    request = shard.tokens(["request"])["request"].to_numpy()
    return (int(request.min()), int(request.max())) if len(request) else (0, -1)


@dataclass(frozen=True)
class TokenSequence:
    """What a request fed to the model, prompt and sampled tokens; ``n`` positions.

    One that was never served has the positions of its prompt, and no token.

    Args:
        run: run of the request.
        request: number of the request.
        line: its line of the table ``requests``.
        token_id: token of each position, int64 ``(n,)``; -1 where none is known.
        role: who wrote each, None where that is not known.
        n_given: positions from 0 that were given; those after them were sampled. Of a request that
            was a replay itself, as its own origin says.
        unknown: why the sequence is not known, in words; None where it has the census' digest.
    """

    run: str
    request: int
    line: dict[str, Any]
    token_id: Ints
    role: list[str | None]
    n_given: int
    unknown: str | None


def token_sequences(dataset: Opened) -> Iterator[TokenSequence]:
    """Yield the token sequence of every request, by run and number.

    Holds 16 bytes for each row and readout of a run while it works on it.

    Raises:
        ActdsError: as reading tables.

    Spec: 0.1 sections 6.3 and 7.4.
    """
    for run in dataset.catalog.run_ids:
        requests = dataset.catalog.table("requests", run).sort_by("request").to_pylist()
        if not requests:
            continue
        keys, ids = _run_tokens(dataset, run)
        spans = defaultdict[int, list[dict[str, Any]]](list)
        for span in dataset.catalog.table("spans", run).sort_by("start").to_pylist():
            spans[span["request"]].append(span)
        origins = dataset.catalog.table("origins", run)
        given = dict(
            zip(origins["request"].to_pylist(), origins["n_given"].to_pylist(), strict=True)
        )
        roles = Roles(dataset.catalog.table("roles", run))
        for line in requests:
            number, n_sampled = line["request"], line["generated_len"]
            n = line["prompt_len"] + max(n_sampled - 1, 0)
            token_id = _sequence(keys, ids, spans[number], number, n)
            role = roles.of(np.full(n, number, np.int64), np.arange(n)).to_pylist()
            n_given = min(given.get(number, line["prompt_len"]), n)
            yield TokenSequence(
                run, number, line, token_id, role, n_given, _unknown(line, token_id)
            )


def _run_tokens(dataset: Opened, run: str) -> tuple[Keys, TokenIds]:
    parts = [shard.tokens(_TOKEN_COLUMNS) for shard in dataset.shards if shard.run == run]
    if (run, "readouts") in dataset.catalog.parts:
        parts.append(dataset.catalog.table("readouts", run).select(_TOKEN_COLUMNS))
    keys = [position_key(part["request"], part["position"]) for part in parts]
    ids = [part["token_id"].to_numpy().astype(np.uint32) for part in parts]
    key = np.concatenate([*keys, np.empty(0, np.uint64)])
    token = np.concatenate([*ids, np.empty(0, np.uint32)])
    order = np.argsort(key, kind="stable")
    key, token = key[order], token[order]
    del order
    # Shards of several stages have the same rows; a row that was computed again is the same.
    first = np.concatenate([[True], key[1:] != key[:-1]])[: len(key)]
    return (key, token) if first.all() else (key[first], token[first])


def _sequence(
    keys: Keys, ids: TokenIds, spans: Sequence[dict[str, Any]], request: int, n: int
) -> Ints:
    token_id: Ints = np.full(n, -1, np.int64)
    for span in spans:
        owner = span["ref_request"] if span["disposition"] == "cache_ref" else request
        start, stop = span["start"], min(span["stop"], n)
        if owner is None or start >= stop or not len(keys):
            continue
        wanted = position_key(owner, np.arange(start, stop))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        known = keys[at] == wanted
        token_id[start:stop][known] = ids[at[known]]
    return token_id


def _unknown(line: dict[str, Any], token_id: Ints) -> str | None:
    """Return why a request's tokens are not known, None where they are."""
    if line["finish_reason"] in UNSERVED:
        return f"it was {line['finish_reason']} ({line['reason']})"
    if line["token_digest"] is None:
        return f"its census states no digest of its tokens ({line['finish_reason']})"
    n_unknown = int((token_id < 0).sum())
    if n_unknown or not len(token_id):
        return f"no row, reference or readout has {n_unknown} of its {len(token_id)} tokens"
    got = hashlib.sha256(token_id.astype("<u4").tobytes()).hexdigest()
    if got != line["token_digest"]:
        return f"its tokens have the digest {got[:16]}, the census says {line['token_digest'][:16]}"
    return None


@dataclass(frozen=True)
class Partners:
    """A hook of another dataset, and where the partners of rows are.

    Args:
        name: what a batch calls the hook.
        hook: the hook, as the other dataset has it.
        shards: the shards of the other dataset that hold it.
        starts: number of the first row of each of them, and of the row after the last.
        rows: per shard of this dataset the number of each row's partner, int64 ``(n_rows,)``; -1
            where it has none.
    """

    name: str
    hook: Hook
    shards: Sequence[Shard]
    starts: Ints
    rows: Sequence[Ints]

    @property
    def n_pairs(self) -> int:
        return sum(int((rows >= 0).sum()) for rows in self.rows)


def find_partners(
    hashes: Keys, shards: Sequence[Shard], label: str, other: Opened, hook: str
) -> Partners:
    """Return for each row of shards the row of another dataset with the same tokens up to it.

    Holds some 50 bytes for each row of both while it works, and 8 for each row of the first after
    that.

    Args:
        hashes: ``prefix_hashes`` of this dataset's shards.
        label: what a batch calls the other dataset.

    Raises:
        ActdsError: E014 the other dataset has no such hook; and as ``Shard.tokens``.
    """
    other_shards = other.shards_of(hook)
    theirs = prefix_hashes(other, other_shards)
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    starts = np.cumsum([0, *(shard.n_rows for shard in other_shards)], dtype=np.int64)
    at = np.minimum(np.searchsorted(ordered, hashes), max(len(ordered) - 1, 0))
    paired = (
        (hashes != 0) & (ordered[at] == hashes) if len(ordered) else np.zeros(len(hashes), bool)
    )
    partner = np.where(paired, order[at] if len(ordered) else 0, -1).astype(np.int64)
    bounds = np.cumsum([shard.n_rows for shard in shards])[:-1]
    name = f"{label}/{hook}"
    return Partners(name, other.hooks[hook], other_shards, starts, np.split(partner, bounds))


def prefix_hashes(dataset: Opened, shards: Sequence[Shard]) -> Keys:
    """Return a hash of the tokens up to each row, over all shards; 0 where one is not known."""
    hashes = np.zeros(sum(shard.n_rows for shard in shards), np.uint64)
    starts = np.cumsum([0, *(shard.n_rows for shard in shards)])
    for run in sorted({shard.run for shard in shards}):
        numbers = [i for i, shard in enumerate(shards) if shard.run == run]
        # A prefix is known by the rows of all phases, and of hooks that others have.
        tokens = _Prefixes(*_run_tokens(dataset, run))
        tokens.add_references(dataset, run)
        for i in numbers:
            rows = shards[i].tokens(["request", "position"])
            hashes[starts[i] : starts[i + 1]] = tokens.of(
                position_key(rows["request"], rows["position"])
            )
    return hashes


def prefix_sums(token_id: Ints) -> Keys:
    """Return a hash of the tokens up to each position of a request, uint64 ``(n,)``."""
    key = pair_key(np.arange(len(token_id)), token_id)
    return np.cumsum(mixed(key), dtype=np.uint64)


class _Prefixes:
    """Keys of the tokens up to each stored position of a run.

    The hash of a prefix is the sum of a random number for each position and its token, modulo
    2^64. So what a request computed itself is a running sum, and what it got from another's
    prefix is one number to add.
    """

    def __init__(self, key: Keys, token: TokenIds) -> None:
        self._key = key
        self._sum = mixed(key << np.uint64(32) | token)
        # A stretch is a run of positions of one request without a hole.
        begins = np.concatenate([[True], key[1:] != key[:-1] + np.uint64(1)])[: len(key)]
        at = np.flatnonzero(begins)
        self._stretch = np.cumsum(begins, dtype=np.int32)
        self._stretch -= 1
        terms = self._sum[at]
        np.cumsum(self._sum, out=self._sum)
        self._sum -= (self._sum[at] - terms)[self._stretch]
        self._start = key[at]
        # What comes before a stretch: nothing where it begins at position 0.
        self._base = np.zeros(len(at), np.uint64)
        self._known = np.asarray(key[at] & np.uint64(0xFFFFFFFF) == 0)

    def of(self, key: Keys) -> Keys:
        """Return the hash of the tokens up to each key; 0 where it is not known."""
        if not len(self._key):
            return np.zeros(len(key), np.uint64)
        at = np.minimum(np.searchsorted(self._key, key), len(self._key) - 1)
        stretch = self._stretch[at]
        known = (self._key[at] == key) & self._known[stretch]
        # 0 says that it is not known; one hash in 2^64 is moved.
        whole = np.maximum(self._sum[at] + self._base[stretch], np.uint64(1))
        return np.where(known, whole, np.uint64(0))

    def add_references(self, dataset: Opened, run: str) -> None:
        """Learn what comes before stretches that begin where a prefix-cache reference ends."""
        spans = dataset.catalog.table("spans", run)
        kind = np.asarray(spans["disposition"].to_pylist()) == "cache_ref"
        owner = spans["ref_request"].to_numpy(zero_copy_only=False)
        kind &= np.asarray([value is not None and value == value for value in owner.tolist()], bool)
        request, stop = (spans[name].to_numpy()[kind] for name in ("request", "stop"))
        after = position_key(request, stop)
        last = position_key(owner[kind].astype(np.int64), stop.astype(np.int64) - 1)
        at = np.searchsorted(self._start, after)
        inside = at < len(self._start)
        inside[inside] &= self._start[at[inside]] == after[inside]
        at, last = at[inside], last[inside]
        # An owner may have got its own prefix from another one: as many rounds as that is deep.
        while True:
            hashes = self.of(last)
            new = (hashes != 0) & ~self._known[at]
            if not new.any():
                return
            self._base[at[new]] = hashes[new]
            self._known[at[new]] = True
