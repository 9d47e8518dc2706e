"""Tables: one Parquet form, checked before it is read."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actds.errors import ActdsError
from actds.format import tables

STALLS = {"stage": "ring", "t_ns": 5, "duration_ns": 7, "depth": 1, "step": None}


def stalls(**changed: Any) -> pa.Table:
    return tables.build("stalls", {name: [value] for name, value in {**STALLS, **changed}.items()})


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"store_schema": False, "write_page_checksum": True, **options})
    return sink.getvalue()


@pytest.mark.parametrize("name", tables.SCHEMAS)
def test_every_table_survives_its_file(name: tables.TableName) -> None:
    empty = tables.empty(name)
    assert tables.from_parquet(name, tables.to_parquet(name, empty), "x").equals(empty)
    assert all(field.metadata[b"meaning"] for field in tables.SCHEMAS[name])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.none() | st.integers(0, 2**64 - 1))))
def test_values_survive_at_their_limits(values: list[tuple[int, int | None]]) -> None:
    n = len(values)
    table = tables.build(
        "stalls",
        {
            "stage": ["\x00é"] * n,
            "t_ns": [-(2**63)] * n,
            "duration_ns": [2**63 - 1] * n,
            "depth": [depth for depth, _ in values],
            "step": pa.array([step for _, step in values], pa.uint64()),
        },
    )
    assert tables.from_parquet("stalls", tables.to_parquet("stalls", table), "x").equals(table)


def test_a_file_has_page_checksums_and_no_arrow_schema(tmp_path: Path) -> None:
    n = 5000
    table = tables.build(
        "stalls",
        {
            "stage": ["ring"] * n,
            "t_ns": np.random.default_rng(0).integers(0, 2**60, n),
            "duration_ns": np.arange(n),
            "depth": np.arange(n),
            "step": np.arange(n),
        },
    )
    data = tables.to_parquet("stalls", table)
    assert b"ARROW:schema" not in data
    path = tmp_path / "t.parquet"
    path.write_bytes(data[:2000] + bytes([data[2000] ^ 4]) + data[2001:])
    for source in (path.read_bytes(), str(path)):
        with pytest.raises(ActdsError, match="E206"):
            tables.from_parquet("stalls", source, "x")


def test_columns_are_chosen_by_name() -> None:
    data = tables.to_parquet("stalls", stalls())
    assert tables.from_parquet("stalls", data, "x", ["depth", "stage"]).to_pylist() == [
        {"depth": 1, "stage": "ring"}
    ]


HOSTILE: list[tuple[str, bytes]] = [
    ("E206", parquet(stalls(), store_schema=True)),
    ("E206", parquet(stalls(), write_page_checksum=False)),
    ("E206", parquet(stalls(), write_page_index=True)),
    ("E206", parquet(stalls(), sorting_columns=[pq.SortingColumn(0)])),
    ("E206", b"PAR1 no parquet PAR1"),
    ("E206", b""),
    ("E109", parquet(stalls().drop_columns(["step"]))),
    ("E109", parquet(stalls().select(["step", "stage", "t_ns", "duration_ns", "depth"]))),
    ("E109", parquet(stalls().append_column("extra", pa.array([1])))),
    ("E109", parquet(stalls().set_column(3, "depth", pa.array([1], pa.int64())))),
    ("E109", parquet(stalls().set_column(3, "depth", pa.array([None], pa.uint32())))),
]


@pytest.mark.parametrize(("code", "data"), HOSTILE)
def test_refuses_a_file_of_another_form(code: str, data: bytes) -> None:
    with pytest.raises(ActdsError) as caught:
        tables.from_parquet("stalls", data, "losses/r-1/stalls-000000.parquet")
    assert caught.value.code == code
    assert caught.value.place.startswith("losses/r-1/stalls-000000.parquet")


def test_builds_only_the_columns_of_the_spec() -> None:
    for columns in ({"stage": ["ring"]}, {**{k: [v] for k, v in STALLS.items()}, "more": [1]}):
        with pytest.raises(ActdsError, match="E109"):
            tables.build("stalls", columns)
    with pytest.raises(ActdsError, match="E109"):
        stalls(depth=None)


@pytest.mark.standard
def test_bytes_are_read_without_a_pool_of_threads() -> None:
    """A thread of Arrow's that lets go of Python's bytes while the interpreter ends aborts it."""
    code = """
import os, sys
from actds.format import tables
columns = {"stage": ["ring"] * 9, "t_ns": range(9), "duration_ns": range(9), "depth": range(9),
           "step": [None] * 9}
data = tables.to_parquet("stalls", tables.build("stalls", columns))
before = len(os.listdir("/proc/self/task"))
tables.from_parquet("stalls", data, "here")
sys.exit(len(os.listdir("/proc/self/task")) - before)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
