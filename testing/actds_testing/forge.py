"""Forging: make a changed dataset consistent again, as a broken or hostile writer would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actds.dataset.catalog import heads_root
from actds.format import canonical
from actds.format.schema import FileEntry, Head
from actds.format.shard import files_root
from actds.store import layout


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a document in place and keep it canonical."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(canonical.dump(document))


def rehash(manifest: Path) -> None:
    """Let a manifest say what its files are now."""

    def change(document: dict[str, Any]) -> None:
        for entry in document["files"]:
            _describe(entry, manifest.parent / entry["path"])
        files = [FileEntry.model_validate(entry) for entry in document["files"]]
        document["root"] = files_root(files)

    edit(manifest, change)


def relink(root: Path) -> None:
    """Let ledger and seals say what documents and parts are now; what follows from them goes."""
    heads: dict[str, tuple[int, str]] = {}
    for chain in sorted((root / "ledger").iterdir()):
        prev = "0" * 64
        records = sorted(chain.glob("*.json"))
        for path in records:
            record = json.loads(path.read_bytes())
            record["prev"] = prev
            _describe_body(root, record["type"], record["body"])
            path.write_bytes(canonical.dump(record))
            prev = canonical.digest(path.read_bytes())
        heads[chain.name] = (len(records), prev)
    previous = None
    for path in sorted((root / "seal").glob("????.json")):
        seal = json.loads(path.read_bytes())
        for chain_id, head in seal["heads"].items():
            head["n_records"], head["sha256"] = heads[chain_id]
        seal["root"] = heads_root({c: Head.model_validate(h) for c, h in seal["heads"].items()})
        seal["genesis_sha256"] = canonical.digest((root / "actds.json").read_bytes())
        seal["previous"] = previous
        _describe(seal["multiplicity"], root / seal["multiplicity"]["path"])
        path.write_bytes(canonical.dump(seal))
        previous = canonical.digest(path.read_bytes())
    for name in layout.BESIDE:
        (root / name).unlink(missing_ok=True)


def _describe_body(root: Path, kind: str, body: dict[str, Any]) -> None:
    if kind == "run":
        body["sha256"] = canonical.digest((root / f"runs/{body['run']}.json").read_bytes())
    elif kind == "shard":
        manifest = root / f"shards/{body['shard']}/shard.json"
        body["manifest_sha256"] = canonical.digest(manifest.read_bytes())
    elif kind == "part":
        _describe(body["file"], root / body["file"]["path"])


def _describe(entry: dict[str, Any], path: Path) -> None:
    data = path.read_bytes()
    entry["nbytes"], entry["sha256"] = len(data), canonical.digest(data)
