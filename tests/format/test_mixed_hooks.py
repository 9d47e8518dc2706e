"""Hooks of one dataset that differ in width and type, through every way to read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.explore.lazy import rows_together
from actds.format.arrays import from_torch
from actds.format.readouts import Readouts
from actds_testing.synthetic import make_dataset

WIDTHS = {"resid_post.0": 16, "resid_post.1": 40, "resid_post.2": 5}
TYPES: dict[str, Any] = {
    "resid_post.0": "bfloat16", "resid_post.1": "float16", "resid_post.2": "float32",
}  # fmt: skip
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HOOKS = tuple(WIDTHS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "acts"
    given: dict[str, Any] = {"hooks": HOOKS, "d_model": WIDTHS, "dtype": TYPES}
    given |= {"readouts": Readouts(1, seed=0), "sinks": True}
    make_dataset(folder, n_requests=30, seed=1, sealed=False, rows_per_shard=50, **given)
    return make_dataset(folder, n_requests=30, seed=1, run="r-second", **given)


@pytest.fixture(scope="module")
def truth(path: Path) -> dict[tuple[str, int, int], dict[str, bytes]]:
    """Return the bits of every row by run, request and position, one hook and shard at a time."""
    dataset = actds.open(path)
    found: dict[tuple[str, int, int], dict[str, bytes]] = {}
    for shard in dataset.shards:
        table = shard.tokens(["request", "position"])
        keys = zip(table["request"].to_pylist(), table["position"].to_pylist(), strict=True)
        rows = {hook: shard.array(hook).read_all() for hook in HOOKS}
        for row, (request, position) in enumerate(keys):
            found[shard.run, request, position] = {
                hook: rows[hook][row].tobytes() for hook in HOOKS
            }
    return found


@pytest.mark.parametrize("hooks", [None, HOOKS[::-1], HOOKS[1:]])
@pytest.mark.parametrize("weights", [None, "multiplicity"])
def test_batches_hold_the_same_rows_of_every_hook(
    path: Path, truth: dict[Any, dict[str, bytes]], hooks: Any, weights: Any
) -> None:
    loader = actds.Loader(
        path, hooks, batch=32, window_rows=128, weights=weights, provenance=True, drop_last=False
    )
    seen = set()
    for acts, rows in loader:
        assert tuple(acts) == (hooks or HOOKS)
        for hook, tensor in acts.items():
            assert (tensor.dtype, tensor.shape[1]) == (TORCH[TYPES[hook]], WIDTHS[hook])
        keys = list(
            zip(
                rows["run"].tolist(),
                rows["request"].tolist(),
                rows["position"].tolist(),
                strict=True,
            )
        )
        for hook, tensor in acts.items():
            assert [row.tobytes() for row in from_torch(tensor)] == [truth[k][hook] for k in keys]
        seen |= set(keys)
    assert seen == set(truth)
    assert loader.config["dtype"] == ", ".join(sorted(TYPES[hook] for hook in hooks or HOOKS))


def test_the_order_is_that_of_the_dataset_whichever_hooks_are_read(path: Path) -> None:
    def keys(hooks: Any, **options: Any) -> list[tuple[Any, ...]]:
        loader = actds.Loader(path, hooks, batch=32, provenance=True, **options)
        return [tuple(rows["request"].tolist()) for _, rows in loader]

    assert keys(HOOKS[2]) == keys(HOOKS[0]) == keys(None)
    assert keys(None) == keys(None, dtype="float32") and len(set(keys(None))) > 1


def test_float32_widens_every_hook_and_changes_no_value(path: Path) -> None:
    stored, wide = (actds.Loader(path, batch=32, dtype=dtype) for dtype in (None, "float32"))
    for one, other in zip(stored, wide, strict=True):
        for hook in HOOKS:
            assert other[hook].dtype == torch.float32
            assert torch.equal(one[hook].float(), other[hook])


def test_arrays_and_moments_are_those_of_each_hook(path: Path) -> None:
    dataset = actds.open(path)
    for hook in HOOKS:
        array = dataset.array(hook)
        assert array.shape == (dataset.n_rows, WIDTHS[hook])
        assert array.torch([0, 3]).dtype == TORCH[TYPES[hook]]
        rows = array[:].astype(np.float64)
        stats = dataset.stats(hook)
        assert stats.mean.shape == (WIDTHS[hook],)
        assert np.allclose(stats.variance, rows.var(axis=0), rtol=1e-9)
        assert np.isclose(stats.mean_norm, np.linalg.norm(rows, axis=1).mean())


def test_a_sink_of_any_hook_is_left_out_of_all(path: Path) -> None:
    positions = np.concatenate(
        [
            rows["position"]
            for _, rows in actds.Loader(path, batch=8, exclude="sink", provenance=True)
        ]
    )
    assert len(positions) and positions.min() > 0


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_give_each_hook_in_its_own_type(
    path: Path, truth: dict[Any, dict[str, bytes]], streaming: bool, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    options: dict[str, Any] = {} if streaming else {"cache_dir": tmp_path}
    seen = {}
    for row in actds.load_dataset(path, streaming=streaming, **options):
        bits = {}
        for hook in HOOKS:
            assert (row[hook].dtype, tuple(row[hook].shape)) == (
                TORCH[TYPES[hook]],
                (WIDTHS[hook],),
            )
            bits[hook] = from_torch(row[hook][None]).tobytes()
        seen[row["run"], int(row["request"]), int(row["position"])] = bits
    assert seen == truth


def test_chunks_of_the_stream_join_hooks_of_different_widths(path: Path) -> None:
    pytest.importorskip("datasets")
    n_rows = 0
    for chunk in actds.load_dataset(path, streaming=True, batched_chunks=True):
        assert {len(chunk[hook]) for hook in HOOKS} == {len(chunk["request"])}
        n_rows += len(chunk["request"])
    assert n_rows == actds.open(path).n_rows


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([128], 1, 128),  # never less than a chunk of the widest
        ([128], 10**9, 128),
        ([128, 65536], 8192, 8192),
        ([128, 65536], 8191, 4096),
        ([128, 65536, 1024], 10**6, 65536),
        ([128, 1024], 0, 128),
    ],
)
def test_rows_read_together_are_whole_chunks_that_fit(
    sizes: list[int], most: int, expected: int
) -> None:
    assert rows_together(sizes, most) == expected
    assert all(expected % size == 0 or size % expected == 0 for size in sizes)


def test_a_narrow_hook_does_not_make_the_window_of_a_wide_one_large(tmp_path: Path) -> None:
    widths = {"resid_post.0": 2048, "resid_post.1": 8}
    path = make_dataset(tmp_path / "acts", hooks=tuple(widths), d_model=widths, n_requests=3)
    loader = actds.Loader(path, batch=8, window_rows=2048)
    # Of the narrow hook a chunk has 65,536 rows: so many of the wide one would be 256 MiB a lane.
    assert loader.state_dict()["geometry"]["piece_rows"] == 256
    assert sum(len(batch["resid_post.0"]) for batch in loader) > 0
