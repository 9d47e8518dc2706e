"""Model families of the matrix: tiny configurations and random weights that tell layers apart.

The weights are made by ``transformers``; every residual, norm and multiplier of them matters, so
that a stream that is off by one term is off by much.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actds_testing import tiny

HIDDEN = 128
N_LAYERS = 4
N_POSITIONS = 512
EXACT_SOFTPLUS = 0.388671875
"""Its softplus, and that plus a half, are bfloat16 numbers to 1.5e-6."""
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": N_POSITIONS,
}
MOE: dict[str, Any] = {
    **COMMON,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
TOKENS: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        name: how the table names it.
        model_type: key of the configuration class in transformers.
        options: arguments of that configuration.
        text: name of the text part in a composed configuration, empty for a plain one.
        architecture: name that ``config.json`` bears where transformers writes another.
        engine: options of the engine, ``key=value``.
        bound: largest relative L2 that is right.
        mean: whether the bound is one of the mean over rows, where single rows differ with reason.
        note: why the bound is another, or what was left out.
    """

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    architecture: str = ""
    engine: tuple[str, ...] = ()
    bound: float = 1e-4
    mean: bool = False
    note: str = ""

    @property
    def slug(self) -> str:
        """Return the name as a file name."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower())


_FIELDS = ("text", "architecture", "engine", "bound", "mean", "note")


def _own(name: str, model_type: str, **options: Any) -> Family:
    fields = {key: options.pop(key) for key in _FIELDS if key in options}
    return Family(name, model_type, options, **fields)


def _plain(name: str, model_type: str, **options: Any) -> Family:
    return _own(name, model_type, **{**_known(COMMON, model_type), **options})


def _moe(name: str, model_type: str, **options: Any) -> Family:
    return _own(name, model_type, **{**_known(MOE, model_type), **options})


def _known(options: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return what a configuration has a field for: vLLM would heed the rest, transformers not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    known = {*config.__dataclass_fields__, *config.attribute_map}
    return {key: value for key, value in options.items() if key in known}


_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
_MLA = {
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
# Its state cannot be shared by prefix on a CPU: vLLM's kernel there keeps one state per request.
_NO_PREFIX = {"engine": ("enable_prefix_caching=false",)}
# Gated delta nets of vLLM run on a CPU in bfloat16 only.
_BFLOAT16 = {
    "engine": ("dtype=bfloat16", "enable_prefix_caching=false"), "bound": 0.03, "mean": True,
    "note": "mean over rows; computed in bfloat16, as vLLM's CPU kernel wants it, and rounding can "
    "send a token to another expert",
}  # fmt: skip
_GPT2 = {"n_embd": HIDDEN, "n_layer": N_LAYERS, "n_head": 4, "n_positions": N_POSITIONS}

FAMILIES: tuple[Family, ...] = (
    _plain("Llama", "llama"),
    _plain("Mistral", "mistral", head_dim=32, sliding_window=None),
    _plain("Mistral, sliding window", "mistral", head_dim=32, sliding_window=48),
    _plain("Ministral", "ministral", head_dim=32),
    _plain("Ministral 3", "ministral3", head_dim=32),
    _moe("Mixtral", "mixtral", num_local_experts=4),
    _plain("Qwen2", "qwen2"),
    _moe("Qwen2-MoE", "qwen2_moe", shared_expert_intermediate_size=64),
    _plain("Qwen3", "qwen3", head_dim=32),
    _moe("Qwen3-MoE", "qwen3_moe", head_dim=32),
    _moe("Qwen3-Next", "qwen3_next", head_dim=32, linear_num_value_heads=4, linear_num_key_heads=2,
         linear_key_head_dim=128, linear_value_head_dim=128, shared_expert_intermediate_size=64,
         **_BFLOAT16),
    _plain("Qwen3.5", "qwen3_5_text", head_dim=32, linear_num_value_heads=4,
           linear_num_key_heads=2, linear_key_head_dim=128, linear_value_head_dim=128, **_BFLOAT16),
    _plain("Gemma", "gemma", head_dim=32),
    _plain("Gemma 2", "gemma2", **_GEMMA, sliding_window=48),
    _plain("Gemma 3", "gemma3_text", **_GEMMA, sliding_window=48),
    _plain("Gemma 3n", "gemma3n_text", head_dim=32,
           note="its layers hand on four streams side by side",
           vocab_size_per_layer_input=tiny.VOCAB_SIZE, hidden_size_per_layer_input=16,
           num_kv_shared_layers=0, laurel_rank=8,
           activation_sparsity_pattern=[0.0] * N_LAYERS,
           layer_types=["sliding_attention", "full_attention"] * 2),
    _plain("Gemma 4", "gemma4_text", head_dim=32, global_head_dim=32, sliding_window=48,
           vocab_size_per_layer_input=tiny.VOCAB_SIZE, hidden_size_per_layer_input=16,
           num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2),
    _plain("VaultGemma", "vaultgemma", **_GEMMA, sliding_window=48),
    _plain("Phi", "phi"),
    _plain("Phi-3", "phi3"),
    _plain("Phi-3.5-MoE", "phimoe", num_local_experts=4, num_experts_per_tok=2,
           attention_bias=True, lm_head_bias=True, architecture="PhiMoEForCausalLM"),
    _plain("OLMo", "olmo"),
    _plain("OLMo 2", "olmo2"),
    _plain("OLMo 3", "olmo3", sliding_window=48),
    _moe("OLMoE", "olmoe"),
    _moe("FlexOlmo", "flex_olmo"),
    _plain("GPT-NeoX, parallel residual", "gpt_neox", use_parallel_residual=True),
    _plain("GPT-NeoX, serial residual", "gpt_neox", use_parallel_residual=False),
    _plain("OPT", "opt", ffn_dim=2 * HIDDEN, word_embed_proj_dim=HIDDEN),
    _plain("Granite", "granite", **_MULTIPLIERS),
    _moe("Granite-MoE", "granitemoe", num_local_experts=4, **_MULTIPLIERS),
    _moe("Granite-MoE-shared", "granitemoeshared", num_local_experts=4, shared_intermediate_size=64,
         **_MULTIPLIERS),
    _moe("Granite-MoE-hybrid", "granitemoehybrid", num_local_experts=4, shared_intermediate_size=64,
         **_MULTIPLIERS, **_MAMBA, **_NO_PREFIX, layer_types=["mamba", "attention"] * 2),
    _plain("Granite 4, attention only", "granitemoehybrid", num_local_experts=0,
           shared_intermediate_size=64, **_MULTIPLIERS, **_MAMBA,
           layer_types=["attention"] * N_LAYERS),
    _plain("GLM", "glm", head_dim=32),
    _plain("GLM-4", "glm4", head_dim=32),
    _moe("GLM-4-MoE", "glm4_moe", head_dim=32, n_routed_experts=4, n_shared_experts=1,
         first_k_dense_replace=1, n_group=1, topk_group=1),
    _moe("GLM-4-MoE-lite", "glm4_moe_lite", **{**_MLA, "q_lora_rank": 32}, n_routed_experts=4,
         n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
         topk_method="noaux_tc", scoring_func="sigmoid",
         mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    _plain("Starcoder2", "starcoder2", sliding_window=None),
    _plain("Nemotron", "nemotron", head_dim=32),
    _moe("Nemotron-H", "nemotron_h", head_dim=32, **_NO_PREFIX, mamba_num_heads=8,
         layers_block_type=["mamba", "mlp", "attention", "mlp"], mamba_head_dim=32, n_groups=1,
         time_step_min=1e-9, ssm_state_size=16, chunk_size=256, n_routed_experts=4,
         n_shared_experts=1, moe_shared_expert_intermediate_size=64),
    _plain("SmolLM3", "smollm3"),
    _plain("Seed-OSS", "seed_oss", head_dim=32),
    _moe("GPT-OSS", "gpt_oss", head_dim=32, num_local_experts=4, sliding_window=48),
    _plain("Cohere", "cohere", use_qk_norm=False),
    _plain("Cohere, query and key norm", "cohere", use_qk_norm=True),
    _plain("Cohere 2", "cohere2", head_dim=32, sliding_window=N_POSITIONS,
           note="beyond the window vLLM sees one token more than transformers",
           layer_types=["sliding_attention", "full_attention"] * 2),
    _plain("EXAONE 4", "exaone4", sliding_window=48, sliding_window_pattern=4),
    _moe("EXAONE-MoE", "exaone_moe", head_dim=32, num_shared_experts=1, sliding_window=48,
         n_group=1, topk_group=1, first_k_dense_replace=1, is_moe_layer=[False, True, True, True],
         layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    _plain("StableLM", "stablelm", use_parallel_residual=False),
    _plain("StableLM, parallel residual", "stablelm", use_parallel_residual=True),
    _own("GPT-2", "gpt2", **_GPT2),
    _own("GPT-J", "gptj", **_GPT2, rotary_dim=16),
    _own("GPT-BigCode", "gpt_bigcode", **_GPT2),
    _own("Bloom", "bloom", hidden_size=HIDDEN, n_layer=N_LAYERS, n_head=4, bound=1e-3,
         note="vLLM computes GELU exactly, transformers by tanh"),
    _own("MPT", "mpt", d_model=HIDDEN, n_layers=N_LAYERS, n_heads=4, max_seq_len=N_POSITIONS),
    _plain("Falcon, 7B form", "falcon", new_decoder_architecture=False, parallel_attn=True,
           multi_query=True, alibi=False, bias=False),
    _plain("Falcon, 40B form", "falcon", new_decoder_architecture=True, num_kv_heads=2,
           alibi=False, bias=False),
    _plain("Falcon-H1", "falcon_h1", head_dim=32, mamba_d_ssm=256, **_MAMBA, **_NO_PREFIX,
           embedding_multiplier=3.0, attention_out_multiplier=0.7, ssm_out_multiplier=0.6),
    _moe("DeepSeek-V2", "deepseek_v2", **_MLA, n_routed_experts=4, n_shared_experts=1, n_group=1,
         topk_group=1, first_k_dense_replace=1, topk_method="greedy"),
    _moe("DeepSeek-V3", "deepseek_v3", **{**_MLA, "q_lora_rank": 32}, n_routed_experts=4,
         n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
         topk_method="noaux_tc", scoring_func="sigmoid"),
    _plain("MiniCPM 3", "minicpm3", note="`z` and `attn_out` up to 2e-5 as a mean over rows",
           scale_emb=3.0, scale_depth=1.4, dim_model_base=64,
           **{**_MLA, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}),
    _plain("Jamba", "jamba", num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
           attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16,
           mamba_dt_rank=8, use_mamba_kernels=False),
    _own("Mamba", "mamba", hidden_size=HIDDEN, num_hidden_layers=N_LAYERS, state_size=16),
    _own("Mamba 2", "mamba2", hidden_size=HIDDEN, num_hidden_layers=N_LAYERS, state_size=16,
         num_heads=8, head_dim=32, n_groups=1, chunk_size=256, **_NO_PREFIX),
    _own("Falcon-Mamba", "falcon_mamba", hidden_size=HIDDEN, num_hidden_layers=N_LAYERS,
         state_size=16),
    _plain("ERNIE 4.5", "ernie4_5", head_dim=32),
    _plain("ERNIE 4.5 MoE", "ernie4_5_moe", moe_intermediate_size=64, moe_num_experts=4, moe_k=2,
           moe_num_shared_experts=1, moe_layer_start_index=1, moe_layer_end_index=3),
    _plain("Arcee", "arcee"),
    _plain("Apertus", "apertus",
           note="xIELU's parameters at values that bfloat16 holds, in which vLLM keeps them"),
    _plain("Hunyuan, dense", "hunyuan_v1_dense", head_dim=32),
    _moe("Hunyuan, MoE", "hunyuan_v1_moe", head_dim=32, moe_topk=2),
    _moe("dots.llm1", "dots1", head_dim=32, n_routed_experts=4, n_shared_experts=1, n_group=1,
         topk_group=1, first_k_dense_replace=1),
    _plain("Bamba", "bamba", **_MAMBA, attn_layer_indices=[1, 3]),
    _plain("Zamba2", "zamba2", mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, n_mamba_heads=8,
           mamba_ngroups=1, chunk_size=256, **_NO_PREFIX, time_step_min=1e-9, num_mem_blocks=1,
           layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], adapter_rank=8,
           num_key_value_heads=4),
    _plain("LFM2", "lfm2", layer_types=["conv", "full_attention"] * 2,
           block_auto_adjust_ff_dim=False, conv_dim=HIDDEN, block_dim=HIDDEN,
           block_ff_dim=2 * HIDDEN, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
           **_NO_PREFIX),
    _moe("LFM2-MoE", "lfm2_moe", layer_types=["conv", "full_attention"] * 2, num_dense_layers=1,
         **_NO_PREFIX),
    _plain("Helium", "helium", head_dim=32),
    _plain("Persimmon", "persimmon"),
    _plain("Olmo-hybrid", "olmo_hybrid", layer_types=["linear_attention", "full_attention"] * 2,
           linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32,
           linear_value_head_dim=32),
    _moe("AFMoE", "afmoe", head_dim=32, num_shared_experts=1, num_dense_layers=1, sliding_window=48,
         layer_types=["sliding_attention", "full_attention"] * 2, n_group=1, topk_group=1,
         score_func="sigmoid", route_norm=True, route_scale=1.0),
    _own("DBRX", "dbrx", d_model=HIDDEN, n_layers=N_LAYERS, n_heads=4, max_seq_len=N_POSITIONS,
         ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2,
         "hidden_size": HIDDEN},
         attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}),
    _plain("CWM", "cwm", head_dim=32, sliding_window=48),
    _plain("Jais 2", "jais2"),
    _moe("MiniMax-M2", "minimax_m2", head_dim=32, num_local_experts=4, rotary_dim=32,
         scoring_func="sigmoid"),
    _moe("Llama 4", "llama4_text", head_dim=32, num_local_experts=4, intermediate_size_mlp=256,
         attention_chunk_size=64, interleave_moe_layer_step=2, num_experts_per_tok=1),
    _plain("HyperCLOVA X", "hyperclovax", **_MULTIPLIERS),
    _plain("NanoChat", "nanochat"),
    _plain("BitNet", "bitnet"),
    _moe("Solar Open", "solar_open", head_dim=32, n_routed_experts=4, n_shared_experts=1,
         n_group=1, topk_group=1),
    _moe("Mellum", "mellum", head_dim=32),
    Family("Gemma 3, vision and language", "gemma3", {
        "text_config": {**COMMON, **_GEMMA, "sliding_window": 48, **TOKENS, "vocab_size": 384},
        "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
                          "num_attention_heads": 2, "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4, "boi_token_index": 300, "eoi_token_index": 301,
        "image_token_index": 302}, text="text_config"),
    Family("Qwen2-VL", "qwen2_vl", {
        "text_config": {**COMMON, **TOKENS,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                            "mrope_section": [4, 6, 6]}},
        "vision_config": {"embed_dim": 64, "hidden_size": HIDDEN, "depth": 6, "num_heads": 2,
                          "patch_size": 14},
        "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
        "vision_end_token_id": 303}, text="text_config"),
)  # fmt: skip


def make(family: Family, path: Path) -> Path:
    """Write a family's model with seeded random weights and the byte tokenizer.

    Raises:
        Exception: whatever transformers says when it cannot make the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = dict(family.options)
    if not family.text:
        options = {**TOKENS, **options}
    config = AutoConfig.for_model(family.model_type, **options)
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if family.text else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    loud(model)
    model.save_pretrained(path)
    if family.architecture:
        _rename(path / "config.json", family.architecture)
    tiny.write_byte_tokenizer(path)
    return path


def _rename(path: Path, architecture: str) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": [architecture]}, indent=2))


def loud(model: Any) -> None:
    """Make every weight matter, in place: layers of gain about 1, norms and biases of their own."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "e_score_correction_bias" in name or "expert_bias" in name:
                continue
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if name.endswith((".alpha_p", ".alpha_n")):
                weight.fill_(EXACT_SOFTPLUS)
                continue
            if weight.ndim < 2 or "conv1d" in name or "A_log" in name:
                weight.add_(0.2 * noise.to(weight.dtype))
            elif "embed" in name or "wte" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
