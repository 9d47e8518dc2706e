"""The result of an audit: every number that decided, as frozen models with one JSON schema."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from actds.format import tables
from actds_validators.audit.place import Answer, Place, PlaceName, SourceAccount
from actds_validators.audit.place import Level as Level
from actds_validators.sections import LimitsSection, Section, Share

if TYPE_CHECKING:
    from actds_validators.statistics.intervals import Interval

BOUND = "worst-case bias of any mean"
"""Name of the number that holds for any losses: above its limit the tests decide."""
EVENTS = "independent loss events"
DETECTABLE = "content bias that one interval would detect"
EQUIVALENCE = "farthest end of an equivalence interval"
LEAST = "least adjusted p that any question could have had"
SAMPLE = "farthest that a mean by 1/inclusion can be off"
EVIDENCE = (EVENTS, DETECTABLE, EQUIVALENCE, LEAST, SAMPLE)
"""Names, or their beginnings, of numbers that say how much evidence there is, not what is lost."""

MIN_BLAMED = 3
"""Independent loss events from which a cause is named: fewer have something in common by chance."""

PROVEN = 0.9
"""Confidence of the interval of an equivalence test: two one-sided tests at half of the rest."""

Group = Literal["system", "content", "values"]
"""What a covariate describes: the serving system at the time, the tokens, or the rows' values."""
Must = Literal["at most", "below", "at least", "above"]
"""On which side of its limit a number has to lie."""


class Estimate(Section):
    """A number with its interval."""

    value: float
    low: float
    high: float
    confidence: Share = 0.95

    @classmethod
    def of(cls, interval: Interval | None) -> Estimate | None:
        return None if interval is None else cls.model_validate(interval, from_attributes=True)


class Number(Section):
    """A number that was compared with a limit."""

    name: str = Field(description="what it is, in words")
    value: float
    must: Must | None = Field(
        default=None, description="on which side of the limit it has to lie, null if none"
    )
    limit: float | None = Field(default=None, description="what it was compared with")
    unit: str = Field(default="", description="empty for a plain number; p: of a test")
    ok: bool | None = Field(
        default=None, description="whether it is within the limit, null if none"
    )

    @model_validator(mode="after")
    def _limit_has_a_side(self) -> Self:
        if (self.must is None) != (self.limit is None):
            raise ValueError(f"{self.name}: a limit needs its side, and a side its limit")
        return self


class Limits(LimitsSection):
    """The settings of an audit; defaults are those of the spec, section 14.7."""

    negligible_bias: float = Field(
        default=0.02,
        gt=0,
        description="a loss is negligible when no mean can be off by more than this, in standard "
        "deviations of all rows, and uncorrelated when no tested one is",
    )
    max_loss: Share = Field(
        default=0.05, description="share of computed tokens above which a loss is heavy (FAIL)"
    )
    serious: float = Field(
        default=0.1,
        gt=0,
        description="bias of the stored rows, on a covariate with a rejected test, above which a "
        "loss fails, in standard deviations of all rows",
    )
    min_events: int = Field(
        default=30, ge=2, description="independent loss events needed to call a loss uncorrelated"
    )
    fdr: float = Field(default=0.05, gt=0, lt=1, description="false discovery rate of the tests")
    max_unresolved: Share = Field(
        default=0.01, description="share of prefix-cache hits without a stored row that warns"
    )
    worst_stratum_warn: Share = Field(
        default=0.05,
        description="share lost of any kind of token (id, class, source, position, tail of a "
        "value), beyond chance and as much above that of all, that warns",
    )
    worst_stratum_fail: Share = Field(default=0.2, description="the same that fails")
    max_shift: Share = Field(
        default=0.02,
        description="total variation of token classes or positions, stored against served, above "
        "which rows have to be loaded as often as they were served",
    )
    n_blocks: int = Field(default=50, ge=10, description="blocks of the jackknife at most")
    seed: int = Field(default=0, ge=0, description="seed of random shifts and splits")


# accounting -----------------------------------------------------------------------------------


class Finding(Section):
    """What does not add up, as ``actds validate`` would say it."""

    code: str
    place: str
    got: str
    expected: str
    severity: Literal["error", "warning", "note"]


class WaterfallStep(Section):
    """One step from what existed to what is stored."""

    name: str = Field(
        description="positions, cache_ref, filtered, thinned, undelivered, never computed, "
        "dropped, aborted or captured"
    )
    reason: str | None = Field(
        default=None, description="why, for all but positions, captured and cache_ref"
    )
    n_positions: int
    share: Share = Field(description="of all positions")


