"""One command for who only has a dataset: is it valid, and may I train on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import cli
from actds_testing.audit_results import audit, hostile
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_testing.synthetic import make_dataset
from actds_validators.audit.place import TITLES
from actds_validators.pages.index import Entry, page_beside
from actds_validators.pages.index import render as render_index
from actds_validators.sections import About

MARKED = tuple(f"  {mark} " for mark in "✓!?✗-")
# Verdict, and exit code as it is and with --strict.
CASES = {"PASS": (0, 0), "WARN": (0, 1), "INCONCLUSIVE": (0, 1), "FAIL": (1, 1)}


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["check", *(str(arg) for arg in args)], prog_name="actds")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dataset for each verdict."""
    root = tmp_path_factory.mktemp("check")

    def made(name: str, **changes: object) -> Path:
        options = {"n_steps": 150, **changes}
        scenario = replace(SCENARIOS[name], **options)  # type: ignore[arg-type]
        return write_dataset(simulate(scenario, 1), root / name)

    return {
        "PASS": made("none", prefix_share=0.0),
        "WARN": made("mnar_projection", n_steps=1500, rate=0.04, strength=0.5),
        "INCONCLUSIVE": made("mcar_steps", n_steps=300, rate=0.03, readouts=False),
        "FAIL": made("heavy"),
    }


@pytest.mark.parametrize("level", CASES)
def test_the_screen_has_the_answer_the_validation_and_the_verdict(
    datasets: dict[str, Path], level: str
) -> None:
    told = run(datasets[level])
    lines = told.stdout.splitlines()
    assert told.exit_code == CASES[level][0] and told.stderr == ""
    assert lines[0][2:] == actds.audit(datasets[level]).result.answer.words
    assert lines[1].startswith(f"VALID {datasets[level]} at level full: seal 1, digest ")
    names = [line[4:].split("  ")[0] for line in lines if line.startswith(MARKED)]
    assert names == list(TITLES.values())
    assert "What to do" in lines and len(lines) <= 24
    assert run(datasets[level], "--strict").exit_code == CASES[level][1]


def test_the_json_holds_what_validate_and_audit_print(datasets: dict[str, Path]) -> None:
    for level, path in datasets.items():
        told = run(path, "--json", "--strict")
        found = json.loads(told.stdout)
        assert (found["format"], found["version"]) == ("actds.check", "1")
        assert (found["valid"], found["verdict"]) == (True, level)
        assert found["exit_code"] == told.exit_code == CASES[level][1]
        assert found["ok"] == (level == "PASS")
        taken = {"duration_s": 0, "peak_nbytes": 0}
        audit = actds.audit(path).result.as_json()
        assert found["audit"] | taken == audit | taken
        validation = actds.validate(path).as_json(strict=True)
        assert found["validation"] | taken == validation | taken


def test_what_is_not_valid_is_not_audited(copy_dataset: Callable[[], Path], tmp_path: Path) -> None:
    path, html = copy_dataset(), tmp_path / "audit.html"
    damaged = next(path.glob("shards/*/tokens.parquet"))
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    told = run(path, "--html", html)
    assert told.exit_code == 1 and not html.exists()
    assert told.stdout.splitlines()[0] == "✗ No: it is not valid"
    assert f"REFUSED {path}" in told.stdout and "E201" in told.stdout
    assert "report: not written" in told.stdout
    found = json.loads(run(path, "--json").stdout)
    assert (found["valid"], found["verdict"], found["audit"], found["ok"]) == (
        False, None, None, False,
    )  # fmt: skip
    result = actds.check(path)
    assert result.audit is None and not result.is_valid and result.exit_code() == 1


def test_what_is_not_sealed_is_refused_with_the_next_step(tmp_path: Path) -> None:
    told = run(make_dataset(tmp_path / "open", sealed=False))
    assert told.exit_code == 1
    assert "E306" in told.stdout and "actds seal" in told.stdout


def test_what_is_no_dataset_ends_with_3(tmp_path: Path) -> None:
    told = run(tmp_path / "nope")
    assert told.exit_code == 3 and "E101" in told.stdout
    assert told.stdout.startswith("✗ No: it cannot be read as a dataset")
    assert json.loads(run(tmp_path / "nope", "--json").stdout)["exit_code"] == 3


def test_the_report_is_that_of_the_audit(datasets: dict[str, Path], tmp_path: Path) -> None:
    html = tmp_path / "audit.html"
    told = run(datasets["WARN"], "--html", html)
    assert f"report: {html}" in told.stdout
    page = html.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Yes, with these limits" in page


