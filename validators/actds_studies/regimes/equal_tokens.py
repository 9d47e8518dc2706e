"""What is said of pairs of equal tokens: the floor of numerics, quantiles of distances, and forks.

The floor is how far rows lie apart that were computed twice in the same way. Requests that share a
prompt compute its tokens more than once; else canaries of the run say it. A contrast with the same
harvest made again, in a process of its own, says it of every measure.

Quantiles take one pass: counts in bins of equal ratio, and the largest value.

Forks are pairs after which both arms sampled and said their margins (``--entropy``), and sampled
different tokens. Greedy answers part where the difference of two computations exceeds the margin
between the two largest logits; answers that are drawn at a temperature part by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds_studies.regimes.arms import Arm
from actds_studies.regimes.contrast import Contrast
from actds_studies.regimes.inference import Judged, Measure
from actds_studies.regimes.instruments import Dictionary, mean_of
from actds_studies.regimes.result import ContrastResult, Limits, Quantiles, Value
from actds_studies.regimes.strata import ALL, MIN_REQUESTS, Stratum
from actds_studies.regimes.sums import GroupSums, Part, RowReader
from actds_validators.arrays import Floats, Ints, Rows, Whole

_N_ROWS = 2048  # rows that are held as float64 at a time


def distances(first: Rows, second: Rows) -> tuple[Floats, Floats]:
    """Return ``|second - first| / |first|`` and one minus the cosine per row, ``(n,)`` each.

    Exactly 0 for equal rows.

    Args:
        first: rows ``(n, d_model)``, none of them zero.
    """
    relative, cosine = [np.empty(0)], [np.empty(0)]
    for at in range(0, len(first), _N_ROWS):
        a, b = (rows[at : at + _N_ROWS].astype(np.float64) for rows in (first, second))
        relative.append(np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1))
        unit, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))
        cosine.append(np.square(unit - other).sum(axis=1) / 2)
    return np.concatenate(relative), np.concatenate(cosine)


class Numerics:
    """How far rows of the same token behind the same prefix lie apart.

    A distance is never negative: it is compared with a limit, not with zero. With a dictionary it
    stands over its error as well, and as the share of features that switch.

    Args:
        dictionary: a dictionary of the hook, None without.
    """

    name = "numerics"

    def __init__(self, dictionary: Dictionary | None = None) -> None:
        self._dictionary = dictionary
        self.width = 0

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        yield Part("equal", (first == second).all(axis=1).astype(np.float64))
        values = self.pair_values(first, second)
        yield Part("relative L2", values["relative L2"])
        yield Part("cosine distance", values["cosine distance"])
        if self._dictionary is None:
            return
        features = self._dictionary.encode(first)
        self.width = features.shape[1]
        rest = first.astype(np.float64) - self._dictionary.decode(features, first)
        yield Part("drift", np.square(second.astype(np.float64) - first).sum(axis=1))
        yield Part("error", np.square(rest).sum(axis=1))
        active, other = features > 0, self._dictionary.encode(second) > 0
        yield Part("switched", (active ^ other).sum(axis=1).astype(np.float64))
        yield Part("active", (active | other).sum(axis=1).astype(np.float64))

    def pair_values(self, first: Rows, second: Rows) -> dict[str, Floats]:
        """Return relative L2 and cosine distance of pairs, ``(n,)`` each."""
        return dict(zip(("relative L2", "cosine distance"), distances(first, second), strict=True))

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return the mean distances and, with a dictionary, what they mean for it."""

        def equal(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "equal")

        def distance(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "relative L2")

        def cosine(pairs: GroupSums, _: GroupSums) -> Floats:
            return mean_of(pairs, "cosine distance")

        measures = [
            Measure(
                "equal to the bit",
                equal,
                "share of pairs",
                "described",
                scale="logit",
                of_pairs=True,
            ),
            Measure(
                "relative L2", distance, "mean over pairs", "size", limits.relative_l2, scale="log"
            ),
            Measure(
                "cosine distance",
                cosine,
                "mean over pairs",
                "described",
                scale="log",
                of_pairs=True,
            ),
        ]
        if self._dictionary is None:
            return measures

        def drift(pairs: GroupSums, _: GroupSums) -> Floats:
            return ratio(pairs["drift"], pairs["error"])

        def switched(pairs: GroupSums, _: GroupSums) -> Floats:
            return ratio(pairs["switched"], pairs["active"])

        return [
            *measures,
            Measure(
                "drift over the dictionary's error",
                drift,
                "squared distance over squared error",
                "size",
                limits.drift,
                scale="log",
            ),
            Measure(
                "features that switch",
                switched,
                "share of those active in either row",
                "size",
                limits.switched,
                scale="logit",
            ),
        ]


