"""The terminal page of regimes: verdicts with their sentences, what is short, what was compared."""

from __future__ import annotations

from collections.abc import Iterator

from actds.text import Line, Style
from actds_validators.regimes.result import Regimes
from actds_validators.report.regimes import said
from actds_validators.report.words import Sentence, clean, count, percent

__all__ = ["render"]

_STYLES: dict[str, Style] = {"shifts": "warn", "carries over": "good", "undecided": "title"}
_MAX_VERDICTS, _MAX_SHORT, _MAX_STEPS, _MAX_COLUMN = 40, 8, 8, 40


def render(result: Regimes, command: str) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character.

    Args:
        result: the comparison.
        command: that made it, as it was typed.
    """
    for line in _page(result, command):
        yield Line(clean(Sentence(line.text)), line.style)


def _page(result: Regimes, command: str) -> Iterator[Line]:
    pairs = list(said.judged(result))
    whole = said.outcome([verdict for _, verdict in pairs])
    yield Line(f"{said.MARKS[whole]} {said.answer(result)}", _STYLES[whole])
    for fact in said.facts(result):
        title = f"{fact.title}:".ljust(26)
        yield Line(f"  {title} {fact.value} ({fact.note})", "plain" if fact.is_known else "dim")
    for hook, words in said.split(result):
        yield Line(f"  {hook}: {words}")
    yield Line(f"  {'Command:'.ljust(26)} {command}")
    yield Line("")
    yield Line("Verdicts", "title")
    for contrast, verdict in pairs[:_MAX_VERDICTS]:
        mark = said.MARKS[verdict.outcome]
        yield Line(f"  {mark} {contrast.name}: {verdict.sentence}", _STYLES[verdict.outcome])
    if len(pairs) > _MAX_VERDICTS:
        yield Line(f"  and {len(pairs) - _MAX_VERDICTS:,} more (--json)", "dim")
    yield from _short(result)
    yield Line("")
    yield Line("What to do", "title")
    for n, step in enumerate(said.next_steps(result)[:_MAX_STEPS], 1):
        yield Line(f"  {n}. {step}")
    yield from _compared(result)


def _short(result: Regimes) -> Iterator[Line]:
    words = [
        f"{contrast.name} at {verdict.hook}, {verdict.instrument}: {short}"
        for contrast, verdict in said.judged(result)
        if verdict.outcome == "undecided"
        for short in verdict.short[:2]
    ]
    if not words:
        return
    yield Line("")
    yield Line("What is short", "title")
    for one in words[:_MAX_SHORT]:
        yield Line(f"  - {one}")
    if len(words) > _MAX_SHORT:
        yield Line(f"  and {len(words) - _MAX_SHORT:,} more (--json)", "dim")


def _compared(result: Regimes) -> Iterator[Line]:
    yield Line("")
    yield Line("What was compared", "title")
    head = ("contrast", "hook", "arm", "rows", "decode", "requests", "compared", "repeats", "sinks")
    rows = [
        (
            contrast.name,
            contrast.hook,
            arm.name,
            count(arm.n_rows),
            "-" if arm.n_decode is None else percent(arm.n_decode / max(arm.n_rows, 1)),
            count(arm.n_requests),
            count(arm.n_compared),
            count(arm.n_repeats),
            count(arm.n_sinks),
        )
        for contrast in result.contrasts
        for arm in (contrast.first, contrast.second)
    ]
    widths = [min(_MAX_COLUMN, max(len(row[k]) for row in (head, *rows))) for k in range(len(head))]
    for n, row in enumerate((head, *rows)):
        cells = [
            cell[:width].ljust(width) if k < 3 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells), "plain" if n else "dim")
    names = {arm.name: arm.words for c in result.contrasts for arm in (c.first, c.second)}
    for name, words in names.items():
        yield Line(f"  {name}: {words}")
    for used in result.used:
        yield Line(f"  {used.kind} at {used.hook}: {used.path} ({used.words})")
    for contrast in result.contrasts[:_MAX_VERDICTS]:
        yield Line(f"  {said.arms(contrast)}", "dim")
