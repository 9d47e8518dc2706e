"""Shards: rows of one phase committed whole, read back lazily; and parts of tables."""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds import schema
from actds.errors import ActdsError
from actds.format import arrays, canonical, layout, tables
from actds.format.positions import position_key
from actds.ledger import Chain
from actds.schema.v0_1 import FileEntry, PartBody, PartTable, Phase, ShardBody, ShardManifest
from actds.store import Buffer, Store

__all__ = [
    "Shard",
    "ShardRows",
    "commit_part",
    "commit_shard",
    "file_names",
    "files_root",
    "read_checked",
    "row_order",
    "row_set_sha256",
]

TOKENS = "tokens.parquet"
GROUP_METADATA = "acts.zarr/zarr.json"
Order = Literal["permuted", "sequence"]


@dataclass(frozen=True)
class ShardRows:
    """The rows of one buffer, in the order in which they were captured.

    Args:
        hooks: bit patterns ``(n_rows, d_model)`` of each hook: ``uint16`` for bfloat16 and
            float16, ``uint32`` for float32.
        dtypes: type of each hook's values.
        tokens: columns of the tokens table, ``(n_rows,)`` each; ``phase`` may be left out.
        phase: phase of all rows.
        first_step: lowest step of the rows.
        last_step: highest step of the rows.
    """

    hooks: dict[str, npt.NDArray[Any]]
    dtypes: dict[str, str]
    tokens: dict[str, npt.NDArray[Any]]
    phase: Phase
    first_step: int
    last_step: int


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


def commit_shard(
    store: Store,
    chain: Chain,
    rows: ShardRows,
    *,
    shard: str,
    run: str,
    order: Order,
    seed: int,
    raw: bool = False,
    pool: Executor | None = None,
) -> ShardManifest:
    """Commit one shard: data, then manifest, then the ledger record that acknowledges it.

    Args:
        store: where the dataset stands.
        chain: the writer's chain.
        rows: the rows; not kept after the return.
        shard: new id of the shard.
        run: run of the rows.
        order: ``permuted`` shuffles the rows by ``seed``, one order for all hooks and tokens;
            ``sequence`` keeps them.
        seed: seed of the order.
        raw: copy the chunks instead of compressing them.
        pool: threads that encode chunks.

    Returns:
        The manifest as it was written.

    Raises:
        ActdsError: E203 when hooks and tokens differ in their number of rows, E414 when a row has
            another phase; E308, E309 or E503 when the commit failed, and then the chain is dead.

    Spec: 0.1 sections 5 and 8.1.
    """
    n_rows = _count_rows(rows, layout.shard_dir(shard))
    permutation = row_order(n_rows, seed) if order == "permuted" else None
    tokens, row_set = _tokens_table(rows, n_rows, permutation, layout.shard_dir(shard))
    entries: list[FileEntry] = []

    def put(path: str, parts: list[Buffer]) -> None:
        written = store.put_new(f"{layout.shard_dir(shard)}/{path}", parts)
        entries.append(FileEntry(path=path, nbytes=written.nbytes, sha256=written.sha256))

    with chain.fatal():
        put(GROUP_METADATA, [arrays.group_metadata()])
        for hook in sorted(rows.hooks):
            # One hook after the other: the permuted copy is as large as the hook's rows.
            bits = rows.hooks[hook]
            bits = np.ascontiguousarray(bits) if permutation is None else bits[permutation]
            encoded = arrays.encode_array(bits, rows.dtypes[hook], raw=raw, pool=pool)
            folder = layout.array_dir(hook)
            put(f"{folder}/zarr.json", [encoded.metadata])
            put(f"{folder}/{arrays.SHARD_PATH}", list(encoded.parts))
        put(TOKENS, [tokens])
        entries.sort(key=lambda entry: entry.path)
        manifest = ShardManifest(
            dataset=chain.dataset,
            run=run,
            chain=chain.chain,
            shard=shard,
            phase=rows.phase,
            n_rows=n_rows,
            hooks=sorted(rows.hooks),
            order=order,
            permutation_seed=None if permutation is None else seed,
            compression="raw" if raw else "normal",
            first_step=rows.first_step,
            last_step=rows.last_step,
            row_set_sha256=row_set,
            files=entries,
            root=files_root(entries),
        )
        written = store.put_new(layout.manifest_path(shard), [schema.to_bytes(manifest)])
        body = ShardBody(shard=shard, manifest_sha256=written.sha256, n_rows=n_rows)
        chain.append("shard", body)
    return manifest


def commit_part(
    store: Store, chain: Chain, table: PartTable, run: str, n: int, rows: pa.Table
) -> PartBody:
    """Commit part ``n`` of a table of a run: the file, then the ledger record.

    Args:
        store: where the dataset stands.
        chain: the census chain for requests, steps and spans, the writer's for drops and stalls.
        table: which table.
        run: run of the rows.
        n: number of the part, from 0 without a gap.
        rows: the part, in the spec's columns.

    Raises:
        ActdsError: E109 when the columns are others; E308, E309 or E503 when the commit failed,
            and then the chain is dead.

    Spec: 0.1 sections 6.2 and 8.1.
    """
    data = tables.to_parquet(table, rows)
    path = layout.part_path(table, run, n)
    with chain.fatal():
        written = store.put_new(path, [data])
        entry = FileEntry(path=path, nbytes=written.nbytes, sha256=written.sha256)
        body = PartBody(table=table, file=entry, n_rows=rows.num_rows)
        chain.append("part", body)
    return body


