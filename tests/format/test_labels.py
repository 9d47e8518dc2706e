"""Labels of requests: their one form, and as columns."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.format.labels import dump_labels, label_table, of_type, parse_labels

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LABELS = st.dictionaries(
    TEXTS.filter(bool), st.booleans() | st.integers(1 - 2**63, 2**63 - 1) | TEXTS, max_size=4
)


@settings(deadline=None)
@given(st.lists(LABELS, max_size=6))
def test_labels_come_back_from_their_text_and_by_name(each: list[dict[str, Any]]) -> None:
    texts = [dump_labels(labels) for labels in each]
    assert [text and parse_labels(text, "x") for text in texts] == [one or None for one in each]
    found = label_table(pa.chunked_array([pa.array(texts, pa.string())]))
    assert set(found) == {name for labels in each for name in labels}
    for name, column in found.items():
        told = [None if text is None else json.loads(text) for text in column.to_pylist()]
        assert [repr(value) for value in told] == [repr(labels.get(name)) for labels in each]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"b":1,"a":2}', "E102"), ('{"a": 1}', "E102"), ('{"a":1.5}', "E102"), ("{", "E102"),
        ('{"a":1,"a":1}', "E102"), ('{"a":"é"}', "E102"), (f'{{"a":{2**63}}}', "E102"),
        ("{}", "E103"), ("[1]", "E103"), ('"a"', "E103"), ('{"a":null}', "E103"),
        ('{"a":[1]}', "E103"), ('{"a":{}}', "E103"), ('{"":1}', "E103"),
        (json.dumps({"a": "x" * 257}, separators=(",", ":")), "E103"),
        (json.dumps({"x" * 257: 1}, separators=(",", ":")), "E103"),
        (json.dumps({f"{i:02}": 1 for i in range(33)}, separators=(",", ":")), "E103"),
    ],
)  # fmt: skip
def test_a_text_of_another_form_is_refused(text: str, code: str) -> None:
    with pytest.raises(ActdsError) as caught:
        parse_labels(text, "requests labels")
    assert (caught.value.code, caught.value.place) == (code, "requests labels")


def test_labels_of_another_type_are_not_known() -> None:
    values = ["three", 3, True, "0.5", "1e+22", "3", "007", "nan", None, False]
    texts = [None if v is None else json.dumps(v) for v in values]
    column = pa.array(texts, pa.string())
    assert of_type(column, pa.string()).to_pylist() == [
        "three", None, None, "0.5", "1e+22", "3", "007", "nan", None, None,
    ]  # fmt: skip
    # Fractions are written as texts, and are numbers again.
    assert of_type(column, pa.int64()).to_pylist() == [
        None, 3.0, None, 0.5, 1e22, None, None, None, None, None,
    ]  # fmt: skip
    assert of_type(column, pa.bool_()).to_pylist() == [
        None, None, True, None, None, None, None, None, None, False,
    ]  # fmt: skip
    large = pa.array([str(2**63 - 1), None], pa.string())
    assert of_type(large, pa.int64()).to_pylist() == [2**63 - 1, None]
