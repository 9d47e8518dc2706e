"""Places: the hook of actds that a name of another library stands for.

Spec: 0.1 section 16.1; ``hook_names`` of TransformerLens, and the modules of
``transformers`` that SAELens hooks by their own names.
"""

from __future__ import annotations

import re

_LENS = re.compile(r"blocks\.(\d{1,6})\.(?:attn\.)?hook_([a-z_]+)")
_MODULE = re.compile(
    r"(?:[a-z_]+\.){0,3}(?:layers|h|blocks)\.(\d{1,6})(?:\.(mlp|self_attn|attn|attention))?"
    r"(?:\.output)?"
)
_OWN = re.compile(r"([a-z][a-z0-9_]{0,63})\.(\d{1,6})")
_KINDS: dict[str, tuple[str, ...]] = {
    "resid_pre": ("resid_pre",),
    "resid_mid": ("resid_mid",),
    "resid_post": ("resid_post",),
    # Before rotary embedding hook_q and hook_k are no hook of actds, except in models without one.
    "rot_q": ("q",),
    "rot_k": ("k",),
    "v": ("v",),
    "z": ("z",),
    "attn_out": ("attn_out", "attn_out_post"),
    "mlp_out": ("mlp_out", "mlp_out_post"),
}
# Their hook_attn_out and hook_mlp_out are after the norm that follows (Gemma 2, 3; GLM-4; OLMo 2;
# EXAONE 4). The module of transformers is before it.
_POST_NORMS = re.compile(r"gemma-?[23]|glm-?4|olmo-?2|exaone-?4")
_ALIASES = {"gpt2-small": "gpt2"}  # of TransformerLens


def places_of(name: str, model: str | None = None) -> tuple[str, ...]:
    """Return the hooks that a name elsewhere may stand for, the usual one first; none if unknown.

    ``blocks.L.hook_attn_out`` and ``hook_mlp_out`` are two: before or after the norm that some
    models have there. A known model decides.

    Args:
        name: of TransformerLens, of a module of ``transformers``, or of actds itself.
        model: name of the model, where known.
    """
    if match := _LENS.fullmatch(name):
        kinds = _KINDS.get(match[2], ())
        if len(kinds) == 2 and model is not None and _POST_NORMS.search(model.lower()):
            kinds = kinds[1:]
        return tuple(f"{kind}.{int(match[1])}" for kind in kinds)
    if match := _MODULE.fullmatch(name):
        kind = {None: "resid_post", "mlp": "mlp_out"}.get(match[2], "attn_out")
        return (f"{kind}.{int(match[1])}",)
    if match := _OWN.fullmatch(name):
        return (f"{match[1]}.{int(match[2])}",)
    return ()


def same_place(first: str, second: str) -> bool:
    """Return whether two hooks hold the same rows by definition.

    ``resid_pre.L`` and ``resid_post.L-1`` do: the stream before a layer is that after the last.
    """
    return _canonical(first) == _canonical(second)


def layers_of(hook: str) -> set[int]:
    """Return the layers that a hook can be counted to: its own, and that of the same rows."""
    names = (hook, _canonical(hook))
    return {int(layer) for name in names if (layer := name.rpartition(".")[2]).isdecimal()}


def same_model(first: str, second: str) -> bool:
    """Return whether two names can be those of one model: their last segments, in any case."""
    return _segment(first) == _segment(second)


def _canonical(hook: str) -> str:
    kind, _, layer = hook.rpartition(".")
    if kind == "resid_pre" and layer.isdecimal() and int(layer) > 0:
        return f"resid_post.{int(layer) - 1}"
    return hook


def _segment(name: str) -> str:
    last = re.split(r"[/\\]", name.strip().rstrip("/\\").lower())[-1]
    return _ALIASES.get(last, last)
