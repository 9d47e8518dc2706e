"""Matched features as steering vectors: the dose of each, and what becomes of its effect by depth.

The decoder rows of two dictionaries that are matched best are added to rows of the reference's own
answers, all of them on the same tokens. A dose is as of ``actds steer``, and so is the decay of the
effect held from a step on, read a few steps later.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from actds.explore.dataset import Dataset
from actds.explore.requests import token_sequences
from actds_studies.stability.result import FeatureSteering, SteeredArm, SteeredPair
from actds_studies.steer.api import AGAIN, N_CALIBRATED, _Study
from actds_studies.steer.measure import (
    CURVE,
    Read,
    decay_of,
    effects_of,
    prove,
    strength_at,
)
from actds_studies.steer.replays import PLAIN, Serving, Variant
from actds_studies.steer.result import Decay, Limits
from actds_validators.arrays import Floats, Rows

AFTER = 5
"""Steps after the first changed one at which an effect is read."""
Measured = tuple[float | None, Decay | None]
"""Of a direction, the strength of a dose of 1, and what became of it; None where there is none."""


class FeatureDirections(_Study):
    """Doses and decays of many directions at a hook, in two runs of the engine."""

    def __init__(self, source: Dataset, model: Path, hook: str, nats: float, seed: int) -> None:
        limits = Limits(nats=nats, seed=seed)
        known = (len(s.token_id) - s.n_given for s in token_sequences(source) if s.unknown is None)
        longest = sorted(known, reverse=True)[: limits.requests]
        last = max(2, min(longest, default=0) - AFTER)
        steps = sorted({1, round(last**0.5), last})
        super().__init__(source, model, hook, (steps, [AFTER], [1.0]), limits, refit=False)

    def measured(self, units: Rows, options: Mapping[str, Any]) -> list[Measured]:
        """Return dose and decay of each direction ``(n, d_model)``, of length 1."""
        serving = Serving(self.source, self.hook, options)
        with tempfile.TemporaryDirectory(prefix="actds-", ignore_cleanup_errors=True) as name:
            strengths = self._strengths(serving, units, Path(name) / "dose")
            decays = self._decays(serving, units, strengths, Path(name) / "study")
        return [(s, decays.get(v)) for v, s in enumerate(strengths)]

    def _strengths(self, serving: Serving, units: Rows, folder: Path) -> list[float | None]:
        n = min(*(len(s.token_id) - s.n_given for s in self.calibrated), N_CALIBRATED)
        norm, at = self._median_norm(), np.arange(n)
        numbers = range(len(units))
        curves = [[Variant(f"{v}-{c}", v, c * norm, 0, None, n) for c in CURVE] for v in numbers]
        replayed = serving.serve(self.calibrated, list(chain(*curves)), units, folder)
        plain = replayed.rows(PLAIN, at)

        def reached(variant: Variant) -> tuple[float, float]:
            nats = self._differences(replayed, replayed.rows(variant.name, at), plain)[0]
            return variant.strength, float(np.nanquantile(nats, self.limits.quantile))

        return [strength_at(list(map(reached, curve)), self.limits.nats) for curve in curves]

    def _decays(
        self, serving: Serving, units: Rows, strengths: Sequence[float | None], folder: Path
    ) -> dict[int, Decay]:
        known = {v: strength for v, strength in enumerate(strengths) if strength is not None}
        variants = [Variant(AGAIN, 0, 0.0, 0, None, max(self.steps) + AFTER)] + [
            Variant(f"{v}-{step}", v, strength, step - 1, None, step + AFTER)
            for v, strength in known.items()
            for step in self.steps
        ]
        replayed = serving.serve(self.sequences, variants, units, folder)
        prove(self.unembedding, *replayed.recorded(), f"{serving.options['model']}")
        at = np.array(self.steps) - 1 + AFTER
        plain = replayed.rows(PLAIN, at)
        floor = self._floor(replayed, at)
        decays = {}
        for v in known:
            parts = self._differences(replayed, self._at(replayed, f"{v}", at), plain)
            read = Read("held", "vector", 1.0, AFTER, *parts, self.group)
            decays[v] = decay_of(read, effects_of(read, self.steps), floor, self.limits)
        return decays


def steered(
    pairs: Sequence[tuple[SteeredPair, Rows, Rows]],
    measure: Callable[[Rows], Sequence[Measured]],
    steps: Sequence[int],
    n_requests: int,
) -> FeatureSteering:
    """Return what the directions of matched features do, and what the pairs of each arm come to.

    Args:
        pairs: each with the directions of both features ``(d_model,)``.
        measure: dose and decay of directions of length 1 ``(n, d_model)``.
    """
    rows = np.concatenate([two for _, *two in pairs])
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # One of the reference's is in a pair of every arm.
    units, of = np.unique(rows, axis=0, return_inverse=True)
    measured = measure(units.astype(np.float32))
    done = []
    for (pair, *_), two in zip(pairs, of.reshape(-1, 2).tolist(), strict=True):
        known = [decay for _, decay in (measured[v] for v in two) if decay is not None]
        update = {
            "doses": [measured[v][0] for v in two],
            "outcomes": [decay.outcome for decay in known],
            "ratios": [decay.ratio[-1] for decay in known],
        }
        done.append(pair.model_copy(update=update))
    arms = dict.fromkeys((pair.arm, pair.kind) for pair in done)
    of_arms = [_arm([pair for pair in done if (pair.arm, pair.kind) == arm]) for arm in arms]
    return FeatureSteering(
        steps=list(steps), after=AFTER, n_requests=n_requests, arms=of_arms, pairs=done
    )


def _arm(pairs: Sequence[SteeredPair]) -> SteeredArm:
    doses = [(first, second) for first, second in (p.doses for p in pairs) if first and second]
    ratios = np.sort([second / first for first, second in doses])
    decided = [set(p.outcomes) for p in pairs if len(p.outcomes) == 2]
    agree = [len(outcomes) == 1 for outcomes in decided if "undecided" not in outcomes]
    low, high = _interval(ratios)
    return SteeredArm(
        arm=pairs[0].arm,
        kind=pairs[0].kind,
        n=len(pairs),
        cosine=float(np.mean([pair.cosine for pair in pairs])),
        n_doses=len(ratios),
        ratio=float(np.median(ratios)) if len(ratios) else None,
        low=low,
        high=high,
        n_decided=len(agree),
        agree=float(np.mean(agree)) if agree else None,
    )


def _interval(ordered: Floats) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the median: values that a sign test does not rule out.

    None of fewer than six, whose least and largest leave out more than 5 %.
    """
    from scipy.stats import binom  # type: ignore[import-untyped]

    k = int(binom.ppf(0.025, len(ordered), 0.5)) if len(ordered) else 0
    return (float(ordered[k - 1]), float(ordered[-k])) if k else (None, None)
