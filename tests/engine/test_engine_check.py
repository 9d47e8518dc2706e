"""The check of the hooks in a real engine: wrong rows never become a dataset."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import actds
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.engine

OPTIONS = ("--hooks", "resid_post:0,2", "--max-tokens", "4", "--engine-arg", "block_size=32")
FLOAT32 = (*OPTIONS, "--engine-arg", "dtype=float32")
DUMMY = ("--engine-arg", "load_format=dummy")
WRONG = (
    "from actds_writers.engines.vllm import worker as f; f.VERIFIED['LlamaForCausalLM'] = 'first'"
)
UNKNOWN = "from actds_writers.engines.vllm import worker as f; del f.VERIFIED['LlamaForCausalLM']"
# Only while the hooks are installed: reference and check keep the function as it is.
OFF_BY_ONE = """
from actds_writers.capture import hooks, op as capture
found, install = hooks.decoder_layers, capture.install
def shifted(*args, **more):
    hooks.decoder_layers = lambda model: {n - 1: layer for n, layer in found(model).items()}
    try:
        return install(*args, **more)
    finally:
        hooks.decoder_layers = found
capture.install = shifted
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"id": f"q{i}", "prompt": "a quick brown fox " * (1 + i)} for i in range(4)]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


def write(
    patch: str, out: Path, model: Path, prompts: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Harvest in one process, in which something was changed before."""
    script = f"import sys\n{patch}\nfrom actds.cli import main\nsys.exit(main())"
    arguments = h.command(out, model, prompts, *options, *h.ALONE)[3:]
    environment = h.environment(**h.ONE_PROCESS)
    return h.warm_engine().run(["-c", script, *arguments], environment, h.TIMEOUT_S)


def check_of(dataset: actds.Dataset) -> dict[str, Any]:
    (run,) = dataset.runs.values()
    found: dict[str, Any] = json.loads(str(run.fields["capture.check"].value))
    return found


@pytest.mark.full
def test_a_compiled_engine_is_held_against_transformers_and_samples_as_without_the_check(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    warm = (*FLOAT32, "--temperature", "1.0")
    with_check = h.harvest_alone(tmp_path / "a", model, prompts, *warm)
    without = h.harvest_alone(tmp_path / "b", model, prompts, *warm, "--no-check")
    said = check_of(with_check)
    assert said["against"] == "transformers" and said["rows"] > 40
    assert all(float(distance) < 1e-5 for distance in said["hooks"].values())
    (run,) = without.runs.values()
    assert run.fields["capture.check"].value == "none"
    # It draws no random number, leaves no prefix in the cache, and no row.
    digests = [d.requests()["token_digest"].to_pylist() for d in (with_check, without)]
    assert digests[0] == digests[1]
    assert with_check.n_rows == without.n_rows


@pytest.mark.parametrize(
    ("patch", "options", "words"),
    [
        (WRONG, (), "against transformers"),
        (WRONG, DUMMY, "against engine"),
        (OFF_BY_ONE, (), "nearer to layer 1"),
        (UNKNOWN, ("--no-check",), "a model class that was never verified, and --no-check"),
    ],
    ids=["half the stream", "half the stream, weights of its own", "off by one", "unknown class"],
)
def test_wrong_rows_stop_the_run_before_the_first_one(
    tmp_path: Path, model: Path, prompts: Path, patch: str, options: tuple[str, ...], words: str
) -> None:
    done = write(patch, tmp_path / "acts", model, prompts, *FLOAT32, *h.EAGER, *options)
    assert done.returncode != 0
    assert words in done.stderr, done.stderr
    assert ("E007 LlamaForCausalLM" if options == ("--no-check",) else "E507 hook") in done.stderr
    assert not (tmp_path / "acts" / "actds.json").exists()


@pytest.mark.full
def test_the_check_decides_for_a_class_that_nobody_verified(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    done = write(UNKNOWN, tmp_path / "acts", model, prompts, *FLOAT32, *h.EAGER)
    assert done.returncode == 0, done.stderr
    assert check_of(h.validated(tmp_path / "acts"))["against"] == "transformers"


@pytest.mark.full
def test_dummy_weights_are_held_against_the_next_layer(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts, *FLOAT32, *DUMMY, "--engine-arg", "max_num_seqs=1"
    )
    said = check_of(dataset)
    assert said["against"] == "engine" and "load_format is dummy" in said["reason"]
    assert all(float(distance) < 1e-5 for distance in said["hooks"].values())
