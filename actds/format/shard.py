"""Shards: rows of one phase that were committed whole, read back lazily."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.errors import ActdsError
from actds.format import arrays, canonical, schema, tables
from actds.format.positions import position_key
from actds.format.schema import FileEntry, ShardManifest
from actds.store import Store, file_sha256, layout

TOKENS = "tokens.parquet"
GROUP_METADATA = "acts.zarr/zarr.json"
HOOK_CHOICES = "capture.hook_choices"
"""Field of the run record of a run whose requests choose the hooks of their rows."""


def row_order(n_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Return which buffer row each row of a permuted shard is, int64 ``(n_rows,)``.

    Spec: 0.1 section 5.3.
    """
    return np.random.Generator(np.random.Philox(key=seed)).permutation(n_rows)


def row_set_sha256(request: npt.ArrayLike, position: npt.ArrayLike) -> str:
    """Return the digest of a set of rows, whatever their order.

    Args:
        request: request of each row, ``(n_rows,)``.
        position: position of each row, ``(n_rows,)``.

    Spec: 0.1 section 5.2.
    """
    keys = np.sort(position_key(request, position))
    return hashlib.sha256(keys.astype("<u8", copy=False).data).hexdigest()


def files_root(files: list[FileEntry]) -> str:
    """Return the Merkle root of a manifest's file entries.

    Spec: 0.1 section 5.2.
    """
    ordered = sorted(files, key=lambda entry: entry.path)
    return canonical.merkle_root([schema.to_bytes(entry) for entry in ordered])


def file_names(hooks: list[str]) -> list[str]:
    """Return the paths of all files of a shard but its manifest, sorted.

    Spec: 0.1 section 5.1.
    """
    names = [TOKENS, GROUP_METADATA]
    for hook in hooks:
        folder = layout.array_dir(hook)
        names += [f"{folder}/zarr.json", f"{folder}/{arrays.SHARD_PATH}"]
    return sorted(names)


def data_files(manifest: ShardManifest) -> dict[str, FileEntry]:
    """Return the entries of a shard's files by their path in the dataset."""
    folder = layout.shard_dir(manifest.shard)
    return {f"{folder}/{entry.path}": entry for entry in manifest.files}


class Shard:
    """A committed shard, read file by file when asked.

    Args:
        store: the dataset's store.
        manifest: the shard's manifest.
        unknown: columns of the token table of which its run says that nothing is known.
        parse: what makes a table of the bytes of its file, as ``Catalog.parse``.

    Attributes: the arguments by their names, and of the manifest ``name``, ``run``, ``phase`` (of
    all rows), ``n_rows`` and ``hooks``.
    """

    def __init__(
        self,
        store: Store,
        manifest: ShardManifest,
        unknown: frozenset[str] = frozenset(),
        parse: tables.Parse = tables.from_parquet,
    ) -> None:
        self.store = store
        self.manifest = manifest
        self.unknown = unknown
        self._parse = parse
        self.name, self.run, self.phase = manifest.shard, manifest.run, manifest.phase
        self.n_rows, self.hooks = manifest.n_rows, manifest.hooks
        self._files = data_files(manifest)

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {self.n_rows} {self.phase} rows of run {self.run}>"

    def tokens(self, columns: list[str] | None = None) -> pa.Table:
        """Return the token table, one row per activation row, same order.

        Args:
            columns: columns to read, all when None.

        Raises:
            ActdsError: E104 missing; E201, E202 changed since the commit; E203 another number of
                rows; E109, E206 no table of the spec.

        Spec: 0.1 section 6.3.
        """
        place = self._place(TOKENS)
        # Of no column Parquet says no number of rows.
        wanted = ["request"] if columns == [] else columns
        table = self._parse("tokens", self.read(TOKENS), place, wanted, None)
        if table.num_rows != self.n_rows:
            raise ActdsError(
                "E203", place, got=f"{table.num_rows} token rows", expected=f"{self.n_rows}"
            )
        return table if columns is None else table.select(columns)

    def array(self, hook: str) -> arrays.ArrayReader:
        """Return a reader of a hook's rows.

        Raises:
            ActdsError: E014 the shard has no such hook; E104, E201, E202 metadata missing or
                changed; E108, E204 no array of the spec; E203 another number of rows.

        Spec: 0.1 section 4.
        """
        if hook not in self.manifest.hooks:
            known = ", ".join(self.manifest.hooks)
            raise ActdsError(
                "E014", f"shards/{self.name}", got=f"hook {hook!r}", expected=f"one of {known}"
            )
        folder = layout.array_dir(hook)
        metadata = self.read(f"{folder}/zarr.json")
        file = f"{folder}/{arrays.SHARD_PATH}"
        path, sha256 = self._place(file), self._entry(file).sha256
        reader = arrays.ArrayReader(metadata, self.store.open_file(path, sha256), path)
        if reader.n_rows != self.n_rows:
            reader.close()
            raise ActdsError(
                "E203", path, got=f"{reader.n_rows} rows", expected=f"{self.n_rows} rows"
            )
        return reader

    def local_path(self, path: str) -> Path:
        """Return where a file of the shard can be opened on this machine."""
        return self.store.local_path(self._place(path))

    def read(self, path: str) -> bytes:
        """Return the bytes of a file of the shard; errors as ``read_checked``."""
        return read_checked(self.store, self._place(path), self._entry(path))

    def check(self, path: str) -> None:
        """Check size and digest of a file of the shard; errors as ``check_file``."""
        check_file(self.store, self._place(path), self._entry(path))

    def _place(self, path: str) -> str:
        return f"{layout.shard_dir(self.name)}/{path}"

    def _entry(self, path: str) -> FileEntry:
        entry = self._files.get(self._place(path))
        if entry is None:
            raise ActdsError(
                "E104", layout.manifest_path(self.name), got=f"no entry {path}", expected="one"
            )
        return entry


def read_checked(store: Store, path: str, entry: FileEntry) -> bytes:
    """Return a file's bytes, when they are what was committed: hashed before anything parses.

    Args:
        store: the dataset's store.
        path: path in the dataset.
        entry: the file's entry in the manifest or the ledger.

    Raises:
        ActdsError: E104 missing; E201 size differs; E202 digest differs.

    Spec: 0.1 section 2.3.
    """
    _check_size(store, path, entry)
    data = store.read(path, sha256=entry.sha256)
    check_sha256(path, canonical.digest(data), entry.sha256)
    return data


def check_file(store: Store, path: str, entry: FileEntry) -> None:
    """Check that a file is what was committed, without holding it; errors as ``read_checked``."""
    _check_size(store, path, entry)
    check_sha256(path, file_sha256(store, path), entry.sha256)


def _check_size(store: Store, path: str, entry: FileEntry) -> None:
    nbytes = store.size(path)
    if nbytes != entry.nbytes:
        raise ActdsError("E201", path, got=f"{nbytes} bytes", expected=f"{entry.nbytes} bytes")


def check_sha256(path: str, got: str, expected: str) -> None:
    """Compare the digest of a file with the committed one.

    Raises:
        ActdsError: E202 they differ.
    """
    if got != expected:
        raise ActdsError("E202", path, got=f"sha256 {got}", expected=expected)
