"""The result of a steering study, ``actds.steer/1``, and what it concludes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from actds_validators.audit.result import Estimate
from actds_validators.sections import LimitsSection, OfDataset, Section, Share

Way = Literal["pulse", "kept", "held"]
WAYS: dict[Way, str] = {
    "pulse": "at the step alone, and read there",
    "kept": "at the step alone, and read later: what it left in the KV cache",
    "held": "from the step on",
}
Outcome = Literal["holds", "decays", "reverses", "undecided"]
Vector = Literal["vector", "negative", "random", "none"]
"""What was added: the vector, its negative, random vectors of its length, or a vector of zeros."""
Side = Literal["prompts", "answers"]
SIDES: tuple[Side, Side] = ("prompts", "answers")
ArmName = Literal["in prompts", "carried", "refitted", "random in prompts", "random in answers"]
ARMS: dict[ArmName, tuple[Side, int]] = {
    "in prompts": ("prompts", 0),
    "carried": ("answers", 0),
    "refitted": ("answers", 1),
    "random in prompts": ("prompts", 2),
    "random in answers": ("answers", 2),
}
"""Where each arm acts, and by what: the direction of prompts, that of answers, a random one."""
Dosing = Literal["nats", "norm"]
DOSINGS: dict[Dosing, str] = {
    "nats": "as many nats in each arm",
    "norm": "the strength over the row's norm that has these nats in prompts",
}
Known = Estimate | None
Cause = Literal["regime", "component", "neither lost", "undecided"]


class Limits(LimitsSection):
    """The settings: which requests, the dose, and from when an effect has decayed."""

    options: ClassVar = frozenset({"requests", "seed"})

    requests: int = Field(default=16, ge=2, le=4096, description="requests that are steered")
    calibration: int = Field(
        default=8, ge=1, le=4096, description="further requests that the dose is calibrated on"
    )
    random: int = Field(default=8, ge=1, le=64, description="random vectors beside the vector")
    nats: float = Field(
        default=1.0, gt=0, le=20, description="of the divergence at a dose of 1, where it is asked"
    )
    quantile: float = Field(
        default=0.95, gt=0, lt=1, description="of the tokens at which a dose of 1 has these nats"
    )
    margin: float = Field(
        default=0.2, gt=0, lt=1, description="share of an effect that may go where it holds"
    )
    restored: float = Field(
        default=0.5, gt=0, lt=1, description="of a lost effect, by a refit: more is a regime"
    )
    split_half: float = Field(
        default=0.7, gt=0, lt=1, description="cosine of a refit's two halves, for a component"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="of requests and random vectors")


class Dose(Section):
    """The strength of a dose of 1: where a quantile of the tokens diverges by so many nats."""

    strength: float = Field(description="length of what is added to a row")
    median_norm: float = Field(description="of rows of the hook in answers")
    kept: float | None = Field(description="the quantile at a dose of 1 in the study, nats")
    curve: list[tuple[float, float]] = Field(
        description="strengths, and the quantile of the divergence at each, nats"
    )


class Effect(Section):
    """What is done to the next token: mean divergence from what the model says without it."""

    way: Way
    vector: Vector
    dose: float
    step: int = Field(description="decode step, from 1, at which it begins")
    after: int = Field(description="steps later that it is read")
    n: int = Field(description="requests")
    divergence: Estimate | None = Field(description="Kullback-Leibler, steered from not, nats")
    along: Estimate | None = Field(
        description="of the change of the last row, the part along the mean change of the other "
        "requests at the first step, over that change: 1 there, below 0 the other way"
    )
    opposite: Share | None = Field(description="of the requests, with a change the other way")


class Decay(Section):
    """How an effect at later steps is beside that at the first one, paired by request."""

    way: Way
    dose: float
    after: int
    steps: list[int]
    ratio: list[Estimate | None] = Field(description="of the divergences, to that of the first")
    isotonic: list[float] = Field(description="the ratios, fitted so that none rises")
    outcome: Outcome
    reason: str | None = Field(description="why it is undecided")


class SteeredStratum(Section):
    """The divergence at a dose of 1, by the model's own entropy there, or the token's role."""

    way: Way
    axis: Literal["entropy", "role"]
    name: str
    n: int
    divergence: Estimate | None


class ActedArm(Section):
    """What a direction does to the next token, at positions that prompts and answers both have."""

    arm: ArmName
    dosing: Dosing
    share: float | None = Field(description="strength over the median norm of rows there")
    aimed: Estimate | None = Field(
        description="of the change of the last row, the part along the contrast's own difference "
        "of last rows, over that difference"
    )
    divergence: Estimate | None = Field(description="mean, nats")


class Components(Section):
    """Whether answers lose the effect of a direction of prompts for their regime or for any."""

    outcome: Cause
    reason: str | None = Field(description="why it is undecided")
    by_dosing: dict[Dosing, Cause]
    kept: dict[Dosing, Estimate | None] = Field(description="aimed effect, answers over prompts")
    restored: dict[Dosing, Estimate | None] = Field(description="by the refit, where some was lost")
    positions: list[tuple[int, int]] = Field(description="with the requests of either side there")
    n_groups: int = Field(description="of prompts, that intervals leave out")
    cosine: float = Field(description="of the direction of prompts and that of answers")
    split_half: dict[Side, float] = Field(description="cosine of directions of halves of prompts")
    arms: list[ActedArm]


class Survival(Section):
    """Continuations sampled from a step on, with the vector held, that look like ones without it.

    In mean entropy and repeated 4-grams, both within those of others there: no judgement of words.
    """

    step: int
    dose: float = Field(description="0: others without a vector, what the measure itself loses")
    n: int = Field(description="continuations, each of a prompt of its own")
    share: Estimate | None


class SteeringAnswer(Section):
    """What the decays at a dose of 1 say together."""

    by_way: dict[Way, Outcome]
    words: str
    next_steps: list[str]


class Steering(OfDataset):
    """Whether a vector still works later in an answer."""

    schema_: Literal["actds.steer/1"] = Field(default="actds.steer/1", alias="schema")
    limits: Limits
    dataset: str = Field(description="path of the source")
    hook: str
    vector: str = Field(description="where it comes from")
    vector_sha256: str
    n_requests: int
    n_prompts: int = Field(description="that differ; intervals leave out a group of them")
    floor: Estimate | None = Field(description="divergence of a vector of zeros: numerics alone")
    dose: Dose
    unembedding: float = Field(
        description="largest distance of entropies computed here from the engine's own, nats"
    )
    norms: list[tuple[int, float]] = Field(description="by step, the median norm of rows")
    effects: list[Effect]
    decays: list[Decay]
    strata: list[SteeredStratum]
    components: Components | None = Field(default=None, description="where a refit was asked for")
    survival: list[Survival] = Field(default=[], description="where it was asked for")
    answer: SteeringAnswer


# conclusions --------------------------------------------------------------------------------------


def outcome_of(
    first: Effect, last: Effect, ratio: Estimate | None, floor: Estimate | None, margin: float
) -> tuple[Outcome, str | None]:
    """Return what became of an effect from the first step to the last, and why it is undecided.

    ``ratio`` is that of the two divergences, ``floor`` the one without a vector.
    """
    if first.divergence is None or last.divergence is None or ratio is None:
        return "undecided", "too few requests for an interval"
    if floor is not None and first.divergence.low <= floor.high:
        return "undecided", "the vector does no more than numerics at the first step"
    if last.along is not None and last.along.high < 0:
        return "reverses", None
    if ratio.high < 1 - margin:
        return "decays", None
    if ratio.low >= 1 - margin:
        return "holds", None
    return "undecided", f"the interval of the ratio, {ratio.low:.2f} to {ratio.high:.2f}"


def component_of(
    first: Known, kept: Known, restored: Known, split_half: float, limits: Limits
) -> Cause:
    """Return why an effect in prompts, ``first``, is lost in answers, at one dosing."""
    if first is None or kept is None or first.low <= 0:
        return "undecided"
    if restored is None:
        return "neither lost" if kept.low >= 1 - limits.margin else "undecided"
    if restored.low > limits.restored:
        return "regime"
    is_known = split_half >= limits.split_half
    return "component" if restored.high < limits.restored and is_known else "undecided"


def agreed(by_dosing: Mapping[Dosing, Cause]) -> tuple[Cause, str | None]:
    """Return what both dosings say, and why that is undecided."""
    causes = set(by_dosing.values())
    if len(causes) == 1 and "undecided" not in causes:
        return causes.pop(), None
    words = [f"{cause} at {DOSINGS[dosing]}" for dosing, cause in by_dosing.items()]
    return "undecided", "; ".join(words)


def answer(decays: Sequence[Decay], specific: bool | None) -> SteeringAnswer:
    """Return what the decays at a dose of 1 say together, one for each way.

    ``specific``: whether the vector does more at the first step than random ones of its length.
    """
    by_way = {decay.way: decay.outcome for decay in decays}
    parts = []
    for decay in decays:
        last = decay.ratio[-1]
        share = f" ({last.value:.2f} of it [{last.low:.2f}, {last.high:.2f}])" if last else ""
        parts.append(f"{decay.way} {decay.outcome}{share}")
    steps = [
        f"{decay.way} is undecided: {decay.reason}. Steer more requests (--requests)."
        for decay in decays
        if decay.outcome == "undecided"
    ]
    words = f"From step {decays[0].steps[0]} to {decays[0].steps[-1]}: " + "; ".join(parts)
    if specific is False:
        words += ". The vector does no more than random ones of its length"
        steps.insert(0, "Take another vector, hook or dose: random ones do as much.")
    return SteeringAnswer(by_way=by_way, words=words, next_steps=steps)
