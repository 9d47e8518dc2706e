"""Words: how often each token id was computed, and which ids the lost positions had.

Part of the third stage: the first pass over the rows, before anything is known of how rare a token
is. Imports `run_rows` and `sources`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds.format.tables import FLAG_SPECIAL
from actds_validators.audit.run_rows import RunRows
from actds_validators.audit.sources import Part

__all__ = ["WordCounts", "WordPass", "column"]

MAX_DENSE = 1 << 22
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WordCounts:
    """Token ids of a part.

    Args:
        ids: rising.
        counts: how often each was computed.
        special: ids that the tokenizer calls special.
        lost: numbers of dropped positions, as ``StepRanges.find`` has them.
        lost_ids: their token ids.
    """

    ids: Ints
    counts: Ints
    special: Ints
    lost: Ints
    lost_ids: Ints


@dataclass(frozen=True)
class WordPass:
    """Counts the token ids of a part of the table ``tokens`` or ``readouts``.

    Args:
        rows: of the run.
        hook: whose readouts to count; ``None`` to count stored rows.
    """

    rows: RunRows
    hook: str | None

    def __call__(self, part: Part) -> WordCounts:
        """Return the ids of a part; from stored rows also which of them are special."""
        counts = _IdCounts()
        special: list[Ints] = []
        lost: list[Ints] = []
        lost_ids: list[Ints] = []
        if self.hook is None:
            for batch in part.batches(["token_id", "flags"]):
                ids = column(batch, "token_id")
                counts.add(ids)
                marked = column(batch, "flags") & FLAG_SPECIAL != 0
                special.append(np.unique(ids[marked]))
        else:
            for batch in part.batches(["request", "position", "token_id", "step", "hook"]):
                mine = batch.filter(pc.equal(batch["hook"], self.hook))
                step = self.rows.steps.of(column(mine, "step"))
                request = self.rows.requests.of(column(mine, "request"))
                position, token = column(mine, "position"), column(mine, "token_id")
                kept = (step >= 0) & (request >= 0)
                kept &= self.rows.excluded.find(step, request, position) < 0
                counts.add(token[kept])
                at = self.rows.losses.find(step, request, position)
                lost.append(at[at >= 0])
                lost_ids.append(token[at >= 0])
        return WordCounts(
            *counts.total(), np.unique(_joined(special)), _joined(lost), _joined(lost_ids)
        )


def column(batch: pa.RecordBatch, name: str) -> Ints:
    """Return a column of whole numbers.

    Raises:
        ActdsError: E109 a null.
    """
    if batch[name].null_count:
        n = batch[name].null_count
        raise ActdsError("E109", name, got=f"{n} nulls", expected="no null")
    found: Ints = batch[name].to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])


class _IdCounts:
    """Counts by id, a batch at a time: in an array by id, or one by one where ids are beyond it."""

    def __init__(self) -> None:
        self._dense = np.zeros(0, np.int64)
        self._ids, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def add(self, ids: Ints) -> None:
        """Count ids."""
        low = ids[ids < MAX_DENSE]
        found = np.bincount(low, minlength=len(self._dense))
        found[: len(self._dense)] += self._dense
        self._dense = found
        if len(low) < len(ids):
            more, n = np.unique(ids[ids >= MAX_DENSE], return_counts=True)
            both = np.concatenate([self._ids, more])
            self._ids, at = np.unique(both, return_inverse=True)
            counts = np.zeros(len(self._ids), np.int64)
            np.add.at(counts, at.reshape(-1), np.concatenate([self._counts, n]))
            self._counts = counts

    def total(self) -> tuple[Ints, Ints]:
        """Return the ids, rising, and how often each was counted."""
        low = np.flatnonzero(self._dense)
        return np.concatenate([low, self._ids]), np.concatenate([self._dense[low], self._counts])
