"""An object that is read like a file, in ranges."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from actds.store.s3 import S3Store

__all__ = ["S3File"]


class S3File:
    """An object that is read in ranges; threads may share it.

    Args:
        store: where it stands.
        path: path in the dataset.

    Raises:
        ActdsError: E104 when it is not there.
    """

    def __init__(self, store: S3Store, path: str) -> None:
        self._store, self._path = store, path
        self._nbytes = store.size(path)

    @property
    def nbytes(self) -> int:
        """Return the size of the object when it was opened."""
        return self._nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range, as it came from the network.

        Raises:
            EOFError: the object ends before the range does.
            ActdsError: E104 when the object is gone or the store does not answer.
        """
        return self._store.view(self._path, offset, nbytes)

    def close(self) -> None:
        """Do nothing: no connection belongs to a file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
