"""The page of regimes: the words of its head, verdicts first, the charts, then every number."""

from __future__ import annotations

from actds.text import counted
from actds_studies.pages import regimes_charts as charts
from actds_studies.regimes.conclusions import LEADS, big, element_of, judged, leading
from actds_studies.regimes.result import (
    MIN_REQUESTS,
    MIN_ROWS,
    About,
    ArmResult,
    ContrastResult,
    Outcome,
    Quantiles,
    StudyResult,
    Used,
    Value,
    Verdict,
)
from actds_validators.audit.place import Level
from actds_validators.pages.answer import AnswerPage, Part, day
from actds_validators.pages.svg import Picture
from actds_validators.pages.words import (
    LOOKS,
    Columns,
    Fact,
    Look,
    Table,
    count,
    first,
    or_dash,
    p_value,
    percent,
    short,
    table_of,
)

LEVELS: dict[Outcome, Level] = {
    "carries over": "PASS",
    "shifts": "WARN",
    "undecided": "INCONCLUSIVE",
}
ABOUT: dict[About, str] = {
    "computation": "computation: the same tokens behind the same prefix, computed another way",
    "authorship": "authorship: other tokens at equal positions behind the same prompt, computed "
    "alike",
    "both": "authorship and computation together: other tokens, computed another way",
    "text": "the text: other tokens, computed alike",
}
FLOOR = (
    "The limit of a value is the largest difference that counts as none, an option of the command. "
    "Its floor is by how much two halves of the reference's own requests differ; of distances "
    "between equal tokens it is the distance between rows that were computed alike twice."
)
_FEATURES = "Features that are active more often, or less often, in the second arm."
_MAX_INTRODUCED, _MAX_HOOKS = 4, 6
_MAX_VERDICTS, _MAX_VALUES, _MAX_TABLES, _MAX_SHORT = 60, 16, 12, 12


def page(
    result: StudyResult,
    command: str,
    question: str = "Does the way it was served change what you measure?",
) -> AnswerPage:
    """Return what the page of a study says; ``command`` made it, as it was typed."""
    return AnswerPage(
        subject=result.schema_.removeprefix("actds.").partition("/")[0],
        question=question,
        level=LEVELS[result.answer.outcome],
        answer=result.answer.words,
        boxes=facts(result),
        introduction=introduction(result),
        split=parts(result),
        next_steps=result.answer.next_steps,
        facts=about(result, command),
        sections=_sections(result),
        verdicts=[
            (LEVELS[verdict.outcome], f"{contrast.name}: {verdict.sentence}")
            for contrast, verdict in judged(result.contrasts)
        ],
        on_terminal=("short", "compared", "how"),
    )


def _sections(result: StudyResult) -> list[Part]:
    figures = [p for p in (charts.step_gaps(result), charts.positions(result)) if p is not None]
    scatter, rungs = charts.rates(result), charts.ladder(result)
    sections = [
        _verdicts(result),
        _short(result),
        *([_where(result, figures)] if figures else []),
        *([Part("features", "Features", _FEATURES, pictures=scatter)] if scatter else []),
        *([_numerics(result, rungs)] if rungs is not None else []),
        _compared(result),
        _values(result),
        _how(result),
    ]
    return [section for section in sections if section.lead]


def facts(result: StudyResult) -> list[Fact]:
    """Return how large it is, and whether it is authorship or computation."""
    answer = result.answer
    is_known = answer.separated not in ("not separated", "undecided")
    title = "Authorship (who wrote the tokens) or computation"
    separated = Fact(title, answer.separated, answer.reason, is_known)
    if answer.largest is None:
        values = [v for c in result.contrasts for v in c.values if v.outcome is not None]
        within = sum(value.outcome == "carries over" for value in values)
        note = f"{within:,} of {len(values):,} tested values lie within their limits"
        if not values:
            return [Fact("Largest shift", "not known", "nothing could be tested", False), separated]
        return [Fact("Largest shift", "none found", note), separated]
    contrast = next(c for c in result.contrasts if c.name == answer.largest.contrast)
    figure = big(answer.largest.value, contrast.names)
    return [Fact("Largest shift", figure, answer.largest.sentence), separated]


