"""The share lost per stratum of each covariate, as a heat map.

A chart of the report; from the result's section on missingness.
"""

from __future__ import annotations

from actds_validators.audits.result import Difference, Stratum
from actds_validators.report.parts import first
from actds_validators.report.shades import shade, shade_scale
from actds_validators.report.svg import WIDTH, Picture, split_range, text_width
from actds_validators.report.words import clean, count, percent

__all__ = ["heat_map"]

_MAX_ROWS, _MAX_STRATA = 18, 16
_LEFT = 260.0


def heat_map(differences: list[Difference]) -> Picture:
    """Return the loss rate per stratum, one row a covariate, shaded from none to the largest.

    Args:
        differences: in the order of the rows; those without strata are left out.
    """
    having = [d for d in differences if d.strata]
    shown, more = first(having, _MAX_ROWS)
    names = [_stratum_names(d) for d in shown]
    tops, y = [], 48.0
    for row in names:
        tops.append(y)
        y += 56 if any(below for _, below in row) else 42
    top = max([s.rate.value for d in shown for s in _drawn(d)], default=0.0)
    p = Picture(
        "heat-map",
        "Loss rate per stratum",
        "One row a covariate; each cell names its stratum, in the unit of its row, and the share "
        "of its computed tokens that was lost, in per cent. Darker cells lost less, lighter cells "
        "more; the numbers say the same. Left out are strata of the fewest tokens.",
        WIDTH,
        y + 6 + (18 if more else 0),
    )
    shade_scale(p, _LEFT, top)
    for d, row, y in zip(shown, names, tops, strict=True):
        middle = _LEFT - 10
        p.text(middle, y + 15, d.covariate.label, "end", room=250)
        p.text(middle, y + 30, _unit(d), "end", "dim", room=250)
        width = (WIDTH - 2 - _LEFT) / len(row)
        height = 52 if any(below for _, below in row) else 38
        for column, (s, lines) in enumerate(zip(_drawn(d), row, strict=True)):
            _stratum(p, _LEFT + width * column, y, (width - 2, height), s, lines, top)
    if more:
        p.text(WIDTH / 2, p.height - 8, more, "middle", "dim")
    return p


def _drawn(d: Difference) -> list[Stratum]:
    """Return the strata that there is room for, those of the most tokens, in their order."""
    largest = sorted(range(len(d.strata)), key=lambda k: -d.strata[k].n)[:_MAX_STRATA]
    return [d.strata[k] for k in sorted(largest)]


def _stratum_names(d: Difference) -> list[tuple[str, str]]:
    """Return the names of the drawn strata in two lines; the second is empty where one does."""
    labels = [clean(s.label) for s in _drawn(d)]
    room = (WIDTH - 2 - _LEFT) / len(labels) - 6
    if any(text_width(label) > room for label in labels):
        unit = f" {d.covariate.unit}"
        labels = [label.removesuffix(unit).replace(" to ", "–") for label in labels]
    return [split_range(name, room) for name in labels]


def _stratum(
    p: Picture,
    x: float,
    y: float,
    size: tuple[float, float],
    s: Stratum,
    lines: tuple[str, str],
    top: float,
) -> None:
    step, (width, height) = shade(s.rate.value, top), size
    said = (
        f"{clean(s.label, 50)}: {percent(s.rate.value)} of {count(s.n)} lost, interval "
        f"{percent(s.rate.low)} to {percent(s.rate.high)}"
    )
    p.box(x, y, width, height, f"shade{step}", said)
    middle, ink, room = x + width / 2, f"ink{step}", width - 4
    above, below = lines
    p.text(middle, y + (15 if below or height < 50 else 22), above, "middle", ink, room=room)
    if below:
        p.text(middle, y + 29, below, "middle", ink, room=room)
    share = percent(s.rate.value)
    p.text(middle, y + height - 7, share, "middle", ink, room=room, shorter=[share.rstrip(" %")])


def _unit(d: Difference) -> str:
    """Return the group, and the unit of the strata where their names hold numbers."""
    covariate, n_left = d.covariate, max(0, len(d.strata) - _MAX_STRATA)
    left = f"; {n_left} left out" if n_left else ""
    if not any(c.isdigit() for s in d.strata for c in s.label[:50]):
        return f"{covariate.group}{left}"
    # Lengths are compared on a logarithmic scale; their strata are named in tokens.
    unit = covariate.unit.removeprefix("log2 ")
    return f"{covariate.group}, {unit}{left}" if unit else f"{covariate.group}{left}"
