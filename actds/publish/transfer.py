"""A sealed dataset to and from the Hugging Face Hub, every file held against its digest.

The seal is the last to arrive on the Hub, and a pulled folder gets its name when all of it is
checked: what was cut short is no dataset, and the next call continues it. The transport is
``huggingface_hub``'s own; both directions take no listing for truth but for the digests by which
the Hub names its files.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actds.dataset.catalog import Catalog
from actds.dataset.reading import read_catalog, read_dataset
from actds.errors import ActdsError, not_installed
from actds.executor import Executor, ExecutorName, open_executor
from actds.publish.card import put_card
from actds.publish.sealing import check_pin, parse_pin, put_sums
from actds.store import check_path, file_sha256, layout, local_folder, refuse_within_dataset
from actds.store.folders import sync
from actds.store.local import LocalStore, lock_dataset, refuse_links
from actds.text import one_line
from actds.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

_URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?", re.ASCII)
_WAITS_S = (1.0, 4.0, 16.0)
T = TypeVar("T")

PARTIAL = ".partial"
"""How the folder of a pull that is not complete ends."""
_DOCUMENT = re.compile(r"actds\.json|(ledger|runs|seal)/.*|shards/[^/]+/shard\.json")
_SEAL = re.compile(r"seal/[0-9]+(\.dsse\.json|\.sigstore\.json|\.intoto\.jsonl|\.json)")
BATCH_FILES, BATCH_NBYTES = 200, 5_000_000_000
"""What one commit of a push holds at most; a file that is larger has one of its own."""
_N_THREADS = 8
_NOTES = ".cache"  # huggingface_hub's own, in the folder that it fills

Progress = Callable[[int, int, int, int], None]
"""Told of files done, files to do, bytes done and bytes to do."""


class Repository:
    """One repository of the Hub; failures are errors with a code, and never hold the token.

    E101 no such repository, E508 every other failure of a call.
    """

    def __init__(self, uri: str, token: str | None) -> None:
        match = _URI.fullmatch(uri)
        if match is None:
            expected = "hf://datasets/OWNER/NAME[@REVISION]"
            raise ActdsError("E009", "URI", got=repr(uri)[:200], expected=expected)
        try:
            from huggingface_hub import HfApi, get_token
        except ImportError:
            raise not_installed("huggingface_hub", "hf") from None
        self._repo, self._revision = match[1], match[2]
        self.uri = f"hf://datasets/{self._repo}"
        self._secret = token or get_token()
        self._api: HfApi = HfApi(
            # Read here: huggingface_hub takes it once, when it is imported.
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            token=token,
            library_name="actds",
            library_version=__version__,
        )

    def create(self, private: bool) -> None:
        self._ask("", self._api.create_repo, private=private, exist_ok=True)

    def revision(self) -> str:
        return str(self._ask("", self._api.repo_info, revision=self._revision).sha)

    def files(self, revision: str | None = None) -> dict[str, RepoFile]:
        """Files of a revision that may be a dataset's, by path."""

        def listed(repo: str, **options: Any) -> list[Any]:
            return list(self._api.list_repo_tree(repo, **options))

        entries = self._ask("", listed, revision=revision or self._revision, recursive=True)
        return {e.path: e for e in entries if hasattr(e, "blob_id") and _is_path(e.path)}

    def commit(self, paths: list[str], folder: Path, message: str) -> None:
        from huggingface_hub import CommitOperationAdd

        def upload(repo: str, **options: Any) -> None:
            # Made anew for each try: a commit marks its operations as used.
            added = [CommitOperationAdd(path, str(folder / path)) for path in paths]
            self._api.create_commit(repo, added, **options)

        self._ask(f"/{paths[0]}", upload, commit_message=message, revision=self._revision)

    def download(self, path: str, revision: str, folder: Path, *, again: bool) -> None:
        """``again`` starts from its beginning, and from no cache."""
        options = {"revision": revision, "local_dir": folder, "force_download": again}
        self._ask(f"/{path}", self._api.hf_hub_download, filename=path, **options)

    def _ask(self, path: str, method: Callable[..., T], **options: Any) -> T:
        waits = iter(_WAITS_S)
        while True:
            try:
                return method(self._repo, repo_type="dataset", **options)
            # Transports differ by version and by what is installed, and so do their exceptions.
            except Exception as error:
                failure = error
            wait_s = next(waits, None)
            if wait_s is None or not _may_pass(failure):
                # Not chained: a traceback may show the headers, and with them the token.
                raise self._error(self.uri + path, failure) from None
            time.sleep(wait_s)

    def _error(self, place: str, failure: Exception) -> ActdsError:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        if isinstance(failure, RepositoryNotFoundError | RevisionNotFoundError):
            got = "no such repository or revision, or no access to it"
            step: str | None = "Correct the name, or log in: hf auth login, or HF_TOKEN."
            return ActdsError("E101", place, got=got, expected="a dataset", next_step=step)
        words = one_line(_cause(failure), 400)
        if self._secret:
            words = words.replace(self._secret, "(token)")
        login = "Log in with an account that may: hf auth login, or HF_TOKEN."
        step = login if _status(failure) in (401, 403) else None
        expected = "an answer of the Hub"
        return ActdsError("E508", place, got=words, expected=expected, next_step=step)


