"""The part on inverse-probability weights: loss and weight per cell of load and complexity.

A family of charts of the report; from the result's section on weighting.
"""

from __future__ import annotations

from actds_validators.audit.result import WeightCell, Weighting
from actds_validators.report.parts import Part, Row, Table
from actds_validators.report.shades import shade, shade_scale
from actds_validators.report.svg import WIDTH, Picture, split_range
from actds_validators.report.words import (
    Sentence,
    apart,
    clean,
    count,
    measured,
    number,
    percent,
    short,
)

__all__ = ["weights_part"]

_MAX_LOADS, _MAX_LABELS, _MAX_BALANCE = 10, 16, 3
_LEFT = 172.0  # of the cells


def weights_part(section: Weighting) -> Part:
    """Return the part on inverse-probability weights."""
    lead = (
        f"Inverse-probability weights per cell of load × {section.complexity}. {section.claim}. "
        "The bias is how far a mean of the stored rows lies from that of all, in standard "
        "deviations of all: the largest over each kind of covariate, before → after weighting."
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
    pictures = [weight_map(section)] if section.cells else []
    table = Table("What weighting costs", ("quantity", "number"), rows)
    return Part("weights", "Weights", Sentence(lead), pictures, [table])


def weight_map(section: Weighting) -> Picture:
    """Return load × complexity, each cell with its shrunk loss rate and its weight."""
    cells = section.cells
    loads = sorted({(cell.load_low, cell.load_high) for cell in cells})[:_MAX_LOADS]
    labels = list(dict.fromkeys(cell.label for cell in cells))[:_MAX_LABELS]
    p = Picture(
        "weight-map",
        "Loss rate and weight by load and complexity",
        "Each cell: the share of its computed tokens that was lost, shrunk to that of its load, "
        "and below it the weight of its stored rows. Darker cells lost less, lighter cells more. A "
        "cell whose rows were all lost has no weight: below stands how many. Cells beyond the "
        "drawn ones stand in the result (--json).",
        WIDTH,
        78 + 42 * len(labels),
    )
    top = max([cell.rate for cell in cells if cell.weight], default=1.0)
    shade_scale(p, _LEFT, top, beyond=any(cell.rate > top or not cell.weight for cell in cells))
    width = (WIDTH - 2 - _LEFT) / len(loads)
    p.text(_LEFT - 10, 50, "load, tokens per step →", "end", "dim", room=_LEFT - 14)
    p.text(_LEFT - 10, 64, f"{section.complexity} ↓", "end", "dim", room=_LEFT - 14)
    bounds = sorted({edge for load in loads for edge in load})
    said = dict(zip(bounds, apart(bounds), strict=True))
    for column, (low, high) in enumerate(loads):
        words = split_range(said[low] if low == high else f"{said[low]}–{said[high]}", width - 4)
        for line, word in enumerate(words):
            at = _LEFT + width * (column + 0.5)
            p.text(at, (50 if words[1] else 62) + 13 * line, word, "middle", room=width - 4)
    for row, label in enumerate(labels):
        p.text(_LEFT - 10, 94 + 42.0 * row, label, "end", room=_LEFT - 14)
    for cell in cells:
        load = (cell.load_low, cell.load_high)
        if load in loads and cell.label in labels:
            x = _LEFT + width * loads.index(load)
            _cell(p, x, 70 + 42.0 * labels.index(cell.label), width - 2, cell, top)
    return p


def _cell(p: Picture, x: float, y: float, width: float, cell: WeightCell, top: float) -> None:
    low, high = cell.load_low, cell.load_high
    weight = f"weight {number(cell.weight)}" if cell.weight else "no weight"
    said = (
        f"load {number(low)} to {number(high)}, {clean(cell.label, 50)}: "
        f"{count(cell.n_lost)} of {count(cell.n)} lost, {weight}"
    )
    # Shrunk to its load's, the rate of a cell that lost every row says what nobody saw.
    step = shade(cell.rate if cell.weight else 1.0, top)
    p.box(x, y, width, 38, f"shade{step}", said)
    middle = x + width / 2
    above, below = percent(cell.rate), f"× {number(cell.weight)}"
    if not cell.weight:
        above, below = "all lost", f"n {short(cell.n)}"
    p.text(middle, y + 16, above, "middle", f"ink{step}", room=width - 4)
    p.text(middle, y + 31, below, "middle", f"ink{step}", room=width - 4)
