"""The scheduler side when results come late: what is cut, what is reported, in which order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actds.errors import ActdsError
from actds_writers.engines.account import SchedulerSide
from actds_writers.engines.vllm import scheduler
from actds_writers.engines.vllm.requests import WrittenBlocks
from actds_writers.engines.vllm.scheduler import Settled, VllmSchedulerSide
from actds_writers.ipc.messages import RequestFinished, StepScheduled, TokensSampled
from actds_writers.sampling import EVERYTHING, LeftOut

P = 4


class Told(list[Any]):
    """What the census was told."""

    send = list.append

    def close(self) -> None: ...

    @property
    def steps(self) -> list[StepScheduled]:
        return [m for m in self if isinstance(m, StepScheduled)]


class Request:
    """A request of four prompt tokens, as a scheduler holds it."""

    def __init__(self, name: str = "a-00000000") -> None:
        self.request_id, self.num_prompt_tokens, self.arrival_time = name, P, 1.0
        self.block_hashes: list[bytes] = []
        self.sampling_params: Any = None
        self.num_computed_tokens = self.num_stale_output_tokens = 0
        self.drop_stale_output = self.over = False
        self.all_token_ids = list(range(P))

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - P

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[P:]

    def is_finished(self) -> bool:
        return self.over

    def get_finished_reason(self) -> str:
        return "stop"


class Engine:
    """A scheduler whose steps are scheduled and taken when the test says so."""

    def __init__(self, n_drafts: int = 0, *, entropy: bool = False, changed: bool = False) -> None:
        self.told = Told()
        written = WrittenBlocks([2]) if changed else None
        self.side = VllmSchedulerSide(
            self.told, 2 if changed else 32, 8, entropy=entropy, written=written, weights="digest"
        )
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_spec_tokens = n_drafts
        self.kv_cache_manager = SimpleNamespace(usage=0.0)

    def arrive(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.side.arrived(request)
        return request

    def schedule(
        self,
        n_tokens: dict[str, int],
        drafts: dict[str, int] | None = None,
        new: dict[str, list[int]] | None = None,
        resumed: dict[str, list[int]] | None = None,
    ) -> Any:
        for name, n in n_tokens.items():
            self.requests[name].num_computed_tokens += n
        output: Any = SimpleNamespace(
            num_scheduled_tokens=n_tokens, num_invalid_spec_tokens=None,
            scheduled_spec_decode_tokens={name: [7] * n for name, n in (drafts or {}).items()},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in (new or {}).items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(resumed or ()), resumed_req_ids=set(resumed or ()),
                new_block_ids=[(ids,) for ids in (resumed or {}).values()],
            ),
        )  # fmt: skip
        output._actds = self.side.scheduled(self, output, ())  # noqa: SLF001
        return output

    def take(self, output: Any, sampled: dict[str, list[int]], stops: bool = False) -> None:
        results = SimpleNamespace(
            sampled_token_ids=list(sampled.values()),
            req_id_to_index={name: i for i, name in enumerate(sampled)},
        )
        self.side.taking(output, results)
        for name, ids in sampled.items():
            request = self.requests[name]
            if not request.over:
                request.all_token_ids += ids
                if stops:
                    self.end(request)
        self.side.taken(output)

    def end(self, request: Request) -> None:
        request.over = True
        self.side.finished(request)


def mark(output: Any) -> Any:
    """Return what a step tells the workers."""
    return vars(output)["_actds"]


A = "a-00000000"


def test_a_row_fed_with_the_token_that_ended_its_request_is_cut() -> None:
    engine = Engine()
    engine.arrive(Request())
    first = engine.schedule({A: 4})
    ahead = engine.schedule({A: 1})  # before the result of the first is known
    assert engine.told.steps == []
    engine.take(first, {A: [2]}, stops=True)
    engine.take(ahead, {A: [9]})
    one, two = engine.told.steps
    assert one.n_undelivered is None and two.n_undelivered is not None
    assert two.n_undelivered.tolist() == [1] and two.starts.tolist() == [4]
    last = engine.schedule({})
    assert mark(last).settled == (Settled(0, {}), Settled(1, {0: 1}))
    assert not engine.side.has_news


def test_the_end_of_a_request_is_told_behind_its_steps_in_flight() -> None:
    engine = Engine()
    engine.arrive(Request())
    first = engine.schedule({A: 4})
    ahead = engine.schedule({A: 1})
    engine.take(first, {A: [2]}, stops=True)
    engine.take(ahead, {A: [9]})
    assert [type(m) for m in engine.told[1:]] == [StepScheduled, StepScheduled, RequestFinished]


@pytest.mark.parametrize(
    ("sampled", "stops", "undelivered", "rejected"),
    [
        ([5], False, 0, 3),  # no draft stands
        ([5, 6], False, 0, 2),
        ([5, 6, 7, 8], False, 0, 0),
        ([2], True, 0, 3),  # ended: rejected ones behind the end are still rejected
    ],
)
def test_rejected_drafts_are_cut_and_the_mark_falls_back(
    sampled: list[int], stops: bool, undelivered: int, rejected: int
) -> None:
    engine = Engine(n_drafts=3)
    request = engine.arrive(Request())
    engine.take(engine.schedule({A: 4}), {A: [1]})
    step = engine.schedule({A: 4}, {A: 3})
    engine.take(step, {A: sampled}, stops=stops)
    told = engine.told.steps[-1]
    assert int((told.n_rejected if told.n_rejected is not None else [0])[0]) == rejected
    assert told.n_undelivered is None or told.n_undelivered.tolist() == [undelivered]
    assert (told.drafted_tokens, told.accepted_tokens) == (3, len(sampled) - 1)
    if not stops:
        request.num_computed_tokens -= rejected  # as the scheduler does
        again = engine.schedule({A: 1})
        engine.take(again, {A: [4]})
        assert engine.told.steps[-1].starts.tolist() == [4 + 4 - rejected]
        assert engine.told.steps[-1].references == ()


def test_drafts_accepted_behind_the_last_token_are_undelivered() -> None:
    engine = Engine(n_drafts=3)
    request = engine.arrive(Request())
    engine.take(engine.schedule({A: 4}), {A: [1]})
    step = engine.schedule({A: 4}, {A: 3})
    results = SimpleNamespace(sampled_token_ids=[[2, 6, 7]], req_id_to_index={A: 0})
    engine.side.taking(step, results)
    request.all_token_ids += [2]  # the scheduler cuts the list at the stop token
    engine.end(request)
    engine.side.taken(step)
    told = engine.told.steps[-1]
    assert told.n_undelivered is not None and told.n_rejected is not None
    assert (told.n_undelivered.tolist(), told.n_rejected.tolist()) == ([2], [1])
    assert (told.drafted_tokens, told.accepted_tokens) == (3, 2)


def test_a_step_scheduled_on_drafts_that_fell_is_moved_back() -> None:
    engine = Engine(n_drafts=3)
    engine.arrive(Request())
    engine.take(engine.schedule({A: 4}), {A: [1]})
    step = engine.schedule({A: 4}, {A: 3})
    ahead = engine.schedule({A: 4}, {A: 3})  # as if all three stood: from position 8
    engine.take(step, {A: [5, 6]})
    engine.take(ahead, {A: [7]})
    assert engine.told.steps[-1].starts.tolist() == [6]


class StopsAt:
    """Stop strings of a request whose text has one as soon as token 9 is sampled."""

    def __init__(self, _tokenizer: Any, _request: Request) -> None:
        self.n_delivered: int | None = None

    def read(self, request: Request) -> bool:
        if self.n_delivered is not None or 9 not in request.output_token_ids:
            return False
        self.n_delivered = request.output_token_ids.index(9) + 1
        return True


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Request]:
    monkeypatch.setattr(scheduler, "StopStrings", StopsAt)
    engine, request = Engine(entropy=True), Request()
    request.sampling_params = SimpleNamespace(stop=["nine"], extra_args=None)
    monkeypatch.setattr(scheduler, "recorded", lambda _: {})
    return engine, engine.arrive(request)


def test_what_is_computed_until_the_front_end_ends_a_request_is_undelivered(
    stoppable: tuple[Engine, Request],
) -> None:
    """The front end finds the stop string two steps later, and aborts the request."""
    engine, request = stoppable
    engine.take(engine.schedule({A: 4}), {A: [5]})
    engine.take(engine.schedule({A: 1}), {A: [9]})
    engine.take(engine.schedule({A: 1}), {A: [6]})
    ahead = engine.schedule({A: 1})
    engine.end(request)  # the front end's abort
    engine.take(ahead, {A: [7]})
    late = [
        0 if m.n_undelivered is None else m.n_undelivered.tolist()[0] for m in engine.told.steps
    ]
    assert late == [0, 0, 1, 1]
    (end,) = (m for m in engine.told if isinstance(m, RequestFinished))
    assert (end.reason, end.generated_len) == ("stop", 2)
    fed = np.array([*range(P), 5], "<u4")
    assert end.token_digest == hashlib.sha256(fed.tobytes()).hexdigest()
    assert engine.told.index(end) < engine.told.index(engine.told.steps[2])
    told = [m.token_ids.tolist() for m in engine.told if isinstance(m, TokensSampled)]
    assert told == [[5], [9], [], []]
    assert vars(engine.schedule({}))["_actds"].finished == (0,)  # the workers hear of it now


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_that_ends_behind_a_stop_string_accounts_for_it(
    ahead: bool, stoppable: tuple[Engine, Request]
) -> None:
    """The census is complete whether or not the abort ever comes."""
    engine, _ = stoppable
    engine.take(engine.schedule({A: 4}), {A: [9]})
    if ahead:
        engine.schedule({A: 1})
    engine.side.close()
    assert [m.reason for m in engine.told if isinstance(m, RequestFinished)] == ["stop"]
    late = [m.n_undelivered for m in engine.told.steps[1:]]
    assert [n.tolist() for n in late if n is not None] == ([[1]] if ahead else [])


def test_a_limit_that_is_reached_behind_a_stop_string_is_a_stop(
    stoppable: tuple[Engine, Request],
) -> None:
    engine, request = stoppable
    engine.take(engine.schedule({A: 4}), {A: [5]})
    request.get_finished_reason = lambda: "length"  # type: ignore[method-assign]
    engine.take(engine.schedule({A: 1}), {A: [9]}, stops=True)
    (end,) = (m for m in engine.told if isinstance(m, RequestFinished))
    assert (end.reason, end.generated_len) == ("stop", 2)


def test_a_client_that_leaves_is_an_abort(stoppable: tuple[Engine, Request]) -> None:
    engine, request = stoppable
    engine.take(engine.schedule({A: 4}), {A: [5]})
    request.get_finished_reason = lambda: "abort"  # type: ignore[method-assign]
    engine.end(request)
    (end,) = (m for m in engine.told if isinstance(m, RequestFinished))
    assert (end.reason, end.generated_len) == ("abort", 1)


def test_results_that_the_engine_discards_leave_no_row() -> None:
    engine = Engine()
    request = engine.arrive(Request())
    engine.take(engine.schedule({A: 4}), {A: [1]})
    step = engine.schedule({A: 1})
    request.num_computed_tokens = 0  # preempted, and what is in flight is sampled again
    request.num_stale_output_tokens, request.drop_stale_output = 1, True
    engine.side.taking(step, SimpleNamespace(sampled_token_ids=[[3]], req_id_to_index={A: 0}))
    engine.side.taken(step)
    told = engine.told.steps[-1]
    assert told.n_rejected is not None and told.n_rejected.tolist() == [1]


def test_tokens_that_requests_got_are_told_with_their_positions() -> None:
    """Neither that of half a prompt, nor of a request which has ended or is left out."""
    engine = Engine(entropy=True)
    engine.arrive(Request())
    engine.take(engine.schedule({A: 3}), {A: []})
    first = engine.schedule({A: 1})
    ahead = engine.schedule({A: 1})
    late = engine.schedule({A: 1})
    engine.take(first, {A: [21]})
    engine.take(ahead, {A: [22]}, stops=True)
    engine.take(late, {A: [23]})
    told = [m for m in engine.told if isinstance(m, TokensSampled)]
    assert [(m.step, m.positions.tolist(), m.token_ids.tolist()) for m in told] == [
        (0, [], []), (1, [4], [21]), (2, [5], [22]), (3, [], []),
    ]  # fmt: skip
    for entropy, left_out in ((False, EVERYTHING), (True, LeftOut(None, "sampling:phase"))):
        engine = Engine(entropy=entropy)
        engine.side._left_out = lambda *_, out=left_out: out  # type: ignore[method-assign]  # noqa: SLF001
        engine.arrive(Request())
        engine.take(engine.schedule({A: 4}), {A: [21]})
        told = [m for m in engine.told if isinstance(m, TokensSampled)]
        assert len(told) == entropy and not any(len(m.requests) for m in told)


def test_a_token_that_is_not_of_the_last_row_is_refused() -> None:
    engine = Engine(entropy=True)
    engine.arrive(Request())
    with pytest.raises(ActdsError, match="E501 step 0"):
        engine.take(engine.schedule({A: 3}), {A: [21]})


def test_steps_in_flight_at_the_end_of_the_engine_are_told_whole() -> None:
    engine = Engine()
    request = engine.arrive(Request())
    engine.schedule({A: 4})
    engine.end(request)
    engine.side.close()
    assert [type(m) for m in engine.told[1:]] == [StepScheduled, RequestFinished]
    assert engine.told.steps[0].n_undelivered is None


def test_whom_an_empty_step_preempted_the_next_one_tells() -> None:
    """With stages a schedule can preempt and have nothing else to do."""
    told = Told()
    side = SchedulerSide(told)
    one = side.number_request("a", P, None)
    side.number_step([one], [0], [2], waiting=0, running=1)
    side.number_step([], [], [], waiting=1, running=0, preempted=(one,))
    side.number_step([one], [0], [P], waiting=0, running=1)
    side.number_step([one], [P], [1], waiting=0, running=1)
    assert [(step.step, step.preempted) for step in told.steps] == [(0, ()), (2, (one,)), (3, ())]


# runs that began when the weights changed ---------------------------------------------------------

MIXED = LeftOut("unsupported:mixed_weights", "unsupported:mixed_weights")


def prompt_of(name: str, *hashes: str, computed: int = 0) -> Request:
    request = Request(f"{name}-00000000")
    request.block_hashes = [word.encode() for word in hashes]
    request.num_computed_tokens = computed
    return request


def test_a_request_on_blocks_of_old_weights_is_left_out_and_owns_no_block() -> None:
    engine = Engine(changed=True)
    stale = engine.arrive(prompt_of("stale", "x", "y", computed=0))
    stale.num_computed_tokens = 2  # a hit on a block that this run did not write
    first = engine.schedule({stale.request_id: 2}, new={stale.request_id: [7, 8]})
    assert mark(first).left_out == {stale.request_id: MIXED}
    assert (mark(first).weights, mark(first).lost) == ("digest", None)
    engine.take(first, {stale.request_id: [1]})
    after = engine.arrive(prompt_of("after", "x", "y"))
    after.num_computed_tokens = 2  # on block 8, which the mixed request wrote
    second = engine.schedule({after.request_id: 2}, new={after.request_id: [8, 3]})
    engine.take(second, {after.request_id: [1]})
    assert [step.mixed for step in engine.told.steps] == [(0,), (1,)]
    assert [step.references[0].ref_request for step in engine.told.steps] == [None, None]


def test_a_request_on_blocks_of_the_run_is_stored_and_refers_to_their_owner() -> None:
    engine = Engine(changed=True)
    one = engine.arrive(prompt_of("one", "x", "y"))
    two = engine.arrive(prompt_of("two", "x", "y"))
    engine.take(
        engine.schedule({one.request_id: 4}, new={one.request_id: [7, 8]}), {one.request_id: [1]}
    )
    two.num_computed_tokens = 2
    step = engine.schedule({two.request_id: 2}, new={two.request_id: [7, 9]})
    assert mark(step).left_out == {}
    engine.take(step, {two.request_id: [1]})
    assert engine.told.steps[1].references[0].ref_request == 0
    assert engine.told.steps[1].mixed == ()


def test_a_request_that_runs_on_from_the_run_before_is_left_out_from_its_arrival() -> None:
    engine = Engine(changed=True)
    engine.arrive(prompt_of("on", "x", "y", computed=3))
    engine.arrive(prompt_of("waits", "x", "y"))
    assert [m.left_out for m in engine.told] == [MIXED, EVERYTHING]
    step = engine.schedule({"on-00000000": 1})
    engine.side.hand_on()
    engine.take(step, {"on-00000000": [1]})
    engine.side.close()
    ends = [m for m in engine.told if isinstance(m, RequestFinished)]
    assert [(m.request, m.reason) for m in ends] == [(1, "unbegun")]


def test_a_request_with_rows_that_resumes_on_old_blocks_loses_its_steps() -> None:
    engine = Engine(changed=True)
    request = engine.arrive(prompt_of("r", "x", "y"))
    name = request.request_id
    engine.take(engine.schedule({name: 4}, new={name: [7, 8]}), {name: [1]})
    request.num_computed_tokens = 2
    step = engine.schedule({name: 3}, resumed={name: [5, 6, 9]})  # another block of the same text
    assert mark(step).lost == "changed_weights" and mark(step).left_out == {}
    engine.take(step, {name: [1]})
    assert engine.told.steps[-1].mixed == ()


def test_the_results_of_a_step_of_the_run_before_are_of_no_step() -> None:
    before, engine = Engine(), Engine(changed=True)
    before.arrive(Request())
    flying = before.schedule({A: 4})
    engine.arrive(prompt_of("a", computed=4))
    step = engine.schedule({A: 1})  # its first step has the same number
    engine.take(flying, {A: [2]})
    assert engine.told.steps == []
    engine.take(step, {A: [3]})
    assert len(engine.told.steps) == 1


def test_an_adapter_is_known_by_what_was_loaded_and_not_by_its_name(tmp_path: Path) -> None:
    def seen(engine: Engine, number: int, *, in_place: bool = False) -> str:
        request: Any = Request(f"{len(engine.told)}-00000000")
        request.lora_request = SimpleNamespace(
            lora_name="poet", lora_int_id=number, lora_path=str(tmp_path), load_inplace=in_place
        )
        engine.arrive(request)
        name, digest = engine.told[-1].adapter
        assert name == "poet"
        return str(digest)

    def save(weights: bytes) -> str:
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        line = f"adapter_model.safetensors {hashlib.sha256(weights).hexdigest()}\n"
        return hashlib.sha256(line.encode()).hexdigest()

    engine, old = Engine(), save(b"old")
    assert seen(engine, 1) == old
    new = save(b"new")
    assert seen(engine, 1) == old  # the engine still has what it has loaded as number 1
    assert seen(engine, 2) == new
    assert seen(engine, 1, in_place=True) == new == seen(engine, 1)
    assert seen(Engine(), 1) == new  # another harvest of the same process
