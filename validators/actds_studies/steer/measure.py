"""What steering does to the next token, from rows that replays stored.

The last row of the model gives its next-token distribution by the unembedding, which is read from
the model's folder and proved: entropies computed by it are those that the engine recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds.explore.requests import TokenSequence
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.replays import Replayed, prompt_of
from actds_studies.steer.result import (
    Decay,
    Effect,
    Limits,
    SteeredStratum,
    Survival,
    Vector,
    Way,
    outcome_of,
)
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_validators.audit.result import Estimate

CURVE = tuple(2.0**k for k in range(-6, 2))
"""Strengths that the dose is looked for among, over the median norm of rows."""
N_WIDER = 3
"""Times that four more strengths are tried, where these are all too strong or too weak."""
PROOF = 0.02
"""Most that an entropy computed here may be from the engine's own, nats, and in itself."""


def prove(unembedding: Unembedding, rows: Rows, entropies: Floats, place: str) -> float:
    """Return the largest distance of entropies from the engine's; raises E014 beyond the limit.

    Args:
        rows: last rows ``(n, d_model)``; ``entropies``, those that the engine recorded there.
    """
    apart = np.abs(unembedding.entropies(rows)[0] - entropies)
    worst = float(apart.max(initial=0.0))
    if not np.all(apart <= PROOF * (1 + entropies)):
        got = f"entropies {worst:.3g} nats from the engine's own"
        expected = "those of the model: another folder, or logits that are computed otherwise"
        raise ActdsError("E014", place, got=got, expected=expected)
    return worst


@dataclass(frozen=True)
class Read:
    """What one vector, way, dose and delay do: nats ``(n_requests, n_steps)``, NaN without a row.

    ``change`` is that of the last row ``(n_requests, n_steps, d_model)``; requests of one ``group``
    count together.
    """

    way: Way
    vector: Vector
    dose: float
    after: int
    divergence: Floats
    change: Rows
    group: Ints

    @property
    def key(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("way", "vector", "dose", "after")}


def differences(
    unembedding: Unembedding, replayed: Replayed, rows: Ints, plain: Ints
) -> tuple[Floats, Rows]:
    """Return divergences, and changes of the last row, NaN where a row is missing."""
    steered, other = replayed.values(rows), replayed.values(plain)
    result = np.full(rows.shape, np.nan)
    known = (rows >= 0) & (plain >= 0)
    result[known] = unembedding.divergences(steered[known], other[known])
    return result, steered - other


