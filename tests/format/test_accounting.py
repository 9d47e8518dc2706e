"""Accounting is exact to the position: every lie below is found, most of them behind right sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from actds.dataset.account import TOTALS, Account, account
from actds.format import tables
from actds.format.positions import (
    Intervals,
    difference,
    of_keys,
    overlap,
    position_key,
    split_key,
    union,
)
from actds_testing.schedules import Schedule, simulate

SCHEDULE = simulate(16, seed=1, drops=True, filtered=True)
WHOLE = simulate(16, seed=2)  # nothing lost, so every request's token ids are all there


def judge(told: Schedule) -> Account:
    parts = [told.rows.slice(0, 37), told.rows.slice(37)]
    return account("r", told.requests, told.steps, told.spans, told.drops, parts)


def codes(found: Account) -> set[str]:
    return {finding.code for finding in found.findings}


def edit(told: Schedule, name: str, changes: dict[tuple[int, str], Any]) -> Schedule:
    """Return the schedule with single cells of a table changed."""
    table = getattr(told, name)
    columns = {column: table[column].to_pylist() for column in table.column_names}
    for (row, column), value in changes.items():
        columns[column][row] = value
    kind: Any = "tokens" if name == "rows" else name
    return told.with_(**{name: tables.build(kind, columns)})


def drop_row(told: Schedule, name: str, row: int) -> Schedule:
    table = getattr(told, name)
    return told.with_(**{name: pa.concat_tables([table.slice(0, row), table.slice(row + 1)])})


def repeat_row(told: Schedule, name: str, row: int) -> Schedule:
    table = getattr(told, name)
    return told.with_(**{name: pa.concat_tables([table, table.slice(row, 1)])})


def column(told: Schedule, name: str, column_name: str) -> np.ndarray:
    return np.array(getattr(told, name)[column_name].to_pylist())


def swap(told: Schedule, name: str, i: int, j: int, *names: str) -> Schedule:
    table = getattr(told, name)
    cells = {(i, n): table[n][j].as_py() for n in names}
    return edit(told, name, cells | {(j, n): table[n][i].as_py() for n in names})


def sums(told: Schedule) -> dict[str, Any]:
    """Return the totals that a checker of sums would compare: blind to who and where."""
    length = column(told, "spans", "stop") - column(told, "spans", "start")
    kind = column(told, "spans", "disposition")
    lost = column(told, "drops", "stop") - column(told, "drops", "start")
    reason = column(told, "drops", "drop_reason")
    return {
        "rows": len(told.rows),
        "spans": {k: int(length[kind == k].sum()) for k in tables.DISPOSITIONS},
        "drops": {r: int(lost[reason == r].sum()) for r in set(reason)},
        "steps": {
            n: int(column(told, "steps", n).sum())
            for n in told.steps.column_names
            if n.endswith("_tokens") and n[:3] not in ("pad", "dra", "acc")
        },
        "cached": int(column(told, "requests", "cached_tokens").sum()),
    }


# ---- lies: each takes a conforming schedule and returns one with a single lie in it


def first(told: Schedule, name: str, **want: Any) -> int:
    mask = np.ones(len(getattr(told, name)), bool)
    for key, value in want.items():
        mask &= column(told, name, key) == value
    return int(np.flatnonzero(mask)[0])


def swap_identities(told: Schedule) -> Schedule:
    decode = np.flatnonzero(column(told, "rows", "phase") == "decode")
    request = column(told, "rows", "request")
    other = next(j for j in decode if request[j] != request[decode[0]])
    return swap(told, "rows", decode[0], other, "request", "position")


def swap_identities_in_a_step(told: Schedule) -> Schedule:
    step, phase = column(told, "rows", "step"), column(told, "rows", "phase")
    chunk, request = column(told, "rows", "chunk"), column(told, "rows", "request")
    for i in np.flatnonzero(phase == "decode"):
        same = (step == step[i]) & (phase == "decode") & (request != request[i])
        for j in np.flatnonzero(same):
            if chunk[i] != chunk[j]:
                return swap(told, "rows", i, j, "request", "position", "chunk", "attempt")
    raise AssertionError("no two requests decode in one step")


def swap_two_requests(told: Schedule) -> Schedule:
    """Another request's rows under concurrency: whole requests exchanged, every set the same."""
    request, position = column(told, "rows", "request"), column(told, "rows", "position")
    shared = {}
    for r in np.unique(request):
        shared.setdefault(tuple(sorted(position[request == r])), []).append(int(r))
    a, b = next(v for v in shared.values() if len(v) > 1)[:2]
    cells = {(int(i), "request"): b for i in np.flatnonzero(request == a)}
    return edit(
        told, "rows", cells | {(int(i), "request"): a for i in np.flatnonzero(request == b)}
    )


