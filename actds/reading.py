"""The catalogue: everything that the ledger of a dataset reaches, checked for its structure.

Nothing here judges the accounting, and no listing is taken for truth: listings only find the
chains and the seals, whose records are numbered and linked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from actds import schema
from actds.errors import ActdsError
from actds.format import canonical, layout, tables
from actds.format.readouts import readouts_of
from actds.format.shard import Shard, file_names, files_root, read_checked
from actds.format.tables import TableName
from actds.ledger import ChainState, read_ledger
from actds.replacement import Replacement, resolve
from actds.schema import (
    ChainKind,
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

__all__ = ["CENSUS_TABLES", "LOSS_TABLES", "Catalog", "heads_root"]

CENSUS_TABLES: tuple[TableName, ...] = ("requests", "steps", "spans")
LOSS_TABLES: tuple[TableName, ...] = ("drops", "stalls")
_SEAL_NAME = re.compile(r"seal/([0-9]{4,8})\.json")


@dataclass(frozen=True)
class Catalog:
    """Everything the ledger reaches.

    Args:
        store: where the dataset stands.
        genesis: what the dataset is.
        genesis_sha256: digest of ``actds.json``.
        runs: run records that are there, by run, in the order in which the runs began.
        shards: manifests of the shards that stand, by run and then in the order of their commits;
            one that replaces another stands in its place.
        replaced: manifests of shards that are read no more; their data may be gone.
        parts: committed parts by (run, table).
        chains: chains by id.
        seal: the highest seal, if there is one.
        seal_sha256: its digest.
        reached: path of every file that the ledger or a seal names.

    Spec: 0.1 section 2.
    """

    store: Store
    genesis: Genesis
    genesis_sha256: str
    runs: dict[str, RunRecord]
    shards: list[ShardManifest]
    replaced: list[ShardManifest]
    parts: dict[tuple[str, str], list[PartBody]]
    chains: dict[str, ChainState]
    seal: Seal | None
    seal_sha256: str | None
    reached: frozenset[str]

    @classmethod
    def read(cls, store: Store) -> Catalog:
        """Return the catalogue of a dataset.

        Raises:
            ActdsError: the first thing that is wrong: E101 no dataset; E102, E103, E106, E402 a
                document; E104, E107, E201 a file; E202, E205 a digest or root; E203, E303, E310
                a record and what it names; E301 to E304 a chain; E307 the seal; E311 a
                replacement.

        Spec: 0.1 sections 2 and 8.
        """
        return _Reader(store).read()

    @property
    def is_sealed(self) -> bool:
        """Return whether the highest seal covers every chain that is there now."""
        return self.seal is not None and self.seal.heads.keys() == self.chains.keys()

    @property
    def run_ids(self) -> list[str]:
        """Return every run that a chain names, in the order in which they began."""
        return _run_order(self.chains.values())

    @property
    def unreachable(self) -> list[str]:
        """Return the paths of files that nothing reaches, as they may be printed."""
        known = self.reached | {layout.GENESIS, layout.CARD}
        # The names are anybody's: no control character may reach a terminal.
        return [_printable(path) for path in self.store.list() if path not in known]

    @property
    def digest(self) -> str:
        """Return what pins the whole content: of the seal, or unsealed, of the present heads."""
        if self.is_sealed and self.seal_sha256 is not None:
            return self.seal_sha256
        heads = {chain: state.head for chain, state in self.chains.items()}
        return canonical.digest(canonical.dump({"genesis": self.genesis_sha256, "heads": heads}))

    def shards_of(self, run: str) -> list[Shard]:
        """Return the shards of a run, in the order of their commits."""
        return [Shard(self.store, m) for m in self.shards if m.run == run]

    def row_sets(self, run: str) -> list[tuple[list[str], list[Shard]]]:
        """Return hooks with the shards that hold them, one entry per distinct set of shards.

        Usually one entry: all hooks in all shards. Stages of a pipeline write shards of disjoint
        hooks, and then every hook has to account for every row by itself.
        """
        shards = self.shards_of(run)
        sets: dict[tuple[str, ...], tuple[list[str], list[Shard]]] = {}
        for hook in self.genesis.hooks:
            holding = [shard for shard in shards if hook.name in shard.hooks]
            key = tuple(shard.name for shard in holding)
            sets.setdefault(key, ([], holding))[0].append(hook.name)
        return list(sets.values())

    def table(self, name: TableName, run: str | None = None) -> pa.Table:
        """Return a table of one run, or of all runs one after the other.

        Args:
            name: which; not ``tokens``, which belong to shards.
            run: the run.

        Raises:
            ActdsError: E201, E202 changed since the commit; E203 another number of rows; E109,
                E206 no table of the spec; E306 the multiplicity of a dataset without a seal.

        Spec: 0.1 section 6.
        """
        if name == "multiplicity":
            return self._multiplicity(run)
        wanted = self.run_ids if run is None else [run]
        parts = [part for one in wanted for part in self.parts.get((one, name), [])]
        return pa.concat_tables([tables.empty(name), *(self._part(name, p) for p in parts)])

    def _part(self, name: TableName, part: PartBody) -> pa.Table:
        path = part.file.path
        table = tables.from_parquet(name, read_checked(self.store, path, part.file), path)
        if table.num_rows != part.n_rows:
            raise ActdsError("E203", path, got=f"{table.num_rows} rows", expected=f"{part.n_rows}")
        return table

    def _multiplicity(self, run: str | None) -> pa.Table:
        if self.seal is None:
            raise ActdsError("E306", "seal", got="no seal", expected="a sealed dataset")
        entry = self.seal.multiplicity
        data = read_checked(self.store, entry.path, entry)
        table = tables.from_parquet("multiplicity", data, entry.path)
        if run is None:
            return table
        return table.filter(pc.equal(table["run"], run))


def heads_root(heads: dict[str, Head]) -> str:
    """Return the Merkle root of the heads that a seal pins.

    Spec: 0.1 section 8.4.
    """
    leaves = [canonical.dump({c: heads[c].model_dump(mode="json")}) for c in sorted(heads)]
    return canonical.merkle_root(leaves)


@dataclass
class _Reader:
    """Collects a catalogue, chain by chain."""

    store: Store
    runs: dict[str, RunRecord] = field(default_factory=dict)
    shards: list[ShardManifest] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)
    parts: dict[tuple[str, str], list[PartBody]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    def read(self) -> Catalog:
        store = self.store
        if not store.exists(layout.GENESIS):
            raise ActdsError("E101", store.uri, got=f"no {layout.GENESIS}", expected="a dataset")
        store.learn_sizes("")
        data = store.read(layout.GENESIS, canonical.MAX_DOCUMENT_NBYTES)
        self.genesis = schema.parse(Genesis, data, layout.GENESIS)
        genesis_sha256 = canonical.digest(data)
        self.hooks = {hook.name for hook in self.genesis.hooks}
        chains = read_ledger(store, self.genesis.dataset)
        records = [record for state in chains.values() for record in state.records]
        store.read_ahead(
            (layout.manifest_path(str(r.body.get("shard"))) for r in records if r.type == "shard"),
            canonical.MAX_DOCUMENT_NBYTES,
        )
        for state in chains.values():
            for record in state.records:
                self._take(state, record)
        standing = resolve(self.shards, self.replacements)
        for error in standing.errors:
            raise error
        for manifest in standing.shards:
            for entry in manifest.files:
                self._check_size(f"{layout.shard_dir(manifest.shard)}/{entry.path}", entry)
        seal, seal_sha256 = self._seals(chains, genesis_sha256)
        order = {run: number for number, run in enumerate(_run_order(chains.values()))}
        return Catalog(
            store=store,
            genesis=self.genesis,
            genesis_sha256=genesis_sha256,
            runs={run: self.runs[run] for run in order if run in self.runs},
            shards=sorted(standing.shards, key=lambda manifest: order[manifest.run]),
            replaced=standing.replaced,
            parts={
                key: sorted(parts, key=lambda part: part.file.path)
                for key, parts in sorted(self.parts.items(), key=lambda item: order[item[0][0]])
            },
            chains=chains,
            seal=seal,
            seal_sha256=seal_sha256,
            reached=frozenset(self.reached),
        )

    def _take(self, state: ChainState, record: LedgerRecord) -> None:
        place = layout.record_path(state.chain, record.seq)
        self.reached.add(place)
        body = record.typed_body()
        if isinstance(body, RunBody):
            self._take_run(state, body, place)
        elif isinstance(body, ShardBody):
            self.shards.append(self._take_shard(state, body, place, "writer"))
        elif isinstance(body, ReplaceBody):
            manifest = self._take_shard(state, body, place, "tool")
            self.replacements.append(Replacement(body, place, manifest))
        elif isinstance(body, PartBody):
            self._take_part(state, body, place)

    def _take_run(self, state: ChainState, body: RunBody, place: str) -> None:
        path = layout.run_path(body.run)
        if state.kind != "writer" or body.run != state.run:
            raise _foreign(place, f"run {body.run}", f"run {state.run} in its writer chain")
        self._reach(path, place)
        if not self.store.exists(path):
            return  # No provenance: E401 is for those who judge, and who may look all the same.
        data = self.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
        _check_digest(path, data, body.sha256)
        record = schema.parse(RunRecord, data, path)
        got = (record.dataset, record.run)
        if got != (self.genesis.dataset, body.run):
            raise _foreign(path, f"run {record.run} of {record.dataset}", f"run {body.run} of this")
        self.runs[body.run] = record
        readouts = readouts_of(record)
        if readouts is not None and readouts.n_probes:
            self.reached.add(layout.probes_path(body.run))

    def _take_shard(
        self, state: ChainState, body: ShardBody | ReplaceBody, place: str, kind: ChainKind
    ) -> ShardManifest:
        if state.kind != kind:
            raise _foreign(place, f"{body.shard} in a {state.kind} chain", f"a {kind} chain")
        path = layout.manifest_path(body.shard)
        self._reach(path, place)
        data = self.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
        _check_digest(path, data, body.manifest_sha256)
        manifest = schema.parse(ShardManifest, data, path)
        got = (manifest.dataset, manifest.shard, manifest.chain, manifest.run)
        expected = (self.genesis.dataset, body.shard, state.chain, state.run)
        if got != expected:
            raise _foreign(path, " ".join(got), " ".join(expected))
        if manifest.n_rows != body.n_rows:
            raise ActdsError(
                "E203", path, got=f"{manifest.n_rows} rows", expected=f"{body.n_rows} rows"
            )
        self._check_files(manifest, path)
        return manifest

    def _check_files(self, manifest: ShardManifest, path: str) -> None:
        unknown = sorted(set(manifest.hooks) - self.hooks)
        if unknown or sorted(set(manifest.hooks)) != manifest.hooks:
            raise ActdsError(
                "E103", f"{path} hooks", got=f"{manifest.hooks}", expected="hooks of actds.json"
            )
        names, wanted = [entry.path for entry in manifest.files], file_names(manifest.hooks)
        if names != wanted:
            odd = sorted(set(names) ^ set(wanted)) or ["their order"]
            raise ActdsError(
                "E103", f"{path} files", got=f"other files in {odd[0]}", expected=f"{wanted}"
            )
        if (manifest.permutation_seed is None) != (manifest.order == "sequence"):
            raise ActdsError(
                "E103",
                f"{path} permutation_seed",
                got=str(manifest.permutation_seed),
                expected="a seed when permuted, null in sequence",
            )
        root = files_root(manifest.files)
        if root != manifest.root:
            raise ActdsError("E205", f"{path} root", got=manifest.root, expected=root)
        for entry in manifest.files:
            self.reached.add(f"{layout.shard_dir(manifest.shard)}/{entry.path}")

    def _take_part(self, state: ChainState, body: PartBody, place: str) -> None:
        kind = layout.chain_kind_of(body.table)
        if state.kind != kind or not layout.is_part_path(body.file.path, body.table, state.run):
            raise _foreign(
                place,
                f"{body.file.path} in a {state.kind} chain",
                f"{layout.part_path(body.table, state.run, 0)} in a {kind} chain",
            )
        self._reach(body.file.path, place)
        self._check_size(body.file.path, body.file)
        self.parts.setdefault((state.run, body.table), []).append(body)

    def _reach(self, path: str, place: str) -> None:
        if path in self.reached:
            raise ActdsError("E310", place, got=f"{path} again", expected="one commit of it")
        self.reached.add(path)

    def _check_size(self, path: str, entry: FileEntry) -> None:
        self.reached.add(path)
        nbytes = self.store.size(path)
        if nbytes != entry.nbytes:
            raise ActdsError("E201", path, got=f"{nbytes} bytes", expected=f"{entry.nbytes} bytes")

    def _seals(
        self, chains: dict[str, ChainState], genesis_sha256: str
    ) -> tuple[Seal | None, str | None]:
        found = sum(1 for path in self.store.list("seal") if _SEAL_NAME.fullmatch(path))
        seal: Seal | None = None
        digest: str | None = None
        for n in range(1, found + 1):
            path = layout.seal_path(n)
            self.reached.add(path)
            if not self.store.exists(path):
                raise _seal_differs(path, "no seal", f"seals 1 to {found}")
            data = self.store.read(path, canonical.MAX_DOCUMENT_NBYTES)
            seal = schema.parse(Seal, data, path)
            named = (seal.dataset, seal.n, seal.previous, seal.genesis_sha256)
            expected = (self.genesis.dataset, n, digest, genesis_sha256)
            if named != expected:
                raise _seal_differs(path, f"{named}", f"{expected}")
            self._check_seal(seal, chains, path)
            digest = canonical.digest(data)
        return seal, digest

    def _check_seal(self, seal: Seal, chains: dict[str, ChainState], path: str) -> None:
        root = heads_root(seal.heads)
        if root != seal.root:
            raise ActdsError("E205", f"{path} root", got=seal.root, expected=root)
        for chain, head in sorted(seal.heads.items()):
            state = chains.get(chain)
            got = state.head_entry if state else None
            if got != head:
                raise _seal_differs(
                    f"ledger/{chain}", str(got or "no closed chain"), f"{head} as in {path}"
                )
        if seal.multiplicity.path != layout.multiplicity_path(seal.n):
            raise _seal_differs(path, seal.multiplicity.path, f"{layout.multiplicity_path(seal.n)}")
        self._check_size(seal.multiplicity.path, seal.multiplicity)


def _run_order(chains: Iterable[ChainState]) -> list[str]:
    began: dict[str, int] = {}
    for state in chains:
        opening = state.records[0].typed_body()
        if isinstance(opening, OpenBody):
            began[state.run] = min(opening.started_ns, began.get(state.run, opening.started_ns))
    return sorted(began, key=lambda run: (began[run], run))


def _check_digest(path: str, data: bytes, expected: str) -> None:
    got = canonical.digest(data)
    if got != expected:
        raise ActdsError("E202", path, got=f"sha256 {got}", expected=expected)


def _foreign(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E303", place, got=got, expected=expected)


def _seal_differs(place: str, got: str, expected: str) -> ActdsError:
    return ActdsError("E307", place, got=got, expected=expected)


def _printable(path: str) -> str:
    return path.encode("unicode_escape").decode("ascii")
