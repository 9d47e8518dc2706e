"""The role of each row beside its position: of chats, in batches and exports, where it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import actds
from actds.errors import ActdsError
from actds.loader import mixture as mixture_module
from actds_testing.synthetic import make_dataset

Rows = dict[tuple[str, int, int], str | None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which one is of texts and has no roles."""
    folder = tmp_path_factory.mktemp("roles") / "acts"
    make_dataset(folder, n_requests=14, seed=3, sealed=False, rows_per_shard=90)
    return make_dataset(folder, n_requests=14, seed=4, run="r-second", roles=True)


@pytest.fixture(scope="module")
def truth(path: Path) -> Rows:
    """Return the role of every row, from the lines of the table alone."""
    dataset = actds.open(path)
    said = {
        (line["run"], line["request"], position): line["role"]
        for line in dataset.roles(run=True).to_pylist()
        for position in range(line["start"], line["stop"])
    }
    rows = dataset.tokens(run=True, columns=["request", "position"]).to_pylist()
    keys = [(row["run"], row["request"], row["position"]) for row in rows]
    return {key: said.get(key) for key in keys}


def test_a_batch_says_the_role_of_each_row(path: Path, truth: Rows) -> None:
    seen: Rows = {}
    names = ("run", "request", "position", "role")
    with actds.Loader(path, "resid_post.0", batch=64, provenance=names, drop_last=False) as loader:
        for batch, rows in loader:
            assert tuple(rows) == names and len(rows["role"]) == len(batch)
            columns = (rows[name].tolist() for name in names)
            seen |= {(run, request, at): role for run, request, at, role in zip(*columns,
                     strict=True)}  # fmt: skip
    assert seen == truth
    assert {None, "user", "assistant", "template"} <= set(seen.values())


@pytest.mark.parametrize("kind", ["stream", "chunks", "map-style"])
def test_an_example_of_datasets_says_the_role_of_its_row(
    path: Path, truth: Rows, tmp_path: Path, kind: str
) -> None:
    names = ["run", "request", "position", "role"]
    loaded = actds.load_dataset(
        path, streaming=kind != "map-style", batched_chunks=kind == "chunks", columns=names,
        hooks="resid_post.0", cache_dir=tmp_path,
    )  # fmt: skip
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for example in loaded:
        assert list(example) == ["resid_post.0", *names]
        for name in names:
            value = example[name]
            found = value.tolist() if hasattr(value, "tolist") else value
            columns[name] += found if kind == "chunks" else [found]
    rows = zip(*columns.values(), strict=True)
    assert {(run, request, at): role for run, request, at, role in rows} == truth


def test_the_role_alone_can_be_asked_for(path: Path, truth: Rows) -> None:
    with actds.Loader(path, batch=32, provenance=["role"], drop_last=False) as loader:
        found = [role for _, rows in loader for role in rows["role"].tolist()]
    assert sorted(map(str, found)) == sorted(map(str, truth.values()))


def test_no_role_is_looked_up_unless_it_is_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("roles were looked up")

    monkeypatch.setattr(mixture_module, "Roles", never)
    with actds.Loader(path, batch=32, provenance=True) as loader:
        _, rows = next(iter(loader))
    assert set(rows) == {"run", "request", "position", "token_id", "phase", "step"}
    with pytest.raises(AssertionError, match="looked up"):
        actds.Loader(path, batch=32, provenance=["role"])


def test_the_same_rows_come_whichever_columns_are_asked_for(path: Path) -> None:
    with (
        actds.Loader(path, "resid_post.0", batch=64, provenance=["role"]) as one,
        actds.Loader(path, "resid_post.0", batch=64) as other,
    ):
        for (batch, _), plain in zip(one, other, strict=True):
            assert batch.equal(plain)


@pytest.mark.parametrize(
    ("provenance", "said"),
    [(("role", "role"), "different ones of"), ("name", "run, request, position")],
)
def test_refuses_a_column_that_there_is_not(path: Path, provenance: Any, said: str) -> None:
    with pytest.raises(ActdsError, match=f"E014 provenance.*{said}"):
        actds.Loader(path, batch=32, provenance=provenance)


def test_refuses_the_role_where_no_run_has_any(path: Path, tmp_path: Path) -> None:
    without = make_dataset(tmp_path / "acts", n_requests=4, seed=3)
    with pytest.raises(ActdsError, match="E014 provenance: 'role', and no run has roles"):
        actds.Loader(without, batch=4, provenance=["request", "role"])
    for streaming in (True, False):
        with pytest.raises(ActdsError, match="E014 columns: 'role', and no run has roles"):
            actds.load_dataset(without, streaming=streaming, columns=["role"])
    actds.export(without, tmp_path / "out", to="parquet", hooks="resid_post.0")
    (file,) = (tmp_path / "out").rglob("*.parquet")
    assert "role" not in pq.read_schema(file).names


@pytest.mark.parametrize("to", ["parquet", "memmap"])
def test_an_export_says_the_role_of_each_row(
    path: Path, truth: Rows, tmp_path: Path, to: Any
) -> None:
    actds.export(path, tmp_path / "out", to=to, hooks="resid_post.0")
    names = ["run", "request", "position", "role"]
    tables = [pq.read_table(file, columns=names) for file in (tmp_path / "out").rglob("*.parquet")]
    lines = [line for table in tables for line in table.to_pylist()]
    assert {(line["run"], line["request"], line["position"]): line["role"] for line in lines} == (
        truth
    )
    assert np.array([line["role"] is None for line in lines]).any()
