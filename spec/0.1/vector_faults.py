"""The faults of the invalid vectors: one for every code that a validator can find."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from vector_tools import (
    ARRAY,
    DECODE,
    FAULTS,
    HOOK,
    MULTIPLICITY,
    PREFILL,
    RECORD,
    RUN,
    SEAL,
    Json,
    Vector,
    fault,
    part,
)

from actds.format import arrays, encoding
from actds.store.local import LocalFile

__all__ = ["FAULTS"]

TOKENS = f"{PREFILL}/tokens.parquet"
SPANS = f"census/{RUN}/spans"
METADATA = f"{PREFILL}/acts.zarr/{HOOK}/zarr.json"


# ---- structure


@fault("E101", "no-genesis", "actds.json", "The folder holds no actds.json.")
def _(v: Vector) -> None:
    shutil.rmtree(v.path)
    v.path.mkdir()
    (v.path / "README.md").write_text("No dataset.\n", encoding="utf-8")


@fault("E103", "external-of-a-request", SPANS, "KV came from outside, and a request computed it.",
       base="external")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["reason"] == "external")["ref_request"] = 0

    v.edit_table("spans", edit)
    v.relink()


@fault("E102", "key-twice", RECORD, "A key of the run record stands twice.")
def _(v: Vector) -> None:
    data = (v.path / RECORD).read_bytes()
    (v.path / RECORD).write_bytes(data.replace(b'{"dataset"', b'{"run":"r-other","dataset"', 1))
    v.relink(totals=False)


@fault("E102", "not-canonical", "actds.json", "actds.json is JSON with spaces, not canonical.")
def _(v: Vector) -> None:
    (v.path / "actds.json").write_text(json.dumps(v.json("actds.json")) + "\n", encoding="utf-8")


@fault("E102", "commas-in-strings", RECORD,
       "Reasons of the run record hold more than 131,072 commas, brackets and braces.")  # fmt: skip
def _(v: Vector) -> None:
    reason = {"origin": "unknown", "reason": "," * 4096, "value": None}
    fields = v.json(RECORD)["fields"]
    v.edit_json(RECORD, fields=fields | {f"other.n{n}": reason for n in range(32)})
    v.relink(totals=False)


@fault("E103", "no-hooks", "actds.json", "The genesis has no hook.")
def _(v: Vector) -> None:
    v.edit_json("actds.json", hooks=[])
    v.relink(totals=False)


@fault("E102", "labels-not-canonical", f"census/{RUN}/requests",
       "The labels of a request are JSON with a space.", base="unserved")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("requests", lambda rows: rows[1].update(labels='{"domain": "code"}'))
    v.relink()


@fault("E103", "label-of-a-list", f"census/{RUN}/requests", "The value of a label is a list.",
       base="unserved")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("requests", lambda rows: rows[1].update(labels='{"domain":["code"]}'))
    v.relink()


@fault("E103", "unknown-field", f"{PREFILL}/shard.json", "The manifest has an unknown field.")
def _(v: Vector) -> None:
    v.edit_json(f"{PREFILL}/shard.json", note="x")
    v.keep.add(f"{PREFILL}/shard.json")
    v.relink(totals=False)


@fault("E103", "path-leaves-dataset", f"{PREFILL}/shard.json",
       "A path in the manifest leaves the shard folder.")  # fmt: skip
def _(v: Vector) -> None:
    manifest = v.json(f"{PREFILL}/shard.json")
    manifest["files"][0]["path"] = "../../actds.json"
    v.write_json(f"{PREFILL}/shard.json", manifest)
    v.keep.add(f"{PREFILL}/shard.json")
    v.relink(totals=False)


@fault("E103", "hook-not-counted", f"{PREFILL}/shard.json", "The manifest counts no row of a hook.")
def _(v: Vector) -> None:
    v.edit_json(f"{PREFILL}/shard.json", values={})
    v.relink(totals=False)


@fault("E103", "more-counted-than-rows", f"{PREFILL}/shard.json",
       "The manifest counts more rows than the shard has.")  # fmt: skip
def _(v: Vector) -> None:
    n_rows = v.json(f"{PREFILL}/shard.json")["n_rows"]
    v.edit_json(f"{PREFILL}/shard.json", values={HOOK: {"not_finite": n_rows, "zero": 1}})
    v.relink(totals=False)


@fault("E104", "part-missing", part("spans"), "A committed table part is gone.")
def _(v: Vector) -> None:
    (v.path / part("spans")).unlink()


@fault("E105", "extra-chunk", f"{PREFILL}/acts.zarr/{HOOK}/c/1/0",
       "A chunk file stands in a committed array that its manifest does not list.")  # fmt: skip
def _(v: Vector) -> None:
    extra = v.path / PREFILL / "acts.zarr" / HOOK / "c" / "1"
    extra.mkdir()
    shutil.copy(v.path / ARRAY, extra / "0")


@fault("E105", "stray-file", "notes.txt", "A file that nothing names; no data is touched.",
       severity="warning")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "notes.txt").write_text("left here\n", encoding="utf-8")


@fault("E106", "version-9.9", "actds.json", "The format version is not known.")
def _(v: Vector) -> None:
    v.edit_json("actds.json", version="9.9")


@fault("E107", "chain-name", "ledger/W-Upper", "A chain's folder breaks the naming rule.")
def _(v: Vector) -> None:
    folder = v.path / v.record("open").rpartition("/")[0]
    shutil.copytree(folder, v.path / "ledger" / "W-Upper")


@fault("E108", "foreign-codec", METADATA, "The array names a codec outside the allow-list.")
def _(v: Vector) -> None:
    document = v.json(METADATA)
    document["codecs"][0]["configuration"]["codecs"][1] = {"name": "gzip"}
    v.write_json(METADATA, document)
    v.relink()


@fault("E109", "column-missing", part("steps"), "The steps table lacks the column batch_tokens.")
def _(v: Vector) -> None:
    table = pq.read_table(v.path / part("steps")).drop_columns(["batch_tokens"])
    _write_plain(v, part("steps"), table)
    v.relink(totals=False)


@fault("E110", "card-edited", "README.md", "The card says that no position was dropped.",
       severity="warning")  # fmt: skip
def _(v: Vector) -> None:
    text = (v.path / "README.md").read_text("utf-8")
    edited = re.sub(r"(?m)^[|] dropped [|] 1 [|]", "| dropped | 0 |", text)
    assert edited != text
    (v.path / "README.md").write_text(edited, encoding="utf-8")


# ---- integrity


@fault("E201", "array-cut", ARRAY, "The array file is one byte short.")
def _(v: Vector) -> None:
    (v.path / ARRAY).write_bytes((v.path / ARRAY).read_bytes()[:-1])


@fault("E202", "bit-flipped", ARRAY, "One bit of the array file is flipped.")
def _(v: Vector) -> None:
    v.flip(ARRAY, 30)


@fault("E203", "token-row-missing", TOKENS, "The token table has one row less than the array.")
def _(v: Vector) -> None:
    v.edit_table(TOKENS, lambda rows: rows.pop())
    v.relink(totals=False)


@fault("E204", "chunk-damaged", ARRAY,
       "A bit of a chunk is flipped and every digest made right; only the chunk's CRC-32C differs.",
       level="deep")  # fmt: skip
def _(v: Vector) -> None:
    v.flip(ARRAY, 30)
    v.relink()


@fault("E204", "index-damaged", ARRAY, "A bit of the chunk index is flipped, every digest right.")
def _(v: Vector) -> None:
    v.flip(ARRAY, (v.path / ARRAY).stat().st_size - 10)
    v.relink()


@fault("E205", "manifest-root", f"{PREFILL}/shard.json", "The Merkle root is not of its entries.")
def _(v: Vector) -> None:
    v.edit_json(f"{PREFILL}/shard.json", root="0" * 64)
    v.keep.add(f"{PREFILL}/shard.json")
    v.relink()


@fault("E206", "arrow-schema", part("steps"), "The Parquet footer carries an Arrow schema.")
def _(v: Vector) -> None:
    table = pq.read_table(v.path / part("steps"))
    _write_plain(v, part("steps"), table, store_schema=True)
    v.relink(totals=False)


def _write_plain(v: Vector, path: str, table: Any, *, store_schema: bool = False) -> None:
    sink = io.BytesIO()
    pq.write_table(
        table, sink, compression="zstd", store_schema=store_schema, write_page_checksum=True
    )
    (v.path / path).write_bytes(sink.getvalue())


# ---- ledger


@fault("E301", "record-missing", "ledger/", "A record in the middle of the writer's chain is gone.",
       also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    (v.path / v.chain("w")[3]).unlink()


@fault("E302", "prev-differs", "ledger/", "A record's prev is not the digest of the one before.")
def _(v: Vector) -> None:
    v.edit_json(v.chain("w")[-1], prev="f" * 64)


@fault("E303", "foreign-dataset", "ledger/", "A record names another dataset; the links are right.",
       also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(v.chain("c")[2], dataset="f" * 32)
    v.relink(totals=False)


@fault("E304", "record-after-close", "ledger/", "The writer's chain goes on after its close.")
def _(v: Vector) -> None:
    last = v.chain("w")[-1]
    record = v.json(last)
    seq = record["seq"] + 1
    v.write_json(f"{last.rpartition('/')[0]}/{seq:08d}.json", record | {"seq": seq})
    v.relink(totals=False)


@fault("E305", "no-close", "ledger/", "The writer's chain is neither closed nor fenced.",
       also=("E306",))  # fmt: skip
def _(v: Vector) -> None:
    (v.path / v.chain("w")[-1]).unlink()
    shutil.rmtree(v.path / "seal")


@fault("E306", "no-seal", "seal", "Every chain is closed, and there is no seal.")
def _(v: Vector) -> None:
    shutil.rmtree(v.path / "seal")


@fault("E307", "chain-cut", "seal/0001.json",
       "The seal says that a chain had one record more.")  # fmt: skip
def _(v: Vector) -> None:
    seal = v.json(SEAL)
    chain = sorted(seal["heads"])[0]
    seal["heads"][chain]["n_records"] += 1
    seal["root"] = v.root_of(seal["heads"])
    v.write_json(SEAL, seal)


@fault("E310", "shard-twice", "ledger/", "Two records commit one shard.")
def _(v: Vector) -> None:
    first = v.record("shard")
    last = v.chain("w")[-1]
    again, close = v.json(first), v.json(last)
    seq = close["seq"]
    v.write_json(last, again | {"seq": seq})
    v.write_json(f"{last.rpartition('/')[0]}/{seq + 1:08d}.json", close | {"seq": seq + 1})
    v.relink(totals=False)


# ---- replacement


def _replace_record(v: Vector) -> Json:
    """Return the replace record of the tool's chain."""
    return next(r for r in map(v.json, v.chain("t")) if r["type"] == "replace")


