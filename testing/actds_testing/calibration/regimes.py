"""How often a comparison of regimes shifts where nothing is planted, and finds what is.

    python -m actds_testing.calibration.regimes [--runs 200] [--jobs 2] [--scenario NAME ...]

Rows are made by hand: sparse features of a known dictionary, an offset of each request, a trend
along positions, and noise. They go through the plan, the sums, the instruments and the verdicts as
rows of a dataset do; the tables are made in memory. One line a run, then the rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.explore.dataset import Dataset
from actds_studies.regimes.arms import ArmRows, Requests
from actds_studies.regimes.conclusions import verdicts
from actds_studies.regimes.contrast import plan
from actds_studies.regimes.instruments import Moments, Numerics
from actds_studies.regimes.instruments.reconstruction import Reconstruction
from actds_studies.regimes.result import Limits, Value
from actds_studies.regimes.run import Measured, conclude, measure
from actds_testing.calibration.audit import read_records, wilson
from actds_testing.places import ROOT

D_MODEL = 32
N_FEATURES = 24
"""Directions of the dictionary; the others hold what it leaves unexplained."""
N_REQUESTS = 96
PROMPT = 24
STEPS = 240
VOCABULARY = 40
FEATURE = 5
"""The feature, and the channel, that planted effects are about."""
FIRST_SEED = 31_500_000
"""Seeds below were looked at while the engine was made."""
Goal = tuple[str, str, float]
"""What is planted, in words, and the share of runs that at ``least`` or at ``most`` find it."""
Rows = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Orthonormal:
    """A dictionary of orthonormal features with a threshold: what it explains is known.

    Args:
        directions: ``(n_features, d_model)``.
    """

    threshold = 1.0

    def __init__(self, directions: npt.NDArray[np.float64]) -> None:
        self.directions = directions.astype(np.float32)

    def encode(self, rows: Rows) -> Rows:
        """Return the features ``(n, n_features)`` above the threshold."""
        score = rows @ self.directions.T
        return np.asarray(np.where(score > self.threshold, score, 0), np.float32)

    def decode(self, features: Rows, rows: Rows | None = None) -> Rows:
        """Return the rows ``(n, d_model)`` of features."""
        return np.asarray(features @ self.directions, np.float32)

    def frame(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return zeros and ones: rows are not normalized."""
        return np.zeros((len(rows), 1), np.float32), np.ones((len(rows), 1), np.float32)


class World:
    """What all arms of a run share: directions, embeddings of tokens, the trend of positions.

    Args:
        seed: of all of it.
        trend: size of the trend along the logarithm of the position.
        token: size of a token's own vector.
    """

    def __init__(self, seed: int, trend: float = 0.0, token: float = 0.4) -> None:
        self.rng = np.random.default_rng(seed)
        self.directions = np.linalg.qr(self.rng.standard_normal((D_MODEL, D_MODEL)))[0]
        self.embedding = token * self.rng.standard_normal((VOCABULARY, D_MODEL))
        self.trend = trend * self.rng.standard_normal(D_MODEL)
        self.rate = self.rng.uniform(0.05, 0.25, D_MODEL)
        self.rate[FEATURE] = 0.1
        self.rate[N_FEATURES:] = 0.0
        self.dictionary = Orthonormal(self.directions[:N_FEATURES])

    def rows(
        self,
        request: Ints,
        position: Ints,
        token: Ints,
        *,
        offset: npt.NDArray[np.float64],
        rate: float = 0.1,
        turn: float = 0.0,
    ) -> npt.NDArray[np.float64]:
        """Return rows ``(n, d_model)``.

        Args:
            request: of each row.
            position: of each row.
            token: of each row.
            offset: of each request ``(n_requests, d_model)``.
            rate: of the planted feature.
            turn: degrees by which its direction is turned.
        """
        rates = self.rate.copy()
        rates[FEATURE] = rate
        n = len(request)
        active = self.rng.random((n, D_MODEL)) < rates
        amount = np.where(active, self.rng.uniform(2, 4, (n, D_MODEL)), 0.0)
        directions = self.directions.copy()
        angle = np.radians(turn)
        aside = self.directions[-1]  # no other feature takes it up
        directions[FEATURE] = np.cos(angle) * directions[FEATURE] + np.sin(angle) * aside
        noise = 0.3 * self.rng.standard_normal((n, D_MODEL))
        context = offset[request] + self.embedding[token]
        context += self.trend * np.log2(np.maximum(position, 1))[:, None] / 4
        return np.asarray(amount @ directions + context + noise)


