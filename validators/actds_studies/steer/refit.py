"""Regime or component: why a direction of prompts does less in answers.

A direction of prompts acts on rows of prompts, and on rows of answers at the same positions; there
a direction of answers acts as well. Where that does what the first no longer does, answers are
another regime for the direction; where it does not, the model uses the component less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from actds.errors import ActdsError
from actds.explore.dataset import Dataset
from actds.explore.requests import TokenSequence
from actds.loader.selection import select
from actds_studies.regimes.entropies import Unembedding
from actds_studies.steer.measure import differences, groups_by_prompt, strength_at
from actds_studies.steer.replays import PLAIN, Replayed, Variant, prompt_of
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
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.result import Estimate

SHARES = tuple(2.0**k for k in range(-3, 4))
"""Strengths of a direction and its refit, over that of a dose of 1 in answers."""
N_PLACES = 4
"""Positions that prompts and answers both have, at which a direction and its refit act."""
N_AT_ONCE = 8192


@dataclass(frozen=True)
class _Rows:
    """Rows that an expression holds of: number in the array, request, position, whether sampled."""

    where: str
    row: Ints
    request: Ints
    position: Ints
    sampled: Bools


class Contrast:
    """Two selections of rows of a hook, of requests that are not steered.

    Args:
        sequences: the requests; no prompt of them is steered.
        pair: an expression each. Position 0 is left out: its rows are sinks, hundreds of times
            longer than the others.
    """

    def __init__(
        self,
        source: Dataset,
        hook: str,
        sequences: Sequence[TokenSequence],
        pair: tuple[str, str],
        seed: int,
    ) -> None:
        self.source, self.hook, self.sequences = source, hook, sequences
        self.words = f"{pair[0]} against {pair[1]}"
        self.pair = [self._rows(where) for where in pair]
        numbers: dict[bytes, int] = {}
        prompt = [numbers.setdefault(prompt_of(s), len(numbers)) for s in sequences]
        self._half = np.random.default_rng(seed).permutation(len(numbers))[prompt] % 2

    def _rows(self, where: str) -> _Rows:
        selection = select(self.source, self.hook, None, where=where)
        shards = self.source.shards_of(self.hook)
        starts = accumulate((shard.n_rows for shard in shards), initial=0)
        start_of = dict(zip((shard.name for shard in shards), starts, strict=False))
        numbers = {(s.run, s.request): n for n, s in enumerate(self.sequences)}
        n_given = np.array([s.n_given for s in self.sequences], np.int64)
        parts = [np.zeros((4, 0), np.int64)]
        for shard in selection.shards:
            kept = selection.filter.kept(shard)
            table = shard.tokens(["request", "position"])
            request, position = (table[name].to_numpy() for name in ("request", "position"))
            known, at = np.unique(request, return_inverse=True)
            of = np.array([numbers.get((shard.run, r), -1) for r in known.tolist()], np.int64)[at]
            mask = (of >= 0) & (position > 0) & (True if kept is None else kept)
            row = start_of[shard.name] + np.flatnonzero(mask)
            sampled = position[mask] >= n_given[of[mask]]
            parts.append(np.stack([row, of[mask], position[mask], sampled]).astype(np.int64))
        row, of, position, sampled = np.concatenate(parts, axis=1)
        return _Rows(where, row, of, position, sampled.astype(bool))

    def direction(self, side: Side | None = None, half: int | None = None) -> Floats:
        """Return the mean of the first rows less that of the second, of length 1.

        Args:
            side: of these rows only; half: of the requests with half of the prompts only.

        Raises:
            ActdsError: E014 no rows.
        """
        means = []
        for rows in self.pair:
            kept = np.ones(len(rows.row), bool) if side is None else _on(rows, side)
            kept &= True if half is None else self._half[rows.request] == half
            numbers, array, total = rows.row[kept], self.source.array(self.hook), 0.0
            if not len(numbers):
                among = "" if side is None else f" of {'half of ' * (half is not None)}the {side}"
                got = f"{rows.where}, of no row{among} that is not steered"
                raise ActdsError("E014", "where", got=got, expected="some")
            for start in range(0, len(numbers), N_AT_ONCE):
                values = array[numbers[start : start + N_AT_ONCE]]
                total = total + values.astype(np.float64).sum(axis=0)
            means.append(total / len(numbers))
        vector = np.asarray(means[0] - means[1], np.float64)
        return vector / max(float(np.linalg.norm(vector)), 1e-30)

    def drawn(self, n: int, seed: int) -> Ints:
        """Return the numbers of some requests that have rows."""
        known = np.unique(np.concatenate([rows.request for rows in self.pair]))
        return np.random.default_rng(seed).permutation(known)[:n]

    def aim(self, replayed: Replayed, place: Ints) -> Floats:
        """Return how far apart the last rows of the two selections lie ``(d_model,)``.

        The mean of the difference in prompts and of that in answers.

        Args:
            place: number of each request in the replay, -1 where it is not in it.
        """
        gaps = []
        for side in SIDES:
            means = []
            for rows in self.pair:
                kept = (place[rows.request] >= 0) & _on(rows, side)
                at = replayed.at(PLAIN, place[rows.request[kept]], rows.position[kept])
                means.append(replayed.values(at[at >= 0]).mean(axis=0, dtype=np.float64))
            gaps.append(means[0] - means[1])
        return np.asarray(np.mean(gaps, axis=0))


def _on(rows: _Rows, side: Side) -> Bools:
    return np.asarray(rows.sampled == (side == "answers"))


@dataclass(frozen=True)
class Refit:
    """What is served to tell a regime from a component.

    Args:
        sequences: requests that are steered; the numbers of ``places`` are theirs.
        norm: returns the median norm of rows of some requests at a position.
        dose: the strength of a dose of 1 in answers, over the median norm of rows.
    """

    contrast: Contrast
    sequences: Sequence[TokenSequence]
    norm: Callable[[list[int], int], float]
    dose: float
    limits: Limits

    def run(
        self,
        serve: Callable[..., Replayed],
        unembedding: Unembedding,
    ) -> Components:
        places, shares = self._places(), np.array(SHARES) * self.dose
        vectors = [self.contrast.direction(side) for side in SIDES]
        random = np.random.default_rng(self.limits.seed).normal(size=vectors[0].shape)
        vectors.append(random / np.linalg.norm(random))
        halves = [[self.contrast.direction(side, half) for half in (0, 1)] for side in SIDES]
        norms = {
            (p, side): self.norm(members.tolist(), p)
            for p, of_side in places.items()
            for side, members in of_side.items()
        }
        variants = [
            Variant(
                f"{arm}-{p}-{k}",
                vector,
                float(share) * norms[p, side],
                p,
                p + 1,
                p + 1,
                None,
                of_side[side].tolist(),
            )
            for arm, (side, vector) in enumerate(ARMS.values())
            for p, of_side in places.items()
            for k, share in enumerate(shares)
        ]
        drawn = self.contrast.drawn(2 * self.limits.requests, self.limits.seed)
        further = [self.contrast.sequences[n] for n in drawn.tolist()]
        every = [*self.sequences, *further]
        replayed = serve(every, variants, np.stack(vectors).astype(np.float32))
        place = np.full(len(self.contrast.sequences), -1)
        place[drawn] = len(self.sequences) + np.arange(len(drawn))
        aim = self.contrast.aim(replayed, place)
        sides = {side: np.concatenate([of[side] for of in places.values()]) for side in SIDES}
        seed, both = self.limits.seed, (sides["prompts"], sides["answers"])
        group = groups_by_prompt(self.sequences, seed, both)
        acted = {}
        for arm, (name, (side, _)) in enumerate(ARMS.items()):
            parts = [
                _acted(replayed, unembedding, aim, (f"{arm}-{p}", p, of_side[side]))
                for p, of_side in places.items()
            ]
            aimed, divergence = np.concatenate(parts, axis=1)
            known = np.isfinite(divergence).all(axis=1)
            acted[name] = Acted(aimed[known], divergence[known], group[sides[side]][known])
        return components_of(
            acted,
            shares,
            self.limits,
            [(p, len(of_side["prompts"])) for p, of_side in places.items()],
            float(vectors[0] @ vectors[1]),
            {side: float(a @ b) for side, (a, b) in zip(SIDES, halves, strict=True)},
        )

    def _places(self) -> dict[int, dict[Side, Ints]]:
        """Return positions that prompts and answers have, and as many requests of either there."""
        given = np.array([s.n_given for s in self.sequences])
        n = np.array([len(s.token_id) for s in self.sequences])
        at = np.arange(1, n.max())[:, np.newaxis]
        has: dict[Side, Bools] = {"prompts": at < given, "answers": (given <= at) & (at < n)}
        least = np.minimum(*(of_side.sum(axis=1) for of_side in has.values()))
        least[least < 2] = 0
        if not least.any():
            got = "no position that two prompts and two answers have"
            expected = "prompts that are as long as others with their answers"
            raise ActdsError("E014", "refit", got=got, expected=expected)
        wanted = (np.arange(N_PLACES) + 0.5) / N_PLACES * least.sum()
        rng = np.random.default_rng(self.limits.seed)
        return {
            int(at[k, 0]): {
                side: np.sort(rng.permutation(np.flatnonzero(of_side[k]))[: least[k]])
                for side, of_side in has.items()
            }
            for k in np.unique(np.searchsorted(np.cumsum(least), wanted)).tolist()
        }


def _acted(
    replayed: Replayed, unembedding: Unembedding, aim: Floats, of: tuple[str, int, Ints]
) -> Floats:
    """Return what each strength does at a position, along the aim and in nats ``(2, n, k)``."""
    name, p, members = of
    at = np.full(len(members), p)
    plain = replayed.at(PLAIN, members, at)
    read = [
        differences(unembedding, replayed, replayed.at(f"{name}-{k}", members, at), plain)
        for k in range(len(SHARES))
    ]
    aimed = [change @ aim / (aim @ aim) for _, change in read]
    return np.stack([np.stack(aimed, axis=1), np.stack([nats for nats, _ in read], axis=1)])


@dataclass(frozen=True)
class Acted:
    """What one arm does at each strength, by request and position ``(n, n_strengths)``.

    Args:
        aimed: change of the last row along the aim, over the length of the aim.
        divergence: nats.
        group: of requests that count together ``(n,)``.
    """

    aimed: Floats
    divergence: Floats
    group: Ints


def components_of(
    acted: Mapping[ArmName, Acted],
    shares: Floats,
    limits: Limits,
    positions: list[tuple[int, int]],
    cosine: float,
    split_half: dict[Side, float],
) -> Components:
    """Return whether answers lost the effect of a direction, and whether a refit restores it.

    Strengths of a dose are found anew without each group, so that intervals hold them too.

    Args:
        shares: strengths over the median norm of rows ``(n_strengths,)``.
    """
    from actds_validators.statistics.intervals import from_replicates

    groups = np.unique(np.concatenate([arm.group for arm in acted.values()]))
    value = _at_doses(acted, shares, limits, -1)
    without = np.stack([_at_doses(acted, shares, limits, g) for g in groups.tolist()], axis=-1)
    flat = from_replicates(value.ravel(), without.reshape(value.size, -1))
    intervals = np.array([Estimate.of(v) for v in flat], object).reshape(value.shape)
    arms = [
        ActedArm(
            arm=arm,
            dosing=dosing,
            share=float(value[d, a, 0]) if np.isfinite(value[d, a, 0]) else None,
            aimed=intervals[d, a, 1],
            divergence=intervals[d, a, 2],
        )
        for d, dosing in enumerate(DOSINGS)
        for a, arm in enumerate(acted)
    ]
    first = list(acted).index("prompts")
    by_dosing = {
        dosing: component_of(
            intervals[d, first, 1], intervals[d, -1, 0], intervals[d, -1, 1], split_half, limits
        )
        for d, dosing in enumerate(DOSINGS)
    }
    outcome, reason = agreed(by_dosing)
    return Components(
        outcome=outcome,
        reason=reason,
        by_dosing=by_dosing,
        kept={dosing: intervals[d, -1, 0] for d, dosing in enumerate(DOSINGS)},
        restored={dosing: intervals[d, -1, 1] for d, dosing in enumerate(DOSINGS)},
        positions=positions,
        n_groups=len(groups),
        cosine=cosine,
        split_half=split_half,
        arms=arms,
        curves={
            arm: [
                (float(s), float(np.quantile(k, limits.quantile)), float(e.mean()))
                for s, k, e in zip(shares, of.divergence.T, of.aimed.T, strict=True)
            ]
            for arm, of in acted.items()
        },
    )


def _at_doses(
    acted: Mapping[ArmName, Acted], shares: Floats, limits: Limits, without: int
) -> Floats:
    """Return strength, aimed effect and divergence of each dosing and arm ``(2, n_arms + 1, 3)``.

    The last line of each dosing: the effect that is kept in answers, over that in prompts, and the
    part of the lost one that a refit restores. NaN where no strength has the nats.
    """
    result = np.full((len(DOSINGS), len(acted) + 1, 3), np.nan)
    means = {}
    for a, (name, arm) in enumerate(acted.items()):
        some = arm.group != without
        quantiles = np.quantile(arm.divergence[some], limits.quantile, axis=0)
        share = strength_at(
            list(zip(shares.tolist(), quantiles.tolist(), strict=True)), limits.nats
        )
        result[0, a, 0] = np.nan if share is None else share
        means[name] = arm.aimed[some].mean(axis=0), arm.divergence[some].mean(axis=0)
    result[1, :-1, 0] = result[0, list(acted).index("prompts"), 0]
    for line in result:
        for a, name in enumerate(acted):
            line[a, 1:] = [np.interp(line[a, 0], shares, mean) for mean in means[name]]
        of = dict(zip(acted, line[:, 1].tolist(), strict=False))
        lost = of["prompts"] - of["carried"]
        line[-1, 0] = of["carried"] / of["prompts"] if of["prompts"] else np.nan
        line[-1, 1] = (of["refitted"] - of["carried"]) / lost if lost else 0.0
        line[-1, 2] = 0.0
    return result
