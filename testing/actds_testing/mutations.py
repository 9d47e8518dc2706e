"""Random changes of a dataset: of tables, documents, bytes, files, chains and frames.

A change is *deep* when everything that stands above it is written anew: then only the rule that it
breaks can find it. Nothing of the package is used: what is written here is as the text says it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actds_testing.independent.layout import canonical
from actds_testing.reframing import reframe
from actds_testing.settling import load, settle, write_table

Json = dict[str, Any]
DOCUMENTS = (
    "actds.json",
    "runs/*.json",
    "shards/*/shard.json",
    "ledger/*/*.json",
    "ledger/*/*.json",
    "seal/????.json",
    "shards/*/acts.zarr/**/zarr.json",
)
FORMS = [
    "drop",
    "add",
    "order",
    "type",
    "nullable",
    "groups",
    "codec",
    "plain",
    "key",
    "schema",
    "nochecksum",
    "dictionary",
]
Change = Callable[[Path, random.Random], str]
WORDS = ("", "x", "external", "queue_full", "after_end", "none", "é", "prefill", "decode", "stop")
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 65535, 65536, 2**31, 2**32, 2**53, 2**63 - 1)


def mutate(root: Path, rng: random.Random) -> list[str]:
    """Change a dataset in place, once to three times; return what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choices(CHANGES, WEIGHTS)[0]
        try:
            done.append(f"{change.__name__}: {change(root, rng)}")
        except (LookupError, OSError, pa.ArrowException, ValueError, OverflowError) as error:
            done.append(f"{change.__name__}: nothing ({error!r:.60})")
    depth = rng.choices(("deep", "linked", "shallow"), (8, 2, 1))[0]
    if depth != "shallow":
        done.append(settle(root, totals=depth == "deep"))
    return [*done, depth]


# ---- tables


def _pick_table(root: Path, rng: random.Random) -> Path:
    weight = {"spans": 8, "requests": 5, "steps": 5, "tokens": 6, "drops": 4, "roles": 3,
              "origins": 3, "sampled": 3}  # fmt: skip
    paths = sorted(root.rglob("*.parquet"))
    weights = [weight.get(path.name.partition(".")[0].partition("-")[0], 1) for path in paths]
    return rng.choices(paths, weights)[0]


def _other(value: object, column: list[Any], rng: random.Random) -> object:
    """Return another value of a cell: near it, of another row, or none."""
    if rng.random() < 0.1:
        return None
    if rng.random() < 0.3:
        return rng.choice(column)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(0, value + rng.choice((-4, -1, 1, 1, 2, 1000)))
    if isinstance(value, float):
        return value + rng.choice((-1.0, 1e-6, 1.0, float("nan")))
    if isinstance(value, str):
        return rng.choice([*WORDS, value + "x", *[v for v in column if v is not None]])
    if isinstance(value, list) and value:
        return value[1:] if rng.random() < 0.5 else [*value, value[0]]
    return rng.choice([v for v in column if v is not None])


def _rewrite(path: Path, table: pa.Table, rows: list[Json]) -> None:
    nulls = {n for n in table.column_names if any(row[n] is None for row in rows)}
    fields = [f.with_nullable(f.nullable or f.name in nulls) for f in table.schema]
    write_table(path, pa.Table.from_pylist(rows, schema=pa.schema(fields)))


def edit_cell(root: Path, rng: random.Random) -> str:
    """One cell of a table says something else."""
    path = _pick_table(root, rng)
    table = pq.read_table(path)
    rows = table.to_pylist()
    row, name = rng.choice(rows), rng.choice(table.column_names)
    old = row[name]
    row[name] = _other(old, [other[name] for other in rows], rng)
    _rewrite(path, table, rows)
    return f"{path.relative_to(root)} {name} {old!r:.40} -> {row[name]!r:.40}"


def edit_rows(root: Path, rng: random.Random) -> str:
    """A row of a table is gone, doubled, or has a cell of another row."""
    path = _pick_table(root, rng)
    table = pq.read_table(path)
    rows = table.to_pylist()
    how = rng.choice(("gone", "twice", "shuffled", "swapped", "reversed"))
    at = rng.randrange(len(rows))
    if how == "gone":
        del rows[at]
    elif how == "twice":
        rows.insert(at, rows[at])
    elif how == "shuffled":
        rng.shuffle(rows)
    elif how == "reversed":
        rows.reverse()
    else:
        other, name = rng.randrange(len(rows)), rng.choice(table.column_names)
        rows[at][name], rows[other][name] = rows[other][name], rows[at][name]
        how += f" {name} of {at} and {other}"
    _rewrite(path, table, rows)
    return f"{path.relative_to(root)} row {at} {how}"


