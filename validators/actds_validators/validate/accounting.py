"""Accounting: the tables of every run add up, to the position, and so does what quotes them.

Each line of its side tables (roles, origins, sampled tokens, canaries) names a position or a
request that there is, none twice, with values that can be.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.account import TOTALS, Account, Census, Moved
from actds.dataset.catalog import Catalog
from actds.dataset.columns import COLUMNS, MAX_FINDINGS_PER_CODE, Notes, check_words, ints
from actds.dataset.drawn import columns_of
from actds.dataset.ledger import ChainState
from actds.dataset.reading import CENSUS_TABLES
from actds.dataset.redacted import left_over
from actds.errors import ActdsError, Finding
from actds.format import tables
from actds.format.inclusion import Design
from actds.format.interventions import Intervention, interventions_of
from actds.format.positions import (
    Keys,
    depth,
    difference,
    overlap,
    pair_key,
    position_key,
    split_key,
    union,
)
from actds.format.schema import PartBody, RunRecord, Seal
from actds.format.shard import HOOK_CHOICES, TOKENS, Shard
from actds.store import layout
from actds_validators.arrays import Bools, Ints
from actds_validators.validate.readouts import check_n_rows, read_parts, sound_tables
from actds_validators.validate.shards import check_shard_tokens

_READ_ALONE: tuple[tables.TableName, ...] = ("stalls", "occupancy", "roles", "origins", "sampled")
"""Tables that the account does not need; that they can be read is checked all the same."""


@dataclass(frozen=True)
class RunAccount:
    """The account of one run.

    Args:
        complete: whether every table could be read, so that totals may be compared.
        n_dropped: positions in the parts of the drop log, by the chain that committed them.
        redacted: positions of redacted requests.
    """

    run: str
    account: Account
    complete: bool
    n_dropped: dict[str, int]
    redacted: Moved


def check_accounting(
    catalog: Catalog, progress: Callable[[int], None] = lambda n_rows: None
) -> list[RunAccount]:
    """Check every run that has a census, and the documents that quote its totals.

    Notes E203, E206, E404 to E415 and whatever a table is wrong in.

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
    design, reader.broken = None, True  # as a table that cannot be read
    interventions: tuple[Intervention, ...] = ()
    with catalog.findings.noting("accounting"):
        record = catalog.runs.get(run)
        interventions = interventions_of(record)
        design, reader.broken = Design.of(record), False
    of_draw, aside = columns_of(design, interventions), dict[tables.TableName, pa.Table]()

    def read(name: tables.TableName) -> pa.Table:
        table = reader.table(name, *of_draw.get(name, ()))
        if name in of_draw:
            aside[name] = table
        return table

    census = Census(run, *map(read, (*CENSUS_TABLES, "drops")))
    redacted = catalog.redacted(run)
    for name in _READ_ALONE:
        read(name)
    accounts = []
    noted: dict[Finding, None] = {}
    row_sets = catalog.row_sets(run)
    for hooks, shards in row_sets:
        rows = reader.tokens(shards)
        accounts.append(census.account(rows, design, aside, interventions, redacted))
        suffix = f" (hooks {', '.join(hooks)})" if len(row_sets) > 1 else ""
        for finding in accounts[-1].findings:
            where = finding.place + (suffix if finding.place.startswith("shards") else "")
            noted[replace(finding, place=where)] = None
    complete = not reader.broken and run not in catalog.incomplete
    if complete:
        reader.check_flags()
        # With a table missing, what then lacks a row is no second fault.
        for finding in noted:
            catalog.findings.take("accounting", finding)
        with catalog.findings.noting("accounting"):
            for finding in left_over(catalog, run):
                catalog.findings.take("accounting", finding)
    n_dropped = _dropped_by_chain(catalog, run, reader.n_dropped)
    return RunAccount(run, accounts[0], complete, n_dropped, census.redacted(redacted))


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

    def table(self, name: tables.TableName, *more: str) -> pa.Table:
        """Return a table of the run, of which columns are kept, ``more`` among them."""
        kept = [*COLUMNS.get(name, []), *more]
        parts = [tables.empty(name).select(kept)]
        for body in self.catalog.parts.get((self.run, name), []):
            path = body.file.path
            part = self._read(name, path, kept)
            if part is not None:
                check_n_rows(self.catalog, path, part.num_rows, body.n_rows)
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


