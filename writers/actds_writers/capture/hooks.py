"""Hook kinds, and hook specifications such as ``resid_mid:8;mlp_out:8,9``.

A kind is one class, in ``kinds`` or in a package that registers it under the entry point group
``actds.hook_kinds``: every process of a harvest finds it by name. No torch is imported at module
level, so that a harvest can be planned without it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from actds.errors import ActdsError
from actds.format.schema import HOOK_KINDS, DType
from actds.text import one_line
from actds_writers.capture.kinds import BUILT_IN
from actds_writers.capture.taps import HookKind, ModelConfig
from actds_writers.ipc.messages import HookSpec

MAX_SPEC_LENGTH = 4096
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


def kind_names() -> list[str]:
    """Return the names of all registered kinds, built-in ones first."""
    found = {entry.name for entry in entry_points(group=HOOK_KINDS)}
    return [*BUILT_IN, *sorted(found - set(BUILT_IN))]


@functools.cache
def find_kind(name: str) -> HookKind:
    """Return a kind by name.

    Raises:
        ActdsError: E007 when no package registers the name, E011 when it cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    kind: HookKind | None = load_registered(HOOK_KINDS, name, "hook kind")
    if kind is None:
        names = kind_names()
        close = difflib.get_close_matches(name, names, n=1) or names
        raise _unknown(f"the kind {name[:40]!r}", f"one of {', '.join(close)}")
    return kind


def load_registered(group: str, name: str, what: str) -> Any:
    """Return what a package registers under an entry point group, ``None`` when none does.

    Raises:
        ActdsError: E011 when it cannot be imported.
    """
    try:
        return next((entry.load() for entry in entry_points(group=group, name=name)), None)
    except (ImportError, AttributeError) as error:
        raise ActdsError(
            "E011", f"{what} {name}", got=one_line(error, 200), expected=f"an importable {what}"
        ) from None


class HookPlace(NamedTuple):
    """A hook: its kind, and a decoder layer from 0."""

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """Return the name of the hook's array, for example ``resid_post.10``."""
        return f"{self.kind}.{self.layer}"


def hook_specs(
    places: Sequence[tuple[str, int]],
    config: ModelConfig,
    computed: DType,
    store_dtype: DType | None = None,
) -> tuple[HookSpec, ...]:
    """Return hooks with the width and type of each.

    Args:
        places: kind and layer of each.
        store_dtype: type to store, ``None`` for the type that each is computed in.

    Raises:
        ActdsError: E007 for a kind whose width is not in the configuration.
    """
    specs: list[HookSpec] = []
    errors: list[ActdsError] = []
    for kind_name, layer in places:
        kind = find_kind(kind_name)
        try:
            width = kind.width(config)
        except (KeyError, TypeError, ValueError) as error:
            got = f"a configuration that lacks {error}"
            place = f"{kind_name}:{layer}"
            errors.append(ActdsError("E007", place, got=got, expected="a model that has it"))
            continue
        dtype = store_dtype or kind.dtype(computed)
        specs.append(HookSpec(HookPlace(kind_name, layer).name, kind_name, layer, width, dtype))
    raise_all(errors)
    return tuple(specs)


def cast_of(hooks: Sequence[HookSpec], computed: DType) -> str:
    """Return the value of ``capture.cast``: ``none``, or the casts with the hooks of each."""
    casts: dict[str, list[str]] = {}
    for hook in hooks:
        own = find_kind(hook.kind).dtype(computed)
        words = "none" if own == hook.dtype else f"{own} to {hook.dtype}, nearest even"
        casts.setdefault(words, []).append(hook.name)
    if len(casts) == 1:
        return next(iter(casts))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in casts.items())


def parse_hooks(spec: str, n_layers: int) -> list[HookPlace]:
    """Return the hooks that a specification names, sorted by kind and layer, each once.

    ``KIND:LAYERS``, several separated by ``;``. Layers are numbers, inclusive ranges (``0-29``) and
    ``all``, separated by commas; ``-1`` is the last layer. A kind with one place, such as
    ``embed``, needs no layer.

    Args:
        spec: for example ``resid_post:10,20``.

    Raises:
        ActdsError: E007 for an unknown kind, a layer that the model or the kind lacks, or no layer
            at all.
    """
    if len(spec) > MAX_SPEC_LENGTH:
        raise _unknown(f"{len(spec)} characters", f"at most {MAX_SPEC_LENGTH}")
    places: set[HookPlace] = set()
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        kind, colon, layers = (piece.strip() for piece in part.partition(":"))
        own = find_kind(kind).layers(n_layers)
        if len(own) == 1 < n_layers and not colon:
            layers = "all"
        if not layers:
            raise _unknown(f"no layer for {kind}", f"{kind}:LAYER,... with {_range(n_layers)}")
        for item in layers.split(","):
            for layer in own if item.strip() == "all" else _layers(item.strip(), n_layers):
                if layer not in own:
                    raise _unknown(f"{kind}:{layer}", f"{kind}:{own[0]}, its only place")
                places.add(HookPlace(kind, layer))
    if not places:
        raise _unknown("no hook", "KIND:LAYER,... for example resid_post:10,20")
    return sorted(places)


def _layers(item: str, n_layers: int) -> range:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _unknown(f"the layer {item[:40]!r}", f"{_range(n_layers)}, a range A-B, or all")
    first = _layer(match[1], n_layers)
    last = first if match[2] is None else _layer(match[2], n_layers)
    if last < first:
        raise _unknown(f"the empty range {item!r}", "the lower layer first")
    return range(first, last + 1)


def _layer(text: str, n_layers: int) -> int:
    layer = int(text)
    if not -n_layers <= layer < n_layers:
        raise _unknown(f"layer {layer}", _range(n_layers))
    return layer % n_layers


def _range(n_layers: int) -> str:
    return f"layers 0 to {n_layers - 1}, or -{n_layers} to -1 from the end"


def _unknown(got: str, expected: str) -> ActdsError:
    return ActdsError("E007", "hooks", got=got, expected=expected)


def raise_all(errors: Sequence[ActdsError]) -> None:
    """Raise the errors of several hooks as one, which names all of them; nothing without any."""
    if len(errors) < 2:
        for error in errors:
            raise error
        return
    said: dict[str, list[str]] = {}
    for error in errors:
        said.setdefault(f"{error.got}; expected {error.expected}", []).append(error.place)
    words = [f"{', '.join(places)}: {reason}" for reason, places in said.items()]
    raise ActdsError(
        errors[0].code,
        f"{len(errors)} hooks",
        got=" | ".join(words)[:3500],
        expected="hooks that this model has, with its own rows",
        next_step=errors[0].next_step,
    )
