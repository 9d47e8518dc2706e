"""Transfer: device memory to host memory, beside the engine.

Stage 1 to stage 2 of the token's way. On CUDA a stream of its own copies into page-locked memory
and the engine's stream never waits; on a CPU the same calls are plain copies.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch


class Mark:
    """A point in the engine's stream, which a copier waits for.

    Args:
        device: device of the engine.
        timed: whether the time between two marks is wanted.
    """

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @property
    def event(self) -> Any:
        """Return the CUDA event, ``None`` on a CPU."""
        return self._event

    def nanoseconds_since(self, earlier: Mark) -> int | None:
        """Return the device time between two marks that are over, ``None`` on a CPU."""
        if self._event is None or earlier.event is None:
            return None
        return int(earlier.event.elapsed_time(self._event) * 1e6)


class Copier:
    """Copies from the device to the host in the calling thread, on a stream of its own.

    Args:
        device: device of the engine.
    """

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
        """Copy rows and wait until they are there.

        Args:
            targets: ``(n_hooks, n_kept, width)`` each, in host memory.
            sources: ``(n_hooks, n, width)`` each, on the device.
            index: int64 ``(n_kept,)`` of the rows to copy, on the host; ``None`` for all.
            after: what must be over before.
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


def typed(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a slice of a byte tensor as another type, without a copy."""
    count = 1
    for extent in shape:
        count *= extent
    nbytes = count * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)
