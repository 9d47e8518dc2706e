"""Accounting: the tables of every run add up, to the position, and so does what quotes them.

Canaries as well: no stored row belongs to another request, as far as replays say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds import layout
from actds.accounting.account import TOTALS, Account, account
from actds.errors import ActdsError, Finding
from actds.format import tables
from actds.format.positions import position_key
from actds.format.shard import TOKENS, Shard, row_order, row_set_sha256
from actds.ledger import ChainState
from actds.reading import CENSUS_TABLES, Catalog
from actds.schema import ShardManifest

MIN_STEPS_TO_JUDGE_ORDER = 16
"""A random order of so many steps is sorted by chance less than once in 10**13 shards."""
CANARY_VERDICTS = ("same", "diverged", "foreign")
CANARY_COLUMNS = ["request", "position", "hook", "verdict"]


@dataclass(frozen=True)
class RunAccount:
    """The account of one run.

    Args:
        run: the run.
        account: what became of its positions.
        complete: whether every table could be read, so that totals may be compared.
    """

    run: str
    account: Account
    complete: bool


def check_accounting(
    catalog: Catalog, progress: Callable[[int], None] = lambda n_rows: None
) -> list[RunAccount]:
    """Check every run that has a census, and the documents that quote its totals.

    Args:
        catalog: the dataset; notes E203, E206, E404 to E415 and whatever a table is wrong in.
        progress: called with the rows of each token table that is done.

    Returns:
        The accounts, by run.

    Spec: 0.1 section 7.
    """
    accounts = []
    for run in catalog.runs_with_data:
        if all(catalog.parts.get((run, table)) for table in CENSUS_TABLES):
            accounts.append(_check_run(catalog, run, progress))
    for one in accounts:
        if one.complete:
            _check_close_totals(catalog, one)
    every_run = [one.run for one in accounts] == catalog.runs_with_data
    if catalog.is_sealed and every_run and all(one.complete for one in accounts):
        _check_seal_totals(catalog, accounts)
        with catalog.findings.noting("accounting"):
            _check_multiplicity(catalog, accounts)
    return accounts


def _check_run(catalog: Catalog, run: str, progress: Callable[[int], None]) -> RunAccount:
    reader = _Tables(catalog, run, progress)
    requests, steps, spans, drops = (reader.table(name) for name in (*CENSUS_TABLES, "drops"))
    reader.table("stalls")
    accounts = []
    row_sets = catalog.row_sets(run)
    for hooks, shards in row_sets:
        one = account(run, requests, steps, spans, drops, reader.tokens(shards))
        suffix = f" (hooks {', '.join(hooks)})" if len(row_sets) > 1 else ""
        findings = [_named(finding, suffix) for finding in one.findings]
        accounts.append(replace(one, findings=findings))
    complete = not reader.broken and run not in catalog.incomplete
    if complete:
        # With a table missing, what then lacks a row is no second fault.
        found = dict.fromkeys(finding for one in accounts for finding in one.findings)
        for finding in found:
            catalog.findings.take("accounting", finding)
    return RunAccount(run, accounts[0], complete)


def _named(finding: Finding, suffix: str) -> Finding:
    rows = finding.place.startswith("shards")
    return replace(finding, place=finding.place + suffix) if rows else finding


class _Tables:
    """Reads the tables of a run once each: hashed, then parsed, then judged by themselves."""

    def __init__(self, catalog: Catalog, run: str, progress: Callable[[int], None]) -> None:
        self.catalog = catalog
        self.run = run
        self.progress = progress
        self.broken = False
        self._judged: set[str] = set()

    def table(self, name: tables.TableName) -> pa.Table:
        """Return a table of the run, without the parts that cannot be read."""
        parts = [tables.empty(name)]
        for body in self.catalog.parts.get((self.run, name), []):
            path = body.file.path
            part = self._read(name, path)
            if part is not None:
                _check_n_rows(self.catalog, path, part.num_rows, body.n_rows)
                parts.append(part)
        return pa.concat_tables(parts)

    def tokens(self, shards: list[Shard]) -> Iterator[pa.Table]:
        """Yield the token table of each shard, without those that cannot be read."""
        for manifest in (shard.manifest for shard in shards):
            path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
            table = self._read("tokens", path)
            self.progress(manifest.n_rows)
            if table is None:
                continue
            if manifest.shard not in self._judged:
                self._judged.add(manifest.shard)
                _check_shard_tokens(self.catalog, manifest, table, path)
            yield table

    def _read(self, name: tables.TableName, path: str) -> pa.Table | None:
        if path in self.catalog.unsound:
            self.broken = True
            return None
        try:
            return tables.from_parquet(name, self.catalog.file(path), path)
        except ActdsError as error:
            self.broken = True
            self.catalog.unsound.add(path)
            self.catalog.findings.take("structure" if error.code == "E109" else "integrity", error)
            return None


def _check_shard_tokens(
    catalog: Catalog, manifest: ShardManifest, table: pa.Table, path: str
) -> None:
    """Check a token table against what the manifest says about its rows."""
    place = layout.manifest_path(manifest.shard)
    if table.num_rows != manifest.n_rows:
        catalog.findings.add(
            "integrity",
            "E203",
            path,
            f"{table.num_rows} token rows",
            f"{manifest.n_rows} rows, as in the manifest",
        )
        catalog.incomplete.add(manifest.run)
        return
    wrong = np.flatnonzero(pc.not_equal(table["phase"], manifest.phase).to_numpy())
    if len(wrong):
        catalog.findings.add(
            "accounting",
            "E414",
            f"{path} row {wrong[0]} phase",
            f"{table['phase'][int(wrong[0])].as_py()!r:.20} in {len(wrong)} rows",
            f"{manifest.phase}, the phase of the shard",
        )
    step = table["step"].to_numpy()
    got = (int(step.min()), int(step.max()))
    if got != (manifest.first_step, manifest.last_step):
        catalog.findings.add(
            "accounting",
            "E415",
            f"{place} first_step, last_step",
            f"{manifest.first_step}, {manifest.last_step}",
            f"{got[0]}, {got[1]}, as in the token table",
        )
    digest = row_set_sha256(table["request"].to_numpy(), table["position"].to_numpy())
    if digest != manifest.row_set_sha256:
        catalog.findings.add(
            "accounting", "E415", f"{place} row_set_sha256", manifest.row_set_sha256, digest
        )
    _check_order(catalog, manifest, step, place)


def _check_order(
    catalog: Catalog, manifest: ShardManifest, step: npt.NDArray[np.uint64], place: str
) -> None:
    """Check that a shard which says that it is permuted does not stand in its old order."""
    if manifest.permutation_seed is None or len(np.unique(step)) < MIN_STEPS_TO_JUDGE_ORDER:
        return
    before = np.empty_like(step)
    before[row_order(len(step), manifest.permutation_seed)] = step
    if _is_sorted(step) and not _is_sorted(before):
        catalog.findings.add(
            "accounting",
            "E415",
            f"{place} order",
            "rows in the order of their steps",
            f"the permutation of seed {manifest.permutation_seed}",
        )


def _is_sorted(values: npt.NDArray[np.uint64]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_close_totals(catalog: Catalog, one: RunAccount) -> None:
    """Check the totals in the close records of a run's chains; a fenced chain has none."""
    chains = [chain for chain in catalog.chains.values() if chain.run == one.run]
    totals = one.account.totals
    census = {
        "requests": totals["requests"],
        "scheduled_tokens": totals["scheduled"],
        **{name: totals[name] for name in tables.DISPOSITIONS},
    }
    for kind, expected in (("census", census), ("writer", _writer_totals(one))):
        mine = [chain for chain in chains if chain.kind == kind]
        for chain in mine:
            if len(mine) > 1 and kind == "writer":
                expected = {"rows": _rows_of(catalog, chain)}
            elif len(mine) > 1:
                continue  # no one of several witnesses counts the whole run
            if chain.close is not None:
                _compare_totals(
                    catalog,
                    layout.record_path(chain.chain, len(chain.records) - 1),
                    chain.close.totals,
                    expected,
                    complete=chain.close.reason == "finished",
                )