def _copy_of(v: Vector, shard: str, name: str) -> str:
    """Write a copy of a shard under another id, and return that."""
    shutil.copytree(v.path / "shards" / shard, v.path / "shards" / name)
    v.edit_json(f"shards/{name}/shard.json", shard=name)
    return name


def _append(v: Vector, kind: str, record: Json) -> None:
    """Put a record before the last one of a chain."""
    last = v.chain(kind)[-1]
    close = v.json(last)
    seq, chain = close["seq"], close["chain"]
    v.write_json(last, record | {"seq": seq, "chain": chain})
    v.write_json(f"{last.rpartition('/')[0]}/{seq + 1:08d}.json", close | {"seq": seq + 1})


@fault("E104", "replaced-manifest-gone", f"{PREFILL}/shard.json",
       "The data of a replaced shard may go; its manifest went, too.", base="replaced")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / PREFILL / "shard.json").unlink()


@fault("E303", "replace-by-a-writer", "ledger/w-", "A replace record stands in a writer chain.",
       base="replaced")  # fmt: skip
def _(v: Vector) -> None:
    record = _replace_record(v)
    copy = _copy_of(v, record["body"]["shard"], "w-copy")
    chain = v.json(v.chain("w")[-1])["chain"]
    v.edit_json(f"shards/{copy}/shard.json", chain=chain)
    record["body"] |= {"shard": copy, "replaced": DECODE.rpartition("/")[2]}
    _append(v, "w", record)
    v.relink(totals=False)


