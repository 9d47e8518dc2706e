"""Readouts: every computed row has them, no other has, and they are those of the stored row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format import canonical, layout, tables
from actds.format.arrays import as_ml_dtypes
from actds.format.readouts import Readouts, compute, load_probes, matrix, readouts_of
from actds.format.shard import TOKENS
from actds_validators.validate.inventory import Inventory
from actds_validators.validate.readout_tokens import check_tokens, keys_of

TOLERANCE = 1e-4
"""Of the row's norm times the direction's: far above rounding in float32, far below what another
row would give."""

Ints = npt.NDArray[np.int64]
KEYS = ["request", "position", "step"]
TOKEN = "token_id"
VALUES = ["norm", "projections", "probes"]


class HookReadouts:
    """The readouts of one hook of a run, found by request, position and step.

    Args:
        table: their rows, at least the key columns and the tokens.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        key = keys_of(table)
        step = table["step"].to_numpy().astype(np.int64)
        self._order = np.lexsort((step, key))
        self._key, self._step = key[self._order], step[self._order]

    @property
    def first_twin(self) -> dict[str, int] | None:
        """Return the key of a row that stands twice, ``None`` when all are different."""
        twin = (self._key[1:] == self._key[:-1]) & (self._step[1:] == self._step[:-1])
        found = np.flatnonzero(twin)
        return self.key_at(int(self._order[found[0]])) if len(found) else None

    def key_at(self, row: int) -> dict[str, int]:
        """Return request, position and step of a row."""
        return {name: int(self.table[name][row].as_py()) for name in KEYS}

    def find(self, table: pa.Table) -> Ints:
        """Return the row of each key, -1 where there is none.

        Args:
            table: columns request, position and step.
        """
        key = keys_of(table)
        step = table["step"].to_numpy().astype(np.int64)
        first = np.searchsorted(self._key, key, "left")
        last = np.searchsorted(self._key, key, "right")
        found = np.full(len(key), -1, np.int64)
        # A position was computed more than once only after a preemption.
        for attempt in range(int((last - first).max(initial=0))):
            at = np.minimum(first + attempt, len(self._key) - 1)
            hit = (first + attempt < last) & (self._step[at] == step)
            found[hit] = self._order[at[hit]]
        return found

    def values(self, rows: Ints) -> npt.NDArray[np.float32]:
        """Return the readouts of rows, float32 ``(n, width)``."""
        taken = self.table.take(pa.array(rows))
        parts = [taken["norm"].to_numpy()[:, None]]
        for name in VALUES[1:]:
            flat = taken[name].combine_chunks().flatten().to_numpy()
            parts.append(flat.reshape(len(rows), -1) if len(rows) else flat.reshape(0, 0))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class RunReadouts:
    """The readouts of a run.

    Args:
        hooks: by hook.
        packed: matrix of each hook ``(d_model, width - 1)``; empty when values are not wanted.
    """

    hooks: dict[str, HookReadouts]
    packed: dict[str, npt.NDArray[np.float32]]


def check_readouts(inventory: Inventory, *, values: bool) -> dict[str, RunReadouts]:
    """Check row set and tokens of the readouts of every run; notes E416, E417.

    Args:
        inventory: the dataset.
        values: whether the values will be compared with the rows.

    Returns:
        The readouts by run, of those runs that have any and whose tables can be read.

    Spec: 0.1 section 7.8.
    """
    found: dict[str, RunReadouts] = {}
    for run, record in sorted(inventory.runs.items()):
        if run in inventory.incomplete or run not in inventory.runs_with_data:
            continue
        place = f"{layout.run_path(run)} capture.readouts"
        with inventory.noting("accounting"):
            readouts = readouts_of(record)
            parts = inventory.parts.get((run, "readouts"), [])
            if readouts is None:
                if parts:
                    inventory.add("accounting", "E416", place, "none", "the readouts there are")
                continue
            found[run] = _read(inventory, run, readouts, values=values)
            _check_rows_covered(inventory, run, found[run])
            _check_losses_covered(inventory, run, found[run])
            _check_computed(inventory, run, found[run])
            check_tokens(inventory, run, found[run].hooks)
    return found


