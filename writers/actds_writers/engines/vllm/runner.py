"""A vLLM worker and its model runner: rank and stage, rows, logits, and how its forwards ran.

Every tensor-parallel rank holds the whole residual stream, so the first of each group captures; of
the heads every rank has some, which are gathered. Every pipeline stage captures the hooks of its
own layers. Logits are read where the model returns them, before any sampler: the first generation
of runners computes them in ``execute_model``, the second in ``sample_tokens``, both outside CUDA
graphs, so that a wrapper of the model's method sees every step.

At every step vLLM chooses between one CUDA graph of the whole model, graphs of its parts between
the attention ops, compiled code and plain code. Both generations tell the forward's context; but
the second one replays graphs of the whole model without a context.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.taps import decoder_layers
from actds_writers.engine_protocol import refused
from actds_writers.engines import wrap
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import IntArray


def loaded_model(runner: Any) -> torch.nn.Module:
    """Return the model itself, without what vLLM wraps around it for CUDA graphs."""
    get = getattr(runner, "get_model", None)
    model: torch.nn.Module = get() if get is not None else runner.model
    return model


@dataclass(frozen=True)
class RowIdentity:
    """Engine's request, position and token of the rows of a step, in their order.

    Positions and token ids, ``(n,)``, are the buffers that the model read, valid until the next
    step.
    """

    request_ids: list[str]
    n_rows: IntArray
    positions: torch.Tensor
    token_ids: torch.Tensor


def identify(runner: Any, scheduled: Any) -> RowIdentity:
    """Return the rows of the last forward, which two generations of runners keep apart."""
    n = scheduled.total_num_scheduled_tokens
    state = getattr(runner, "execute_model_state", None)
    batch = getattr(state, "input_batch", None)
    if batch is not None:  # second generation
        order = list(batch.req_ids)
        buffers = runner.input_buffers
        token_ids, positions = buffers.input_ids[:n], buffers.positions[:n]
        edges = np.asarray(batch.query_start_loc_np[: len(order) + 1], dtype=np.int64)
        n_rows = np.diff(edges)
    else:
        order = list(runner.input_batch.req_ids)
        # A CpuGpuBuffer in some releases, a plain tensor in others.
        positions = getattr(runner.positions, "gpu", runner.positions)[:n]
        token_ids = runner.input_ids.gpu[:n]
        n_rows = np.array([scheduled.num_scheduled_tokens.get(r, 0) for r in order], np.int64)
    return RowIdentity(order, n_rows, positions, token_ids)


def stage_of(worker: Any) -> int:
    from vllm.distributed import get_pp_group

    return int(get_pp_group().rank_in_group) if _n_stages(worker) > 1 else 0


def stage_layers(worker: Any, model: torch.nn.Module) -> frozenset[int] | None:
    return frozenset(decoder_layers(model)) if _n_stages(worker) > 1 else None


def captures(worker: Any, model: torch.nn.Module, link: Link) -> bool:
    """Return whether a worker captures: it is the first of its group, and its stage has a hook."""
    from vllm.distributed import get_tp_group

    if get_tp_group().rank_in_group:
        return False
    layers = stage_layers(worker, model)
    return layers is None or any(layer in layers for _, layer in link.hooks)


def whole(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows of all heads from those of each tensor-parallel rank; every rank has to call it.

    Ranks that share a head have it one after the other; ``width`` is of all heads, each once.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    every = tensor_model_parallel_all_gather(part.contiguous(), dim=-1)
    n_copies = every.shape[-1] // width
    if n_copies > 1:
        ranks = every.unflatten(-1, (get_tensor_model_parallel_world_size(), -1))
        every = ranks[:, ::n_copies].flatten(1)
    rows: torch.Tensor = every
    return rows


def execute(worker: Any, scheduled: Any) -> None:
    step = type(worker).execute_model
    # Past the plugin's wrapper. The worker, not its runner, hands a step on to the next stage.
    getattr(step, "__wrapped__", step)(worker, scheduled)


def share_tokens(output: Any) -> dict[str, list[int]]:
    """Return the tokens that the last pipeline stage sampled, by request, on every stage.

    Args:
        output: of ``sample_tokens`` on this worker; of use on the last stage only, where ``None``
            says that the step failed: E504 on all of them.
    """
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    sampled: dict[str, list[int]] | None = None
    if group.is_last_rank and output is not None:
        pairs = zip(output.req_ids, output.sampled_token_ids, strict=True)
        sampled = {request: [int(token) for token in tokens] for request, tokens in pairs}
    sampled = group.broadcast_object(sampled, src=group.world_size - 1)
    if sampled is None:
        raise ActdsError(
            "E504",
            "check of the hooks",
            got="a pipeline stage failed; see its message",
            expected="a step on every stage",
        )
    return sampled


def _n_stages(worker: Any) -> int:
    return int(worker.vllm_config.parallel_config.pipeline_parallel_size)


_SAMPLERS = ("_sample", "sample")
"""The method that samples, of the first and of the second generation."""


def watch(
    runner: Any,
    model: torch.nn.Module,
    on_logits: Callable[[torch.Tensor], None],
    on_tokens: Callable[[torch.Tensor], None],
) -> None:
    """Call back with the logits that a model returns, and with the tokens sampled from them.

    Raises E012 for a runner that samples elsewhere.

    Args:
        on_logits: called with ``(n, vocabulary)``, before anything changes it in place.
        on_tokens: called with the sampled token of each row, ``(n, 1)``.
    """
    name = next((name for name in _SAMPLERS if hasattr(runner, name)), None)
    computes = hasattr(model, "compute_logits")
    if name is None or not computes or getattr(runner, "batch_sharder", None) is not None:
        raise refused(
            "entropy",
            f"{type(runner).__name__} with {type(model).__name__}, which samples elsewhere",
            "a runner that samples from the logits of its model, on one rank",
        )

    # On the objects: a class may be shared with a drafter's model.
    @wrap(model, "compute_logits")
    def computing(compute: Any, *args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:
            on_logits(logits)
        return logits

    @wrap(runner, name)
    def sampling(sample: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        sampled = output[0] if isinstance(output, tuple) else output
        on_tokens(sampled.sampled_token_ids)
        return output


KernelMode = Literal["eager", "compiled", "piecewise", "full"]
"""How the kernels of a step ran, as in the column ``kernel_mode`` of the steps."""
_MANAGER = "ModelCudaGraphManager"
"""The second runner's class that captures and replays graphs of the whole model."""
_CONTEXT, _DISPATCH = "set_forward_context", "dispatch_cg_and_sync_dp"


