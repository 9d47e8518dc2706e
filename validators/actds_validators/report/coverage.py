"""The part on coverage: what the prefix cache and the losses left out, by class and position.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

from collections import defaultdict

from actds_validators.audits.result import Coverage, CoverageCell
from actds_validators.report.axes import legend
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.svg import WIDTH, Picture, split_range
from actds_validators.report.words import Sentence, clean, count, number, percent, short

__all__ = ["coverage_part"]

_MAX_CLASSES, _MAX_BANDS = 12, 10
_STATES = ("computed", "reused", "lost", "filtered")
_KINDS = {"computed": "stored", "reused": "reused", "lost": "lost", "filtered": "filtered"}
_NAMES = {"computed": "computed and stored", "reused": "reused from the cache"}
_REST = "other classes"
Counts = dict[str, int]


def coverage_part(section: Coverage) -> Part:
    """Return the part on coverage."""
    lead = (
        f"{percent(section.reused_share)} of what was served came from the prefix cache and was "
        f"not computed again. {count(section.repeated_prefixes)} stored rows were served more than "
        f"once (at most {count(section.largest_multiplicity)} times, "
        f"{number(section.mean_multiplicity)} times on average): training without multiplicity "
        f"weights sees each of them once. Token classes: {section.classes_from}."
    )
    some, more = first(section.shifts)
    rows = [
        Row(
            (
                s.variable,
                number(s.total_variation),
                number(s.weighted_total_variation),
                number(s.jensen_shannon),
                number(s.weighted_jensen_shannon),
            )
        )
        for s in some
    ]
    head = (
        "distribution of",
        "total variation",
        "with multiplicity weights",
        "Jensen–Shannon distance",
        "with multiplicity weights",
    )
    caption = "How far the stored rows lie from what was served (0 equal, 1 disjoint)"
    tables = [Table(caption, head, rows, more=more)] if rows else []
    pictures = [coverage_map(section.cells)] if section.cells else []
    return Part("coverage", "Coverage", Sentence(lead), pictures, tables)


def coverage_map(cells: list[CoverageCell]) -> Picture:
    """Return token class × position band, each cell split by what became of its positions."""
    bands = _bands(sorted({(cell.low, cell.high) for cell in cells}))
    grid, once = _grid(cells, bands)
    p = Picture(
        "coverage-map",
        "Coverage map: token class by band of positions",
        "Each cell is split by what became of its positions: computed and stored, reused from the "
        "prefix cache, lost, filtered. Below: the number of positions, and the share of computed "
        "and reused that a row stands for when references are not followed.",
        WIDTH,
        90 + 52 * len(grid),
    )
    left = 176.0
    width = (WIDTH - 8 - left) / len(bands)
    legend(p, left, 16, [(_KINDS[s], _NAMES.get(s, s)) for s in _STATES])
    for column, (low, high) in enumerate(bands):
        words = f"{low:,}–{high - 1:,}" if high - 1 > low else f"{low:,}"
        low_line, high_line = split_range(words, width - 4)
        middle = left + width * (column + 0.5) - 2
        if high_line:
            p.text(middle, 40, low_line, "middle", room=width - 4)
        p.text(middle, 54, high_line or low_line, "middle", room=width - 4)
    for row, (name, columns) in enumerate(grid.items()):
        y = 66.0 + 52 * row
        p.text(left - 10, y + 13, name, "end", room=164)
        for column in range(len(bands)):
            counts, share = columns[column], once[name][column]
            place = f"{clean(name, 40)}, positions {bands[column][0]}–{bands[column][1] - 1}"
            _cell(p, left + width * column, y, width - 4, counts, share, place)
    p.text(
        (left + WIDTH) / 2, 66.0 + 52 * len(grid) + 14, "position in the request, tokens", "middle"
    )
    return p


def _cell(
    p: Picture, x: float, y: float, width: float, counts: Counts, once: float | None, place: str
) -> None:
    total = sum(counts.values())
    p.box(x, y, width, 16, "empty")
    if not total:
        p.text(x + width / 2, y + 29, "none", "middle", "dim")
        return
    said = ", ".join(f"{count(counts[s])} {_NAMES.get(s, s)}" for s in _STATES)
    start = x
    for state in _STATES:
        part = width * counts[state] / total
        p.box(start, y, part, 16, _KINDS[state], f"{place}: {said}")
        start += part
    p.text(x + width / 2, y + 29, short(total), "middle", room=width)
    if once is not None:
        p.text(x + width / 2, y + 42, percent(once), "middle", "dim", room=width)


def _bands(bands: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the bands, neighbours taken together until they fit."""
    while len(bands) > _MAX_BANDS:
        pairs = [bands[k : k + 2] for k in range(0, len(bands), 2)]
        bands = [(pair[0][0], max(high for _, high in pair)) for pair in pairs]
    return bands


def _grid(
    cells: list[CoverageCell], bands: list[tuple[int, int]]
) -> tuple[dict[str, list[Counts]], dict[str, list[float | None]]]:
    """Return the counts, and the share served once, per class and band; rare classes as one."""
    size: dict[str, int] = defaultdict(int)
    for cell in cells:
        size[cell.token_class] += cell.computed + cell.reused + cell.lost + cell.filtered
    order = sorted(size, key=lambda name: (-size[name], name))
    named = set(order if len(order) <= _MAX_CLASSES else order[: _MAX_CLASSES - 1])
    grid: dict[str, list[Counts]] = {
        name: [dict.fromkeys(_STATES, 0) for _ in bands]
        for name in [
            *(n for n in order if n in named),
            *([_REST] if len(named) < len(order) else []),
        ]
    }
    served: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for cell in cells:
        name = cell.token_class if cell.token_class in named else _REST
        column = max(k for k, (low, _) in enumerate(bands) if low <= cell.low)
        for state in _STATES:
            grid[name][column][state] += getattr(cell, state)
        if cell.served_once is not None:
            served[name, column].append((cell.served_once, cell.computed + cell.reused))
    once: dict[str, list[float | None]] = {
        name: [_mean(served[name, column]) for column in range(len(bands))] for name in grid
    }
    return grid, once


def _mean(parts: list[tuple[float, int]]) -> float | None:
    total = sum(n for _, n in parts)
    return sum(value * n for value, n in parts) / total if total else None
