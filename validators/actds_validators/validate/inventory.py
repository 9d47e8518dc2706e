"""The dataset as far as it can be read: every document on its own, so that all faults show.

``actds.reading`` stops at the first fault, because a reader must. A validator goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from actds import schema
from actds.accounting.account import TOTALS
from actds.errors import ActdsError, Finding, Severity
from actds.format import canonical, layout, tables
from actds.format.readouts import readouts_of
from actds.format.shard import file_names, files_root
from actds.format.tables import TableName
from actds.ledger import read_chain
from actds.reading import CENSUS_TABLES, heads_root
from actds.replacement import Replacement, resolve
from actds.schema import (
    ChainKind,
    CloseBody,
    FileEntry,
    Genesis,
    Head,
    LedgerRecord,
    OpenBody,
    PartBody,
    ReplaceBody,
    RunBody,
    RunRecord,
    Seal,
    ShardBody,
    ShardManifest,
)
from actds.store import Store

CheckName = Literal["ledger", "structure", "integrity", "provenance", "accounting", "values"]
_SEAL_NAME = re.compile(r"seal/([0-9]{4,8})\.json")


@dataclass(frozen=True)
class Chain:
    """A chain as far as it can be read; ``head`` is None when a link is broken."""

    chain: str
    kind: str | None
    run: str | None
    records: list[LedgerRecord]
    state: Literal["open", "closed", "fenced", "broken"]
    head: Head | None

    @property
    def close(self) -> CloseBody | None:
        """Return the body of the close record, if there is one."""
        body = self.records[-1].typed_body() if self.records else None
        return body if isinstance(body, CloseBody) else None


@dataclass
class Inventory:
    """What a dataset holds, and what is wrong with it so far.

    Args:
        store: where the dataset stands.
        genesis: what the dataset is.
        chains: every chain, by id.
        runs: run records that could be read.
        shards: manifests that could be read, in ledger order, of the shards that stand; one that
            replaces another stands in its place.
        replaced: manifests of shards that are read no more; their data may be gone.
        replacements: replace records whose manifest could be read.
        parts: committed parts by (run, table), with the chain that committed them.
        seals: seals that could be read, in order.
        files: entry of every data file that a document pins, by path in the dataset.
        reached: every path that a document names.
        findings: what was found, by check.
        unsound: paths that must not be parsed: missing, or other bytes than were committed.
        opaque: folders whose own document cannot be read, so that nobody knows what they hold.
        incomplete: runs of which something committed cannot be read: nothing adds up then.
    """

    store: Store
    genesis: Genesis
    genesis_sha256: str
    chains: dict[str, Chain] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    shards: list[ShardManifest] = field(default_factory=list)
    replaced: list[ShardManifest] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)
    parts: dict[tuple[str, str], list[tuple[str, PartBody]]] = field(default_factory=dict)
    seals: list[Seal] = field(default_factory=list)
    seal_sha256: str | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    findings: list[tuple[CheckName, Finding]] = field(default_factory=list)
    unsound: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)

    def add(
        self,
        check: CheckName,
        code: str,
        place: str,
        got: str,
        expected: str,
        severity: Severity = "error",
    ) -> None:
        """Note one finding of a check."""
        self.findings.append((check, Finding(code, place, got, expected, severity)))

    @contextmanager
    def noting(self, check: CheckName) -> Iterator[None]:
        """Run a block; the error that ends it becomes a finding of a check."""
        try:
            yield
        except ActdsError as error:
            self.findings.append((check, Finding.from_error(error)))

    @property
    def seal(self) -> Seal | None:
        """Return the highest seal, when it covers every chain that is there now."""
        if self.seals and self.seals[-1].heads.keys() == self.chains.keys():
            return self.seals[-1]
        return None

    @property
    def runs_with_data(self) -> list[str]:
        """Return the runs that committed a row or a part, in the order of the chains' ids."""
        with_data = {manifest.run for manifest in self.shards} | {run for run, _ in self.parts}
        return sorted(with_data)

    def sound_table(self, run: str, name: TableName) -> pa.Table | None:
        """Return a table of a run, all parts one after the other; None when one is unsound.

        Raises:
            ActdsError: as ``read`` and ``tables.from_parquet``.
        """
        parts = [tables.empty(name)]
        for _, body in self.parts.get((run, name), []):
            if body.file.path in self.unsound:
                return None
            parts.append(tables.from_parquet(name, self.read(body.file.path), body.file.path))
        return pa.concat_tables(parts)

    def read(self, path: str) -> bytes:
        """Return the bytes of a pinned file, when they are what was committed.

        Raises:
            ActdsError: E104 missing; E107 a link; E201 size; E202 digest.

        Spec: 0.1 section 2.3.
        """
        entry = self.files[path]
        nbytes = self.store.size(path)
        if nbytes != entry.nbytes:
            raise ActdsError("E201", path, got=f"{nbytes} bytes", expected=f"{entry.nbytes} bytes")
        data = self.store.read(path)
        got = canonical.digest(data)
        if got != entry.sha256:
            raise ActdsError("E202", path, got=f"sha256 {got}", expected=entry.sha256)
        return data


