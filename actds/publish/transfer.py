"""A sealed dataset to and from the Hugging Face Hub, every file held against its digest.

The seal is the last to arrive on the Hub, and a pulled folder gets its name when all of it is
checked: what was cut short is no dataset, and the next call continues it. The transport is
``huggingface_hub``'s own; both directions take no listing for truth but for the digests by which
the Hub names its files.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actds.dataset.reading import Catalog, read_dataset
from actds.errors import ActdsError
from actds.executor import Executor, ExecutorName, open_executor
from actds.format.shard import data_files
from actds.publish.card import put_card
from actds.publish.repository import Repository, digest_of, is_file
from actds.store import file_sha256, layout, local_folder, refuse_within_dataset
from actds.store.local import LocalStore, lock_dataset, refuse_links
from actds.trust.pin import check_pin, parse_pin
from actds.trust.sums import put_sums

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

PARTIAL = ".partial"
"""How the folder of a pull that is not complete ends."""
_DOCUMENT = re.compile(r"actds\.json|(ledger|runs|seal)/.*|shards/[^/]+/shard\.json")
_SEAL = re.compile(r"seal/[0-9]+(\.dsse|\.sigstore)?\.json")
BATCH_FILES, BATCH_NBYTES = 200, 5_000_000_000
"""What one commit of a push holds at most; a file that is larger has one of its own."""
_N_THREADS = 8
_NOTES = ".cache"  # huggingface_hub's own, in the folder that it fills

Progress = Callable[[int, int, int, int], None]
"""Told of files done, files to do, bytes done and bytes to do."""


@dataclass(frozen=True)
class Transfer:
    """What a push or a pull did.

    Args:
        uri: the repository, as ``hf://datasets/OWNER/NAME``.
        revision: the commit that holds what was pushed, or was pulled.
        path: the local folder.
        digest: digest of the dataset.
        n_files: files of the dataset.
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
            state; E508 the Hub refuses or does not answer; E011; and as ``Catalog.read``.
    """
    folder = local_folder(os.fspath(path))
    if folder is None:
        raise ActdsError("E009", "PATH", got=os.fspath(path), expected="a local folder")
    store = LocalStore(folder)
    catalog = Catalog.read(store)
    if not catalog.is_sealed:
        raise catalog.not_sealed()
    # Only what is missing: the other may have a licence, a verdict, or words of its owner.
    put_card(catalog, [name for name in layout.DERIVED if not store.exists(name)])
    put_sums(catalog)
    hub = Repository(uri, token)
    hub.create(private)
    there = hub.files()
    files = [name for name in sorted(catalog.reached) if store.exists(name)]
    files = [layout.GENESIS, *files, *layout.BESIDE]
    _need_same_dataset(hub, there, folder, set(files))
    sending = _Sending(hub, store, catalog.pins, progress)
    last = [name for name in files if _SEAL.fullmatch(name) or name in layout.BESIDE]
    # Data before the ledger that names them: what is cut leaves no record of what is not there.
    rest = sorted(set(files) - set(last), key=lambda name: (bool(_DOCUMENT.fullmatch(name)), name))
    todo = [name for name in rest if not sending.is_there(name, there)]
    final = [name for name in last if not sending.is_there(name, there)]
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
            answer; E011; and as ``Catalog.read``.
    """
    pinned = None if seal is None else parse_pin(seal)
    target = local_folder(os.fspath(out))
    if target is None:
        raise ActdsError("E009", "OUT", got=os.fspath(out), expected="a local folder")
    refuse_within_dataset(target)
    if os.path.lexists(target):
        raise ActdsError(
            "E008", str(target), got="a path that exists", expected="none yet",
            next_step="Choose another folder.",
        )  # fmt: skip
    hub = Repository(uri, token)
    revision = hub.revision()
    there = hub.files(revision)
    if layout.GENESIS not in there:
        raise ActdsError("E101", hub.uri, got=f"no {layout.GENESIS}", expected="a dataset")
    partial = target.with_name(target.name + PARTIAL)
    refuse_links(partial)
    partial.mkdir(parents=True, exist_ok=True)
    lock = lock_dataset(partial)
    try:
        _forget_other_revisions(partial, there)
        fetching = _Fetching(hub, revision, partial, there, progress)
        documents = [name for name in there if _DOCUMENT.fullmatch(name)]
        fetching.fetch({name: None for name in [*documents, *layout.BESIDE] if name in there})
        catalog = _read_documents(partial, pinned)
        data = _data(catalog)
        fetching.fetch(data)
        catalog = Catalog.read(LocalStore(partial))
        shutil.rmtree(partial / _NOTES, ignore_errors=True)
        partial.rename(target)
    finally:
        os.close(lock)
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
    """Return what a dataset needs beside its documents, each with its digest."""
    replaced = {path for manifest in catalog.replaced for path in data_files(manifest)}
    pins = catalog.pins
    needed = (catalog.reached - replaced) | pins.keys()
    return {path: pins.get(path) for path in sorted(needed) if not _DOCUMENT.fullmatch(path)}