class _LastForward:
    """The context of the last forward in this process: mode of its graph, and whether plain."""

    graph: str | None = None
    is_plain = False


class Dispatch:
    """Observes how a model runner's forwards run; of its model, without what vLLM wraps around."""

    def __init__(self, runner: Any, model: torch.nn.Module) -> None:
        self._is_compiled = _is_compiled(runner.vllm_config, model)
        self._is_piecewise = self._is_compiled or _breaks_graphs()
        for module in _modules(runner):
            original = getattr(module, _CONTEXT, None)
            if original is not None and not hasattr(original, "_actds"):
                vars(module)[_CONTEXT] = _observed(original)
            manager = getattr(module, _MANAGER, None)
            if manager is not None and not hasattr(manager.run_fullgraph, "_actds"):
                wrap(manager, "run_fullgraph")(_replaying)._actds = True

    def forget(self) -> None:
        _LastForward.graph = None

    @property
    def mode(self) -> KernelMode | None:
        graph = _LastForward.graph
        if graph is None:
            return None
        if graph == "FULL":
            return "full"
        if graph == "PIECEWISE" and self._is_piecewise:
            return "piecewise"
        return "compiled" if self._is_compiled and not _LastForward.is_plain else "eager"


@contextlib.contextmanager
def eager(runner: Any) -> Iterator[None]:
    """Run forwards without compilation and graphs, which call no Python hooks."""
    from vllm.config import CUDAGraphMode

    plain = {"skip_compiled": True, "cudagraph_runtime_mode": CUDAGraphMode.NONE}
    patched = []
    for module in _modules(runner):
        for name, forced in ((_CONTEXT, plain), (_DISPATCH, {"need_eager": True})):
            original = getattr(module, name, None)
            if original is not None:
                patched.append((module, name, original))
                vars(module)[name] = functools.partial(_forced, original, forced)
    try:
        yield
    finally:
        for module, name, original in patched:
            vars(module)[name] = original


def _modules(runner: Any) -> list[ModuleType]:
    # Those of its classes, whose names its methods look up.
    return list({sys.modules[base.__module__] for base in type(runner).__mro__})


def _forced(original: Callable[..., Any], forced: dict[str, Any], *args: Any, **given: Any) -> Any:
    return original(*args, **{**given, **forced})


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.forward_context import get_forward_context

    @contextlib.contextmanager
    def observed(*args: Any, **kwargs: Any) -> Iterator[None]:
        with original(*args, **kwargs):
            context = get_forward_context()
            _LastForward.graph = getattr(context.cudagraph_runtime_mode, "name", None)
            _LastForward.is_plain = bool(getattr(context, "skip_compiled", False))
            yield

    observed._actds = True  # type: ignore[attr-defined]
    return observed


def _replaying(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _LastForward.graph = "FULL"
    return original(*args, **kwargs)


def _is_compiled(config: Any, model: torch.nn.Module) -> bool:
    mode = getattr(config.compilation_config.mode, "name", "NONE")
    if config.model_config.enforce_eager or mode == "NONE":
        return False
    # vLLM's decorator of the parts that it compiles; torch itself compiles the whole model.
    return mode == "STOCK_TORCH_COMPILE" or any(
        getattr(part, "do_not_compile", True) is False for part in model.modules()
    )


def _breaks_graphs() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
