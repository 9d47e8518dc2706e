"""Redact: requests are gone from every file of a dataset, and its account still adds up.

Works on runs at rest. Shards and parts with something of the requests are written anew without it
under tool chains, whose ``redact`` records are the commit points; then the old files go, and a
sealed dataset is sealed again. Killed at any moment, the next call ends what was begun. What was
captured or served from the prefix cache becomes ``filtered``, with the reason ``redacted``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.dataset.catalog import Catalog
from actds.dataset.commit import NewShard
from actds.dataset.commit import redact as commit_redacted
from actds.dataset.heartbeat import remove_stale
from actds.dataset.ledger import Chain, fence
from actds.dataset.owners import find_owners
from actds.dataset.reading import need_dataset, read_catalog
from actds.dataset.redacted import FORGOTTEN, LINES, files_left, is_of, left_over, redacted_id
from actds.dataset.replacement import committed
from actds.errors import ActdsError, BusyError
from actds.format import arrays, encoding, tables
from actds.format.labels import label_text, parse_labels
from actds.format.schema import FileEntry, PartTable, ShardManifest
from actds.format.shard import (
    GROUP_METADATA,
    TOKENS,
    Shard,
    files_root,
    row_order,
    row_set_sha256,
)
from actds.publish.sealing import seal
from actds.rewrite.recompression import remove_file
from actds.store import Store, layout, local_folder, open_for_writing
from actds.store.local import LocalStore, lock_dataset
from actds.version import __version__

Ints = npt.NDArray[np.int64]
_BLOCK = 1 << 23


@dataclass(frozen=True)
class Redacted:
    """What was done.

    Args:
        requests: numbers of the requests that went, by run, those of a killed call included.
        n_rows: rows that went, of each hook.
        shards: of this call: each shard that held some, and the shard in its place, if any row
            was left.
        n_parts: parts of tables that were written anew.
        n_removed: files that were removed.
        seal: the seal that covers it; None when the dataset was not sealed before either.
        dependents: files that name the dataset, where they were searched.
    """

    requests: dict[str, list[int]]
    n_rows: int
    shards: dict[str, str | None]
    n_parts: int
    n_removed: int
    seal: int | None
    digest: str
    dependents: list[str] = field(default_factory=list)


def redact(
    path: str | Path | Store,
    requests: Collection[str] = (),
    *,
    labels: Mapping[str, str] | None = None,
    dependents: Iterable[str | Path] = (),
) -> Redacted:
    """Take requests out of every file of a dataset.

    Args:
        path: the dataset; nothing writes the runs of these requests any more.
        requests: ids that clients gave or got, or ``RUN/NUMBER``.
        labels: requests with all of these labels are taken, too.
        dependents: files and folders to search for what was made from the dataset.

    Raises:
        ActdsError: E009 no such request, or no request at all; E010 a program writes the dataset;
            E305 a run that was not closed; E104, E201, E202, E204 a file that is damaged;
            E308, E309, E503 a failed write: call again; and what catalogue and seal raise.

    Spec: 0.1 section 8.6.
    """
    store = open_for_writing(path) if isinstance(path, str | Path) else path
    need_dataset(store)
    with ExitStack() as stack:
        if isinstance(store, LocalStore):
            stack.callback(os.close, lock_dataset(store.root))
        _end_dead_tools(store)
        catalog = read_catalog(store)
        # A dataset that was sealed lacks, at most, chains of tools in its seal.
        was_sealed = catalog.seal is not None and all(
            state.kind == "tool" or chain in catalog.seal.heads
            for chain, state in catalog.chains.items()
        )
        pending = [run for run in catalog.run_ids if left_over(catalog, run)]
        numbers, missing = _numbers(catalog, requests, labels)
        if missing and not pending:
            raise _no_such_request(missing)
        wanted = {run: catalog.redacted(run) for run in pending}
        wanted |= {run: catalog.redacted(run) | more for run, more in numbers.items()}
        if not wanted:
            raise ActdsError("E009", "requests", got="no request", expected="one or more")
        fresh = {
            run: sorted(all_of - (frozenset() if run in pending else catalog.redacted(run)))
            for run, all_of in wanted.items()
        }
        work = _Work(store)
        for run in wanted:
            _need_at_rest(catalog, run)
        chains = {run: _begin(catalog, run) for run in wanted}
        for run, chain in chains.items():
            work.of_run(catalog, chain, run, sorted(wanted[run]))
        for run, chain in chains.items():
            chain.close("finished", {"requests": len(wanted[run])})
        catalog = read_catalog(store)
        left = [path for run in wanted for path in files_left(catalog, run)]
        left += _never_committed(catalog, wanted)
        for name in left:
            remove_file(store, name)
        is_imported = any(map(catalog.is_imported, catalog.runs_with_data))
        n = seal(store, imported=is_imported).n if was_sealed else None
        digest = read_catalog(store).digest
    if missing:
        raise _no_such_request(missing)
    depending = find_dependents(store, dependents)
    return Redacted(fresh, work.n_rows, work.shards, work.n_parts, len(left), n, digest, depending)


def _end_dead_tools(store: Store) -> None:
    """Fence the tool chains that nobody works on any more."""
    catalog = read_catalog(store)
    tools = [chain for chain in catalog.chains.values() if chain.kind == "tool"]
    owners = find_owners(store, tools)
    owners.require_gone()
    for chain, who in owners.ended.items():
        fence(store, catalog.genesis.dataset, chain, f"{who}, and had not closed it")
    if isinstance(store, LocalStore):
        remove_stale(store)
        store.remove_temporary()


def _numbers(
    catalog: Catalog, wanted: Collection[str], labels: Mapping[str, str] | None
) -> tuple[dict[str, set[int]], set[str]]:
    """Return the requests that are wanted, by run, and the ids that are those of none."""
    numbers: dict[str, set[int]] = {}
    missing = set(wanted)
    forms = {text: _served_as(text) for text in wanted}
    for run in catalog.runs_with_data:
        table = catalog.table("requests", run, ["request", "external_id", "labels"])
        for number, external, text in zip(*(c.to_pylist() for c in table.columns), strict=True):
            names = {f"{run}/{number}"} & set(wanted)
            names |= {name for name, form in forms.items() if form.fullmatch(external)}
            if names or (labels and _has(text, labels)):
                numbers.setdefault(run, set()).add(number)
                missing -= names
    return numbers, missing


def _served_as(text: str) -> re.Pattern[str]:
    """Return what the engine may call a request of an id: one that a response had, or a client."""
    plain = re.escape(text)
    numbered = f"|{plain}-[0-9]+" if text.startswith("cmpl-") else ""
    return re.compile(f"(?:[0-9]+_)?(?:{plain}{numbered}|chatcmpl-{plain}|cmpl-{plain}-[0-9]+)")


def _no_such_request(missing: Collection[str]) -> ActdsError:
    step = "actds view shows the ids that there are. A request that was redacted has none any more."
    got = f"request {min(missing)!r:.80}"
    return ActdsError("E009", "requests", got=got, expected="one that is there", next_step=step)


def _has(text: str | None, labels: Mapping[str, str]) -> bool:
    known = {} if text is None else parse_labels(text, "requests labels")
    return all(name in known and label_text(known[name]) == labels[name] for name in labels)


def _need_at_rest(catalog: Catalog, run: str) -> None:
    for chain in catalog.chains.values():
        if chain.run == run and chain.state == "open":
            got = f"an open {chain.kind} chain of run {run}"
            step = "Wait for its end; of a process that is gone: actds recover."
            raise ActdsError(
                "E305", f"ledger/{chain.chain}", got=got, expected="a run at rest", next_step=step
            )


def _begin(catalog: Catalog, run: str) -> Chain:
    """Return a tool chain whose id two calls at once would share: the second one is refused."""
    text = f"{catalog.digest} {run} redact"
    chain = f"t-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    software = f"actds {__version__} redact"
    try:
        return Chain.begin(
            catalog.store, catalog.genesis.dataset, run, "tool", software, chain_id=chain
        )
    except ActdsError as error:
        if error.code != "E308":
            raise
        got, expected = "another redaction of it", "one at a time"
        raise BusyError("E010", f"ledger/{chain}", got=got, expected=expected) from None


def _never_committed(catalog: Catalog, runs: Iterable[str]) -> list[str]:
    """Return the files of some runs that nothing reaches: nobody knows what they hold."""
    chains = {state.chain for state in catalog.chains.values() if state.run in runs}
    left = []
    for path in catalog.store.list():
        folder, _, rest = path.partition("/")
        owner = rest.partition("/")[0]
        of_shard = folder == "shards" and owner.rpartition("-")[0] in chains
        of_run = folder in ("census", "losses", "readouts", "canary", "journal") and owner in runs
        if (of_shard or of_run) and path not in catalog.reached:
            left.append(path)
    return left


class _Work:
    """Writes shards and parts without some requests; what was done is counted."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.shards: dict[str, str | None] = {}
        self.n_rows = 0
        self.n_parts = 0

    def of_run(self, catalog: Catalog, chain: Chain, run: str, wanted: Sequence[int]) -> None:
        """Redact requests of a run.

        The steps come first: what they lose is counted from rows that are still there. The ids of
        the requests go last, by which a call after a kill finds them.
        """
        requests = pa.array(wanted, pa.uint32())
        self._steps(catalog, chain, run, wanted)
        for number, shard in enumerate(catalog.shards_of(run)):
            self._shard(chain, shard, wanted, f"{chain.chain}-{number:06d}")
        names: tuple[PartTable, ...] = ("spans", *LINES, "requests")
        for table in names:
            change = partial(_CHANGES.get(table, _without), requests=requests)
            self._parts(catalog, chain, run, table, wanted, change)

    def _steps(self, catalog: Catalog, chain: Chain, run: str, wanted: Sequence[int]) -> None:
        """Count the captured rows of each step that go among the filtered ones."""
        rows = [tables.empty("tokens").select(["request", "step"])]
        for _, shards in catalog.row_sets(run)[:1]:
            rows += [shard.tokens(["request", "step"]) for shard in shards]
        of_run, done = pa.concat_tables(rows), _done_before(catalog)
        self.n_rows += pc.sum(is_of(of_run, pa.array(wanted, pa.uint32()))).as_py() or 0

        def change(table: pa.Table, path: str) -> pa.Table | None:
            new = pa.array(sorted({*wanted} - done.get(path, set())), pa.uint32())
            return _moved(table, of_run.filter(is_of(of_run, new))["step"].to_numpy())

        self._parts(catalog, chain, run, "steps", wanted, change)

    def _parts(
        self,
        catalog: Catalog,
        chain: Chain,
        run: str,
        name: PartTable,
        wanted: Sequence[int],
        change: Callable[[pa.Table, str], pa.Table | None],
    ) -> None:
        for part in catalog.parts.get((run, name), []):
            path = part.file.path
            new = change(catalog.read_table(name, path), path)
            self._commit(catalog, chain, run, name, path, new, wanted)

    def _commit(
        self,
        catalog: Catalog,
        chain: Chain,
        run: str,
        name: PartTable,
        old: str,
        table: pa.Table | None,
        wanted: Sequence[int],
    ) -> None:
        """Commit a part in the place of another, under the next number that is free."""
        if table is None:
            return
        taken = [path for path in catalog.reached if layout.is_part_path(path, name, run)]
        path = layout.part_path(name, run, len(taken))
        if self.store.exists(path):  # of a call that was killed before its record
            self.store.remove(path)
        with chain.fatal():
            written = self.store.put_new(path, [tables.to_parquet(name, table)])
        entry = FileEntry(path=path, nbytes=written.nbytes, sha256=written.sha256)
        commit_redacted(chain, wanted, old, entry, table.num_rows)
        catalog.reached.add(path)
        self.n_parts += 1

    def _shard(self, chain: Chain, old: Shard, wanted: Sequence[int], name: str) -> None:
        tokens = old.tokens()
        is_gone = is_of(tokens, pa.array(wanted, pa.uint32())).to_numpy()
        if not is_gone.any():
            return
        if is_gone.all():
            commit_redacted(chain, wanted, layout.manifest_path(old.name), None, 0)
            self.shards[old.name] = None
            return
        new = NewShard(self.store, chain, name)
        with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="actds-encode") as pool:
            manifest = _write(new, old, tokens, _rows_left(old.manifest, ~is_gone), pool)
        new.commit(manifest, replaced=old.name, redacted=wanted)
        self.shards[old.name] = name


