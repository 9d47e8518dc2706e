"""S3 as a store: conditional puts that survive lost answers, and ranged reads.

One request at a time is sent and every repetition is ours, none the client library's: only so
can a put know whether it was sent before, and the object in its way may be its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actds.errors import ActdsError
from actds.store import TEMPORARY, Buffer, Put, Store, StoredFile, check_path

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import S3Store as Client

__all__ = ["MAX_PUT_NBYTES", "S3Store"]

MAX_PUT_NBYTES = 5 << 30
"""The most that one put carries on S3. A multipart upload would carry more, but the client library
cannot complete one under a condition, and an upload without one overwrites."""

REQUEST_TIMEOUT_S = 60
"""Time of a request with a small body; larger ones get twice as much until they fit."""
MIN_NBYTES_PER_S = 4 << 20
N_READERS = 16

_LIKELY_NBYTES = 1 << 28  # of an object of unknown size: a table at most
_SMALL_NBYTES = 1 << 16  # of a document that may wait in memory until it is asked for
_CHECK = "Check endpoint, credentials and network; see docs/object-stores.md."

CONNECT_TIMEOUT_S = 10
PATIENCE_S = 120.0
"""How long a request is repeated, while the store does not answer or answers 429 or 5xx."""
FIRST_PATIENCE_S = 10.0
"""The same before the first answer: it may be the wrong endpoint."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_SEGMENT = re.compile(r"(?!\.+$)[A-Za-z0-9._=+@-]+")
_STATUS = re.compile(r"status code: ([0-9]{3})([A-Za-z -]*)")
_S3_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_pid: int | None = None  # the process whose threads carry the requests

Answer = TypeVar("Answer")
_Listing = list[tuple[str, int]]  # a name: inside the class, list is a method


