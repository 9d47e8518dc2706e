"""Reading a dataset: everything that the ledger reaches, with a finding for all that is wrong.

Listings only find chains and seals, whose records are numbered and linked: no listing is taken for
truth. Nothing here judges the accounting. ``read_dataset`` is the one reader: strict it raises the
first finding, to read; else it collects them and continues, to validate.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.account import TOTALS
from actds.dataset.ledger import ChainState, chain_names, read_broken_chain, read_chain
from actds.dataset.replacement import Replacement, committed, new_part, new_shard, resolve
from actds.errors import ActdsError, Findings
from actds.format import canonical, schema, tables
from actds.format.apart import TablesApart
from actds.format.readouts import readouts_of
from actds.format.schema import (
    ChainKind,
    FileEntry,
    Genesis,
    Head,
    LedgerRecord,
    OpenBody,
    PartBody,
    RedactBody,
    ReplaceBody,
    RunBody,
    RunRecord,
    Seal,
    ShardBody,
    ShardManifest,
)
from actds.format.shard import (
    TOKENS,
    Shard,
    check_sha256,
    data_files,
    file_names,
    files_root,
    read_checked,
)
from actds.format.tables import UNKNOWN_FIELD, TableName
from actds.format.telemetry import profile_entry
from actds.store import Store, layout, local_folder

CENSUS_TABLES: tuple[TableName, ...] = ("requests", "steps", "spans")
_SEAL_NAME = re.compile(r"seal/([0-9]{4,8})\.json")
_MAX_RECORDS = 1_000_000  # of a chain that a seal names where nothing can be listed


@dataclass
class Catalog:
    """Everything that the ledger reaches, and what is wrong with it.

    Args:
        store: the dataset's store.
        genesis: what the dataset is.
        genesis_sha256: digest of ``actds.json``.
        findings: what was found; further checks add to it.
        chains: every chain, by id.
        runs: run records that are there, by run, in the order in which the runs began.
        shards: manifests of the current shards, by run and then in the order of their commits;
            a replacement has the place of the shard that it replaces.
        replaced: manifests of replaced shards; their data may be removed.
        replacements: ``replace`` and ``redact`` records that have an effect.
        replaced_parts: paths of the parts that they replace.
        parts: committed parts by (run, table).
        seals: seals, in order.
        seal_digests: their digests.
        files: entry of every data file that a document pins, by path in the dataset.
        reached: path of every file that the ledger or a seal names, or that signs a seal.
        unsound: paths that must not be parsed: missing, or other bytes than were committed.
        opaque: folders whose own document cannot be read, so that their content is unknown.
        incomplete: runs with something committed that cannot be read: they cannot be accounted for.
        parse: what makes a table of a name, the bytes of its file, its path and the columns wanted.

    Spec: 0.1 section 2.
    """

    store: Store
    genesis: Genesis
    genesis_sha256: str
    findings: Findings
    chains: dict[str, ChainState] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    shards: list[ShardManifest] = field(default_factory=list)
    replaced: list[ShardManifest] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)
    replaced_parts: list[str] = field(default_factory=list)
    parts: dict[tuple[str, str], list[PartBody]] = field(default_factory=dict)
    seals: list[Seal] = field(default_factory=list)
    seal_digests: list[str] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    unsound: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    parse: tables.Parse = tables.from_parquet

    @classmethod
    def read(cls, store: Store, *, seal: str | None = None, apart: bool = False) -> Catalog:
        """Return the catalogue of a dataset in which nothing is wrong.

        Args:
            store: the dataset's store.
            seal: digest of a seal: what that one covers, whatever came after it.
            apart: parse tables as ``parse_apart``.

        Raises:
            ActdsError: the first thing that is wrong: E101 no dataset; E102, E103, E106, E402 a
                document; E104, E107, E201 a file; E202, E205 a digest or root; E203, E303, E310
                a record and what it names; E301 to E304 a chain; E307 the seal; E311 a
                replacement; E804 no such seal.

        Spec: 0.1 sections 2, 8 and 15.5.
        """
        catalog = read_dataset(store, strict=True, seal=seal)
        if apart:
            catalog.parse_apart()
        return catalog

    def parse_apart(self) -> None:
        """Have tables parsed in a process with bounds: a stranger may have made them."""
        readable = self.files.keys() - self.unsound
        self.parse = TablesApart(sum(self.files[path].nbytes for path in readable)).from_parquet

    @property
    def seal(self) -> Seal | None:
        """Return the highest seal, whether or not it covers every chain."""
        return self.seals[-1] if self.seals else None

    @property
    def seal_sha256(self) -> str | None:
        """Return the digest of the highest seal."""
        return self.seal_digests[-1] if self.seal_digests else None

    @property
    def pins(self) -> dict[str, str]:
        """Return the digest of every data file that a document pins, by path in the dataset."""
        digests = {path: entry.sha256 for path, entry in self.files.items()}
        for run, record in self.runs.items():
            readouts = readouts_of(record)
            if readouts is not None and readouts.probes_sha256 is not None:
                digests[layout.probes_path(run)] = readouts.probes_sha256
            if (profile := profile_entry(record)) is not None:
                digests[profile.path] = profile.sha256
        return digests

    @property
    def is_sealed(self) -> bool:
        """Return whether the highest seal covers every chain that is there now."""
        return self.seal is not None and self.seal.heads.keys() == self.chains.keys()

    def add_seal(self, seal: Seal, digest: str) -> None:
        """Take the seal that was just put over what this catalogue holds."""
        self.seals.append(seal)
        self.seal_digests.append(digest)
        self.files[seal.multiplicity.path] = seal.multiplicity
        self.reached |= {layout.seal_path(seal.n), seal.multiplicity.path}

    def not_sealed(self, place: str = "seal") -> ActdsError:
        """Return E306 for a dataset without a seal over every chain, with how to seal it."""
        got = f"seal {self.seal.n} of an older ledger" if self.seal else "no seal"
        runs = self.runs_with_data
        step = None
        if runs and all(map(self.is_imported, runs)):
            step = f"Seal it as imported: actds seal {shlex.quote(self.store.uri)} --imported"
        expected = "a seal over every chain"
        return ActdsError("E306", place, got=got, expected=expected, next_step=step)

    def is_imported(self, run: str) -> bool:
        """Return whether a run was made elsewhere: its record says so, and it never had a census.

        Spec: 0.1 section 6.3.
        """
        record = self.runs.get(run)
        censuses = any(c.run == run and c.kind == "census" for c in self.chains.values())
        parts = any(of == run for of, _ in self.parts)
        return record is not None and UNKNOWN_FIELD in record.fields and not (censuses or parts)

    @property
    def run_ids(self) -> list[str]:
        """Return every run that a chain names, in the order in which they began."""
        began: dict[str, int] = {}
        for state in self.chains.values():
            opening = state.records[0].typed_body() if state.records else None
            if isinstance(opening, OpenBody):
                began[state.run] = min(opening.started_ns, began.get(state.run, opening.started_ns))
        return sorted(began, key=lambda run: (began[run], run))

    @property
    def runs_with_data(self) -> list[str]:
        """Return the runs that committed a row or a part; others ended before they began.

        Spec: 0.1 section 8.4.
        """
        named = {manifest.run for manifest in self.shards} | {run for run, _ in self.parts}
        order = self.run_ids
        return [run for run in order if run in named] + sorted(named - set(order))

    @property
    def unreachable(self) -> list[str]:
        """Return the paths of files that nothing reaches, as they may be printed."""
        known = self.reached | {layout.GENESIS, *layout.BESIDE}
        # The names are untrusted: no control character may reach a terminal.
        return [
            path.encode("unicode_escape").decode()
            for path in self.store.list()
            if path not in known and not layout.is_of_the_hub(path)
        ]

    @property
    def superseded(self) -> list[str]:
        """Return the paths of replaced parts, and of the data files of replaced shards."""
        paths = [path for manifest in self.replaced for path in data_files(manifest)]
        return paths + self.replaced_parts

    @property
    def removable(self) -> list[str]:
        """Return the paths of superseded files that are still there."""
        return [path for path in self.superseded if self.store.exists(path)]

    def redacted(self, run: str) -> set[int]:
        """Return the numbers of the requests of a run that are gone, or to go.

        Spec: 0.1 section 8.6.
        """
        return {n for change in self.replacements if change.run == run for n in change.requests}

    def redacted_paths(self, run: str) -> set[str]:
        """Return what a run committed and a redaction replaced, at last or on the way."""
        by_old = {change.old: change for change in self.replacements if change.run == run}
        paths = set()
        for path in by_old:
            at: str | None = path
            while at in by_old and not by_old[at].requests:
                at = committed(by_old[at].body)
            if at in by_old:
                paths.add(path)
        return paths

    @property
    def digest(self) -> str:
        """Return what pins the whole content: of the seal, or unsealed, of the present heads."""
        if self.is_sealed and self.seal_sha256 is not None:
            return self.seal_sha256
        heads = {chain: state.head for chain, state in self.chains.items()}
        return canonical.digest(canonical.dump({"genesis": self.genesis_sha256, "heads": heads}))

    @cached_property
    def shards_by_run(self) -> dict[str, list[ShardManifest]]:
        """The manifests of each run that has any, in the order of their commits."""
        manifests = defaultdict[str, list[ShardManifest]](list)
        for manifest in self.shards:
            manifests[manifest.run].append(manifest)
        return manifests

    def shards_of(self, run: str) -> list[Shard]:
        """Return the shards of a run, in the order of their commits."""
        return [Shard(self.store, m, parse=self.parse) for m in self.shards_by_run[run]]

    def of_shard(self, manifest: ShardManifest) -> Catalog:
        """Return the catalogue of one shard alone, small enough to hand to another process."""
        files = data_files(manifest)
        return Catalog(
            self.store,
            self.genesis,
            self.genesis_sha256,
            Findings(),
            shards=[manifest],
            files=files,
            unsound=self.unsound & files.keys(),
            parse=self.parse,
        )

    def row_sets(self, run: str) -> list[tuple[list[str], list[Shard]]]:
        """Return hooks with the shards that hold them, one entry per distinct set of shards.

        Usually one entry: all hooks in all shards. Stages of a pipeline write shards of disjoint
        hooks, and then every hook has to account for every row by itself.
        """
        shards = self.shards_of(run)
        hook_sets = [frozenset(shard.hooks) for shard in shards]
        sets: dict[tuple[str, ...], tuple[list[str], list[Shard]]] = {}
        for hook in self.genesis.hooks:
            holding = [
                shard for shard, hooks in zip(shards, hook_sets, strict=True) if hook.name in hooks
            ]
            key = tuple(shard.name for shard in holding)
            sets.setdefault(key, ([], holding))[0].append(hook.name)
        return list(sets.values())

    def table(
        self, name: TableName, run: str | None = None, columns: list[str] | None = None
    ) -> pa.Table:
        """Return a table of one run, or of all runs one after the other.

        Args:
            name: which; not ``tokens``, which belong to shards.
            run: the run.
            columns: those to read, all when ``None``; of ``multiplicity`` there are all.

        Raises:
            ActdsError: E201, E202 changed since the commit; E203 another number of rows; E109,
                E206 no table of the spec; E306 the multiplicity of a dataset without a seal.

        Spec: 0.1 section 6.
        """
        if name == "multiplicity":
            return self._multiplicity(run)
        wanted = self.run_ids if run is None else [run]
        parts = [part for run_id in wanted for part in self.parts.get((run_id, name), [])]
        none = tables.empty(name)
        none = none if columns is None else none.select(columns)
        return pa.concat_tables([none, *(self._part(name, part, columns) for part in parts)])

    def read_ahead(self, names: Iterable[TableName], *, tokens: bool = False) -> None:
        """Begin to read what is asked for next: of each run these tables, then those of shards."""
        names, paths = list(names), list[str]()
        for run in self.runs_with_data:
            paths += (part.file.path for name in names for part in self.parts.get((run, name), []))
            for _, shards in self.row_sets(run) if tokens else []:
                paths += (f"{layout.shard_dir(shard.name)}/{TOKENS}" for shard in shards)
        self.store.read_ahead(paths, None)

    def file(self, path: str) -> bytes:
        """Return the bytes of a pinned file, when they are what was committed.

        Raises:
            ActdsError: E104 missing; E107 a link; E201 size; E202 digest.

        Spec: 0.1 section 2.3.
        """
        return read_checked(self.store, path, self.files[path])

    def read_table(
        self,
        name: TableName,
        path: str,
        columns: list[str] | None = None,
        kept: list[str] | None = None,
    ) -> pa.Table:
        """Return a table from a pinned file, when its bytes are what was committed.

        Args:
            name: which.
            path: its path in the dataset.
            columns: those to read, all when ``None``.
            kept: those of them to return, all when ``None``.

        Raises:
            ActdsError: as ``file`` and ``tables.from_parquet``.
        """
        return self.parse(name, self.file(path), path, columns, kept)

    def sound_table(self, run: str, name: TableName) -> pa.Table | None:
        """Return a table of a run, all parts one after the other; None when one is unsound.

        Raises:
            ActdsError: as ``read_table``.
        """
        parts = [tables.empty(name)]
        for body in self.parts.get((run, name), []):
            path = body.file.path
            if path in self.unsound:
                return None
            parts.append(self.read_table(name, path))
        return pa.concat_tables(parts)

    def _part(self, name: TableName, part: PartBody, columns: list[str] | None) -> pa.Table:
        path = part.file.path
        table = self.parse(name, read_checked(self.store, path, part.file), path, columns, None)
        if table.num_rows != part.n_rows:
            raise ActdsError("E203", path, got=f"{table.num_rows} rows", expected=f"{part.n_rows}")
        return table

    def _multiplicity(self, run: str | None) -> pa.Table:
        if self.seal is None:
            raise self.not_sealed()
        entry = self.seal.multiplicity
        data = read_checked(self.store, entry.path, entry)
        table = self.parse("multiplicity", data, entry.path, None, None)
        if run is None:
            return table
        return table.filter(pc.equal(table["run"], run))


def heads_root(heads: dict[str, Head]) -> str:
    """Return the Merkle root of the heads that a seal pins.

    Spec: 0.1 section 8.4.
    """
    leaves = [canonical.dump({c: heads[c].model_dump(mode="json")}) for c in sorted(heads)]
    return canonical.merkle_root(leaves)


def read_genesis(store: Store) -> Genesis:
    """Return the genesis of a dataset; raises as ``schema.parse``."""
    return schema.parse(Genesis, store.read(layout.GENESIS), layout.GENESIS)


def need_dataset(store: Store) -> None:
    """Check that a location holds a dataset.

    Raises:
        NotFoundError: E101 it does not.
    """
    if not store.exists(layout.GENESIS):
        folder = local_folder(store.uri)
        if folder is not None and not folder.exists():
            raise ActdsError("E101", store.uri, got="no such path", expected="a dataset")
        got = f"no such file in {store.uri}"
        raise ActdsError("E101", layout.GENESIS, got=got, expected="a dataset")


def unknown_columns(record: RunRecord) -> frozenset[str]:
    """Return the columns of the token table of which a run says that nothing is known.

    Spec: 0.1 section 6.3.
    """
    field = record.fields.get(tables.UNKNOWN_FIELD)
    names = field.value if field is not None and isinstance(field.value, list) else []
    return frozenset(tables.SCHEMAS["tokens"].names).intersection(map(str, names))


def read_dataset(store: Store, *, strict: bool = False, seal: str | None = None) -> Catalog:
    """Return everything that can be read of a dataset, with a finding for all that cannot.

    Args:
        store: the dataset's store.
        strict: raise the first finding instead.
        seal: digest of a seal: only what that one covers is read, whatever came after it.

    Raises:
        ActdsError: E101 no dataset; E102, E103, E106 or E107 when ``actds.json`` itself cannot be
            read, because then nothing can; E804 no seal has the digest. When strict, see
            ``Catalog.read``.

    Spec: 0.1 sections 2, 8 and 15.5.
    """
    need_dataset(store)
    store.learn_sizes("")
    pinned = None if seal is None else _find_seal(store, seal)
    if not store.can_list:
        store.know(_names_by_seal(store, pinned))
    data = store.read(layout.GENESIS, canonical.MAX_DOCUMENT_NBYTES)
    genesis = schema.parse(Genesis, data, layout.GENESIS)
    catalog = Catalog(store, genesis, canonical.digest(data), Findings(strict=strict))
    reader = _Reader(catalog, pinned)
    reader.read_chains()
    reader.read_records()
    reader.read_seals()
    reader.check_sizes()
    if seal is not None:
        if catalog.seal_sha256 != seal:
            raise no_such_seal(catalog.seal_digests, seal)
        store.binds = True
    return catalog


def _find_seal(store: Store, seal: str) -> Seal:
    """Return the seal with a digest.

    Raises:
        ActdsError: E804 there is none; E102 to E106 it cannot be read.
    """
    digests: list[str] = []
    while store.exists(path := layout.seal_path(len(digests) + 1)):
        data = store.read(path, canonical.MAX_DOCUMENT_NBYTES)
        digests.append(canonical.digest(data))
        if digests[-1] == seal:
            document = schema.parse(Seal, data, path)
            if document.n != len(digests):
                raise ActdsError("E307", path, got=f"seal {document.n}", expected=f"{len(digests)}")
            return document
    raise no_such_seal(digests, seal)


def no_such_seal(digests: list[str], seal: str) -> ActdsError:
    """Return the error for a dataset whose seals have these digests, and not the pinned one.

    Spec: 0.1 section 15.5.
    """
    got = f"{len(digests)} seals, the last sha256:{digests[-1]}" if digests else "no seal"
    return ActdsError("E804", "seal", got=got, expected=f"sha256:{seal} among them")


def read_records(
    store: Store, genesis: Genesis, chain: ChainState, records: Sequence[LedgerRecord]
) -> Catalog:
    """Return what a few records of a chain name, with a finding for all that cannot be read.

    For who follows a dataset that is being written: shards, parts and run records are read and
    checked as ``read_dataset`` does. Replacements are listed among the shards, unresolved.

    Args:
        store: the dataset's store.
        genesis: its genesis.
        chain: the chain of the records.
        records: the records.

    Spec: 0.1 sections 2 and 8.
    """
    catalog = Catalog(store, genesis, "", Findings(), chains={chain.chain: chain})
    reader = _Reader(catalog, None)
    for record in records:
        reader.take(chain, record)
    catalog.shards += [r.manifest for r in reader.replacements if r.manifest is not None]
    for manifest in catalog.shards:
        catalog.files.update(data_files(manifest))
    reader.check_sizes()
    return catalog


def _names_by_seal(store: Store, pinned: Seal | None = None) -> list[str]:
    """Return the names that a listing is needed for: seals, and records of their chains.

    Seals are numbered, and the highest one names every chain that it covers and how long each is.
    Where nothing can be listed, a chain that began later cannot be seen: what is read is the
    dataset as it was sealed last. The names only say where to look; what is there is checked.

    Args:
        store: the dataset's store.
        pinned: the seal that counts instead of the highest one.

    Raises:
        ActdsError: E306 there is no seal; E102 to E106 it cannot be read.
    """
    n = 0 if pinned is None else pinned.n
    while pinned is None and store.exists(layout.seal_path(n + 1)):
        n += 1
    if not n:
        raise ActdsError(
            "E306",
            layout.seal_path(1),
            got="no seal",
            expected="a seal: without a listing, only it names the chains of the ledger",
            next_step="Seal the dataset with actds seal where it was written, and upload it again.",
        )
    names = [layout.seal_path(number) for number in range(1, n + 1)]
    path = names[-1]
    seal = schema.parse(Seal, store.read(path, canonical.MAX_DOCUMENT_NBYTES), path)
    names.append(seal.multiplicity.path)
    for chain, head in seal.heads.items():
        # A record after the last one would be a fault, and is looked for.
        n_records = head.n_records + store.exists(layout.record_path(chain, head.n_records))
        if head.n_records > _MAX_RECORDS:
            got, expected = f"{head.n_records} records", f"at most {_MAX_RECORDS}"
            raise ActdsError("E102", f"{path} heads {chain}", got=got, expected=expected)
        names += [layout.record_path(chain, seq) for seq in range(n_records)]
    return names


class _Reader:
    """Fills a catalogue: the chains, what their records name, the seals."""

    def __init__(self, catalog: Catalog, pinned: Seal | None) -> None:
        self.catalog, self.pinned = catalog, pinned
        self.store, self.genesis = catalog.store, catalog.genesis
        self.hooks = {hook.name for hook in self.genesis.hooks}
        self.replacements: list[Replacement] = []

    def read_chains(self) -> None:
        catalog, dataset = self.catalog, self.genesis.dataset
        for name in chain_names(self.store) if self.pinned is None else sorted(self.pinned.heads):
            try:
                state = read_chain(self.store, dataset, name, self.genesis.version)
            except ActdsError as error:
                catalog.findings.take("ledger", error)
                if error.code == "E107":
                    catalog.opaque.add(f"ledger/{name}")
                    continue
                # So that the files of the chain are not called unreachable.
                catalog.reached.update(self.store.list(f"ledger/{name}"))
                state = read_broken_chain(self.store, dataset, name)
                catalog.incomplete.add(state.run)
            catalog.chains[name] = state

    def read_records(self) -> None:
        catalog = self.catalog
        records = [record for state in catalog.chains.values() for record in state.records]
        self.store.read_ahead(
            (layout.manifest_path(str(r.body.get("shard"))) for r in records if r.type == "shard"),
            canonical.MAX_DOCUMENT_NBYTES,
        )
        for state in catalog.chains.values():
            for record in state.records:
                self.take(state, record)
        order = {run: number for number, run in enumerate(catalog.run_ids)}
        catalog.runs = {run: catalog.runs[run] for run in order if run in catalog.runs}
        ordered = sorted(catalog.parts, key=lambda key: order.get(key[0], len(order)))
        catalog.parts = {
            key: sorted(catalog.parts[key], key=lambda part: part.file.path) for key in ordered
        }
        for (run, table), parts in catalog.parts.items():
            with catalog.findings.noting("ledger"):
                self._check_numbers(run, table, [part.file.path for part in parts])
        self._replace()
        catalog.shards.sort(key=lambda manifest: order.get(manifest.run, len(order)))

    def _check_numbers(self, run: str, table: str, paths: list[str]) -> None:
        """Check that the parts of a table are numbered without a gap: what is gone leaves one."""
        if run in self.catalog.incomplete:
            return  # what cannot be read may have been a part
        of_tools = {r.part for r in self.replacements if r.part is not None}
        paths = sorted({*paths, *(p for p in of_tools if layout.is_part_path(p, table, run))})
        for n, path in enumerate(paths):
            wanted = layout.part_path(table, run, n)
            if path != wanted:
                raise ActdsError("E301", path, got=f"part {path}", expected=f"{wanted} before it")

    def take(self, state: ChainState, record: LedgerRecord) -> None:
        catalog = self.catalog
        place = layout.record_path(state.chain, record.seq)
        catalog.reached.add(place)
        body = record.typed_body()
        if isinstance(body, RunBody):
            with catalog.findings.noting("provenance"):
                self._take_run(state, body, place)
            return
        try:
            if isinstance(body, ShardBody):
                catalog.shards.append(self._take_shard(state, body, place, "writer"))
            elif isinstance(body, ReplaceBody):
                manifest = self._take_shard(state, body, place, "tool")
                self.replacements.append(Replacement(state.run, place, body, manifest))
            elif isinstance(body, RedactBody):
                self._take_redaction(state, body, place)
            elif isinstance(body, PartBody):
                self._take_part(state, body, place)
        except ActdsError as error:
            catalog.findings.take("structure", error)
            if error.code != "E310":  # of a shard committed twice the first commit counts
                catalog.incomplete.add(state.run)
                shard = layout.shard_of(committed(body) or "")
                if shard is not None:
                    catalog.opaque.add(layout.shard_dir(shard))

    def _take_run(self, state: ChainState, body: RunBody, place: str) -> None:
        path = layout.run_path(body.run)
        if state.kind != "writer" or body.run != state.run:
            _foreign(state, place, f"run {body.run}", f"run {state.run} in its writer chain")
        self._reach(path, place)
        if not self.store.exists(path):
            return  # No provenance: E401 is for those who judge, and who may look all the same.
        record = schema.parse(
            RunRecord, self._document(path, body.sha256), path, self.genesis.version
        )
        if (record.dataset, record.run) != (self.genesis.dataset, body.run):
            got = f"run {record.run} of dataset {record.dataset}"
            _foreign(state, path, got, f"run {body.run} of this one")
        self.catalog.runs[body.run] = record
        readouts = readouts_of(record)
        widths = [hook.d_model for hook in self.genesis.hooks]
        probes = None if readouts is None else readouts.probes_entry(body.run, widths)
        for entry in (probes, profile_entry(record)):
            if entry is not None:
                self.catalog.reached.add(entry.path)
                self.catalog.files[entry.path] = entry

    def _take_shard(
        self, state: ChainState, body: ShardBody | ReplaceBody, place: str, kind: ChainKind
    ) -> ShardManifest:
        if state.kind != kind:
            _foreign(state, place, f"{body.shard} in a {state.kind} chain", f"a {kind} chain")
        path = layout.manifest_path(body.shard)
        self._reach(path, place)
        data = self._document(path, body.manifest_sha256)
        manifest = schema.parse(ShardManifest, data, path, self.genesis.version)
        got = (manifest.dataset, manifest.shard, manifest.chain, manifest.run)
        expected = (self.genesis.dataset, body.shard, state.chain, state.run)
        if got != expected:
            _foreign(state, path, " ".join(got), " ".join(expected))
        if manifest.n_rows != body.n_rows:
            self.catalog.findings.add(
                "integrity",
                "E203",
                path,
                f"{manifest.n_rows} rows",
                f"{body.n_rows} rows, as in {place}",
            )
        self._check_manifest(manifest, path)
        self.catalog.reached.update(data_files(manifest))
        return manifest

    def _take_redaction(self, state: ChainState, body: RedactBody, place: str) -> None:
        entry, manifest = body.file, None
        if state.kind != "tool":
            _foreign(state, place, f"a redaction in a {state.kind} chain", "a tool chain")
        if sorted(set(body.requests)) != body.requests:
            expected = "ascending numbers of requests"
            raise ActdsError("E103", f"{place} requests", got="another order", expected=expected)
        if entry is None and body.n_rows:
            raise ActdsError("E203", place, got=f"{body.n_rows} rows of no file", expected="none")
        if entry is not None and (shard := layout.shard_of(entry.path)) is not None:
            commit = ShardBody(shard=shard, manifest_sha256=entry.sha256, n_rows=body.n_rows)
            manifest = self._take_shard(state, commit, place, "tool")
        elif entry is not None:
            self._reach(entry.path, place)
        self.replacements.append(Replacement(state.run, place, body, manifest))

    def _check_manifest(self, manifest: ShardManifest, path: str) -> None:
        """Check a manifest for consistency and against the genesis."""
        findings = self.catalog.findings
        if set(manifest.hooks) - self.hooks or sorted(set(manifest.hooks)) != manifest.hooks:
            expected = "sorted hooks of actds.json"
            raise ActdsError("E103", f"{path} hooks", got=f"{manifest.hooks}", expected=expected)
        wrong = manifest.values.keys() ^ set(manifest.hooks)
        wrong |= {
            hook
            for hook, n in manifest.values.items()
            if n.not_finite + n.zero > manifest.n_rows or n.infinite > n.not_finite
        }
        if wrong:
            raise ActdsError(
                "E103",
                f"{path} values",
                got=f"{min(wrong)} missing, no hook of the shard, or of more rows than there are",
                expected=f"counts of {manifest.n_rows} rows of {', '.join(manifest.hooks)}",
            )
        names, wanted = [entry.path for entry in manifest.files], file_names(manifest.hooks)
        if names != wanted:
            odd = sorted(set(names) ^ set(wanted)) or ["their order"]
            raise ActdsError(
                "E103", f"{path} files", got=f"other files in {odd[0]}", expected=", ".join(wanted)
            )
        if (manifest.permutation_seed is None) != (manifest.order == "sequence"):
            got, expected = f"{manifest.permutation_seed}", "a seed when permuted, null in sequence"
            findings.add("structure", "E103", f"{path} permutation_seed", got, expected)
        root = files_root(manifest.files)
        if root != manifest.root:
            findings.add("integrity", "E205", f"{path} root", manifest.root, root)

    def _take_part(self, state: ChainState, body: PartBody, place: str) -> None:
        kind, path = layout.chain_kind_of(body.table), body.file.path
        if state.kind != kind or not layout.is_part_path(path, body.table, state.run):
            first = layout.part_path(body.table, state.run, 0)
            got = f"{path} in a {state.kind} chain"
            _foreign(state, place, got, f"{first} or a later part in a {kind} chain")
        self._reach(path, place)
        self.catalog.files[path] = body.file
        self.catalog.parts.setdefault((state.run, body.table), []).append(body)

    def _reach(self, path: str, place: str) -> None:
        if path in self.catalog.reached:
            raise ActdsError("E310", place, got=f"{path} again", expected="one commit of it")
        self.catalog.reached.add(path)

    def _document(self, path: str, sha256: str) -> bytes:
        data = self.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
        check_sha256(path, canonical.digest(data), sha256)
        return data

    def _replace(self) -> None:
        """Apply the replacements.

        An invalid record has no effect: what it would replace stays current. One that replaces a
        shard whose manifest cannot be read is valid, for the manifest is the finding.
        """
        catalog = self.catalog
        shards, parts, rest = list[Replacement](), list[Replacement](), list[Replacement]()
        for replacement in self.replacements:
            if (shard := replacement.shard) is None:
                parts.append(replacement)
            else:
                is_unread = layout.shard_dir(shard) in catalog.opaque
                (rest if is_unread else shards).append(replacement)
        catalog.shards, catalog.replaced, fitting = resolve(
            shards, catalog.shards, new_shard, catalog.findings
        )
        catalog.shards += [change.manifest for change in rest if change.manifest is not None]
        for manifest in catalog.shards:
            catalog.files.update(data_files(manifest))
        committed = [part for of_table in catalog.parts.values() for part in of_table]
        current, old_parts, of_parts = resolve(parts, committed, new_part, catalog.findings)
        for part in old_parts:
            catalog.files.pop(part.file.path, None)  # not there after a second redaction
        in_place = iter(current)
        for key, of_table in catalog.parts.items():
            catalog.parts[key] = [next(in_place) for _ in of_table]
        catalog.files.update({part.file.path: part.file for part in current})
        catalog.replaced_parts = [part.file.path for part in old_parts]
        catalog.replacements = [*fitting, *of_parts, *rest]

    def read_seals(self) -> None:
        catalog = self.catalog
        if self.pinned is not None:
            n_seals = self.pinned.n
        else:
            n_seals = sum(1 for path in self.store.list("seal") if _SEAL_NAME.fullmatch(path))
        previous: str | None = None
        for n in range(1, n_seals + 1):
            path = layout.seal_path(n)
            with catalog.findings.noting("ledger"):
                catalog.reached.add(path)
                if not self.store.exists(path):
                    raise ActdsError("E307", path, got="no seal", expected=f"seals 1 to {n_seals}")
                data = self.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
                seal = schema.parse(Seal, data, path, self.genesis.version)
                self._check_seal(seal, n, previous, path)
                previous = canonical.digest(data)
                catalog.seals.append(seal)
                catalog.seal_digests.append(previous)
                beside = (layout.envelope_path, layout.bundle_path, layout.attestations_path)
                catalog.reached |= {path_of(n) for path_of in beside}

    def _check_seal(self, seal: Seal, n: int, previous: str | None, path: str) -> None:
        catalog, findings = self.catalog, self.catalog.findings

        def differs(what: str, got: object, expected: object) -> None:
            findings.add("ledger", "E307", f"{path} {what}", str(got), str(expected))

        if (seal.dataset, seal.n) != (self.genesis.dataset, n):
            differs("n", f"seal {seal.n} of {seal.dataset}", f"seal {n} of this dataset")
        if seal.previous != previous:
            differs("previous", seal.previous, previous)
        if seal.genesis_sha256 != catalog.genesis_sha256:
            differs("genesis_sha256", seal.genesis_sha256, catalog.genesis_sha256)
        for name, head in sorted(seal.heads.items()):
            state = catalog.chains.get(name)
            if state is None:
                differs(f"heads {name}", "no such chain", f"{head.n_records} records")
            elif state.head_entry != head and state.state != "broken":
                now = f"{state.state} after {len(state.records)} records"
                differs(f"heads {name}", now, f"{head.state} after {head.n_records}, the same head")
        odd = sorted(seal.totals.keys() ^ set(TOTALS))
        if odd:
            findings.add(
                "ledger", "E103", f"{path} totals", f"a difference in {odd[0]}", str(TOTALS)
            )
        root = heads_root(seal.heads)
        if root != seal.root:
            findings.add("integrity", "E205", f"{path} root", seal.root, root)
        table, wanted = seal.multiplicity, layout.multiplicity_path(n)
        if table.path != wanted:
            differs("multiplicity", table.path, wanted)
        else:
            catalog.files[wanted] = table
            catalog.reached.add(wanted)

    def check_sizes(self) -> None:
        catalog = self.catalog
        later: dict[str, ActdsError] | None = None
        self.store.ask_sizes(catalog.files)
        for path, entry in sorted(catalog.files.items()):
            try:
                nbytes = self.store.size(path)
            except ActdsError as error:
                catalog.unsound.add(path)
                if self.pinned is not None and later is None:
                    later = _superseding(catalog)
                at = layout.committed_path(path)
                catalog.findings.take("structure", (later or {}).get(at, error))
                continue
            if nbytes != entry.nbytes:
                catalog.unsound.add(path)
                got, expected = f"{nbytes} bytes", f"{entry.nbytes} bytes"
                catalog.findings.add("integrity", "E201", path, got, expected)


def _superseding(catalog: Catalog) -> dict[str, ActdsError]:
    """Return E805 for what later records than those of a pinned seal replaced, by its path.

    Spec: 0.1 section 15.5.
    """
    store, later = catalog.store, dict[str, ActdsError]()
    for chain in set(chain_names(store)) - catalog.chains.keys():
        for record in read_broken_chain(store, catalog.genesis.dataset, chain).records:
            body = record.typed_body()
            if isinstance(body, ReplaceBody | RedactBody):
                at = layout.record_path(chain, record.seq)
                old = Replacement("", at, body).old
                word = "a redaction" if isinstance(body, RedactBody) else "a replacement"
                got, expected = f"{word} of {old}", "it, as sealed"
                later[old] = ActdsError("E805", at, got=got, expected=expected)
    return later


def _foreign(state: ChainState, place: str, got: str, expected: str) -> None:
    """Raise E303, but not for records of a broken chain: its break is the finding."""
    if state.state != "broken":
        raise ActdsError("E303", place, got=got, expected=expected)
