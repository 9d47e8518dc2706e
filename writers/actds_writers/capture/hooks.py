"""Hook kinds, and hook specifications such as ``resid_post:10,20``.

A kind is one class, here or in a package that registers it under the entry point group
``actds.hook_kinds``: every process of a harvest finds it by name. No torch is imported at module
level, so that a harvest can be planned without it.
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
from actds.text import one_line
from actds_writers.ipc.messages import HookSpec

if TYPE_CHECKING:
    import torch

MAX_SPEC_LENGTH = 4096
_LAYER = re.compile(r"((?:.*\.)?(?:layers|h|blocks))\.(\d+)")
_LANGUAGE_MODEL = ("get_language_model", "get_decoder")
"""Methods that return the decoder of a multimodal model: in vLLM, in transformers."""
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")

ModelConfig = Mapping[str, Any]
"""A model's configuration by the names of its ``config.json``; always with ``hidden_size`` and
``num_hidden_layers``, whatever the family calls them."""
StreamForm = Literal["sum", "first", "unverified"]
"""Where the residual stream is in the output of a decoder layer.

``sum``: it is the sum of the first two tensors of a tuple. ``first``: the output itself, or the
first tensor of a tuple. ``unverified``: the model class was never tested; a single tensor and a
pair of one shape are read as in most models, everything else is refused, and the check of the
hooks has to confirm it before the first row.
"""


class Tap(NamedTuple):
    """Where one hook reads its rows in a loaded model.

    Args:
        module: whose forward is hooked.
        read: returns the rows from positional arguments, keyword arguments and output of that
            forward: one tensor ``(n, d_model)``, or two to be added. It is traced into the
            compiled graph.
        before: whether to read before the forward, without output: a module may change its inputs
            in place.
    """

    module: torch.nn.Module
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[torch.Tensor, torch.Tensor | None]]
    before: bool = False


class HookKind(ABC):
    """A kind of activation: its width, its type, and where a model has it."""

    name: ClassVar[str]
    """The hook of layer L is called ``<name>.<L>``; lower case, as in spec 0.1 section 3.1."""
    next_reads: ClassVar[bool] = False
    """Whether a module after the layer reads exactly these rows, so that the hook can be checked
    without a plain forward."""

    @abstractmethod
    def width(self, config: ModelConfig) -> int:
        """Return the channels of a row."""

    def dtype(self, computed: DType) -> DType:
        """Return the type of these values in a model that computes in ``computed``."""
        return computed

    @abstractmethod
    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return where to read the rows.

        Args:
            model: a loaded model, not yet compiled.
            form: where the stream is in the output of its layers.

        Raises:
            ActdsError: E007 when the model has no such place.
        """

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return where a ``transformers`` model has the same rows; raises as ``tap``."""
        return self.tap(model, layer, "first")

    def own_states(self, output: Any) -> Mapping[int, torch.Tensor]:
        """Return the same rows by layer from the model's own output, empty where it has none.

        Args:
            output: of a forward with ``output_hidden_states``.
        """
        return {}


class _ResidPost(HookKind):
    """The residual stream after a decoder layer, spec 0.1 section 3.1."""

    name = "resid_post"
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

    def own_states(self, output: Any) -> Mapping[int, torch.Tensor]:
        """Return ``hidden_states`` except the last one, which is taken after the final norm."""
        hidden = getattr(output, "hidden_states", None) or ()
        return {layer: state for layer, state in enumerate(hidden[1:-1])}


BUILT_IN: dict[str, HookKind] = {kind.name: kind for kind in (_ResidPost(),)}


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
    ``all``, separated by commas; ``-1`` is the last layer.

    Args:
        spec: for example ``resid_post:10,20``.

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
    return ActdsError("E007", "--hooks", got=got, expected=expected)


def decoder_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return the decoder layers of a model by number, found by module path.

    For a multimodal model, those of its language model: a vision tower has its own layers.

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
        expected="one list of decoder layers, or get_language_model() or get_decoder()",
    )


def residual_stream(
    output: Any, form: StreamForm, place: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden and residual of a layer's output, whose sum is the residual stream.

    Rows of a padded batch, ``(batch, width, d_model)``, are flattened.

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
        next_step="Harvest it with --engine transformers, which runs the model's own code.",
    )


def _describe(output: Any) -> str:
    import torch

    if isinstance(output, torch.Tensor):
        return f"one tensor {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        parts = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                 for part in output]  # fmt: skip
        return f"{len(parts)} values: {', '.join(map(str, parts))}"[:200]
    return type(output).__name__