def introduction(result: StudyResult) -> str:
    """Return what the arms are, and how a contrast is named, in words."""
    known = _arms(result)
    words = [f"{name} is {arm.rows}" for name, arm in list(known.items())[:_MAX_INTRODUCED]]
    words += [f"{len(known) - len(words):,} more arms below"] if len(known) > len(words) else []
    if not known:
        return "Nothing was compared."
    reference, other = result.contrasts[0].names
    contrast = f"{result.contrasts[0].name} is {other} compared with its reference, {reference}."
    return f"{'; '.join(words)}. {contrast}"


def _arms(result: StudyResult) -> dict[str, ArmResult]:
    return {arm.name: arm for c in result.contrasts for arm in (c.first, c.second)}


def parts(result: StudyResult) -> list[str]:
    """Return per hook how a dictionary's gap divides into authorship and computation."""
    by_hook: dict[str, list[str]] = {}
    for part in result.answer.parts:
        size = f"{100 * part.value:+.3g} points"
        known = part.low is not None and part.high is not None
        ends = f", {100 * (part.low or 0):.3g} to {100 * (part.high or 0):.3g}" if known else ""
        by_hook.setdefault(part.hook, []).append(f"{size} by {part.about} ({part.contrast}{ends})")
    return [f"{hook}, variance unexplained: {', '.join(words)}." for hook, words in by_hook.items()]


def about(result: StudyResult, command: str) -> list[tuple[str, str]]:
    """Return what was compared: arms, models, hooks, dates, engines, command."""
    facts = [
        (name, f"{arm.words}: {count(arm.n_rows)} rows of {counted(arm.n_requests, 'request')}")
        for name, arm in _arms(result).items()
    ]
    datasets = result.datasets
    models = dict.fromkeys(name for dataset in datasets for name in dataset.models)
    hooks = list(dict.fromkeys(name for dataset in datasets for name in dataset.hooks))
    more = [f"and {len(hooks) - _MAX_HOOKS} more"] if len(hooks) > _MAX_HOOKS else []
    engines = list(dict.fromkeys(name for dataset in datasets for name in dataset.engines))
    times = sorted(dataset.started_ns for dataset in datasets)
    days = dict.fromkeys(day(ns) for ns in (*times[:1], *times[-1:]))
    facts += [
        ("Model", ", ".join(list(models)[:3]) or "not recorded"),
        ("Hooks", ", ".join(hooks[:_MAX_HOOKS] + more) or "not recorded"),
        ("Harvested", " with ".join([" to ".join(days), *engines[:2]]) or "not recorded"),
        ("Command", command),
    ]
    return facts


def arms(contrast: ContrastResult) -> str:
    how = {
        "token": f"{count(contrast.n_pairs)} pairs of the same token behind the same prefix",
        "position": f"{count(contrast.n_pairs)} pairs of the same prompt and position",
        "unpaired": "unpaired, the reference weighted to the other arm's token ids and positions: "
        "adjusted, not matched"
        if contrast.adjusted
        else "unpaired, as they are",
    }[contrast.pairing]
    covered = percent(contrast.coverage)
    left_out = "".join(f" Not formed, or not weighted: {words}." for words in contrast.left_out)
    return (
        f"{contrast.name} at {contrast.hook}: {how}; {covered} of {contrast.second.name}'s rows "
        f"compared, {counted(contrast.n_groups, 'group')} of requests. What differs is "
        f"{ABOUT[contrast.about]}."
        f"{left_out}"
    )


def _look(verdict: Verdict) -> Look:
    return LOOKS[LEVELS[verdict.outcome]]


