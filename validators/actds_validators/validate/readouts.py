"""Readouts: that every computed row has them, no other has, and they are those of the row.

Row set and tokens are compared with census and shards at every level that reads tables; the values
with those computed again from the rows, where the rows are decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.columns import MAX_FINDINGS_PER_CODE
from actds.errors import ActdsError, Findings
from actds.format import arrays, tables
from actds.format.positions import Index, Keys, position_key, split_key
from actds.format.readouts import Readouts, compute, load_probes, matrix, readouts_of
from actds.format.schema import Hook
from actds.format.shard import TOKENS
from actds.store import layout

Ints = npt.NDArray[np.int64]
TOLERANCE = 1e-4
"""Of the row's norm times the direction's: far above rounding in float32, far below what another
row would give."""

_MAX_MATRIX = 1 << 24
_Tokens = tuple[Keys, Ints]
"""Keys of positions, and the token of each."""
KEYS = ["request", "position", "step"]
TOKEN = "token_id"
VALUES = ["norm", "projections", "probes"]


def sound_tables(catalog: Catalog, run: str, *names: tables.TableName) -> list[pa.Table]:
    """Return tables of a run; none where one is unsound, or what it should hold is not known."""
    if run in catalog.incomplete:
        return []
    read = [catalog.sound_table(run, name) for name in names]
    sound = [table for table in read if table is not None]
    return sound if len(sound) == len(names) else []


def read_parts(catalog: Catalog, run: str, name: tables.TableName, columns: list[str]) -> pa.Table:
    """Return columns of a table; notes E203 for a part of another length than was committed."""
    parts = [tables.empty(name).select(columns)]
    for body in catalog.parts.get((run, name), []):
        path = body.file.path
        part = catalog.read_table(name, path, columns)
        check_n_rows(catalog, path, part.num_rows, body.n_rows)
        parts.append(part)
    return pa.concat_tables(parts)


def check_n_rows(catalog: Catalog, path: str, got: int, expected: int) -> None:
    if got != expected:
        catalog.findings.add("integrity", "E203", path, f"{got} rows", f"{expected} rows")


class HookReadouts:
    """The readouts of one hook of a run, found by request, position and step."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        key = keys_of(table)
        step = table["step"].to_numpy().astype(np.int64)
        self._order = np.lexsort((step, key))
        self._key, self._step = key[self._order], step[self._order]

    @property
    def first_twin(self) -> dict[str, int] | None:
        twin = (self._key[1:] == self._key[:-1]) & (self._step[1:] == self._step[:-1])
        repeated = np.flatnonzero(twin)
        return self.key_at(int(self._order[repeated[0]])) if len(repeated) else None

    def key_at(self, row: int) -> dict[str, int]:
        return {name: int(self.table[name][row].as_py()) for name in KEYS}

    def find(self, table: pa.Table) -> Ints:
        """Return the row of each key, -1 where there is none."""
        key = keys_of(table)
        step = table["step"].to_numpy().astype(np.int64)
        first = np.searchsorted(self._key, key, "left")
        last = np.searchsorted(self._key, key, "right")
        rows = np.full(len(key), -1, np.int64)
        # A position was computed more than once only after a preemption.
        for attempt in range(int((last - first).max(initial=0))):
            at = np.minimum(first + attempt, len(self._key) - 1)
            hit = (first + attempt < last) & (self._step[at] == step)
            rows[hit] = self._order[at[hit]]
        return rows

    def of_rows(self, tokens: pa.Table) -> HookReadouts:
        rows = self.find(tokens)
        return HookReadouts(self.table.take(pa.array(rows[rows >= 0])))

    def values(self, rows: Ints) -> npt.NDArray[np.float32]:
        taken = self.table.take(pa.array(rows))
        parts = [taken["norm"].to_numpy()[:, None]]
        for name in VALUES[1:]:
            flat = taken[name].combine_chunks().flatten().to_numpy()
            parts.append(flat.reshape(len(rows), -1) if len(rows) else flat.reshape(0, 0))
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class RunReadouts:
    """The readouts of a run.

    ``probes`` of each hook are ``(n_probes, d_model)``; none where values are not wanted.
    """

    hooks: dict[str, HookReadouts]
    readouts: Readouts
    probes: dict[str, npt.NDArray[np.float32]]

    def of_rows(self, tokens: pa.Table, hooks: Iterable[str]) -> RunReadouts:
        return replace(self, hooks={name: self.hooks[name].of_rows(tokens) for name in hooks})

    def packed(self, hook: str, d_model: int) -> npt.NDArray[np.float32]:
        """Return the matrix of a hook ``(d_model, width - 1)``; the last one is kept."""
        if hook not in self._packed:
            self._packed.clear()
            probes = self.probes.get(hook)
            of_hook = None if probes is None else probes[None]
            self._packed[hook] = matrix(self.readouts, of_hook, 1, d_model)[0]
        return self._packed[hook]

    @cached_property
    def _packed(self) -> dict[str, npt.NDArray[np.float32]]:
        return {}


