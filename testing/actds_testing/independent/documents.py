"""The shapes of the documents: the tables of sections 3, 5.2, 6.1, 8.2 and 8.4."""

from __future__ import annotations

import re
from collections.abc import Callable

from actds_testing.independent.findings import need
from actds_testing.independent.layout import Json, is_path, is_segment

Shape = Callable[[object], bool]
"""Says whether a value has the type and range of its field."""


def integer(low: int = 0, high: int = 2**63 - 1) -> Shape:
    return lambda value: type(value) is int and low <= value <= high


def matching(pattern: str) -> Shape:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def one_of(*words: str) -> Shape:
    return lambda value: isinstance(value, str) and value in words


def text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 4096


def null(value: object) -> bool:
    return value is None


def either(*shapes: Shape) -> Shape:
    return lambda value: any(shape(value) for shape in shapes)


def list_of(shape: Shape) -> Shape:
    return lambda value: isinstance(value, list) and all(map(shape, value))


def map_of(key: Shape, item: Shape) -> Shape:
    return lambda value: (
        isinstance(value, dict) and all(key(k) and item(v) for k, v in value.items())
    )


def document(**fields: Shape) -> Shape:
    return lambda value: not _odd_fields(value, fields)


def _odd_fields(value: object, fields: dict[str, Shape]) -> list[str]:
    """Return what is wrong with the fields of a document, in words."""
    if not isinstance(value, dict):
        return ["no object"]
    odd = [f"lacks {name}" for name in fields if name not in value]
    odd += [f"has {name}" for name in value if name not in fields]
    return odd + [f"odd {n}" for n, shape in fields.items() if n in value and not shape(value[n])]


COUNT, DIGEST, DATASET = integer(), matching(r"[0-9a-f]{64}"), matching(r"[0-9a-f]{32}")
SCALAR = either(lambda value: isinstance(value, bool | str), integer(1 - 2**63))
ROW_COUNTS = document(not_finite=COUNT, zero=COUNT)
ROW_COUNTS_WITH_INFINITE = document(not_finite=COUNT, zero=COUNT, infinite=COUNT)
FILE = document(path=is_path, nbytes=COUNT, sha256=DIGEST)
KINDS = [
    "embed",
    "resid_pre",
    "resid_mid",
    "resid_post",
    "attn_out",
    "attn_out_post",
    "z",
    "q",
    "k",
    "v",
    "mlp_in",
    "mlp_out",
    "mlp_out_post",
    "router",
    "final",
]
DTYPES = ("bfloat16", "float16", "float32")
TABLES = [
    "requests",
    "steps",
    "spans",
    "roles",
    "origins",
    "sampled",
    "drops",
    "stalls",
    "occupancy",
    "readouts",
    "canary",
    "alerts",
    "attention",
]
TOTALS = [
    "rows",
    "requests",
    "scheduled",
    "captured",
    "cache_ref",
    "dropped",
    "aborted",
    "filtered",
    "undelivered",
    "recomputed",
    "rejected",
    "thinned",
    "unresolved",
    "external",
]

HOOK = document(
    name=is_segment,
    kind=one_of(*KINDS),
    layer=COUNT,
    d_model=integer(1, 1 << 20),
    dtype=one_of(*DTYPES),
)
HEAD = document(n_records=COUNT, sha256=DIGEST, state=one_of("closed", "fenced"))
FIELD = document(
    value=either(SCALAR, list_of(SCALAR), null),
    origin=one_of("observed", "declared", "unknown"),
    reason=either(text, null),
)
BODIES = {
    "open": document(
        kind=one_of("writer", "census", "tool"), run=is_segment, started_ns=COUNT, software=text
    ),
    "run": document(run=is_segment, sha256=DIGEST),
    "shard": document(shard=is_segment, manifest_sha256=DIGEST, n_rows=COUNT),
    "part": document(table=one_of(*TABLES), file=FILE, n_rows=COUNT),
    "replace": document(
        replaced=is_segment, shard=is_segment, manifest_sha256=DIGEST, n_rows=COUNT
    ),
    "redact": document(
        requests=list_of(COUNT), replaced=is_path, file=either(FILE, null), n_rows=COUNT
    ),
    "close": document(
        reason=one_of("finished", "interrupted", "failed"), totals=map_of(is_segment, COUNT)
    ),
    "fence": document(reason=text),
}
_HEADER = {"version": one_of("0.1"), "dataset": DATASET}
FIELDS: dict[str, dict[str, Shape]] = {
    "actds": dict(
        **_HEADER, format=one_of("actds"), created_ns=COUNT, writer=text, hooks=list_of(HOOK)
    ),
    "actds.run": dict(
        **_HEADER,
        format=one_of("actds.run"),
        run=is_segment,
        started_ns=COUNT,
        fields=map_of(matching(r"[a-z0-9_]+(\.[a-z0-9_]+)+"), FIELD),
    ),
    "actds.shard": dict(
        **_HEADER,
        format=one_of("actds.shard"),
        run=is_segment,
        chain=is_segment,
        shard=is_segment,
        phase=one_of("prefill", "decode"),
        n_rows=integer(1, 1 << 32),
        hooks=list_of(is_segment),
        values=map_of(is_segment, either(ROW_COUNTS, ROW_COUNTS_WITH_INFINITE)),
        order=one_of("permuted", "sequence"),
        permutation_seed=either(COUNT, null),
        compression=one_of("normal", "raw"),
        first_step=COUNT,
        last_step=COUNT,
        row_set_sha256=DIGEST,
        files=list_of(FILE),
        root=DIGEST,
    ),
    "actds.ledger": dict(
        **_HEADER,
        format=one_of("actds.ledger"),
        chain=is_segment,
        seq=COUNT,
        prev=DIGEST,
        type=one_of(*BODIES),
        body=lambda value: isinstance(value, dict),
    ),
    "actds.seal": dict(
        **_HEADER,
        format=one_of("actds.seal"),
        n=integer(1),
        sealed_ns=COUNT,
        previous=either(DIGEST, null),
        genesis_sha256=DIGEST,
        heads=map_of(is_segment, HEAD),
        root=DIGEST,
        totals=document(**dict.fromkeys(TOTALS, COUNT)),
        multiplicity=FILE,
    ),
}