def take_inventory(store: Store) -> Inventory:
    """Return everything that can be read of a dataset, with a finding for all that cannot.

    Raises:
        ActdsError: E101 no dataset; E102, E103, E106 or E107 when ``actds.json`` itself cannot
            be read, because then nothing can.

    Spec: 0.1 sections 2 and 8.
    """
    if not store.exists(layout.GENESIS):
        raise ActdsError("E101", layout.GENESIS, got="no such file", expected="a dataset")
    store.learn_sizes("")
    data = store.read(layout.GENESIS, canonical.MAX_DOCUMENT_NBYTES)
    genesis = schema.parse(Genesis, data, layout.GENESIS)
    inventory = Inventory(store, genesis, canonical.digest(data))
    _read_chains(inventory)
    for chain in inventory.chains.values():
        for record in chain.records:
            _take(inventory, chain, record)
    _resolve(inventory)
    _read_seals(inventory)
    return inventory


def _read_chains(inventory: Inventory) -> None:
    store, dataset = inventory.store, inventory.genesis.dataset
    names = sorted({path.split("/")[1] for path in store.list("ledger") if path.count("/") > 1})
    for name in names:
        try:
            state = read_chain(store, dataset, name)
        except ActdsError as error:
            inventory.findings.append(("ledger", Finding.from_error(error)))
            if error.code == "E107":
                inventory.opaque.add(f"ledger/{name}")
                continue
            broken = inventory.chains[name] = _broken_chain(inventory, name)
            inventory.incomplete.add(broken.run or "")
            continue
        inventory.chains[name] = Chain(
            name, state.kind, state.run, state.records, state.state, state.head_entry
        )
        if state.state == "open":
            inventory.add(
                "ledger",
                "E305",
                f"ledger/{name}",
                f"an open {state.kind} chain of run {state.run}",
                "a close or a fence",
            )
    if not names:
        inventory.add("ledger", "E306", "ledger", "no chain", "at least one, closed and sealed")


def _broken_chain(inventory: Inventory, name: str) -> Chain:
    """Return what a broken chain still says, so that its files are not called unreachable."""
    records = []
    for path in inventory.store.list(f"ledger/{name}"):
        inventory.reached.add(path)
        try:
            data = inventory.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
            record = schema.parse(LedgerRecord, data, path)
        except ActdsError:
            continue  # read_chain has told the first fault of the chain; this one follows it
        if record.dataset == inventory.genesis.dataset:
            records.append(record)
    opening = records[0].typed_body() if records else None
    kind, run = (opening.kind, opening.run) if isinstance(opening, OpenBody) else (None, None)
    return Chain(name, kind, run, records, "broken", None)


def _take(inventory: Inventory, chain: Chain, record: LedgerRecord) -> None:
    place = layout.record_path(chain.chain, record.seq)
    inventory.reached.add(place)
    body = record.typed_body()
    if isinstance(body, RunBody):
        with inventory.noting("provenance"):
            _take_run(inventory, chain, body, place)
    elif isinstance(body, ShardBody | ReplaceBody | PartBody):
        try:
            if isinstance(body, ShardBody):
                inventory.shards.append(_take_shard(inventory, chain, body, place, "writer"))
            elif isinstance(body, ReplaceBody):
                manifest = _take_shard(inventory, chain, body, place, "tool")
                inventory.replacements.append(Replacement(body, place, manifest))
            else:
                _take_part(inventory, chain, body, place)
        except ActdsError as error:
            inventory.findings.append(("structure", Finding.from_error(error)))
            if error.code != "E310":  # of a shard committed twice the first commit stands
                inventory.incomplete.add(chain.run or "")
                if isinstance(body, ShardBody | ReplaceBody):
                    inventory.opaque.add(layout.shard_dir(body.shard))


