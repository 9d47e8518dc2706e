"""Datasets of q, k, v and z of tiny models of transformers, and what their eager attention says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from actds.explore.dataset import Dataset
from actds_studies.attention.rows import Request
from actds_testing import synthetic, tiny
from actds_testing.families.layouts import stack_of, watched
from actds_testing.families.models import FAMILIES, Family, make
from actds_testing.schedules import Schedule, simulate
from actds_writers.model_folder import file_sha256, weights_sha256

_BY_NAME = {family.name: family for family in FAMILIES}


def _with(name: str, **options: Any) -> Family:
    return replace(_BY_NAME[name], options=_BY_NAME[name].options | options)


ATTENDING = {
    "grouped heads": _BY_NAME["Llama"],
    "sliding window": _with("Mistral, sliding window", sliding_window=9),
    "soft cap, window in half of the layers, scale": _with(
        "Gemma 2", sliding_window=9, attn_logit_softcapping=2.0, query_pre_attn_scalar=50
    ),
    "norms of queries and keys": _BY_NAME["Qwen3"],
    "learned sinks": _with("GPT-OSS", sliding_window=9),
    "multiplier": _BY_NAME["Granite"],
    "alibi": _BY_NAME["Bloom"],
    "alibi, 6 heads": _with("MPT", d_model=96, n_heads=6),
    "blocks": _with("Llama 4", attention_chunk_size=8, num_hidden_layers=4),
    "scale by layer": _with("GPT-2", scale_attn_by_inverse_layer_idx=True),
}
"""Families by what their attention has."""


def requests_of(dataset: Dataset) -> list[Request]:
    """Return the requests of a dataset of one run that have decode steps."""
    (run,) = dataset.catalog.run_ids
    return [
        Request(run, line["request"], 0, n, n + line["generated_len"] - 1)
        for line in dataset.requests().to_pylist()
        if (n := line["prompt_len"]) and line["generated_len"] > 1
    ]


class Attending:
    """A model, the rows of a schedule, and its attention.

    Args:
        folder: for the model.
        layers: whose rows are kept.

    Attributes:
        rows: by hook and request ``(n, width)``.
        attention: by layer and request ``(n_heads, n, n)``.
    """

    def __init__(
        self, family: Family, folder: Path, layers: Sequence[int] = (0, 1), n_requests: int = 6
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.folder, self.layers = make(family, folder), layers
        plan = simulate(n_requests, 3, longest=40)
        self.token_ids = [[t % tiny.VOCAB_SIZE for t in ids] for ids in plan.token_ids]
        self.schedule: Schedule = plan
        self.rows: dict[str, list[np.ndarray]] = {}
        self.attention: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        stack = stack_of(model, len(model.config.get_text_config().layer_types)
                         if hasattr(model.config, "layer_types") else 4)  # fmt: skip
        for ids in self.token_ids:
            seen: dict[str, np.ndarray] = {}

            def keep(hook: str, rows: torch.Tensor, seen: dict[str, np.ndarray] = seen) -> None:
                seen[hook] = rows.detach().reshape(-1, rows.shape[-1]).numpy()

            with torch.no_grad(), watched(model, stack, family, keep), _fused(stack, keep):
                out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
            for layer in layers:
                self.attention[layer].append(out.attentions[layer][0].numpy())
                for kind in "qkvz":
                    self.rows.setdefault(f"{kind}.{layer}", []).append(seen[f"{kind}.{layer}"])

    def write(
        self,
        path: Path,
        kinds: str = "qkvz",
        facts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Path:
        """Write a dataset of the rows; options are those of ``make_dataset``."""
        hooks = [f"{kind}.{layer}" for kind in kinds for layer in self.layers]
        known = {
            "model.config_sha256": file_sha256(self.folder / "config.json"),
            "model.weights_sha256": weights_sha256(self.folder),
        }

        def states(tokens: Any, token_ids: Any, hook: Any) -> Any:
            pairs = zip(tokens["request"], tokens["position"], strict=True)
            rows = np.stack([self.rows[hook.name][r][p] for r, p in pairs])
            is_bfloat16 = hook.dtype == "bfloat16"
            values = rows.astype(ml_dtypes.bfloat16 if is_bfloat16 else np.float32)
            return values.view(np.uint16 if is_bfloat16 else np.uint32)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(synthetic, "states", states)
            plain = {"schedule": self.schedule, "dtype": "float32", "entropy": True, "roles": True}
            return synthetic.make_dataset(
                path,
                hooks=hooks,
                d_model={hook: self.rows[hook][0].shape[1] for hook in hooks},
                facts=known | dict(facts or {}),
                **plain | options,
            )


@contextmanager
def _fused(stack: Any, keep: Any) -> Iterator[None]:
    """Hand over q, k, v and z of attentions that split one projection themselves."""
    handles = []
    for number, layer in enumerate(stack):
        bloom, mpt = getattr(layer, "self_attention", None), getattr(layer, "attn", None)
        fused = getattr(bloom, "query_key_value", None) or getattr(mpt, "Wqkv", None)
        if fused is None:
            continue

        def split(_m: Any, _i: Any, out: Any, number: int = number, bloom: Any = bloom) -> None:
            if bloom is not None:
                out = out.unflatten(-1, (bloom.num_heads, 3, -1)).transpose(-3, -2).flatten(-2)
            else:
                out = out.unflatten(-1, (3, -1))
            for kind, rows in zip("qkv", out.unbind(-2), strict=True):
                keep(f"{kind}.{number}", rows)

        last = bloom.dense if bloom is not None else mpt.out_proj
        handles.append(fused.register_forward_hook(split))
        handles.append(
            last.register_forward_pre_hook(lambda _m, args, n=number: keep(f"z.{n}", args[0]))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