def move_span(root: Path, rng: random.Random) -> str:
    """Two neighbouring spans part elsewhere, one is cut in two, or two become one."""
    path = rng.choice(sorted(root.glob("census/*/spans-*.parquet")))
    table = pq.read_table(path)
    rows = sorted(table.to_pylist(), key=lambda row: (row["request"], row["start"]))
    how = rng.choice(("move", "cut", "merge", "rename"))
    if how == "rename":
        row = rng.choice(rows)
        old = row["disposition"]
        row["disposition"] = rng.choice([other["disposition"] for other in rows])
        donor = [other for other in rows if other["disposition"] == row["disposition"]][-1]
        row |= {key: donor[key] for key in ("reason", "ref_request")}
        row["step"] = None if donor["step"] is None else row["step"] or donor["step"]
        how += f" {old} {row}"
    elif how == "cut":
        row = rng.choice([row for row in rows if row["stop"] - row["start"] > 1])
        at = rng.randrange(row["start"] + 1, row["stop"])
        rows.append(row | {"start": at})
        row["stop"] = at
        how += f" {row}"
    else:
        pairs = [(a, b) for a, b in itertools.pairwise(rows) if a["request"] == b["request"]]
        one, other = rng.choice(pairs)
        if how == "merge":
            one["stop"] = other["stop"]
            rows.remove(other)
        else:
            one["stop"] = other["start"] = other["start"] + rng.choice((-1, 1))
        how += f" {one}"
    _rewrite(path, table, rows)
    return f"{path.relative_to(root)} {how}"


def reshape_table(root: Path, rng: random.Random) -> str:
    """The file of a table has another form, its rows are the same."""
    path = _pick_table(root, rng)
    table = pq.read_table(path)
    name = rng.choice(table.column_names)
    at = table.column_names.index(name)
    how = rng.choice(FORMS)
    options: dict[str, Any] = {}
    if how == "drop":
        table = table.drop_columns([name])
    elif how == "add":
        table = table.append_column("extra", table[name])
    elif how == "order":
        names = rng.sample(table.column_names, table.num_columns)
        table = table.select(names)
    elif how == "type":
        kind = table.schema.field(name).type
        other = pa.large_string() if kind == pa.string() else pa.int64()
        other = pa.int32() if kind == pa.int64() else other
        if kind == pa.uint64():
            other = pa.uint32()
        table = table.set_column(at, name, table[name].cast(other))
    elif how == "nullable":
        fields = [field.with_nullable(True) for field in table.schema]
        table = table.cast(pa.schema(fields))
    elif how == "groups":
        options["row_group_size"] = max(1, table.num_rows // 3)
    elif how == "codec":
        options["compression"] = rng.choice(("snappy", "none", "gzip", "brotli", "lz4"))
    elif how == "plain":
        options |= {"use_dictionary": False, "data_page_version": "2.0"}
    elif how == "dictionary":
        options |= {"use_dictionary": True, "data_page_size": 64}
    elif how == "key":
        table = table.replace_schema_metadata({"note": "anything"})
        options["version"] = "2.6"
    if how == "schema":
        pq.write_table(table, path, store_schema=True, write_page_checksum=True)
    elif how == "nochecksum":
        pq.write_table(table, path, store_schema=False, write_page_checksum=False)
    else:
        write_table(path, table, **options)
    return f"{path.relative_to(root)} {how} {name} {options}"


# ---- documents


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        inner = [leaf for key in sorted(value) for leaf in _leaves(value[key], (*at, key))]
    elif isinstance(value, list):
        inner = [leaf for n, item in enumerate(value) for leaf in _leaves(item, (*at, n))]
    else:
        return [at]
    return [at, *inner] if at else inner


def _pick_document(root: Path, rng: random.Random) -> Path:
    kind = rng.choice(DOCUMENTS)
    return rng.choice(sorted(root.glob(kind)))


def edit_document(root: Path, rng: random.Random) -> str:
    """A field of a document says something else, is gone, or is new."""
    path = _pick_document(root, rng)
    document = load(path)
    leaf = rng.choice(_leaves(document))
    parent = document
    for key in leaf[:-1]:
        parent = parent[key]
    old, key = parent[leaf[-1]], leaf[-1]
    how = rng.choices(("change", "remove", "add"), (6, 1, 1))[0]
    new: Any = None
    if how == "remove":
        del parent[key]
    elif how == "add" and isinstance(parent, list):
        parent.append(old)
    elif how == "add":
        parent[rng.choice(("extra", "zz", "rows", "captured"))] = new = old
    else:
        new = parent[key] = _other_value(old, rng)
    path.write_bytes(canonical(document))
    return f"{path.relative_to(root)} {'.'.join(map(str, leaf))} {how} {old!r:.60} -> {new!r:.60}"


def _other_value(old: Any, rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return rng.choice((None, True, False, 0, 1, "", "0", [], {}))
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, rng.choice(NUMBERS), str(old), 2 * old))
    if isinstance(old, str) and len(old) in (32, 64) and rng.random() < 0.7:
        return rng.choice((old[::-1], old.upper(), old[:-1], "0" * len(old), old + "\n"))
    if isinstance(old, str):
        return rng.choice((old + "x", old.upper(), f"{old}\n", f"../{old}", *WORDS, old * 100))
    if isinstance(old, list) and len(old) > 1:
        return rng.choice((old[::-1], old[1:], [*old, old[0]], []))
    if isinstance(old, dict) and old:
        return {key: old[key] for key in list(old)[1:]}
    return rng.choice(("x", 1, [1], ["a", True], None))


