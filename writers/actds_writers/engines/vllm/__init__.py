"""The vLLM engine, driven from the command's process, and the options that break accounting.

vLLM is imported when an engine starts.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from actds.errors import ActdsError, not_installed
from actds.text import one_line
from actds_writers.engine_protocol import (
    OPTION,
    Engine,
    EngineKind,
    EngineOptions,
    EngineValue,
    Finished,
    Workers,
    bad_option,
)
from actds_writers.engines.vllm import versions
from actds_writers.engines.vllm.adapters import Adapter, adapter_sha256, read_adapter
from actds_writers.ipc.link import ENVIRONMENT, Link
from actds_writers.model_folder import ModelFiles, find_model
from actds_writers.sizing.probe_fit import Timing, TimingTask

OWNED: Mapping[str, str] = {
    "model": "the argument model",
    "seed": "the argument seed",
    "additional_config": "nothing: actds sets it to configure the workers",
}
"""Options that ``actds write`` sets itself, and what to use in their place."""
OWNED_PARAMS: Mapping[str, str] = {
    "temperature": "the argument temperature",
    "max_tokens": "max_tokens of the harvest",
    "output_kind": "nothing: the command reads whole outputs",
}
"""Sampling parameters that it sets itself, likewise."""
_SAMPLING = "sampling_params"


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
_SPECULATION = "the account of this way to draft was never tested"
_STAGED_DRAFTS = (
    "vLLM's first model runner makes a drafter on the last stage only, and fails on the others"
)
DRAFTED_BY = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose account is tested.

vLLM may find another method than was given, by a draft model's name or type, so that a worker
compares again.
"""
DRAFTS = ("speculative_config", "spec_method", "spec_model")
"""Options with which an engine drafts."""
_KV_FROM_OUTSIDE = ("kv_transfer_config", "kv_offloading_size")
_WRAPPED = "capture is in vLLM's own worker and scheduler, and another class may bypass it"
_LORA = (
    "only the check of a server's hooks can say that requests without an adapter have rows of the "
    "base model; lora=FOLDER harvests all requests with one adapter"
)
_REPLICAS = "actds write starts every replica itself; use data_parallel_size"
_MICROBATCH = "a step is run in parts, and the capture buffer holds only the last"

