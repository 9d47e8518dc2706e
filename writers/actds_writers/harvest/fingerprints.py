"""Fingerprints: readouts of a dataset against those of two replays, to one answer.

The first replay computes in the precision on record, the reference in float32. So dataset and first
replay are the same function with the rounding of one precision, and the reference has next to none:
on whatever machine, rounding takes both equally far from it, and another model lies farther.
Behind the pairs of `attest`, and before what is signed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actds.format.schema import DType
from actds.publish.attestation import AnswerName, HookScore, Power
from actds.text import counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]

TOLERANCE = 1.5
"""How many times farther from the reference the rounding of another machine may take a row."""
LEVEL = 0.01
"""Of one side of an interval: honest sets accused, and others called the same."""
MIN_REQUESTS = 5
FLOOR: dict[DType, float] = {"bfloat16": 4e-3, "float16": 2e-3, "float32": 1e-4}
"""Least floor, relative L2, by the coarsest type on record: as coarse machines may round."""
ROUNDED = {8: 1.0, 4: 12.0}
"""Bits of rounded weights, and how many times ``rounded_to_8`` they take a row away."""
FAR, FAR_FLOORS = 0.25, 5.0
"""Relative L2, and floors, from which a row is another one or that of another hook."""
FAR_SHARE = 0.05
"""Of the pairs of a request at a hook: so many far ones, and the request is another."""
_MOST = 1e9
"""The distance of rows that are not finite."""


@dataclass(frozen=True)
class HookPairs:
    """The pairs of a hook: how far the rows of dataset and replay are from the reference, ``(n,)``.

    Args:
        request: number of each row's request, as in the names of `score`.
        dataset: distances, estimated relative L2.
        replay: the same.
        depth: share of the layers before the hook; None at the embedding, which no layer changed.
    """

    request: Ints
    dataset: Floats
    replay: Floats
    depth: float | None = 1.0


def distances(rows: Numbers, reference: Numbers, d_model: int) -> Floats:
    """Return how far rows are from others by their readouts, ``(n,)``: estimated relative L2.

    Of k random directions of length 1, the mean square of products with a vector is its own square
    over d (Johnson and Lindenstrauss); the difference of the norms is added, which is all that a
    scaled row would hide in few directions.

    Args:
        rows: the norm of each, then its projections, ``(n, 1 + k)``.
        reference: the same.
        d_model: channels of a row.
    """
    k = reference.shape[1] - 1
    exact = reference.astype(np.float64)
    norm = np.maximum(exact[:, :1], np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = (rows - exact) / norm * np.sqrt([1.0, *[d_model / k] * k])
        apart: Floats = np.linalg.norm(scaled, axis=1)
    return np.clip(np.nan_to_num(apart, nan=_MOST), 0.0, _MOST)


@dataclass(frozen=True)
class Answer:
    verdict: AnswerName
    reason: str
    n_requests: int
    hooks: list[HookScore]
    power: list[Power]
    far_requests: list[str]
    not_seen: list[str]


@dataclass(frozen=True)
class _Hook:
    """Log ratio of each request's median distance to its floor, ``(n_requests,)``; NaN: no pair."""

    name: str
    depth: float | None
    ratio: Floats
    distance: float
    floor: float
    far: npt.NDArray[np.bool_]
    far_share: Floats


def score(pairs: Mapping[str, HookPairs], names: Sequence[str], computed: DType) -> Answer:
    """Return whether the rows of a dataset are those of the model and precision that were replayed.

    The statistic of a request is the logarithm of median distance over median floor, mean over
    hooks; its mean over requests has a Student interval, since rows of a request are alike.

    Args:
        pairs: by hook.
        names: of the requests, as they are named to people.
        computed: coarsest type of the rows, on record.

    Spec: 0.1 section 15.7.
    """
    hooks = [_hook(name, of_hook, len(names), computed) for name, of_hook in pairs.items()]
    ratios = np.stack([hook.ratio for hook in hooks])
    has_pairs = np.isfinite(ratios).all(axis=0)
    low, high = _interval(ratios[:, has_pairs].mean(axis=0), 1)
    scores = [
        _score(hook, of_hook, len(hooks))
        for hook, of_hook in zip(hooks, pairs.values(), strict=True)
    ]
    n = int(has_pairs.sum())
    width = (high - low) / 2 if n > 1 else math.inf
    power = [_power(bits, hooks, width) for bits in ROUNDED]
    far_share = np.stack([hook.far_share for hook in hooks])
    far_requests = [names[i] for i in np.flatnonzero((far_share > FAR_SHARE).any(axis=0))]
    verdict, reason = _answer(low, high, n, scores, power, far_requests)
    return Answer(verdict, reason, n, scores, power, far_requests, _not_seen(hooks, n, width))