def _forget_other_revisions(partial: Path, there: dict[str, RepoFile]) -> None:
    """Remove what an earlier call fetched and this revision does not have."""
    for path in LocalStore(partial).list():
        if path not in there and not path.startswith(f"{_NOTES}/"):
            (partial / path).unlink()


def _read_documents(partial: Path, pinned: str | None) -> Catalog:
    """Return the catalogue of a folder whose data files are still to come."""
    catalog = read_dataset(LocalStore(partial))
    for _, finding in catalog.findings:
        to_come = finding.code in ("E104", "E201") and finding.place in catalog.files
        if finding.severity == "error" and not to_come:
            raise finding.error()
    if not catalog.is_sealed:
        raise ActdsError(
            "E306", "seal", got="no seal over every chain", expected="a seal",
            next_step="Its push has not ended: wait, and pull again.",
        )  # fmt: skip
    if pinned is not None:
        check_pin(catalog, pinned)
    return catalog


def _need_same_dataset(
    hub: Repository, there: dict[str, RepoFile], folder: Path, files: set[str]
) -> None:
    """Refuse a repository with another dataset, or with more of this one's history."""
    genesis = there.get(layout.GENESIS)
    later = [path for path in there if path.startswith(("ledger/", "seal/")) and path not in files]
    if genesis is not None and not is_file(genesis, folder / layout.GENESIS):
        got, step = "another dataset", "Push to another repository."
    elif later:
        got, step = f"{later[0]}, which is not here", "Pull it: the Hub has what this folder lacks."
    else:
        return
    raise ActdsError("E008", hub.uri, got=got, expected="this dataset, or none", next_step=step)


