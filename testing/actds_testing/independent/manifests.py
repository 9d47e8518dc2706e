"""Section 5: what a shard's manifest says, and that it says it of this shard."""

from __future__ import annotations

from dataclasses import dataclass

from actds_testing.independent.documents import conform
from actds_testing.independent.findings import need
from actds_testing.independent.layout import Folder, Json, canonical, merkle

TOKENS = "tokens.parquet"
SAME = [
    "run",
    "phase",
    "n_rows",
    "hooks",
    "values",
    "order",
    "permutation_seed",
    "first_step",
    "last_step",
    "row_set_sha256",
]
"""What a shard and the one that it replaces agree in, section 8.5."""


@dataclass(frozen=True)
class Shard:
    """A committed shard: its manifest, the chain and the record that committed it."""

    manifest: Json
    chain: str
    record: str

    @property
    def name(self) -> str:
        return str(self.manifest["shard"])

    @property
    def folder(self) -> str:
        return f"shards/{self.name}"

    @property
    def hooks(self) -> list[str]:
        return list(self.manifest["hooks"])

    @property
    def document(self) -> str:
        return f"{self.folder}/shard.json"

    def path(self, file: str) -> str:
        return f"{self.folder}/{file}"

    def entry(self, file: str) -> Json:
        return next(entry for entry in self.manifest["files"] if entry["path"] == file)

    def read(self, folder: Folder, file: str) -> bytes:
        return folder.read(self.path(file), self.entry(file))


def take(folder: Folder, body: Json, place: Json, genesis: Json, record: str) -> Shard:
    """Return the shard that a record commits: digest, form, place, files, root (10.2).

    Raises:
        Breach: E104, E102, E103, E106, E202, E203, E205, E303.
    """
    path = f"shards/{body['shard']}/shard.json"
    manifest, _ = folder.document(path, sha=body["manifest_sha256"])
    conform(manifest, "actds.shard", path)
    named = {key: manifest[key] for key in place}
    need(named == place, "E303", path, f"{named}, expected {place}")
    hooks, known = manifest["hooks"], {hook["name"] for hook in genesis["hooks"]}
    need(hooks == sorted(set(hooks)), "E103", path, "hooks are not sorted, each once")
    need(set(hooks) <= known, "E103", path, "hooks that the genesis lacks")
    counts, n_rows = manifest["values"], manifest["n_rows"]
    need(sorted(counts) == hooks, "E103", path, f"values of {sorted(counts)}")
    most = max(entry["not_finite"] + entry["zero"] for entry in counts.values())
    need(most <= n_rows, "E103", path, f"counts {most} of {n_rows} rows")
    fits = all(entry.get("infinite", 0) <= entry["not_finite"] for entry in counts.values())
    need(fits, "E103", path, "more rows infinite than not finite")
    seed = manifest["permutation_seed"]
    need((seed is None) == (manifest["order"] == "sequence"), "E103", path, "a seed for no order")
    files = {"acts.zarr/zarr.json", TOKENS}
    for hook in hooks:
        files |= {f"acts.zarr/{hook}/zarr.json", f"acts.zarr/{hook}/c/0/0"}
    listed = [entry["path"] for entry in manifest["files"]]
    need(listed == sorted(files), "E103", path, f"files {listed}")
    root = merkle([canonical(entry) for entry in manifest["files"]]).hex()
    need(root == manifest["root"], "E205", path, "the root is not that of the files")
    need(manifest["n_rows"] == body["n_rows"], "E203", path, "another n_rows than its record")
    return Shard(manifest, place["chain"], record)


def fits(old: Shard, new: Shard, *, redacted: bool) -> bool:  # 8.5, 8.6
    """Return whether the manifests agree as those of a replacement or redaction do."""
    if redacted:
        names = ("run", "phase", "hooks", "order", "permutation_seed")
        same = all(old.manifest[key] == new.manifest[key] for key in names)
        return same and new.manifest["n_rows"] < old.manifest["n_rows"]
    same = all(old.manifest[key] == new.manifest[key] for key in SAME)
    return same and old.entry(TOKENS) == new.entry(TOKENS)


def shard_at(path: str) -> str | None:
    """Return the shard whose manifest has a path, None where another file has it."""
    names = path.split("/")
    return names[1] if len(names) == 3 and names[::2] == ["shards", "shard.json"] else None