def swap_steps_of_rows(told: Schedule) -> Schedule:
    phase, request = column(told, "rows", "phase"), column(told, "rows", "request")
    i, j = next(
        (i, j)
        for i in np.flatnonzero(phase == "decode")
        for j in np.flatnonzero((request == request[i]) & (phase == "decode"))
        if j != i
    )
    return swap(told, "rows", i, j, "step")


def move_row_to_step(told: Schedule) -> Schedule:
    step = column(told, "rows", "step")
    return edit(told, "rows", {(0, "step"): int(step[step != step[0]][0])})


def unknown_step(told: Schedule) -> Schedule:
    return edit(told, "rows", {(0, "step"): 10**9})


def shift_positions(told: Schedule) -> Schedule:
    """Off by one: every row of a request sits one position too late."""
    request, position = column(told, "rows", "request"), column(told, "rows", "position")
    mine = np.flatnonzero(request == request[0])
    return edit(told, "rows", {(int(i), "position"): int(position[i]) + 1 for i in mine})


def row_of_another_request(told: Schedule) -> Schedule:
    request = column(told, "rows", "request")
    return edit(told, "rows", {(0, "request"): int(request[request != request[0]][0])})


def wrong_phase(told: Schedule) -> Schedule:
    i, j = first(told, "rows", phase="prefill"), first(told, "rows", phase="decode")
    return edit(told, "rows", {(i, "phase"): "decode", (j, "phase"): "prefill"})


def foreign_token(told: Schedule) -> Schedule:
    return edit(told, "rows", {(3, "token_id"): 77_777})


def move_drop(told: Schedule) -> Schedule:
    start, stop = told.drops["start"][0].as_py(), told.drops["stop"][0].as_py()
    return edit(told, "drops", {(0, "start"): start + 1, (0, "stop"): stop + 1})


def move_drop_to_request(told: Schedule) -> Schedule:
    return edit(told, "drops", {(0, "request"): told.drops["request"][0].as_py() + 1})


def two_reasons(told: Schedule) -> Schedule:
    """Return a conforming schedule whose second drop event has another reason."""
    event, request = column(told, "drops", "drop"), column(told, "drops", "request")
    start, stop = column(told, "drops", "start"), column(told, "drops", "stop")
    length, spans = stop - start, told.spans
    j = next(
        j
        for j in range(len(event))
        if ((event != event[j]) & (length == length[j]) & (request != request[j])).any()
    )
    told = edit(told, "drops", {(int(j), "drop_reason"): "writer_timeout"})
    cells = {}
    for k in range(len(spans)):
        if spans["request"][k].as_py() == request[j] and spans["start"][k].as_py() == start[j]:
            assert spans["stop"][k].as_py() == stop[j]
            cells[k, "reason"] = "writer_timeout"
    assert cells
    return edit(told, "spans", cells)


def swap_reasons(told: Schedule) -> Schedule:
    length = column(told, "drops", "stop") - column(told, "drops", "start")
    reason = column(told, "drops", "drop_reason")
    j = int(np.flatnonzero(reason == "writer_timeout")[0])
    i = next(i for i in range(len(reason)) if reason[i] != reason[j] and length[i] == length[j])
    return swap(told, "drops", i, j, "drop_reason")


def swap_drop_steps(told: Schedule) -> Schedule:
    event = column(told, "drops", "drop")
    j = int(np.flatnonzero(event != event[0])[0])
    return swap(told, "drops", 0, j, "step")


def forget_drop(told: Schedule) -> Schedule:
    return drop_row(told, "drops", 0)


def forge_event(told: Schedule) -> Schedule:
    n = told.drops["n_tokens"][0].as_py()
    return edit(told, "drops", {(0, "n_tokens"): n + 1})


