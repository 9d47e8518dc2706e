"""Rows that are not as the simulator makes them: what the audit's passes do with each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from actds.errors import ActdsError
from actds.format import tables
from actds_testing.audit_tokens import audited, changed, sources_of, tables_of
from actds_testing.forge import relink
from actds_testing.simulate import SCENARIOS, simulate, write_dataset
from actds_validators.audit import data, lookup, run
from actds_validators.audit.data import StepRanges, column, explode, labels_of
from actds_validators.audit.run import Sections, pass_over
from actds_validators.cli.commands import audit as command

Tables = dict[str, pa.Table]


def made(name: str, seed: int, **changes: Any) -> Tables:
    return tables_of(simulate(replace(SCENARIOS[name], n_steps=300, **changes), seed))


def differences(found: Sections) -> dict[str, float]:
    assert found.missingness is not None
    return {one.covariate.name: one.smd.value for one in found.missingness.differences}


def test_readouts_of_a_step_that_only_computed_again_do_not_count_as_words() -> None:
    plain = made("mnar_rarity", 6, rate=0.05)
    who = plain["drops"]["request"].unique().to_pylist()[:5]
    last = int(plain["steps"]["step"].to_numpy().max()) + 1
    lines = plain["readouts"].to_pandas()
    again = lines[lines["request"].isin(who)].assign(step=np.uint64(last))
    n = np.uint32((again["hook"] == again["hook"].min()).sum())

    def further(frame: pd.DataFrame) -> pd.DataFrame:
        nothing = dict.fromkeys(
            ("captured_tokens", "dropped_tokens", "aborted_tokens", "filtered_tokens"), np.uint32(0)
        )
        row = frame.iloc[[-1]].assign(
            step=np.uint64(last), batch_tokens=n, recomputed_tokens=n, **nothing
        )
        return pd.concat([frame, row])

    def preempted(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(n_preemptions=frame["request"].isin(who).astype(np.uint16))

    twice = changed(changed(plain, "requests", preempted), "steps", further)
    twice = changed(twice, "readouts", lambda frame: pd.concat([frame, again]))
    once, found = audited(plain), audited(twice)
    assert found.accounting.findings == []
    assert differences(found)["rarity"] == pytest.approx(differences(once)["rarity"], rel=1e-9)
    assert found.weighting is not None and once.weighting is not None
    assert found.weighting.cells == once.weighting.cells


def test_a_run_of_fewer_projections_keeps_its_values() -> None:
    one, other = (made("mnar_projection", seed, rate=0.05) for seed in (1, 2))
    fewer = changed(
        other, "readouts", lambda f: f.assign(projections=[p[:1] for p in f["projections"]])
    )
    both, some = differences(audited(one, other)), differences(audited(one, fewer))
    names = [name for name in both if name.endswith((" norm", "projection 0"))]
    assert len(names) == 2
    for name in names:
        assert some[name] == pytest.approx(both[name], rel=1e-9)


def test_a_run_has_as_many_projections_as_its_longest_readout() -> None:
    plain = made("none", 1)

    def cut(frame: pd.DataFrame) -> pd.DataFrame:
        first, *others = frame["projections"]
        return frame.assign(projections=[first[:1], *others])

    def none(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.iloc[:0]

    for change, n in ((cut, SCENARIOS["none"].n_projections), (none, 0)):
        with sources_of([changed(plain, "readouts", change)]) as [source]:
            assert source.n_projections == n


def test_projections_are_counted_in_the_first_readouts_of_the_first_part_that_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "LOOKED_AT", 2)
    table = made("none", 1)["readouts"].slice(0, 6)
    rows = table.to_pylist()
    for row, n in zip(rows, (1, 2, 3, 4, 4, 4), strict=True):
        row["projections"] = row["projections"][:n]
    cut = pa.Table.from_pylist(rows, table.schema)
    parts = tuple(
        data.TablePart("readouts", part.num_rows, table=part)
        for part in (cut.slice(0, 0), cut, table)
    )
    assert data.longest(parts, "projections") == 2
    assert data.longest(parts[:1], "projections") == 0
    assert data.longest((), "projections") == 0


def test_a_projection_that_is_not_finite_leaves_the_norm() -> None:
    plain = made("mnar_projection", 1, rate=0.05)

    def broken(frame: pd.DataFrame) -> pd.DataFrame:
        lists = [np.append(p[:-1], np.float32(np.nan)) for p in frame["projections"]]
        return frame.assign(projections=lists)

    before, after = (
        differences(audited(plain)),
        differences(audited(changed(plain, "readouts", broken))),
    )
    [norm] = [name for name in before if name.endswith(" norm")]
    [last] = sorted(name for name in before if "projection" in name)[-1:]
    assert after[norm] == pytest.approx(before[norm], rel=1e-9)
    assert last not in after


def test_labels_of_requests_on_both_sides_of_2_31() -> None:
    requests = [1, 2, 3, 2**31 + 5]
    table = pa.table(
        {
            "request": pa.array(requests, pa.uint32()),
            "start": pa.array([0] * 4, pa.uint32()),
            "stop": pa.array([9] * 4, pa.uint32()),
            "class": list("abcd"),
        }
    )
    found = labels_of(table, "r").of(np.array(requests), np.ones(4, np.int64))
    assert found.tolist() == [0, 1, 2, 3]


def test_an_unknown_request_is_in_no_range() -> None:
    ranges = StepRanges(np.array([0]), np.array([2]), np.array([0]), np.array([5]))
    assert ranges.find(np.array([1]), np.array([-1]), np.array([3])).tolist() == [-1]


def test_a_long_range_comes_in_pieces() -> None:
    which, position = next(explode(np.array([3]), np.array([3 + 10**6]), 100))
    assert position.tolist() == list(range(3, 103)) and not which.any()


def test_a_null_is_refused() -> None:
    batch = pa.record_batch({"step": pa.array([1, None], pa.uint64())})
    with pytest.raises(ActdsError, match=r"E109 step"):
        column(batch, "step")


def test_rows_of_steps_that_lost_a_part_are_limited_over_all_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [made("mnar_rarity", seed, rate=0.05) for seed in range(4)]
    seen: list[run.Passed] = []

    def watched(*arguments: Any, **named: Any) -> run.Passed:
        seen.append(pass_over(*arguments, **named))
        return seen[-1]

    def n_rows() -> int:
        audited(*runs)
        return sum(len(rows.step) for rows in seen[-1].within["content"])

    monkeypatch.setattr(run, "pass_over", watched)
    assert n_rows() > 4000
    n_numbers = sum(len(some[0].values) for some in seen[0].within.values())
    for limit, value in (("MAX_ROWS", 2000), ("MAX_VALUES", 2000 * n_numbers)):
        with monkeypatch.context() as changes:
            changes.setattr(lookup, limit, value)
            assert 1000 < n_rows() <= 2200


def test_no_weights_are_written_for_a_dataset_that_does_not_add_up(tmp_path: Path) -> None:
    run = simulate(replace(SCENARIOS["mcar_steps"], n_steps=300, rate=0.05), 1)
    path = write_dataset(run, tmp_path / "d")
    [drops] = path.rglob("drops-*.parquet")
    drops.write_bytes(tables.to_parquet("drops", pq.read_table(drops).slice(1)))
    relink(path)
    found = CliRunner().invoke(command, [str(path), "--weights", str(tmp_path / "w.parquet")])
    assert found.exit_code == 1 and "FAIL (unaccounted)" in found.output
    assert "weights: not written" in found.output
    assert not (tmp_path / "w.parquet").exists()
