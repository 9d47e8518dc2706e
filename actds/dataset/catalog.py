"""The catalogue of a dataset: everything that its ledger reaches, and the tables behind it."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.ledger import ChainState
from actds.dataset.replacement import Replacement, committed
from actds.errors import ActdsError, Findings
from actds.format import canonical, tables
from actds.format.apart import TablesApart
from actds.format.readouts import readouts_of
from actds.format.schema import (
    FileEntry,
    Genesis,
    Head,
    OpenBody,
    PartBody,
    RunRecord,
    Seal,
    ShardManifest,
)
from actds.format.shard import (
    HOOK_CHOICES,
    TOKENS,
    Shard,
    data_files,
    read_checked,
)
from actds.format.tables import UNKNOWN_FIELD, TableName
from actds.format.telemetry import profile_entry
from actds.store import Store, layout


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

    def has_choices(self, run: str) -> bool:
        """Return whether requests of a run choose the hooks of their rows (section 5.2)."""
        record = self.runs.get(run)
        return record is not None and HOOK_CHOICES in record.fields

    def row_sets(self, run: str) -> list[tuple[list[str], list[Shard]]]:
        """Return hooks with the shards whose rows they have to account for, each set by itself.

        Usually one entry: all hooks in all shards. Stages of a pipeline write shards of disjoint
        hooks, and then every hook has to account for every row by itself. Where requests choose
        hooks, each row is in one shard, and all shards account for all rows together.
        """
        if self.has_choices(run):
            return [([hook.name for hook in self.genesis.hooks], self.shards_of(run))]
        return self.shards_by_hooks(run)

    def shards_by_hooks(self, run: str) -> list[tuple[list[str], list[Shard]]]:
        """Return hooks with the shards that hold them, one entry per distinct set of shards."""
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
