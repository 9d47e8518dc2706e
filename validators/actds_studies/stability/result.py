"""The result of a comparison of trained dictionaries, ``actds.stability/1``, and what it concludes.

Beside each floor there is a sign test over seeds. K seeds have 2^K outcomes: from six on a
two-sided test can reach 5 %; fewer describe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from actds.text import counted
from actds_studies.steer.result import Outcome as Decayed
from actds_validators.audit.result import Estimate
from actds_validators.sections import Document, LimitsSection, Section, Share

PairKind = Literal["same start", "other order", "other seed"]
Use = Literal["FVU", "AUROC of maxima", "AUROC of means"]
"""What dictionaries are used for, in a number: to explain rows, and to tell requests apart by a
probe on the features, by the maximum or the mean of its scores over the rows of a request."""
FVU: Use = "FVU"
AUROC_MAXIMUM: Use = "AUROC of maxima"
AUROC_MEAN: Use = "AUROC of means"
RAW = "raw rows"
"""What stands in place of an arm where a probe reads the rows themselves."""
Outcome = Literal["within the floor", "beyond the floor", "undecided"]
Measure = Literal["matched", "nearest", "share_70", "share_90", "kept", "split", "merged", "gone"]
"""Numbers of a `Likeness`: four of directions, four of its features."""
Floor = Literal["other seed", "other order"]
"""What two dictionaries of one arm differ in: the start and the order, or the order alone."""


class Limits(LimitsSection):
    """The settings: how dictionaries are trained, and how they are compared."""

    options: ClassVar = frozenset(
        {"seeds", "seed", "features", "k", "rows", "epochs", "batch", "learning_rate"}
        | {"held_out", "max_memory", "steer"}
    )

    seeds: int = Field(default=6, ge=2, le=64, description="seeds, a dictionary per arm for each")
    seed: int = Field(default=0, ge=0, le=2**31, description="first seed, and that of the samples")
    features: int | None = Field(
        default=None, ge=2, le=1 << 20, description="features; 4 to a channel if not given"
    )
    k: int = Field(default=32, ge=1, description="active features of a row")
    rows: int | None = Field(
        default=None, ge=1, description="rows of an arm; as many as the smallest has if not given"
    )
    epochs: int = Field(default=10, ge=1, le=10_000, description="passes over the rows of an arm")
    batch: int = Field(default=512, ge=2, le=1 << 20, description="rows of a training step")
    learning_rate: float = Field(default=1e-3, gt=0, le=1, description="of Adam")
    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="share of the requests that only score dictionaries"
    )
    max_memory: int = Field(default=4096, ge=1, description="MiB for rows and their features")
    steer: int | None = Field(
        default=None,
        ge=1,
        le=32,
        description="matched features of each arm to steer by; none if not given",
    )
    nats: float = Field(default=1.0, gt=0, le=20, description="divergence of a dose of steering")
    margin: float = Field(
        default=0.02, gt=0, description="difference of matched cosines that counts as none"
    )
    fvu: float = Field(
        default=0.02, gt=0, description="difference of fractions unexplained that counts as none"
    )
    auc: float = Field(
        default=0.03, gt=0, description="difference of areas under the ROC curve, likewise"
    )
    fdr: float = Field(default=0.05, gt=0, lt=1, description="false discovery rate of the tests")


class ArmResult(Section):
    """The rows that the dictionaries of an arm were trained and scored on."""

    name: str
    words: str = Field(description="dataset and what selects its rows")
    digest: str = Field(description="of the dataset's seal")
    models: list[str] = Field(description="of its runs, as these recorded them")
    engines: list[str] = Field(description="names and versions")
    started_ns: int = Field(description="when its first run began, wall clock")
    dtype: str = Field(description="type of the hook's rows")
    n_there: int = Field(ge=0, description="rows to train on, as often as they were served")
    n_rows: int = Field(ge=0, description="of these used, the same number in every arm")
    shares: dict[str, int] = Field(description="rows used, by phase")
    n_common: int = Field(ge=0, description="rows used that the reference uses as well")
    n_sinks: int = Field(ge=0, description="rows above 10 median norms or not finite: no weight")
    n_scored: int = Field(ge=0, description="held-out rows, each prefix once, none trained on")
    n_requests: int = Field(ge=0, description="requests of these")


class Trained(Section):
    """One dictionary."""

    arm: str
    seed: int = Field(description="of the initial weights")
    order: int = Field(description="seed of the order of the rows")
    fvu: float = Field(description="fraction unexplained of the last 20 batches")
    n_alive: int = Field(ge=0, description="features active in the last pass over its rows")
    sha256: str = Field(description="of the weights")
    path: str | None = Field(default=None, description="folder that it was written to")


class Features(Section):
    """What became of the first dictionary's features in the second; the four shares make 1."""

    n: int = Field(ge=1, description="features active on 20 held-out rows or more, all others left")
    kept: Share = Field(description="one feature of the second explains 70 % of the variance")
    split: Share = Field(
        description="several together do, each of which explains 10 % or more and none 70 %"
    )
    merged: Share = Field(description="one of those into which a feature of the second is split")
    gone: Share = Field(description="none of these")
    split_into: list[Share] = Field(description="split into 2, into 3, and into 4 to 6")
    merged_from: list[Share] = Field(description="one of 2, of 3, and of 4 to 6")


