"""The settings of a harvest: name, type, bounds, default and help of each, defined once.

They are the options of ``actds write`` and ``actds plan``, the keyword arguments of
``actds.write`` and ``actds.plan``, and the keys under ``actds`` in ``--additional-config``. Every
process of a harvest gets the model: a new setting is a field here and the place that uses it.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from actds.errors import ActdsError
from actds.format.inclusion import Design, Unit, salt_of
from actds.format.labels import MAX_LABELS, MAX_LENGTH
from actds.format.schema import parse_part
from actds.format.telemetry import Attending
from actds.store import layout, local_folder
from actds.version import __version__
from actds_writers.model_folder import find_model
from actds_writers.sampling import POLICIES, HookNames, SamplingRules, keep_rules

if TYPE_CHECKING:
    from actds_writers.ipc.messages import Fact
    from actds_writers.model_folder import SpecialTokens

Order = Literal["permuted", "sequence"]
DTypeName = Literal["bfloat16", "float16", "float32"]

MIB = 1 << 20


def _text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


Location = Annotated[
    str, BeforeValidator(_text), Field(min_length=1, json_schema_extra={"format": "path"})
]


def _policy(name: str) -> str:
    if name not in POLICIES:
        *names, last = map(repr, POLICIES)
        raise ValueError(f"{', '.join(names)} or {last}")
    return name


def _keep(text: str) -> str:
    keep_rules(text)
    return text


Overflow = Annotated[
    str, AfterValidator(_policy), Field(json_schema_extra={"enum": list(POLICIES)})
]


def _names(columns: Any) -> Any:
    if isinstance(columns, str):
        return tuple(name.strip() for name in columns.split(",")) if columns else ()
    return tuple(columns) if isinstance(columns, list) else columns


def _label_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    fits = all(1 <= len(name) <= MAX_LENGTH and name.isprintable() for name in names)
    if not fits or len(set(names)) != len(names) or len(names) > MAX_LABELS:
        raise ValueError(f"at most {MAX_LABELS} names, none empty, long or twice")
    return names


LabelColumns = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    AfterValidator(_label_columns),
    WithJsonSchema({"type": "string"}),
]


def _layers(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", text):
        raise ValueError("layers, as 3,10")
    return text


def _part(text: str) -> str:
    number, n_parts = parse_part(text)
    return f"{number}/{n_parts}"


Folder = Annotated[Path, Field(strict=False)]
Rate = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """A strict model: no conversion from strings, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the settings with these fields.

        Raises:
            ActdsError: E009 with the field, its value and what is allowed.
        """
        return settings_of(cls, fields, lambda key: key or cls.__name__, "E009")


class HarvestSettings(Settings):
    """Settings of every harvest, offline or live."""

    out: Location = Field(
        description="Dataset to write: a new folder, or a URI such as s3://bucket/name"
    )
    hooks: str = Field(
        description="Activations to capture: resid_post:10,20, resid_post:all, 'mlp_in:8;mlp_out:8'"
    )
    # NumPy, which engines seed as well, takes 32 bits.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Seed of the engine and of the row order"
    )
    store_dtype: DTypeName | None = Field(
        default=None,
        description="Store rows in another type than the model computes in; recorded as a cast",
    )
    order: Order = Field(default="permuted", description="Row order inside a shard")
    rows_per_shard: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Default: 65536, fewer if memory is short"
    )
    overflow: Overflow = Field(
        default="block",
        description="When the ring is full: "
        + "; ".join(f"{name}, {policy.summary}" for name, policy in POLICIES.items()),
    )
    thin_min: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1 / 64,
        description="With --overflow thin: the lowest probability of a row. When not even these "
        "rows have room, the engine waits",
    )
    thin_unit: Unit = Field(
        default="row",
        description="Draw rows, or whole requests, each with the probability of its first step",
    )
    keep: Annotated[str, AfterValidator(_keep)] = Field(
        default="",
        description="Store a share of the rows by rules, the first that holds: 'decode: 1; "
        "position 0-16: 1; 0.1'. A rule is prefill, decode, position A-B, entropy A-B (in nats, of "
        "the logits that the token came from), probe HOOK K >= X or < X (at the row that it came "
        "from), role NAME, label NAME=GLOB, xarg NAME=GLOB (of a served request) or id GLOB, "
        "joined by 'and'",
        json_schema_extra={"metavar": "RULES"},
    )
    always: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="With --overflow drop_newest: store this share of the rows of the dropped "
        "steps, too, by hash, in a reserve of the ring. When that is full the engine waits, and "
        "one that serves traffic drops them as well",
        json_schema_extra={"metavar": "F"},
    )
    ring_mib: Annotated[int, Field(ge=1)] = Field(
        default=256, description="Shared memory between engine and writer; at least two steps"
    )
    commit_seconds: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Commit rows that are older, in smaller shards; without it only full ones, "
        "and the rest at the end",
    )
    # Smaller shards spend their time in fsync, not in encoding: raw gains nothing there.
    raw_mib: Annotated[int, Field(ge=0)] = Field(
        default=64,
        description="Write a shard uncompressed when this much waits to be committed; 0 never. "
        "See actds recompress",
    )
    staging_mib: Annotated[int, Field(ge=1)] = Field(
        default=64, description="Buffer on the device for steps not copied yet; at least one step"
    )
    readouts: bool = Field(
        default=True,
        description="Store norm and 8 seeded projections of every computed row, dropped rows "
        "included",
    )
    probes: Location | None = Field(
        default=None,
        description="Also store products with your probes: .npy or .safetensors, (n_probes, "
        "d_model) per hook",
    )
    entropy: bool = Field(
        default=False,
        description="Store entropy, log-probability and margin of every sampled token, from the "
        "logits that the engine computes anyway",
    )
    intervene: Location | None = Field(
        default=None,
        description="Change rows while they are computed, as this JSON file says: add a vector, "
        "project a direction off, clamp a coordinate or feature, patch rows in. Of a served "
        "request those that it names in vllm_xargs, actds_intervene. Changed rows are marked",
        json_schema_extra={"metavar": "FILE"},
    )
    profile: Location | None = Field(
        default=None,
        description="Look at the readouts of requests while they are computed, beside this profile "
        "of actds profile: those that leave its regime are in the table alerts",
        json_schema_extra={"metavar": "FILE"},
    )
    alert_url: Annotated[str, Field(pattern="^https?://")] | None = Field(
        default=None,
        description="With --profile: post each request's first alert to this URL, as JSON",
        json_schema_extra={"metavar": "URL"},
    )
    attention: Annotated[str, AfterValidator(_layers)] | None = Field(
        default=None,
        description="Look at the attention of these layers, as 3,10, at decode steps of a share of "
        "the requests, which are then not served from the prefix cache: table attention, each line "
        "proved by what its head gave out",
        json_schema_extra={"metavar": "LAYERS"},
    )
    attention_every: Annotated[int, Field(ge=1)] = Field(
        default=64,
        description="With --attention: look at every N-th generated token",
        json_schema_extra={"option": "--every", "metavar": "N"},
    )
    attention_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="With --attention: share of the requests, by hash",
        json_schema_extra={"metavar": "F"},
    )
    check: bool = Field(
        default=True,
        description="Compare the rows of two short prompts with the model's own before the "
        "harvest starts",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Serve Prometheus metrics on this port, 0 for a free one; needs the extra "
        "metrics",
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address of the metrics server; it has no authentication"
    )

    @model_validator(mode="after")
    def _draws_what_it_knows(self) -> Self:
        rules = keep_rules(self.keep)
        if any(rule.reads_sampled for rule in rules) and not self.entropy:
            raise ValueError("keep: entropies and scores are known with entropy only")
        if any(rule.probe for rule in rules) and not (self.probes and self.readouts):
            raise ValueError("keep: scores are known with probes and readouts only")
        if self.intervene is not None and getattr(self, "canary", None) is not None:
            raise ValueError("canary: without intervene, which a replay of the tokens lacks")
        if self.profile is not None and not self.readouts:
            raise ValueError("profile: of readouts, which there are with readouts only")
        if self.alert_url is not None and self.profile is None:
            raise ValueError("alert_url: for alerts, which there are with profile only")
        if self.always is not None and self.overflow != "drop_newest":
            raise ValueError("always: with overflow drop_newest, whose dropped steps it is for")
        return self

    @property
    def choices(self) -> tuple[HookNames, ...]:
        """Return the hooks that a request may choose, beside all of them."""
        return ()

    @property
    def umask(self) -> int | None:
        """Return the mask of files that the run writes, ``None`` for that of the process."""
        return None

    @property
    def draws(self) -> bool:
        """Return whether rows are drawn, each with a probability that is recorded."""
        return self.reserves or bool(self.keep)

    @property
    def reserves(self) -> bool:
        """Return whether the least share of every step is stored, and the engine waits for it."""
        return self.overflow == "thin" or self.always is not None

    def design(self, run: str) -> Design | None:
        """Return how the rows of a run are drawn, ``None`` where every row is to be stored."""
        if not self.draws:
            return None
        salt, keep = salt_of("actds capture", self.seed, run), keep_rules(self.keep)
        if self.always is not None:
            return Design(salt, self.always, keep=keep)
        minimum = self.thin_min if self.overflow == "thin" else 1.0
        return Design(salt, minimum, self.thin_unit, keep)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(sorted({int(layer) for layer in (self.attention or "").split(",") if layer}))

    def attending(self, run: str) -> Attending | None:
        """Return what attention of a run is looked at, ``None`` for none."""
        if not self.attention_layers:
            return None
        salt = f"{int(salt_of('actds attention', self.seed, run)):016x}"
        return Attending(self.attention_layers, self.attention_every, self.attention_share, salt)

    @property
    def ring_nbytes(self) -> int:
        return self.ring_mib * MIB

    @property
    def staging_nbytes(self) -> int:
        return self.staging_mib * MIB

    @property
    def raw_threshold_nbytes(self) -> int:
        """Return the backlog from which shards are written raw; 0 never."""
        return self.raw_mib * MIB


class ModelSettings(Settings):
    """Settings that name a model: a folder, or a repository of the local hub cache."""

    @model_validator(mode="before")
    @classmethod
    def _find_model(cls, fields: Any) -> Any:
        """Put the folder in the place of ``org/name``; raises E005 as ``find_model``."""
        if not isinstance(fields, dict) or not isinstance(fields.get("model"), str | Path):
            return fields
        options = fields.get("engine_args")
        revision = options.get("revision") if isinstance(options, Mapping) else None
        return {**fields, "model": find_model(fields["model"], revision)}


class WriteSettings(ModelSettings, HarvestSettings):
    """Settings of an offline harvest: the options of ``actds write``."""

    model: Folder = Field(
        description="Model: a folder with config.json, weights and tokenizer, or org/name of the "
        "local hub cache"
    )
    prompts: Location = Field(
        description="JSONL, JSON, Parquet or text file, or hf:FOLDER. A record has prompt, text, "
        "messages, prompt_token_ids or input_ids"
    )
    engine: str = Field(
        default="vllm",
        description="Engine that runs the model: vllm; transformers, for models that vLLM cannot "
        "run; or one that another package registers",
    )
    engine_args: dict[str, Any] = Field(
        default={},
        description="Option of the engine, may be repeated; for vllm an argument of its EngineArgs",
        json_schema_extra={"option": "--engine-arg", "metavar": "KEY=VALUE"},
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        default=128, description="Maximum number of generated tokens per request"
    )
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Sampling temperature"
    )
    continue_at: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="Take prompts for documents: the first P tokens of each are its prompt, and "
        "those without a further token are skipped",
        json_schema_extra={"option": "--continue", "metavar": "P"},
    )
    continued_by: Literal["model", "document"] = Field(
        default="model",
        description="With --continue, who writes the following --max-tokens tokens: the model, or "
        "the document, whose own tokens are then given with the prompt",
    )
    label_columns: LabelColumns | None = Field(
        default=None,
        description="Fields of the records, as domain,language, whose values are kept as labels "
        "of the requests, '' for none. Default: label, where it is a short text or a number",
        json_schema_extra={"metavar": "NAMES"},
    )
    canary: str | None = Field(
        default=None,
        description="Replay this share of the requests alone after the harvest and compare their "
        "rows: 0.1%, or a number of requests",
        json_schema_extra={"metavar": "SHARE"},
    )
    resume: bool = Field(default=False, description="Resume OUT; skip finished requests")
    part: Annotated[str, AfterValidator(_part)] | None = Field(
        default=None,
        description="Serve the K-th of N parts of the prompts, as 3/16, beside the runs of others "
        "in the same OUT; --resume goes on with this part alone. When all have ended: actds seal",
        json_schema_extra={"metavar": "K/N"},
    )
    skip_broken: bool = Field(
        default=False, description="Skip prompt records that cannot be read, and record them"
    )
    executor: Literal["ray"] | None = Field(
        default=None,
        description="With ray: an engine on each node of the Ray cluster that RAY_ADDRESS names, "
        "or more by --engines; the prompts are handed out in pieces",
    )
    engines: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="With --executor ray: number of engines. Default: one for each node, or as "
        "many as its devices hold",
    )
    ray_options: dict[str, Any] = Field(
        default={},
        description="With --executor ray: what each engine asks of Ray, may be repeated: "
        "num_cpus=8, num_gpus=2, resources and label_selector as JSON",
        json_schema_extra={"option": "--ray-option", "metavar": "KEY=VALUE"},
    )

    @model_validator(mode="after")
    def _runs_on_a_cluster(self) -> Self:
        if self.executor is None and (self.engines is not None or self.ray_options):
            raise ValueError("executor: ray, beside its options")
        if self.executor is not None and (self.part is not None or self.canary is not None):
            raise ValueError("executor: without part, and without canary, which is of one machine")
        return self


def _as_in(model: type[BaseModel], name: str) -> Any:
    """Return the field of another model: default, description and option."""
    return copy(model.model_fields[name])


class ReplaySettings(ModelSettings, HarvestSettings):
    """Settings of a replay: the options of ``actds replay``."""

    source: Location = Field(description="Sealed dataset whose requests are served again")
    hooks: str | None = Field(  # type: ignore[assignment]
        default=None, description="Activations to capture. Default: those of SOURCE"
    )
    model: Folder = Field(description="Model, with the weights and tokenizer of SOURCE")
    engine: str = _as_in(WriteSettings, "engine")
    engine_args: dict[str, Any] = _as_in(WriteSettings, "engine_args")
    neighbours: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None,
        description="Serve the requests in another order, of this seed, and so in other company. "
        "Default: the order of SOURCE",
        json_schema_extra={"metavar": "SEED"},
    )
    alone: bool = Field(
        default=False, description="Serve one request at a time, without a prefix cache"
    )
    only: Literal["missing"] | None = Field(
        default=None,
        description="With missing, serve the requests of SOURCE that lack a row, say what they "
        "still lack, and --compare",
    )
    compare: bool = Field(
        default=False,
        description="Compare the rows that SOURCE and OUT have of the same positions, and fail "
        "where one belongs to another request",
    )
    max_requests: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        default=None,
        description="Serve the first N requests of SOURCE only",
        json_schema_extra={"metavar": "N"},
    )
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Serve a random share of these requests, each with this probability: what "
        "actds audit --follow-up estimates from",
        json_schema_extra={"metavar": "F"},
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0,
        description="Seed of the engine, of the row order and of --fraction: of one seed a smaller "
        "fraction lies in a larger one",
    )
    resume: bool = _as_in(WriteSettings, "resume")
    part: Annotated[str, AfterValidator(_part)] | None = _as_in(WriteSettings, "part")

    @model_validator(mode="after")
    def _compares_whole(self) -> Self:
        if self.part is not None and self.compare:
            raise ValueError("part: without compare, which looks at a whole replay")
        return self

    @property
    def compares(self) -> bool:
        return self.part is None and (self.compare or self.only == "missing")

    def as_write(self, hooks: str) -> WriteSettings:
        """Return the settings of the harvest: one token is sampled, which is never fed."""
        shared = {name: getattr(self, name) for name in HarvestSettings.model_fields}
        shared |= {name: getattr(self, name) for name in ("model", "engine", "engine_args")}
        shared |= {"hooks": hooks, "prompts": self.source}
        shared |= {"resume": self.resume, "part": self.part}
        return WriteSettings.of({**shared, "max_tokens": 1, "temperature": 0.0})


class AttestSettings(ModelSettings):
    """Settings of an attestation: the options of ``actds attest``."""

    source: Location = Field(description="Sealed dataset with readouts")
    model: Folder = Field(description="Model, with the weights and tokenizer of the dataset")
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.01,
        description="Serve a random share of the requests, each with this probability, and five "
        "at least",
        json_schema_extra={"metavar": "F"},
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = Field(
        default=None,
        description="Seed of the draw, which nobody may know before the dataset is sealed. "
        "Default: a random one",
    )
    key: Location | None = Field(
        default=None,
        description="PEM file of an Ed25519 private key: sign the attestation, beside the seal",
        json_schema_extra={"metavar": "FILE"},
    )
    engine: str = _as_in(WriteSettings, "engine")
    engine_args: dict[str, Any] = _as_in(WriteSettings, "engine_args")


class LiveSettings(SamplingRules, HarvestSettings):
    """Settings of a live harvest: the value of ``actds`` in ``--additional-config``."""

    hooks: Annotated[str, Field(min_length=1)] = Field(
        description=HarvestSettings.model_fields["hooks"].description
    )
    overflow: Overflow = Field(
        default="drop_newest", description=HarvestSettings.model_fields["overflow"].description
    )
    weights_digest: bool = Field(
        default=True, description="Hash the weight files before the server starts"
    )
    roles: bool = Field(default=True, description="Note who wrote the positions of chats")
    rotate_minutes: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Age at which a dataset ends and is sealed while serving goes on; out is the "
        "folder of the datasets",
    )
    rotate_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Size of the files at which a dataset ends likewise"
    )
    keep_datasets: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="With rotation into a local folder: sealed datasets that stay, others are "
        "REMOVED, the oldest first",
    )
    switch: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="File during whose presence nothing of new requests is stored"
    )
    group_readable: bool = Field(
        default=False,
        description="Let the group read the dataset's files; else none but the server's user",
    )

    @property
    def umask(self) -> int:
        """Return the mask of the dataset's files: token ids are the prompts of clients."""
        return 0o027 if self.group_readable else 0o077

    @model_validator(mode="after")
    def _draws_by_what_is_served(self) -> Self:
        rules = keep_rules(self.keep)
        if self.keep_datasets is not None:
            if self.rotate_minutes is None and self.rotate_gib is None:
                raise ValueError("keep_datasets: with rotate_minutes or rotate_gib")
            if local_folder(self.out) is None:
                raise ValueError("keep_datasets: in a local folder; a bucket has lifecycle rules")
        if any(name.startswith("labels.") for rule in rules for name, _ in rule.request):
            raise ValueError("keep: served requests have no labels; xarg NAME=GLOB, or id GLOB")
        if any(rule.role is not None for rule in rules) and not self.roles:
            raise ValueError("keep: roles are known with roles only")
        return self

    def rules(self) -> SamplingRules:
        return SamplingRules(**{name: getattr(self, name) for name in SamplingRules.model_fields})


