"""What a hook kind is, where a loaded model has what kinds read, and how rows are read there.

No torch is imported at module level, so that a harvest can be planned without it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from actds.errors import ActdsError
from actds.format.schema import DType

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"((?:.*\.)?(?:layers|h|blocks))\.(\d+)")
_LANGUAGE_MODEL = ("get_language_model", "get_decoder")
"""Methods that return the decoder of a multimodal model: in vLLM, in transformers."""

Rows = tuple["torch.Tensor", "torch.Tensor | None"]
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
    read: Callable[[tuple[Any, ...], dict[str, Any], Any], Rows]
    before: bool = False
    wrapped: bool = False


class HookKind(ABC):
    """A kind of activation: its width, its type, and where a model has it."""

    name: str
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

    For a multimodal model, those of its language model: a vision tower has its own layers. Raises
    E007 when several lists of layers could be the decoder's.
    """
    lists: dict[str, dict[int, torch.nn.Module]] = {}
    for path, module in model.named_modules():
        match = _LAYER.fullmatch(path)
        if match and not type(module).__name__.startswith("PPMissing"):
            lists.setdefault(match[1], {})[int(match[2])] = module
    for inner in [path for path in lists if any(path.startswith(f"{outer}.") for outer in lists)]:
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
        its_lists = {
            path: layers for path, layers in lists.items() if inside.issuperset(layers.values())
        }
        if len(its_lists) == 1:
            return its_lists
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

    Rows of a padded batch, ``(batch, width, d_model)``, are flattened. Raises E007 when the output
    does not have that form (spec 0.1 section 16.3).
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
        parts = [
            str(tuple(part.shape)) if isinstance(part, torch.Tensor) else type(part).__name__
            for part in output
        ]
        return f"{len(parts)} values: {', '.join(parts)}"[:200]
    return type(output).__name__


# Where a model has its parts: by the names that families give their modules, in vLLM and in
# transformers. That a module is what its name says, the check of the hooks shows, with rows.


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ATTENTION = ("self_attn", "self_attention", "attn", "attention", "mixer")
QUERIES = _names(
    "q_proj qkv_proj query_key_value c_attn Wqkv W_pack qkv query q_b_proj "
    "fused_qkv_a_proj attn_qkvw"
)
"""Projections of an attention; what has none of them mixes tokens in another way."""
OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj")
FEED_FORWARD = _names("mlp feed_forward block_sparse_moe moe ffn feedforward shared_mlp mixer")
UP = _names(
    "up_proj gate_up_proj fc1 c_fc fc_in dense_h_to_4h experts w13 w1 gate_proj gate input_linear"
)
DOWN = ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2")
GATE = ("gate", "router")
EMBEDDING = _names("embed_tokens wte word_embeddings embed_in tok_embeddings embeddings embedding")
FINAL_NORM = _names("norm final_layernorm final_layer_norm ln_f norm_f embedding_norm final_norm")
BEFORE_MLP = _names(
    "pre_feedforward_layernorm pre_mlp_layernorm pre_ff_layernorm ffn_norm "
    "feedforward_layernorm ln_2 ln_mlp norm_2"
)
"""Norms before the feed-forward block whose names say so."""
AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")
AFTER_ATTENTION = ("post_self_attn_layernorm", "post_norm1")
EITHER = "post_attention_layernorm"
"""The norm before the feed-forward block where it is the only one between the two, and the norm of
the attention's output elsewhere."""
PARALLEL = ("use_parallel_residual", "parallel_attn")


def child(parent: Any, names: tuple[str, ...]) -> Any:
    return next(children(parent, names), None)


def children(parent: Any, names: tuple[str, ...]) -> Iterator[torch.nn.Module]:
    modules = {} if parent is None else dict(parent.named_children())
    for name in names:
        module = modules.get(name)
        if module is not None and not type(module).__name__.startswith("PPMissing"):
            yield module


def attention(layer: torch.nn.Module) -> Any:
    for module in children(layer, ATTENTION):
        for inner in (module, child(module, ("attention", "self"))):
            if child(inner, QUERIES) is not None:
                return inner
    return None


def output_projection(layer: torch.nn.Module) -> Any:
    return child(attention(layer), OUTPUT)


def feed_forward(layer: torch.nn.Module) -> tuple[Any, Any]:
    """Return what reads the input of a layer's MLP or experts, and what returns the output.

    As a rule one module; ``(None, None)`` where there is none, ``(reader, None)`` where several
    blocks add up.
    """
    attends = attention(layer)
    blocks = [
        module
        for module in children(layer, FEED_FORWARD)
        if module is not attends and child(module, UP) is not None
    ]
    if not blocks:  # OPT: both projections are the layer's own
        return child(layer, ("fc1",)), child(layer, ("fc2",))
    block = blocks[0]
    if len(blocks) > 1:
        return block, None
    # In transformers' Bloom the block itself adds the stream.
    adds = "residual" in inspect.signature(type(block).forward).parameters
    return block, child(block, DOWN) if adds else block


def router(layer: torch.nn.Module) -> Any:
    block, _ = feed_forward(layer)
    if child(block, ("experts", "input_linear")) is None:
        return None
    gate = child(block, GATE)
    inner = child(gate, ("layer", "wg", "gate"))
    return inner if inner is not None else gate


