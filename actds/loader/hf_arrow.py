"""Map-style HF datasets: rows as float32 in Arrow files, given as the stored type by a formatter.

Arrow has no bfloat16. Bit patterns would take half the space, but every other format, ``map``,
``to_parquet`` and ``push_to_hub`` would take them for numbers: 8.3125 would leave as 16645. Float32
holds each value and, in its upper half, each bit.

Importing this module registers the format ``actds`` with ``datasets``; a dataset that was saved
with it needs ``import actds.loader.hf_arrow`` where it is loaded.
"""

from __future__ import annotations

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

from actds.explore.lazy import open_array, rows_at_a_time
from actds.format.arrays import ArrayReader, to_torch, widen
from actds.format.row_weights import RowWeights
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import SCHEMAS
from actds.loader.selection import ROLE, WEIGHT, Selection, key_of
from actds.store import refuse_within_dataset

if TYPE_CHECKING:
    import torch

_CACHE_VERSION = 2
_ITEM_TYPES = {"bfloat16": pa.float32(), "float16": pa.float16(), "float32": pa.float32()}


class Formatter(TorchFormatter):  # type: ignore[misc]
    """Gives rows as tensors of the stored type, and every other column as ``torch`` would.

    Args:
        float32: columns of float32 that were stored as such; all others were bfloat16.
        features: as ``datasets`` gives them.
        token_per_repo_id: as ``datasets`` gives it.
    """

    def __init__(
        self,
        features: Any = None,
        token_per_repo_id: Any = None,
        float32: Sequence[str] = (),
    ) -> None:
        super().__init__(features=features, token_per_repo_id=token_per_repo_id)
        self._float32 = frozenset(float32)

    def format_row(self, pa_table: pa.Table) -> Mapping[str, Any]:
        acts, rest = self._split(pa_table)
        row = dict(super().format_row(rest)) if rest.num_columns else {}
        return _ordered(pa_table, row | {name: tensor[0] for name, tensor in acts.items()})

    def format_batch(self, pa_table: pa.Table) -> Mapping[str, Any]:
        acts, rest = self._split(pa_table)
        batch = dict(super().format_batch(rest)) if rest.num_columns else {}
        return _ordered(pa_table, batch | acts)

    def format_column(self, pa_table: pa.Table) -> Any:
        acts, rest = self._split(pa_table)
        return super().format_column(rest) if rest.num_columns else next(iter(acts.values()))

    def _split(self, table: pa.Table) -> tuple[dict[str, torch.Tensor], pa.Table]:
        acts, rest = {}, []
        for field in table.schema:
            kind = field.type
            if pa.types.is_fixed_size_list(kind) and pa.types.is_float16(kind.value_type):
                acts[field.name] = to_torch(_bits(table[field.name], np.dtype("<u2")), "float16")
            elif pa.types.is_fixed_size_list(kind) and pa.types.is_float32(kind.value_type):
                bits = _bits(table[field.name], np.dtype("<u4"))
                if field.name in self._float32:
                    acts[field.name] = to_torch(bits, "float32")
                else:
                    acts[field.name] = to_torch(_narrow(bits, field.name), "bfloat16")
            else:
                rest.append(field.name)
        return acts, table.select(rest)


_register_formatter(Formatter, "actds")


