"""Structure: the files that have to be there, no other ones, and arrays of the one allowed form."""

from __future__ import annotations

import stat
from pathlib import Path

from actds.errors import ActdsError
from actds.format import arrays, layout
from actds.format.array_metadata import parse_metadata
from actds.schema import ShardManifest
from actds_validators.validate.inventory import Inventory

MAX_UNREACHABLE = 20


def check_structure(inventory: Inventory) -> None:
    """Check the files of the dataset and the metadata of its arrays.

    Notes E104, E105, E107, E108, E201, E203.

    Spec: 0.1 sections 2, 4 and 5.
    """
    _check_sizes(inventory)
    _check_unreachable(inventory)
    for manifest in inventory.shards:
        _check_group(inventory, manifest)
        for hook in manifest.hooks:
            with inventory.noting("structure"):
                _check_array(inventory, manifest, hook)


def _check_sizes(inventory: Inventory) -> None:
    for path, entry in sorted(inventory.files.items()):
        try:
            nbytes = inventory.store.size(path)
            if nbytes != entry.nbytes:
                raise ActdsError(
                    "E201", path, got=f"{nbytes} bytes", expected=f"{entry.nbytes} bytes"
                )
        except ActdsError as error:
            check = "integrity" if error.code == "E201" else "structure"
            inventory.add(check, error.code, path, error.got, error.expected)  # type: ignore[arg-type]
            inventory.unsound.add(path)


def _check_unreachable(inventory: Inventory) -> None:
    """Note files that nothing reaches, and links wherever they stand.

    A stray file beside the data is a leftover, for example of a writer that was killed before its
    commit; inside the folder of a committed shard a generic zarr reader would take it for data.
    """
    known = inventory.reached | {layout.GENESIS, layout.CARD}
    committed = {layout.shard_dir(manifest.shard) for manifest in inventory.shards}
    stray: list[str] = []
    for path in inventory.store.list():
        if path in known:
            continue
        shown = path.encode("unicode_escape").decode("ascii")
        folder = "/".join(path.split("/")[:2])
        if _is_link(inventory, path):
            inventory.add("structure", "E107", shown, "a link", "regular files only")
        elif folder in inventory.opaque:
            continue  # its document is the finding; what it would name is not known
        elif folder in committed:
            inventory.add("structure", "E105", shown, "a file", "no file: the manifest lacks it")
        else:
            stray.append(shown)
    for shown in stray[:MAX_UNREACHABLE]:
        inventory.add("structure", "E105", shown, "a file", "no file: nothing names it", "warning")
    if len(stray) > MAX_UNREACHABLE:
        more = f"{len(stray) - MAX_UNREACHABLE} further files"
        inventory.add("structure", "E105", ".", more, "none: nothing names them", "warning")


def _is_link(inventory: Inventory, path: str) -> bool:
    uri = inventory.store.uri
    try:
        return stat.S_ISLNK((Path(uri) / path).lstat().st_mode)
    except OSError:
        return False  # gone meanwhile: no link, and told as unreachable


def _check_group(inventory: Inventory, manifest: ShardManifest) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/acts.zarr/zarr.json"
    if path in inventory.unsound:
        return
    with inventory.noting("integrity"):
        if inventory.read(path) != arrays.group_metadata():
            inventory.add("structure", "E108", path, "other metadata", "the fixed group metadata")


def _check_array(inventory: Inventory, manifest: ShardManifest, hook: str) -> None:
    path = f"{layout.shard_dir(manifest.shard)}/{layout.array_dir(hook)}/zarr.json"
    if path in inventory.unsound:
        return
    try:
        data = inventory.read(path)
    except ActdsError as error:
        inventory.unsound.add(path)
        inventory.add("integrity", error.code, error.place, error.got, error.expected)
        return
    shape = parse_metadata(data, path)
    told = next(entry for entry in inventory.genesis.hooks if entry.name == hook)
    got, expected = (shape.dtype.name, shape.d_model), (told.dtype, told.d_model)
    if got != expected:
        inventory.add(
            "structure",
            "E108",
            path,
            f"{got[0]} of {got[1]} channels",
            f"{expected[0]} of {expected[1]}, as in {layout.GENESIS}",
        )
    if shape.n_rows != manifest.n_rows:
        inventory.add(
            "integrity", "E203", path, f"{shape.n_rows} rows", f"{manifest.n_rows}, as the manifest"
        )
