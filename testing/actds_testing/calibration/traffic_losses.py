"""Losses of known truth in recorded traffic: what `calibrate_traffic` audits.

The traffic is what `record_traffic` recorded of a real vLLM scheduler; the ids and values are those
of a real model's rows, sequence by sequence, dealt to the requests by the seed. Only the losses are
made up here, so that their truth is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.signal import lfilter  # type: ignore[import-untyped]

from actds.format import tables
from actds_testing.places import BENCHMARKS

__all__ = ["LOSSES", "RECORDED", "Served", "audited_tables", "served"]

TRAFFIC = BENCHMARKS / "traffic"
RECORDED = ("poisson", "gamma", "bursts", "tails", "warm_up", "regimes", "cancelled", "shared")
SOURCES = ("web", "chat", "code", "math", "mail")
N_SPECIAL = 3
HOOK = "resid_post.20"

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Served:
    """A recording with the contents that a seed deals to it.

    Args:
        requests: table of that name, as the two after it.
        steps: one line a step.
        spans: those that hold no computed row: references, and what was never computed.
        request: of each computed token, ``(n_tokens,)``, by request and position.
        position: of each.
        step: place of its step in ``steps``.
        columns: the other columns of ``tokens``.
        token_id: of each.
        values: norm and projections, ``(1 + n_projections, n_tokens)``.
        n: computed tokens of each step, ``(n_steps,)``.
    """

    requests: pa.Table
    steps: pa.Table
    spans: pa.Table
    request: Ints
    position: Ints
    step: Ints
    columns: dict[str, Ints]
    token_id: Ints
    values: Floats
    n: Floats

    @property
    def load(self) -> Floats:
        """Return the moving average of the tokens per step over the last 8, ``(n_steps,)``."""
        return np.asarray(lfilter([1 / 8], [1, -7 / 8], self.n), np.float64)

    def mean(self, x: Floats) -> Floats:
        """Return the mean of a covariate of the tokens over each step, ``(n_steps,)``."""
        total = np.bincount(self.step, x, len(self.n))
        return np.divide(total, self.n, out=np.zeros_like(self.n), where=self.n > 0)

    def lost_with(self, steps: Bools) -> Bools:
        """Return the tokens of lost steps."""
        return steps[self.step]


@cache
def _recording(name: str) -> tuple[pa.Table, ...]:
    return tuple(
        pq.read_table(TRAFFIC / f"{name}{part}.parquet")
        for part in ("", "-requests", "-spans", "-steps")
    )


@cache
def _rows() -> tuple[Ints, Ints, Floats]:
    """Return the ends of the real sequences, their token ids and their values."""
    found = pq.read_table(TRAFFIC / "rows.parquet")
    request = found["request"].to_numpy().astype(np.int64)
    ends = np.append(np.flatnonzero(np.diff(request)) + 1, len(request))
    names = [name for name in found.column_names if name not in ("request", "token_id")]
    values = np.stack([found[name].to_numpy().astype(np.float64) for name in names])
    return ends, found["token_id"].to_numpy().astype(np.int64), values


def served(name: str, random: np.random.Generator) -> Served:
    """Return a recording, each request with the rows of a real sequence drawn at random.

    A request that is longer than its sequence goes on with the sequence's second row.
    """
    tokens, requests, spans, steps = _recording(name)
    columns = {c: tokens[c].to_numpy().astype(np.int64) for c in tokens.column_names}
    request, position = columns.pop("request"), columns.pop("position")
    number = steps["step"].to_numpy().astype(np.int64)
    step = np.searchsorted(number, columns.pop("step"))
    ends, ids, values = _rows()
    starts = np.append(0, ends[:-1])
    drawn = random.integers(0, len(ends), requests["request"].to_numpy().max() + 1)
    length = (ends - starts)[drawn][request]
    wrapped = np.where(position < length, position, 1 + (position - 1) % (length - 1))
    at = starts[drawn][request] + wrapped
    source = random.choice(SOURCES, len(requests), p=(0.4, 0.25, 0.2, 0.13, 0.02))
    column = requests.column_names.index("source")
    return Served(
        requests=requests.set_column(column, "source", pa.array(source)),
        steps=steps,
        spans=spans.filter(pa.compute.not_equal(spans["disposition"], "captured")),
        request=request,
        position=position,
        step=step,
        columns=columns,
        token_id=ids[at],
        values=values[:, at],
        n=np.bincount(step, minlength=len(steps)).astype(np.float64),
    )


def audited_tables(s: Served, lost: Bools) -> dict[str, pa.Table]:
    """Return the tables of a run that lost these tokens, in the form of the spec.

    Args:
        s: what was served.
        lost: ``(n_tokens,)``.

    Spec: 0.1 section 7.
    """
    number = s.steps["step"].to_numpy().astype(np.int64)
    prompt = np.zeros(s.request.max(initial=0) + 1, np.int64)
    prompt[s.requests["request"].to_numpy()[:]] = s.requests["prompt_len"].to_numpy()[:]
    stored = ~lost
    kept: dict[str, Any] = {name: column[stored] for name, column in s.columns.items()}
    made = tables.build("tokens", {
        **kept,
        "request": s.request[stored],
        "position": s.position[stored],
        "token_id": s.token_id[stored],
        "step": number[s.step[stored]],
        "phase": pa.array(np.array(tables.PHASES))
        .take(pa.array((s.position >= prompt[s.request])[stored].astype(np.int8))),
        "flags": np.where(s.token_id[stored] < N_SPECIAL, tables.FLAG_SPECIAL, 0),
    })  # fmt: skip
    gone = np.bincount(s.step, lost, len(number)).astype(np.int64)
    captured = s.steps["captured_tokens"].to_numpy().astype(np.int64) - gone
    steps = s.steps
    for name, column in (("captured_tokens", captured), ("dropped_tokens", gone)):
        at = steps.column_names.index(name)
        steps = steps.set_column(at, steps.schema.field(name), pa.array(column, pa.uint32()))
    return {
        "tokens": made,
        "requests": _whole("requests", s.requests),
        "steps": _whole("steps", steps),
        "spans": _spans(s, lost, number),
        "drops": _drops(s, lost, number),
        "readouts": _readouts(s, number),
    }


def _whole(name: tables.TableName, table: pa.Table) -> pa.Table:
    """Return a table with the columns that the recording lacks: null, or 0 where none is null.

    It was made before steps counted undelivered and rejected tokens, by an engine that had none.
    """
    schema = tables.bare_schema(name)
    return pa.table(
        [
            table[f.name].cast(f.type) if f.name in table.column_names
            else pa.nulls(len(table), f.type) if f.nullable
            else pa.repeat(pa.scalar(0, f.type), len(table))
            for f in schema
        ],
        schema=schema,
    )  # fmt: skip


def _pieces(*keys: Ints) -> Ints:
    """Return where pieces begin: a key changes, or the last one does not go on by one."""
    *same, position = keys
    new = np.diff(position) != 1
    for key in same:
        new |= np.diff(key) != 0
    return np.append(0, np.flatnonzero(new) + 1) if len(position) else np.zeros(0, np.int64)


def _spans(s: Served, lost: Bools, number: Ints) -> pa.Table:
    first = _pieces(s.request, lost.astype(np.int64), s.position)
    last = np.append(first[1:], len(lost)) - 1
    gone = lost[first]
    pieces = tables.build("spans", {
        "request": s.request[first],
        "start": s.position[first],
        "stop": s.position[last] + 1,
        "disposition": np.where(gone, "dropped", "captured"),
        "reason": pa.array(np.where(gone, "queue_full", ""), mask=~gone),
        "step": number[s.step[first]],
        "ref_request": pa.nulls(len(first)),
    })  # fmt: skip
    return pa.concat_tables([pieces, _whole("spans", s.spans)])


def _drops(s: Served, lost: Bools, number: Ints) -> pa.Table:
    request, step, position = (x[lost] for x in (s.request, s.step, s.position))
    first = _pieces(request, step, position)
    last = np.append(first[1:], len(position)) - 1
    start, stop = position[first], position[last] + 1 if len(first) else position[first]
    n = len(first)
    queues = {f.name: pa.nulls(n) for f in tables.QUEUES}
    per_step = np.bincount(step, minlength=len(number))
    return tables.build("drops", {
        "drop": np.arange(n), "t_ns": s.steps["t_ns"].to_numpy()[step[first]],
        "step": number[step[first]],
        "drop_reason": ["queue_full"] * n, "policy": ["drop_newest"] * n,
        "request": request[first], "start": start, "stop": stop,
        "n_tokens": per_step[step[first]], "batch_tokens": s.n[step[first]].astype(np.int64),
        "max_seq_len": s.steps["max_seq_len"].to_numpy()[step[first]], **queues,
    })  # fmt: skip


def _readouts(s: Served, number: Ints) -> pa.Table:
    n, width = len(s.step), len(s.values) - 1
    flat = pa.array(s.values[1:].T.astype(np.float32).reshape(-1))
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * width)
    nothing = pa.ListArray.from_arrays(pa.array(np.zeros(n + 1, np.int32)), flat[:0])
    columns = {
        "request": s.request, "position": s.position, "token_id": s.token_id,
        "step": number[s.step],
        "hook": pa.DictionaryArray.from_arrays(np.zeros(n, np.int8), [HOOK]).cast(pa.string()),
        "norm": s.values[0].astype(np.float32),
        "projections": pa.ListArray.from_arrays(offsets, flat), "probes": nothing,
    }  # fmt: skip
    return tables.build("readouts", columns)


# losses ---------------------------------------------------------------------------------------

Loss = Callable[[Served, np.random.Generator], Bools]


def _at_rate(weight: Floats, of: Floats, rate: float) -> Floats:
    """Return probabilities in proportion to weights, with which a share ``rate`` is expected."""
    return np.minimum(1.0, weight * rate * of.sum() / max(float(weight @ of), 1e-300))


def _z(x: Floats, weight: Floats | None = None) -> Floats:
    """Return x less its mean in standard deviations, cut at 3."""
    mean = np.average(x, weights=weight)
    sd = np.sqrt(np.average((x - mean) ** 2, weights=weight))
    return np.clip((x - mean) / max(float(sd), 1e-12), -3, 3)


def steps_at_random(s: Served, random: np.random.Generator, rate: float = 0.02) -> Bools:
    """Lose each step with the same probability, whatever it holds."""
    return s.lost_with(random.random(len(s.n)) < rate)


def bursts_at_random(s: Served, random: np.random.Generator) -> Bools:
    """Lose bursts of steps, geometric of mean 8, that begin anywhere: 2 % of the steps."""
    lost = np.zeros(len(s.n), bool)
    for begin in np.flatnonzero(random.random(len(lost)) < 0.02 / 8):
        lost[begin : begin + random.geometric(1 / 8)] = True
    return s.lost_with(lost)


def few_bursts(s: Served, random: np.random.Generator) -> Bools:
    """Lose three bursts of 15 steps."""
    lost = np.zeros(len(s.n), bool)
    for begin in random.integers(0, len(lost) - 15, 3):
        lost[begin : begin + 15] = True
    return s.lost_with(lost)


def few_spells(s: Served, random: np.random.Generator) -> Bools:
    """Lose half of the steps of three spells of 60: steps that look like many events."""
    lost = np.zeros(len(s.n), bool)
    for begin in random.integers(0, len(lost) - 60, 3):
        lost[begin : begin + 60] = random.random(60) < 0.5
    return s.lost_with(lost)


def tokens_at_random(s: Served, random: np.random.Generator, rate: float = 0.005) -> Bools:
    """Lose each token with the same probability."""
    return random.random(len(s.step)) < rate


def requests_at_random(s: Served, random: np.random.Generator) -> Bools:
    """Lose every row of one request in fifty."""
    return (random.random(s.request.max() + 1) < 0.02)[s.request]


def halves_at_random(s: Served, random: np.random.Generator) -> Bools:
    """Lose, in steps drawn at random, the rows of each request with probability one half."""
    hit = (random.random(len(s.n)) < 0.03)[s.step]
    _, cell = np.unique(s.step * (s.request.max() + 1) + s.request, return_inverse=True)
    return hit & (random.random(cell.max() + 1) < 0.5)[cell]


def load(
    s: Served, random: np.random.Generator, strength: float = 0.7, rate: float = 0.03
) -> Bools:
    """Lose a step the more likely, the higher the load of the last 8 steps."""
    p = _at_rate(np.exp(strength * _z(s.load)), s.n, rate)
    return s.lost_with(random.random(len(p)) < p)


def quiet(s: Served, random: np.random.Generator) -> Bools:
    """Lose a step the more likely, the lower the load."""
    return load(s, random, -0.7)


def tokens_by_load(s: Served, random: np.random.Generator) -> Bools:
    """Lose a token the more likely, the higher the load of the last 8 steps."""
    p = _at_rate(np.exp(0.5 * _z(s.load))[s.step], np.ones(len(s.step)), 0.01)
    return random.random(len(p)) < p


def content(
    s: Served, random: np.random.Generator, strength: float = 0.6, rate: float = 0.03
) -> Bools:
    """Lose a step the more likely, the higher the mean projection of its rows."""
    p = _at_rate(np.exp(strength * _z(s.mean(s.values[1]))), s.n, rate)
    return s.lost_with(random.random(len(p)) < p)


def full_queue(s: Served, random: np.random.Generator) -> Bools:
    """Lose the steps that find a queue full: it takes what a disk of some speed leaves over."""
    speed = s.n.mean() * random.uniform(1.2, 1.5)
    capacity, waiting = 12 * s.n.mean(), 0.0
    lost = np.zeros(len(s.n), bool)
    for _ in range(60):
        waiting = 0.0
        for k, n in enumerate(s.n):
            waiting = max(0.0, waiting - speed)
            lost[k] = waiting + n > capacity
            waiting += 0.0 if lost[k] else n
        if s.n[lost].sum() <= 0.03 * s.n.sum():
            break
        capacity *= 1.1
    return s.lost_with(lost)


def large_norms(s: Served, random: np.random.Generator) -> Bools:
    """Lose half of the rows above the 99th percentile of the norm."""
    edge = np.quantile(s.values[0], 0.99)
    return (s.values[0] > edge) & (random.random(len(s.step)) < 0.5)


def high_projection(s: Served, random: np.random.Generator) -> Bools:
    """Lose a row the more likely, the higher its first projection."""
    p = _at_rate(np.exp(0.5 * _z(s.values[1])), np.ones(len(s.step)), 0.01)
    return random.random(len(p)) < p


def rare_tokens(s: Served, random: np.random.Generator) -> Bools:
    """Lose a row the more likely, the rarer its token."""
    count = np.bincount(s.token_id)[s.token_id]
    p = _at_rate(np.exp(0.5 * _z(-np.log2(count))), np.ones(len(s.step)), 0.01)
    return random.random(len(p)) < p


def one_id(s: Served, random: np.random.Generator) -> Bools:
    """Lose every row of one token id, that of 0.2 to 1 % of the rows."""
    share = np.bincount(s.token_id) / len(s.step)
    return s.token_id == random.choice(np.flatnonzero((share > 0.002) & (share < 0.01)))


def one_source(s: Served, random: np.random.Generator) -> Bools:
    """Lose every row of one source, of about 2 % of the requests."""
    names = s.requests["source"].to_numpy(zero_copy_only=False)
    mine = np.zeros(s.request.max() + 1, bool)
    mine[s.requests["request"].to_numpy()] = names == SOURCES[-1]
    return mine[s.request]


def far_values(s: Served, random: np.random.Generator) -> Bools:
    """Lose rows far from the mean of a projection, on either side: the mean stays."""
    far = np.abs(_z(s.values[2]))
    p = _at_rate(np.where(far > 1.5, 1.0, 0.02), np.ones(len(s.step)), 0.01)
    return random.random(len(p)) < p


def later_half(s: Served, random: np.random.Generator) -> Bools:
    """Lose steps four times as often in the second half."""
    p = np.where(np.arange(len(s.n)) < len(s.n) / 2, 0.01, 0.04)
    return s.lost_with(random.random(len(p)) < p)


LOSSES: dict[str, Loss] = {
    one.__name__: one
    for one in (
        steps_at_random, bursts_at_random, few_bursts, few_spells, tokens_at_random,
        requests_at_random, halves_at_random, load, tokens_by_load, quiet, content, full_queue,
        large_norms, high_projection, rare_tokens, one_id, one_source, far_values, later_half,
    )
}  # fmt: skip
