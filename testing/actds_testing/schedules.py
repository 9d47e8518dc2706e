"""A truthful simulated serving schedule as pure tables: what a conforming writer would record.

The scheduler below really schedules: a token budget, chunked prefill, decode, a prefix cache by
block, eviction, preemption with recomputation, aborts, a row computed after the stop, skips. The
tables are written down from what it did, never derived from the rules that the checks apply.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from actds.format import tables
from actds_testing.independent.draw import number

BLOCK = 4
WALL_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Schedule:
    """The tables of one simulated run; ``rows`` in the order in which they were computed."""

    requests: pa.Table
    steps: pa.Table
    spans: pa.Table
    drops: pa.Table
    rows: pa.Table
    token_ids: list[list[int]]
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    """Request, position and step of each sampled token."""
    computed: pa.Table | None = None
    """The rows before some of them were not drawn; ``None``: all are in ``rows``."""

    def with_(self, **changed: pa.Table) -> Schedule:
        return replace(self, **changed)


def thinned(
    schedule: Schedule,
    salt: int,
    shares: Mapping[int, float],
    unit: str = "row",
    flipped: tuple[int, int] | None = None,
    rules: Callable[[int, int], float] = lambda request, position: 1.0,
) -> Schedule:
    """Return a schedule whose rows are drawn by hash, each with the probability of its step.

    Args:
        shares: probability by step; 1 where it is left out.
        rules: returns the share of a position, by which that is multiplied.
        flipped: request and position of a row that is drawn against the hash: in all tables.
    """
    lines, first = schedule.rows.to_pylist(), dict[int, int]()
    for line in lines:
        first.setdefault(line["request"], line["step"])
    row_at, missing, of_step = {}, {}, {}
    for line in lines:
        by_request = unit == "request"
        share = shares.get(first[line["request"]] if by_request else line["step"], 1.0)
        u = number(salt, line["request"], 0 if by_request else line["position"])
        key = line["request"], line["position"]
        of_step[key], line["inclusion"] = share, share * rules(*key)
        is_drawn = (u < line["inclusion"]) != (key == flipped)
        (row_at if is_drawn else missing)[key] = line
    spans = []
    for span in schedule.spans.to_pylist():
        if span["disposition"] != "captured":
            spans.append(span)
            continue
        for position in range(span["start"], span["stop"]):
            key = (span["request"], position)
            line = row_at.get(key) or missing[key]
            piece = {**span, "start": position, "stop": position + 1, "step": line["step"]}
            if key in missing:
                piece |= {"disposition": "thinned", "reason": tables.NOT_DRAWN}
                piece["inclusion"] = of_step[key]
            alike = ("request", "disposition", "inclusion")
            last = spans[-1] if spans and position > span["start"] else {}
            if last and all(last.get(name) == piece.get(name) for name in alike):
                last["stop"] = position + 1
            else:
                spans.append(piece)
    lost = Counter(line["step"] for line in missing.values())
    steps = schedule.steps.to_pylist()
    for step in steps:
        step["inclusion"] = shares.get(step["step"], 1.0)
        step["thinned_tokens"] = lost[step["step"]]
        step["captured_tokens"] -= lost[step["step"]]
    return replace(
        schedule,
        rows=table_of("tokens", list(row_at.values())),
        spans=table_of("spans", spans),
        steps=table_of("steps", steps),
        computed=schedule.rows,
    )


def busy_shares(schedule: Schedule, share: float = 0.25, n_rows: int = 12) -> dict[int, float]:
    """Return a share by step for each step that computed at least so many rows."""
    steps = Counter(schedule.rows["step"].to_pylist())
    return {step: share for step, n in steps.items() if n >= n_rows}


@dataclass
class _Request:
    number: int
    tokens: list[int]
    prompt_len: int
    target: int  # sampled tokens before it stops
    finish: str
    abort_after: int | None
    generated: int = 0
    computed: int = 0  # positions with KV now
    high_water: int = 0
    admitted: bool = False
    cached: int = 0
    n_preemptions: int = 0
    n_steps: int = 0
    done: bool = False
    kinds: dict[int, tuple[str, str | None, int | None, int | None]] = field(default_factory=dict)


def simulate(
    n_requests: int = 12,
    seed: int = 0,
    *,
    drops: bool = False,
    cache: bool = True,
    filtered: bool = False,
    merge: bool = True,
    budget: int = 24,
    turns: bool = False,
    longest: int = 8,
) -> Schedule:
    """Return the schedule of a run; the same arguments give the same schedule.

    With ``turns`` every other request goes on from the answer to the one before it. Answers have
    up to ``longest`` tokens.
    """
    one = _Simulator(n_requests, seed, drops, cache, filtered, merge, budget, turns, longest)
    return one.run()


class _Simulator:
    def __init__(
        self,
        n_requests: int,
        seed: int,
        drops: bool,
        cache: bool,
        filtered: bool,
        merge: bool,
        budget: int,
        turns: bool,
        longest: int,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.drops, self.cache, self.filtered, self.merge = drops, cache, filtered, merge
        self.budget, self.turns, self.longest = budget, turns, longest
        self.blocks: dict[tuple[int, ...], dict[int, int]] = {}  # prefix -> origin per position
        self.rows: list[tuple[object, ...]] = []
        self.steps: list[dict[str, object]] = []
        self.drop_log: list[dict[str, object]] = []
        self.sampled: list[tuple[int, int, int]] = []
        prefixes = [self._words(int(self.rng.integers(8, 20))) for _ in range(3)]
        self.requests: list[_Request] = []
        for i in range(n_requests):
            self.requests.append(self._request(i, prefixes))

    def _words(self, n: int) -> list[int]:
        return [int(token) for token in self.rng.integers(10, 5000, n)]

    def _request(self, number: int, prefixes: list[list[int]]) -> _Request:
        prefix = prefixes[int(self.rng.integers(len(prefixes)))]
        prompt = [1, *prefix[: int(self.rng.integers(2, len(prefix) + 1))]]
        prompt += self._words(int(self.rng.integers(0, 12)))
        if self.turns and number % 2:
            prompt = self.requests[-1].tokens + self._words(3)
        target = int(self.rng.integers(1, self.longest + 1))
        finish = ("stop", "length", "abort")[int(self.rng.choice(3, p=(0.5, 0.35, 0.15)))]
        if number % 11 == 7:
            finish = "skipped"
        abort_after = int(self.rng.integers(0, 4)) if finish == "abort" else None
        tokens = prompt + self._words(target)
        return _Request(number, tokens, len(prompt), target, finish, abort_after)

    def run(self) -> Schedule:
        waiting = [request for request in self.requests if request.finish != "skipped"]
        running: list[_Request] = []
        step = 0
        while waiting or running:
            step += 1 + int(self.rng.random() < 0.1)  # schedules of no token consume numbers
            if len(running) > 1 and self.rng.random() < 0.15:
                victim = running.pop()
                victim.computed = 0
                victim.n_preemptions += 1
                waiting.insert(0, victim)
                n_preempted = 1
            else:
                n_preempted = 0
            if self.rng.random() < 0.1:
                self.blocks.clear()
            batch, left = [], self.budget
            for request in running:
                take = min(left, request.prompt_len + request.generated - request.computed)
                batch.append((request, take))
                left -= take
            while waiting and left and len(running) < 4:
                request = waiting.pop(0)
                self._admit(request)
                known = request.prompt_len + request.generated
                take = min(left, known - request.computed)
                running.append(request)
                batch.append((request, take))
                left -= take
            scheduled = [(request, n) for request, n in batch if n > 0]
            self._execute(step, scheduled, len(waiting), len(running), n_preempted)
            running = [request for request in running if not request.done]
        return self._tables()

    def _admit(self, request: _Request) -> None:
        """Look the prompt's full blocks up; at least its last known token is computed."""
        hit = 0
        known = request.prompt_len + request.generated
        while self.cache and hit + BLOCK < known:
            origins = self.blocks.get(tuple(request.tokens[: hit + BLOCK]))
            if origins is None:
                break
            for position in range(hit, hit + BLOCK):
                if position >= request.high_water:
                    request.kinds[position] = ("cache_ref", None, None, origins[position])
            hit += BLOCK
        if not request.admitted:
            request.cached, request.admitted = hit, True
        request.computed = hit
        request.high_water = max(request.high_water, hit)

    def _execute(
        self,
        step: int,
        scheduled: list[tuple[_Request, int]],
        waiting: int,
        running: int,
        n_preempted: int,
    ) -> None:
        lose = self.drops and self.rng.random() < 0.2
        counts = dict.fromkeys(
            (
                *("prefill", "decode", "captured", "recomputed", "rejected"),
                *("dropped", "aborted", "filtered", "undelivered"),
            ),
            0,
        )
        lost: list[tuple[_Request, int, int]] = []
        longest = 0
        for request, n in scheduled:
            start, stop = request.computed, request.computed + n
            longest = max(longest, stop)
            past_stop = request.prompt_len + request.target - 1
            for position in range(start, stop):
                counts["prefill" if position < request.prompt_len else "decode"] += 1
                kind = "captured"
                if position < request.high_water:
                    counts["recomputed"] += 1
                    continue
                if position == past_stop:
                    kind = "undelivered"
                elif lose:
                    kind = "dropped"
                elif request.finish == "abort" and position == request.prompt_len:
                    kind = "aborted"  # its shard was never committed
                elif self.filtered and request.tokens[position] % 5 == 0:
                    kind = "filtered"
                self._dispose(request, position, kind, step)
                counts[kind] += 1
            if lose and stop > request.high_water:
                first = max(start, request.high_water)
                end = min(stop, past_stop)
                if end > first:
                    lost.append((request, first, end))
            request.computed = stop
            request.high_water = max(request.high_water, stop)
            request.n_steps += 1
            self._register(request)
            self._finish(request, stop > past_stop, step)
        self._log_drop(step, lost, sum(n for _, n in scheduled), longest)
        self.steps.append(
            {
                "step": step,
                "t_ns": WALL_NS + step * 1_000_000,
                "duration_ns": 900_000,
                "batch_tokens": sum(n for _, n in scheduled),
                "n_requests": len(scheduled),
                **{f"{name}_tokens": count for name, count in counts.items()},
                "max_seq_len": longest,
                "waiting": waiting,
                "running": running,
                "n_preempted": n_preempted,
                "kernel_mode": "eager",
            }
        )

    def _dispose(self, request: _Request, position: int, kind: str, step: int) -> None:
        reasons = {
            "dropped": "queue_full",
            "aborted": "writer_ended",
            "filtered": "token_class",
            "undelivered": "after_end",
        }
        request.kinds[position] = (kind, reasons.get(kind), step, None)
        if kind == "captured":
            prefill = position < request.prompt_len
            self.rows.append(
                (
                    request.number,
                    position,
                    request.tokens[position],
                    "prefill" if prefill else "decode",
                    step,
                    request.n_preemptions,
                    request.n_steps,
                    3 if request.tokens[position] == 1 else 0,
                )
            )

    def _register(self, request: _Request) -> None:
        for end in range(BLOCK, request.computed + 1, BLOCK):
            key = tuple(request.tokens[:end])
            origins = {}
            for position in range(end - BLOCK, end):
                kind = request.kinds[position]
                origins[position] = kind[3] if kind[0] == "cache_ref" else request.number
            # One reference names one request: a block of two origins is not offered.
            if len(set(origins.values())) == 1:
                self.blocks.setdefault(key, origins)

    def _finish(self, request: _Request, after_stop: bool, step: int) -> None:
        if after_stop:
            request.done = True
            return
        if request.abort_after == 0 and request.generated == 0:
            request.done = True  # the client leaves after the first chunk
            return
        if request.computed < request.prompt_len + request.generated:
            return  # a chunk of the prompt, or recomputation: nothing is sampled
        self.sampled.append((request.number, request.prompt_len + request.generated, step))
        request.generated += 1
        if request.abort_after is not None and request.generated > request.abort_after:
            request.done = True
            return
        if request.generated == request.target:
            # Scheduling ahead computes one position past the stop in some steps.
            ahead = request.finish == "stop" and self.rng.random() < 0.3
            request.done = not ahead

    def _log_drop(
        self, step: int, lost: list[tuple[_Request, int, int]], batch: int, longest: int
    ) -> None:
        if not lost:
            return
        event = len({entry["drop"] for entry in self.drop_log})
        for request, start, stop in lost:
            self.drop_log.append(
                {
                    "drop": event,
                    "t_ns": WALL_NS + step * 1_000_000 + 5,
                    "step": step,
                    "drop_reason": "queue_full",
                    "policy": "drop_newest",
                    "request": request.number,
                    "start": start,
                    "stop": stop,
                    "n_tokens": sum(b - a for _, a, b in lost),
                    "batch_tokens": batch,
                    "max_seq_len": longest,
                    "queue_depth_stage2": 8,
                }
            )

    def _tables(self) -> Schedule:
        names = [n for n in tables.SCHEMAS["tokens"].names if n not in tables.OF_SAMPLES]
        columns = list(zip(*self.rows, strict=True)) if self.rows else [()] * len(names)
        return Schedule(
            table_of("requests", [self._request_record(request) for request in self.requests]),
            table_of("steps", self.steps),
            table_of("spans", [span for request in self.requests for span in self._spans(request)]),
            table_of("drops", self.drop_log),
            tables.build("tokens", dict(zip(names, map(list, columns), strict=True))),
            [request.tokens for request in self.requests],
            self.sampled,
        )

    def _request_record(self, request: _Request) -> dict[str, object]:
        skipped = request.finish == "skipped"
        fed = request.prompt_len + max(request.generated - 1, 0)
        ids = np.asarray(request.tokens[:fed], "<u4").tobytes()
        return {
            "request": request.number,
            "external_id": f"prompt-{request.number}",
            "source": "synthetic.jsonl",
            "source_row": request.number,
            "prompt_len": request.prompt_len,
            "generated_len": request.generated,
            "cached_tokens": request.cached,
            "engine_cached_tokens": None if skipped else request.cached,
            "n_preemptions": request.n_preemptions,
            "arrival_ns": WALL_NS,
            "finish_ns": None if skipped else WALL_NS + 1_000_000_000,
            "finish_reason": request.finish,
            "reason": "E004 prompt too long" if skipped else None,
            "token_digest": None if skipped else hashlib.sha256(ids).hexdigest(),
            "sampling": '{"max_tokens":8}',
        }

    def _spans(self, request: _Request) -> list[dict[str, object]]:
        if request.finish == "skipped":
            return []
        owed = request.prompt_len + max(request.generated - 1, 0)
        spans: list[dict[str, object]] = []
        for position in range(max(owed, max(request.kinds, default=-1) + 1)):
            kind, reason, step, origin = request.kinds.get(
                position, ("aborted", "client_abort", None, None)
            )
            last = spans[-1] if spans else None
            same_step = last is not None and last["step"] == step
            if (
                last is not None
                and (last["disposition"], last["reason"]) == (kind, reason)
                and last["ref_request"] == origin
                and (last["step"] is None) == (step is None)
                and (self.merge or same_step)
            ):
                last["stop"] = position + 1
                continue
            spans.append(
                {
                    "request": request.number,
                    "start": position,
                    "stop": position + 1,
                    "disposition": kind,
                    "reason": reason,
                    "step": step,
                    "ref_request": origin,
                }
            )
        return spans


def table_of(name: tables.TableName, records: list[dict[str, object]]) -> pa.Table:
    """Return a table of the spec from records; what a record leaves out is null, or not thinned."""
    names = tables.SCHEMAS[name].names
    defaults = tables.OF_SAMPLES
    columns = {key: [r.get(key, defaults.get(key)) for r in records] for key in names}
    return tables.build(name, columns)
