"""The documents of format 0.1: genesis, run record, shard manifest, ledger record, seal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    TypeAdapter,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

FORMAT_VERSION: Literal["0.1"] = "0.1"

Segment = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
"""One path segment, and so every id and hook name that becomes one."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Text = Annotated[str, StringConstraints(max_length=4096)]
RelativePath = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,63}(/[a-z0-9][a-z0-9._-]{0,63}){0,7}$", max_length=512
    ),
]
DType = Literal["bfloat16", "float16", "float32"]
Phase = Literal["prefill", "decode"]


HOOK_KINDS = "actds.hook_kinds"
"""Entry point group under which another package registers a hook kind of its own."""
OwnKind = Literal[
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
"""The kinds that the format itself knows."""


def _known_kind(kind: str) -> str:
    """Refuse a kind that neither the format nor an installed package knows.

    A kind that only a package knows is an agreement among those who have it: everybody else's
    reader refuses the dataset, as section 11 asks for.
    """
    built_in = get_args(OwnKind)
    if kind not in built_in and not entry_points(group=HOOK_KINDS, name=kind):
        known = " or ".join(map(repr, built_in))
        raise PydanticCustomError("literal_error", "Input should be {known}", {"known": known})
    return kind


HookKind = Annotated[
    str,
    AfterValidator(_known_kind),
    WithJsonSchema(TypeAdapter(OwnKind).json_schema()),
]


class Document(BaseModel):
    """A document of the format: frozen, strict, without unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Hook(Document):
    """A named place of the model whose output is stored, one array per shard.

    Spec: 0.1 section 3.1.
    """

    name: Segment = Field(description="array name, for example resid_post.10")
    kind: HookKind = Field(description="what stands at the place")
    layer: Count = Field(description="decoder layer, from 0")
    d_model: Annotated[int, Field(ge=1, le=2**20)] = Field(description="channels of a row")
    dtype: DType = Field(description="type of the stored rows, section 4.4")

    @model_validator(mode="after")
    def _named_by_place(self) -> Hook:
        # Auditors, loaders and people read the place from the name.
        if self.name != f"{self.kind}.{self.layer}":
            raise ValueError(f"hook {self.name} of {self.kind}, layer {self.layer}")
        return self


class Genesis(Document):
    """``actds.json``: what the dataset is, written once before anything else.

    Spec: 0.1 section 3.
    """

    format: Literal["actds"] = "actds"
    version: Literal["0.1"] = FORMAT_VERSION
    dataset: DatasetId = Field(description="random id of the dataset")
    created_ns: Count = Field(description="wall clock, nanoseconds since the epoch")
    writer: Text = Field(description="program and version that created the dataset")
    hooks: Annotated[list[Hook], Field(min_length=1, max_length=4096)]

    @model_validator(mode="after")
    def _unique_hooks(self) -> Genesis:
        if len({hook.name for hook in self.hooks}) != len(self.hooks):
            raise ValueError("two hooks of one name")
        return self


Origin = Literal["observed", "declared", "unknown"]
CloseReason = Literal["finished", "interrupted", "failed"]
ChainKind = Literal["writer", "census", "tool"]
"""Who writes a chain: a harvest's writer or census, or a tool that worked on the run later."""
PartTable = Literal[
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
"""Tables that are committed in parts, a run at a time."""
Scalar = bool | int | str


class ProvenanceField(Document):
    """One fact about how the rows came to be, and who says so.

    ``null`` is never a default: an unknown fact has a reason.

    Spec: 0.1 section 6.1.
    """

    value: Scalar | list[Scalar] | None
    origin: Origin
    reason: Text | None = Field(description="why the value is unknown, else null")

    @model_validator(mode="after")
    def _explained(self) -> ProvenanceField:
        unknown = self.origin == "unknown"
        if unknown != (self.value is None) or unknown != (self.reason is not None):
            raise ValueError("a field is null with a reason and origin unknown, or none of these")
        return self


REQUIRED_PROVENANCE: dict[str, str] = {
    "engine.name": "the serving engine, for example vllm",
    "engine.version": "its version",
    "engine.runner": "class of the model runner in the worker",
    "engine.scheduler": "class of the scheduler",
    "engine.own_process": "whether the engine core ran in its own process",
    "model.name": "name it is served under, else org/name of its repository, else its folder's",
    "model.architecture": "class of the loaded model",
    "model.config_sha256": "SHA-256 of config.json",
    "model.weights_sha256": "SHA-256 over the sorted 'name sha256' lines of the weight files",
    "model.n_layers": "decoder layers found in the worker",
    "model.d_model": "channels of the residual stream",
    "model.quantization": "quantization method, 'none' when there is none",
    "tokenizer.sha256": "SHA-256 of tokenizer.json",
    "tokenizer.chat_template_sha256": "SHA-256 of the template that was applied, 'none' if none",
    "numerics.dtype": "type the model computed in",
    "numerics.kv_cache_dtype": "type of the KV cache",
    "numerics.attention_backend": "attention implementation",
    "numerics.device": "device type of the worker",
    "numerics.matmul_precision": "torch float32 matmul precision",
    "numerics.deterministic": "whether torch ran deterministic algorithms",
    "serving.mode": "offline (actds write) or live (a server)",
    "serving.enforce_eager": "whether the engine ran without compilation",
    "serving.compilation_mode": "vLLM compilation mode",
    "serving.cudagraph_mode": "CUDA graph mode",
    "serving.prefix_caching": "whether the prefix cache was on",
    "serving.chunked_prefill": "whether prefill may be split over steps",
    "serving.async_scheduling": "whether steps are scheduled ahead of their results",
    "serving.block_size": "tokens of a KV block",
    "serving.n_kv_blocks": "KV blocks of the cache",
    "serving.max_model_len": "positions per request",
    "serving.max_num_seqs": "requests per step",
    "serving.max_num_batched_tokens": "tokens per step",
    "serving.tensor_parallel": "tensor-parallel ranks",
    "serving.pipeline_parallel": "pipeline-parallel ranks",
    "serving.data_parallel": "data-parallel ranks",
    "serving.speculative_method": "speculative decoding method, 'none' when there is none",
    "sampling.temperature": "decimal string",
    "sampling.max_tokens": "generated tokens at most",
    "sampling.seed": "engine seed",
    "capture.method": "how rows left the model",
    "capture.overflow_policy": "block, thin, drop_oldest or drop_newest",
    "capture.cast": "none, or the cast between the computed and the stored type",
    "capture.order": "permuted or sequence",
    "capture.rows_per_shard": "target rows of a shard",
    "capture.ring_nbytes": "bytes of the host ring",
    "capture.staging_nbytes": "bytes of the staging ring on the device",
    "capture.memory_nbytes": "bytes of all stages together, the bound that was stated",
    "capture.raw_threshold_nbytes": "backlog from which shards are written raw; 0 never",
    "capture.sampling": "all, or canonical JSON of the sampling rules",
    "capture.readouts": "none, or canonical JSON: norm, projections, seed, probes and their digest",
    "capture.check": "none, or canonical JSON: what the rows were compared with, and distances",
    "prompts.source": "what the prompts were read from, last path segment",
    "prompts.sha256": "SHA-256 of the source file; digest of a source dataset; or the reason",
    "prompts.n_records": "records read",
    "prompts.n_skipped": "records skipped, each with a reason in the requests table",
    "machine.platform": "operating system and architecture",
    "machine.processor": "CPU or GPU name",
    "machine.python": "Python version",
    "machine.torch": "torch version",
}
"""Names that a run record MUST hold; further names are allowed."""


PART = "prompts.part"
"""Field of the run record: the share of the prompts that the run was to serve, as ``3/16``."""


def parse_part(text: str) -> tuple[int, int]:
    """Return number and count of a part, ``K/N`` with K from 1 to N; ValueError for none."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})/([1-9][0-9]{0,6})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError("K/N, the K-th of N parts, as 3/16")
    return int(match[1]), int(match[2])


class RunRecord(Document):
    """``runs/<run>.json``: the effective configuration and numerics of one harvest.

    Spec: 0.1 section 6.
    """

    format: Literal["actds.run"] = "actds.run"
    version: Literal["0.1"] = FORMAT_VERSION
    dataset: DatasetId
    run: Segment
    started_ns: Count
    fields: dict[
        Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)+$")],
        ProvenanceField,
    ]

    @model_validator(mode="after")
    def _complete(self) -> RunRecord:
        missing = sorted(set(REQUIRED_PROVENANCE) - set(self.fields))
        if missing:
            raise ValueError(f"fields missing: {', '.join(missing)}")
        return self

    @property
    def part(self) -> str:
        """Return the part of the prompts that the run was to serve, empty for all."""
        field = self.fields.get(PART)
        return "" if field is None or field.value is None else str(field.value)


class FileEntry(Document):
    """One file of a shard or one table part.

    Spec: 0.1 section 5.2.
    """

    path: RelativePath = Field(description="relative to the shard folder; of a part, the dataset")
    nbytes: Count
    sha256: Digest


class RowCounts(Document):
    """How many rows of a hook have no values that a trainer can use; no row counts twice.

    Spec: 0.1 section 5.2.
    """

    not_finite: Count = Field(description="rows with a value that is NaN or infinite")
    zero: Count = Field(description="rows that are 0.0 or -0.0 in every channel")
    infinite: Count = Field(
        default=0,
        description="of `not_finite`, rows with an infinity and no NaN; left out where it is 0",
    )

    @model_serializer(mode="wrap")
    def _without_a_zero(self, dump: SerializerFunctionWrapHandler) -> dict[str, int]:
        fields: dict[str, int] = dump(self)
        return fields if self.infinite else {k: n for k, n in fields.items() if k != "infinite"}

    @classmethod
    def by_hook(cls, parts: Iterable[Mapping[str, RowCounts]]) -> dict[str, RowCounts]:
        """Return the counts of several shards together, by hook."""
        total: dict[str, Counter[str]] = {}
        for part in parts:
            for hook, counts in part.items():
                total.setdefault(hook, Counter()).update(dict(counts))
        return {hook: cls(**counts) for hook, counts in total.items()}


class ShardManifest(Document):
    """``shards/<shard>/shard.json``: the files and rows of one shard.

    Spec: 0.1 section 5.2.
    """

    format: Literal["actds.shard"] = "actds.shard"
    version: Literal["0.1"] = FORMAT_VERSION
    dataset: DatasetId
    run: Segment
    chain: Segment = Field(description="ledger chain of the writer")
    shard: Segment
    phase: Phase
    n_rows: Annotated[int, Field(ge=1, le=2**32)]
    hooks: Annotated[list[Segment], Field(min_length=1)]
    values: dict[Segment, RowCounts] = Field(description="row counts of every hook")
    order: Literal["permuted", "sequence"]
    permutation_seed: Count | None = Field(description="seed of the row order; null in sequence")
    compression: Literal["normal", "raw"]
    first_step: Count
    last_step: Count
    row_set_sha256: Digest = Field(description="digest of the sorted (request, position) pairs")
    files: Annotated[list[FileEntry], Field(min_length=1)]
    root: Digest = Field(description="Merkle root over the canonical file entries")


class OpenBody(Document):
    """First record of a chain."""

    kind: ChainKind
    run: Segment
    started_ns: Count
    software: Text


class RunBody(Document):
    """The run record is durable."""

    run: Segment
    sha256: Digest


class ShardBody(Document):
    """A shard is committed: the acknowledgement of its rows."""

    shard: Segment
    manifest_sha256: Digest
    n_rows: Count


class PartBody(Document):
    """A part of a table is committed."""

    table: PartTable
    file: FileEntry
    n_rows: Count


class ReplaceBody(Document):
    """A shard stands for another one with the same rows: the other is read no more.

    Spec: 0.1 section 8.5.
    """

    replaced: Segment = Field(description="shard that is read no more")
    shard: Segment = Field(description="shard that stands in its place")
    manifest_sha256: Digest
    n_rows: Count


class RedactBody(Document):
    """Requests are gone from a file: it is read no more, and another stands in its place.

    Spec: 0.1 section 8.6.
    """

    requests: Annotated[list[Count], Field(min_length=1)] = Field(
        description="all requests of the run that are gone with this record or others, ascending"
    )
    replaced: RelativePath = Field(description="manifest of a shard, or part of a table")
    file: FileEntry | None = Field(
        description="what stands in its place; null for a shard without a row left"
    )
    n_rows: Count = Field(description="rows of the file, or of the shard")


class CloseBody(Document):
    """The writer of the chain ended and commits nothing more.

    ``totals`` of a writer chain: ``rows``, ``dropped_tokens``, ``recomputed_tokens``; of a census
    chain: ``requests``, ``scheduled_tokens``, and one count of positions per disposition.
    """

    reason: CloseReason
    totals: dict[Segment, Count]


class FenceBody(Document):
    """Somebody else ended the chain, because its writer is gone."""

    reason: Text


RecordType = Literal["open", "run", "shard", "part", "replace", "redact", "close", "fence"]
Body = OpenBody | RunBody | ShardBody | PartBody | ReplaceBody | RedactBody | CloseBody | FenceBody
BODIES: dict[RecordType, type[Document]] = {
    "open": OpenBody,
    "run": RunBody,
    "shard": ShardBody,
    "part": PartBody,
    "replace": ReplaceBody,
    "redact": RedactBody,
    "close": CloseBody,
    "fence": FenceBody,
}


class LedgerRecord(Document):
    """``ledger/<chain>/<seq>.json``: one link of a chain.

    Spec: 0.1 section 8.
    """

    format: Literal["actds.ledger"] = "actds.ledger"
    version: Literal["0.1"] = FORMAT_VERSION
    dataset: DatasetId
    chain: Segment
    seq: Count
    prev: Digest = Field(description="SHA-256 of the record before; 64 zeros for the first")
    type: RecordType
    body: dict[str, object]

    @model_validator(mode="after")
    def _body_of_type(self) -> LedgerRecord:
        BODIES[self.type].model_validate(self.body)
        return self

    def typed_body(self) -> Body:
        """Return the body as the model of its type."""
        return BODIES[self.type].model_validate(self.body)  # type: ignore[return-value]


class Head(Document):
    """Where a chain ended."""

    n_records: Count
    sha256: Digest = Field(description="digest of its last record")
    state: Literal["closed", "fenced"]


class Seal(Document):
    """``seal/<n>.json``: the closed dataset.

    Spec: 0.1 section 8.4.
    """

    format: Literal["actds.seal"] = "actds.seal"
    version: Literal["0.1"] = FORMAT_VERSION
    dataset: DatasetId
    n: Annotated[int, Field(ge=1)]
    sealed_ns: Count
    previous: Digest | None = Field(description="digest of seal n-1, null for the first")
    genesis_sha256: Digest
    heads: dict[Segment, Head]
    root: Digest = Field(description="Merkle root over the canonical {chain: head} entries")
    totals: dict[Segment, Count] = Field(
        description="rows, requests, scheduled, captured, cache_ref, dropped, aborted, filtered, "
        "undelivered, recomputed, rejected, unresolved, external"
    )
    multiplicity: FileEntry
