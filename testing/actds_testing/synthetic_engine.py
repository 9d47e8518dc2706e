"""A stand-in engine: speaks to a real writer and census as vLLM's scheduler and worker do.

Every value of a row says whose it is, so that a row under another name is seen.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from actds.format.arrays import DTYPES
from actds.format.readouts import NONE, Readouts, compute, matrix
from actds.format.schema import REQUIRED_PROVENANCE
from actds_testing.faulty_disk import wait_until
from actds_writers.capture.op import HookBuffers
from actds_writers.capture.stages import Stages, Step
from actds_writers.config import HarvestSettings, WriterSettings
from actds_writers.engine_protocol import Engine
from actds_writers.harvest.one_engine import Feed
from actds_writers.harvest.prepare import hold, is_taken
from actds_writers.harvest.processes import Pipeline
from actds_writers.ipc.link import Sender
from actds_writers.ipc.messages import (
    EVERYTHING,
    Fact,
    HookSpec,
    LeftOut,
    RequestArrived,
    RequestFinished,
    StepScheduled,
)
from actds_writers.model_folder import SpecialTokens
from actds_writers.sampling import Regime

D_MODEL = 32
HOOKS = tuple(HookSpec(f"resid_post.{i}", "resid_post", i, D_MODEL, "bfloat16") for i in (1, 2))
PROMPT_LEN, GENERATED = 12, 5
RING_NBYTES = 1 << 16
MAX_ROWS = 64


def _is_settled(stages: Stages) -> bool:
    """Return whether nothing moves until the writer or the engine does something."""
    staged = stages.handover.depths[0]
    return not stages._narrow.depth and (not staged or "ring" in stages.waiting)  # noqa: SLF001


class SyntheticEngine:
    """Speaks as scheduler and worker: every request prefills, then decodes one token a step.

    Only the model is missing: what its hooks would leave is written into their buffers.

    Args:
        in_flight: steps that wait for their results, as those of an asynchronous scheduler do.
        n_padded: rows behind those of each step, as a graph of a fixed size has.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        device: str = "cpu",
        hooks: tuple[HookSpec, ...] = HOOKS,
        max_rows: int = MAX_ROWS,
        in_flight: int = 1,
        n_padded: int = 0,
    ) -> None:
        link = pipeline.link
        self.in_flight, self.n_padded = in_flight, n_padded
        self.held: list[int] = []
        self.hooks = hooks
        census = link.connect("census", "scheduler")
        self.scheduler = Sender(census) if link.live else census
        self.readouts = Readouts.from_field(link.readouts, "readouts")
        self.probes = np.load(link.probes_path) if link.probes_path else None
        width = self.readouts.width if self.readouts else 0
        self.buffers = HookBuffers.allocate(hooks, max_rows, device, width)
        self.stages = Stages(link, self.buffers, hooks, max_rows, in_flight)
        self.drops: list[int] = []
        self.drop_reasons: set[str] = set()
        tell = self.stages.handover.on_drop

        def note(step: int, reason: str) -> None:
            self.drops.append(step)
            self.drop_reasons.add(reason)
            tell(step, reason)

        self.stages.handover.on_drop = note
        given = ("readouts", "memory_nbytes", "ring_nbytes", "overflow_policy")
        facts = [
            Fact(name, "synthetic", "declared")
            for name in REQUIRED_PROVENANCE
            if name.removeprefix("capture.") not in given
        ]
        facts.append(Fact("capture.readouts", link.readouts, "declared"))
        facts.append(Fact("capture.overflow_policy", link.settings.overflow, "declared"))
        self.stages.introduce(tuple(facts))
        self.n_steps = 0
        self.regime = Regime()
        """Of requests that are given none of their own."""
        self.finished: tuple[int, ...] = ()
        self.changed: torch.Tensor | None = None
        """Whether the weights of the next steps are not those of the run."""

    @property
    def stalls(self) -> int:
        """Return how often the engine itself had to wait."""
        return self.stages.n_engine_waits

    def learn(self, number: int, regime: Regime) -> None:
        """Tell the worker what rules for shares ask of a request."""
        self.stages.learn(number, regime)

    def request(
        self, number: int, left_out: LeftOut = EVERYTHING, regime: Regime | None = None
    ) -> None:
        """Serve one request to its end."""
        self.learn(number, regime or self.regime)
        self.scheduler.send(
            RequestArrived(
                number, f"p{number}-x", f"p{number}", PROMPT_LEN, 1, None, None, left_out
            )
        )
        edges = [0, PROMPT_LEN, *range(PROMPT_LEN + 1, PROMPT_LEN + GENERATED)]
        for start, stop in itertools.pairwise(edges):
            self.step(number, start, stop, left_out)
        ids = np.arange(PROMPT_LEN + GENERATED - 1, dtype="<u4")
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        self.scheduler.send(RequestFinished(number, 2, "length", GENERATED, digest))

    def row_bits(self, number: int, positions: np.ndarray) -> Sequence[np.ndarray]:
        """Return the rows of a step, bits ``(n, d_model)`` of each hook: each says whose it is."""
        values = (number * 100 + positions + 1)[:, None]
        return [
            np.broadcast_to(values + hook.stage + i, (len(positions), hook.d_model)).astype(
                DTYPES[hook.dtype].bits
            )
            for i, hook in enumerate(self.hooks)
        ]

    def step(
        self,
        number: int,
        start: int,
        stop: int,
        left_out: LeftOut = EVERYTHING,
        prompt_len: int = PROMPT_LEN,
    ) -> None:
        one, n = np.array([number], np.int64), stop - start
        self.scheduler.send(
            StepScheduled(self.n_steps, 1, one, one * 0 + start, one * 0 + n, (), 0, 1, (), 0.1)
        )
        self.run(number, start, stop, left_out, prompt_len)

    def run(self, number: int, start: int, stop: int, left_out: LeftOut, prompt_len: int) -> None:
        """Run a step that was scheduled, and hand it over."""
        one, n = np.array([number], np.int64), stop - start
        positions = np.arange(start, stop)
        self.leave(number, positions)
        ids = torch.from_numpy(positions).to(self.buffers.device, non_blocking=True)
        step = Step(
            self.n_steps,
            one,
            one * 0 + n,
            one * 0 + prompt_len,
            (left_out,),
            self.finished,
            5,
            "eager",
        )
        self.finished = ()
        self.stages.hand_over(step, ids, ids, waits=self.in_flight > 1, changed=self.changed)
        self.held += [self.n_steps] if self.in_flight > 1 else []
        self.settle_held(self.in_flight - 1)
        self.n_steps += 1

    def settle_held(self, n_left: int = 0) -> None:
        """Let the results of all but the last steps arrive."""
        while len(self.held) > n_left:
            self.stages.settle(self.held.pop(0), {})

    def leave(self, number: int, positions: np.ndarray) -> None:
        """Leave in the buffers what the hooks of a model would."""
        bits, n = self.row_bits(number, positions), len(positions)
        for i, (hook, values) in enumerate(zip(self.hooks, bits, strict=True)):
            rows = self.buffers.rows[i]
            signed = torch.from_numpy(values.view(f"i{values.itemsize}"))
            rows[:n].view(signed.dtype).copy_(signed, non_blocking=True)
            rows[n : n + self.n_padded].fill_(float("nan"))
            if self.readouts is not None:
                probes = None if self.probes is None else self.probes[[i]]
                packed = matrix(self.readouts, probes, 1, hook.d_model)[0]
                stored = signed.view(rows.dtype).float().numpy()
                readouts = torch.from_numpy(compute(stored, packed))
                self.buffers.readouts[i, :n].copy_(readouts, non_blocking=True)
        self.buffers.seen.fill_(n + self.n_padded)

    def settle(self) -> None:
        """Wait until the stages have moved what they can, as they do while a model computes."""
        wait_until(lambda: _is_settled(self.stages), "the stages")

    def drain(self, pipeline: Pipeline) -> None:
        """Wait until the writer has taken every step."""
        self.settle_held()
        while pipeline.written is None or pipeline.written.last_step < self.n_steps - 1:
            pipeline.poll()
            time.sleep(0.01)

    def close(self) -> None:
        self.stages.close()
        self.scheduler.close()


