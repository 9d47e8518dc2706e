"""Accounting: every position of a run is captured, referenced, lost or filtered, exactly once.

The census (requests, steps, spans) and the writer (rows, drops) record one run independently.
They must agree position by position: sums alone do not show two swapped rows or a moved drop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.columns import (
    Drops,
    Notes,
    Requests,
    Rows,
    Spans,
    Steps,
    read_drops,
    read_requests,
    read_rows,
    read_spans,
    read_steps,
)
from actds.dataset.drawn import Shares, check_drawn
from actds.dataset.marks import Marks
from actds.dataset.multiplicity import multiplicity
from actds.errors import Finding
from actds.format import tables
from actds.format.inclusion import Design
from actds.format.interventions import Intervention
from actds.format.positions import (
    Intervals,
    Ints,
    difference,
    of_keys,
    overlap,
    position_key,
    split_key,
    union,
)

TOTALS = (
    "rows",
    "requests",
    "scheduled",
    *tables.DISPOSITIONS,
    "recomputed",
    "rejected",
    "unresolved",
    "external",
)
"""Names of the totals of a run, and of a seal, which sums them over its runs."""

_STEP_DISPOSITIONS = ("captured", "dropped", "aborted", "filtered", "undelivered", "thinned")
_MAX_REASONS = 256
_MAX_REFERENCED, _MAX_REFERENCED_RATIO = 2**28, 4096
"""Positions of references whose tokens are hashed, and further ones for each row."""
_NO_END = np.iinfo(np.int64).max
_DIGESTS = 1 << 14


@dataclass(frozen=True)
class Account:
    """What became of every position of a run.

    Args:
        findings: the mismatches; empty, or of severity ``warning``, in a conforming run.
        totals: positions by the names of ``TOTALS``.
        multiplicity: the table ``multiplicity`` that the references imply.
    """

    findings: list[Finding]
    totals: dict[str, int]
    multiplicity: pa.Table


class Moved(NamedTuple):
    """Positions of requests that were redacted, by what they were before."""

    captured: int = 0
    cache_ref: int = 0


def account(
    run: str,
    requests: pa.Table,
    steps: pa.Table,
    spans: pa.Table,
    drops: pa.Table,
    rows: Iterable[pa.Table],
    design: Design | None = None,
    aside: Mapping[tables.TableName, pa.Table] | None = None,
    interventions: Sequence[Intervention] = (),
) -> Account:
    """Return the account of one run: exact to the position, by disposition, reason and step.

    Args:
        run: the run, for places and the multiplicity table.
        requests: the census table of that name.
        steps: the census table of that name.
        spans: the census table of that name.
        drops: the writer's table of that name; empty when nothing was dropped.
        rows: the token tables of the run's shards, as for ``Census.account``.
        design: how rows were drawn, as the run record says; ``None``: every row is stored.
        aside: the census tables that the rules of the design and the marks of interventions
            follow from, with the columns of ``drawn.columns_of``.
        interventions: those of the run record.

    Spec: 0.1 section 7.
    """
    return Census(run, requests, steps, spans, drops).account(rows, design, aside, interventions)


class Census:
    """The census and the drop log of a run, read once; of the tables only columns are kept.

    Args: those of ``account``, of which the columns of ``COLUMNS`` are read.
    """

    def __init__(
        self, run: str, requests: pa.Table, steps: pa.Table, spans: pa.Table, drops: pa.Table
    ) -> None:
        self.notes = Notes(run)
        self.requests = read_requests(requests, self.notes)
        self.steps = read_steps(steps, self.notes)
        self.spans = read_spans(spans, self.notes)
        self.drops = read_drops(drops, self.notes)

    def redacted(self, requests: Collection[int]) -> Moved:
        """Return how many positions of redacted requests were captured, and referred to rows."""
        spans = self.spans
        of = spans.of("filtered") & (spans.reason == tables.REDACTED)
        of &= np.isin(spans.request, np.array(sorted(requests), np.int64))
        length, computed = spans.stop - spans.start, spans.step >= 0
        return Moved(int(length[of & computed].sum()), int(length[of & ~computed].sum()))

    def account(
        self,
        rows: Iterable[pa.Table],
        design: Design | None = None,
        aside: Mapping[tables.TableName, pa.Table] | None = None,
        interventions: Sequence[Intervention] = (),
        redacted: Collection[int] = (),
    ) -> Account:
        """Return the account of the rows of some shards, which have to be all of the run.

        Args:
            rows: the token tables, taken one at a time; about 30 bytes per row are kept.
            design: as for ``account``; ``aside`` and ``interventions`` likewise.
            redacted: requests whose rows and lines are gone (section 8.6).
        """
        shares, requests = None, self.requests
        if design is not None:
            shares = Shares.of(design, requests.index, requests.prompt_len, aside or {}, redacted)
        marks = Marks.of(interventions, aside or {})
        return _account(self, rows, shares, marks, self.notes.copy())


def _account(
    census: Census, rows: Iterable[pa.Table], shares: Shares | None, marks: Marks, notes: Notes
) -> Account:
    request_table, step_table = census.requests, census.steps
    span_table, drop_table = census.spans, census.drops
    row_table = read_rows(marks.checked(rows, notes), request_table, step_table, notes)

    _partition(request_table, span_table, notes)
    captured = _rows_against_spans(row_table, span_table, notes)
    _drops_against_spans(drop_table, span_table, step_table, notes)
    _steps_against_sums(step_table, span_table, row_table, notes)
    _span_steps(span_table, step_table, notes)
    _past_the_end(request_table, span_table, notes)
    _cached_counts(request_table, span_table, notes)
    unresolved = _references(span_table, request_table, captured, notes)
    _row_labels(row_table, span_table, step_table, notes)
    _attempts(row_table, request_table, span_table, notes)
    _token_digests(row_table, request_table, span_table, notes)
    check_drawn(shares, row_table, span_table, step_table, notes)

    lengths = span_table.stop - span_table.start
    totals = {
        "rows": len(row_table.keys) + row_table.n_repeated,
        "requests": len(request_table.number),
        "scheduled": int(step_table.batch.sum()),
        "recomputed": int(step_table.recomputed.sum()),
        "rejected": int(step_table.rejected.sum()),
        "unresolved": unresolved,
        "external": int(lengths[span_table.external].sum()),
    }
    for disposition in tables.DISPOSITIONS:
        totals[disposition] = int(lengths[span_table.of(disposition)].sum())
    references = span_table.of("cache_ref") & (span_table.ref_request >= 0)
    ref_start, ref_stop = span_table.referenced(references)
    return Account(
        notes.findings(),
        {name: totals[name] for name in TOTALS},
        multiplicity(notes.run, captured, ref_start, ref_stop),
    )


def _partition(requests: Requests, spans: Spans, notes: Notes) -> None:
    """Check that the spans of each request partition ``[0, N)``."""
    computed = spans.step >= 0
    at = requests.index(spans.request[computed])
    known = at >= 0
    n = requests.own_len.copy()
    np.maximum.at(n, at[known], spans.stop[computed][known])
    n[requests.unserved] = 0
    owing = requests.number[n > 0]
    owed = Intervals(position_key(owing, 0), position_key(owing, n[n > 0]))
    covered = union(spans.start_key, spans.stop_key)
    for place in notes.places("E404", "census", "spans", difference(owed, covered)):
        notes.add("E404", place, "no span", "one span for every position")
    for place in notes.places("E405", "census", "spans", overlap(spans.start_key, spans.stop_key)):
        notes.add("E405", place, "two spans or more", "one span for every position")
    for place in notes.places("E405", "census", "spans", difference(covered, owed)):
        notes.add("E405", place, "a span", "no span: the request has no such position")


def _rows_against_spans(rows: Rows, spans: Spans, notes: Notes) -> Intervals:
    """Check that the rows are exactly the captured positions; return the rows as intervals."""
    captured = spans.of("captured")
    census = union(spans.start_key[captured], spans.stop_key[captured])
    stored = of_keys(rows.keys)
    for place in notes.places("E406", "shards", "rows", difference(stored, census)):
        notes.add("E406", place, "a row", "no row: the census does not call it captured")
    for place in notes.places("E406", "shards", "rows", difference(census, stored)):
        notes.add("E406", place, "no row", "a row: the census calls it captured")
    return stored


def _drops_against_spans(drops: Drops, spans: Spans, steps: Steps, notes: Notes) -> None:
    """Check the drop log against the dropped spans, both ways, by reason and by step."""
    for place in notes.places("E408", "losses", "drops", overlap(drops.start_key, drops.stop_key)):
        notes.add("E408", place, "dropped twice", "one drop for a position")
    dropped = spans.of("dropped")
    reasons = sorted(set(drops.reason.tolist()) | set(spans.reason[dropped].tolist()))
    if len(reasons) > _MAX_REASONS:
        got, expected = f"{len(reasons)} reasons", f"at most {_MAX_REASONS} in a run"
        notes.add("E408", f"losses/{notes.run}/drops drop_reason", got, expected)
    for reason in reasons[:_MAX_REASONS]:
        logged, counted = drops.reason == reason, dropped & (spans.reason == reason)
        log = union(drops.start_key[logged], drops.stop_key[logged])
        census = union(spans.start_key[counted], spans.stop_key[counted])
        for place in notes.places("E408", "losses", "drops", difference(log, census)):
            notes.add("E408", place, f"a drop for {reason}", "a dropped span of that reason")
        for place in notes.places("E408", "census", "spans", difference(census, log)):
            notes.add("E408", place, f"dropped for {reason}", "a drop of that reason in the log")
    _drop_steps(drops, spans, steps, notes)


def _drop_steps(drops: Drops, spans: Spans, steps: Steps, notes: Notes) -> None:
    """Check the steps that drops name: against spans, and as many tokens as the step lost."""
    dropped = np.flatnonzero(spans.of("dropped") & (spans.step >= 0))
    at = np.searchsorted(drops.start_key, spans.start_key[dropped], side="right") - 1
    logged = at >= 0
    logged[logged] = drops.stop_key[at[logged]] > spans.start_key[dropped][logged]
    at, dropped = at[logged], dropped[logged]
    for i in notes.each("E408", np.flatnonzero(drops.step[at] != spans.step[dropped])):
        span = dropped[i]
        notes.add(
            "E408",
            notes.place("losses", "drops", spans.request[span], spans.start[span]),
            f"step {drops.step[at[i]]}",
            f"step {spans.step[span]}, as in the census",
        )
    lost = steps.sums(drops.step, drops.stop - drops.start)
    for i in notes.each("E408", np.flatnonzero(lost != steps.dropped)):
        notes.add(
            "E408",
            f"losses/{notes.run} drops step {steps.number[i]}",
            f"{lost[i]} tokens",
            f"{steps.dropped[i]}, the census' dropped_tokens of the step",
        )
    unknown = np.flatnonzero(steps.index(drops.step) < 0)
    for i in notes.each("E408", unknown):
        place = notes.place("losses", "drops", drops.request[i], drops.start[i])
        notes.add("E408", place, f"step {drops.step[i]}", "a step of the census")


def _steps_against_sums(steps: Steps, spans: Spans, rows: Rows, notes: Notes) -> None:
    """Check the compute identity of each step, and its sums against spans and rows."""
    parts = {name: getattr(steps, name) for name in _STEP_DISPOSITIONS}
    total = sum(parts.values()) + steps.recomputed + steps.rejected
    for i in notes.each("E409", np.flatnonzero(total != steps.batch)):
        notes.add(
            "E409",
            f"census/{notes.run}/steps step {steps.number[i]}",
            f"{steps.batch[i]} tokens scheduled",
            f"{total[i]}, the sum of what became of them",
        )
    for i in notes.each("E409", np.flatnonzero(steps.prefill + steps.decode != steps.batch)):
        notes.add(
            "E409",
            f"census/{notes.run}/steps step {steps.number[i]}",
            f"{steps.prefill[i]} prefill and {steps.decode[i]} decode tokens",
            f"{steps.batch[i]} together, the tokens scheduled",
        )
    drafted, accepted = steps.drafted, steps.accepted
    odd = (accepted > drafted) | (drafted > accepted + steps.rejected)
    for i in notes.each("E409", np.flatnonzero(odd & (drafted >= 0) & (accepted >= 0))):
        notes.add(
            "E409",
            f"census/{notes.run}/steps step {steps.number[i]}",
            f"{drafted[i]} drafted and {accepted[i]} accepted tokens",
            f"what is not accepted among the {steps.rejected[i]} rejected tokens",
        )
    computed = spans.step >= 0
    for name, counts in parts.items():
        length = int((spans.stop - spans.start)[spans.of(name) & computed].sum())
        if length != int(counts.sum()):
            notes.add(
                "E409",
                f"census/{notes.run}/steps {name}_tokens",
                f"{int(counts.sum())} over all steps",
                f"{length}, the length of the {name} spans with a step",
            )
    n_rows = rows.per_step
    for i in notes.each("E412", np.flatnonzero(n_rows != steps.captured)):
        notes.add(
            "E412",
            f"shards (run {notes.run}) rows of step {steps.number[i]}",
            f"{n_rows[i]} rows",
            f"{steps.captured[i]}, the census' captured_tokens",
        )
    for name, stored, most in (
        ("prefill", rows.prefill_per_step, steps.prefill),
        ("decode", n_rows - rows.prefill_per_step, steps.decode),
    ):
        for i in notes.each("E412", np.flatnonzero((stored > most) & (n_rows <= steps.captured))):
            notes.add(
                "E412",
                f"shards (run {notes.run}) rows of step {steps.number[i]}",
                f"{stored[i]} {name} rows",
                f"at most {most[i]}, the census' {name}_tokens",
            )


def _span_steps(spans: Spans, steps: Steps, notes: Notes) -> None:
    """Check that the step of each span exists, computed its kind, and never runs backwards."""
    named = spans.step >= 0
    needed = spans.of("captured") | spans.of("dropped") | spans.of("undelivered")
    needed |= spans.of("thinned")
    for wrong, got, expected in (
        (needed & ~named, "step null", "the step that computed the position"),
        (spans.of("cache_ref") & named, "a step", "null: this request never computed it"),
        (named & (steps.index(spans.step) < 0), "an unknown step", "a step of the census"),
    ):
        for i in notes.each("E412", np.flatnonzero(wrong)):
            place = notes.place("census", "spans", spans.request[i], spans.start[i])
            notes.add("E412", f"{place} step", got, expected)
    for disposition in _STEP_DISPOSITIONS:
        chosen, counts = named & spans.of(disposition), getattr(steps, disposition)
        beginning = steps.sums(spans.step[chosen], np.ones(int(chosen.sum()), np.int64))
        for i in notes.each("E412", np.flatnonzero(beginning > counts)):
            notes.add(
                "E412",
                f"census/{notes.run}/spans step {steps.number[i]}",
                f"{beginning[i]} {disposition} spans begin in the step",
                f"at most its {counts[i]} {disposition} tokens",
            )
    order = np.flatnonzero(spans.step >= 0)
    back = np.flatnonzero(
        (spans.request[order][1:] == spans.request[order][:-1])
        & (spans.step[order][1:] < spans.step[order][:-1])
    )
    for i in notes.each("E412", order[back + 1]):
        place = notes.place("census", "spans", spans.request[i], spans.start[i])
        notes.add("E412", place, f"step {spans.step[i]}", "no earlier step than the span before")


def _past_the_end(requests: Requests, spans: Spans, notes: Notes) -> None:
    """Check that what was computed past the end of a request is undelivered, and nothing else."""
    if not len(requests.number):
        return
    at = requests.index(spans.request)
    own_end = np.where(at >= 0, requests.own_len[at], _NO_END)
    own_end[~requests.ended[at] | (at < 0)] = _NO_END
    late = spans.of("undelivered")
    delivered = (spans.step >= 0) & ~late & ~spans.of("filtered")
    for wrong, got, expected in (
        (late & (spans.start < own_end), "undelivered", "another disposition before the end"),
        (delivered & (spans.stop > own_end), "another disposition", "undelivered past the end"),
    ):
        for i in notes.each("E419", np.flatnonzero(wrong)):
            place = notes.place("census", "spans", *spans.at(i))
            word = "" if late[i] else f": {tables.DISPOSITIONS[spans.disposition[i]]}"
            notes.add("E419", place, f"{got}{word}", f"{expected}, position {own_end[i]}")


def _cached_counts(requests: Requests, spans: Spans, notes: Notes) -> None:
    """Check the hits at first admission against the spans from 0 and the engine's own count."""
    # A rule may leave out what was never computed here: a hit too, but no reference.
    referenced = spans.of("cache_ref") | (spans.of("filtered") & (spans.step < 0))
    hits = union(spans.start_key[referenced], spans.stop_key[referenced])
    zero = position_key(requests.number, 0)
    at = np.searchsorted(hits.start, zero)
    leading = np.zeros(len(zero), np.int64)
    is_hit = at < len(hits)
    is_hit[is_hit] = hits.start[at[is_hit]] == zero[is_hit]
    leading[is_hit] = (hits.stop[at[is_hit]] - zero[is_hit]).astype(np.int64)
    for i in notes.each("E411", np.flatnonzero(leading != requests.cached)):
        notes.add(
            "E411",
            f"census/{notes.run}/requests request {requests.number[i]}",
            f"cached_tokens {requests.cached[i]}",
            f"{leading[i]}, the cache_ref and uncomputed filtered positions from 0",
        )
    engine = requests.engine_cached
    for i in notes.each("E411", np.flatnonzero((engine >= 0) & (engine != requests.cached))):
        notes.add(
            "E411",
            f"census/{notes.run}/requests request {requests.number[i]}",
            f"cached_tokens {requests.cached[i]}",
            f"{engine[i]}, as the engine reported",
        )


