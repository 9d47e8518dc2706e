"""Section 8: chains, what their records commit, replacements, seals."""

from __future__ import annotations

from dataclasses import dataclass, field

from actds_testing.independent.documents import (
    conform,
    conform_body,
    conform_genesis,
    conform_run,
)
from actds_testing.independent.findings import Breach, Findings, need
from actds_testing.independent.layout import (
    Folder,
    Json,
    canonical,
    is_segment,
    merkle,
    numbered,
)
from actds_testing.independent.manifests import Shard, fits, shard_at, take

PLACES = {  # 2, 8.2: folder of a table, and the kind of chain that commits it
    "requests": ("census", "census"),
    "steps": ("census", "census"),
    "spans": ("census", "census"),
    "roles": ("census", "census"),
    "origins": ("census", "census"),
    "sampled": ("census", "census"),
    "drops": ("losses", "writer"),
    "stalls": ("losses", "writer"),
    "occupancy": ("losses", "writer"),
    "readouts": ("readouts", "writer"),
    "alerts": ("readouts", "writer"),
    "attention": ("readouts", "writer"),
    "canary": ("canary", "tool"),
}
KIND_OF = {"run": "writer", "shard": "writer", "replace": "tool", "redact": "tool"}


@dataclass
class Chain:
    """The records of one process, as far as they can be read."""

    name: str
    run: str
    kind: str
    n_records: int = 0
    sha256: str = "0" * 64
    state: str = "open"
    whole: bool = True
    close: Json | None = None
    shards: list[Shard] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)


@dataclass
class Run:
    """What the ledger commits of one run."""

    record: Json | None = None
    shards: list[Shard] = field(default_factory=list)
    parts: dict[str, list[Json]] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    whole: bool = True
    redacted: set[int] = field(default_factory=set)
    """Requests that records with an effect name."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the parts that were committed, by table."""

    @property
    def empty(self) -> bool:
        return not self.shards and not self.parts


@dataclass
class Slot:
    """What is current in one place: a shard, or a part of a table of a run, or nothing."""

    run: str
    thing: Shard | Json | None
    before: list[str] = field(default_factory=list)
    """Paths of what stood here, and was replaced."""
    redacted: int = 0
    """How many of them hold what was redacted."""

    @property
    def path(self) -> str | None:
        thing = self.thing
        if thing is None:
            return None
        return thing.document if isinstance(thing, Shard) else str(thing["file"]["path"])


@dataclass(frozen=True)
class Change:
    """A record that lets something stand in the place of what has the path ``old``."""

    chain: Chain
    record: str
    old: str
    new: Shard | Json | None
    requests: list[int] | None
    """Those redacted; none for a replacement."""


