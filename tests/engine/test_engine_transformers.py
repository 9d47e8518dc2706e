"""The transformers writer: the same pipeline, and rows of a plain forward of the same tokens."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.errors import ActdsError
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.families.layouts import watched
from actds_testing.families.models import FAMILIES
from actds_testing.tiny import make_random_model
from actds_writers.harvest.result import HarvestResult, Observer
from actds_writers.monitor.progress import Snapshot

pytestmark = pytest.mark.engine

HOOKS = ("resid_post.0", "resid_post.2")
OPTIONS = ("--engine", "transformers", "--hooks", "resid_post:0,2", "--max-tokens", "7")
# Batches of four whose prompts are prefilled in chunks of 12 columns: padding in both directions.
BATCHES = ("--engine-arg", "max_num_seqs=4", "--engine-arg", "max_num_batched_tokens=48")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts of 1 to 73 tokens, so that a batch holds short ones and long ones."""
    lengths = (1, 5, 73, 3, 40, 12, 13, 31, 67, 9)
    records = [{"id": f"q{i}", "prompt": ("abcdefgh" * 20)[i : i + n]}
               for i, n in enumerate(lengths)]  # fmt: skip
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def acts(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> actds.Dataset:
    out = tmp_path_factory.mktemp("harvest") / "acts"
    return h.harvest_warm(out, model, prompts, *OPTIONS, *BATCHES, "--canary", "3")


def reference(model: Path, tokens: dict[str, list[int]]) -> dict[tuple[str, str], np.ndarray]:
    """Return float32 states by (external id, hook), of one request at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found: dict[tuple[str, str], np.ndarray] = {}
    for name, ids in tokens.items():
        with torch.no_grad():
            states = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for hook in HOOKS:
            # hidden_states[0] is the embedding, so the output of layer N stands at N + 1.
            found[name, hook] = states[int(hook.split(".")[1]) + 1][0].numpy()
    return found


def tokens_of(dataset: actds.Dataset) -> dict[str, list[int]]:
    names = h.external_ids(dataset)
    found: dict[str, dict[int, int]] = {}
    for row in dataset.tokens(run=True).to_pylist():
        name = names[row["run"], row["request"]]
        found.setdefault(name, {})[row["position"]] = row["token_id"]
    return {name: [ids[i] for i in range(len(ids))] for name, ids in found.items()}


def test_rows_equal_a_plain_forward_and_no_neighbour(model: Path, acts: actds.Dataset) -> None:
    states = reference(model, tokens_of(acts))
    for hook in HOOKS:
        rows = h.rows_of(acts, hook)
        got = np.stack(list(rows.values()))
        want = np.stack([states[name, hook][position] for name, position in rows])
        assert h.relative_l2(got, want).max() <= 1e-5
        moved = [(row, states[name, hook][position - 1])
                 for (name, position), row in rows.items() if position]  # fmt: skip
        # A token that repeats has nearly the row of its neighbour: still a hundred times the limit.
        assert h.relative_l2(*(np.stack(side) for side in zip(*moved, strict=True))).min() > 1e-3


def test_every_position_of_every_request_is_a_row(acts: actds.Dataset) -> None:
    requests = acts.requests().to_pylist()
    assert len(requests) == 10
    assert {r["finish_reason"] for r in requests} <= {"stop", "length"}
    assert acts.n_rows == sum(r["prompt_len"] + r["generated_len"] - 1 for r in requests)
    assert {r["prompt_len"] for r in requests} >= {1, 73}
    steps = acts.steps().to_pylist()
    assert max(s["n_requests"] for s in steps) == 4
    assert any(s["padded_tokens"] > s["batch_tokens"] for s in steps)
    assert all(s["padded_tokens"] <= 48 for s in steps)
    assert max(acts.tokens()["chunk"].to_pylist()) > 7


def test_canaries_replayed_alone_are_the_same_rows(acts: actds.Dataset) -> None:
    canary = acts.canary().to_pylist()
    spans = {r["request"]: r["stop"] for r in acts.spans().to_pylist()}
    replayed = {row["request"] for row in canary}
    assert len(replayed) == 3
    assert len(canary) == len(HOOKS) * sum(spans[request] for request in replayed)
    assert {row["verdict"] for row in canary} == {"same"}
    assert max(row["relative_l2"] for row in canary) <= 1e-5
    assert all(row["token_id"] == row["replayed_token_id"] for row in canary)


def test_greedy_tokens_are_those_of_generate(model: Path, acts: actds.Dataset) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lengths = {r["external_id"]: r["prompt_len"] for r in acts.requests().to_pylist()}
    for name, ids in tokens_of(acts).items():
        n, n_new = lengths[name], len(ids) - lengths[name]
        prompt = torch.tensor([ids[:n]])
        want = plain.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                              max_new_tokens=n_new, pad_token_id=0)  # fmt: skip
        assert want[0].tolist() == ids


def test_the_run_record_says_what_ran_and_what_does_not_exist(acts: actds.Dataset) -> None:
    fields = next(iter(acts.runs.values())).fields
    assert fields["engine.name"].value == "transformers"
    assert fields["numerics.dtype"].value == fields["numerics.kv_cache_dtype"].value == "float32"
    assert fields["numerics.attention_backend"].value == "sdpa"
    assert fields["serving.prefix_caching"].value is False
    assert fields["serving.max_num_seqs"].value == 4
    assert fields["serving.n_kv_blocks"].origin == "unknown"
    assert fields["serving.n_kv_blocks"].reason


def test_ctrl_c_seals_and_resume_completes(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    many = tmp_path / "many.jsonl"
    many.write_text(prompts.read_text() * 6)
    options = (
        *OPTIONS,
        "--engine-arg",
        "max_num_seqs=2",
        "--temperature",
        "1",
        "--max-tokens",
        "40",
    )
    process = subprocess.Popen(
        h.command(out, model, many, *options), env=h.environment(), stderr=subprocess.PIPE
    )
    while not (out / "actds.json").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=h.TIMEOUT_S)
    assert process.returncode == 1, words
    assert b"Interrupted." in words
    part = h.validated(out)
    assert "abort" in part.requests()["finish_reason"].to_pylist()
    whole = h.harvest_warm(out, model, many, *options, "--resume")
    ended = ("length", "stop")
    served = [r for r in whole.requests(run=True).to_pylist() if r["finish_reason"] in ended]
    assert sorted(r["source_row"] for r in served) == list(range(60))


@pytest.mark.full
def test_a_killed_harvest_onto_an_object_store_is_resumed(
    model: Path, prompts: Path, s3_root: str, tmp_path: Path
) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text(prompts.read_text() * 4)
    options = (*OPTIONS, "--rows-per-shard", "64", "--engine-arg", "max_num_seqs=2")
    process = subprocess.Popen(
        h.command(s3_root, model, many, *options), env=h.environment(), stderr=subprocess.DEVNULL
    )
    store = open_store(s3_root)
    while not store.list("shards") and process.poll() is None:
        time.sleep(0.05)
    process.kill()  # the engine is in it; writer and census find themselves alone
    assert process.wait() == -signal.SIGKILL
    taken = h.run(s3_root, model, many, *options)
    assert "E008" in taken.stderr
    whole = h.harvest(s3_root, model, many, *options, "--resume")
    assert len(whole.runs) == 2
    served = [r for r in whole.requests(run=True).to_pylist() if r["finish_reason"] == "length"]
    lost = {
        (s["run"], s["request"])
        for s in whole.spans(run=True).to_pylist()
        if s["disposition"] == "aborted"
    }
    complete = [r["source_row"] for r in served if (r["run"], r["request"]) not in lost]
    assert sorted(complete) == list(range(40))


class Told(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.snapshots: list[Snapshot] = []
        self.results: list[HarvestResult] = []

    def said(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def harvesting(self, snapshot: Callable[[], Snapshot]) -> Iterator[None]:
        yield
        self.snapshots.append(snapshot())

    def ended(self, result: HarvestResult) -> None:
        self.results.append(result)


def test_write_from_python_returns_what_was_written_and_prints_nothing(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in h.ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    told = Told()
    fields: dict[str, Any] = {
        "out": tmp_path / "acts", "model": model, "prompts": prompts, "hooks": "resid_post:0",
        "max_tokens": 3, "engine": "transformers", "engine_args": {"max_num_seqs": 4},
    }  # fmt: skip
    result = actds.write(observer=told, **fields)
    assert told.results == [result] and result.reason == "finished"
    assert result.totals is not None and result.run is not None
    dataset = actds.open(tmp_path / "acts")
    assert dataset.n_rows == result.totals.captured == result.seal.totals["rows"]
    [last] = told.snapshots
    assert (last.requests_done, last.requests_total) == (10, 10)
    assert any(str(model) in line for line in told.lines)
    again = actds.write(resume=True, **fields)
    assert (again.run, again.totals) == (None, None)
    assert again.seal == result.seal
    assert capfd.readouterr() == ("", "")


def refused(model: Path, prompts: Path, tmp_path: Path, *options: str) -> ActdsError:
    """Return the error of a harvest in this process, which must leave nothing behind."""
    from click.testing import CliRunner

    from actds_writers.cli import write

    out = tmp_path / "acts"
    words = ["--model", str(model), "--prompts", str(prompts), "--engine", "transformers"]
    result = CliRunner().invoke(write, [str(out), *words, "--hooks", "resid_post:0", *options])
    assert isinstance(result.exception, ActdsError), result.output
    assert not out.exists()
    return result.exception


@pytest.mark.parametrize(
    "option", ["block_size=16", "max_num_seqs=0", "dtype=int8", "max_num_batched_tokens=4"]
)
def test_options_that_cannot_be_used_are_refused(option: str, tmp_path: Path) -> None:
    error = refused(tmp_path, tmp_path / "none.jsonl", tmp_path, "--engine-arg", option)
    assert error.code == "E009"
    assert option.split("=")[0] in error.place


def test_a_model_that_lacks_a_weight_is_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from actds_writers.engines.transformers.engine import load_model
    from actds_writers.engines.transformers.options import Options

    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    assert load_model(broken, Options()).config.num_hidden_layers == 4
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ActdsError, match=r"E005 .*layers\.2\.mlp\.up_proj"):
        load_model(broken, Options())
    (broken / "model.safetensors").unlink()
    with pytest.raises(ActdsError, match="E005"):
        load_model(broken, Options())


def test_more_positions_than_the_model_has_are_refused(model: Path) -> None:
    from actds_writers.engines.transformers.engine import load_model, max_model_len_of
    from actds_writers.engines.transformers.options import Options

    plain = load_model(model, Options())
    assert max_model_len_of(plain, Options()) == 1024
    assert max_model_len_of(plain, Options(max_model_len=99)) == 99
    with pytest.raises(ActdsError, match="E009 engine_args max_model_len"):
        max_model_len_of(plain, Options(max_model_len=1025))


KINDS = "embed;resid_pre:1,2;resid_mid:1;attn_out:1;z:1;q:1;k:1;v:1;mlp_in:1;mlp_out:1;final"


def test_rows_of_every_kind_are_those_of_a_plain_forward(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    words = ("--engine", "transformers", "--hooks", KINDS, "--max-tokens", "3", *BATCHES)
    acts = h.harvest_warm(tmp_path / "acts", model, prompts, *words)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    states: dict[str, dict[str, np.ndarray]] = {}
    for name, ids in tokens_of(acts).items():
        found = states.setdefault(name, {})

        def keep(hook: str, rows: torch.Tensor, found: dict[str, np.ndarray] = found) -> None:
            found[hook] = rows.detach().reshape(-1, rows.shape[-1]).numpy()

        with torch.no_grad(), watched(plain, plain.model.layers, FAMILIES[0], keep):
            plain(torch.tensor([ids]), use_cache=False)
    assert len(acts.hooks) == 12
    proof = actds.attention(tmp_path / "acts", model=model).layers[0].proof
    assert proof.outcome == "proved" and proof.n > 0
    for hook in acts.hooks:
        rows = h.rows_of(acts, hook)
        want = np.stack([states[name][hook][position] for name, position in rows])
        assert h.relative_l2(np.stack(list(rows.values())), want).max() <= 1e-5, hook
