"""Bars on a logarithmic axis, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 48


class Bar(NamedTuple):
    """A bar: its label, and its length in percent; ``None`` or not above 0 has no bar."""

    label: str
    percent: float | None


def log_bars(bars: Sequence[Bar], width: int = WIDTH) -> list[str]:
    """Return the axis, then a line for each bar; no line without a value above 0.

    The axis has whole decades, from the one below the smallest value to the one above the largest.

    Args:
        width: characters of the axis.
    """
    values = [bar.percent for bar in bars if bar.percent is not None and bar.percent > 0]
    if not values:
        return []
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    label = max(len(bar.label) for bar in bars)
    figures = [_figure(bar.percent) for bar in bars]
    room = max(map(len, figures))
    every = -(-8 * (high - low) // width)
    axis = [" "] * (width + 8)
    for decade in range(low, high + 1, every):
        at = round(width * (decade - low) / (high - low))
        words = f"{10.0**decade:g}"
        axis[at : at + len(words)] = words
    lines = [f"{'':<{label}}  {'':>{room}}  {''.join(axis).rstrip()}"]
    for bar, figure in zip(bars, figures, strict=True):
        filled = 0
        if bar.percent is not None and bar.percent > 0:
            filled = max(1, round(width * (math.log10(bar.percent) - low) / (high - low)))
        lines.append(f"{bar.label:<{label}}  {figure:>{room}}  {'#' * filled}".rstrip())
    return lines


def _figure(percent: float | None) -> str:
    if percent is None:
        return "-"
    return f"{percent:.2g} %" if 0 < percent < 10 else f"{percent:.0f} %"
