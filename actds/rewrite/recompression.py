"""Recompress: shards that were written raw get the normal codec, in place.

Works on a dataset at rest, after the harvest. Every raw shard is written anew under a tool chain
and compared with the old one bit by bit; the ``replace`` record is its commit point. History is
only added to. Killed at any moment, the next call resumes from the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actds.dataset.catalog import Catalog
from actds.dataset.commit import NewShard
from actds.dataset.heartbeat import remove_stale
from actds.dataset.ledger import Chain, fence
from actds.dataset.owners import find_owners
from actds.dataset.reading import need_dataset, read_catalog
from actds.errors import ActdsError
from actds.executor import ExecutorName, open_executor
from actds.format import arrays, encoding
from actds.format.schema import Seal, ShardManifest
from actds.format.shard import GROUP_METADATA, TOKENS, Shard, files_root
from actds.publish.sealing import seal
from actds.store import Store, layout, open_store
from actds.store.local import LocalStore, lock_dataset
from actds.version import __version__

COMPARED_CHUNKS = 8
Progress = Callable[[ShardManifest, ShardManifest], None]
Pieces = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Recompressed:
    """What was done.

    Args:
        shards: of this call: each replaced shard and its replacement.
        nbytes_before: bytes of the arrays of the shards that were replaced.
        nbytes_after: bytes of the arrays in their place.
        n_removed: files of replaced shards, and of attempts that were killed, now removed.
        n_kept: files of replaced shards that are still there.
        seal: the seal that covers it; None when the dataset was not sealed before either.
    """

    shards: dict[str, str]
    nbytes_before: int
    nbytes_after: int
    n_removed: int
    n_kept: int
    seal: int | None
    digest: str


def recompress(
    path: str | Path | Store,
    shards: Sequence[str] | None = None,
    *,
    keep: bool = False,
    progress: Progress = lambda old, new: None,
    executor: ExecutorName = "threads",
) -> Recompressed:
    """Replace raw shards by compressed ones with the same rows in the same order.

    A dataset that was sealed is sealed again. The data files of replaced shards are removed after
    that; their manifests stay.

    Args:
        path: the dataset, in a local folder.
        shards: ids of raw shards; all of them when None.
        keep: leave the files of the replaced shards where they are.
        progress: called with the old and the new manifest after each shard.
        executor: where shards are written anew: ``threads`` encode the chunks of one shard after
            the other; ``processes`` or ``ray``, whose workers see the same folder, do several
            shards at a time.

    Raises:
        ActdsError: E010 another program writes the dataset; E009 no raw shard of such an id, or
            no local folder; E104, E201, E202, E204 a shard that is damaged, E604 one that counts
            other rows than it has: it is not replaced;
            E308, E309, E503 a failed write: call again; and what the catalogue and the seal raise.

    Spec: 0.1 section 8.5.
    """
    store = open_store(path)
    if not isinstance(store, LocalStore):
        # Without a lock two calls at once would replace one shard twice, and that is for good.
        got = "an object store, which has no lock"
        step = "Recompress a local copy before it is uploaded."
        raise ActdsError("E009", store.uri, got=got, expected="a local folder", next_step=step)
    need_dataset(store)
    done: list[tuple[ShardManifest, ShardManifest]] = []

    def note(old: ShardManifest, new: ShardManifest) -> None:
        done.append((old, new))
        progress(old, new)

    with ExitStack() as stack:
        stack.callback(os.close, lock_dataset(store.root))
        sealed = _replace(store, shards, note, executor)
        catalog = read_catalog(store)
        n_removed = _remove_leftovers(store, catalog)
        removable = catalog.removable
        for name in () if keep else removable:
            remove_file(store, name)
    return Recompressed(
        shards={old.shard: new.shard for old, new in done},
        nbytes_before=array_nbytes(*(old for old, _ in done)),
        nbytes_after=array_nbytes(*(new for _, new in done)),
        n_removed=n_removed + (0 if keep else len(removable)),
        n_kept=len(removable) if keep else 0,
        seal=sealed.n if sealed else None,
        digest=catalog.digest,
    )


def _replace(
    store: LocalStore, wanted: Sequence[str] | None, note: Progress, executor: ExecutorName
) -> Seal | None:
    """Replace shards; the new seal of a dataset that was sealed."""
    _end_dead_tools(store)
    catalog = read_catalog(store)
    raw = _selected(catalog, wanted)
    # The last seal lacks nothing but chains of tools that came after it.
    is_sealed = catalog.seal is not None and all(
        state.kind == "tool" or chain in catalog.seal.heads
        for chain, state in catalog.chains.items()
    )
    try:
        for run in dict.fromkeys(manifest.run for manifest in raw):
            _replace_run(store, catalog, [m for m in raw if m.run == run], note, executor)
    except ActdsError:
        # A damaged shard must not cost the others their seal. After a failed write a chain is
        # open, and then there is none: the next call makes it.
        with suppress(ActdsError):
            if is_sealed:
                seal(store)
        raise
    return seal(store) if is_sealed else None


def _end_dead_tools(store: LocalStore) -> None:
    """Fence the open tool chains, after making sure that no process of an open chain is left."""
    catalog = read_catalog(store)
    owners = find_owners(store, catalog.chains.values())
    owners.require_gone()
    for chain, who in owners.ended.items():
        if catalog.chains[chain].kind == "tool":
            fence(store, catalog.genesis.dataset, chain, f"{who}, and had not closed it")
    remove_stale(store)
    store.remove_temporary()


def _selected(catalog: Catalog, wanted: Sequence[str] | None) -> list[ShardManifest]:
    raw = [manifest for manifest in catalog.shards if manifest.compression == "raw"]
    if wanted is None:
        return raw
    known = {manifest.shard for manifest in (*raw, *catalog.replaced)}
    for shard in wanted:
        if shard not in known:
            names = ", ".join(manifest.shard for manifest in raw) or "none: no shard is raw"
            raise ActdsError("E009", "shards", got=shard[:80], expected=f"of {names[:400]}")
    return [manifest for manifest in raw if manifest.shard in wanted]


def _replace_run(
    store: LocalStore,
    catalog: Catalog,
    raw: list[ShardManifest],
    note: Progress,
    executor: ExecutorName,
) -> None:
    software = f"actds {__version__} recompress"
    chain = Chain.begin(store, catalog.genesis.dataset, raw[0].run, "tool", software)
    totals = {"shards": 0, "rows": 0}
    try:
        work = [
            (Shard(store, old), chain.chain, f"{chain.chain}-{number:06d}")
            for number, old in enumerate(raw)
        ]
        with mapped(executor) as each:
            manifests = each(_write, work)
            for old in raw:
                with chain.fatal():
                    new = next(manifests)
                NewShard(store, chain, new.shard).commit(new, replaced=old.shard)
                note(old, new)
                totals["shards"] += 1
                totals["rows"] += old.n_rows
    except ActdsError:
        if chain.ended is None:
            chain.close("failed", totals)
        raise
    chain.close("finished", totals)


@contextmanager
def mapped(executor: ExecutorName) -> Iterator[Pieces]:
    """What calls a function with every piece of work, in order, and with a number of threads."""
    if executor == "threads":
        # One after the other: each is held in memory as a whole.
        n_threads = os.cpu_count() or 1
        yield lambda function, work: (function(piece, n_threads) for piece in work)
        return
    with open_executor(executor) as on:
        yield on.map


def _write(work: tuple[Shard, str, str], n_threads: int = 1) -> ShardManifest:
    """Write a shard anew, under the id of a chain and a name."""
    old, chain, name = work
    store, values = old.store, old.manifest.values
    new = NewShard(store, Chain(store, old.manifest.dataset, chain), name)
    new.put(GROUP_METADATA, [arrays.group_metadata()])
    with ThreadPoolExecutor(n_threads, thread_name_prefix="actds-encode") as pool:
        for hook in old.hooks:
            # A new array over changed bytes would hide the change.
            old.check(f"{layout.array_dir(hook)}/{arrays.SHARD_PATH}")
            with old.array(hook) as reader:
                encoded = encoding.encode_array(reader.read_all(pool), reader.dtype, pool=pool)
            if encoded.counts != values[hook]:
                place = f"{layout.manifest_path(old.name)} values {hook}"
                got, expected = str(values[hook]), str(encoded.counts)
                raise ActdsError("E604", place, got=got, expected=expected)
            new.put_array(hook, encoded)
    new.put(TOKENS, [old.read(TOKENS)])
    facts = {"chain": chain, "shard": name, "compression": "normal"}
    files = {"files": new.files, "root": files_root(new.files)}
    manifest = old.manifest.model_copy(update=facts | files)
    for hook in old.hooks:
        _compare(old, Shard(store, manifest), hook)
    return manifest


def _compare(old: Shard, new: Shard, hook: str) -> None:
    """Every row, read back from both files."""
    with old.array(hook) as before, new.array(hook) as after:
        step = before.rows_per_chunk * COMPARED_CHUNKS
        for start in range(0, before.n_rows, step):
            stop = min(start + step, before.n_rows)
            if not np.array_equal(before.read(start, stop), after.read(start, stop)):
                place = f"{layout.shard_dir(new.name)}/{layout.array_dir(hook)}"
                got, expected = f"other bits in rows {start} to {stop}", layout.shard_dir(old.name)
                raise ActdsError("E204", place, got=got, expected=f"those of {expected}")


def _remove_leftovers(store: LocalStore, catalog: Catalog) -> int:
    """Remove what killed calls wrote and never committed; return how many files."""
    tools = {state.chain for state in catalog.chains.values() if state.kind == "tool"}
    left = [
        path
        for path in store.list("shards")
        if path not in catalog.reached and path.split("/")[1].rpartition("-")[0] in tools
    ]
    for path in left:
        remove_file(store, path)
    return len(left)


def remove_file(store: Store, path: str) -> None:
    """Remove a file, and the folders of this machine that are empty then.

    Raises:
        ActdsError: E503 the file stays.
    """
    store.remove(path)
    if not isinstance(store, LocalStore):
        return
    try:
        for folder in Path(path).parents[:-1]:
            if any((store.root / folder).iterdir()):
                break
            (store.root / folder).rmdir()
    except OSError as error:
        got = error.strerror or str(error)
        raise ActdsError("E503", path, got=got, expected="a removed file") from error


def array_nbytes(*manifests: ShardManifest) -> int:
    files = (entry for manifest in manifests for entry in manifest.files)
    return sum(entry.nbytes for entry in files if entry.path.endswith(f"/{arrays.SHARD_PATH}"))
