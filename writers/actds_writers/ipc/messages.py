"""The messages between the processes of a harvest: one frozen dataclass each.

They are sent pickled, a failure as the ``ActdsError`` itself; those that the census takes are also
lines of its journal, as JSON. Roles of positions are a letter each, or packed by their runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from actds.format.schema import CloseReason, DType, Origin, RowCounts
from actds_writers.sampling import EVERYTHING, HookNames, LeftOut

LETTERS = {
    "system": "s",
    "user": "u",
    "assistant": "a",
    "thinking": "k",
    "tool": "o",
    "template": "t",
}
"""The letter of each role of spec 6.3."""
UNKNOWN = "-"
_PACKED = re.compile(rf"(?:[{''.join(LETTERS.values())}{UNKNOWN}][0-9]{{1,9}})*")
_NAMES = {letter: role for role, letter in LETTERS.items()}


def packed(labels: str) -> str:
    """Return labels by their runs: ``t3u5t2`` for ``tttuuuuutt``."""
    return "".join(f"{label}{sum(1 for _ in run)}" for label, run in groupby(labels))


def count_packed(runs: str) -> int:
    """Return how many positions packed labels have; raises ValueError for another text."""
    if not _PACKED.fullmatch(runs):
        raise ValueError(f"no packed labels: {runs!r:.80}")
    return sum(int(length) for length in re.findall(r"\d+", runs))


def intervals(runs: str) -> list[tuple[int, int, str]]:
    """Return first position, position after the last and role of packed labels that are known."""
    places: list[tuple[int, int, str]] = []
    start = 0
    for label, length in re.findall(r"(\D)(\d+)", runs):
        stop = start + int(length)
        if places and places[-1][1:] == (start, _NAMES.get(label)):
            places[-1] = (places[-1][0], stop, places[-1][2])
        elif label != UNKNOWN:
            places.append((start, stop, _NAMES[label]))
        start = stop
    return places


def _as_integers(
    of: Callable[[list[int]], np.ndarray], to: Callable[[np.ndarray], list[int]]
) -> GetPydanticSchema:
    """Return how an array is written to the JSON of the census journal: as a list of integers."""

    def read(values: list[int]) -> np.ndarray:
        try:
            return of(values)
        except OverflowError as error:
            raise ValueError(str(error)) from None

    write = core_schema.plain_serializer_function_ser_schema(to)
    integers = core_schema.list_schema(core_schema.int_schema())
    return GetPydanticSchema(
        lambda _type, _handler: core_schema.no_info_after_validator_function(
            read, integers, serialization=write
        )
    )


IntArray = Annotated[
    np.ndarray[tuple[int], np.dtype[np.int64]],
    _as_integers(lambda integers: np.array(integers, np.int64), lambda array: array.tolist()),
]
# Of floats the bits: exact, and JSON has no word for what is not finite.
FloatArray = Annotated[
    np.ndarray[tuple[int], np.dtype[np.float32]],
    _as_integers(
        lambda bits: np.array(bits, np.uint32).view(np.float32),
        lambda array: array.view(np.uint32).tolist(),
    ),
]
BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class HookSpec:
    """A hook that the worker found in the model; ``stage`` is the pipeline stage that has it."""

    name: str
    kind: str
    layer: int
    d_model: int
    dtype: DType
    stage: int = 0


@dataclass(frozen=True)
class Fact:
    """One field of the run record; ``value`` is ``None`` when unknown, with the reason."""

    name: str
    value: bool | int | str | None
    origin: Origin
    reason: str | None = None


# worker → writer ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerHello:
    """The model is loaded: hooks, configuration, and the shared memory of ring and lane.

    Args:
        lane_path: of the readouts, ``None`` without readouts.
        memory_nbytes: all memory of the worker for capture, on device and host.
        stages: the hellos of several pipeline stages, in a hello that joins them.
    """

    hooks: tuple[HookSpec, ...]
    facts: tuple[Fact, ...]
    ring_path: str
    ring_nbytes: int
    max_step_rows: int
    lane_path: str | None = None
    lane_nbytes: int = 0
    memory_nbytes: int = 0
    stages: tuple[WorkerHello, ...] = ()

    @property
    def stage(self) -> int:
        return self.hooks[0].stage if self.hooks else 0


@dataclass(frozen=True)
class StepRows:
    """The rows of one step are in the ring, ``(n_hooks, n_rows, d_model)`` at ``offset``.

    Args:
        requests: number of each scheduled request, in row order.
        token_ids: token fed at each row, read from the device's own buffer.
        finished: requests that ended before this step.
        stalls: waits of the stages before the writer for this step.
        kept: bool ``(n,)``: rows that the sampling rules keep and that are drawn, ``None`` for all.
            Only these are in the ring; positions and token ids are of all computed rows.
        inclusion: float64 ``(n,)``: probability that each row was drawn with, ``None`` where
            none is drawn; ``wanted``, bool ``(n,)``: rows that rules alone would store, ``None``
            for all.
        interventions: uint16 ``(n,)``: number of the intervention that changed each row, 0 for
            none; ``None`` in a run without any.
        hooks: of each request, the hooks that it chose, ``None`` for all; empty where none did.
        t_ns: wall clock when the engine handed the step over.
        depth_stage1: slices in the staging ring after the rows had left it; ``depth_stage2``, in
            the host ring, this one included.
        parts: the same step of every pipeline stage, in a step that joins several; each part has
            its own place in its own ring.
    """

    step: int
    offset: int
    nbytes: int
    requests: IntArray
    n_rows: IntArray
    prompt_lens: IntArray
    positions: IntArray
    token_ids: IntArray
    finished: tuple[int, ...]
    stalls: tuple[Stall, ...] = ()
    kept: BoolArray | None = None
    t_ns: int = 0
    depth_stage1: int = 0
    depth_stage2: int = 0
    parts: tuple[StepRows, ...] = ()
    inclusion: np.ndarray | None = None
    wanted: BoolArray | None = None
    interventions: np.ndarray | None = None
    hooks: tuple[HookNames | None, ...] = ()

    @property
    def n_kept(self) -> int:
        return len(self.positions) if self.kept is None else int(np.count_nonzero(self.kept))

    @property
    def wanted_but_not_drawn(self) -> BoolArray | None:
        """Return which rows only the draw left out, ``None`` for none."""
        if self.inclusion is None or self.kept is None:
            return None
        return ~self.kept if self.wanted is None else self.wanted & ~self.kept


class QueueState(NamedTuple):
    """The queues behind the host ring at one moment; called like columns of ``steps``."""

    queue_depth_stage3: int
    compression_backlog_bytes: int
    disk_write_latency_p99: float | None


@dataclass(frozen=True)
class StepDropped:
    """An overflow policy dropped a whole step, whose place in the ring is no longer valid.

    Args:
        reason: ``queue_full``, ``dma_backpressure``, ``failed_load`` or ``readouts_full``.
        depth_stage1: slices in the staging ring then; ``depth_stage2``, in the host ring.
        queues: the writer's queues then, ``None`` before it has any.
    """

    rows: StepRows
    reason: str
    policy: str
    t_ns: int
    depth_stage1: int
    depth_stage2: int
    queues: QueueState | None = None


@dataclass(frozen=True)
class StepsDropped:
    """Consecutive drops, in step order; one acknowledgement answers them all."""

    losses: tuple[StepDropped, ...]


@dataclass(frozen=True)
class StepReadouts:
    """The readouts of one step are in the lane, float32 ``(n_hooks, n_rows, width)`` at ``offset``.

    Args:
        prompt_lens: of the request of each row.
        stall: the wait for room in the lane, if there was one.
        depth: slices in the lane, this one included.
        given_up: steps since the last message whose readouts found no room.
        finished: requests that have ended since the last message, before the step.
        entropy: of the logits of each row, NaN where there is none; None where nobody reads them.
    """

    step: int
    offset: int
    nbytes: int
    requests: IntArray
    positions: IntArray
    token_ids: IntArray
    prompt_lens: IntArray
    stall: Stall | None = None
    depth: int = 0
    given_up: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    entropy: FloatArray | None = None


@dataclass(frozen=True)
class Stall:
    """The stage before ``stage`` waited: ``staging``, ``ring``, ``pool`` or ``readouts``."""

    stage: str
    t_ns: int
    duration_ns: int
    depth: int
    step: int | None


@dataclass(frozen=True)
class StepAttention:
    """Lines of the table ``attention`` of one step, by column."""

    step: int
    columns: Mapping[str, list[Any]]


# writer → worker ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RingFree:
    """The writer has taken a step, from an offset of the ring or lane if it was not dropped."""

    offset: int | None


# writer → census and back ----------------------------------------------------------------------


@dataclass(frozen=True)
class Secure:
    """The writer is about to commit rows up to ``last_step``: make their census durable.

    ``n_drawing``: pipeline stages that say with which probability they drew each step.
    """

    last_step: int
    n_drawing: int = 0


@dataclass(frozen=True)
class Secured:
    last_step: int


# scheduler → census ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestArrived:
    """The scheduler took a request.

    Args:
        adapter: name and digest of its LoRA adapter.
        roles: of its prompt, as ``packed`` writes them, if the engine was told.
        turn: which conversation it is of, and its turn there.
    """

    request: int
    internal_id: str
    external_id: str
    prompt_len: int
    arrival_ns: int
    sampling: str | None
    block_digests: tuple[bytes, ...] | None = None
    left_out: LeftOut = EVERYTHING
    adapter: tuple[str, str | None] | None = None
    roles: str = ""
    turn: tuple[str | None, int | None] = (None, None)


@dataclass(frozen=True)
class Reference:
    """A cache hit: positions that a request reused, and the request that computed them.

    ``external``: their KV came from outside the run, so that none did.
    """

    request: int
    start: int
    stop: int
    ref_request: int | None
    external: bool = False


@dataclass(frozen=True)
class StepScheduled:
    """One call of the scheduler that scheduled tokens, and what its results were.

    Args:
        starts: first position that the step computes for each request.
        n_undelivered: of these, positions past the request's end, ``None`` for none.
        n_rejected: of these, the last ones: rows of rejected drafts, ``None`` for none. The
            undelivered ones stand before them, and what is kept before those.
        mixed: requests that this step admits on KV of other weights than the run's, so that no row
            of them is stored.
    """

    step: int
    t_ns: int
    requests: IntArray
    starts: IntArray
    n_tokens: IntArray
    references: tuple[Reference, ...]
    waiting: int
    running: int
    preempted: tuple[int, ...]
    kv_usage: float | None = None
    n_undelivered: IntArray | None = None
    n_rejected: IntArray | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    mixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokensSampled:
    """The tokens that requests got from a step, and the positions that these take.

    Sent when entropies are recorded.
    """

    step: int
    requests: IntArray
    positions: IntArray
    token_ids: IntArray


@dataclass(frozen=True)
class RequestFinished:
    """A request has left the scheduler.

    Args:
        reason: the engine's own, or ``unbegun`` of one that the next run of the engine serves.
        token_digest: SHA-256 of the token ids of ``[0, P+G-1)`` as uint32 LE; empty when unbegun.
        cached_as_reported: whether the engine's own count of cached tokens is of those that it
            served; else it counts some that were then computed.
        roles: of ``[P, P+G-1)``, where those of the prompt came with the arrival.
    """

    request: int
    t_ns: int
    reason: str
    generated_len: int
    token_digest: str
    cached_as_reported: bool = True
    roles: str = ""


# worker → census ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepExecuted:
    """The model ran a step and its rows were handed over.

    Args:
        queue_depth_readouts: steps in the lane of readouts, ``None`` without one.
        stage: pipeline stage of the worker; the census keeps the message of the last one.

    A field that is called like a column of ``steps`` is its value.
    """

    step: int
    duration_ns: int
    kernel_mode: str | None
    padded_tokens: int | None
    queue_depth_stage1: int
    queue_depth_stage2: int
    queue_depth_stage3: int | None = None
    disk_write_latency_p99: float | None = None
    compression_backlog_bytes: int | None = None
    queue_depth_readouts: int | None = None
    inclusion: float | None = None
    stage: int = 0


@dataclass(frozen=True)
class LogitsRead:
    """What the logits of a step said of the token that was sampled from each row.

    Some requests get no token from it. ``values`` are entropy, log-probability, margin and the
    scores that rules for shares read, of one row after the other.
    """

    step: int
    requests: IntArray
    token_ids: IntArray
    values: FloatArray


@dataclass(frozen=True)
class StepLost:
    """A pipeline stage dropped the rows of a step before they reached the writer."""

    step: int
    reason: str
    stage: int = 0


# harvest (the command's process) → writer and census ---------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """The request of another dataset whose tokens are served again.

    Args:
        seal: digest of its seal.
        n_given: positions that were given there; the others were sampled.
    """

    dataset: str
    seal: str
    run: str
    request: int
    n_given: int


@dataclass(frozen=True, slots=True)
class PromptFact:
    """The prompt of a request, as the client knows it.

    The census keeps one for each prompt: slots halve what they take.

    Args:
        source: where it was read; of a replay, what its source says, which may not know it.
        roles: of the positions from 0, by runs as ``packed`` writes them; empty when none
            is known.
        origin: of a replay, the request that it replays.
        prompt_len: tokens of the prompt, 0 for one that could not be encoded.
        labels: what the user says of it, as in the table ``requests``.
        turn: which conversation it is of, and its turn there.
    """

    key: str
    external_id: str
    source: str | None
    source_row: int | None
    skip: str | None = None
    roles: str = ""
    origin: Replayed | None = None
    prompt_len: int = 0
    labels: str | None = None
    turn: tuple[str | None, int | None] = (None, None)


@dataclass(frozen=True)
class ClientFacts:
    """Facts that only the client has: prompts, skips, and the engine's own cache counts.

    Args:
        unbegun: why prompts that never came to the scheduler did not, empty before the run ends.
    """

    prompts: tuple[PromptFact, ...] = ()
    engine_cached: dict[str, int] = field(default_factory=dict)
    unbegun: str = ""


@dataclass(frozen=True)
class Finish:
    """The engine is gone or drained: commit everything and end.

    ``unknown_weights``: the weights were changed, and nobody knows when.
    """

    reason: CloseReason
    unknown_weights: bool = False


# writer and census → harvest ----------------------------------------------------------------------


@dataclass(frozen=True)
class CommitTotals:
    """The shards committed since the start.

    Args:
        nbytes_in: bytes of the rows, over all hooks; ``nbytes_out``, of their files.
        buckets: commits of at most ``LATENCY_BUCKETS_S[i]`` seconds, cumulative.
        p50_s, p99_s: quantiles over the last commits, ``None`` before the first.
        values: by hook, how many rows are not finite or zero.
    """

    n_shards: int = 0
    n_raw_shards: int = 0
    n_rows: int = 0
    nbytes_in: int = 0
    nbytes_out: int = 0
    seconds: float = 0.0
    buckets: tuple[int, ...] = ()
    p50_s: float | None = None
    p99_s: float | None = None
    last_ns: int | None = None
    values: Mapping[str, RowCounts] = field(default_factory=dict)


@dataclass(frozen=True)
class StageState:
    """A stage's queue as last seen by the writer, and how long the stage before it waited.

    Args:
        capacity: entries that it holds at most.
        capacity_nbytes: bytes that it holds, where entries differ in size.
        entry_nbytes: mean bytes of an entry there.
        moved_nbytes: bytes taken out of it; of the readouts' lane only.
    """

    stage: str
    depth: int | None = None
    capacity: int | None = None
    capacity_nbytes: int | None = None
    entry_nbytes: float = 0.0
    n_stalls: int = 0
    stall_ns: int = 0
    moved_nbytes: int = 0


@dataclass(frozen=True)
class WatchTotals:
    """What was looked at beside a profile.

    Args:
        profile: its digest.
        alerts: requests that left the regime, by the hook that was furthest off.
        n_unsent: of these, not sent to the URL.
    """

    profile: str
    n_requests: int
    n_looks: int
    alerts: Mapping[str, int]
    n_unsent: int = 0


class RunInfo(NamedTuple):
    """What a run is, as metrics name it; ``model`` and ``mode`` are empty where not known."""

    run: str
    model: str
    dataset: str
    mode: str


@dataclass(frozen=True)
class WriterProgress:
    """Progress of the writer.

    Args:
        last_step: last step that was taken or known to be dropped, -1 before the first.
        row_nbytes: bytes of one row over all hooks.
        queue_depth: full buffers that wait for the disk.
        ring_nbytes: bytes taken out of the ring.
        backlog_nbytes: bytes of the buffers that wait or are being encoded.
        memory_nbytes: bound on the memory of worker and writer.
        not_drawn: positions that the rules alone would store and the draw left out, by what they
            are: ``thinned``, or ``dropped`` under a drop policy with a reserve.
        is_left: whether a worker of the engine is gone, so that no step will come.
    """

    n_rows: int
    last_step: int
    row_nbytes: int
    queue_depth: int
    ring_nbytes: int = 0
    backlog_nbytes: int = 0
    commits: CommitTotals = CommitTotals()
    stages: tuple[StageState, ...] = ()
    memory_nbytes: int | None = None
    t_ns: int | None = None
    cast: str | None = None
    watched: WatchTotals | None = None
    not_drawn: Mapping[str, int] = field(default_factory=dict)
    of_run: RunInfo | None = None
    is_left: bool = False


@dataclass(frozen=True)
class CensusProgress:
    """Progress of the scheduler; ``last_step`` is -1 before the first step.

    Args:
        queried_tokens: prompt tokens looked up in the prefix cache.
        recomputed_tokens: of the scheduled tokens, computed before.
        filtered_tokens: computed or cached positions that a sampling rule leaves out;
            ``undelivered_tokens``, of the others, those computed past the end.
        aborted_tokens: positions of requests that ended before these were computed.
    """

    scheduled_tokens: int
    cached_tokens: int
    n_finished: int
    waiting: int
    running: int
    ring_depth: int | None
    last_step: int
    connected: bool = False
    staging_depth: int | None = None
    lane_depth: int | None = None
    queried_tokens: int = 0
    recomputed_tokens: int = 0
    filtered_tokens: int = 0
    undelivered_tokens: int = 0
    aborted_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The process has committed everything; ``totals`` as in its close record."""

    totals: dict[str, int]