class Accounting(Section):
    """Census = captured + references + dropped + aborted + never computed + the two left out.

    Left out are ``filtered`` and ``undelivered``.
    """

    @property
    def is_sound(self) -> bool:
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def own_hits(self) -> int:
        """Return the prefix-cache hits on KV that the run computed itself."""
        return self.cache_ref - self.external

    @property
    def unread(self) -> int:
        """Return the dropped positions that left no readouts: their values are not on record."""
        return sum(
            step.n_positions
            for step in self.waterfall
            if (step.name, step.reason) == ("dropped", tables.READOUTS_FULL)
        )

    positions: int = Field(description="positions of all requests")
    computed: int = Field(
        description="captured + thinned + dropped + aborted: what could have been stored"
    )
    captured: int
    cache_ref: int
    dropped: int
    aborted: int = Field(description="computed, and not stored because the request or run ended")
    never_computed: int = Field(
        default=0, description="owed positions that no step computed: in no loss rate"
    )
    never_computed_requests: int = Field(default=0, description="requests that have such a one")
    filtered: int
    undelivered: int = Field(
        default=0, description="computed past the end of a request: in no loss rate"
    )
    thinned: int = Field(
        default=0, description="not drawn, with a known probability: in no loss rate"
    )
    recomputed: int
    unresolved: int = Field(description="references without a stored row behind them")
    external: int = Field(
        default=0, description="of cache_ref: served from KV that came from outside the run"
    )
    requests: int
    steps: int
    loss_share: Share = Field(description="dropped and aborted of computed")
    waterfall: list[WaterfallStep]
    findings: list[Finding]


# coverage -------------------------------------------------------------------------------------


class CoverageCell(Section):
    """A token class in a band of positions."""

    token_class: str
    low: int = Field(description="first position of the band")
    high: int = Field(description="position after the last")
    stored: int = Field(
        description="positions whose row is stored, each as 1 over its inclusion where rows were "
        "drawn: with those like it that were not drawn"
    )
    reused: int = Field(description="positions served from the prefix cache")
    lost: int = Field(description="dropped and aborted positions")
    filtered: int
    external: int = Field(
        default=0,
        description="positions whose KV came from outside the run: no row here, and no loss",
    )
    stored_share: Share | None = Field(
        default=None,
        description="stored of stored, reused and lost: what training sees without weights",
    )


class CapturedShift(Section):
    """How far the stored rows lie from what was served, with and without multiplicity weights."""

    variable: str
    total_variation: Share
    jensen_shannon: Share = Field(description="distance, base 2: 0 equal, 1 disjoint")
    weighted_total_variation: Share
    weighted_jensen_shannon: Share


class Dominant(Section):
    """The token id and position that hold most of what multiplicity weights see."""

    hook: str
    token_id: int
    position: int
    n_rows: int = Field(description="stored rows of that id at that position")
    n_served: int = Field(description="how often they were served in all")
    share: Share = Field(
        description="of the squared deviation of the norm about its mean, each row as often as it "
        "was served"
    )
    exclude: list[str] = Field(description="names under which a loader leaves such rows out")


class ClassLoss(Section):
    """The loss rate of a class that somebody gave, or of all other positions."""

    token_class: str
    n: int = Field(description="computed positions, those of aborted requests too")
    n_lost: int
    rate: Share = Field(description="share lost")


class Coverage(Section):
    """What the prefix cache and the losses left out."""

    cells: list[CoverageCell]
    classes_from: str = Field(description="where the token classes come from, in words")
    reused_share: Share = Field(description="reused of all served: stored, reused and lost")
    repeated_prefixes: int = Field(description="stored rows that were served more than once")
    largest_multiplicity: int
    mean_multiplicity: float = Field(description="servings per stored row")
    repeated_multiplicity: float | None = Field(
        default=None, description="servings per stored row that was served more than once"
    )
    once_bias: float = Field(
        description="the most that a mean over the stored rows, each once, is off from that over "
        "what was served, in standard deviations of the latter"
    )
    effective_rows: float = Field(
        description="(sum m)^2 / sum m^2 of the stored rows, m how often each was served"
    )
    shifts: list[CapturedShift]
    dominant: Dominant | None = Field(
        default=None,
        description="null where nothing was served again, or no readout tells the norms",
    )
    loss_by_class: list[ClassLoss] = Field(
        default_factory=list, description="empty without roles, when nobody gave classes"
    )


