"""Requests to S3: how a client is made, what may be sent again, and errors in a few words."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from actds.errors import ActdsError

if TYPE_CHECKING:
    from obstore.store import ClientConfig
    from obstore.store import S3Store as Client

__all__ = [
    "ConflictError",
    "check_process",
    "connect",
    "may_pass",
    "parse_uri",
    "reason_of",
    "status_of",
    "waits",
]

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


class ConflictError(ValueError):
    """Another put of the same name was under way; nobody knows yet who has it."""


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
        # Whatever the library says of the environment's values; none of its types is documented.
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
    """Return the HTTP status that an error tells of, None when there was no answer."""
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
