"""The terminal page of regimes: verdicts with their sentences, what is short, what was compared."""

from __future__ import annotations

from collections.abc import Iterator

from actds.text import Line, Style
from actds_validators.regimes.conclusions import judged
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
    pairs = list(judged(result.contrasts))
    whole = result.answer.outcome
    yield Line(f"{said.MARKS[whole]} {said.answer(result)}", _STYLES[whole])
    yield Line(f"  {said.introduction(result)}")
    for fact in said.facts(result):
        style: Style = "plain" if fact.is_known else "dim"
        yield Line(f"  {fact.title}: {fact.value}", style)
        yield Line(f"    {fact.note}", style)
    for words in said.parts(result):
        yield Line(f"  {words}")
    known = said.about(result, command)
    width = max(len(name) for name, _ in known)
    for name, words in known:
        yield Line(f"  {name.ljust(width)}  {words}")
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
    for n, step in enumerate(result.answer.next_steps[:_MAX_STEPS], 1):
        yield Line(f"  {n}. {step}")
    yield from _compared(result)


def _short(result: Regimes) -> Iterator[Line]:
    words = [
        f"{contrast.name} at {verdict.hook}, {verdict.instrument}: {short}"
        for contrast, verdict in judged(result.contrasts)
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
    for used in result.used:
        yield Line(f"  {used.kind} at {used.hook}: {used.path} ({used.words})")
    for contrast in result.contrasts[:_MAX_VERDICTS]:
        yield Line(f"  {said.arms(contrast)}", "dim")
    yield Line(f"  {said.FLOOR}", "dim")
    yield Line(f"  {said.NOT_ASKED}", "dim")
