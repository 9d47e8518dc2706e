"""Wrong values for every argument and option of every command end in a coded error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from actds.cli import cli
from actds.errors import CODES, ActdsError
from actds_testing import harvest as h
from actds_testing.cli_tree import leaves
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_tiny_model

COMMANDS = {" ".join(path): command for path, command in leaves(cli)}
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
NO_NUMBERS = ("", "nan", "inf", "1e999", "[", "=", "a=b=c", "\n")
CODE = re.compile(r"^ *(E\d{3}) ", re.MULTILINE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a model, prompts, a set of another form and an empty folder."""
    folder = tmp_path_factory.mktemp("inputs")
    make_dataset(folder / "acts", n_requests=6)
    make_dataset(folder / "other", n_requests=6, seed=1)
    make_tiny_model(folder / "model", max_len=64, tokenizer=True)
    h.write_prompts(folder / "prompts.jsonl", [{"prompt": "a short one"}])
    np.save(folder / "set.npy", np.zeros((4, 8), "float32"))
    (folder / "folder").mkdir()
    (folder / "file").write_text("neither TOML nor JSON: \x01")
    return folder


def right(name: str, files: Path) -> dict[str, list[str]]:
    """Return the arguments and the needed options of a call that would do something."""
    acts, model = [f"{files}/acts"], ["--model", f"{files}/model"]
    prompts, engine = ["--prompts", f"{files}/prompts.jsonl"], ["--engine", "transformers"]
    return {
        "attention": {"dataset": acts, "model": model},
        "attest": {"source": acts, "model": model, "engine": engine},
        "explain": {"code": ["E001"]},
        "export": {"path": acts, "out": ["exported"], "to": ["--to", "safetensors"]},
        "import": {"foreign": [f"{files}/set.npy"], "out": ["imported"],
                   "hooks": ["--hook", "resid_post.0"]},
        "plan": {"model": model, "hooks": ["--hooks", "resid_post:0"]},
        "pull": {"uri": ["hf://datasets/someone/acts"], "out": ["pulled"]},
        "push": {"path": acts, "uri": ["hf://datasets/someone/acts"]},
        "regimes": {"arms": acts},
        "replay": {"source": acts, "out": ["replayed"], "model": model, "engine": engine},
        "schema": {"name": ["seal"]},
        "shuffle": {"source": acts, "out": ["shuffled"]},
        "stability": {"arms": [*acts, f"{files}/other"]},
        "check": {"paths": acts}, "validate": {"paths": acts},
        "steer": {"dataset": acts, "model": model, "hook": ["--hook", "resid_post.0"],
                  "file": ["--vector", f"{files}/set.npy"]},
        "write": {"out": ["written"], "model": model, "prompts": prompts,
                  "hooks": ["--hooks", "resid_post:0"], "engine": engine},
    }.get(name, {"path": acts})  # fmt: skip


def wrong(param: click.Parameter, files: Path) -> Iterator[str]:
    """Yield values that no parameter, or few of them, can have."""
    yield from ("", "x" * 300, "x" * 5000, "\udcff", "nan", "inf", "-1", "1e999", "[", "=", "a=b=c")
    yield from (f"{files}/missing", f"{files}/missing/deep", f"{files}/folder", f"{files}/file")
    yield from ("s3://", "hf://", "s3://bucket/../x", "\n", "acts\nE901 fake")


def call(name: str, given: dict[str, list[str]]) -> Result:
    words = [*name.split(), *(word for part in given.values() for word in part)]
    return CliRunner().invoke(cli, words, prog_name="actds")


def problem(result: Result) -> str | None:
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        return f"raised {result.exception!r}"[:300]
    text = result.stderr
    if "Traceback" in text or re.search("^E901", text, re.MULTILINE):
        return text[:600]
    if result.exit_code == 0 or (result.exit_code == 1 and result.stdout):
        return None  # a value that will do, or a result that says no
    if len(text) > 2500 or len(text.strip().splitlines()) > 12:
        return f"{len(text)} characters: {text[:300]}"
    codes = CODE.findall(text) or CODE.findall(result.stdout)
    if text.startswith("Usage:") and result.exit_code == 2:
        return None
    if not codes:
        return f"exit {result.exit_code} without a code: {text[:300]}{result.stdout[-300:]}"
    if CODES[codes[-1]].exit_code != result.exit_code:
        return f"exit {result.exit_code} with {codes[-1]}: {text[:300]}"
    return None


@pytest.mark.standard
@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_path_is_no_folder_that_one_stands_in(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Path("")`` is ``.``, which here is a set that doctor and import can read."""
    np.save(tmp_path / "set.npy", np.zeros((4, 8), "float32"))
    monkeypatch.chdir(tmp_path)
    command, given = COMMANDS[name], right(name, files)
    for param in command.get_params(click.Context(command)):
        takes_path = isinstance(param.type, click.Path) or "FILE" in (param.metavar or "")
        if isinstance(param, click.Argument):
            shown, words = param.human_readable_name, [""]
        elif takes_path:
            shown, words = param.opts[-1], [param.opts[-1], ""]
        else:
            continue
        result = call(name, {**given, str(param.name): words})
        assert result.exit_code == 2 and result.stdout == ""
        place = shown if shown.isalpha() or shown.startswith("--") else param.name
        assert result.stderr.startswith(f"E009 {place}: an empty word; expected a path")
    assert [file.name for file in tmp_path.iterdir()] == ["set.npy"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_is_named(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*_: object, **__: object) -> None:
        raise ActdsError("E504", "engine", got="none in this test", expected="one")

    monkeypatch.setattr("actds_writers.harvest.run.Run", no_engine)
    monkeypatch.setattr("actds_writers.harvest.run.harvest_replicas", no_engine)
    monkeypatch.setattr("actds.publish.transfer._WAITS_S", ())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    found = []
    command = COMMANDS[name]
    for param in command.get_params(click.Context(command)):
        if param.name in (None, "help") or getattr(param, "is_flag", False):
            continue
        for value in wrong(param, files):
            option = max(param.opts, key=len)
            words = [value] if isinstance(param, click.Argument) else [option, value]
            result = call(name, right(name, files) | {param.name: words})
            why = problem(result)
            if isinstance(param.type, NUMBERS) and value in NO_NUMBERS and result.exit_code != 2:
                why = f"exit {result.exit_code}: no number was taken for one"
            if why:
                found.append(f"{option} {value[:60]!r}: {why}")
    assert not found, "\n".join(found)
