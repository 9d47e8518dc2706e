"""The result of a comparison of trained dictionaries, ``actds.stability/1``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from actds_validators.sections import Document, LimitsSection, Section, Share

PairKind = Literal["same start", "other order", "other seed"]
ScoredRows = Literal["all", "prefill", "decode", "rare tokens"]
"""Of the held-out rows of an arm, those that are scored together."""
Outcome = Literal["within the floor", "beyond the floor", "undecided"]
Measure = Literal["matched", "nearest", "share_70", "share_90", "kept", "split", "merged", "gone"]
"""Numbers of a `Likeness`: four of directions, four of its features."""
Floor = Literal["other seed", "other order"]
"""What two dictionaries of one arm differ in: the start and the order, or the order alone."""


class Limits(LimitsSection):
    """The settings: how dictionaries are trained, and how they are compared."""

    options: ClassVar = frozenset(
        {"seeds", "seed", "features", "k", "rows", "epochs", "batch", "learning_rate"}
        | {"held_out", "max_memory"}
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
    margin: float = Field(
        default=0.02, gt=0, description="difference of matched cosines that counts as none"
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


class CrossValue(Section):
    """What dictionaries of one arm leave unexplained of held-out rows of an arm."""

    trained_on: str
    rows_of: str
    rows: ScoredRows
    n_rows: int
    n_requests: int
    fvu: float | None = Field(description="mean over seeds; of these rows' own variance")
    low: float | None = Field(default=None, description="of the 95 % interval, over requests")
    high: float | None = None
    seeds_low: float | None = Field(default=None, description="least of the seeds")
    seeds_high: float | None = Field(default=None, description="largest of the seeds")
    fvu_reference: float | None = Field(
        default=None, description="of the variance of the reference's rows"
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
    next_steps: list[str] = Field(description="what to do, the most pressing first")


class Rare(Section):
    """Which tokens are rare: the least frequent that make a tenth of the reference's rows."""

    most: int = Field(description="times that a rare token comes in the reference's rows at most")
    share: Share = Field(description="of the reference's rows")


class Stability(Document):
    """What the harvest changes in dictionaries that are trained on it, beside what chance does."""

    schema_: Literal["actds.stability/1"] = Field(default="actds.stability/1", alias="schema")
    limits: Limits
    hook: str
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
