"""Strata: of what kinds of tokens much was lost, where the means say nothing.

A mean can stand still while every row of one token id, of one source or of the largest norms is
gone. Counted are computed and lost tokens of each stratum by block of the jackknife; a request
counts in the block in which it began, wherever its tokens were computed. Beside the passes; what
follows from spans alone is counted here, a span at a time. Imports the lookup, `sources` and the
statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actds.format.positions import pair_key, split_key
from actds_validators.audit.class_counts import N_BANDS
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.result import Limits, StratumLoss
from actds_validators.audit.sources import RunSource
from actds_validators.statistics.strata import stratum_p

__all__ = ["MAX_CANDIDATES", "MIN_TOKENS", "SpanStrata", "Strata", "candidates", "worst_strata"]

MIN_TOKENS = 20
"""Computed tokens of a stratum, at least: of fewer a share says nothing."""
MAX_CANDIDATES = 256
"""Strata of one kind that are counted block by block: those that lost most beyond the rest."""
LEVEL = 0.01
"""Chance that any stratum of a kind is named where losses know nothing of it (Bonferroni)."""
MAX_NAMED = 50
"""Strata in the result at most."""
PHASES = ("decode", "prefill")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Strata:
    """Strata of one kind.

    Args:
        kind: what they are strata of.
        labels: of each, in words.
        n: computed tokens ``(n_strata, n_blocks)``.
        lost: lost ones.
        n_tested: strata of the kind that could have been named, those that are not here as well.
    """

    kind: str
    labels: list[str]
    n: Floats
    lost: Floats
    n_tested: int


def candidates(n: Floats, lost: Floats, limits: Limits) -> Ints:
    """Return the strata to count block by block: those beyond the limit, `MAX_CANDIDATES` at most.

    Where there are more, those whose loss is the least likely of independent tokens (a ranking, no
    test).

    Args:
        n: computed tokens of each stratum.
        lost: lost ones.
        limits: the share that warns.
    """
    rate = lost.sum() / max(1.0, float(n.sum()))
    beyond = np.flatnonzero((n >= MIN_TOKENS) & (lost >= limits.worst_stratum_warn * n))
    beyond = beyond[lost[beyond] > 0]
    if len(beyond) <= MAX_CANDIDATES:
        return beyond
    gone, expected = lost[beyond], n[beyond] * rate
    surprise = gone * np.log(gone / expected) - gone + expected
    return np.sort(beyond[np.argsort(-surprise, kind="stable")[:MAX_CANDIDATES]])


@dataclass
class _Groups:
    """Groups of requests by name, as sums by block; as many numbers as requests."""

    names: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[Ints, Ints, Floats, Floats]] = field(default_factory=list)

    def add(self, group: Ints, block: Ints, n: Floats, lost: Floats) -> None:
        """Add requests; those of no group have -1."""
        used = group >= 0
        pairs, at = np.unique(pair_key(group[used], block[used]), return_inverse=True)
        at = at.reshape(-1)
        self.parts.append(
            (
                *split_key(pairs),
                _summed(at, n[used], len(pairs)),
                _summed(at, lost[used], len(pairs)),
            )
        )

    def places(self, names: list[str | None]) -> Ints:
        """Return the number of each name, new ones in their order, -1 without one."""
        return np.array(
            [-1 if w is None else self.names.setdefault(w, len(self.names)) for w in names],
            np.int64,
        )

    def strata(self, kind: str, n_blocks: int, limits: Limits, rates: Floats) -> Strata:
        """Return the groups beyond the limit."""
        size = len(self.names)
        if not size:
            return Strata(kind, [], np.zeros((0, n_blocks)), np.zeros((0, n_blocks)), 0)
        group, block, n, lost = (np.concatenate([part[k] for part in self.parts]) for k in range(4))
        total = _summed(group, n, size)
        # One that was there in too few blocks could not have been named.
        blocks = np.bincount(np.unique(group * n_blocks + block) // n_blocks, minlength=size)
        testable = (total >= MIN_TOKENS) & (blocks >= 3)
        gone = _summed(group, lost, size)
        chosen = candidates(np.where(testable, total, 0.0), gone, limits)
        place = np.full(size, -1)
        place[chosen] = np.arange(len(chosen))
        mine = place[group] >= 0
        at = place[group[mine]] * n_blocks + block[mine]
        shape = len(chosen), n_blocks
        words = list(self.names)
        return Strata(
            kind,
            [words[k] for k in chosen],
            _summed(at, n[mine], shape[0] * n_blocks).reshape(shape),
            _summed(at, lost[mine], shape[0] * n_blocks).reshape(shape),
            int(testable.sum()),
        )


class SpanStrata:
    """What the spans and drops of all runs say: by request, phase and position.

    Args:
        n_blocks: of the jackknife.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._bands = {name: np.zeros((2, N_BANDS, n_blocks)) for name in ("start", "end")}
        self._phases = np.zeros((2, 2, n_blocks))
        self.total = np.zeros((2, n_blocks))
        self._sources, self._prefixes = _Groups(), _Groups()
        self.whole: list[int] = [0, 0]

    def add(self, source: RunSource, lookup: Lookup) -> None:
        """Add a run: its captured spans, and what it dropped."""
        losses = lookup.losses
        n = np.zeros((2, len(lookup.request_block)))
        for lost, (request, start, stop) in (
            (0, _captured(source, lookup)),
            (1, (losses.request, losses.start, losses.stop)),
        ):
            length = (stop - start).astype(np.float64)
            n[lost] = np.bincount(request, weights=length, minlength=n.shape[1])
            block = lookup.request_block[request]
            own = lookup.request_len[request]
            self._add_bands("start", lost, start, stop, block)
            self._add_bands("end", lost, own - stop, own - start, block)
            prompt = lookup.prompt_len[request]
            prefill = np.clip(np.minimum(stop, prompt) - start, 0, None).astype(np.float64)
            for phase, weights in ((1, prefill), (0, length - prefill)):
                self._phases[lost, phase] += np.bincount(
                    block, weights=weights, minlength=self.n_blocks
                )
        for lost in (0, 1):
            self.total[lost] += np.bincount(
                lookup.request_block, weights=n[lost], minlength=self.n_blocks
            )
        computed = n.sum(axis=0)
        self.whole[0] += int(((n[1] > 0) & (n[0] == 0)).sum())
        self.whole[1] += int((computed > 0).sum())
        for groups, names in (
            (self._sources, lookup.source_names),
            (self._prefixes, _prefixes(source, lookup)),
        ):
            groups.add(groups.places(names), lookup.request_block, computed, n[1])

    @property
    def rate(self) -> Floats:
        """Return the share lost of the tokens of each block, ``(n_blocks,)``."""
        computed = self.total.sum(axis=0)
        found = np.zeros(self.n_blocks)
        np.divide(self.total[1], computed, out=found, where=computed > 0)
        return found

    def strata(self, limits: Limits) -> Iterator[Strata]:
        """Yield the strata of each kind."""
        for name, kind in (("start", "position"), ("end", "position from the end")):
            stored, lost = self._bands[name]
            yield _some(kind, [_range(k) for k in range(N_BANDS)], stored + lost, lost)
        stored, lost = self._phases
        yield _some("phase", list(PHASES), stored + lost, lost)
        yield self._sources.strata("source", self.n_blocks, limits, self.rate)
        yield self._prefixes.strata("first prompt block", self.n_blocks, limits, self.rate)

    def _add_bands(self, name: str, lost: int, start: Ints, stop: Ints, block: Ints) -> None:
        """Add ranges to bands of powers of two; what lies below 0 is in none."""
        for band in range(N_BANDS):
            low, high = 2**band - 1, 2 ** (band + 1) - 1
            inside = np.minimum(stop, high) - np.maximum(start, low)
            some = np.flatnonzero(inside > 0)
            if len(some):
                self._bands[name][lost, band] += np.bincount(
                    block[some], weights=inside[some].astype(np.float64), minlength=self.n_blocks
                )
            if not len(some) and low >= int(stop.max(initial=0)):
                break