def swap_span_kinds(told: Schedule) -> Schedule:
    """Exchange what became of two spans of one length: every total stays."""
    length = column(told, "spans", "stop") - column(told, "spans", "start")
    kind = column(told, "spans", "disposition")
    i, j = next(
        (i, j)
        for i in np.flatnonzero(kind == "captured")
        for j in np.flatnonzero(kind == "dropped")
        if length[i] == length[j]
    )
    return swap(told, "spans", i, j, "disposition", "reason", "step")


def more_drafts_than_became_of_them(told: Schedule) -> Schedule:
    return edit(told, "steps", {(0, "drafted_tokens"): 3, (0, "accepted_tokens"): 1})


def row_past_the_end_is_a_loss(told: Schedule) -> Schedule:
    i = first(told, "spans", disposition="undelivered")
    step = column(told, "steps", "step").tolist().index(told.spans["step"][i].as_py())
    n = {name: told.steps[name][step].as_py() for name in ("undelivered_tokens", "aborted_tokens")}
    cells = {(step, name): count + (1 if "abort" in name else -1) for name, count in n.items()}
    return edit(edit(told, "spans", {(i, "disposition"): "aborted"}), "steps", cells)


def wrong_span_step(told: Schedule) -> Schedule:
    i = first(told, "spans", disposition="captured")
    other = next(s for s in column(told, "steps", "step") if s > told.spans["step"][i].as_py())
    return edit(told, "spans", {(i, "step"): int(other)})


def reference_with_step(told: Schedule) -> Schedule:
    return edit(told, "spans", {(first(told, "spans", disposition="cache_ref"), "step"): 1})


def unexplained_loss(told: Schedule) -> Schedule:
    return edit(told, "spans", {(first(told, "spans", disposition="aborted"), "reason"): None})


def extend_span(told: Schedule) -> Schedule:
    i = int(np.flatnonzero(column(told, "spans", "start") > 0)[0]) - 1
    return edit(told, "spans", {(i, "stop"): told.spans["stop"][i].as_py() + 1})


def span_past_the_end(told: Schedule) -> Schedule:
    request = column(told, "spans", "request")
    i = int(np.flatnonzero(request[1:] != request[:-1])[0])
    cells = {(i, "disposition"): "aborted", (i, "reason"): "x", (i, "step"): None}
    cells |= {(i, "start"): 10_000, (i, "stop"): 10_001, (i, "ref_request"): None}
    return edit(repeat_row(told, "spans", i), "spans", {(len(told.spans), k[1]): v
                                                        for k, v in cells.items()})  # fmt: skip


def forge_cached(told: Schedule) -> Schedule:
    i = int(np.argmax(column(told, "requests", "cached_tokens")))
    n = told.requests["cached_tokens"][i].as_py()
    assert n
    return edit(told, "requests", {(i, "cached_tokens"): 0, (i, "engine_cached_tokens"): 0})


def forge_engine_cached(told: Schedule) -> Schedule:
    return edit(told, "requests", {(0, "engine_cached_tokens"): 3})


def swap_cached(told: Schedule) -> Schedule:
    cached = column(told, "requests", "cached_tokens")
    i, j = int(np.argmax(cached)), int(np.argmin(cached))
    return swap(told, "requests", i, j, "cached_tokens", "engine_cached_tokens")


def swap_captured_counts(told: Schedule) -> Schedule:
    captured = column(told, "steps", "captured_tokens")
    j = int(np.flatnonzero(captured != captured[0])[0])
    return swap(told, "steps", 0, j, *told.steps.column_names[1:])


def hide_scheduled(told: Schedule) -> Schedule:
    n = told.steps["batch_tokens"][0].as_py()
    return edit(told, "steps", {(0, "batch_tokens"): n + 1})


def captured_called_recomputed(told: Schedule) -> Schedule:
    n, m = (told.steps[c][0].as_py() for c in ("captured_tokens", "recomputed_tokens"))
    return edit(told, "steps", {(0, "captured_tokens"): n - 1, (0, "recomputed_tokens"): m + 1})


TWO_REASONS = two_reasons(SCHEDULE)

