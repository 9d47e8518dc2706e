"""The scheme of a layer's attention: what stands between queries, keys and values and ``z``.

Rows of ``q`` and ``k`` are what the attention is given, after its norms and rotation. What is left
is read off the model's folder: heads, scale, reach, cap of the scores, bias by distance, sinks. It
is a guess until ``z`` proves it. NumPy alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from actds.exchange.containers import read_header
from actds.format.telemetry import N_TOP
from actds_writers.capture.hooks import n_heads_of

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
BLOCK_NBYTES = 1 << 25  # of scores, float32, that are held together
LIMITS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""How far what a head gives out may be from its stored ``z``, over the sum of shares times lengths
of values, by the type of the rows: kernels round shares and sums to it. The mean may be a quarter
of it. On SmolLM2 in bfloat16: 0.003 at most, 0.0009 in the mean; at a scale 2 % off 0.026 and 0.01.
"""
_UNSCALED = ("gemma3n", "gemma4")
_SINKS = r"\.{layer}\.(?:self_attn|attn|attention)\.(?:sinks|attention_sink_bias)$"


@dataclass(frozen=True)
class Scheme:
    """``softmax(cap(scale q·k) - slope (distance)) v`` over the keys in reach, per head.

    Args:
        head_dim: channels of a head of queries and keys.
        n_kv_heads: heads of keys; each serves as many heads of queries, one after the other.
        window: keys in reach at most, the token's own among them; None for all before it.
        chunk: tokens of a block; only keys of the token's own are in reach. None without.
        cap: scores are ``cap tanh(score / cap)``.
        slopes: what a key at a distance of 1 has less, per head; None without.
        sinks: a score per head that takes a share of the attention and has no value.
    """

    n_heads: int
    head_dim: int
    n_kv_heads: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    slopes: Rows | None = None
    sinks: Rows | None = None

    @classmethod
    def of(
        cls, config: Mapping[str, Any], layer: int, q: int, k: int, sinks: Rows | None = None
    ) -> Scheme:
        """Return how a layer attends, by the model's configuration.

        Args:
            config: of ``full_config``.
            q, k: channels of the rows of queries and keys.

        Raises:
            ValueError: they do not fit the heads.
        """
        n_heads = n_heads_of(config)
        head_dim = q // n_heads
        n_kv_heads = k // head_dim if head_dim else 0
        if q != n_heads * head_dim or not n_kv_heads or n_heads % n_kv_heads or k % head_dim:
            raise ValueError(f"q of {q:,} and k of {k:,} channels")
        kind = (config.get("layer_types") or {layer: ""})[layer]
        is_windowed = kind == "sliding_attention" or (
            not kind and config.get("use_sliding_window") is not False
        )
        chunk = config.get("attention_chunk_size") if kind == "chunked_attention" else None
        scale = _scale(config, head_dim, layer)
        return cls(
            n_heads,
            head_dim,
            n_kv_heads,
            scale,
            window=config.get("sliding_window") if is_windowed else None,
            chunk=chunk,
            cap=config.get("attn_logit_softcapping"),
            slopes=_slopes(config, n_heads, scale),
            sinks=sinks,
        )

    @property
    def words(self) -> str:
        words = [f"{self.n_heads} heads of {self.head_dim} channels"]
        words += [f"{self.n_kv_heads} of keys"] if self.n_kv_heads < self.n_heads else []
        words.append(f"scale {self.scale:.4g}")
        words += [f"window of {self.window:,}"] if self.window else []
        words += [f"blocks of {self.chunk:,}"] if self.chunk else []
        words += [f"scores capped at {self.cap:g}"] if self.cap else []
        words += ["bias by distance (ALiBi)"] if self.slopes is not None else []
        words += ["learned sinks"] if self.sinks is not None else []
        return ", ".join(words)

    def first(self, position: Ints) -> Ints:
        """Return the first key in reach of each position ``(n,)``."""
        start = np.zeros_like(position)
        if self.window:
            start = np.maximum(start, position - self.window + 1)
        return np.maximum(start, position // self.chunk * self.chunk) if self.chunk else start

    def attend(self, q: Rows, k: Rows, position: Ints) -> Iterator[tuple[slice, int, Rows]]:
        """Yield the attention of queries over the keys of their request, a block at a time.

        Args:
            q: ``(n, n_heads * head_dim)``.
            k: rows of positions 0 to the last at least ``(n_keys, n_kv_heads * head_dim)``.
            position: of each query, ascending ``(n,)``.

        Yields:
            Which queries, the position of the first key, and shares ``(m, n_heads, n)`` of these
            and the following keys: 0 where one is out of reach. They make 1, less with sinks.
        """
        start = self.first(position)
        at = 0
        while at < len(position):
            n_scores = BLOCK_NBYTES // (4 * self.n_heads)
            # So many steps, each with the keys of those before it in the block.
            m = int(n_scores / (position[at] - start[at] + math.sqrt(n_scores)))
            some = slice(at, min(at + max(m, 1), len(position)))
            low, high = int(start[at]), int(position[some][-1]) + 1
            yield some, low, self._shares(q[some], k[low:high], position[some], low)
            at = some.stop

    def _shares(self, q: Rows, k: Rows, position: Ints, low: int) -> Rows:
        m, n_keys, group = len(q), len(k), self.n_heads // self.n_kv_heads
        queries = q.reshape(m, self.n_kv_heads, group, self.head_dim).transpose(1, 0, 2, 3)
        keys = k.reshape(n_keys, self.n_kv_heads, self.head_dim).transpose(1, 2, 0)
        products = queries.reshape(self.n_kv_heads, m * group, self.head_dim) @ keys
        scores: Rows = self._by_step(products, m) * np.float32(self.scale)
        if self.cap:
            scores = np.float32(self.cap) * np.tanh(scores / np.float32(self.cap))
        distance = position[:, np.newaxis] - np.arange(low, low + n_keys)
        if self.slopes is not None:
            scores -= self.slopes[:, np.newaxis] * distance[:, np.newaxis].astype(np.float32)
        out = (distance < 0) | (distance > (position - self.first(position))[:, np.newaxis])
        scores = np.where(out[:, np.newaxis], np.float32(-np.inf), scores)
        top = scores.max(axis=2, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[:, np.newaxis])
        odds = np.exp(scores - top)
        total = odds.sum(axis=2, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[:, np.newaxis] - top)
        return np.asarray(odds / total, np.float32)

    def outputs(self, shares: Rows, v: Rows) -> tuple[Rows, Rows]:
        """Return what heads give out ``(m, n_heads, n)``, and the most that it can measure.

        Args:
            v: of the keys of the shares ``(n_keys, n_kv_heads * n)``.

        Returns:
            Sums of shares times values, and of shares times their lengths ``(m, n_heads)``.
        """
        m, _, n_keys = shares.shape
        values = v.reshape(n_keys, self.n_kv_heads, -1).transpose(1, 0, 2)
        lengths = np.linalg.norm(values, axis=2, keepdims=True)
        of_group: Rows = shares.reshape(m, self.n_kv_heads, -1, n_keys).transpose(1, 0, 2, 3)
        of_group = of_group.reshape(self.n_kv_heads, -1, n_keys)
        out, most = (self._by_step(of_group @ what, m) for what in (values, lengths))
        return out, most[..., 0]

    def distance(self, shares: Rows, v: Rows, z: Rows) -> Rows:
        """Return how far each head's output is from the stored one, over the most it can measure.

        Args:
            v: of the keys of the shares ``(n_keys, n_kv_heads * n)``.
            z: what the heads gave out ``(m, n_heads * n)``.
        """
        out, most = self.outputs(shares, v)
        apart = np.linalg.norm(out - z.reshape(out.shape), axis=2)
        return np.asarray(apart / np.maximum(most, 1e-30), np.float32)

    def bits(self, shares: Rows) -> tuple[Rows, Rows]:
        """Return the entropy of an attention in bits, and the share of sinks ``(m, n_heads)``.

        A sink is an outcome as every key is.
        """
        bits = -(shares * np.log2(np.maximum(shares, 1e-30))).sum(axis=2)
        if self.sinks is None:
            return np.maximum(bits, 0), np.zeros_like(bits)
        rest = np.clip(1 - shares.sum(axis=2), 1e-30, 1)
        return np.maximum(bits - rest * np.log2(rest), 0), rest

    def _by_step(self, products: Rows, m: int) -> Rows:
        """Return products by head of keys as ``(m, n_heads, n)``."""
        apart = products.reshape(self.n_kv_heads, m, -1, products.shape[-1])
        return apart.transpose(1, 0, 2, 3).reshape(m, self.n_heads, -1)


def largest(shares: Rows, low: int) -> Ints:
    """Return the positions of the keys with the largest shares ``(m, n_heads, N_TOP)``, -1 none."""
    n = min(N_TOP, shares.shape[2])
    at = np.argpartition(shares, -n, axis=2)[..., -n:]
    top = np.full((*shares.shape[:2], N_TOP), -1, np.int64)
    top[..., :n] = np.where(np.take_along_axis(shares, at, axis=2) > 0, at + low, -1)
    return top


def sinks_of(folder: Path, layer: int, n_heads: int) -> Rows | None:
    """Return the learned sinks of a layer from a model's weights, ``None`` without."""
    pattern = re.compile(_SINKS.replace("{layer}", str(layer)))
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_header(path)[0].items():
            if pattern.search(name) and tensor.shape == (n_heads,):
                values = tensor.map()
                is_bfloat16 = values.dtype == np.uint16
                return (values.view(ml_dtypes.bfloat16) if is_bfloat16 else values).astype("f4")
    return None


def full_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with what it leaves to its family, where transformers knows it."""
    try:
        from transformers import AutoConfig

        known = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return {**config, **known.to_dict()}
    except Exception:  # no transformers, a family that it does not know, or a broken file
        return dict(config)


def _scale(config: Mapping[str, Any], head_dim: int, layer: int) -> float:
    """Return what products of a query and a key are multiplied by."""
    inner = config.get("attn_config") or {}
    for scale in (config.get("attention_multiplier"), inner.get("softmax_scale")):
        if scale:
            return float(scale)
    if config.get("query_pre_attn_scalar"):
        return 1 / math.sqrt(float(config["query_pre_attn_scalar"]))
    unscaled = str(config.get("model_type", "")).startswith(_UNSCALED)
    unscaled = unscaled or config.get("scale_attn_weights") is False
    by_layer = layer + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1
    return (1.0 if unscaled else 1 / math.sqrt(head_dim)) / by_layer


def _slopes(config: Mapping[str, Any], n_heads: int, scale: float) -> Rows | None:
    """Return the slopes of ALiBi (Press, Smith & Lewis 2022); None of a model without."""
    inner, family = config.get("attn_config") or {}, config.get("model_type")
    ways = (config.get("alibi"), inner.get("alibi"), family == "bloom")
    if not any(ways) and config.get("position_embedding_type") != "alibi":
        return None
    n = 2 ** math.ceil(math.log2(n_heads))
    steps: npt.NDArray[np.float64] = np.arange(1, n + 1) * (inner.get("alibi_bias_max", 8) / n)
    if n != n_heads:
        steps = np.concatenate([steps[1::2], steps[::2]])[:n_heads]
    # Falcon scales the sum of score and bias, the others the score alone.
    return (2.0**-steps * (scale if family == "falcon" else 1)).astype(np.float32)
