"""Stores: a dataset's files on a local disk or in an object store.

A store has create-only puts, reads in ranges, and listings that prove nothing. ``LocalStore``
and ``S3Store`` can be written; ``RemoteStore`` reads other object stores and web servers.
"""

from __future__ import annotations

import os
from pathlib import Path

from actds.errors import ActdsError
from actds.store import layout
from actds.store.interface import (
    TEMPORARY,
    Buffer,
    CollectedFile,
    NewFile,
    Put,
    Store,
    StoredFile,
    check_path,
    file_sha256,
    local_folder,
)

__all__ = [
    "TEMPORARY",
    "Buffer",
    "CollectedFile",
    "NewFile",
    "Put",
    "Store",
    "StoredFile",
    "check_path",
    "file_sha256",
    "local_folder",
    "open_for_writing",
    "open_store",
    "refuse_within_dataset",
]


def open_store(uri: str | Path | Store, *, write: bool = False) -> Store:
    """Return the store of a dataset's location; nothing is asked of it yet.

    Args:
        uri: a store, a local path, or a URI: ``file://``, ``s3://``, ``gs://``, ``az://``,
            ``abfs://``, ``https://`` or ``http://``. An object store is configured by its usual
            environment: docs/stores.md.
        write: refuse a location that can only be read.

    Raises:
        ActdsError: E009 for another scheme, a malformed URI, or a location that cannot be
            written; E011 when the location needs the package ``obstore`` and it is not installed.
    """
    if not isinstance(uri, str | Path):
        store = uri
    elif (folder := local_folder(uri)) is not None:
        from actds.store.local import LocalStore

        store = LocalStore(folder)
    elif str(uri).startswith("s3://"):
        from actds.store.s3 import S3Store

        store = S3Store(str(uri))
    else:
        from actds.store.remote import RemoteStore

        store = RemoteStore(str(uri))
    if write and store.read_only:
        store.check_create_only()
    return store


def open_for_writing(uri: str | Path) -> Store:
    """Return the store of a dataset's location after making sure that no put overwrites there.

    Raises:
        ActdsError: as ``open_store``; E016 when the store overwrites; E503 when it takes no put.

    Spec: 0.1 section 8.1.
    """
    store = open_store(uri, write=True)
    store.check_create_only()
    return store


def refuse_within_dataset(out: str | Path, option: str = "OUT") -> None:
    """Refuse an output inside any dataset, seen through links, or with the name of a genesis.

    Whoever writes to a place that a caller names asks here first: a file more breaks a dataset.

    Args:
        out: where a file, a folder or a dataset is to be, local or a URI.
        option: what the caller named it by.

    Raises:
        ActdsError: E009.
    """
    folder = local_folder(out)
    if folder is None:
        _refuse_within_remote(str(out), option)
        return
    expected = "a path outside any dataset"
    # A link in a dataset is refused as well, wherever it leads.
    real = Path(os.path.realpath(folder))
    as_named = Path(os.path.realpath(folder.parent), folder.name)
    for place in dict.fromkeys((as_named, real)):
        for around in place.parents:
            if os.path.lexists(around / layout.GENESIS):
                got = f"inside the dataset {around}"
                raise ActdsError("E009", f"{option} {out}", got=got, expected=expected)
    if layout.GENESIS in (as_named.name, real.name):
        got = f"{layout.GENESIS}, by which a folder is taken for a dataset"
        raise ActdsError("E009", f"{option} {out}", got=got, expected=expected)


def _refuse_within_remote(uri: str, option: str) -> None:
    scheme, _, rest = uri.partition("://")
    parts = rest.rstrip("/").split("/")
    for n in range(len(parts) - 1, 0, -1):
        around = f"{scheme}://{'/'.join(parts[:n])}"
        try:
            is_dataset = open_store(around).exists(layout.GENESIS)
        except ActdsError:
            continue  # whoever may not look there may write below it all the same
        if is_dataset:
            got, expected = f"inside the dataset {around}", "a prefix outside any dataset"
            raise ActdsError("E009", f"{option} {uri}", got=got, expected=expected)