def _writer_totals(one: RunAccount) -> dict[str, int]:
    totals = one.account.totals
    return {
        "rows": totals["rows"],
        "dropped_tokens": totals["dropped"],
        "recomputed_tokens": totals["recomputed"],
    }


def _rows_of(catalog: Catalog, chain: ChainState) -> int:
    committed = (*catalog.shards, *catalog.replaced)
    return sum(m.n_rows for m in committed if m.chain == chain.chain)


def _compare_totals(
    catalog: Catalog, place: str, got: dict[str, int], expected: dict[str, int], complete: bool
) -> None:
    for name, value in expected.items():
        if name not in got:
            if complete:
                catalog.findings.add(
                    "accounting", "E415", f"{place} totals", f"no {name}", f"{value}"
                )
        elif got[name] != value:
            catalog.findings.add(
                "accounting",
                "E415",
                f"{place} totals {name}",
                str(got[name]),
                f"{value}, as in the tables",
            )


def _check_seal_totals(catalog: Catalog, accounts: list[RunAccount]) -> None:
    seal = catalog.seals[-1]
    expected = {name: sum(one.account.totals[name] for one in accounts) for name in TOTALS}
    _compare_totals(catalog, layout.seal_path(seal.n), seal.totals, expected, complete=True)


def _check_multiplicity(catalog: Catalog, accounts: list[RunAccount]) -> None:
    """Check the multiplicity table of the seal against what the references imply.

    Raises:
        ActdsError: as reading a pinned table.
    """
    path = catalog.seals[-1].multiplicity.path
    if path in catalog.unsound:
        return
    stored = tables.from_parquet("multiplicity", catalog.file(path), path)
    implied = pa.concat_tables(
        [tables.empty("multiplicity"), *(one.account.multiplicity for one in accounts)]
    )
    order = [("run", "ascending"), ("request", "ascending"), ("start", "ascending")]
    implied = implied.sort_by(order)
    if stored.equals(implied):
        return
    got, expected = stored.to_pylist(), implied.to_pylist()
    row = next(
        (i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]),
        min(len(got), len(expected)),
    )
    catalog.findings.add(
        "accounting", "E413", f"{path} row {row}", _entry(got, row), _entry(expected, row)
    )