class StagedEngine(SyntheticEngine):
    """An engine with one hook in each of several pipeline stages; its census has one scheduler.

    Args:
        stages: those that exist.
    """

    def __init__(self, pipeline: Pipeline, stages: Sequence[int] = (0, 1)) -> None:
        first, *others = [(replace(HOOKS[stage], stage=stage),) for stage in stages]
        super().__init__(pipeline, hooks=first)
        self.workers = [self, *(SyntheticEngine(pipeline, hooks=hooks) for hooks in others)]
        self.running = len(self.workers)
        """Stages that run the next steps."""

    def run(self, number: int, start: int, stop: int, left_out: LeftOut, prompt_len: int) -> None:
        """Run a step on every stage that still runs."""
        n_steps, finished = self.n_steps, self.finished
        for worker in self.workers[: self.running]:
            worker.n_steps, worker.finished = n_steps, finished
            SyntheticEngine.run(worker, number, start, stop, left_out, prompt_len)

    def learn(self, number: int, regime: Regime) -> None:
        for worker in self.workers:
            SyntheticEngine.learn(worker, number, regime)

    def close(self) -> None:
        for worker in self.workers:
            SyntheticEngine.close(worker)


def pipeline_for(
    out: Path | str,
    policy: str = "block",
    *,
    readouts: Readouts | None = None,
    probes: bytes | None = None,
    lane_nbytes: int = 1 << 20,
    hooks: tuple[HookSpec, ...] = HOOKS,
    ring_nbytes: int = RING_NBYTES,
    rows_per_shard: int = 40,
    run: str = "r-test",
    resume: bool = False,
    stage_timeout_s: float = 120.0,
    live: bool = False,
    **of_draw: object,
) -> Pipeline:
    """Return writer and census of a run, connected; ``of_draw`` are settings as ``thin_min``."""
    assert resume or not is_taken(out)
    settings = WriterSettings(
        harvest=HarvestSettings.of(
            {"out": str(out), "hooks": "synthetic", "overflow": policy, "seed": 3, **of_draw}
        ),
        dataset=secrets.token_hex(16), run=run, resume=resume, started_ns=1, software="test",
        facts=(), tokens=SpecialTokens(), rows_per_shard=rows_per_shard, n_threads=1,
        readouts=readouts.as_field() if readouts else NONE, stage_timeout_s=stage_timeout_s,
        shared=live,
    )  # fmt: skip
    lock = hold(out)
    try:
        pipeline = Pipeline(
            settings,
            tuple((h.kind, h.layer) for h in hooks),
            os.getpid(),
            lock,
            ring_nbytes=ring_nbytes,
            staging_nbytes=0,
            lane_nbytes=lane_nbytes,
            files={"probes": probes},
        )
    finally:
        os.close(lock)
    pipeline.connect()
    return pipeline


@contextmanager
def writer_stopped(pipeline: Pipeline, seconds: float | None = None) -> Iterator[None]:
    """Stop the writer for some seconds, else while a block runs.

    A block in which the engine waits for the writer would not end: that one is stopped for 10 s.
    """
    writer = pipeline.processes["writer"].pid
    os.kill(writer, signal.SIGSTOP)
    wake = threading.Timer(10.0 if seconds is None else seconds, os.kill, (writer, signal.SIGCONT))
    wake.start()
    try:
        yield
    finally:
        if seconds is None:
            wake.cancel()
            os.kill(writer, signal.SIGCONT)
        wake.join()


class Stalled(Feed):
    """Serves while the writer stands still for some seconds, so that its ring runs over."""

    def serve(self, engine: Engine) -> None:
        pipeline = self.poll.__self__  # type: ignore[attr-defined]
        assert isinstance(pipeline, Pipeline)
        with writer_stopped(pipeline, 4.0):
            super().serve(engine)


class ResidualStack(torch.nn.Module):
    """Decoder layers in vLLM's manner: hidden and residual go from one to the next.

    A layer may return hidden alone, which then is the whole stream.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            output = layer(hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
        return hidden if residual is None else hidden + residual
