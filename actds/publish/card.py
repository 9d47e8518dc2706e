"""The card of a dataset: README.md with front matter that hubs preview, and croissant.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from actds.dataset.catalog import Catalog
from actds.dataset.info import (
    Facts,
    changes_in_words,
    describe,
    missing,
    odd_values,
    sample_in_words,
)
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError, Finding
from actds.format import canonical
from actds.format.schema import REQUIRED_PROVENANCE
from actds.format.tables import DISPOSITIONS
from actds.publish.croissant import BIASES, About, croissant
from actds.store import layout, open_store
from actds.text import counted, format_nbytes, printable, share

UNKNOWN = "unknown"
"""The licence of a dataset whose owner did not name one."""
_MAX_NBYTES = 1 << 24
_IMPORTED = "It has no census to audit. `actds check PATH` says what can be said of its rows."
_NO_AUDIT = "Not part of this card. `actds audit PATH` says whether what is missing matters."
_VERDICT = re.compile(
    r"^## Audit\n\n\*\*[A-Z]+\*\*: [^\n<]*\n(?:- [^\n<]*\n)*\n## Use$", re.MULTILINE
)
"""What a card says of an audit: the answer, and a line for every place."""
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")
_SIZES = [
    *("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B"),
    *("1B<n<10B", "10B<n<100B", "100B<n<1T", "n>1T"),
]
_PARTS = [
    *("requests", "steps", "spans", "roles", "origins", "sampled", "drops", "stalls"),
    *("occupancy", "readouts", "alerts", "attention", "canary"),
]
_SUMMARY = [
    *("model.name", "model.architecture", "model.weights_sha256", "tokenizer.sha256"),
    *("engine.name", "engine.version", "serving.mode", "serving.prefix_caching"),
    *("serving.chunked_prefill", "capture.method", "capture.overflow_policy"),
]
_NUMERICS = [
    *("numerics.dtype", "model.quantization", "capture.cast", "numerics.kv_cache_dtype"),
    *("numerics.attention_backend", "numerics.device", "numerics.matmul_precision"),
    *("numerics.deterministic", "numerics.batch_invariant", "numerics.tf32"),
    *("numerics.reduced_precision_reduction", "numerics.threads", "numerics.split_kv"),
    *("numerics.all_reduce", "numerics.compiler_passes", "serving.enforce_eager"),
    *("serving.tensor_parallel", "sampling.temperature", "sampling.seed"),
]


class AuditAnswer(BaseModel):
    """The answer of an audit, as far as cards and attestations show it."""

    model_config = ConfigDict(frozen=True)

    level: str
    words: str
    sentence: str
    load: str | None


class AuditPlace(BaseModel):
    """A place of an audit, as far as cards and attestations show it."""

    model_config = ConfigDict(frozen=True)

    name: str
    level: str
    accepted: bool
    headline: str


class _Audit(BaseModel):
    """The fields of ``actds audit --json`` that a card shows."""

    format: str
    digest: str
    answer: AuditAnswer
    places: list[AuditPlace]


def _read_audit(file: str | os.PathLike[str], digest: str) -> _Audit:
    """The verdict of an audit of the dataset with this digest."""
    place = f"audit {os.fspath(file)}"
    try:
        audit = _Audit.model_validate_json(canonical.read_bounded(Path(file)))
    except (OSError, ValidationError) as error:
        got = (error.strerror or "?") if isinstance(error, OSError) else "another document"
        raise ActdsError("E009", place, got=got, expected="what actds audit --json wrote") from None
    if (audit.format, audit.digest) != ("actds.audit", digest):
        got, expected = f"{audit.format} of digest {audit.digest}"[:200], f"actds.audit of {digest}"
        step = "Audit the dataset as it is now: actds audit PATH --json FILE."
        raise ActdsError("E009", place, got=got, expected=expected, next_step=step)
    return audit


def card(
    path: str | os.PathLike[str],
    *,
    licence: str = UNKNOWN,
    audit: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Write README.md and croissant.json of a sealed dataset; return their names.

    Args:
        path: the dataset's folder, or its ``s3://`` URI.
        licence: identifier of the licence, for example ``cc-by-4.0``.
        audit: file that ``actds audit --json`` wrote of the dataset as it is.

    Raises:
        ActdsError: E306 not sealed; E009 a bad licence or audit; and as ``read_catalog``; E503.

    Spec: 0.1 section 2.4.
    """
    catalog = read_catalog(open_store(os.fspath(path)))
    if not catalog.is_sealed:
        raise catalog.not_sealed()
    read = None if audit is None else _read_audit(audit, catalog.digest)
    put_card(catalog, licence=licence, audit=read)
    return list(layout.DERIVED)


