"""Lookup: what the audit knows of a step, a request and a token id, as arrays.

Part of the third stage, before the tokens' pass: small tables against which rows are read. It
travels to every worker of the pass. Imports `series`, `run_rows` and `ranges`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from actds.accounting.multiplicity import Servings
from actds.format.positions import Index
from actds_validators.audit.class_counts import N_BITS, position_band
from actds_validators.audit.labels import Labels
from actds_validators.audit.ranges import StepRanges
from actds_validators.audit.run_rows import RunRows
from actds_validators.audit.series import RunSteps, Series
from actds_validators.audit.sources import RunSource

__all__ = ["MAX_BITS", "MAX_SOURCES", "NO_BITS", "Lookup", "Vocabulary", "make_lookup", "thinning"]

MAX_SOURCES = 8
MAX_BITS = N_BITS - 2
NO_BITS = N_BITS - 1
"""The band of a token whose rarity is unknown."""
MAX_CELLS = 1 << 18
"""Steps by requests at which selection within steps is looked at, at most, over all runs."""
MAX_SUMS = 1 << 23
"""The same times the covariates: 32 bytes each."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Vocabulary:
    """The token ids that were computed, over all runs.

    Args:
        ids: token ids, rising.
        counts: how often each was computed.
        special: whether the tokenizer calls it special.
    """

    def __init__(self, ids: Ints, counts: Floats, special: Bools) -> None:
        self._index = Index(ids)
        self._counts = counts
        rarity = -np.log2(counts / max(1.0, float(counts.sum())))
        self._rarity = np.append(rarity, np.nan)
        self._special = np.append(special, False)
        bits = np.minimum(np.floor(rarity), MAX_BITS).astype(np.int64)
        self._bits = np.append(bits, NO_BITS)

    def __len__(self) -> int:
        return len(self._index)

    def ids(self, at: Ints) -> Ints:
        """Return the token ids at some places."""
        return self._index.numbers(at)

    def counts(self) -> Floats:
        """Return how often each id was computed, in the order of the places."""
        return self._counts

    def places(self, token_id: npt.NDArray[np.integer]) -> Ints:
        """Return the place of each id, -1 (the last of each array) for an unknown one."""
        return self._index.of(token_id)

    def rarity(self, at: Ints) -> Floats:
        """Return the surprise of each token in the run's own counts, in bits; NaN unknown."""
        return self._rarity[at]

    def special(self, at: Ints) -> Bools:
        """Return whether each token is special; an unknown one is not."""
        return self._special[at]

    def bits(self, at: Ints) -> Ints:
        """Return the rarity in whole bits, `MAX_BITS` for more, `NO_BITS` unknown."""
        return self._bits[at]


@dataclass(frozen=True)
class Lookup:
    """What is known of the steps, requests and token ids of one run.

    Args:
        run: the run.
        steps: places of the steps that computed something, of which the arrays below speak.
        tick: tick of the series, ``(n_steps,)``.
        block: block of the jackknife, ``(n_steps,)``.
        load: load of the step as the cells see it, ``(n_steps,)`` float32.
        system: system covariates of the step, ``(n_steps,)`` each.
        lossy: whether it lost a token, ``(n_steps,)``.
        within: whether selection within it is looked at, ``(n_steps,)``.
        requests: places of the requests, of which the arrays below speak.
        prompt_len: tokens of the prompt, ``(n_requests,)``.
        request_len: positions owed, ``(n_requests,)``.
        source: number of the prompt source among `sources`, -1 another.
        sources: names of the prompt sources.
        source_names: prompt source of each request, None unknown.
        request_block: block of the jackknife in which each request began, ``(n_requests,)``.
        token_slot: place of each token id among those of `strata` that are counted block by
            block, -1 another, ``(n_ids + 1,)``.
        vocabulary: of all runs.
        has_ids: whether the ids of lost tokens are known.
        losses: dropped positions.
        excluded: positions whose readouts count for nothing.
        lost_ids: token id of each dropped position, -1 where its readout is missing; empty
            without ids.
        servings: of the prefix cache.
        labels: token classes that somebody gave, if any.
        n_ticks: length of the series.
        n_blocks: blocks of the jackknife.
    """

    run: str
    steps: Index
    tick: Ints
    block: Ints
    load: npt.NDArray[np.float32]
    system: dict[str, Floats]
    lossy: Bools
    within: Bools
    requests: Index
    prompt_len: Ints
    request_len: Ints
    source: Ints
    sources: tuple[str, ...]
    source_names: list[str | None]
    request_block: Ints
    token_slot: Ints
    vocabulary: Vocabulary
    has_ids: bool
    losses: StepRanges
    excluded: StepRanges
    lost_ids: Ints
    servings: Servings
    labels: Labels | None
    n_ticks: int
    n_blocks: int

    @cached_property
    def n_slots(self) -> int:
        """Return how many token ids are counted block by block."""
        return int(self.token_slot.max(initial=-1)) + 1

    @cached_property
    def prompt_log(self) -> Floats:
        """Return log2 of one more than the prompt's length."""
        found: Floats = np.log2(self.prompt_len + 1.0)
        return found

    @cached_property
    def request_log(self) -> Floats:
        """Return log2 of one more than the request's length."""
        found: Floats = np.log2(self.request_len + 1.0)
        return found

    @cached_property
    def prompt_band(self) -> Ints:
        """Return the power of two of the prompt's length."""
        return position_band(self.prompt_len)

    @cached_property
    def request_band(self) -> Ints:
        """Return the power of two of the request's length."""
        return position_band(self.request_len)


