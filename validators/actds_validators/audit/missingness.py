"""Missingness: per covariate and kind of token, how what was lost differs from what there was.

A mean can stand still while every row of one token id, of one source or of the largest norms is
gone: strata are counted by block of the jackknife. A request counts in the block in which it began,
wherever its tokens were computed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actds.format.labels import label_table, label_text
from actds.format.positions import pair_key, split_key
from actds_validators.arrays import Floats, Ints
from actds_validators.audit import result
from actds_validators.audit.covariates import (
    COVARIATES,
    N_BANDS,
    Series,
    band_edges,
    band_words,
    defined,
)
from actds_validators.audit.data import RUN_LABELS, RunSource
from actds_validators.audit.lookup import Lookup
from actds_validators.audit.passes import Bands, CovariateSums, Measured
from actds_validators.statistics import intervals
from actds_validators.statistics.strata import jensen_shannon, stratum_p, total_variation

CURVE = (0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5)


def rate_estimate(interval: intervals.Interval | None, rate: float) -> result.Estimate:
    share = result.Estimate.of(interval) or result.Estimate(value=rate, low=0.0, high=1.0)
    return result.Estimate(value=share.value, low=max(0.0, share.low), high=min(1.0, share.high))


def unbounded(value: float, n: float, effective: float) -> result.Estimate | None:
    """Return a mean's distance whose jackknife says nothing, with the worst case about it."""
    if not np.isfinite(value) or effective <= 0:
        return None
    far = intervals.farthest_mean(n, effective)
    return result.Estimate(value=value, low=-far, high=far, confidence=1.0)


def system_sums(series: Series) -> list[CovariateSums]:
    return [
        CovariateSums(
            covariate.facts(), series.computed, series.system[covariate.name], series.lost
        )
        for covariate in defined("step")
    ]


def block_totals(blocks: intervals.Blocks, sums: list[CovariateSums]) -> Floats:
    # One by one: all of them side by side would be the largest arrays of an audit.
    each = [
        intervals.difference_sums(blocks, s.n, s.sums[:1], s.sums[1:2], s.n_lost, s.sums[2:])
        for s in sums
    ]
    return np.concatenate(each, axis=1)


def of_all_lost(totals: Floats, sums: list[CovariateSums], read: float) -> Floats:
    """Return totals in which the lost tokens that left readouts stand for those that left none.

    What only readouts tell of a lost token is else summed over too few: the stored rows would seem
    nearer to all than they are. The squares of these tokens are taken for those of all.

    Args:
        read: share of the lost tokens that left readouts.

    Spec: 0.1 section 14.3.
    """
    if not 0 < read < 1:
        return totals
    by_id = {name for name, covariate in COVARIATES.items() if covariate.needs_ids}
    needs = [
        summed.covariate.group == "values" or summed.covariate.name in by_id for summed in sums
    ]
    more = np.where(needs, 1 / read - 1, 0.0)[:, np.newaxis]
    n, _, sxx, n_lost, lx = totals
    square = sxx.sum(axis=1, keepdims=True) / np.maximum(n.sum(axis=1, keepdims=True), 1)
    completed: Floats = totals + more * np.stack([n_lost, lx, n_lost * square, n_lost, lx])
    return completed


def differences(
    sums: list[CovariateSums], totals: Floats, bands: dict[str, Bands], n_events: float
) -> list[result.Difference]:
    """Return the difference of every covariate that varies and of which something was lost.

    Where the jackknife has no interval, as when one block holds all losses, that of the worst case
    stands in its place, with confidence 1, and there is none for the equivalence test.
    """
    if not sums:
        return []
    every = []
    lost_against_all = intervals.jackknife_many(totals, intervals.smd)
    value, without = intervals.replicates(totals, intervals.smd_of_stored)
    stored_against_all = (
        intervals.from_replicates(value, without) if without.shape[1] > 1 else [None] * len(sums)
    )
    is_tested = [summed.covariate.group != "system" for summed in sums]
    at_once = intervals.joint_confidence(without[is_tested])
    for k, summed in enumerate(sums):
        n, sx, sxx, n_lost, lx = whole = totals[:, k].sum(axis=1)
        interval = lost_against_all[k]
        lost = result.Estimate.of(interval) or unbounded(float(intervals.smd(whole)), n, n_lost)
        if lost is None:
            continue
        stored = stored_against_all[k]
        error = intervals.error_of_draws(n, n_lost, n_events) if stored and interval else 0.0
        banded = bands.get(summed.covariate.name)
        every.append(
            result.Difference(
                covariate=summed.covariate,
                mean_all=sx / n,
                sd_all=float(np.sqrt(max(0.0, sxx / n - (sx / n) ** 2))),
                mean_lost=lx / n_lost,
                smd=lost,
                equivalence=result.Estimate.of(
                    # Of losses in one block the stored rows have a jackknife, too narrow by far.
                    intervals.at_least(stored, error, result.PROVEN)
                    if stored and interval
                    else None
                ),
                at_once=_at_once(stored, error, at_once) if interval and is_tested[k] else None,
                before_weighting=result.Estimate.of(stored)
                or unbounded(float(intervals.smd_of_stored(whole)), n, n - n_lost),
                total_variation=_distance(total_variation, banded),
                jensen_shannon=_distance(jensen_shannon, banded),
                strata=strata(banded) if banded else [],
            )
        )
    return every