def check_readouts(catalog: Catalog, *, values: bool) -> dict[str, RunReadouts]:
    """Check row set and tokens of the readouts of every run; notes E416, E417.

    Returns:
        The readouts by run, of those runs that have any and whose tables can be read.

    Spec: 0.1 section 7.8.
    """
    by_run: dict[str, RunReadouts] = {}
    for run in sorted(catalog.runs.keys() & set(catalog.runs_with_data)):
        record = catalog.runs[run]
        if run in catalog.incomplete:
            continue
        place = f"{layout.run_path(run)} capture.readouts"
        with catalog.findings.noting("accounting"):
            readouts = readouts_of(record)
            parts = catalog.parts.get((run, "readouts"), [])
            if readouts is None:
                if parts:
                    expected = "the readouts there are"
                    catalog.findings.add("accounting", "E416", place, "none", expected)
                continue
            by_run[run] = _read_readouts(catalog, run, readouts, values=values)
            known = _check_rows_covered(catalog, run, by_run[run])
            _check_losses_covered(catalog, run, by_run[run])
            _check_thinned_covered(catalog, run, by_run[run])
            _check_computed(catalog, run, by_run[run])
            _check_tokens(catalog, run, by_run[run].hooks, known)
    return by_run


def compare(
    findings: Findings,
    of_run: RunReadouts,
    hook: str,
    tokens: pa.Table,
    bits: npt.NDArray[Any],
    dtype: str,
    place: str,
) -> None:
    """Compare readouts of rows, bits ``(n, d_model)``, with those computed again; notes E417."""
    where = of_run.hooks[hook].find(tokens)
    known = np.flatnonzero(where >= 0)  # those without are E416 already
    rows = arrays.as_ml_dtypes(bits[known], dtype).astype(np.float32)
    finite = np.isfinite(rows).all(axis=1)
    known, rows = known[finite], rows[finite]
    stored = of_run.hooks[hook].values(where[known])
    packed = of_run.packed(hook, bits.shape[1])
    want = compute(rows, packed)
    scale = np.concatenate([[1.0], np.linalg.norm(packed, axis=0)])
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))[:, None]
    # Squares and products that are too small for float32 are lost, or not, as the machine has it.
    lost = bits.shape[1] * float(np.finfo(np.float32).tiny)
    allowed = TOLERANCE * norms * scale + lost * (1 + scale)
    allowed[:, 0] += lost**0.5
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~(np.abs(stored - want) <= allowed).all(axis=1))
    # A row whose squares overflow float32 has no finite norm to compare.
    wrong = wrong[np.isfinite(want[wrong]).all(axis=1)]
    if not len(wrong):
        return
    row = int(wrong[0])
    column = int(np.argmax(np.abs(stored[row] - want[row]) / scale))
    key = {name: tokens[name][int(known[row])].as_py() for name in ("request", "position")}
    row_place = f"{place} request {key['request']} position {key['position']} readout {column}"
    place = f"{row_place} (and {len(wrong) - 1} more rows)"
    got, expected = f"{stored[row, column]:.6g}", f"{want[row, column]:.6g}, computed from the row"
    findings.add("values", "E417", place, got, expected)


