"""Audits of datasets: several runs, odd runs, hostile ones, broken ones, and object stores."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from actds.errors import ActdsError
from actds.format import tables
from actds.store import open_store
from actds_testing.audit_tokens import audited, changed, sources_of, tables_of
from actds_testing.forge import relink
from actds_testing.simulate import SCENARIOS, Simulated, simulate, write_dataset
from actds_testing.synthetic import make_dataset
from actds_validators.audit.api import audit
from actds_validators.audit.data import LabelFile, match_labels
from actds_validators.audit.lookup import prompt_sources
from actds_validators.audit.result import Audit, Limits
from actds_validators.audit.run import Sections
from actds_validators.audit.verdict import judge

LIMITS = Limits()
Tables = dict[str, pa.Table]


def made(name: str, seed: int, n_steps: int = 300, **changes: Any) -> Simulated:
    return simulate(replace(SCENARIOS[name], n_steps=n_steps, **changes), seed)


def kind(found: Sections) -> str:
    return judge(found, LIMITS).kind


def comparable(found: Audit) -> dict[str, Any]:
    """Return the result without where it lay, how long it took and how much memory.

    Sums of two threads differ in their last digits.
    """

    told: dict[str, Any] = rounded(found.model_dump(exclude={"path", "duration_s", "peak_nbytes"}))
    # Commands and loader lines name the path.
    text = json.dumps(told, sort_keys=True)
    for said in (repr(found.path), shlex.quote(found.path), found.path):
        text = text.replace(json.dumps(said)[1:-1], "PATH")
    return dict(json.loads(text))


def rounded(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return rounded(value.model_dump())
    if isinstance(value, float):
        return float(f"{value:.9g}") if abs(value) > 1e-12 else 0.0
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = made("mnar_rarity", 1, rate=0.03, cancel_share=0.1)
    return write_dataset(run, tmp_path_factory.mktemp("audit") / "lossy")


@pytest.fixture
def copy(lossy: Path, tmp_path: Path) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(lossy, tmp_path / "copy"))


def part(root: Path, table: str) -> Path:
    return next(path for path in sorted(root.rglob(f"{table}-*.parquet")))


# datasets -------------------------------------------------------------------------------------


def test_a_dataset_is_audited_as_its_tables_are(lossy: Path) -> None:
    run = made("mnar_rarity", 1, rate=0.03, cancel_share=0.1)
    found, direct = audit(lossy).result, audited(tables_of(run))
    assert found.runs == ["r-simulated"] and found.policies == ["drop_newest"]
    assert found.accounting == direct.accounting
    assert found.coverage == direct.coverage
    assert found.weighting is not None and direct.weighting is not None
    assert found.weighting.cells == direct.weighting.cells
    for mine, theirs in zip(found.weighting.balance, direct.weighting.balance, strict=True):
        assert mine.group == theirs.group
        assert mine.before == pytest.approx(theirs.before) and mine.after < mine.before
        assert mine.after == pytest.approx(theirs.after, rel=1e-9, abs=1e-12)
    assert found.missingness is not None and direct.missingness is not None
    for one, other in zip(
        found.missingness.differences, direct.missingness.differences, strict=True
    ):
        assert one.covariate == other.covariate
        assert one.smd.value == pytest.approx(other.smd.value, rel=1e-9, abs=1e-12)


def test_readouts_of_recomputed_rows_are_no_rows_of_their_own() -> None:
    plain = tables_of(made("mnar_rarity", 6, rate=0.05))
    preempted = plain["drops"]["request"].unique().to_pylist()[:5]

    def restarted(frame: pd.DataFrame) -> pd.DataFrame:
        mine = frame["request"].isin(preempted)
        return frame.assign(n_preemptions=np.where(mine, 1, 0).astype(np.uint16))

    def repeated(frame: pd.DataFrame) -> pd.DataFrame:
        again = frame[frame["request"].isin(preempted)].copy()
        last = plain["steps"]["step"].to_numpy().max()
        again["step"] = np.minimum(again["step"] + 3, last)
        again = again[again["step"] < last].assign(norm=np.float32(1e6))
        assert len(again) > 50
        return pd.concat([frame, again])

    twice = changed(changed(plain, "requests", restarted), "readouts", repeated)
    once, found = audited(plain), audited(twice)
    # Squares are summed about the middle of a sample, which sees all lines: the last digits differ.
    assert rounded(found.weighting) == rounded(once.weighting) and found.coverage == once.coverage
    assert found.missingness is not None and once.missingness is not None
    for one, other in zip(found.missingness.differences, once.missingness.differences, strict=True):
        assert one.covariate == other.covariate
        assert one.smd.value == pytest.approx(other.smd.value, rel=1e-6, abs=1e-9)
        assert one.mean_all == pytest.approx(other.mean_all, rel=1e-9)
    assert found.mechanism is not None and once.mechanism is not None
    for test, same in zip(found.mechanism.tests, once.mechanism.tests, strict=True):
        assert test.p == pytest.approx(same.p, rel=1e-6, abs=1e-12)


def with_skipped(frame: pd.DataFrame) -> pd.DataFrame:
    """Return requests with 50 more that did not fit the model, of a source of their own."""
    n = len(frame)
    more = frame.iloc[np.arange(50) % n].assign(
        request=np.arange(n, n + 50), source="long.jsonl", prompt_len=10**6, generated_len=0,
        cached_tokens=0, finish_reason="skipped", reason="E004", token_digest=None,
    )  # fmt: skip
    return pd.concat([frame, more])


def test_prompts_that_were_never_served_are_in_no_difference_and_no_stratum() -> None:
    plain = tables_of(made("mnar_rarity", 6, rate=0.05))
    more = changed(plain, "requests", with_skipped)
    once, found = audited(plain), audited(more)
    assert found.accounting.requests == once.accounting.requests + 50
    for name in ("coverage", "missingness", "mechanism", "weighting"):
        assert rounded(getattr(found, name)) == rounded(getattr(once, name)), name
    with sources_of([plain]) as one, sources_of([more]) as other:
        assert prompt_sources(one) == prompt_sources(other)
        request = int(plain["requests"]["request"][0].as_py())
        table = pa.table({"request": [request], "start": [0], "stop": [1], "class": ["a"]})
        labels = LabelFile(Path("labels"), "", table)
        assert match_labels(labels, one) == match_labels(labels, other)


def test_runs_of_a_dataset_add_up(tmp_path: Path) -> None:
    path = tmp_path / "d"
    for seed, run in ((1, "r-b"), (2, "r-a")):
        make_dataset(path, n_requests=40, seed=seed, drops=True, run=run, sealed=seed == 2)
    alone = [
        audit(make_dataset(tmp_path / str(seed), n_requests=40, seed=seed, drops=True)).result
        for seed in (1, 2)
    ]
    found = audit(path).result
    assert sorted(found.runs) == ["r-a", "r-b"]
    for name in ("positions", "captured", "dropped", "cache_ref", "steps", "requests"):
        assert getattr(found.accounting, name) == sum(
            getattr(one.accounting, name) for one in alone
        )
    assert found.mechanism is not None
    assert found.mechanism.n_steps == sum(one.mechanism.n_steps for one in alone if one.mechanism)


def test_a_run_without_readouts_beside_one_with_them_says_what_cannot_be_asked() -> None:
    both = [tables_of(made("mcar_steps", 3, rate=0.05)),
            tables_of(made("mcar_steps", 4, rate=0.05, readouts=False))]  # fmt: skip
    found = audited(*both).missingness
    assert found is not None
    names = {d.covariate.name for d in found.differences}
    assert "rarity" not in names and "special" not in names and "position" in names
    assert any("rarity" in question for question in found.could_not_ask)


def test_a_place_with_a_pattern_in_its_name_is_read_and_no_other(
    lossy: Path, tmp_path: Path
) -> None:
    expected = comparable(audit(lossy).result)
    for name in ("dXd", "d*d", "d[X]d", "d?d", "d'; drop table tokens; --"):
        shutil.copytree(lossy, tmp_path / name)
    for path in sorted(tmp_path.iterdir()):
        assert comparable(audit(path).result) == expected


def test_two_audits_say_the_same(lossy: Path) -> None:
    first, second = (comparable(audit(lossy).result) for _ in range(2))
    assert first == second


def test_nothing_is_written_where_the_audit_runs(
    lossy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in lossy.rglob("*")}
    monkeypatch.chdir(tmp_path)
    audit(lossy)
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in lossy.rglob("*")} == before


@pytest.mark.standard
def test_an_object_store_gives_the_same_audit(lossy: Path, s3_root: str) -> None:
    store = open_store(s3_root)
    for path in sorted(lossy.rglob("*")):
        if path.is_file():
            store.put_new(path.relative_to(lossy).as_posix(), [path.read_bytes()])
    assert comparable(audit(s3_root).result) == comparable(audit(lossy).result)


# broken ones ----------------------------------------------------------------------------------


def code(path: Path) -> str:
    with pytest.raises(ActdsError) as raised:
        audit(path)
    return raised.value.code


def test_a_dataset_without_a_seal_is_refused(tmp_path: Path) -> None:
    path = write_dataset(made("none", 1, 60), tmp_path / "d", sealed=False)
    assert code(path) == "E306"


@pytest.mark.parametrize("table", ["tokens", "spans", "drops", "readouts", "steps"])
def test_a_file_that_changed_is_refused(copy: Callable[[], Path], table: str) -> None:
    root = copy()
    path = next(root.rglob("tokens.parquet")) if table == "tokens" else part(root, table)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert code(root) == "E202"


def test_a_table_of_other_columns_is_refused(copy: Callable[[], Path]) -> None:
    root = copy()
    path = part(root, "steps")
    table = pq.read_table(path)
    names = ["captured" if n == "captured_tokens" else n for n in table.column_names]
    pq.write_table(table.rename_columns(names), path, store_schema=False, write_page_checksum=True)
    relink(root)
    assert code(root) == "E109"


def test_what_is_no_parquet_file_is_refused(copy: Callable[[], Path]) -> None:
    root = copy()
    part(root, "spans").write_bytes(b"PAR1 but nothing else PAR1")
    relink(root)
    assert code(root) == "E206"


# odd ones -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some() -> Tables:
    return tables_of(made("mcar_steps", 5, rate=0.1, cancel_share=0.1))


def test_a_run_of_nothing_lost_nothing() -> None:
    found = audited({})
    assert found.accounting.positions == 0 and found.accounting.waterfall[0].n_positions == 0
    assert kind(found) == "complete" and found.queues is None


@pytest.mark.parametrize(("table", "code"), [("requests", "E404"), ("steps", "E412")])
def test_a_run_without_a_table_of_the_census_does_not_add_up(
    some: Tables, table: str, code: str
) -> None:
    found = audited({**some, table: tables.empty(table)})  # type: ignore[arg-type]
    assert kind(found) == "unaccounted"
    assert code in {f.code for f in found.accounting.findings}


def test_an_empty_run_beside_another_changes_nothing(some: Tables) -> None:
    alone, beside = audited(some), audited(some, {})
    for name in ("accounting", "weighting", "missingness", "mechanism"):
        assert rounded(getattr(alone, name)) == rounded(getattr(beside, name)), name


@pytest.mark.parametrize("name", ["none", "mnar_content", "mcar_steps"])
def test_one_step_alone_has_no_interval_and_no_error(name: str) -> None:
    found = audited(tables_of(made(name, 1, 1, rate=0.3, readouts=True)))
    assert found.accounting.steps == 1
    if found.missingness is not None:
        for one in found.missingness.differences:  # the worst case's interval, none of its own
            assert one.smd.confidence == 1 and one.smd.low <= one.smd.value <= one.smd.high
            assert one.equivalence is None
    assert kind(found) in ("complete", "heavy", "too-little-evidence")


def all_lost(found: Tables) -> Tables:
    """Return the tables of a harvest that stored nothing: each row is a drop of its own."""
    rows = found["tokens"].to_pandas()
    spans = found["spans"].to_pandas()
    mine = spans["disposition"] == "captured"
    spans.loc[mine, ["disposition", "reason"]] = ["dropped", "queue_full"]
    steps = found["steps"].to_pandas()
    steps["dropped_tokens"] += steps["captured_tokens"]
    steps["captured_tokens"] = np.zeros(len(steps), np.uint32)
    drops = found["drops"].to_pandas()
    new = rows[["step", "request"]].assign(start=rows["position"], stop=rows["position"] + 1)
    new = new.assign(drop=len(drops) + np.arange(len(new)), drop_reason="queue_full",
                     policy="drop_newest", n_tokens=1, batch_tokens=1, max_seq_len=1,
                     t_ns=0)  # fmt: skip
    lost = pd.concat([drops, new.reindex(columns=drops.columns)])
    found = {**found, "tokens": tables.empty("tokens")}
    for name, frame in (("spans", spans), ("steps", steps), ("drops", lost)):
        found = changed(found, name, lambda _, frame=frame: frame)
    return found


@pytest.mark.parametrize("readouts", [True, False])
def test_a_harvest_that_lost_everything_is_heavy(some: Tables, readouts: bool) -> None:
    lost = all_lost(some)
    if not readouts:
        lost.pop("readouts")
    found = audited(lost)
    assert found.accounting.findings == [] and found.accounting.captured == 0
    assert found.accounting.loss_share == 1 and kind(found) == "heavy"
    assert found.weighting is None and found.coverage is None


def test_a_harvest_of_aborted_positions_alone_is_heavy() -> None:
    none = tables_of(made("none", 1, 40))

    def aborted(frame: pd.DataFrame) -> pd.DataFrame:
        mine = frame["disposition"] == "captured"
        frame.loc[mine, ["disposition", "reason"]] = ["aborted", "shutdown"]
        return frame

    def uncounted(frame: pd.DataFrame) -> pd.DataFrame:
        frame["aborted_tokens"] += frame["captured_tokens"]
        frame["captured_tokens"] = np.zeros(len(frame), np.uint32)
        return frame

    gone = changed(changed(none, "spans", aborted), "steps", uncounted)
    found = audited({**gone, "tokens": tables.empty("tokens")})
    assert found.accounting.findings == [] and found.accounting.aborted > 0
    assert kind(found) == "heavy" and found.queues is None


HOSTILE = ("'; drop table requests; --", "{0} %s \\", "\N{RIGHT-TO-LEFT OVERRIDE}<script>", "")


def test_hostile_names_are_names(some: Tables) -> None:
    def sources(frame: pd.DataFrame) -> pd.DataFrame:
        frame["source"] = [HOSTILE[k % 4] for k in range(len(frame))]
        return frame

    def hooks(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(hook="x' or 1=1; drop table spans; --")

    found = audited(changed(changed(some, "requests", sources), "readouts", hooks))
    plain = audited(some)
    assert found.accounting == plain.accounting
    assert found.missingness is not None and plain.missingness is not None
    mine = {d.covariate.name: d for d in found.missingness.differences}
    assert {f"source:{name}" for name in HOSTILE} <= set(mine)
    old = {d.covariate.name: d for d in plain.missingness.differences}
    assert mine["x' or 1=1; drop table spans; -- norm"].smd == old["resid_post.0 norm"].smd


def test_many_sources_are_cut_to_the_most_used(some: Tables) -> None:
    def sources(frame: pd.DataFrame) -> pd.DataFrame:
        frame["source"] = [f"s{min(k % 12, 9)}" for k in range(len(frame))]
        return frame

    found = audited(changed(some, "requests", sources)).missingness
    assert found is not None
    names = {d.covariate.name for d in found.differences if d.covariate.name.startswith("source:")}
    assert len(names) == 8 and "source:s9" in names


def test_unknown_sources_and_values_that_are_not_finite_are_no_error(some: Tables) -> None:
    def unknown(frame: pd.DataFrame) -> pd.DataFrame:
        frame["source"] = [None if k % 3 else "web" for k in range(len(frame))]
        return frame

    values = some["readouts"]["norm"].to_numpy().copy()
    values[::50], values[1::50] = np.nan, np.inf
    at = some["readouts"].schema.get_field_index("norm")
    field = some["readouts"].schema.field(at)
    odd = some["readouts"].set_column(at, field, pa.array(values))
    found = audited({**changed(some, "requests", unknown), "readouts": odd})
    assert found.missingness is not None
    norm = next(d for d in found.missingness.differences if d.covariate.name.endswith("norm"))
    # Readouts of aborted rows are no part of it.
    assert norm.mean_all == pytest.approx(values[np.isfinite(values)].mean(), rel=1e-2)
    assert norm.mean_all != pytest.approx(some["readouts"]["norm"].to_numpy().mean(), rel=1e-9)


def test_step_numbers_may_be_far_apart(some: Tables) -> None:
    apart = some
    for name in ("steps", "tokens", "drops", "spans", "readouts"):
        apart = changed(apart, name, lambda f: f.assign(step=f["step"] * 1_000_003 + 7))
    found, plain = audited(apart), audited(some)
    assert found.accounting == plain.accounting and found.weighting == plain.weighting
    assert found.missingness == plain.missingness and found.coverage == plain.coverage


def test_runs_are_apart(some: Tables) -> None:
    with sources_of([some, {}]) as (full, empty):
        assert full.n_rows("tokens") == len(some["tokens"])
        assert empty.n_rows("tokens") == 0