def _at_once(
    stored: intervals.Interval | None, error: float, each: float
) -> result.Estimate | None:
    interval = result.Estimate.of(intervals.at_least(stored, error, each)) if stored else None
    return interval.model_copy(update={"confidence": 0.95}) if interval else None


def strata(bands: Bands) -> list[result.Stratum]:
    sums = np.stack([bands.n.T, bands.lost.T])
    rates = intervals.jackknife_many(sums, intervals.loss_rate)
    losses = []
    for k, label in enumerate(bands.labels):
        n, n_lost = float(bands.n[:, k].sum()), float(bands.lost[:, k].sum())
        if not n:
            continue
        edges = bands.edges[k]
        losses.append(
            result.Stratum(
                label=label,
                low=edges[0] if edges else None,
                high=edges[1] if edges else None,
                n=int(n),
                n_lost=int(n_lost),
                rate=rate_estimate(rates[k], n_lost / n),
            )
        )
    return losses


def bound(loss_share: float) -> result.Bound:
    share = min(loss_share, 1 - 1e-9)
    return result.Bound(
        loss_share=loss_share,
        bias=intervals.worst_case(share),
        curve=[result.BoundPoint(loss_share=s, bias=intervals.worst_case(s)) for s in CURVE],
    )


def missingness(
    differing: list[result.Difference], account: result.Accounting, measured: Measured
) -> result.Missingness:
    has_ids = any(covariate.needs_ids for covariate in measured.definitions)
    could = [
        "whether losses depend on the load, the batch and the time",
        "whether losses depend on position, length, phase and source",
    ]
    not_asked = []
    ids = "whether losses depend on the tokens themselves (rarity, special tokens)"
    values = "whether losses depend on the values of the rows, which is what MNAR means"
    if has_ids:
        could.append(ids)
    else:
        not_asked.append(f"{ids}: the ids of lost tokens are known only with readouts")
    if measured.scale:
        could.append(values)
    else:
        not_asked.append(f"{values}: the run has no readouts of lost rows")
    if account.unread and (has_ids or measured.scale):
        not_asked.append(
            f"either of {account.unread:,} of the {account.dropped:,} lost tokens: there was no "
            "room for their readouts, and in the means the others represent them"
        )
    entropy = "whether losses depend on the model's entropy over the next token"
    if any(covariate.needs_entropy for covariate in measured.definitions):
        could.append(entropy)
    else:
        not_asked.append(f"{entropy}: the run was not harvested with --entropy")
    return result.Missingness(
        differences=differing,
        bound=bound(account.loss_share),
        could_ask=could,
        could_not_ask=not_asked,
    )


def _distance(
    measure: Callable[[Floats, Floats], float | None], bands: Bands | None
) -> float | None:
    return measure(bands.lost.sum(axis=0), bands.n.sum(axis=0)) if bands else None


MIN_TOKENS = 20
"""Computed tokens of a stratum, at least: of fewer a share says nothing."""
MAX_CANDIDATES = 256
"""Strata of one kind that are counted block by block: those that lost most beyond the rest."""
LEVEL = 0.01
"""Chance that any stratum of a kind is named where losses know nothing of it (Bonferroni)."""
MAX_NAMED = 50
"""Strata in the result at most."""
PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class Strata:
    """Strata of one kind.

    Args:
        rate: that of chance by block, of strata that own whole blocks; else each block's
    """

    kind: str
    labels: list[str]
    n: Floats  # computed tokens (n_strata, n_blocks)
    lost: Floats
    n_tested: int  # strata of the kind that could have been named, those that are not here as well
    rate: Floats | None = None


def candidates(n: Floats, lost: Floats, limits: result.Limits) -> Ints:
    """Return the strata to count block by block: those beyond the limit, `MAX_CANDIDATES` at most.

    Where there are more, those whose loss is the least likely of independent tokens (a ranking, no
    test).
    """
    rate = lost.sum() / max(1.0, float(n.sum()))
    beyond = _beyond(n, lost, limits)
    beyond = beyond[lost[beyond] > 0]
    if len(beyond) <= MAX_CANDIDATES:
        return beyond
    observed, expected = lost[beyond], n[beyond] * rate
    surprise = observed * np.log(observed / expected) - observed + expected
    return np.sort(beyond[np.argsort(-surprise, kind="stable")[:MAX_CANDIDATES]])


