"""The tables of a simulated run, under the schemas of the format.

Right of the losses. Imports what it puts into tables, and ``actds.format.tables``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.format import tables
from actds_testing.simulate.content import BOS, N_SPECIAL, Computed, Positions, Rows
from actds_testing.simulate.pipeline import Pipeline
from actds_testing.simulate.scenario import Scenario
from actds_testing.simulate.scheduler import Schedule
from actds_testing.simulate.traffic import SOURCES, Traffic

__all__ = [
    "HOOK",
    "WALL_NS",
    "dispositions",
    "drop_table",
    "occupancy_table",
    "readout_table",
    "request_table",
    "span_table",
    "stall_table",
    "step_table",
    "token_table",
]

HOOK = "resid_post.0"
WALL_NS = 1_780_000_000_000_000_000
"""Wall clock of the first moment of a simulated run."""
CAPTURED, CACHE_REF, UNDELIVERED, DROPPED = 0, 1, 3, 5
"""Codes of positions; from ``DROPPED`` on they are reasons of a drop."""
_REASONS = ("queue_full", "dma_backpressure")
_LATENCY_STEPS = 64

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]


def dispositions(
    computed: Computed,
    positions: Positions,
    plan: Schedule,
    lost: npt.NDArray[np.bool_],
    pipeline: Pipeline,
    cancelled: npt.NDArray[np.bool_],
) -> Codes:
    """Return what became of every position, as codes, int8 ``(n_positions,)``.

    The last computed position of a cancelled request comes after its end: it is undelivered.
    Requests that lost it to an overflow are taken out of ``cancelled``.
    """
    codes = np.full(len(positions.step), CACHE_REF, np.int8)
    codes[computed.at] = CAPTURED
    reason = np.zeros(len(plan.n_tokens), np.int8)
    for step, word in pipeline.dropped.items():
        reason[step] = _REASONS.index(word)
    codes[computed.at[lost]] = DROPPED + reason[computed.step[lost]]
    last = positions.offset[1:] - 1
    cancelled &= codes[last] == CAPTURED
    codes[last[cancelled]] = UNDELIVERED
    return codes


def _runs(*changing: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Return begin and end of the stretches in which no column changes."""
    n = len(changing[0])
    if not n:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    edge = np.ones(n, bool)
    edge[1:] = changing[0][1:] != changing[0][:-1]
    for column in changing[1:]:
        edge[1:] |= column[1:] != column[:-1]
    begin = np.flatnonzero(edge)
    return begin, np.append(begin[1:], n)


def _words(words: Sequence[str | None], codes: npt.NDArray[Any]) -> pa.Array:
    return pa.array(words, pa.string()).take(pa.array(codes.astype(np.int64)))


def _ns(seconds: npt.ArrayLike) -> Ints:
    return WALL_NS + np.round(np.asarray(seconds, np.float64) * 1e9).astype(np.int64)


def span_table(positions: Positions, codes: Codes, plan: Schedule) -> pa.Table:
    """Return the spans, as long as they may be."""
    begin, end = _runs(positions.request, codes)
    code = codes[begin]
    request = positions.request[begin].astype(np.int64)
    step = positions.step[begin].astype(np.int64)
    cached = code == CACHE_REF
    words = [*tables.DISPOSITIONS[:2], "", "undelivered", "", "dropped", "dropped"]
    reasons = [None, None, None, "after_end", None, *_REASONS]
    return tables.build(
        "spans",
        {
            "request": request,
            "start": positions.position[begin],
            "stop": positions.position[end - 1] + 1,
            "disposition": _words(words, code),
            "reason": _words(reasons, code),
            "step": pa.array(step, pa.uint64(), mask=cached, from_pandas=False),
            "ref_request": pa.array(plan.reference[request], pa.int64(), mask=~cached),
        },
    )


def request_table(
    scenario: Scenario,
    traffic: Traffic,
    plan: Schedule,
    positions: Positions,
    cancelled: npt.NDArray[np.bool_],
) -> pa.Table:
    """Return the requests, each with the digest of its tokens."""
    n = len(plan.prompt)
    number = np.arange(n)
    ids = positions.token_id.astype("<u4")
    sampled = plan.generated - cancelled
    bounds = positions.offset.tolist()
    ends = (positions.offset[1:] - cancelled).tolist()
    digests = [
        hashlib.sha256(ids[begin:end].data).hexdigest()
        for begin, end in zip(bounds, ends, strict=False)
    ]
    end_s = plan.t_s + plan.duration_s
    last_step = plan.last_prefill + plan.generated - 1
    decoded = plan.generated > 1
    first_fed = np.where(decoded, plan.last_prefill + 1, 0)
    finish = np.where(cancelled, 2, np.where(np.array(traffic.stopped[:n], bool), 0, 1))
    return tables.build(
        "requests",
        {
            "request": number,
            "external_id": [f"sim-{i}" for i in range(n)],
            "internal_id": [None] * n,
            "source": _words(list(SOURCES), np.array(traffic.source[:n])),
            "source_row": number,
            "prompt_len": plan.prompt,
            "generated_len": sampled,
            "cached_tokens": plan.cached,
            "engine_cached_tokens": plan.cached,
            "n_preemptions": np.zeros(n, np.int64),
            "arrival_ns": _ns(traffic.arrival_s[:n]),
            "first_token_ns": pa.array(_ns(plan.t_s[first_fed]), mask=~decoded),
            "finish_ns": _ns(end_s[last_step]),
            "finish_reason": _words(["stop", "length", "abort"], finish),
            "reason": [None] * n,
            "token_digest": digests,
            "sampling": [None] * n,
            "block_digests": [None] * n,
            "adapter": [None] * n,
            "adapter_sha256": [None] * n,
            "labels": [None] * n,
            "conversation": [None] * n,
            "turn": [None] * n,
            "hooks": [None] * n,
        },
    )


