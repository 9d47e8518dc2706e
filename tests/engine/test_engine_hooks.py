"""Every hook kind of a real model in a real engine holds the rows of a plain forward."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.explore.dataset import Dataset
from actds_studies.attention.api import Model
from actds_testing import harvest as h
from actds_testing.families.layouts import stack_of, watched
from actds_testing.families.models import FAMILIES
from actds_testing.places import ROOT
from actds_writers.capture.hooks import BUILT_IN

pytestmark = pytest.mark.engine

N_LAYERS, LAYERS = 30, (1, 15, 29)
ABSENT = ("attn_out_post", "mlp_out_post", "router")
KINDS = [kind for name, kind in BUILT_IN.items() if name not in ABSENT]
HOOKS = [f"{kind.name}.{layer}" for kind in KINDS for layer in kind.layers(N_LAYERS)
         if layer in LAYERS or len(kind.layers(N_LAYERS)) == 1]  # fmt: skip
OPTIONS = (
    "--hooks", ";".join(hook.replace(".", ":") for hook in HOOKS), "--max-tokens", "4",
    "--engine-arg", "max_model_len=256", "--engine-arg", "block_size=32",
    "--engine-arg", "max_num_batched_tokens=64", "--engine-arg", "max_num_seqs=4",
)  # fmt: skip
RUNS = {
    "float32, eager": ("--engine-arg", "dtype=float32", *h.EAGER),
    "bfloat16, compiled": (),
}
TEXT = "The residual stream of a transformer is the sum of what its layers have written so far. "

PROMPTS = {"q0": TEXT * 3 + "And", "q1": TEXT * 5, "q2": "One more.", "q3": TEXT * 3 + "But"}


@pytest.fixture(
    scope="module",
    # Thirty layers take minutes to compile.
    params=["float32, eager", pytest.param("bfloat16, compiled", marks=pytest.mark.full)],
)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Prompts that share a prefix, are prefilled in chunks, and decoded."""
    folder = tmp_path_factory.mktemp("hooks")
    records = [{"id": name, "prompt": text} for name, text in PROMPTS.items()]
    prompts = h.write_prompts(folder / "prompts.jsonl", records)
    options = (*OPTIONS, *RUNS[request.param])
    return h.harvest_alone(folder / "acts", h.REAL_MODEL, prompts, *options)


@pytest.fixture(scope="module")
def plain() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        h.REAL_MODEL, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


@pytest.fixture(scope="module")
def wanted(dataset: Dataset, plain: Any) -> Iterator[dict[str, dict[str, np.ndarray]]]:
    """Rows by request and hook, of all layers, in float32, at the places written down by hand."""
    import torch
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(h.REAL_MODEL, local_files_only=True)
    tokens = {name: dict(enumerate(tokenizer(text)["input_ids"])) for name, text in PROMPTS.items()}
    names = h.external_ids(dataset)
    for shard in dataset.shards:
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist():
            name = names[shard.manifest.run, row["request"]]
            known = tokens[name].setdefault(row["position"], row["token_id"])
            assert known == row["token_id"]
    found: dict[str, dict[str, np.ndarray]] = {}
    current: dict[str, np.ndarray] = {}

    def keep(hook: str, rows: torch.Tensor) -> None:
        current[hook] = rows.detach().float().reshape(-1, rows.shape[-1]).numpy()

    with torch.no_grad(), watched(plain, stack_of(plain, N_LAYERS), FAMILIES[0], keep):
        for name, ids in tokens.items():
            plain(torch.tensor([[ids[i] for i in range(len(ids))]]), use_cache=False)
            found[name], current = current, {}
    yield found


