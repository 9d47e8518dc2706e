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
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from actds_writers.ipc.messages import (
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
    return _typed(KINDS[document[0]])(document[1])


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


@lru_cache(maxsize=256)
def _typed(hint: Any) -> Callable[[Any], Any]:
    """Return what turns a JSON value into the type that a field asks for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments)
    if origin is np.ndarray:
        return _array(np.dtype(typing.get_args(arguments[1])[0]))
    if origin is tuple:
        return _tuple(_typed(arguments[0]))
    if origin is dict:
        return _dict(_typed(arguments[1]))
    if origin is typing.Literal:
        return _literal(arguments)
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast("type", hint))
    if hint is bytes:
        return lambda value: bytes.fromhex(_checked(str, value))
    if hint is float:
        return _number
    if hint not in (bool, int, str):
        raise TypeError(f"no JSON form of {hint}")
    return lambda value: _checked(hint, value)


def _one_of(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    choices = [_typed(argument) for argument in arguments if argument is not type(None)]
    optional = type(None) in arguments

    def convert(value: Any) -> Any:
        if value is None and optional:
            return None
        for choice in choices:
            try:
                return choice(value)
            except ValueError:
                continue
        raise _wrong(value, f"one of {arguments}")

    return convert


def _tuple(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: tuple(map(item, _checked(list, value)))


def _dict(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {key: item(one) for key, one in _checked(dict, value).items()}


def _literal(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value not in arguments:
            raise _wrong(value, f"one of {arguments}")
        return value

    return convert


def _array(dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        found = np.array(value) if _checked(list, value) else np.empty(0, dtype)
        if found.ndim != 1 or found.dtype.kind != dtype.kind:
            raise _wrong(value, f"a list of {dtype}")
        return found.astype(dtype)

    return convert


def _record(kind: type) -> Callable[[Any], Any]:
    converters = {name: _typed(hint) for name, hint in typing.get_type_hints(kind).items()}

    def convert(value: Any) -> Any:
        unknown = _checked(dict, value).keys() - converters.keys()
        if unknown:
            raise _wrong(sorted(unknown), f"fields of {kind.__name__}")
        try:
            return kind(**{name: converters[name](item) for name, item in value.items()})
        except TypeError as error:
            raise ValueError(str(error)) from None

    return convert


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise _wrong(value, "a number")
    return float(value)


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # a bool is no int here
        raise _wrong(value, f"a {kind.__name__}")
    return value


def _wrong(value: Any, expected: str) -> ValueError:
    return ValueError(f"{value!r:.60} instead of {expected}")
