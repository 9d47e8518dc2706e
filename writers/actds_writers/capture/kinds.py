"""The built-in hook kinds: for each its width, and where a loaded model has it.

Places are found in the tree of modules, in vLLM's models and in those of ``transformers``. A model
without such a place is refused by name. Rows are read where they arise, before a module may
change them in place.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from actds.errors import ActdsError
from actds.format.schema import DType
from actds_writers.capture import taps
from actds_writers.capture.taps import HookKind, ModelConfig, StreamForm, Tap

if TYPE_CHECKING:
    import torch

Rows = tuple["torch.Tensor", "torch.Tensor | None"]


class _OfStream(HookKind):
    """A kind as wide as the residual stream."""

    def width(self, config: ModelConfig) -> int:
        return int(config["hidden_size"])

    def layer(self, model: torch.nn.Module, layer: int) -> torch.nn.Module:
        layers = taps.decoder_layers(model)
        if layer not in layers:
            highest = f"a layer of 0-{max(layers, default=-1)}"
            raise self.missing(layer, "no such decoder layer", highest)
        return layers[layer]

    def missing(self, layer: int, got: str, expected: str) -> ActdsError:
        return ActdsError("E007", f"{self.name}:{layer}", got=got, expected=expected)

    def part(self, module: Any, layer: int, what: str) -> Any:
        """Return a module of a layer; raises E007 where there is none, or it has but a part."""
        if module is None:
            raise self.missing(layer, f"a layer without a known {what}", "a layer that has one")
        if taps.is_partial(module):
            got = f"a {what} that returns a part of the sum on every tensor-parallel rank"
            raise self.missing(layer, got, "an output that is summed, or one rank")
        return module


class _Whole(_OfStream):
    """A kind whose rows one module is given or returns.

    Args:
        find: returns the module of a decoder layer, ``None`` without one.
        what: it is.
        norm: of its output, by which ``transformers`` shows the same rows; ``None`` without one.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[torch.nn.Module], Any],
        what: str,
        *,
        before: bool = False,
        norm: Callable[[torch.nn.Module], Any] = lambda _: None,
    ) -> None:
        self.name, self._find, self._what = name, find, what
        self._before, self._norm = before, norm

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module = self.part(self._find(self.layer(model, layer)), layer, self._what)
        return Tap(module, _input if self._before else _output, before=self._before)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        norm = self._norm(self.layer(model, layer))
        return self.tap(model, layer, "first") if norm is None else Tap(norm, _input, before=True)


class _ResidPre(_OfStream):
    name = "resid_pre"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, place = self.layer(model, layer), f"{type(model).__name__} layer {layer}"

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            hidden, second = _inputs(args, kwargs)
            if second is None or form == "first":
                return hidden, None
            return taps.residual_stream((hidden, second), form, place)

        return Tap(module, read, before=True)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        return dict(enumerate(_hidden_states(output, n_layers)[:-1]))


class _ResidMid(_OfStream):
    """What the norm before the MLP reads, or the MLP itself where it has none."""

    name = "resid_mid"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, place = self.layer(model, layer), f"{type(model).__name__} layer {layer}"
        if taps.is_parallel(module):
            raise self.missing(layer, "attention and MLP side by side", "one after the other")
        norm = taps.norm_before_mlp(module)
        reader = norm
        if norm is None and taps.norm_after_attention(module) is not None:
            reader, _ = taps.feed_forward(module)  # it reads the stream itself

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            hidden, second = _inputs(args, kwargs)
            if second is None or norm is None:
                return hidden, None
            return taps.residual_stream((hidden, second), "sum", place)  # it adds the two

        return Tap(self.part(reader, layer, "norm before the MLP"), read, before=True)


class _ResidPost(_OfStream):
    name = "resid_post"
    next_reads = True

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, place = self.layer(model, layer), f"{type(model).__name__} layer {layer}"
        return Tap(module, lambda _args, _kw, output: taps.residual_stream(output, form, place))

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        # The last one is taken after the final norm.
        return dict(enumerate(_hidden_states(output, n_layers)[1:-1]))


class _MlpIn(_OfStream):
    name = "mlp_in"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        reader, _ = taps.feed_forward(self.layer(model, layer))
        if reader is None:
            self.part(None, layer, "MLP")
        return Tap(reader, _input, before=True)


class _MlpOut(_OfStream):
    name = "mlp_out"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        reader, writer = taps.feed_forward(self.layer(model, layer))
        what = "MLP" if reader is None or writer is not None else "single MLP or MoE block"
        return Tap(self.part(writer, layer, what), _output)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        norm = taps.norm_after_mlp(self.layer(model, layer))
        return self.tap(model, layer, "first") if norm is None else Tap(norm, _input, before=True)


