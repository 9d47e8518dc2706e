"""Folders that appear whole or not at all: written beside their place, synced, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actds.errors import ActdsError
from actds.store import local_folder, refuse_within_dataset


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Give a folder to write into, which becomes ``out`` when the block ends without an error.

    A process that is killed leaves a hidden folder ``.NAME.….partial`` beside it.

    Args:
        out: local path of the new folder.

    Raises:
        ActdsError: E008 ``out`` exists; E009 it is no local path, or inside a
            dataset; E503 the disk refuses.
    """
    target = local_folder(out)
    if target is None:
        raise ActdsError("E009", "OUT", got=str(out), expected="a local folder")
    refuse_within_dataset(target)
    target = target.absolute()
    if target.exists() or target.is_symlink():
        got, expected, step = "something of this name", "no such path yet", "Choose a new path."
        raise ActdsError("E008", str(out), got=got, expected=expected, next_step=step)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        draft.mkdir(parents=True)
        yield draft
        for folder, _, names in os.walk(draft):
            for path in [*(Path(folder) / name for name in names), Path(folder)]:
                sync(path)
        # Refused by the system when somebody made a file or a folder of this name meanwhile, but
        # for an empty folder, in whose place it goes.
        draft.rename(target)
        sync(target.parent)
    except OSError as error:
        if isinstance(error, ActdsError):
            raise
        raise ActdsError(
            "E503", str(out), got=error.strerror or str(error), expected="a durable write"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
