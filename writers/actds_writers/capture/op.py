"""The capture op: one in-graph copy per hook from the model into a buffer, and its readouts.

First stage of the token's way. Imports torch only; knows nothing of vLLM or transformers.

A Python hook that copies is traced away under compilation without any error. So the hook's body
is one custom op, traced into the graph, which also writes how many rows it saw; the worker
compares that with the schedule at every step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.streams import StreamForm, residual_stream

_LAYER = re.compile(r"((?:.*\.)?(?:layers|h|blocks))\.(\d+)")
_LANGUAGE_MODEL = ("get_language_model", "get_decoder")
"""Methods by which a composed model names the part that decodes: of vLLM, of transformers."""
_library: Any = torch.library.Library("actds", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("capture(Tensor hidden, Tensor? residual, Tensor(a!) rows, Tensor(b!) seen) -> ()")
_library.define(
    "capture_and_read(Tensor hidden, Tensor? residual, Tensor(a!) rows, Tensor(b!) seen, "
    "Tensor directions, Tensor(c!) scratch, Tensor(d!) readouts) -> ()"
)


def _capture(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    n_rows = min(hidden.shape[0], rows.shape[0])
    if residual is None:
        rows[:n_rows].copy_(hidden[:n_rows])
    else:
        torch.add(hidden[:n_rows], residual[:n_rows], out=rows[:n_rows])
    seen.fill_(hidden.shape[0])


def _capture_and_read(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    seen: torch.Tensor,
    directions: torch.Tensor,
    scratch: torch.Tensor,
    readouts: torch.Tensor,
) -> None:
    _capture(hidden, residual, rows, seen)
    n_rows = min(hidden.shape[0], rows.shape[0])
    # From the row as it is stored, so that anybody can compute the readout again.
    values = scratch[:n_rows]
    values.copy_(rows[:n_rows])
    torch.linalg.vector_norm(values, dim=1, out=readouts[:n_rows, 0])
    torch.mm(values, directions, out=readouts[:n_rows, 1:])


def _fake(*_: Any) -> None:
    return None


for _name, _body in (("capture", _capture), ("capture_and_read", _capture_and_read)):
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"actds::{_name}", _fake, lib=_library)


@dataclass(frozen=True)
class HookBuffers:
    """Where the hooks leave what they saw of a step; the same memory at every step.

    Args:
        rows: ``(n_hooks, max_rows, d_model)`` in the stored type, on the model's device.
        seen: int64 ``(n_hooks,)``: rows each hook saw in the last step, 0 when it did not run.
        readouts: float32 ``(n_hooks, max_rows, n_readouts)``, no column without readouts.
        beside_nbytes: what the readouts need beside: directions and scratch.
    """

    rows: torch.Tensor
    seen: torch.Tensor
    readouts: torch.Tensor
    beside_nbytes: int = 0

    def reset(self) -> None:
        """Forget what the hooks saw, before a step."""
        self.seen.zero_()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        tensors = (self.rows, self.seen, self.readouts)
        return self.beside_nbytes + sum(tensor.nbytes for tensor in tensors)


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


def install(
    model: torch.nn.Module,
    layers: list[int],
    *,
    max_rows: int,
    d_model: int,
    dtype: torch.dtype,
    device: torch.device,
    form: StreamForm,
    directions: np.ndarray | None = None,
) -> HookBuffers:
    """Hook decoder layers so that every forward leaves their residual stream in the buffers.

    Must run after the weights are loaded and before the model is compiled.

    Args:
        model: the loaded model.
        layers: decoder layers, in the order of the buffers.
        max_rows: rows of the largest step, padding included.
        d_model: channels of the residual stream.
        dtype: type of the stored rows; a cast happens when the model computes in another.
        device: device of the model.
        form: where the residual stream is in what a decoder layer returns.
        directions: float32 ``(n_hooks, d_model, n_products)`` of the readouts, ``None`` for no
            readouts.

    Raises:
        ActdsError: E007 when a layer does not exist, or several lists could be the decoder's. A
            layer whose output does not have the form raises it at the first forward.

    Spec: 0.1 section 3.1.
    """
    found = decoder_layers(model)
    missing = [layer for layer in layers if layer not in found]
    if missing:
        raise ActdsError(
            "E007",
            f"resid_post:{missing[0]}",
            got="no such decoder layer",
            expected=f"a layer of 0-{max(found, default=-1)}",
        )
    n_readouts = 0 if directions is None else 1 + directions.shape[2]
    buffers = HookBuffers(
        rows=torch.zeros(len(layers), max_rows, d_model, dtype=dtype, device=device),
        seen=torch.zeros(len(layers), dtype=torch.int64, device=device),
        readouts=torch.zeros(len(layers), max_rows, n_readouts, device=device),
        beside_nbytes=0 if directions is None else directions.nbytes + 4 * max_rows * d_model,
    )
    for index, layer in enumerate(layers):
        _hook(found[layer], buffers, index, form, f"{type(model).__name__} layer {layer}")
    if directions is not None:
        # One scratch for all: the layers run one after the other.
        scratch = torch.empty(max_rows, d_model, device=device)
        for index, layer in enumerate(layers):
            matrix = torch.from_numpy(np.ascontiguousarray(directions[index])).to(device)
            _read_out(found[layer], buffers, index, matrix, scratch)
    return buffers


def _hook(
    module: torch.nn.Module, buffers: HookBuffers, index: int, form: StreamForm, place: str
) -> None:
    # Attributes of the module, so that the compiled graph takes them as inputs of the layer.
    module._actds_rows = buffers.rows[index]
    module._actds_seen = buffers.seen[index : index + 1]
    module._actds_directions = None  # type: ignore[assignment]
    module._actds_form, module._actds_place = form, place  # type: ignore[assignment]
    module.register_forward_hook(_forward_hook)


def _read_out(
    module: torch.nn.Module,
    buffers: HookBuffers,
    index: int,
    directions: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    module._actds_directions = directions
    module._actds_scratch = scratch
    module._actds_readouts = buffers.readouts[index]


def _forward_hook(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    form, place = cast("StreamForm", module._actds_form), cast(str, module._actds_place)
    hidden, residual = residual_stream(output, form, place)
    rows, seen = module._actds_rows, module._actds_seen
    if module._actds_directions is None:
        torch.ops.actds.capture(hidden, residual, rows, seen)
    else:
        torch.ops.actds.capture_and_read(
            hidden,
            residual,
            rows,
            seen,
            module._actds_directions,
            module._actds_scratch,
            module._actds_readouts,
        )