@fault("E310", "replacement-twice", "ledger/t-", "Two records commit one new shard.",
       base="replaced")  # fmt: skip
def _(v: Vector) -> None:
    _append(v, "t", _replace_record(v))
    v.relink(totals=False)


@fault("E311", "replaced-twice", "ledger/t-", "Two shards replace one.", base="replaced")
def _(v: Vector) -> None:
    record = _replace_record(v)
    record["body"] |= {"shard": _copy_of(v, record["body"]["shard"], "t-copy")}
    _append(v, "t", record)
    v.relink(totals=False)


@fault("E311", "replaces-nothing", "ledger/t-", "A shard that nobody committed is replaced.",
       base="replaced")  # fmt: skip
def _(v: Vector) -> None:
    record = _replace_record(v)
    copy = _copy_of(v, record["body"]["shard"], "t-copy")
    record["body"] |= {"shard": copy, "replaced": "no-such-shard"}
    _append(v, "t", record)
    v.relink(totals=False)


@fault("E311", "order-differs", "ledger/t-",
       "The new shard has the same rows in another order.", base="replaced",
       also=("E104",))  # fmt: skip
def _(v: Vector) -> None:
    path = f"shards/{_replace_record(v)['body']['shard']}/tokens.parquet"
    v.edit_table(path, lambda rows: rows.reverse())
    v.relink(totals=False)


@fault("E311", "seed-differs", "ledger/t-",
       "The manifest of the new shard names another seed of the order.", base="replaced",
       also=("E104",))  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(f"shards/{_replace_record(v)['body']['shard']}/shard.json", permutation_seed=7)
    v.relink(totals=False)


# ---- redaction


def _redact_record(v: Vector, name: str) -> tuple[str, Json]:
    """Return path and content of the record that redacts a part whose path has a name."""
    records = [(path, v.json(path)) for path in v.chain("t")]
    return next((p, r) for p, r in records if name in r["body"].get("replaced", ""))


@fault("E103", "redacted-numbers-descend", "ledger/t-", "The requests do not ascend.",
       base="redacted", also=("E104", "E105"))  # fmt: skip
def _(v: Vector) -> None:
    path, record = _redact_record(v, "/requests-")
    record["body"]["requests"].reverse()
    v.write_json(path, record)
    v.relink(totals=False)


@fault("E311", "redacts-nothing", "ledger/t-", "What is redacted is no part that is committed.",
       base="redacted", also=("E104",))  # fmt: skip
def _(v: Vector) -> None:
    path, record = _redact_record(v, "/requests-")
    record["body"]["replaced"] = f"census/{RUN}/requests-000007.parquet"
    v.write_json(path, record)
    v.relink(totals=False)


@fault("E311", "redacted-part-of-another-table", "ledger/t-",
       "A part stands in the place of one of another table.", base="redacted",
       also=("E104",))  # fmt: skip
def _(v: Vector) -> None:
    path, record = _redact_record(v, "/requests-")
    _, other = _redact_record(v, "/spans-")
    record["body"]["replaced"], other = other["body"]["replaced"], record["body"]["replaced"]
    v.write_json(path, record)
    v.relink(totals=False)


@fault("E427", "redacted-id-left", f"census/{RUN}/requests",
       "A redacted request has its id still.", base="redacted")  # fmt: skip
def _(v: Vector) -> None:
    _, record = _redact_record(v, "/requests-")

    def edit(rows: list[Json]) -> None:
        rows[1]["external_id"] = "prompt-1"

    v.edit_table(record["body"]["file"]["path"], edit)
    v.relink(totals=False)


@fault("E427", "redacted-conversation-left", f"census/{RUN}/requests",
       "A redacted request says still which conversation it is of.", base="redacted")  # fmt: skip
def _(v: Vector) -> None:
    _, record = _redact_record(v, "/requests-")

    def edit(rows: list[Json]) -> None:
        rows[1]["conversation"] = "0" * 32

    v.edit_table(record["body"]["file"]["path"], edit)
    v.relink(totals=False)


@fault("E427", "redacted-readout-left", f"readouts/{RUN}/readouts",
       "A line of a redacted request is left.", base="redacted")  # fmt: skip
def _(v: Vector) -> None:
    _, record = _redact_record(v, "/readouts-")

    def edit(rows: list[Json]) -> None:
        rows.append(dict(rows[0]) | {"request": 2, "position": 0})

    v.edit_table(record["body"]["file"]["path"], edit)
    v.relink(totals=False)


