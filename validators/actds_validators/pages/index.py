"""The index of several datasets: a row for each, with its answer and a link to its own page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actds.text import counted
from actds_validators.audit.place import LEVELS, TITLES, Level
from actds_validators.audit.result import Audit
from actds_validators.pages.answer import AnswerPage, Shown, dataset_facts
from actds_validators.pages.summary import lines
from actds_validators.pages.words import LOOKS, Fact, Part, Row, Sentence, Table, count
from actds_validators.sections import About

_WORDS: dict[Level, str] = {
    "PASS": "yes",
    "WARN": "yes with limits",
    "INCONCLUSIVE": "not known",
    "FAIL": "no",
}
_MAX_ROWS, _MAX_SLUG = 500, 60


@dataclass(frozen=True)
class Entry:
    """A dataset of the index.

    Args:
        answer: whether to train on it, in a few words.
        audit: its audit; None of one that is not valid, or is imported.
        about: what it is; None with the audit.
        why: what is wrong with one that is not valid.
        page: file name of its own page, in the folder of the index; empty for none.
        unaudited: level of the answer without an audit.
    """

    path: str
    answer: str
    audit: Audit | None = None
    about: About | None = None
    why: str = ""
    page: str = ""
    unaudited: Level = "FAIL"

    @property
    def level(self) -> Level:
        """Return the level of the answer; what is not valid fails."""
        return self.unaudited if self.audit is None else self.audit.answer.level


def page_beside(index: Path, n: int, path: str) -> Path:
    """Return the file for the page of a dataset: beside the index, its number before its name.

    Args:
        n: number of the dataset, from 1.
        path: of the dataset, anybody's: only letters, digits, ``.``, ``_`` and ``-`` are taken.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rstrip("/").rpartition("/")[2])[:_MAX_SLUG]
    return index.with_name(f"{index.stem}-{n}-{name}.html")


def render(entries: Sequence[Entry], command: str) -> str:
    """Return the page: HTML in UTF-8, self-contained but for its links, without script.

    Args:
        entries: a dataset each, in the order of the rows.
        command: that made it, as it was typed.
    """
    levels = [entry.level for entry in entries]
    shown = [f"{n} {words}" for level, words in _WORDS.items() if (n := levels.count(level))]
    return AnswerPage(
        subject="check",
        question=f"May I train on these {counted(len(entries), 'dataset')}?",
        level=max(levels, key=LEVELS.index, default="PASS"),
        answer=", ".join(shown).capitalize(),
        boxes=_counts(entries),
        next_steps=_steps(entries),
        facts=[("Command", command)],
        sections=[Shown(_table(entries))],
    ).html()


def _counts(entries: Sequence[Entry]) -> list[Fact]:
    audits = [entry.audit for entry in entries if entry.audit is not None]
    places = Counter(TITLES[a.answer.place] for a in audits if a.answer.place is not None)
    note = "what is not valid, or imported, is not audited"
    valid = Fact("Valid", f"{len(audits)} of {len(entries)}", note)
    if not places:
        return [Fact("Decided at", "no place", "every audited dataset passes"), valid]
    title, n = places.most_common(1)[0]
    return [Fact("Decided most often at", title, f"in {counted(n, 'dataset')}"), valid]


def _steps(entries: Sequence[Entry]) -> list[str]:
    """Return the first step of each dataset that does not pass, those that fail first."""
    steps = []
    for level in reversed(LEVELS[1:]):
        for entry in entries:
            known = [entry.why] if entry.audit is None else entry.audit.answer.next_steps
            if entry.level == level and known:
                steps.append(f"{entry.path}: {known[0]}")
    return steps or ["Nothing: use them as they are."]


def _table(entries: Sequence[Entry]) -> Part:
    left = len(entries) - _MAX_ROWS
    more = f"and {count(left)} more, each with its own page" if left > 0 else ""
    head = ("dataset", "decided at", "bias of a mean by it", "train on it?")
    rows = [_row(entry) for entry in entries[:_MAX_ROWS]]
    table = Table("Datasets", head, rows, frozenset({0, 1, 3}), more, narrow=True)
    lead = (
        "A dataset is decided at the worst of the seven places between its source and a batch; "
        "a bias is in standard deviations. Each valid dataset links to its own page."
    )
    return Part("datasets", "Datasets", Sentence(lead), [table])


def _row(entry: Entry) -> Row:
    look = LOOKS[entry.level]
    answer = f"{look.mark} {entry.answer}"
    path, audit, tone = Sentence(entry.path), entry.audit, look.tone
    if audit is None:
        return Row((path, "-", "-", answer), tone, entry.why, entry.page)
    notes, account = [audit.answer.sentence], audit.accounting
    if entry.about is not None:
        rows = f"{count(account.captured)} of {count(account.computed)} computed"
        notes += [f"{name}: {words}" for name, words in dataset_facts(entry.about, rows)]
    line = next((line for line in lines(audit) if line.decides), None)
    decided = ("-", "-") if line is None else (line.title, line.bias or "-")
    return Row((path, *decided, answer), tone, " ".join(notes), entry.page)
