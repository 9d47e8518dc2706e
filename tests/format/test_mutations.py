"""Mutations of the tables of a truthful run: 300 random ones of each kind, and none is missed.

Each is what a bug or a liar would leave behind, and most keep every sum right. A mutation that no
table can show is none of these: two rows that exchange their places within one step, of requests of
which neither is known whole, are found by readouts and canaries (section 13 of the specification).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from actds.dataset.account import account
from actds.format import tables
from actds_testing.schedules import Schedule, simulate, table_of

Line = dict[str, Any]
N_FAST, N_FULL = 5, 300


@dataclass
class Run:
    """The tables of a run as lines that can be changed."""

    requests: list[Line]
    steps: list[Line]
    spans: list[Line]
    drops: list[Line]
    rows: list[Line]

    @classmethod
    def of(cls, told: Schedule) -> Run:
        return cls(*(getattr(told, name).to_pylist() for name in cls.__annotations__))

    def errors(self) -> set[str]:
        """Return the codes of the errors that the account finds."""
        parts = {name: table_of(name, getattr(self, name)) for name in
                 ("requests", "steps", "spans", "drops")}  # fmt: skip
        found = account("r", **parts, rows=[table_of("tokens", self.rows)])
        return {finding.code for finding in found.findings if finding.severity == "error"}

    def step(self, number: int) -> Line:
        return next(step for step in self.steps if step["step"] == number)

    def spans_of(self, request: int) -> list[Line]:
        return [span for span in self.spans if span["request"] == request]

    def rows_of(self, request: int) -> list[Line]:
        mine = [row for row in self.rows if row["request"] == request]
        return sorted(mine, key=lambda row: row["position"])

    def is_whole(self, request: int) -> bool:
        """Return whether every token of a request is known, so that its digest says something."""
        line = next(one for one in self.requests if one["request"] == request)
        n = line["prompt_len"] + max(line["generated_len"] - 1, 0)
        known = {row["position"] for row in self.rows_of(request)}
        for span in self.spans_of(request):
            if span["disposition"] == "cache_ref":
                stored = {row["position"] for row in self.rows_of(span["ref_request"])}
                known |= stored & set(range(span["start"], span["stop"]))
        return line["token_digest"] is not None and known >= set(range(n)) != set()

    def count(self, step: int, kind: str, by: int, phase: str) -> None:
        """Change what a step says of one position, everywhere."""
        line = self.step(step)
        for name in (kind, "batch", phase):
            line[f"{name}_tokens"] += by


Rng = np.random.Generator
Mutation = Callable[[Run, Rng], bool]
MUTATIONS: dict[str, tuple[Mutation, str]] = {}


def mutation(code: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation: it returns whether the run has a place for it, and changes it there."""

    def register(mutate: Mutation) -> Mutation:
        MUTATIONS[mutate.__name__] = mutate, code
        return mutate

    return register


def pick(rng: Rng, some: list[Any]) -> Any:
    return some[int(rng.integers(len(some)))] if some else None


def exchange(one: Line, other: Line, *names: str) -> None:
    for name in names:
        one[name], other[name] = other[name], one[name]


# ---- rows


@mutation("E414")
def rows_exchange_their_places(run: Run, rng: Rng) -> bool:
    one = pick(rng, [row for row in run.rows if run.is_whole(row["request"])])
    other = one and pick(rng, [row for row in run.rows if row["token_id"] != one["token_id"]])
    if not other:
        return False
    exchange(one, other, "request", "position", "step", "chunk", "attempt", "phase")
    return True


@mutation("E414")
def rows_of_a_request_exchange_their_places(run: Run, rng: Rng) -> bool:
    request = pick(rng, [one["request"] for one in run.requests if run.is_whole(one["request"])])
    rows = [] if request is None else run.rows_of(request)
    one = pick(rng, rows)
    other = one and pick(rng, [row for row in rows if row["token_id"] != one["token_id"]])
    if not other:
        return False
    exchange(one, other, "position")
    return True


@mutation("E414")
def a_token_is_another_one(run: Run, rng: Rng) -> bool:
    row = pick(rng, [row for row in run.rows if run.is_whole(row["request"])])
    if row:
        row["token_id"] += int(rng.integers(1, 100))
    return row is not None


