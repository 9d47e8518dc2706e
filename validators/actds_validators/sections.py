"""What documents of results and their pages are made of: sections, limits, what a dataset is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from actds.errors import ActdsError, not_installed

if TYPE_CHECKING:
    from actds.dataset.catalog import Catalog


def need_extra(*more: str) -> None:
    """Raise E011 when a package of the extra ``audit``, or one that is named, is not installed."""
    for name in ("scipy", *more):
        if find_spec(name) is None:
            raise not_installed(name, "audit", "actds audit")


Settings = TypeVar("Settings", bound=BaseModel)
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the result: frozen, finite numbers only, no unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )


class Document(Section):
    """A whole result, which JSON holds and gives back."""

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the result of a JSON text.

        Raises:
            pydantic.ValidationError: it is no result of this version.
        """
        return cls.model_validate_json(text)


class LimitsSection(Section):
    """Limits of a study or an audit: the only place of their defaults, ranges and words.

    ``options`` are fields that are no threshold, as a seed: each is an option of the command. All
    others are given by ``--limit NAME=VALUE``.
    """

    options: ClassVar[frozenset[str]] = frozenset({"seed"})

    @classmethod
    def thresholds(cls) -> dict[str, FieldInfo]:
        """Return the fields that ``--limit`` sets, by name."""
        return {name: f for name, f in cls.model_fields.items() if name not in cls.options}


class OfDataset(Document):
    """A result of one dataset."""

    schema_: str
    limits: LimitsSection
    dataset: str = Field(description="its path")
    digest: str = Field(description="of its seal")
    models: list[str]
    engines: list[str]
    started_ns: int


def settings_of(
    kind: type[Settings], given: Settings | Mapping[str, float | str] | None
) -> Settings:
    """Return the limits that were given, the others by default.

    Raises:
        ActdsError: E009 ``limits NAME``: out of range, or unknown, with the nearest name.
    """
    if isinstance(given, kind):
        return given
    try:
        return kind.model_validate(dict(given or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name, got = str(first["loc"][0]), str(first["input"])[:80]
        expected = str(first["msg"]).lower().removeprefix("input should be ")
        next_step = None
        if first["type"] == "extra_forbidden":
            near = get_close_matches(name, kind.model_fields, 1, 0.5)
            got, expected = "no such limit", f"one of {', '.join(kind.model_fields)}"
            more = "actds schema limits says what each of them is."
            next_step = f"Did you mean {near[0]}? {more}" if near else more
        place = f"limits {name[:80]}"
        raise ActdsError("E009", place, got=got, expected=expected, next_step=next_step) from None


@dataclass(frozen=True)
class About:
    """What a dataset is, as the head of every page says it, beyond what a result holds.

    ``models``: one per run that has another. ``started_ns``: of the first run, wall clock.
    """

    models: tuple[str, ...]
    engines: tuple[str, ...]
    hooks: tuple[str, ...]
    started_ns: int
    command: str


def about(catalog: Catalog, command: str) -> About:
    """Return what a dataset is, from its genesis and its run records."""
    return About(
        models=recorded(catalog, "model.name"),
        engines=recorded(catalog, "engine.name", "engine.version"),
        hooks=tuple(f"{h.name} ({h.d_model:,} × {h.dtype})" for h in catalog.genesis.hooks),
        started_ns=min(
            (run.started_ns for run in catalog.runs.values()), default=catalog.genesis.created_ns
        ),
        command=command,
    )


def recorded(catalog: Catalog, *fields: str) -> tuple[str, ...]:
    """Return the values of fields that the runs of a dataset know, joined, each once."""
    runs = (
        [run.fields[name].value for name in fields if name in run.fields]
        for run in catalog.runs.values()
    )
    words = (" ".join(str(value) for value in values if value is not None) for values in runs)
    return tuple(dict.fromkeys(text for text in words if text))
