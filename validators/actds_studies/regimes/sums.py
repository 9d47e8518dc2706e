"""Sums per stratum and group of requests: one pass over the rows, memory that does not grow.

The statistic without a group is that of all sums less the group's own, so that a delete-a-group
jackknife needs no second pass. Additions are made in the order of the rows: the same rows in the
same blocks give the same sums to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, issparse  # type: ignore[import-untyped]

from actds_studies.regimes.contrast import Side
from actds_validators.arrays import Bools, Floats, Ints, Rows, Whole

COUNT = "n"
"""The sum of the weights of the rows, which every `Sums` has."""
BLOCK_NBYTES = 1 << 25  # of float32 rows, or of their features, that are held together


GroupSums = Mapping[str, Floats]
"""By name what is added up of each group of requests ``(..., k)``."""


class RowReader(Protocol):
    """Rows that are read when they are indexed: ``LazyArray``, or a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Ints) -> Rows:
        """Return the rows of numbers ``(n,)`` as float32 ``(n, d_model)``."""
        ...


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


class Made(Mapping[str, Floats]):
    """Sums that are made when a statistic asks for them, once."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Floats]) -> None:
        self._names, self._make = tuple(names), make
        self._made: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
        return Made(self.groups, lambda name: self.groups[name].sum(axis=0))

    def without(self) -> Made:
        """Return the sums without each group ``(n_groups, k)``."""
        return Made(self.groups, lambda name: self.groups[name].sum(axis=0) - self.groups[name])

    def of(self, chosen: Bools) -> Made:
        """Return the sums over chosen groups ``(n, k)``.

        Args:
            chosen: ``(n, n_groups)``, or ``(n_groups,)`` for ``(k,)``.
        """
        weight = chosen.astype(np.float64)
        return Made(self.groups, lambda name: weight @ self.groups[name])


def blocks_of(array: RowReader, row: Whole, width: int = 0) -> Iterator[tuple[slice, Rows]]:
    """Yield rows, some MiB at a time, and which of the numbers they are.

    Args:
        row: numbers of rows ``(n,)``, ascending.
        width: numbers that an instrument makes of a row, as the features of a dictionary.
    """
    size = min(1 << 13, max(64, BLOCK_NBYTES // (4 * max(width, array.shape[1]))))
    for start in range(0, len(row), size):
        block = slice(start, min(start + size, len(row)))
        yield block, array[row[block].astype(np.int64)]


class Sums:
    """The sums of one arm.

    Args:
        coarse: strata in which coarse parts are wanted.
    """

    def __init__(self, side: Side, n_strata: int, n_groups: int, coarse: Ints) -> None:
        self._side, self._n_groups, self._n_strata = side, n_groups, n_strata
        self._n_keys = n_strata * n_groups
        self._sums: dict[str, Floats] = {}
        self._is_coarse = np.zeros(n_strata, bool)
        self._is_coarse[coarse] = True
        self._coarse_place = np.where(self._is_coarse, np.cumsum(self._is_coarse) - 1, -1)
        self._coarse: set[str] = set()
        self._usable = np.ones(len(side), np.bool_)

    def leave_out(self, block: slice, fine: Bools) -> None:
        """Leave rows of a block out of all counts, as those that are not finite."""
        self._usable[block] = fine

    def add(self, block: slice, parts: Iterator[Part] | list[Part]) -> None:
        """Add the values of a block of rows; rows that are left out count for nothing.

        Args:
            which: the rows, as `blocks_of` names them.
            parts: what to add; each name once.
        """
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
            width = values.shape[1] * (1 if part.right is None else part.right.shape[1])
            if part.name not in self._sums:
                n_keys = self._n_keys
                if part.coarse:
                    self._coarse.add(part.name)
                    n_keys = int(self._is_coarse.sum()) * self._n_groups
                self._sums[part.name] = np.zeros((n_keys, width))
            if part.right is None:
                added = matrix @ values
                added = added.toarray() if issparse(values) else added
                self._sums[part.name][keys] += added
            else:
                self._sums[part.name][keys] += _products(matrix, np.asarray(values), part.right)

    def totals(self, stratum: int) -> Totals:
        """Return the sums of a stratum, of all groups; coarse parts only where they are wanted."""
        totals: dict[str, Floats] = {}
        for name, sums in self._sums.items():
            place = stratum
            if name in self._coarse:
                place = int(self._coarse_place[stratum])
                if place < 0:
                    continue
            totals[name] = sums[place * self._n_groups : (place + 1) * self._n_groups]
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
        """Return of every membership its key of stratum and group, its row of the block, its
        weight, and whether it is even.
        """
        key, row, weight, even = [], [], [], []
        for layer in self._side.layers:
            stratum = layer.stratum[block]
            present = np.flatnonzero((stratum >= 0) & self._usable[block])
            key.append(
                stratum[present].astype(np.int64) * self._n_groups
                + self._side.group[block][present]
            )
            row.append(present)
            of_rows = layer.weight
            weight.append(np.ones(len(present)) if of_rows is None else of_rows[block][present])
            some = layer.even
            even.append(np.ones(len(present), np.bool_) if some is None else some[block][present])
        return (
            np.concatenate(key).astype(np.int64),
            np.concatenate(row).astype(np.int64),
            np.concatenate(weight).astype(np.float64),
            np.concatenate(even),
        )

    def _matrix(
        self, key: Ints, row: Ints, weight: Floats, even: Bools, n: int, coarse: bool, only: bool
    ) -> tuple[Ints, csr_array]:
        """Return keys of stratum and group, and the weight that each row has in them.

        Args:
            key: of memberships, as `_members` returns them.
            n: rows.
            coarse: in the strata in which coarse parts are wanted, by place among these.
            only: of even memberships only, unweighted.
        """
        if only:
            key, row, weight = key[even], row[even], np.ones(int(np.count_nonzero(even)))
        if coarse:
            kept = self._is_coarse[key // self._n_groups]
            place = self._coarse_place[key[kept] // self._n_groups]
            key, row, weight = (
                place * self._n_groups + key[kept] % self._n_groups,
                row[kept],
                weight[kept],
            )
        keys, place = np.unique(key, return_inverse=True)
        return keys, csr_array((weight, (place.reshape(-1), row)), shape=(len(keys), n))


def _products(matrix: csr_array, values: Floats, right: Floats) -> Floats:
    """Return the sums of products ``(n_keys, k d)``: rows with value 0, most of them, cost nothing.

    Args:
        matrix: weights ``(n_keys, n)``.
        values: ``(n, k)``.
        right: ``(n, d)``.
    """
    d = right.shape[1]
    totals = np.zeros((matrix.shape[0], values.shape[1] * d))
    for k in range(values.shape[1]):
        some = np.flatnonzero(values[:, k])
        if len(some):
            weight = matrix[:, some] @ (values[some, k][:, np.newaxis] * right[some])
            totals[:, k * d : (k + 1) * d] = weight
    return totals
