"""Places: the seven between a source and a batch where rows go, and the answer over them.

Models of the result; `places` fills them and `answer` concludes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from actds.errors import ActdsError
from actds_validators.sections import Section, Share

PlaceName = Literal["source", "cache", "rules", "ends", "queues", "values", "identity"]
TITLES: dict[PlaceName, str] = {
    "source": "source",
    "cache": "prefix cache",
    "rules": "rules",
    "ends": "ends",
    "queues": "queues",
    "values": "values",
    "identity": "identity",
}
"""Every place in the order in which rows pass, with its name for people."""


def places_of(names: Sequence[str]) -> list[PlaceName]:
    """Return places by name.

    Raises:
        ActdsError: E009 no such place.
    """
    for name in names:
        if name not in TITLES:
            raise ActdsError(
                "E009", "accept", got=name[:80], expected=f"some of {', '.join(TITLES)}"
            )
    return [name for name in TITLES if name in names]


Level = Literal["PASS", "WARN", "FAIL", "INCONCLUSIVE"]
LEVELS: tuple[Level, ...] = ("PASS", "WARN", "INCONCLUSIVE", "FAIL")
"""From the best to the worst."""
Decision = Literal["yes", "yes, loaded like this", "yes, with limits", "not known", "no"]


class LeftOut(Section):
    """Records that no request was begun for, by reason."""

    what: Literal["skipped", "never begun", "not on record"]
    reason: str
    n: int = Field(description="records")
    n_tokens: int | None = Field(description="of their prompts; null where none is known")


class LengthBand(Section):
    """Prompts by length: of the source, and of those that were served."""

    low: int = Field(description="tokens of a prompt, at least")
    high: int = Field(description="at most")
    records: int
    served: int = Field(description="of the records")
    tokens: int
    served_tokens: int


class SourceAccount(Section):
    """What became of the records of the source."""

    records: int | None = Field(description="records read; null where no run says how many")
    served: int = Field(description="records that a request was begun for")
    left_out: list[LeftOut] = Field(description="the largest first")
    tokens: int = Field(description="prompt tokens of all records whose length is known")
    served_tokens: int
    unmeasured: int = Field(description="records whose length is not known")
    lengths: list[LengthBand] = Field(description="of the records whose length is known")
    length_shift: Share | None = Field(
        description="total variation of the length of the prompt that a prompt token is of, served "
        "against all; null where no length is known"
    )
    interrupted: list[str] = Field(description="runs that ended before their source did, and how")


class Worst(Section):
    """Of whom a place took the largest share."""

    kind: str = Field(description="what it is one of: role, position, length, label, run, ...")
    label: str
    n: int = Field(description="of it that were left out")
    of: int = Field(description="of it in all")
    unit: str


class Place(Section):
    """One place: how much went there, of whom most, what it can do to a mean, and what to do."""

    name: PlaceName
    level: Level = Field(description="of the dataset as it is, whatever was accepted")
    accepted: bool = Field(default=False, description="waived by the user, by name")
    loaded: dict[str, list[str]] = Field(
        default_factory=dict,
        description="arguments of a loader with which the place passes; empty where none do",
    )
    n: int | None = Field(description="what was left out or changed here; null if not known")
    of: int | None = Field(description="of so many")
    unit: str = Field(description="of both")
    share: Share | None
    worst: Worst | None = None
    bias: float | None = Field(
        description="of a mean over the rows, in standard deviations; null if not known"
    )
    bias_is: Literal["at most", "estimated"] = "at most"
    limit: str = Field(description="what it is compared with, in words")
    headline: str = Field(description="what went there, in a few words")
    sentence: str
    to_do: list[str] = Field(default_factory=list)

    @property
    def counts_as(self) -> Level:
        """Return the level in an answer: accepted it passes, and loaded as said it only warns."""
        if self.level == "PASS" or self.accepted:
            return "PASS"
        return "WARN" if self.loaded else self.level


class Answer(Section):
    """Whether to train on a dataset, over all places."""

    decision: Decision
    level: Level
    words: str = Field(description="the answer in a few words")
    place: PlaceName | None = Field(description="the place that decided; null where all pass")
    sentence: str
    load: str | None = Field(description="a loader with which the answer is yes; null if none")
    accepted: list[PlaceName] = Field(default_factory=list)
    near_misses: list[str] = Field(
        default_factory=list, description="what cost no row, and is one setting away from it"
    )
    next_steps: list[str] = Field(default_factory=list)
