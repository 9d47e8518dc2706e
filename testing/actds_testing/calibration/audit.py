"""How often the audit rejects what is harmless and finds what is not, on runs of known truth.

    python -m actds_testing.calibration.audit [--runs 200] [--steps N] [--jobs 2]
        [--scenario NAME ...]

Each run is simulated with a seed of its own and audited in a process of one thread. One line a run
goes to ``--records`` as soon as it is known; a calibration that is called again goes on where it
was cut off, unless the code of the audit or the simulator has changed since. ``--out`` gets the
table. ``make calibrate`` runs all of it, 200 runs each: some hours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actds_testing.places import ROOT

PACKAGE = ROOT / "validators" / "actds_validators"
TABLES = ("requests", "steps", "spans", "drops", "stalls", "occupancy", "tokens", "readouts")
KINDS = ("shift", "event", "within", "change")
LEVEL = 0.05
FIRST_SEED = 20_500_000
"""Seeds below were looked at while the audit was made."""


@dataclass(frozen=True)
class Goal:
    """What the runs of a scenario must come to.

    Args:
        scenario: name of it.
        share: of the runs.
        least: least share of the runs for which it must hold; ``most`` is the largest.
        most: see ``least``.
        words: of the table.
    """

    scenario: str
    share: str
    words: str
    least: float = 0.0
    most: float = 1.0


@dataclass(frozen=True)
class Case:
    """Runs of a simulator's scenario with more hooks, of a length of their own.

    Args:
        scenario: of the simulator.
        steps: of each run.
        n_hooks: hooks, all but one of noise.
        changes: parameters of the scenario.
    """

    scenario: str
    steps: int
    n_hooks: int
    changes: dict[str, Any] = field(default_factory=dict)


N_HOOKS = (1, 8, 30)
NARROW = {"mean_batch_tokens": 12.0, "max_batch_tokens": 32, "max_num_seqs": 24}
QUEUE = {
    **NARROW, "rate": 0.02, "quiet_s": 0.5, "busy_s": 0.15, "disk_stall_every_s": 0.0,
    "pool_rows": 192, "rows_per_shard": 64, "ring_slots": 4, "staging_slots": 2, "n_projections": 2,
}  # fmt: skip
HALF_QUEUE = {**QUEUE, "rate": 0.04, "lost_part": 0.5}
PLANTED = {**NARROW, "rate": 0.045, "strength": 0.05 * 0.955 / 0.045}
"""Stored rows are off by rate / (1 - rate) times the strength: 0.05 standard deviations."""
CASES: dict[str, Case] = {
    **{
        f"harmless_{n}_hooks": Case("mcar_steps", 2000, n, {**NARROW, "rate": 0.02})
        for n in N_HOOKS
    },
    **{f"queue_{n}_hooks": Case("queue", 5000, n, QUEUE) for n in N_HOOKS},
    **{f"partial_queue_{n}_hooks": Case("queue", 5000, n, HALF_QUEUE) for n in N_HOOKS},
    "planted": Case("mnar_projection", 2000, 1, PLANTED),
}
N_LOST = (50, 100, 300, 800, 3000, 20_000, 100_000)
WITHIN = {f"within_{n}_lost": n for n in N_LOST}
"""Tokens lost by coin, one row in 500 a hundredfold sink: `parts.made_rows`, without a harvest."""
DRAWN = ("thinned", "followed_up")
"""Rows drawn under bursts, and some lost by what nothing measures: `drawn`, without a harvest."""
WIDE_UP_TO = 300
"""Lost tokens up to which steps are twelve times as wide."""
GOALS = [
    *(
        Goal(name, "rejects", "at most 9 % reject anything", most=0.09)
        for name in ("mcar_steps", "mcar_bursts", "few_events")
    ),
    Goal("few_events", "uncorrelated", "at most 5 % PASS (uncorrelated)", most=0.05),
    *(
        Goal(name, "flagged", "at least 95 % WARN or FAIL", least=0.95)
        for name in (
            "queue",
            "queue_oldest",
            "mar_load",
            "mnar_content",
            "mnar_projection",
            "mnar_rarity",
            "mnar_steps",
        )
    ),
    Goal("heavy", "FAIL", "all FAIL", least=1.0),
    Goal("negligible", "negligible", "all PASS (negligible)", least=1.0),
    *(
        Goal(f"harmless_{n}_hooks", share, words, least, most)
        for n in N_HOOKS
        for share, words, least, most in (
            ("rejects", "at most 9 % reject anything", 0.0, 0.09),
            ("at once", "interval of the farthest mean holds the truth in 93 %", 0.93, 1.0),
        )
    ),
    *(
        Goal(f"{name}_{n}_hooks", "names load", "at least half name the load", least=0.5)
        for name in ("queue", "partial_queue")
        for n in N_HOOKS
    ),
    Goal("planted", "PASS", "at most 5 % PASS", most=0.05),
    *(Goal(name, "rejects", "at most 5 % reject anything", most=0.05) for name in WITHIN),
    *(Goal(name, "at once", "all intervals hold the truth in 93 %", least=0.93) for name in DRAWN),
    Goal("thinned", "by-design", "at least 95 % PASS (by design)", least=0.95),
    Goal("followed_up", "biased", "at least 95 % are biased", least=0.95),
]
SCENARIO_NAMES = list(dict.fromkeys(goal.scenario for goal in GOALS))


@dataclass(frozen=True)
class Task:
    """One run: its scenario, seed and length; ``code`` names the code that it is run with."""

    scenario: str
    seed: int
    steps: int
    code: str


def wilson(n_true: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, ``(0, 1)`` without a run."""
    if not n:
        return 0.0, 1.0
    share, scale = n_true / n, 1 + z * z / n
    centre = share + z * z / (2 * n)
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def run_one(task: Task, **changes: Any) -> dict[str, Any]:
    """Simulate and audit one run, and return what its tests and its verdict say.

    Args:
        task: the run.
        changes: parameters of the scenario.
    """
    if task.scenario in WITHIN:
        return run_within(task)
    if task.scenario in DRAWN:
        return run_drawn(task)
    from actds_testing.audit_tokens import arrow_source
    from actds_testing.calibration.parts import with_hooks
    from actds_testing.simulate import SCENARIOS, simulate
    from actds_validators.audit.result import Limits
    from actds_validators.audit.run import audit_sources
    from actds_validators.audit.verdict import judge
    from actds_validators.statistics.intervals import benjamini_hochberg

    began = time.monotonic()
    case = CASES.get(task.scenario, Case(task.scenario, task.steps, 1))
    made_of = {**case.changes, **changes, "n_steps": task.steps}
    scenario = replace(SCENARIOS[case.scenario], **made_of)
    simulated = simulate(scenario, task.seed)
    tables = {name: getattr(simulated, name) for name in TABLES}
    tables = {name: table for name, table in tables.items() if table is not None}
    tables = with_hooks(tables, case.n_hooks, task.seed)
    del simulated
    made = time.monotonic()
    limits = Limits()
    found = audit_sources([arrow_source("r", tables)], limits)
    verdict = judge(found, limits)
    means = found.missingness.differences if found.missingness else []
    means = [d for d in means if d.covariate.group != "system" and d.before_weighting]
    farthest = max(means, key=lambda d: abs(d.before_weighting.value), default=None)
    tests = found.mechanism.tests if found.mechanism else []
    naive = [test.naive_p for test in tests if test.naive_p is not None]
    return {
        "scenario": task.scenario,
        "seed": task.seed,
        "steps": task.steps,
        "code": task.code,
        "level": verdict.level,
        "kind": verdict.kind,
        "names_load": "depend on the load" in verdict.sentence,
        "holds": [
            interval is not None and interval.low <= 0 <= interval.high
            for interval in (farthest.before_weighting, farthest.at_once)
        ]
        if farthest
        else [False, False],
        "loss": found.accounting.loss_share,
        "events": found.mechanism.n_events if found.mechanism else 0,
        "tests": [
            [t.name, t.covariate.name, t.covariate.group, t.p, t.adjusted_p, t.rejected, t.naive_p]
            for t in tests
        ],
        "naive": bool(naive) and float(benjamini_hochberg(naive).min()) <= limits.fdr,
        "simulate_s": made - began,
        "audit_s": time.monotonic() - made,
    }


