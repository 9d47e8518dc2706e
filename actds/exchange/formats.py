"""What trainers take from files: SAELens' cache, safetensors by request, memory maps, Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from actds.errors import ActdsError, not_installed
from actds.exchange.rows import BLOCK_NBYTES, OrderedRows, blocks
from actds.exchange.tensors import NewTensor, write_tensors
from actds.format.arrays import DTYPES
from actds.schema import Hook

__all__ = ["ROWS_FILE", "TARGETS", "Source", "Target", "tlens_name", "write_rows"]

Bits = npt.NDArray[Any]
ROWS_FILE = "rows.parquet"
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}


@dataclass(frozen=True)
class Source:
    """What is written.

    Args:
        rows: the rows, in the order of the export.
        hooks: the hooks.
        dtypes: type of the values of each hook as they are written.
        values: bit patterns of each hook, ``(n_rows, d_model)``, mapped from files.
        context_size: rows of a window, where the target has windows.
        digest: digest of the dataset.
    """

    rows: OrderedRows
    hooks: list[Hook]
    dtypes: dict[str, str]
    values: Mapping[str, Bits]
    context_size: int
    digest: str

    @property
    def row_nbytes(self) -> int:
        """Return the bytes of one row of all hooks."""
        return sum(h.d_model * DTYPES[self.dtypes[h.name]].itemsize for h in self.hooks)


@dataclass(frozen=True)
class Target:
    """A form of files.

    Args:
        words: what it is, for the help.
        write: writes the files into a folder; returns the sequence of each row for the table of
            rows, None where it has none.
        dtypes: types that it holds; the first stands for those that it does not.
        name: what it calls a hook.
        in_place: whether the values that were laid out are the files.
        windows: whether rows are cut in windows of ``context_size``.
        with_rows: whether the files hold the provenance of their rows themselves.
    """

    words: str
    write: Callable[[Source, Path], npt.NDArray[np.int64] | None]
    dtypes: tuple[str, ...]
    name: Callable[[Hook], str] = field(default=lambda hook: hook.name)
    in_place: bool = False
    windows: bool = False
    with_rows: bool = False


def write_rows(rows: OrderedRows, n_rows: int, sequence: Bits | None, path: Path) -> None:
    """Write the provenance of the rows that were exported, row i of row i."""
    writer: pq.ParquetWriter | None = None
    try:
        for start in range(0, n_rows, 1 << 20):
            stop = min(start + (1 << 20), n_rows)
            table = rows.provenance(start, stop)
            if sequence is not None:
                table = table.append_column("sequence", pa.array(sequence[start:stop]))
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _write_memmap(source: Source, folder: Path) -> None:
    """Do nothing: the values were laid out in the folder."""


def _write_safetensors(source: Source, folder: Path) -> npt.NDArray[np.int64]:
    """Write one file per request, as speculators and vLLM's hidden states connector do."""
    kinds = {(hook.d_model, source.dtypes[hook.name]) for hook in source.hooks}
    if len(kinds) > 1:
        got = " and ".join(f"{dtype} rows of {width}" for width, dtype in sorted(kinds))
        raise ActdsError("E009", "hooks", got=got, expected="hooks of one width and one type")
    (_, dtype), columns = kinds.pop(), source.rows.columns
    starts = source.rows.requests()
    words = {"format": "pt", "hooks": ", ".join(h.name for h in source.hooks)}
    for n, (start, stop) in enumerate(pairwise(starts.tolist())):
        run = source.rows.runs[columns["run"][start]]
        shape = (stop - start, len(source.hooks), source.hooks[0].d_model)
        positions = columns["position"][start:stop].astype(np.int64)
        tensors = {
            "hidden_states": NewTensor(dtype, shape, _stacked(source, start, stop)),
            "positions": NewTensor("int64", positions.shape, [positions]),
        }
        if "token_id" not in source.rows.unknown[run]:
            ids = columns["token_id"][start:stop].astype(np.int64)
            tensors["token_ids"] = NewTensor("int64", ids.shape, [ids])
        about = {"run": run, "request": str(columns["request"][start]), "dataset": source.digest}
        write_tensors(folder / f"hs_{n}.safetensors", tensors, words | about)
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _stacked(source: Source, start: int, stop: int) -> Iterator[Bits]:
    """Yield the rows ``[start, stop)`` of all hooks, ``(n, n_hooks, d_model)`` at a time."""
    for low, high in blocks(stop - start, source.row_nbytes):
        here = slice(start + low, start + high)
        yield np.stack([source.values[hook.name][here] for hook in source.hooks], axis=1)


