"""Covariates: what losses are held against, each of them one object; and the series of the steps.

A covariate says what it is called, how it is computed from a step, a request, a token or a readout,
into which bands it is cut, and how it is worded. All that sums, tests, draws or words one asks the
object: a further covariate is one more entry of `COVARIATES`.

The series has the covariates of the steps over time: all runs, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds_validators.arrays import Bools, Floats, Ints
from actds_validators.audit.data import RunSource
from actds_validators.audit.result import Covariate, Group
from actds_validators.statistics import intervals
from actds_validators.statistics.series import (
    correlation_steps,
    count_events,
    effective_events,
    ewma,
)

Source = Literal["step", "request", "token", "readout"]
_GROUPS: dict[Source, Group] = {
    "step": "system",
    "request": "content",
    "token": "content",
    "readout": "values",
}
N_BANDS = 33
"""Powers of two of a position or a length, ``floor(log2(n + 1))``."""
N_BITS = 26
"""Rarities in whole bits, 24 for more, and one place for an unknown one."""
MAX_BITS = N_BITS - 2
NO_BITS = N_BITS - 1
"""The band of a token whose rarity is unknown."""
MAX_PROBES = 16
"""User's probes of a hook that are tested, the first ones."""
LOADS = (8, 32, 128)
"""Steps of the moving averages of the load."""
LOAD = f"load_{LOADS[0]}"
"""The covariate that is the load, for cells of weights and plots."""


def position_band(position: Ints) -> Ints:
    return np.asarray(np.frexp(position + 1.0)[1] - 1, np.int64)


@dataclass(frozen=True)
class Bins:
    """Bins of a covariate, whose loss rates are told one by one."""

    n: int  # how many; values from n - 1 on are in the last one
    label: Callable[[int], str]
    edges: Callable[[int], tuple[float, float] | None] = lambda k: None  # None for classes

    def of(self, values: Floats | Bools) -> Ints:
        return np.asarray(np.minimum(values, self.n - 1), np.int64)


def band_edges(k: int) -> tuple[int, int]:
    """Return the first and the last position of a band, or the least and largest length."""
    return 2**k - 1, 2 ** (k + 1) - 2


def band_words(k: int) -> str:
    low, high = band_edges(k)
    return f"{low:,} to {high:,}" if k else "0"


def _bits_label(k: int) -> str:
    return f"{k} to {k + 1} bits" if k < MAX_BITS else f"{MAX_BITS} bits on"


_LENGTHS = Bins(N_BANDS, band_words, band_edges)  # of log2(n + 1)
_BITS = Bins(MAX_BITS + 1, _bits_label, lambda k: (float(k), float(k + 1)))


def halves(no: str, yes: str) -> Bins:
    return Bins(2, lambda k: (no, yes)[k])


@dataclass(frozen=True)
class CovariateDef:
    """One covariate: what it is, how it is computed, where it takes part, how it is worded.

    Args:
        name: for machines; of a readout that has several numbers with ``{}`` for which.
        label: words for a table or plot; as name.
        unit: of its values; ``share`` of one that is 0 or 1, and summed as such.
        source: what has one value of it. It decides the group (system, content or values), and
            with it which tests and charts take it.
        values: of a step or a request from the columns of all, ``(n,)``; of a token from `Rows`,
            NaN where a row has none; of a readout from a batch of the table and the number of
            values, ``(n_values, n_rows)``.
        columns: that ``values`` reads, of ``steps``, ``requests`` or ``readouts``.
        bins: whose loss rates are told; only of a request or a token, two of a share.
        needs_ids: whether a lost token has it only where its id is known.
        needs_entropy: whether only runs with the table ``sampled`` have it.
        size: field of `Widths` that says how many numbers a readout has; empty for one.
        is_load: whether it is a moving average of the load: takes part in the tests of events.
        sides: what is under-represented where losses favour high values, and with low ones.
    """

    name: str
    label: str
    unit: str
    source: Source
    values: Callable[..., Any]
    columns: tuple[str, ...] = ()
    bins: Bins | None = None
    needs_ids: bool = False
    needs_entropy: bool = False
    size: str = ""
    is_load: bool = False
    sides: tuple[str, str] = (
        "steps where that is above its mean",
        "steps where that is below its mean",
    )

    def typed(self, values: npt.ArrayLike) -> Floats | Bools:
        """Return values as they are summed: of a share booleans if all are known, else floats."""
        array = np.asarray(values)
        return array if array.dtype == bool else array.astype(np.float64)

    @property
    def group(self) -> Group:
        return _GROUPS[self.source]

    def facts(self, hook: str = "", k: int | None = None) -> Covariate:
        name, label = (w if k is None else w.format(k) for w in (self.name, self.label))
        if hook:
            name, label = f"{hook} {name}", f"{label} at {hook}"
        return Covariate(name=name, label=label, unit=self.unit, group=self.group)


