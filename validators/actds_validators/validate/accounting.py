"""Accounting: the tables of every run add up, to the position, and so does what quotes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.account import TOTALS, Account, Census
from actds.dataset.columns import COLUMNS
from actds.dataset.ledger import ChainState
from actds.dataset.reading import CENSUS_TABLES, Catalog
from actds.errors import ActdsError, Finding
from actds.format import tables
from actds.format.positions import pair_key, split_key
from actds.format.schema import PartBody, Seal, ShardManifest
from actds.format.shard import TOKENS, Shard, row_order, row_set_sha256
from actds.store import layout

MIN_STEPS_TO_JUDGE_ORDER = 16
"""A random order of so many steps is sorted by chance less than once in 10**13 shards."""
_READ_ALONE: tuple[tables.TableName, ...] = ("stalls", "occupancy", "roles", "origins", "sampled")
"""Tables that the account does not need; that they can be read is checked all the same."""


@dataclass(frozen=True)
class RunAccount:
    """The account of one run.

    Args:
        complete: whether every table could be read, so that totals may be compared.
        n_dropped: positions in the parts of the drop log, by the chain that committed them.
    """

    run: str
    account: Account
    complete: bool
    n_dropped: dict[str, int]


def check_accounting(
    catalog: Catalog, progress: Callable[[int], None] = lambda n_rows: None
) -> list[RunAccount]:
    """Check every run that has a census, and the documents that quote its totals.

    Args:
        catalog: the dataset; notes E203, E206, E404 to E415 and whatever a table is wrong in.
        progress: called with the rows of each token table that is done.

    Spec: 0.1 section 7.
    """
    accounts = []
    for run in catalog.runs_with_data:
        if all(catalog.parts.get((run, table)) for table in CENSUS_TABLES):
            accounts.append(_check_run(catalog, run, progress))
    for account in accounts:
        if account.complete:
            _check_close_totals(catalog, account)
    every_run = [account.run for account in accounts] == catalog.runs_with_data
    if catalog.is_sealed and every_run and all(account.complete for account in accounts):
        with catalog.findings.noting("accounting"):
            _check_seals(catalog, accounts)
    return accounts


def _check_run(catalog: Catalog, run: str, progress: Callable[[int], None]) -> RunAccount:
    reader = _Tables(catalog, run, progress)
    census = Census(run, *(reader.table(name) for name in (*CENSUS_TABLES, "drops")))
    for name in _READ_ALONE:
        reader.table(name)
    accounts = []
    row_sets = catalog.row_sets(run)
    for hooks, shards in row_sets:
        account = census.account(reader.tokens(shards))
        suffix = f" (hooks {', '.join(hooks)})" if len(row_sets) > 1 else ""
        findings = [_named(finding, suffix) for finding in account.findings]
        accounts.append(replace(account, findings=findings))
    complete = not reader.broken and run not in catalog.incomplete
    if complete:
        reader.check_flags()
        # With a table missing, what then lacks a row is no second fault.
        noted = dict.fromkeys(finding for account in accounts for finding in account.findings)
        for finding in noted:
            catalog.findings.take("accounting", finding)
    return RunAccount(run, accounts[0], complete, _dropped_by_chain(catalog, run, reader.n_dropped))


def _dropped_by_chain(catalog: Catalog, run: str, n_dropped: dict[str, int]) -> dict[str, int]:
    """Return how many positions each chain of a run logged as dropped, from those of each part."""
    dropped: dict[str, int] = {}
    for chain in (state for state in catalog.chains.values() if n_dropped and state.run == run):
        for record in (record for record in chain.records if record.type == "part"):
            body = record.typed_body()
            assert isinstance(body, PartBody)
            if body.file.path in n_dropped:
                dropped[chain.chain] = dropped.get(chain.chain, 0) + n_dropped[body.file.path]
    return dropped


def _named(finding: Finding, suffix: str) -> Finding:
    rows = finding.place.startswith("shards")
    return replace(finding, place=finding.place + suffix) if rows else finding


class _Tables:
    def __init__(self, catalog: Catalog, run: str, progress: Callable[[int], None]) -> None:
        self.catalog = catalog
        self.run = run
        self.progress = progress
        self.broken = False
        self.n_dropped: dict[str, int] = {}
        """Positions in each part of the drop log."""
        self._judged: set[str] = set()
        self._flags = np.empty(0, np.uint64)
        self._more_flags: list[npt.NDArray[np.uint64]] = []
        self._n_more = 0

    def table(self, name: tables.TableName) -> pa.Table:
        kept = COLUMNS.get(name, [])
        parts = [tables.empty(name).select(kept)]
        for body in self.catalog.parts.get((self.run, name), []):
            path = body.file.path
            part = self._read(name, path, kept)
            if part is not None:
                _check_n_rows(self.catalog, path, part.num_rows, body.n_rows)
                parts.append(part)
                if name == "drops":
                    lengths = pc.subtract(*(part[c].cast(pa.int64()) for c in ("stop", "start")))
                    self.n_dropped[path] = pc.sum(lengths).as_py() or 0
        return pa.concat_tables(parts)

    def tokens(self, shards: list[Shard]) -> Iterator[pa.Table]:
        for manifest in (shard.manifest for shard in shards):
            path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
            table = self._read("tokens", path)
            self.progress(manifest.n_rows)
            if table is None:
                continue
            if manifest.shard not in self._judged:
                self._judged.add(manifest.shard)
                check_shard_tokens(self.catalog, manifest, table, path)
                pairs = pair_key(table["token_id"].to_numpy(), table["flags"].to_numpy())
                self._more_flags.append(pairs)
                self._n_more += len(pairs)
                if self._n_more > len(self._flags):  # else each of many small shards sorts them all
                    self._join_flags()
            yield table

    def _join_flags(self) -> None:
        self._flags = np.unique(np.concatenate([self._flags, *self._more_flags]))
        self._more_flags, self._n_more = [], 0

    def check_flags(self) -> None:
        """Check that flags are known, and the same wherever a token is; notes E103, E414.

        Spec: 0.1 section 6.3.
        """
        self._join_flags()
        token, flags = split_key(self._flags)
        place = f"shards (run {self.run}) rows of token"
        for i in np.flatnonzero(flags > tables.FLAGS)[:1]:
            got, expected = f"flags {flags[i]:#x}", f"bits of {tables.FLAGS:#x}"
            self.catalog.findings.add("accounting", "E103", f"{place} {token[i]}", got, expected)
        for i in np.flatnonzero(token[1:] == token[:-1])[:1]:
            got = f"flags {flags[i]} and {flags[i + 1]}"
            expected = "the same flags in every row"
            self.catalog.findings.add("accounting", "E414", f"{place} {token[i]}", got, expected)

    def _read(
        self, name: tables.TableName, path: str, kept: list[str] | None = None
    ) -> pa.Table | None:
        if path in self.catalog.unsound:
            self.broken = True
            return None
        try:
            return self.catalog.read_table(name, path, kept=kept)
        except ActdsError as error:
            self.broken = True
            self.catalog.unsound.add(path)
            self.catalog.findings.take("structure" if error.code == "E109" else "integrity", error)
            return None


def check_shard_tokens(
    catalog: Catalog, manifest: ShardManifest, table: pa.Table, path: str
) -> None:
    place = layout.manifest_path(manifest.shard)
    if table.num_rows != manifest.n_rows:
        got, expected = (
            f"{table.num_rows} token rows",
            f"{manifest.n_rows} rows, as in the manifest",
        )
        catalog.findings.add("integrity", "E203", path, got, expected)
        catalog.incomplete.add(manifest.run)
        return
    note = partial(catalog.findings.add, "accounting")
    wrong = np.flatnonzero(pc.not_equal(table["phase"], manifest.phase).to_numpy())
    if len(wrong):
        got = f"{table['phase'][int(wrong[0])].as_py()!r:.20} in {len(wrong)} rows"
        expected = f"{manifest.phase}, the phase of the shard"
        note("E414", f"{path} row {wrong[0]} phase", got, expected)
    step = table["step"].to_numpy()
    got, expected = (
        f"{first}, {last}"
        for first, last in ((manifest.first_step, manifest.last_step), (step.min(), step.max()))
    )
    if got != expected:
        note("E415", f"{place} first_step, last_step", got, f"{expected}, as in the token table")
    digest = row_set_sha256(table["request"].to_numpy(), table["position"].to_numpy())
    if digest != manifest.row_set_sha256:
        note("E415", f"{place} row_set_sha256", manifest.row_set_sha256, digest)
    _check_order(catalog, manifest, step, place)


def _check_order(
    catalog: Catalog, manifest: ShardManifest, step: npt.NDArray[np.uint64], place: str
) -> None:
    if manifest.order == "sequence" and not _is_sorted(step):
        expected = "rows in the order of their steps"
        catalog.findings.add("accounting", "E415", f"{place} order", "sequence", expected)
    if manifest.permutation_seed is None or len(np.unique(step)) < MIN_STEPS_TO_JUDGE_ORDER:
        return
    before = np.empty_like(step)
    before[row_order(len(step), manifest.permutation_seed)] = step
    if _is_sorted(step) and not _is_sorted(before):
        expected = f"the permutation of seed {manifest.permutation_seed}"
        got = "rows in the order of their steps"
        catalog.findings.add("accounting", "E415", f"{place} order", got, expected)


def _is_sorted(values: npt.NDArray[np.uint64]) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_close_totals(catalog: Catalog, account: RunAccount) -> None:
    """Check what the chains of a run say that they counted, whatever their number.

    Losses of a writer that was fenced are known as far as it logged them: a warning (E421).

    Spec: 0.1 sections 8.2 and 8.3.
    """
    required: dict[str, Set[str]]
    for chain in (chain for chain in catalog.chains.values() if chain.run == account.run):
        if chain.kind == "census":
            expected = _census_totals(account)
            required = {"finished": expected.keys(), "interrupted": expected.keys()}
            _compare_close(catalog, chain, expected, required)
        elif chain.kind == "writer":
            expected = _writer_totals(catalog, account, chain)
            # A writer that was cut off has not seen every step.
            always = expected.keys() - {"recomputed_tokens"}
            required = {"finished": expected.keys(), "interrupted": always}
            _compare_close(catalog, chain, expected, required)
            if chain.state == "fenced":
                place = layout.record_path(chain.chain, len(chain.records) - 1)
                got = "a fence: what was lost and not logged yet is not known"
                wanted = "a writer that closed its log of losses"
                catalog.findings.add("accounting", "E421", place, got, wanted, "warning")


def _compare_close(
    catalog: Catalog, chain: ChainState, expected: dict[str, int], required: Mapping[str, Set[str]]
) -> None:
    if chain.close is not None:
        place = layout.record_path(chain.chain, len(chain.records) - 1)
        names = required.get(chain.close.reason, set())
        _compare_totals(catalog, place, chain.close.totals, expected, names)


def _census_totals(account: RunAccount) -> dict[str, int]:
    totals = account.account.totals
    counts = {"requests": totals["requests"], "scheduled_tokens": totals["scheduled"]}
    return counts | {name: totals[name] for name in tables.DISPOSITIONS}


def _writer_totals(catalog: Catalog, account: RunAccount, chain: ChainState) -> dict[str, int]:
    of_hooks: Counter[str] = Counter()
    for manifest in (*catalog.shards_by_run[account.run], *catalog.replaced):
        if manifest.chain == chain.chain:
            of_hooks.update(dict.fromkeys(manifest.hooks, manifest.n_rows))
    return {
        "rows": max(of_hooks.values(), default=0),
        "dropped_tokens": account.n_dropped.get(chain.chain, 0),
        "recomputed_tokens": account.account.totals["recomputed"],
    }


def _compare_totals(
    catalog: Catalog,
    place: str,
    got: Mapping[str, int],
    expected: Mapping[str, int],
    required: Set[str],
) -> None:
    note = partial(catalog.findings.add, "accounting", "E415")
    for name, value in expected.items():
        if name in got and got[name] != value:
            note(f"{place} totals {name}", str(got[name]), f"{value}, as in the tables")
        elif name not in got and name in required:
            note(f"{place} totals", f"no {name}", f"{value}")


def _check_seals(catalog: Catalog, accounts: list[RunAccount]) -> None:
    """Check totals and multiplicity of every seal, against the runs whose chains it names."""
    for seal in catalog.seals:
        named = {catalog.chains[chain].run for chain in seal.heads if chain in catalog.chains}
        sealed = [account for account in accounts if account.run in named]
        totals = {name: sum(account.account.totals[name] for account in sealed) for name in TOTALS}
        _compare_totals(catalog, layout.seal_path(seal.n), seal.totals, totals, totals.keys())
        _check_multiplicity(catalog, seal, sealed)


def _check_multiplicity(catalog: Catalog, seal: Seal, accounts: list[RunAccount]) -> None:
    """Check the multiplicity table of a seal against what the references imply."""
    path = layout.multiplicity_path(seal.n)
    if path in catalog.unsound or path not in catalog.files:
        return
    stored = catalog.read_table("multiplicity", path)
    implied = pa.concat_tables(
        [tables.empty("multiplicity"), *(account.account.multiplicity for account in accounts)]
    )
    order = [("run", "ascending"), ("request", "ascending"), ("start", "ascending")]
    implied = implied.sort_by(order)
    if stored.equals(implied):
        return
    got, expected = (
        [table[name].to_numpy(zero_copy_only=False) for name in table.column_names]
        for table in (stored, implied)
    )
    n = min(stored.num_rows, implied.num_rows)
    differ = [
        np.flatnonzero(account[:n] != other[:n])
        for account, other in zip(got, expected, strict=True)
    ]
    row = min((int(where[0]) for where in differ if len(where)), default=n)
    entries = _entry(stored, row), _entry(implied, row)
    catalog.findings.add("accounting", "E413", f"{path} row {row}", *entries)


def _entry(table: pa.Table, row: int) -> str:
    if row >= table.num_rows:
        return "no further row"
    entry = table.slice(row, 1).to_pylist()[0]
    return (
        f"run {entry['run']} request {entry['request']} [{entry['start']}, {entry['stop']}) "
        f"count {entry['count']}"
    )


def sound_tables(catalog: Catalog, run: str, *names: tables.TableName) -> list[pa.Table]:
    """Return tables of a run; none where one is unsound, or what it should hold is not known.

    Raises:
        ActdsError: as ``Catalog.read_table``.
    """
    if run in catalog.incomplete:
        return []
    read = [catalog.sound_table(run, name) for name in names]
    sound = [table for table in read if table is not None]
    return sound if len(sound) == len(names) else []


def read_parts(catalog: Catalog, run: str, name: tables.TableName, columns: list[str]) -> pa.Table:
    """Return columns of a table; notes E203 for a part of another length than was committed."""
    parts = [tables.empty(name).select(columns)]
    for body in catalog.parts.get((run, name), []):
        path = body.file.path
        part = catalog.read_table(name, path, columns)
        _check_n_rows(catalog, path, part.num_rows, body.n_rows)
        parts.append(part)
    return pa.concat_tables(parts)


def _check_n_rows(catalog: Catalog, path: str, got: int, expected: int) -> None:
    if got != expected:
        catalog.findings.add("integrity", "E203", path, f"{got} rows", f"{expected} rows")