def norm_after_attention(layer: torch.nn.Module) -> Any:
    """Return the norm of the attention's output before it joins the stream, or ``None``."""
    norm = child(layer, AFTER_ATTENTION)
    if norm is None and child(layer, (*BEFORE_MLP, *AFTER_MLP)) is not None:
        norm = child(layer, (EITHER,))
    return norm


def norm_after_mlp(layer: torch.nn.Module) -> Any:
    """Return the norm of the feed-forward block's output before it joins the stream, or ``None``.

    Some names stand for the norm *before* the block in families without another one.
    """
    return child(layer, AFTER_MLP)


def norm_before_mlp(layer: torch.nn.Module) -> Any:
    """Return the norm that reads the stream for the feed-forward block, or ``None``."""
    norm = child(layer, BEFORE_MLP)
    if norm is None:
        either = child(layer, (EITHER,))
        if either is not None and either is not norm_after_attention(layer):
            norm = either
    if norm is None and child(layer, ("fc1",)) is not None:
        norm = child(layer, ("final_layer_norm",))
    return norm


def is_parallel(layer: torch.nn.Module) -> bool:
    """Return whether attention and feed-forward block are known to read the same stream."""
    places = (layer, getattr(layer, "config", None), attention(layer))
    return any(getattr(place, name, False) is True for place in places for name in PARALLEL)


def stem(model: torch.nn.Module) -> Any:
    """Return the module that holds the list of decoder layers, and embedding and last norm."""
    layers = {id(layer) for layer in decoder_layers(model).values()}
    for module in model.modules():
        for stack in module.children():
            if layers & {id(layer) for layer in stack.children()}:
                return module
    return None


def heads(layer: torch.nn.Module) -> Any:
    """Return vLLM's module that is given a layer's queries, keys and values, or ``None``."""
    parent = attention(layer)
    for module in () if parent is None else parent.children():
        is_kernel = hasattr(module, "impl") and hasattr(module, "head_size")
        if is_kernel and not hasattr(module, "kv_lora_rank"):
            return module
    return None


def is_partial(module: torch.nn.Module) -> bool:
    """Return whether a module returns one rank's part of a sum over tensor-parallel ranks."""
    last = child(module, (*OUTPUT, *DOWN)) or module
    return getattr(last, "reduce_results", True) is False and getattr(last, "tp_size", 1) > 1


_ATTENDED = "_actds_attended"


def attended(attention: Any) -> torch.nn.Module:
    """Return the module that is called whenever an attention of ``transformers`` attends.

    Its attention functions are no modules: each is replaced by one that first hands query, key and
    value, ``(batch, heads, n, head_dim)`` of the positions that are computed, to a module beside
    the attention, where there is one. Never called for a model without these functions.
    """
    import torch

    module: torch.nn.Module | None = getattr(attention, _ATTENDED, None)
    if module is None:
        _watch_attention(str(attention.config._attn_implementation))
        module = torch.nn.Module()
        module.forward = lambda query, key, value: None
        setattr(attention, _ATTENDED, module)
    return module


@functools.cache
def _watch_attention(name: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    known = ALL_ATTENTION_FUNCTIONS.get(name)

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = getattr(module, _ATTENDED, None)
        if watcher is not None:
            n = query.shape[2]
            watcher(query, key[:, :, -n:], value[:, :, -n:])
        return (known or _default_attention(module))(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(name, attend)


def _default_attention(module: Any) -> Any:
    name = "eager_attention_forward"
    files = (vars(sys.modules[base.__module__]) for base in type(module).__mro__)
    return next(names[name] for names in files if name in names)


def flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(0, -2)


def inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the hidden states that a module is given, and a residual of their shape beside them.

    Positions and masks are no floating rows, or come later.
    """
    given = [value for value in args if _is_rows(value)]
    if _is_rows(kwargs.get("hidden_states")):
        given.insert(0, kwargs["hidden_states"])
    given = given or [
        value for name, value in kwargs.items() if name != "residual" and _is_rows(value)
    ]
    if not given:
        got = "no rows among its arguments"
        raise ActdsError("E007", "a hook's module", got=got, expected="hidden states")
    hidden = given[0]
    second = kwargs["residual"] if "residual" in kwargs else next(iter(given[1:]), None)
    if second is None or not _is_rows(second) or second.shape != hidden.shape:
        return flat(hidden), None
    return flat(hidden), flat(second)


def _is_rows(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1


def given(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
    return inputs(args, kwargs)[0], None


def returned(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rows:
    """Return a module's output, with the bias that vLLM's projections return beside it."""
    first = output[0] if isinstance(output, tuple | list) else output
    if first is None:
        first = kwargs.get("output")  # some modules of vLLM write into an argument
    if not _is_rows(first):
        raise ActdsError(
            "E007", "a hook's module", got=f"an output of {type(first).__name__}", expected="rows"
        )
    bias = output[1] if isinstance(output, tuple | list) and len(output) > 1 else None
    if bias is not None and getattr(bias, "ndim", 0) == 1 and bias.shape[0] == first.shape[-1]:
        return flat(first), bias.expand_as(flat(first))
    return flat(first), None


def hidden_states(output: Any, n_layers: int) -> tuple[torch.Tensor, ...]:
    states = tuple(getattr(output, "hidden_states", None) or ())
    return states if len(states) == n_layers + 1 else ()
