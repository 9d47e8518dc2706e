"""The tables and rows of a run as numpy columns, sorted, with their own mistakes noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError, Finding, Severity
from actds.format import tables
from actds.format.labels import parse_labels
from actds.format.positions import Index, Intervals, Ints, Keys, of_keys, position_key, split_key

MAX_FINDINGS_PER_CODE = 16
_LARGEST = 2**63 - 1
_TEXTS = 1 << 14
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.object_]
Floats = npt.NDArray[np.float64]
"""Strings: numpy's own have all the length of the longest."""


class Notes:
    """The findings of a run: the first of every code in full, the rest as a count."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._findings: list[Finding] = []
        self._counts: Counter[tuple[str, Severity]] = Counter()

    def add(
        self, code: str, place: str, got: str, expected: str, severity: Severity = "error"
    ) -> None:
        self._counts[code, severity] += 1
        if self._counts[code, severity] <= MAX_FINDINGS_PER_CODE:
            self._findings.append(Finding(code, place, got, expected, severity))

    def each(
        self, code: str, where: npt.NDArray[Any], severity: Severity = "error"
    ) -> Iterator[int]:
        """Yield the first places of a finding, one of which is to be noted for each.

        Of the rest there is only the count: a file of a megabyte can have a million of them.
        """
        room = max(0, MAX_FINDINGS_PER_CODE - self._counts[code, severity])
        yield from where[:room].tolist()
        self._counts[code, severity] += max(0, len(where) - room)

    def place(
        self, folder: str, table: str, request: Any, start: Any, stop: Any | None = None
    ) -> str:
        """Return the words for positions of a request in a table of the run."""
        where = f"{folder}/{self.run}/{table}" if folder != "shards" else f"shards (run {self.run})"
        what = f"position {start}" if stop is None else f"positions [{start}, {stop})"
        return f"{where} request {request} {what}"

    def places(self, code: str, folder: str, table: str, intervals: Intervals) -> Iterator[str]:
        """Yield the words for the first intervals, as ``each``."""
        request, first = split_key(intervals.start)
        last = split_key(intervals.stop - np.uint64(1))[1]
        for i in self.each(code, np.arange(len(intervals))):
            yield self.place(folder, table, request[i], first[i], last[i] + 1)

    def copy(self) -> Notes:
        other = Notes(self.run)
        other._findings, other._counts = self._findings.copy(), self._counts.copy()
        return other

    def findings(self) -> list[Finding]:
        """Return what was noted, by code, with a line for what was left out."""
        left_out = [
            Finding(
                code,
                f"run {self.run}",
                f"{count - MAX_FINDINGS_PER_CODE} further places of {code}",
                "none",
                severity,
            )
            for (code, severity), count in self._counts.items()
            if count > MAX_FINDINGS_PER_CODE
        ]
        return sorted(self._findings + left_out, key=lambda finding: finding.code)


def floats(table: pa.Table, name: str) -> Floats:
    """Return a column as float64, null as NaN."""
    values: Floats = table[name].cast(pa.float64()).fill_null(float("nan")).to_numpy()
    return values.astype(np.float64, copy=False)


def ints(table: pa.Table, name: str) -> Ints:
    """Return a column as int64, null as -1.

    A uint64 above int64 stays the largest of all, so that no number turns into a null.
    """
    column = table[name]
    if pa.types.is_uint64(column.type):
        column = pc.min_element_wise(column, pa.scalar(_LARGEST, pa.uint64()), skip_nulls=False)
    if column.null_count:
        column = column.cast(pa.int64()).fill_null(-1)
    values: Ints = column.to_numpy().astype(np.int64)
    return values


def words(table: pa.Table, name: str) -> Words:
    """Return a string column as Python strings, each once in memory, null as the empty string."""
    column = pc.dictionary_encode(table[name].fill_null("")).unify_dictionaries().combine_chunks()
    if not len(column):
        return np.empty(0, object)
    values: Words = np.array(column.dictionary.to_pylist(), object)[column.indices.to_numpy()]
    return values


def check_words(
    table: pa.Table, name: str, allowed: Sequence[str], place: str, notes: Notes
) -> None:
    """Note values of a column that are not of the spec's list."""
    odd = pc.unique(table[name]).to_pylist()
    for word in sorted({repr(word)[:40] for word in odd if word not in allowed}):
        notes.add("E103", f"{place} {name}", word, f"one of {', '.join(allowed)}")


