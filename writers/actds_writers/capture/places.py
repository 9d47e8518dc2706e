"""Where a loaded model has its parts: found by the names that families give their modules.

The same names serve models of vLLM and of ``transformers``, whose trees differ below. Nothing here
proves that a module is what its name says; the check of the hooks does, with rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from actds_writers.capture import taps

if TYPE_CHECKING:
    import torch

ATTENTION = ("self_attn", "self_attention", "attn", "attention", "mixer")
QUERIES = (
    "q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv", "query", "q_b_proj",
    "fused_qkv_a_proj", "attn_qkvw",
)  # fmt: skip
"""Projections of an attention; what has none of them mixes tokens in another way."""
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj")
FEED_FORWARD = (
    "mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "feedforward", "shared_mlp", "mixer",
)  # fmt: skip
UP = ("up_proj", "gate_up_proj", "fc1", "c_fc", "fc_in", "dense_h_to_4h", "experts", "w13", "w1",
      "gate_proj", "gate", "input_linear")  # fmt: skip
DOWN = ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2")
GATE = ("gate", "router")
EMBEDDING = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings",
             "embedding")  # fmt: skip
FINAL_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm",
              "final_norm")  # fmt: skip
BEFORE_MLP = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm",
              "feedforward_layernorm", "ln_2", "ln_mlp", "norm_2")  # fmt: skip
"""Norms before the feed-forward block whose names say so."""
AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")
AFTER_ATTENTION = ("post_self_attn_layernorm", "post_norm1")
EITHER = "post_attention_layernorm"
"""The norm before the feed-forward block where it is the only one between the two, and the norm of
the attention's output elsewhere."""
PARALLEL = ("use_parallel_residual", "parallel_attn")


def child(parent: Any, names: tuple[str, ...]) -> Any:
    """Return the first child module of a name, ``None`` when there is none of them."""
    return next((found for found in children(parent, names)), None)


def children(parent: Any, names: tuple[str, ...]) -> Iterator[torch.nn.Module]:
    """Return the child modules of the names, without those of another pipeline stage."""
    own = dict(parent.named_children())
    for name in names:
        found = own.get(name)
        if found is not None and not type(found).__name__.startswith("PPMissing"):
            yield found


def attention(layer: torch.nn.Module) -> Any:
    """Return the attention of a layer, ``None`` where tokens are mixed in another way."""
    for found in children(layer, ATTENTION):
        for one in (found, child(found, ("attention", "self"))):
            if one is not None and child(one, QUERIES) is not None:
                return one
    return None


def output_projection(layer: torch.nn.Module) -> Any:
    """Return the output projection of a layer's attention, or ``None``."""
    found = attention(layer)
    return None if found is None else child(found, OUTPUT)


def feed_forward(layer: torch.nn.Module) -> tuple[Any, Any]:
    """Return what reads the input of a layer's MLP or experts, and what returns the output.

    As a rule one module; ``(None, None)`` where there is none, ``(reader, None)`` where several
    blocks add up.
    """
    attends = attention(layer)
    blocks = [
        found
        for found in children(layer, FEED_FORWARD)
        if found is not attends and child(found, UP) is not None
    ]
    if not blocks:  # OPT: both projections are the layer's own
        return child(layer, ("fc1",)), child(layer, ("fc2",))
    block = blocks[0]
    if len(blocks) > 1:
        return block, None
    # In transformers' Bloom the block itself adds the stream.
    adds = "residual" in inspect.signature(type(block).forward).parameters
    return block, child(block, DOWN) if adds else block


def router(layer: torch.nn.Module) -> Any:
    """Return the gate that gives the logits of a layer's experts, or ``None``."""
    block, _ = feed_forward(layer)
    if block is None or child(block, ("experts", "input_linear")) is None:
        return None
    found = child(block, GATE)
    inner = None if found is None else child(found, ("layer", "wg", "gate"))
    return inner if inner is not None else found


def norm_after_attention(layer: torch.nn.Module) -> Any:
    """Return the norm of the attention's output before it joins the stream, or ``None``."""
    found = child(layer, AFTER_ATTENTION)
    if found is None and child(layer, (*BEFORE_MLP, *AFTER_MLP)) is not None:
        found = child(layer, (EITHER,))
    return found


def norm_after_mlp(layer: torch.nn.Module) -> Any:
    """Return the norm of the feed-forward block's output before it joins the stream, or ``None``.

    Some names stand for the norm *before* the block in families without another one.
    """
    return child(layer, AFTER_MLP)


def norm_before_mlp(layer: torch.nn.Module) -> Any:
    """Return the norm that reads the stream for the feed-forward block, or ``None``."""
    found = child(layer, BEFORE_MLP)
    if found is None:
        either = child(layer, (EITHER,))
        if either is not None and either is not norm_after_attention(layer):
            found = either
    if found is None and child(layer, ("fc1",)) is not None:
        found = child(layer, ("final_layer_norm",))
    return found


def is_parallel(layer: torch.nn.Module) -> bool:
    """Return whether attention and feed-forward block are known to read the same stream."""
    places = (layer, getattr(layer, "config", None), attention(layer))
    return any(getattr(place, name, False) is True for place in places for name in PARALLEL)


def stem(model: torch.nn.Module) -> Any:
    """Return the module that holds the list of decoder layers, and embedding and last norm."""
    layers = {id(layer) for layer in taps.decoder_layers(model).values()}
    for module in model.modules():
        for stack in module.children():
            if layers & {id(layer) for layer in stack.children()}:
                return module
    return None


def token_embedding(model: torch.nn.Module) -> Any:
    """Return the token embedding, or ``None``."""
    found = stem(model)
    return None if found is None else child(found, EMBEDDING)


def final_norm(model: torch.nn.Module) -> Any:
    """Return the norm after the last layer, or ``None``."""
    found = stem(model)
    return None if found is None else child(found, FINAL_NORM)


def heads(layer: torch.nn.Module) -> Any:
    """Return vLLM's module that is given a layer's queries, keys and values, or ``None``."""
    found = attention(layer)
    for one in () if found is None else found.children():
        if hasattr(one, "impl") and hasattr(one, "head_size") and not hasattr(one, "kv_lora_rank"):
            return one
    return None


def is_partial(module: torch.nn.Module) -> bool:
    """Return whether a module returns one rank's part of a sum over tensor-parallel ranks."""
    last = child(module, (*OUTPUT, *DOWN)) or module
    return getattr(last, "reduce_results", True) is False and getattr(last, "tp_size", 1) > 1
