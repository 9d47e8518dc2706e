"""What the transformers engine says of itself in the run record.

What it does not have is recorded as absent: false, or unknown with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actds_writers.engines.transformers.options import Options
from actds_writers.ipc.messages import Fact
from actds_writers.provenance import Readers, engine_facts, observed

NO_BLOCKS = "a transformers cache has no blocks"


def observe(
    model: Any,
    cache: Any,
    engine: type,
    folder: Path,
    options: Options,
    max_model_len: int,
    client_pid: int,
) -> tuple[Fact, ...]:
    """Return the facts of a run record that can be seen after the first forward.

    Args:
        model: the loaded model.
        cache: its cache after a forward.
        engine: class that runs the batches.
        folder: model folder.
        options: options with their defaults.
        max_model_len: positions per request.
        client_pid: process of the command.
    """

    def version() -> str:
        import transformers

        return str(transformers.__version__)

    name = f"{engine.__module__}.{engine.__qualname__}"
    quantization = getattr(model.config, "quantization_config", None)
    readers: Readers = {
        "engine.name": lambda: "transformers",
        "engine.version": version,
        "engine.runner": lambda: name,
        "engine.scheduler": lambda: name,
        "model.d_model": lambda: int(model.config.get_text_config().hidden_size),
        "model.quantization": lambda: str(
            getattr(quantization, "quant_method", None) or quantization or "none"
        ),
        "numerics.dtype": lambda: str(model.dtype).removeprefix("torch."),
        "numerics.kv_cache_dtype": lambda: _cache_dtype(cache),
        "numerics.kv_cache_class": lambda: type(cache).__name__,
        "numerics.attention_backend": lambda: str(model.config._attn_implementation),
        "serving.enforce_eager": lambda: not hasattr(model, "_orig_mod"),
        "serving.compilation_mode": lambda: "NONE",
        "serving.cudagraph_mode": lambda: "NONE",
        "serving.prefix_caching": lambda: False,
        "serving.chunked_prefill": lambda: True,
        "serving.async_scheduling": lambda: False,
        "serving.max_model_len": lambda: max_model_len,
        "serving.max_num_seqs": lambda: options.max_num_seqs,
        "serving.max_num_batched_tokens": lambda: options.max_num_batched_tokens,
        "serving.tensor_parallel": lambda: 1,
        "serving.pipeline_parallel": lambda: 1,
        "serving.data_parallel": lambda: 1,
        "serving.speculative_method": lambda: "none",
    }
    absent = ("serving.block_size", "serving.n_kv_blocks")
    return (
        *engine_facts(
            readers, model=model, folder=folder, device=model.device, client_pid=client_pid
        ),
        *(observed(field, None, NO_BLOCKS) for field in absent),
    )


def _cache_dtype(cache: Any) -> str:
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            return str(keys.dtype).removeprefix("torch.")
    raise AttributeError("no attention layer in the cache")
