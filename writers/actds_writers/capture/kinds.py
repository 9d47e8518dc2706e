"""The built-in hook kinds: for each its width, and where a loaded model has it.

Places are found in the tree of modules, in vLLM's models and in those of ``transformers``. A model
without such a place is refused by name. Rows are read where they arise, before a module may
change them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from actds.errors import ActdsError
from actds.format.schema import DType
from actds_writers.capture import places, taps
from actds_writers.capture.taps import HookKind, ModelConfig, StreamForm, Tap, residual_stream

if TYPE_CHECKING:
    import torch

Rows = tuple["torch.Tensor", "torch.Tensor | None"]
Read = Callable[[tuple[Any, ...], dict[str, Any], Any], Rows]


class _OfStream(HookKind):
    """A kind as wide as the residual stream."""

    def width(self, config: ModelConfig) -> int:
        """Return the width of the stream."""
        return int(config["hidden_size"])

    def layer(self, model: torch.nn.Module, layer: int) -> torch.nn.Module:
        """Return a decoder layer; raises E007 when there is none of that number."""
        found = taps.decoder_layers(model)
        if layer not in found:
            highest = f"a layer of 0-{max(found, default=-1)}"
            raise self.missing(layer, "no such decoder layer", highest)
        return found[layer]

    def missing(self, layer: int, got: str, expected: str) -> ActdsError:
        """Return the error of a model without the place."""
        return ActdsError("E007", f"{self.name}:{layer}", got=got, expected=expected)

    def part(self, found: Any, layer: int, what: str) -> Any:
        """Return a module that was looked for; raises E007 when there is none."""
        if found is None:
            raise self.missing(layer, f"a layer without a known {what}", "a layer that has one")
        if places.is_partial(found):
            got = f"a {what} that returns a part of the sum on every tensor-parallel rank"
            raise self.missing(layer, got, "an output that is summed, or one rank")
        return found


class _ResidPre(_OfStream):
    name = "resid_pre"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the input of the layer; raises as ``HookKind.tap``."""
        found = self.layer(model, layer)
        place = f"{type(model).__name__} layer {layer}"

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            hidden, second = _inputs(args, kwargs)
            if second is None or form == "first":
                return hidden, None
            return residual_stream((hidden, second), form, place)

        return Tap(found, read, before=True)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        """Return ``hidden_states`` except the last one, which no layer reads."""
        return dict(enumerate(_hidden_states(output, n_layers)[:-1]))


