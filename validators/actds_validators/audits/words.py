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
from actds.tables import FLAG_SPECIAL
from actds_validators.audits.run_rows import RunRows
from actds_validators.audits.sources import Part

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
        ids: list[Ints] = []
        special: list[Ints] = []
        lost: list[Ints] = []
        lost_ids: list[Ints] = []
        if self.hook is None:
            for batch in part.batches(["token_id", "flags"]):
                ids.append(column(batch, "token_id"))
                marked = column(batch, "flags") & FLAG_SPECIAL != 0
                special.append(np.unique(ids[-1][marked]))
        else:
            for batch in part.batches(["request", "position", "token_id", "step", "hook"]):
                mine = batch.filter(pc.equal(batch["hook"], self.hook))
                step = self.rows.steps.of(column(mine, "step"))
                request = self.rows.requests.of(column(mine, "request"))
                position, token = column(mine, "position"), column(mine, "token_id")
                kept = (step >= 0) & (request >= 0)
                kept &= self.rows.excluded.find(step, request, position) < 0
                ids.append(token[kept])
                at = self.rows.losses.find(step, request, position)
                lost.append(at[at >= 0])
                lost_ids.append(token[at >= 0])
        found, counts = _counted(_joined(ids))
        return WordCounts(
            found, counts, np.unique(_joined(special)), _joined(lost), _joined(lost_ids)
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


def _counted(ids: Ints) -> tuple[Ints, Ints]:
    if len(ids) and int(ids.max()) < MAX_DENSE:
        counts = np.bincount(ids)
        found = np.flatnonzero(counts)
        return found, counts[found]
    return np.unique(ids, return_counts=True)
