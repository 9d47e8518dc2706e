"""Memory of batches: used again when a batch is gone, never before, and given back at the end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.format.schema import Hook
from actds.loader.pipeline import BatchMemory, put
from actds_testing.synthetic import make_dataset

HOOKS = {
    name: Hook(name=name, kind="resid_post", layer=n, d_model=d, dtype="bfloat16")
    for n, (name, d) in enumerate({"resid_post.0": 1000, "resid_post.1": 3}.items())
}
ROWS = 8


def filled(memory: BatchMemory, value: int) -> dict[str, Any]:
    number = memory.take()
    batch = memory.batch(number, ROWS)
    for name, targets in memory.targets([number]).items():
        rows = np.full((ROWS, HOOKS[name].d_model), value, np.uint16)
        put(rows, np.arange(number * ROWS, (number + 1) * ROWS), targets)
    memory.complete(number)
    return batch


def test_memory_of_a_batch_is_used_again_only_when_nothing_refers_to_any_part_of_it() -> None:
    memory = BatchMemory(HOOKS, ROWS, 2, pinned=False)
    batches = [filled(memory, value) for value in range(1, 6)]  # three more than the block has
    for value, batch in enumerate(batches, 1):
        for rows in batch.values():
            assert (rows == value).all()
    kept = batches[0]["resid_post.1"][2:4, 1:]
    numbers = {memory.take() for _ in range(3)}
    assert not numbers & {0, 1}, "memory that a batch has"
    del batches, batch, rows
    gc.collect()
    assert memory.take() in (0, 1), "the second batch is gone"
    assert (kept == 1).all() and memory.take() > max(numbers), "a view keeps all of the first"
    del kept
    gc.collect()
    assert memory.take() in (0, 1)
    assert not memory.batch(0, 0)["resid_post.0"].size


def test_after_the_end_only_the_memory_of_kept_batches_stays() -> None:
    # Pages that were given back read as zeros.
    memory = BatchMemory(HOOKS, ROWS, 3, pinned=False)
    first, second = filled(memory, 1), filled(memory, 2)
    ((_, block),) = memory.targets([])["resid_post.0"]
    filled(memory, 3)  # nobody keeps it
    assert {int(value) for value in np.unique(block)} == {1, 2, 3}
    memory.close()
    assert (block == 3).mean() < 0.1, "all but the ends of pages"
    assert (first["resid_post.0"] == 1).all() and (second["resid_post.0"] == 2).all()
    del second
    gc.collect()
    assert (block == 2).mean() < 0.1 and (first["resid_post.0"] == 1).all()


@pytest.mark.parametrize("window_rows", [1, 5, 64, 1000])
def test_batches_that_are_all_kept_are_those_that_are_not(window_rows: int, tmp_path: Path) -> None:
    hooks = ("resid_post.0", "resid_post.1")
    dataset = actds.open(make_dataset(tmp_path / "acts", n_requests=30, hooks=hooks))
    options: dict[str, Any] = {"batch": 8, "window_rows": window_rows, "drop_last": False}
    with actds.Loader(dataset, epochs=3, **options) as loader:
        kept = list(loader)
    with actds.Loader(dataset, epochs=3, **options) as loader:
        for number, batch in enumerate(loader):
            assert all(bool((rows == kept[number][name]).all()) for name, rows in batch.items())
            for rows in batch.values():
                rows.zero_()  # a trainer may
    assert number + 1 == len(kept)
