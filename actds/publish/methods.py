"""A paragraph for the methods section of a paper: what the run records say, in sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from actds.dataset.info import Facts
from actds.format.tables import DISPOSITIONS
from actds.text import share

_WORDS = {
    "captured": "have a row",
    "cache_ref": "were read from the prefix cache, where another request has the row",
    "dropped": "were computed and lost",
    "aborted": "belong to requests that were aborted",
    "filtered": "were left out by a rule",
    "undelivered": "lie past an end that nobody was given",
}
_DIGITS = 12
"""Of a digest: enough to tell files apart."""


def methods(facts: Facts) -> str:
    """Return the paragraph: model, engine, precision, determinism, what became of the positions.

    A fact that is not known is called unknown; values in which the runs differ stand side by side.

    Spec: 0.1 section 2.4.
    """
    sentences = [_what(facts), *_authors(facts), _precision(facts), _serving(facts)]
    sentences.append(_determinism(facts))
    return " ".join([*sentences, *_positions(facts), _which(facts)])


def _what(facts: Facts) -> str:
    weights = _of(facts, "model.weights_sha256", short=True)
    hooks = ", ".join(hook.name for hook in facts.hooks)
    engine = f"{_of(facts, 'engine.name')} {_of(facts, 'engine.version')}"
    return (
        f"Activations of {_of(facts, 'model.name')} ({_of(facts, 'model.architecture')}, weights "
        f"SHA-256 {weights}) were captured at {hooks} while {engine} served it "
        f"({_of(facts, 'serving.mode')})."
    )


def _authors(facts: Facts) -> list[str]:
    """Whose tokens were fed, of the runs that say it: a replay's, or those of documents."""
    return [
        words for words in dict.fromkeys(_author(run.provenance) for run in facts.runs) if words
    ]


def _author(provenance: Mapping[str, Mapping[str, object]]) -> str:
    if _is_replay(provenance):
        return (
            "This is a replay: token sequences of another dataset, which the table origins names, "
            "were read again as prompts, what had been sampled in them included."
        )
    given = _documents(provenance)
    if not given:
        return ""
    n_prompt, n_tokens = given.get("n_prompt"), given.get("max_tokens")
    if given.get("by") == "document":
        return (
            f"The tokens are those of documents: the first {n_prompt} of each and up to {n_tokens} "
            "that follow in it."
        )
    return (
        f"The first {n_prompt} tokens of each document were the prompt, and up to {n_tokens} were "
        "sampled after them."
    )


def _is_replay(provenance: Mapping[str, Mapping[str, object]]) -> bool:
    return _value(provenance, "replay.only") is not None


def _samples(provenance: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a run has rows of tokens that it sampled itself."""
    return not (_documents(provenance).get("by") == "document" or _is_replay(provenance))


def _documents(provenance: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """What ``--continue`` said, a fact in JSON; empty where there were no documents."""
    words = _value(provenance, "prompts.continue")
    with suppress(ValueError):
        options = json.loads(words) if isinstance(words, str) else None
        return options if isinstance(options, dict) else {}
    return {}


def _value(provenance: Mapping[str, Mapping[str, object]], name: str) -> object:
    return provenance.get(name, {}).get("value")


def _precision(facts: Facts) -> str:
    stored = ", ".join(sorted({hook.dtype for hook in facts.hooks}))
    attention, cache = "numerics.attention_backend", "numerics.kv_cache_dtype"
    return (
        f"The model computed in {_of(facts, 'numerics.dtype')} (quantization "
        f"{_of(facts, 'model.quantization')}) on {_of(facts, 'machine.processor')}; attention "
        f"{_of(facts, attention)}, KV cache {_of(facts, cache)}. Rows are stored as {stored} "
        f"(cast: {_of(facts, 'capture.cast')})."
    )


def _serving(facts: Facts) -> str:
    tokens = _of(facts, "serving.max_num_batched_tokens")
    # Of the one token that a replay samples there is no row: its temperature says nothing.
    temperature = f"; temperature {_of(facts, 'sampling.temperature')}"
    if (further := _of(facts, "sampling.params")) not in ("none", "unknown"):
        temperature += f", further sampling parameters {further}"
    if facts.runs and not any(_samples(run.provenance) for run in facts.runs):
        temperature = ""
    return (
        f"Prefix caching was {_switch(facts, 'serving.prefix_caching')} and chunked prefill "
        f"{_switch(facts, 'serving.chunked_prefill')}; at most "
        f"{_of(facts, 'serving.max_num_seqs')} requests and {tokens} tokens shared a "
        f"step{temperature}."
    )


def _determinism(facts: Facts) -> str:
    kernels = _switch(facts, "numerics.batch_invariant")
    words = (
        f"Batch-invariant kernels were {kernels}, deterministic algorithms "
        f"{_switch(facts, 'numerics.deterministic')}, TF32 {_switch(facts, 'numerics.tf32')}"
    )
    if kernels == "on":
        return f"{words}."
    return f"{words}: the last bits of a row depend on what else was in its batch."


def _positions(facts: Facts) -> list[str]:
    n_positions = sum(run.n_positions or 0 for run in facts.runs)
    if not n_positions or any(run.n_positions is None for run in facts.runs):
        return ["What became of every position is unknown."]
    parts = [
        f"{count:,} ({share(count, n_positions)}) {_WORDS[name]}"
        for name in DISPOSITIONS
        if (count := facts.totals.get(name, 0))
    ]
    return [f"Of {n_positions:,} positions {'; '.join(parts)}."]


def _which(facts: Facts) -> str:
    return f"Dataset {facts.dataset}, digest {facts.digest}, format actds {facts.format_version}."


def _switch(facts: Facts, name: str) -> str:
    words: dict[object, str] = {True: "on", False: "off"}
    values = [_value(run.provenance, name) for run in facts.runs]
    return " / ".join(dict.fromkeys(words.get(v, "not on record") for v in values))


def _of(facts: Facts, name: str, *, short: bool = False) -> str:
    """Values of a fact over the runs, in words."""
    values = []
    for run in facts.runs:
        value = _value(run.provenance, name)
        words = value if isinstance(value, str) else json.dumps(value)
        values.append("unknown" if value is None else words[:_DIGITS] if short else words)
    return " / ".join(dict.fromkeys(values)) or "unknown"
