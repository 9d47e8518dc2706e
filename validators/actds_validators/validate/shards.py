"""Shards: files as they were committed, arrays of the one form, and what their rows hold.

No file that nothing names, and every byte of the others. No NaN, no infinity, no zero row, no row
that stands where another one belongs, and the readouts that were taken of it: shards are decoded
one by one, wherever the executor is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError, CheckName, Finding
from actds.executor import ExecutorName, open_executor
from actds.format import arrays
from actds.format.schema import RowCounts, ShardManifest
from actds.format.shard import TOKENS, row_order, row_set_sha256
from actds.store import Store, file_sha256, layout, local_folder
from actds_validators.validate.readouts import RunReadouts, compare

MIN_STEPS_TO_JUDGE_ORDER = 16
"""A random order of so many steps is sorted by chance less than once in 10**13 shards."""
MAX_UNREACHABLE = 20
BATCH_NBYTES, BATCH_FILES = 1 << 24, 64
"""After how much a batch of files to hash is full; a larger file is a batch of its own."""
Stamp = tuple[int, int, int, int]
"""What changes when a local file does: inode, size, time of its content, time of its entry."""


def check_structure(catalog: Catalog) -> None:
    """Check the files of the dataset and the metadata of its arrays.

    Notes E105, E107, E108, E203; missing files and sizes are noted where the ledger is read.

    Spec: 0.1 sections 2, 4 and 5.
    """
    _check_unreachable(catalog)
    for manifest in catalog.shards:
        check_arrays(catalog, manifest)


def _check_unreachable(catalog: Catalog) -> None:
    """Note files that nothing reaches, and links wherever they stand.

    A stray file beside the data is a leftover, for example of a writer that was killed before its
    commit; inside the folder of a committed shard a generic zarr reader would take it for data.
    """
    known = catalog.reached | {layout.GENESIS, *layout.BESIDE}
    for path in layout.BESIDE:
        with catalog.findings.noting("structure"):
            catalog.store.exists(path)  # E107 when it is a link or a folder
    committed = {layout.shard_dir(manifest.shard) for manifest in catalog.shards}
    stray, note = list[str](), partial(catalog.findings.add, "structure")
    for path in catalog.store.list():
        if path in known:
            continue
        shown = path.encode("unicode_escape").decode("ascii")
        folder = "/".join(path.split("/")[:2])
        if not _is_regular(catalog, path):
            got = "a link, or no regular file"
            note("E107", shown, got, "regular files only")
        elif layout.is_of_the_hub(path) or folder in catalog.opaque:
            continue  # its document is the finding; what it would name is not known
        elif folder in committed:
            note("E105", shown, "a file", "no file: the manifest lacks it")
        else:
            stray.append(shown)
    for shown in stray[:MAX_UNREACHABLE]:
        note("E105", shown, "a file", "no file: nothing names it", "warning")
    if len(stray) > MAX_UNREACHABLE:
        more = f"{len(stray) - MAX_UNREACHABLE} further files"
        note("E105", ".", more, "none: nothing names them", "warning")


def _is_regular(catalog: Catalog, path: str) -> bool:
    """Return whether a path of a local folder is a file; what is gone meanwhile is unreachable."""
    try:
        return stat.S_ISREG((Path(catalog.store.uri) / path).lstat().st_mode)
    except OSError:
        return True


def check_arrays(catalog: Catalog, manifest: ShardManifest) -> None:
    """Check the metadata of a shard's arrays and of their group; notes E108, E203."""
    path = f"{layout.shard_dir(manifest.shard)}/acts.zarr/zarr.json"
    with catalog.findings.noting("integrity"):
        if path not in catalog.unsound and catalog.file(path) != arrays.group_metadata():
            got, expected = "other metadata", "the fixed group metadata"
            catalog.findings.add("structure", "E108", path, got, expected)
    for hook in manifest.hooks:
        with catalog.findings.noting("structure"):
            _check_array(catalog, manifest, hook)


