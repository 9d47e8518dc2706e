"""What commands print: one JSON document, or lines in colour on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import click

from actds.text import Line, printable

if TYPE_CHECKING:
    from pydantic import BaseModel

_COLOURS = {"title": "bold", "good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim"}


def envelope(name: str, facts: Mapping[str, Any], version: str = "1") -> dict[str, Any]:
    """Return the one form of what ``--json`` prints: its format, its version, then the facts."""
    return {"format": f"actds.{name}", "version": version, **facts}


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document on stdout, the only thing that a command with ``--json`` prints there."""
    click.echo(json.dumps(document, indent=2, sort_keys=True))


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines without control characters, in colour on a terminal."""
    if not sys.stdout.isatty():
        for line in lines:
            click.echo(printable(line.text))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text(printable(line.text), _COLOURS.get(line.style, "")), soft_wrap=True)


class ResultCommand(click.Command):
    """A command that prints or reads documents whose schemas ``actds schema`` knows."""

    def __init__(
        self,
        *args: Any,
        result: Callable[[], type[BaseModel]] | None = None,
        reads: Mapping[str, Callable[[], type[BaseModel]]] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.result = result
        self.reads = reads

    def thresholds(self) -> dict[str, tuple[str, str]]:
        """Return what ``--limit`` may set, by name: its default, and what it is."""
        return {}


def document_schema(
    model: type[BaseModel], mode: Literal["validation", "serialization"]
) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    schema = model.model_json_schema(by_alias=True, mode=mode)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