def _impossible_references(spans: Spans, requests: Requests, notes: Notes) -> None:
    """Note references to what the other request was served as well, or has of another model.

    Who refers to a reference has to name its original, so references have no cycle.
    """
    served = spans.of("cache_ref")
    theirs = union(spans.start_key[served], spans.stop_key[served])
    named = np.flatnonzero(served & (spans.ref_request >= 0))
    start, stop = spans.referenced(named)
    first = np.searchsorted(theirs.stop, start, side="right")
    last = np.searchsorted(theirs.start, stop, side="left")
    at, to = requests.index(spans.request[named]), requests.index(spans.ref_request[named])
    known = (at >= 0) & (to >= 0)
    foreign = np.zeros(len(named), bool)
    foreign[known] = requests.adapter[at[known]] != requests.adapter[to[known]]
    for wrong, got, expected in (
        (first < last, "was served them too", "one that computed them"),
        (foreign, "has another adapter", "one of the same adapter"),
    ):
        for i in notes.each("E410", named[np.flatnonzero(wrong)]):
            place = notes.place("census", "spans", *spans.at(i))
            notes.add("E410", place, f"request {spans.ref_request[i]}, which {got}", expected)


def _references(spans: Spans, requests: Requests, captured: Intervals, notes: Notes) -> int:
    """Check references; return how many positions refer to no row, which is a warning.

    One to a thinned position is none of them: its row was not drawn, which is no loss.
    """
    _impossible_references(spans, requests, notes)
    nowhere = spans.of("cache_ref") & (spans.ref_request < 0) & ~spans.external
    unresolved = int((spans.stop - spans.start)[nowhere].sum())
    for i in notes.each("E410", np.flatnonzero(nowhere), "warning"):
        place = notes.place("census", "spans", *spans.at(i))
        notes.add("E410", place, "no reference", "a request with rows there", "warning")
    named = np.flatnonzero(spans.of("cache_ref") & (spans.ref_request >= 0))
    start, stop = spans.referenced(named)
    missing = (stop - start).astype(np.int64)
    thinned = spans.of("thinned")
    for kept in (captured, union(spans.start_key[thinned], spans.stop_key[thinned])):
        missing -= kept.n_below(stop) - kept.n_below(start)
    for i in notes.each("E410", np.flatnonzero(missing), "warning"):
        span = named[i]
        place = notes.place("census", "spans", *spans.at(span))
        notes.add(
            "E410",
            place,
            f"{missing[i]} positions that request {spans.ref_request[span]} has no row of",
            "a row for each",
            "warning",
        )
    return unresolved + int(missing.sum())