@mutation("E406")
def a_row_is_lost(run: Run, rng: Rng) -> bool:
    run.rows.remove(pick(rng, run.rows))
    return True


@mutation("E407")
def a_row_stands_twice(run: Run, rng: Rng) -> bool:
    run.rows.append(dict(pick(rng, run.rows)))
    return True


@mutation("E407")
def a_preempted_request_is_captured_twice(run: Run, rng: Rng) -> bool:
    """What was computed again is stored again, under its later step, and counted as captured."""
    again = [step for step in run.steps if step["recomputed_tokens"]]
    step = pick(rng, again)
    if not step:
        return False
    restarted = {r["request"] for r in run.requests if r["n_preemptions"]}
    row = pick(rng, [r for r in run.rows if r["request"] in restarted and r["step"] < step["step"]])
    if not row:
        return False
    run.rows.append(row | {"step": step["step"], "attempt": row["attempt"] + 1})
    step["captured_tokens"] += 1
    step["recomputed_tokens"] -= 1
    return True


@mutation("E414")
def a_phase_is_the_other_one(run: Run, rng: Rng) -> bool:
    """The row, and the step that counts it, say the same."""
    row = pick(rng, run.rows)
    now = "decode" if row["phase"] == "prefill" else "prefill"
    step = run.step(row["step"])
    step[f"{row['phase']}_tokens"] -= 1
    step[f"{now}_tokens"] += 1
    row["phase"] = now
    return True


@mutation("E414")
def an_attempt_that_never_was(run: Run, rng: Rng) -> bool:
    request = pick(rng, run.rows)["request"]
    most = next(r["n_preemptions"] for r in run.requests if r["request"] == request)
    for row in run.rows_of(request):
        row["attempt"] = most + 1
    return True


@mutation("E414")
def a_chunk_is_the_next_one(run: Run, rng: Rng) -> bool:
    rows = run.rows_of(pick(rng, run.rows)["request"])
    if len({row["step"] for row in rows}) == len(rows):
        return False
    twins = [b for a, b in pairwise(rows) if a["step"] == b["step"]]
    pick(rng, twins)["chunk"] += 1
    return True


# ---- steps


@mutation("E412")
def a_row_is_in_another_step(run: Run, rng: Rng) -> bool:
    row = pick(rng, run.rows)
    other = pick(rng, [step["step"] for step in run.steps if step["step"] != row["step"]])
    if other is not None:
        row["step"] = other
    return other is not None


@mutation("E414")
def steps_of_a_request_are_permuted(run: Run, rng: Rng) -> bool:
    rows = run.rows_of(pick(rng, run.rows)["request"])
    steps = [row["step"] for row in rows]
    order = rng.permutation(len(steps))
    if [steps[i] for i in order] == steps:
        return False
    for row, i in zip(rows, order, strict=True):
        row["step"] = steps[i]
    return True


@mutation("E412")
def two_steps_are_exchanged_everywhere(run: Run, rng: Rng) -> bool:
    """The numbers of two steps, in every table: nothing but the history of a request shows it."""
    request = pick(rng, run.rows)["request"]
    own = {s["step"] for s in run.spans_of(request) if s["step"] is not None}
    steps = sorted({row["step"] for row in run.rows_of(request)} | own)
    spans = [s for s in run.spans_of(request) if s["step"] is not None]
    if len(steps) < 2 or len(spans) < 2 or spans[0]["step"] == spans[-1]["step"]:
        return False
    names = {spans[0]["step"]: spans[-1]["step"], spans[-1]["step"]: spans[0]["step"]}
    for line in [*run.rows, *run.spans, *run.drops, *run.steps]:
        line["step"] = names.get(line["step"], line["step"])
    return True


@mutation("E412")
def counts_of_two_steps_are_exchanged(run: Run, rng: Rng) -> bool:
    one = pick(rng, run.steps)
    other = pick(rng, [s for s in run.steps if s["captured_tokens"] != one["captured_tokens"]])
    if other:
        exchange(one, other, *(name for name in one if name != "step"))
    return other is not None


