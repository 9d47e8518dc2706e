"""The capture-rate trace: stored and lost tokens along the run, with the stalls marked.

A chart of the report; from the result's queues.
"""

from __future__ import annotations

from dataclasses import dataclass

from actds_validators.audit.result import Queues, Stall, TracePoint
from actds_validators.report.axes import Frame, axes, legend
from actds_validators.report.svg import WIDTH, Picture
from actds_validators.report.words import clean, count, many, number, percent, seconds

__all__ = ["capture_trace", "lowest"]

_MAX_BINS, _MAX_STAGES, _MAX_MARKS = 200, 6, 200


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


def capture_trace(queues: Queues) -> Picture:
    """Return tokens a second, the share stored and the load along the run, and the stalls."""
    bins = _bins(queues.trace)
    stages = queues.stalls[:_MAX_STAGES]
    p = Picture(
        "trace",
        "Capture-rate trace",
        "Along the run: stored and lost tokens a second, the share of computed tokens that was "
        "stored, the load, and when each stage of the writer stalled.",
        WIDTH,
        442 + 24 * max(1, len(stages)),
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
    said = (
        f"{number(round(b.start_s, 2))}–{number(round(b.end_s, 2))} s: {many(b.computed, 'token')} "
        f"computed, {count(b.lost)} lost"
    )
    stored = f.y(b.per_second - lost)
    p.box(x, stored, width, f.bottom - stored, "stored", said)
    p.box(x, f.y(b.per_second), width, stored - f.y(b.per_second), "lost", said)


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
        said = f"{many(stall.n, 'stall')}, {seconds(stall.seconds)}"
        p.line(f.left, y + 12, f.right, y + 12, "grid", f"{clean(stall.stage, 60)}: {said}")
        for at in stall.marks_s[:_MAX_MARKS]:
            if f.x_range[0] <= at <= f.x_range[1]:
                p.line(f.x(at), y + 4, f.x(at), y + 20, "rug")


def _bins(trace: list[TracePoint]) -> list[_Bin]:
    """Return the bins in order, neighbours taken together until they fit."""
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
    """Return the smallest share stored of a bin of the trace, in words."""
    shares = [1 - b.lost / b.computed for b in _bins(trace) if b.computed]
    return percent(min(shares)) if shares else "-"
