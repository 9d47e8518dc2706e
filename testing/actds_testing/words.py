"""Words of a private dialect that no user should read, each with its replacement.

Scans what a user can see: the README, the guides (docs/cli.md is the help of every command), the
spec, the table of error codes, the docstrings of ``actds.__all__``, the templates of pages, and
every sentence in the code of the packages (options, errors, progress, reports, logs).
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import actds
from actds.errors import CODES
from actds_testing.places import DOCS, EXAMPLES, ROOT

__all__ = ["BANNED", "NOT_YET", "Hit", "find", "hits", "visible_texts"]

BANNED: dict[str, tuple[str, str]] = {
    "mend": (r"\bmend(s|ed|ing)?\b", "fix"),
    "stand": (r"\b(stands?|stood|standing)\b(?! (alone|still))", "is, is in, lies in, represents"),
    "told": (r"\btold\b", "recorded by, says, given"),
    "witness": (r"\bwitness(es)?\b", "scheduler side, worker side; account"),
    "not kept": (r"\bnot kept\b", "fail; not stored"),
    "add up": (r"\bnot add up\b", "accounting mismatch; disagree"),
    "can be off": (r"\bmost that any mean\b", "worst-case bias of any mean (SD)"),
    "mildest": (r"\bmildest\b", "exit 1 at this verdict or worse"),
    "all that there was": (r"\ball that there was\b", "no rows were lost"),
    "nought": (r"\bnought\b", "zero"),
    "the token's way": (r"\btoken'?s'? way\b", "data path"),
    "go with": (r"\b(go|goes|going|went) with\b", "depend on"),
    "cache reference": (r"\bcache references?\b", "prefix-cache hit"),
    "lead nowhere": (r"\bleads? nowhere\b", "without a stored row"),
    "lost too much": (r"\blost too much\b", "excess loss"),
    "would not notice": (r"\bwould not notice\b", "cannot detect"),
    "could be asked": (r"\b(could|can) (not )?be asked\b", "tested, not tested"),
    "a side": (r"\brows a side\b", "rows per side"),
    "a second": (r"\b(tokens|rows|bytes|requests) a second\b", "per second"),
    "put back": (r"\bputs? (those|them|it) back\b", "make up for"),
    "blame": (r"\bblam(e|es|ed)\b", "name a cause"),
    "in so many words": (r"\bin so many words\b", "explicitly"),
    "redoing": (r"\bwithout redoing\b", "resume; skip finished requests"),
    "held against": (r"\b(held|hold|holds) [^.]{0,40}\bagainst\b", "compare with"),
    "--writer": (r"(?<![\w-])--writer (vllm|transformers)\b", "--engine"),
    "--engine ray": (r"(?<![\w-])--engine (threads|ray)\b", "--executor"),
    "tell apart": (r"\b(tell|tells) \w+ apart\b", "distinguish, separate"),
}
"""Name of each phrase: the pattern, and what to write instead."""

_STAND = frozenset({"stand"})
NOT_YET: dict[str, frozenset[str]] = {
    # Descriptions that the JSON Schemas of this format version hold, and tables made of them.
    "actds/format/schema/v0_1.py": _STAND,
    "actds/format/tables.py": _STAND,
    "spec/0.1/03-genesis.md": _STAND,
    "spec/0.1/06-provenance.md": _STAND,
    "spec/0.1/08-ledger.md": _STAND,
    "validators/actds_validators/audit/result.py": frozenset({"add up"}),
    # Made with the vectors, which do not change for a word.
    "spec/0.1/attacks/README.md": _STAND,
    "spec/0.1/vectors/README.md": _STAND,
}
"""Phrases that a file still has. It only shrinks: a phrase that is gone is taken out."""

# A phrase may be broken over two lines of prose.
_PATTERNS = {
    name: re.compile(pattern.replace(" ", r"\s+"), re.I) for name, (pattern, _) in BANNED.items()
}
_VALIDATORS = ROOT / "validators" / "actds_validators"
_SOURCES = (
    ROOT / "actds",
    ROOT / "writers" / "actds_writers",
    _VALIDATORS,
    ROOT / "validators" / "actds_studies",
)
_SQL = re.compile(
    r"\b(select|copy|with)\b.*\bfrom\b|^\s*(from|join|where|union|group by)\b[^A-Z]*[=<(]", re.S
)


@dataclass(frozen=True)
class Hit:
    """A banned phrase in a file: where, what it says, and what to write instead."""

    file: str
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text!r}: write: {BANNED[self.name][1]}"


def find(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield each banned phrase of a text: its name, the place, and the words."""
    for name, pattern in _PATTERNS.items():
        for match in pattern.finditer(text):
            yield name, match.start(), match.group()


def visible_texts() -> Iterator[tuple[str, int, str]]:
    """Yield what a user can see: file, line, text."""
    templates = (_VALIDATORS / "pages" / "templates").glob("*.j2")
    guides = [*sorted(DOCS.glob("*.md")), *sorted(EXAMPLES.glob("*/README.md"))]
    spec = sorted((ROOT / "spec").rglob("*.md"))
    for path in (ROOT / "README.md", *guides, *spec, *sorted(templates)):
        yield _name(path), 1, path.read_text(encoding="utf-8")
    for code, entry in CODES.items():
        for words in (entry.title, entry.meaning, entry.next_step):
            yield f"error code {code}", 1, words
    for name in actds.__all__:
        yield f"docstring of actds.{name}", 1, inspect.getdoc(getattr(actds, name)) or ""
    for folder in _SOURCES:
        for path in sorted(folder.rglob("*.py")):
            for line, words in _literals(path):
                yield _name(path), line, words


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _literals(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that are sentences: no docstring, no query."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in bare and not _SQL.search(node.value):  # type: ignore[attr-defined]
            yield node.lineno, node.value  # type: ignore[attr-defined]


def hits() -> list[Hit]:
    """Return every banned phrase that a user can see."""
    return [
        Hit(file, line + text[:at].count("\n"), name, words)
        for file, line, text in visible_texts()
        for name, at, words in find(text)
    ]
