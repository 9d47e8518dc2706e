"""Before a harvest: everything that can be checked, read and locked before an engine starts.

From the settings to a plan: location, finished requests of earlier runs, prompts, tokens and facts.
A local dataset is locked for as long as a process of the run lives. An object store has no lock:
there each run has its own chains and names, and no put overwrites.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.heartbeat import heartbeats, read_heartbeat
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.explore.requests import TokenSequence
from actds.format import canonical
from actds.format.inclusion import KeepRule, about_request
from actds.format.interventions import FIELD, applied
from actds.format.profile import Profile
from actds.format.readouts import NONE
from actds.format.schema import PART, RunRecord, parse_part
from actds.store import layout, local_folder, open_for_writing, open_store, refuse_within_dataset
from actds.store.local import lock_dataset
from actds.text import counted
from actds_writers.capture.hooks import hook_specs, parse_hooks, plan_readouts
from actds_writers.config import HarvestSettings, WriteSettings
from actds_writers.engine_protocol import EngineOptions
from actds_writers.harvest.recover import clear_ended, recover_runs, require_accounted
from actds_writers.interventions import KINDS, Planned, plan_interventions
from actds_writers.ipc.messages import LETTERS, UNKNOWN, Fact, PromptFact, Replayed, packed
from actds_writers.model_folder import ModelFiles, SpecialTokens, generation_eos, model_config
from actds_writers.monitor.progress import Snapshot
from actds_writers.prompts.encoding import (
    Continuation,
    Encoded,
    Tokenizer,
    chat_template_sha256,
    encode,
    load_tokenizer,
    n_second_bos,
    special_tokens,
)
from actds_writers.prompts.records import OnBroken, Prompt, PromptSet, read_prompts
from actds_writers.prompts.roles import ThinkingMarks
from actds_writers.provenance import capture_facts, in_words, model_facts, observed
from actds_writers.sampling import Regime, keep_rules
from actds_writers.sizing import Geometry, rows_per_shard

NO_ROLES = "a request without roles in the source"


def as_requests(
    sequences: Iterable[TokenSequence],
    source: Catalog,
    skip: Callable[[TokenSequence], str | None] = lambda sequence: sequence.unknown,
) -> tuple[list[Encoded], list[PromptFact]]:
    """Return sequences as prompts in their order, and what the tables say of each."""
    encoded, client = [], []
    for index, sequence in enumerate(sequences):
        encoded.append(
            _as_prompt(index, sequence, PurePosixPath(source.store.uri).name, skip(sequence))
        )
        client.append(_fact_of(index, sequence, source, encoded[-1]))
    return encoded, client


def _as_prompt(index: int, sequence: TokenSequence, name: str, skip: str | None) -> Encoded:
    labels = "".join(LETTERS[role] if role else UNKNOWN for role in sequence.role)
    known = bool(labels.strip(UNKNOWN)) and skip is None
    return Encoded(
        Prompt(index, name, index, None, None, sequence.line["external_id"]),
        [] if skip else sequence.token_id.tolist(),
        max_tokens=1,
        skip=skip,
        roles=packed(labels) if known else "",
        roles_unknown=None if known else NO_ROLES,
    )


def _fact_of(index: int, sequence: TokenSequence, source: Catalog, encoded: Encoded) -> PromptFact:
    return PromptFact(
        request_key(index),
        sequence.line["external_id"],
        sequence.line["source"],
        sequence.line["source_row"],
        encoded.skip,
        encoded.roles,
        Replayed(
            source.genesis.dataset, source.digest, sequence.run, sequence.request, sequence.n_given
        ),
        len(sequence.token_id),
        sequence.line["labels"] and sys.intern(sequence.line["labels"]),
        (sequence.line["conversation"], sequence.line["turn"]),
    )


UNKNOWN_LIMIT = 2**31
SECOND_BOS = "prompts.second_bos"
"""Field of the run record: texts that began with BOS before the tokenizer added one."""
MUST_AGREE = (
    FIELD,
    "model.config_sha256",
    "model.weights_sha256",
    "tokenizer.sha256",
    "prompts.source",
    "prompts.n_records",
    "prompts.sha256",
    "prompts.continue",
    "prompts.label_columns",
    "replay.only",
    "replay.fraction",
    "replay.seed",
    "sampling.temperature",
    "sampling.max_tokens",
    "sampling.seed",
    "sampling.params",
)
"""Facts in which a resumed run must equal those before it."""


@dataclass(frozen=True)
class Plan:
    engine: EngineOptions
    hooks: tuple[tuple[str, int], ...]
    encoded: tuple[Encoded, ...]
    client: tuple[PromptFact, ...]
    tokens: SpecialTokens
    facts: tuple[Fact, ...]
    rows_per_shard: int
    readouts: str
    probes: bytes | None
    thinking: ThinkingMarks
    regimes: Mapping[str, Regime] = field(default_factory=dict)
    """What rules ask of each request, by its key; empty where none does."""
    interventions: Planned | None = None
    profile: bytes | None = None


@dataclass(frozen=True)
class Served:
    """What a run serves, whatever it was read from."""

    tokenizer: Tokenizer
    encoded: Sequence[Encoded]
    client: Sequence[PromptFact]
    facts: Sequence[Fact]


ServedBy = Callable[[WriteSettings, EngineOptions, int], Served]
"""Returns what a run serves; takes also the positions of a request at most, as far as known."""


def make_plan(
    settings: WriteSettings,
    engine: EngineOptions,
    n_replicas: int = 1,
    served_by: ServedBy | None = None,
) -> Plan:
    """Return the plan of a run; nothing is written and no engine started.

    Args:
        n_replicas: engines that share the machine's memory.

    Raises:
        ActdsError: E001 to E003, E005, E007, E009, E015; and as ``served_by``.
    """
    files = engine.files(settings.model)
    config = model_config(files.config)
    places = parse_hooks(settings.hooks, int(config["num_hidden_layers"]))
    limit = _known_limit(engine.max_model_len, config)
    served = of_part((served_by or serve_prompts)(settings, engine, limit), settings.part)
    looked = looked_at(settings, int(config["num_hidden_layers"]))
    # The widest type: the one that the engine will compute in is not known yet.
    hooks = hook_specs(places, config, "float32")
    rows = settings.rows_per_shard or rows_per_shard(n_replicas * Geometry.of(hooks).row_nbytes)
    readouts, probes = NONE, None
    if settings.readouts:
        planned, probes = plan_readouts(settings.seed, settings.probes, hooks, settings.keep)
        readouts = planned.as_field()
    edits = plan_edits(settings.intervene, config)
    profile = plan_profile(settings, [hook.name for hook in hooks], readouts, served.facts)
    return Plan(
        engine=engine,
        hooks=tuple(places),
        encoded=tuple(served.encoded),
        client=tuple(served.client),
        tokens=special_tokens(served.tokenizer, generation_eos(files.generation)),
        facts=(
            *_serving_facts(settings, engine),
            *served.facts,
            *capture_facts(settings, rows, readouts, "all"),
            *(() if edits is None else (edits.fact,)),
        ),
        rows_per_shard=rows,
        readouts=readouts,
        probes=probes,
        thinking=ThinkingMarks.of(served.tokenizer.get_added_vocab()),
        regimes=with_interventions(
            regimes_of(keep_rules(settings.keep), served, engine.n_samples, looks=bool(looked)),
            edits,
            served,
        ),
        interventions=edits,
        profile=profile,
    )


def of_part(served: Served, part: str | None) -> Served:
    """Return the share of a part: every N-th prompt, also of those that are skipped.

    It follows from the place of a prompt alone, so that parts agree which they are.
    """
    if part is None:
        return served
    number, n_parts = parse_part(part)
    encoded = [e for e in served.encoded if e.prompt.index % n_parts == number - 1]
    keys = {request_key(index) for index in range(number - 1, len(served.client), n_parts)}
    return replace(
        served,
        encoded=encoded,
        client=[prompt for prompt in served.client if prompt.key in keys],
        facts=[*served.facts, Fact(PART, part, "declared")],
    )


def looked_at(settings: HarvestSettings, n_layers: int) -> Sequence[int]:
    """Return the layers whose attention is looked at; E007 for one that the model has not."""
    if settings.attention is None:
        return ()
    return [layer for _, layer in parse_hooks(f"q:{settings.attention}", n_layers)]


def plan_profile(
    settings: HarvestSettings, hooks: Sequence[str], readouts: str, facts: Iterable[Fact] = ()
) -> bytes | None:
    """Return the profile of a harvest, as far as can be told before an engine is up.

    Raises:
        ActdsError: E024 a profile of other hooks, readouts or weights, or of entropies without any;
            and as ``Profile.read``.
    """
    if settings.profile is None:
        return None
    profile, place = Profile.read(settings.profile), "profile"
    if lacking := [hook for hook in profile.hooks if hook not in hooks]:
        got, expected = f"a profile of {', '.join(lacking)}", f"of {', '.join(hooks)}"
        raise ActdsError("E024", place, got=got[:300], expected=expected[:300])
    if profile.regime.get("capture.readouts") != readouts:
        got, expected = f"readouts {readouts}", str(profile.regime.get("capture.readouts"))
        next_step = "Take the seed and the probes of the harvest that it was made of."
        raise ActdsError("E024", place, got=got, expected=expected, next_step=next_step)
    for fact in facts:
        wanted = profile.regime.get(fact.name)
        if wanted is not None and fact.value is not None and str(fact.value) != wanted:
            got = f"{fact.name} {fact.value}"
            raise ActdsError("E024", place, got=got, expected=f"{wanted}, as when it was made")
    if profile.look.above is not None and not settings.entropy:
        got, expected = "looks above an entropy, and no entropies", "entropy beside it"
        raise ActdsError("E024", place, got=got, expected=expected)
    return profile.as_bytes()


def regimes_of(
    rules: Sequence[KeepRule], served: Served, n_samples: int, *, looks: bool = False
) -> dict[str, Regime]:
    """Return what rules ask of each request, by its key; empty where none asks.

    ``looks``: roles of prompts are asked in any case.

    Raises:
        ActdsError: E009 a rule for what no request has, or nobody knows before it is served.
    """
    names = {name for rule in rules for name, _ in rule.request}
    roles = {rule.role for rule in rules if rule.role is not None}
    if not names and not roles and not looks:
        return {}
    about = {p.key: about_request(p.external_id, p.labels, None) for p in served.client}
    known = {name for texts in about.values() for name in texts}
    for name in sorted(names - known):
        kind, _, label = name.partition(".")
        got = f"a rule for {kind[:-1]} {label}, which no prompt has"
        labels = ", ".join(sorted(x.removeprefix("labels.") for x in known - {"external_id"}))
        raise ActdsError("E009", "keep", got=got, expected=f"a label: {labels or 'none is there'}")
    if "external_id" in names and n_samples > 1:
        got = f"a rule for ids, and {n_samples} samples of each prompt"
        raise ActdsError("E009", "keep", got=got, expected="one or the other")
    of_prompts = {request_key(e.prompt.index): e.roles for e in served.encoded}
    if roles - {"assistant"} and not any(of_prompts.values()):
        got = f"a rule for {min(roles - {'assistant'})}, and no prompt whose roles are known"
        reasons = Counter(e.roles_unknown for e in served.encoded if e.roles_unknown is not None)
        why = "".join(f" ({reason})" for reason, _ in reasons.most_common(1))
        raise ActdsError("E009", "keep", got=got + why, expected="prompts that are chats")
    return {key: Regime.of(rules, of_prompts.get(key, ""), texts) for key, texts in about.items()}


def plan_edits(
    file: str | None, config: Mapping[str, Any], *, live: bool = False
) -> Planned | None:
    """Return the interventions of a file, for a model with a configuration; ``None`` without one.

    Raises:
        ActdsError: as ``plan_interventions``.
    """
    if file is None:
        return None
    layers = range(int(config["num_hidden_layers"]))
    specs = hook_specs([(kind, layer) for kind in KINDS for layer in layers], config, "float32")
    return plan_interventions(file, {spec.name: spec for spec in specs}, live=live)


def with_interventions(
    regimes: dict[str, Regime], planned: Planned | None, served: Served
) -> dict[str, Regime]:
    """Return what is asked of each request, with the positions of it that are changed.

    Raises:
        ActdsError: E009 an intervention that no request has a position of.
    """
    if planned is None:
        return regimes
    taken: set[int] = set()
    result: dict[str, Regime] = {}
    for prompt in served.client:
        about = about_request(prompt.external_id, prompt.labels, None)
        n_given = prompt.prompt_len if prompt.origin is None else prompt.origin.n_given
        parts = applied(planned.interventions, about, n_given)
        result[prompt.key] = replace(regimes.get(prompt.key, Regime()), applied=parts)
        taken |= {part.number for part in parts}
    for number, item in enumerate(planned.interventions, 1):
        if number not in taken:
            got = f"{item.name}, which is of no request"
            raise ActdsError("E009", "intervene", got=got, expected="one that changes some")
    return result


def serve_prompts(settings: WriteSettings, engine: EngineOptions, limit: int) -> Served:
    on_broken: OnBroken = "skip" if settings.skip_broken else "error"
    prompts = read_prompts(settings.prompts, on_broken, settings.label_columns)
    files = engine.files(settings.model)
    tokenizer = load_tokenizer(files.tokenizer)
    continuation = None
    if settings.continue_at is not None:
        continuation = Continuation(settings.continue_at, settings.continued_by)
    elif settings.continued_by != "model":
        got = f"{settings.continued_by} without continue_at"
        raise ActdsError("E009", "continued_by", got=got, expected="continue_at beside it")
    encoded = encode(
        prompts.prompts, tokenizer, limit, settings.max_tokens, on_broken, continuation
    )
    template = chat_template_sha256(prompts.prompts, tokenizer)
    broken = [Encoded(skip, [], 0, skip.broken) for skip in prompts.skips]
    client = [_prompt_fact(e) for e in sorted([*encoded, *broken], key=lambda e: e.prompt.row)]
    return Served(
        tokenizer,
        encoded,
        client,
        (
            *_prompt_facts(prompts, encoded),
            observed(SECOND_BOS, n_second_bos(encoded, tokenizer.bos_token_id)),
            Fact("prompts.continue", _continue_field(settings), "declared"),
            Fact("prompts.label_columns", _label_field(prompts), "declared"),
            observed("tokenizer.chat_template_sha256", template),
            *files_facts(files),
        ),
    )


def _known_limit(given: object, config: dict[str, Any]) -> int:
    if isinstance(given, int) and given > 0:
        return given
    positions = config.get("max_position_embeddings")
    if given is None and isinstance(positions, int) and not config.get("rope_scaling"):
        return positions
    return UNKNOWN_LIMIT


def request_key(index: int) -> str:
    return f"p{index}"


def _prompt_fact(encoded: Encoded) -> PromptFact:
    prompt = encoded.prompt
    return PromptFact(
        request_key(prompt.index),
        prompt.external_id,
        prompt.source,
        prompt.row,
        encoded.skip,
        encoded.roles,
        prompt_len=len(encoded.token_ids),
        labels=prompt.labels,
        turn=prompt.turn,
    )


def _serving_facts(settings: WriteSettings, engine: EngineOptions) -> list[Fact]:
    """Return what the settings say of an offline harvest."""
    further = {name: in_words(value) for name, value in engine.sampling.items()}
    given = settings.continue_at is not None and settings.continued_by == "document"
    declared: dict[str, bool | int | str] = {
        "sampling.temperature": str(settings.temperature),
        "sampling.max_tokens": 1 if given else settings.max_tokens,
        "sampling.seed": settings.seed,
        "sampling.params": canonical.dump(further).decode().strip() if further else NONE,
        "serving.mode": "offline",
    }
    return [Fact(name, value, "declared") for name, value in declared.items()]


def _continue_field(settings: WriteSettings) -> str:
    if settings.continue_at is None:
        return NONE
    value = {
        "by": settings.continued_by,
        "max_tokens": settings.max_tokens,
        "n_prompt": settings.continue_at,
    }
    return canonical.dump(value).decode().strip()


def _label_field(prompts: PromptSet) -> str:
    """Return the names of the labels as JSON, ``none`` without any."""
    names = prompts.label_columns
    return canonical.dump(list(names)).decode().strip() if names else NONE


def _prompt_facts(prompts: PromptSet, encoded: list[Encoded]) -> list[Fact]:
    source = prompts.source
    n_skipped = len(prompts.skips) + sum(e.skip is not None for e in encoded)
    return [
        Fact("prompts.source", source.name, "declared"),
        Fact("prompts.kind", source.kind, "declared"),
        observed("prompts.n_records", source.n_records),
        observed("prompts.n_skipped", n_skipped),
        observed("prompts.sha256", source.sha256, source.sha256_reason),
        observed("prompts.roles", roles_field(encoded)),
    ]


def files_facts(files: ModelFiles) -> list[Fact]:
    return model_facts(files, no_tokenizer="the folder has no tokenizer.json")


def roles_field(encoded: Sequence[Encoded]) -> str:
    """Return of how many prompts the roles are known, and why not of the others, as JSON."""
    served = [e for e in encoded if e.skip is None]
    unknown = Counter(e.roles_unknown for e in served if e.roles_unknown is not None)
    counts = {"known": len(served) - unknown.total(), "unknown": dict(unknown)}
    return canonical.dump(counts).decode().strip()


def is_taken(out: str | Path) -> bool:
    folder = local_folder(out)
    if folder is None:
        return bool(open_store(out, write=True).list())
    return folder.exists() or folder.is_symlink()


def has_dataset(out: str | Path) -> bool:
    folder = local_folder(out)
    if folder is None:
        return open_store(out, write=True).exists(layout.GENESIS)
    return (folder / layout.GENESIS).is_file()


def hold(out: str | Path, *, shared: bool = False) -> int:
    """Lock a dataset, creating its folder if necessary; return the descriptor of the lock.

    An object store has no lock; instead, this checks that the store does not overwrite.

    Raises:
        ActdsError: E009 when it is inside another dataset; E010 when another run writes it; E016
            when the store overwrites; E503 when the folder cannot be made, or a put is refused.
    """
    refuse_within_dataset(out)
    folder = local_folder(out)
    if folder is None:
        open_for_writing(out)
        return os.open(os.devnull, os.O_RDONLY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, expected = error.strerror or str(error), "a folder that can be made"
        step = "Give another path."
        raise ActdsError("E503", str(out), got=got, expected=expected, next_step=step) from None
    return lock_dataset(folder, shared=shared)


def discard_empty(out: str | Path) -> None:
    """Remove an empty local folder; an object store has no folders."""
    folder = local_folder(out)
    if folder is not None and not (folder / layout.GENESIS).exists():
        with contextlib.suppress(OSError):  # what lies there is another program's
            folder.rmdir()


Identity = int | tuple[str, int] | None
"""What is served, over the runs of a dataset: a record of the source, or a request that is
replayed, by run and number."""


def identity(prompt: PromptFact) -> Identity:
    if prompt.origin is not None:
        return prompt.origin.run, prompt.origin.request
    return prompt.source_row


def finished_rows(
    folder: str | Path,
    plan: Plan,
    part: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> set[Identity]:
    """Return the prompts whose requests an earlier run finished; recovers killed runs before.

    A request counts as finished when it ended by itself and none of its positions is aborted;
    dropped positions stay dropped. Nothing is changed when the plan is not that of the dataset. Of
    a part only its own runs are recovered, and others may be at work.

    Raises:
        ActdsError: E010 when the dataset was made from another model or other prompts, or a
            process still writes it; E312 when a run of it has neither census nor journal.
    """
    store = open_store(folder)
    catalog = read_catalog(store)
    compare_plan(catalog, plan)
    runs = recover_runs(store, only=runs_of(catalog, part), alone=part is None, say=say)
    require_accounted(runs)
    clear_ended(store, runs)
    if part is None:
        store.remove_temporary()
    catalog = read_catalog(store)
    finished: set[Identity] = set()
    for run in catalog.runs_with_data:
        finished |= finished_of(catalog, run)
    return finished


def runs_of(catalog: Catalog, part: str | None) -> Callable[[str], bool]:
    """Return whether a run is of a part, as its record says, or the heartbeat before there is one.

    Every run is, where there is no part.
    """
    if part is None:
        return lambda run: True
    beating = {
        run: owner.part
        for run, _, path in heartbeats(catalog.store)
        if (owner := read_heartbeat(catalog.store, path)[0]) is not None
    }
    known = {run: record.part for run, record in catalog.runs.items()}
    return lambda run: part == (known.get(run) or beating.get(run))


def finished_of(catalog: Catalog, run: str) -> set[Identity]:
    """Return the prompts whose requests a run has finished; as ``finished_rows``."""
    spans = catalog.table("spans", run)
    aborted = spans.filter(pc.equal(spans["disposition"], "aborted"))
    incomplete = set(aborted["request"].to_pylist())
    requests = catalog.table("requests", run).select(["request", "source_row", "finish_reason"])
    origins: dict[int, Identity] = {
        line["request"]: (line["source_run"], line["source_request"])
        for line in catalog.table("origins", run).to_pylist()
    }
    ended: dict[Identity, bool] = {}
    for row in requests.to_pylist():  # a prompt may have been sampled several times
        is_whole = row["finish_reason"] in ("stop", "length") and row["request"] not in incomplete
        name = origins.get(row["request"], row["source_row"])
        ended[name] = ended.get(name, True) and is_whole
    return {name for name, is_whole in ended.items() if is_whole}


def compare_plan(catalog: Catalog, plan: Plan) -> None:
    """Raise E010 for a plan that is not that of a dataset, or divides the prompts otherwise."""
    hooks = {(hook.kind, hook.layer) for hook in catalog.genesis.hooks}
    if hooks != set(plan.hooks):
        wanted = ", ".join(f"{kind}.{layer}" for kind, layer in plan.hooks)
        present = ", ".join(hook.name for hook in catalog.genesis.hooks)
        raise ActdsError("E010", "hooks", got=wanted, expected=f"{present}, as there")
    declared = {fact.name: fact.value for fact in plan.facts}
    for run in catalog.runs_with_data:
        if run in catalog.runs:
            _compare_run(catalog.runs[run], declared)
            _compare_parts(catalog.runs[run], declared.get(PART))


def _compare_run(record: RunRecord, declared: dict[str, bool | int | str | None]) -> None:
    for name in MUST_AGREE:
        # A run that says nothing of these served its prompts whole, without labels, and sampled
        # as the other fields say.
        silent = ("prompts.continue", "prompts.label_columns", "sampling.params")
        absent = NONE if name in silent else None
        before = record.fields[name].value if name in record.fields else absent
        if (name in declared or name == FIELD) and before != declared.get(name):
            expected = f"{before!r} as in {record.run}"
            raise ActdsError("E010", name, got=repr(declared.get(name)), expected=expected)


def _compare_parts(record: RunRecord, part: object) -> None:
    """Raise E010 for a part of other parts than a run was; a run of all prompts goes with any."""
    before = record.part
    if part is not None and parse_part(before or "1/1")[1] != parse_part(str(part))[1]:
        got, expected = f"part {part}", f"parts as in {record.run}: {before or 'none'}"
        raise ActdsError("E010", PART, got=got, expected=expected)


def without_finished(plan: Plan, done: set[Identity]) -> Plan:
    client = tuple(prompt for prompt in plan.client if identity(prompt) not in done)
    keys = {prompt.key for prompt in client}
    encoded = tuple(e for e in plan.encoded if request_key(e.prompt.index) in keys)
    return replace(plan, encoded=encoded, client=client)


def say_second_bos(plan: Plan, say: Callable[[str], None]) -> None:
    n = next((fact.value for fact in plan.facts if fact.name == SECOND_BOS), None)
    if n:
        say(
            f"{counted(int(n), 'prompt')} of {len(plan.encoded):,} begin with BOS twice: the text "
            "has one, and the tokenizer adds one. Give chats as messages, or token ids."
        )


def is_servable(plan: Plan) -> bool:
    return any(encoded.skip is None for encoded in plan.encoded)


def require_prompt(settings: WriteSettings, plan: Plan) -> None:
    if is_servable(plan):
        return
    skips = [prompt.skip for prompt in plan.client if prompt.skip]
    got = f"{len(skips)} prompts, all skipped; the first: {skips[0] if skips else 'none'}"
    expected = "at least one prompt that fits the model"
    raise ActdsError("E006", settings.prompts, got=got, expected=expected)


def check_out(settings: WriteSettings) -> None:
    if settings.part is not None:
        _check_part(settings)
        return
    if settings.resume and not has_dataset(settings.out):
        got, expected = "no dataset", "a dataset to resume"
        step = "To write a new dataset, leave out resume=True."
        raise ActdsError("E010", settings.out, got=got, expected=expected, next_step=step)
    if not settings.resume and is_taken(settings.out):
        got, expected = "it exists", "a new path"
        step = "Choose a new path, or continue with resume=True."
        raise ActdsError("E008", settings.out, got=got, expected=expected, next_step=step)


def _check_part(settings: WriteSettings) -> None:
    """Raise E008 for a part that was begun; a job that is queued again may resume what is not."""
    if not has_dataset(settings.out) or settings.resume:
        return
    catalog = read_catalog(open_store(settings.out))
    if run := next(filter(runs_of(catalog, settings.part), catalog.run_ids), None):
        got = f"part {settings.part} in run {run}"
        step = "Continue with resume=True."
        raise ActdsError("E008", settings.out, got=got, expected="a new part", next_step=step)


def check_metrics(settings: WriteSettings) -> None:
    if settings.metrics_port is not None:
        from actds_writers.monitor.metrics import serve_metrics

        idle = Snapshot(elapsed_s=0.0, requests_done=0, requests_total=0)
        serve_metrics(settings.metrics_host, settings.metrics_port, lambda: idle).close()
