"""The result of a look at attention, ``actds.attention/1``, and what it concludes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from actds_validators.audit.result import Estimate
from actds_validators.sections import LimitsSection, OfDataset, Section, Share

Outcome = Literal["more", "no more", "undecided", "not known"]


class Limits(LimitsSection):
    """The settings: which steps and requests, and what counts as a jump and as a change."""

    options: ClassVar = frozenset({"every", "requests", "seed"})

    every: int = Field(default=1, ge=1, description="look at decode steps 1, 1 + N, 1 + 2 N, ...")
    requests: int | None = Field(
        default=None, ge=2, description="requests to look at, drawn; all if not given"
    )
    seed: int = Field(default=0, ge=0, le=2**31, description="of the draw, and of the groups")
    largest: float = Field(
        default=0.1,
        gt=0,
        le=0.5,
        description="share of the jumps of an answer, and of all changes, that count as large",
    )
    window: int = Field(
        default=4, ge=1, le=1000, description="tokens before and after a step in a change"
    )
    margin: float = Field(
        default=0.05, gt=0, lt=1, description="difference of shares that counts as none"
    )


class AttentionValue(Section):
    """The mean of a measure over the decode steps of a stratum, heads together, or of one head."""

    measure: str
    axis: str
    stratum: str
    value: float
    low: float | None = Field(description="of the 95 % interval, over groups of requests")
    high: float | None = Field(description="null where one group has all steps")
    n_steps: int
    n_requests: int


class SelfProof(Section):
    """Whether ``softmax(q k) v`` was the stored ``z`` at every head of every step."""

    outcome: Literal["proved", "not proved"]
    reason: str | None = Field(default=None, description="why it was not proved")
    limit: float | None = Field(default=None, description="that a distance may have")
    largest: float | None = Field(
        default=None, description="distance, over the sum of shares times lengths of values"
    )
    mean: float | None = None
    n: int = Field(default=0, description="heads of steps")


class Jumps(Section):
    """Entropy at large jumps, beside steps of the same answer at a like depth and entropy.

    A change is the mean entropy of the tokens sampled after the step less that of those before it,
    the step's own left out; a large one is among the largest tenth of all.
    """

    outcome: Outcome
    reason: str | None = Field(default=None, description="why it is not known")
    n_jumps: int = Field(default=0, description="large jumps that have a change")
    n_matched: int = Field(default=0, description="of these, with a step to compare")
    large_change: float | None = Field(default=None, description="least large change, nats")
    after_jumps: Estimate | None = Field(
        default=None, description="share of jumps at a large change"
    )
    after_matched: Estimate | None = Field(default=None, description="share of matched steps")
    difference: Estimate | None = Field(
        default=None, description="of the two; at 95 % for all layers at once"
    )
    later: Estimate | None = Field(
        default=None, description="the same of changes a window later, which begin after the jump"
    )
    size: Estimate | None = Field(
        default=None, description="of the changes, nats: after jumps less after matched steps"
    )
    direction: Estimate | None = Field(default=None, description="the same of signed changes")


class Trace(Section):
    """An answer, step by step."""

    request: str = Field(description="external id")
    steps: list[int]
    prompt: list[float] = Field(description="mass on the prompt without position 0")
    jump: list[float | None]
    entropy: list[float | None] = Field(description="of the token sampled after it, nats")
    marked: list[int] = Field(description="steps with a large jump and a large change")


class LayerAttention(Section):
    """Where decode steps look at a layer."""

    layer: int
    n_heads: int
    n_kv_heads: int | None = Field(description="null where the engine has looked")
    head_dim: int | None
    scheme: str = Field(description="how it attends, in words")
    proof: SelfProof
    n_decode: int = Field(description="decode steps of the requests that were looked at")
    n_steps: int = Field(description="of these, with all keys")
    absent: dict[str, int] = Field(description="steps without numbers, by reason")
    values: list[AttentionValue]
    jumps: Jumps
    traces: list[Trace]

    def value(self, measure: str, axis: str, stratum: str) -> AttentionValue | None:
        wanted = (measure, axis, stratum)
        return next((v for v in self.values if (v.measure, v.axis, v.stratum) == wanted), None)


class AttentionAnswer(Section):
    """What the layers say together."""

    is_proved: bool
    jumps: Outcome = Field(description="more where it is so at a layer")
    words: str
    next_steps: list[str]


class Attention(OfDataset):
    """Where generated text looks, and whether certainty changes where it jumps."""

    schema_: Literal["actds.attention/1"] = Field(default="actds.attention/1", alias="schema")
    limits: Limits
    model_checked: bool = Field(description="whether the run record names the configuration used")
    n_requests: int = Field(description="that were looked at")
    n_groups: int = Field(description="of requests, that intervals leave out in turn")
    share: Share = Field(description="of the decode steps, that have numbers")
    answer: AttentionAnswer
    layers: list[LayerAttention]


# conclusions --------------------------------------------------------------------------------------

_ORDER: tuple[Outcome, ...] = ("more", "undecided", "no more", "not known")
_WORDS: dict[Outcome, str] = {
    "more": "entropy changes at jumps of attention more often than at matched steps",
    "no more": "entropy changes at jumps of attention no more often than at matched steps",
    "undecided": "undecided whether entropy changes at jumps of attention",
    "not known": "whether entropy changes at jumps is not known",
}


def outcome_of(difference: Estimate | None, margin: float) -> Outcome:
    if difference is None:
        return "undecided"
    if difference.low > 0:
        return "more"
    return "no more" if difference.high < margin else "undecided"


def answer(layers: Sequence[LayerAttention], first: str, last: str) -> AttentionAnswer:
    """Return what the layers say together, and what to do.

    Args:
        first: stratum of the first decode steps.
        last: of the last ones that most layers have.
    """
    jumps = next(o for o in _ORDER if o in {layer.jumps.outcome for layer in layers})
    is_proved = all(layer.proof.outcome == "proved" for layer in layers)
    ends = [[layer.value("prompt", "decode step", at) for at in (first, last)] for layer in layers]
    masses = [
        f"layer {layer.layer} {start.value:.0%} at step {first}, {end.value:.0%} at {last}"
        for layer, (start, end) in zip(layers, ends, strict=True)
        if start and end
    ]
    words = f"Attention on the prompt: {'; '.join(masses[:3])}. " if masses else ""
    words = f"{words}{_WORDS[jumps][0].upper()}{_WORDS[jumps][1:]}"
    steps = []
    if not is_proved:
        steps.append(
            "Harvest v and z of the same layers as well: nothing else proves these numbers."
        )
    if any(layer.absent for layer in layers):
        steps.append(
            "Look at the steps without numbers: of these a key or a query is not stored. Harvest "
            "with --overflow block, and without a prefix cache that others fill."
        )
    reasons = {layer.jumps.reason for layer in layers if layer.jumps.reason}
    steps += [
        f"Whether entropy changes at jumps is not known: {reason}." for reason in sorted(reasons)
    ]
    if jumps == "undecided":
        steps.append("Harvest more or longer answers to decide whether entropy changes at jumps.")
    if jumps == "more":
        steps.append("Look at the marked steps: what the answers turn to there (actds view).")
    return AttentionAnswer(is_proved=is_proved, jumps=jumps, words=words, next_steps=steps)
