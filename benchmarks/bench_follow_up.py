"""How often the intervals of a follow-up hold the truth, over draws of requests of real rows.

    python benchmarks/bench_follow_up.py [DATASET] [--draws 300]

The rows of all requests are the population. For each draw the means of all channels and of the norm
are estimated from the rows of the drawn requests: how often one interval by itself holds the true
mean, how often all of them do, and how wide the widest is.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

import actds
from actds_validators.statistics.design import mean_of_clusters

FRACTIONS = (0.05, 0.1, 0.3, 0.6)


@dataclass(frozen=True)
class Population:
    """The rows of a hook by request: how many, and their sums; ``sd`` over all rows."""

    n: np.ndarray
    total: np.ndarray
    sd: np.ndarray

    @classmethod
    def of(cls, dataset: actds.Dataset, hook: str) -> Population:
        array = dataset.array(hook)
        rows = array[np.arange(len(array))].astype(np.float64)
        rows = np.concatenate([rows, np.linalg.norm(rows, axis=1, keepdims=True)], axis=1)
        tokens = dataset.tokens(columns=["request"], run=True).to_pandas()
        number = tokens.groupby(["run", "request"], observed=True).ngroup().to_numpy()
        total = np.zeros((number.max() + 1, rows.shape[1]))
        np.add.at(total, number, rows)
        return cls(np.bincount(number).astype(np.float64), total, rows.std(axis=0))

    def cover(self, fraction: float, n_draws: int) -> tuple[float, float, float]:
        """Return the share of means, and of draws, whose intervals hold, and the widest half."""
        rng = np.random.default_rng(0)
        truth, d = self.total.sum(axis=0) / self.n.sum(), self.total.shape[1]
        by_itself, at_once, half = [], [], []
        for _ in range(n_draws):
            drawn = rng.random(len(self.n)) < fraction
            mean = mean_of_clusters(self.n[drawn], self.total[drawn], fraction)
            low, high = mean.interval(0.95, 1)
            by_itself.append(((low <= truth) & (truth <= high)).mean())
            low, high = mean.interval(0.95, d)
            at_once.append(((low <= truth) & (truth <= high)).all())
            half.append(float(((high - low) / 2 / self.sd).max()))
        return float(np.mean(by_itself)), float(np.mean(at_once)), float(np.median(half))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", nargs="?", default="demo/acts")
    parser.add_argument("--draws", type=int, default=300)
    given = parser.parse_args()
    dataset = actds.open(given.dataset)
    print("| hook | requests | fraction | by itself | all at once | widest half, SD |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for hook in dataset.hooks:
        population = Population.of(dataset, hook)
        for fraction in FRACTIONS:
            by_itself, at_once, half = population.cover(fraction, given.draws)
            words = f"{by_itself:.1%} | {at_once:.1%} | {half:.2f} |"
            print(f"| {hook} | {len(population.n)} | {fraction:g} | {words}", flush=True)


if __name__ == "__main__":
    main()