class S3Store(Store):
    """A dataset under a prefix of a bucket.

    Endpoint, region and credentials come from the environment (``AWS_ENDPOINT_URL``,
    ``AWS_REGION``, ``AWS_ACCESS_KEY_ID`` …); plain HTTP is spoken only when the endpoint says
    ``http://`` itself.

    Args:
        uri: ``s3://BUCKET/PREFIX``.

    Raises:
        ActdsError: E009 when the URI is malformed; E011 when ``obstore`` is not installed.

    Spec: 0.1 section 8.1.
    """

    def __init__(self, uri: str) -> None:
        self.bucket, self.prefix = parse_uri(uri)
        try:
            import obstore
        except ImportError:
            raise ActdsError(
                "E011",
                uri[:200],
                got="the package obstore is not installed",
                expected="the extra actds[s3]",
                next_step='pip install "actds[s3]"',
            ) from None
        self._obstore = obstore
        self._clients: dict[int, Client] = {}
        self._sizes: dict[str, int] = {}
        self.ahead: dict[tuple[str, int | None], Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._create_only = self._answered = False

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to open the store again in another process."""
        return (S3Store, (self.uri,))

    @property
    def uri(self) -> str:
        """Return ``s3://BUCKET/PREFIX``."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def n_readers(self) -> int:
        """Return how many requests at a time are needed to hide how long each one takes."""
        return N_READERS

    def check_create_only(self) -> None:
        """Put a probe object twice; the second put must fail. The probe is removed.

        Raises:
            ActdsError: E016 when the second put succeeds or the store does not know the
                condition; E503 when the store takes no put at all.

        Spec: 0.1 section 8.1.
        """
        if self._create_only:
            return
        probe = f"{TEMPORARY}probe-{secrets.token_hex(8)}"
        try:
            self.create(probe, b"first")
            try:
                self.create(probe, b"second")
            except ActdsError as error:
                if error.code != "E309":
                    raise
            else:
                raise ActdsError(
                    "E016",
                    self.uri,
                    got="a second put with If-None-Match: * that overwrote the first",
                    expected="412 Precondition Failed",
                )
        finally:
            # Who may not delete leaves a temporary object behind, which readers pass over.
            with contextlib.suppress(ActdsError):
                self._delete(probe)
        self._create_only = True

    def put_new(self, path: str, parts: Sequence[Buffer]) -> Put:
        """Create an object with one conditional put: it is whole and durable, or not there.

        A put that fails without an answer, or with 409, 429 or 5xx, is sent again for up to two
        minutes. When the name is then taken, and only then, the object is compared: with exactly
        our bytes (size and SHA-256) it is the one that we sent, or equals it, and
        the put has succeeded. That is safe for ledger records, because a record names its
        chain, which one process made up at random, and its number; the one other program that
        ever writes there is a fence, whose bytes differ. Two fences of the same bytes say the
        same. A name that is taken at the first attempt is another writer's, whatever it holds.

        Args:
            path: path in the dataset.
            parts: the object's bytes, in order; at most 5 GiB together.

        Returns:
            Size and digest of what was written.

        Raises:
            ActdsError: E309 when the object exists; E503 when the store refuses it, does not
                answer or the object is too large, and then nothing more may be committed by this
                process; E107 a bad path.

        Spec: 0.1 section 8.1.
        """
        check_path(path)
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if nbytes > MAX_PUT_NBYTES:
            raise ActdsError(
                "E503",
                path,
                got=f"{nbytes} bytes",
                expected=f"at most {MAX_PUT_NBYTES}, what one conditional put carries",
                next_step="Write smaller shards: --rows-per-shard.",
            )
        data = b"".join(parts)
        digest = self.create(path, data)
        self._sizes[path] = nbytes
        return Put(nbytes, digest)

    def replace(self, path: str, data: bytes) -> None:
        """Write an object that nothing pins, over an older one."""
        check_path(path)
        self._sizes.pop(path, None)
        client = self._client(len(data))
        self._write(path, lambda: self._obstore.put(client, path, data, use_multipart=False))

    def remove(self, path: str) -> None:
        """Remove an object that no record of the ledger reaches; a missing one is no error."""
        check_path(path)
        self._sizes.pop(path, None)
        self._delete(path)

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Return an object's bytes."""
        check_path(path)
        begun = self.ahead.pop((path, limit), None)
        return self._get(path, limit) if begun is None else begun.result()

    def read_ahead(self, paths: Iterable[str], limit: int) -> None:
        """Begin to read small documents, many at a time; ``read`` hands each of them out once.

        Args:
            paths: paths in the dataset; those of no known or of a large size are left alone.
            limit: the limit that ``read`` will be called with.
        """
        check_process(self.uri)
        for begun in self.ahead.values():
            begun.cancel()
        self.ahead.clear()
        self._pool = self._pool or ThreadPoolExecutor(N_READERS, thread_name_prefix="actds-ahead")
        for path in paths:
            if self._sizes.get(path, _LIKELY_NBYTES) <= _SMALL_NBYTES:
                self.ahead[path, limit] = self._pool.submit(self._get, path, limit)

    def _get(self, path: str, limit: int | None) -> bytes:
        client = self._client(self._sizes.get(path, _LIKELY_NBYTES))

        def get() -> bytes:
            found = self._obstore.get(client, path)
            nbytes = found.meta["size"]
            if limit is not None and nbytes > limit:
                raise ActdsError(
                    "E102", path, got=f"{nbytes} bytes", expected=f"at most {limit} bytes"
                )
            return bytes(found.bytes())

        return self._ask(path, get)

    def view(self, path: str, offset: int, nbytes: int) -> memoryview:
        """Return a range of an object, as it came from the network; errors as ``S3File.read``."""
        if not nbytes:
            return memoryview(b"")
        client = self._client(nbytes)

        def get() -> memoryview:
            try:
                found = self._obstore.get_range(client, path, start=offset, length=nbytes)
            except self._errors as error:
                if status_of(error) == 416:
                    raise EOFError(f"the end before byte {offset}") from None
                raise
            if len(found) != nbytes:
                raise EOFError(f"the end at byte {offset + len(found)}")
            return memoryview(found)

        return self._ask(path, get)

    def open_file(self, path: str) -> S3File:
        """Return an object that is open for many ranged reads."""
        return S3File(self, path)

    def exists(self, path: str) -> bool:
        """Say whether an object is there."""
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
        self._sizes.update(self.listed(prefix))

    def list(self, prefix: str = "") -> list[str]:
        """Return the paths of all objects below a prefix, sorted; temporary ones are left out."""
        return sorted(path for path, _ in self.listed(prefix))

    def local_path(self, path: str) -> Path:
        """Refuse: an object has no path on this machine."""
        raise ActdsError(
            "E009",
            f"{self.uri}/{path}"[:200],
            got="an object",
            expected="a file on this machine",
            next_step="Read it through actds.open, or copy the dataset to a disk first.",
        )

    def remove_temporary(self) -> int:
        """Remove probes that their writers could not remove; return how many."""
        found = [path for path, _ in self.listed("", temporary=True)]
        for path in found:
            self._delete(path)
        return len(found)

    def create(self, path: str, data: bytes) -> str:
        """Put conditionally until there is an answer; return the digest."""
        digest = hashlib.sha256(data).hexdigest()
        client = self._client(len(data))
        sent_before = False

        def put() -> None:
            nonlocal sent_before
            again, sent_before = sent_before, True
            try:
                self._obstore.put(client, path, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                nbytes = self._head(path)
                if nbytes is None:
                    raise ConflictError(path) from None  # 409: another put was under way
                if again and nbytes == len(data) and self._holds(path, data):
                    return
                raise ActdsError(
                    "E309", path, got="an object of this name", expected="none yet"
                ) from None

        self._write(path, put)
        return digest

    def _holds(self, path: str, data: bytes) -> bool:
        """Return whether an object of the same size has exactly these bytes."""
        step = MIN_NBYTES_PER_S
        return all(
            self.view(path, at, len(data[at : at + step])) == data[at : at + step]
            for at in range(0, len(data), step)
        )

    def _delete(self, path: str) -> None:
        client = self._client(0)
        self._write(path, lambda: self._obstore.delete(client, path))

    def _head(self, path: str) -> int | None:
        def head() -> int | None:
            try:
                return int(self._obstore.head(self._client(0), path)["size"])
            except FileNotFoundError:
                return None

        return self._ask(path, head)

    def listed(self, prefix: str, temporary: bool = False) -> _Listing:
        """Return paths and sizes below a prefix; with ``temporary``, those of temporary objects."""
        if prefix:
            check_path(prefix)

        def collect() -> _Listing:
            found = self._obstore.list(self._client(0), prefix or None, chunk_size=1000)
            return [(meta["path"], meta["size"]) for chunk in found for meta in chunk]

        found = self._ask(prefix or self.uri, collect)
        return [
            one for one in found if one[0].rpartition("/")[2].startswith(TEMPORARY) == temporary
        ]

    def _client(self, nbytes: int) -> Client:
        """Return a client whose requests may take as long as a body of a size needs."""
        timeout_s = REQUEST_TIMEOUT_S
        while timeout_s < nbytes / MIN_NBYTES_PER_S:
            timeout_s *= 2
        if timeout_s not in self._clients:
            self._clients[timeout_s] = connect(self.bucket, self.prefix, timeout_s)
        return self._clients[timeout_s]

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return (self._obstore.exceptions.BaseError, FileNotFoundError, ValueError)

    def _ask(self, path: str, request: Callable[[], Answer]) -> Answer:
        """Return the answer to a request that changes nothing."""
        try:
            return self._repeat(request)
        except ActdsError:
            raise
        except FileNotFoundError as error:
            got = reason_of(error) if "NoSuchBucket" in str(error) else "no such object"
            raise ActdsError("E104", path, got=got, expected="an object") from None
        except self._errors as error:
            raise ActdsError(
                "E104", path, got=reason_of(error), expected="an answer", next_step=_CHECK
            ) from error

    def _write(self, path: str, request: Callable[[], Any]) -> None:
        """Send a request that changes something."""
        try:
            self._repeat(request)
        except ActdsError as error:
            if error.code != "E104":
                raise
            # Whether the name is taken could not be asked: the state of the store is unknown.
            raise ActdsError(
                "E503", path, got=error.got, expected="a durable write", next_step=_CHECK
            ) from error
        except self._errors as error:
            got, status = reason_of(error), status_of(error)
            if status == 501:
                raise ActdsError(
                    "E016", self.uri, got=got, expected="puts with If-None-Match: *"
                ) from error
            raise ActdsError(
                "E503", path, got=got, expected="a durable write", next_step=_CHECK
            ) from error

    def _repeat(self, request: Callable[[], Answer]) -> Answer:
        check_process(self.uri)
        for wait_s in waits(self._answered):
            try:
                answer = request()
                self._answered = True
                return answer
            except (self._obstore.exceptions.BaseError, ConflictError) as error:
                if not may_pass(error) or wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("the last wait is None")


class S3File(StoredFile):
    """An object that is read in ranges; threads may share it.

    Args:
        store: its store.
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
        """Return a range, as it came from the network."""
        return self._store.view(self._path, offset, nbytes)

    def close(self) -> None:
        """Do nothing: no connection belongs to a file."""


class ConflictError(ValueError):
    """Another put of the same name was under way; who won is unknown yet."""


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


def connect(bucket: str, prefix: str, timeout_s: int) -> Client:
    """Return a client of the environment's endpoint that never sends a request again by itself.

    Raises:
        ActdsError: E009 when the environment cannot be used.
    """
    from obstore.store import S3Store as Client

    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=timeout_s),
    }
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        endpoint = os.environ.get(name, "https://")
        if not endpoint.startswith(("http://", "https://")):
            # The library would take the whole process down.
            raise ActdsError(
                "E009", name, got=repr(endpoint)[:200], expected="http://HOST or https://HOST"
            )
        if endpoint.startswith("http://"):
            options["allow_http"] = True
    try:
        return Client(
            bucket,
            prefix=prefix or None,
            config={"conditional_put": "etag"},
            client_options=options,
            retry_config={"max_retries": 0},
        )
    except Exception as error:
        # The library's error about values of the environment; none of its types is documented.
        raise ActdsError(
            "E009", f"s3://{bucket}", got=reason_of(error), expected="a usable AWS_* environment"
        ) from error


def parse_uri(uri: str) -> tuple[str, str]:
    """Return bucket and prefix."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.removesuffix("/")
    sound = all(_SEGMENT.fullmatch(part) for part in prefix.split("/")) if prefix else True
    if not (uri.startswith("s3://") and _BUCKET.fullmatch(bucket) and sound):
        raise ActdsError(
            "E009",
            uri[:200],
            got="a malformed URI",
            expected="s3://BUCKET/PREFIX of letters, digits and . _ = + @ -",
        )
    return bucket, prefix


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


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, None when there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    status = status_of(error)
    if status is not None:
        return status in (408, 409, 429) or (status >= 500 and status != 501)
    if "builder error" in str(error):  # a request that the client could not even make
        return False
    return type(error).__name__ in ("GenericError", "ConflictError")


def reason_of(error: BaseException) -> str:
    """Return what happened in a few words; the library appends its internal state."""
    if isinstance(error, ConflictError):
        return "another put of the same name is under way"
    text = str(error).partition("\n\nDebug source")[0]
    status = _STATUS.search(text)
    if status is None:
        return " ".join(text.split())[:300]
    code = _S3_CODE.search(text)
    words = f"the store answers {status[1]}{status[2].rstrip()}"
    return f"{words} ({code[1]})" if code else words