def _hook(name: str, pairs: HookPairs, n_requests: int, computed: DType) -> _Hook:
    stored, again = pairs.dataset, pairs.replay
    least = FLOOR[computed]
    # A row that rounding alone takes far in the replay is not judged.
    usual = max(least, float(np.median(again))) if len(again) else least
    far = (stored > FAR) & (stored > FAR_FLOORS * np.maximum(again, usual))
    ratio, far_share = np.full(n_requests, np.nan), np.zeros(n_requests)
    medians = []
    for request in np.unique(pairs.request):
        rows = pairs.request == request
        medians.append((np.median(stored[rows]), max(least, np.median(again[rows]))))
        distance, floor = medians[-1]
        ratio[request] = math.log(max(least, distance) / floor)
        far_share[request] = far[rows].mean()
    distance, floor = np.median(medians, axis=0) if medians else (0.0, least)
    return _Hook(name, pairs.depth, ratio, float(distance), float(floor), far, far_share)


def _interval(values: Floats, n_intervals: int) -> tuple[float, float]:
    """Return Student's interval of a mean, each side at LEVEL; all numbers of fewer than two."""
    from scipy import special  # type: ignore[import-untyped]

    if len(values) < 2:
        return -math.inf, math.inf
    t = -special.stdtrit(len(values) - 1, LEVEL / n_intervals)
    error = t * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - error), float(values.mean() + error)


def _score(hook: _Hook, pairs: HookPairs, n_hooks: int) -> HookScore:
    values = hook.ratio[np.isfinite(hook.ratio)]
    low, high = _interval(values, n_hooks)
    return HookScore(
        hook=hook.name,
        n_pairs=len(pairs.request),
        distance=hook.distance,
        floor=hook.floor,
        ratio=math.exp(min(values.mean(), 20.0)) if len(values) else 0.0,
        low=math.exp(min(low, 20.0)),
        high=math.exp(min(high, 20.0)),
        n_far=int(hook.far.sum()),
    )


def _power(bits: int, hooks: Sequence[_Hook], width: float) -> Power:
    """Return whether the interval of a copy with rounded weights would lie above the tolerance."""
    expected = np.array([ROUNDED[bits] * rounded_to_8(hook.depth) for hook in hooks])
    ratio = np.log(np.hypot(1.0, expected / [hook.floor for hook in hooks])).mean()
    seen = bool(ratio - width > math.log(TOLERANCE))
    return Power(bits=bits, distance=float(np.median(expected)), seen=seen)


def rounded_to_8(depth: float | None) -> float:
    """Return the relative L2 that rounding weights to 8 bits makes at least, by depth.

    A line below what was measured, see benchmarks/README.md.
    """
    return 0.0 if depth is None else 0.008 + 0.015 * depth


def _not_seen(hooks: Sequence[_Hook], n: int, width: float) -> list[str]:
    """Return in words what no such replay finds, with the limits of this one."""
    floor = math.exp(np.log([hook.floor for hook in hooks]).mean())
    least = floor * math.sqrt(max(math.exp(2 * (math.log(TOLERANCE) + min(width, 9.0))) - 1, 0.0))
    share = 1 - 0.05 ** (1 / n) if n else 1.0
    return [
        f"another model whose rows are less than {least:.2g} (relative L2) off",
        f"rows of other requests, of another layer or made up, in fewer than {share:.0%} of the "
        f"requests: {n} drawn ones miss them with a probability of 5 % or more",
        "a computation that is more exact than is on record",
        "arrays that differ from their readouts, or have none: actds validate --level deep does",
        "what the prompts are, and which rows a sampling rule left out",
    ]


def _answer(
    low: float,
    high: float,
    n: int,
    scores: Sequence[HookScore],
    power: Sequence[Power],
    far_requests: Sequence[str],
) -> tuple[AnswerName, str]:
    if far_requests:
        words = counted(len(far_requests), "request")
        return "another", (
            f"the readouts of {words} are of other rows or another hook; the first: "
            f"{far_requests[0]}"
        )
    limit = f"the tolerance is {TOLERANCE:g}"
    worst = max(scores, key=lambda hook: hook.low)
    if low > math.log(TOLERANCE) or worst.low > TOLERANCE:
        return "another", (
            f"its readouts at {worst.hook} lie {worst.ratio:.2f} times as far from the reference "
            f"as those of the replay in its precision; {limit}"
        )
    if n < MIN_REQUESTS:
        return "cannot tell", f"{counted(n, 'request')} to compare, and {MIN_REQUESTS} are needed"
    unseen = [f"{p.bits} bits" for p in power if not p.seen]
    if unseen:
        return "cannot tell", (
            f"a copy with weights of {' or '.join(unseen)} would hide in the floor: more requests, "
            "or a dataset of higher precision"
        )
    n_far = sum(hook.n_far for hook in scores)
    if n_far:
        return "cannot tell", f"{counted(n_far, 'row')} far from their replays, in no request many"
    if high > math.log(TOLERANCE) or max(hook.ratio for hook in scores) > TOLERANCE:
        return "cannot tell", (
            f"its readouts lie {math.exp(low):.2f} to {math.exp(min(high, 20.0)):.2f} times as far "
            f"from the reference as those of the replay; {limit}"
        )
    return "same", (
        f"its readouts lie {math.exp(low):.2f} to {math.exp(high):.2f} times as far from the "
        f"reference as those of a replay in its precision; {limit}"
    )