LIES: list[tuple[Callable[[Schedule], Schedule], Schedule, str, bool]] = [
    # lie, told of, its code, whether the sums alone would have passed
    (swap_identities, WHOLE, "E414", True),
    (swap_identities_in_a_step, WHOLE, "E414", True),
    (swap_two_requests, WHOLE, "E414", True),
    (swap_steps_of_rows, SCHEDULE, "E414", True),
    (move_row_to_step, SCHEDULE, "E412", True),
    (unknown_step, SCHEDULE, "E412", True),
    (shift_positions, SCHEDULE, "E406", True),
    (row_of_another_request, SCHEDULE, "E406", True),
    (lambda told: drop_row(told, "rows", 5), SCHEDULE, "E406", False),
    (lambda told: repeat_row(told, "rows", 5), SCHEDULE, "E407", False),
    (lambda told: drop_row(repeat_row(told, "rows", 5), "rows", 6), SCHEDULE, "E407", True),
    (wrong_phase, SCHEDULE, "E414", True),
    (foreign_token, WHOLE, "E414", True),
    (move_drop, SCHEDULE, "E408", True),
    (move_drop_to_request, SCHEDULE, "E408", True),
    (swap_reasons, TWO_REASONS, "E408", True),
    (swap_drop_steps, SCHEDULE, "E408", True),
    (forget_drop, SCHEDULE, "E408", False),
    (forge_event, SCHEDULE, "E408", True),
    (swap_span_kinds, SCHEDULE, "E406", True),
    (wrong_span_step, SCHEDULE, "E414", True),
    (reference_with_step, SCHEDULE, "E412", True),
    (unexplained_loss, SCHEDULE, "E402", True),
    (more_drafts_than_became_of_them, SCHEDULE, "E409", True),
    (row_past_the_end_is_a_loss, SCHEDULE, "E419", False),
    (lambda told: drop_row(told, "spans", 0), SCHEDULE, "E404", False),
    (extend_span, SCHEDULE, "E405", False),
    (span_past_the_end, SCHEDULE, "E405", False),
    (lambda told: repeat_row(told, "spans", 0), SCHEDULE, "E405", False),
    (lambda told: drop_row(told, "requests", 0), SCHEDULE, "E405", True),
    (lambda told: repeat_row(told, "requests", 0), SCHEDULE, "E405", True),
    (forge_cached, SCHEDULE, "E411", False),
    (forge_engine_cached, SCHEDULE, "E411", True),
    (swap_cached, SCHEDULE, "E411", True),
    (swap_captured_counts, SCHEDULE, "E412", True),
    (hide_scheduled, SCHEDULE, "E409", False),
    (captured_called_recomputed, SCHEDULE, "E409", False),
    (lambda told: edit(told, "spans", {(0, "disposition"): "lost"}), SCHEDULE, "E103", False),
]


@pytest.mark.parametrize("told", [SCHEDULE, WHOLE], ids=["with losses", "whole"])
def test_passes_a_truthful_run(told: Schedule) -> None:
    found = judge(told)
    assert [f.line() for f in found.findings if f.severity == "error"] == []
    assert list(found.totals) == list(TOTALS)
    assert found.totals["rows"] == len(told.rows) == found.totals["captured"] > 0
    for name in ("cache_ref", "recomputed", "aborted"):
        assert found.totals[name] > 0, name


def _lie_name(value: object) -> str | None:
    return getattr(value, "__name__", None) if callable(value) else ""


@pytest.mark.parametrize(("lie", "told", "code", "sums_pass"), LIES, ids=_lie_name)
def test_finds_each_lie_also_behind_right_sums(
    lie: Callable[[Schedule], Schedule], told: Schedule, code: str, sums_pass: bool
) -> None:
    lied = lie(told)
    assert (sums(lied) == sums(told)) is sums_pass
    errors = [f for f in judge(lied).findings if f.severity == "error"]
    assert code in {f.code for f in errors}, [f.line() for f in errors]


def test_names_the_place_of_a_lie() -> None:
    request, position = (WHOLE.rows[name][9].as_py() for name in ("request", "position"))
    finding = next(f for f in judge(drop_row(WHOLE, "rows", 9)).findings if f.code == "E406")
    assert f"request {request} positions [{position}, {position + 1})" in finding.place
    assert finding.got == "no row"