PROVENANCE = [
    "engine.name",
    "engine.version",
    "engine.runner",
    "engine.scheduler",
    "engine.own_process",
    "model.name",
    "model.architecture",
    "model.config_sha256",
    "model.weights_sha256",
    "model.n_layers",
    "model.d_model",
    "model.quantization",
    "tokenizer.sha256",
    "tokenizer.chat_template_sha256",
    "numerics.dtype",
    "numerics.kv_cache_dtype",
    "numerics.attention_backend",
    "numerics.device",
    "numerics.matmul_precision",
    "numerics.deterministic",
    "serving.mode",
    "serving.enforce_eager",
    "serving.compilation_mode",
    "serving.cudagraph_mode",
    "serving.prefix_caching",
    "serving.chunked_prefill",
    "serving.async_scheduling",
    "serving.block_size",
    "serving.n_kv_blocks",
    "serving.max_model_len",
    "serving.max_num_seqs",
    "serving.max_num_batched_tokens",
    "serving.tensor_parallel",
    "serving.pipeline_parallel",
    "serving.data_parallel",
    "serving.speculative_method",
    "sampling.temperature",
    "sampling.max_tokens",
    "sampling.seed",
    "capture.method",
    "capture.overflow_policy",
    "capture.cast",
    "capture.order",
    "capture.rows_per_shard",
    "capture.ring_nbytes",
    "capture.staging_nbytes",
    "capture.memory_nbytes",
    "capture.raw_threshold_nbytes",
    "capture.sampling",
    "capture.readouts",
    "capture.check",
    "prompts.source",
    "prompts.sha256",
    "prompts.n_records",
    "prompts.n_skipped",
    "machine.platform",
    "machine.processor",
    "machine.python",
    "machine.torch",
]


def conform(value: Json, format: str, place: str) -> None:
    """Raise E103 unless a document has the shape of its format."""
    odd = _odd_fields(value, FIELDS[format])
    need(not odd, "E103", place, ", ".join(odd))


def conform_body(record: Json, place: str) -> None:
    known = BODIES[record["type"]](record["body"])
    need(known, "E103", place, f"no body of a {record['type']}")


def conform_genesis(genesis: Json, place: str) -> None:  # 3
    conform(genesis, "actds", place)
    names = [hook["name"] for hook in genesis["hooks"]]
    places = [f"{hook['kind']}.{hook['layer']}" for hook in genesis["hooks"]]
    need(names == places, "E103", place, "a hook that is not named by its place")
    need(1 <= len(names) <= 4096, "E103", place, f"{len(names)} hooks")
    need(len(set(names)) == len(names), "E103", place, "two hooks have one name")


def conform_run(record: Json, place: str) -> None:  # 6.1
    conform(record, "actds.run", place)
    lacking = set(PROVENANCE) - record["fields"].keys()
    need(not lacking, "E103", place, f"lacks {sorted(lacking)}")
    for name, field in record["fields"].items():
        unknown = field["origin"] == "unknown"
        explained = (field["value"] is None) == unknown == (field["reason"] is not None)
        need(explained, "E402", place, f"{name} is {field}")
