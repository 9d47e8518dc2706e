"""Attacks by lies: every digest, root, link and seal is right, and something is not true."""

from __future__ import annotations

import io
import re
import shutil
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from attack_tools import attack
from thrift_tools import Field, edit_footer, field
from vector_tools import (
    ARRAY,
    HOOK,
    MULTIPLICITY,
    PREFILL,
    RECORD,
    RUN,
    SEAL,
    Json,
    Vector,
    part,
)

from actds.format import canonical, tables
from actds.format.codec import crc32c, encode_chunk
from actds.format.readouts import probe_bytes

semantic = partial(attack, "semantic")

TOKENS = f"{PREFILL}/tokens.parquet"
MANIFEST = f"{PREFILL}/shard.json"
PROBES = f"readouts/{RUN}/probes.npy"


# ---- parquet: pages without a checksum, footers that are not true of their pages


def _rewrite(v: Vector, path: str, edit: Callable[[Any], Any] | None = None, **form: Any) -> None:
    table = pq.read_table(v.path / path)
    form = {"compression": "zstd", "store_schema": False, "write_page_checksum": True, **form}
    sink = io.BytesIO()
    pq.write_table(table if edit is None else edit(table), sink, **form)
    (v.path / path).write_bytes(sink.getvalue())


def _plus_one(table: Any, column: str = "token_id") -> Any:
    values = table[column].to_pylist()
    values[0] += 1
    at = table.column_names.index(column)
    kind = table.schema.field(column)
    return table.set_column(at, kind, [np.array(values, kind.type.to_pandas_dtype())])


@semantic("parquet page", "tokens-without-checksums", "A token id is another one, and no page of "
          "the table has a checksum that could tell.", code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, TOKENS, _plus_one, write_page_checksum=False)
    v.relink(totals=False)


@semantic("parquet page", "census-without-checksums", "No page of a census table has a checksum.",
          code="E206", place=part("steps"))  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, part("steps"), write_page_checksum=False)
    v.relink(totals=False)


@semantic("parquet page", "multiplicity-without-checksums", "No page of the multiplicity has a "
          "checksum.", code="E206", place=MULTIPLICITY)  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, MULTIPLICITY, write_page_checksum=False)
    v.relink(totals=False)