# missingness ----------------------------------------------------------------------------------


class Stratum(Section):
    """The loss rate in a range or class of a covariate."""

    label: str
    low: float | None = None
    high: float | None = None
    n: int = Field(description="computed tokens")
    n_lost: int
    rate: Estimate = Field(description="share lost")


class Covariate(Section):
    """What a covariate is."""

    name: str
    label: str = Field(description="words for a plot")
    unit: str
    group: Group


class Difference(Section):
    """How far the lost tokens lie from all, in standard deviations of all.

    An interval of confidence 1 is that of the worst case: the losses leave none of their own.
    """

    covariate: Covariate
    mean_all: float
    sd_all: float
    mean_lost: float
    smd: Estimate
    equivalence: Estimate | None = Field(
        default=None,
        description=f"of the stored rows against all: the {100 * PROVEN:g} % interval of the "
        "equivalence test, no narrower than if each loss event were one row drawn at random",
    )
    after_weighting: Estimate | None = Field(
        default=None,
        description="of the stored rows against all, with weights; each block that the jackknife "
        "leaves out is left out of the weights, too",
    )
    before_weighting: Estimate | None = Field(
        default=None, description="of the stored rows against all, without"
    )
    at_once: Estimate | None = Field(
        default=None,
        description="the same with an interval that holds for all content and values covariates at "
        "once: that of one which was chosen as the farthest; null where the losses leave none",
    )
    total_variation: Share | None = Field(default=None, description="lost against all")
    jensen_shannon: Share | None = Field(default=None, description="distance, lost against all")
    strata: list[Stratum] = Field(default_factory=list)


class BoundPoint(Section):
    """The bound at one share of loss."""

    loss_share: Share
    bias: float


class Bound(Section):
    """The most that any mean over rows can be off, in standard deviations of all rows."""

    loss_share: Share
    bias: float = Field(description="sqrt(loss / (1 - loss))")
    curve: list[BoundPoint]


class StratumLoss(Section):
    """A kind of token of which more was lost than the limit and than chance."""

    kind: str = Field(
        description="token id, class, source, first prompt block, run, replica, overflow policy, "
        "phase, position, position from the end, or tail of a value"
    )
    label: str
    n: int = Field(description="computed tokens")
    n_lost: int
    rate: Share = Field(description="share lost")
    n_blocks: int = Field(description="stretches of the run in which some of it was lost")
    adjusted_p: Share = Field(
        description="of losing so much by chance, times the strata of the kind (Bonferroni)"
    )


class Missingness(Section):
    """Per covariate, how what was lost differs from what there was."""

    differences: list[Difference]
    worst_strata: list[StratumLoss] = Field(
        default_factory=list, description="the worst first; empty where none is beyond its limit"
    )
    n_strata: int = Field(default=0, description="strata that could have been among them")
    whole_requests: int = Field(
        default=0, description="requests of whose computed tokens every one was dropped"
    )
    bound: Bound
    could_ask: list[str] = Field(description="questions that the tables could answer")
    could_not_ask: list[str] = Field(description="questions that they could not, and why")


# mechanism ------------------------------------------------------------------------------------


FamilyName = Literal[
    "time", "load", "content of steps", "values of steps", "content of tokens", "values of tokens"
]
"""A question to the losses; of tokens: among those of one step."""


class Association(Section):
    """One test."""

    name: str = Field(description="shift, event, within or change")
    family: FamilyName | None = Field(default=None, description="which question it answers")
    covariate: Covariate
    statistic: float
    p: Share
    adjusted_p: Share = Field(
        description="over its family, then over the families: the least false discovery rate at "
        "which it is rejected"
    )
    rejected: bool
    n_units: int = Field(
        description="effectively independent units it rests on: requests, blocks, or shifts, of "
        "which more may have been made"
    )
    unit: str
    naive_p: Share | None = Field(
        default=None, description="what a test over tokens would say; never decides"
    )
    note: str = ""


