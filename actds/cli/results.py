"""Results: commands of other rooms that print a document with a published schema.

Beside the command line. Imports click only: the model is loaded when somebody asks for its schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ResultCommand", "result_schema"]


class ResultCommand(click.Command):
    """A command whose ``--json`` prints one document, which ``actds schema`` knows by its name.

    Args:
        result: returns the model of the document.
    """

    def __init__(self, *args: Any, result: Callable[[], type[BaseModel]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.result = result


def result_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a document that a command prints; every field is always there."""
    schema = model.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