class PlanSettings(ModelSettings):
    """What is to be sized: the options of ``actds plan``."""

    model: Folder | None = Field(default=None, description="Model folder with config.json")
    d_model: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Channels, without a model folder"
    )
    layers: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Layers, without a model folder"
    )
    hooks: str = Field(default="resid_post:all", description="Hooks, as in actds write")
    dtype: DTypeName | None = Field(
        default=None, description="Type of the stored rows. Default: the model's, else bfloat16"
    )
    readouts: Annotated[int, Field(ge=0)] = Field(
        default=9, description="Readout values per row and hook; 0 for none"
    )
    prefill_rate: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Prompt tokens per second"
    )
    decode_rate: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Generated tokens per second"
    )
    bursts: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(),
        description="Load of FACTOR times the mean for SECONDS; may be repeated",
        json_schema_extra={"option": "--burst", "metavar": "FACTOR:SECONDS"},
    )
    profile: Location | None = Field(
        default=None,
        description="Take rates, bursts and compression from an earlier harvest",
        json_schema_extra={"metavar": "DATASET"},
    )
    tokens_per_request: Rate | None = Field(
        default=None, description="Computed tokens per request. Default: 512"
    )
    tokens_per_step: Rate | None = Field(default=None, description="Tokens per step. Default: 512")
    tokens: int = Field(
        default=1_000_000_000, description="Tokens to store, or to sample with keep"
    )
    keep: Annotated[str, AfterValidator(_keep)] = Field(
        default="",
        description="Rules for a share of the rows, as in actds write: how many rows they give, "
        "and how precise means and rates are",
        json_schema_extra={"metavar": "RULES"},
    )
    stall: Annotated[float, Field(ge=0)] = Field(
        default=10.0, description="Longest disk stall, in seconds, that must not lose rows"
    )
    max_step_rows: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="Tokens in the largest step: max_num_batched_tokens of vLLM"
    )
    rows_per_shard: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Default: as in actds write"
    )
    ring_mib: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Size of the ring to check. Default: propose one"
    )
    staging_mib: Annotated[int, Field(ge=0)] = Field(
        default=HarvestSettings.model_fields["staging_mib"].default,
        description="Staging ring on the device; at least one step",
    )
    threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Encoding threads"
    )
    d2h_gbps: Rate | None = Field(default=None, description="Device-to-host rate, GB/s")
    copy_gbps: Rate | None = Field(default=None, description="Memory-copy rate, GB/s")
    encode_gbps: Rate | None = Field(default=None, description="Encoding rate of one thread, GB/s")
    disk_gbps: Rate | None = Field(
        default=None, description="Rate of hashing, writing and syncing files, GB/s"
    )
    nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Nodes with this load each, that write one dataset"
    )
    store_gbps: Rate | None = Field(
        default=None, description="With --nodes: rate of the store that all write to, GB/s"
    )
    store_puts: Rate | None = Field(
        default=None, description="With --nodes: writing requests that the store takes, per second"
    )
    train_rows: Rate | None = Field(
        default=None,
        description="With --nodes: rows per second that a trainer reads from the store meanwhile",
    )
    measure: Folder | None = Field(
        default=None,
        description="Measure on this machine, in FOLDER, by default the current one: the rates "
        "that are not given, writing until that of the disk is sustained",
        json_schema_extra={"metavar": "[FOLDER]", "flag_value": "."},
    )
    measure_seconds: Rate = Field(
        default=60.0, description="Seconds to write to the disk at most, with --measure"
    )
    engine: str = Field(default="vllm", description="Engine that runs the model")
    engine_args: dict[str, Any] = Field(
        default={},
        description="Option of the engine, may be repeated: stages, replicas and asynchronous "
        "scheduling change what is needed",
        json_schema_extra={"option": "--engine-arg", "metavar": "KEY=VALUE"},
    )


