"""Buffers of a thread, used again for every file and chunk: fresh pages cost more than a copy."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[str, Bytes] = {}


_thread = _Thread()


def of_thread(use: str, nbytes: int) -> Bytes:
    """Return memory, ``(nbytes,)``, that this thread gets again at its next call for that use."""
    buffer = _thread.by_use.get(use)
    if buffer is None or buffer.size < nbytes:
        buffer = _thread.by_use[use] = np.empty(nbytes, np.uint8)
    return buffer[:nbytes]


def exchange(by_use: dict[str, Bytes]) -> dict[str, Bytes]:
    """Give this thread other buffers; return those that it had."""
    had, _thread.by_use = _thread.by_use, by_use
    return had
