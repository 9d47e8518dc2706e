"""Bands: loss rates by ranges of a covariate, and the distributions that they make.

After the tokens' pass. Lengths and positions fall in powers of two, rarity in bits, phases, special
tokens and each source in two. Imports the sums of `tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actds_validators.audit.lookup import MAX_BITS, NO_BITS
from actds_validators.audit.tokens import SOURCE, TokenSums

__all__ = ["Bands", "bands_of"]

Floats = npt.NDArray[np.float64]
_LENGTHS = ("position", "prompt_len", "request_len")
_CLASSES = {"prefill": ("decode", "prefill"), "special": ("ordinary", "special")}


@dataclass
class Bands:
    """Computed and lost tokens of each block by the bands of a variable.

    Args:
        labels: of the bands, in order.
        n: computed tokens ``(n_blocks, n_bands)``.
        lost: lost ones.
        edges: low and high of each band, ``None`` for classes.
    """

    labels: list[str]
    n: Floats
    lost: Floats
    edges: list[tuple[float, float] | None] = field(default_factory=list)


def bands_of(sums: TokenSums) -> dict[str, Bands]:
    """Return computed and lost tokens by bands, by covariate name; bands of no token are left out.

    Args:
        sums: of all runs.
    """
    found = {}
    for name, (stored, lost) in sums.bands.items():
        computed = stored + lost
        numbers = [
            int(k) for k in np.flatnonzero(computed.sum(axis=0)) if k < NO_BITS or name != "rarity"
        ]
        if numbers:
            found[name] = Bands(
                [_label(name, k) for k in numbers],
                computed[:, numbers],
                lost[:, numbers],
                [_edges(name, k) for k in numbers],
            )
    return found


def _edges(name: str, k: int) -> tuple[float, float] | None:
    if name in _LENGTHS:
        return float(2**k - 1), float(2 ** (k + 1) - 2)
    return (float(k), float(k + 1)) if name == "rarity" else None


def _label(name: str, k: int) -> str:
    if name.startswith(SOURCE):
        return name.removeprefix(SOURCE) if k else "other sources"
    if name in _CLASSES:
        return _CLASSES[name][k]
    edges = _edges(name, k)
    assert edges is not None
    if name == "rarity":
        return f"{edges[0]:.0f} to {edges[1]:.0f} bits" if k < MAX_BITS else f"{MAX_BITS} bits on"
    return f"{edges[0]:,.0f} to {edges[1]:,.0f}" if k else "0"
