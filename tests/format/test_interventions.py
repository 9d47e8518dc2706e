"""Which positions interventions change follows from the run record and the request alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.format.interventions import (
    Edit,
    Intervention,
    applied,
    as_field,
    parse_field,
)

EDIT = Edit("resid_post.1", "add", 2.5, "ab" * 32)
parts = st.sampled_from([None, "prompt", "generated"])
starts = st.integers(0, 12)


@st.composite
def interventions(draw: st.DrawFn) -> tuple[Intervention, ...]:
    made = []
    for k in range(draw(st.integers(1, 4))):
        start = draw(starts)
        stop = draw(st.none() | st.integers(start + 1, start + 8))
        request = draw(st.sampled_from([(), (("external_id", "a*"),), (("external_id", "b"),)]))
        made.append(Intervention(f"i{k}", (EDIT,), draw(parts), (start, stop), request))
    return tuple(made)


def mark(items: tuple[Intervention, ...], name: str, n_given: int, position: int) -> int:
    """Return what section 7.11 says of one position, one intervention after the other."""
    for number, item in enumerate(items, 1):
        if item.request and not (name == "b" if item.request[0][1] == "b" else name[0] == "a"):
            continue
        if item.part is not None and (position < n_given) != (item.part == "prompt"):
            continue
        place = position - n_given if item.part == "generated" else position
        start, stop = item.positions
        if place >= start and (stop is None or place < stop):
            return number
    return 0


@given(interventions(), st.sampled_from(["a1", "b", "c"]), st.integers(0, 15))
def test_ranges_are_what_the_text_says_of_each_position(
    items: tuple[Intervention, ...], name: str, n_given: int
) -> None:
    ranges = applied(items, {"external_id": name}, n_given)
    for position in range(40):
        numbers = [part.number for part in ranges if part.start <= position < part.stop]
        assert numbers == [n for n in [mark(items, name, n_given, position)] if n]


@given(interventions())
def test_the_field_of_the_run_record_reads_back(items: tuple[Intervention, ...]) -> None:
    assert parse_field(as_field(items), "place") == items


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""}, {"name": "a b"}, {"part": "middle"}, {"positions": [3, 3]},
        {"positions": [-1, None]}, {"positions": [True, 4]}, {"request": []},
        {"request": [["name", "x"]]}, {"edits": []}, {"more": 1},
    ],
)  # fmt: skip
def test_another_text_is_refused(change: dict[str, object]) -> None:
    from actds.format import canonical

    fields = {**Intervention("i", (EDIT,)).as_json(), **change}
    text = canonical.dump([fields]).decode().strip()
    with pytest.raises(ActdsError, match="E103"):
        parse_field(text, "place")


def test_two_of_one_name_and_two_edits_of_one_hook_are_refused() -> None:
    item = Intervention("i", (EDIT,))
    for items in ((item, item), (Intervention("i", (EDIT, EDIT)),)):
        with pytest.raises(ActdsError, match="E103"):
            parse_field(as_field(items), "place")
