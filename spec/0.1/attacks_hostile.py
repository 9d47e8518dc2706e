"""Attacks on parsers: raw exceptions, giant allocations, input that is slow to read."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attack_tools import attack
from thrift_tools import edit_footer
from vector_tools import ARRAY, PREFILL, RECORD, RUN, Vector, part

from actds.format import canonical, tables
from actds.format.codec import crc32c
from actds_testing.forge import rehash, relink

hostile = partial(attack, "hostile")
TOKENS = f"{PREFILL}/tokens.parquet"
FIRST = "ledger/w-0000000000000002/00000000.json"


def _forge(v: Vector) -> None:
    """Write the digests above what was changed, and look at nothing else."""
    for manifest in v.path.glob("shards/*/shard.json"):
        rehash(manifest)
    relink(v.path)


def _put(v: Vector, path: str, data: bytes) -> None:
    (v.path / path).write_bytes(data)
    _forge(v)


def _parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    options = {"store_schema": False, "write_page_checksum": True, "compression": "zstd", **options}
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _column(v: Vector, path: str, name: str, column: Any, **options: Any) -> None:
    """Give a table another column in the place of one."""
    table = pq.read_table(v.path / path)
    column = column if isinstance(column, pa.Array) else column(table)
    at = table.column_names.index(name)
    _put(v, path, _parquet(table.set_column(at, name, column), **options))


def _rows(v: Vector, table: tables.TableName, n: int, **columns: Any) -> None:
    """Make a table of many rows, of one value where nothing else is said."""
    path = part(table)
    first = pq.read_table(v.path / path).slice(0, 1)
    made = {}
    for field in tables.bare_schema(table):
        value = columns.get(field.name)
        if value is None:
            found = first[field.name].to_pylist() if first.num_rows else []
            empty = "a" if pa.types.is_string(field.type) else 0
            one = found[0] if found else (None if field.nullable else empty)
            value = pa.repeat(pa.scalar(one, field.type), n)
        made[field.name] = value
    (v.path / path).write_bytes(_parquet(pa.table(made), row_group_size=1 << 20))
    for record in v.path.glob("ledger/*/*.json"):
        document = json.loads(record.read_bytes())
        if document["type"] == "part" and document["body"]["file"]["path"] == path:
            document["body"]["n_rows"] = n
            record.write_bytes(canonical.dump(document))
    _forge(v)


# ---- documents


@hostile(
    "documents",
    "record-is-a-list",
    "A ledger record is a list.",
    code="E103",
    place="ledger/",
    also=("E401", "E408"),
)
def _(v: Vector) -> None:
    (v.path / FIRST).write_bytes(b"[1,2,3]\n")


@hostile(
    "documents",
    "body-is-a-number",
    "The body of a record is a number.",
    code="E103",
    place="ledger/",
    also=("E401", "E408"),
)
def _(v: Vector) -> None:
    v.edit_json(FIRST, body=7)


@hostile(
    "documents",
    "lone-surrogate",
    "A name holds half a character, which nothing can print.",
    code="E102",
    place="runs/",
    also=("E202", "E401"),
)
def _(v: Vector) -> None:
    data = (v.path / RECORD).read_bytes()
    record = json.loads(data)
    record["fields"]["model.name"]["value"] = "\ud800"
    text = json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n"
    _put(v, RECORD, text.encode("ascii"))


@hostile(
    "documents",
    "a-key-twice-among-10000",
    "Ten thousand keys stand twice: to find one is quadratic.",
    code="E102",
    place="runs/",
    also=("E401",),
)
def _(v: Vector) -> None:
    pairs = ",".join(f'"a{n % 10000}":1' for n in range(20_000))
    _put(v, RECORD, f"{{{pairs}}}\n".encode("ascii"))


@hostile(
    "documents",
    "nested-20000-deep",
    "Lists inside one another, for a parser that recurses.",
    code="E102",
    place="runs/",
    also=("E401",),
)
def _(v: Vector) -> None:
    _put(v, RECORD, b"[" * 20_000 + b"]" * 20_000 + b"\n")


@hostile(
    "documents",
    "unprintable-version",
    "The version is a list, which no dictionary can hold.",
    code="E103",
    place="runs/",
    also=("E401",),
)
def _(v: Vector) -> None:
    v.edit_json(RECORD, version=["0.1"])
    _forge(v)


# ---- tables


def _not_utf8(n: int) -> pa.Array:
    text = b"\xff\xfe" * n
    offsets = np.arange(0, 2 * n + 1, 2, dtype=np.int32)
    return pa.StringArray.from_buffers(n, pa.py_buffer(offsets.tobytes()), pa.py_buffer(text))


@hostile(
    "tables",
    "text-that-is-no-utf8",
    "The phase of each token is no UTF-8.",
    code="E206",
    place="shards/",
    also=("E412", "E406"),
)
def _(v: Vector) -> None:
    _column(v, TOKENS, "phase", lambda table: _not_utf8(table.num_rows), use_dictionary=False)


@hostile(
    "tables",
    "reasons-that-are-no-utf8",
    "The reason of each span is no UTF-8.",
    code="E206",
    place="census/",
)
def _(v: Vector) -> None:
    _column(v, part("spans"), "reason", lambda table: _not_utf8(table.num_rows))


@hostile(
    "tables",
    "list-for-a-number",
    "Requests are lists of numbers.",
    code="E109",
    place="shards/",
    also=("E206",),
)
def _(v: Vector) -> None:
    _column(v, TOKENS, "request", lambda t: pa.array([[1]] * t.num_rows, pa.list_(pa.uint32())))


@hostile(
    "tables",
    "lists-of-another-type",
    "Digests of blocks are lists of lists.",
    code="E109",
    place="census/",
)
def _(v: Vector) -> None:
    kind = pa.list_(pa.list_(pa.int64()))
    _column(v, part("requests"), "block_digests", lambda t: pa.nulls(t.num_rows, kind))


@hostile(
    "tables",
    "an-old-type-of-time",
    "Times are of Parquet's INT96, which a cast would take.",
    code="E109",
    place="census/",
)
def _(v: Vector) -> None:
    _column(
        v,
        part("steps"),
        "t_ns",
        lambda t: pa.array([1] * t.num_rows, pa.timestamp("ns")),
        use_deprecated_int96_timestamps=True,
    )


@hostile(
    "tables",
    "a-footer-of-2-40-rows",
    "The footer of a table claims 2^40 rows.",
    code="E206",
    place="losses/",
)
def _(v: Vector) -> None:
    def edit(footer: Any) -> None:
        footer[3].value = 2**40

    path = part("stalls")
    _put(v, path, edit_footer((v.path / path).read_bytes(), edit))


@hostile(
    "tables",
    "four-million-equal-rows",
    "Run lengths: 300 MB of columns in 10 kB.",
    code="E206",
    place="losses/",
)
def _(v: Vector) -> None:
    _rows(v, "stalls", 1 << 22)


@hostile(
    "tables",
    "one-word-of-a-megabyte",
    "A word of 1 MB, which 100,000 rows name.",
    code="E206",
    place="losses/",
)
def _(v: Vector) -> None:
    n = 100_000
    words = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(n, np.int32)), pa.array(["a" * 1_000_000])
    )
    _rows(v, "stalls", n, stage=words)


@hostile(
    "tables",
    "a-bomb-of-zstd",
    "Pages of zeros that zstd makes 10,000 times smaller.",
    code="E206",
    place="losses/",
)
def _(v: Vector) -> None:
    n = 1 << 22
    path = part("stalls")
    made = {
        f.name: pa.array(["a"] * n) if f.name == "stage" else pa.array(np.zeros(n), f.type)
        for f in tables.bare_schema("stalls")
    }
    _put(v, path, _parquet(pa.table(made), use_dictionary=False, data_page_size=1 << 28))


# ---- arrays and probes


@hostile(
    "arrays",
    "shape-of-2-47-rows",
    "An array of 2^47 rows in 600 bytes.",
    code="E204",
    place="shards/",
    also=("E203", "E108"),
)
def _(v: Vector) -> None:
    from actds.format.arrays import array_metadata

    path = f"{PREFILL}/acts.zarr/resid_post.0/zarr.json"
    _put(v, path, array_metadata(2**47, 16, "bfloat16"))


def _frame(v: Vector, edit: Callable[[bytearray], Any]) -> None:
    """Change the one frame of an array, with every checksum right again."""
    data = (v.path / ARRAY).read_bytes()
    frame = bytearray(data[: len(data) - 24])
    edit(frame)
    body = bytes(frame) + struct.pack("<I", crc32c(bytes(frame)))
    index = struct.pack("<QQ", 0, len(body))
    _put(v, ARRAY, body + index + struct.pack("<I", crc32c(index)))


@hostile(
    "arrays",
    "a-frame-of-2-gb",
    "A chunk's frame claims 2 GB.",
    code="E204",
    place="shards/",
    level="deep",
)
def _(v: Vector) -> None:
    _frame(v, lambda frame: frame.__setitem__(slice(4, 8), struct.pack("<i", 2**31 - 1)))


@hostile(
    "arrays",
    "a-stream-of-2-62",
    "A zstd stream in a chunk claims a content of 2^62 bytes.",
    code="E204",
    place="shards/",
    level="deep",
)
def _(v: Vector) -> None:
    def edit(frame: bytearray) -> None:
        at = frame.find(b"\x28\xb5\x2f\xfd")
        stream = b"\x28\xb5\x2f\xfd\xc0\x00" + struct.pack("<Q", 2**62)
        frame[at : at + len(stream)] = stream

    _frame(v, edit)


def _with_probes(v: Vector, data: bytes, n_probes: int = 2) -> None:
    record = v.json(RECORD)
    fields = json.loads(record["fields"]["capture.readouts"]["value"])
    fields |= {"n_probes": n_probes, "probes_sha256": canonical.digest(data)}
    v.edit_table("readouts", lambda rows: [row.update(probes=[0.0] * n_probes) for row in rows])
    text = canonical.dump(fields).decode("ascii").rstrip("\n")
    record["fields"]["capture.readouts"]["value"] = text
    v.write_json(RECORD, record)
    path = v.path / f"readouts/{RUN}/probes.npy"
    path.write_bytes(data)
    _forge(v)


@hostile(
    "arrays",
    "a-zip-for-probes",
    "The probes are a zip, of which numpy makes another type.",
    code="E103",
    place="readouts/",
    level="deep",
    base="readouts",
    also=("E417", "E201", "E109", "E416"),
)
def _(v: Vector) -> None:
    sink = io.BytesIO()
    np.savez(sink, probes=np.zeros((1, 2, 16), np.float32))
    data = sink.getvalue()
    wanted = 128 + 4 * 2 * sum(hook["d_model"] for hook in v.json("actds.json")["hooks"])
    _with_probes(v, data[:wanted].ljust(wanted, b"\0"))


@hostile(
    "arrays",
    "probes-of-a-petabyte",
    "The header of the probes claims 2^50 bytes.",
    code="E103",
    place="readouts/",
    level="deep",
    base="readouts",
    also=("E417", "E201", "E109", "E416"),
)
def _(v: Vector) -> None:
    hooks = v.json("actds.json")["hooks"]
    sink = io.BytesIO()
    np.save(sink, np.zeros((len(hooks), 2, hooks[0]["d_model"]), np.float32))
    data = sink.getvalue()
    old, new = f"({len(hooks)}, 2, {hooks[0]['d_model']})", f"({2**48}, 1, 1)"
    head = data[:128].replace(old.encode(), new.encode())[:128]
    _with_probes(v, head[:10] + head[10:].rstrip(b"\n ").ljust(117) + b"\n" + data[128:])


@hostile(
    "arrays",
    "projections-without-end",
    "A run claims 2^62 random projections of each row.",
    code="E103",
    place="runs/",
    base="readouts",
    level="standard",
    also=("E416", "E417"),
)
def _(v: Vector) -> None:
    record = v.json(RECORD)
    fields = {"n_probes": 0, "n_projections": 2**62, "probes_sha256": None, "seed": 3}
    text = canonical.dump(fields).decode("ascii").rstrip("\n")
    record["fields"]["capture.readouts"]["value"] = text
    v.write_json(RECORD, record)
    _forge(v)


# ---- what is made large by what is small


@hostile(
    "numbers",
    "a-drop-of-2-32-positions",
    "A drop of 2^32 positions, each of which owes readouts.",
    code="E408",
    place="losses/",
    base="readouts",
    also=("E416", "E415", "E404", "E405", "E409"),
)
def _(v: Vector) -> None:
    _rows(v, "drops", 1, start=pa.array([0], pa.uint32()), stop=pa.array([2**32 - 1], pa.uint32()))


@hostile(
    "numbers",
    "a-request-of-2-32-tokens",
    "A request of 2^33 tokens with a digest to compute.",
    code="E404",
    place="census/",
    also=("E405", "E406", "E409", "E410", "E411", "E412", "E414", "E415", "E413", "E419"),
)
def _(v: Vector) -> None:
    def edit(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["prompt_len"] = row["generated_len"] = 2**32 - 1

    table = pq.read_table(v.path / part("requests")).to_pylist()
    edit(table)
    v.write_table("requests", part("requests"), table)
    _forge(v)


# ---- too large to be kept: made where they are tried, code and level beside them

LARGE: dict[str, tuple[str, str, Callable[[Vector], Any]]] = {}


def large(name: str, code: str, level: str = "full") -> Callable[[Callable[[Vector], Any]], Any]:
    """Register an attack of megabytes."""

    def register(make: Callable[[Vector], Any]) -> Callable[[Vector], Any]:
        LARGE[name] = (code, level, make)
        return make

    return register


@large("run-record-of-64-mib", "E102")
def _(v: Vector) -> None:
    _put(v, RECORD, b"[" + b"1," * ((1 << 25) - 2) + b"1]\n")


@large("run-record-of-text", "E102")
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"]["model.name"]["value"] = "x" * (1 << 26)
    v.write_json(RECORD, record)
    _forge(v)


@large("run-record-of-wrong-fields", "E103")
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"] = {f"A{n:06d}": 1 for n in range(130_000)}
    v.write_json(RECORD, record)
    _forge(v)


@large("run-record-of-nulls", "E103")
def _(v: Vector) -> None:
    record = v.json(RECORD)
    record["fields"]["model.name"]["value"] = [None] * 130_000
    v.write_json(RECORD, record)
    _forge(v)


@large("folders-1000-deep", "E107")
def _(v: Vector) -> None:
    here = os.open(v.path / "shards" / PREFILL.rpartition("/")[2], os.O_RDONLY)
    for _n in range(1000):
        os.mkdir("a", dir_fd=here)
        there = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = there
    os.close(here)


@large("a-million-wrong-spans", "E405", "standard")
def _(v: Vector) -> None:
    n = 500_000
    rng = np.random.default_rng(0)
    _rows(
        v,
        "spans",
        n,
        request=pa.array(rng.integers(0, 2**32, n), pa.uint32()),
        start=pa.array(np.zeros(n), pa.uint32()),
        stop=pa.array(rng.integers(1, 2**20, n), pa.uint32()),
        ref_request=pa.array(rng.integers(0, 2**32, n), pa.uint32()),
        step=pa.array(rng.integers(0, 2**62, n), pa.uint64()),
    )


@large("a-million-requests-without-spans", "E404", "standard")
def _(v: Vector) -> None:
    n = 1_000_000
    digests = np.random.default_rng(0).bytes(32 * n).hex()
    _rows(
        v,
        "requests",
        n,
        request=pa.array(np.arange(n)[::-1], pa.uint32()),
        token_digest=pa.array([digests[64 * i : 64 * i + 64] for i in range(n)]),
    )


@large("a-reason-for-each-drop", "E408", "standard")
def _(v: Vector) -> None:
    n = 200_000
    _rows(
        v,
        "drops",
        n,
        drop_reason=pa.array([f"r{i}" for i in range(n)]),
        request=pa.array(np.arange(n), pa.uint32()),
        start=pa.array(np.zeros(n), pa.uint32()),
        stop=pa.array(np.ones(n), pa.uint32()),
    )


@large("one-long-reason", "E408", "standard")
def _(v: Vector) -> None:
    n = 100_000
    words = ["a" * 1_000_000] + ["b"] * (n - 1)
    _rows(
        v,
        "drops",
        n,
        drop_reason=pa.array(words),
        request=pa.array(np.arange(n), pa.uint32()),
        start=pa.array(np.zeros(n), pa.uint32()),
        stop=pa.array(np.ones(n), pa.uint32()),
    )


@large("references-to-the-same", "E405", "standard")
def _(v: Vector) -> None:
    n = 300_000
    _rows(
        v,
        "spans",
        n,
        request=pa.array(np.arange(n), pa.uint32()),
        start=pa.array(np.zeros(n), pa.uint32()),
        stop=pa.array(np.full(n, 2**31), pa.uint32()),
        disposition=pa.repeat(pa.scalar("cache_ref"), n),
        ref_request=pa.array(np.zeros(n), pa.uint32()),
        step=pa.nulls(n, pa.uint64()),
    )


@large("a-row-group-for-each-row", "E206")
def _(v: Vector) -> None:
    kinds = tables.bare_schema("stalls")
    n = 20_000
    many = {
        f.name: pa.array(["a"] * n) if f.name == "stage" else pa.array(np.arange(n), f.type)
        for f in kinds
    }
    _put(v, part("stalls"), _parquet(pa.table(many), row_group_size=1, compression="none"))


def make(name: str, dataset: Path) -> tuple[str, str]:
    """Make a large attack of a copy of a valid vector; return its code and its level."""
    code, level, change = LARGE[name]
    change(Vector(dataset))
    return code, level
