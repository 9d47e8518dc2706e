"""The command line: the facts, loud where it matters, errors in one line and never a traceback."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import actds
from actds.cli import ENTRY_POINTS, GROUPS, cli
from actds.cli import reference as cli_reference
from actds.errors import CODES, ActdsError
from actds_testing import places
from actds_testing.synthetic import make_dataset
from actds_validators.validate.validation import Level

DOCS = places.DOCS / "cli.md"


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="actds")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("cli") / "d", n_requests=12, drops=True)


@pytest.fixture
def dataset(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "d")


HEAVY = (
    "torch pyarrow numpy zarr vllm datasets pydantic rich duckdb scipy jinja2 ml_dtypes numcodecs"
)


def loaded(*args: str) -> str:
    """Return which heavy modules, and which modules of commands, a command loads."""
    script = (
        "import sys; from actds.cli import cli\n"
        f"cli({list(args)!r}, standalone_mode=False)\n"
        f"print([m for m in sys.modules if m in {HEAVY.split()!r}"
        " or m.startswith(('actds_writers.cli', 'actds_validators.cli.'))])"
    )
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    return told.stdout


@pytest.mark.standard
def test_help_loads_nothing_heavy_and_no_command_of_another_package() -> None:
    told = loaded("--help")
    assert re.search(r"^  validate +Check datasets before training on them\.$", told, re.MULTILINE)
    assert told.endswith("\n[]\n")


@pytest.mark.standard
def test_a_short_command_spares_pandas_to_itself_alone(original: Path) -> None:
    script = (
        "import sys; from actds.cli import main\n"
        "for command in ('info', 'validate'):\n"
        f"    sys.argv = ['actds', '--debug', command, {str(original)!r}]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'pandas' not in sys.modules\n"
        "import pyarrow\n"
        "assert pyarrow.table({'a': [1]}).to_pandas()['a'].tolist() == [1]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_list_of_commands_says_what_their_help_says() -> None:
    from actds_studies.cli import SUMMARIES as studies
    from actds_validators.cli import SUMMARIES as validators
    from actds_writers import SUMMARIES as writers

    ctx = click.Context(cli)
    for name, summary in (studies | validators | writers).items():
        command = cli.get_command(ctx, name)
        assert command is not None and command.help is not None
        assert command.help.splitlines()[0] == summary
    assert {*studies, *validators, *writers} == set(cli.list_commands(ctx)) - set(cli.commands)


def test_help_lists_every_command_once_in_its_group_and_the_example_runs() -> None:
    ctx = click.Context(cli)
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == cli.list_commands(ctx)
    shown = run("--help").output
    sections = re.split(r"^(\w[\w ]*):$", shown, flags=re.MULTILINE)
    listed = {
        title: tuple(re.findall(r"^  ([a-z]+) +\S", text, re.MULTILINE))
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
        if title != "Options"
    }
    assert listed == GROUPS
    assert shown.index("actds write") < shown.index("actds check") < shown.index("Options:")


def test_a_package_that_is_in_no_group_is_listed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = importlib.metadata.EntryPoint("zap", "actds_testing.cli_tree:leaves", ENTRY_POINTS)
    monkeypatch.setattr("actds.cli.plugins", lambda: {"zap": added})
    listed = run("--help").output.split("Other packages:")[1]
    assert listed.split()[0] == "zap"
    assert "validate" not in run("--help").output  # none of its package is installed


@pytest.mark.standard
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_as_documented(shell: str) -> None:
    [line] = re.findall(rf"`([^`]*_ACTDS_COMPLETE={shell}_source actds[^`]*)`", DOCS.read_text())
    assert "eval" in line or "source" in line
    environment = {**os.environ, "_ACTDS_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-m", "actds"]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_ACTDS_COMPLETE=" + shell + "_complete" in script.stdout
    words = {"COMP_WORDS": "actds va", "COMP_CWORD": "1"} if shell != "fish" else {
        "COMP_WORDS": "actds va", "COMP_CWORD": "va"
    }  # fmt: skip
    environment |= {"_ACTDS_COMPLETE": f"{shell}_complete", **words}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "validate" in done.stdout and "audit" not in done.stdout


def test_what_is_mistyped_gets_a_suggestion() -> None:
    for args, words in (
        (("validte", "d"), "Did you mean 'validate'?"),
        (("info", "d", "--jsn"), "--json"),
        (("frobnicate",), "No such command 'frobnicate'."),
    ):
        told = run(*args)
        assert (told.exit_code, told.stdout) == (2, "") and words in told.stderr
    assert "Did you mean" not in run("frobnicate").stderr


@pytest.mark.parametrize(
    "name",
    [
        "card",
        "info",
        "explain",
        "pull",
        "push",
        "schema",
        "seal",
        "recompress",
        "shuffle",
        "validate",
        "check",
        "view",
    ],
)
def test_help_ends_with_examples(name: str) -> None:
    told = run(name, "--help").output
    assert told.count(f"  actds {name}") >= 2 and "Examples:" in told


@pytest.mark.parametrize(
    "name", ["card", "info", "seal", "recompress", "validate", "check", "view"]
)
def test_a_missing_path_says_so(name: str, tmp_path: Path) -> None:
    told = run(name, tmp_path / "nope")
    assert told.exit_code == 3
    assert f"E101 {tmp_path / 'nope'}: no such path; expected a dataset." in told.output


@pytest.mark.standard
def test_the_reference_is_that_of_the_commands(tmp_path: Path) -> None:
    # In a process of its own: a command that was called by itself remembers its help option.
    path = tmp_path / "cli.md"
    subprocess.run([sys.executable, "-m", "actds.cli.reference", str(path)], check=True)
    assert DOCS.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), (
        f"run: {cli_reference.REGENERATE}"
    )


def test_every_command_and_option_has_help() -> None:
    ctx = click.Context(cli)
    for name in cli.list_commands(ctx):
        command = cli.get_command(ctx, name)
        assert command is not None and command.help, name
        for option in command.params:
            assert isinstance(option, click.Argument) or getattr(option, "help", None), option.name


def test_the_version_is_that_of_the_package() -> None:
    assert actds.__version__ == importlib.metadata.version("actds")
    assert run("--version").output == f"actds {actds.__version__}\n"


def test_info_tells_what_where_from_and_what_is_missing(original: Path) -> None:
    result = run("info", original)
    assert (result.exit_code, result.stderr) == (0, "")
    facts = json.loads(run("info", original, "--json").output)
    assert (facts["format"], facts["version"]) == ("actds.info", "1")
    page = result.output
    rows = facts["totals"]["rows"]
    for words in (
        facts["digest"],
        f"Rows: {rows:,} (",
        "resid_post.0",
        "observed  engine.name",
        "null: a simulated run has none",
        "requests     12 (",
        f"{facts['totals']['dropped']} positions dropped",
        "queue_full",
        "1 prompt skipped (5 tokens): E004",
    ):
        assert words in page
    assert "SEALED" not in page
    ((ratio,),) = {tuple(re.findall(r"resid_post\.0 .* ([0-9.]+)x$", page, re.MULTILINE))}
    hook = facts["hooks"][0]
    assert float(ratio) == pytest.approx(hook["nbytes"] / hook["stored_nbytes"], abs=1e-3)
    sizes = [p.stat().st_size for p in original.glob("shards/*/acts.zarr/resid_post.0/c/0/0")]
    assert hook["stored_nbytes"] == sum(sizes)
    (told,) = facts["runs"]
    lost = sum(loss["n_positions"] for loss in told["losses"])
    assert told["n_positions"] == rows + told["n_cache_ref"] + lost
    assert sum(told["finish_reasons"].values()) == told["n_requests"] == 12


def test_info_says_loudly_what_may_not_be_trained_on(dataset: Path) -> None:
    (dataset / "seal/0001.json").unlink()
    (dataset / "runs/r-synthetic.json").unlink()
    (dataset / "mine.txt").write_text("")
    for census in dataset.glob("ledger/c-*"):
        shutil.rmtree(census)
    result = run("info", dataset)
    assert result.exit_code == 0
    assert "NOT SEALED (E306)" in result.output.splitlines()[1]
    for words in ("actds seal", "NO RUN RECORD (E401)", "NO CENSUS (E403)", "mine.txt", "E105"):
        assert words in result.output
    assert json.loads(run("info", dataset, "--json").output)["sealed"] is False


def test_nothing_in_a_dataset_can_paint_the_terminal(dataset: Path) -> None:
    genesis = dataset / "actds.json"
    genesis.write_bytes(genesis.read_bytes().replace(b"actds synthetic", b"\\u001b[2J\\u202e"))
    shutil.rmtree(dataset / "seal")
    result = run("info", dataset)
    assert result.exit_code == 0
    assert "\\x1b[2J\\u202e" in result.output
    assert "\x1b" not in result.output and "\u202e" not in result.output
    odd = dataset / "ledger" / "w-\x1b[2J"
    odd.mkdir()
    (odd / "00000000.json").write_bytes(b"")
    result = run("info", dataset)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("E107 ") and "\x1b" not in result.stderr
    result = run("info", f"{dataset}/\u202e")
    # A direction mark: click strips colours by itself where there is no terminal.
    assert result.stderr.startswith("E101 ") and "\u202e" not in result.stderr


def test_seal_seals_once_and_says_what_is_in_it(dataset: Path) -> None:
    shutil.rmtree(dataset / "seal")
    first = run("seal", dataset)
    assert first.exit_code == 0 and first.output.startswith("seal 1 ")
    assert run("seal", dataset).output == first.output
    assert json.loads(run("seal", dataset, "--json").output)["n"] == 1
    assert actds.open(dataset).digest in first.output


def test_errors_are_two_lines_on_stderr_with_their_exit_code(tmp_path: Path) -> None:
    for args, code, exit_code in (
        (("info", tmp_path), "E101", 3),
        (("seal", tmp_path), "E101", 3),
        (("info", "s3://x/y"), "E009", 2),
        (("explain", "E999"), "E013", 2),
        (("schema", "nope"), "E009", 2),
    ):
        result = run(*args)
        assert (result.exit_code, result.stdout) == (exit_code, "")
        first, next_step = result.stderr.splitlines()
        assert first.startswith(f"{code} ") and "; expected " in first
        place = first.removeprefix(f"{code} ").partition(": ")[0]
        assert next_step == CODES[code].next_step.replace("PLACE", place)
    assert run("info").exit_code == 2
    assert run("bogus").exit_code == 2


def test_a_traceback_reaches_only_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(run("--debug", "info", tmp_path).exception, ActdsError)
    assert isinstance(run("info", tmp_path, "--debug").exception, ActdsError)

    def broken(uri: str) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr("actds.store.open_store", broken)
    result = run("info", tmp_path)
    assert result.exit_code == 4
    assert result.stderr.startswith("E901 actds: RuntimeError: nobody foresaw this;")
    assert "Traceback" not in result.output
    assert isinstance(run("info", tmp_path, "--debug").exception, RuntimeError)


def test_every_code_can_be_explained() -> None:
    listing = run("explain").output
    for code, entry in CODES.items():
        assert f"{code}  {entry.title}" in listing
        told = run("explain", code.lower())
        assert told.exit_code == 0
        for words in (code, entry.title, entry.meaning, entry.next_step, entry.clause):
            assert words in told.output
    assert json.loads(run("explain", "--json").output)["codes"].keys() == CODES.keys()


def test_json_means_the_same_in_every_command(original: Path, dataset: Path) -> None:
    for args, form in (
        (("info", original), ("actds.info", "1")),
        (("explain",), ("actds.explain", "1")),
        (("explain", "E203"), ("actds.explain", "1")),
        (("seal", dataset), ("actds.seal", "0.1")),
        (("recompress", dataset), ("actds.recompress", "1")),
        (("shuffle", dataset, dataset.with_name("shuffled")), ("actds.shuffle", "1")),
        (("validate", original), ("actds.validate", "1")),
    ):
        document = json.loads(run(*args, "--json").stdout)
        assert (document["format"], document["version"]) == form, args


def test_schemas_are_printed_and_written(tmp_path: Path) -> None:
    assert run("schema", "--write", tmp_path / "s").exit_code == 0
    for name in ("genesis", "run", "shard", "ledger", "seal", "audit"):
        assert name in run("schema").output
        written = json.loads((tmp_path / "s" / f"{name}.json").read_text())
        assert written == json.loads(run("schema", name).output)


def test_a_room_that_cannot_be_loaded_is_named_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = importlib.metadata.EntryPoint("audit", "no_such_room.commands:audit", "actds.commands")
    monkeypatch.setattr("actds.cli.plugins", lambda: {"audit": entry})
    assert "not available: No module named 'no_such_room'" in run("--help").output
    result = run("audit", "x", "--flag")
    assert result.exit_code == 2 and result.stderr.startswith("E011 audit: ")


@pytest.mark.parametrize(
    "words",
    [
        "export {inside} {out} --to parquet",
        "import {foreign} {out} --hook resid_post.0",
        "shuffle {dataset} {out}",
        "pull hf://datasets/someone/acts {out}",
        "view {dataset} --out {out}",
        "check {dataset} --html {out}",
        "audit {dataset} --html {out}",
        "audit {dataset} --json {out}",
        "audit {dataset} --weights {out}",
        "regimes {dataset} --html {out}",
        "regimes {dataset} --json {out}",
        "profile {dataset} --out {out}",
        "alerts {dataset} --html {out} --profile {foreign}",
        "alerts {dataset} --json {out} --profile {foreign}",
        "stability {dataset} --html {out} --hook resid_post.1",
        "stability {dataset} --json {out} --hook resid_post.1",
        "stability {dataset} --out {out} --hook resid_post.1",
        "attention {dataset} --html {out}",
        "steer {dataset} --html {out} --model {dataset} --hook resid_post.1 --vector {foreign}",
        "steer {dataset} --json {out} --model {dataset} --hook resid_post.1 --vector {foreign}",
        "attention {dataset} --json {out}",
        "schema --write {out}",
        "attest {dataset} --json {out} --model {dataset}",
    ],
)
@pytest.mark.parametrize("where", ["inside", "through a link"])
def test_no_command_writes_inside_a_dataset(
    dataset: Path, tmp_path: Path, words: str, where: str
) -> None:
    np.save(tmp_path / "rows.npy", np.ones((4, 8), np.float32))
    (tmp_path / "link").symlink_to(dataset / "seal")
    out = dataset / "new" if where == "inside" else tmp_path / "link" / "new"
    before = sorted(dataset.rglob("*"))
    places = {"inside": dataset, "dataset": dataset, "out": out, "foreign": tmp_path / "rows.npy"}
    told = run(*(word.format(**places) for word in words.split()))
    assert told.exit_code == 2 and "E009" in told.output and "inside the dataset" in told.output
    assert sorted(dataset.rglob("*")) == before


def test_every_output_of_a_command_is_tried_above() -> None:
    """An output is a path that need not exist; those of commands that hold a lock ask there."""
    parametrized = test_no_command_writes_inside_a_dataset.pytestmark  # type: ignore[attr-defined]
    [tried] = [mark.args[1] for mark in parametrized if mark.args[0] == "words"]
    outputs = {
        (name, parameter.opts[-1])
        for name in cli.list_commands(click.Context(cli))
        for parameter in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
        if {"out", "html", "json_out", "json_file", "weights_out", "folder"} & {parameter.name}
    }
    for name, option in outputs - {("write", "out"), ("replay", "out"), ("push", "folder")}:
        assert any(
            line.startswith(f"{name} ") and (option in line or option == "out") for line in tried
        ), (name, option)


@pytest.mark.parametrize("level", ["standard", "deep"])
def test_what_a_copy_from_the_hub_brings_along_is_no_finding(dataset: Path, level: Level) -> None:
    (dataset / ".gitattributes").write_text("*.parquet filter=lfs")
    for path in (".git/HEAD", ".git/objects/aa/bb", ".cache/huggingface/download/x.metadata"):
        (dataset / path).parent.mkdir(parents=True, exist_ok=True)
        (dataset / path).write_text("x")
    report = actds.validate(dataset, level=level)
    assert not report.errors and not report.warnings
    assert "not part of the dataset" not in run("info", dataset).output
    (dataset / "shards" / ".gitattributes").write_text("x")
    assert [f.code for f in actds.validate(dataset, level=level).warnings] == ["E105"]
