"""The page of a steering study: the decay of each way beside its floor, the dose, the controls."""

from __future__ import annotations

from actds_studies.steer.result import (
    WAYS,
    ActedArm,
    Components,
    Decay,
    Effect,
    SteeredStratum,
    Steering,
    Survival,
)
from actds_validators.audit.place import Level
from actds_validators.audit.result import Estimate
from actds_validators.pages.answer import AnswerPage, Part, head_facts
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, span
from actds_validators.pages.words import (
    Columns,
    Fact,
    count,
    or_dash,
    percent,
    short,
    table_of,
)

_LEVELS: dict[str, Level] = {
    "holds": "PASS",
    "decays": "WARN",
    "reverses": "FAIL",
    "undecided": "INCONCLUSIVE",
}
_LOOKS = {
    "vector": ("stored-mark mark", "stored-line"),
    "negative": ("lost-mark mark", "lost-line"),
    "random": ("reused-mark mark", "reused-line"),
}


def page(result: Steering, command: str) -> AnswerPage:
    """Return what the page says; ``command`` made it, as it was typed."""
    outcomes = list(result.answer.by_way.values())
    level = max((_LEVELS[o] for o in outcomes), key=list(_LEVELS.values()).index)
    return AnswerPage(
        subject="steering",
        question="Does the vector still work later in an answer?",
        level=level,
        answer=result.answer.words,
        boxes=_boxes(result),
        introduction="The dataset's own answers were served again, plain and with a vector added "
        f"to {result.hook}: at one step and read there (pulse), or later (kept), and from a step "
        "on (held). The effect is the divergence of the next token from the plain one's.",
        next_steps=result.answer.next_steps or ["Nothing is missing."],
        facts=_facts(result, command),
        sections=[
            _decays(result),
            *_components(result.components),
            *_survival(result.survival),
            _effects(result),
            _strata(result),
        ],
        verdicts=[
            (_LEVELS[outcome], f"{way}, {WAYS[way]}: {outcome}")
            for way, outcome in result.answer.by_way.items()
        ],
        on_terminal=("components", "survival", "effects"),
    )


def _boxes(result: Steering) -> list[Fact]:
    dose = result.dose
    note = f"added at a dose of 1, {percent(dose.strength / dose.median_norm)} of the median row; "
    note += f"{result.limits.nats:g} nats at the {percent(result.limits.quantile)} quantile"
    floor = or_dash(result.floor, lambda f: f"{f.value:.2g} nats")
    return [
        Fact("Dose", short(dose.strength), note),
        Fact("Floor", floor, "divergence of a vector of zeros: numerics alone"),
    ]


def _facts(result: Steering, command: str) -> list[tuple[str, str]]:
    head = head_facts(
        result,
        Vector=f"{result.vector}, {result.vector_sha256[:16]}, at {result.hook}",
        Requests=f"{count(result.n_requests)} of {count(result.n_prompts)} prompts",
        Unembedding=f"proved: entropies within {result.unembedding:.2g} nats of the engine's",
    )
    norms = ", ".join(f"{norm:.4g} at step {step}" for step, norm in result.norms)
    return [*head, ("Row norms", norms), ("Command", command)]


def _interval(value: Estimate | None) -> str:
    return or_dash(value, lambda v: f"{v.value:.3g} [{v.low:.3g}, {v.high:.3g}]")


_DECAYS: Columns[Decay] = (
    ("way", lambda row: row.way),
    ("dose", lambda row: f"{row.dose:g}"),
    ("read after", lambda row: str(row.after)),
    ("outcome", lambda row: row.outcome),
    ("last to first", lambda row: _interval(row.ratio[-1])),
    ("fitted", lambda row: ", ".join(f"{value:.2f}" for value in row.isotonic)),
    ("why", lambda row: row.reason or "-"),
)


def _decays(result: Steering) -> Part:
    limits = result.limits
    lead = (
        "The divergence at each step over that at the first one, paired by request. It holds where "
        f"the 95 % interval of the last is above {1 - limits.margin:g}, decays where it is below, "
        "and reverses where the last row moves against the mean change of the other requests at "
        "the first step. Fitted: the ratios, so that none rises."
    )
    table = table_of("Decays", _DECAYS, result.decays, frozenset({0, 3, 6}))
    return Part("verdicts", "By depth", lead, table, pictures=[_chart(result)])


