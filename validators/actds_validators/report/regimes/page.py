"""The page: verdicts first, the charts, then every number behind them."""

from __future__ import annotations

from dataclasses import dataclass

from actds.text import counted
from actds.version import __version__
from actds_validators.regimes.conclusions import judged
from actds_validators.regimes.result import ContrastResult, Quantiles, Regimes, Used, Value
from actds_validators.regimes.strata import MIN_REQUESTS, MIN_ROWS
from actds_validators.regimes.wording import element_of
from actds_validators.report.markup import render_page
from actds_validators.report.regimes import charts, said
from actds_validators.report.svg import Picture
from actds_validators.report.words import (
    Columns,
    Part,
    Row,
    Sentence,
    Table,
    Tone,
    count,
    first,
    or_dash,
    p_value,
    percent,
    table_of,
)

__all__ = ["render"]

_MAX_VERDICTS, _MAX_VALUES, _MAX_TABLES, _MAX_SHORT = 60, 16, 12, 12
_TONES: dict[str, Tone] = {"shifts": "warn", "carries over": "good", "undecided": "dim"}


@dataclass(frozen=True)
class Section:
    """A section of the page with its charts."""

    part: Part
    pictures: list[Picture]


def render(result: Regimes, command: str) -> str:
    """Return the page: HTML in UTF-8, self-contained and without script.

    Args:
        result: the comparison.
        command: that made it, as it was typed.

    Raises:
        ImportError: Jinja2 is not installed (the extra ``audit``).
    """
    return render_page(
        "answer.html.j2",
        actds=__version__,
        subject="regimes",
        question="Does the way it was served change what you measure?",
        level=said.LEVELS[result.answer.outcome],
        mark=said.MARKS[result.answer.outcome],
        answer=said.answer(result),
        boxes=said.facts(result),
        introduction=Sentence(said.introduction(result)),
        split=[Sentence(words) for words in said.parts(result)],
        next_steps=[Sentence(step) for step in result.answer.next_steps[:12]],
        facts=[(name, Sentence(words)) for name, words in said.about(result, command)],
        sections=_sections(result),
    )


def _sections(result: Regimes) -> list[Section]:
    figures = [one for one in (charts.step_gaps(result), charts.positions(result)) if one]
    found = [Section(_verdicts(result), []), Section(_short(result), [])]
    found += [Section(_where(), figures)] if figures else []
    scatter = charts.rates(result)
    found += [Section(_features(), scatter)] if scatter else []
    rungs = charts.ladder(result)
    found += [Section(_numerics(result), [rungs])] if rungs is not None else []
    found += [
        Section(_compared(result), []),
        Section(_values(result), []),
        Section(_how(result), []),
    ]
    return [one for one in found if one.part.lead]


def _verdicts(result: Regimes) -> Part:
    pairs = list(judged(result.contrasts))
    some, more = first(pairs, _MAX_VERDICTS)
    rows = [
        Row(
            (f"{contrast.name} at {verdict.hook}", verdict.instrument,
             f"{said.MARKS[verdict.outcome]} {verdict.outcome}"),
            _TONES[verdict.outcome],
            verdict.sentence,
        )
        for contrast, verdict in some
    ]  # fmt: skip
    head = ("contrast", "instrument", "verdict")
    lead = (
        "An instrument shifts when a test finds a difference that lies beyond its limit, carries "
        "over when every difference is shown to lie within it, and else is undecided: also where "
        f"a difference is found of which it is open whether it lies beyond the limit. {said.FLOOR}"
    )
    table = Table("Every verdict with its number", head, rows, frozenset(range(3)), more, True)
    return Part("verdicts", "Verdicts", Sentence(lead), [table])


def _short(result: Regimes) -> Part:
    notes = [
        Sentence(f"{contrast.name} at {verdict.hook}, {verdict.instrument}: {words}.")
        for contrast, verdict in judged(result.contrasts)
        if verdict.outcome == "undecided"
        for words in verdict.short[:2]
    ]
    left = len(notes) - _MAX_SHORT
    if left > 0:
        notes = [*notes[:_MAX_SHORT], Sentence(f"And {left:,} more, all in the result (--json).")]
    lead = "What is missing where a verdict is undecided." if notes else ""
    return Part("short", "What is short", Sentence(lead), [], notes)


def _where() -> Part:
    lead = (
        "The leading measure is the fraction of variance that the dictionary leaves unexplained "
        "(FVU), in the second arm less the reference; without a dictionary it is the mean of the "
        "channel that lies farthest."
    )
    return Part("where", "Where the gap is", Sentence(lead))


def _features() -> Part:
    lead = "Features that are active more often, or less often, in the second arm."
    return Part("features", "Features", Sentence(lead))


_QUANTILES: Columns[tuple[ContrastResult, Quantiles]] = (
    ("contrast", lambda pair: pair[0].name),
    ("hook", lambda pair: pair[0].hook),
    ("rows", lambda pair: "all" if pair[1].axis == "all" else f"{pair[1].axis} {pair[1].stratum}"),
    ("measure", lambda pair: pair[1].measure),
    ("pairs", lambda pair: count(pair[1].n_pairs)),
    ("50 %", lambda pair: said.number(pair[1].p50)),
    ("90 %", lambda pair: said.number(pair[1].p90)),
    ("99 %", lambda pair: said.number(pair[1].p99)),
    ("100 %", lambda pair: said.number(pair[1].p100)),
)


