"""What the documents of results are made of, and the extra that making one needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actds.errors import ActdsError, not_installed


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


def settings_of(kind: type[Settings], given: Settings | Mapping[str, float] | None) -> Settings:
    """Return the settings that were given, the others by default.

    Raises:
        ActdsError: E009 one that is out of range, or unknown.
    """
    if isinstance(given, kind):
        return given
    try:
        return kind.model_validate(dict(given or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        expected = str(first["msg"]).lower().removeprefix("input should be ")
        raise ActdsError("E009", name, got=str(first["input"]), expected=expected) from None
