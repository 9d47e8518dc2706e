"""What a dataset is, where it came from and what it lacks: the facts and the page of info."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.fates import COMPUTED, FATE_COLUMNS, fate_counts, n_computed
from actds.dataset.reading import unknown_columns
from actds.dataset.sources import LabelFacts, SourceFacts, label_facts, read_records, source_facts
from actds.format import arrays, tables
from actds.format.inclusion import INCLUSION, Sample, inclusion_of_rows, is_drawn_from
from actds.format.interventions import FIELD, parse_field
from actds.format.schema import CloseBody, FenceBody, RowCounts, RunRecord
from actds.format.shard import HOOK_CHOICES
from actds.store import layout
from actds.text import Line, counted, format_nbytes, pairs, printable, share, when

_MAX_LISTED, _MAX_NAMED = 20, 3
_RANGE = ("float16", "bfloat16", "float32")
"""The types by their largest number: 65,504, and two that differ in the last digits of 10^38."""


@dataclass(frozen=True)
class HookFacts:
    """One hook: how many rows, how large decoded (``nbytes``) and on the disk, and of what values.

    ``casts`` are those of the runs in which rows overflowed, ``n_overflowed`` of all runs.
    """

    name: str
    kind: str
    layer: int
    d_model: int
    dtype: str
    n_rows: int
    nbytes: int
    stored_nbytes: int
    n_not_finite: int
    n_zero: int
    n_overflowed: int
    casts: list[str]

    @property
    def ratio(self) -> float | None:
        """Return decoded over stored bytes; None without a row."""
        return self.nbytes / self.stored_nbytes if self.stored_nbytes else None


@dataclass(frozen=True)
class ChainFacts:
    """One chain of the ledger, and why it ended."""

    chain: str
    kind: str
    run: str
    n_records: int
    state: str
    reason: str | None


@dataclass(frozen=True)
class LossFacts:
    """Positions of one fate, a disposition or ``never computed``, and reason that are no rows."""

    disposition: str
    reason: str | None
    n_positions: int


@dataclass(frozen=True)
class RunFacts:
    """One run: its provenance, and what became of its positions.

    ``prompt_tokens`` are those of requests that the engine was given.
    ``n_positions`` and all that follows it are None or empty while there is no census, which
    an imported run never has. ``sample`` says how the rows were drawn, where they were.
    """

    run: str
    started_ns: int | None
    has_record: bool
    has_census: bool
    provenance: dict[str, dict[str, Any]]
    n_rows: int
    is_imported: bool = False
    n_requests: int | None = None
    n_steps: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None
    n_preemptions: int | None = None
    n_positions: int | None = None
    n_cache_ref: int | None = None
    n_computed: int | None = None
    finish_reasons: dict[str, int] = field(default_factory=dict)
    losses: list[LossFacts] = field(default_factory=list)
    sample: Sample | None = None
    n_drop_events: int = 0
    n_stalls: int = 0
    stalled_ns: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything that ``actds info`` shows."""

    path: str
    dataset: str
    format_version: str
    created_ns: int
    writer: str
    sealed: bool
    seal: int | None
    sealed_ns: int | None
    digest: str
    totals: dict[str, int]
    phases: dict[str, int]
    n_shards: int
    raw_shards: int
    replaced_shards: int
    removable_nbytes: int
    redacted_requests: int
    hooks: list[HookFacts]
    sources: list[SourceFacts]
    labels: list[LabelFacts]
    runs: list[RunFacts]
    chains: list[ChainFacts]
    unreachable: list[str]

    @property
    def is_imported(self) -> bool:
        """Return whether all of it was made elsewhere, so that nobody recorded how."""
        return bool(self.runs) and all(run.is_imported for run in self.runs)


