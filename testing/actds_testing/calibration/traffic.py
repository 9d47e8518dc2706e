"""How often the audit rejects what is harmless and finds what is not, in recorded traffic.

    python -m actds_testing.calibration.traffic [--runs 200] [--jobs 1] [--scenario NAME ...]

What `calibrate_audit` does with simulated runs, done with traffic that a real vLLM scheduler served
(`record_traffic`) and with ids and readouts of a real model: only the losses are made up, and their
truth is known. Each run has a seed of its own, and the recordings take turns. One line a run goes
to ``--records``; a calibration that is called again goes on where it was cut off, unless the code
of the audit has changed. ``--out`` gets the table. Half a minute of one core for each hundred runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actds_testing.calibration.audit import KINDS, PACKAGE, ROOT, read_records
from actds_testing.calibration.traffic_losses import (
    LOSSES,
    RECORDED,
    TRAFFIC,
    Loss,
    audited_tables,
    served,
    steps_at_random,
)

FIRST_SEED = 30_000_000
"""Seeds below were looked at while tests and scenarios were made."""
PLAIN = tuple(name for name in RECORDED if name not in ("shared", "cancelled"))


@dataclass(frozen=True)
class Scenario:
    """What is lost in which traffic, and what the audit must say.

    Args:
        name: name of it.
        words: what is lost, for the table.
        loss: which tokens.
        most: share of the runs that may end in an alarm, for harmless losses.
        least: share of the runs that must be, for others.
        passes: least share of PASS (uncorrelated).
        passes_most: largest share of it.
        recorded: recordings, in turn.
        together: whether all recordings are the runs of one dataset.
    """

    name: str
    words: str
    loss: Loss
    most: float | None = None
    least: float | None = None
    passes: float | None = None
    passes_most: float | None = None
    recorded: tuple[str, ...] = RECORDED
    together: bool = False


FALSE_ALARMS, POWER = 0.09, 0.95


def _scenarios() -> list[Scenario]:
    def harmless(name: str, words: str, loss: Loss | None = None, **more: Any) -> Scenario:
        return Scenario(name, words, loss or LOSSES[name], most=FALSE_ALARMS, **more)

    def harmful(name: str, words: str, loss: Loss | None = None, **more: Any) -> Scenario:
        return Scenario(name, words, loss or LOSSES[name], least=POWER, passes_most=0.05, **more)

    at_random = LOSSES["steps_at_random"]
    some = partial(steps_at_random, rate=0.0054)
    return [
        harmless("hundred_events", "100 whole steps of 18,500 at random", some, passes=0.9,
                 recorded=PLAIN, together=True),
        harmless("steps_at_random", "2 % of the steps at random"),
        harmless("steps_warm_up", "the same in a warm-up", at_random, recorded=("warm_up",)),
        harmless("steps_regimes", "the same where the traffic changes", at_random,
                 recorded=("regimes",)),
        harmless("steps_cancelled", "the same where clients cancel", at_random,
                 recorded=("cancelled",)),
        harmless("bursts_at_random", "bursts of 8 steps at random", passes_most=0.05),
        harmless("few_bursts", "three bursts of 15 steps", passes_most=0.0),
        harmless("few_spells", "half of the steps of three spells of 60", passes_most=0.0),
        harmless("tokens_at_random", "0.5 % of the tokens at random", passes=0.9, recorded=PLAIN),
        harmless("tokens_many", "3 % of the tokens at random",
                 partial(LOSSES["tokens_at_random"], rate=0.03)),
        harmless("requests_at_random", "all rows of one request in fifty"),
        harmless("halves_at_random", "half of the requests of 3 % of the steps"),
        harmful("load_weak", "steps of 18,500, e^(0.4 sd of the load)",
                partial(LOSSES["load"], strength=0.4, rate=0.01), recorded=PLAIN, together=True),
        harmful("load", "steps, e^(0.7 sd of the load)"),
        harmful("load_strong", "steps, e^(sd of the load)", partial(LOSSES["load"], strength=1.0)),
        harmful("quiet", "steps, e^(-0.7 sd of the load)"),
        harmful("tokens_by_load", "tokens one by one, e^(0.5 sd of the load)"),
        harmful("content_weak", "steps of 18,500, e^(0.5 sd of a mean projection)",
                partial(LOSSES["content"], strength=0.5, rate=0.01), recorded=PLAIN, together=True),
        harmful("content", "steps, e^(0.6 sd of a mean projection)"),
        harmful("content_strong", "steps, e^(1.2 sd of a mean projection)",
                partial(LOSSES["content"], strength=1.2)),
        harmful("full_queue", "what a full queue has no room for"),
        harmful("later_half", "steps, four times as often in the second half"),
        harmful("high_projection", "rows, e^(0.5 sd of a projection)"),
        harmful("rare_tokens", "rows, e^(0.5 sd of the rarity)"),
        harmful("large_norms", "half of the rows of the largest 1 % of norms"),
        harmful("far_values", "rows far from the mean of a projection, on both sides"),
        harmful("one_id", "every row of one token id"),
        harmful("one_source", "every row of one source of 2 %"),
    ]  # fmt: skip


SCENARIOS = {one.name: one for one in _scenarios()}


@dataclass(frozen=True)
class Task:
    """One run of a scenario; ``number`` chooses its recording and seed."""

    scenario: str
    number: int
    code: str

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return FIRST_SEED + 10_000 * list(SCENARIOS).index(self.scenario) + self.number


def run_one(task: Task) -> dict[str, Any]:
    """Make the losses of one run, audit it, and return what its tests and its verdict say."""
    import numpy as np

    from actds_testing.audit_tokens import arrow_source
    from actds_validators.audit.result import Limits
    from actds_validators.audit.run import audit_sources
    from actds_validators.audit.verdict import judge

    began = time.monotonic()
    scenario = SCENARIOS[task.scenario]
    names = scenario.recorded
    if not scenario.together:
        names = (names[task.number % len(names)],)
    random = np.random.default_rng(task.seed)
    limits = Limits()
    sources = []
    for name in names:
        s = served(name, random)
        sources.append(arrow_source(name, audited_tables(s, scenario.loss(s, random))))
    found = audit_sources(sources, limits)
    verdict = judge(found, limits)
    tests = found.mechanism.tests if found.mechanism else []
    return {
        "scenario": task.scenario,
        "number": task.number,
        "recorded": names[0] if len(names) == 1 else "all",
        "code": task.code,
        "level": verdict.level,
        "kind": verdict.kind,
        "sentence": verdict.sentence,
        "lacks": verdict.lacks,
        "loss": found.accounting.loss_share,
        "events": found.mechanism.n_events if found.mechanism else 0,
        "rejected": [
            [t.name, t.covariate.name, t.statistic, t.adjusted_p] for t in tests if t.rejected
        ],
        "n_tests": len(tests),
        "seconds": time.monotonic() - began,
    }


def code_digest() -> str:
    """Return what names the code of the audit and of the losses, and the recordings."""
    digest = hashlib.sha256()
    paths = [p for folder in ("statistics", "audit") for p in (PACKAGE / folder).glob("*.py")]
    paths += [*TRAFFIC.glob("*.parquet"), Path(__file__).with_name("traffic_losses.py")]
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def interval(k: int, n: int) -> str:
    """Return the 95 % interval of Clopper and Pearson."""
    from scipy.stats import binomtest  # type: ignore[import-untyped]

    found = binomtest(k, n).proportion_ci(0.95, "exact")
    return f"{found.low:.1%} to {found.high:.1%}"


def alarmed(record: dict[str, Any]) -> bool:
    """Return whether the audit says that losses go with something."""
    other = record["kind"] in ("heavy", "unaccounted")
    return bool(record["rejected"]) or (record["level"] in ("WARN", "FAIL") and not other)


def goals(scenario: Scenario, records: list[dict[str, Any]]) -> Iterable[tuple[str, int, bool]]:
    """Yield what is asked of a scenario, in how many runs it came, and whether that will do."""
    n = len(records)
    flagged = sum(alarmed(r) for r in records)
    passed = sum(r["kind"] == "uncorrelated" for r in records)
    if scenario.most is not None:
        yield f"at most {scenario.most:.0%} alarms", flagged, flagged / n <= scenario.most
    if scenario.least is not None:
        yield f"at least {scenario.least:.0%} alarms", flagged, flagged / n >= scenario.least
    if scenario.passes is not None:
        words = f"at least {scenario.passes:.0%} PASS (uncorrelated)"
        yield words, passed, passed / n >= scenario.passes
    if scenario.passes_most is not None:
        words = f"at most {scenario.passes_most:.0%} PASS (uncorrelated)"
        yield words, passed, passed / n <= scenario.passes_most


def table(records: list[dict[str, Any]]) -> str:
    """Return the runs as Markdown: the goals, then the tests and verdicts."""
    found = {name: [r for r in records if r["scenario"] == name] for name in SCENARIOS}
    found = {name: runs for name, runs in found.items() if runs}
    lines = ["| scenario | what is lost | goal | runs | reached | 95 % interval | kept |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: | --- |")
    for name, runs in found.items():
        for words, k, kept in goals(SCENARIOS[name], runs):
            lines.append(
                f"| {name} | {SCENARIOS[name].words} | {words} | {len(runs)} | "
                f"{k / len(runs):.1%} | {interval(k, len(runs))} | {'yes' if kept else '**no**'} |"
            )
    lines += ["", "| scenario | loss | events | " + " | ".join(KINDS) + " | verdicts |"]
    lines.append("| --- | ---: | ---: |" + " ---: |" * len(KINDS) + " --- |")
    for name, runs in found.items():
        n, events = len(runs), sorted(r["events"] for r in runs)
        kinds = Counter(kind for r in runs for kind in {test[0] for test in r["rejected"]})
        verdicts = Counter(f"{r['level']} ({r['kind']})" for r in runs).most_common()
        lines.append(
            f"| {name} | {sum(r['loss'] for r in runs) / n:.2%} | {events[0]} to {events[-1]} | "
            + " | ".join(f"{kinds[kind] / n:.1%}" for kind in KINDS)
            + " | " + ", ".join(f"{k} {verdict}" for verdict, k in verdicts) + " |"
        )  # fmt: skip
    return "\n".join(lines)


def page(records: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> str:
    """Return the page that is committed."""
    before = ""
    if earlier:
        before = f"\n## The same runs before these tests were changed\n\n{table(earlier)}\n"
    return f"""# Calibration of the audit on recorded traffic

