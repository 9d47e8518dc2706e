"""Bad input to ``actds write``: a code, a place, a next step, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from actds.cli import cli
from actds_testing import harvest as h
from actds_testing.synthetic import make_dataset
from actds_testing.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return make_tiny_model(folder, max_len=64, tokenizer=True)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return h.write_prompts(tmp_path / "p.jsonl", [{"prompt": "a short one"}])


def write(out: Path, model: Path, prompts: Path | str, *options: str) -> Result:
    arguments = ["write", str(out), "--model", str(model), "--prompts", str(prompts)]
    hooks = () if "--hooks" in options else ("--hooks", "resid_post:0")
    return CliRunner().invoke(cli, [*arguments, *hooks, *options])


def refused(result: Result, code: str, out: Path, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert code in result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_a_prompts_file_that_is_missing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    refused(write(out, model, tmp_path / "none.jsonl"), "E001", out, "none.jsonl")


def test_a_broken_line_is_named(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "acts", tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": broken}\n')
    refused(write(out, model, prompts), "E002", out, "line 2")


def test_an_empty_prompts_file(model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "acts", tmp_path / "p.jsonl"
    prompts.write_text("")
    refused(write(out, model, prompts), "E003", out)


def test_only_prompts_that_are_too_long(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    prompts = h.write_prompts(tmp_path / "p.jsonl", [{"prompt": "x" * 200}])
    refused(write(out, model, prompts), "E006", out, "E004")


def test_a_model_that_is_missing(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    refused(write(out, tmp_path / "nowhere", prompts), "E005", out, "nowhere")


def test_a_hook_that_the_model_lacks(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    refused(write(out, model, prompts, "--hooks", "resid_post:4"), "E007", out, "0 to 3")
    refused(write(out, model, prompts, "--hooks", "attn:1"), "E007", out, "resid_post")


def test_an_output_that_exists_is_left_alone(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    result = write(out, model, prompts)
    assert result.exit_code == 2
    assert "E008" in result.stderr
    assert "--resume" in result.stderr
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_resuming_what_is_no_dataset(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    refused(write(out, model, prompts, "--resume"), "E010", out)


def test_an_engine_option_that_is_malformed(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    refused(write(out, model, prompts, "--engine-arg", "nonsense"), "E009", out, "key=value")


def test_an_engine_option_that_cannot_be_accounted_for(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    option = ("--engine-arg", "prefill_context_parallel_size=2")
    refused(write(out, model, prompts, *option), "E012", out, "prefill_context_parallel_size")


@pytest.mark.parametrize(
    ("inside", "exit_code", "words"),
    [("acts", 2, "E009 OUT {out}: inside the dataset"), ("file", 4, "E503 {out}: Not a directory")],
)
def test_a_path_where_no_dataset_can_be(
    model: Path, prompts: Path, tmp_path: Path, inside: str, exit_code: int, words: str
) -> None:
    make_dataset(tmp_path / "acts", n_requests=1)
    (tmp_path / "file").touch()
    out = tmp_path / inside / "new"
    result = write(out, model, prompts, "--engine", "transformers", "--no-check")
    assert result.exit_code == exit_code and words.format(out=out) in result.stderr
    assert "Starting the engine" not in result.stderr and not out.exists()
