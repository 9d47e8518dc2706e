"""S3 as a store that can be written, too: conditional puts that survive lost answers."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from actds.errors import ActdsError
from actds.store.cache import Cache
from actds.store.clients import reason_of, status_of
from actds.store.interface import TEMPORARY, Buffer, Put, check_path
from actds.store.remote import CHECK, MIN_NBYTES_PER_S, RemoteStore, TryAgainError

MAX_PUT_NBYTES = 5 << 30
"""The most that one put carries on S3. A multipart upload would carry more, but the client library
cannot complete one under a condition, and an upload without one overwrites."""


class S3Store(RemoteStore):
    """A dataset under a prefix of a bucket of S3.

    Args:
        uri: ``s3://BUCKET/PREFIX``.
        cache: as of ``RemoteStore``.

    Raises:
        ActdsError: E009 when the URI is malformed; E011 when ``obstore`` is not installed.

    Spec: 0.1 section 8.1.
    """

    def __init__(self, uri: str, cache: Cache | None = None) -> None:
        super().__init__(uri, cache)
        self._create_only = False

    @property
    def read_only(self) -> bool:
        return False

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
                next_step="Write smaller shards: fewer rows_per_shard.",
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

    def remove_temporary(self) -> int:
        """Remove probes that their writers could not remove; return how many."""
        paths = [path for path, _ in self.listed("", temporary=True)]
        for path in paths:
            self._delete(path)
        return len(paths)

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
                    raise TryAgainError(
                        "another put of the same name is under way"
                    ) from None  # 409: another put was under way
                if again and nbytes == len(data) and self._holds(path, data):
                    return
                raise ActdsError(
                    "E309", path, got="an object of this name", expected="none yet"
                ) from None

        self._write(path, put)
        return digest

    def _holds(self, path: str, data: bytes) -> bool:
        step = MIN_NBYTES_PER_S
        return all(
            self.view(path, at, len(data[at : at + step])) == data[at : at + step]
            for at in range(0, len(data), step)
        )

    def _delete(self, path: str) -> None:
        client = self._client(0)
        self._write(path, lambda: self._obstore.delete(client, path))

    def _write(self, path: str, request: Callable[[], Any]) -> None:
        try:
            self._repeat(request)
        except ActdsError as error:
            if error.code != "E104":
                raise
            # Whether the name is taken could not be asked: the state of the store is unknown.
            raise ActdsError(
                "E503", path, got=error.got, expected="a durable write", next_step=CHECK
            ) from error
        except self._errors as error:
            got, status = reason_of(error), status_of(error)
            if status == 501:
                raise ActdsError(
                    "E016", self.uri, got=got, expected="puts with If-None-Match: *"
                ) from error
            raise ActdsError(
                "E503", path, got=got, expected="a durable write", next_step=CHECK
            ) from error
