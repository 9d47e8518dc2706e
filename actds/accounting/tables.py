"""The tables of a run as numpy columns, sorted, with their own mistakes noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.accounting.intervals import Intervals, Keys, index_in, keys, position_of, request_of
from actds.errors import Finding, Severity
from actds.format import tables

MAX_FINDINGS_PER_CODE = 16
_LARGEST = 2**63 - 1
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Notes:
    """The findings of a run: the first of every code in full, the rest as a count."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._findings: list[Finding] = []
        self._counts: Counter[tuple[str, Severity]] = Counter()

    def add(
        self, code: str, place: str, got: str, expected: str, severity: Severity = "error"
    ) -> None:
        """Note one finding."""
        self._counts[code, severity] += 1
        if self._counts[code, severity] <= MAX_FINDINGS_PER_CODE:
            self._findings.append(Finding(code, place, got, expected, severity))

    def place(
        self, folder: str, table: str, request: Any, start: Any, stop: Any | None = None
    ) -> str:
        """Return the words for positions of a request in a table of the run."""
        where = f"{folder}/{self.run}/{table}" if folder != "shards" else f"shards (run {self.run})"
        what = f"position {start}" if stop is None else f"positions [{start}, {stop})"
        return f"{where} request {request} {what}"

    def places(self, folder: str, table: str, intervals: Intervals) -> Iterator[str]:
        """Yield the words for each interval."""
        for start, stop in zip(intervals.start, intervals.stop, strict=True):
            last = stop - np.uint64(1)
            request, first = int(request_of(start)), int(position_of(start))
            yield self.place(folder, table, request, first, int(position_of(last)) + 1)

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


def words(table: pa.Table, name: str) -> npt.NDArray[np.str_]:
    """Return a string column as numpy strings, null as the empty string."""
    return np.asarray(table[name].fill_null("").to_pylist(), np.str_).reshape(-1)