def _queue_columns(scenario: Scenario, plan: Schedule, pipeline: Pipeline) -> dict[str, Any]:
    """Return the queue columns of every step."""
    latency = np.concatenate([np.zeros(_LATENCY_STEPS - 1), pipeline.latency_s])
    slowest = np.lib.stride_tricks.sliding_window_view(latency, _LATENCY_STEPS).max(axis=1)
    first = plan.chunk_start == np.where(
        plan.cached[plan.chunk_request] > 0, plan.cached[plan.chunk_request], 0
    )
    n_steps = len(plan.n_tokens)
    step, who = plan.chunk_step[first], plan.chunk_request[first]
    hits = np.bincount(step, plan.cached[who], n_steps)
    asked = np.bincount(step, plan.prompt[who], n_steps)
    return {
        "queue_depth_stage1": np.array(pipeline.depth1),
        "queue_depth_stage2": np.array(pipeline.depth2),
        "queue_depth_stage3": np.array(pipeline.depth3),
        "disk_write_latency_p99": slowest,
        "compression_backlog_bytes": np.array(pipeline.backlog) * scenario.d_model * 2,
        "cache_hit_ratio": pa.array(hits / np.maximum(asked, 1), mask=asked == 0),
    }


def _longest(computed: Computed, n_steps: int) -> Ints:
    longest = np.zeros(n_steps, np.int64)
    np.maximum.at(longest, computed.step, computed.position.astype(np.int64) + 1)
    return longest


def step_table(
    scenario: Scenario,
    plan: Schedule,
    computed: Computed,
    codes: Codes,
    pipeline: Pipeline,
) -> pa.Table:
    """Return the steps; sums are of the tables' own rows."""
    n_steps = len(plan.n_tokens)
    code = codes[computed.at]

    def count(which: npt.NDArray[np.bool_]) -> Ints:
        return np.bincount(computed.step[which], minlength=n_steps)

    prefill = count(computed.prefill)
    decode = plan.n_tokens - prefill
    n_chunks = np.bincount(plan.chunk_step, minlength=n_steps)
    # KV blocks hold the contexts of what was scheduled, of at most 2,048 positions each.
    ends = np.append(computed.request[1:] != computed.request[:-1], True)
    ends |= np.append(computed.step[1:] != computed.step[:-1], True)
    context = np.bincount(computed.step[ends], computed.position[ends] + 1.0, n_steps)
    nothing, zero = [None] * n_steps, np.zeros(n_steps, np.int64)
    return tables.build(
        "steps",
        {
            "step": np.arange(n_steps),
            "t_ns": _ns(plan.t_s),
            "duration_ns": np.round(plan.duration_s * 1e9).astype(np.int64),
            "batch_tokens": plan.n_tokens,
            "n_requests": n_chunks + decode,
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "captured_tokens": count(code == CAPTURED),
            "recomputed_tokens": zero,
            "dropped_tokens": count(code >= DROPPED),
            "aborted_tokens": zero,
            "filtered_tokens": zero,
            "undelivered_tokens": count(code == UNDELIVERED),
            "rejected_tokens": zero,
            "max_seq_len": _longest(computed, n_steps),
            "waiting": plan.waiting,
            "running": plan.running,
            "n_preempted": zero,
            "kv_usage": np.minimum(context / (scenario.max_num_seqs * 2048.0), 1.0),
            **_queue_columns(scenario, plan, pipeline),
            "kernel_mode": _words(["full", "compiled"], prefill > 0),
            "padded_tokens": nothing,
            "drafted_tokens": nothing,
            "accepted_tokens": nothing,
        },
    )