def put_card(
    catalog: Catalog,
    names: Collection[str] = layout.DERIVED,
    *,
    licence: str = UNKNOWN,
    audit: _Audit | None = None,
) -> None:
    """Write the card of a sealed dataset over an older one."""
    # Files that are no part of the dataset are none of its card.
    facts, tables = replace(describe(catalog), unreachable=[]), table_files(catalog)
    text = card_text(facts, tables, licence, audit)
    if layout.CARD in names:
        catalog.store.replace(layout.CARD, text.encode())
    if layout.CROISSANT in names:
        biases = [] if audit is None else _audit_lines(audit)
        about = _about(facts, licence, biases)
        catalog.store.replace(layout.CROISSANT, croissant(catalog, facts, about, tables))


def compare_card(catalog: Catalog) -> Iterator[Finding]:
    """Yield a warning for each file of the card (2.4) that says something else than the dataset.

    Licence and verdict of an audit are the owner's to choose, and are taken as they stand there.
    E102 a file of more than 16 MiB; E107 no regular file; or a table cannot be read.
    """
    texts = {
        name: catalog.store.read(name, _MAX_NBYTES).decode("utf-8", "replace")
        for name in layout.DERIVED
        if catalog.store.exists(name)
    }
    if not texts:
        return
    facts, tables = replace(describe(catalog), unreachable=[]), table_files(catalog)
    if (text := texts.get(layout.CARD)) is not None:
        match = re.search(r"^license: (.*)$", text, re.MULTILINE)
        licence = _licence(match[1] if match else None)
        got = _VERDICT.sub(f"## Audit\n\n{_NO_AUDIT}\n\n## Use", text, count=1)
        yield from _difference(layout.CARD, got, card_text(facts, tables, licence, None), "\n")
    if (text := texts.get(layout.CROISSANT)) is not None:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        document = document if isinstance(document, dict) else {}
        named, verdict = document.get("license"), document.get(BIASES, [])
        biases = verdict if isinstance(verdict, list) else []
        about = _about(facts, _licence(named), biases)
        want = croissant(catalog, facts, about, tables)
        yield from _difference(layout.CROISSANT, text, want.decode(), ",")


def _about(facts: Facts, licence: str, biases: list[Any]) -> About:
    gaps = [line.text.strip() for line in missing(facts)]
    made = _sentence(facts) if facts.is_imported else methods(facts)
    return About(_title(facts), _sentence(facts), licence, made, gaps, biases)


def _licence(named: object) -> str:
    return named if isinstance(named, str) and _LICENCE.fullmatch(named) else UNKNOWN


def _difference(name: str, got: str, expected: str, end: str) -> Iterator[Finding]:
    """The first line that differs; ``end`` ends lines, too."""
    sides = [text.replace(end, f"{end.strip()}\n").split("\n") for text in (got, expected)]
    for number, (line, want) in enumerate(zip_longest(*sides, fillvalue=""), 1):
        if line != want:
            words = (f"{printable(line)[:120]!r}", f"{printable(want)[:120]!r}, as of the seal")
            yield Finding("E110", f"{name} line {number}", *words, "warning")
            return


def card_text(
    facts: Facts, tables: Mapping[str, list[str]], licence: str, audit: _Audit | None
) -> str:
    """Front matter that previews the tables, and what a visitor asks first."""
    if not _LICENCE.fullmatch(licence):
        expected = "an identifier such as cc-by-4.0, or unknown"
        raise ActdsError("E009", "licence", got=repr(licence)[:80], expected=expected)
    lines = [*_front_matter(facts, licence, tables), "", *_body(facts)]
    lines += [*_precision(facts), *_provenance(facts), *_gaps(facts), *_audit(facts, audit)]
    return "\n".join([*lines, *_use(facts), ""])