def _is_path(path: str) -> bool:
    try:
        check_path(path)
    except ActdsError:
        return False
    return path not in ("", ".")


def _may_pass(failure: Exception) -> bool:
    """Whether the next try may fail otherwise, or not at all."""
    status = _status(failure)
    if status is None:
        return not isinstance(failure, ValueError | TypeError)
    return status >= 500 or status in (408, 429)


def _cause(error: BaseException) -> BaseException:
    """What has the Hub's words, else what an exception goes back to."""
    while getattr(error, "response", None) is None and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    """HTTP status behind an exception, None when there was no answer."""
    status = getattr(getattr(_cause(error), "response", None), "status_code", None)
    return None if status is None else int(status)


def is_file(entry: RepoFile, local: Path, sha256: str | None = None) -> bool:
    """Whether a file of the Hub is a local one, which is not read when its ``sha256`` is known."""
    nbytes = local.stat().st_size
    if entry.size != nbytes:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == (sha256 or digest_of(local)))
    return bool(entry.blob_id == digest_of(local, hashlib.sha1(b"blob %d\0" % nbytes)))


def digest_of(local: Path, digest: Any = None) -> str:
    """SHA-256 of a local file, or the digest of a hash that was begun."""
    with local.open("rb") as file:
        return str(hashlib.file_digest(file, lambda: digest or hashlib.sha256()).hexdigest())


@dataclass(frozen=True)
class Transfer:
    """What a push or a pull did.

    Args:
        uri: the repository, as ``hf://datasets/OWNER/NAME``.
        revision: the commit that holds what was pushed, or was pulled.
        path: the local folder.
        n_moved: files that this call moved; the others were there.
        moved_nbytes: their bytes.
    """

    uri: str
    revision: str
    path: str
    digest: str
    n_files: int
    n_moved: int
    moved_nbytes: int


def push(
    path: str | os.PathLike[str],
    uri: str,
    *,
    private: bool = True,
    token: str | None = None,
    progress: Progress | None = None,
    executor: ExecutorName = "threads",
) -> Transfer:
    """Upload a sealed dataset to the Hugging Face Hub.

    Every file is compared with its digest before it leaves, and against the digest that the Hub
    names after. The highest seal and the card are the last commit, so what is on the Hub before
    that is refused as unsealed. Files that are there already are not sent again: a push that was
    cut is continued by the next one, and a dataset that went on sends what is new.

    Args:
        path: the dataset's folder.
        uri: ``hf://datasets/OWNER/NAME``, or with ``@BRANCH``.
        private: make a private repository, where none is there yet.
        token: access token; that of ``HF_TOKEN`` or of the login when None.
        progress: called as it goes on.
        executor: where files are compared with their digests before they leave; they are sent from
            here.

    Raises:
        ActdsError: E306 not sealed; E009 no local folder, or another URI; E202 a file differs from
            its digest, here or on the Hub; E008 the repository holds another dataset, or a later
            state; E508 the Hub refuses or does not answer; E011; and as ``read_catalog``.
    """
    folder = local_folder(os.fspath(path))
    if folder is None:
        raise ActdsError("E009", "PATH", got=os.fspath(path), expected="a local folder")
    store = LocalStore(folder)
    catalog = read_catalog(store)
    if not catalog.is_sealed:
        raise catalog.not_sealed()
    # Only what is missing: the other may have a licence, a verdict, or words of its owner.
    put_card(catalog, [name for name in layout.DERIVED if not store.exists(name)])
    put_sums(catalog)
    hub = Repository(uri, token)
    hub.create(private)
    entries = hub.files()
    files = [name for name in sorted(catalog.reached) if store.exists(name)]
    files = [layout.GENESIS, *files, *layout.BESIDE]
    _need_same_dataset(hub, entries, folder, set(files))
    last = [name for name in files if _SEAL.fullmatch(name) or name in layout.BESIDE]
    # Data before the ledger that names them: what is cut leaves no record of what is not there.
    rest = sorted(set(files) - set(last), key=lambda name: (bool(_DOCUMENT.fullmatch(name)), name))
    sending = _Sending(hub, store, catalog.pins, progress)
    todo = [name for name in rest if not sending.has_arrived(name, entries)]
    final = [name for name in last if not sending.has_arrived(name, entries)]
    sending.expect(todo + final)
    with open_executor(executor) as on:
        for batch in _batches(todo, store):
            words = f"actds: {len(batch)} files of dataset {catalog.genesis.dataset}"
            sending.send(batch, words, on)
        if todo:
            sending.check(rest)
        if final:
            sending.send(final, f"actds: seal {catalog.digest}", on)
            sending.check(last)
    moved = todo + final
    return Transfer(
        uri=hub.uri,
        revision=hub.revision(),
        path=str(folder),
        digest=catalog.digest,
        n_files=len(files),
        n_moved=len(moved),
        moved_nbytes=sum(map(store.size, moved)),
    )


