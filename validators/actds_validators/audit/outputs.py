"""Outputs: where the files that the audit writes may stand, and how they take their place.

A file written into a dataset breaks it, and the audit would end well.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from actds.errors import ActdsError
from actds.store import refuse_within_dataset


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
