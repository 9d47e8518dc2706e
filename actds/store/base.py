"""What a store is: create-only puts, reads in ranges, and listings that prove nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from actds.format import layout

__all__ = ["TEMPORARY", "Buffer", "Put", "Store", "StoredFile", "check_path", "file_sha256"]

TEMPORARY = ".tmp-"
"""How the name of a file that is not committed begins; readers pass over such files."""

_HASH_NBYTES = 1 << 23  # one range: large for a network, small for a cache

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Put:
    """What was written.

    Args:
        nbytes: size of the file.
        sha256: its digest, hexadecimal.
    """

    nbytes: int
    sha256: str


class StoredFile(Protocol):
    """A file that is open for reading ranges; threads may share it."""

    @property
    def nbytes(self) -> int:
        """Return the size of the file."""
        ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range; the bytes live until this thread's next read of this file.

        Raises:
            EOFError: the file ends before the range does.
            OSError: the disk failed, or the file is closed.
            ActdsError: E104 when an object store does not give the range.
        """
        ...

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Store(Protocol):
    """Where a dataset stands: create-only puts, reads, and listings that prove nothing.

    Spec: 0.1 section 8.1.
    """

    @property
    def uri(self) -> str:
        """Return where the dataset stands, as a person would write it."""
        ...

    @property
    def n_readers(self) -> int:
        """Return how many reads at a time are needed to keep the store busy."""
        ...

    def check_create_only(self) -> None:
        """Make sure that no put overwrites; whoever writes calls it first."""
        ...

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        """Create a file durably, or not at all."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a file that nothing pins (the card), over an older one."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file that no record of the ledger reaches; a missing one is no error."""
        ...

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Return a file's bytes."""
        ...

    def read_ahead(self, paths: Iterable[str], limit: int) -> None:
        """Begin to read documents that are asked for next, with this limit, where that helps."""
        ...

    def read_range(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of a file from ``offset`` on."""
        ...

    def open_file(self, path: str) -> StoredFile:
        """Return a file that is open for many ranged reads."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether a file is there."""
        ...

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        ...

    def learn_sizes(self, prefix: str) -> None:
        """Learn the sizes of all files below a folder at once, where asking for each is slow."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        ...

    def local_path(self, path: str) -> Path:
        """Return where a file can be opened on this machine."""
        ...

    def remove_temporary(self) -> int:
        """Remove what dead writers left uncommitted; return how many files."""
        ...


def check_path(path: str) -> None:
    """Check every segment of a path in a dataset.

    Raises:
        ActdsError: E107 for a bad one.

    Spec: 0.1 section 2.1.
    """
    if path not in (layout.GENESIS, layout.CARD):
        for part in path.split("/"):
            layout.segment(part, path[:200])


def file_sha256(store: Store, path: str) -> str:
    """Return the digest of a file, read range by range.

    Raises:
        ActdsError: E104 missing or unreadable; E107 a link, no regular file, or a bad path.
        OSError: a local disk failed.
        EOFError: the file became shorter meanwhile.
    """
    digest = hashlib.sha256()
    with store.open_file(path) as file:
        end = file.nbytes
        for offset in range(0, end, _HASH_NBYTES):
            digest.update(file.read(offset, min(_HASH_NBYTES, end - offset)))
    return digest.hexdigest()
