"""The census: what became of every position, from the scheduler's decisions alone.

The scheduler side of the account: messages in, tables out; no thread, no file, no row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa

from actds.dataset.drawn import Shares
from actds.errors import ActdsError
from actds.format import tables
from actds.format.inclusion import Design
from actds.format.tables import TableName
from actds_writers.census.log import (
    ABORTED,
    BATCH_REQUESTS,
    CACHE_REF,
    CAPTURED,
    UNDELIVERED,
    Drawn,
    LoggedRequest,
    Ranges,
    RequestLog,
    StepLog,
    StepPieces,
    span_table,
    squeeze,
    unsqueeze,
)
from actds_writers.ipc.messages import (
    CensusProgress,
    ClientFacts,
    LogitsRead,
    PromptFact,
    Reference,
    RequestArrived,
    RequestFinished,
    StepExecuted,
    StepLost,
    StepScheduled,
    TokensSampled,
    intervals,
)
from actds_writers.sampling import MIXED_WEIGHTS, HookNames, LeftOut, Lot

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


def _line(n_scores: int) -> np.dtype[np.void]:
    scores = [("scores", np.float32, (n_scores,))] if n_scores else []
    return np.dtype([*_LINE.descr, *scores])


Lines = np.ndarray[tuple[int], np.dtype[np.void]]


class SampledLog:
    def __init__(self) -> None:
        self._given: dict[int, TokensSampled] = {}
        self._read: dict[int, LogitsRead] = {}
        self._packed: list[bytes] = []
        self._open: list[Lines] = []
        self._n_open = 0
        self._line = _LINE
        self.mismatch: ActdsError | None = None
        """The first token that the scheduler gave out and the worker did not sample."""

    def give(self, message: TokensSampled) -> None:
        self._given[message.step] = message
        self._join(message.step)

    def read(self, message: LogitsRead) -> None:
        self._read[message.step] = message
        self._join(message.step)

    def table(self, n_positions: np.ndarray) -> pa.Table:
        """Return the table, by request and position.

        ``n_positions`` has prompt and sampled tokens by request number; a token beyond is of a
        request that never ended, and nobody knows of it.
        """
        parts = [tables.empty("sampled")]
        for lines in self._blocks():
            known = lines[lines["position"] < n_positions[lines["request"]]]
            columns: dict[str, object] = {name: known[name] for name in self._line.names or ()}
            if "scores" in columns:
                ends = np.arange(len(known) + 1, dtype=np.int32) * known["scores"].shape[1]
                flat = np.ascontiguousarray(known["scores"]).ravel()
                columns["scores"] = pa.ListArray.from_arrays(ends, flat)
            parts.append(tables.build("sampled", columns))
        order = [("request", "ascending"), ("position", "ascending")]
        return pa.concat_tables(parts).sort_by(order)

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
        if not same.any():
            return
        values = read.values.reshape(len(read.requests), -1)[at[same]]
        self._line = _line(values.shape[1] - len(_VALUES))
        lines = np.empty(int(np.count_nonzero(same)), self._line)
        lines["request"], lines["step"] = given.requests[same], step
        lines["position"], lines["token_id"] = given.positions[same], given.token_ids[same]
        for nth, name in enumerate(_VALUES):
            lines[name] = values[:, nth]
        if "scores" in (self._line.names or ()):
            lines["scores"] = values[:, len(_VALUES) :]
        self._open.append(lines)
        self._n_open += len(lines)
        if self._n_open >= BLOCK_LINES:
            joined = np.concatenate(self._open)
            self._packed.append(
                squeeze(b"".join(joined[n].tobytes() for n in self._line.names or ()))
            )
            self._open, self._n_open = [], 0

    def _blocks(self) -> Iterator[Lines]:
        for packed in self._packed:
            data = unsqueeze(packed)
            lines, offset = np.empty(len(data) // self._line.itemsize, self._line), 0
            for name in self._line.names or ():
                lines[name] = np.frombuffer(data, self._line[name], len(lines), offset)
                offset += lines[name].nbytes
            yield lines
        if self._open:
            yield np.concatenate(self._open)


NO_STEP = NO_REFERENCE = -1
AFTER_END = "after_end"
"""Reason of rows that were computed past the end of a request."""
PROCESS_ENDED = "the process ended before it was served"
"""Reason of prompts that were not begun, where the client could not say why."""
HANDED_ON = "the weights changed before it was served; it is in the engine's next run"
"""Reason of requests that the scheduler had and no step computed."""
RUNNING, NO_REQUEST = -1, -2
"""Instead of a number of sampled tokens: the request has not ended; there is no such request, or
it owes nothing."""

_COLUMNS = {
    kind: [f.name for f in fields(kind) if f.name in tables.SCHEMAS["steps"].names[1:]]
    for kind in (StepScheduled, StepExecuted)
}


_COUNTS = np.dtype(
    [
        *((n, np.int64) for n in ("high_water", "prompt_len", "cached", "generated", "first_step")),
        *((phase, np.bool_) for phase in ("prefill", "decode")),  # a rule leaves the phase out
    ]
)
_NO_COUNTS = (0, 0, -1, NO_REQUEST, NO_STEP, False, False)


@dataclass(frozen=True)
class CensusTables:
    """The census of a run and its totals; ``roles`` and ``origins`` are what the client said."""

    requests: pa.Table
    steps: pa.Table
    spans: pa.Table
    roles: pa.Table
    origins: pa.Table
    sampled: pa.Table
    totals: dict[str, int]


class Census:
    def __init__(self) -> None:
        self._requests = RequestLog()
        self._steps = StepLog()
        self._pieces = StepPieces()
        self.sampled = SampledLog()
        self._counts = np.empty(0, _COUNTS)
        """By request number."""
        self._left_out: dict[str, dict[int, str]] = {"prefill": {}, "decode": {}}
        self._asked: dict[int, Ranges] = {}
        """By request, the positions that its client asked for, where it did."""
        self._hooks: dict[int, HookNames] = {}
        """By request, the hooks that its client chose, where it did."""
        self._scheduled_tokens = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._n_finished = 0
        self._last: StepScheduled | None = None
        self._staging_depth: int | None = None
        self._ring_depth: int | None = None
        self._lane_depth: int | None = None
        self._lost: dict[int, StepLost] = {}
        self._last_stage = 0
        self._drawn_to: dict[int, int] = {}
        """By pipeline stage, the last step of which it said how it drew."""
        self._dropped: Counter[str] = Counter()
        self._recomputed_tokens = 0
        self._n_filtered = self._n_undelivered = self._n_aborted = 0

    def progress(self) -> CensusProgress:
        # The scheduler reports its queues with each step, and an idle engine has none.
        n_alive = self._requests.n_running
        last = self._last if n_alive else None
        return CensusProgress(
            scheduled_tokens=self._scheduled_tokens,
            cached_tokens=self._hit_tokens,
            n_finished=self._n_finished,
            waiting=last.waiting if last else 0,
            running=min(last.running, n_alive) if last else 0,
            ring_depth=self._ring_depth,
            last_step=self._last.step if self._last else NO_STEP,
            staging_depth=self._staging_depth,
            lane_depth=self._lane_depth,
            queried_tokens=self._queried_tokens,
            recomputed_tokens=self._recomputed_tokens,
            filtered_tokens=self._n_filtered,
            undelivered_tokens=self._n_undelivered,
            aborted_tokens=self._n_aborted,
            dropped={reason: n for reason, n in self._dropped.items() if n},
        )

    def has_scheduled(self, step: int) -> bool:
        return self._steps.get(step, "t_ns") is not None

    def has_drawn(self, step: int, n_stages: int) -> bool:
        """Return whether so many pipeline stages have said how they drew up to a step."""
        drawn_to = self._drawn_to.values()
        return len(drawn_to) >= n_stages and all(last >= step for last in drawn_to)

    def observe(self, message: object) -> None:
        self.TAKES[type(message)](self, message)

    def _arrived(self, message: RequestArrived) -> None:
        number = message.request
        self._requests.arrive(message)
        counts = self._counts
        if number >= len(counts):
            more = max(number + 1 - len(counts), len(counts), 256)
            self._counts = np.append(counts, np.full(more, np.array(_NO_COUNTS, _COUNTS)))
        self._counts["prompt_len"][number] = message.prompt_len
        self._counts["generated"][number] = RUNNING
        if message.left_out.ranges is not None:
            self._asked[number] = message.left_out.ranges
        if message.left_out.hooks is not None:
            self._hooks[number] = message.left_out.hooks
        for phase, left_out in self._left_out.items():
            if (reason := getattr(message.left_out, phase)) is not None:
                left_out[number] = reason
                self._counts[phase][number] = True

    def _filtered(self, who: np.ndarray, start: np.ndarray, stop: np.ndarray) -> int:
        """Return how many positions of some intervals a sampling rule leaves out."""
        edge, counts = self._counts["prompt_len"][who], self._counts
        in_prompt = np.clip(np.minimum(stop, edge) - start, 0, None)
        behind = np.clip(stop - np.maximum(start, edge), 0, None)
        n = int((in_prompt * counts["prefill"][who] + behind * counts["decode"][who]).sum())
        for at in np.flatnonzero(np.isin(who, list(self._asked))).tolist() if self._asked else ():
            n += self._outside(int(who[at]), int(start[at]), int(stop[at]))
        return n

    def _outside(self, number: int, start: int, stop: int) -> int:
        """Return how many positions of a request no rule leaves out and its client did not want."""
        counts = self._counts[number]
        prefill, decode = ("" if counts[name] else None for name in ("prefill", "decode"))
        by_rules = LeftOut(prefill, decode)
        wanted = replace(by_rules, ranges=self._asked[number])
        edge = int(counts["prompt_len"])
        lengths = (
            sum(max(b - max(a, start), 0) for a, b in out.stored(stop, edge))
            for out in (by_rules, wanted)
        )
        return next(lengths) - next(lengths)

    def _scheduled(self, message: StepScheduled) -> None:
        for reference in message.references:
            self._refer(reference, message.step)
        for number in message.preempted:
            if (request := self._requests.running(number)) is not None:
                request.n_preemptions += 1
        self._mix(np.array(message.mixed, np.int64))
        who, start = message.requests, message.starts
        nothing = np.zeros(len(who), np.int64)
        n_late = nothing if message.n_undelivered is None else message.n_undelivered
        n_rejected = nothing if message.n_rejected is None else message.n_rejected
        # A rejected draft is no position of its request.
        stop = start + message.n_tokens - n_rejected
        high, cached = self._counts["high_water"], self._counts["cached"]
        prompt = self._counts["prompt_len"][who]
        first = cached[who] < 0
        cached[who[first]] = start[first]
        self._counts["first_step"][who[first]] = message.step
        # A request that runs on from another run may begin behind its prompt.
        n_hits = int(np.minimum(start, prompt)[first].sum())
        n_queried = int(prompt[first].sum())
        self._hit_tokens += n_hits
        self._queried_tokens += n_queried
        new = np.clip(high[who], start, stop)
        high[who] = np.maximum(high[who], stop)
        late = np.maximum(stop - n_late, new)
        self._n_filtered += self._filtered(who, new, stop)
        self._n_undelivered += int((stop - late).sum()) - self._filtered(who, late, stop)
        self._pieces.add(who, new, late, CAPTURED, message.step)
        self._pieces.add(who, late, stop, UNDELIVERED, message.step, reason=AFTER_END)
        for number in who[(start >= prompt) & (new < stop)].tolist():
            request = self._requests.running(number)
            if request is not None and request.first_token_ns is None:
                request.first_token_ns = message.t_ns
        n_prefill = int(np.clip(np.minimum(stop, prompt) - start, 0, None).sum())
        n_tokens, n_recomputed = int(message.n_tokens.sum()), int((new - start).sum())
        self._scheduled_tokens += n_tokens
        self._recomputed_tokens += n_recomputed
        self._last = message
        # Worker and scheduler use two sockets; either message may arrive first.
        self._steps.put(
            message.step,
            {
                **_of_columns(message),
                "batch_tokens": n_tokens,
                "n_requests": len(who),
                "prefill_tokens": n_prefill,
                "decode_tokens": n_tokens - n_prefill,
                "recomputed_tokens": n_recomputed,
                "rejected_tokens": int(n_rejected.sum()),
                # What a drop of the step would lose.
                "new_tokens": int((late - new).sum()) - self._filtered(who, new, late),
                "max_seq_len": int((start + message.n_tokens).max()),
                "n_preempted": len(message.preempted),
                "cache_hit_ratio": n_hits / n_queried if n_queried else None,
            },
        )
        self._count_drop(message.step)

    def _mix(self, who: np.ndarray) -> None:
        """Leave out requests that run on KV of other weights, with what they have so far."""
        high = self._counts["high_water"][who]
        before = self._filtered(who, high * 0, high)
        for phase, left_out in self._left_out.items():
            self._counts[phase][who] = True
            for number in who.tolist():
                left_out.setdefault(number, MIXED_WEIGHTS)
        self._n_filtered += int(high.sum()) - before

    def _refer(self, reference: Reference, step: int) -> None:
        owner = NO_REFERENCE if reference.ref_request is None else reference.ref_request
        who, start, stop = np.array([[reference.request], [reference.start], [reference.stop]])
        reason = tables.EXTERNAL if reference.external else None
        self._pieces.add(who, start, stop, CACHE_REF, NO_STEP, owner, reason=reason)
        self._n_filtered += self._filtered(who, start, stop)
        high = self._counts["high_water"]
        high[reference.request] = max(high[reference.request], reference.stop)

    def _executed(self, message: StepExecuted) -> None:
        message = self._drawn_by_all(message)
        if message.stage < self._last_stage:
            return  # a step of several pipeline stages is described by the last of them
        self._last_stage = message.stage
        self._staging_depth = message.queue_depth_stage1
        self._ring_depth = message.queue_depth_stage2
        self._lane_depth = message.queue_depth_readouts
        self._steps.put(message.step, _of_columns(message))

    def _drawn_by_all(self, message: StepExecuted) -> StepExecuted:
        """Return the message with the lowest probability that a stage has said of the step."""
        if message.inclusion is None:
            return message
        self._drawn_to[message.stage] = message.step
        bits = self._steps.get(message.step, "inclusion")
        if bits is not None:
            before = float(np.int64(bits).view(np.float64))
            message = replace(message, inclusion=min(before, message.inclusion))
        self._steps.put(message.step, {"inclusion": message.inclusion})
        return message

    def _lose(self, message: StepLost) -> None:
        before = self._lost.get(message.step)
        if before is None or _rank(message) < _rank(before):
            self._count_drop(message.step, -1)
            self._lost[message.step] = message
            self._count_drop(message.step)

    def _count_drop(self, step: int, sign: int = 1) -> None:
        # A step that the scheduler has not reported yet is counted when it does.
        if step in self._lost:
            n_tokens = self._steps.get(step, "new_tokens") or 0
            self._dropped[self._lost[step].reason] += sign * n_tokens

    def _finished(self, message: RequestFinished) -> None:
        self._requests.end(message)
        unserved = message.reason in tables.UNSERVED
        self._counts["generated"][message.request] = (
            NO_REQUEST if unserved else message.generated_len
        )
        self._n_finished += 1
        if not unserved:
            high, due = self._due(np.array([message.request]))
            self._n_aborted += int((due - high).sum())

    def _due(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return up to where requests are known, and the positions that belong to them."""
        counts = self._counts[numbers]
        high, length = counts["high_water"], counts["prompt_len"]
        generated = _generated(counts["generated"], high, length)
        due = np.where(generated > 0, length + generated - 1, length)
        return high, np.maximum(due, high)

    TAKES: ClassVar[dict[type, Callable[..., None]]] = {
        RequestArrived: _arrived,
        StepScheduled: _scheduled,
        StepExecuted: _executed,
        StepLost: _lose,
        TokensSampled: lambda self, message: self.sampled.give(message),
        LogitsRead: lambda self, message: self.sampled.read(message),
        RequestFinished: _finished,
    }
    """By message, what takes it."""

    def tables(
        self,
        acknowledged: Mapping[Lot, int],
        client: ClientFacts,
        logged_drops: frozenset[int] = frozenset(),
        design: Design | None = None,
        policy: str = "block",
    ) -> CensusTables:
        """Return the census after the run has ended (spec 0.1 section 7.1).

        Args:
            acknowledged: per phase and hooks, the last step whose rows are committed.
            logged_drops: steps in the writer's committed drop log. A drop that a killed writer did
                not log is known to the scheduler side alone, and counts as aborted.
            design: how rows were drawn, ``None`` where every row was to be stored.
            policy: of overflow: ``drop_newest`` lost what a step was too full to draw (7.10).
        """
        dropped = {step: lost.reason for step, lost in self._lost.items() if step in logged_drops}
        prompts = {prompt.key: prompt for prompt in client.prompts}
        unserved = self._unserved(prompts)
        requests = self._request_table(client, prompts, unserved)
        roles, origins = self._role_table(client), self._origin_table(prompts, unserved)
        sampled = self.sampled.table(self._n_positions())
        drawn = None
        if design is not None:
            aside: dict[TableName, pa.Table] = {
                "requests": requests,
                "roles": roles,
                "sampled": sampled,
            }
            drawn = self._drawn(design, aside, logged_drops if policy == "drop_newest" else None)
        pieces = self._pieces.settled(
            self._counts["prompt_len"],
            acknowledged,
            dropped,
            self._left_out,
            frozenset(self._lost) - logged_drops,
            drawn,
            self._asked,
            self._hooks,
        )
        self._add_uncomputed(pieces)
        spans = span_table(pieces)
        steps = self._step_table(pieces)
        totals = {
            "requests": requests.num_rows,
            "scheduled_tokens": self._scheduled_tokens,
            "recomputed": int(np.sum(steps["recomputed_tokens"].to_numpy())),
            "rejected": int(np.sum(steps["rejected_tokens"].to_numpy())),
            **pieces.totals(),
        }
        return CensusTables(requests, steps, spans, roles, origins, sampled, totals)

    def _drawn(
        self,
        design: Design,
        aside: dict[TableName, pa.Table],
        dropped_in: frozenset[int] | None,
    ) -> Drawn:
        numbers, known = self._steps.table("inclusion")
        inclusion = known["inclusion"].to_numpy(zero_copy_only=False)
        n = len(self._counts)
        rules = Shares.of(
            design,
            lambda request: np.where(request < n, request, -1),
            self._counts["prompt_len"],
            aside,
        )
        first_step = self._counts["first_step"]
        return Drawn(design, numbers, inclusion, first_step, rules, dropped_in)

    def _n_positions(self) -> np.ndarray:
        prompt, high = self._counts["prompt_len"], self._counts["high_water"]
        n_positions: np.ndarray = prompt + _generated(self._counts["generated"], high, prompt)
        return n_positions

    def _add_uncomputed(self, pieces: StepPieces) -> None:
        """Add the positions that belong to requests and were never computed, as aborted."""
        numbers = np.flatnonzero(self._counts["generated"] != NO_REQUEST)
        sampled, (high, due) = self._counts["generated"][numbers], self._due(numbers)
        for ended, reason in (
            (sampled != RUNNING, "request_aborted"),
            (sampled == RUNNING, "engine_ended"),
        ):
            pieces.add(numbers[ended], high[ended], due[ended], ABORTED, NO_STEP, reason=reason)

    def _step_table(self, pieces: StepPieces) -> pa.Table:
        numbers, known = self._steps.table("t_ns")
        columns: dict[str, object] = {"step": numbers}
        by_step = pieces.tokens_by_step(numbers)
        for name in tables.SCHEMAS["steps"].names[1:]:
            columns[name] = by_step.get(name.removesuffix("_tokens"), known[name])
        return tables.build("steps", columns)

    def _unserved(self, prompts: dict[str, PromptFact]) -> list[PromptFact]:
        left = dict(prompts)
        for request in self._requests.all():
            left.pop(_key_of(request.arrived.external_id, left), None)
        return list(left.values())

    def _request_table(
        self, client: ClientFacts, prompts: dict[str, PromptFact], unserved: list[PromptFact]
    ) -> pa.Table:
        parts = [tables.empty("requests")]
        for batch in self._requests.batches():
            rows = [
                _request_row(
                    request,
                    high=int(self._counts["high_water"][request.arrived.request]),
                    cached=int(self._counts["cached"][request.arrived.request]),
                    prompt=_prompt_of(request.arrived.external_id, prompts),
                    engine_cached=client.engine_cached.get(request.arrived.external_id),
                )
                for request in batch
            ]
            parts.append(_rows_table(rows))
        served = pa.concat_tables(parts).sort_by("request")
        parts, why = [served], client.unbegun or PROCESS_ENDED
        for first in range(0, len(unserved), BATCH_REQUESTS):
            some = enumerate(unserved[first : first + BATCH_REQUESTS], served.num_rows + first)
            parts.append(_rows_table([_unserved_row(number, p, why) for number, p in some]))
        return pa.concat_tables(parts).combine_chunks()

    def _origin_table(self, prompts: dict[str, PromptFact], unserved: list[PromptFact]) -> pa.Table:
        if all(prompt.origin is None for prompt in prompts.values()):
            return tables.empty("origins")
        served = (
            (request.arrived.request, _prompt_of(request.arrived.external_id, prompts))
            for request in self._requests.all()
        )
        n_served = sum(len(batch) for batch in self._requests.batches())
        lines = [
            (request, *astuple(prompt.origin))
            for request, prompt in itertools.chain(served, enumerate(unserved, n_served))
            if prompt is not None and prompt.origin is not None
        ]
        return _table("origins", lines).sort_by("request")

    def _role_table(self, client: ClientFacts) -> pa.Table:
        known = {prompt.key: prompt.roles for prompt in client.prompts if prompt.roles}
        lines: list[tuple[object, ...]] = []
        for request in self._requests.all():
            arrived, finished = request.arrived, request.finished
            if finished and finished.reason in tables.UNSERVED:
                continue
            generated = finished.generated_len if finished else 0
            n_positions = arrived.prompt_len + max(generated - 1, 0)
            of_engine = arrived.roles + (finished.roles if finished else "")
            lines += [
                (arrived.request, start, min(stop, n_positions), role)
                for start, stop, role in intervals(known.get(arrived.external_id, of_engine))
                if start < n_positions
            ]
        return _table("roles", lines).sort_by([("request", "ascending"), ("start", "ascending")])


