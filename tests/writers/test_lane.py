"""The lane of readouts: what was put into it reaches the writer, also at the end of a run."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from actds_writers.capture.transfer import Lane


def take(writer: Connection, begun: threading.Event, seen: list[int]) -> None:
    """Take steps as the writer does, none before it is told to begin."""
    begun.wait()
    try:
        while True:
            message = writer.recv()
            seen.append(message.step)
            writer.send(None)
    except EOFError:
        pass


def fill(lane: Lane, n_steps: int) -> None:
    for step in range(n_steps):
        rows = [np.zeros(4, np.int64)] * 3
        lane.put(step, rows, torch.full((2, 4, 9), float(step)))


def test_what_waits_when_the_lane_is_closed_reaches_a_writer_that_is_behind(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    begun, seen = threading.Event(), list[int]()
    writer = threading.Thread(target=take, args=(theirs, begun, seen))
    writer.start()
    lane = Lane(ours, tmp_path / "lane", 1 << 16)
    fill(lane, 7)
    late = threading.Timer(0.3, begun.set)
    late.start()
    lane.close()
    writer.join()
    assert seen == list(range(7)) and lane.depth == 0


def test_a_writer_that_stands_still_is_not_waited_for_beyond_the_timeout(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    lane = Lane(ours, tmp_path / "lane", 1 << 16)
    fill(lane, 3)
    lane.close(timeout_s=0.1)
    assert lane.depth == 3
    theirs.close()


def test_a_writer_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    lane = Lane(ours, tmp_path / "lane", 1 << 16)
    theirs.close()
    fill(lane, 1)
    lane.close(timeout_s=3600)
