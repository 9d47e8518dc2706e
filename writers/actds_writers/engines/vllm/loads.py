"""KV blocks that a KV connector could not load, and the steps that read them nevertheless.

vLLM's runners ask the connector behind every forward which blocks failed, and the scheduler then
lets the engine compute them. Until then the forward has read whatever was in them, so that none of
its rows may be stored (spec section 7.4).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from actds.errors import ActdsError


class LoadErrors:
    """The blocks that this worker's connector could not load, forward by forward."""

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self._blocks: set[int] = set()
        if not has_kv_transfer_group():
            return
        connector: Any = get_kv_transfer_group()
        asked = connector.get_block_ids_with_load_errors

        def asking(*args: Any, **kwargs: Any) -> Any:
            blocks = asked(*args, **kwargs)
            self._blocks |= set(blocks or ())
            return blocks

        connector.get_block_ids_with_load_errors = asking

    def touch(self, scheduled: Any) -> bool:
        """Return whether the forward of a step read such a block, and forget them."""
        blocks, self._blocks = self._blocks, set()
        return were_read(blocks, scheduled)


def were_read(blocks: Collection[int] | None, scheduled: Any) -> bool:
    """Return whether the forward of a step read one of some blocks that were not loaded.

    Blocks are loaded for requests that are new or resumed in a step. Those of requests that still
    wait for theirs have been read by nobody.

    Args:
        scheduled: the step's ``SchedulerOutput``.
    """
    if not blocks:
        return False
    cached = scheduled.scheduled_cached_reqs
    resumed = [
        new
        for request, new in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if new is not None and request in cached.resumed_req_ids
    ]
    of_requests = [*(new.block_ids for new in scheduled.scheduled_new_reqs), *resumed]
    return any(not set(blocks).isdisjoint(group) for groups in of_requests for group in groups)


def refuse_unseen(scheduler: Any, scheduled: Any, result: Any) -> None:
    """Stop where the worker that captures cannot know of every row on blocks that were not loaded.

    Another rank may have failed to load its share; and a step that was scheduled before the results
    of this one were seen has read the same blocks.

    Args:
        scheduled: the step's ``SchedulerOutput``, with its mark.
        result: its ``ModelRunnerOutput``, of all ranks.

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