def _table(name: tables.TableName, lines: list[tuple[object, ...]]) -> pa.Table:
    if not lines:
        return tables.empty(name)
    columns = zip(tables.SCHEMAS[name].names, zip(*lines, strict=True), strict=True)
    return tables.build(name, dict(columns))


def _key_of(external_id: str, prompts: dict[str, PromptFact]) -> str:
    """Return the key of a request's prompt; that of one of several samples is ``N_KEY``."""
    number, _, key = external_id.partition("_")
    is_sample = external_id not in prompts and key in prompts and number.isdecimal()
    return key if is_sample else external_id


def _prompt_of(external_id: str, prompts: dict[str, PromptFact]) -> PromptFact | None:
    key = _key_of(external_id, prompts)
    prompt = prompts.get(key)
    if prompt is None or key == external_id:
        return prompt
    return replace(prompt, external_id=f"{external_id.removesuffix(key)}{prompt.external_id}")


def _rows_table(rows: list[dict[str, object]]) -> pa.Table:
    names = tables.SCHEMAS["requests"].names
    return tables.build("requests", {name: [row.get(name) for row in rows] for name in names})


def _of_columns(message: StepScheduled | StepExecuted) -> dict[str, int | float | str | None]:
    return {name: getattr(message, name) for name in _COLUMNS[type(message)]}


