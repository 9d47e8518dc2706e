"""The logits of a vLLM model runner: read where the model returns them, before any sampler.

Two generations of runners sample in different places: the first computes logits in
``execute_model``, the second in ``sample_tokens``; a method of each returns what was sampled. Both
compute logits outside CUDA graphs, so that a wrapper of the model's method sees every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from actds.errors import ActdsError

_SAMPLERS = ("_sample", "sample")
"""The method that samples, of the first and of the second generation."""


def watch(
    runner: Any,
    model: torch.nn.Module,
    on_logits: Callable[[torch.Tensor], None],
    on_tokens: Callable[[torch.Tensor], None],
) -> None:
    """Call back with the logits that a model returns, and with the tokens sampled from them.

    Args:
        runner: a vLLM model runner, its model loaded.
        model: the model itself.
        on_logits: called with ``(n, vocabulary)``, before anything changes it in place.
        on_tokens: called with the sampled token of each row, ``(n, 1)``.

    Raises:
        ActdsError: E012 for a runner that samples elsewhere.
    """
    name = next((name for name in _SAMPLERS if hasattr(runner, name)), None)
    compute: Any = getattr(model, "compute_logits", None)
    if name is None or compute is None or getattr(runner, "batch_sharder", None) is not None:
        raise ActdsError(
            "E012",
            "entropy",
            got=f"{type(runner).__name__} with {type(model).__name__}, which samples elsewhere",
            expected="a runner that samples from the logits of its model, on one rank",
        )
    sample = getattr(runner, name)

    @functools.wraps(compute)
    def computing(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if logits is not None:
            on_logits(logits)
        return logits

    @functools.wraps(sample)
    def sampling(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        sampled = output[0] if isinstance(output, tuple) else output
        on_tokens(sampled.sampled_token_ids)
        return output

    # On the objects: a class may be shared with a drafter's model.
    model.compute_logits = computing  # type: ignore[assignment]
    setattr(runner, name, sampling)
