"""Hugging Face ``datasets``: every format gives the values, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import actds

datasets.disable_progress_bars()


def listed(column: Any) -> Any:
    return column.combine_chunks().flatten().to_numpy().reshape(len(column), -1)


FORMATS: dict[str | None, Any] = {
    "actds": lambda rows: rows.float().numpy(),
    "torch": lambda rows: rows.numpy(),
    "numpy": lambda rows: rows,
    "pandas": lambda rows: np.stack(rows.to_list()),
    "polars": lambda rows: rows.to_numpy(),
    "arrow": listed,
    "python": np.array,
    None: np.array,
}


@pytest.fixture(scope="module")
def rows(path: Path, hook: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return actds.load_dataset(path, hooks=hook, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_map_style_in_every_format(rows: Any, hook: str, truth: Any, name: str | None) -> None:
    values = FORMATS[name](rows.with_format(name)[:][hook])
    truth.same_rows(values)
    wide = np.asarray(values, np.float32)
    truth.agree(mean=wide.mean(0), variance=wide.var(0), norm=np.linalg.norm(wide, axis=1))
    batches = [FORMATS[name](batch[hook]) for batch in rows.with_format(name).iter(batch_size=100)]
    truth.same_rows(np.concatenate(batches))


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_a_format_without_its_library_refuses(rows: Any, name: str) -> None:
    with pytest.raises(ValueError, match="needs to be installed"):
        rows.with_format(name)


def test_map_style_leaves_as_values(rows: Any, hook: str, truth: Any, tmp_path: Path) -> None:
    truth.same_rows(np.stack(rows.to_pandas()[hook].to_list()))
    truth.same_rows(rows.to_polars()[hook].to_numpy())
    truth.same_rows(np.array(rows.to_dict()[hook]))
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_json(tmp_path / "rows.jsonl")
    for kind, name in (("parquet", "rows.parquet"), ("json", "rows.jsonl")):
        again = datasets.load_dataset(
            kind,
            data_files=str(tmp_path / name),
            split="train",
            cache_dir=str(tmp_path / "again"),
        )
        # JSON has ten decimals.
        assert np.allclose(again.with_format("numpy")[:][hook], truth.rows, rtol=0, atol=1e-9)
    rows.save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    truth.same_rows(saved[:][hook].float())
    truth.same_rows(saved.with_format("torch")[:][hook])


def test_push_to_hub_uploads_values(
    rows: Any, hook: str, truth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of an upload, taken where they would leave for the hub."""
    import pandas as pd
    from huggingface_hub import HfApi

    uploads: list[Any] = []

    def take(self: Any, *arguments: Any, additions: Any, **options: Any) -> None:
        for addition in additions:
            with addition.as_file() as file:
                uploads.append(file.read())

    class Stop(Exception):
        pass

    def commit(self: Any, *arguments: Any, **options: Any) -> None:
        raise Stop

    monkeypatch.setattr(HfApi, "repo_info", lambda self, *a, **k: _Repo())
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *a, **k: _Repo())
    monkeypatch.setattr(HfApi, "create_branch", lambda self, *a, **k: None)
    monkeypatch.setattr(HfApi, "preupload_lfs_files", take)
    monkeypatch.setattr(HfApi, "create_commit", commit)
    # Whatever comes after the files, the hub is not there.
    with pytest.raises(Exception):  # noqa: B017
        rows.push_to_hub("someone/acts", token="none", max_shard_size="1GB")
    (tmp_path / "up.parquet").write_bytes(uploads[0])
    truth.same_rows(np.stack(pd.read_parquet(tmp_path / "up.parquet")[hook].to_list()))


class _Repo:
    repo_id = id = "someone/acts"


def test_a_stream_gives_the_stored_type(path: Path, hook: str, truth: Any, tmp_path: Path) -> None:
    import pandas as pd
    import torch

    stream = actds.load_dataset(path, streaming=True, hooks=hook)
    tensors = [example[hook] for example in stream]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    rows = torch.stack(tensors).float()
    truth.same_rows(rows)
    truth.agree(mean=rows.mean(0), variance=rows.var(0, correction=0))
    stream.to_parquet(tmp_path / "rows.parquet")
    truth.same_rows(np.stack(pd.read_parquet(tmp_path / "rows.parquet")[hook].to_list()))
    chunks = actds.load_dataset(path, streaming=True, hooks=hook, batched_chunks=True)
    truth.same_rows(torch.cat([chunk[hook] for chunk in chunks]).float())


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_in_every_format_gives_values_or_refuses(
    path: Path, hook: str, truth: Any, name: str | None
) -> None:
    import torch

    stream = actds.load_dataset(path, streaming=True, hooks=hook, columns=[])
    # NumPy has no bfloat16, and torch says so.
    refused = {"numpy": TypeError}
    try:
        formatted = stream.with_format(name)
        rows = []
        for batch in formatted.iter(batch_size=100):
            values = batch[hook]
            if isinstance(values, list):
                values = torch.stack([torch.as_tensor(v) for v in values])
            if isinstance(values, torch.Tensor):
                values = values.float().numpy()
            elif name == "polars":
                values = np.stack(values.to_list())  # lists of any length, in a stream
            elif not isinstance(values, np.ndarray):
                values = FORMATS[name](values)
            rows.append(values)
    except Exception as error:
        assert name in refused and isinstance(error, refused[name]), (name, repr(error))
        return
    assert name not in refused
    truth.same_rows(np.concatenate(rows))
