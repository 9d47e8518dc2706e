"""The writer's three stages as queues of step slices: staging ring, host ring, pool and disk.

Right of the scheduler, which offers one slice a step. Imports the scenario only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from actds_testing.simulate.scenario import Policy, Scenario

__all__ = ["DiskStalls", "Pipeline", "Stall"]

Reason = Literal["queue_full", "dma_backpressure"]
_STALL_SIGMA = 0.6


class DiskStalls:
    """Times at which the disk takes nothing, drawn as time goes on; the same for any pipeline.

    Gaps are exponential of mean ``disk_stall_every_s``, lengths log-normal of median
    ``disk_stall_s`` and log standard deviation 0.6.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._every_s = scenario.disk_stall_every_s
        self._median_s = scenario.disk_stall_s
        self._rng = rng
        self._begin: list[float] = []
        self._end: list[float] = []

    def nth(self, n: int) -> tuple[float, float]:
        """Return begin and end of the n-th stall; infinite when there are none."""
        if self._every_s <= 0:
            return math.inf, math.inf
        while len(self._begin) <= n:
            last = self._end[-1] if self._end else 0.0
            begin = last + self._rng.exponential(self._every_s)
            length = self._median_s * math.exp(_STALL_SIGMA * self._rng.standard_normal())
            self._begin.append(begin)
            self._end.append(begin + length)
        return self._begin[n], self._end[n]


@dataclass(frozen=True)
class Stall:
    """A stage that the one before it waited for: seconds from ``begin_s``."""

    stage: Literal["staging", "ring", "pool"]
    begin_s: float
    length_s: float
    depth: int
    step: int