def _beyond(n: Floats, lost: Floats, limits: result.Limits) -> Ints:
    return np.flatnonzero((n >= MIN_TOKENS) & (lost >= limits.worst_stratum_warn * n))


@dataclass
class _Groups:
    """Groups of requests by name, as sums by block; as many numbers as requests."""

    names: dict[str, int] = field(default_factory=dict)
    parts: list[tuple[Ints, Ints, Floats, Floats]] = field(default_factory=list)

    def add(self, group: Ints, block: Ints, n: Floats, lost: Floats) -> None:
        used = group >= 0
        pairs, at = np.unique(pair_key(group[used], block[used]), return_inverse=True)
        of_all, of_lost = (_summed(at, x[used], len(pairs)) for x in (n, lost))
        self.parts.append((*split_key(pairs), of_all, of_lost))

    def places(self, names: list[str | None]) -> Ints:
        return np.array(
            [-1 if w is None else self.names.setdefault(w, len(self.names)) for w in names],
            np.int64,
        )

    def strata(
        self, kind: str, n_blocks: int, limits: result.Limits, rate: Floats | None
    ) -> Strata:
        """Return the groups beyond the limit; with a rate those that lost everything anyway."""
        size = len(self.names)
        if not size:
            nothing = np.zeros((0, n_blocks))
            return Strata(kind, [], nothing, nothing, 0)
        group, block, n, lost = (np.concatenate([part[k] for part in self.parts]) for k in range(4))
        total = _summed(group, n, size)
        # One that was there in too few blocks could not have been named.
        blocks = np.bincount(np.unique(group * n_blocks + block) // n_blocks, minlength=size)
        testable = (total >= MIN_TOKENS) & (blocks >= 3)
        total_lost = _summed(group, lost, size)
        if rate is not None:
            testable |= (total >= MIN_TOKENS) & (total_lost == total)
        chosen = candidates(np.where(testable, total, 0.0), total_lost, limits)
        place = np.full(size, -1)
        place[chosen] = np.arange(len(chosen))
        is_chosen = place[group] >= 0
        at = place[group[is_chosen]] * n_blocks + block[is_chosen]
        words = np.array(list(self.names), object)[chosen].tolist()
        n, lost = (
            _summed(at, x[is_chosen], len(chosen) * n_blocks).reshape(-1, n_blocks)
            for x in (n, lost)
        )
        return Strata(kind, words, n, lost, int(testable.sum()), rate)


class SpanStrata:
    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._bands = {name: np.zeros((2, N_BANDS, n_blocks)) for name in ("start", "end")}
        self._phases = np.zeros((2, 2, n_blocks))
        self.total = np.zeros((2, n_blocks))
        self._groups = defaultdict[str, _Groups](_Groups)
        self.n_whole = 0
        self._halved = 0.0

    def add(self, source: RunSource, lookup: Lookup) -> None:
        losses = lookup.losses
        n = np.zeros((2, len(lookup.request_block)))
        for lost, (request, start, stop) in (
            (0, _captured(source, lookup)),
            (1, (losses.request, losses.start, losses.stop)),
        ):
            length = (stop - start).astype(np.float64)
            n[lost] = np.bincount(request, weights=length, minlength=n.shape[1])
            block = lookup.request_block[request]
            length_of = lookup.columns["request_len"][request]
            self._add_bands("start", lost, start, stop, block)
            self._add_bands("end", lost, length_of - stop, length_of - start, block)
            prompt = lookup.columns["prompt_len"][request]
            prefill = np.clip(np.minimum(stop, prompt) - start, 0, None).astype(np.float64)
            for phase, weights in ((1, prefill), (0, length - prefill)):
                self._phases[lost, phase] += np.bincount(
                    block, weights=weights, minlength=self.n_blocks
                )
        for total, weights in zip(self.total, n, strict=True):
            total += np.bincount(lookup.request_block, weights=weights, minlength=self.n_blocks)
        computed = n.sum(axis=0)
        self._halved += float(n[1][2 * n[1] >= computed].sum())
        self.n_whole += int(((n[1] > 0) & (n[0] == 0)).sum())
        named: Iterable[tuple[str, list[str | None]]] = (
            ("source", lookup.columns["source"].tolist()),
            ("first prompt block", _prefixes(source, lookup)),
            *((f"label {label}", values) for label, values in _labels(source, lookup)),
            *((kind, [source.labels.get(kind)]) for kind in RUN_LABELS),
            ("run", [source.run]),
        )
        for kind, names in named:  # of every request, or one for all
            groups = self._groups[kind]
            place = np.broadcast_to(groups.places(names), computed.shape)
            groups.add(place, lookup.request_block, computed, n[1])

    @property
    def of_requests(self) -> float:
        """Return the share of the lost tokens of requests that lost at least half of theirs."""
        return self._halved / max(1.0, float(self.total[1].sum()))

    @property
    def rate(self) -> Floats:
        computed = self.total.sum(axis=0)
        rate = np.zeros(self.n_blocks)
        np.divide(self.total[1], computed, out=rate, where=computed > 0)
        return rate

    @property
    def share(self) -> float:
        return float(self.total[1].sum()) / max(1.0, float(self.total.sum()))

    def strata(self, limits: result.Limits) -> Iterator[Strata]:
        for name, kind in (("start", "position"), ("end", "position from the end")):
            stored, lost = self._bands[name]
            yield _some(kind, [band_words(k) for k in range(N_BANDS)], stored + lost, lost)
        stored, lost = self._phases
        yield _some("phase", list(PHASES), stored + lost, lost)
        common = np.full(self.n_blocks, self.share)
        sizes = {kind: len(groups.names) for kind, groups in self._groups.items()}
        for kind, groups in self._groups.items():
            of_runs = kind == "run" or kind in RUN_LABELS
            # A replica is a run, by a better name.
            named = kind == "run" and sizes["replica"] == sizes["run"]
            if not of_runs or (sizes[kind] > 1 and not named):
                yield groups.strata(kind, self.n_blocks, limits, common if of_runs else None)

    def _add_bands(self, name: str, lost: int, start: Ints, stop: Ints, block: Ints) -> None:
        for band in range(N_BANDS):
            low, last = band_edges(band)
            inside = np.minimum(stop, last + 1) - np.maximum(start, low)
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
    spans = source.spans("captured", ["request"])
    request = lookup.requests.of(spans["request"])
    known = request >= 0
    return request[known], spans["start"][known], spans["stop"][known]


def _prefixes(source: RunSource, lookup: Lookup) -> list[str | None]:
    table = source.table("requests", ["request", "block_digests"])
    table = table.filter(pc.greater(pc.list_value_length(table["block_digests"]), 0))
    firsts = pc.list_element(table["block_digests"], 0).to_pylist()
    n = Counter(firsts)
    return _of_requests(lookup, table, [f"{d.hex()[:16]}…" if n[d] > 1 else None for d in firsts])


def _of_requests(lookup: Lookup, table: pa.Table, words: list[str | None]) -> list[str | None]:
    names: list[str | None] = [None] * len(lookup.request_block)
    places = lookup.requests.of(table["request"].to_numpy()).tolist()
    for place, word in zip(places, words, strict=True):
        if place >= 0 and word is not None:
            names[place] = word
    return names


def _labels(source: RunSource, lookup: Lookup) -> Iterator[tuple[str, list[str | None]]]:
    table = source.table("requests", ["request", "labels"])
    for name, column in label_table(table["labels"]).items():
        words = [None if v is None else label_text(json.loads(v)) for v in column.to_pylist()]
        yield name, _of_requests(lookup, table, words)


def _some(kind: str, labels: list[str], n: Floats, lost: Floats) -> Strata:
    used = np.flatnonzero(n.sum(axis=1) >= MIN_TOKENS)
    return Strata(kind, [labels[k] for k in used], n[used], lost[used], len(used))


def worst_strata(
    every: list[Strata], rate: Floats, share: float, limits: result.Limits
) -> list[result.StratumLoss]:
    """Return the strata that lost more than all by the limit and than chance, the worst first.

    Spec: 0.1 section 14.6.
    """
    named = []
    for strata in every:
        n, lost = strata.n.sum(axis=1), strata.lost.sum(axis=1)
        beyond = _beyond(n, lost, limits)
        beyond = beyond[lost[beyond] >= (share + limits.worst_stratum_warn) * n[beyond]]
        if not len(beyond) or not strata.n_tested:
            continue
        expected = rate if strata.rate is None else strata.rate
        p = stratum_p(strata.n[beyond], strata.lost[beyond], expected)
        for k, adjusted in zip(beyond, np.minimum(1.0, p * strata.n_tested), strict=True):
            # A run that stored nothing at all needs no test to be named.
            if adjusted <= LEVEL or (strata.rate is not None and lost[k] == n[k]):
                named.append(
                    result.StratumLoss(
                        kind=strata.kind,
                        label=strata.labels[k],
                        n=int(n[k]),
                        n_lost=int(lost[k]),
                        rate=float(lost[k] / n[k]),
                        n_blocks=int((strata.lost[k] > 0).sum()),
                        adjusted_p=float(adjusted),
                    )
                )
    return sorted(named, key=lambda s: (-s.rate, -s.n_lost, s.kind, s.label))[:MAX_NAMED]
