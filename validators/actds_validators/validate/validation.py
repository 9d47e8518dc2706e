"""Validation: the gate before training. Every check that a level asks for, and what they found.

The ledger is checked here; shards, accounting and readouts have modules of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from actds.dataset.account import TOTALS
from actds.dataset.catalog import Catalog
from actds.dataset.ledger import GENESIS_PREV, ChainState, chain_names, read_record
from actds.dataset.reading import read_catalog, read_dataset, read_genesis, read_records
from actds.errors import ActdsError, BusyError, CheckName, Finding
from actds.executor import ExecutorName
from actds.format.schema import Genesis, LedgerRecord, OpenBody, ShardManifest
from actds.format.shard import TOKENS
from actds.publish.card import compare_card
from actds.publish.sealing import check_pin, check_provenance, check_sums, parse_pin
from actds.store import Store, layout, local_folder, open_store
from actds.store.local import lock_dataset
from actds.version import __version__
from actds_validators.validate.accounting import RunAccount, check_accounting, check_side_tables
from actds_validators.validate.readouts import check_readouts
from actds_validators.validate.shards import (
    Stamp,
    check_arrays,
    check_digests,
    check_indexes,
    check_shard_tokens,
    check_structure,
    check_values,
    stamp,
    values_nbytes,
)
from actds_validators.validate.telemetry import check_telemetry

Level = Literal["quick", "standard", "full", "deep"]
State = Literal["passed", "failed", "skipped"]
Progress = Callable[[str, int], None]

LEVELS: tuple[Level, ...] = ("quick", "standard", "full", "deep")
CHECKS: dict[CheckName, Level] = {
    "ledger": "quick",
    "structure": "quick",
    "integrity": "quick",
    "provenance": "quick",
    "accounting": "standard",
    "values": "deep",
}
"""Every check and the lowest level that runs it; integrity grows with the level."""

_INTEGRITY = {
    "quick": "sizes of all files, digests of documents",
    "standard": "sizes of all files, digests of documents and tables",
    "full": "digests of all files",
    "deep": "digests of all files, checksums of all chunks",
}

_NOT_READ: dict[Level, str] = {
    "quick": "no table and no array was read",
    "standard": "no array was read",
    "full": "",
    "deep": "",
}
"""What a level does not look at, where it may therefore be anything."""


@dataclass(frozen=True)
class Check:
    name: CheckName
    state: State
    detail: str


@dataclass(frozen=True)
class Validation:
    """What ``actds validate`` says.

    Args:
        path: the dataset's path as it was given.
        level: how much was checked.
        dataset: its id; None when ``actds.json`` cannot be read.
        seal: number of the seal that covers the whole ledger, if there is one.
        digest: digest of that seal, which names the dataset's content.
        checks: every check, in order.
        findings: everything found, errors first.
        runs: totals by run; empty below level ``standard``.
        duration_s: how long it took.
        pinned: number of the seal that was pinned, which the dataset extends.
        catalog: its ledger and documents; None when ``actds.json`` cannot be read.
    """

    path: str
    level: Level
    dataset: str | None
    seal: int | None
    digest: str | None
    checks: list[Check]
    findings: list[Finding]
    runs: dict[str, dict[str, int]]
    duration_s: float
    pinned: int | None = None
    catalog: Catalog | None = field(default=None, repr=False, compare=False)

    def found_by(self, name: CheckName) -> list[Finding]:
        if self.catalog is None:
            return self.findings if name == "structure" else []
        of_check = {finding for check, finding in self.catalog.findings if check == name}
        return [finding for finding in self.findings if finding in of_check]

    @property
    def not_read(self) -> str:
        return _NOT_READ[self.level]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "warning"]

    @property
    def totals(self) -> dict[str, int]:
        if not self.runs:
            return {}
        return {name: sum(run[name] for run in self.runs.values()) for name in TOTALS}

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 clean, 1 findings, 3 not readable as a dataset.

        Args:
            strict: count warnings as findings.
        """
        if self.dataset is None:
            return 3
        return int(bool(self.errors or (strict and self.warnings)))

    def as_json(self, *, strict: bool = False) -> dict[str, Any]:
        return {
            "actds": __version__,
            "path": self.path,
            "dataset": self.dataset,
            "level": self.level,
            "strict": strict,
            "ok": self.exit_code(strict=strict) == 0,
            "exit_code": self.exit_code(strict=strict),
            "sealed": self.seal is not None,
            "seal": self.seal,
            "digest": self.digest,
            "pinned": self.pinned,
            "checks": [asdict(check) for check in self.checks],
            "findings": [finding.as_json() for finding in self.findings],
            "runs": self.runs,
            "totals": self.totals,
            "duration_s": round(self.duration_s, 3),
        }


