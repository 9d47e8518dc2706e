"""The terminal page of stability: verdicts, likenesses beside their floors, reconstruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actds.text import Line, Style
from actds_validators.report.stability import said
from actds_validators.report.words import Sentence, clean, count, percent
from actds_validators.stability.result import Outcome, Stability

__all__ = ["render"]

_STYLES: dict[Outcome, Style] = {
    "beyond the floor": "warn",
    "within the floor": "good",
    "undecided": "title",
}
_MAX, _TITLE = 40, 9


def render(result: Stability, command: str) -> Iterator[Line]:
    """Yield the page, line by line; no line holds a control character.

    Args:
        result: the comparison.
        command: that made it, as it was typed.
    """
    for line in _page(result, command):
        yield Line(clean(Sentence(line.text)), line.style)


def _page(result: Stability, command: str) -> Iterator[Line]:
    found = said.outcome(result)
    yield Line(f"{said.MARKS[found]} {said.answer(result)}", _STYLES[found])
    yield Line(said.words_of_art(result), "dim")
    for fact in said.facts(result):
        yield Line(f"  {fact.title}: {fact.value} ({fact.note})")
    for title, words in said.provenance(result, command):
        yield Line(f"  {title.ljust(_TITLE)}  {words}")
    yield from _title("Verdicts" if result.verdicts else "")
    for verdict in result.verdicts[:_MAX]:
        yield Line(f"  {said.MARKS[verdict.outcome]} {verdict.sentence}", _STYLES[verdict.outcome])
    yield from _title("What to do")
    for n, step in enumerate(said.next_steps(result)[:8], 1):
        yield Line(f"  {n}. {step}")
    yield from _title(f"How alike to {result.arms[0].name}, mean over seeds")
    head = ("arm", "pair", "matched cosine", *said.FATES)
    alike = [
        (one.name, one.pair, f"{one.matched:.3f}",
         *("-" if one.features is None else percent(getattr(one.features, name))
           for name in said.FATES))
        for one in said.means(result)
    ]  # fmt: skip
    yield from _table(head, alike, 2)
    yield from _title("Fraction of variance unexplained, held-out rows")
    told = [
        (one.trained_on, one.rows_of, one.rows, count(one.n_rows),
         "-" if one.fvu is None else f"{one.fvu:.3f}",
         "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}")
        for one in result.cross
    ]  # fmt: skip
    yield from _table(("trained on", "rows of", "which", "rows", "FVU", "95 % interval"), told, 3)
    yield from _title("What was compared")
    for arm in result.arms:
        yield Line(
            f"  {arm.name}: {arm.words} ({count(arm.n_rows)} of {count(arm.n_there)} rows, "
            f"{count(arm.n_common)} of them the reference's; {count(arm.n_scored)} held out)"
        )


def _title(words: str) -> Iterator[Line]:
    if words:
        yield Line("")
        yield Line(words, "title")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], n_left: int) -> Iterator[Line]:
    widths = [min(_MAX, max(len(row[k]) for row in (head, *rows))) for k in range(len(head))]
    for n, row in enumerate((head, *rows[:_MAX])):
        cells = [
            cell[:width].ljust(width) if k < n_left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells).rstrip(), "plain" if n else "dim")
    if len(rows) > _MAX:
        yield Line(f"  and {len(rows) - _MAX:,} more (--json)", "dim")
