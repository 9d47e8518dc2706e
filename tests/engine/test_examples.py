from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actds_testing.places import ROOT
from actds_writers.prompts.records import read_prompts

pytestmark = pytest.mark.standard


def run(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    # -W error: an example that warns is an example that teaches a mistake.
    command = [sys.executable, "-W", "error", ROOT / "examples" / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=120)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "prompts.jsonl"
    run("make_prompts.py", path)
    return path


def user_turns(path: Path) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in read_prompts(str(path)).prompts]  # type: ignore[index]


def test_prompts_are_many_distinct_and_share_one_long_system_prompt(prompts: Path) -> None:
    found = read_prompts(str(prompts)).prompts
    assert len(found) == 256
    assert len({prompt.external_id for prompt in found}) == 256
    systems = {prompt.messages[0]["content"] for prompt in found if prompt.messages}
    assert len(systems) == 1
    assert len(systems.pop()) > 900
    assert len(set(user_turns(prompts))) == 256


def test_prompt_lengths_have_a_long_tail(prompts: Path) -> None:
    lengths = sorted(len(turn) for turn in user_turns(prompts))
    assert lengths[-1] > 4 * lengths[128]


def test_prompts_are_the_same_each_time_and_the_count_can_be_chosen(
    prompts: Path, tmp_path: Path
) -> None:
    run("make_prompts.py", tmp_path / "more.jsonl", "--n", 300)
    more = (tmp_path / "more.jsonl").read_bytes().splitlines()
    assert len(more) == 300
    assert more[:256] == prompts.read_bytes().splitlines()
    assert os.listdir(tmp_path) == ["more.jsonl"]


def test_model_folder_that_is_complete_is_left_alone_and_a_partial_one_is_refused(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = run("make_model.py", model, check=False)
    assert done.returncode != 0
    assert "incomplete" in done.stderr
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert "is there already" in run("make_model.py", model).stderr
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_demo_model_encodes_the_shared_system_prompt_to_many_tokens(prompts: Path) -> None:
    folder = ROOT / "demo" / "model"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no demo model; make demo makes it")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first: dict[str, Any] = json.loads(prompts.read_text(encoding="utf-8").splitlines()[0])
    system = first["messages"][0]["content"]
    # Longer than four KV blocks of 32, so that a prefix cache has something to hit.
    assert len(tokenizer.encode(system).ids) >= 150
