"""How a forward of either model runner ran, and how one runs without graphs.

Stand-ins for the names of vLLM that are patched; ``tests/engine/test_engine_graphs.py`` has real
ones.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from actds_writers.engines.vllm.runner import Dispatch, KernelMode, eager


class Mode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Compilation(enum.Enum):
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    VLLM_COMPILE = 3


class Part(torch.nn.Module):
    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        self.do_not_compile = not compiled


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module with a runner that replays whole models as the second one of vLLM does."""
    contexts: list[Any] = []
    for name, values in {
        "vllm": {},
        "vllm.envs": {"VLLM_USE_BREAKABLE_CUDAGRAPH": False},
        "vllm.config": {"CUDAGraphMode": Mode},
        "vllm.forward_context": {"get_forward_context": lambda: contexts[-1]},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(sys.modules["vllm"], name.rpartition(".")[2], module)

    @contextlib.contextmanager
    def set_forward_context(
        metadata: Any, cudagraph_runtime_mode: Mode = Mode.NONE, skip_compiled: bool = False
    ) -> Iterator[None]:
        contexts.append(
            SimpleNamespace(
                cudagraph_runtime_mode=cudagraph_runtime_mode, skip_compiled=skip_compiled
            )
        )
        yield
        contexts.pop()

    class Manager:
        def run_fullgraph(self, size: int) -> int:
            return size

    class Runner:
        def __init__(self, mode: Compilation, *, enforce_eager: bool = False) -> None:
            self.vllm_config = SimpleNamespace(
                compilation_config=SimpleNamespace(mode=mode),
                model_config=SimpleNamespace(enforce_eager=enforce_eager),
            )

        def forward(self, mode: Mode, *, skip_compiled: bool = False) -> Any:
            mode = vars(module)["dispatch_cg_and_sync_dp"](mode, need_eager=False)
            if mode is Mode.FULL:
                return vars(module)["ModelCudaGraphManager"]().run_fullgraph(8)
            given = {"cudagraph_runtime_mode": mode, "skip_compiled": skip_compiled}
            with vars(module)["set_forward_context"](None, **given):
                return contexts[-1]

    module = ModuleType("a_runner")
    monkeypatch.setitem(sys.modules, "a_runner", module)
    Runner.__module__ = "a_runner"
    vars(module).update(
        Runner=Runner, ModelCudaGraphManager=Manager, set_forward_context=set_forward_context,
        dispatch_cg_and_sync_dp=lambda mode, need_eager: Mode.NONE if need_eager else mode,
    )  # fmt: skip
    return module


@pytest.mark.parametrize(
    ("compilation", "compiled", "mode", "skip", "expected"),
    [
        ("VLLM_COMPILE", True, Mode.FULL, False, "full"),
        ("VLLM_COMPILE", True, Mode.PIECEWISE, False, "piecewise"),
        ("VLLM_COMPILE", True, Mode.NONE, False, "compiled"),
        ("VLLM_COMPILE", True, Mode.NONE, True, "eager"),
        # The class of the model has nothing that vLLM compiles, and so no piece to capture.
        ("VLLM_COMPILE", False, Mode.NONE, False, "eager"),
        ("VLLM_COMPILE", False, Mode.PIECEWISE, False, "eager"),
        ("STOCK_TORCH_COMPILE", False, Mode.NONE, False, "compiled"),
        ("NONE", False, Mode.NONE, False, "eager"),
        ("NONE", False, Mode.FULL, False, "full"),
    ],
)
def test_the_mode_is_what_the_forward_was_dispatched_to(
    compilation: str, compiled: bool, mode: Mode, skip: bool, expected: KernelMode,
    runners: ModuleType,
) -> None:  # fmt: skip
    runner = runners.Runner(Compilation[compilation])
    model = torch.nn.Sequential(Part(compiled=compiled), torch.nn.Linear(1, 1))
    dispatch = Dispatch(runner, model)
    assert Dispatch(runner, model).mode is None  # twice, as of two harvests of one engine
    runner.forward(mode, skip_compiled=skip)
    assert dispatch.mode == expected
    dispatch.forget()
    assert dispatch.mode is None


def test_an_eager_forward_replays_no_graph_of_either_runner(runners: ModuleType) -> None:
    runner = runners.Runner(Compilation.VLLM_COMPILE)
    dispatch = Dispatch(runner, torch.nn.Sequential(Part(compiled=True)))
    before = dict(vars(runners))
    with eager(runner):
        for mode in Mode:
            context = runner.forward(mode)
            assert context.cudagraph_runtime_mode is Mode.NONE and context.skip_compiled
            assert dispatch.mode == "eager"
    assert vars(runners) == before
    runner.forward(Mode.FULL)
    assert dispatch.mode == "full"