S = TypeVar("S", bound=BaseModel)
F = TypeVar("F", bound=Callable[..., Any])


def settings_of(
    model: type[S], fields: Mapping[str, Any], place: Callable[[str], str], code: str
) -> S:
    """Return validated settings.

    Args:
        place: returns the place that an error names, for a key or an empty one.

    Raises:
        ActdsError: with the key, its value and what is allowed.
    """
    unknown = sorted(set(map(str, fields)) - set(model.model_fields))
    if unknown:
        close = difflib.get_close_matches(unknown[0], model.model_fields, n=2)
        known = " or ".join(close) or f"one of {', '.join(sorted(model.model_fields))}"
        got = "an unknown key"
        raise ActdsError(code, place(unknown[0][:80]), got=got, expected=known)
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        raise explained(error, place, code) from None


def explained(
    error: ValidationError,
    place: Callable[[str], str],
    code: str,
    keys: str = "header or xarg, and values",
) -> ActdsError:
    """Return the first problem that pydantic found, as an error with place and next step.

    Args:
        keys: what is expected in the place of an unknown key.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    key = ".".join(map(str, first["loc"]))
    expected = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    value = first["input"]
    name, _, rest = expected.partition(": ")
    if not key and isinstance(value, dict) and name in value:
        key, expected, value = name, rest, value[name]
    got = str(value) if isinstance(value, Decimal) else repr(value)[:80]
    if first["type"] == "missing":
        got, expected = "nothing", "a value"
    elif first["type"] == "extra_forbidden":
        got, expected = "an unknown key", keys
    return ActdsError(code, place(key), got=got, expected=expected)


def keywords_of(model: type[BaseModel]) -> Callable[[F], F]:
    """Return a decorator that shows a model's fields as the keyword arguments of a function.

    ``help`` and editors then show type and default of each, which only the model defines.
    """

    def decorate(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())
        named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(model).parameters.values()
            if p.name not in {parameter.name for parameter in named}
        ]
        result = inspect.signature(function).return_annotation
        shown = inspect.Signature(
            sorted([*named, *fields], key=lambda p: p.kind), return_annotation=result
        )
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True, kw_only=True)
class WriterSettings:
    """What the writer process is started with.

    Args:
        dataset: id for a new dataset.
        resume: whether the dataset exists already.
        started_ns: wall clock.
        rows_per_shard: rows after which a shard is committed, at a step's end.
        shared: whether other engines may write the dataset too; the first one creates it.
        readouts: value of ``capture.readouts``.
        stage_timeout_s: how long a step may wait for the rows of a pipeline stage.
        replica: number of this engine among data-parallel replicas, and how many there are, 0 when
            that is not known.
    """

    harvest: HarvestSettings
    facts: tuple[Fact, ...]
    tokens: SpecialTokens
    rows_per_shard: int
    n_threads: int
    readouts: str
    resume: bool = False
    shared: bool = False
    stage_timeout_s: float = 120.0
    replica: tuple[int, int] = (0, 1)
    dataset: str = field(default_factory=lambda: secrets.token_hex(16))
    run: str = field(default_factory=lambda: layout.new_id("r"))
    started_ns: int = field(default_factory=time.time_ns)
    software: str = f"actds {__version__}"

    @property
    def part(self) -> str:
        return getattr(self.harvest, "part", None) or ""

    @property
    def may_join(self) -> bool:
        """Return whether the dataset may be one that another engine has just created."""
        return self.shared or self.replica[1] > 1 or bool(self.part)


@dataclass(frozen=True)
class CensusSettings:
    """What the census process is started with; fields as in ``WriterSettings``.

    Args:
        root: location of the dataset.
        dataset: id of the dataset that the run creates; None where it joins or resumes one.
        part: share of the prompts that the run serves, as ``3/16``; empty for all.
        reserve_nbytes: disk space held back, so that a full disk can still be accounted for.
    """

    root: str
    run: str
    software: str
    dataset: str | None = None
    part: str = ""
    reserve_nbytes: int = 4 << 20
