"""Assembly: from the rows of a step to the slices that are stored.

Stands between ring and shard buffer; pure, knows no file and no socket. Decides, from what the
worker saw alone, which rows are computed for the first time: the writer's own witness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actds.format.tables import FLAG_BOS, FLAG_EOS, FLAG_SPECIAL
from actds_writers.ipc.messages import StepRows
from actds_writers.ipc.ring import Arrays
from actds_writers.shards.buffers import Slice


@dataclass
class _Request:
    high_water: int = 0
    next_position: int = 0
    n_chunks: int = 0
    attempt: int = 0


class Interval(NamedTuple):
    """Positions ``[start, stop)`` of a request."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that set row flags."""

    special: tuple[int, ...] = ()
    bos: int | None = None
    eos: tuple[int, ...] = ()


class Assembly:
    """Follows the requests of one run.

    Args:
        tokens: ids that set the row flags.
    """

    def __init__(self, tokens: SpecialTokens) -> None:
        self._requests: dict[int, _Request] = {}
        self._special = np.array(sorted(tokens.special), np.int64)
        self._bos = tokens.bos
        self._eos = np.array(sorted(tokens.eos), np.int64)
        self.recomputed_tokens = 0

    def slices(self, step: StepRows, rows: Arrays) -> dict[str, Slice]:
        """Return the slice of each phase that has rows to store.

        Args:
            step: what the worker said of the step.
            rows: ``(n_hooks, n_kept, d_model)`` bit patterns in the ring, of each block.

        Spec: 0.1 sections 6.3 and 7.2.
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
        found: dict[str, Slice] = {}
        for phase, mask in (("prefill", new & prefill), ("decode", new & ~prefill)):
            if len(mask) and mask.all():
                found[phase] = Slice(step.step, rows, None, columns)
            elif mask.any():
                select = np.flatnonzero(mask)
                found[phase] = Slice(
                    step.step, rows, select, {name: c[select] for name, c in columns.items()}
                )
        return found

    def lost(self, step: StepRows) -> list[Interval]:
        """Return the intervals of a dropped step that would have been stored.

        Spec: 0.1 section 7.4.
        """
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
        """Return which rows are new, their attempt and their chunk; move the requests on."""
        for request in step.finished:
            self._requests.pop(request, None)
        n = len(step.positions)
        new = np.empty(n, dtype=bool)
        attempt, chunk = np.empty(n, np.uint16), np.empty(n, np.uint32)
        first = 0
        for request, count in zip(step.requests.tolist(), step.n_rows.tolist(), strict=True):
            state = self._requests.setdefault(request, _Request())
            last = first + count
            start, stop = int(step.positions[first]), int(step.positions[last - 1]) + 1
            state.attempt += start < state.next_position  # resumed after a preemption
            state.next_position = stop
            new[first:last] = step.positions[first:last] >= state.high_water
            attempt[first:last], chunk[first:last] = state.attempt, state.n_chunks
            state.high_water = max(state.high_water, stop)
            state.n_chunks += 1
            first = last
        self.recomputed_tokens += int(n - np.count_nonzero(new))
        return new, attempt, chunk

    def _flags(self, token_ids: np.ndarray) -> np.ndarray:
        flags = np.where(np.isin(token_ids, self._special), FLAG_SPECIAL, 0)
        if self._bos is not None:
            flags |= np.where(token_ids == self._bos, FLAG_BOS, 0)
        flags |= np.where(np.isin(token_ids, self._eos), FLAG_EOS, 0)
        return flags.astype(np.uint16)
