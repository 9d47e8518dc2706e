"""An engine and a hook kind of another package: found by their metadata, harvested like ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import actds
from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds_testing import harvest as h
from actds_testing import toy
from actds_writers.capture import op as capture
from actds_writers.capture.hooks import cast_of, find_kind, hook_specs
from actds_writers.capture.taps import HookKind, StreamForm, Tap, decoder_layers
from actds_writers.engine_protocol import find_engine
from actds_writers.ipc.messages import HookSpec

pytestmark = pytest.mark.standard

HOOKS = "resid_post:0,2;toy_mlp:1"
N_REQUESTS, GENERATED = 9, 5
PROMPTS = [
    {"id": f"q{n}", "prompt": "all work and no play "[: 3 + 2 * n]} for n in range(N_REQUESTS)
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Register the toy in this process and in those it starts."""
    site = toy.register(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(site))
        yield site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture(scope="module")
def path(installed: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A harvest of both kinds, checked, with readouts, replayed, and validated to the last bit."""
    folder = tmp_path_factory.mktemp("toy")
    prompts = h.write_prompts(folder / "prompts.jsonl", PROMPTS)
    words = ["--engine", "toy", "--hooks", HOOKS, "--max-tokens", str(GENERATED)]
    words += ["--engine-arg", "max_num_seqs=3", "--engine-arg", "chunk=16", "--canary", "2"]
    h.harvest(folder / "acts", model, prompts, *words)
    return folder / "acts"


@pytest.fixture(scope="module")
def dataset(path: Path) -> Dataset:
    return actds.open(path)


def test_widths_and_types_differ_from_hook_to_hook(dataset: Dataset) -> None:
    told = {name: (hook.kind, hook.layer, hook.d_model, hook.dtype)
            for name, hook in dataset.hooks.items()}  # fmt: skip
    assert told == {
        "resid_post.0": ("resid_post", 0, toy.D_MODEL, "bfloat16"),
        "resid_post.2": ("resid_post", 2, toy.D_MODEL, "bfloat16"),
        "toy_mlp.1": ("toy_mlp", 1, toy.MLP, "float32"),
    }
    record = dataset.catalog.runs[dataset.catalog.run_ids[0]].fields
    assert record["engine.name"].value == "toy" and record["capture.cast"].value == "none"
    check = json.loads(str(record["capture.check"].value))
    assert set(check["hooks"]) == set(told)
    # A type has its own bound: rounding in float32 hides nothing that bfloat16 would.
    assert float(check["bound"]["toy_mlp.1"]) < float(check["bound"]["resid_post.0"])


def test_every_position_is_accounted_for_and_its_row_that_of_the_model(
    dataset: Dataset, model: Path
) -> None:
    requests = dataset.requests().to_pylist()
    assert {r["finish_reason"] for r in requests} == {"length"}
    owed = {(r["external_id"], p) for r in requests
            for p in range(r["prompt_len"] + r["generated_len"] - 1)}  # fmt: skip
    tokens = {
        (name, row["position"]): row["token_id"]
        for shard in dataset.shards
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist()
        for name in [h.external_ids(dataset)[shard.manifest.run, row["request"]]]
    }
    assert set(tokens) == owed
    plain = toy.load_model(model)
    for hook in dataset.hooks.values():
        rows = h.rows_of(dataset, hook.name)
        assert set(rows) == owed
        for (name, position), row in rows.items():
            want = toy.plain_forward(plain, [tokens[name, position]], position)
            values = want[hook.kind][hook.layer][0].float().numpy()
            # One value at a time or in a batch: a product is summed in another order.
            assert np.allclose(row, values, rtol=2e-2 if hook.dtype == "bfloat16" else 1e-5,
                               atol=1e-2 if hook.dtype == "bfloat16" else 1e-6)  # fmt: skip


def test_readouts_and_canaries_are_of_every_hook(dataset: Dataset) -> None:
    readouts = dataset.readouts()
    assert set(readouts["hook"].to_pylist()) == set(dataset.hooks)
    assert readouts.num_rows == len(dataset.hooks) * dataset.n_rows
    canary = dataset.canary()
    assert set(canary["hook"].to_pylist()) == set(dataset.hooks)
    assert set(canary["verdict"].to_pylist()) == {"same"}


def test_a_canary_of_drawn_rows_computes_every_row_and_compares_the_stored_ones(
    installed: Path, model: Path, tmp_path: Path
) -> None:
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    words = ["--engine", "toy", "--hooks", HOOKS, "--max-tokens", str(GENERATED), "--canary", "3"]
    words += ["--overflow", "drop_newest", "--always", "0.5", "--keep", "decode: 1; 0.25"]
    acts = h.harvest(tmp_path / "acts", model, prompts, *words)
    canary = acts.canary()
    assert canary.num_rows and set(canary["verdict"].to_pylist()) == {"same"}
    tokens = acts.tokens(columns=["request", "position"]).to_pylist()
    stored = {(row["request"], row["position"]) for row in tokens}
    of_canary = {(row["request"], row["position"]) for row in canary.to_pylist()}
    replayed = {request for request, _ in of_canary}
    assert of_canary == {key for key in stored if key[0] in replayed}


def test_the_loader_hands_out_each_hook_in_its_width_and_type(path: Path) -> None:
    loader = actds.Loader(path, hooks=["resid_post.2", "toy_mlp.1"], batch=16)
    batch = next(iter(loader))
    assert batch["resid_post.2"].shape == (16, toy.D_MODEL)
    assert batch["resid_post.2"].dtype == torch.bfloat16
    assert batch["toy_mlp.1"].shape == (16, toy.MLP)
    assert batch["toy_mlp.1"].dtype == torch.float32


def test_a_plan_sizes_each_hook_for_itself(installed: Path, model: Path) -> None:
    command = [sys.executable, "-m", "actds", "plan", "--model", str(model), "--hooks", HOOKS]
    command += ["--prefill-rate", "1000", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=h.TIMEOUT_S)
    geometry = json.loads(done.stdout)["geometry"]
    stream = {"d_model": toy.D_MODEL, "itemsize": 2}
    assert geometry["hooks"] == [stream, stream, {"d_model": toy.MLP, "itemsize": 4}]
    assert geometry["row_nbytes"] == 2 * 2 * toy.D_MODEL + 4 * toy.MLP


def test_whoever_has_not_the_kind_refuses_the_dataset(path: Path) -> None:
    elsewhere = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.environ["PYTHONPATH"].split(os.pathsep)[1:]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "actds", "validate", str(path)],
        env=elsewhere, capture_output=True, text=True, timeout=h.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode != 0
    assert "E103" in done.stdout + done.stderr and "toy_mlp" in done.stdout + done.stderr


def test_an_option_that_the_toy_does_not_have_is_refused_with_the_nearest(installed: Path) -> None:
    with pytest.raises(ActdsError, match=r"E009.* chunks: .*toy engine.*chunk"):
        find_engine("toy").parse(["chunks=3"])
    with pytest.raises(ActdsError, match="E009"):
        find_engine("toys")
    with pytest.raises(ActdsError, match=r"E007.*'toy_mpl'.*toy_mlp"):
        find_kind("toy_mpl")


def test_an_engine_that_changes_no_rows_takes_no_interventions(
    installed: Path, model: Path, tmp_path: Path
) -> None:
    """Before it starts: at the end every mark would differ from the run record."""
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    with pytest.raises(ActdsError, match="the engine toy, which changes no rows") as raised:
        actds.write(
            out=tmp_path / "acts", model=model, prompts=prompts, hooks="resid_post:0",
            engine="toy", intervene=tmp_path / "edits.json",
        )  # fmt: skip
    assert (raised.value.code, raised.value.place) == ("E012", "intervene")
    assert not (tmp_path / "acts").exists()


def test_a_cast_names_the_hooks_that_it_is_of(installed: Path) -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 2, "mlp_size": 12}
    places = [("resid_post", 0), ("toy_mlp", 1)]
    assert cast_of(hook_specs(places, config, "bfloat16"), "bfloat16") == "none"
    narrow = hook_specs(places, config, "bfloat16", "bfloat16")
    assert [hook.dtype for hook in narrow] == ["bfloat16", "bfloat16"]
    assert cast_of(narrow, "bfloat16") == (
        "resid_post.0: none; toy_mlp.1: float32 to bfloat16, nearest even"
    )
    all_cast = hook_specs(places, config, "float32", "bfloat16")
    assert cast_of(all_cast, "float32") == "float32 to bfloat16, nearest even"
    with pytest.raises(ActdsError, match=r"E007.*hidden_size"):
        hook_specs(places, {"num_hidden_layers": 2}, "bfloat16")


class Input(HookKind):
    """What an MLP is given, which it may change in place."""

    name = "toy_input"

    def width(self, config: object) -> int:
        return 8

    def tap(self, model: torch.nn.Module, layer: int, form: StreamForm) -> Tap:
        module = decoder_layers(model)[layer]
        return Tap(module, lambda args, kwargs, output: (args[0], None), before=True)


class Doubling(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.mul_(2)
        return hidden


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tap_before_a_module_sees_what_it_is_given(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"toy_input": Input(), "resid_post": find_kind("resid_post")}
    monkeypatch.setattr(capture, "find_kind", kinds.__getitem__)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Doubling()])
    model.forward = lambda hidden: model.layers[0](hidden)  # type: ignore[method-assign]
    hooks = [
        HookSpec("toy_input.0", "toy_input", 0, 8, "float32"),
        HookSpec("resid_post.0", "resid_post", 0, 8, "bfloat16"),
    ]
    cpu = torch.device("cpu")
    buffers = capture.install(model, hooks, max_rows=16, device=cpu, form="first")
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    fed = torch.randn(5, 8)
    with torch.no_grad():
        run(fed.clone())
    assert buffers.seen.tolist() == [5, 5]
    assert torch.equal(buffers.rows[0][:5], fed)
    assert torch.equal(buffers.rows[1][:5], (2 * fed).bfloat16())