def _done_before(catalog: Catalog) -> dict[str, set[int]]:
    """Return the requests that each file lacks, by its path, from the records that made it."""
    by_new = {committed(change.body): change for change in catalog.replacements}
    done: dict[str, set[int]] = {}
    for path in by_new:
        at, lacks = path, set[int]()
        while at in by_new:
            lacks |= {*by_new[at].requests}
            at = by_new[at].old
        if path is not None:
            done[path] = lacks
    return done


def _moved(steps: pa.Table, of_rows: npt.NDArray[np.uint64]) -> pa.Table | None:
    """Return the steps with captured tokens moved to the filtered ones; None for no change."""
    number = steps["step"].to_numpy()
    affected, n = np.unique(of_rows, return_counts=True)
    n_gone = np.zeros(len(number), np.int64)
    if len(affected):
        at = np.minimum(np.searchsorted(affected, number), len(affected) - 1)
        n_gone = np.where(affected[at] == number, n[at], 0)
    if not n_gone.any():
        return None
    for name, sign in (("captured_tokens", -1), ("filtered_tokens", 1)):
        column = steps[name].to_numpy().astype(np.int64) + sign * n_gone
        steps = _with(steps, name, pa.array(column, steps.schema.field(name).type))
    return steps


def _with(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), values)