class Shard:
    """A committed shard, read file by file when asked.

    Args:
        store: where the dataset stands.
        manifest: the shard's manifest.
    """

    def __init__(self, store: Store, manifest: ShardManifest) -> None:
        self.store = store
        self.manifest = manifest
        self._files = {entry.path: entry for entry in manifest.files}

    def __repr__(self) -> str:
        return f"<Shard {self.name}: {self.n_rows} {self.phase} rows of run {self.run}>"

    @property
    def name(self) -> str:
        """Return the shard's id."""
        return self.manifest.shard

    @property
    def run(self) -> str:
        """Return the run of the rows."""
        return self.manifest.run

    @property
    def n_rows(self) -> int:
        """Return the number of rows."""
        return self.manifest.n_rows

    @property
    def phase(self) -> Phase:
        """Return the phase of all rows."""
        return self.manifest.phase

    @property
    def hooks(self) -> list[str]:
        """Return the hooks whose rows the shard holds."""
        return self.manifest.hooks

    def tokens(self, columns: list[str] | None = None) -> pa.Table:
        """Return the token table, one row per activation row, same order.

        Args:
            columns: columns to read, all when None.

        Raises:
            ActdsError: E104 missing; E201, E202 changed since the commit; E203 another number of
                rows; E109, E206 no table of the spec.

        Spec: 0.1 section 6.3.
        """
        place, data = self._read(TOKENS)
        table = tables.from_parquet("tokens", data, place, columns)
        if table.num_rows != self.n_rows:
            raise ActdsError(
                "E203", place, got=f"{table.num_rows} token rows", expected=f"{self.n_rows}"
            )
        return table

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
        _, metadata = self._read(f"{folder}/zarr.json")
        path = f"{layout.shard_dir(self.name)}/{folder}/{arrays.SHARD_PATH}"
        reader = arrays.ArrayReader(metadata, self.store.open_file(path), place=path)
        if reader.n_rows != self.n_rows:
            reader.close()
            raise ActdsError(
                "E203", path, got=f"{reader.n_rows} rows", expected=f"{self.n_rows} rows"
            )
        return reader

    def local_path(self, path: str) -> Path:
        """Return where a file of the shard can be opened on this machine."""
        return self.store.local_path(f"{layout.shard_dir(self.name)}/{path}")

    def _read(self, path: str) -> tuple[str, bytes]:
        place = f"{layout.shard_dir(self.name)}/{path}"
        entry = self._files.get(path)
        if entry is None:
            raise ActdsError(
                "E104", layout.manifest_path(self.name), got=f"no entry {path}", expected="one"
            )
        return place, read_checked(self.store, place, entry)


def read_checked(store: Store, path: str, entry: FileEntry) -> bytes:
    """Return a file's bytes, when they are what was committed: hashed before anything parses.

    Args:
        store: where the dataset stands.
        path: path in the dataset.
        entry: what the manifest or the ledger says about the file.

    Raises:
        ActdsError: E104 missing; E201 size differs; E202 digest differs.

    Spec: 0.1 section 2.3.
    """
    nbytes = store.size(path)
    if nbytes != entry.nbytes:
        raise ActdsError("E201", path, got=f"{nbytes} bytes", expected=f"{entry.nbytes} bytes")
    data = store.read(path)
    got = canonical.digest(data)
    if got != entry.sha256:
        raise ActdsError("E202", path, got=f"sha256 {got}", expected=entry.sha256)
    return data


def _count_rows(rows: ShardRows, place: str) -> int:
    counts = {f"hook {hook}": len(bits) for hook, bits in rows.hooks.items()}
    counts |= {f"column {name}": len(column) for name, column in rows.tokens.items()}
    if len(set(counts.values())) != 1 or not rows.hooks:
        raise ActdsError("E203", place, got=repr(counts)[:400], expected="equal row counts")
    return len(rows.tokens["request"])


def _tokens_table(
    rows: ShardRows, n_rows: int, permutation: npt.NDArray[np.int64] | None, place: str
) -> tuple[bytes, str]:
    """Return the tokens table in the shard's order as Parquet, and the digest of its row set."""
    phase = rows.tokens.get("phase")
    if phase is not None and not (np.asarray(phase) == rows.phase).all():
        raise ActdsError("E414", place, got="rows of two phases", expected=f"{rows.phase} only")
    columns: dict[str, object] = {
        name: np.asarray(column) if permutation is None else np.asarray(column)[permutation]
        for name, column in rows.tokens.items()
    }
    columns["phase"] = pa.repeat(pa.scalar(rows.phase, pa.string()), n_rows)
    table = tables.build("tokens", columns)
    row_set = row_set_sha256(rows.tokens["request"], rows.tokens["position"])
    return tables.to_parquet("tokens", table), row_set
