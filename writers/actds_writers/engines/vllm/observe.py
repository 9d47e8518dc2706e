"""What vLLM says of itself in the run record, read in its worker after everything is resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actds_writers.ipc.messages import Fact
from actds_writers.provenance import Readers, engine_facts


def observe(worker: Any, client_pid: int) -> tuple[Fact, ...]:
    """Return the facts of a run record that a worker can see once its engine is set up.

    Args:
        worker: the vLLM worker.
        client_pid: process that started the engine.
    """
    runner, config = worker.model_runner, worker.vllm_config
    readers: Readers = {
        **_engine(runner, config),
        **_model(runner, config),
        **_numerics(runner, config),
        **_serving(config),
    }
    return engine_facts(
        readers,
        model=runner.model,
        folder=Path(config.model_config.model),
        device=runner.device,
        client_pid=client_pid,
    )


def _engine(runner: Any, config: Any) -> Readers:
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
    }


def _model(runner: Any, config: Any) -> Readers:
    return {
        "model.d_model": lambda: int(runner.model_config.get_hidden_size()),
        "model.quantization": lambda: str(config.model_config.quantization or "none"),
        "model.load_format": lambda: str(config.load_config.load_format),
    }


def _numerics(runner: Any, config: Any) -> Readers:
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
    }


def _serving(config: Any) -> Readers:
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
