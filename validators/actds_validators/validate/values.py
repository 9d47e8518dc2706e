"""Values: what the rows hold.

No NaN, no infinity, no zero row, no row that stands where another one belongs, and the readouts
that were taken of it. Shards are looked at one by one, wherever the executor is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.dataset.reading import Catalog
from actds.errors import ActdsError, CheckName, Finding
from actds.executor import ExecutorName, open_executor
from actds.format import arrays
from actds.format.schema import RowCounts, ShardManifest
from actds.format.shard import TOKENS
from actds.store import layout
from actds_validators.validate.readouts import RunReadouts, compare

_READ_NBYTES = 1 << 24
_LOOK_NBYTES = 1 << 22
_MAX_TWIN_HOOKS = 64
"""Pairs of hooks with equal rows that are noted of a shard."""
_MULTIPLIERS = np.random.Generator(np.random.Philox(key=20)).integers(
    0, 2**64, 1 << 18, np.uint64
) | np.uint64(1)

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Item:
    catalog: Catalog
    tokens: pa.Table
    readouts: RunReadouts | None


@dataclass(frozen=True)
class _Looked:
    noted: list[tuple[CheckName, Finding]]
    nbytes: int


def check_values(
    catalog: Catalog,
    progress: Callable[[int], None] = lambda nbytes: None,
    readouts: Mapping[str, RunReadouts] = MappingProxyType({}),
    executor: ExecutorName = "threads",
) -> None:
    """Decode every chunk and look at every row.

    Args:
        catalog: the dataset; notes E204, E417 and E601 to E604.
        progress: called with the decoded bytes of each shard that is done.
        readouts: by run, to be compared with those computed again.

    Spec: 0.1 sections 4.4 and 7.8.
    """
    # A thread holds some chunks and what is computed of them: eight of them, a gigabyte at most.
    n_workers = min(8, os.cpu_count() or 1) if executor == "threads" else None
    with open_executor(executor, n_workers) as on:
        for looked in on.map(_look_at, _items(catalog, readouts)):
            for check, finding in looked.noted:
                catalog.findings.take(check, finding)
            progress(looked.nbytes)


def values_nbytes(catalog: Catalog, manifest: ShardManifest) -> int:
    hooks = {hook.name: hook for hook in catalog.genesis.hooks}
    row = sum(hooks[n].d_model * arrays.DTYPES[hooks[n].dtype].itemsize for n in manifest.hooks)
    return manifest.n_rows * row


def _items(catalog: Catalog, readouts: Mapping[str, RunReadouts]) -> Iterator[_Item]:
    for manifest in catalog.shards:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if path in catalog.unsound:
            continue
        try:
            tokens = catalog.read_table("tokens", path)
        except ActdsError as error:
            catalog.findings.take("integrity", error)
            continue
        if tokens.num_rows != manifest.n_rows:
            continue  # E203, told by the check of accounting
        of_run = readouts.get(manifest.run)
        of_run = of_run and of_run.of_rows(tokens, manifest.hooks)
        yield _Item(catalog.of_shard(manifest), tokens, of_run)


def _look_at(item: _Item) -> _Looked:
    findings = item.catalog.findings
    nbytes = 0
    with findings.noting("integrity"):
        nbytes = _check_shard(item.catalog, item.tokens, item.readouts)
    return _Looked(list(findings), nbytes)


def _check_shard(catalog: Catalog, tokens: pa.Table, readouts: RunReadouts | None) -> int:
    [manifest] = catalog.shards
    folder = layout.shard_dir(manifest.shard)
    hashes: dict[str, Hashes] = {}
    nbytes = 0
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
            try:
                hashes[hook] = _check_rows(catalog, reader, tokens, hook, readouts)
            except ActdsError as error:
                catalog.findings.take("integrity", error)
                continue
            _check_repeats(catalog, reader, tokens, hashes[hook], place)
            nbytes += reader.nbytes
    _check_hooks_apart(catalog, manifest, tokens, hashes)
    return nbytes


def _check_rows(
    catalog: Catalog,
    reader: arrays.ArrayReader,
    tokens: pa.Table,
    hook: str,
    readouts: RunReadouts | None,
) -> Hashes:
    [manifest] = catalog.shards
    place = f"shards/{manifest.shard} hook {hook}"
    hashes = np.empty(reader.n_rows, np.uint64)
    broken, zero, n_infinite = [], [], 0
    dtype = arrays.DTYPES[reader.dtype]
    exponent = dtype.exponent
    chunk_nbytes = max(1, reader.nbytes // reader.n_rows * reader.rows_per_chunk)
    step = max(1, _READ_NBYTES // chunk_nbytes)
    for first in range(0, reader.n_chunks, step):
        chunks = reader.read_chunks(first, min(first + step, reader.n_chunks))
        start = first * reader.rows_per_chunk
        # In pieces that stay in the cache: what is computed of them is several times their size.
        n_rows = max(1, _LOOK_NBYTES * len(chunks) // chunks.nbytes)
        for row in range(0, len(chunks), n_rows):
            bits, at = chunks[row : row + n_rows], start + row
            odd = np.flatnonzero(((bits & exponent) == exponent).any(axis=1))
            n_infinite += int(((bits[odd] & dtype.magnitude).max(axis=1) == exponent).sum())
            broken.append(at + odd)
            zero.append(at + np.flatnonzero(~(bits & dtype.magnitude).any(axis=1)))
            hashes[at : at + len(bits)] = hash_rows(bits)
            if readouts is not None:
                rows = tokens.slice(at, len(bits))
                compare(catalog.findings, readouts, hook, rows, bits, reader.dtype, place)
    reader.check_padding()
    broken_rows, zero_rows = np.concatenate(broken), np.concatenate(zero)
    _note(catalog, "E601", place, broken_rows, tokens, "NaN or infinity", "finite values")
    _note(catalog, "E602", place, zero_rows, tokens, "only zeros", "a computed state")
    counts = RowCounts(not_finite=broken_rows.size, zero=zero_rows.size, infinite=n_infinite)
    if counts != manifest.values[hook]:
        where = f"{layout.manifest_path(manifest.shard)} values {hook}"
        catalog.findings.add("values", "E604", where, str(manifest.values[hook]), str(counts))
    # A zero or broken row is told once; it is no repeated row as well.
    hashes[broken_rows] = hashes[zero_rows] = 0
    return hashes


def hash_rows(bits: npt.NDArray[Any]) -> Hashes:
    """Return a 64-bit hash of each row; never 0, which stands for a row told already."""
    flat = np.ascontiguousarray(bits)
    words = flat.view(np.uint64) if flat.strides[0] % 8 == 0 else flat.astype(np.uint64)
    multipliers = _MULTIPLIERS[np.arange(words.shape[1]) % len(_MULTIPLIERS)]
    mixed = (words ^ (words >> np.uint64(29))) * multipliers
    mixed ^= mixed >> np.uint64(32)
    hashes: Hashes = mixed.sum(axis=1, dtype=np.uint64) | np.uint64(1)
    return hashes


def _check_repeats(
    catalog: Catalog, reader: arrays.ArrayReader, tokens: pa.Table, hashes: Hashes, place: str
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
    first, other = int(left[twins[0]]), int(right[twins[0]])
    _note(
        catalog,
        "E603",
        place,
        right[some][twins],
        tokens,
        f"the bits of row {first}, {_who(tokens, first)} of token {token[first]}",
        f"a row of its own for token {token[other]}",
    )


def may_equal(hook: str, other: str) -> bool:
    """Return whether two hooks are one place, or have equal rows where a model has no norm.

    A single position attends to itself alone: its heads' outputs are its values.

    Spec: 0.1 section 3.1.
    """
    (first, _, a), (second, _, b) = sorted(name.rpartition(".") for name in (hook, other))
    if (first, second) == ("resid_post", "resid_pre"):
        return a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1
    pairs = {("embed", "resid_pre"), ("mlp_in", "resid_mid"), ("v", "z")}
    return a == b and (first, second) in pairs


def _check_hooks_apart(
    catalog: Catalog, manifest: ShardManifest, tokens: pa.Table, hashes: dict[str, Hashes]
) -> None:
    """Note hooks that hold the same rows: two names for one buffer, or a layer off by one."""
    hooks = list(hashes)
    if not hooks:
        return
    every = np.stack([hashes[hook] for hook in hooks])
    left = _MAX_TWIN_HOOKS
    for i, first in enumerate(hooks):
        same = (every[i + 1 :] == every[i]) & (every[i] != 0)
        for j in np.flatnonzero(same.any(axis=1)):
            other = hooks[i + 1 + j]
            if may_equal(first, other):
                continue
            place = f"shards/{manifest.shard} hook {other}"
            rows = np.flatnonzero(same[j])
            _note(
                catalog, "E603", place, rows, tokens, f"the bits of hook {first}", "another state"
            )
            left -= 1
            if not left:
                return


def _who(tokens: pa.Table, row: int) -> str:
    return f"request {tokens['request'][row]} position {tokens['position'][row]}"


def _note(
    catalog: Catalog, code: str, place: str, rows: Ints, tokens: pa.Table, got: str, expected: str
) -> None:
    if not len(rows):
        return
    row = int(rows.min())
    more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
    where = f"{place} row {row}, {_who(tokens, row)}{more}"
    catalog.findings.add("values", code, where, got, expected)
