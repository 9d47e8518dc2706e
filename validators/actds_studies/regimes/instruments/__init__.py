"""What an instrument is: what it adds up of each row, and what it makes of the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from actds_studies.dictionaries.tensors import refused
from actds_studies.regimes.inference import Measure
from actds_studies.regimes.sums import COUNT, GroupSums, Part
from actds_validators.arrays import Bools, Floats, Ints, Rows


class Dictionary(Protocol):
    """A dictionary of features, as a sparse autoencoder."""

    def encode(self, rows: Rows) -> Rows:
        """Return the features ``(n, n_features)`` of rows ``(n, d_model)``."""
        ...

    def decode(self, features: Rows, rows: Rows | None = None) -> Rows:
        """Return the rows ``(n, d_model)`` of features ``(n, n_features)``.

        Args:
            rows: the rows that they are of, whose own numbers undo a normalization.
        """
        ...

    def frame(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return what a normalization takes off each row and divides it by, each ``(n, 1)``.

        Zeros and ones where there is none.
        """
        ...


class Remembered:
    """A dictionary that several instruments use: it remembers the features of the last rows.

    Rows that are not finite count as zeros, and are unused.

    Args:
        path: of the dictionary, for errors.

    Raises:
        ActdsError: E015 it makes numbers of finite rows that are not finite.
    """

    def __init__(self, dictionary: Dictionary, path: str = "dictionary") -> None:
        self._dictionary, self._path = dictionary, path
        self._last: list[tuple[Rows, Rows]] = []

    def encode(self, rows: Rows) -> Rows:
        """Return the features ``(n, n_features)`` of rows, which nobody changes meanwhile."""
        for known, features in self._last:
            if known is rows:
                return features
        with np.errstate(over="ignore", invalid="ignore"):
            features = self._checked("features", self._dictionary.encode(_finite(rows)))
        self._last = [*self._last[-1:], (rows, features)]  # the two rows of pairs
        return features

    def decode(self, features: Rows, rows: Rows | None = None) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):
            decoded = self._dictionary.decode(features, None if rows is None else _finite(rows))
            return self._checked("rows", decoded)

    def frame(self, rows: Rows) -> tuple[Rows, Rows]:
        return self._dictionary.frame(_finite(rows))

    def _checked(self, what: str, values: Rows) -> Rows:
        if not np.isfinite(values.sum(dtype=np.float64)):
            got = f"{what} that are not finite in float32"
            raise refused(self._path, got, "finite ones of finite rows")
        return values


def _finite(rows: Rows) -> Rows:
    """Return rows ``(n, d_model)``, those that are not finite as zeros."""
    fine: Bools = np.asarray(np.isfinite(rows).all(axis=1))
    return rows if fine.all() else np.where(fine[:, np.newaxis], rows, np.float32(0))


def events(features: Rows) -> csr_array:
    """Return where features ``(n, n_features)`` are active, as a sparse matrix of ones."""
    n, width = features.shape
    flat = np.flatnonzero((features > 0).ravel())  # four times as fast as over two axes
    starts = np.searchsorted(flat, width * np.arange(n + 1))
    return csr_array((np.ones(len(flat)), flat % max(width, 1), starts), shape=(n, width))


@runtime_checkable
class Instrument(Protocol):
    """What measures the rows of each arm."""

    name: str

    def prepare(self, sample: Rows) -> None:
        """Take what depends on the reference, as its centre, from some of its rows ``(n, d)``."""
        ...

    def parts(self, rows: Rows, side: int, row: Ints) -> Iterator[Part]:
        """Yield what is added up of rows.

        Args:
            rows: ``(n, d_model)``, some perhaps not finite: what they give is not used.
            side: 0 for the reference, 1 for the other arm.
            row: their numbers in the arm's array ``(n,)``.
        """
        ...

    def measures(self, reference: GroupSums, limits: Any) -> list[Measure]:
        """Return what is measured.

        Args:
            reference: sums ``(k,)`` over all rows of the reference.
            limits: the ``StudyLimits`` of the study, its measures' limits by their names.
        """
        ...


@runtime_checkable
class PairInstrument(Protocol):
    """What measures pairs of rows of the same token."""

    name: str

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        ...

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return by name what quantiles are told of, ``(n,)`` each."""
        ...

    def pair_measures(self, limits: Any) -> list[Measure]:
        """Return what is measured of the pairs; statistics get the same sums twice."""
        ...


def mean_of(sums: GroupSums, name: str) -> Floats:
    """Return a sum over the count of the rows, ``(..., k)``; NaN without a row."""
    return np.asarray(sums[name] / np.where(sums[COUNT] > 0, sums[COUNT], np.nan))


def difference(
    name: str,
    of_arm: Callable[[GroupSums], Floats],
    unit: str,
    limit: float,
    *,
    arm_value: Callable[[GroupSums], Floats] | None = None,
    labels: Sequence[str] | None = None,
) -> Measure:
    """Return the measure of how a function of an arm differs between the two.

    Args:
        of_arm: of the sums of one arm ``(..., k)``, unchanged when all are multiplied.
        arm_value: what is shown of either arm, None for nothing.
        labels: names of the elements, None for their numbers.
    """
    return Measure(
        name,
        lambda first, second: of_arm(second) - of_arm(first),
        unit,
        "difference",
        limit,
        of_arm,
        arm_value,
        labels=labels,
    )