_VERDICTS: Columns[tuple[ContrastResult, Verdict]] = (
    ("contrast", lambda row: f"{row[0].name} at {row[1].hook}"),
    ("instrument", lambda row: row[1].instrument),
    ("verdict", lambda row: f"{_look(row[1]).mark} {row[1].outcome}"),
)


def _verdicts(result: StudyResult) -> Part:
    lead = (
        "An instrument shifts when a test finds a difference that lies beyond its limit, carries "
        "over when every difference is shown to lie within it, and else is undecided: also where "
        f"a difference is found of which it is open whether it lies beyond the limit. {FLOOR}"
    )
    tables = table_of(
        "Every verdict with its number",
        _VERDICTS,
        list(judged(result.contrasts)),
        frozenset(range(3)),
        room=_MAX_VERDICTS,
        tone=lambda row: _look(row[1]).tone,
        note=lambda row: row[1].sentence,
        narrow=True,
    )
    return Part("verdicts", "Verdicts", lead, tables)


def _short(result: StudyResult) -> Part:
    notes = [
        f"{contrast.name} at {verdict.hook}, {verdict.instrument}: {words}."
        for contrast, verdict in judged(result.contrasts)
        if verdict.outcome == "undecided"
        for words in verdict.short[:2]
    ]
    some, more = first(notes, _MAX_SHORT)
    lead = "What is missing where a verdict is undecided." if notes else ""
    return Part("short", "What is short", lead, [], [*some, *([f"A{more[1:]}."] if more else [])])


def _where(result: StudyResult, figures: list[Picture]) -> Part:
    leads = dict.fromkeys(leading(contrast) for contrast in result.contrasts)
    added = [lead[1] for lead in leads if lead not in LEADS]
    lead = (
        f"The leading measure is {added[0]}, of the second arm against the first."
        if added
        else "The leading measure is the fraction of variance that the dictionary leaves "
        "unexplained (FVU), in the second arm less the reference; without a dictionary it is the "
        "mean of the channel that lies farthest."
    )
    return Part("where", "Where the gap is", lead, pictures=figures)


_QUANTILES: Columns[tuple[ContrastResult, Quantiles]] = (
    ("contrast", lambda pair: pair[0].name),
    ("hook", lambda pair: pair[0].hook),
    ("rows", lambda pair: "all" if pair[1].axis == "all" else f"{pair[1].axis} {pair[1].stratum}"),
    ("measure", lambda pair: pair[1].measure),
    ("pairs", lambda pair: count(pair[1].n_pairs)),
    ("50 %", lambda pair: or_dash(pair[1].p50, short)),
    ("90 %", lambda pair: or_dash(pair[1].p90, short)),
    ("99 %", lambda pair: or_dash(pair[1].p99, short)),
    ("100 %", lambda pair: or_dash(pair[1].p100, short)),
)


def _numerics(result: StudyResult, rungs: Picture) -> Part:
    lines = [
        (contrast, quantile)
        for contrast in result.contrasts
        for quantile in contrast.quantiles
        if quantile.axis in ("all", "decode step")
    ]
    lead = (
        "How far the rows of equal tokens lie apart. This is arithmetic alone: the same token "
        "behind the same prefix, computed in other company, in other chunks, or in another type."
    )
    tables = table_of("Distances of equal tokens", _QUANTILES, lines, frozenset({0, 1, 2, 3}))
    return Part("numerics", "Numerics", lead, tables, pictures=[rungs])


_ARMS: Columns[tuple[ContrastResult, ArmResult]] = (
    ("contrast", lambda row: row[0].name),
    ("hook", lambda row: row[0].hook),
    ("arm", lambda row: row[1].name),
    ("rows", lambda row: count(row[1].n_rows)),
    (
        "of decode steps",
        lambda row: or_dash(row[1].n_decode, lambda n: percent(n / max(row[1].n_rows, 1))),
    ),
    ("requests", lambda row: count(row[1].n_requests)),
    ("compared", lambda row: count(row[1].n_compared)),
)
_USED: Columns[Used] = (
    ("hook", lambda row: row.hook),
    ("what", lambda row: row.kind),
    ("sha256", lambda row: row.sha256[:16]),
    ("of", lambda row: row.path),
)


