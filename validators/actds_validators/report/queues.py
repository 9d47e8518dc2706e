"""The part on time and queues: trace, stalls, occupancy, loss against load, lags.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

from collections import defaultdict

from actds_validators.audit.result import Lag, LagBand, Loss, Occupancy, Queues
from actds_validators.report.axes import Frame, axes, legend, span
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.svg import WIDTH, Picture
from actds_validators.report.trace import capture_trace, lowest
from actds_validators.report.words import (
    Sentence,
    count,
    many,
    number,
    percent,
    seconds,
    short,
    thousandths,
)

__all__ = ["queues_part"]

_MAX_POINTS, _MAX_LAGS, _MAX_STAGES, _MAX_DEPTHS = 40, 201, 6, 32


def queues_part(section: Queues) -> Part:
    """Return the part on time and queues."""
    lead = "When tokens were lost, how full the queues of the writer stood, and how the loss goes "
    lead += "with the load (moving average of the tokens per step)."
    if section.trace:
        lead += f" In the worst part of the trace {lowest(section.trace)} were stored."
    pictures = []
    if section.trace:
        pictures.append(capture_trace(section))
    if section.loss_by_load:
        pictures.append(loss_against_load(section.loss_by_load))
    if section.occupancy:
        pictures.append(occupancy(section.occupancy))
    if section.lags:
        pictures.append(lag_plot(section.lags, section.lag_band))
    some, more = first(section.stalls)
    rows = [
        Row((s.stage, count(s.n), seconds(s.seconds), seconds(s.seconds / s.n) if s.n else "-"))
        for s in some
    ]
    tables = [Table("Stalls", ("stage", "stalls", "waited", "mean wait"), rows, more=more)]
    notes = [] if rows else [Sentence("No stall was recorded.")]
    return Part(
        "queues", "Time and queues", Sentence(lead), pictures, tables if rows else [], notes
    )


def loss_against_load(points: list[Loss]) -> Picture:
    """Return the share lost per decile of load with intervals, and the isotonic fit."""
    shown = sorted(points, key=lambda point: point.load)[:_MAX_POINTS]
    p = Picture(
        "loss-by-load",
        "Loss against load",
        "Per decile of load the share of computed tokens lost, with its interval; the dashed line "
        "is the isotonic fit, which may only rise.",
        WIDTH,
        292,
    )
    top = min(1.0, max(max(s.rate.value, s.rate.high, s.fitted) for s in shown) * 1.1) or 0.01
    loads = [s.load for s in shown]
    f = Frame(90, 38, 740, 196, span(loads, zero=False), (0, top))
    axes(p, f, "load, tokens per step", "share lost", y_text=percent, left=64)
    p.dot(100, 14, "mark lost-mark")
    p.text(112, 18, "decile, with interval")
    p.line(272, 14, 302, 14, "curve dashed")
    p.text(310, 18, "isotonic fit")
    p.path([(f.x(s.load), f.y(s.fitted)) for s in shown], "curve dashed")
    for s in shown:
        said = f"load {number(s.load)}: {percent(s.rate.value)} lost"
        said += f", interval {percent(s.rate.low)} to {percent(s.rate.high)}"
        x = f.x(s.load)
        p.line(x, f.y(s.rate.low), x, f.y(s.rate.high), "whisker lost-line", said)
        p.dot(x, f.y(s.rate.value), "mark lost-mark", said)
    return p


def occupancy(rows: list[Occupancy]) -> Picture:
    """Return one histogram a stage: the share of the time that its queue stood at each depth."""
    stages: dict[str, list[Occupancy]] = defaultdict(list)
    for row in rows:
        stages[row.stage].append(row)
    shown = list(stages.items())[:_MAX_STAGES]
    lines = -(-len(shown) // 3)
    p = Picture(
        "occupancy",
        "Queue occupancy",
        "Per stage of the writer the share of the time at each depth of its queue; the last bar "
        "of a full queue is striped.",
        WIDTH,
        4 + 222 * lines,
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
            said = f"{stage}, depth {label}: {percent(spent / total)} of the time"
            x, y = f.x(k), f.y(spent / total)
            p.box(
                x + 0.5, y, f.width / n_bins - 1, f.bottom - y, "lost" if full else "stored", said
            )
    return p


def _depth(entries: int) -> str:
    return count(entries) if entries < 100_000 else short(entries)


def lag_plot(lags: list[Lag], band: LagBand | None) -> Picture:
    """Return the correlation of the load with the loss some steps later, over what is chance."""
    ordered = sorted(lags, key=lambda lag: lag.steps)
    step = -(-len(ordered) // _MAX_LAGS)
    shown = ordered[::step]
    said = "The correlation of the load with the share lost some steps later. A peak right of "
    said += "nought says how long a queue takes to fill."
    if band is not None:
        said += (
            f" At each lag by itself {percent(band.confidence)} of the correlations of unrelated "
            f"series of this kind lie in the band (circular shifts, about "
            f"{many(max(1, int(band.n_effective)), 'independent one')}): some lags lie outside by "
            "chance, neighbours together. The tests, not this plot, decide."
        )
    p = Picture("lags", "Load against loss, by lag", said, WIDTH, 288 if band else 262)
    ends = [band.low, band.high] if band else []
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
        said = f"{lag.steps:+d} steps: correlation {thousandths(lag.correlation)}"
        p.line(x, f.y(0), x, y, "whisker stored-line", said)
        p.dot(x, y, "mark stored-mark", said, 2.5)
    return p