@fault("E427", "redacted-file-left", f"census/{RUN}/requests",
       "A part that a redaction replaced is there again.", base="redacted")  # fmt: skip
def _(v: Vector) -> None:
    _, record = _redact_record(v, "/requests-")
    new, old = record["body"]["file"]["path"], record["body"]["replaced"]
    shutil.copyfile(v.path / new, v.path / old)


# ---- provenance


@fault("E401", "no-run-record", RECORD, "The run has rows and no run record.")
def _(v: Vector) -> None:
    (v.path / RECORD).unlink()


@fault("E402", "null-without-reason", RECORD, "A field is null, and nothing says why.")
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"]["model.weights_sha256"] = {"value": None, "origin": "unknown", "reason": None}
    v.write_json(RECORD, record)
    v.relink(totals=False)


@fault("E402", "loss-without-reason", SPANS, "Positions are lost, and nothing says why.")
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["disposition"] == "aborted")["reason"] = None

    v.edit_table("spans", edit)
    v.relink()


@fault("E402", "reference-with-a-reason", SPANS, "A reference has a reason that is not external.")
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["disposition"] == "cache_ref")["reason"] = "elsewhere"

    v.edit_table("spans", edit)
    v.relink()


@fault("E402", "skip-without-reason", f"census/{RUN}/requests",
       "Nothing says why a prompt was skipped.", base="unserved")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("requests", lambda rows: rows[-2].update(reason=None))
    v.relink()


@fault("E402", "unbegun-without-reason", f"census/{RUN}/requests",
       "A prompt was not begun, and nothing says why.", base="unserved")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("requests", lambda rows: rows[-1].update(reason=None))
    v.relink()


@fault("E403", "no-spans", f"census/{RUN}", "The run has rows; its census has no spans.")
def _(v: Vector) -> None:
    records = v.chain("c")
    gone = v.record("part", "spans")
    (v.path / part("spans")).unlink()
    (v.path / gone).unlink()
    for path in records[records.index(gone) + 1 :]:
        record = v.json(path)
        (v.path / path).unlink()
        seq = record["seq"] - 1
        v.write_json(f"{path.rpartition('/')[0]}/{seq:08d}.json", record | {"seq": seq})
    v.relink(totals=False)


# ---- accounting: every digest, total and seal is right


def _never_computed(rows: list[Json]) -> Json:
    return next(r for r in rows if r["disposition"] == "aborted" and r["step"] is None)


@fault("E404", "position-missing", SPANS, "The last position of a request has no span.")
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        _never_computed(rows)["stop"] -= 1

    v.edit_table("spans", edit)
    v.relink()


@fault("E405", "two-dispositions", SPANS, "A position has two spans.")
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        _never_computed(rows)["start"] -= 1

    v.edit_table("spans", edit)
    v.relink()


@fault("E405", "span-of-an-unbegun-request", SPANS, "A request that was not begun has positions.",
       base="unserved")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        number = max(row["request"] for row in v.table(part("requests")))
        owed = {"request": number, "start": 0, "stop": 3, "step": None, "ref_request": None}
        rows.append({**owed, "disposition": "aborted", "reason": "engine_ended"})

    v.edit_table("spans", edit)
    v.relink()


@fault("E406", "another-position", "shards",
       "A row names a position that nobody computed, and its own has no row.")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        max(rows, key=lambda r: (r["request"], r["position"]))["position"] += 1000

    v.edit_table(f"{DECODE}/tokens.parquet", edit)
    v.relink()


@fault("E406", "hooks-of-another-request", "shards",
       "A shard has rows of one hook, and their request has chosen none.",
       base="chosen-hooks")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(part("requests"), lambda rows: rows[1].update(hooks=None))
    v.relink()


@fault("E103", "hooks-chosen-in-a-run-without-choices", f"census/{RUN}/requests",
       "A request has chosen hooks, and the run record names no choice.")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(part("requests"), lambda rows: rows[1].update(hooks=HOOK))
    v.relink()


@fault("E407", "row-twice", "shards",
       "Two rows name one position, and another position has no row: the count is right.",
       also=("E406", "E410"))  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        in_order = sorted(rows, key=lambda r: (r["request"], r["position"]))
        one, other = next(
            (a, b)
            for a, b in pairwise(in_order)
            if (a["request"], a["step"]) == (b["request"], b["step"])
        )
        other.update({name: one[name] for name in ("position", "token_id", "flags")})

    v.edit_table(TOKENS, edit)
    v.relink()


@fault("E408", "drop-moved", "losses", "A drop names the position beside the lost one.")
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        rows[0].update(start=rows[0]["start"] + 1, stop=rows[0]["stop"] + 1)

    v.edit_table("drops", edit)
    v.relink()


@fault("E409", "token-unaccounted", f"census/{RUN}/steps",
       "A step scheduled one token more than became anything.")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        rows[0]["batch_tokens"] += 1
        rows[0]["prefill_tokens"] += 1

    v.edit_table("steps", edit)
    v.relink()


@fault("E410", "reference-to-nothing", SPANS,
       "A cache reference names a request that has no row there.", severity="warning",
       also=("E110",))  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["disposition"] == "cache_ref")["ref_request"] = 4_000_000

    v.edit_table("spans", edit)
    v.relink()


@fault("E411", "hits-forged", f"census/{RUN}/requests",
       "The census says no hit; its own spans and the engine say one.")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["cached_tokens"])["cached_tokens"] = 0

    v.edit_table("requests", edit)
    v.relink()


