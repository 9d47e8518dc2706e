"""Tiny models for tests: a configuration without weights, and a tokenizer of single bytes.

For ``vllm.LLM(path, load_format="dummy", dtype=..., max_model_len=...)``; with
``skip_tokenizer_init=True`` no tokenizer is needed, and prompts are token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

N_SPECIAL = 3
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "mixtral": "MixtralForCausalLM"
}  # fmt: skip


def make_tiny_model(
    path: Path,
    arch: Literal["llama", "qwen3", "mixtral"] = "llama",
    n_layers: int = 4,
    hidden: int = 64,
    *,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    max_len: int = 1024,
    dtype: str = "bfloat16",
    tokenizer: bool = False,
) -> Path:
    """Write ``config.json`` of a model that starts in seconds; return its folder.

    Heads, KV heads, MLP and vocabulary are even, so that two tensor-parallel ranks can share
    them. 32 is the smallest head that vLLM's CPU attention takes.

    Args:
        path: folder to make.
        arch: ``llama``, ``qwen3``, or ``mixtral`` with two of four experts per token.
        n_layers: decoder layers.
        hidden: channels of the residual stream.
        n_heads: attention heads.
        n_kv_heads: key and value heads.
        head_dim: channels of a head.
        max_len: positions per request.
        dtype: type the model computes in.
        tokenizer: whether to write the byte tokenizer and its chat template too.
    """
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
        "use_cache": True,
    }
    if arch == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer:
        write_byte_tokenizer(path)
    return path


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE, add_bos: bool = False) -> Any:
    """Return a real transformers tokenizer whose tokens are the 256 bytes and three specials.

    Args:
        chat_template: jinja template, None for a model without one.
        add_bos: whether text gets BOS by itself, as with Llama and Gemma.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|pad|>", "<|start|>", "<|end|>"]
    vocabulary = {token: n for n, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
    )


def write_byte_tokenizer(path: Path) -> None:
    """Write the byte tokenizer into a model folder."""
    byte_tokenizer().save_pretrained(path)


def make_random_model(path: Path, **options: Any) -> Path:
    """Write a tiny float32 model with random weights and the byte tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    make_tiny_model(path, dtype="float32", tokenizer=True, **options)
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=torch.float32
        )
    model.save_pretrained(path)
    return path