def edit_bytes(root: Path, rng: random.Random) -> str:
    """A document is written in another way, or a byte of any file is another one."""
    if rng.random() < 0.5:
        path = _pick_document(root, rng)
        document = load(path)
        ways = (
            json.dumps(document, sort_keys=True).encode() + b"\n",
            canonical(document)[:-1],
            canonical(document) + b"\n",
            b"\xef\xbb\xbf" + canonical(document),
            canonical(document).replace(b":", b":1e0,", 1),
            canonical(document).replace(b"{", b'{"a":1,"a":1,', 1),
            canonical([document]),
            canonical(document | {"deep": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}),
            canonical(document | {"zz": 2**63}),
        )
        n = rng.randrange(len(ways))
        path.write_bytes(ways[n])
        return f"{path.relative_to(root)} way {n}"
    path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.relative_to(root)} bit of byte {at}"


# ---- files and records


def edit_files(root: Path, rng: random.Random) -> str:
    """A file is gone, cut, longer, a link, doubled under another name, or one more."""
    path = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    how = rng.choice(("gone", "cut", "longer", "link", "copy", "stray", "temporary"))
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif how == "link":
        moved = root / ".tmp-moved"
        os.replace(path, moved)
        path.symlink_to(moved)
    elif how == "copy":
        shutil.copy(path, path.with_name(rng.choice(("copy.json", "00000099.json", "0009.json"))))
    else:
        name = ".tmp-x" if how == "temporary" else rng.choice(("x", "00000050.json", "Bad Name"))
        path.with_name(name).write_bytes(b"{}\n")
        how += f" {name}"
    return f"{path.relative_to(root)} {how}"


def edit_chain(root: Path, rng: random.Random) -> str:
    """Records of a chain are gone, doubled, in another order or chain, or end it otherwise."""
    chains = sorted(path for path in (root / "ledger").iterdir() if path.is_dir())
    chain = rng.choice(chains)
    records = [load(path) for path in sorted(chain.glob("*.json"))]
    how = rng.choice(("gone", "twice", "swapped", "moved", "fence", "more", "last", "failed"))
    at = rng.randrange(1, len(records))
    if how == "gone":
        del records[at]
    elif how == "last":
        del records[-1]
    elif how == "twice":
        records.insert(at, dict(records[at]))
    elif how == "swapped":
        other = rng.randrange(1, len(records))
        records[at], records[other] = records[other], records[at]
    elif how == "fence":
        records[-1] |= {"type": "fence", "body": {"reason": "gone"}}
    elif how == "failed" and records[-1]["type"] == "close":
        records[-1]["body"] |= {"reason": "failed", "totals": {}}
    elif how == "more":
        records.append(records[at] | {"seq": len(records)})
    elif how == "moved":
        target = rng.choice(chains)
        others = [load(path) for path in sorted(target.glob("*.json"))]
        if target != chain:
            others.insert(len(others) - 1, records.pop(at))
            _write_chain(target, others)
    _write_chain(chain, records)
    return f"{chain.name} record {at} {how}"


def _write_chain(chain: Path, records: list[Json]) -> None:
    for path in chain.glob("*.json"):
        path.unlink()
    for seq, record in enumerate(records):
        record |= {"seq": seq, "chain": chain.name}
        (chain / f"{seq:08d}.json").write_bytes(canonical(record))


CHANGES: list[Change] = [
    edit_cell, edit_rows, move_span, reshape_table, edit_document, edit_bytes, edit_files,
    edit_chain, reframe,
]  # fmt: skip
WEIGHTS = [6, 3, 3, 2, 5, 1, 1, 2, 2]