def _document(inventory: Inventory, path: str, sha256: str) -> bytes:
    data = inventory.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
    got = canonical.digest(data)
    if got != sha256:
        raise ActdsError("E202", path, got=f"sha256 {got}", expected=sha256)
    return data


def _foreign(chain: Chain, *, is_foreign: bool, place: str, got: str, expected: str) -> None:
    """Raise E303, but not for what a broken chain says: its break is the finding."""
    if is_foreign and chain.state != "broken":
        raise ActdsError("E303", place, got=got, expected=expected)


def _reach(inventory: Inventory, path: str, place: str) -> None:
    if path in inventory.reached:
        raise ActdsError("E310", place, got=f"{path} again", expected="one commit of it")
    inventory.reached.add(path)


def _take_run(inventory: Inventory, chain: Chain, body: RunBody, place: str) -> None:
    path = layout.run_path(body.run)
    _foreign(
        chain,
        is_foreign=(chain.kind, chain.run) != ("writer", body.run),
        place=place,
        got=f"run {body.run} in a {chain.kind} chain of run {chain.run}",
        expected="the run of its writer chain",
    )
    _reach(inventory, path, place)
    if not inventory.store.exists(path):
        return  # E401 where the run has rows, told by the check of provenance
    data = _document(inventory, path, body.sha256)
    record = schema.parse(RunRecord, data, path)
    _foreign(
        chain,
        is_foreign=(record.dataset, record.run) != (inventory.genesis.dataset, body.run),
        place=path,
        got=f"run {record.run} of dataset {record.dataset}",
        expected=f"run {body.run} of this one",
    )
    inventory.runs[body.run] = record
    readouts = readouts_of(record)
    if readouts is not None and readouts.n_probes:
        inventory.reached.add(layout.probes_path(body.run))


def _take_shard(
    inventory: Inventory,
    chain: Chain,
    body: ShardBody | ReplaceBody,
    place: str,
    kind: ChainKind,
) -> ShardManifest:
    _foreign(
        chain,
        is_foreign=chain.kind != kind,
        place=place,
        got=f"{body.shard} in a {chain.kind} chain",
        expected=f"a {kind} chain",
    )
    path = layout.manifest_path(body.shard)
    _reach(inventory, path, place)
    data = _document(inventory, path, body.manifest_sha256)
    manifest = schema.parse(ShardManifest, data, path)
    got = (manifest.dataset, manifest.shard, manifest.chain, manifest.run)
    expected = (inventory.genesis.dataset, body.shard, chain.chain, chain.run)
    _foreign(
        chain,
        is_foreign=got != expected,
        place=path,
        got=" ".join(got),
        expected=" ".join(str(part) for part in expected),
    )
    if manifest.n_rows != body.n_rows:
        inventory.add(
            "integrity", "E203", path, f"{manifest.n_rows} rows", f"{body.n_rows}, as in {place}"
        )
    _check_manifest(inventory, manifest, path)
    for entry in manifest.files:
        full = f"{layout.shard_dir(manifest.shard)}/{entry.path}"
        inventory.files[full] = entry
        inventory.reached.add(full)
    return manifest


def _resolve(inventory: Inventory) -> None:
    """Let the replacements stand, and forget the data of what they replace.

    A record that does not hold has no effect: what it would replace goes on standing. One that
    replaces a shard whose manifest cannot be read stands, for the manifest is the finding.
    """
    unread = {name.removeprefix("shards/") for name in inventory.opaque}
    judged = [one for one in inventory.replacements if one.body.replaced not in unread]
    standing = resolve(inventory.shards, judged)
    for error in standing.errors:
        inventory.findings.append(("ledger", Finding.from_error(error)))
    rest = [one.manifest for one in inventory.replacements if one.body.replaced in unread]
    inventory.shards = [*standing.shards, *rest]
    inventory.replaced = standing.replaced
    kept = {manifest.shard for manifest in inventory.shards}
    for one in [*standing.replaced, *(one.manifest for one in judged)]:
        if one.shard not in kept:
            for entry in one.files:
                inventory.files.pop(f"{layout.shard_dir(one.shard)}/{entry.path}", None)


