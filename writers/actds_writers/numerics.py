"""What the last bits of a row depend on, as the process that computes has it.

On the data path: read once by the engine's worker, for the run record (section 6.1). Settings that
the device does not have are left out of the record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

BATCH_INVARIANT = (
    "vllm.model_executor.determinism.batch_invariant",
    "vllm.model_executor.layers.batch_invariant",
)
"""Modules of vLLM that hold the flag, of several versions."""


def torch_numerics(device_type: str) -> dict[str, Callable[[], bool | int | str]]:
    """Return what reads the settings of torch in this process, by field of the run record.

    Args:
        device_type: of the device that computes, as ``cpu`` or ``cuda``.
    """
    import torch

    readers: dict[str, Callable[[], bool | int | str]] = {
        "numerics.device": lambda: device_type,
        "numerics.matmul_precision": torch.get_float32_matmul_precision,
        "numerics.deterministic": torch.are_deterministic_algorithms_enabled,
        "numerics.tf32": lambda: _tf32(device_type),
    }
    if device_type == "cpu":
        readers["numerics.threads"] = torch.get_num_threads
    if device_type == "cuda":
        readers["numerics.reduced_precision_reduction"] = _reduced_precision
    return readers


def _tf32(device_type: str) -> bool:
    """Return whether products of float32 are computed in TF32: what counts is the backend's word.

    ``torch.get_float32_matmul_precision`` keeps what was asked for last, also where the precision
    of the backend was set behind it.
    """
    from torch import backends

    backend: Any = backends.cuda if device_type == "cuda" else backends.mkldnn
    found = str(backend.matmul.fp32_precision)
    if found == "none":
        found = str(backends.fp32_precision)  # type: ignore[attr-defined]
    return found == "tf32"


def _reduced_precision() -> str:
    """Return the types whose products may be summed in less than float32."""
    from torch.backends.cuda import matmul

    allowed = {
        "bfloat16": matmul.allow_bf16_reduced_precision_reduction,
        "float16": matmul.allow_fp16_reduced_precision_reduction,
    }
    # A pair since torch 2.10: of sums in one kernel, and of those that are split over K.
    names = [name for name, on in allowed.items() if (any(on) if isinstance(on, tuple) else on)]
    return ", ".join(names) or "none"


def batch_invariant() -> bool:
    """Return whether vLLM replaced its kernels by batch-invariant ones in this process.

    The variable ``VLLM_BATCH_INVARIANT`` only asks for it: a platform without such kernels never
    looks at it.

    Raises:
        AttributeError: this version of vLLM holds the flag elsewhere.
    """
    for name in BATCH_INVARIANT:
        module = sys.modules.get(name)
        if module is not None:
            return bool(module._batch_invariant_MODE)
    return False
