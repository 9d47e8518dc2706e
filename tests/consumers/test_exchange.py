"""Exports in the libraries that they are for; imports of what these libraries write."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import duckdb
import ml_dtypes
import numpy as np
import polars
import pytest
import torch
from safetensors.torch import load_file

import actds

CONTEXT, PROMPTS = 16, 4


@pytest.fixture
def rows(path: Path, hook: str, truth: Any) -> np.ndarray[Any, Any]:
    """Return the rows of the hook by run, request and position, float64."""
    dataset = actds.open(path)
    lines = dataset.tokens(hook, run=True).to_pylist()
    runs = list(dataset.runs)
    key = [(runs.index(one["run"]), one["request"], one["position"]) for one in lines]
    ordered: np.ndarray[Any, Any] = truth.rows[sorted(range(len(key)), key=key.__getitem__)]
    return ordered


def column(hook: str) -> str:
    return f"blocks.{hook.rpartition('.')[2]}.hook_resid_post"


def store(folder: Path, hook: str, d_model: int) -> Any:
    """Return SAELens' own reader of cached activations."""
    from sae_lens.training.activations_store import ActivationsStore

    return ActivationsStore(
        model=None,  # type: ignore[arg-type]  # a cache is read without one
        dataset=None,
        streaming=False,
        hook_name=column(hook),
        hook_head_index=None,
        context_size=CONTEXT,
        d_in=d_model,
        n_batches_in_buffer=2,
        total_training_tokens=10**9,
        store_batch_size_prompts=PROMPTS,
        train_batch_size_tokens=CONTEXT,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(folder),
    )


def test_sae_lens_reads_its_cache(path: Path, hook: str, rows: Any, tmp_path: Path) -> None:
    record = actds.export(path, tmp_path / "cache", to="sae-lens", hooks=hook, context_size=CONTEXT)
    assert record.hooks[0].column == column(hook) and record.n_left_out == len(rows) % CONTEXT
    cached = store(tmp_path / "cache", hook, rows.shape[1])
    assert len(cached.cached_activation_dataset) == record.n_rows // CONTEXT
    n_batches = record.n_rows // (CONTEXT * PROMPTS)
    batches = [cached.get_raw_llm_batch() for _ in range(n_batches)]
    got = torch.cat([acts for acts, _ in batches])
    assert np.array_equal(got.double().numpy(), rows[: len(got)])
    ids = torch.cat([tokens for _, tokens in batches if tokens is not None]).tolist()
    assert len(ids) == len(got)
    table = actds.open(path).tokens(hook, run=False).to_pylist()
    assert set(ids) <= {line["token_id"] for line in table}
    # And mixed, as its trainer gets them.
    stored = {row.tobytes() for row in rows.astype(np.float32)}
    assert {row.numpy().tobytes() for row in cached.next_batch()} <= stored
    with pytest.raises(ValueError, match="does not match context_size"):
        store(tmp_path / "cache", hook, rows.shape[1] + 1)


