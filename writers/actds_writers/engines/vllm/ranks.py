"""Which worker captures what: tensor-parallel ranks and pipeline stages of one vLLM engine.

Every tensor-parallel rank holds the whole residual stream, so the first of each group captures;
of the heads every rank has some, which are gathered. Every pipeline stage has layers of its own, so
each stage captures the hooks of its layers.
"""

from __future__ import annotations

from typing import Any

import torch

from actds.errors import ActdsError
from actds_writers.capture.taps import decoder_layers
from actds_writers.ipc.link import Link


def stage_of(worker: Any) -> int:
    """Return the pipeline stage of a worker, from 0."""
    from vllm.distributed import get_pp_group

    return int(get_pp_group().rank_in_group) if _n_stages(worker) > 1 else 0


def stage_layers(worker: Any, model: torch.nn.Module) -> frozenset[int] | None:
    """Return the decoder layers that a worker's pipeline stage has, ``None`` for all."""
    return frozenset(decoder_layers(model)) if _n_stages(worker) > 1 else None


def captures(worker: Any, model: torch.nn.Module, link: Link) -> bool:
    """Return whether a worker captures: it is the first of its group, and its stage has a hook."""
    from vllm.distributed import get_tp_group

    if get_tp_group().rank_in_group:
        return False
    layers = stage_layers(worker, model)
    return layers is None or any(layer in layers for _, layer in link.hooks)


def whole(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows of all heads from those of each tensor-parallel rank; every rank has to call it.

    Args:
        part: ``(n, k)``, heads of this rank; ranks that share a head have it one after the other.
        width: channels of all heads, each once.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    every = tensor_model_parallel_all_gather(part.contiguous(), dim=-1)
    n_copies = every.shape[-1] // width
    if n_copies > 1:
        ranks = every.unflatten(-1, (get_tensor_model_parallel_world_size(), -1))
        every = ranks[:, ::n_copies].flatten(1)
    rows: torch.Tensor = every
    return rows


def execute(worker: Any, scheduled: Any) -> None:
    """Run a step that is in no account, on every pipeline stage."""
    step = type(worker).execute_model
    # Past the plugin's wrapper. The worker, not its runner, hands a step on to the next stage.
    getattr(step, "__wrapped__", step)(worker, scheduled)


def share_tokens(output: Any) -> dict[str, list[int]]:
    """Return the tokens that the last pipeline stage sampled, by request, on every stage.

    Args:
        output: of ``sample_tokens`` on this worker; of use on the last stage only, where ``None``
            says that the step failed.

    Raises:
        ActdsError: E504 when the last stage has failed.
    """
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    found: dict[str, list[int]] | None = None
    if group.is_last_rank and output is not None:
        sampled = zip(output.req_ids, output.sampled_token_ids, strict=True)
        found = {request: [int(token) for token in tokens] for request, tokens in sampled}
    found = group.broadcast_object(found, src=group.world_size - 1)
    if found is None:
        raise ActdsError(
            "E504",
            "check of the hooks",
            got="a pipeline stage failed; see its message",
            expected="a step on every stage",
        )
    return found


def _n_stages(worker: Any) -> int:
    return int(worker.vllm_config.parallel_config.pipeline_parallel_size)
