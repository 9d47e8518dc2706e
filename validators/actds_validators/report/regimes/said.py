"""The words of the report of regimes: every conclusion is the result's, and here it is worded."""

from __future__ import annotations

from typing import Literal

from actds.text import counted
from actds_validators.regimes.conclusions import leading
from actds_validators.regimes.result import (
    About,
    ArmResult,
    ContrastResult,
    Outcome,
    Regimes,
    Value,
)
from actds_validators.regimes.wording import big
from actds_validators.report.head import day
from actds_validators.report.words import Fact, count, percent, short

__all__ = [
    "ABOUT",
    "FLOOR",
    "LEVELS",
    "MARKS",
    "NOT_ASKED",
    "about",
    "answer",
    "arms",
    "facts",
    "gap",
    "introduction",
    "names_of",
    "number",
    "parts",
]

Level = Literal["PASS", "WARN", "INCONCLUSIVE"]
LEVELS: dict[Outcome, Level] = {
    "carries over": "PASS",
    "shifts": "WARN",
    "undecided": "INCONCLUSIVE",
}
MARKS: dict[Outcome, str] = {"carries over": "✓", "shifts": "!", "undecided": "?"}
ABOUT: dict[About, str] = {
    "computation": "computation: the same tokens behind the same prefix, computed another way",
    "authorship": "authorship: other tokens at equal positions behind the same prompt, computed "
    "alike",
    "both": "authorship and computation together: other tokens, computed another way",
    "text": "the text: other tokens, computed alike",
}
FLOOR = (
    "The limit of a value is the largest difference that counts as none, an option of the command. "
    "Its floor is by how much two halves of the reference's own requests differ; of distances "
    "between equal tokens it is the distance between rows that were computed alike twice."
)
NOT_ASKED = (
    "Not tested here: what the harvest lost and what its prefix cache left out, which actds audit "
    "tests."
)
_MAX_INTRODUCED, _MAX_HOOKS = 4, 6


def answer(result: Regimes) -> str:
    """Return the answer: whether the way it was served changes what is measured."""
    answer, verdicts = result.answer, counted(result.answer.n_verdicts, "verdict")
    if answer.outcome == "shifts":
        return f"Yes: {answer.n_shifts} of {verdicts} shift"
    if answer.outcome == "undecided":
        return f"Undecided: {answer.n_undecided} of {verdicts}"
    return f"No: {verdicts}, and all carry over"


def facts(result: Regimes) -> list[Fact]:
    """Return how large it is, and whether it is authorship or computation."""
    answer = result.answer
    is_known = answer.separated not in ("not separated", "undecided")
    title = "Authorship (who wrote the tokens) or computation"
    separated = Fact(title, answer.separated, answer.reason, is_known)
    if answer.largest is None:
        values = [v for c in result.contrasts for v in c.values if v.outcome is not None]
        within = sum(value.outcome == "carries over" for value in values)
        note = f"{within:,} of {len(values):,} tested values lie within their limits"
        if not values:
            return [Fact("Largest shift", "not known", "nothing could be tested", False), separated]
        return [Fact("Largest shift", "none found", note), separated]
    contrast = next(one for one in result.contrasts if one.name == answer.largest.contrast)
    figure = big(answer.largest.value, names_of(contrast))
    return [Fact("Largest shift", figure, answer.largest.sentence), separated]


def names_of(contrast: ContrastResult) -> tuple[str, str]:
    """Return the names of the reference and of the other arm."""
    return contrast.first.name, contrast.second.name


def introduction(result: Regimes) -> str:
    """Return what the arms are, and how a contrast is named, in words."""
    known = _arms(result)
    words = [f"{name} is {arm.rows}" for name, arm in list(known.items())[:_MAX_INTRODUCED]]
    words += [f"{len(known) - len(words):,} more arms below"] if len(known) > len(words) else []
    if not known:
        return "Nothing was compared."
    first = result.contrasts[0]
    name = f"{first.name} is {first.second.name} compared with its reference, {first.first.name}."
    return f"{'; '.join(words)}. {name}"


def _arms(result: Regimes) -> dict[str, ArmResult]:
    return {arm.name: arm for one in result.contrasts for arm in (one.first, one.second)}


def parts(result: Regimes) -> list[str]:
    """Return per hook how a dictionary's gap divides into authorship and computation."""
    by_hook: dict[str, list[str]] = {}
    for part in result.answer.parts:
        size = f"{100 * part.value:+.3g} points"
        known = part.low is not None and part.high is not None
        ends = f", {100 * (part.low or 0):.3g} to {100 * (part.high or 0):.3g}" if known else ""
        by_hook.setdefault(part.hook, []).append(f"{size} by {part.about} ({part.contrast}{ends})")
    return [f"{hook}, variance unexplained: {', '.join(words)}." for hook, words in by_hook.items()]


def about(result: Regimes, command: str) -> list[tuple[str, str]]:
    """Return what was compared: arms, models, hooks, dates, engines, command."""
    facts = [
        (name, f"{arm.words}: {count(arm.n_rows)} rows of {counted(arm.n_requests, 'request')}")
        for name, arm in _arms(result).items()
    ]
    datasets = result.datasets
    models = dict.fromkeys(name for one in datasets for name in one.models)
    hooks = list(dict.fromkeys(name for one in datasets for name in one.hooks))
    more = [f"and {len(hooks) - _MAX_HOOKS} more"] if len(hooks) > _MAX_HOOKS else []
    engines = list(dict.fromkeys(name for one in datasets for name in one.engines))
    days = dict.fromkeys(day(ns) for ns in _ends([one.started_ns for one in datasets]))
    facts += [
        ("Model", ", ".join(list(models)[:3]) or "not recorded"),
        ("Hooks", ", ".join(hooks[:_MAX_HOOKS] + more) or "not recorded"),
        ("Harvested", " with ".join([" to ".join(days), *engines[:2]]) or "not recorded"),
        ("Command", command),
    ]
    return facts


def _ends(times: list[int]) -> list[int]:
    return [min(times), max(times)] if times else []


def gap(contrast: ContrastResult, axis: str) -> list[Value]:
    """Return the leading measure in the strata of an axis, of those where it is estimated."""
    chosen = leading(contrast)
    return [
        value
        for value in contrast.values
        if (value.instrument, value.measure) == chosen
        and value.axis == axis
        and value.value is not None
    ]


def arms(contrast: ContrastResult) -> str:
    """Return how two arms were compared, in a sentence."""
    how = {
        "token": f"{count(contrast.n_pairs)} pairs of the same token behind the same prefix",
        "position": f"{count(contrast.n_pairs)} pairs of the same prompt and position",
        "unpaired": "unpaired, the reference weighted to the other arm's token ids and positions: "
        "adjusted, not matched"
        if contrast.adjusted
        else "unpaired, as they are",
    }[contrast.pairing]
    covered = percent(contrast.coverage)
    left_out = "".join(f" Strata that are not formed: {words}." for words in contrast.left_out)
    return (
        f"{contrast.name} at {contrast.hook}: {how}; {covered} of {contrast.second.name}'s rows "
        f"compared, {counted(contrast.n_groups, 'group')} of requests. What differs is "
        f"{ABOUT[contrast.about]}."
        f"{left_out}"
    )


def number(value: float | None) -> str:
    """Return a number of a table, a dash for none."""
    return "-" if value is None else short(value)
