"""Every number of an audit against the same number from one line per token, by other programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon
from sklearn.isotonic import IsotonicRegression
from statsmodels.stats.multitest import multipletests

from actds.format.tables import READOUTS_FULL
from actds_testing.audit_tokens import (
    audited,
    changed,
    computed_steps,
    covariates,
    expand,
    tables_of,
    tokens_of,
    within,
)
from actds_testing.simulate import SCENARIOS, simulate
from actds_validators.audit.result import Difference, Estimate
from actds_validators.audit.run import Sections
from actds_validators.audit.verdict import judge
from actds_validators.statistics.strata import nested_rates

CASES: dict[str, list[dict[str, Any]]] = {
    "whole steps": [{"name": "queue", "n_steps": 3000, "rate": 0.02, "seed": 1}],
    "rows": [
        {"name": "mnar_rarity", "n_steps": 1200, "rate": 0.02, "seed": 2, "cancel_share": 0.1}
    ],
    "no readouts": [
        {"name": "mcar_steps", "n_steps": 1500, "rate": 0.04, "seed": 3, "readouts": False}
    ],
    "two runs": [
        {"name": "mcar_steps", "n_steps": 1500, "rate": 0.03, "seed": 4},
        {"name": "mar_load", "n_steps": 900, "rate": 0.04, "seed": 5},
    ],
}
EXACT = {"rel": 1e-9, "abs": 1e-12}
CLOSE = {"rel": 1e-6, "abs": 1e-9}  # sums of squares lose half of the digits


@dataclass(frozen=True)
class Case:
    """An audit, and the tokens that it was made from."""

    runs: list[dict[str, Any]]
    ids: bool
    found: Sections

    @cached_property
    def every(self) -> pd.DataFrame:
        return tokens_of(self.runs, ids=self.ids)

    @cached_property
    def x(self) -> dict[str, np.ndarray]:
        return covariates(self.every, ids=self.ids)

    @cached_property
    def lost(self) -> np.ndarray:
        return self.every["lost"].to_numpy(bool)

    @cached_property
    def steps(self) -> pd.DataFrame:
        parts = [computed_steps(run).assign(run=k) for k, run in enumerate(self.runs)]
        return pd.concat(parts, ignore_index=True)

    @cached_property
    def block(self) -> np.ndarray:
        """Return the block of every token: each run cut evenly."""
        assert self.found.mechanism is not None
        found, n = [], 0
        for _, run in self.steps.groupby("run"):
            pieces = max(1, len(run) // self.found.mechanism.block_steps)
            found.append(n + np.arange(len(run)) * pieces // len(run))
            n += pieces
        assert n == self.found.mechanism.n_blocks
        return np.concatenate(found)[self.every["tick"].to_numpy()]

    @cached_property
    def differences(self) -> dict[str, Difference]:
        assert self.found.missingness is not None
        return {d.covariate.name: d for d in self.found.missingness.differences}

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Return norm, projections and their squares of every token, by covariate."""
        if not self.ids:
            return {}
        frames = [run["readouts"].to_pandas().assign(run=k) for k, run in enumerate(self.runs)]
        keys = ["run", "request", "position"]
        lines = self.every[keys].merge(pd.concat(frames, ignore_index=True), on=keys, how="left")
        assert len(lines) == len(self.every)  # one hook, every computed row
        hook = lines["hook"].iloc[0]
        parts = np.stack(lines["projections"].to_numpy()).astype(np.float64)
        named = {f"{hook} projection {k}": parts[:, k] for k in range(parts.shape[1])}
        named = {f"{hook} norm": lines["norm"].to_numpy(np.float64), **named}
        squares = {f"{name} squared": (x - x.mean()) ** 2 for name, x in named.items()}
        return {**named, **squares}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    runs = []
    for options in CASES[request.param]:
        changes = {k: v for k, v in options.items() if k not in ("name", "seed")}
        scenario = replace(SCENARIOS[options["name"]], **changes)
        runs.append(tables_of(simulate(scenario, options["seed"])))
    found = audited(*runs)
    assert found.missingness is not None and found.mechanism is not None
    return Case(runs, all("readouts" in run for run in runs), found)


