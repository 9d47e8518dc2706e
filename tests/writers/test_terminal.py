"""What a person sees while an engine starts: for how long, and nothing of what others print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actds_writers.harvest.result import TAIL_LINES, Terminal

WORDS = "Starting the engine for small"
NOISE = b"W1122 torch/_library/triton.py:53] Triton not available\n"


class Screen:
    """A terminal: what is written into ``stream`` is read from the other end."""

    def __init__(self) -> None:
        self._outer, inner = os.openpty()
        self.stream = os.fdopen(inner, "w", encoding="utf-8")

    def close(self) -> None:
        self.stream.close()
        os.close(self._outer)

    def until(self, words: str) -> str:
        seen = b""
        while words.encode() not in seen:
            seen += os.read(self._outer, 4096)
        return seen.decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    opened = Screen()
    yield opened
    opened.close()


def places() -> list[tuple[int, int]]:
    """Return which files descriptors 1 and 2 are."""
    return [(found.st_dev, found.st_ino) for found in (os.fstat(1), os.fstat(2))]


def test_a_person_sees_the_time_and_the_log_has_the_rest(screen: Screen, tmp_path: Path) -> None:
    terminal, before = Terminal(str(tmp_path / "acts"), stream=screen.stream), places()
    with terminal.starting(WORDS):
        for number in (1, 2):
            os.write(number, NOISE)
        terminal.said("Metrics at a port")
        seen = screen.until(f"{WORDS} … ")
    seen += screen.until(f"{WORDS}: ")
    assert places() == before
    assert (tmp_path / "acts.log").read_bytes() == 2 * NOISE
    assert "triton" not in seen and "Metrics at a port" in seen and "acts.log" in seen
    terminal.said("afterwards")
    assert "afterwards" in screen.until("afterwards")


def test_a_failure_shows_the_end_of_the_log(screen: Screen, tmp_path: Path) -> None:
    (tmp_path / "acts.log").write_text("of an earlier run\n")
    terminal = Terminal(str(tmp_path / "acts"), stream=screen.stream)
    with pytest.raises(RuntimeError, match="no memory"), terminal.starting(WORDS):
        for n in range(TAIL_LINES - 1):
            os.write(2, f"line {n}\n".encode())
        os.write(2, b"the cause \x1b[2J\xff\n")
        raise RuntimeError("no memory")
    terminal.failed()
    seen = screen.until("last lines of")
    assert "line 0\r\n" in seen and f"line {TAIL_LINES - 2}\r\n" in seen
    assert "the cause \\x1b[2J" in seen and "of an earlier run" not in seen
    # What was there stays: the file may be somebody's.
    assert (tmp_path / "acts.log").read_bytes().startswith(b"of an earlier run\nline 0\n")


def test_elsewhere_nothing_is_taken_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, before = Terminal(str(tmp_path / "acts")), places()
    with terminal.starting(WORDS):
        assert places() == before
    terminal.failed()
    assert capsys.readouterr().err == f"{WORDS} ...\n"
    assert not list(tmp_path.iterdir())


def test_a_terminal_that_cannot_be_written_over_gets_one_line(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    before = places()
    with Terminal(str(tmp_path / "acts"), stream=screen.stream).starting(WORDS):
        assert places() == before
    assert screen.until("...").strip() == f"{WORDS} ..."
    assert not list(tmp_path.iterdir())


def test_the_log_of_an_object_store_is_a_temporary_file(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Terminal("s3://bucket/acts", stream=screen.stream).starting(WORDS):
        os.write(2, NOISE)
    [log] = tmp_path.iterdir()
    assert log.read_bytes() == NOISE and log.name in screen.until(f"{WORDS}: ")
