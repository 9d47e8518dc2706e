"""What was computed: one line per computed token, its token id and the values of its row.

Right of the scheduler. Imports schedule, scenario and traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from actds.format.readouts import Readouts, compute, matrix
from actds_testing.simulate.scenario import Scenario
from actds_testing.simulate.scheduler import Schedule
from actds_testing.simulate.traffic import Traffic

__all__ = [
    "BOS",
    "N_SPECIAL",
    "TURN",
    "Computed",
    "Positions",
    "Rows",
    "compute_tokens",
    "make_rows",
    "place",
]

BOS, EOS, TURN = 0, 1, 2
"""Special tokens: the first of every request, the one that ends it, the last of its prompt."""
N_SPECIAL = 3
_SOURCE_EFFECT = (0.0, -0.2, 0.35)  # of the sources of ``traffic``
_REQUEST_SIGMA, _SEGMENT_SIGMA, _SEGMENT = 0.35, 0.2, 32

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Positions:
    """Every position that the requests owe, by request and then position; ``(n_positions,)``.

    Args:
        offset: where each request begins, int64 ``(n_requests + 1,)``.
        request: int32.
        position: int32.
        step: step that computed it, int32, -1 for one served from the cache.
        chunk: steps of the request before that, int32.
        token_id: uint32.
    """

    offset: Ints
    request: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    chunk: npt.NDArray[np.int32]
    token_id: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Computed:
    """The computed positions, by request and then position; ``(n_computed,)``.

    Args:
        at: index into the positions, int64.
        request: int32.
        position: int32.
        step: int32.
        prefill: whether it belongs to the prompt.
        token_id: uint32.
        rarity: log of the rank of the token in the vocabulary, float32, 0 for special ones.
    """

    at: Ints
    request: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    prefill: npt.NDArray[np.bool_]
    token_id: npt.NDArray[np.uint32]
    rarity: Floats


@dataclass(frozen=True)
class Rows:
    """The values of the computed rows.

    Args:
        bits: bfloat16 bit patterns, uint16 ``(n_computed, d_model)``.
        readouts: norm and projections as spec 7.8 defines them, float32
            ``(n_computed, 1 + n_projections)``.
    """

    bits: npt.NDArray[np.uint16]
    readouts: Floats


def place(
    scenario: Scenario, traffic: Traffic, plan: Schedule, rng: np.random.Generator
) -> Positions:
    """Return all positions with their steps and tokens.

    The rank of an ordinary token is ``floor(V ** (u ** exp(-a)))`` with a uniform u: with a = 0
    the log of the rank is uniform, which is Zipf's law with exponent 1 over the V tokens of the
    vocabulary. The effect a is that of the request (normal, 0.35), of its source (0, -0.2 and
    0.35), of arriving in a burst (``burst_content`` times 0.35) and of the stretch of 32
    positions (normal, 0.2); a larger one makes rare tokens more likely. Equal prefixes have equal
    tokens. The first token is BOS, the last of the prompt ends the turn.
    """
    n_requests = len(plan.prompt)
    owed = plan.prompt + plan.generated - 1
    offset = np.concatenate([[0], np.cumsum(owed)])
    request = np.repeat(np.arange(n_requests, dtype=np.int32), owed)
    position = (np.arange(offset[-1]) - np.repeat(offset[:-1], owed)).astype(np.int32)
    step, chunk = _when(plan, owed, offset)

    effect = _REQUEST_SIGMA * rng.standard_normal(n_requests)
    effect += np.array(_SOURCE_EFFECT)[traffic.source[:n_requests]]
    effect += scenario.burst_content * _REQUEST_SIGMA * np.array(traffic.in_burst[:n_requests])
    noise = _SEGMENT_SIGMA * rng.standard_normal(int(offset[-1]) // _SEGMENT + 2)
    # The stretches are those of all positions in a row; none needs to begin with its request.
    of_stretch = np.repeat(noise, _SEGMENT)[: len(request)]
    power = np.exp(-(effect[request] + of_stretch)).astype(np.float32)
    uniform = rng.random(int(offset[-1]), dtype=np.float32)
    token_id = _tokens(uniform**power, scenario.vocabulary)

    length = np.array(traffic.prefix_len)
    start = np.concatenate([[0], np.cumsum(length)])
    prefix_tokens = _tokens(rng.random(int(start[-1]), dtype=np.float32), scenario.vocabulary)
    group = np.array(traffic.prefix[:n_requests])
    shared = np.where(group >= 0, length[group], 0)
    within = np.flatnonzero(position < shared[request])
    token_id[within] = prefix_tokens[start[group[request[within]]] + position[within]]
    token_id[(offset[:-1] + plan.prompt - 1)[plan.prompt > shared]] = TURN
    token_id[offset[:-1]] = BOS
    return Positions(offset, request, position, step, chunk, token_id)


def _when(
    plan: Schedule, owed: Ints, offset: Ints
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return step and chunk of every position, -1 and 0 for those served from the cache."""
    step = np.full(int(offset[-1]), -1, np.int32)
    chunk = np.zeros(int(offset[-1]), np.int32)
    order = np.argsort(plan.chunk_request, kind="stable")
    who = plan.chunk_request[order]
    n_chunks = np.bincount(who, minlength=len(owed))
    number = np.arange(len(who)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
    length = (plan.chunk_stop - plan.chunk_start)[order]
    at = _ranges(offset[who] + plan.chunk_start[order], length)
    step[at] = np.repeat(plan.chunk_step[order], length)
    chunk[at] = np.repeat(number, length)
    decoded = plan.generated - 1
    at = _ranges(offset[:-1] + plan.prompt, decoded)
    since = _ranges(np.zeros(len(decoded), np.int64), decoded)
    step[at] = np.repeat(plan.last_prefill + 1, decoded) + since
    chunk[at] = np.repeat(n_chunks, decoded) + since
    return step, chunk


def _ranges(start: Ints, length: Ints) -> Ints:
    """Return the numbers from each start on, one range after the other."""
    total = int(length.sum())
    ends = np.cumsum(length)
    ranges: Ints = np.arange(total) + np.repeat(start - ends + length, length)
    return ranges


def _tokens(uniform: Floats, vocabulary: int) -> npt.NDArray[np.uint32]:
    """Return token ids whose log rank is the uniform number's share of the longest."""
    rank = np.exp(uniform * np.float32(math.log(vocabulary)))
    ids: npt.NDArray[np.uint32] = np.minimum(rank, vocabulary).astype(np.uint32) + np.uint32(
        N_SPECIAL - 1
    )
    return ids


def compute_tokens(plan: Schedule, positions: Positions) -> Computed:
    """Return the computed positions and what is known of their tokens."""
    at = np.flatnonzero(positions.step >= 0)
    request, position = positions.request[at], positions.position[at]
    token_id = positions.token_id[at]
    rank = np.maximum(token_id.astype(np.float32) - (N_SPECIAL - 1), 1.0)
    prefill = position < plan.prompt[request]
    step = positions.step[at]
    return Computed(at, request, position, step, prefill, token_id, np.log(rank))


def make_rows(scenario: Scenario, computed: Computed, rng: np.random.Generator) -> Rows:
    """Return the rows and their readouts.

    The log norm of a row is 3 + 0.25 z + 0.2 b + 0.15 e, with z the standardised rarity of the
    token, b a normal effect of the request and e normal noise. Its direction is that of 0.7 c +
    0.5 z v + n, with c a normal vector of the request, v a fixed unit vector and n normal noise.
    The row is rounded to bfloat16, and the readouts are computed from what is stored.
    """
    n, d_model = len(computed.at), scenario.d_model
    rarity = computed.rarity
    z = (rarity - rarity.mean()) / max(float(rarity.std()), 1e-6)
    n_requests = int(computed.request[-1]) + 1
    effect = rng.standard_normal(n_requests, dtype=np.float32)
    log_norm = 3.0 + 0.25 * z + 0.15 * rng.standard_normal(n, dtype=np.float32)
    log_norm += 0.2 * effect[computed.request]
    own = 0.7 * rng.standard_normal((n_requests, d_model), dtype=np.float32)
    fixed = np.full(d_model, 1 / math.sqrt(d_model), np.float32)
    rows = rng.standard_normal((n, d_model), dtype=np.float32)
    rows += own[computed.request]
    rows += np.float32(0.5) * z[:, None] * fixed
    stored = of_norm(rows, np.exp(log_norm)).astype(ml_dtypes.bfloat16)
    packed = matrix(Readouts(scenario.n_projections, 0), None, 1, d_model)[0]
    return Rows(stored.view(np.uint16), compute(stored.astype(np.float32), packed))


def of_norm(rows: Floats, norm: Floats) -> Floats:
    """Return rows stretched to their norms; one without a direction gets the same in all."""
    squares = np.einsum("ij,ij->i", rows, rows)
    nowhere = squares == 0  # with one channel it happens once in some ten million rows
    rows[nowhere], squares[nowhere] = 1.0, rows.shape[1]
    rows *= (norm / np.sqrt(squares))[:, None]
    return rows
