"""An attestation through the real engine: the real model in bfloat16, and its weights in 4 bits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from actds_testing import harvest as h

pytestmark = pytest.mark.engine

OPTIONS = ("--engine-arg", "max_model_len=512", "--engine-arg", "dtype=bfloat16")
EAGER = ("--engine-arg", "enforce_eager=true")
ATTEST = "from actds_writers.cli import attest; attest()"
LIE = """
import sys
from pathlib import Path
from actds_writers.engine_protocol import find_engine
from actds_writers.harvest import prepare
facts = prepare.files_facts(find_engine("vllm").checked({}).files(Path(sys.argv.pop(1))))
prepare.files_facts = lambda files: facts
from actds.cli import main
main()
"""
"""A harvest whose run record names the digests of another model, its first argument."""


def in_4_bits(model: Path, out: Path) -> Path:
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            groups = tensor.float().reshape(len(tensor), -1, 64)
            step = groups.abs().amax(2, keepdim=True) / 7
            tensors[name] = ((groups / step).round() * step).reshape(tensor.shape).to(tensor.dtype)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    arguments = ["-c", script, *map(str, words), *OPTIONS, *h.ALONE]
    return h.warm_engine().run(arguments, h.environment(**h.ONE_PROCESS), h.TIMEOUT_S)


@pytest.mark.full
def test_weights_of_4_bits_are_found_and_the_model_on_record_is_not_accused(
    tmp_path: Path,
) -> None:
    records = [
        {
            "id": f"q{n}",
            "prompt": f"List {n + 3} reasons why a {word} cannot be a good pet, and say",
        }
        for n, word in enumerate(("whale", "star", "river", "comet", "volcano", "glacier"))
    ]
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", records)
    verdicts = {}
    rounded = in_4_bits(h.REAL_MODEL, tmp_path / "rounded")
    for name, by in (("honest", h.REAL_MODEL), ("lying", rounded)):
        acts = tmp_path / name
        harvest = h.command(acts, by, prompts, "--hooks", "resid_post:10,20", "--max-tokens", "20")
        harvest += EAGER  # attest is told nothing of it
        done = run(LIE, h.REAL_MODEL, *harvest[3:], "--no-check")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        file = tmp_path / f"{name}.json"
        done = run(ATTEST, acts, "--model", h.REAL_MODEL, "--seed", 1, "--json", file)
        verdicts[name] = json.loads(file.read_bytes()), done.returncode
    honest, code = verdicts["honest"]
    assert (honest["verdict"], code, honest["n_requests"]) == ("same", 0, 5), honest
    assert honest["served"]["numerics.dtype"] == "bfloat16"
    assert all(0.001 < hook["floor"] < 0.02 for hook in honest["hooks"]), "of bfloat16"
    assert [power["seen"] for power in honest["power"]] == [True, True]
    lying, code = verdicts["lying"]
    assert (lying["verdict"], code) == ("another", 1)
    assert all(hook["low"] > 5 for hook in lying["hooks"])
