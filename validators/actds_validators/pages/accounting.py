"""Sections on what became of every position: source, accounting, coverage by class and place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from actds.text import Line, Style, counted
from actds_validators.audit.place import LeftOut, LengthBand, SourceAccount
from actds_validators.audit.result import (
    Accounting,
    Audit,
    CapturedShift,
    ClassLoss,
    Coverage,
    CoverageCell,
    Finding,
    WaterfallStep,
)
from actds_validators.pages.answer import Part, SectionOf
from actds_validators.pages.svg import WIDTH, FigureData, Frame, Picture, axes, legend, split_range
from actds_validators.pages.words import (
    MAX_ROWS,
    Columns,
    Row,
    Table,
    Tone,
    clean,
    count,
    first,
    number,
    or_dash,
    percent,
    short,
    table_of,
)

_KINDS = {
    "positions": "all",
    "captured": "stored",
    "cache_ref": "reused",
    "filtered": "filtered",
    "undelivered": "filtered",
    "thinned": "filtered",
    "never computed": "filtered",
}
_STEP_WORDS = {"cache_ref": "prefix-cache hits", "positions": "all positions", "captured": "stored"}
_MAX_STEPS = 20
_MAX_LENGTHS = 14
"""Bands of a chart, those of most tokens: it has to fit on a printed page."""


def source_part(audit: Audit) -> Part | None:
    source = audit.source
    if source is None or source.records is None:
        return None
    left_out: Columns[LeftOut] = (
        ("records", lambda item: f"{item.what}: {item.reason}"),
        ("number", lambda item: count(item.n)),
        ("prompt tokens", lambda item: or_dash(item.n_tokens, count)),
    )
    bands: Columns[LengthBand] = (
        ("tokens of the prompt", _band),
        ("records", lambda item: count(item.records)),
        ("served", lambda item: count(item.served)),
        ("share served", lambda item: percent(item.served / item.records)),
        ("share of the source's tokens", lambda item: percent(item.tokens / source.tokens)),
        ("share of the served tokens", lambda item: _share(item, source)),
    )
    tables = table_of("Records that were never served", left_out, source.left_out)
    tables += table_of("Lengths of the prompts, source and served", bands, source.lengths)
    ended = (
        f" Ended before their source: {', '.join(source.interrupted[:5])}."
        if source.interrupted
        else ""
    )
    shift = ""
    if source.length_shift is not None:
        shift = (
            f" The length of the prompt that a token is of: served against source, total variation "
            f"{number(source.length_shift)}."
        )
    lead = (
        f"{count(source.records)} records were read, {count(source.served)} served: "
        f"{count(source.served_tokens)} of {count(source.tokens)} prompt tokens.{shift}{ended}"
    )
    return Part("source", "Source", lead, tables)


def _band(band: LengthBand) -> str:
    return f"{band.low:,} to {band.high:,}" if band.high > band.low else f"{band.low:,}"


def _share(band: LengthBand, source: SourceAccount) -> str:
    return percent(band.served_tokens / source.served_tokens) if source.served_tokens else "-"


def lengths(audit: Audit) -> Picture | None:
    """Return the share of prompt tokens by length of the prompt: of the source, and as served."""
    source = audit.source
    if source is None or not source.lengths or not source.served_tokens:
        return None
    largest = sorted(source.lengths, key=lambda band: -band.tokens)[:_MAX_LENGTHS]
    bands, room = sorted(largest, key=lambda band: band.low), 26.0
    picture = Picture(
        "lengths",
        "Length of the prompt that a token is of, source and served",
        "Share of all prompt tokens in prompts of a length; a difference of the two bars is what "
        "skipping changed.",
        WIDTH,
        74 + 2 * room * len(bands),
        FigureData(
            ("tokens at least", "tokens at most", "tokens of the source", "served tokens"),
            [(b.low, b.high, b.tokens, b.served_tokens) for b in bands],
        ),
    )
    legend(picture, 170, 16, [("all", "source"), ("stored", "served")])
    shares = [
        (band, band.tokens / source.tokens, band.served_tokens / source.served_tokens)
        for band in bands
    ]
    most = max(max(a, b) for _, a, b in shares)
    frame = Frame(170, 30, 560, 2 * room * len(shares), (0, most), (0, 1))
    axes(picture, frame, "share of prompt tokens", "", x_text=lambda x: short(100 * x) + " %",
         y_marks=[])  # fmt: skip
    for k, (band, of_source, of_served) in enumerate(shares):
        top = frame.top + 2 * room * k
        picture.label(frame.left - 10, top + room, f"{_band(band)} tokens", 154)
        for row, (value, kind, name) in enumerate(
            ((of_source, "all", "source"), (of_served, "stored", "served"))
        ):
            width = frame.x(value) - frame.left
            words = f"{name}, {_band(band)} tokens: {percent(value)}"
            picture.box(frame.left, top + 4 + row * 22, width, 18, kind, words)
            picture.text(frame.left + width + 6, top + 18 + row * 22, percent(value))
    return picture


def balance(section: Accounting) -> str:
    never = f"{count(section.never_computed)} never computed + " if section.never_computed else ""
    outside = f" ({count(section.external)} from outside)" if section.external else ""
    late = f" + {count(section.undelivered)} undelivered" if section.undelivered else ""
    drawn = f"{count(section.thinned)} not drawn + " if section.thinned else ""
    return (
        f"{counted(section.positions, 'position')} = {count(section.captured)} stored + {drawn}"
        f"{count(section.cache_ref)} prefix-cache hits{outside} + "
        f"{count(section.dropped)} dropped + {count(section.aborted)} aborted + "
        f"{never}{count(section.filtered)} filtered{late}"
    )


def never_computed(section: Accounting) -> str:
    """Return how many positions no step computed, in a sentence; empty for none."""
    if not section.never_computed:
        return ""
    return (
        f" Never computed: {counted(section.never_computed, 'position')} of "
        f"{counted(section.never_computed_requests, 'request')}, which are in no loss rate."
    )


def accounting_part(audit: Audit) -> Part:
    section = audit.accounting
    lead = (
        f"{balance(section)}. Of {count(section.computed)} computed tokens "
        f"{percent(section.loss_share)} were lost (dropped or aborted).{never_computed(section)}"
    )
    rows = [
        Row(("requests", count(section.requests))),
        Row(("steps", count(section.steps))),
        Row(("computed tokens", count(section.computed))),
        Row(("recomputed tokens", count(section.recomputed))),
        Row(
            ("prefix-cache hits without a stored row", count(section.unresolved)),
            "bad" if section.unresolved else "",
        ),
        Row(("positions whose KV came from outside the run", count(section.external))),
    ]
    tables = [*_findings(section), Table("What was counted", ("quantity", "number"), rows)]
    return Part("accounting", "Accounting", lead, tables, brief=_brief(section))


def _brief(section: Accounting) -> list[Line]:
    brief = [Line(f"  {balance(section)}")]
    names = ("dropped", "aborted", "never computed", "filtered", "undelivered", "thinned")
    steps = [step for step in section.waterfall if step.name in names and step.n_positions]
    for step in steps[:_MAX_STEPS]:
        is_lost = step.name in ("dropped", "aborted")
        share = step.n_positions / section.computed if is_lost else step.share
        of = "of the computed" if is_lost else "of all"
        line = f"{count(step.n_positions)} {step.name} ({percent(share)} {of})"
        style: Style = "warn" if is_lost else "plain"
        brief.append(Line(f"  {line}: {step.reason or 'no reason given'}", style))
    if len(steps) > _MAX_STEPS:
        more = f"  and {len(steps) - _MAX_STEPS:,} more; --json lists them all"
        brief.append(Line(more, "dim"))
    if section.never_computed:
        brief.append(Line(f" {never_computed(section)}"))
    for f in section.findings[:MAX_ROWS]:
        line = f"  {f.severity} {f.code} {f.place}: {f.got}; expected {f.expected}"
        brief.append(Line(line, "bad" if f.severity == "error" else "warn"))
    if len(section.findings) > MAX_ROWS:
        more = f"  and {len(section.findings) - MAX_ROWS:,} more findings; --json lists them all"
        brief.append(Line(more, "warn"))
    return brief


def _findings(section: Accounting) -> list[Table]:
    tones: dict[str, Tone] = {"error": "bad", "warning": "warn", "note": "dim"}
    columns: Columns[Finding] = (
        ("severity", lambda f: f.severity),
        ("code", lambda f: f.code),
        ("place", lambda f: f.place),
        ("got", lambda f: f.got),
        ("expected", lambda f: f.expected),
    )
    return table_of(
        "Accounting mismatches",
        columns,
        section.findings,
        frozenset(range(5)),
        tone=lambda f: tones[f.severity],
        brief=(5, 0),
    )


def waterfall(audit: Audit) -> Picture | None:
    return waterfall_of(audit.accounting.waterfall)


def waterfall_of(steps: Sequence[WaterfallStep]) -> Picture | None:
    if not steps:
        return None
    shown, more = first(steps, _MAX_STEPS)
    p = Picture(
        "waterfall",
        "Loss waterfall",
        "From all positions of all requests to the stored rows; each bar takes away the positions "
        "that it names.",
        WIDTH,
        76 + 30 * len(shown),
        FigureData(
            ("what became of them", "reason", "positions", "share of all positions"),
            [(step.name, step.reason, step.n_positions, step.share) for step in shown],
        ),
    )
    items = [("all", "all"), ("reused", "prefix-cache hit"), ("filtered", "filtered")]
    legend(p, 170, 16, [*items, ("lost", "lost"), ("stored", "stored")])
    whole = max(1, max(step.n_positions for step in steps))
    f = Frame(170, 30, 500, 30 * len(shown), (0, whole), (0, 1))
    axes(p, f, f"positions{', ' + more if more else ''}", "", x_text=short, y_marks=[])
    left = next((s.n_positions for s in steps if s.name == "positions"), whole)
    for n, step in enumerate(shown):
        y = f.top + 30 * n
        whole_bar = step.name in ("positions", "captured")
        high = step.n_positions if whole_bar else left
        low = 0 if whole_bar else left - step.n_positions
        left = low if not whole_bar else left
        words = _STEP_WORDS.get(step.name, step.name)
        label = f"{words}: {step.reason}" if step.reason else words
        amount = f"{count(step.n_positions)} ({percent(step.share)})"
        p.label(f.left - 10, y + 19, label, 154)
        # A step too thin to see still shows as a line.
        start, width = f.x(low), max(f.x(high) - f.x(low), 1.5 if step.n_positions else 0)
        p.box(start, y + 6, width, 18, _KINDS.get(step.name, "lost"), f"{label}: {amount}")
        brief = f"{short(step.n_positions)} ({percent(step.share)})"
        p.text(f.right + 10, y + 19, amount, shorter=[brief])
        if n + 1 < len(shown) and shown[n + 1].name != "captured":
            edge = f.x(left)
            p.line(edge, y + 24, edge, y + 36, "link")
    return p


_MAX_CLASSES, _MAX_BANDS = 12, 10
_STATES = ("stored", "reused", "external", "lost", "filtered")
_NAMES = {
    "stored": "computed and stored",
    "reused": "prefix-cache hit",
    "external": "KV from outside",
}
_REST = "other classes"
Counts = dict[str, int]


def coverage_part(audit: Audit) -> Part | None:
    section = audit.coverage
    if section is None:
        return None
    lead = f"{_reused(section)} Token classes: {section.classes_from}."
    columns: Columns[CapturedShift] = (
        ("distribution of", lambda s: s.variable),
        ("total variation", lambda s: number(s.total_variation)),
        ("with multiplicity weights", lambda s: number(s.weighted_total_variation)),
        ("Jensen–Shannon distance", lambda s: number(s.jensen_shannon)),
        ("with multiplicity weights", lambda s: number(s.weighted_jensen_shannon)),
    )
    caption = "Distance of the stored rows from the served tokens (0 equal, 1 disjoint)"
    tables = table_of(caption, columns, section.shifts)
    by_class: Columns[ClassLoss] = (
        ("class", lambda loss: loss.token_class),
        ("computed positions", lambda loss: count(loss.n)),
        ("lost", lambda loss: count(loss.n_lost)),
        ("share lost", lambda loss: percent(loss.rate)),
    )
    origin = "roles" if audit.options.classes is None else "classes from --classes"
    caption = f"Loss rate of the {origin}, without intervals"
    tables += table_of(caption, by_class, section.loss_by_class)
    return Part("coverage", "Coverage", lead, tables)


def _reused(section: Coverage) -> str:
    share = f"{percent(section.reused_share)} of the served tokens were prefix-cache hits"
    if not section.repeated_prefixes:
        return f"{share}; no stored row was served more than once."
    single = section.repeated_prefixes == 1
    often = section.repeated_multiplicity
    mean = "" if often is None else f", {number(often)} times on average"
    return (
        f"{share} and were not computed again. {counted(section.repeated_prefixes, 'stored row')} "
        f"{'was' if single else 'were'} served more than once (at most "
        f"{count(section.largest_multiplicity)} times{mean}): training without multiplicity "
        f"weights sees {'it' if single else 'each of them'} once. Over all stored rows a row was "
        f"served {number(section.mean_multiplicity)} times on average."
    )


def coverage_map(audit: Audit) -> Picture | None:
    return None if audit.coverage is None else map_of(audit.coverage.cells)


def map_of(cells: Sequence[CoverageCell]) -> Picture | None:
    if not cells:
        return None
    bands = _bands(sorted({(cell.low, cell.high) for cell in cells}))
    grid, kept = _grid(cells, bands)
    p = Picture(
        "coverage-map",
        "Coverage map: token class by band of positions",
        "Each cell is split by what became of its positions: computed and stored, prefix-cache "
        "hit, KV from outside, lost, filtered. Below: the number of positions, and the share "
        "stored of those stored, hit and lost: what training sees without weights.",
        WIDTH,
        90 + 52 * len(grid),
        FigureData(
            ("token class", "first position", "last position", *_STATES, "share stored"),
            [
                (name, low, high - 1, *counts.values(), share)
                for name, columns in grid.items()
                for (low, high), counts, share in zip(bands, columns, kept[name], strict=True)
            ],
        ),
    )
    left = 176.0
    width = (WIDTH - 8 - left) / len(bands)
    seen = [s for s in _STATES if s != "external" or any(cell.external for cell in cells)]
    legend(p, left, 16, [(s, _NAMES.get(s, s)) for s in seen])
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
            counts, share = columns[column], kept[name][column]
            place = f"{clean(name, 30)}, positions {bands[column][0]}–{bands[column][1] - 1}"
            _cell(p, left + width * column, y, width - 4, counts, share, place)
    p.text(
        (left + WIDTH) / 2, 66.0 + 52 * len(grid) + 14, "position in the request, tokens", "middle"
    )
    return p


def _cell(
    p: Picture, x: float, y: float, width: float, counts: Counts, kept: float | None, place: str
) -> None:
    total = sum(counts.values())
    p.box(x, y, width, 16, "empty")
    if not total:
        p.text(x + width / 2, y + 29, "none", "middle", "dim")
        return
    start = x
    for state in _STATES:
        part = width * counts[state] / total
        amount = f"{count(counts[state])} of {count(total)} {_NAMES.get(state, state)}"
        p.box(start, y, part, 16, state, f"{place}: {amount}")
        start += part
    p.text(x + width / 2, y + 29, short(total), "middle", room=width)
    if kept is not None:
        p.text(x + width / 2, y + 42, percent(kept), "middle", "dim", room=width)


def _bands(bands: list[tuple[int, int]]) -> list[tuple[int, int]]:
    while len(bands) > _MAX_BANDS:
        pairs = [bands[k : k + 2] for k in range(0, len(bands), 2)]
        bands = [(pair[0][0], max(high for _, high in pair)) for pair in pairs]
    return bands


def _grid(
    cells: Sequence[CoverageCell], bands: list[tuple[int, int]]
) -> tuple[dict[str, list[Counts]], dict[str, list[float | None]]]:
    """Return the counts, and the share stored, per class and band; rare classes as one."""
    size: dict[str, int] = defaultdict(int)
    for cell in cells:
        size[cell.token_class] += sum(getattr(cell, state) for state in _STATES)
    order = sorted(size, key=lambda name: (-size[name], name))
    named = set(order if len(order) <= _MAX_CLASSES else order[: _MAX_CLASSES - 1])
    grid: dict[str, list[Counts]] = {
        name: [dict.fromkeys(_STATES, 0) for _ in bands]
        for name in [
            *(n for n in order if n in named),
            *([_REST] if len(named) < len(order) else []),
        ]
    }
    shares: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for cell in cells:
        name = cell.token_class if cell.token_class in named else _REST
        column = max(k for k, (low, _) in enumerate(bands) if low <= cell.low)
        for state in _STATES:
            grid[name][column][state] += getattr(cell, state)
        if cell.stored_share is not None:
            n = cell.stored + cell.reused + cell.lost
            shares[name, column].append((cell.stored_share, n))
    kept: dict[str, list[float | None]] = {
        name: [_mean(shares[name, column]) for column in range(len(bands))] for name in grid
    }
    return grid, kept


def _mean(parts: list[tuple[float, int]]) -> float | None:
    total = sum(n for _, n in parts)
    return sum(value * n for value, n in parts) / total if total else None


SECTIONS = (
    SectionOf(source_part, (lengths,), "Source", "no run record says what the source had"),
    SectionOf(accounting_part, (waterfall,)),
    SectionOf(
        coverage_part,
        (coverage_map,),
        "Coverage",
        "the tables hold no token classes or positions to map",
    ),
)
