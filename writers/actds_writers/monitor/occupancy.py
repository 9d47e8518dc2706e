"""Occupancy: how long each queue stood at each depth.

Beside the token's way: a stage says its depth when it changes, or at every step. Pure; imports the
table only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pyarrow as pa

from actds.format import tables

__all__ = ["Occupancy", "depth_bin", "occupancy_table"]

EXACT_DEPTHS = 128
"""Depths below this stand for themselves; larger ones keep their seven leading bits, so a queue
of a million entries has under a thousand bins, and none is off by more than 1.6 %."""


def depth_bin(depth: int) -> int:
    """Return the depth under which a depth is counted: itself, or the lower end of its bin."""
    shift = max(0, depth.bit_length() - EXACT_DEPTHS.bit_length() + 1)
    return depth >> shift << shift


class Occupancy:
    """A time-weighted histogram of one queue's depth; any thread may observe.

    Args:
        stage: ``staging``, ``ring``, ``pool`` or ``readouts``.
        capacity: entries that the queue holds at most.
    """

    def __init__(self, stage: str, capacity: int) -> None:
        self.stage, self.capacity = stage, capacity
        self.depth: int | None = None
        self._since_ns = 0
        self._duration_ns: dict[int, int] = {}
        self._n_visits: dict[int, int] = {}
        self._lock = threading.Lock()

    def observe(self, depth: int, t_ns: int) -> None:
        """Say that the queue has a depth from ``t_ns`` on.

        Args:
            depth: entries in the queue.
            t_ns: any clock, the same at every call; a time before the last one counts as no time.
        """
        with self._lock:
            if self.depth is None:
                self._since_ns = t_ns
            else:
                self._duration_ns[depth_bin(self.depth)] += max(0, t_ns - self._since_ns)
            if self.depth != depth:
                found = depth_bin(depth)
                self._duration_ns.setdefault(found, 0)
                self._n_visits[found] = self._n_visits.get(found, 0) + 1
            self.depth = depth
            self._since_ns = max(self._since_ns, t_ns)

    def rows(self) -> list[tuple[int, int, int]]:
        """Return depth, nanoseconds and visits, by depth."""
        with self._lock:
            return [(d, ns, self._n_visits[d]) for d, ns in sorted(self._duration_ns.items())]


def occupancy_table(queues: Iterable[Occupancy]) -> pa.Table:
    """Return the histograms as the ``occupancy`` table; a queue never observed has no row."""
    rows = [(queue, *row) for queue in queues for row in queue.rows()]
    return tables.build(
        "occupancy",
        {
            "stage": [queue.stage for queue, *_ in rows],
            "depth": [depth for _, depth, _, _ in rows],
            "capacity": [queue.capacity for queue, *_ in rows],
            "duration_ns": [duration for _, _, duration, _ in rows],
            "n_visits": [visits for *_, visits in rows],
        },
    )