REFUSED: Mapping[str, Refused] = {
    "data_parallel_size": Refused(
        (None, 1), "replicas of a mixture of experts share its experts and step together"
    ),
    "data_parallel_rank": Refused((None,), _REPLICAS),
    "data_parallel_size_local": Refused((None,), _REPLICAS),
    "data_parallel_external_lb": Refused((None, False), _REPLICAS),
    "data_parallel_hybrid_lb": Refused((None, False), _REPLICAS),
    "prefill_context_parallel_size": Refused((None, 1), _SPLIT),
    "decode_context_parallel_size": Refused((None, 1), _SPLIT),
    "enable_hc_sp": Refused((None, False), _SPLIT),
    "nnodes": Refused((None, 1), "the writer reaches only workers on one machine"),
    "distributed_executor_backend": Refused(
        (None, "mp", "uni"), "the writer reaches only worker processes that vLLM starts here"
    ),
    "speculative_config": Refused((None, *DRAFTED_BY), _SPECULATION),
    "spec_method": Refused((None, *DRAFTED_BY), _SPECULATION),
    "diffusion_config": Refused((None,), "positions are computed many times"),
    "ec_transfer_config": Refused((None,), "embeddings are computed outside this engine"),
    "kv_sharing_fast_prefill": Refused(
        (None, False), "upper layers skip prefill positions, and their rows would be stale"
    ),
    "enable_dbo": Refused((None, False), _MICROBATCH),
    "ubatch_size": Refused((None, 0, 1), _MICROBATCH),
    "tokenizer_mode": Refused((None, "auto", "hf"), "prompts are encoded by the tokenizer.json"),
    "code_revision": Refused((None,), "a model's own code is not run to read its prompts"),
    "override_generation_config": Refused(
        (None,),
        "it changes what a server's clients get by default, and here nothing; use "
        "temperature, max_tokens and sampling_params",
    ),
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


REFUSED_CONNECTORS: Mapping[str, str] = {
    "DecodeBenchConnector": "it fills KV blocks with made-up values, and rows follow from them",
}
"""KV connectors that are refused with E012, and why."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise for a configuration that capture cannot account for.

    Args:
        options: engine arguments by name, from a command line or from a live engine. What holds
            for a ``speculative_config`` is its method.

    Raises:
        ActdsError: E012 with the option and the reason.
    """
    for key, rule in REFUSED.items():
        value = options.get(key)
        if isinstance(value, Mapping):
            # vLLM's own default, if the name or type of the model says nothing else.
            value = value.get("method") or ("draft_model" if value.get("model") else value)
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
    stages = options.get("pipeline_parallel_size") or 1
    if stages != 1 and any(options.get(name) for name in DRAFTS):
        raise ActdsError(
            "E012",
            f"{OPTION} speculative_config",
            got=f"drafts with {stages} pipeline stages: {_STAGED_DRAFTS}",
            expected="no drafts, or one stage",
        )
    transfer = str(options.get("kv_transfer_config") or "")
    for connector, reason in REFUSED_CONNECTORS.items():
        if connector in transfer:  # also inside a MultiConnector
            raise ActdsError(
                "E012",
                f"{OPTION} kv_transfer_config",
                got=f"{connector}: {reason}",
                expected="a connector of KV that a model computed",
            )


UNREAD: Mapping[str, str] = {
    **dict.fromkeys(DRAFTS, "an accepted draft is of the logits of another row than its own"),
    "pipeline_parallel_size": "the stage that samples may have no hook, and then does not capture",
}
"""Options with which no entropy is recorded, and why."""


def refuse_unread(options: Mapping[str, object], place: str) -> None:
    """Raise for a configuration whose sampled tokens cannot be followed to their logits.

    Args:
        options: engine arguments by name; of a ``speculative_config`` its method is enough.
        place: what the error names before the option.

    Raises:
        ActdsError: E012 with the option and the reason.
    """
    for key, reason in UNREAD.items():
        if options.get(key) not in (None, 1):
            raise ActdsError(
                "E012",
                f"{place} {key}",
                got=f"{str(options[key])[:80]} with entropy: {reason}",
                expected="no such option, or entropy=False",
            )


def argument_names() -> frozenset[str]:
    """Return the argument names of the installed vLLM, importing it; raises E011 without it."""
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as error:
        raise not_installed(error.name or "vllm", "vllm", "vllm") from None
    names: Collection[str] = EngineArgs.__dataclass_fields__
    return frozenset(name for name in names if not name.startswith("_"))


class VllmOptions(EngineOptions):
    """Arguments of vLLM's ``EngineArgs``; vLLM itself validates their values."""

    model_config = ConfigDict(extra="allow")

    max_model_len: Any = None
    pipeline_parallel_size: Annotated[int, Field(ge=1)] | None = None
    async_scheduling: bool | None = None
    data_parallel_size: Annotated[int, Field(ge=1)] | None = None
    served_model_name: Any = None
    revision: str | None = None
    """Of the repository that ``--model`` names."""
    tokenizer: str | None = None
    """Folder or repository of the tokenizer, if it is not that of the model."""
    tokenizer_revision: str | None = None
    hf_config_path: str | None = None
    """Folder of ``config.json``, likewise."""
    generation_config: str | None = None
    """Folder of ``generation_config.json``, likewise; ``auto`` and ``vllm`` are the model's."""
    lora: str | None = None
    """Folder of the adapter of every request."""
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``SamplingParams`` for every request."""

    def arguments(self) -> dict[str, Any]:
        """Return what the user gave to ``EngineArgs``, by name; revisions are in the folders."""
        apart = {"lora", "sampling_params", "revision", "tokenizer_revision"}
        return self.model_dump(exclude_unset=True, exclude=apart)

    def files(self, model: Path) -> ModelFiles:
        """Return the folders of a model's files; raises as ``EngineOptions.files``."""

        def found(name: str, revision: str | None = None) -> Path:
            value = getattr(self, name)
            return find_model(value, revision, f"{OPTION} {name}") if value else model

        config = found("hf_config_path")
        generation = config
        if self.generation_config not in (None, "auto", "vllm"):
            generation = found("generation_config")
        tokenizer = found("tokenizer", self.tokenizer_revision)
        if self.tokenizer is None and self.tokenizer_revision is not None:
            raise bad_option("tokenizer_revision", "no tokenizer beside it", "tokenizer=org/name")
        return ModelFiles(model, config, tokenizer, generation)

    @property
    def n_samples(self) -> int:
        """Return how many times each prompt is sampled."""
        n = self.sampling_params.get("n", 1)
        return n if isinstance(n, int) else 1

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Return the further sampling parameters."""
        return self.sampling_params


_REFUSAL = "VLLMClientError"
"""Class of vLLM's errors that are a request's fault; older ones are a ``ValueError``."""
SHUTDOWN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""How long the workers of an engine that did not start may take to end by themselves."""


class VllmEngine:
    """A vLLM engine that captures.

    Args:
        link: where writer and census listen; ``None`` for an engine that does not capture.

    Raises:
        ActdsError: E504 when the engine does not start, E012 for a vLLM that was never tested,
            without the check of the hooks.
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
        _plugin().renew()
        from vllm import EngineArgs, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        if link is not None:
            versions.admit(link.settings.check)
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
            _end_processes(others=before)
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
        """Add a request; raises ``ValueError`` when it is refused, E504 when the engine died."""
        try:
            params = self._params(max_tokens=max_tokens)
            prompt = {"prompt_token_ids": token_ids}
            self._engine.add_request(key, prompt, params, lora_request=self._lora)
        except ValueError:
            raise
        except Exception as error:  # whatever the engine raises becomes one line
            if any(kind.__name__ == _REFUSAL for kind in type(error).__mro__):
                raise ValueError(str(error)) from error
            raise _engine_error(error) from error

    def step(self) -> list[Finished]:
        """Run one step; return the requests that ended; raises E504 when the engine has died."""
        try:
            outputs = self._engine.step()
        except Exception as error:  # whatever the engine raises becomes one line
            raise _engine_error(error) from error
        self._settle()
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
        self._settle()

    def _settle(self) -> None:
        from actds_writers.engines.vllm.plugin import settle_last_step

        in_this_process = getattr(self._engine.engine_core, "engine_core", None)
        if in_this_process is not None:
            settle_last_step(in_this_process)

    def shutdown(self) -> None:
        """End the engine and close the connections of its process."""
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

    Args:
        client: the client of the engine core; one in this process has no queue.
    """
    outputs, shutdown = getattr(client, "outputs_queue", None), client.shutdown
    if outputs is None:
        return

    @functools.wraps(shutdown)
    def shutting_down(*args: Any, **kwargs: Any) -> Any:
        # Called by the thread that watches the process, too.
        outputs.put_nowait(RuntimeError("the process of the engine has ended"))
        return shutdown(*args, **kwargs)

    client.shutdown = shutting_down


def _devices(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the option that gives a replica its own accelerators, as vLLM's own replicas have."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    world = math.prod(int(options.get(name) or 1) for name in sizes)
    own = slice(number * world, (number + 1) * world)
    given = options.get("device_ids") or list(range(own.stop))
    if len(given) < own.stop:
        raise ActdsError(
            "E012",
            f"{OPTION} device_ids",
            got=f"{len(given)} devices",
            expected=f"{world} for each replica",
        )
    return {"device_ids": list(given)[own]}


def _plugin() -> Any:
    from actds_writers.engines.vllm import plugin

    return plugin


def _close_links() -> None:
    """Close the connections of this process, of which no later engine is part of the harvest."""
    os.environ.pop(ENVIRONMENT, None)
    _plugin().close()
    _plugin().renew()


def graph_key(link: Link) -> dict[str, Any]:
    """Return what capture adds to the model's graph: that alone is in the compile cache's key."""
    hooks = [f"{kind}:{layer}" for kind, layer in link.hooks]
    # The type of the rows is this one, or follows from the model's, which is in the key as well.
    return {"hooks": hooks, "readouts": link.readouts, "store_dtype": link.settings.store_dtype}


def _end_processes(others: Collection[BaseProcess]) -> None:
    """End the processes that an engine left behind whose start has failed.

    Args:
        others: children that are not the engine's.
    """
    left = [child for child in multiprocessing.active_children() if child not in others]
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
        sampling = given.get(_SAMPLING)
        for key in sampling if isinstance(sampling, Mapping) else ():
            if key in OWNED_PARAMS:
                words = "a parameter that actds write sets itself"
                raise bad_option(f"{_SAMPLING}.{key}", words, OWNED_PARAMS[key])
        # Replicas of a dense model are engines of their own: see replicas and of_replica.
        refuse_options({key: v for key, v in given.items() if key != "data_parallel_size"})
        return super().options(given)

    def checked(self, given: Mapping[str, object]) -> EngineOptions:
        """Return validated options whose names the installed vLLM knows.

        Raises:
            ActdsError: as ``options``; E009 for an unknown name, E011 without vLLM.
        """
        options = self.options(given)  # a typing error needs no engine to be found
        assert isinstance(options, VllmOptions)
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
        self, model: Path, options: EngineOptions, link: Link, *, temperature: float, seed: int
    ) -> Engine:
        """Return the engine with its workers up; raises as ``EngineKind.start``."""
        assert isinstance(options, VllmOptions)
        adapter = read_adapter(options.lora) if options.lora else None
        return VllmEngine(model, options, link, temperature=temperature, seed=seed, adapter=adapter)

    def replicas(self, options: EngineOptions) -> int:
        """Return ``data_parallel_size``: vLLM runs dense replicas as independent engines too."""
        assert isinstance(options, VllmOptions)
        return options.data_parallel_size or 1

    def workers(self, options: EngineOptions) -> Workers:
        """Return stages and steps in flight; one more than vLLM's default on GPUs may have."""
        assert isinstance(options, VllmOptions)
        stages = options.pipeline_parallel_size or 1
        return Workers(stages, stages + (options.async_scheduling is not False))

    def of_replica(self, options: EngineOptions, number: int) -> EngineOptions:
        """Return the options of one engine, with accelerators of its own."""
        assert isinstance(options, VllmOptions)
        devices = _devices(options.arguments(), number)
        return options.model_copy(update={"data_parallel_size": 1, **devices})

    def require_logits(self, options: EngineOptions) -> None:
        """Refuse drafts and pipeline stages; raises as ``EngineKind.require_logits``."""
        assert isinstance(options, VllmOptions)
        refuse_unread(options.arguments(), OPTION)

    def alone(self, options: EngineOptions) -> EngineOptions:
        """Return the options of the same engine, one request at a time, with no KV but its own."""
        given = options.model_fields_set.intersection(_KV_FROM_OUTSIDE)
        changes = {"enable_prefix_caching": False, **dict.fromkeys(given)}
        return super().alone(options).model_copy(update=changes)

    def time_probes(self, task: TimingTask, said: Callable[[str], None]) -> Timing:
        """Return decode steps with and without probes; raises as ``EngineKind.time_probes``."""
        from actds_writers.engines.vllm import probe_timing

        return probe_timing.time_probes(task, said)

    def adapter_sha256(self, options: EngineOptions) -> str | None:
        """Return the digest of the LoRA adapter that the options name."""
        assert isinstance(options, VllmOptions)
        return adapter_sha256(str(read_adapter(options.lora).folder)) if options.lora else None


VLLM = Vllm()