@semantic("parquet page", "one-page-without-checksum", "One page has no checksum, all others have: "
          "its flag says what a reader wants to see.", code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    data = (v.path / TOKENS).read_bytes()
    sink = io.BytesIO()
    pq.write_table(pq.read_table(v.path / TOKENS), sink, compression="zstd", store_schema=False)
    bare = sink.getvalue()
    footer = _columns(bare)[0]
    # The first column of the file without checksums goes behind the pages of the other.
    start, size = footer[11].value, footer[7].value
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    moved = data[:end] + bare[start : start + size] + data[end:]

    def edit(whole: dict[int, Any]) -> None:
        column = _columns_of(whole)[0]
        shift = end - start
        column.update({number: footer[number] for number in (6, 7)})
        column[9], column[11] = (Field(6, footer[number].value + shift) for number in (9, 11))

    (v.path / TOKENS).write_bytes(edit_footer(moved, edit))
    v.keep.add(TOKENS)
    v.relink(totals=False)


def _columns_of(footer: dict[int, Any]) -> list[Any]:
    return [chunk[3].value for chunk in footer[4].value[1][0][1].value[1]]


def _columns(data: bytes) -> list[Any]:
    found: list[Any] = []
    edit_footer(data, lambda footer: found.extend(_columns_of(footer)))
    return found


def _edit_footer(v: Vector, path: str, edit: Callable[[dict[int, Any]], Any]) -> None:
    (v.path / path).write_bytes(edit_footer((v.path / path).read_bytes(), edit))
    v.keep.add(path)  # its rows are those that the ledger says
    v.relink(totals=False)


@semantic("parquet footer", "rows-of-the-file", "The footer says one row less than its row groups: "
          "readers differ in which of the two they believe.",
          code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    _edit_footer(v, TOKENS, lambda footer: footer.update({3: Field(6, footer[3].value - 1)}))


@semantic("parquet footer", "rows-of-a-group", "File and row group say one row less than their "
          "pages have: a reader leaves the last one out.",
          code="E206", place=part("steps"))  # fmt: skip
def _(v: Vector) -> None:
    def edit(footer: dict[int, Any]) -> None:
        group = footer[4].value[1][0]
        footer[3] = group[3] = Field(6, group[3].value - 1)

    _edit_footer(v, part("steps"), edit)


def _statistics(v: Vector, path: str, column: int, **told: bytes | int) -> None:
    names = {"nulls": 3, "largest": 5, "least": 6, "old_largest": 1, "old_least": 2}

    def edit(footer: dict[int, Any]) -> None:
        statistics = _columns_of(footer)[column][12].value
        for name, value in told.items():
            statistics[names[name]] = field(value)
        statistics.pop(7, None), statistics.pop(8, None)

    _edit_footer(v, path, edit)


@semantic("parquet footer", "statistics-hide-rows", "The statistics say that all positions are "
          "far beyond those that there are: a query finds none.",
          code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    _statistics(v, TOKENS, 1, least=(5000).to_bytes(4, "little"),
                largest=(6000).to_bytes(4, "little"))  # fmt: skip


@semantic("parquet footer", "statistics-narrow", "The largest step in the statistics is below the "
          "last one.", code="E206", place=part("steps"))  # fmt: skip
def _(v: Vector) -> None:
    _statistics(v, part("steps"), 0, largest=(1).to_bytes(8, "little"))


@semantic("parquet footer", "statistics-of-words", "The statistics of a column of words leave out "
          "one of them.", code="E206", place=part("spans"))  # fmt: skip
def _(v: Vector) -> None:
    _statistics(v, part("spans"), 3, largest=b"cache_ref")


@semantic("parquet footer", "nulls-denied", "The statistics say that no step of a span is null.",
          code="E206", place=part("spans"))  # fmt: skip
def _(v: Vector) -> None:
    _statistics(v, part("spans"), 5, nulls=0)


@semantic("parquet footer", "two-statistics", "The old statistics of a column say something else "
          "than the new ones: old and new readers see other rows.", code="E206",
          place=part("steps"))  # fmt: skip
def _(v: Vector) -> None:
    _statistics(v, part("steps"), 1, old_largest=(7).to_bytes(8, "little"))


@semantic("parquet footer", "said-to-be-sorted", "The footer says that rows are sorted which are "
          "not.", code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, TOKENS, sorting_columns=[pq.SortingColumn(1)])
    v.relink(totals=False)


@semantic("parquet footer", "pages-in-another-file", "A column's pages are said to be in another "
          "file.", code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    def edit(footer: dict[int, Any]) -> None:
        footer[4].value[1][0][1].value[1][2][1] = field(b"../../actds.json")

    _edit_footer(v, TOKENS, edit)


@semantic("parquet footer", "page-index", "An index of pages stands in the file, which nobody "
          "compares with them.", code="E206", place=TOKENS)  # fmt: skip
def _(v: Vector) -> None:
    _rewrite(v, TOKENS, write_page_index=True)
    v.relink(totals=False)


# ---- files that nobody hashes


def _with_probes(v: Vector, digest: str | None = "") -> bytes:
    """Give the run probes, and readouts of as many numbers more; return the file."""
    probes = np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 2, 8)
    data = probe_bytes(probes)
    record = v.json(RECORD)
    fields = canonical.parse((record["fields"]["capture.readouts"]["value"] + "\n").encode(), "")
    fields |= {"n_probes": 2, "probes_sha256": canonical.digest(data) if digest == "" else digest}
    record["fields"]["capture.readouts"]["value"] = canonical.dump(fields).decode().rstrip("\n")
    v.write_json(RECORD, record)
    (v.path / PROBES).write_bytes(data)

    def edit(rows: list[Json]) -> None:
        for row in rows:
            row["probes"] = [0.0, 0.0]

    v.edit_table("readouts", edit)
    v.relink()
    return data


@semantic("unhashed", "probes-gone", "The probes of a run are gone.", base="readouts",
          code="E104", place=PROBES)  # fmt: skip
def _(v: Vector) -> None:
    _with_probes(v)
    (v.path / PROBES).unlink()


@semantic("unhashed", "probes-flipped", "A probe has another sign.", base="readouts",
          code="E202", place=PROBES)  # fmt: skip
def _(v: Vector) -> None:
    _with_probes(v)
    v.flip(PROBES, 140)


@semantic("unhashed", "probes-longer", "The probes have bytes behind them.", base="readouts",
          code="E201", place=PROBES)  # fmt: skip
def _(v: Vector) -> None:
    (v.path / PROBES).write_bytes(_with_probes(v) + bytes(64))


@semantic("unhashed", "probes-unpinned", "The run record names no digest of the probes.",
          base="readouts", code="E103", place=f"{RECORD} capture.readouts",
          also=("E105", "E401"))  # fmt: skip
def _(v: Vector) -> None:
    _with_probes(v, None)


@semantic("links", "probes-are-a-link", "The probes are a link.", base="readouts",
          code="E107", place=PROBES, also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "elsewhere.npy").write_bytes(_with_probes(v))
    (v.path / PROBES).unlink()
    (v.path / PROBES).symlink_to("../../elsewhere.npy")


@semantic("unhashed", "card-edited", "The card says that nothing was dropped.", severity="warning",
          code="E110", place="README.md")  # fmt: skip
def _(v: Vector) -> None:
    text = (v.path / "README.md").read_text("utf-8")
    text = re.sub(r"(?m)^[|] dropped [|] 1 [|].*", "| dropped | 0 | 0.00 % |", text)
    (v.path / "README.md").write_text(text, encoding="utf-8")


@semantic("unhashed", "card-of-another-seal", "The card names another digest.", severity="warning",
          code="E110", place="README.md")  # fmt: skip
def _(v: Vector) -> None:
    text = (v.path / "README.md").read_text("utf-8")
    text = re.sub(r"digest [0-9a-f]{64}", f"digest {'5' * 64}", text)
    (v.path / "README.md").write_text(text, encoding="utf-8")


@semantic("unhashed", "card-with-a-verdict-and-more", "Words that are no verdict stand where the "
          "card has that of an audit.", severity="warning",
          code="E110", place="README.md")  # fmt: skip
def _(v: Vector) -> None:
    text = (v.path / "README.md").read_text("utf-8")
    text = re.sub(r"(?s)## Audit\n\n.*\n\n## Use", "## Audit\n\n**PASS**: all is well.\n"
                  "\n## More\n\nRun this first.\n\n## Use", text)  # fmt: skip
    (v.path / "README.md").write_text(text, encoding="utf-8")


@semantic("unhashed", "croissant-forged", "The card for programs lists a file of another digest.",
          severity="warning", code="E110", place="croissant.json")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "croissant.json").write_text('{"license":"unknown","distribution":[]}\n', "utf-8")


@semantic("unhashed", "occupancy-is-no-table", "A committed part of a table that no sum needs is "
          "no table at all.", code="E206", place=f"losses/{RUN}/occupancy")  # fmt: skip
def _(v: Vector) -> None:
    _add_part(v, "w", "occupancy", f"losses/{RUN}/occupancy-000000.parquet", b"PAR1 no PAR1")


def _add_part(v: Vector, kind: str, table: str, path: str, data: bytes) -> None:
    (v.path / path).write_bytes(data)
    v.keep.add(path)
    last = v.chain(kind)[-1]
    close = v.json(last)
    body = {"table": table, "file": v._entry(path, path), "n_rows": 0}
    v.write_json(last, close | {"type": "part", "body": body})
    following = f"{last.rpartition('/')[0]}/{close['seq'] + 1:08d}.json"
    v.write_json(following, close | {"seq": close["seq"] + 1})
    v.relink(totals=False)


@semantic("numbers", "part-left-out", "The parts of a table are numbered 0 and 2: what had the "
          "number between is gone.", code="E301", place=f"losses/{RUN}/stalls-000002")  # fmt: skip
def _(v: Vector) -> None:
    data = tables.to_parquet("stalls", tables.empty("stalls"))
    _add_part(v, "w", "stalls", f"losses/{RUN}/stalls-000002.parquet", data)


@semantic("numbers", "roles-of-fewer-rows", "The ledger commits more rows of a table than it has.",
          base="roles", code="E203", place=part("roles"))  # fmt: skip
def _(v: Vector) -> None:
    v.keep.add(part("roles"))
    v.edit_table("roles", lambda rows: rows.pop())
    v.relink(totals=False)


# ---- links and folders in place of files


@semantic("links", "manifest-is-a-link", "A shard's manifest is a link to a copy.",
          code="E107", place=MANIFEST, also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    shutil.move(v.path / MANIFEST, v.path / "notes.json")
    (v.path / MANIFEST).symlink_to("../../notes.json")


@semantic("links", "array-is-a-link", "The rows are a link to a copy of them.",
          code="E107", place=ARRAY, also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    shutil.move(v.path / ARRAY, v.path / "rows")
    (v.path / ARRAY).symlink_to("../../../../../../rows")


@semantic("links", "shard-folder-is-a-link", "The folder of a shard is a link.",
          code="E107", place="shards/", also=("E105",))  # fmt: skip
def _(v: Vector) -> None:
    shutil.move(v.path / PREFILL, v.path / "aside")
    (v.path / PREFILL).symlink_to("../aside")


@semantic("links", "card-is-a-link", "The card is a link to another text.",
          code="E107", place="README.md")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "README.md").unlink()
    (v.path / "README.md").symlink_to("actds.json")


@semantic("links", "card-is-a-folder", "The card is a folder.",
          code="E107", place="README.md")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "README.md").unlink()
    (v.path / "README.md").mkdir()


@semantic("links", "croissant-is-a-link", "The card for programs is a link out of the dataset.",
          code="E107", place="croissant.json")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "croissant.json").symlink_to("../../../etc/hostname")


@semantic("links", "genesis-is-a-folder", "actds.json is a folder.",
          code="E107", place="actds.json")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "actds.json").unlink()
    (v.path / "actds.json").mkdir()


