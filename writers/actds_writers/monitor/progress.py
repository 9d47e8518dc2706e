"""Progress of a harvest: snapshots of its counters, and their display.

The display shows snapshots, a line or a screen each, on thread ``actds-progress``: a blocked
terminal delays nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from actds.dataset.info import HookValues, values_in_words
from actds.format import tables
from actds.format.schema import RowCounts
from actds.text import format_nbytes, format_rate, format_seconds
from actds_writers.ipc.messages import (
    CensusProgress,
    CommitTotals,
    RunInfo,
    StageState,
    WatchTotals,
    WriterProgress,
)

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

STAGES = ("staging", "ring", "pool")
LANE = "readouts"
"""The lane of the readouts, a queue parallel to the stages."""


@dataclass(frozen=True)
class Stage:
    """One of the three stages, or the lane of the readouts.

    Args:
        nbytes: bytes that have left it: copied by the hooks, taken out of the ring, committed;
            taken out of the lane.
        fill: how full the queue is, 0 to 1, by bytes where entries differ in size.
    """

    name: str
    nbytes: int = 0
    depth: int | None = None
    capacity: int | None = None
    fill: float | None = None
    n_stalls: int = 0
    stall_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The counters of a harvest at one moment, all of them totals since its start.

    Args:
        requests_total: requests to serve; None when not known, as in serving.
        cached_tokens: prompt tokens reused from the prefix cache.
        queried_tokens: prompt tokens looked up there.
        filtered_tokens: and what follows it: as in ``CensusProgress``.
        thinned: positions that the rules alone would store and the draw left out.
        last_commit_age_s: None before the first commit.
        is_capturing: False once capture has ended, while the engine may go on.
    """

    elapsed_s: float
    requests_done: int
    requests_total: int | None
    waiting: int = 0
    running: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0
    filtered_tokens: int = 0
    undelivered_tokens: int = 0
    aborted_tokens: int = 0
    thinned: int = 0
    rows: int = 0
    row_nbytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[Stage, Stage, Stage] = (Stage("staging"), Stage("ring"), Stage("pool"))
    lane: Stage | None = None
    backlog_nbytes: int = 0
    commits: CommitTotals = field(default_factory=CommitTotals)
    memory_nbytes: int | None = None
    last_commit_age_s: float | None = None
    writer_silent_s: float | None = None
    cast: str | None = None
    watched: WatchTotals | None = None
    runs: tuple[RunInfo, ...] = ()
    is_capturing: bool = True

    @property
    def dropped_tokens(self) -> int:
        return sum(self.dropped.values())

    @property
    def cache_hit_share(self) -> float | None:
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else None


BEGIN = Snapshot(elapsed_s=0.0, requests_done=0, requests_total=None)
_CENSUS_COUNTS = (
    "waiting",
    "running",
    "scheduled_tokens",
    "recomputed_tokens",
    "cached_tokens",
    "queried_tokens",
    "filtered_tokens",
    "undelivered_tokens",
    "aborted_tokens",
)


def take_snapshot(
    written: WriterProgress | None,
    counted: CensusProgress | None,
    *,
    elapsed_s: float,
    requests_done: int,
    requests_total: int | None,
    is_capturing: bool = True,
    now_ns: int | None = None,
) -> Snapshot:
    """Return a snapshot from the last messages of writer and census, None before the first."""
    w = written or WriterProgress(0, -1, 0, 0)
    c = counted or CensusProgress(0, 0, 0, 0, 0, None, -1)
    now = time.time_ns() if now_ns is None else now_ns
    queues = {state.stage: state for state in w.stages}
    nbytes = (c.scheduled_tokens * w.row_nbytes, w.ring_nbytes, w.commits.nbytes_in)
    pool_depth = w.queue_depth if written else None
    # The worker's own figures, through the census, are newer than those of the last step.
    newest = (c.staging_depth, c.ring_depth, pool_depth)
    staging, ring, pool = (
        _stage(queues.get(name, StageState(name)), moved, depth)
        for name, moved, depth in zip(STAGES, nbytes, newest, strict=True)
    )
    lane = queues.get(LANE)
    return Snapshot(
        elapsed_s=elapsed_s,
        requests_done=requests_done,
        requests_total=requests_total,
        **{name: getattr(c, name) for name in _CENSUS_COUNTS},
        rows=w.n_rows,
        row_nbytes=w.row_nbytes,
        dropped=_dropped(c.dropped, w.not_drawn),
        thinned=w.not_drawn.get("thinned", 0),
        stages=(staging, ring, pool),
        lane=_stage(lane, lane.moved_nbytes, c.lane_depth) if lane else None,
        backlog_nbytes=w.backlog_nbytes,
        commits=w.commits,
        memory_nbytes=w.memory_nbytes,
        watched=w.watched,
        last_commit_age_s=_age_s(w.commits.last_ns, now),
        writer_silent_s=_age_s(w.t_ns, now),
        cast=w.cast,
        runs=(w.of_run,) if w.of_run else (),
        is_capturing=is_capturing,
    )


