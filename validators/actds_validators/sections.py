"""What the documents of results are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Section", "Share"]

Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the result: frozen, finite numbers only, no unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )
