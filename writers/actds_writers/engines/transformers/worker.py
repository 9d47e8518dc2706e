"""Witness B's eyes: in the engine, from the hooks' buffers to the stages.

After every forward it takes the rows of real tokens out of the padded ones and hands the step
over; what follows happens beside the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actds.errors import ActdsError
from actds.schema import DType
from actds_writers.capture import op as capture
from actds_writers.capture.check import NO_CHECK
from actds_writers.capture.directions import directions
from actds_writers.capture.stages import Stages, Step
from actds_writers.capture.transfer import Mark
from actds_writers.engines.transformers.batch import Columns
from actds_writers.engines.transformers.check import check_hooks
from actds_writers.ipc.link import Link
from actds_writers.ipc.messages import Fact, Failed, HookSpec

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
        ActdsError: E007 unknown layer or none that can be captured, E012 a type that cannot be
            stored, E507 rows that are not the model's.
    """

    def __init__(self, model: Any, link: Link, max_rows: int) -> None:
        self._max_rows = max_rows
        self._introduced = False
        self._began: Mark | None = None
        self._check_fact = NO_CHECK
        try:
            self._install(model, link)
        except ActdsError as error:
            with link.connect("writer", "worker") as writer:
                writer.send(Failed.of(error))
            raise

    def _install(self, model: Any, link: Link) -> None:
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
        self._device = model.device
        self._buffers = capture.install(
            model,
            [hook.layer for hook in self._hooks],
            max_rows=self._max_rows,
            d_model=d_model,
            dtype=getattr(torch, stored),
            device=model.device,
            form="first",
            directions=directions(link, len(self._hooks), d_model),
        )
        self._cast = "none" if computed == stored else f"{computed} to {stored}, nearest even"
        if link.check:
            found = check_hooks(model, self._buffers, self._hooks, self._max_rows)
            self._check_fact = found.fact()
        self._stages = Stages(link, self._buffers, self._hooks, self._max_rows)

    def close(self) -> None:
        """End the links; the writer learns that nothing more comes."""
        self._stages.close()

    def before_step(self) -> None:
        """Forget the counts of the step before."""
        self._buffers.reset()
        self._began = Mark(self._device, timed=True)

    def introduce(self, facts: tuple[Fact, ...]) -> None:
        """Introduce the engine, once: after its first forward, when everything is chosen."""
        if self._introduced:
            return
        self._introduced = True
        cast = Fact("capture.cast", self._cast, "observed")
        self._stages.introduce((*facts, cast, self._check_fact))

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
        seen = set(self._buffers.seen.tolist())
        if seen != {n_padded}:
            got = f"{' or '.join(map(str, sorted(seen)))} rows at a hook"
            error = ActdsError("E501", f"step {step}", got=got, expected=f"{n_padded} rows")
            self._stages.fail(error)
            raise error
        index = torch.from_numpy(columns.index).to(self._device)
        if n < n_padded:
            for buffer in (self._buffers.rows, self._buffers.readouts):
                buffer[:, :n] = buffer[:, index]
        told = Step(
            step=step,
            requests=np.array([s.number for s in columns.sequences], np.int64),
            n_rows=columns.n_rows.astype(np.int64),
            prompt_lens=np.array([s.prompt_len for s in columns.sequences], np.int64),
            left_out=(),
            finished=finished,
            duration_ns=duration_ns,
            kernel_mode="eager",
            began=self._began,
        )
        positions = torch.from_numpy(columns.positions).to(self._device)
        self._stages.hand_over(told, input_ids.flatten()[index], positions)
