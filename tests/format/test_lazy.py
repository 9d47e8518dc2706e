"""Numbers that a dataset hands to NumPy and torch are those of the stored rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actds
from actds.format.arrays import as_ml_dtypes, from_torch, widen
from actds_testing.synthetic import make_dataset

HOOK = "resid_post.0"
WORKERS = """
import json, sys

import numpy as np
import torch

import actds


class Rows(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return self.dataset.n_rows

    def __getitem__(self, row):
        return self.dataset.array("resid_post.0").torch(slice(row, row + 1))[0].float()


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def served(data, context, **options):
    found = torch.utils.data.DataLoader(
        data, num_workers=2, multiprocessing_context=context, **options)
    return [np.asarray(batch).tolist() for batch in found]


if __name__ == "__main__":
    path, context = sys.argv[1:]
    dataset = actds.open(path)
    rows = dataset.array("resid_post.0")
    rows[:3], dataset.tokens()  # with files that are open here
    found = {"array": sum(served(rows, context, batch_size=50), []),
             "dataset": sum(served(Rows(dataset), context, batch_size=50), [])}
    loader = actds.Loader(dataset, "resid_post.0", batch=8)
    for name in ("new", "reading"):
        try:
            found[name] = served(Stream(loader), context, batch_size=None)
        except actds.ActdsError as error:
            found[name] = str(error)
        except RuntimeError as error:  # as torch passes on what its workers raise
            found[name] = str(error)
        next(iter(loader))
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(
        tmp_path_factory.mktemp("lazy") / "acts", n_requests=60, sinks=True, rows_per_shard=150
    )


def float64(path: Path) -> np.ndarray[Any, Any]:
    """Return the rows from their bits, without what is under test."""
    bits = np.concatenate([shard.array(HOOK).read_all() for shard in actds.open(path).shards])
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_numpy_reductions_over_rows_are_those_of_float64(path: Path) -> None:
    rows, true = actds.open(path).array(HOOK)[:], float64(path)
    scale = np.abs(true).max()
    for reduce in (np.mean, np.std, np.var, np.sum):
        assert np.allclose(reduce(rows, axis=0), reduce(true, axis=0), rtol=1e-4, atol=1e-5 * scale)
    assert np.allclose(np.linalg.norm(rows, axis=1), np.linalg.norm(true, axis=1), rtol=1e-6)
    assert np.allclose(rows.T @ rows, true.T @ true, rtol=1e-4, atol=1e-5 * scale**2)
    assert np.allclose(sum(rows), true.sum(axis=0), rtol=1e-4, atol=1e-5 * scale)
    # What bfloat16 would have made of it, and does wherever it comes from elsewhere.
    bits = actds.open(path).array(HOOK).bits(0, len(rows))
    narrow = as_ml_dtypes(bits).std(axis=0).astype(np.float64)
    assert np.max(np.abs(narrow - true.std(axis=0)) / true.std(axis=0)) > 0.02


def test_stripping_to_a_plain_array_changes_nothing(path: Path) -> None:
    array, true = actds.open(path).array(HOOK), float64(path)
    for values in (np.asarray(array), np.array(array), np.asarray(array[:]), np.stack(list(array))):
        assert values.dtype == np.float32 and np.array_equal(values, true)
    assert np.asarray(array, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_selection_comes_by_the_name_of_its_type(tmp_path: Path, dtype: Any) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6, dtype=dtype)
    array = actds.open(path).array(HOOK)
    n = len(array)
    whole = array.bits(0, n)
    mask = np.arange(n) % 3 == 0
    for index in (slice(None), slice(5, 20), -1, [3, 1, 1], mask, (slice(4), slice(2, 9)), (3, 4)):
        rows, channels = index if isinstance(index, tuple) else (index, slice(None))
        tensor = array.torch(index)
        assert tensor.dtype == getattr(torch, dtype)
        assert np.array_equal(from_torch(tensor), whole[rows][..., channels])
        values = array.float32(index)
        assert values.dtype == np.float32
        assert np.array_equal(values, tensor.float().numpy())
    tensor = array.torch(slice(2))
    tensor.zero_()  # fresh memory
    assert array.torch(slice(2)).any()
    assert array.torch().shape == array.float32().shape == array.shape


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=50))
def test_widening_keeps_every_value_and_every_bit(patterns: list[int]) -> None:
    bits = np.array(patterns, np.uint16)
    wide = widen(bits)
    assert np.array_equal((wide.view(np.uint32) >> 16).astype(np.uint16), bits)
    assert np.array_equal(wide, bits.view(ml_dtypes.bfloat16).astype(np.float32), equal_nan=True)
    half = widen(bits, "float16")
    assert np.array_equal(half, bits.view(np.float16).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("index", [([0, 1], [3, 4]), (slice(3), None), (None, slice(3))])
def test_indices_that_numpy_reads_otherwise_are_refused(path: Path, index: Any) -> None:
    rows = actds.open(path).array(HOOK)
    with pytest.raises(IndexError, match=r"rows, or rows and channels|take the rows"):
        rows[index]
    assert rows[[0, 1], 3].shape == (2,) and rows[:3, [3, 4]].shape == (3, 2)


@pytest.mark.parametrize(
    "context",
    [
        pytest.param("spawn", marks=pytest.mark.standard),
        pytest.param("forkserver", marks=pytest.mark.full),
    ],
)
def test_workers_that_are_started_anew_read_what_they_are_given_or_say_why_not(
    context: str, path: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, script, path, context], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = float64(path)
    for name in ("array", "dataset"):
        assert np.array_equal(found[name], expected), name
    # Each of two workers would give all rows.
    assert "E014 world: rank 0 of 1 in worker 0 of 2; expected num_workers=0" in found["new"]
    assert found["reading"].startswith("E014 loader: a loader that is reading, for another process")
