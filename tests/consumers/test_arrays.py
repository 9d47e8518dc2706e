"""Array libraries: each reads the rows that are stored, and its moments are those of float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds


def test_the_dataset_has_what_goes_wrong(path: Path, truth: Any) -> None:
    dataset = actds.open(path)
    norms = np.linalg.norm(truth.rows, axis=1)
    assert norms.max() > 30 * np.median(norms)
    assert len(dataset.runs) == 2 and dataset.phases == ("prefill", "decode")
    assert max(dataset.multiplicity()["count"].to_pylist()) > 2


def test_numpy(path: Path, hook: str, truth: Any) -> None:
    array = actds.open(path).array(hook)
    for rows in (array[:], array.float32(), np.asarray(array), np.array(array[:])):
        truth.same_rows(rows)
        truth.agree(
            mean=rows.mean(0), variance=rows.var(0), std=np.std(rows, axis=0),
            norm=np.linalg.norm(rows, axis=1),
        )  # fmt: skip
        scale = np.abs(truth.rows).max() ** 2
        assert np.allclose(rows.T @ rows, truth.rows.T @ truth.rows, rtol=1e-4, atol=1e-4 * scale)
        assert np.allclose(np.dot(rows, rows[1]), truth.rows @ truth.rows[1], atol=1e-4 * scale)
    stats = actds.open(path).stats(hook)
    truth.agree(mean=stats.mean, variance=stats.variance, std=stats.std, norm=stats.mean_norm)
    assert np.allclose(stats.variance, truth.rows.var(axis=0), rtol=1e-12)


def test_torch(path: Path, hook: str, truth: Any) -> None:
    import torch

    array = actds.open(path).array(hook)
    for rows in (torch.from_numpy(array[:]), array.torch().float()):
        truth.same_rows(rows.numpy())
        truth.agree(
            mean=rows.mean(0), variance=rows.var(0, correction=0), norm=rows.norm(dim=1)
        )  # fmt: skip
    narrow = array.torch()
    assert narrow.dtype == torch.bfloat16
    # torch adds bfloat16 up in float32 and rounds once, to 8 bits.
    assert np.allclose(
        narrow.mean(0).double(),
        truth.rows.mean(0),
        rtol=2**-8,
        atol=1e-5 * np.abs(truth.rows).max(),
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_data_loader(path: Path, hook: str, truth: Any, workers: int) -> None:
    import torch

    array = actds.open(path).array(hook)
    batches = torch.utils.data.DataLoader(array, batch_size=64, num_workers=workers)  # type: ignore[arg-type]
    truth.same_rows(torch.cat(list(batches)))
    stream = actds.load_dataset(path, streaming=True, hooks=hook, columns=[])
    batches = torch.utils.data.DataLoader(stream, batch_size=64, num_workers=workers)  # type: ignore[arg-type]
    truth.same_rows(torch.cat([batch[hook] for batch in batches]).float(), ordered=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_torch_data_loader_around_a_loader(path: Path, hook: str, truth: Any, workers: int) -> None:
    import torch

    class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(actds.Loader(path, hook, batch=64, drop_last=False, threads=1))

    batches = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=workers)
    if workers == 1:
        truth.same_rows(torch.cat(list(batches)).float(), ordered=False)
        return
    with pytest.raises(RuntimeError, match="E014 world"):
        list(batches)


def test_torch_loops_over_a_loader(path: Path, hook: str, truth: Any) -> None:
    import torch

    loader = actds.Loader(path, hook, batch=64, drop_last=False, dtype="float32")
    for _ in range(3):
        rows = torch.cat(list(loader))
        truth.same_rows(rows, ordered=False)
        truth.agree(
            mean=rows.mean(0), variance=rows.var(0, correction=0), norm=rows.norm(dim=1).mean()
        )


def test_scikit_learn(path: Path, hook: str, truth: Any) -> None:
    from sklearn.covariance import EmpiricalCovariance
    from sklearn.decomposition import PCA, IncrementalPCA
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler, normalize

    array = actds.open(path).array(hook)
    for rows in (array[:], array):
        scaler = StandardScaler().fit(rows)
        truth.agree(mean=scaler.mean_, variance=scaler.var_)
        covariance = EmpiricalCovariance().fit(rows).covariance_
        truth.agree(mean=PCA(2).fit(rows).mean_, variance=covariance.diagonal())
    rows = array[:]
    truth.agree(mean=IncrementalPCA(2, batch_size=200).fit(rows).mean_)
    assert np.allclose((normalize(rows) ** 2).sum(1), 1, atol=1e-5)
    target = truth.rows[:, 0] * 2 + 1
    told = Ridge(1e-6).fit(rows[:, :4], target).predict(rows[:, :4])
    assert np.allclose(told, target, rtol=1e-3, atol=1e-2)


def test_pandas(path: Path, hook: str, truth: Any) -> None:
    import pandas as pd

    array = actds.open(path).array(hook)
    frame = pd.DataFrame(array[:])
    truth.same_rows(frame.to_numpy())
    truth.agree(mean=frame.mean(), variance=frame.var(ddof=0), std=frame.std(ddof=0))
    truth.agree(mean=pd.DataFrame(np.asarray(array)).mean())


def test_polars(path: Path, hook: str, truth: Any) -> None:
    import polars as pl

    frame = pl.from_numpy(actds.open(path).array(hook)[:])
    truth.same_rows(frame.to_numpy())
    truth.agree(mean=frame.mean().row(0), variance=frame.var(ddof=0).row(0))


def test_dask(path: Path, hook: str, truth: Any) -> None:
    import dask.array as da

    lazy = da.from_array(actds.open(path).array(hook), chunks=(100, -1))
    truth.same_rows(lazy.compute())
    truth.agree(
        mean=lazy.mean(0).compute(), variance=lazy.var(0).compute(), std=lazy.std(0).compute(),
        norm=da.linalg.norm(lazy, axis=1).compute(),
    )  # fmt: skip


def test_xarray(path: Path, hook: str, truth: Any) -> None:
    import xarray as xr

    array = actds.open(path).array(hook)
    for values in (array[:], array):
        rows = xr.DataArray(values, dims=["row", "channel"])
        truth.same_rows(rows.values)
        truth.agree(mean=rows.mean("row").values, variance=rows.var("row").values)


def folders(path: Path, hook: str) -> list[Path]:
    return [path / "shards" / s.name / "acts.zarr" / hook for s in actds.open(path).shards]


def test_tensorstore(path: Path, hook: str, truth: Any) -> None:
    import tensorstore as ts

    parts = []
    for folder in folders(path, hook):
        stored = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/"}, read=True).result()
        assert stored.dtype == ts.bfloat16
        parts.append(ts.cast(stored, ts.float32).read().result())
    rows = np.concatenate(parts)
    truth.same_rows(rows)
    truth.agree(mean=rows.mean(0), variance=rows.var(0))


@pytest.mark.parametrize("pipeline", ["zarr.core.codec_pipeline.BatchedCodecPipeline", "zarrs"])
def test_zarr_python_and_zarrs(path: Path, hook: str, truth: Any, pipeline: str) -> None:
    import zarr

    import actds.zarr_plugin  # noqa: F401  # zarr 3.1 and Python 3.11: the entry point is not loaded

    if pipeline == "zarrs":
        pipeline = "zarrs.ZarrsCodecPipeline"
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        parts = [zarr.open_array(folder, mode="r")[:] for folder in folders(path, hook)]
    rows = np.concatenate(parts).astype(np.float32)
    truth.same_rows(rows)
    truth.agree(mean=rows.mean(0), variance=rows.var(0))


def test_zarr_python_without_the_data_type_refuses(path: Path, hook: str) -> None:
    import subprocess
    import sys

    import zarr

    if tuple(map(int, zarr.__version__.split(".")[:2])) >= (3, 4):
        pytest.skip("this zarr loads the entry point by itself")
    code = "import sys, zarr; zarr.open_array(sys.argv[1], mode='r')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folders(path, hook)[0])], capture_output=True, text=True
    )
    assert done.returncode != 0 and "bfloat16" in done.stderr