def pull(
    uri: str,
    out: str | os.PathLike[str],
    *,
    seal: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Transfer:
    """Download a dataset from the Hugging Face Hub into a folder that is whole or not there.

    Ledger, manifests and seals come first and are read as any dataset's are; they name the data
    files with their digests, and each is compared with its own as it arrives. Until all are there
    they are in ``OUT.partial``, from which the next call continues.

    Args:
        uri: ``hf://datasets/OWNER/NAME``, or with ``@REVISION``, a branch, tag or commit.
        out: the folder to make.
        seal: digest of a seal, ``sha256:HEX``, from a paper or a lock file: the dataset must have
            that seal, or later ones that extend it.
        token: access token; that of ``HF_TOKEN`` or of the login when None.
        progress: called as it goes on.

    Raises:
        ActdsError: E008 OUT exists; E101 no such repository, or no dataset in it; E306 it is not
            sealed, as while a push goes on; E104 a file is missing there; E202 a file has
            another digest; E804, E805 it does not extend the pinned seal; E009 another URI, or a
            pin that is no digest; E010 another pull works on OUT; E508 the Hub refuses or does not
            answer; E011; and as ``read_catalog``.
    """
    pinned = None if seal is None else parse_pin(seal)
    target = local_folder(os.fspath(out))
    if target is None:
        raise ActdsError("E009", "OUT", got=os.fspath(out), expected="a local folder")
    refuse_within_dataset(target)
    if os.path.lexists(target):
        got, step = "a path that exists", "Choose another folder."
        raise ActdsError("E008", str(target), got=got, expected="none yet", next_step=step)
    hub = Repository(uri, token)
    revision = hub.revision()
    entries = hub.files(revision)
    if layout.GENESIS not in entries:
        raise ActdsError("E101", hub.uri, got=f"no {layout.GENESIS}", expected="a dataset")
    partial = target.with_name(target.name + PARTIAL)
    refuse_links(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(os.close, lock_dataset(partial))
        for path in LocalStore(partial).list():  # what this revision does not have
            if path not in entries and not path.startswith(f"{_NOTES}/"):
                (partial / path).unlink()
        fetching = _Fetching(hub, revision, partial, entries, progress)
        documents = [name for name in entries if _DOCUMENT.fullmatch(name)]
        fetching.fetch(dict.fromkeys(n for n in (*documents, *layout.BESIDE) if n in entries))
        data = _data(_read_documents(partial, pinned))
        fetching.fetch(data)
        catalog = read_catalog(LocalStore(partial))
        shutil.rmtree(partial / _NOTES, ignore_errors=True)
        partial.rename(target)
    return Transfer(
        uri=hub.uri,
        revision=revision,
        path=str(target),
        digest=catalog.digest,
        n_files=fetching.n_files,
        n_moved=fetching.n_moved,
        moved_nbytes=fetching.moved_nbytes,
    )


def _data(catalog: Catalog) -> dict[str, str | None]:
    """What a dataset needs beside its documents, each with its digest."""
    pins = catalog.pins
    needed = (catalog.reached - {*catalog.superseded}) | pins.keys()
    return {path: pins.get(path) for path in sorted(needed) if not _DOCUMENT.fullmatch(path)}


def _read_documents(partial: Path, pinned: str | None) -> Catalog:
    """The catalogue of a folder whose data files are still to come."""
    catalog = read_dataset(LocalStore(partial))
    for _, finding in catalog.findings:
        to_come = finding.code in ("E104", "E201") and finding.place in catalog.files
        if finding.severity == "error" and not to_come:
            raise finding.error()
    if not catalog.is_sealed:
        got, step = "no seal over every chain", "Its push has not ended: wait, and pull again."
        raise ActdsError("E306", "seal", got=got, expected="a seal", next_step=step)
    if pinned is not None:
        check_pin(catalog, pinned)
    return catalog


def _need_same_dataset(
    hub: Repository, entries: dict[str, RepoFile], folder: Path, files: set[str]
) -> None:
    """Refuse a repository with another dataset, or with more of this one's history."""
    genesis = entries.get(layout.GENESIS)
    later = [p for p in entries if p.startswith(("ledger/", "seal/")) and p not in files]
    if genesis is not None and not is_file(genesis, folder / layout.GENESIS):
        got, step = "another dataset", "Push to another repository."
    elif later:
        got, step = f"{later[0]}, which is not here", "Pull it: the Hub has what this folder lacks."
    else:
        return
    raise ActdsError("E008", hub.uri, got=got, expected="this dataset, or none", next_step=step)


def _batches(paths: Iterable[str], store: LocalStore) -> Iterator[list[str]]:
    batch: list[str] = []
    nbytes = 0
    for path in paths:
        size = store.size(path)
        if batch and (len(batch) == BATCH_FILES or nbytes + size > BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(path)
        nbytes += size
    if batch:
        yield batch


class _Sending:
    """The files of a push: which are there, those that leave, and whether they arrived."""

    def __init__(
        self, hub: Repository, store: LocalStore, pins: dict[str, str], progress: Progress | None
    ) -> None:
        self._hub, self._store, self._pins, self._progress = hub, store, pins, progress
        self._done = self._todo = (0, 0)

    def has_arrived(self, path: str, entries: dict[str, RepoFile]) -> bool:
        entry = entries.get(path)
        return entry is not None and is_file(entry, self._store.root / path, self._pins.get(path))

    def expect(self, paths: list[str]) -> None:
        self._todo = (len(paths), sum(map(self._store.size, paths)))

    def send(self, paths: list[str], message: str, executor: Executor) -> None:
        """Commit files together, after a look at their bytes: E202 one is not what was pinned."""
        pinned = [path for path in paths if path in self._pins]
        digests = executor.map(functools.partial(file_sha256, self._store), pinned)
        for path, digest in zip(pinned, digests, strict=True):
            if digest != self._pins[path]:
                raise ActdsError("E202", path, got=digest, expected=self._pins[path])
        self._hub.commit(paths, self._store.root, message)
        sizes = sum(map(self._store.size, paths))
        self._done = (self._done[0] + len(paths), self._done[1] + sizes)
        if self._progress is not None:
            self._progress(self._done[0], self._todo[0], self._done[1], self._todo[1])

    def check(self, paths: list[str]) -> None:
        """E202 when a file on the Hub differs from the local one now, or is not there."""
        entries = self._hub.files()
        for path in paths:
            if not self.has_arrived(path, entries):
                got = "other bytes on the Hub" if path in entries else "no such file"
                place, expected = f"{self._hub.uri}/{path}", "the bytes of this folder"
                step = "Push again: it is sent anew, and the dataset stays unsealed there."
                raise ActdsError("E202", place, got=got, expected=expected, next_step=step)


class _Fetching:
    """The files of a pull, fetched by threads, each checked before it counts."""

    def __init__(
        self,
        hub: Repository,
        revision: str,
        folder: Path,
        entries: dict[str, RepoFile],
        progress: Progress | None,
    ) -> None:
        self._hub, self._revision, self._folder = hub, revision, folder
        self._entries, self._progress = entries, progress
        self.n_files = self.n_moved = self.moved_nbytes = 0
        self._done = self._total = 0

    def fetch(self, paths: dict[str, str | None]) -> None:
        """Each has the digest that a document pins, or None; E104 it is not there, E202 other."""
        for path in paths:
            if path not in self._entries:
                place = f"{self._hub.uri}/{path}"
                raise ActdsError("E104", place, got="no such file", expected="a file")
        self._total += sum(self._entries[path].size for path in paths)
        n_files = self.n_files + len(paths)
        executor = ThreadPoolExecutor(_N_THREADS)
        try:
            for path, moved in zip(paths, executor.map(self._get, paths.items()), strict=True):
                nbytes = self._entries[path].size
                self.n_files += 1
                self._done += nbytes
                self.n_moved += moved
                self.moved_nbytes += nbytes * moved
                if self._progress is not None:
                    self._progress(self.n_files, n_files, self._done, self._total)
        finally:
            executor.shutdown(cancel_futures=True)

    def _get(self, item: tuple[str, str | None]) -> bool:
        """Fetch one file, twice where it arrives with other bytes; return whether it was."""
        path, sha256 = item
        local = self._folder / path
        if local.is_file() and not local.is_symlink() and self._is_whole(path, sha256):
            return False
        for again in (False, True):
            local.unlink(missing_ok=True)
            self._hub.download(path, self._revision, self._folder, again=again)
            if self._is_whole(path, sha256):
                sync(local)
                return True
        got, expected = f"{digest_of(local)} at arrival, twice", "the digest that the Hub names"
        local.unlink()
        step = "Pull again: all that arrived whole is kept."
        raise ActdsError("E202", path, got=got, expected=sha256 or expected, next_step=step)

    def _is_whole(self, path: str, sha256: str | None) -> bool:
        """By the digest that is pinned, or else the one the Hub names."""
        local = self._folder / path
        return is_file(self._entries[path], local) if sha256 is None else digest_of(local) == sha256
