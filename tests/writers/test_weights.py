"""Weights that may change while an engine runs: what is seen of them, and what follows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actds.errors import ActdsError
from actds_writers.engines.vllm.requests import WrittenBlocks, blocks_of_step
from actds_writers.engines.vllm.weights import (
    WeightsSample,
    WeightsWatch,
    read_digest,
    weights_digest,
    weights_facts,
)


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 5, bias=False)]
    return torch.nn.Sequential(*layers).to(torch.bfloat16).requires_grad_(False)


def digest(of: torch.nn.Module) -> str:
    return weights_digest(of.named_parameters())


def first(of: torch.nn.Module) -> torch.Tensor:
    return next(of.parameters())


# bits --------------------------------------------------------------------------------------------


def test_a_digest_is_of_the_sums_that_its_words_say() -> None:
    """The same in Python's integers, of a tensor whose bytes are no whole words."""
    values = np.random.default_rng(1).integers(0, 256, 21).astype(np.uint8)
    spread, n = 0x9E3779B97F4A7C15, 1 << 64
    total = 0
    for place, begin in enumerate(range(0, 21, 8), 1):
        word = int.from_bytes(values[begin : begin + 8].tobytes(), "little")
        factor = place * spread % n
        signed = factor - n if factor >= n // 2 else factor
        factor = (factor ^ (signed >> 29)) % n * spread % n | 1
        total = (total + word * factor) % n
    wanted = hashlib.sha256(b"x (21,) torch.uint8 1\n" + total.to_bytes(8, "little")).hexdigest()
    assert weights_digest([("x", torch.from_numpy(values))]) == wanted


def test_a_digest_sees_every_bit_place_and_name_and_not_where_they_are_stored() -> None:
    before = model()
    bits = first(before).view(torch.int16)
    seen = {digest(before)}
    for row, column, bit in ((0, 0, 0), (8, 11, 3), (4, 7, 14)):
        bits[row, column] ^= 1 << bit
        seen.add(digest(before))
        bits[row, column] ^= 1 << bit
    first(before)[[0, 1]] = first(before)[[1, 0]].clone()
    seen.add(digest(before))
    first(before)[[0, 1]] = first(before)[[1, 0]].clone()
    assert len(seen) == 5 and digest(before) in seen and digest(model()) == digest(before)
    whole = torch.zeros(400, dtype=torch.bfloat16)
    elsewhere = whole[3:111].view(9, 12).copy_(first(before))  # not at a word's begin
    assert weights_digest([("0", elsewhere)]) == weights_digest([("0", first(before))])
    assert weights_digest([("1", elsewhere)]) != weights_digest([("0", elsewhere)])


def _scale(of: torch.nn.Module) -> None:
    for parameter in of.parameters():
        parameter.mul_(1.5).add_(1)


def _replace_memory(of: torch.nn.Module) -> None:
    first(of).data = first(of) * 1.5


def _replace_parameter(of: torch.nn.Module) -> None:
    of[0].weight = torch.nn.Parameter(first(of) * 1.5, requires_grad=False)  # type: ignore[index]


@pytest.mark.parametrize("edit", [_scale, _replace_memory, _replace_parameter])
def test_a_sample_sees_edits_in_place_and_replaced_tensors(
    edit: Callable[[torch.nn.Module], None],
) -> None:
    edited = model()
    sample = WeightsSample(edited)
    model(1)  # another one in the same process
    assert not bool(sample.changed())
    edit(edited)
    assert bool(sample.changed())
    assert not bool(WeightsSample(edited).changed())


# calls -------------------------------------------------------------------------------------------


class Executor:
    """vLLM's executor with one worker, which has a model and no engine."""

    def __init__(self) -> None:
        self.model = model()
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: self.model))
        self.n_read = 0

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if callable(method):
            self.n_read += method is read_digest
            return [method(self.worker, *args)]
        if method in ("reload_weights", "update_weights"):
            self.model = model((kwargs or {}).get("seed", 0))
        return [None]


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def failures() -> list[Exception]:
    return []


@pytest.fixture
def watch(executor: Executor, failures: list[Exception]) -> WeightsWatch:
    found = WeightsWatch(executor, Path("/models/a"), failures.append)
    assert found.is_due and found.look() is None and not found.is_due
    return found


def test_only_calls_that_may_set_weights_are_followed_by_a_look(
    executor: Executor, watch: WeightsWatch
) -> None:
    for method in ("execute_model", "sample_tokens", "check_health", "list_loras"):
        executor.collective_rpc(method)
    assert not watch.is_due and executor.n_read == 1
    setting: list[Any] = ["reload_weights", "a_method_of_an_extension", lambda worker: None]
    for call in setting:
        executor.collective_rpc(call)
        assert watch.is_due and watch.look() is None  # the same weights
    executor.collective_rpc("update_weights", kwargs={"seed": 1})
    executor.collective_rpc("update_weights", kwargs={"seed": 2})
    change = watch.look()
    assert change is not None and not watch.is_due
    assert (change.digest, change.calls) == (watch.digest, ("update_weights",) * 2)
    assert change.folder is None and change.words() == "update_weights"


