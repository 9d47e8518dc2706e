"""One simulated run, from a scenario and a seed to tables and truth.

Imports the other modules of this package; what writes datasets stands to its right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds_testing.simulate import assemble
from actds_testing.simulate.content import (
    Computed,
    Rows,
    compute_tokens,
    make_rows,
    place,
)
from actds_testing.simulate.losses import Truth, covariates, draw_losses, tell_truth
from actds_testing.simulate.pipeline import DiskStalls, Pipeline
from actds_testing.simulate.scenario import Scenario
from actds_testing.simulate.scheduler import Schedule, schedule
from actds_testing.simulate.traffic import Traffic

__all__ = ["Simulated", "simulate"]

_AMPLE = 4.0
"""Speed of a disk that keeps up, over the mean load."""
_ROUNDS = 4
_HALVINGS = 8


@dataclass(frozen=True)
class Simulated:
    """A simulated run.

    Args:
        scenario: what was simulated.
        seed: with which seed.
        requests: table of that name, as are the following.
        steps: one line a step.
        spans: what became of every position.
        drops: the drop log.
        stalls: what waited in the pipeline.
        occupancy: how full its queues stood.
        tokens: the stored rows, by request and position.
        readouts: of every computed row in the order of ``computed``; ``None`` without them.
        computed: every computed row, stored or lost, by request and position.
        rows: its values and readouts.
        stored: which computed rows ``tokens`` holds, int64 ``(n_stored,)``.
        lost: which computed rows were lost, bool ``(n_computed,)``.
        probability: of each to be lost, float64 ``(n_computed,)``.
        disk_rows_per_s: speed of the disk.
    """

    scenario: Scenario
    seed: int
    requests: pa.Table
    steps: pa.Table
    spans: pa.Table
    drops: pa.Table
    stalls: pa.Table
    occupancy: pa.Table
    tokens: pa.Table
    readouts: pa.Table | None
    computed: Computed
    rows: Rows
    stored: npt.NDArray[np.int64]
    lost: npt.NDArray[np.bool_]
    probability: npt.NDArray[np.float64]
    disk_rows_per_s: float

    @cached_property
    def covariates(self) -> dict[str, npt.NDArray[Any]]:
        """Return a number per computed row for each covariate of the truth."""
        prompt = self.requests["prompt_len"].to_numpy()
        n_tokens = self.steps["batch_tokens"].to_numpy()
        return covariates(self.computed, self.rows, prompt, n_tokens)

    @cached_property
    def truth(self) -> Truth:
        """Return what is known because it was simulated."""
        return tell_truth(
            self.scenario,
            self.computed,
            self.lost,
            self.probability,
            self.covariates,
            len(self.steps),
        )


def simulate(scenario: Scenario, seed: int) -> Simulated:
    """Return one run of a scenario: tables that account for every position, and the truth.

    Traffic, tokens, rows, disk stalls and losses have random streams of their own, so scenarios
    that differ in their losses only are served and computed alike under one seed: PCG64 of
    ``numpy.random.default_rng([seed, k])`` with k = 0 to 4, in this order.

    Args:
        scenario: the parameters.
        seed: at least 0.

    Spec: 0.1 section 7.
    """
    rngs = [np.random.default_rng([seed, k]) for k in range(5)]
    traffic = Traffic(scenario, rngs[0])
    stalls = DiskStalls(scenario, rngs[3])
    if scenario.mechanism == "queue":
        plan = schedule(scenario, traffic, None)
        pipeline = _saturated(scenario, plan, stalls)
    else:
        disk = scenario.disk_rows_per_s or _AMPLE * scenario.mean_rows_per_s
        pipeline = Pipeline(scenario, stalls, "block", disk)
        plan = schedule(scenario, traffic, pipeline)
    positions = place(scenario, traffic, plan, rngs[1])
    computed = compute_tokens(plan, positions)
    rows = make_rows(scenario, computed, rngs[2])
    lost, p = draw_losses(scenario, computed, rows, plan.n_tokens, pipeline, rngs[4])
    cancelled = (rngs[4].random(len(plan.prompt)) < scenario.cancel_share) & (plan.generated > 1)
    codes = assemble.dispositions(computed, positions, plan, lost, pipeline, cancelled)
    steps = assemble.step_table(scenario, plan, computed, codes, pipeline)
    tokens, stored = assemble.token_table(plan, positions, computed, codes)
    return Simulated(
        scenario=scenario,
        seed=seed,
        requests=assemble.request_table(scenario, traffic, plan, positions, cancelled),
        steps=steps,
        spans=assemble.span_table(positions, codes, plan),
        drops=assemble.drop_table(scenario, plan, computed, codes, steps),
        stalls=assemble.stall_table(pipeline),
        occupancy=assemble.occupancy_table(scenario, plan, pipeline),
        tokens=tokens,
        readouts=assemble.readout_table(computed, rows, codes) if scenario.readouts else None,
        computed=computed,
        rows=rows,
        stored=stored,
        lost=lost,
        probability=p,
        disk_rows_per_s=pipeline.disk_rows_per_s,
    )


def _saturated(scenario: Scenario, plan: Schedule, stalls: DiskStalls) -> Pipeline:
    """Return the pipeline that lost about ``rate`` of the rows, by the speed of its disk.

    A single queue of the same size gives the first guess; then the whole pipeline is run, at most
    four times, and the one whose share of loss is nearest to the rate in ratio is taken.
    """
    if scenario.rate is None or scenario.disk_rows_per_s is not None:
        disk = scenario.disk_rows_per_s or scenario.mean_rows_per_s
        return _carry(scenario, plan, stalls, disk)[0]
    work_s = _working(plan, stalls)
    target = aim = scenario.rate
    found: list[tuple[float, Pipeline]] = []
    for _ in range(_ROUNDS):
        disk = _speed_for(scenario, plan, work_s, aim)
        pipeline, share = _carry(scenario, plan, stalls, disk)
        miss = math.log(max(share, 1e-9) / max(target, 1e-9))
        found.append((abs(miss), pipeline))
        if abs(miss) < 0.2:
            break
        aim *= math.exp(-max(-1.5, min(1.5, miss)))
    return min(found, key=lambda one: one[0])[1]


def _carry(
    scenario: Scenario, plan: Schedule, stalls: DiskStalls, disk: float
) -> tuple[Pipeline, float]:
    """Return the pipeline after all steps, and the share of rows that it lost."""
    pipeline = Pipeline(scenario, stalls, scenario.policy, disk)
    offered = zip(plan.n_tokens.tolist(), plan.offered_s.tolist(), strict=True)
    for step, (n_rows, at_s) in enumerate(offered):
        pipeline.offer(step, n_rows, at_s)
    lost = int(plan.n_tokens[list(pipeline.dropped)].sum())
    return pipeline, lost / int(plan.n_tokens.sum())


def _working(plan: Schedule, stalls: DiskStalls) -> list[float]:
    """Return the time before each step's slice in which the disk worked, since the one before."""
    edges: list[float] = []
    stopped = [0.0]
    n = 0
    while (stall := stalls.nth(n))[0] < plan.offered_s[-1]:
        edges += stall
        stopped += [stopped[-1], stopped[-1] + stall[1] - stall[0]]
        n += 1
    at = np.interp(plan.offered_s, [0.0, *edges], stopped) if edges else 0.0
    worked = plan.offered_s - at
    return np.diff(worked, prepend=0.0).tolist()  # type: ignore[no-any-return]


def _speed_for(scenario: Scenario, plan: Schedule, work_s: list[float], share: float) -> float:
    """Return the disk speed at which one queue of the pipeline's size loses a share of rows."""
    n_tokens = plan.n_tokens.tolist()
    slots = scenario.staging_slots + scenario.ring_slots
    slice_rows = float(np.average(plan.n_tokens, weights=plan.n_tokens))
    room = scenario.pool_rows + slots * slice_rows
    total = sum(n_tokens)
    mean = total / sum(work_s)
    low, high = 0.3 * mean, 6.0 * mean
    for _ in range(_HALVINGS):
        disk = math.sqrt(low * high)
        backlog, lost = 0.0, 0
        for n, seconds in zip(n_tokens, work_s, strict=True):
            backlog -= seconds * disk
            if backlog < 0.0:
                backlog = 0.0
            backlog += n
            if backlog > room:
                backlog -= n
                lost += n
        low, high = (disk, high) if lost > share * total else (low, disk)
    return math.sqrt(low * high)
