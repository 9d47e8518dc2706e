"""The check of the hooks in the transformers engine: a padded batch against prompts alone.

Stands between the installation of the hooks and the first step. The model is its own reference:
a plain forward of each prompt, whose layers and ``hidden_states`` have to agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture.check import HookCheck, bound, check_prompts, compare_with_forward
from actds_writers.capture.op import HookBuffers
from actds_writers.capture.reference import NoReferenceError, states_after_layers
from actds_writers.engines.transformers.batch import Batch, Sequence
from actds_writers.ipc.messages import HookSpec

__all__ = ["check_hooks"]


def check_hooks(
    model: Any, buffers: HookBuffers, hooks: tuple[HookSpec, ...], max_tokens: int
) -> HookCheck:
    """Return what the check of the hooks came to.

    Args:
        model: the hooked model.
        buffers: what its hooks write.
        hooks: the hooks, in the order of the buffers.
        max_tokens: tokens of a step at most.

    Raises:
        ActdsError: E507 when rows are not the model's; E007 when the model's layers do not return
            what it calls its hidden states.

    Spec: 0.1 section 9.1.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = check_prompts(vocabulary, max_tokens)
    rows = _rows(model, buffers, prompts, max_tokens)
    try:
        states = np.concatenate(states_after_layers(model, prompts), axis=1)
    except NoReferenceError as missing:
        raise ActdsError(
            "E007",
            type(model).__name__,
            got=f"no stream to capture: {missing}",
            expected="decoder layers that return the residual stream",
            next_step="See docs/families.md for models that can be harvested.",
        ) from None
    computed = str(model.dtype).removeprefix("torch.")
    return compare_with_forward(
        {hook.name: rows[index] for index, hook in enumerate(hooks)},
        {hook.name: hook.layer for hook in hooks},
        states,
        bound(computed, hooks[0].dtype),
    )


def _rows(
    model: Any, buffers: HookBuffers, prompts: tuple[list[int], ...], max_tokens: int
) -> np.ndarray:
    """Return the rows of a batch of the prompts, ``(n_hooks, n, d_model)``, prompt by prompt."""
    sequences = [
        Sequence(f"check-{number}", number, list(prompt), len(prompt), 1)
        for number, prompt in enumerate(prompts)
    ]
    found: dict[int, list[np.ndarray]] = {sequence.number: [] for sequence in sequences}
    batch, logits = Batch(model, sequences, max_tokens), None
    with torch.inference_mode():
        while logits is None:
            columns = batch.next_columns()
            buffers.reset()
            logits = batch.forward(columns)
            rows = buffers.rows[:, torch.from_numpy(columns.index).to(buffers.rows.device)]
            rows[buffers.seen == 0] = torch.nan
            parts = np.split(rows.float().cpu().numpy(), np.cumsum(columns.n_rows)[:-1], axis=1)
            for sequence, part in zip(columns.sequences, parts, strict=True):
                found[sequence.number].append(part)
    return np.concatenate([part for parts in found.values() for part in parts], axis=1)
