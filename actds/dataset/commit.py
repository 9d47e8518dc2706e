"""Commits: data first, then the manifest, then the ledger record that acknowledges both.

This is the only place that knows the order. What is killed on the way leaves files that nothing
reaches, never a record of something that is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.dataset.ledger import Chain
from actds.dataset.write_threads import ArrayOnItsWay, WriteThreads
from actds.errors import ActdsError
from actds.format import arrays, encoding, schema, tables
from actds.format.schema import (
    FileEntry,
    PartBody,
    PartTable,
    Phase,
    RedactBody,
    ReplaceBody,
    ShardBody,
    ShardManifest,
)
from actds.format.shard import GROUP_METADATA, TOKENS, files_root, row_order, row_set_sha256
from actds.store import Buffer, Put, Store, layout

ROWS_PER_PART = 1_000_000

Order = Literal["permuted", "sequence"]


class NewShard:
    """A shard on its way: its files are put, and nothing reaches them until ``commit``.

    A failed write ends the chain for good.

    Args:
        store: the dataset's store.
        chain: the chain of this process.
        name: new id of the shard.

    Spec: 0.1 section 8.1.
    """

    def __init__(self, store: Store, chain: Chain, name: str) -> None:
        self.store, self.chain, self.name = store, chain, name
        self._entries: list[FileEntry] = []
        self._begun: dict[str, Future[Put]] = {}

    @property
    def files(self) -> list[FileEntry]:
        """Return the entries of the files that were put, in the order of a manifest."""
        return sorted(self._entries, key=lambda entry: entry.path)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a data file, durably.

        Raises:
            ActdsError: E308, E309 or E503 when the write failed, and then the chain is dead.
        """
        with self.chain.fatal():
            written = self.store.put_new(f"{layout.shard_dir(self.name)}/{path}", parts)
        self._note(path, written)

    def put_array(self, hook: str, encoded: encoding.EncodedArray) -> None:
        """Write the two files of a hook's array; errors as ``put``."""
        folder = layout.array_dir(hook)
        self.put(f"{folder}/zarr.json", [encoded.metadata])
        self.put(f"{folder}/{arrays.SHARD_PATH}", encoded.parts)

    def begin(
        self, path: str, parts: Callable[[], Sequence[Buffer]], threads: WriteThreads
    ) -> None:
        """Begin to write a data file; ``wait`` raises what fails."""
        name = f"{layout.shard_dir(self.name)}/{path}"
        self._begun[path] = threads.submit(lambda: self.store.put_new(name, parts()))

    def begin_array(
        self, hook: str, encoder: encoding.ArrayEncoder, threads: WriteThreads
    ) -> ArrayOnItsWay:
        """Begin to write the two files of a hook's array; ``wait`` raises what fails."""
        folder = layout.array_dir(hook)
        path = f"{folder}/{arrays.SHARD_PATH}"
        array = threads.add(encoder, self.store.begin(f"{layout.shard_dir(self.name)}/{path}"))
        self._begun[path] = array.put
        self.begin(f"{folder}/zarr.json", lambda: [encoder.metadata], threads)
        return array

    def wait(self) -> None:
        """Wait until what was begun is durable; errors as ``put``."""
        wait(self._begun.values())
        with self.chain.fatal():
            for path, begun in self._begun.items():
                self._note(path, begun.result())
        self._begun.clear()

    def _note(self, path: str, written: Put) -> None:
        self._entries.append(FileEntry(path=path, nbytes=written.nbytes, sha256=written.sha256))

    def commit(
        self,
        manifest: ShardManifest,
        *,
        replaced: str | None = None,
        redacted: Sequence[int] = (),
    ) -> None:
        """Write the manifest, then the record: the rows are acknowledged when this returns.

        Args:
            manifest: of the files that were put.
            replaced: the shard that this one replaces.
            redacted: the requests whose rows it lacks.

        Raises:
            ActdsError: as ``put``.
        """
        with self.chain.fatal():
            data, path = schema.to_bytes(manifest), layout.manifest_path(self.name)
            written = self.store.put_new(path, [data])
        n_rows, digest = manifest.n_rows, written.sha256
        if replaced is not None and redacted:
            entry = FileEntry(path=path, nbytes=written.nbytes, sha256=digest)
            redact(self.chain, redacted, layout.manifest_path(replaced), entry, n_rows)
            return
        if replaced is None:
            body = ShardBody(shard=self.name, manifest_sha256=digest, n_rows=n_rows)
            self.chain.append("shard", body)
            return
        self.chain.append(
            "replace",
            ReplaceBody(replaced=replaced, shard=self.name, manifest_sha256=digest, n_rows=n_rows),
        )


