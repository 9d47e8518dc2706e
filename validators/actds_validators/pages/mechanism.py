"""Sections on why rows were lost: tests, load and queues along the run, weights."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from actds.text import Line, counted
from actds_validators.audit.result import (
    MIN_BLAMED,
    Association,
    Audit,
    Family,
    Loss,
    Mechanism,
    Occupancy,
    Stall,
    TracePoint,
    WeightCell,
)
from actds_validators.audit.wording import QUESTIONS
from actds_validators.pages.answer import Part, SectionOf
from actds_validators.pages.svg import (
    WIDTH,
    FigureData,
    Frame,
    Picture,
    axes,
    legend,
    shade,
    shade_scale,
    span,
    split_range,
)
from actds_validators.pages.words import (
    MAX_LIST,
    Columns,
    Row,
    Table,
    apart,
    clean,
    count,
    measured,
    number,
    or_dash,
    p_value,
    percent,
    seconds,
    short,
    table_of,
    thousandths,
)

_FAMILIES: Columns[Family] = (
    ("question", lambda f: QUESTIONS[f.question]),
    ("tests", lambda f: count(f.n_tests)),
    ("p", lambda f: p_value(f.p)),
    ("adjusted p", lambda f: p_value(f.adjusted_p)),
    ("least it could be", lambda f: p_value(f.least_adjusted_p)),
    ("could be found", lambda f: "yes" if f.could_be_found else "no"),
    ("draws", lambda f: count(f.n_draws)),
)
_TESTS: Columns[Association] = (
    ("rejected", lambda t: "yes" if t.rejected else "no"),
    ("test", lambda t: t.name),
    ("covariate", lambda t: t.covariate.label),
    ("question", lambda t: t.family or t.covariate.group),
    ("statistic", lambda t: number(t.statistic)),
    ("p", lambda t: p_value(t.p)),
    ("adjusted p", lambda t: p_value(t.adjusted_p)),
    ("effective units", lambda t: f"{count(t.n_units)} {t.unit}"),
    ("naive p (not deciding)", lambda t: or_dash(t.naive_p, lambda p: f"({p_value(p)})")),
)


def mechanism_part(audit: Audit) -> Part | None:
    section, limits = audit.mechanism, audit.limits
    if section is None:
        return None
    lead = (
        f"Independent loss events: {count(section.n_events)}, in {count(section.n_steps)} steps; "
        f"{count(section.n_lost_steps)} steps lost tokens, {count(section.n_partial_steps)} of "
        "them only some. Tokens of a step are lost together, so each test counts steps, blocks or "
        f"requests, not tokens. {count(len(section.tests))} tests of "
        f"{counted(len(section.families), 'question')}: all tests of a question are rearranged "
        f"together, and the questions have a false discovery rate of {number(limits.fdr)} after "
        "Benjamini and Hochberg."
    )
    if section.n_events < MIN_BLAMED:
        lead += (
            f" With fewer than {MIN_BLAMED} events no cause is named: anything that so few bursts "
            "have in common looks like one."
        )
    n_rejected = sum(t.rejected for t in section.tests)
    rejected = f"{n_rejected} of {counted(len(section.tests), 'test')} rejected"
    few = ": too few to name a cause" if section.n_events < MIN_BLAMED else ""
    brief = f"  {rejected}, {counted(section.n_events, 'independent loss event')}{few}"
    caption = (
        f"Tests, the smallest adjusted p first (blocks of {count(section.block_steps)} steps, "
        f"{count(section.n_blocks)} of them)"
    )
    tables = table_of(
        caption,
        _TESTS,
        sorted(section.tests, key=lambda t: (not t.rejected, t.adjusted_p, t.p)),
        frozenset(range(4)),
        room=40,
        tone=lambda t: "bad" if t.rejected else "",
        note=lambda t: t.note,
        brief=(len(_TESTS) - 1, min(n_rejected, MAX_LIST)),
    )
    questions = table_of(
        "Questions to the losses",
        _FAMILIES,
        section.families,
        frozenset({0, 5}),
        room=len(QUESTIONS),
    )
    notes = _on_tests(section)
    tables = [*questions, *tables]
    return Part("mechanism", "Mechanism", lead, tables, notes, [Line(brief)])


def _on_tests(section: Mechanism) -> list[str]:
    notes = [_on_content(section.tests)] if section.tests else []
    if section.detectable is not None:
        notes.append(
            "The widest interval of a content covariate or readout would show a bias of the "
            f"stored rows of {number(section.detectable)} SD with power 0.8. The tests, adjusted "
            "over all of them, and those of the load need more."
        )
    if section.tests:
        notes.append(
            "Effective units: neighbouring shifts of the losses are alike, so the thousands "
            "that a p-value counts are worth this many independent ones."
        )
    if any(t.naive_p is not None for t in section.tests):
        notes.append(
            "The naive p is in brackets: a test over tokens as if each were lost by itself. It "
            "rejects harmless bursts nearly always, and no verdict uses it."
        )
    return notes


def _on_content(tests: list[Association]) -> str:
    words = (
        "Only the test within compares tokens of one step, which met the same load. The others "
        "compare steps: a difference in phase, position or length can come from the load, with "
        "which the mix of tokens changes (missing at random, given the load); so can a difference "
        "in values, in part."
    )
    if any(t.name == "within" for t in tests):
        return words
    return f"{words} Here too few steps lost only some of their tokens for that test."


_MAX_CURVES = 2
_MAX_POINTS, _MAX_LAGS, _MAX_STAGES, _MAX_DEPTHS = 12, 201, 6, 32


def queues_part(audit: Audit) -> Part | None:
    section = audit.queues
    if section is None:
        return None
    lead = (
        "When tokens were lost, how full the queues of the writer were, and how the loss depends "
        "on the load (moving average of the tokens per step)."
    )
    if section.trace:
        lead += f" In the worst part of the trace {lowest(section.trace)} were stored."
    columns: Columns[Stall] = (
        ("stage", lambda s: s.stage),
        ("stalls", lambda s: count(s.n)),
        ("waited", lambda s: seconds(s.seconds)),
        ("mean wait", lambda s: seconds(s.seconds / s.n) if s.n else "-"),
    )
    tables = table_of("Stalls", columns, section.stalls)
    notes = [] if tables else ["No stall was recorded."]
    return Part("queues", "Time and queues", lead, tables, notes)


def loss_against_load(audit: Audit) -> Picture | None:
    if audit.queues is None or not audit.queues.loss_by_load:
        return None
    points = audit.queues.loss_by_load
    curves = [("load, tokens per step", points)]
    return _curves("loss-by-load", "Loss against load", ("load", "load"), curves)


def loss_against_step(audit: Audit) -> Picture | None:
    if audit.queues is None or not audit.queues.loss_by_step:
        return None
    curves = [
        (f"{curve.covariate.label}, {curve.covariate.unit}", curve.points)
        for curve in audit.queues.loss_by_step[:_MAX_CURVES]
    ]
    return _curves("loss-by-step", "Loss against batch and context", ("size", "mean"), curves)


def _curves(
    name: str, title: str, what: tuple[str, str], curves: list[tuple[str, list[Loss]]]
) -> Picture:
    """Return curves below each other; ``what``: whose deciles they are, and what a point is."""
    shown = [(x, sorted(p, key=lambda point: point.load)[:_MAX_POINTS]) for x, p in curves]
    p = Picture(
        name,
        title,
        f"Per decile of {what[0]} the share of computed tokens lost, with its interval; the dashed "
        "line is the monotone fit, which may only rise, or only fall.",
        WIDTH,
        42 + 250 * len(shown),
        FigureData(
            ("against", "mean of the decile", "share lost", "low", "high", "monotone fit"),
            [
                (x_text, s.load, s.rate.value, s.rate.low, s.rate.high, s.fitted)
                for x_text, points in shown
                for s in points
            ],
        ),
    )
    p.dot(100, 14, "mark lost-mark")
    p.text(112, 18, "decile, with interval")
    p.line(272, 14, 302, 14, "curve dashed")
    p.text(310, 18, "isotonic fit")
    for k, (x_text, points) in enumerate(shown):
        _curve(p, 38 + 250 * k, points, x_text, what[1])
    return p


def _curve(p: Picture, y: float, shown: list[Loss], x_text: str, what: str) -> None:
    top = min(1.0, max(max(s.rate.value, s.rate.high, s.fitted) for s in shown) * 1.1) or 0.01
    f = Frame(90, y, 740, 196, span([s.load for s in shown], zero=False), (0, top))
    axes(p, f, x_text, "share lost", y_text=percent, left=64)
    p.path([(f.x(s.load), f.y(s.fitted)) for s in shown], "curve dashed")
    for s in shown:
        title = f"{what} {number(s.load)}: {percent(s.rate.value)} lost"
        title += f", interval {percent(s.rate.low)} to {percent(s.rate.high)}"
        x = f.x(s.load)
        p.line(x, f.y(s.rate.low), x, f.y(s.rate.high), "whisker lost-line")
        p.dot(x, f.y(s.rate.value), "mark lost-mark", title)


def occupancy(audit: Audit) -> Picture | None:
    """Return one histogram per stage: the share of the time at each depth of its queue."""
    if audit.queues is None or not audit.queues.occupancy:
        return None
    stages: dict[str, list[Occupancy]] = defaultdict(list)
    for row in audit.queues.occupancy:
        stages[row.stage].append(row)
    shown = list(stages.items())[:_MAX_STAGES]
    lines = -(-len(shown) // 3)
    p = Picture(
        "occupancy",
        "Queue occupancy",
        "Per stage of the writer the share of the time at each queue depth; the bar of a full "
        "queue is striped.",
        WIDTH,
        4 + 222 * lines,
        FigureData(("stage", "capacity", "depth from", "depth to", "seconds", "share of time")),
    )
    for n, (stage, members) in enumerate(shown):
        capacity = max(1, *(m.capacity for m in members))
        deepest = max(capacity, *(m.depth for m in members))
        width = -(-(deepest + 1) // _MAX_DEPTHS)
        bins: dict[int, float] = defaultdict(float)
        for m in members:
            bins[m.depth // width] += m.seconds
        total = sum(bins.values()) or 1.0
        n_bins = deepest // width + 1
        f = Frame(70 + 270 * (n % 3), 44 + 222 * (n // 3), 195, 120, (0, n_bins), (0, 1))
        p.text(f.left, f.top - 26, stage, kind="bold", room=215)
        p.text(f.left, f.top - 11, f"capacity {count(capacity)}", kind="dim", room=215)
        marks = sorted({0, n_bins // 2, n_bins - 1})
        axes(
            p,
            f,
            "depth, entries",
            "share of time" if n % 3 == 0 else "",
            x_marks=[(k + 0.5, _depth(k * width)) for k in marks],
            y_marks=[(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")],
            left=52,
        )
        for k, spent in sorted(bins.items()):
            full = (k + 1) * width > capacity
            label = f"{k * width}" if width == 1 else f"{k * width}–{(k + 1) * width - 1}"
            title = f"{stage}, depth {label}: {percent(spent / total)} of the time"
            depths = (k * width, (k + 1) * width - 1)
            p.data.rows.append((stage, capacity, *depths, spent, spent / total))
            x, y = f.x(k), f.y(spent / total)
            p.box(
                x + 0.5, y, f.width / n_bins - 1, f.bottom - y, "lost" if full else "stored", title
            )
    return p


def _depth(entries: int) -> str:
    return count(entries) if entries < 100_000 else short(entries)


def lag_plot(audit: Audit) -> Picture | None:
    if audit.queues is None or not audit.queues.lags:
        return None
    band = audit.queues.lag_band
    ordered = sorted(audit.queues.lags, key=lambda lag: lag.steps)
    step = -(-len(ordered) // _MAX_LAGS)
    shown = ordered[::step]
    description = (
        "The correlation of the load with the share lost some steps later. A peak right of zero is "
        "the time that a queue takes to fill."
    )
    if band is not None:
        description += (
            f" At each lag by itself {percent(band.confidence)} of the correlations of unrelated "
            f"series of this kind are in the band (circular shifts, about "
            f"{counted(max(1, int(band.n_effective)), 'independent one')}): some lags are outside "
            "by chance, and so are their neighbours. The tests, not this plot, decide."
        )
    ends = [band.low, band.high] if band else []
    data = FigureData(
        ("lag, steps", "correlation", *(("band low", "band high") if band else ())),
        [(lag.steps, lag.correlation, *ends) for lag in shown],
    )
    p = Picture("lags", "Load against loss, by lag", description, WIDTH, 288 if band else 262, data)
    values = span([lag.correlation for lag in shown] + ends)
    top = 44 if band else 18
    f = Frame(90, top, 740, 186, span([lag.steps for lag in shown], zero=False), values)
    if band is not None:
        words = f"{percent(band.confidence)} of unrelated series, at each lag"
        legend(p, f.left, 22, [("band", words)])
        ends_said = f"band of chance: {thousandths(band.low)} to {thousandths(band.high)}"
        p.box(f.left, f.y(band.high), f.width, f.y(band.low) - f.y(band.high), "band", ends_said)
    axes(p, f, "lag, steps (loss after load)", "correlation", left=64)
    p.line(f.left, f.y(0), f.right, f.y(0), "axis")
    for lag in shown:
        x, y = f.x(lag.steps), f.y(lag.correlation)
        description = f"{lag.steps:+d} steps: correlation {thousandths(lag.correlation)}"
        p.line(x, f.y(0), x, y, "whisker stored-line")
        p.dot(x, y, "mark stored-mark", description, 2.5)
    return p


_MAX_BINS, _MAX_MARKS = 200, 200


@dataclass(frozen=True)
class _Bin:
    start_s: float
    end_s: float
    computed: int
    lost: int
    load: float

    @property
    def per_second(self) -> float:
        width = self.end_s - self.start_s
        return self.computed / width if width > 0 else 0.0


def capture_trace(audit: Audit) -> Picture | None:
    if audit.queues is None or not audit.queues.trace:
        return None
    bins = _bins(audit.queues.trace)
    stages = audit.queues.stalls[:_MAX_STAGES]
    p = Picture(
        "trace",
        "Capture-rate trace",
        "Along the run: stored and lost tokens per second, the share of computed tokens that was "
        "stored, the load, and when each stage of the writer stalled.",
        WIDTH,
        442 + 24 * max(1, len(stages)),
        FigureData(
            ("what", "start s", "end s", "computed tokens", "lost tokens", "load, tokens per step"),
            [("bin", b.start_s, b.end_s, b.computed, b.lost, b.load) for b in bins],
        ),
    )
    around = (min(b.start_s for b in bins), max(b.end_s for b in bins))
    legend(p, 110, 16, [("stored", "stored"), ("lost", "lost")])
    top = max(b.per_second for b in bins) * 1.05 or 1.0
    rate = Frame(110, 28, 730, 120, around, (0, top))
    axes(p, rate, "", "tokens/s", x_marks=[], left=64)
    for b in bins:
        _bar(p, rate, b)
    share = Frame(110, 172, 730, 90, around, (0, 1))
    marks = [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")]
    axes(p, share, "", "share stored", x_marks=[], y_marks=marks, left=64)
    for piece in _steps(bins):
        p.path([(share.x(t), share.y(v)) for t, v in piece], "curve")
    rows = max(1, len(stages))
    load = Frame(110, 298, 730, 70, around, (0, max(b.load for b in bins) * 1.1 or 1.0))
    axes(p, load, "", "load", x_marks=[], left=64)
    p.path([(load.x((b.start_s + b.end_s) / 2), load.y(b.load)) for b in bins], "curve dashed")
    p.text(load.right - 4, load.top - 8, "moving average, tokens per step", "end", "dim")
    rug = Frame(110, 382, 730, 24 * rows, around, (0, 1))
    axes(p, rug, "seconds since the first step", "", y_marks=[])
    _stalls(p, rug, stages)
    return p


def _bar(p: Picture, f: Frame, b: _Bin) -> None:
    x, width = f.x(b.start_s), max(f.x(b.end_s) - f.x(b.start_s) - 0.3, 0.4)
    lost = b.per_second * b.lost / b.computed if b.computed else 0.0
    title = (
        f"{number(round(b.start_s, 2))}–{number(round(b.end_s, 2))} s: "
        f"{counted(b.computed, 'token')} computed, {count(b.lost)} lost"
    )
    stored = f.y(b.per_second - lost)
    p.box(x, stored, width, f.bottom - stored, "stored", title)
    p.box(x, f.y(b.per_second), width, stored - f.y(b.per_second), "lost", title)


def _steps(bins: list[_Bin]) -> list[list[tuple[float, float]]]:
    """Return the share stored as steps; a bin without tokens interrupts the line."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for b in bins:
        if not b.computed:
            pieces.append([])
            continue
        kept = 1 - b.lost / b.computed
        pieces[-1] += [(b.start_s, kept), (b.end_s, kept)]
    return pieces


