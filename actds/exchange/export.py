"""Export: rows of a dataset as files of another library, with what they are beside them.

The rows of a request lie in several shards, shuffled. Each shard is read once, from its start to
its end, and every row is put at its place in a file on disk: memory holds the places, about 40
bytes a row, and blocks of rows, whatever the size of the dataset.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, Field

from actds.errors import ActdsError, not_installed
from actds.exchange.containers import NewTensor, write_tensors
from actds.exchange.foreign import BLOCK_NBYTES, RECORD_FILE, ROWS_FILE, narrowed
from actds.explore.dataset import ROW_NUMBERS, Dataset
from actds.explore.dataset import open as open_dataset
from actds.explore.lazy import open_array, rows_at_a_time
from actds.format import canonical, schema, tables
from actds.format.arrays import DTYPES, widen
from actds.format.roles import Roles
from actds.format.schema import FileEntry, Hook
from actds.loader.filters import bad
from actds.loader.selection import PROVENANCE_COLUMNS, Selection, select, warn_where_none
from actds.loader.where import INCLUSION, ROLE
from actds.store import file_sha256
from actds.store.folders import new_folder
from actds.store.local import LocalStore
from actds.version import __version__

Bits = npt.NDArray[Any]
_ARROW = {"float16": pa.float16(), "float32": pa.float32()}
_OF_RUNS = ("engine.", "model.", "numerics.", "capture.cast", "tokenizer.")
ORDER = "run, request, position"


@dataclass(frozen=True)
class OrderedRows:
    """The rows of a selection, by run, request and position.

    Args:
        taken: rows of each shard that are exported, ascending, ``(n,)`` each.
        places: place of each of these rows in the export.
        columns: provenance of the rows in the order of the export, ``(n_rows,)`` each; run is a
            number into ``runs``, phase one into ``PHASES``, role one into ``ROLES``, or -1.
    """

    selection: Selection
    taken: list[npt.NDArray[np.int64]]
    places: list[npt.NDArray[np.int64]]
    columns: dict[str, npt.NDArray[Any]]
    runs: list[str]
    unknown: dict[str, frozenset[str]]

    @property
    def n_rows(self) -> int:
        return len(self.columns["request"])

    def requests(self) -> npt.NDArray[np.int64]:
        """Where each request begins, and the number of rows: ``(n_requests + 1,)``."""
        run, request = self.columns["run"], self.columns["request"]
        new = np.flatnonzero((np.diff(run) != 0) | (np.diff(request.astype(np.int64)) != 0)) + 1
        return np.concatenate([[0], new, [self.n_rows]]).astype(np.int64)

    def provenance(self, start: int, stop: int) -> pa.Table:
        """Null for the rows of a run that does not say a column, as in ``Dataset.tokens``."""
        words = {"run": self.runs, "phase": list(tables.PHASES), ROLE: list(tables.ROLES)}
        run, columns = self.columns["run"][start:stop], {}
        for name, column in self.columns.items():
            values = column[start:stop]
            silent = [n for n, r in enumerate(self.runs) if name in self.unknown[r] - ROW_NUMBERS]
            mask = np.isin(run, silent) | (values == -1 if name == ROLE else False)
            columns[name] = pa.array(values, mask=mask)
            if name in words:
                coded = pa.DictionaryArray.from_arrays(columns[name], words[name])
                columns[name] = coded.dictionary_decode()
        return pa.table(columns)


def order_rows(selection: Selection) -> OrderedRows:
    """Return the rows of a selection in the order of an export."""
    runs = [run for run in selection.dataset.catalog.run_ids if run in selection.runs]
    names = ["request", "position", "token_id", "step"]
    roles = {run: selection.dataset.catalog.table("roles", run) for run in runs}
    parts: list[dict[str, npt.NDArray[Any]]] = []
    taken = []
    inclusion = selection.dataset.inclusion(selection.shards)
    for number, (shard, count) in enumerate(zip(selection.shards, selection.counts, strict=True)):
        rows = np.arange(shard.n_rows) if count is None else np.flatnonzero(count)
        table = shard.tokens(names)
        part = {name: table[name].to_numpy()[rows] for name in names}
        if inclusion is not None:
            part[INCLUSION] = inclusion[number][rows]
        part["run"] = np.full(len(rows), runs.index(shard.run), np.int32)
        part["phase"] = np.full(len(rows), tables.PHASES.index(shard.phase), np.int8)
        if any(table.num_rows for table in roles.values()):
            role = Roles(roles[shard.run]).of(part["request"], part["position"])
            code = pc.index_in(role, pa.array(tables.ROLES, pa.string()))
            part[ROLE] = pc.fill_null(code, -1).to_numpy().astype(np.int8)
        taken.append(rows)
        parts.append(part)
    joined = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = np.lexsort((joined["position"], joined["request"], joined["run"]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    names = [name for name in (*PROVENANCE_COLUMNS, ROLE, INCLUSION) if name in joined]
    columns = {name: joined.pop(name)[order] for name in names}
    ends = np.cumsum([len(rows) for rows in taken])[:-1]
    unknown = {shard.run: shard.unknown for shard in selection.shards}
    return OrderedRows(selection, taken, np.split(place, ends), columns, runs, unknown)


def lay_out(rows: OrderedRows, hook: Hook, path: Path, dtype: str) -> Bits:
    """Write the rows of a hook in the order of an export as a ``.npy`` file."""
    shape = (rows.n_rows, hook.d_model)
    # NumPy has no bfloat16: of V2 it computes nothing, where it would take uint16 for numbers;
    # view(ml_dtypes.bfloat16) makes values of both.
    kind = np.dtype("V2") if dtype == "bfloat16" else DTYPES[dtype].native
    file = np.lib.format.open_memmap(path, "w+", kind, shape)  # type: ignore[no-untyped-call]
    with path.open("rb+") as opened:
        # A mapped page that the disk has no room for would end the process.
        os.posix_fallocate(opened.fileno(), 0, path.stat().st_size)
    out: Bits = file.view(DTYPES[dtype].bits)
    for shard, taken, places in zip(rows.selection.shards, rows.taken, rows.places, strict=True):
        with open_array(shard, hook) as reader:
            step = rows_at_a_time({hook.name: reader})
            for start in range(0, shard.n_rows, step):
                low, high = np.searchsorted(taken, [start, start + step])
                if low == high:
                    continue
                block = reader.read(start, min(start + step, shard.n_rows))[taken[low:high] - start]
                out[places[low:high]] = cast(block, hook.dtype, dtype, f"{shard.name} {hook.name}")
    file.flush()
    return out


def cast(bits: Bits, stored: str, wanted: str, place: str) -> Bits:
    """Exact to float32, else rounded; E009 a finite value that the type cannot hold."""
    if wanted == stored:
        return bits
    values = widen(bits, stored)
    cast_bits, lost = narrowed(values, wanted)
    if lost.any():
        got = f"{values[lost][0]:g} in {place}, which {wanted} cannot hold"
        raise ActdsError("E009", "dtype", got=got, expected="float32, or the stored type")
    return cast_bits


def blocks(n_rows: int, row_nbytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that are held at a time, of a multiple of rows but for the last."""
    step = max(1, BLOCK_NBYTES // (row_nbytes * multiple)) * multiple
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)


