"""The head of a page: which model, which hooks, which engine and when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from actds_validators.about import About
from actds_validators.pages.words import first

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


def models(names: Sequence[str]) -> str:
    """Return the models of a dataset in words."""
    return ", ".join(names[:3]) or "not recorded"


def harvested(started_ns: int, engines: Sequence[str]) -> str:
    """Return when a dataset was made, and with what."""
    return " with ".join([day(started_ns), *engines[:2]])


def by_arm(words: Sequence[tuple[str, str]]) -> str:
    """Return what is said of arms: once for those of which it is the same.

    Args:
        words: name of each arm, and what is said of it.
    """
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
    """Return a time in words, to the minute."""
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "on an unknown date"
