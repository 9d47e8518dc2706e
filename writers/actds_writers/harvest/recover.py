"""Recovery after a crash: closes open chains, accounts from the census journal, and seals.

Every acknowledged row is kept; every position without one becomes ``aborted``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from actds.dataset.catalog import Catalog
from actds.dataset.heartbeat import remove_stale
from actds.dataset.ledger import Chain, ChainState, fence, read_ledger
from actds.dataset.owners import SILENCE_S, find_owners
from actds.dataset.reading import CENSUS_TABLES, need_dataset, read_catalog, read_genesis
from actds.errors import ActdsError, BusyError
from actds.format.inclusion import Design
from actds.format.schema import Seal, ShardBody
from actds.publish.sealing import seal
from actds.store import TEMPORARY, Store, layout, local_folder, open_for_writing
from actds.store.local import LocalStore, lock_dataset
from actds.version import __version__
from actds_writers.census.census import Census
from actds_writers.census.process import (
    RESERVE,
    WriterEnd,
    broken,
    commit_census,
    end_writer_chain,
    merged,
    read_journal,
    remove_journal,
    segments,
)
from actds_writers.ipc.messages import ClientFacts, RequestArrived

_CLEARED = ("journal/", "census/", "losses/", "readouts/", "canary/", "runs/", "seal/")
_MAX_REQUEST_GAP = 1 << 20

Outcome = Literal["accounted", "recovered", "empty", "imported", "unaccountable", "at work"]


@dataclass(frozen=True)
class RunFound:
    """One run as recovery found it, and the outcome.

    Args:
        outcome: ``accounted`` before, ``recovered`` now, ``empty`` when it committed nothing,
            ``imported`` when it was made elsewhere, and never had a census; ``unaccountable``
            when neither census nor journal is there; ``at work`` when its processes live.
    """

    run: str
    chains: dict[str, str]
    n_rows: int
    n_segments: int
    outcome: Outcome
    totals: dict[str, int]


@dataclass(frozen=True)
class RecoverResult:
    """The result of a recovery."""

    path: str
    runs: tuple[RunFound, ...]
    unreachable: dict[str, int]
    cleared: bool
    seal: Seal | None
    error: ActdsError | None

    def as_json(self) -> dict[str, Any]:
        return {
            "actds": __version__,
            "path": self.path,
            "runs": [run.__dict__ for run in self.runs],
            "unreachable": self.unreachable,
            "cleared": self.cleared,
            "seal": self.seal.n if self.seal else None,
            "error": str(self.error) if self.error else None,
        }


def recover(
    path: str | Path, *, clear: bool = False, say: Callable[[str], None] = lambda line: None
) -> RecoverResult:
    """Recover the runs of a dataset whose processes are gone; a second call changes nothing.

    Keeps every acknowledged row, accounts for all others as aborted, closes open ledger chains and
    seals the dataset. When it cannot be sealed, the result has the error. Runs whose processes live
    beside them, as of other servers, are left alone, and then nothing is sealed.

    Args:
        path: the dataset, a folder or a URI. Of a process of another machine only its silence
            shows that it is gone: it is watched for a minute.
        clear: remove the files that no record names; not beside runs that are at work.
        say: takes a line for the user before a wait.

    Raises:
        ActdsError: E101 no dataset; E010 live processes, and none that is gone; E503 the disk
            refuses; any error of ledger or files.

    Example:
        >>> result = actds.recover("acts")  # doctest: +SKIP
        >>> [(run.outcome, run.n_rows) for run in result.runs]  # doctest: +SKIP
        [('recovered', 18432)]

    Spec: 0.1 section 9.7.
    """
    store = open_for_writing(path)
    need_dataset(store)
    folder = local_folder(path)
    lock, alone = (None, True) if folder is None else _lock(folder, alone=clear)
    try:
        runs = recover_runs(store, beside="others", alone=alone, say=say)
        error, sealed = _unaccountable(runs), None
        if not alone or any(run.outcome == "at work" for run in runs):
            return RecoverResult(store.uri, tuple(runs), {}, False, None, error)
        try:
            sealed = seal(store, apart=True) if error is None else None
        except ActdsError as refused:
            error = refused
        unreachable = dict(_unreachable(store))
        if clear:
            store.remove_temporary()
            _clear(store, unreachable)
        return RecoverResult(store.uri, tuple(runs), unreachable, clear, sealed, error)
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, alone: bool) -> tuple[int, bool]:
    """Lock a local dataset, beside engines that share it unless ``alone``; say if it is alone."""
    try:
        return lock_dataset(folder), True
    except BusyError:
        if alone:
            raise
        return lock_dataset(folder, shared=True), False


def recover_runs(
    store: Store,
    *,
    only: Callable[[str], bool] = lambda run: True,
    beside: Literal["nobody", "others", "seen"] = "nobody",
    alone: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[RunFound]:
    """End open chains and account for their runs; the caller holds the dataset's lock.

    Nothing is changed of a run before it is certain that every process of it is gone.

    Args:
        only: whether a run is looked at; all others are left as they are.
        beside: with ``nobody``, a live process is refused before anything is changed. With
            ``others``, each run is watched, those whose processes are gone are recovered, and the
            rest is returned as ``at work``; refused if there is no other. With ``seen``, nothing is
            watched, and a process that may live is refused after the others were recovered.
        alone: whether the caller holds the lock of a local folder alone.

    Raises:
        ActdsError: E010 as said.

    Spec: 0.1 section 9.7.
    """
    genesis = read_genesis(store)
    before = {
        chain: state
        for chain, state in read_ledger(store, genesis.dataset).items()
        if only(state.run)
    }
    owners = find_owners(
        store,
        before.values(),
        silence_s=0 if beside == "seen" else SILENCE_S,
        each=beside == "others",
        alone=alone,
        say=say,
    )
    living = owners.living
    ended = {c: who for c, who in owners.ended.items() if before[c].run not in living}
    if beside == "nobody" or (beside == "others" and not ended):
        owners.require_gone()
    # Space that a census reserved for its tables, which are written now.
    folder = local_folder(store.uri)
    for reserved in folder.glob(f"{RESERVE}*") if folder else ():
        run = reserved.name.removeprefix(RESERVE)
        if only(run) and run not in living:
            reserved.unlink()
    for chain, who in ended.items():
        fence(store, genesis.dataset, chain, f"{who}, and had not closed it")
    remove_stale(store, lambda run: run in living or not only(run))
    catalog = read_catalog(store, apart=True)
    runs = [run for run in catalog.run_ids if only(run)]
    if beside == "seen":
        runs = [run for run in runs if run not in living]
    recovered = [_recover_run(store, catalog, run, before, run in living) for run in runs]
    if beside == "seen":
        owners.require_gone()
    return recovered


def require_accounted(runs: list[RunFound]) -> None:
    """Raise E312 when a run cannot be accounted for, E403 when one was imported."""
    imported = [run.run for run in runs if run.outcome == "imported"]
    if imported:
        place, step = f"census/{imported[0]}", "Harvest into a dataset of its own."
        got, expected = "an imported run", "harvested runs alone"
        raise ActdsError("E403", place, got=got, expected=expected, next_step=step)
    error = _unaccountable(runs)
    if error is not None:
        raise error


def _recover_run(
    store: Store, catalog: Catalog, run: str, before: dict[str, ChainState], lives: bool
) -> RunFound:
    chains = {chain: state for chain, state in before.items() if state.run == run}
    unrecovered = RunFound(
        run=run,
        chains={chain: state.state for chain, state in chains.items()},
        n_rows=sum(
            body.n_rows
            for state in catalog.chains.values()
            for body in (record.typed_body() for record in state.records)
            if state.run == run and state.kind == "writer" and isinstance(body, ShardBody)
        ),
        n_segments=len(segments(store, run)),
        outcome="accounted",
        totals={},
    )
    if lives:
        return replace(unrecovered, outcome="at work")
    if _is_accounted(catalog, run):
        return unrecovered
    if catalog.is_imported(run):
        return replace(unrecovered, outcome="imported")
    ended = end_writer_chain(store, catalog.genesis.dataset, run)
    if ended is None or not (unrecovered.n_segments or run in catalog.runs_with_data):
        return replace(unrecovered, outcome="empty")
    if not unrecovered.n_segments and _needs_census(catalog, run):
        return replace(unrecovered, outcome="unaccountable")
    totals = _replay(store, catalog, run, ended)
    return replace(unrecovered, outcome="recovered", totals=totals)


def _is_accounted(catalog: Catalog, run: str) -> bool:
    closed = any(
        chain.run == run and chain.kind == "census" and chain.state == "closed"
        for chain in catalog.chains.values()
    )
    return closed and all(catalog.parts.get((run, table)) for table in CENSUS_TABLES)


def _needs_census(catalog: Catalog, run: str) -> bool:
    shards = any(manifest.run == run for manifest in (*catalog.shards, *catalog.replaced))
    return shards or any(catalog.parts.get((run, table)) for table in ("drops", "readouts"))


def _replay(store: Store, catalog: Catalog, run: str, ended: WriterEnd) -> dict[str, int]:
    census, client = Census(), ClientFacts()
    place = layout.journal_path(run, 0)
    n_requests = 0
    for message in read_journal(store, catalog.genesis.dataset, run):
        if isinstance(message, ClientFacts):
            client = merged(client, message)
            continue
        if isinstance(message, RequestArrived):
            n_requests += 1
            if not 0 <= message.request < n_requests + _MAX_REQUEST_GAP:
                raise broken(place, f"request {message.request}", "requests numbered from 0")
        try:
            census.observe(message)
        except (KeyError, IndexError, ValueError) as error:
            raise broken(place, repr(error)[:200], "messages of one run, in order") from None
    for (phase, _), step in ended.acknowledged.items():
        if not census.has_scheduled(step):
            raise broken(
                place, f"no message for step {step}", f"one: its {phase} rows are committed"
            )
    record = catalog.runs.get(run)
    policy = None if record is None else record.fields.get("capture.overflow_policy")
    tables = census.tables(
        ended.acknowledged,
        client,
        ended.dropped_steps,
        Design.of(record),
        "" if policy is None else str(policy.value),
    )
    present = {
        part.file.path: part
        for table in (*CENSUS_TABLES, "roles", "origins", "sampled")
        for part in catalog.parts.get((run, table), [])
    }
    software = f"actds {__version__} recover"
    chain = Chain.begin(store, catalog.genesis.dataset, run, "census", software)
    commit_census(store, chain, run, tables, present)
    chain.close("interrupted", tables.totals)
    return tables.totals


def _unaccountable(runs: list[RunFound]) -> ActdsError | None:
    for run in runs:
        if run.outcome == "unaccountable":
            return ActdsError(
                "E312",
                f"journal/{run.run}",
                got=f"no journal and no census of {run.n_rows} committed rows",
                expected="a journal or a census",
                next_step="It was written before there were journals: write a new dataset.",
            )
    return None


def _unreachable(store: Store) -> Iterator[tuple[str, int]]:
    """Yield path and size of the files that dead processes left; unknown files are not listed."""
    catalog = read_catalog(store)
    manifests = (*catalog.shards, *catalog.replaced)
    committed = {layout.shard_dir(manifest.shard) for manifest in manifests}
    known = catalog.reached | {layout.GENESIS, *layout.BESIDE}
    for path in store.list():
        shard = layout.shard_dir(path.split("/")[1]) if path.startswith("shards/") else None
        stray = path.startswith(_CLEARED) if shard is None else shard not in committed
        if stray and path not in known:
            with suppress(ActdsError):  # a link or a folder, which no writer leaves
                yield path, store.size(path)
    if isinstance(store, LocalStore):  # a put into an object store leaves no temporary file
        yield from store.temporary()


def _clear(store: Store, unreachable: Iterable[str]) -> None:
    for path in unreachable:
        if not path.rpartition("/")[2].startswith(TEMPORARY):
            store.remove(path)
    for run in {path.split("/")[1] for path in unreachable if path.startswith("journal/")}:
        remove_journal(store, run)


def clear_ended(store: Store, runs: Iterable[RunFound]) -> None:
    """Remove what ended runs left and no record names; a store that refuses keeps it.

    No record can name it later: their chains have ended. Temporary files stay, so that a process
    that only stood still fails at its next record (E308) and not before.
    """
    ended = {
        name
        for run in runs
        if run.outcome in ("recovered", "empty") or (run.outcome == "accounted" and run.n_segments)
        for name in (run.run, *run.chains)
    }
    with suppress(ActdsError):
        if ended:
            _clear(store, [path for path, _ in _unreachable(store) if _owner(path) in ended])


def _owner(path: str) -> str:
    """Return the run of a file that nothing reaches, or the chain whose shard it is of."""
    name = path.split("/")[1].removesuffix(".json")
    return name.rpartition("-")[0] if path.startswith("shards/") else name
