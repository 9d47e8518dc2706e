"""Provenance as the worker sees it: effective values, not what was asked for.

A configuration flag is not a fact. Every field is read from the loaded model, the runner or the
configuration after vLLM resolved it; what cannot be read is unknown, with the reason.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actds_writers.capture.op import decoder_layers
from actds_writers.ipc.messages import Fact

Value = bool | int | str


def observe(worker: Any, client_pid: int) -> tuple[Fact, ...]:
    """Return the facts of a run record that a worker can see once its engine is set up.

    Args:
        worker: the vLLM worker.
        client_pid: process that started the engine.
    """
    runner, config = worker.model_runner, worker.vllm_config
    readers: dict[str, Callable[[], Value]] = {
        **_engine(runner, config, client_pid),
        **_model(runner, config),
        **_numerics(runner, config),
        **_serving(config),
        **_machine(runner),
    }
    return tuple(_read(name, reader) for name, reader in readers.items())


def _read(name: str, reader: Callable[[], Value]) -> Fact:
    try:
        value = reader()
    except (AttributeError, KeyError, ImportError, OSError, TypeError, ValueError) as error:
        return Fact(name, None, "unknown", f"not readable: {type(error).__name__}: {error}"[:500])
    if value is None:
        return Fact(name, None, "unknown", "the engine does not set it")
    return Fact(name, value, "observed")


def _engine(runner: Any, config: Any, client_pid: int) -> dict[str, Callable[[], Value]]:
    def version() -> str:
        import vllm

        return str(vllm.__version__)

    def scheduler() -> str:
        found = config.scheduler_config.get_scheduler_cls()
        return f"{found.__module__}.{found.__qualname__}"

    return {
        "engine.name": lambda: "vllm",
        "engine.version": version,
        "engine.runner": lambda: f"{type(runner).__module__}.{type(runner).__qualname__}",
        "engine.scheduler": scheduler,
        "engine.own_process": lambda: os.getpid() != client_pid,
    }


def _model(runner: Any, config: Any) -> dict[str, Callable[[], Value]]:
    folder = Path(config.model_config.model)
    return {
        "model.name": lambda: folder.name,
        "model.architecture": lambda: type(runner.model).__name__,
        "model.config_sha256": lambda: hashlib.sha256(
            (folder / "config.json").read_bytes()
        ).hexdigest(),
        "model.n_layers": lambda: len(decoder_layers(runner.model)),
        "model.d_model": lambda: int(runner.model_config.get_hidden_size()),
        "model.quantization": lambda: str(config.model_config.quantization or "none"),
        "model.load_format": lambda: str(config.load_config.load_format),
    }


def _numerics(runner: Any, config: Any) -> dict[str, Callable[[], Value]]:
    def attention() -> str:
        for layer in config.compilation_config.static_forward_context.values():
            backend = getattr(layer, "attn_backend", None)
            if backend is not None:
                return str(backend.get_name())
        raise AttributeError("no attention layer in the forward context")

    def kv_dtype() -> str:
        declared = str(config.cache_config.cache_dtype)
        return str(runner.kv_cache_dtype) if declared == "auto" else declared

    return {
        "numerics.dtype": lambda: str(runner.model_config.dtype).removeprefix("torch."),
        "numerics.kv_cache_dtype": lambda: kv_dtype().removeprefix("torch."),
        "numerics.attention_backend": attention,
        "numerics.device": lambda: str(runner.device.type),
        "numerics.matmul_precision": torch.get_float32_matmul_precision,
        "numerics.deterministic": torch.are_deterministic_algorithms_enabled,
    }


def _serving(config: Any) -> dict[str, Callable[[], Value]]:
    cache, scheduler = config.cache_config, config.scheduler_config
    parallel, compilation = config.parallel_config, config.compilation_config
    speculative = config.speculative_config
    return {
        "serving.enforce_eager": lambda: bool(config.model_config.enforce_eager),
        "serving.compilation_mode": lambda: str(
            getattr(compilation.mode, "name", compilation.mode)
        ),
        "serving.cudagraph_mode": lambda: str(
            getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
        ),
        "serving.prefix_caching": lambda: bool(cache.enable_prefix_caching),
        "serving.chunked_prefill": lambda: bool(scheduler.enable_chunked_prefill),
        "serving.async_scheduling": lambda: bool(scheduler.async_scheduling),
        "serving.block_size": lambda: int(cache.block_size),
        "serving.n_kv_blocks": lambda: int(cache.num_gpu_blocks),
        "serving.max_model_len": lambda: int(config.model_config.max_model_len),
        "serving.max_num_seqs": lambda: int(scheduler.max_num_seqs),
        "serving.max_num_batched_tokens": lambda: int(scheduler.max_num_batched_tokens),
        "serving.tensor_parallel": lambda: int(parallel.tensor_parallel_size),
        "serving.pipeline_parallel": lambda: int(parallel.pipeline_parallel_size),
        "serving.data_parallel": lambda: int(parallel.data_parallel_size),
        "serving.speculative_method": lambda: str(speculative.method) if speculative else "none",
    }


def _machine(runner: Any) -> dict[str, Callable[[], Value]]:
    def processor() -> str:
        if runner.device.type == "cuda":
            return str(torch.cuda.get_device_name(runner.device))
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
        return platform.processor() or platform.machine()

    return {
        "machine.platform": lambda: f"{platform.system()} {platform.machine()}",
        "machine.processor": processor,
        "machine.python": lambda: sys.version.split()[0],
        "machine.torch": lambda: str(torch.__version__),
    }
