"""The scheme of a layer's attention: what stands between stored queries, keys and values and ``z``.

Rows of ``q`` and ``k`` are what the attention is given, after its norms and rotation. What is left
is read off the model's folder: heads, scale, reach, cap of the scores, bias by distance, sinks. It
is a guess until the stored ``z`` proves it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from actds.errors import ActdsError
from actds.exchange.containers import read_header
from actds.explore.dataset import Dataset
from actds_validators.arrays import Floats, Ints, Rows
from actds_validators.sections import recorded
from actds_writers.capture.hooks import n_heads_of
from actds_writers.model_folder import file_sha256, find_model, model_config, weights_sha256

BLOCK_NBYTES = 1 << 25  # of scores, float32, that are held together
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

    def _by_step(self, products: Rows, m: int) -> Rows:
        """Return products by head of keys as ``(m, n_heads, n)``."""
        apart = products.reshape(self.n_kv_heads, m, -1, products.shape[-1])
        return apart.transpose(1, 0, 2, 3).reshape(m, self.n_heads, -1)


class Model:
    """The folder of the model that a dataset was made with.

    Args:
        folder: or ``org/name`` of the local hub cache; None takes the name in the run record.

    Raises:
        ActdsError: E005 no such folder; E014 another model than that of the dataset.
    """

    def __init__(self, dataset: Dataset, folder: str | Path | None) -> None:
        self._dataset = dataset
        names = recorded(dataset.catalog, "model.name")
        if folder is None and len(names) != 1:
            got = f"{len(names)} models in the run records"
            raise ActdsError("E014", "model", got=got, expected="model, the folder of one")
        try:
            self.folder = find_model(names[0] if folder is None else folder)
            self.config = _full(model_config(self.folder), self.folder)
        except ActdsError as error:
            if folder is not None:
                raise
            raise ActdsError(
                "E005",
                error.place,
                got=error.got,
                expected="the folder of the model, for the scale and the reach of its attention",
                next_step="Name it: model=FOLDER, or org/name of the local hub cache.",
            ) from None
        self.is_checked = self._check("config", file_sha256(self.folder / "config.json"))

    def _check(self, what: str, sha256: str | None) -> bool:
        """Return whether the dataset says which it is; E014 where it is another."""
        digests = recorded(self._dataset.catalog, f"model.{what}_sha256")
        if digests and digests != (sha256,):
            raise ActdsError(
                "E014",
                f"model {self.folder}",
                got=f"another {what} than that of the rows ({(sha256 or 'none')[:16]})",
                expected=f"{', '.join(digest[:16] for digest in digests)}, by the run record",
            )
        return bool(digests)

    def scheme(self, layer: int) -> Scheme:
        """Return how a layer attends; E014 where its hooks' widths do not fit the heads."""
        config, hooks = self.config, self._dataset.hooks
        n_heads = n_heads_of(config)
        q, k = (hooks[f"{kind}.{layer}"].d_model for kind in "qk")
        head_dim = q // n_heads
        n_kv_heads = k // head_dim if head_dim else 0
        if q != n_heads * head_dim or not n_kv_heads or n_heads % n_kv_heads or k % head_dim:
            got = f"q of {q:,} and k of {k:,} channels"
            expected = f"those of {n_heads} heads, as {self.folder} has"
            raise ActdsError("E014", f"layer {layer}", got=got, expected=expected)
        kind = (config.get("layer_types") or {layer: ""})[layer]
        is_windowed = kind == "sliding_attention" or (
            not kind and config.get("use_sliding_window") is not False
        )
        chunk = config.get("attention_chunk_size") if kind == "chunked_attention" else None
        scale = _scale(config, head_dim, layer)
        return Scheme(
            n_heads,
            head_dim,
            n_kv_heads,
            scale,
            window=config.get("sliding_window") if is_windowed else None,
            chunk=chunk,
            cap=config.get("attn_logit_softcapping"),
            slopes=_slopes(config, n_heads, scale),
            sinks=self._sinks(layer, n_heads),
        )

    @cached_property
    def _weights_sha256(self) -> str | None:
        return weights_sha256(self.folder)

    def _sinks(self, layer: int, n_heads: int) -> Rows | None:
        pattern = re.compile(_SINKS.replace("{layer}", str(layer)))
        for path in sorted(self.folder.glob("*.safetensors")):
            for name, tensor in read_header(path)[0].items():
                if pattern.search(name) and tensor.shape == (n_heads,):
                    self._check("weights", self._weights_sha256)
                    values = tensor.map()
                    is_bfloat16 = values.dtype == np.uint16
                    return (values.view(ml_dtypes.bfloat16) if is_bfloat16 else values).astype("f4")
        return None


def _full(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration with what it leaves to its family, where transformers knows it."""
    try:
        from transformers import AutoConfig

        known = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        return {**config, **known.to_dict()}
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
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
    steps: Floats = np.arange(1, n + 1) * (inner.get("alibi_bias_max", 8) / n)
    if n != n_heads:
        steps = np.concatenate([steps[1::2], steps[::2]])[:n_heads]
    # Falcon scales the sum of score and bias, the others the score alone.
    return (2.0**-steps * (scale if family == "falcon" else 1)).astype(np.float32)