@dataclass(frozen=True)
class Sequences:
    """Tokens of an arm: request, position and token of each row ``(n,)``."""

    request: Ints
    position: Ints
    token: Ints

    @classmethod
    def make(
        cls,
        rng: np.random.Generator,
        first: int = 1,
        stop: int = PROMPT + STEPS,
        shares: npt.NDArray[np.float64] | None = None,
    ) -> Sequences:
        """Return random tokens of every request at the positions ``[first, stop)``."""
        length = stop - first
        request = np.repeat(np.arange(N_REQUESTS), length)
        position = np.tile(np.arange(first, stop), N_REQUESTS)
        token = rng.choice(VOCABULARY, len(request), p=shares)
        return cls(request, position, token.astype(np.int64))

    def arm(self, decode: bool, authors: int, named: bool = True) -> ArmRows:
        """Return the tables of the arm.

        Args:
            decode: whether positions behind the prompt are decode steps.
            authors: number of the author of its tokens: arms of one author have equal prefixes.
            named: whether requests of other arms are those of the same name.
        """
        n = len(self.request)
        step = self.position - PROMPT + 1
        key = (self.request * 1_000_003 + self.position * 17 + authors * 7_919_777 + 1).astype(
            np.uint64
        )
        unknown = np.full(n, -1, np.int64)
        return ArmRows(
            row=np.arange(n),
            request=self.request,
            position=self.position,
            token_id=self.token,
            prefix=key * np.uint64(0x9E3779B97F4A7C15),
            decode_step=step if decode else np.minimum(step, 0),
            chunk=unknown,
            kernel_mode=unknown,
            role=unknown,
            requests=_requests("" if named else f"{authors}-"),
        )


def _requests(prefix: str) -> Requests:
    """Return requests whose names begin with a prefix."""
    n = N_REQUESTS
    table = pa.table(
        {
            "run": ["r"] * n,
            "request": pa.array(range(n), pa.uint32()),
            "external_id": [f"{prefix}{k}" for k in range(n)],
            "source": pa.nulls(n, pa.string()),
            "source_row": pa.nulls(n, pa.int64()),
            "token_digest": pa.nulls(n, pa.string()),
            "generated_len": pa.array([STEPS + 1] * n, pa.uint32()),
            "prompt_len": pa.array([PROMPT] * n, pa.uint32()),
        }
    )
    told = SimpleNamespace(requests=lambda run: table, catalog=SimpleNamespace(run_ids=["r"]))
    return Requests(cast("Dataset", told))


def offsets(rng: np.random.Generator, size: float = 0.25) -> npt.NDArray[np.float64]:
    """Return the offset of each request ``(n_requests, d_model)``: its rows are not independent."""
    return size * rng.standard_normal((N_REQUESTS, D_MODEL))


def _measured(
    world: World,
    arms: tuple[ArmRows, ArmRows],
    rows: tuple[Any, Any],
    limits: Limits,
    adjust: bool = True,
) -> Measured:
    told = plan(*arms, seed=limits.seed, adjust=adjust)
    arrays = tuple(np.asarray(own, np.float32) for own in rows)
    instruments = [Moments(), Reconstruction(world.dictionary), Numerics(world.dictionary)]
    return measure(told, cast("tuple[Rows, Rows]", arrays), instruments, limits, "resid_post.0")


def by_token(world: World, limits: Limits, planted: str) -> Measured:
    """Return G-R: equal tokens computed twice; what is planted is in G."""
    told = Sequences.make(world.rng)
    clean = world.rows(told.request, told.position, told.token, offset=offsets(world.rng))
    noise = 1e-3 * world.rng.standard_normal((2, *clean.shape))
    second = plant(clean + noise[1], told, planted)
    arms = told.arm(decode=False, authors=0), told.arm(decode=True, authors=0)
    return _measured(world, arms, (clean + noise[0], second), limits)