def _left_out(arm: ArmResult) -> str:
    apart = ", ".join(f"{n:,} {name}" for name, n in arm.n_apart.items() if n) or "none"
    return (
        f"{arm.words}; left out: {apart}; {count(arm.n_repeats)} repeated prefixes; "
        f"{count(arm.n_sinks)} sinks; {count(arm.n_broken)} not finite or zero"
    )


def _compared(result: StudyResult) -> Part:
    rows = [(c, arm) for c in result.contrasts for arm in (c.first, c.second)]
    words = frozenset({0, 1, 2})
    tables = table_of("Arms", _ARMS, rows, words, note=lambda row: _left_out(row[1]))
    what, words = "Dictionaries and probes", frozenset(range(4))
    tables += table_of(what, _USED, result.used, words, note=lambda row: row.words)
    notes = [arms(contrast) for contrast in result.contrasts[:24]]
    lead = "Which rows were compared, how they were paired, and what was left out."
    return Part("compared", "What was compared", lead, tables, notes)


_VALUES: Columns[Value] = (
    ("rows", lambda row: "all" if row.axis == "all" else f"{row.axis} {row.stratum}"),
    ("measure", lambda row: ", ".join(filter(None, (row.measure, element_of(row))))),
    ("value", lambda row: or_dash(row.value, short)),
    ("unit", lambda row: row.unit),
    ("95 % interval", lambda row: f"{or_dash(row.low, short)} to {or_dash(row.high, short)}"),
    ("floor", lambda row: or_dash(row.floor, short)),
    ("limit", lambda row: or_dash(row.limit, short)),
    ("adjusted p", lambda row: or_dash(row.adjusted_p, p_value)),
    ("verdict", lambda row: row.outcome or "described"),
)


def _values(result: StudyResult) -> Part:
    order = {"shifts": 0, "undecided": 1, "carries over": 2, None: 3}
    tables: list[Table] = []
    n = 0
    for contrast in result.contrasts:
        values = [value for value in contrast.values if value.value is not None]
        n += len(values)
        values.sort(key=lambda row: (order[row.outcome], row.axis != "all"))
        if len(tables) < _MAX_TABLES:
            tables += table_of(
                f"{contrast.name} at {contrast.hook}",
                _VALUES,
                values,
                frozenset({0, 1, 3, 8}),
                room=_MAX_VALUES,
                tone=lambda row: "warn" if row.outcome == "shifts" else "",
                note=lambda row: row.note if row.kind == "direction" else "",
            )
    lead = (
        f"{counted(n, 'value')} in all strata, those that shift first. Of many elements, as "
        "channels, the farthest is shown, and all of them are tested together."
    )
    return Part("values", "Every value", lead, tables)


def _how(result: StudyResult) -> Part:
    notes = [
        "Each prefix counts once, position 0 and BOS are left out, and so are rows above 10 median "
        "norms (sinks), which are counted.",
        "Intervals leave out groups of requests one by one; tests exchange groups of requests "
        f"between the arms; all {result.n_tests:,} tests are one family at a false discovery rate "
        f"of {result.limits.fdr:g} (Benjamini and Hochberg).",
        "Unpaired arms are weighted to the same token ids and positions. That is an adjustment: "
        "what differs in the text before a token stays in the gap.",
        "A verdict is about these requests, this model and these settings. It does not say that "
        "another model, or another engine, behaves alike.",
        f"Nothing is estimated from fewer than {MIN_REQUESTS} requests or {MIN_ROWS} effective "
        "rows of either arm.",
        "Not tested here: what the harvest lost and what its prefix cache left out, which actds "
        "audit tests.",
    ]
    lead = "What the numbers are, and what they are not."
    return Part("how", "How to read this", lead, [], notes)
