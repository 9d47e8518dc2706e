"""Witness B's eyes: in the worker, from the staging buffer into the host ring.

Stage 1 to stage 2 of the token's way. After every forward it reads who the rows are, asserts
that the hooks saw them, copies them into the ring, and tells writer and census.
"""

from __future__ import annotations

import mmap
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from actds.errors import ActdsError
from actds.schema.v0_1 import DType
from actds_writers import capture, ring
from actds_writers.link import Link
from actds_writers.messages import (
    Fact,
    Failed,
    HookSpec,
    Stall,
    StepDropped,
    StepExecuted,
    StepLost,
    StepRows,
    WorkerHello,
)
from actds_writers.overflow import Handover
from actds_writers.transfer import Transfer
from actds_writers.vllm.layouts import RowIdentity, identify
from actds_writers.vllm.observe import observe
from actds_writers.vllm.scheduler import StepMark

DTYPES: dict[str, DType] = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}
PADDING_ROWS = 1024
"""Rows beyond the scheduler's limit that padded batches may have."""


class WorkerCapture:
    """Captures in one worker: installs the hooks, then hands over each step.

    Args:
        worker: the vLLM worker, its model loaded and not yet compiled.
        link: where writer and census listen.

    Raises:
        ActdsError: E007 unknown layer, E012 a configuration that cannot be accounted for.
    """

    def __init__(self, worker: Any, link: Link) -> None:
        self._worker, self._link = worker, link
        self._writer = link.connect("writer", "worker")
        self._census: Connection = link.connect("census", "worker")
        self._numbers: dict[str, tuple[int, int]] = {}
        self._introduced = False
        try:
            self._install(worker)
        except ActdsError as error:
            self._send(Failed.of(error))
            raise

    def _install(self, worker: Any) -> None:
        runner, link = worker.model_runner, self._link
        self._refuse(worker.vllm_config)
        d_model = int(runner.model_config.get_hidden_size())
        dtype = getattr(torch, link.store_dtype or DTYPES[str(runner.model_config.dtype)])
        self._hooks = tuple(
            HookSpec(f"{kind}.{layer}", kind, layer, d_model, DTYPES[str(dtype)])
            for kind, layer in link.hooks
        )
        self._max_rows = int(runner.max_num_tokens)
        self._staging = capture.install(
            runner.model,
            [hook.layer for hook in self._hooks],
            max_rows=self._max_rows + PADDING_ROWS,
            d_model=d_model,
            dtype=dtype,
            device=runner.device,
        )
        computed = DTYPES[str(runner.model_config.dtype)]
        stored = self._hooks[0].dtype
        self._cast = "none" if computed == stored else f"{computed} to {stored}, nearest even"
        self._row_nbytes = self._staging.rows.element_size() * d_model * len(self._hooks)
        # Two steps at least, so that the writer reads one while the engine fills the other.
        nbytes = max(link.ring_nbytes, 2 * self._row_nbytes * self._max_rows)
        self._ring_path = Path(link.folder) / "ring"
        self._ring_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._transfer = Transfer(ring.create(self._ring_path, self._ring_nbytes), self._staging)
        self._handover = Handover(
            self._writer, ring.RingSpace(self._ring_nbytes), link.policy, self._tell_loss
        )

    def close(self) -> None:
        """End the links; the writer learns that nothing more comes."""
        self._handover.close()
        self._census.close()

    def before_step(self) -> None:
        """Forget the counts of the step before; introduce the engine before the first one.

        Only now is the engine completely set up: cache sized, kernels chosen, graphs compiled.
        """
        self._staging.reset()
        if not self._introduced:
            self._introduced = True
            path, nbytes = str(self._ring_path), self._ring_nbytes
            facts = (
                *observe(self._worker, self._link.client_pid),
                Fact("capture.ring_nbytes", nbytes, "observed"),
                Fact("capture.cast", self._cast, "observed"),
            )
            self._send(WorkerHello(self._hooks, facts, path, nbytes, self._max_rows))

    def after_step(self, runner: Any, scheduled: Any, duration_ns: int) -> None:
        """Hand over the rows of the step that just ran.

        Raises:
            ActdsError: E501 when the rows differ from the schedule, E502 when the writer is gone.
        """
        mark = getattr(scheduled, "_actds", None)
        if mark is None:
            self._stop(-1, "a step without the scheduler's mark", "a marked step")
        self._learn(scheduled, mark.numbers)
        identity = identify(runner, scheduled)
        n = scheduled.total_num_scheduled_tokens
        self._compare(mark.step, identity, scheduled)
        nbytes = n * self._row_nbytes
        offset, stall = self._handover.place(nbytes, mark.step)
        rows = self._rows(mark, identity, offset or 0, nbytes, stall)
        if offset is None:
            policy, depth = self._link.policy, self._handover.depth
            self._handover.put(StepDropped(rows, "queue_full", policy, time.time_ns(), depth))
        else:
            self._transfer.copy(offset, n)
            self._handover.put(rows)
        self._census.send(self._executed(mark.step, duration_ns, runner, n))

    def _rows(
        self, mark: StepMark, identity: RowIdentity, offset: int, nbytes: int, stall: Stall | None
    ) -> StepRows:
        known = [self._numbers[request] for request in identity.request_ids]
        kept = identity.n_rows > 0
        return StepRows(
            step=mark.step,
            offset=offset,
            nbytes=nbytes,
            requests=np.array([number for number, _ in known], np.int64)[kept],
            n_rows=identity.n_rows[kept],
            prompt_lens=np.array([length for _, length in known], np.int64)[kept],
            positions=identity.positions,
            token_ids=identity.token_ids,
            finished=mark.finished,
            stall=stall,
        )

    def _tell_loss(self, dropped: StepDropped) -> None:
        self._census.send(StepLost(dropped.rows.step, dropped.reason))

    def _learn(self, scheduled: Any, numbers: dict[str, int]) -> None:
        """Keep number and prompt length of requests that are new to this worker."""
        for request in scheduled.finished_req_ids:
            self._numbers.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._numbers[new.req_id] = (numbers[new.req_id], int(new.prompt_len))

    def _compare(self, step: int, identity: RowIdentity, scheduled: Any) -> None:
        """Stop unless every hook saw every scheduled row, and identity covers them all."""
        n = scheduled.total_num_scheduled_tokens
        wanted = {r: c for r, c in scheduled.num_scheduled_tokens.items() if c}
        got = {r: int(c) for r, c in zip(identity.request_ids, identity.n_rows, strict=True) if c}
        if wanted != got or len(identity.positions) != n:
            self._stop(step, f"{sum(got.values())} identified rows", f"{n} scheduled rows")
        seen = self._staging.seen.cpu().numpy()
        # Padding rows come behind the scheduled ones, so a hook may see more, never fewer.
        if int(seen.min()) < n:
            self._stop(step, f"{int(seen.min())} rows at one hook", f"{n} scheduled rows")

    def _stop(self, step: int, got: str, expected: str) -> NoReturn:
        error = ActdsError("E501", f"step {step}", got=got, expected=expected)
        self._send(Failed.of(error))
        raise error

    def _send(self, message: object) -> None:
        try:
            self._writer.send(message)
        except OSError as error:
            raise ActdsError(
                "E502", "ring", got="the writer process is gone", expected="a writer"
            ) from error

    def _executed(self, step: int, duration_ns: int, runner: Any, n: int) -> StepExecuted:
        mode, padded = _kernel_mode(runner, int(self._staging.seen.max()), n)
        queues = self._handover.writer_state
        return StepExecuted(
            step=step,
            duration_ns=duration_ns,
            kernel_mode=mode,
            padded_tokens=padded,
            queue_depth_stage1=0,
            queue_depth_stage2=self._handover.depth,
            queue_depth_stage3=queues.queue_depth_stage3 if queues else None,
            disk_write_latency_p99=queues.disk_write_latency_p99 if queues else None,
            compression_backlog_bytes=queues.compression_backlog_bytes if queues else None,
        )

    @staticmethod
    def _refuse(config: Any) -> None:
        parallel = config.parallel_config
        refused = {
            "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
            "data_parallel_size": parallel.data_parallel_size > 1,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "speculative_config": config.speculative_config is not None,
            "kv_transfer_config": config.kv_transfer_config is not None,
        }
        for option, present in refused.items():
            if present:
                raise ActdsError(
                    "E012", f"engine option {option}", got="in use", expected="not in use"
                )


def _kernel_mode(runner: Any, seen: int, n: int) -> tuple[str | None, int | None]:
    """Return how the kernels of the step ran, and with how many rows."""
    config = runner.vllm_config
    state = getattr(runner, "execute_model_state", None)
    stats = getattr(state, "cudagraph_stats", None)
    if stats is not None and str(getattr(stats, "runtime_mode", "NONE")) != "NONE":
        return "cudagraph", seen
    compiled = (
        int(config.compilation_config.mode or 0) > 0 and not config.model_config.enforce_eager
    )
    return ("compiled" if compiled else "eager"), max(seen, n)
