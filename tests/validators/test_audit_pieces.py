"""What the audit's passes are made of, piece by piece against brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.dataset.multiplicity import Servings
from actds.format.positions import Index
from actds_validators.audit.covariates import N_BITS, position_band
from actds_validators.audit.data import (
    CLASSES,
    StepRanges,
    class_words,
    explode,
    labels_of,
)
from actds_validators.audit.passes import ClassCounts

TOP = 2**32 - 1
Range = tuple[int, int, int, int]


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1)


# numbers and ranges ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(0, 40), (0, 2000), (10**12, 10**12 + 60), (0, 2**40), (TOP - 50, TOP)]
)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_an_index_gives_the_place_of_each_number(low: int, high: int, data: st.DataObject) -> None:
    number = st.integers(low, high)
    values = sorted(data.draw(st.sets(number, max_size=60)))
    asked = [*values, *data.draw(st.lists(number, max_size=40)), 0, TOP, low - 1, high + 1]
    index = Index(ints(values))
    places = {value: place for place, value in enumerate(values)}
    assert index.of(ints(asked)).tolist() == [places.get(value, -1) for value in asked]
    for value in {*values, *(value + 1 for value in values), low - 1}:  # alone, without one far off
        assert index.of(ints([value])).tolist() == [places.get(value, -1)]
    assert index.numbers(index.of(ints(values))).tolist() == values and len(index) == len(values)
    narrow = [value for value in asked if 0 <= value <= TOP]
    found = index.of(np.array(narrow, np.uint32))
    assert found.tolist() == [places.get(value, -1) for value in narrow]


def ranges(draw: Any, n_steps: int, base: int) -> list[Range]:
    """Return ranges that are disjoint within each step and request, in any order."""
    found = []
    for step in range(n_steps):
        for request in draw(st.sets(st.integers(0, 4), max_size=3)):
            cuts = sorted(draw(st.sets(st.integers(base, base + 30), max_size=6)))
            found += [(step, request, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return list(draw(st.permutations(found)))


@pytest.mark.parametrize("base", [0, 2**31 - 10, TOP - 30])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_intervals_number_their_positions_end_to_end(base: int, data: st.DataObject) -> None:
    found = ranges(data.draw, 4, base)
    columns = [ints([one[k] for one in found]) for k in range(4)]
    intervals = StepRanges(*columns)
    lines = [
        (step, request, position)
        for step, request, start, stop in sorted(found)
        for position in range(start, stop)
    ]
    number = {line: k for k, line in enumerate(lines)}
    asked = [
        (step, request, base + at)
        for step in range(-1, 5)
        for request in range(7)
        for at in range(-1, 32, 2)
    ] + lines
    got = intervals.find(*(ints([one[k] for one in asked]) for k in range(3)))
    assert got.tolist() == [number.get(one, -1) for one in asked]
    assert intervals.n_positions == len(lines)


@pytest.mark.parametrize("base", [0, 2**31 - 10, TOP - 30])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_servings_count_how_often_each_position_was_served(base: int, data: st.DataObject) -> None:
    request = st.sampled_from([0, 1, 2, 7, 2**31 - 1, 2**31, TOP])
    end = st.integers(base, base + 30)
    spans = data.draw(st.lists(st.tuples(request, end, end), max_size=12))
    served = Counter(
        (one, position) for one, start, stop in spans for position in range(start, stop)
    )
    asked = [
        (one, position)
        for one in (0, 1, 2, 3, 7, 8, 2**31 - 1, 2**31, TOP)
        for position in range(max(0, base - 2), base + 33)
    ]
    servings = Servings(*(ints([one[k] for one in spans]) for k in range(3)))
    got = servings.of(ints([one for one, _ in asked]), ints([at for _, at in asked]))
    assert got.tolist() == [served[one] for one in asked]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([0, 5, 2**31, TOP - 40]), st.integers(0, 40)), max_size=20),
    st.integers(1, 50),
)
def test_exploded_ranges_are_their_positions_in_order(
    found: list[tuple[int, int]], size: int
) -> None:
    start, stop = ints([a for a, _ in found]), ints([a + n for a, n in found])
    wanted = [(k, a + i) for k, (a, n) in enumerate(found) for i in range(n)]
    got: list[tuple[int, int]] = []
    for which, position in explode(start, stop, size):
        assert len(which) <= size + 40
        got += zip(which.tolist(), position.tolist(), strict=True)
    assert got == wanted


def label_table(rows: list[tuple[int, int, int, str]], runs: list[str] | None = None) -> pa.Table:
    columns: dict[str, Any] = {
        name: pa.array([row[k] for row in rows], pa.uint32())
        for k, name in enumerate(("request", "start", "stop"))
    }
    columns["class"] = pa.array([row[3] for row in rows], pa.string())
    return pa.table(columns if runs is None else {**columns, "run": pa.array(runs, pa.string())})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_a_label_is_that_of_the_range_around_a_position(data: st.DataObject) -> None:
    rows = [
        (request, start, stop, data.draw(st.sampled_from(["system", "user", "code"])))
        for _, request, start, stop in ranges(data.draw, 1, data.draw(st.sampled_from([0, 2**31])))
    ]
    words = class_words(label_table(rows))
    labels = labels_of(label_table(rows), "r")
    asked = [(request, p) for request in range(6) for _, a, b, _ in rows for p in (a, b - 1, b)]
    got = labels.of(ints([one for one, _ in asked]), ints([at for _, at in asked]))
    around = [
        [words.index(word) for r, a, b, word in rows if r == request and a <= at < b]
        for request, at in asked
    ]
    assert got.tolist() == [found[0] if found else -1 for found in around]


def test_labels_of_another_run_label_nothing_and_keep_their_code() -> None:
    table = label_table([(0, 0, 5, "user"), (0, 0, 5, "code"), (1, 2, 3, "user")], ["a", "b", "b"])
    asked = ints([0, 1]), ints([2, 2])
    assert class_words(table) == ("code", "user")
    assert labels_of(table, "a").of(*asked).tolist() == [1, -1]
    assert labels_of(table, "b").of(*asked).tolist() == [0, 1]
    assert labels_of(table, "c").of(*asked).tolist() == [-1, -1]


# counts ---------------------------------------------------------------------------------------


def test_class_counts_are_those_of_one_row_at_a_time() -> None:
    rng = np.random.default_rng(2)
    n = 800
    special, prefill = rng.random(n) < 0.1, rng.random(n) < 0.5
    served, label = np.maximum(0, rng.integers(-6, 4, n)), rng.integers(-1, 2, n)
    position = rng.choice([0, 1, 2, 3, 6, 7, 2**31 - 1, 2**31, TOP - 1, TOP], n)
    band, bits = position_band(position), rng.integers(0, N_BITS, n)
    assert band.tolist() == [int(at + 1).bit_length() - 1 for at in position]
    counts = ClassCounts(("code", "user"))
    wanted: dict[str, Counter[tuple[str, int, int]]] = {
        name: Counter() for name in ("stored", "reused", "lost")
    }
    for some, lost in ((slice(0, 500), False), (slice(500, n), True), (slice(0, 0), False)):
        one = ClassCounts(("code", "user"))
        one.count(special=special[some], prefill=prefill[some], band=band[some], bits=bits[some],
                  served=None if lost else served[some], label=label[some])  # fmt: skip
        counts.add(one)
        for k in range(n)[some]:
            word = "prompt" if prefill[k] else "generated"
            word = "shared prefix" if served[k] and not lost else word
            word = "special" if special[k] else word
            word = ("code", "user")[label[k]] if label[k] >= 0 else word
            key = word, int(band[k]), int(bits[k])
            wanted["lost" if lost else "stored"][key] += 1
            if served[k] and not lost:
                wanted["reused"][key] += int(served[k])
    assert counts.words == (*CLASSES, "code", "user")
    for name, table in wanted.items():
        found = getattr(counts, name)
        assert found.sum() == sum(table.values()) > 0
        assert all(found[counts.words.index(w), b, r] == m for (w, b, r), m in table.items())
    assert counts.repeated == np.count_nonzero(served[:500])
    assert counts.largest == served[:500].max()