def _rank(lost: StepLost) -> tuple[bool, int]:
    """Return which of several stages' reasons counts: that nothing is left, else the first's."""
    return lost.reason != tables.READOUTS_FULL, lost.stage


def _generated(sampled: np.ndarray, high_water: np.ndarray, prompt_len: np.ndarray) -> np.ndarray:
    """Return the sampled tokens; for a request that never ended, those that were fed."""
    return np.where(sampled == RUNNING, np.maximum(high_water - prompt_len, 0), sampled)


def _request_row(
    request: LoggedRequest,
    *,
    high: int,
    cached: int,
    prompt: PromptFact | None,
    engine_cached: int | None,
) -> dict[str, object]:
    arrived, finished = request.arrived, request.finished
    reason, why = _finish_reason(finished)
    if finished is not None and not finished.cached_as_reported:
        engine_cached = None
    fed = max(high - arrived.prompt_len, 0)
    conversation, turn = prompt.turn if prompt else arrived.turn
    return {
        "request": arrived.request,
        "external_id": prompt.external_id if prompt else arrived.external_id,
        "internal_id": arrived.internal_id,
        "source": prompt.source if prompt else None,
        "source_row": prompt.source_row if prompt else None,
        "prompt_len": arrived.prompt_len,
        "generated_len": finished.generated_len if finished else fed,
        "cached_tokens": max(cached, 0),
        "engine_cached_tokens": engine_cached,
        "n_preemptions": request.n_preemptions,
        "arrival_ns": arrived.arrival_ns,
        "first_token_ns": request.first_token_ns,
        "finish_ns": finished.t_ns if finished else None,
        "finish_reason": reason,
        "reason": why,
        "token_digest": (finished.token_digest or None) if finished else None,
        "sampling": arrived.sampling,
        "block_digests": list(arrived.block_digests) if arrived.block_digests else None,
        "adapter": arrived.adapter[0] if arrived.adapter else None,
        "adapter_sha256": arrived.adapter[1] if arrived.adapter else None,
        "labels": prompt.labels if prompt else None,
        "conversation": conversation,
        "turn": turn,
        "hooks": ",".join(arrived.left_out.hooks) if arrived.left_out.hooks else None,
    }


def _finish_reason(finished: RequestFinished | None) -> tuple[str, str | None]:
    if finished is None:
        return "unfinished", "the run ended before the request did"
    if finished.reason in tables.UNSERVED:
        return finished.reason, HANDED_ON
    if finished.reason in tables.FINISH_REASONS:
        return finished.reason, None
    return "error", f"the engine's own reason: {finished.reason}"


def _unserved_row(number: int, prompt: PromptFact, unbegun: str) -> dict[str, object]:
    zeros = ("generated_len", "cached_tokens", "n_preemptions")
    return {
        "request": number,
        "external_id": prompt.external_id,
        "source": prompt.source,
        "source_row": prompt.source_row,
        "prompt_len": prompt.prompt_len,
        "labels": prompt.labels,
        **dict(zip(("conversation", "turn"), prompt.turn, strict=True)),
        "finish_reason": "unbegun" if prompt.skip is None else "skipped",
        "reason": unbegun if prompt.skip is None else prompt.skip,
        **dict.fromkeys(zeros, 0),
    }
