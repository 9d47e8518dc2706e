"""The provenance tables: their Arrow schemas, and Parquet in the one form the spec allows."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format import parquet
from actds.format.schema import REQUIRED_PROVENANCE

TableName = Literal[
    "tokens",
    "requests",
    "steps",
    "spans",
    "drops",
    "stalls",
    "occupancy",
    "readouts",
    "canary",
    "alerts",
    "attention",
    "roles",
    "origins",
    "sampled",
    "multiplicity",
]

DISPOSITIONS = (
    "captured",
    "cache_ref",
    "dropped",
    "aborted",
    "filtered",
    "undelivered",
    "thinned",
)
PHASES = ("prefill", "decode")
ROLES = ("system", "user", "assistant", "thinking", "tool", "template")
UNSERVED = ("skipped", "unbegun")
"""Finish reasons of requests that the engine was never given; they owe no position."""
FINISH_REASONS = ("stop", "length", "abort", "error", "unfinished", *UNSERVED)
EXTERNAL = "external"
"""Reason of a ``cache_ref`` whose KV came from outside the run (section 7.2)."""
FAILED_LOAD = "failed_load"
"""Reason of a drop: the step read KV blocks that had not arrived (section 7.4)."""
READOUTS_FULL = "readouts_full"
"""Reason of a drop that left no readouts either: their queue was full (section 7.8)."""
CHANGED_WEIGHTS = "changed_weights"
"""Reason of a drop: the step computed with other weights than those of its run (section 9.4)."""
QUEUE_FULL = "queue_full"
"""Reason of a drop: what is behind the host ring was too slow."""
REDACTED = "redacted"
"""Reason of a ``filtered`` position of a request that was redacted (section 8.6)."""
NOT_DRAWN = "not_drawn"
"""Reason of a ``thinned`` position."""
UNKNOWN_WEIGHTS = "unknown_weights"
"""A total in the close of a census chain: 1 where weights changed and nobody knows when."""
FLAG_SPECIAL, FLAG_BOS, FLAG_EOS = 1, 2, 4
FLAGS = FLAG_SPECIAL | FLAG_BOS | FLAG_EOS
UNKNOWN_FIELD = "import.unknown"
"""The run record's field with the columns of ``tokens`` of which nothing is known (section 6.3)."""


def _column(name: str, kind: pa.DataType, meaning: str, *, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null, metadata={"meaning": meaning})


_U16, _U32, _U64, _I64 = pa.uint16(), pa.uint32(), pa.uint64(), pa.int64()
_F32, _F64, _S = pa.float32(), pa.float64(), pa.string()

_REQUEST = _column("request", _U32, "request of the run")
_POSITION = _column("position", _U32, "position in the request, from 0")
_TOKEN_ID = _column("token_id", _U32, "token fed at the position")
_STEP = _column("step", _U64, "step that computed the row")
_START = _column("start", _U32, "first position")
_STOP = _column("stop", _U32, "position after the last")
_MAX_SEQ_LEN = _column("max_seq_len", _U32, "longest context of the step")
_DEPTH = _column("depth", _U32, "entries in the stage's queue")
QUEUES = [
    _column("queue_depth_stage1", _U32, "device staging slots in use", null=True),
    _column("queue_depth_stage2", _U32, "host ring slots in use", null=True),
    _column("queue_depth_stage3", _U32, "full buffers behind the one being encoded", null=True),
    _column("disk_write_latency_p99", _F64, "writing and syncing a file, last 10 s", null=True),
    _column(
        "compression_backlog_bytes",
        _U64,
        "rows in full buffers, not yet encoded",
        null=True,
    ),
    _column("cache_hit_ratio", _F64, "prompt tokens not computed, of requests begun", null=True),
]

