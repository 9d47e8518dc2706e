"""A reader of format 0.1 that was written from the text in ``spec/0.1`` and knows nothing of actds.

It is the proof that the text suffices. It keeps positions in lists: for small datasets only.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from pathlib import Path

import numcodecs.blosc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEGMENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
TOKENS = "tokens.parquet"
ITEMS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"}


def need(condition: bool, code: str, place: object) -> None:
    if not condition:
        raise ValueError(f"{code} {place}")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(document: object) -> bytes:  # 2.2
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def merkle(leaves: list[bytes]) -> bytes:  # 2.3
    if len(leaves) < 2:
        return hashlib.sha256(b"\0" + leaves[0] if leaves else b"").digest()
    k = 1 << ((len(leaves) - 1).bit_length() - 1)
    return hashlib.sha256(b"\1" + merkle(leaves[:k]) + merkle(leaves[k:])).digest()


def crc32c(data: bytes) -> int:  # 4.2
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class IndependentReader:
    """Opens a sealed dataset; ``arrays`` and ``tokens`` are per shard, in the order committed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.genesis, genesis_sha = self.document("actds.json")
        self.seal, self.digest = self.read_seals(genesis_sha)
        self.runs: dict[str, dict] = {}
        self.shards: list[dict] = []
        self.replacements: list[tuple[str, dict]] = []
        self.committed: set[str] = set()
        self.parts: dict[tuple[str, str], list[dict]] = {}
        there = {path.name for path in (root / "ledger").iterdir()}
        need(there == set(self.seal["heads"]), "E306", "ledger")
        for chain, head in self.seal["heads"].items():
            self.read_chain(chain, head)
        self.replace_shards()

    def read(self, path: str, entry: dict | None = None) -> bytes:  # 10.2: size, digest, parse
        need(all(SEGMENT.fullmatch(s) for s in path.split("/")), "E107", path)
        file = self.root / path
        need(file.is_file() and not file.is_symlink(), "E104", path)
        need(entry is None or file.stat().st_size == entry["nbytes"], "E201", path)
        data = file.read_bytes()
        need(entry is None or sha256(data) == entry["sha256"], "E202", path)
        return data

    def document(self, path: str) -> tuple[dict, str]:
        data = self.read(path)
        need(len(data) <= 1 << 26, "E102", path)
        document = json.loads(data)
        need(canonical(document) == data, "E102", path)
        need(document["version"] == "0.1", "E106", path)
        return document, sha256(data)

    def read_seals(self, genesis_sha: str) -> tuple[dict, str]:  # 8.4
        seal, digest, n = None, None, 1
        while (self.root / f"seal/{n:04d}.json").exists():
            previous = digest
            seal, digest = self.document(f"seal/{n:04d}.json")
            named = (seal["n"], seal["previous"], seal["genesis_sha256"])
            need(named == (n, previous, genesis_sha), "E307", n)
            leaves = [canonical({chain: head}) for chain, head in sorted(seal["heads"].items())]
            need(merkle(leaves).hex() == seal["root"], "E205", f"seal {n}")
            n += 1
        need(seal is not None, "E306", "seal")
        return seal, digest

    def read_chain(self, chain: str, head: dict) -> None:  # 8.2
        prev, run, kind = "0" * 64, None, None
        for seq in range(head["n_records"]):
            path = f"ledger/{chain}/{seq:08d}.json"
            record, digest = self.document(path)
            need(record["prev"] == prev, "E302", path)
            place = [record[key] for key in ("dataset", "chain", "seq")]
            need(place == [self.genesis["dataset"], chain, seq], "E303", path)
            need((record["type"] == "open") == (seq == 0), "E301", path)
            body, prev = record["body"], digest
            if record["type"] == "open":
                run, kind = body["run"], body["kind"]
            elif record["type"] == "run":
                self.runs[run], digest = self.document(f"runs/{body['run']}.json")
                need(digest == body["sha256"], "E202", path)
            elif record["type"] == "shard":
                need(kind == "writer", "E303", path)
                place = [self.genesis["dataset"], run, chain, body["shard"]]
                self.shards.append(self.take_shard(body, place))
            elif record["type"] == "replace":
                need(kind == "tool", "E303", path)
                place = [self.genesis["dataset"], run, chain, body["shard"]]
                self.replacements.append((body["replaced"], self.take_shard(body, place)))
            elif record["type"] == "part":
                self.parts.setdefault((run, body["table"]), []).append(body)
            ended = record["type"] in ("close", "fence")
            need(ended == (seq == head["n_records"] - 1), "E304", path)
        need(prev == head["sha256"], "E307", chain)
        need(len(list((self.root / f"ledger/{chain}").iterdir())) == seq + 1, "E304", chain)

    def replace_shards(self) -> None:  # 8.5: chains have no order among each other
        place = {manifest["shard"]: n for n, manifest in enumerate(self.shards)}
        same = "run phase n_rows hooks order permutation_seed first_step last_step row_set_sha256"
        waiting = self.replacements
        while any(name in place for name, _ in waiting):
            left = []
            for name, new in waiting:
                if name not in place:
                    left.append((name, new))
                    continue
                old = self.shards[place[name]]
                need(old["shard"] == name, "E311", f"{name} is replaced already")
                need(all(old[key] == new[key] for key in same.split()), "E311", new["shard"])
                entries = [e for m in (old, new) for e in m["files"] if e["path"] == TOKENS]
                need(entries[0] == entries[1], "E311", new["shard"])
                self.shards[place[name]] = new
                place[new["shard"]] = place[name]
            waiting = left
        need(not waiting, "E311", "a shard that nobody committed")

    def take_shard(self, body: dict, place: list) -> dict:  # 5.2
        path = f"shards/{body['shard']}/shard.json"
        need(path not in self.committed, "E310", path)
        self.committed.add(path)
        manifest, digest = self.document(path)
        need(digest == body["manifest_sha256"], "E202", path)
        named, files = (
            [manifest[k] for k in ("dataset", "run", "chain", "shard")],
            manifest["files"],
        )
        need(named == place, "E303", path)
        need(merkle([canonical(entry) for entry in files]).hex() == manifest["root"], "E205", path)
        names = {"acts.zarr/zarr.json", "tokens.parquet"}
        for hook in manifest["hooks"]:
            names |= {f"acts.zarr/{hook}/zarr.json", f"acts.zarr/{hook}/c/0/0"}
        need([entry["path"] for entry in files] == sorted(names), "E103", path)
        need(manifest["n_rows"] == body["n_rows"], "E203", path)
        return manifest

    def shard_file(self, manifest: dict, path: str) -> bytes:
        entry = next(entry for entry in manifest["files"] if entry["path"] == path)
        return self.read(f"shards/{manifest['shard']}/{path}", entry)

    def table(self, data: bytes, n_rows: int, place: str) -> pa.Table:  # 6.2
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            need(b"ARROW:schema" not in (file.metadata.metadata or {}), "E206", place)
            need(file.metadata.num_rows == n_rows, "E203", place)
            return file.read()

    def tokens(self, manifest: dict) -> pa.Table:
        data = self.shard_file(manifest, "tokens.parquet")
        table = self.table(data, manifest["n_rows"], manifest["shard"])
        keys = np.array(sorted(r << 32 | p for r, p in positions(table)), "<u8")
        need(sha256(keys.tobytes()) == manifest["row_set_sha256"], "E406", "row set")
        return table

    def run_table(self, run: str, name: str) -> list[dict]:
        rows = []
        for part in sorted(self.parts.get((run, name), []), key=lambda part: part["file"]["path"]):
            path = part["file"]["path"]
            rows += self.table(self.read(path, part["file"]), part["n_rows"], path).to_pylist()
        return rows

    def array(self, manifest: dict, hook: str) -> np.ndarray:  # 4.1, 4.2: bits, (n_rows, d_model)
        metadata = json.loads(self.shard_file(manifest, f"acts.zarr/{hook}/zarr.json"))
        shard = self.shard_file(manifest, f"acts.zarr/{hook}/c/0/0")
        (n, d), item = metadata["shape"], np.dtype(ITEMS[metadata["data_type"]])
        per_chunk = metadata["codecs"][0]["configuration"]["chunk_shape"][0]
        need(n == manifest["n_rows"], "E203", hook)
        n_chunks = -(-n // per_chunk)
        index, (checksum,) = shard[-16 * n_chunks - 4 : -4], struct.unpack("<I", shard[-4:])
        need(crc32c(index) == checksum, "E204", "index")
        chunks, end = [], 0
        for offset, length in struct.iter_unpack("<2Q", index):
            need(offset == end and 20 < length <= per_chunk * d * item.itemsize + 20, "E204", hook)
            end = offset + length
            frame, (checksum,) = shard[offset : end - 4], struct.unpack("<I", shard[end - 4 : end])
            need(crc32c(frame) == checksum, "E204", hook)
            out = np.empty((per_chunk, d), item)
            version, _, flags, size, nbytes, _, cbytes = struct.unpack_from("<BBBBiii", frame)
            need((version, flags & 0xED, size) == (2, 0x81, item.itemsize), "E204", "frame")
            need((nbytes, cbytes) == (out.nbytes, len(frame)), "E204", "frame")
            numcodecs.blosc.decompress(frame, out)
            chunks.append(out)
        need(end + len(index) + 4 == len(shard), "E204", "shard file")
        return np.concatenate(chunks)[:n]

    def account(self) -> dict[str, int]:  # 7
        totals: Counter[str] = Counter(dict.fromkeys(self.seal["totals"], 0))
        served: Counter[tuple[str, int, int]] = Counter()
        for run in sorted({run for run, _ in self.parts}):
            self.account_run(run, totals, served)
        entry, listed = self.seal["multiplicity"], {}
        for line in pq.read_table(pa.BufferReader(self.read(entry["path"], entry))).to_pylist():
            for p in range(line["start"], line["stop"]):
                listed[line["run"], line["request"], p] = line["count"] - 1
        need(listed == served, "E413", entry["path"])  # 7.5
        need(totals == self.seal["totals"], "E415", dict(totals))  # 7.6
        return dict(totals)

    def account_run(self, run: str, totals: Counter[str], served: Counter) -> None:
        need(run in self.runs, "E401", run)
        shards = [shard for shard in self.shards if shard["run"] == run]
        rows = Counter(key for shard in shards for key in positions(self.tokens(shard)))
        need(len(rows) == rows.total(), "E407", run)
        requests, steps = self.run_table(run, "requests"), self.run_table(run, "steps")
        spans, drops = self.run_table(run, "spans"), self.run_table(run, "drops")
        owned: dict[int, list[int]] = {r["request"]: [] for r in requests}
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in totals}
        computed = dict.fromkeys(owned, 0)
        for s in spans:
            mine = where(s)
            owned[s["request"]] += [p for _, p in mine]
            found[s["disposition"]] += mine
            totals[s["disposition"]] += len(mine)
            if s["step"] is not None:
                computed[s["request"]] = max(computed[s["request"]], s["stop"])
            if s["disposition"] == "cache_ref":
                hit = {(run, s["ref_request"], p) for _, p in mine if (s["ref_request"], p) in rows}
                served.update(hit)
                totals["unresolved"] += len(mine) - len(hit)
        for r in requests:  # 7.1, 7.2
            p, g = r["prompt_len"], r["generated_len"]
            n = max(p + g - 1 if g else p, computed[r["request"]])
            n = 0 if r["finish_reason"] == "skipped" else n
            need(sorted(owned[r["request"]]) == list(range(n)), "E404", (run, r["request"]))
        lost = [key for d in drops for key in where(d)]
        need(sorted(rows) == sorted(found["captured"]), "E406", run)  # 7.3
        need(sorted(lost) == sorted(found["dropped"]), "E408", run)
        for s in steps:
            kinds = ("captured", "recomputed", "dropped", "aborted", "filtered")
            need(s["batch_tokens"] == sum(s[f"{kind}_tokens"] for kind in kinds), "E409", s)
            totals["scheduled"] += s["batch_tokens"]
            totals["recomputed"] += s["recomputed_tokens"]
        totals.update(rows=len(rows), requests=len(requests))
        if self.runs[run]["fields"]["capture.readouts"].get("value") not in (None, "none"):
            wanted = [(*key, d["step"]) for d in drops for key in where(d)]
            self.account_readouts(run, shards, wanted, computed, {s["step"] for s in steps})

    def account_readouts(
        self, run: str, shards: list[dict], wanted: list[tuple], computed: dict, steps: set[int]
    ) -> None:  # 7.8
        lines, ids = Counter(), {}
        for row in (row for shard in shards for row in self.tokens(shard).to_pylist()):
            wanted.append((row["request"], row["position"], row["step"]))
            ids[wanted[-1][:2]] = row["token_id"]
        for line in self.run_table(run, "readouts"):
            request, position, step = (line[name] for name in ("request", "position", "step"))
            lines[request, position, step, line["hook"]] += 1
            need(position < computed.get(request, 0) and step in steps, "E416", line)
            token = ids.setdefault((request, position), line["token_id"])
            need(line["token_id"] == token, "E417", line)
        need(len(lines) == lines.total(), "E416", run)
        for hook in self.genesis["hooks"]:
            need(all((*key, hook["name"]) in lines for key in wanted), "E416", run)


def where(span: dict) -> list[tuple[int, int]]:
    return [(span["request"], p) for p in range(span["start"], span["stop"])]


def positions(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["request"].to_pylist(), table["position"].to_pylist(), strict=True))
