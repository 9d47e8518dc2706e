"""The weights of a model folder and the attention of a token: counted, not guessed.

Shapes are read from safetensors, and what they do from their names. A model of which that is not
known is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from actds.errors import ActdsError
from actds.format.canonical import read_bounded
from actds_writers.model_folder import model_config

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