def redact(
    chain: Chain, requests: Sequence[int], replaced: str, file: FileEntry | None, n_rows: int
) -> None:
    """Commit what stands in the place of a shard or part without some requests.

    Args:
        chain: a tool chain of the run.
        requests: all requests of the run that are to be gone, ascending.
        replaced: path of the manifest or part.
        file: of the manifest or part in its place; None for a shard without a row left.
        n_rows: its rows.

    Spec: 0.1 section 8.6.
    """
    body = RedactBody(requests=[*requests], replaced=replaced, file=file, n_rows=n_rows)
    chain.append("redact", body)


@dataclass(frozen=True)
class ShardRows:
    """The rows of one buffer, in the order in which they were captured.

    Args:
        hooks: bit patterns ``(n_rows, d_model)`` of each hook: ``uint16`` for bfloat16 and
            float16, ``uint32`` for float32.
        dtypes: type of each hook's values.
        tokens: columns of the tokens table, ``(n_rows,)`` each; ``phase`` may be left out, and
            ``inclusion``, which NaN leaves null.
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


class BegunShard:
    """A shard whose files are being written, until ``commit`` ends it.

    Attributes:
        rows_read: is set when the rows are needed no more, also when a file failed.
    """

    def __init__(
        self, new: NewShard, rows: ShardRows, manifest: Callable[[str], ShardManifest]
    ) -> None:
        self._new, self._rows, self._manifest = new, rows, manifest
        self.rows_read: Future[None] = Future()
        self._n_readers = len(rows.hooks) + 1  # the table of the tokens
        self._lock = threading.Lock()
        self._row_set = ""

    def commit(self) -> ShardManifest:
        """Wait for the files, then write the manifest and the record of the ledger.

        Returns:
            The manifest as it was written.

        Raises:
            ActdsError: as ``commit_shard``.
        """
        self._new.wait()
        manifest = self._manifest(self._row_set)
        self._new.commit(manifest)
        return manifest

    def begin(
        self,
        encoders: dict[str, encoding.ArrayEncoder],
        permutation: npt.NDArray[np.int64] | None,
        threads: WriteThreads,
    ) -> None:
        """Give all files to the threads; nothing fails here."""

        def tokens() -> list[Buffer]:
            try:
                data, self._row_set = _tokens_table(self._rows, permutation)
            finally:
                self._read()
            return [data]

        for hook, encoder in encoders.items():
            array = self._new.begin_array(hook, encoder, threads)
            array.encoded.add_done_callback(lambda _: self._read())
        self._new.begin(TOKENS, tokens, threads)
        self._new.begin(GROUP_METADATA, lambda: [arrays.group_metadata()], threads)

    def _read(self) -> None:
        with self._lock:
            self._n_readers -= 1
            is_last = not self._n_readers
        if is_last:
            self.rows_read.set_result(None)


def begin_shard(
    store: Store,
    chain: Chain,
    rows: ShardRows,
    *,
    shard: str,
    run: str,
    order: Order,
    seed: int,
    raw: bool = False,
    threads: WriteThreads,
) -> BegunShard:
    """Begin to write the rows of one buffer as a shard.

    Args:
        store: as for ``commit_shard``, as are those that are not named here.
        chain: the writer's chain.
        rows: the rows; they may change when ``rows_read`` is set.
        shard: new id of the shard.
        run: run of the rows.
        order: how the rows are ordered.
        seed: seed of the order.
        raw: copy the chunks instead of compressing them.
        threads: encode and write; shards that were begun earlier come first.

    Raises:
        ActdsError: E203, E414 as ``commit_shard``; what the disk refuses is raised by ``commit``.

    Spec: 0.1 sections 5 and 8.1.
    """
    n_rows = _check_rows(rows, layout.shard_dir(shard))
    permutation = row_order(n_rows, seed) if order == "permuted" else None
    encoders = {
        hook: encoding.ArrayEncoder(
            np.ascontiguousarray(rows.hooks[hook]), rows.dtypes[hook], order=permutation, raw=raw
        )
        for hook in sorted(rows.hooks)
    }
    new = NewShard(store, chain, shard)
    hooks, is_permuted = list(encoders), permutation is not None

    def manifest(row_set: str) -> ShardManifest:
        return ShardManifest(
            dataset=chain.dataset,
            run=run,
            chain=chain.chain,
            shard=shard,
            phase=rows.phase,
            n_rows=n_rows,
            hooks=hooks,
            values={hook: encoder.counts for hook, encoder in encoders.items()},
            order=order,
            permutation_seed=seed if is_permuted else None,
            compression="raw" if raw else "normal",
            first_step=rows.first_step,
            last_step=rows.last_step,
            row_set_sha256=row_set,
            files=new.files,
            root=files_root(new.files),
        )

    begun = BegunShard(new, rows, manifest)
    begun.begin(encoders, permutation, threads)
    return begun


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
    n_threads: int = 0,
) -> ShardManifest:
    """Commit the rows of one buffer as a shard.

    Args:
        store: the dataset's store.
        chain: the writer's chain.
        rows: the rows; not kept after the return.
        shard: new id of the shard.
        run: run of the rows.
        order: ``permuted`` shuffles the rows by ``seed``, one order for all hooks and tokens;
            ``sequence`` keeps them.
        seed: seed of the order.
        raw: copy the chunks instead of compressing them.
        n_threads: threads that encode, hash and write; this one with none.

    Returns:
        The manifest as it was written.

    Raises:
        ActdsError: E203 when hooks and tokens differ in their number of rows, E414 when a row has
            another phase; E308, E309 or E503 when the commit failed, and then the chain is dead.

    Spec: 0.1 sections 5 and 8.1.
    """
    with WriteThreads(n_threads) as threads:
        return begin_shard(
            store,
            chain,
            rows,
            shard=shard,
            run=run,
            order=order,
            seed=seed,
            raw=raw,
            threads=threads,
        ).commit()


def commit_part(
    store: Store, chain: Chain, table: PartTable, run: str, n: int, rows: pa.Table
) -> PartBody:
    """Commit part ``n`` of a table of a run: the file, then the ledger record.

    Args:
        store: the dataset's store.
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


