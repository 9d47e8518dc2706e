"""Strata: parts of the rows that are estimated apart, by position, decode step, role and more.

A stratum is one value of one *axis*. A row stands in one stratum of each axis at most, and always
in ``all``. Axes are not crossed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from actds.format.tables import ROLES
from actds_studies.regimes.arms import KERNEL_MODES, ArmRows
from actds_validators.arrays import Floats, Ints, Whole

MIN_REQUESTS = 8
"""Requests that an arm must have in a stratum: nothing is estimated from fewer."""
MIN_ROWS = 32
"""Effective rows, ``(sum w)² / sum w²``, that an arm must have in a stratum: eight requests may
give a dozen rows, all of one token of a template, which are no sample of a regime."""
ALL = "all"
DECODE_STEPS = ((1, 1), (6, 10), (40, 60), (160, 240))
"""First and last decode step of each band: around 1, 8, 50 and 200. The token that was sampled
first is fed at step 1."""
MARGIN_EDGES = (0.1, 1.0, 4.0)
"""Of the margin between the two largest logits."""
POSITION_EDGES = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 32)
N_CHUNKS = 4
_FINE = 2 ** (1 / 4)
_MOST_KNOWN = 0.5  # of the rows must have an entropy for its bands to be of the arm


@dataclass(frozen=True)
class Stratum:
    """One stratum."""

    axis: str
    name: str


@dataclass(frozen=True)
class Strata:
    """The strata and where rows stand in them.

    Args:
        strata: all of them, ``all`` first.
        codes: by axis the index in ``strata`` of each row, int8 ``(n,)``, -1 for none.
    """

    strata: tuple[Stratum, ...]
    codes: dict[str, npt.NDArray[np.int8]]


def known_strata(*, is_sampled: bool = False) -> tuple[Stratum, ...]:
    """Return every stratum that there may be, ``all`` first, in the order of a report.

    Args:
        is_sampled: whether an arm says what its model sampled.
    """
    strata = [Stratum(ALL, ALL)]
    strata += [Stratum("position", _range(low, high - 1)) for low, high in _position_bands()]
    strata += [Stratum("decode step", _range(low, high)) for low, high in DECODE_STEPS]
    strata += [Stratum("role", role) for role in ROLES]
    chunks = [str(n) for n in range(N_CHUNKS - 1)] + [f"{N_CHUNKS - 1} and later"]
    strata += [Stratum("chunk", chunk) for chunk in chunks]
    strata += [Stratum("kernel mode", mode) for mode in KERNEL_MODES]
    if is_sampled:
        strata += [Stratum("entropy", f"quintile {n + 1}") for n in range(5)]
        strata += [Stratum("margin", name) for name in _margins()]
    return tuple(strata)


def strata_of(rows: ArmRows, edges: Floats | None = None, *, of_pairs: bool = False) -> Strata:
    """Return in which strata rows stand.

    Args:
        edges: of the quintiles of the entropy, in nats; None where there are none.
        of_pairs: see `entropy_edges`.
    """
    strata = known_strata(is_sampled=edges is not None)
    first: dict[str, int] = {}
    for n, stratum in enumerate(strata):
        first.setdefault(stratum.axis, n)
    bands = np.array(POSITION_EDGES)
    position = np.searchsorted(bands, rows.position, side="right") - 1
    step = np.full(len(rows), -1, np.int8)
    for n, (low, high) in enumerate(DECODE_STEPS):
        step[(rows.decode_step >= low) & (rows.decode_step <= high)] = n
    by_axis: dict[str, Whole] = {
        ALL: np.zeros(len(rows), np.int8),
        "position": position.astype(np.int8),
        "decode step": step,
        "role": rows.role,
        "chunk": np.minimum(rows.chunk, N_CHUNKS - 1),
        "kernel mode": rows.kernel_mode,
    }
    if edges is not None:
        known, after = has_entropies(rows, of_pairs=of_pairs), rows.sampled
        for axis, cuts in (("entropy", edges), ("margin", np.array(MARGIN_EDGES))):
            by_axis[axis] = np.full(len(rows), -1, np.int8)
            if after is not None:
                by_axis[axis][known] = banded(getattr(after, axis)[known], cuts)
    codes = {
        axis: np.where(code >= 0, code + first[axis], -1).astype(np.int8)
        for axis, code in by_axis.items()
    }
    return Strata(strata, codes)


def entropy_edges(first: ArmRows, second: ArmRows, *, of_pairs: bool = False) -> Floats | None:
    """Return the edges of the quintiles of the entropy, in nats; None where they divide nothing.

    They are those of the reference, or of the other arm where the reference has none.

    Args:
        second: rows of the other arm.
        of_pairs: whether rows are paired by token: then the entropy that one arm knows is that of
            both. Else a band means the same in both arms only where each knows its own.
    """
    known = [_known(rows, of_pairs) for rows in (first, second)]
    if not of_pairs and not all(len(values) for values in known):
        return None
    values = next((values for values in known if len(values)), None)
    if values is None:
        return None
    return np.asarray(np.quantile(values, [0.2, 0.4, 0.6, 0.8]), np.float64)


def has_entropies(rows: ArmRows, *, of_pairs: bool = False) -> npt.NDArray[np.bool_]:
    """Return at which rows the entropy of an arm counts ``(n,)``.

    Of pairs by token wherever it is known. Else there where it is known of half of the rows, or at
    decode steps where it is known of half of these. Of a prompt, the model sampled after its last
    token alone: in chats the same token of a template, which is no band of the prompt's entropies.
    """
    if rows.sampled is None:
        return np.zeros(len(rows), np.bool_)
    known = np.isfinite(rows.sampled.entropy)
    if of_pairs:
        return np.asarray(known)
    for some in (np.ones(len(rows), np.bool_), rows.decode_step > 0):
        if some.any() and known[some].mean() >= _MOST_KNOWN:
            return np.asarray(known & some)
    return np.zeros(len(rows), np.bool_)


def _known(rows: ArmRows, of_pairs: bool) -> npt.NDArray[np.float32]:
    known = has_entropies(rows, of_pairs=of_pairs)
    return np.empty(0, np.float32) if rows.sampled is None else rows.sampled.entropy[known]


def banded(values: npt.NDArray[np.float32], edges: Floats) -> npt.NDArray[np.int8]:
    """Return the band of each value ``(n,)``, from 0, -1 for NaN; an edge is in the lower one."""
    place = np.searchsorted(edges, values, side="left")
    return np.where(np.isnan(values), -1, place).astype(np.int8)


def fine_bands(position: Whole) -> Ints:
    """Return a band of each position that is 19 % wide, to compare like with like."""
    whole = np.log(np.maximum(position, 1).astype(np.float64)) / np.log(_FINE)
    band: Ints = np.floor(whole + 1e-9).astype(np.int64)
    return band


def _position_bands() -> list[tuple[int, int]]:
    return list(pairwise(POSITION_EDGES))


def _margins() -> list[str]:
    inner = [f"{low:g} to {high:g}" for low, high in pairwise(MARGIN_EDGES)]
    return [f"to {MARGIN_EDGES[0]:g}", *inner, f"over {MARGIN_EDGES[-1]:g}"]


def _range(low: int, high: int) -> str:
    if low == high:
        return f"{low}"
    return f"{low} and later" if high > 1 << 31 else f"{low} to {high}"
