"""HF ``datasets`` objects over a dataset, without a step that widens bfloat16.

``datasets`` has no bfloat16 feature, and turns bf16 tensors into float32 silently. So a
stream is a generator whose tensors pass through untouched, and a map-style dataset holds float32
that a formatter gives as the stored type.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from actds.errors import ActdsError, not_installed
from actds.explore.dataset import Dataset
from actds.explore.dataset import open as open_dataset
from actds.explore.lazy import open_array, rows_at_a_time
from actds.format.arrays import to_torch
from actds.format.row_weights import RowWeights
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import SCHEMAS
from actds.loader.filters import bad
from actds.loader.selection import (
    PROVENANCE_COLUMNS,
    ROLE,
    WEIGHT,
    RowFilter,
    Selection,
    provenance_columns,
    select,
    warn_where_none,
)

if TYPE_CHECKING:
    import datasets


def load_dataset(
    path: str | os.PathLike[str],
    *,
    streaming: bool = False,
    hooks: str | Sequence[str] | None = None,
    phase: Literal["prefill", "decode"] | None = None,
    where: str | None = None,
    split: Literal["train", "held_out"] | None = None,
    held_out: float = 0.0,
    columns: Sequence[str] | None = None,
    batched_chunks: bool = False,
    weights: str | os.PathLike[str] | None = None,
    exclude: str | Sequence[str] = (),
    cache_dir: str | os.PathLike[str] | None = None,
    seal: str | None = None,
    i_accept_unsealed: bool = False,
    i_accept_unprovenanced: bool = False,
) -> datasets.IterableDataset | datasets.Dataset:
    """Open a dataset for Hugging Face ``datasets``: one example per row.

    An example holds one tensor ``(d_model,)`` in the stored type per hook under the hook's name,
    and one value per provenance column. Rows have the order of the shards; to train in a shuffled
    order and at full speed use ``actds.Loader``.

    Streaming, the examples are made while they are read: ``split_dataset_by_node``, DataLoader
    workers and ``state_dict`` work by shards. Do not add ``with_format("torch")``, which copies
    every tensor. Map-style, the rows are first written as float32 to Arrow files in the
    ``datasets`` cache, keyed by the dataset's digest and the selection: tensors come in the stored
    type, and ``with_format``, ``to_parquet`` or ``push_to_hub`` give the same values as float32.

    Args:
        path: the dataset's folder, or its ``s3://`` URI.
        streaming: return an ``IterableDataset`` and write nothing.
        hooks: names of hooks; None takes all.
        phase: ``prefill`` or ``decode``; None takes both.
        columns: columns of the token table, ``run``, and ``role``, who wrote the position, None
            where that is not known; None takes run, request, position, token_id, phase and step.
        batched_chunks: streaming only: one example per chunk, with tensors ``(n, d_model)`` and
            numpy columns ``(n,)``. Many times faster.
        weights: path of a weights file (section 14.11); each example has a float32 ``weight``.
        exclude: rows to leave out, one name or several of ``special``, ``bos``, ``eos``,
            ``first_position``, ``sink`` and ``not_finite``, as in ``actds.Loader``.
        where: an expression of the rows to read, as in ``actds.Loader``.
        split: ``train`` or ``held_out``, as in ``actds.Loader``.
        held_out: the share of requests that are held out.
        cache_dir: map-style only: folder of the Arrow files; the ``datasets`` cache when None.
        seal: digest of a seal, as of ``actds.open``.
        i_accept_unsealed: read a dataset that is not sealed.
        i_accept_unprovenanced: read a dataset whose provenance is missing.

    Raises:
        ActdsError: E011 without the package ``datasets``; E014 when an argument selects nothing;
            E018 when the weights file is not one of this dataset; E416 when a row has no readout
            and ``exclude`` needs it; and as ``actds.open``.

    Spec: 0.1 section 10.
    """
    try:
        import datasets
    except ImportError:
        raise not_installed("datasets", "hf") from None
    if batched_chunks and not streaming:
        raise bad("batched_chunks", "True", "False, or streaming=True")
    accept = (i_accept_unsealed, i_accept_unprovenanced)
    dataset = open_dataset(
        os.fspath(path),
        seal=seal,
        i_accept_unsealed=accept[0],
        i_accept_unprovenanced=accept[1],
    )
    selection = select(
        dataset,
        hooks,
        phase,
        exclude=exclude,
        where=where,
        split=split,
        held_out=held_out,
        weights=weights,
    )
    if selection.loss_weight is not None:
        raise bad("weights", f"no file {os.fspath(weights or '')!r}", "the path of a weights file")
    names = _select_columns(selection, columns)
    warn_where_none(selection.excluded, [selection], stacklevel=2)
    if not streaming:
        from actds.loader.hf_arrow import map_style

        return map_style(dataset.digest, selection, names, cache_dir)
    file = selection.row_weights
    source = Source(
        path=os.fspath(path),
        digest=dataset.digest,
        seal=seal,
        accept=accept,
        hooks=tuple(hook.name for hook in selection.hooks),
        columns=names,
        batched_chunks=batched_chunks,
        weights=None if file is None else (os.fspath(file.path), file.sha256),
        exclude=selection.filter.exclusion.names,
        where=where,
        split=split,
        held_out=held_out,
    )
    # datasets splits work along lists: this one and no other is a list.
    shards = [shard.name for shard in selection.shards]
    return datasets.IterableDataset.from_generator(
        examples, gen_kwargs={"shards": shards, "source": source}
    )


def _select_columns(selection: Selection, columns: Sequence[str] | None) -> tuple[str, ...]:
    unknown = {name for shard in selection.shards for name in shard.unknown}
    usual = tuple(name for name in PROVENANCE_COLUMNS if name not in unknown)
    names = usual if columns is None else tuple(columns)
    names = provenance_columns(
        "columns", names, ("run", *SCHEMAS["tokens"].names), selection.shards
    )
    taken = {hook.name for hook in selection.hooks}
    for name in names:
        if name in taken:
            raise bad("columns", f"{name!r}, a hook's name", "columns without it")
    if ROLE in names and not selection.dataset.roles(run=False).num_rows:
        raise bad("columns", "'role', and no run has roles", "a harvest of chats")
    if selection.row_weights is not None and WEIGHT in (*names, *taken):
        raise bad("hooks", repr(WEIGHT), "hooks without it")
    return names


def _shard_columns(
    shard: Shard, names: Sequence[str], row_filter: RowFilter
) -> dict[str, np.ndarray[Any, Any]]:
    table = row_filter.values.provenance(shard, names)
    columns = {name: table[name].to_numpy() for name in names}
    # Words of numpy where every row has one; a role can be None.
    return {n: c.astype(str) if n in ("run", "phase") else c for n, c in columns.items()}


@dataclass(frozen=True)
class Source:
    """What a stream reads, as any process can open it.

    Args:
        path: path or URI of the dataset.
        digest: its digest.
        seal: the seal that was asked for.
        accept: whether it may be unsealed, and unprovenanced.
        hooks: names of hooks.
        columns: provenance columns.
        batched_chunks: whether an example is a chunk of rows.
        weights: path and SHA-256 of a weights file.
        exclude: names of rows to leave out.
        where: an expression of the rows to read.
        split: the part of a split by request.
        held_out: the share of requests that are held out.
    """

    path: str
    digest: str
    seal: str | None
    accept: tuple[bool, bool]
    hooks: tuple[str, ...]
    columns: tuple[str, ...]
    batched_chunks: bool
    weights: tuple[str, str] | None
    exclude: tuple[str, ...]
    where: str | None
    split: str | None
    held_out: float


@functools.lru_cache(maxsize=8)
def _open(source: Source) -> tuple[Dataset, RowWeights | None, RowFilter]:
    """Return what a stream reads, opened once per process: DataLoader workers do so, too."""
    dataset = open_dataset(
        source.path,
        seal=source.seal,
        i_accept_unsealed=source.accept[0],
        i_accept_unprovenanced=source.accept[1],
    )
    if dataset.digest != source.digest:
        raise ActdsError(
            "E014",
            source.path,
            got=f"digest {dataset.digest}",
            expected=source.digest,
            next_step="The dataset changed after load_dataset: load it again.",
        )
    weights = None
    if source.weights is not None:
        file, sha256 = source.weights
        weights = dataset.row_weights(file)
        if weights.sha256 != sha256:
            raise ActdsError(
                "E018",
                file,
                got=f"SHA-256 {weights.sha256}",
                expected=f"{sha256}, as when it was loaded",
                next_step="The file changed after load_dataset: load it again.",
            )
    hooks = [dataset.hooks[name] for name in source.hooks]
    row_filter = RowFilter(
        dataset,
        hooks,
        exclude=source.exclude,
        where=source.where,
        split=source.split,
        held_out=source.held_out,
    )
    return dataset, weights, row_filter


def examples(shards: list[str], source: Source) -> Iterator[dict[str, Any]]:
    """Yield the examples of shards; what ``datasets`` calls, in any process."""
    dataset, row_weights, row_filter = _open(source)
    by_name = {shard.name: shard for shard in dataset.shards}
    chosen = [dataset.hooks[name] for name in source.hooks]
    for name in shards:
        for chunk in _chunks(by_name[name], chosen, source.columns, row_weights, row_filter):
            if source.batched_chunks:
                yield chunk
                continue
            n_rows = len(chunk[source.hooks[0]])
            values = {key: chunk[key].tolist() for key in source.columns}
            if row_weights:
                # As float32: a DataLoader makes float64 of Python's floats.
                values[WEIGHT] = list(chunk[WEIGHT])
            for row in range(n_rows):
                # A view would keep its whole chunk alive in a shuffle buffer.
                example = {hook: chunk[hook][row].clone() for hook in source.hooks}
                yield example | {key: value[row] for key, value in values.items()}


def _chunks(
    shard: Shard,
    hooks: Sequence[Hook],
    columns: Sequence[str],
    weights: RowWeights | None,
    row_filter: RowFilter,
) -> Iterator[dict[str, Any]]:
    """Yield fresh tensors ``(n, d_model)`` and columns ``(n,)``, a chunk of rows at a time."""
    readers = {hook.name: open_array(shard, hook) for hook in hooks}
    try:
        tokens = _shard_columns(shard, columns, row_filter)
        if weights:
            tokens[WEIGHT] = weights.of_shards([shard.name])[shard.name]
        kept = row_filter.kept(shard)
        step = rows_at_a_time(readers)
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
