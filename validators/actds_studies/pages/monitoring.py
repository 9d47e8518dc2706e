"""Pages of a profile and of alerts: the rate beside the promise, each alert with its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actds.format.profile import Calibration, Kept, Look, Profile
from actds.text import Line, counted
from actds_studies.alerts import Alert, Alerts
from actds_validators.audit.place import Level
from actds_validators.pages.answer import AnswerPage, Part, cleaned, day, listed, table_lines
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, span
from actds_validators.pages.words import Fact, Table, percent, short, table_of

_LEVELS: dict[str, Level] = {
    "in the regime": "PASS",
    "departed": "WARN",
    "undecided": "INCONCLUSIVE",
}
_KINDS = {"drift": "the mean of 8 looks", "opening": "the end of the prompt"}


def look_words(look: Look) -> str:
    words = "every decode step" if look.every == 1 else f"every {look.every} decode steps"
    if look.above is not None:
        words += f", where the logits have {look.above:g} nats or more"
    if look.share < 1:
        words += f", of {percent(look.share)} of the requests by hash (salt {look.salt})"
    return words


def promise_words(calibration: Calibration) -> str:
    if calibration.threshold is None:
        need = f"{calibration.n} held-out requests, and {1 / calibration.alpha - 1:,.0f} needed"
        return f"undecided: {need}"
    nats = f"{calibration.threshold:.3g} nats, from {calibration.n:,} held-out requests"
    return f"{percent(calibration.alpha)} of the requests; threshold {nats}"


def rates_of(caption: str, rates: Sequence[Kept], promised: Sequence[Kept] = ()) -> list[Table]:
    """Return the table of rates by stratum, beside those that the profile's dataset kept."""
    by = {kept.stratum: kept for kept in promised}

    def share(kept: Kept | None) -> str:
        if kept is None:
            return "-"
        return f"{percent(kept.n_alerts / kept.n)} [{percent(kept.low)}, {percent(kept.high)}]"

    return table_of(
        caption,
        (
            ("requests", lambda k: k.stratum),
            ("number", lambda k: f"{k.n:,}"),
            ("alerts", lambda k: f"{k.n_alerts:,}"),
            ("rate, 95 %", share),
            *((("in the profile's", lambda k: share(by.get(k.stratum))),) if promised else ()),
        ),
        rates,
    )


def profile_lines(profile: Profile, path: str) -> Iterator[Line]:
    """Yield what a terminal says of a profile that was written."""
    calibration = profile.calibration
    bands = [cell for cell in profile.cells if cell.phase == "decode"]
    facts = {
        "profile": f"{path}, sha256 {profile.sha256[:16]}",
        "of": f"seal {profile.digest[:16]}, hooks {', '.join(profile.hooks)}",
        "fit": f"{counted(profile.n_requests, 'request')}, "
        f"{sum(c.n_rows for c in bands):,} decode rows in {counted(len(bands), 'band')} of depth",
        "look": look_words(profile.look),
        "promised": promise_words(calibration),
    }
    lines = [Line(f"{name:<11}{words}") for name, words in facts.items()]
    yield from cleaned(lines)
    for table in rates_of("Kept, of requests that neither fit nor threshold saw", profile.kept):
        yield Line(table.caption, "title")
        yield from table_lines(table)
    if calibration.threshold is None:
        step = "Hold more requests out, harvest more, or promise a larger alpha."
        yield from listed("What to do", [step])


def alerts_page(result: Alerts, command: str) -> AnswerPage:
    """Return what the page says; ``command`` made it, as it was typed."""
    return AnswerPage(
        subject="alerts",
        question="Have answers left the regime that the profile was fitted in?",
        level=_LEVELS[result.answer.outcome],
        answer=result.answer.words,
        introduction="A trajectory is scored by how rare its readouts are, in nats: those of the "
        "last 4 positions of the prompt, and the mean of the last 8 looks at its depth, the "
        "largest so far. An alert is a score above the threshold.",
        boxes=list(_boxes(result)),
        next_steps=result.answer.next_steps,
        facts=list(_facts(result, command)),
        sections=[_rates(result), _list(result), _scores(result)],
        on_terminal=("rates", "alerts"),
        holds="This page holds text of requests, and no activations.",
    )


def _boxes(result: Alerts) -> Iterator[Fact]:
    for rate in result.rates[:1]:
        interval = f"95 % interval {percent(rate.low)} to {percent(rate.high)}"
        if result.n_seen < result.n_requests:
            interval += f", of a share of the {result.n_requests:,} requests by hash"
        yield Fact("Rate of alerts", percent(rate.n_alerts / rate.n), interval)
    yield Fact("Promised", percent(result.calibration.alpha), promise_words(result.calibration))
    if result.p is not None:
        note = "chance of as many alerts or more, were these requests those of the profile"
        yield Fact("p", short(result.p), note)