def test_floods_nobody_and_hides_nothing() -> None:
    lied = WHOLE.with_(spans=tables.empty("spans"))
    gaps = [f for f in judge(lied).findings if f.code == "E404"]
    n_owing = sum(r != "skipped" for r in WHOLE.requests["finish_reason"].to_pylist())
    many = simulate(40, seed=1)
    many_gaps = [
        f for f in judge(many.with_(spans=tables.empty("spans"))).findings if f.code == "E404"
    ]
    assert len(gaps) == n_owing <= 16
    assert len(many_gaps) == 17
    assert many_gaps[-1].got == "21 further places of E404"  # 40 requests, 3 of them skipped


def test_warns_of_a_reference_to_nothing_and_counts_it() -> None:
    i = first(WHOLE, "spans", disposition="cache_ref")
    n = WHOLE.spans["stop"][i].as_py() - WHOLE.spans["start"][i].as_py()
    for nowhere in (None, 99_999):
        found = judge(edit(WHOLE, "spans", {(i, "ref_request"): nowhere}))
        assert {f.code for f in found.findings} == {"E410"}
        assert {f.severity for f in found.findings} == {"warning"}
        assert found.totals["unresolved"] == n


def test_multiplicity_counts_every_reference_once() -> None:
    """A naive count over single positions gives the same table."""
    for told in (SCHEDULE, WHOLE):
        rows = set(zip(told.rows["request"].to_pylist(), told.rows["position"].to_pylist(),
                       strict=True))  # fmt: skip
        served = dict.fromkeys(rows, 1)
        for span in told.spans.to_pylist():
            if span["disposition"] == "cache_ref":
                for position in range(span["start"], span["stop"]):
                    if (span["ref_request"], position) in served:
                        served[span["ref_request"], position] += 1
        found = judge(told).multiplicity
        got = {
            (entry["request"], position): entry["count"]
            for entry in found.to_pylist()
            for position in range(entry["start"], entry["stop"])
        }
        assert got == {key: count for key, count in served.items() if count > 1} != {}
        starts = [(entry["request"], entry["start"]) for entry in found.to_pylist()]
        assert starts == sorted(starts)
        for left, right in zip(found.to_pylist(), found.to_pylist()[1:], strict=False):
            touching = (left["request"], left["stop"]) == (right["request"], right["start"])
            assert not touching or left["count"] != right["count"]


@pytest.mark.parametrize("step", [2**63, 2**64 - 1])
def test_a_step_above_all_integers_is_unknown_and_not_null(step: int) -> None:
    for kind in ("captured", "aborted"):
        i = next(
            i
            for i, span in enumerate(SCHEDULE.spans.to_pylist())
            if span["disposition"] == kind and span["step"] is not None
        )
        found = judge(edit(SCHEDULE, "spans", {(i, "step"): step})).findings
        assert "an unknown step" in {f.got for f in found if f.code == "E412"}
    assert "E412" in codes(judge(edit(SCHEDULE, "rows", {(0, "step"): step})))
    assert "E412" in codes(judge(edit(SCHEDULE, "steps", {(0, "step"): step})))


def test_of_token_tables_only_a_few_columns_stay_in_memory() -> None:
    n = 100_000
    columns: dict[str, Any] = {
        field.name: np.zeros(n, np.int64) for field in tables.bare_schema("tokens")
    }
    columns |= {"position": np.arange(n), "phase": ["prefill"] * n}
    sink = pa.BufferOutputStream()
    table = tables.build("tokens", columns)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data, before = sink.getvalue().to_pybytes(), pa.total_allocated_bytes()
    held = []

    def read() -> Iterator[pa.Table]:
        for _ in range(8):  # each in memory of its own, as it comes from the process that parses
            held.append(pa.total_allocated_bytes() - before)
            buffer = pa.allocate_buffer(len(data))
            np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(data, np.uint8)
            yield pa.ipc.open_stream(buffer).read_all()

    parts: list[Any] = [tables.empty(name) for name in ("requests", "steps", "spans", "drops")]
    account("r", *parts, read())
    assert max(held) < 4 * len(data)


def test_a_run_of_nothing_has_an_account() -> None:
    names: list[Any] = ["requests", "steps", "spans", "drops"]
    found = account("r", *(tables.empty(name) for name in names), [])
    assert (found.findings, sum(found.totals.values()), len(found.multiplicity)) == ([], 0, 0)


# ---- properties


SCHEDULES = st.builds(
    simulate,
    st.integers(1, 12),
    st.integers(0, 10_000),
    drops=st.booleans(),
    cache=st.booleans(),
    filtered=st.booleans(),
    merge=st.booleans(),
    budget=st.integers(4, 40),
)
FAST = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)

