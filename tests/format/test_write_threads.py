"""Write threads: the same files for any number of them, in bounded memory, and no stage waits."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from actds.dataset.write_threads import WriteThreads, window
from actds.errors import ActdsError
from actds.format.encoding import ArrayEncoder, encode_array
from actds.store import Buffer, NewFile, Put
from actds.store.local import LocalStore

PATIENCE_S = 60.0
D_MODEL = 4096  # 128 rows per chunk
ROWS = np.random.default_rng(0).normal(0, 1, (1000, D_MODEL)).astype("<f4").view("<u4") >> 16
BITS = ROWS.astype("<u2")
N_CHUNKS = 8


class File(NewFile):
    """A file in memory, whose calls may be held up."""

    def __init__(self, during: Callable[[str], None] = lambda call: None) -> None:
        self._during = during
        self.data, self.hashed = bytearray(), hashlib.sha256()
        self.is_committed = self.is_abandoned = False

    def hash(self, parts: Sequence[Buffer]) -> None:
        self._during("hash")
        for part in parts:
            self.hashed.update(part)

    def write(self, parts: Sequence[Buffer]) -> None:
        self._during("write")
        for part in parts:
            self.data += part

    def commit(self) -> Put:
        self._during("commit")
        self.is_committed = True
        return Put(len(self.data), self.hashed.hexdigest())

    def abandon(self) -> None:
        self.is_abandoned = True


class Counted(ArrayEncoder):
    """Counts the chunks that were encoded."""

    n_encoded = 0

    def encode(self, index: int, out: np.ndarray) -> int:
        self.n_encoded += 1
        return super().encode(index, out)


@pytest.fixture
def threads() -> Iterator[WriteThreads]:
    with WriteThreads(2) as running:
        yield running


@pytest.mark.parametrize("n_threads", [0, 1, 3])
@pytest.mark.parametrize("raw", [False, True])
def test_files_are_the_same_for_any_number_of_threads(
    n_threads: int, raw: bool, tmp_path: Path
) -> None:
    order = np.random.default_rng(1).permutation(len(BITS))
    expected = b"".join(encode_array(BITS[order], "bfloat16", raw=raw).parts)
    store = LocalStore(tmp_path)
    with WriteThreads(n_threads) as running:
        encoders = [ArrayEncoder(BITS, "bfloat16", order=order, raw=raw) for _ in range(3)]
        arrays = [running.add(e, store.begin(f"{n}/a")) for n, e in enumerate(encoders)]
        puts = [array.put.result(PATIENCE_S) for array in arrays]
    assert puts == [Put(len(expected), hashlib.sha256(expected).hexdigest())] * 3
    assert store.list() == ["0/a", "1/a", "2/a"]
    assert {store.read(path) for path in store.list()} == {expected}


def test_a_disk_that_stalls_holds_up_a_bounded_number_of_chunks(threads: WriteThreads) -> None:
    rows = np.tile(BITS, (8, 1))
    disk = threading.Event()

    def stall(call: str) -> None:
        assert call == "hash" or disk.wait(PATIENCE_S)

    encoders = [Counted(rows, "bfloat16") for _ in range(3)]
    assert encoders[0].n_chunks > window(2)
    arrays = [threads.add(encoder, File(stall)) for encoder in encoders]
    threads.submit(lambda: None).result(PATIENCE_S)
    for _ in range(200):  # nothing tells when nothing more happens
        threading.Event().wait(0.005)
    n_encoded = sum(encoder.n_encoded for encoder in encoders)
    assert 0 < n_encoded <= window(2)
    left = sum(encoder.n_chunks for encoder in encoders) - n_encoded
    assert threads.waiting_nbytes == left * encoders[0].chunk_nbytes
    assert not wait([array.put for array in arrays], 0).done
    disk.set()
    assert len({array.put.result(PATIENCE_S).sha256 for array in arrays}) == 1
    assert threads.waiting_nbytes == 0


def test_a_file_that_is_being_synced_holds_up_nothing_else(threads: WriteThreads) -> None:
    synced = threading.Event()
    slow = File(lambda call: assert_(call != "commit" or synced.wait(PATIENCE_S)))
    first = threads.add(ArrayEncoder(BITS, "bfloat16"), slow)
    later = [threads.add(ArrayEncoder(BITS, "bfloat16"), File()) for _ in range(3)]
    for array in later:
        array.put.result(PATIENCE_S)
    assert first.encoded.done() and not first.put.done()
    synced.set()
    assert first.put.result(PATIENCE_S) == later[0].put.result()


def assert_(truth: bool) -> None:
    assert truth


@pytest.mark.parametrize("call", ["hash", "write", "commit"])
@pytest.mark.parametrize("n_threads", [0, 2])
def test_a_failure_ends_one_file_and_gives_its_rows_back(n_threads: int, call: str) -> None:
    def fail(called: str) -> None:
        if called == call:
            raise ActdsError("E503", "a file", got="no space", expected="a durable write")

    with WriteThreads(n_threads) as running:
        bad = File(fail)
        failed = running.add(ArrayEncoder(BITS, "bfloat16"), bad)
        fine = running.add(ArrayEncoder(BITS, "bfloat16"), File())
        with pytest.raises(ActdsError, match="no space"):
            failed.put.result(PATIENCE_S)
        assert failed.encoded.result(PATIENCE_S) is None
        assert fine.put.result(PATIENCE_S).nbytes > 0
        # Its chunks are free again: nothing of it is left to hold up what comes.
        for _ in range(3):
            running.add(ArrayEncoder(BITS, "bfloat16"), File()).put.result(PATIENCE_S)
    assert not bad.is_committed and bad.is_abandoned == (call != "commit")


def test_an_encoder_that_fails_ends_its_file_only(threads: WriteThreads) -> None:
    class Broken(ArrayEncoder):
        def encode(self, index: int, out: np.ndarray) -> int:
            if index == 3:
                raise MemoryError("no memory")
            return super().encode(index, out)

    file = File()
    failed = threads.add(Broken(BITS, "bfloat16"), file)
    fine = threads.add(ArrayEncoder(BITS, "bfloat16"), File())
    with pytest.raises(MemoryError):
        failed.put.result(PATIENCE_S)
    assert file.is_abandoned and not file.is_committed
    assert fine.put.result(PATIENCE_S).nbytes > 0


def test_a_store_that_holds_files_is_given_few_at_a_time() -> None:
    most, now, lock, many = 2, [0, 0], threading.Lock(), 6

    class Held(File):
        def write(self, parts: Sequence[Buffer]) -> None:
            with lock:
                now[0] += not self.data
                now[1] = max(now)
            super().write(parts)

        def commit(self) -> Put:
            with lock:
                now[0] -= 1
            return super().commit()

    with WriteThreads(4, most) as running:
        arrays = [running.add(ArrayEncoder(BITS, "bfloat16"), Held()) for _ in range(many)]
        wait([array.put for array in arrays], PATIENCE_S)
    assert now[0] == 0 and 1 <= now[1] <= most


def test_hungry_is_when_nothing_is_left_to_encode(threads: WriteThreads) -> None:
    threads.wait_until_hungry()
    begun, go = threading.Event(), threading.Event()

    class Slow(ArrayEncoder):
        def encode(self, index: int, out: np.ndarray) -> int:
            begun.set()
            assert go.wait(PATIENCE_S)
            return super().encode(index, out)

    array = threads.add(Slow(BITS, "bfloat16"), File())
    assert begun.wait(PATIENCE_S)
    fed = threading.Thread(target=threads.wait_until_hungry)
    fed.start()
    fed.join(0.05)
    assert fed.is_alive()
    go.set()
    fed.join(PATIENCE_S)
    assert not fed.is_alive() and array.put.result(PATIENCE_S).nbytes > 0
