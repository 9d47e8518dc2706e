"""The simulator: conserving tables, and losses whose truth is what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from actds.dataset.account import Account, account
from actds.errors import ActdsError
from actds.format import tables
from actds_testing.simulate import (
    SCENARIOS,
    Scenario,
    Simulated,
    load_of,
    simulate,
    write_dataset,
    write_tables,
)
from actds_testing.simulate.__main__ import main
from actds_testing.simulate.content import of_norm
from actds_testing.simulate.pipeline import DiskStalls, Pipeline
from actds_validators.validate.validation import validate

N_STEPS = 1500
TABLES = ("requests", "steps", "spans", "drops", "stalls", "occupancy", "tokens", "readouts")


def small(name: str, **changes: object) -> Scenario:
    return replace(SCENARIOS[name], n_steps=N_STEPS, **changes)  # type: ignore[arg-type]


def accounted(run: Simulated) -> Account:
    return account("r", run.requests, run.steps, run.spans, run.drops, [run.tokens])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_accounts_for_every_position(name: str) -> None:
    run = simulate(small(name, cancel_share=0.05), 1)
    found = accounted(run)
    # A reference to a lost row is a loss that the accounting tells as a warning.
    assert [finding for finding in found.findings if finding.code != "E410"] == []
    assert bool(found.findings) == (found.totals["unresolved"] > 0)
    assert found.totals["scheduled"] == len(run.lost) == run.steps["batch_tokens"].to_numpy().sum()
    assert found.totals["dropped"] == run.lost.sum()
    assert found.totals["undelivered"] > 0 and found.totals["cache_ref"] > 0
    assert len(run.steps) == N_STEPS
    for table in TABLES:
        columns = getattr(run, table)
        if columns is None:
            assert table == "readouts" and not run.scenario.readouts
            continue
        assert columns.schema == tables.bare_schema(table)
        tables.to_parquet(table, columns)


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
@pytest.mark.parametrize("slow", ["disk", "transfer"])
def test_every_policy_accounts_for_what_full_rings_did(policy: str, slow: str) -> None:
    speed = {"disk_rows_per_s": 1200.0} if slow == "disk" else {"dma_rows_per_s": 1500.0}
    base = small("queue", policy=policy, rate=None, **({"disk_rows_per_s": 1e5} | speed))
    run = simulate(replace(base, mechanism="none" if policy == "block" else "queue"), 2)
    found = accounted(run)
    assert [finding for finding in found.findings if finding.code != "E410"] == []
    assert (found.totals["dropped"] > 0) == (policy != "block")
    waited = {stall for stall in run.stalls["stage"].to_pylist()}
    assert ("staging" in waited) == (policy == "block")
    reason = "queue_full" if slow == "disk" else "dma_backpressure"
    assert set(run.drops["drop_reason"].to_pylist()) == ({reason} if policy != "block" else set())
    assert set(run.drops["policy"].to_pylist()) <= {policy}


def test_block_loses_nothing_and_makes_the_engine_wait() -> None:
    run, free = simulate(small("block"), 3), simulate(small("none"), 3)
    assert not run.lost.any() and len(run.drops) == 0
    staging = [stall for stall in run.stalls.to_pylist() if stall["stage"] == "staging"]
    assert staging and all(stall["duration_ns"] > 0 for stall in staging)
    assert _seconds(run) > _seconds(free)


def test_drop_oldest_loses_what_was_first_and_drop_newest_what_came_last() -> None:
    scenario = small("queue", staging_slots=2, ring_slots=3, rate=None, pool_rows=100)
    lost = {}
    for policy in ("drop_oldest", "drop_newest"):
        stalls = DiskStalls(replace(scenario, disk_stall_every_s=0), np.random.default_rng(0))
        pipeline = Pipeline(scenario, stalls, policy, 1e-3)  # type: ignore[arg-type]
        for step in range(10):
            pipeline.offer(step, 60, 0.01 * (step + 1))
        lost[policy] = sorted(pipeline.dropped)
        assert pipeline.depth2[-1] == 3
    # One slice lies in the pool and three in the ring.
    assert lost == {"drop_oldest": [1, 2, 3, 4, 5, 6], "drop_newest": [4, 5, 6, 7, 8, 9]}


def test_one_seed_gives_one_run_and_another_seed_another() -> None:
    scenario = small("queue")
    one, again, other = (simulate(scenario, seed) for seed in (4, 4, 5))
    assert all(getattr(one, table) == getattr(again, table) for table in TABLES)
    assert np.array_equal(one.rows.bits, again.rows.bits) and one.truth.smd == again.truth.smd
    assert one.tokens != other.tokens


def test_scenarios_that_differ_in_their_loss_only_serve_the_same() -> None:
    runs = [simulate(small(name), 6) for name in ("mcar_steps", "mcar_bursts", "mnar_content")]
    assert all(run.readouts == runs[0].readouts for run in runs[1:])
    assert not np.array_equal(runs[0].lost, runs[1].lost)


@pytest.mark.parametrize("name", ["mcar_steps", "mcar_bursts", "few_events", "heavy"])
def test_uncorrelated_loss_has_one_probability_for_every_row(name: str) -> None:
    run = simulate(small(name), 7)
    assert run.truth.kind == "MCAR" and run.truth.depends_on == "nothing"
    assert np.ptp(run.probability) == 0 and run.probability[0] == SCENARIOS[name].rate
    assert set(run.truth.smd.values()) == {0.0} and set(run.truth.bias.values()) == {0.0}
    assert run.truth.whole_steps and _partial_steps(run) == 0 and run.lost.any()


def test_bursts_lose_steps_in_a_row_and_few_events_in_few_places() -> None:
    long = 20_000
    scenario = replace(SCENARIOS["mcar_bursts"], n_steps=long, rate=0.02, readouts=False)
    bursts = _events(simulate(scenario, 8))
    assert len(bursts) > 20 and 5 < np.mean(bursts) < 12
    events = _events(simulate(replace(scenario, mechanism="few_events"), 8))
    assert len(events) <= 3 and sum(events) <= 0.02 * long + 3


def test_loss_goes_with_load_where_the_queue_or_the_load_decides() -> None:
    for name in ("queue", "mar_load"):
        run = simulate(replace(SCENARIOS[name], n_steps=12_000, rate=0.01, readouts=False), 9)
        load = run.covariates["load"]
        high = load > np.median(load)
        assert run.lost[high].mean() > 2 * run.lost[~high].mean()
        assert run.truth.kind == "MAR" and run.truth.smd["load"] > 0.2
        assert 0.005 < run.truth.loss_share < 0.02
        assert run.truth.bias["load"] == pytest.approx(
            (load[~run.lost].mean() - load.mean()) / load.std(), rel=0.5
        )


@pytest.mark.parametrize("depends", ["norm", "projection", "rarity"])
def test_loss_by_content_takes_other_rows_than_there_are(depends: str) -> None:
    run = simulate(small("mnar_content", depends_on=depends, rate=0.02), 10)
    name = "projection_0" if depends == "projection" else depends
    x = run.covariates[name].astype(float)
    smd = (x[run.lost].mean() - x.mean()) / x.std()
    assert run.truth.kind == "MNAR" and smd == pytest.approx(run.truth.smd[name], abs=0.15)
    assert smd > 0.5 and _partial_steps(run) > 0
    assert np.corrcoef(run.probability, x)[0, 1] > 0.5
    assert run.probability.mean() == pytest.approx(0.02, rel=1e-5)


def test_whole_steps_may_be_lost_by_content() -> None:
    run = simulate(small("mnar_steps", rate=0.05), 11)
    norm = run.covariates["norm"]
    assert _partial_steps(run) == 0 and norm[run.lost].mean() > norm.mean()
    assert run.truth.smd["norm"] > 0.05


def test_tokens_and_values_go_with_their_request() -> None:
    run = simulate(small("none"), 12)
    who = run.computed.request
    count = np.bincount(who)
    for name in ("rarity", "norm", "projection_0"):
        x = run.covariates[name].astype(float)
        means = np.bincount(who, x)[count > 20] / count[count > 20]
        # Independent tokens would leave request means a spread of about one over sqrt(n).
        assert means.std() > 1.5 * x.std() / np.sqrt(np.median(count[count > 20]))
    assert np.corrcoef(run.covariates["rarity"], run.covariates["norm"])[0, 1] > 0.3
    ids, times = np.unique(run.computed.token_id, return_counts=True)
    top = np.sort(times[ids >= 3])[::-1]
    assert top[0] > 5 * top[30] > 0


def test_a_row_without_a_direction_has_its_norm_all_the_same() -> None:
    rows = of_norm(np.array([[0, 0, 0, 0], [0, 3, 0, 4]], np.float32), np.float32([6, 10]))
    assert rows.tolist() == [[3, 3, 3, 3], [0, 6, 0, 8]]


def test_readouts_are_those_of_every_computed_row() -> None:
    run = simulate(small("mcar_steps", rate=0.1), 13)
    assert run.readouts is not None and len(run.readouts) == len(run.lost) > len(run.tokens)
    if "token_id" in run.readouts.schema.names:
        assert np.array_equal(run.readouts["token_id"].to_numpy(), run.computed.token_id)
    assert simulate(small("none", readouts=False), 13).readouts is None


def test_load_is_the_moving_average_of_tokens() -> None:
    n_tokens = np.array([10, 10, 10, 34])
    load = load_of(n_tokens)
    keep = 0.5 ** (1 / 8)
    assert load[0] == pytest.approx(keep * 16 + (1 - keep) * 10)
    assert load[3] == pytest.approx(keep * load[2] + (1 - keep) * 34)


def test_a_written_run_passes_the_deep_validation(tmp_path: Path) -> None:
    run = simulate(replace(small("queue"), n_steps=600, cancel_share=0.1, rate=0.05), 14)
    path = write_dataset(run, tmp_path / "dataset", rows_per_shard=4096)
    checked = validate(path, "deep")
    assert checked.errors == [] and checked.seal == 1 and checked.exit_code() == 0
    assert checked.totals["rows"] == len(run.tokens) and checked.totals["dropped"] > 0
    with pytest.raises(ActdsError, match="E309"):
        write_dataset(run, path)


def test_a_row_level_loss_passes_the_deep_validation(tmp_path: Path) -> None:
    run = simulate(replace(small("mnar_content"), n_steps=400, rate=0.05), 15)
    path = write_dataset(run, tmp_path / "dataset")
    assert validate(path, "deep").errors == []


def test_changed_readouts_of_a_written_run_are_noticed(tmp_path: Path) -> None:
    run = simulate(replace(small("none"), n_steps=200), 16)
    run.rows.bits[:, 0] ^= 1 << 7
    path = write_dataset(run, tmp_path / "dataset")
    assert "E417" in {finding.code for finding in validate(path, "deep").errors}


def test_many_tokens_are_written_in_pieces_that_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actds_testing.simulate.dataset._TOKENS_PER_PIECE", 20_000)
    sizes: list[int] = []
    scenario = replace(SCENARIOS["queue"], rate=0.05, readouts=True)
    path = write_tables(
        tmp_path / "dataset", 80_000, scenario=scenario, seed=17, n_runs=2, progress=sizes.append
    )
    checked = validate(path, "full")
    assert checked.errors == [] and checked.seal == 1
    assert len(sizes) == 4 and sum(sizes) == checked.totals["scheduled"]
    assert 60_000 < sum(sizes) < 100_000
    assert len(checked.runs) == 2 and checked.totals["dropped"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mechanism": "mcar_steps", "policy": "block"}, "loses nothing"),
        ({"max_num_seqs": 97}, "max_num_seqs"),
        ({"pool_rows": 10}, "pool_rows"),
        ({"n_steps": 0}, "n_steps"),
        ({"mechanism": "mcar_bursts", "rate": 0.95}, "no gap"),
    ],
)
def test_refuses_what_cannot_be_simulated(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(Scenario(), **change)  # type: ignore[arg-type]


def test_the_command_writes_a_dataset_and_says_the_truth(tmp_path: Path) -> None:
    out = str(tmp_path / "dataset")
    result = CliRunner().invoke(main, ["mcar_steps", out, "--steps", "200", "--rate", "0.1"])
    assert result.exit_code == 0, result.output
    truth = json.loads(result.stdout)
    assert truth["kind"] == "MCAR" and truth["loss_share"] > 0
    assert validate(out, "full").errors == []
    again = CliRunner().invoke(main, ["mcar_steps", out, "--steps", "200"])
    assert again.exit_code == 1 and "E309" in again.output
    shown = CliRunner().invoke(main, ["--help"]).output
    assert all(name in shown for name in SCENARIOS)


def _seconds(run: Simulated) -> float:
    t_ns = run.steps["t_ns"].to_numpy()
    return float(t_ns[-1] - t_ns[0]) / 1e9


def _partial_steps(run: Simulated) -> int:
    dropped, batch = (run.steps[f"{name}_tokens"].to_numpy() for name in ("dropped", "batch"))
    return int(((dropped > 0) & (dropped < batch)).sum())


def _events(run: Simulated) -> list[int]:
    """Return the lengths of the stretches of lost steps."""
    lost = np.concatenate([[0], run.steps["dropped_tokens"].to_numpy() > 0, [0]]).astype(int)
    edges = np.flatnonzero(np.diff(lost))
    return [int(length) for length in edges[1::2] - edges[::2]]


def test_the_command_says_the_truth_about_many_tokens_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CliRunner().invoke(main, ["queue", str(tmp_path / "one"), "--tokens", "30000"])
    assert one.exit_code == 0, one.output
    assert {"smd", "bias", "loss_share", "kind"} <= json.loads(one.stdout).keys()
    monkeypatch.setattr("actds_testing.simulate.dataset._TOKENS_PER_PIECE", 10_000)
    out = tmp_path / "many"
    told = CliRunner().invoke(
        main, ["mcar_steps", str(out), "--tokens", "30000", "--rate", "0.1", "--seed", "4"]
    )
    truth = json.loads(told.stdout)
    totals = validate(out, "standard").totals
    assert truth["kind"] == "MCAR" and truth["whole_steps"] is True
    assert truth["loss_share"] == pytest.approx(totals["dropped"] / totals["scheduled"])
    assert truth["loss_share"] > 0 and truth["smd"] is truth["bias"] is None
    assert "each of 3 pieces has its own" in truth["note"]
