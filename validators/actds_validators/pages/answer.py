"""A page that answers a question: its head, what to do, and sections; as HTML and on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actds import __version__
from actds.text import Line
from actds_validators.audit.place import Level
from actds_validators.pages.lines import cleaned, listed, table_lines, titled
from actds_validators.pages.markup import render_page
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import LOOKS, Fact, Part, Sentence

_MAX_STEPS, _MAX_STEPS_LINES, _MAX_VERDICTS, _MAX_NOTES = 12, 8, 40, 24


@dataclass(frozen=True)
class Shown:
    """A section of a page with its charts."""

    part: Part
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class AnswerPage:
    """What a page says, for HTML and for a terminal alike.

    Args:
        facts: what it is about, each a name and its words.
        sections: of the page; a terminal has those of ``on_terminal``, without their charts.
        introduction: what the words of the answer mean.
        verdicts: that a terminal lists below the lead of the section ``verdicts``.
    """

    subject: str
    question: str
    level: Level
    answer: str
    boxes: Sequence[Fact]
    facts: Sequence[tuple[str, str]]
    next_steps: Sequence[str]
    sections: Sequence[Shown]
    introduction: str = ""
    split: Sequence[str] = ()
    verdicts: Sequence[tuple[Level, str]] = ()
    on_terminal: tuple[str, ...] = ()

    def html(self) -> str:
        """Return the page: HTML in UTF-8, self-contained but for its links, without script.

        Raises:
            ImportError: Jinja2 is not installed (the extra ``audit``).
        """
        return render_page(
            "answer.html.j2",
            actds=__version__,
            subject=self.subject,
            question=self.question,
            level=self.level,
            mark=LOOKS[self.level].mark,
            answer=self.answer,
            introduction=Sentence(self.introduction),
            numbers=self.boxes,
            split=[Sentence(words) for words in self.split],
            next_steps=[Sentence(step) for step in self.next_steps[:_MAX_STEPS]],
            facts=[(name, Sentence(words)) for name, words in self.facts],
            sections=self.sections,
        )

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
        parts = {section.part.name: section.part for section in self.sections}
        if self.verdicts:
            yield from titled("Verdicts")
            yield Line(f"  {parts['verdicts'].lead}", "dim")
            for level, sentence in self.verdicts[:_MAX_VERDICTS]:
                yield Line(f"  {LOOKS[level].mark} {sentence}", LOOKS[level].style)
            more = len(self.verdicts) - _MAX_VERDICTS
            yield from [Line(f"  and {more:,} more (--json)", "dim")] if more > 0 else []
        steps = [f"{n}. {step}" for n, step in enumerate(self.next_steps, 1)]
        yield from listed("What to do", steps, room=_MAX_STEPS_LINES)
        for part in (parts[name] for name in self.on_terminal if name in parts):
            yield from titled(part.title)
            for table in part.tables:
                yield from table_lines(table)
            yield from (Line(f"  - {note}") for note in part.notes[:_MAX_NOTES])
