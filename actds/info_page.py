"""The page of ``actds info``: facts as lines for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from actds.describe import Facts, RunFacts

__all__ = ["Line", "human_nbytes", "printable", "render", "share", "when"]

Style = Literal["title", "alarm", "plain", "dim"]
_MARKS = {"observed": "observed", "declared": "declared", "unknown": "unknown "}
_MAX_LISTED, _MAX_NAMED = 20, 3


@dataclass(frozen=True)
class Line:
    """One line of a page, and how it stands out on a terminal."""

    text: str
    style: Style = "plain"


def render(facts: Facts) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character."""
    for line in _page(facts):
        yield Line(printable(line.text), line.style)


def _page(facts: Facts) -> Iterator[Line]:
    yield Line(f"Dataset {facts.path}", "title")
    if not facts.sealed:
        after = f" since seal {facts.seal}" if facts.seal else ""
        yield Line(
            f"NOT SEALED (E306): the ledger is not closed{after}; what follows may be incomplete "
            "and is not accounted for. Do not train on it.",
            "alarm",
        )
        yield Line(f"Next: actds write --resume, or actds seal {facts.path}", "alarm")
    yield from _pairs(
        {
            "dataset": facts.dataset,
            "format": f"actds {facts.format_version}",
            "written": f"{when(facts.created_ns)} by {facts.writer}",
            "sealed": f"{when(facts.sealed_ns)}, seal {facts.seal}" if facts.sealed else "no",
            "digest": facts.digest if facts.sealed else f"{facts.digest} (of an unsealed ledger)",
        }
    )
    yield from _hooks(facts)
    for run in facts.runs:
        yield from _run(run)
    yield from _missing(facts)


def _hooks(facts: Facts) -> Iterator[Line]:
    yield Line("")
    phases = ", ".join(f"{n:,} {phase}" for phase, n in facts.phases.items()) or "none"
    yield Line(
        f"Rows: {sum(facts.phases.values()):,} ({phases}) in {_many(facts.n_shards, 'shard')}",
        "title",
    )
    rows = [("hook", "layer", "rows", "d_model", "type", "size", "stored", "ratio")]
    for hook in facts.hooks:
        ratio = "-" if hook.ratio is None else f"{hook.ratio:.3f}x"
        rows.append(
            (
                hook.name,
                str(hook.layer),
                f"{hook.n_rows:,}",
                str(hook.d_model),
                hook.dtype,
                human_nbytes(hook.nbytes),
                human_nbytes(hook.stored_nbytes),
                ratio,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column in (0, 4) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells).rstrip(), "dim" if number == 0 else "plain")
    if facts.raw_shards:
        raw = f"{facts.raw_shards} of {facts.n_shards} shards are stored raw"
        yield Line(f"  {raw}; compress them with actds recompress")
    if facts.removable_nbytes:
        size, n = human_nbytes(facts.removable_nbytes), _many(facts.replaced_shards, "shard")
        yield Line(f"  {size} of {n} that others replaced; remove them with actds recompress")


def _run(run: RunFacts) -> Iterator[Line]:
    yield Line("")
    yield Line(f"Run {run.run}, started {when(run.started_ns)}", "title")
    if not run.has_census:
        yield Line(f"  NO CENSUS (E403): {run.n_rows:,} rows cannot be accounted for.", "alarm")
    else:
        yield from _pairs(_census(run))
    if not run.has_record:
        yield Line("  NO RUN RECORD (E401): nothing says how the rows came to be.", "alarm")
        return
    yield Line("  Provenance", "title")
    width = max(len(name) for name in run.provenance)
    for name, entry in run.provenance.items():
        unknown = entry["origin"] == "unknown"
        value = f"null: {entry['reason']}" if unknown else _value(entry["value"])
        mark = _MARKS[entry["origin"]]
        yield Line(f"    {mark}  {name.ljust(width)}  {value}", "dim" if unknown else "plain")


