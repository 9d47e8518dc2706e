"""Map-style HF datasets: rows as bit patterns in Arrow files, viewed as tensors by a formatter.

Importing this module registers the format ``actds`` with ``datasets``; a dataset that was saved
with it needs ``import actds.hf_arrow`` where it is loaded.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.formatting import TorchFormatter, _register_formatter
from datasets.table import MemoryMappedTable, concat_tables

from actds import canonical
from actds.arrays import ArrayReader, to_torch
from actds.pool import WEIGHT, open_array
from actds.row_weights import RowWeights
from actds.schema.v0_1 import Hook
from actds.shard import Shard
from actds.tables import SCHEMAS

if TYPE_CHECKING:
    import torch

__all__ = ["Formatter", "map_style"]

_CACHE_VERSION = 1
# bfloat16 has no Arrow type: its bits stand as uint16, which no hook of another type has.
_ITEM_TYPES = {"bfloat16": pa.uint16(), "float16": pa.float16(), "float32": pa.float32()}
_DTYPES = {str(kind): name for name, kind in _ITEM_TYPES.items()}


class Formatter(TorchFormatter):  # type: ignore[misc]
    """Gives rows as tensors of the stored type, and every other column as ``torch`` would."""

    def format_row(self, pa_table: pa.Table) -> Mapping[str, Any]:
        """Return one example: tensors ``(d_model,)``."""
        acts, rest = _split(pa_table)
        row = dict(super().format_row(rest)) if rest.num_columns else {}
        return _ordered(pa_table, row | {name: tensor[0] for name, tensor in acts.items()})

    def format_batch(self, pa_table: pa.Table) -> Mapping[str, Any]:
        """Return a batch: tensors ``(n, d_model)``."""
        acts, rest = _split(pa_table)
        batch = dict(super().format_batch(rest)) if rest.num_columns else {}
        return _ordered(pa_table, batch | acts)

    def format_column(self, pa_table: pa.Table) -> Any:
        """Return one column."""
        acts, rest = _split(pa_table)
        return super().format_column(rest) if rest.num_columns else next(iter(acts.values()))


_register_formatter(Formatter, "actds")


def _split(table: pa.Table) -> tuple[dict[str, torch.Tensor], pa.Table]:
    """Return the activation columns as tensors, and the table of all others."""
    acts, rest = {}, []
    for field in table.schema:
        if pa.types.is_fixed_size_list(field.type) and str(field.type.value_type) in _DTYPES:
            acts[field.name] = _tensor(table[field.name], field.type)
        else:
            rest.append(field.name)
    return acts, table.select(rest)


def _tensor(column: pa.ChunkedArray, kind: pa.FixedSizeListType) -> torch.Tensor:
    dtype = _DTYPES[str(kind.value_type)]
    bits = np.dtype("<u4" if dtype == "float32" else "<u2")
    out = np.empty((len(column), kind.list_size), bits)
    at = 0
    # Copied: the file is mapped read-only, and a trainer that writes into a view would crash.
    for chunk in column.chunks:
        part = chunk.flatten().to_numpy(zero_copy_only=True).view(bits)
        out[at : at + len(chunk)] = part.reshape(len(chunk), kind.list_size)
        at += len(chunk)
    return to_torch(out, dtype)


def _ordered(table: pa.Table, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in table.column_names}


def map_style(
    digest: str,
    shards: Sequence[Shard],
    hooks: Sequence[Hook],
    columns: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
    weights: RowWeights | None = None,
) -> datasets.Dataset:
    """Return a map-style dataset over Arrow files, which are written where they are not there.

    Args:
        digest: digest of the dataset.
        shards: shards of the selection.
        hooks: hooks of the selection.
        columns: provenance columns.
        cache_dir: where the files stand; the ``datasets`` cache when None.
        weights: row weights, which become a column.
    """
    key = canonical.dump(
        {
            "columns": list(columns),
            "digest": digest,
            "hooks": [hook.name for hook in hooks],
            "shards": [[shard.name, shard.manifest.root] for shard in shards],
            "version": _CACHE_VERSION,
        }
        | ({"weights": weights.sha256} if weights else {})
    )
    fingerprint = hashlib.sha256(key).hexdigest()[:32]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "actds" / fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for shard in shards:
        file = folder / f"{shard.name}.arrow"
        if not file.exists():
            _write(file, shard, hooks, columns, weights)
        tables.append(MemoryMappedTable.from_file(str(file)))
    dataset = datasets.Dataset(
        concat_tables(tables),
        info=datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(tables[0].schema)),
        split=datasets.Split.TRAIN,
        fingerprint=fingerprint,
    )
    return dataset.with_format("actds")


def _schema(hooks: Sequence[Hook], columns: Sequence[str], weights: RowWeights | None) -> pa.Schema:
    fields = [pa.field(h.name, pa.list_(_ITEM_TYPES[h.dtype], h.d_model)) for h in hooks]
    types = {"run": pa.string()} | {f.name: f.type for f in SCHEMAS["tokens"]}
    fields += [pa.field(name, types[name]) for name in columns]
    return pa.schema([*fields, pa.field(WEIGHT, pa.float32())] if weights else fields)


def _write(
    file: Path,
    shard: Shard,
    hooks: Sequence[Hook],
    columns: Sequence[str],
    weights: RowWeights | None,
) -> None:
    """Write one shard as an Arrow stream that appears whole or not at all."""
    schema = _schema(hooks, columns, weights)
    weight = weights.of_shards([shard.name])[shard.name] if weights else None
    readers = {hook.name: open_array(shard, hook) for hook in hooks}
    stored = [name for name in columns if name != "run"]
    tokens = shard.tokens(stored) if stored else None
    step = max(reader.rows_per_chunk for reader in readers.values())
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, shard.n_rows, step):
                n = min(step, shard.n_rows - start)
                values = [_bits(readers[h.name], h, start, start + n) for h in hooks]
                for name in columns:
                    if name == "run" or tokens is None:
                        values.append(pa.repeat(pa.scalar(shard.run, pa.string()), n))
                    else:
                        values.append(tokens[name].slice(start, n).combine_chunks())
                if weight is not None:
                    values.append(pa.array(weight[start : start + n]))
                writer.write_table(pa.table(values, schema=schema))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
        for reader in readers.values():
            reader.close()


def _bits(reader: ArrayReader, hook: Hook, start: int, stop: int) -> pa.Array:
    items = reader.read(start, stop).reshape(-1)
    native = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}[hook.dtype]
    values = pa.array(items.view(native), _ITEM_TYPES[hook.dtype])
    return pa.FixedSizeListArray.from_arrays(values, hook.d_model)
