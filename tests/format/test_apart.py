"""Tables are parsed in a process that may die: its death is a finding."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actds
from actds.errors import ActdsError
from actds.format import apart, tables
from actds.format import parquet as parquet_reader
from actds.format.apart import TablesApart
from actds_testing.forge import relink
from actds_testing.places import VECTORS

MINIMAL = VECTORS / "valid" / "minimal"
TOKENS = next(MINIMAL.glob("shards/*/tokens.parquet"))
LINUX = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(),
    reason="no limit of memory where no process says its size",
)
pytestmark = pytest.mark.standard


@pytest.fixture
def one() -> Iterator[TablesApart]:
    yield TablesApart(1 << 16)
    apart.start()  # with nobody's deaths remembered


def stalls(n: int, **columns: Any) -> pa.Table:
    made = {
        f.name: pa.array(np.zeros(n), f.type)
        for f in tables.bare_schema("stalls")
        if f.name != "stage"
    }
    return pa.table({"stage": pa.array(["a"] * n), **made, **columns})


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    options = {"store_schema": False, "write_page_checksum": True, "compression": "zstd", **options}
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("columns", [None, ["step", "request"], []])
def test_a_table_is_the_same_as_read_here(one: TablesApart, columns: list[str] | None) -> None:
    here = tables.from_parquet("tokens", TOKENS.read_bytes(), "x", columns)
    assert one.from_parquet("tokens", TOKENS.read_bytes(), "x", columns).equals(here)


def test_columns_that_are_not_kept_are_checked(one: TablesApart) -> None:
    data = TOKENS.read_bytes()
    kept = one.from_parquet("tokens", data, "x", kept=["step"])
    assert kept.equals(tables.from_parquet("tokens", data, "x", ["step"]))
    assert one.from_parquet("tokens", data, "x", kept=[]).num_rows == kept.num_rows
    broken = parquet(stalls(3, depth=pa.array([1, None, 2], pa.uint32())))
    for read in (tables.from_parquet, one.from_parquet):
        with pytest.raises(ActdsError, match="E109 x depth"):
            read("stalls", broken, "x", kept=["t_ns"])


def test_an_error_is_the_same_as_here(one: TablesApart) -> None:
    for data in (b"", b"PAR1 no parquet PAR1", TOKENS.read_bytes()):
        said = []
        for read in (tables.from_parquet, one.from_parquet):
            with pytest.raises(ActdsError) as caught:
                read("stalls", data, "losses/x")
            said.append(str(caught.value))
        assert said[0] == said[1]


def endless() -> bytes:
    """Return a table with a row group for each row, whose footer takes seconds."""
    return parquet(stalls(16_000), row_group_size=1, compression="none")


@pytest.fixture
def roomy() -> Iterator[TablesApart]:
    """Yield what lets a parser have gigabytes, so that time is what ends it."""
    yield TablesApart(1 << 27)
    apart.start()


def test_a_file_that_ends_its_parser_is_a_finding_and_the_next_one_is_read(
    roomy: TablesApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, data = roomy, endless()
    monkeypatch.setattr(
        "actds.format.apart._CPU_S", 0
    )  # a fast processor may need less than it has
    for _ in range(3):
        with pytest.raises(ActdsError, match="E206 x: a file that takes too long"):
            one.from_parquet("stalls", data, "x")
    with pytest.raises(ActdsError, match="E206 x: a file after 3 others"):
        one.from_parquet("tokens", TOKENS.read_bytes(), "x")
    apart.start()
    assert one.from_parquet("tokens", TOKENS.read_bytes(), "x").num_rows > 0


def test_a_parser_that_crashes_is_named_by_its_signal(roomy: TablesApart) -> None:
    data = endless()
    crash = threading.Timer(1, os.kill, (apart.pid(), signal.SIGSEGV))
    crash.start()
    with pytest.raises(ActdsError, match="E206 x: a file that ends its parser with SIGSEGV"):
        roomy.from_parquet("stalls", data, "x")
    crash.join()


def test_a_parser_that_is_gone_comes_back(one: TablesApart) -> None:
    """As after its idle minute, or when somebody ends it who does not know what it is."""
    before = apart.pid()
    os.kill(before, signal.SIGTERM)
    assert one.from_parquet("tokens", TOKENS.read_bytes(), "x").num_rows > 0
    assert apart.pid() != before


@LINUX
def test_a_word_that_many_rows_name_does_not_fill_the_memory(one: TablesApart) -> None:
    """200 GB of text in a file of some kilobytes, of which no size in the file tells."""
    n = 200_000
    words = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(n, np.int32)), pa.array(["a" * 1_000_000])
    )
    data = parquet(stalls(n, stage=words))
    assert len(data) < 20_000
    with pytest.raises(ActdsError, match="E206"):
        one.from_parquet("stalls", data, "x")
    assert one.from_parquet("tokens", TOKENS.read_bytes(), "x").num_rows > 0


def test_all_tables_of_a_dataset_share_one_bound(one: TablesApart) -> None:
    data = parquet(stalls(400_000))  # 15 MB of columns
    for place in ("a", "b", "a", "a"):  # one that is read again takes no more
        assert one.from_parquet("stalls", data, place).num_rows == 400_000
    with pytest.raises(ActdsError, match="E206 c: 400000 rows"):
        one.from_parquet("stalls", data, "c")


def _read(path: str) -> int:
    return int(TablesApart(1 << 16).from_parquet("tokens", Path(path).read_bytes(), "x").num_rows)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_works_in_worker_processes(one: TablesApart, how: str) -> None:
    """Daemons, which may have no children of multiprocessing's; a fork has its parent's process."""
    if how == "fork" and sys.version_info >= (3, 12):
        pytest.skip("forking a process with threads warns")
    here = one.from_parquet("tokens", TOKENS.read_bytes(), "x").num_rows
    with multiprocessing.get_context(how).Pool(2) as pool:
        assert pool.map(_read, [str(TOKENS)] * 4) == [here] * 4
    assert one.from_parquet("tokens", TOKENS.read_bytes(), "x").num_rows == here


DOORS: dict[str, Callable[[Path], object]] = {
    "audit": actds.audit,
    "view": actds.view,
    "recover": actds.recover,
    "regimes": lambda path: actds.regimes(f"G={path}:phase=decode", f"R={path}:phase=prefill"),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_parses_tables_apart(
    door: str, copy_dataset: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``validate`` does: no file of a stranger meets Arrow's parser in this process first."""
    path = copy_dataset()

    def parsed_here(*args: Any, **options: Any) -> pa.Table:
        raise AssertionError(f"parsed in this process: {args[1]}")

    monkeypatch.setattr(parquet_reader, "read", parsed_here)
    if door == "recover":  # so that it has to account for every run again
        shutil.rmtree(path / "seal")
    with suppress(ActdsError) if door == "regimes" else nullcontext():
        DOORS[door](path)


