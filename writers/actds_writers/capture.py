"""The capture op: one in-graph copy per hook from the model into a staging buffer.

First stage of the token's way. Imports torch only; knows nothing of vLLM or transformers.

A Python hook that copies is traced away under compilation without any error. So the hook's body
is one custom op, traced into the graph, which also writes how many rows it saw; the worker
compares that with the schedule at every step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from actds.errors import ActdsError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
_library: Any = torch.library.Library("actds", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "capture(Tensor hidden, Tensor? residual, Tensor(a!) staging, Tensor(b!) seen) -> ()"
)


def _capture(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    staging: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    n_rows = min(hidden.shape[0], staging.shape[0])
    if residual is None:
        staging[:n_rows].copy_(hidden[:n_rows])
    else:
        torch.add(hidden[:n_rows], residual[:n_rows], out=staging[:n_rows])
    seen.fill_(hidden.shape[0])


def _capture_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    staging: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    return None


_library.impl("capture", _capture, "CompositeExplicitAutograd")
torch.library.register_fake("actds::capture", _capture_fake, lib=_library)


@dataclass(frozen=True)
class Staging:
    """Stage 1: where the hooks leave the rows of a step.

    Args:
        rows: ``(n_hooks, max_rows, d_model)`` in the stored type, on the model's device.
        seen: int64 ``(n_hooks,)``: rows each hook saw in the last step, 0 when it did not run.
    """

    rows: torch.Tensor
    seen: torch.Tensor

    def reset(self) -> None:
        """Forget what the hooks saw, before a step."""
        self.seen.zero_()


def decoder_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return the decoder layers of a model by number, found by module path."""
    layers: dict[int, torch.nn.Module] = {}
    for path, module in model.named_modules():
        found = _LAYER.search(path)
        if found and not type(module).__name__.startswith("PPMissing"):
            layers[int(found.group(1))] = module
    return layers


def install(
    model: torch.nn.Module,
    layers: list[int],
    *,
    max_rows: int,
    d_model: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Staging:
    """Hook decoder layers so that every forward leaves their residual stream in staging.

    Must run after the weights are loaded and before the model is compiled.

    Args:
        model: the loaded model.
        layers: decoder layers, in the order of the staging rows.
        max_rows: rows of the largest step.
        d_model: channels of the residual stream.
        dtype: type of the stored rows; a cast happens when the model computes in another.
        device: device of the model.

    Raises:
        ActdsError: E007 when a layer does not exist.

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
    staging = Staging(
        rows=torch.zeros(len(layers), max_rows, d_model, dtype=dtype, device=device),
        seen=torch.zeros(len(layers), dtype=torch.int64, device=device),
    )
    for index, layer in enumerate(layers):
        _hook(found[layer], staging.rows[index], staging.seen[index : index + 1])
    return staging


def _hook(module: torch.nn.Module, rows: torch.Tensor, seen: torch.Tensor) -> None:
    # Attributes of the module, so that the compiled graph takes them as inputs of the layer.
    module._actds_rows = rows
    module._actds_seen = seen
    module.register_forward_hook(_forward_hook)


def _forward_hook(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    hidden, residual = _residual_stream(output)
    torch.ops.actds.capture(hidden, residual, module._actds_rows, module._actds_seen)


def _residual_stream(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return hidden and residual of a layer's output; their sum is the residual stream.

    Rows of a padded batch, ``(batch, width, d_model)``, are laid flat.
    """
    if not isinstance(output, tuple):
        return output.flatten(0, -2), None
    hidden = output[0]
    if len(output) > 1 and isinstance(output[1], torch.Tensor) and output[1].shape == hidden.shape:
        return hidden.flatten(0, -2), output[1].flatten(0, -2)
    return hidden.flatten(0, -2), None
