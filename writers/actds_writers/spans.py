"""Pieces and spans: interval arithmetic of the census, vectorised.

A piece is what one step did to one request; spans are what stands in the table. Pure.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from actds import tables

CAPTURED, CACHE_REF, DROPPED, ABORTED, FILTERED = range(len(tables.DISPOSITIONS))
NONE = -1

_COLUMNS = ("request", "start", "stop", "disposition", "step", "ref_request", "reason")


class Pieces:
    """A growing list of intervals, in columns."""

    def __init__(self) -> None:
        self._chunks: list[tuple[np.ndarray, ...]] = []
        self._reasons: list[str] = []

    def add(
        self,
        request: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        disposition: int,
        step: int,
        ref_request: int = NONE,
        *,
        reason: str | None = None,
    ) -> None:
        """Add intervals ``[start, stop)``; empty ones are left out."""
        keep = stop > start
        n = int(np.count_nonzero(keep))
        if not n:
            return
        constants = (disposition, step, ref_request, self._reason(reason))
        self._chunks.append(
            (request[keep], start[keep], stop[keep], *(np.full(n, c, np.int64) for c in constants))
        )

    def columns(self) -> dict[str, np.ndarray]:
        """Return all pieces as int64 columns."""
        if not self._chunks:
            return {name: np.empty(0, np.int64) for name in _COLUMNS}
        joined = [np.concatenate(column) for column in zip(*self._chunks, strict=True)]
        self._chunks = [tuple(joined)]
        return dict(zip(_COLUMNS, joined, strict=True))

    def reasons(self) -> list[str]:
        """Return the words behind the reason numbers."""
        return list(self._reasons)

    def settled(
        self,
        prompt_len: np.ndarray,
        acknowledged: dict[str, int],
        lost_reason: str,
        dropped: dict[int, str],
        left_out: dict[str, dict[int, str]] | None = None,
        unlogged: frozenset[int] = frozenset(),
    ) -> Pieces:
        """Return the pieces with filtered, dropped and never committed rows told apart.

        A rule wins over a loss: what it leaves out would not have been stored anyway. It holds
        for cache references too, so that the multiplicities are those of the stored traffic.

        Args:
            prompt_len: prompt tokens by request number: where prefill ends.
            acknowledged: per phase, the last step whose rows are committed.
            lost_reason: reason of the others.
            dropped: reason by step of those an overflow policy gave up.
            left_out: per phase, the reason by request of those a sampling rule leaves out.
            unlogged: steps that were given up and stand in no log; lost, even where a later step
                is committed.
        """
        settled = Pieces()
        settled._reasons = self.reasons()
        lost = settled._reason(lost_reason)
        c = self.columns()
        for reason in sorted(set(dropped.values())):
            steps = [step for step, why in dropped.items() if why == reason]
            gone = (c["disposition"] == CAPTURED) & np.isin(c["step"], steps)
            c["disposition"] = np.where(gone, DROPPED, c["disposition"])
            c["reason"] = np.where(gone, settled._reason(reason), c["reason"])
        edge = prompt_len[c["request"]] if len(c["request"]) else c["start"]
        for phase, start, stop in (
            ("prefill", c["start"], np.minimum(c["stop"], edge)),
            ("decode", np.maximum(c["start"], edge), c["stop"]),
        ):
            late = c["step"] > acknowledged.get(phase, NONE)
            late |= np.isin(c["step"], list(unlogged))
            late &= c["disposition"] == CAPTURED
            rule = settled._rules((left_out or {}).get(phase, {}), len(prompt_len))[c["request"]]
            filtered = rule != NONE
            keep = stop > start
            columns = {
                **c,
                "start": start,
                "stop": stop,
                "disposition": np.select(
                    [filtered, late], [FILTERED, ABORTED], default=c["disposition"]
                ),
                "ref_request": np.where(filtered, NONE, c["ref_request"]),
                "reason": np.select([filtered, late], [rule, lost], default=c["reason"]),
            }
            settled._chunks.append(tuple(columns[name][keep] for name in _COLUMNS))
        return settled

    def totals(self) -> dict[str, int]:
        """Return positions per disposition."""
        c = self.columns()
        length = c["stop"] - c["start"]
        return {
            name: int(length[c["disposition"] == code].sum())
            for code, name in enumerate(tables.DISPOSITIONS)
        }

    def tokens_by_step(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """Return, for each disposition but ``cache_ref``, computed positions per step.

        Args:
            steps: sorted step numbers.
        """
        c = self.columns()
        computed = c["step"] >= 0
        index = np.searchsorted(steps, c["step"][computed])
        length, code = (c["stop"] - c["start"])[computed], c["disposition"][computed]
        found = {}
        for wanted, name in enumerate(tables.DISPOSITIONS):
            if wanted != CACHE_REF:
                mask = code == wanted
                found[name] = np.bincount(
                    index[mask], weights=length[mask], minlength=len(steps)
                ).astype(np.int64)
        return found

    def _rules(self, reasons: dict[int, str], n_requests: int) -> np.ndarray:
        """Return the reason number of each request, ``NONE`` where no rule leaves it out."""
        numbers = np.full(n_requests, NONE, np.int64)
        for request, reason in reasons.items():
            numbers[request] = self._reason(reason)
        return numbers

    def _reason(self, reason: str | None) -> int:
        if reason is None:
            return NONE
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason)


def span_table(pieces: Pieces) -> pa.Table:
    """Return the spans table: adjacent pieces of one disposition, reason and reference merged.

    Spec: 0.1 section 7.1.
    """
    c = pieces.columns()
    order = np.lexsort((c["start"], c["request"]))
    c = {name: column[order] for name, column in c.items()}
    # A gap between two pieces stays a gap: merging must never hide one.
    same = c["start"][1:] == c["stop"][:-1]
    # A span without a step was never computed; it must not join one that was.
    same &= (c["step"][1:] < 0) == (c["step"][:-1] < 0)
    for name in ("request", "disposition", "reason", "ref_request"):
        same &= c[name][1:] == c[name][:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else np.empty(0, int)
    last = np.concatenate([first[1:] - 1, [len(order) - 1]]) if len(order) else first
    words, reasons = np.array(tables.DISPOSITIONS, object), pieces.reasons()
    code, step, ref = c["reason"][first], c["step"][first], c["ref_request"][first]
    return tables.build(
        "spans",
        {
            "request": c["request"][first],
            "start": c["start"][first],
            "stop": c["stop"][last],
            "disposition": words[c["disposition"][first]],
            "reason": [reasons[i] if i >= 0 else None for i in code.tolist()],
            "step": pa.array(step, mask=step < 0),
            "ref_request": pa.array(ref, mask=ref < 0),
        },
    )