class _ResidMid(_OfStream):
    name = "resid_mid"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return what the norm before the MLP reads, or the MLP itself; raises as
        ``HookKind.tap``.
        """
        found = self.layer(model, layer)
        if places.is_parallel(found):
            raise self.missing(layer, "attention and MLP side by side", "one after the other")
        norm = places.norm_before_mlp(found)
        reader = norm
        if norm is None and places.norm_after_attention(found) is not None:
            reader, _ = places.feed_forward(found)  # it reads the stream itself
        place = f"{type(model).__name__} layer {layer}"

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            hidden, second = _inputs(args, kwargs)
            if second is None or norm is None:
                return hidden, None
            return residual_stream((hidden, second), "sum", place)  # it adds the two

        return Tap(self.part(reader, layer, "norm before the MLP"), read, before=True)


class _ResidPost(_OfStream):
    """The residual stream after a decoder layer, spec 0.1 section 3.1."""

    name = "resid_post"
    next_reads = True

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the layer; raises as ``HookKind.tap``."""
        found = self.layer(model, layer)
        place = f"{type(model).__name__} layer {layer}"

        def read(_args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> Rows:
            return residual_stream(output, form, place)

        return Tap(found, read)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        """Return ``hidden_states`` except the last one, which is taken after the final norm."""
        return dict(enumerate(_hidden_states(output, n_layers)[1:-1]))


class _AttnOut(_OfStream):
    name = "attn_out"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the output projection; raises as ``HookKind.tap``."""
        found = places.output_projection(self.layer(model, layer))
        return Tap(self.part(found, layer, "attention"), _output)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return the input of the norm after it, where a model has one."""
        norm = places.norm_after_attention(self.layer(model, layer))
        return self.tap(model, layer, "first") if norm is None else Tap(norm, _input, before=True)


class _AttnOutPost(_OfStream):
    name = "attn_out_post"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the norm; raises as ``HookKind.tap``."""
        found = places.norm_after_attention(self.layer(model, layer))
        return Tap(self.part(found, layer, "norm of the attention's output"), _output)


class _MlpIn(_OfStream):
    name = "mlp_in"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the input of the block; raises as ``HookKind.tap``."""
        reader, _ = places.feed_forward(self.layer(model, layer))
        if reader is None:
            self.part(None, layer, "MLP")
        return Tap(reader, _input, before=True)


class _MlpOut(_OfStream):
    name = "mlp_out"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the block; raises as ``HookKind.tap``."""
        reader, writer = places.feed_forward(self.layer(model, layer))
        what = "MLP" if reader is None or writer is not None else "single MLP or MoE block"
        return Tap(self.part(writer, layer, what), _output)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return the input of the norm after it, where a model has one."""
        norm = places.norm_after_mlp(self.layer(model, layer))
        return self.tap(model, layer, "first") if norm is None else Tap(norm, _input, before=True)


class _MlpOutPost(_OfStream):
    name = "mlp_out_post"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the norm; raises as ``HookKind.tap``."""
        found = places.norm_after_mlp(self.layer(model, layer))
        return Tap(self.part(found, layer, "norm of the MLP's output"), _output)


class _Heads(_OfStream):
    """A kind that stands in the heads of an attention, all heads of a position in one row."""

    split_by_rank = True
    number: ClassVar[int]
    """Which of query, key and value."""
    of_values: ClassVar[bool] = False
    """Whether a head has the channels of a value, which differ from a query's in some families."""

    def width(self, config: ModelConfig) -> int:
        """Return heads times the channels of a head."""
        own = _n_heads(config) if self.number == 0 else _n_kv_heads(config)
        return own * _head_dim(config, self.of_values)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return what the attention kernel is given; raises as ``HookKind.tap``."""
        found = self.layer(model, layer)
        number = self.number
        kernel = places.heads(found)
        if kernel is not None:
            names = ("query", "key", "value")

            def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
                given = args[number] if number < len(args) else kwargs.get(names[number])
                if given is None:  # it shares the keys and values of another layer
                    raise self.missing(layer, f"no {names[number]} of its own", "one")
                return given.reshape(given.shape[0], -1), None

            return Tap(kernel, read, wrapped=True)
        from actds_writers.capture.attended import attended

        attention = self.part(places.attention(found), layer, "attention")
        if not hasattr(getattr(attention, "config", None), "_attn_implementation"):
            raise self.missing(layer, "an attention whose kernel is not found", "queries and keys")

        def read_heads(args: tuple[Any, ...], _kwargs: dict[str, Any], _output: Any) -> Rows:
            return args[number].transpose(1, 2).flatten(2).flatten(0, 1), None

        return Tap(attended(attention), read_heads, before=True)


class _Q(_Heads):
    name = "q"
    number = 0


class _K(_Heads):
    name = "k"
    number = 1


class _V(_Heads):
    name = "v"
    number = 2
    of_values = True


class _Z(_Heads):
    name = "z"
    number = 0
    of_values = True

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the input of the output projection; raises as ``HookKind.tap``."""
        found = places.output_projection(self.layer(model, layer))
        return Tap(self.part(found, layer, "attention"), _input, before=True)


class _Router(_OfStream):
    name = "router"

    def width(self, config: ModelConfig) -> int:
        """Return the number of experts that are routed to."""
        return int(_first(config, "num_experts", "num_local_experts", "n_routed_experts",
                          "moe_num_experts"))  # fmt: skip

    def dtype(self, computed: DType) -> DType:
        """Return float32, in which many models compute the logits whatever the rest."""
        return "float32"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the gate; raises as ``HookKind.tap``."""
        found = self.part(places.router(self.layer(model, layer)), layer, "gate of experts")
        if hasattr(found, "quant_method"):  # a linear layer of vLLM
            return Tap(found, _output)
        return self.reference(model, layer)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return the product with the gate's weight: its module may return probabilities."""
        found = self.part(places.router(self.layer(model, layer)), layer, "gate of experts")
        weight, bias = getattr(found, "weight", None), getattr(found, "bias", None)
        if weight is None or weight.ndim != 2:
            raise self.missing(layer, "a gate without a weight of experts", "one matrix")

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Rows:
            import torch

            rows = _inputs(args, kwargs)[0].to(weight.dtype)
            return torch.nn.functional.linear(rows, weight, bias), None

        return Tap(found, read, before=True)


class _Embed(_OfStream):
    name = "embed"

    def layers(self, n_layers: int) -> range:
        """Return layer 0 alone."""
        return range(1)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the rows of the embedding's table; raises as ``HookKind.tap``."""
        found = self.part(places.token_embedding(model), layer, "token embedding")
        import torch

        # Some embeddings of transformers return the row times a constant.
        table = isinstance(found, torch.nn.Embedding)

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Rows:
            if table:
                ids = args[0] if args else next(iter(kwargs.values()))
                output = torch.nn.functional.embedding(ids, found.weight)
            return _flat(output), None

        return Tap(found, read)


class _Final(_OfStream):
    name = "final"

    def layers(self, n_layers: int) -> range:
        """Return the last layer alone."""
        return range(n_layers - 1, n_layers)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        """Return the output of the norm after the last layer; raises as ``HookKind.tap``."""
        return Tap(self.part(places.final_norm(model), layer, "final norm"), _output)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        """Return the last of ``hidden_states``, which is taken after the norm."""
        found = _hidden_states(output, n_layers)
        return {n_layers - 1: found[-1]} if found else {}


BUILT_IN: dict[str, HookKind] = {
    kind.name: kind
    for kind in (
        _Embed(), _ResidPre(), _ResidMid(), _ResidPost(), _AttnOut(), _AttnOutPost(), _Z(), _Q(),
        _K(), _V(), _MlpIn(), _MlpOut(), _MlpOutPost(), _Router(), _Final(),
    )
}  # fmt: skip


def _first(config: ModelConfig, *names: str) -> Any:
    """Return the first value that is there; raises KeyError with the first name."""
    found = [config[name] for name in names if config.get(name) is not None]
    if not found:
        raise KeyError(names[0])
    return found[0]


def _n_heads(config: ModelConfig) -> int:
    return int(_first(config, "num_attention_heads", "n_head", "num_heads", "n_heads"))


def _n_kv_heads(config: ModelConfig) -> int:
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    known = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if one or all(config.get(name) is None for name in known):
        return 1 if one else _n_heads(config)
    return int(_first(config, *known))


def _head_dim(config: ModelConfig, of_values: bool) -> int:
    """Return the channels of a head, of its own in models with latent attention."""
    if config.get("qk_nope_head_dim") and config.get("v_head_dim"):
        query = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        return int(config["v_head_dim"]) if of_values else query
    own = config.get("head_dim")
    return int(own) if own else int(config["hidden_size"]) // _n_heads(config)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a padded batch one after the other."""
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
    found = tuple(getattr(output, "hidden_states", None) or ())
    return found if len(found) == n_layers + 1 else ()