def _row_labels(rows: Rows, spans: Spans, steps: Steps, notes: Notes) -> None:
    """Note rows whose step, chunk or attempt cannot be that of their position.

    Within a request a later position is first computed in the same step or a later one; chunk
    and attempt count the same history. Rows of one step share their chunk.
    """
    request = (rows.keys >> np.uint64(32)).astype(np.uint32)
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
        for i in notes.each("E414", np.flatnonzero(wrong) + 1):
            place = notes.place("shards", "rows", *split_key(rows.keys[i]))
            got = steps.number[rows.step[i]] if label == "step" else getattr(rows, label)[i]
            notes.add("E414", f"{place} {label}", str(got), expected)
    captured = np.flatnonzero(spans.of("captured") & (spans.step >= 0))
    if not len(rows.keys) or not len(captured) or not len(steps.number):
        return
    start = spans.start_key[captured]
    at = np.minimum(np.searchsorted(rows.keys, start), len(rows.keys) - 1)
    stored = np.where(rows.step[at] >= 0, steps.number[rows.step[at]], -1)
    wrong = (rows.keys[at] == start) & (stored >= 0) & (stored != spans.step[captured])
    for i in notes.each("E414", np.flatnonzero(wrong)):
        span = captured[i]
        place = notes.place("shards", "rows", spans.request[span], spans.start[span])
        notes.add("E414", f"{place} step", str(stored[i]), f"{spans.step[span]}, as in the census")


