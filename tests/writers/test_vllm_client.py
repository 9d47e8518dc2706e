"""Errors of vLLM: of a killed engine, for which no call waits, and of prompts that it refuses."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from actds.errors import ActdsError
from actds_writers.engines.vllm import VllmEngine, wake_when_dead


class Client:
    """As vLLM's client: a thread that watches the process calls ``shutdown`` when it ends."""

    def __init__(self) -> None:
        self.outputs_queue: queue.Queue[Any] = queue.Queue()
        self.timeouts: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)


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