@semantic("links", "seal-is-a-link", "The seal is a link to a copy.",
          code="E107", place=SEAL, also=("E105", "E306"))  # fmt: skip
def _(v: Vector) -> None:
    shutil.move(v.path / SEAL, v.path / "aside.json")
    (v.path / SEAL).symlink_to("../aside.json")


@semantic("links", "stray-link", "A link stands where no file is expected.",
          code="E107", place="notes")  # fmt: skip
def _(v: Vector) -> None:
    (v.path / "notes").symlink_to("/")


# ---- chains and seals


def _chain(v: Vector, kind: str, bodies: list[tuple[str, Json]]) -> None:
    """Add a chain of a kind, and its head to the seal."""
    letter = kind[0]
    name = f"{letter}-00000000000000aa"
    opening = v.json(v.chain(letter)[0])
    for seq, (of_type, body) in enumerate([("open", opening["body"]), *bodies]):
        record = opening | {"chain": name, "seq": seq, "type": of_type, "body": body}
        v.write_json(f"ledger/{name}/{seq:08d}.json", record)
    head = {"n_records": len(bodies) + 1, "sha256": "0" * 64, "state": "closed"}
    v.edit_json(SEAL, heads=v.json(SEAL)["heads"] | {name: head})


def _relink_all(v: Vector) -> None:
    """Link every chain again: ``Vector.relink`` takes one chain of a kind."""
    heads: Json = {}
    for folder in sorted((v.path / "ledger").iterdir()):
        prev, state = "0" * 64, "closed"
        paths = sorted(folder.iterdir())
        for path in paths:
            name = path.relative_to(v.path).as_posix()
            record = v.json(name) | {"prev": prev}
            v.write_json(name, record)
            prev = canonical.digest(path.read_bytes())
            state = "fenced" if record["type"] == "fence" else "closed"
        heads[folder.name] = {"n_records": len(paths), "sha256": prev, "state": state}
    v.edit_json(SEAL, heads=heads, root=v.root_of(heads))