class Likeness(Section):
    """How alike two dictionaries are; directions of features that are alive."""

    matched: float = Field(
        description="mean cosine of directions matched one to one; one without a match counts 0"
    )
    nearest: float = Field(description="mean of the largest cosines, both ways")
    share_70: Share = Field(description="matched at a cosine of 0.7 or more")
    share_90: Share = Field(description="matched at a cosine of 0.9 or more")
    features: Features | None = Field(description="null where too few rows are held out")


class PairResult(Section):
    """Two dictionaries; the first is one of the reference."""

    arm: str = Field(description="arm of the second")
    kind: PairKind
    seeds: tuple[int, int]
    likeness: Likeness


class Gap(Section):
    """How far an arm's dictionaries are from those of the arm whose rows these are, by seed."""

    value: float = Field(description="mean over seeds, on the same rows")
    low: float = Field(description="of the 95 % interval, over requests")
    high: float
    floor: float = Field(
        description="between the two seeds of the arm whose rows these are that are farthest apart"
    )
    p: float | None = Field(default=None, description="of no difference; null of raw rows")
    adjusted_p: float | None = Field(default=None, description="by Benjamini and Hochberg")
    outcome: Outcome | None = Field(default=None, description="null where it is only described")


class CrossValue(Section):
    """What dictionaries of one arm do to held-out rows of an arm."""

    trained_on: str = Field(description=f"arm, or {RAW}: the ceiling of a probe")
    rows_of: str
    rows: str = Field(description="all, a phase, a band of decode steps, or rare tokens")
    use: Use
    n_rows: int
    n_requests: int
    value: float | None = Field(description="mean over seeds; FVU of these rows' own variance")
    low: float | None = Field(default=None, description="of the 95 % interval, over requests")
    high: float | None = None
    seeds_low: float | None = Field(default=None, description="least of the seeds")
    seeds_high: float | None = Field(default=None, description="largest of the seeds")
    difference: Gap | None = Field(default=None, description="null at the arm's own rows")
    fvu_reference: float | None = Field(
        default=None, description="FVU of the variance of the reference's rows"
    )
    l0: float | None = Field(default=None, description="mean active features of a row")


class Comparison(Section):
    """An arm against a floor: one difference per seed."""

    arm: str
    floor: Floor
    measure: Measure
    of_arm: float = Field(description="mean over seeds, between the arm and the reference")
    of_floor: float = Field(description="mean over seeds, within the reference")
    differences: list[float] = Field(description="of arm and floor, by seed")
    n_below: int = Field(ge=0, description="seeds below 0")
    p: float | None = Field(default=None, description="two-sided sign test; null: too few seeds")
    adjusted_p: float | None = Field(default=None, description="by Benjamini and Hochberg")
    p_within: float | None = Field(
        default=None, description="one-sided sign test of differences above minus the limit"
    )
    outcome: Outcome | None = Field(default=None, description="null where it is only described")


class Verdict(Section):
    """What is found on an arm."""

    arm: str
    outcome: Outcome = Field(description="against another seed of the reference")
    against_order: Outcome = Field(description="against another order with the same start")
    sentence: str
    short: list[str] = Field(description="what is missing where it is undecided")


