"""Export: rows of a dataset as files of another library, with what they are beside them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from actds.errors import ActdsError, not_installed
from actds.exchange.rows import BLOCK_NBYTES, ORDER, OrderedRows, blocks, lay_out, order_rows
from actds.exchange.tensors import NewTensor, write_tensors
from actds.explore.dataset import Dataset
from actds.explore.dataset import open as open_dataset
from actds.format import canonical, schema
from actds.format.arrays import DTYPES
from actds.format.schema import FileEntry, Hook
from actds.loader.filters import bad
from actds.loader.selection import Selection, select, warn_where_none
from actds.store.folders import new_folder
from actds.version import __version__

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


RECORD_FILE = "actds_export.json"
_OF_RUNS = ("engine.", "model.", "numerics.", "capture.cast", "tokenizer.")


class ExportedHook(BaseModel):
    """A hook in an export."""

    name: str
    column: str = Field(description="what the files call it")
    d_model: int
    stored: str = Field(description="type in the dataset")
    written: str = Field(description="type in the files")


class ExportedRun(BaseModel):
    """A run of which rows were exported."""

    record_sha256: str | None = Field(description="digest of its run record; null without one")
    fields: dict[str, Any] = Field(description="what its run record says of model and numerics")
    unknown: list[str] = Field(description="row columns of which it says nothing")


class ExportRecord(BaseModel):
    """``actds_export.json``: what the files beside it are, and where they come from."""

    format: Literal["actds.export"] = "actds.export"
    version: Literal["1"] = "1"
    actds: str = Field(description="version of this package")
    to: str
    dataset: str = Field(description="id of the dataset")
    digest: str = Field(description="digest of the dataset")
    seal: int | None = Field(description="number of its seal; null when it was not sealed")
    hooks: list[ExportedHook]
    runs: dict[str, ExportedRun]
    phase: str | None
    where: str | None
    exclude: list[str]
    split: str | None
    held_out: float
    order: str = Field(description="by what the rows are sorted")
    n_rows: int
    n_left_out: int = Field(description="rows at the end that did not fill a window")
    context_size: int | None = Field(description="rows of a window")
    files: list[FileEntry] = Field(description="every other file, by path")


def export(
    path: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
    *,
    to: Literal["sae-lens", "safetensors", "memmap", "parquet"],
    hooks: str | Sequence[str] | None = None,
    phase: Literal["prefill", "decode"] | None = None,
    where: str | None = None,
    exclude: str | Sequence[str] = (),
    split: Literal["train", "held_out"] | None = None,
    held_out: float = 0.0,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    context_size: int = 128,
    i_accept_unsealed: bool = False,
    i_accept_unprovenanced: bool = False,
) -> ExportRecord:
    """Write rows of a dataset as files that another library reads.

    The rows are sorted by run, request and position. Beside the files stands
    ``actds_export.json``, which is also what is returned, and ``rows.parquet``, whose line i says
    run, request, position, token_id, phase and step of row i (``parquet`` has these columns
    itself). The folder appears whole or not at all. Files hold the stored values exactly; where a
    form has no bfloat16 (``sae-lens``, ``parquet``), as float32.

    Memory: about 40 bytes a row, and blocks of rows. All forms but ``memmap`` need the room of the
    exported rows on the disk twice while they are written.

    Args:
        path: the dataset's folder or URI, or an open ``Dataset``.
        out: the new folder.
        to: ``sae-lens``, a cache of SAELens in windows of ``context_size`` rows; ``safetensors``,
            one file ``hs_I.safetensors`` per request; ``memmap``, one ``.npy`` file per hook;
            ``parquet``, one file for ``datasets``.
        hooks: names of hooks; None takes all.
        phase: ``prefill`` or ``decode``; None takes both.
        where: an expression of the rows to take, as in ``actds.Loader``.
        exclude: rows to leave out, as in ``actds.Loader``.
        split: ``train`` or ``held_out``, as in ``actds.Loader``.
        held_out: the share of requests that are held out.
        dtype: type of the values; another one than float32 rounds what it cannot hold.
        context_size: ``sae-lens`` only: rows of a window; those that fill none are left out.
        i_accept_unsealed: read a dataset that is not sealed.
        i_accept_unprovenanced: read a dataset whose provenance is missing.

    Raises:
        ActdsError: E008 ``out`` exists; E009 an argument that cannot be used; E011 ``sae-lens``
            without the package ``datasets``; E014 an argument that selects nothing; E503 the disk
            is full; and as ``actds.open``.

    Spec: 0.1 section 10.3.
    """
    target = _target(to, dtype, context_size)
    dataset = path if isinstance(path, Dataset) else open_dataset(
        os.fspath(path),
        i_accept_unsealed=i_accept_unsealed,
        i_accept_unprovenanced=i_accept_unprovenanced,
    )  # fmt: skip
    selection = select(
        dataset, hooks, phase, where=where, exclude=exclude, split=split, held_out=held_out
    )
    warn_where_none(selection.excluded, [selection], stacklevel=2)
    if target.windows and selection.n_kept < context_size:
        got = f"{context_size}, of {selection.n_kept} rows"
        raise bad("context_size", got, "at most as many rows as are selected")
    with new_folder(os.fspath(out)) as folder:
        source, n_rows = _write(selection, target, dtype, context_size, folder)
        record = ExportRecord(
            actds=__version__,
            to=to,
            dataset=dataset.catalog.genesis.dataset,
            digest=dataset.digest,
            seal=dataset.seal.n if dataset.seal else None,
            hooks=[_hook(hook, target, source.dtypes) for hook in source.hooks],
            runs={run: _run(source.rows, run) for run in source.rows.runs},
            phase=phase,
            where=None if selection.filter.where is None else selection.filter.where.text,
            exclude=list(selection.excluded),
            split=split,
            held_out=held_out,
            order=ORDER,
            n_rows=n_rows,
            n_left_out=source.rows.n_rows - n_rows,
            context_size=context_size if target.windows else None,
            files=_entries(folder),
        )
        (folder / RECORD_FILE).write_text(record.model_dump_json(indent=1) + "\n", "utf-8")
    return record


def _target(to: str, dtype: str | None, context_size: int) -> Target:
    if to not in TARGETS:
        raise ActdsError("E009", "to", got=repr(to)[:80], expected=f"one of {', '.join(TARGETS)}")
    target = TARGETS[to]
    if dtype is not None and dtype not in target.dtypes:
        words = " or ".join(target.dtypes)
        raise ActdsError("E009", "dtype", got=repr(dtype)[:80], expected=f"{words} for {to}")
    if isinstance(context_size, bool) or not isinstance(context_size, int) or context_size < 1:
        got = repr(context_size)[:80]
        raise ActdsError("E009", "context_size", got=got, expected="an integer from 1")
    return target


def _write(
    selection: Selection, target: Target, dtype: str | None, context_size: int, folder: Path
) -> tuple[Source, int]:
    """Write all files but the record; return what was written and how many rows."""
    rows = order_rows(selection)
    hooks = list(selection.hooks)
    dtypes = {
        hook.name: dtype or (hook.dtype if hook.dtype in target.dtypes else target.dtypes[0])
        for hook in hooks
    }
    scratch = folder if target.in_place else folder / ".scratch"
    scratch.mkdir(exist_ok=True)
    values = {
        hook.name: lay_out(rows, hook, scratch / f"{hook.name}.npy", dtypes[hook.name])
        for hook in hooks
    }
    source = Source(rows, hooks, dtypes, values, context_size, selection.dataset.digest)
    sequence = target.write(source, folder)
    if not target.in_place:
        shutil.rmtree(scratch)
    n_rows = rows.n_rows if sequence is None else len(sequence)
    if not target.with_rows:
        write_rows(rows, n_rows, sequence, folder / ROWS_FILE)
    return source, n_rows


def _hook(hook: Hook, target: Target, dtypes: dict[str, str]) -> ExportedHook:
    return ExportedHook(
        name=hook.name,
        column=target.name(hook),
        d_model=hook.d_model,
        stored=hook.dtype,
        written=dtypes[hook.name],
    )


def _run(rows: OrderedRows, run: str) -> ExportedRun:
    record = rows.selection.dataset.runs.get(run)
    if record is None:
        return ExportedRun(record_sha256=None, fields={}, unknown=[])
    fields = {
        name: field.model_dump(mode="json")
        for name, field in record.fields.items()
        if name.startswith(_OF_RUNS)
    }
    digest = canonical.digest(schema.to_bytes(record))
    unknown = sorted(rows.unknown[run])
    return ExportedRun(record_sha256=digest, fields=fields, unknown=unknown)


def _entries(folder: Path) -> list[FileEntry]:
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        name = path.relative_to(folder).as_posix()
        found.append(FileEntry(path=name, nbytes=path.stat().st_size, sha256=sha256))
    return found