def _lie_in_close(v: Vector, letter: str, name: str) -> None:
    last = v.chain(letter)[-1]
    close = v.json(last)
    close["body"]["totals"][name] += 7
    v.write_json(last, close)


_EMPTY = ("close", {"reason": "failed", "totals": {}})


@semantic("chains", "second-census", "A second census chain is empty, and the totals of the first "
          "are not compared any more.", code="E415", place="ledger/c-")  # fmt: skip
def _(v: Vector) -> None:
    _lie_in_close(v, "c", "requests")
    _chain(v, "census", [_EMPTY])
    _relink_all(v)


@semantic("chains", "second-writer", "A second writer chain is empty, and the drops that the first "
          "counted are not compared any more.", code="E415", place="ledger/w-")  # fmt: skip
def _(v: Vector) -> None:
    _lie_in_close(v, "w", "dropped_tokens")
    _chain(v, "writer", [_EMPTY])
    _relink_all(v)


@semantic("chains", "census-fenced", "The census is fenced and not closed: it says no totals.",
          code="E403", place=f"census/{RUN}")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(v.chain("c")[-1], type="fence", body={"reason": "gone"})
    _relink_all(v)


@semantic("chains", "census-failed", "The census says that it failed, and no totals.",
          code="E403", place=f"census/{RUN}")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(v.chain("c")[-1], body=_EMPTY[1])
    _relink_all(v)


