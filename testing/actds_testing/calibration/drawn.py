"""Runs of known truth whose rows are drawn, and runs of hidden losses that are followed up.

Requests of one hardness each, that nothing measures and that moves the values of their rows, their
lengths and the load: for `actds_testing.calibration.audit` and ``benchmarks/bench_thinning.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from actds.format.inclusion import Design, Unit, is_drawn, salt_of, uniform
from actds_validators.audit.follow_up import ClusterSums, Compared, StoredSums
from actds_validators.audit.result import Accounting, FollowUp, Limits, Sample, Verdict
from actds_validators.audit.sample import hook_of
from actds_validators.audit.verdict import Evidence, judge
from actds_validators.statistics.design import RateSums, SampleMean, SampleSums, Units
from actds_writers.capture.thinning import Thin

N_REQUESTS, MEAN_LEN, N_STEPS = 8_000, 25, 20_000
VARIABLES = ("value", "heavy tails", "rare feature", "rare in few requests")
FEATURES = ("1 in 5 rows", "1 in 100", "1 in 2,000", "1 in 50,000", "1 in 500 requests")
MINIMUM = 1 / 64


@dataclass(frozen=True)
class Setting:
    """How rows are drawn: all with one probability, or by the writer's controller under bursts."""

    unit: Unit
    share: float | None

    @property
    def words(self) -> str:
        return "bursts, 1 to 1/64" if self.share is None else f"{self.share:.3g}"


