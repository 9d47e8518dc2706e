"""What a terminal shows of the words and tables of a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from actds.text import Line, Style
from actds_validators.pages.words import STYLES, Sentence, Table, clean

MAX_LIST = 8
_MAX_COLUMN = 64


def cleaned(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines without control characters, cut where they are longer than any honest one."""
    for line in lines:
        yield Line(clean(Sentence(line.text)), line.style)


def titled(title: str) -> Iterator[Line]:
    """Yield a title below an empty line."""
    yield Line("")
    yield Line(title, "title")


def listed(
    title: str, items: Sequence[str], style: Style = "plain", room: int = MAX_LIST
) -> Iterator[Line]:
    """Yield a title with lines below it, and nothing without an item."""
    if items:
        yield from titled(title)
    yield from (Line(f"  {words}", style) for words in items[:room])
    if len(items) > room:
        yield Line(f"  and {len(items) - room:,} more; --json lists them all", "dim")


def captioned(tables: Iterable[Table]) -> Iterator[Line]:
    """Yield tables, each below its caption."""
    for table in tables:
        yield from titled(table.caption)
        yield from table_lines(table)


def table_lines(table: Table) -> Iterator[Line]:
    """Yield a table in aligned columns, notes below their rows; long cells are cut."""
    cells = [table.head, *(row.cells for row in table.rows)]
    cut = [[_cut(clean(cell)) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if k in table.left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cut
    ]
    yield Line(f"  {lines[0]}".rstrip(), "dim")
    for row, line in zip(table.rows, lines[1:], strict=True):
        yield Line(f"  {line}".rstrip(), STYLES[row.tone])
        if row.note:
            yield Line(f"    {row.note}", "dim")
    if table.more:
        yield Line(f"  {table.more}", "dim")


def _cut(cell: str) -> str:
    return cell if len(cell) <= _MAX_COLUMN else cell[: _MAX_COLUMN - 1] + "…"