def by_position(world: World, limits: Limits, planted: str) -> Measured:
    """Return R-H: other tokens at equal positions behind the same prompt; planted in R."""
    offset = offsets(world.rng)
    rows, arms = [], []
    for n in (0, 1):
        told = Sequences.make(world.rng)
        more: dict[str, float] = {}
        if n and planted == "rate":
            more["rate"] = 0.22
        if n and planted == "turn":
            more["turn"] = 5.0
        own = 0.7 * offset + offsets(world.rng, 0.18)  # half of it is the prompt's
        values = world.rows(told.request, told.position, told.token, offset=own, **more)
        rows.append(plant(values, told, planted) if n else values)
        arms.append(told.arm(decode=bool(n), authors=n))
    return _measured(world, (arms[0], arms[1]), (rows[0], rows[1]), limits)


def unpaired(world: World, limits: Limits, planted: str, adjust: bool = True) -> Measured:
    """Return G-H of other requests: other positions, and other tokens where ``mix`` is planted.

    Args:
        world: the run.
        limits: its limits.
        planted: what is.
        adjust: weight the reference to the tokens and positions of the other arm.
    """
    shares = [np.full(VOCABULARY, 1 / VOCABULARY) for _ in (0, 1)]
    if planted == "mix":
        shares = [np.exp(sign * np.linspace(-1, 1, VOCABULARY)) for sign in (-1, 1)]
        shares = [own / own.sum() for own in shares]
    ranges = (1, 200), (PROMPT, PROMPT + STEPS)
    rows, arms = [], []
    for n in (0, 1):
        told = Sequences.make(world.rng, *ranges[n], shares=shares[n])
        values = world.rows(told.request, told.position, told.token, offset=offsets(world.rng))
        rows.append(values)
        arms.append(told.arm(decode=bool(n), authors=n, named=False))
    return _measured(world, (arms[0], arms[1]), (rows[0], rows[1]), limits, adjust)


def plant(rows: npt.NDArray[np.float64], told: Sequences, planted: str) -> npt.NDArray[np.float64]:
    """Return rows with a channel moved by half of its standard deviation, all or at step 200."""
    changed = rows.copy()
    step = told.position - PROMPT + 1
    where = {
        "channel": np.ones(len(rows), bool),
        "step": (step >= 160) & (step <= 240),
    }.get(planted)
    if where is not None:
        changed[where, FEATURE] += 0.5 * rows[:, FEATURE].std()
    return changed


SCENARIOS: dict[str, Goal] = {
    "nothing": ("nothing differs", "most", 0.09),
    "channel": ("a channel moves by half of its SD", "least", 0.95),
    "rate": ("a feature's rate doubles, 0.1 to 0.22", "least", 0.95),
    "turn": ("a feature's direction turns by 5 degrees", "least", 0.95),
    "step": ("a channel moves at decode steps 160 to 240 only", "least", 0.95),
    "position": ("rows depend on the position only", "most", 0.09),
    "mix": ("other tokens, rows depend on the token only", "most", 0.09),
}


def run_one(task: tuple[str, int]) -> dict[str, Any]:
    """Make and compare the arms of one run, and return what it finds.

    Args:
        task: scenario and seed.
    """
    scenario, seed = task
    began = time.monotonic()
    limits = Limits(seed=seed)
    world = World(seed, trend=0.5 if scenario == "position" else 0.0)
    if scenario == "nothing":
        found = [make(world, limits, "") for make in (by_token, by_position, unpaired)]
    elif scenario in ("position", "mix"):
        found = [unpaired(world, limits, scenario)]
    else:
        found = [by_position(world, limits, scenario)]
    contrasts = conclude(found, limits)
    values = [value for own in contrasts for value in own]
    shifted = [value for value in values if value.outcome == "shifts"]
    told = [verdict for own in contrasts for verdict in verdicts(own)]
    return {
        "scenario": scenario,
        "seed": seed,
        "shifts": bool(shifted),
        "found": finds(SCENARIOS[scenario], scenario, shifted, str(FEATURE)),
        "others": others(scenario, shifted, str(FEATURE)),
        "verdicts": [f"{v.instrument}: {v.outcome}" for v in told],
        "n_tests": sum(value.p is not None for value in values),
        "seconds": time.monotonic() - began,
    }


