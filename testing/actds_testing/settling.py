"""Digests, roots, links and totals above a changed file, made right again from the text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actds_testing.independent.findings import Breach, Findings
from actds_testing.independent.layout import canonical, merkle, sha256
from actds_testing.independent.validator import Validator, intervals

Json = dict[str, Any]


def write_table(path: Path, table: pa.Table, **options: Any) -> None:
    """Write a table in the form of section 6.2."""
    pq.write_table(table, path, store_schema=False, write_page_checksum=True, **options)


def load(path: Path) -> Any:
    return json.loads(path.read_bytes())


def entry_of(path: Path, name: str) -> Json:
    data = path.read_bytes()
    return {"path": name, "nbytes": len(data), "sha256": sha256(data)}


def settle(root: Path, *, totals: bool) -> str:
    """Write digests, roots and links again, and totals too where the tables can be read."""
    try:
        _relink(root)
        if totals:
            _retotal(root)
            _relink(root)
    except (Breach, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        return f"settled in part ({error!r:.80})"
    return "settled"


def _relink(root: Path) -> None:
    for path in sorted(root.glob("shards/*/shard.json")):
        manifest = load(path)
        for entry in manifest["files"]:
            file = path.parent / entry["path"]
            if file.is_file():
                entry |= entry_of(file, entry["path"])
        manifest["root"] = merkle([canonical(entry) for entry in manifest["files"]]).hex()
        path.write_bytes(canonical(manifest))
    heads = {}
    for chain in sorted((root / "ledger").iterdir()):
        prev, kind = "0" * 64, ""
        records = sorted(chain.glob("*.json"))
        for path in records:
            record = load(path)
            record["prev"], kind = prev, record["type"]
            _rebody(root, record)
            path.write_bytes(canonical(record))
            prev = sha256(path.read_bytes())
        state = "fenced" if kind == "fence" else "closed"
        heads[chain.name] = {"n_records": len(records), "sha256": prev, "state": state}
    _reseal(root, heads)


def _rebody(root: Path, record: Json) -> None:
    body = record["body"]
    if record["type"] == "run":
        path, key = root / f"runs/{body['run']}.json", "sha256"
    elif record["type"] in ("shard", "replace"):
        path, key = root / f"shards/{body['shard']}/shard.json", "manifest_sha256"
    elif record["type"] == "part" and (root / body["file"]["path"]).is_file():
        body["file"] |= entry_of(root / body["file"]["path"], body["file"]["path"])
        return
    else:
        return
    if path.is_file():
        body[key] = sha256(path.read_bytes())


def _reseal(root: Path, heads: Json) -> None:
    previous, seals = None, sorted(root.glob("seal/????.json"))
    for path in seals:
        seal = load(path)
        mine = heads if path == seals[-1] else {c: heads[c] for c in seal["heads"] if c in heads}
        seal["heads"], seal["previous"] = mine, previous
        seal["root"] = merkle([canonical({c: h}) for c, h in sorted(mine.items())]).hex()
        seal["genesis_sha256"] = sha256((root / "actds.json").read_bytes())
        table = root / seal["multiplicity"]["path"]
        if table.is_file():
            seal["multiplicity"] |= entry_of(table, seal["multiplicity"]["path"])
        path.write_bytes(canonical(seal))
        previous = sha256(path.read_bytes())


def _retotal(root: Path) -> None:
    """Let counts, closes, manifests, multiplicity and seal say what is in the tables now."""
    _recount(root)
    _relink(root)
    looked = Validator(root, Findings(), deep=False)
    looked.run()
    if not looked.accounts:
        return
    for name, account in looked.accounts.items():
        for chain in looked.ledger.runs[name].chains:
            path = max((root / "ledger" / chain.name).glob("*.json"))
            record = load(path)
            if record["type"] == "close" and chain.kind in ("writer", "census"):
                record["body"]["totals"] |= looked.true_totals(chain, account)
                path.write_bytes(canonical(record))
    path = max(root.glob("seal/????.json"))
    seal = load(path)
    seal["totals"] = dict(looked.true_seal_totals())
    path.write_bytes(canonical(seal))
    table = root / seal["multiplicity"]["path"]
    lines = [
        line
        for name in sorted(looked.accounts)
        for line in intervals(name, looked.accounts[name].served)
    ]
    schema = pq.read_schema(table)
    write_table(table, pa.Table.from_pylist(lines, schema=schema))


def _recount(root: Path) -> None:
    """Let manifests and records say how many rows and which steps their tables have."""
    for path in root.glob("ledger/*/*.json"):
        record = load(path)
        body = record["body"]
        if record["type"] == "part" and (root / body["file"]["path"]).is_file():
            body["n_rows"] = pq.read_metadata(root / body["file"]["path"]).num_rows
            path.write_bytes(canonical(record))
    for path in root.glob("shards/*/shard.json"):
        if not (path.parent / "tokens.parquet").is_file():
            continue
        manifest, table = load(path), pq.read_table(path.parent / "tokens.parquet")
        rows = table.to_pylist()
        manifest["first_step"] = min(row["step"] for row in rows)
        manifest["last_step"] = max(row["step"] for row in rows)
        keys = sorted(row["request"] << 32 | row["position"] for row in rows)
        words = b"".join(key.to_bytes(8, "little") for key in keys)
        manifest["row_set_sha256"] = sha256(words)
        path.write_bytes(canonical(manifest))
