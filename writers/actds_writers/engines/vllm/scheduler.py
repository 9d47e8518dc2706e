"""The scheduler side of the account in vLLM: requests, steps and prefix-cache hits.

It remembers which request computed each prefix block, so that a hit can name the request whose row
was reused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from actds.errors import ActdsError
from actds_writers.engines.account import Channel, SchedulerSide
from actds_writers.ipc.messages import Reference
from actds_writers.sampling import EVERYTHING, Labels, LeftOut, SamplingRules

DIGEST_NBYTES = 16
"""Bytes kept of each prefix-block digest."""
OWNERS_PER_BLOCK = 4
"""Remembered prefix blocks per KV block: a block in use may be touched less often than new ones are
added, and a hit on a forgotten block cannot be resolved."""
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}")


@dataclass
class _Tracked:
    number: int
    left_out: LeftOut
    high_water: int = 0
    n_owned_blocks: int = 0


@dataclass(frozen=True)
class StepMark:
    """What a ``SchedulerOutput`` carries to the workers.

    Args:
        numbers: request number by engine id.
        finished: numbers of the requests that ended since the last step.
        left_out: by engine id, what the sampling rules leave out.
    """

    step: int
    numbers: dict[str, int]
    finished: tuple[int, ...]
    left_out: dict[str, LeftOut] = field(default_factory=dict)


class VllmSchedulerSide(SchedulerSide):
    """Follows one vLLM scheduler.

    Args:
        block_size: tokens per prefix block.
        n_blocks: KV blocks of the cache; bounds the remembered prefix blocks.
    """

    def __init__(
        self,
        census: Channel,
        block_size: int,
        n_blocks: int | None = None,
        rules: SamplingRules | None = None,
    ) -> None:
        super().__init__(census)
        self._block_size = block_size
        self._rules = rules
        self._tracked: dict[str, _Tracked] = {}
        self.owners = _Owners(None if n_blocks is None else OWNERS_PER_BLOCK * n_blocks)

    def arrived(self, request: Any) -> None:
        """Number and report a request that the scheduler took.

        Raises:
            ActdsError: E012 for streamed input, whose prompt grows.
        """
        if getattr(request, "resumable", False):
            raise ActdsError(
                "E012",
                f"request {request.request_id[:80]}",
                got="a session with streamed input",
                expected="requests whose prompt is known at arrival",
            )
        if request.request_id in self._tracked:
            return
        external_id = _external_id(request.request_id)
        left_out = self._left_out(request, external_id)
        n_blocks = request.num_prompt_tokens // self._block_size
        number = self.number_request(
            external_id,
            request.num_prompt_tokens,
            _sampling(request.sampling_params),
            internal_id=request.request_id,
            arrival_ns=int(request.arrival_time * 1e9),
            block_digests=tuple(bytes(h)[:DIGEST_NBYTES] for h in request.block_hashes[:n_blocks]),
            left_out=left_out,
        )
        self._tracked[request.request_id] = _Tracked(number, left_out)

    def scheduled(self, scheduler: Any, output: Any, preempted: tuple[str, ...]) -> StepMark:
        """Report the result of a call of ``schedule``; return the mark for the workers."""
        n_tokens = output.num_scheduled_tokens
        tracked_of = {request: self._tracked[request] for request in n_tokens}
        starts: list[int] = []
        references: list[Reference] = []
        for engine_id, count in n_tokens.items():
            request, tracked = scheduler.requests[engine_id], tracked_of[engine_id]
            # schedule() has advanced the count by what it scheduled.
            start = request.num_computed_tokens - count
            references += self._references(request, tracked, start)
            tracked.high_water = max(tracked.high_water, start + count)
            self._own_blocks(request, tracked)
            starts.append(start)
        step, finished = self.number_step(
            [tracked.number for tracked in tracked_of.values()],
            starts,
            list(n_tokens.values()),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            references=tuple(references),
            preempted=tuple(self._tracked[p].number for p in preempted),
            kv_usage=float(scheduler.kv_cache_manager.usage),
        )
        return StepMark(
            step,
            {request: tracked.number for request, tracked in tracked_of.items()},
            finished,
            {
                request: tracked.left_out
                for request, tracked in tracked_of.items()
                if tracked.left_out != EVERYTHING
            },
        )

    def finished(self, request: Any) -> None:
        """Report the end of a request."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        reason = request.get_finished_reason()
        self.end_request(
            tracked.number,
            str(reason) if reason is not None else "abort",
            list(request.all_token_ids[: request.num_prompt_tokens + request.num_output_tokens]),
            request.num_prompt_tokens,
        )

    def _left_out(self, request: Any, external_id: str) -> LeftOut:
        """Return why rows of a request are not stored: a rule, an adapter, or images."""
        if getattr(request, "lora_request", None) is not None:
            return LeftOut("unsupported:lora", "unsupported:lora")
        if getattr(request, "mm_features", None):
            return LeftOut("unsupported:multimodal", "unsupported:multimodal")
        if self._rules is None:
            return EVERYTHING
        params = request.sampling_params
        xargs = (params.extra_args if params is not None else None) or {}
        return self._rules.left_out(
            Labels(external_id, getattr(request, "session_id", None), xargs)
        )

    def _references(self, request: Any, tracked: _Tracked, start: int) -> list[Reference]:
        """Return the prefix-cache hits between the high-water mark and ``start``."""
        references: list[Reference] = []
        position = tracked.high_water
        while position < start:
            block = position // self._block_size
            stop = min((block + 1) * self._block_size, start)
            owner = None
            if block < len(request.block_hashes):
                owner = self.owners.find(bytes(request.block_hashes[block]))
            if references and references[-1].ref_request == owner:
                first = references.pop().start
            else:
                first = position
            references.append(Reference(tracked.number, first, stop, owner))
            position = stop
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, start // self._block_size)
        return references

    def _own_blocks(self, request: Any, tracked: _Tracked) -> None:
        """Note this request as the one that computed the blocks completed by this step."""
        n_full = min(tracked.high_water // self._block_size, len(request.block_hashes))
        for block in range(tracked.n_owned_blocks, n_full):
            # A block that was evicted and computed again is served from the new computation.
            self.owners.note(bytes(request.block_hashes[block]), tracked.number)
        tracked.n_owned_blocks = max(tracked.n_owned_blocks, n_full)


class _Owners:
    """The request that computed each prefix block; least recently used ones are forgotten first."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.requests: OrderedDict[bytes, int] = OrderedDict()

    def find(self, block: bytes) -> int | None:
        """Return the request that computed a block, ``None`` when that is not known."""
        owner = self.requests.get(block)
        if owner is not None:
            self.requests.move_to_end(block)
        return owner

    def note(self, block: bytes, request: int) -> None:
        """Note who computed a block last."""
        self.requests[block] = request
        self.requests.move_to_end(block)
        if self._limit is not None and len(self.requests) > self._limit:
            self.requests.popitem(last=False)


def _external_id(internal_id: str) -> str:
    """Return the client's id, without the random suffix that the engine adds."""
    return internal_id[:-9] if _RANDOM_SUFFIX.fullmatch(internal_id[-9:]) else internal_id


def _sampling(params: Any) -> dict[str, object] | None:
    if params is None:
        return None
    return {
        "max_tokens": params.max_tokens,
        "min_p": str(params.min_p),
        "seed": params.seed,
        "temperature": str(params.temperature),
        "top_k": params.top_k,
        "top_p": str(params.top_p),
    }
