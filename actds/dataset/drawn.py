"""The draw: rows that a run stores by hash are those that the recorded probabilities imply.

Beside the account, which has every position in one span: here it is recomputed which positions of
a step were drawn. A row too many, one too few, or another probability, and the run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.dataset.columns import Bools, Notes, Rows, Spans, Steps
from actds.dataset.marks import COLUMNS as MARKED
from actds.format.inclusion import INCLUSION, Design, about_request
from actds.format.interventions import Intervention
from actds.format.positions import Ints, Keys, position_key, split_key, values_at
from actds.format.roles import Roles
from actds.format.tables import TableName

MAX_POSITIONS = 1 << 30
"""Positions that were not drawn, and are recomputed: a line of a few bytes can claim 2^32."""
_AT_A_TIME = 1 << 20
_REQUESTS_AT_A_TIME = 1 << 14

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """The shares that the rules of a design give the positions of a run, as its tables say.

    Args:
        index: returns the place of each request in ``prompt_len``, -1 for one that is not there.
        sampled: keys of sampled tokens by request and position, ascending and distinct.
        known: float64 ``(1 + n_probes, n)``, entropy and scores that each of them was sampled with.
        takes: by the number of each rule for requests, whether it takes each.
        redacted: requests of which nothing says any more what the rules gave their positions.
    """

    design: Design
    index: Callable[[Ints], Ints]
    prompt_len: Ints
    sampled: Keys
    known: Floats
    roles: Roles | None
    takes: dict[int, Bools]
    redacted: Ints

    @classmethod
    def of(
        cls,
        design: Design,
        index: Callable[[Ints], Ints],
        prompt_len: Ints,
        aside: Mapping[TableName, pa.Table],
        redacted: Collection[int] = (),
    ) -> Shares:
        """Return the shares of a run; ``aside`` has the columns of ``columns_of``."""
        roles, takes = None, {}
        sampled, known = np.zeros(0, np.uint64), np.zeros((1 + len(design.probes), 0))
        if design.reads_sampled:
            table = aside["sampled"]
            sampled = position_key(table["request"].to_numpy(), table["position"].to_numpy())
            sampled, first = np.unique(sampled, return_index=True)
            of_tokens = [table["entropy"].to_numpy()]
            of_tokens += [elements(table["scores"], k) for k in range(len(design.probes))]
            known = np.stack(of_tokens).astype(np.float64)[:, first]
        if design.reads_roles:
            roles = Roles(aside["roles"])
        if design.reads_requests:
            takes = _takes(design, index, len(prompt_len), aside["requests"])
        numbers = np.array(sorted(redacted), np.int64)
        return cls(design, index, prompt_len, sampled, known, roles, takes, numbers)

    def of_positions(self, request: Ints, position: Ints) -> Floats:
        if not self.design.keep:
            return np.ones(len(position))
        role, at = None, self.index(request)
        n = len(self.prompt_len)
        prompt_len = np.where(at >= 0, self.prompt_len[at], 0) if n else np.zeros_like(at)
        key = position_key(request, position)
        entropy, *scores = (values_at(key, self.sampled, values) for values in self.known)
        if self.roles is not None:
            role = self.roles.of(request, position).to_numpy(zero_copy_only=False)
        takes = {
            number: (at >= 0) & of_request[at] if n else at >= 0
            for number, of_request in self.takes.items()
        }
        of_probes = np.stack(scores) if scores else None
        return self.design.shares(position, prompt_len, entropy, role, takes, of_probes)


def columns_of(
    design: Design | None, interventions: Sequence[Intervention]
) -> dict[TableName, tuple[str, ...]]:
    """Return the columns that the draw and marks follow from, beside those of every account."""
    columns: dict[TableName, tuple[str, ...]] = {}
    if design is not None and design.reads_sampled:
        columns["sampled"] = ("request", "position", "entropy", "scores")
    if design is not None and design.reads_roles:
        columns["roles"] = ("request", "start", "stop", "role")
    if design is not None and design.reads_requests:
        columns["requests"] = ("external_id", "sampling")
    return columns | (MARKED if interventions else {})


def elements(lists: pa.ChunkedArray, place: int) -> Floats:
    """Return the number at a place of each list, NaN for a list that has none there."""
    column = lists.combine_chunks()
    numbers, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    has_one = np.diff(offsets) > place
    out = np.full(len(column), np.nan)
    out[has_one] = numbers[offsets[:-1][has_one] + place]
    return out


def _takes(
    design: Design, index: Callable[[Ints], Ints], n: int, requests: pa.Table
) -> dict[int, Bools]:
    takes = {k: np.zeros(n, bool) for k, rule in enumerate(design.keep) if rule.request}
    names = ("external_id", "labels", "sampling")
    seen = np.zeros(n, bool)
    for batch in requests.select(["request", *names]).to_batches(_REQUESTS_AT_A_TIME):
        at = index(batch["request"].to_numpy().astype(np.int64)).tolist()
        for place, *texts in zip(at, *(batch[name].to_pylist() for name in names), strict=True):
            if place < 0 or seen[place]:
                continue
            seen[place] = True
            about = about_request(*texts)
            for k, of_request in takes.items():
                of_request[place] = design.keep[k].takes(about)
    return takes


def check_drawn(
    shares: Shares | None, rows: Rows, spans: Spans, steps: Steps, notes: Notes
) -> None:
    """Note probabilities and positions that the design of a run does not imply, as E424.

    Args:
        shares: by the design of the run record, ``None`` for a run that stores every row.
        rows: every row of the run; ``spans`` and ``steps`` likewise.

    Spec: 0.1 section 7.10.
    """
    if shares is None:
        _check_nothing_drawn(rows, spans, steps, notes)
        return
    design, share = shares.design, steps.inclusion
    outside = ~np.isnan(share) & ~((share >= design.minimum) & (share <= 1))
    for i in notes.each("E424", np.flatnonzero(outside)):
        place = f"census/{notes.run}/steps step {steps.number[i]} inclusion"
        notes.add("E424", place, repr(float(share[i])), f"from {design.minimum!r} to 1")
    _check_rows(shares, rows, spans, steps, notes)
    _check_spans(shares, spans, steps, notes)


def _check_nothing_drawn(rows: Rows, spans: Spans, steps: Steps, notes: Notes) -> None:
    expected = f"null, or {INCLUSION} in the run record"
    for name, values in (("steps", steps.inclusion), ("spans", spans.inclusion)):
        for i in notes.each("E424", np.flatnonzero(~np.isnan(values))[:1]):
            place = f"census/{notes.run}/{name} inclusion"
            notes.add("E424", place, repr(float(values[i])), expected)
    if rows.inclusion is not None:
        notes.add("E424", f"shards (run {notes.run}) tokens inclusion", "a number", expected)
    for i in notes.each("E424", np.flatnonzero(spans.of("thinned"))):
        place = notes.place("census", "spans", *spans.at(i))
        notes.add("E424", place, "thinned", f"a run with {INCLUSION}")


def _of_steps(steps: Steps, step: Ints) -> Floats:
    at = steps.index(step)
    share = np.full(len(step), np.nan)
    share[at >= 0] = steps.inclusion[at[at >= 0]]
    return share


def _of_requests(spans: Spans, steps: Steps, request: Ints) -> Floats:
    computed = spans.step >= 0
    known, first = np.unique(spans.request[computed], return_index=True)  # spans are sorted
    if not len(known):
        return np.full(len(request), np.nan)
    share = _of_steps(steps, spans.step[computed][first])
    at = np.minimum(np.searchsorted(known, request), len(known) - 1)
    return np.where(known[at] == request, share[at], np.nan)


def _check_rows(shares: Shares, rows: Rows, spans: Spans, steps: Steps, notes: Notes) -> None:
    """Each row says the probability that its step implies, and was drawn with it."""
    request, position = split_key(rows.keys)
    design = shares.design
    if design.unit == "request":
        share = _of_requests(spans, steps, request)
    elif len(steps.number):
        share = np.where(rows.step >= 0, steps.inclusion[rows.step], np.nan)
    else:
        share = np.full(len(rows.keys), np.nan)
    share = share * shares.of_positions(request, position)
    stated = np.full(len(share), np.nan) if rows.inclusion is None else rows.inclusion
    for i in notes.each("E424", np.flatnonzero(stated != share)):
        place = notes.place("shards", "rows", request[i], position[i])
        notes.add(
            "E424", f"{place} inclusion", _words(stated[i]), f"{_words(share[i])}, of its step"
        )
    out = (stated == share) & (design.numbers(request, position) >= stated)
    for i in notes.each("E424", np.flatnonzero(out)):
        place = notes.place("shards", "rows", request[i], position[i])
        got = f"a row that is not drawn with the probability {_words(stated[i])}"
        notes.add("E424", place, got, "no row, and a thinned position")


def _check_spans(shares: Shares, spans: Spans, steps: Steps, notes: Notes) -> None:
    """What was not drawn says with which probability, and none of it is drawn by the hash."""
    stated = spans.inclusion
    lost = spans.of("dropped")
    for wrong, got, expected in (
        (spans.of("thinned") & np.isnan(stated), "null", "the probability of its rows"),
        (~(spans.of("thinned") | lost) & ~np.isnan(stated), "a number", "null"),
    ):
        for i in notes.each("E424", np.flatnonzero(wrong)):
            place = notes.place("census", "spans", *spans.at(i))
            notes.add("E424", f"{place} inclusion", got, expected)
    known = ~np.isin(spans.request, shares.redacted)
    chosen = np.flatnonzero(~np.isnan(stated) & (spans.of("thinned") | lost) & known)
    if shares.design.unit == "request":
        share = _of_requests(spans, steps, spans.request[chosen])
    else:
        share = _of_steps(steps, spans.step[chosen])
    differs = stated[chosen] != share
    for i in notes.each("E424", np.flatnonzero(differs)):
        place = notes.place("census", "spans", *spans.at(chosen[i]))
        expected = f"{_words(share[i])}, of its step"
        notes.add("E424", f"{place} inclusion", _words(stated[chosen[i]]), expected)
    chosen = chosen[~differs]
    for of, position in _positions(spans, chosen, notes):
        request = spans.request[chosen[of]]
        inclusion = stated[chosen[of]] * shares.of_positions(request, position)
        too_few = shares.design.numbers(request, position) < inclusion
        for i in notes.each("E424", np.flatnonzero(too_few)):
            place = notes.place("census", "spans", request[i], position[i])
            got = f"no row of a position that {_words(inclusion[i])} draws"
            notes.add("E424", place, got, "a row")


def _positions(spans: Spans, chosen: Ints, notes: Notes) -> Iterator[tuple[Ints, Ints]]:
    """Yield the positions of spans, some at a time: of which of them each is, and the position."""
    length = (spans.stop - spans.start)[chosen]
    end = np.cumsum(length)
    if len(end) and end[-1] > MAX_POSITIONS:
        got, expected = f"{end[-1]} positions that were not drawn", "every one recomputed"
        notes.add("E424", f"census/{notes.run}/spans", got, expected, "warning")
    for first in range(0, int(min(end[-1], MAX_POSITIONS)) if len(end) else 0, _AT_A_TIME):
        nth = np.arange(first, min(first + _AT_A_TIME, int(end[-1])))
        of = np.searchsorted(end, nth, side="right")
        yield of, spans.start[chosen[of]] + nth - (end[of] - length[of])


def _words(share: float) -> str:
    return "null" if np.isnan(share) else repr(float(share))
