"""Facts of a model folder: name, configuration, end-of-sequence ids, digests, and its weights.

Weights are counted, not guessed: shapes are read from safetensors, and what they do from their
names. A model of which that is not known is refused.

A model that is named by its repository is the folder in the local cache of the Hugging Face hub.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no transformers, a family that it does not know, or a broken file
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


MAX_HEADER_NBYTES = 100 << 20
"""As the format allows."""
_WORDS = re.compile(r"(embed_tokens|word_embeddings|wte|tok_embeddings|embed_in)\.weight")
_POSITIONS = re.compile(r"(wpe|embed_positions|position_embeddings)\.weight")
_HEAD = re.compile(r"(lm_head|embed_out|output)\.weight")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")
_N_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8}


class Tensor(NamedTuple):
    """A tensor of a file's header; ``dtype`` as safetensors writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.n * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class Weights:
    """The weights of a decoder model.

    Args:
        n_params: numbers in all files, without layers that only draft.
        n_multiplied: numbers that every token is multiplied with, without experts.
        n_experts: experts of a layer, 0 for a dense model.
        top_k: experts of a layer that a token passes.
    """

    n_params: int
    n_multiplied: int
    n_routed: int
    nbytes: int
    routed_nbytes: int
    n_experts: int = 0
    top_k: int = 0

    @property
    def n_active(self) -> float:
        return self.n_multiplied + self._share(1) * self.n_routed

    def step_nbytes(self, batch: int) -> float:
        """Return the bytes that a decode step reads, as if tokens chose their experts at random."""
        return self.nbytes + self._share(batch) * self.routed_nbytes

    def _share(self, n_tokens: int) -> float:
        return 1 - (1 - self.top_k / self.n_experts) ** n_tokens if self.n_experts else 0.0


def read_weights(model: Path) -> Weights:
    """Return the weights of a model folder.

    Raises:
        ActdsError: E005 no model folder; E009 weights whose count is not known: no safetensors or
            broken ones, quantized, of a multimodal model, or experts that the configuration does
            not describe.
    """
    config = model_config(model)
    if "text_config" in json.loads(read_bounded(model / "config.json")):
        raise _unknown(model, "a multimodal model: of its weights, a token passes some")
    if config.get("quantization_config"):
        raise _unknown(model, "quantized weights, whose files hold packed numbers")
    n_layers = int(config["num_hidden_layers"])
    tensors = [
        tensor
        for tensor in _tensors(model)
        if (layer := _LAYER.search(tensor.name)) is None or int(layer[1]) < n_layers
    ]
    if not tensors:
        raise _unknown(model, "no *.safetensors")
    odd = sorted({tensor.dtype for tensor in tensors if len(tensor.shape) > 1} - set(_BITS))
    if odd:
        raise _unknown(model, f"weights of {', '.join(odd)}")
    tensors = [tensor for tensor in tensors if tensor.dtype in _BITS]
    routed = [tensor for tensor in tensors if _EXPERT.search(tensor.name)]
    n_experts, top_k = _experts(model, config, routed)
    shared = [tensor for tensor in tensors if not _EXPERT.search(tensor.name)]
    has_head = any(_HEAD.search(tensor.name) for tensor in shared)
    passed = [tensor for tensor in shared if not _is_looked_up(tensor.name, has_head=has_head)]
    return Weights(
        n_params=sum(tensor.n for tensor in tensors),
        n_multiplied=sum(map(_multiplied, passed)),
        n_routed=sum(map(_multiplied, routed)),
        nbytes=sum(tensor.nbytes for tensor in passed),
        routed_nbytes=sum(tensor.nbytes for tensor in routed),
        n_experts=n_experts,
        top_k=top_k,
    )


def _is_looked_up(name: str, *, has_head: bool) -> bool:
    """Return whether a token reads one row of a tensor; tied embeddings are the head as well."""
    return bool(_POSITIONS.search(name) or (has_head and _WORDS.search(name)))


def _multiplied(tensor: Tensor) -> int:
    is_matrix = len(tensor.shape) > 1 and not tensor.name.endswith("bias")
    return tensor.n if is_matrix else 0


def _experts(model: Path, config: Mapping[str, Any], routed: list[Tensor]) -> tuple[int, int]:
    """Return how many experts a layer has and a token passes, 0 for a dense model."""
    if not routed:
        return 0, 0
    n_experts, top_k = (
        next((config[name] for name in names if isinstance(config.get(name), int)), 0)
        for names in (_N_EXPERTS, _TOP_K)
    )
    numbers = [_EXPERT.search(tensor.name) for tensor in routed]
    stored = max(
        int(number[1]) + 1 if number is not None and number[1] else tensor.shape[0]
        for number, tensor in zip(numbers, routed, strict=True)
    )
    if not 0 < top_k <= n_experts or stored != n_experts:
        got = f"{stored} experts in the files, {top_k} of {n_experts} in config.json"
        raise _unknown(model, got)
    return n_experts, top_k


def _tensors(model: Path) -> Iterator[Tensor]:
    for path in sorted(model.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                nbytes = int.from_bytes(file.read(8), "little")
                if not 0 < nbytes <= MAX_HEADER_NBYTES:
                    raise ValueError(f"a header of {nbytes} bytes")
                header = json.loads(file.read(nbytes))
            for name, value in header.items():
                if name != "__metadata__":
                    yield Tensor(name, str(value["dtype"]), tuple(map(int, value["shape"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unknown(path, f"no header of safetensors: {error}"[:200]) from None


def _unknown(place: Path, got: str) -> ActdsError:
    return ActdsError(
        "E009", f"model {place}", got=got, expected="safetensors whose weights can be counted"
    )


@dataclass(frozen=True)
class Attention:
    """Attention of a generated token over the positions before it.

    Args:
        flops: operations of queries with keys and of weights with values, all layers.
        kv_nbytes: bytes of keys and values that are read for it.
        unknown: why both are not known, and then 0; ``None`` where they are.
    """

    flops: float
    kv_nbytes: float
    unknown: str | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], context: int, itemsize: int) -> Attention:
        heads = config.get("num_attention_heads")
        odd = [name for name in config if name.startswith(("mamba", "ssm_", "kv_lora", "linear_"))]
        if not isinstance(heads, int) or odd:
            return cls(0.0, 0.0, f"config.json has {odd[0] if odd else 'no num_attention_heads'}")
        n_layers = int(config["num_hidden_layers"])
        kinds = config.get("layer_types") or ["full_attention"] * n_layers
        window = config.get("sliding_window")
        if config.get("use_sliding_window") is False or not isinstance(window, int):
            window = None
        if window is not None and "layer_types" not in config and window < context:
            return cls(0.0, 0.0, "a sliding window, and no layer_types")
        if set(kinds) - {"full_attention", "sliding_attention"}:
            return cls(0.0, 0.0, f"layers of {', '.join(sorted(set(kinds)))}")
        width = config.get("head_dim") or int(config["hidden_size"]) // heads
        kv_heads = config.get("num_key_value_heads") or heads
        positions = sum(
            min(context, window) if kind == "sliding_attention" and window else context
            for kind in kinds
        )
        return cls(4.0 * heads * width * positions, 2.0 * kv_heads * width * positions * itemsize)
