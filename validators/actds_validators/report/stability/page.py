"""The page of stability: verdicts first, likenesses beside their floors, every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actds.text import counted
from actds.version import __version__
from actds_validators.report.figure_data import FigureData
from actds_validators.report.markup import render_page
from actds_validators.report.stability import said
from actds_validators.report.svg import WIDTH, Frame, Picture, axes, legend
from actds_validators.report.words import (
    Columns,
    Part,
    Row,
    Sentence,
    Table,
    Tone,
    count,
    or_dash,
    p_value,
    percent,
    table_of,
)
from actds_validators.stability.result import (
    ArmResult,
    Comparison,
    CrossValue,
    Features,
    Outcome,
    Stability,
    Trained,
)

__all__ = ["render"]

_TONES: dict[Outcome, Tone] = {
    "beyond the floor": "warn",
    "within the floor": "good",
    "undecided": "dim",
}
_MAX_LINES, _MAX_CROSS = 26, 120


@dataclass(frozen=True)
class Section:
    """A section of the page with its charts."""

    part: Part
    pictures: list[Picture] = field(default_factory=list)


def render(result: Stability, command: str) -> str:
    """Return the page: HTML in UTF-8, self-contained and without script.

    Args:
        result: the comparison.
        command: that made it, as it was typed.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    return render_page(
        "answer.html.j2",
        actds=__version__,
        subject="stability",
        question="Does the harvest change the dictionary more than another random start of its "
        "training (another seed) does?",
        level=said.level(result),
        mark=said.MARKS[said.outcome(result)],
        answer=said.answer(result),
        boxes=said.facts(result),
        split=[Sentence(said.words_of_art(result))],
        next_steps=[Sentence(step) for step in said.next_steps(result)[:12]],
        facts=[(name, Sentence(words)) for name, words in said.provenance(result, command)],
        sections=_sections(result),
    )


def _sections(result: Stability) -> list[Section]:
    found = [Section(_verdicts(result))] if result.verdicts else []
    found.append(_alike(result))
    found += [Section(_floors(result))] if result.comparisons else []
    return [*found, *map(Section, (_cross(result), _compared(result), _how(result)))]


def _verdicts(result: Stability) -> Part:
    rows = [
        Row(
            (one.arm, one.against_order, f"{said.MARKS[one.outcome]} {one.outcome}"),
            _TONES[one.outcome],
            one.sentence,
        )
        for one in result.verdicts
    ]
    table = Table("Every arm beside the reference", ("arm", "another order", "another seed"), rows,
                  frozenset(range(3)), narrow=True)  # fmt: skip
    notes = [Sentence(f"{one.arm}, {words}.") for one in result.verdicts for words in one.short]
    lead = (
        "An arm is within a floor when its dictionaries are shown to be as alike to the "
        "reference's as the reference's are to one another, beyond it when they are shown to be "
        "less alike, and else undecided."
    )
    return Part("verdicts", "Verdicts", Sentence(lead), [table], notes)


_FLOORS: Columns[Comparison] = (
    ("arm", lambda one: one.arm),
    ("floor", lambda one: one.floor),
    ("measure", lambda one: said.MEASURES[one.measure]),
    ("of the arm", lambda one: said.value(one.measure, one.of_arm)),
    ("of the floor", lambda one: said.value(one.measure, one.of_floor)),
    ("difference", said.against),
    ("seeds below", lambda one: f"{one.n_below} of {len(one.differences)}"),
    ("adjusted p", lambda one: or_dash(one.adjusted_p, p_value)),
)


def _floors(result: Stability) -> Part:
    lead = (
        "How alike dictionaries are, beside how alike those of the reference are to one another: "
        "of another seed, and of the same start in another order of its rows."
    )
    tables = table_of("Arms against floors", _FLOORS, result.comparisons, frozenset({0, 1, 2}))
    return Part("floors", "Against the floors", Sentence(lead), tables)


def _of(say: Callable[[Features], str]) -> Callable[[said.Means], str]:
    return lambda one: or_dash(one.features, say)


_MEANS: Columns[said.Means] = (
    ("second dictionary", lambda one: one.name),
    ("pair", lambda one: one.pair),
    ("matched cosine", lambda one: f"{one.matched:.3f}"),
    ("kept", _of(lambda of: percent(of.kept))),
    ("split", _of(lambda of: percent(of.split))),
    ("into 2, 3, more", _of(lambda of: _each(of.split_into))),
    ("merged", _of(lambda of: percent(of.merged))),
    ("from 2, 3, more", _of(lambda of: _each(of.merged_from))),
    ("gone", _of(lambda of: percent(of.gone))),
    ("features", _of(lambda of: count(of.n))),
)
_KINDS = dict(zip(said.FATES, ("stored", "reused", "all", "filtered"), strict=True))


def _each(shares: list[float]) -> str:
    return ", ".join(percent(share).removesuffix(" %") for share in shares) + " %"