@dataclass(frozen=True)
class ExportSource:
    """What is written: bit patterns by hook, ``(n_rows, d_model)``, in the types of the files."""

    rows: OrderedRows
    hooks: list[Hook]
    dtypes: dict[str, str]
    values: Mapping[str, Bits]
    context_size: int

    @property
    def digest(self) -> str:
        return self.rows.selection.dataset.digest

    def native(self, hook: Hook, start: int, stop: int) -> npt.NDArray[Any]:
        """Values of the rows ``[start, stop)``, one after the other, in NumPy's type."""
        flat = self.values[hook.name][start:stop].reshape(-1)
        return flat.view(DTYPES[self.dtypes[hook.name]].native)

    @property
    def row_nbytes(self) -> int:
        return sum(h.d_model * DTYPES[self.dtypes[h.name]].itemsize for h in self.hooks)


@dataclass(frozen=True)
class Target:
    """A form of files.

    Args:
        write: writes the files into a folder; returns the sequence of each row for the table of
            rows, None where it has none. None where the values that were laid out are the files.
        dtypes: types that it holds; the first stands for those that it does not.
        windows: whether rows are cut in windows of ``context_size``.
        with_rows: whether the files hold the provenance of their rows themselves.
    """

    write: Callable[[ExportSource, Path], npt.NDArray[np.int64] | None] | None
    dtypes: tuple[str, ...]
    name: Callable[[Hook], str] = field(default=lambda hook: hook.name)
    windows: bool = False
    with_rows: bool = False