def test_the_files_of_a_change_are_known_when_it_was_one_reload(
    executor: Executor, watch: WeightsWatch, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    given = {"weights_path": str(tmp_path), "seed": 1}
    executor.collective_rpc("reload_weights", None, (), given)
    change = watch.look()
    assert change is not None and change.folder == tmp_path
    (fact,) = weights_facts(change, "r-a", hashed=True)
    line = f"model.safetensors {hashlib.sha256(b'weights').hexdigest()}\n"
    assert fact.value == hashlib.sha256(line.encode()).hexdigest()
    (fact,) = weights_facts(change, "r-a", hashed=False)
    assert fact.origin == "unknown" and "reload_weights" in str(fact.reason)
    assert "r-a" in str(fact.reason)
    executor.collective_rpc("reload_weights", kwargs={"seed": 2})  # of the same folder again
    executor.collective_rpc("apply_model")
    change = watch.look()
    assert change is not None and change.folder is None


def test_nobody_looks_at_weights_that_sleep(executor: Executor, watch: WeightsWatch) -> None:
    executor.collective_rpc("sleep", kwargs={"level": 2})
    assert not watch.is_due
    executor.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]})
    assert not watch.is_due
    executor.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    assert watch.is_due
    executor.collective_rpc("sleep")
    executor.collective_rpc("wake_up")
    assert watch.is_due and watch.look() is None


def test_a_change_that_nothing_has_shown_ends_the_capture_at_the_next_call(
    executor: Executor, watch: WeightsWatch, failures: list[Exception]
) -> None:
    first(executor.model).mul_(2)
    with pytest.raises(ActdsError, match="E509"):
        watch.verify()
    executor.collective_rpc("reload_weights")
    (failure,) = failures
    assert isinstance(failure, ActdsError) and failure.code == "E509"


def test_weights_that_cannot_be_read_count_as_changed_by_every_call(
    executor: Executor, watch: WeightsWatch
) -> None:
    hidden = torch.nn.Linear(3, 2)
    hidden.weight = torch.nn.Parameter(torch.empty(0))
    executor.model.append(hidden)  # type: ignore[operator]
    executor.collective_rpc("apply_model")
    assert watch.look() is not None
    executor.collective_rpc("apply_model")
    assert watch.look() is not None


def test_weights_in_the_form_of_a_cpu_kernel_are_read_by_what_they_do(
    executor: Executor, watch: WeightsWatch
) -> None:
    weight = torch.randn(6, 8)
    hidden = torch.nn.Linear(8, 6)
    hidden.weight = torch.nn.Parameter(torch.empty(0))
    hidden.input_size_per_partition = 8  # type: ignore[assignment]
    hidden.cpu_linear = lambda x, _w, bias: torch.nn.functional.linear(x, weight, bias)  # type: ignore[assignment]
    executor.model.append(hidden)  # type: ignore[operator]
    executor.collective_rpc("apply_model")
    assert watch.look() is not None
    executor.collective_rpc("apply_model")
    assert watch.look() is None
    weight[3, 5] += 1e-3
    executor.collective_rpc("apply_model")
    assert watch.look() is not None


# KV blocks ---------------------------------------------------------------------------------------


def test_blocks_are_of_the_present_weights_when_these_have_written_them() -> None:
    blocks = WrittenBlocks((4, 8))
    assert blocks.serve(((1, 2), (3,)), 0) and not blocks.serve(((1, 2), (3,)), 8)
    blocks.write(((1, 2, 5), (3, 6)), 0, mixed=False)
    assert blocks.serve(((1, 2, 7), (3, 8)), 8) and not blocks.serve(((1, 2, 7), (3, 8)), 12)
    assert blocks.serve(((0, 2, 9), (3, 9)), 8)  # block 0 is none: a window has left it behind
    blocks.write(((7, 2), (8, 6)), 4, mixed=True)  # on a block that something else wrote
    assert not blocks.serve(((2,), (3,)), 4) and not blocks.serve(((1,), (6,)), 4)


def test_a_step_admits_new_and_resumed_requests() -> None:
    cached = SimpleNamespace(
        req_ids=["a", "b", "c"], resumed_req_ids={"b"}, new_block_ids=[([4],), ([1, 5],), None]
    )
    new = [SimpleNamespace(req_id="d", block_ids=([2],))]
    step = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    assert blocks_of_step(step) == ({"d": ([2],), "b": ([1, 5],)}, {"a": ([4],)})
