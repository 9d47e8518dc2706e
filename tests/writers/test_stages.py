"""Stages 1 and 2: what the engine learns when they cannot go on, and which steps they give up."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
import pytest

from actds.errors import ActdsError
from actds_testing.faulty_disk import wait_until
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_writers.capture import transfer
from actds_writers.capture.stages import Step
from actds_writers.capture.transfer import Entry, Handover
from actds_writers.ipc.link import RingSpace
from actds_writers.ipc.messages import QueueState, RingFree, StepRows, StepsDropped
from actds_writers.sampling import POLICIES, LeftOut

pytestmark = pytest.mark.standard


NBYTES = 64


def rows(step: int) -> StepRows:
    one = np.array([0], np.int64)
    return StepRows(step, 0, 0, one, one + 1, one + 8, one + step, one, ())


class Worker:
    """A handover with rings of a few steps, before a writer that answers when told."""

    def __init__(
        self, policy: str, in_staging: int = 3, in_ring: int = 4, *, serves: bool = False
    ) -> None:
        self.writer, ours = Pipe()
        self.lost: list[tuple[int, str]] = []
        self.queues: QueueState | None = None
        self.handover = Handover(
            ours,
            RingSpace(in_staging * NBYTES),
            RingSpace(in_ring * NBYTES),
            POLICIES[policy],
            lambda step, reason: self.lost.append((step, reason)),
            lambda: self.queues,
            serves=serves,
        )
        self.n = 0

    def admit(self) -> Entry:
        entry = self.handover.admit(NBYTES, self.n)
        self.n += 1
        return entry

    def move(self, entry: Entry) -> None:
        offset = self.handover.place(entry, NBYTES)
        message = rows(entry.step)
        if offset is not None:
            object.__setattr__(message, "offset", offset)
            object.__setattr__(message, "nbytes", NBYTES)
        self.handover.moved(entry, message)

    def step(self) -> None:
        self.move(self.admit())


def take_all(writer: Connection) -> tuple[list[int], list[int]]:
    """Answer as a writer does until nothing comes; return steps stored and steps lost."""
    stored: list[int] = []
    lost: list[int] = []
    while writer.poll(0.2):
        message = writer.recv()
        if isinstance(message, StepsDropped):
            lost += [loss.rows.step for loss in message.losses]
            writer.send(RingFree(None))
        else:
            stored.append(message.step)
            writer.send(RingFree(message.offset))
    return stored, lost


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_which_steps_a_policy_gives_up(policy: str) -> None:
    worker = Worker(policy)
    if policy == "drop_oldest":
        for _ in range(10):
            worker.step()
        # Two are with the writer, two are the last that came.
        expected = [0, 1, 8, 9]
    else:
        for _ in range(4):
            worker.step()
        entries = [worker.admit() for _ in range(3)]  # staging is full, and so is the ring
        mover = threading.Thread(target=lambda: [worker.move(e) for e in entries], daemon=True)
        mover.start()
        wait_until(lambda: "ring" in worker.handover.waiting, "a full ring")
        late = [worker.admit() for _ in range(3)]
        assert [entry.state for entry in late] == ["dropped"] * 3
        expected = list(range(7))
    stored, lost = [], []
    if policy == "drop_newest":
        for entry in late:
            threading.Thread(target=worker.move, args=(entry,)).start()
    stored, lost = take_all(worker.writer)
    assert sorted(stored) == expected
    assert sorted(stored + lost) == list(range(worker.n))
    assert sorted(worker.lost) == [(step, "queue_full") for step in sorted(lost)]
    assert worker.handover.is_idle
    worker.handover.close()


def test_a_full_staging_ring_before_a_free_host_ring_is_the_transfer_s_fault() -> None:
    worker = Worker("drop_newest")
    entries = [worker.admit() for _ in range(5)]
    assert [entry.reason for entry in entries] == [None] * 3 + ["dma_backpressure"] * 2
    for entry in entries:
        worker.move(entry)
    assert take_all(worker.writer) == ([0, 1, 2], [3, 4])
    worker.handover.close()


def test_drop_oldest_gives_up_what_waits_for_the_transfer_when_that_is_behind() -> None:
    worker = Worker("drop_oldest")
    entries = [worker.admit() for _ in range(5)]
    assert [entry.state for entry in entries] == ["dropped"] * 2 + ["staged"] * 3
    for entry in entries:
        worker.move(entry)
    assert take_all(worker.writer) == ([2, 3, 4], [0, 1])
    worker.handover.close()


def test_a_thousand_losses_are_told_in_a_few_messages() -> None:
    worker = Worker("drop_oldest")
    for _ in range(1000):
        worker.step()
    n_messages, stored, lost = 0, 0, 0
    while worker.writer.poll(0.2):
        message = worker.writer.recv()
        n_messages += 1
        if isinstance(message, StepsDropped):
            lost += len(message.losses)
            worker.writer.send(RingFree(None))
        else:
            stored += 1
            worker.writer.send(RingFree(message.offset))
    assert (stored, lost) == (4, 996)
    assert n_messages < 12
    worker.handover.close()


def test_a_server_waits_for_no_writer_whatever_it_has_to_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages larger than a socket, and more records of drops than there is memory."""
    worker = Worker("drop_oldest", serves=True)
    served: list[ActdsError] = []

    def serve() -> None:
        worker.handover.send(b"x" * (64 << 20))
        for _ in range(8):
            worker.step()
        monkeypatch.setattr(transfer, "NOTES_NBYTES", 1)
        try:
            worker.step()
        except ActdsError as error:
            served.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(60)
    assert [error.code for error in served] == ["E506"]
    assert len(worker.writer.recv()) == 64 << 20
    assert take_all(worker.writer) == ([0, 1, 6, 7], [2, 3, 4, 5])
    worker.handover.close()


