"""Saved Arrow datasets as sets of rows: the windows of SAELens, and lists of numbers.

It runs in the process of ``actds.exchange.apart``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from actds.exchange.containers import (
    Array,
    batches,
    features_of,
    foreign,
    is_list,
    schema_of,
    type_name,
)
from actds.exchange.foreign import (
    LABELS,
    NEVER_SAID,
    Block,
    ForeignHook,
    ForeignSet,
    SequenceRows,
    check_labels,
    cut_rows,
    stored_type,
)
from actds.format.arrays import DTYPES


def open_sae_lens(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a saved Arrow dataset with one two-dimensional array per hook and window."""
    info, features = path / "dataset_info.json", features_of(path)
    try:
        two = {n: f for n, f in features.items() if f.get("_type") == "Array2D"}
        sizes = {int(f["shape"][0]) for f in two.values()}
        types = [str(f["dtype"]) for f in two.values()]
        widths = [int(f["shape"][1]) for f in two.values()]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise foreign(info, "features that cannot be read", "windows of activations") from None
    kept = [stored_type(info, name, dtype) for name in types]
    hooks = [ForeignHook(*hook) for hook in zip(two, widths, kept, strict=True)]
    if len(sizes) != 1 or not hooks or min(sizes) < 1 or min(h.d_model for h in hooks) < 1:
        got = f"windows of {', '.join(map(str, sorted(sizes))) or 'no hook'}"
        raise foreign(info, got, "Array2D features of one context size")
    size, tokens = sizes.pop(), "token_ids" in features
    names = [hook.called for hook in hooks] + (["token_ids"] if tokens else [])
    for file in files:
        columns = schema_of(file).names
        if missing := [name for name in names if name not in columns]:
            got = f"columns {', '.join(columns)}"[:200]
            raise foreign(file, got, f"also {', '.join(missing)}")

    def blocks() -> Iterator[Block]:
        number = 0
        for file in files:
            for batch in batches(file):
                values = [_flat(batch, h, t, size, file) for h, t in zip(hooks, types, strict=True)]
                ids = _tokens(batch, size, file) if tokens else None
                for n in range(batch.num_rows):
                    cut = slice(n * size, (n + 1) * size)
                    labels = None if ids is None else ids[cut]
                    rows = SequenceRows([flat[cut] for flat in values], types, labels, None)
                    yield from cut_rows(file, number, rows, kept, tokens)
                    number += 1

    unknown = {*NEVER_SAID, "position"} | (set() if tokens else {"token_id"})
    # What actds export packs are rows of any requests.
    unknown |= {"request"} if (path / "actds_export.json").exists() else set()
    other = tuple(sorted(set(features) - set(names)))
    n_rows = size * sum(batch.num_rows for file in files for batch in batches(file))
    return ForeignSet("sae-lens", files, hooks, tuple(sorted(unknown)), n_rows, blocks, other)


def _flat(batch: pa.RecordBatch, hook: ForeignHook, dtype: str, size: int, file: Path) -> Array:
    """Rows of a column of windows, each window of the size that the features say."""
    column = batch.column(hook.called)
    windows = column.storage if isinstance(column, pa.ExtensionArray) else column
    lengths, rows = _lists(windows, hook.called, file)
    widths, flat = _lists(rows, hook.called, file)
    if set(widths.tolist()) - {hook.d_model} or set(lengths.tolist()) - {size}:
        got = f"{hook.called} windows of {sorted(set(lengths.tolist()))[:9]} rows of "
        got += f"{sorted(set(widths.tolist()))[:9]}"
        raise foreign(file, got, f"{size} rows of {hook.d_model}")
    return _values(flat, hook.called, dtype, file).reshape(-1, hook.d_model)


def _lists(column: pa.Array, name: str, file: Path) -> tuple[Array, pa.Array]:
    """Lengths of the lists of a column, and their elements."""
    if not is_list(column.type):
        raise foreign(file, f"{name} of {column.type}"[:200], "lists of numbers")
    _refuse_nulls(column, name, file)
    lengths: Array = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, column.flatten()


def _refuse_nulls(column: pa.Array, name: str, file: Path) -> None:
    if column.null_count:
        raise foreign(file, f"{name} with {column.null_count} nulls", "no null")


def _values(flat: pa.Array, name: str, dtype: str, file: Path) -> Array:
    _refuse_nulls(flat, name, file)
    values: Array = flat.to_numpy(zero_copy_only=False)
    if values.dtype.name != dtype:
        raise foreign(file, f"{name} of {values.dtype}", dtype)
    return values


