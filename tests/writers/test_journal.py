"""The census journal: messages come back as they were, and no segment can go missing unseen."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.store import layout
from actds.store.interface import Put
from actds.store.local import LocalStore
from actds_writers.census import process as journal_module
from actds_writers.census.process import (
    Journal,
    from_line,
    merged,
    read_journal,
    remove_journal,
    segments,
    to_line,
)
from actds_writers.ipc.messages import (
    ClientFacts,
    LeftOut,
    LogitsRead,
    PromptFact,
    Reference,
    RequestArrived,
    RequestFinished,
    StepExecuted,
    StepLost,
    StepScheduled,
    TokensSampled,
)

DATASET = "0" * 32
COUNTS = st.integers(0, 2**62)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    return np.array(draw(st.lists(COUNTS, max_size=5)), np.int64)


@st.composite
def floats(draw: st.DrawFn) -> np.ndarray:
    """Return float32 of any bits, no numbers included."""
    return np.array(draw(st.lists(st.integers(0, 2**32 - 1), max_size=5)), np.uint32).view("f4")


REFERENCES = st.builds(Reference, COUNTS, COUNTS, COUNTS, st.none() | COUNTS)
MESSAGES = st.one_of(
    st.builds(
        RequestArrived, COUNTS, TEXTS, TEXTS, COUNTS, COUNTS, st.none() | TEXTS,
        st.none() | st.lists(st.binary(max_size=32), max_size=3).map(tuple),
        st.builds(LeftOut, st.none() | TEXTS, st.none() | TEXTS),
    ),
    st.builds(
        StepScheduled, COUNTS, COUNTS, arrays(), arrays(), arrays(),
        st.lists(REFERENCES, max_size=2).map(tuple), COUNTS, COUNTS,
        st.lists(COUNTS, max_size=3).map(tuple),
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.builds(
        StepExecuted, COUNTS, COUNTS, st.none() | TEXTS, st.none() | COUNTS, COUNTS, COUNTS,
        st.none() | COUNTS, st.none() | st.floats(0, 1e9), st.none() | COUNTS,
        st.none() | COUNTS,
    ),
    st.builds(StepLost, COUNTS, TEXTS),
    st.builds(TokensSampled, COUNTS, arrays(), arrays(), arrays()),
    st.builds(LogitsRead, COUNTS, arrays(), arrays(), floats()),
    st.builds(RequestFinished, COUNTS, COUNTS, TEXTS, COUNTS, TEXTS),
    st.builds(
        ClientFacts,
        st.lists(
            st.builds(PromptFact, TEXTS, TEXTS, TEXTS, COUNTS, st.none() | TEXTS), max_size=3
        ).map(tuple),
        st.dictionaries(TEXTS, COUNTS, max_size=3),
    ),
)  # fmt: skip


def fields(message: object) -> list[object]:
    """Return type and field values, arrays as dtype and bytes."""
    return [type(message)] + [
        (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value
        for value in (getattr(message, f.name) for f in dataclasses.fields(message))
    ]


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message: object) -> None:
    line = to_line(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert fields(from_line(line)) == fields(message)


def test_numbers_of_numpy_are_numbers() -> None:
    got = from_line(to_line(StepExecuted(np.int64(3), 1, None, None, 0, 0, None, np.float64(0.5),
                                         None)))  # fmt: skip
    assert (got.step, got.disk_write_latency_p99) == (3, 0.5)
    endless = StepExecuted(3, 1, None, None, 0, 0, None, float("inf"), None)
    assert from_line(to_line(endless)).disk_write_latency_p99 is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'["Finish",{"reason":"finished"}]',
        b'["StepLost",{"step":"1","reason":"x"}]',
        b'["StepLost",{"step":true,"reason":"x"}]',
        b'["StepLost",{"step":1}]',
        b'["StepLost"]',
        b"[]",
        b"[[]]",
        b"[" * 100_000,
        b'["StepScheduled",{"step":1,"t_ns":1,"requests":[18446744073709551616],"starts":[0],'
        b'"n_tokens":[1],"references":[],"waiting":0,"running":0,"preempted":[],"kv_usage":null}]',
        b'["StepLost",{"step":1,"reason":"x","more":1}]',
        b'["RequestFinished",{"request":1,"t_ns":1.5,"reason":"x","generated_len":1,'
        b'"token_digest":"0"}]',
        b'["StepScheduled",{"step":1,"t_ns":1,"requests":[1.5],"starts":[0],"n_tokens":[1],'
        b'"references":[],"waiting":0,"running":0,"preempted":[],"kv_usage":null}]',
    ],
)
def test_refuses_what_is_no_message(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


def written(tmp_path: Path, n_segments: int = 3) -> LocalStore:
    store = LocalStore(tmp_path)
    for_run = Journal(store, "r-1", lambda: DATASET)
    for n in range(n_segments):
        for step in range(4 * n, 4 * n + 4):
            for_run.add(StepLost(step, "queue_full"))
        assert secure(for_run) is None
    for_run.finish()
    return store


def secure(of: Journal) -> ActdsError | None:
    """Make a journal durable; return its answer."""
    answers: list[ActdsError | None] = []
    answered = threading.Event()

    def answer(error: ActdsError | None) -> None:
        answers.append(error)
        answered.set()

    of.secure(answer)
    assert answered.wait(60)
    return answers[0]


def test_what_is_secured_can_be_read_in_order(tmp_path: Path) -> None:
    store = written(tmp_path)
    assert segments(store, "r-1") == [layout.journal_path("r-1", n) for n in range(3)]
    assert [m.step for m in read_journal(store, DATASET, "r-1")] == list(range(12))
    remove_journal(store, "r-1")
    assert not (tmp_path / "journal").exists()


def test_a_secured_message_is_on_disk_when_the_answer_comes(tmp_path: Path) -> None:
    of = Journal(LocalStore(tmp_path), "r-1", lambda: DATASET)
    of.add(StepLost(7, "queue_full"))
    assert not segments(LocalStore(tmp_path), "r-1")
    assert secure(of) is None
    assert [m.step for m in read_journal(LocalStore(tmp_path), DATASET, "r-1")] == [7]
    of.finish()


def test_who_waits_is_answered_though_messages_come_faster_than_a_store_takes_segments(
    tmp_path: Path,
) -> None:
    class Store(LocalStore):
        """While it writes a segment, the engine runs another step."""

        n_segments = 0

        def put_new(self, path: str, parts: Any) -> Put:
            if not answered.is_set():
                of.add(StepLost(0, "queue_full"))
            self.n_segments += 1
            return super().put_new(path, parts)

    answered = threading.Event()
    store = Store(tmp_path)
    of = Journal(store, "r-1", lambda: DATASET)
    of.add(StepLost(0, "queue_full"))
    of.secure(lambda error: answered.set())
    is_answered = answered.wait(10)
    answered.set()  # else it would never end
    of.finish()
    assert is_answered and store.n_segments <= 2


def test_many_messages_and_facts_become_several_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_NBYTES", 2000)
    monkeypatch.setattr(journal_module, "FACTS_PER_LINE", 7)
    store = LocalStore(tmp_path)
    of = Journal(store, "r-1", lambda: DATASET)
    prompts = tuple(PromptFact(f"p{i}", f"e{i}", "s", i) for i in range(40))
    of.add(ClientFacts(prompts, {"p3": 4}, "the disk was full"))
    for step in range(200):
        of.add(StepLost(step, "queue_full"))
    of.finish()
    assert len(segments(store, "r-1")) > 3
    facts, steps = ClientFacts(), []
    for message in read_journal(store, DATASET, "r-1"):
        if isinstance(message, ClientFacts):
            facts = merged(facts, message)
        else:
            steps.append(message.step)
    assert facts == ClientFacts(prompts, {"p3": 4}, "the disk was full")
    assert steps == list(range(200))


def test_newer_facts_are_laid_over_older_ones() -> None:
    one, two, skipped = (PromptFact("p0", "a", "s", 0), PromptFact("p1", "b", "s", 1),
                         PromptFact("p1", "b", "s", 1, "E004"))  # fmt: skip
    got = merged(ClientFacts((one, two), {"p0": 1}), ClientFacts((skipped,), {"p1": 2}, "why"))
    assert got == ClientFacts((one, skipped), {"p0": 1, "p1": 2}, "why")
    assert merged(got, ClientFacts()) == got


def test_nothing_is_written_before_there_is_a_dataset(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    begun: list[str] = []
    of = Journal(store, "r-1", lambda: begun[0] if begun else None)
    of.add(StepLost(1, "queue_full"))
    assert "E505" in str(secure(of))
    assert not segments(store, "r-1")
    begun.append(DATASET)
    assert secure(of) is None
    assert [m.step for m in read_journal(store, DATASET, "r-1")] == [1]
    of.finish()


class FullDisk(LocalStore):
    """A store whose disk is full until somebody makes room."""

    full = True

    def put_new(self, path: str, parts: object) -> object:
        if self.full:
            raise ActdsError("E503", path, got="No space left on device", expected="room")
        return super().put_new(path, parts)


def test_a_full_disk_is_told_and_nothing_is_forgotten(tmp_path: Path) -> None:
    store = FullDisk(tmp_path)
    of = Journal(store, "r-1", lambda: DATASET)
    of.add(StepLost(1, "queue_full"))
    assert "E503" in str(secure(of))
    of.add(StepLost(2, "queue_full"))
    assert "E503" in str(secure(of))  # nothing more is promised after a failure
    store.full = False
    of.finish()
    assert [m.step for m in read_journal(store, DATASET, "r-1")] == [1, 2]


def test_refuses_a_journal_with_a_gap(tmp_path: Path) -> None:
    store = written(tmp_path)
    (tmp_path / layout.journal_path("r-1", 1)).unlink()
    with pytest.raises(ActdsError, match=r"E312 journal/r-1/000001.jsonl.zst: no segment"):
        list(read_journal(store, DATASET, "r-1"))


def test_refuses_a_segment_of_another_place(tmp_path: Path) -> None:
    store = written(tmp_path)
    with pytest.raises(ActdsError, match=r"E312 .* dataset"):
        list(read_journal(store, "1" * 32, "r-1"))
    (tmp_path / "journal/r-1").rename(tmp_path / "journal/r-2")
    with pytest.raises(ActdsError, match=r"E312 .* run"):
        list(read_journal(store, DATASET, "r-2"))


def test_refuses_a_segment_that_follows_another_one(tmp_path: Path) -> None:
    store = written(tmp_path / "a")
    other = written(tmp_path / "b", n_segments=1)
    path = layout.journal_path("r-1", 0)
    of = Journal(other, "r-1", lambda: DATASET)
    of.add(StepLost(99, "queue_full"))
    of.finish()  # takes the place of segment 0
    (tmp_path / "a" / path).write_bytes((tmp_path / "b" / path).read_bytes())
    with pytest.raises(ActdsError, match=r"E312 journal/r-1/000001.jsonl.zst prev"):
        list(read_journal(store, DATASET, "r-1"))


@pytest.mark.parametrize("kind", ["cut", "garbage", "bomb", "no header", "bad line"])
def test_refuses_a_broken_segment(kind: str, tmp_path: Path) -> None:
    store = written(tmp_path, n_segments=1)
    path = tmp_path / layout.journal_path("r-1", 0)
    data = path.read_bytes()
    text = zstandard.decompress(data)
    pack = zstandard.ZstdCompressor().compress
    broken = {
        "cut": data[:-9],
        "garbage": b"x" * 100,
        "bomb": pack(b"\n" * (journal_module.MAX_SEGMENT_NBYTES + 2)),
        "no header": pack(text.partition(b"\n")[2]),
        "bad line": pack(text.replace(b'"step":2', b'"stop":2')),
    }
    path.write_bytes(broken[kind])
    with pytest.raises(ActdsError, match=r"E312"):
        list(read_journal(store, DATASET, "r-1"))
