"""A store whose puts are timed: what the disk takes, without encoding, hashing or waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from actds.store import Buffer, NewFile, Put, Store
from actds_writers.monitor.meters import DiskMeter


class TimedStore:
    """A store that tells a meter how long each of its files takes to be written and synced.

    Files that are put as a whole are small, or an object store's: their digests count as well.
    """

    def __init__(self, store: Store, meter: DiskMeter) -> None:
        self._store, self._meter = store, meter

    @classmethod
    def around(cls, store: Store, meter: DiskMeter) -> Store:
        """Return a store that does all that another one does, timed."""
        return cast(Store, cls(store, meter))

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        """Create a file, timed."""
        key = object()
        try:
            with self._meter.asked(key):
                return self._store.put_new(path, parts)
        finally:
            self._meter.ended(key)

    def begin(self, path: str) -> NewFile:
        """Return a file to be written piece by piece, timed."""
        return _TimedFile(self._store.begin(path), self._meter)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)


class _TimedFile(NewFile):
    def __init__(self, file: NewFile, meter: DiskMeter) -> None:
        self._file, self._meter = file, meter

    def hash(self, parts: Sequence[Buffer]) -> None:
        self._file.hash(parts)

    def write(self, parts: Sequence[Buffer]) -> None:
        with self._meter.asked(self):
            self._file.write(parts)

    def commit(self) -> Put:
        try:
            with self._meter.asked(self):
                return self._file.commit()
        finally:
            self._meter.ended(self)

    def abandon(self) -> None:
        self._file.abandon()
        self._meter.ended(self)
