"""Transfer: the rows of a step from staging into the host ring.

Stage 1 to stage 2. On CPU a memory copy; on CUDA a device-to-host copy into page-locked ring
memory, complete before the step is announced to the writer.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch

from actds_writers.capture import Staging


class Transfer:
    """Copies steps into a ring.

    Args:
        memory: the ring's shared memory.
        staging: where the hooks leave the rows.
    """

    def __init__(self, memory: mmap.mmap, staging: Staging) -> None:
        self._staging = staging
        self._nbytes = len(memory)
        self._host = torch.frombuffer(memory, dtype=staging.rows.dtype)
        self._cuda = staging.rows.device.type == "cuda"
        if self._cuda:
            # Page-locked, so that the copy engine reads it at full speed.
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(self._host.data_ptr(), self._nbytes, 0))

    def copy(self, offset: int, n_rows: int) -> None:
        """Copy the first ``n_rows`` of every hook to a logical offset of the ring.

        The slice in the ring is ``(n_hooks, n_rows, d_model)``.
        """
        n_hooks, _, d_model = self._staging.rows.shape
        first = (offset % self._nbytes) // self._staging.rows.element_size()
        count = n_hooks * n_rows * d_model
        target = self._host[first : first + count].view(n_hooks, n_rows, d_model)
        target.copy_(self._staging.rows[:, :n_rows], non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.current_stream().synchronize()
