"""Which files of a model a harvest reads, what it calls the model, and how it was sampled."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.publish.card import card
from actds_testing.tiny import byte_tokenizer, make_random_model
from actds_writers.config import WriteSettings
from actds_writers.engines.vllm import VLLM
from actds_writers.engines.vllm.worker import model_files
from actds_writers.harvest.prepare import Plan, make_plan
from actds_writers.model_folder import model_name, weights_sha256
from actds_writers.provenance import model_facts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def cached(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the snapshot of ``org/tiny`` in a hub cache, made as the hub's client makes it."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    root = cache / "models--org--tiny"
    snapshot = root / "snapshots" / COMMIT
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    snapshot.mkdir(parents=True)
    for ref in ("main", "v1"):
        (root / "refs" / ref).write_text(COMMIT)
    for path in model.iterdir():
        blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def prompts(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def planned(folder: Path, model: str | Path, **options: Any) -> Plan:
    source = prompts(folder, {"prompt": "Hello, you"})
    settings = WriteSettings.of(
        {"out": folder / "out", "model": model, "prompts": source, "hooks": "resid_post:0",
         "engine_args": options}
    )  # fmt: skip
    return make_plan(settings, VLLM.options(options))


def value(plan: Plan, name: str) -> Any:
    return next(fact.value for fact in plan.facts if fact.name == name)


def test_a_tokenizer_of_its_own_encodes_the_prompts_and_is_on_record(
    model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    byte_tokenizer(add_bos=True).save_pretrained(other)
    plan = planned(tmp_path, model, tokenizer=str(other))
    want = AutoTokenizer.from_pretrained(other)("Hello, you")["input_ids"]
    assert plan.encoded[0].token_ids == want
    assert planned(tmp_path, model).encoded[0].token_ids == want[1:]
    digest = hashlib.sha256((other / "tokenizer.json").read_bytes()).hexdigest()
    assert value(plan, "tokenizer.sha256") == digest


def test_configurations_of_their_own_are_read(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert {7, 9} <= set(planned(tmp_path, model, generation_config=str(other)).tokens.eos)
    assert not {7, 9} & set(planned(tmp_path, model, generation_config="vllm").tokens.eos)
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    settings = {"out": tmp_path / "out", "model": model, "hooks": "resid_post:2",
                "prompts": prompts(tmp_path, {"prompt": "a"})}  # fmt: skip
    make_plan(WriteSettings.of(settings), VLLM.options({}))
    with pytest.raises(ActdsError, match="E007"):
        make_plan(WriteSettings.of(settings), VLLM.options({"hf_config_path": str(other)}))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tokenizer_mode": "mistral"}, "E012"),
        ({"override_generation_config": {"temperature": 0.5}}, "E012"),
        ({"code_revision": "main"}, "E012"),
        ({"revision": "main"}, "E005"),  # of a folder
        ({"tokenizer_revision": "main"}, "E009"),
        ({"tokenizer": "org/nothing"}, "E005"),
        ({"hf_config_path": "org/nothing"}, "E005"),
        ({"generation_config": "org/nothing"}, "E005"),
    ],
)
def test_what_would_be_ignored_is_refused(
    options: dict[str, Any], code: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ActdsError, match=f"{code} .*{next(iter(options))}|{code} .*{model.name}"):
        planned(tmp_path, model, **options)


def test_a_repository_is_found_in_the_hub_cache_or_refused(cached: Path, tmp_path: Path) -> None:
    for options in ({}, {"revision": "v1"}, {"revision": COMMIT}):
        settings = {"out": tmp_path / "out", "prompts": "p", "hooks": "resid_post:0",
                    "model": "org/tiny", "engine_args": options}  # fmt: skip
        found = WriteSettings.of(settings).model
        assert found == cached
        assert WriteSettings.of({**settings, "model": found}).model == cached
    with pytest.raises(ActdsError, match=r"E005 model org/tiny: .*nothing at v2"):
        WriteSettings.of({**settings, "engine_args": {"revision": "v2"}})
    with pytest.raises(ActdsError, match=r"E005 model org/gone(.|\n)*hf download org/gone"):
        WriteSettings.of({**settings, "model": "org/gone", "engine_args": {}})
    assert model_name(cached) == "org/tiny"
    assert "revision" not in VLLM.options({"revision": "v1"}).arguments()  # type: ignore[attr-defined]


def test_a_server_hashes_what_it_finds_in_the_hub_cache(cached: Path) -> None:
    def facts() -> dict[str, Any]:
        served = SimpleNamespace(
            model="org/tiny", tokenizer="org/tiny", revision=COMMIT, tokenizer_revision=COMMIT,
            hf_config_path=None, generation_config="auto",
        )  # fmt: skip
        found = model_facts(model_files(served), no_tokenizer="none")
        return {fact.name: fact.value or fact.reason for fact in found}

    (weights,) = cached.glob("*.safetensors")
    line = f"{weights.name} {hashlib.sha256(weights.read_bytes()).hexdigest()}\n"
    assert facts() == {
        "model.weights_sha256": hashlib.sha256(line.encode()).hexdigest(),
        "tokenizer.sha256": hashlib.sha256((cached / "tokenizer.json").read_bytes()).hexdigest(),
    }
    index = {"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}
    (cached / "model.safetensors.index.json").write_text(json.dumps(index))
    assert facts()["model.weights_sha256"].startswith("model-2.safetensors was not in the folder")


@pytest.mark.standard
def test_a_dataset_says_which_model_and_which_tokens_it_is_of(cached: Path, tmp_path: Path) -> None:
    given = [[5, 6, 7, 8], [9, 10]]
    source = prompts(
        tmp_path,
        {"input_ids": [0, 0, *given[0]], "attention_mask": [0, 0, 1, 1, 1, 1]},
        {"prompt_token_ids": given[1], "text": "another text"},
    )
    settings: dict[str, Any] = {
        "model": "org/tiny", "prompts": source, "hooks": "resid_post:0", "max_tokens": 2,
        "engine": "transformers",
    }  # fmt: skip
    actds.write(out=tmp_path / "acts", **settings)
    dataset = actds.open(tmp_path / "acts")
    (record,) = dataset.runs.values()
    assert record.fields["model.name"].value == "org/tiny"
    assert record.fields["model.revision"].value == COMMIT
    digests = sorted(
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in cached.glob("*.safetensors")
    )
    want = hashlib.sha256("".join(digests).encode()).hexdigest()
    assert record.fields["model.weights_sha256"].value == want == weights_sha256(cached)
    lines = dataset.tokens(run=True).to_pylist()
    for request, ids in enumerate(given):
        fed = {line["position"]: line["token_id"] for line in lines if line["request"] == request}
        assert [fed[n] for n in range(len(ids))] == ids
    assert record.fields["sampling.params"].value == "none"
    with pytest.raises(ActdsError, match=r"E010 sampling\.seed"):
        actds.write(out=tmp_path / "acts", resume=True, seed=1, **settings)
    np.save(tmp_path / "v.npy", np.ones(record.fields["model.d_model"].value, np.float32))
    edit = {"hook": "resid_post.0", "op": "add", "vector": "v.npy", "strength": 1.0}
    document = {
        "schema": "actds.interventions/1",
        "interventions": [{"name": "v", "edits": [edit]}],
    }
    (tmp_path / "v.json").write_text(json.dumps(document))
    with pytest.raises(ActdsError, match=r"E010 capture\.interventions"):
        actds.write(out=tmp_path / "acts", resume=True, intervene=tmp_path / "v.json", **settings)
    again = actds.write(out=tmp_path / "acts", resume=True, **settings)
    assert again.run is None
    card(tmp_path / "acts")
    assert "# Activations of org/tiny" in (tmp_path / "acts" / "README.md").read_text()


def test_a_model_is_called_what_it_is_served_as() -> None:
    assert model_name("/models/llama") == "llama"
    assert model_name("org/name") == "org/name"
    assert model_name("/models/llama", "/models/llama") == "llama"
    assert model_name("/models/llama", "chat") == "chat"
    assert model_name("/models/llama", "/srv/names/chat") == "chat"
    assert model_name("/cache/models--org--name/snapshots/0f") == "org/name"
