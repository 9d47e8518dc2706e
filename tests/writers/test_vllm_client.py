"""Errors of vLLM: of a killed engine, for which no call waits, and of prompts that it refuses."""

from __future__ import annotations

import hashlib
import json
import queue
from types import SimpleNamespace
from typing import Any

import pytest

from actds.errors import ActdsError
from actds_writers.engines.vllm import VllmEngine, wake_when_dead
from actds_writers.engines.vllm.requests import recorded


class Client:
    """As vLLM's client: a thread that watches the process calls ``shutdown`` when it ends."""

    def __init__(self) -> None:
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        self.timeouts: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)


@pytest.mark.standard  # vLLM's import starts a process
def test_every_parameter_of_a_request_is_on_record() -> None:
    """In words, a long one as its digest, a default one not at all."""
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = json.dumps({"type": "object", "title": "x" * 300})
    usual = {"max_tokens": 16, "min_p": "0.0", "seed": None, "temperature": "1.0", "top_k": 0,
             "top_p": "1.0"}  # fmt: skip
    plain = {
        "n": 2, "seed": 4, "top_k": 5, "min_tokens": 3, "ignore_eos": True, "stop": ["END", "\n"],
        "stop_token_ids": [3, 2], "bad_words": ["no"], "allowed_token_ids": [7, 8],
    }  # fmt: skip
    floats = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
              "temperature": 0.7, "top_p": 0.9, "min_p": 0.05}  # fmt: skip
    given: dict[str, Any] = {
        **plain, **floats, "logit_bias": {3: -1.5, 5: 2.0}, "extra_args": {"consent": "no"},
        "structured_outputs": StructuredOutputsParams(json=schema),
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(schema).encode()).hexdigest()
    assert recorded(SamplingParams()) == recorded(SamplingParams(watermarking=False)) == usual
    assert recorded(SamplingParams(**given)) == {
        **usual, **plain, **{name: str(value) for name, value in floats.items()},
        "logit_bias": {"3": "-1.5", "5": "2.0"}, "extra_args": {"consent": "no"},
        "structured_outputs": {"json": {"n": len(json.dumps(schema)), "sha256": digest}},
    }  # fmt: skip
    assert recorded(SamplingParams(prompt_logprobs=0))["prompt_logprobs"] == 0  # type: ignore[index]
    assert recorded(None) is None


def test_who_waits_for_a_killed_engine_is_woken() -> None:
    client = Client()
    wake_when_dead(client)
    client.shutdown(timeout=3.0)
    assert isinstance(client.outputs_queue.get(timeout=0), Exception)
    assert client.timeouts == [3.0]
    wake_when_dead(SimpleNamespace(shutdown=None))  # an engine in this process


def engine_that_raises(error: Exception) -> VllmEngine:
    """Return an engine of which a request is only ever an error."""

    def add_request(*_: object, **__: object) -> None:
        raise error

    engine = VllmEngine.__new__(VllmEngine)
    client = SimpleNamespace(add_request=add_request)
    vars(engine).update(_engine=client, _params=lambda **_: None, _lora=None)
    return engine


def test_a_request_for_a_dead_engine_is_no_refused_prompt() -> None:
    engine = engine_that_raises(RuntimeError("EngineCore encountered an issue"))
    with pytest.raises(ActdsError, match=r"E504 engine: .*EngineCore"):
        engine.add("a", [1], 1)


def test_a_prompt_that_the_engine_refuses_is_the_fault_of_the_prompt() -> None:
    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMValidationError

    for error in (ValueError("too long"), VLLMValidationError("too long")):
        with pytest.raises(ValueError, match="too long"):
            engine_that_raises(error).add("a", [1], 1)
