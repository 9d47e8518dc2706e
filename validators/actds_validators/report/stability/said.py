"""How the report words a comparison of dictionaries: the answer, the facts, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from actds.text import counted
from actds_validators.report.head import by_arm, harvested, models
from actds_validators.report.words import Fact, count, percent
from actds_validators.stability.judge import MIN_SEEDS
from actds_validators.stability.result import (
    Comparison,
    Features,
    Measure,
    Outcome,
    Stability,
)

__all__ = [
    "FATES",
    "MARKS",
    "MEASURES",
    "Means",
    "against",
    "answer",
    "facts",
    "level",
    "means",
    "next_steps",
    "outcome",
    "provenance",
    "value",
    "words_of_art",
]

Level = Literal["PASS", "WARN", "INCONCLUSIVE"]
MEASURES: dict[Measure, str] = {
    "matched": "matched cosine",
    "nearest": "nearest cosine",
    "share_70": "matched at 0.7 or more",
    "share_90": "matched at 0.9 or more",
    "kept": "features kept",
    "split": "features split",
    "merged": "features merged",
    "gone": "features gone",
}
_COSINES = ("matched", "nearest")
_KINDS = ("other seed", "other order", "same start")
FATES: tuple[Measure, ...] = ("kept", "split", "merged", "gone")
MARKS: dict[Outcome, str] = {"within the floor": "✓", "beyond the floor": "!", "undecided": "?"}
_LEVELS: dict[Outcome, Level] = {
    "within the floor": "PASS",
    "beyond the floor": "WARN",
    "undecided": "INCONCLUSIVE",
}


def outcome(result: Stability) -> Outcome:
    """Return the outcome of the answer; undecided where there is nothing to compare."""
    return "undecided" if result.answer is None else result.answer.outcome


def level(result: Stability) -> Level:
    """Return the level, which is the colour of the page's head."""
    return _LEVELS[outcome(result)]


def answer(result: Stability) -> str:
    """Return the answer: whether the harvest changes the dictionary more than a seed does."""
    if result.answer is None:
        return f"Nothing to compare: one arm, {counted(result.limits.seeds, 'seed')} described"
    arms = result.answer.arms
    who = f"{len(arms)} of {len(result.verdicts)} arms change" if arms[1:] else f"{arms[0]} changes"
    return {
        "beyond the floor": f"Yes: {who} the dictionary more than another seed does",
        "within the floor": f"No: {who} the dictionary no more than another seed does",
        "undecided": f"Undecided whether {who} the dictionary more than another seed does",
    }[result.answer.outcome]


def words_of_art(result: Stability) -> str:
    """Return what arm, seed, order and floor are, in a few sentences."""
    return (
        "An arm is the rows that dictionaries are trained on, as one harvest gave them; "
        f"{result.arms[0].name} is the reference. A seed sets the random start of a dictionary, "
        "an order the sequence in which it sees its rows. A floor is how alike two dictionaries of "
        "the reference are that differ in seed and order, or in the order alone."
    )


def facts(result: Stability) -> list[Fact]:
    """Return the numbers at the top: those of the arm that decides, beside its floor."""
    reference, chance = result.arms[0].name, result.chance
    scale = f"1 is the same dictionary, {chance:.3f} is chance"
    what = "matched cosine, the mean cosine of decoder directions paired one to one"
    by = {(one.name, one.kind): one for one in means(result)}
    floor = by[reference, "other seed"]
    if result.answer is None:
        likeness = f"Likeness of two seeds of {reference}"
        title = f"Features of {reference} kept at another seed"
        return [
            Fact(likeness, f"{floor.matched:.3f}", f"{what}: {scale}"),
            _kept(title, floor.features, None, reference),
        ]
    one = result.answer.largest
    away = f"{one.of_arm - one.of_floor:+.3f}"
    side = f"{away[1:]} {'below' if away[0] == '-' else 'above'}"
    note = (
        f"{what}, at another seed: {scale}. It is {'equal to' if away[1:] == '0.000' else side} "
        f"that of two seeds of {reference}, {one.of_floor:.3f} (lower in {one.n_below} of "
        f"{counted(len(one.differences), 'seed')}); lower is less alike"
    )
    kept = _kept(
        f"Features of {reference} kept in {one.arm}",
        by[one.arm, "other seed"].features,
        floor.features,
        reference,
    )
    start, order = by[one.arm, "same start"].features, by[reference, "other order"].features
    if start is not None and order is not None:
        more = f"from the same start {percent(start.kept)} are kept"
        more += f" (of two dictionaries of {reference} {percent(order.kept)})"
        kept = replace(kept, note=f"{kept.note}; {more}")
    return [Fact(f"Likeness of {one.arm} to {reference}", f"{one.of_arm:.3f}", note), kept]


def _kept(title: str, features: Features | None, floor: Features | None, reference: str) -> Fact:
    if features is None:
        return Fact(title, "not known", "too few held-out rows", is_known=False)

    def also(name: str) -> str:
        return "" if floor is None else f" ({percent(getattr(floor, name))})"

    note = "one feature of the other dictionary explains 70 % of the variance of each"
    if floor is not None:
        note += f"; in brackets two seeds of {reference}"
    shares = ", ".join(
        f"{name} {percent(getattr(features, name))}{also(name)}" for name in FATES[1:]
    )
    return Fact(title, f"{percent(features.kept)}{also('kept')}", f"{note}. {shares.capitalize()}")


