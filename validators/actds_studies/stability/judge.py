"""What likenesses say of an arm: a sign test over seeds beside each floor, and a verdict in words.

K seeds have 2^K outcomes: from six on a two-sided test can reach 5 %. Fewer describe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from actds.text import counted
from actds_studies.stability.result import (
    Answer,
    Comparison,
    Floor,
    Likeness,
    Limits,
    Measure,
    Outcome,
    PairResult,
    Verdict,
)
from actds_validators.statistics.intervals import benjamini_hochberg

MIN_SEEDS = 6
LEVEL = 0.05
_TESTED: Measure = "matched"
_ORDER: tuple[Outcome, ...] = ("beyond the floor", "undecided", "within the floor")
_WORDS: dict[Outcome, str] = {
    "beyond the floor": "changes the dictionary more than another seed does",
    "within the floor": "changes the dictionary no more than another seed does",
    "undecided": "undecided whether it changes the dictionary more than another seed does",
}


def sign_test(n_below: int, n: int, *, two_sided: bool = True) -> float:
    """Return the p of a sign test: so many of ``n`` signs below, if either were equally likely.

    Args:
        n_below: signs below; for the one-sided test, signs on the side that is shown.
        n: signs that are not zero.
    """
    from scipy.stats import binomtest  # type: ignore[import-untyped]

    if not n:
        return 1.0
    alternative = "two-sided" if two_sided else "greater"
    return float(binomtest(n_below, n, alternative=alternative).pvalue)


def compare(
    pairs: Sequence[PairResult], reference: str, chance: float, limits: Limits
) -> list[Comparison]:
    """Return every arm against both floors, one difference per seed.

    The tests of all arms against one floor are a family.

    Against *other seed*: the reference at a seed and the arm at the next one, less the reference
    at both. Against *other order*: both arms of one start, less the reference in another order.

    Args:
        chance: mean cosine of random directions, matched. A floor that is within the limit of it
            can show nothing.
    """
    by: dict[tuple[str, str], dict[int, Likeness]] = {}
    for pair in pairs:
        by.setdefault((pair.arm, pair.kind), {})[pair.seeds[0]] = pair.likeness
    comparisons = []
    for arm in dict.fromkeys(pair.arm for pair in pairs if pair.arm != reference):
        for floor in get_args(Floor):
            kind = "same start" if floor == "other order" else floor
            for measure in get_args(Measure):
                comparison = _comparison(
                    arm, floor, measure, by[arm, kind], by[reference, floor], limits
                )
                comparisons += [comparison] if comparison is not None else []
    return _decided(comparisons, chance, limits)


def _comparison(
    arm: str,
    floor: Floor,
    measure: Measure,
    likenesses: Mapping[int, Likeness],
    within: Mapping[int, Likeness],
    limits: Limits,
) -> Comparison | None:
    values = [
        (_value(likenesses[seed], measure), _value(within[seed], measure))
        for seed in sorted(likenesses)
    ]
    if any(None in pair for pair in values):
        return None
    pair_values = np.array(values, np.float64)
    differences = pair_values[:, 0] - pair_values[:, 1]
    n_below = int((differences < 0).sum())
    tested = measure == _TESTED and len(differences) >= MIN_SEEDS
    n_there = int((differences > -limits.margin).sum())
    return Comparison(
        arm=arm,
        floor=floor,
        measure=measure,
        of_arm=float(pair_values[:, 0].mean()),
        of_floor=float(pair_values[:, 1].mean()),
        differences=differences.tolist(),
        n_below=n_below,
        p=sign_test(n_below, int((differences != 0).sum())) if tested else None,
        p_within=sign_test(n_there, len(differences), two_sided=False) if tested else None,
        outcome="undecided" if measure == _TESTED else None,
    )


def _value(likeness: Likeness, measure: Measure) -> float | None:
    of = likeness if hasattr(likeness, measure) else likeness.features
    return None if of is None else float(getattr(of, measure))


def _decided(comparisons: Sequence[Comparison], chance: float, limits: Limits) -> list[Comparison]:
    decided = list(comparisons)
    for floor in get_args(Floor):
        tests = [
            n
            for n, comparison in enumerate(comparisons)
            if comparison.floor == floor and comparison.p is not None
        ]
        adjusted = benjamini_hochberg([comparisons[n].p or 0.0 for n in tests])
        for n, p in zip(tests, adjusted.tolist(), strict=True):
            outcome = _outcome(comparisons[n], p, chance, limits)
            decided[n] = comparisons[n].model_copy(update={"adjusted_p": p, "outcome": outcome})
    return decided


def _outcome(comparison: Comparison, adjusted_p: float, chance: float, limits: Limits) -> Outcome:
    if _is_chance(comparison, chance, limits):
        return "undecided"
    if comparison.p_within is not None and comparison.p_within <= LEVEL:
        return "within the floor"
    shown = adjusted_p <= limits.fdr and 2 * comparison.n_below > len(comparison.differences)
    return "beyond the floor" if shown else "undecided"


def _is_chance(comparison: Comparison, chance: float, limits: Limits) -> bool:
    """Return whether a floor is as low as random directions lie: less alike there is nothing."""
    return comparison.of_floor <= chance + limits.margin


def verdicts(
    comparisons: Sequence[Comparison], reference: str, chance: float, limits: Limits
) -> list[Verdict]:
    """Return what is found on each arm, in words."""
    by = {
        (comparison.arm, comparison.floor): comparison
        for comparison in comparisons
        if comparison.measure == _TESTED
    }
    verdicts = []
    arms = list(dict.fromkeys(comparison.arm for comparison in comparisons))
    for arm in arms:
        seed, order = by[arm, "other seed"], by[arm, "other order"]
        assert seed.outcome is not None and order.outcome is not None
        sentence = (
            f"{arm}: {_WORDS[seed.outcome]}. Matched cosine with {reference} {seed.of_arm:.3f} at "
            f"another seed, where two seeds of {reference} have {seed.of_floor:.3f} "
            f"({_below(seed)}); from the same start {order.of_arm:.3f}, where another order of the "
            f"same rows has {order.of_floor:.3f} ({_below(order)})."
        )
        verdicts.append(
            Verdict(
                arm=arm,
                outcome=seed.outcome,
                against_order=order.outcome,
                sentence=sentence,
                short=[
                    words
                    for comparison in (seed, order)
                    if (words := _short(comparison, len(arms), chance, limits))
                ],
            )
        )
    return verdicts


def answer(
    judged: Sequence[Verdict], comparisons: Sequence[Comparison], reference: str, n_seeds: int
) -> Answer:
    """Return what the verdicts say together, which arms decide it, and what to do.

    Args:
        judged: a verdict per arm; empty where only the reference was given.
    """
    outcomes = {verdict.arm: verdict.outcome for verdict in judged}
    outcome: Outcome = "undecided"
    outcome = next((o for o in _ORDER if o in outcomes.values()), outcome)
    deciding = sorted(
        (
            comparison
            for comparison in comparisons
            if (comparison.floor, comparison.measure) == ("other seed", _TESTED)
            and outcomes.get(comparison.arm) == outcome
        ),
        key=lambda comparison: comparison.of_arm - comparison.of_floor,
    )
    arms = [comparison.arm for comparison in deciding]
    changed = [
        verdict.arm
        for verdict in judged
        if verdict.outcome == "within the floor" and verdict.against_order == "beyond the floor"
    ]
    return Answer(
        outcome=outcome,
        words=_words(outcome, arms, len(judged), n_seeds),
        arms=arms,
        largest=deciding[0] if deciding else None,
        within_and_changed=changed,
        next_steps=list(_next_steps(judged, outcome, arms, changed, reference, n_seeds)),
    )


def _words(outcome: Outcome, arms: Sequence[str], n_arms: int, n_seeds: int) -> str:
    if not arms:
        return f"Nothing to compare: one arm, {counted(n_seeds, 'seed')} described"
    who = f"{len(arms)} of {n_arms} arms change" if arms[1:] else f"{arms[0]} changes"
    return {
        "beyond the floor": f"Yes: {who} the dictionary more than another seed does",
        "within the floor": f"No: {who} the dictionary no more than another seed does",
        "undecided": f"Undecided whether {who} the dictionary more than another seed does",
    }[outcome]


def _next_steps(
    judged: Sequence[Verdict],
    outcome: Outcome,
    arms: list[str],
    changed: list[str],
    reference: str,
    n_seeds: int,
) -> Iterator[str]:
    if outcome == "beyond the floor":
        yield (
            f"Say which harvest a dictionary was trained on: one of {_listed(arms)} is not one of "
            f"{reference} of another seed. Train on rows of the regime that you use it in."
        )
    if changed:
        yield (
            f"Rows of {_listed(changed)} do change the dictionary, by less than another seed does: "
            "read nothing into single features."
        )
    lacks: dict[str, list[str]] = {}  # what is short, and of which arms
    for verdict in judged:
        for words in verdict.short:
            lacks.setdefault(words.partition(": ")[2] or words, []).append(verdict.arm)
    yield from (f"{_listed(list(dict.fromkeys(of)))}: {what}." for what, of in lacks.items())
    if judged:
        yield "Look at the cross-reconstruction: what each dictionary leaves of the other rows."
    else:
        few = f", and --seeds {MIN_SEEDS} at least" if n_seeds < MIN_SEEDS else ""
        yield f"Name a second arm{few}: a test needs both."


def _listed(names: list[str]) -> str:
    """Return names, the first four of many."""
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" or {more} others" if more > 0 else "")


def _below(comparison: Comparison) -> str:
    return f"{comparison.n_below} of {counted(len(comparison.differences), 'seed')} below"


def _short(comparison: Comparison, n_arms: int, chance: float, limits: Limits) -> str:
    if comparison.outcome != "undecided":
        return ""
    if _is_chance(comparison, chance, limits):
        return (
            f"{comparison.floor}: the floor of {comparison.of_floor:.3f} is little above the "
            f"{chance:.3f} of random directions: train longer (--epochs), or on more rows"
        )
    n = len(comparison.differences)
    if n < MIN_SEEDS:
        few = f"{n} seeds describe, they do not test; --seeds {MIN_SEEDS} at least"
        return f"{comparison.floor}: {few}"
    assert comparison.adjusted_p is not None
    enough = 1 + math.ceil(math.log2(n_arms / limits.fdr))
    more = f"{enough} seeds that all agree would show one; " if enough > n else ""
    return (
        f"{comparison.floor}: no difference is shown (adjusted p {comparison.adjusted_p:.2g}), and "
        f"none is ruled out up to {limits.margin:g}; {more}more --seeds"
    )