class Family(Section):
    """The tests of one question, and the least p that they could have had."""

    question: FamilyName
    n_tests: int
    p: Share = Field(description="smallest p of its tests, adjusted within the family")
    adjusted_p: Share = Field(description="Benjamini and Hochberg, over the families")
    n_draws: int = Field(description="rearrangements of the losses, the observed one among them")
    drawn: str = Field(description="what these are, in words")
    least_p: Share = Field(description="smallest p that they can give")
    least_adjusted_p: Share = Field(description="the same over the families, the others as found")
    could_be_found: bool = Field(
        description="whether that is at most the false discovery rate: no dependence, however "
        "strong, could have been found otherwise"
    )
    needed: int | None = Field(
        default=None,
        description="rearrangements from which on one could; null where more can be drawn",
    )


class Mechanism(Section):
    """What the loss goes with."""

    tests: list[Association]
    families: list[Family] = Field(default_factory=list, description="the questions that are asked")
    n_events: int = Field(description="independent loss events")
    n_steps: int
    n_lost_steps: int
    n_partial_steps: int = Field(description="steps that lost some of their tokens")
    n_blocks: int
    block_steps: int
    detectable: float | None = Field(
        default=None,
        description="bias of the stored rows that the widest interval of content or values would "
        "show with power 0.8; the tests, adjusted over all of them, need more",
    )


# time and queues ------------------------------------------------------------------------------


class TracePoint(Section):
    """A bin of the run."""

    t_s: float = Field(description="seconds since the first step")
    seconds: float = Field(description="width")
    computed: int
    lost: int
    load: float = Field(description="mean of the moving average of tokens per step")


class Stall(Section):
    """Waits at a stage."""

    stage: str
    n: int
    seconds: float
    marks_s: list[float] = Field(description="when, at most 200, seconds since the first step")


class Occupancy(Section):
    """How long a queue stood how full."""

    stage: str
    depth: int
    capacity: int
    seconds: float


class Lag(Section):
    """Correlation of the load with the loss ``steps`` later."""

    steps: int
    correlation: float


class LagBand(Section):
    """Where the correlation at any one lag lies when the load and the loss are unrelated."""

    low: float
    high: float
    confidence: Share = Field(default=0.95, description="pointwise: of each lag by itself")
    n_shifts: int = Field(description="circular shifts of the losses that it is the range of")
    n_effective: float = Field(description="effectively independent ones of them")


class Loss(Section):
    """Loss against load, or another number of the step: one point a decile."""

    load: float = Field(description="mean of the decile: of the load, tokens per step")
    rate: Estimate
    fitted: float = Field(description="isotonic fit")


class LossCurve(Section):
    """Loss against a number of the step itself, and its monotone fit."""

    covariate: Covariate
    direction: Literal["increasing", "decreasing"] = Field(
        description="of the monotone fit that explains more"
    )
    points: list[Loss]


class Queues(Section):
    """When it was lost, and how the queues stood."""

    trace: list[TracePoint]
    stalls: list[Stall]
    occupancy: list[Occupancy]
    lags: list[Lag]
    lag_band: LagBand | None = Field(default=None, description="null without a lag")
    loss_by_load: list[Loss]
    loss_by_step: list[LossCurve] = Field(
        default_factory=list, description="by the size of the batch, and by its longest context"
    )


# weights, verdict -----------------------------------------------------------------------------


class WeightCell(Section):
    """Steps of like load, tokens of like complexity."""

    load_low: float
    load_high: float
    label: str = Field(description="range of the complexity")
    n: int = Field(description="computed tokens")
    n_lost: int
    rate: Share = Field(description="share lost, shrunk to that of its load")
    weight: float = Field(description="of a stored row of the cell")


class Balance(Section):
    """How far the weights bring the stored rows to all, over a group of covariates."""

    group: Group
    before: float = Field(description="largest bias of a stored mean, in standard deviations")
    after: float = Field(description="the same of the weighted rows")


class Worse(Section):
    """A covariate that the weights leave worse off than it was."""

    label: str
    group: Group
    before: float = Field(description="bias of the stored mean, in standard deviations")
    after: float = Field(description="the same of the weighted rows")


