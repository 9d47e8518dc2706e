"""The census: spans that partition every request, from the scheduler's messages alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actds.format.inclusion import Design
from actds.format.tables import DISPOSITIONS
from actds_testing.independent import draw
from actds_writers.census.census import Census
from actds_writers.census.process import from_line, to_line
from actds_writers.ipc.messages import (
    ClientFacts,
    LeftOut,
    PromptFact,
    Reference,
    Replayed,
    RequestArrived,
    RequestFinished,
    StepExecuted,
    StepLost,
    StepScheduled,
)
from actds_writers.sampling import Lot


def arrived(request: int, prompt_len: int) -> RequestArrived:
    return RequestArrived(request, f"p{request}-abc", f"p{request}", prompt_len, 1, None, None)


def scheduled(
    number: int, *pieces: tuple[int, int, int], references: tuple[Reference, ...] = (),
    preempted: tuple[int, ...] = (),
) -> StepScheduled:  # fmt: skip
    requests, starts, stops = (np.array(c, np.int64) for c in zip(*pieces, strict=True))
    return StepScheduled(
        number, number * 10, requests, starts, stops - starts, references, 0, len(pieces),
        preempted, 0.5,
    )  # fmt: skip


def finished(request: int, generated: int, reason: str = "length") -> RequestFinished:
    return RequestFinished(request, 99, reason, generated, "0" * 64)


def spans(census: Census, acknowledged: dict[Lot, int]) -> list[tuple]:
    found = census.tables(acknowledged, ClientFacts())
    names = ("request", "start", "stop", "disposition", "reason", "step", "ref_request")
    return [tuple(row[name] for name in names) for row in found.spans.to_pylist()]


ALL: dict[Lot, int] = {("prefill", None): 99, ("decode", None): 99}


def test_a_request_is_partitioned_and_its_last_token_never_fed() -> None:
    census = Census()
    census.observe(arrived(0, 4))
    census.observe(scheduled(0, (0, 0, 4)))
    census.observe(scheduled(1, (0, 4, 5)))
    census.observe(scheduled(2, (0, 5, 6)))
    census.observe(finished(0, 3))
    assert spans(census, ALL) == [(0, 0, 6, "captured", None, 0, None)]


def test_roles_that_came_with_a_request_are_of_its_positions() -> None:
    census = Census()
    for request in range(4):
        census.observe(replace(arrived(request, 4), roles="t1u2t1" if request != 2 else ""))
    pieces = [(n, 0, 4) for n in range(4)]
    census.observe(scheduled(0, *pieces))
    census.observe(scheduled(1, (0, 4, 5), (3, 4, 5)))
    census.observe(replace(finished(0, 3), roles="k1a1"))
    census.observe(replace(finished(1, 1), roles=""))
    census.observe(finished(2, 1))
    # The client's word counts where there is one; the last request has no end.
    told = ClientFacts((PromptFact("p1", "p1", "x", 0, roles="s4"),))
    found = census.tables(ALL, told).roles.to_pylist()
    prompt = [(0, 1, "template"), (1, 3, "user"), (3, 4, "template")]
    assert [tuple(line.values()) for line in found] == [
        *((0, *line) for line in prompt), (0, 4, 5, "thinking"), (0, 5, 6, "assistant"),
        (1, 0, 4, "system"), *((3, *line) for line in prompt),
    ]  # fmt: skip


def test_a_prefix_hit_names_the_request_that_computed_it() -> None:
    census = Census()
    census.observe(arrived(0, 40))
    census.observe(arrived(1, 40))
    hit = (Reference(1, 0, 32, 0),)
    census.observe(scheduled(0, (0, 0, 40), (1, 32, 40), references=hit))
    census.observe(finished(0, 1))
    census.observe(finished(1, 1))
    found = census.tables(ALL, ClientFacts(engine_cached={"p1": 32}))
    assert spans(census, ALL)[1] == (1, 0, 32, "cache_ref", None, None, 0)
    assert found.requests["cached_tokens"].to_pylist() == [0, 32]
    assert found.requests["engine_cached_tokens"].to_pylist() == [None, 32]
    assert found.steps["cache_hit_ratio"].to_pylist() == [32 / 80]


def test_the_hit_ratio_is_of_the_step() -> None:
    census = Census()
    for request in range(3):
        census.observe(arrived(request, 40))
    census.observe(scheduled(0, (0, 0, 40)))
    census.observe(scheduled(1, (0, 40, 41)))
    hits = (Reference(1, 0, 32, 0), Reference(2, 0, 16, 0))
    census.observe(scheduled(2, (1, 32, 40), (2, 16, 40), (0, 41, 42), references=hits))
    ratios = census.tables(ALL, ClientFacts()).steps["cache_hit_ratio"]
    assert ratios.to_pylist() == [0.0, None, 48 / 80]


def test_recomputation_is_counted_in_steps_and_not_in_spans() -> None:
    census = Census()
    census.observe(arrived(0, 4))
    census.observe(scheduled(0, (0, 0, 4)))
    census.observe(scheduled(1, (0, 4, 5)))
    census.observe(scheduled(2, (0, 0, 6), preempted=(0,)))
    census.observe(finished(0, 3))
    found = census.tables(ALL, ClientFacts())
    assert spans(census, ALL) == [(0, 0, 6, "captured", None, 0, None)]
    assert found.steps["recomputed_tokens"].to_pylist() == [0, 0, 5]
    assert found.steps["captured_tokens"].to_pylist() == [4, 1, 1]
    assert found.requests["n_preemptions"].to_pylist() == [1]


def test_rows_that_were_never_committed_are_aborted_per_phase() -> None:
    census = Census()
    census.observe(arrived(0, 4))
    for number, piece in enumerate([(0, 0, 2), (0, 2, 4), (0, 4, 5), (0, 5, 6)]):
        census.observe(scheduled(number, piece))
    census.observe(finished(0, 3))
    assert spans(census, {("prefill", None): 1, ("decode", None): 2}) == [
        (0, 0, 5, "captured", None, 0, None),
        (0, 5, 6, "aborted", "writer_ended", 3, None),
    ]
    assert spans(census, {}) == [(0, 0, 6, "aborted", "writer_ended", 0, None)]


def test_rows_that_were_never_committed_are_aborted_per_hooks_that_were_chosen() -> None:
    census, chosen = Census(), ("resid_post.1",)
    census.observe(arrived(0, 4))
    census.observe(replace(arrived(1, 4), left_out=LeftOut(hooks=chosen)))
    census.observe(scheduled(0, (0, 0, 2), (1, 0, 2)))
    census.observe(scheduled(1, (0, 2, 4), (1, 2, 4)))
    through: dict[Lot, int] = {("prefill", None): 1, ("prefill", chosen): 0}
    assert [line[:4] for line in spans(census, through)] == [
        (0, 0, 4, "captured"), (1, 0, 2, "captured"), (1, 2, 4, "aborted"),
    ]  # fmt: skip


def test_a_drop_that_nobody_logged_is_aborted_though_later_rows_are_committed() -> None:
    census = Census()
    census.observe(arrived(0, 4))
    for number, piece in enumerate([(0, 0, 2), (0, 2, 4), (0, 4, 5), (0, 5, 6)]):
        census.observe(scheduled(number, piece))
    for step in (1, 2):
        census.observe(StepLost(step, "queue_full"))
    census.observe(finished(0, 3))
    found = census.tables(ALL, ClientFacts(), logged_drops=frozenset([2]))
    names = ("start", "stop", "disposition", "reason")
    assert [tuple(span[name] for name in names) for span in found.spans.to_pylist()] == [
        (0, 2, "captured", None),
        (2, 4, "aborted", "writer_ended"),
        (4, 5, "dropped", "queue_full"),
        (5, 6, "captured", None),
    ]


@pytest.mark.parametrize(("policy", "word"), [("thin", "thinned"), ("drop_newest", "dropped")])
def test_the_policy_says_what_became_of_rows_that_were_not_drawn(policy: str, word: str) -> None:
    design, census = Design(np.uint64(7), 0.25), Census()
    census.observe(arrived(0, 40))
    census.observe(scheduled(0, (0, 0, 40)))
    census.observe(StepExecuted(0, 7, "eager", 40, 0, 1, None, None, None, inclusion=0.25))
    census.observe(finished(0, 1))
    found = census.tables(ALL, ClientFacts(), frozenset([0]), design, policy).spans.to_pylist()
    fates = {
        at: (span["disposition"], span["inclusion"])
        for span in found
        for at in range(span["start"], span["stop"])
    }
    drawn = {at for at in range(40) if draw.number(7, 0, at) < 0.25}
    assert 0 < len(drawn) < 40
    assert fates == {at: ("captured", None) if at in drawn else (word, 0.25) for at in range(40)}


def test_positions_that_were_never_computed_are_owed() -> None:
    census = Census()
    census.observe(arrived(0, 10))
    census.observe(arrived(1, 5))
    census.observe(scheduled(0, (0, 0, 6)))
    census.observe(finished(0, 0, "abort"))
    assert spans(census, ALL) == [
        (0, 0, 6, "captured", None, 0, None),
        (0, 6, 10, "aborted", "request_aborted", None, None),
        (1, 0, 5, "aborted", "engine_ended", None, None),
    ]


def test_execution_may_be_told_before_the_schedule() -> None:
    census = Census()
    census.observe(arrived(0, 2))
    census.observe(StepExecuted(0, 7, "eager", 2, 0, 1, None, None, None))
    census.observe(scheduled(0, (0, 0, 2)))
    census.observe(finished(0, 1))
    [row] = census.tables(ALL, ClientFacts()).steps.to_pylist()
    assert (row["duration_ns"], row["kernel_mode"], row["batch_tokens"]) == (7, "eager", 2)


def test_skipped_prompts_stand_in_the_requests_table() -> None:
    census = Census()
    census.observe(arrived(0, 2))
    long = PromptFact("p1", "b", "s", 1, "E004 too long", prompt_len=70_000)
    prompts = (PromptFact("p0", "a", "s", 0), long)
    requests = census.tables(ALL, ClientFacts(prompts)).requests.to_pylist()
    assert [(r["external_id"], r["finish_reason"]) for r in requests] == [
        ("a", "unfinished"), ("b", "skipped"),
    ]  # fmt: skip
    assert (requests[1]["reason"], requests[1]["prompt_len"]) == ("E004 too long", 70_000)


def test_prompts_that_never_arrived_were_not_begun_also_of_several_samples() -> None:
    census = Census()
    for number, key in enumerate(["1_p0", "p2", "0_p0"]):
        census.observe(replace(arrived(number, 2), external_id=key))
    prompts = tuple(PromptFact(f"p{n}", f"e{n}", "s", n, prompt_len=7 + n) for n in range(5))
    why = "the harvest was interrupted before it was served"
    for said, words in (("", "the process ended before it was served"), (why, why)):
        found = census.tables(ALL, ClientFacts(prompts, unbegun=said))
        lines = [(r["request"], r["external_id"], r["finish_reason"], r["prompt_len"], r["reason"])
                 for r in found.requests.to_pylist()]  # fmt: skip
        assert [line[:3] for line in lines[:3]] == [
            (0, "1_e0", "unfinished"), (1, "e2", "unfinished"), (2, "0_e0", "unfinished"),
        ]  # fmt: skip
        assert lines[3:] == [(3 + i, f"e{n}", "unbegun", 7 + n, words)
                             for i, n in enumerate((1, 3, 4))]  # fmt: skip
    # A live census knows of no prompt, and so of none that it did not see.
    assert census.tables(ALL, ClientFacts()).requests.num_rows == 3


def test_replays_lead_to_their_source_by_number_the_unserved_ones_too() -> None:
    census = Census()
    census.observe(arrived(1, 3))
    census.observe(arrived(0, 2))
    prompts = tuple(
        PromptFact(f"p{n}", f"e{n}", "s", n, skip, "", origin)
        for n, (skip, origin) in enumerate([
            (None, None),
            (None, Replayed("d" * 32, "e" * 64, "r-1", 7, 2)),
            ("E022 unknown tokens", Replayed("d" * 32, "e" * 64, "r-1", 9, 4)),
            (None, Replayed("d" * 32, "e" * 64, "r-1", 8, 3)),
        ])
    )  # fmt: skip
    found = census.tables(ALL, ClientFacts(prompts))
    assert [tuple(line.values()) for line in found.origins.to_pylist()] == [
        (1, "d" * 32, "e" * 64, "r-1", 7, 2),
        (2, "d" * 32, "e" * 64, "r-1", 9, 4),
        (3, "d" * 32, "e" * 64, "r-1", 8, 3),
    ]
    ends = ["unfinished", "unfinished", "skipped", "unbegun"]
    assert found.requests["finish_reason"].to_pylist() == ends
    line = to_line(ClientFacts(prompts))  # a killed census has them from its journal
    assert from_line(line) == ClientFacts(prompts)
    assert not census.tables(ALL, ClientFacts(prompts[:1])).origins.num_rows


def test_an_idle_engine_has_no_running_request() -> None:
    census = Census()
    for request in range(2):
        census.observe(arrived(request, 4))
    census.observe(scheduled(0, (0, 0, 4), (1, 0, 4)))
    assert census.progress().running == 2
    census.observe(finished(0, 1))
    assert census.progress().running == 1  # no step follows that would say so
    census.observe(finished(1, 1))
    assert (census.progress().running, census.progress().waiting) == (0, 0)


def test_what_is_counted_while_it_runs_is_what_the_spans_have_at_the_end() -> None:
    census = Census()
    rules = [LeftOut(), LeftOut("sampling:skip", "sampling:skip"), LeftOut(decode="sampling:phase")]
    for request in range(6):
        census.observe(replace(arrived(request, 40), left_out=rules[request % 3]))
    hits = tuple(Reference(request, 0, 32, 0) for request in (3, 4, 5))
    census.observe(scheduled(0, (0, 0, 40), (1, 0, 40), (2, 0, 40)))
    census.observe(scheduled(1, (0, 40, 41), (1, 40, 41), (2, 40, 41), (3, 32, 40), (4, 32, 36),
                             (5, 32, 36), references=hits))  # fmt: skip
    # Computed before; one row of each request is behind its end.
    again = scheduled(2, (0, 0, 43), (1, 41, 43), (2, 41, 43), preempted=(0,))
    census.observe(replace(again, n_undelivered=np.array([1, 1, 1])))
    # Before that, the request of this step had run on the run's own weights.
    census.observe(replace(scheduled(3, (3, 40, 41)), mixed=(3,)))
    for request in range(6):  # the last two before their prompts were computed
        census.observe(
            finished(request, 3 if request < 3 else 2, "abort" if request > 3 else "stop")
        )
    counted, totals = census.progress(), census.tables(ALL, ClientFacts()).totals
    assert counted.filtered_tokens == totals["filtered"] > 0
    assert counted.undelivered_tokens == totals["undelivered"] == 1
    assert counted.aborted_tokens == totals["aborted"] == 10
    assert totals["recomputed"] == 41


def test_what_a_client_did_not_ask_for_is_filtered_position_by_position() -> None:
    census = Census()
    ranges = ((2, 5), (39, 41))
    census.observe(arrived(0, 40))
    census.observe(replace(arrived(1, 40), left_out=LeftOut(ranges=ranges)))
    census.observe(
        replace(arrived(2, 40), left_out=LeftOut(decode="sampling:phase", ranges=ranges))
    )
    census.observe(replace(arrived(3, 40), left_out=LeftOut(ranges=())))
    hits = tuple(Reference(request, 0, 32, 0) for request in (1, 2, 3))
    census.observe(scheduled(0, (0, 0, 40)))
    census.observe(scheduled(1, (0, 40, 41), *((n, 32, 40) for n in (1, 2, 3)), references=hits))
    census.observe(scheduled(2, *((n, 40, 43) for n in (1, 2, 3))))
    for request in range(4):
        census.observe(finished(request, 2 if request == 0 else 4))
    counted, made = census.progress(), census.tables(ALL, ClientFacts())
    assert counted.filtered_tokens == made.totals["filtered"] == 38 + 39 + 43
    spans = made.spans.to_pylist()
    kept = [
        (s["request"], s["start"], s["stop"], s["disposition"])
        for s in spans
        if s["request"] and s["disposition"] != "filtered"
    ]
    assert sorted(kept) == [
        (1, 2, 5, "cache_ref"),
        (1, 39, 41, "captured"),
        (2, 2, 5, "cache_ref"),
        (2, 39, 40, "captured"),
    ]
    reasons = {(s["request"], s["start"]): s["reason"] for s in spans}
    assert reasons[1, 0] == reasons[1, 41] == reasons[2, 0] == reasons[3, 0] == "sampling:request"
    assert reasons[2, 40] == "sampling:phase"
    assert sum(s["stop"] - s["start"] for s in spans) == sum(made.totals[n] for n in DISPOSITIONS)


def test_a_dropped_step_loses_what_no_rule_leaves_out() -> None:
    census = Census()
    census.observe(replace(arrived(0, 4), left_out=LeftOut("sampling:skip", "sampling:skip")))
    census.observe(arrived(1, 5))
    census.observe(StepLost(0, "queue_full"))
    census.observe(scheduled(0, (0, 0, 4), (1, 0, 5)))
    assert census.progress().dropped == {"queue_full": 5}
