"""What steering does to the next token, from rows that replays stored.

The last row of the model gives its next-token distribution by the unembedding, which is read from
the model's folder and proved: entropies computed by it are those that the engine recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actds.errors import ActdsError
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.result import (
    Decay,
    Effect,
    Limits,
    SteeredStratum,
    Vector,
    Way,
    outcome_of,
)
from actds_validators.arrays import Bools, Floats, Rows
from actds_validators.audit.result import Estimate

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
        raise ActdsError(
            "E014",
            place,
            got=f"entropies {worst:.3g} nats from the engine's own",
            expected="those of the model: another folder, or logits that are computed otherwise",
        )
    return worst


@dataclass(frozen=True)
class Read:
    """Divergences and last rows of one vector, way, dose and delay, by request and step.

    Args:
        divergence: nats ``(n_requests, n_steps)``, NaN where a row is missing.
        change: of the last row, steered less plain ``(n_requests, n_steps, d_model)``.
        n_vectors: that were averaged.
    """

    way: Way
    vector: Vector
    dose: float
    after: int
    divergence: Floats
    change: Rows


def estimate(values: Floats, weights: Floats | None = None) -> Estimate | None:
    """Return the mean of values by request, or their sum over that of weights, with its interval.

    The 95 % interval leaves out a request at a time.
    """
    from actds_validators.statistics.intervals import jackknife

    below = np.ones(len(values)) if weights is None else weights
    known = np.isfinite(values) & np.isfinite(below)
    sums = np.stack([below[known], values[known]])
    if known.sum() < 2 or not (sums[0].sum() > 0):
        return None
    return Estimate.of(jackknife(sums, _ratio))


def _ratio(sums: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[1] / sums[0])


def along(change: Rows) -> Floats:
    """Return how far changes go along the mean change of the others at the first step.

    Args:
        change: ``(n_requests, n_steps, d_model)``.

    Returns:
        ``(n_requests, n_steps)``, over the length of that mean: near 1 at the first step.
    """
    n = len(change)
    first = change[:, 0].astype(np.float64)
    mean = (first.sum(axis=0) - first) / max(n - 1, 1)
    squares = np.maximum((mean**2).sum(axis=1), 1e-30)
    return np.asarray(np.einsum("nsd,nd->ns", change, mean) / squares[:, np.newaxis], np.float64)


def effects_of(read: Read, steps: Sequence[int]) -> list[Effect]:
    """Return the effect at each step."""
    signed = along(read.change) if read.vector == "vector" and len(read.change) > 1 else None
    effects = []
    for s, step in enumerate(steps):
        values = read.divergence[:, s]
        n = int(np.isfinite(values).sum())
        part = None if signed is None else signed[:, s]
        effects.append(
            Effect(
                way=read.way,
                vector=read.vector,
                dose=read.dose,
                step=step,
                after=read.after,
                n=n,
                divergence=estimate(values),
                along=None if part is None else estimate(part),
                opposite=None if part is None or not n else float(np.mean(part < 0)),
            )
        )
    return effects


def decay_of(
    read: Read, effects: Sequence[Effect], floor: Estimate | None, limits: Limits
) -> Decay:
    """Return how an effect goes with depth, paired by request.

    Args:
        effects: at each step, those of ``read``.
    """
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    whole = np.isfinite(read.divergence).all(axis=1)
    values = read.divergence[whole]
    ratio = [estimate(values[:, s], values[:, 0]) for s in range(values.shape[1])]
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
            of = estimate(sums[has], counts[has])
            strata.append(
                SteeredStratum(way=read.way, axis=axis, name=name, n=int(mask.sum()), divergence=of)
            )
    return strata


def strength_at(curve: Sequence[tuple[float, float]], nats: float) -> float | None:
    """Return the strength at which a curve first reaches so many nats, ``None`` where it does not.

    Between two strengths by both logarithms: the divergence grows like a power of the strength.
    """
    before: tuple[float, float] | None = None
    for strength, value in curve:
        if value >= nats:
            if before is None or before[1] <= 0:
                return strength
            (s0, v0), (s1, v1) = before, (strength, value)
            share = (np.log(nats) - np.log(v0)) / max(np.log(v1) - np.log(v0), 1e-12)
            return float(np.exp(np.log(s0) + share * (np.log(s1) - np.log(s0))))
        before = (strength, value)
    return None