def _without(table: pa.Table, _: str, *, requests: pa.Array) -> pa.Table | None:
    keep = pc.invert(is_of(table, requests))
    return None if pc.all(keep).as_py() is not False else table.filter(keep)


def _spans(table: pa.Table, _: str, *, requests: pa.Array) -> pa.Table | None:
    """Return the spans with those that had a row, or referred to one, as filtered ones."""
    moved = pc.is_in(table["disposition"], pa.array(["captured", "cache_ref"]))
    moved = pc.and_(is_of(table, requests), moved)
    if not pc.any(moved).as_py():
        return None
    table = _with(table, "disposition", pc.if_else(moved, "filtered", table["disposition"]))
    table = _with(table, "reason", pc.if_else(moved, tables.REDACTED, table["reason"]))
    nothing = pa.scalar(None, pa.uint32())
    return _with(table, "ref_request", pc.if_else(moved, nothing, table["ref_request"]))


def _requests(table: pa.Table, _: str, *, requests: pa.Array) -> pa.Table | None:
    """Return the requests without what they were; how long they were, and when, stays."""
    redacted = is_of(table, requests)
    ids = pa.array([redacted_id(n) for n in table["request"].to_pylist()], pa.string())
    new = _with(table, "external_id", pc.if_else(redacted, ids, table["external_id"]))
    unserved = pc.is_in(table["finish_reason"], pa.array(tables.UNSERVED))
    for name in FORGOTTEN:
        column = new[name]
        of_column = redacted if name != "reason" else pc.and_(redacted, pc.invert(unserved))
        rows = [None if is_gone else value for is_gone, value in _pairs(of_column, column)]
        new = _with(new, name, pa.array(rows, column.type))
    return None if new.equals(table) else new


