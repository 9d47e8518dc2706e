"""What is captured: hooks, such as ``resid_mid:8;mlp_out:8,9``, and the directions of readouts.

A kind is an object, in ``kinds`` or in a package that registers it under the entry point group
``actds.hook_kinds``: every process of a harvest finds it by name. Rows are multiplied with random
directions, and with a user's probes from a file. No torch is imported at module level, so that a
harvest can be planned without it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format.readouts import DEFAULT_PROJECTIONS, Readouts, matrix, probe_bytes
from actds.format.schema import HOOK_KINDS, DType
from actds.text import one_line
from actds_writers.capture.kinds import BUILT_IN
from actds_writers.capture.taps import HookKind, ModelConfig
from actds_writers.ipc.messages import HookSpec

Floats = npt.NDArray[np.float32]


def plan_readouts(
    seed: int, file: str | Path | None, hooks: Sequence[HookSpec]
) -> tuple[Readouts, bytes | None]:
    """Return the readouts of a run (spec 0.1 section 7.8), and the bytes of its probes' file.

    Raises:
        ActdsError: E015 when the file does not fit the hooks, or these differ in width: a dataset
            stores the probes of all hooks as one array.
    """
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

    Args:
        path: ``.npy`` with ``(n_probes, d_model)`` for all hooks or ``(n_hooks, n_probes,
            d_model)``; ``.safetensors`` with one ``(n_probes, d_model)`` tensor per hook, under
            the hook's name.

    Raises:
        ActdsError: E015 unreadable, another shape, or values that are not finite.
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


MAX_SPEC_LENGTH = 4096
_ITEM = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


def kind_names() -> list[str]:
    registered = {entry.name for entry in entry_points(group=HOOK_KINDS)}
    return [*BUILT_IN, *sorted(registered - set(BUILT_IN))]


@functools.cache
def find_kind(name: str) -> HookKind:
    """Return a kind; raises E007 when no package registers it, E011 when it is not importable."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    kind: HookKind | None = load_registered(HOOK_KINDS, name, "hook kind")
    if kind is None:
        names = kind_names()
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
    ``embed``, needs no layer.

    Raises:
        ActdsError: E007 for an unknown kind, a layer that the model or the kind lacks, or no layer
            at all.
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
