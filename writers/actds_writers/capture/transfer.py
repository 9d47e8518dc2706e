"""Transfer from device to host memory, and the worker's end of the readouts' lane.

On CUDA a separate stream copies into page-locked memory and the engine's stream never waits; on a
CPU the same calls are plain copies. The lane is bounded and drops nothing: when it is full the
engine waits under every overflow policy. Its other end is in ``shards.logs``.
"""

from __future__ import annotations

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
from actds_writers.ipc.messages import IntArray, Stall, StepReadouts
from actds_writers.ipc.ring import RingSpace

CLOSE_TIMEOUT_S = 10.0


class Mark:
    """A point in the engine's stream that a copier waits for."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.event: Any = None
        """The CUDA event, ``None`` on a CPU."""
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(device))

    def nanoseconds_since(self, earlier: Mark) -> int | None:
        """Return the device time between two passed marks, ``None`` on a CPU."""
        if self.event is None or earlier.event is None:
            return None
        return int(earlier.event.elapsed_time(self.event) * 1e6)


class Copier:
    """Copies from the device to the host in the calling thread, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        index: torch.Tensor | None,
        after: Mark,
    ) -> None:
        """Copy rows and wait until they have arrived.

        Args:
            targets: ``(n_hooks, n_kept, width)`` each, in host memory.
            sources: ``(n_hooks, n, width)`` each, on the device.
            index: int64 ``(n_kept,)`` of the rows to copy, on the host; ``None`` for all.
        """
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                if index is None:
                    target.copy_(source)
                else:
                    torch.index_select(source, 1, index, out=target)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after.event)
            if index is not None:
                index = index.to(self._device, non_blocking=True)
            for target, source in zip(targets, sources, strict=True):
                kept = source if index is None else source.index_select(1, index)
                target.copy_(kept, non_blocking=True)
        self._stream.synchronize()


def host_memory(memory: mmap.mmap, device: torch.device) -> torch.Tensor:
    """Return shared memory as bytes, page-locked where the device is CUDA."""
    host = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        # Page-locked, so that the copy engine reads it at full speed.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), len(memory), 0))
    return host


def release_host(host: torch.Tensor, device: torch.device) -> None:
    """Undo the page lock of ``host_memory``; another run of the same process locks its own."""
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(host.data_ptr())


def typed(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a slice of a byte tensor as another type, without a copy."""
    count = 1
    for extent in shape:
        count *= extent
    nbytes = count * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


class Lane:
    """The worker's end of the lane."""

    def __init__(self, connection: Connection, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
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
        """Return the steps whose readouts the writer has not copied yet."""
        return self._space.depth

    def put(self, step: int, rows: Sequence[IntArray], readouts: torch.Tensor) -> None:
        """Copy the readouts of a step into the lane, waiting for room if necessary.

        Args:
            readouts: float32 ``(n_hooks, n, width)`` in host memory.

        Raises:
            ActdsError: E502 when the writer is gone.
        """
        if not readouts.numel():
            return
        requests, positions, token_ids = rows
        offset, waited = self._reserve(readouts.nbytes, step)
        typed(self._memory, offset, tuple(readouts.shape), torch.float32).copy_(readouts)
        self._waiting.put(
            StepReadouts(
                step, offset, readouts.nbytes, requests, positions, token_ids, waited, self.depth
            )
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Let the writer take what waits, within the timeout, and close the connection."""
        self._waiting.put(None)
        self._thread.join(timeout_s)
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        with suppress(OSError):
            self._connection.close()

    def _reserve(self, nbytes: int, step: int) -> tuple[int, Stall | None]:
        began, began_ns = time.monotonic_ns(), time.time_ns()
        with self._changed:
            depth, waited = self._space.depth, False
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
        while (message := self._waiting.get()) is not None:
            try:
                self._connection.send(message)
                self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed while it waits
                with self._changed:
                    self._gone = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._space.free(message.offset)
                self._changed.notify_all()