def _tokens(batch: pa.RecordBatch, size: int, file: Path) -> Array:
    lengths, ids = _lists(batch.column("token_ids"), "token_ids", file)
    if ids.null_count or len(ids) != batch.num_rows * size or set(lengths.tolist()) - {size}:
        raise foreign(file, f"{len(ids)} token_ids", f"{size} for each of {batch.num_rows} windows")
    values: Array = ids.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iu" or (len(values) and values.min() < 0):
        raise foreign(file, f"token_ids of {values.dtype}", "numbers from 0")
    return values


def open_datasets(path: Path, files: list[Path], dtype: str | None) -> ForeignSet:
    """Open a dataset of lists of floats: a row of channels, or a sequence of them, in each line."""
    schema = schema_of(files[0])
    kinds = {column.name: _nesting(column.type) for column in schema}
    hooks = {n: k for n, k in kinds.items() if k[1] in (*DTYPES, "float64") and k[0] in (1, 2)}
    if not hooks:
        raise foreign(files[0], f"columns {', '.join(schema.names)}"[:200], "lists of floats")
    if len({depth for depth, _ in hooks.values()}) > 1:
        raise foreign(files[0], f"columns {', '.join(hooks)}"[:200], "rows, or sequences of rows")
    depth = next(iter(hooks.values()))[0]
    label = next((n for n in LABELS["token_id"] if kinds.get(n, (-1, ""))[0] == depth - 1), None)
    label = label if label and kinds[label][1].startswith(("int", "uint")) else None
    for file in files:
        if schema_of(file) != schema:
            raise foreign(file, "other columns", f"those of {files[0].name}")
    widths, n_rows = _widths(files, list(hooks), depth)
    stored = {n: stored_type(f"{path} {n}", k[1], dtype) for n, k in hooks.items()}
    kept = list(stored.values())

    def blocks() -> Iterator[Block]:
        number, first = 0, 0
        for file in files:
            for batch in batches(file):
                for rows in _lines(file, batch, hooks, widths, label, depth):
                    placed = replace(rows, first=first)
                    yield from cut_rows(file, number, placed, kept, label is not None)
                    number += depth - 1
                    first += len(rows.rows[0]) if depth == 1 else 0

    unknown = {*NEVER_SAID, "position"} | (set() if label else {"token_id"})
    unknown |= {"request"} if depth == 1 else set()
    other = tuple(sorted(set(schema.names) - set(hooks) - {label}))
    places = [ForeignHook(n, widths[n], stored[n]) for n in hooks]
    return ForeignSet("datasets", files, places, tuple(sorted(unknown)), n_rows, blocks, other)


def _nesting(kind: pa.DataType) -> tuple[int, str]:
    """How deep lists are nested, and the type of their elements."""
    depth = 0
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type
    return depth, type_name(kind)


def _widths(files: list[Path], names: list[str], depth: int) -> tuple[dict[str, int], int]:
    """Channels of each hook and rows of the set, by the length of every list."""
    n_rows = 0
    widths: dict[str, set[int]] = {name: set() for name in names}
    for file in files:
        for batch in batches(file):
            for name in names:
                column = batch.column(name)
                for _ in range(depth - 1):
                    column = _lists(column, name, file)[1]
                lengths = _lists(column, name, file)[0]
                widths[name] |= set(np.unique(lengths).tolist())
            n_rows += len(lengths)
    for name, sizes in widths.items():
        if len(sizes) != 1 or 0 in sizes:
            got = f"{name} in lists of {sorted(sizes)[:9]}"
            raise foreign(files[0], got, "lists of one length")
    return {name: sizes.pop() for name, sizes in widths.items()}, n_rows


def _lines(
    file: Path,
    batch: pa.RecordBatch,
    hooks: dict[str, tuple[int, str]],
    widths: dict[str, int],
    label: str | None,
    depth: int,
) -> Iterator[SequenceRows]:
    """The sequences of a batch: all its lines as one, or one each."""
    lengths: Array | None = None

    def column_of(name: str, expected: str) -> pa.Array:
        nonlocal lengths
        column = batch.column(name)
        if depth == 2:
            sizes, column = _lists(column, name, file)
            if lengths is not None and (sizes != lengths).any():
                raise foreign(file, f"{name} of other lengths", expected)
            lengths = sizes
        return column

    rows: list[Array] = []
    for name, (_, dtype) in hooks.items():
        flat = _lists(column_of(name, "those of the other columns"), name, file)[1]
        rows.append(_values(flat, name, dtype, file).reshape(-1, widths[name]))
    ids: Array | None = None
    if label is not None:
        column = column_of(label, "one per row")
        _refuse_nulls(column, label, file)
        ids = column.to_numpy(zero_copy_only=False)
    ends = [len(rows[0])] if lengths is None else np.cumsum(lengths).tolist()
    dtypes = [dtype for _, dtype in hooks.values()]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        labels = None if ids is None else ids[start:stop]
        sequence = SequenceRows([values[start:stop] for values in rows], dtypes, labels, None)
        check_labels(file, sequence)
        yield sequence
