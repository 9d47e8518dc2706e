"""Nine datasets of known truth: the first screen says what is wrong with each, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

import actds
from actds_testing.answers import CASES
from actds_testing.places import ROOT
from actds_validators.audit.place import TITLES


@pytest.mark.standard
@pytest.mark.parametrize("name", CASES)
def test_the_answer_names_what_is_wrong(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = case.make(tmp_path / name)
    result = actds.check(path)
    assert result.audit is not None, [f.line() for f in result.validation.findings]
    answer, places = result.audit.result.answer, result.audit.result.places
    assert (answer.place, answer.decision) == (case.place, case.decision)
    assert case.says in answer.words
    wrong = {place.name for place in places if place.level != "PASS"}
    assert wrong == {case.place, *case.beside} - {None}
    if case.place is not None:
        waived = actds.check(path, accept=[*wrong])
        assert waived.audit is not None and waived.audit.result.answer.decision == "yes"
        assert TITLES[case.place] in waived.answer and waived.exit_code(strict=True) == 0


@pytest.mark.standard
def test_a_loader_leaves_out_by_name_what_is_not_finite(tmp_path: Path) -> None:
    path = CASES["not-finite"].make(tmp_path / "acts")
    dataset = actds.open(path)
    rows = dataset.array("resid_post.1").torch(slice(None))
    finite = rows.isfinite().all(dim=1)
    assert 0 < finite.sum() < len(rows)
    given = [b for b in actds.Loader(path, batch=8, exclude="sink", drop_last=False)]
    assert sum(map(len, given)) == finite.sum()  # random rows have no sink
    assert all(batch.isfinite().all() for batch in given)


def test_the_guide_shows_every_case() -> None:
    guide = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
    for name, case in CASES.items():
        assert case.truth in guide and case.says in guide and f"answers/{name}.png" in guide
        assert (ROOT / "docs" / "answers" / f"{name}.png").stat().st_size > 10_000