@fault("E412", "row-in-another-step", "shards", "A row says that another step computed it.",
       also=("E414",))  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        row = max(rows, key=lambda r: (r["request"], r["position"]))
        row["step"] = max(r["step"] for r in rows) + 1000

    v.edit_table(f"{DECODE}/tokens.parquet", edit)
    v.relink()


@fault("E413", "count-forged", MULTIPLICITY, "A count is one more than the references to the row.")
def _(v: Vector) -> None:
    rows = v.table(MULTIPLICITY)
    rows[0]["count"] += 1
    v.write_table("multiplicity", MULTIPLICITY, rows)
    v.keep.add(MULTIPLICITY)
    v.relink()


@fault("E414", "foreign-token", "shards", "A row has the token id of no token of its request.")
def _(v: Vector) -> None:
    lossy = {r["request"] for r in v.table(part("spans"))
             if r["disposition"] not in ("captured", "cache_ref")}  # fmt: skip

    def edit(rows: list[Json]) -> None:
        next(r for r in rows if r["request"] not in lossy)["token_id"] += 1

    v.edit_table(TOKENS, edit)
    v.relink()


@fault("E414", "rows-swapped", "shards",
       "Two rows of a request and step exchanged positions: all sets and sums right.")  # fmt: skip
def _(v: Vector) -> None:
    lossy = {r["request"] for r in v.table(part("spans"))
             if r["disposition"] not in ("captured", "cache_ref")}  # fmt: skip

    def edit(rows: list[Json]) -> None:
        one, other = next(
            (a, b)
            for a in rows
            for b in rows
            if a is not b
            and (a["request"], a["step"]) == (b["request"], b["step"])
            and a["token_id"] != b["token_id"]
            and a["request"] not in lossy
        )
        one["position"], other["position"] = other["position"], one["position"]

    v.edit_table(TOKENS, edit)
    v.relink()


@fault("E415", "seal-totals", SEAL, "The seal says one row more than there is.")
def _(v: Vector) -> None:
    totals = v.json(SEAL)["totals"]
    v.edit_json(SEAL, totals=totals | {"rows": totals["rows"] + 1})


@fault("E415", "close-totals", "ledger/", "The census' close says one request more than it lists.")
def _(v: Vector) -> None:
    last = v.chain("c")[-1]
    record = v.json(last)
    record["body"]["totals"]["requests"] += 1
    v.write_json(last, record)
    v.relink(totals=False)


@fault("E419", "end-mislabelled", SPANS,
       "A position past the end of a request is called a loss.")  # fmt: skip
def _(v: Vector) -> None:
    late = next(r for r in v.table(part("spans")) if r["disposition"] == "undelivered")
    n = late["stop"] - late["start"]

    def rename(rows: list[Json]) -> None:
        rows[rows.index(late)] |= {"disposition": "aborted", "reason": "writer_ended"}

    def recount(rows: list[Json]) -> None:
        step = next(r for r in rows if r["step"] == late["step"])
        step["undelivered_tokens"] -= n
        step["aborted_tokens"] += n

    v.edit_table("spans", rename)
    v.edit_table("steps", recount)
    v.relink()


@fault("E418", "foreign-row", f"canary/{RUN}",
       "A replay of a request alone is far from a row that is stored under it.")  # fmt: skip
def _(v: Vector) -> None:
    row = v.table(TOKENS)[0]
    line = {name: row[name] for name in ("request", "position", "step", "token_id")}
    line |= {"hook": HOOK, "replayed_token_id": row["token_id"], "relative_l2": 1.25}
    v.add_canary([line | {"cosine": 0.25, "verdict": "foreign"}])
    v.relink()


@fault("E421", "log-not-closed", "ledger/w-", "The writer is gone, and somebody else ended its "
       "chain: what it lost and had not logged is not known.", severity="warning",
       also=("E110",))  # fmt: skip
def _(v: Vector) -> None:
    last = v.chain("w")[-1]
    v.edit_json(last, type="fence", body={"reason": "its process is gone"})
    v.relink(totals=False)


# ---- readouts


