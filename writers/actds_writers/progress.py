"""Progress: what a harvest is doing, as one line on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Progress", "Snapshot", "format_line", "format_seconds"]

PLAIN_INTERVAL_S = 5.0
TERMINAL_INTERVAL_S = 0.25
RATE_WINDOW_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """The counters of a harvest at one moment, all of them totals since its start.

    Args:
        elapsed_s: seconds since the start.
        requests_done: requests that ended, skipped ones not included.
        requests_total: requests that reach the engine.
        scheduled_tokens: tokens the engine computed.
        cached_tokens: tokens it reused from the prefix cache.
        rows: rows captured, of one hook.
        row_nbytes: bytes of those rows over all hooks, before compression.
        dropped_tokens: rows lost to an overflow policy.
        queue_depths: entries waiting in staging, ring and pool; None where not known yet.
    """

    elapsed_s: float
    requests_done: int
    requests_total: int
    scheduled_tokens: int
    cached_tokens: int
    rows: int
    row_nbytes: int
    dropped_tokens: int
    queue_depths: tuple[int | None, int | None, int | None] = (None, None, None)


def format_line(now: Snapshot, before: Snapshot | None = None) -> str:
    """Return one line of progress.

    Args:
        now: the present counters.
        before: earlier counters; the rates are those since then, else since the start.
    """
    seconds = now.elapsed_s - (before.elapsed_s if before else 0.0)
    tokens = now.scheduled_tokens - (before.scheduled_tokens if before else 0)
    nbytes = now.row_nbytes - (before.row_nbytes if before else 0)
    parts = [
        format_seconds(now.elapsed_s),
        f"{now.requests_done:,}/{now.requests_total:,} requests",
        f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "- tokens/s",
        f"{nbytes / seconds / 1e6:,.1f} MB/s" if seconds > 0 else "- MB/s",
        f"{now.rows:,} rows",
        f"{now.row_nbytes / 1e9:.3f} GB",
        f"{now.cached_tokens:,} cached",
        f"queues {'/'.join('-' if depth is None else str(depth) for depth in now.queue_depths)}",
        f"{now.dropped_tokens:,} dropped",
    ]
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it: ``8.4 s``, ``3:25``, ``2:03:25``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """A live line on a terminal; elsewhere a plain line every few seconds.

    Use as a context manager; ``update`` may be called as often as one likes.

    Args:
        stream: where to write, stderr by default.
        terminal: whether the stream is a terminal; found out by default.
        clock: seconds that only grow; another one for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        capable = os.environ.get("TERM", "") != "dumb" and self._stream.isatty()
        self._terminal = capable if terminal is None else terminal
        self._clock = clock
        self._shown_at: float | None = None
        self._history: list[Snapshot] = []
        self._last: Snapshot | None = None
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._stream, force_terminal=True),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._shown_at = self._clock()
        return self

    def update(self, snapshot: Snapshot) -> None:
        """Take the counters; show them when the last line is old enough."""
        self._last = snapshot
        self._history.append(snapshot)
        # Keep one snapshot that is at least as old as the window, and all younger ones.
        horizon = snapshot.elapsed_s - RATE_WINDOW_S
        while len(self._history) > 2 and self._history[1].elapsed_s <= horizon:
            del self._history[0]
        interval = TERMINAL_INTERVAL_S if self._terminal else PLAIN_INTERVAL_S
        now = self._clock()
        if self._shown_at is not None and now - self._shown_at < interval:
            return
        self._shown_at = now
        self._show(snapshot, self._history[0] if len(self._history) > 1 else None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the last counters, with the rates of the whole harvest."""
        if self._last is not None:
            self._show(self._last, None)
        if self._live is not None:
            self._live.stop()

    def _show(self, snapshot: Snapshot, before: Snapshot | None) -> None:
        line = format_line(snapshot, before)
        if self._live is None:
            print(line, file=self._stream, flush=True)
            return
        from rich.text import Text

        style = "bold red" if snapshot.dropped_tokens else ""
        self._live.update(Text(line, style=style, overflow="fold"), refresh=True)
