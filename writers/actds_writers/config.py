"""The plan of a run: everything that can be checked before an engine starts.

Stands before the token's way: from the command's arguments to settings, prompts and facts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actds.errors import ActdsError
from actds.format.readouts import NONE
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.capture.probes import plan_readouts
from actds_writers.engines.base import EngineOptions
from actds_writers.ipc.messages import Fact, PromptFact
from actds_writers.prompts.encoding import (
    Encoded,
    chat_template_sha256,
    encode,
    load_tokenizer,
    special_tokens,
)
from actds_writers.prompts.records import PromptSet, read_prompts
from actds_writers.shards.assembly import SpecialTokens
from actds_writers.sizing.needs import Geometry, rows_per_shard

Order = Literal["permuted", "sequence"]
HASH_CHUNK = 1 << 22
UNKNOWN_LIMIT = 2**31
LOOPBACK = "127.0.0.1"
DEFAULT_RAW_MIB = 64
"""Smaller shards spend their time in fsync, not in encoding: raw gains nothing there."""


@dataclass(frozen=True)
class WriteOptions:
    """The arguments of ``actds write``.

    Args:
        out: where the dataset stands: a folder, or a URI.
        model: model folder.
        prompts: prompt source.
        hooks: hook specification.
        max_tokens: generated tokens per request at most.
        temperature: sampling temperature.
        seed: seed of the engine and of the row order.
        engine: options of the engine.
        resume: whether to go on with ``out``.
        skip_broken: whether broken prompt records are recorded and left out.
        order: row order inside a shard.
        rows_per_shard: rows per shard, ``None`` to choose by memory.
        ring_mib: size of the host ring.
        store_dtype: type to store rows in, ``None`` for the type the model computes in.
        overflow: what happens to a step when the ring is full.
        staging_mib: size of the staging ring.
        readouts: whether every computed row leaves readouts.
        probes: file of the user's probes, ``None`` without.
        raw_mib: MiB that wait to be committed, from which shards are written raw; 0 never.
        quiet: whether no progress is shown.
        metrics_host: where metrics are served.
        metrics_port: port of the metrics, 0 for a free one, ``None`` to serve none.
        writer: name of the engine that runs the model.
        canary: share or number of the requests that are replayed alone, ``None`` for none.
        check: whether the hooks are checked before the first row.
    """

    out: str | Path
    model: Path
    prompts: str
    hooks: str
    max_tokens: int
    temperature: float
    seed: int
    engine: EngineOptions
    resume: bool
    skip_broken: bool
    order: Order
    rows_per_shard: int | None
    ring_mib: int
    store_dtype: str | None
    overflow: str
    staging_mib: int = 64
    readouts: bool = True
    probes: Path | None = None
    raw_mib: int = DEFAULT_RAW_MIB
    quiet: bool = False
    metrics_host: str = LOOPBACK
    metrics_port: int | None = None
    writer: str = "vllm"
    canary: str | None = None
    check: bool = True


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Args:
        hooks: ``(kind, layer)`` of each hook.
        encoded: every prompt with its tokens, or its reason to be skipped.
        client: where every request comes from.
        tokens: ids that set row flags.
        facts: provenance that the command knows.
        rows_per_shard: rows per shard.
        readouts: value of ``capture.readouts``.
        probes: the user's probes as the bytes of their file, ``None`` without.
    """

    hooks: tuple[tuple[str, int], ...]
    encoded: tuple[Encoded, ...]
    client: tuple[PromptFact, ...]
    tokens: SpecialTokens
    facts: tuple[Fact, ...]
    rows_per_shard: int
    readouts: str
    probes: bytes | None


def make_plan(options: WriteOptions) -> Plan:
    """Return the plan of a run; nothing is written and no engine started.

    Raises:
        ActdsError: E001 to E003, E005, E007, E009, E015, with what to change.
    """
    config = model_config(options.model)
    places = parse_hooks(options.hooks, int(config["num_hidden_layers"]))
    prompts = read_prompts(options.prompts, "skip" if options.skip_broken else "error")
    tokenizer = load_tokenizer(options.model)
    encoded = encode(
        prompts.prompts,
        tokenizer,
        _known_limit(options.engine.max_model_len, config),
        options.max_tokens,
        "skip" if options.skip_broken else "error",
    )
    # The widest type: which one the engine will compute in is not known yet.
    hooks = hook_specs(places, config, "float32")
    rows = options.rows_per_shard or rows_per_shard(Geometry.of(hooks).row_nbytes)
    readouts, probes = NONE, None
    if options.readouts:
        planned, probes = plan_readouts(options.seed, options.probes, hooks)
        readouts = planned.as_field()
    template = chat_template_sha256(prompts.prompts, tokenizer)
    return Plan(
        hooks=tuple((hook.kind, hook.layer) for hook in hooks),
        encoded=tuple(encoded),
        client=_client(prompts, encoded),
        tokens=special_tokens(tokenizer, _generation_eos(options.model)),
        facts=(
            *_facts(options, prompts, encoded, template, rows),
            Fact("capture.readouts", readouts, "declared"),
        ),
        rows_per_shard=rows,
        readouts=readouts,
        probes=probes,
    )


