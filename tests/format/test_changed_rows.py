"""Rows that interventions changed are never fed as plain ones."""

from __future__ import annotations

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds_testing.places import VECTORS

CHANGED = VECTORS / "valid" / "interventions"


@pytest.fixture(scope="module")
def hook() -> str:
    return next(iter(actds.open(CHANGED).hooks))


def test_whoever_feeds_rows_is_refused_unless_the_expression_asks(hook: str) -> None:
    for where in (None, "position >= 0"):
        with pytest.raises(ActdsError, match="interventions changed some") as raised:
            actds.Loader(CHANGED, hook, batch=8, where=where)
        assert (raised.value.code, raised.value.place) == ("E014", "where")
        with pytest.raises(ActdsError, match="E014"):
            actds.load_dataset(CHANGED, hooks=[hook], where=where)


def test_a_partner_that_was_changed_is_refused_as_well(hook: str) -> None:
    plain, partner = VECTORS / "valid" / "minimal", {"steered": str(CHANGED)}
    with pytest.raises(ActdsError, match="interventions changed some"):
        actds.Loader(plain, hook, batch=8, paired=partner)
    loader = actds.Loader(plain, hook, batch=8, paired=partner, where="intervention >= 0")
    assert {f"steered/{hook}", hook} == set(next(iter(loader)))


def test_what_is_asked_for_comes_with_its_mark(hook: str) -> None:
    marks = actds.open(CHANGED).tokens()["intervention"].to_numpy()
    assert set(marks.tolist()) == {0, 1, 2, 3}
    for number in range(4):
        loader = actds.Loader(
            CHANGED, hook, batch=1, epochs=1, where=f"intervention == {number}",
            provenance=["request", "position", "phase"],
        )  # fmt: skip
        assert sum(len(np.atleast_1d(rows["position"])) for _, rows in loader) == int(
            (marks == number).sum()
        )


def test_no_profile_is_fitted_on_changed_rows() -> None:
    with pytest.raises(ActdsError, match="rows that interventions changed") as raised:
        actds.profile(CHANGED)
    assert raised.value.code == "E024"


def test_the_answer_of_an_audit_is_no() -> None:
    result = actds.audit(CHANGED).result
    place = next(place for place in result.places if place.name == "identity")
    assert place.level == "FAIL" and "interventions" in place.headline
    assert result.answer.decision == "no"
