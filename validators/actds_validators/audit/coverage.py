"""Coverage: which token classes at which positions are stored, reused, from outside and lost.

A dataset stores a repeated prefix once; training without multiplicity weights sees it once as well,
however often it was served. Served a thousand times, its first token is an attention sink whose
norm is many times that of the others: weighted as often as it was served, it alone may be all that
a variance is made of.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds.executor import Executor
from actds.format import tables
from actds.format.positions import Keys, pair_key, position_key, split_key, union
from actds.loader.filters import SINK_NORM
from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit import data, result
from actds_validators.audit.covariates import COVARIATES, N_BANDS, N_BITS, Widths, position_band
from actds_validators.audit.lookup import Lookup, Rows, scale_of
from actds_validators.audit.passes import ClassCounts
from actds_validators.statistics.strata import jensen_shannon, total_variation

OTHERS = "all others"
EVERY_CLASS = (*data.CLASSES, data.NOWHERE)
CLASSES_FROM = (
    "special: the tokenizer's special tokens; shared prefix: prompt positions that were served "
    "more than once (system prompts, templates); prompt and generated: the others, by phase"
)


class CoverageCounts:
    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        self.rows = ClassCounts(labels)
        self.aborted = np.zeros((len(self.rows.words), N_BANDS), np.int64)
        self.filtered = np.zeros_like(self.aborted)
        self.external = np.zeros_like(self.aborted)
        self.referenced = np.zeros(N_BANDS, np.int64)


def read_spans(source: data.RunSource, lookup: Lookup, counts: CoverageCounts) -> None:
    hits = source.spans("cache_ref", ["request", "ref_request", "reason"])
    known = data.is_known(hits["ref_request"])
    for _, position in _positions(hits, known):
        counts.referenced += np.bincount(position_band(position), minlength=N_BANDS)
    for position in _served_of(source.spans("thinned", ["request"]), hits, known):
        counts.referenced -= np.bincount(position_band(position), minlength=N_BANDS)
    counts.external += _by_class(hits, hits["reason"] == tables.EXTERNAL, lookup, counts)
    aborted = source.spans("aborted", ["request", "step"])
    counts.aborted += _by_class(aborted, data.is_known(aborted["step"]), lookup, counts)
    filtered = source.spans("filtered", ["request"])
    every = np.ones(len(filtered["request"]), bool)
    counts.filtered += _by_class(filtered, every, lookup, counts)


_Spans = dict[str, npt.NDArray[Any]]


def _served_of(spans: _Spans, hits: _Spans, known: Bools) -> Iterator[Ints]:
    """Yield the positions of prefix-cache hits whose own row is in the spans, some at a time."""
    if not len(spans["start"]) or not known.any():
        return
    rows = union(*(position_key(spans["request"], spans[name]) for name in ("start", "stop")))
    request = hits["ref_request"][known].astype(np.int64)
    ends = (position_key(request, hits[name][known]) for name in ("start", "stop"))
    _, first, after = rows.cut(*ends)
    for _, position in data.explode(split_key(first)[1], split_key(after - np.uint64(1))[1] + 1):
        yield position


def _positions(spans: _Spans, chosen: Bools) -> Iterator[tuple[Ints, Ints]]:
    request, start, stop = (spans[name][chosen] for name in ("request", "start", "stop"))
    for of_span, position in data.explode(start, stop):
        yield request[of_span], position


def _by_class(spans: _Spans, chosen: Bools, lookup: Lookup, counts: CoverageCounts) -> Ints:
    """Return the positions of the chosen spans by class and band, ``(n_classes, N_BANDS)``.

    None has a row, so that its token and how often it was served are not known.
    """
    kept = ClassCounts(counts.rows.words[len(data.CLASSES) :])
    for request, position in _positions(spans, chosen):
        place = lookup.requests.of(request)
        known = np.flatnonzero(place >= 0)
        label = lookup.labels.of(request, position)[known] if lookup.labels else None
        nothing = np.zeros(len(known), np.int64)
        prefill = (position < lookup.columns["prompt_len"][place])[known]
        band = position_band(position)[known]
        kept.count(nothing > 0, prefill, band, nothing + N_BITS - 1, None, label)
    return np.asarray(kept.lost.sum(axis=2), np.int64)


_FATES = ("stored", "reused", "lost", "filtered", "external")


def coverage(
    counts: CoverageCounts, labels: result.ClassesFile | None = None
) -> result.Coverage | None:
    """Return the section, ``None`` when nothing is stored.

    Args:
        labels: where the classes come from, if somebody gave them; roles else.
    """
    rows = counts.rows
    stored, reused = float(rows.stored.sum()), float(rows.reused.sum())
    if not stored:
        return None
    cells = _cells(counts)
    served = sum(sum(cell[:3]) for cell in cells.values())
    shifts = {
        "token class": _by(cells, 0),
        "position band": _by(cells, 1),
        "rarity of the token": _by_rarity(rows),
    }
    given = sorted(set(rows.words) - set(EVERY_CLASS))
    return result.Coverage(
        cells=[
            result.CoverageCell(
                token_class=name,
                low=2**band - 1,
                high=2 ** (band + 1) - 1,
                **dict(zip(_FATES, cell, strict=True)),
                stored_share=cell[0] / sum(cell[:3]) if sum(cell[:3]) else None,
            )
            for name in (*given, *EVERY_CLASS)
            for (word, band), cell in sorted(cells.items())
            if word == name
        ],
        classes_from="; ".join([*_labels_from(labels, given), CLASSES_FROM]),
        reused_share=sum(cell[1] for cell in cells.values()) / served,
        repeated_prefixes=round(rows.repeated),
        largest_multiplicity=1 + rows.largest,
        mean_multiplicity=(stored + reused) / stored,
        repeated_multiplicity=1 + reused / rows.repeated if rows.repeated else None,
        once_bias=_once_bias(rows, served),
        effective_rows=(stored + reused) ** 2 / (stored + rows.squares),
        shifts=[
            shift for name, triple in shifts.items() if (shift := _shift(name, triple)) is not None
        ],
        loss_by_class=_loss_by_class(cells, given),
    )


def _once_bias(rows: ClassCounts, served: int) -> float:
    """Return the most that a mean over stored rows, each once, is off from the served mean.

    In standard deviations over what was served. With q the weights of the rows in the mean and p
    their shares of what was served, ``|Σ (q - p) x| <= σ sqrt(Σ q² / p - 1)`` by Cauchy and
    Schwarz. Here ``q = 1/N`` and ``p = m/M``: N stored rows, m how often each was served, M all
    servings, those without a row too.
    """
    stored = float(rows.stored.sum())
    return math.sqrt(max(0.0, served * (stored + rows.inverses) / stored**2 - 1))


def _labels_from(labels: result.ClassesFile | None, given: list[str]) -> list[str]:
    if labels is None:
        return ["the roles of chats, where they are known; of the other positions"] if given else []
    return [
        f"labels of {Path(labels.path).name[:100]}: {labels.n_matching:,} of {labels.n_ranges:,} "
        f"ranges begin within a request of the dataset, {labels.n_labelled:,} of its "
        f"{labels.n_positions:,} positions have a label; of the others"
    ]


def _cells(counts: CoverageCounts) -> dict[tuple[str, int], list[int]]:
    rows = counts.rows
    of_rows = (n.sum(axis=2) for n in (rows.stored, rows.reused, rows.lost))
    table = np.stack([*of_rows, counts.filtered, counts.external], axis=-1)
    table[..., 2] += counts.aborted
    cells: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * len(_FATES))
    for word, band in np.argwhere(table.any(axis=-1)).tolist():
        cells[rows.words[word], band] = table[word, band].round().astype(np.int64).tolist()
    # A reference to a row that is not stored has no class: nothing says which token it was.
    nowhere = counts.referenced - rows.answered
    for band in np.flatnonzero(nowhere).tolist():
        cells[data.NOWHERE, band][1] += int(nowhere[band])
    return dict(cells)


def _loss_by_class(
    cells: dict[tuple[str, int], list[int]], given: list[str]
) -> list[result.ClassLoss]:
    """Return the loss rates of the given classes, which lost positions have like stored ones.

    The others are taken together: only of a stored row is it known whether it was served again,
    and only with readouts which lost tokens are special.
    """
    if not given:
        return []
    n, n_lost = Counter[str](), Counter[str]()
    for (word, _), (stored, _, lost, *_) in cells.items():
        name = word if word in given else OTHERS
        n[name] += stored + lost
        n_lost[name] += lost
    return [
        result.ClassLoss(
            token_class=name, n=n[name], n_lost=n_lost[name], rate=n_lost[name] / n[name]
        )
        for name in (*given, OTHERS)
        if n[name]
    ]


def _by(cells: dict[tuple[str, int], list[int]], axis: int) -> Floats:
    sums: dict[str | int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for key, (stored, reused, lost, *_) in sorted(cells.items()):
        known = key[0] != data.NOWHERE
        sums[key[axis]][0] += stored
        sums[key[axis]][1] += stored + (reused if known else 0)
        sums[key[axis]][2] += stored + reused + lost
    return np.array(list(sums.values()), np.float64).T


def _by_rarity(rows: ClassCounts) -> Floats:
    stored, reused, lost = (
        counts.sum(axis=(0, 1))[: N_BITS - 1] for counts in (rows.stored, rows.reused, rows.lost)
    )
    table = np.stack([stored, stored + reused, stored + reused + lost]).astype(np.float64)
    return table[:, table.any(axis=0)]


def _shift(name: str, triple: Floats) -> result.CapturedShift | None:
    stored, weighted, existing = triple
    if not stored.sum():
        return None
    measures = {
        f"{prefix}{measure.__name__}": measure(side, existing) or 0.0  # None only of an empty one
        for prefix, side in (("", stored), ("weighted_", weighted))
        for measure in (total_variation, jensen_shannon)
    }
    return result.CapturedShift(variable=name, **measures)


MAX_CELLS = 1 << 16
"""Cells of a hook that are told apart, those of the largest squares; the others are dropped."""


@dataclass
class _Cells:
    """Sums by token id and position; the columns are rows, w, w x and w x²."""

    keys: Keys  # pair_key of token id and position, rising
    sums: Floats  # (n_cells, 4)
    special: Bools
    whole: Floats

    def add(self, other: _Cells) -> None:
        every = np.concatenate([self.keys, other.keys])
        self.keys, first, at = np.unique(every, return_index=True, return_inverse=True)
        sums = np.zeros((len(self.keys), 4))
        np.add.at(sums, at, np.concatenate([self.sums, other.sums]))
        self.sums, self.whole = sums, self.whole + other.whole
        self.special = np.concatenate([self.special, other.special])[first]
        if len(self.keys) > MAX_CELLS:
            largest = np.sort(np.argsort(-self.sums[:, 3], kind="stable")[:MAX_CELLS])
            self.keys, self.sums = self.keys[largest], self.sums[largest]
            self.special = self.special[largest]


def _no_cells() -> _Cells:
    return _Cells(np.zeros(0, np.uint64), np.zeros((0, 4)), np.zeros(0, bool), np.zeros(4))


@dataclass(frozen=True)
class _DominancePass:
    """Sums the norms of stored rows by token id and position, of those that may stand out.

    Cells are kept of rows that a loader can leave out by name: first positions, special tokens, and
    sinks.
    """

    lookup: Lookup
    hooks: tuple[str, ...]
    median: Floats

    def __call__(self, part: data.TablePart) -> list[_Cells]:
        lookup, totals = self.lookup, [_no_cells() for _ in self.hooks]
        for batch in part.batches(["request", "position", "token_id", "step", "hook", "norm"]):
            rows, kept = Rows.read(lookup, batch)
            norm = batch["norm"].to_numpy(zero_copy_only=False).astype(np.float64)
            kept &= np.isfinite(norm)
            kept &= lookup.recomputed.count(rows.step, rows.request, rows.position)
            stored = rows.take(kept)
            kept[kept] &= lookup.losses.find(stored.step, stored.request, stored.position) < 0
            for number, hook in enumerate(self.hooks):
                of_hook = np.flatnonzero(kept & pc.equal(batch["hook"], hook).to_numpy(False))
                stored, x = rows.take(of_hook), norm[of_hook]
                at, id_ = stored.position, data.column(batch, "token_id")[of_hook]
                w = 1.0 + lookup.servings.of(lookup.requests.numbers(stored.request), at)
                special = stored.special
                some = np.flatnonzero((at == 0) | special | (x > SINK_NORM * self.median[number]))
                four = np.stack([np.ones(len(x)), w, w * x, w * x * x], axis=1)
                keys, first, of = np.unique(
                    pair_key(id_[some], at[some]), return_index=True, return_inverse=True
                )
                sums = np.zeros((len(keys), 4))
                np.add.at(sums, of, four[some])
                totals[number].add(_Cells(keys, sums, special[some][first], four.sum(axis=0)))
        return totals


def dominant_cell(
    runs: Sequence[tuple[data.RunSource, Lookup]], hooks: tuple[str, ...], executor: Executor
) -> result.Dominant | None:
    """Return the token id and position that hold most of the squared deviation of the norm.

    Each stored row counts as often as it was served, about the mean that this gives. None where
    nothing was served again, or no readout says how large a row is.
    """
    reused = any(len(lookup.servings) for _, lookup in runs)
    if not hooks or not reused:
        return None
    parts = [part for source, _ in runs for part in source.parts["readouts"]]
    median = scale_of(parts, hooks, Widths(0, 0, (COVARIATES["norm"],)), executor).median[:, 0]
    total = [_no_cells() for _ in hooks]
    for source, lookup in runs:
        sums = _DominancePass(lookup, hooks, median)
        for cells in executor.map(sums, source.parts["readouts"]):
            for of_hook, more in zip(total, cells, strict=True):
                of_hook.add(more)
    largest = [
        cell
        for hook, cells, middle in zip(hooks, total, median.tolist(), strict=True)
        if (cell := _largest(hook, cells, middle)) is not None
    ]
    return max(largest, key=lambda cell: cell.share, default=None)


def _largest(hook: str, cells: _Cells, median: float) -> result.Dominant | None:
    _, w, wx, wxx = cells.whole
    if w <= 0 or not len(cells.keys):
        return None
    mean = wx / w
    whole = wxx - w * mean**2
    if whole <= 1e-10 * wxx:
        return None
    n, of_w, of_x, of_xx = cells.sums.T
    share = np.clip((of_xx - 2 * mean * of_x + mean**2 * of_w) / whole, 0.0, 1.0)
    k = int(np.argmax(share))
    token_id, position = (int(number) for number in split_key(cells.keys[k]))
    names = ["first_position"] if position == 0 else ["special"] * bool(cells.special[k])
    if of_x[k] / of_w[k] > SINK_NORM * median:
        names.append("sink")
    return result.Dominant(
        hook=hook,
        token_id=token_id,
        position=position,
        n_rows=int(n[k]),
        n_served=int(of_w[k]),
        share=float(share[k]),
        exclude=names,
    )
