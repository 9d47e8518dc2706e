"""Progress: what a harvest is doing, live on stderr.

Beside the token's way, on a thread of its own: a terminal that does not take its words delays
nothing but them. Imports snapshot and dashboard.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from actds_writers.monitor.dashboard import format_line, format_screen
from actds_writers.monitor.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Display", "Progress"]

PLAIN_INTERVAL_S = 5.0
TERMINAL_INTERVAL_S = 0.5
RATE_WINDOW_S = 10.0
LEAVE_TIMEOUT_S = 5.0
"""How long the end of a harvest waits for a terminal that takes no words."""


class Display:
    """Shows snapshots: a screen that stays in place on a terminal, elsewhere a line each.

    Args:
        stream: where to write.
        terminal: whether the stream is a terminal.
    """

    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._stream = stream
        self._history: list[Snapshot] = []
        self._started: Snapshot | None = None
        self._live: Live | None = None
        if terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=stream, force_terminal=True),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()

    def show(self, now: Snapshot) -> None:
        """Show a snapshot, with the rates of the last seconds."""
        if self._started is None and now.scheduled_tokens:
            self._started = now
        self._history.append(now)
        # Keep one snapshot that is at least as old as the window, and all younger ones.
        horizon = now.elapsed_s - RATE_WINDOW_S
        while len(self._history) > 2 and self._history[1].elapsed_s <= horizon:
            del self._history[0]
        self._put(now, self._history[0] if len(self._history) > 1 else None)

    def close(self, last: Snapshot) -> None:
        """Show the last snapshot, with the rates of the whole harvest, and let the terminal go."""
        self._put(last, None)
        if self._live is not None:
            self._live.stop()

    def _put(self, now: Snapshot, before: Snapshot | None) -> None:
        if self._live is None:
            print(format_line(now, before), file=self._stream, flush=True)
        else:
            self._live.update(format_screen(now, before, self._started), refresh=True)


class Progress:
    """Shows a harvest while the block runs.

    Args:
        snapshot: returns the present counters; called on the display's thread.
        stream: where to write, stderr by default.
        terminal: whether the stream is a terminal; found out by default.
        interval_s: seconds between two views; by default 0.5 on a terminal and 5 elsewhere.
        quiet: show nothing at all.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        interval_s: float | None = None,
        quiet: bool = False,
    ) -> None:
        self._snapshot = snapshot
        self._stream = stream if stream is not None else sys.stderr
        capable = os.environ.get("TERM", "") != "dumb" and self._stream.isatty()
        self._terminal = capable if terminal is None else terminal
        usual = TERMINAL_INTERVAL_S if self._terminal else PLAIN_INTERVAL_S
        self._interval_s = usual if interval_s is None else interval_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if not quiet:
            self._thread = threading.Thread(target=self._run, name="actds-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the last counters."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LEAVE_TIMEOUT_S)

    @property
    def is_showing(self) -> bool:
        """Return whether the display still runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        # A terminal that has gone away is no reason to end a harvest.
        with suppress(OSError, ValueError):
            display = Display(self._stream, terminal=self._terminal)
            while not self._ended.wait(self._interval_s):
                display.show(self._snapshot())
            display.close(self._snapshot())