def _read_readouts(catalog: Catalog, run: str, readouts: Readouts, *, values: bool) -> RunReadouts:
    columns = [*KEYS, TOKEN, "hook", *(VALUES if values else [])]
    table = read_parts(catalog, run, "readouts", columns)
    hooks = {hook.name: hook for hook in catalog.genesis.hooks}
    unknown = sorted(set(pc.unique(table["hook"]).to_pylist()) - set(hooks))
    if unknown:
        got, expected = f"hook {unknown[0]}", "a known hook"
        catalog.findings.add("accounting", "E416", f"readouts/{run}", got, expected)
    if values:
        _check_widths(run, readouts, hooks.values(), table)
    probes = _probes(catalog, run, readouts) if values else {}
    code = pc.index_in(table["hook"], pa.array(list(hooks))).fill_null(len(hooks)).to_numpy()
    # Not a filter for each hook: each would read the lines of all.
    order = np.argsort(code, kind="stable")
    edges = np.searchsorted(code[order], np.arange(len(hooks) + 1))
    table = table.drop(["hook"])
    by_hook = {
        name: HookReadouts(table.take(pa.array(order[edges[n] : edges[n + 1]])))
        for n, name in enumerate(hooks)
    }
    return RunReadouts(by_hook, readouts, probes)


def _check_widths(run: str, readouts: Readouts, hooks: Iterable[Hook], table: pa.Table) -> None:
    """Check how many numbers a line has, before a matrix of so many columns is made."""
    widest = max(hook.d_model for hook in hooks)
    if widest * readouts.width > _MAX_MATRIX:
        got = f"{readouts.width} numbers for rows of {widest} channels"
        place = f"{layout.run_path(run)} capture.readouts"
        raise ActdsError("E103", place, got=got, expected=f"a product of at most {_MAX_MATRIX}")
    for name, n in zip(VALUES[1:], (readouts.n_projections, readouts.n_probes), strict=True):
        odd = pc.unique(pc.list_value_length(table[name])).to_pylist()
        if set(odd) - {n}:
            place, got = f"readouts/{run} {name}", f"{(set(odd) - {n}).pop()} numbers in a line"
            raise ActdsError("E109", place, got=got, expected=str(n))


def _probes(catalog: Catalog, run: str, readouts: Readouts) -> dict[str, npt.NDArray[np.float32]]:
    if not readouts.n_probes:
        return {}
    hooks, path = catalog.genesis.hooks, layout.probes_path(run)
    shape = (len(hooks), readouts.n_probes, hooks[0].d_model)
    probes = load_probes(catalog.file(path), path, shape)
    return {hook.name: probes[n] for n, hook in enumerate(hooks)}


def _check_rows_covered(catalog: Catalog, run: str, of_run: RunReadouts) -> _Tokens:
    """Every stored row has its readouts, at every hook, from the step that computed it."""
    known: list[_Tokens] = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
    for manifest in catalog.shards_by_run[run]:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if path in catalog.unsound:
            continue
        tokens = catalog.read_table("tokens", path, [*KEYS, TOKEN])
        known.append(_tokens(tokens))
        for hook in manifest.hooks:
            missing = np.flatnonzero(of_run.hooks[hook].find(tokens) < 0)
            _note_missing(catalog, f"readouts/{run} {hook}", tokens, missing, path)
    return _joined(known)


def _check_losses_covered(catalog: Catalog, run: str, of_run: RunReadouts) -> None:
    """Every row that an overflow policy gave up left its readouts, but for those without room."""
    drops = catalog.sound_table(run, "drops")
    if drops is None:
        return
    drops = _kept(catalog, run, drops)
    unread = pc.equal(drops["drop_reason"], tables.READOUTS_FULL)
    _check_unread(catalog, run, of_run, drops.filter(unread))
    free = pc.is_in(drops["drop_reason"], pa.array([tables.READOUTS_FULL, tables.FAILED_LOAD]))
    drops = drops.filter(pc.invert(free))
    lost = _positions(catalog, run, of_run, drops)
    if lost is None:
        return
    for hook, readouts in of_run.hooks.items():
        missing = np.flatnonzero(readouts.find(lost) < 0)
        _note_missing(catalog, f"readouts/{run} {hook}", lost, missing, f"losses/{run}")


