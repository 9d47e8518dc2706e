"""Attention rows: where decode steps look, per layer and head, from stored rows of ``q`` and ``k``.

Requests are read a few at a time. A key that the prefix cache served is that of the request which
computed it; a step of which a key is not stored has no number, and a reason. What heads give out by
these shares has to be the stored ``z``: a step that differs ends the study.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import RequestRows
from actds.format.tables import ROLES
from actds.format.telemetry import N_TOP
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_writers.capture.scheme import Scheme, largest

MASSES = ("position 0", "prompt", "generated", "sinks", *(f"role {role}" for role in ROLES))
MEASURES = ("entropy", "relative entropy", *MASSES, "prompt odds", "jump")
"""Of each step and head. Entropy in bits and over the logarithm of the keys in reach; shares of the
attention, those of roles without position 0; log-odds of the prompt without position 0 against
generated text, less those of an even attention; 1 - Jaccard of the 8 keys with the largest shares
since the step looked at before."""
_AT = {name: n for n, name in enumerate(MEASURES)}
LEAST_MASS = 1e-6  # that log-odds are taken of
BATCH_NBYTES = 1 << 27
CAST = 8
"""Times as far where rows were rounded after the model computed with them, and in the mean the
limit itself: 0.04 and 0.004 there, and at a scale 5 % off 0.06 to 0.09 and 0.02 to 0.035."""


@dataclass(frozen=True)
class Request:
    """A request: its place in those of the dataset, where its given text ends, and its fed one."""

    run: str
    number: int
    index: int
    n_given: int
    n_fed: int


@dataclass
class Proof:
    """How far outputs of heads were from the stored ones, over all steps so far."""

    limit: float
    mean_limit: float
    largest: float = 0.0
    total: float = 0.0
    n: int = 0

    def add(self, distance: Rows, place: str, steps: Ints) -> None:
        """Raise E014 where a head of a step is beyond the limit ``(n, n_heads)``."""
        worst = np.unravel_index(int(np.nan_to_num(distance, nan=np.inf).argmax()), distance.shape)
        at = float(distance[worst])
        if not at <= self.limit:
            head = f"decode step {steps[worst[0]]}, head {worst[1]}"
            raise _refused(f"{place}, {head}", at, self.limit)
        self.largest = max(self.largest, at)
        self.total += float(distance.sum(dtype=np.float64))
        self.n += distance.size

    @property
    def mean(self) -> float:
        return self.total / max(self.n, 1)

    def finish(self, place: str) -> None:
        """Raise E014 where the mean of all is beyond its limit."""
        if not self.mean <= self.mean_limit:
            raise _refused(
                f"{place}, mean of {self.n:,} heads of steps", self.mean, self.mean_limit
            )


def _refused(place: str, at: float, limit: float) -> ActdsError:
    return ActdsError(
        "E014",
        place,
        got=f"softmax(q k) v is {at:.2g} from the stored z",
        expected=f"{limit:g} at most: this is not the attention of the model",
        next_step="Give the model's folder as it was served. What gates or norms z cannot be "
        "proved from these rows.",
    )


@dataclass
class LayerRows:
    """A layer to look at: its scheme, its hooks, its proof (None: not proved), what is absent."""

    layer: int
    scheme: Scheme
    proof: Proof | None
    n_decode: int = 0
    absent: Counter[str] = field(default_factory=Counter)

    @property
    def n_heads(self) -> int:
        return self.scheme.n_heads

    @property
    def hooks(self) -> list[str]:
        return [f"{kind}.{self.layer}" for kind in ("qkvz" if self.proof else "qk")]


@dataclass(frozen=True)
class Attended:
    """Decode steps of a request at a layer that have all their keys; ``n`` of them.

    Args:
        step: 1 for the first token that was generated and fed ``(n,)``.
        row: number of the row of ``q`` ``(n,)``.
        role: place in ``ROLES`` of the token fed, -1 unknown ``(n,)``.
        values: by step, head and measure, NaN where there is none ``(n, n_heads, len(MEASURES))``.
    """

    step: Ints
    row: Ints
    role: Ints
    values: Rows


Read = tuple[Request, int, Attended]
"""A request, which of the layers, and its rows there."""


def attention_rows(
    dataset: Dataset, requests: Iterable[Request], layers: Sequence[LayerRows], every: int
) -> Iterator[Read]:
    """Yield the attention rows of every request at every layer.

    Args:
        every: look at decode steps 1, 1 + every and so on.

    Raises:
        ActdsError: E014 what heads give out is not the stored ``z``; and as reading rows.
    """
    shards = {hook: [s.name for s in dataset.shards_of(hook)] for at in layers for hook in at.hooks}
    # Hooks of the same shards have the same rows.
    lead = {hook: next(h for h in shards if shards[h] == shards[hook]) for hook in shards}
    widths = {hook: dataset.hooks[hook].d_model for hook in layers[0].hooks}
    batch: list[tuple[Request, dict[str, RequestRows]]] = []
    nbytes = 0
    for request in requests:
        rows = {
            hook: dataset.request(request.number, run=request.run, hook=hook)
            for hook in dict.fromkeys(lead.values())
        }
        batch.append((request, rows))
        nbytes += sum(
            4 * width * len(_rows_of(hook, request, rows[lead[hook]], every))
            for hook, width in widths.items()
        )
        if nbytes > BATCH_NBYTES:
            yield from _of_batch(dataset, batch, layers, lead, every)
            batch, nbytes = [], 0
    yield from _of_batch(dataset, batch, layers, lead, every)
    for of_layer in layers:
        if of_layer.proof is not None:
            of_layer.proof.finish(f"layer {of_layer.layer}")


def _rows_of(hook: str, request: Request, rows: RequestRows, every: int) -> Ints:
    """Return which rows are read: of q and z those of steps, of k and v those of all positions."""
    return rows.row[request.n_given :: every] if hook[0] in "qz" else rows.row


def _of_batch(
    dataset: Dataset,
    batch: Sequence[tuple[Request, dict[str, RequestRows]]],
    layers: Sequence[LayerRows],
    lead: dict[str, str],
    every: int,
) -> Iterator[Read]:
    for number, of_layer in enumerate(layers if batch else []):
        stored_rows: dict[str, tuple[Ints, Rows]] = {}
        for hook in of_layer.hooks:
            parts = [_rows_of(hook, of, rows[lead[hook]], every) for of, rows in batch]
            numbers = np.unique(np.maximum(np.concatenate(parts), 0))
            stored_rows[hook] = numbers, dataset.array(hook)[numbers]
        for request, rows in batch:
            values = []
            for hook in of_layer.hooks:
                numbers, stored = stored_rows[hook]
                row = np.maximum(_rows_of(hook, request, rows[lead[hook]], every), 0)
                values.append(stored[np.searchsorted(numbers, row)])
            has_rows = np.all([rows[lead[hook]].row >= 0 for hook in of_layer.hooks], axis=0)
            of_request = rows[lead[of_layer.hooks[0]]]
            steps = attended(of_layer, request, of_request, has_rows, values, every)
            yield request, number, steps


def attended(
    of_layer: LayerRows,
    request: Request,
    rows: RequestRows,
    has_rows: Bools,
    values: Sequence[Rows],
    every: int = 1,
) -> Attended:
    """Return the attention rows of a request, from the rows of its positions.

    Args:
        has_rows: positions whose rows are stored ``(n,)``.
        values: rows of the hooks, ``q`` and ``k`` and, for a proof, ``v`` and ``z``: of ``k`` and
            ``v`` by position, of the others by step.
    """
    scheme, n = of_layer.scheme, len(rows)
    position = np.arange(request.n_given, min(request.n_fed, n))[::every]
    of_layer.n_decode += len(position)
    # A key that is missing before or at a step, within its reach: the last such one decides.
    last = np.maximum.accumulate(np.where(has_rows, -1, np.arange(n)))[position]
    is_short = last >= scheme.first(position)
    for step, at in zip(position[is_short].tolist(), last[is_short].tolist(), strict=True):
        what, fate = "its row" if at == step else "a key", rows.disposition[at] or "unknown"
        fate = "other hooks were chosen" if fate == "captured" else fate
        of_layer.absent[f"{what} is not stored ({fate})"] += 1
    at_step = np.flatnonzero(~is_short)
    position = position[at_step]
    role = np.array([ROLES.index(r) if r else -1 for r in rows.role.tolist()], np.int64)
    step = position - request.n_given + 1
    result = np.full((len(position), scheme.n_heads, len(MEASURES)), np.nan, np.float32)
    top = np.full((len(position), scheme.n_heads, N_TOP), -1, np.int64)
    parts = _parts(np.arange(n), request.n_given, role)
    q, k, *proof = values
    place = f"layer {of_layer.layer}, request {request.number} of {request.run}"
    for some, low, shares in scheme.attend(q[at_step], k, position):
        keys = slice(low, low + shares.shape[2])
        if proof and of_layer.proof is not None:
            distance = scheme.distance(shares, proof[0][keys], proof[1][at_step[some]])
            of_layer.proof.add(distance, place, step[some])
        result[some] = _measures(scheme, shares, position[some], parts[keys], request.n_given)
        top[some] = largest(shares, low)
    follows = np.flatnonzero(np.diff(step) == every) + 1
    result[follows, :, _AT["jump"]] = jumps_of(top[follows - 1], top[follows])
    return Attended(step, rows.row[position], role[position], result)


def _parts(position: Ints, n_given: int, role: Ints) -> Rows:
    """Return which of the first three `MASSES` and of the roles keys are in ``(n, 3 + roles)``."""
    first, is_given = position == 0, position < n_given
    columns = [first, ~first & is_given, ~first & ~is_given]
    of_roles = (role[:, np.newaxis] == np.arange(len(ROLES))) & ~first[:, np.newaxis]
    return np.column_stack([*columns, of_roles]).astype("f4")


def _measures(scheme: Scheme, shares: Rows, position: Ints, parts: Rows, n_given: int) -> Rows:
    """Return the measures of steps but for jumps ``(m, n_heads, len(MEASURES))``."""
    values = np.full((*shares.shape[:2], len(MEASURES)), np.nan, np.float32)
    first = scheme.first(position)
    n_keys = (position - first + 1)[:, np.newaxis]
    bits, sinks = scheme.bits(shares)
    masses = shares @ parts
    values[..., _AT["position 0"] : _AT["sinks"]] = masses[..., :3]
    if scheme.sinks is not None:  # which are an outcome as every key is
        values[..., _AT["sinks"]] = sinks
        n_keys = n_keys + 1
    if parts[:, 3:].any():
        values[..., _AT["sinks"] + 1 : _AT["prompt odds"]] = masses[..., 3:]
    values[..., _AT["entropy"]] = bits
    with np.errstate(divide="ignore", invalid="ignore"):
        values[..., _AT["relative entropy"]] = np.where(n_keys > 1, bits / np.log2(n_keys), np.nan)
    masses_of = masses[..., 1], masses[..., 2]
    values[..., _AT["prompt odds"]] = prompt_odds(*masses_of, position, first, n_given)
    return values


def prompt_odds(given: Rows, generated: Rows, position: Ints, first: Ints, n_given: int) -> Rows:
    """Return log-odds of the prompt without position 0, less those of an even attention.

    Args:
        given: share of the prompt ``(m, n_heads)``.
        generated: that of generated text.
        position: of each query ``(m,)``.
        first: the first key in its reach.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        n_prompt = np.maximum(n_given - np.maximum(first, 1), 0)
        even = np.log(n_prompt / (position + 1 - np.maximum(first, n_given)))
        logs = [np.log(np.maximum(share, LEAST_MASS)) for share in (given, generated)]
        odds = logs[0] - logs[1] - even[:, np.newaxis]
    return np.where(np.isfinite(odds), odds, np.nan).astype(np.float32)


def jumps_of(before: Ints, after: Ints) -> Floats:
    """Return 1 - Jaccard of sets of positions ``(n, n_heads)``."""
    shared = (before[..., np.newaxis] == after[..., np.newaxis, :]) & (after >= 0)[
        ..., np.newaxis, :
    ]
    n_shared = shared.sum(axis=(2, 3))
    union = (before >= 0).sum(axis=2) + (after >= 0).sum(axis=2) - n_shared
    return np.asarray(1 - n_shared / np.maximum(union, 1), np.float64)