@dataclass(frozen=True)
class _Numbered:
    """Records of a run with a number each, sorted and distinct."""

    number: Ints

    @cached_property
    def _index(self) -> Index:
        return Index(self.number)

    def index(self, number: npt.NDArray[np.integer]) -> Ints:
        return self._index.of(number)


@dataclass(frozen=True)
class Requests(_Numbered):
    """The requests of a run; every column int64 ``(n,)``, null -1."""

    prompt_len: Ints
    own_len: Ints
    """Positions owed at least: P + G - 1, or P when nothing was sampled."""
    unserved: Bools
    ended: Bools
    """Whether the end is known: it was served, and is not unfinished."""
    cached: Ints
    engine_cached: Ints
    n_preemptions: Ints
    token_digest: pa.ChunkedArray
    """As Arrow has it: a million strings of Python would be larger than all the rest."""
    adapter: Ints
    """One number for each adapter, and for none."""


def read_requests(table: pa.Table, notes: Notes) -> Requests:
    """Return the requests; a repeated request is noted and counted once."""
    place = f"census/{notes.run}/requests"
    check_words(table, "finish_reason", tables.FINISH_REASONS, place, notes)
    number = ints(table, "request")
    request, first, times = np.unique(number, return_index=True, return_counts=True)
    for i in notes.each("E405", np.flatnonzero(times > 1)):
        notes.add("E405", f"{place} request {request[i]}", f"{times[i]} records", "one record")
    gaps = np.flatnonzero(request != np.arange(len(request)))
    for i in gaps[:1]:
        notes.add("E404", f"{place} request {i}", "no record", "numbers from 0, without a gap")
    # A copy: a view would keep all columns of the table, which came in one piece of memory.
    token_digest, table = table["token_digest"].take(pa.array(first)), table.drop("token_digest")
    if not np.array_equal(first, np.arange(table.num_rows)):
        table = table.take(pa.array(first))
    prompt, generated = ints(table, "prompt_len"), ints(table, "generated_len")
    for text in _texts(pc.unique(table["labels"].drop_null())):
        try:
            parse_labels(text, f"{place} labels")
        except ActdsError as error:
            notes.add(error.code, error.place, error.got, error.expected)
    ends = table["finish_reason"]
    unserved = pc.is_in(ends, pa.array(tables.UNSERVED)).to_numpy()
    unfinished = pc.equal(ends, "unfinished").fill_null(False).to_numpy()
    silent = pc.equal(table["reason"].fill_null(""), "").to_numpy()
    for i in notes.each("E402", np.flatnonzero(unserved & silent)):
        expected = f"why it was {ends[i].as_py()}"
        notes.add("E402", f"{place} request {request[i]} reason", "null", expected)
    return Requests(
        request,
        prompt,
        np.where(unserved, 0, np.where(generated > 0, prompt + generated - 1, prompt)),
        unserved,
        ~unserved & ~unfinished,
        ints(table, "cached_tokens"),
        ints(table, "engine_cached_tokens"),
        ints(table, "n_preemptions"),
        token_digest,
        _codes(table, "adapter"),
    )


def _texts(column: pa.Array) -> Iterator[str]:
    """Yield the strings of a column, some thousands of Python's own at a time."""
    for first in range(0, len(column), _TEXTS):
        yield from column.slice(first, _TEXTS).to_pylist()


def _codes(table: pa.Table, name: str) -> Ints:
    """Return a number for each string of a column, the same for the same, null as the empty one."""
    column = pc.dictionary_encode(table[name].fill_null("")).unify_dictionaries().combine_chunks()
    codes: Ints = column.indices.to_numpy().astype(np.int64) if len(column) else np.empty(0, int)
    return codes


@dataclass(frozen=True)
class Steps(_Numbered):
    """The steps of a run; columns ``(n,)``: int64, null -1, and ``inclusion`` float64, null NaN."""

    batch: Ints
    prefill: Ints
    decode: Ints
    captured: Ints
    recomputed: Ints
    dropped: Ints
    aborted: Ints
    filtered: Ints
    undelivered: Ints
    rejected: Ints
    thinned: Ints
    drafted: Ints
    accepted: Ints
    inclusion: Floats

    def sums(self, step: Ints, amount: Ints) -> Ints:
        """Return the sum of the amounts per step of the census; unknown steps are left out."""
        at = self.index(step)
        known = at >= 0
        total = np.zeros(len(self.number), np.int64)
        np.add.at(total, at[known], amount[known])
        return total