def _known_limit(asked: object, config: dict[str, Any]) -> int:
    """Return the positions per request as far as known; the engine has the last word later."""
    if isinstance(asked, int) and asked > 0:
        return asked
    own = config.get("max_position_embeddings")
    if asked is None and isinstance(own, int) and not config.get("rope_scaling"):
        return own
    return UNKNOWN_LIMIT


def model_config(model: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` of a model folder, the text part of a composed one.

    Raises:
        ActdsError: E005 when there is none or it lacks what capture needs.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise ActdsError(
            "E005", str(model), got=f"config.json: {words}", expected="a model folder"
        ) from None
    text = dict(config.get("text_config", config))
    fields = ("num_hidden_layers", "hidden_size")
    if not all(isinstance(text.get(field), int) for field in fields):
        text.update(_renamed(model))
    for field in fields:
        if not isinstance(text.get(field), int):
            raise ActdsError(
                "E005", f"{model} config.json", got=f"no {field}", expected="a decoder model"
            )
    return text


def _renamed(model: Path) -> dict[str, int]:
    """Return what a configuration calls by other names (``n_layer``, ``d_model``) or leaves out."""
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no transformers, a family that it does not know, or a broken file
    names = ("num_hidden_layers", "hidden_size", "max_position_embeddings")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def weights_sha256(model: Path) -> str | None:
    """Return the SHA-256 over the sorted 'name sha256' lines of the weight files.

    ``None`` when the folder holds no weight file.

    Spec: 0.1 section 6.1.
    """
    lines = []
    for path in sorted(model.glob("*.safetensors")) + sorted(model.glob("*.bin")):
        lines.append(f"{path.name} {_file_sha256(path)}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


def _file_sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _generation_eos(model: Path) -> list[int]:
    path = model / "generation_config.json"
    if not path.is_file():
        return []
    try:
        eos = json.loads(path.read_bytes())["eos_token_id"]
    except (ValueError, KeyError, TypeError):
        return []  # the tokenizer's own EOS stands
    return [eos] if isinstance(eos, int) else [int(token) for token in eos or []]


def request_key(index: int) -> str:
    """Return the id under which a prompt is added to the engine."""
    return f"p{index}"


def _client(prompts: PromptSet, encoded: list[Encoded]) -> tuple[PromptFact, ...]:
    served = [
        PromptFact(
            request_key(e.prompt.index), e.prompt.external_id, e.prompt.source, e.prompt.row, e.skip
        )
        for e in encoded
    ]
    broken = [
        PromptFact(request_key(s.index), s.external_id, s.source, s.row, s.reason)
        for s in prompts.skips
    ]
    return tuple(sorted([*served, *broken], key=lambda prompt: prompt.source_row))


def _facts(
    options: WriteOptions, prompts: PromptSet, encoded: list[Encoded], template: str, rows: int
) -> tuple[Fact, ...]:
    """Return the provenance that only the command knows."""
    source = prompts.source
    tokenizer = options.model / "tokenizer.json"
    skipped = len(prompts.skips) + sum(e.skip is not None for e in encoded)
    declared: dict[str, bool | int | str] = {
        "sampling.temperature": str(options.temperature),
        "sampling.max_tokens": options.max_tokens,
        "sampling.seed": options.seed,
        "capture.method": "forward hook with one custom op per decoder layer",
        "serving.mode": "offline",
        "prompts.source": source.name,
        "prompts.kind": source.kind,
        "capture.overflow_policy": options.overflow,
        "capture.order": options.order,
        "capture.rows_per_shard": rows,
        "capture.raw_threshold_nbytes": options.raw_mib << 20,
        "capture.sampling": "all",
    }
    observed: dict[str, bool | int | str] = {
        "tokenizer.chat_template_sha256": template,
        "prompts.n_records": source.n_records,
        "prompts.n_skipped": skipped,
    }
    facts = [Fact(name, value, "declared") for name, value in declared.items()]
    facts += [Fact(name, value, "observed") for name, value in observed.items()]
    facts.append(_or_unknown("prompts.sha256", source.sha256, source.sha256_reason))
    facts.append(
        _or_unknown(
            "model.weights_sha256", weights_sha256(options.model), "the folder has no weight file"
        )
    )
    digest = _file_sha256(tokenizer) if tokenizer.is_file() else None
    facts.append(_or_unknown("tokenizer.sha256", digest, "the folder has no tokenizer.json"))
    return tuple(facts)


def _or_unknown(name: str, value: str | None, reason: str | None) -> Fact:
    if value is None:
        return Fact(name, None, "unknown", reason or "not known")
    return Fact(name, value, "observed")