def write_rows(rows: OrderedRows, n_rows: int, sequence: Bits | None, path: Path) -> None:
    """Row i of the table is of row i of the files."""

    def parts() -> Iterator[pa.Table]:
        for start in range(0, n_rows, 1 << 20):
            stop = min(start + (1 << 20), n_rows)
            table = rows.provenance(start, stop)
            if sequence is not None:
                table = table.append_column("sequence", pa.array(sequence[start:stop]))
            yield table

    _write_tables(path, parts())


def _write_tables(path: Path, parts: Iterator[pa.Table]) -> None:
    """Each part becomes one row group; there is at least one."""
    first = next(parts)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for part in chain([first], parts):
            writer.write_table(part, row_group_size=part.num_rows)


def _write_safetensors(source: ExportSource, folder: Path) -> npt.NDArray[np.int64]:
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


def _stacked(source: ExportSource, start: int, stop: int) -> Iterator[Bits]:
    """Rows ``[start, stop)`` of all hooks, ``(n, n_hooks, d_model)`` at a time."""
    for low, high in blocks(stop - start, source.row_nbytes):
        here = slice(start + low, start + high)
        yield np.stack([source.values[hook.name][here] for hook in source.hooks], axis=1)


def tlens_name(hook: Hook) -> str:
    """What TransformerLens, and so SAELens, calls a hook."""
    streams = ("resid_pre", "resid_mid", "resid_post")
    return f"blocks.{hook.layer}.hook_{hook.kind}" if hook.kind in streams else hook.name


def _write_sae_lens(source: ExportSource, folder: Path) -> npt.NDArray[np.int64]:
    """Write a saved Arrow dataset of windows ``(context_size, d_model)``, as SAELens caches it."""
    try:
        import datasets
    except ImportError:
        raise not_installed("datasets", "hf") from None
    size = source.context_size
    n_windows = source.rows.n_rows // size
    features: dict[str, Any] = {
        tlens_name(h): datasets.Array2D((size, h.d_model), source.dtypes[h.name])
        for h in source.hooks
    }
    tokens = not any("token_id" in names for names in source.rows.unknown.values())
    if tokens:
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=size)
    schema = datasets.Features(features).arrow_schema
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start, stop in blocks(n_windows * size, source.row_nbytes, size):
            columns = [_windows(source, hook, schema, start, stop) for hook in source.hooks]
            if tokens:
                ids = pa.array(source.rows.columns["token_id"][start:stop].astype(np.int32))
                columns.append(pa.FixedSizeListArray.from_arrays(ids, size))
            writer.write_batch(pa.record_batch(columns, schema=schema))
    info = {"citation": "", "description": "", "homepage": "", "license": ""}
    info["features"] = datasets.Features(features).to_dict()
    state: dict[str, Any] = dict.fromkeys(("_format_columns", "_format_type", "_split"))
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    state |= {"_data_files": [{"filename": name}], "_fingerprint": source.digest[:16]}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return np.arange(n_windows * size) // size


def _windows(
    source: ExportSource, hook: Hook, schema: pa.Schema, start: int, stop: int
) -> pa.Array:
    """In the storage of ``datasets``' two-dimensional arrays."""
    size, flat = source.context_size, source.native(hook, start, stop)
    inner = np.arange(0, len(flat) + 1, hook.d_model, dtype=np.int32)
    outer = np.arange(0, stop - start + 1, size, dtype=np.int32)
    rows = pa.ListArray.from_arrays(inner, pa.array(flat, _ARROW[source.dtypes[hook.name]]))
    kind = schema.field(tlens_name(hook)).type
    return pa.ExtensionArray.from_storage(kind, pa.ListArray.from_arrays(outer, rows))


def _write_parquet(source: ExportSource, folder: Path) -> None:
    (folder / "data").mkdir()

    def parts() -> Iterator[pa.Table]:
        for start, stop in blocks(source.rows.n_rows, source.row_nbytes):
            table = source.rows.provenance(start, stop)
            for hook in source.hooks:
                flat = pa.array(source.native(hook, start, stop), _ARROW[source.dtypes[hook.name]])
                column = pa.FixedSizeListArray.from_arrays(flat, hook.d_model)
                table = table.append_column(hook.name, column)
            yield table

    _write_tables(folder / "data" / "train-00000-of-00001.parquet", parts())


