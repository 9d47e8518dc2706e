"""The rows of a run as sorted columns, and whether their labels agree with the census."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.accounting.records import Bools, Ints, Notes, Requests, Spans, Steps, check_words
from actds.format import tables
from actds.format.positions import Keys, of_keys, position_key, split_key

COLUMNS = ["request", "position", "token_id", "phase", "step", "attempt", "chunk"]
"""The columns of a token table that accounting reads."""


@dataclass(frozen=True)
class Rows:
    """The rows of a run by key, each position once.

    Args:
        keys: uint64 ``(n,)``, sorted and distinct.
        token_id: uint32 ``(n,)``.
        step: index into the census' steps, int32 ``(n,)``, -1 for an unknown step.
        chunk: uint32 ``(n,)``.
        attempt: uint16 ``(n,)``.
        n_repeated: rows left out because their position has one already.
        per_step: rows per step of the census, int64.
        prefill_per_step: of these, the rows labelled prefill.
    """

    keys: Keys
    token_id: npt.NDArray[np.uint32]
    step: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.uint32]
    attempt: npt.NDArray[np.uint16]
    n_repeated: int
    per_step: Ints
    prefill_per_step: Ints


@dataclass(frozen=True)
class _Part:
    """The columns of one token table that are kept."""

    key: Keys
    token_id: npt.NDArray[np.uint32]
    step: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.uint32]
    attempt: npt.NDArray[np.uint16]


def collect(
    token_tables: Iterable[pa.Table], requests: Requests, steps: Steps, notes: Notes
) -> Rows:
    """Return the rows of all token tables, sorted by key; one table is held at a time."""
    parts: list[_Part] = []
    mislabelled: list[Keys] = []
    unknown: list[npt.NDArray[np.uint64]] = []
    per_step = np.zeros(len(steps.step), np.int64)
    prefill_per_step = per_step.copy()
    for table in token_tables:
        check_words(table, "phase", tables.PHASES, f"shards (run {notes.run}) tokens", notes)
        request, position = table["request"].to_numpy(), table["position"].to_numpy()
        key = position_key(request, position)
        prefill = pc.equal(table["phase"], "prefill").to_numpy()
        step = table["step"].to_numpy()
        at = steps.index(step)
        unknown.append(np.unique(step[at < 0]))
        per_step += np.bincount(at[at >= 0], minlength=len(per_step))
        prefill_per_step += np.bincount(at[(at >= 0) & prefill], minlength=len(per_step))
        mislabelled.append(key[_wrong_phase(request, position, prefill, requests)])
        parts.append(
            _Part(
                key,
                table["token_id"].to_numpy(),
                at.astype(np.int32),
                table["chunk"].to_numpy(),
                table["attempt"].to_numpy(),
            )
        )
    for step_number in np.unique(np.concatenate(unknown)) if unknown else []:
        place = f"shards (run {notes.run}) rows of step {step_number}"
        notes.add("E412", place, "an unknown step", "a step of the census")
    wrong = np.unique(np.concatenate(mislabelled)) if mislabelled else np.empty(0, np.uint64)
    for place in notes.places("shards", "rows", of_keys(wrong)):
        notes.add(
            "E414", f"{place} phase", "the other phase", "prefill below prompt_len, else decode"
        )
    return _sorted(parts, per_step, prefill_per_step, notes)


def _wrong_phase(
    request: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
    prefill: Bools,
    requests: Requests,
) -> Bools:
    """Return which rows carry the wrong phase; rows of unknown requests are judged elsewhere."""
    if not len(requests.request):
        return np.zeros(len(request), bool)
    at = requests.index(request)
    wrong: Bools = (at >= 0) & ((position < requests.prompt_len[at]) != prefill)
    return wrong


def _sorted(parts: list[_Part], per_step: Ints, prefill_per_step: Ints, notes: Notes) -> Rows:
    """Return the parts joined and sorted; positions with two rows are noted and kept once."""
    key = _join([part.key for part in parts], np.uint64)
    n_rows = len(key)
    order = np.argsort(key)
    key = key[order]
    again = np.zeros(n_rows, bool)
    again[1:] = key[1:] == key[:-1]
    for place in notes.places("shards", "rows", of_keys(np.unique(key[again]))):
        notes.add("E407", place, "two rows or more", "one row for a position")
    if again.any():
        order, key = order[~again], key[~again]
    return Rows(
        key,
        _join([part.token_id for part in parts], np.uint32)[order],
        _join([part.step for part in parts], np.int32)[order],
        _join([part.chunk for part in parts], np.uint32)[order],
        _join([part.attempt for part in parts], np.uint16)[order],
        n_rows - len(key),
        per_step,
        prefill_per_step,
    )


def _join(parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def label_findings(rows: Rows, spans: Spans, steps: Steps, notes: Notes) -> None:
    """Note rows whose step, chunk or attempt cannot be that of their position.

    Within a request a later position is first computed in the same step or a later one; chunk
    and attempt count the same history. Rows of one step share their chunk.
    """
    request, position = split_key(rows.keys)
    same = request[1:] == request[:-1]
    later = rows.step[1:] > rows.step[:-1]
    back = same & (rows.step[1:] < rows.step[:-1]) & (rows.step[1:] >= 0)
    chunk = same & ((rows.chunk[1:] > rows.chunk[:-1]) != later) & ~back
    chunk |= same & (rows.chunk[1:] < rows.chunk[:-1])
    attempt = same & (rows.attempt[1:] < rows.attempt[:-1])
    for label, wrong, expected in (
        ("step", back, "no earlier step than the position before"),
        ("chunk", chunk, "a chunk that grows exactly where the step does"),
        ("attempt", attempt, "no earlier attempt than the position before"),
    ):
        for i in np.flatnonzero(wrong) + 1:
            place = notes.place("shards", "rows", request[i], position[i])
            got = steps.step[rows.step[i]] if label == "step" else getattr(rows, label)[i]
            notes.add("E414", f"{place} {label}", str(got), expected)
    captured = np.flatnonzero(spans.of("captured") & (spans.step >= 0))
    if not len(rows.keys) or not len(captured) or not len(steps.step):
        return
    start = spans.start_key[captured]
    at = np.minimum(np.searchsorted(rows.keys, start), len(rows.keys) - 1)
    stored = np.where(rows.step[at] >= 0, steps.step[rows.step[at]], -1)
    wrong = (rows.keys[at] == start) & (stored >= 0) & (stored != spans.step[captured])
    for i in np.flatnonzero(wrong):
        span = captured[i]
        place = notes.place("shards", "rows", spans.request[span], spans.start[span])
        notes.add("E414", f"{place} step", str(stored[i]), f"{spans.step[span]}, as in the census")


def token_findings(rows: Rows, requests: Requests, spans: Spans, notes: Notes) -> None:
    """Note requests whose token ids, as far as all of them are stored, miss their digest."""
    begin = np.searchsorted(rows.keys, position_key(requests.request, 0))
    end = np.searchsorted(rows.keys, position_key(requests.request, requests.own_len))
    references = np.flatnonzero(spans.of("cache_ref") & (spans.ref_request >= 0))
    first = np.searchsorted(spans.request[references], requests.request, side="left")
    last = np.searchsorted(spans.request[references], requests.request, side="right")
    for i, digest in enumerate(requests.token_digest):
        length = int(requests.own_len[i])
        if digest is None or not length:
            continue
        own = slice(int(begin[i]), int(end[i]))
        if own.stop - own.start == length:
            ids: npt.NDArray[np.uint32] | None = rows.token_id[own]
        else:
            ids = _with_references(rows, own, length, spans, references[first[i] : last[i]])
        if ids is None:
            continue
        got = hashlib.sha256(np.ascontiguousarray(ids, "<u4").data).hexdigest()
        if got != digest:
            notes.add(
                "E414",
                f"shards (run {notes.run}) request {requests.request[i]} token_id",
                f"ids of digest {got[:16]}...",
                f"{digest[:16]}..., the census' token_digest",
            )


def _with_references(
    rows: Rows, own: slice, length: int, spans: Spans, references: Ints
) -> npt.NDArray[np.uint32] | None:
    """Return the ids of a request from its rows and those it refers to; None when some lack."""
    ids = np.zeros(length, np.uint32)
    held = np.zeros(length, bool)
    position = split_key(rows.keys[own])[1]
    ids[position], held[position] = rows.token_id[own], True
    starts, stops = spans.referenced(references)
    for start, stop, a, b in zip(
        starts, stops, spans.start[references], spans.stop[references], strict=True
    ):
        at, to = (int(x) for x in np.searchsorted(rows.keys, [start, stop]))
        if to - at != b - a or b > length:
            return None
        ids[a:b], held[a:b] = rows.token_id[at:to], True
    return ids if held.all() else None
