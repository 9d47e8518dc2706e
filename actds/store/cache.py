"""A cache of remote files on a local disk: of bounded size, shared by processes, never trusted.

Entries are named by the digest of the file that they are of, so that no entry can become stale.
Each ends with its CRC-32C: one that is damaged is dropped and fetched again. What fails costs the
cache, never the reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np

BLOCK_NBYTES = 1 << 20
"""Bytes of a block: large files are kept in such, from their begin."""

_CRC = struct.Struct("<I")
_TOTAL = struct.Struct("<q")
_KEPT = 7 / 8  # of the bound, after an eviction: so that not every put begins one


class Cache:
    """Blocks and whole files in a folder; the least recently used go first.

    Threads and processes may share the folder. The bytes of all entries together never exceed
    ``nbytes``: puts hold a lock, under which the sum is kept. Reading needs no lock.

    Args:
        folder: the folder, outside any dataset; made when something is put.
        nbytes: the bound.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self._blocks = folder / "blocks"
        self._lock = threading.Lock()
        self._is_off = False

    def __reduce__(self) -> tuple[object, ...]:
        return (Cache, (self.folder, self.nbytes))

    def get(self, sha256: str, name: str) -> memoryview | None:
        """Return an entry; None when it is not there, or damaged, and then it is dropped.

        Args:
            sha256: digest of the whole file.
            name: which part of it.
        """
        path = self._path(sha256, name)
        try:
            data = memoryview(path.read_bytes())
        except OSError:
            return None
        body = data[: -_CRC.size]
        if len(data) < _CRC.size or _crc(body) != data[-_CRC.size :]:
            self.drop(sha256, name)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    def put(self, sha256: str, name: str, data: bytes | memoryview) -> None:
        """Keep an entry, when it fits; a folder that takes none is told once, in a warning."""
        nbytes = len(data) + _CRC.size
        if self._is_off or nbytes > self.nbytes:
            return
        path, draft = self._path(sha256, name), self._blocks / "draft"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as total:
                if path.exists():
                    return
                self._make_room(total, nbytes)
                try:
                    with draft.open("wb") as file:
                        file.write(data)
                        file.write(_crc(data))
                    draft.replace(path)
                finally:
                    draft.unlink(missing_ok=True)
        except OSError as error:
            with self._lock:
                first, self._is_off = not self._is_off, True
            if first:
                got = error.strerror or str(error)
                message = f"the cache {self.folder} keeps nothing more: {got}"
                warnings.warn(message, UserWarning, stacklevel=2)

    def drop(self, sha256: str, name: str) -> None:
        with contextlib.suppress(OSError):
            self._path(sha256, name).unlink()

    def _path(self, sha256: str, name: str) -> Path:
        return self._blocks / sha256[:2] / f"{sha256}-{name}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of all threads and processes; yield the descriptor that has the sum."""
        with self._lock:
            total = os.open(self.folder / "total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(total, fcntl.LOCK_EX)
                yield total
            finally:
                os.close(total)

    def _make_room(self, total: int, nbytes: int) -> None:
        """Add to the sum before anything is written: killed after it, it is too large at most."""
        data = os.pread(total, _TOTAL.size, 0)
        used = _TOTAL.unpack(data)[0] if len(data) == _TOTAL.size else self.nbytes
        if used < 0 or used + nbytes > self.nbytes:
            used = self._evict(nbytes)
        os.pwrite(total, _TOTAL.pack(used + nbytes), 0)

    def _evict(self, nbytes: int) -> int:
        """Remove what was not used for longest until ``nbytes`` fit; return what is left."""
        entries = sorted(_entries(self._blocks))
        used = sum(size for _, size, _ in entries)
        if used + nbytes <= self.nbytes:
            return used
        target = max(0, int(self.nbytes * _KEPT) - nbytes)
        for _, size, path in entries:
            if used <= target:
                break
            with contextlib.suppress(FileNotFoundError):  # dropped meanwhile
                os.unlink(path)
            used -= size
        return used


def _entries(folder: Path) -> Iterator[tuple[int, int, str]]:
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                yield status.st_mtime_ns, status.st_size, path


def _crc(data: bytes | memoryview) -> bytes:
    return _CRC.pack(google_crc32c.value(np.frombuffer(data, np.uint8)))
