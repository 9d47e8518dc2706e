"""The rows of an export: their one order, their provenance, and their values laid out in it.

The rows of a request lie in several shards, shuffled. Each shard is read once, from its start to
its end, and every row is put at its place in a file on disk: memory holds the places, about 40
bytes a row, and blocks of rows, whatever the size of the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.explore.dataset import ROW_NUMBERS
from actds.explore.lazy import open_array, rows_at_a_time
from actds.format import tables
from actds.format.arrays import DTYPES, widen
from actds.format.roles import Roles
from actds.format.schema import Hook
from actds.loader.selection import PROVENANCE_COLUMNS, ROLE, Selection

Bits = npt.NDArray[Any]
ORDER = "run, request, position"
BLOCK_NBYTES = 1 << 26
"""Bytes of rows that are held at a time."""


@dataclass(frozen=True)
class OrderedRows:
    """The rows of a selection, by run, request and position.

    Args:
        selection: the selection.
        taken: rows of each shard that are exported, ascending, ``(n,)`` each.
        places: place of each of these rows in the export.
        columns: provenance of the rows in the order of the export, ``(n_rows,)`` each; run is a
            number into ``runs``, phase one into ``PHASES``, role one into ``ROLES``, or -1.
        runs: the runs, in the order in which they began.
        unknown: columns of which nothing is known, by run.
    """

    selection: Selection
    taken: list[npt.NDArray[np.int64]]
    places: list[npt.NDArray[np.int64]]
    columns: dict[str, npt.NDArray[Any]]
    runs: list[str]
    unknown: dict[str, frozenset[str]]

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return len(self.columns["request"])

    def requests(self) -> npt.NDArray[np.int64]:
        """Return where each request begins, and the number of rows: ``(n_requests + 1,)``."""
        run, request = self.columns["run"], self.columns["request"]
        new = np.flatnonzero((np.diff(run) != 0) | (np.diff(request.astype(np.int64)) != 0)) + 1
        return np.concatenate([[0], new, [self.n_rows]]).astype(np.int64)

    def provenance(self, start: int, stop: int) -> pa.Table:
        """Return run, request, position, token_id, phase and step of the rows ``[start, stop)``.

        The role follows where a run has any, null where it is not known. Columns are null for the
        rows of a run that does not say them, as in ``Dataset.tokens``.
        """
        here = {name: column[start:stop] for name, column in self.columns.items()}
        found: dict[str, pa.Array] = {}
        for name, values in here.items():
            silent = [
                n for n, run in enumerate(self.runs) if name in self.unknown[run] - ROW_NUMBERS
            ]
            mask = np.isin(here["run"], silent) | (values == -1 if name == ROLE else False)
            words = {
                "run": self.runs, "phase": list(tables.PHASES), ROLE: list(tables.ROLES)
            }.get(name)  # fmt: skip
            array = pa.array(values, mask=mask)
            if words is not None:
                array = pa.DictionaryArray.from_arrays(array, words).dictionary_decode()
            found[name] = array
        return pa.table(found)


def order_rows(selection: Selection) -> OrderedRows:
    """Return the rows of a selection in the order of an export.

    Raises:
        ActdsError: as ``Shard.tokens``.
    """
    runs = [run for run in selection.dataset.catalog.run_ids if run in selection.runs]
    names = ["request", "position", "token_id", "step"]
    roles = {run: selection.dataset.catalog.table("roles", run) for run in runs}
    parts: list[dict[str, npt.NDArray[Any]]] = []
    taken = []
    for shard, count in zip(selection.shards, selection.counts, strict=True):
        rows = np.arange(shard.n_rows) if count is None else np.flatnonzero(count)
        table = shard.tokens(names)
        part = {name: table[name].to_numpy()[rows] for name in names}
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
    names = [name for name in (*PROVENANCE_COLUMNS, ROLE) if name in joined]
    columns = {name: joined.pop(name)[order] for name in names}
    ends = np.cumsum([len(rows) for rows in taken])[:-1]
    unknown = {shard.run: shard.unknown for shard in selection.shards}
    return OrderedRows(selection, taken, np.split(place, ends), columns, runs, unknown)


def _file_type(dtype: str) -> np.dtype[Any]:
    """Return the type of values in a ``.npy`` file; bfloat16 are two bytes that NumPy leaves alone.

    NumPy has no bfloat16. Of ``V2`` it computes nothing, where it would take ``uint16`` for
    numbers: ``view(ml_dtypes.bfloat16)`` makes values of both.
    """
    return np.dtype("V2") if dtype == "bfloat16" else DTYPES[dtype].native


def lay_out(rows: OrderedRows, hook: Hook, path: Path, dtype: str) -> Bits:
    """Write the rows of a hook in the order of an export as a ``.npy`` file.

    Args:
        rows: the rows.
        hook: the hook.
        path: the new file.
        dtype: type of the values in it.

    Returns:
        The bit patterns ``(n_rows, d_model)`` that are in the file, mapped.

    Raises:
        ActdsError: E009 a value that ``dtype`` cannot hold; as reading a hook.
        OSError: the disk is full.
    """
    shape = (rows.n_rows, hook.d_model)
    file = np.lib.format.open_memmap(path, "w+", _file_type(dtype), shape)  # type: ignore[no-untyped-call]
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
                block = reader.read(start, min(start + step, shard.n_rows))
                block = block[taken[low:high] - start]
                out[places[low:high]] = cast(block, hook.dtype, dtype, f"{shard.name} {hook.name}")
    file.flush()
    return out


def cast(bits: Bits, stored: str, wanted: str, place: str) -> Bits:
    """Return rows in another type: exact to float32, else rounded to the nearest value.

    Raises:
        ActdsError: E009 a finite value that the type cannot hold.
    """
    if wanted == stored:
        return bits
    values = widen(bits, stored)
    with np.errstate(over="ignore"):
        narrow = values.astype(DTYPES[wanted].native)
    lost = np.isfinite(values) & ~np.isfinite(narrow.astype(np.float32))
    if lost.any():
        got = f"{values[lost][0]:g} in {place}, which {wanted} cannot hold"
        raise ActdsError("E009", "dtype", got=got, expected="float32, or the stored type")
    cast_bits: Bits = narrow.view(DTYPES[wanted].bits)
    return cast_bits


def blocks(n_rows: int, row_nbytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that are held at a time, of a multiple of rows but for the last."""
    step = max(1, BLOCK_NBYTES // (row_nbytes * multiple)) * multiple
    for start in range(0, n_rows, step):
        yield start, min(start + step, n_rows)
