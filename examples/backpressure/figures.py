"""The four pictures, drawn with the shapes and axes of the audit's report.

Files of their own: SVG that reads in light and in dark, in colours that the colour-blind tell
apart (Okabe and Ito). Knows numbers and labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import numpy as np

from actds_validators.pages.svg import FigureData, Frame, Picture, Shape, axes, legend, ticks
from actds_validators.pages.words import percent, short

STYLE = """
text{font:12px system-ui,sans-serif;fill:#24292f}.dim{fill:#57606a}.bold{font-weight:600}
.back{fill:#fff}.axis{stroke:#57606a;fill:none}.grid{stroke:#d8dee4;fill:none}
.c0{fill:#0072b2;stroke:#0072b2}.c1{fill:#d55e00;stroke:#d55e00}.c2{fill:#009e73;stroke:#009e73}
.c3{fill:#8c959f;stroke:#8c959f}.bar{stroke:none}.whisker{stroke-width:1.5}
.band{fill:#8c959f;opacity:.18;stroke:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.back{fill:#0d1117}
.axis{stroke:#9198a1}.grid{stroke:#30363d}.c0{fill:#56b4e9;stroke:#56b4e9}
.c1{fill:#e69f00;stroke:#e69f00}.c2{fill:#2fc79b;stroke:#2fc79b}.c3{fill:#848d97;stroke:#848d97}}
"""

Point = tuple[float, float, float]
"""A value and its interval."""
Panel = tuple[str, Sequence[tuple[str, Point]]]
"""Label of an axis, and its points with their labels."""


def picture(name: str, title: str, description: str, width: float, height: float) -> Picture:
    """Return a drawing whose numbers are in figures.json, and not beside it."""
    return Picture(name, title, description, width, height, FigureData(()))


def document(p: Picture) -> str:
    """Return a picture as an SVG file of its own."""
    size = {"width": _written(p.width), "height": _written(p.height)}
    box = f"0 0 {size['width']} {size['height']}"
    root = ElementTree.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, **size, "role": "img"}
    )
    for tag, words in (("title", p.title), ("desc", p.description), ("style", STYLE)):
        ElementTree.SubElement(root, tag).text = words
    ElementTree.SubElement(root, "rect", {"class": "back", "width": "100%", "height": "100%"})
    for shape in p.shapes:
        attributes = {name: _written(value) for name, value in shape.attributes if value != ""}
        if shape.points:
            places = (f"{_written(x)},{_written(y)}" for x, y in shape.points)
            attributes["points"] = " ".join(places)
        element = ElementTree.SubElement(root, shape.tag, attributes)
        if shape.title:
            ElementTree.SubElement(element, "title").text = shape.title
            element[0].tail = shape.text
        else:
            element.text = shape.text
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _written(value: float | str) -> str:
    """Return a number to a tenth of a pixel."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def timeline(
    rows: Sequence[tuple[str, np.ndarray, np.ndarray]], seconds: float, bin_s: float
) -> str:
    """Return stored and lost tokens per second along the run, one panel a policy.

    Args:
        rows: name, second of every token, and whether it was lost.
        seconds: how much of the run to show.
        bin_s: width of a bar.
    """
    p = picture(
        "timeline",
        "Stored and lost tokens along the runs",
        "One panel per policy: tokens per second, the lost ones on top of the stored ones.",
        760,
        66 + 130 * len(rows),
    )
    legend(p, 64, 22, [("c0 bar", "stored"), ("c1 bar", "lost")])
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
            p.box(x, low, width, f.bottom - low, "c0 bar")
            p.box(x, high, width, low - high, "c1 bar")
    return document(p)


def rates(grid: Sequence[tuple[str, float, Sequence[Panel]]]) -> str:
    """Return loss rates with intervals: one row of panels a policy.

    Args:
        grid: name of the policy, its overall loss, and its panels.
    """
    p = picture(
        "loss_rates",
        "Loss rates by batch, context length and phase",
        "One row a policy: the share of tokens lost with its interval; the grey line is the share "
        "over all tokens.",
        880,
        30 + 236 * len(grid),
    )
    tops = [high for *_, panels in grid for _, points in panels for _, (_, _, high) in points]
    top = min(1.0, max([0.05, *tops]) * 1.05)
    for n, (name, overall, panels) in enumerate(grid):
        y = 40.0 + 236 * n
        p.text(64, y - 16, name, kind="bold")
        left = 64.0
        for k, (label, points) in enumerate(panels):
            width = 120.0 if len(points) <= 2 else 280.0
            f = Frame(left, y, width, 140, (-0.6, len(points) - 0.4), (0, top))
            axes(p, f, "", "share lost" if k == 0 else "", x_marks=[], y_text=percent)
            p.text(f.left + f.width / 2, f.bottom + 62, label, "middle")
            p.line(f.left, f.y(overall), f.right, f.y(overall), "c3 whisker")
            for i, (words, (value, low, high)) in enumerate(points):
                x = f.x(i)
                if len(points) > 2:
                    _slanted(p, x + 4, f.bottom + 14, words)
                else:
                    p.text(x, f.bottom + 16, words, "middle", "dim")
                p.line(x, f.y(low), x, f.y(high), "c1 whisker")
                p.dot(x, f.y(value), "c1")
            left += width + 52
    return document(p)


def _slanted(p: Picture, x: float, y: float, words: str) -> None:
    move = f"translate({x:.1f} {y:.1f}) rotate(-38)"
    attributes = (("transform", move), ("text-anchor", "end"), ("class", "dim"))
    p.shapes.append(Shape("text", attributes, text=words))


def forest(
    name: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[Point | None]]],
    x_label: str,
    *,
    around: float,
    band: float | None = None,
    x_text: Callable[[float], str] = short,
) -> str:
    """Return intervals side by side, one line per label and one colour per series.

    Args:
        name: of the picture.
        title: of the picture.
        labels: one a line.
        series: name, and value with interval per label, None for none.
        x_label: what the axis shows.
        around: value of no difference.
        band: half width of what counts as negligible, None for no band.
        x_text: words of a tick.
    """
    line = 16 * len(series) + 14
    p = picture(
        name,
        title,
        f"{x_label}: values with 95 % intervals." + (" Grey: negligible." if band else ""),
        760,
        84 + line * len(labels),
    )
    ends = [v for _, values in series for point in values for v in point or ()] + [around]
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.06 or 1.0
    f = Frame(230, 34, 500, line * len(labels), (low - pad, high + pad), (0, 1))
    if band is not None:
        p.box(f.x(around - band), f.top, f.x(around + band) - f.x(around - band), f.height, "band")
    marks = [(value, x_text(value)) for value in ticks(*f.x_range, 6)]
    for value, _ in marks:
        p.line(f.x(value), f.top, f.x(value), f.bottom, "grid")
    axes(p, f, x_label, "", x_marks=marks, y_marks=[])
    p.line(f.x(around), f.top, f.x(around), f.bottom, "axis")
    if len(series) > 1:
        legend(p, f.left, 20, [(f"c{k} bar", words) for k, (words, _) in enumerate(series)])
    for n, label in enumerate(labels):
        middle = f.top + line * (n + 0.5)
        p.text(f.left - 10, middle + 4, label, "end")
        for k, (_, values) in enumerate(series):
            point = values[n]
            if point is None:
                continue
            y = middle + 16 * (k - (len(series) - 1) / 2)
            p.line(f.x(point[1]), y, f.x(point[2]), y, f"c{k} whisker")
            p.dot(f.x(point[0]), y, f"c{k}")
    return document(p)