The traffic is what a real vLLM scheduler served (`record_traffic`: arrivals
of several kinds, steps of up to 512 tokens, clients that cancel, a warm-up, a change of regime),
ids and values are those of SmolLM2-135M, and the losses are made up, so that their truth is known.
Made by

    python -m actds_testing.calibration.traffic --out benchmarks/results/calibration-traffic.md

*Alarm*: a test is rejected, or the verdict says that losses go with something. More than 5 % lost
(heavy) is none. Columns *shift* to *change*: runs in
which a test of that kind is rejected. Intervals are those of Clopper and Pearson.

{table(records)}
{before}"""


def calibrate(todo: list[Task], jobs: int, records: Path) -> None:
    """Run what is to do, and append a line of each run to the records."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are spawned
    records.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool, records.open("a") as out:
        for n, record in enumerate(pool.imap_unordered(run_one, todo), 1):
            out.write(json.dumps(record) + "\n")
            out.flush()
            if n % 50 == 0 or n == len(todo):
                print(f"{n}/{len(todo)} runs, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each scenario")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--scenario", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS])
    parser.add_argument(
        "--records", type=Path, default=ROOT / "build" / "calibration-traffic.jsonl"
    )
    parser.add_argument("--before", type=Path, help="records of earlier code, for a second table")
    parser.add_argument("--out", type=Path, help="where the page goes; printed when absent")
    args = parser.parse_args()
    code = code_digest()
    done = {(r["scenario"], r["number"]) for r in read_records(args.records) if r["code"] == code}
    todo = [
        Task(scenario, number, code)
        for number in range(args.runs)
        for scenario in args.scenario
        if (scenario, number) not in done
    ]
    calibrate(todo, args.jobs, args.records)
    found = [r for r in read_records(args.records) if r["code"] == code]
    if args.out is None:
        print(table(found))
    else:
        earlier = read_records(args.before) if args.before else []
        args.out.write_text(page(found, earlier), encoding="utf-8")
        print(f"{args.out}: {len(found)} runs")


if __name__ == "__main__":
    main()
