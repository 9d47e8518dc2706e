"""Provenance: the facts of a run record, read from the running engine and not from its flags.

An engine supplies readers of the loaded model, the runner and the resolved configuration. What
cannot be read is recorded as unknown, with the reason.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from actds_writers.numerics import torch_numerics

Value = bool | int | str | None
Readers = Mapping[str, Callable[[], Value]]
"""By field of the run record, the function that reads it."""


def engine_facts(
    readers: Readers, *, model: Any, folder: Path, device: Any, client_pid: int
) -> tuple[Fact, ...]:
    """Return the facts that an engine can observe once it is set up.

    Args:
        readers: of the engine's own fields; they override the common ones.
        folder: of ``config.json``.
        client_pid: process that started the engine.
    """
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
    """Return the facts of the capture that the settings determine.

    Args:
        rows_per_shard: chosen by memory where the settings leave it open.
        readouts: value of ``capture.readouts``.
    """
    declared: dict[str, bool | int | str] = {
        "capture.method": "forward hook with one custom op per decoder layer",
        "capture.overflow_policy": settings.overflow,
        "capture.order": settings.order,
        "capture.rows_per_shard": rows_per_shard,
        "capture.raw_threshold_nbytes": settings.raw_threshold_nbytes,
        "capture.sampling": sampling,
        "capture.readouts": readouts,
    }
    return [Fact(name, value, "declared") for name, value in declared.items()]


def model_facts(files: ModelFiles, *, weights: bool = True, no_tokenizer: str) -> list[Fact]:
    """Return the digests of a model's files.

    Args:
        weights: whether to hash the weight files.
        no_tokenizer: the reason when there is no ``tokenizer.json``.
    """
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