def table_files(catalog: Catalog) -> dict[str, list[str]]:
    """The tables that have rows, each with its files or a pattern of them."""
    files = {"tokens": ["shards/*/tokens.parquet"]} if catalog.shards else {}
    for table in _PARTS:
        parts = [
            part for (_, name), some in catalog.parts.items() if name == table for part in some
        ]
        # ``datasets`` fails at a Parquet file without a row, and the hub's viewer is made of it.
        filled = [part.file.path for part in parts if part.n_rows]
        if filled:
            pattern = layout.part_path(table, "*", 0).replace("000000", "*")
            files[table] = [pattern] if len(filled) == len(parts) else filled
    if catalog.seal is not None and catalog.table("multiplicity").num_rows:
        files["multiplicity"] = [catalog.seal.multiplicity.path]
    return files


def _front_matter(facts: Facts, licence: str, tables: Mapping[str, list[str]]) -> Iterator[str]:
    n_digits = len(str(sum(facts.phases.values())))
    size = _SIZES[min(max(n_digits - 3, 0), len(_SIZES) - 1)]
    yield from ("---", f"pretty_name: {json.dumps(_title(facts))}", f"license: {licence}")
    yield from ("size_categories:", f"- {size}")
    yield from ("tags:", "- actds", "- activations", "- interpretability", "configs:")
    # Only the tables: the hub infers one builder per repository, and arrays are none of its kinds.
    for name, paths in tables.items():
        yield from (f"- config_name: {name}", "  data_files:")
        yield from (f'  - "{path}"' for path in paths)
    yield "---"


def _title(facts: Facts) -> str:
    models = sorted({_value(run.provenance, "model.name") for run in facts.runs})
    return f"Activations of {', '.join(models)}"


def _sentence(facts: Facts) -> str:
    names = ("engine.name", "engine.version")
    engines = {" ".join(_value(run.provenance, name) for name in names) for run in facts.runs}
    rows = sum(facts.phases.values())
    phases = ", ".join(f"{n:,} {phase}" for phase, n in facts.phases.items())
    made = f"({phases}) captured in {', '.join(sorted(engines))}"
    if facts.is_imported:
        made = "imported from a set made elsewhere: nobody recorded how they were made"
    return (
        f"{rows:,} rows {made}. Format actds {facts.format_version}; dataset {facts.dataset}, "
        f"digest {facts.digest}."
    )


def _body(facts: Facts) -> Iterator[str]:
    yield from (f"# {_escaped(_title(facts))}", "", _escaped(_sentence(facts)), "")
    yield "| hook | layer | rows | d_model | type | size | stored |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for hook in facts.hooks:
        sizes = f"{format_nbytes(hook.nbytes)} | {format_nbytes(hook.stored_nbytes)}"
        yield (
            f"| {_escaped(hook.name)} | {hook.layer} | {hook.n_rows:,} | {hook.d_model} "
            f"| {hook.dtype} | {sizes} |"
        )
    for run in facts.runs:
        if run.sample is not None:
            words = f"The rows of run {run.run} are {sample_in_words(run)}."
            yield from ("", _escaped(words))
        for words in changes_in_words(run):
            yield from ("", _escaped(f"Run {run.run}: {words}."))
    if odd := [f"- {_escaped(words)}" for words in odd_values(facts)]:
        yield from ("", *odd)
    if facts.is_imported:
        return
    yield from ("", "## What became of every position", "", "| what | positions | share |")
    yield "| --- | --- | --- |"
    positions = sum(run.n_positions or 0 for run in facts.runs)
    for name in DISPOSITIONS:
        count = facts.totals.get(name, 0)
        yield f"| {_escaped(name)} | {count:,} | {share(count, positions)} |"