def _facts(result: Alerts, command: str) -> Iterator[tuple[str, str]]:
    yield "Dataset", f"{result.path}, seal {result.digest[:16]}"
    made = f"of seal {result.profile_digest[:16]}, {day(result.profile_created_ns)}"
    yield "Profile", f"{result.profile[:16]} {made}"
    yield "Hooks", ", ".join(result.hooks)
    yield "Looks", f"{result.n_looks:,}: {look_words(result.look)}"
    if (recorded := result.recorded) is not None:
        words = "the same" if not recorded.n_unlike else f"{recorded.n_unlike:,} not the same"
        yield "While it was served", f"{counted(recorded.n, 'request')} with alerts, {words}"
    if result.differences:
        yield "Not the regime", f"nothing is promised: {'; '.join(result.differences)}"
    yield "Command", command


def _rates(result: Alerts) -> Part:
    lead = "Rates by the role of the position of the alert, and by the length of the answer. "
    lead += "The promise is for all requests together; long answers have more looks to alert at."
    notes = [
        f"{counted(n, 'request')} {words}"
        for n, words in (
            (result.n_blind, "had no look, and count as without an alert."),
            (result.n_adapted, "had an adapter, which is other weights, and are left out."),
        )
        if n
    ]
    if result.n_lost:
        notes.append(f"{result.n_lost:,} positions lost their readouts: no look was at them.")
    tables = rates_of("Rates", result.rates, result.promised) + table_of(
        "Rows beside those of the profile, in nats: 0.69 and 3.0 in the regime",
        (
            ("rows", lambda u: u.name),
            ("number", lambda u: f"{u.n_rows:,}"),
            ("median", lambda u: f"{u.median:.2f}"),
            ("95 %", lambda u: f"{u.high:.2f}"),
        ),
        result.parts,
    )
    return Part("rates", "Rates", lead, tables, notes)


def _list(result: Alerts) -> Part:
    tables = table_of(
        "Alerts, the highest scores first",
        (
            ("request", lambda a: f"{a.request} of {a.run}: {a.external_id}"),
            ("position", _place),
            ("what is rare", lambda a: _KINDS[a.kind]),
            ("nats", lambda a: f"{a.score:.1f}"),
        ),
        result.alerts,
        frozenset({0, 2}),
        note=_text,
    )
    lead = "Below each the text around the row after which the score was first above, at ⟦ ⟧."
    return Part("alerts", "Alerts", lead if result.alerts else "None.", tables)


def _place(alert: Alert) -> str:
    where = f"{-alert.depth} before" if alert.depth < 0 else f"{alert.depth:,} of"
    return f"{alert.position:,} ({where} the answer)"


def _text(alert: Alert) -> str:
    words = f"{alert.before}⟦ ⟧{alert.after}".replace("\n", "↵")
    return words


def _scores(result: Alerts) -> Part:
    lead = "The band and line are the median and 95 % of requests without an alert; each other "
    lead += f"line is one of the {len(result.traces)} highest."
    pictures = [p for p in [_picture(result)] if p is not None]
    return Part("scores", "Scores by depth", lead, pictures=pictures)


def _picture(result: Alerts) -> Picture | None:
    threshold = result.calibration.threshold
    if not result.usual or threshold is None:
        return None
    p = Picture(
        "scores",
        "Scores by depth",
        "Score so far of requests in nats, by position in the answer, and the threshold.",
        WIDTH,
        290,
        FigureData(("request", "depth", "score in nats")),
    )
    last = max([trace.depth[-1] for trace in result.traces if trace.depth] or [1])
    top = max([threshold, *(max(trace.score, default=0.0) for trace in result.traces)])
    f = Frame(60, 30, 780, 200, (0, max(last, 1)), span([0, top]))
    axes(p, f, "rows of the answer", "nats")
    legend(p, 60, 16, [("band", "median to 95 % without an alert"), ("lost", "highest scores")])
    ends = [min(depth, last) for depth, _, _ in result.usual]
    high = [(f.x(x), f.y(q)) for x, (_, _, q) in zip(ends, result.usual, strict=True)]
    median = [(f.x(x), f.y(q)) for x, (_, q, _) in zip(ends, result.usual, strict=True)]
    p.polygon([*high, *reversed(median)], "band")
    p.path(median, "curve")
    for trace in result.traces:
        p.data.rows += [
            (trace.request, depth, score)
            for depth, score in zip(trace.depth, trace.score, strict=True)
        ]
        points = [(f.x(d), f.y(s)) for d, s in zip(trace.depth, trace.score, strict=True)]
        p.path(points, "curve dashed", f"request {trace.request}")
    p.line(f.left, f.y(threshold), f.right, f.y(threshold), "limit", f"threshold {threshold:.3g}")
    return p