@dataclass
class Pipeline:
    """The queues of one run, brought up to date whenever a step offers its slice.

    A slice (one step's rows) waits in the staging ring for its transfer, at
    ``dma_rows_per_s``; in the host ring for room in the pool; and in the pool, where rows lose
    their steps, for the disk, at ``disk_rows_per_s`` outside its stalls. The rings have slots,
    the pool has rows. A slice that finds the host ring full is lost under ``drop_newest``
    (``queue_full``), makes the oldest slice in the ring lost under ``drop_oldest``, and waits
    under ``block``; the same holds at the staging ring (``dma_backpressure``), where the engine
    is what waits.

    Args:
        scenario: the parameters.
        stalls: the disk's stalls.
        policy: what happens when a ring is full.
        disk_rows_per_s: speed of the disk.
        dropped: lost steps and why.
        waits: what waited for which stage.
        depth1: staging slots in use after each step.
        depth2: host ring slots in use after each step.
        depth3: full shards in the pool after each step.
        backlog: rows in the pool after each step.
        latency_s: time until the disk has taken all that, after each step.
    """

    scenario: Scenario
    stalls: DiskStalls
    policy: Policy
    disk_rows_per_s: float
    dropped: dict[int, Reason] = field(default_factory=dict)
    waits: list[Stall] = field(default_factory=list)
    depth1: list[int] = field(default_factory=list)
    depth2: list[int] = field(default_factory=list)
    depth3: list[int] = field(default_factory=list)
    backlog: list[int] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with empty queues."""
        self._staging: deque[tuple[int, int]] = deque()
        self._ring: deque[tuple[int, int]] = deque()
        self._pool = 0.0
        self._credit = 0.0
        self._now = 0.0
        self._n_stall = 0
        self._stall = self.stalls.nth(0)
        self._room = self.scenario.pool_rows
        self._per_shard = self.scenario.rows_per_shard
        self._dma = self.scenario.dma_rows_per_s
        self._most_credit = float(self.scenario.max_batch_tokens)
        self._ring_since: tuple[float, int] | None = None
        self._pool_since: tuple[float, int] | None = None

    def offer(self, step: int, n_rows: int, now_s: float) -> float:
        """Take a step's slice at a time; return when the engine may go on."""
        self._advance(now_s)
        pool = self._pool + n_rows
        if not self._staging and not self._ring and pool <= self._room and n_rows <= self._credit:
            # Nothing waits: the slice goes through. Most do, so this is kept short.
            self._pool = pool
            self._credit -= n_rows
        else:
            now_s = self._queued(step, n_rows, now_s)
        self.depth1.append(len(self._staging))
        self.depth2.append(len(self._ring))
        self.depth3.append(int(self._pool) // self._per_shard)
        self.backlog.append(int(self._pool))
        begin, end = self._stall
        stalled_s = end - self._now if begin <= self._now else 0.0
        self.latency_s.append(self._pool / self.disk_rows_per_s + stalled_s)
        return now_s

    def _queued(self, step: int, n_rows: int, now_s: float) -> float:
        """Take a slice that may have to wait; return when the engine may go on."""
        if len(self._staging) >= self.scenario.staging_slots:
            now_s = self._full_staging(step, now_s)
        if step not in self.dropped:
            self._staging.append((step, n_rows))
            self._move()
        return now_s

    def _full_staging(self, step: int, now_s: float) -> float:
        """Make room in the staging ring, or lose the step; return the time after that."""
        if self.policy == "drop_newest":
            self.dropped[step] = "dma_backpressure"
            return now_s
        if self.policy == "drop_oldest":
            self.dropped[self._staging.popleft()[0]] = "dma_backpressure"
            return now_s
        begin_s = now_s
        while len(self._staging) >= self.scenario.staging_slots:
            begin, end = self._stall
            now_s = end if begin <= now_s < end else now_s + self.scenario.step_s / 4
            self._advance(now_s)
        depth = self.scenario.staging_slots
        self.waits.append(Stall("staging", begin_s, now_s - begin_s, depth, step))
        return now_s

    def _advance(self, now_s: float) -> None:
        """Let the disk write until a time, and everything behind it move up."""
        passed_s = working_s = now_s - self._now
        begin, end = self._stall
        while begin < now_s:
            working_s -= min(end, now_s) - max(begin, self._now)
            if end > now_s:
                break
            self._n_stall += 1
            begin, end = self._stall = self.stalls.nth(self._n_stall)
        moved = self._dma * passed_s
        most = self._most_credit if moved < self._most_credit else moved
        self._credit += moved
        if self._credit > most:
            self._credit = most
        self._now = now_s
        rows = working_s * self.disk_rows_per_s
        if not self._ring and not self._staging:
            self._pool = self._pool - rows if rows < self._pool else 0.0
            if self._pool_since is not None or self._ring_since is not None:
                self._move()
            return
        while True:
            written = min(rows, self._pool)
            self._pool -= written
            rows -= written
            before = self._pool
            self._move()
            if rows <= 0 or self._pool == before:
                return

    def _move(self) -> None:
        """Move slices from ring to pool and from staging to ring, as far as they may go."""
        ring, staging, room = self._ring, self._staging, self._room
        while True:
            while ring and self._pool + ring[0][1] <= room:
                self._pool += ring.popleft()[1]
            if not staging or staging[0][1] > self._credit:
                break
            if len(ring) >= self.scenario.ring_slots:
                if self.policy == "block":
                    break
                if self.policy == "drop_oldest":
                    self.dropped[ring.popleft()[0]] = "queue_full"
                else:
                    self.dropped[staging.popleft()[0]] = "queue_full"
                    continue
            self._credit -= staging[0][1]
            ring.append(staging.popleft())
        full = bool(staging) and len(ring) >= self.scenario.ring_slots
        self._ring_since = self._wait("ring", self._ring_since, full, staging)
        self._pool_since = self._wait("pool", self._pool_since, bool(ring), ring)

    def _wait(
        self,
        stage: Literal["ring", "pool"],
        since: tuple[float, int] | None,
        waiting: bool,
        queue: deque[tuple[int, int]],
    ) -> tuple[float, int] | None:
        """Begin or end a wait for a stage; return the one that goes on."""
        if waiting:
            return since or (self._now, queue[0][0])
        if since is not None and self._now > since[0]:
            capacity = self.scenario.ring_slots if stage == "ring" else self._full_shards
            self.waits.append(Stall(stage, since[0], self._now - since[0], capacity, since[1]))
        return None

    @property
    def _full_shards(self) -> int:
        return self.scenario.pool_rows // self.scenario.rows_per_shard
