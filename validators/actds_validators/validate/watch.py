"""Watching: a harvest is validated while it runs, each shard once, as soon as it is committed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from actds.dataset.ledger import GENESIS_PREV, ChainState, chain_names, read_record
from actds.dataset.reading import Catalog, read_genesis, read_records
from actds.errors import ActdsError, BusyError, Finding
from actds.executor import ExecutorName
from actds.format.schema import Genesis, LedgerRecord, OpenBody, ShardManifest
from actds.format.shard import TOKENS
from actds.store import Store, layout, local_folder, open_store
from actds.store.local import lock_dataset
from actds_validators.validate.accounting import check_shard_tokens
from actds_validators.validate.files import (
    Stamp,
    check_array,
    check_digests,
    check_group,
    check_indexes,
    stamp,
)
from actds_validators.validate.validation import Level, Progress, Validation, validate

__all__ = ["Seen", "Watch", "watch"]


@dataclass(frozen=True)
class Seen:
    """What was validated so far.

    Args:
        n_shards: shards that are committed and were looked at.
        n_rows: their rows.
        nbytes: bytes that were read and hashed.
        n_chains: chains of the ledger.
        n_open: chains that are not ended.
        findings: what was found in this look, and in none before.
    """

    n_shards: int
    n_rows: int
    nbytes: int
    n_chains: int
    n_open: int
    findings: list[Finding]


@dataclass
class _Chain:
    """How far a chain was read."""

    name: str
    head: str = GENESIS_PREV
    n_records: int = 0
    first: LedgerRecord | None = None
    last: LedgerRecord | None = None
    broken: bool = False

    @property
    def ended(self) -> bool:
        return self.last is not None and self.last.type in ("close", "fence")


@dataclass
class Watch:
    """Follows a dataset; each ``look`` validates what was committed since the one before.

    Args:
        path: the dataset.
        level: how much is validated of each shard.
        executor: as of ``validate``.
        known: files whose digest was checked, each as it was then.
    """

    path: str | Path
    level: Level = "full"
    executor: ExecutorName = "threads"
    known: dict[str, Stamp] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store: Store = open_store(self.path)
        self._genesis: Genesis | None = None
        self._chains: dict[str, _Chain] = {}
        self._n_shards = self._n_rows = self._nbytes = 0

    def look(self) -> Seen:
        """Return what was seen, after validating what is new.

        Raises:
            ActdsError: E102, E103, E106 ``actds.json`` is no genesis.
        """
        findings: list[Finding] = []
        for chain, records in self._new_records(findings):
            findings += self._validate(chain, records)
        chains = self._chains.values()
        n_open = sum(not (chain.ended or chain.broken) for chain in chains)
        return Seen(self._n_shards, self._n_rows, self._nbytes, len(chains), n_open, findings)

    @property
    def is_sealed(self) -> bool:
        """Return whether every chain has ended and there is a seal that names each of them."""
        chains = self._chains.values()
        if not chains or not all(chain.ended for chain in chains):
            return False
        seals = [path for path in self.store.list("seal") if path.endswith(".json")]
        if not seals:
            return False
        try:
            return Catalog.read(self.store).is_sealed
        except ActdsError:
            return True  # the validation says what is wrong

    @property
    def is_held(self) -> bool:
        """Return whether a program writes the dataset; of a remote one nobody knows: True."""
        folder = local_folder(self.store.uri)
        if folder is None:
            return True
        try:
            os.close(lock_dataset(folder))
        except BusyError:
            return True
        except OSError:
            return False
        return False

    def _new_records(self, findings: list[Finding]) -> list[tuple[ChainState, list[LedgerRecord]]]:
        """Return the records since the last look, by chain."""
        if self._genesis is None:
            if not self.store.exists(layout.GENESIS):
                return []
            self._genesis = read_genesis(self.store)
        found = []
        for name in chain_names(self.store):
            chain = self._chains.setdefault(name, _Chain(name))
            if chain.ended or chain.broken:
                continue
            records = []
            try:
                while self.store.exists(layout.record_path(name, chain.n_records)):
                    records.append(self._next(chain))
            except ActdsError as error:
                chain.broken = True
                findings.append(Finding.from_error(error))
            state = _state(chain, records)
            if records and state is not None:
                found.append((state, records))
        return found

    def _next(self, chain: _Chain) -> LedgerRecord:
        assert self._genesis is not None, "it was read before any record"
        dataset, version = self._genesis.dataset, self._genesis.version
        record, chain.head = read_record(
            self.store, dataset, chain.name, chain.n_records, chain.head, version
        )
        chain.first = chain.first or record
        chain.last = record
        chain.n_records += 1
        return record

    def _validate(self, chain: ChainState, records: list[LedgerRecord]) -> list[Finding]:
        """Validate what some records committed; return what is wrong with it."""
        assert self._genesis is not None, "it was read before any record"
        catalog = read_records(self.store, self._genesis, chain, records)
        if self.level in ("full", "deep"):
            # As they were before they were read: what changes meanwhile is read again at the end.
            stamps = {path: stamp(self.store, path) for path in catalog.files}
            check_digests(catalog, self._count, self.executor)
            self.known |= {
                path: one
                for path, one in stamps.items()
                if one is not None and path not in catalog.unsound
            }
            check_indexes(catalog)
        for manifest in catalog.shards:
            self._check_shard(catalog, manifest)
            self._n_shards += 1
            self._n_rows += manifest.n_rows
        return [finding for _, finding in catalog.findings]

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes

    def _check_shard(self, catalog: Catalog, manifest: ShardManifest) -> None:
        check_group(catalog, manifest)
        for hook in manifest.hooks:
            with catalog.findings.noting("structure"):
                check_array(catalog, manifest, hook)
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if self.level == "quick" or path in catalog.unsound:
            return
        with catalog.findings.noting("integrity"):
            table = catalog.read_table("tokens", path)
            check_shard_tokens(catalog, manifest, table, path)


def _state(chain: _Chain, records: list[LedgerRecord]) -> ChainState | None:
    opening = chain.first.typed_body() if chain.first is not None else None
    if not isinstance(opening, OpenBody):
        return None
    return ChainState(chain.name, records, chain.head, "open", opening.kind, opening.run)


def watch(
    path: str | Path,
    level: Level = "full",
    *,
    interval_s: float = 2.0,
    idle_s: float = 30.0,
    seen: Callable[[Seen], None] = lambda seen: None,
    progress: Progress = lambda what, amount: None,
    executor: ExecutorName = "threads",
    seal: str | None = None,
) -> Validation:
    """Validate a dataset while it is written; return the validation of the whole at its end.

    Each shard is validated once, as soon as its record is in the ledger: documents, sizes, token
    table, digests. When the dataset is sealed, the whole is validated; files that were hashed and
    have not changed since are not read again. Without a seal that happens when nobody writes any
    more and nothing new came for ``idle_s``: then the validation says what is missing.

    Args:
        path: the dataset; it need not be there yet.
        level: how much to validate.
        interval_s: seconds between two looks.
        idle_s: seconds without anything new, and of a local dataset without a writer, after which
            the harvest is taken for ended. Of a remote dataset nobody knows whether it has one.
        seen: called after each look that found something new, and after the first.
        progress: as of ``validate``, for the end.
        executor: as of ``validate``.
        seal: as of ``validate``.

    Raises:
        ActdsError: E102, E103, E106 ``actds.json`` is no genesis.
    """
    following = Watch(path, level, executor)
    before: Seen | None = None
    last_news = time.monotonic()
    while True:
        now = following.look()
        if before is None or _news(now) != _news(before) or now.findings:
            seen(now)
            last_news = time.monotonic()
        before = now
        if following.is_sealed:
            break
        if time.monotonic() - last_news > idle_s:
            if local_folder(following.store.uri) is None or not following.is_held:
                break
            last_news = time.monotonic()
        time.sleep(interval_s)
    return validate(path, level, progress, executor, seal, following.known)


def _news(seen: Seen) -> tuple[int, ...]:
    return seen.n_shards, seen.n_rows, seen.n_chains, seen.n_open
