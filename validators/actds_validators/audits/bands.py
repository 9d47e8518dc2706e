"""Bands: loss rates by ranges of a covariate, and the distributions that they make.

Beside the tokens' pass. Lengths and positions fall in powers of two, rarity in bits, phases and
sources in classes. Imports `tokens` and `series`.
"""

from __future__ import annotations

import numpy as np

from actds_validators.audits.series import Series
from actds_validators.audits.sources import RunSource
from actds_validators.audits.tokens import Bands, Floats, Tokens, banded

__all__ = ["read"]

_LENGTHS = ("position", "prompt_len", "request_len")
_CLASSES = {
    "prefill": ("(position < prompt_len)::int", ("decode", "prefill")),
    "special": ("special::int", ("ordinary", "special")),
}
MAX_BITS = 24


def read(
    prepared: list[tuple[RunSource, Tokens]], series: Series, cell: str
) -> tuple[dict[str, Bands], dict[int, tuple[int, int]]]:
    """Return computed and lost tokens by bands, by covariate name, and by cell.

    Args:
        prepared: the runs.
        series: for the blocks.
        cell: the number of a token's cell.
    """
    names = sorted({name for _, tokens in prepared for name in tokens.covariates})
    wanted = {name: e for name in names if (e := _expression(name)) is not None}
    n_blocks = series.blocks.n_blocks
    counts: dict[str, dict[int, Floats]] = {name: {} for name in wanted}
    cells: dict[int, tuple[int, int]] = {}
    for source, _ in prepared:
        found, in_cells = banded(source, wanted, cell, n_blocks)
        for name, (numbers, table) in found.items():
            for k, number in enumerate(numbers):
                before = counts[name].get(number, np.zeros((2, n_blocks)))
                counts[name][number] = before + table[:, :, k]
        for number, (n, lost) in in_cells.items():
            had = cells.get(number, (0, 0))
            cells[number] = had[0] + n, had[1] + lost
    return {name: _bands(name, counted) for name, counted in counts.items() if counted}, cells


def _expression(name: str) -> str | None:
    if name == "position":
        return "floor(log2(position + 1))"
    if name in _LENGTHS:
        return name.replace("_len", "_band")
    if name == "rarity":
        return f"case when rarity is not null then least(floor(rarity), {MAX_BITS}) end"
    return _CLASSES[name][0] if name in _CLASSES else None


def _bands(name: str, counted: dict[int, Floats]) -> Bands:
    numbers = sorted(counted)
    table = np.stack([counted[number] for number in numbers], axis=2)
    edges = [_edges(name, number) for number in numbers]
    return Bands([_label(name, number) for number in numbers], table[0], table[1], edges)


def _edges(name: str, k: int) -> tuple[float, float] | None:
    if name in _LENGTHS:
        return float(2**k - 1), float(2 ** (k + 1) - 2)
    return (float(k), float(k + 1)) if name == "rarity" else None


def _label(name: str, k: int) -> str:
    if name in _CLASSES:
        return _CLASSES[name][1][k]
    edges = _edges(name, k)
    assert edges is not None
    if name == "rarity":
        return f"{edges[0]:.0f} to {edges[1]:.0f} bits" if k < MAX_BITS else f"{MAX_BITS} bits on"
    return f"{edges[0]:,.0f} to {edges[1]:,.0f}" if k else "0"
