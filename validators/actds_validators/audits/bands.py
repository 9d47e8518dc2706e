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

_LOG2 = {"position": "position", "prompt_len": "prompt_len", "request_len": "request_len"}
_CLASSES = {
    "prefill": ("(position < prompt_len)::int", ("decode", "prefill")),
    "special": ("special::int", ("ordinary", "special")),
}
MAX_BITS = 24


def read(prepared: list[tuple[RunSource, Tokens]], series: Series) -> dict[str, Bands]:
    """Return computed and lost tokens by bands, by covariate name.

    Args:
        prepared: the runs.
        series: for the blocks.
    """
    names = {name for _, tokens in prepared for name in tokens.covariates}
    found = {}
    for name in sorted(names):
        if name in _LOG2:
            expression = f"floor(log2({_LOG2[name]} + 1))::int"
        elif name == "rarity":
            expression = f"least(floor(rarity), {MAX_BITS})::int"
        elif name in _CLASSES:
            expression = _CLASSES[name][0]
        else:
            continue
        bands = _added(prepared, expression, series.blocks.n_blocks)
        numbers = list(bands)
        counts = [np.stack(column, axis=1) for column in zip(*bands.values(), strict=True)]
        if not numbers:
            continue
        edges = [_edges(name, k) for k in numbers]
        found[name] = Bands([_label(name, k) for k in numbers], counts[0], counts[1], edges)
    return found


def _added(
    prepared: list[tuple[RunSource, Tokens]], expression: str, n_blocks: int
) -> dict[int, tuple[Floats, Floats]]:
    total: dict[int, tuple[Floats, Floats]] = {}
    for source, _ in prepared:
        numbers, n, lost = banded(source, expression, n_blocks)
        for column, number in enumerate(numbers.tolist()):
            before = total.get(number, (np.zeros(n_blocks), np.zeros(n_blocks)))
            total[number] = before[0] + n[:, column], before[1] + lost[:, column]
    return dict(sorted(total.items()))


def _edges(name: str, k: int) -> tuple[float, float] | None:
    if name in _LOG2:
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
