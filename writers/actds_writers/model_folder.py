"""Facts of a model folder: configuration, end-of-sequence ids, digests of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from actds.canonical import read_bounded
from actds.errors import ActdsError


def model_config(model: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a model folder, the text part of a multimodal one.

    Raises:
        ActdsError: E005 when it is missing or lacks what capture needs.
    """
    path = model / "config.json"
    try:
        config = json.loads(read_bounded(path))
        if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise ActdsError(
            "E005", str(model), got=f"config.json: {words}", expected="a model folder"
        ) from None
    text = dict(config.get("text_config", config))
    fields = ("num_hidden_layers", "hidden_size")
    if not all(_is_size(text.get(field)) for field in fields):
        text.update(_renamed(model))
    for field in fields:
        if not _is_size(text.get(field)):
            raise ActdsError(
                "E005", f"{model} config.json", got=f"no {field}", expected="a decoder model"
            )
    return text


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _renamed(model: Path) -> dict[str, int]:
    """Return sizes that a configuration has under other names (``n_layer``) or leaves out."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no transformers, a family that it does not know, or a broken file
    names = ("num_hidden_layers", "hidden_size", "max_position_embeddings")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def generation_eos(model: Path) -> list[int]:
    """Return the end-of-sequence ids of ``generation_config.json``, empty without the file."""
    path = model / "generation_config.json"
    if not path.is_file():
        return []
    try:
        eos = json.loads(read_bounded(path))["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the tokenizer's own EOS is used
    return [eos] if isinstance(eos, int) else [int(token) for token in eos or []]


def weights_sha256(model: Path) -> str | None:
    """Return the SHA-256 over the sorted 'name sha256' lines of the weight files, if any.

    Spec: 0.1 section 6.1.
    """
    paths = sorted(model.glob("*.safetensors")) + sorted(model.glob("*.bin"))
    lines = "".join(f"{path.name} {file_sha256(path)}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest() if paths else None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