def test_accounting_counts_every_position(case: Case) -> None:
    spans = pd.concat([expand(run["spans"]) for run in case.runs])
    account = case.found.accounting
    assert account.positions == len(spans)
    by = spans.groupby(["disposition", spans["reason"].fillna("")]).size()
    told = {(w.name, w.reason or ""): w.n_positions for w in account.waterfall[1:]}
    assert told == {key: n for key, n in by.items()}
    assert account.waterfall[0].n_positions == len(spans)
    assert sum(w.share for w in account.waterfall[1:]) == pytest.approx(1)
    lost = spans["disposition"].isin(["dropped", "aborted"]).sum()
    computed = lost + (spans["disposition"] == "captured").sum()
    assert account.computed == computed and account.loss_share == pytest.approx(lost / computed)
    assert account.aborted == (spans["disposition"] == "aborted").sum()
    unresolved = 0
    for run in case.runs:
        lines = expand(run["spans"])
        kept = set(zip(*(run["tokens"][c].to_pylist() for c in ("request", "position")),
                       strict=True))  # fmt: skip
        refs = lines[lines["disposition"] == "cache_ref"]
        unresolved += sum(
            (int(r), int(p)) not in kept
            for r, p in zip(refs["ref_request"], refs["position"], strict=True)
        )
    assert account.unresolved == unresolved
    assert account.requests == sum(len(run["requests"]) for run in case.runs)
    assert account.steps == sum(len(run["steps"]) for run in case.runs)


def test_differences_are_those_of_the_tokens(case: Case) -> None:
    varying = {name for name, x in case.x.items() if x.std() > 0}
    asked = {n for n, d in case.differences.items() if d.covariate.group != "values"}
    assert asked == varying
    for name in sorted(varying):
        x, found = case.x[name], case.differences[name]
        assert found.mean_all == pytest.approx(x.mean(), **CLOSE), name
        assert found.sd_all == pytest.approx(x.std(), **CLOSE), name
        assert found.mean_lost == pytest.approx(x[case.lost].mean(), **CLOSE), name
        _is_interval(found.smd, _smd, x, case.lost, case.block)
        before = _jackknifed(_off, x, case.lost, case.block)
        assert found.before_weighting is not None
        assert found.before_weighting.value == pytest.approx(before[0], **CLOSE)


def test_differences_of_values_are_those_of_the_readouts(case: Case) -> None:
    values = {n: d for n, d in case.differences.items() if d.covariate.group == "values"}
    assert set(values) == set(case.values)
    for name, x in case.values.items():
        assert values[name].mean_all == pytest.approx(x.mean(), **CLOSE)
        assert values[name].mean_lost == pytest.approx(x[case.lost].mean(), **CLOSE)
        _is_interval(values[name].smd, _smd, x, case.lost, case.block)


def test_strata_and_distances_are_those_of_the_bands(case: Case) -> None:
    bands = {
        "position": np.floor(np.log2(case.every["position"].astype(float) + 1)),
        "prompt_len": np.floor(np.log2(case.every["prompt_len"].astype(float) + 1)),
        "request_len": np.floor(np.log2(case.every["request_len"].astype(float) + 1)),
        "prefill": case.x["prefill"],
    }
    if case.ids:
        bands["rarity"] = np.minimum(np.floor(case.every["rarity"]), 24)
        bands["special"] = case.x["special"]
    sources = [name for name in case.x if name.startswith("source:")]
    assert len(sources) > 1
    for name in sources:
        bands[name] = case.x[name]
        words = [s.label for s in case.differences[name].strata]
        assert words == ["other sources", name.removeprefix("source:")]
    assert {n for n, d in case.differences.items() if d.strata} == set(bands)
    for name, band in bands.items():
        found = case.differences[name]
        table = pd.crosstab(np.asarray(band, int), case.lost)
        n, n_lost = table.sum(axis=1).to_numpy(), table[True].to_numpy()
        assert [s.n for s in found.strata] == n.tolist()
        assert [s.n_lost for s in found.strata] == n_lost.tolist()
        assert [s.rate.value for s in found.strata] == pytest.approx((n_lost / n).tolist())
        assert all(0 <= s.rate.low <= s.rate.value <= s.rate.high <= 1 for s in found.strata)
        p, q = n_lost / n_lost.sum(), n / n.sum()
        assert found.total_variation == pytest.approx(np.abs(p - q).sum() / 2, **EXACT)
        assert found.jensen_shannon == pytest.approx(jensenshannon(p, q, base=2), **CLOSE)
    for stratum in case.differences["position"].strata:
        inside = case.every["position"].between(stratum.low, stratum.high)
        assert stratum.n == inside.sum()