def test_a_report_in_no_folder_is_refused_before_the_dataset_is_read(
    datasets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr("actds_validators.check.check", lambda *args, **kwargs: read.append(args))
    told = run(datasets["PASS"], "--html", tmp_path / "no" / "audit.html")
    assert told.exit_code == 4 and "E503" in told.stderr and not read
    assert run(datasets["PASS"], "--html", "-").exit_code == 2 and not read


def test_without_the_extra_it_says_so_before_it_hashes(
    datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actds_validators.sections.find_spec", lambda name: None)
    with pytest.raises(actds.ActdsError, match=r"E011 .*(?s:.*)pip install '\.\[audit\]'"):
        actds.check(datasets["PASS"])
    assert run(datasets["PASS"]).exit_code == 2


def test_no_text_of_a_dataset_paints_the_terminal(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a\x1b[31m", n_requests=4)
    told = run(path)
    assert "\x1b" not in told.output and "\\x1b[31m" in told.stdout


# Several datasets


def test_each_of_several_datasets_has_its_screen_and_the_worst_code_counts(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    both = run(datasets["PASS"], datasets["WARN"])
    assert (
        both.exit_code == 0 and run(datasets["PASS"], datasets["WARN"], "--strict").exit_code == 1
    )
    screens = [run(datasets[level]).stdout for level in ("PASS", "WARN")]
    assert both.stdout == "\n".join(screens)
    assert run(datasets["FAIL"], datasets["PASS"]).exit_code == 1
    assert run(tmp_path / "nope", datasets["FAIL"], datasets["PASS"]).exit_code == 3
    assert run().exit_code == 2


def test_the_json_of_several_datasets_holds_that_of_each(datasets: dict[str, Path]) -> None:
    told = run(datasets["PASS"], datasets["FAIL"], "--json")
    found = json.loads(told.stdout)
    assert (found["format"], found["ok"], found["exit_code"]) == ("actds.check", False, 1)
    alone = [json.loads(run(datasets[level], "--json").stdout) for level in ("PASS", "FAIL")]
    for each, one in zip(found["datasets"], alone, strict=True):
        assert each["path"] == one["path"] and each["answer"] == one["answer"]
        assert set(each) == set(one) - {"format", "version"}


def test_the_index_has_a_row_for_each_dataset_that_links_to_its_own_page(
    datasets: dict[str, Path], copy_dataset: Callable[[], Path], tmp_path: Path
) -> None:
    damaged = copy_dataset()
    file = next(damaged.glob("shards/*/tokens.parquet"))
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    html = tmp_path / "index.html"
    paths = [*datasets.values(), damaged]
    told = run(*paths, "--html", html)
    assert told.exit_code == 1 and told.stdout.endswith(f"\nindex: {html}\n")
    source = html.read_text(encoding="utf-8")
    assert "1 yes, 1 yes with limits, 1 not known, 2 no" in source
    rows = re.findall(r'<tr class="\w+ noted">(.*?)</tr>\s*<tr class="\w+ note">(.*?)</tr>', source)
    assert len(rows) == 5
    for (level, path), (row, note) in zip(datasets.items(), rows, strict=False):
        audit = actds.audit(path).result
        link = re.search(r'<a href="([^"]+)">(.*?)</a>', row)
        assert link is not None and unescape(link[2]) == str(path)
        page = (tmp_path / link[1]).read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>") and audit.digest in page
        assert f"report: {tmp_path / link[1]}\n" in told.stdout
        row, note = unescape(row), unescape(note)
        place = audit.answer.place
        assert audit.answer.words in row and audit.answer.sentence in note
        assert audit.answer.level == level and (TITLES[place] if place else "<td>-</td>") in row
        assert f"Rows: {audit.accounting.captured:,} of" in note
        assert "Model: " in note and "Hooks: resid_post" in note and "Harvested: " in note
    row, note = rows[-1]
    assert "<a " not in row and str(damaged) in row and "it is not valid" in row
    assert "E201" in note
    assert {file.name for file in tmp_path.iterdir()} >= {"index.html", "index-1-none.html"}
    assert len(list(tmp_path.glob("index*.html"))) == 5  # none of what is not valid
    steps = source[source.index('id="next"') : source.index("</ol>")]
    assert str(damaged) in steps and str(datasets["PASS"]) not in steps


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/acts", "i-7-acts.html"),
        ("s3://bucket/runs/acts/", "i-7-acts.html"),
        ("..", "i-7-...html"),
        ("a/<b>\x1b 字\"'&?#%", "i-7--b-.html"),
        ("x" * 500, f"i-7-{'x' * 60}.html"),
    ],
)
def test_pages_lie_beside_the_index_whatever_the_datasets_are_called(path: str, name: str) -> None:
    page = page_beside(Path("out/i.html"), 7, path)
    assert page == Path("out") / name and quote(page.name) == page.name


def test_no_text_of_a_dataset_is_markup_of_the_index() -> None:
    result = hostile()
    known = About(("<i>model",), ("<i>engine",), ("<i>hook",), 0, "")
    entries = [
        Entry(f"<i>{result.path}", result.answer.words, result, known, page="a.html"),
        Entry("<i>\x1b", "No: it is not valid", why="<i>E201\x1b"),
    ]
    source = render_index(entries, "actds check <i>\x1b")
    assert "<i>" not in source and "<script" not in source and "\x1b" not in source
    assert source.count("&lt;i&gt;") >= 6
    many = render_index([*entries, *[entries[1]] * 600], "c")
    assert "and 102 more" in many
    passing = audit("negligible")
    source = render_index([Entry("a", passing.answer.words, passing)], "c")
    assert "Nothing: use them as they are." in source and "1 yes" in source.lower()