NUDGED = {
    "rows": ("request", "position", "step"),
    "spans": ("start", "stop", "request"),
    "drops": ("request", "start", "stop", "step", "n_tokens"),
    "requests": ("cached_tokens", "engine_cached_tokens"),
    "steps": (
        "batch_tokens",
        "captured_tokens",
        "recomputed_tokens",
        "dropped_tokens",
        "aborted_tokens",
        "filtered_tokens",
        "undelivered_tokens",
        "rejected_tokens",
        "prefill_tokens",
        "decode_tokens",
    ),
}
"""Numbers of which not one can be off without a contradiction."""


@FAST
@given(SCHEDULES)
def test_every_truthful_schedule_conforms(told: Schedule) -> None:
    assert [f.line() for f in judge(told).findings if f.severity == "error"] == []


@FAST
@given(SCHEDULES, st.data())
def test_every_single_lie_is_found(told: Schedule, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*NUDGED, "rows"]))
    n = len(getattr(told, name))
    assume(n)
    row = data.draw(st.integers(0, n - 1))
    how = data.draw(st.sampled_from(["nudge", "nudge", "omit", "repeat"]))
    if how == "omit":
        assume(name in ("rows", "spans", "drops"))
        lied = drop_row(told, name, row)
    elif how == "repeat":
        lied = repeat_row(told, name, row)
    else:
        cell = data.draw(st.sampled_from(NUDGED[name]))
        value = getattr(told, name)[cell][row].as_py()
        assume(value is not None)
        by = data.draw(st.sampled_from([-1, 1, 7]))
        assume(value + by >= 0)
        lied = edit(told, name, {(row, cell): value + by})
    errors = [f for f in judge(lied).findings if f.severity == "error"]
    assert errors, (name, row, how)


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8)


IN_ORDER = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=8).map(
    lambda gaps: [(sum(a + b for a, b in gaps[:i]) + gap, n) for i, (gap, n) in enumerate(gaps)]
)
"""Ranges as they are in a census: one after the other, some of which touch."""


@FAST
@given(RANGES | IN_ORDER, RANGES | IN_ORDER)
def test_interval_sets_agree_with_sets_of_positions(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    def build(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        start = np.array([a for a, _ in ranges], np.uint64)
        return start, start + np.array([n for _, n in ranges], np.uint64)

    def members(ranges: list[tuple[int, int]]) -> list[int]:
        return [p for a, n in ranges for p in range(a, a + n)]

    def flat(found: Intervals) -> list[int]:
        assert (found.start[1:] > found.stop[:-1]).all()
        return [p for a, b in zip(found.start, found.stop, strict=True) for p in range(a, b)]

    a, b = members(left), members(right)
    one, other = union(*build(left)), union(*build(right))
    assert flat(one) == sorted(set(a)) and one.n_keys == len(set(a))
    assert flat(overlap(*build(left))) == sorted({p for p in a if a.count(p) > 1})
    assert flat(difference(one, other)) == sorted(set(a) - set(b))
    assert flat(difference(one, one)) == []
    assert flat(of_keys(np.array(sorted(set(a)), np.uint64))) == sorted(set(a))
    asked = np.array(sorted({0, *a, *b, 2**64 - 1}), np.uint64)
    assert one.n_below(asked).tolist() == [sum(p < key for p in set(a)) for key in asked.tolist()]


def test_keys_hold_the_largest_request_and_position() -> None:
    assert position_key([2**32 - 1], [2**32 - 1]).tolist() == [2**64 - 1]


def test_a_key_splits_into_its_request_and_position() -> None:
    request, position = np.array([0, 7, 2**31, 2**32 - 1]), np.array([2**32 - 1, 0, 5, 2**31])
    key = position_key(request, position)
    assert key.dtype == np.uint64 and (np.diff(key.astype(object)) > 0).all()
    found = split_key(key)
    assert [part.tolist() for part in found] == [request.tolist(), position.tolist()]
    for kind in (np.uint32, np.int64, np.float64):
        assert np.array_equal(position_key(request.astype(kind), position.astype(kind)), key)
    assert position_key(3, [1, 2]).tolist() == [3 << 32 | 1, 3 << 32 | 2]
