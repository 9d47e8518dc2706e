"""Write threads: arrays on their way into files, encoded, hashed, written and synced side by side.

Every thread does whatever is next: it writes what is hashed and encoded already, hashes it, or
encodes another chunk. So no stage waits while another works, and the rate grows with the threads
until the disk is full. A file is hashed and written in its own order, by one thread each at a time;
chunks are encoded in any order, and how many of them may wait bounds the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Self, TypeVar

import numpy as np

from actds.format.codec import Bytes
from actds.format.encoding import ArrayEncoder
from actds.store import NewFile, Put

R = TypeVar("R")

N_SYNCING = 8
"""Files that are synced side by side: that takes time, and hardly any of the processor's."""
N_OPEN, N_HELD = 32, 2
"""Files begun and not yet durable: those on a disk, and those that are held in memory until put."""
_FRAMES_PER_FILE, _FRAMES_AT_ONCE = 8, 4


def window(n_threads: int) -> int:
    """Return how many encoded chunks may wait for being hashed and written."""
    return 4 * max(1, n_threads) + _FRAMES_PER_FILE


@dataclass(eq=False)
class ArrayOnItsWay:
    """One array on its way into a file.

    Args:
        encoder: encodes its chunks.
        file: takes them.

    Attributes:
        encoded: is set when the rows are needed no more, also when the file failed.
        put: what was written, when it is durable.
    """

    encoder: ArrayEncoder
    file: NewFile
    encoded: Future[None] = field(default_factory=Future)
    put: Future[Put] = field(default_factory=Future)
    next: int = 0
    n_encoded: int = 0
    n_in_row: int = 0
    n_hashed: int = 0
    n_written: int = 0
    is_hashing: bool = False
    is_writing: bool = False
    is_read: bool = False
    n_encoding: int = 0
    frames: dict[int, tuple[memoryview, Bytes | None]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.sizes = [0] * self.encoder.n_chunks

    @property
    def has_chunks(self) -> bool:
        """Return whether there is a chunk that nobody has begun to encode."""
        return self.next < self.encoder.n_chunks

    @property
    def is_through(self) -> bool:
        return min(self.n_hashed, self.n_written) > self.encoder.n_chunks

    @property
    def is_idle(self) -> bool:
        return not (self.is_hashing or self.is_writing or self.n_encoding)

    def ready(self, first: int) -> list[memoryview]:
        """Return the encoded chunks in a row from one on, the index of the file as the last."""
        return [self.frames[index][0] for index in range(first, self.n_in_row)]

    def encoded_as(self, index: int, size: int, memory: Bytes) -> None:
        """Note an encoded chunk; the index of the file follows the last one."""
        self.n_encoding -= 1
        self.n_encoded += 1
        self.sizes[index] = size
        self.frames[index] = memory.data[:size], memory
        if self.n_encoded == self.encoder.n_chunks:
            end = self.encoder.index(self.sizes)
            self.frames[self.encoder.n_chunks] = memoryview(end), None
        while self.n_in_row in self.frames:
            self.n_in_row += 1


After = Callable[[], None]
"""What follows from a task, to be called without the lock."""
Note = Callable[[], After | None]
"""Notes what a task has changed, under the lock."""
Task = Callable[[], Note]


class WriteThreads:
    """Threads that bring arrays into files.

    Args:
        n_threads: threads that encode, hash and write; with none, the caller's does it all before
            ``add`` returns.
        n_open: files that may be begun and not yet durable.
    """

    def __init__(self, n_threads: int, n_open: int = N_OPEN) -> None:
        self._n_open, self._n_slots = n_open, window(n_threads)
        self._arrays: list[ArrayOnItsWay] = []  # not yet all written, in the order of their begin
        self._open: set[ArrayOnItsWay] = set()
        self._kept: list[Bytes] = []  # memory of chunks that are written
        self._n_idle = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # A condition of its own: whoever waits here must not be woken by every chunk.
        self._hungry = threading.Condition(self._lock)
        self._is_closed = False
        self._syncs = ThreadPoolExecutor(N_SYNCING, "actds-sync") if n_threads else None
        self._threads = [
            threading.Thread(target=self._work, name=f"actds-encode-{n}", daemon=True)
            for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until everything is done, and end the threads."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._syncs is not None:
            self._syncs.shutdown()

    def add(self, encoder: ArrayEncoder, file: NewFile) -> ArrayOnItsWay:
        """Bring an array into a file; those added before come first."""
        array = ArrayOnItsWay(encoder, file)
        with self._lock:
            self._arrays.append(array)
            self._changed.notify_all()
        if not self._threads:
            self._work(array)
        return array

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Call something that waits for the store, beside everything else."""
        if self._syncs is not None:
            return self._syncs.submit(work)
        done: Future[R] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done

    @property
    def waiting_nbytes(self) -> int:
        """Return the bytes of the rows that nobody has begun to encode."""
        with self._lock:
            return sum((a.encoder.n_chunks - a.next) * a.encoder.chunk_nbytes for a in self._arrays)

    def wait_until_hungry(self) -> None:
        """Wait until a thread could encode more than it was given."""
        with self._lock:
            self._hungry.wait_for(self._is_hungry)

    def _is_hungry(self) -> bool:
        if not self._threads:
            return True
        is_full = not self._n_slots or len(self._open) >= self._n_open
        return self._n_idle > 0 and not is_full and self._find() is None

    # what the threads do -----------------------------------------------------------------------

    def _work(self, until: ArrayOnItsWay | None = None) -> None:
        note: Note | None = None
        while until is None or not until.put.done():
            with self._lock:
                # One lock for what was done and what is next: each one is a chance to wait.
                after = None if note is None else note()
                task = self._next() if after is not None else self._wait()
            if after is not None:
                after()
            elif task is None:
                return
            note = None if task is None else task()

    def _wait(self) -> Task | None:
        """Return what is to be done next, None at the end."""
        while (task := self._next()) is None and not (self._is_closed and not self._arrays):
            self._n_idle += 1
            self._feel()
            self._changed.wait()
            self._n_idle -= 1
        return task

    def _feel(self) -> None:
        """Tell who waits for it that a thread could encode more."""
        if self._is_hungry():
            self._hungry.notify_all()

    def _next(self) -> Task | None:
        measured = self._find()
        if measured is None:
            return None
        what, array = measured
        if what == "write":
            array.is_writing = True
            return partial(self._write, array, array.ready(array.n_written))
        if what == "hash":
            array.is_hashing = True
            return partial(self._hash, array, array.ready(array.n_hashed))
        self._open.add(array)
        index, memory = array.next, self._memory(array.encoder.capacity)
        array.next += 1
        array.n_encoding += 1
        self._n_slots -= 1
        return partial(self._encode, array, index, memory)

    def _find(self) -> tuple[Literal["write", "hash", "encode"], ArrayOnItsWay] | None:
        """Return what is to be done next, of the oldest file that has it.

        What is encoded is hashed and written when several chunks are, or nothing is left to encode.
        """
        for at_least in (_FRAMES_AT_ONCE, 1):
            for array in self._arrays:
                if array.error is not None:
                    continue
                wanted = 1 if array.n_encoded == array.encoder.n_chunks else at_least
                if not array.is_writing and array.n_in_row - array.n_written >= wanted:
                    return "write", array
                if not array.is_hashing and array.n_in_row - array.n_hashed >= wanted:
                    return "hash", array
            if self._n_slots and at_least > 1:
                for array in self._arrays:
                    if array.has_chunks and self._may_encode(array):
                        return "encode", array
        return None

    def _may_encode(self, array: ArrayOnItsWay) -> bool:
        if array not in self._open:
            return len(self._open) < self._n_open
        behind = array.next - min(array.n_hashed, array.n_written)
        return behind < _FRAMES_PER_FILE + len(self._threads)

    def _memory(self, nbytes: int) -> Bytes:
        memory = self._kept.pop() if self._kept else np.empty(nbytes, np.uint8)
        return memory if memory.size >= nbytes else np.empty(nbytes, np.uint8)

    def _encode(self, array: ArrayOnItsWay, index: int, memory: Bytes) -> Note:
        error, size = None, 0
        try:
            size = array.encoder.encode(index, memory)
        except BaseException as found:
            error = found

        def note() -> After | None:
            array.encoded_as(index, size, memory)
            return self._done(array, error)

        return note

    def _hash(self, array: ArrayOnItsWay, parts: Sequence[memoryview]) -> Note:
        error = _called(array.file.hash, parts)

        def note() -> After | None:
            array.is_hashing = False
            array.n_hashed += len(parts)
            return self._done(array, error)

        return note

    def _write(self, array: ArrayOnItsWay, parts: Sequence[memoryview]) -> Note:
        error = _called(array.file.write, parts)

        def note() -> After | None:
            array.is_writing = False
            array.n_written += len(parts)
            return self._done(array, error)

        return note

    def _done(self, array: ArrayOnItsWay, error: BaseException | None) -> After | None:
        """Note what a task has changed; return what follows, to be called without the lock."""
        array.error = array.error or error
        failed = array.error is not None
        if failed:
            array.next = array.encoder.n_chunks
        through = min(array.n_hashed, array.n_written)
        ends = array.is_idle and (failed or array.is_through)
        for index in [index for index in array.frames if ends or index < through]:
            memory = array.frames.pop(index)[1]
            if memory is not None:
                self._free(memory)
        if ends:
            self._arrays.remove(array)
        is_read = not array.is_read and (ends or array.n_encoded == array.encoder.n_chunks)
        array.is_read |= is_read
        if self._n_idle:
            self._changed.notify_all()
        if not is_read and not ends:
            return None

        def after() -> None:
            if is_read:
                array.encoded.set_result(None)
            if ends:
                self._finish(array)

        return after

    def _free(self, memory: Bytes) -> None:
        self._kept.append(memory)
        self._n_slots += 1

    def _finish(self, array: ArrayOnItsWay) -> None:
        def finish() -> None:
            error, put = array.error, None
            try:
                if error is None:
                    put = array.file.commit()
                else:
                    array.file.abandon()
            except BaseException as found:
                error = found
            with self._lock:
                self._open.discard(array)
                self._changed.notify_all()
                self._feel()
            if put is None:
                array.put.set_exception(error or AssertionError("nothing was put"))
            else:
                array.put.set_result(put)

        self.submit(finish)


def _called(
    function: Callable[[Sequence[memoryview]], None], parts: Sequence[memoryview]
) -> BaseException | None:
    """Call a function; return what it raised."""
    try:
        function(parts)
    except BaseException as error:
        return error
    return None
