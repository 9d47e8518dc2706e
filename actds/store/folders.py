"""Folders and files that appear whole or not at all: written beside their place, then renamed.

Where they may stand: a file written into a dataset breaks it, and whoever wrote it would end well.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
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


def refuse_outputs(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Sequence[Path]]
) -> None:
    """Refuse outputs that would destroy something; nothing is opened.

    Args:
        outputs: by option, such as ``--html``.
        inputs: files that are read, by option; no output may be one of them.

    Raises:
        ActdsError: E009 an output inside a dataset, or a file that another option names as well.
    """
    taken = [(option, path) for option, paths in inputs.items() for path in paths]
    for option, path in outputs.items():
        if path is None:
            continue
        refuse_within_dataset(path, option)
        for other, its in taken:
            if _is_same(path, its):
                raise ActdsError(
                    "E009",
                    f"{option} {path}",
                    got=f"the file of {other}",
                    expected="a path of its own",
                )
        taken.append((option, path))


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes its name at the end, whole or not at all.

    A file that is there is replaced and not written over: it may have other names, one of them in
    a dataset. Devices and pipes are written to as they are.

    Raises:
        ActdsError: E009 it is inside a dataset; E503 the disk refuses.
    """
    refuse_within_dataset(path, "the output")
    target = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        target = temporary = path  # the real path of a pipe behind /dev/stdout is no path
    else:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        if temporary != target:
            os.replace(temporary, target)
    except ActdsError:
        raise
    except OSError as error:
        raise unwritable(path, error.strerror or str(error)) from error
    finally:
        if temporary != target:
            temporary.unlink(missing_ok=True)


def unwritable(
    path: Path, got: str, next_step: str = "Free space, or give another path."
) -> ActdsError:
    return ActdsError(
        "E503", str(path), got=got, expected="a file that can be written", next_step=next_step
    )


def _is_same(first: Path, other: Path) -> bool:
    if os.path.realpath(first) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(first, other)
    except OSError:  # one of them is not there yet
        return False
