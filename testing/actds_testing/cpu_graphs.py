"""vLLM's path to CUDA graphs on a CPU: compiled as on GPUs, and replayed as graphs are.

``python -m actds_testing.cpu_graphs COUNTS.json write ...`` runs a command of ``actds`` in whose
process vLLM keeps VLLM_COMPILE, CUDA graphs and their sizes, which it turns off on a CPU. In place
of a graph is what does the same as a replay: it runs on the tensors of the capture and not on those
it is given, and leaves its results in the outputs of the capture. A piece is compiled code, which
is called again (``GraphWrapper``); of a whole model, which the second runner captures and which has
code of Python around its kernels, the kernels alone are (``RecordedGraph``). What was counted goes
into ``COUNTS.json``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.witnessed_engine import interpret_kernels

SIZES = (1, 2, 4, 8, 16, 32, 64)
COUNTS: Counter[str] = Counter(captured=0, replayed=0, moved=0)
"""Graphs captured, replays, and replays that were given other tensors than the capture."""
_KEPT = (
    "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "backend",
    "ir_enable_torch_wrap",
)  # fmt: skip

_CAPTURE = "_warmup_and_capture"
_CUDA_PASSES = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
"""Fusions that vLLM has on CUDA alone, and switches on wherever it compiles."""


def arguments(
    out: Path, model: Path, prompts: Path, *options: str, backend: str, mode: str = "PIECEWISE"
) -> list[str]:
    """Return the arguments of this program for a harvest in graphs.

    Args:
        backend: how pieces are compiled: ``inductor`` as on GPUs, or ``eager``, which runs the
            kernels of an eager engine.
        mode: vLLM's ``cudagraph_mode``.
    """
    _, _, _, *command = h.command(out, model, prompts, *options, *h.ALONE)
    compiled = f"compilation_config={compilation(backend, mode)}"
    return [str(out.with_suffix(".json")), *command, "--engine-arg", compiled]


def compilation(backend: str, mode: str = "PIECEWISE", **more: Any) -> str:
    """Return vLLM's ``compilation_config`` of an engine in graphs.

    Args:
        backend, mode: as of ``arguments``.
        more: further fields.
    """
    return json.dumps({
        "mode": 3, "cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES,
        "backend": backend, "pass_config": dict.fromkeys(_CUDA_PASSES, False), **more,
    })  # fmt: skip


def harvest(out: Path, *task: str | Path, **extra: str) -> tuple[Dataset, dict[str, int]]:
    """Run a harvest in graphs, which must succeed; return its dataset and what was counted.

    Args:
        task: model, prompts and options, as for ``arguments``.
        extra: ``backend`` and ``mode``; other names are variables of the environment.
    """
    chosen = {name: extra.pop(name) for name in ("backend", "mode") if name in extra}
    model, prompts, *options = task
    words = arguments(out, Path(model), Path(prompts), *map(str, options), **chosen)
    environment = h.environment(**h.ONE_PROCESS, **extra)
    program = ["-m", "actds_testing.cpu_graphs", *words]
    if "TRITON_INTERPRET" in extra:  # which vLLM looks for when it is imported
        done = subprocess.run([sys.executable, *program], env=environment, capture_output=True,
                              text=True, timeout=h.TIMEOUT_S)  # fmt: skip
    else:
        done = h.warm_engine().run(program, environment, h.TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return h.validated(out), json.loads(out.with_suffix(".json").read_text())


class GraphWrapper:
    """Stands in for vLLM's ``CUDAGraphWrapper``, with the same arguments.

    Raises:
        RuntimeError: a graph is captured after the engine's start, as vLLM's wrapper raises.
    """

    capturing = False

    def __init__(
        self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None
    ) -> None:
        self.runnable, self._mode = runnable, runtime_mode
        self._captured: dict[Any, tuple[Any, Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["runnable"], name)

    def unwrap(self) -> Any:
        """Return what is wrapped."""
        return self.runnable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != self._mode:
            return self.runnable(*args, **kwargs)
        size = context.batch_descriptor
        if size not in self._captured:
            if not GraphWrapper.capturing:
                raise RuntimeError(f"a graph is captured while serving: {size}")
            self._captured[size] = args, kwargs, self.runnable(*args, **kwargs)
            COUNTS["captured"] += 1
            return self._captured[size][2]
        inputs, named, outputs = self._captured[size]
        pairs = zip(_tensors((args, kwargs)), _tensors((inputs, named)), strict=True)
        COUNTS["moved"] += any(new.data_ptr() != old.data_ptr() for new, old in pairs)
        _leave(self.runnable(*inputs, **named), outputs)
        COUNTS["replayed"] += 1
        return outputs


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for ``torch.cuda.CUDAGraph``: records the kernels of a forward, and replays them.

    A kernel is called with the tensors and numbers of the capture, as a graph has them frozen. The
    attention of a CPU has no buffers for what its metadata say, which on CUDA a step fills before
    a replay: those of the capture take what the last step's say.
    """

    metadata: ClassVar[dict[str, Any]] = {}
    """Of the last step that was prepared, by layer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels: list[tuple[Any, Any, Any, Any]] = []
        self._context: Any = None

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if is_forward_context_available():
            self._context = get_forward_context()
        result = kernel(*args, **(kwargs or {}))
        self._kernels.append((kernel, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run what was recorded, and nothing else."""
        from vllm.forward_context import override_forward_context

        for layer, captured in self._context.attn_metadata.items():
            vars(captured).update(vars(RecordedGraph.metadata[layer]))
        with override_forward_context(self._context), torch.inference_mode():
            for kernel, args, kwargs, captured in self._kernels:
                _leave(kernel(*args, **kwargs), captured)
        COUNTS["replayed"] += 1


