"""Sampled tokens of a run: what the scheduler gave out, joined with what the logits said.

The scheduler says which tokens its requests got and at which positions, the worker which token it
sampled in each row and from which logits. Either may be first. Only tokens on which both agree
become lines: what an engine samples and discards is in no message of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from actds.errors import ActdsError
from actds.format import tables
from actds_writers.census.log import squeeze, unsqueeze
from actds_writers.ipc.messages import LogitsRead, TokensSampled

BLOCK_LINES = 1 << 16
"""Lines that are packed together; fewer wait as they are."""
_LINE = np.dtype(
    [
        ("request", np.uint32),
        ("position", np.uint32),
        ("step", np.uint64),
        ("token_id", np.uint32),
        ("entropy", np.float32),
        ("logprob", np.float32),
        ("margin", np.float32),
    ]
)
_VALUES = _LINE.names[4:] if _LINE.names else ()
Lines = np.ndarray[tuple[int], np.dtype[np.void]]


class SampledLog:
    """The lines of the table ``sampled``, in memory; old ones are packed."""

    def __init__(self) -> None:
        self._given: dict[int, TokensSampled] = {}
        self._read: dict[int, LogitsRead] = {}
        self._packed: list[bytes] = []
        self._open: list[Lines] = []
        self._n_open = 0
        self.mismatch: ActdsError | None = None
        """The first token that the scheduler gave out and the worker did not sample."""

    def give(self, message: TokensSampled) -> None:
        """Take the tokens that the requests of a step got."""
        self._given[message.step] = message
        self._join(message.step)

    def read(self, message: LogitsRead) -> None:
        """Take what the logits of a step said."""
        self._read[message.step] = message
        self._join(message.step)

    def table(self, n_positions: np.ndarray) -> pa.Table:
        """Return the table, by request and position.

        Args:
            n_positions: prompt and sampled tokens by request number; a token beyond is of a request
                that never ended, and nobody knows of it.
        """
        found = [tables.empty("sampled")]
        for lines in self._blocks():
            mine = lines[lines["position"] < n_positions[lines["request"]]]
            found.append(tables.build("sampled", {name: mine[name] for name in _LINE.names or ()}))
        order = [("request", "ascending"), ("position", "ascending")]
        return pa.concat_tables(found).sort_by(order)

    def _join(self, step: int) -> None:
        if step not in self._given or step not in self._read:
            return
        given, read = self._given.pop(step), self._read.pop(step)
        if not len(given.requests):
            return
        row = {request: row for row, request in enumerate(read.requests.tolist())}
        at = np.array([row.get(request, -1) for request in given.requests.tolist()], np.int64)
        same = (at >= 0) & (read.token_ids[at] == given.token_ids) if len(row) else at >= 0
        if not same.all() and self.mismatch is None:
            wrong = int(np.flatnonzero(~same)[0])
            self.mismatch = ActdsError(
                "E501",
                f"step {step} request {given.requests[wrong]}",
                got="logits of another token, or none",
                expected=f"of the sampled token {given.token_ids[wrong]}",
            )
        lines = np.empty(int(np.count_nonzero(same)), _LINE)
        lines["request"], lines["step"] = given.requests[same], step
        lines["position"], lines["token_id"] = given.positions[same], given.token_ids[same]
        for name, values in zip(_VALUES, read.values.reshape(-1, 3).T, strict=True):
            lines[name] = values[at[same]]
        self._open.append(lines)
        self._n_open += len(lines)
        if self._n_open >= BLOCK_LINES:
            joined = np.concatenate(self._open)
            self._packed.append(squeeze(b"".join(joined[n].tobytes() for n in _LINE.names or ())))
            self._open, self._n_open = [], 0

    def _blocks(self) -> Iterator[Lines]:
        for packed in self._packed:
            data = unsqueeze(packed)
            lines, offset = np.empty(len(data) // _LINE.itemsize, _LINE), 0
            for name in _LINE.names or ():
                lines[name] = np.frombuffer(data, _LINE[name], len(lines), offset)
                offset += lines[name].nbytes
            yield lines
        if self._open:
            yield np.concatenate(self._open)
