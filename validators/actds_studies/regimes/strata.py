"""Strata, and sums per stratum and group of requests: one pass, memory that does not grow.

A stratum is one value of one *axis*, as position, decode step or role. A row stands in one stratum
of each axis at most, and always in ``all``. Axes are not crossed.

The statistic without a group is that of all sums less the group's own, so that a delete-a-group
jackknife needs no second pass. Additions are made in the order of the rows: the same rows in the
same blocks give the same sums to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, issparse  # type: ignore[import-untyped]

from actds.explore.lazy import LazyArray
from actds.format.tables import ROLES
from actds_studies.regimes.arms import KERNEL_MODES, ArmRows
from actds_studies.regimes.result import ALL
from actds_validators.arrays import Bools, Floats, Ints, Rows, Whole

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
    axis: str
    name: str


@dataclass(frozen=True)
class Strata:
    """All strata, ``all`` first, and by axis the index of each row, int8 ``(n,)``; -1 none."""

    strata: tuple[Stratum, ...]
    codes: dict[str, npt.NDArray[np.int8]]


def strata_of(rows: ArmRows, edges: Floats | None = None, *, of_pairs: bool = False) -> Strata:
    """Return every stratum, in the order of a report, and in which of them rows stand.

    Args:
        edges: of the quintiles of the entropy, in nats; None where no arm says what it sampled.
    """
    position = np.searchsorted(np.array(POSITION_EDGES), rows.position, side="right") - 1
    bands = [_range(low, high - 1) for low, high in pairwise(POSITION_EDGES)]
    chunks = [*(str(n) for n in range(N_CHUNKS - 1)), f"{N_CHUNKS - 1} and later"]
    axes: dict[str, tuple[Sequence[str], Whole]] = {
        ALL: ([ALL], np.zeros(len(rows), np.int8)),
        "position": (bands, position.astype(np.int8)),
        "decode step": step_bands(rows.decode_step),
        "role": (ROLES, rows.role),
        "chunk": (chunks, np.minimum(rows.chunk, N_CHUNKS - 1)),
        "kernel mode": (KERNEL_MODES, rows.kernel_mode),
    }
    if edges is not None:
        known, after = has_entropies(rows, of_pairs=of_pairs), rows.sampled
        inner = [f"{low:g} to {high:g}" for low, high in pairwise(MARGIN_EDGES)]
        margins = [f"to {MARGIN_EDGES[0]:g}", *inner, f"over {MARGIN_EDGES[-1]:g}"]
        quintiles = [f"quintile {n + 1}" for n in range(5)]
        cuts = {"entropy": (quintiles, edges), "margin": (margins, np.array(MARGIN_EDGES))}
        for axis, (bands, at) in cuts.items():
            code = np.full(len(rows), -1, np.int8)
            if after is not None:
                code[known] = banded(getattr(after, axis)[known], at)
            axes[axis] = (bands, code)
    strata: list[Stratum] = []
    codes = {}
    for axis, (names, place) in axes.items():
        codes[axis] = np.where(place >= 0, place + len(strata), -1).astype(np.int8)
        strata += [Stratum(axis, name) for name in names]
    return Strata(tuple(strata), codes)


def step_bands(decode_step: Whole) -> tuple[list[str], npt.NDArray[np.int8]]:
    """Return the bands of decode steps, and the place of each row's ``(n,)``; -1 for none."""
    place = np.full(len(decode_step), -1, np.int8)
    for n, (low, high) in enumerate(DECODE_STEPS):
        place[(decode_step >= low) & (decode_step <= high)] = n
    return [_range(low, high) for low, high in DECODE_STEPS], place


def entropy_edges(first: ArmRows, second: ArmRows, *, of_pairs: bool = False) -> Floats | None:
    """Return the edges of the quintiles of the entropy, in nats; None where they divide nothing.

    They are those of the reference, or of the other arm where the reference has none. Of rows that
    are paired by token the entropy that one arm knows is that of both. Else a band means the same
    in both arms only where each knows its own.
    """
    known = [
        rows.sampled.entropy[has_entropies(rows, of_pairs=of_pairs)]
        for rows in (first, second)
        if rows.sampled is not None
    ]
    values = [entropy for entropy in known if len(entropy)]
    if not values or (not of_pairs and len(values) < 2):
        return None
    return np.asarray(np.quantile(values[0], [0.2, 0.4, 0.6, 0.8]), np.float64)


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


def banded(values: npt.NDArray[np.float32], edges: Floats) -> npt.NDArray[np.int8]:
    """Return the band of each value ``(n,)``, from 0, -1 for NaN; an edge is in the lower one."""
    place = np.searchsorted(edges, values, side="left")
    return np.where(np.isnan(values), -1, place).astype(np.int8)


