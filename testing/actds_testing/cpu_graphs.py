"""vLLM's path to CUDA graphs on a CPU: pieces compiled as on GPUs, and replayed as graphs are.

``python -m actds_testing.cpu_graphs COUNTS.json write ...`` runs a command of ``actds`` in whose
process vLLM keeps VLLM_COMPILE, PIECEWISE graphs and their sizes, which it turns off on a CPU. In
place of a CUDA graph is a wrapper that does what a replay does: it runs on the tensors of the
capture and not on those it is given, and leaves its results in the outputs of the capture. What it
counted goes into ``COUNTS.json``.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from actds.load.dataset import Dataset
from actds_testing import harvest as h

SIZES = (1, 2, 4, 8, 16, 32, 64)
COUNTS: Counter[str] = Counter(captured=0, replayed=0, moved=0)
"""Graphs captured, replays, and replays that were given other tensors than the capture."""
_KEPT = (
    "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "backend",
    "ir_enable_torch_wrap",
)  # fmt: skip

_CUDA_PASSES = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
"""Fusions that vLLM has on CUDA alone, and switches on wherever it compiles."""


def harvest(
    out: Path, model: Path, prompts: Path, *options: str, backend: str, **extra: str
) -> tuple[Dataset, dict[str, int]]:
    """Run a harvest in graphs, which must succeed; return its dataset and what was counted.

    Args:
        backend: how pieces are compiled: ``inductor`` as on GPUs, or ``eager``, which runs the
            kernels of an eager engine.
    """
    compilation = {
        "mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES,
        "backend": backend, "pass_config": dict.fromkeys(_CUDA_PASSES, False),
    }  # fmt: skip
    _, _, _, *arguments = h.command(out, model, prompts, *options, *h.ALONE)
    counts = out.with_suffix(".json")
    words = ["-m", "actds_testing.cpu_graphs", str(counts), *arguments,
             "--engine-arg", f"compilation_config={json.dumps(compilation)}"]  # fmt: skip
    done = h.warm_engine().run(words, h.environment(**h.ONE_PROCESS, **extra), h.TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return h.validated(out), json.loads(counts.read_text())


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
        results = self.runnable(*inputs, **named)
        for into, result in zip(_tensors(outputs), _tensors(results), strict=True):
            if into.data_ptr() != result.data_ptr():
                into.copy_(result)
        COUNTS["replayed"] += 1
        return outputs


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def force_graphs() -> None:
    """Let vLLM compile, capture and dispatch on this CPU as it does on a GPU."""
    from vllm.platforms.cpu import CpuPlatform
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
        for mode, sizes in runner.cudagraph_dispatcher.get_capture_descs():
            for size in sizes:
                runner._warmup_and_capture(size, cudagraph_runtime_mode=mode)
        GraphWrapper.capturing = False
        return result

    platform.check_and_update_config = classmethod(checking)
    platform.support_static_graph_mode = classmethod(lambda cls: True)
    platform.get_static_graph_wrapper_cls = classmethod(
        lambda cls: "actds_testing.cpu_graphs.GraphWrapper"
    )
    platform.graph_pool_handle = classmethod(lambda cls: object())
    CPUWorker.compile_or_warm_up_model = setting_up  # type: ignore[method-assign]
    _define_ops()


def _define_ops() -> None:
    """Define the ops of CUDA with which one of vLLM's passes compares, and which nothing calls."""
    from vllm.compilation.passes.utility import fix_functionalization as module

    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    vars(module)["_actds"] = library  # an op lives as long as its library
    for name in sorted(set(re.findall(r"torch\.ops\._C\.([a-z_0-9]+)", inspect.getsource(module)))):
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor(a!) x) -> ()")


def main() -> None:
    """Run a command of ``actds`` and write down the counts."""
    from actds.cli import main as actds

    from actds_testing import cpu_graphs  # the module that vLLM imports, not this __main__

    counts = Path(sys.argv.pop(1))
    cpu_graphs.force_graphs()
    try:
        sys.exit(actds())
    finally:
        counts.write_text(json.dumps(cpu_graphs.COUNTS))


if __name__ == "__main__":
    main()