def _check_close_totals(catalog: Catalog, account: RunAccount) -> None:
    """Check what the chains of a run say that they counted, whatever their number.

    Losses of a writer that was fenced are known as far as it logged them: a warning (E421).

    Spec: 0.1 sections 8.2 and 8.3.
    """
    for chain in (chain for chain in catalog.chains.values() if chain.run == account.run):
        if chain.kind == "census":
            expected, of_cut_off = _census_totals(account), set[str]()
        elif chain.kind == "writer":
            # A writer that was cut off has not seen every step.
            expected, of_cut_off = _writer_totals(catalog, account, chain), {"recomputed_tokens"}
        else:
            continue
        place = layout.record_path(chain.chain, len(chain.records) - 1)
        if chain.close is not None:
            required = {
                "finished": expected.keys(),
                "interrupted": expected.keys() - of_cut_off,
            }.get(chain.close.reason, set())
            _compare_totals(catalog, place, chain.close.totals, expected, required)
        if chain.kind == "writer" and chain.state == "fenced":
            got = "a fence: what was lost and not logged yet is not known"
            wanted = "a writer that closed its log of losses"
            catalog.findings.add("accounting", "E421", place, got, wanted, "warning")


def _census_totals(account: RunAccount) -> dict[str, int]:
    totals = account.account.totals
    counts = {"requests": totals["requests"], "scheduled_tokens": totals["scheduled"]}
    counts |= {name: totals[name] for name in tables.DISPOSITIONS}
    # What a census counted before requests were redacted.
    for name, n in account.redacted._asdict().items():
        counts[name] += n
        counts["filtered"] -= n
    return counts


def _writer_totals(catalog: Catalog, account: RunAccount, chain: ChainState) -> dict[str, int]:
    of_hooks: Counter[str] = Counter()
    has_choices = catalog.has_choices(account.run)
    for manifest in (*catalog.shards_by_run[account.run], *catalog.replaced):
        if manifest.chain == chain.chain:
            of_hooks.update(dict.fromkeys([""] if has_choices else manifest.hooks, manifest.n_rows))
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
    redacting = {c.place.split("/")[1] for c in catalog.replacements if c.requests}
    for seal in catalog.seals:
        if redacting - seal.heads.keys():
            continue  # its rows were others: a redaction came after it
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
    n = min(stored.num_rows, implied.num_rows)
    differ = (
        pc.index(pc.not_equal(stored[name][:n], implied[name][:n]), True).as_py()
        for name in stored.column_names
    )
    row = min((at for at in differ if at >= 0), default=n)
    entries = _entry(stored, row), _entry(implied, row)
    catalog.findings.add("accounting", "E413", f"{path} row {row}", *entries)


def _entry(table: pa.Table, row: int) -> str:
    if row >= table.num_rows:
        return "no further row"
    words = "run {run} request {request} [{start}, {stop}) count {count}"
    return words.format(**table.slice(row, 1).to_pylist()[0])


ENTROPY = "capture.entropy"
VERDICTS = ("same", "diverged", "foreign")
_FORMS = {
    "source_dataset": "[0-9a-f]{32}",
    "source_seal": "[0-9a-f]{64}",
    "source_run": "[a-z0-9][a-z0-9._-]{0,63}",
}


def check_side_tables(catalog: Catalog) -> None:
    """Check canaries, roles, origins, sampled tokens and chosen hooks of every run that has any.

    Args:
        catalog: the dataset; notes E103 for a word, a name or a digest that is none, E406 for rows
            with other hooks than those of their request, E414 for a canary of no stored row, E418
            for a row of another request, E420 for positions that the request does not have, or that
            have two roles, E422 for a request that the run does not have, that has an origin
            already, or of whose prompt more was given than there is, E423 for a line that is of no
            sampled token of its request, of one that has a line already, of another token than the
            stored row, of an unknown step or with values that no softmax has, and for tokens
            without a line: a warning where the run was cut off.

    Spec: 0.1 sections 5.2, 6.3 and 7.9.
    """
    for check in (_check_canary, _check_roles, _check_origins, _check_sampled, _check_hooks):
        for run in catalog.runs_with_data:
            notes = Notes(run)
            with catalog.findings.noting("integrity"):
                check(catalog, run, notes)
            for finding in notes.findings():
                catalog.findings.take("accounting", finding)


