"""Comparing stored rows with those of the same tokens computed alone: distances and verdicts.

Beside the token's way, after its end. Knows shards and numbers; no engine and no process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.format.arrays import as_ml_dtypes
from actds.format.positions import Keys, position_key
from actds.format.shard import Shard
from actds.schema.v0_1 import DType

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

FAR: dict[DType, float] = {"bfloat16": 0.4, "float16": 0.1, "float32": 0.01}
"""Relative L2 from which a row is another one, by the type it was computed in: several times the
largest distance between a batch and the same request alone, see docs/canary.md."""
NEAR: dict[DType, float] = {"bfloat16": 0.04, "float16": 0.01, "float32": 0.001}
"""Relative L2 up to which a row is never another one."""
MARGIN = 2.0
"""Between the two, how many times nearer another replayed row has to be."""


@dataclass(frozen=True)
class Located:
    """Where rows of a run lie.

    Args:
        shard: index of the shard of each row, -1 where there is no row.
        row: row in the shard.
        token_id: token of each row.
        step: step that computed it.
    """

    shard: Ints
    row: Ints
    token_id: Ints
    step: Ints


def locate(shards: Sequence[Shard], keys: Keys) -> Located:
    """Return where the rows of (request, position) keys lie; keys may repeat, in any order."""
    unique, back = np.unique(keys, return_inverse=True)
    found = {name: np.full(len(unique), -1, np.int64) for name in ("shard", "row", "token", "step")}
    for number, shard in enumerate(shards):
        tokens = shard.tokens(["request", "position", "token_id", "step"])
        mine = position_key(tokens["request"].to_numpy(), tokens["position"].to_numpy())
        at = np.minimum(np.searchsorted(unique, mine), len(unique) - 1)
        rows = np.flatnonzero(unique[at] == mine)
        at = at[rows]
        found["shard"][at], found["row"][at] = number, rows
        found["token"][at] = tokens["token_id"].to_numpy()[rows]
        found["step"][at] = tokens["step"].to_numpy()[rows]
    return Located(*(found[name][back] for name in ("shard", "row", "token", "step")))


def gather(shards: Sequence[Shard], located: Located, hook: str) -> Rows:
    """Return the rows of a hook, float32 ``(n, d_model)``, in the order of ``located``."""
    rows: Rows | None = None
    for number, shard in enumerate(shards):
        mine = np.flatnonzero(located.shard == number)
        if not len(mine):
            continue
        with shard.array(hook) as reader:
            values = as_ml_dtypes(reader.gather(located.row[mine]), reader.dtype)
        if rows is None:
            rows = np.zeros((len(located.row), values.shape[1]), np.float32)
        rows[mine] = values.astype(np.float32)
    return np.zeros((len(located.row), 1), np.float32) if rows is None else rows


def distances(stored: Rows, replayed: Rows) -> tuple[Floats, Floats]:
    """Return relative L2 and cosine of each pair of rows.

    The distance is measured against the replayed row's norm; against a row of zeros it is
    infinite, unless both are.
    """
    one, other = stored.astype(np.float64), replayed.astype(np.float64)
    apart = np.linalg.norm(one - other, axis=1)
    norms = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(apart == 0, 0.0, apart / norms[1])
        cosine = np.where(apart == 0, 1.0, (one * other).sum(axis=1) / (norms[0] * norms[1]))
    return np.nan_to_num(relative, nan=np.inf), np.nan_to_num(cosine, nan=0.0)


def is_foreign(
    stored: Rows, replayed: Rows, relative: Floats, prefix: Ints, computed: DType
) -> npt.NDArray[np.bool_]:
    """Return which stored rows belong to another request or position than their own.

    A row far from its own replay is foreign. One that is neither near nor far is foreign when
    another of the replayed rows is nearer by a clear margin: rounding moves a row, but not onto
    another one. Rows of equal tokens up to their position are one and the same.

    Args:
        stored: what the harvest stored, ``(n, d_model)``.
        replayed: the same tokens alone, row by row.
        relative: relative L2 of the pairs.
        prefix: equal where the tokens up to the row are equal.
        computed: type that the rows were computed or stored in, the coarser of both.

    Spec: 0.1 section 7.9.
    """
    foreign = relative > FAR[computed]
    unsure = np.flatnonzero(~foreign & (relative > NEAR[computed]))
    squares = (replayed.astype(np.float64) ** 2).sum(axis=1)
    for row in unsure:
        products = (replayed @ stored[row]).astype(np.float64)
        apart = squares - 2 * products + float(stored[row].astype(np.float64) @ stored[row])
        apart[prefix == prefix[row]] = np.inf
        # The difference of large numbers finds the nearest row, and is too coarse for its distance.
        nearest = replayed[int(apart.argmin())].astype(np.float64)
        own = np.sqrt(squares[row]) * relative[row]
        others = np.isfinite(apart).any()
        foreign[row] = others and np.linalg.norm(nearest - stored[row]) * MARGIN < own
    return foreign


def prefixes(sequences: Sequence[Sequence[int]]) -> list[Ints]:
    """Return a number per token: equal where all tokens up to there are equal."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for tokens in sequences:
        numbers, parent = np.empty(len(tokens), np.int64), -1
        for position, token in enumerate(tokens):
            parent = known.setdefault((parent, token), len(known))
            numbers[position] = parent
        found.append(numbers)
    return found


def coarser(types: Iterable[DType]) -> DType:
    """Return the type of the fewest digits."""
    order: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    return max(types, key=order.index)