def test_a_step_without_room_for_its_readouts_is_dropped_for_that_reason() -> None:
    worker = Worker("drop_newest")
    entries = [worker.admit() for _ in range(5)]
    for entry in (entries[1], entries[4]):  # of which the latter was dropped before
        worker.handover.give_up_step(entry)
    assert worker.handover.depths[0] == 2
    for entry in entries:
        worker.move(entry)
    assert take_all(worker.writer) == ([0, 2], [1, 3, 4])
    assert worker.lost == [
        (3, "dma_backpressure"),
        (4, "dma_backpressure"),
        (1, "readouts_full"),
        (4, "readouts_full"),
    ]
    worker.handover.close()


def test_a_hook_that_saw_too_few_rows_stops_engine_and_writer(tmp_path: Path) -> None:
    with pipeline_for(tmp_path / "acts") as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        blind = engine.buffers.seen[1:]
        keep = engine.buffers.seen.fill_
        engine.buffers.seen.fill_ = lambda n: (keep(n), blind.fill_(n - 1))  # type: ignore
        with pytest.raises(ActdsError, match="E501 step 5: 11 rows at one hook"):
            for number in range(1, 50):
                engine.request(number)
        engine.close()
        with pytest.raises(ActdsError, match="E501"):
            pipeline.finish("failed")
            pipeline.poll()


def test_all_depths_of_a_drop_are_of_the_moment_of_the_drop() -> None:
    worker = Worker("drop_newest", in_staging=3, in_ring=2)
    for _ in range(4):  # two fill the ring, and two wait in the staging ring
        worker.admit() if worker.n > 1 else worker.step()
    worker.admit()
    worker.queues = QueueState(2, 1_000, 0.25)
    late = worker.admit()
    assert (late.state, late.depths, late.queues) == ("dropped", (3, 2), worker.queues)
    # Whatever is emptied before the writer is told changes nothing of it.
    worker.queues = QueueState(0, 0, None)
    worker.handover.moved(late, rows(late.step))
    assert take_all(worker.writer)[0] == [0, 1]
    assert (late.depths, late.queues) == ((3, 2), QueueState(2, 1_000, 0.25))


def step_of(n_rows: list[int], left_out: tuple[LeftOut, ...] = ()) -> Step:
    """Return a step of requests 5, 6, ... with four prompt tokens each."""
    requests = np.arange(5, 5 + len(n_rows))
    return Step(3, requests, np.array(n_rows), np.full(len(n_rows), 4), left_out, (), 1, None)


def test_a_step_is_cut_at_the_end_of_each_request() -> None:
    step, stays = step_of([3, 1, 2], (LeftOut("x"), LeftOut("y"), LeftOut("z"))).cut({5: 2, 6: 1})
    assert stays is not None and stays.tolist() == [True, False, False, False, True, True]
    assert (step.requests.tolist(), step.n_rows.tolist()) == ([5, 7], [1, 2])
    assert [out.prefill for out in step.left_out] == ["x", "z"]
    whole = step_of([3, 1, 2])
    assert whole.cut({}) == (whole, None)