@dataclass(frozen=True)
class Widths:
    """Numbers of a readout that are looked at."""

    n_projections: int
    n_probes: int
    definitions: tuple[CovariateDef, ...]

    def size(self, covariate: CovariateDef) -> int:
        return int(getattr(self, covariate.size)) if covariate.size else 1

    @property
    def columns(self) -> list[str]:
        return columns_of(d for d in self.definitions if self.size(d))

    def facts(self, hook: str) -> list[Covariate]:
        return [d.facts(hook, k if d.size else None) for d, k in self._values]

    @property
    def _values(self) -> list[tuple[CovariateDef, int]]:
        return [(d, k) for d in self.definitions for k in range(self.size(d))]

    @property
    def words(self) -> list[str]:
        return [d.name.format(k) for d, k in self._values]

    @property
    def n_values(self) -> int:
        return len(self._values)

    def read(self, batch: pa.RecordBatch) -> Floats:
        sizes = [(d, self.size(d)) for d in self.definitions if self.size(d)]
        numbers = np.concatenate([np.atleast_2d(d.values(batch, size)) for d, size in sizes])
        values: Floats = numbers.astype(np.float64, copy=False)
        values[~np.isfinite(values)] = np.nan
        return values


def squares(of: Sequence[Covariate]) -> list[Covariate]:
    words = {"name": "{} squared", "label": "squared deviation of {}", "unit": "{}, squared"}
    return [
        c.model_copy(update={k: word.format(getattr(c, k)) for k, word in words.items()})
        for c in of
    ]


def columns_of(definitions: Iterable[CovariateDef]) -> list[str]:
    return list(dict.fromkeys(name for d in definitions for name in d.columns))


def defined(*sources: Source) -> tuple[CovariateDef, ...]:
    return tuple(d for d in COVARIATES.values() if d.source in sources)


def content(
    prompt_sources: Sequence[str], *, has_ids: bool, has_entropy: bool = False
) -> tuple[CovariateDef, ...]:
    known = (
        d
        for d in defined("request", "token")
        if (has_ids or not d.needs_ids) and (has_entropy or not d.needs_entropy)
    )
    return (*known, *map(from_source, prompt_sources))


def from_source(word: str) -> CovariateDef:
    bins = halves("other sources", word)
    return _of_request(
        f"source:{word}", f"from {word}", "share", bins, lambda r: r["source"] == word
    )


def _of_request(
    name: str, label: str, unit: str, bins: Bins, values: Callable[..., Any]
) -> CovariateDef:
    return CovariateDef(name, label, unit, "request", values, bins=bins)


def _length(name: str, label: str) -> CovariateDef:
    return _of_request(name, label, "log2 tokens", _LENGTHS, lambda r: np.log2(r[name] + 1.0))


def _of_step(name: str, label: str, unit: str, column: str) -> CovariateDef:
    return CovariateDef(
        name, label, unit, "step", lambda steps: np.asarray(steps[column], np.float64), (column,)
    )


def _load(n: int) -> CovariateDef:
    def averaged(steps: dict[str, Floats]) -> Floats:
        return ewma(steps["batch_tokens"], np.zeros(len(steps["batch_tokens"]), np.int64), n)

    load = _of_step(f"load_{n}", f"tokens per step, last {n} steps", "tokens", "batch_tokens")
    return replace(load, values=averaged, is_load=True, sides=("busy times", "quiet times"))


