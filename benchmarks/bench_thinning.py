"""How often the intervals of a thinned run hold the truth, over seeds of simulated runs.

    python benchmarks/bench_thinning.py [--seeds 200] [--forged 1000]

Each seed is a run of its own: requests of one hardness each, that moves the values of their rows
and the load; rows are drawn by the hash of the writer, with probabilities of its controller or
fixed ones, and the means over all rows are estimated by the audit's estimator from the drawn ones.
Of 95 % intervals 93 to 97 % should hold. Variables: a value that goes with hardness and load, one
with heavy tails, a feature of 1 % of the rows, and one of a tenth of the rows of every tenth
request. Then single rows are forged into every table alike, and those that the account notes are
counted.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actds.format.inclusion import Design, Unit, salt_of, uniform
from actds_testing.forged_draws import detected
from actds_validators.statistics.design import SampleMean, SampleSums
from actds_writers.capture.thinning import Thin

N_REQUESTS, MEAN_LEN, N_STEPS = 8_000, 25, 20_000
VARIABLES = ("value", "heavy tails", "rare feature", "rare in few requests")
MINIMUM = 1 / 64


@dataclass(frozen=True)
class Setting:
    """How rows are drawn: all with one probability, or by the writer's controller under bursts."""

    unit: Unit
    share: float | None

    @property
    def words(self) -> str:
        return "bursts, 1 to 1/64" if self.share is None else f"{self.share:.3g}"


SETTINGS = tuple(
    Setting(unit, share) for unit in ("row", "request") for share in (1 / 64, 1 / 16, 0.25, 1, None)
)


@dataclass(frozen=True)
class Run:
    """The rows of a run in the order of their steps, ``(n,)`` each, and values ``(n, d)``."""

    request: np.ndarray
    position: np.ndarray
    step: np.ndarray
    values: np.ndarray

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
        return cls(request, position, step, values)

    def estimate(self, setting: Setting, seed: int) -> tuple[SampleMean, SampleSums]:
        """Draw rows, and return what the audit's estimator says of all."""
        design = Design(salt_of("bench", seed), MINIMUM, setting.unit)
        number = design.numbers(self.request, self.position)
        share = self._shares(setting, number)
        drawn = number < share
        request, position = self.request[drawn], self.position[drawn]
        n_unit = np.ones(len(request))
        if setting.unit == "request":
            n_unit = np.bincount(request)[request].astype(np.float64)
            position = np.zeros_like(position)
        sums = SampleSums.of(self.values.shape[1], 1024)
        cluster = (uniform(salt_of("cluster", seed), request, position) * 1024).astype(np.int64)
        sums.add(self.values[drawn], share[drawn], cluster, n_unit)
        return sums.mean(), sums

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


def coverage(setting: Setting, n_seeds: int) -> tuple[np.ndarray, float, float, float]:
    """Return the share of intervals that hold, of each variable, and of seeds all at once.

    And how far the mean of the stored rows, each once, is off for the first variable, in standard
    deviations; and the share of rows that were stored.
    """
    held, at_once, plain, kept = np.zeros(len(VARIABLES)), 0.0, [], []
    for seed in range(n_seeds):
        run = Run.of(seed)
        truth, sd = run.values.mean(axis=0), run.values.std(axis=0)
        mean, sums = run.estimate(setting, seed)
        low, high = mean.interval(0.95, 1)
        rounding = 1e-9 * sd
        held += (low - rounding <= truth) & (truth <= high + rounding)
        low, high = mean.interval(0.95, len(VARIABLES))
        at_once += bool(((low - rounding <= truth) & (truth <= high + rounding)).all())
        plain.append((sums.plain[0] / sums.n - truth[0]) / sd[0])
        kept.append(sums.n / len(run.request))
    return (
        held / n_seeds,
        at_once / n_seeds,
        float(np.mean(plain)),
        float(np.mean(kept)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--forged", type=int, default=1000)
    given = parser.parse_args()
    names = " | ".join(VARIABLES)
    print(f"| unit | probability | stored | {names} | all at once | stored rows as they are, SD |")
    print("| --- | --- | ---: " + "| ---: " * (len(VARIABLES) + 2) + "|")
    for setting in SETTINGS:
        held, at_once, plain, kept = coverage(setting, given.seeds)
        shares = " | ".join(f"{share:.1%}" for share in held)
        words = f"{setting.unit} | {setting.words} | {kept:.1%} | {shares} | {at_once:.1%}"
        print(f"| {words} | {plain:+.3f} |", flush=True)
    made, noted = detected(given.forged)
    print("\n| forged | made | noted |\n| --- | ---: | ---: |")
    for kind, n in made.items():
        print(f"| {kind} | {n:,} | {noted[kind]:,} |")


if __name__ == "__main__":
    main()