def drop_table(
    scenario: Scenario, plan: Schedule, computed: Computed, codes: Codes, steps: pa.Table
) -> pa.Table:
    """Return the drop log: one event for each step that lost rows, one line for each range."""
    code = codes[computed.at]
    lost = np.flatnonzero(code >= DROPPED)
    if not len(lost):
        return tables.empty("drops")
    at, step = computed.at[lost], computed.step[lost].astype(np.int64)
    request = computed.request[lost]
    begin, end = _runs(request, step, at - np.arange(len(at)))
    order = np.argsort(step[begin], kind="stable")
    begin, end = begin[order], end[order]
    event_step, event = np.unique(step[begin], return_inverse=True)
    n_tokens = np.bincount(event, end - begin).astype(np.int64)
    of_step = steps.take(pa.array(step[begin]))
    queues = [column.name for column in tables.QUEUES]
    offered = _ns(plan.offered_s)
    return tables.build(
        "drops",
        {
            "drop": event,
            "t_ns": offered[event_step][event],
            "step": step[begin],
            "drop_reason": _words(list(_REASONS), code[lost][begin] - DROPPED),
            "policy": pa.repeat(pa.scalar(scenario.policy), len(begin)),
            "request": request[begin],
            "start": computed.position[lost][begin],
            "stop": computed.position[lost][end - 1] + 1,
            "n_tokens": n_tokens[event],
            "batch_tokens": of_step["batch_tokens"].combine_chunks(),
            "max_seq_len": of_step["max_seq_len"].combine_chunks(),
            **{name: of_step[name].combine_chunks() for name in queues},
        },
    )


def token_table(
    plan: Schedule, positions: Positions, computed: Computed, codes: Codes
) -> tuple[pa.Table, Ints]:
    """Return the rows that are stored, and which computed rows they are."""
    kept = np.flatnonzero(codes[computed.at] == CAPTURED)
    token_id = computed.token_id[kept]
    flags = np.where(token_id < N_SPECIAL, tables.FLAG_SPECIAL, 0)
    flags |= np.where(token_id == BOS, tables.FLAG_BOS, 0)
    columns: dict[str, object] = {
        "request": computed.request[kept].astype(np.uint32),
        "position": computed.position[kept].astype(np.uint32),
        "token_id": token_id,
        "phase": _words(list(tables.PHASES), ~computed.prefill[kept]),
        "step": computed.step[kept].astype(np.uint64),
        "attempt": np.zeros(len(kept), np.uint16),
        "chunk": positions.chunk[computed.at[kept]].astype(np.uint32),
        "flags": flags.astype(np.uint16),
    }
    return tables.build("tokens", columns), kept


def readout_table(computed: Computed, rows: Rows, codes: Codes) -> pa.Table:
    """Return the readouts of every computed row, stored or lost; undelivered ones have none."""
    told = np.flatnonzero(codes[computed.at] != UNDELIVERED)
    readouts = rows.readouts[told]
    n, width = len(told), readouts.shape[1] - 1
    projections = pa.ListArray.from_arrays(
        np.arange(0, (n + 1) * width, width, dtype=np.int32),
        pa.array(np.ascontiguousarray(readouts[:, 1:]).reshape(-1)),
    )
    none = pa.ListArray.from_arrays(np.zeros(n + 1, np.int32), pa.array([], pa.float32()))
    columns: dict[str, object] = {
        "request": computed.request[told].astype(np.uint32),
        "position": computed.position[told].astype(np.uint32),
        "step": computed.step[told].astype(np.uint64),
        "token_id": computed.token_id[told],
        "hook": pa.repeat(pa.scalar(HOOK), n),
        "norm": np.ascontiguousarray(readouts[:, 0]),
        "projections": projections,
        "probes": none,
    }
    return tables.build("readouts", columns)


def stall_table(pipeline: Pipeline) -> pa.Table:
    """Return the waits of the pipeline."""
    waits = pipeline.waits
    return tables.build(
        "stalls",
        {
            "stage": [wait.stage for wait in waits],
            "t_ns": _ns([wait.begin_s for wait in waits]),
            "duration_ns": [round(wait.length_s * 1e9) for wait in waits],
            "depth": [wait.depth for wait in waits],
            "step": [wait.step for wait in waits],
        },
    )


def occupancy_table(scenario: Scenario, plan: Schedule, pipeline: Pipeline) -> pa.Table:
    """Return how long each queue stood at each depth, observed once a step."""
    stages = (
        ("staging", pipeline.depth1, scenario.staging_slots),
        ("ring", pipeline.depth2, scenario.ring_slots),
        ("pool", pipeline.depth3, scenario.pool_rows // scenario.rows_per_shard),
    )
    until = np.append(plan.offered_s[1:], plan.t_s[-1] + plan.duration_s[-1])
    stood_ns = np.round((until - plan.offered_s) * 1e9).astype(np.int64)
    lines: list[tuple[str, int, int, int, int]] = []
    for stage, observed, capacity in stages:
        depth = np.array(observed)
        came = np.append(True, depth[1:] != depth[:-1])
        ns = np.bincount(depth, stood_ns)
        visits = np.bincount(depth, came)
        lines += [(stage, int(d), capacity, int(ns[d]), int(visits[d])) for d in np.unique(depth)]
    names = tables.SCHEMAS["occupancy"].names
    columns = [list(column) for column in zip(*lines, strict=True)]
    return tables.build("occupancy", dict(zip(names, columns, strict=True)))
