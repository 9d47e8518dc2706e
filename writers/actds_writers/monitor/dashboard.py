"""Dashboard: a snapshot as words, one line or a screen of 80 columns.

Beside the token's way; pure. Imports the snapshot, and rich only where a screen is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actds.text import format_nbytes, format_rate, format_seconds
from actds_writers.monitor.snapshot import LANE, Snapshot, Stage

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "eta_s",
    "format_line",
    "format_screen",
]

WIDTH = 79
LABEL_WIDTH, QUEUE_WIDTH, GAUGE_WIDTH, RATE_WIDTH = 10, 13, 10, 11
SILENT_S = 3.0
"""A writer that has said nothing for so long is waiting for something, most likely the disk."""
WAITS = {"staging": "step", "ring": "step", "pool": "shard", LANE: "step"}
LEAVES = {"staging": "captured", "ring": "taken", "pool": "committed", LANE: "taken"}


def eta_s(now: Snapshot, started: Snapshot | None) -> float | None:
    """Return the seconds until the last request ends, None where nothing tells.

    Args:
        now: the present counters.
        started: those when the engine began to step.
    """
    if now.requests_total is None or started is None:
        return None
    done = now.requests_done - started.requests_done
    if done <= 0 or now.elapsed_s <= started.elapsed_s:
        return None
    left = max(0, now.requests_total - now.requests_done)
    return (now.elapsed_s - started.elapsed_s) * left / done


def format_line(now: Snapshot, before: Snapshot | None = None) -> str:
    """Return one line of progress.

    Args:
        now: the present counters.
        before: earlier counters; the rates are those since then, else since the start.
    """
    seconds = now.elapsed_s - (before.elapsed_s if before else 0.0)
    tokens = now.scheduled_tokens - (before.scheduled_tokens if before else 0)
    rows = now.rows - (before.rows if before else 0)
    parts = [
        format_seconds(now.elapsed_s),
        f"{_requests(now)} requests",
        f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "- tokens/s",
        format_rate(rows * now.row_nbytes, seconds),
        f"{now.rows:,} rows",
        format_nbytes(now.rows * now.row_nbytes),
        f"{now.cached_tokens:,} cached",
        f"queues {'/'.join(_depth(stage) for stage in now.stages)}",
        f"{now.dropped_tokens:,} dropped",
    ]
    return "  ".join(parts)


def format_screen(
    now: Snapshot, before: Snapshot | None = None, started: Snapshot | None = None
) -> Text:
    """Return the screen.

    Args:
        now: the present counters.
        before: earlier counters; the rates are those since then, else since the start.
        started: the counters when the engine began to step, for the time that is left.
    """
    from rich.text import Text

    seconds = now.elapsed_s - (before.elapsed_s if before else 0.0)
    screen = Text(overflow="ellipsis", no_wrap=True)
    left = eta_s(now, started)
    rest = f"   {format_seconds(left)} left" if left else ""
    _line(screen, "time", format_seconds(now.elapsed_s) + rest)
    _line(screen, "requests", _head(now))
    _line(screen, "tokens", _tokens(now, before, seconds))
    _line(screen, "rows", f"{now.rows:,} captured   {now.commits.n_rows:,} durable")
    for index, stage in enumerate(now.stages):
        _stage(screen, stage, before.stages[index] if before else Stage(stage.name), seconds)
    if now.lane is not None:
        earlier = before.lane if before else None
        _stage(screen, now.lane, earlier or Stage(LANE), seconds)
    _line(screen, "disk", _disk(now, before, seconds))
    _line(screen, "commits", _commits(now))
    if now.writer_silent_s is not None and now.writer_silent_s > SILENT_S:
        waits = f"silent for {format_seconds(now.writer_silent_s)}; it waits for the disk"
        _line(screen, "writer", waits, "yellow")
    if now.memory_nbytes is not None:
        _line(screen, "memory", f"{format_nbytes(now.memory_nbytes)} at most, all stages")
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


def _tokens(now: Snapshot, before: Snapshot | None, seconds: float) -> str:
    tokens = now.scheduled_tokens - (before.scheduled_tokens if before else 0)
    rate = f"{tokens / seconds:,.0f}/s" if seconds > 0 else "-"
    share = now.cache_hit_share
    hits = "-" if share is None else f"{share:.1%}"
    again = f"   {now.recomputed_tokens:,} recomputed" if now.recomputed_tokens else ""
    return f"{now.scheduled_tokens:,} scheduled   {rate}   cache hits {hits}{again}"


def _stage(screen: Text, stage: Stage, before: Stage, seconds: float) -> None:
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


def _disk(now: Snapshot, before: Snapshot | None, seconds: float) -> str:
    c = now.commits
    written = c.nbytes_out - (before.commits.nbytes_out if before else 0)
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


def _requests(now: Snapshot) -> str:
    total = "" if now.requests_total is None else f"/{now.requests_total:,}"
    return f"{now.requests_done:,}{total}"


def _depth(stage: Stage) -> str:
    return "-" if stage.depth is None else f"{stage.depth:,}"