def run_within(task: Task) -> dict[str, Any]:
    """Make rows of steps that lost tokens by coin, and return what the tests within them say."""
    import numpy as np

    from actds_testing.calibration.parts import made_rows, selections_of
    from actds_validators.statistics.association import draws_for, over_families

    began = time.monotonic()
    rng = np.random.default_rng(task.seed)
    n = WITHIN[task.scenario]
    made = made_rows(n, rng, width=12 if n <= WIDE_UP_TO else 1)
    done = time.monotonic()
    families = selections_of(made, draws_for(6, LEVEL, 500), 0)
    adjusted = over_families([[one.inside for one in f] for f in families])[0]
    tests = [
        ["within", one.covariate.name, one.covariate.group, one.p, float(q), bool(q <= LEVEL), None]
        for f, p in zip(families, adjusted, strict=True)
        for one, q in zip(f, p, strict=True)
    ]
    (rows,) = made[0]["content"]
    return {
        "scenario": task.scenario, "seed": task.seed, "steps": task.steps, "code": task.code,
        "level": "-", "kind": "-", "names_load": False, "holds": [False, False],
        "loss": float(rows.lost.mean()), "events": int(rows.lost.sum()), "tests": tests,
        "naive": False, "simulate_s": done - began, "audit_s": time.monotonic() - done,
    }  # fmt: skip