class Ledger:
    """What a dataset says that it holds; what is wrong with that is in the findings.

    ``shards`` are those that stand, in the order committed.
    """

    def __init__(self, folder: Folder, findings: Findings) -> None:
        self.folder, self.findings = folder, findings
        self.genesis, self.genesis_sha256 = folder.document("actds.json", absent="E101")
        conform_genesis(self.genesis, "actds.json")
        self.dataset = self.genesis["dataset"]
        self.chains: dict[str, Chain] = {}
        self.runs: dict[str, Run] = {}
        self.shards: list[Shard] = []
        self.committed: set[str] = set()
        self.named: set[str] = set()
        """Shards that a record names, well or not."""
        self.changes: list[Change] = []
        self.redacting: set[str] = set()
        """Chains with a redaction that has an effect."""
        self.gone: set[str] = set()
        """Paths of replaced parts, and manifests, that held what was redacted."""
        self.refused: list[str] = []
        """Names under ``ledger/`` that are no names of chains."""
        self.whole = True
        """False when something is lost of which no run is known."""
        seals = self._read_seals()
        self.seal, self.digest = seals[-1] if seals else (None, None)
        for name in folder.names("ledger"):
            if folder.holds_files(f"ledger/{name}"):
                self._read_chain(name)
        self._replace()
        self._reach_parts()
        self.seals = [seal for seal, _ in seals if seal is not None]
        self._compare(self.seals)
        for shard in self.shards:
            self.runs[shard.manifest["run"]].shards.append(shard)

    # ---- seals

    def _read_seals(self) -> list[tuple[Json | None, str | None]]:  # 8.4
        numbers = self.folder.numbers("seal", 4)
        seals: list[tuple[Json | None, str | None]] = []
        for n in range(1, max(numbers, default=0) + 1):
            try:
                seals.append(self._read_seal(n, seals[-1][1] if seals else None))
            except Breach as breach:
                self.findings.all.append(breach.finding)
                seals.append((None, None))
                break  # what follows names this one
        return seals

    def _read_seal(self, n: int, previous: str | None) -> tuple[Json, str]:
        path = f"seal/{n:04d}.json"
        seal, digest = self.folder.document(path, absent="E307")
        conform(seal, "actds.seal", path)
        need(seal["dataset"] == self.dataset, "E303", path, "the seal of another dataset")
        named = (seal["n"], seal["previous"], seal["genesis_sha256"])
        need(named == (n, previous, self.genesis_sha256), "E307", path, f"names {named}")
        heads = sorted(seal["heads"].items())
        root = merkle([canonical({chain: head}) for chain, head in heads]).hex()
        need(root == seal["root"], "E205", path, "the root is not that of the heads")
        table = seal["multiplicity"]["path"]
        need(table == f"seal/{n:04d}.multiplicity.parquet", "E307", path, f"names {table}")
        with self.findings.catching():
            self.folder.read(table, seal["multiplicity"])
        return seal, digest

    def _compare(self, seals: list[Json]) -> None:
        """Compare the heads of every seal with the chains that there are."""
        for seal in seals:
            place = f"seal/{seal['n']:04d}.json"
            for name, head in seal["heads"].items():
                chain = self.chains.get(name)
                if chain is None or not chain.whole:
                    self.findings.check(chain is not None, "E307", place, f"no chain {name}")
                    continue
                mine = {key: getattr(chain, key) for key in ("n_records", "sha256", "state")}
                self.findings.check(mine == head, "E307", place, f"{name}: {head}, is {mine}")
            lost = (seals[seal["n"] - 2]["heads"].keys() if seal["n"] > 1 else set()) - seal[
                "heads"
            ].keys()
            self.findings.check(not lost, "E307", place, f"lacks {sorted(lost)} of the one before")
        for chain in self.chains.values():
            if chain.whole and chain.state == "open":
                self.findings.add("E305", f"ledger/{chain.name}", "neither closed nor fenced")
        if self.digest is None and not self.folder.has("seal/0001.json"):
            self.findings.add("E306", "seal", "no seal")
        elif self.seal is not None:
            for name in self.chains.keys() - self.seal["heads"].keys():
                self.findings.add("E306", f"ledger/{name}", "not in the highest seal")

    # ---- chains

    def _read_chain(self, name: str) -> None:
        place = f"ledger/{name}"
        if not is_segment(name):
            self.findings.add("E107", place, "no name")
            self.refused.append(name)
            return
        with self.findings.catching():
            there = self.folder.numbers(place, 8)
            chain = self.chains[name] = Chain(name, "", "")
            try:
                for seq in range(max(there, default=0) + 1):
                    self._read_record(chain, seq)
            except Breach:
                self._lose(chain)
                raise

    def _lose(self, chain: Chain) -> None:
        """Remember that what a chain says cannot be had in full."""
        chain.whole = False
        if chain.run in self.runs:
            self.runs[chain.run].whole = False
        else:
            self.whole = False

    def _read_record(self, chain: Chain, seq: int) -> None:
        path = f"ledger/{chain.name}/{seq:08d}.json"
        record, digest = self.folder.document(path, absent="E301")
        conform(record, "actds.ledger", path)
        conform_body(record, path)
        named = (record["dataset"], record["chain"], record["seq"])
        need(named == (self.dataset, chain.name, seq), "E303", path, f"names {named}")
        need(record["prev"] == chain.sha256, "E302", path, "prev is not the record before")
        need((record["type"] == "open") == (seq == 0), "E301", path, "open is not the first")
        need(chain.state == "open", "E304", path, "the chain had ended")
        chain.n_records, chain.sha256 = seq + 1, digest
        if record["type"] == "open":
            chain.run, chain.kind = record["body"]["run"], record["body"]["kind"]
            self.runs.setdefault(chain.run, Run()).chains.append(chain)
        elif record["type"] in ("close", "fence"):
            chain.state = {"close": "closed", "fence": "fenced"}[record["type"]]
            chain.close = record["body"] if record["type"] == "close" else None
        else:
            try:
                self._commit(chain, record["type"], record["body"], path)
            except Breach as breach:  # the chain goes on, its run cannot be accounted for
                self.findings.all.append(breach.finding)
                self.runs[chain.run].whole = False

    def _commit(self, chain: Chain, type: str, body: Json, path: str) -> None:
        run = self.runs[chain.run]
        self.named |= {body[key] for key in ("shard", "replaced") if key in body}
        if type == "part":
            table, file = body["table"], body["file"]
            folder, kind = PLACES[table]
            need(chain.kind == kind, "E303", path, f"{table} in a {chain.kind} chain")
            n = part_number(file["path"], f"{folder}/{chain.run}/{table}-")
            need(n is not None, "E303", path, f"{file['path']} is no part of {table}")
            self._once(file["path"], path)
            run.parts.setdefault(table, []).append(body | {"n": n})
            run.numbers.setdefault(table, []).append(n)
            chain.parts.add(file["path"])
            return
        need(chain.kind == KIND_OF[type], "E303", path, f"{type} in a {chain.kind} chain")
        if type == "run":
            target = f"runs/{chain.run}.json"
            need(body["run"] == chain.run, "E303", path, "the record of another run")
            self._once(target, path)
            self._read_run(run, body, target)
            return
        if type == "redact":
            self._redact(chain, run, body, path)
            return
        shard = self._take(chain, body, path)
        chain.shards.append(shard)
        if type == "replace":
            old = f"shards/{body['replaced']}/shard.json"
            self.changes.append(Change(chain, path, old, shard, None))
        else:
            self.shards.append(shard)

    def _take(self, chain: Chain, body: Json, path: str) -> Shard:
        self._once(f"shards/{body['shard']}", path)
        place = {"dataset": self.dataset, "run": chain.run, "chain": chain.name}
        return take(self.folder, body, place | {"shard": body["shard"]}, self.genesis, path)

    def _redact(self, chain: Chain, run: Run, body: Json, path: str) -> None:  # 8.6
        requests, file = body["requests"], body["file"]
        need(requests == sorted(set(requests)) and requests, "E103", path, f"{requests}")
        need(file is not None or body["n_rows"] == 0, "E203", path, "rows of no file")
        new: Shard | Json | None = None
        shards = {shard_at(body["replaced"]), shard_at(file["path"]) if file else None}
        self.named |= {name for name in shards if name}
        if file is not None and shard_at(file["path"]) is not None:
            sha, n = file["sha256"], body["n_rows"]
            commit = {"shard": shard_at(file["path"]), "manifest_sha256": sha, "n_rows": n}
            new = self._take(chain, commit, path)
        elif file is not None:
            self._once(file["path"], path)
            new = {"file": file, "n_rows": body["n_rows"]}
            self.folder.reached.add(file["path"])
            for table, (folder, _) in PLACES.items():
                n = part_number(file["path"], f"{folder}/{chain.run}/{table}-")
                if n is not None:
                    new["n"], new["table"] = n, table
                    run.numbers.setdefault(table, []).append(n)
        self.changes.append(Change(chain, path, body["replaced"], new, requests))

    def _once(self, what: str, path: str) -> None:
        need(what not in self.committed, "E310", path, f"{what} is committed twice")
        self.committed.add(what)

    def _read_run(self, run: Run, body: Json, path: str) -> None:
        record, _ = self.folder.document(path, absent="E401", sha=body["sha256"])
        conform_run(record, path)
        named = (record["dataset"], record["run"])
        need(named == (self.dataset, body["run"]), "E303", path, f"names {named}")
        run.record = record

    # ---- replacements

    def _replace(self) -> None:
        """Let what is new stand in the place of what it replaces, whatever the order (8.5, 8.6)."""
        slots = [Slot(shard.manifest["run"], shard) for shard in self.shards]
        for name, run in self.runs.items():
            slots += [Slot(name, part) for parts in run.parts.values() for part in parts]
        at = {str(slot.path): slot for slot in slots}
        waiting = list(self.changes)
        while turn := [change for change in waiting if change.old in at]:
            for change in turn:
                waiting.remove(change)
                slot = at[change.old]
                if slot.path != change.old or not _takes(slot, change):
                    self._misfit(change)
                    continue
                slot.before.append(change.old)
                slot.thing = change.new
                if slot.path is not None:
                    at[slot.path] = slot
                if change.requests is not None:
                    slot.redacted = len(slot.before)
                    self.runs[change.chain.run].redacted.update(change.requests)
                    self.redacting.add(change.chain.name)
        for change in waiting:
            shard = shard_at(change.old)
            circle = change.old in {str(_path(other.new)) for other in waiting}
            if circle or shard is None or f"shards/{shard}" not in self.committed:
                self._misfit(change)  # else that shard was refused, and is in the findings
        for slot in slots:
            self.gone.update(slot.before[: slot.redacted])
        self.shards = [slot.thing for slot in slots if isinstance(slot.thing, Shard)]
        for name, run in self.runs.items():
            current = [s.thing for s in slots if s.run == name and isinstance(s.thing, dict)]
            run.parts = {
                table: [part for part in current if part["table"] == table] for table in run.parts
            }

    def _reach_parts(self) -> None:
        for run in self.runs.values():
            for part in (part for parts in run.parts.values() for part in parts):
                try:
                    self.folder.reach(part["file"]["path"], part["file"]["nbytes"])
                except Breach as breach:
                    self.findings.all.append(breach.finding)
                    run.whole = False

    def _misfit(self, change: Change) -> None:
        self.findings.add("E311", change.record, f"nothing takes the place of {change.old}")
        self.runs[change.chain.run].whole = False


def part_number(path: str, stem: str) -> int | None:
    """Return the number of a part whose path begins with a stem."""
    rest = path.removeprefix(stem)
    return numbered(rest[:-8], 6) if rest != path and rest.endswith(".parquet") else None


def _path(thing: Shard | Json | None) -> str | None:
    return Slot("", thing).path


def _takes(slot: Slot, change: Change) -> bool:
    old, new, is_redaction = slot.thing, change.new, change.requests is not None
    if isinstance(old, Shard):
        if new is None:
            return slot.run == change.chain.run
        return isinstance(new, Shard) and fits(old, new, redacted=is_redaction)
    if not isinstance(new, dict) or old is None or slot.run != change.chain.run:
        return False
    return new.get("table") == old["table"] and int(new["n_rows"]) <= int(old["n_rows"])
