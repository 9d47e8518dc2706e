"""The lock of a local dataset: one program at a time writes it or works on it.

Imports nothing of the token's way; writers and tools hold it from before they read the ledger
until their last record.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from actds.errors import BusyError

__all__ = ["lock_dataset"]


def lock_dataset(folder: Path, *, shared: bool = False) -> int:
    """Return an open descriptor that holds the dataset's lock for as long as it is open.

    The processes of a run inherit it, so the lock outlives a command that was killed.

    Args:
        folder: the dataset's folder.
        shared: let other engines hold it too, each with a run of its own; a program that works
            on the dataset as a whole holds it alone.

    Raises:
        BusyError: E010 when another program writes the dataset.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise BusyError(
            "E010",
            str(folder),
            got="a run that is still writing it",
            expected="no other writer",
            next_step="Wait until it has ended.",
        ) from None
    return descriptor