def test_coverage_counts_rows_references_and_losses(case: Case) -> None:
    coverage = case.found.coverage
    assert coverage is not None
    special = set(case.every.loc[case.every["special"], "token_id"])
    rarity = dict(zip(case.every["token_id"], case.every["rarity"], strict=True))
    cells: dict[tuple[str, int], np.ndarray] = {}
    rare: dict[int, np.ndarray] = {}
    n_repeated, largest, n_stored, n_served = 0, 1, 0, 0

    def add(name: str, position: int, slot: int, n: int = 1) -> None:
        low = 2 ** int(np.floor(np.log2(position + 1))) - 1
        cells.setdefault((name, low), np.zeros(4, int))[slot] += n

    for run in case.runs:
        lines = expand(run["spans"])
        prompt = dict(zip(*(run["requests"][c].to_pylist() for c in ("request", "prompt_len")),
                          strict=True))  # fmt: skip
        refs = lines[lines["disposition"] == "cache_ref"]
        served = refs.groupby(["ref_request", "position"]).size().to_dict()
        kept = set()
        for row in run["tokens"].to_pylist():
            key = row["request"], row["position"]
            kept.add(key)
            again = served.get(key, 0)
            in_prompt = row["position"] < prompt[row["request"]]
            name = "special" if row["token_id"] in special else "shared prefix" if again else (
                "prompt" if in_prompt else "generated")  # fmt: skip
            add(name, row["position"], 0)
            add(name, row["position"], 1, again)
            bits = min(int(rarity[row["token_id"]]), 24)
            rare.setdefault(bits, np.zeros(3))[:] += [1, 1 + again, 1 + again]
            n_repeated, largest = n_repeated + (again > 0), max(largest, 1 + again)
            n_stored, n_served = n_stored + 1, n_served + 1 + again
        for (request, position), n in served.items():
            if (request, position) not in kept:
                add("reference without a row", position, 1, n)
        for slot, word in ((2, "aborted"), (3, "filtered")):
            for line in lines[lines["disposition"] == word].itertuples():
                in_prompt = line.position < prompt[line.request]
                add("prompt" if in_prompt else "generated", line.position, slot)
    for row in case.every[case.lost].itertuples():
        in_prompt = row.position < row.prompt_len
        is_special = case.ids and row.special
        add("special" if is_special else "prompt" if in_prompt else "generated", row.position, 2)
        if case.ids:
            rare.setdefault(min(int(row.rarity), 24), np.zeros(3))[2] += 1
    told = {(c.token_class, c.low): [c.stored, c.reused, c.lost, c.filtered]
            for c in coverage.cells}  # fmt: skip
    assert told == {key: value.tolist() for key, value in cells.items()}
    assert coverage.repeated_prefixes == n_repeated
    assert coverage.largest_multiplicity == largest
    assert coverage.mean_multiplicity == pytest.approx(n_served / n_stored)
    assert coverage.repeated_multiplicity == (
        pytest.approx((n_served - n_stored + n_repeated) / n_repeated) if n_repeated else None
    )
    n_all = sum(v[:3].sum() for v in cells.values())
    assert coverage.reused_share == pytest.approx(sum(v[1] for v in cells.values()) / n_all)
    for cell in coverage.cells:
        n = cell.stored + cell.reused + cell.lost
        assert cell.stored_share == (pytest.approx(cell.stored / n) if n else None)
    shift = {s.variable: s for s in coverage.shifts}["rarity of the token"]
    stored, weighted, existing = np.array(list(rare.values())).T
    for got, first in ((shift.total_variation, stored), (shift.weighted_total_variation, weighted)):
        away = np.abs(first / first.sum() - existing / existing.sum()).sum() / 2
        assert got == pytest.approx(away, **CLOSE)
    assert shift.jensen_shannon == pytest.approx(jensenshannon(stored, existing, base=2), **CLOSE)


