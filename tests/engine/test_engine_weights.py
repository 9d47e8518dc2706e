"""Weights that change in a live engine: the rows of a run are of one model, and of no two."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds.format.schema import RunRecord
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.server import wait_until_ended
from actds_writers.engines.vllm.weights import HARMLESS, SLEEP, WAKE

pytestmark = pytest.mark.engine

HOOK, LAYER = "resid_post.15", 15
SERVE = """
import time
from vllm import LLM, SamplingParams

llm = LLM(
    {model!r}, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
    enable_prefix_caching=True, max_num_seqs=1,
    additional_config={{"actds": {{
        "out": {out!r}, "hooks": "resid_post:0,15", "overflow": "block", "entropy": True}}}},
)
engine = llm.llm_engine
shared = [100 + 37 * i % 1000 for i in range(70)]

def add(name, begin=shared):
    prompt = {{"prompt_token_ids": [*begin, 200 + len(name), ord(name[-1])]}}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    engine.add_request(name, prompt, params)

def serve(*names, begin=shared):
    for name in names:
        add(name, begin)
    while engine.has_unfinished_requests():
        engine.step()

def reload(folder):
    llm.collective_rpc("reload_weights", kwargs={{"weights_path": folder}})

def louder(model):
    import torch
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1.25)

serve("a1", "a2")
reload({model!r})  # the same ones
llm.apply_model(lambda model: sum(p.sum().item() for p in model.parameters()))
serve("a3")
add("cut", shared[3:])
add("waits", shared[5:])
engine.step()
engine.step()
reload({other!r})
serve("stale")  # on blocks that A has cached
serve("b1", "b2", begin=shared[9:])
llm.reset_prefix_cache()
serve("b3", "b4")
llm.apply_model(louder)
llm.reset_prefix_cache()
serve("c1")
llm.sleep(2)  # ignored on a CPU, but a call
llm.wake_up()
serve("c2")
inner = engine.engine_core.engine_core.model_executor.driver_worker.worker
louder(inner.model_runner.get_model())  # no call
serve("unseen", begin=shared[1:])
time.sleep(2)
llm.reset_prefix_cache()
serve("d1", "d2")
reload({other!r})
llm.reset_prefix_cache()
serve("e1")
engine.engine_core.shutdown()
"""
MODELS = {"a": "A", "b": "B", "w": "B", "c": "B, louder", "d": "B, twice louder", "e": "B"}
"""The model of a captured request, by the first letter of its name."""


def perturbed(model: Path, folder: Path) -> Path:
    """Write a model of the same shape, each weight some per cent off."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    random = torch.Generator().manual_seed(0)
    weights = {
        name: (value.float() * (1 + 0.05 * torch.randn(value.shape, generator=random))).to(
            value.dtype
        )
        for name, value in load_file(model / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(h.REAL_MODEL.resolve(), tmp_path_factory.mktemp("other") / "b")


@pytest.fixture(scope="module")
def served(other: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("served") / "acts"
    script = SERVE.format(model=str(h.REAL_MODEL.resolve()), other=str(other), out=str(out))
    environment = h.environment(**h.ONE_PROCESS)
    done = h.warm_engine().run(["-c", script], environment, h.TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seal(open_store(str(out)))
    return h.validated(out)


def runs_in_order(dataset: Dataset) -> list[RunRecord]:
    return sorted(dataset.runs.values(), key=lambda record: record.started_ns)


def weights_of(folder: Path) -> str:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(f"model.safetensors {digest}\n".encode()).hexdigest()


def names_by_run(dataset: Dataset, disposition: str) -> list[set[str]]:
    """Return the requests of each run that have a span of some disposition."""
    names, spans = h.external_ids(dataset), dataset.spans(run=True).to_pylist()
    return [
        {
            names[span["run"], span["request"]]
            for span in spans
            if span["run"] == record.run and span["disposition"] == disposition
        }
        for record in runs_in_order(dataset)
    ]


def test_the_methods_that_set_no_weights_are_those_of_vllm_s_workers() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert {name for name in HARMLESS | SLEEP | WAKE if not hasattr(Worker, name)} == set()
    setters = ("reload_weights", "update_weights", "finish_weight_update", "apply_model")
    assert all(hasattr(Worker, name) and name not in HARMLESS for name in setters)


def test_each_change_of_the_weights_begins_a_run_and_the_same_weights_do_not(
    served: Dataset, other: Path
) -> None:
    records = [record.fields for record in runs_in_order(served)]
    hashed = [record["model.weights_sha256"].value for record in records]
    a, b = weights_of(h.REAL_MODEL), weights_of(other)
    assert hashed == [a, b, None, None, b]
    reasons = [str(record["model.weights_sha256"].reason) for record in records]
    assert "apply_model" in reasons[2] and "no call" in reasons[3]
    loaded = [record["model.parameters_sha256"].value for record in records]
    assert loaded[1] == loaded[4] and len(set(loaded)) == 4
    assert [record["model.name"].value for record in records] == ["model", *["b"] * 4]
    assert [record["capture.check"].origin for record in records] == ["observed", *["unknown"] * 4]
    captured = names_by_run(served, "captured")
    assert captured[0] == {"a1", "a2", "a3", "cut"} and captured[1] == {
        "waits", "b1", "b2", "b3", "b4",
    }  # fmt: skip
    assert captured[2:] == [{"c1", "c2"}, {"d1", "d2"}, {"e1"}]


def test_the_rows_of_each_run_are_those_of_its_model(served: Dataset, other: Path) -> None:
    rows = h.rows_of(served, HOOK)
    want = {}
    tokens = tokens_of(served)
    for model, states in references(other):
        for name, ids in tokens.items():
            want[name, model] = states(ids)
    assert {MODELS.get(name[0]) for name in tokens} - {None} == {*MODELS.values()} and rows
    for (name, position), row in rows.items():
        own = "A" if name == "cut" else MODELS[name[0]]
        far = {
            model: float(h.relative_l2(row, states[position]))
            for (one, model), states in want.items()
            if one == name
        }
        assert far[own] < 1e-4, (name, position, far)
        assert all(distance > 0.01 for model, distance in far.items() if model != own) or (
            position == 0
        ), (name, position, far)


def test_no_reference_crosses_a_change_and_rows_on_old_blocks_are_stored_by_nobody(
    served: Dataset,
) -> None:
    names, spans = h.external_ids(served), served.spans(run=True).to_pylist()
    captured = {(s["run"], s["request"]) for s in spans if s["disposition"] == "captured"}
    hits = [s for s in spans if s["disposition"] == "cache_ref"]
    assert all((s["run"], s["ref_request"]) in captured for s in hits)
    assert {names[s["run"], s["request"]] for s in hits} == {"a2", "a3", "b2", "b4", "d2"}
    mixed = [s for s in spans if s["disposition"] == "filtered"]
    assert {s["reason"] for s in mixed} == {"unsupported:mixed_weights"}
    filtered = names_by_run(served, "filtered")
    assert filtered == [set(), {"cut", "stale"}, set(), {"unseen"} & filtered[3], set()]
    dropped = [s for s in spans if s["disposition"] == "dropped"]
    assert {s["reason"] for s in dropped} == {"changed_weights"}
    assert {names[s["run"], s["request"]] for s in dropped} == {"unseen"}
    # Not begun by the first run, which therefore owes nothing for it.
    lines = [r for r in served.requests(run=True).to_pylist() if r["external_id"] == "waits"]
    assert sorted(line["finish_reason"] for line in lines) == ["length", "unbegun"]


def test_the_audit_names_the_models_of_the_runs(served: Dataset) -> None:
    audited = actds.audit(served.path).result
    (place,) = [place for place in audited.places if place.name == "identity"]
    assert place.level == "FAIL" and "different models" in place.sentence
    assert len(place.to_do) >= 2


RUNNING = """
import json
from vllm import LLM, SamplingParams

def serve():
    llm = LLM(
        {model!r}, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
        enable_prefix_caching=True, max_num_seqs=2, additional_config={{"actds": {{
            "out": {out!r}, "hooks": "resid_post:0,15", "overflow": "block", "metrics_port": 0}}}},
    )
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    engine, tokens = llm.llm_engine, {{}}

    def add(name, first, n_tokens):
        tokens[name] = [100 + 37 * i % 1000 for i in range(first, first + 70)]
        params = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
        engine.add_request(name, {{"prompt_token_ids": tokens[name]}}, params)

    def step():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] += output.outputs[0].token_ids

    add("runs1", 0, 60)
    add("runs2", 1, 60)
    add("waits", 2, 4)
    for _ in range(8):
        step()
    llm.collective_rpc("reload_weights", kwargs={{"weights_path": {other!r}}})
    while engine.has_unfinished_requests():
        step()
    engine.engine_core.shutdown(timeout=120)
    print("TOKENS" + json.dumps(tokens))

if __name__ == "__main__":
    serve()
"""


@pytest.mark.full
def test_requests_that_run_while_the_weights_change_have_rows_of_the_first_model_only(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous scheduling, and engine core and worker in processes of their own."""
    (tmp_path / "sitecustomize.py").write_text(
        "from actds_testing.async_engine import allow_async_scheduling\nallow_async_scheduling()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    model, out = h.REAL_MODEL.resolve(), tmp_path / "acts"
    script = tmp_path / "serve.py"
    script.write_text(RUNNING.format(model=str(model), other=str(other), out=str(out)))
    done = subprocess.run(
        [sys.executable, str(script)], env=h.environment(), capture_output=True, text=True,
        timeout=h.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tokens = json.loads(done.stdout.partition("TOKENS")[2].splitlines()[0])
    wait_until_ended(str(out))
    seal(open_store(str(out)))
    dataset = h.validated(out)
    first, second = names_by_run(dataset, "captured")
    assert (first, second) == ({"runs1", "runs2"}, {"waits"})
    assert names_by_run(dataset, "filtered") == [set(), {"runs1", "runs2"}]
    ends = {
        (row["external_id"], row["finish_reason"]) for row in dataset.requests(run=True).to_pylist()
    }
    assert ends == {
        ("runs1", "unfinished"), ("runs2", "unfinished"), ("waits", "unbegun"),
        ("runs1", "length"), ("runs2", "length"), ("waits", "length"),
    }  # fmt: skip
    states = dict(itertools.islice(references(other), 2))
    plain = {name: states["B" if name == "waits" else "A"](ids) for name, ids in tokens.items()}
    rows = h.rows_of(dataset, HOOK)
    assert all(h.relative_l2(row, plain[name][at]) < 1e-4 for (name, at), row in rows.items())


def tokens_of(dataset: Dataset) -> dict[str, list[int]]:
    """Return the tokens of each request that has rows, its prefix-cache hits included."""
    prompts: dict[str, dict[int, int]] = {}
    names = h.external_ids(dataset)
    shared = [100 + 37 * i % 1000 for i in range(70)]
    for shard in dataset.shards:
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist():
            name = names[shard.manifest.run, row["request"]]
            prompts.setdefault(name, {})[row["position"]] = row["token_id"]
    found = {}
    for name, ids in prompts.items():
        first = {"cut": 3, "waits": 5, "b1": 9, "b2": 9}.get(name, 0)
        begin = dict(enumerate(shared[first:]))
        assert all(begin.get(position, token) == token for position, token in ids.items())
        whole = {**begin, **ids}
        found[name] = [whole[i] for i in range(len(whole))]
    return found


def references(other: Path) -> Iterator[tuple[str, Callable[[list[int]], np.ndarray]]]:
    """Yield each model by name, with a plain forward that returns ``(n, channels)``."""
    import torch
    from transformers import AutoModelForCausalLM

    def states(model: Any) -> Callable[[list[int]], np.ndarray]:
        def of(ids: list[int]) -> np.ndarray:
            with torch.no_grad():
                out = model(torch.tensor([ids]), output_hidden_states=True)
            return np.asarray(out.hidden_states[LAYER + 1][0])

        return of

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    yield "A", states(load(h.REAL_MODEL))
    model = load(other)
    yield "B", states(model)
    for name in ("B, louder", "B, twice louder"):
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight"):
                    parameter.mul_(1.25)
        yield name, states(model)