def _check_canary(catalog: Catalog, run: str, notes: Notes) -> None:
    paths = {body.file.path for body in catalog.parts.get((run, "canary"), [])}
    if not paths or paths & catalog.unsound:
        return
    canary = read_parts(catalog, run, "canary", ["request", "position", "hook", "verdict"])
    spans = sound_tables(catalog, run, "spans")
    hooks = [hook.name for hook in catalog.genesis.hooks]
    for column, known in (("verdict", VERDICTS), ("hook", hooks)):
        unknown = sorted(set(pc.unique(canary[column]).to_pylist()) - set(known))
        if unknown:
            got, expected = repr(unknown[0])[:80], f"one of {', '.join(known)}"
            notes.add("E414", f"canary/{run} {column}", got, expected)
    _check_foreign(catalog, run, canary)
    if spans:
        _check_stored(canary, spans[0], notes)


def _check_hooks(catalog: Catalog, run: str, notes: Notes) -> None:
    """Check that every row has the hooks of its request, where requests choose them."""
    requests = sound_tables(catalog, run, "requests")
    if not requests:
        return
    every = sorted(hook.name for hook in catalog.genesis.hooks)
    hooks, has_choices = requests[0]["hooks"], catalog.has_choices(run)
    expected = f"some of {', '.join(every)}, sorted"
    for text in pc.unique(hooks.drop_null()).to_pylist():
        names = text.split(",")
        if not has_choices or not set(names) < set(every) or names != sorted(set(names)):
            wanted = expected if has_choices else f"null: the run has no {HOOK_CHOICES}"
            notes.add("E103", f"census/{run}/requests hooks", repr(text)[:80], wanted)
    of_request = dict(zip(requests[0]["request"].to_pylist(), hooks.to_pylist(), strict=True))
    for shard in catalog.shards_of(run) if has_choices else ():
        stored = ",".join(shard.hooks)
        for request in pc.unique(shard.tokens(["request"])["request"]).to_pylist():
            chosen = of_request.get(request) or ",".join(every)
            if stored != chosen:
                where = f"{layout.manifest_path(shard.name)} rows of request {request}"
                notes.add("E406", where, f"hooks {stored}"[:200], chosen[:200])


def _check_foreign(catalog: Catalog, run: str, canary: pa.Table) -> None:
    foreign = canary.filter(pc.equal(canary["verdict"], "foreign")).sort_by(
        [("request", "ascending"), ("position", "ascending")]
    )
    request = foreign["request"].to_numpy()
    _, first, counts = np.unique(request, return_index=True, return_counts=True)
    some = slice(0, MAX_FINDINGS_PER_CODE)
    if len(first) > MAX_FINDINGS_PER_CODE:
        got = f"{len(first) - MAX_FINDINGS_PER_CODE} further requests with such rows"
        catalog.findings.add("accounting", "E418", f"canary/{run}", got, "none")
    for at, count in zip(first[some].tolist(), counts[some].tolist(), strict=True):
        row = foreign.slice(at, 1).to_pylist()[0]
        more = f" (and {count - 1} more rows)" if count > 1 else ""
        place = f"canary/{run} request {row['request']} position {row['position']}"
        where, got = f"{place} hook {row['hook']}{more}", "a row far from its replay"
        expected = "the row of the request that it is stored under"
        catalog.findings.add("accounting", "E418", where, got, expected)


def _check_stored(canary: pa.Table, spans: pa.Table, notes: Notes) -> None:
    captured = pc.equal(spans["disposition"], "captured")
    referenced = pc.and_(
        pc.equal(spans["disposition"], "cache_ref"), pc.is_valid(spans["ref_request"])
    )
    stored = spans.filter(pc.or_(captured, referenced))
    start, stop = (position_key(stored["request"], stored[name]) for name in ("start", "stop"))
    key = position_key(canary["request"], canary["position"])
    where = np.flatnonzero(depth(start, stop, key) == 0)
    if len(where):
        row = canary.slice(int(where[0]), 1).to_pylist()[0]
        more = f" (and {len(where) - 1} more rows)" if len(where) > 1 else ""
        place = f"canary/{notes.run} request {row['request']} position {row['position']}{more}"
        expected = "a captured position, or a reference to one"
        notes.add("E414", place, "a canary of a position without a row", expected)


