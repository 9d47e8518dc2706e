"""The marks of interventions: each row names what changed it, as the run record implies.

Which positions of a request an intervention changes follows from the record and the census alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.dataset.columns import Notes
from actds.format.inclusion import about_request
from actds.format.interventions import FIELD, Intervention, applied
from actds.format.positions import Keys, position_key
from actds.format.tables import TableName

COLUMNS: dict[TableName, tuple[str, ...]] = {
    "requests": ("external_id", "sampling"),
    "origins": ("request", "n_given"),
}
"""The columns that marks follow from, beside those of every account."""
_AT_A_TIME = 1 << 14
MAX_PAIRS = 1 << 24
"""Pairs of a request and an intervention that are matched: half a minute."""


@dataclass(frozen=True)
class Marks:
    """Positions that are changed: keys ``[start, stop)``, ascending, and the number of each.

    ``end`` is the key behind the last request whose positions were looked at.
    """

    start: Keys
    stop: Keys
    number: npt.NDArray[np.uint16]
    end: int = 1 << 64

    @classmethod
    def of(
        cls, interventions: Sequence[Intervention], aside: Mapping[TableName, pa.Table]
    ) -> Marks:
        """Return the marks of a run; ``aside`` has the columns of ``COLUMNS``."""
        parts: list[tuple[int, int, int, int]] = []
        end = 1 << 64
        if interventions:
            given = {}
            if "origins" in aside:
                lines = (aside["origins"][name].to_pylist() for name in ("request", "n_given"))
                given = dict(zip(*lines, strict=True))
            names = ["request", "prompt_len", "external_id", "labels", "sampling"]
            most = MAX_PAIRS // len(interventions)
            requests = aside["requests"].select(names)
            if requests.num_rows > most:
                end, requests = requests["request"][most].as_py() << 32, requests[:most]
            for batch in requests.to_batches(_AT_A_TIME):
                for request, prompt_len, *about in zip(*batch.to_pydict().values(), strict=True):
                    n_given = given.get(request, prompt_len)
                    for part in applied(interventions, about_request(*about), n_given):
                        parts.append((request, *part[1:3], part.number))
        columns = np.array(sorted(set(parts)), np.int64).reshape(-1, 4).T
        request, start, stop, number = columns
        # A range without an end stops below the next request.
        stop = np.minimum(stop, (1 << 32) - 1)
        keys = position_key(request, start), position_key(request, stop)
        return cls(*keys, number.astype(np.uint16), end)

    def of_rows(self, key: Keys) -> npt.NDArray[np.uint16]:
        """Return the number of the intervention of each position, 0 for none."""
        if not len(self.start):
            return np.zeros(len(key), np.uint16)
        at = np.searchsorted(self.start, key, side="right") - 1
        within = (at >= 0) & (key < self.stop[at])
        marks: npt.NDArray[np.uint16] = np.where(within, self.number[at], 0)
        return marks

    def checked(self, tables: Iterable[pa.Table], notes: Notes) -> Iterator[pa.Table]:
        """Yield token tables; rows with another mark than the run record implies are noted, E425.

        Spec: 0.1 section 7.11.
        """
        if self.end < 1 << 64:
            got, expected = "more requests and interventions than are matched", "every one"
            notes.add("E425", f"runs/{notes.run}.json {FIELD}", got, expected, "warning")
        for table in tables:
            request, position, stated = (
                table[name].to_numpy() for name in ("request", "position", "intervention")
            )
            key = position_key(request, position)
            marks = self.of_rows(key)
            wrong = (stated != marks) & (key <= np.uint64(self.end - 1))
            for i in notes.each("E425", np.flatnonzero(wrong)):
                place = notes.place("shards", "rows", request[i], position[i])
                expected = f"{marks[i]}, as {FIELD} implies"
                notes.add("E425", f"{place} intervention", str(stated[i]), expected)
            yield table
