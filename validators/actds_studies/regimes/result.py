"""The result of a comparison of regimes, ``actds.regimes/1``: every number that decided."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny

from actds_validators.sections import Document, LimitsSection, Section, Share

ALL = "all"
"""Axis and stratum of all rows."""
MIN_REQUESTS = 8
"""Requests that an arm must have in a stratum: nothing is estimated from fewer."""
MIN_ROWS = 32
"""Effective rows, ``(sum w)² / sum w²``, that an arm must have in a stratum: eight requests may
give a dozen rows, all of one token of a template, which are no sample of a regime."""
Outcome = Literal["carries over", "shifts", "undecided"]
About = Literal["computation", "authorship", "both", "text"]
"""What differs between two arms: how equal tokens were computed; who wrote the tokens behind equal
prompts, computed alike; both of these; or the text itself, computed alike."""
Separated = Literal[
    "computation",
    "authorship",
    "both",
    "neither",
    "not computation",
    "not authorship",
    "authorship, or the text",
    "not separated",
    "undecided",
]
"""What shifts, as far as the contrasts separate authorship from computation."""


class StudyLimits(LimitsSection):
    """What every study of arms has: the level of its tests, and its seed."""

    fdr: float = Field(default=0.05, gt=0, lt=1, description="false discovery rate of all tests")
    seed: int = Field(default=0, ge=0, description="of groups, exchanges and halves")


class Limits(StudyLimits):
    """The settings: up to where a difference counts as none, and how it is tested."""

    mean: float = Field(
        default=0.25, gt=0, description="of a channel, in standard deviations of the reference"
    )
    log_variance: float = Field(default=0.25, gt=0, description="ln of the ratio of variances")
    log_kurtosis: float = Field(default=0.5, gt=0, description="ln of the ratio of kurtoses")
    outliers: float = Field(default=0.005, gt=0, description="difference of shares")
    relative_l2: float = Field(default=0.01, gt=0, description="mean distance over the norm")
    drift: float = Field(
        default=0.05, gt=0, description="drift over the dictionary's squared error"
    )
    switched: float = Field(default=0.02, gt=0, description="share of features that switch")
    fvu: float = Field(default=0.02, gt=0, description="difference of fractions unexplained")
    log_l0: float = Field(default=0.1, gt=0, description="ln of the ratio of active features")
    log_rate: float = Field(default=0.5, gt=0, description="ln of the ratio of a feature's rates")
    angle: float = Field(default=3.0, gt=0, description="turn of a feature's direction, degrees")
    overlap: float = Field(
        default=0.1, gt=0, description="Jaccard or correlation lost to the floor"
    )
    score: float = Field(
        default=0.2, gt=0, description="of a probe, in standard deviations of the reference"
    )
    auc: float = Field(default=0.03, gt=0, description="difference of areas under the ROC curve")


class ArmResult(Section):
    """The rows of an arm at a hook."""

    name: str
    words: str = Field(description="dataset and what selects its rows")
    rows: str = Field(description="what the rows are: who wrote the tokens, how they were computed")
    digest: str = Field(description="of the dataset's seal")
    n_rows: int = Field(ge=0, description="each prefix once")
    n_requests: int = Field(ge=0)
    n_compared: int = Field(ge=0, description="rows that the contrast reads")
    n_apart: dict[str, int] = Field(
        description="rows left out, by filter: BOS and position 0; with a held-out arm also rows "
        "whose prefix a request of its other side has"
    )
    n_repeats: int = Field(ge=0, description="rows left out because their prefix counts already")
    n_decode: int | None = Field(
        default=None, ge=0, description="rows that decode steps computed; null unknown"
    )
    n_sinks: int = Field(default=0, ge=0, description="rows above 10 median norms, left out")
    n_broken: int = Field(default=0, ge=0, description="rows not finite or zero, left out")


class Element(Section):
    """One of many elements of a measure, as a feature."""

    name: str
    value: float
    error: float = Field(description="standard error")
    arms: tuple[float | None, float | None] | None = None


class Value(Section):
    """A measure in a stratum; of many elements, as channels, the farthest in standard errors."""

    instrument: str
    hook: str
    axis: str
    stratum: str
    measure: str
    unit: str
    kind: Literal["difference", "size", "direction", "overlap", "described"]
    n_rows: tuple[int, int] = Field(description="of the reference and of the other arm")
    n_requests: tuple[int, int]
    n_effective: tuple[float, float] = Field(description="rows, after weighting")
    n_tokens: tuple[int, int] | None = Field(
        default=None, description="different token ids of these rows; null where they are not known"
    )
    n_groups: int = Field(description="groups of requests that were left out one by one")
    value: float | None = Field(default=None, description="null when nothing is estimated")
    low: float | None = Field(
        default=None,
        description="of the 95 % interval, of many elements one of those that hold for all at once",
    )
    high: float | None = None
    error: float | None = Field(default=None, description="standard error")
    arms: tuple[float | None, float | None] | None = Field(
        default=None, description="the same of either arm alone"
    )
    element: str | None = Field(default=None, description="which of many, as a channel")
    n_elements: int = Field(default=0, description="elements tested together")
    n_untested: int = Field(default=0, description="elements without enough events or spread")
    floor: float | None = Field(
        default=None,
        description="95 % quantile between halves of the reference; mean of an overlap; of "
        "numerics the same of tokens that one arm computed twice, or of its canaries",
    )
    limit: float | None = None
    farthest: float | None = Field(
        default=None, description="largest end of the 90 % intervals of all elements together"
    )
    equivalent: bool | None = Field(default=None, description="whether that is within the limit")
    detectable: float | None = Field(
        default=None,
        description="found with a power of 80 %, in half of the elements or more: what is smaller "
        "could not have been found here",
    )
    p: float | None = Field(default=None, description="by exchange of groups of requests")
    adjusted_p: float | None = Field(default=None, description="by Benjamini and Hochberg")
    outcome: Outcome | None = None
    short: str | None = Field(default=None, description="what is missing for a decision")
    note: str = ""
    elements: list[Element] = Field(
        default_factory=list,
        description="some of many: the farthest in standard errors, and as many spread evenly",
    )


class Quantiles(Section):
    """Quantiles over pairs of rows of equal tokens."""

    hook: str
    axis: str
    stratum: str
    measure: str
    n_pairs: int
    p50: float
    p90: float
    p99: float
    p100: float


class Verdict(Section):
    """What an instrument finds at a hook, over all strata and measures."""

    instrument: str
    hook: str
    outcome: Outcome
    sentence: str
    short: list[str] = Field(description="what is missing where it is undecided")


class ContrastResult(Section):
    """Two arms at a hook."""

    name: str
    hook: str
    pairing: Literal["token", "position", "unpaired"]
    about: About = Field(description="what differs between the arms, as far as they show it")
    adjusted: bool = Field(
        description="weighted to the other arm's tokens and positions: adjusted, not matched"
    )
    n_pairs: int = Field(ge=0)
    n_groups: int = Field(ge=0)
    coverage: Share = Field(description="share of the second arm's rows that are compared")
    left_out: list[str] = Field(
        default_factory=list, description="what is not formed or not weighted, and why"
    )
    first: ArmResult
    second: ArmResult
    values: list[Value]
    quantiles: list[Quantiles]
    verdicts: list[Verdict]

    @property
    def names(self) -> tuple[str, str]:
        return self.first.name, self.second.name


class Used(Section):
    """A dictionary or a file of probes that was applied to a hook."""

    hook: str
    kind: Literal["dictionary", "probes"]
    path: str
    sha256: str
    words: str = Field(description="what it is: kind, size, format, and what to keep in mind")


class DatasetResult(Section):
    """A dataset that has rows of an arm, as its genesis and run records name it."""

    path: str
    digest: str = Field(description="of its seal")
    models: list[str]
    engines: list[str] = Field(description="names and versions")
    hooks: list[str] = Field(description="those compared, with width and type")
    started_ns: int = Field(description="when its first run began, wall clock")


class Largest(Section):
    """The value that shifts and is told first: over all rows where one of them shifts."""

    contrast: str
    value: Value
    sentence: str


class GapPart(Section):
    """The leading measure over all rows of a contrast of authorship or of computation alone."""

    hook: str
    about: Literal["authorship", "computation"]
    contrast: str
    measure: str
    value: float
    low: float | None
    high: float | None


class Answer(Section):
    """Whether the way it was served changes what is measured, by how much, and by what."""

    outcome: Outcome = Field(
        description="of all verdicts: one that shifts decides, then one that is undecided"
    )
    words: str = Field(description="the answer in a few words")
    n_verdicts: int = Field(ge=0)
    n_shifts: int = Field(ge=0)
    n_undecided: int = Field(ge=0)
    separated: Separated = Field(description="what shifts: authorship, computation, or both")
    reason: str = Field(description="why that is said, or why the two are not separated")
    largest: Largest | None = Field(description="null where nothing shifts")
    parts: list[GapPart] = Field(description="of hooks at which both parts were compared")
    next_steps: list[str]


class StudyResult(Document):
    """What a study finds on contrasts of arms; the schema of one is ``actds.NAME/1``."""

    schema_: str = Field(alias="schema")
    limits: SerializeAsAny[StudyLimits]
    answer: Answer
    n_tests: int = Field(ge=0, description="in one family")
    datasets: list[DatasetResult] = Field(default_factory=list)
    used: list[Used] = Field(default_factory=list)
    contrasts: list[ContrastResult]


class Regimes(StudyResult):
    """What contrasts of arms find: verdicts, values with intervals and floors, what is short."""

    schema_: Literal["actds.regimes/1"] = Field(default="actds.regimes/1", alias="schema")
    limits: Limits