def test_shift_statistics_and_naive_ones_are_those_of_the_tokens(case: Case) -> None:
    assert case.found.mechanism is not None
    share = case.steps["dropped_tokens"].to_numpy(float) / case.steps["n"].to_numpy(float)
    tick, run = case.every["tick"].to_numpy(), case.every["run"].to_numpy()
    _, first = np.unique(tick, return_index=True)
    steps_x, steps_run = {name: x[first] for name, x in case.x.items()}, run[first]
    shifts = {t.covariate.name: t for t in case.found.mechanism.tests if t.name == "shift"}
    varying = {name for name, x in case.x.items() if x.std() > 0}
    assert {n for n, t in shifts.items() if t.covariate.group != "values"} == varying
    for name in varying:
        x = case.x[name]
        sd = x.std()
        if shifts[name].covariate.group == "system":  # every step counts the same
            x_of, run_of, share_of = steps_x[name], steps_run, share
            sd = x_of.std()
        else:  # the mean of the lost if each step lost its share of every token
            x_of, run_of, share_of = x, run, share[tick]
        mean = np.array([x_of[run_of == k].mean() for k in range(len(case.runs))])[run_of]
        away = (share_of * (x_of - mean)).sum() / share_of.sum()
        assert shifts[name].statistic == pytest.approx(away / sd, rel=1e-5, abs=1e-9), name
        r, z = np.corrcoef(x, case.lost)[0, 1], np.sqrt(len(x))
        naive = 2 * stats.norm.sf(abs(r) * z)
        assert shifts[name].naive_p == pytest.approx(naive, rel=1e-4, abs=1e-300), name


def test_tests_within_steps_are_those_of_the_tokens(case: Case) -> None:
    assert case.found.mechanism is not None
    tests = {t.covariate.name: t for t in case.found.mechanism.tests if t.name == "within"}
    partial = case.every["partial"].to_numpy(bool)
    steps = case.every.loc[partial, ["run", "step"]].drop_duplicates()
    assert case.found.mechanism.n_partial_steps == len(steps)
    assert bool(tests) == (len(steps) > 1)
    for name, test in tests.items():
        if test.covariate.group == "values":
            continue
        some = case.every[partial]
        found = within(some["step"], some["request"], case.x[name][partial], case.lost[partial])
        assert found is not None
        assert test.statistic == pytest.approx(found.t, rel=1e-6), name
        assert test.p >= found.p * (1 - 1e-6), name  # or that of the draws, where it is larger
        assert test.n_units == found.n_requests


def test_families_are_adjusted_over_each_other_and_tests_within_theirs(case: Case) -> None:
    assert case.found.mechanism is not None
    families, tests = case.found.mechanism.families, case.found.mechanism.tests
    asked = {t.family for t in tests}
    assert [f.question for f in families] == list(dict.fromkeys(t.family for t in tests))
    assert {"load", "content of steps"} <= asked
    adjusted = multipletests([f.p for f in families], 0.05, "fdr_bh")[1]
    assert [f.adjusted_p for f in families] == pytest.approx(adjusted.tolist())
    for family in families:
        mine = [t for t in tests if t.family == family.question]
        assert len(mine) == family.n_tests
        # A family is rejected where one of its tests is.
        assert min(t.adjusted_p for t in mine) == pytest.approx(family.adjusted_p)
        assert family.least_p <= family.p and family.least_adjusted_p <= family.adjusted_p
        assert family.could_be_found == (family.least_adjusted_p <= 0.05)
    assert [t.rejected for t in tests] == [t.adjusted_p <= 0.05 for t in tests]
    verdict = judge(case.found, _limits())
    smallest = next(n for n in verdict.numbers if n.name == "smallest adjusted p of all tests")
    assert smallest.value == pytest.approx(adjusted.min())


