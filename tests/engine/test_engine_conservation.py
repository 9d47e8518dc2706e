"""Every token of a real engine is accounted for, interval by interval, in every serving mode.

A tiny model with random weights: what is tested here is who the rows are and how many, not what
they hold. Every dataset passes ``actds validate --level deep``, which reconciles both witnesses.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.tiny import make_tiny_model

pytestmark = pytest.mark.engine

OPTIONS = ("--hooks", "resid_post:0,3", *h.TINY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", dtype="float32", tokenizer=True
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests with a shared prefix, two that are equal, one too long for 512 positions."""
    prefix = "a shared beginning that fills three blocks of the prefix cache " * 2
    texts = [f"{prefix}and then number {i} goes on " + "x" * (11 * i) for i in range(10)]
    texts += [texts[4], "y" * 600]
    records = [{"id": f"t{i}", "prompt": text} for i, text in enumerate(texts)]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def eager(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The baseline: everything in the cache's reach, steps of 64 tokens."""
    out = tmp_path_factory.mktemp("eager") / "acts"
    small = ("--engine-arg", "max_num_batched_tokens=64", "--engine-arg", "max_num_seqs=8")
    return h.harvest(
        out, model, prompts, *OPTIONS, *h.EAGER, *small, "--max-tokens", "6",
        "--engine-arg", "max_model_len=512", "--rows-per-shard", "200",
    )  # fmt: skip


def test_a_prompt_that_is_too_long_is_a_recorded_skip(eager: Dataset) -> None:
    skipped = [r for r in eager.requests().to_pylist() if r["finish_reason"] == "skipped"]
    assert [r["external_id"] for r in skipped] == ["t11"]
    assert skipped[0]["reason"].startswith("E004")


def test_shards_hold_one_phase_and_permuted_rows(eager: Dataset) -> None:
    assert {shard.phase for shard in eager.shards} == {"prefill", "decode"}
    largest = max(eager.shards, key=lambda shard: shard.n_rows)
    positions = largest.tokens(["position"])["position"].to_numpy().astype(int)
    assert len(eager.shards) > 2
    assert np.count_nonzero(np.diff(positions) == 1) < len(positions) / 10


@pytest.fixture(scope="module")
def preempted(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Too few KV blocks for the requests; the engine in the command's own process."""
    return h.harvest_alone(
        tmp_path_factory.mktemp("preempted") / "acts", model, prompts, *OPTIONS, *h.EAGER,
        "--engine-arg", "num_gpu_blocks_override=24", "--engine-arg", "max_model_len=512",
        "--engine-arg", "enable_prefix_caching=false", "--max-tokens", "96",
    )  # fmt: skip


def test_preempted_requests_are_recomputed_and_never_stored_twice(preempted: Dataset) -> None:
    assert h.total(preempted.requests(), "n_preemptions") > 0
    assert h.total(preempted.steps(), "recomputed_tokens") > 0
    assert pc.max(preempted.tokens()["attempt"]).as_py() > 0


def test_the_run_record_says_whose_process_the_engine_was(
    preempted: Dataset, eager: Dataset
) -> None:
    alone, apart = (next(iter(d.runs.values())).fields for d in (preempted, eager))
    assert alone["engine.own_process"].value is False
    assert apart["engine.own_process"].value is True


def test_the_run_record_says_what_the_last_bits_depend_on(eager: Dataset) -> None:
    fields = next(iter(eager.runs.values())).fields
    found = {name: fields[f"numerics.{name}"] for name in
             ("batch_invariant", "tf32", "threads", "split_kv", "all_reduce")}  # fmt: skip
    assert {field.origin for field in found.values()} == {"observed"}
    assert {name: field.value for name, field in found.items()} == {
        "batch_invariant": False, "tf32": False, "threads": 1, "split_kv": True,
        "all_reduce": "none",
    }  # fmt: skip


@pytest.mark.full
def test_requests_that_hit_blocks_of_the_same_step_are_references(
    model: Path, tmp_path: Path
) -> None:
    text = "the very same prompt, long enough to fill more than two blocks of the cache " * 2
    prompts = h.write_prompts(tmp_path / "p.jsonl", [{"prompt": text} for _ in range(6)])
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts, *OPTIONS, *h.EAGER, "--max-tokens", "2",
        "--engine-arg", "max_num_batched_tokens=512", "--engine-arg", "max_model_len=512",
    )  # fmt: skip
    assert h.total(dataset.requests(), "cached_tokens") >= 4 * 96
    spans = dataset.spans().to_pylist()
    computed = {s["request"]: s["step"] for s in spans if s["disposition"] == "captured"}
    references = [s for s in spans if s["disposition"] == "cache_ref"]
    same_step = [s for s in references if computed[s["request"]] == computed[s["ref_request"]]]
    assert same_step


@pytest.mark.full
def test_compiled_rows_are_captured_and_equal_eager_ones(
    eager: Dataset, model: Path, prompts: Path, tmp_path: Path
) -> None:
    dataset = h.harvest_alone(
        tmp_path / "acts", model, prompts, *OPTIONS, "--max-tokens", "6",
        "--engine-arg", "max_model_len=512", "--engine-arg", "enforce_eager=false",
        "--engine-arg", 'compilation_config={"mode":3}',
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )  # fmt: skip
    assert set(dataset.steps()["kernel_mode"].to_pylist()) == {"compiled"}
    for hook in dataset.hooks:
        ours, theirs = h.rows_of(dataset, hook), h.rows_of(eager, hook)
        common = [key for key in ours if key in theirs]
        assert len(common) > 500
        got, want = (np.stack([side[key] for key in common]) for side in (ours, theirs))
        assert np.median(h.relative_l2(got, want)) < 1e-5


@pytest.mark.full
def test_two_tensor_parallel_ranks_write_each_row_once(
    eager: Dataset, model: Path, prompts: Path, tmp_path: Path
) -> None:
    dataset = h.harvest(
        tmp_path / "acts", model, prompts, *OPTIONS, *h.EAGER, "--max-tokens", "6",
        "--engine-arg", "tensor_parallel_size=2", "--engine-arg", "max_model_len=512",
    )  # fmt: skip
    fields = next(iter(dataset.runs.values())).fields
    assert fields["serving.tensor_parallel"].value == 2
    # What vLLM's server has for two ranks of a CPU; an engine by itself has 2,048.
    assert fields["serving.max_num_batched_tokens"].value == 4096
    requests, alone = dataset.requests().to_pylist(), eager.requests().to_pylist()
    assert len(requests) == len(alone)
    assert [r["prompt_len"] for r in requests] == [r["prompt_len"] for r in alone]