def _stalls(p: Picture, f: Frame, stages: list[Stall]) -> None:
    if not stages:
        p.text(f.left + 8, f.top + 16, "no stall recorded", kind="dim")
    for n, stall in enumerate(stages):
        y = f.top + 24 * n
        p.text(f.left - 10, y + 16, stall.stage, "end", room=98)
        title = f"{counted(stall.n, 'stall')}, {seconds(stall.seconds)}"
        p.line(f.left, y + 12, f.right, y + 12, "grid", f"{clean(stall.stage, 60)}: {title}")
        marks = [at for at in stall.marks_s[:_MAX_MARKS] if f.x_range[0] <= at <= f.x_range[1]]
        p.strokes([(f.x(at), y + 4) for at in marks], "rug")
        p.data.rows += [(f"stall of {stall.stage}", at, None, None, None, None) for at in marks]


def _bins(trace: list[TracePoint]) -> list[_Bin]:
    ordered = sorted(trace, key=lambda point: point.t_s)
    size = -(-len(ordered) // _MAX_BINS)
    bins = []
    for k in range(0, len(ordered), size):
        group = ordered[k : k + size]
        computed = sum(g.computed for g in group)
        bins.append(
            _Bin(
                group[0].t_s,
                max(group[0].t_s, *(g.t_s + g.seconds for g in group)),
                computed,
                min(computed, sum(g.lost for g in group)),
                sum(g.load for g in group) / len(group),
            )
        )
    return bins


def lowest(trace: list[TracePoint]) -> str:
    shares = [1 - b.lost / b.computed for b in _bins(trace) if b.computed]
    return percent(min(shares)) if shares else "-"


_MAX_LOADS, _MAX_LABELS, _MAX_BALANCE = 10, 16, 3
_LEFT = 172.0  # of the cells


def weights_part(audit: Audit) -> Part | None:
    section = audit.weighting
    if section is None:
        return None
    lead = (
        f"Inverse-probability weights per cell of load × {section.complexity}. {section.claim}. "
        "The bias is a mean of the stored rows minus that of all, in SD: the largest of each group "
        "of covariates, before → after weighting."
    )
    share = section.effective_rows / section.n_rows if section.n_rows else 0.0
    rows = [
        Row(("weighted rows", count(section.n_rows))),
        Row(("effective rows, (Σw)² / Σw²", number(round(section.effective_rows)))),
        Row(("effective share", measured(share, "share"))),
        Row(("largest weight", number(section.largest))),
        Row(("cells", count(section.n_cells))),
        *(
            Row((f"largest bias, {b.group}", f"{number(b.before)} → {number(b.after)}"))
            for b in section.balance[:_MAX_BALANCE]
        ),
    ]
    table = Table("What weighting costs", ("quantity", "number"), rows)
    brief = [Line(f"  {section.claim}")]
    return Part("weights", "Weights", lead, [table], brief=brief)


def weight_map(audit: Audit) -> Picture | None:
    if audit.weighting is None or not audit.weighting.cells:
        return None
    section = audit.weighting
    cells = {(c.load_low, c.load_high, c.label): c for c in section.cells}.values()
    loads = sorted({(cell.load_low, cell.load_high) for cell in cells})[:_MAX_LOADS]
    labels = list(dict.fromkeys(cell.label for cell in cells))[:_MAX_LABELS]
    p = Picture(
        "weight-map",
        "Loss rate and weight by load and complexity",
        "Each cell: the share of its computed tokens that was lost, shrunk to that of its load, "
        "and below it the weight of its stored rows. Darker cells lost less, lighter cells more. A "
        "cell whose rows were all lost has no weight; n is how many. Cells that are not drawn are "
        "in the result (--json).",
        WIDTH,
        78 + 42 * len(labels),
        FigureData(
            ("load from", "load to", section.complexity, "computed tokens", "lost tokens",
             "share lost, shrunk", "weight")
        ),
    )  # fmt: skip
    top = max([cell.rate for cell in cells if cell.weight], default=1.0)
    shade_scale(p, _LEFT, top, beyond=any(cell.rate > top or not cell.weight for cell in cells))
    width = (WIDTH - 2 - _LEFT) / len(loads)
    p.text(_LEFT - 10, 50, "load, tokens per step →", "end", "dim", room=_LEFT - 14)
    p.text(_LEFT - 10, 64, f"{section.complexity} ↓", "end", "dim", room=_LEFT - 14)
    bounds = sorted({edge for load in loads for edge in load})
    names = dict(zip(bounds, apart(bounds), strict=True))
    for column, (low, high) in enumerate(loads):
        words = split_range(names[low] if low == high else f"{names[low]}–{names[high]}", width - 4)
        for line, word in enumerate(words):
            at = _LEFT + width * (column + 0.5)
            p.text(at, (50 if words[1] else 62) + 13 * line, word, "middle", room=width - 4)
    for row, label in enumerate(labels):
        p.text(_LEFT - 10, 94 + 42.0 * row, label, "end", room=_LEFT - 14)
    for cell in cells:
        load = (cell.load_low, cell.load_high)
        if load in loads and cell.label in labels:
            p.data.rows.append(
                (*load, cell.label, cell.n, cell.n_lost, cell.rate, cell.weight or None)
            )
            x = _LEFT + width * loads.index(load)
            _cell(p, x, 70 + 42.0 * labels.index(cell.label), width - 2, cell, top)
    return p


def _cell(p: Picture, x: float, y: float, width: float, cell: WeightCell, top: float) -> None:
    low, high = cell.load_low, cell.load_high
    weight = f"weight {number(cell.weight)}" if cell.weight else "no weight"
    title = (
        f"load {number(low)} to {number(high)}, {clean(cell.label, 50)}: "
        f"{count(cell.n_lost)} of {count(cell.n)} lost, {weight}"
    )
    # Shrunk to its load's, the rate of a cell that lost every row says what nobody saw.
    step = shade(cell.rate if cell.weight else 1.0, top)
    p.box(x, y, width, 38, f"shade{step}", title)
    middle = x + width / 2
    above, below = percent(cell.rate), f"× {number(cell.weight)}"
    if not cell.weight:
        above, below = "all lost", f"n {short(cell.n)}"
    p.text(middle, y + 16, above, "middle", f"ink{step}", room=width - 4)
    p.text(middle, y + 31, below, "middle", f"ink{step}", room=width - 4)


SECTIONS = (
    SectionOf(
        mechanism_part,
        (),
        "Mechanism",
        "no token was lost, so there is nothing to test",
        of_losses=True,
    ),
    SectionOf(
        queues_part,
        (capture_trace, loss_against_load, loss_against_step, occupancy, lag_plot),
        "Time and queues",
        "the run records neither steps nor queues",
    ),
    SectionOf(
        weights_part,
        (weight_map,),
        "Weights",
        "no token was dropped: every weight is 1",
        of_losses=True,
    ),
)