def test_sae_lens_trains_on_its_cache(path: Path, hook: str, rows: Any, tmp_path: Path) -> None:
    from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    options: Any = {"hooks": hook, "context_size": CONTEXT, "exclude": "sink"}
    actds.export(path, tmp_path / "cache", to="sae-lens", **options)
    torch.manual_seed(0)
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=rows.shape[1], d_sae=2 * rows.shape[1], k=8))
    start = sae.W_enc.detach().clone()
    config = SAETrainerConfig(
        total_training_samples=50 * CONTEXT, train_batch_size_samples=CONTEXT, lr=1e-3,
        lr_end=1e-3, device="cpu", n_batches_for_norm_estimate=5,
        logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    trainer = SAETrainer(config, sae, store(tmp_path / "cache", hook, rows.shape[1]))
    trained = trainer.fit()
    assert trainer.n_training_steps == 50
    assert not torch.allclose(trained.W_enc, start, rtol=1e-3)


def test_a_cache_that_sae_lens_wrote_is_imported(tmp_path: Path) -> None:
    """Through SAELens' own runner, with a store that gives numbers in the place of its model."""
    from sae_lens.cache_activations_runner import CacheActivationsRunner

    parts: list[torch.Tensor] = []

    class Config:
        hook_name, n_seq_in_buffer, d_in = "blocks.5.hook_resid_post", 6, 8
        n_buffers, n_batches_in_buffer, dataset_path = 3, 1, "made up"
        shuffle, hf_repo_id = False, None
        new_cached_activations_path = str(tmp_path / "cache")

    class Store:
        def get_raw_llm_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
            n = len(parts)
            parts.append(torch.randn(6 * CONTEXT, 8, generator=torch.manual_seed(n)))
            return parts[-1], torch.arange(6 * CONTEXT) + 1000 * n

    runner = CacheActivationsRunner.__new__(CacheActivationsRunner)
    runner.cfg, runner.context_size, runner.activations_store = Config(), CONTEXT, Store()
    runner.features = datasets.Features({
        Config.hook_name: datasets.Array2D(shape=(CONTEXT, Config.d_in), dtype="float32"),
        "token_ids": datasets.Sequence(datasets.Value("int32"), length=CONTEXT),
    })  # fmt: skip
    runner.run()
    done = actds.import_foreign(tmp_path / "cache", tmp_path / "acts")
    assert (done.kind, done.hooks, done.n_sequences) == ("sae-lens", ["resid_post.5"], 18)
    dataset = opened(tmp_path / "acts")
    table = dataset.tokens()
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    assert torch.equal(dataset.array("resid_post.5").torch(order), torch.cat(parts))
    want = [1000 * n + i for n in range(3) for i in range(6 * CONTEXT)]
    assert table["token_id"].to_numpy()[order].tolist() == want
    assert "position" in done.unknown and "request" not in done.unknown


def opened(path: Path) -> actds.Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actds.open(path, i_accept_unsealed=True, i_accept_unprovenanced=True)


def test_safetensors_reads_the_files_of_requests(
    path: Path, hooks: list[str], hook: str, rows: Any, tmp_path: Path
) -> None:
    record = actds.export(path, tmp_path / "files", to="safetensors")
    stored = getattr(torch, record.hooks[0].stored)
    n_files = len(list((tmp_path / "files").glob("hs_*.safetensors")))
    parts = []
    for n in range(n_files):
        data = load_file(tmp_path / "files" / f"hs_{n}.safetensors")
        states = data["hidden_states"]
        assert states.dtype == stored and states.shape[1:] == (len(hooks), rows.shape[1])
        # What speculators' check_hidden_states asks for.
        assert {"hidden_states", "token_ids"} <= data.keys()
        assert data["token_ids"].shape == states.shape[:1] == data["positions"].shape
        parts.append(states[:, hooks.index(hook)])
    assert np.array_equal(torch.cat(parts).double().numpy(), rows)


def test_numpy_and_torch_read_the_memory_map(
    path: Path, hook: str, rows: Any, tmp_path: Path
) -> None:
    actds.export(path, tmp_path / "arrays", to="memmap", hooks=hook)
    stored = np.load(tmp_path / "arrays" / f"{hook}.npy", mmap_mode="r")
    assert isinstance(stored, np.memmap)
    assert np.array_equal(stored.view(ml_dtypes.bfloat16).astype(np.float64), rows)
    shared = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
    assert np.array_equal(shared.double().numpy(), rows)
    with pytest.raises(TypeError):  # unnamed bytes are never taken for numbers
        stored + 1


def test_datasets_and_sql_read_the_parquet(
    path: Path, hook: str, rows: Any, tmp_path: Path
) -> None:
    actds.export(path, tmp_path / "table", to="parquet", hooks=hook)
    file = str(tmp_path / "table" / "data" / "train-00000-of-00001.parquet")
    for source in ({"data_files": file}, {"data_dir": str(tmp_path / "table" / "data")}):
        loaded = datasets.load_dataset(
            "parquet", **source, split="train", cache_dir=str(tmp_path / "cache")
        )
        values = loaded.with_format("numpy")[:][hook]
        assert values.dtype == np.float32 and np.array_equal(values, rows)
    told = json.loads((tmp_path / "table" / "actds_export.json").read_text())
    assert told["digest"] == actds.open(path).digest
    frame = polars.read_parquet(file)
    assert np.array_equal(frame[hook].to_numpy(), rows)
    counted = duckdb.sql(f"select run, count(*) from '{file}' group by run order by run").fetchall()
    runs = actds.open(path).tokens(hook, run=True)["run"].to_pylist()
    assert counted == [(run, runs.count(run)) for run in sorted(set(runs))]