class Answer(Section):
    """Whether the harvest changes the dictionary more than a seed does, and which arms decide."""

    outcome: Outcome = Field(
        description="beyond the floor where an arm is, else undecided where one is, or where only "
        "the reference was given"
    )
    words: str = Field(description="the answer in a few words")
    arms: list[str] = Field(
        description="arms that end so, the farthest below the floor of another seed first"
    )
    largest: Comparison | None = Field(
        description="matched cosine of the first of them at another seed; null where only the "
        "reference was given"
    )
    within_and_changed: list[str] = Field(
        description="arms within the floor of another seed that are beyond that of another order"
    )
    uses: list[str] = Field(
        description="what dictionaries of other arms do to the rows of each, beside its own"
    )
    next_steps: list[str] = Field(description="what to do, the most pressing first")


class Rare(Section):
    """Which tokens are rare: the least frequent that make a tenth of the reference's rows."""

    most: int = Field(description="times that a rare token comes in the reference's rows at most")
    share: Share = Field(description="of the reference's rows")


class SteeredPair(Section):
    """Two matched features, and what their directions do to the next token of the same answers."""

    arm: str = Field(description="of the second dictionary; the first is the reference's")
    kind: PairKind
    features: tuple[int, int]
    cosine: float
    doses: list[float | None] = Field(
        default=[], description="of each, the strength of a dose of 1"
    )
    outcomes: list[Decayed] = Field(default=[], description="of the effects, where doses are known")
    ratios: list[Estimate | None] = Field(default=[], description="last step to the first")


class SteeredArm(Section):
    """What the pairs of an arm, or of a floor, come to."""

    arm: str
    kind: PairKind
    n: int
    cosine: float = Field(description="mean")
    n_doses: int = Field(description="pairs with two doses")
    ratio: float | None = Field(description="median of the second dose over the reference's")
    low: float | None = Field(description="of its 95 % interval over pairs; null of fewer than six")
    high: float | None
    n_decided: int = Field(description="pairs with two effects that hold, decay or reverse")
    agree: Share | None = Field(description="of these, where both do the same")


class FeatureSteering(Section):
    """Best matched features as steering vectors, on the reference's own answers."""

    steps: list[int] = Field(description="decode steps from which a vector is added")
    after: int = Field(description="steps later that its effect is read")
    n_requests: int
    arms: list[SteeredArm]
    pairs: list[SteeredPair]


class Stability(Document):
    """What the harvest changes in dictionaries that are trained on it, beside what chance does."""

    schema_: Literal["actds.stability/1"] = Field(default="actds.stability/1", alias="schema")
    limits: Limits
    hook: str
    label: str | None = Field(description="expression that probes should find, if any")
    d_model: int
    n_features: int
    n_rows: int = Field(description="rows of an arm")
    n_seen: int = Field(description="rows that each dictionary saw, repeats counted")
    scale: float = Field(description="rows of all arms are multiplied by this to train")
    n_threads: int = Field(description="of the arithmetic; another number may change last bits")
    chance: float = Field(description="mean cosine of random directions, matched")
    rare: Rare
    answer: Answer
    arms: list[ArmResult] = Field(description="the reference first")
    verdicts: list[Verdict]
    comparisons: list[Comparison]
    pairs: list[PairResult]
    cross: list[CrossValue]
    dictionaries: list[Trained]
    steering: FeatureSteering | None = None


# conclusions --------------------------------------------------------------------------------------

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

    alternative = "two-sided" if two_sided else "greater"
    return float(binomtest(n_below, n, alternative=alternative).pvalue) if n else 1.0


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
    from actds_validators.statistics.intervals import benjamini_hochberg

    by: dict[tuple[str, str], dict[int, Likeness]] = {}
    for pair in pairs:
        by.setdefault((pair.arm, pair.kind), {})[pair.seeds[0]] = pair.likeness
    comparisons = []
    for arm in dict.fromkeys(pair.arm for pair in pairs if pair.arm != reference):
        for floor in get_args(Floor):
            of_arm, of_floor = by[arm, _SAME.get(floor, floor)], by[reference, floor]
            for measure in get_args(Measure):
                values = [
                    (_value(of_arm[seed], measure), _value(of_floor[seed], measure))
                    for seed in sorted(of_arm)
                ]
                if all(value is not None for pair in values for value in pair):
                    comparisons.append(_comparison(arm, floor, measure, values, limits))
    for floor in get_args(Floor):
        tests = [n for n, c in enumerate(comparisons) if c.floor == floor and c.p is not None]
        adjusted = benjamini_hochberg([comparisons[n].p or 0.0 for n in tests])
        for n, p in zip(tests, adjusted.tolist(), strict=True):
            outcome = _outcome(comparisons[n], p, chance, limits)
            comparisons[n] = comparisons[n].model_copy(update={"adjusted_p": p, "outcome": outcome})
    return comparisons


