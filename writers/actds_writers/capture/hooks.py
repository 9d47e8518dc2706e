"""What is captured: hooks of some kinds (``resid_mid:8;mlp_out:8,9``), and what is read of rows.

A kind is an object, built in or of a package that registers it under the entry point group
``actds.hook_kinds``: every process of a harvest finds it by name. It has a width, and a place in
the tree of modules, in vLLM's models and in those of ``transformers``. A model without such a place
is refused by name. Rows are read where they arise, before a module may change them in place. Rows
are multiplied with random directions, and with a user's probes from a file. No torch is imported at
module level, so that a harvest can be planned without it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.readouts import DEFAULT_PROJECTIONS, Readouts, matrix, probe_bytes
from actds.format.schema import HOOK_KINDS, DType
from actds.text import one_line
from actds_writers.capture import taps
from actds_writers.capture.taps import HookKind, ModelConfig, StreamForm, Tap
from actds_writers.ipc.messages import HookSpec
from actds_writers.sampling import keep_rules

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]


def plan_readouts(
    seed: int, file: str | Path | None, hooks: Sequence[HookSpec], keep: str = ""
) -> tuple[Readouts, bytes | None]:
    """Return the readouts of a run (spec 0.1 section 7.8), and the bytes of its probes' file.

    Raises E015 when the file does not fit the hooks, or these differ in width: a dataset stores the
    probes of all hooks as one array. E009 when rules for shares read a probe that there is not.
    """
    readouts, data = _planned(seed, file, hooks)
    for hook, number in (rule.probe[:2] for rule in keep_rules(keep) if rule.probe):
        if hook not in {spec.name for spec in hooks} or number >= readouts.n_probes:
            got = f"a rule for probe {number} of {hook}"
            expected = f"one of {readouts.n_probes} probes of a captured hook"
            raise ActdsError("E009", "keep", got=got, expected=expected)
    return readouts, data


def _planned(
    seed: int, file: str | Path | None, hooks: Sequence[HookSpec]
) -> tuple[Readouts, bytes | None]:
    if file is None:
        return Readouts(DEFAULT_PROJECTIONS, seed), None
    path = Path(file)
    widths = sorted({hook.d_model for hook in hooks})
    if len(widths) > 1:
        got = f"probes for hooks of {' and '.join(map(str, widths))} channels"
        raise _bad(path, got, "hooks of one width, or no probes")
    probes = read_probes(path, [hook.name for hook in hooks], widths[0])
    data = probe_bytes(probes)
    digest = hashlib.sha256(data).hexdigest()
    return Readouts(DEFAULT_PROJECTIONS, seed, probes.shape[1], digest), data


def directions(
    field: str, probes_path: str | None, hooks: Sequence[HookSpec]
) -> list[Floats] | None:
    """Return the directions of each hook, float32 ``(d_model, n_products)``, if there are readouts.

    Args:
        field: value of ``capture.readouts``.
    """
    readouts = Readouts.from_field(field, "readouts")
    if readouts is None:
        return None
    probes = np.load(Path(probes_path)) if probes_path else None
    return [
        matrix(readouts, None if probes is None else probes[i : i + 1], 1, hook.d_model)[0]
        for i, hook in enumerate(hooks)
    ]


def read_probes(path: Path, hooks: list[str], d_model: int) -> Floats:
    """Return the probes of every hook, float32 ``(n_hooks, n_probes, d_model)``.

    Raises E015 unreadable, another shape, or values that are not finite.

    Args:
        path: ``.npy`` with ``(n_probes, d_model)`` for all hooks or ``(n_hooks, n_probes,
            d_model)``; ``.safetensors`` with one ``(n_probes, d_model)`` tensor per hook, under
            the hook's name.
    """
    if path.suffix == ".safetensors":
        values = _from_safetensors(path, hooks)
    elif path.suffix == ".npy":
        values = _from_npy(path, len(hooks))
    else:
        raise _bad(path, f"a file with the ending {path.suffix!r}", "a .npy or .safetensors file")
    if values.ndim != 3 or values.shape[::2] != (len(hooks), d_model) or not values.shape[1]:
        raise _bad(path, f"shape {values.shape}", f"({len(hooks)} hooks, n_probes, {d_model})")
    probes: Floats = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(probes).all():
        raise _bad(path, "NaN or infinity", "finite values")
    return probes


def _from_npy(path: Path, n_hooks: int) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], "a readable npy file") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        raise _bad(path, str(getattr(values, "dtype", type(values))), "an array of floats")
    return np.repeat(values[None], n_hooks, axis=0) if values.ndim == 2 else values


def _from_safetensors(path: Path, hooks: list[str]) -> np.ndarray:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ActdsError(
            "E011",
            "safetensors",
            got="not installed",
            expected="the package safetensors",
            next_step="pip install safetensors",
        ) from None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _bad(path, str(error).splitlines()[0][:200], "a readable safetensors file") from None
    missing = sorted(set(hooks) ^ set(tensors))
    if missing:
        raise _bad(path, f"names {sorted(tensors)}", f"one tensor for each of {hooks}")
    arrays = [tensors[hook].float().numpy() for hook in hooks]
    if len({array.shape for array in arrays}) > 1:
        raise _bad(path, f"shapes {[a.shape for a in arrays]}", "one shape for every hook")
    return np.stack(arrays)


def _bad(path: Path, got: str, expected: str) -> ActdsError:
    return ActdsError("E015", str(path), got=got, expected=expected)


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
    """A kind whose rows one module returns.

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
        norm: Callable[[torch.nn.Module], Any] = lambda _: None,
    ) -> None:
        self.name, self._find, self._what, self._norm = name, find, what, norm

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module = self.part(self._find(self.layer(model, layer)), layer, self._what)
        return Tap(module, taps.returned)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        norm = self._norm(self.layer(model, layer))
        return self.tap(model, layer, "first") if norm is None else Tap(norm, taps.given, True)


