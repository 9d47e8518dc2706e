"""A dataset that is being broken: edits of its files, and everything above them written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from actds.dataset.catalog import heads_root
from actds.dataset.reading import read_dataset
from actds.format import canonical, tables
from actds.format.schema import FileEntry, Head
from actds.format.shard import files_root, row_set_sha256
from actds.store import layout
from actds.store.local import LocalStore
from actds_validators.validate.accounting import check_accounting

RUN, HOOK, OTHER_HOOK = "r-vector", "resid_post.0", "resid_post.1"
PREFILL, DECODE = f"shards/{RUN}-prefill-0000", f"shards/{RUN}-decode-0000"
ARRAY = f"{PREFILL}/acts.zarr/{HOOK}/c/0/0"
RECORD = f"runs/{RUN}.json"
SEAL, MULTIPLICITY = "seal/0001.json", "seal/0001.multiplicity.parquet"
Json = dict[str, Any]


def part(table: str) -> str:
    """Return the path of a table of the run."""
    return layout.part_path(table, RUN, 0)


class Vector:
    """A copy of the valid dataset that is being broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keep: set[str] = set()

    def json(self, path: str) -> Json:
        return json.loads((self.path / path).read_bytes())

    def write_json(self, path: str, document: Json) -> None:
        (self.path / path).parent.mkdir(parents=True, exist_ok=True)
        (self.path / path).write_bytes(canonical.dump(document))
        if path.startswith("seal/"):
            # The list would be that of another seal; a dataset needs none (section 15.1).
            (self.path / layout.SUMS).unlink(missing_ok=True)

    def edit_json(self, path: str, **changes: Any) -> None:
        self.write_json(path, self.json(path) | changes)

    def table(self, path: str) -> list[Json]:
        return pq.read_table(self.path / path).to_pylist()

    def write_table(self, name: Any, path: str, rows: list[Json]) -> None:
        defaults, names = tables.OF_SAMPLES, tables.SCHEMAS[name].names
        columns = {key: [row.get(key, defaults.get(key)) for row in rows] for key in names}
        (self.path / path).write_bytes(tables.to_parquet(name, tables.build(name, columns)))

    def edit_table(self, table: Any, edit: Callable[[list[Json]], Any]) -> None:
        """Edit a table of the run, or with a path the part or token table there."""
        stem = table.rpartition("/")[2].removesuffix(".parquet").rpartition("-")[0]
        name, path = (stem or "tokens", table) if "/" in table else (table, part(table))
        rows = self.table(path)
        edit(rows)
        self.write_table(name, path, rows)

    def chain(self, kind: str) -> list[str]:
        """Return the paths of a chain's records, in order; kinds are w, c and t."""
        folder = next((self.path / "ledger").glob(f"{kind}-*"))
        return [p.relative_to(self.path).as_posix() for p in sorted(folder.iterdir())]

    def add_canary(self, lines: list[Json]) -> None:
        """Add a canary table on a tool chain of its own; ``relink`` makes its digests."""
        table = f"canary/{RUN}/canary-000000.parquet"
        (self.path / table).parent.mkdir(parents=True)
        self.write_table("canary", table, lines)
        opening = self.json(self.chain("w")[0])
        chain = "t-0000000000000099"
        bodies = {
            "open": opening["body"] | {"kind": "tool"},
            "part": {"table": "canary", "file": self._entry(table, table), "n_rows": len(lines)},
            "close": {"reason": "finished", "totals": {"foreign": 1, "requests": 1}},
        }
        for seq, (kind, body) in enumerate(bodies.items()):
            record = opening | {"chain": chain, "seq": seq, "type": kind, "body": body}
            self.write_json(f"ledger/{chain}/{seq:08d}.json", record)
        seal = self.json(SEAL)
        heads = seal["heads"] | {chain: {"n_records": 3, "sha256": "0" * 64, "state": "closed"}}
        self.edit_json(SEAL, heads=heads)

    def record(self, of_type: str, table: str | None = None) -> str:
        """Return the path of the first record of a type."""
        return next(
            path
            for kind in "wc"
            for path in self.chain(kind)
            if self.json(path)["type"] == of_type
            and table in (None, self.json(path)["body"].get("table"))
        )

    @staticmethod
    def root_of(heads: Json) -> str:
        """Return the Merkle root of a seal's heads."""
        return heads_root({name: Head(**head) for name, head in heads.items()})

    def flip(self, path: str, at: int) -> None:
        data = bytearray((self.path / path).read_bytes())
        data[at] ^= 0x10
        (self.path / path).write_bytes(data)

    # ---- writing what stands above a changed file again

    def relink(self, *, totals: bool = True) -> None:
        """Write digests, roots, links, totals and seal again, but not what is in ``keep``."""
        self._relink()
        if totals:
            self._retotal()
            self._relink()

    def _entry(self, path: str, name: str) -> Json:
        data = (self.path / path).read_bytes()
        return {"path": name, "nbytes": len(data), "sha256": canonical.digest(data)}

    def _relink(self) -> None:
        heads = {}
        for folder in sorted((self.path / "ledger").iterdir()):
            prev, paths = "0" * 64, self.chain(folder.name[0])
            for path in paths:
                record = self.json(path)
                if path not in self.keep:
                    self._rebody(record)
                    record["prev"] = prev
                    self.write_json(path, record)
                prev = canonical.digest((self.path / path).read_bytes())
            state = "fenced" if self.json(paths[-1])["type"] == "fence" else "closed"
            heads[folder.name] = {"n_records": len(paths), "sha256": prev, "state": state}
        self._reseal(heads)

    def _reseal(self, heads: Json) -> None:
        """Write every seal again; a later one also names the chains that came after."""
        genesis = canonical.digest((self.path / "actds.json").read_bytes())
        previous = None
        for file in sorted((self.path / "seal").glob("????.json")):
            path = file.relative_to(self.path).as_posix()
            mine = {name: heads[name] for name in self.json(path)["heads"] if name in heads}
            if path not in self.keep:
                table = path.replace(".json", ".multiplicity.parquet")
                self.edit_json(
                    path,
                    heads=mine,
                    root=self.root_of(mine),
                    genesis_sha256=genesis,
                    previous=previous,
                    multiplicity=self._entry(table, table),
                )
            previous = canonical.digest(file.read_bytes())

    def _rebody(self, record: Json) -> None:
        body = record["body"]
        if record["type"] == "run" and (self.path / RECORD).exists():
            body["sha256"] = canonical.digest((self.path / RECORD).read_bytes())
        elif record["type"] == "part" and (self.path / body["file"]["path"]).exists():
            path = body["file"]["path"]
            body["file"] = self._entry(path, path)
            if path not in self.keep:
                body["n_rows"] = pq.read_metadata(self.path / path).num_rows
        elif record["type"] == "redact":
            self._reredact(body)
        elif record["type"] in ("shard", "replace"):
            path = f"shards/{body['shard']}/shard.json"
            # The data of a replaced shard is gone, and its manifest is what it was.
            if path not in self.keep and (self.path / path).with_name("tokens.parquet").exists():
                self._remanifest(path)
            body["manifest_sha256"] = canonical.digest((self.path / path).read_bytes())

    def _reredact(self, body: Json) -> None:
        if body["file"] is None:
            return
        path = body["file"]["path"]
        if path.endswith("/shard.json"):
            self._remanifest(path)
        elif path not in self.keep:
            body["n_rows"] = pq.read_metadata(self.path / path).num_rows
        body["file"] = self._entry(path, path)

    def _remanifest(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        manifest = self.json(path)
        files = [self._entry(f"{folder}/{e['path']}", e["path"]) for e in manifest["files"]]
        manifest |= {
            "files": files,
            "root": files_root([FileEntry(**entry) for entry in files]),
        }
        if f"{folder}/tokens.parquet" not in self.keep:
            tokens = pq.read_table(self.path / folder / "tokens.parquet")
            step = tokens["step"].to_numpy()
            manifest |= {
                "row_set_sha256": row_set_sha256(
                    tokens["request"].to_numpy(), tokens["position"].to_numpy()
                ),
                "first_step": int(step.min()),
                "last_step": int(step.max()),
            }
        self.write_json(path, manifest)

    def _retotal(self) -> None:
        """Write the totals that the tables imply, and the multiplicity, as a liar would."""
        inventory = read_dataset(LocalStore(self.path))
        found = check_accounting(inventory)[0].account
        t = found.totals
        census = {"requests": t["requests"], "scheduled_tokens": t["scheduled"]}
        census |= {name: t[name] for name in tables.DISPOSITIONS}
        writer = {"rows": t["rows"], "dropped_tokens": t["dropped"]}
        writer |= {"recomputed_tokens": t["recomputed"]}
        for kind, totals in (("c", census), ("w", writer)):
            path = self.chain(kind)[-1]
            record = self.json(path)
            record["body"]["totals"] = totals
            self.write_json(path, record)
        self.edit_json(SEAL, totals=t)
        if MULTIPLICITY not in self.keep:
            data = tables.to_parquet("multiplicity", found.multiplicity)
            (self.path / MULTIPLICITY).write_bytes(data)


@dataclass(frozen=True)
class Fault:
    """One fault: its code, its place, and how it is made."""

    code: str
    name: str
    place: str
    what: str
    make: Callable[[Vector], Any]
    level: str = "full"
    also: tuple[str, ...] = ()
    severity: str = "error"
    base: str = "minimal"


FAULTS: list[Fault] = []


def fault(
    code: str, name: str, place: str, what: str, **more: Any
) -> Callable[[Callable[[Vector], Any]], Callable[[Vector], Any]]:
    """Register the function that makes a fault."""

    def register(make: Callable[[Vector], Any]) -> Callable[[Vector], Any]:
        FAULTS.append(Fault(code, name, place, what, make, **more))
        return make

    return register
