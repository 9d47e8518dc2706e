"""What was lost, and is it like the rest? From the tables of one dataset, and nothing else.

Drops take whole steps and come in bursts, so tokens are no independent draws and a p-value over
tokens would call any loss significant. The unit here is the burst: intervals come from a jackknife
that leaves out one burst at a time, p-values from shifting the losses along the run. Both are the
audit's, from ``actds_validators.statistics``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import actds
from actds.format.positions import position_key
from actds_validators.statistics import intervals
from actds_validators.statistics.series import circular_shift, ewma

N_DECILES = 10
LOAD_STEPS = 8
"""Steps over which the recent load is averaged, exponentially."""
COVARIATES = {
    "batch_tokens": "tokens in the step",
    "recent_load": f"tokens per step, last {LOAD_STEPS} steps",
    "context": "context length",
    "prompt_len": "prompt length of the request",
    "prefill": "prefill (against decode)",
    "burst_tokens": "tokens since the burst began",
    "norm": "norm of the row (readout)",
}


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over bursts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Stratum:
    """The loss rate among the tokens of a range; an interval of 0 to 1 where one burst has them."""

    low: float
    high: float
    n_tokens: int
    rate: Estimate


@dataclass(frozen=True)
class Difference:
    """Standardised mean difference of lost against all, and the p-value of a circular shift.

    None where there is none to estimate: nothing was lost, or within one burst only.
    """

    smd: Estimate | None
    p: float | None


@dataclass(frozen=True)
class Run:
    """A dataset as the experiment sees it: one row per computed token, one per burst.

    Args:
        tokens: arrays over all computed tokens, ``lost`` and ``burst`` among them.
        t_s: when each token's step was scheduled, seconds from the first arrival.
        busy_s: seconds of each burst from its first arrival to its last finish.
        burst_tokens: tokens of each burst.
        n_steps: steps of the run.
        n_drops: dropped steps.
        stalls: number and seconds of stalls by stage.
    """

    tokens: dict[str, np.ndarray]
    t_s: np.ndarray
    busy_s: np.ndarray
    burst_tokens: np.ndarray
    n_steps: int
    n_drops: int
    stalls: dict[str, tuple[int, float]]

    @property
    def n_bursts(self) -> int:
        """Return the number of bursts."""
        return len(self.busy_s)


def read(path: Path) -> Run:
    """Return the run of a dataset.

    Raises:
        ValueError: rows, drop log and census do not name the same number of positions, or there are
            fewer than two bursts.
    """
    dataset = actds.open(path)
    requests = {n: c.to_numpy() for n, c in _columns(dataset.requests(), (
        "request", "prompt_len", "arrival_ns", "finish_ns"))}  # fmt: skip
    steps = {
        n: c.to_numpy() for n, c in _columns(dataset.steps(), ("step", "t_ns", "batch_tokens"))
    }
    where, lost = _computed(dataset)
    _agree(dataset, lost)

    order = np.argsort(steps["step"])
    steps = {name: values[order] for name, values in steps.items()}
    at = np.searchsorted(steps["step"], where["step"])
    starts, stops = _bursts(requests["arrival_ns"], requests["finish_ns"])
    if len(starts) < 2:
        raise ValueError(f"{path}: one burst; expected at least two to compare")
    burst_of_step = np.clip(np.searchsorted(starts, steps["t_ns"], side="right") - 1, 0, None)
    batch = steps["batch_tokens"].astype(float)
    prompt_len = np.zeros(int(requests["request"].max()) + 1)
    prompt_len[requests["request"]] = requests["prompt_len"]
    tokens = {
        "lost": lost,
        "step": at,
        "burst": burst_of_step[at],
        "batch_tokens": batch[at],
        "recent_load": ewma(batch, burst_of_step, LOAD_STEPS)[at],
        "burst_tokens": _since_burst(batch, burst_of_step)[at],
        "context": where["position"] + 1.0,
        "prompt_len": prompt_len[where["request"]],
        "prefill": (where["position"] < prompt_len[where["request"]]).astype(float),
    }
    norm = _norms(dataset, where)
    if norm is not None:
        tokens["norm"] = norm
    stalls: dict[str, tuple[int, float]] = {}
    for stall in dataset.stalls().to_pylist():
        n, seconds = stalls.get(stall["stage"], (0, 0.0))
        stalls[stall["stage"]] = n + 1, seconds + stall["duration_ns"] / 1e9
    return Run(
        tokens=tokens,
        t_s=(steps["t_ns"][at] - starts[0]) / 1e9,
        busy_s=(stops - starts) / 1e9,
        burst_tokens=np.bincount(burst_of_step, weights=batch, minlength=len(starts)),
        n_steps=len(batch),
        n_drops=len(set(dataset.drops()["step"].to_pylist())),
        stalls=stalls,
    )


def loss_rate(run: Run, mask: np.ndarray | None = None) -> Estimate:
    """Return the share of tokens that was lost, of all or of some."""
    chosen = np.ones(len(run.tokens["lost"]), bool) if mask is None else mask
    lost = _by_burst(run, (run.tokens["lost"] & chosen).astype(float))
    all_ = _by_burst(run, chosen.astype(float))
    sums = np.stack([all_, lost])
    found = _estimate(sums, intervals.loss_rate)
    # None: without its only burst there is no token to ask about.
    return found or Estimate(float(intervals.loss_rate(sums.sum(axis=1))), 0.0, 1.0)


def strata(run: Run, covariate: str) -> list[Stratum]:
    """Return the loss rate by decile of a covariate; equal edges fall together."""
    values = run.tokens[covariate]
    edges = np.unique(np.quantile(values, np.linspace(0, 1, N_DECILES + 1)))
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    found = []
    for n in range(len(edges) - 1):
        mask = index == n
        if mask.any():
            inside = values[mask]
            found.append(
                Stratum(float(inside.min()), float(inside.max()), int(mask.sum()),
                        loss_rate(run, mask))
            )  # fmt: skip
    return found


def difference(run: Run, covariate: str) -> Difference:
    """Return how far the lost tokens lie from all tokens, in standard deviations of all."""
    x, lost = run.tokens[covariate], run.tokens["lost"].astype(float)
    x = x - x.mean()  # the variance is a difference of sums
    sums = [_by_burst(run, v) for v in (np.ones_like(x), x, x * x, lost, lost * x)]
    smd = _estimate(np.stack(sums), intervals.smd)
    n, n_lost, held = (_by_step(run, v) for v in (np.ones_like(x), lost, x))
    shift = circular_shift(np.zeros(run.n_steps), n, n_lost, held)
    return Difference(smd, None if shift is None else float(shift.p[0]))


def relative_speed(run: Run, base: Run) -> Estimate:
    """Return tokens per busy second relative to another run of the same bursts."""
    n = min(run.n_bursts, base.n_bursts)
    sums = np.stack([r[:n] for r in (run.burst_tokens, run.busy_s, base.burst_tokens, base.busy_s)])
    found = _estimate(sums, lambda s: (s[0] / s[1]) / (s[2] / s[3]))
    assert found is not None  # at least two bursts, each of which took time
    return found


def speed(run: Run) -> Estimate:
    """Return tokens per busy second: while at least one request was there."""
    found = _estimate(np.stack([run.burst_tokens, run.busy_s]), lambda s: s[0] / s[1])
    assert found is not None  # as above
    return found


def _estimate(sums: np.ndarray, statistic: intervals.Statistic) -> Estimate | None:
    """Return a statistic of sums over bursts with its interval; None where it has none."""
    found = intervals.jackknife(sums, statistic)
    return None if found is None else Estimate(found.value, found.low, found.high)


def _columns(table: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    return [(name, table[name]) for name in names]


def _computed(dataset: actds.Dataset) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return request, position and step of every stored and every dropped token."""
    names = ("request", "position", "step")
    stored = dataset.tokens()
    found = {name: [stored[name].to_numpy().astype(np.int64)] for name in names}
    n_stored = stored.num_rows
    for drop in dataset.drops().to_pylist():
        n = drop["stop"] - drop["start"]
        found["request"].append(np.full(n, drop["request"], np.int64))
        found["position"].append(np.arange(drop["start"], drop["stop"]))
        found["step"].append(np.full(n, drop["step"], np.int64))
    where = {name: np.concatenate(parts) for name, parts in found.items()}
    return where, np.arange(len(where["step"])) >= n_stored


