"""The residual stream in what a decoder layer returns.

First stage of the data path, before the capture op. Layers of many model classes return
``(hidden, residual)``, and the same pair of tensors means two things: in most of vLLM's models
the stream is their sum, in some (Cohere, EXAONE 4, StableLM) ``hidden`` holds it already and the
sum would count it twice. So the form is given by the caller, who has evidence, and is never
taken from the shape of a tuple alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from actds.errors import ActdsError

__all__ = ["StreamForm", "residual_stream"]

StreamForm = Literal["sum", "first", "unverified"]
"""Where the stream is in the output of a decoder layer.

``sum``: the first two tensors of a tuple, whose sum it is. ``first``: the output itself, or the
first tensor of a tuple. ``unverified``: nobody has looked at this model class; a single tensor and
a pair of one shape are taken as most models mean them, everything else is refused, and the check
of the hooks has to confirm it before the first row.
"""


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
    if isinstance(output, torch.Tensor):
        return f"one tensor {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        parts = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__
                 for part in output]  # fmt: skip
        return f"{len(parts)} parts: {', '.join(map(str, parts))}"[:200]
    return type(output).__name__