def deciles(steps: pd.DataFrame, column: str) -> tuple[list[float], list[float], list[float]]:
    """Return rate, mean and best monotone fit of the loss by decile of a number of the step."""
    value = steps[column].to_numpy()
    group = np.digitize(value, np.unique(np.quantile(value, np.arange(1, 10) / 10)), right=True)
    group = np.unique(group, return_inverse=True)[1]
    n = np.bincount(group, steps["n"])
    lost = np.bincount(group, steps["dropped_tokens"])
    mean = np.bincount(group, steps["n"] * value) / n
    fits = [
        IsotonicRegression(increasing=rises).fit(np.arange(len(n)), lost / n, n).predict(
            np.arange(len(n))
        )
        for rises in (True, False)
    ]  # fmt: skip
    common = lost.sum() / n.sum()
    best = max(fits, key=lambda fit: float((n * (fit - common) ** 2).sum()))
    return (lost / n).tolist(), mean.tolist(), best.tolist()


@pytest.mark.parametrize("column", ["batch_tokens", "max_seq_len"])
def test_loss_by_batch_and_by_context_is_that_of_the_deciles(case: Case, column: str) -> None:
    assert case.found.queues is not None
    curves = {curve.covariate.name: curve for curve in case.found.queues.loss_by_step}
    curve = curves[column]
    rate, mean, fit = deciles(case.steps, column)
    assert [p.rate.value for p in curve.points] == pytest.approx(rate)
    assert [p.load for p in curve.points] == pytest.approx(mean, rel=1e-6)
    assert [p.fitted for p in curve.points] == pytest.approx(fit, **CLOSE)
    assert curve.direction == ("increasing" if fit[-1] >= fit[0] else "decreasing")
    assert all(p.rate.low <= p.rate.value <= p.rate.high for p in curve.points)


def test_loss_by_load_is_that_of_the_deciles(case: Case) -> None:
    queues, steps = case.found.queues, case.steps
    assert queues is not None
    rate, mean, fit = deciles(steps, "load_8")
    assert [p.rate.value for p in queues.loss_by_load] == pytest.approx(rate)
    assert [p.load for p in queues.loss_by_load] == pytest.approx(mean, rel=1e-6)
    assert [p.fitted for p in queues.loss_by_load] == pytest.approx(fit, **CLOSE)


def test_trace_lags_stalls_and_occupancy_are_those_of_the_tables(case: Case) -> None:
    queues, steps = case.found.queues, case.steps
    assert queues is not None
    assert sum(p.computed for p in queues.trace) == len(case.every)
    assert sum(p.lost for p in queues.trace) == case.lost.sum()
    assert all(0 <= p.lost <= p.computed for p in queues.trace)
    spent = sum((g["t_ns"].iloc[-1] - g["t_ns"].iloc[0]) / 1e9 for _, g in steps.groupby("run"))
    assert sum(p.seconds for p in queues.trace) == pytest.approx(spent, rel=1e-3)
    load, share = steps["n"].to_numpy(float), steps["dropped_tokens"] / steps["n"]
    away = [(v - pd.Series(v).groupby(steps["run"]).transform("mean")).to_numpy()
            for v in (load, share.to_numpy())]  # fmt: skip
    scale = np.sqrt((away[0] ** 2).sum() * (away[1] ** 2).sum())
    for lag in queues.lags[::7]:
        h, total = lag.steps, 0.0
        for k in range(len(case.runs)):
            a, b = (v[steps["run"] == k] for v in away)
            total += a[: len(a) - h] @ b[h:] if h >= 0 else a[-h:] @ b[:h]
        assert lag.correlation == pytest.approx(total / scale, **CLOSE)
    band = queues.lag_band
    assert band is not None and -1 <= band.low < 0 < band.high <= 1 and band.confidence == 0.95
    assert 1 <= band.n_effective <= band.n_shifts
    stalls = pd.concat([run["stalls"].to_pandas() for run in case.runs])
    told = {s.stage: (s.n, s.seconds) for s in queues.stalls}
    assert set(told) == set(stalls["stage"])
    for stage, some in stalls.groupby("stage"):
        assert told[stage] == (len(some), pytest.approx(some["duration_ns"].sum() / 1e9))
    full = pd.concat([run["occupancy"].to_pandas() for run in case.runs])
    seconds = full.groupby(["stage", "depth"])["duration_ns"].sum() / 1e9
    for one in queues.occupancy:
        assert one.seconds == pytest.approx(seconds[one.stage, one.depth])


