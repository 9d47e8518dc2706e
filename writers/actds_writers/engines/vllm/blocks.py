"""KV blocks: which request computed each, and whether the present weights did.

Beside the data path, in the scheduler: a hit on a block refers to the rows of the request that
computed it, and a block of other weights has no row of the run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

Owner = tuple[int | None, int]
"""The request that computed a block, and the first position that it computed there itself: those
before came from outside."""


class Owners:
    """Who computed each prefix block; least recently used ones are forgotten first."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.requests: OrderedDict[bytes, Owner] = OrderedDict()

    def find(self, block: bytes) -> Owner | None:
        """Return who computed a block, ``None`` when that is not known."""
        owner = self.requests.get(block)
        if owner is not None:
            self.requests.move_to_end(block)
        return owner

    def note(self, block: bytes, owner: Owner) -> None:
        """Note who computed a block last."""
        self.requests[block] = owner
        self.requests.move_to_end(block)
        if self._limit is not None and len(self.requests) > self._limit:
            self.requests.popitem(last=False)


Blocks = Sequence[Sequence[int]]
"""Ids of the KV blocks of a request, by group of layers; 0 is none."""


class WrittenBlocks:
    """The KV blocks that the present weights have computed, since a change.

    Every other block that serves a request is of old weights, or of both.

    Args:
        block_sizes: tokens of a block, by group.
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
        """Note the blocks behind those that serve a request: it computes them now.

        Args:
            mixed: whether it does so on KV of other weights.
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
