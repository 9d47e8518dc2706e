"""How often the intervals of a thinned run hold the truth, over seeds of simulated runs.

    python benchmarks/bench_thinning.py [--seeds 200] [--forged 1000]

Each seed is a run of its own: requests of one hardness each, that moves the values of their rows
and the load; rows are drawn by the hash of the writer, with probabilities of its controller or
fixed ones, and the means over all rows are estimated by the audit's estimator from the drawn ones.
Of 95 % intervals 93 to 97 % should hold. Variables: a value that goes with hardness and load, one
with heavy tails, a feature of 1 % of the rows, and one of a tenth of the rows of every tenth
request. Likewise of the rates of features of a dictionary, down to one that ten rows have or that
all rows of a few requests have, where intervals that hold more often are right, and of their means
where they are active. Then single rows are forged into every table alike, and those that the
account notes are counted.
"""

from __future__ import annotations

import argparse

import numpy as np

from actds_testing.calibration.drawn import FEATURES, VARIABLES, Run, Setting
from actds_testing.forged_draws import detected

SETTINGS = tuple(
    Setting(unit, share) for unit in ("row", "request") for share in (1 / 64, 1 / 16, 0.25, 1, None)
)


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


def of_features(setting: Setting, n_seeds: int) -> tuple[np.ndarray, float, np.ndarray, list[bool]]:
    """Return the share of intervals of rates that hold, by feature, and of seeds all at once.

    And the mean upper end over the true rate, and of each interval of a mean that the audit gives
    whether it holds.
    """
    held, at_once, above, means = np.zeros(len(FEATURES)), 0.0, np.zeros(len(FEATURES)), []
    for seed in range(n_seeds):
        run = Run.of(seed)
        features = run.features(seed)
        truth = np.asarray((features > 0).mean(axis=0)).ravel()
        sums, least = run.rates(setting, seed, features)
        _, low, high = sums.rates(0.95, 1, least)
        held += (low - 1e-12 <= truth) & (truth <= high + 1e-12)
        above += high / np.maximum(truth, 1e-12) / n_seeds
        _, low, high = sums.rates(0.95, len(FEATURES), least)
        at_once += bool(((low - 1e-12 <= truth) & (truth <= high + 1e-12)).all())
        mean, half = sums.means(0.95, 1)
        known = np.isfinite(half)
        of_all = np.asarray(features.sum(axis=0)).ravel()[known] / len(run.request) / truth[known]
        means += (np.abs(mean[known] - of_all) <= half[known] + 1e-6).tolist()
    return held / n_seeds, at_once / n_seeds, above, means


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
    print(f"\n| unit | probability | {' | '.join(FEATURES)} | all at once | means where active |")
    print("| --- | --- " + "| ---: " * (len(FEATURES) + 2) + "|")
    for setting in SETTINGS:
        held, at_once, above, means = of_features(setting, given.seeds)
        cells = [f"{h:.1%}, to {a:,.2f} ×" for h, a in zip(held, above, strict=True)]
        words = f"{setting.unit} | {setting.words} | {' | '.join(cells)}"
        print(
            f"| {words} | {at_once:.1%} | {sum(means):,} of {len(means):,} |",
            flush=True,
        )
    made, noted = detected(given.forged)
    print("\n| forged | made | noted |\n| --- | ---: | ---: |")
    for kind, n in made.items():
        print(f"| {kind} | {n:,} | {noted[kind]:,} |")


if __name__ == "__main__":
    main()
