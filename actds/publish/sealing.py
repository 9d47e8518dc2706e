"""Sealing: the full accounting of every run, then one document that pins the closed dataset.

What a seal pins follows from the ledger alone, and no data file is read for it: the digest that a
consumer keeps, SHA256SUMS, and the statement that is signed. What may be written again beside the
data (the card, signatures, the list itself) is in neither list nor statement.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from actds.dataset.account import TOTALS, Account, Census
from actds.dataset.catalog import Catalog, heads_root
from actds.dataset.drawn import columns_of
from actds.dataset.reading import CENSUS_TABLES, no_such_seal, read_catalog
from actds.dataset.redacted import left_over
from actds.dataset.replacement import Replacement, committed
from actds.errors import ActdsError, Finding, Findings, Severity
from actds.format import canonical, schema, tables
from actds.format.inclusion import Design
from actds.format.interventions import interventions_of
from actds.format.schema import FileEntry, Head, RedactBody, ReplaceBody, RunBody, Seal, ShardBody
from actds.publish.card import put_card
from actds.store import Store, layout, open_store

_ACCEPTED_BY = (
    "actds check says what can be said of its rows. To seal or use them all the same: "
    "--imported, i_accept_unprovenanced=True, or a policy with imported = true."
)


def check_provenance(
    catalog: Catalog, findings: Findings | None = None, *, imported: bool = False
) -> None:
    """Check that every run with data has a run record and a census (section 6).

    A provenance field that is null without a reason (E402) is found where the record is read.
    Without ``findings`` the first one is raised.
    """
    findings = Findings(strict=True) if findings is None else findings
    faulty = {f.place.split(" ")[0] for _, f in findings if f.severity == "error"}
    for run in catalog.runs_with_data:
        path = layout.run_path(run)
        if run not in catalog.runs and path not in faulty:
            expected = "one for every run with rows"
            findings.add("provenance", "E401", path, "no run record", expected)
        missing = [table for table in CENSUS_TABLES if not catalog.parts.get((run, table))]
        if missing and run not in catalog.incomplete:
            got, expected = f"no {', no '.join(missing)}", "the tables requests, steps and spans"
            finding = Finding("E403", f"census/{run}", got, expected)
            if catalog.is_imported(run):
                got = "an imported run: nobody recorded how its rows were made"
                severity: Severity = "note" if imported else "error"
                finding = replace(finding, got=got, severity=severity, next_step=_ACCEPTED_BY)
            findings.take("provenance", finding)
        elif not missing and not _has_census_to_its_end(catalog, run):
            expected = "a census that was closed, with what it counted"
            findings.add("provenance", "E403", f"census/{run}", "a census cut off", expected)


def _has_census_to_its_end(catalog: Catalog, run: str) -> bool:
    """It closed with its totals, or may close yet; a fence counts nothing."""
    chains = catalog.chains.values()
    census = [chain for chain in chains if (chain.run, chain.kind) == (run, "census")]
    closes = [chain.close for chain in census if chain.close is not None]
    return any(chain.state in ("open", "broken") for chain in census) or any(
        close.reason != "failed" or close.totals for close in closes
    )


def account_run(catalog: Catalog, run: str) -> Account:
    """Return the account of a run; with hooks in disjoint shards, every hook has to agree."""
    record = catalog.runs.get(run)
    design, interventions = Design.of(record), interventions_of(record)
    redacted = catalog.redacted(run)
    census = Census(run, *(catalog.table(table, run) for table in (*CENSUS_TABLES, "drops")))
    aside = {table: catalog.table(table, run) for table in columns_of(design, interventions)}
    accounts = [
        census.account((shard.tokens() for shard in shards), design, aside, interventions, redacted)
        for _, shards in catalog.row_sets(run)
    ]
    findings = [finding for account in accounts for finding in account.findings]
    findings += left_over(catalog, run)
    return Account(list(dict.fromkeys(findings)), accounts[0].totals, accounts[0].multiplicity)


def seal(store: Store | str | Path, *, imported: bool = False, apart: bool = False) -> Seal:
    """Seal a dataset: its present ledger is complete, and every position accounted for.

    A dataset whose ledger did not change since its highest seal keeps that seal. ``SHA256SUMS``
    and the card are written again in any case: they are derived.

    Args:
        store: the dataset's store, or its path.
        imported: seal imported runs too, of whose positions nobody has an account; what is read
            of the dataset stays unprovenanced (E403).
        apart: parse tables as ``Catalog.parse_apart``.

    Raises:
        ActdsError: E305 a chain is open; the first error of the catalogue or of the accounting;
            E309 another process sealed meanwhile; E016, E503.

    Spec: 0.1 section 8.4.
    """
    sealed = sealed_catalog(store, imported=imported, apart=apart).seal
    assert sealed is not None
    return sealed


def sealed_catalog(
    store: Store | str | Path, *, imported: bool = False, apart: bool = False
) -> Catalog:
    """Seal a dataset as ``seal``; return the catalogue that the seal is of, read once."""
    store = open_store(store)
    store.check_create_only()
    catalog = read_catalog(store, apart=apart)
    heads = _heads(catalog)
    if catalog.is_sealed and catalog.seal is not None:
        _put_beside(catalog)
        return catalog
    if not heads:
        raise ActdsError("E305", "ledger", got="no chain", expected="at least one closed chain")
    check_provenance(catalog, Findings(strict=True), imported=imported)
    totals = dict.fromkeys(TOTALS, 0)
    multiplicity = [tables.empty("multiplicity")]
    catalog.read_ahead((*CENSUS_TABLES, "drops"), tokens=True)
    for run in catalog.runs_with_data:
        if catalog.is_imported(run):
            totals["rows"] += sum(shard.n_rows for shard in catalog.row_sets(run)[0][1])
            continue
        result = account_run(catalog, run)
        for finding in result.findings:
            if finding.severity == "error":
                raise finding.error()
        multiplicity.append(result.multiplicity)
        for name in TOTALS:
            totals[name] += result.totals[name]
    try:
        _put_seal(catalog, heads, totals, pa.concat_tables(multiplicity))
    except ActdsError as error:
        if error.code != "E309":
            raise
        catalog = read_catalog(store, apart=apart)
        if not catalog.is_sealed:  # else another process has just done it
            raise
    _put_beside(catalog)
    return catalog


def _put_seal(
    catalog: Catalog, heads: dict[str, Head], totals: dict[str, int], multiplicity: pa.Table
) -> None:
    store, n = catalog.store, 1 if catalog.seal is None else catalog.seal.n + 1
    document = Seal(
        dataset=catalog.genesis.dataset,
        n=n,
        sealed_ns=time.time_ns(),
        previous=catalog.seal_sha256,
        genesis_sha256=catalog.genesis_sha256,
        heads=heads,
        root=heads_root(heads),
        totals=totals,
        multiplicity=_put_multiplicity(store, n, multiplicity),
    )
    data = schema.to_bytes(document)
    store.put_new(layout.seal_path(n), [data])
    catalog.add_seal(document, canonical.digest(data))


def _put_beside(catalog: Catalog) -> None:
    put_sums(catalog)
    had_croissant = catalog.store.exists(layout.CROISSANT)
    put_card(catalog, layout.DERIVED if had_croissant else [layout.CARD])


def _heads(catalog: Catalog) -> dict[str, Head]:
    heads: dict[str, Head] = {}
    for chain, state in sorted(catalog.chains.items()):
        head = state.head_entry
        if head is None:
            got = f"an open {state.kind} chain of run {state.run}"
            expected = "a close or fence record"
            raise ActdsError("E305", f"ledger/{chain}", got=got, expected=expected)
        heads[chain] = head
    return heads


def _put_multiplicity(store: Store, n: int, table: pa.Table) -> FileEntry:
    order = [("run", "ascending"), ("request", "ascending"), ("start", "ascending")]
    data = tables.to_parquet("multiplicity", table.sort_by(order))
    path = layout.multiplicity_path(n)
    if store.exists(path):
        # A sealer died between this table and its seal; without the seal nothing names the file.
        store.replace(path, data)
    else:
        store.put_new(path, [data])
    return FileEntry(path=path, nbytes=len(data), sha256=canonical.digest(data))


# What a seal pins.


def sums(catalog: Catalog) -> bytes:
    """Return the list of a sealed dataset (15.1): one line per file, sorted by path.

    A line is the digest, two blanks and the path. Of a replaced shard only the manifest is there.
    """
    digests = {layout.GENESIS: catalog.genesis_sha256, **catalog.pins}
    for n, digest in enumerate(catalog.seal_digests, start=1):
        digests[layout.seal_path(n)] = digest
    for state in catalog.chains.values():
        for record, following in zip(state.records, [*state.records[1:], None], strict=True):
            digest = state.head if following is None else following.prev
            digests[layout.record_path(state.chain, record.seq)] = digest
            body = record.typed_body()
            if isinstance(body, RunBody):
                digests[layout.run_path(body.run)] = body.sha256
            elif isinstance(body, ShardBody | ReplaceBody):
                digests[layout.manifest_path(body.shard)] = body.manifest_sha256
            elif isinstance(body, RedactBody) and body.file is not None:
                digests[body.file.path] = body.file.sha256
    for path in catalog.superseded:
        digests.pop(path, None)
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests)).encode()


def put_sums(catalog: Catalog) -> None:
    catalog.store.replace(layout.SUMS, sums(catalog))


def check_sums(catalog: Catalog) -> None:
    """E806 the list, where there is one, is not that of the seal; E104, E107 no file."""
    store = catalog.store
    if not store.exists(layout.SUMS):
        return
    expected = sums(catalog)
    # By the size first: another one is not read.
    if store.size(layout.SUMS) != len(expected) or store.read(layout.SUMS) != expected:
        seal = f"that of seal {len(catalog.seals)}"
        raise ActdsError("E806", layout.SUMS, got="another list", expected=seal)


PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "actds:seal/0.1"


def statement(catalog: Catalog) -> bytes:
    """Return the statement about the seal of a sealed dataset (15.2), canonical JSON.

    Nothing in it is chosen by who signs: every signer of a seal signs the same bytes.
    """
    seal = catalog.seal
    assert seal is not None and catalog.is_sealed, "callers refuse what is not sealed"
    subjects = {
        layout.seal_path(seal.n): catalog.digest,
        layout.SUMS: canonical.digest(sums(catalog)),
    }
    return canonical.dump(
        {
            "_type": STATEMENT_TYPE,
            "subject": [
                {"name": name, "digest": {"sha256": digest}} for name, digest in subjects.items()
            ],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "dataset": seal.dataset,
                "genesis_sha256": seal.genesis_sha256,
                "hooks": [hook.model_dump(mode="json") for hook in catalog.genesis.hooks],
                "n": seal.n,
                "sealed_ns": seal.sealed_ns,
                "totals": seal.totals,
                "version": seal.version,
            },
        }
    )


def check_statement(payload: bytes, expected: bytes, place: str) -> None:
    """E803 what was signed is not the statement about this seal; E102 no canonical JSON."""
    if payload == expected:
        return
    signed, follows = canonical.parse(payload, f"{place} payload"), canonical.parse(expected, place)
    where, got, wanted = _difference(signed, follows, "payload")
    raise ActdsError("E803", f"{place} {where}", got=_short(got), expected=_short(wanted))


def _difference(got: Any, want: Any, where: str) -> tuple[str, Any, Any]:
    """Where two documents that differ do so first, and what is there in each."""
    keys: Iterable[Any] = ()
    if isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        keys = got
    elif isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        keys = range(len(got))
    for key in keys:
        if got[key] != want[key]:
            return _difference(got[key], want[key], f"{where}.{key}")
    return where, got, want


def _short(value: Any) -> str:
    return canonical.dump(value).decode().strip()[:120]


_PIN = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def parse_pin(text: str) -> str:
    """The digest that ``sha256:HEX`` names; E009 another form. The algorithm may be left out."""
    match = _PIN.fullmatch(text)
    if match is None:
        raise ActdsError("E009", "seal", got=repr(text)[:100], expected="sha256: and 64 hex digits")
    return match[1]


def check_pin(catalog: Catalog, seal: str) -> int:
    """Return the number of a pinned seal, after a check that the dataset extends it (15.5).

    The present seal extends the pinned one when it follows from it by the chain of digests, so that
    each chain that was sealed is there, with the same head. What a catalogue found (a seal that
    contradicts its ledger, a broken chain) is in its findings and not judged here. A record that
    replaces a shard leaves every sealed file's digest as it was, and yet lets other rows be read in
    its place: no digest says that they are the same.

    E804 it is none of the dataset's; E805 rows that it covers were replaced.
    """
    if seal not in catalog.seal_digests:
        raise no_such_seal(catalog.seal_digests, seal)
    pinned = catalog.seals[catalog.seal_digests.index(seal)]
    covered: set[str | None] = set()
    for chain in pinned.heads.keys() & catalog.chains.keys():
        covered |= {committed(record.typed_body()) for record in catalog.chains[chain].records}
    for chain in catalog.chains.keys() - pinned.heads.keys():
        for record in catalog.chains[chain].records:
            body, place = record.typed_body(), layout.record_path(chain, record.seq)
            if not isinstance(body, ReplaceBody | RedactBody):
                continue
            if (old := Replacement("", place, body).old) in covered:
                word = "a redaction" if isinstance(body, RedactBody) else "another shard"
                got, expected = f"{word} in place of {old}", f"the files of seal {pinned.n}"
                raise ActdsError("E805", place, got=got, expected=expected)
    return pinned.n
