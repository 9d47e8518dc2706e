"""Export: rows of a dataset as files of another library, with what they are beside them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from actds import canonical, schema
from actds.errors import ActdsError
from actds.exchange.formats import ROWS_FILE, TARGETS, Source, Target, write_rows
from actds.exchange.rows import ORDER, OrderedRows, lay_out, order_rows
from actds.load.dataset import Dataset
from actds.load.dataset import open as open_dataset
from actds.load.filters import bad
from actds.load.selection import Selection, select, warn_where_none
from actds.schema import FileEntry, Hook
from actds.store.folders import new_folder
from actds.version import __version__

__all__ = ["RECORD_FILE", "ExportRecord", "ExportedHook", "ExportedRun", "export"]

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
    warn_where_none(selection.excluded, stacklevel=2)
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