class _Given(_Whole):
    """A kind whose rows one module is given; it may return a part of a sum."""

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module = self._find(self.layer(model, layer))
        return Tap(
            self.part(None, layer, self._what) if module is None else module, taps.given, True
        )


class _ResidPre(_OfStream):
    name = "resid_pre"

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, place = self.layer(model, layer), f"{type(model).__name__} layer {layer}"

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> taps.Rows:
            hidden, second = taps.inputs(args, kwargs)
            if second is None or form == "first":
                return hidden, None
            return taps.residual_stream((hidden, second), form, place)

        return Tap(module, read, before=True)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        return dict(enumerate(taps.hidden_states(output, n_layers)[:-1]))


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

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> taps.Rows:
            hidden, second = taps.inputs(args, kwargs)
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
        return dict(enumerate(taps.hidden_states(output, n_layers)[1:-1]))


class _MlpOut(_Whole):
    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        reader, writer = taps.feed_forward(self.layer(model, layer))
        what = "MLP" if reader is None or writer is not None else "single MLP or MoE block"
        return Tap(self.part(writer, layer, what), taps.returned)


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
        n_heads = n_heads_of(config) if self._number == 0 else _n_kv_heads(config)
        return n_heads * _head_dim(config, self._of_values)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module, number = self.layer(model, layer), self._number
        kernel = taps.heads(module)
        if kernel is not None:
            names = ("query", "key", "value")

            def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> taps.Rows:
                given = args[number] if number < len(args) else kwargs.get(names[number])
                if given is None:  # it shares the keys and values of another layer
                    raise self.missing(layer, f"no {names[number]} of its own", "one")
                return given.reshape(given.shape[0], -1), None

            return Tap(kernel, read, wrapped=True)
        attention = self.part(taps.attention(module), layer, "attention")
        if not hasattr(getattr(attention, "config", None), "_attn_implementation"):
            raise self.missing(layer, "an attention whose kernel is not found", "queries and keys")

        def read_heads(args: tuple[Any, ...], _kwargs: dict[str, Any], _output: Any) -> taps.Rows:
            return args[number].transpose(1, 2).flatten(2).flatten(0, 1), None

        return Tap(taps.attended(attention), read_heads, before=True)


class _Z(_Heads):
    """The input of the output projection."""

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        projection = taps.output_projection(self.layer(model, layer))
        return Tap(self.part(projection, layer, "attention"), taps.given, before=True)


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
            return Tap(gate, taps.returned)
        return self.reference(model, layer)

    def reference(self, model: torch.nn.Module, layer: int) -> Tap:
        """Return the product with the gate's weight: its module may return probabilities."""
        gate = self.part(taps.router(self.layer(model, layer)), layer, "gate of experts")
        weight, bias = getattr(gate, "weight", None), getattr(gate, "bias", None)
        if weight is None or weight.ndim != 2:
            raise self.missing(layer, "a gate without a weight of experts", "one matrix")

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> taps.Rows:
            import torch

            rows = taps.inputs(args, kwargs)[0].to(weight.dtype)
            return torch.nn.functional.linear(rows, weight, bias), None

        return Tap(gate, read, before=True)


class _Embed(_OfStream):
    name = "embed"

    def layers(self, n_layers: int) -> range:
        return range(1)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        import torch

        embedding = taps.child(taps.stem(model), taps.EMBEDDING)
        self.part(embedding, layer, "token embedding")
        # Some embeddings of transformers return the row of the table times a constant.
        table = isinstance(embedding, torch.nn.Embedding)

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> taps.Rows:
            if table:
                ids = args[0] if args else next(iter(kwargs.values()))
                output = torch.nn.functional.embedding(ids, embedding.weight)
            return taps.flat(output), None

        return Tap(embedding, read)