def test_weights_are_those_of_the_cells_row_by_row(case: Case) -> None:
    weighting = case.found.weighting
    assert weighting is not None
    name = "rarity" if case.ids else "position"
    assert weighting.complexity == name
    edges = np.array([4, 6, 8, 10, 12] if case.ids else [16, 64, 256, 1024])
    lows = sorted({c.load_low for c in weighting.cells} - {0.0})
    load = np.searchsorted(lows, case.every["load_8"].astype(np.float32), side="right")
    other = np.searchsorted(edges, case.every[name].to_numpy(float), side="right")
    number = pd.Series(load * 10 + other)
    held = pd.DataFrame({"cell": number, "lost": case.lost}).groupby("cell")["lost"]
    assert [c.n for c in weighting.cells] == held.size().tolist()
    assert [c.n_lost for c in weighting.cells] == held.sum().tolist()
    share = case.steps["n"].sum() / 10
    assert all(
        abs(case.every["tick"][load <= k].size - (k + 1) * share) < 0.1 * share for k in range(4)
    )  # fmt: skip; above, loads of a full batch are equal
    rates = [c.rate for c in weighting.cells]
    raw = held.mean().to_numpy()
    assert min(raw) - 1e-12 <= min(rates) and max(rates) <= max(raw) + 1e-12
    by_cell = dict(zip(held.size().index, (c.weight for c in weighting.cells), strict=True))
    w = number.map(by_cell).to_numpy()[~case.lost]
    assert weighting.n_rows == len(w) and w.mean() == pytest.approx(1)
    assert weighting.effective_rows == pytest.approx(w.sum() ** 2 / (w**2).sum())
    assert weighting.largest == pytest.approx(w.max())
    inverse = np.array([(1 - c.rate) * c.weight for c in weighting.cells])
    assert inverse == pytest.approx(inverse[0])
    largest: dict[str, tuple[float, float]] = {}
    for name, found in case.differences.items():
        x = (case.x | case.values)[name]
        before, after = (
            (np.average(x[~case.lost], weights=of) - x.mean()) / x.std() for of in (None, w)
        )
        assert found.before_weighting is not None and found.after_weighting is not None
        assert found.after_weighting.value == pytest.approx(after, rel=1e-5, abs=1e-9), name
        held = largest.get(found.covariate.group, (0.0, 0.0))
        largest[found.covariate.group] = max(held[0], abs(before)), max(held[1], abs(after))
    told = {b.group: (b.before, b.after) for b in weighting.balance}
    assert set(told) == set(largest)
    for group, pair in largest.items():
        assert told[group] == pytest.approx(pair, rel=1e-5, abs=1e-9), group


def test_a_block_that_is_left_out_is_left_out_of_the_weights(case: Case) -> None:
    assert case.found.weighting is not None
    name = "rarity" if case.ids else "position"
    edges = np.array([4, 6, 8, 10, 12] if case.ids else [16, 64, 256, 1024])
    lows = sorted({c.load_low for c in case.found.weighting.cells} - {0.0})
    load = np.searchsorted(lows, case.every["load_8"].astype(np.float32), side="right")
    cell = load * 10 + np.searchsorted(edges, case.every[name].to_numpy(float), side="right")
    shape = len(lows) + 1, 10

    def off(rows: np.ndarray, lost: np.ndarray) -> float:
        x, at = rows[:, 0], rows[:, 1].astype(int)
        n, n_lost = (
            np.bincount(of, minlength=shape[0] * 10).reshape(shape) for of in (at, at[lost])
        )
        w = (1 / (1 - nested_rates(n, n_lost))).reshape(-1)[at[~lost]]
        return (np.average(x[~lost], weights=w) - x.mean()) / x.std()

    for one in ("load_8", name, "prefill", *sorted(case.values)[:1]):
        found = case.differences[one].after_weighting
        assert found is not None
        rows = np.column_stack([(case.x | case.values)[one], cell])
        _is_interval(found, off, rows, case.lost, case.block)


def test_what_could_be_asked_depends_on_the_readouts(case: Case) -> None:
    missing = case.found.missingness
    assert missing is not None
    values = [q for q in missing.could_not_ask if "MNAR" in q]
    ids = [q for q in missing.could_not_ask if "rarity" in q]
    assert bool(values) == bool(ids) == (not case.ids)
    assert missing.bound.bias == pytest.approx(
        np.sqrt(missing.bound.loss_share / (1 - missing.bound.loss_share))
    )


