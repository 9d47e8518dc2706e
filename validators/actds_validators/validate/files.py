"""Files: no others than are named, arrays of the one form, every byte as it was committed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from actds.dataset.reading import Catalog
from actds.errors import ActdsError
from actds.executor import ExecutorName, open_executor
from actds.format import arrays
from actds.format.schema import ShardManifest
from actds.store import Store, file_sha256, layout, local_folder

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
        check_group(catalog, manifest)
        for hook in manifest.hooks:
            with catalog.findings.noting("structure"):
                check_array(catalog, manifest, hook)


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


def check_group(catalog: Catalog, manifest: ShardManifest) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/acts.zarr/zarr.json"
    if path in catalog.unsound:
        return
    with catalog.findings.noting("integrity"):
        if catalog.file(path) != arrays.group_metadata():
            got, expected = "other metadata", "the fixed group metadata"
            catalog.findings.add("structure", "E108", path, got, expected)


def check_array(catalog: Catalog, manifest: ShardManifest, hook: str) -> None:
    """Check the metadata of a hook's array in a shard; notes E108, E203."""
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

    Args:
        catalog: the dataset; notes E202, and E104 for what cannot be read.
        progress: called with the bytes of files that are done.
        known: files whose digest was checked before, each as it was then: one that has not
            changed since is not read again.

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
