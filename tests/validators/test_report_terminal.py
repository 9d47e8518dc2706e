"""The terminal page of an audit: the same facts as the HTML page, in order of use."""

from __future__ import annotations

import pytest

from actds_testing.audit_results import CASES, audit, enormous, hostile
from actds_validators.audit.place import TITLES
from actds_validators.pages.report import render_lines
from actds_validators.pages.words import LOOKS


@pytest.mark.parametrize("name", CASES)
def test_first_lines_say_verdict_sentence_and_deciding_number(name: str) -> None:
    result = audit(name)
    lines = [line.text for line in render_lines(result)]
    verdict, answer = result.verdict, result.answer
    assert lines[0] == f"{LOOKS[answer.level].mark} {answer.words}"
    for place, line in zip(result.places, lines[1:], strict=False):
        assert place.headline in line and TITLES[place.name] in line
    assert lines[1 + len(result.places)] == answer.sentence
    said = f"Losses: {verdict.level} ({verdict.kind}), decided by {verdict.deciding.name} "
    losses = next(n for n, line in enumerate(lines) if line.startswith(said))
    assert lines[losses + 1] == f"  {verdict.sentence}"
    assert lines[losses + 2].startswith("  Worst-case bias of any mean:  ")
    assert lines[losses + 3].startswith("  Largest estimated bias:       ")
    assert all(any(step in line for line in lines) for step in verdict.next_steps)
    assert all(any(lack in line for line in lines) for lack in verdict.lacks)


def test_numbers_stand_with_the_side_of_their_limit() -> None:
    lines = [line.text for line in render_lines(audit("few"))]
    decided = "decided by independent loss events 7; limit ≥ 30: too little evidence"
    assert any(line.endswith(decided) for line in lines)
    assert audit("few").as_json()["verdict"]["deciding"]["must"] == "at least"
    checks = lines[lines.index("Checks") :]
    assert any("?" in line and "≥ 30" in line for line in checks)
    assert [line.style for line in render_lines(audit("few")) if "≥ 30" in line.text][-1] == "dim"
    assert any("share lost" in line and "≤ 5 %" in line for line in checks)
    assert any(line.split()[-6:-3] == ["1,182,114", "rows", "-"] for line in checks)


def test_accounting_adds_up_on_the_page_and_names_each_reason() -> None:
    text = "\n".join(line.text for line in render_lines(audit("heavy")))
    assert (
        "2,000,000 positions = 978,182 stored + 520,000 prefix-cache hits + 438,273 dropped + "
        "1,200 aborted + 2,345 never computed + 60,000 filtered"
    ) in text
    assert "328,704 dropped (23.2 % of the computed): queue_full" in text


def test_differences_stand_with_the_largest_first() -> None:
    result = audit("heavy")
    lines = [line.text for line in render_lines(result)]
    start = next(n for n, line in enumerate(lines) if line.startswith("Largest differences"))
    assert result.missingness is not None
    largest = max(result.missingness.differences, key=lambda d: abs(d.smd.value))
    assert lines[start + 2].split("  ")[1] == largest.covariate.label


def test_rejected_tests_stand_and_the_others_are_counted() -> None:
    lines = [line.text for line in render_lines(audit("load"))]
    assert any("2 of 10 tests rejected, 212 independent loss events" in line for line in lines)
    assert sum("999 shifts" in line or "212 blocks" in line for line in lines) == 2
    assert not any("naive" in line for line in lines)


def test_findings_of_the_census_stand_on_the_page() -> None:
    lines = [line for line in render_lines(audit("unexplained")) if "E401" in line.text]
    assert [line.style for line in lines] == ["bad"]


def test_no_line_holds_a_control_character_and_none_is_endless() -> None:
    for result in (hostile(), enormous()):
        lines = list(render_lines(result))
        assert all(line.text.isprintable() for line in lines)
        assert max(len(line.text) for line in lines) <= 1200
        assert len(lines) < 250
