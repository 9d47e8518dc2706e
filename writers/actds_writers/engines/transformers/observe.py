"""Provenance as the transformers writer sees it: read from the loaded model and its cache.

What this engine does not have is recorded as absent: false, or unknown with the reason.
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
from actds_writers.engines.transformers.options import Options
from actds_writers.ipc.messages import Fact

Value = bool | int | str | None
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
    readers: dict[str, Callable[[], Value]] = {
        "engine.name": lambda: "transformers",
        "engine.version": version,
        "engine.runner": lambda: name,
        "engine.scheduler": lambda: name,
        "engine.own_process": lambda: os.getpid() != client_pid,
        "model.name": lambda: folder.name,
        "model.architecture": lambda: type(model).__name__,
        "model.config_sha256": lambda: hashlib.sha256(
            (folder / "config.json").read_bytes()
        ).hexdigest(),
        "model.n_layers": lambda: len(decoder_layers(model)),
        "model.d_model": lambda: int(model.config.get_text_config().hidden_size),
        "model.quantization": lambda: str(
            getattr(quantization, "quant_method", None) or quantization or "none"
        ),
        "numerics.dtype": lambda: str(model.dtype).removeprefix("torch."),
        "numerics.kv_cache_dtype": lambda: _cache_dtype(cache),
        "numerics.kv_cache_class": lambda: type(cache).__name__,
        "numerics.attention_backend": lambda: str(model.config._attn_implementation),
        "numerics.device": lambda: str(model.device.type),
        "numerics.matmul_precision": torch.get_float32_matmul_precision,
        "numerics.deterministic": torch.are_deterministic_algorithms_enabled,
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
        "machine.platform": lambda: f"{platform.system()} {platform.machine()}",
        "machine.processor": lambda: _processor(model.device),
        "machine.python": lambda: sys.version.split()[0],
        "machine.torch": lambda: str(torch.__version__),
    }
    absent = ("serving.block_size", "serving.n_kv_blocks")
    return (
        *(_read(field, reader) for field, reader in readers.items()),
        *(Fact(field, None, "unknown", NO_BLOCKS) for field in absent),
    )


def _read(name: str, reader: Callable[[], Value]) -> Fact:
    try:
        value = reader()
    except (AttributeError, KeyError, ImportError, OSError, TypeError, ValueError) as error:
        return Fact(name, None, "unknown", f"not readable: {type(error).__name__}: {error}"[:500])
    if value is None:
        return Fact(name, None, "unknown", "the engine does not set it")
    return Fact(name, value, "observed")


def _cache_dtype(cache: Any) -> str:
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            return str(keys.dtype).removeprefix("torch.")
    raise AttributeError("no attention layer in the cache")


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