def compare(
    inventory: Inventory,
    mine: RunReadouts,
    hook: str,
    tokens: pa.Table,
    bits: npt.NDArray[Any],
    dtype: str,
    place: str,
) -> None:
    """Compare the readouts of stored rows with those computed again; notes E417.

    Args:
        inventory: the dataset.
        mine: the readouts of the rows' run.
        hook: the rows' hook.
        tokens: their token rows, in the same order.
        bits: their bit patterns ``(n, d_model)``.
        dtype: type of the values.
        place: what a finding names.
    """
    where = mine.hooks[hook].find(tokens)
    there = np.flatnonzero(where >= 0)  # those without are E416 already
    rows = as_ml_dtypes(bits[there], dtype).astype(np.float32)
    finite = np.isfinite(rows).all(axis=1)
    there, rows = there[finite], rows[finite]
    stored = mine.hooks[hook].values(where[there])
    packed = mine.packed[hook]
    want = compute(rows, packed)
    scale = np.concatenate([[1.0], np.linalg.norm(packed, axis=0)])
    allowed = TOLERANCE * want[:, :1] * scale + np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~(np.abs(stored - want) <= allowed).all(axis=1))
    # A row whose squares overflow float32 has no finite norm to compare.
    wrong = wrong[np.isfinite(want[wrong]).all(axis=1)]
    if not len(wrong):
        return
    row = int(wrong[0])
    column = int(np.argmax(np.abs(stored[row] - want[row]) / scale))
    key = {name: tokens[name][int(there[row])].as_py() for name in ("request", "position")}
    inventory.add(
        "values",
        "E417",
        f"{place} request {key['request']} position {key['position']} readout {column} "
        f"(and {len(wrong) - 1} more rows)",
        f"{stored[row, column]:.6g}",
        f"{want[row, column]:.6g}, computed from the row",
    )


def _read(inventory: Inventory, run: str, readouts: Readouts, *, values: bool) -> RunReadouts:
    columns = [*KEYS, TOKEN, "hook", *(VALUES if values else [])]
    parts = [tables.empty("readouts").select(columns)]
    for _, body in inventory.parts.get((run, "readouts"), []):
        path = body.file.path
        part = tables.from_parquet("readouts", inventory.read(path), path, columns)
        if part.num_rows != body.n_rows:
            inventory.add("integrity", "E203", path, f"{part.num_rows} rows", f"{body.n_rows} rows")
        parts.append(part)
    table = pa.concat_tables(parts)
    hooks = {hook.name: hook for hook in inventory.genesis.hooks}
    unknown = sorted(set(pc.unique(table["hook"]).to_pylist()) - set(hooks))
    if unknown:
        inventory.add("accounting", "E416", f"readouts/{run}", f"hook {unknown[0]}", "a known hook")
    packed = _matrices(inventory, run, readouts) if values else {}
    by_hook = {
        name: HookReadouts(table.filter(pc.equal(table["hook"], name)).drop(["hook"]))
        for name in hooks
    }
    return RunReadouts(by_hook, packed)


def _matrices(
    inventory: Inventory, run: str, readouts: Readouts
) -> dict[str, npt.NDArray[np.float32]]:
    hooks = inventory.genesis.hooks
    probes = None
    if readouts.n_probes:
        path = layout.probes_path(run)
        data = inventory.store.read(path)
        got = canonical.digest(data)
        if got != readouts.probes_sha256:
            raise ActdsError(
                "E202", path, got=f"sha256 {got}", expected=str(readouts.probes_sha256)
            )
        widths = sorted({hook.d_model for hook in hooks})
        if len(widths) > 1:  # one array holds the probes of all hooks
            got = f"probes, and hooks of {', '.join(map(str, widths))} channels"
            raise ActdsError("E103", path, got=got, expected="hooks of one width, or no probes")
        probes = load_probes(data, path, (len(hooks), readouts.n_probes, widths[0]))
    return {
        hook.name: matrix(readouts, None if probes is None else probes[[n]], 1, hook.d_model)[0]
        for n, hook in enumerate(hooks)
    }