class FollowUpHook(Section):
    """Of a hook, the mean that may be the farthest off: of a channel, or of the norm.

    Biases are those of the stored rows against all, in standard deviations of all; of rows that
    were drawn each counts as 1 over its inclusion.
    """

    hook: str
    n_channels: int
    n_rows: int = Field(description="lost rows that were computed again")
    n_clusters: int = Field(
        description="drawn requests that they are of, those in one cluster as one"
    )
    variable: str = Field(description="norm, or the number of the channel")
    bias: Estimate = Field(
        description="with the interval that holds for all means of all hooks at once"
    )
    numerics: float | None = Field(
        description="what the replay's own numerics can add, from positions with a row in both; "
        "null where there is none"
    )

    proven: float = Field(
        description="least bias of the mean that is farthest off beyond its interval; 0 if none is"
    )

    @property
    def reach(self) -> float:
        """Return the farthest that the bias may lie from 0."""
        return max(abs(self.bias.low), abs(self.bias.high)) + (self.numerics or 0.0)


class FollowUp(Section):
    """What a replay of a random part of the lost positions says of all of them."""

    path: str
    digest: str
    fraction: float = Field(gt=0, le=1, description="probability with which each request was drawn")
    seed: int
    n_missing: int = Field(description="positions that lack a row")
    share: Share = Field(description="of these and of the stored rows")
    n_requests: int = Field(description="drawn requests that lack a row")
    n_drawn: int = Field(description="positions of theirs that lack one")
    n_answered: int = Field(description="of these, positions whose row was computed again")
    n_shared: int = Field(description="positions with a row in both that were compared")
    hooks: list[FollowUpHook]

    @property
    def farthest(self) -> FollowUpHook:
        return max(self.hooks, key=lambda hook: hook.reach)

    @property
    def proven(self) -> float:
        return max(hook.proven for hook in self.hooks)

    @property
    def unanswered(self) -> float:
        """Return which share of all positions the replay can say nothing of."""
        # A row that is not finite is no answer.
        n_answered = min([self.n_answered, *(hook.n_rows for hook in self.hooks)])
        return self.share * (1 - n_answered / max(1, self.n_drawn))


class SampleHook(Section):
    """Of a hook, the mean that is known least: of a channel, or of the norm.

    Means are those over all rows that were drawn from, in standard deviations of them; intervals
    hold for all means of all hooks at once.
    """

    hook: str
    n_channels: int
    n_rows: int = Field(description="stored rows that are finite")
    variable: str = Field(description="norm, or the number of the channel")
    half_width: float | None = Field(
        description="half the interval of its mean; null where one row or request alone says all"
    )
    plain_variable: str = Field(description="of the next")
    plain: Estimate | None = Field(
        description="how far the mean of stored rows, each once, is off: that which may be the "
        "farthest"
    )

    @property
    def reach(self) -> float:
        return self.half_width if self.half_width is not None else math.inf


class SampleCheck(Section):
    """Means of the readouts by the drawn rows, against those of all: the farthest."""

    n_rows: int = Field(description="rows with a readout that were drawn from")
    n_drawn: int = Field(description="of these, rows that are stored")
    n_values: int = Field(description="means that were compared, of all runs and hooks")
    hook: str
    variable: str
    deviation: float = Field(description="estimate less truth, in standard deviations")
    room: float = Field(description="how far it may be off, with 99.9 % for all at once")
    agrees: bool


class Efficiency(Section):
    """Share of the lane's rows of one kind that are of steps that were kept whole."""

    kind: str = Field(description="token class, position, norm at a hook, or feature at a hook")
    label: str
    n: int = Field(description="rows of the lane")
    kept: Estimate = Field(description="of a feature with the interval for all features at once")


class Lane(Section):
    """Rows that are stored whatever the policy did, and which of them it would have kept."""

    fraction: float = Field(description="probability of each row to be in the lane")
    n_rows: int
    n_kept: int
    points: list[Efficiency]
    p: dict[str, Share] = Field(
        description="of each kind, that all are kept alike (Pearson; of features the smallest "
        "binomial one, times their number), times the number of kinds"
    )


class FeatureRates(Section):
    """Over all rows that were drawn from: how often each feature of a dictionary is active.

    Lists have a place for each feature; all intervals hold for all features of all hooks at once.
    """

    hook: str
    path: str
    sha256: str = Field(description="of the dictionary's weights")
    n_features: int
    n_rows: int = Field(description="stored rows that are finite")
    confidence: Share = 0.95
    n_active: list[int] = Field(description="of these, rows where it is active")
    rate: list[Share]
    low: list[Share]
    high: list[Share]
    mean: list[float | None] = Field(description="of it where it is active; null where it never is")
    mean_half: list[float | None] = Field(
        description="half the interval of the mean; null where too few rows have the feature"
    )


