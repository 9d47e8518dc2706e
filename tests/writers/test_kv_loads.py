"""The scheduler side follows a KV connector: what came from outside, to the position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actds.errors import ActdsError
from actds_writers.engines.vllm.requests import refuse_unseen, were_read
from actds_writers.engines.vllm.scheduler import VllmSchedulerSide

BLOCK = 4
MARK = "_actds"


class Engine:
    """The calls that vLLM's scheduler makes, and what the census is told of them."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.side = VllmSchedulerSide(SimpleNamespace(send=self.told.append), BLOCK)
        self.connector = SimpleNamespace(
            get_num_new_matched_tokens=lambda _request, _n: (0, False),
            update_state_after_alloc=lambda _request, _blocks, _n: None,
        )
        self.side.follow(self.connector)

    def request(self, name: str, n_tokens: int, prompt_len: int | None = None) -> Any:
        one = SimpleNamespace(
            request_id=f"{name}-00000000", num_prompt_tokens=prompt_len or n_tokens,
            sampling_params=None, arrival_time=0.0, num_computed_tokens=0,
            block_hashes=[bytes([i]) for i in range(n_tokens // BLOCK)],
            num_output_tokens=1, is_finished=lambda: False,
        )  # fmt: skip
        self.side.arrived(one)
        return one

    def admit(self, one: Any, n_local: int, n_external: int) -> None:
        self.connector.get_num_new_matched_tokens(one, n_local)
        self.connector.update_state_after_alloc(one, None, n_external)

    def step(self, one: Any, start: int, stop: int) -> list[tuple[int, int, int | None, bool]]:
        one.num_computed_tokens = stop
        scheduler = SimpleNamespace(
            requests={one.request_id: one}, waiting=[], running=[one],
            kv_cache_manager=SimpleNamespace(usage=0.0), num_spec_tokens=0,
        )  # fmt: skip
        output: Any = SimpleNamespace(
            num_scheduled_tokens={one.request_id: stop - start}, scheduled_spec_decode_tokens={}
        )
        setattr(output, MARK, self.side.scheduled(scheduler, output, ()))
        self.side.taken(output)
        return [(r.start, r.stop, r.ref_request, r.external) for r in self.told[-1].references]

    def end(self, one: Any) -> Any:
        one.all_token_ids = [1] * (one.num_prompt_tokens + 1)
        one.get_finished_reason = lambda: "length"
        self.side.finished(one)
        return self.told[-1]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_hit_from_here_and_a_load_from_outside_are_told_apart(engine: Engine) -> None:
    assert engine.step(engine.request("a", 8), 0, 8) == []
    second = engine.request("b", 16)
    engine.admit(second, 8, 4)
    assert engine.step(second, 12, 16) == [(0, 8, 0, False), (8, 12, None, True)]
    assert engine.end(second).cached_as_reported
    third = engine.request("c", 17)
    engine.admit(third, 16, 0)
    # The third block was loaded, the fourth one computed by the second request.
    assert engine.step(third, 16, 17) == [
        (0, 8, 0, False), (8, 12, None, True), (12, 16, 1, False),
    ]  # fmt: skip


def test_a_prompt_that_is_loaded_to_its_last_token_computes_that_one(engine: Engine) -> None:
    """The block that it completes later begins outside and ends with rows of its own."""
    first = engine.request("a", 12, prompt_len=6)
    engine.admit(first, 0, 6)
    assert engine.step(first, 5, 6) == [(0, 5, None, True)]
    assert engine.step(first, 6, 12) == []
    assert not engine.end(first).cached_as_reported  # the engine says 6
    second = engine.request("b", 13)
    assert engine.step(second, 12, 13) == [(0, 5, None, True), (5, 12, 0, False)]


def test_a_load_that_failed_before_a_step_is_computed_here(engine: Engine) -> None:
    first = engine.request("a", 12)
    engine.admit(first, 0, 12)
    assert engine.step(first, 4, 12) == [(0, 4, None, True)]
    assert not engine.end(first).cached_as_reported
    assert engine.step(engine.request("b", 13), 12, 13) == [(0, 4, None, True), (4, 12, 0, False)]


def test_a_resumed_request_owes_nothing_for_what_it_loads_again(engine: Engine) -> None:
    first = engine.request("a", 16)
    engine.admit(first, 0, 8)
    assert engine.step(first, 8, 12) == [(0, 8, None, True)]
    engine.admit(first, 0, 8)  # preempted in between
    assert engine.step(first, 8, 14) == []
    engine.admit(first, 0, 16)
    assert engine.step(first, 15, 16) == [(14, 15, None, True)]
    assert engine.end(first).cached_as_reported  # of the first admission


def scheduled(blocks: list[int], resumed: list[int] | None = None) -> Any:
    return SimpleNamespace(
        _actds=SimpleNamespace(step=7),
        scheduled_new_reqs=[SimpleNamespace(req_id="n", block_ids=(blocks,))],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["r", "s"], new_block_ids=[(resumed or [],), None], resumed_req_ids={"r"}
        ),
    )


def test_only_a_step_that_read_a_block_which_was_not_loaded_is_lost() -> None:
    assert were_read({3}, scheduled([2, 3]))
    assert were_read({9}, scheduled([2, 3], resumed=[9]))
    assert not were_read({4}, scheduled([2, 3]))  # of a request that still waits
    assert not were_read(set(), scheduled([2, 3]))
    assert not were_read(None, scheduled([2, 3]))


@pytest.mark.parametrize(("ranks", "batches"), [(1, 1), (2, 1), (1, 2)])
def test_a_failed_load_that_the_worker_cannot_follow_stops_the_capture(
    ranks: int, batches: int
) -> None:
    result = SimpleNamespace(kv_connector_output=SimpleNamespace(invalid_block_ids={3}))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks), max_concurrent_batches=batches
    )
    scheduler = SimpleNamespace(vllm_config=config)
    refuse_unseen(scheduler, scheduled([4]), result)
    if ranks * batches == 1:
        refuse_unseen(scheduler, scheduled([3]), result)  # its worker drops the step
        return
    with pytest.raises(ActdsError, match="E501 step 7"):
        refuse_unseen(scheduler, scheduled([3]), result)
