"""Messages of the census as lines of JSON, and back: what a journal is made of.

Beside the token's way; imports the messages only. Driven by the fields and types of the message
classes, so a new field needs no line here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from functools import lru_cache
from typing import Any

import numpy as np

from actds_writers.messages import (
    ClientFacts,
    RequestArrived,
    RequestFinished,
    StepExecuted,
    StepLost,
    StepScheduled,
)

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        RequestArrived,
        StepScheduled,
        StepExecuted,
        StepLost,
        RequestFinished,
        ClientFacts,
    )
}
"""The messages that a census takes, by their name in a journal."""
_SCALARS = (bool, int, float, str)


def to_line(message: object) -> bytes:
    """Return one line of JSON, ``["Kind", {fields}]`` with its line end.

    Arrays are lists of integers, bytes are hexadecimal; a number that JSON lacks is ``null``.
    """
    document = [type(message).__name__, _plain(message)]
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> object:
    """Return the message that a line holds.

    Raises:
        ValueError: no JSON, no message of the census, or a field that is not of its type.
    """
    document = json.loads(line)
    if not isinstance(document, list) or len(document) != 2 or document[0] not in KINDS:
        raise ValueError(f"no message of a census: {line[:60]!r}")
    return _typed(KINDS[document[0]], document[1])


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(hint: Any, value: Any) -> Any:
    """Return a JSON value as the type that a field asks for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value)
    if origin is np.ndarray:
        return _array(value, typing.get_args(arguments[1])[0])
    if origin is tuple:
        _require(isinstance(value, list), value, "a list")
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is dict:
        _require(isinstance(value, dict), value, "an object")
        return {key: _typed(arguments[1], item) for key, item in value.items()}
    if origin is typing.Literal:
        _require(value in arguments, value, f"one of {arguments}")
        return value
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast("type", hint), value)
    if hint is bytes:
        _require(isinstance(value, str), value, "hexadecimal digits")
        return bytes.fromhex(value)
    if hint is float:
        _require(type(value) in (int, float), value, "a number")
        return float(value)
    _require(hint in _SCALARS and type(value) is hint, value, str(hint))
    return value


def _one_of(arguments: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in arguments:
        return None
    for argument in arguments:
        if argument is not type(None):
            try:
                return _typed(argument, value)
            except ValueError:
                continue
    raise ValueError(f"{value!r:.60} is none of {arguments}")


def _array(value: Any, dtype: Any) -> np.ndarray:
    _require(isinstance(value, list), value, "a list of numbers")
    found = np.array(value) if value else np.empty(0, dtype)
    _require(found.ndim == 1 and found.dtype.kind == np.dtype(dtype).kind, value, str(dtype))
    return found.astype(dtype)


def _record(kind: type, value: Any) -> Any:
    _require(isinstance(value, dict), value, kind.__name__)
    hints = _hints(kind)
    unknown = value.keys() - hints.keys()
    _require(not unknown, sorted(unknown), f"fields of {kind.__name__}")
    try:
        return kind(**{name: _typed(hints[name], item) for name, item in value.items()})
    except TypeError as error:
        raise ValueError(str(error)) from None


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _require(condition: bool, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{value!r:.60} instead of {expected}")