def _token(name: str, label: str, unit: str, bins: Bins, of_rows: str = "") -> CovariateDef:
    return CovariateDef(name, label, unit, "token", attrgetter(of_rows or name), bins=bins)


def _readout(
    word: str, values: Callable[[pa.RecordBatch, int], Floats], column: str, size: str = ""
) -> CovariateDef:
    unit = "activation units"
    return CovariateDef(word, word, unit, "readout", values, (column,), size=size)


def _list(column: str) -> Callable[[pa.RecordBatch, int], Floats]:
    def read(batch: pa.RecordBatch, n: int) -> Floats:
        numbers = np.full((n, batch.num_rows), np.nan)
        lists = batch[column]
        flat, ends = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy()
        for k in range(n):
            at = ends[:-1] + k
            known = np.flatnonzero(at < ends[1:])
            numbers[k, known] = flat[at[known]]
        return numbers

    return read


_SPECIAL = halves("ordinary", "special")
_ALL = (
    _of_step("batch_tokens", "tokens in the step", "tokens", "batch_tokens"),
    *(_load(n) for n in LOADS),
    _of_step("requests", "requests in the step", "requests", "n_requests"),
    _of_step("waiting", "requests waiting", "requests", "waiting"),
    _of_step("max_seq_len", "longest context of the step", "tokens", "max_seq_len"),
    _token("position", "position in the request", "log2 tokens", _LENGTHS, "log_position"),
    _length("prompt_len", "prompt length of the request"),
    _length("request_len", "length of the request"),
    _token("prefill", "prefill, against decode", "share", halves("decode", "prefill")),
    replace(_token("special", "special token", "share", _SPECIAL, "is_special"), needs_ids=True),
    replace(_token("rarity", "rarity of the token", "bits", _BITS), needs_ids=True),
    replace(_token("entropy", "entropy over the next token", "bits", _BITS), needs_entropy=True),
    _readout("norm", lambda batch, n: batch["norm"].to_numpy(zero_copy_only=False), "norm"),
    *(
        _readout(f"{word} {{}}", _list(f"{word}s"), f"{word}s", f"n_{word}s")
        for word in ("projection", "probe")
    ),
)
COVARIATES: dict[str, CovariateDef] = {covariate.name: covariate for covariate in _ALL}
"""Every covariate by its name, in the order of the result; prompt sources add one each."""


# the steps over time ---------------------------------------------------------------------------

_COUNTED = ("step", "t_ns", "captured_tokens", "thinned_tokens", "dropped_tokens")
MAX_TICKS = 1 << 17
"""Longest series; a longer run is looked at several steps at a time."""


@dataclass(frozen=True)
class RunSteps:
    """The steps of one run that computed a token, in order."""

    run: str
    step: Ints
    t_ns: Ints
    computed: Floats
    lost: Floats
    covariates: dict[str, Floats]  # values of the system covariates, (n_steps,) each


@dataclass(frozen=True)
class Series:
    """All runs one after the other, as ticks of one or more steps.

    Args:
        system: system covariate to sums ``(2, n_ticks)``: x and its square over the tokens; and
            of x over the lost ones, ``(3, n_ticks)`` in all.
    """

    runs: tuple[str, ...]
    run: Ints
    t_s: Floats  # seconds since the first step of the first run, without the time between runs
    seconds: Floats
    computed: Floats
    lost: Floats
    load: Floats
    system: dict[str, Floats]
    blocks: intervals.Blocks
    offsets: Ints  # first tick of each run, and the number of ticks
    steps_per_tick: int
    n_events: int
    effective_events: float  # events of equal size that a mean over the lost tokens rests on
    n_steps: int
    n_lost_steps: int
    n_partial_steps: int

    @property
    def n_ticks(self) -> int:
        return len(self.run)

    @property
    def share(self) -> Floats:
        return np.divide(
            self.lost, self.computed, out=np.zeros(self.n_ticks), where=self.computed > 0
        )