def ratio(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, 0 where both are 0 and NaN where only bottom is."""
    some = bottom > 0
    shares = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=some)
    return np.where(~some & (top == 0), 0.0, shares)


_MIN_TOKENS = 20
_OF_PAIRS = ("numerics", "overlap")
"""Instruments with sizes of pairs of equal tokens: halves of the reference have none."""


@dataclass(frozen=True)
class RepeatFloor:
    """What the measures of numerics are within one regime.

    Args:
        words: where they come from.
    """

    values: Mapping[str, float]
    words: str


def repeat_floor(
    arms: tuple[Arm, Arm], plan: Contrast, arrays: tuple[RowReader, RowReader], hook: str
) -> RepeatFloor | None:
    """Return the floor of two arms, None where under 20 tokens were computed twice.

    Args:
        arrays: the hook's rows of either, by number.
    """
    parts: list[tuple[Floats, Floats]] = []
    for repeats, array in zip(plan.repeats, arrays, strict=True):
        first, other = (_read(array, repeat) for repeat in repeats)
        fine = np.isfinite(first).all(axis=1) & np.isfinite(other).all(axis=1)
        fine &= (first != 0).any(axis=1) & (other != 0).any(axis=1)
        parts.append(distances(first[fine], other[fine]))
    n = sum(len(relative) for relative, _ in parts)
    if n >= _MIN_TOKENS:
        return _floor(parts, f"{n:,} tokens that one arm computed twice, in two requests")
    parts = []
    for dataset in {id(arm.dataset): arm.dataset for arm in arms}.values():
        lines = dataset.canary(run=False)
        same = pc.and_(pc.equal(lines["hook"], hook), pc.equal(lines["verdict"], "same"))
        lines = lines.filter(same)
        parts.append((lines["relative_l2"].to_numpy(), 1 - lines["cosine"].to_numpy()))
    n = sum(len(relative) for relative, _ in parts)
    if n >= _MIN_TOKENS:
        return _floor(parts, f"{n:,} canaries, tokens computed again in requests replayed alone")
    return None


def beside_floor(judged: list[Judged], floor: RepeatFloor | None) -> list[Judged]:
    """Return values with the floor of numerics, over all rows."""
    if floor is None:
        return judged
    measured = []
    for judged_value in judged:
        value = judged_value.value
        known = floor.values.get(value.measure) if value.instrument == "numerics" else None
        if known is not None and value.axis == ALL and value.value is not None:
            changes = {"floor": known, "note": f"floor: {floor.words}"}
            judged_value = replace(judged_value, value=value.model_copy(update=changes))
        measured.append(judged_value)
    return measured


def beside_contrast(results: Sequence[ContrastResult], name: str) -> list[ContrastResult]:
    """Return results in which sizes of pairs stand beside the same of one of the contrasts.

    Raises:
        ActdsError: E014 it is not paired by token.
    """
    known: dict[tuple[str, ...], Value] = {}
    for result in results:
        if result.name == name and result.pairing != "token":
            got = f"{name} at {result.hook} is paired by {result.pairing}"
            expected = "a contrast of the same tokens, as of a replay made twice"
            raise ActdsError("E014", "floor", got=got, expected=expected)
        if result.name == name:
            known |= {_place(value): value for value in result.values}
    return [
        result
        if result.name == name
        else result.model_copy(update={"values": _beside(result, known, name)})
        for result in results
    ]


def _beside(
    contrast: ContrastResult, known: Mapping[tuple[str, ...], Value], name: str
) -> list[Value]:
    values = []
    for value in contrast.values:
        floor = known.get(_place(value))
        is_of_pairs = value.instrument in _OF_PAIRS and value.kind in ("size", "described")
        if (
            is_of_pairs
            and contrast.pairing == "token"
            and floor is not None
            and value.value is not None
        ):
            changes = {"floor": floor.value, "note": f"floor: {name}"}
            value = value.model_copy(update=changes)
        values.append(value)
    return values


def _place(value: Value) -> tuple[str, ...]:
    return value.hook, value.instrument, value.measure, value.axis, value.stratum


def _read(array: RowReader, rows: Whole) -> Rows:
    known, place = np.unique(rows, return_inverse=True)
    return np.asarray(array[known])[place.reshape(-1)]


def _floor(parts: list[tuple[Floats, Floats]], words: str) -> RepeatFloor:
    relative, cosine = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    values = {
        "equal to the bit": float((relative == 0).mean()),
        "relative L2": float(relative.mean()),
        "cosine distance": float(cosine.mean()),
    }
    return RepeatFloor(values, words)


LOWEST = 1e-12
"""Distances below count as 0."""
PER_DECADE = 200
"""Bins: a quantile is off by 0.6 % of itself at most."""
_DECADES = 15


class Histogram:
    """Counts of values by stratum."""

    def __init__(self, n_strata: int) -> None:
        self._n_strata = n_strata
        self._counts: dict[str, Ints] = {}
        self._largest: dict[str, Floats] = {}

    @property
    def names(self) -> list[str]:
        """Return what was counted."""
        return list(self._counts)

    def add(self, name: str, values: Floats, strata: Sequence[Ints]) -> None:
        """Count values ``(n,)`` in the strata of each axis ``(n,)``, -1 for none."""
        n_bins = _DECADES * PER_DECADE + 2
        if name not in self._counts:
            self._counts[name] = np.zeros((self._n_strata, n_bins), np.int64)
            self._largest[name] = np.zeros(self._n_strata)
        positive = np.maximum(np.nan_to_num(values), LOWEST / 10)
        place = np.floor(np.log10(positive / LOWEST) * PER_DECADE).astype(np.int64) + 1
        place = np.clip(place, 0, n_bins - 1)
        for stratum in strata:
            present = stratum >= 0
            np.add.at(self._counts[name], (stratum[present], place[present]), 1)
            np.maximum.at(self._largest[name], stratum[present], values[present])

    def count(self, name: str, stratum: int) -> int:
        """Return how many values a stratum has."""
        return int(self._counts[name][stratum].sum())

    def quantile(self, name: str, stratum: int, share: float) -> float:
        """Return a quantile; share 1 gives the largest value itself."""
        largest = float(self._largest[name][stratum])
        if share >= 1:
            return largest
        counts = np.cumsum(self._counts[name][stratum])
        place = int(np.searchsorted(counts, share * counts[-1], side="left"))
        if place == 0:
            return 0.0
        return min(float(LOWEST * 10 ** ((place - 0.5) / PER_DECADE)), largest)


def quantile_lines(histogram: Histogram, strata: Sequence[Stratum], hook: str) -> list[Quantiles]:
    """Return the quantiles at 50, 90, 99 and 100 % of every stratum of at least eight pairs."""
    return [
        Quantiles(
            hook=hook,
            axis=stratum.axis,
            stratum=stratum.name,
            measure=name,
            n_pairs=histogram.count(name, n),
            p50=histogram.quantile(name, n, 0.5),
            p90=histogram.quantile(name, n, 0.9),
            p99=histogram.quantile(name, n, 0.99),
            p100=histogram.quantile(name, n, 1.0),
        )
        for name in histogram.names
        for n, stratum in enumerate(strata)
        if histogram.count(name, n) >= MIN_REQUESTS
    ]


def parting_parts(parted: npt.NDArray[np.int8]) -> Iterator[Part]:
    """Yield what is added up of pairs: whether both sampled, and whether different tokens.

    Args:
        parted: 1 for different tokens, 0 for the same, -1 unknown ``(n,)``.
    """
    yield Part("sampled", (parted >= 0).astype(np.float64))
    yield Part("parted", (parted > 0).astype(np.float64))


def _share(pairs: GroupSums, _: GroupSums) -> Floats:
    n = pairs["sampled"]
    return np.asarray(pairs["parted"] / np.where(n > 0, n, np.nan))


PARTING = Measure(
    "forks of the sampled token",
    _share,
    "share of pairs that both sampled after",
    "described",
    of_pairs=True,
)
"""Share of the pairs after which the arms sampled different tokens; only described."""