def describe(catalog: Catalog) -> Facts:
    """Return the facts of a dataset, sealed or not.

    Raises:
        ActdsError: a table cannot be read, see ``Catalog.table``.
    """
    genesis, seal, records = catalog.genesis, catalog.seal, read_records(catalog)
    catalog.read_ahead(("drops", "stalls", "requests", "spans", "steps"))
    phases: Counter[str] = Counter()
    for row_set in {(m.run, m.row_set_sha256): m for m in catalog.shards}.values():
        record = catalog.runs.get(row_set.run)
        unknown = record is not None and "phase" in unknown_columns(record)
        phases["unknown" if unknown else row_set.phase] += row_set.n_rows
    return Facts(
        path=catalog.store.uri,
        dataset=genesis.dataset,
        format_version=genesis.version,
        created_ns=genesis.created_ns,
        writer=genesis.writer,
        sealed=catalog.is_sealed,
        seal=seal.n if seal else None,
        sealed_ns=seal.sealed_ns if seal else None,
        digest=catalog.digest,
        totals=dict(seal.totals) if seal else {},
        phases=dict(sorted(phases.items(), reverse=True)),
        n_shards=len(catalog.shards),
        raw_shards=sum(manifest.compression == "raw" for manifest in catalog.shards),
        replaced_shards=len(catalog.replaced),
        removable_nbytes=sum(map(catalog.store.size, catalog.removable)),
        redacted_requests=sum(len(catalog.redacted(run)) for run in catalog.run_ids),
        hooks=_hooks(catalog),
        sources=source_facts(catalog, records),
        labels=label_facts(records),
        runs=[_run(catalog, run) for run in catalog.run_ids],
        chains=_chains(catalog),
        unreachable=catalog.unreachable,
    )


def _hooks(catalog: Catalog) -> list[HookFacts]:
    facts = []
    for hook in catalog.genesis.hooks:
        path = f"{layout.array_dir(hook.name)}/{arrays.SHARD_PATH}"
        holding = [manifest for manifest in catalog.shards if hook.name in manifest.hooks]
        n_rows = sum(manifest.n_rows for manifest in holding)
        nbytes = n_rows * hook.d_model * arrays.DTYPES[hook.dtype].itemsize
        stored = sum(f.nbytes for shard in holding for f in shard.files if f.path == path)
        counts = [manifest.values[hook.name] for manifest in holding]
        n_overflowed, casts = overflowed(catalog, hook.name)
        facts.append(
            HookFacts(
                **hook.model_dump(),
                n_rows=n_rows,
                nbytes=nbytes,
                stored_nbytes=stored,
                n_not_finite=sum(n.not_finite for n in counts),
                n_zero=sum(n.zero for n in counts),
                n_overflowed=n_overflowed,
                casts=casts,
            )
        )
    return facts


def recorded_cast(record: RunRecord | None) -> str | None:
    """Return what cast the rows of a run, None where nothing did or nobody knows."""
    cast = record.fields["capture.cast"].value if record else None
    return cast if isinstance(cast, str) and cast != "none" else None


def overflowing(cast: str | None, hook: str) -> str | None:
    """Return the cast of a hook, of a recorded ``capture.cast``, if it has a smaller range.

    After it nothing tells a value that was beyond the range from an infinity of the model's own.
    """
    for part in (cast or "").split("; "):
        names, colon, words = part.rpartition(": ")
        types = words.split(",")[0].split(" to ")
        if (not colon or hook in names.split(", ")) and len(types) == 2 and set(types) <= {*_RANGE}:
            return words if _RANGE.index(types[1]) < _RANGE.index(types[0]) else None
    return None


def overflowed(catalog: Catalog, hook: str) -> tuple[int, list[str]]:
    """Return how many rows of a hook became infinite in the cast of their run, and the casts."""
    n_rows: Counter[str] = Counter()
    for shard in catalog.shards:
        n = shard.values[hook].infinite if hook in shard.hooks else 0
        cast = overflowing(recorded_cast(catalog.runs.get(shard.run)), hook) if n else None
        if cast:
            n_rows[cast] += n
    return n_rows.total(), sorted(n_rows)


