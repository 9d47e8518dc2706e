"""Assembly: from the rows of a step to the buffers that become shards; no file, no socket.

The worker side of the account: decides, from what the worker saw alone, which rows are computed for
the first time. A buffer is filled in step order and handed over whole at a step's end, so that
'committed up to step s' is exact per phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL
from actds_writers.ipc.messages import HookSpec, StepRows
from actds_writers.ipc.ring import Arrays, RowLayout


@dataclass
class _Request:
    high_water: int = 0
    next_position: int = 0
    n_chunks: int = 0
    attempt: int = 0


class Interval(NamedTuple):
    request: int
    start: int
    stop: int


@dataclass(frozen=True)
class SpecialTokens:
    special: tuple[int, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()


class Assembly:
    def __init__(self, tokens: SpecialTokens) -> None:
        self._requests: dict[int, _Request] = {}
        self._special = np.array(sorted(tokens.special), np.int64)
        self._bos = tokens.bos
        self._eos = np.array(sorted(tokens.eos), np.int64)
        self.recomputed_tokens = 0
        self.cache_hit_ratio: float | None = None
        """Of the last step: prompt tokens that were not computed, of the requests it began."""

    def slices(self, step: StepRows, rows: Arrays) -> dict[str, Slice]:
        """Return the slice of each phase that has rows to store (spec 0.1 sections 6.3 and 7.2).

        ``rows``: ``(n_hooks, n_kept, d_model)`` bit patterns in the ring, of each block.
        """
        new, attempt, chunk = self._label(step)
        n = len(step.positions)
        prefill = step.positions < np.repeat(step.prompt_lens, step.n_rows)
        columns: dict[str, np.ndarray] = {
            "request": np.repeat(step.requests, step.n_rows),
            "position": step.positions,
            "token_id": step.token_ids,
            "step": np.full(n, step.step, np.int64),
            "attempt": attempt,
            "chunk": chunk,
            "flags": self._flags(step.token_ids),
        }
        if step.kept is not None:
            new, prefill = new[step.kept], prefill[step.kept]
            columns = {name: column[step.kept] for name, column in columns.items()}
        slices: dict[str, Slice] = {}
        for phase, mask in (("prefill", new & prefill), ("decode", new & ~prefill)):
            if len(mask) and mask.all():
                slices[phase] = Slice(step.step, rows, None, columns)
            elif mask.any():
                select = np.flatnonzero(mask)
                some = {name: column[select] for name, column in columns.items()}
                slices[phase] = Slice(step.step, rows, select, some)
        return slices

    def lost(self, step: StepRows) -> list[Interval]:
        """Return the intervals of a dropped step that would have been stored (spec 0.1, 7.4)."""
        new, _, _ = self._label(step)
        if step.kept is not None:
            new &= step.kept
        intervals: list[Interval] = []
        first = 0
        for request, count in zip(step.requests.tolist(), step.n_rows.tolist(), strict=True):
            positions = step.positions[first : first + count][new[first : first + count]]
            if len(positions):
                intervals.append(Interval(request, int(positions[0]), int(positions[-1]) + 1))
            first += count
        return intervals

    def _label(self, step: StepRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which rows are new, their attempt and their chunk; update the requests."""
        for request in step.finished:
            self._requests.pop(request, None)
        n = len(step.positions)
        new = np.empty(n, dtype=bool)
        attempt, chunk = np.empty(n, np.uint16), np.empty(n, np.uint32)
        first = n_hits = n_queried = 0
        counts = zip(
            step.requests.tolist(), step.n_rows.tolist(), step.prompt_lens.tolist(), strict=True
        )
        for request, count, prompt_len in counts:
            last = first + count
            start, stop = int(step.positions[first]), int(step.positions[last - 1]) + 1
            if (state := self._requests.get(request)) is None:
                state = self._requests[request] = _Request()
                n_hits, n_queried = n_hits + start, n_queried + prompt_len
            state.attempt += start < state.next_position  # resumed after a preemption
            state.next_position = stop
            new[first:last] = step.positions[first:last] >= state.high_water
            attempt[first:last], chunk[first:last] = state.attempt, state.n_chunks
            state.high_water = max(state.high_water, stop)
            state.n_chunks += 1
            first = last
        self.recomputed_tokens += int(n - np.count_nonzero(new))
        self.cache_hit_ratio = n_hits / n_queried if n_queried else None
        return new, attempt, chunk

    def _flags(self, token_ids: np.ndarray) -> np.ndarray:
        flags = np.where(np.isin(token_ids, self._special), FLAG_SPECIAL, 0)
        if self._bos is not None:
            flags |= np.where(token_ids == self._bos, FLAG_BOS, 0)
        flags |= np.where(np.isin(token_ids, self._eos), FLAG_EOS, 0)
        return flags.astype(np.uint16)


TOKEN_COLUMNS = {
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "step": np.uint64,
    "attempt": np.uint16,
    "chunk": np.uint32,
    "flags": np.uint16,
}


@dataclass(frozen=True)
class Slice:
    """The rows of one step and phase to store, with their token columns.

    Args:
        rows: ``(n_hooks, n, d_model)`` bit patterns of each block; may be views of the ring.
        select: indexes of the rows to store, ``None`` for all of them.
    """

    step: int
    rows: Arrays
    select: np.ndarray | None
    columns: dict[str, np.ndarray]

    @property
    def n_rows(self) -> int:
        return len(self.columns["request"])


class ShardBuffer:
    """Rows of one phase: at most those of a shard plus those of the largest step."""

    def __init__(self, hooks: tuple[HookSpec, ...], capacity: int) -> None:
        self.hooks = hooks
        self.capacity = capacity
        self._layout = RowLayout(hooks)
        self._rows = self._layout.empty(capacity)
        self._columns = {
            name: np.empty(capacity, dtype=kind) for name, kind in TOKEN_COLUMNS.items()
        }
        self.clear()

    def clear(self) -> None:
        self.n_rows = 0
        self.first_step: int | None = None
        self.last_step = 0
        self._ends: list[tuple[int, int]] = []  # of each step, and the rows up to its end

    def append(self, piece: Slice) -> None:
        first, last = self.n_rows, self.n_rows + piece.n_rows
        for block, rows in zip(self._rows, piece.rows, strict=True):
            target = block[:, first:last]
            if piece.select is None:
                np.copyto(target, rows)
            else:
                np.take(rows, piece.select, axis=1, out=target)
        for name, column in self._columns.items():
            column[first:last] = piece.columns[name]
        self.n_rows = last
        if self.first_step is None:
            self.first_step = piece.step
        self.last_step = piece.step
        self._ends.append((piece.step, last))

    def keep_through(self, step: int) -> None:
        while self._ends and self._ends[-1][0] > step:
            self._ends.pop()
        self.last_step, self.n_rows = self._ends[-1] if self._ends else (0, 0)

    @property
    def nbytes(self) -> int:
        return self.n_rows * self._layout.row_nbytes

    def rows_by_hook(self) -> dict[str, np.ndarray]:
        """Return the rows of each hook, ``(n_rows, d_model)``, views of the buffer."""
        places = zip(self.hooks, self._layout.places, strict=True)
        return {hook.name: self._rows[b][i, : self.n_rows] for hook, (b, i) in places}

    def columns(self) -> dict[str, np.ndarray]:
        return {name: column[: self.n_rows] for name, column in self._columns.items()}
