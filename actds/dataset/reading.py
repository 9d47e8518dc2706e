"""Reading a dataset: everything that the ledger reaches, with a finding for all that is wrong.

Listings only find chains and seals, whose records are numbered and linked: no listing is taken for
truth. Nothing here judges the accounting. ``read_dataset`` is the one reader: strict it raises the
first finding, to read; else it collects them and continues, to validate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from actds.dataset.account import TOTALS
from actds.dataset.catalog import Catalog, heads_root
from actds.dataset.ledger import ChainState, chain_names, read_broken_chain, read_chain
from actds.dataset.replacement import Replacement, committed, new_part, new_shard, resolve
from actds.errors import ActdsError, Findings
from actds.format import canonical, schema, tables
from actds.format.readouts import readouts_of
from actds.format.schema import (
    ChainKind,
    Genesis,
    LedgerRecord,
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
    check_sha256,
    data_files,
    file_names,
    files_root,
)
from actds.format.tables import TableName
from actds.format.telemetry import profile_entry
from actds.store import Store, layout, local_folder

CENSUS_TABLES: tuple[TableName, ...] = ("requests", "steps", "spans")
_SEAL_NAME = re.compile(r"seal/([0-9]{4,8})\.json")
_MAX_RECORDS = 1_000_000  # of a chain that a seal names where nothing can be listed


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
            ``read_catalog``.

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


def read_catalog(store: Store, *, seal: str | None = None, apart: bool = False) -> Catalog:
    """Return the catalogue of a dataset in which nothing is wrong.

    Args:
        store: the dataset's store.
        seal: digest of a seal: what that one covers, whatever came after it.
        apart: parse tables as ``Catalog.parse_apart``.

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