def in_parts(rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Yield number and rows of each part of a table, at least one."""
    for n, first in enumerate(range(0, max(rows.num_rows, 1), ROWS_PER_PART)):
        yield n, rows.slice(first, ROWS_PER_PART)


def _check_rows(rows: ShardRows, place: str) -> int:
    """Return the number of rows of all hooks and columns, which are of one phase."""
    counts = {f"hook {hook}": len(bits) for hook, bits in rows.hooks.items()}
    counts |= {f"column {name}": len(column) for name, column in rows.tokens.items()}
    if len(set(counts.values())) != 1 or not rows.hooks:
        raise ActdsError("E203", place, got=repr(counts)[:400], expected="equal row counts")
    phase = rows.tokens.get("phase")
    if phase is not None and not (np.asarray(phase) == rows.phase).all():
        raise ActdsError("E414", place, got="rows of two phases", expected=f"{rows.phase} only")
    return len(rows.tokens["request"])


def _tokens_table(rows: ShardRows, permutation: npt.NDArray[np.int64] | None) -> tuple[bytes, str]:
    """Return the tokens table in the shard's order as Parquet, and the digest of its row set."""
    columns: dict[str, object] = {
        name: np.asarray(column) if permutation is None else np.asarray(column)[permutation]
        for name, column in rows.tokens.items()
        if name != "phase"
    }
    n_rows = len(rows.tokens["request"])
    columns["phase"] = pa.repeat(pa.scalar(rows.phase, pa.string()), n_rows)
    if "inclusion" in columns:
        columns["inclusion"] = pa.array(columns["inclusion"], pa.float64(), from_pandas=True)
    table = tables.build("tokens", columns)
    row_set = row_set_sha256(rows.tokens["request"], rows.tokens["position"])
    return tables.to_parquet("tokens", table), row_set
