"""The check of the hooks in a real engine: wrong rows never become a dataset."""

from __future__ import annotations

import json
import re
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
from actds_writers.capture import op as capture, taps as hooks
found, install = hooks.decoder_layers, capture.install
def shifted(*args, **more):
    hooks.decoder_layers = lambda model: {n - 1: layer for n, layer in found(model).items()}
    try:
        return install(*args, **more)
    finally:
        hooks.decoder_layers = found
capture.install = shifted
"""
SHIFTED = """
from actds_writers.capture import op as capture
install = capture.install_tap
def shifted(tap, *rest):
    def read(*given):
        rows, second = tap.read(*given)
        return rows.roll(1, 0), None if second is None else second.roll(1, 0)
    install(tap._replace(read=read), *rest)
capture.install_tap = shifted
"""
SWAPPED = """
from actds_writers.capture import op as capture
from actds_writers.capture.hooks import BUILT_IN
find = capture.find_kind
names = {"attn_out": "mlp_out", "mlp_out": "attn_out", "k": "v", "v": "k"}
capture.find_kind = lambda name: find(names.get(name, name))
"""
MANY = ("resid_pre:1,2;resid_mid:1,2;attn_out:1,2;z:1,2;q:1,2;k:1,2;v:1,2;mlp_in:1,2;mlp_out:1,2;"
        "embed;final")  # fmt: skip


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


def test_a_start_says_step_by_step_what_it_does(tmp_path: Path, model: Path, prompts: Path) -> None:
    done = h.run_alone(tmp_path / "acts", model, prompts, *FLOAT32, *h.EAGER)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert lines == [
        f"Reading {prompts}, and the weights of {model} for a digest ...",
        f"Starting the engine for {model} ...",
        "Loading the weights ...",
        "Compiling the model, and warming up ...",
        "Comparing rows of two short prompts with the model's own ...",
        "Serving 4 requests ...",
        f"Sealing {tmp_path / 'acts'} ...",
    ]
    quiet = h.run_alone(tmp_path / "quiet", model, prompts, *FLOAT32, *h.EAGER, "--quiet")
    lines = [line for line in quiet.stderr.splitlines() if line.endswith(" ...")]
    assert quiet.returncode == 0 and lines == [f"Starting the engine for {model} ..."]


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
        (UNKNOWN, ("--no-check",), "a model class that was never verified, and the check is off"),
    ],
    ids=["half the stream", "half the stream, weights of its own", "off by one", "unknown class"],
)
def test_wrong_rows_stop_the_run_before_the_first_one(
    tmp_path: Path, model: Path, prompts: Path, patch: str, options: tuple[str, ...], words: str
) -> None:
    done = write(patch, tmp_path / "acts", model, prompts, *FLOAT32, *h.EAGER, *options)
    assert done.returncode != 0
    assert words in done.stderr, done.stderr
    error = "E007 LlamaForCausalLM" if options == ("--no-check",) else r"E507 (hook|\d hooks)"
    assert re.search(error, done.stderr)
    assert not (tmp_path / "acts" / "actds.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("patch", "right"),
    [(OFF_BY_ONE, {"embed", "final"}), (SHIFTED, set()),
     (SWAPPED, {"resid_pre", "resid_mid", "z", "q", "mlp_in", "embed", "final"}),
     (WRONG, {"attn_out", "z", "q", "k", "v", "mlp_in", "mlp_out", "embed", "final", "resid_mid"})],
    ids=["off by one layer", "off by one row", "kinds swapped", "half the stream"],
)  # fmt: skip
def test_the_check_sees_wrong_rows_of_every_kind(
    tmp_path: Path, model: Path, prompts: Path, patch: str, right: set[str]
) -> None:
    done = write(patch, tmp_path / "acts", model, prompts, *FLOAT32[2:], *h.EAGER, "--hooks", MANY)
    assert done.returncode != 0 and "E507" in done.stderr, done.stderr
    named = set(re.findall(r"hook (\w+)\.\d+[:,]", done.stderr))
    every = {part.partition(":")[0] for part in MANY.split(";")}
    assert named == every - right
    assert not (tmp_path / "acts" / "actds.json").exists()


@pytest.mark.full
def test_a_kind_without_a_reference_is_refused_where_nobody_verified_it(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    words = (*FLOAT32[2:], *h.EAGER, *DUMMY, "--hooks", "resid_post:1;attn_out:1")
    patch = "from actds_writers.engines.vllm import options as f; f.VERIFIED_KINDS.clear()"
    done = write(patch, tmp_path / "acts", model, prompts, *words)
    assert done.returncode != 0
    words = (
        "E007 attn_out:1: a model class and kind that was never verified, and nothing to compare"
    )
    assert words in done.stderr, done.stderr


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


@pytest.mark.full
def test_outputs_are_whole_on_every_tensor_parallel_rank_and_heads_are_gathered(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    hooks = "resid_pre:1;resid_mid:1;attn_out:1;mlp_in:1;mlp_out:1;embed;final;q:1;k:1;v:1;z:1"
    ranks = (*FLOAT32[2:], *h.EAGER, "--engine-arg", "tensor_parallel_size=2")
    dataset = h.harvest(tmp_path / "acts", model, prompts, *ranks, "--hooks", hooks)
    said = check_of(dataset)
    assert said["against"] == "transformers" and len(said["hooks"]) == 11
    assert all(float(distance) < 1e-5 for distance in said["hooks"].values())
