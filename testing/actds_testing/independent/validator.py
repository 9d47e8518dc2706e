"""A validator of sections 2 to 8: opens a dataset and holds everything against everything."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np

from actds_testing.independent import draw, looks, marks, readouts
from actds_testing.independent.arrays import GROUP, Bits, judge_values, read_array
from actds_testing.independent.conservation import Account
from actds_testing.independent.documents import TOTALS
from actds_testing.independent.findings import Breach, Finding, Findings, need
from actds_testing.independent.layout import Folder, Json
from actds_testing.independent.ledger import PLACES, Chain, Ledger, Run
from actds_testing.independent.manifests import Shard, shard_at
from actds_testing.independent.tables import read_rows, read_run_tables, read_tokens

NEEDED = ("requests", "steps", "spans")
STEPS_TO_JUDGE_ORDER = 16
CARD = ("README.md", "croissant.json")
SIGNATURES = re.compile(r"SHA256SUMS|seal/[0-9]{4,}\.(dsse\.json|sigstore\.json|intoto\.jsonl)")
"""What section 15 adds: not data."""
LINES = ("roles", "origins", "sampled", "readouts", "alerts", "attention", "canary")
FORGOTTEN = (
    "internal_id",
    "token_digest",
    "sampling",
    "block_digests",
    "labels",
    "conversation",
    "turn",
)
MOVED = ("captured", "cache_ref")
DISPOSITIONS = ("captured", "cache_ref", "dropped", "aborted", "filtered", "undelivered", "thinned")


def validate(path: Path, *, deep: bool = False) -> list[Finding]:
    """Return every breach of sections 2 to 8 in a dataset: level ``full``, or ``deep``."""
    findings = Findings()
    with findings.catching():
        Validator(path, findings, deep).run()
    return findings.all


class Validator:
    """One look at a dataset."""

    def __init__(self, path: Path, findings: Findings, deep: bool) -> None:
        self.folder, self.found, self.deep = Folder(path), findings, deep
        self.ledger = Ledger(self.folder, findings)
        self.hooks = {hook["name"]: hook for hook in self.ledger.genesis["hooks"]}
        self.tokens: dict[str, list[Json]] = {}
        self.accounts: dict[str, Account] = {}
        self.whole = self.ledger.whole

    def run(self) -> None:
        for shard in self.ledger.shards:
            with self.found.catching():
                self._judge_shard(shard)
        for name, run in self.ledger.runs.items():
            self._judge_run(name, run)
        self._judge_totals()
        self._judge_strays()

    # ---- shards

    def _judge_shard(self, shard: Shard) -> None:
        try:
            paths = [shard.path(entry["path"]) for entry in shard.manifest["files"]]
            self.folder.reached.update(paths)
            for path, entry in zip(paths, shard.manifest["files"], strict=True):
                self.folder.reach(path, entry["nbytes"])
            group = shard.path("acts.zarr/zarr.json")
            said = shard.read(self.folder, "acts.zarr/zarr.json")
            need(said == GROUP, "E108", group, "not the group of section 4.1")
            rows = read_tokens(self.folder, shard)
            bits = {hook: self._bits(shard, hook) for hook in shard.hooks}
        except Breach:
            self.ledger.runs[shard.manifest["run"]].whole = False
            raise
        self.tokens[shard.name] = [row | {"shard": shard.folder} for row in rows]
        self._judge_manifest(shard, rows)
        stored = {hook: array for hook, array in bits.items() if array is not None}
        keys = [(row["position"], row["token_id"]) for row in rows]
        judge_values(stored, self.hooks, shard, keys, self.found)

    def _bits(self, shard: Shard, hook: str) -> Bits | None:
        return read_array(self.folder, shard, self.hooks[hook], deep=self.deep)

    def _judge_manifest(self, shard: Shard, rows: list[Json]) -> None:  # 5
        manifest, place = shard.manifest, f"{shard.folder}/shard.json"
        steps = [row["step"] for row in rows]
        said = (manifest["first_step"], manifest["last_step"])
        self.found.check(said == (min(steps), max(steps)), "E415", place, f"steps {said}")
        keys = np.array(sorted(row["request"] << 32 | row["position"] for row in rows), "<u8")
        same = hashlib.sha256(keys.tobytes()).hexdigest() == manifest["row_set_sha256"]
        self.found.check(same, "E415", place, "row_set_sha256")
        if manifest["order"] == "permuted" and len(set(steps)) >= STEPS_TO_JUDGE_ORDER:  # 5.3
            key = np.random.Philox(key=manifest["permutation_seed"])
            before = np.empty(len(steps), np.uint64)
            before[np.random.Generator(key).permutation(len(steps))] = steps
            chance = sorted(before) == list(before)
            judged = steps != sorted(steps) or chance
            self.found.check(judged, "E415", place, "permuted, and in the order of steps")
        ascend = manifest["order"] == "permuted" or steps == sorted(steps)
        self.found.check(ascend, "E415", place, "in sequence, and steps descend")
        flags = all(row["flags"] < 8 for row in rows)
        self.found.check(flags, "E103", shard.path("tokens.parquet"), "flags without a meaning")
        one = all(row["phase"] == manifest["phase"] for row in rows)
        self.found.check(one, "E414", place, f"rows that are not {manifest['phase']}")

    # ---- runs

    def _judge_hooks(
        self, name: str, run: Run, requests: list[Json], *, chosen: bool
    ) -> None:  # 6.3
        of_request: dict[int, list[str]] = {}
        for line in requests:
            names = sorted(self.hooks) if line["hooks"] is None else line["hooks"].split(",")
            of_request[line["request"]] = names
            fits = line["hooks"] is None or (chosen and set(names) < set(self.hooks))
            fits &= names == sorted(set(names))
            self.found.check(fits, "E103", f"census/{name}/requests", line["hooks"])
        for shard in run.shards if chosen else ():
            for request in {row["request"] for row in self.tokens[shard.name]}:
                same = shard.hooks == of_request.get(request, sorted(self.hooks))
                self.found.check(same, "E406", shard.path("shard.json"), f"request {request}")

    def _judge_run(self, name: str, run: Run) -> None:
        if run.empty and run.whole:
            return
        if run.record is None:
            committed = any(path == f"runs/{name}.json" for path in self.ledger.committed)
            self.found.check(committed, "E401", f"runs/{name}.json", "no run record")
        lacking = [table for table in NEEDED if table not in run.parts]
        for table in run.parts:
            numbers = sorted(run.numbers[table])
            gap = run.whole and numbers != list(range(len(numbers)))
            self.found.check(not gap, "E301", f"{PLACES[table][0]}/{name}/{table}", f"{numbers}")
        if run.whole and self.ledger.whole:
            self.found.check(not lacking, "E403", f"census/{name}", f"lacks {lacking}")
            counted = bool(lacking) or _has_counted(run)
            self.found.check(counted, "E403", f"census/{name}", "was cut off")
        tables = read_run_tables(self.folder, run, self.found)
        whole = run.whole and self.ledger.whole and not lacking and run.record is not None
        self.whole &= whole
        if not whole:
            return
        choices = (run.record or {}).get("fields", {}).get("capture.hook_choices")  # 6.3
        rows = {
            hook: [
                row
                for shard in run.shards
                if hook in shard.hooks or choices is not None
                for row in self.tokens[shard.name]
            ]
            for hook in self.hooks
        }
        account = self.accounts[name] = Account(name, tables, rows, self.found)
        account.settle()
        self._judge_hooks(name, run, tables["requests"], chosen=choices is not None)
        self._judge_redaction(run, account)
        readouts.judge_roles(account)
        readouts.judge_labels(account)
        readouts.judge_origins(account)
        fields = run.record["fields"] if run.record else {}
        said = [fields.get(f"capture.{n}", {}).get("value") for n in ("entropy", "sampling")]
        cut = any(
            chain.kind in ("census", "writer") and (chain.close or {}).get("reason") != "finished"
            for chain in run.chains
        )
        readouts.judge_sampled(account, *said, cut=cut, redacted=run.redacted)
        readouts.judge_canary(account, self.hooks)
        with self.found.catching():
            self._judge_readouts(name, run, account)
        with self.found.catching():
            design = draw.design_of(run.record, f"runs/{name}.json capture.inclusion")
            read = fields.get("capture.readouts", {}).get("value") not in (None, "none")
            draw.judge_draw(account, design, read=read and not cut, redacted=run.redacted)
        with self.found.catching():
            place = f"runs/{name}.json {marks.FIELD}"
            marks.judge_marks(account, marks.changes_of(run.record, place))
        with self.found.catching():
            looks.judge_alerts(account, self.folder, run.record, self.hooks)
        with self.found.catching():
            looks.judge_attention(account, run.record)
        for chain in run.chains:
            if chain.close is not None:
                self._judge_close(chain, chain.close, account)
            elif chain.kind == "writer" and chain.state == "fenced":  # 8.3
                said = "fenced, its log of losses not closed"
                self.found.add("E421", f"ledger/{chain.name}", said, "warning")

    def _judge_redaction(self, run: Run, account: Account) -> None:  # 8.6
        """Note what is left of requests that were redacted (E427)."""
        place, gone = f"census/{account.run}", run.redacted
        for hook, rows in account.rows.items():
            left = [row for row in rows if row["request"] in gone]
            self.found.check(not left, "E427", f"shards of {account.run} {hook}", left[:1])
        for table in LINES:
            left = [line for line in account.table(table) if line["request"] in gone]
            where = f"{PLACES[table][0]}/{account.run}/{table}"
            self.found.check(not left, "E427", where, left[:1])
        for request in gone & account.requests.keys():
            line = account.requests[request]
            said = {name for name in FORGOTTEN if line[name] is not None}
            named = line["external_id"] == f"redacted-{request}"
            self.found.check(named and not said, "E427", f"{place}/requests", line)
            spans = [s for s in account.spans[request] if s["disposition"] in MOVED]
            self.found.check(not spans, "E427", f"{place}/spans", spans)
        for path in sorted(self.ledger.gone):
            shard = shard_at(path)
            files = [name for name, _ in self.folder.walk() if name != path or shard is None]
            left = [
                name for name in files if name == path or (shard and name.startswith(path[:-10]))
            ]
            self.found.check(not left, "E427", path, left)

    def _judge_readouts(self, name: str, run: Run, account: Account) -> None:
        assert run.record is not None
        said = readouts.settings(run.record, f"runs/{name}.json")
        if said is None:
            lines = account.table("readouts")
            self.found.check(not lines, "E416", f"readouts/{name}", "of a run that has none")
            return
        hooks_of = {shard.name: shard.hooks for shard in run.shards} | {"": list(self.hooks)}
        readouts.judge_readouts(account, said, hooks_of, run.redacted)
        probes = readouts.read_probes(self.folder, name, said, list(self.hooks.values()))
        for shard in run.shards if self.deep else ():
            for n, hook in enumerate(self.hooks.values()):
                if hook["name"] in shard.hooks:
                    bits = self._bits(shard, hook["name"])
                    assert bits is not None
                    rows = self.tokens[shard.name]
                    mine = None if probes is None else probes[n]
                    readouts.compare(account, said, hook, rows, bits, mine)

    def _judge_close(self, chain: Chain, close: Json, account: Account) -> None:  # 8.2
        place = f"ledger/{chain.name}"
        for name, total in self.true_totals(chain, account).items():
            told, late = close["totals"].get(name), name == "recomputed_tokens"
            free = {"finished": False, "interrupted": late, "failed": True}[close["reason"]]
            same = told == total or (told is None and free)
            self.found.check(same, "E415", place, f"{name}: {told}, is {total}")

    def true_totals(self, chain: Chain, account: Account) -> dict[str, int]:
        """Return the totals that the close of a chain has to have."""
        totals = account.totals
        if chain.kind == "writer":
            drops = [line for line in account.table("drops") if line["part"] in chain.parts]
            return {
                "rows": sum(shard.manifest["n_rows"] for shard in chain.shards),
                "dropped_tokens": sum(line["stop"] - line["start"] for line in drops),
                "recomputed_tokens": totals["recomputed"],
            }
        if chain.kind == "census":
            counted = {name: totals[name] for name in ("requests", *DISPOSITIONS)}
            for name, n in redacted_before(account, self.ledger.runs[chain.run]).items():  # 8.6
                counted[name] += n
                counted["filtered"] -= n
            return counted | {"scheduled_tokens": totals["scheduled"]}
        return {}

    # ---- the dataset

    def _judge_totals(self) -> None:  # 7.5, 7.6, 8.4
        for seal in self.ledger.seals if self.whole else ():
            if not self.ledger.redacting - seal["heads"].keys():  # 8.6
                self._judge_seal(seal)

    def _judge_seal(self, seal: Json) -> None:
        runs = {self.ledger.chains[n].run for n in seal["heads"] if n in self.ledger.chains}
        totals, lines = self.true_seal_totals(runs), list[Json]()
        for name in sorted(self.accounts.keys() & runs):
            lines += intervals(name, self.accounts[name].served)
        place = f"seal/{seal['n']:04d}.json"
        self.found.check(totals == seal["totals"], "E415", place, f"{seal['totals']}, is {totals}")
        entry = seal["multiplicity"]
        with self.found.catching():
            data = self.folder.read(entry["path"], entry)
            listed = read_rows(data, "multiplicity", None, entry["path"])
            self.found.check(listed == lines, "E413", entry["path"], "not what the spans imply")

    def true_seal_totals(self, runs: set[str] | None = None) -> Counter[str]:
        """Return the totals that a seal has to have: those of its runs together, or of all."""
        totals = Counter(dict.fromkeys(TOTALS, 0))
        for name, account in self.accounts.items():
            if runs is None or name in runs:
                totals.update(account.totals)
        return totals

    def _judge_strays(self) -> None:  # 2
        ledger = self.ledger
        standing = tuple(f"{shard.folder}/" for shard in ledger.shards)
        named = tuple(f"shards/{name}/" for name in ledger.named)
        refused = tuple(f"ledger/{name}/" for name in ledger.refused)
        aside = (*refused, ".gitattributes", ".git/", ".cache/")
        known = self.folder.reached | {*CARD} | ledger.gone
        for path in CARD:
            if path in self.folder.names("."):
                with self.found.catching():
                    self.folder.reach(path)
        for path, regular in self.folder.walk():
            if not regular and path not in CARD:
                self.found.add("E107", path, "no regular file")
            elif path in known or SIGNATURES.fullmatch(path) or path.startswith(aside):
                continue
            elif path.startswith(standing):
                self.found.add("E105", path, "nothing reaches it")
            elif not path.startswith(named):  # of a shard that was refused, or is replaced
                self.found.add("E105", path, "nothing reaches it", "warning")


def redacted_before(account: Account, run: Run) -> Counter[str]:  # 8.6
    """Return what positions of redacted requests were before, as far as they moved."""
    moved: Counter[str] = Counter()
    for request in run.redacted:
        for span in account.spans.get(request, []):
            if (span["disposition"], span["reason"]) == ("filtered", "redacted"):
                before = "captured" if span["step"] is not None else "cache_ref"
                moved[before] += span["stop"] - span["start"]
    return moved


def _has_counted(run: Run) -> bool:  # 8.3
    """Return whether a census of the run ended with what it counted, or may yet."""
    for chain in run.chains:
        if chain.kind == "census" and chain.state != "fenced":
            end = chain.close
            if end is None or end["reason"] != "failed" or end["totals"]:
                return True
    return False


def intervals(run: str, served: Counter[tuple[int, int]]) -> list[Json]:
    """Return the multiplicity lines of a run: maximal intervals of one count."""
    lines: list[Json] = []
    for (request, position), references in sorted(served.items()):
        last = lines[-1] if lines else None
        count = references + 1
        if last and (last["request"], last["stop"], last["count"]) == (request, position, count):
            last["stop"] += 1
        else:
            stop = position + 1
            lines.append(dict(run=run, request=request, start=position, stop=stop, count=count))
    return lines
