"""A dataset repository of the Hugging Face Hub, through ``huggingface_hub``.

Its transport is that package's own. Every failure becomes an error with a code, and none of them
holds the token.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actds.errors import ActdsError, not_installed
from actds.store import check_path
from actds.text import one_line
from actds.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

_URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", re.ASCII)
_WAITS_S = (1.0, 4.0, 16.0)

T = TypeVar("T")


class Repository:
    """One repository of the Hub; failures are errors with a code, and never hold the token.

    Args:
        uri: ``hf://datasets/OWNER/NAME``, or with ``@REVISION``.
        token: access token, or None.

    Raises:
        ActdsError: E009 another URI; E011 without the package ``huggingface_hub``.
    """

    def __init__(self, uri: str, token: str | None) -> None:
        found = _URI.fullmatch(uri)
        if found is None:
            raise ActdsError(
                "E009", "URI", got=repr(uri)[:200], expected="hf://datasets/OWNER/NAME[@REVISION]"
            )
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError:
            raise not_installed("huggingface_hub", "hf") from None
        self.repo, self._asked = found[1], found[2]
        self.uri = f"hf://datasets/{self.repo}"
        self._secret = token or get_token()
        self.api: HfApi = HfApi(
            # Read here: huggingface_hub takes it once, when it is imported.
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            token=token,
            library_name="actds",
            library_version=__version__,
        )

    def create(self, private: bool) -> None:
        """Make the repository, where it is not there."""
        self.ask(
            self.uri,
            lambda: self.api.create_repo(
                self.repo, repo_type="dataset", private=private, exist_ok=True
            ),
        )

    def revision(self) -> str:
        """Return the commit that the revision stands for now."""
        info = self.ask(
            self.uri,
            lambda: self.api.repo_info(self.repo, repo_type="dataset", revision=self._asked),
        )
        return str(info.sha)

    def files(self, revision: str | None = None) -> dict[str, RepoFile]:
        """Return the files of a revision that may be a dataset's, by their paths."""

        def listed() -> list[Any]:
            tree = self.api.list_repo_tree(
                self.repo, repo_type="dataset", revision=revision or self._asked, recursive=True
            )
            return [entry for entry in tree if hasattr(entry, "blob_id")]

        return {entry.path: entry for entry in self.ask(self.uri, listed) if _is_path(entry.path)}

    def commit(self, paths: list[str], folder: Path, message: str) -> None:
        """Upload files and commit them together."""
        from huggingface_hub import CommitOperationAdd

        def upload() -> None:
            self.api.create_commit(
                self.repo,
                # Made anew for each try: a commit marks its operations as used.
                [
                    CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(folder / path))
                    for path in paths
                ],
                commit_message=message,
                repo_type="dataset",
                revision=self._asked,
            )

        self.ask(f"{self.uri}/{paths[0]}", upload)

    def download(self, path: str, revision: str, folder: Path, *, again: bool) -> None:
        """Download a file into a folder; ``again`` from its beginning, and from no cache."""
        self.ask(
            f"{self.uri}/{path}",
            lambda: self.api.hf_hub_download(
                self.repo,
                path,
                repo_type="dataset",
                revision=revision,
                local_dir=folder,
                force_download=again,
            ),
        )

    def ask(self, place: str, call: Callable[[], T]) -> T:
        """Return what a call of ``huggingface_hub`` returns; a passing failure is tried again.

        Raises:
            ActdsError: E101 no such repository; E508 every other failure.
        """
        waits = iter(_WAITS_S)
        while True:
            try:
                return call()
            # Transports differ by version and by what is installed, and so do their exceptions.
            except Exception as error:
                failure = error
            wait_s = next(waits, None)
            if wait_s is None or not _may_pass(failure):
                # Not chained: a traceback may show the headers, and with them the token.
                raise self._error(place, failure) from None
            time.sleep(wait_s)

    def _error(self, place: str, failure: Exception) -> ActdsError:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        if isinstance(failure, RepositoryNotFoundError | RevisionNotFoundError):
            return ActdsError(
                "E101",
                place,
                got="no such repository or revision, or no access to it",
                expected="a dataset",
                next_step="Correct the name, or log in: hf auth login, or HF_TOKEN.",
            )
        words = one_line(_cause(failure), 400)
        if self._secret:
            words = words.replace(self._secret, "(token)")
        login = "Log in with an account that may: hf auth login, or HF_TOKEN."
        return ActdsError(
            "E508",
            place,
            got=words,
            expected="an answer of the Hub",
            next_step=login if _status(failure) in (401, 403) else None,
        )


def _is_path(path: str) -> bool:
    try:
        check_path(path)
    except ActdsError:
        return False
    return path not in ("", ".")


def _may_pass(failure: Exception) -> bool:
    """Return whether a failure may be another one, or none, at the next try."""
    status = _status(failure)
    if status is None:
        return not isinstance(failure, ValueError | TypeError)
    return status >= 500 or status in (408, 429)


def _cause(error: BaseException) -> BaseException:
    """Return what has the Hub's words, else what an exception goes back to."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    """Return the HTTP status behind an exception, None when there was no answer."""
    status = getattr(getattr(_cause(error), "response", None), "status_code", None)
    return None if status is None else int(status)


def is_file(there: RepoFile, local: Path, sha256: str | None = None) -> bool:
    """Return whether a file of the Hub is a local one, by the digest that the Hub names.

    Args:
        there: the file on the Hub.
        local: the local file.
        sha256: its digest, where that is known: then the file is not read.
    """
    if there.size != local.stat().st_size:
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == (sha256 or digest_of(local)))
    return bool(there.blob_id == git_oid(local))


def git_oid(local: Path) -> str:
    """Return the name that git gives a file."""
    return digest_of(local, hashlib.sha1(b"blob %d\0" % local.stat().st_size))


def digest_of(local: Path, digest: Any = None) -> str:
    """Return the digest of a local file: its SHA-256, or that of a hash that was begun."""
    digest = hashlib.sha256() if digest is None else digest
    with local.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())
