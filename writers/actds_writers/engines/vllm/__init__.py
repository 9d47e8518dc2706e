"""The vLLM engine, driven from the command's process, and the options that break accounting.

vLLM is imported when an engine starts.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from actds.errors import ActdsError
from actds.text import one_line
from actds_writers.engine_protocol import (
    OPTION,
    Engine,
    EngineKind,
    EngineOptions,
    EngineValue,
    Finished,
    bad_option,
)
from actds_writers.ipc.link import ENVIRONMENT, Link

OWNED: Mapping[str, str] = {
    "model": "--model",
    "seed": "--seed",
    "additional_config": "nothing: actds sets it to configure the workers",
}
"""Options that ``actds write`` sets itself, and what to use in their place."""


@dataclass(frozen=True)
class Refused:
    """An engine option that capture cannot account for.

    Args:
        allowed: the values that are allowed; every other one is refused.
        reason: what would go wrong.
    """

    allowed: tuple[EngineValue, ...]
    reason: str


_SPLIT = "the tokens of a step are split over ranks, and no worker sees all of them"
_SPECULATION = "rejected draft tokens would be captured as rows"
_FOREIGN_KV = "external KV blocks count as prefix-cache hits that no request here computed"
_WRAPPED = "capture is in vLLM's own worker and scheduler, and another class may bypass it"
# vLLM 0.32.0: in vllm/lora, punica_wrapper/utils.py:35 uses -1 for "no adapter", and
# ops/torch_ops/lora_ops.py:31, 74 and 119 index with it: in PyTorch that is the last adapter.
# tests/test_engine_lora.py shows it. The Triton kernels leave at -1 (ops/triton_ops/
# lora_shrink_op.py:160, lora_expand_op.py:66), but no measurement on a GPU of ours says so, and
# the kernels of XPU (ops/xpu_ops/lora_ops.py:16) are compiled ones.
_LORA = (
    "on a CPU, vLLM adds an adapter to requests without one in the same step, and on other "
    "devices this is not tested"
)
_MICROBATCH = "a step is run in parts, and the capture buffer holds only the last"

REFUSED: Mapping[str, Refused] = {
    "pipeline_parallel_size": Refused(
        (None, 1), "each stage has other layers, and only one would be captured"
    ),
    "data_parallel_size": Refused((None, 1), "every replica has its own scheduler"),
    "prefill_context_parallel_size": Refused((None, 1), _SPLIT),
    "decode_context_parallel_size": Refused((None, 1), _SPLIT),
    "enable_hc_sp": Refused((None, False), _SPLIT),
    "nnodes": Refused((None, 1), "the writer reaches only workers on one machine"),
    "distributed_executor_backend": Refused(
        (None, "mp", "uni"), "the writer reaches only worker processes that vLLM starts here"
    ),
    "speculative_config": Refused((None,), _SPECULATION),
    "spec_method": Refused((None,), _SPECULATION),
    "spec_model": Refused((None,), _SPECULATION),
    "spec_tokens": Refused((None, 0), _SPECULATION),
    "diffusion_config": Refused((None,), "positions are computed many times"),
    "async_scheduling": Refused(
        (None, False), "a step is scheduled before the last one ends, so there are rows after EOS"
    ),
    "kv_transfer_config": Refused((None,), _FOREIGN_KV),
    "kv_offloading_size": Refused((None,), _FOREIGN_KV),
    "ec_transfer_config": Refused((None,), "embeddings are computed outside this engine"),
    "kv_sharing_fast_prefill": Refused(
        (None, False), "upper layers skip prefill positions, and their rows would be stale"
    ),
    "enable_dbo": Refused((None, False), _MICROBATCH),
    "ubatch_size": Refused((None, 0, 1), _MICROBATCH),
    "skip_tokenizer_init": Refused((None, False), "prompts cannot be encoded"),
    "tokens_only": Refused((None, False), "prompts cannot be encoded"),
    "enable_prompt_embeds": Refused((None, False), "a prompt of embeddings has no token ids"),
    "enable_lora": Refused((None, False), _LORA),
    "runner": Refused((None, "auto", "generate"), "only generation is harvested"),
    "convert": Refused((None, "auto", "none"), "only generation is harvested"),
    "worker_cls": Refused((None, "auto"), _WRAPPED),
    "scheduler_cls": Refused((None,), _WRAPPED),
}
"""Options that are refused with E012, and why."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise for a configuration that capture cannot account for.

    Args:
        options: engine arguments by name, from a command line or from a live engine.

    Raises:
        ActdsError: E012 with the option and the reason.
    """
    for key, rule in REFUSED.items():
        value = options.get(key)
        # True == 1 in Python, so the types have to agree too.
        if any(value == allowed and type(value) is type(allowed) for allowed in rule.allowed):
            continue
        usable = " or ".join(json.dumps(allowed) for allowed in rule.allowed if allowed is not None)
        raise ActdsError(
            "E012",
            f"{OPTION} {key}",
            got=f"{str(value)[:80]}: {rule.reason}",
            expected=usable or "no such option",
        )


def argument_names() -> frozenset[str]:
    """Return the argument names of the installed vLLM, importing it; raises E011 without it."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise ActdsError(
            "E011",
            "vllm",
            got=str(error).splitlines()[0],
            expected="vLLM beside actds",
            next_step="pip install 'actds[vllm]', or 'make install' in a checkout for the CPU.",
        ) from None
    names: Collection[str] = EngineArgs.__dataclass_fields__
    return frozenset(name for name in names if not name.startswith("_"))


