"""What a store can do, and the names that all stores share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from actds.errors import ActdsError
from actds.store import layout
from actds.store.cache import Cache

TEMPORARY = ".tmp-"
"""How the name of a file that is not committed begins; readers pass over such files."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//?)")
_REMOTE = ("s3", "gs", "az", "abfs", "abfss", "https", "http")
_OTHERS = "gs://, az://, abfs://, https:// and http://"
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


class NewFile(Protocol):
    """A file on its way into a store; nothing has its name before ``commit``. Stores derive theirs.

    One thread at a time may hash and another one write, both in the order of the file.
    """

    def hash(self, parts: Sequence[Buffer]) -> None:
        """Take the next bytes into the digest."""
        ...

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append the next bytes, which may change after the return.

        Raises:
            ActdsError: E503 when the store refuses, and then the file is gone.
        """
        ...

    def commit(self) -> Put:
        """Make what was hashed and written durable under its name.

        Raises:
            ActdsError: as ``Store.put_new``.
        """
        ...

    def abandon(self) -> None:
        """Throw the file away; a file that is committed, or thrown away, stays what it is."""
        ...


class CollectedFile(NewFile):
    """A file that is held in memory until it is put as a whole."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path, self._data = store, path, bytearray()

    def hash(self, parts: Sequence[Buffer]) -> None:
        """Do nothing: the store hashes what it puts."""

    def write(self, parts: Sequence[Buffer]) -> None:
        """Keep the bytes."""
        for part in parts:
            self._data += part

    def commit(self) -> Put:
        """Put the file."""
        data, self._data = self._data, bytearray()
        return self._store.put_new(self._path, [data])

    def abandon(self) -> None:
        """Forget the bytes."""
        self._data = bytearray()


class StoredFile(Protocol):
    """A file that is open for reading ranges; threads may share it. Stores derive theirs."""

    read_nbytes: int = 1 << 24
    """How much is best asked for at a time."""

    @property
    def nbytes(self) -> int:
        """Return the size of the file."""
        ...

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range; the bytes live until this thread's next read of any file.

        Raises:
            EOFError: the file ends before the range does.
            OSError: the disk failed, or the file is closed.
            ActdsError: E104 when an object store does not give the range.
        """
        ...

    def forget(self, offset: int, nbytes: int) -> bool:
        """Drop what a cache holds of a damaged range; return whether it is worth another read."""
        return False

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Store(Protocol):
    """The files of a dataset: create-only puts, reads, and listings. Stores derive from it.

    A path is one inside the dataset. Every method that takes one raises ``ActdsError`` E107 for a
    bad path, a link or what is no regular file; writing raises E503 when the store refuses, and
    then nothing more may be committed by this process; reading raises E104 for a file that is
    missing or unreadable, or a store that does not answer.

    Attributes:
        binds: whether a file of known digest is opened only where all of its bytes have that
            digest, and read only while they do: set where a pin is read.

    Spec: 0.1 section 8.1.
    """

    binds: bool = False

    @property
    def uri(self) -> str:
        """Return the dataset's location, as a user writes it."""
        ...

    @property
    def n_readers(self) -> int:
        """Return how many reads at a time keep the store busy; a disk needs one per core."""
        return 1

    @property
    def read_only(self) -> bool:
        """Return whether every write is refused, with E009."""
        return False

    @property
    def can_list(self) -> bool:
        """Return whether listings show what is there; else what ``know`` was told."""
        return True

    def check_create_only(self) -> None:
        """Make sure that no put overwrites; writers call it first."""
        ...

    @property
    def holds_new_files(self) -> bool:
        """Return whether a file that ``begin`` made is held in memory until it is put."""
        return True

    def begin(self, path: str) -> NewFile:
        """Return a file to be written piece by piece; nothing is asked of the store yet.

        Raises:
            ActdsError: E107 for a bad path.
        """
        check_path(path)
        return CollectedFile(self, path)

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        """Create a file durably, or not at all.

        Raises:
            ActdsError: E309 when the file exists.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a file that nothing pins (the card), over an older one."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file that no record of the ledger reaches; a missing one is no error."""
        ...

    def read(self, path: str, limit: int | None = None, sha256: str | None = None) -> bytes:
        """Return a file's bytes; one of more than ``limit`` bytes is not read.

        Args:
            path: path in the dataset.
            limit: bytes at most.
            sha256: what the file's digest must be, where that is known: only such files may come
                from a cache. The caller compares it all the same.

        Raises:
            ActdsError: E102 above the limit.
        """
        ...

    def read_ahead(self, paths: Iterable[str], limit: int | None) -> None:
        """Begin to read files that are asked for next, with this limit, where that helps."""
        return

    def open_file(self, path: str, sha256: str | None = None) -> StoredFile:
        """Return a file that is open for many ranged reads; arguments as ``read``.

        Raises:
            ActdsError: E202 other bytes, where the store ``binds``; reading raises it, too, where
                they have changed since.
        """
        ...

    def exists(self, path: str) -> bool:
        """Say whether a file is there."""
        ...

    def size(self, path: str) -> int:
        """Return a file's size in bytes."""
        ...

    def learn_sizes(self, prefix: str) -> None:
        """Learn the sizes of all files below a folder at once, where asking for each is slow."""
        return

    def ask_sizes(self, paths: Iterable[str]) -> None:
        """Ask for sizes that are not known yet, where asking for each in turn is slow."""
        return

    def know(self, names: Iterable[str]) -> None:
        """Take names of files for what ``list`` would find, where nothing can be listed."""
        return

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted."""
        ...

    def keep(self, cache: Cache) -> None:
        """Keep what is read of files of known digest in a cache, where reading again is slow."""
        return

    def local_path(self, path: str) -> Path:
        """Return where a file can be opened on this machine; E009 in an object store."""
        ...

    def remove_temporary(self) -> int:
        """Remove what dead writers left uncommitted; return how many files.

        Only when it is known that no writer is alive.
        """
        ...


def check_path(path: str) -> None:
    """Check every segment of a path in a dataset.

    Raises:
        ActdsError: E107 for a bad one.

    Spec: 0.1 section 2.1.
    """
    if path not in (layout.GENESIS, layout.CARD, layout.SUMS):
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


def local_folder(uri: str | Path) -> Path | None:
    """Return the local folder that a location names, None for a remote one.

    Raises:
        ActdsError: E009 for an unknown scheme, or a remote location in a ``Path``.
    """
    text = str(uri)
    if not text:
        raise ActdsError("E009", "path", got="an empty path", expected="a folder or a URI")
    if text.startswith("file://"):
        return Path(text.removeprefix("file://")).expanduser()
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text).expanduser()
    if scheme[1] in _REMOTE and scheme[2] == "//":
        return None
    # pathlib folds the two slashes of a URI into one.
    if scheme[1] in _REMOTE or scheme[2] == "//":
        raise ActdsError(
            "E009",
            text[:200],
            got="a path" if scheme[1] in _REMOTE else "another scheme",
            expected=f"a local path, file://PATH, s3://BUCKET/PREFIX, or one of {_OTHERS}",
        )
    return Path(text).expanduser()