def _precision(facts: Facts) -> Iterator[str]:
    types = ", ".join(sorted({hook.dtype for hook in facts.hooks}))
    yield from ("", "## Precision and determinism", "")
    how = (
        ", bit for bit as they were captured but for the cast named here. They are those of the "
        "batches that the engine formed: another batch, engine or device gives other last bits "
        "unless the run was deterministic."
    )
    yield f"Rows are stored as {types}{'.' if facts.is_imported else how}"
    known = {name for run in facts.runs for name in run.provenance}
    names = [n for n in _NUMERICS if n in known or n in REQUIRED_PROVENANCE]
    yield from _facts_table(facts, names)
    if not facts.is_imported:
        yield from ("", "In a methods section:", "", f"> {_escaped(methods(facts))}")


def _provenance(facts: Facts) -> Iterator[str]:
    yield from ("", "## Provenance", "")
    yield f"{counted(len(facts.runs), 'run')}. All facts and their origin: `actds info PATH`."
    yield from _facts_table(facts, _SUMMARY)


def _facts_table(facts: Facts, names: list[str]) -> Iterator[str]:
    """Runs that agree share one value."""
    yield from ("", "| fact | value |", "| --- | --- |")
    for name in names:
        values = dict.fromkeys(_value(run.provenance, name, why=True) for run in facts.runs)
        yield f"| {_escaped(name)} | {'; '.join(map(_escaped, values))} |"


def _gaps(facts: Facts) -> Iterator[str]:
    yield from ("", "## Known gaps", "")
    lines = [line.text.strip() for line in missing(facts)]
    yield from (f"- {_escaped(line)}" for line in lines)
    if not lines:
        yield "None: no row is missing, and no fact of the run record is unknown."


def _audit(facts: Facts, audit: _Audit | None) -> Iterator[str]:
    yield from ("", "## Audit", "")
    if audit is None:
        yield _IMPORTED if facts.is_imported else _NO_AUDIT
        return
    answer, (_, *places) = audit.answer, _audit_lines(audit)
    yield f"**{_escaped(answer.level)}**: {_escaped(f'{answer.words}. {answer.sentence}')}"
    yield from (f"- {_escaped(place)}" for place in places)
    if answer.load is not None:
        yield "- " + _escaped(f"load it like this: {answer.load}")


def _audit_lines(audit: _Audit) -> list[str]:
    """The answer, and a line for every place."""
    lines = [f"{audit.answer.level}: {audit.answer.words}. {audit.answer.sentence}"]
    for at in audit.places:
        accepted = " (accepted)" if at.accepted else ""
        lines.append(f"{at.name}: {at.level}{accepted}, {at.headline}")
    return lines


def _use(facts: Facts) -> Iterator[str]:
    accepting = ", i_accept_unprovenanced=True" if facts.is_imported else ""
    yield from ("", "## Use", "", "```python", "import actds", "")
    yield from (
        'path = actds.pull("hf://datasets/OWNER/NAME", "acts")',
        f"dataset = actds.open(path{accepting})",
        f'rows = dataset.array("{facts.hooks[0].name}")[:1024]',
        "```",
        "",
    )
    yield "`actds validate PATH` checks every byte; the tables load with `datasets` alone."


def _value(provenance: dict[str, dict[str, object]], name: str, *, why: bool = False) -> str:
    """An unknown fact with its reason when ``why``."""
    entry = provenance.get(name, {})
    value = entry.get("value")
    if value is None:
        return f"unknown: {entry.get('reason', 'no run record')}" if why else "(unknown)"
    return value if isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    """Text that Markdown and HTML take literally."""
    return _SPECIAL.sub(r"\\\1", printable(text)).replace("\\<", "&lt;").replace("\\>", "&gt;")


# A paragraph for the methods section of a paper: what the run records say, in sentences.

_FATES = {
    "captured": "have a row",
    "cache_ref": "were read from the prefix cache, where another request has the row",
    "dropped": "were computed and lost",
    "aborted": "belong to requests that were aborted",
    "filtered": "were left out by a rule",
    "undelivered": "lie past an end that nobody was given",
    "thinned": "were not drawn, each with a known probability",
}
_DIGITS = 12
"""Of a digest: enough to tell files apart."""


