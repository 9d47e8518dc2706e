"""Labels of requests: what users say of their prompts, as canonical JSON by name.

Spec: 0.1 section 6.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actds.errors import ActdsError
from actds.format import canonical
from actds.text import printable

if TYPE_CHECKING:  # the plugin of an engine that harvests nothing loads no Arrow
    import pyarrow as pa

Label = str | int | bool

MAX_LABELS = 32
MAX_LENGTH = 256
"""Characters of a name, and of a text."""
_EXPECTED = (
    f"1 to {MAX_LABELS} names, each with a text of at most {MAX_LENGTH} characters, an integer or "
    "a boolean"
)


def dump_labels(labels: Mapping[str, Label]) -> str | None:
    """Return labels as they stand in the table ``requests``, None for none."""
    return canonical.dump(dict(labels)).decode("ascii").rstrip("\n") if labels else None


def parse_labels(text: str, place: str) -> dict[str, Label]:
    """Return the labels of a request.

    Raises:
        ActdsError: E102 no canonical JSON; E103 no labels.
    """
    parsed = canonical.parse(f"{text}\n".encode(), place)
    if not isinstance(parsed, dict) or not 1 <= len(parsed) <= MAX_LABELS:
        raise ActdsError("E103", place, got=text[:80], expected=_EXPECTED)
    for name, value in parsed.items():
        is_label = isinstance(value, str | int) and len(str(value)) <= MAX_LENGTH
        if not is_label or not 1 <= len(name) <= MAX_LENGTH:
            got = f"{name!r:.80}: {value!r:.80}"
            raise ActdsError("E103", place, got=got, expected=_EXPECTED)
    return parsed


def label_text(value: Label) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value))


def label_words(labels: Mapping[str, Label]) -> list[str]:
    """Return labels with their names for people."""
    return [f"{printable(name)} {label_text(value)}" for name, value in labels.items()]


def label_table(column: pa.ChunkedArray) -> dict[str, pa.DictionaryArray]:
    """Return the labels of requests by name, ``(n,)`` each, null where a request has none.

    The values are JSON: ``"3"`` is a text and ``3`` a number.

    Raises:
        ActdsError: as ``parse_labels``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.dictionary_encode(column).unify_dictionaries().combine_chunks()
    each = [parse_labels(text, "labels") for text in texts.dictionary.to_pylist()]
    at = texts.indices.fill_null(len(each)).to_numpy()
    columns = {}
    for name in sorted({name for labels in each for name in labels}):
        values = [_as_json(labels, name) for labels in each] + [None]
        codes = pc.dictionary_encode(pa.array(values, pa.string()))
        columns[name] = pa.DictionaryArray.from_arrays(
            codes.indices.take(pa.array(at)), codes.dictionary
        )
    return columns


def _as_json(labels: Mapping[str, Label], name: str) -> str | None:
    return json.dumps(labels[name], ensure_ascii=False) if name in labels else None


def of_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return labels of one type, null for those of another.

    Args:
        column: of ``label_table``.
        kind: string, bool, or int64 for numbers: integers, and texts that are the shortest ones of
            fractions, since that is how these are written.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    codes = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    values = [json.loads(text) for text in codes.dictionary.to_pylist()]
    if pa.types.is_integer(kind):
        values = [_number(value) for value in values]
        if any(isinstance(value, float) for value in values):
            kind = pa.float64()
    else:
        wanted = str if pa.types.is_string(kind) else bool
        values = [value if isinstance(value, wanted) else None for value in values]
    return pa.array(values, kind).take(codes.indices)


def _number(value: Label) -> int | float | None:
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and repr(number) == value else None
