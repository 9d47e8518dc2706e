"""Rows that interventions change in a real engine are those of a plain forward with the same edit.

The reference is ``transformers`` with hooks of its own, over the whole sequence at once. Prompts
share blocks of the prefix cache, are prefilled in chunks and decoded beside each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine_graphs import INTERPRETED, of_second_runner

from actds.explore.dataset import Dataset
from actds_testing import cpu_graphs
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model

pytestmark = pytest.mark.engine

D, SHARED = 64, 100
HOOKS = "resid_pre:0,1,2;resid_mid:1,2;resid_post:all;attn_out:1;mlp_out:2;final"
OPTIONS = (
    "--hooks", HOOKS, "--max-tokens", "8", "--engine-arg", "max_model_len=256",
    "--engine-arg", "max_num_batched_tokens=48", "--engine-arg", "max_num_seqs=4",
    "--engine-arg", "block_size=32", "--engine-arg", "dtype=float32",
)  # fmt: skip
random = np.random.default_rng(0)
VECTOR = random.normal(size=D).astype(np.float32)
PATCHES = random.normal(size=(5, D)).astype(np.float32)
UNIT = VECTOR / np.linalg.norm(VECTOR)
ENCODER, DECODER = random.normal(size=(2, 3, D)).astype(np.float32)
SHIFTS, THRESHOLDS = np.float32([0.5, -0.25, 0.0]), np.float32([0.0, 0.3, 0.0])
FEATURE = 1
EDITS: dict[str, dict[str, Any]] = {
    "add": {"hook": "resid_post.1", "op": "add", "vector": "v.npy", "strength": 2.5},
    "off": {"hook": "resid_mid.2", "op": "project", "vector": "v.npy"},
    "coordinate": {"hook": "resid_pre.1", "op": "clamp", "vector": "v.npy", "value": 4.0},
    "feature": {"hook": "resid_post.0", "op": "clamp", "dictionary": "sae", "feature": FEATURE,
                "value": 2.0},
    "patch": {"hook": "attn_out.1", "op": "patch", "rows": "rows.npy"},
    "late": {"hook": "mlp_out.2", "op": "add", "vector": "v.npy", "strength": -3.0},
}  # fmt: skip
WHERE: dict[str, dict[str, Any]] = {
    "add": {}, "off": {"part": "generated", "start": 2}, "coordinate": {"start": 3, "stop": 90},
    "feature": {"part": "prompt"}, "patch": {"start": 4}, "late": {"part": "generated"},
}  # fmt: skip


def edited(name: str, rows: Any) -> Any:
    """Return what an edit makes of rows, ``(n, d)``: as annex 16.6 says, written anew."""
    import torch

    v, u = torch.from_numpy(VECTOR), torch.from_numpy(UNIT)
    if name == "patch":
        return torch.from_numpy(PATCHES[: len(rows)])
    if name == "feature":
        z = rows @ torch.from_numpy(ENCODER[FEATURE]) + float(SHIFTS[FEATURE])
        active = torch.where(z > float(THRESHOLDS[FEATURE]), z, torch.zeros_like(z))
        return rows + (2.0 - active)[:, None] * torch.from_numpy(DECODER[FEATURE])
    if name == "off":
        return rows - (rows @ u)[:, None] * u
    if name == "coordinate":
        return rows + (4.0 - rows @ u)[:, None] * u
    return rows + (2.5 if name == "add" else -3.0) * v


def positions(name: str, prompt_len: int, n: int) -> range:
    """Return which positions of a request an intervention changes."""
    kind = name.rstrip("0123456789")
    ends = {"add": (0, n), "off": (prompt_len + 2, n), "coordinate": (3, 90), "patch": (4, 9),
            "feature": (0, prompt_len), "late": (prompt_len, n), "plain": (0, 0)}  # fmt: skip
    start, stop = ends[kind]
    return range(start, min(stop, n))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of one text: changed in six ways and not at all, each twice, side by side."""
    folder = tmp_path_factory.mktemp("prompts")
    text = ("the same words for all of them, " * 4)[:SHARED]
    names = [name for name in EDITS for name in (name, "plain")]
    records = [
        {"id": f"{name}{i}{k}", "prompt": text + " and more" * (i % 2)}
        for i in range(2)
        for k, name in enumerate(names)
    ]
    return h.write_prompts(folder / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interventions(tmp_path_factory.mktemp("edits"))


def interventions(folder: Path) -> Path:
    from safetensors.numpy import save_file

    np.save(folder / "v.npy", VECTOR)
    np.save(folder / "rows.npy", PATCHES)
    (folder / "sae").mkdir()
    config = {"architecture": "jumprelu", "d_in": D, "d_sae": 3, "apply_b_dec_to_input": False,
              "dtype": "float32", "normalize_activations": "none",
              "metadata": {"sae_lens_version": "6.5.0",
                           "hook_name": "blocks.0.hook_resid_post"}}  # fmt: skip
    (folder / "sae" / "cfg.json").write_text(json.dumps(config))
    arrays = {"W_enc": np.ascontiguousarray(ENCODER.T), "W_dec": DECODER, "b_enc": SHIFTS,
              "b_dec": np.zeros(D, np.float32), "threshold": THRESHOLDS}  # fmt: skip
    save_file(arrays, folder / "sae" / "sae_weights.safetensors")
    items = [
        {"name": name, "edits": [edit], "requests": [f"id {name}*"], **WHERE[name]}
        for name, edit in EDITS.items()
    ]
    document = {"schema": "actds.interventions/1", "interventions": items}
    path = folder / "edits.json"
    path.write_text(json.dumps(document))
    return path


@contextmanager
def forward(model: Any, name: str, where: range, kept: dict[str, Any]) -> Iterator[None]:
    """Read the rows of hooks of a forward over one whole request, changed as one intervention."""
    at = {edit["hook"]: kind for kind, edit in EDITS.items() if name.startswith(kind)}
    removing = []

    def rows_of(hook: str, tensor: Any) -> None:
        kept[hook] = tensor[0].detach().clone()
        if hook in at and len(where):
            which = slice(where.start, where.stop)
            tensor[0, which] = edited(at[hook], tensor[0, which])

    def given(hook: str) -> Callable[..., None]:
        return lambda _module, args: rows_of(hook, args[0])

    def returned(hook: str) -> Callable[..., None]:
        def hooked(_module: Any, _args: Any, output: Any) -> None:
            rows_of(hook, output[0] if isinstance(output, tuple) else output)

        return hooked

    for k, layer in enumerate(model.model.layers):
        removing += [
            layer.register_forward_pre_hook(given(f"resid_pre.{k}")),
            layer.post_attention_layernorm.register_forward_pre_hook(given(f"resid_mid.{k}")),
            layer.self_attn.o_proj.register_forward_hook(returned(f"attn_out.{k}")),
            layer.mlp.register_forward_hook(returned(f"mlp_out.{k}")),
            layer.register_forward_hook(returned(f"resid_post.{k}")),
        ]
    removing.append(model.model.norm.register_forward_hook(returned("final.3")))
    try:
        yield
    finally:
        for hook in removing:
            hook.remove()


def require_rows_of_plain_forwards(dataset: Dataset, model: Path, tolerance: float = 1e-5) -> None:
    """Check marks, and every row, against the forward of its request with the same edit."""
    import torch
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    tokens = dataset.tokens().to_pandas()
    requests = dataset.requests().to_pandas().set_index("request")
    ids = known_tokens(dataset, tokens, requests)
    arrays = {hook: dataset.array(hook)[:] for hook in dataset.hooks}
    n_marked = n_hits = 0
    for request, rows in tokens.groupby("request"):
        name, prompt_len = requests.external_id[request], int(requests.prompt_len[request])
        n = len(ids[request])
        where = positions(name, prompt_len, n)
        changed = rows.position.isin(list(where)).to_numpy()
        numbers = {kind: k for k, kind in enumerate(EDITS, 1)}
        number = numbers.get(name.rstrip("0123456789"), 0)
        assert (rows.intervention.to_numpy() == np.where(changed, number, 0)).all(), name
        n_marked, n_hits = n_marked + int(changed.sum()), n_hits + n - len(rows)
        kept: dict[str, Any] = {}
        with forward(plain, name, where, kept), torch.no_grad():
            plain(torch.tensor([ids[request]]), use_cache=False)
        for hook, values in arrays.items():
            got = values[rows.index.to_numpy()].astype(np.float32)
            want = kept[hook].numpy()[rows.position.to_numpy()]
            assert h.relative_l2(got, want).max() <= tolerance, (name, hook)
    assert n_marked > 200 and (n_hits > 300 or not prefix_caching(dataset))


def prefix_caching(dataset: Dataset) -> bool:
    (run,) = dataset.runs.values()
    return bool(run.fields["serving.prefix_caching"].value)


def known_tokens(dataset: Dataset, tokens: Any, requests: Any) -> dict[int, list[int]]:
    """Return the tokens of each request; those of hits are of the text that all share."""
    lengths = requests.prompt_len.to_dict()
    of_prompts: dict[int, dict[int, int]] = {length: {} for length in lengths.values()}
    own: dict[int, dict[int, int]] = {}
    for request, rows in tokens.groupby("request"):
        own[request] = dict(zip(rows.position.tolist(), rows.token_id.tolist(), strict=True))
        for length, known in of_prompts.items():
            end = length if length == lengths[request] else SHARED
            known.update({p: token for p, token in own[request].items() if p < end})
    out = {}
    for request, of_request in own.items():
        every = {**of_prompts[lengths[request]], **of_request}
        out[request] = [every[p] for p in range(max(every) + 1)]
    return out


@pytest.fixture(scope="module")
def eager(
    model: Path, prompts: Path, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    out = tmp_path_factory.mktemp("eager") / "acts"
    return h.harvest_alone(out, model, prompts, "--intervene", str(file), *OPTIONS, *h.EAGER)


def test_changed_rows_are_those_of_a_plain_forward_and_neighbours_are_unchanged(
    eager: Dataset, model: Path
) -> None:
    """Every op in prefill and decode, chunked; hits only on blocks that are changed alike."""
    require_rows_of_plain_forwards(eager, model)


def test_the_transformers_engine_changes_the_same_rows(
    model: Path, prompts: Path, file: Path, tmp_path: Path
) -> None:
    options = ("--intervene", str(file), "--hooks", HOOKS, "--max-tokens", "8",
               "--engine", "transformers", "--engine-arg", "dtype=float32",
               "--engine-arg", "max_num_seqs=4")  # fmt: skip
    dataset = h.harvest_warm(tmp_path / "acts", model, prompts, *options)
    require_rows_of_plain_forwards(dataset, model)


def test_a_changed_neighbour_changes_no_bit_of_an_unchanged_request(
    model: Path, prompts: Path, file: Path, tmp_path: Path
) -> None:
    """The same steps with and without interventions; without a prefix cache they are the same."""
    alike = (*OPTIONS, *h.EAGER, "--engine-arg", "enable_prefix_caching=false")
    changed = h.harvest_alone(tmp_path / "a", model, prompts, "--intervene", str(file), *alike)
    plain = h.harvest_alone(tmp_path / "b", model, prompts, *alike)
    n = 0
    for hook in ("resid_post.3", "final.3"):
        ours, theirs = h.rows_of(changed, hook), h.rows_of(plain, hook)
        for key, row in ours.items():
            if key[0].startswith("plain"):
                n += 1
                assert np.array_equal(row, theirs[key]), key
    assert n > 1000


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_pieces_in_graphs_change_the_same_rows(
    backend: str, model: Path, prompts: Path, file: Path, tmp_path: Path
) -> None:
    dataset, counts = cpu_graphs.harvest(
        tmp_path / "acts", model, prompts, "--intervene", str(file), *OPTIONS, backend=backend,
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )  # fmt: skip
    assert counts["replayed"]
    require_rows_of_plain_forwards(dataset, model)


@of_second_runner
def test_the_second_runner_changes_the_same_rows_in_graphs_of_the_whole_model(
    model: Path, prompts: Path, file: Path, tmp_path: Path
) -> None:
    dataset, counts = cpu_graphs.harvest(
        tmp_path / "acts", model, prompts, "--intervene", str(file), *OPTIONS, backend="eager",
        mode="FULL", VLLM_CACHE_ROOT=str(tmp_path / "cache"), **INTERPRETED,
    )  # fmt: skip
    assert counts["replayed"]
    require_rows_of_plain_forwards(dataset, model)


@pytest.mark.parametrize(
    "option",
    [
        "tensor_parallel_size=2",
        pytest.param("pipeline_parallel_size=2", marks=pytest.mark.full),
        pytest.param("data_parallel_size=2", marks=pytest.mark.full),
    ],
)
def test_every_rank_stage_and_replica_changes_the_same_rows(
    option: str, model: Path, prompts: Path, file: Path, tmp_path: Path
) -> None:
    words = ("--intervene", str(file), *OPTIONS, *h.EAGER, "--engine-arg", option)
    run = h.run if "data" in option else h.run_forked
    done = run(tmp_path / "acts", model, prompts, *words)
    assert done.returncode == 0, done.stderr
    dataset = h.validated(tmp_path / "acts")
    if len(dataset.runs) == 1:
        require_rows_of_plain_forwards(dataset, model, 2e-5)
    assert max(dataset.tokens(run=True)["intervention"].to_pylist()) == len(EDITS)
