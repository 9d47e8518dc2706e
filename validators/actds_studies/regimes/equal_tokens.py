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

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from actds.errors import ActdsError
from actds_studies.regimes.arms import Arm
from actds_studies.regimes.contrast import Contrast
from actds_studies.regimes.inference import Measure
from actds_studies.regimes.instruments import Dictionary, mean_of, of_pairs, over
from actds_studies.regimes.result import ALL, MIN_REQUESTS, ContrastResult, Limits, Quantiles, Value
from actds_studies.regimes.strata import Part, RowReader, Stratum
from actds_validators.arrays import Floats, Ints, Rows, Whole
from actds_validators.statistics.samples import cosine_distance, relative_l2


class Numerics:
    """How far rows of the same token behind the same prefix lie apart.

    A distance is never negative: it is compared with a limit, not with zero. With a dictionary it
    stands over its error as well, and as the share of features that switch.
    """

    name = "numerics"

    def __init__(self, dictionary: Dictionary | None = None) -> None:
        self._dictionary = dictionary
        self.width = 0

    def pair_parts(self, first: Rows, second: Rows) -> Iterator[Part]:
        """Yield what is added up of pairs of rows, ``(n, d_model)`` each."""
        yield Part("equal", (first == second).all(axis=1).astype(np.float64))
        values = self.pair_values(first, second)
        yield from (Part(name, distances) for name, distances in values.items())
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
        return {
            "relative L2": relative_l2(first, second),
            "cosine distance": cosine_distance(first, second),
        }

    def pair_measures(self, limits: Limits) -> list[Measure]:
        """Return the mean distances and, with a dictionary, what they mean for it."""
        pairs, limit = "mean over pairs", limits.relative_l2
        measures = [
            of_pairs("equal to the bit", partial(mean_of, name="equal"), "share of pairs", "logit"),
            of_pairs("relative L2", partial(mean_of, name="relative L2"), pairs, "log", limit),
            of_pairs("cosine distance", partial(mean_of, name="cosine distance"), pairs, "log"),
        ]
        if self._dictionary is not None:
            measures += [
                of_pairs(
                    "drift over the dictionary's error",
                    lambda sums: ratio(sums["drift"], sums["error"]),
                    "squared distance over squared error",
                    "log",
                    limits.drift,
                ),
                of_pairs(
                    "features that switch",
                    lambda sums: ratio(sums["switched"], sums["active"]),
                    "share of those active in either row",
                    "logit",
                    limits.switched,
                ),
            ]
        return measures


def ratio(top: Floats, bottom: Floats) -> Floats:
    """Return top / bottom, 0 where both are 0 and NaN where only bottom is."""
    return np.where((bottom == 0) & (top == 0), 0.0, over(top, bottom))


_MIN_TOKENS = 20
_OF_PAIRS = ("numerics", "overlap")
"""Instruments with sizes of pairs of equal tokens: halves of the reference have none."""


def beside_repeats(
    judged: list[Value],
    arms: tuple[Arm, Arm],
    plan: Contrast,
    arrays: tuple[RowReader, RowReader],
    hook: str,
) -> list[Value]:
    """Return values with the floor of numerics over all rows, if 20 tokens were computed twice."""
    parts: list[tuple[Floats, Floats]] = []
    for repeats, array in zip(plan.repeats, arrays, strict=True):
        first, other = (_read(array, repeat) for repeat in repeats)
        fine = np.isfinite(first).all(axis=1) & np.isfinite(other).all(axis=1)
        fine &= (first != 0).any(axis=1) & (other != 0).any(axis=1)
        pairs = first[fine], other[fine]
        parts.append((relative_l2(*pairs), cosine_distance(*pairs)))
    words = "tokens that one arm computed twice, in two requests"
    if sum(len(relative) for relative, _ in parts) < _MIN_TOKENS:
        parts, words = [], "canaries, tokens computed again in requests replayed alone"
        for dataset in {id(arm.dataset): arm.dataset for arm in arms}.values():
            lines = dataset.canary(run=False)
            same = pc.and_(pc.equal(lines["hook"], hook), pc.equal(lines["verdict"], "same"))
            lines = lines.filter(same)
            parts.append((lines["relative_l2"].to_numpy(), 1 - lines["cosine"].to_numpy()))
    relative, cosine = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if len(relative) < _MIN_TOKENS:
        return judged
    floors = {
        "equal to the bit": float((relative == 0).mean()),
        "relative L2": float(relative.mean()),
        "cosine distance": float(cosine.mean()),
    }
    words = f"{len(relative):,} {words}"
    return [
        _with_floor(value, floors[value.measure], words)
        if value.instrument == "numerics" and value.axis == ALL and value.measure in floors
        else value
        for value in judged
    ]


def _with_floor(value: Value, floor: float | None, words: str) -> Value:
    if value.value is None:
        return value
    return value.model_copy(update={"floor": floor, "note": f"floor: {words}"})


def beside_contrast(results: Sequence[ContrastResult], name: str) -> list[ContrastResult]:
    """Return results in which sizes of pairs stand beside the same of one of the contrasts.

    E014 where that one is not paired by token.
    """
    known: dict[tuple[str, ...], Value] = {}
    for result in results:
        if result.name == name and result.pairing != "token":
            got = f"{name} at {result.hook} is paired by {result.pairing}"
            expected = "a contrast of the same tokens, as of a replay made twice"
            raise ActdsError("E014", "floor", got=got, expected=expected)
        if result.name == name:
            known |= {_place(value): value for value in result.values}
    beside = []
    for result in results:
        values = [
            _with_floor(value, known[_place(value)].value, name)
            if value.instrument in _OF_PAIRS
            and value.kind in ("size", "described")
            and _place(value) in known
            else value
            for value in result.values
        ]
        is_beside = result.name != name and result.pairing == "token"
        beside.append(result.model_copy(update={"values": values}) if is_beside else result)
    return beside


def _place(value: Value) -> tuple[str, ...]:
    return value.hook, value.instrument, value.measure, value.axis, value.stratum


def _read(array: RowReader, rows: Whole) -> Rows:
    known, place = np.unique(rows, return_inverse=True)
    return np.asarray(array[known])[place.reshape(-1)]


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
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p100": 1.0}
    return [
        Quantiles(
            hook=hook,
            axis=stratum.axis,
            stratum=stratum.name,
            measure=name,
            n_pairs=n_pairs,
            **{p: histogram.quantile(name, n, share) for p, share in shares.items()},
        )
        for name in histogram.names
        for n, stratum in enumerate(strata)
        if (n_pairs := histogram.count(name, n)) >= MIN_REQUESTS
    ]


def parting_parts(parted: npt.NDArray[np.int8]) -> Iterator[Part]:
    """Yield what is added up of pairs: whether both sampled, and whether different tokens.

    They are 1 for different tokens, 0 for the same, -1 unknown ``(n,)``.
    """
    yield Part("sampled", (parted >= 0).astype(np.float64))
    yield Part("parted", (parted > 0).astype(np.float64))


PARTING = of_pairs(
    "forks of the sampled token",
    lambda sums: over(sums["parted"], sums["sampled"]),
    "share of pairs that both sampled after",
    "linear",
)
"""Share of the pairs after which the arms sampled different tokens; only described."""