def _bits(column: pa.ChunkedArray, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the bit patterns ``(n_rows, d_model)`` of a column, in fresh memory."""
    out = np.empty((len(column), column.type.list_size), kind)
    at = 0
    # Copied: the file is mapped read-only, and a trainer that writes into a view would crash.
    for chunk in column.chunks:
        part = chunk.flatten().to_numpy(zero_copy_only=True).view(kind)
        out[at : at + len(chunk)] = part.reshape(-1, out.shape[1])
        at += len(chunk)
    return out


def _narrow(bits: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return the bfloat16 patterns of float32 ones that were widened."""
    halves = bits.view("<u2").reshape(*bits.shape, 2)
    if halves[..., 0].any():
        raise ValueError(
            f"column {name!r} has float32 values that bfloat16 does not hold, so actds did not "
            f"store them; use with_format('torch') or with_format('actds', float32=[{name!r}])"
        )
    return np.ascontiguousarray(halves[..., 1])


def _ordered(table: pa.Table, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in table.column_names}


def map_style(
    digest: str,
    selection: Selection,
    columns: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
) -> datasets.Dataset:
    """Return a map-style dataset over Arrow files, which are written where they are not there."""
    hooks, weights = selection.hooks, selection.row_weights
    chosen = {name: value for name, value in selection.filter.identity.items() if value}
    key = key_of(
        {
            "columns": list(columns),
            "digest": selection.dataset.result_key,
            "hooks": [hook.name for hook in hooks],
            "shards": [[shard.name, shard.manifest.root] for shard in selection.shards],
            "version": _CACHE_VERSION,
        }
        | ({"weights": weights.sha256} if weights else {})
        | chosen
    )
    fingerprint = key[:32]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "actds" / fingerprint
    refuse_within_dataset(folder, "cache_dir")
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for shard in selection.shards:
        file = folder / f"{shard.name}.arrow"
        if not file.exists():
            _write(file, shard, selection, columns)
        tables.append(MemoryMappedTable.from_file(str(file)))
    dataset = datasets.Dataset(
        concat_tables(tables),
        info=datasets.DatasetInfo(
            description=f"Activations of the actds dataset with digest {digest}.",
            features=datasets.Features.from_arrow_schema(tables[0].schema),
        ),
        split=datasets.Split.TRAIN,
        fingerprint=fingerprint,
    )
    kept = [hook.name for hook in hooks if hook.dtype == "float32"]
    return dataset.with_format("actds", **({"float32": kept} if kept else {}))


def _schema(hooks: Sequence[Hook], columns: Sequence[str], weights: RowWeights | None) -> pa.Schema:
    fields = [pa.field(h.name, pa.list_(_ITEM_TYPES[h.dtype], h.d_model)) for h in hooks]
    types = {name: pa.string() for name in ("run", ROLE)} | {
        f.name: f.type for f in SCHEMAS["tokens"]
    }
    fields += [pa.field(name, types[name]) for name in columns]
    return pa.schema([*fields, pa.field(WEIGHT, pa.float32())] if weights else fields)


def _write(file: Path, shard: Shard, selection: Selection, columns: Sequence[str]) -> None:
    """Write one shard as an Arrow stream that appears whole or not at all."""
    hooks, weights = selection.hooks, selection.row_weights
    schema = _schema(hooks, columns, weights)
    weight = weights.of_shards([shard.name])[shard.name] if weights else None
    readers = {hook.name: open_array(shard, hook) for hook in hooks}
    kept = selection.filter.kept(shard)
    tokens = selection.filter.values.provenance(shard, columns)
    step = rows_at_a_time(readers)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, shard.n_rows, step):
                n = min(step, shard.n_rows - start)
                values = [_values(readers[h.name], h, start, start + n) for h in hooks]
                for name in columns:
                    values.append(tokens[name].slice(start, n).combine_chunks())
                if weight is not None:
                    values.append(pa.array(weight[start : start + n]))
                table = pa.table(values, schema=schema)
                if kept is not None:
                    table = table.filter(pa.array(kept[start : start + n]))
                writer.write_table(table)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
        for reader in readers.values():
            reader.close()


def _values(reader: ArrayReader, hook: Hook, start: int, stop: int) -> pa.Array:
    bits = reader.read(start, stop).reshape(-1)
    values = bits.view("<f2") if hook.dtype == "float16" else widen(bits, hook.dtype)
    return pa.FixedSizeListArray.from_arrays(
        pa.array(values, _ITEM_TYPES[hook.dtype]), hook.d_model
    )