def _check_rows_covered(inventory: Inventory, run: str, mine: RunReadouts) -> None:
    """Every stored row has its readouts, at every hook, from the step that computed it."""
    for manifest in inventory.shards:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if manifest.run != run or path in inventory.unsound:
            continue
        tokens = tables.from_parquet("tokens", inventory.read(path), path, KEYS)
        for hook in manifest.hooks:
            missing = np.flatnonzero(mine.hooks[hook].find(tokens) < 0)
            _note_missing(inventory, f"readouts/{run} {hook}", tokens, missing, path)


def _check_losses_covered(inventory: Inventory, run: str, mine: RunReadouts) -> None:
    """Every row that an overflow policy gave up left its readouts behind."""
    parts = [tables.empty("drops")]
    for _, body in inventory.parts.get((run, "drops"), []):
        path = body.file.path
        if path in inventory.unsound:
            return
        parts.append(tables.from_parquet("drops", inventory.read(path), path))
    drops = pa.concat_tables(parts)
    start, stop = (drops[name].to_numpy().astype(np.int64) for name in ("start", "stop"))
    length = stop - start
    if not len(length) or (length < 0).any():
        return
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    lost = pa.table(
        {
            "request": np.repeat(drops["request"].to_numpy(), length),
            "position": np.repeat(start, length) + within,
            "step": np.repeat(drops["step"].to_numpy(), length),
        }
    )
    for hook, readouts in mine.hooks.items():
        missing = np.flatnonzero(readouts.find(lost) < 0)
        _note_missing(inventory, f"readouts/{run} {hook}", lost, missing, f"losses/{run}")


def _check_computed(inventory: Inventory, run: str, mine: RunReadouts) -> None:
    """No readout stands twice, or belongs to a step or a position that nobody computed."""
    steps_read = inventory.sound_table(run, "steps")
    spans_read = inventory.sound_table(run, "spans")
    if steps_read is None or spans_read is None:
        return
    steps = steps_read["step"].to_numpy()
    spans = spans_read.filter(pc.is_valid(spans_read["step"]))
    request = spans["request"].to_numpy().astype(np.int64)
    computed = np.zeros(int(request.max(initial=-1)) + 1, np.int64)
    np.maximum.at(computed, request, spans["stop"].to_numpy().astype(np.int64))
    for hook, readouts in mine.hooks.items():
        place = f"readouts/{run} {hook}"
        twin = readouts.first_twin
        if twin is not None:
            inventory.add("accounting", "E416", place, f"{_words(twin)} twice", "it once")
        table = readouts.table
        who = table["request"].to_numpy().astype(np.int64)
        known = who < len(computed)
        limit = np.where(known, computed[np.where(known, who, 0)] if len(computed) else 0, 0)
        odd = table["position"].to_numpy() >= limit
        odd |= ~np.isin(table["step"].to_numpy(), steps)
        where = np.flatnonzero(odd)
        if len(where):
            key = _words(readouts.key_at(int(where[0])))
            got = f"{key} and {len(where) - 1} more"
            inventory.add(
                "accounting", "E416", place, got, "rows that the census says were computed"
            )


def _note_missing(
    inventory: Inventory, place: str, wanted: pa.Table, missing: Ints, whose: str
) -> None:
    if not len(missing):
        return
    key = {name: wanted[name][int(missing[0])].as_py() for name in KEYS}
    got = f"none for {_words(key)} and {len(missing) - 1} more"
    inventory.add("accounting", "E416", place, got, f"one for every row of {whose}")


def _words(key: dict[str, int]) -> str:
    return f"request {key['request']} position {key['position']} step {key['step']}"
