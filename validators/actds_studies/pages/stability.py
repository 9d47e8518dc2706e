"""The page of stability: verdicts first, likenesses beside their floors, every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actds.text import counted
from actds_studies.stability.result import (
    AUROC_MAXIMUM,
    AUROC_MEAN,
    FVU,
    RAW,
    ArmResult,
    Comparison,
    CrossValue,
    Features,
    FeatureSteering,
    Likeness,
    Measure,
    Outcome,
    Stability,
    SteeredArm,
    Trained,
    Use,
    Verdict,
)
from actds_validators.audit.place import Level
from actds_validators.pages.answer import AnswerPage, Part, by_arm, harvested, models
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend
from actds_validators.pages.words import (
    LOOKS,
    Columns,
    Fact,
    Look,
    Table,
    count,
    or_dash,
    p_value,
    percent,
    table_of,
)

LEVELS: dict[Outcome, Level] = {
    "within the floor": "PASS",
    "beyond the floor": "WARN",
    "undecided": "INCONCLUSIVE",
}
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
_PAIRS = ("other seed", "other order", "same start")
FATES: tuple[Measure, ...] = ("kept", "split", "merged", "gone")
_MAX_LINES, _MAX_CROSS = 26, 120


def page(result: Stability, command: str) -> AnswerPage:
    """Return what the page says; ``command`` made it, as it was typed."""
    return AnswerPage(
        subject="stability",
        question="Does the harvest change the dictionary more than another random start of its "
        "training (another seed) does?",
        level=LEVELS[result.answer.outcome],
        answer=result.answer.words,
        boxes=facts(result),
        introduction=words_of_art(result),
        next_steps=result.answer.next_steps,
        facts=provenance(result, command),
        sections=[
            *([_verdicts(result)] if result.verdicts else []),
            _alike(result),
            *([_floors(result)] if result.comparisons else []),
            _cross(result),
            *([_probes(result)] if result.label else []),
            *([_steered(result.steering)] if result.steering else []),
            _compared(result),
            _how(result),
        ],
        verdicts=[(LEVELS[verdict.outcome], verdict.sentence) for verdict in result.verdicts],
        on_terminal=("alike", "cross", "steered", "compared"),
    )


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
    reference, largest = result.arms[0].name, result.answer.largest
    scale = f"1 is the same dictionary, {result.chance:.3f} is chance"
    what = "matched cosine, the mean cosine of decoder directions paired one to one"
    by = {(mean.name, mean.kind): mean for mean in means(result)}
    floor = by[reference, "other seed"]
    if largest is None:
        kept = _kept(f"Features of {reference} kept at another seed", floor.features)
        title = f"Likeness of two seeds of {reference}"
        return [Fact(title, f"{floor.matched:.3f}", f"{what}: {scale}"), kept]
    distance = f"{largest.of_arm - largest.of_floor:+.3f}"
    side = f"{distance[1:]} {'below' if distance[0] == '-' else 'above'}"
    side = "equal to" if distance[1:] == "0.000" else side
    note = (
        f"{what}, at another seed: {scale}. It is {side} "
        f"that of two seeds of {reference}, {largest.of_floor:.3f} (lower in {largest.n_below} of "
        f"{counted(len(largest.differences), 'seed')}); lower is less alike"
    )
    of_arm = by[largest.arm, "other seed"].features
    title = f"Features of {reference} kept in {largest.arm}"
    kept = _kept(title, of_arm, floor.features, reference)
    start, order = by[largest.arm, "same start"].features, by[reference, "other order"].features
    if start is not None and order is not None:
        more = f"from the same start {percent(start.kept)} are kept"
        more += f" (of two dictionaries of {reference} {percent(order.kept)})"
        kept = replace(kept, note=f"{kept.note}; {more}")
    return [Fact(f"Likeness of {largest.arm} to {reference}", f"{largest.of_arm:.3f}", note), kept]


def _kept(
    title: str, features: Features | None, floor: Features | None = None, reference: str = ""
) -> Fact:
    if features is None:
        return Fact(title, "not known", "too few held-out rows", is_known=False)

    def also(name: str) -> str:
        return "" if floor is None else f" ({percent(getattr(floor, name))})"

    note = "one feature of the other dictionary explains 70 % of the variance of each"
    note += "" if floor is None else f"; in brackets two seeds of {reference}"
    kept, *shares = (f"{percent(getattr(features, name))}{also(name)}" for name in FATES)
    named = [f"{name} {share}" for name, share in zip(FATES[1:], shares, strict=True)]
    return Fact(title, kept, f"{note}. {', '.join(named).capitalize()}")


@dataclass(frozen=True)
class Means:
    """How alike dictionaries of a kind of pair are, mean over seeds.

    Args:
        name: arm of the second dictionary; the first is one of the reference.
        kind: what the two differ in, beside their rows.
        features: what became of the reference's features; None where too few rows are held out.
    """

    name: str
    kind: str
    is_floor: bool
    matched: float
    features: Features | None

    @property
    def pair(self) -> str:
        return f"{self.kind} (floor)" if self.is_floor else self.kind

    @property
    def words(self) -> str:
        return f"{self.name}, {self.pair}"


def means(result: Stability) -> list[Means]:
    """Return the means of every kind of pair, each floor before the arms that it is for."""
    of_kind: dict[tuple[str, str], list[Likeness]] = {}
    for pair in sorted(result.pairs, key=lambda p: _PAIRS.index(p.kind)):
        of_kind.setdefault((pair.arm, pair.kind), []).append(pair.likeness)
    means = []
    for (name, kind), of in of_kind.items():
        features = [fit.features for fit in of if fit.features is not None]
        matched, is_floor = mean_of([fit.matched for fit in of]), name == result.arms[0].name
        means.append(Means(name, kind, is_floor, matched, _mean(features) if features else None))
    return means


def _mean(of: Sequence[Features]) -> Features:
    columns = {name: [getattr(features, name) for features in of] for name in Features.model_fields}
    lists = {name: zip(*columns.pop(name), strict=True) for name in ("split_into", "merged_from")}
    numbers: dict[str, Any] = {name: mean_of(values) for name, values in columns.items()}
    numbers |= {name: list(map(mean_of, shares)) for name, shares in lists.items()}
    return Features(**numbers | {"n": round(numbers["n"])})


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def provenance(result: Stability, command: str) -> list[tuple[str, str]]:
    """Return what was compared: arms, model, hook, rows, harvest, training, command."""
    arms, limits = result.arms, result.limits
    passes = "1 pass" if limits.epochs == 1 else f"{count(limits.epochs)} passes"
    alive = mean_of([dictionary.n_alive for dictionary in result.dictionaries]) / result.n_features
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


def value(measure: Measure, number: float) -> str:
    """Return a value of a measure: a cosine, or a share in per cent."""
    return f"{number:.3f}" if measure in _COSINES else percent(number)


def against(comparison: Comparison) -> str:
    """Return the mean difference of an arm and its floor, of shares in percentage points."""
    mean = mean_of(comparison.differences)
    return f"{mean:+.3f}" if comparison.measure in _COSINES else f"{100 * mean:+.3g} points"


_VERDICTS: Columns[Verdict] = (
    ("arm", lambda row: row.arm),
    ("another order", lambda row: row.against_order),
    ("another seed", lambda row: f"{_look(row).mark} {row.outcome}"),
)


def _look(verdict: Verdict) -> Look:
    return LOOKS[LEVELS[verdict.outcome]]


def _verdicts(result: Stability) -> Part:
    tables = table_of(
        "Every arm beside the reference",
        _VERDICTS,
        result.verdicts,
        frozenset(range(3)),
        tone=lambda row: _look(row).tone,
        note=lambda row: row.sentence,
        narrow=True,
    )
    notes = [f"{verdict.arm}, {words}." for verdict in result.verdicts for words in verdict.short]
    lead = (
        "An arm is within a floor when its dictionaries are shown to be as alike to the "
        "reference's as the reference's are to one another, beyond it when they are shown to be "
        "less alike, and else undecided."
    )
    return Part("verdicts", "Verdicts", lead, tables, notes)


_FLOORS: Columns[Comparison] = (
    ("arm", lambda row: row.arm),
    ("floor", lambda row: row.floor),
    ("measure", lambda row: MEASURES[row.measure]),
    ("of the arm", lambda row: value(row.measure, row.of_arm)),
    ("of the floor", lambda row: value(row.measure, row.of_floor)),
    ("difference", against),
    ("seeds below", lambda row: f"{row.n_below} of {len(row.differences)}"),
    ("adjusted p", lambda row: or_dash(row.adjusted_p, p_value)),
)


def _floors(result: Stability) -> Part:
    lead = (
        "How alike dictionaries are, beside how alike those of the reference are to one another: "
        "of another seed, and of the same start in another order of its rows."
    )
    tables = table_of("Arms against floors", _FLOORS, result.comparisons, frozenset({0, 1, 2}))
    return Part("floors", "Against the floors", lead, tables)


def _of(say: Callable[[Features], str]) -> Callable[[Means], str]:
    return lambda row: or_dash(row.features, say)


_MEANS: Columns[Means] = (
    ("second dictionary", lambda row: row.name),
    ("pair", lambda row: row.pair),
    ("matched cosine", lambda row: f"{row.matched:.3f}"),
    ("kept", _of(lambda of: percent(of.kept))),
    ("split", _of(lambda of: percent(of.split))),
    ("into 2, 3, more", _of(lambda of: _each(of.split_into))),
    ("merged", _of(lambda of: percent(of.merged))),
    ("from 2, 3, more", _of(lambda of: _each(of.merged_from))),
    ("gone", _of(lambda of: percent(of.gone))),
    ("features", _of(lambda of: count(of.n))),
)
_KINDS = dict(zip(FATES, ("stored", "reused", "all", "filtered"), strict=True))


def _each(shares: list[float]) -> str:
    return ", ".join(percent(share).removesuffix(" %") for share in shares) + " %"


def _alike(result: Stability) -> Part:
    pairs = means(result)
    lead = (
        f"Each dictionary is compared with one of {result.arms[0].name}, mean over seeds. A "
        "feature is kept when one feature of the second dictionary explains 70 % of the variance "
        "of its activations over held-out rows; split when several together do, each of which "
        "explains 10 % or more; merged when it is one of those into which a feature of the second "
        "is split; and gone when it is none of these. Compare an arm with its floor: only the "
        "difference comes from the harvest."
    )
    tables = table_of("Means of each pair", _MEANS, pairs, frozenset({0, 1}))
    pictures = [_likenesses(result, pairs), *_bars(pairs)]
    return Part("alike", "How alike the dictionaries are", lead, tables, pictures=pictures)


def _likenesses(result: Stability, means: Sequence[Means]) -> Picture:
    shown = means[:_MAX_LINES]
    f = Frame(230, 44, 580, 26.0 * len(shown), (0.0, 1.0), (0.0, 1.0))
    p = Picture(
        "likenesses",
        "Matched cosine of dictionaries",
        "A dot per seed: how alike a dictionary of each arm is to the reference's, at another seed "
        "and from the same start, below the reference's own floors; dashed is what random "
        "directions have. Further right is more alike.",
        WIDTH,
        f.bottom + 50,
        FigureData(("arm", "pair", "seed", "other seed", "matched cosine", "random directions")),
    )
    legend(p, f.left, 20, [("floor", "floor, of the reference"), ("stored", "of an arm")])
    axes(p, f, "matched cosine", "", y_marks=())
    p.line(f.x(result.chance), f.top, f.x(result.chance), f.bottom, "limit")
    for n, arm in enumerate(shown):
        y = f.top + 26.0 * n + 13
        p.label(f.left - 8, y + 4, arm.words, 210)
        mark = "floor mark" if arm.is_floor else "stored-mark mark"
        for pair in result.pairs:
            if (pair.arm, pair.kind) == (arm.name, arm.kind):
                cosine = pair.likeness.matched
                p.data.rows.append((arm.name, arm.kind, *pair.seeds, cosine, result.chance))
                p.dot(f.x(cosine), y, mark, f"seeds {pair.seeds[0]}, {pair.seeds[1]}: {cosine:.3f}")
    return p


def _bars(means: Sequence[Means]) -> list[Picture]:
    """Return what became of features as one bar per kind of pair; nothing where it is not known."""
    shown = [(mean, mean.features) for mean in means if mean.features is not None][:_MAX_LINES]
    if not shown:
        return []
    f = Frame(230, 44, 560, 26.0 * len(shown), (0.0, 1.0), (0.0, 1.0))
    p = Picture(
        "features",
        "Features kept, split, merged and gone",
        "A bar for each kind of pair, arms below their floors: shares of the reference's features, "
        "with the share that is kept at the right.",
        WIDTH,
        f.bottom + 50,
        FigureData(
            ("arm", "pair", *FATES),
            [(mean.name, mean.kind, *(getattr(of, name) for name in FATES)) for mean, of in shown],
        ),
    )
    legend(p, f.left, 20, [(kind, name) for name, kind in _KINDS.items()])
    axes(p, f, "share of the features", "", x_text=percent, y_marks=())
    for n, (mean, of) in enumerate(shown):
        y, start = f.top + 26.0 * n, 0.0
        p.label(f.left - 8, y + 17, mean.words, 210)
        for name, kind in _KINDS.items():
            share = getattr(of, name)
            left, right = f.x(start), f.x(start + share)
            p.box(left, y + 4, right - left, 18, kind, f"{mean.words}: {name} {percent(share)}")
            start += share
        p.text(f.right + 8, y + 17, percent(of.kept))
    return [p]


_CROSS: Columns[CrossValue] = (
    ("trained on", lambda row: row.trained_on),
    ("rows of", lambda row: row.rows_of),
    ("which", lambda row: row.rows),
    ("rows", lambda row: count(row.n_rows)),
    ("value", lambda row: or_dash(row.value, lambda v: f"{v:.3f}")),
    ("95 % interval", lambda row: _range(row.low, row.high)),
    ("seeds", lambda row: _range(row.seeds_low, row.seeds_high)),
    ("beside its own", lambda row: or_dash(row.difference, lambda gap: f"{gap.value:+.3f}")),
    ("interval", lambda row: or_dash(row.difference, lambda gap: _range(gap.low, gap.high))),
    ("floor", lambda row: or_dash(row.difference, lambda gap: f"{gap.floor:.3f}")),
    ("is", lambda row: or_dash(row.difference and row.difference.outcome, str)),
    ("of the reference's variance", lambda row: or_dash(row.fvu_reference, lambda v: f"{v:.3f}")),
)


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _cross(result: Stability) -> Part:
    lead = (
        "Fraction of variance unexplained (FVU) of held-out rows, mean over seeds, with the "
        "interval over requests and the range over seeds. Beside its own: less the value of the "
        "dictionaries of the arm whose rows these are; the floor is by how much two seeds of "
        "these differ at most. Rare tokens come at most "
        f"{counted(result.rare.most, 'time')} in the reference's rows: "
        f"{percent(result.rare.share)} of them."
    )
    notes = result.answer.uses
    return Part("cross", "What dictionaries are used for", lead, _used(result, FVU), notes)


def _probes(result: Stability) -> Part:
    lead = (
        f"Area under the ROC curve (AUROC) for {result.label}, by request: a ridge regression on "
        "the features of rows of training requests of the arm whose rows these are, and the "
        "maximum or the mean of its scores over the rows of each held-out request. "
        f"{RAW.capitalize()}: the same probe on the rows themselves."
    )
    tables = [*_used(result, AUROC_MAXIMUM), *_used(result, AUROC_MEAN)]
    return Part("probes", "Probes through the features", lead, tables)


def _used(result: Stability, use: Use) -> list[Table]:
    caption = f"{use}, dictionaries of each arm on rows of each arm"
    columns = _CROSS if use == FVU else _CROSS[:-1]
    values = [value for value in result.cross if value.use == use]
    return table_of(caption, columns, values, frozenset({0, 1, 2}), room=_MAX_CROSS)


_STEERED: Columns[SteeredArm] = (
    ("second dictionary", lambda row: row.arm),
    ("pair", lambda row: row.kind),
    ("pairs", lambda row: count(row.n)),
    ("cosine", lambda row: f"{row.cosine:.3f}"),
    ("dose to the reference's", lambda row: or_dash(row.ratio, lambda v: f"{v:.3f}")),
    ("95 % interval", lambda row: _range(row.low, row.high)),
    ("with two doses", lambda row: count(row.n_doses)),
    ("same decay", lambda row: or_dash(row.agree, percent)),
    ("of pairs decided", lambda row: count(row.n_decided)),
)


def _steered(of: FeatureSteering) -> Part:
    lead = (
        "The features that are matched best as steering vectors, on the same tokens: the answers "
        f"of {of.n_requests} requests of the reference. A dose is the strength at which the next "
        "token diverges by so many nats, as of actds steer; its ratio is the median over pairs. A "
        f"vector is added from a step on ({of.steps[0]} to {of.steps[-1]}), and its effect read "
        f"{of.after} steps later: the decay is the same where both features hold, decay or "
        "reverse. The pair of another order is the floor."
    )
    table = table_of("Steering by matched features", _STEERED, of.arms, frozenset({0, 1}))
    return Part("steered", "Steering by matched features", lead, table)


_ARMS: Columns[ArmResult] = (
    ("arm", lambda row: row.name),
    ("rows", lambda row: count(row.n_rows)),
    ("of", lambda row: count(row.n_there)),
    ("prefill", lambda row: count(row.shares["prefill"])),
    ("decode", lambda row: count(row.shares["decode"])),
    ("the reference's", lambda row: count(row.n_common)),
    ("sinks", lambda row: count(row.n_sinks)),
    ("held out", lambda row: count(row.n_scored)),
    ("requests", lambda row: count(row.n_requests)),
)
_TRAINED: Columns[Trained] = (
    ("arm", lambda row: row.arm),
    ("seed", lambda row: str(row.seed)),
    ("order", lambda row: str(row.order)),
    ("FVU, last batches", lambda row: f"{row.fvu:.3f}"),
    ("alive", lambda row: count(row.n_alive)),
    ("sha256", lambda row: row.sha256[:16]),
)


def _compared(result: Stability) -> Part:
    tables = table_of("Rows of each arm", _ARMS, result.arms, note=lambda row: row.words)
    tables += table_of("Dictionaries", _TRAINED, result.dictionaries, frozenset({0, 5}))
    lead = "The rows, and what was trained."
    return Part("compared", "What was compared", lead, tables)


def _how(result: Stability) -> Part:
    notes = [
        "All dictionaries see equally many rows. Initial weights follow from the seed alone; rows "
        f"of all arms are multiplied by {result.scale:.4g}, and the decoder's bias starts at the "
        "mean of the reference's rows.",
        "The order follows from what a row is (its request and position) and the seed: rows that "
        "two arms share come in the same order in both.",
        "Directions are matched one to one so that their cosines add up to most. Features that "
        "were never active in the last pass are left out, and one without a match counts 0. "
        f"Random directions of this many features have {result.chance:.3f}.",
        "A sign test over K seeds has 2^K outcomes: fewer than 6 seeds describe, they do not test. "
        "The tests of all arms against one floor are a family (Benjamini and Hochberg).",
        "A verdict is about this trainer, these settings, these requests and this model.",
    ]
    lead = "What the numbers are, and what they are not."
    return Part("how", "How to read this", lead, [], notes)