def read_steps(source: RunSource) -> RunSteps:
    """Return the steps of a run that computed something new; the load counts the others, too."""
    definitions = defined("step")
    more = [name for name in columns_of(definitions) if name not in _COUNTED]
    columns = source.columns("steps", [*_COUNTED, *more])
    order = np.argsort(columns["step"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    lost = columns["dropped_tokens"].astype(np.float64)
    computed = columns["captured_tokens"] + columns["thinned_tokens"] + lost
    floats = {name: np.asarray(columns[name], np.float64) for name in columns_of(definitions)}
    covariates = {
        covariate.name: np.asarray(covariate.values(floats), np.float64)
        for covariate in definitions
    }
    kept = computed > 0
    return RunSteps(
        source.run,
        columns["step"][kept],
        columns["t_ns"][kept],
        computed[kept],
        lost[kept],
        {name: values[kept] for name, values in covariates.items()},
    )


def make_series(runs: list[RunSteps], n_blocks: int) -> Series | None:
    """Return the series of some runs, ``None`` when no token was computed."""
    runs = [run for run in runs if len(run.step)]
    n_steps = sum(len(run.step) for run in runs)
    if not n_steps:
        return None
    width = -(-n_steps // MAX_TICKS)
    starts = [np.arange(0, len(run.step), width) for run in runs]
    labels = np.repeat(np.arange(len(runs)), [len(s) for s in starts])

    def summed(values: list[Floats]) -> Floats:
        parts = [np.add.reduceat(v, s, axis=-1) for v, s in zip(values, starts, strict=True)]
        return np.concatenate(parts, axis=-1)

    computed, lost = summed([r.computed for r in runs]), summed([r.lost for r in runs])
    system = {
        name: summed([_sums(r, r.covariates[name]) for r in runs]) for name in runs[0].covariates
    }
    t_s, seconds = _clock(runs, starts)
    share = np.divide(lost, computed)
    n_events, effective = _events(lost, share, labels)
    return Series(
        runs=tuple(run.run for run in runs),
        run=labels,
        t_s=t_s,
        seconds=seconds,
        computed=computed,
        lost=lost,
        load=system[LOAD][0] / computed,
        system=system,
        blocks=intervals.blocks(len(labels), labels, share, n_blocks, min(20, n_blocks)),
        offsets=np.cumsum([0, *(len(s) for s in starts)]),
        steps_per_tick=width,
        n_events=n_events,
        effective_events=effective,
        n_steps=n_steps,
        n_lost_steps=sum(int((r.lost > 0).sum()) for r in runs),
        n_partial_steps=sum(int(((r.lost > 0) & (r.lost < r.computed)).sum()) for r in runs),
    )


def _events(lost: Floats, share: Floats, labels: Ints) -> tuple[int, float]:
    """Return the independent loss events, and how many of equal size they are worth.

    The correlation is that of the share lost: lost tokens go with the size of the steps as well.
    Where most ticks lose something there are no gaps to count: then as many as there are
    correlation times.
    """
    if not lost.any():
        return 0, 0.0
    time = correlation_steps(share, labels)
    if np.count_nonzero(lost) <= len(lost) / 2:
        gap = math.ceil(time)
        return count_events(lost, labels, gap), effective_events(lost, labels, gap)
    n_events = max(1, int(len(lost) / time))
    return n_events, float(n_events)


def _sums(run: RunSteps, x: Floats) -> Floats:
    return np.stack([run.computed * x, run.computed * x * x, run.lost * x])


def _clock(runs: list[RunSteps], starts: list[Ints]) -> tuple[Floats, Floats]:
    times, lengths, base = [], [], 0.0
    for run, start in zip(runs, starts, strict=True):
        t = (np.maximum.accumulate(run.t_ns[start]) - run.t_ns[0]) / 1e9
        last = (max(int(run.t_ns[-1]), int(run.t_ns[0])) - int(run.t_ns[0])) / 1e9
        end = max(last, float(t[-1]))
        times.append(base + t)
        lengths.append(np.diff(t, append=end))
        base += end
    return np.concatenate(times), np.concatenate(lengths)
