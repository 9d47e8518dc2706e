"""The lane of readouts: what was put into it reaches the writer, also at the end of a run."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from actds_testing.faulty_disk import wait_until
from actds_writers.capture.transfer import Lane
from actds_writers.ipc.link import aligned


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
        rows = [np.zeros(4, np.int64)] * 4
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


def test_a_lane_of_a_server_gives_up_whole_steps_and_says_which(tmp_path: Path) -> None:
    """What is kept does not depend on how large a step is, only on whether any would fit."""
    ours, theirs = Pipe()
    largest, small = 4 * 2 * 8 * 9, 4 * 2 * 1 * 9
    nbytes = 7 * aligned(largest) + aligned(small)
    lane = Lane(ours, tmp_path / "lane", nbytes, step_nbytes=largest)

    def put(step: int, n_rows: int) -> bool:
        return lane.put(step, [np.zeros(n_rows, np.int64)] * 4, torch.zeros((2, n_rows, 9)))

    n_kept = 0
    while put(n_kept, 8):
        n_kept += 1
    assert n_kept == 7
    assert not put(n_kept + 1, 1)
    for step in range(n_kept):
        message = theirs.recv()
        assert (message.step, message.given_up) == (step, ())
        theirs.send(None)
    wait_until(lambda: lane.depth == 0, "room")
    assert put(n_kept + 2, 1)
    assert theirs.recv().given_up == (n_kept, n_kept + 1)
    theirs.close()
    lane.close()