@fault("E416", "readout-missing", f"readouts/{RUN}", "A stored row has no readout.",
       base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        stored = v.table(TOKENS)[0]
        rows[:] = [
            row
            for row in rows
            if (row["request"], row["position"]) != (stored["request"], stored["position"])
        ]

    v.edit_table("readouts", edit)
    v.relink()


@fault("E416", "readout-of-a-loss-missing", f"readouts/{RUN}", "A dropped row left no readout.",
       base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    lost = v.table(part("drops"))[0]

    def edit(rows: list[Json]) -> None:
        rows[:] = [
            row
            for row in rows
            if (row["request"], row["position"]) != (lost["request"], lost["start"])
        ]

    v.edit_table("readouts", edit)
    v.relink()


@fault("E416", "readout-of-a-loss-without-room", f"readouts/{RUN}", "A dropped row has a readout, "
       "and its drop says that there was no room for one.", base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    def edit(column: str) -> Callable[[list[Json]], None]:
        def change(rows: list[Json]) -> None:
            rows[:] = [
                row | {column: "readouts_full"} if row[column] == "queue_full" else row
                for row in rows
            ]

        return change

    v.edit_table("drops", edit("drop_reason"))
    v.edit_table("spans", edit("reason"))
    v.relink()


@fault("E416", "readout-of-nobody", f"readouts/{RUN}", "A readout names a position that no step "
       "computed.", base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("readouts", lambda rows: rows.append(rows[0] | {"position": 4000}))
    v.relink()


@fault("E417", "readout-of-another-token", f"readouts/{RUN} {HOOK} request", "The readout of a "
       "stored row names another token.", base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    stored = v.table(TOKENS)[0]

    def edit(rows: list[Json]) -> None:
        key = (stored["request"], stored["position"])
        mine = next(row for row in rows if (row["request"], row["position"]) == key)
        mine["token_id"] += 1

    v.edit_table("readouts", edit)
    v.relink()


@fault("E417", "token-of-a-loss", f"readouts/{RUN} request", "The readout of a dropped row names "
       "a token that its request did not have.", base="readouts")  # fmt: skip
def _(v: Vector) -> None:
    lost = v.table(part("drops"))[0]

    def edit(rows: list[Json]) -> None:
        for row in rows:
            if (row["request"], row["position"]) == (lost["request"], lost["start"]):
                row["token_id"] += 1

    v.edit_table("readouts", edit)
    v.relink()


@fault("E417", "readout-of-another-row", PREFILL, "Two rows have each other's readouts.",
       base="readouts", level="deep")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        one, other = rows[0], rows[1]
        for name in ("norm", "projections"):
            one[name], other[name] = other[name], one[name]

    v.edit_table("readouts", edit)
    v.relink()


ROLES = f"census/{RUN}/roles"


@fault("E103", "unknown-role", ROLES, "A line of the roles has a word that is no role.",
       base="roles")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("roles", lambda rows: rows[0].update(role="narrator"))
    v.relink()


@fault("E420", "two-roles", ROLES, "A position is the user's and the template's.", base="roles")
def _(v: Vector) -> None:
    v.edit_table("roles", lambda rows: rows[0].update(stop=rows[0]["stop"] + 1))
    v.relink()


@fault("E420", "role-beyond-request", ROLES, "A role is of positions that its request does not "
       "have.", base="roles")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("roles", lambda rows: rows[-1].update(stop=rows[-1]["stop"] + 5))
    v.relink()


ORIGINS = f"census/{RUN}/origins"


@fault("E103", "no-source-seal", ORIGINS, "The digest of the source is none.", base="origins")
def _(v: Vector) -> None:
    v.edit_table("origins", lambda rows: rows[0].update(source_seal="CD" * 32))
    v.relink()


@fault("E422", "two-origins", ORIGINS, "A request has two origins.", base="origins")
def _(v: Vector) -> None:
    v.edit_table("origins", lambda rows: rows[1].update(request=rows[0]["request"]))
    v.relink()


@fault("E422", "origin-of-no-request", ORIGINS, "A request that the run does not have has an "
       "origin.", base="origins")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("origins", lambda rows: rows[-1].update(request=99))
    v.relink()


@fault("E422", "given-beyond-prompt", ORIGINS, "More positions were given than the request has "
       "prompt tokens.", base="origins")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("origins", lambda rows: rows[0].update(n_given=10_000))
    v.relink()


SAMPLED = f"census/{RUN}/sampled"


@fault("E423", "token-without-a-line", SAMPLED, "A sampled token has no line in a run that records "
       "entropies.", base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows.pop())
    v.relink()


@fault("E423", "two-lines", SAMPLED, "A sampled token has two lines, another one none.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[1].update(position=rows[0]["position"]))
    v.relink()


@fault("E423", "line-of-a-prompt", SAMPLED, "A line is of a position that was given.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(position=rows[0]["position"] - 1))
    v.relink()


@fault("E423", "line-of-no-request", SAMPLED, "A line is of a request that the run does not have.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[-1].update(request=99))
    v.relink()


@fault("E423", "line-of-no-step", SAMPLED, "The logits are of a step that the run does not have.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(step=9999))
    v.relink()


@fault("E423", "line-of-another-token", SAMPLED, "A line is of another token than the one fed at "
       "its position.", base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(token_id=rows[0]["token_id"] + 1))
    v.relink()


@fault("E423", "negative-entropy", SAMPLED, "An entropy is below 0.", base="sampled")
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(entropy=-0.5))
    v.relink()


@fault("E423", "no-entropy", SAMPLED, "An entropy is no number.", base="sampled")
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(entropy=float("nan")))
    v.relink()


@fault("E423", "probability-above-one", SAMPLED, "A log-probability is above 0.", base="sampled")
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(logprob=0.5))
    v.relink()


@fault("E423", "second-above-first", SAMPLED, "The second largest logit is above the largest.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table("sampled", lambda rows: rows[0].update(margin=-1.0))
    v.relink()


@fault("E423", "lines-not-recorded", SAMPLED, "A run has lines that it did not record, as it says.",
       base="sampled")  # fmt: skip
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"]["capture.entropy"]["value"] = False
    v.write_json(RECORD, record)
    v.relink()


# ---- values


def _edit_bits(v: Vector, edit: Any) -> None:
    metadata, file = (v.path / METADATA).read_bytes(), LocalFile(v.path / ARRAY, ARRAY)
    with arrays.ArrayReader(metadata, file, ARRAY) as reader:
        bits = reader.read_all()
    edit(bits)
    encoded = encoding.encode_array(np.ascontiguousarray(bits), "bfloat16")
    (v.path / ARRAY).write_bytes(b"".join(bytes(p) for p in encoded.parts))
    v.edit_json(f"{PREFILL}/shard.json", values={HOOK: encoded.counts.model_dump()})
    v.relink()


@fault("E601", "nan", PREFILL, "A value is NaN.", level="deep")
def _(v: Vector) -> None:
    def edit(bits: Any) -> None:
        bits[3, 2] = 0x7FC0

    _edit_bits(v, edit)


@fault("E602", "zero-row", PREFILL, "A row is zero, of either sign, in every channel.",
       level="deep")  # fmt: skip
def _(v: Vector) -> None:
    def edit(bits: Any) -> None:
        bits[3], bits[3, 1] = 0, 0x8000

    _edit_bits(v, edit)


# ---- the draw


def _inclusion(v: Vector, step: int, share: float) -> None:
    """Let every table say another probability of a step."""

    def edit(rows: list[Json]) -> None:
        for row in rows:
            if row["step"] == step and row["inclusion"] is not None:
                row["inclusion"] = share

    for table in ("steps", "spans", TOKENS, f"{DECODE}/tokens.parquet"):
        v.edit_table(table, edit)
    v.relink()


def _first(v: Vector, table: str, **wanted: Any) -> Json:
    rows = v.table(table)
    return next(row for row in rows if all(row[name] == wanted[name] for name in wanted))


@fault("E424", "another-salt", "shards", "The run record says another salt than was drawn with.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    record = v.json(RECORD)
    field = record["fields"]["capture.inclusion"]
    field["value"] = field["value"].replace("0123456789abcdef", "fedcba9876543210")
    v.write_json(RECORD, record)
    v.relink()


@fault("E424", "another-probability", "shards", "A step says another probability than its rows.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    step = _first(v, TOKENS, inclusion=0.5)["step"]

    def edit(rows: list[Json]) -> None:
        next(row for row in rows if row["step"] == step)["inclusion"] = 1.0

    v.edit_table("steps", edit)
    v.relink()


@fault("E424", "row-too-many", "shards", "A row is stored that its probability does not draw.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    # Of what was drawn with a half, some is not with an eighth.
    _inclusion(v, _first(v, TOKENS, inclusion=0.5)["step"], 0.125)


@fault("E424", "row-too-few", SPANS, "A position is thinned that its probability draws.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    _inclusion(v, _first(v, part("spans"), disposition="thinned")["step"], 1.0)


@fault("E424", "below-the-minimum", f"census/{RUN}/steps", "A step has less than the minimum.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    with_rows = {row["step"] for row in (*v.table(TOKENS), *v.table(f"{DECODE}/tokens.parquet"))}

    def edit(rows: list[Json]) -> None:
        next(row for row in rows if row["step"] not in with_rows)["inclusion"] = 0.01

    v.edit_table("steps", edit)
    v.relink()


@fault("E424", "thinned-without-a-design", SPANS,
       "The run record does not say how rows are drawn.", base="thinned-requests")  # fmt: skip
def _(v: Vector) -> None:
    record = v.json(RECORD)
    del record["fields"]["capture.inclusion"]
    v.write_json(RECORD, record)
    v.relink()


@fault("E424", "probability-of-a-later-step", "shards",
       "A row has the probability of its step, not of its request's first.",
       base="thinned-requests")  # fmt: skip
def _(v: Vector) -> None:
    share = {row["step"]: row["inclusion"] for row in v.table(part("steps"))}

    def edit(rows: list[Json]) -> None:
        row = next(row for row in rows if row["inclusion"] != share[row["step"]])
        row["inclusion"] = share[row["step"]]

    v.edit_table(f"{DECODE}/tokens.parquet", edit)
    v.relink()


@fault("E103", "design-without-a-unit", RECORD, "What is drawn is neither row nor request.",
       base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    record = v.json(RECORD)
    field = record["fields"]["capture.inclusion"]
    field["value"] = field["value"].replace('"row"', '"step"')
    v.write_json(RECORD, record)
    v.relink(totals=False)


def _rewrite(v: Vector, field: str, before: str, after: str, **relink: Any) -> None:
    """Write another text into a field of the run record."""
    record = v.json(RECORD)
    value = record["fields"][field]
    assert before in value["value"]
    value["value"] = value["value"].replace(before, after)
    v.write_json(RECORD, record)
    v.relink(**relink)


_rewrite_rules = partial(_rewrite, field="capture.inclusion")
_rewrite_changes = partial(_rewrite, field="capture.interventions")


@fault("E103", "rule-without-a-number", RECORD, "The share of a rule is no number.",
       base="thinned-rules")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_rules(v, before='"0.25"', after='"a"', totals=False)


@fault("E103", "rule-for-a-role-that-is-none", RECORD, "A rule is for authors of no such name.",
       base="thinned-rules")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_rules(v, before='"role":"template"', after='"role":"developer"', totals=False)


@fault("E424", "rule-of-another-label", "shards", "A rule is for another label than was drawn by.",
       base="thinned-rules")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_rules(v, before="ma?h*", after="ma?h")


@fault("E424", "rule-of-another-role", "shards", "A position has another role than at the draw.",
       base="thinned-rules")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        for row in rows:
            row["role"] = "system" if row["role"] == "user" else row["role"]

    v.edit_table("roles", edit)
    v.relink()


@fault("E424", "rule-of-another-score", "shards", "A token has another score than at the draw.",
       base="thinned-rules")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        for row in rows:
            row["scores"] = [score + 3 for score in row["scores"]]

    v.edit_table("sampled", edit)
    v.relink()


@fault("E103", "edit-that-is-none", RECORD, "An edit has no op of the list.",
       base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_changes(v, before='"op":"project"', after='"op":"rotate"', totals=False)


@fault("E103", "intervention-of-no-name", RECORD, "Two interventions have one name.",
       base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_changes(v, before='"name":"edge"', after='"name":"steer"', totals=False)


@fault("E425", "mark-missing", "shards", "A changed row says that nothing changed it.",
       base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(TOKENS, lambda rows: _set_mark(rows, 1, 0))
    v.relink()


@fault("E425", "mark-of-another", "shards", "A row names another intervention than changed it.",
       base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(TOKENS, lambda rows: _set_mark(rows, 2, 3))
    v.relink()


@fault("E425", "mark-without-an-intervention", "shards",
       "A row is marked as changed, and its run has no interventions.")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(TOKENS, lambda rows: _set_mark(rows, 0, 1))
    v.relink()


@fault("E425", "change-of-other-requests", "shards",
       "The run record says of other requests that they were changed.",
       base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite_changes(v, before="*-2", after="*-3")


@fault("E425", "change-of-other-given-positions", "shards",
       "More of a request was given than when it was changed.", base="interventions")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        rows[0]["n_given"] += 1

    v.edit_table("origins", edit)
    v.relink()


@fault("E103", "profile-without-a-size", RECORD, "The size of the profile is no number.",
       base="looks", also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, "capture.profile", '"nbytes":3', '"nbytes":"3"', totals=False)


@fault("E202", "profile-changed", "readouts", "The profile is another one than the run's.",
       base="looks")  # fmt: skip
def _(v: Vector) -> None:
    v.flip(f"readouts/{RUN}/profile.json", 0)


@fault("E103", "attention-of-no-share", RECORD, "The share of the requests is 0.",
       base="looks")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, "capture.attention", '"0.875"', '"0.0"', totals=False)


def _look(name: str, table: str, what: str, **changes: Any) -> None:
    """Register a fault: the second line of a table says something else."""

    @fault("E426", name, "readouts", what, base="looks")
    def _(v: Vector) -> None:
        v.edit_table(table, lambda rows: rows[1].update(changes))
        v.relink()


_look("alert-that-fell", "alerts", "A score is lower than at a position before.", score=1.0)
_look("alert-of-no-row", "alerts", "An alert is behind the last row.", position=4000)
_look("alert-of-no-kind", "alerts", "An alert says that something else was rare.", kind="level")
_look("alert-of-no-hook", "alerts", "An alert names a hook that is not there.", hook="z.9")
_look("attention-of-a-layer", "attention", "A layer that nobody looked at.", layer=1)
_look("attention-twice", "attention", "A head has two lines.", head=0)
_look("attention-beyond-one", "attention", "Shares make more than 1.", first=0.75)
_look("attention-of-more-bits", "attention", "More bits than keys can have.", entropy=20.0)
_look(
    "attention-of-roles", "attention", "Roles have more than the prompt.", roles=[0.5] + [0.0] * 5
)
_look("attention-of-top", "attention", "The largest share is not first.", shares=[0.1, 0.2])


@fault("E426", "attention-of-another-draw", "readouts",
       "The run record says that other requests were looked at.", base="looks")  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, "capture.attention", "9f86d081884c7d65", "9f86d081884c7d61")


@fault("E426", "alerts-without-a-profile", "readouts", "A run without a profile has alerts.",
       base="looks")  # fmt: skip
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"].pop("capture.profile")
    v.write_json(RECORD, record)
    (v.path / f"readouts/{RUN}/profile.json").unlink()
    v.relink()


def _set_mark(rows: list[Json], before: int, after: int) -> None:
    next(row for row in rows if row["intervention"] == before)["intervention"] = after


@fault("E416", "thinned-without-readouts", f"readouts/{RUN}",
       "A thinned position left no readouts.", base="thinned")  # fmt: skip
def _(v: Vector) -> None:
    span = _first(v, part("spans"), disposition="thinned")

    def edit(rows: list[Json]) -> None:
        key = (span["request"], span["start"])
        rows.remove(next(row for row in rows if (row["request"], row["position"]) == key))

    v.edit_table("readouts", edit)
    v.relink()


@fault("E603", "row-repeated", PREFILL, "Two tokens have one state: the buffer was reused.",
       level="deep")  # fmt: skip
def _(v: Vector) -> None:
    token = [r["token_id"] for r in v.table(TOKENS)]
    other = next(i for i in range(len(token)) if token[i] != token[0])

    def edit(bits: Any) -> None:
        bits[other] = bits[0]

    _edit_bits(v, edit)


def _claim(v: Vector, **counts: int) -> None:
    """Let the manifest count other rows than the shard has."""
    values = {HOOK: {"not_finite": 0, "zero": 0} | counts}
    v.edit_json(f"{PREFILL}/shard.json", values=values)
    v.relink()


@fault("E604", "nan-not-counted", f"{PREFILL}/shard.json", "The manifest does not count a NaN.",
       level="deep", also=("E601",))  # fmt: skip
def _(v: Vector) -> None:
    def edit(bits: Any) -> None:
        bits[3, 2] = 0x7FC0

    _edit_bits(v, edit)
    _claim(v)


@fault("E604", "zero-row-not-counted", f"{PREFILL}/shard.json",
       "The manifest counts one of two zero rows.", level="deep", also=("E602",))  # fmt: skip
def _(v: Vector) -> None:
    def edit(bits: Any) -> None:
        bits[3:5] = 0

    _edit_bits(v, edit)
    _claim(v, zero=1)


@fault("E604", "finite-row-counted", f"{PREFILL}/shard.json",
       "The manifest counts a row as not finite that is.", level="deep")  # fmt: skip
def _(v: Vector) -> None:
    _claim(v, not_finite=1)


@fault("E604", "infinity-counted-as-nan", f"{PREFILL}/shard.json",
       "The manifest counts a row with an infinity and no NaN as one with a NaN.",
       level="deep", also=("E601",))  # fmt: skip
def _(v: Vector) -> None:
    def edit(bits: Any) -> None:
        bits[3, 2] = 0x7F80

    _edit_bits(v, edit)
    _claim(v, not_finite=1)


@fault("E604", "row-counted-as-zero", f"{PREFILL}/shard.json",
       "The manifest counts a row as zero that is not.", level="deep")  # fmt: skip
def _(v: Vector) -> None:
    _claim(v, zero=1)
