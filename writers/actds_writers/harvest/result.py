"""The result of a harvest, its summary, and who observes both and the progress before: a terminal.

A person sees progress on stderr, the summary on stdout, and finds what the engine prints in a log.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

from actds.dataset.info import HookValues, values_in_words
from actds.errors import ActdsError
from actds.format.schema import RowCounts, Seal
from actds.format.tables import DISPOSITIONS
from actds.store import local_folder
from actds.text import counted, format_seconds, printable, shortened
from actds_writers.harvest.canary import Outcome
from actds_writers.monitor.progress import Snapshot, beside, is_screen, show_progress


@dataclass(frozen=True)
class HarvestResult:
    """The result of a harvest.

    Args:
        path: the dataset, as given.
        run: id of the run, ``None`` when every prompt was finished before; of the first one when
            there are data-parallel replicas.
        reason: ``interrupted`` by Ctrl-C or SIGTERM: committed, sealed, and can be resumed.
        seal: ``None`` for a part, beside which others may be at work.
        totals: counts of every request and position of the run, of all replicas together;
            ``None`` without one.
        canary: result of the canary replay, ``None`` without one.
    """

    path: str
    run: str | None
    reason: Literal["finished", "interrupted"]
    seal: Seal | None
    totals: Totals | None = None
    canary: Outcome | None = None
    runs: tuple[str, ...] = ()
    """Ids of the runs: one, or that of each data-parallel replica."""

    @property
    def summary(self) -> str:
        if self.totals is None:
            if self.seal is None:
                return f"Every prompt of this part is finished; actds seal {self.path}"
            return f"Every prompt is finished; {self.path} is sealed."
        return format_summary(self.totals)


class Observer:
    """Receives the progress of a harvest; a subclass overrides what it needs."""

    def said(self, line: str) -> None:
        """Take a message for the user."""

    def doing(self, words: str) -> None:
        """Take what the harvest does from now on, before and after requests are served."""

    def starting(self, words: str) -> AbstractContextManager[object]:
        """Return a context that is entered while the engine starts, and says so in words."""
        self.said(f"{words} ...")
        return nullcontext()

    def harvesting(self, snapshot: Callable[[], Snapshot]) -> AbstractContextManager[object]:
        """Return a context that is entered while requests are served.

        Args:
            snapshot: returns the present counters; may be called on any thread.
        """
        return nullcontext()

    def ended(self, result: HarvestResult) -> None:
        """Take the result, also when a canary then fails the harvest."""

    def compared(self, label: str, words: str) -> None:
        """Take a line of the summary of a replay, after the result."""


SUMMARY_LABEL_WIDTH = 11


@dataclass(frozen=True)
class Totals:
    """Counts of every request and every position of a run.

    Args:
        elapsed_s: seconds from start to seal.
        skipped_tokens: tokens of the prompts of the skipped ones.
        recomputed: of these, computed again after a preemption.
        cache_ref: prefix-cache hits: positions that another request computed.
        dropped: positions lost to an overflow policy.
        aborted: positions cut off by an end, computed or not.
        aborted_uncomputed: of these, the ones never computed.
        filtered: positions left out by a sampling rule.
        undelivered: positions computed past the end of a request.
        thinned: positions that were not drawn.
        rejected: computed tokens that were rejected drafts.
        unresolved: prefix-cache hits on a position without a row.
        external: of the hits, those on KV that came from outside the run.
        row_nbytes: bytes of the rows over all hooks, before compression.
        stored_nbytes: bytes of their files.
    """

    path: str
    elapsed_s: float
    requests: Mapping[str, int]
    scheduled: int
    recomputed: int
    captured: int
    cache_ref: int
    dropped: int
    aborted: int
    aborted_uncomputed: int
    filtered: int
    unresolved: int
    n_hooks: int
    n_shards: int
    row_nbytes: int
    stored_nbytes: int
    seal: str | None
    canary: str | None = None
    alerts: str | None = None
    external: int = 0
    undelivered: int = 0
    thinned: int = 0
    rejected: int = 0
    skipped_tokens: int = 0
    values: Mapping[str, RowCounts] = field(default_factory=dict)
    cast: str | None = None

    def plus(self, other: Totals) -> Totals:
        added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        requests = Counter(self.requests) + Counter(other.requests)
        values = RowCounts.by_hook([self.values, other.values])
        return replace(self, requests=dict(requests), values=values, **added)

    def check(self) -> dict[str, int]:
        """Return the scheduled tokens by outcome.

        Raises:
            ActdsError: E409 when these do not sum to the scheduled tokens.

        Spec: 0.1 section 7.
        """
        computed = {
            "captured": self.captured,
            "recomputed": self.recomputed,
            "dropped": self.dropped,
            "aborted": self.aborted - self.aborted_uncomputed,
            "filtered": self.filtered,
            **_some(undelivered=self.undelivered, rejected=self.rejected, thinned=self.thinned),
        }
        if sum(computed.values()) != self.scheduled or min(computed.values()) < 0:
            got = f"{self.scheduled:,} scheduled tokens"
            expected = f"{sum(computed.values()):,} = {_sum(computed)}"
            raise ActdsError("E409", self.path, got=got, expected=expected)
        return computed


OF_CENSUS = ("recomputed", *DISPOSITIONS, "rejected")
"""Totals that the census of a run counts, by their names in it."""
_ADDED = (
    *OF_CENSUS,
    "scheduled",
    "aborted_uncomputed",
    "skipped_tokens",
    "n_shards",
    "row_nbytes",
    "stored_nbytes",
)


def format_summary(totals: Totals) -> str:
    """Return the summary of a harvest; raises as ``Totals.check``."""
    computed = totals.check()
    positions = {
        "captured": totals.captured,
        "cache_ref": totals.cache_ref,
        "dropped": totals.dropped,
        "aborted": totals.aborted,
        "filtered": totals.filtered,
        **_some(undelivered=totals.undelivered, thinned=totals.thinned),
    }
    counts = [
        HookValues.of_run(hook, totals.captured, n, totals.cast)
        for hook, n in totals.values.items()
    ]
    path = shlex.quote(totals.path)
    state = f"sealed {totals.seal[:16]}" if totals.seal else "not sealed"
    lines = [
        ("dataset", f"{totals.path} ({state})"),
        ("requests", f"{sum(totals.requests.values()):,} = {_sum(totals.requests)}"),
        ("scheduled", f"{totals.scheduled:,} tokens = {_sum(computed)}"),
        ("positions", f"{sum(positions.values()):,} = {_sum(positions)}"),
        ("rows", _rows(totals)),
        *(("values", words) for words in values_in_words(counts)),
        ("size", _size(totals)),
        ("time", _speed(totals)),
    ]
    if n_skipped := totals.requests.get("skipped", 0):
        prompts, tokens = counted(n_skipped, "prompt"), counted(totals.skipped_tokens, "token")
        lines.append(("skipped", f"{prompts} of {tokens}"))
    if totals.unresolved:
        words = f"{totals.unresolved:,} prefix-cache hits have no stored row (E410)"
        lines.append(("unresolved", words))
    if totals.external:
        words = f"{totals.external:,} positions were served from KV that came from outside"
        lines.append(("external", words))
    lines += [(n, w) for n, w in (("canary", totals.canary), ("alerts", totals.alerts)) if w]
    if totals.seal:
        lines += [("next", f"actds validate {path}"), ("", f"actds info {path}")]
    else:
        lines += [("next", f"actds seal {path}")]
    return "\n".join(f"{label:<{SUMMARY_LABEL_WIDTH}}{words}" for label, words in lines)


def _some(**counts: int) -> dict[str, int]:
    """Return the counts that are not zero: few runs thin, schedule ahead or draft."""
    return {name: count for name, count in counts.items() if count}


def _sum(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{count:,} {name}" for name, count in parts.items()) or "0"


def _rows(totals: Totals) -> str:
    hooks, shards = counted(totals.n_hooks, "hook"), counted(totals.n_shards, "shard")
    return f"{totals.captured:,} x {hooks} in {shards}"


def _size(totals: Totals) -> str:
    words = f"{totals.row_nbytes / 1e9:.3f} GB of rows, {totals.stored_nbytes / 1e9:.3f} GB stored"
    if not totals.stored_nbytes:
        return words
    return f"{words} ({totals.row_nbytes / totals.stored_nbytes:.3f}x)"


def _speed(totals: Totals) -> str:
    words = format_seconds(totals.elapsed_s)
    if totals.elapsed_s <= 0:
        return words
    tokens, nbytes = totals.scheduled / totals.elapsed_s, totals.row_nbytes / totals.elapsed_s
    return f"{words}, {tokens:,.0f} tokens/s, {nbytes / 1e6:,.1f} MB/s of rows"


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
        self._screen: TextIO | None = None

    def said(self, line: str) -> None:
        if self._screen is not None:
            _put(self._screen, f"{_CLEAR}{line}\n")
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
        began = time.monotonic()
        with _copy(self._stream) as screen:

            def show(ended: threading.Event) -> None:
                while not ended.wait(_INTERVAL_S):
                    _put(screen, f"{_CLEAR}{words} … {time.monotonic() - began:.0f} s")

            self._screen = screen
            try:
                with _logged(self._log), beside(show, "actds-starting", _INTERVAL_S):
                    yield
            finally:
                self.said(f"{words}: {format_seconds(time.monotonic() - began)}")
                self._screen = None

    def harvesting(self, snapshot: Callable[[], Snapshot]) -> AbstractContextManager[object]:
        return nullcontext() if self._quiet else show_progress(snapshot, self._stream)

    def ended(self, result: HarvestResult) -> None:
        print(result.summary, flush=True)

    def compared(self, label: str, words: str) -> None:
        print(f"{label:<{SUMMARY_LABEL_WIDTH}}{words}", flush=True)

    def failed(self) -> None:
        if self._log is not None:
            for line in _tail(self._log):
                self.said(line)
            self.said(f"These are the last lines of {printable(str(self._log))}")


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


@contextmanager
def _logged(log: Path) -> Iterator[None]:
    """Let file descriptors 1 and 2 be those of a log file, to which is appended.

    Processes that the block starts inherit it and keep it: warnings of engines and their libraries
    are in the file, from their start to their end.
    """
    _flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    try:
        yield
    finally:
        _flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _put(screen: TextIO, text: str) -> None:
    # A terminal that has gone away is no reason to end a harvest.
    with suppress(OSError, ValueError):
        screen.write(text)
        screen.flush()


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
