"""Hook kinds, and hook specifications: ``resid_post:10,20`` to places of a model.

A kind is one class here, or in another package that names it under the entry point group
``actds.hook_kinds``: every process of a harvest finds it by name. Imports no torch, so that a
harvest can be planned where none is.
"""

from __future__ import annotations

import difflib
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from actds.errors import ActdsError
from actds.schema import HOOK_KINDS, DType
from actds_writers.ipc.messages import HookSpec

if TYPE_CHECKING:
    import torch

MAX_SPEC_LENGTH = 4096
_LAYER = re.compile(r"((?:.*\.)?(?:layers|h|blocks))\.(\d+)")
_LANGUAGE_MODEL = ("get_language_model", "get_decoder")
"""Methods by which a composed model names the part that decodes: of vLLM, of transformers."""
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")

ModelConfig = Mapping[str, Any]
"""A model's configuration by the names of its ``config.json``; ``hidden_size`` and
``num_hidden_layers`` are there under these names, whatever the family calls them."""
StreamForm = Literal["sum", "first", "unverified"]
"""Where the stream is in the output of a decoder layer.

``sum``: the first two tensors of a tuple, whose sum it is. ``first``: the output itself, or the
first tensor of a tuple. ``unverified``: nobody has looked at this model class; a single tensor and
a pair of one shape are taken as most models mean them, everything else is refused, and the check
of the hooks has to confirm it before the first row.
"""


class Tap(NamedTuple):
    """Where the rows of one hook are seen in a loaded model.

    Args:
        module: whose forward is hooked.
        read: returns the rows from positional arguments, keyword arguments and output of that
            forward: one tensor ``(n, d_model)``, or two whose sum they are. It is traced into the
            compiled graph.
        before: whether it is called before the forward, with no output: a module may change its
            inputs in place.
    """

    module: torch.nn.Module
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[torch.Tensor, torch.Tensor | None]]
    before: bool = False


class HookKind(ABC):
    """What stands at a place of a model; one object per kind."""

    name: ClassVar[str]
    """The hook of layer L is called ``<name>.<L>``; lower case, as in spec 0.1 section 3.1."""
    summary: ClassVar[str]
    """One line of help."""
    next_reads: ClassVar[bool] = False
    """Whether a part behind the layer reads exactly these rows, which a check can look for where no
    plain forward can be had."""

    @abstractmethod
    def width(self, config: ModelConfig) -> int:
        """Return the channels of a row."""

    def dtype(self, computed: DType) -> DType:
        """Return the type in which a model that computes in ``computed`` has these values."""
        return computed

    @abstractmethod
    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return where the rows are seen.

        Args:
            model: a loaded model, not yet compiled.
            layer: decoder layer.
            form: where the stream is in what its layers return.

        Raises:
            ActdsError: E007 when the model has no such place.
        """

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return where a plain forward of ``transformers`` has the same rows; raises as ``tap``."""
        return self.tap(model, layer, "first")

    def said(self, output: Any) -> Mapping[int, torch.Tensor]:
        """Return what a ``transformers`` model itself says of the place, by layer.

        Args:
            output: of a forward with ``output_hidden_states``.
        """
        return {}


class _ResidPost(HookKind):
    """The residual stream after a decoder layer.

    Spec: 0.1 section 3.1.
    """

    name = "resid_post"
    summary = "residual stream after decoder layer L"
    next_reads = True

    def width(self, config: ModelConfig) -> int:
        """Return the width of the stream."""
        return int(config["hidden_size"])

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the layer; raises as ``HookKind.tap``."""
        found = decoder_layers(model)
        if layer not in found:
            raise ActdsError(
                "E007",
                f"{self.name}:{layer}",
                got="no such decoder layer",
                expected=f"a layer of 0-{max(found, default=-1)}",
            )
        place = f"{type(model).__name__} layer {layer}"

        def read(
            _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return residual_stream(output, form, place)

        return Tap(found[layer], read)

    def said(self, output: Any) -> Mapping[int, torch.Tensor]:
        """Return ``hidden_states``, less that of the last layer, behind which is the final norm."""
        hidden = getattr(output, "hidden_states", None) or ()
        return {layer: state for layer, state in enumerate(hidden[1:-1])}


BUILT_IN: dict[str, HookKind] = {kind.name: kind for kind in (_ResidPost(),)}


def kind_names() -> list[str]:
    """Return the names of the kinds that can be asked for, ours first."""
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
    entries = entry_points(group=HOOK_KINDS, name=name)
    if not entries:
        names = kind_names()
        close = difflib.get_close_matches(name, names, n=1) or names
        raise _unknown(f"the kind {name[:40]!r}", f"one of {', '.join(close)}")
    try:
        kind: HookKind = next(iter(entries)).load()
    except (ImportError, AttributeError) as error:
        raise ActdsError(
            "E011", f"hook kind {name}", got=str(error).splitlines()[0], expected="it importable"
        ) from None
    return kind


class HookPlace(NamedTuple):
    """A place of the model: kind of output, and decoder layer from 0."""

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
        config: configuration of the model.
        computed: type the model computes in.
        store_dtype: type to store all of them in, ``None`` for the type each is computed in.

    Raises:
        ActdsError: E007 for a kind whose width the configuration does not say.
    """
    specs = []
    for kind_name, layer in places:
        kind = find_kind(kind_name)
        try:
            width = kind.width(config)
        except (KeyError, TypeError, ValueError) as error:
            raise _unknown(
                f"{kind_name} of a model whose configuration lacks {error}", "another kind"
            ) from None
        dtype = store_dtype or kind.dtype(computed)
        specs.append(HookSpec(HookPlace(kind_name, layer).name, kind_name, layer, width, dtype))
    return tuple(specs)


