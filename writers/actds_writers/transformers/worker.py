"""Witness B's eyes: in the engine, from the hooks' buffers into the host ring.

Stage 1 to stage 2 of the token's way. After every forward it takes the rows of real tokens out of
the padded ones, asserts that every hook ran, copies them into the ring, and tells writer and
census.
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
from actds_writers.transformers.batch import Columns

DTYPES: dict[str, DType] = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}


class Capture:
    """Captures from one model: installs the hooks, then hands over each step.

    Args:
        model: the loaded model.
        link: where writer and census listen.
        max_rows: rows of the largest step, padding included.

    Raises:
        ActdsError: E007 unknown layer, E012 a type that cannot be stored.
    """

    def __init__(self, model: Any, link: Link, max_rows: int) -> None:
        self._link, self._max_rows = link, max_rows
        self._introduced = False
        computed = DTYPES.get(str(model.dtype))
        if computed is None:
            raise ActdsError(
                "E012", "--engine dtype", got=str(model.dtype), expected=", ".join(DTYPES.values())
            )
        if not capture.decoder_layers(model):
            raise ActdsError(
                "E007",
                type(model).__name__,
                got="no module named layers.N",
                expected="a model whose decoder layers are found by that name",
            )
        d_model = int(model.config.get_text_config().hidden_size)
        stored: DType = link.store_dtype or computed  # type: ignore[assignment]
        self._hooks = tuple(
            HookSpec(f"{kind}.{layer}", kind, layer, d_model, stored) for kind, layer in link.hooks
        )
        self._staging = capture.install(
            model,
            [hook.layer for hook in self._hooks],
            max_rows=max_rows,
            d_model=d_model,
            dtype=getattr(torch, stored),
            device=model.device,
        )
        self._cast = "none" if computed == stored else f"{computed} to {stored}, nearest even"
        self._row_nbytes = self._staging.rows.element_size() * d_model * len(self._hooks)
        # Two steps at least, so that the writer reads one while the engine fills the other.
        nbytes = max(link.ring_nbytes, 2 * self._row_nbytes * max_rows)
        self._ring_path = Path(link.folder) / "ring"
        self._ring_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._transfer = Transfer(ring.create(self._ring_path, self._ring_nbytes), self._staging)
        self._writer = link.connect("writer", "worker")
        self._census: Connection = link.connect("census", "worker")
        self._handover = Handover(
            self._writer, ring.RingSpace(self._ring_nbytes), link.policy, self._tell_loss
        )

    def close(self) -> None:
        """End the links; the writer learns that nothing more comes."""
        self._handover.close()
        self._census.close()

    def before_step(self) -> None:
        """Forget the counts of the step before."""
        self._staging.reset()

    def introduce(self, facts: tuple[Fact, ...]) -> None:
        """Introduce the engine, once: after its first forward, when everything is chosen."""
        if self._introduced:
            return
        self._introduced = True
        path, nbytes = str(self._ring_path), self._ring_nbytes
        own = (
            Fact("capture.ring_nbytes", nbytes, "observed"),
            Fact("capture.cast", self._cast, "observed"),
        )
        self._send(WorkerHello(self._hooks, (*facts, *own), path, nbytes, self._max_rows))

    def after_step(
        self,
        step: int,
        finished: tuple[int, ...],
        columns: Columns,
        input_ids: torch.Tensor,
        duration_ns: int,
    ) -> None:
        """Hand over the rows of the step that just ran.

        Args:
            step: its number.
            finished: requests that ended before it.
            columns: who its rows are.
            input_ids: what the model read, ``(n_requests, width)``.
            duration_ns: how long the model ran.

        Raises:
            ActdsError: E501 when a hook did not see every row, E502 when the writer is gone.
        """
        n, n_padded = len(columns.index), input_ids.numel()
        seen = self._staging.seen.cpu().numpy()
        if int(seen.min()) != n_padded or int(seen.max()) != n_padded:
            self._stop(step, f"{seen.min()} to {seen.max()} rows at a hook", f"{n_padded} rows")
        index = torch.from_numpy(columns.index).to(input_ids.device)
        token_ids = input_ids.flatten()[index].cpu().numpy().astype(np.int64)
        nbytes = n * self._row_nbytes
        offset, stall = self._handover.place(nbytes, step)
        rows = StepRows(
            step=step,
            offset=offset or 0,
            nbytes=nbytes,
            requests=np.array([s.number for s in columns.sequences], np.int64),
            n_rows=columns.n_rows.astype(np.int64),
            prompt_lens=np.array([s.prompt_len for s in columns.sequences], np.int64),
            positions=columns.positions.astype(np.int64),
            token_ids=token_ids,
            finished=finished,
            stall=stall,
        )
        if offset is None:
            policy, depth = self._link.policy, self._handover.depth
            self._handover.put(StepDropped(rows, "queue_full", policy, time.time_ns(), depth))
        else:
            if n < n_padded:
                self._staging.rows[:, :n] = self._staging.rows[:, index]
            self._transfer.copy(offset, n)
            self._handover.put(rows)
        self._census.send(self._executed(step, duration_ns, n_padded, stall))

    def _executed(
        self, step: int, duration_ns: int, n_padded: int, _stall: Stall | None
    ) -> StepExecuted:
        queues = self._handover.writer_state
        return StepExecuted(
            step=step,
            duration_ns=duration_ns,
            kernel_mode="eager",
            padded_tokens=n_padded,
            queue_depth_stage1=0,
            queue_depth_stage2=self._handover.depth,
            queue_depth_stage3=queues.queue_depth_stage3 if queues else None,
            disk_write_latency_p99=queues.disk_write_latency_p99 if queues else None,
            compression_backlog_bytes=queues.compression_backlog_bytes if queues else None,
        )

    def _tell_loss(self, dropped: StepDropped) -> None:
        self._census.send(StepLost(dropped.rows.step, dropped.reason))

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