def _alike(result: Stability) -> Section:
    """Return the means of every kind of pair, each arm below its floor."""
    means = said.means(result)
    lead = (
        f"Each dictionary is compared with one of {result.arms[0].name}, mean over seeds. A "
        "feature is kept when one feature of the second dictionary explains 70 % of the variance "
        "of its activations over held-out rows; split when several together do, each of which "
        "explains 10 % or more; merged when it is one of those into which a feature of the second "
        "is split; and gone when it is none of these. Compare an arm with its floor: only the "
        "difference comes from the harvest."
    )
    tables = table_of("Means of each pair", _MEANS, means, frozenset({0, 1}))
    part = Part("alike", "How alike the dictionaries are", Sentence(lead), tables)
    return Section(part, [_likenesses(result, means), *_bars(means)])


def _likenesses(result: Stability, means: Sequence[said.Means]) -> Picture:
    """Return the matched cosine of every pair, a line per arm and kind, a dot per seed."""
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
    for n, one in enumerate(shown):
        y = f.top + 26.0 * n + 13
        p.label(f.left - 8, y + 4, one.words, 210)
        mark = "floor mark" if one.is_floor else "stored-mark mark"
        for pair in result.pairs:
            if (pair.arm, pair.kind) == (one.name, one.kind):
                cosine = pair.likeness.matched
                p.data.rows.append((one.name, one.kind, *pair.seeds, cosine, result.chance))
                p.dot(f.x(cosine), y, mark, f"seeds {pair.seeds[0]}, {pair.seeds[1]}: {cosine:.3f}")
    return p


def _bars(means: Sequence[said.Means]) -> list[Picture]:
    """Return what became of features as one bar per kind of pair; nothing where it is not known."""
    shown = [(one, one.features) for one in means if one.features is not None][:_MAX_LINES]
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
            ("arm", "pair", *said.FATES),
            [
                (one.name, one.kind, *(getattr(of, name) for name in said.FATES))
                for one, of in shown
            ],
        ),
    )
    legend(p, f.left, 20, [(kind, name) for name, kind in _KINDS.items()])
    axes(p, f, "share of the features", "", x_text=percent, y_marks=())
    for n, (one, of) in enumerate(shown):
        y, start = f.top + 26.0 * n, 0.0
        p.label(f.left - 8, y + 17, one.words, 210)
        for name, kind in _KINDS.items():
            share = getattr(of, name)
            left, right = f.x(start), f.x(start + share)
            p.box(left, y + 4, right - left, 18, kind, f"{one.words}: {name} {percent(share)}")
            start += share
        p.text(f.right + 8, y + 17, percent(of.kept))
    return [p]


_CROSS: Columns[CrossValue] = (
    ("trained on", lambda one: one.trained_on),
    ("rows of", lambda one: one.rows_of),
    ("which", lambda one: one.rows),
    ("rows", lambda one: count(one.n_rows)),
    ("FVU", lambda one: or_dash(one.fvu, lambda v: f"{v:.3f}")),
    ("95 % interval", lambda one: _range(one.low, one.high)),
    ("seeds", lambda one: _range(one.seeds_low, one.seeds_high)),
    ("of the reference's variance", lambda one: or_dash(one.fvu_reference, lambda v: f"{v:.3f}")),
)


def _range(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _cross(result: Stability) -> Part:
    lead = (
        "Fraction of variance unexplained (FVU) of held-out rows, mean over seeds, with the "
        "interval over requests and the range over seeds. Rare tokens come at most "
        f"{counted(result.rare.most, 'time')} in the reference's rows: "
        f"{percent(result.rare.share)} of them."
    )
    tables = table_of("Dictionaries of each arm on rows of each arm", _CROSS, result.cross,
                      frozenset({0, 1, 2}), room=_MAX_CROSS)  # fmt: skip
    return Part("cross", "Cross-reconstruction", Sentence(lead), tables)


_ARMS: Columns[ArmResult] = (
    ("arm", lambda one: one.name),
    ("rows", lambda one: count(one.n_rows)),
    ("of", lambda one: count(one.n_there)),
    ("prefill", lambda one: count(one.shares["prefill"])),
    ("decode", lambda one: count(one.shares["decode"])),
    ("the reference's", lambda one: count(one.n_common)),
    ("sinks", lambda one: count(one.n_sinks)),
    ("held out", lambda one: count(one.n_scored)),
    ("requests", lambda one: count(one.n_requests)),
)
_TRAINED: Columns[Trained] = (
    ("arm", lambda one: one.arm),
    ("seed", lambda one: str(one.seed)),
    ("order", lambda one: str(one.order)),
    ("FVU, last batches", lambda one: f"{one.fvu:.3f}"),
    ("alive", lambda one: count(one.n_alive)),
    ("sha256", lambda one: one.sha256[:16]),
)


def _compared(result: Stability) -> Part:
    tables = table_of("Rows of each arm", _ARMS, result.arms, note=lambda one: one.words)
    tables += table_of("Dictionaries", _TRAINED, result.dictionaries, frozenset({0, 5}))
    return Part(
        "compared", "What was compared", Sentence("The rows, and what was trained."), tables
    )


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
    return Part("how", "How to read this", Sentence("What the numbers are, and what they are not."),
                [], [Sentence(words) for words in notes])  # fmt: skip
