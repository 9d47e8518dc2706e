"""Clients of object stores and web servers: what a URI names, and how to connect to it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from actds.errors import ActdsError

if TYPE_CHECKING:
    from obstore.store import ClientConfig

CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Scheme:
    """How locations of one scheme look and where their clients are configured.

    Args:
        form: a URI, as it is shown to a person.
        environment: how the names of the variables begin.
        endpoints: those that name another server than the usual one.
    """

    form: str
    environment: str = ""
    endpoints: tuple[str, ...] = ()


_AZURE = ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
SCHEMES = {
    "s3": Scheme(
        "s3://BUCKET/PREFIX", "AWS_", ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    ),
    "gs": Scheme("gs://BUCKET/PREFIX", "GOOGLE_", ("GOOGLE_BASE_URL",)),
    "az": Scheme("az://CONTAINER/PREFIX", "AZURE_", _AZURE),
    "abfs": Scheme("abfs://CONTAINER/PREFIX", "AZURE_", _AZURE),
    "abfss": Scheme("abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX", "AZURE_", _AZURE),
    "https": Scheme("https://HOST/PATH"),
    "http": Scheme("http://HOST/PATH"),
}
"""The schemes of remote datasets."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_CONTAINER = re.compile(
    r"([a-z0-9$][a-z0-9-]{0,62})(?:@([a-z0-9]{3,24})\.(?:dfs|blob)\.[a-z0-9.-]+)?"
)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_SEGMENT = re.compile(r"(?!\.+$)[A-Za-z0-9._=+@-]+")
_STATUS = re.compile(r"status code: ([0-9]{3})([A-Za-z -]*)")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")


@dataclass(frozen=True)
class Location:
    """What a URI names.

    Args:
        scheme: a name of ``SCHEMES``.
        bucket: bucket, container or host.
        prefix: path of the dataset in it, without slashes at the ends.
        account: the account of an Azure URI that names one.
    """

    scheme: str
    bucket: str
    prefix: str
    account: str | None = None


def parse_uri(uri: str) -> Location:
    """Return what a URI names.

    Raises:
        ActdsError: E009 when it is malformed.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    sound = not prefix or all(_SEGMENT.fullmatch(part) for part in prefix.split("/"))
    if scheme in ("s3", "gs"):
        named = _BUCKET.fullmatch(bucket)
    elif scheme in ("http", "https"):
        named = _HOST.fullmatch(bucket)
    else:
        named = _CONTAINER.fullmatch(bucket)
        if named is not None and sound:
            return Location(scheme, named[1], prefix, named[2])
    if named is None or not sound:
        raise ActdsError(
            "E009",
            uri[:200],
            got="a malformed URI",
            expected=f"{SCHEMES[scheme].form} of letters, digits and . _ = + @ -",
        )
    return Location(scheme, bucket, prefix)


def connect(where: Location, timeout_s: int) -> Any:
    """Return a client of a location that never sends a request again by itself.

    Args:
        where: the location; endpoint and credentials come from the environment.
        timeout_s: how long a request may take.

    Raises:
        ActdsError: E009 when the environment cannot be used.
    """
    from obstore import store

    scheme = SCHEMES[where.scheme]
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=timeout_s),
    }
    if where.scheme == "http" or _speaks_plain_http(scheme):
        options["allow_http"] = True
    prefix = where.prefix or None
    always: Any = {"client_options": options, "retry_config": {"max_retries": 0}}
    try:
        if where.scheme == "s3":
            conditional: Any = {"conditional_put": "etag"}
            return store.S3Store(where.bucket, prefix=prefix, config=conditional, **always)
        if where.scheme == "gs":
            return store.GCSStore(where.bucket, prefix=prefix, **always)
        if where.scheme in ("http", "https"):
            url = f"{where.scheme}://{where.bucket}/{where.prefix}".rstrip("/")
            return store.HTTPStore(url, **always)
        account: Any = {} if where.account is None else {"account_name": where.account}
        return store.AzureStore(where.bucket, prefix=prefix, config=account, **always)
    except Exception as error:
        # The library's error about values of the environment; none of its types is documented.
        raise ActdsError(
            "E009",
            f"{where.scheme}://{where.bucket}",
            got=reason_of(error),
            expected=f"a usable {scheme.environment}* environment",
        ) from error


def _speaks_plain_http(scheme: Scheme) -> bool:
    """Return whether the environment names a server of plain HTTP."""
    plain = False
    for name in scheme.endpoints:
        endpoint = os.environ.get(name, "https://")
        if urlsplit(endpoint).scheme not in ("http", "https"):
            # The library would take the whole process down.
            raise ActdsError(
                "E009", name, got=repr(endpoint)[:200], expected="http://HOST or https://HOST"
            )
        plain = plain or endpoint.startswith("http://")
    return plain


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, None when there was no answer."""
    status = _STATUS.search(str(error))
    return int(status[1]) if status else None


def reason_of(error: BaseException) -> str:
    """Return what happened in a few words; the library appends its internal state."""
    text = str(error).partition("\n\nDebug source")[0]
    status = _STATUS.search(text)
    if status is None:
        return " ".join(text.split())[:300]
    code = _CODE.search(text)
    words = f"the store answers {status[1]}{status[2].rstrip()}"
    return f"{words} ({code[1]})" if code else words
