"""Values: no NaN, no infinity, no zero row, no row that stands where another one belongs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds import layout
from actds.errors import ActdsError
from actds.format import arrays, tables
from actds.format.shard import TOKENS
from actds.reading import Catalog
from actds.schema import ShardManifest
from actds_validators.validate.readouts import RunReadouts, compare

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
_READ_NBYTES = 1 << 24
_MULTIPLIERS = np.random.Generator(np.random.Philox(key=20)).integers(
    0, 2**64, 1 << 18, np.uint64
) | np.uint64(1)

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


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
    rows: Rows,
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
