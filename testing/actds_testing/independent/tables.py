"""Section 6: the form of Parquet files, the columns of the tables, their closed lists of words."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from actds_testing.independent.findings import Breach, Findings, need
from actds_testing.independent.layout import Folder, Json
from actds_testing.independent.ledger import Run
from actds_testing.independent.manifests import TOKENS, Shard
from actds_testing.independent.pages import check_file, check_statistics

_QUEUES = """queue_depth_stage1 uint32? queue_depth_stage2 uint32? queue_depth_stage3 uint32?
    disk_write_latency_p99 float64? compression_backlog_bytes uint64? cache_hit_ratio float64?"""
COLUMNS = {  # 6.3; a question mark stands for: may be null
    "tokens": """request uint32 position uint32 token_id uint32 phase string step uint64
        attempt uint16 chunk uint32 flags uint16 inclusion float64? intervention uint16""",
    "requests": """request uint32 external_id string internal_id string? source string?
        source_row int64? prompt_len uint32 generated_len uint32 cached_tokens uint32
        engine_cached_tokens uint32? n_preemptions uint16 arrival_ns int64? first_token_ns int64?
        finish_ns int64? finish_reason string reason string? token_digest string?
        sampling string? block_digests list<binary>? adapter string? adapter_sha256 string?
        labels string? conversation string? turn uint32? hooks string?""",
    "steps": f"""step uint64 t_ns int64 duration_ns int64? batch_tokens uint32 n_requests uint32
        prefill_tokens uint32 decode_tokens uint32 captured_tokens uint32 recomputed_tokens uint32
        dropped_tokens uint32 aborted_tokens uint32 filtered_tokens uint32
        undelivered_tokens uint32 rejected_tokens uint32 thinned_tokens uint32
        inclusion float64? max_seq_len uint32 waiting uint32
        running uint32 n_preempted uint32 kv_usage float64? {_QUEUES} kernel_mode string?
        padded_tokens uint32? drafted_tokens uint32? accepted_tokens uint32?""",
    "spans": """request uint32 start uint32 stop uint32 disposition string reason string?
        step uint64? ref_request uint32? inclusion float64?""",
    "roles": "request uint32 start uint32 stop uint32 role string",
    "origins": """request uint32 source_dataset string source_seal string source_run string
        source_request uint32 n_given uint32""",
    "sampled": """request uint32 position uint32 step uint64 token_id uint32 entropy float
        logprob float margin float scores list<float>""",
    "drops": f"""drop uint32 t_ns int64 step uint64 drop_reason string policy string
        request uint32 start uint32 stop uint32 n_tokens uint32 batch_tokens uint32
        max_seq_len uint32 {_QUEUES}""",
    "stalls": "stage string t_ns int64 duration_ns int64 depth uint32 step uint64?",
    "occupancy": """stage string depth uint32 capacity uint32 duration_ns int64
        n_visits uint64""",
    "readouts": """request uint32 position uint32 token_id uint32 step uint64 hook string
        norm float projections list<float> probes list<float>""",
    "canary": """request uint32 position uint32 hook string step uint64 token_id uint32
        replayed_token_id uint32 relative_l2 float64 cosine float64 verdict string""",
    "alerts": "request uint32 position uint32 step uint64 score float64 kind string hook string",
    "attention": """request uint32 position uint32 step uint64 layer uint32 head uint32
        keys uint32 entropy float first float prompt float generated float sinks float
        roles list<float> top list<uint32> shares list<float>""",
    "multiplicity": "run string request uint32 start uint32 stop uint32 count uint32",
}
UNSERVED = ("skipped", "unbegun")  # 7.1: these owe nothing
WORDS = {
    "phase": ("prefill", "decode"),
    "disposition": (
        "captured",
        "cache_ref",
        "dropped",
        "aborted",
        "filtered",
        "undelivered",
        "thinned",
    ),
    "finish_reason": ("stop", "length", "abort", "error", "unfinished", "skipped", "unbegun"),
    "role": ("system", "user", "assistant", "thinking", "tool", "template"),
}
TYPES = {  # 6.2
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "list<binary>": pa.list_(pa.binary()),
    "list<float>": pa.list_(pa.float32()),
    "list<uint32>": pa.list_(pa.uint32()),
}


def read_rows(data: bytes, table: str, n_rows: int | None, place: str) -> list[Json]:
    """Return the rows of a table: form, number of rows, columns, nulls, words.

    Raises:
        Breach: E206, E203, E109, E103.
    """
    statistics = check_file(data, place)
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            keys = file.metadata.metadata or {}
            need(b"ARROW:schema" not in keys, "E206", place, "carries an Arrow schema")
            counted = file.metadata.num_rows
            columns = dict(zip(*[iter(COLUMNS[table].split())] * 2, strict=True))
            schema = file.schema_arrow
            need(schema.names == list(columns), "E109", place, f"columns {schema.names}")
            for name, kind in columns.items():
                want = TYPES[kind.rstrip("?")]
                need(schema.field(name).type == want, "E109", place, f"{name} is no {want}")
            for g, said in enumerate(statistics):
                group = file.read_row_group(g)
                for (name, kind), one in zip(columns.items(), said, strict=True):
                    values = group[name].to_pylist()
                    if kind.startswith("list"):
                        values = [item for row in values for item in row or ()]
                        one = {n: v for n, v in one.items() if n != 3}  # of levels, not of items
                    leaf = kind.rstrip("?").removeprefix("list<").rstrip(">")
                    check_statistics(one, leaf, values, f"{place} {name}")
            whole = file.read()
            whole.validate(full=True)
            rows = whole.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Breach("E206", place, error) from None
    need(len(rows) == counted, "E203", place, f"{len(rows)} rows, expected {counted}")
    for name, kind in columns.items():
        never = any(row[name] is None for row in rows) and kind[-1] != "?"
        need(not never, "E109", place, f"{name} has a null")
        if kind.startswith("list"):
            items = (item for row in rows for item in row[name] or ())
            need(None not in items, "E109", place, f"{name} has a null in a list")
    need(n_rows in (None, counted), "E203", place, f"{counted} rows, expected {n_rows}")
    for name in columns:
        if name in WORDS:
            odd = {row[name] for row in rows} - set(WORDS[name])
            need(not odd, "E103", place, f"{name} {sorted(odd)}")
    return rows


def read_tokens(folder: Folder, shard: Shard) -> list[Json]:
    """Return the token table of a shard, line i for row i."""
    data = shard.read(folder, TOKENS)
    return read_rows(data, "tokens", shard.manifest["n_rows"], shard.path(TOKENS))


def read_run_tables(folder: Folder, run: Run, found: Findings) -> dict[str, list[Json]]:
    """Return the tables of a run, parts in the order of their numbers; a bad part is noted."""
    tables: dict[str, list[Json]] = {}
    for table, parts in run.parts.items():
        rows = tables.setdefault(table, [])
        for part in sorted(parts, key=lambda part: int(part["n"])):
            path = part["file"]["path"]
            try:
                data = folder.read(path, part["file"])
                read = read_rows(data, table, part["n_rows"], path)
                rows += [row | {"part": path} for row in read]
            except Breach as breach:
                found.all.append(breach.finding)
                run.whole = False
    return tables