def _check_thinned_covered(catalog: Catalog, run: str, of_run: RunReadouts) -> None:
    """Every position that was not drawn left its readouts, unless its run was cut off."""
    chains = [chain for chain in catalog.chains.values() if chain.run == run]
    if any(chain.close is None or chain.close.reason != "finished" for chain in chains):
        return
    spans = catalog.sound_table(run, "spans")
    if spans is None:
        return
    thinned = spans.filter(pc.equal(spans["disposition"], "thinned"))
    lost = _positions(catalog, run, of_run, _kept(catalog, run, thinned))
    if lost is None:
        return
    key = keys_of(lost)
    for hook, readouts in of_run.hooks.items():
        missing = np.flatnonzero(~np.isin(key, keys_of(readouts.table)))
        _note_missing(catalog, f"readouts/{run} {hook}", lost, missing, f"census/{run}/spans")


def _kept(catalog: Catalog, run: str, ranges: pa.Table) -> pa.Table:
    """Return the ranges of requests that were not redacted."""
    redacted = pa.array(sorted(catalog.redacted(run)), pa.uint32())
    return ranges.filter(pc.invert(pc.is_in(ranges["request"], redacted)))


def _positions(
    catalog: Catalog, run: str, of_run: RunReadouts, ranges: pa.Table
) -> pa.Table | None:
    """Return the positions of ranges, with the step of each range; ``None`` for none.

    Notes E416 where they are more than there are readouts.
    """
    start, stop = (ranges[name].to_numpy().astype(np.int64) for name in ("start", "stop"))
    length = stop - start
    if not len(length) or (length < 0).any():
        return None
    n_lines = max((readouts.table.num_rows for readouts in of_run.hooks.values()), default=0)
    if int(length.sum()) > n_lines:  # before as many keys are made: a range can claim 2^32
        got, expected = f"{n_lines} lines of a hook", f"one for each of {length.sum()} positions"
        catalog.findings.add("accounting", "E416", f"readouts/{run}", got, expected)
        return None
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return pa.table(
        {
            "request": np.repeat(ranges["request"].to_numpy(), length),
            "position": np.repeat(start, length) + within,
            "step": np.repeat(ranges["step"].to_numpy(), length),
        }
    )


def _check_unread(catalog: Catalog, run: str, of_run: RunReadouts, drops: pa.Table) -> None:
    """No drop says that there was no room for readouts which are there."""
    start, stop = (drops[name].to_numpy().astype(np.int64) for name in ("start", "stop"))
    if not len(start) or (stop < start).any():
        return
    key = position_key(drops["request"].to_numpy(), start)
    order = np.argsort(key, kind="stable")
    end, step = (key + (stop - start).astype(np.uint64))[order], drops["step"].to_numpy()[order]
    key = key[order]
    for hook, readouts in of_run.hooks.items():
        lines = keys_of(readouts.table)
        at = np.searchsorted(key, lines, "right") - 1
        inside = (at >= 0) & (lines < end[at]) & (readouts.table["step"].to_numpy() == step[at])
        if inside.any():
            got = _words(readouts.key_at(int(np.flatnonzero(inside)[0])))
            expected = f"none of a drop with the reason {tables.READOUTS_FULL}"
            catalog.findings.add("accounting", "E416", f"readouts/{run} {hook}", got, expected)


def _check_computed(catalog: Catalog, run: str, of_run: RunReadouts) -> None:
    """No readout stands twice, or belongs to a step or a position that nobody computed."""
    read = sound_tables(catalog, run, "steps", "spans")
    if not read:
        return
    steps = read[0]["step"].to_numpy()
    spans = read[1].filter(pc.is_valid(read[1]["step"]))
    request, number = np.unique(spans["request"].to_numpy(), return_inverse=True)
    computed = np.zeros(len(request) + 1, np.int64)  # the last is of requests that it does not have
    np.maximum.at(computed, number, spans["stop"].to_numpy().astype(np.int64))
    requests = Index(request)
    for hook, readouts in of_run.hooks.items():
        place = f"readouts/{run} {hook}"
        twin = readouts.first_twin
        if twin is not None:
            catalog.findings.add("accounting", "E416", place, f"{_words(twin)} twice", "it once")
        table = readouts.table
        limit = computed[requests.of(table["request"].to_numpy())]
        odd = table["position"].to_numpy() >= limit
        odd |= ~np.isin(table["step"].to_numpy(), steps)
        where = np.flatnonzero(odd)
        if len(where):
            key = _words(readouts.key_at(int(where[0])))
            got = f"{key} and {len(where) - 1} more"
            expected = "rows that the census says were computed"
            catalog.findings.add("accounting", "E416", place, got, expected)


