"""Comparison: the values audits that somebody asked for, checked before anything long begins.

Beside the audit, for the command. Opens both datasets and looks at their hooks and columns at once;
rows are read later, by `drift`. Imports the format room, `drift` and the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import actds
from actds.errors import ActdsError
from actds.load.dataset import Dataset
from actds.store.local import LocalStore
from actds_validators.audit.drift.compare import (
    Column,
    common_hooks,
    drift_against,
    drift_by,
    values_to_compare,
)
from actds_validators.audit.result import Audit, Drift, Limits, OtherDataset

__all__ = ["Comparison", "open_comparison"]


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        dataset: the dataset audited.
        against: path of the other one as it was given, ``None`` without.
        other: the other one.
        by: columns.
        rows: rows a side that are read at most.
    """

    dataset: Dataset
    against: str | None
    other: Dataset | None
    by: tuple[Column, ...]
    rows: int

    def added_to(self, result: Audit) -> tuple[Audit, Exception | None]:
        """Return the result with the comparisons, and what the first one that failed raised.

        The verdict rests on none of them, so that a failure takes nothing from the result; the
        options name every one.
        """
        sections: list[Drift] = []
        failed: list[Exception] = []
        for compare in self._parts(result.limits):
            try:
                sections += compare()
            except Exception as error:  # the caller raises it when the result is written
                failed.append(error)
        other = None
        if self.other is not None and self.against is not None:
            dataset = self.other.catalog.genesis.dataset
            other = OtherDataset(path=self.against, dataset=dataset, digest=self.other.digest)
        asked = {
            "by": list(self.by),
            "against": other,
            "rows": self.rows,
            "failed": [_words(error) for error in failed],
        }
        options = result.options.model_copy(update=asked)
        told = result.model_copy(update={"drift": sections, "options": options})
        return told, failed[0] if failed else None

    def _parts(self, limits: Limits) -> list[Callable[[], list[Drift]]]:
        dataset, other = self.dataset, self.other
        parts: list[Callable[[], list[Drift]]] = []
        if other is not None:
            parts.append(partial(drift_against, dataset, other, limits, rows=self.rows))
        for column in self.by:
            parts.append(partial(drift_by, dataset, column, limits, rows=self.rows))
        return parts


def open_comparison(
    path: str, against: str | None, by: tuple[str, ...], rows: int
) -> Comparison | None:
    """Return what is to be compared, ``None`` when nothing was asked for; no row is read.

    Args:
        path: the dataset audited.
        against: another dataset, if any.
        by: columns; one that is named twice counts once.
        rows: rows a side that are read at most.

    Raises:
        ActdsError: E009 the other dataset is the one audited; E014 no hook in common, no rows, or
            nothing to compare in a column; what ``actds.open`` raises of either dataset.
    """
    if against is None and not by:
        return None
    dataset = actds.open(path)
    other = None if against is None else actds.open(against)
    if other is not None and other.digest == dataset.digest and _place(other) == _place(dataset):
        raise ActdsError(
            "E009",
            f"--against {against}",
            got="the dataset that is audited",
            expected="another one",
        )
    common_hooks(dataset, dataset if other is None else other)
    for column in by:
        values_to_compare(dataset, column)
    columns = cast("tuple[Column, ...]", tuple(dict.fromkeys(by)))
    return Comparison(dataset, against, other, columns, rows)


def _place(dataset: Dataset) -> str:
    """Return where a dataset stands, through links."""
    store = dataset.catalog.store
    return os.path.realpath(store.root) if isinstance(store, LocalStore) else store.uri


def _words(error: Exception) -> str:
    if isinstance(error, ActdsError):
        return f"{error.code} {error.place}: {error.got}"
    return f"{type(error).__name__}: {error}"
