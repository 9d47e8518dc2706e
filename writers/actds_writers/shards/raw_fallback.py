"""The raw fallback: which shards are committed without compression, because too much waits.

Part of stage 3; the committer asks it before every shard. Pure: no clock, no thread, no disk.
"""

from __future__ import annotations

from collections import deque

N_REMEMBERED = 4
"""Commits of each kind whose cost is remembered."""
RETRY_AFTER = 8
"""Shards under pressure that stay compressed before raw, which was no faster, is tried again."""


class RawFallback:
    """Decides shard by shard whether the next one is written raw.

    A shard is written raw when at least ``threshold_nbytes`` waited behind the shard before it at
    a moment when the writer's loop asked for an empty buffer. Encoding is not always what is slow:
    a raw shard has 1.4 times the bytes to hash and to write, and with two encoding threads it
    took longer than a compressed one (measured). So raw goes on only while it costs less.

    Args:
        threshold_nbytes: bytes of rows that have to wait; 0 never writes raw.
    """

    def __init__(self, threshold_nbytes: int) -> None:
        self._threshold_nbytes = threshold_nbytes
        self._is_wanted = False
        self._cost: dict[bool, deque[float]] = {
            raw: deque(maxlen=N_REMEMBERED) for raw in (False, True)
        }
        self._n_refused = 0

    @property
    def is_wanted(self) -> bool:
        """Return whether the next shard is under pressure."""
        return self._is_wanted

    def waiting(self, nbytes: int) -> None:
        """Note how many bytes wait behind the shard being committed."""
        if 0 < self._threshold_nbytes <= nbytes:
            self._is_wanted = True

    def take(self) -> bool:
        """Return whether the shard that begins now is written raw; the pressure is used up."""
        wanted, self._is_wanted = self._is_wanted, False
        if not wanted:
            return False
        if self._pays():
            return True
        self._n_refused += 1
        if self._n_refused >= RETRY_AFTER:
            self._n_refused = 0
            self._cost[True].clear()
        return False

    def learn(self, nbytes: int, seconds: float, *, raw: bool) -> None:
        """Note how long a commit of so many bytes of rows took."""
        if nbytes:
            self._cost[raw].append(seconds / nbytes)

    def _pays(self) -> bool:
        """Return whether raw is cheaper, or has not been tried yet."""
        normal, raw = self._cost[False], self._cost[True]
        if not normal or not raw:
            return True
        return sum(raw) / len(raw) < sum(normal) / len(normal)