@semantic("chains", "census-interrupted", "The census says that it was interrupted, and no totals.",
          code="E415", place="ledger/c-")  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(v.chain("c")[-1], body={"reason": "interrupted", "totals": {}})
    _relink_all(v)


@semantic("chains", "losses-not-closed", "The writer is fenced and not closed, and its losses read "
          "as if they were all.", severity="warning", code="E421", place="ledger/w-",
          also=("E110",))  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(v.chain("w")[-1], type="fence", body={"reason": "gone"})
    _relink_all(v)


@semantic("chains", "earlier-seal-lies", "The totals of the first of two seals are wrong.",
          base="replaced", code="E415", place=SEAL)  # fmt: skip
def _(v: Vector) -> None:
    totals = v.json(SEAL)["totals"]
    v.edit_json(SEAL, totals=totals | {"dropped": 0})
    _reseal(v)


@semantic("chains", "earlier-multiplicity-lies", "The counts of the first of two seals are wrong.",
          base="replaced", code="E413", place=MULTIPLICITY)  # fmt: skip
def _(v: Vector) -> None:
    v.write_table("multiplicity", MULTIPLICITY, v.table(MULTIPLICITY)[1:])
    _reseal(v)


def _reseal(v: Vector) -> None:
    entry = v._entry(MULTIPLICITY, MULTIPLICITY)
    v.edit_json(SEAL, multiplicity=entry)
    digest = canonical.digest((v.path / SEAL).read_bytes())
    v.edit_json("seal/0002.json", previous=digest)


# ---- names and labels


@semantic("labels", "hook-of-another-place", "The hook is called the stream after layer 0, and is "
          "of layer 7.", code="E103", place="actds.json")  # fmt: skip
def _(v: Vector) -> None:
    genesis = v.json("actds.json")
    genesis["hooks"][0]["layer"] = 7
    v.edit_json("actds.json", hooks=genesis["hooks"])
    v.relink(totals=False)


@semantic("labels", "hook-of-another-kind", "The hook is called the stream after layer 0, and its "
          "kind is another one.", code="E103", place="actds.json")  # fmt: skip
def _(v: Vector) -> None:
    genesis = v.json("actds.json")
    genesis["hooks"][0]["kind"] = "mlp_out"
    v.edit_json("actds.json", hooks=genesis["hooks"])
    v.relink(totals=False)


@semantic("labels", "raw-that-is-coded", "A shard calls itself raw, and its chunks are coded.",
          code="E415", place=MANIFEST)  # fmt: skip
def _(v: Vector) -> None:
    # 8 values of one row are copied in any case: more of them, and alike, are coded.
    v.edit_json(MANIFEST, compression="raw")
    _set_array(v, lambda bits: np.full_like(bits, 0x3F80))
    v.relink()


@semantic("labels", "not-in-sequence", "A shard says that its rows are in sequence, and they are "
          "not.", code="E415", place=MANIFEST)  # fmt: skip
def _(v: Vector) -> None:
    v.edit_json(MANIFEST, order="sequence", permutation_seed=None)
    v.relink()


@semantic("labels", "unknown-flag", "A row has a flag that nothing defines.",
          code="E103", place="shards", also=("E414",))  # fmt: skip
def _(v: Vector) -> None:
    v.edit_table(TOKENS, lambda rows: rows[0].update(flags=1 << 9))
    v.relink()


@semantic("labels", "one-token-two-flags", "Of two rows of one token, one hides that it is "
          "special.", code="E414", place="shards")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        tokens = [row["token_id"] for row in rows]
        twin = next(row for row in rows if tokens.count(row["token_id"]) > 1)
        twin["flags"] ^= 1

    v.edit_table(TOKENS, edit)
    v.relink()


@semantic("labels", "attempt-that-never-was", "A row says that its request was restarted more "
          "often than the census has seen.", code="E414", place="shards")  # fmt: skip
def _(v: Vector) -> None:
    def edit(rows: list[Json]) -> None:
        for row in rows:
            row["attempt"] += 3

    for path in (TOKENS, TOKENS.replace("prefill", "decode")):
        v.edit_table(path, edit)
    v.relink()


