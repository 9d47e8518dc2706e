"""The vLLM engine, driven from the command's process; vLLM is imported when it starts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from actds.errors import ActdsError
from actds_writers.engine_protocol import Finished
from actds_writers.ipc.link import ENVIRONMENT, Link

SHUTDOWN_TIMEOUT_S = 60.0


class VllmEngine:
    """A vLLM engine that captures.

    Args:
        link: where writer and census listen; ``None`` for an engine that does not capture.

    Raises:
        ActdsError: E504 when the engine does not start.
    """

    def __init__(
        self,
        model: Path,
        options: Mapping[str, Any],
        link: Link | None,
        *,
        temperature: float,
        seed: int,
    ) -> None:
        if link is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = link.to_environment()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        allowed = os.environ.get("VLLM_PLUGINS")
        if allowed and "actds" not in allowed.split(","):
            os.environ["VLLM_PLUGINS"] = f"{allowed},actds"
        from vllm import EngineArgs, SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine

        self._params, self._temperature = SamplingParams, temperature
        # What changes the compiled graph must be in the key of the compile cache.
        additional = {"actds": _graph(link)} if link else {}
        try:
            with _interrupts_blocked():
                arguments = EngineArgs(
                    **{
                        **options,
                        "model": str(model),
                        "seed": seed,
                        "async_scheduling": False,
                        "additional_config": additional,
                    }
                )
                self._engine: Any = LLMEngine.from_engine_args(arguments)
        except Exception as error:  # whatever the engine raises becomes one line
            _close_links()  # in this process; writer and census wait for them
            raise _engine_error(error) from error

    @property
    def max_model_len(self) -> int:
        """Return the effective maximum of positions per request."""
        return int(self._engine.model_config.max_model_len)

    @property
    def max_num_seqs(self) -> int:
        """Return the effective maximum of requests per step."""
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def add(self, key: str, token_ids: list[int], max_tokens: int) -> None:
        """Add a request; raises ``ValueError`` when the engine refuses it."""
        params = self._params(temperature=self._temperature, max_tokens=max_tokens)
        self._engine.add_request(key, {"prompt_token_ids": token_ids}, params)

    def step(self) -> list[Finished]:
        """Run one step; return the requests that ended; raises E504 when the engine has died."""
        try:
            outputs = self._engine.step()
        except Exception as error:  # whatever the engine raises becomes one line
            raise _engine_error(error) from error
        return [
            Finished(
                output.request_id, output.num_cached_tokens, tuple(output.outputs[0].token_ids)
            )
            for output in outputs
            if output.finished
        ]

    def abort(self, keys: list[str]) -> None:
        """Abort requests."""
        self._engine.abort_request(keys)

    def shutdown(self) -> None:
        """End the engine and close the connections of its process."""
        self._engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        _close_links()
        os.environ.pop(ENVIRONMENT, None)


def _close_links() -> None:
    from actds_writers.engines.vllm import plugin

    plugin.close()


def _graph(link: Link) -> dict[str, Any]:
    """Return what capture adds to the model's graph."""
    hooks = [f"{kind}:{layer}" for kind, layer in link.hooks]
    return {"hooks": hooks, "readouts": link.readouts}


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes with SIGINT blocked, which they inherit.

    A terminal sends Ctrl-C to every process of the group, and vLLM's would die within a step.
    """
    # Its start unblocks the signal again, so it must be running before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _engine_error(error: Exception) -> ActdsError:
    words = " ".join(str(error).split())[:400] or type(error).__name__
    return ActdsError("E504", "engine", got=words, expected="an engine that runs")
