"""Transfer from device to host memory, and the worker's end of the readouts' lane.

On CUDA a separate stream copies into page-locked memory and the engine's stream never waits; on a
CPU the same calls are plain copies. The lane is bounded: when it is full the engine waits under
every overflow policy, or, if it serves traffic, gives up all that a step leaves. Its other end is
in ``shards.logs``.
"""

from __future__ import annotations

import logging
import math
import mmap
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actds.errors import ActdsError
from actds_writers.ipc import ring
from actds_writers.ipc.link import hang_up
from actds_writers.ipc.messages import IntArray, Stall, StepReadouts
from actds_writers.ipc.ring import RingSpace

CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger("actds")


class Mark:
    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.event: Any = None
        """The CUDA event, ``None`` on a CPU."""
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def nanoseconds_since(self, earlier: Mark) -> int | None:
        if self.event is None or earlier.event is None:
            return None
        return int(earlier.event.elapsed_time(self.event) * 1e6)


class Copier:
    """Copies from the device to the host in the calling thread, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread; page-locking uses the current one
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        index: torch.Tensor | None,
        after: Mark,
        poison: torch.Tensor | None = None,
    ) -> None:
        """Copy rows ``(n_hooks, n, width)`` to the host and wait until they have arrived.

        Args:
            index: int64 ``(n_kept,)`` of the rows to copy, on the host; ``None`` for all.
            poison: a part of the sources that becomes -1 once it is copied, so that nobody takes
                it for what is written there next.
        """
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                if index is None:
                    target.copy_(source)
                else:
                    torch.index_select(source, 1, index, out=target)
            if poison is not None:
                poison.fill_(-1)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            if index is not None:
                index = index.to(self._device, non_blocking=True)
            for target, source in zip(targets, sources, strict=True):
                kept = source if index is None else source.index_select(1, index)
                target.copy_(kept, non_blocking=True)
            if poison is not None:
                poison.fill_(-1)
        self._stream.synchronize()


class HostMemory:
    """Shared memory as bytes, page-locked until it is closed where the device is CUDA.

    What cannot be locked (a limit of the container) is used as it is: copies take longer then.
    """

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._device = device
        self._is_locked = False
        if device.type == "cuda":
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failure = int(runtime.cudaHostRegister(self.bytes.data_ptr(), len(memory), 0))
            self._is_locked = not failure
            if failure:
                self._clear("page-locked", failure)

    def close(self) -> None:
        """Unlock the memory: the next mapping at its address could not be locked otherwise."""
        if self._is_locked:
            self._is_locked = False
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if failure := int(runtime.cudaHostUnregister(self.bytes.data_ptr())):
                self._clear("unlocked", failure)

    def _clear(self, what: str, failure: int) -> None:
        nbytes = len(self.bytes)
        _log.warning("a ring of %d bytes is not %s (CUDA error %d)", nbytes, what, failure)
        with suppress(RuntimeError):  # the next launch would raise the error in its stead
            torch.zeros(1, device=self._device)


def typed(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


class Lane:
    """The worker's end of the lane.

    Args:
        step_nbytes: bytes of the largest step, where the engine does not wait for room. Readouts
            are given up while so many do not fit, however few they are themselves: what is kept
            must not depend on the size of a step. ``None`` to wait.
    """

    def __init__(
        self, connection: Connection, path: Path, nbytes: int, step_nbytes: int | None = None
    ) -> None:
        self.path, self.nbytes = path, nbytes
        self._step_nbytes = step_nbytes
        self._given_up: list[int] = []
        self._connection = connection
        self._space = RingSpace(nbytes)
        self._memory = torch.frombuffer(ring.create(path, nbytes), dtype=torch.uint8)
        self._changed = threading.Condition()
        self._gone = False
        # The writer has one message at a time, so a stalled writer fills no socket.
        self._waiting: queue.SimpleQueue[StepReadouts | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="actds-lane", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        return self._space.depth

    def put(self, step: int, rows: Sequence[IntArray], readouts: torch.Tensor) -> bool:
        """Copy readouts ``(n_hooks, n, width)`` into the lane; return whether they are kept.

        Raises:
            ActdsError: E502 when the writer is gone.
        """
        if not readouts.numel():
            return True
        requests, positions, token_ids = rows
        offset, waited = self._reserve(readouts.nbytes, step)
        if offset is None:
            self._given_up.append(step)
            return False
        typed(self._memory, offset, tuple(readouts.shape), torch.float32).copy_(readouts)
        self._waiting.put(
            StepReadouts(
                step,
                offset,
                readouts.nbytes,
                requests,
                positions,
                token_ids,
                waited,
                self.depth,
                tuple(self._given_up),
            )
        )
        self._given_up.clear()
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the writer take what waits, within the timeout, and close the connection."""
        self._waiting.put(None)
        self._thread.join(timeout_s)
        with self._changed:
            self._gone = True
            self._changed.notify_all()
            hang_up(self._connection)
        self._thread.join()

    def _reserve(self, nbytes: int, step: int) -> tuple[int | None, Stall | None]:
        began, began_ns = time.monotonic_ns(), time.time_ns()
        with self._changed:
            depth, waited = self._space.depth, False
            if self._step_nbytes is not None and not self._space.has_room(self._step_nbytes):
                return None, None
            while (offset := self._space.reserve(nbytes)) is None and not self._gone:
                waited = True
                self._changed.wait()
            if offset is None or self._gone:
                raise ActdsError(
                    "E502", "readouts", got="the writer process is gone", expected="a writer"
                )
        duration = time.monotonic_ns() - began
        return offset, Stall("readouts", began_ns, duration, depth, step) if waited else None

    def _send_all(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._connection.send(message)
                self._connection.recv()
                with self._changed:
                    self._space.free(message.offset)
                    self._changed.notify_all()
        except (EOFError, OSError):
            pass  # the writer is gone, or the lane is closed
        with self._changed:
            self._gone = True
            self._connection.close()
            self._changed.notify_all()
