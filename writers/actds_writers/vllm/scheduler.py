"""Witness A: what the scheduler decided, told to the census process.

Stands at the engine's scheduler, outside the token's way: it never sees a row. It numbers
requests and steps, and knows which request computed each prefix block, so that a prefix hit can
name the position where the same token was computed.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from actds_writers.messages import (
    LeftOut,
    Reference,
    RequestArrived,
    RequestFinished,
    StepScheduled,
)

DIGEST_NBYTES = 16
"""Bytes kept of each prefix-block digest."""


@dataclass
class _Tracked:
    number: int
    high_water: int = 0
    n_owned_blocks: int = 0


@dataclass(frozen=True)
class StepMark:
    """What rides on a ``SchedulerOutput`` to the workers.

    Args:
        step: number of the step in the run.
        numbers: request number by engine id, for requests that are new to the workers.
        finished: numbers of the requests that ended since the step before.
        left_out: what the sampling rules say, by engine id, where they leave anything out.
    """

    step: int
    numbers: dict[str, int]
    finished: tuple[int, ...]
    left_out: dict[str, LeftOut] = field(default_factory=dict)


class SchedulerWitness:
    """Follows one scheduler.

    Args:
        census: connection to the census process.
        block_size: tokens of a prefix block.
    """

    def __init__(self, census: Connection, block_size: int) -> None:
        self._census = census
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._owners: dict[bytes, int] = {}
        self._n_requests = 0
        self._step = -1
        self._finished: list[int] = []

    def arrived(self, request: Any) -> None:
        """Number a request that the scheduler took."""
        if request.request_id in self._tracked:
            return
        tracked = _Tracked(self._n_requests)
        self._n_requests += 1
        self._tracked[request.request_id] = tracked
        n_blocks = request.num_prompt_tokens // self._block_size
        digests = tuple(bytes(h)[:DIGEST_NBYTES] for h in request.block_hashes[:n_blocks])
        self._census.send(
            RequestArrived(
                request=tracked.number,
                internal_id=request.request_id,
                external_id=request.request_id.rsplit("-", 1)[0],
                prompt_len=request.num_prompt_tokens,
                arrival_ns=int(request.arrival_time * 1e9),
                sampling=_sampling(request.sampling_params),
                block_digests=digests or None,
            )
        )

    def scheduled(self, scheduler: Any, output: Any, preempted: tuple[str, ...]) -> StepMark:
        """Tell what a call of ``schedule`` decided; return the mark for the workers."""
        self._step += 1
        n_tokens = output.num_scheduled_tokens
        finished = tuple(self._finished)
        numbers = {request: self._tracked[request].number for request in n_tokens}
        if n_tokens:
            self._finished.clear()  # an empty step reaches no worker
            requests, starts, counts = [], [], []
            references: list[Reference] = []
            for engine_id, count in n_tokens.items():
                request, tracked = scheduler.requests[engine_id], self._tracked[engine_id]
                # schedule() has advanced the count by what it scheduled.
                start = request.num_computed_tokens - count
                references += self._references(request, tracked, start)
                tracked.high_water = max(tracked.high_water, start + count)
                self._own_blocks(request, tracked)
                requests.append(tracked.number)
                starts.append(start)
                counts.append(count)
            self._census.send(
                StepScheduled(
                    step=self._step,
                    t_ns=time.time_ns(),
                    requests=np.array(requests, np.int64),
                    starts=np.array(starts, np.int64),
                    n_tokens=np.array(counts, np.int64),
                    references=tuple(references),
                    waiting=len(scheduler.waiting),
                    running=len(scheduler.running),
                    preempted=tuple(self._tracked[p].number for p in preempted),
                    kv_usage=float(scheduler.kv_cache_manager.usage),
                )
            )
        return StepMark(self._step, numbers, finished)

    def finished(self, request: Any) -> None:
        """Tell how a request ended."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._finished.append(tracked.number)
        reason = request.get_finished_reason()
        # Nothing sampled: the whole prompt is owed, as in spec section 7.1.
        n_fed = request.num_prompt_tokens + max(request.num_output_tokens - 1, 0)
        ids = np.array(request.all_token_ids[:n_fed], dtype="<u4")
        self._census.send(
            RequestFinished(
                request=tracked.number,
                t_ns=time.time_ns(),
                reason=str(reason) if reason is not None else "abort",
                generated_len=request.num_output_tokens,
                token_digest=hashlib.sha256(ids.tobytes()).hexdigest(),
            )
        )

    def _references(self, request: Any, tracked: _Tracked, start: int) -> list[Reference]:
        """Return who computed the positions between the high-water mark and ``start``."""
        references: list[Reference] = []
        position = tracked.high_water
        while position < start:
            block = position // self._block_size
            stop = min((block + 1) * self._block_size, start)
            owner = None
            if block < len(request.block_hashes):
                owner = self._owners.get(bytes(request.block_hashes[block]))
            if references and references[-1].ref_request == owner:
                first = references.pop().start
            else:
                first = position
            references.append(Reference(tracked.number, first, stop, owner))
            position = stop
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, start // self._block_size)
        return references

    def _own_blocks(self, request: Any, tracked: _Tracked) -> None:
        """Note the blocks that this step completes as computed by this request."""
        n_full = min(tracked.high_water // self._block_size, len(request.block_hashes))
        for block in range(tracked.n_owned_blocks, n_full):
            # A block that was evicted and computed again is served from the new computation.
            self._owners[bytes(request.block_hashes[block])] = tracked.number
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, n_full)


def _sampling(params: Any) -> str | None:
    if params is None:
        return None
    fields = {
        "max_tokens": params.max_tokens,
        "min_p": str(params.min_p),
        "seed": params.seed,
        "temperature": str(params.temperature),
        "top_k": params.top_k,
        "top_p": str(params.top_p),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