def fine_bands(position: Whole) -> Ints:
    """Return a band of each position that is 19 % wide, to compare like with like."""
    whole = np.log(np.maximum(position, 1).astype(np.float64)) / np.log(_FINE)
    band: Ints = np.floor(whole + 1e-9).astype(np.int64)
    return band


def _range(low: int, high: int) -> str:
    if low == high:
        return f"{low}"
    return f"{low} and later" if high > 1 << 31 else f"{low} to {high}"


@dataclass(frozen=True)
class Layer:
    """Where rows stand in the strata of an axis, and how much each counts there.

    Args:
        stratum: index of the stratum of each row ``(n,)``, -1 for none.
        weight: weight of each row ``(n,)``; None where each counts once.
        even: rows that are as many in either arm ``(n,)``, for what depends on their number; None
            where all of them are.
    """

    stratum: Whole
    weight: npt.NDArray[np.float32] | None = None
    even: Bools | None = None


@dataclass(frozen=True)
class Side:
    """What one arm gives to a contrast; ``n`` rows, some 20 bytes for each, 55 if it is unpaired.

    Args:
        row: number of each row in the arm's array ``(n,)``, ascending.
        cluster: request of each row, the same number for matched ones ``(n,)``.
        group: group of requests of each row ``(n,)``, from 0.
        layers: where the rows stand.
        token_id: token fed at each row ``(n,)``; None where it is not needed.
    """

    row: Whole
    cluster: Whole
    group: Whole
    layers: tuple[Layer, ...]
    token_id: Whole | None = None

    def __len__(self) -> int:
        return len(self.row)


COUNT = "n"
"""The sum of the weights of the rows, which every `Sums` has."""
BLOCK_NBYTES = 1 << 25  # of float32 rows, or of their features, that are held together


GroupSums = Mapping[str, Floats]
"""By name what is added up of each group of requests ``(..., k)``."""


RowReader = LazyArray | Rows
"""Rows of numbers ``(n,)``, read when they are indexed: float32 ``(n, d_model)``."""


@dataclass(frozen=True)
class Part:
    """What an instrument adds up.

    Args:
        values: of each row ``(n,)`` or ``(n, k)``; sparse ones ``(n, k)`` cost what is not 0.
        coarse: whether it is wanted in the strata of few axes only, because k is large.
        even: whether it is added up over the even rows of each layer only, unweighted.
        right: rows ``(n, d)``: what is added up are the products of each of the k values with
            the row, ``k d`` numbers; None adds up the values.
    """

    name: str
    values: npt.NDArray[np.floating] | csr_array
    coarse: bool = False
    even: bool = False
    right: Floats | None = None