@semantic("references", "cycle", "Two requests say that each was served what the other computed.",
          code="E410", place=f"census/{RUN}/spans")  # fmt: skip
def _(v: Vector) -> None:
    spans = v.table(part("spans"))
    one = next(row for row in spans if row["disposition"] == "cache_ref")

    def edit(rows: list[Json]) -> None:
        next(row for row in rows if row == one)["ref_request"] = one["request"]

    v.edit_table("spans", edit)
    v.relink()


@semantic("claims", "said-to-be-complete", "The requests are numbered 0, 1, 3: one that was lost "
          "altogether leaves its number behind.",
          code="E404", place=f"census/{RUN}/requests")  # fmt: skip
def _(v: Vector) -> None:
    last = max(row["request"] for row in v.table(part("requests")))

    def edit(rows: list[Json]) -> None:
        for row in rows:
            if row["request"] == last:
                row["request"] += 1

    for table in ("requests", "spans", "drops", TOKENS, TOKENS.replace("prefill", "decode")):
        v.edit_table(table, edit)
    v.relink()


# ---- chunks: bytes that stand for nothing


def _set_array(v: Vector, edit: Callable[[Any], Any] | None = None,
               frame: Callable[[bytes], bytes] = bytes) -> None:  # fmt: skip
    """Write the array again as one chunk of a frame, whose padding is as ``edit`` leaves it."""
    metadata = v.json(f"{PREFILL}/acts.zarr/{HOOK}/zarr.json")
    n_rows, d_model = metadata["shape"]
    inner = metadata["codecs"][0]["configuration"]["chunk_shape"][0]
    rng = np.random.default_rng(1)
    bits = np.full((inner, d_model), 0x7FC0, np.uint16)
    bits[:n_rows] = 0x3F80 + rng.integers(0, 4, (n_rows, d_model))
    bits = bits if edit is None else edit(bits)
    body = frame(encode_chunk(np.ascontiguousarray(bits)))
    chunk = body + struct.pack("<I", crc32c(body))
    index = struct.pack("<QQ", 0, len(chunk))
    data = chunk + index + struct.pack("<I", crc32c(index))
    (v.path / ARRAY).write_bytes(data)
    v.relink()


def _reframe(frame: bytes, last: Callable[[bytes], bytes], tail: bytes = b"") -> bytes:
    """Return a frame of one block with its last stream changed, and bytes behind it."""
    version, coder, flags, size, nbytes, block, _ = struct.unpack_from("<BBBBiii", frame)
    (at,) = struct.unpack_from("<i", frame, 16)
    streams, position = [], at
    while position < len(frame):
        (n,) = struct.unpack_from("<i", frame, position)
        streams.append(frame[position + 4 : position + 4 + n])
        position += 4 + n
    streams[-1] = last(streams[-1])
    body = b"".join(struct.pack("<i", len(s)) + s for s in streams) + tail
    head = struct.pack("<BBBBiii", version, coder, flags, size, nbytes, block, at + len(body))
    return head + frame[16:at] + body


@semantic("chunks", "two-zstd-frames", "Behind the zstd frame of a stream stands an empty one: the "
          "chunk has two forms, and the values are the same.", code="E204", place=ARRAY,
          level="deep")  # fmt: skip
def _(v: Vector) -> None:
    empty = bytes.fromhex("28b52ffd2000010000")
    _set_array(v, frame=lambda f: _reframe(f, lambda stream: stream + empty))


@semantic("chunks", "skippable-frame", "A message stands in a frame that decoders skip.",
          code="E204", place=ARRAY, level="deep")  # fmt: skip
def _(v: Vector) -> None:
    hidden = bytes.fromhex("502a4d18") + struct.pack("<I", 7) + b"message"
    _set_array(v, frame=lambda f: _reframe(f, lambda stream: stream + hidden))


@semantic("chunks", "gap-in-a-frame", "A message stands between the blocks of a frame and its end.",
          code="E204", place=ARRAY, level="deep")  # fmt: skip
def _(v: Vector) -> None:
    _set_array(v, frame=lambda f: _reframe(f, bytes, b"message"))


@semantic("chunks", "padding-is-not-fill", "Behind the last row the last chunk holds a row more.",
          code="E204", place=ARRAY, level="deep")  # fmt: skip
def _(v: Vector) -> None:
    def edit(bits: Any) -> Any:
        bits[-1] = 0x3F80
        return bits

    _set_array(v, edit)
