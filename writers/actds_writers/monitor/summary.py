"""Summary: what a harvest came to, in lines that add up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from actds.errors import ActdsError
from actds.text import format_seconds

__all__ = ["Totals", "format_summary"]

WIDTH = 11


@dataclass(frozen=True)
class Totals:
    """What became of every request and every position of a run.

    Args:
        path: the dataset, as the user named it.
        elapsed_s: seconds from start to seal.
        requests: number of requests by finish reason, skipped ones included.
        scheduled: tokens the engine computed.
        recomputed: of these, computed again after a preemption.
        captured: positions with a row.
        cache_ref: positions that another request computed.
        dropped: positions lost to an overflow policy.
        aborted: positions lost to an end, computed or not.
        aborted_uncomputed: of these, the ones the engine never computed.
        filtered: positions left out by a filter.
        unresolved: cache references to a position without a row.
        n_hooks: hooks per row.
        n_shards: shards of the run.
        row_nbytes: bytes of the rows over all hooks, before compression.
        stored_nbytes: bytes of their files.
        seal: digest of the seal, None when the dataset was left open.
        canary: what a canary replay found, None without one.
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

    @property
    def n_positions(self) -> int:
        """Return the positions that the requests owe."""
        return self.captured + self.cache_ref + self.dropped + self.aborted + self.filtered


def format_summary(totals: Totals) -> str:
    """Return the last lines of a harvest.

    Raises:
        ActdsError: E409 when the scheduled tokens are not the sum of what became of them.

    Spec: 0.1 section 7.
    """
    computed = {
        "captured": totals.captured,
        "recomputed": totals.recomputed,
        "dropped": totals.dropped,
        "aborted": totals.aborted - totals.aborted_uncomputed,
        "filtered": totals.filtered,
    }
    if sum(computed.values()) != totals.scheduled or min(computed.values()) < 0:
        raise ActdsError(
            "E409",
            totals.path,
            got=f"{totals.scheduled:,} scheduled tokens",
            expected=f"{sum(computed.values()):,} = {_sum(computed)}",
        )
    positions = {
        "captured": totals.captured,
        "cache_ref": totals.cache_ref,
        "dropped": totals.dropped,
        "aborted": totals.aborted,
        "filtered": totals.filtered,
    }
    path = shlex.quote(totals.path)
    state = f"sealed {totals.seal[:16]}" if totals.seal else "not sealed"
    lines = [
        ("dataset", f"{totals.path} ({state})"),
        ("requests", f"{sum(totals.requests.values()):,} = {_sum(totals.requests)}"),
        ("scheduled", f"{totals.scheduled:,} tokens = {_sum(computed)}"),
        ("positions", f"{totals.n_positions:,} = {_sum(positions)}"),
        ("rows", _rows(totals)),
        ("size", _size(totals)),
        ("time", _speed(totals)),
    ]
    if totals.unresolved:
        words = f"{totals.unresolved:,} of the cache_ref positions have no row here (E410)"
        lines.append(("unresolved", words))
    if totals.canary:
        lines.append(("canary", totals.canary))
    if totals.seal:
        lines += [("next", f"actds validate {path}"), ("", f"actds info {path}")]
    else:
        lines += [("next", f"actds seal {path}")]
    return "\n".join(f"{label:<{WIDTH}}{words}" for label, words in lines)


def _sum(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{count:,} {name}" for name, count in parts.items()) or "0"


def _rows(totals: Totals) -> str:
    hooks = "1 hook" if totals.n_hooks == 1 else f"{totals.n_hooks} hooks"
    shards = "1 shard" if totals.n_shards == 1 else f"{totals.n_shards:,} shards"
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
