"""Snapshot: the state of a harvest at one moment, from the last words of writer and census.

Stands beside the token's way; what the display and the metrics show. Imports the messages only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from actds_writers.ipc.messages import CensusProgress, CommitTotals, StageState, WriterProgress

__all__ = ["LANE", "STAGES", "Snapshot", "Stage", "take_snapshot"]

STAGES = ("staging", "ring", "pool")
LANE = "readouts"
"""The lane of the readouts, a queue beside the stages."""


@dataclass(frozen=True)
class Stage:
    """One of the three stages, or the lane of the readouts beside them.

    Args:
        name: ``staging``, ``ring``, ``pool`` or ``readouts``.
        nbytes: bytes that have left it since the start: copied by the hooks, taken out of the
            ring, made durable; taken out of the lane.
        depth: entries in its queue, None where not known yet.
        capacity: entries that the queue holds at most, None where not known yet.
        fill: how full the queue is, 0 to 1, by bytes where entries differ in size.
        n_stalls: times the stage before it waited.
        stall_s: how long, all together.
    """

    name: str
    nbytes: int = 0
    depth: int | None = None
    capacity: int | None = None
    fill: float | None = None
    n_stalls: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The counters of a harvest at one moment, all of them totals since its start.

    Args:
        elapsed_s: seconds since the start.
        requests_done: requests that ended, skipped ones not included.
        requests_total: requests that reach the engine; None where nobody knows, as in serving.
        waiting: requests that wait in the scheduler.
        running: requests that run.
        scheduled_tokens: tokens the engine computed.
        recomputed_tokens: of these, computed before.
        cached_tokens: prompt tokens it reused from the prefix cache.
        queried_tokens: prompt tokens it looked up there.
        rows: rows that reached the writer.
        row_nbytes: bytes of one row over all hooks.
        dropped: rows lost to an overflow policy, by reason.
        stages: staging, ring and pool.
        lane: the lane of the readouts, None without readouts or before the first word of it.
        backlog_nbytes: bytes that wait to be encoded.
        commits: what is durable.
        memory_nbytes: bound of all stages together, None where not known.
        last_commit_age_s: seconds since the last commit, None before the first.
        writer_silent_s: seconds since the writer's last word, None before the first.
    """

    elapsed_s: float
    requests_done: int
    requests_total: int | None
    waiting: int = 0
    running: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0
    rows: int = 0
    row_nbytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[Stage, Stage, Stage] = (Stage("staging"), Stage("ring"), Stage("pool"))
    lane: Stage | None = None
    backlog_nbytes: int = 0
    commits: CommitTotals = field(default_factory=CommitTotals)
    memory_nbytes: int | None = None
    last_commit_age_s: float | None = None
    writer_silent_s: float | None = None

    @property
    def dropped_tokens(self) -> int:
        """Return the rows lost to an overflow policy, for any reason."""
        return sum(self.dropped.values())

    @property
    def cache_hit_share(self) -> float | None:
        """Return the hits per prompt token looked up, None before the first."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else None


def take_snapshot(
    written: WriterProgress | None,
    counted: CensusProgress | None,
    *,
    elapsed_s: float,
    requests_done: int,
    requests_total: int | None,
    now_ns: int | None = None,
) -> Snapshot:
    """Return what writer and census have said, as one snapshot.

    Args:
        written: the writer's last word, None before the first.
        counted: the census' last word, None before the first.
        elapsed_s: seconds since the start.
        requests_done: requests that ended.
        requests_total: requests that reach the engine, None where nobody knows.
        now_ns: wall clock; now by default.
    """
    w = written or WriterProgress(0, -1, 0, 0)
    c = counted or CensusProgress(0, 0, 0, 0, 0, None, -1, 0)
    now = time.time_ns() if now_ns is None else now_ns
    queues = {state.stage: state for state in w.stages}
    nbytes = (c.scheduled_tokens * w.row_nbytes, w.ring_nbytes, w.commits.nbytes_in)
    pool_depth = w.queue_depth if written else None
    # The worker's own word, by way of the census, is newer than what came with the last step.
    newest = (c.staging_depth, c.ring_depth, pool_depth)
    staging, ring, pool = (
        _stage(queues.get(name, StageState(name)), moved, depth)
        for name, moved, depth in zip(STAGES, nbytes, newest, strict=True)
    )
    lane = queues.get(LANE)
    return Snapshot(
        elapsed_s=elapsed_s,
        requests_done=requests_done,
        requests_total=requests_total,
        waiting=c.waiting,
        running=c.running,
        scheduled_tokens=c.scheduled_tokens,
        recomputed_tokens=c.recomputed_tokens,
        cached_tokens=c.cached_tokens,
        queried_tokens=c.queried_tokens,
        rows=w.n_rows,
        row_nbytes=w.row_nbytes,
        dropped=dict(c.dropped),
        stages=(staging, ring, pool),
        lane=_stage(lane, lane.moved_nbytes, c.lane_depth) if lane else None,
        backlog_nbytes=w.backlog_nbytes,
        commits=w.commits,
        memory_nbytes=w.memory_nbytes,
        last_commit_age_s=_age_s(w.commits.last_ns, now),
        writer_silent_s=_age_s(w.t_ns, now),
    )


def _stage(state: StageState, nbytes: int, newest: int | None) -> Stage:
    depth = state.depth if newest is None else newest
    fill = None
    if depth is not None and state.capacity_nbytes:
        fill = min(1.0, depth * state.entry_nbytes / state.capacity_nbytes)
    elif depth is not None and state.capacity:
        fill = min(1.0, depth / state.capacity)
    return Stage(
        name=state.stage,
        nbytes=nbytes,
        depth=depth,
        capacity=state.capacity,
        fill=fill,
        n_stalls=state.n_stalls,
        stall_s=state.stall_ns / 1e9,
    )


def _age_s(then_ns: int | None, now_ns: int) -> float | None:
    return None if then_ns is None else max(0.0, (now_ns - then_ns) / 1e9)
