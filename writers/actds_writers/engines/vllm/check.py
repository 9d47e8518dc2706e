"""The check of the hooks in a vLLM worker: its prompts, what they are held against, its result.

Stands in the worker between the set-up of the engine and its first step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.check import HookCheck, bound, compare_with_forward, compare_with_next
from actds_writers.capture.op import HookBuffers
from actds_writers.capture.reference import (
    NoReferenceError,
    load_reference,
    states_after_layers,
    states_in_fresh_process,
)
from actds_writers.capture.streams import StreamForm
from actds_writers.engines.vllm.check_run import (
    Forwarded,
    NextReaders,
    eager,
    forward_prompts,
    loaded_model,
    prompts_of,
)
from actds_writers.ipc.messages import HookSpec

__all__ = ["check_hooks", "join_check"]


def check_hooks(
    worker: Any, buffers: HookBuffers, hooks: tuple[HookSpec, ...], form: StreamForm
) -> HookCheck:
    """Return what the check of the hooks came to.

    Args:
        worker: a worker whose engine is set up and has not run a request.
        buffers: what its hooks write.
        hooks: the hooks, in the order of the buffers.
        form: where the stream is in what its layers return, as far as that is known.

    Raises:
        ActdsError: E507 when rows are not the model's; E007 when nothing could be compared and the
            model class is not known; E012 when the KV cache has no room for a short prompt.

    Spec: 0.1 section 9.1.
    """
    prompts = prompts_of(worker)
    if not prompts:
        raise ActdsError(
            "E012",
            "engine option num_gpu_blocks_override",
            got="a KV cache that does not hold one short prompt",
            expected="room for the two prompts of the check",
        )
    forwarded = forward_prompts(worker, prompts, buffers)
    assert forwarded is not None
    model = loaded_model(worker.model_runner)
    layers = [hook.layer for hook in hooks]
    readers = NextReaders(model, forwarded.prompt_rows, layers)
    with readers.watching(worker.model_runner):
        forward_prompts(worker, prompts, buffers, after_prompts=readers.stop)
    limit = _limit(worker, hooks[0])
    try:
        states = _reference_states(worker, model, forwarded)
    except NoReferenceError as missing:
        return _without_reference(model, form, hooks, forwarded, readers, limit, str(missing))
    rows = {hook.name: forwarded.rows[index] for index, hook in enumerate(hooks)}
    layer_of = {hook.name: hook.layer for hook in hooks}
    return compare_with_forward(rows, layer_of, states, limit, forwarded.decoded)


def join_check(worker: Any) -> None:
    """Run the forwards of the check on a rank that has no hooks, beside the rank that has them."""
    prompts = prompts_of(worker)
    if not prompts:
        return
    forward_prompts(worker, prompts, None)
    with eager(worker.model_runner):
        forward_prompts(worker, prompts, None)


def _limit(worker: Any, hook: HookSpec) -> float:
    config = worker.vllm_config
    kv_dtype = str(config.cache_config.cache_dtype)
    coarse = (
        config.model_config.quantization is not None
        or kv_dtype.startswith(("fp8", "int8", "nvfp4", "turboquant"))
        or torch.get_float32_matmul_precision() != "highest"
    )
    computed = str(worker.model_runner.model_config.dtype).removeprefix("torch.")
    return bound(computed, hook.dtype, coarse=coarse)


def _reference_states(worker: Any, model: torch.nn.Module, forwarded: Forwarded) -> np.ndarray:
    """Return the stream after every layer of a plain forward, ``(n_layers, n, d_model)``.

    Raises:
        NoReferenceError: transformers cannot have the weights that the engine runs.
    """
    config = worker.vllm_config
    own = config.model_config
    if str(config.load_config.load_format) == "dummy":
        raise NoReferenceError("load_format is dummy: the engine made the weights itself")
    if own.quantization is not None:
        raise NoReferenceError(f"the weights are quantized ({own.quantization})")
    if own.hf_overrides:
        raise NoReferenceError("hf_overrides: the engine runs another configuration")
    ranks = int(config.parallel_config.tensor_parallel_size)
    size = ranks * sum(parameter.numel() for parameter in model.parameters())
    options = {"revision": own.revision, "trust_remote_code": bool(own.trust_remote_code)}
    # vLLM's backend for models of transformers changes their classes, for all of this process.
    if type(model).__module__.startswith("vllm.model_executor.models.transformers"):
        parts = states_in_fresh_process(own.model, size, forwarded.sequences, **options)
    else:
        reference = load_reference(own.model, size, **options)
        parts = states_after_layers(reference, forwarded.sequences)
    states: np.ndarray = np.concatenate(parts, axis=1)
    if states.shape[1:] != forwarded.rows.shape[1:]:
        raise NoReferenceError(
            f"transformers' layers return {states.shape[1:]}, the hooks see "
            f"{forwarded.rows.shape[1:]}"
        )
    return states


def _without_reference(
    model: torch.nn.Module,
    form: StreamForm,
    hooks: tuple[HookSpec, ...],
    forwarded: Forwarded,
    readers: NextReaders,
    limit: float,
    reason: str,
) -> HookCheck:
    found = {
        hook.name: readers.distances[index]
        for index, hook in enumerate(hooks)
        if index in readers.distances
    }
    # What was seen counts, also where something behind another hook was not.
    check = compare_with_next(found, limit, forwarded.prompt_rows.shape[1], reason)
    unseen = [hook.name for hook in hooks if hook.name not in found]
    if not unseen:
        return check
    if form != "unverified":
        said = f"{reason}; nothing reads the stream behind {', '.join(unseen)}"
        return replace(check, against="engine" if found else "table", reason=said)
    raise ActdsError(
        "E007",
        type(model).__name__,
        got=f"a model class that was never verified, and nothing to check its rows with: {reason}",
        expected="a class of docs/families.md, or a model that transformers can load beside it",
        next_step="Harvest it with --engine transformers, which runs the model's own code.",
    )
