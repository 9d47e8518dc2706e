"""A hook kind that another package registers, in the real engine, beside ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actds_testing import harvest as h
from actds_testing import toy
from actds_testing.tiny import make_random_model

pytestmark = [pytest.mark.engine, pytest.mark.full]

HOOKS = ["resid_post.1", "toy_mlp.1", "toy_mlp.2"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kind_from_outside_is_captured_checked_and_stored_in_its_own_type(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = toy.register(tmp_path / "site")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(site))
    model = make_random_model(tmp_path / "model")
    records = [{"id": f"q{n}", "prompt": "a quick brown fox"[: 5 + 3 * n]} for n in range(4)]
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", records)
    words = ["--hooks", "resid_post:1;toy_mlp:1,2", "--max-tokens", "3"]
    words += ["--engine-arg", "dtype=float32", "--engine-arg", "block_size=32"]
    words += ["--engine-arg", "max_model_len=128", "--engine-arg", "max_num_batched_tokens=128"]
    words += [] if compiled else h.EAGER
    # A process of its own: the warm one was started where the kind is not installed.
    dataset = h.harvest(tmp_path / "acts", model, prompts, *words, *h.ALONE, **h.ONE_PROCESS)
    assert [(hook.name, hook.kind, hook.dtype) for hook in dataset.hooks.values()] == [
        (name, name.partition(".")[0], "float32") for name in HOOKS
    ]
    record = dataset.catalog.runs[dataset.catalog.run_ids[0]].fields
    check = json.loads(str(record["capture.check"].value))
    assert check["against"] == "transformers" and set(check["hooks"]) == set(HOOKS)

    tokens = {
        (h.external_ids(dataset)[shard.manifest.run, row["request"]], row["position"]): row
        for shard in dataset.shards
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist()
    }
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[int, torch.Tensor] = {}
    for layer in (1, 2):
        plain.model.layers[layer].mlp.register_forward_hook(
            lambda _m, _i, output, layer=layer: seen.update({layer: output[0]})
        )
    for name in {name for name, _ in tokens}:
        n = 1 + max(position for one, position in tokens if one == name)
        ids = torch.tensor([[tokens[name, position]["token_id"] for position in range(n)]])
        with torch.no_grad():
            stream = plain(input_ids=ids, output_hidden_states=True).hidden_states[2][0]
        want = {"resid_post.1": stream, "toy_mlp.1": seen[1], "toy_mlp.2": seen[2]}
        for hook, values in want.items():
            rows = h.rows_of(dataset, hook)
            got = np.stack([rows[name, position] for position in range(n)])
            assert h.relative_l2(got, values.numpy()).mean() < 1e-5, hook
