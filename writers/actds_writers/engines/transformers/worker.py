"""Both sides of the account in the transformers engine, and the check of its hooks.

After every forward the worker side selects the rows of real tokens from the padded ones. There is
no prefix cache and no preemption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds_writers.capture import op as capture
from actds_writers.capture.check import (
    HookCheck,
    NoReferenceError,
    bound,
    check_prompts,
    compare_with_forward,
    reference_states,
)
from actds_writers.capture.hooks import decoder_layers
from actds_writers.engines.account import (
    SchedulerSide,
    WorkerSide,
    layer_config,
    reporting_failure,
)
from actds_writers.engines.transformers import Options
from actds_writers.engines.transformers.batch import Batch, Columns, Sequence
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact, HookSpec
from actds_writers.provenance import Readers, engine_facts, observed

NO_BLOCKS = "a transformers cache has no blocks"


class Scheduler(SchedulerSide):
    """The scheduler side: reports batches to the census."""

    def scheduled(
        self, columns: Columns, waiting: int, running: int
    ) -> tuple[int, tuple[int, ...]]:
        """Report a step; return its number and the requests that ended since the last one."""
        starts = np.concatenate([[0], np.cumsum(columns.n_rows)[:-1]])
        return self.number_step(
            [sequence.number for sequence in columns.sequences],
            columns.positions[starts].tolist(),
            columns.n_rows.tolist(),
            waiting=waiting,
            running=running,
        )

    def finished(self, sequence: Sequence, reason: str) -> None:
        """Report the end of a request."""
        self.end_request(sequence.number, reason, sequence.token_ids, sequence.prompt_len)


class Capture(WorkerSide):
    """The worker side: captures from one transformers model.

    Args:
        max_rows: rows of the largest step, padding included.

    Raises:
        ActdsError: E007 unknown layer or none that can be captured, E012 a type that cannot be
            stored, E507 rows that are not the model's.
    """

    def __init__(self, model: Any, link: Link, max_rows: int) -> None:
        layers = decoder_layers(model)
        config = model.config.get_text_config()
        with reporting_failure(link):
            if not layers:
                raise ActdsError(
                    "E007",
                    type(model).__name__,
                    got="no module named layers.N",
                    expected="a model whose decoder layers are found by that name",
                )
            super().__init__(
                model,
                link,
                config=layer_config(config, int(config.hidden_size), len(layers)),
                computed=model.dtype,
                device=model.device,
                max_rows=max_rows,
            )
        if link.settings.check:
            try:
                self.check(lambda: check_hooks(model, self.buffers, self.hooks, max_rows))
            except ActdsError:
                self.close()
                raise

    def after_step(
        self,
        step: int,
        finished: tuple[int, ...],
        columns: Columns,
        input_ids: torch.Tensor,
        duration_ns: int,
    ) -> None:
        """Hand over the rows of the step that just ran.

        Args:
            finished: requests that ended before it.
            columns: requests and positions of its rows.
            input_ids: what the model read, ``(n_requests, width)``.

        Raises:
            ActdsError: E501 when a hook did not see every row, E502 when the writer is gone.
        """
        n, n_padded = len(columns.index), input_ids.numel()
        seen = set(self.buffers.seen.tolist())
        if seen != {n_padded}:
            got = f"{' or '.join(map(str, sorted(seen)))} rows at a hook"
            self.stop(step, got, f"{n_padded} rows")
        index = torch.from_numpy(columns.index).to(input_ids.device)
        if n < n_padded:
            self.buffers.compact(index)
        self.hand_over(
            step,
            [sequence.number for sequence in columns.sequences],
            columns.n_rows.tolist(),
            [sequence.prompt_len for sequence in columns.sequences],
            input_ids.flatten()[index],
            torch.from_numpy(columns.positions).to(input_ids.device),
            finished=finished,
            duration_ns=duration_ns,
            kernel_mode="eager",
        )


def check_hooks(
    model: Any, buffers: capture.HookBuffers, hooks: tuple[HookSpec, ...], max_tokens: int
) -> HookCheck:
    """Return the result of the check of the hooks.

    Args:
        model: the hooked model.
        max_tokens: tokens per step.

    Raises:
        ActdsError: E507 when rows are not the model's; E007 when the model's layers do not return
            its own hidden states.

    Spec: 0.1 section 9.1.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = check_prompts(vocabulary, max_tokens)
    rows = _rows(model, buffers, prompts, max_tokens)
    kinds = sorted({hook.kind for hook in hooks})
    try:
        states = reference_states(model, prompts, kinds)
    except NoReferenceError as missing:
        raise ActdsError(
            "E007",
            type(model).__name__,
            got=f"no stream to capture: {missing}",
            expected="decoder layers that return the residual stream",
            next_step="See docs/families.md for models that can be harvested.",
        ) from None
    computed = str(model.dtype).removeprefix("torch.")
    bounds = {hook.name: bound(computed, hook.dtype) for hook in hooks}
    return compare_with_forward(dict(zip(hooks, rows, strict=True)), states, bounds)


