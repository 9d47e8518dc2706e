"""Stores: where a dataset stands, on a local disk or in an object store."""

from __future__ import annotations

from pathlib import Path

from actds.errors import ActdsError
from actds.store.base import TEMPORARY, Buffer, Put, Store, StoredFile, file_sha256
from actds.store.local import LocalFile, LocalStore, lock_dataset

__all__ = [
    "TEMPORARY",
    "Buffer",
    "LocalFile",
    "LocalStore",
    "Put",
    "Store",
    "StoredFile",
    "file_sha256",
    "local_folder",
    "lock_dataset",
    "open_for_writing",
    "open_store",
]


def open_store(uri: str | Path) -> Store:
    """Return the store of a dataset's location; nothing is asked of it yet.

    Args:
        uri: a local path, a ``file://`` URI, or ``s3://BUCKET/PREFIX``. An object store is
            configured by the usual environment: ``AWS_ACCESS_KEY_ID``,
            ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION`` and, for servers
            other than Amazon's, ``AWS_ENDPOINT_URL``.

    Raises:
        ActdsError: E009 for another scheme or a malformed URI; E011 when the location needs the
            package ``obstore`` and it is not installed.
    """
    folder = local_folder(uri)
    if folder is not None:
        return LocalStore(folder)
    from actds.store.s3 import S3Store

    return S3Store(str(uri))


def open_for_writing(uri: str | Path) -> Store:
    """Return the store of a dataset's location after making sure that no put overwrites there.

    Raises:
        ActdsError: as ``open_store``; E016 when the store overwrites; E503 when it takes no put.

    Spec: 0.1 section 8.1.
    """
    store = open_store(uri)
    store.check_create_only()
    return store


def local_folder(uri: str | Path) -> Path | None:
    """Return the local folder that a location names, None for an object store.

    Raises:
        ActdsError: E009 for an unknown scheme, or an object store in a ``Path``.
    """
    text = str(uri)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://")).expanduser()
    if text.startswith("s3://"):
        return None
    # pathlib folds the two slashes of a URI into one.
    if "://" in text or text.startswith("s3:/"):
        raise ActdsError(
            "E009",
            text[:200],
            got="another scheme" if "://" in text else "a path",
            expected="a local path, file://PATH or s3://BUCKET/PREFIX",
        )
    return Path(text).expanduser()
