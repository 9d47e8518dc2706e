"""Remote datasets, read in ranges: S3, Google Cloud Storage, Azure and web servers.

One request at a time is sent and every repetition is ours, none the client library's: only so
can a put of S3 know whether it was sent before, and all of them are patient in the same way.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from actds.errors import ActdsError, not_installed
from actds.store.cache import BLOCK_NBYTES, Cache
from actds.store.clients import connect, parse_uri, reason_of, status_of
from actds.store.interface import TEMPORARY, Buffer, Put, Store, StoredFile, check_path

REQUEST_TIMEOUT_S = 60
"""Time of a request with a small body; larger ones get twice as much until they fit."""
MIN_NBYTES_PER_S = 4 << 20
N_READERS = 16
N_PARTS_AHEAD = 4

LIKELY_NBYTES = 1 << 28  # of an object of unknown size: a table at most
AHEAD_NBYTES = 1 << 26  # of files that wait in memory until they are asked for
WHOLE = "whole"  # the name of a whole file in a cache
CHECK = "Set credentials, region and endpoint as the store wants them, then run it again."

PATIENCE_S = 120.0
"""How long a request is repeated, while the store does not answer or answers 429 or 5xx."""
FIRST_PATIENCE_S = 10.0
"""The same before the first answer: it may be the wrong endpoint."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0

_pid: int | None = None  # the process whose threads carry the requests

Answer = TypeVar("Answer")
Listing = list[tuple[str, int]]  # a name: inside the class, list is a method


