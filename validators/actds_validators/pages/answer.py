"""A page that answers a question: its head, what to do, and sections; as HTML and on a terminal.

HTML is one self-contained file without script, under a strict policy. Every text of a result is
anybody's: it is cut, freed of control characters and escaped in one place, here.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from actds import __version__
from actds.text import Line
from actds_validators.audit.place import Level
from actds_validators.audit.result import Audit
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import LOOKS, MAX_LIST, Fact, Sentence, Table, clean, first
from actds_validators.sections import About, OfDataset

if TYPE_CHECKING:
    from jinja2 import Environment

_MAX_HOOKS, _MAX_ARMS = 6, 6


def dataset_facts(known: About, rows: str) -> list[tuple[str, str]]:
    """Return what a dataset is: model, hooks, rows, date with engine; each a name and its words."""
    hooks, more = first(known.hooks, _MAX_HOOKS)
    if more:
        hooks.append(f"and {len(known.hooks) - _MAX_HOOKS} more")
    return [
        ("Model", models(known.models)),
        ("Hooks", ", ".join(hooks) or "none"),
        ("Rows", rows),
        ("Harvested", harvested(known.started_ns, known.engines)),
    ]


def head_facts(result: OfDataset, **more: str) -> list[tuple[str, str]]:
    """Return dataset, model, ``more``, and date of a result of one dataset, in words."""
    return [
        ("Dataset", f"{result.dataset}, {result.digest[:16]}"),
        ("Model", models(result.models)),
        *more.items(),
        ("Harvested", harvested(result.started_ns, result.engines)),
    ]


def models(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) or "not recorded"


def harvested(started_ns: int, engines: Sequence[str]) -> str:
    return " with ".join([day(started_ns), *engines[:2]])


def by_arm(words: Sequence[tuple[str, str]]) -> str:
    """Return what is said of arms, each a name and its words: once where it is the same."""
    arms: dict[str, list[str]] = {}  # by what is said of them
    for name, sentence in words:
        arms.setdefault(sentence, []).append(name)
    if len(arms) == 1:
        return words[0][1]
    parts = [f"{_some(names, ', ')}: {sentence}" for sentence, names in arms.items()]
    return _some(parts, "; ")


def _some(words: Sequence[str], mark: str) -> str:
    left = len(words) - _MAX_ARMS
    return mark.join([*words[:_MAX_ARMS], *([f"and {left} more"] if left > 0 else [])])


def day(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "on an unknown date"


MAX_NBYTES = 1_000_000
_CSV_LINK = re.compile('<a download="[^"]*" href="data:[^"]*"[^>]*>CSV</a>')


def render_page(
    template: str,
    *,
    styles: tuple[str, ...] = ("page.css",),
    max_nbytes: int | None = MAX_NBYTES,
    **values: Any,
) -> str:
    """Return a page: HTML in UTF-8, whose policy lets nothing in but its own style sheet.

    Figures have their numbers as CSV behind a link. Where the page would be larger than
    ``max_nbytes`` the longest are left out, which the page says.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    environment = _environment()
    loader = environment.loader
    assert loader is not None
    style = "".join(loader.get_source(environment, name)[0] for name in styles)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    page = environment.get_template(template).render(
        style=_exact(style), policy=Sentence(policy), **values
    )
    for link in sorted(_CSV_LINK.findall(page), key=len, reverse=True):
        if max_nbytes is None or len(page.encode()) < max_nbytes:
            break
        page = page.replace(link, "(CSV: too long for this page; --json has the numbers)")
    return page


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("actds_validators.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals["long"] = Sentence
    environment.globals["csv_url"] = lambda data: _exact(data.url())
    return environment


def _finalize(value: Any) -> Any:
    """Return what the template writes: text that can do no harm, numbers to a tenth of a pixel."""
    if hasattr(value, "__html__"):  # markup of the template itself
        return value
    if isinstance(value, float):
        return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
    return clean(value) if isinstance(value, str) else value


def _exact(text: str) -> Any:
    """Return text as markup: a style sheet, whose digest is of these bytes, or a ``data:`` URL."""
    from markupsafe import Markup

    return Markup(text)


@dataclass(frozen=True)
class Part:
    """The words and tables of a section; a terminal has ``brief`` in place of lead and notes."""

    name: str
    title: str
    lead: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    brief: Sequence[Line] = ()
    pictures: Sequence[Picture] = ()


_MAX_COLUMN = 64


def cleaned(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines without control characters, cut where they are longer than any honest one."""
    for line in lines:
        yield Line(clean(Sentence(line.text)), line.style)


def titled(title: str) -> Iterator[Line]:
    yield Line("")
    yield Line(title, "title")


def listed(title: str, items: Sequence[str], room: int = MAX_LIST) -> Iterator[Line]:
    if items:
        yield from titled(title)
    yield from (Line(f"  {words}") for words in items[:room])
    if len(items) > room:
        yield Line(f"  and {len(items) - room:,} more; --json lists them all", "dim")


def brief_lines(part: Part) -> Iterator[Line]:
    """Yield a section as a terminal has it: its brief, and the first of each table."""
    yield from titled(part.title)
    yield from part.brief
    for table in part.tables:
        n_columns, n_rows = table.brief or (len(table.head), MAX_LIST)
        if not n_rows:
            continue
        rows, more = first(table.rows, n_rows)
        rows = [replace(row, cells=row.cells[:n_columns], note="") for row in rows]
        yield Line(table.caption, "title")
        yield from table_lines(
            replace(table, head=table.head[:n_columns], rows=rows, more=more or table.more)
        )


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
        yield Line(f"  {line}".rstrip(), row.tone or "plain")
        if row.note:
            yield Line(f"    {row.note}", "dim")
    if table.more:
        yield Line(f"  {table.more}", "dim")


def _cut(cell: str) -> str:
    return cell if len(cell) <= _MAX_COLUMN else cell[: _MAX_COLUMN - 1] + "…"


_MAX_STEPS, _MAX_VERDICTS, _MAX_NOTES = 8, 40, 24

Chart = Callable[[Audit], Picture | None]


@dataclass(frozen=True)
class SectionOf:
    """A section of the report of an audit, made from its result.

    Args:
        part: its words and tables; ``None`` where the result has nothing for it.
        title: under which a missing section is named, with the reason; empty for none.
    """

    part: Callable[[Audit], Part | None]
    charts: tuple[Chart, ...] = ()
    title: str = ""
    absent: str = ""
    of_losses: bool = False


@dataclass(frozen=True)
class AnswerPage:
    """What a page says, for HTML and for a terminal alike.

    Args:
        sections: of the page; a terminal has those of ``on_terminal``, without their charts.
        introduction: what the words of the answer mean.
        verdicts: that a terminal lists below the lead of the section ``verdicts``.
        holds: what of the dataset stands on the page.
    """

    subject: str
    question: str
    level: Level
    answer: str
    boxes: Sequence[Fact]
    facts: Sequence[tuple[str, str]]
    next_steps: Sequence[str]
    sections: Sequence[Part]
    introduction: str = ""
    split: Sequence[str] = ()
    verdicts: Sequence[tuple[Level, str]] = ()
    on_terminal: tuple[str, ...] = ()
    holds: str = "Aggregates only: this page holds no text and no activations."

    def html(self) -> str:
        """Return the page: HTML in UTF-8, self-contained but for its links, without script."""
        mark = LOOKS[self.level].mark
        return render_page("answer.html.j2", actds=__version__, mark=mark, **vars(self))

    def lines(self) -> Iterator[Line]:
        """Yield the page for a terminal, line by line; no line holds a control character."""
        return cleaned(self._lines())

    def _lines(self) -> Iterator[Line]:
        look = LOOKS[self.level]
        yield Line(f"{look.mark} {self.answer}", look.style)
        yield Line(f"  {self.introduction}")
        for box in self.boxes:
            words = f"  {box.title}: {box.value} ({box.note})"
            yield Line(words, "plain" if box.is_known else "dim")
        yield from (Line(f"  {words}") for words in self.split)
        width = max(len(name) for name, _ in self.facts)
        yield from (Line(f"  {name.ljust(width)}  {words}") for name, words in self.facts)
        parts = {part.name: part for part in self.sections}
        if self.verdicts:
            yield from titled("Verdicts")
            yield Line(f"  {parts['verdicts'].lead}", "dim")
            for level, sentence in self.verdicts[:_MAX_VERDICTS]:
                yield Line(f"  {LOOKS[level].mark} {sentence}", LOOKS[level].style)
            more = len(self.verdicts) - _MAX_VERDICTS
            yield from [Line(f"  and {more:,} more (--json)", "dim")] if more > 0 else []
        steps = [f"{n}. {step}" for n, step in enumerate(self.next_steps, 1)]
        yield from listed("What to do", steps, room=_MAX_STEPS)
        for part in (parts[name] for name in self.on_terminal if name in parts):
            yield from titled(part.title)
            for table in part.tables:
                yield from table_lines(table)
            yield from (Line(f"  - {note}") for note in part.notes[:_MAX_NOTES])