class HookValues(NamedTuple):
    """How many rows of a hook are not finite, zero, or (of the first) overflowed in which casts."""

    hook: str
    n_rows: int
    not_finite: int
    zero: int
    overflowed: int = 0
    casts: tuple[str, ...] = ()

    @classmethod
    def of_run(cls, hook: str, n_rows: int, counts: RowCounts, cast: str | None) -> HookValues:
        """Return those of rows that have one recorded cast, or none."""
        words = overflowing(cast, hook)
        lost = (counts.infinite, (words,)) if words and counts.infinite else (0, ())
        return cls(hook, n_rows, counts.not_finite, counts.zero, *lost)


def values_in_words(values: Iterable[HookValues]) -> Iterator[str]:
    """Yield which rows are not finite or zero, most first; nothing where there are none."""
    broken: dict[tuple[int, int, str], list[str]] = {}
    zero: dict[tuple[int, int, str], list[str]] = {}
    for hook in values:
        words = "are not finite (NaN or infinity)"
        if hook.overflowed:
            words += f"; {hook.overflowed:,} overflowed in the cast {' or '.join(hook.casts)}"
        broken.setdefault((hook.not_finite, hook.n_rows, words), []).append(hook.hook)
        zero.setdefault((hook.zero, hook.n_rows, "are zero in every channel"), []).append(hook.hook)
    for hooks in (broken, zero):
        for (n, n_rows, words), names in sorted(hooks.items(), reverse=True):
            if n:
                yield f"{n:,} of {n_rows:,} rows of {', '.join(names)} {words}"


def odd_values(facts: Facts) -> Iterator[str]:
    """Yield by hook which rows of a dataset are not finite or zero."""
    yield from values_in_words(
        HookValues(h.name, h.n_rows, h.n_not_finite, h.n_zero, h.n_overflowed, tuple(h.casts))
        for h in facts.hooks
    )


def _chains(catalog: Catalog) -> list[ChainFacts]:
    facts = []
    for chain, state in catalog.chains.items():
        last = state.records[-1].typed_body()
        reason = last.reason if isinstance(last, CloseBody | FenceBody) else None
        facts.append(
            ChainFacts(chain, state.kind, state.run, len(state.records), state.state, reason)
        )
    return facts


def _run(catalog: Catalog, run: str) -> RunFacts:
    record = catalog.runs.get(run)
    shards = {m.row_set_sha256: m.n_rows for m in catalog.shards_by_run[run]}
    has_census = bool(catalog.parts.get((run, "requests")) and catalog.parts.get((run, "spans")))
    provenance = record.model_dump(mode="json")["fields"] if record else {}
    base: dict[str, Any] = {
        "run": run,
        "started_ns": record.started_ns if record else None,
        "has_record": record is not None,
        "has_census": has_census,
        "provenance": provenance,
        "n_rows": sum(shards.values()),
        "is_imported": catalog.is_imported(run),
        "sample": sample_of_run(catalog, run),
        **_losses(catalog, run),
    }
    if has_census:
        base |= _census(catalog, run)
    return RunFacts(**base)


def sample_of_run(catalog: Catalog, run: str) -> Sample | None:
    """Return how the stored rows of a run were drawn, ``None`` for one that stores every row.

    Shards of other hooks with the same rows count once.

    Raises:
        ActdsError: E424 a probability that is none; and as ``Shard.tokens``.

    Spec: 0.1 section 7.10.
    """
    record = catalog.runs.get(run)
    shards = {shard.manifest.row_set_sha256: shard for shard in catalog.shards_of(run)}
    if not shards or not is_drawn_from(record):
        return None
    return Sample.of(np.concatenate([inclusion_of_rows(s, record) for s in shards.values()]))