def validate(
    path: str | Path | Store,
    level: Level = "full",
    progress: Progress = lambda what, amount: None,
    executor: ExecutorName = "threads",
    seal: str | None = None,
    known: Mapping[str, Stamp] = MappingProxyType({}),
    *,
    imported: bool = False,
) -> Validation:
    """Check a dataset against the spec and return everything that was found.

    ``quick`` reads the ledger, the documents and the sizes of all files. ``standard`` reads the
    tables as well and accounts for every position. ``full`` reads and hashes every byte. ``deep``
    decodes every chunk and looks at the values. ``full`` is the default: it is the lowest level
    that would notice changed activations, and a gate that lets those through is none.

    A file is hashed before it is parsed, and one whose digest differs is not parsed at all. Tables
    are parsed in a process of their own, see ``actds.format.apart``.

    Args:
        path: the dataset.
        level: how much to check.
        progress: called with what is done (``bytes``, ``rows``, ``values``) and how much of it;
            before that, with how much there will be (``all bytes``, ``all rows``, ``all values``).
        executor: where files are hashed and rows decoded: ``threads`` or ``processes`` of this
            machine, or ``ray``.
        seal: digest of a seal, ``sha256:HEX``: the dataset must have that seal, or later ones that
            extend it; else E804 or E805 is among the findings.
        known: files whose digest was checked before, as they were then; see ``check_digests``.
        imported: whether an imported run, which has no census, is a note and no error.

    Raises:
        ActdsError: E009 the pin is no digest.

    Spec: 0.1 sections 12 and 15.5.
    """
    began = time.monotonic()
    pin = None if seal is None else parse_pin(seal)
    store = open_store(path)
    try:
        catalog = read_dataset(store)
    except Exception as error:
        return _unreadable(store, level, _coded(error), began)
    checks, pinned = _Checks(catalog, level, progress, executor, known, imported), None
    try:
        if pin is not None:
            with catalog.findings.noting("ledger"):
                pinned = check_pin(catalog, pin)
        checks.run()
    except Exception as error:
        catalog.findings.take("structure", _coded(error))
    return checks.result(began, pinned)


def _coded(error: Exception) -> ActdsError:
    """Return an error with a code: the gate stays shut, what is not understood is not valid."""
    if isinstance(error, ActdsError):
        return error
    got = f"{type(error).__name__}: {error}"[:400]
    return ActdsError("E901", "actds", got=got, expected="a check that ends")


@dataclass
class _Checks:
    """The checks of a level, and the accounts of the runs, once they are made."""

    catalog: Catalog
    level: Level
    progress: Progress
    executor: ExecutorName
    known: Mapping[str, Stamp]
    imported: bool
    accounts: list[RunAccount] = field(default_factory=list)

    def run(self) -> None:
        catalog, level, progress = self.catalog, self.level, self.progress
        if level != "quick":
            catalog.parse_apart()
        _check_ledger(catalog)
        check_structure(catalog)
        _check_list(catalog)
        check_provenance(catalog, catalog.findings, imported=self.imported)
        if level in ("full", "deep"):
            files = catalog.files.keys() - catalog.unsound
            progress("all bytes", sum(catalog.files[path].nbytes for path in files))
            check_digests(catalog, partial(progress, "bytes"), self.executor, self.known)
            check_indexes(catalog)
        if level == "quick":
            return
        progress("all rows", sum(manifest.n_rows for manifest in catalog.shards))
        self.accounts += check_accounting(catalog, partial(progress, "rows"))
        check_side_tables(catalog)
        check_telemetry(catalog)
        readouts = check_readouts(catalog, values=level == "deep")
        if level == "deep":
            progress("all values", sum(values_nbytes(catalog, m) for m in catalog.shards))
            check_values(catalog, partial(progress, "values"), readouts, self.executor)
        _check_card(catalog)

    def result(self, began: float, pinned: int | None) -> Validation:
        catalog = self.catalog
        order = {"error": 0, "warning": 1, "note": 2}
        noted = dict.fromkeys(finding for _, finding in catalog.findings)
        seal = catalog.seal if catalog.is_sealed else None
        return Validation(
            path=catalog.store.uri,
            level=self.level,
            dataset=catalog.genesis.dataset,
            seal=seal.n if seal else None,
            digest=catalog.seal_sha256 if seal else None,
            checks=[self._check(name) for name in CHECKS],
            findings=sorted(noted, key=lambda finding: (order[finding.severity], finding.code)),
            runs={account.run: account.account.totals for account in self.accounts},
            duration_s=time.monotonic() - began,
            pinned=pinned,
            catalog=catalog,
        )

    def _check(self, name: CheckName) -> Check:
        if LEVELS.index(CHECKS[name]) > LEVELS.index(self.level):
            return Check(name, "skipped", f"level {CHECKS[name]} runs it")
        noted = ((check, finding.severity) for check, finding in self.catalog.findings)
        failed = (name, "error") in noted
        unjudged = name == "accounting" and any(not account.complete for account in self.accounts)
        return Check(name, "failed" if failed or unjudged else "passed", self._detail(name))

    def _detail(self, name: CheckName) -> str:
        catalog = self.catalog
        match name:
            case "ledger":
                n_records = sum(len(chain.records) for chain in catalog.chains.values())
                n_chains, n_seals = len(catalog.chains), len(catalog.seals)
                return f"chains {n_chains}, records {n_records}, seals {n_seals}"
            case "structure":
                n_hooks = len(catalog.genesis.hooks)
                return f"shards {len(catalog.shards)}, hooks {n_hooks}, files {len(catalog.files)}"
            case "integrity":
                return _INTEGRITY[self.level]
            case "provenance":
                return f"run records {len(catalog.runs)}"
            case "accounting":
                return self._accounted()
            case "values":
                return "every row of every hook decoded"

    def _accounted(self) -> str:
        judged = [account for account in self.accounts if account.complete]
        rows = sum(account.account.totals["rows"] for account in judged)
        runs = self.catalog.runs_with_data
        text = f"runs {len(judged)} of {len(runs)}, rows {rows:,} against the census"
        imported = sum(map(self.catalog.is_imported, runs))
        text += f"; {imported} imported, which have none" if imported else ""
        return text if len(judged) + imported == len(runs) else f"{text}; the others cannot be read"


