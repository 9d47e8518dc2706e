"""Model classes of vLLM whose rows ``tests/matrix`` found to be those of ``transformers``.

By class the form of the residual stream, and the kinds that were right beside ``resid_post`` in
every family of the class, as ``docs/families.md`` lists them. A class or kind that is missing is
harvested only if the check of the hooks confirms its rows.
"""

from __future__ import annotations

from actds_writers.capture.taps import StreamForm

_SUM = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneMoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
_FIRST = (
    "BloomForCausalLM",
    "CohereForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "FalconH1ForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "Gemma4ForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HyperCLOVAXForCausalLM",
    "MiniCPM3ForCausalLM",
    "OPTForCausalLM",
    "PhiMoEForCausalLM",
    "StablelmForCausalLM",
    "Zamba2ForCausalLM",
)
VERIFIED: dict[str, StreamForm] = {
    **dict.fromkeys(_SUM, "sum"),
    **dict.fromkeys(_FIRST, "first"),
}
"""Form by class of the loaded vLLM model, as ``docs/families.md`` lists them."""

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "embed resid_pre resid_mid attn_out z q k v mlp_in mlp_out final",
        (
            "ApertusForCausalLM",
            "Ernie4_5ForCausalLM",
            "GPT2LMHeadModel",
            "GemmaForCausalLM",
            "GraniteForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "NemotronForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "StablelmForCausalLM",
        ),
    ),
    (
        "embed resid_pre resid_mid attn_out z q k v mlp_in mlp_out router final",
        (
            "Ernie4_5_MoeForCausalLM",
            "ExaoneMoeForCausalLM",
            "Glm4MoeForCausalLM",
            "GptOssForCausalLM",
            "GraniteMoeForCausalLM",
            "MixtralForCausalLM",
            "OlmoeForCausalLM",
            "PhiMoEForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
        ),
    ),
    (
        "embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in mlp_out mlp_out_post "
        "final",
        (
            "Exaone4ForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Glm4ForCausalLM",
            "HyperCLOVAXForCausalLM",
        ),
    ),
    (
        "embed resid_pre attn_out z q k v mlp_in mlp_out final",
        (
            "CohereForCausalLM",
            "NemotronHForCausalLM",
        ),
    ),
    (
        "embed resid_pre attn_out z mlp_in mlp_out final",
        (
            "FalconForCausalLM",
            "GPTJForCausalLM",
        ),
    ),
    (
        "embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in mlp_out mlp_out_post "
        "router final",
        ("AfmoeForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out z mlp_in mlp_out final",
        ("BloomForCausalLM",),
    ),
    (
        "embed resid_pre z q k v mlp_in mlp_out final",
        ("FalconH1ForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out attn_out_post z q k v mlp_in final",
        ("Gemma4ForCausalLM",),
    ),
    (
        "embed resid_pre attn_out z q k v mlp_in final",
        ("GraniteMoeHybridForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out z q k v mlp_in router final",
        ("GraniteMoeSharedForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out z v mlp_in mlp_out router final",
        ("Llama4ForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out z q k mlp_in mlp_out final",
        ("MiniCPM3ForCausalLM",),
    ),
    (
        "embed resid_pre resid_mid attn_out z k v mlp_in mlp_out final",
        ("OPTForCausalLM",),
    ),
    (
        "embed resid_pre final",
        ("Zamba2ForCausalLM",),
    ),
)
VERIFIED_KINDS: dict[str, frozenset[str]] = {
    name: frozenset(kinds.split()) for kinds, names in _KINDS for name in names
}
"""Kinds beside ``resid_post`` by class; with one tensor-parallel rank, as they were compared."""


def is_verified(model: str, kind: str, ranks: int) -> bool:
    """Return whether a kind was right in every family of a model class that was compared.

    Args:
        model: name of the class in vLLM.
        ranks: tensor-parallel ranks, with which only ``resid_post`` was compared.
    """
    if kind == "resid_post":
        return model in VERIFIED
    return ranks == 1 and kind in VERIFIED_KINDS.get(model, ())
