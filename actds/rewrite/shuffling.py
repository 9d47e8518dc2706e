"""Shuffle: a sealed copy of a dataset, the rows of each run and phase in one random order.

Two passes, each in bounded memory. The first reads the rows a *block* at a time and writes each
block, sorted by the shard that its rows go to, to a temporary file. The second gathers the rows of
one new shard from all blocks, permutes them and writes the shard. Chains and seal come last.

All of it happens in ``OUT.partial``, which becomes OUT by one rename: OUT is whole, or not there.
A block whose folder has its name, and a shard that has a manifest, are done: killed at any moment,
the next call goes on after them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actds.dataset.catalog import Catalog
from actds.dataset.commit import NewShard
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import CODES, ActdsError
from actds.executor import ExecutorName
from actds.format import arrays, canonical, encoding, schema, tables
from actds.format.schema import (
    ChainKind,
    CloseReason,
    Genesis,
    Hook,
    ProvenanceField,
    RowCounts,
    RunBody,
    RunRecord,
    ShardBody,
    ShardManifest,
)
from actds.format.shard import (
    GROUP_METADATA,
    TOKENS,
    files_root,
    read_checked,
    row_order,
    row_set_sha256,
)
from actds.publish.sealing import account_run, seal
from actds.rewrite.recompression import Pieces, array_nbytes, mapped
from actds.rewrite.scatter import SHUFFLE_VERSION, Blocks, on_disk, row_groups
from actds.store import Store, layout, open_store, refuse_within_dataset
from actds.store.folders import sync
from actds.store.local import LocalStore, lock_dataset, refuse_links
from actds.version import __version__

CODECS = ("default", "raw")
Codec = Literal["default", "raw"]
Progress = Callable[[str, int, int], None]

_SOFTWARE = f"actds {__version__} shuffle"
_PLAN, _DATASET, _BLOCKS = "plan.json", "dataset", "blocks"


@dataclass(frozen=True)
class Shuffled:
    """What was done.

    Args:
        source_digest: digest of the dataset that it was made from.
        codec: ``default`` or ``raw``.
        n_rows: rows of the copy; rows of hooks in shards of their own are counted for each.
        nbytes_before: bytes of the arrays of the dataset.
        nbytes_after: bytes of the arrays of the copy.
    """

    path: str
    source_digest: str
    seed: int
    codec: str
    n_rows: int
    n_shards: int
    nbytes_before: int
    nbytes_after: int
    seal: int
    digest: str


def shuffle(
    source: str | Path | Store,
    out: str | Path,
    *,
    seed: int = 0,
    codec: Codec = "default",
    rows_per_shard: int = 1 << 16,
    memory_nbytes: int = 2 << 30,
    executor: ExecutorName = "threads",
    progress: Progress = lambda stage, done, total: None,
) -> Shuffled:
    """Copy a sealed dataset, the rows of each run and phase in one random order over its shards.

    Every order of the rows is equally likely; which one it is follows from the digest of the
    dataset and the seed. Tables of requests, steps, losses and readouts are carried over as they
    are, so the copy has the same account; its run records say what it is a copy of.

    It takes the space of the uncompressed rows while it works, and that of the copy. A call that
    was interrupted is continued by the same call.

    Args:
        source: the dataset: a path, a URI or a store.
        out: a folder that does not exist yet.
        seed: seed of the order, from 0.
        codec: ``default`` compresses the arrays; ``raw`` copies them, which is read fastest.
        rows_per_shard: rows of a new shard, unless memory allows fewer.
        memory_nbytes: bytes of rows that are held at a time, about; by each of several workers.
        executor: where blocks and shards are written: ``threads`` of this process, one at a time;
            ``processes`` of this machine, or ``ray``, several; the same copy to the byte.
        progress: called with ``scatter`` or ``write``, the rows done and all rows.

    Raises:
        ActdsError: E306 not sealed; E008 the folder exists; E009 a bad argument, or another one
            than the call that is continued had; E010 another call works on it; E104, E201, E202,
            E204 a shard that is damaged; E503 no space left, or a failed write: call again.

    Spec: 0.1 sections 5.3 and 6.1.
    """
    store = open_store(source) if isinstance(source, str | Path) else source
    out = Path(os.path.abspath(out))
    partial = out.with_name(f"{out.name}.partial")
    refuse_within_dataset(out)
    if out.exists() and not (partial / _PLAN).exists():
        raise ActdsError("E008", str(out), got="an existing path", expected="a new one")
    if codec not in CODECS:
        raise _bad("codec", repr(codec), f"one of {', '.join(CODECS)}")
    if not 0 <= seed < 2**63:
        raise _bad("seed", str(seed), "an integer from 0")
    catalog = read_catalog(store)
    if not catalog.is_sealed:
        raise catalog.not_sealed(store.uri)
    n_rows = _rows_that_fit(catalog, rows_per_shard, memory_nbytes)
    wanted = _Plan(catalog.digest, seed, codec, n_rows, _rows_in_memory(catalog, memory_nbytes))
    refuse_links(partial)
    with on_disk(partial):
        partial.mkdir(parents=True, exist_ok=True)
    lock = lock_dataset(partial)
    try:
        plan = _read_plan(partial, wanted)
        if not out.exists():  # it does when the last call died while it removed its files
            with mapped(executor) as run:
                _Shuffle(catalog, partial, plan, run, progress).run()
            with on_disk(out):
                (partial / _DATASET).rename(out)
                sync(out.parent)
        with on_disk(partial):
            shutil.rmtree(partial / _BLOCKS, ignore_errors=True)
            shutil.rmtree(partial)
    except ActdsError as error:
        if error.next_step != CODES["E503"].next_step:
            raise
        again = "Free space or fix the disk, then call it again: it continues."
        place, got, expected = error.place, error.got, error.expected
        raise ActdsError("E503", place, got=got, expected=expected, next_step=again) from error
    finally:
        os.close(lock)
    return _result(catalog, out, plan)


@dataclass(frozen=True)
class _Plan:
    """What is done, as ``plan.json`` has it; two calls with the same first fields do the same."""

    digest: str
    seed: int
    codec: str
    rows_per_shard: int
    rows_per_block: int
    version: int = SHUFFLE_VERSION
    dataset: str = field(default_factory=lambda: os.urandom(16).hex())
    created_ns: int = field(default_factory=time.time_ns)

    def chain(self, run: str, kind: ChainKind) -> str:
        """The manifests of the copy name a chain before it is written."""
        return f"{kind[0]}-{canonical.digest(f'{self.dataset}/{run}/{kind}'.encode())[:16]}"


def _read_plan(partial: Path, wanted: _Plan) -> _Plan:
    """Of an interrupted call (E009 it did something else), or the new one, then durable."""
    store = LocalStore(partial)
    if not store.exists(_PLAN):
        store.put_new(_PLAN, [canonical.dump(asdict(wanted))])
        return wanted
    plan = canonical.parse(store.read(_PLAN), str(partial / _PLAN))
    options = {"digest": "source", "seed": "seed", "codec": "codec"}
    options |= {"rows_per_shard": "rows_per_shard", "rows_per_block": "memory_nbytes"}
    for name, option in (options | {"version": "version of the order"}).items():
        if plan[name] != getattr(wanted, name):
            got, expected = getattr(wanted, name), f"{plan[name]}, as the interrupted call had"
            again = f"Call it as before, or remove {partial} to start anew."
            raise ActdsError("E009", option, got=str(got), expected=expected, next_step=again)
    return _Plan(**plan)


def _rows_in_memory(catalog: Catalog, memory_nbytes: int) -> int:
    return max(1, memory_nbytes // (2 * max(map(_row_nbytes, catalog.genesis.hooks))))


def _row_nbytes(hook: Hook) -> int:
    return hook.d_model * arrays.DTYPES[hook.dtype].itemsize


def _rows_that_fit(catalog: Catalog, rows_per_shard: int, memory_nbytes: int) -> int:
    if rows_per_shard < 1:
        raise _bad("rows_per_shard", str(rows_per_shard), "at least 1")
    fit = _rows_in_memory(catalog, memory_nbytes)
    if fit >= rows_per_shard:
        return rows_per_shard
    hooks = catalog.genesis.hooks
    chunk = max(arrays.chunk_rows(h.d_model, arrays.DTYPES[h.dtype].itemsize) for h in hooks)
    least = min(chunk, rows_per_shard)
    if fit < least:
        raise _bad("memory_nbytes", f"room for {fit} rows", f"at least {least}")
    return fit // chunk * chunk


class _Shuffle:
    """One call at work in ``OUT.partial``."""

    def __init__(
        self, catalog: Catalog, partial: Path, plan: _Plan, run: Pieces, progress: Progress
    ) -> None:
        self._catalog, self._plan, self._map = catalog, plan, run
        self._partial, self._progress = partial, progress
        self._store = LocalStore(partial / _DATASET)
        self._groups = row_groups(catalog, plan.seed, plan.rows_per_shard)
        self._blocks = [
            Blocks(partial / _BLOCKS / group.name, group, plan.rows_per_block)
            for group in self._groups
        ]
        self._n_rows = sum(group.n_rows for group in self._groups)

    def run(self) -> None:
        self._check_space()
        self._store.remove_temporary()
        if not self._store.exists(layout.GENESIS):
            facts = {"dataset": self._plan.dataset, "created_ns": self._plan.created_ns}
            hooks = self._catalog.genesis.hooks
            genesis = Genesis.model_validate({**facts, "writer": _SOFTWARE, "hooks": hooks})
            self._store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
        bounds = [(blocks, *bounds) for blocks in self._blocks for bounds in blocks.bounds()]
        self._work("scatter", _scatter, bounds)
        shards = [
            (self._store, self._plan, blocks, number)
            for blocks in self._blocks
            for number in range(blocks.group.n_shards)
        ]
        self._work("write", _write, shards)
        self._commit()
        seal(self._store, imported=True)  # as the dataset, whose seal took what was imported

    def _check_space(self) -> None:
        """E503 a disk that cannot hold the blocks and the copy."""
        rows = sum(g.n_rows * sum(map(_row_nbytes, g.hooks)) for g in self._groups)
        raw = self._plan.codec == "raw"
        copy = rows if raw else min(rows, array_nbytes(*self._catalog.shards))
        written = sum(file.stat().st_size for file in self._partial.rglob("*") if file.is_file())
        free = shutil.disk_usage(self._partial).free
        if free + written < rows + copy:
            need = f"{rows + copy - written:,} bytes for temporary files and the copy"
            got = f"{free:,} bytes free"
            raise ActdsError("E503", str(self._partial), got=got, expected=need)

    def _work(self, stage: str, function: Callable[..., int], work: list[Any]) -> None:
        done = 0
        for n_rows in self._map(function, work):
            done += n_rows
            self._progress(stage, done, self._n_rows)

    def _commit(self) -> None:
        """Write run records, tables and chains: those of an interrupted call are made anew."""
        with on_disk(self._store.root):
            for entry in self._store.root.iterdir():
                if entry.is_dir() and entry.name != "shards":
                    shutil.rmtree(entry)
        store = LocalStore(self._store.root)
        chains = [chain for run in self._catalog.runs_with_data for chain in self._copy(store, run)]
        written = read_catalog(store)
        totals = {run: account_run(written, run).totals for run in self._catalog.runs_with_data}
        for chain, run, kind in chains:
            chain.close(_reason(self._catalog, run, kind), _close_totals(totals[run], kind))
        self._store = store

    def _copy(self, store: Store, run: str) -> Iterator[tuple[Chain, str, ChainKind]]:
        chains: dict[str, Chain] = {}

        def chain(kind: ChainKind) -> Chain:
            if kind not in chains:
                chain_id = self._plan.chain(run, kind)
                dataset = self._plan.dataset
                chains[kind] = Chain.begin(store, dataset, run, kind, _SOFTWARE, chain_id)
            return chains[kind]

        written = store.put_new(layout.run_path(run), [schema.to_bytes(self._run_record(run))])
        chain("writer").append("run", RunBody(run=run, sha256=written.sha256))
        for path in (layout.probes_path(run), layout.profile_path(run)):
            if self._catalog.store.exists(path):
                store.put_new(path, [self._catalog.store.read(path)])
        for (its_run, table), parts in self._catalog.parts.items():
            for body in parts if its_run == run else ():
                data = read_checked(self._catalog.store, body.file.path, body.file)
                store.put_new(body.file.path, [data])
                chain(layout.chain_kind_of(table)).append("part", body)  # type: ignore[arg-type]
        for group in self._groups:
            for number in range(group.n_shards if group.run == run else 0):
                name = f"{chain('writer').chain}-{group.first + number:06d}"
                data = store.read(layout.manifest_path(name))
                n_rows = schema.parse(ShardManifest, data, name).n_rows
                digest = canonical.digest(data)
                shard = ShardBody(shard=name, manifest_sha256=digest, n_rows=n_rows)
                chain("writer").append("shard", shard)
        for kind, begun in chains.items():
            yield begun, run, kind  # type: ignore[misc]

    def _run_record(self, run: str) -> RunRecord:
        record = self._catalog.runs[run]
        facts: dict[str, int | str] = {
            "copy.method": "shuffle",
            "copy.software": _SOFTWARE,
            "copy.source_dataset": self._catalog.genesis.dataset,
            "copy.source_digest": self._plan.digest,
            "copy.seed": self._plan.seed,
            "copy.order_version": self._plan.version,
        }
        added = {
            name: ProvenanceField(value=value, origin="observed", reason=None)
            for name, value in facts.items()
        }
        update = {"dataset": self._plan.dataset, "fields": record.fields | added}
        return record.model_copy(update=update)


def _threads(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="actds-shuffle")


def _scatter(work: tuple[Blocks, int, int], n_threads: int = 1) -> int:
    blocks, start, stop = work
    with _threads(n_threads) as pool:
        blocks.write(start, stop, pool)
    return stop - start


def _write(work: tuple[LocalStore, _Plan, Blocks, int], n_threads: int = 1) -> int:
    """Write a new shard up to its manifest; return its rows."""
    store, plan, blocks, number = work
    group = blocks.group
    chain = plan.chain(group.run, "writer")
    name = f"{chain}-{group.first + number:06d}"
    path = layout.manifest_path(name)
    if store.exists(path):
        return schema.parse(ShardManifest, store.read(path), path).n_rows
    with on_disk(store.root / path):
        shutil.rmtree(store.root / layout.shard_dir(name), ignore_errors=True)
    tokens = blocks.tokens(number)
    columns = {c: tokens[c].to_numpy() for c in ("request", "position", "step")}
    seed = group.permutation_seed(number)
    # The rows as the engine computed them, then permuted as section 5.3 says.
    collected = np.lexsort((columns["position"], columns["request"], columns["step"]))
    order = collected[row_order(len(collected), seed)]
    new = NewShard(store, Chain(store, plan.dataset, chain), name)
    new.put(GROUP_METADATA, [arrays.group_metadata()])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    raw = plan.codec == "raw"
    with _threads(n_threads) as pool:
        values = {
            hook.name: _put(new, hook, blocks.gather(number, hook, place), raw, pool)
            for hook in group.hooks
        }
    new.put(TOKENS, [tables.to_parquet("tokens", tokens.take(order))])
    manifest = ShardManifest(
        dataset=plan.dataset,
        run=group.run,
        chain=chain,
        shard=name,
        phase=group.phase,
        n_rows=len(order),
        hooks=sorted(values),
        values=values,
        order="permuted",
        permutation_seed=seed,
        compression="raw" if raw else "normal",
        first_step=int(columns["step"].min()),
        last_step=int(columns["step"].max()),
        row_set_sha256=row_set_sha256(columns["request"], columns["position"]),
        files=new.files,
        root=files_root(new.files),
    )
    store.put_new(path, [schema.to_bytes(manifest)])
    return manifest.n_rows


def _put(new: NewShard, hook: Hook, rows: npt.NDArray[Any], raw: bool, pool: Executor) -> RowCounts:
    """Compares what can be read of the array with the rows."""
    encoded = encoding.encode_array(rows, hook.dtype, raw=raw, pool=pool)
    new.put_array(hook.name, encoded)
    place = f"{layout.shard_dir(new.name)}/{layout.array_dir(hook.name)}/{arrays.SHARD_PATH}"
    with arrays.ArrayReader(encoded.metadata, new.store.open_file(place), place=place) as reader:

        def same(first: int) -> bool:
            low = first * reader.rows_per_chunk
            part = reader.read_chunks(first, first + 1)
            return np.array_equal(part, rows[low : low + len(part)])

        if not all(pool.map(same, range(reader.n_chunks))):
            raise ActdsError("E204", place, got="other bits", expected="those of the dataset")
    return encoded.counts


def _reason(catalog: Catalog, run: str, kind: ChainKind) -> CloseReason:
    ends = [s.close for s in catalog.chains.values() if s.run == run and s.kind == kind]
    reasons = {"interrupted" if end is None else end.reason for end in ends}
    return next((r for r in ("failed", "interrupted") if r in reasons), "finished")


def _close_totals(totals: dict[str, int], kind: ChainKind) -> dict[str, int]:
    names = {
        "writer": {"rows": "rows", "dropped_tokens": "dropped", "recomputed_tokens": "recomputed"},
        "census": {"requests": "requests", "scheduled_tokens": "scheduled"}
        | {name: name for name in tables.DISPOSITIONS},
        "tool": {},
    }
    return {name: totals[total] for name, total in names[kind].items()}


def _result(catalog: Catalog, out: Path, plan: _Plan) -> Shuffled:
    copy = read_catalog(LocalStore(out))
    assert copy.seal is not None, "the copy was sealed"
    return Shuffled(
        path=str(out),
        source_digest=plan.digest,
        seed=plan.seed,
        codec=plan.codec,
        n_rows=sum(manifest.n_rows for manifest in copy.shards),
        n_shards=len(copy.shards),
        nbytes_before=array_nbytes(*catalog.shards),
        nbytes_after=array_nbytes(*copy.shards),
        seal=copy.seal.n,
        digest=copy.digest,
    )


def _bad(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E009", place, got=got, expected=expected)
