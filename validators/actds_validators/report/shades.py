"""Shades of a heat map: seven steps from dark to light, each with an ink that reads on it.

Between the shapes and the charts; knows numbers only.
"""

from __future__ import annotations

from actds_validators.report.svg import Picture
from actds_validators.report.words import percent

__all__ = ["shade", "shade_scale"]

_N_SHADES = 7
_WIDTH = 26


def shade(value: float, top: float) -> int:
    """Return the step of a value between nought and the top; 0 is the darkest."""
    return 0 if top <= 0 else max(0, min(_N_SHADES - 1, int(min(value / top, 1.0) * _N_SHADES)))


def shade_scale(p: Picture, x: float, top: float, *, beyond: bool = False) -> None:
    """Draw what the steps mean, from no loss to the top share, and whether some lie beyond."""
    p.text(x, 20, "share lost: 0 %")
    x += 110
    for step in range(_N_SHADES):
        p.box(x + _WIDTH * step, 9, _WIDTH, 13, f"shade{step}")
    p.text(x + _WIDTH * _N_SHADES + 8, 20, percent(top) + (" and more" if beyond else ""))