def _check_array(catalog: Catalog, manifest: ShardManifest, hook: str) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}/zarr.json"
    if path in catalog.unsound:
        return
    try:
        data = catalog.file(path)
    except ActdsError as error:
        catalog.unsound.add(path)
        catalog.findings.take("integrity", error)
        return
    shape = arrays.parse_metadata(data, path)
    declared = next(entry for entry in catalog.genesis.hooks if entry.name == hook)
    got, expected = (shape.dtype.name, shape.d_model), (declared.dtype, declared.d_model)
    if got != expected:
        words = f"{expected[0]} of {expected[1]}, as in {layout.GENESIS}"
        catalog.findings.add("structure", "E108", path, f"{got[0]} of {got[1]} channels", words)
    if shape.n_rows != manifest.n_rows:
        catalog.findings.add(
            "integrity", "E203", path, f"{shape.n_rows} rows", f"{manifest.n_rows}, as the manifest"
        )


def stamp(store: Store, path: str) -> Stamp | None:
    folder = local_folder(store.uri)
    if folder is None:
        return None
    try:
        now = (folder / path).lstat()
    except OSError:
        return None
    return now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def check_digests(
    catalog: Catalog,
    progress: Callable[[int], None],
    executor: ExecutorName,
    known: Mapping[str, Stamp] = MappingProxyType({}),
) -> None:
    """Check the SHA-256 of every pinned file; what differs is not parsed afterwards.

    Notes E202, and E104 for what cannot be read. A file that has not changed since its digest was
    checked, as ``known`` says, is not read again.

    Spec: 0.1 section 2.3.
    """
    paths = sorted(set(catalog.files) - catalog.unsound)
    done = [path for path in paths if path in known and stamp(catalog.store, path) == known[path]]
    progress(sum(catalog.files[path].nbytes for path in done))
    batches = list(_batches(catalog, sorted(set(paths) - set(done))))
    n_workers = max(min(8, os.cpu_count() or 1), catalog.store.n_readers)
    with open_executor(executor, n_workers if executor == "threads" else None) as on:
        digests = on.map(partial(_digests, catalog.store), batches)
        for batch, of_batch in zip(batches, digests, strict=True):
            progress(sum(catalog.files[path].nbytes for path in batch))
            for path, got in zip(batch, of_batch, strict=True):
                _compare_digest(catalog, path, got)


def _batches(catalog: Catalog, paths: list[str]) -> Iterator[list[str]]:
    batch, nbytes = list[str](), 0
    for path in paths:
        batch.append(path)
        nbytes += catalog.files[path].nbytes
        if nbytes >= BATCH_NBYTES or len(batch) == BATCH_FILES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _compare_digest(catalog: Catalog, path: str, got: str | ActdsError) -> None:
    expected = catalog.files[path].sha256
    if got == expected:
        return
    if isinstance(got, ActdsError):
        catalog.findings.add("integrity", got.code, path, got.got, got.expected)
    else:
        catalog.findings.add("integrity", "E202", path, f"sha256 {got}", expected)
    catalog.unsound.add(path)


def _digests(store: Store, paths: list[str]) -> list[str | ActdsError]:
    return [_digest(store, path) for path in paths]


def _digest(store: Store, path: str) -> str | ActdsError:
    try:
        return file_sha256(store, path)
    except ActdsError as error:
        return error
    except (OSError, EOFError) as error:
        got = getattr(error, "strerror", None) or str(error)
        return ActdsError("E104", path, got=got, expected="a readable file")


def check_indexes(catalog: Catalog) -> None:
    """Check that the index of every array names whole chunks inside its file; notes E204.

    Chunks of a shard that calls itself raw have to be copies; notes E415.

    Spec: 0.1 sections 4 and 5.2.
    """
    for manifest in catalog.shards:
        for hook in manifest.hooks:
            folder = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}"
            paths = [f"{folder}/zarr.json", f"{folder}/{arrays.SHARD_PATH}"]
            if catalog.unsound & set(paths):
                continue
            try:
                file = catalog.store.open_file(paths[1])
                with arrays.ArrayReader(catalog.file(paths[0]), file, paths[1]) as reader:
                    is_copied = reader.is_copied
            except ActdsError as error:
                catalog.unsound.add(paths[1])
                if error.code != "E108":  # told by the check of structure
                    catalog.findings.take("integrity", error)
                continue
            if manifest.compression == "raw" and not is_copied:
                place = f"{layout.manifest_path(manifest.shard)} compression"
                got = f"raw, and coded chunks of hook {hook}"
                catalog.findings.add("accounting", "E415", place, got, "copied chunks")