class _Heads(_OfStream):
    """A kind that stands in the heads of an attention, all heads of a position in one row.

    Args:
        number: which of query, key and value the attention is given.
        of_values: whether a head has the channels of a value, which differ from a query's in some
            families.
    """

    split_by_rank = True

    def __init__(self, name: str, number: int, *, of_values: bool = False) -> None:
        self.name, self._number, self._of_values = name, number, of_values

    def width(self, config: ModelConfig) -> int:
        n_heads = _n_heads(config) if self._number == 0 else _n_kv_heads(config)
        return n_heads * _head_dim(config, self._of_values)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, number = self.layer(model, layer), self._number
        kernel = taps.heads(module)
        if kernel is not None:
            names = ("query", "key", "value")

            def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
                given = args[number] if number < len(args) else kwargs.get(names[number])
                if given is None:  # it shares the keys and values of another layer
                    raise self.missing(layer, f"no {names[number]} of its own", "one")
                return given.reshape(given.shape[0], -1), None

            return Tap(kernel, read, wrapped=True)
        attention = self.part(taps.attention(module), layer, "attention")
        if not hasattr(getattr(attention, "config", None), "_attn_implementation"):
            raise self.missing(layer, "an attention whose kernel is not found", "queries and keys")

        def read_heads(args: tuple[Any, ...], _kwargs: dict[str, Any], _output: Any) -> Rows:
            return args[number].transpose(1, 2).flatten(2).flatten(0, 1), None

        return Tap(_attended(attention), read_heads, before=True)


class _Z(_Heads):
    """The input of the output projection."""

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        projection = taps.output_projection(self.layer(model, layer))
        return Tap(self.part(projection, layer, "attention"), _input, before=True)


class _Router(_OfStream):
    name = "router"

    def width(self, config: ModelConfig) -> int:
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return int(_first(config, *names))

    def dtype(self, computed: DType) -> DType:
        return "float32"  # many models compute the logits in it, whatever the rest

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        gate = self.part(taps.router(self.layer(model, layer)), layer, "gate of experts")
        if hasattr(gate, "quant_method"):  # a linear layer of vLLM
            return Tap(gate, _output)
        return self.reference(model, layer)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return the product with the gate's weight: its module may return probabilities."""
        gate = self.part(taps.router(self.layer(model, layer)), layer, "gate of experts")
        weight, bias = getattr(gate, "weight", None), getattr(gate, "bias", None)
        if weight is None or weight.ndim != 2:
            raise self.missing(layer, "a gate without a weight of experts", "one matrix")

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            import torch

            rows = _inputs(args, kwargs)[0].to(weight.dtype)
            return torch.nn.functional.linear(rows, weight, bias), None

        return Tap(gate, read, before=True)


class _Embed(_OfStream):
    name = "embed"

    def layers(self, n_layers: int) -> range:
        return range(1)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        import torch

        embedding = self.part(taps.token_embedding(model), layer, "token embedding")
        # Some embeddings of transformers return the row of the table times a constant.
        table = isinstance(embedding, torch.nn.Embedding)

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rows:
            if table:
                ids = args[0] if args else next(iter(kwargs.values()))
                output = torch.nn.functional.embedding(ids, embedding.weight)
            return _flat(output), None

        return Tap(embedding, read)


class _Final(_OfStream):
    name = "final"

    def layers(self, n_layers: int) -> range:
        return range(n_layers - 1, n_layers)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        return Tap(self.part(taps.final_norm(model), layer, "final norm"), _output)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        states = _hidden_states(output, n_layers)
        return {n_layers - 1: states[-1]} if states else {}


_KINDS: tuple[HookKind, ...] = (
    _Embed(),
    _ResidPre(),
    _ResidMid(),
    _ResidPost(),
    _Whole("attn_out", taps.output_projection, "attention", norm=taps.norm_after_attention),
    _Whole("attn_out_post", taps.norm_after_attention, "norm of the attention's output"),
    _Z("z", 0, of_values=True),
    _Heads("q", 0),
    _Heads("k", 1),
    _Heads("v", 2, of_values=True),
    _MlpIn(),
    _MlpOut(),
    _Whole("mlp_out_post", taps.norm_after_mlp, "norm of the MLP's output"),
    _Router(),
    _Final(),
)
BUILT_IN: dict[str, HookKind] = {kind.name: kind for kind in _KINDS}

_ATTENDED = "_actds_attended"


def _attended(attention: Any) -> torch.nn.Module:
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


def _first(config: ModelConfig, *names: str) -> Any:
    values = [config[name] for name in names if config.get(name) is not None]
    if not values:
        raise KeyError(names[0])
    return values[0]


def _n_heads(config: ModelConfig) -> int:
    return int(_first(config, "num_attention_heads", "n_head", "num_heads", "n_heads"))


def _n_kv_heads(config: ModelConfig) -> int:
    shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    known = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if shared or all(config.get(name) is None for name in known):
        return 1 if shared else _n_heads(config)
    return int(_first(config, *known))


def _head_dim(config: ModelConfig, of_values: bool) -> int:
    """Return the channels of a head, of its own in models with latent attention."""
    if config.get("qk_nope_head_dim") and config.get("v_head_dim"):
        query = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        return int(config["v_head_dim"]) if of_values else query
    given = config.get("head_dim")
    return int(given) if given else int(config["hidden_size"]) // _n_heads(config)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.flatten(0, -2)


def _inputs(
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
        return _flat(hidden), None
    return _flat(hidden), _flat(second)


def _is_rows(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1


def _input(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
    return _inputs(args, kwargs)[0], None


def _output(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rows:
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
        return _flat(first), bias.expand_as(_flat(first))
    return _flat(first), None


def _hidden_states(output: Any, n_layers: int) -> tuple[torch.Tensor, ...]:
    states = tuple(getattr(output, "hidden_states", None) or ())
    return states if len(states) == n_layers + 1 else ()