def _check_ledger(catalog: Catalog) -> None:
    """Check that the ledger is complete: every chain ended, a seal over all; notes E305, E306.

    Spec: 0.1 sections 8.2 and 8.4.
    """
    for name, state in catalog.chains.items():
        if state.state == "open":
            got = f"an open {state.kind} chain of run {state.run}"
            catalog.findings.add("ledger", "E305", f"ledger/{name}", got, "a close or a fence")
    if not catalog.chains:
        expected = "at least one, closed and sealed"
        catalog.findings.add("ledger", "E306", "ledger", "no chain", expected)
    elif not catalog.is_sealed:
        catalog.findings.take("ledger", catalog.not_sealed())


def _is_clean(catalog: Catalog) -> bool:
    noted = (finding.severity for _, finding in catalog.findings)
    return catalog.is_sealed and "error" not in noted


def _check_card(catalog: Catalog) -> None:
    """Compare the card with the dataset; notes E110. Nothing hashes it: it names the seal.

    Spec: 0.1 section 2.4.
    """
    if _is_clean(catalog):
        with catalog.findings.noting("structure"):
            for finding in compare_card(catalog):
                catalog.findings.take("structure", finding)


def _check_list(catalog: Catalog) -> None:
    """Note a SHA256SUMS that is not that of the seal: a warning, since no reader takes it.

    Where something else is wrong, nobody knows what it should say.

    Spec: 0.1 section 15.1.
    """
    if _is_clean(catalog):
        try:
            check_sums(catalog)
        except ActdsError as error:
            finding = replace(Finding.from_error(error), severity="warning")
            catalog.findings.take("integrity", finding)


def _unreadable(store: Store, level: Level, error: ActdsError, began: float) -> Validation:
    name: CheckName = "structure"
    checks = [Check(check, "failed" if check == name else "skipped", "") for check in CHECKS]
    finding = Finding.from_error(error)
    took = time.monotonic() - began
    return Validation(store.uri, level, None, None, None, checks, [finding], {}, took)


@dataclass(frozen=True)
class Seen:
    """What was validated so far; ``findings`` are those of this look, and of none before."""

    n_shards: int
    n_rows: int
    nbytes: int
    n_chains: int
    n_open: int
    findings: list[Finding] = field(compare=False)


@dataclass
class _Chain:
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
    """Follows a dataset; each ``look`` validates what was committed since the one before."""

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
        findings: list[Finding] = []
        for chain, records in self._new_records(findings):
            findings += self._validate(chain, records)
        chains = self._chains.values()
        n_open = sum(not (chain.ended or chain.broken) for chain in chains)
        return Seen(self._n_shards, self._n_rows, self._nbytes, len(chains), n_open, findings)

    @property
    def is_sealed(self) -> bool:
        chains = self._chains.values()
        if not chains or not all(chain.ended for chain in chains):
            return False
        seals = [path for path in self.store.list("seal") if path.endswith(".json")]
        if not seals:
            return False
        try:
            return read_catalog(self.store).is_sealed
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
        if self._genesis is None:
            if not self.store.exists(layout.GENESIS):
                return []
            self._genesis = read_genesis(self.store)
        news = []
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
                news.append((state, records))
        return news

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
        assert self._genesis is not None, "it was read before any record"
        catalog = read_records(self.store, self._genesis, chain, records)
        if self.level in ("full", "deep"):
            # As they were before they were read: what changes meanwhile is read again at the end.
            stamps = {path: stamp(self.store, path) for path in catalog.files}
            check_digests(catalog, self._count, self.executor)
            self.known |= {
                path: now
                for path, now in stamps.items()
                if now is not None and path not in catalog.unsound
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
        check_arrays(catalog, manifest)
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
        interval_s: seconds between two looks.
        idle_s: seconds without anything new, and of a local dataset without a writer, after which
            the harvest is taken for ended. Of a remote dataset nobody knows whether it has one.
        seen: called after each look that found something new, and after the first.

    Raises:
        ActdsError: E102, E103, E106 ``actds.json`` is no genesis.
    """
    following = Watch(path, level, executor)
    before: Seen | None = None
    last_news = time.monotonic()
    while True:
        now = following.look()
        if now != before or now.findings:
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
