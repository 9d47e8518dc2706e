"""Engines that schedule ahead of their results, or draft: the account is that of a witness.

The witness is in the engine's process and knows nothing of the account: it writes down the tokens
and positions that each forward was fed and what each client got. From these two alone follows which
rows there must be. The rows are those of a plain forward of ``transformers``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from actds.errors import ActdsError
from actds_testing import drafters, witness
from actds_testing import harvest as h
from actds_testing.witness import CROWDED, NGRAM, compare, compare_rows, counts, harvest, serve
from actds_writers.config import WriteSettings
from actds_writers.engines.vllm import VLLM
from actds_writers.harvest import prepare

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return witness.make_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


def test_rows_past_a_stop_are_undelivered_under_asynchronous_scheduling(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    one = harvest(
        tmp_path, model, prompts, asynchronous=True, leave=0.005, engine=CROWDED,
        settings={"temperature": 1.0},
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    found = counts(one)
    assert found["undelivered"]
    assert found["preempted"] and found["recomputed"] and found["hits"] and found["left"]
    fields = next(iter(one.dataset.runs.values())).fields
    assert fields["serving.async_scheduling"].value is True


def test_rejected_drafts_never_become_rows(model: Path, prompts: Path, tmp_path: Path) -> None:
    one = harvest(
        tmp_path, model, prompts, leave=0.005, engine={**CROWDED, "speculative_config": NGRAM},
    )  # fmt: skip
    compare(one)
    compare_rows(model, [one])
    found = counts(one)
    assert found["rejected"] and found["accepted"] and found["undelivered"]
    assert found["preempted"] and found["hits"] and found["left"]


@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        ("draft_model", True),
        pytest.param("draft_model", False, marks=pytest.mark.full),
        pytest.param("eagle", False, marks=pytest.mark.full),
        pytest.param("eagle", True, marks=pytest.mark.full),
        pytest.param("eagle3", True, marks=pytest.mark.full),
        pytest.param("mtp", False, marks=pytest.mark.full),
    ],
)
def test_rows_that_a_drafter_computes_are_none_of_its_target(
    method: str, ahead: bool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    """A draft model has its target's class and its layers' names; a head shares its embedding."""
    drafts = drafters.make_drafter(method, tmp_path / "drafter", model)
    target = tmp_path / "drafter" if method == "mtp" else model
    one = harvest(
        tmp_path, target, prompts, asynchronous=ahead, leave=0.005,
        engine={**CROWDED, "speculative_config": drafts},
        settings={"hooks": "resid_post:0,2;embed"},
    )  # fmt: skip
    compare_drafted(one, target, method)
    assert counts(one)["undelivered"] or not ahead


def compare_drafted(one: witness.Harvest, target: Path, method: str) -> None:
    """Check account and rows of a target beside a drafter, with its embedding, that was right and
    wrong, in a crowded engine."""
    compare(one)
    compare_rows(target, [one])
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tokens = {
        r["external_id"]: one.facts.got[witness.name_of(r["internal_id"])]
        for r in one.table("requests").to_pylist()
    }
    rows = h.rows_of(one.dataset, "embed.0")
    assert len(rows) > 400
    for (name, position), row in rows.items():
        assert np.array_equal(row, table[tokens[name][position]])
    found = counts(one)
    assert found["rejected"] and found["accepted"] and found["preempted"]
    fields = next(iter(one.dataset.runs.values())).fields
    assert fields["serving.speculative_method"].value == method


def test_a_harvest_that_calls_rows_past_a_stop_captured_does_not_seal(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    done = serve(
        tmp_path, model, prompts, asynchronous=True, forgetful=True,
        settings={"temperature": 1.0},
    )  # fmt: skip
    assert done.returncode != 0
    assert "E419" in done.stderr + done.stdout


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_stop_string_is_a_stop_and_nothing_of_it_is_served_again(
    ahead: bool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    """Ahead, a step is under way when the front end finds the string; with drafts, tokens are."""
    ways = {} if ahead else {"speculative_config": NGRAM}
    params = {"stop": list("bcdefg"), "min_tokens": 2}
    one = harvest(
        tmp_path, model, prompts, asynchronous=ahead, leave=0.005,
        engine={**CROWDED, **ways, "sampling_params": params}, settings={"temperature": 1.0},
    )  # fmt: skip
    requests = compare(one)
    compare_rows(model, [one])
    assert one.facts.strings and counts(one)["left"]
    assert counts(one)["undelivered"] or not ahead
    ends = Counter(r["finish_reason"] for r in requests.values())
    assert ends["stop"] >= len(one.facts.strings) and ends["abort"] == counts(one)["left"]
    for r in requests.values():
        said = json.loads(r["sampling"])
        assert (said["stop"], said["min_tokens"]) == (params["stop"], 2)
        # Of the generation config, and the tokenizer's own among them.
        assert {said["eos_token_id"], *said["stop_token_ids"]} == set(range(2, 10))
    task = json.loads((tmp_path / "task.json").read_text())["settings"]
    again = prepare.make_plan(WriteSettings.of(task), VLLM.options(task["engine_args"]))
    left = {r["source_row"] for r in requests.values() if r["finish_reason"] == "abort"}
    assert prepare.finished_rows(task["out"], again) == set(range(16)) - left
    task["engine_args"]["sampling_params"] = {**params, "top_k": 5}
    other = prepare.make_plan(WriteSettings.of(task), VLLM.options(task["engine_args"]))
    with pytest.raises(ActdsError, match=r"E010 sampling.params: .*top_k"):
        prepare.finished_rows(task["out"], other)


SAMPLED: dict[str, dict[str, Any]] = {
    "samples": {"n": 3, "logprobs": 2},
    "prompt-logprobs": {"n": 2, "prompt_logprobs": 1},
    "choice": {"structured_outputs": {"choice": ["yes, certainly", "no"]}},
    "regex": {"n": 2, "structured_outputs": {"regex": "[a-f]{4,40}"}, "logprobs": 1},
    "json": {
        "structured_outputs": {
            "json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        }
    },
}


@pytest.mark.parametrize(
    "name", ["samples", *(pytest.param(n, marks=pytest.mark.full) for n in list(SAMPLED)[1:])]
)
@pytest.mark.parametrize(
    "ahead", [True, pytest.param(False, marks=pytest.mark.full)], ids=["ahead", "in-step"]
)
def test_samples_logprobs_and_structured_outputs_are_accounted_for(
    name: str, ahead: bool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    params = SAMPLED[name]
    engine = {**CROWDED, "sampling_params": params}
    one = harvest(
        tmp_path, model, prompts, asynchronous=ahead, engine=engine,
        settings={"temperature": 1.0, "max_tokens": 24},
    )  # fmt: skip
    requests = compare(one)
    compare_rows(model, [one])
    n = params.get("n", 1)
    assert len(requests) == 16 * n
    ids = {f"{i}_q{k}" if n > 1 else f"q{k}" for i in range(n) for k in range(16)}
    assert {r["external_id"] for r in requests.values()} == ids
    assert all(r["source_row"] == int(r["external_id"].split("q")[1]) for r in requests.values())
    stopped = any(r["finish_reason"] == "stop" for r in requests.values())
    assert counts(one)["undelivered"] or not (ahead and stopped)
    for r in requests.values():
        said = json.loads(r["sampling"])
        assert said.get("logprobs") == params.get("logprobs")
        asked = {*params.get("structured_outputs", {})}
        # vLLM may turn a choice or a schema into a grammar.
        assert {*said.get("structured_outputs", ())} <= {*asked, *(["grammar"] if asked else [])}


def mixture(seed: int) -> dict[str, Any]:
    """Return a random task: scheduled ahead or with drafts, crowded, with clients that leave."""
    chance = random.Random(seed)
    drafts = {**NGRAM, "num_speculative_tokens": chance.choice([1, 3, 5])}
    ahead = seed % 2 == 0
    return {
        "seed": seed,
        "asynchronous": ahead,
        "leave": chance.choice([0.002, 0.01]),
        "engine": {
            "num_gpu_blocks_override": chance.randint(11, 16),
            "max_num_batched_tokens": chance.choice([24, 48, 96]),
            "max_num_seqs": chance.randint(4, 10),
            **({} if ahead else {"speculative_config": drafts}),
        },
        "settings": {
            "temperature": 1.0 if ahead else chance.choice([0.0, 1.0]),
            "max_tokens": chance.randint(30, 80),
            "seed": seed,
        },
    }


@pytest.mark.full
def test_kv_from_outside_is_accounted_for_when_scheduled_ahead(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """The second engine loads what the first one stored."""
    (tmp_path / "kv").mkdir()
    transfer = witness.transfer(tmp_path / "kv")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        one = harvest(
            tmp_path / name, model, prompts, asynchronous=True, settings={"temperature": 1.0},
            # The example connector stores a prompt at its first step, as if that were all of it.
            engine={"kv_transfer_config": transfer, "max_num_batched_tokens": 4096,
                    **({"num_gpu_blocks_override": 14} if name == "second" else {})},
        )  # fmt: skip
        compare(one)
        compare_rows(model, [one])
    assert one.total("external") > 0
    assert h.total(one.dataset.requests(), "n_preemptions") > 0


@pytest.mark.full
def test_six_random_mixtures_are_accounted_for_to_the_position(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(6):
        where = tmp_path / str(seed)
        where.mkdir()
        one = harvest(where, model, prompts, **mixture(seed))
        compare(one)
        compare_rows(model, [one])
        happened.update(counts(one))
    assert all(happened[name] for name in happened), happened


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="vLLM's second model runner needs Triton, here its interpreter: pip install triton",
)
@pytest.mark.parametrize("method", ["none", "ngram", *drafters.METHODS])
def test_the_second_model_runner_is_accounted_for_alike(
    method: str, model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    interpreted: dict[str, Any] = {"cold": True, "interpret": True}
    if method == "none":
        one = harvest(
            tmp_path, model, prompts, **interpreted, asynchronous=True,
            settings={"temperature": 1.0, "max_tokens": 20},
        )  # fmt: skip
        compare(one)
        compare_rows(model, [one])
        return
    target, drafts = model, dict(NGRAM)
    if method != "ngram":
        drafts = drafters.make_drafter(method, tmp_path / "drafter", model)
        target = tmp_path / "drafter" if method == "mtp" else model
    one = harvest(
        tmp_path, target, prompts, **interpreted, leave=0.005,
        asynchronous=method != "ngram",  # with which vLLM is never ahead
        engine={**CROWDED, "speculative_config": drafts},
        settings={"hooks": "resid_post:0,2;embed", "max_tokens": 40},
    )  # fmt: skip
    compare_drafted(one, target, method)