_SAME = {"other order": "same start"}
"""What an arm is compared in beside a floor, where that is not what the floor is."""


def _value(likeness: Likeness, measure: Measure) -> float | None:
    of = likeness if hasattr(likeness, measure) else likeness.features
    return None if of is None else float(getattr(of, measure))


def _comparison(
    arm: str, floor: Floor, measure: Measure, values: Sequence[Any], limits: Limits
) -> Comparison:
    """Return a comparison of which it is not decided what it shows.

    Args:
        values: of the arm and of the floor, by seed.
    """
    import numpy as np

    of_arm, of_floor = np.array(values, np.float64).T
    differences = of_arm - of_floor
    n_below = int((differences < 0).sum())
    tested = measure == _TESTED and len(differences) >= MIN_SEEDS
    n_within = int((differences > -limits.margin).sum())
    return Comparison(
        arm=arm,
        floor=floor,
        measure=measure,
        of_arm=float(of_arm.mean()),
        of_floor=float(of_floor.mean()),
        differences=differences.tolist(),
        n_below=n_below,
        p=sign_test(n_below, int((differences != 0).sum())) if tested else None,
        p_within=sign_test(n_within, len(differences), two_sided=False) if tested else None,
        outcome="undecided" if measure == _TESTED else None,
    )


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
    by = {(c.arm, c.floor): c for c in comparisons if c.measure == _TESTED}
    arms = list(dict.fromkeys(comparison.arm for comparison in comparisons))
    verdicts = []
    for arm in arms:
        seed, order = by[arm, "other seed"], by[arm, "other order"]
        assert seed.outcome is not None and order.outcome is not None
        sentence = (
            f"{arm}: {_WORDS[seed.outcome]}. Matched cosine with {reference} {seed.of_arm:.3f} at "
            f"another seed, where two seeds of {reference} have {seed.of_floor:.3f} "
            f"({_below(seed)}); from the same start {order.of_arm:.3f}, where another order of the "
            f"same rows has {order.of_floor:.3f} ({_below(order)})."
        )
        short = [_short(comparison, len(arms), chance, limits) for comparison in (seed, order)]
        verdicts.append(
            Verdict(
                arm=arm,
                outcome=seed.outcome,
                against_order=order.outcome,
                sentence=sentence,
                short=[words for words in short if words],
            )
        )
    return verdicts


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


def judged_gaps(cross: Sequence[CrossValue], limits: Limits) -> list[CrossValue]:
    """Return the values with what their differences show; all tests are one family.

    One that is shown to be within the limit counts as none. Beyond the floor is one that is shown
    not to be 0 and is larger than what seeds differ by: requests and seeds both vary.
    """
    from actds_validators.statistics.intervals import benjamini_hochberg

    cross = list(cross)
    gaps = {
        n: v.difference for n, v in enumerate(cross) if v.difference and v.difference.p is not None
    }
    adjusted = benjamini_hochberg([gap.p or 0.0 for gap in gaps.values()]).tolist() if gaps else []
    for (n, gap), p in zip(gaps.items(), adjusted, strict=True):
        limit = limits.fvu if cross[n].use == FVU else limits.auc
        outcome: Outcome = "undecided"
        if -limit < gap.low and gap.high < limit:
            outcome = "within the floor"
        elif p <= limits.fdr and abs(gap.value) > gap.floor and limits.seeds >= MIN_SEEDS:
            outcome = "beyond the floor"
        gap = gap.model_copy(update={"adjusted_p": p, "outcome": outcome})
        cross[n] = cross[n].model_copy(update={"difference": gap})
    return cross


def uses(cross: Sequence[CrossValue]) -> list[str]:
    """Return a sentence on each use of dictionaries on the rows of each arm.

    It is about the rows where a difference that is beyond the floor is largest, else about all.
    """
    sentences = []
    for rows_of, use in dict.fromkeys((v.rows_of, v.use) for v in cross):
        of_use = [v for v in cross if (v.rows_of, v.use) == (rows_of, use)]
        gaps = [(v, v.difference) for v in of_use if v.difference is not None]
        beyond = [(v, gap) for v, gap in gaps if gap.outcome == "beyond the floor"]
        where = max(beyond, key=lambda pair: abs(pair[1].value))[0].rows if beyond else "all"
        by = {v.trained_on: v.value for v in of_use if v.rows == where}
        some = {v.trained_on: gap for v, gap in gaps if v.rows == where and gap.outcome}
        if some and by[rows_of] is not None:
            ceiling = "" if by.get(RAW) is None else f" ({by[RAW]:.3f} of {RAW})"
            parts = [_gap_words(name, gap, some) for name, gap in some.items()]
            more = [f"{len(parts) - 4} others"] if parts[5:] else parts[4:]
            sentences.append(
                f"{use} on held-out rows of {rows_of}, {where}: {by[rows_of]:.3f} by its own "
                f"dictionaries{ceiling}; {'; '.join([*parts[:4], *more])}."
            )
    return sentences