def check_shard_tokens(
    catalog: Catalog, manifest: ShardManifest, table: pa.Table, path: str
) -> None:
    place = layout.manifest_path(manifest.shard)
    if table.num_rows != manifest.n_rows:
        expected = f"{manifest.n_rows} rows, as in the manifest"
        got = f"{table.num_rows} token rows"
        catalog.findings.add("integrity", "E203", path, got, expected)
        catalog.incomplete.add(manifest.run)
        return
    note = partial(catalog.findings.add, "accounting")
    wrong = np.flatnonzero(pc.not_equal(table["phase"], manifest.phase).to_numpy())
    if len(wrong):
        got = f"{table['phase'][int(wrong[0])].as_py()!r:.20} in {len(wrong)} rows"
        expected = f"{manifest.phase}, the phase of the shard"
        note("E414", f"{path} row {wrong[0]} phase", got, expected)
    step = table["step"].to_numpy()
    got = f"{manifest.first_step}, {manifest.last_step}"
    expected = f"{step.min()}, {step.max()}"
    if got != expected:
        note("E415", f"{place} first_step, last_step", got, f"{expected}, as in the token table")
    digest = row_set_sha256(table["request"].to_numpy(), table["position"].to_numpy())
    if digest != manifest.row_set_sha256:
        note("E415", f"{place} row_set_sha256", manifest.row_set_sha256, digest)
    _check_order(catalog, manifest, step, place)


def _check_order(
    catalog: Catalog, manifest: ShardManifest, step: npt.NDArray[np.uint64], place: str
) -> None:
    if manifest.order == "sequence" and not _is_sorted(step):
        expected = "rows in the order of their steps"
        catalog.findings.add("accounting", "E415", f"{place} order", "sequence", expected)
    if manifest.permutation_seed is None or len(np.unique(step)) < MIN_STEPS_TO_JUDGE_ORDER:
        return
    before = np.empty_like(step)
    before[row_order(len(step), manifest.permutation_seed)] = step
    if _is_sorted(step) and not _is_sorted(before):
        expected = f"the permutation of seed {manifest.permutation_seed}"
        got = "rows in the order of their steps"
        catalog.findings.add("accounting", "E415", f"{place} order", got, expected)


def _is_sorted(values: npt.NDArray[np.uint64]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


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


def check_values(
    catalog: Catalog,
    progress: Callable[[int], None] = lambda nbytes: None,
    readouts: Mapping[str, RunReadouts] = MappingProxyType({}),
    executor: ExecutorName = "threads",
) -> None:
    """Decode every chunk and look at every row; notes E204, E417 and E601 to E604.

    Args:
        progress: called with the decoded bytes of each shard that is done.
        readouts: by run, to be compared with those computed again.

    Spec: 0.1 sections 4.4 and 7.8.
    """
    # A thread holds some chunks and what is computed of them: eight of them, a gigabyte at most.
    n_workers = min(8, os.cpu_count() or 1) if executor == "threads" else None
    with open_executor(executor, n_workers) as on:
        for noted, nbytes in on.map(_look_at, _items(catalog, readouts)):
            for check, finding in noted:
                catalog.findings.take(check, finding)
            progress(nbytes)


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


def _look_at(item: _Item) -> tuple[list[tuple[CheckName, Finding]], int]:
    findings = item.catalog.findings
    nbytes = 0
    with findings.noting("integrity"):
        nbytes = _check_shard(item.catalog, item.tokens, item.readouts)
    return list(findings), nbytes


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
    got = f"the bits of row {first}, {_who(tokens, first)} of token {token[first]}"
    expected = f"a row of its own for token {token[other]}"
    _note(catalog, "E603", place, right[some][twins], tokens, got, expected)


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
            rows, got = np.flatnonzero(same[j]), f"the bits of hook {first}"
            _note(catalog, "E603", place, rows, tokens, got, "another state")
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
