"""The seven places between a source and a batch where rows go, each judged by itself.

What each left out, of whom most, how far off a mean can be by it, and what makes it pass: loader
arguments where there are some. What is not on record is not known, and never passes.

Spec: 0.1 section 14.10.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.dataset.catalog import Catalog
from actds.dataset.info import overflowed
from actds.explore.requests import RowRanges
from actds.format.interventions import interventions_of
from actds.format.schema import RowCounts
from actds.text import counted, format_seconds, share
from actds_validators.audit import census
from actds_validators.audit.place import (
    LEVELS,
    TITLES,
    Answer,
    Decision,
    Level,
    Place,
    PlaceName,
    SourceAccount,
    Worst,
)
from actds_validators.audit.result import (
    Accounting,
    Coverage,
    CoverageCell,
    Limits,
    Queues,
    Sample,
    Verdict,
)
from actds_validators.audit.verdict import Evidence
from actds_validators.audit.wording import DOMINANT, stratum_words
from actds_validators.statistics.intervals import worst_case
from actds_validators.statistics.strata import total_variation

UNSUPPORTED = "unsupported:"
"""How reasons of ``filtered`` begin that nobody chose."""
NO_ADAPTER = "request.adapter is None"


@dataclass(frozen=True)
class Audited:
    """What the places are judged by."""

    catalog: Catalog
    path: str
    records: pa.Table
    source: SourceAccount
    evidence: Evidence
    verdict: Verdict
    limits: Limits

    @property
    def account(self) -> Accounting:
        return self.evidence.accounting

    @property
    def coverage(self) -> Coverage | None:
        return self.evidence.coverage

    def replay(self) -> str:
        if self.evidence.sample is not None:  # with one that drew its rows, a whole one is read
            return f"actds replay {shlex.quote(self.path)} MISSING --model FOLDER"
        return f"actds replay {shlex.quote(self.path)} MISSING --model FOLDER --only missing"

    def level_of(self, lost: float) -> Level:
        """Return the level of a share of which nothing else is known: its worst case decides."""
        if worst_bias(lost) <= self.limits.negligible_bias:
            return "PASS"
        return "FAIL" if lost > self.limits.max_loss else "WARN"

    def limit_of_share(self) -> str:
        negligible, most = self.limits.negligible_bias, self.limits.max_loss
        return f"worst case of any mean at most {negligible:g} SD; no more than {most:.2%}"


def places(audited: Audited) -> list[Place]:
    judges = (_source, _cache, _rules, _ends, _queues, _values, _identity)
    return [judge(audited) for judge in judges]


def worst_bias(lost: float) -> float:
    return worst_case(min(lost, 1 - 1e-9))


def worst_of(groups: Iterable[Worst]) -> Worst | None:
    """Return the group of the largest share, of those that hold a tenth of what was left out.

    None where no group lost a larger share than its kind.
    """
    every = [group for group in groups if group.of]
    n, of = defaultdict[str, int](int), defaultdict[str, int](int)
    for group in every:
        n[group.kind] += group.n
        of[group.kind] += group.of
    more = [
        group
        for group in every
        if 10 * group.n >= n[group.kind] and group.n * of[group.kind] > group.of * n[group.kind]
    ]
    return max(more, key=lambda group: (group.n / group.of, group.n), default=None)


def _place(
    audited: Audited,
    name: PlaceName,
    n: int,
    of: int,
    unit: str,
    share: float | None = None,
    **more: Any,
) -> Place:
    """Return a place that left out so many of so many; by default its worst case judges it."""
    share = share if share is not None else n / of if of else 0.0
    more.setdefault("level", audited.level_of(share))
    more.setdefault("limit", audited.limit_of_share())
    more.setdefault("bias", worst_bias(share))
    return Place(name=name, n=n, of=of, unit=unit, share=share, **more)


# source ----------------------------------------------------------------------------------------


def _source(audited: Audited) -> Place:
    source = audited.source
    if source.records is None:
        reached = "the requests that reached the engine"
        return Place(
            name="source",
            level="INCONCLUSIVE",
            n=None,
            of=None,
            unit="records",
            share=None,
            bias=None,
            limit=audited.limit_of_share(),
            headline="how much of the source was served is not on record",
            sentence="No run record says how many records the source had, so what was refused or "
            "never reached the engine is not known.",
            to_do=[f"If {reached} are all that you mean by the source: --accept source."],
        )
    n = source.records - source.served
    place = partial(_place, audited, "source", n, source.records, "records")
    if not n:
        return place(
            headline="every record of the source was served",
            sentence=f"All {counted(source.records, 'record')} of the source were served.",
        )
    n_tokens = source.tokens - source.served_tokens
    lost = max(n / source.records, n_tokens / max(1, source.tokens))
    cut = " (interrupted)" if source.interrupted else ""
    reasons = "; ".join(f"{x.n:,} {x.what}: {x.reason}" for x in source.left_out[:3])
    part = f", with {share(n_tokens, source.tokens)} of the prompt tokens," if n_tokens else ""
    return place(
        share=lost,
        worst=worst_of(census.groups_left_out(audited.records, source)),
        headline=f"{lost:.1%} of the source was never served{cut}",
        sentence=f"{n:,} of {counted(source.records, 'record')} ({share(n, source.records)})"
        f"{part} were never served{cut}: {reasons}.",
        to_do=list(_serve_the_rest(source)),
    )


def _serve_the_rest(source: SourceAccount) -> Iterator[str]:
    what = {left.what for left in source.left_out}
    if what & {"never begun", "not on record"}:
        yield (
            "The harvest ended before its source did. Go on where it stopped: the same actds "
            "write command with --resume."
        )
    if "skipped" in what:
        yield (
            "Serve what was skipped: raise the engine's max_model_len, shorten or fix the "
            "records. If rows of them are not wanted: --accept source."
        )


# prefix cache ----------------------------------------------------------------------------------


def _cache(audited: Audited) -> Place:
    account, coverage, limits = audited.account, audited.coverage, audited.limits
    hits = account.cache_ref
    served = account.captured + account.thinned + hits
    limit = f"classes and positions stored within {limits.max_shift:.0%} of what was served"
    place = partial(_place, audited, "cache", of=served, unit="positions", limit=limit)
    if not hits or coverage is None:
        none = "no position was served from the prefix cache"
        sentence = f"{none.capitalize()}: each stored row was served once."
        return place(0, headline=none, sentence=sentence)
    by_class = _shift(coverage.cells, "token_class")
    by_position = _shift(coverage.cells, "low")
    shift = max(by_class, by_position)
    unresolved = account.unresolved / max(1, account.own_hits) > limits.max_unresolved
    without = (account.unresolved + account.external) / served
    level: Level = "WARN" if unresolved or account.external or shift > limits.max_shift else "PASS"
    level = "FAIL" if without > limits.max_loss else level
    loaded = {}
    if level == "WARN" and not unresolved and not account.external:
        drawn = ["inclusion"] if audited.evidence.sample is not None else []
        loaded["weights"] = ["multiplicity", *drawn]
        if coverage.dominant is not None and coverage.dominant.share >= DOMINANT:
            loaded["exclude"] = coverage.dominant.exclude
    worst = worst_of(_classes(coverage.cells, "reused"))
    kept = ""
    if worst is not None:
        part = share(worst.of - worst.n, worst.of)
        kept = f", most for {worst.label}: {part} of its positions are stored"
    return place(
        hits,
        level=level,
        loaded=loaded,
        worst=worst,
        bias=coverage.once_bias,
        headline=f"the prefix cache served {share(hits, served)}, and the rows differ by "
        f"{shift:.1%} from what was served",
        sentence=f"{share(hits, served)} of the served positions were prefix-cache hits. Stored "
        f"rows differ from what was served by {by_class:.1%} in token class and "
        f"{by_position:.1%} in position (total variation){kept}.",
        to_do=list(_weigh(audited, coverage)),
    )


def _shift(cells: Sequence[CoverageCell], by: str) -> float:
    sums = defaultdict[object, list[int]](lambda: [0, 0])
    for cell in cells:
        sides = sums[getattr(cell, by)]
        sides[0] += cell.stored
        sides[1] += cell.stored + cell.reused + cell.external
    stored, served = zip(*sums.values(), strict=True)
    return total_variation(stored, served) or 0.0


def _classes(cells: Sequence[CoverageCell], fate: str) -> Iterator[Worst]:
    sums = defaultdict[str, list[int]](lambda: [0, 0])
    for cell in cells:
        n = getattr(cell, fate)
        sums[cell.token_class][0] += n
        sums[cell.token_class][1] += n + cell.stored
    for name, (n, of) in sums.items():
        yield Worst(kind="class", label=name, n=n, of=of, unit="positions")


def _weigh(audited: Audited, coverage: Coverage) -> Iterator[str]:
    account, cell = audited.account, coverage.dominant
    if account.own_hits:
        drawn = audited.evidence.sample is not None
        weights = '["multiplicity", "inclusion"]' if drawn else '"multiplicity"'
        yield (
            f"Load with weights={weights}, each row as often as it was served: "
            f"{account.captured:,} rows become {coverage.effective_rows:,.0f} effective ones. If "
            "each distinct prefix is to count once: --accept cache."
        )
    if cell is not None and cell.share >= DOMINANT and cell.exclude:
        names = ", ".join(cell.exclude)
        yield (
            f"Leave out {names} with it: token id {cell.token_id} at position {cell.position} "
            f"({counted(cell.n_rows, 'row')}, served {cell.n_served:,} times) would be "
            f"{cell.share:.0%} of the squared deviation of the norm at {cell.hook}."
        )
    n = account.unresolved + account.external
    if n:
        outside = f", {account.external:,} of them from outside the run" if account.external else ""
        yield (
            f"{counted(n, 'position')} served from the cache have no row here{outside}. Compute "
            f"them: {audited.replay()}; load both: actds.Loader([{audited.path!r}, 'MISSING'], "
            "once=True)."
        )


# rules, ends, queues ---------------------------------------------------------------------------


def _reasons(account: Accounting, *fates: str) -> str:
    steps = sorted(
        (step for step in account.waterfall if step.name in fates),
        key=lambda step: -step.n_positions,
    )
    return ", ".join(f"{step.n_positions:,} {step.reason or step.name}" for step in steps[:3])


def _rules(audited: Audited) -> Place:
    account = audited.account
    n, of = account.filtered, account.positions - account.undelivered
    hook, n_lacking = _chosen_least(audited.catalog)
    place = partial(_place, audited, "rules", n + n_lacking, of, "positions")
    if not n + n_lacking:
        return place(headline="no rule left a row out", sentence="No rule left a row out.")
    words, sentences = [], []
    for number, why, more in (
        (n, "were left out by a rule", f": {_reasons(account, 'filtered')}"),
        (n_lacking, f"have rows without {hook}: other hooks were chosen", ""),
    ):
        if number:
            part = share(number, of)
            words += [f"{part} of the positions {why}"]
            sentences += [f"{number:,} of {counted(of, 'position')} ({part}) {why}{more}."]
    reasons = [s.reason or "" for s in account.waterfall if s.name == "filtered"]
    chosen = not any(reason.startswith(UNSUPPORTED) for reason in reasons)
    to_do = [
        "If rows of what the rules left out are not wanted: --accept rules. Else harvest "
        "again without the rules."
    ]
    if f"{UNSUPPORTED}mixed_weights" in reasons:
        to_do.append("Reset the prefix cache whenever the weights of a running engine change.")
    level = audited.level_of((n + n_lacking) / of)
    cells = audited.coverage.cells if audited.coverage else []
    return place(
        level="WARN" if level == "FAIL" and chosen else level,
        worst=worst_of(_classes(cells, "filtered")),
        headline="; ".join(words),
        sentence=" ".join(sentences),
        to_do=to_do,
    )


def _chosen_least(catalog: Catalog) -> tuple[str, int]:
    """Return the hook that the rows of most positions lack, and of how many, hits among them."""
    lacks = dict.fromkeys((hook.name for hook in catalog.genesis.hooks), 0)
    for run in filter(catalog.has_choices, catalog.runs_with_data):
        ranges, lines = RowRanges.of(catalog, run), catalog.table("requests", run)
        owner = (ranges.row >> np.uint64(32)).astype(np.int64)
        n_rows = np.bincount(owner, ranges.length, lines["request"].to_numpy().max(initial=0) + 1)
        for text in pc.unique(lines["hooks"].drop_null()).to_pylist():
            chosen = lines.filter(pc.equal(lines["hooks"], text))["request"].to_numpy()
            for hook in lacks.keys() - set(text.split(",")):
                lacks[hook] += int(n_rows[chosen].sum())
    return max(lacks.items(), key=lambda of_hook: of_hook[1])


def _ends(audited: Audited) -> Place:
    account = audited.account
    n, of = account.aborted + account.never_computed, account.computed + account.never_computed
    level = audited.level_of(n / of if of else 0.0)
    headline, sentence = "every request ran to its end", "Every request ran to its end."
    ends = pc.is_in(audited.records["finish_reason"], pa.array(("abort", "error", "unfinished")))
    if n_cut := int(pc.sum(ends).as_py() or 0):
        headline = f"{counted(n_cut, 'request')} ended early, and no position was lost by it"
        sentence = (
            f"{counted(n_cut, 'request')} did not run to the end: aborted, failed or unfinished. "
            "No position lacks a row because of it."
        )
    if n:
        headline = f"{share(n, of)} of the positions were cut off with their request"
        sentence = (
            f"{n:,} of {counted(of, 'position')} ({share(n, of)}) have no row because their "
            f"request or run ended: {_reasons(account, 'aborted', 'never computed')}. No test "
            "looks at them."
        )
    if account.undelivered:
        sentence += (
            f" {counted(account.undelivered, 'position')} computed past the end of a request "
            "went to no client, and are no loss."
        )
    to_do = [f"Compute them: {audited.replay()}. If they are not wanted: --accept ends."]
    facts: dict[str, Any] = {"headline": headline, "sentence": sentence, "to_do": to_do}
    level = "INCONCLUSIVE" if level == "WARN" else level
    return _place(audited, "ends", n, of, "positions", level=level, **facts)


_HOW = {
    "load-dependent": ", more of them under load",
    "time-dependent": ", more of them at some times",
    "content-dependent": ", depending on their content",
    "values-dependent": ", depending on their values",
    "by-design": ", and no mean of a channel is off by it",
    "biased": ", and means of the stored rows are off",
    "too-little-evidence": ", and on what it depends is not known",
}
"""What a verdict adds to the share that was dropped, in a few words."""


def _queues(audited: Audited) -> Place:
    account, verdict, missing = audited.account, audited.verdict, audited.evidence.missingness
    n, of = account.dropped, account.captured + account.thinned + account.dropped
    if audited.evidence.sample is not None:
        return _drawn(audited, audited.evidence.sample)
    none = "no computed row was dropped"
    facts: dict[str, Any] = {"limit": f"{audited.limit_of_share()}; else tests and equivalence"}
    place = partial(_place, audited, "queues", n, of, "rows")
    if not n and account.thinned:
        words = f"{counted(account.thinned, 'row')} not drawn, and none to say what they are like"
        facts |= {"level": "INCONCLUSIVE", "bias": None, "headline": words}
        return place(sentence=verdict.sentence, **facts)
    if not n:
        return place(headline=none, sentence=f"{none.capitalize()}.", **facts)
    if audited.level_of(n / of) != "PASS" or verdict.kind == "worst-stratum":
        facts["level"] = verdict.level
        facts["to_do"] = [s for s in verdict.next_steps if not s.startswith("Train on it")]
        estimated = [
            abs(d.before_weighting.value)
            for d in (missing.differences if missing else ())
            if d.before_weighting and d.covariate.group != "system"
        ]
        follow_up = audited.evidence.follow_up
        if follow_up is not None and verdict.kind == "by-design":
            facts |= {"bias": follow_up.farthest.reach, "bias_is": "at most"}
        elif follow_up is not None and verdict.kind == "biased":
            facts |= {"bias": abs(follow_up.farthest.bias.value), "bias_is": "estimated"}
        elif estimated and account.captured:
            facts |= {"bias": max(estimated), "bias_is": "estimated"}
    untested = verdict.kind == "uncorrelated" and not any(
        d.covariate.group == "values" for d in (missing.differences if missing else ())
    )
    sentence = verdict.sentence
    if untested:  # without readouts
        facts["level"] = "WARN"
        sentence += " Whether losses depend on the values of the rows was not tested."
    headline = f"{share(n, of)} of the computed rows were dropped{_HOW.get(verdict.kind, '')}"
    strata = missing.worst_strata[:1] if missing else []
    if strata and verdict.kind == "worst-stratum":
        part = share(strata[0].n_lost, strata[0].n)
        headline = f"{part} of the rows of {stratum_words(strata[0])} were dropped"
    worst = [Worst(kind=s.kind, label=s.label, n=s.n_lost, of=s.n, unit="rows") for s in strata]
    return place(worst=worst[0] if worst else None, headline=headline, sentence=sentence, **facts)


def _drawn(audited: Audited, sample: Sample) -> Place:
    """Return the place where rows were drawn: unbiased as soon as each is weighted."""
    account, verdict, limit = audited.account, audited.verdict, audited.limits.negligible_bias
    n, of = account.dropped + account.thinned, account.computed - account.aborted
    by_design = sample.n_thinned + sample.n_dropped
    words = (
        f"{share(by_design, of)} of the computed rows were not drawn, each with a known "
        f"probability; weight by 1/inclusion: {sample.effective_rows:,.0f} effective rows"
    )
    facts: dict[str, Any] = {"level": verdict.level, "limit": f"any mean known within {limit:g} SD"}
    facts["to_do"] = [s for s in verdict.next_steps if not s.startswith("Train on it")]
    if math.isfinite(sample.farthest.reach):
        facts["bias"] = sample.farthest.reach + audited.evidence.beyond_draw
    if verdict.kind == "by-design" and sample.plain > limit:
        facts |= {"level": "WARN", "loaded": {"weights": ["inclusion"]}}
    if account.dropped > sample.n_dropped:
        words += f"; {counted(account.dropped - sample.n_dropped, 'more row')} lost otherwise"
    return _place(
        audited, "queues", n, of, "rows", headline=words, sentence=verdict.sentence, **facts
    )


# values ----------------------------------------------------------------------------------------


def _values(audited: Audited) -> Place:
    shards = audited.catalog.shards
    by_hook = RowCounts.by_hook(shard.values for shard in shards)
    hook = max(by_hook, key=lambda h: (by_hook[h].not_finite, by_hook[h].zero), default="")
    not_finite, zero = (by_hook[hook].not_finite, by_hook[hook].zero) if hook else (0, 0)
    rows = sum(shard.n_rows for shard in shards if hook in shard.hooks)
    n, limit = max(not_finite, zero), "no row that is not finite, none that is all zero"
    place = partial(_place, audited, "values", n, rows, "rows", limit=limit)
    if not n:
        if not rows:
            return place(headline="no row is stored", sentence="No row is stored.")
        sentence = (
            "By the counts of the manifests every stored row is finite, and none is all zero."
        )
        return place(headline="every stored row is finite", sentence=sentence)
    sentence = (
        f"Of {counted(rows, 'row')} of {hook}, {not_finite:,} are not finite (NaN or infinite) and "
        f"{zero:,} are all zero."
    )
    n_overflowed, casts = overflowed(audited.catalog, hook)
    if n_overflowed:
        sentence += f" {n_overflowed:,} of them overflowed in the cast {' or '.join(casts)}."
    command = f"actds validate {shlex.quote(audited.path)} --level deep"
    few = audited.level_of(n / rows) == "PASS"
    # A filter of the loader leaves out what is not finite, where every row has a norm readout.
    has_norms = all((run, "readouts") in audited.catalog.parts for run in audited.catalog.runs)
    return place(
        level="FAIL" if not_finite or n > audited.limits.max_loss * rows else "WARN",
        loaded={"exclude": ["sink"]} if few and not zero and has_norms else {},
        worst=Worst(kind="hook", label=hook, n=n, of=rows, unit="rows"),
        headline=f"{n:,} of {rows:,} rows of {hook} are "
        + ("not finite" if not_finite else "all zero"),
        sentence=sentence,
        to_do=[f"Find out where they come from before you train: {command} names them."],
    )


# identity --------------------------------------------------------------------------------------


def _identity(audited: Audited) -> Place:
    rows = census.rows_of(audited.catalog)
    total, runs = sum(rows.values()), counted(len(rows), "run")
    differing = census.differing_facts(audited.catalog)
    adapters = census.rows_by_adapter(audited.catalog)
    models = [name for name in differing if census.one_model(name)]
    n_others = max((_minority(values, rows) for values in differing.values()), default=0)
    some = "; ".join(
        f"{name}: {' / '.join(sorted({_brief(value) for value in values.values()}))}"
        for name, values in list(differing.items())[:3]
    )
    limit = "one model, one set of settings, one overflow policy"
    facts: dict[str, Any] = {"level": "PASS", "limit": limit}
    headline = "one model, one set of settings"
    sentence = f"{runs}, {headline}."
    doubtful = census.of_unknown_weights(audited.catalog)
    records = {run: audited.catalog.runs.get(run) for run in rows}
    changed = {run: items for run in rows if (items := interventions_of(records[run]))}
    if doubtful:
        n_others = max(n_others, sum(rows[run] for run in doubtful))
        headline = "rows of weights that nobody knows"
        sentence = (
            f"The weights of {', '.join(doubtful[:3])} were changed, and neither a call nor a "
            "step has shown when (E509)."
        )
        facts["level"] = "FAIL"
    elif changed:
        n_others = max(n_others, sum(rows[run] for run in changed))
        headline = "rows that interventions changed"
        named = ", ".join(item.name for item in changed[min(changed)][:3])
        sentence = (
            f"Interventions ({named}) changed rows of {', '.join(sorted(changed)[:3])} while the "
            "model computed; what it computed behind them follows from that."
        )
        facts["level"] = "FAIL"
        facts["to_do"] = [
            "Study them with an expression over intervention; train on a harvest without."
        ]
    elif len(adapters) > 1:
        named = ", ".join(f"{n:,} of {name}" for name, n in adapters.items())
        n_others = max(n_others, sum(adapters.values()) - max(adapters.values()))
        headline, sentence = f"rows of {len(adapters)} models", f"Rows are of adapters: {named}."
        facts["level"] = "FAIL"
        if not models and not differing and None in adapters:
            facts["loaded"] = {"where": [NO_ADAPTER]}
    elif models:
        headline, sentence = "runs of more than one model", f"{runs} of different models: {some}."
        facts["level"] = "FAIL"
    elif len(rows) > 1 and "model.weights_sha256" not in _known(audited.catalog):
        headline = "whether all runs are of one model is not on record"
        sentence = f"{runs}, and the digest of the weights of one is not on record."
        facts |= {"level": "INCONCLUSIVE", "bias": None}
    elif differing:
        headline, sentence = f"{runs} with different settings", f"{runs} differ in {some}."
        facts["level"] = "WARN"
    if differing:
        # Of a model the fact that most runs know: weights that were set while an engine ran have no
        # files.
        values = max((differing[name] for name in models or differing), key=len)
        facts["to_do"] = [
            f"Train on one of them: where=\"run == '{run}'\" ({rows[run]:,} rows: {_brief(value)})."
            for run, value in list(values.items())[:3]
            if run not in doubtful
        ]
    facts |= {"headline": headline, "sentence": sentence}
    return _place(audited, "identity", n_others, total, "rows", **facts)


def _brief(value: str) -> str:
    return value[:12] if len(value) == 64 else value[:40]


def _minority(values: dict[str, str], rows: dict[str, int]) -> int:
    sums = defaultdict[str, int](int)
    for run, value in values.items():
        sums[value] += rows[run]
    return sum(sums.values()) - max(sums.values())


def _known(catalog: Catalog) -> set[str]:
    each = [
        {n for n, f in record.fields.items() if f.value is not None}
        for record in catalog.runs.values()
    ]
    return set.intersection(*each) if each else set()


NEAR_MISS_S = 60.0
"""Seconds that the writer may have held up the engine, in all, before it is told."""
NEAR_MISS_SHARE = 0.05
"""The same as a share of the time of the run."""
_ANSWERS: dict[Decision, tuple[Level, str]] = {
    "yes": ("PASS", "Yes: train on it"),
    "yes, loaded like this": ("WARN", "Yes, loaded like this"),
    "yes, with limits": ("WARN", "Yes, with these limits"),
    "not known": ("INCONCLUSIVE", "Not known"),
    "no": ("FAIL", "No"),
}


def unaccounted(verdict: Verdict) -> Answer:
    return Answer(
        decision="no",
        level="FAIL",
        words="No: there are accounting mismatches",
        place=None,
        sentence=verdict.sentence,
        load=None,
        next_steps=verdict.next_steps,
    )


def conclude(
    places: Sequence[Place], accepted: Sequence[PlaceName], path: str, queues: Queues | None
) -> tuple[list[Place], Answer]:
    """Return the places with what the user accepted, and the answer over them.

    Yes where every place passes or is accepted; with a loader line where arguments make every
    other one pass; no where one fails; not known where something is not on record; else yes with
    limits. The place that decides is the most severe, and of equal ones that of the largest bias.
    """
    judged = [p.model_copy(update={"accepted": p.name in accepted}) for p in places]
    against = [p for p in judged if p.counts_as != "PASS"]
    against.sort(key=_first)
    decision = _decision(against)
    first = against[0] if against else None
    load = _loader(against, path) if against and all(p.loaded for p in against) else None
    waived = [p for p in judged if p.accepted and p.level != "PASS"]
    level, words = _ANSWERS[decision]
    if first is not None:
        words = f"{words}: {first.headline}"
    elif waived:
        words = f"{words}; accepted: {', '.join(TITLES[p.name] for p in waived)}"
    sentences = [p.sentence for p in against] or ["Nothing that was looked at speaks against it."]
    steps = [step for p in against for step in p.to_do]
    return judged, Answer(
        decision=decision,
        level=level,
        words=words,
        place=first.name if first is not None else None,
        sentence=sentences[0],
        load=load,
        accepted=[p.name for p in waived],
        near_misses=list(_near_misses(judged, queues)),
        next_steps=steps or ["Train on it."],
    )


def _first(place: Place) -> tuple[int, bool, float]:
    bias = math.inf if place.bias is None else place.bias
    return -LEVELS.index(place.counts_as), bool(place.loaded), -bias


def _decision(against: Sequence[Place]) -> Decision:
    levels = {p.counts_as for p in against}
    if not against:
        return "yes"
    if "FAIL" in levels:
        return "no"
    if "INCONCLUSIVE" in levels:
        return "not known"
    return "yes, loaded like this" if all(p.loaded for p in against) else "yes, with limits"


def _loader(places: Sequence[Place], path: str) -> str:
    arguments: dict[str, list[str]] = {}
    for place in places:
        for name, values in place.loaded.items():
            listed = arguments.setdefault(name, [])
            listed += [value for value in values if value not in listed]
    words = [repr(path)]
    for name, values in arguments.items():
        if name == "where":
            words.append(f'where="{" and ".join(values)}"')
        elif len(values) == 1:
            words.append(f'{name}="{values[0]}"')
        else:
            quoted = ", ".join(f'"{value}"' for value in values)
            words.append(f"{name}=({quoted})")
    return f"actds.Loader({', '.join(words)})"


def _near_misses(places: Sequence[Place], queues: Queues | None) -> Iterator[str]:
    if queues is None or not queues.trace or any(p.name == "queues" and p.n for p in places):
        return
    lasted = queues.trace[-1].t_s + queues.trace[-1].seconds
    for stall in queues.stalls:
        if stall.seconds < max(1.0, min(NEAR_MISS_S, NEAR_MISS_SHARE * lasted)):
            continue
        waits = f"in {counted(stall.n, 'wait')} at the {stall.stage}"
        if stall.stage == "pool":
            yield (
                f"the disk held up the writer for {format_seconds(stall.seconds)}, {waits}. No row "
                "was lost: what was computed meanwhile was in the ring, or the engine waited."
            )
        else:
            part = share(round(stall.seconds * 1000), round(lasted * 1000))
            yield (
                f"the writer held up the engine for {format_seconds(stall.seconds)} ({part} of "
                f"the run), {waits}. No row was lost, because the engine waited; with a drop "
                "policy these rows would be gone."
            )
