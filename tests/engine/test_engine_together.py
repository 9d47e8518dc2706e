"""Ways to run an engine, together: stages, ranks, replicas, asynchronous scheduling, drafts, KV.

The account of each is that of a witness that knows nothing of it, and the rows are those of
``transformers``.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from actds_testing import witness
from actds_testing.witness import CROWDED, NGRAM, Harvest, compare, compare_rows, counts, harvest

pytestmark = [pytest.mark.engine, pytest.mark.full]

STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
# The example connector stores a prompt at its first step, as if that were all of it.
WHOLE = {"max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def stored(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The KV of every prompt, as one worker has computed it."""
    where = tmp_path_factory.mktemp("stored")
    (where / "kv").mkdir()
    engine = {**WHOLE, "kv_transfer_config": witness.transfer(where / "kv")}
    harvest(where, model, prompts, engine=engine, settings={"max_tokens": 1})
    return where / "kv"


def fields(one: Harvest) -> dict[str, Any]:
    return {name: f.value for name, f in one.dataset.runs[one.run].fields.items()}


def test_stages_scheduled_ahead_are_refused_by_the_first_model_runner(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    done = witness.serve(tmp_path, model, prompts, asynchronous=True, engine=STAGES)
    assert done.returncode != 0
    words = "Model Runner V1 does not support: pipeline parallelism with async scheduling"
    assert "E504 engine: " in done.stderr and words in done.stderr
    assert not (tmp_path / "acts").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="vLLM's second model runner needs Triton, here its interpreter: pip install triton",
)
def test_stages_of_the_second_model_runner_store_nothing_wrong(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the check of the hooks finds other rows on the second stage than the model's own."""
    for name, value in {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    done = witness.serve(
        tmp_path, model, prompts, cold=True, interpret=True, asynchronous=True, engine=STAGES
    )
    assert done.returncode != 0 and "E507 hook resid_post.2" in done.stderr
    assert not (tmp_path / "acts").exists()


def test_stages_of_two_ranks(model: Path, prompts: Path, tmp_path: Path) -> None:
    one = harvest(
        tmp_path, model, prompts, leave=0.005,
        engine={**CROWDED, **STAGES, "tensor_parallel_size": 2},
        settings={"temperature": 1.0, "max_tokens": 20},
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    said = fields(one)
    assert (said["serving.tensor_parallel"], said["serving.pipeline_parallel"]) == (2, 2)


def test_stages_load_kv_from_outside(
    model: Path, prompts: Path, stored: Path, tmp_path: Path
) -> None:
    """Each stage loads the KV of its layers."""
    one = harvest(
        tmp_path, model, prompts,
        engine={**WHOLE, **STAGES, "num_gpu_blocks_override": 14,
                "kv_transfer_config": witness.transfer(stored, "kv_consumer")},
        settings={"temperature": 1.0},
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    assert one.total("external") > 0 and counts(one)["preempted"]


def test_drafts_on_kv_from_outside(
    model: Path, prompts: Path, stored: Path, tmp_path: Path
) -> None:
    one = harvest(
        tmp_path, model, prompts, leave=0.005,
        engine={**WHOLE, "num_gpu_blocks_override": 14, "speculative_config": NGRAM,
                "kv_transfer_config": witness.transfer(stored, "kv_consumer")},
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    found = counts(one)
    assert one.total("external") > 0 and found["preempted"]
    assert found["rejected"] and found["accepted"] and found["left"]


def test_replicas_load_kv_from_outside(
    model: Path, prompts: Path, stored: Path, tmp_path: Path
) -> None:
    """Each replica is a run with an account of its own."""
    config = json.dumps(witness.transfer(stored, "kv_consumer"))
    options = {
        "dtype": "float32", "block_size": 32, "enforce_eager": "true", "max_model_len": 320,
        "data_parallel_size": 2, "kv_transfer_config": config, **WHOLE,
    }  # fmt: skip
    words = [word for k, v in options.items() for word in ("--engine-arg", f"{k}={v}")]
    runs = witness.harvest_replicas(
        tmp_path, model, prompts, "--hooks", "resid_post:0,2", *words, "--max-tokens", "40",
        "--temperature", "1.0",
    )  # fmt: skip
    assert len(runs) == 2
    for one in runs:
        compare(one)
        assert {s["reason"] for s in one.table("spans").to_pylist()} >= {"external"}
    compare_rows(model, runs)
    assert runs[0].total("external") > 0