@LINUX
@pytest.mark.parametrize("door", DOORS)
def test_a_table_that_fills_the_memory_is_refused_at_every_door(
    door: str, copy_dataset: Callable[[], Path]
) -> None:
    """A table whose size no footer tells, in a dataset whose every digest is right."""
    path = copy_dataset()
    part = next(path.glob("census/*/requests-*.parquet"))
    table, n = pq.read_table(part), 200_000
    table = table.take(np.zeros(n, np.int64))
    words = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(n, np.int32)), pa.array(["a" * 1_000_000])
    )
    place = table.schema.get_field_index("source")
    part.write_bytes(parquet(table.set_column(place, "source", words)))
    assert part.stat().st_size < 200_000
    relink(path)
    if door == "recover":
        shutil.rmtree(path / "seal")
    with pytest.raises(ActdsError, match=r"E206 census/\S*requests"):
        raise_error(DOORS[door](path))


def raise_error(result: object) -> None:
    """Raise the error of a recovery, which says so in its result."""
    if isinstance(error := getattr(result, "error", None), ActdsError):
        raise error


def test_the_folder_that_one_is_in_is_not_imported_from(tmp_path: Path) -> None:
    """``cd dataset; actds validate .``: a stranger's ``json.py`` there must never run."""
    ran = tmp_path / "ran"
    for name in ("json", "pyarrow", "select", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit\n")
    code = f"""
import os, sys
from actds.format.apart import TablesApart
os.chdir(sys.argv[1])
TablesApart(1).from_parquet("tokens", open({str(TOKENS)!r}, "rb").read(), "x")
"""
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert not ran.exists()
