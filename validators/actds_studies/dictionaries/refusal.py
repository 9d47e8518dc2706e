"""Refusals: what is wrong with a dictionary, and what its owner can do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from actds.errors import ActdsError

MAX_JSON_NBYTES = 1 << 22
"""Of a configuration; those of trainers have a few kilobytes."""
NEXT_STEP = (
    "Give a dictionary of this hook: a SAELens folder, Gemma Scope's params.npz, or the folder "
    "of a dictionary_learning ae.pt."
)
_Config = TypeVar("_Config", bound=BaseModel)


def refused(place: object, got: object, expected: str, next_step: str | None = None) -> ActdsError:
    """Return the error of a dictionary that is not used.

    Args:
        place: the file, and the tensor or field in it.
        got: what is there; cut to 200 characters of one line.
        next_step: what to do; the formats that are read when None.
    """
    words = " ".join(str(got).split())[:200]
    return ActdsError(
        "E015", str(place), got=words, expected=expected, next_step=next_step or NEXT_STEP
    )


def read_config(path: Path, model: type[_Config]) -> _Config:
    """Return the configuration beside the weights.

    Raises:
        ActdsError: E015 no such file, no JSON, or a field of another type.
    """
    try:
        if path.exists() and not path.is_file():
            raise refused(path, "no regular file", "a configuration in JSON")
        with path.open("rb") as file:
            text = file.read(MAX_JSON_NBYTES + 1)
    except OSError as error:
        raise refused(path, error.strerror or error, "a file that can be read") from None
    if len(text) > MAX_JSON_NBYTES:
        raise refused(path, f"more than {MAX_JSON_NBYTES:,} bytes", "a configuration in JSON")
    try:
        found = model.model_validate_json(text)
        # The last of two is no more what is meant than the first.
        json.loads(text, object_pairs_hook=_unique)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Input should be ")
        if first["type"] == "json_invalid":
            raise refused(path, words, "a configuration in JSON") from None
        if first["type"] == "missing":
            raise refused(path, f"no {field}", "a configuration with it") from None
        raise refused(f"{path} {field}", repr(first["input"]), words) from None
    except ValueError as error:
        raise refused(path, error, "a configuration in JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} twice")
