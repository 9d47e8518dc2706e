"""Provenance: the facts of a run record, read from the running engine and not from its flags.

An engine supplies readers of the loaded model, the runner and the resolved configuration. What
cannot be read is recorded as unknown, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from actds.format import canonical
from actds.format.shard import HOOK_CHOICES
from actds_writers.config import HarvestSettings
from actds_writers.ipc.messages import Fact
from actds_writers.model_folder import (
    ModelFiles,
    file_sha256,
    missing_weights,
    model_name,
    repository_of,
    weights_sha256,
)

MAX_TEXT = 256
"""Characters of a value that is kept in words; of a longer one its digest is."""


def in_words(value: Any) -> Any:
    """Return a parameter as canonical JSON can hold it.

    A float is the shortest decimal text that gives it, and what would take more than ``MAX_TEXT``
    characters is ``{"n": characters, "sha256": digest}`` of its JSON.
    """
    plain = _plain(value)
    if len(text := _text(plain)) > MAX_TEXT and isinstance(plain, dict):
        plain = {key: in_words(member) for key, member in plain.items()}
    if len(_text(plain)) <= MAX_TEXT:
        return plain
    return {"n": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _text(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, float):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        public = [field.name for field in fields(value) if not field.name.startswith("_")]
        value = {name: getattr(value, name) for name in public}
    if isinstance(value, Mapping):
        # A member that is off is left out: the versions of an engine have different ones.
        members = {str(key): _plain(member) for key, member in value.items()}
        return {key: member for key, member in members.items() if member not in (None, False)}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, Set):
        return sorted(map(_plain, value))
    return str(value)


BATCH_INVARIANT = (
    "vllm.model_executor.determinism.batch_invariant",
    "vllm.model_executor.layers.batch_invariant",
)
"""Modules of vLLM that hold the flag, of several versions."""


def torch_numerics(device_type: str) -> dict[str, Callable[[], bool | int | str]]:
    """Return what reads the settings of torch in this process, by field of the run record."""
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
    precision = str(backend.matmul.fp32_precision)
    if precision == "none":
        precision = str(backends.fp32_precision)  # type: ignore[attr-defined]
    return precision == "tf32"


def _reduced_precision() -> str:
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


Value = bool | int | str | None
Readers = Mapping[str, Callable[[], Value]]
"""By field of the run record, the function that reads it."""


def engine_facts(
    readers: Readers, *, model: Any, folder: Path, device: Any, client_pid: int
) -> tuple[Fact, ...]:
    """Return the facts that an engine can observe once it is set up."""
    import torch

    from actds_writers.capture.taps import decoder_layers

    common: Readers = {
        "engine.own_process": lambda: os.getpid() != client_pid,
        "model.name": lambda: model_name(folder),
        "model.architecture": lambda: type(model).__name__,
        "model.config_sha256": lambda: file_sha256(folder / "config.json"),
        "model.n_layers": lambda: len(decoder_layers(model)),
        **torch_numerics(str(device.type)),
        "machine.platform": lambda: f"{platform.system()} {platform.machine()}",
        "machine.processor": lambda: _processor(device),
        "machine.python": lambda: sys.version.split()[0],
        "machine.torch": lambda: str(torch.__version__),
    }
    facts = [_read(name, reader) for name, reader in {**common, **readers}.items()]
    if repository_of(folder) is not None:
        facts.append(observed("model.revision", folder.resolve().name))
    return tuple(facts)


def capture_facts(
    settings: HarvestSettings, rows_per_shard: int, readouts: str, sampling: str
) -> list[Fact]:
    """Return the facts of the capture that the settings determine."""
    declared: dict[str, bool | int | str] = {
        "capture.method": "forward hook with one custom op per decoder layer",
        "capture.overflow_policy": settings.overflow,
        "capture.order": settings.order,
        "capture.rows_per_shard": rows_per_shard,
        "capture.raw_threshold_nbytes": settings.raw_threshold_nbytes,
        "capture.sampling": sampling,
        "capture.readouts": readouts,
    }
    if settings.choices:
        declared[HOOK_CHOICES] = canonical.dump([*map(list, settings.choices)]).decode().strip()
    return [Fact(name, value, "declared") for name, value in declared.items()]


def model_facts(files: ModelFiles, *, weights: bool = True, no_tokenizer: str) -> list[Fact]:
    digest, why = None, "weights_digest is false"
    if not files.weights.is_dir():
        why = "the repository was not in the local hub cache when the engine started"
    elif (name := missing_weights(files.weights)) is not None:
        why = f"{name} was not in the folder when the engine started"
    elif weights:
        digest, why = weights_sha256(files.weights), "the folder has no weight file"
    path = files.tokenizer / "tokenizer.json"
    return [
        observed("model.weights_sha256", digest, why),
        observed("tokenizer.sha256", file_sha256(path) if path.is_file() else None, no_tokenizer),
    ]


def observed(name: str, value: Value, reason: str | None = None) -> Fact:
    """Return an observed fact, or an unknown one with the reason."""
    if value is None:
        return Fact(name, None, "unknown", reason or "not known")
    return Fact(name, value, "observed")


def _read(name: str, reader: Callable[[], Value]) -> Fact:
    try:
        value = reader()
    except (AttributeError, KeyError, ImportError, OSError, TypeError, ValueError) as error:
        return Fact(name, None, "unknown", f"not readable: {type(error).__name__}: {error}"[:500])
    return observed(name, value, "the engine does not set it")


def _processor(device: Any) -> str:
    if device.type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