COLUMNS: dict[tables.TableName, list[str]] = {
    "requests": [
        "request",
        "prompt_len",
        "generated_len",
        "labels",
        "finish_reason",
        "reason",
        "cached_tokens",
        "engine_cached_tokens",
        "n_preemptions",
        "token_digest",
        "adapter",
    ],
    "steps": ["step", *(f"{field.name}_tokens" for field in fields(Steps)[1:-1]), "inclusion"],
    "spans": [
        *("request", "start", "stop", "disposition", "reason", "step", "ref_request"),
        "inclusion",
    ],
    "drops": ["drop", "step", "drop_reason", "request", "start", "stop", "n_tokens"],
}
"""What an account reads of each table: of a request less than a third of its bytes."""


def read_steps(table: pa.Table, notes: Notes) -> Steps:
    """Return the steps; a repeated step is noted and counted once."""
    step, first, times = np.unique(ints(table, "step"), return_index=True, return_counts=True)
    for i in notes.each("E412", np.flatnonzero(times > 1)):
        place = f"census/{notes.run}/steps step {step[i]}"
        notes.add("E412", place, f"{times[i]} records", "one record")
    table = table.take(pa.array(first))
    kinds = [field.name for field in fields(Steps)[1:-1]]
    counts = {kind: ints(table, f"{kind}_tokens") for kind in kinds}
    return Steps(step, **counts, inclusion=floats(table, "inclusion"))


@dataclass(frozen=True)
class _Ranges:
    """Ranges of positions, sorted by request and start; columns ``(n,)``."""

    request: Ints
    start: Ints
    stop: Ints

    @property
    def start_key(self) -> Keys:
        return position_key(self.request, self.start)

    @property
    def stop_key(self) -> Keys:
        return position_key(self.request, self.stop)

    def at(self, index: int) -> tuple[Any, Any, Any]:
        return self.request[index], self.start[index], self.stop[index]