def finds(goal: Goal, scenario: str, shifted: Sequence[Value], element: str | None) -> bool:
    """Return whether what shifts is what was planted, by name; if nothing was, whether it shifts.

    Args:
        goal: of the scenario.
        scenario: what was planted.
        shifted: the values that shift.
        element: the channel or feature that it was planted in.
    """
    if goal[1] == "most":
        return bool(shifted)
    return any(_is_of(scenario, value, element) for value in shifted)


def others(scenario: str, shifted: Sequence[Value], element: str | None) -> list[str]:
    """Return what shifts beside what was planted."""
    more = (value for value in shifted if not _is_of(scenario, value, element))
    return sorted({f"{value.measure}, {value.axis} {value.stratum}" for value in more})


def _is_of(scenario: str, value: Value, element: str | None) -> bool:
    measure = {
        "channel": "mean",
        "step": "mean",
        "rate": "rates of features",
        "turn": "turn of features",
    }.get(scenario)
    if value.measure != measure or value.element != element:
        return False
    return scenario != "step" or value.stratum == "160 to 240"


def table(records: list[dict[str, Any]], scenarios: Mapping[str, Goal] | None = None) -> str:
    """Return the runs as Markdown, a line a scenario."""
    lines = [
        "| planted | goal | runs | reached | 95 % interval | kept | tests | s |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for name, (words, side, share) in (scenarios or SCENARIOS).items():
        own = [record for record in records if record["scenario"] == name]
        if not own:
            continue
        n, k = len(own), sum(record["found"] for record in own)
        low, high = wilson(k, n)
        kept = k / n <= share if side == "most" else k / n >= share
        goal = f"shifts in at most {share:.0%}" if side == "most" else f"found in {share:.0%}"
        lines.append(
            f"| {words} | {goal} | {n} | {k / n:.1%} | {low:.1%} to {high:.1%} | "
            f"{'yes' if kept else '**no**'} | {np.median([r['n_tests'] for r in own]):.0f} | "
            f"{np.median([r['seconds'] for r in own]):.1f} |"
        )
    return "\n".join(lines)


def calibrate(
    run: Callable[[tuple[str, int]], dict[str, Any]],
    scenarios: Mapping[str, Goal],
    args: argparse.Namespace,
) -> None:
    """Make the runs that have no record, and print the table of all.

    Args:
        run: makes one run.
        scenarios: what may be planted.
        args: of `parser`.
    """
    records = read_records(args.records)
    done = {(record["scenario"], record["seed"]) for record in records}
    wanted = [(name, args.first_seed + n) for n in range(args.runs) for name in args.scenario]
    todo = [task for task in wanted if task not in done]
    args.records.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs) as pool, args.records.open("a") as out:
        for n, record in enumerate(pool.imap_unordered(run, todo), 1):
            records.append(record)
            out.write(json.dumps(record) + "\n")
            out.flush()
            said = f"{record['scenario']} {record['seed']}: found {record['found']}"
            print(f"{n}/{len(todo)} {said} {record['others']}", flush=True)
    print(table(records, scenarios))


def parser(
    words: str, scenarios: Mapping[str, Goal], runs: int, records: str
) -> argparse.ArgumentParser:
    """Return the options of a calibration.

    Args:
        words: what it does.
        scenarios: what may be planted.
        runs: of each, by default.
        records: name of the file in ``build``.
    """
    found = argparse.ArgumentParser(description=words)
    found.add_argument("--runs", type=int, default=runs, help="of each scenario")
    found.add_argument("--jobs", type=int, default=2, help="processes")
    found.add_argument("--scenario", nargs="+", choices=scenarios, default=list(scenarios))
    found.add_argument("--first-seed", type=int, default=FIRST_SEED)
    found.add_argument(
        "--records",
        type=Path,
        default=ROOT / "build" / records,
        help="a run that stands here is not made again; delete it when the code changes",
    )
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0], SCENARIOS, 200, "calibration-regimes.jsonl")
    calibrate(run_one, SCENARIOS, options.parse_args())


if __name__ == "__main__":
    main()
