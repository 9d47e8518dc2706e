"""Integrity: every byte of the dataset is the byte that was committed."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actds.errors import ActdsError
from actds.format import arrays, layout
from actds.store import file_sha256
from actds_validators.validate.inventory import Inventory


def check_digests(
    inventory: Inventory, progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Check the SHA-256 of every pinned file; what differs is not parsed afterwards.

    Args:
        inventory: the dataset; notes E202, and E104 for what cannot be read.
        progress: called with the bytes of each file that is done.

    Spec: 0.1 section 2.3.
    """
    paths = sorted(set(inventory.files) - inventory.unsound)

    def digest(path: str) -> str | ActdsError:
        try:
            return file_sha256(inventory.store, path)
        except ActdsError as error:
            return error
        except (OSError, EOFError) as error:
            got = getattr(error, "strerror", None) or str(error)
            return ActdsError("E104", path, got=got, expected="a readable file")

    n_threads = max(min(8, os.cpu_count() or 1), inventory.store.n_readers)
    with ThreadPoolExecutor(n_threads) as pool:
        for path, got in zip(paths, pool.map(digest, paths), strict=True):
            entry = inventory.files[path]
            progress(entry.nbytes)
            if isinstance(got, ActdsError):
                inventory.add("integrity", got.code, path, got.got, got.expected)
            elif got != entry.sha256:
                inventory.add("integrity", "E202", path, f"sha256 {got}", entry.sha256)
            else:
                continue
            inventory.unsound.add(path)


def check_indexes(inventory: Inventory) -> None:
    """Check that the index of every array names whole chunks inside its file; notes E204.

    Spec: 0.1 section 4.
    """
    for manifest in inventory.shards:
        for hook in manifest.hooks:
            folder = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}"
            paths = [f"{folder}/zarr.json", f"{folder}/{arrays.SHARD_PATH}"]
            if inventory.unsound & set(paths):
                continue
            try:
                file = inventory.store.open_file(paths[1])
                arrays.ArrayReader(inventory.read(paths[0]), file, place=paths[1]).close()
            except ActdsError as error:
                inventory.unsound.add(paths[1])
                if error.code != "E108":  # told by the check of structure
                    inventory.add("integrity", error.code, error.place, error.got, error.expected)