_COLUMNS: dict[TableName, list[pa.Field]] = {
    "tokens": [
        _REQUEST,
        _POSITION,
        _TOKEN_ID,
        _column("phase", _S, "prefill for prompt positions, decode for generated ones"),
        _STEP,
        _column("attempt", _U16, "times the request had restarted before the row"),
        _column("chunk", _U32, "steps of the request before this one"),
        _column("flags", _U16, "bit 0 special token, bit 1 BOS, bit 2 EOS"),
        _column("inclusion", _F64, "probability that the row was stored with", null=True),
        _column("intervention", _U16, "what changed it: its number in the run record; 0 nothing"),
    ],
    "requests": [
        _column("request", _U32, "number of the request in the run, from 0"),
        _column("external_id", _S, "id that the client gave"),
        _column("internal_id", _S, "id inside the engine", null=True),
        _column("source", _S, "prompt source", null=True),
        _column("source_row", _I64, "record of the source, from 0", null=True),
        _column("prompt_len", _U32, "prompt tokens P"),
        _column("generated_len", _U32, "sampled tokens G"),
        _column("cached_tokens", _U32, "positions served from KV at first admission"),
        _column("engine_cached_tokens", _U32, "the same, as the engine reports", null=True),
        _column("n_preemptions", _U16, "times the request lost its KV blocks"),
        _column("arrival_ns", _I64, "wall clock", null=True),
        _column(
            "first_token_ns", _I64, "wall clock when the first sampled token was fed", null=True
        ),
        _column("finish_ns", _I64, "wall clock", null=True),
        _column("finish_reason", _S, "stop, length, abort, error, unfinished, skipped or unbegun"),
        _column("reason", _S, "why it was not served, or ended in an error", null=True),
        _column("token_digest", _S, "SHA-256 of the ids of [0, P+G-1) as uint32 LE", null=True),
        _column("sampling", _S, "canonical JSON of the sampling parameters", null=True),
        _column(
            "block_digests",
            pa.list_(pa.binary()),
            "prefix-block digests of the prompt, by block",
            null=True,
        ),
        _column("adapter", _S, "name of the LoRA adapter, null without one", null=True),
        _column("adapter_sha256", _S, "SHA-256 over its 'name sha256' lines", null=True),
        _column("labels", _S, "canonical JSON of the user's labels by name", null=True),
        _column("conversation", _S, "digest that requests of one conversation share", null=True),
        _column("turn", _U32, "its last user turn, from 0", null=True),
        _column("hooks", _S, "hooks of its rows, null for all", null=True),
    ],
    "steps": [
        _column("step", _U64, "number of the step in the run"),
        _column("t_ns", _I64, "wall clock when it was scheduled"),
        _column("duration_ns", _I64, "model execution in the worker", null=True),
        _column("batch_tokens", _U32, "tokens scheduled"),
        _column("n_requests", _U32, "requests scheduled"),
        _column("prefill_tokens", _U32, "scheduled prompt positions"),
        _column("decode_tokens", _U32, "scheduled generated positions"),
        _column("captured_tokens", _U32, "first computations whose row is stored"),
        _column("recomputed_tokens", _U32, "positions computed before, after a preemption"),
        _column("dropped_tokens", _U32, "rows lost to an overflow policy"),
        _column("aborted_tokens", _U32, "rows lost to an end before their commit"),
        _column("filtered_tokens", _U32, "rows left out by a filter"),
        _column("undelivered_tokens", _U32, "rows computed past the end of a request"),
        _column("rejected_tokens", _U32, "rows of drafts that the engine rejected"),
        _column("thinned_tokens", _U32, "rows not drawn, by a known probability"),
        _column("inclusion", _F64, "probability that a row of the step was stored with", null=True),
        _MAX_SEQ_LEN,
        _column("waiting", _U32, "requests waiting after scheduling"),
        _column("running", _U32, "requests running after scheduling"),
        _column("n_preempted", _U32, "requests preempted in the step"),
        _column("kv_usage", _F64, "share of KV blocks in use", null=True),
        *QUEUES,
        _column("kernel_mode", _S, "eager, compiled, piecewise or full (CUDA graphs)", null=True),
        _column("padded_tokens", _U32, "tokens the kernels ran, with padding", null=True),
        _column("drafted_tokens", _U32, "draft tokens that were verified", null=True),
        _column("accepted_tokens", _U32, "of these, accepted ones", null=True),
    ],
    "spans": [
        _REQUEST,
        _START,
        _STOP,
        _column("disposition", _S, "captured, cache_ref, dropped, aborted, filtered, ..."),
        _column(
            "reason", _S, "why, for all but captured; external or null for cache_ref", null=True
        ),
        _column("step", _U64, "step of the first position; null if never computed", null=True),
        _column("ref_request", _U32, "for cache_ref: request that computed it", null=True),
        _column("inclusion", _F64, "for thinned: that of the steps", null=True),
    ],
    "drops": [
        _column("drop", _U32, "number of the drop event, from 0"),
        _column("t_ns", _I64, "wall clock"),
        _column("step", _U64, "step whose slice was dropped"),
        _column("drop_reason", _S, "queue_full, dma_backpressure, ..."),
        _column("policy", _S, REQUIRED_PROVENANCE["capture.overflow_policy"]),
        _REQUEST,
        _column("start", _U32, "first position lost"),
        _STOP,
        _column("n_tokens", _U32, "tokens of the whole event"),
        _column("batch_tokens", _U32, "tokens of the step"),
        _MAX_SEQ_LEN,
        *QUEUES,
    ],
    "stalls": [
        _column("stage", _S, "staging, ring, pool or readouts"),
        _column("t_ns", _I64, "wall clock when it began"),
        _column("duration_ns", _I64, "how long the stage before it waited"),
        _DEPTH,
        _column("step", _U64, "step that waited", null=True),
    ],
    "occupancy": [
        _column("stage", _S, "staging, ring or pool"),
        _DEPTH,
        _column("capacity", _U32, "entries that the queue holds at most"),
        _column("duration_ns", _I64, "how long the queue stood at this depth"),
        _column("n_visits", _U64, "times the queue came to this depth"),
    ],
    "readouts": [
        _REQUEST,
        _POSITION,
        _TOKEN_ID,
        _STEP,
        _column("hook", _S, "hook whose row was read"),
        _column("norm", _F32, "Euclidean norm of the row"),
        _column("projections", pa.list_(_F32), "products with the seeded random directions"),
        _column("probes", pa.list_(_F32), "products with the user's probes"),
    ],
    "canary": [
        _column("request", _U32, "request of the run that was replayed alone"),
        _POSITION,
        _column("hook", _S, "hook whose rows were compared"),
        _column("step", _U64, "step that computed the stored row"),
        _column("token_id", _U32, "token fed at the position in the harvest"),
        _column("replayed_token_id", _U32, "token fed there in the replay"),
        _column("relative_l2", _F64, "distance of the two rows over the replayed row's norm"),
        _column("cosine", _F64, "cosine of the two rows"),
        _column("verdict", _S, "same, diverged (tokens differ before it) or foreign"),
    ],
    "alerts": [
        _REQUEST,
        _column("position", _U32, "of the row after which its score rose"),
        _column("step", _U64, "step that computed the row"),
        _column("score", _F64, "of the request from there on, above the threshold"),
        _column("kind", _S, "what was rare: drift or opening"),
        _column("hook", _S, "hook whose numbers were furthest off"),
    ],
    "attention": [
        _REQUEST,
        _column("position", _U32, "of the query"),
        _STEP,
        _column("layer", _U32, "layer of the model, from 0"),
        _column("head", _U32, "head of queries, from 0"),
        _column("keys", _U32, "keys in reach, its own among them"),
        _column("entropy", _F32, "of the attention over keys and sinks, in bits"),
        _column("first", _F32, "share of position 0"),
        _column("prompt", _F32, "share of the other prompt positions"),
        _column("generated", _F32, "share of generated positions"),
        _column("sinks", _F32, "share of what has no position"),
        _column(
            "roles", pa.list_(_F32), "shares of prompt roles, in their order; none where not known"
        ),
        _column("top", pa.list_(_U32), "positions with the 8 largest shares, largest first"),
        _column("shares", pa.list_(_F32), "their shares"),
    ],
    "roles": [
        _REQUEST,
        _START,
        _STOP,
        _column("role", _S, "system, user, assistant, thinking, tool or template"),
    ],
    "origins": [
        _REQUEST,
        _column("source_dataset", _S, "id of the dataset that the tokens were taken from"),
        _column("source_seal", _S, "digest of that dataset, as it was read"),
        _column("source_run", _S, "run of the source request"),
        _column("source_request", _U32, "request of that run"),
        _column("n_given", _U32, "positions from 0 that were given; the others were sampled"),
    ],
    "sampled": [
        _REQUEST,
        _column("position", _U32, "position that the token takes, P for the first"),
        _column("step", _U64, "step that computed its logits"),
        _column("token_id", _U32, "token that was sampled"),
        _column("entropy", _F32, "of the softmax of the model's own logits, in nats"),
        _column("logprob", _F32, "of the token under the same softmax, in nats"),
        _column("margin", _F32, "largest logit minus the second largest"),
        _column("scores", pa.list_(_F32), "of the probes that rules for shares read"),
    ],
    "multiplicity": [
        _column("run", _S, "run of the request"),
        _REQUEST,
        _START,
        _STOP,
        _column("count", _U32, "times the row was served: 1 + references, more than 1"),
    ],
}
SCHEMAS = {name: pa.schema(columns) for name, columns in _COLUMNS.items()}