def _check_roles(catalog: Catalog, run: str, notes: Notes) -> None:
    read = sound_tables(catalog, run, "roles", "spans") if catalog.parts.get((run, "roles")) else []
    if not read:
        return
    roles, spans = read
    check_words(roles, "role", tables.ROLES, f"census/{run}/roles", notes)
    empty = pc.greater_equal(roles["start"], roles["stop"])
    names = ("request", "start", "stop")
    for row in notes.each("E420", np.flatnonzero(empty.to_numpy())):
        place = notes.place("census", "roles", *(roles[name][row] for name in names))
        notes.add("E420", place, "no position", "a stop above the start")
    start, stop = _keys(roles.filter(pc.invert(empty)))
    for place in notes.places("E420", "census", "roles", overlap(start, stop)):
        notes.add("E420", place, "two roles", "one role, or none")
    theirs = union(*_keys(spans.filter(pc.less(spans["start"], spans["stop"]))))
    for place in notes.places("E420", "census", "roles", difference(union(start, stop), theirs)):
        notes.add("E420", place, "a role", "none: the request has no such position")


def _keys(table: pa.Table) -> tuple[Keys, Keys]:
    return (
        position_key(table["request"], table["start"]),
        position_key(table["request"], table["stop"]),
    )


def _check_origins(catalog: Catalog, run: str, notes: Notes) -> None:
    if not catalog.parts.get((run, "origins")):
        return
    if read := sound_tables(catalog, run, "origins", "requests"):
        _check_names(read[0], notes)
        _check_requests(read[0], read[1], notes)


def _check_names(origins: pa.Table, notes: Notes) -> None:
    for name, form in _FORMS.items():
        for value in pc.unique(origins[name]).to_pylist():
            if re.fullmatch(form, value) is None:
                place = f"census/{notes.run}/origins"
                notes.add("E103", place, f"{name} {value[:80]!r}", f"a text of the form {form}")


def _check_requests(origins: pa.Table, requests: pa.Table, notes: Notes) -> None:
    named, n_given = (origins[name].to_numpy().astype(np.int64) for name in ("request", "n_given"))
    numbers = requests["request"].to_numpy().astype(np.int64)
    served = ~np.isin(requests["finish_reason"].to_pylist(), tables.UNSERVED)
    room = np.where(served, requests["prompt_len"].to_numpy().astype(np.int64), 2**32)
    order = np.argsort(numbers, kind="stable")
    at = np.minimum(np.searchsorted(numbers[order], named), max(len(numbers) - 1, 0))
    known = numbers[order][at] == named if len(numbers) else np.zeros(len(named), bool)
    first = np.zeros(len(named), bool)
    first[np.unique(named, return_index=True)[1]] = True
    beyond = known & (n_given > room[order][at]) if len(numbers) else ~known
    for wrong, got, expected in (
        (~known, "an origin", "none: the run has no such request"),
        (known & ~first, "two origins", "one at most"),
        (beyond, "more given positions than prompt tokens", "at most the tokens of the prompt"),
    ):
        for row in notes.each("E422", np.flatnonzero(wrong)):
            notes.add("E422", f"census/{notes.run}/origins request {named[row]}", got, expected)


def _check_sampled(catalog: Catalog, run: str, notes: Notes) -> None:
    record = catalog.runs.get(run)
    if record is None or run in catalog.incomplete:
        return
    field = record.fields.get(ENTROPY)
    is_recorded = None if field is None else field.value
    if is_recorded is not None and not isinstance(is_recorded, bool):
        place = f"{layout.run_path(run)} {ENTROPY}"
        notes.add("E103", place, repr(is_recorded)[:80], "true or false")
        return
    if not is_recorded and not catalog.parts.get((run, "sampled")):
        return
    read = sound_tables(catalog, run, "sampled", "requests", "steps", "spans")
    if not read:
        return
    sampled, requests, steps, spans = read
    if is_recorded:
        key, is_owed = _check_lines(sampled, requests, steps, notes)
        _check_values(sampled, notes)
        free = _free(record, spans, catalog.redacted(run))
        _check_missing(catalog, requests, free, key[is_owed], notes)
        _check_tokens(catalog, run, key, ints(sampled, "token_id"), notes)
    elif sampled.num_rows:
        got = f"{sampled.num_rows} lines"
        notes.add("E423", f"census/{run}/sampled", got, f"none: {ENTROPY} is not true")