@contextlib.contextmanager
def _recording(graph: RecordedGraph, *_: Any, **__: Any) -> Iterator[None]:
    with graph:
        yield
    COUNTS["captured"] += 1


def _leave(results: Any, captured: Any) -> None:
    """Leave the results of a replay where those of the capture are."""
    for into, result in zip(_tensors(captured), _tensors(results), strict=True):
        if into.data_ptr() != result.data_ptr():
            into.copy_(result)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def force_graphs() -> None:
    """Let vLLM compile, capture and dispatch on this CPU as it does on a GPU."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.cpu_worker import CPUWorker

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__
    set_up = CPUWorker.compile_or_warm_up_model

    def checking(cls: Any, config: Any) -> None:
        compilation = config.compilation_config
        kept = {name: getattr(compilation, name) for name in _KEPT}
        check(cls, config)
        if not config.model_config.enforce_eager:
            vars(compilation).update(kept)
            compilation.inductor_compile_config.pop("size_asserts", None)

    def setting_up(self: Any) -> Any:
        result = set_up(self)
        runner, GraphWrapper.capturing = self.model_runner, True
        if hasattr(runner, "cudagraph_manager"):
            force_full_graphs(runner)
            runner.capture_model(profile_only=True)  # which does not lock a workspace
        else:
            for mode, sizes in runner.cudagraph_dispatcher.get_capture_descs():
                for size in sizes:
                    getattr(runner, _CAPTURE)(size, cudagraph_runtime_mode=mode)
        GraphWrapper.capturing = False
        return result

    platform.check_and_update_config = classmethod(checking)
    platform.support_static_graph_mode = classmethod(lambda cls: True)
    platform.get_static_graph_wrapper_cls = classmethod(
        lambda cls: "actds_testing.cpu_graphs.GraphWrapper"
    )
    platform.graph_pool_handle = classmethod(lambda cls: object())
    worker: Any = CPUWorker
    worker.compile_or_warm_up_model = setting_up
    setattr(CPUAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)  # noqa: B010
    _define_ops()


def force_full_graphs(runner: Any) -> None:
    """Let the second runner capture and replay whole models on this CPU."""
    from vllm.v1.worker.gpu import cudagraph_utils

    def nothing(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    prepare = runner.model_state.prepare_attn

    def preparing(*args: Any, **kwargs: Any) -> Any:
        RecordedGraph.metadata = prepare(*args, **kwargs)
        return RecordedGraph.metadata

    runner.model_state.prepare_attn = preparing
    names = vars(cudagraph_utils)
    names.update(graph_capture=nothing, capture_pool=nothing, current_stream=lambda: None)
    stand_ins: Any = torch
    stand_ins.cuda.CUDAGraph, stand_ins.cuda.graph = RecordedGraph, _recording
    stand_ins.accelerator.get_memory_info = lambda *_: (0, 0)


def _define_ops() -> None:
    """Define the ops of CUDA with which one of vLLM's passes compares, and which nothing calls."""
    from vllm.compilation.passes.utility import fix_functionalization as module

    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    vars(module)["_actds"] = library  # an op lives as long as its library
    names = set(re.findall(r"torch\.ops\._C\.([a-z_0-9]+)", inspect.getsource(module)))
    defined = getattr(torch.ops, "_C")  # noqa: B009
    for name in sorted(names):
        if not hasattr(defined, name):
            library.define(f"{name}(Tensor(a!) x) -> ()")  # type: ignore[no-untyped-call]


def main() -> None:
    """Run a command of ``actds`` and write down the counts."""
    from actds.cli import main as actds
    from actds_testing import cpu_graphs  # the module that vLLM imports, not this __main__

    counts = Path(sys.argv.pop(1))
    if os.environ.get("TRITON_INTERPRET"):
        interpret_kernels()
    cpu_graphs.force_graphs()
    try:
        actds()
    finally:
        counts.write_text(json.dumps(cpu_graphs.COUNTS))


if __name__ == "__main__":
    main()