def _check_manifest(inventory: Inventory, manifest: ShardManifest, path: str) -> None:
    """Check what a manifest says against itself and against the genesis.

    Raises:
        ActdsError: E103 hooks or files that are not those of the spec.
    """
    unknown = sorted(set(manifest.hooks) - {hook.name for hook in inventory.genesis.hooks})
    if unknown or sorted(set(manifest.hooks)) != manifest.hooks:
        raise ActdsError(
            "E103", f"{path} hooks", got=f"{manifest.hooks}", expected="sorted hooks of actds.json"
        )
    names, wanted = [entry.path for entry in manifest.files], file_names(manifest.hooks)
    if names != wanted:
        odd = sorted(set(names) ^ set(wanted)) or ["the order"]
        raise ActdsError(
            "E103", f"{path} files", got=f"a difference in {odd[0]}", expected=", ".join(wanted)
        )
    root = files_root(manifest.files)
    if root != manifest.root:
        inventory.add("integrity", "E205", f"{path} root", manifest.root, root)
    if (manifest.permutation_seed is None) != (manifest.order == "sequence"):
        inventory.add(
            "structure",
            "E103",
            f"{path} permutation_seed",
            str(manifest.permutation_seed),
            "a seed when permuted, null in sequence",
        )


def _take_part(inventory: Inventory, chain: Chain, body: PartBody, place: str) -> None:
    run = chain.run or ""
    kind = layout.chain_kind_of(body.table)
    _foreign(
        chain,
        is_foreign=chain.kind != kind or not layout.is_part_path(body.file.path, body.table, run),
        place=place,
        got=f"{body.file.path} in a {chain.kind} chain",
        expected=f"{layout.part_path(body.table, run, 0)} or a later part, in a {kind} chain",
    )
    _reach(inventory, body.file.path, place)
    inventory.files[body.file.path] = body.file
    inventory.parts.setdefault((run, body.table), []).append((chain.chain, body))


def _read_seals(inventory: Inventory) -> None:
    store = inventory.store
    found = [path for path in store.list("seal") if _SEAL_NAME.fullmatch(path)]
    previous: str | None = None
    for n in range(1, len(found) + 1):
        path = layout.seal_path(n)
        with inventory.noting("ledger"):
            inventory.reached.add(path)
            if not store.exists(path):
                raise ActdsError("E307", path, got="no seal", expected=f"seals 1 to {len(found)}")
            data = store.read(path, canonical.MAX_DOCUMENT_NBYTES)
            seal = schema.parse(Seal, data, path)
            _check_seal(inventory, seal, n, previous, path)
            previous = inventory.seal_sha256 = canonical.digest(data)
            inventory.seals.append(seal)
    if inventory.seal is None and inventory.chains:
        got = "seals that leave chains out" if found else "no seal"
        inventory.add("ledger", "E306", "seal", got, "a seal over every chain")


def _check_seal(inventory: Inventory, seal: Seal, n: int, previous: str | None, path: str) -> None:
    def differs(what: str, got: object, expected: object) -> None:
        inventory.add("ledger", "E307", f"{path} {what}", str(got), str(expected))

    if (seal.dataset, seal.n) != (inventory.genesis.dataset, n):
        differs("n", f"seal {seal.n} of {seal.dataset}", f"seal {n} of this dataset")
    if seal.previous != previous:
        differs("previous", seal.previous, previous)
    if seal.genesis_sha256 != inventory.genesis_sha256:
        differs("genesis_sha256", seal.genesis_sha256, inventory.genesis_sha256)
    for name, head in sorted(seal.heads.items()):
        chain = inventory.chains.get(name)
        if chain is None:
            differs(f"heads {name}", "no such chain", f"{head.n_records} records")
        elif chain.head != head and chain.state != "broken":
            now = f"{chain.state} after {len(chain.records)} records"
            differs(f"heads {name}", now, f"{head.state} after {head.n_records}, the same head")
    odd = sorted(seal.totals.keys() ^ set(TOTALS))
    if odd:
        inventory.add("ledger", "E103", f"{path} totals", f"a difference in {odd[0]}", str(TOTALS))
    root = heads_root(seal.heads)
    if root != seal.root:
        inventory.add("integrity", "E205", f"{path} root", seal.root, root)
    if seal.multiplicity.path != layout.multiplicity_path(n):
        differs("multiplicity", seal.multiplicity.path, layout.multiplicity_path(n))
    else:
        inventory.files[seal.multiplicity.path] = seal.multiplicity
        inventory.reached.add(seal.multiplicity.path)


__all__ = ["CENSUS_TABLES", "Chain", "CheckName", "Inventory", "take_inventory"]