def _batches(paths: Iterable[str], store: LocalStore) -> Iterator[list[str]]:
    """Yield lists of paths, each of one commit."""
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
    """The files of a push: which are there, those that leave, and whether they arrived.

    Args:
        hub: the repository.
        store: the dataset.
        pins: digests that documents pin.
        progress: called after each commit.
    """

    def __init__(
        self, hub: Repository, store: LocalStore, pins: dict[str, str], progress: Progress | None
    ) -> None:
        self._hub, self._store, self._pins, self._progress = hub, store, pins, progress
        self._done = self._todo = (0, 0)

    def is_there(self, path: str, there: dict[str, RepoFile]) -> bool:
        """Return whether the Hub has a file, by its digest."""
        found = there.get(path)
        return found is not None and is_file(found, self._store.root / path, self._pins.get(path))

    def expect(self, paths: list[str]) -> None:
        """Note what will be sent."""
        self._todo = (len(paths), sum(map(self._store.size, paths)))

    def send(self, paths: list[str], message: str, executor: Executor) -> None:
        """Commit files together, after a look at their bytes by an executor.

        Raises:
            ActdsError: E202 a file is not what was committed; as ``Repository.ask``.
        """
        pinned = [path for path in paths if path in self._pins]
        read = functools.partial(file_sha256, self._store)
        for path, found in zip(pinned, executor.map(read, pinned), strict=True):
            if found != self._pins[path]:
                raise ActdsError("E202", path, got=found, expected=self._pins[path])
        self._hub.commit(paths, self._store.root, message)
        sizes = sum(map(self._store.size, paths))
        self._done = (self._done[0] + len(paths), self._done[1] + sizes)
        if self._progress is not None:
            self._progress(self._done[0], self._todo[0], self._done[1], self._todo[1])

    def check(self, paths: list[str]) -> None:
        """Hold files against the digests that the Hub names now.

        Raises:
            ActdsError: E202 one differs or is not there.
        """
        there = self._hub.files()
        for path in paths:
            if not self.is_there(path, there):
                found = there.get(path)
                got = "no such file" if found is None else "other bytes on the Hub"
                raise ActdsError(
                    "E202", f"{self._hub.uri}/{path}", got=got, expected="the bytes of this folder",
                    next_step="Push again: it is sent anew, and the dataset stays unsealed there.",
                )  # fmt: skip


class _Fetching:
    """The files of a pull, fetched by threads, each checked before it counts.

    Args:
        hub: the repository.
        revision: the commit.
        folder: where they go.
        there: the files of that commit.
        progress: called after each file.
    """

    def __init__(
        self,
        hub: Repository,
        revision: str,
        folder: Path,
        there: dict[str, RepoFile],
        progress: Progress | None,
    ) -> None:
        self._hub, self._revision, self._folder = hub, revision, folder
        self._there, self._progress = there, progress
        self.n_files = self.n_moved = self.moved_nbytes = 0
        self._done = self._total = 0

    def fetch(self, paths: dict[str, str | None]) -> None:
        """Fetch files, each with the digest that a document pins, or None for the Hub's own.

        Raises:
            ActdsError: E104 a file is not there; E202 it has another digest; as ``Repository.ask``.
        """
        for path in paths:
            if path not in self._there:
                place = f"{self._hub.uri}/{path}"
                raise ActdsError("E104", place, got="no such file", expected="a file")
        self._total += sum(self._there[path].size for path in paths)
        n_files = self.n_files + len(paths)
        executor = ThreadPoolExecutor(_N_THREADS)
        try:
            for path, moved in zip(paths, executor.map(self._one, paths.items()), strict=True):
                nbytes = self._there[path].size
                self.n_files += 1
                self._done += nbytes
                self.n_moved += moved
                self.moved_nbytes += nbytes * moved
                if self._progress is not None:
                    self._progress(self.n_files, n_files, self._done, self._total)
        finally:
            executor.shutdown(cancel_futures=True)

    def _one(self, item: tuple[str, str | None]) -> bool:
        """Fetch one file, twice where it arrives with other bytes; return whether it was."""
        path, sha256 = item
        local = self._folder / path
        if local.is_file() and not local.is_symlink() and self._is_whole(path, sha256):
            return False
        for again in (False, True):
            local.unlink(missing_ok=True)
            self._hub.download(path, self._revision, self._folder, again=again)
            if self._is_whole(path, sha256):
                _sync(local)
                return True
        found = digest_of(local)
        local.unlink()
        raise ActdsError(
            "E202",
            path,
            got=f"{found} at arrival, twice",
            expected=sha256 or "the digest that the Hub names",
            next_step="Pull again: all that arrived whole is kept.",
        )

    def _is_whole(self, path: str, sha256: str | None) -> bool:
        """Return whether a file has the digest that is pinned, or else the one the Hub names."""
        local = self._folder / path
        return is_file(self._there[path], local) if sha256 is None else digest_of(local) == sha256


def _sync(local: Path) -> None:
    with local.open("rb") as file:
        os.fsync(file.fileno())
