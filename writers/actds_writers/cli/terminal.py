"""A harvest as a person sees it: progress on stderr, the summary on stdout, the engine in a log."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click

from actds.store import local_folder
from actds.text import format_seconds, printable, shortened
from actds_writers.harvest.result import SUMMARY_LABEL_WIDTH, HarvestResult, Observer
from actds_writers.monitor.progress import Progress, Snapshot, is_screen

TAIL_LINES = 40
_INTERVAL_S = 0.5
_CLEAR = "\r\x1b[K"


class Terminal(Observer):
    """Shows a harvest to a person.

    On a terminal, what the engine and its libraries print goes to ``OUT.log``, or to a temporary
    file where ``OUT`` is no local path; elsewhere it stays on stderr.

    Args:
        quiet: show no progress; the summary is still printed.
    """

    def __init__(self, out: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._out, self._quiet = out, quiet
        self._stream = sys.stderr if stream is None else stream
        self._log: Path | None = None
        self._start: Starting | None = None

    def said(self, line: str) -> None:
        if self._start is not None:
            self._start.say(line)
        else:
            print(line, file=self._stream, flush=True)

    def doing(self, words: str) -> None:
        if not self._quiet:
            self.said(f"{shortened(printable(words))} ...")

    @contextmanager
    def starting(self, words: str) -> Iterator[None]:
        if self._quiet or not is_screen(self._stream):
            self.said(f"{words} ...")
            yield
            return
        self._log = _log_of(self._out)
        self.said(f"What the engine prints is in {printable(str(self._log))}")
        try:
            with (
                _copy(self._stream) as screen,
                Starting(words, self._log, screen) as self._start,
            ):
                yield
        finally:
            self._start = None

    def harvesting(self, snapshot: Callable[[], Snapshot]) -> AbstractContextManager[object]:
        return Progress(snapshot, self._stream, quiet=self._quiet)

    def ended(self, result: HarvestResult) -> None:
        print(result.summary, flush=True)

    def compared(self, label: str, words: str) -> None:
        print(f"{label:<{SUMMARY_LABEL_WIDTH}}{words}", flush=True)

    def failed(self) -> None:
        if self._log is not None:
            for line in _tail(self._log):
                self.said(line)
            self.said(f"These are the last lines of {printable(str(self._log))}")


def run_shown(run: Callable[..., HarvestResult], out: str, *, quiet: bool, **settings: Any) -> None:
    """Run ``actds.write`` or ``actds.replay`` on a terminal; exits with 1 when interrupted."""
    terminal = Terminal(out, quiet=quiet)
    try:
        result = run(observer=terminal, out=out, **settings)
    except BaseException:
        terminal.failed()
        raise
    if result.reason == "interrupted":
        click.echo(
            "Interrupted. Everything committed is sealed. Continue with the same command and "
            "--resume.",
            err=True,
        )
        click.get_current_context().exit(1)


def _copy(stream: TextIO) -> TextIO:
    """Return a stream on a copy of another one's descriptor; it refuses no letter."""
    number = os.dup(stream.fileno())
    return os.fdopen(number, "w", encoding=stream.encoding or "ascii", errors="replace")


def _log_of(out: str) -> Path:
    folder = local_folder(out)
    if folder is None:
        number, name = tempfile.mkstemp(prefix="actds-", suffix=".log")
        os.close(number)
        return Path(name)
    return folder.with_name(f"{folder.name}.log")


class Starting:
    """Shows on a terminal that something is starting while the block runs, and for how long.

    Meanwhile file descriptors 1 and 2 are those of a log file, to which it appends. Processes that
    the block starts inherit it and keep it: warnings of engines and their libraries are in the
    file, from their start to their end. Has thread ``actds-starting``.

    Args:
        screen: where to show it: no stream on a descriptor that goes to the log.
    """

    def __init__(self, words: str, log: Path, screen: TextIO) -> None:
        self._words, self._log, self._screen = words, log, screen
        self._ended = threading.Event()

    def __enter__(self) -> Starting:
        _flush()
        self._began = time.monotonic()
        self._kept = [os.dup(1), os.dup(2)]
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.close(log)
        self._thread = threading.Thread(target=self._show, name="actds-starting", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_INTERVAL_S)
        _flush()
        for number, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, number)
            os.close(kept)
        self.say(f"{self._words}: {format_seconds(time.monotonic() - self._began)}")

    def say(self, line: str) -> None:
        with suppress(OSError, ValueError):
            self._screen.write(f"{_CLEAR}{line}\n")
            self._screen.flush()

    def _show(self) -> None:
        # A terminal that has gone away is no reason to end a harvest.
        with suppress(OSError, ValueError):
            while not self._ended.wait(_INTERVAL_S):
                seconds = time.monotonic() - self._began
                self._screen.write(f"{_CLEAR}{self._words} … {seconds:.0f} s")
                self._screen.flush()


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log, without control characters; none of one that is not there."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return [printable(line.rstrip("\n")) for line in deque(file, TAIL_LINES)]
    except OSError:
        return []


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