def pairs(
    dataset: Dataset, wanted: dict[str, dict[str, np.ndarray]], hook: str, other: str, shift: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return stored rows and those of another hook, some positions before them."""
    rows = {k: row for k, row in h.rows_of(dataset, hook).items() if k[1] >= shift}
    want = [wanted[name][other][position - shift] for name, position in rows]
    return np.stack(list(rows.values())), np.stack(want)


@pytest.mark.parametrize("hook", HOOKS)
def test_rows_of_every_kind_are_those_of_a_plain_forward_and_of_no_other_place(
    hook: str, dataset: Dataset, wanted: dict[str, dict[str, np.ndarray]]
) -> None:
    got, want = pairs(dataset, wanted, hook, hook, 0)
    assert len(got) > 100
    own = h.relative_l2(got, want).mean()
    assert h.cosine(got, want).mean() >= 0.999
    if dataset.hooks[hook].dtype == "float32":
        assert own <= 1e-5
    before = h.relative_l2(*pairs(dataset, wanted, hook, hook, 1)).mean()
    assert before > 0.1 and before > 4 * own
    kind, _, layer = hook.partition(".")
    for number in (int(layer) - 1, int(layer) + 1):
        if f"{kind}.{number}" in wanted["q0"]:
            apart = h.relative_l2(*pairs(dataset, wanted, hook, f"{kind}.{number}", 0)).mean()
            assert apart > 0.1 and apart > 4 * own


def test_the_run_record_has_the_distance_of_every_hook(dataset: Dataset) -> None:
    (run,) = dataset.runs.values()
    said = json.loads(str(run.fields["capture.check"].value))
    assert said["against"] == "transformers" and set(said["hooks"]) == set(HOOKS)
    widths = {hook.name: hook.d_model for hook in dataset.hooks.values()}
    assert (widths["resid_mid.15"], widths["q.15"], widths["k.15"]) == (576, 576, 192)


def test_attention_of_the_rows_is_proved_and_that_of_a_plain_forward(
    dataset: Dataset, plain: Any
) -> None:
    import torch

    result = actds.attention(dataset.path, model=h.REAL_MODEL)
    assert [layer.layer for layer in result.layers] == list(LAYERS)
    assert result.answer.is_proved and result.share == 1
    if dataset.hooks["q.15"].dtype != "float32":
        return
    assert max(layer.proof.largest or 1 for layer in result.layers) <= 1e-4
    names = h.external_ids(dataset)
    (number,) = (request for (_, request), name in names.items() if name == "q3")
    of = {kind: dataset.request(number, hook=f"{kind}.15") for kind in "qk"}
    q, k = (rows.array[rows.row] for rows in of.values())
    with torch.no_grad():
        ids = torch.tensor(of["q"].token_id)[None]
        want = plain(ids, output_attentions=True, use_cache=False).attentions[15][0].numpy()
    scheme = Model(dataset, h.REAL_MODEL).scheme(15)
    [(_, _, shares)] = scheme.attend(q, k, np.arange(len(q)))
    assert np.abs(shares - want.transpose(1, 0, 2)).max() <= 1e-4
    assert (of["q"].owner != number).any()  # keys of a prefix hit are those of who computed them


def test_there_were_chunks_hits_and_decoded_rows(dataset: Dataset) -> None:
    assert sum(dataset.requests()["cached_tokens"].to_pylist()) > 0
    tokens = dataset.tokens()
    assert set(tokens["phase"].to_pylist()) == {"prefill", "decode"}
    assert max(tokens["chunk"].to_pylist()) >= 1


def test_a_kind_that_the_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    prompts = h.write_prompts(tmp_path / "prompts.jsonl", [{"id": "a", "prompt": "x"}])
    words = ("--hooks", "attn_out_post:1;resid_post:1;mlp_out_post:2", *OPTIONS[2:], *h.EAGER)
    done = h.run_alone(tmp_path / "acts", h.REAL_MODEL, prompts, *words)
    assert done.returncode != 0 and "E007 2 hooks: attn_out_post:1: " in done.stderr
    assert not (tmp_path / "acts" / "actds.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [["transcoder.py", "--expansion", "1"],
     ["crosscoder.py", "--latents", "256", "--hooks", *(f"resid_post.{n}" for n in LAYERS)]],
    ids=["transcoder", "crosscoder"],
)  # fmt: skip
def test_a_transcoder_and_a_crosscoder_train_on_a_harvest_of_the_model(
    arguments: list[str], dataset: Dataset, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *options = arguments
    words = [script, str(dataset.path), *options, "--steps", "40", "--batch", "32", "--lr", "0.003"]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(line.rpartition(" ")[2]) for line in said.splitlines() if "loss" in line]
    assert len(losses) == 11 and losses[-1] < 0.9 * losses[0]
    if "transcoder" in script:
        assert "mlp_in.1" in said and "mlp_out.1" in said
