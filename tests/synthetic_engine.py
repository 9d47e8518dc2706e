"""A stand-in engine: speaks to a real writer and census as vLLM's scheduler and worker do.

Every value of a row says whose it is, so that a row under another name is seen.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from pathlib import Path

import numpy as np

from actds.schema.v0_1 import REQUIRED_PROVENANCE
from actds_writers import ring
from actds_writers.assembly import SpecialTokens
from actds_writers.link import Policy
from actds_writers.messages import (
    Fact,
    HookSpec,
    RequestArrived,
    RequestFinished,
    StepDropped,
    StepExecuted,
    StepLost,
    StepRows,
    StepScheduled,
    WorkerHello,
)
from actds_writers.overflow import Handover
from actds_writers.pipeline import Pipeline
from actds_writers.resume import lock_dataset
from actds_writers.settings import WriterSettings

D_MODEL = 32
HOOKS = tuple(HookSpec(f"resid_post.{i}", "resid_post", i, D_MODEL, "bfloat16") for i in (1, 2))
PROMPT_LEN, GENERATED = 12, 5
RING_NBYTES = 1 << 16


class SyntheticEngine:
    """Speaks as scheduler and worker: every request prefills, then decodes one token a step."""

    def __init__(self, pipeline: Pipeline) -> None:
        link = pipeline.link
        self.scheduler = link.connect("census", "scheduler")
        self.worker = link.connect("census", "worker")
        self.writer = link.connect("writer", "worker")
        path = Path(link.folder) / "ring"
        self.memory = ring.create(path, RING_NBYTES)
        self.policy = link.policy
        self.drops: list[StepDropped] = []
        self.handover = Handover(
            self.writer, ring.RingSpace(RING_NBYTES), link.policy, self.tell_loss
        )
        facts = tuple(Fact(name, "synthetic", "declared") for name in REQUIRED_PROVENANCE)
        self.writer.send(WorkerHello(HOOKS, facts, str(path), RING_NBYTES, 64))
        self.n_steps = 0
        self.stalls = 0

    def request(self, number: int) -> None:
        """Serve one request to its end."""
        self.scheduler.send(
            RequestArrived(number, f"p{number}-x", f"p{number}", PROMPT_LEN, 1, None, None)
        )
        edges = [0, PROMPT_LEN, *range(PROMPT_LEN + 1, PROMPT_LEN + GENERATED)]
        for start, stop in itertools.pairwise(edges):
            self.step(number, start, stop)
        ids = np.arange(PROMPT_LEN + GENERATED - 1, dtype="<u4")
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        self.scheduler.send(RequestFinished(number, 2, "length", GENERATED, digest))

    def step(self, number: int, start: int, stop: int) -> None:
        one, n = np.array([number], np.int64), stop - start
        self.scheduler.send(
            StepScheduled(self.n_steps, 1, one, one * 0 + start, one * 0 + n, (), 0, 1, (), 0.1)
        )
        nbytes = len(HOOKS) * n * D_MODEL * 2
        offset, stall = self.handover.place(nbytes, self.n_steps)
        self.stalls += stall is not None
        positions = np.arange(start, stop)
        message = StepRows(
            self.n_steps, offset or 0, nbytes, one, one * 0 + n, one * 0 + PROMPT_LEN, positions,
            positions, (), stall,
        )  # fmt: skip
        if offset is None:
            self.handover.put(
                StepDropped(message, "queue_full", self.policy, 1, self.handover.depth)
            )
        else:
            rows = ring.view(self.memory, offset, (len(HOOKS), n, D_MODEL), np.uint16)
            values = number * 100 + positions + 1
            rows[:] = values[None, :, None] + np.arange(len(HOOKS))[:, None, None]
            self.handover.put(message)
        self.worker.send(StepExecuted(self.n_steps, 5, "eager", n, 0, 1, None, None, None))
        self.n_steps += 1

    def tell_loss(self, dropped: StepDropped) -> None:
        self.drops.append(dropped)
        self.worker.send(StepLost(dropped.rows.step, dropped.reason))

    def drain(self, pipeline: Pipeline) -> None:
        """Wait until the writer has taken every step."""
        while pipeline.written is None or pipeline.written.last_step < self.n_steps - 1:
            pipeline.poll()
            time.sleep(0.01)

    def close(self) -> None:
        self.handover.close()
        self.scheduler.close()
        self.worker.close()


def pipeline_for(out: Path, policy: Policy = "block") -> Pipeline:
    out.mkdir()
    settings = WriterSettings(
        root=str(out), dataset=secrets.token_hex(16), run="r-test", resume=False, started_ns=1,
        software="test", facts=(), tokens=SpecialTokens(), rows_per_shard=40,
        order="permuted", seed=3, n_threads=1,
    )  # fmt: skip
    lock = lock_dataset(out)
    try:
        pipeline = Pipeline(
            tuple((h.kind, h.layer) for h in HOOKS),
            None,
            policy,
            RING_NBYTES,
            settings,
            os.getpid(),
            lock,
        )
    finally:
        os.close(lock)
    pipeline.connect()
    return pipeline
