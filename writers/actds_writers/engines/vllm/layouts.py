"""Row identity inside vLLM's model runners, read after the forward and before sampling.

Stands beside the capture op: it says which request, position and token every row belongs to.
Two runner generations keep these facts in different places; this module is the only one that
knows where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actds_writers.ipc.messages import IntArray


@dataclass(frozen=True)
class RowIdentity:
    """Who the rows of a step are.

    Args:
        request_ids: the engine's ids, in row order.
        n_rows: rows of each request.
        positions: ``(n,)`` on the device, valid until the next step.
        token_ids: ``(n,)`` on the device, the buffer that the model read.
    """

    request_ids: list[str]
    n_rows: IntArray
    positions: torch.Tensor
    token_ids: torch.Tensor


def identify(runner: Any, scheduled: Any) -> RowIdentity:
    """Return the identity of the rows that the last forward computed.

    Args:
        runner: the worker's model runner.
        scheduled: the ``SchedulerOutput`` of the step.
    """
    n = scheduled.total_num_scheduled_tokens
    state = getattr(runner, "execute_model_state", None)
    batch = getattr(state, "input_batch", None)
    if batch is not None:  # second generation
        order = list(batch.req_ids)
        buffers = runner.input_buffers
        token_ids, positions = buffers.input_ids[:n], buffers.positions[:n]
        edges = np.asarray(batch.query_start_loc_np[: len(order) + 1], dtype=np.int64)
        n_rows = np.diff(edges)
    else:
        order = list(runner.input_batch.req_ids)
        token_ids, positions = runner.input_ids.gpu[:n], _positions(runner)[:n]
        n_rows = np.array([scheduled.num_scheduled_tokens.get(r, 0) for r in order], np.int64)
    return RowIdentity(order, n_rows, positions, token_ids)


def _positions(runner: Any) -> Any:
    # A CpuGpuBuffer in some releases, a plain tensor in others.
    return getattr(runner.positions, "gpu", runner.positions)
