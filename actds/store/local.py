"""Local folders as stores: durable create-only files, and reading that follows no link."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from actds.errors import ActdsError, BusyError
from actds.store import buffers
from actds.store.interface import TEMPORARY, Buffer, NewFile, Put, Store, StoredFile, check_path

_MAX_DEPTH = 16  # the deepest path of the format has 8 segments
_ATTEMPTS = 5  # to have a folder and a file in it
_BUFFERS_PER_WRITE = 512  # below IOV_MAX (1024), the most that one writev takes


class LocalFile(StoredFile):
    """A local file that is open for reading ranges, into the buffer of the thread.

    Args:
        path: the file.
        place: how errors name it.

    Raises:
        ActdsError: E104 when it cannot be opened.
    """

    # What was read is still in the processor's cache when it is checked and decoded.
    read_nbytes = 1 << 20

    def __init__(self, path: str | Path, place: str) -> None:
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ActdsError("E104", place, got="no such file", expected="a file") from None
        except OSError as error:
            raise _unreadable(place, error) from error

    @property
    def nbytes(self) -> int:
        """Return the size of the file as it is now."""
        return os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range in the buffer of this thread, kept for the next read."""
        view = buffers.of_thread("read", nbytes).data
        done = 0
        while done < nbytes:
            n = os.preadv(self._fd, [view[done:]], offset + done)
            if n == 0:
                raise EOFError(f"the end at byte {offset + done}")
            done += n
        return view

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class BoundLocalFile(LocalFile):
    """A local file whose bytes have a digest, for as long as the file system says it is unchanged.

    The whole file is hashed when this process opens it for the first time. Inode, size and times
    of change are kept with the digest, and compared at every reading: whoever changes the file
    cannot set back the time of its last change of state.

    Args:
        path: the file.
        place: how errors name it.
        sha256: its digest.

    Raises:
        ActdsError: E104 when it cannot be opened; E202 another digest.
    """

    _known: ClassVar[set[tuple[object, ...]]] = set()
    _hashing: ClassVar[defaultdict[str, threading.Lock]] = defaultdict(threading.Lock)

    def __init__(self, path: str | Path, place: str, sha256: str) -> None:
        super().__init__(path, place)
        self._place, self._sha256 = place, sha256
        self._state = self._now()
        with self._hashing[sha256]:
            if self._state not in self._known:
                digest, end = hashlib.sha256(), self.nbytes
                for offset in range(0, end, self.read_nbytes):
                    digest.update(super().read(offset, min(self.read_nbytes, end - offset)))
                if digest.hexdigest() != sha256:
                    raise self._other(f"sha256 {digest.hexdigest()}")
                self._known.add(self._state)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range; raises E202 when the file was changed since it was hashed."""
        data = super().read(offset, nbytes)
        if self._now() != self._state:
            raise self._other("a file that was changed while it was open")
        return data

    def _now(self) -> tuple[object, ...]:
        s = os.fstat(self._fd)
        return (self._sha256, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    def _other(self, got: str) -> ActdsError:
        return ActdsError("E202", self._place, got=got, expected=self._sha256)


class NewLocalFile(NewFile):
    """A temporary file that gets its name when it is durable.

    Args:
        place: how errors name it.
        target: the path that it gets.
        make_folder: makes a folder, durably.
        name: gives the file at one path another one.
    """

    def __init__(
        self,
        place: str,
        target: Path,
        make_folder: Callable[[Path], None],
        name: Callable[[Path, Path], None],
    ) -> None:
        self.place, self._target = place, target
        self._make_folder, self._name = make_folder, name
        self._temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        self._handle = -1
        self._is_begun = False
        self._digest = hashlib.sha256()
        self._nbytes = 0

    def hash(self, parts: Sequence[Buffer]) -> None:
        for part in parts:
            self._digest.update(part)

    def write(self, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        with self._asked():
            self._begin()
            _write_all(self._handle, views)
        self._nbytes += sum(view.nbytes for view in views)

    def commit(self) -> Put:
        """Sync and close the file, then let it have its name: any of them may fail."""
        with self._asked():
            self._begin()
            os.fsync(self._handle)
            handle, self._handle = self._handle, -1
            os.close(handle)
            self._name(self._temporary, self._target)
            # The bytes are safe under their own name: a temporary file that cannot be removed
            # costs space, not truth.
            self.abandon()
            _sync_folder(self._target.parent)
        return Put(self._nbytes, self._digest.hexdigest())

    def abandon(self) -> None:
        handle, self._handle = self._handle, -1
        with contextlib.suppress(OSError):
            if handle >= 0:
                os.close(handle)
        with contextlib.suppress(OSError):
            if self._is_begun:
                self._temporary.unlink()

    def _begin(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        n_left = _ATTEMPTS
        while not self._is_begun:
            n_left -= 1
            try:
                self._make_folder(self._target.parent)
                self._handle = os.open(self._temporary, flags, 0o644)
            except FileNotFoundError:  # another process has removed the folder, which was empty
                if not n_left:
                    raise
            else:
                self._is_begun = True

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            self.abandon()
            raise ActdsError(
                "E309", self.place, got="a file of this name", expected="none yet"
            ) from None
        except OSError as error:
            # The first failure is the one to report; the file is thrown away in any case.
            self.abandon()
            raise _storage_error(self.place, error) from error


class LocalStore(Store):
    """A dataset in a local folder.

    Args:
        root: the dataset's folder; it may be a link itself, nothing below it may.

    Spec: 0.1 section 8.1.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable: set[Path] = set()

    @property
    def uri(self) -> str:
        return str(self.root)

    def check_create_only(self) -> None:
        """Do nothing: link(2) refuses a taken name on every POSIX file system."""

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        """Create a file atomically and durably: it is whole after a power cut, or not there.

        Args:
            path: path in the dataset.
            parts: the file's bytes, in order.

        Returns:
            Size and digest of what was written.

        Raises:
            ActdsError: E309 when the file exists; E503 when the disk refuses a write, a sync or
                a close, and then nothing more may be committed by this process; E107 a bad path.

        Spec: 0.1 section 8.1.
        """
        file = self.begin(path)
        file.hash(parts)
        file.write(parts)
        return file.commit()

    @property
    def holds_new_files(self) -> bool:
        """Return False: what is written goes to the disk."""
        return False

    def begin(self, path: str) -> NewLocalFile:
        """Return a file to be written piece by piece; it is made when the first bytes come."""
        # A link refuses an existing name, on every POSIX file system; a rename does not.
        return NewLocalFile(path, Path(self._checked(path)), self._make_folder, os.link)

    def replace(self, path: str, data: bytes) -> None:
        """Write a file that nothing pins, over an older one, atomically."""
        file = NewLocalFile(path, Path(self._checked(path)), self._make_folder, os.replace)
        file.write([data])
        file.commit()

    def remove(self, path: str) -> None:
        """Remove a file that no record of the ledger reaches; a missing one is no error."""
        target = Path(self._checked(path))
        try:
            if target.is_dir() and not target.is_symlink():
                raise _not_regular(path, "a folder")
            target.unlink(missing_ok=True)
            if target.parent.is_dir():
                _sync_folder(target.parent)
        except OSError as error:
            raise _storage_error(path, error) from error

    def read(self, path: str, limit: int | None = None, sha256: str | None = None) -> bytes:
        """Return a file's bytes.

        Args:
            path: path in the dataset.
            limit: bytes at most; a longer file is not read at all.
            sha256: not needed here: the caller compares it.

        Raises:
            ActdsError: E104 missing or unreadable; E102 above the limit; E107 a link, no regular
                file, or a bad path.
        """
        nbytes = self.size(path)
        if limit is not None and nbytes > limit:
            raise ActdsError("E102", path, got=f"{nbytes} bytes", expected=f"at most {limit} bytes")
        try:
            return (self.root / path).read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    def open_file(self, path: str, sha256: str | None = None) -> LocalFile:
        """Return a file that is open for many ranged reads."""
        if self.binds and sha256 is not None:
            return BoundLocalFile(self.local_path(path), path, sha256)
        return LocalFile(self.local_path(path), path)

    def exists(self, path: str) -> bool:
        return self._stat(path) is not None

    def size(self, path: str) -> int:
        status = self._stat(path)
        if status is None:
            raise ActdsError("E104", path, got="no such file", expected="a file")
        return status.st_size

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all files below a folder, sorted; of no folder, none.

        Temporary files are left out. A link is listed as a file and never followed, and so is a
        folder that is deeper than any of the format.
        """
        folder = Path(self._checked(prefix)) if prefix else self.root
        if prefix and folder.is_symlink():
            raise _not_regular(prefix, "a link")
        if not folder.is_dir():
            return []
        return sorted(
            path
            for path, entry in walk(folder, prefix)
            if not entry.name.startswith(TEMPORARY) or entry.is_dir(follow_symlinks=False)
        )

    def local_path(self, path: str) -> Path:
        """Return the path of a regular file that is there."""
        self.size(path)
        return self.root / path

    def remove_temporary(self) -> int:
        """Remove what dead writers left uncommitted; return how many files.

        Only for one who knows that no writer is alive.
        """
        paths = [path for path, _ in self.temporary()]
        for path in paths:
            try:
                os.unlink(self.root / path)
            except OSError as error:
                raise _storage_error(path, error) from error
        return len(paths)

    def temporary(self) -> Iterator[tuple[str, int]]:
        """Yield path and size of the files that writers have not committed, or never will."""
        for path, entry in walk(self.root):
            if entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False).st_size

    def _checked(self, path: str) -> str:
        """Return the local path, when no segment is bad and no folder on the way is a link."""
        check_path(path)
        # Strings: a Path for each folder of each file is a third of the time to open a dataset.
        local = root = os.fspath(self.root)
        for part in path.split("/")[:-1]:
            local = os.path.join(local, part)
            if os.path.islink(local):
                raise _not_regular(path, "a link on the way")
        return os.path.join(root, path)

    def _stat(self, path: str) -> os.stat_result | None:
        local = self._checked(path)
        try:
            status = os.lstat(local)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise _not_regular(path, kind)
        return status

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and what is above it, each name durable before a file needs it.

        A folder that another process made may not be synced yet, so each process syncs the name
        of every folder once itself. Folders above the dataset are not ours.
        """
        if folder in self._durable and folder.is_dir():  # an empty one may have been removed
            return
        if folder == self.root:
            made = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            self._make_folder(folder.parent)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            made = True
        if made:
            _sync_folder(folder.parent)
        self._durable.add(folder)


def walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield path and entry of all that is no folder, or a folder deeper than any of the format.

    No link is followed, and no depth of folders is too much; where no folder is, there is nothing.

    Args:
        folder: where to begin.
        prefix: path of that folder.

    Raises:
        ActdsError: E104 a folder that cannot be read.
    """
    waiting = [(os.fspath(folder), prefix)]
    while waiting:
        where, path = waiting.pop()
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    name = f"{path}/{entry.name}" if path else entry.name
                    if entry.is_dir(follow_symlinks=False) and name.count("/") < _MAX_DEPTH:
                        waiting.append((entry.path, name))
                    else:
                        yield name, entry
        except FileNotFoundError:
            continue  # nothing is there, or nothing any more
        except OSError as error:
            expected = "a readable folder"
            got = error.strerror or "?"
            raise ActdsError("E104", path or ".", got=got, expected=expected) from error


def refuse_links(folder: Path) -> None:
    """Refuse a link in a folder that is written further: its target belongs to somebody else.

    Raises:
        ActdsError: E107 the folder, or what is in it, is a link.
    """
    links = [str(folder)] if folder.is_symlink() else []
    links += [entry.path for _, entry in walk(folder) if entry.is_symlink()]
    if links:
        raise ActdsError(
            "E107",
            links[0],
            got="a link",
            expected="what an earlier call left there, or nothing",
            next_step="Remove it, or choose another path.",
        )


def _write_all(handle: int, views: list[memoryview]) -> None:
    first, offset = 0, 0
    while first < len(views):
        batch = [views[first][offset:], *views[first + 1 : first + _BUFFERS_PER_WRITE]]
        written = os.writev(handle, batch)
        if written == 0:
            raise OSError("the disk took no byte")
        offset += written
        while first < len(views) and offset >= views[first].nbytes:
            offset -= views[first].nbytes
            first += 1


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unreadable(path: str, error: OSError) -> ActdsError:
    denied = isinstance(error, PermissionError)
    step = (
        "Read it as the user who wrote it, or ask that user for the right to." if denied else None
    )
    got = error.strerror or str(error)
    return ActdsError("E104", path, got=got, expected="a readable file", next_step=step)


def _not_regular(path: str, got: str) -> ActdsError:
    return ActdsError("E107", path, got=got, expected="a regular file inside the dataset")


def _storage_error(path: str, error: OSError) -> ActdsError:
    return ActdsError("E503", path, got=error.strerror or str(error), expected="a durable write")


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
