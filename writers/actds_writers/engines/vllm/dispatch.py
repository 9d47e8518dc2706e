"""How a model runner dispatches a forward: what ran, and how a forward runs without graphs.

At every step vLLM chooses between one CUDA graph of the whole model, graphs of its parts between
the attention ops, compiled code and plain code. Both generations of runners tell the forward's
context; but the second one replays graphs of the whole model without a context.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal

import torch

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
    """Observes how a model runner's forwards run.

    Args:
        model: the runner's model, without what vLLM wraps around it.
    """

    def __init__(self, runner: Any, model: torch.nn.Module) -> None:
        self._is_compiled = _is_compiled(runner.vllm_config, model)
        self._is_piecewise = self._is_compiled or _breaks_graphs()
        for module in _modules(runner):
            original = getattr(module, _CONTEXT, None)
            if original is not None and not hasattr(original, "_actds"):
                vars(module)[_CONTEXT] = _observed(original)
            manager = getattr(module, _MANAGER, None)
            if manager is not None and not hasattr(manager.run_fullgraph, "_actds"):
                manager.run_fullgraph = _replayed(manager.run_fullgraph)

    def forget(self) -> None:
        """Forget the last forward, before a step."""
        _LastForward.graph = None

    @property
    def mode(self) -> KernelMode | None:
        """Return how the kernels of the last forward ran, ``None`` when it was not observed."""
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
    """Return the modules of a runner's classes, whose names its methods look up."""
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


def _replayed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replayed(*args: Any, **kwargs: Any) -> Any:
        _LastForward.graph = "FULL"
        return original(*args, **kwargs)

    replayed._actds = True  # type: ignore[attr-defined]
    return replayed


def _is_compiled(config: Any, model: torch.nn.Module) -> bool:
    mode = getattr(config.compilation_config.mode, "name", "NONE")
    if config.model_config.enforce_eager or mode == "NONE":
        return False
    # vLLM's decorator of the parts that it compiles; torch itself compiles the whole model.
    return mode == "STOCK_TORCH_COMPILE" or any(
        getattr(part, "do_not_compile", True) is False for part in model.modules()
    )


def _breaks_graphs() -> bool:
    """Return whether vLLM records graphs piece by piece without compiling."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_BREAKABLE_CUDAGRAPH", False))