def _chart(result: Steering) -> Picture:
    """Return the divergence by step, a panel for each way at a dose of 1, beside its floor."""
    shown = [d for d in result.decays if d.dose == 1.0]
    panels = [next(d for d in reversed(shown) if d.way == way) for way in WAYS]  # the latest reads
    height = 170.0
    p = Picture(
        "decay",
        "Divergence by step",
        "Mean divergence of the next token with its 95 % interval over prompts: the vector, its "
        "negative, and random vectors of its length. The dashed line is the floor.",
        WIDTH,
        50 + len(panels) * (height + 80),
        FigureData(("way", "after", "vector", "step", "nats", "low", "high")),
    )
    legend(p, 90, 20, [(look, kind) for kind, (look, _) in _LOOKS.items()])
    for n, decay in enumerate(panels):
        effects = [
            e for e in result.effects if (e.way, e.after, e.dose) == (decay.way, decay.after, 1.0)
        ]
        values = [v for e in effects if e.divergence for v in (e.divergence.low, e.divergence.high)]
        x_range = (-0.5, len(decay.steps) - 0.5)
        f = Frame(90, 70 + n * (height + 80), 740, height, x_range, span([0.0, *values]))
        p.text(f.left, f.top - 10, f"{decay.way}, read {decay.after} later", kind="bold")
        marks = [(float(k), str(step)) for k, step in enumerate(decay.steps)]
        axes(p, f, "decode step", "nats", x_marks=marks, y_text=short)
        if result.floor is not None:
            y = f.y(result.floor.value)
            p.line(f.left, y, f.right, y, "limit")
        for kind, (mark, line) in _LOOKS.items():
            _line(p, f, [e for e in effects if e.vector == kind], mark, line)
    return p


def _line(p: Picture, f: Frame, effects: list[Effect], mark: str, line: str) -> None:
    before: tuple[float, float] | None = None
    for at, effect in enumerate(effects):
        if (value := effect.divergence) is None:
            before = None
            continue
        key = (effect.way, effect.after, effect.vector, effect.step)
        p.data.rows.append((*key, value.value, value.low, value.high))
        x, y = f.x(at), f.y(value.value)
        if before is not None:
            p.line(*before, x, y, f"{line} whisker")
        p.line(x, f.y(value.low), x, f.y(value.high), f"{line} whisker")
        p.dot(x, y, mark, f"{effect.vector}, step {effect.step}: {_interval(value)}")
        before = x, y


_ARMS: Columns[ActedArm] = (
    ("equal", lambda row: row.dosing),
    ("direction", lambda row: row.arm),
    ("of the norm", lambda row: or_dash(row.share, percent)),
    ("aimed", lambda row: _interval(row.aimed)),
    ("divergence, nats", lambda row: _interval(row.divergence)),
)


def _components(of: Components | None) -> list[Part]:
    if of is None:
        return []
    words = "; ".join(
        f"{dosing}: {cause}, answers keep {_interval(of.kept[dosing])} of the effect, and the "
        f"refit restores {_interval(of.restored[dosing])} of what they lose"
        for dosing, cause in of.by_dosing.items()
    )
    at = ", ".join(f"{position} ({n} requests of either)" for position, n in of.positions)
    lead = (
        f"{of.outcome.capitalize()}: {words}. Positions {at}. The directions have a cosine of "
        f"{of.cosine:.2f}; those of two halves {of.split_half['prompts']:.2f} in prompts, "
        f"{of.split_half['answers']:.2f} in answers. In prompts: the direction of prompts there; "
        "carried: the same in answers; refitted: that of answers. Aimed: how far the last row "
        "moves along the difference of the two selections there, over that difference."
    )
    table = table_of("A direction and its refit", _ARMS, of.arms, frozenset({0, 1}))
    return [Part("components", "Regime or component", lead, table)]


_SURVIVAL: Columns[Survival] = (
    ("from step", lambda row: str(row.step)),
    ("dose", lambda row: f"{row.dose:g}"),
    ("like those without", lambda row: _interval(row.share)),
    ("continuations", lambda row: count(row.n)),
)


def _survival(survival: list[Survival]) -> list[Part]:
    lead = (
        "Continuations sampled with the vector held whose entropy and repeated 4-grams lie within "
        "those of some without it, of which a dose of 0 is others: they look alike, no more."
    )
    table = table_of("Survival", _SURVIVAL, survival, frozenset(), room=60)
    return [Part("survival", "Survival", lead, table)] if survival else []


_EFFECTS: Columns[Effect] = (
    ("way", lambda row: row.way),
    ("vector", lambda row: row.vector),
    ("dose", lambda row: f"{row.dose:g}"),
    ("step", lambda row: str(row.step)),
    ("read after", lambda row: str(row.after)),
    ("divergence, nats", lambda row: _interval(row.divergence)),
    ("along the first", lambda row: _interval(row.along)),
    ("opposite", lambda row: or_dash(row.opposite, percent)),
    ("requests", lambda row: count(row.n)),
)


def _effects(result: Steering) -> Part:
    lead = (
        "Every effect. Along the first: the part of the change of the last row along the mean "
        "change of the other requests at the first step, 1 there. Opposite: requests with a change "
        "the other way."
    )
    table = table_of("Effects", _EFFECTS, result.effects, frozenset({0, 1}), room=60)
    return Part("effects", "Effects and controls", lead, table)


_STRATA: Columns[SteeredStratum] = (
    ("way", lambda row: row.way),
    ("by", lambda row: row.axis),
    ("", lambda row: row.name),
    ("divergence, nats", lambda row: _interval(row.divergence)),
    ("places", lambda row: count(row.n)),
)


def _strata(result: Steering) -> Part:
    lead = (
        "At a dose of 1, all steps together: by the entropy that the plain model has there, and by "
        "the role of the token fed. Of kept and held the reading that is latest."
    )
    table = table_of("By entropy and role", _STRATA, result.strata, frozenset({0, 1, 2}))
    return Part("strata", "By entropy and role", lead, table)
