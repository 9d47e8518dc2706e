"""Places: the rows that a dictionary is for, by the names that files and loaders give them.

``actds.Loader.config`` is beside a dictionary that was trained on a loader's batches.

Spec: 0.1 section 16.1; ``hook_names`` of TransformerLens, and the modules of
``transformers`` that SAELens hooks by their own names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from actds_studies.dictionaries.tensors import refused

HookFrom = Literal["file", "path", "caller"]


@dataclass(frozen=True)
class Wanted:
    """The rows that a dictionary is wanted for; None for what the caller does not say.

    Args:
        model: name of the model, or the path of its folder.
    """

    hook: str | None = None
    d_model: int | None = None
    model: str | None = None

    def refuse_other_model(self, place: object, model: str | None) -> None:
        """Refuse a dictionary of another model, where both are named.

        Raises:
            ActdsError: E015.
        """
        if self.model is None or model is None or same_model(self.model, model):
            return
        next_step = "Give a dictionary of this model: directions of another mean nothing here."
        raise refused(place, f"a dictionary of {model}", self.model, next_step)

    def refuse_other_width(self, place: object, d_model: int) -> None:
        """Refuse a dictionary of another width.

        Raises:
            ActdsError: E015.
        """
        if self.d_model is not None and d_model != self.d_model:
            expected = f"{self.d_model:,}{f', as {self.hook} has' if self.hook else ''}"
            raise refused(place, f"a dictionary of {d_model:,} channels", expected)

    def hook_of(
        self, place: object, called: str | None, places: tuple[str, ...], said_by: HookFrom
    ) -> tuple[str | None, HookFrom | None]:
        """Return the hook of a dictionary, and who says so.

        Args:
            called: what the dictionary calls its hook; None where it says nothing.
            places: hooks that this may be, the usual one first.
            said_by: where it is called so.

        Raises:
            ActdsError: E015 it is another one, or one that cannot be known to be the caller's.
        """
        if called is None:
            return self.hook, None if self.hook is None else "caller"
        if self.hook is None:
            return (places[0], said_by) if places else (None, None)
        if any(same_place(self.hook, candidate) for candidate in places):
            return self.hook, said_by
        got = f"a dictionary of {called}"
        if places and places[0] != called:
            got += f", which is {' or '.join(places)}"
        raise refused(place, got, self.hook)

    def refuse_other_layer(self, place: object, layer: int | None) -> None:
        """Refuse a dictionary of another layer, where its kind of hook is not known.

        Raises:
            ActdsError: E015.
        """
        if self.hook is not None and layer is not None and layer not in layers_of(self.hook):
            raise refused(place, f"a dictionary of layer {layer}", self.hook)


NEXT_STEP = (
    "Fold the normalization into the weights, set `normalize` and `normalization` of the recorded "
    "configuration to null, and save again."
)


@dataclass(frozen=True)
class Recorded:
    """Which rows a dictionary was trained on.

    Args:
        hook: their hook; None where batches had several.
        held_out: share of the requests that the loader held out; None where it read all.
        model: name of their model; None where several are named, or none.
        weights: digests of the weights of their models.
    """

    digests: tuple[str, ...] = ()
    hook: str | None = None
    held_out: float | None = None
    model: str | None = None
    weights: tuple[str, ...] = ()


def recorded(place: object, config: Any) -> Recorded:
    """Return what a loader recorded; nothing where the value is not of one.

    Raises:
        ActdsError: E015 rows that the loader normalized: the weights are not for rows as they are.
    """
    if not isinstance(config, dict) or config.get("format") != "actds.loader":
        return Recorded()
    if config.get("normalization") or config.get("normalize"):
        how = config.get("normalize")
        got = f"trained on rows that the loader normalized ({how})"
        raise refused(place, got, "weights for rows as they are", NEXT_STEP)
    sets = [entry for entry in _list(config.get("datasets")) if isinstance(entry, dict)]
    digests = [config.get("digest"), *(entry.get("digest") for entry in sets)]
    hooks = [entry for entry in _list(config.get("hooks")) if isinstance(entry, str)]
    only = hooks[0] if len(hooks) == 1 else None
    known = tuple(dict.fromkeys(entry for entry in digests if isinstance(entry, str)))
    models = [entry for entry in _list(config.get("models")) if isinstance(entry, dict)]
    names = {entry.get("name") for entry in models}
    name = names.pop() if len(names) == 1 else None
    weights = {text for entry in models if isinstance(text := entry.get("weights_sha256"), str)}
    model = name if isinstance(name, str) else None
    return Recorded(known, only, _held_out(config), model, tuple(sorted(weights)))


def _held_out(config: dict[str, Any]) -> float | None:
    split = config.get("split")
    if not isinstance(split, list) or len(split) != 2 or split[0] != "train":
        return None
    return float(split[1]) if isinstance(split[1], float) and 0 < split[1] < 1 else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