def make_lookup(
    source: RunSource,
    steps: RunSteps,
    series: Series,
    rows: RunRows,
    vocabulary: Vocabulary,
    lost_ids: Ints,
    sources: tuple[str, ...],
    labels: Labels | None,
    token_slot: Ints,
    *,
    has_ids: bool,
    every: int,
) -> Lookup:
    """Return the lookup of a run.

    Args:
        source: the run.
        steps: its steps that computed something.
        series: of all runs.
        rows: of `read_rows`.
        vocabulary: of all runs.
        lost_ids: of the dropped positions, in the order of ``rows.losses``.
        sources: prompt sources that get a covariate each, `MAX_SOURCES` at most.
        labels: token classes that somebody gave, if any.
        token_slot: see `Lookup`.
        has_ids: whether the ids of lost tokens are known.
        every: of `thinning`.
    """
    index = series.runs.index(steps.run)
    tick = series.offsets[index] + np.arange(len(steps.step)) // series.steps_per_tick
    code = {name: k for k, name in enumerate(sources)}
    block = series.blocks.labels[tick].astype(np.int64)
    return Lookup(
        run=steps.run,
        steps=rows.steps,
        tick=tick,
        block=block,
        load=steps.covariates["load_8"].astype(np.float32),
        system=steps.covariates,
        lossy=steps.lost > 0,
        within=_within(steps, every),
        requests=rows.requests,
        prompt_len=rows.prompt_len,
        request_len=rows.request_len,
        source=np.array([-1 if w is None else code.get(w, -1) for w in rows.source], np.int64),
        sources=sources,
        source_names=rows.source,
        request_block=block[np.minimum(rows.first_step, len(block) - 1)],
        token_slot=token_slot,
        vocabulary=vocabulary,
        has_ids=has_ids,
        losses=rows.losses,
        lost_ids=lost_ids,
        excluded=rows.excluded,
        servings=_servings(source),
        labels=labels,
        n_ticks=series.n_ticks,
        n_blocks=series.blocks.n_blocks,
    )


def thinning(runs: list[RunSteps], n_covariates: int) -> int:
    """Return n: every n-th of the steps that lost a part is looked into, to keep to the limits."""
    n_cells = sum(float(run.covariates["requests"][_partial(run)].sum()) for run in runs)
    return max(1, int(np.ceil(n_cells / min(MAX_CELLS, MAX_SUMS / n_covariates))))


def _partial(steps: RunSteps) -> Bools:
    return (steps.lost > 0) & (steps.lost < steps.computed)


def _within(steps: RunSteps, every: int) -> Bools:
    chosen = np.zeros(len(steps.step), bool)
    chosen[np.flatnonzero(_partial(steps))[::every]] = True
    return chosen


def _servings(source: RunSource) -> Servings:
    found = source.columns(
        'select ref_request::bigint request, start::bigint "start", stop::bigint "stop" '
        "from spans where disposition = 'cache_ref' and ref_request is not null"
    )
    return Servings(found["request"], found["start"], found["stop"])