def _note_missing(
    catalog: Catalog, place: str, wanted: pa.Table, missing: Ints, whose: str
) -> None:
    if not len(missing):
        return
    key = {name: wanted[name][int(missing[0])].as_py() for name in KEYS}
    got = f"none for {_words(key)} and {len(missing) - 1} more"
    catalog.findings.add("accounting", "E416", place, got, f"one for every row of {whose}")


def _words(key: dict[str, int]) -> str:
    return f"request {key['request']} position {key['position']} step {key['step']}"


def _check_tokens(
    catalog: Catalog, run: str, hooks: Mapping[str, HookReadouts], known: _Tokens
) -> None:
    """Check the tokens that the readouts of a run name; notes E417.

    Spec: 0.1 section 7.8.
    """
    wrong = 0
    for hook, lines in hooks.items():
        keys, ids = _tokens(lines.table)
        every = _joined([known, (keys, ids)])
        at = np.searchsorted(every[0], keys)
        differ = np.flatnonzero(every[1][at] != ids)
        if len(differ):
            wrong += 1
            request, position = split_key(keys[differ[0]])
            place = f"readouts/{run} {hook} request {request} position {position} token_id"
            place += f" (and {len(differ) - 1} more lines)"
            expected = f"{int(every[1][at[differ[0]]])}, as its row or another line says"
            catalog.findings.add("accounting", "E417", place, str(int(ids[differ[0]])), expected)
        known = every
    if not wrong:
        _check_digests(catalog, run, known)


def keys_of(table: pa.Table) -> Keys:
    return position_key(*(table[name].to_numpy() for name in KEYS[:2]))


def _check_digests(catalog: Catalog, run: str, known: _Tokens) -> None:
    read = sound_tables(catalog, run, "requests", "spans")
    if not read:
        return
    keys, ids = known
    requests, spans = read[0], read[1].filter(pc.is_valid(read[1]["ref_request"]))
    references: dict[int, list[tuple[int, int, int]]] = {}
    names = ("request", "start", "stop", "ref_request")
    for request, *span in zip(*(spans[name].to_pylist() for name in names), strict=True):
        references.setdefault(request, []).append((span[0], span[1], span[2]))
    names = ("request", "prompt_len", "generated_len", "token_digest")
    columns = (requests[name].to_pylist() for name in names)
    wrong = 0
    for request, prompt_len, generated_len, digest in zip(*columns, strict=True):
        length = prompt_len + max(generated_len - 1, 0)
        if digest is None or not 0 < length <= len(keys):
            continue
        first, last = np.searchsorted(keys, position_key(request, [0, length]))
        referenced = references.get(request, [])
        if last - first + sum(stop - start for start, stop, _ in referenced) < length:
            continue  # some are not known
        whose = np.full(length, request, np.int64)
        for start, stop, of in referenced:
            whose[start:stop] = of
        wanted = position_key(whose, np.arange(length))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        if not (keys[at] == wanted).all():
            continue
        got = hashlib.sha256(ids[at].astype("<u4").tobytes()).hexdigest()
        if got != digest:
            place, expected = f"readouts/{run} request {request} token_id", f"{digest[:16]}..."
            got, expected = f"ids of digest {got[:16]}...", f"{expected}, the census' token_digest"
            catalog.findings.add("accounting", "E417", place, got, expected)
            wrong += 1
            if wrong == MAX_FINDINGS_PER_CODE:
                return


def _tokens(table: pa.Table) -> _Tokens:
    return keys_of(table), table["token_id"].to_numpy().astype(np.int64)


def _joined(parts: list[_Tokens]) -> _Tokens:
    keys, first = np.unique(np.concatenate([part[0] for part in parts]), return_index=True)
    return keys, np.concatenate([part[1] for part in parts])[first]