_ALL, _WITHOUT_BFLOAT16 = ("float32", "float16", "bfloat16"), ("float32", "float16")
TARGETS: dict[str, Target] = {
    "sae-lens": Target(_write_sae_lens, _WITHOUT_BFLOAT16, tlens_name, windows=True),
    "safetensors": Target(_write_safetensors, _ALL),
    "memmap": Target(None, _ALL),
    "parquet": Target(_write_parquet, _WITHOUT_BFLOAT16, with_rows=True),
}
"""What ``actds export --to`` knows."""


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
    drawn: bool = Field(default=False, description="whether rows.parquet has inclusions of rows")
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

    The rows are sorted by run, request and position. Beside the files is
    ``actds_export.json``, which is also what is returned, and ``rows.parquet``, whose line i says
    run, request, position, token_id, phase and step of row i (``parquet`` has these columns
    itself), ``role`` where there are roles, and ``inclusion`` where rows were drawn, each with that
    probability. The folder appears whole or not at all. Files hold the stored values exactly; where
    a form has no bfloat16 (``sae-lens``, ``parquet``), as float32.

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
    if not isinstance(path, Dataset):
        path = open_dataset(
            os.fspath(path),
            i_accept_unsealed=i_accept_unsealed,
            i_accept_unprovenanced=i_accept_unprovenanced,
        )
    selection = select(
        path, hooks, phase, where=where, exclude=exclude, split=split, held_out=held_out
    )
    warn_where_none(selection.excluded, [selection], stacklevel=2)
    if target.windows and selection.n_kept < context_size:
        got = f"{context_size}, of {selection.n_kept} rows"
        raise bad("context_size", got, "at most as many rows as are selected")
    with new_folder(os.fspath(out)) as folder:
        source, n_rows = _write(selection, target, dtype, context_size, folder)
        chosen = {"to": to, "phase": phase, "split": split, "held_out": held_out}
        store = LocalStore(folder)
        files = [
            FileEntry(path=path, nbytes=store.size(path), sha256=file_sha256(store, path))
            for path in store.list()
        ]
        record = _record(source, target, n_rows, files, chosen)
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
) -> tuple[ExportSource, int]:
    rows = order_rows(selection)
    hooks = list(selection.hooks)
    dtypes = {
        hook.name: dtype or (hook.dtype if hook.dtype in target.dtypes else target.dtypes[0])
        for hook in hooks
    }
    scratch = folder if target.write is None else folder / ".scratch"
    scratch.mkdir(exist_ok=True)
    values = {
        hook.name: lay_out(rows, hook, scratch / f"{hook.name}.npy", dtypes[hook.name])
        for hook in hooks
    }
    source = ExportSource(rows, hooks, dtypes, values, context_size)
    sequence = None
    if target.write is not None:
        sequence = target.write(source, folder)
        shutil.rmtree(scratch)
    n_rows = rows.n_rows if sequence is None else len(sequence)
    if not target.with_rows:
        write_rows(rows, n_rows, sequence, folder / ROWS_FILE)
    return source, n_rows


def _record(
    source: ExportSource,
    target: Target,
    n_rows: int,
    files: list[FileEntry],
    chosen: dict[str, Any],
) -> ExportRecord:
    """What was written, beside the arguments of ``export`` that chose it."""
    selection = source.rows.selection
    dataset, where = selection.dataset, selection.filter.where
    return ExportRecord(
        actds=__version__,
        dataset=dataset.catalog.genesis.dataset,
        digest=source.digest,
        seal=dataset.seal.n if dataset.seal else None,
        hooks=[
            ExportedHook(
                name=hook.name,
                column=target.name(hook),
                d_model=hook.d_model,
                stored=hook.dtype,
                written=source.dtypes[hook.name],
            )
            for hook in source.hooks
        ],
        runs={run: _run(source.rows, run) for run in source.rows.runs},
        where=None if where is None else where.text,
        exclude=list(selection.excluded),
        order=ORDER,
        n_rows=n_rows,
        n_left_out=source.rows.n_rows - n_rows,
        context_size=source.context_size if target.windows else None,
        drawn=INCLUSION in source.rows.columns,
        files=files,
        **chosen,
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