@mutation("E409")
def a_scheduled_token_became_nothing(run: Run, rng: Rng) -> bool:
    step = pick(rng, run.steps)
    name = "prefill_tokens" if rng.random() < 0.5 else "decode_tokens"
    step["batch_tokens"] += 1
    step[name] += 1
    return True


# ---- spans


@mutation("E405")
def two_spans_overlap(run: Run, rng: Rng) -> bool:
    inner = [b for a, b in pairwise(run.spans)
             if a["request"] == b["request"] and a["stop"] - a["start"] > 1]  # fmt: skip
    span = pick(rng, inner)
    if span:
        span["start"] -= 1
    return span is not None


@mutation("E404")
def spans_leave_a_gap(run: Run, rng: Rng) -> bool:
    """A row is gone, and span and step have been made to fit."""
    ends = {r["request"]: max(s["stop"] for s in run.spans_of(r["request"]))
            for r in run.requests if run.spans_of(r["request"])}  # fmt: skip
    captured = [s for s in run.spans if s["disposition"] == "captured"]
    span = pick(rng, [s for s in captured
                      if s["start"] + 1 < s["stop"] < ends[s["request"]]])  # fmt: skip
    if not span:
        return False
    span["stop"] -= 1
    return _forget(run, span["request"], span["stop"])


def _forget(run: Run, request: int, position: int) -> bool:
    """Remove a row, and one token of the step that computed it."""
    row = next(r for r in run.rows_of(request) if r["position"] == position)
    run.rows.remove(row)
    run.count(row["step"], "captured", -1, row["phase"])
    return True


@mutation("E404")
def a_request_ends_one_position_early(run: Run, rng: Rng) -> bool:
    """The last position that was fed has no row, no span, and was never scheduled."""
    whole = [r["request"] for r in run.requests if r["finish_reason"] in ("stop", "length")]
    last = [run.spans_of(request)[-1] for request in whole if run.spans_of(request)]
    span = pick(rng, [s for s in last if s["disposition"] == "captured"])
    if not span:
        return False
    span["stop"] -= 1
    if span["start"] == span["stop"]:
        run.spans.remove(span)
    return _forget(run, span["request"], span["stop"])


@mutation("E419")
def a_request_ends_one_position_late(run: Run, rng: Rng) -> bool:
    """The last sampled token, which is never fed, has a row."""
    ended = [r["request"] for r in run.requests if r["finish_reason"] in ("stop", "length")]
    last = [run.spans_of(request)[-1] for request in ended if run.spans_of(request)]
    span = pick(rng, [s for s in last if s["disposition"] == "captured"])
    if not span:
        return False
    row = run.rows_of(span["request"])[-1]
    run.rows.append(row | {"position": span["stop"], "token_id": 77, "phase": "decode"})
    span["stop"] += 1
    run.count(row["step"], "captured", 1, "decode")
    return True


@mutation("E406")
def two_spans_exchange_what_became_of_them(run: Run, rng: Rng) -> bool:
    one = pick(rng, [s for s in run.spans if s["disposition"] == "captured"])
    lost = ("dropped", "aborted", "filtered")
    other = pick(rng, [s for s in run.spans if s["disposition"] in lost
                       and s["stop"] - s["start"] == one["stop"] - one["start"]])  # fmt: skip
    if other:
        exchange(one, other, "disposition", "reason", "step")
    return other is not None


@mutation("E402")
def a_loss_has_no_reason(run: Run, rng: Rng) -> bool:
    span = pick(rng, [s for s in run.spans if s["disposition"] in ("dropped", "aborted")])
    if span:
        span["reason"] = None
    return span is not None


@mutation("E419")
def what_is_past_the_end_is_a_loss(run: Run, rng: Rng) -> bool:
    span = pick(rng, [s for s in run.spans if s["disposition"] == "undelivered"])
    if not span:
        return False
    n = span["stop"] - span["start"]
    span.update(disposition="aborted", reason="writer_ended")
    run.step(span["step"])["undelivered_tokens"] -= n
    run.step(span["step"])["aborted_tokens"] += n
    return True


