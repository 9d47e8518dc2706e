"""Interventions in vLLM: which rows of a step are changed, and the keys of their KV blocks.

The scheduler's process knows of each request which positions are changed: a harvest tells it with
the request, and a client names an intervention. It puts that into the key of every KV block with
such a position, so that no other request is served from it; the blocks before it are shared, and
those behind it differ with it, as keys are chained. With each step it tells every rank what is
changed, and each notes it between the preparation of the inputs and the forward.

A step that lost what it was told would serve unchanged what was asked to be changed: so this does
not end with a capture that fails.
"""

from __future__ import annotations

from typing import Any

from actds.errors import ActdsError
from actds.format.interventions import Applied, applied
from actds_writers.capture.edits import Edits, Row
from actds_writers.engines import wrap
from actds_writers.engines.account import edits_of
from actds_writers.engines.vllm.requests import REGIME, named_by
from actds_writers.interventions import XARG, Planned
from actds_writers.ipc.link import Link

_PREPARE = ("_prepare_inputs", "prepare_inputs")
"""The method that orders the rows of a step, of the first and of the second generation."""
_OF_REQUEST, _OF_STEP = "_actds_applied", "_actds_edits"
KEY = "actds"
_planned: Planned | None = None
"""Interventions of the engine that this process builds; it may build several in turn."""
_is_keyed = False


def of_request(request: Any, planned: Planned) -> tuple[Applied, ...]:
    """Return which positions of a request are changed; it keeps the answer."""
    known: tuple[Applied, ...] | None = getattr(request, _OF_REQUEST, None)
    if known is None:
        params = request.sampling_params
        regime = (getattr(params, "extra_args", None) or {}).get(REGIME)
        if regime is not None:
            known = tuple(Applied(*part) for part in regime["applied"])
        else:
            name = named_by(params)
            about = {} if name is None else {f"xargs.{XARG}": name}
            known = applied(planned.interventions, about, int(request.num_prompt_tokens))
        setattr(request, _OF_REQUEST, known)
    return known


def key_blocks(planned: Planned | None) -> None:
    """Let the prefix cache tell blocks of changed rows from others, in this process."""
    global _planned, _is_keyed
    _planned = planned
    if planned is None or _is_keyed:
        return
    _is_keyed = True
    from vllm.v1.core import kv_cache_utils

    @wrap(kv_cache_utils, "generate_block_hash_extra_keys")
    def generating(generate: Any, request: Any, start: int, end: int, *args: Any, **kw: Any) -> Any:
        keys, *rest = generate(request, start, end, *args, **kw)
        if _planned is None:
            return keys, *rest
        parts = [
            (number, max(first, start), min(last, end), origin)
            for number, first, last, origin in of_request(request, _planned)
            if first < end and start < last
        ]
        if parts:
            keys = (*(keys or ()), (KEY, f"{_planned.sha256} {parts}"))
        return keys, *rest


def mark_step(scheduler: Any, output: Any, planned: Planned) -> None:
    """Tell the workers, with a step, what is changed of its requests."""
    changes: dict[str, tuple[int, tuple[Applied, ...]]] = {}
    for engine_id, count in output.num_scheduled_tokens.items():
        request = scheduler.requests[engine_id]
        parts = of_request(request, planned)
        if parts:
            # schedule() has advanced the count by what it scheduled.
            changes[engine_id] = (request.num_computed_tokens - count, parts)
    setattr(output, _OF_STEP, changes)


class Steering:
    """The edits of one worker.

    Raises:
        ActdsError: E007 where the model has no such place; E012 a runner that orders rows
            elsewhere.
    """

    def __init__(self, worker: Any, link: Link, **model: Any) -> None:
        self._runner = runner = worker.model_runner
        self.edits: Edits = edits_of(link, **model)
        name = next((name for name in _PREPARE if hasattr(runner, name)), None)
        if name is None:
            got = f"{type(runner).__name__}, whose steps are prepared elsewhere"
            raise ActdsError("E012", "intervene", got=got, expected="a runner that was tested")
        wrap(runner, name)(self._prepared)

    def _prepared(self, prepare: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare(scheduled, *args, **kwargs)
        batch = result if hasattr(result, "req_ids") else self._runner.input_batch
        changes = getattr(scheduled, _OF_STEP, {})
        rows, first = [], 0
        for engine_id in batch.req_ids:
            count = int(scheduled.num_scheduled_tokens.get(engine_id, 0))
            if engine_id in changes:
                rows.append(Row(first, count, *changes[engine_id]))
            first += count
        self.edits.set(first, rows)
        return result