class _Final(_OfStream):
    name = "final"

    def layers(self, n_layers: int) -> range:
        return range(n_layers - 1, n_layers)

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        norm = taps.child(taps.stem(model), taps.FINAL_NORM)
        return Tap(self.part(norm, layer, "final norm"), taps.returned)

    def own_states(self, output: Any, n_layers: int) -> Mapping[int, torch.Tensor]:
        states = taps.hidden_states(output, n_layers)
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
    _Given("mlp_in", lambda layer: taps.feed_forward(layer)[0], "MLP"),
    _MlpOut("mlp_out", taps.feed_forward, "MLP", norm=taps.norm_after_mlp),
    _Whole("mlp_out_post", taps.norm_after_mlp, "norm of the MLP's output"),
    _Router(),
    _Final(),
)
BUILT_IN: dict[str, HookKind] = {kind.name: kind for kind in _KINDS}


def _first(config: ModelConfig, *names: str) -> Any:
    values = [config[name] for name in names if config.get(name) is not None]
    if not values:
        raise KeyError(names[0])
    return values[0]


def n_heads_of(config: ModelConfig) -> int:
    return int(_first(config, "num_attention_heads", "n_head", "num_heads", "n_heads"))


def _n_kv_heads(config: ModelConfig) -> int:
    shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    known = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if shared or all(config.get(name) is None for name in known):
        return 1 if shared else n_heads_of(config)
    return int(_first(config, *known))


def _head_dim(config: ModelConfig, of_values: bool) -> int:
    """Return the channels of a head, of its own in models with latent attention."""
    if config.get("qk_nope_head_dim") and config.get("v_head_dim"):
        query = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        return int(config["v_head_dim"]) if of_values else query
    given = config.get("head_dim")
    return int(given) if given else int(config["hidden_size"]) // n_heads_of(config)


MAX_SPEC_LENGTH = 4096
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


@functools.cache
def find_kind(name: str) -> HookKind:
    """Return a kind; raises E007 when no package registers it, E011 when it is not importable."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    kind: HookKind | None = load_registered(HOOK_KINDS, name, "hook kind")
    if kind is None:
        registered = {entry.name for entry in entry_points(group=HOOK_KINDS)}
        names = [*BUILT_IN, *sorted(registered - set(BUILT_IN))]
        close = difflib.get_close_matches(name, names, n=1) or names
        raise _unknown(f"the kind {name[:40]!r}", f"one of {', '.join(close)}")
    return kind


def load_registered(group: str, name: str, what: str) -> Any:
    """Return what a package registers under a group, if one does; E011 if it is not importable."""
    try:
        return next((entry.load() for entry in entry_points(group=group, name=name)), None)
    except (ImportError, AttributeError) as error:
        raise ActdsError(
            "E011", f"{what} {name}", got=one_line(error, 200), expected=f"an importable {what}"
        ) from None


class HookPlace(NamedTuple):
    kind: str
    layer: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.layer}"


def hook_specs(
    places: Sequence[tuple[str, int]],
    config: ModelConfig,
    computed: DType,
    store_dtype: DType | None = None,
) -> tuple[HookSpec, ...]:
    """Return hooks with the width and type of each, E007 for a kind that the model has not.

    Args:
        store_dtype: type to store, ``None`` for the type that each is computed in.
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
        before = find_kind(hook.kind).dtype(computed)
        words = "none" if before == hook.dtype else f"{before} to {hook.dtype}, nearest even"
        casts.setdefault(words, []).append(hook.name)
    if len(casts) == 1:
        return next(iter(casts))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in casts.items())


def parse_hooks(spec: str, n_layers: int) -> list[HookPlace]:
    """Return the hooks that a specification names, sorted by kind and layer, each once.

    ``KIND:LAYERS``, several separated by ``;``. Layers are numbers, inclusive ranges (``0-29``) and
    ``all``, separated by commas; ``-1`` is the last layer. A kind with one place, such as
    ``embed``, needs no layer. Raises E007 for an unknown kind, a layer that the model or the kind
    lacks, or no layer at all.
    """
    if len(spec) > MAX_SPEC_LENGTH:
        raise _unknown(f"{len(spec)} characters", f"at most {MAX_SPEC_LENGTH}")
    places: set[HookPlace] = set()
    for part in filter(None, (part.strip() for part in spec.split(";"))):
        kind, colon, layers = (piece.strip() for piece in part.partition(":"))
        of_kind = find_kind(kind).layers(n_layers)
        if len(of_kind) == 1 < n_layers and not colon:
            layers = "all"
        if not layers:
            raise _unknown(f"no layer for {kind}", f"{kind}:LAYER,... with {_range(n_layers)}")
        for item in layers.split(","):
            for layer in of_kind if item.strip() == "all" else _layers(item.strip(), n_layers):
                if layer not in of_kind:
                    raise _unknown(f"{kind}:{layer}", f"{kind}:{of_kind[0]}, its only place")
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
    by_reason: dict[str, list[str]] = {}
    for error in errors:
        by_reason.setdefault(f"{error.got}; expected {error.expected}", []).append(error.place)
    words = [f"{', '.join(places)}: {reason}" for reason, places in by_reason.items()]
    raise ActdsError(
        errors[0].code,
        f"{len(errors)} hooks",
        got=" | ".join(words)[:3500],
        expected="hooks that this model has, with its own rows",
        next_step=errors[0].next_step,
    )