def clusters(sequences: Sequence[TokenSequence]) -> Ints:
    """Return the number of the prompt of each request."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(prompt_of(s), len(numbers)) for s in sequences], np.int64)


def groups_by_prompt(
    sequences: Sequence[TokenSequence], seed: int, sides: tuple[Ints, Ints] | None = None
) -> Ints:
    """Return the group of each request: answers to one prompt are no independent ones.

    Each group has requests of both ``sides``, two lists of numbers; what is in neither is in -1.
    """
    from actds_studies.regimes.contrast import groups_of

    prompt = clusters(sequences)
    left, right = sides or (slice(None), slice(None))
    _, of = groups_of((prompt[left], prompt[right]), seed)
    return np.asarray(np.append(of, np.full(len(prompt), -1))[prompt], np.int64)


def estimate(values: Floats, group: Ints, weights: Floats | None = None) -> Estimate | None:
    """Return the mean of values by request, or their sum over that of weights, with its interval.

    The 95 % interval leaves out a group of requests at a time.
    """
    from actds_validators.statistics.intervals import jackknife

    below = np.ones(len(values)) if weights is None else weights
    known = np.isfinite(values) & np.isfinite(below)
    numbers, at = np.unique(group[known], return_inverse=True)
    sums = np.stack([below[known], values[known]]) @ np.eye(len(numbers))[at]
    if sums.shape[1] < 2 or not (sums[0].sum() > 0):
        return None
    return Estimate.of(jackknife(sums, _ratio))


def _ratio(sums: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[1] / sums[0])


def along(change: Rows, group: Ints) -> Floats:
    """Return how far changes go along the mean change of other groups at the first step.

    Over the length of that mean ``(n_requests, n_steps)``: near 1 at the first step.
    """
    first = change[:, 0].astype(np.float64)
    apart = (group[:, np.newaxis] != group) & np.isfinite(first).all(axis=1)
    mean = apart @ np.nan_to_num(first) / np.maximum(apart.sum(axis=1, keepdims=True), 1)
    squares = np.maximum((mean**2).sum(axis=1), 1e-30)
    return np.asarray(np.einsum("nsd,nd->ns", change, mean) / squares[:, np.newaxis], np.float64)


def effects_of(read: Read, steps: Sequence[int]) -> list[Effect]:
    """Return the effect at each step."""
    several = read.vector == "vector" and len(set(read.group.tolist())) > 1
    signed = along(read.change, read.group) if several else None
    effects = []
    for s, step in enumerate(steps):
        values, part = read.divergence[:, s], None if signed is None else signed[:, s]
        n = int(np.isfinite(values).sum())
        opposite = None if part is None or not n else float(np.sum(part < 0)) / n
        of_part = None if part is None else estimate(part, read.group)
        known: dict[str, Any] = {"n": n, "divergence": estimate(values, read.group)}
        effects.append(Effect(**read.key, step=step, along=of_part, opposite=opposite, **known))
    return effects


def decay_of(
    read: Read, effects: Sequence[Effect], floor: Estimate | None, limits: Limits
) -> Decay:
    """Return how the effects of a read go with depth, paired by request."""
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    whole = np.isfinite(read.divergence).all(axis=1)
    values, group = read.divergence[whole], read.group[whole]
    ratio = [estimate(values[:, s], group, values[:, 0]) for s in range(values.shape[1])]
    means = values.mean(axis=0) if len(values) else np.zeros(values.shape[1])
    known = means / means[0] if means[0] > 0 else np.ones_like(means)
    outcome, reason = outcome_of(effects[0], effects[-1], ratio[-1], floor, limits.margin)
    return Decay(
        way=read.way,
        dose=read.dose,
        after=read.after,
        steps=[effect.step for effect in effects],
        ratio=ratio,
        isotonic=isotonic_regression(known, increasing=False).x.tolist(),
        outcome=outcome,
        reason=reason,
    )


def strata_of(read: Read, entropy: Floats, roles: np.ndarray) -> list[SteeredStratum]:
    """Return divergences by tercile of the model's own entropy, and by role of the token fed.

    Args:
        entropy: of the plain next token ``(n_requests, n_steps)``; ``roles`` likewise, text.
    """
    known = np.isfinite(read.divergence)
    edges = np.quantile(entropy[known], [1 / 3, 2 / 3]) if known.any() else np.zeros(2)
    tercile = np.searchsorted(edges, entropy)
    masks: list[tuple[Any, str, Bools]] = [
        ("entropy", f"tercile {n + 1}", known & (tercile == n)) for n in range(3)
    ]
    masks += [("role", name, known & (roles == name)) for name in sorted(set(roles[known]))]
    strata = []
    for axis, name, mask in masks:
        sums = np.where(mask, read.divergence, 0.0).sum(axis=1)
        counts = mask.sum(axis=1).astype(np.float64)
        has = counts > 0
        if name and has.any():
            of = estimate(sums[has], read.group[has], counts[has])
            strata.append(
                SteeredStratum(way=read.way, axis=axis, name=name, n=int(mask.sum()), divergence=of)
            )
    return strata


# survival -----------------------------------------------------------------------------------------


def survival_of(like: Floats, looks: Floats, step: int, dose: float) -> Survival:
    """Return the share whose entropy and repetition lie within those without a vector, ``like``.

    Each is of a prompt of its own: Clopper and Pearson's interval.
    """
    from actds_validators.statistics.design import exact_share

    n, share = len(looks), None
    if len(like) and n:
        low, high = [like[:, 0].min(), 0.0], like.max(axis=0)
        kept = int(((low <= looks) & (looks <= high)).all(axis=1).sum())
        least, most = exact_share(np.array([kept]), np.array([n]), 0.95)
        share = Estimate(value=kept / n, low=float(least[0]), high=float(most[0]))
    return Survival(step=step, dose=dose, n=n, share=share)


# the dose -----------------------------------------------------------------------------------------


def calibrated(
    quantiles: Callable[[Sequence[float]], Sequence[float]], nats: float
) -> tuple[list[tuple[float, float]], float]:
    """Return strengths with their divergences, and the strength that has so many nats.

    ``quantiles`` returns the divergence at ascending strengths. E014 where all that were tried have
    more, or less.
    """
    tried = list(CURVE)
    curve = list(zip(tried, quantiles(tried), strict=True))
    for _ in range(N_WIDER):
        if curve[0][1] >= nats:
            tried = [curve[0][0] / 2**k for k in (4, 3, 2, 1)]
        elif max(value for _, value in curve) < nats:
            tried = [curve[-1][0] * 2**k for k in (1, 2, 3, 4)]
        else:
            break
        curve = sorted([*curve, *zip(tried, quantiles(tried), strict=True)])
    strength = strength_at(curve, nats)
    if strength is None:
        ends = [f"{curve[k][1]:.3g} nats at {curve[k][0]:.3g} of a row" for k in (0, -1)]
        expected = f"less than {nats:g} nats at the weakest strength, and more at another"
        step = "Give other nats as the limit, or take another hook."
        raise ActdsError("E014", "dose", got=" to ".join(ends), expected=expected, next_step=step)
    return curve, strength


def strength_at(curve: Sequence[Sequence[float]], nats: float) -> float | None:
    """Return the strength at which a curve first reaches so many nats from below, else ``None``.

    Between two strengths by both logarithms: the divergence grows like a power of the strength.
    """
    for (s0, v0), (s1, v1) in pairwise(curve):
        if v0 < nats <= v1:
            v0 = max(v0, 1e-12)
            share = (np.log(nats) - np.log(v0)) / (np.log(v1) - np.log(v0))
            return float(s0 * (s1 / s0) ** share)
    return None