# ---- drops


@mutation("E408")
def a_drop_is_moved(run: Run, rng: Rng) -> bool:
    drop = pick(rng, run.drops)
    if not drop:
        return False
    by = 1 if not drop["start"] else int(rng.choice([-1, 1]))
    if rng.random() < 0.5:
        drop.update(start=drop["start"] + by, stop=drop["stop"] + by)
    else:
        drop["request"] += 1
    return True


@mutation("E408")
def two_drops_exchange_their_reasons(run: Run, rng: Rng) -> bool:
    """One of two events has another reason, in log and census; then the log exchanges them."""
    one = pick(rng, run.drops)
    other = one and pick(rng, [d for d in run.drops if d["drop"] != one["drop"]])
    if not other:
        return False
    dropped = [s for s in run.spans if s["disposition"] == "dropped"]
    span = next((s for s in dropped if (s["request"], s["start"], s["stop"]) ==
                 (other["request"], other["start"], other["stop"])), None)  # fmt: skip
    if not span:
        return False
    span["reason"] = other["drop_reason"] = "writer_timeout"
    assert run.errors() == set()
    exchange(one, other, "drop_reason")
    return True


@mutation("E408")
def two_drops_exchange_their_steps(run: Run, rng: Rng) -> bool:
    one = pick(rng, run.drops)
    other = one and pick(rng, [d for d in run.drops if d["step"] != one["step"]])
    if other:
        exchange(one, other, "step")
    return bool(other)


@mutation("E408")
def a_drop_is_forgotten(run: Run, rng: Rng) -> bool:
    drop = pick(rng, run.drops)
    if drop:
        run.drops.remove(drop)
        for one in run.drops:
            if one["drop"] == drop["drop"]:
                one["n_tokens"] -= drop["stop"] - drop["start"]
    return drop is not None


# ---- references and requests


def _reference(run: Run, rng: Rng) -> Line | None:
    found: Line | None = pick(rng, [s for s in run.spans if s["disposition"] == "cache_ref"])
    return found


@mutation("E410")
def a_request_refers_to_itself(run: Run, rng: Rng) -> bool:
    span = _reference(run, rng)
    if span:
        span["ref_request"] = span["request"]
    return span is not None


@mutation("E410")
def two_requests_refer_to_each_other(run: Run, rng: Rng) -> bool:
    """The original is made a reference as well: its rows are gone, and every sum is right."""
    span = _reference(run, rng)
    if not span:
        return False
    theirs = [row for row in run.rows_of(span["ref_request"])
              if span["start"] <= row["position"] < span["stop"]]  # fmt: skip
    if len(theirs) < span["stop"] - span["start"]:
        return False
    first = next((s for s in run.spans_of(span["ref_request"]) if s["disposition"] == "captured"
                  and s["start"] <= span["start"] and span["stop"] <= s["stop"]), None)  # fmt: skip
    if not first:
        return False
    run.spans.remove(first)
    rows = {row["position"]: row["step"] for row in run.rows_of(span["ref_request"])}
    for start, stop in ((first["start"], span["start"]), (span["stop"], first["stop"])):
        if start < stop:
            run.spans.append(first | {"start": start, "stop": stop, "step": rows[start]})
    back = {"disposition": "cache_ref", "step": None, "ref_request": span["request"]}
    run.spans.append(first | back | {"start": span["start"], "stop": span["stop"]})
    for row in theirs:
        run.rows.remove(row)
        run.count(row["step"], "captured", -1, row["phase"])
    line = next(r for r in run.requests if r["request"] == span["ref_request"])
    if span["start"] == 0:
        line["cached_tokens"] = line["engine_cached_tokens"] = span["stop"]
    return True


@mutation("E411")
def hits_are_counted_for_another_request(run: Run, rng: Rng) -> bool:
    some = [r for r in run.requests if r["finish_reason"] != "skipped"]
    one = pick(rng, [r for r in some if r["cached_tokens"]])
    other = one and pick(rng, [r for r in some if r["cached_tokens"] != one["cached_tokens"]])
    if other:
        exchange(one, other, "cached_tokens", "engine_cached_tokens")
    return bool(other)


