"""Pictures by hand: SVG that reads in light and in dark, in colours that the colour-blind tell
apart (Okabe and Ito). Knows numbers and labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

STYLE = """
text{font:12px system-ui,sans-serif;fill:#24292f}.small{font-size:11px}.bold{font-weight:600}
.back{fill:#fff}.axis{stroke:#57606a;fill:none}.grid{stroke:#d8dee4;fill:none}
.c0{fill:#0072b2;stroke:#0072b2}.c1{fill:#d55e00;stroke:#d55e00}.c2{fill:#009e73;stroke:#009e73}
.c3{fill:#8c959f;stroke:#8c959f}.bar{stroke:none}.line{fill:none;stroke-width:1.5}
.whisker{stroke-width:1.5}.band{fill:#8c959f;opacity:.18;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117}.axis{stroke:#9198a1}
.grid{stroke:#30363d}.c0{fill:#56b4e9;stroke:#56b4e9}.c1{fill:#e69f00;stroke:#e69f00}
.c2{fill:#2fc79b;stroke:#2fc79b}.c3{fill:#848d97;stroke:#848d97}}
"""


@dataclass
class Picture:
    """An SVG document under construction."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        """Write words at a place."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(words)}</text>"
        )

    def turned(self, x: float, y: float, words: str) -> None:
        """Write words from below to above, centred."""
        self.parts.append(
            f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle" '
            f'class="small">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a line."""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a filled box."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
            f'height="{max(height, 0):.1f}" class="{kind}"/>'
        )

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw a dot."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>')

    def svg(self) -> str:
        """Return the document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
            f'<rect width="100%" height="100%" class="back"/>{"".join(self.parts)}</svg>\n'
        )


@dataclass(frozen=True)
class Frame:
    """A plotting area; ``x`` and ``y`` map values to places."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        """Return the place of a value on the horizontal axis."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * self.width

    def y(self, value: float) -> float:
        """Return the place of a value on the vertical axis."""
        low, high = self.y_range
        return self.top + self.height - (value - low) / (high - low) * self.height


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """Return round numbers between two values."""
    raw = (high - low) / max(n, 1)
    power = 10.0 ** np.floor(np.log10(raw))
    step = power * min((m for m in (1, 2, 2.5, 5, 10) if m * power >= raw), default=10)
    first = np.ceil(low / step - 1e-9) * step
    # Adding nought turns the minus zero of floating point into a plain one.
    return [round(float(v), 9) + 0.0 for v in np.arange(first, high + step * 1e-6, step)]


def axes(
    p: Picture,
    f: Frame,
    x_label: str,
    y_label: str,
    *,
    y_text: Callable[[float], str] = lambda v: f"{v:g}",
    x_ticks: Sequence[tuple[float, str]] | None = None,
) -> None:
    """Draw grid, axes, ticks and labels."""
    for value in ticks(*f.y_range, 4):
        p.line(f.left, f.y(value), f.left + f.width, f.y(value), "grid")
        p.text(f.left - 6, f.y(value) + 4, y_text(value), "end", "small")
    marks = x_ticks if x_ticks is not None else [(v, f"{v:g}") for v in ticks(*f.x_range, 6)]
    for value, words in marks:
        p.line(f.x(value), f.top + f.height, f.x(value), f.top + f.height + 4, "axis")
        p.text(f.x(value), f.top + f.height + 16, words, "middle", "small")
    p.line(f.left, f.top + f.height, f.left + f.width, f.top + f.height, "axis")
    p.line(f.left, f.top, f.left, f.top + f.height, "axis")
    p.text(f.left + f.width / 2, f.top + f.height + 32, x_label, "middle", "small")
    if y_label:
        p.turned(f.left - 44, f.top + f.height / 2, y_label)


def percent(value: float) -> str:
    """Return a share in per cent."""
    return f"{100 * value:.0f} %"


def timeline(
    rows: Sequence[tuple[str, np.ndarray, np.ndarray]], seconds: float, bin_s: float
) -> str:
    """Return stored and lost tokens per second along the run, one panel a policy.

    Args:
        rows: name, second of every token, and whether it was lost.
        seconds: how much of the run to show.
        bin_s: width of a bar.
    """
    p = Picture(760, 46 + 130 * len(rows) + 20, "Stored and lost tokens along the run")
    p.box(64, 12, 11, 11, "c0 bar")
    p.text(80, 22, "stored", kind="small")
    p.box(134, 12, 11, 11, "c1 bar")
    p.text(150, 22, "lost", kind="small")
    edges = np.arange(0, seconds + bin_s, bin_s)
    counted = [
        [np.histogram(t[lost == flag], edges)[0] / bin_s for flag in (False, True)]
        for _, t, lost in rows
    ]
    top = max(float((kept + gone).max()) for kept, gone in counted) * 1.05 or 1.0
    for n, ((name, _, _), (kept, gone)) in enumerate(zip(rows, counted, strict=True)):
        f = Frame(64, 50 + 130 * n, 680, 78, (0, seconds), (0, top))
        last = n == len(rows) - 1
        axes(p, f, "seconds since the first request" if last else "", "tokens/s")
        p.text(f.left, f.top - 8, name, kind="bold")
        for k, edge in enumerate(edges[:-1]):
            x, width = f.x(edge), f.x(bin_s) - f.x(0) - 0.4
            low, high = f.y(kept[k]), f.y(kept[k] + gone[k])
            p.box(x, low, width, f.y(0) - low, "c0 bar")
            p.box(x, high, width, low - high, "c1 bar")
    return p.svg()


Points = Sequence[tuple[str, float, float, float]]
"""Label, value and its interval."""


def rates(grid: Sequence[tuple[str, float, Sequence[tuple[str, Points]]]]) -> str:
    """Return loss rates with intervals: one row of panels a policy.

    Args:
        grid: name of the policy, its overall loss, and per panel its axis label and points.
    """
    p = Picture(880, 30 + 236 * len(grid), "Loss rate by stratum")
    tops = [hi for _, _, panels in grid for _, points in panels for *_, hi in points]
    top = min(1.0, max([0.05, *tops]) * 1.05)
    for n, (name, overall, panels) in enumerate(grid):
        y = 40 + 236 * n
        p.text(64, y - 16, name, kind="bold")
        left = 64.0
        for k, (label, points) in enumerate(panels):
            width = 120.0 if len(points) <= 2 else 280.0
            f = Frame(left, y, width, 140, (-0.6, len(points) - 0.4), (0, top))
            marks = [(float(i), words) for i, (words, *_) in enumerate(points)]
            axes(p, f, "", "share lost" if k == 0 else "", y_text=percent, x_ticks=[])
            for value, words in marks:
                _slanted(p, f.x(value) + 4, f.top + f.height + 14, words, len(points) > 2)
            p.text(f.left + f.width / 2, f.top + f.height + 62, label, "middle", "small")
            p.line(f.left, f.y(overall), f.left + f.width, f.y(overall), "c3 whisker")
            for i, (_, value, low, high) in enumerate(points):
                x = f.x(i)
                p.line(x, f.y(max(low, 0)), x, f.y(max(0, min(high, top))), "c1 whisker")
                p.dot(x, f.y(min(max(value, 0), top)), "c1")
            left += width + 52
    return p.svg()


def _slanted(p: Picture, x: float, y: float, words: str, slant: bool) -> None:
    if not slant:
        p.text(x - 4, y + 2, words, "middle", "small")
        return
    p.parts.append(
        f'<text transform="translate({x:.1f} {y:.1f}) rotate(-38)" text-anchor="end" '
        f'class="small">{escape(words)}</text>'
    )


def forest(
    labels: Sequence[str], series: Sequence[tuple[str, Sequence[tuple[float, float, float]]]],
    x_label: str, *, around: float, band: float | None, x_text: Callable[[float], str],
) -> str:  # fmt: skip
    """Return intervals side by side, one line per label and one colour per series.

    Args:
        labels: one a line.
        series: name, and value with interval per label.
        x_label: what the axis shows.
        around: value of no difference.
        band: half width of what counts as negligible, None for no band.
        x_text: words of a tick.
    """
    line = 16 * len(series) + 14
    p = Picture(760, 84 + line * len(labels), x_label)
    ends = [v for _, values in series for point in values for v in point] + [around]
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.06 or 1.0
    f = Frame(230, 34, 500, line * len(labels), (low - pad, high + pad), (0, 1))
    if band is not None:
        p.box(f.x(around - band), f.top, f.x(around + band) - f.x(around - band), f.height, "band")
    marks = ticks(*f.x_range, 6)
    for value in marks:
        p.line(f.x(value), f.top, f.x(value), f.top + f.height, "grid")
        p.text(f.x(value), f.top + f.height + 16, x_text(value), "middle", "small")
    p.line(f.x(around), f.top, f.x(around), f.top + f.height, "axis")
    p.text(f.left + f.width / 2, f.top + f.height + 36, x_label, "middle", "small")
    for k, (name, _) in enumerate(series if len(series) > 1 else []):
        p.dot(f.left + 130 * k + 6, 16, f"c{k}")
        p.text(f.left + 130 * k + 15, 20, name, kind="small")
    for n, label in enumerate(labels):
        middle = f.top + line * (n + 0.5)
        p.text(f.left - 10, middle + 4, label, "end", "small")
        for k, (_, values) in enumerate(series):
            value, left, right = values[n]
            y = middle + 16 * (k - (len(series) - 1) / 2)
            p.line(f.x(left), y, f.x(right), y, f"c{k} whisker")
            p.dot(f.x(value), y, f"c{k}")
    return p.svg()