def _rows(
    model: Any, buffers: capture.HookBuffers, prompts: tuple[list[int], ...], max_tokens: int
) -> list[np.ndarray]:
    """Return the rows of the prompts as one batch, ``(n, d_model)`` by hook."""
    sequences = [
        Sequence(f"check-{number}", number, list(prompt), len(prompt), 1)
        for number, prompt in enumerate(prompts)
    ]
    found: list[list[list[np.ndarray]]] = [[[] for _ in sequences] for _ in buffers.rows]
    batch, logits = Batch(model, sequences, max_tokens), None
    with torch.inference_mode():
        while logits is None:
            columns = batch.next_columns()
            buffers.reset()
            logits = batch.forward(columns)
            index = torch.from_numpy(columns.index).to(buffers.device)
            edges = np.cumsum(columns.n_rows)[:-1]
            for of_hook, rows, seen in zip(found, buffers.rows, buffers.seen, strict=True):
                values = rows[index].float().cpu().numpy()
                if not int(seen):
                    values[:] = np.nan
                for sequence, part in zip(columns.sequences, np.split(values, edges), strict=True):
                    of_hook[sequence.number].append(part)
    return [np.concatenate([part for parts in of_hook for part in parts]) for of_hook in found]


def observe(
    model: Any,
    cache: Any,
    engine: type,
    folder: Path,
    options: Options,
    max_model_len: int,
    client_pid: int,
) -> tuple[Fact, ...]:
    """Return the facts of the run record that can be observed after the first forward."""

    def version() -> str:
        import transformers

        return str(transformers.__version__)

    name = f"{engine.__module__}.{engine.__qualname__}"
    quantization = getattr(model.config, "quantization_config", None)
    readers: Readers = {
        "engine.name": lambda: "transformers",
        "engine.version": version,
        "engine.runner": lambda: name,
        "engine.scheduler": lambda: name,
        "model.d_model": lambda: int(model.config.get_text_config().hidden_size),
        "model.quantization": lambda: str(
            getattr(quantization, "quant_method", None) or quantization or "none"
        ),
        "numerics.dtype": lambda: str(model.dtype).removeprefix("torch."),
        "numerics.kv_cache_dtype": lambda: _cache_dtype(cache),
        "numerics.kv_cache_class": lambda: type(cache).__name__,
        "numerics.attention_backend": lambda: str(model.config._attn_implementation),
        "serving.enforce_eager": lambda: not hasattr(model, "_orig_mod"),
        "serving.compilation_mode": lambda: "NONE",
        "serving.cudagraph_mode": lambda: "NONE",
        "serving.prefix_caching": lambda: False,
        "serving.chunked_prefill": lambda: True,
        "serving.async_scheduling": lambda: False,
        "serving.max_model_len": lambda: max_model_len,
        "serving.max_num_seqs": lambda: options.max_num_seqs,
        "serving.max_num_batched_tokens": lambda: options.max_num_batched_tokens,
        "serving.tensor_parallel": lambda: 1,
        "serving.pipeline_parallel": lambda: 1,
        "serving.data_parallel": lambda: 1,
        "serving.speculative_method": lambda: "none",
    }
    absent = ("serving.block_size", "serving.n_kv_blocks")
    return (
        *engine_facts(
            readers, model=model, folder=folder, device=model.device, client_pid=client_pid
        ),
        *(observed(field, None, NO_BLOCKS) for field in absent),
    )


def _cache_dtype(cache: Any) -> str:
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            return str(keys.dtype).removeprefix("torch.")
    raise AttributeError("no attention layer in the cache")