def _dropped(of_steps: Mapping[str, int], not_drawn: Mapping[str, int]) -> dict[str, int]:
    """Return what was dropped by reason: whole steps, and rows where a policy has a reserve."""
    n_rows, full = not_drawn.get("dropped", 0), tables.QUEUE_FULL
    return {**of_steps, **({full: of_steps.get(full, 0) + n_rows} if n_rows else {})}


def _stage(state: StageState, nbytes: int, newest: int | None) -> Stage:
    depth = state.depth if newest is None else newest
    fill = None
    if depth is not None and state.capacity_nbytes:
        fill = min(1.0, depth * state.entry_nbytes / state.capacity_nbytes)
    elif depth is not None and state.capacity:
        fill = min(1.0, depth / state.capacity)
    return Stage(
        name=state.stage,
        nbytes=nbytes,
        depth=depth,
        capacity=state.capacity,
        fill=fill,
        n_stalls=state.n_stalls,
        stall_s=state.stall_ns / 1e9,
    )


def _age_s(then_ns: int | None, now_ns: int) -> float | None:
    return None if then_ns is None else max(0.0, (now_ns - then_ns) / 1e9)


_LARGEST = {"elapsed_s", "row_nbytes", "writer_silent_s", "fill", "p50_s", "p99_s", "last_ns"}
_OF_FIRST = {"name", "cast"}
S = TypeVar("S", Snapshot, Stage, CommitTotals)


def summed(parts: Sequence[S]) -> S:
    """Return the counters of several engines that run side by side, at least one.

    Of quantiles, ages and fills the largest, of the time since a commit the smallest.
    """
    values = {f.name: [getattr(part, f.name) for part in parts] for f in fields(parts[0])}
    return replace(parts[0], **{name: _joined(name, of_each) for name, of_each in values.items()})