def _census(run: RunFacts) -> dict[str, str]:
    ends = ", ".join(f"{n:,} {reason}" for reason, n in run.finish_reasons.items())
    prompt, cached = run.prompt_tokens or 0, run.cached_tokens or 0
    lost = sum(loss.n_positions for loss in run.losses)
    positions = run.n_positions or 0
    return {
        "requests": f"{run.n_requests:,} ({ends or 'none'})",
        "tokens": f"{prompt:,} prompt, {run.generated_tokens:,} generated, {run.n_steps:,} steps",
        "cache hits": f"{cached:,} prompt tokens ({share(cached, prompt)})",
        "positions": (
            f"{positions:,} = {run.n_rows:,} rows ({share(run.n_rows, positions)}) + "
            f"{run.n_cache_ref:,} served from the prefix cache + {lost:,} without a row"
        ),
        "preemptions": f"{run.n_preemptions:,}",
        "stalls": f"{run.n_stalls:,}, {run.stalled_ns / 1e9:.3f} s",
    }


def _missing(facts: Facts) -> Iterator[Line]:
    yield Line("")
    yield Line("What is missing, and why", "title")
    lines = list(_missing_lines(facts))
    yield from lines or [Line("  nothing: every position is a row or refers to one")]


def _missing_lines(facts: Facts) -> Iterator[Line]:
    for run in facts.runs:
        for loss in run.losses:
            reason = loss.reason or "no reason given"
            part = share(loss.n_positions, run.n_positions or 0)
            lost = _many(loss.n_positions, "position")
            yield Line(f"  {lost} {loss.disposition} ({part}): {reason}")
        for reason, n in run.skips.items():
            yield Line(f"  {_many(n, 'request')} skipped: {reason}")
        yield from _unknown_facts(run)
    unresolved = facts.totals.get("unresolved", 0)
    if unresolved:
        lost = _many(unresolved, "cached position")
        yield Line(f"  {lost} without a row that they refer to (E410)", "alarm")
    for chain in facts.chains:
        if chain.state != "closed" or chain.reason != "finished":
            why = f": {chain.reason}" if chain.reason else ""
            yield Line(f"  {chain.kind} chain {chain.chain} of run {chain.run} {chain.state}{why}")
    for path in facts.unreachable[:_MAX_LISTED]:
        yield Line(f"  {path}: nothing reaches this file (E105); it is no data")
    more = len(facts.unreachable) - _MAX_LISTED
    if more > 0:
        yield Line(f"  and {more:,} more such files")


def _unknown_facts(run: RunFacts) -> Iterator[Line]:
    """Yield the unknown facts of a run by their reason; the provenance above names them all."""
    by_reason: dict[str, list[str]] = {}
    for name, entry in run.provenance.items():
        if entry["origin"] == "unknown":
            by_reason.setdefault(entry["reason"], []).append(name)
    for reason, names in by_reason.items():
        some = ", ".join(names[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        facts = _many(len(names), "fact")
        yield Line(f"  {facts} of run {run.run} unknown ({some}{more}): {reason}")


def _many(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _pairs(pairs: dict[str, str]) -> Iterator[Line]:
    width = max(len(key) for key in pairs)
    for key, value in pairs.items():
        yield Line(f"  {key.ljust(width)}  {value}")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def human_nbytes(nbytes: int) -> str:
    """Return a size with a binary unit and three digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def share(part: int, whole: int) -> str:
    """Return a share as a percentage; a part is never rounded to nothing or to all."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.01:
        return "< 0.01 %"
    if 99.99 < percent < 100:
        return "> 99.99 %"
    return f"{percent:.2f} %"


def when(time_ns: int | None) -> str:
    """Return a wall clock time in UTC, to the second."""
    if time_ns is None:
        return "at an unknown time"
    try:
        stamp = datetime.fromtimestamp(time_ns // 10**9, UTC)
    except (OverflowError, ValueError):
        return f"at {time_ns} ns"
    return stamp.strftime("%Y-%m-%d %H:%M:%S UTC")


def printable(text: str) -> str:
    """Return text without control characters: documents are anybody's, terminals obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
