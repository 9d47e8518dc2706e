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
from actds_testing.independent.manifests import Shard, fits, take

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
KIND_OF = {"run": "writer", "shard": "writer", "replace": "tool"}


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

    @property
    def empty(self) -> bool:
        return not self.shards and not self.parts


class Ledger:
    """What a dataset says that it holds; what is wrong with that is in the findings.

    ``shards`` are those that stand, in the order committed, ``replaced`` the others.
    """

    def __init__(self, folder: Folder, findings: Findings) -> None:
        self.folder, self.findings = folder, findings
        self.genesis, self.genesis_sha256 = folder.document("actds.json", absent="E101")
        conform_genesis(self.genesis, "actds.json")
        self.dataset = self.genesis["dataset"]
        self.chains: dict[str, Chain] = {}
        self.runs: dict[str, Run] = {}
        self.shards: list[Shard] = []
        self.replaced: list[Shard] = []
        self.committed: set[str] = set()
        self.named: set[str] = set()
        """Shards that a record names, well or not."""
        self.waiting: list[tuple[str, Shard]] = []
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
            stem = file["path"].removeprefix(f"{folder}/{chain.run}/{table}-")
            fits_place = stem != file["path"] and stem.endswith(".parquet")
            n = numbered(stem[:-8], 6) if fits_place else None
            need(n is not None, "E303", path, f"{file['path']} is no part of {table}")
            self._once(file["path"], path)
            run.parts.setdefault(table, []).append(body | {"n": n})
            chain.parts.add(file["path"])
            self.folder.reach(file["path"], file["nbytes"])
            return
        need(chain.kind == KIND_OF[type], "E303", path, f"{type} in a {chain.kind} chain")
        if type == "run":
            target = f"runs/{chain.run}.json"
            need(body["run"] == chain.run, "E303", path, "the record of another run")
            self._once(target, path)
            self._read_run(run, body, target)
            return
        self._once(f"shards/{body['shard']}", path)
        place = {"dataset": self.dataset, "run": chain.run, "chain": chain.name}
        shard = take(self.folder, body, place | {"shard": body["shard"]}, self.genesis, path)
        chain.shards.append(shard)
        if type == "replace":
            self.waiting.append((body["replaced"], shard))
        else:
            self.shards.append(shard)

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
        """Let new shards take the place of those that they replace, whatever the order (8.5)."""
        at = {shard.name: n for n, shard in enumerate(self.shards)}
        progress = True
        while progress:
            progress = False
            for name, new in list(self.waiting):
                if name not in at:
                    continue
                progress = True
                self.waiting.remove((name, new))
                old = self.shards[at[name]]
                if old.name != name or not fits(old, new):
                    self._misfit(name, new)
                    continue
                self.replaced.append(old)
                self.shards[at[name]] = new
                at[new.name] = at[name]
        circle = {new.name for _, new in self.waiting}
        for name, new in self.waiting:
            if name in circle or f"shards/{name}" not in self.committed:
                self._misfit(name, new)  # else that shard was refused, and is in the findings

    def _misfit(self, name: str, new: Shard) -> None:
        self.findings.add("E311", new.record, f"{new.name} cannot replace {name}")
        self.runs[new.manifest["run"]].whole = False