def _joined(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if name in _OF_FIRST:
        return values[0]
    if not known or (name == "requests_total" and len(known) < len(values)):
        return None
    if name == "last_commit_age_s":
        return min(known)
    if name in _LARGEST:
        return max(known)
    if name == "values":
        return RowCounts.by_hook(known)
    if name == "dropped":
        return {why: sum(n.get(why, 0) for n in known) for why in dict.fromkeys(chain(*known))}
    if name == "stages":
        return tuple(map(summed, zip(*known, strict=True)))
    if name == "runs":
        return tuple(chain(*known))
    if name == "is_capturing":
        return all(known)
    if name == "buckets":
        return tuple(map(sum, zip(*filter(None, known), strict=True)))
    return summed(known) if is_dataclass(known[0]) else sum(known)


WIDTH = 79
LABEL_WIDTH, QUEUE_WIDTH, GAUGE_WIDTH, RATE_WIDTH = 10, 13, 10, 11
SILENT_S = 3.0
"""A writer without a message for so long is waiting, most likely for the disk."""
WAITS = {"staging": "step", "ring": "step", "pool": "shard", LANE: "step"}
MAX_VALUES = 3
"""Lines on rows that are not finite or zero; the summary has them all."""
LEAVES = {"staging": "captured", "ring": "taken", "pool": "committed", LANE: "taken"}


def eta_s(now: Snapshot, started: Snapshot | None) -> float | None:
    """Return the estimated seconds until the last request ends, None without an estimate."""
    if now.requests_total is None or started is None:
        return None
    done = now.requests_done - started.requests_done
    if done <= 0 or now.elapsed_s <= started.elapsed_s:
        return None
    if done < now.running:  # requests that began together end together: the first few say nothing
        return None
    left = max(0, now.requests_total - now.requests_done)
    return (now.elapsed_s - started.elapsed_s) * left / done


def format_line(
    now: Snapshot, before: Snapshot | None = None, started: Snapshot | None = None
) -> str:
    """Return one line of progress.

    Args:
        before: earlier counters; rates are since then, else since the start.
        started: the counters when the engine began to step, for the time left.
    """
    left, since = eta_s(now, started), before or BEGIN
    seconds = now.elapsed_s - since.elapsed_s
    tokens, rows = now.scheduled_tokens - since.scheduled_tokens, now.rows - since.rows
    parts = [
        format_seconds(now.elapsed_s),
        f"{_requests(now)} requests",
        *([f"{format_seconds(left)} left"] if left else []),
        f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "- tokens/s",
        format_rate(rows * now.row_nbytes, seconds),
        f"{now.rows:,} rows",
        format_nbytes(now.rows * now.row_nbytes),
        f"{now.cached_tokens:,} cached",
        f"queues {'/'.join(_depth(stage) for stage in now.stages)}",
        f"{now.dropped_tokens:,} dropped",
        *_values(now),
    ]
    return "  ".join(parts)


def format_screen(
    now: Snapshot, before: Snapshot | None = None, started: Snapshot | None = None
) -> Text:
    """Return the screen; arguments as in ``format_line``."""
    from rich.text import Text

    since = before or BEGIN
    seconds = now.elapsed_s - since.elapsed_s
    screen = Text(overflow="ellipsis", no_wrap=True)
    left = eta_s(now, started)
    rest = f"   {format_seconds(left)} left" if left else ""
    _line(screen, "time", format_seconds(now.elapsed_s) + rest)
    _line(screen, "requests", _head(now))
    _line(screen, "tokens", _tokens(now, since, seconds))
    _line(screen, "rows", f"{now.rows:,} captured   {now.commits.n_rows:,} durable")
    for stage, earlier in zip(now.stages, since.stages, strict=True):
        _stage_line(screen, stage, earlier, seconds)
    if now.lane is not None:
        _stage_line(screen, now.lane, since.lane or Stage(LANE), seconds)
    _line(screen, "disk", _disk(now, since, seconds))
    _line(screen, "commits", _commits(now))
    if now.writer_silent_s is not None and now.writer_silent_s > SILENT_S:
        waits = f"no message for {format_seconds(now.writer_silent_s)}; it waits for the disk"
        _line(screen, "writer", waits, "yellow")
    if now.memory_nbytes is not None:
        _line(screen, "memory", f"{format_nbytes(now.memory_nbytes)} at most, all stages")
    if now.watched is not None:
        n = sum(now.watched.alerts.values())
        words = f"{n:,} of {now.watched.n_requests:,} requests left the regime of the profile"
        _line(screen, "alerts", words, "yellow" if n else "")
    for words in _values(now):
        _line(screen, "values", words, "bold red")
    lost = ", ".join(f"{n:,} {reason}" for reason, n in sorted(now.dropped.items()))
    _line(screen, "dropped", lost or "0", "bold red" if now.dropped_tokens else "")
    return screen


def _line(screen: Text, label: str, words: str, style: str = "") -> None:
    if screen:
        screen.append("\n")
    screen.append(f"{label:<{LABEL_WIDTH}}", "dim")
    screen.append(words[: WIDTH - LABEL_WIDTH], style)


def _head(now: Snapshot) -> str:
    share = f" ({now.requests_done / now.requests_total:.0%})" if now.requests_total else ""
    return f"{_requests(now)}{share}   {now.running:,} running   {now.waiting:,} waiting"


def _tokens(now: Snapshot, since: Snapshot, seconds: float) -> str:
    tokens = now.scheduled_tokens - since.scheduled_tokens
    rate = f"{tokens / seconds:,.0f}/s" if seconds > 0 else "-"
    share = now.cache_hit_share
    hits = "-" if share is None else f"{share:.1%}"
    again = f"   {now.recomputed_tokens:,} recomputed" if now.recomputed_tokens else ""
    return f"{now.scheduled_tokens:,} scheduled   {rate}   cache hits {hits}{again}"


def _stage_line(screen: Text, stage: Stage, before: Stage, seconds: float) -> None:
    full = stage.fill or 0.0
    filled = round(full * GAUGE_WIDTH)
    gauge = "#" * filled + "." * (GAUGE_WIDTH - filled)
    rate = format_rate(stage.nbytes - before.nbytes, seconds)
    screen.append(f"\n{stage.name:<{LABEL_WIDTH}}", "dim")
    screen.append(gauge, "red" if full > 0.9 else "yellow" if full > 0.5 else "green")
    waits = f"{_depth(stage)} {WAITS[stage.name]}{'' if stage.depth == 1 else 's'}"
    screen.append(f" {full:>4.0%} {waits:<{QUEUE_WIDTH}}")
    screen.append(f"{rate:>{RATE_WIDTH}} {LEAVES[stage.name]}")
    if stage.n_stalls:
        screen.append(f"  {stage.n_stalls:,} stalls {stage.stall_s:,.1f} s", "yellow")


def _disk(now: Snapshot, since: Snapshot, seconds: float) -> str:
    c = now.commits
    written = c.nbytes_out - since.commits.nbytes_out
    ratio = f"   {c.nbytes_in / c.nbytes_out:.2f}x" if c.nbytes_out else ""
    behind = f"   {format_nbytes(now.backlog_nbytes)} to encode" if now.backlog_nbytes else ""
    return f"{format_nbytes(c.nbytes_out)}   {format_rate(written, seconds)}{ratio}{behind}"


def _commits(now: Snapshot) -> str:
    c = now.commits
    words = f"{c.n_shards:,}"
    if c.n_raw_shards:
        words += f" ({c.n_raw_shards:,} raw)"
    if c.p50_s is not None and c.p99_s is not None:
        words += f"   p50 {c.p50_s:.3g} s   p99 {c.p99_s:.3g} s"
    if now.last_commit_age_s is not None:
        words += f"   last {format_seconds(now.last_commit_age_s)} ago"
    return words


def _values(now: Snapshot) -> list[str]:
    c = now.commits
    counts = [HookValues.of_run(hook, c.n_rows, n, now.cast) for hook, n in c.values.items()]
    return list(islice(values_in_words(counts), MAX_VALUES))


def _requests(now: Snapshot) -> str:
    total = "" if now.requests_total is None else f"/{now.requests_total:,}"
    return f"{now.requests_done:,}{total}"


def _depth(stage: Stage) -> str:
    return "-" if stage.depth is None else f"{stage.depth:,}"


PLAIN_INTERVAL_S = 5.0
TERMINAL_INTERVAL_S = 0.5
RATE_WINDOW_S = 10.0
LEAVE_TIMEOUT_S = 5.0
"""How long the end of a harvest waits for a blocked terminal."""


class Display:
    """Shows snapshots: as a screen that stays in place on a terminal, else a line each."""

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
        if self._started is None and now.scheduled_tokens:
            self._started = now
        self._history.append(now)
        # Keep one snapshot that is at least as old as the window, and all newer ones.
        horizon = now.elapsed_s - RATE_WINDOW_S
        while len(self._history) > 2 and self._history[1].elapsed_s <= horizon:
            del self._history[0]
        self._put(now, self._history[0] if len(self._history) > 1 else None)

    def close(self, last: Snapshot) -> None:
        """Show the last snapshot, with the rates of the whole harvest, and release the terminal."""
        self._put(last, None)
        if self._live is not None:
            self._live.stop()

    def _put(self, now: Snapshot, before: Snapshot | None) -> None:
        if self._live is None:
            print(format_line(now, before, self._started), file=self._stream, flush=True)
        else:
            self._live.update(format_screen(now, before, self._started), refresh=True)


def is_screen(stream: TextIO) -> bool:
    """Return whether what is written can be written over."""
    return os.environ.get("TERM", "") != "dumb" and stream.isatty()


@contextmanager
def beside(
    work: Callable[[threading.Event], None], name: str, leave_s: float | None = None
) -> Iterator[threading.Thread]:
    """Run work on a thread while the block runs; it ends soon after the event it is given is set.

    Args:
        leave_s: how long the end of the block waits for it at most.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join(leave_s)


def show_progress(
    snapshot: Callable[[], Snapshot],
    stream: TextIO,
    *,
    terminal: bool | None = None,
    interval_s: float | None = None,
) -> AbstractContextManager[threading.Thread]:
    on_screen = is_screen(stream) if terminal is None else terminal
    usual = TERMINAL_INTERVAL_S if on_screen else PLAIN_INTERVAL_S

    def show(ended: threading.Event) -> None:
        # A terminal that has gone away is no reason to end a harvest.
        with suppress(OSError, ValueError):
            display = Display(stream, terminal=on_screen)
            while not ended.wait(usual if interval_s is None else interval_s):
                display.show(snapshot())
            display.close(snapshot())

    return beside(show, "actds-progress", LEAVE_TIMEOUT_S)
