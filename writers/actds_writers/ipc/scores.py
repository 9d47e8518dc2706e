"""A page of shared memory with the scores of requests: the writer writes it, the scheduler reads.

A request that asks for its score gets it with its response, from the engine's process; the score is
made in the writer's. The page says up to which step that is, so that a response can wait for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actds_writers.ipc.link import attach_memory, create_memory

N_SLOTS = 1 << 13
"""Requests whose scores are kept, by their number modulo this: more than an engine has at once."""
_FIELDS = ("request", "position", "score", "alert")
_NBYTES = 8 * (N_SLOTS + 1) * (len(_FIELDS) + 1)
NAME = "scores"


class Score(NamedTuple):
    """Of a request: its score after a row, and the position after which it was first too high.

    ``alert`` is -1 where it was not.
    """

    score: float
    position: int
    alert: int


class ScorePage:
    """The scores by slot; the last column is an exclusive or of the others, so none is torn."""

    def __init__(self, memory: mmap.mmap) -> None:
        words = np.frombuffer(memory, np.uint64).reshape(N_SLOTS + 1, len(_FIELDS) + 1)
        self._words, self._step = words[:-1], words[-1:, 0]

    @classmethod
    def create(cls, folder: Path) -> ScorePage:
        return cls(create_memory(folder / NAME, _NBYTES))

    @classmethod
    def attach(cls, folder: Path) -> ScorePage:
        return cls(attach_memory(folder / NAME, _NBYTES))

    @property
    def step(self) -> int:
        """Return the last step whose rows were looked at, -1 before the first."""
        return int(self._step[0]) - 1

    def advance(self, step: int) -> None:
        self._step[0] = step + 1

    def write(self, requests: Sequence[int], scores: Sequence[Score]) -> None:
        words = np.empty((len(requests), len(_FIELDS) + 1), np.uint64)
        words[:, 0] = np.asarray(requests, np.uint64) + np.uint64(1)
        words[:, 1] = np.array([score.position for score in scores], np.int64).view(np.uint64)
        words[:, 2] = np.array([score.score for score in scores], np.float64).view(np.uint64)
        words[:, 3] = np.array([score.alert for score in scores], np.int64).view(np.uint64)
        words[:, 4] = np.bitwise_xor.reduce(words[:, :4], axis=1)
        self._words[np.asarray(requests) % N_SLOTS] = words

    def read(self, request: int) -> Score | None:
        """Return the score of a request, ``None`` where there is none, or not at this moment."""
        words: npt.NDArray[np.uint64] = self._words[request % N_SLOTS].copy()
        if int(words[0]) != request + 1 or np.bitwise_xor.reduce(words[:4]) != words[4]:
            return None
        position, alert = (int(words[n : n + 1].view(np.int64)[0]) for n in (1, 3))
        return Score(float(words[2:3].view(np.float64)[0]), position, alert)