def run_drawn(task: Task) -> dict[str, Any]:
    """Draw rows of a run, or follow its losses up, and return what the draw says."""
    from actds_testing.calibration import drawn

    began = time.monotonic()
    made = drawn.thinned if task.scenario == "thinned" else drawn.followed_up
    verdict, holds, loss = made(task.seed)
    return {
        "scenario": task.scenario, "seed": task.seed, "steps": task.steps, "code": task.code,
        "level": verdict.level, "kind": verdict.kind, "names_load": False, "holds": [False, holds],
        "loss": loss, "events": 0, "tests": [], "naive": False, "simulate_s": 0.0,
        "audit_s": time.monotonic() - began,
    }  # fmt: skip


def shares(records: list[dict[str, Any]]) -> dict[str, int]:
    """Return in how many of the runs each thing came true that a goal or the table asks for."""
    found: Counter[str] = Counter()
    for record in records:
        rejected = {test[0] for test in record["tests"] if test[5]}
        found["rejects"] += bool(rejected)
        found["naive"] += record["naive"]
        found["names load"] += record["names_load"]
        found["alone"] += record["holds"][0]
        found["at once"] += record["holds"][1]
        found["flagged"] += record["level"] in ("WARN", "FAIL")
        found.update({record["level"], record["kind"]})
        found.update(f"test {name}" for name in rejected)
    return dict(found)


