"""Files: no other ones than are named, arrays of the one form, every byte as committed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actds import layout
from actds.errors import ActdsError
from actds.format import arrays
from actds.format.arrays import parse_metadata
from actds.reading import Catalog
from actds.schema import ShardManifest
from actds.store import file_sha256

MAX_UNREACHABLE = 20


def check_structure(catalog: Catalog) -> None:
    """Check the files of the dataset and the metadata of its arrays.

    Notes E105, E107, E108, E203; missing files and sizes are noted where the ledger is read.

    Spec: 0.1 sections 2, 4 and 5.
    """
    _check_unreachable(catalog)
    for manifest in catalog.shards:
        _check_group(catalog, manifest)
        for hook in manifest.hooks:
            with catalog.findings.noting("structure"):
                _check_array(catalog, manifest, hook)


def _check_unreachable(catalog: Catalog) -> None:
    """Note files that nothing reaches, and links wherever they stand.

    A stray file beside the data is a leftover, for example of a writer that was killed before its
    commit; inside the folder of a committed shard a generic zarr reader would take it for data.
    """
    known = catalog.reached | {layout.GENESIS, layout.CARD}
    committed = {layout.shard_dir(manifest.shard) for manifest in catalog.shards}
    stray: list[str] = []
    for path in catalog.store.list():
        if path in known:
            continue
        shown = path.encode("unicode_escape").decode("ascii")
        folder = "/".join(path.split("/")[:2])
        if _is_link(catalog, path):
            catalog.findings.add("structure", "E107", shown, "a link", "regular files only")
        elif folder in catalog.opaque:
            continue  # its document is the finding; what it would name is not known
        elif folder in committed:
            catalog.findings.add(
                "structure", "E105", shown, "a file", "no file: the manifest lacks it"
            )
        else:
            stray.append(shown)
    for shown in stray[:MAX_UNREACHABLE]:
        catalog.findings.add(
            "structure", "E105", shown, "a file", "no file: nothing names it", "warning"
        )
    if len(stray) > MAX_UNREACHABLE:
        more = f"{len(stray) - MAX_UNREACHABLE} further files"
        catalog.findings.add("structure", "E105", ".", more, "none: nothing names them", "warning")


def _is_link(catalog: Catalog, path: str) -> bool:
    uri = catalog.store.uri
    try:
        return stat.S_ISLNK((Path(uri) / path).lstat().st_mode)
    except OSError:
        return False  # gone meanwhile: no link, and told as unreachable


def _check_group(catalog: Catalog, manifest: ShardManifest) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/acts.zarr/zarr.json"
    if path in catalog.unsound:
        return
    with catalog.findings.noting("integrity"):
        if catalog.file(path) != arrays.group_metadata():
            catalog.findings.add(
                "structure", "E108", path, "other metadata", "the fixed group metadata"
            )


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
    shape = parse_metadata(data, path)
    told = next(entry for entry in catalog.genesis.hooks if entry.name == hook)
    got, expected = (shape.dtype.name, shape.d_model), (told.dtype, told.d_model)
    if got != expected:
        catalog.findings.add(
            "structure",
            "E108",
            path,
            f"{got[0]} of {got[1]} channels",
            f"{expected[0]} of {expected[1]}, as in {layout.GENESIS}",
        )
    if shape.n_rows != manifest.n_rows:
        catalog.findings.add(
            "integrity", "E203", path, f"{shape.n_rows} rows", f"{manifest.n_rows}, as the manifest"
        )


def check_digests(catalog: Catalog, progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Check the SHA-256 of every pinned file; what differs is not parsed afterwards.

    Args:
        catalog: the dataset; notes E202, and E104 for what cannot be read.
        progress: called with the bytes of each file that is done.

    Spec: 0.1 section 2.3.
    """
    paths = sorted(set(catalog.files) - catalog.unsound)

    def digest(path: str) -> str | ActdsError:
        try:
            return file_sha256(catalog.store, path)
        except ActdsError as error:
            return error
        except (OSError, EOFError) as error:
            got = getattr(error, "strerror", None) or str(error)
            return ActdsError("E104", path, got=got, expected="a readable file")

    n_threads = max(min(8, os.cpu_count() or 1), catalog.store.n_readers)
    with ThreadPoolExecutor(n_threads) as pool:
        for path, got in zip(paths, pool.map(digest, paths), strict=True):
            entry = catalog.files[path]
            progress(entry.nbytes)
            if isinstance(got, ActdsError):
                catalog.findings.add("integrity", got.code, path, got.got, got.expected)
            elif got != entry.sha256:
                catalog.findings.add("integrity", "E202", path, f"sha256 {got}", entry.sha256)
            else:
                continue
            catalog.unsound.add(path)


def check_indexes(catalog: Catalog) -> None:
    """Check that the index of every array names whole chunks inside its file; notes E204.

    Spec: 0.1 section 4.
    """
    for manifest in catalog.shards:
        for hook in manifest.hooks:
            folder = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}"
            paths = [f"{folder}/zarr.json", f"{folder}/{arrays.SHARD_PATH}"]
            if catalog.unsound & set(paths):
                continue
            try:
                file = catalog.store.open_file(paths[1])
                arrays.ArrayReader(catalog.file(paths[0]), file, paths[1]).close()
            except ActdsError as error:
                catalog.unsound.add(paths[1])
                if error.code != "E108":  # told by the check of structure
                    catalog.findings.take("integrity", error)
