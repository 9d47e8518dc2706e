"""How often the worst stratum of an audit is a false alarm, on losses made by hand.

    python -m actds_testing.calibration.strata [--runs 100] [--steps 4000] [--rates 0.005 0.03]

Runs without a loss are simulated, in turns with steps of 30 tokens on average and of 100 (at most
512); then rows are taken out in five harmless ways: whole steps, bursts of them, three long bursts,
single tokens, whole requests. One line a way and rate: runs in which any stratum was named.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from bench_codec import table

from actds_testing.audit_losses import lose
from actds_testing.audit_tokens import audited, tables_of
from actds_testing.simulate import SCENARIOS, simulate

BURST = 8


def steps(rows: pd.DataFrame, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of whole steps, lost at random."""
    every = rows["step"].unique()
    return rows["step"].isin(every[rng.random(len(every)) < rate]).to_numpy()


def bursts(rows: pd.DataFrame, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of bursts of eight steps on average."""
    n = max(1, int(rate * rows["step"].nunique() / BURST))
    return _bursts(rows, rng, [1 + int(rng.geometric(1 / BURST)) for _ in range(n)])


def three_bursts(rows: pd.DataFrame, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of three long bursts."""
    return _bursts(rows, rng, 3 * [int(rate * rows["step"].nunique() / 3) + 1])


def _bursts(rows: pd.DataFrame, rng: np.random.Generator, lengths: list[int]) -> np.ndarray:
    every = np.sort(rows["step"].unique())
    lost = np.zeros(len(every), bool)
    for length in lengths:
        start = int(rng.integers(0, len(every) - length))
        lost[start : start + length] = True
    return rows["step"].isin(every[lost]).to_numpy()


def tokens(rows: pd.DataFrame, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return single rows, lost at random."""
    return rng.random(len(rows)) < rate


def requests(rows: pd.DataFrame, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of whole requests, lost at random."""
    every = rows["request"].unique()
    return rows["request"].isin(every[rng.random(len(every)) < rate]).to_numpy()


def _chosen(
    rows: pd.DataFrame,
    way: Callable[[pd.DataFrame, float, np.random.Generator], np.ndarray],
    rate: float,
    rng: np.random.Generator,
) -> np.ndarray:
    return way(rows, rate, rng)


WAYS = (steps, bursts, three_bursts, tokens, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.03])
    args = parser.parse_args()
    n, named = Counter[tuple[str, float]](), Counter[tuple[str, float]]()
    for seed in range(args.runs):
        scenario = replace(SCENARIOS["none"], n_steps=args.steps)
        if seed % 2:
            wide = {"mean_batch_tokens": 100.0, "max_batch_tokens": 512, "max_num_seqs": 256}
            scenario = replace(scenario, **wide)  # type: ignore[arg-type]
        whole = tables_of(simulate(scenario, 1000 + seed))
        for way in WAYS:
            for rate in args.rates:
                rng = np.random.default_rng(7000 + seed)
                cut = lose(whole, partial(_chosen, way=way, rate=rate, rng=rng))
                found = audited(cut).missingness
                n[way.__name__, rate] += 1
                named[way.__name__, rate] += bool(found and found.worst_strata)
    print(table([{"losses": way, "rate": f"{rate:g}", "runs": n[way, rate],
                  "named a stratum": named[way, rate]} for way, rate in n]))  # fmt: skip


if __name__ == "__main__":
    main()
