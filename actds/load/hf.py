"""HF ``datasets`` objects over a dataset, without a step that widens bfloat16.

``datasets`` has no bfloat16 feature, and turns bf16 tensors into float32 without a word. So a
stream is a generator whose tensors pass through untouched, and a map-style dataset holds float32
that a formatter gives as the stored type.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from actds.errors import ActdsError
from actds.format.arrays import to_torch
from actds.format.shard import Shard
from actds.format.tables import SCHEMAS
from actds.load.dataset import Dataset
from actds.load.dataset import open as open_dataset
from actds.load.exclusion import Exclusion, read_exclusion, warn_where_none
from actds.load.pool import PROVENANCE_COLUMNS, WEIGHT, open_array
from actds.load.row_weights import RowWeights, read_row_weights
from actds.load.selection import select_hooks, select_shards
from actds.schema import Hook

if TYPE_CHECKING:
    import datasets

__all__ = ["load_dataset", "select_columns", "shard_columns"]


def load_dataset(
    path: str | os.PathLike[str],
    *,
    streaming: bool = False,
    hooks: str | Sequence[str] | None = None,
    phase: Literal["prefill", "decode"] | None = None,
    columns: Sequence[str] | None = None,
    batched_chunks: bool = False,
    weights: str | os.PathLike[str] | None = None,
    exclude: str | Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    i_accept_unsealed: bool = False,
    i_accept_unprovenanced: bool = False,
) -> datasets.IterableDataset | datasets.Dataset:
    """Return a dataset for HF ``datasets``: one example per row, tensors in the stored type.

    An example holds one tensor ``(d_model,)`` per hook under the hook's name, and one value per
    provenance column. Rows stand in the order of the shards; for training in a shuffled order and
    at full speed use :class:`actds.Loader`.

    Streaming, the examples are made while they are read: ``split_dataset_by_node``, DataLoader
    workers and ``state_dict`` work by shards. Do not add ``with_format("torch")``, which copies
    every tensor. Map-style, the rows are first written as float32 to Arrow files in the
    ``datasets`` cache, keyed by the dataset's digest and the selection: tensors come in the stored
    type, and ``with_format``, ``to_parquet`` or ``push_to_hub`` give the same values as float32.

    Args:
        path: path or URI of a dataset.
        streaming: return an ``IterableDataset`` and write nothing.
        hooks: names of hooks; None takes all.
        phase: ``prefill`` or ``decode``; None takes both.
        columns: columns of the token table, and ``run``; None takes run, request, position,
            token_id, phase and step.
        batched_chunks: streaming only: one example per chunk, with tensors ``(n, d_model)`` and
            numpy columns ``(n,)``. Many times faster.
        weights: path of a weights file (section 10.4); each example has a float32 ``weight``.
        exclude: rows to leave out, by names of ``actds.load.exclusion.NAMES``.
        cache_dir: map-style only: where the Arrow files stand; the ``datasets`` cache when None.
        i_accept_unsealed: read a dataset that is not sealed.
        i_accept_unprovenanced: read a dataset whose provenance is missing.

    Raises:
        ActdsError: E011 without the package ``datasets``; E014 when an argument selects nothing;
            E018 when the weights file is not one of this dataset; E306, E401 and others when the
            dataset is refused.
    """
    try:
        import datasets
    except ImportError:
        raise ActdsError(
            "E011", "datasets", got="not installed", expected="the extra actds[hf]"
        ) from None
    accept = (i_accept_unsealed, i_accept_unprovenanced)
    dataset = open_dataset(
        os.fspath(path), i_accept_unsealed=accept[0], i_accept_unprovenanced=accept[1]
    )
    chosen = select_hooks(dataset, hooks)
    shards = select_shards(dataset, chosen, phase)
    names = select_columns(chosen, columns)
    row_weights = None if weights is None else read_row_weights(weights, dataset)
    if row_weights and WEIGHT in (*names, *(hook.name for hook in chosen)):
        raise ActdsError("E014", "hooks", got=f"{WEIGHT!r}", expected="hooks without it")
    exclusion = read_exclusion(dataset, chosen, exclude)
    warn_where_none(exclusion.counts(shards), stacklevel=2)
    if not streaming:
        if batched_chunks:
            raise ActdsError(
                "E014", "batched_chunks", got="True", expected="False, or streaming=True"
            )
        from actds.load.hf_arrow import map_style

        return map_style(dataset.digest, shards, chosen, names, cache_dir, row_weights, exclusion)
    return datasets.IterableDataset.from_generator(
        examples,
        gen_kwargs={
            # datasets splits work along lists: this one and no other is a list.
            "shards": [shard.name for shard in shards],
            "path": os.fspath(path),
            "digest": dataset.digest,
            "hooks": tuple(hook.name for hook in chosen),
            "columns": names,
            "batched_chunks": batched_chunks,
            "accept": accept,
            "weights": row_weights and (os.fspath(row_weights.path), row_weights.sha256),
            "exclude": exclusion.names,
        },
    )


def select_columns(hooks: Sequence[Hook], columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the provenance columns that are asked for, the usual ones when None.

    Raises:
        ActdsError: E014 when there is no such column, or a hook has its name.
    """
    names = PROVENANCE_COLUMNS if columns is None else tuple(columns)
    known = ("run", *SCHEMAS["tokens"].names)
    taken = {hook.name for hook in hooks}
    for name in names:
        if name not in known or names.count(name) > 1:
            raise ActdsError(
                "E014", "columns", got=repr(name), expected=f"different ones of {', '.join(known)}"
            )
        if name in taken:
            raise ActdsError(
                "E014", "columns", got=f"{name!r}, a hook's name", expected="columns without it"
            )
    return names


