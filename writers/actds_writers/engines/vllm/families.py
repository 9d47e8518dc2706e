"""Model classes whose decoder layers were looked at: what they return, and which test says so.

Stands beside the hooks. ``tests/matrix`` runs every class of the table against ``transformers``
and fails when one is missing there; a class that is not in the table is harvested only when the
check of the hooks confirms its rows.
"""

from __future__ import annotations

from actds_writers.capture.streams import StreamForm

__all__ = ["VERIFIED", "form_of"]

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


def form_of(architecture: str) -> StreamForm:
    """Return where the stream is in what a decoder layer of a model class returns."""
    return VERIFIED.get(architecture, "unverified")