def tlens_name(hook: Hook) -> str:
    """Return what TransformerLens, and so SAELens, calls a hook."""
    streams = ("resid_pre", "resid_mid", "resid_post")
    return f"blocks.{hook.layer}.hook_{hook.kind}" if hook.kind in streams else hook.name


def _write_sae_lens(source: Source, folder: Path) -> npt.NDArray[np.int64]:
    """Write a saved Arrow dataset of windows ``(context_size, d_model)``, as SAELens caches it."""
    try:
        import datasets
    except ImportError:
        raise not_installed("datasets", "hf") from None
    size = source.context_size
    n_windows = source.rows.n_rows // size
    features: dict[str, Any] = {
        tlens_name(hook): datasets.Array2D((size, hook.d_model), source.dtypes[hook.name])
        for hook in source.hooks
    }
    tokens = not any("token_id" in names for names in source.rows.unknown.values())
    if tokens:
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=size)
    schema = datasets.Features(features).arrow_schema
    name = "data-00000-of-00001.arrow"
    with (
        pa.OSFile(str(folder / name), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for start, stop in blocks(n_windows * size, source.row_nbytes, size):
            columns = [_windows(source, hook, schema, start, stop) for hook in source.hooks]
            if tokens:
                ids = pa.array(source.rows.columns["token_id"][start:stop].astype(np.int32))
                columns.append(pa.FixedSizeListArray.from_arrays(ids, size))
            writer.write_batch(pa.record_batch(columns, schema=schema))
    info = {"citation": "", "description": "", "homepage": "", "license": ""}
    info["features"] = datasets.Features(features).to_dict()
    state: dict[str, Any] = {
        "_data_files": [{"filename": name}], "_fingerprint": source.digest[:16],
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return np.arange(n_windows * size) // size


def _windows(source: Source, hook: Hook, schema: pa.Schema, start: int, stop: int) -> pa.Array:
    """Return the windows of a hook in the storage of ``datasets``' two-dimensional arrays."""
    dtype, size = source.dtypes[hook.name], source.context_size
    flat = source.values[hook.name][start:stop].reshape(-1).view(DTYPES[dtype].native)
    inner = np.arange(0, len(flat) + 1, hook.d_model, dtype=np.int32)
    outer = np.arange(0, stop - start + 1, size, dtype=np.int32)
    rows = pa.ListArray.from_arrays(inner, pa.array(flat, _ARROW[dtype]))
    kind = schema.field(tlens_name(hook)).type
    return pa.ExtensionArray.from_storage(kind, pa.ListArray.from_arrays(outer, rows))


def _write_parquet(source: Source, folder: Path) -> None:
    """Write the rows with their provenance, one list per hook and row."""
    (folder / "data").mkdir()
    path = folder / "data" / "train-00000-of-00001.parquet"
    writer: pq.ParquetWriter | None = None
    try:
        for start, stop in blocks(source.rows.n_rows, source.row_nbytes):
            table = source.rows.provenance(start, stop)
            for hook in source.hooks:
                dtype = source.dtypes[hook.name]
                flat = source.values[hook.name][start:stop].reshape(-1).view(DTYPES[dtype].native)
                column = pa.FixedSizeListArray.from_arrays(
                    pa.array(flat, _ARROW[dtype]), hook.d_model
                )
                table = table.append_column(hook.name, column)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=max(1, BLOCK_NBYTES // source.row_nbytes))
    finally:
        if writer is not None:
            writer.close()


_ALL = ("float32", "float16", "bfloat16")
_WITHOUT_BFLOAT16 = ("float32", "float16")

TARGETS: dict[str, Target] = {
    "sae-lens": Target(
        "SAELens' cached activations: a saved Arrow dataset of windows",
        _write_sae_lens,
        _WITHOUT_BFLOAT16,
        tlens_name,
        windows=True,
    ),
    "safetensors": Target(
        "one file per request, as speculators and vLLM write", _write_safetensors, _ALL
    ),
    "memmap": Target("one .npy file per hook, for numpy.load", _write_memmap, _ALL, in_place=True),
    "parquet": Target(
        "one Parquet file, for datasets", _write_parquet, _WITHOUT_BFLOAT16, with_rows=True
    ),
}
"""What ``actds export --to`` knows."""
