"""HF ``datasets`` objects over a dataset, without a step that widens bfloat16.

``datasets`` has no bfloat16 feature, and turns bf16 tensors into float32 silently. So a stream is a
generator whose tensors pass through untouched, and a map-style dataset holds float32 in Arrow files
that a formatter gives as the stored type.

Arrow has no bfloat16 either. Bit patterns would take half the space, but every other format,
``map``, ``to_parquet`` and ``push_to_hub`` would take them for numbers: 8.3125 would leave as
16645. Float32 holds each value and, in its upper half, each bit.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from actds.errors import ActdsError, not_installed
from actds.explore.dataset import Dataset, OpenOptions
from actds.explore.dataset import open as open_dataset
from actds.explore.lazy import open_array, rows_at_a_time
from actds.format.arrays import to_torch, widen
from actds.format.row_weights import RowWeights
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import SCHEMAS
from actds.loader.filters import bad
from actds.loader.selection import (
    PROVENANCE_COLUMNS,
    WEIGHT,
    RowFilter,
    Selection,
    key_of,
    numbers_of,
    provenance_columns,
    sample_of,
    select,
    warn_where_none,
    warn_where_unequal,
)
from actds.loader.where import INCLUSION, ROLE, Expression, Kind, parse_expression
from actds.store import refuse_within_dataset

if TYPE_CHECKING:
    import datasets
    import torch

_CACHE_VERSION = 2
_ITEM_TYPES = {"bfloat16": pa.float32(), "float16": pa.float16(), "float32": pa.float32()}
_COLUMN_TYPES = {field.name: field.type for field in SCHEMAS["tokens"]}
_COLUMN_TYPES |= {"run": pa.string(), ROLE: pa.string(), WEIGHT: pa.float32()}


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
            where that is not known; ``inclusion``, 1 where the run stores every row; None takes
            run, request, position, token_id, phase and step.
        batched_chunks: streaming only: one example per chunk, with tensors ``(n, d_model)`` and
            numpy columns ``(n,)``. Many times faster.
        weights: path of a weights file (section 14.11), an expression, or ``inclusion`` for
            ``1 / inclusion``, as in ``actds.Loader``; each example has a float32 ``weight``.
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
    path = os.fspath(path)
    pins: OpenOptions = {
        "seal": seal,
        "i_accept_unsealed": i_accept_unsealed,
        "i_accept_unprovenanced": i_accept_unprovenanced,
    }
    dataset = open_dataset(path, **pins)
    rows: dict[str, Any] = {
        "exclude": (exclude,) if isinstance(exclude, str) else tuple(exclude),
        "where": where,
        "split": split,
        "held_out": held_out,
    }
    selection = select(dataset, hooks, phase, weights=weights, **rows)
    names = _select_columns(selection, columns)
    warn_where_none(selection.excluded, [selection], stacklevel=2)
    if INCLUSION not in names:
        warn_where_unequal(sample_of([selection]), [selection], stacklevel=2)
    if not streaming:
        return _map_style(selection, names, cache_dir)
    file = selection.row_weights
    source = Source(
        path,
        dataset.digest,
        tuple(pins.items()),
        tuple(hook.name for hook in selection.hooks),
        names,
        batched_chunks,
        None if file is None else (os.fspath(file.path), file.sha256),
        None if selection.loss_weight is None else selection.loss_weight.text,
        tuple(rows.items()),
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
    if selection.weight is not None and WEIGHT in (*names, *taken):
        raise bad("hooks", repr(WEIGHT), "hooks without it")
    return names


@dataclass(frozen=True)
class Source:
    """What a stream reads, as any process can open it: the dataset must have the digest still."""

    path: str
    digest: str
    pins: tuple[tuple[str, Any], ...]
    hooks: tuple[str, ...]
    columns: tuple[str, ...]
    batched_chunks: bool
    weights: tuple[str, str] | None
    """Path and SHA-256 of a weights file."""
    weight: str | None
    """An expression of the weight of each row."""
    rows: tuple[tuple[str, Any], ...]
    """The arguments of ``RowFilter``."""


@functools.lru_cache(maxsize=8)
def _open(source: Source) -> tuple[Dataset, RowWeights | Expression | None, RowFilter]:
    """Return what a stream reads, opened once per process: DataLoader workers do so, too."""
    dataset = open_dataset(source.path, **dict(source.pins))
    if dataset.digest != source.digest:
        raise _changed("E014", source.path, f"digest {dataset.digest}", source.digest, "dataset")
    weights: RowWeights | Expression | None = None
    if source.weight is not None:
        weights = parse_expression(source.weight, "weights", Kind.NUMBER)
    if source.weights is not None:
        file, sha256 = source.weights
        weights = dataset.row_weights(file)
        if weights.sha256 != sha256:
            got, expected = f"SHA-256 {weights.sha256}", f"{sha256}, as when it was loaded"
            raise _changed("E018", file, got, expected, "file")
    hooks = [dataset.hooks[name] for name in source.hooks]
    return dataset, weights, RowFilter(dataset, hooks, **dict(source.rows))


def _changed(code: str, place: str, got: str, expected: str, what: str) -> ActdsError:
    next_step = f"The {what} changed after load_dataset: load it again."
    return ActdsError(code, place, got=got, expected=expected, next_step=next_step)


def examples(shards: list[str], source: Source) -> Iterator[dict[str, Any]]:
    """Yield the examples of shards; what ``datasets`` calls, in any process."""
    dataset, row_weights, row_filter = _open(source)
    by_name = {shard.name: shard for shard in dataset.shards}
    hooks = [dataset.hooks[name] for name in source.hooks]
    for name in shards:
        for chunk in _chunks(by_name[name], hooks, source.columns, row_weights, row_filter):
            for hook in hooks:
                chunk[hook.name] = to_torch(chunk[hook.name], hook.dtype)
            if source.batched_chunks:
                yield chunk
                continue
            values = {key: chunk[key].tolist() for key in source.columns}
            if row_weights:
                # As float32: a DataLoader makes float64 of Python's floats.
                values[WEIGHT] = list(chunk[WEIGHT])
            for row in range(len(chunk[hooks[0].name])):
                # A view would keep its whole chunk alive in a shuffle buffer.
                example = {hook: chunk[hook][row].clone() for hook in source.hooks}
                yield example | {key: value[row] for key, value in values.items()}


def _chunks(
    shard: Shard,
    hooks: Sequence[Hook],
    columns: Sequence[str],
    weights: RowWeights | Expression | None,
    row_filter: RowFilter,
) -> Iterator[dict[str, Any]]:
    """Yield fresh bit patterns ``(n, d_model)`` and columns ``(n,)``, a chunk of rows at a time."""
    readers = {hook.name: open_array(shard, hook) for hook in hooks}
    try:
        table = row_filter.values.provenance(shard, columns)
        tokens = {name: table[name].to_numpy() for name in columns}
        # Words of numpy where every row has one; a role can be None.
        tokens |= {name: tokens[name].astype(str) for name in ("run", "phase") if name in tokens}
        kept = row_filter.kept(shard)
        if isinstance(weights, Expression):
            numbers = numbers_of("weights", weights, shard, row_filter.values, kept)
            tokens[WEIGHT] = numbers.astype(np.float32)
        elif weights:
            tokens[WEIGHT] = weights.of_shards([shard.name])[shard.name]
        step = rows_at_a_time(readers)
        for start in range(0, shard.n_rows, step):
            stop = min(start + step, shard.n_rows)
            chunk: dict[str, Any] = {
                name: reader.read(start, stop) for name, reader in readers.items()
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


def _map_style(
    selection: Selection, columns: Sequence[str], cache_dir: str | os.PathLike[str] | None
) -> datasets.Dataset:
    import datasets
    from datasets.table import MemoryMappedTable, concat_tables

    hooks, weights = selection.hooks, selection.weight
    key = {
        "columns": list(columns),
        "digest": selection.dataset.result_key,
        "hooks": [hook.name for hook in hooks],
        "shards": [[shard.name, shard.manifest.root] for shard in selection.shards],
        "version": _CACHE_VERSION,
    }
    if weights is not None:
        key["weights"] = weights.text if isinstance(weights, Expression) else weights.sha256
    key |= {name: value for name, value in selection.filter.identity.items() if value}
    fingerprint = key_of(key)[:32]
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "actds" / fingerprint
    refuse_within_dataset(folder, "cache_dir")
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for shard in selection.shards:
        file = folder / f"{shard.name}.arrow"
        if not file.exists():
            _write(file, shard, selection, columns)
        tables.append(MemoryMappedTable.from_file(str(file)))
    digest = selection.dataset.digest
    dataset = datasets.Dataset(
        concat_tables(tables),
        info=datasets.DatasetInfo(
            description=f"Activations of the actds dataset with digest {digest}.",
            features=datasets.Features.from_arrow_schema(tables[0].schema),
        ),
        split=datasets.Split.TRAIN,
        fingerprint=fingerprint,
    )
    register_format()
    kept = [hook.name for hook in hooks if hook.dtype == "float32"]
    return dataset.with_format("actds", **({"float32": kept} if kept else {}))


def _write(file: Path, shard: Shard, selection: Selection, columns: Sequence[str]) -> None:
    hooks, weights = selection.hooks, selection.weight
    names = [*columns, *([WEIGHT] if weights else [])]
    fields = [pa.field(h.name, pa.list_(_ITEM_TYPES[h.dtype], h.d_model)) for h in hooks]
    schema = pa.schema([*fields, *(pa.field(name, _COLUMN_TYPES[name]) for name in names)])
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for chunk in _chunks(shard, hooks, columns, weights, selection.filter):
                values = [_floats(chunk[hook.name].reshape(-1), hook) for hook in hooks]
                values += [pa.array(chunk[name], _COLUMN_TYPES[name]) for name in names]
                writer.write_table(pa.table(values, schema=schema))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _floats(bits: np.ndarray[Any, Any], hook: Hook) -> pa.Array:
    values = bits.view("<f2") if hook.dtype == "float16" else widen(bits, hook.dtype)
    items = pa.array(values, _ITEM_TYPES[hook.dtype])
    return pa.FixedSizeListArray.from_arrays(items, hook.d_model)


@functools.cache
def register_format() -> None:
    """Make the format ``actds`` known to ``datasets``: where what was saved with it is loaded."""
    from datasets.formatting import TorchFormatter, _register_formatter

    class Formatter(TorchFormatter):  # type: ignore[misc]
        """Gives rows as tensors of the stored type, and every other column as ``torch`` would.

        Columns of float32 were bfloat16, but for those that are named as ``float32``.
        """

        def __init__(
            self, features: Any = None, token_per_repo_id: Any = None, float32: Sequence[str] = ()
        ) -> None:
            super().__init__(features=features, token_per_repo_id=token_per_repo_id)
            self._float32 = frozenset(float32)

        def format_row(self, pa_table: pa.Table) -> Mapping[str, Any]:
            acts, rest = _split(pa_table, self._float32)
            row = dict(super().format_row(rest)) if rest.num_columns else {}
            row |= {name: tensor[0] for name, tensor in acts.items()}
            return {name: row[name] for name in pa_table.column_names}

        def format_batch(self, pa_table: pa.Table) -> Mapping[str, Any]:
            acts, rest = _split(pa_table, self._float32)
            batch = (dict(super().format_batch(rest)) if rest.num_columns else {}) | acts
            return {name: batch[name] for name in pa_table.column_names}

        def format_column(self, pa_table: pa.Table) -> Any:
            acts, rest = _split(pa_table, self._float32)
            return super().format_column(rest) if rest.num_columns else next(iter(acts.values()))

    _register_formatter(Formatter, "actds")


def _split(table: pa.Table, float32: frozenset[str]) -> tuple[dict[str, torch.Tensor], pa.Table]:
    acts, rest = {}, []
    for field in table.schema:
        kind = field.type
        if pa.types.is_fixed_size_list(kind) and pa.types.is_float16(kind.value_type):
            acts[field.name] = to_torch(_bits(table[field.name], np.dtype("<u2")), "float16")
        elif pa.types.is_fixed_size_list(kind) and pa.types.is_float32(kind.value_type):
            bits = _bits(table[field.name], np.dtype("<u4"))
            if field.name in float32:
                acts[field.name] = to_torch(bits, "float32")
            else:
                acts[field.name] = to_torch(_narrow(bits, field.name), "bfloat16")
        else:
            rest.append(field.name)
    return acts, table.select(rest)


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
    halves = bits.view("<u2").reshape(*bits.shape, 2)
    if halves[..., 0].any():
        raise ValueError(
            f"column {name!r} has float32 values that bfloat16 does not hold, so actds did not "
            f"store them; use with_format('torch') or with_format('actds', float32=[{name!r}])"
        )
    return np.ascontiguousarray(halves[..., 1])