def _numerics(result: Regimes) -> Part:
    lines = [
        (contrast, one)
        for contrast in result.contrasts
        for one in contrast.quantiles
        if one.axis in ("all", "decode step")
    ]
    lead = (
        "How far the rows of equal tokens lie apart. This is arithmetic alone: the same token "
        "behind the same prefix, computed in other company, in other chunks, or in another type."
    )
    tables = table_of("Distances of equal tokens", _QUANTILES, lines, frozenset({0, 1, 2, 3}))
    return Part("numerics", "Numerics", Sentence(lead), tables)


def _compared(result: Regimes) -> Part:
    rows = []
    for contrast in result.contrasts:
        for arm in (contrast.first, contrast.second):
            apart = ", ".join(f"{n:,} {name}" for name, n in arm.n_apart.items() if n) or "none"
            decode = "-" if arm.n_decode is None else percent(arm.n_decode / max(arm.n_rows, 1))
            further = f"left out: {apart}; {count(arm.n_repeats)} repeated prefixes; "
            further += f"{count(arm.n_sinks)} sinks; {count(arm.n_broken)} not finite or zero"
            cells = (contrast.name, contrast.hook, arm.name, count(arm.n_rows), decode,
                     count(arm.n_requests), count(arm.n_compared))  # fmt: skip
            rows.append(Row(cells, "", f"{arm.words}; {further}"))
    some, more = first(rows)
    head = ("contrast", "hook", "arm", "rows", "of decode steps", "requests", "compared")
    tables = [Table("Arms", head, some, frozenset({0, 1, 2}), more)]
    columns: Columns[Used] = (
        ("hook", lambda one: one.hook),
        ("what", lambda one: one.kind),
        ("sha256", lambda one: one.sha256[:16]),
        ("of", lambda one: one.path),
    )
    tables += table_of("Dictionaries and probes", columns, result.used, frozenset(range(4)),
                       note=lambda one: one.words)  # fmt: skip
    notes = [Sentence(said.arms(contrast)) for contrast in result.contrasts[:24]]
    lead = "Which rows were compared, how they were paired, and what was left out."
    return Part("compared", "What was compared", Sentence(lead), tables, notes)


_VALUES: Columns[Value] = (
    ("rows", lambda one: "all" if one.axis == "all" else f"{one.axis} {one.stratum}"),
    ("measure", lambda one: _measure(one)),
    ("value", lambda one: said.number(one.value)),
    ("unit", lambda one: one.unit),
    ("95 % interval", lambda one: f"{said.number(one.low)} to {said.number(one.high)}"),
    ("floor", lambda one: said.number(one.floor)),
    ("limit", lambda one: said.number(one.limit)),
    ("adjusted p", lambda one: or_dash(one.adjusted_p, p_value)),
    ("verdict", lambda one: one.outcome or "described"),
)


def _measure(value: Value) -> str:
    of = element_of(value)
    return f"{value.measure}{f', {of}' if of else ''}"


def _values(result: Regimes) -> Part:
    order = {"shifts": 0, "undecided": 1, "carries over": 2, None: 3}
    tables: list[Table] = []
    n = 0
    for contrast in result.contrasts:
        values = [value for value in contrast.values if value.value is not None]
        n += len(values)
        values.sort(key=lambda one: (order[one.outcome], one.axis != "all"))
        if len(tables) < _MAX_TABLES:
            tables += table_of(
                f"{contrast.name} at {contrast.hook}", _VALUES, values, frozenset({0, 1, 3, 8}),
                room=_MAX_VALUES, tone=lambda one: "warn" if one.outcome == "shifts" else "",
                note=lambda one: one.note if one.kind == "direction" else "",
            )  # fmt: skip
    lead = (
        f"{counted(n, 'value')} in all strata, those that shift first. Of many elements, as "
        "channels, the farthest is shown, and all of them are tested together."
    )
    return Part("values", "Every value", Sentence(lead), tables)


def _how(result: Regimes) -> Part:
    notes = [
        Sentence(words)
        for words in (
            "Each prefix counts once, position 0 and BOS are left out, and so are rows above 10 "
            "median norms (sinks), which are counted.",
            "Intervals leave out groups of requests one by one; tests exchange groups of requests "
            f"between the arms; all {result.n_tests:,} tests are one family at a false discovery "
            f"rate of {result.limits.fdr:g} (Benjamini and Hochberg).",
            "Unpaired arms are weighted to the same token ids and positions. That is an "
            "adjustment: what differs in the text before a token stays in the gap.",
            "A verdict is about these requests, this model and these settings. It does not say "
            "that another model, or another engine, behaves alike.",
            f"Nothing is estimated from fewer than {MIN_REQUESTS} requests or {MIN_ROWS} effective "
            "rows of either arm.",
            said.NOT_ASKED,
        )
    ]
    return Part("how", "How to read this", Sentence("What the numbers are, and what they are not."),
                [], notes)  # fmt: skip
