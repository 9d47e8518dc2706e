"""What the census knows of every step, request and piece, in memory, and its spans.

Old entries are compressed for long runs. A piece is what one step did to one request; spans are the
rows of the table.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import zstandard

from actds.dataset.drawn import Shares
from actds.format import tables
from actds.format.inclusion import Design
from actds_writers.ipc.messages import RequestArrived, RequestFinished
from actds_writers.sampling import ASKED, HookNames, Lot

Ranges = tuple[tuple[int, int], ...]
IntMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]
BLOCK_STEPS = 1024
OPEN_BLOCKS = 2
"""Blocks left uncompressed: worker and scheduler report a step at different times."""
NOTHING = np.iinfo(np.int64).min
_WORDS = ("kernel_mode",)
_FLOATS = tuple(f.name for f in tables.SCHEMAS["steps"] if f.type == pa.float64())
_NAMES = (*(f.name for f in tables.SCHEMAS["steps"] if f.name != "step"), "new_tokens")
_INDEX = {name: index for index, name in enumerate(_NAMES)}

Value = int | float | str | None
BATCH_REQUESTS = 512
"""Ended requests that are packed together."""


class StepLog:
    """What is known of each step, by the names of the ``steps`` table, and ``new_tokens``."""

    def __init__(self) -> None:
        self._blocks: dict[int, IntMatrix | bytes] = {}
        self._words: list[str] = []

    def put(self, step: int, values: Mapping[str, Value]) -> None:
        block = self._open(step // BLOCK_STEPS)
        at = step % BLOCK_STEPS
        for name, value in values.items():
            block[_INDEX[name], at] = self._bits(name, value)

    def get(self, step: int, name: str) -> int | None:
        block = self._blocks.get(step // BLOCK_STEPS)
        if block is None:
            return None
        if isinstance(block, bytes):
            block = unpack(block, len(_NAMES))
        value = int(block[_INDEX[name], step % BLOCK_STEPS])
        return None if value == NOTHING else value

    def table(self, given: str) -> tuple[np.ndarray, dict[str, pa.Array]]:
        steps, parts = [np.empty(0, np.int64)], [np.empty((len(_NAMES), 0), np.int64)]
        for number, block in sorted(self._blocks.items()):
            columns = unpack(block, len(_NAMES)) if isinstance(block, bytes) else block
            known = np.flatnonzero(columns[_INDEX[given]] != NOTHING)
            steps.append(known + number * BLOCK_STEPS)
            parts.append(columns[:, known])
        values = np.concatenate(parts, axis=1)
        return np.concatenate(steps), {name: self._array(name, values) for name in _NAMES}

    def _open(self, number: int) -> IntMatrix:
        block = self._blocks.get(number)
        if isinstance(block, np.ndarray):
            return block
        if block is None:
            opened: IntMatrix = np.full((len(_NAMES), BLOCK_STEPS), NOTHING, np.int64)
        else:
            opened = unpack(block, len(_NAMES))
        self._blocks[number] = opened
        unpacked = [n for n, block in self._blocks.items() if isinstance(block, np.ndarray)]
        for old in sorted(unpacked)[:-OPEN_BLOCKS]:
            if old != number:
                self._blocks[old] = pack(self._blocks[old])  # type: ignore[arg-type]
        return opened

    def _bits(self, name: str, value: Value) -> int:
        if value is None:
            return int(NOTHING)
        if name in _FLOATS:
            return int(np.float64(value).view(np.int64))
        if isinstance(value, str):
            if value not in self._words:
                self._words.append(value)
            return self._words.index(value)
        return int(value)

    def _array(self, name: str, values: IntMatrix) -> pa.Array:
        column = values[_INDEX[name]]
        unknown = column == NOTHING
        if name in _FLOATS:
            return pa.array(column.view(np.float64), mask=unknown)
        if name in _WORDS:
            codes = column.tolist()
            return pa.array([None if c == NOTHING else self._words[c] for c in codes], pa.string())
        return pa.array(column, mask=unknown)


@dataclass(slots=True)
class LoggedRequest:
    """One request as the scheduler reported it; ``first_token_ns`` is when that token was fed."""

    arrived: RequestArrived
    finished: RequestFinished | None = None
    first_token_ns: int | None = None
    n_preemptions: int = 0


class RequestLog:
    """The requests of a run: running ones by number, ended ones in packed batches."""

    def __init__(self) -> None:
        self._running: dict[int, LoggedRequest] = {}
        self._ended: list[LoggedRequest] = []
        self._packed: list[bytes] = []

    @property
    def n_running(self) -> int:
        return len(self._running)

    def arrive(self, message: RequestArrived) -> None:
        self._running[message.request] = LoggedRequest(message)

    def running(self, request: int) -> LoggedRequest | None:
        return self._running.get(request)

    def end(self, message: RequestFinished) -> None:
        ended = self._running.pop(message.request)
        ended.finished = message
        self._ended.append(ended)
        if len(self._ended) >= BATCH_REQUESTS:
            self._packed.append(squeeze(pickle.dumps(self._ended)))
            self._ended = []

    def batches(self) -> Iterator[list[LoggedRequest]]:
        for data in self._packed:
            yield pickle.loads(unsqueeze(data))
        yield [*self._ended, *self._running.values()]

    def all(self) -> Iterator[LoggedRequest]:
        return itertools.chain.from_iterable(self.batches())


def pack(columns: IntMatrix) -> bytes:
    """Return columns ``(n_columns, n)`` compressed: differences along a column, by byte.

    Columns that grow evenly take almost nothing; noise does not shrink.
    """
    n_columns, n = columns.shape
    # Differences wrap around, and so do the sums that undo them.
    before = np.zeros((n_columns, 1), np.int64)
    differences = np.ascontiguousarray(np.diff(columns, axis=1, prepend=before))
    by_byte = differences.view(np.uint8).reshape(n_columns, n, 8).transpose(0, 2, 1)
    return squeeze(by_byte.tobytes())


def squeeze(data: bytes) -> bytes:
    """Return bytes compressed, in memory of that size."""
    packed = zstandard.ZstdCompressor(level=1).compress(data)
    # What the compressor returns keeps the memory of the worst case: hundreds of times as much.
    return bytes(memoryview(packed))


def unsqueeze(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def unpack(data: bytes, n_columns: int) -> IntMatrix:
    by_byte = np.frombuffer(unsqueeze(data), np.uint8).reshape(n_columns, 8, -1)
    differences = np.ascontiguousarray(by_byte.transpose(0, 2, 1)).view(np.int64)[:, :, 0]
    columns: IntMatrix = np.cumsum(differences, axis=1, dtype=np.int64)
    return columns


CAPTURED, CACHE_REF, DROPPED, ABORTED, FILTERED, UNDELIVERED, THINNED = range(
    len(tables.DISPOSITIONS)
)
NONE = -1
LOST_REASON = "writer_ended"
"""Reason of rows that were computed and are not committed."""
BLOCK_PIECES = 1 << 16
"""Pieces that are packed together; fewer wait as they are."""
MAX_CHUNKS = 1024

_COLUMNS = (
    *("request", "start", "stop", "disposition", "step", "ref_request", "reason"),
    "inclusion",
)
"""Of a piece; ``inclusion`` as the bits of a float64, -1 but where positions were not drawn."""
Columns = dict[str, np.ndarray]
MAX_POSITIONS = 1 << 20
"""Positions that are drawn at a time, beside those of one piece."""


@dataclass(frozen=True)
class Drawn:
    """Which rows of a run were drawn, from the scheduler's side (spec 0.1 section 7.10).

    Args:
        steps: step numbers that say with which probability they drew, ascending.
        inclusion: of each of these.
        first_step: by request number, the step that first computed it.
        rules: the shares that the rules give positions.
        dropped_in: under a drop policy with a reserve, the steps whose losses are logged: what was
            not drawn in them is ``dropped``, in others ``aborted``. Else ``None``: ``thinned``.
    """

    design: Design
    steps: np.ndarray
    inclusion: np.ndarray
    first_step: np.ndarray
    rules: Shares
    dropped_in: frozenset[int] | None = None

    def of_pieces(self, c: Columns) -> np.ndarray:
        """Return the inclusion of the positions of each piece, NaN where nobody said it."""
        step = self.first_step[c["request"]] if self.design.unit == "request" else c["step"]
        at = np.searchsorted(self.steps, step)
        known = at < len(self.steps)
        known[known] = self.steps[at[known]] == step[known]
        shares = np.full(len(step), np.nan)
        shares[known] = self.inclusion[at[known]]
        return shares

    def fate(self, step: np.ndarray) -> np.ndarray:
        """Return the disposition of what was not drawn in each step."""
        if self.dropped_in is None:
            return np.full(len(step), THINNED)
        return np.where(np.isin(step, list(self.dropped_in)), DROPPED, ABORTED)


class StepPieces:
    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._chunks: list[IntMatrix] = []
        self._n_open = 0
        self.reasons: list[str] = []
        """By number."""

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
        keep = stop > start
        n = int(np.count_nonzero(keep))
        if not n:
            return
        chunk = np.empty((len(_COLUMNS), n), np.int64)
        chunk[:3] = request[keep], start[keep], stop[keep]
        chunk[3:] = np.array((disposition, step, ref_request, self._reason(reason), NONE))[:, None]
        self._append(chunk)

    def _append(self, chunk: IntMatrix) -> None:
        self._chunks.append(chunk)
        self._n_open += chunk.shape[1]
        if self._n_open >= BLOCK_PIECES:
            joined = self._joined()
            # A request beside itself, position after position: differences are small then.
            order = np.lexsort((joined[1], joined[0]))
            self._packed.append(pack(joined[:, order]))
            self._chunks, self._n_open = [], 0
        elif len(self._chunks) >= MAX_CHUNKS:
            self._chunks = [self._joined()]

    def _joined(self) -> IntMatrix:
        joined: IntMatrix = np.concatenate(self._chunks, axis=1)
        return joined

    def blocks(self) -> Iterator[Columns]:
        for data in self._packed:
            yield dict(zip(_COLUMNS, unpack(data, len(_COLUMNS)), strict=True))
        if self._chunks:
            yield dict(zip(_COLUMNS, self._joined(), strict=True))

    def settled(
        self,
        prompt_len: np.ndarray,
        acknowledged: Mapping[Lot, int],
        dropped: dict[int, str],
        left_out: dict[str, dict[int, str]],
        unlogged: frozenset[int],
        drawn: Drawn | None = None,
        chosen: Mapping[int, Ranges] | None = None,
        hooks: Mapping[int, HookNames] | None = None,
    ) -> StepPieces:
        """Return the pieces with the final dispositions: filtered, dropped, aborted, captured.

        A sampling rule wins over a loss: the row would not have been stored anyway. It holds for
        prefix-cache hits too, so that the multiplicities are those of the stored traffic.

        Args:
            prompt_len: by request number: where prefill ends.
            acknowledged: per phase and hooks, the last step whose rows are committed.
            dropped: reason by step of those an overflow policy gave up.
            left_out: per phase, the reason by request of those a sampling rule leaves out.
            unlogged: dropped steps in no log; aborted, even where a later step is committed.
            drawn: which rows were drawn; what was not is no row whatever else happened to it, but
                for a rule.
            chosen: by request, the positions that its client asked for; others are filtered.
            hooks: by request, the hooks that its client chose, where it did.
        """
        settled = StepPieces()
        settled.reasons = list(self.reasons)
        lost = settled._reason(LOST_REASON)
        rules = {
            phase: settled._rules(reasons, len(prompt_len)) for phase, reasons in left_out.items()
        }
        through = {phase: np.full(len(prompt_len), NONE) for phase in rules}
        for phase, last in through.items():
            last[:] = acknowledged.get((phase, None), NONE)
            for request, names in (hooks or {}).items():
                last[request] = acknowledged.get((phase, names), NONE)
        drops = {
            settled._reason(reason): [step for step, why in dropped.items() if why == reason]
            for reason in sorted(set(dropped.values()))
        }
        by_client = settled._reason(ASKED) if chosen else NONE
        for block in self.blocks():
            c = block if drawn is None else settled._split(block, drawn)
            c, outside = _cut_at(c, chosen or {})
            for reason, steps in drops.items():
                lines = (c["disposition"] == CAPTURED) & np.isin(c["step"], steps)
                c["disposition"] = np.where(lines, DROPPED, c["disposition"])
                c["reason"] = np.where(lines, reason, c["reason"])
            unseen = np.isin(c["step"], list(unlogged))
            edge = prompt_len[c["request"]]
            for phase, start, stop in (
                ("prefill", c["start"], np.minimum(c["stop"], edge)),
                ("decode", np.maximum(c["start"], edge), c["stop"]),
            ):
                late = (c["step"] > through[phase][c["request"]]) | unseen
                late &= c["disposition"] == CAPTURED
                rule = rules[phase][c["request"]]
                rule = np.where(outside & (rule == NONE), by_client, rule)
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
                    "inclusion": np.where(filtered, NONE, c["inclusion"]),
                    "reason": np.select([filtered, late], [rule, lost], default=c["reason"]),
                }
                settled._append(np.stack([columns[name][keep] for name in _COLUMNS]))
        return settled

    def _split(self, c: Columns, drawn: Drawn) -> Columns:
        """Return the pieces cut where computed positions were drawn and where not."""
        inclusion = drawn.of_pieces(c)
        is_drawn = (inclusion < 1) | (bool(drawn.design.keep) & ~np.isnan(inclusion))
        cut = (c["disposition"] == CAPTURED) & is_drawn
        parts = [{name: c[name][~cut] for name in _COLUMNS}]
        pieces, shares = {name: c[name][cut] for name in _COLUMNS}, inclusion[cut]
        end = np.cumsum(pieces["stop"] - pieces["start"])
        first = 0
        while first < len(shares):
            before = end[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(end, before + MAX_POSITIONS, side="right")))
            some = {name: column[first:last] for name, column in pieces.items()}
            parts.append(self._runs(some, shares[first:last], drawn))
            first = last
        return {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}

    def _runs(self, c: Columns, shares: np.ndarray, drawn: Drawn) -> Columns:
        """Return each run of positions of a piece that were drawn, or were not, as a piece."""
        length = c["stop"] - c["start"]
        piece = np.repeat(np.arange(len(length)), length)
        nth = np.arange(len(piece)) - np.repeat(np.cumsum(length) - length, length)
        position, request = c["start"][piece] + nth, c["request"][piece]
        by_rules = drawn.rules.of_positions(request, position)
        numbers = drawn.design.numbers(request, position)
        is_in, is_wanted = numbers < shares[piece] * by_rules, numbers < by_rules
        alike = (is_in[1:] == is_in[:-1]) & (is_wanted[1:] == is_wanted[:-1])
        first = np.flatnonzero((nth == 0) | np.append(True, ~alike))
        last = np.append(first[1:], len(piece)) - 1
        runs = {name: column[piece[first]] for name, column in c.items()}
        runs["start"], runs["stop"] = position[first], position[last] + 1
        out = ~is_in[first]
        bits = np.ascontiguousarray(shares[piece[first]]).view(np.int64)
        fate = np.where(is_wanted[first], drawn.fate(runs["step"]), THINNED)
        words = {THINNED: tables.NOT_DRAWN, DROPPED: tables.QUEUE_FULL, ABORTED: LOST_REASON}
        reasons = np.full(len(tables.DISPOSITIONS), NONE)
        for kind in np.unique(fate[out]).tolist():
            reasons[kind] = self._reason(words[kind])
        runs["disposition"] = np.where(out, fate, runs["disposition"])
        runs["reason"] = np.where(out, reasons[fate], runs["reason"])
        runs["inclusion"] = np.where(out & (fate != ABORTED), bits, NONE)
        return runs

    def totals(self) -> dict[str, int]:
        total = np.zeros(len(tables.DISPOSITIONS))
        for c in self.blocks():
            total += np.bincount(c["disposition"], c["stop"] - c["start"], len(total))
        return {name: int(total[code]) for code, name in enumerate(tables.DISPOSITIONS)}

    def tokens_by_step(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        kinds = {name: code for code, name in enumerate(tables.DISPOSITIONS) if code != CACHE_REF}
        n_tokens = {name: np.zeros(len(steps), np.int64) for name in kinds}
        for c in self.blocks():
            computed = c["step"] >= 0
            index = np.searchsorted(steps, c["step"][computed])
            length, code = (c["stop"] - c["start"])[computed], c["disposition"][computed]
            for name, wanted in kinds.items():
                mask = code == wanted
                np.add.at(n_tokens[name], index[mask], length[mask])
        return n_tokens

    def _rules(self, reasons: dict[int, str], n_requests: int) -> np.ndarray:
        numbers = np.full(n_requests, NONE, np.int64)
        for request, reason in reasons.items():
            numbers[request] = self._reason(reason)
        return numbers

    def _reason(self, reason: str | None) -> int:
        if reason is None:
            return NONE
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)


def span_table(pieces: StepPieces) -> pa.Table:
    """Return the spans: adjacent pieces of one disposition, reason and reference (spec 7.1)."""
    # Spans of two blocks may be adjacent, so merge again after merging within each.
    c = _merged(_concatenated([_merged(block) for block in pieces.blocks()]))
    words, reasons = np.array(tables.DISPOSITIONS, object), pieces.reasons
    step, ref = c["step"], c["ref_request"]
    return tables.build(
        "spans",
        {
            "request": c["request"],
            "start": c["start"],
            "stop": c["stop"],
            "disposition": words[c["disposition"]],
            "reason": [reasons[i] if i >= 0 else None for i in c["reason"].tolist()],
            "step": pa.array(step, mask=step < 0),
            "ref_request": pa.array(ref, mask=ref < 0),
            "inclusion": pa.array(c["inclusion"].view(np.float64), mask=c["inclusion"] == NONE),
        },
    )


def _merged(c: Columns) -> Columns:
    """Return sorted columns with adjacent intervals of one kind merged, with their first step."""
    order = np.lexsort((c["start"], c["request"]))
    c = {name: column[order] for name, column in c.items()}
    # A gap between two pieces stays a gap: merging must never hide one.
    same = c["start"][1:] == c["stop"][:-1]
    # A span without a step was never computed; it must not join one that was.
    same &= (c["step"][1:] < 0) == (c["step"][:-1] < 0)
    for name in ("request", "disposition", "reason", "ref_request", "inclusion"):
        same &= c[name][1:] == c[name][:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else np.empty(0, int)
    last = np.concatenate([first[1:] - 1, [len(order) - 1]]) if len(order) else first
    return {name: c[name][last if name == "stop" else first] for name in _COLUMNS}


def _concatenated(blocks: list[Columns]) -> Columns:
    empty = dict.fromkeys(_COLUMNS, np.empty(0, np.int64))
    return {name: np.concatenate([block[name] for block in [empty, *blocks]]) for name in _COLUMNS}


def _cut_at(c: Columns, chosen: Mapping[int, Ranges]) -> tuple[Columns, np.ndarray]:
    """Return the pieces cut where what clients asked for begins and ends, and which are outside."""
    lines = np.flatnonzero(np.isin(c["request"], list(chosen)))
    if not len(lines):
        return c, np.zeros(len(c["request"]), bool)
    source, starts, stops, outside = list[int](), list[int](), list[int](), list[bool]()
    for line in lines.tolist():
        start, stop = int(c["start"][line]), int(c["stop"][line])
        ranges = chosen[int(c["request"][line])]
        edges = sorted({start, stop, *(e for r in ranges for e in r if start < e < stop)})
        for first, last in itertools.pairwise(edges):
            source.append(line)
            starts.append(first)
            stops.append(last)
            outside.append(not any(a <= first and last <= b for a, b in ranges))
    rest = np.setdiff1d(np.arange(len(c["request"])), lines)
    at = np.concatenate([rest, np.array(source, np.int64)])
    cut = {name: column[at] for name, column in c.items()}
    # A reference leads to the same positions of the other request, wherever it is cut.
    cut["start"] = np.concatenate([c["start"][rest], np.array(starts, np.int64)])
    cut["stop"] = np.concatenate([c["stop"][rest], np.array(stops, np.int64)])
    return cut, np.concatenate([np.zeros(len(rest), bool), np.array(outside, bool)])