@cache
def bare_schema(name: TableName) -> pa.Schema:
    """Return a table's schema as in a file: names, types and nullability."""
    return pa.schema([field.remove_metadata() for field in SCHEMAS[name]])


def empty(name: TableName) -> pa.Table:
    """Return a table of no rows."""
    return bare_schema(name).empty_table()


OF_SAMPLES: dict[str, object] = {
    "inclusion": None,
    "intervention": 0,
    "thinned_tokens": 0,
    "scores": [],
}
"""Columns that who stores every row as it is computed may leave out, and what they are then."""


def build(name: TableName, columns: Mapping[str, object]) -> pa.Table:
    """Return a table from one array, list or numpy array per column, with the spec's types.

    Raises:
        ActdsError: E109 when a column is missing, unknown, or null where it must not be.
    """
    schema = bare_schema(name)
    n = len(next(iter(columns.values()), ()))  # type: ignore[arg-type]
    left_out = (OF_SAMPLES.keys() & schema.names) - columns.keys()
    columns = {**columns, **{column: [OF_SAMPLES[column]] * n for column in left_out}}
    if set(columns) != set(schema.names):
        odd = sorted(set(columns) ^ set(schema.names))
        raise ActdsError(
            "E109", name, got=f"columns differ in {odd}", expected="the spec's columns"
        )
    table = pa.table([pa.array(columns[f.name], type=f.type) for f in schema], schema=schema)
    parquet.refuse_nulls(table, schema, name)
    return table


