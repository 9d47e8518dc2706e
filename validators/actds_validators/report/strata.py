"""The share lost per stratum of each covariate, as a heat map.

A chart of the report; from the result's section on missingness.
"""

from __future__ import annotations

from dataclasses import dataclass

from actds_validators.audit.result import Difference, Stratum
from actds_validators.report.parts import first
from actds_validators.report.shades import shade, shade_scale
from actds_validators.report.svg import WIDTH, Picture, split_range, text_width
from actds_validators.report.words import clean, count, percent

__all__ = ["heat_map"]

_MAX_ROWS, _MAX_STRATA = 18, 16
_LEFT = 260.0
_ENOUGH, _ENOUGH_SHARE = 1000, 0.01


@dataclass(frozen=True)
class _Line:
    """A covariate with the strata that there is room for, and their words.

    Args:
        difference: of the covariate.
        strata: those of the most tokens, in their order.
        left_out: the others.
        names: of the strata, in two lines; the second is empty where one does.
        shares: lost, all with the sign of per cent or all without.
        least: tokens of which a stratum's share is shaded.
    """

    difference: Difference
    strata: list[Stratum]
    left_out: list[Stratum]
    names: list[tuple[str, str]]
    shares: list[str]
    least: float

    @property
    def width(self) -> float:
        """Return the width of a cell with its gap."""
        return (WIDTH - 2 - _LEFT) / len(self.strata)

    @property
    def height(self) -> float:
        """Return the height of a cell: of the lines of its words."""
        n_lines = 2 + any(below for _, below in self.names) + any(map(self.is_few, self.strata))
        return 10.0 + 14 * max(n_lines, 3 if self.left_out else 2)

    def is_few(self, s: Stratum) -> bool:
        """Return whether a stratum holds too few tokens for a shade."""
        return s.n < self.least


def heat_map(differences: list[Difference]) -> Picture:
    """Return the loss rate per stratum, one row a covariate, shaded from none to the largest.

    Args:
        differences: in the order of the rows; those without strata are left out.
    """
    having = [d for d in differences if d.strata]
    shown, more = first(having, _MAX_ROWS)
    lines = [_line(d) for d in shown]
    top, beyond = _scale(lines)
    p = Picture(
        "heat-map",
        "Loss rate per stratum",
        "One row a covariate; each cell names its stratum, in the unit of its row, and the share "
        "of its computed tokens that was lost, in per cent. Darker cells lost less, lighter cells "
        "more; the numbers say the same. The scale ends at the largest share of a stratum that "
        f"holds at least {percent(_ENOUGH_SHARE)} of the tokens. Cells without a shade hold few "
        f"tokens (under {percent(_ENOUGH_SHARE)}, and under {count(_ENOUGH)}): below stands how "
        "many. Left out are strata of the fewest tokens.",
        WIDTH,
        54 + sum(line.height + 4 for line in lines) + (18 if more else 0),
    )
    shade_scale(p, _LEFT, top, beyond=beyond)
    y, middle = 48.0, _LEFT - 10
    for line in lines:
        d = line.difference
        p.text(middle, y + 15, d.covariate.label, "end", room=250)
        p.text(middle, y + 30, _unit(d), "end", "dim", room=250)
        if line.left_out:
            p.text(middle, y + 45, _left_out(line), "end", "dim", room=250)
        for column in range(len(line.strata)):
            _stratum(p, _LEFT + line.width * column, y, line, column, top)
        y += line.height + 4
    if more:
        p.text(WIDTH / 2, p.height - 8, more, "middle", "dim")
    return p


def _line(d: Difference) -> _Line:
    """Return a row: the strata of the most tokens, and their words."""
    order = sorted(range(len(d.strata)), key=lambda k: -d.strata[k].n)
    strata = [d.strata[k] for k in sorted(order[:_MAX_STRATA])]
    left_out = [d.strata[k] for k in order[_MAX_STRATA:]]
    room = (WIDTH - 2 - _LEFT) / len(strata) - 6
    names = [clean(s.label) for s in strata]
    if any(text_width(name) > room for name in names):
        unit = f" {d.covariate.unit}"
        names = [name.removesuffix(unit).replace(" to ", "–") for name in names]
    shares = [percent(s.rate.value) for s in strata]
    if any(text_width(share) > room for share in shares):
        shares = [share.removesuffix(" %") for share in shares]
    least = min(_ENOUGH, _ENOUGH_SHARE * sum(s.n for s in d.strata))
    return _Line(d, strata, left_out, [split_range(n, room) for n in names], shares, least)


def _scale(lines: list[_Line]) -> tuple[float, bool]:
    """Return where the shades end, and whether a shaded stratum lies beyond.

    A stratum of a small part of the tokens may lie far off by chance: it would leave one shade to
    all others.
    """
    shaded, large = [], []
    for line in lines:
        total = sum(s.n for s in line.difference.strata)
        shaded += [s.rate.value for s in line.strata if not line.is_few(s)]
        large += [s.rate.value for s in line.strata if s.n >= _ENOUGH_SHARE * total]
    top = max(large or shaded, default=0.0)
    return top, max(shaded, default=0.0) > top


def _stratum(p: Picture, x: float, y: float, line: _Line, column: int, top: float) -> None:
    s, (above, below), share = line.strata[column], line.names[column], line.shares[column]
    few, step = line.is_few(s), shade(s.rate.value, top)
    said = (
        f"{clean(s.label, 50)}: {percent(s.rate.value)} of {count(s.n)} lost, interval "
        f"{percent(s.rate.low)} to {percent(s.rate.high)}"
    )
    p.box(x, y, line.width - 2, line.height, "few" if few else f"shade{step}", said)
    middle, ink, room = x + line.width / 2 - 1, "" if few else f"ink{step}", line.width - 6
    written = [above, *([below] if below else []), share, *([f"n {count(s.n)}"] if few else [])]
    # In the middle of the cell, whose height is that of the row's fullest one.
    first_y = y + line.height / 2 + 4.5 - 7 * (len(written) - 1)
    for k, words in enumerate(written):
        p.text(middle, first_y + 14 * k, words, "middle", ink, room=room)


def _left_out(line: _Line) -> str:
    """Return how many strata are left out, and the most that one of them lost."""
    left = line.left_out
    most = max(s.rate.value for s in left)
    return f"{len(left)} left out, lost {percent(most)}{' at most' if len(left) > 1 else ''}"


def _unit(d: Difference) -> str:
    """Return the group, and the unit of the strata where their names hold numbers."""
    if not any(c.isdigit() for s in d.strata for c in s.label[:50]):
        return d.covariate.group
    # Lengths are compared on a logarithmic scale; their strata are named in tokens.
    unit = d.covariate.unit.removeprefix("log2 ")
    return f"{d.covariate.group}, {unit}" if unit else d.covariate.group