@mutation("E404")
def a_request_is_left_out_altogether(run: Run, rng: Rng) -> bool:
    """Line, spans, rows, drops and scheduled tokens of a request are gone; others stay as told."""
    referred = {span["ref_request"] for span in run.spans}
    last = max(r["request"] for r in run.requests)
    one = pick(rng, [r for r in run.requests if r["request"] not in {last, *referred}])
    if not one:
        return False
    number = one["request"]
    for row in run.rows_of(number):
        run.count(row["step"], "captured", -1, row["phase"])
    for name in ("requests", "spans", "rows", "drops"):
        kept = [line for line in getattr(run, name) if line["request"] != number]
        setattr(run, name, kept)
    return True


@mutation("E404")
def two_requests_are_merged(run: Run, rng: Rng) -> bool:
    """All that one request has stands behind what another one has, under that one's number."""
    some = [r for r in run.requests if run.spans_of(r["request"])]
    one = pick(rng, some)
    # The last number of all leaves no gap: then tokens and phases are all there is to see.
    last = max(r["request"] for r in run.requests)
    other = one and pick(rng, [r for r in some if r["request"] not in (one["request"], last)])
    if not other:
        return False
    behind = max(span["stop"] for span in run.spans_of(one["request"]))
    for line in [*run.spans_of(other["request"]), *run.rows_of(other["request"]),
                 *(d for d in run.drops if d["request"] == other["request"])]:  # fmt: skip
        line["request"] = one["request"]
        for name in {"start", "stop", "position"} & line.keys():
            line[name] += behind
    one["generated_len"] += other["prompt_len"] + other["generated_len"]
    run.requests.remove(other)
    return True


@mutation("E405")
def a_request_has_two_lines(run: Run, rng: Rng) -> bool:
    run.requests.append(dict(pick(rng, run.requests)))
    return True


@mutation("E406")
def rows_of_two_requests_are_mixed_up(run: Run, rng: Rng) -> bool:
    """Of two requests that decode, every row from somewhere on is the other's."""
    one, other = (pick(rng, run.rows)["request"] for _ in range(2))
    mine, theirs = ({r["position"] for r in run.rows_of(n)} for n in (one, other))
    if one == other or mine == theirs:
        return False
    names = {one: other, other: one}
    for row in run.rows:
        row["request"] = names.get(row["request"], row["request"])
    return True


def missed(name: str, n: int) -> list[str]:
    """Return what the account does not find among ``n`` random instances of a mutation."""
    mutate, code = MUTATIONS[name]
    rng = np.random.default_rng(sorted(MUTATIONS).index(name))
    wrong, n_made, n_tried, n_with_code = [], 0, 0, 0
    while n_made < n:
        n_tried += 1
        assert n_tried < 40 * n + 100, f"{n_made} places for {name} in {n_tried} runs"
        seed, drops, filtered = int(rng.integers(10**6)), *(rng.random(2) < (0.7, 0.2))
        size, budget = int(rng.integers(4, 14)), int(rng.integers(8, 40))
        told = simulate(size, seed, drops=bool(drops), filtered=bool(filtered), budget=budget)
        run = Run.of(told)
        if not run.rows or not mutate(run, rng):
            continue
        n_made += 1
        found = run.errors()
        n_with_code += code in found
        if not found:
            wrong.append(f"{name} of simulate({size}, {seed}, {drops=}, {filtered=}, {budget=})")
    assert n_with_code > n // 2, f"{code} is not what {name} is found by: {n_with_code} of {n}"
    return wrong


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_no_mutation_is_missed(name: str) -> None:
    assert missed(name, N_FAST) == []


@pytest.mark.attack
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_none_of_300_mutations_is_missed(name: str) -> None:
    assert missed(name, N_FULL) == []


def test_a_run_that_nobody_changed_has_no_error() -> None:
    for seed in range(20):
        assert Run.of(simulate(8, seed, drops=True, filtered=seed % 2 == 0)).errors() == set()
    assert set(tables.SCHEMAS["tokens"].names) == set(Run.of(simulate(2)).rows[0])
