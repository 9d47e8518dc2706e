"""What a hook kind is, and what all of them stand on: decoder layers and the residual stream.

No torch is imported at module level, so that a harvest can be planned without it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from actds.errors import ActdsError
from actds.format.schema import DType

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"((?:.*\.)?(?:layers|h|blocks))\.(\d+)")
_LANGUAGE_MODEL = ("get_language_model", "get_decoder")
"""Methods that return the decoder of a multimodal model: in vLLM, in transformers."""

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
        wrapped: whether the forward itself is wrapped, and read before it runs: for a module whose
            ``forward`` some models call past its hooks.
    """

    module: torch.nn.Module
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], tuple[torch.Tensor, torch.Tensor | None]]
    before: bool = False
    wrapped: bool = False


class HookKind(ABC):
    """A kind of activation: its width, its type, and where a model has it."""

    name: ClassVar[str]
    """The hook of layer L is called ``<name>.<L>``; lower case, as in spec 0.1 section 3.1."""
    next_reads: ClassVar[bool] = False
    """Whether a module after the layer reads exactly these rows, so that the hook can be checked
    without a plain forward."""
    split_by_rank: ClassVar[bool] = False
    """Whether every tensor-parallel rank has a part of the row, which is gathered there."""

    def layers(self, n_layers: int) -> range:
        """Return the layers at which a model of ``n_layers`` decoder layers has this hook."""
        return range(n_layers)

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

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        """Return the same rows by layer from the model's own output, empty where it has none.

        Args:
            output: of a forward of ``transformers`` with ``output_hidden_states``.
            n_layers: decoder layers of the model.
        """
        return {}


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

    Spec: 0.1 section 16.3.
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
        next_step='Harvest it with engine="transformers", which runs the model\'s own code.',
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
