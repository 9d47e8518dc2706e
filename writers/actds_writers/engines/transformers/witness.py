"""Witness A of the transformers writer: what was scheduled, told to the census process.

Outside the token's way: it never sees a row. There is no prefix cache, hence no reference, and
nothing is preempted.
"""

from __future__ import annotations

import hashlib
import json
import time
from multiprocessing.connection import Connection

import numpy as np

from actds_writers.engines.transformers.batch import Columns, Sequence
from actds_writers.ipc.messages import RequestArrived, RequestFinished, StepScheduled


class SchedulerWitness:
    """Tells the census about one engine.

    Args:
        census: connection to the census process.
        temperature: sampling temperature of every request.
        seed: seed of the engine.
    """

    def __init__(self, census: Connection, temperature: float, seed: int) -> None:
        self._census = census
        self._temperature, self._seed = temperature, seed
        self._step = -1
        self._finished: list[int] = []

    def arrived(self, sequence: Sequence) -> None:
        """Tell of a request that the engine took."""
        sampling = {
            "max_tokens": sequence.max_tokens,
            "seed": self._seed + sequence.number,
            "temperature": str(self._temperature),
        }
        self._census.send(
            RequestArrived(
                request=sequence.number,
                internal_id=sequence.key,
                external_id=sequence.key,
                prompt_len=sequence.prompt_len,
                arrival_ns=time.time_ns(),
                sampling=json.dumps(sampling, sort_keys=True, separators=(",", ":")),
                block_digests=None,
            )
        )

    def scheduled(
        self, columns: Columns, waiting: int, running: int
    ) -> tuple[int, tuple[int, ...]]:
        """Tell of a step; return its number and the requests that ended since the one before."""
        self._step += 1
        finished, self._finished = tuple(self._finished), []
        starts = np.concatenate([[0], np.cumsum(columns.n_rows)[:-1]])
        self._census.send(
            StepScheduled(
                step=self._step,
                t_ns=time.time_ns(),
                requests=np.array([s.number for s in columns.sequences], np.int64),
                starts=columns.positions[starts],
                n_tokens=columns.n_rows.astype(np.int64),
                references=(),
                waiting=waiting,
                running=running,
                preempted=(),
                kv_usage=None,
            )
        )
        return self._step, finished

    def finished(self, sequence: Sequence, reason: str) -> None:
        """Tell how a request ended."""
        self._finished.append(sequence.number)
        # Nothing sampled: the whole prompt is owed, as in spec section 7.1.
        n_fed = sequence.prompt_len + max(sequence.n_sampled - 1, 0)
        ids = np.array(sequence.token_ids[:n_fed], dtype="<u4")
        self._census.send(
            RequestFinished(
                request=sequence.number,
                t_ns=time.time_ns(),
                reason=reason,
                generated_len=sequence.n_sampled,
                token_digest=hashlib.sha256(ids.tobytes()).hexdigest(),
            )
        )

    def close(self) -> None:
        """End the link."""
        self._census.close()