def _entry(entries: list[dict[str, object]], row: int) -> str:
    if row >= len(entries):
        return "no further row"
    entry = entries[row]
    return (
        f"run {entry['run']} request {entry['request']} [{entry['start']}, {entry['stop']}) "
        f"count {entry['count']}"
    )


def check_canary(catalog: Catalog) -> None:
    """Check the canary table of every run that has one.

    Args:
        catalog: the dataset; notes E418 for a row of another request, E414 for a line that
            names no stored row.

    Spec: 0.1 section 7.9.
    """
    for run in catalog.runs_with_data:
        paths = {body.file.path for body in catalog.parts.get((run, "canary"), [])}
        if not paths or paths & catalog.unsound:
            continue
        try:
            canary = read_parts(catalog, run, "canary", CANARY_COLUMNS)
            spans = catalog.sound_table(run, "spans")
        except ActdsError as error:
            catalog.findings.take("integrity", error)
            continue
        _check_words(catalog, run, canary)
        _check_foreign(catalog, run, canary)
        if spans is not None and run not in catalog.incomplete:
            _check_stored(catalog, run, canary, spans)


def read_parts(catalog: Catalog, run: str, name: tables.TableName, columns: list[str]) -> pa.Table:
    """Return columns of a table; notes E203 for a part of another length than was committed.

    Raises:
        ActdsError: as ``Catalog.file`` and ``tables.from_parquet``.
    """
    parts = [tables.empty(name).select(columns)]
    for body in catalog.parts.get((run, name), []):
        path = body.file.path
        part = tables.from_parquet(name, catalog.file(path), path, columns)
        _check_n_rows(catalog, path, part.num_rows, body.n_rows)
        parts.append(part)
    return pa.concat_tables(parts)


def _check_n_rows(catalog: Catalog, path: str, got: int, expected: int) -> None:
    if got != expected:
        catalog.findings.add("integrity", "E203", path, f"{got} rows", f"{expected} rows")


def _check_words(catalog: Catalog, run: str, canary: pa.Table) -> None:
    hooks = [hook.name for hook in catalog.genesis.hooks]
    for column, known in (("verdict", CANARY_VERDICTS), ("hook", hooks)):
        unknown = sorted(set(pc.unique(canary[column]).to_pylist()) - set(known))
        if unknown:
            catalog.findings.add(
                "accounting",
                "E414",
                f"canary/{run} {column}",
                repr(unknown[0])[:80],
                f"one of {', '.join(known)}",
            )


def _check_foreign(catalog: Catalog, run: str, canary: pa.Table) -> None:
    """Note each request with a row of another one, at its first such row."""
    foreign = canary.filter(pc.equal(canary["verdict"], "foreign")).sort_by(
        [("request", "ascending"), ("position", "ascending")]
    )
    request = foreign["request"].to_numpy()
    _, first, counts = np.unique(request, return_index=True, return_counts=True)
    for at, count in zip(first.tolist(), counts.tolist(), strict=True):
        row = foreign.slice(at, 1).to_pylist()[0]
        more = f" (and {count - 1} more rows)" if count > 1 else ""
        catalog.findings.add(
            "accounting",
            "E418",
            f"canary/{run} request {row['request']} position {row['position']} "
            f"hook {row['hook']}{more}",
            "a row far from its replay",
            "the row of the request that it is stored under",
        )


def _check_stored(catalog: Catalog, run: str, canary: pa.Table, spans: pa.Table) -> None:
    """Note lines whose position has no row, neither its own nor a referenced one."""
    own = pc.equal(spans["disposition"], "captured")
    referenced = pc.and_(
        pc.equal(spans["disposition"], "cache_ref"), pc.is_valid(spans["ref_request"])
    )
    stored = spans.filter(pc.or_(own, referenced))
    start, stop = (position_key(stored["request"], stored[name]) for name in ("start", "stop"))
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    key = position_key(canary["request"], canary["position"])
    at = np.searchsorted(start, key, side="right") - 1
    missing = at < 0
    missing[~missing] = key[~missing] >= stop[at[~missing]]
    where = np.flatnonzero(missing)
    if len(where):
        row = canary.slice(int(where[0]), 1).to_pylist()[0]
        more = f" (and {len(where) - 1} more rows)" if len(where) > 1 else ""
        catalog.findings.add(
            "accounting",
            "E414",
            f"canary/{run} request {row['request']} position {row['position']}{more}",
            "a canary of a position without a row",
            "a captured position, or a reference to one",
        )
