"""What the worker sees of the writer's queues: of one moment, and of the disk alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from actds.errors import ActdsError
from actds.format import canonical
from actds.store import Buffer, Put
from actds.store.local import LocalStore, NewLocalFile
from actds_writers.ipc.link import QueuePage
from actds_writers.ipc.messages import QueueState
from actds_writers.monitor.metrics import DISK_WINDOW_S, DiskMeter
from actds_writers.shards.writer import TimedStore


def test_the_latency_of_the_disk_is_that_of_files_and_of_a_window() -> None:
    now = [0.0]
    disk = DiskMeter(lambda: now[0])
    assert disk.p99() is None

    def call(file: object, seconds: float) -> None:
        with disk.asked(file):
            now[0] += seconds

    for n in range(200):
        call(n, 0.001)
        now[0] += 0.01  # encoding, hashing or waiting between two calls is not the disk's
        call(n, 0.002)
        disk.ended(n)
    assert disk.p99() == pytest.approx(0.003)
    call("slow", 0.2)
    now[0] += 1
    assert disk.p99() == pytest.approx(0.003), "one of 201 is not the 99th percentile"
    call("slower", 0.3)
    call("slower", 0.1)
    call("slowest", 0.9)
    assert disk.p99() == pytest.approx(0.2)
    disk.ended("slow")
    disk.ended("slower")
    disk.ended("slowest")
    now[0] += DISK_WINDOW_S
    assert disk.p99() is None


def test_a_disk_that_stalls_is_seen_while_it_does() -> None:
    now = [0.0]
    disk = DiskMeter(lambda: now[0])
    with disk.asked("file"):
        for expected in (2.0, 4.0):
            now[0] += 2
            assert disk.p99() == pytest.approx(expected)
    disk.ended("file")
    now[0] += 10
    assert disk.p99() == pytest.approx(4.0)


def test_a_store_is_timed_without_the_digests_of_its_files(tmp_path: Path) -> None:
    now = [0.0]
    disk = DiskMeter(lambda: now[0])

    class Slow(NewLocalFile):
        def hash(self, parts: Sequence[Buffer]) -> None:
            now[0] += 100
            super().hash(parts)

        def write(self, parts: Sequence[Buffer]) -> None:
            now[0] += 1
            super().write(parts)

        def commit(self) -> Put:
            now[0] += 2
            return super().commit()

    class Local(LocalStore):
        def begin(self, path: str) -> NewLocalFile:
            return Slow(path, self.root / path, self._make_folder, os.link)

    store = TimedStore.around(Local(tmp_path), disk)
    assert (store.uri, store.holds_new_files) == (str(tmp_path), False)
    file = store.begin("a/b")
    for _ in range(2):
        file.hash([b"x"])
        file.write([b"x"])
    assert file.commit() == Put(2, canonical.digest(b"xx"))
    assert disk.p99() == pytest.approx(4.0) and store.read("a/b") == b"xx"
    with pytest.raises(ActdsError, match="E309"):
        store.put_new("a/b", [b"y"])


def test_a_page_of_queues_is_of_one_moment(tmp_path: Path) -> None:
    page = QueuePage.beside(tmp_path / "ring", new=True)
    reader = QueuePage.beside(tmp_path / "ring")
    assert reader.read() is None
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            for n in range(1000):
                page.publish(QueueState(n, n * 10**6, n / 8 or None))

    writing = threading.Thread(target=publish)
    writing.start()
    try:
        for _ in range(5000):
            if (state := reader.read()) is not None:
                n = state.queue_depth_stage3
                assert state == QueueState(n, n * 10**6, n / 8 or None)
    finally:
        ended.set()
        writing.join()