@dataclass(frozen=True)
class Means:
    """How alike dictionaries of a kind of pair are, mean over seeds.

    Args:
        name: arm of the second dictionary; the first is one of the reference.
        kind: what the two differ in, beside their rows.
        is_floor: whether both are of the reference.
        matched: matched cosine.
        features: what became of the reference's features; None where too few rows are held out.
    """

    name: str
    kind: str
    is_floor: bool
    matched: float
    features: Features | None

    @property
    def pair(self) -> str:
        """Return the kind, and whether it is a floor."""
        return f"{self.kind} (floor)" if self.is_floor else self.kind

    @property
    def words(self) -> str:
        """Return the arm and the pair."""
        return f"{self.name}, {self.pair}"


def means(result: Stability) -> list[Means]:
    """Return the means of every kind of pair, each floor before the arms that it is for."""
    kinds = dict.fromkeys(
        (pair.arm, pair.kind)
        for pair in sorted(result.pairs, key=lambda p: _KINDS.index(p.kind))
    )  # fmt: skip
    found = []
    for name, kind in kinds:
        of = [p.likeness for p in result.pairs if (p.arm, p.kind) == (name, kind)]
        features = [one.features for one in of if one.features is not None]
        matched, is_floor = mean_of([one.matched for one in of]), name == result.arms[0].name
        found.append(Means(name, kind, is_floor, matched, _mean(features) if features else None))
    return found


def _mean(of: Sequence[Features]) -> Features:
    return Features(
        n=round(mean_of([one.n for one in of])),
        **{name: mean_of([getattr(one, name) for one in of]) for name in FATES},
        split_into=[
            mean_of(shares) for shares in zip(*(one.split_into for one in of), strict=True)
        ],
        merged_from=[
            mean_of(shares) for shares in zip(*(one.merged_from for one in of), strict=True)
        ],
    )


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of one or more values."""
    return sum(values) / len(values)


def provenance(result: Stability, command: str) -> list[tuple[str, str]]:
    """Return what was compared: arms, model, hook, rows, harvest, training, command."""
    arms, limits = result.arms, result.limits
    passes = "1 pass" if limits.epochs == 1 else f"{count(limits.epochs)} passes"
    alive = mean_of([one.n_alive for one in result.dictionaries]) / result.n_features
    trained = (
        f"TopK, {count(result.n_features)} features, {limits.k} active; {passes} over "
        f"{count(result.n_rows)} rows, {count(result.n_seen)} seen by each of "
        f"{len(result.dictionaries)} dictionaries, {counted(limits.seeds, 'seed')}; "
        f"{percent(alive)} of the features were active in the last pass"
    )
    shape = [(arm.name, f"{result.hook} ({result.d_model:,} × {arm.dtype})") for arm in arms]
    return [
        ("Arms", by_arm([(arm.name, arm.words) for arm in arms])),
        ("Model", by_arm([(arm.name, models(arm.models)) for arm in arms])),
        ("Hook", by_arm(shape)),
        ("Rows", f"{count(result.n_rows)} of each arm"),
        ("Harvested", by_arm([(arm.name, harvested(arm.started_ns, arm.engines)) for arm in arms])),
        ("Trained", trained),
        ("Command", command),
    ]


def next_steps(result: Stability) -> list[str]:
    """Return what to do, the most pressing first."""
    steps = []
    found, reference = result.answer, result.arms[0].name
    if found is not None and found.outcome == "beyond the floor":
        steps.append(
            f"Say which harvest a dictionary was trained on: one of {_listed(found.arms)} is not "
            f"one of {reference} of another seed. Train on rows of the regime that you use it in."
        )
    if found is not None and found.within_and_changed:
        steps.append(
            f"Rows of {_listed(found.within_and_changed)} do change the dictionary, by less than "
            "another seed does: read nothing into single features."
        )
    lacks: dict[str, list[str]] = {}  # what is short, and of which arms
    for one in result.verdicts:
        for words in one.short:
            lacks.setdefault(words.partition(": ")[2] or words, []).append(one.arm)
    steps += [f"{_listed(list(dict.fromkeys(arms)))}: {what}." for what, arms in lacks.items()]
    if found is None:
        few = f", and --seeds {MIN_SEEDS} at least" if result.limits.seeds < MIN_SEEDS else ""
        steps.append(f"Name a second arm{few}: a test needs both.")
    if len(result.arms) > 1:
        steps.append(
            "Look at the cross-reconstruction: what each dictionary leaves of the other rows."
        )
    return list(dict.fromkeys(steps))


def _listed(names: list[str]) -> str:
    """Return names, the first four of many."""
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" or {more} others" if more > 0 else "")


def value(measure: Measure, number: float) -> str:
    """Return a value of a measure: a cosine, or a share in per cent."""
    return f"{number:.3f}" if measure in _COSINES else percent(number)


def against(one: Comparison) -> str:
    """Return the mean difference of an arm and its floor, of shares in percentage points."""
    mean = mean_of(one.differences)
    return f"{mean:+.3f}" if one.measure in _COSINES else f"{100 * mean:+.3g} points"
