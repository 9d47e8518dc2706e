"""The part on inverse-probability weights: loss and weight per cell of load and complexity.

A family of charts of the report; from the result's section on weighting.
"""

from __future__ import annotations

from actds_validators.audits.result import WeightCell, Weighting
from actds_validators.report.parts import Part, Row, Table
from actds_validators.report.shades import shade, shade_scale
from actds_validators.report.svg import WIDTH, Picture, split_range
from actds_validators.report.words import Sentence, clean, count, measured, number, percent, short

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
        "and below it the weight of its stored rows. Darker cells lost less, lighter cells more; "
        "cells beyond the drawn ones stand in audit.json.",
        WIDTH,
        104 + 42 * len(labels),
    )
    top = max(cell.rate for cell in cells)
    shade_scale(p, _LEFT, top)
    width = (WIDTH - 2 - _LEFT) / len(loads)
    p.text(_LEFT - 10, 62, section.complexity, "end", "bold", room=_LEFT - 14)
    for column, (low, high) in enumerate(loads):
        words = split_range(f"{short(low)}–{short(high)}", width - 4)
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
    p.text((_LEFT + WIDTH) / 2, p.height - 14, "load, tokens per step", "middle")
    return p


def _cell(p: Picture, x: float, y: float, width: float, cell: WeightCell, top: float) -> None:
    said = (
        f"load {short(cell.load_low)} to {short(cell.load_high)}, {clean(cell.label, 50)}: "
        f"{count(cell.n_lost)} of {count(cell.n)} lost, weight {number(cell.weight)}"
    )
    step = shade(cell.rate, top)
    p.box(x, y, width, 38, f"shade{step}", said)
    middle = x + width / 2
    p.text(middle, y + 16, percent(cell.rate), "middle", f"ink{step}", room=width - 4)
    p.text(middle, y + 31, f"× {number(cell.weight)}", "middle", f"ink{step}", room=width - 4)
