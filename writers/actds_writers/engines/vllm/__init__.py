"""The vLLM engine, driven from the command's process.

vLLM is imported when an engine starts.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from actds_writers.engine_protocol import (
    OPTION,
    Engine,
    EngineKind,
    EngineValue,
    Finished,
    Workers,
    bad_option,
    engine_error,
    refused,
)
from actds_writers.engines import wrap
from actds_writers.engines.vllm import plugin
from actds_writers.engines.vllm.options import (
    _KV_FROM_OUTSIDE,
    _SAMPLING,
    OWNED,
    OWNED_PARAMS,
    REFUSED,
    SECOND_ENGINE,
    Adapter,
    VllmOptions,
    adapter_sha256,
    admit,
    argument_names,
    graph_key,
    n_nodes,
    read_adapter,
    refuse_options,
    refuse_unread,
)
from actds_writers.ipc.link import ENVIRONMENT, Link

if TYPE_CHECKING:
    from actds_writers.sampling import Regime

_REFUSAL = "VLLMClientError"
"""Class of vLLM's errors that are a request's fault; older ones are a ``ValueError``."""
SHUTDOWN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""How long the workers of an engine that did not start may take to end by themselves."""


class VllmEngine:
    """A vLLM engine that captures, or does not without a link.

    Raises E504 when the engine does not start, E012 for a vLLM that was never tested, without the
    check of the hooks.
    """

    def __init__(
        self,
        model: Path,
        options: VllmOptions,
        link: Link | None,
        *,
        temperature: float,
        seed: int,
        adapter: Adapter | None = None,
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
        plugin.renew()
        from vllm import EngineArgs, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if link is not None:
            admit(link.settings.check)
        self._lora = adapter.request() if adapter else None
        additional = {"actds": graph_key(link)} if link else {}
        n_replicas = link.replica[1] if link else 1
        if n_replicas > 1 and EngineArgs(model=str(model)).create_model_config().is_moe:
            refuse_options({"data_parallel_size": n_replicas})
        before = set(multiprocessing.active_children())
        try:
            given = dict(options.sampling_params)
            if isinstance(kinds := given.get("structured_outputs"), dict):
                given["structured_outputs"] = StructuredOutputsParams(**kinds)
            if isinstance(bias := given.get("logit_bias"), dict):
                given["logit_bias"] = {int(key): value for key, value in bias.items()}  # of JSON
            self._params = functools.partial(SamplingParams, **given, temperature=temperature)
            self._params()  # a bad one is an error of the engine, not of every prompt
            with _interrupts_blocked(), _script_kept_out():
                arguments = EngineArgs(
                    **{
                        **(adapter.arguments if adapter else {}),
                        **options.arguments(),
                        **_paths(options, model),
                        "model": str(model),
                        "seed": seed,
                        "additional_config": additional,
                    }
                )
                # Steps as large as those of the server that the harvest stands for.
                self._engine: Any = LLMEngine.from_engine_args(
                    arguments, usage_context=UsageContext.OPENAI_API_SERVER
                )
                wake_when_dead(self._engine.engine_core)
            if self._lora is not None:
                self._engine.add_lora(self._lora)  # one that does not load is an error now
        except Exception as error:  # whatever the engine raises becomes one line
            _close_links()  # in this process; writer and census wait for them
            _end_processes(before)
            raise engine_error(error) from error

    @property
    def max_model_len(self) -> int:
        return int(self._engine.model_config.max_model_len)

    @property
    def max_num_seqs(self) -> int:
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def add(
        self, key: str, token_ids: list[int], max_tokens: int, regime: Regime | None = None
    ) -> None:
        try:
            params = self._params(max_tokens=max_tokens)
            if regime is not None:
                from actds_writers.engines.vllm.requests import give_regime

                give_regime(params, regime)
            prompt = {"prompt_token_ids": token_ids}
            self._engine.add_request(key, prompt, params, lora_request=self._lora)
        except ValueError:
            raise
        except Exception as error:  # whatever the engine raises becomes one line
            if any(kind.__name__ == _REFUSAL for kind in type(error).__mro__):
                raise ValueError(str(error)) from error
            raise engine_error(error) from error

    def step(self) -> list[Finished]:
        try:
            outputs = self._engine.step()
        except Exception as error:  # whatever the engine raises becomes one line
            raise engine_error(error) from error
        self._settle()
        return [
            Finished(
                output.request_id, output.num_cached_tokens, tuple(output.outputs[0].token_ids)
            )
            for output in outputs
            if output.finished
        ]

    def abort(self, keys: list[str]) -> None:
        self._engine.abort_request(keys)
        self._settle()

    def _settle(self) -> None:
        in_this_process = getattr(self._engine.engine_core, "engine_core", None)
        if in_this_process is not None:
            plugin.settle_last_step(in_this_process)

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
        _close_links()


def _paths(options: VllmOptions, model: Path) -> dict[str, str]:
    """Return the options that name folders, where they were given, as paths."""
    files = options.files(model)
    paths = {"tokenizer": files.tokenizer, "hf_config_path": files.config}
    if files.generation != files.config:
        paths["generation_config"] = files.generation
    return {name: str(path) for name, path in paths.items() if getattr(options, name)}


def wake_when_dead(client: Any) -> None:
    """Let a client whose engine's process is killed raise: vLLM's waits for its output for ever.

    The client of an engine core in this process has no queue.
    """
    outputs = getattr(client, "outputs_queue", None)
    if outputs is None:
        return

    @wrap(client, "shutdown")
    def shutting_down(shutdown: Any, *args: Any, **kwargs: Any) -> Any:
        # Called by the thread that watches the process, too.
        outputs.put_nowait(RuntimeError("the process of the engine has ended"))
        return shutdown(*args, **kwargs)


def _devices(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the option that gives a replica its own accelerators, as vLLM's own replicas have."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    world = math.prod(int(options.get(name) or 1) for name in sizes)
    part = slice(number * world, (number + 1) * world)
    given = options.get("device_ids") or list(range(part.stop))
    if len(given) < part.stop:
        raise refused(f"{OPTION} device_ids", f"{len(given)} devices", f"{world} for each replica")
    return {"device_ids": list(given)[part]}


def _close_links() -> None:
    """Close the connections of this process, of which no later engine is part of the harvest."""
    os.environ.pop(ENVIRONMENT, None)
    plugin.close()
    plugin.renew()


def _end_processes(before: Collection[BaseProcess]) -> None:
    """End the processes that an engine left behind whose start has failed."""
    left = [child for child in multiprocessing.active_children() if child not in before]
    for child in left:
        child.terminate()
    deadline = time.monotonic() + END_TIMEOUT_S
    for child in left:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


@contextlib.contextmanager
def _script_kept_out() -> Iterator[None]:
    """Start processes that do not run the caller's script, of which they need nothing.

    One without a main guard would else harvest again in each of them, as would a notebook's.
    """
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict[str, Any]:
        data = prepare(name)
        return {key: data[key] for key in data if not key.startswith("init_main_from_")}

    spawn.get_preparation_data = without_script
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare


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


class Vllm(EngineKind[VllmOptions]):
    """vLLM, in processes of its own."""

    name = "vllm"
    option_type = VllmOptions
    uncompiled: ClassVar[Mapping[str, EngineValue]] = {"enforce_eager": True}
    intervenes = attends = True

    def options(self, given: Mapping[str, object]) -> VllmOptions:
        """Return validated options.

        Raises E009 for one that ``actds write`` sets itself, E012 for one that capture cannot
        account for.
        """
        for key in given:
            if key in OWNED:
                raise bad_option(key, "an option that actds write sets itself", OWNED[key])
        sampling = given.get(_SAMPLING)
        for key in sampling if isinstance(sampling, Mapping) else ():
            if key in OWNED_PARAMS:
                words = "a parameter that actds write sets itself"
                raise bad_option(f"{_SAMPLING}.{key}", words, OWNED_PARAMS[key])
        # Replicas of a dense model are engines of their own: see replicas and of_replica.
        apart = {"data_parallel_size"} if n_nodes(given) == 1 else set()
        refuse_options({key: v for key, v in given.items() if key not in apart})
        return super().options(given)

    def checked(self, given: Mapping[str, object]) -> VllmOptions:
        """Return validated options whose names the installed vLLM knows, or E009, or E011."""
        options = self.options(given)  # a typing error needs no engine to be found
        if options.lora is not None:
            read_adapter(options.lora)
        known = argument_names() if given else frozenset()
        for key in given:
            if key not in known and key not in REFUSED and key not in VllmOptions.model_fields:
                close = difflib.get_close_matches(key, known, n=3)
                expected = " or ".join(close) if close else "an argument of vllm.EngineArgs"
                raise bad_option(key, "an unknown option", expected)
        return options

    def start(
        self, model: Path, options: VllmOptions, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        adapter = read_adapter(options.lora) if options.lora else None
        return VllmEngine(model, options, link, temperature=temperature, seed=seed, adapter=adapter)

    def replicas(self, options: VllmOptions) -> int:
        """Return ``data_parallel_size``: vLLM runs dense replicas as independent engines too."""
        return options.data_parallel_size or 1

    def workers(self, options: VllmOptions) -> Workers:
        """Return stages and steps in flight; one more than vLLM's default on GPUs may have."""
        stages = options.pipeline_parallel_size or 1
        return Workers(stages, stages + (options.async_scheduling is not False))

    def devices(self, options: VllmOptions) -> int:
        """Return the ranks of one engine, each of which has a device."""
        tensor = options.arguments().get("tensor_parallel_size") or 1
        return int(tensor) * (options.pipeline_parallel_size or 1)

    def require_one_node(self, options: VllmOptions, what: str) -> None:
        if (n := n_nodes(options.arguments())) > 1:
            raise refused(
                f"{OPTION} nnodes", f"{n}, and {what}: {SECOND_ENGINE}", "one or the other"
            )

    def of_replica(self, options: VllmOptions, number: int) -> VllmOptions:
        devices = _devices(options.arguments(), number)
        return options.model_copy(update={"data_parallel_size": 1, **devices})

    def require_logits(self, options: VllmOptions) -> None:
        refuse_unread(options.arguments(), OPTION)

    def alone(self, options: VllmOptions) -> VllmOptions:
        """Return the options of the same engine, one request at a time, with no KV but its own."""
        given = options.model_fields_set.intersection(_KV_FROM_OUTSIDE)
        changes = {"enable_prefix_caching": False, **dict.fromkeys(given)}
        return super().alone(options).model_copy(update=changes)

    def adapter_sha256(self, options: VllmOptions) -> str | None:
        return adapter_sha256(str(read_adapter(options.lora).folder)) if options.lora else None


VLLM = Vllm()
