"""Values: what the rows hold, and that their readouts are those of the rows.

No NaN, no infinity, no zero row, no row that stands where another one belongs; every computed row
has its readouts, and no other has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds import canonical, layout
from actds.errors import ActdsError
from actds.format import arrays, tables
from actds.format.positions import Keys, position_key, split_key
from actds.format.readouts import Readouts, compute, load_probes, matrix, readouts_of
from actds.format.shard import TOKENS
from actds.reading import Catalog
from actds.schema import ShardManifest
from actds_validators.validate.accounting import read_parts

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
_READ_NBYTES = 1 << 24
_MULTIPLIERS = np.random.Generator(np.random.Philox(key=20)).integers(
    0, 2**64, 1 << 18, np.uint64
) | np.uint64(1)

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
TOLERANCE = 1e-4
"""Of the row's norm times the direction's: far above rounding in float32, far below what another
row would give."""

_Tokens = tuple[Keys, Ints]
"""Keys of positions, and the token of each."""
KEYS = ["request", "position", "step"]
TOKEN = "token_id"
VALUES = ["norm", "projections", "probes"]


def check_values(
    catalog: Catalog,
    progress: Callable[[int], None] = lambda nbytes: None,
    readouts: Mapping[str, RunReadouts] = MappingProxyType({}),
) -> None:
    """Decode every chunk and look at every row.

    Args:
        catalog: the dataset; notes E204, E417, E601, E602 and E603.
        progress: called with the decoded bytes of each hook of each shard that is done.
        readouts: by run, to be compared with those computed again.

    Spec: 0.1 sections 4.4 and 7.8.
    """
    for manifest in catalog.shards:
        try:
            _check_shard(catalog, manifest, progress, readouts.get(manifest.run))
        except ActdsError as error:
            catalog.findings.take("integrity", error)


def _check_shard(
    catalog: Catalog,
    manifest: ShardManifest,
    progress: Callable[[int], None],
    readouts: RunReadouts | None,
) -> None:
    folder = layout.shard_dir(manifest.shard)
    path = f"{folder}/{TOKENS}"
    if path in catalog.unsound:
        return
    tokens = tables.from_parquet("tokens", catalog.file(path), path)
    if tokens.num_rows != manifest.n_rows:
        return  # E203, told by the check of accounting
    hashes: dict[str, Hashes] = {}
    with ExitStack() as stack:
        for hook in manifest.hooks:
            metadata = f"{folder}/{layout.array_dir(hook)}/zarr.json"
            data = f"{folder}/{layout.array_dir(hook)}/{arrays.SHARD_PATH}"
            if catalog.unsound & {metadata, data}:
                continue
            file = catalog.store.open_file(data)
            reader = arrays.ArrayReader(catalog.file(metadata), file, data)
            stack.enter_context(reader)
            if reader.n_rows != manifest.n_rows:
                continue  # E203, told by the check of structure
            place = f"shards/{manifest.shard} hook {hook}"

            def look(
                start: int,
                bits: npt.NDArray[Any],
                hook: str = hook,
                dtype: str = reader.dtype,
                place: str = place,
            ) -> None:
                if readouts is not None:
                    rows = tokens.slice(start, len(bits))
                    compare(catalog, readouts, hook, rows, bits, dtype, place)

            try:
                hashes[hook] = _check_rows(catalog, reader, tokens, place, look)
            except ActdsError as error:
                catalog.findings.take("integrity", error)
                continue
            _check_repeats(catalog, reader, tokens, hashes[hook], place)
            progress(reader.nbytes)
    _check_hooks_apart(catalog, manifest, tokens, hashes)


def _check_rows(
    catalog: Catalog,
    reader: arrays.ArrayReader,
    tokens: pa.Table,
    place: str,
    look: Callable[[int, npt.NDArray[Any]], None],
) -> Hashes:
    """Return a hash of each row, after noting those that are not finite or zero.

    Raises:
        ActdsError: E204 when a chunk is damaged.
    """
    hashes = np.empty(reader.n_rows, np.uint64)
    broken, zero = [], []
    exponent = _EXPONENT[reader.dtype]
    magnitude = (1 << (8 * reader.nbytes // (reader.n_rows * reader.d_model) - 1)) - 1
    chunk_nbytes = max(1, reader.nbytes // reader.n_rows * reader.rows_per_chunk)
    step = max(1, _READ_NBYTES // chunk_nbytes)
    for first in range(0, reader.n_chunks, step):
        bits = reader.read_chunks(first, min(first + step, reader.n_chunks))
        start = first * reader.rows_per_chunk
        broken.append(start + np.flatnonzero(((bits & exponent) == exponent).any(axis=1)))
        zero.append(start + np.flatnonzero(~(bits & magnitude).any(axis=1)))
        hashes[start : start + len(bits)] = _hash(bits)
        look(start, bits)
    _note(
        catalog, "E601", place, np.concatenate(broken), tokens, "NaN or infinity", "finite values"
    )
    _note(catalog, "E602", place, np.concatenate(zero), tokens, "only zeros", "a computed state")
    # A zero or broken row is told once; it is no repeated row as well.
    hashes[np.concatenate(broken + zero)] = 0
    return hashes


def _hash(bits: npt.NDArray[Any]) -> Hashes:
    """Return a 64-bit hash of each row; never 0, which stands for a row told already."""
    flat = np.ascontiguousarray(bits)
    words = flat.view(np.uint64) if flat.strides[0] % 8 == 0 else flat.astype(np.uint64)
    multipliers = _MULTIPLIERS[np.arange(words.shape[1]) % len(_MULTIPLIERS)]
    mixed = (words ^ (words >> np.uint64(29))) * multipliers
    mixed ^= mixed >> np.uint64(32)
    hashes: Hashes = mixed.sum(axis=1, dtype=np.uint64) | np.uint64(1)
    return hashes


def _check_repeats(
    catalog: Catalog,
    reader: arrays.ArrayReader,
    tokens: pa.Table,
    hashes: Hashes,
    place: str,
) -> None:
    """Note rows of different tokens that are bitwise equal; the bits decide, not the hash."""
    order = np.argsort(hashes, kind="stable")
    token = tokens["token_id"].to_numpy()
    same = (hashes[order][1:] == hashes[order][:-1]) & (hashes[order][1:] != 0)
    same &= token[order][1:] != token[order][:-1]
    left, right = order[:-1][same], order[1:][same]
    if not len(left):
        return
    some = slice(0, 4096)
    equal = (reader.gather(left[some]) == reader.gather(right[some])).all(axis=1)
    twins = np.flatnonzero(equal)
    if not len(twins):
        return
    one, other = int(left[twins[0]]), int(right[twins[0]])
    _note(
        catalog,
        "E603",
        place,
        right[some][twins],
        tokens,
        f"the bits of row {one}, {_who(tokens, one)} of token {token[one]}",
        f"a row of its own for token {token[other]}",
    )


def _check_hooks_apart(
    catalog: Catalog, manifest: ShardManifest, tokens: pa.Table, hashes: dict[str, Hashes]
) -> None:
    """Note hooks that hold the same rows: two names for one buffer, or a layer off by one."""
    hooks = list(hashes)
    for i, one in enumerate(hooks):
        for other in hooks[i + 1 :]:
            same = np.flatnonzero((hashes[one] == hashes[other]) & (hashes[one] != 0))
            place = f"shards/{manifest.shard} hook {other}"
            _note(catalog, "E603", place, same, tokens, f"the bits of hook {one}", "another state")


def _who(tokens: pa.Table, row: int) -> str:
    return f"request {tokens['request'][row]} position {tokens['position'][row]}"


def _note(
    catalog: Catalog,
    code: str,
    place: str,
    rows: Ints,
    tokens: pa.Table,
    got: str,
    expected: str,
) -> None:
    if not len(rows):
        return
    row = int(rows.min())
    more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
    where = f"{place} row {row}, {_who(tokens, row)}{more}"
    catalog.findings.add("values", code, where, got, expected)


# readouts --------------------------------------------------------------------------------------


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


def check_readouts(catalog: Catalog, *, values: bool) -> dict[str, RunReadouts]:
    """Check row set and tokens of the readouts of every run; notes E416, E417.

    Args:
        catalog: the dataset.
        values: whether the values will be compared with the rows.

    Returns:
        The readouts by run, of those runs that have any and whose tables can be read.

    Spec: 0.1 section 7.8.
    """
    found: dict[str, RunReadouts] = {}
    for run, record in sorted(catalog.runs.items()):
        if run in catalog.incomplete or run not in catalog.runs_with_data:
            continue
        place = f"{layout.run_path(run)} capture.readouts"
        with catalog.findings.noting("accounting"):
            readouts = readouts_of(record)
            parts = catalog.parts.get((run, "readouts"), [])
            if readouts is None:
                if parts:
                    catalog.findings.add(
                        "accounting", "E416", place, "none", "the readouts there are"
                    )
                continue
            found[run] = _read_readouts(catalog, run, readouts, values=values)
            _check_rows_covered(catalog, run, found[run])
            _check_losses_covered(catalog, run, found[run])
            _check_computed(catalog, run, found[run])
            _check_tokens(catalog, run, found[run].hooks)
    return found


def compare(
    catalog: Catalog,
    mine: RunReadouts,
    hook: str,
    tokens: pa.Table,
    bits: npt.NDArray[Any],
    dtype: str,
    place: str,
) -> None:
    """Compare the readouts of stored rows with those computed again; notes E417.

    Args:
        catalog: the dataset.
        mine: the readouts of the rows' run.
        hook: the rows' hook.
        tokens: their token rows, in the same order.
        bits: their bit patterns ``(n, d_model)``.
        dtype: type of the values.
        place: what a finding names.
    """
    where = mine.hooks[hook].find(tokens)
    there = np.flatnonzero(where >= 0)  # those without are E416 already
    rows = arrays.as_ml_dtypes(bits[there], dtype).astype(np.float32)
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
    catalog.findings.add(
        "values",
        "E417",
        f"{place} request {key['request']} position {key['position']} readout {column} "
        f"(and {len(wrong) - 1} more rows)",
        f"{stored[row, column]:.6g}",
        f"{want[row, column]:.6g}, computed from the row",
    )


def _read_readouts(catalog: Catalog, run: str, readouts: Readouts, *, values: bool) -> RunReadouts:
    columns = [*KEYS, TOKEN, "hook", *(VALUES if values else [])]
    table = read_parts(catalog, run, "readouts", columns)
    hooks = {hook.name: hook for hook in catalog.genesis.hooks}
    unknown = sorted(set(pc.unique(table["hook"]).to_pylist()) - set(hooks))
    if unknown:
        catalog.findings.add(
            "accounting", "E416", f"readouts/{run}", f"hook {unknown[0]}", "a known hook"
        )
    packed = _matrices(catalog, run, readouts) if values else {}
    by_hook = {
        name: HookReadouts(table.filter(pc.equal(table["hook"], name)).drop(["hook"]))
        for name in hooks
    }
    return RunReadouts(by_hook, packed)


def _matrices(catalog: Catalog, run: str, readouts: Readouts) -> dict[str, npt.NDArray[np.float32]]:
    hooks = catalog.genesis.hooks
    probes = None
    if readouts.n_probes:
        path = layout.probes_path(run)
        data = catalog.store.read(path)
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


def _check_rows_covered(catalog: Catalog, run: str, mine: RunReadouts) -> None:
    """Every stored row has its readouts, at every hook, from the step that computed it."""
    for manifest in catalog.shards:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if manifest.run != run or path in catalog.unsound:
            continue
        tokens = tables.from_parquet("tokens", catalog.file(path), path, KEYS)
        for hook in manifest.hooks:
            missing = np.flatnonzero(mine.hooks[hook].find(tokens) < 0)
            _note_missing(catalog, f"readouts/{run} {hook}", tokens, missing, path)


def _check_losses_covered(catalog: Catalog, run: str, mine: RunReadouts) -> None:
    """Every row that an overflow policy gave up left its readouts behind."""
    drops = catalog.sound_table(run, "drops")
    if drops is None:
        return
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
        _note_missing(catalog, f"readouts/{run} {hook}", lost, missing, f"losses/{run}")


def _check_computed(catalog: Catalog, run: str, mine: RunReadouts) -> None:
    """No readout stands twice, or belongs to a step or a position that nobody computed."""
    steps_read = catalog.sound_table(run, "steps")
    spans_read = catalog.sound_table(run, "spans")
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
            catalog.findings.add("accounting", "E416", place, f"{_words(twin)} twice", "it once")
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
            catalog.findings.add(
                "accounting", "E416", place, got, "rows that the census says were computed"
            )


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


def _check_tokens(catalog: Catalog, run: str, hooks: Mapping[str, HookReadouts]) -> None:
    """Check the tokens that the readouts of a run name; notes E417.

    Args:
        catalog: the dataset.
        run: whose readouts.
        hooks: the readouts by hook.

    Spec: 0.1 section 7.8.
    """
    known: _Tokens = (np.empty(0, np.uint64), np.empty(0, np.int64))
    for manifest in catalog.shards:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if manifest.run == run and path not in catalog.unsound:
            columns = [*KEYS[:2], TOKEN]
            rows = tables.from_parquet("tokens", catalog.file(path), path, columns)
            known = _joined(known, _tokens(rows))
    wrong = 0
    for hook, lines in hooks.items():
        keys, ids = _tokens(lines.table)
        both = _joined(known, (keys, ids))
        at = np.searchsorted(both[0], keys)
        differ = np.flatnonzero(both[1][at] != ids)
        if len(differ):
            wrong += 1
            request, position = split_key(keys[differ[0]])
            catalog.findings.add(
                "accounting",
                "E417",
                f"readouts/{run} {hook} request {request} position {position} token_id "
                f"(and {len(differ) - 1} more lines)",
                str(int(ids[differ[0]])),
                f"{int(both[1][at[differ[0]]])}, as its row or another line says",
            )
        known = both
    if not wrong:
        _check_digests(catalog, run, known)


def keys_of(table: pa.Table) -> Keys:
    """Return the key of the position of each line."""
    return position_key(*(table[name].to_numpy() for name in KEYS[:2]))


def _check_digests(catalog: Catalog, run: str, known: _Tokens) -> None:
    """Compare the tokens of every request of which all are known with the census' digest."""
    requests_read = catalog.sound_table(run, "requests")
    spans_read = catalog.sound_table(run, "spans")
    if requests_read is None or spans_read is None:
        return
    keys, ids = known
    spans = spans_read.filter(pc.is_valid(spans_read["ref_request"]))
    references: dict[int, list[tuple[int, int, int]]] = {}
    names = ("request", "start", "stop", "ref_request")
    for request, *span in zip(*(spans[name].to_pylist() for name in names), strict=True):
        references.setdefault(request, []).append((span[0], span[1], span[2]))
    names = ("request", "prompt_len", "generated_len", "token_digest")
    columns = (requests_read[name].to_pylist() for name in names)
    for request, prompt_len, generated_len, digest in zip(*columns, strict=True):
        length = prompt_len + max(generated_len - 1, 0)
        if digest is None or not 0 < length <= len(keys):
            continue
        whose = np.full(length, request, np.int64)
        for start, stop, of in references.get(request, []):
            whose[start:stop] = of
        wanted = position_key(whose, np.arange(length))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        if not (keys[at] == wanted).all():
            continue
        got = hashlib.sha256(ids[at].astype("<u4").tobytes()).hexdigest()
        if got != digest:
            catalog.findings.add(
                "accounting",
                "E417",
                f"readouts/{run} request {request} token_id",
                f"ids of digest {got[:16]}...",
                f"{digest[:16]}..., the census' token_digest",
            )


def _tokens(table: pa.Table) -> _Tokens:
    return keys_of(table), table["token_id"].to_numpy().astype(np.int64)


def _joined(known: _Tokens, more: _Tokens) -> _Tokens:
    """Return the keys of both, each once and sorted, with the token that was known first."""
    keys, first = np.unique(np.concatenate([known[0], more[0]]), return_index=True)
    return keys, np.concatenate([known[1], more[1]])[first]
