"""What the report says of trained dictionaries: the answer, the facts, what to do."""

from __future__ import annotations

from typing import Literal

from actds.text import counted
from actds_validators.report.words import count, percent
from actds_validators.stability.judge import MIN_SEEDS
from actds_validators.stability.result import Comparison, Outcome, Stability

__all__ = [
    "MARKS",
    "MEASURES",
    "against",
    "answer",
    "arm_words",
    "facts",
    "level",
    "next_steps",
    "outcome",
    "trained",
]

Level = Literal["PASS", "WARN", "INCONCLUSIVE"]
MEASURES = {
    "matched": "matched cosine",
    "nearest": "nearest cosine",
    "share_70": "share at 0.7 or more",
    "share_90": "share at 0.9 or more",
    "split": "effective partners, split",
    "merge": "effective partners, merge",
}
MARKS: dict[Outcome, str] = {"within the floor": "✓", "beyond the floor": "!", "undecided": "?"}
_LEVELS: dict[Outcome, Level] = {
    "within the floor": "PASS",
    "beyond the floor": "WARN",
    "undecided": "INCONCLUSIVE",
}
_ORDER: tuple[Outcome, ...] = ("beyond the floor", "undecided", "within the floor")


def outcome(result: Stability) -> Outcome:
    """Return what the verdicts say together; undecided where there is none."""
    there = {verdict.outcome for verdict in result.verdicts}
    return next((one for one in _ORDER if one in there), "undecided")


def level(result: Stability) -> Level:
    """Return the level, which is the colour of the page's head."""
    return _LEVELS[outcome(result)]


def answer(result: Stability) -> str:
    """Return the answer: whether the harvest changes the dictionary more than a seed does."""
    n = len(result.verdicts)
    if not n:
        return f"One arm: {counted(result.limits.seeds, 'seed')} described, nothing to compare"
    found = outcome(result)
    hits = sum(verdict.outcome == found for verdict in result.verdicts)
    said = {"beyond the floor": "Yes", "within the floor": "No"}.get(found)
    if said is None:
        return f"Undecided: {hits} of {counted(n, 'arm')}"
    return f"{said}: {hits} of {counted(n, 'arm')} {found} of another seed"


def facts(result: Stability) -> list[tuple[str, str, str]]:
    """Return the facts at the top: a title, the fact, more of it."""
    reference = result.arms[0].name
    found = []
    for kind, title in (("other seed", "Another seed"), ("other order", "Another order")):
        of = [p.likeness for p in result.pairs if p.arm == reference and p.kind == kind]
        cosine = sum(one.matched for one in of) / len(of)
        shared = sum(one.share_70 for one in of) / len(of)
        note = f"matched cosine of two dictionaries of {reference}; {percent(shared)} of features"
        note += f" at 0.7 or more; random directions have {result.chance:.3f}"
        found.append((title, f"{cosine:.3f}", note))
    alive = sum(one.n_alive for one in result.dictionaries) / len(result.dictionaries)
    note = (
        f"of {count(result.n_features)} features, mean of {len(result.dictionaries)} dictionaries"
    )
    found.append(("Alive", percent(alive / result.n_features), note))
    return found


def trained(result: Stability) -> str:
    """Return how the dictionaries were trained, in a sentence."""
    limits = result.limits
    passes = "1 pass" if limits.epochs == 1 else f"{count(limits.epochs)} passes"
    return (
        f"TopK, {count(result.n_features)} features, {limits.k} active; {count(result.n_rows)} "
        f"rows of {result.hook} from every arm, {passes}, {count(result.n_seen)} rows seen by "
        f"each; {counted(limits.seeds, 'seed')}"
    )


def arm_words(result: Stability) -> list[tuple[str, str]]:
    """Return the arms and what their rows are."""
    return [(one.name, one.words) for one in result.arms]


def next_steps(result: Stability) -> list[str]:
    """Return what to do, the most pressing first."""
    steps = []
    reference = result.arms[0].name
    beyond = [one.arm for one in result.verdicts if one.outcome == "beyond the floor"]
    if beyond:
        steps.append(
            f"Say which harvest a dictionary was trained on: one of {_listed(beyond)} is not one "
            f"of {reference} of another seed. Train on rows of the regime that you use it in."
        )
    changed = [
        one.arm
        for one in result.verdicts
        if one.outcome == "within the floor" and one.against_order == "beyond the floor"
    ]
    if changed:
        steps.append(
            f"Rows of {_listed(changed)} do change the dictionary, by less than another seed does: "
            "read nothing into single features."
        )
    lacks: dict[str, list[str]] = {}  # what is short, and of which arms
    for one in result.verdicts:
        for words in one.short:
            lacks.setdefault(words.partition(": ")[2] or words, []).append(one.arm)
    steps += [f"{_listed(list(dict.fromkeys(arms)))}: {what}." for what, arms in lacks.items()]
    if not result.verdicts and result.limits.seeds < MIN_SEEDS:
        steps.append(f"Name a second arm, and --seeds {MIN_SEEDS} at least, for a test.")
    if len(result.arms) > 1:
        steps.append(
            "Look at the cross-reconstruction: what each dictionary leaves of the other rows."
        )
    return list(dict.fromkeys(steps))


def _listed(names: list[str]) -> str:
    """Return names, the first four of many."""
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" or {more} others" if more > 0 else "")


def against(one: Comparison) -> str:
    """Return the mean difference of an arm and its floor."""
    return f"{sum(one.differences) / len(one.differences):+.3f}"
