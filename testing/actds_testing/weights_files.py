"""Weights files made by hand, right ones and wrong ones, independent of the audit's writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import actds

Weights = dict[str, npt.NDArray[np.float32]]


def drawn_weights(dataset: actds.Dataset, seed: int = 0) -> Weights:
    """Return a different weight for every row, float32 ``(n_rows,)`` by shard, mean 1."""
    rng = np.random.default_rng(seed)
    drawn = {shard.name: rng.uniform(0.5, 1.5, shard.n_rows) for shard in dataset.shards}
    mean = np.concatenate(list(drawn.values())).mean()
    return {name: (values / mean).astype(np.float32) for name, values in drawn.items()}


def write_weights_file(
    path: Path,
    dataset: actds.Dataset,
    weights: Weights,
    *,
    change: Callable[[pa.Table], pa.Table] = lambda table: table,
    metadata: dict[str, str] | None = None,
    group_rows: int = 70,
) -> Path:
    """Write a weights file of a dataset.

    Args:
        path: the file.
        dataset: the dataset.
        weights: weights by shard.
        change: makes the table another one.
        metadata: what else the footer says than it should.
        group_rows: rows of a row group, so few that shards and groups overlap.
    """
    names = sorted(weights)
    table = pa.table(
        {
            "shard": pa.array([name for name in names for _ in weights[name]]),
            "row": np.concatenate([np.arange(len(weights[n]), dtype=np.uint32) for n in names]),
            "weight": np.concatenate([weights[name] for name in names]),
        }
    )
    words = {
        "actds.format": "actds.weights",
        "actds.version": "1",
        "actds.dataset": dataset.catalog.genesis.dataset,
        "actds.digest": dataset.digest,
        "actds.claim": "drawn by a test",
        **(metadata or {}),
    }
    table = change(table).replace_schema_metadata(words)
    pq.write_table(table, path, row_group_size=group_rows)
    return path
