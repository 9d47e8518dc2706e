"""Sampling parameters on record: what a request, or a whole run, was sampled with, in words.

They stand in the column ``sampling`` of the table ``requests`` and in the field
``sampling.params`` of the run record. Values may be long (a JSON schema, a list of biases) and have
floats, which no document of a dataset has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

MAX_TEXT = 256
"""Characters of a value that is kept in words; of a longer one its digest is."""


def in_words(value: Any) -> Any:
    """Return a parameter as canonical JSON can hold it.

    A float is the shortest decimal text that gives it, and what would take more than ``MAX_TEXT``
    characters is ``{"n": characters, "sha256": digest}`` of its JSON.
    """
    plain = _plain(value)
    if len(text := _text(plain)) > MAX_TEXT and isinstance(plain, dict):
        plain = {key: in_words(member) for key, member in plain.items()}
    if len(_text(plain)) <= MAX_TEXT:
        return plain
    return {"n": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _text(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, float):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        public = [field.name for field in fields(value) if not field.name.startswith("_")]
        value = {name: getattr(value, name) for name in public}
    if isinstance(value, Mapping):
        # A member that is off is left out: the versions of an engine have different ones.
        members = {str(key): _plain(one) for key, one in value.items()}
        return {key: one for key, one in members.items() if one not in (None, False)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Set):
        return sorted(map(_plain, value))
    return str(value)
