"""Run rows: the requests of a run, what it dropped, and which readouts speak of no row.

Part of the third stage, before the passes. Imports `series`, `sources` and `ranges`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.format.positions import Index
from actds_validators.audit.ranges import StepRanges
from actds_validators.audit.series import RunSteps
from actds_validators.audit.sources import RunSource

__all__ = ["RunRows", "read_rows"]

Ints = npt.NDArray[np.int64]

# A row that a preemption made the engine compute again has several readouts, and an aborted one may
# have some. Of the requests that had either, only the readouts of stored and of dropped rows count,
# each at its own step.
_ODD = (
    "select request from requests where n_preemptions > 0 "
    "union select request from spans where disposition = 'aborted'"
)
_KEYS = 'step::bigint step, request::bigint request, "start"::bigint "start", "stop"::bigint "stop"'


@dataclass(frozen=True)
class RunRows:
    """The requests of a run and the positions that it lost.

    Args:
        steps: places of the steps that computed something.
        requests: places of the requests, of which the arrays below speak.
        prompt_len: tokens of the prompt, ``(n_requests,)``.
        request_len: positions owed, ``(n_requests,)``.
        source: prompt source of each, ``None`` unknown.
        first_step: place of the step in which each began, ``(n_requests,)``; the number of steps
            where it never did.
        losses: dropped positions.
        excluded: positions whose readouts count for nothing.
    """

    steps: Index
    requests: Index
    prompt_len: Ints
    request_len: Ints
    source: list[str | None]
    first_step: Ints
    losses: StepRanges
    excluded: StepRanges


def read_rows(source: RunSource, steps: RunSteps) -> RunRows:
    """Return the requests and losses of a run.

    Spec: 0.1 section 7.8.
    """
    found: pa.Table = source.connection.sql(
        "select request::bigint request, prompt_len::bigint prompt_len, prompt_len::bigint "
        "+ greatest(generated_len, 1) - 1 request_len, source from requests order by request"
    ).to_arrow_table()
    numbers, first = np.unique(found["request"].to_numpy(), return_index=True)
    index, requests = Index(steps.step), Index(numbers)
    return RunRows(
        steps=index,
        requests=requests,
        prompt_len=found["prompt_len"].to_numpy()[first],
        request_len=found["request_len"].to_numpy()[first],
        source=found["source"].take(first).to_pylist(),
        first_step=_first_steps(source, steps.step, requests),
        losses=_ranges(source, f"select {_KEYS} from drops where stop > start", index, requests),
        excluded=_excluded(source, index, requests),
    )


def _first_steps(source: RunSource, steps: Ints, requests: Index) -> Ints:
    """Return the place of the step in which each request began."""
    found = source.columns(
        "select request::bigint request, min(step)::bigint step from spans "
        "where step is not null group by request"
    )
    place = requests.of(found["request"])
    first = np.full(len(requests), len(steps), np.int64)
    known = place >= 0
    first[place[known]] = np.searchsorted(steps, found["step"][known])
    return first


def _excluded(source: RunSource, steps: Index, requests: Index) -> StepRanges:
    """Return the positions of readouts that are of no stored and no dropped row."""
    run = source.connection
    if not source.hooks or not source.one(f"select count(*) from ({_ODD})")[0]:
        empty = np.zeros(0, np.int64)
        return StepRanges(empty, empty, empty, empty)
    run.execute(f"create or replace temp table odd as {_ODD}")
    kept = (
        "select step, request, position from tokens semi join odd using (request) union all "
        "select step, request, unnest(range(start::bigint, stop::bigint))::uinteger from drops "
        "semi join odd using (request)"
    )
    odd = "select distinct step, request, position from readouts semi join odd using (request)"
    return _ranges(
        source,
        'select step::bigint step, request::bigint request, position::bigint "start", '
        f'position::bigint + 1 "stop" from ({odd}) anti join ({kept}) '
        "using (step, request, position)",
        steps,
        requests,
    )


def _ranges(source: RunSource, sql: str, steps: Index, requests: Index) -> StepRanges:
    """Return the ranges of a query that are of known steps and requests."""
    found = source.columns(sql)
    step, request = steps.of(found["step"]), requests.of(found["request"])
    known = (step >= 0) & (request >= 0)
    return StepRanges(step[known], request[known], found["start"][known], found["stop"][known])