class VllmOptions(EngineOptions):
    """Arguments of vLLM's ``EngineArgs``; vLLM itself validates their values."""

    model_config = ConfigDict(extra="allow")

    max_model_len: Any = None

    def arguments(self) -> dict[str, Any]:
        """Return what the user gave, by name."""
        return self.model_dump(exclude_unset=True)


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
        additional = {"actds": graph_key(link)} if link else {}
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


def graph_key(link: Link) -> dict[str, Any]:
    """Return what capture adds to the model's graph: that alone is in the compile cache's key."""
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
    return ActdsError("E504", "engine", got=one_line(error, 400), expected="an engine that runs")


class Vllm(EngineKind):
    """vLLM, in processes of its own."""

    name = "vllm"
    option_type = VllmOptions

    def options(self, given: Mapping[str, object]) -> EngineOptions:
        """Return validated options.

        Raises:
            ActdsError: E009 for one that ``actds write`` sets itself, E012 for one that capture
                cannot account for.
        """
        for key in given:
            if key in OWNED:
                raise bad_option(key, "an option that actds write sets itself", OWNED[key])
        refuse_options(given)
        return super().options(given)

    def checked(self, given: Mapping[str, object]) -> EngineOptions:
        """Return validated options whose names the installed vLLM knows.

        Raises:
            ActdsError: as ``options``; E009 for an unknown name, E011 without vLLM.
        """
        options = self.options(given)  # a typing error needs no engine to be found
        known = argument_names() if given else frozenset()
        for key in given:
            if key not in known and key not in REFUSED:
                close = difflib.get_close_matches(key, known, n=3)
                expected = " or ".join(close) if close else "an argument of vllm.EngineArgs"
                raise bad_option(key, "an unknown option", expected)
        return options

    def start(
        self, model: Path, options: EngineOptions, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        """Return the engine with its workers up; raises as ``EngineKind.start``."""
        assert isinstance(options, VllmOptions)
        return VllmEngine(model, options.arguments(), link, temperature=temperature, seed=seed)

    def alone(self, options: EngineOptions) -> EngineOptions:
        """Return the options of the same engine with one request at a time and no prefix cache."""
        return super().alone(options).model_copy(update={"enable_prefix_caching": False})


VLLM = Vllm()