class RemoteStore(Store):
    """A dataset below a prefix of a bucket or a path of a web server, for reading.

    Endpoint, region and credentials come from the environment; plain HTTP is spoken only when
    the URI or the endpoint says ``http://`` itself.

    Args:
        uri: a location of a scheme of ``actds.store.clients``.
        cache: where files of known digest are kept; None keeps nothing.

    Raises:
        ActdsError: E009 when the URI is malformed; E011 when ``obstore`` is not installed.

    Spec: 0.1 section 8.1.
    """

    def __init__(self, uri: str, cache: Cache | None = None) -> None:
        self.where, self.cache = parse_uri(uri), cache
        try:
            import obstore
        except ImportError:
            raise not_installed("obstore", "cloud", uri[:200]) from None
        self._uri = uri.rstrip("/")
        self._obstore = obstore
        self._clients: dict[int, Any] = {}
        self._sizes: dict[str, int] = {}
        self._names: set[str] | None = None
        self.ahead: dict[tuple[str, int | None], tuple[Future[bytes], int]] = {}
        self._coming: dict[tuple[str, int | None], int] = {}  # their sizes, in the order of need
        self._waiting = 0  # bytes of those ahead
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._hashing: dict[str, threading.Lock] = {}  # by the digest of an object
        self._digests: dict[str, list[bytes]] = {}  # of its blocks
        self._answered = False

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.uri, self.cache), {"binds": self.binds})

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def read_only(self) -> bool:
        return True

    @property
    def can_list(self) -> bool:
        """Return whether the server lists what is there: a web server does not."""
        return self.where.scheme not in ("http", "https")

    @property
    def n_readers(self) -> int:
        """Return how many requests at a time are needed to hide how long each one takes."""
        return N_READERS

    def check_create_only(self) -> None:
        self._refuse()

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        self._refuse()

    def replace(self, path: str, data: bytes) -> None:
        self._refuse()

    def remove(self, path: str) -> None:
        self._refuse()

    def remove_temporary(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ActdsError(
            "E009",
            self.uri[:200],
            got=f"a {self.where.scheme}:// location, which is for reading",
            expected="a local folder or s3://BUCKET/PREFIX",
            next_step="Write to a local folder or to S3, then copy the whole folder there.",
        )

    def read(self, path: str, limit: int | None = None, sha256: str | None = None) -> bytes:
        """Return an object's bytes; a large one of known size comes in ranges side by side."""
        check_path(path)
        if self.cache is not None and sha256 is not None:
            return self._read_cached(self.cache, path, limit, sha256)
        with self._lock:
            begun = self.ahead.pop((path, limit), None)
            self._coming.pop((path, limit), None)
        if begun is None:
            return self._get(path, limit)
        self._begin(begun[1])
        return begun[0].result()

    def _read_cached(self, cache: Cache, path: str, limit: int | None, sha256: str) -> bytes:
        kept = cache.get(sha256, WHOLE)
        if kept is not None and (limit is None or len(kept) <= limit):
            return bytes(kept)
        data = self._get(path, limit)
        if hashlib.sha256(data).hexdigest() == sha256:
            cache.put(sha256, WHOLE, data)
        return data

    def read_ahead(self, paths: Iterable[str], limit: int | None) -> None:
        """Begin to read files, many at a time; ``read`` hands each of them out once.

        Args:
            paths: paths in the dataset, in the order in which they are read; those of no known or
                of a large size are left alone.
            limit: the limit that ``read`` will be called with; None for files of known digest,
                which are left alone where there is a cache.
        """
        with self._lock:
            for begun, _ in self.ahead.values():
                begun.cancel()
            self.ahead.clear()
            self._coming.clear()
            self._waiting = 0
        if limit is None and self.cache is not None:
            return
        wanted = list(paths)
        if not self.can_list:
            self.ask_sizes(wanted)
        largest = min(AHEAD_NBYTES // 4, LIKELY_NBYTES if limit is None else limit)
        for path in wanted:
            nbytes = self._sizes.get(path, LIKELY_NBYTES)
            if nbytes <= largest:
                self._coming[path, limit] = nbytes
        self._begin()

    def _begin(self, freed: int = 0) -> None:
        """Begin to read what comes next, as long as not too much waits."""
        with self._lock:
            self._waiting -= freed
            while self._coming:
                key, nbytes = next(iter(self._coming.items()))
                if self._waiting + nbytes > AHEAD_NBYTES:
                    return
                del self._coming[key]
                self._waiting += nbytes
                self.ahead[key] = self._threads().submit(self._get, *key), nbytes

    def _threads(self) -> ThreadPoolExecutor:
        check_process(self.uri)
        self._pool = self._pool or ThreadPoolExecutor(N_READERS, thread_name_prefix="actds-ahead")
        return self._pool

    def _get(self, path: str, limit: int | None) -> bytes:
        nbytes = self._sizes.get(path, LIKELY_NBYTES)
        step = StoredFile.read_nbytes
        if path in self._sizes and nbytes > 2 * step and (limit is None or nbytes <= limit):
            parts = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
            return b"".join(self._threads().map(lambda part: self.view(path, *part), parts))
        client = self._client(nbytes)

        def get() -> bytes:
            answer = self._obstore.get(client, path)
            nbytes = answer.meta["size"]
            if limit is not None and nbytes > limit:
                raise ActdsError(
                    "E102", path, got=f"{nbytes} bytes", expected=f"at most {limit} bytes"
                )
            data = bytes(answer.bytes())
            if len(data) != nbytes:
                raise TryAgainError(f"the answer ends after {len(data)} of {nbytes} bytes")
            return data

        return self._ask(path, get)

    def view(self, path: str, offset: int, nbytes: int) -> memoryview:
        """Return a range, as it came from the network; errors as ``RemoteFile.read``."""
        if not nbytes:
            return memoryview(b"")
        client = self._client(nbytes)

        def get() -> memoryview:
            try:
                data = self._obstore.get_range(client, path, start=offset, length=nbytes)
            except self._errors as error:
                if status_of(error) == 416:
                    raise EOFError(f"the end before byte {offset}") from None
                raise
            if len(data) != nbytes:
                end = offset + len(data)
                if end < self._sizes.get(path, 0):
                    raise TryAgainError(f"the answer ends after {len(data)} of {nbytes} bytes")
                raise EOFError(f"the end at byte {end}")
            return memoryview(data)

        return self._ask(path, get)

    def open_file(self, path: str, sha256: str | None = None) -> StoredFile:
        """Return an object that is open for many ranged reads."""
        if sha256 is None:
            return RemoteFile(self, path)
        if self.cache is None:
            file = RemoteFile(self, path)
        else:
            file = CachedFile(self, path, self.cache, sha256)
        return BoundFile(file, path, self._blocks_of(file, path, sha256)) if self.binds else file

    def _blocks_of(self, file: RemoteFile, path: str, sha256: str) -> list[bytes]:
        """Return the digest of every block of an object, all of which is read once for them."""
        with self._lock:
            hashing = self._hashing.setdefault(sha256, threading.Lock())
        with hashing:
            if sha256 not in self._digests:
                whole, blocks = hashlib.sha256(), list[bytes]()
                for data in self._parts(file):
                    whole.update(data)
                    for at in range(0, len(data), BLOCK_NBYTES):
                        blocks.append(hashlib.sha256(data[at : at + BLOCK_NBYTES]).digest())
                if whole.hexdigest() != sha256:
                    raise ActdsError(
                        "E202", path, got=f"sha256 {whole.hexdigest()}", expected=sha256
                    )
                self._digests[sha256] = blocks
        return self._digests[sha256]

    def _parts(self, file: RemoteFile) -> Iterator[memoryview]:
        """Yield an object from its begin to its end; the next parts are on their way meanwhile."""
        step, end = 8 * BLOCK_NBYTES, file.nbytes
        coming: deque[Future[memoryview]] = deque()
        for offset in range(0, end, step):
            coming.append(self._threads().submit(file.read, offset, min(step, end - offset)))
            if len(coming) == N_PARTS_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    def exists(self, path: str) -> bool:
        check_path(path)
        return self._head(path) is not None

    def size(self, path: str) -> int:
        """Return an object's size in bytes, learned before or asked now."""
        check_path(path)
        nbytes = self._sizes.get(path)
        if nbytes is None:
            nbytes = self._head(path)
        if nbytes is None:
            raise ActdsError("E104", path, got="no such object", expected="an object")
        return nbytes

    def learn_sizes(self, prefix: str) -> None:
        """Learn the sizes of all objects below a prefix from a listing, and forget older ones.

        An object that the listing lacks is asked for by itself: a listing proves nothing.
        """
        for path in [p for p in self._sizes if not prefix or p.startswith(f"{prefix}/")]:
            self._sizes.pop(path, None)
        if self.can_list:
            self._sizes.update(self.listed(prefix))

    def ask_sizes(self, paths: Iterable[str]) -> None:
        """Ask for the sizes that are not known yet, many at a time."""

        def ask(path: str) -> None:
            check_path(path)
            nbytes = self._head(path)
            if nbytes is not None:
                self._sizes[path] = nbytes

        unknown = [path for path in dict.fromkeys(paths) if path not in self._sizes]
        if unknown:
            list(self._threads().map(ask, unknown))

    def know(self, names: Iterable[str]) -> None:
        """Take names from a seal for what a web server would list."""
        self._names = None if self.can_list else set(names)

    def keep(self, cache: Cache) -> None:
        """Keep what is read of files of known digest in a cache from now on."""
        self.cache = cache

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all objects below a prefix, sorted; temporary ones are left out.

        Of a web server, those that ``know`` was told.

        Raises:
            ActdsError: E009 a web server, which was told nothing.
        """
        if self.can_list:
            return sorted(path for path, _ in self.listed(prefix))
        if self._names is None:
            raise ActdsError(
                "E009",
                self.uri[:200],
                got="a web server, which lists no files",
                expected="a local folder or an object store",
                next_step="Copy the dataset to a disk first.",
            )
        return sorted(n for n in self._names if not prefix or n.startswith(f"{prefix}/"))

    def local_path(self, path: str) -> Path:
        """Refuse: an object has no path on this machine."""
        raise ActdsError(
            "E009",
            f"{self.uri}/{path}"[:200],
            got="an object",
            expected="a file on this machine",
            next_step="Read it through actds.open, or copy the dataset to a disk first.",
        )

    def _head(self, path: str) -> int | None:
        def head() -> int | None:
            try:
                return int(self._obstore.head(self._client(0), path)["size"])
            except FileNotFoundError:
                return None

        return self._ask(path, head)

    def listed(self, prefix: str, temporary: bool = False) -> Listing:
        """Return paths and sizes below a prefix; with ``temporary``, those of temporary objects."""
        if prefix:
            check_path(prefix)

        def collect() -> Listing:
            listed = self._obstore.list(self._client(0), prefix or None, chunk_size=1000)
            return [(meta["path"], meta["size"]) for chunk in listed for meta in chunk]

        listed = self._ask(prefix or self.uri, collect)
        return [
            (path, nbytes)
            for path, nbytes in listed
            if path.rpartition("/")[2].startswith(TEMPORARY) == temporary
        ]

    def _client(self, nbytes: int) -> Any:
        timeout_s = REQUEST_TIMEOUT_S
        while timeout_s < nbytes / MIN_NBYTES_PER_S:
            timeout_s *= 2
        if timeout_s not in self._clients:
            self._clients[timeout_s] = connect(self.where, timeout_s)
        return self._clients[timeout_s]

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, FileNotFoundError, ValueError)

    def _ask(self, path: str, request: Callable[[], Answer]) -> Answer:
        try:
            return self._repeat(request)
        except ActdsError:
            raise
        except FileNotFoundError as error:
            no_bucket = any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))
            got = reason_of(error) if no_bucket else "no such object"
            raise ActdsError("E104", path, got=got, expected="an object") from None
        except self._errors as error:
            raise ActdsError(
                "E104", path, got=reason_of(error), expected="an answer", next_step=CHECK
            ) from error

    def _repeat(self, request: Callable[[], Answer]) -> Answer:
        check_process(self.uri)
        for wait_s in waits(self._answered):
            try:
                answer = request()
                self._answered = True
                return answer
            except (self._obstore.exceptions.BaseError, TryAgainError) as error:
                if not may_pass(error) or wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("the last wait is None")


class RemoteFile(StoredFile):
    """An object that is read in ranges; threads may share it.

    Args:
        store: its store.
        path: path in the dataset.

    Raises:
        ActdsError: E104 when it is not there.
    """

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._store, self._path = store, path
        self._nbytes = store.size(path)

    @property
    def nbytes(self) -> int:
        """Return the size of the object when it was opened."""
        return self._nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        return self._store.view(self._path, offset, nbytes)

    def close(self) -> None:
        """Do nothing: no connection belongs to a file."""


class CachedFile(RemoteFile):
    """An object of known digest whose blocks are kept in a cache.

    A block is not checked when it arrives, for nothing says what it must be: the reader of the
    array compares the checksum of each chunk, and lets a damaged one be fetched again.

    Args:
        store: its store.
        path: path in the dataset.
        cache: the cache.
        sha256: digest of the object.

    Raises:
        ActdsError: E104 when it is not there.
    """

    def __init__(self, store: RemoteStore, path: str, cache: Cache, sha256: str) -> None:
        super().__init__(store, path)
        self._cache, self._sha256 = cache, sha256

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range; what the cache lacks of it is asked for in as few ranges as possible."""
        if not nbytes or offset + nbytes > self.nbytes:
            return super().read(offset, nbytes)
        numbers = self._blocks(offset, nbytes)
        blocks = {n: self._cache.get(self._sha256, str(n)) for n in numbers}
        missing = [n for n in numbers if blocks[n] is None]
        while missing:
            first, last = missing[0], missing[0]
            while last + 1 in missing:
                last += 1
            start, stop = first * BLOCK_NBYTES, min((last + 1) * BLOCK_NBYTES, self.nbytes)
            data = super().read(start, stop - start)
            for n in range(first, last + 1):
                at = n * BLOCK_NBYTES - start
                blocks[n] = data[at : at + BLOCK_NBYTES]
                self._cache.put(self._sha256, str(n), data[at : at + BLOCK_NBYTES])
            missing = [n for n in missing if n > last]
        joined = b"".join(block for block in blocks.values() if block is not None)
        base = offset - numbers[0] * BLOCK_NBYTES
        return memoryview(joined)[base : base + nbytes]

    def forget(self, offset: int, nbytes: int) -> bool:
        """Drop the blocks of a damaged range."""
        for n in self._blocks(offset, nbytes):
            self._cache.drop(self._sha256, str(n))
        return True

    def _blocks(self, offset: int, nbytes: int) -> range:
        return range(offset // BLOCK_NBYTES, (offset + nbytes - 1) // BLOCK_NBYTES + 1)


class BoundFile(StoredFile):
    """An object whose every byte is compared with the digest of the whole, whatever is answered.

    Args:
        file: the object.
        place: how errors name it.
        blocks: the digest of each of its blocks.
    """

    def __init__(self, file: RemoteFile, place: str, blocks: list[bytes]) -> None:
        self._file, self._place, self._blocks = file, place, blocks

    @property
    def nbytes(self) -> int:
        """Return the size of the object when it was opened."""
        return self._file.nbytes

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return a range of the blocks that it touches, each of which has its digest.

        Raises:
            ActdsError: E202 other bytes than when the whole object was read.
        """
        if not nbytes or offset + nbytes > self.nbytes:
            return self._file.read(offset, nbytes)
        first, last = offset // BLOCK_NBYTES, (offset + nbytes - 1) // BLOCK_NBYTES
        start, stop = first * BLOCK_NBYTES, min((last + 1) * BLOCK_NBYTES, self.nbytes)
        data = self._file.read(start, stop - start)
        if not self._holds(data, first) and self._file.forget(start, stop - start):
            data = self._file.read(start, stop - start)
        if not self._holds(data, first):
            got = f"other bytes in [{start}, {stop}) than before"
            raise ActdsError("E202", self._place, got=got, expected="those of the pinned object")
        return data[offset - start : offset - start + nbytes]

    def _holds(self, data: memoryview, first: int) -> bool:
        parts = (data[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES))
        return all(
            hashlib.sha256(part).digest() == self._blocks[first + i] for i, part in enumerate(parts)
        )

    def forget(self, offset: int, nbytes: int) -> bool:
        """Drop what a cache holds of a damaged range."""
        return self._file.forget(offset, nbytes)

    def close(self) -> None:
        self._file.close()


class TryAgainError(ValueError):
    """An answer that may be another one a little later."""


def waits(answered: bool) -> Iterator[float | None]:
    """Yield how long to wait before each repetition, None when the patience is over.

    Args:
        answered: whether the store has ever answered.
    """
    patience_s = PATIENCE_S if answered else FIRST_PATIENCE_S
    end, wait_s = time.monotonic() + patience_s, FIRST_WAIT_S
    while time.monotonic() + wait_s < end:
        yield wait_s * random.uniform(0.5, 1)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    yield None


def check_process(uri: str) -> None:
    """Refuse to send from a forked process: the threads that carry requests are not in it."""
    global _pid
    if _pid is None:
        _pid = os.getpid()
    if _pid != os.getpid():
        raise ActdsError(
            "E009",
            uri,
            got="a process that was forked after its parent used an object store",
            expected="one that was spawned",
            next_step='Use the start method "spawn": multiprocessing_context="spawn".',
        )


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    if isinstance(error, TryAgainError):
        return True
    status = status_of(error)
    if status is not None:
        return status in (408, 409, 429) or (status >= 500 and status != 501)
    # A request that the client could not even make, and a server that does not serve ranges.
    hopeless = ("builder error", "Range request not supported")
    return type(error).__name__ == "GenericError" and not any(h in str(error) for h in hopeless)