def shard_columns(shard: Shard, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return provenance columns of a shard as numpy arrays, each of shape (n_rows,)."""
    stored = [name for name in names if name != "run"]
    table = shard.tokens(stored) if stored else None
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name in names:
        if name == "run":
            columns[name] = np.full(shard.n_rows, shard.run)
        elif table is not None:
            column = table[name].to_numpy()
            columns[name] = column.astype(str) if name == "phase" else column
    return columns


@functools.lru_cache(maxsize=8)
def _open(path: str, digest: str, accept: tuple[bool, bool]) -> Dataset:
    """Return the dataset, opened once per process: examples are made in DataLoader workers too."""
    dataset = open_dataset(path, i_accept_unsealed=accept[0], i_accept_unprovenanced=accept[1])
    if dataset.digest != digest:
        raise ActdsError(
            "E014",
            path,
            got=f"digest {dataset.digest}",
            expected=digest,
            next_step="The dataset went on after load_dataset: load it again.",
        )
    return dataset


@functools.lru_cache(maxsize=8)
def _open_weights(
    file: str, sha256: str, path: str, digest: str, accept: tuple[bool, bool]
) -> RowWeights:
    """Return the weights file of a dataset, checked once per process."""
    weights = read_row_weights(file, _open(path, digest, accept))
    if weights.sha256 != sha256:
        raise ActdsError(
            "E018",
            file,
            got=f"SHA-256 {weights.sha256}",
            expected=f"{sha256}, as when it was loaded",
            next_step="The file changed after load_dataset: load it again.",
        )
    return weights


@functools.lru_cache(maxsize=8)
def _open_exclusion(
    path: str,
    digest: str,
    accept: tuple[bool, bool],
    hooks: tuple[str, ...],
    names: tuple[str, ...],
) -> Exclusion:
    dataset = _open(path, digest, accept)
    return read_exclusion(dataset, [dataset.hooks[name] for name in hooks], names)


def examples(
    shards: list[str],
    path: str,
    digest: str,
    hooks: tuple[str, ...],
    columns: tuple[str, ...],
    batched_chunks: bool,
    accept: tuple[bool, bool],
    weights: tuple[str, str] | None,
    exclude: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the examples of shards; what ``datasets`` calls, in any process."""
    dataset = _open(path, digest, accept)
    row_weights = _open_weights(*weights, path, digest, accept) if weights else None
    by_name = {shard.name: shard for shard in dataset.shards}
    chosen = [dataset.hooks[name] for name in hooks]
    exclusion = _open_exclusion(path, digest, accept, hooks, exclude)
    for name in shards:
        for chunk in _chunks(by_name[name], chosen, columns, row_weights, exclusion):
            if batched_chunks:
                yield chunk
                continue
            n_rows = len(chunk[hooks[0]])
            values = {key: chunk[key].tolist() for key in columns}
            if row_weights:
                # As float32: a DataLoader makes float64 of Python's floats.
                values[WEIGHT] = list(chunk[WEIGHT])
            for row in range(n_rows):
                # A view would keep its whole chunk alive in a shuffle buffer.
                example = {hook: chunk[hook][row].clone() for hook in hooks}
                yield example | {key: value[row] for key, value in values.items()}


def _chunks(
    shard: Shard,
    hooks: Sequence[Hook],
    columns: Sequence[str],
    weights: RowWeights | None,
    exclusion: Exclusion,
) -> Iterator[dict[str, Any]]:
    """Yield fresh tensors ``(n, d_model)`` and columns ``(n,)``, a chunk of rows at a time."""
    readers = {hook.name: open_array(shard, hook) for hook in hooks}
    try:
        tokens = shard_columns(shard, columns)
        if weights:
            tokens[WEIGHT] = weights.of_shards([shard.name])[shard.name]
        kept = exclusion.kept(shard)
        step = max(reader.rows_per_chunk for reader in readers.values())
        for start in range(0, shard.n_rows, step):
            stop = min(start + step, shard.n_rows)
            chunk: dict[str, Any] = {
                hook.name: to_torch(readers[hook.name].read(start, stop), hook.dtype)
                for hook in hooks
            }
            chunk |= {name: column[start:stop].copy() for name, column in tokens.items()}
            if kept is not None:
                rows = np.flatnonzero(kept[start:stop])
                chunk = {name: column[rows] for name, column in chunk.items()}
                if not rows.size:
                    continue
            yield chunk
    finally:
        for reader in readers.values():
            reader.close()
