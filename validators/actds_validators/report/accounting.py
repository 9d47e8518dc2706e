"""The part on accounting: the balance, the loss waterfall, what does not add up.

A family of charts of the report; from the result's section of the same name.
"""

from __future__ import annotations

from actds_validators.audit.result import Accounting, WaterfallStep
from actds_validators.report.axes import Frame, axes, legend
from actds_validators.report.parts import Part, Row, Table, first
from actds_validators.report.svg import WIDTH, Picture
from actds_validators.report.words import Sentence, count, many, percent, short

__all__ = ["accounting_part", "balance", "never_computed"]

_KINDS = {
    "positions": "all",
    "captured": "stored",
    "cache_ref": "reused",
    "filtered": "filtered",
    "never computed": "filtered",
}
_WORDS = {"cache_ref": "cache reference", "positions": "all positions", "captured": "stored"}
_MAX_STEPS = 20


def balance(section: Accounting) -> str:
    """Return the equation of the census in words."""
    never = f"{count(section.never_computed)} never computed + " if section.never_computed else ""
    return (
        f"{many(section.positions, 'position')} = {count(section.captured)} stored + "
        f"{count(section.cache_ref)} cache references + {count(section.dropped)} dropped + "
        f"{count(section.aborted)} aborted + {never}{count(section.filtered)} filtered"
    )


def never_computed(section: Accounting) -> str:
    """Return what no step computed, in a sentence; empty where there is nothing."""
    if not section.never_computed:
        return ""
    return (
        f" Never computed: {many(section.never_computed, 'position')} of "
        f"{many(section.never_computed_requests, 'request')}, which count in no loss rate."
    )


def accounting_part(section: Accounting) -> Part:
    """Return the part on accounting."""
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
            ("references without a stored row", count(section.unresolved)),
            "bad" if section.unresolved else "",
        ),
    ]
    tables = [*_findings(section), Table("What was counted", ("quantity", "number"), rows)]
    pictures = [waterfall(section.waterfall)] if section.waterfall else []
    return Part("accounting", "Accounting", Sentence(lead), pictures, tables)


def _findings(section: Accounting) -> list[Table]:
    if not section.findings:
        return []
    some, more = first(section.findings)
    tones = {"error": "bad", "warning": "warn", "note": "dim"}
    rows = [
        Row((f.severity, f.code, f.place, f.got, f.expected), tones[f.severity])  # type: ignore[arg-type]
        for f in some
    ]
    head = ("severity", "code", "place", "got", "expected")
    return [Table("What does not add up", head, rows, frozenset(range(5)), more)]


def waterfall(steps: list[WaterfallStep]) -> Picture:
    """Return the way from all positions to the stored rows."""
    shown, more = first(steps, _MAX_STEPS)
    p = Picture(
        "waterfall",
        "Loss waterfall",
        "From all positions of all requests to the rows that are stored; each step takes away "
        "what it names.",
        WIDTH,
        76 + 30 * len(shown),
    )
    items = [("all", "all"), ("reused", "cache reference"), ("filtered", "filtered")]
    legend(p, 230, 16, [*items, ("lost", "lost"), ("stored", "stored")])
    whole = max(1, max(step.n_positions for step in steps))
    f = Frame(230, 30, 440, 30 * len(shown), (0, whole), (0, 1))
    axes(p, f, f"positions{', ' + more if more else ''}", "", x_text=short, y_marks=[])
    left = next((s.n_positions for s in steps if s.name == "positions"), whole)
    for n, step in enumerate(shown):
        y = f.top + 30 * n
        whole_bar = step.name in ("positions", "captured")
        high = step.n_positions if whole_bar else left
        low = 0 if whole_bar else left - step.n_positions
        left = low if not whole_bar else left
        words = _WORDS.get(step.name, step.name)
        label = f"{words}: {step.reason}" if step.reason else words
        said = f"{count(step.n_positions)} ({percent(step.share)})"
        p.text(f.left - 10, y + 19, label, "end", room=214)
        # A step too thin to see still shows as a line.
        start, width = f.x(low), max(f.x(high) - f.x(low), 1.5 if step.n_positions else 0)
        p.box(start, y + 6, width, 18, _KINDS.get(step.name, "lost"), f"{label}: {said}")
        brief = f"{short(step.n_positions)} ({percent(step.share)})"
        p.text(f.right + 10, y + 19, said, shorter=[brief])
        if n + 1 < len(shown) and shown[n + 1].name != "captured":
            edge = f.x(left)
            p.line(edge, y + 24, edge, y + 36, "link")
    return p