def code_digest() -> str:
    """Return what names the code of simulator, statistics and audit, and the versions below it."""
    import numpy
    import scipy  # type: ignore[import-untyped]

    digest = hashlib.sha256()
    for version in (numpy.__version__, scipy.__version__):
        digest.update(version.encode())
    for folder in ("statistics", "audit"):
        for path in sorted((PACKAGE / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of records; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tasks(args: argparse.Namespace, code: str) -> Iterator[Task]:
    """Yield the runs, a few of each scenario in turn, so that a cut-off table is a fair one."""
    for number in range(args.runs):
        for scenario in args.scenario:
            seed = args.first_seed + 10_000 * SCENARIO_NAMES.index(scenario) + number
            steps = CASES[scenario].steps if scenario in CASES else args.steps
            yield Task(scenario, seed, steps, code)


def calibrate(todo: list[Task], jobs: int, records: Path) -> None:
    """Run what is to do, and append a line of each run to the records."""
    if not todo:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are spawned
    records.parent.mkdir(parents=True, exist_ok=True)
    _end_line(records)
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, maxtasksperchild=50) as pool, records.open("a") as out:
        for n, record in enumerate(pool.imap_unordered(run_one, todo), 1):
            out.write(json.dumps(record) + "\n")
            out.flush()
            said = f"{record['scenario']} {record['seed']}: {record['level']} {record['kind']}"
            spent = time.monotonic() - began
            print(f"{n}/{len(todo)} runs, {spent:.0f} s: {said}", flush=True)


def _end_line(path: Path) -> None:
    """End a line that was cut off, so that the next one stands alone."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def table(records: list[dict[str, Any]]) -> str:
    """Return the runs as Markdown: the goals, the tests, and what was run."""
    runs = {name: [r for r in records if r["scenario"] == name] for name in SCENARIO_NAMES}
    runs = {name: found for name, found in runs.items() if found}
    return "\n".join([*_goal_lines(runs), "", *_test_lines(runs), "", *_run_lines(runs)])


def _goal_lines(runs: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    yield "| scenario | goal | runs | reached | 95 % interval | kept |"
    yield "| --- | --- | ---: | ---: | ---: | --- |"
    for goal in GOALS:
        if goal.scenario in runs:
            n = len(runs[goal.scenario])
            k = shares(runs[goal.scenario]).get(goal.share, 0)
            low, high = wilson(k, n)
            kept = "yes" if goal.least <= k / n <= goal.most else "**no**"
            yield (
                f"| {goal.scenario} | {goal.words} | {n} | {k / n:.1%} | "
                f"{low:.1%} to {high:.1%} | {kept} |"
            )


def _test_lines(runs: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    heads = [*KINDS, "naive tests", "names load", "alone", "at once"]
    yield "| scenario | rejects anything | " + " | ".join(heads) + " | verdicts |"
    yield "| --- |" + " ---: |" * (len(heads) + 1) + " --- |"
    for name, found in runs.items():
        counts, n = shares(found), len(found)
        keys = ["rejects", *(f"test {k}" for k in KINDS), *heads[len(KINDS) :]]
        keys[keys.index("naive tests")] = "naive"
        parts = [counts.get(key, 0) / n for key in keys]
        verdicts = Counter(f"{r['level']} ({r['kind']})" for r in found).most_common()
        yield (
            f"| {name} | "
            + " | ".join(f"{part:.1%}" for part in parts)
            + " | "
            + ", ".join(f"{k} {verdict}" for verdict, k in verdicts)
            + " |"
        )


def _run_lines(runs: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    yield "| scenario | runs | steps | seeds | loss | events | simulate s | audit s |"
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"
    for name, found in runs.items():
        seeds = sorted(r["seed"] for r in found)
        steps = ", ".join(f"{n:,}" for n in sorted({r["steps"] for r in found}))
        events = sorted(r["events"] for r in found)
        yield (
            f"| {name} | {len(found)} | {steps} | {seeds[0]} to {seeds[-1]} | "
            f"{statistics.mean(r['loss'] for r in found):.2%} | {events[0]} to {events[-1]} | "
            f"{statistics.mean(r['simulate_s'] for r in found):.1f} | "
            f"{statistics.mean(r['audit_s'] for r in found):.1f} |"
        )


def page(records: list[dict[str, Any]]) -> str:
    """Return the page that is committed."""
    return f"""# Calibration of the audit

Simulated runs of known truth, each with a seed of its own, through the whole audit; made by

    make calibrate

or a part of it by `python -m actds_testing.calibration.audit --runs N --steps N --scenario NAME`;
runs, steps and seeds stand in the last table. *Rejects anything*: any test is rejected at a false
discovery rate of 5 %. *Naive tests*: the same question over the same runs, by tests that take
tokens for independent draws, as one family at the same rate; they never decide anything. Intervals
are Wilson's. Columns *shift* to *change*: runs in which a test of that kind is rejected. *Names
load*: the verdict's sentence says that losses depend on the load. *Alone*, *at once*: runs in which
0 lies in the 95 % interval of the farthest of all content and values means, by itself and for all
at once; 0 is the truth where nothing depends on anything. Scenarios of *hooks* have one hook with
the rows' own readouts and others of noise; in *partial* ones a lost step loses half of its rows,
drawn at random. In *within* ones losses of about so many tokens are made up without a harvest
(column *events* has the lost tokens that were looked at), one row in 500 a hundredfold sink. In
*thinned* rows are drawn with known probabilities under bursts, in *followed_up* rows are lost by
what nothing measures and a fifth of the requests is computed again: *at once* is of the intervals
of means by design, and *loss* the share that is not stored.

{table(records)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each scenario")
    parser.add_argument("--steps", type=int, default=40_000, help="of each run")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIO_NAMES, default=SCENARIO_NAMES)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--records", type=Path, default=ROOT / "build" / "calibration.jsonl")
    parser.add_argument("--out", type=Path, help="where the page goes; printed when absent")
    args = parser.parse_args()
    code = code_digest()
    wanted = list(tasks(args, code))
    done = {(r["scenario"], r["seed"], r["steps"], r["code"]) for r in read_records(args.records)}
    todo = [t for t in wanted if (t.scenario, t.seed, t.steps, t.code) not in done]
    if len(wanted) > len(todo):
        print(f"{len(wanted) - len(todo)} runs are already in {args.records}")
    calibrate(todo, args.jobs, args.records)
    found = [r for r in read_records(args.records) if r["code"] == code]
    if args.out is None:
        print(table(found))
    else:
        args.out.write_text(page(found), encoding="utf-8")
        print(f"{args.out}: {len(found)} runs")


if __name__ == "__main__":
    main()