def _attempts(rows: Rows, requests: Requests, spans: Spans, notes: Notes) -> None:
    """Note rows after more restarts than their request had; a failed load restarts one as well."""
    if not len(requests.number):
        return
    again = np.flatnonzero(rows.attempt)
    request, position = split_key(rows.keys[again])
    at, attempt = requests.index(request), rows.attempt[again]
    failed = spans.request[spans.of("dropped") & (spans.reason == tables.FAILED_LOAD)]
    above = (at >= 0) & (attempt > requests.n_preemptions[at]) & ~np.isin(request, failed)
    for i in notes.each("E414", np.flatnonzero(above)):
        place = notes.place("shards", "rows", request[i], position[i])
        most = f"at most {requests.n_preemptions[at[i]]}, the census' n_preemptions"
        notes.add("E414", f"{place} attempt", str(attempt[i]), most)


def _token_digests(rows: Rows, requests: Requests, spans: Spans, notes: Notes) -> None:
    """Note requests whose token ids, as far as all of them are stored, miss their digest."""
    begin = np.searchsorted(rows.keys, position_key(requests.number, 0))
    end = np.searchsorted(rows.keys, position_key(requests.number, requests.own_len))
    length = requests.own_len
    digested = (length > 0) & pc.is_valid(requests.token_digest).to_numpy()
    whole = digested & (end - begin == length)
    partly = np.flatnonzero(digested & ~whole)
    references = np.flatnonzero(spans.of("cache_ref") & (spans.ref_request >= 0))
    first, last = (
        np.searchsorted(spans.request[references], requests.number[partly], side=side)
        for side in ("left", "right")
    )
    below = np.concatenate([[0], np.cumsum((spans.stop - spans.start)[references])])
    n_known = (end - begin)[partly] + below[last] - below[first]
    room = _MAX_REFERENCED + _MAX_REFERENCED_RATIO * len(rows.keys) - np.cumsum(length[partly])
    # Of the others some tokens are not stored.
    known = whole.copy()
    known[partly] = (n_known >= length[partly]) & (room >= 0)
    for i, digest in _digests(requests, np.flatnonzero(known)):
        of_request = slice(int(begin[i]), int(end[i]))
        ids: npt.NDArray[np.uint32] | None = rows.token_id[of_request]
        if not whole[i]:
            nth = int(np.searchsorted(partly, i))
            referenced = references[first[nth] : last[nth]]
            ids = _with_references(rows, of_request, int(length[i]), spans, referenced)
        if ids is None:
            continue
        got = hashlib.sha256(np.ascontiguousarray(ids, "<u4").data).hexdigest()
        if got != digest:
            notes.add(
                "E414",
                f"shards (run {notes.run}) request {requests.number[i]} token_id",
                f"ids of digest {got[:16]}...",
                f"{digest[:16]}..., the census' token_digest",
            )
    if len(room) and room[-1] < 0:
        got = "more positions of references than are hashed"
        expected = f"at most {_MAX_REFERENCED} and {_MAX_REFERENCED_RATIO} for each row"
        notes.add("E414", f"shards (run {notes.run}) token_id", got, expected, "warning")


def _digests(requests: Requests, at: Ints) -> Iterator[tuple[int, str]]:
    """Yield some requests with their digests, some thousands of which are held at a time."""
    for first in range(0, len(at), _DIGESTS):
        some = at[first : first + _DIGESTS]
        texts = requests.token_digest.take(pa.array(some)).to_pylist()
        yield from zip(some.tolist(), texts, strict=True)


def _with_references(
    rows: Rows, of_request: slice, length: int, spans: Spans, references: Ints
) -> npt.NDArray[np.uint32] | None:
    """Return the ids of a request from its rows and those it refers to; None when some lack."""
    ids = np.zeros(length, np.uint32)
    filled = np.zeros(length, bool)
    position = split_key(rows.keys[of_request])[1]
    ids[position], filled[position] = rows.token_id[of_request], True
    starts, stops = spans.referenced(references)
    for start, stop, a, b in zip(
        starts, stops, spans.start[references], spans.stop[references], strict=True
    ):
        at, to = (int(x) for x in np.searchsorted(rows.keys, [start, stop]))
        if to - at != b - a or b > length:
            return None
        ids[a:b], filled[a:b] = rows.token_id[at:to], True
    return ids if filled.all() else None
