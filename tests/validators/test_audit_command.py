"""The command: what it prints and writes, how it ends, and what it says when it cannot."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds_studies.attention import result as attention_result
from actds_studies.regimes import result as regimes_result
from actds_studies.stability import result as stability_result
from actds_testing.places import SCHEMAS
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_validators.audit.result import Audit, Limits

SCHEMA = SCHEMAS / "audit.json"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["audit", *(str(arg) for arg in args)], prog_name="actds")


def made(path: Path, name: str, seed: int = 1, **changes: object) -> Path:
    options = {"n_steps": 300, **changes}
    return write_dataset(simulate(replace(SCENARIOS[name], **options), seed), path)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a dataset for each verdict."""
    root = tmp_path_factory.mktemp("command")
    return {
        "PASS": made(root / "pass", "none", n_steps=150, prefix_share=0.0),
        "WARN": made(root / "warn", "mnar_projection", n_steps=1500, rate=0.04, strength=0.5),
        "INCONCLUSIVE": made(root / "inconclusive", "mcar_steps", rate=0.03, readouts=False),
        "FAIL": made(root / "fail", "heavy", n_steps=150),
    }


@pytest.fixture
def no_audit(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let the audit note that it began, and do nothing."""
    audited: list[object] = []
    monkeypatch.setattr(
        "actds_validators.audit.run.audit_dataset", lambda *args: audited.append(args)
    )
    return audited


def test_json_on_stdout_is_the_result_and_nothing_else(datasets: dict[str, Path]) -> None:
    told = run(datasets["INCONCLUSIVE"], "--json", "-", "--fail-on", "never")
    assert told.exit_code == 0 and told.stderr == ""
    document = json.loads(told.stdout)
    assert (document["format"], document["version"]) == ("actds.audit", "1") and document[
        "seal"
    ] == 1
    jsonschema.validate(document, json.loads(SCHEMA.read_bytes()))
    assert Audit.model_validate(document).as_json() == document
    assert document["verdict"]["level"] == "INCONCLUSIVE" and document["verdict"]["lacks"]


def test_files_are_written_where_told_and_the_page_says_so(
    datasets: dict[str, Path], tmp_path: Path
) -> None:
    html, out = tmp_path / "report.html", tmp_path / "audit.json"
    told = run(datasets["FAIL"], "--html", html, "--json", out)
    assert told.exit_code == 1
    assert sorted(tmp_path.iterdir()) == [out, html]
    page = html.read_text(encoding="utf-8")
    verdict = Audit.model_validate_json(out.read_text(encoding="utf-8")).verdict
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert verdict.level == "FAIL" and verdict.level in told.stdout
    assert str(html) in told.stdout and str(out) in told.stdout
    dataset = actds.open(datasets["FAIL"])
    for said in (page, told.stdout):
        assert f"actds audit {datasets['FAIL']} --html {html}" in said
        assert "simulated-1-layer" in said and all(hook in said for hook in dataset.hooks)
        assert "No: " in said and "of the computed rows were dropped" in said


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        ((), {"FAIL"}),
        (("--fail-on", "inconclusive"), {"FAIL", "INCONCLUSIVE"}),
        (("--fail-on", "warn"), {"FAIL", "INCONCLUSIVE", "WARN"}),
        (("--strict",), {"FAIL", "INCONCLUSIVE", "WARN"}),
        (("--fail-on", "never"), set()),
    ],
)
def test_the_exit_code_is_that_of_the_verdict(
    datasets: dict[str, Path], arguments: tuple[str, ...], failing: set[str]
) -> None:
    for level, path in datasets.items():
        told = run(path, *arguments)
        assert level in told.stdout
        assert told.exit_code == int(level in failing), (level, arguments, told.output)


@pytest.mark.parametrize(
    "arguments",
    [
        ("max_loss", "2"), ("fdr", "0"), ("min_events", "1"), ("negligible_bias", "0"),
        ("serious", "nan"), ("max_unresolved", "-0.1"), ("n_blocks", "9"), ("n-blocks", "many"),
    ],
)  # fmt: skip
def test_a_limit_out_of_range_is_refused_by_name(
    datasets: dict[str, Path], arguments: tuple[str, str]
) -> None:
    name, value = arguments
    told = run(datasets["PASS"], "--limit", f"{name}={value}")
    assert told.exit_code == 2 and told.stdout == ""
    assert told.stderr.startswith(f"E009 --limit {name.replace('-', '_')}: {value}; expected ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["max_loss"], "'max_loss' is not NAME=VALUE"),
        (["=2"], "'=2' is not NAME=VALUE"),
        (["max_loss=0.1", "max-loss=0.2"], "max_loss twice"),
        (["seed=2"], "seed is an option of its own: --seed"),
        (["max_los=0.1"], "E009 --limit max_los: no such limit; expected one of negligible_bias,"),
        (["max_los=0.1"], "Did you mean max_loss? actds schema limits says"),
    ],
)
def test_a_limit_that_is_none_is_refused_with_the_nearest(words: list[str], error: str) -> None:
    told = run("nowhere", *(word for limit in words for word in ("--limit", limit)))
    assert told.exit_code == 2 and error in told.stderr
    assert run("nowhere", "--seed", "-1").exit_code == 2


@pytest.mark.standard
@pytest.mark.parametrize("function", ["attention", "audit", "check", "regimes", "stability"])
def test_a_function_names_the_extra_that_is_missing(function: str) -> None:
    script = f"import sys; sys.modules['scipy'] = None; import actds; actds.{function}('none')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "E011 actds audit: the package scipy is not installed" in done.stderr


def test_python_gets_what_the_command_prints(datasets: dict[str, Path], tmp_path: Path) -> None:
    weights = tmp_path / "w.parquet"
    found = actds.audit(datasets["WARN"], limits={"max_loss": 0.5}, weights=weights)
    told = run(datasets["WARN"], "--limit", "max_loss=0.5", "--json", "-")
    taken = {"duration_s": 0, "peak_nbytes": 0}
    assert json.loads(told.stdout) | taken == found.result.as_json() | taken
    assert found.cells is not None and weights.exists()
    with pytest.raises(ActdsError) as raised:
        actds.audit(datasets["WARN"], limits={"max_loss": 2})
    assert raised.value.code == "E009" and raised.value.place == "limits max_loss"
    with pytest.raises(ActdsError) as raised:
        actds.audit(datasets["WARN"], limits={"max_los": 0.1})
    assert raised.value.code == "E009" and "max_los" in raised.value.place
    with pytest.raises(ActdsError) as raised:
        actds.audit(datasets["WARN"], weights=datasets["PASS"] / "w.parquet")
    assert raised.value.code == "E009"


def test_a_limit_moves_the_verdict_and_stands_in_the_result(datasets: dict[str, Path]) -> None:
    told = run(datasets["FAIL"], "--limit", "max_loss=0.9", "--json", "-")
    document = json.loads(told.stdout)
    assert document["limits"]["max_loss"] == 0.9 and document["verdict"]["kind"] != "heavy"


def test_every_limit_of_every_command_is_listed_with_its_meaning_and_its_default() -> None:
    told = CliRunner().invoke(cli, ["schema", "limits"]).stdout
    by_command = {part.split("\n")[0]: part for part in re.split(r"\n(?=\w)", told)}
    assert {*by_command} >= {"audit", "regimes", "stability"}
    names = {
        "regimes": regimes_result.Limits,
        "stability": stability_result.Limits,
        "attention": attention_result.Limits,
    }
    for command, limits in {"audit": Limits, **names}.items():
        listed = {line.split()[0] for line in by_command[command].splitlines()[1:]}
        assert listed == {*limits.model_fields} - limits.options
        for name in listed:
            field = limits.model_fields[name]
            line = rf"  {name} +{field.default:g} +{re.escape(str(field.description))}$"
            assert re.search(line, by_command[command], re.MULTILINE), name
    assert {"auc", "fdr", "fvu", "margin", "nats"} == {*stability_result.Limits.thresholds()}
    unknown = CliRunner().invoke(cli, ["schema", "limit"])
    assert "seal, " in unknown.stderr and "or limits" in unknown.stderr


def test_every_limit_that_is_given_stands_in_the_result(datasets: dict[str, Path]) -> None:
    given = {
        name: field.default + 1 if field.annotation is int else field.default / 2
        for name, field in Limits.model_fields.items()
    }
    options = [w for name, n in given.items() if name != "seed" for w in ("--limit", f"{name}={n}")]
    told = run(datasets["PASS"], *options, "--seed", given["seed"], "--json", "-")
    assert json.loads(told.stdout)["limits"] == given


def test_what_was_asked_for_stands_in_the_result(datasets: dict[str, Path], tmp_path: Path) -> None:
    plain = json.loads(run(datasets["PASS"], "--json", "-").stdout)["options"]
    assert plain == {"engine": "threads", "classes": None, "accepted": []}
    classes = tmp_path / "classes.parquet"
    table = {"request": [0, 999_999], "start": [0, 0], "stop": [1, 1], "class": ["a", "b"]}
    pq.write_table(pa.table(table), classes)
    told = run(datasets["PASS"], "--classes", classes, "--json", "-")
    asked = json.loads(told.stdout)["options"]
    named = asked.pop("classes")
    assert named["path"] == str(classes)
    assert named["sha256"] == hashlib.sha256(classes.read_bytes()).hexdigest()
    assert (named["n_matching"], named["n_ranges"], named["n_labelled"]) == (1, 2, 1)
    assert asked == {"engine": "threads", "accepted": []}


@pytest.mark.parametrize("option", ["--html", "--weights"])
def test_only_the_result_can_be_printed(
    datasets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run(datasets["PASS"].resolve(), option, "-")
    assert told.exit_code == 2 and told.stdout == "" and list(tmp_path.iterdir()) == []
    assert option in told.stderr and "only --json can print" in told.stderr


@pytest.mark.parametrize("fail_on", ["never", "fail", "inconclusive"])
def test_strict_and_another_fail_on_contradict(datasets: dict[str, Path], fail_on: str) -> None:
    told = run(datasets["PASS"], "--strict", "--fail-on", fail_on)
    assert told.exit_code == 2 and told.stdout == ""
    assert f"--strict is --fail-on warn and contradicts --fail-on {fail_on}" in told.stderr
    assert run(datasets["WARN"], "--strict", "--fail-on", "warn").exit_code == 1


def test_what_is_no_dataset_is_not_readable(tmp_path: Path) -> None:
    told = run(tmp_path / "nowhere")
    assert told.exit_code == 3 and told.stdout == ""
    assert "Traceback" not in told.stderr


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("option", ["--html", "--json", "--weights"])
@pytest.mark.parametrize("where", ["genesis", "root", "seal", "other", "link", "linked file", "up"])
def test_an_output_inside_a_dataset_is_refused_before_the_audit(
    datasets: dict[str, Path], tmp_path: Path, no_audit: list[object], option: str, where: str
) -> None:
    path, other = datasets["PASS"], datasets["WARN"]
    (tmp_path / "folder").symlink_to(path / "seal")
    (tmp_path / "file").symlink_to(other / "actds.json")
    (tmp_path / "plain").mkdir()
    out, of = {
        "genesis": (path / "actds.json", path),
        "root": (path / "report.html", path),
        "seal": (path / "seal" / "none" / "x.parquet", path),
        "other": (other / "seal" / "x.parquet", other),
        "link": (tmp_path / "folder" / "x", path),
        "linked file": (tmp_path / "file", other),
        "up": (tmp_path / "plain" / ".." / "folder" / "x", path),
    }[where]
    before = contents(path) | contents(other)
    told = run(path, option, out)
    got = f"E009 {option} {out}: inside the dataset {of.resolve()}; expected a path outside any"
    assert told.stderr.startswith(got), told.output
    assert told.exit_code == 2 and told.stdout == "" and no_audit == []
    assert contents(path) | contents(other) == before


def test_a_link_in_a_dataset_is_refused_wherever_it_leads(
    tmp_path: Path, no_audit: list[object]
) -> None:
    path = made(tmp_path / "acts", "none", n_steps=50)
    (path / "link").symlink_to(tmp_path / "outside")
    told = run(path, "--weights", path / "link")
    assert told.stderr.startswith(f"E009 --weights {path / 'link'}: inside the dataset {path}")
    assert told.exit_code == 2 and no_audit == []


@pytest.mark.parametrize("name", ["actds.json", "link"])
def test_an_output_that_would_pass_for_a_dataset_is_refused(
    datasets: dict[str, Path], tmp_path: Path, no_audit: list[object], name: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "actds.json")
    told = run(datasets["PASS"], "--json", tmp_path / name)
    assert told.stderr.startswith(f"E009 --json {tmp_path / name}: actds.json, by which ")
    assert told.exit_code == 2 and no_audit == []


@pytest.mark.parametrize("way", ["same", "spelt otherwise", "link", "hard link"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("--html", "--json"), ("--json", "--weights"), ("--html", "--weights"),
     ("--classes", "--html"), ("--classes", "--json"), ("--classes", "--weights")],
)  # fmt: skip
def test_two_options_that_name_one_file_are_refused(
    datasets: dict[str, Path],
    tmp_path: Path,
    no_audit: list[object],
    first: str,
    second: str,
    way: str,
) -> None:
    one = other = tmp_path / "file"
    one.write_text("kept")
    match way:
        case "spelt otherwise":
            other = tmp_path / ".." / tmp_path.name / "file"
        case "link":
            other = tmp_path / "link"
            other.symlink_to(one)
        case "hard link":
            other = tmp_path / "link"
            other.hardlink_to(one)
    told = run(datasets["PASS"], first, one, second, other)
    got = f"E009 {second} {other}: the file of {first}; expected a path of its own"
    assert told.stderr.startswith(got), told.output
    assert told.exit_code == 2 and told.stdout == "" and no_audit == []
    assert one.read_text() == "kept"


@pytest.mark.parametrize("option", ["--html", "--json", "--weights"])
def test_a_file_that_is_there_is_replaced_and_keeps_its_other_names(
    datasets: dict[str, Path], tmp_path: Path, option: str
) -> None:
    path = datasets["PASS"]
    before = contents(path)
    (tmp_path / "folder").mkdir()
    out, link = tmp_path / "folder" / "out", tmp_path / "link"
    out.hardlink_to(path / "actds.json")
    link.symlink_to(out)
    told = run(path, option, link)
    assert told.exit_code == 0, told.output
    assert contents(path) == before and link.is_symlink()
    assert out.read_bytes() != before[path / "actds.json"]
    assert list((tmp_path / "folder").iterdir()) == [out]


@pytest.mark.parametrize("option", ["--html", "--json", "--weights"])
def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_read(
    tmp_path: Path, option: str
) -> None:
    out = tmp_path / "none" / "file"
    told = run(tmp_path / "no dataset", option, out)
    assert told.exit_code == 4 and told.stdout == ""
    assert told.stderr.startswith(f"E503 {out}: no folder {out.parent}")
    assert "Make the folder, or give another path." in told.stderr


@pytest.mark.standard
def test_a_page_goes_through_a_pipe(datasets: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "actds", "audit", str(datasets["PASS"])]
    told = subprocess.run(
        [*command, "--html", "/dev/stdout"], capture_output=True, text=True, check=True
    )
    assert told.stdout.lower().startswith("<!doctype html>") and "</html>" in told.stdout


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_named(datasets: dict[str, Path], option: str) -> None:
    told = run(datasets["PASS"], option, "/dev/full")
    assert told.exit_code == 4
    assert told.stderr.startswith("E503 /dev/full: No space left on device")


@pytest.mark.standard
@pytest.mark.parametrize(
    ("package", "arguments", "needed"),
    [("scipy", (), True), ("jinja2", ("--html", "r.html"), True),
     ("jinja2", (), False)],
)  # fmt: skip
def test_a_missing_extra_is_named(
    datasets: dict[str, Path],
    tmp_path: Path,
    package: str,
    arguments: tuple[str, ...],
    needed: bool,
) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from actds.cli import main; main()"
    command = [sys.executable, "-c", script, "audit", str(datasets["PASS"]), *arguments]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "Traceback" not in told.stderr
    if not needed:
        assert told.returncode == 0, told.stderr
        return
    assert told.returncode == 2 and told.stdout == ""
    assert told.stderr.startswith(f"E011 actds audit: the package {package} is not installed")
    assert "pip install '.[audit]'" in told.stderr
    assert list(tmp_path.iterdir()) == []