def _pairs(first: pa.ChunkedArray, second: pa.ChunkedArray) -> Iterator[tuple[bool, object]]:
    return zip(first.to_pylist(), second.to_pylist(), strict=True)


_CHANGES = {"spans": _spans, "requests": _requests}


def _rows_left(manifest: ShardManifest, keep: npt.NDArray[np.bool_]) -> Ints:
    """Return the rows of a shard that stay, in the order that its seed gives as many rows."""
    if manifest.permutation_seed is None:
        return np.flatnonzero(keep)
    order = row_order(len(keep), manifest.permutation_seed)
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    captured = at[np.sort(order[keep])]
    return captured[row_order(len(captured), manifest.permutation_seed)]


def _write(
    new: NewShard, old: Shard, tokens: pa.Table, rows: Ints, pool: Executor
) -> ShardManifest:
    """Write rows of a shard as a new one, read back and compared; return its manifest."""
    values = {}
    new.put(GROUP_METADATA, [arrays.group_metadata()])
    for hook in old.hooks:
        old.check(f"{layout.array_dir(hook)}/{arrays.SHARD_PATH}")
        with old.array(hook) as reader:
            bits, dtype = np.ascontiguousarray(reader.read_all(pool)[rows]), reader.dtype
        encoded = encoding.encode_array(bits, dtype, pool=pool)
        values[hook] = encoded.counts
        new.put_array(hook, encoded)
    left = tokens.take(pa.array(rows))
    new.put(TOKENS, [tables.to_parquet("tokens", left)])
    step = left["step"].to_numpy()
    files = new.files
    manifest = old.manifest.model_copy(
        update={
            "chain": new.chain.chain,
            "shard": new.name,
            "n_rows": len(rows),
            "values": values,
            "compression": "normal",
            "first_step": int(step.min()),
            "last_step": int(step.max()),
            "row_set_sha256": row_set_sha256(
                left["request"].to_numpy(), left["position"].to_numpy()
            ),
            "files": files,
            "root": files_root(files),
        }
    )
    for hook in old.hooks:
        _compare(old, Shard(old.store, manifest), hook, rows, pool)
    return manifest


