"""Regime or component: why a direction of prompts does less in answers.

A direction of prompts acts on rows of prompts, and on rows of answers at the same positions; there
a direction of answers acts as well. Where that does what the first no longer does, answers are
another regime for the direction; where it does not, the model uses the component less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import TokenSequence
from actds_studies.regimes.arms import Arm, ArmRows, read_arm
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.measure import clusters, differences, groups_by_prompt, strength_at
from actds_studies.steer.replays import PLAIN, Replayed, Variant
from actds_studies.steer.result import (
    ARMS,
    DOSINGS,
    SIDES,
    ActedArm,
    ArmName,
    Components,
    Limits,
    Side,
    agreed,
    component_of,
)
from actds_validators.arrays import Bools, Floats, Ints, Rows
from actds_validators.audit.result import Estimate

N_PLACES = 4
"""Positions that prompts and answers both have, at which a direction and its refit act."""
N_AT_ONCE = 8192


class Directions:
    """Two selections of rows of a hook, an expression each, of the requests that are ``free``.

    As in ``actds regimes`` each prefix counts once, and position 0 not, whose rows are sinks,
    hundreds of times longer than the others. ``sequences`` is every request of the source.
    """

    def __init__(
        self,
        source: Dataset,
        hook: str,
        sequences: Sequence[TokenSequence],
        free: Bools,
        pair: tuple[str, str],
        seed: int,
    ) -> None:
        self._array, self.sequences = source.array(hook), sequences
        self.words, self._where, self.pair = " against ".join(pair), pair, []
        for where in pair:
            rows = read_arm(Arm(where, source, where=where), hook)
            self.pair.append(rows.take(np.flatnonzero(free[rows.request])))
        prompt = clusters(sequences)
        self._half = np.random.default_rng(seed).permutation(len(prompt))[prompt] % 2

    def direction(self, side: Side | None = None, half: int | None = None) -> Floats:
        """Return the mean of the first rows less that of the second, of length 1.

        Of one side and half of the prompts alone, or of all. Raises E014 where no row is left.
        """
        among = np.full(len(self._half), True) if half is None else self._half == half
        vector = self._gap(lambda rows: self._array[rows.row], side, among)
        return vector / max(float(np.linalg.norm(vector)), 1e-30)

    def _gap(self, values: Callable[[ArmRows], Rows], side: Side | None, among: Bools) -> Floats:
        means = []
        for rows, where in zip(self.pair, self._where, strict=True):
            kept = among[rows.request]
            kept &= True if side is None else (rows.decode_step > 0) == (side == "answers")
            total, n, at = 0.0, 0, np.flatnonzero(kept)
            for start in range(0, len(at), N_AT_ONCE):
                part = values(rows.take(at[start : start + N_AT_ONCE]))
                part = part[np.isfinite(part).all(axis=1)]
                total, n = total + part.astype(np.float64).sum(axis=0), n + len(part)
            if not n:
                whose = "" if side is None else f" of {'half of ' * (not among.all())}the {side}"
                got = f"{where}, of no row{whose} that is not steered"
                raise ActdsError("E014", "where", got=got, expected="some")
            means.append(total / n)
        return np.asarray(means[0] - means[1])

    def aim(self, replayed: Replayed, place: Ints) -> Floats:
        """Return how far apart the last rows of the selections lie, the mean of both sides.

        ``place`` is the number of each request in the replay, -1 where it is not in it.
        """

        def last(rows: ArmRows) -> Rows:
            return replayed.values(replayed.at(PLAIN, place[rows.request], rows.position))

        return np.asarray(np.mean([self._gap(last, side, place >= 0) for side in SIDES], axis=0))


def refit(
    contrast: Directions,
    sequences: Sequence[TokenSequence],
    norm: Callable[[list[int], int], float],
    shares: Floats,
    limits: Limits,
    serve: Callable[..., Replayed],
    unembedding: Unembedding,
) -> Components:
    """Let a direction of prompts and its refit act at the same positions, and say what they do.

    Args:
        norm: returns the median norm of rows of some sequences at a position.
        shares: strengths over that norm.
    """
    places = places_of(sequences, limits)
    vectors = [contrast.direction(side) for side in SIDES]
    random = np.random.default_rng(limits.seed).normal(size=len(vectors[0]))
    vectors.append(random / np.linalg.norm(random))
    halves = {side: [contrast.direction(side, half) for half in (0, 1)] for side in SIDES}
    variants = []
    for arm, (side, vector) in enumerate(ARMS.values()):
        for p, of_side in places.items():
            members = of_side[side].tolist()
            for k, strength in enumerate((shares * norm(members, p)).tolist()):
                what = (f"{arm}-{p}-{k}", vector, strength, p, p + 1, p + 1, None, members)
                variants.append(Variant(*what))
    of_pair = np.unique(np.concatenate([rows.request for rows in contrast.pair]))
    drawn = np.random.default_rng(limits.seed).permutation(of_pair)[: 2 * limits.requests]
    every = [*sequences, *(contrast.sequences[n] for n in drawn.tolist())]
    replayed = serve(every, variants, np.stack(vectors).astype(np.float32))
    place = np.full(len(contrast.sequences), -1)
    place[drawn] = len(sequences) + np.arange(len(drawn))
    aim = contrast.aim(replayed, place)
    aim /= aim @ aim
    left, right = (np.concatenate([of[side] for of in places.values()]) for side in SIDES)
    group = groups_by_prompt(sequences, limits.seed, (left, right))
    acted = {}
    for arm, (name, (side, _)) in enumerate(ARMS.items()):
        of_arm = left if side == "prompts" else right
        at = np.concatenate([np.full(len(of[side]), p) for p, of in places.items()])
        plain = replayed.at(PLAIN, of_arm, at)
        aimed, nats = [], []
        for k in range(len(shares)):
            rows = [replayed.at(f"{arm}-{p}-{k}", of[side], p) for p, of in places.items()]
            divergence, change = differences(unembedding, replayed, np.concatenate(rows), plain)
            aimed.append(change @ aim)
            nats.append(divergence)
        known = np.isfinite(nats).all(axis=0)
        along, divergences = (np.stack(of, axis=1)[known] for of in (aimed, nats))
        acted[name] = Acted(along, divergences, group[of_arm[known]])
    about = {
        "positions": [(p, len(of_side["prompts"])) for p, of_side in places.items()],
        "cosine": float(vectors[0] @ vectors[1]),
        "split_half": {side: float(a @ b) for side, (a, b) in halves.items()},
    }
    return components_of(acted, shares, limits, about)


def places_of(sequences: Sequence[TokenSequence], limits: Limits) -> dict[int, dict[Side, Ints]]:
    """Return positions that prompts and answers have, and as many requests of either there."""
    given = np.array([s.n_given for s in sequences])
    n = np.array([len(s.token_id) for s in sequences])
    at = np.arange(1, n.max())[:, np.newaxis]
    has: dict[Side, Bools] = {"prompts": at < given, "answers": (given <= at) & (at < n)}
    least = np.minimum(*(of_side.sum(axis=1) for of_side in has.values()))
    least = np.where(least < 2, 0, np.minimum(least, limits.requests))
    if not least.any():
        got = "no position that two prompts and two answers have"
        expected = "prompts that are as long as others with their answers"
        raise ActdsError("E014", "refit", got=got, expected=expected)
    wanted = (np.arange(N_PLACES) + 0.5) / N_PLACES * least.sum()
    rng = np.random.default_rng(limits.seed)
    return {
        int(at[k, 0]): {
            side: np.sort(rng.permutation(np.flatnonzero(of_side[k]))[: least[k]])
            for side, of_side in has.items()
        }
        for k in np.unique(np.searchsorted(np.cumsum(least), wanted)).tolist()
    }


class Acted(NamedTuple):
    """What one arm does at each strength, by request and position ``(n, n_strengths)``.

    ``aimed`` is the change of the last row along the aim, over the length of the aim; ``group``,
    of requests that count together, is ``(n,)``.
    """

    aimed: Floats
    divergence: Floats
    group: Ints


def components_of(
    acted: Mapping[ArmName, Acted], shares: Floats, limits: Limits, about: Mapping[str, Any]
) -> Components:
    """Return whether answers lost the effect of a direction, and whether a refit restores it.

    The strengths of as many nats are found anew without each group: intervals hold them too.
    """
    from actds_validators.statistics.intervals import from_replicates

    groups = np.unique(np.concatenate([arm.group for arm in acted.values()]))
    value = _at_doses(acted, shares, limits)
    share = value[1, 0, 0]  # the same strength in all replicates, other than at as many nats
    parts = [_at_doses(acted, shares, limits, group, share) for group in groups.tolist()]
    without = np.stack(parts, axis=-1)
    flat = from_replicates(value.ravel(), without.reshape(value.size, -1))
    intervals = np.array([Estimate.of(v) for v in flat], object).reshape(value.shape)
    arms = []
    for d, values, of_dosing in zip(DOSINGS, value, intervals, strict=True):
        for a, line, of in zip(acted, values, of_dosing, strict=False):
            share = float(line[0]) if np.isfinite(line[0]) else None
            arms.append(ActedArm(arm=a, dosing=d, share=share, aimed=of[1], divergence=of[2]))
    kept = {d: intervals[n, -1, 0] for n, d in enumerate(DOSINGS)}
    lost = {d for d, of in kept.items() if of is not None and of.high < 1 - limits.margin}
    restored = {d: intervals[n, -1, 1] if d in lost else None for n, d in enumerate(DOSINGS)}
    halves = about["split_half"]["answers"]
    by_dosing = {
        d: component_of(intervals[n, 0, 1], kept[d], restored[d], halves, limits)
        for n, d in enumerate(DOSINGS)
    }
    outcome, reason = agreed(by_dosing)
    facts = {"by_dosing": by_dosing, "kept": kept, "restored": restored, "arms": arms, **about}
    return Components(outcome=outcome, reason=reason, n_groups=len(groups), **facts)


def _at_doses(
    acted: Mapping[ArmName, Acted],
    shares: Floats,
    limits: Limits,
    without: int = -1,
    fixed: float | None = None,
) -> Floats:
    """Return strength, aimed effect and divergence of each dosing and arm ``(2, n_arms + 1, 3)``.

    The last line: what is kept, and restored. NaN where no strength has the nats.
    """
    result = np.full((len(DOSINGS), len(acted) + 1, 3), np.nan)
    means = {}
    for a, (name, arm) in enumerate(acted.items()):
        some = arm.group != without
        quantiles = np.quantile(arm.divergence[some], limits.quantile, axis=0)
        share = strength_at(np.stack([shares, quantiles], axis=1).tolist(), limits.nats)
        result[0, a, 0] = np.nan if share is None else share
        means[name] = arm.aimed[some].mean(axis=0), arm.divergence[some].mean(axis=0)
    result[1, :-1, 0] = result[0, 0, 0] if fixed is None else fixed
    for line in result:
        for a, name in enumerate(acted):
            line[a, 1:] = [np.interp(line[a, 0], shares, mean) for mean in means[name]]
        of = dict(zip(acted, line[:, 1].tolist(), strict=False))
        lost = of["in prompts"] - of["carried"]
        line[-1, 0] = of["carried"] / of["in prompts"] if of["in prompts"] else np.nan
        line[-1, 1] = (of["refitted"] - of["carried"]) / lost if lost else 0.0
        line[-1, 2] = 0.0
    return result