class Sample(Section):
    """Means over all rows that were drawn from, by the drawn ones and their probabilities alone."""

    units: list[Literal["row", "request"]] = Field(description="what was drawn by itself")
    minimum: float = Field(gt=0, le=1, description="lowest probability of a row")
    n_stored: int
    n_thinned: int = Field(description="positions that were not drawn, under thin")
    n_dropped: int = Field(description="the same of steps that a drop policy lost")
    effective_rows: float = Field(description="(sum w)^2 / sum w^2, w = 1 / inclusion")
    hooks: list[SampleHook]
    readouts: SampleCheck | None = Field(description="null where no run has readouts")
    lane: Lane | None = Field(description="null where no drop policy lost rows")
    features: list[FeatureRates] = Field(
        default_factory=list, description="of each hook with a dictionary that was given"
    )

    @property
    def farthest(self) -> SampleHook:
        return max(self.hooks, key=lambda hook: hook.reach)

    @property
    def plain(self) -> float:
        """Return how far a mean of the stored rows, each once, may be off."""
        ends = [h.plain for h in self.hooks]
        return max(math.inf if e is None else max(abs(e.low), abs(e.high)) for e in ends)

    @property
    def agrees(self) -> bool:
        return self.readouts is None or self.readouts.agrees


class Weighting(Section):
    """What inverse-probability weights would change."""

    n_cells: int
    n_rows: int
    effective_rows: float = Field(description="(sum w)^2 / sum w^2")
    largest: float
    complexity: str = Field(description="covariate that cuts the other way")
    cells: list[WeightCell]
    balance: list[Balance] = Field(description="of each group of covariates that has any")
    worse: list[Worse] = Field(
        default_factory=list,
        description="covariates whose bias grows by more than a tenth of negligible_bias and to "
        "more than it, the worst first; empty where none does",
    )
    claim: str = Field(description="MAR-consistent after weighting, or why not")


class Verdict(Section):
    """What a person may conclude."""

    level: Level
    kind: str = Field(description="negligible, uncorrelated, ... : a word for machines")
    sentence: str
    deciding: Number
    numbers: list[Number] = Field(description="every number that was compared with a limit")
    lacks: list[str] = Field(default_factory=list, description="what is short, when inconclusive")
    next_steps: list[str] = Field(default_factory=list)


class ClassesFile(Section):
    """The token classes that somebody gave, and how much of the dataset they name."""

    path: str
    sha256: str = Field(description="of the file")
    n_ranges: int
    n_matching: int = Field(description="ranges that begin within a request of the dataset")
    n_labelled: int = Field(description="positions of the dataset that they name")
    n_positions: int = Field(description="positions of all requests of the dataset")


class Options(Section):
    """What the audit was asked for, beside its limits."""

    engine: Literal["threads", "ray"] = Field(
        default="threads", description="where the rows were read"
    )
    classes: ClassesFile | None = Field(
        default=None, description="null when the classes are the tables' alone"
    )
    accepted: list[PlaceName] = Field(
        default_factory=list, description="places that the user waived"
    )


class Audit(Section):
    """What ``actds audit`` says; the model of ``--json``."""

    format: Literal["actds.audit"] = "actds.audit"
    version: Literal["1"] = "1"
    actds: str
    path: str
    dataset: str
    digest: str
    seal: int | None
    runs: list[str]
    policies: list[str] = Field(description="overflow policies of the runs")
    options: Options = Field(default_factory=Options)
    limits: Limits
    answer: Answer
    places: list[Place] = Field(
        description="in the order in which rows pass; empty where the accounting does not add up"
    )
    source: SourceAccount | None = Field(description="null where the accounting does not add up")
    verdict: Verdict = Field(description="on what queues and ends lost")
    accounting: Accounting
    coverage: Coverage | None = None
    missingness: Missingness | None = None
    mechanism: Mechanism | None = None
    queues: Queues | None = None
    follow_up: FollowUp | None = Field(default=None, description="null where none was given")
    sample: Sample | None = Field(
        default=None, description="null where no row was left out by a draw"
    )
    weighting: Weighting | None = None
    would_not_notice: list[str] = Field(
        default_factory=list, description="what this audit could not have found, in words"
    )
    duration_s: float
    peak_nbytes: int | None = Field(
        default=None, description="largest resident memory of this process, not of Ray's workers"
    )

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` writes."""
        return self.model_dump(mode="json")
