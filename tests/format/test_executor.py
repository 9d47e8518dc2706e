"""Work on each shard: the same results in the same order from every executor."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actds
from actds.dataset.commit import commit_shard
from actds.errors import ActdsError
from actds.executor import EXECUTORS, ExecutorName, open_executor
from actds.format.readouts import Readouts
from actds_testing import synthetic
from actds_testing.forge import relink
from actds_testing.settling import write_table
from actds_validators.validate.validation import validate


def square(n: int) -> int:
    if n == 13:
        raise ActdsError("E204", f"item {n}", got="13", expected="another number")
    return n * n


TIERS = {"ray": pytest.mark.full}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=TIERS.get(n, pytest.mark.standard)) for n in EXECUTORS]
)
def test_results_come_in_order_and_errors_as_they_are(name: ExecutorName) -> None:
    if name == "ray":
        ray = pytest.importorskip("ray", reason="needs the extra actds[ray]")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with open_executor(name, 2) as executor:
        assert list(executor.map(square, [])) == []
        wanted = [n * n for n in range(40, 90)]
        assert list(executor.map(square, range(40, 90))) == wanted
        found = executor.map(square, range(10, 20))
        assert [next(found) for _ in range(3)] == [100, 121, 144]
        with pytest.raises(ActdsError, match="E204 item 13: 13; expected another number"):
            next(found)


def test_another_executor_is_refused() -> None:
    with (
        pytest.raises(ActdsError, match="E009 executor: slurm; expected one of threads"),
        open_executor("slurm"),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.standard
@pytest.mark.parametrize("name", ["processes", "ray"])
def test_statistics_and_findings_are_those_of_threads(
    name: ExecutorName, dataset_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="needs the extra actds[ray]")
    copy = Path(shutil.copytree(dataset_path, tmp_path / "copy"))
    hook = next(iter(actds.open(copy).hooks))
    monkeypatch.setenv("ACTDS_CACHE", str(tmp_path / "one"))
    near = actds.open(copy).stats(hook)
    monkeypatch.setenv("ACTDS_CACHE", str(tmp_path / "two"))
    far = actds.open(copy).stats(hook, executor=name)
    for field in ("count", "mean", "variance", "mean_norm", "norm_quantiles", "geometric_median"):
        assert np.array_equal(getattr(near, field), getattr(far, field)), field
    array = next((copy / "shards").glob("*/acts.zarr/*/c/0/0"))
    data = bytearray(array.read_bytes())
    data[5] ^= 1
    array.write_bytes(data)
    array.parents[3].joinpath("tokens.parquet").write_bytes(b"")
    wanted, found = validate(copy), validate(copy, executor=name)
    assert wanted.findings and found.findings == wanted.findings


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("processes", marks=pytest.mark.standard),
        pytest.param("ray", marks=pytest.mark.full),
    ],
)
def test_findings_in_values_are_those_of_threads(
    name: ExecutorName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray":
        pytest.importorskip("ray", reason="needs the extra actds[ray]")
    real = synthetic.states

    def spoiled(tokens: dict[str, Any], token_ids: Any, hook: Any) -> Any:
        bits = real(tokens, token_ids, hook).copy()
        bits[5] = 0
        bits[7, 3] = 0x7FC0  # NaN
        if hook.name.endswith(".1"):
            bits[9] = bits[11]
        return bits

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "states", spoiled)
        path = synthetic.make_dataset(tmp_path / "d", n_requests=12, readouts=Readouts(4, 1))
    part = next(path.glob("readouts/*/*.parquet"))
    table = pq.read_table(part)
    norm = table["norm"].to_numpy() * np.where(np.arange(len(table)) == 3, 2, 1)
    at = table.column_names.index("norm")
    write_table(part, table.set_column(at, "norm", pa.array(norm, pa.float32())))
    relink(path)
    done: list[tuple[str, int]] = []
    wanted = validate(path, "deep", lambda what, amount: done.append((what, amount)))
    found = validate(path, "deep", executor=name)
    assert {"E601", "E602", "E603", "E417"} <= {finding.code for finding in wanted.errors}
    assert found.findings == wanted.findings
    amounts = {what: sum(n for one, n in done if one == what) for what, _ in done}
    assert amounts["values"] == amounts["all values"] > 0


@pytest.mark.standard
@pytest.mark.parametrize("name", ["threads", "processes"])
def test_shards_are_recompressed_side_by_side(name: ExecutorName, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "commit_shard", partial(commit_shard, raw=True))
        path = synthetic.make_dataset(tmp_path / "d", n_requests=12)
    before = actds.open(path)
    bits = {hook: before.array(hook).bits(0, before.n_rows) for hook in before.hooks}
    n_shards = len(before.shards)
    assert n_shards > 1
    done = actds.recompress(path, executor=name)
    assert len(done.shards) == n_shards
    after = actds.open(path)
    assert [s.manifest.compression for s in after.shards] == ["normal"] * n_shards
    for hook, wanted in bits.items():
        assert np.array_equal(after.array(hook).bits(0, after.n_rows), wanted)
    assert not validate(path, level="deep").findings
