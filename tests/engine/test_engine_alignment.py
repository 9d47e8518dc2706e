"""Rows of a real model in a real engine are the rows of a plain forward of the same tokens."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
import pytest

import actds
from actds.explore.dataset import Dataset
from actds_testing import harvest as h

pytestmark = pytest.mark.engine

HOOKS = ("resid_post.10", "resid_post.20")
OPTIONS = ("--hooks", "resid_post:10,20", "--engine-arg", "max_model_len=512", *h.EAGER)
CACHED = ("--engine-arg", "block_size=32", "--engine-arg", "max_num_batched_tokens=128",
          "--engine-arg", "max_num_seqs=8")  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten requests of real text with a shared system prompt of some 170 tokens."""
    words = " ".join((textwrap.__doc__ or "", textwrap.TextWrapper.__doc__ or "")).split()
    system = "You explain the standard library of Python to people. " + " ".join(words[:110])
    records = [
        {
            "id": f"q{i}",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": " ".join(words[7 * i : 7 * i + 4 + 3 * i])},
            ],
        }
        for i in range(10)
    ]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def cached(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Prefix caching and chunked prefill on, computed and stored in float32."""
    out = tmp_path_factory.mktemp("cached") / "acts"
    float32 = ("--engine-arg", "dtype=float32", "--max-tokens", "8", "--no-check")
    return h.harvest_alone(out, h.REAL_MODEL, prompts, *OPTIONS, *CACHED, *float32)


@pytest.fixture(scope="module")
def uncached(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same without the prefix cache, every token computed."""
    out = tmp_path_factory.mktemp("uncached") / "acts"
    off = ("--engine-arg", "dtype=float32", "--engine-arg", "enable_prefix_caching=false")
    return h.harvest_alone(
        out, h.REAL_MODEL, prompts, *OPTIONS, *off, "--max-tokens", "8", "--no-check"
    )


@pytest.fixture(scope="module")
def bf16(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The model's own type, four requests."""
    folder = tmp_path_factory.mktemp("bf16")
    few = folder / "few.jsonl"
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    options = (*OPTIONS, *CACHED, "--max-tokens", "4")
    return h.harvest_alone(folder / "acts", h.REAL_MODEL, few, *options)


class Reference:
    """Plain forwards of the tokens that the uncached run recorded."""

    def __init__(self, tokens: dict[str, list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            h.REAL_MODEL, dtype=torch.float32, local_files_only=True
        ).eval()
        self.states: dict[str, dict[str, np.ndarray]] = {}
        with torch.no_grad():
            for name, ids in tokens.items():
                found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
                # hidden_states[0] is the embedding, so the output of layer N stands at N + 1.
                self.states[name] = {hook: found[int(hook.split(".")[1]) + 1][0].numpy()
                                     for hook in HOOKS}  # fmt: skip


def tokens_of(dataset: Dataset) -> dict[str, list[int]]:
    """Return the token ids of every request whose positions are all rows."""
    names = h.external_ids(dataset)
    found: dict[str, dict[int, int]] = {}
    for shard in dataset.shards:
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist():
            name = names[shard.manifest.run, row["request"]]
            found.setdefault(name, {})[row["position"]] = row["token_id"]
    return {name: [ids[i] for i in range(len(ids))] for name, ids in found.items()}


@pytest.fixture(scope="module")
def reference(uncached: Dataset) -> Iterator[Reference]:
    yield Reference(tokens_of(uncached))


def pairs(dataset: Dataset, reference: Reference, hook: str) -> tuple[np.ndarray, np.ndarray]:
    rows = h.rows_of(dataset, hook)
    want = [reference.states[name][hook][position] for name, position in rows]
    return np.stack(list(rows.values())), np.stack(want)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("which", ["cached", "uncached"])
def test_fp32_rows_equal_a_plain_forward(
    which: str, hook: str, request: pytest.FixtureRequest, reference: Reference
) -> None:
    got, want = pairs(request.getfixturevalue(which), reference, hook)
    distance = h.relative_l2(got, want)
    assert distance.mean() <= 1e-5
    assert distance.max() <= 1e-4


@pytest.mark.parametrize("hook", HOOKS)
def test_rows_shifted_by_one_position_are_clearly_apart(
    hook: str, uncached: Dataset, reference: Reference
) -> None:
    rows = h.rows_of(uncached, hook)
    shifted = [(row, reference.states[name][hook][position - 1])
               for (name, position), row in rows.items() if position > 0]  # fmt: skip
    got, want = (np.stack(side) for side in zip(*shifted, strict=True))
    assert h.cosine(got, want).mean() < 0.9


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_bf16_rows_follow_the_fp32_forward(hook: str, bf16: Dataset, reference: Reference) -> None:
    assert bf16.hooks[hook].dtype == "bfloat16"
    rows = h.rows_of(bf16, hook)
    # Greedy sampling in another precision may take another token; prompts are the same.
    prompt_len = {r["external_id"]: r["prompt_len"] for r in bf16.requests().to_pylist()}
    kept = {key: row for key, row in rows.items() if key[1] < prompt_len[key[0]]}
    assert len(kept) > 200
    got = np.stack(list(kept.values()))
    want = np.stack([reference.states[name][hook][position] for name, position in kept])
    assert h.cosine(got, want).mean() >= 0.999


def test_cache_references_resolve_to_what_a_run_without_cache_computes(
    cached: Dataset, uncached: Dataset
) -> None:
    names = h.external_ids(cached)
    run = next(iter(cached.runs))
    spans = cached.spans().filter(pc.equal(cached.spans()["disposition"], "cache_ref"))
    assert spans.num_rows >= 9
    for hook in HOOKS:
        ours, alone = h.rows_of(cached, hook), h.rows_of(uncached, hook)
        got, want = [], []
        for span in spans.to_pylist():
            for position in range(span["start"], span["stop"]):
                got.append(ours[names[run, span["ref_request"]], position])
                want.append(alone[names[run, span["request"]], position])
        distance = h.relative_l2(np.stack(got), np.stack(want))
        assert distance.mean() <= 1e-5
        assert distance.max() <= 1e-4


def test_cached_counts_are_the_engine_s_own(cached: Dataset) -> None:
    requests = cached.requests().to_pylist()
    assert all(r["engine_cached_tokens"] == r["cached_tokens"] for r in requests)
    assert sum(r["cached_tokens"] for r in requests) >= 9 * 128


def test_without_the_cache_every_position_is_a_row(uncached: Dataset) -> None:
    assert set(uncached.spans()["disposition"].to_pylist()) == {"captured"}
    assert uncached.multiplicity().num_rows == 0


def test_chunked_prefill_splits_prompts_over_steps(cached: Dataset) -> None:
    tokens = cached.tokens()
    chunks = tokens.filter(pc.equal(tokens["phase"], "prefill"))["chunk"]
    assert pc.max(chunks).as_py() >= 1


def test_multiplicity_counts_every_served_position_once(cached: Dataset) -> None:
    requests = cached.requests().to_pylist()
    served = sum(r["prompt_len"] + r["generated_len"] - 1 for r in requests)
    extra = sum((m["stop"] - m["start"]) * (m["count"] - 1)
                for m in cached.multiplicity().to_pylist())  # fmt: skip
    assert cached.n_rows + extra == served


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_side_with_multiplicity_is_that_of_a_harvest_without_a_cache(
    cached: Dataset, uncached: Dataset, split: Literal["train", "held_out"]
) -> None:
    sides = []
    for dataset, weights in ((cached, "multiplicity"), (uncached, None)):
        with actds.Loader(
            dataset.path, split=split, held_out=0.5, weights=weights, batch=32, drop_last=False,
            hooks=next(iter(dataset.hooks)), provenance=["position", "token_id"],
        ) as loader:  # fmt: skip
            read: Counter[tuple[int, int]] = Counter()
            for _, rows in loader:
                columns = (rows[name].tolist() for name in ("position", "token_id"))
                read.update(zip(*columns, strict=True))
        sides.append(read)
    assert sides[0] == sides[1] and max(sides[0].values()) > 1


@pytest.mark.full
def test_the_run_record_says_what_the_worker_saw(cached: Dataset, bf16: Dataset) -> None:
    fields = next(iter(cached.runs.values())).fields
    seen = {name: field.value for name, field in fields.items() if field.origin == "observed"}
    assert seen["numerics.dtype"] == "float32"
    assert seen["serving.prefix_caching"] is True
    assert seen["serving.max_num_batched_tokens"] == 128
    assert seen["model.n_layers"] == 30
    other = next(iter(bf16.runs.values())).fields
    assert other["numerics.dtype"].value == "bfloat16"