def _gap_words(name: str, gap: Gap, some: Mapping[str, Gap]) -> str:
    """Return a difference in words: it lies between where it is shown to be smaller than another.

    Args:
        some: all of these rows, by arm.
    """
    words = f"by those of {name} {gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
    farther = [
        other
        for other, far in some.items()
        if far.outcome == gap.outcome == "beyond the floor"
        and (gap.high < far.low if gap.value > 0 else far.high < gap.low)
        and gap.value * far.value > 0
    ]
    if farther:
        return f"{words}, between these and {farther[0]}"
    if gap.outcome == "beyond the floor":
        return f"{words}, beyond the floor of {gap.floor:.3f}"
    return f"{words}, {'no difference' if gap.outcome == 'within the floor' else gap.outcome}"


def answer(
    judged: Sequence[Verdict],
    comparisons: Sequence[Comparison],
    reference: str,
    n_seeds: int,
    cross: Sequence[CrossValue] = (),
) -> Answer:
    """Return what the verdicts say together, which arms decide it, and what to do.

    Args:
        judged: a verdict per arm; empty where only the reference was given.
        cross: with what their differences show.
    """
    outcomes = {verdict.arm: verdict.outcome for verdict in judged}
    outcome: Outcome = next((o for o in _ORDER if o in outcomes.values()), "undecided")
    deciding = [
        comparison
        for comparison in comparisons
        if (comparison.floor, comparison.measure) == ("other seed", _TESTED)
        and outcomes.get(comparison.arm) == outcome
    ]
    deciding.sort(key=lambda comparison: comparison.of_arm - comparison.of_floor)
    arms = [comparison.arm for comparison in deciding]
    changed = [
        verdict.arm
        for verdict in judged
        if verdict.outcome == "within the floor" and verdict.against_order == "beyond the floor"
    ]
    steps = []
    if outcome == "beyond the floor":
        steps.append(
            f"Say which harvest a dictionary was trained on: one of {_listed(arms)} is not one of "
            f"{reference} of another seed. Train on rows of the regime that you use it in."
        )
    if changed:
        steps.append(
            f"Rows of {_listed(changed)} do change the dictionary, by less than another seed does: "
            "read nothing into single features."
        )
    return Answer(
        outcome=outcome,
        words=_words(outcome, arms, len(judged), n_seeds),
        arms=arms,
        largest=deciding[0] if deciding else None,
        within_and_changed=changed,
        uses=uses(cross),
        next_steps=[*steps, *_lacking(judged, n_seeds)],
    )


def _words(outcome: Outcome, arms: Sequence[str], n_arms: int, n_seeds: int) -> str:
    if not arms:
        return f"Nothing to compare: one arm, {counted(n_seeds, 'seed')} described"
    who = f"{len(arms)} of {n_arms} arms change" if arms[1:] else f"{arms[0]} changes"
    before = {"beyond the floor": "Yes:", "within the floor": "No:"}.get(
        outcome, "Undecided whether"
    )
    more = "no more" if outcome == "within the floor" else "more"
    return f"{before} {who} the dictionary {more} than another seed does"


def _lacking(judged: Sequence[Verdict], n_seeds: int) -> Iterator[str]:
    lacks: dict[str, list[str]] = {}  # what is short, and of which arms
    for verdict in judged:
        for words in verdict.short:
            lacks.setdefault(words.partition(": ")[2] or words, []).append(verdict.arm)
    yield from (f"{_listed(list(dict.fromkeys(of)))}: {what}." for what, of in lacks.items())
    if judged:
        yield "Look at what each dictionary does to the other rows, step by step of decode."
    else:
        few = f", and --seeds {MIN_SEEDS} at least" if n_seeds < MIN_SEEDS else ""
        yield f"Name a second arm{few}: a test needs both."


def _listed(names: list[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" or {more} others" if more > 0 else "")
