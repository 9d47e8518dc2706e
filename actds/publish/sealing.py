"""Sealing: the full accounting of every run, then one document that pins the closed dataset."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from actds.dataset.account import TOTALS, Account, Census
from actds.dataset.reading import CENSUS_TABLES, Catalog, heads_root
from actds.errors import ActdsError, Finding, Findings, Severity
from actds.format import canonical, schema, tables
from actds.format.schema import FileEntry, Head, Seal
from actds.publish.card import put_card
from actds.store import Store, layout, open_store
from actds.trust.pin import put_sums

_ACCEPTED_BY = (
    "actds check says what can be said of its rows. To seal or use them all the same: "
    "--imported, i_accept_unprovenanced=True, or a policy with imported = true."
)


def check_provenance(
    catalog: Catalog, findings: Findings | None = None, *, imported: bool = False
) -> None:
    """Check that every run with data has a run record and a census.

    A provenance field that is null without a reason (E402) is found where the record is read.

    Raises:
        NoProvenanceError: the first of them, without ``findings``.

    Spec: 0.1 section 6.
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
    census = Census(run, *(catalog.table(table, run) for table in (*CENSUS_TABLES, "drops")))
    accounts = [
        census.account(shard.tokens() for shard in shards) for _, shards in catalog.row_sets(run)
    ]
    findings = [finding for account in accounts for finding in account.findings]
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
    store = open_store(store)
    store.check_create_only()
    catalog = Catalog.read(store, apart=apart)
    heads = _heads(catalog)
    if catalog.is_sealed and catalog.seal is not None:
        _put_beside(catalog)
        return catalog.seal
    if not heads:
        raise ActdsError("E305", "ledger", got="no chain", expected="at least one closed chain")
    check_provenance(catalog, Findings(strict=True), imported=imported)
    totals = dict.fromkeys(TOTALS, 0)
    multiplicity = [tables.empty("multiplicity")]
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
    n = 1 if catalog.seal is None else catalog.seal.n + 1
    document = Seal(
        dataset=catalog.genesis.dataset,
        n=n,
        sealed_ns=time.time_ns(),
        previous=catalog.seal_sha256,
        genesis_sha256=catalog.genesis_sha256,
        heads=heads,
        root=heads_root(heads),
        totals=totals,
        multiplicity=_put_multiplicity(store, n, pa.concat_tables(multiplicity)),
    )
    store.put_new(layout.seal_path(n), [schema.to_bytes(document)])
    _put_beside(Catalog.read(store, apart=apart))
    return document


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