def _summed(at: Ints, weights: Floats, size: int) -> Floats:
    return np.bincount(at, weights=weights, minlength=size).astype(np.float64, copy=False)


def _captured(source: RunSource, lookup: Lookup) -> tuple[Ints, Ints, Ints]:
    """Return request (its place), start and stop of the captured spans."""
    found = source.columns(
        'select request::bigint request, "start"::bigint "start", "stop"::bigint "stop" '
        "from spans where disposition = 'captured' and stop > start"
    )
    request = lookup.requests.of(found["request"])
    known = request >= 0
    return request[known], found["start"][known], found["stop"][known]


def _prefixes(source: RunSource, lookup: Lookup) -> list[str | None]:
    """Return, for each request, what names the first block of its prompt; None without one."""
    found: list[str | None] = [None] * len(lookup.request_block)
    rows = source.rows(
        "select request::bigint, hex(block_digests[1]), count(*) over same, "
        "min(request) over same from requests where len(block_digests) > 0 "
        "window same as (partition by block_digests[1])"
    )
    places = lookup.requests.of(np.array([row[0] for row in rows], np.int64)).tolist()
    for place, (_, digest, n, _first) in zip(places, rows, strict=True):
        if n > 1 and place >= 0:
            found[place] = f"{digest[:16].lower()}…"
    return found


def _some(kind: str, labels: list[str], n: Floats, lost: Floats) -> Strata:
    """Return the strata that hold enough tokens."""
    used = np.flatnonzero(n.sum(axis=1) >= MIN_TOKENS)
    return Strata(kind, [labels[k] for k in used], n[used], lost[used], len(used))


def _range(band: int) -> str:
    low, high = 2**band - 1, 2 ** (band + 1) - 2
    return f"{low:,} to {high:,}" if band else "0"


def worst_strata(found: list[Strata], rate: Floats, limits: Limits) -> list[StratumLoss]:
    """Return the strata that lost more than the limit and more than chance, the worst first.

    Args:
        found: of every kind.
        rate: share lost of each block's tokens.
        limits: the share that warns.

    Spec: 0.1 section 14.6.
    """
    named = []
    for strata in found:
        n, lost = strata.n.sum(axis=1), strata.lost.sum(axis=1)
        beyond = np.flatnonzero((n >= MIN_TOKENS) & (lost >= limits.worst_stratum_warn * n))
        if not len(beyond) or not strata.n_tested:
            continue
        p = stratum_p(strata.n[beyond], strata.lost[beyond], rate)
        for k, one in zip(beyond, np.minimum(1.0, p * strata.n_tested), strict=True):
            if one <= LEVEL:
                named.append(
                    StratumLoss(
                        kind=strata.kind,
                        label=strata.labels[k],
                        n=int(n[k]),
                        n_lost=int(lost[k]),
                        rate=float(lost[k] / n[k]),
                        n_blocks=int((strata.lost[k] > 0).sum()),
                        adjusted_p=float(one),
                    )
                )
    return sorted(named, key=lambda s: (-s.rate, -s.n_lost, s.kind, s.label))[:MAX_NAMED]