def check_words(
    table: pa.Table, name: str, allowed: Sequence[str], place: str, notes: Notes
) -> None:
    """Note values of a column that are not of the spec's list."""
    odd = pc.unique(table[name]).to_pylist()
    for word in sorted({repr(word)[:40] for word in odd if word not in allowed}):
        notes.add("E103", f"{place} {name}", word, f"one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Requests:
    """The requests of a run, sorted and distinct; every column int64 ``(n,)``, null -1."""

    request: Ints
    prompt_len: Ints
    own_len: Ints
    """Positions owed at least: P + G - 1, or P when nothing was sampled."""
    skipped: Bools
    cached: Ints
    engine_cached: Ints
    n_preemptions: Ints
    token_digest: list[str | None]


def read_requests(table: pa.Table, notes: Notes) -> Requests:
    """Return the requests; a request that stands twice is noted and counted once."""
    place = f"census/{notes.run}/requests"
    check_words(table, "finish_reason", tables.FINISH_REASONS, place, notes)
    number = ints(table, "request")
    request, first, times = np.unique(number, return_index=True, return_counts=True)
    for i in np.flatnonzero(times > 1):
        notes.add("E405", f"{place} request {request[i]}", f"{times[i]} records", "one record")
    table = table.take(pa.array(first))
    prompt, generated = ints(table, "prompt_len"), ints(table, "generated_len")
    skipped = words(table, "finish_reason") == "skipped"
    for i in np.flatnonzero(skipped & (words(table, "reason") == "")):
        notes.add("E402", f"{place} request {request[i]} reason", "null", "why it was skipped")
    return Requests(
        request,
        prompt,
        np.where(skipped, 0, np.where(generated > 0, prompt + generated - 1, prompt)),
        skipped,
        ints(table, "cached_tokens"),
        ints(table, "engine_cached_tokens"),
        ints(table, "n_preemptions"),
        table["token_digest"].to_pylist(),
    )


@dataclass(frozen=True)
class Steps:
    """The steps of a run, sorted and distinct; every column int64 ``(n,)``."""

    step: Ints
    batch: Ints
    prefill: Ints
    decode: Ints
    captured: Ints
    recomputed: Ints
    dropped: Ints
    aborted: Ints
    filtered: Ints

    def index(self, step: Ints) -> Ints:
        """Return where each step stands, -1 for a step that the census does not know."""
        return index_in(self.step, step)

    def sums(self, step: Ints, amount: Ints) -> Ints:
        """Return the sum of the amounts per step of the census; unknown steps are left out."""
        at = self.index(step)
        known = at >= 0
        total = np.zeros(len(self.step), np.int64)
        np.add.at(total, at[known], amount[known])
        return total


def read_steps(table: pa.Table, notes: Notes) -> Steps:
    """Return the steps; a step that stands twice is noted and counted once."""
    step, first, times = np.unique(ints(table, "step"), return_index=True, return_counts=True)
    for i in np.flatnonzero(times > 1):
        place = f"census/{notes.run}/steps step {step[i]}"
        notes.add("E412", place, f"{times[i]} records", "one record")
    table = table.take(pa.array(first))
    kinds = ("batch", "prefill", "decode", "captured", "recomputed", "dropped", "aborted")
    return Steps(step, *(ints(table, f"{kind}_tokens") for kind in (*kinds, "filtered")))


@dataclass(frozen=True)
class Spans:
    """The spans of a run, sorted by request and start; columns ``(n,)``, null -1 or empty."""

    request: Ints
    start: Ints
    stop: Ints
    disposition: npt.NDArray[np.int8]
    reason: npt.NDArray[np.str_]
    step: Ints
    ref_request: Ints

    @property
    def start_key(self) -> Keys:
        """Return the key of each first position."""
        return keys(self.request, self.start)

    @property
    def stop_key(self) -> Keys:
        """Return the key after each last position."""
        return keys(self.request, self.stop)

    def of(self, disposition: str) -> Bools:
        """Return which spans have a disposition."""
        which: Bools = self.disposition == tables.DISPOSITIONS.index(disposition)
        return which

    def referenced(self, which: Bools | Ints) -> tuple[Keys, Keys]:
        """Return the keys that cache references name: first, and after the last."""
        request = self.ref_request[which]
        return keys(request, self.start[which]), keys(request, self.stop[which])


def read_spans(table: pa.Table, requests: Requests, notes: Notes) -> Spans:
    """Return the spans; empty ones and unexplained losses are noted."""
    place = f"census/{notes.run}/spans"
    check_words(table, "disposition", tables.DISPOSITIONS, place, notes)
    kind = pc.index_in(table["disposition"], pa.array(tables.DISPOSITIONS)).fill_null(-1)
    request, start, stop = (ints(table, name) for name in ("request", "start", "stop"))
    for i in np.flatnonzero(start >= stop):
        notes.add("E405", notes.place("census", "spans", request[i], start[i], stop[i]),
                  "an empty span", "at least one position")  # fmt: skip
    order = np.lexsort((stop, start, request))
    order = order[start[order] < stop[order]]
    spans = Spans(
        request[order],
        start[order],
        stop[order],
        kind.to_numpy().astype(np.int8)[order],
        words(table, "reason")[order],
        ints(table, "step")[order],
        ints(table, "ref_request")[order],
    )
    lost = spans.of("dropped") | spans.of("aborted") | spans.of("filtered")
    for i in np.flatnonzero(lost & (spans.reason == "")):
        where = notes.place("census", "spans", spans.request[i], spans.start[i], spans.stop[i])
        notes.add("E402", f"{where} reason", "null", "why the positions have no row")
    for i in np.flatnonzero(~lost & (spans.reason != "")):
        where = notes.place("census", "spans", spans.request[i], spans.start[i], spans.stop[i])
        notes.add("E402", f"{where} reason", str(spans.reason[i])[:40], "null: nothing was lost")
    for i in np.flatnonzero(~spans.of("cache_ref") & (spans.ref_request >= 0)):
        where = notes.place("census", "spans", spans.request[i], spans.start[i], spans.stop[i])
        notes.add("E103", f"{where} ref_request", str(spans.ref_request[i]), "null: no cache_ref")
    return spans


@dataclass(frozen=True)
class Drops:
    """The drop log of a run, sorted by request and start; columns ``(n,)``."""

    request: Ints
    start: Ints
    stop: Ints
    reason: npt.NDArray[np.str_]
    step: Ints

    @property
    def start_key(self) -> Keys:
        """Return the key of each first position."""
        return keys(self.request, self.start)

    @property
    def stop_key(self) -> Keys:
        """Return the key after each last position."""
        return keys(self.request, self.stop)


def read_drops(table: pa.Table, notes: Notes) -> Drops:
    """Return the drops; empty ones, and events that do not add up, are noted."""
    request, start, stop = (ints(table, name) for name in ("request", "start", "stop"))
    for i in np.flatnonzero(start >= stop):
        notes.add("E408", notes.place("losses", "drops", request[i], start[i], stop[i]),
                  "an empty drop", "at least one position")  # fmt: skip
    event, inverse = np.unique(ints(table, "drop"), return_inverse=True)
    total = np.zeros(len(event), np.int64)
    np.add.at(total, inverse, stop - start)
    claimed = ints(table, "n_tokens")
    for i in np.flatnonzero(claimed != total[inverse]):
        notes.add(
            "E408",
            f"losses/{notes.run}/drops drop {event[inverse[i]]}",
            f"n_tokens {claimed[i]}",
            f"{total[inverse[i]]}, the positions of the event",
        )
    order = np.lexsort((stop, start, request))
    order = order[start[order] < stop[order]]
    return Drops(
        request[order],
        start[order],
        stop[order],
        words(table, "drop_reason")[order],
        ints(table, "step")[order],
    )