def _sorted_ranges(
    table: pa.Table, folder: str, name: str, code: str, notes: Notes
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the order of the ranges, and their columns in it; empty ones are noted, left out."""
    request, start, stop = (ints(table, column) for column in ("request", "start", "stop"))
    for i in notes.each(code, np.flatnonzero(start >= stop)):
        place = notes.place(folder, name, request[i], start[i], stop[i])
        notes.add(code, place, f"an empty {name[:-1]}", "at least one position")
    order = np.lexsort((stop, start, request))
    order = order[start[order] < stop[order]]
    return order, request[order], start[order], stop[order]


@dataclass(frozen=True)
class Spans(_Ranges):
    """The spans of a run; null is -1, empty or NaN."""

    disposition: npt.NDArray[np.int8]
    reason: Words
    step: Ints
    ref_request: Ints
    inclusion: Floats

    def of(self, disposition: str) -> Bools:
        mask: Bools = self.disposition == tables.DISPOSITIONS.index(disposition)
        return mask

    @property
    def external(self) -> Bools:
        """Return which spans were served from KV that came from outside the run."""
        mask: Bools = self.of("cache_ref") & (self.reason == tables.EXTERNAL)
        return mask

    def referenced(self, chosen: Bools | Ints) -> tuple[Keys, Keys]:
        """Return the keys that cache references name: first, and after the last."""
        request = self.ref_request[chosen]
        return position_key(request, self.start[chosen]), position_key(request, self.stop[chosen])


def read_spans(table: pa.Table, notes: Notes) -> Spans:
    """Return the spans; empty ones and unexplained losses are noted."""
    place = f"census/{notes.run}/spans"
    check_words(table, "disposition", tables.DISPOSITIONS, place, notes)
    kind = pc.index_in(table["disposition"], pa.array(tables.DISPOSITIONS)).fill_null(-1)
    order, request, start, stop = _sorted_ranges(table, "census", "spans", "E405", notes)
    spans = Spans(
        request,
        start,
        stop,
        kind.to_numpy().astype(np.int8)[order],
        words(table, "reason")[order],
        ints(table, "step")[order],
        ints(table, "ref_request")[order],
        floats(table, "inclusion")[order],
    )
    lost = ~(spans.of("captured") | spans.of("cache_ref"))
    for i in notes.each("E402", np.flatnonzero(lost & (spans.reason == ""))):
        where = notes.place("census", "spans", *spans.at(i))
        notes.add("E402", f"{where} reason", "null", "why the positions have no row")
    for i in notes.each("E402", np.flatnonzero(~lost & ~spans.external & (spans.reason != ""))):
        where = notes.place("census", "spans", *spans.at(i))
        expected = "null: nothing was lost"
        if spans.disposition[i] == tables.DISPOSITIONS.index("cache_ref"):
            expected = f"null, or {tables.EXTERNAL}"
        notes.add("E402", f"{where} reason", str(spans.reason[i])[:40], expected)
    for i in notes.each("E103", np.flatnonzero(~spans.of("cache_ref") & (spans.ref_request >= 0))):
        where = notes.place("census", "spans", *spans.at(i))
        notes.add("E103", f"{where} ref_request", str(spans.ref_request[i]), "null: no cache_ref")
    for i in notes.each("E103", np.flatnonzero(spans.external & (spans.ref_request >= 0))):
        where = notes.place("census", "spans", *spans.at(i))
        expected = "null: no request of the run computed it"
        notes.add("E103", f"{where} ref_request", str(spans.ref_request[i]), expected)
    return spans


@dataclass(frozen=True)
class Drops(_Ranges):
    """The drop log of a run."""

    reason: Words
    step: Ints


def read_drops(table: pa.Table, notes: Notes) -> Drops:
    """Return the drops; empty ones and inconsistent events are noted."""
    order, request, start, stop = _sorted_ranges(table, "losses", "drops", "E408", notes)
    event, inverse = np.unique(ints(table, "drop"), return_inverse=True)
    total = np.zeros(len(event), np.int64)
    np.add.at(total, inverse, ints(table, "stop") - ints(table, "start"))
    claimed = ints(table, "n_tokens")
    for i in notes.each("E408", np.flatnonzero(claimed != total[inverse])):
        notes.add(
            "E408",
            f"losses/{notes.run}/drops drop {event[inverse[i]]}",
            f"n_tokens {claimed[i]}",
            f"{total[inverse[i]]}, the positions of the event",
        )
    reason, step = words(table, "drop_reason")[order], ints(table, "step")[order]
    _check_drop_steps(event, inverse, ints(table, "step"), notes)
    back = (request[1:] == request[:-1]) & (step[1:] < step[:-1])
    for i in notes.each("E408", np.flatnonzero(back) + 1):
        place = notes.place("losses", "drops", request[i], start[i], stop[i])
        notes.add("E408", place, f"step {step[i]}", "no earlier step than the drop before")
    return Drops(request, start, stop, reason, step)


def _check_drop_steps(event: Ints, inverse: Ints, step: Ints, notes: Notes) -> None:
    """Note events that name two steps: a step is given up at once, and whole."""
    least, most = np.full(len(event), _LARGEST), np.full(len(event), -1)
    np.minimum.at(least, inverse, step)
    np.maximum.at(most, inverse, step)
    for i in notes.each("E408", np.flatnonzero(least < most)):
        place = f"losses/{notes.run}/drops drop {event[i]}"
        notes.add("E408", place, f"steps {least[i]} to {most[i]}", "one step")


@dataclass(frozen=True)
class Rows:
    """The rows of a run by key, each position once.

    Args:
        keys: uint64 ``(n,)``, sorted and distinct.
        token_id: uint32 ``(n,)``.
        step: index into the census' steps, int32 ``(n,)``, -1 for an unknown step.
        chunk: uint32 ``(n,)``.
        attempt: uint16 ``(n,)``.
        inclusion: float64 ``(n,)``, null NaN; ``None`` where no row has one.
        n_repeated: rows left out because their position has one already.
        per_step: rows per step of the census, int64.
        prefill_per_step: of these, the rows labelled prefill.
    """

    keys: Keys
    token_id: npt.NDArray[np.uint32]
    step: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.uint32]
    attempt: npt.NDArray[np.uint16]
    inclusion: Floats | None
    n_repeated: int
    per_step: Ints
    prefill_per_step: Ints


_Part = tuple[npt.NDArray[Any], ...]
"""The columns of one token table that are kept: the first of ``Rows``, in their order."""
_NO_ROWS: _Part = tuple(
    np.empty(0, kind) for kind in (np.uint64, np.uint32, np.int32, np.uint32, np.uint16)
)


def read_rows(
    token_tables: Iterable[pa.Table], requests: Requests, steps: Steps, notes: Notes
) -> Rows:
    """Return the rows of all token tables, sorted by key; one table is held at a time."""
    parts = [_NO_ROWS]
    mislabelled: list[Keys] = [_NO_ROWS[0]]
    unknown: list[npt.NDArray[np.uint64]] = [_NO_ROWS[0]]
    shares: list[Floats | int] = []
    per_step = np.zeros(len(steps.number), np.int64)
    prefill_per_step = per_step.copy()
    for table in token_tables:
        check_words(table, "phase", tables.PHASES, f"shards (run {notes.run}) tokens", notes)
        request, position = table["request"].to_numpy(), table["position"].to_numpy()
        key = position_key(request, position)
        prefill = pc.equal(table["phase"], "prefill").to_numpy()
        step = table["step"].to_numpy()
        at = steps.index(step)
        unknown += [np.unique(step[at < 0])] if at.min(initial=0) < 0 else []
        _count(per_step, at[at >= 0])
        _count(prefill_per_step, at[(at >= 0) & prefill])
        mislabelled.append(key[_wrong_phase(request, position, prefill, requests)])
        # Copies: a view would keep all columns of the table, which came in one piece of memory.
        token_id, chunk, attempt = (
            table[name].to_numpy().copy() for name in ("token_id", "chunk", "attempt")
        )
        parts.append((key, token_id, at.astype(np.int32), chunk, attempt))
        n_nulls, n = table["inclusion"].null_count, table.num_rows
        shares.append(n if n_nulls == n else floats(table, "inclusion"))
    for step_number in notes.each("E412", np.unique(np.concatenate(unknown))):
        place = f"shards (run {notes.run}) rows of step {step_number}"
        notes.add("E412", place, "an unknown step", "a step of the census")
    phases = of_keys(np.unique(np.concatenate(mislabelled)))
    for place in notes.places("E414", "shards", "rows", phases):
        notes.add(
            "E414", f"{place} phase", "the other phase", "prefill below prompt_len, else decode"
        )
    return _sorted(parts, shares, per_step, prefill_per_step, notes)


def _count(per_step: Ints, at: Ints) -> None:
    """Add the rows of a table to the counts, in a time that follows from the smaller of the two."""
    if len(at) < len(per_step):
        np.add.at(per_step, at, 1)
    else:
        per_step += np.bincount(at, minlength=len(per_step))


def _wrong_phase(
    request: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
    prefill: Bools,
    requests: Requests,
) -> Bools:
    """Return which rows carry the wrong phase; rows of unknown requests are judged elsewhere."""
    if not len(requests.number):
        return np.zeros(len(request), bool)
    at = requests.index(request)
    wrong: Bools = (at >= 0) & ((position < requests.prompt_len[at]) != prefill)
    return wrong


def _joined(shares: list[Floats | int]) -> Floats | None:
    """Return the inclusion of all rows, of which tables without any give their number of rows."""
    if all(isinstance(part, int) for part in shares):
        return None
    parts = [np.full(part, np.nan) if isinstance(part, int) else part for part in shares]
    inclusion: Floats = np.concatenate(parts)
    return inclusion


def _sorted(
    parts: list[_Part],
    shares: list[Floats | int],
    per_step: Ints,
    prefill_per_step: Ints,
    notes: Notes,
) -> Rows:
    """Return the parts joined and sorted; positions with two rows are noted and kept once.

    Each column takes the memory of its parts: they are gone when it is sorted.
    """
    columns: list[list[npt.NDArray[Any]]] = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()
    columns.reverse()
    key = np.concatenate(columns.pop())
    order = np.argsort(key)
    key = key[order]
    again = np.zeros(len(key), bool)
    again[1:] = key[1:] == key[:-1]
    for place in notes.places("E407", "shards", "rows", of_keys(np.unique(key[again]))):
        notes.add("E407", place, "two rows or more", "one row for a position")
    if again.any():
        order, key = order[~again], key[~again]
    token_id, step, chunk, attempt = (np.concatenate(columns.pop())[order] for _ in range(4))
    inclusion = _joined(shares)
    if inclusion is not None:
        inclusion = inclusion[order]
    counts = (int(again.sum()), per_step, prefill_per_step)
    return Rows(key, token_id, step, chunk, attempt, inclusion, *counts)
