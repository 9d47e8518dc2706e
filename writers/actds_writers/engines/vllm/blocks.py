"""KV blocks: which request computed each, whether the present weights did, and if it was loaded.

Beside the data path: a hit on a block refers to the rows of the request that computed it, a block
of other weights has no row of the run, and neither has a step that read what was in a block whose
KV a connector failed to load. vLLM's runners ask the connector behind every forward which those
are, and the scheduler then lets the engine compute them (spec section 7.4).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from actds.errors import ActdsError


class LoadErrors:
    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self._blocks: set[int] = set()
        if not has_kv_transfer_group():
            return
        connector: Any = get_kv_transfer_group()
        get = connector.get_block_ids_with_load_errors

        def getting(*args: Any, **kwargs: Any) -> Any:
            blocks = get(*args, **kwargs)
            self._blocks |= set(blocks or ())
            return blocks

        connector.get_block_ids_with_load_errors = getting

    def touch(self, scheduled: Any) -> bool:
        blocks, self._blocks = self._blocks, set()
        return were_read(blocks, scheduled)


def were_read(blocks: Collection[int] | None, scheduled: Any) -> bool:
    """Return whether the forward of a step read one of some blocks that were not loaded.

    Blocks are loaded for requests that are new or resumed in a step. Those of requests that still
    wait for theirs have been read by nobody.
    """
    if not blocks:
        return False
    admitted, _ = blocks_of_step(scheduled)
    return any(
        not set(blocks).isdisjoint(group) for groups in admitted.values() for group in groups
    )


def refuse_unseen(scheduler: Any, scheduled: Any, result: Any) -> None:
    """Stop where the worker that captures cannot know of every row on blocks that were not loaded.

    Another rank may have failed to load its share; and a step that was scheduled before the results
    of this one were seen has read the same blocks.

    Raises:
        ActdsError: E501 when the forward read blocks that were not loaded, and either holds.
    """
    failed = getattr(result.kv_connector_output, "invalid_block_ids", None)
    config = scheduler.vllm_config
    ranks, batches = int(config.parallel_config.world_size), int(config.max_concurrent_batches)
    if (ranks > 1 or batches > 1) and were_read(failed, scheduled):
        raise ActdsError(
            "E501",
            f"step {scheduled._actds.step}",
            got=f"rows on KV blocks that could not be loaded, with {ranks} ranks and {batches} "
            "steps at a time",
            expected="KV that a model computed",
        )


Owner = tuple[int | None, int]
"""The request that computed a block, and the first position that it computed there itself: those
before came from outside."""


class Owners:
    """Who computed each prefix block; least recently used ones are forgotten first."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.requests: OrderedDict[bytes, Owner] = OrderedDict()

    def find(self, block: bytes) -> Owner | None:
        owner = self.requests.get(block)
        if owner is not None:
            self.requests.move_to_end(block)
        return owner

    def note(self, block: bytes, owner: Owner) -> None:
        self.requests[block] = owner
        self.requests.move_to_end(block)
        if self._limit is not None and len(self.requests) > self._limit:
            self.requests.popitem(last=False)


Blocks = Sequence[Sequence[int]]
"""Ids of the KV blocks of a request, by group of layers; 0 is none."""


class WrittenBlocks:
    """The KV blocks that the present weights have computed, since a change.

    Every other block that serves a request is of old weights, or of both.
    """

    def __init__(self, block_sizes: Collection[int]) -> None:
        self._sizes = tuple(block_sizes)
        self._ids: set[int] = set()

    def serve(self, blocks: Blocks, n_served: int) -> bool:
        """Return whether all blocks are known that serve the first positions of a request."""
        return all(
            self._ids.issuperset(set(served) - {0}) for served, _ in self._split(blocks, n_served)
        )

    def write(self, blocks: Blocks, n_served: int, *, mixed: bool) -> None:
        """Note the blocks behind those that serve a request, which computes them now.

        ``mixed``: on KV of other weights.
        """
        for _, new in self._split(blocks, n_served):
            if mixed:
                self._ids.difference_update(new)
            else:
                self._ids.update(new)

    def _split(
        self, blocks: Blocks, n_served: int
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for ids, size in zip(blocks, self._sizes, strict=True):
            n = -(-n_served // size)
            yield ids[:n], ids[n:]


def blocks_of_step(scheduled: Any) -> tuple[dict[str, Blocks], dict[str, Blocks]]:
    """Return by request all blocks of those that a step admits, and the further ones of others."""
    admitted: dict[str, Blocks] = {
        new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs
    }
    further: dict[str, Blocks] = {}
    cached = scheduled.scheduled_cached_reqs
    for request, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks is not None:
            (admitted if request in cached.resumed_req_ids else further)[request] = blocks
    return admitted, further