def is_served(requests: pa.Table) -> pa.ChunkedArray:
    """Return which lines of ``requests`` are of requests that the engine was given."""
    return pc.invert(pc.is_in(requests["finish_reason"], pa.array(UNSERVED)))


def to_parquet(name: TableName, table: pa.Table) -> bytes:
    """Return a table as Parquet bytes: zstd, page checksums, no Arrow schema in the footer.

    Raises:
        ActdsError: E109 when the table does not have the columns of the spec.

    Spec: 0.1 section 6.2.
    """
    parquet.check_columns(table.schema, bare_schema(name), name)
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        bare_schema(name),
        compression="zstd",
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.write_table(table.cast(bare_schema(name)), row_group_size=1 << 20)
    return sink.getvalue()


Parse = Callable[[TableName, bytes, str, "list[str] | None", "list[str] | None"], pa.Table]
"""What makes a table of a name, the bytes of its file, its path, the columns to read, and those
of them to return, all when ``None``: the others are checked and take no memory afterwards."""


def from_parquet(
    name: TableName,
    data: bytes | str,
    place: str,
    columns: list[str] | None = None,
    kept: list[str] | None = None,
    *,
    statistics: bool = False,
) -> pa.Table:
    """Return a table from Parquet bytes or a local file; its form is checked first.

    Args:
        name: which table.
        data: the file's bytes, or its path.
        place: what an error names.
        columns: columns to read, in the spec's order when ``None``.
        kept: those of them to return, all when ``None``.
        statistics: check those of the columns that are read.

    Raises:
        ActdsError: as ``parquet.read``.

    Spec: 0.1 section 6.2.
    """
    table = parquet.read(data, place, bare_schema(name), columns, statistics=statistics)
    return table if kept is None else table.select(kept)