def methods(facts: Facts) -> str:
    """Return the paragraph: model, engine, precision, determinism, what became of the positions.

    A fact that is not known is called unknown; values in which the runs differ stand side by side.
    """

    def of(name: str, n: int | None = None) -> str:
        values = [_raw(run.provenance, name) for run in facts.runs]
        words = (v[:n] if isinstance(v, str) else json.dumps(v)[:n] for v in values)
        shown = ("unknown" if v is None else word for v, word in zip(values, words, strict=True))
        return " / ".join(dict.fromkeys(shown)) or "unknown"

    def switch(name: str) -> str:
        words: dict[object, str] = {True: "on", False: "off"}
        values = [_raw(run.provenance, name) for run in facts.runs]
        return " / ".join(dict.fromkeys(words.get(v, "not on record") for v in values))

    hooks = ", ".join(hook.name for hook in facts.hooks)
    stored = ", ".join(sorted({hook.dtype for hook in facts.hooks}))
    # Of the one token that a replay samples there is no row: its temperature says nothing.
    sampling = f"; temperature {of('sampling.temperature')}"
    if (further := of("sampling.params")) not in ("none", "unknown"):
        sampling += f", further sampling parameters {further}"
    if facts.runs and not any(_samples(run.provenance) for run in facts.runs):
        sampling = ""
    kernels = switch("numerics.batch_invariant")
    depends = ": the last bits of a row depend on what else was in its batch."
    sentences = (
        f"Activations of {of('model.name')} ({of('model.architecture')}, weights SHA-256 "
        f"{of('model.weights_sha256', _DIGITS)}) were captured at {hooks} while "
        f"{of('engine.name')} {of('engine.version')} served it ({of('serving.mode')}).",
        *dict.fromkeys(_author(run.provenance) for run in facts.runs),
        f"The model computed in {of('numerics.dtype')} (quantization {of('model.quantization')}) "
        f"on {of('machine.processor')}; attention {of('numerics.attention_backend')}, KV cache "
        f"{of('numerics.kv_cache_dtype')}. Rows are stored as {stored} (cast: "
        f"{of('capture.cast')}).",
        f"Prefix caching was {switch('serving.prefix_caching')} and chunked prefill "
        f"{switch('serving.chunked_prefill')}; at most {of('serving.max_num_seqs')} requests and "
        f"{of('serving.max_num_batched_tokens')} tokens shared a step{sampling}.",
        f"Batch-invariant kernels were {kernels}, deterministic algorithms "
        f"{switch('numerics.deterministic')}, TF32 {switch('numerics.tf32')}"
        + ("." if kernels == "on" else depends),
        _fates(facts),
        *(
            f"The rows of run {run.run} are {sample_in_words(run)} (Kish 1965)."
            for run in facts.runs
            if run.sample is not None
        ),
        f"Dataset {facts.dataset}, digest {facts.digest}, format actds {facts.format_version}.",
    )
    return " ".join(filter(None, sentences))


def _author(provenance: Mapping[str, Mapping[str, object]]) -> str:
    """Whose tokens were fed, where a run says it: a replay's, or those of documents."""
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
    return _raw(provenance, "replay.only") is not None


def _samples(provenance: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a run has rows of tokens that it sampled itself."""
    return not (_documents(provenance).get("by") == "document" or _is_replay(provenance))


def _documents(provenance: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """What ``--continue`` said, a fact in JSON; empty where there were no documents."""
    words = _raw(provenance, "prompts.continue")
    with suppress(ValueError):
        options = json.loads(words) if isinstance(words, str) else None
        return options if isinstance(options, dict) else {}
    return {}


def _fates(facts: Facts) -> str:
    n_positions = sum(run.n_positions or 0 for run in facts.runs)
    if not n_positions or any(run.n_positions is None for run in facts.runs):
        return "What became of every position is unknown."
    parts = [
        f"{count:,} ({share(count, n_positions)}) {_FATES[name]}"
        for name in DISPOSITIONS
        if (count := facts.totals.get(name, 0))
    ]
    return f"Of {n_positions:,} positions {'; '.join(parts)}."


def _raw(provenance: Mapping[str, Mapping[str, object]], name: str) -> object:
    return provenance.get(name, {}).get("value")
