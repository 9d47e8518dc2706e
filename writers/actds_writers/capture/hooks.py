"""Hook specifications: ``resid_post:10,20`` to places of a model."""

from __future__ import annotations

import re
from typing import NamedTuple

from actds.errors import ActdsError

__all__ = ["KINDS", "HookPlace", "parse_hooks"]

KINDS = ("resid_post",)
MAX_SPEC_LENGTH = 4096
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


class HookPlace(NamedTuple):
    """A place of the model: kind of output, and decoder layer from 0."""

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """Return the name of the hook's array, for example ``resid_post.10``."""
        return f"{self.kind}.{self.layer}"


def parse_hooks(spec: str, n_layers: int) -> list[HookPlace]:
    """Return the places that a specification names, by kind and layer, each once.

    ``KIND:LAYERS``, several separated by ``;``. Layers are numbers, ranges with both ends in
    (``0-29``) and ``all``, separated by commas; ``-1`` is the last layer.

    Args:
        spec: for example ``resid_post:10,20``.
        n_layers: decoder layers of the model.

    Raises:
        ActdsError: E007 for an unknown kind, a layer that the model lacks, or no layer at all.
    """
    if len(spec) > MAX_SPEC_LENGTH:
        raise _unknown(f"{len(spec)} characters", f"at most {MAX_SPEC_LENGTH}")
    places: set[HookPlace] = set()
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        kind, colon, layers = (piece.strip() for piece in part.partition(":"))
        if kind not in KINDS:
            raise _unknown(f"the kind {kind[:40]!r}", f"one of {', '.join(KINDS)}")
        if not colon or not layers:
            raise _unknown(f"no layer for {kind}", f"{kind}:LAYER,... with {_range(n_layers)}")
        for item in layers.split(","):
            places.update(HookPlace(kind, layer) for layer in _layers(item.strip(), n_layers))
    if not places:
        raise _unknown("no hook", "KIND:LAYER,... for example resid_post:10,20")
    return sorted(places)


def _layers(item: str, n_layers: int) -> range:
    if item == "all":
        return range(n_layers)
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _unknown(f"the layer {item[:40]!r}", f"{_range(n_layers)}, a range A-B, or all")
    first = _layer(match[1], n_layers)
    last = first if match[2] is None else _layer(match[2], n_layers)
    if last < first:
        raise _unknown(f"the range {item!r} of no layer", "its lower layer first")
    return range(first, last + 1)


def _layer(text: str, n_layers: int) -> int:
    layer = int(text)
    if not -n_layers <= layer < n_layers:
        raise _unknown(f"layer {layer}", _range(n_layers))
    return layer % n_layers


def _range(n_layers: int) -> str:
    return f"layers 0 to {n_layers - 1}, or -{n_layers} to -1 from the end"


def _unknown(got: str, expected: str) -> ActdsError:
    return ActdsError("E007", "--hooks", got=got, expected=expected)