def test_lost_tokens_without_readouts_are_not_on_record_and_the_others_stand_for_them() -> None:
    """Of the losses of every second request: nothing of them counts as zero."""
    made = tables_of(simulate(replace(SCENARIOS["queue"], n_steps=3000, rate=0.04), 1))
    every = tokens_of([made], ids=True)
    unread = every["lost"] & (every["request"] % 2 == 0)
    keys = set(map(tuple, every.loc[unread, ["request", "position"]].to_numpy().tolist()))

    def says_so(column: str) -> Any:
        def change(frame: pd.DataFrame) -> pd.DataFrame:
            gone = (frame["request"] % 2 == 0) & (frame.get("disposition", "dropped") == "dropped")
            return frame.assign(**{column: frame[column].mask(gone, READOUTS_FULL)})

        return change

    made = changed(changed(made, "drops", says_so("drop_reason")), "spans", says_so("reason"))
    made = changed(
        made,
        "readouts",
        lambda frame: frame[
            [k not in keys for k in zip(frame["request"], frame["position"], strict=True)]
        ],
    )
    found = audited(made)
    assert found.missingness is not None
    assert found.accounting.unread == unread.sum() > 0
    n = f"{unread.sum():,} of the {every['lost'].sum():,} lost tokens"
    assert any(n in words for words in found.missingness.could_not_ask)
    differences = {d.covariate.name: d for d in found.missingness.differences}

    def expect(name: str, x: np.ndarray, known: np.ndarray) -> None:
        """As if every token without readouts were as those with them are."""
        lost = every["lost"].to_numpy(bool)
        stored, gone = x[~lost], x[lost & known]
        mean = (stored.sum() + lost.sum() * gone.mean()) / len(every)
        told = differences[name]
        assert told.mean_lost == pytest.approx(gone.mean(), **CLOSE), name
        assert told.mean_all == pytest.approx(mean, **CLOSE), name
        bias = (stored.mean() - mean) / told.sd_all
        assert told.before_weighting is not None
        assert told.before_weighting.value == pytest.approx(bias, **CLOSE), name

    lines = made["readouts"].to_pandas()
    hook = lines["hook"].iloc[0]
    lines = every[["request", "position"]].merge(lines, on=["request", "position"], how="left")
    norm = lines["norm"].to_numpy(np.float64)
    assert np.isnan(norm).sum() == unread.sum()
    expect(f"{hook} norm", norm, ~unread.to_numpy())
    expect("special", every["special"].to_numpy(float), ~unread.to_numpy())
    position = differences["position"]  # for which no readout is needed
    assert position.mean_all == pytest.approx(np.log2(every["position"] + 1.0).mean(), **CLOSE)


def _limits() -> Any:
    from actds_validators.audit.result import Limits

    return Limits()


def _smd(x: np.ndarray, lost: np.ndarray) -> float:
    return float((x[lost].mean() - x.mean()) / x.std())


def _off(x: np.ndarray, lost: np.ndarray) -> float:
    return float((x[~lost].mean() - x.mean()) / x.std())


def _jackknifed(
    statistic: Any, x: np.ndarray, lost: np.ndarray, block: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """Return the statistic, its standard error and its values without one block each."""
    numbers = np.unique(block)
    without = np.array([statistic(x[block != b], lost[block != b]) for b in numbers])
    n = len(numbers)
    error = float(np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum()))
    return statistic(x, lost), error, without


def _is_interval(
    found: Estimate, statistic: Any, x: np.ndarray, lost: np.ndarray, block: np.ndarray
) -> None:
    value, error, without = _jackknifed(statistic, x, lost, block)
    d = without - without.mean()
    freedom = min(len(d) - 1, 3 * (d**2).sum() ** 2 / (d**4).sum() - 1)
    half = stats.t.ppf(0.975, max(1.0, freedom)) * error
    assert found.value == pytest.approx(value, **CLOSE)
    assert found.low == pytest.approx(value - half, rel=1e-4, abs=1e-7)
    assert found.high == pytest.approx(value + half, rel=1e-4, abs=1e-7)