class Made(dict[str, Floats]):
    """Sums that are made when a statistic asks for them, once."""

    def __init__(self, make: Callable[[str], Floats]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Floats:
        self[name] = self._make(name)
        return self[name]


@dataclass(frozen=True)
class Totals:
    """The sums of one stratum, of groups that have rows.

    Args:
        groups: sums by name ``(n_groups, k)``.
        n_rows: rows, each counted once whatever its weight.
        n_effective: rows that unweighted ones would be worth, ``(sum w)² / sum w²``.
        n_tokens: different token ids of these rows; None where a side does not say them.
    """

    groups: Mapping[str, Floats]
    n_rows: int
    n_requests: int
    n_effective: float
    n_tokens: int | None = None

    def total(self) -> Made:
        """Return the sums over all groups ``(k,)``."""
        return Made(lambda name: self.groups[name].sum(axis=0))

    def without(self) -> Made:
        """Return the sums without each group ``(n_groups, k)``."""
        return Made(lambda name: self.groups[name].sum(axis=0) - self.groups[name])

    def of(self, chosen: Bools) -> Made:
        """Return the sums over chosen groups: of ``(n, n_groups)`` to ``(n, k)``."""
        weight = chosen.astype(np.float64)
        return Made(lambda name: weight @ self.groups[name])


def blocks_of(array: RowReader, row: Whole, width: int = 0) -> Iterator[tuple[slice, Rows]]:
    """Yield rows of ascending numbers ``(n,)``, some MiB at a time, and which of them they are.

    Args:
        width: numbers that an instrument makes of a row, as the features of a dictionary.
    """
    size = min(1 << 13, max(64, BLOCK_NBYTES // (4 * max(width, array.shape[1]))))
    for start in range(0, len(row), size):
        block = slice(start, min(start + size, len(row)))
        yield block, array[row[block].astype(np.int64)]


class Sums:
    """The sums of one arm; coarse parts in the strata that ``coarse`` names alone."""

    def __init__(self, side: Side, n_strata: int, n_groups: int, coarse: Ints) -> None:
        self._side, self._n_groups = side, n_groups
        self._sums: dict[str, Floats] = {}
        self._is_coarse = np.zeros(n_strata, bool)
        self._is_coarse[coarse] = True
        self._coarse_place = np.where(self._is_coarse, np.cumsum(self._is_coarse) - 1, -1)
        self._coarse: set[str] = set()
        self._usable = np.ones(len(side), np.bool_)

    def leave_out(self, block: slice, fine: Bools) -> None:
        """Leave rows of a block out of all counts, as those that are not finite."""
        self._usable[block] = fine

    def add(self, block: slice, parts: Iterable[Part]) -> None:
        """Add the values of a block of rows, each name once; rows that are left out count 0."""
        members = self._members(block)
        matrices: dict[tuple[bool, bool], tuple[Ints, csr_array]] = {}
        for part in parts:
            kind = part.coarse, part.even
            if kind not in matrices:
                matrices[kind] = self._matrix(*members, block.stop - block.start, *kind)
            keys, matrix = matrices[kind]
            values = part.values
            if not issparse(values):
                values = np.asarray(values, np.float64)
                values = values[:, np.newaxis] if values.ndim == 1 else values
            if part.right is None:
                added = matrix @ values
                added = added.toarray() if issparse(values) else added
            else:
                added = _products(matrix, np.asarray(values), part.right)
            if part.name not in self._sums:
                n_strata = int(self._is_coarse.sum()) if part.coarse else len(self._is_coarse)
                self._coarse |= {part.name} if part.coarse else set()
                self._sums[part.name] = np.zeros((n_strata * self._n_groups, added.shape[1]))
            self._sums[part.name][keys] += added

    def totals(self, stratum: int) -> Totals:
        """Return the sums of a stratum, of all groups; coarse parts only where they are wanted."""
        places = {name: stratum for name in self._sums}
        places |= dict.fromkeys(self._coarse, int(self._coarse_place[stratum]))
        totals = {
            name: self._sums[name][place * self._n_groups : (place + 1) * self._n_groups]
            for name, place in places.items()
            if place >= 0
        }
        n_rows = n_requests = 0
        n_effective = 0.0
        tokens = self._side.token_id
        n_tokens = None if tokens is None else 0
        for layer in self._side.layers:
            inside = (layer.stratum == stratum) & self._usable
            if inside.any():
                n_rows = int(np.count_nonzero(inside))
                n_requests = int(np.count_nonzero(np.bincount(self._side.cluster[inside])))
                n_effective = float(n_rows)
                n_tokens = None if tokens is None else len(np.unique(tokens[inside]))
                if layer.weight is not None:
                    weight = layer.weight[inside].astype(np.float64)
                    n_effective = float(weight.sum() ** 2 / np.square(weight).sum())
        return Totals(totals, n_rows, n_requests, n_effective, n_tokens)

    def _members(self, block: slice) -> tuple[Ints, Ints, Floats, Bools]:
        """Return of every membership its key of stratum and group, row, weight and evenness."""
        parts = []
        for layer in self._side.layers:
            stratum = layer.stratum[block]
            present = np.flatnonzero((stratum >= 0) & self._usable[block])
            key = stratum[present].astype(np.int64) * self._n_groups
            weight, even = np.ones(len(present)), np.ones(len(present), np.bool_)
            if layer.weight is not None:
                weight = layer.weight[block][present].astype(np.float64)
            if layer.even is not None:
                even = layer.even[block][present]
            parts.append((key + self._side.group[block][present], present, weight, even))
        key, row, weight, even = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return key, row, weight, even

    def _matrix(
        self, key: Ints, row: Ints, weight: Floats, even: Bools, n: int, coarse: bool, only: bool
    ) -> tuple[Ints, csr_array]:
        """Return keys of stratum and group, and the weight that each of ``n`` rows has in them.

        Coarse: by place among the coarse strata. Only: of even memberships, unweighted.
        """
        if only:
            key, row, weight = key[even], row[even], np.ones(int(np.count_nonzero(even)))
        if coarse:
            kept = self._is_coarse[key // self._n_groups]
            place = self._coarse_place[key[kept] // self._n_groups]
            key = place * self._n_groups + key[kept] % self._n_groups
            row, weight = row[kept], weight[kept]
        keys, place = np.unique(key, return_inverse=True)
        return keys, csr_array((weight, (place.reshape(-1), row)), shape=(len(keys), n))


def _products(matrix: csr_array, values: Floats, right: Floats) -> Floats:
    """Return the sums of products ``(n_keys, k d)`` of values ``(n, k)`` and rows ``(n, d)``.

    Rows with value 0, most of them, cost nothing.
    """
    d = right.shape[1]
    totals = np.zeros((matrix.shape[0], values.shape[1] * d))
    for k in range(values.shape[1]):
        some = np.flatnonzero(values[:, k])
        if len(some):
            weight = matrix[:, some] @ (values[some, k][:, np.newaxis] * right[some])
            totals[:, k * d : (k + 1) * d] = weight
    return totals