def _check_lines(
    sampled: pa.Table, requests: pa.Table, steps: pa.Table, notes: Notes
) -> tuple[Keys, Bools]:
    named, position, step = (ints(sampled, name) for name in ("request", "position", "step"))
    order = np.argsort(ints(requests, "request"), kind="stable")
    numbers, first, n = (
        ints(requests, name)[order] for name in ("request", "prompt_len", "generated_len")
    )
    known = np.isin(named, numbers)
    at = np.where(known, np.searchsorted(numbers, named), 0)
    within = known.copy()
    if len(numbers):
        within &= (position >= first[at]) & (position < first[at] + n[at])
    key = position_key(sampled["request"], sampled["position"])
    once = np.zeros(len(key), bool)
    once[np.unique(key, return_index=True)[1]] = True
    for wrong, got, expected in (
        (~within, "a line", "none: its request sampled no token there"),
        (within & ~once, "two lines", "one"),
        (~np.isin(step, ints(steps, "step")), "an unknown step", "a step of the run"),
    ):
        for row in notes.each("E423", np.flatnonzero(wrong)):
            notes.add("E423", _place(notes, named[row], position[row]), got, expected)
    return key, within & once


def _check_values(sampled: pa.Table, notes: Notes) -> None:
    for name, sign in (("entropy", 1), ("logprob", -1), ("margin", 1)):
        values = sampled[name].to_numpy()
        wrong = ~(np.isfinite(values) & (sign * values >= 0))
        for row in notes.each("E423", np.flatnonzero(wrong)):
            request, position = (sampled[n][row].as_py() for n in ("request", "position"))
            expected = f"a finite number, at {'least' if sign > 0 else 'most'} 0"
            place = f"{_place(notes, request, position)} {name}"
            notes.add("E423", place, f"{values[row]}", expected)


def _check_missing(
    catalog: Catalog, requests: pa.Table, free: Ints | None, owed: Keys, notes: Notes
) -> None:
    """Note the requests that have fewer lines than sampled tokens, by number.

    Those of ``free`` may have none at all; so may every one where it is None.
    """
    ended = np.asarray(requests["finish_reason"].to_pylist()) != "unfinished"
    numbers, n = (ints(requests, name)[ended] for name in ("request", "generated_len"))
    with_lines, n_lines = np.unique(owed >> np.uint64(32), return_counts=True)
    n_of = np.zeros(len(numbers), np.int64)
    if len(with_lines):
        at = np.minimum(np.searchsorted(with_lines, numbers), len(with_lines) - 1)
        n_of = np.where(with_lines[at] == numbers, n_lines[at], 0)
    may_lack = np.ones(len(numbers), bool) if free is None else np.isin(numbers, free)
    short = np.flatnonzero((n_of < n) & ~((n_of == 0) & may_lack))
    if not len(short):
        return
    if _was_cut_off(catalog, notes.run):
        got = f"{(n - n_of)[short].sum()} sampled tokens of {len(short)} requests without a line"
        place = f"census/{notes.run}/sampled"
        notes.add("E423", place, got, "a line for each", "warning")
        return
    for row in notes.each("E423", short):
        place = f"census/{notes.run}/sampled request {numbers[row]}"
        notes.add("E423", place, f"{n_of[row]} lines", f"{n[row]}, one per sampled token")


def _free(record: RunRecord, spans: pa.Table, redacted: Set[int]) -> Ints | None:
    if record.fields["capture.sampling"].value not in (None, "all"):
        return None
    filtered = ints(spans.filter(pc.equal(spans["disposition"], "filtered")), "request")
    return np.union1d(filtered, np.array(sorted(redacted), np.int64))


def _check_tokens(catalog: Catalog, run: str, key: Keys, token: Ints, notes: Notes) -> None:
    order = np.argsort(key, kind="stable")
    key, token = key[order], token[order]
    for manifest in catalog.shards_by_run[run]:
        path = f"{layout.shard_dir(manifest.shard)}/{TOKENS}"
        if path in catalog.unsound or not len(key):
            continue
        rows = catalog.read_table("tokens", path, ["request", "position", "token_id"])
        of_rows = position_key(rows["request"], rows["position"])
        at = np.minimum(np.searchsorted(key, of_rows), len(key) - 1)
        fed = ints(rows, "token_id")
        for row in notes.each("E423", np.flatnonzero((key[at] == of_rows) & (token[at] != fed))):
            place = _place(notes, *(rows[name][row].as_py() for name in ("request", "position")))
            notes.add("E423", place, f"token {token[at[row]]}", f"{fed[row]}, as in {path}")


def _was_cut_off(catalog: Catalog, run: str) -> bool:
    chains = [chain for chain in catalog.chains.values() if chain.run == run]
    return any(
        chain.close is None or chain.close.reason != "finished"
        for chain in chains
        if chain.kind in ("census", "writer")
    )


def _place(notes: Notes, request: object, position: object) -> str:
    return notes.place("census", "sampled", request, position)