def _compare(old: Shard, new: Shard, hook: str, rows: Ints, pool: Executor) -> None:
    with old.array(hook) as before, new.array(hook) as after:
        if not np.array_equal(before.read_all(pool)[rows], after.read_all(pool)):
            place = f"{layout.shard_dir(new.name)}/{layout.array_dir(hook)}"
            expected = f"those of {layout.shard_dir(old.name)}"
            raise ActdsError("E204", place, got="other bits", expected=expected)


def find_dependents(store: Store, where: Iterable[str | Path]) -> list[str]:
    """Return the files that hold the id of a dataset or the digest of one of its seals.

    Weights files, probes and policies, replays and shuffled copies say which dataset or seal they
    are of. What says nothing is not listed: a matrix in a file without a header, an archive.

    Args:
        store: the dataset's store.
        where: files, and folders with all that is under them. Of a dataset there its folder is
            returned.

    Raises:
        ActdsError: what the catalogue raises.
    """
    catalog, here = read_catalog(store), local_folder(store.uri)
    names = [catalog.genesis.dataset, *catalog.seal_digests]
    naming: dict[str, None] = {}
    for file in (file for place in where for file in _files(Path(place))):
        dataset = _dataset_of(file)
        if here is not None and dataset is not None and dataset.resolve() == here.resolve():
            continue
        if _holds(file, names):
            naming[str(file if dataset is None else dataset)] = None
    return [*naming]


def _files(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        yield place
        return
    yield from sorted(file for file in place.rglob("*") if file.is_file())


def _dataset_of(file: Path) -> Path | None:
    return next((folder for folder in file.parents if (folder / layout.GENESIS).exists()), None)


def _holds(file: Path, names: list[str]) -> bool:
    if file.name.startswith("origins-") and file.suffix == ".parquet":
        return _in_origins(file, names)
    wanted, overlap = [name.encode() for name in names], max(map(len, names)) - 1
    tail = b""
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            block = tail + block
            if any(name in block for name in wanted):
                return True
            tail = block[-overlap:]
    return False


def _in_origins(file: Path, names: list[str]) -> bool:
    try:
        table = pq.read_table(file, columns=["source_dataset", "source_seal"])
    except (pa.ArrowException, OSError, KeyError):
        return False  # no table of origins, whatever its name says
    return any(pc.any(pc.is_in(column, pa.array(names))).as_py() for column in table.columns)
