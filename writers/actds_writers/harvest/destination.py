"""Where a run writes: a new or an old dataset, on a local disk or in an object store.

Stands before the token's way; imports the format room only. A local dataset is locked for as long
as a process of the run lives. An object store knows no lock: what keeps two runs apart there is
that each has chains and names of its own, and that no put overwrites.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from actds.format import layout
from actds.store import local_folder, open_for_writing, open_store
from actds.store.local import lock_dataset

__all__ = ["discard_empty", "has_dataset", "hold", "is_taken"]


def is_taken(out: str | Path) -> bool:
    """Return whether anything is there already.

    Raises:
        ActdsError: E009, E011 for a location of no known kind; E104 when a store does not answer.
    """
    folder = local_folder(out)
    if folder is None:
        return bool(open_store(out).list())
    return folder.exists() or folder.is_symlink()


def has_dataset(out: str | Path) -> bool:
    """Return whether a dataset has begun there.

    Raises:
        ActdsError: as ``is_taken``.
    """
    folder = local_folder(out)
    if folder is None:
        return open_store(out).exists(layout.GENESIS)
    return (folder / layout.GENESIS).is_file()


def hold(out: str | Path, *, shared: bool = False) -> int:
    """Return an open descriptor that holds the lock of a dataset, whose folder is made if needed.

    For an object store the descriptor holds nothing; that the store creates without overwriting
    is checked instead.

    Args:
        out: the location.
        shared: let other engines hold it too, as in ``lock_dataset``.

    Raises:
        ActdsError: E010 when another run writes the dataset; E016 when the store overwrites; E503
            when it takes no put.
    """
    folder = local_folder(out)
    if folder is None:
        open_for_writing(out)
        return os.open(os.devnull, os.O_RDONLY)
    folder.mkdir(parents=True, exist_ok=True)
    return lock_dataset(folder, shared=shared)


def discard_empty(out: str | Path) -> None:
    """Remove the local folder of a dataset that never began; an object store has no folders."""
    folder = local_folder(out)
    if folder is not None and not (folder / layout.GENESIS).exists():
        shutil.rmtree(folder, ignore_errors=True)