@dataclass(frozen=True)
class Run:
    """The rows of a run in the order of their steps, ``(n,)`` each, and values ``(n, d)``.

    Args:
        hardness: of each request.
    """

    request: np.ndarray
    position: np.ndarray
    step: np.ndarray
    values: np.ndarray
    hardness: np.ndarray

    @classmethod
    def of(cls, seed: int) -> Run:
        rng = np.random.default_rng(seed)
        burst = np.repeat(rng.random(N_STEPS // 100) < 0.1, 100)
        odds = np.where(burst, 10.0, 1.0)
        start = rng.choice(N_STEPS, N_REQUESTS, p=odds / odds.sum())
        hardness = rng.normal(size=N_REQUESTS) + burst[start]  # what comes in bursts is unlike
        length = 1 + rng.geometric(1 / (MEAN_LEN * np.exp(0.3 * hardness - 0.1)).clip(1.01))
        request = np.repeat(np.arange(N_REQUESTS), length)
        position = np.concatenate([np.arange(n) for n in length])
        prompt = np.minimum(8, length)  # computed in one step, then a row a step
        step = start[request] + np.maximum(0, position - prompt[request] + 1)
        order = np.argsort(step, kind="stable")
        request, position, step = request[order], position[order], step[order]
        n, of = len(request), hardness[request]
        carries = rng.random(N_REQUESTS) < 0.1
        values = np.stack(
            [
                of + rng.normal(size=n),
                np.exp(1.0 * rng.normal(size=n)) + of,
                (rng.random(n) < 0.01 * np.exp(0.3 * of)).astype(float),
                (carries[request] & (rng.random(n) < 0.1)).astype(float),
            ],
            axis=1,
        )
        return cls(request, position, step, values, hardness)

    def estimate(self, setting: Setting, seed: int) -> tuple[SampleMean, SampleSums]:
        """Draw rows, and return what the audit's estimator says of all."""
        drawn, share, units = self._draw(setting, seed)
        sums = SampleSums.of(self.values.shape[1], 1024)
        sums.add(self.values[drawn], share[drawn], units.cluster, units.n)
        return sums.mean(), sums

    def features(self, seed: int) -> csr_array:
        """Return values of `FEATURES`, ``(n, d)``, of which most are 0."""
        rng, of = np.random.default_rng([seed, 1]), self.hardness[self.request]
        odds = np.exp(0.3 * of)
        active = [rng.random(len(of)) < p * odds for p in (0.2, 0.01, 5e-4, 2e-5)]
        active.append((rng.random(N_REQUESTS) < 1 / 500)[self.request])
        return csr_array(np.stack([a * np.exp(rng.normal(size=len(of))) for a in active], axis=1))

    def rates(self, setting: Setting, seed: int, features: csr_array) -> tuple[RateSums, float]:
        """Draw rows, and return the sums of their features, and the lowest inclusion of any row."""
        drawn, share, units = self._draw(setting, seed)
        by_request = setting.unit == "request"
        sums = RateSums.of(features.shape[1], 1024 if by_request else 0)
        sums.add(features[drawn], share[drawn], units if by_request else None)
        return sums, float(share.min())

    def _draw(self, setting: Setting, seed: int) -> tuple[np.ndarray, np.ndarray, Units]:
        """Return which rows are drawn, the probability of each, and the units of those drawn."""
        design = Design(salt_of("bench", seed), MINIMUM, setting.unit)
        number = design.numbers(self.request, self.position)
        share = self._shares(setting, number)
        drawn = number < share
        request, position = self.request[drawn], self.position[drawn]
        n_unit = np.ones(len(request))
        if setting.unit == "request":
            n_unit = np.bincount(request)[request].astype(np.float64)
            position = np.zeros_like(position)
        cluster = (uniform(salt_of("cluster", seed), request, position) * 1024).astype(np.int64)
        sign = np.where(uniform(salt_of("sign", seed), request) < 0.5, -1.0, 1.0)
        return drawn, share, Units(n_unit, cluster, sign)

    def _shares(self, setting: Setting, number: np.ndarray) -> np.ndarray:
        """Return the probability of each row; of the controller it hangs on what was drawn."""
        if setting.share is not None:
            return np.full(len(number), setting.share)
        thin, fill, room = Thin(MINIMUM), 0.0, 4_000
        take = 0.7 * len(number) / N_STEPS  # rows that the writer stores in the time of a step
        edges = np.searchsorted(self.step, np.arange(int(self.step[-1]) + 2))
        share = np.ones(len(number))
        of_request = np.full(N_REQUESTS, np.nan)
        for low, high in pairwise(edges):
            of_step = thin(fill / room, (high - low) / room)
            if setting.unit == "request":
                first = self.request[low:high]
                new = np.isnan(of_request[first])
                of_request[first[new]] = of_step
                share[low:high] = of_request[first]
            else:
                share[low:high] = of_step
            stored = int((number[low:high] < share[low:high]).sum())
            fill = max(0.0, min(fill + stored, room) - take)
        return share


def thinned(seed: int) -> tuple[Verdict, bool, float]:
    """Return the verdict on a run thinned under bursts, whether intervals hold, and its loss."""
    run, setting = Run.of(seed), Setting("row", None)
    mean, sums = run.estimate(setting, seed)
    truth, n = run.values.mean(axis=0), len(run.request)
    low, high = mean.interval(0.95, len(VARIABLES))
    section = Sample(
        units=["row"],
        minimum=MINIMUM,
        n_stored=sums.n,
        n_thinned=n - sums.n,
        n_dropped=0,
        effective_rows=sums.effective,
        hooks=[hook_of("h", sums, len(VARIABLES))],
        readouts=None,
        lane=None,
    )
    evidence = Evidence(_account(n, thinned=n - sums.n), sample=section)
    holds = bool(((low <= truth) & (truth <= high)).all())
    return judge(evidence, Limits()), holds, 1 - sums.n / n


def followed_up(seed: int, fraction: float = 0.2) -> tuple[Verdict, bool, float]:
    """Return the same of a run that loses some 6 % of its rows by hardness, with a follow-up."""
    run = Run.of(seed)
    rng = np.random.default_rng(seed)
    lost = rng.random(len(run.request)) < 0.02 * np.exp(1.2 * run.hardness[run.request] - 0.72)
    stored, n_lost, d = StoredSums.empty(len(VARIABLES) - 1), int(lost.sum()), len(VARIABLES)
    stored.add(run.values[~lost])
    requests = np.unique(run.request[lost])
    drawn = requests[is_drawn(seed, "d", "r", requests, fraction)]
    sums = {name: ClusterSums.of_each({"h": d - 1})["h"] for name in ("again", "apart")}
    at = np.flatnonzero(lost & np.isin(run.request, drawn))
    sums["again"].add(run.request[at] % 1024, np.arange(len(at)), run.values[at])
    hook = Compared(n_lost, fraction, d).hook("h", stored, sums["again"], sums["apart"])
    section = FollowUp(
        path="again",
        digest="0" * 64,
        fraction=fraction,
        seed=seed,
        n_missing=n_lost,
        share=n_lost / len(lost),
        n_requests=len(drawn),
        n_drawn=len(at),
        n_answered=len(at),
        n_shared=0,
        hooks=[hook],
    )
    which = d - 1 if hook.variable == "norm" else int(hook.variable.split()[1])
    off = run.values[~lost].mean(axis=0) - run.values.mean(axis=0)
    truth = (off / run.values.std(axis=0))[which]
    evidence = Evidence(_account(len(lost), dropped=n_lost), follow_up=section)
    holds = bool(hook.bias.low <= truth <= hook.bias.high)
    return judge(evidence, Limits()), holds, n_lost / len(lost)


def _account(n: int, thinned: int = 0, dropped: int = 0) -> Accounting:
    none = dict.fromkeys(
        ("cache_ref", "aborted", "filtered", "recomputed", "unresolved", "requests", "steps"), 0
    )
    return Accounting(
        positions=n,
        computed=n,
        captured=n - thinned - dropped,
        thinned=thinned,
        dropped=dropped,
        loss_share=dropped / n,
        waterfall=[],
        findings=[],
        **none,
    )
