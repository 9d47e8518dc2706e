"""Facts of a model folder: name, configuration, end-of-sequence ids and digests.

A model that is named by its repository is the folder in the local cache of the Hugging Face hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actds.errors import ActdsError
from actds.format.arrays import DTYPES
from actds.format.canonical import read_bounded
from actds.format.schema import DType

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+")


@dataclass(frozen=True)
class SpecialTokens:
    special: tuple[int, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelFiles:
    """The folders that have the files of a model: mostly one."""

    weights: Path
    config: Path
    tokenizer: Path
    generation: Path

    @classmethod
    def of(cls, folder: Path) -> ModelFiles:
        return cls(folder, folder, folder, folder)


def find_model(model: str | Path, revision: str | None = None, place: str = "model") -> Path:
    """Return the folder of a model: itself, or that of ``org/name`` in the local hub cache.

    Nothing is downloaded. A path that is neither is returned as it is.

    Args:
        revision: branch, tag or commit of the repository, by default ``main``.

    Raises:
        ActdsError: E005 a repository, or a revision of it, that is not in the cache; a revision of
            a folder.
    """
    folder, name = Path(model), str(model)
    if folder.exists() or not _REPOSITORY.fullmatch(name):
        if revision is not None and repository_of(folder) is None:
            got = f"the revision {revision} of a folder"
            raise ActdsError("E005", f"{place} {name}", got=got, expected="a repository, org/name")
        return folder
    try:
        from huggingface_hub import constants, snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        at = f" at {revision}" if revision else ""
        cache = "not importable: huggingface_hub" if isinstance(error, ImportError) else ""
        raise ActdsError(
            "E005",
            f"{place} {name}",
            got=cache or f"no such folder, and nothing{at} in {constants.HF_HUB_CACHE}",
            expected="a model folder, or a repository in the local hub cache",
            next_step=shlex.join(
                ["hf", "download", name, *(["--revision", revision] if revision else [])]
            ),
        ) from None


def local_folder_of(model: str, revision: str | None = None) -> Path:
    """Return as ``find_model``; the name as a path where nothing is found."""
    try:
        return find_model(model, revision)
    except ActdsError:
        return Path(model)


def repository_of(folder: Path) -> str | None:
    """Return ``org/name`` for a folder of the hub cache, ``None`` for any other."""
    match = _SNAPSHOT.search(folder.as_posix()) or _SNAPSHOT.search(folder.resolve().as_posix())
    return f"{match[1]}/{match[2]}" if match else None


def model_name(model: str | Path, served: str | None = None) -> str:
    """Return what a model is called: no path above the last segment."""
    name = str(model) if served is None or served == str(model) else served
    if (repository := repository_of(Path(name))) is not None:
        return repository
    if _REPOSITORY.fullmatch(name) and not Path(name).exists() and name[0] != ".":
        return name
    return Path(os.path.abspath(name)).name


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


def computed_dtype(config: Mapping[str, Any], default: DType = "bfloat16") -> DType:
    """Return the type that a configuration says the model computes in."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in DTYPES else default


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _renamed(model: Path) -> dict[str, int]:
    """Return sizes that a configuration has under other names (``n_layer``) or leaves out."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except Exception:  # no transformers, a family that it does not know, or a broken file
        return {}
    names = ("num_hidden_layers", "hidden_size", "max_position_embeddings")
    sizes = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in sizes.items() if isinstance(value, int)}


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


N_SAMPLES, SAMPLE_NBYTES = 64, 4096


def weights_sha256(model: Path) -> str | None:
    """Return the SHA-256 over the sorted 'name sha256' lines of the weight files, if any.

    Spec: 0.1 section 6.1.
    """
    paths = sorted(model.glob("*.safetensors")) + sorted(model.glob("*.bin"))
    lines = "".join(f"{path.name} {file_sha256(path)}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest() if paths else None


def weights_sample(model: Path) -> str:
    """Return the SHA-256 of names, sizes and some bytes of the weight files: a hint of others."""
    digest = hashlib.sha256()
    for path in (*sorted(model.glob("*.safetensors")), *sorted(model.glob("*.bin"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for k in range(N_SAMPLES):
                file.seek(size * k // N_SAMPLES)
                digest.update(file.read(SAMPLE_NBYTES))
    return digest.hexdigest()


def missing_weights(model: Path) -> str | None:
    """Return the first weight file that the index names and the folder lacks, if any."""
    try:
        index = json.loads((model / "model.safetensors.index.json").read_bytes())
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no index, or one that no engine could read
    return next((name for name in names if not (model / name).is_file()), None)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