def _losses(catalog: Catalog, run: str) -> dict[str, Any]:
    drops = catalog.table("drops", run, ["drop"])
    stalls = catalog.table("stalls", run, ["duration_ns"])
    return {
        "n_drop_events": pc.count_distinct(drops["drop"]).as_py(),
        "n_stalls": stalls.num_rows,
        "stalled_ns": _sum(stalls, "duration_ns"),
    }


def _census(catalog: Catalog, run: str) -> dict[str, Any]:
    requests = catalog.table("requests", run, _OF_REQUESTS)
    fates = fate_counts(catalog.table("spans", run, list(FATE_COLUMNS)))
    lines = [
        LossFacts(*fate, n)
        for fate, n in sorted(fates.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    ]
    referenced = sum(loss.n_positions for loss in lines if loss.disposition == "cache_ref")
    served = requests.filter(tables.is_served(requests))
    return {
        "n_requests": requests.num_rows,
        "n_steps": catalog.table("steps", run, ["step"]).num_rows,
        "prompt_tokens": _sum(served, "prompt_len"),
        "generated_tokens": _sum(requests, "generated_len"),
        "cached_tokens": _sum(requests, "cached_tokens"),
        "n_preemptions": _sum(requests, "n_preemptions"),
        "n_positions": fates.total(),
        "n_computed": n_computed(fates),
        "finish_reasons": _counts(requests["finish_reason"]),
        "n_cache_ref": referenced,
        "losses": [loss for loss in lines if loss.disposition not in ("captured", "cache_ref")],
    }


_OF_REQUESTS = ["prompt_len", "generated_len", "cached_tokens", "n_preemptions", "finish_reason"]


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    entries = pc.value_counts(column).to_pylist()
    counts = ((str(entry["values"]), entry["counts"]) for entry in entries)
    return dict(sorted(counts, key=lambda item: (-item[1], item[0])))


def _sum(table: pa.Table, column: str) -> int:
    total: int | None = pc.sum(table[column]).as_py()
    return total or 0


def page(facts: Facts) -> Iterator[Line]:
    """Yield the page of ``actds info``, line by line; no line holds a control character."""
    for line in _page_lines(facts):
        yield Line(printable(line.text), line.style)


def _page_lines(facts: Facts) -> Iterator[Line]:
    yield Line(f"Dataset {facts.path}", "title")
    if not facts.sealed:
        after = f" since seal {facts.seal}" if facts.seal else ""
        yield Line(
            f"NOT SEALED (E306): the ledger is not closed{after}; the rows below may be incomplete "
            "and are not accounted for. Do not train on it.",
            "bad",
        )
        path = shlex.quote(facts.path)
        step = f"actds write --resume, or actds seal {path}"
        if facts.is_imported:
            step = f"actds seal {path} --imported"
        yield Line(f"Next: {step}", "bad")
    yield from pairs(
        {
            "dataset": facts.dataset,
            "format": f"actds {facts.format_version}",
            "written": f"{when(facts.created_ns)} by {facts.writer}",
            "sealed": f"{when(facts.sealed_ns)}, seal {facts.seal}" if facts.sealed else "no",
            "digest": facts.digest if facts.sealed else f"{facts.digest} (of an unsealed ledger)",
        }
    )
    yield from _page_hooks(facts)
    if named := [source.words() for source in facts.sources if source.source is not None]:
        yield Line("")
        yield Line("Prompts", "title")
        yield from (Line(f"  {words}") for words in named)
    if facts.labels:
        yield Line("")
        yield Line("Labels of the prompts", "title")
        yield from (Line(f"  {label.words()}") for label in facts.labels)
    for run in facts.runs:
        yield from _page_run(run)
    yield Line("")
    yield Line("What is missing, and why", "title")
    yield from list(missing(facts)) or [Line("  nothing: no row is missing")]


def _page_hooks(facts: Facts) -> Iterator[Line]:
    yield Line("")
    phases = ", ".join(f"{n:,} {phase}" for phase, n in facts.phases.items()) or "none"
    yield Line(
        f"Rows: {sum(facts.phases.values()):,} ({phases}) in {counted(facts.n_shards, 'shard')}",
        "title",
    )
    rows = [("hook", "layer", "rows", "d_model", "type", "size", "stored", "ratio")]
    for hook in facts.hooks:
        ratio = "-" if hook.ratio is None else f"{hook.ratio:.3f}x"
        sizes = format_nbytes(hook.nbytes), format_nbytes(hook.stored_nbytes)
        numbers = str(hook.layer), f"{hook.n_rows:,}", str(hook.d_model)
        rows.append((hook.name, *numbers, hook.dtype, *sizes, ratio))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column in (0, 4) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield Line("  " + "  ".join(cells).rstrip(), "dim" if number == 0 else "plain")
    for words in odd_values(facts):
        yield Line(f"  {words}", "bad")
    if facts.raw_shards:
        raw = f"{facts.raw_shards} of {facts.n_shards} shards are stored raw"
        yield Line(f"  {raw}; compress them with actds recompress")
    if facts.redacted_requests:
        n = counted(facts.redacted_requests, "request")
        yield Line(f"  {n} redacted: their positions count as filtered")
    if facts.removable_nbytes:
        size, n = format_nbytes(facts.removable_nbytes), counted(facts.replaced_shards, "shard")
        yield Line(f"  {size} of {n} that are replaced; remove them with actds recompress")


def _page_run(run: RunFacts) -> Iterator[Line]:
    yield Line("")
    yield Line(f"Run {run.run}, started {when(run.started_ns)}", "title")
    if run.is_imported:
        unknown = "nobody recorded how the rows were made, and which are missing"
        yield Line(f"  IMPORTED (E403): {unknown}.", "bad")
    elif not run.has_census:
        yield Line(f"  NO CENSUS (E403): {run.n_rows:,} rows cannot be accounted for.", "bad")
    else:
        yield from pairs(_page_census(run))
    if run.sample is not None:
        yield Line(f"  {sample_in_words(run)}", "bad")
    for words in changes_in_words(run):
        yield Line(f"  {words}", "bad")
    if not run.has_record:
        yield Line("  NO RUN RECORD (E401): the provenance of the rows is unknown.", "bad")
        return
    yield Line("  Provenance", "title")
    width = max(len(name) for name in run.provenance)
    for name, entry in run.provenance.items():
        unknown = entry["origin"] == "unknown"
        value = f"null: {entry['reason']}" if unknown else entry["value"]
        text = value if isinstance(value, str) else json.dumps(value)
        line = f"    {entry['origin']:8}  {name.ljust(width)}  {text}"
        yield Line(line, "dim" if unknown else "plain")


def _page_census(run: RunFacts) -> dict[str, str]:
    ends = ", ".join(f"{n:,} {reason}" for reason, n in run.finish_reasons.items())
    prompt, cached = run.prompt_tokens or 0, run.cached_tokens or 0
    lost = sum(loss.n_positions for loss in run.losses)
    positions = run.n_positions or 0
    return {
        "requests": f"{run.n_requests:,} ({ends or 'none'})",
        "tokens": f"{prompt:,} prompt, {run.generated_tokens:,} generated, {run.n_steps:,} steps",
        "cache hits": f"{cached:,} prompt tokens ({share(cached, prompt)})",
        "positions": (
            f"{positions:,} = {run.n_rows:,} rows ({share(run.n_rows, positions)}) + "
            f"{run.n_cache_ref:,} served from the prefix cache + {lost:,} without a row"
        ),
        "preemptions": f"{run.n_preemptions:,}",
        "stalls": f"{run.n_stalls:,}, {run.stalled_ns / 1e9:.3f} s",
    }


def changes_in_words(run: RunFacts) -> Iterator[str]:
    """Yield a line for each intervention that changed rows of a run, the first ten."""
    field = run.provenance.get(FIELD, {}).get("value")
    items = parse_field(field, FIELD) if isinstance(field, str) else ()
    for number, item in enumerate(items[:10], 1):
        edits = ", ".join(f"{e.op} {e.strength:g} at {e.hook}" for e in item.edits)
        yield f"rows changed by {item.name} (intervention == {number}): {edits}"
    if len(items) > 10:
        yield f"and by {len(items) - 10:,} more interventions"


def sample_in_words(run: RunFacts) -> str:
    """Return how the rows of a run were drawn: probabilities, unit and effective rows."""
    field = run.provenance.get(INCLUSION, {}).get("value")
    unit = json.loads(field)["unit"] if isinstance(field, str) else "request"
    how = "a sample, as its set says" if run.is_imported else f"a sample by {unit}"
    return f"{how}: {run.sample}, if each has the weight 1 / inclusion"


def missing(facts: Facts) -> Iterator[Line]:
    """Yield one indented line per kind of loss, unknown fact or stray file, with its reason."""
    for run in facts.runs:
        for loss in run.losses:
            reason = loss.reason or "no reason given"
            computed = loss.disposition in COMPUTED
            part = share(loss.n_positions, (run.n_computed if computed else run.n_positions) or 0)
            part += " of the computed" if computed else " of all"
            lost = counted(loss.n_positions, "position")
            yield Line(f"  {lost} {loss.disposition} ({part}): {reason}")
        yield from _unknown_facts(run)
    for source in facts.sources:
        for group in source.unserved:
            n = f"{counted(group.n_records, 'prompt')} {group.finish_reason}"
            first = "" if group.n_records == 1 else "; the first"
            yield Line(f"  {n} ({counted(group.n_tokens, 'token')}){first}: {group.reason}")
        if source.n_unlisted:
            n = f"{counted(source.n_unlisted, 'record')} of {source.source}"
            yield Line(f"  {n} in no request: no run began that was to serve them")
    n_rows = sum(facts.phases.values())
    has_choices = any(HOOK_CHOICES in run.provenance for run in facts.runs)
    for hook in facts.hooks if has_choices else ():
        if n_lacking := n_rows - hook.n_rows:
            words = f"{counted(n_lacking, 'row')} ({share(n_lacking, n_rows)}) without {hook.name}"
            yield Line(f"  {words}: their requests chose other hooks")
    external = facts.totals.get("external", 0)
    if external:
        yield Line(f"  {counted(external, 'position')} served from KV that came from outside")
    unresolved = facts.totals.get("unresolved", 0)
    if unresolved:
        lost = counted(unresolved, "cached position")
        yield Line(f"  {lost} whose row is missing (E410)", "bad")
    for chain in facts.chains:
        if chain.state != "closed" or chain.reason != "finished":
            why = f": {chain.reason}" if chain.reason else ""
            yield Line(f"  {chain.kind} chain {chain.chain} of run {chain.run} {chain.state}{why}")
    for path in facts.unreachable[:_MAX_LISTED]:
        yield Line(f"  {path}: not part of the dataset (E105): the ledger does not refer to it")
    more = len(facts.unreachable) - _MAX_LISTED
    if more > 0:
        yield Line(f"  and {more:,} more such files")


def _unknown_facts(run: RunFacts) -> Iterator[Line]:
    """Yield the unknown facts of a run by their reason; the provenance above names them all."""
    by_reason: dict[str, list[str]] = {}
    for name, entry in run.provenance.items():
        if entry["origin"] == "unknown":
            by_reason.setdefault(entry["reason"], []).append(name)
    for reason, names in by_reason.items():
        some = ", ".join(names[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        facts = counted(len(names), "fact")
        yield Line(f"  {facts} of run {run.run} unknown ({some}{more}): {reason}")
