"""Sample: the means over all rows that were drawn from, by the rows that a run drew of them.

Between the tables and the verdict, for runs whose rows were drawn with known probabilities: reads
the stored activations once, and the readouts, which are of every row, drawn or not: so the draw is
checked end to end.

Spec: 0.1 section 14.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from scipy import special  # type: ignore[import-untyped]

from actds.dataset.catalog import Catalog
from actds.executor import Threads
from actds.format.inclusion import Design, salt_of, uniform
from actds.format.positions import Intervals, Keys, position_key, union, values_at
from actds.format.shard import Shard
from actds.format.tables import FLAG_SPECIAL
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit import data
from actds_validators.audit.covariates import MAX_PROBES, Widths, band_words, defined, position_band
from actds_validators.audit.features import FeatureSums, efficiencies, rates_of
from actds_validators.audit.follow_up import BLOCK, CONFIDENCE, values_of
from actds_validators.audit.result import (
    Efficiency,
    Estimate,
    Lane,
    Sample,
    SampleCheck,
    SampleHook,
)
from actds_validators.dictionaries import Dictionary
from actds_validators.statistics.design import SampleSums, Units, wilson

MAX_CLUSTERS = 1024
"""Drawn rows or requests beyond so many share clusters at random: sums of each are in memory."""
AGREEMENT = 0.999
"""Confidence at which the means of the readouts have to lie in their intervals, all at once."""
ROUNDING = 1e-6
"""Standard deviations that sums of 32-bit numbers are off at most."""
N_TENTHS = 10
CLASSES = ("special", "prefill", "decode")


@dataclass(frozen=True)
class _Draw:
    """How the rows of a run were drawn; of a run without a design each has probability 1."""

    run: str
    design: Design | None
    n_of_request: Floats  # drawn rows of each request, where requests are drawn; else empty
    of_step: tuple[Keys, Floats]  # steps, and their probability, 1 where a drop policy kept it
    rows: tuple[Keys, Floats] | None  # where rules give shares: keys of rows, and their inclusion

    @classmethod
    def of(cls, catalog: Catalog, run: str) -> _Draw:
        design, n = Design.of(catalog.runs.get(run)), np.zeros(0)
        if design is not None and design.unit == "request":
            for _, shards in catalog.row_sets(run)[:1]:
                for shard in shards:
                    more = np.bincount(shard.tokens(["request"])["request"].to_numpy())
                    n = np.pad(n, (0, max(0, len(more) - len(n))))
                    n[: len(more)] += more
        steps = catalog.table("steps", run, ["step", "inclusion"]).sort_by("step")
        of_step = steps["step"].to_numpy(), steps["inclusion"].fill_null(1.0).to_numpy()
        return cls(run, design, n.astype(np.float64), of_step, _by_row(catalog, run, design))

    def units(self, request: Ints, position: Ints) -> tuple[Ints, Floats]:
        by_request = len(self.n_of_request) > 0
        number = uniform(
            salt_of("cluster", self.run),
            request,
            np.zeros_like(position) if by_request else position,
        )
        n = self.n_of_request[request] if by_request else np.ones(len(request))
        return (number * MAX_CLUSTERS).astype(np.int64), n

    def lane(self, tokens: Mapping[str, Ints], inclusion: Floats) -> tuple[Bools, Bools]:
        """Return which rows are stored whatever the policy does, and of all which it kept."""
        if self.design is None:
            return np.zeros(len(inclusion), np.bool_), np.ones(len(inclusion), np.bool_)
        kept = values_at(tokens["step"].astype(np.uint64), *self.of_step) == 1
        number = self.design.numbers(tokens["request"], tokens["position"])
        return number < np.where(kept, self.design.minimum * inclusion, inclusion), kept

    @property
    def by_request(self) -> bool:
        return self.design is not None and self.design.unit == "request"

    def together(self, request: Ints, cluster: Ints, n_unit: Floats) -> Units | None:
        """Return the units of rows of which several are drawn together, if they are."""
        if not self.by_request:
            return None
        sign = np.where(uniform(salt_of("sign", self.run), request) < 0.5, -1.0, 1.0)
        return Units(n_unit, cluster, sign)


def _by_row(catalog: Catalog, run: str, design: Design | None) -> tuple[Keys, Floats] | None:
    if design is None or not design.keep:
        return None
    names = ["request", "position", "inclusion"]
    shards = [shard for _, of_set in catalog.row_sets(run)[:1] for shard in of_set]
    parts = [data.numbers(shard.tokens(names)) for shard in shards]
    columns = (np.concatenate([part[name] for part in parts]) for name in names)
    request, position, inclusion = columns
    key = position_key(request, position)
    order = np.argsort(key)
    return key[order], inclusion[order].astype(np.float64)


@dataclass
class _LaneRows:
    """Rows that are stored whatever the policy did, in parts, ``(n,)`` each."""

    kept: list[Bools] = field(default_factory=list)
    token_class: list[Ints] = field(default_factory=list)
    band: list[Ints] = field(default_factory=list)
    norm: dict[str, list[Floats]] = field(default_factory=dict)


def sample(
    catalog: Catalog,
    sources: Sequence[data.RunSource],
    dictionaries: Mapping[str, Dictionary] | None = None,
) -> Sample | None:
    """Return the section, ``None`` where no row was left out by a draw.

    Args:
        dictionaries: of hooks, whose features are counted.

    Spec: 0.1 section 14.13.
    """
    draws = {run: _Draw.of(catalog, run) for run in catalog.runs_with_data}
    designs = [draw.design for draw in draws.values() if draw.design is not None]
    if not designs:
        return None
    thinned, dropped = (
        [_not_drawn(source, fate, draws) for source in sources] for fate in ("thinned", "dropped")
    )
    n_thinned, n_dropped = (sum(n for n, _ in of) for of in (thinned, dropped))
    if not n_thinned + n_dropped:
        return None
    d_model = {hook.name: hook.d_model for hook in catalog.genesis.hooks}
    total = {hook: _sums(d + 1) for hook, d in d_model.items()}
    lane, by_request = _LaneRows(), any(draw.by_request for draw in draws.values())

    def empty() -> dict[str, FeatureSums]:
        of = dictionaries or {}
        return {hook: FeatureSums.of(of[hook], by_request) for hook in d_model if hook in of}

    features = empty()

    shards = [
        (draw, shard, not nth)
        for run, draw in draws.items()
        for nth, (_, of_set) in enumerate(catalog.row_sets(run))
        for shard in of_set
    ]
    pool = Threads(data.N_THREADS)
    for sums, rows, active in pool.map(lambda of: _read_shard(*of, empty()), shards):
        for hook, part in sums.items():
            total[hook].merge(part)
        for hook, counted in active.items():
            features[hook].merge(counted)
        for name in ("kept", "token_class", "band"):
            getattr(lane, name).extend(getattr(rows, name))
        for hook, parts in rows.norm.items():
            lane.norm.setdefault(hook, []).extend(parts)
    total = {hook: sums for hook, sums in total.items() if sums.n}
    if not total:
        return None
    n_values = sum(d_model[hook] + 1 for hook in total)
    features = {hook: sums for hook, sums in features.items() if sums.rates.n}
    widest = max(total.values(), key=lambda sums: sums.n)
    return Sample(
        units=sorted({design.unit for design in designs}),
        minimum=min(design.least for design in designs),
        n_stored=widest.n,
        n_thinned=n_thinned,
        n_dropped=n_dropped,
        effective_rows=widest.effective,
        hooks=[hook_of(hook, sums, n_values) for hook, sums in total.items()],
        readouts=_check([draws[s.run] for s in sources if s.run in draws], sources),
        lane=_lane(lane, designs[0].minimum, features) if n_dropped else None,
        features=rates_of(features, min(least for _, least in [*thinned, *dropped])),
    )


def _sums(d: int) -> SampleSums:
    return SampleSums.of(d, MAX_CLUSTERS)


def _not_drawn(source: data.RunSource, fate: str, draws: Mapping[str, _Draw]) -> tuple[int, float]:
    """Return how many positions were not drawn, and what no inclusion of any is below."""
    spans = source.spans(fate, ["inclusion"])
    known = data.is_known(spans["inclusion"])
    n = int((spans["stop"] - spans["start"])[known].sum())
    design = draws[source.run].design if source.run in draws else None
    share = 1.0 if design is None else design.least / design.minimum
    return n, share * float(spans["inclusion"][known].min(initial=1.0))


def _read_shard(
    draw: _Draw, shard: Shard, is_first: bool, features: dict[str, FeatureSums]
) -> tuple[dict[str, SampleSums], _LaneRows, dict[str, FeatureSums]]:
    """Return the sums of each hook, and of one set of shards that has all rows the lane's.

    Args:
        is_first: whether it is of that set.
        features: sums of no row, which are added to and returned.
    """
    names = ["request", "position", "phase", "flags", "step", "inclusion"]
    tokens = data.numbers(shard.tokens(names))
    request, position = tokens["request"], tokens["position"]
    inclusion = tokens["inclusion"].astype(np.float64)
    inclusion[np.isnan(inclusion)] = 1.0
    cluster, n_unit = draw.units(request, position)
    rows, design = _LaneRows(), draw.design
    in_lane, kept = draw.lane(tokens, inclusion)
    always = np.flatnonzero(in_lane)
    if design is not None and is_first:
        kinds = np.where(tokens["phase"] == "prefill", 1, 2)
        kinds[tokens["flags"] & FLAG_SPECIAL != 0] = 0
        rows.kept.append(kept[always])
        rows.token_class.append(kinds[always])
        rows.band.append(position_band(position[always]))
    units = draw.together(request, cluster, n_unit)
    sums = {}
    for hook in shard.hooks:
        norms = []
        with shard.array(hook) as reader:
            for start, stop in pairwise([*range(0, shard.n_rows, BLOCK), shard.n_rows]):
                values = values_of(reader.read(start, stop), reader.dtype)
                some = slice(start, stop)
                if hook not in sums:
                    sums[hook] = _sums(values.shape[1])
                sums[hook].add(values, inclusion[some], cluster[some], n_unit[some])
                norms.append(values[:, -1])
                if hook in features:
                    of = None if units is None else units.take(some)
                    lane = in_lane[some], kept[some]
                    features[hook].add(values[:, :-1], inclusion[some], of, *lane)
        if is_first:
            rows.norm[hook] = [np.concatenate([np.zeros(0), *norms])[always]]
    return sums, rows, features


def hook_of(name: str, sums: SampleSums, n_values: int) -> SampleHook:
    """Return the widest interval, and the mean of stored rows that may be the farthest off."""
    mean, sd = sums.mean(), sums.sd
    low, high = mean.interval(CONFIDENCE, n_values)
    scale = np.divide(1, sd, out=np.zeros_like(sd), where=sd > 0)
    finite = np.isfinite(mean.error).all()
    half = scale * np.maximum(high - mean.mean, mean.mean - low) if finite else None
    plain = sums.plain / sums.n
    bias, reach = scale * (plain - mean.mean), np.zeros_like(sd)
    if half is not None:
        low, high = scale * (plain - high), scale * (plain - low)
        reach = np.maximum(-low, high)
    at = int(np.argmax(half)) if half is not None else 0
    off = int(np.argmax(reach))
    return SampleHook(
        hook=name,
        n_channels=len(sd) - 1,
        n_rows=sums.n,
        variable=_word(at, len(sd)),
        half_width=None if half is None else float(half[at]),
        plain_variable=_word(off, len(sd)),
        plain=None
        if half is None
        else Estimate(
            value=float(bias[off]),
            low=float(low[off]),
            high=float(high[off]),
            confidence=CONFIDENCE,
        ),
    )


def _word(at: int, size: int) -> str:
    return "norm" if at == size - 1 else f"channel {at}"


# readouts, which every row has ----------------------------------------------------------------


@dataclass
class _Known:
    """What the readouts of a hook say: over all rows that were drawn from, and over drawn ones."""

    n: int
    total: Floats
    drawn: SampleSums


def _check(draws: Sequence[_Draw], sources: Sequence[data.RunSource]) -> SampleCheck | None:
    known: list[tuple[str, list[str], _Known]] = []
    by_run = {source.run: source for source in sources}
    for draw in draws:
        source = by_run[draw.run]
        if draw.design is not None and source.hooks:
            known += _known(draw, source)
    known = [item for item in known if item[2].drawn.n]
    n_values = sum(len(words) for _, words, _ in known)
    checks = []
    for hook, words, of in known:
        mean, sd = of.drawn.mean(), of.drawn.sd
        if not np.isfinite(mean.error).all():
            continue
        truth = of.total / of.n
        low, high = mean.interval(AGREEMENT, n_values)
        room = np.maximum(high - mean.mean, mean.mean - low) + ROUNDING * sd
        off = np.abs(mean.mean - truth)
        ratio = np.divide(off, room, out=np.zeros_like(off), where=room > 0)
        outside = (truth < low - ROUNDING * sd) | (truth > high + ROUNDING * sd)
        at = int(np.argmax(np.where(outside, 1 + ratio, ratio)))
        scale = 1 / sd[at] if sd[at] > 0 else 0.0
        checks.append(
            SampleCheck(
                n_rows=of.n,
                n_drawn=of.drawn.n,
                n_values=n_values,
                variable=words[at],
                hook=hook,
                deviation=float((mean.mean - truth)[at] * scale),
                room=float(room[at] * scale),
                agrees=not outside.any(),
            )
        )
    return min(
        checks, key=lambda c: (c.agrees, -abs(c.deviation) / max(c.room, 1e-12)), default=None
    )


def _known(draw: _Draw, source: data.RunSource) -> Iterator[tuple[str, list[str], _Known]]:
    widths = Widths(source.n_projections, min(MAX_PROBES, source.n_probes), defined("readout"))
    every, drawn = _positions(source, draw)
    by = "step" if draw.design is None or draw.design.unit == "row" else "request"
    number, inclusion = _inclusions(source, by)
    sums = {
        hook: _Known(0, np.zeros(widths.n_values), _sums(widths.n_values)) for hook in source.hooks
    }
    columns = ["request", "position", "step", "hook", *widths.columns]
    for part in source.parts["readouts"]:
        for batch in part.batches(columns):
            request, position = data.column(batch, "request"), data.column(batch, "position")
            key, values = position_key(request, position), widths.read(batch)
            finite = np.isfinite(values).all(axis=0) & _holds(every, key)
            stored = finite & _holds(drawn, key)
            place = np.searchsorted(number, data.column(batch, by))
            for hook, of in sums.items():
                is_hook = pc.equal(batch["hook"], hook).to_numpy(zero_copy_only=False)
                some, at = np.flatnonzero(finite & is_hook), np.flatnonzero(stored & is_hook)
                of.n += len(some)
                of.total += values[:, some].sum(axis=1)
                cluster, n = draw.units(request[at], position[at])
                share = inclusion[place[at]]
                if draw.rows is not None:
                    share = values_at(key[at], *draw.rows)
                of.drawn.add(values[:, at].T, share, cluster, n)
    yield from (
        (hook, [c.label for c in widths.facts(hook)], of) for hook, of in sums.items() if of.n
    )


def _positions(source: data.RunSource, draw: _Draw) -> tuple[Intervals, Intervals]:
    """Return the positions that were drawn from, and those whose row is stored.

    Of requests that an engine computed again, or that were cut off, a readout may be of another
    computation of a position: they are left out of both.
    """
    given = source.columns("requests", ["request", "n_preemptions"])
    aborted = source.spans("aborted", ["request"])["request"]
    odd = np.union1d(given["request"][given["n_preemptions"] > 0], aborted)
    sides = []
    for fates in (("captured", "thinned", "dropped"), ("captured",)):
        keys: list[list[npt.NDArray[np.uint64]]] = [[], []]
        for fate in fates:
            spans = source.spans(fate, ["request", "inclusion"])
            use = ~np.isin(spans["request"], odd)
            if fate != "captured":
                use &= data.is_known(spans["inclusion"])
            for side, name in zip(keys, ("start", "stop"), strict=True):
                side.append(position_key(spans["request"][use], spans[name][use]))
        sides.append(union(*map(np.concatenate, keys)))
    return sides[0], sides[1]


def _holds(of: Intervals, keys: npt.NDArray[np.uint64]) -> Bools:
    if not len(of):
        return np.zeros(len(keys), np.bool_)
    at = np.searchsorted(of.start, keys, side="right")
    return np.asarray((at > 0) & (keys < of.stop[np.maximum(at, 1) - 1]), np.bool_)


def _inclusions(source: data.RunSource, by: str) -> tuple[Ints, Floats]:
    """Return the steps or requests that have a stored row, and the inclusion of their rows."""
    number, inclusion = [np.zeros(0, np.int64)], [np.zeros(0)]
    for part in source.parts["tokens"]:
        for batch in part.batches([by, "inclusion"]):
            known, first = np.unique(data.column(batch, by), return_index=True)
            number.append(known)
            inclusion.append(batch["inclusion"].take(pa.array(first)).to_numpy(False))
    known, first = np.unique(np.concatenate(number), return_index=True)
    return known, np.concatenate(inclusion).astype(np.float64)[first]


# the lane -------------------------------------------------------------------------------------


def _lane(rows: _LaneRows, fraction: float, features: Mapping[str, FeatureSums]) -> Lane:
    """Return which share of the lane's rows are of steps that the policy kept, by what they are.

    The lane is a draw of rows, each by itself: so the shares are those of a binomial, however steps
    hang together.
    """
    kept = np.concatenate([np.zeros(0, bool), *rows.kept])
    kinds: list[tuple[str, Ints, list[str]]] = []
    if len(kept):
        kinds.append(("token class", np.concatenate(rows.token_class), list(CLASSES)))
        band = np.concatenate(rows.band)
        kinds.append(("position", band, [band_words(k) for k in range(int(band.max()) + 1)]))
        for hook, parts in rows.norm.items():
            norm = np.concatenate(parts)
            if len(norm) == len(kept) and np.isfinite(norm).all():
                edges = np.quantile(norm, np.arange(1, N_TENTHS) / N_TENTHS)
                words = [f"tenth {k + 1}" for k in range(N_TENTHS)]
                kinds.append((f"norm at {hook}", np.searchsorted(edges, norm, side="right"), words))
    points, p = [], {}
    for kind, group, words in kinds:
        n = np.bincount(group, minlength=len(words))
        n_kept = np.bincount(group[kept], minlength=len(words))
        p[kind] = _homogeneity(n, n_kept)
        for word, of, k in zip(words, n.tolist(), n_kept.tolist(), strict=True):
            if of:
                low, high = wilson(k, of, CONFIDENCE)
                share = Estimate(value=k / of, low=low, high=high, confidence=CONFIDENCE)
                points.append(Efficiency(kind=kind, label=word, n=of, kept=share))
    for hook, sums in features.items():
        most_unlike, p[f"feature at {hook}"] = efficiencies(hook, sums)
        points += most_unlike
    return Lane(
        fraction=fraction,
        n_rows=len(kept),
        n_kept=int(kept.sum()),
        points=points,
        p={kind: min(1.0, value * len(p)) for kind, value in p.items()},
    )


def _homogeneity(n: Ints, n_kept: Ints) -> float:
    used = n > 0
    n, n_kept = n[used], n_kept[used]
    share = n_kept.sum() / n.sum()
    if share in (0, 1) or len(n) < 2:
        return 1.0
    statistic = float(((n_kept - n * share) ** 2 / (n * share * (1 - share))).sum())
    return float(special.chdtrc(len(n) - 1, statistic))