def cast_of(hooks: Sequence[HookSpec], computed: DType) -> str:
    """Return the value of ``capture.cast``: none, or each cast and, of several, whose it is."""
    casts: dict[str, list[str]] = {}
    for hook in hooks:
        own = find_kind(hook.kind).dtype(computed)
        words = "none" if own == hook.dtype else f"{own} to {hook.dtype}, nearest even"
        casts.setdefault(words, []).append(hook.name)
    if len(casts) == 1:
        return next(iter(casts))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in casts.items())


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
        find_kind(kind)
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


def decoder_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return the decoder layers of a model by number, found by module path.

    Of a composed model, those of its language model: a vision tower has layers of its own.

    Raises:
        ActdsError: E007 when several lists of layers could be the decoder's.
    """
    lists: dict[str, dict[int, torch.nn.Module]] = {}
    for path, module in model.named_modules():
        found = _LAYER.fullmatch(path)
        if found and not type(module).__name__.startswith("PPMissing"):
            lists.setdefault(found[1], {})[int(found[2])] = module
    for inner in [path for path in lists if any(path.startswith(f"{other}.") for other in lists)]:
        del lists[inner]
    if len(lists) > 1:
        lists = _of_language_model(model, lists)
    return next(iter(lists.values()), {})


def _of_language_model(
    model: torch.nn.Module, lists: dict[str, dict[int, torch.nn.Module]]
) -> dict[str, dict[int, torch.nn.Module]]:
    import torch

    for name in _LANGUAGE_MODEL:
        get = getattr(model, name, None)
        language = get() if callable(get) else None
        if not isinstance(language, torch.nn.Module):
            continue
        inside = set(language.modules())
        found = {
            path: layers for path, layers in lists.items() if inside.issuperset(layers.values())
        }
        if len(found) == 1:
            return found
    raise ActdsError(
        "E007",
        type(model).__name__,
        got=f"layers in {len(lists)} places: {', '.join(sorted(lists))}"[:200],
        expected="one list of decoder layers, or a language model that the model names",
    )


def residual_stream(
    output: Any, form: StreamForm, place: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden and residual of a layer's output; their sum is the residual stream.

    Rows of a padded batch, ``(batch, width, d_model)``, are laid flat.

    Args:
        output: what the decoder layer returned.
        form: where the stream is in it.
        place: model class and layer, for the error.

    Raises:
        ActdsError: E007 when the output does not have that form.

    Spec: 0.1 section 3.1.
    """
    import torch

    if isinstance(output, torch.Tensor) and form != "sum":
        return output.flatten(0, -2), None
    tensors = list(output) if isinstance(output, tuple | list) else []
    first = tensors[0] if tensors and isinstance(tensors[0], torch.Tensor) else None
    second = tensors[1] if len(tensors) > 1 and isinstance(tensors[1], torch.Tensor) else None
    pair = first is not None and second is not None and first.shape == second.shape
    if first is not None and form == "first":
        return first.flatten(0, -2), None
    if pair and (form == "sum" or len(tensors) == 2):
        assert first is not None and second is not None
        return first.flatten(0, -2), second.flatten(0, -2)
    raise ActdsError(
        "E007",
        place,
        got=f"a decoder layer that returns {_describe(output)}",
        expected="(hidden, residual)" if form == "sum" else "one tensor, or (hidden, residual)",
        next_step="Harvest it with --writer transformers, which runs the model's own code.",
    )


def _describe(output: Any) -> str:
    import torch

    if isinstance(output, torch.Tensor):
        return f"one tensor {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        parts = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                 for part in output]  # fmt: skip
        return f"{len(parts)} parts: {', '.join(map(str, parts))}"[:200]
    return type(output).__name__