def _agree(dataset: actds.Dataset, lost: np.ndarray) -> None:
    spans = dataset.spans().to_pylist()
    census = {
        name: sum(s["stop"] - s["start"] for s in spans if s["disposition"] == name)
        for name in ("captured", "dropped", "aborted")
    }
    if (census["captured"], census["dropped"], census["aborted"]) != (
        int((~lost).sum()), int(lost.sum()), 0,
    ):  # fmt: skip
        raise ValueError(f"census {census}, rows and drop log {np.bincount(lost).tolist()}")


def _norms(dataset: actds.Dataset, where: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return the last hook's norm of every computed token, lost ones too; None without readouts."""
    table = dataset.readouts()
    if not table.num_rows:
        return None
    hooks = np.array(table["hook"].to_pylist())
    chosen = hooks == sorted(set(hooks))[-1]
    key = position_key(table["request"], table["position"])
    key, norm = key[chosen], table["norm"].to_numpy()[chosen]
    order = np.argsort(key)
    wanted = position_key(where["request"], where["position"])
    at = np.clip(np.searchsorted(key[order], wanted), 0, len(key) - 1)
    if not np.array_equal(key[order][at], wanted):
        raise ValueError("a computed token has no readout")
    return norm[order][at].astype(float)


def _bursts(arrival: np.ndarray, finish: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return beginnings and ends of the intervals in which some request was there."""
    order = np.argsort(arrival)
    arrival, finish = arrival[order], np.maximum.accumulate(finish[order])
    first = np.concatenate([[True], arrival[1:] > finish[:-1]])
    starts = arrival[first]
    last = np.concatenate([np.flatnonzero(first)[1:] - 1, [len(arrival) - 1]])
    return starts, finish[last]


def _since_burst(batch: np.ndarray, burst: np.ndarray) -> np.ndarray:
    total = np.cumsum(batch) - batch
    first = np.concatenate([[True], burst[1:] != burst[:-1]])
    return total - np.maximum.accumulate(np.where(first, total, 0.0))


def _by_burst(run: Run, values: np.ndarray) -> np.ndarray:
    return np.bincount(run.tokens["burst"], weights=values, minlength=run.n_bursts)


def _by_step(run: Run, values: np.ndarray) -> np.ndarray:
    return np.bincount(run.tokens["step"], weights=values, minlength=run.n_steps)
