"""Where transformers' models have what the hook kinds mean: written down by hand, per family.

Paths are relative to the decoder layer; what the writer finds by itself is compared with them. A
kind that has no place here must be refused for that family.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actds_testing.families.models import N_LAYERS, Family

Place = tuple[str, str]
"""Path of a module, and what of it: ``in``, ``out``, ``heads`` or ``gate``."""

STREAM: dict[str, Place] = {"resid_pre": ("", "in"), "resid_post": ("", "out")}


def _attention(path: str, projection: str) -> dict[str, Place]:
    return {
        "attn_out": (path, "out"),
        "z": (f"{path}.{projection}", "in"),
        "q": (path, "heads"),
        "k": (path, "heads"),
        "v": (path, "heads"),
    }


def _mlp(path: str) -> dict[str, Place]:
    return {"mlp_in": (path, "in"), "mlp_out": (path, "out")}


def _mid(path: str) -> dict[str, Place]:
    return {"resid_mid": (path, "in")}


def _post(attention: str, mlp: str) -> dict[str, Place]:
    return {"attn_out_post": (attention, "out"), "mlp_out_post": (mlp, "out")}


def _router(path: str) -> dict[str, Place]:
    return {"router": (path, "gate")}


_PARALLEL = {**STREAM, **_attention("self_attn", "o_proj"), **_mlp("mlp")}
_LLAMA = {**_PARALLEL, **_mid("post_attention_layernorm")}
_MOE = {**_LLAMA, **_router("mlp.gate")}
_GEMMA = {
    **_PARALLEL, **_mid("pre_feedforward_layernorm"),
    **_post("post_attention_layernorm", "post_feedforward_layernorm"),
}  # fmt: skip
_OLMO2 = {
    **_PARALLEL, **_mid("mlp"), **_post("post_attention_layernorm", "post_feedforward_layernorm")
}  # fmt: skip
_NEOX = {**STREAM, **_attention("attention", "dense"), **_mlp("mlp")}
_GPT2 = {**STREAM, **_attention("attn", "c_proj"), **_mlp("mlp"), **_mid("ln_2")}
_GRANITE = {**_LLAMA, **_mlp("block_sparse_moe"), **_router("block_sparse_moe.router")}
_GRANITE_SHARED = {kind: place for kind, place in _GRANITE.items() if kind != "mlp_out"}
_FALCON = {**STREAM, **_attention("self_attention", "dense"), **_mlp("mlp")}

_LFM2 = {**STREAM, **_attention("self_attn", "out_proj"), **_mid("ffn_norm"),
         **_mlp("feed_forward"), **_router("feed_forward.gate")}  # fmt: skip

OF_TYPE: dict[str, dict[str, Place]] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "glm4_moe",
                     "glm4_moe_lite", "exaone_moe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe",
                     "dots1", "solar_open", "mellum", "minimax_m2"), _MOE),
    "hunyuan_v1_moe": {**_MOE, **_router("mlp.gate.wg")},
    "phimoe": {**_MOE, **_router("mlp.router")},
    "gpt_oss": {**_MOE, **_router("mlp.router")},
    "llama4_text": {**_LLAMA, **_mlp("feed_forward"), **_router("feed_forward.router")},
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma4_text"), _GEMMA),
    "gemma3n_text": STREAM,
    "vaultgemma": {**_PARALLEL, **_mid("pre_feedforward_layernorm")},
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _OLMO2),
    "flex_olmo": {**_OLMO2, **_router("mlp.gate")},
    "phi": {**_PARALLEL, **_attention("self_attn", "dense")},
    **dict.fromkeys(("cohere", "cohere2"), _PARALLEL),
    "opt": {**_LLAMA, **_attention("self_attn", "out_proj"), **_mid("final_layer_norm"),
            "mlp_in": ("fc1", "in"), "mlp_out": ("fc2", "out")},
    "granitemoe": _GRANITE,
    **dict.fromkeys(("granitemoeshared", "granitemoehybrid"), _GRANITE_SHARED),
    "glm4": {**_LLAMA, **_post("post_self_attn_layernorm", "post_mlp_layernorm")},
    "afmoe": {**_PARALLEL, **_mid("pre_mlp_layernorm"), **_router("mlp.router.gate"),
              **_post("post_attention_layernorm", "post_mlp_layernorm")},
    "hyperclovax": {**_LLAMA, **_post("post_norm1", "post_norm2")},
    "apertus": {**_PARALLEL, **_mid("feedforward_layernorm")},
    "nemotron_h": {**STREAM, **_attention("mixer", "o_proj"), **_mlp("mixer"),
                   **_router("mixer.gate")},
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "gptj": {**STREAM, **_attention("attn", "out_proj"), **_mlp("mlp")},
    # Queries, keys and values never leave transformers' module, so that nothing can confirm them.
    "bloom": {**STREAM, **_attention("self_attention", "dense"), **_mid("post_attention_layernorm"),
              "attn_out": ("self_attention.dense", "out"), "mlp_in": ("mlp", "in"),
              "mlp_out": ("mlp.dense_4h_to_h", "out")},
    "falcon": _FALCON,
    "persimmon": {**_LLAMA, **_attention("self_attn", "dense")},
    "falcon_h1": {**_PARALLEL, **_mlp("feed_forward"), **_mid("pre_ff_layernorm")},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "zamba2"), STREAM),
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Place]] = {
    "GPT-NeoX, parallel residual": _NEOX,
    "GPT-NeoX, serial residual": {**_NEOX, **_mid("post_attention_layernorm")},
    "StableLM, parallel residual": _PARALLEL,
    "Granite 4, attention only": {**_LLAMA, **_mlp("shared_mlp")},
}
KINDS = (
    "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "attn_out_post", "z", "q", "k",
    "v", "mlp_in", "mlp_out", "mlp_out_post", "router", "final",
)  # fmt: skip
COMPARED = (0, N_LAYERS // 2, N_LAYERS - 1)
"""Layers whose rows the page has."""


def compared(*, whole: bool) -> tuple[str, ...]:
    """Return the hooks that are compared; kinds beside the stream at one layer if not whole."""
    of_kind = {
        **({} if whole else dict.fromkeys(KINDS, COMPARED[1:2])),
        "resid_post": COMPARED, "embed": COMPARED[:1], "final": COMPARED[-1:],
    }  # fmt: skip
    return tuple(f"{kind}.{layer}" for kind in KINDS for layer in of_kind.get(kind, COMPARED))


def layout(family: Family) -> dict[str, Place]:
    """Return the places of a family within a decoder layer, by kind."""
    return OF_FAMILY.get(family.name) or OF_TYPE.get(family.model_type, _LLAMA)


def hooks_of(layers: list[Any], family: Family) -> list[str]:
    """Return the names of the hooks that a family has, by the modules of its decoder layers."""
    found = ["embed.0", f"final.{len(layers) - 1}"]
    for number, layer in enumerate(layers):
        paths = {path for path, _ in layer.named_modules()}
        for kind, (path, what) in layout(family).items():
            # What attends has an output projection; a mixer of another type has none.
            attends = layout(family)["z"][0] if what == "heads" or kind == "attn_out" else path
            if {path, attends} <= paths:
                found.append(f"{kind}.{number}")
    return found


def stack_of(model: Any, n_layers: int) -> Any:
    """Return the list of decoder layers of a model of transformers."""
    (stack,) = (
        module
        for path, module in model.named_modules()
        if re.fullmatch(r"(?:.*\.)?(?:layers|h|blocks)", path) and len(module) == n_layers
    )
    return stack


@contextlib.contextmanager
def watched(
    model: Any, stack: Any, family: Family, take: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    """Hand over ``(n, d_model)`` of every hook by name, in plain forwards of one sequence."""
    handles = []

    def keep(name: str, rows: torch.Tensor) -> None:
        take(name, rows.detach().clone())  # Falcon adds to outputs in place

    def pre(module: Any, give: Callable[[Any, Any], None]) -> None:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            give(args, kwargs)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for number, layer in enumerate(stack):
        heads: dict[int, str] = {}
        for kind, (path, what) in layout(family).items():
            try:
                module = layer.get_submodule(path)
            except AttributeError:
                continue  # a layer of another type, or without experts
            name = f"{kind}.{number}"
            if what == "out":
                handles.append(module.register_forward_hook(
                    lambda _m, _i, output, name=name: keep(
                        name, output[0] if isinstance(output, tuple) else output)))  # fmt: skip
            elif what == "in":
                pre(module, lambda args, kwargs, name=name: keep(name, _hidden(args, kwargs)))
            elif what == "gate":
                pre(module, lambda args, kwargs, name=name, gate=module: keep(
                    name, _linear(_hidden(args, kwargs), gate)))  # fmt: skip
            else:
                heads["qkv".index(kind)] = name
                _SPIES[id(module)] = (heads, keep)
    # What holds the layers returns what the unembedding reads; some scale it in between.
    whole = next(m for m in model.modules() if any(child is stack for child in m.children()))
    handles.append(whole.register_forward_hook(
        lambda _m, _i, output: keep(f"final.{len(stack) - 1}", output[0])))  # fmt: skip
    table = model.get_input_embeddings().weight
    pre(model, lambda args, _kwargs: keep("embed.0", table[args[0][0]]))
    _spy()
    try:
        yield
    finally:
        _SPIES.clear()
        for handle in handles:
            handle.remove()


_SPIES: dict[int, Any] = {}


def _spy() -> None:
    """See what eager attention is given: query, key and value ``(1, heads, n, head_dim)``."""
    from transformers.modeling_utils import AttentionInterface

    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        names, keep = _SPIES.get(id(module), ({}, None))
        for number, name in names.items():
            keep(name, args[number].transpose(1, 2).flatten(2))
        return vars(sys.modules[type(module).__module__])["eager_attention_forward"](
            module, *args, **kwargs
        )

    AttentionInterface.register("eager", attend)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _linear(rows: torch.Tensor, gate: Any) -> torch.Tensor:
    return torch.nn.functional.linear(
        rows.to(gate.weight.dtype), gate.weight, getattr(gate, "bias", None)
    )
