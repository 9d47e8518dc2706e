"""Sampling rules of live traffic, and what the census makes of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from test_census import arrived, finished, scheduled

from actds.dataset.account import account
from actds.format import tables
from actds_writers.census.census import Census
from actds_writers.ipc.messages import (
    ClientFacts,
    Reference,
    RequestArrived,
    RequestFinished,
    StepLost,
)
from actds_writers.sampling import (
    EVERYTHING,
    Labels,
    LeftOut,
    Lot,
    SamplingRules,
    client_request_id,
    hooks_asked,
    positions_asked,
)


def rules(**fields: Any) -> SamplingRules:
    return SamplingRules.model_validate(fields)


def test_without_rules_everything_is_stored() -> None:
    assert rules().left_out(Labels("cmpl-a-0")) == EVERYTHING
    assert rules(seed=9).describe() == "all"


def test_a_fraction_is_that_share_of_the_requests_and_the_same_every_time() -> None:
    ids = [f"cmpl-{n}-0" for n in range(4000)]
    tenth = {i for i in ids if rules(fraction=0.1, seed=4).left_out(Labels(i)) == EVERYTHING}
    # 4000 draws at 0.1: five standard deviations are 95.
    assert abs(len(tenth) - 400) < 95
    third = {i for i in ids if rules(fraction="0.3", seed=4).left_out(Labels(i)) == EVERYTHING}
    assert tenth < third
    other = {i for i in ids if rules(fraction=0.1, seed=5).left_out(Labels(i)) == EVERYTHING}
    assert tenth != other
    reason = "sampling:fraction"
    assert rules(fraction=0).left_out(Labels("a")) == LeftOut(reason, reason)
    assert all(rules(fraction=1.0).left_out(Labels(i)) == EVERYTHING for i in ids)


def test_phases_are_left_out_each_for_itself() -> None:
    assert rules(phases=["decode"]).left_out(Labels("a")) == LeftOut("sampling:phase", None)
    assert rules(phases=["prefill"]).left_out(Labels("a")) == LeftOut(None, "sampling:phase")
    assert rules(phases=["decode", "prefill"]).left_out(Labels("a")) == EVERYTHING


def test_headers_and_metadata_choose_requests_and_skip_wins() -> None:
    found = rules(
        only=[
            {"xarg": "team", "values": ["red", "b*"]},
            {"header": "X-Session-ID", "values": ["s"]},
        ],
        skip=[{"header": "x-request-id", "values": ["private-*"]}],
    )
    only, skip = (LeftOut(f"sampling:{w}", f"sampling:{w}") for w in ("only", "skip"))
    assert found.left_out(Labels("cmpl-1-0", xargs={"team": "red"})) == EVERYTHING
    assert found.left_out(Labels("cmpl-1-0", xargs={"team": "blue"})) == EVERYTHING
    assert found.left_out(Labels("cmpl-1-0", xargs={"team": ["green", "red"]})) == EVERYTHING
    assert found.left_out(Labels("cmpl-1-0", xargs={"team": "green"})) == only
    assert found.left_out(Labels("cmpl-1-0", session_id="s")) == EVERYTHING
    assert found.left_out(Labels("cmpl-1-0")) == only
    assert found.left_out(Labels("chatcmpl-private-7", session_id="s")) == skip


@pytest.mark.parametrize(
    ("external_id", "client_id"),
    [
        ("cmpl-a-1-0", "a-1"),
        ("chatcmpl-a-1", "a-1"),
        ("2_cmpl-a-1-0", "a-1"),
        ("anything", "anything"),
    ],
)
def test_the_clients_request_id_is_found_in_the_servers(external_id: str, client_id: str) -> None:
    assert client_request_id(external_id) == client_id


def test_rules_are_recorded_as_canonical_json_without_floats() -> None:
    found = rules(fraction=0.1, seed=3, skip=[{"xarg": "team", "values": ["red"]}]).describe()
    assert json.loads(found) == {
        "fraction": "0.1", "only": [], "phases": ["decode", "prefill"], "seed": 3,
        "skip": [{"values": ["red"], "xarg": "team"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"fraction": 1.5},
        {"fraction": "much"},
        {"fraction": True},
        {"phases": []},
        {"phases": ["warmup"]},
        {"only": [{"values": ["a"]}]},
        {"only": [{"header": "x-request-id", "xarg": "a", "values": ["a"]}]},
        {"skip": [{"header": "x-other", "values": ["a"]}]},
        {"skip": [{"xarg": "a", "values": []}]},
        {"seed": -1},
    ],
)
def test_refuses_rules_that_mean_nothing(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rules(**fields)


def left_out(request: int, prompt_len: int, rule: LeftOut) -> RequestArrived:
    return replace(arrived(request, prompt_len), left_out=rule)


def spans_and_findings(
    census: Census, acknowledged: dict[Lot, int], drops: frozenset[int] = frozenset()
) -> tuple[list[tuple], list[Any], dict[str, int]]:
    """Return spans, and what the accounting says of the census with rows to match."""
    found = census.tables(acknowledged, ClientFacts(), drops)
    names = ("request", "start", "stop", "disposition", "reason", "step", "ref_request")
    spans = [tuple(row[name] for name in names) for row in found.spans.to_pylist()]
    lost: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    prompt = dict(
        zip(*(found.requests[n].to_pylist() for n in ("request", "prompt_len")), strict=True)
    )
    for request, start, stop, disposition, reason, step, _ in spans:
        if disposition == "captured":
            rows += [
                {
                    "request": request, "position": p, "token_id": 5, "step": step + p - start,
                    "phase": "prefill" if p < prompt[request] else "decode",
                    "attempt": 0, "chunk": p, "flags": 0,
                }
                for p in range(start, stop)
            ]  # fmt: skip
        if disposition == "dropped":
            lost.append({
                "drop": 0, "t_ns": 1, "step": step, "drop_reason": reason, "request": request,
                "policy": "drop_newest", "start": start, "stop": stop, "n_tokens": stop - start,
                "batch_tokens": 9, "max_seq_len": 9,
            })  # fmt: skip
    columns = {name: [row.get(name) for row in lost] for name in tables.SCHEMAS["drops"].names}
    tokens = {name: [row[name] for row in rows] for name in tables.SCHEMAS["tokens"].names[:-2]}
    result = account(
        "r", found.requests, found.steps, found.spans, tables.build("drops", columns),
        [tables.build("tokens", tokens)],
    )  # fmt: skip
    return spans, result.findings, found.totals


ALL: dict[Lot, int] = {("prefill", None): 99, ("decode", None): 99}
DECODE_ONLY = LeftOut("sampling:phase", None)
NOTHING = LeftOut("sampling:skip", "sampling:skip")


def one_step_each(census: Census, request: int, prompt_len: int, first: int) -> None:
    """Prefill one token a step, then two decodes, so that rows can name their step."""
    for n in range(prompt_len + 2):
        census.observe(scheduled(first + n, (request, n, n + 1)))
    census.observe(ended(request, prompt_len, 3))


def ended(request: int, prompt_len: int, generated: int) -> RequestFinished:
    """Return an end with the digest of the token ids that the rows have."""
    ids = np.full(prompt_len + generated - 1, 5, "<u4")
    return replace(
        finished(request, generated), token_digest=hashlib.sha256(ids.tobytes()).hexdigest()
    )


def test_left_out_phases_are_filtered_and_the_account_holds() -> None:
    census = Census()
    census.observe(left_out(0, 3, DECODE_ONLY))
    census.observe(left_out(1, 3, NOTHING))
    census.observe(arrived(2, 3))
    for request in range(3):
        one_step_each(census, request, 3, 10 * request)
    spans, findings, totals = spans_and_findings(census, ALL)
    assert spans == [
        (0, 0, 3, "filtered", "sampling:phase", 0, None),
        (0, 3, 5, "captured", None, 3, None),
        (1, 0, 5, "filtered", "sampling:skip", 10, None),
        (2, 0, 5, "captured", None, 20, None),
    ]
    assert [f for f in findings if f.severity == "error"] == []
    assert (totals["filtered"], totals["captured"]) == (8, 7)


def test_a_rule_wins_over_drops_and_over_rows_that_were_never_committed() -> None:
    census = Census()
    census.observe(left_out(0, 3, DECODE_ONLY))
    one_step_each(census, 0, 3, 0)
    for step in (1, 3):
        census.observe(StepLost(step, "queue_full"))
    spans, findings, _ = spans_and_findings(census, {"decode": 3}, frozenset({1, 3}))
    assert spans == [
        (0, 0, 3, "filtered", "sampling:phase", 0, None),
        (0, 3, 4, "dropped", "queue_full", 3, None),
        (0, 4, 5, "aborted", "writer_ended", 4, None),
    ]
    assert [f for f in findings if f.severity == "error"] == []


def test_hits_of_what_is_left_out_are_filtered_and_weigh_nothing() -> None:
    census = Census()
    census.observe(arrived(0, 4))
    census.observe(left_out(1, 4, NOTHING))
    for n in range(4):
        census.observe(scheduled(n, (0, n, n + 1)))
    census.observe(ended(0, 4, 1))
    hit = (Reference(1, 0, 3, 0),)
    census.observe(scheduled(4, (1, 3, 4), references=hit))
    census.observe(finished(1, 1))
    spans, findings, totals = spans_and_findings(census, ALL)
    assert spans[1:] == [
        (1, 0, 3, "filtered", "sampling:skip", None, None),
        (1, 3, 4, "filtered", "sampling:skip", 4, None),
    ]
    assert findings == []
    assert totals["cache_ref"] == 0


def test_positions_that_were_never_computed_stay_aborted() -> None:
    census = Census()
    census.observe(left_out(0, 4, NOTHING))
    census.observe(scheduled(0, (0, 0, 1)))
    census.observe(finished(0, 0, "abort"))
    spans, findings, _ = spans_and_findings(census, ALL)
    assert spans == [
        (0, 0, 1, "filtered", "sampling:skip", 0, None),
        (0, 1, 4, "aborted", "request_aborted", None, None),
    ]
    assert findings == []


def test_steps_count_what_the_rules_left_out() -> None:
    census = Census()
    census.observe(left_out(0, 3, NOTHING))
    census.observe(arrived(1, 2))
    census.observe(scheduled(0, (0, 0, 3), (1, 0, 2)))
    census.observe(finished(0, 1))
    census.observe(finished(1, 1))
    [step] = census.tables(ALL, ClientFacts()).steps.to_pylist()
    assert (step["filtered_tokens"], step["captured_tokens"], step["batch_tokens"]) == (3, 2, 5)


def test_a_client_asks_for_positions_by_name_and_range() -> None:
    end = 2**31
    for text, wanted in (
        ("all", ((0, end),)),
        ("none", ()),
        ("prompt", ((0, 9),)),
        ("last_prompt", ((8, 9),)),
        ("all_generated", ((9, end),)),
        ("last_prompt, all_generated", ((8, end),)),
        ("0-3,2-5,7-", ((0, 5), (7, end))),
        ("4-4", ()),
    ):
        assert positions_asked(text, 9) == wanted, text
    for bad in ("", "last", "3", "-3", "5-2", "1-2;3-4", 7, None, "0-9999999999", "0-1," * 400):
        with pytest.raises(ValueError, match="actds_positions"):
            positions_asked(bad, 9)
    assert LeftOut(ranges=((2, 4), (8, 20))).stored(10, 9) == [(2, 4), (8, 10)]
    assert LeftOut("a", None, ((2, 4), (8, 20))).stored(12, 9) == [(9, 12)]
    choices = [("a", "b"), ("c",)]
    for text, hooks in (("all", None), ("c", ("c",)), (" b,a,a", ("a", "b"))):
        assert hooks_asked(text, choices) == hooks
    for bad in ("", "a", "a,b,c", "all,c", 7, None, "c," * 4000):
        with pytest.raises(ValueError, match="actds_hooks: "):
            hooks_asked(bad, choices)
    assert LeftOut().stored(12, 9) == [(0, 12)] and LeftOut("a", "b").stored(12, 9) == []
