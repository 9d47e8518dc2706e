"""The audit's passes: the same sums however the rows are cut, the same bits on every executor."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from actds.cli import cli
from actds.errors import ActdsError
from actds.executor import Executor, Threads, open_executor
from actds.format import tables
from actds.format.readouts import Readouts
from actds.format.tables import TableName
from actds_testing.audit_tokens import audited, sources_of, tables_of
from actds_testing.simulate import SCENARIOS, simulate
from actds_testing.synthetic import make_dataset
from actds_validators.audit import lookup
from actds_validators.audit import run as audit_run
from actds_validators.audit.covariates import make_series, read_steps
from actds_validators.audit.data import RUN_TABLES, RunSource, TablePart
from actds_validators.audit.lookup import WordPass, knows_ids, read_rows
from actds_validators.audit.passes import RowPass, lost_pieces
from actds_validators.audit.run import Passed, pass_over
from actds_validators.audit.weights import cell_edges

Tables = dict[str, pa.Table]


# executors ------------------------------------------------------------------------------------


@dataclass
class Read:
    """The sums of some runs, and what they were read with."""

    passed: Passed
    calls: list[tuple[Any, list[Any]]]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {
            **arrays(self.passed.sums, "sums"),
            **arrays(self.passed.within, "within"),
        }


def arrays(found: Any, name: str) -> dict[str, np.ndarray]:
    """Return every array of sums, wherever it is held, by where that is."""
    if isinstance(found, (np.ndarray, int, float, tuple)):
        return {name: np.asarray(found)}
    held = dict(enumerate(found)) if isinstance(found, list) else found
    held = held if isinstance(held, dict) else vars(held)
    return {k: v for key, one in held.items() for k, v in arrays(one, f"{name}.{key}").items()}


def cut(name: TableName, table: pa.Table, n_parts: int) -> tuple[TablePart, ...]:
    ends = np.linspace(0, table.num_rows, n_parts + 1).astype(int).tolist()
    pieces = [table.slice(a, b - a) for a, b in pairwise(ends)]
    return tuple(TablePart(name, piece.num_rows, table=piece) for piece in pieces)


def read(runs: list[Tables], executor: Executor, n_parts: int) -> Read:
    """Return the sums of runs whose rows are cut in parts, as slices of one table."""
    with sources_of(runs) as found:
        sources: list[RunSource] = [
            replace(
                source,
                parts={
                    name: cut(name, run.get(name, tables.empty(name)), n_parts)
                    for name in RUN_TABLES
                },
            )
            for source, run in zip(found, runs, strict=True)
        ]
        steps = [read_steps(source) for source in sources]
        series = make_series(steps, 50)
        assert series is not None
        edges = cell_edges(series, has_ids=knows_ids(sources))
        passed = pass_over(sources, steps, series, edges, executor)
        calls: list[tuple[Any, list[Any]]] = []
        for source, own in zip(sources, steps, strict=True):
            known, tokens = passed.lookups[source.run], list(source.parts["tokens"])
            readouts, rows = list(source.parts["readouts"]), read_rows(source, own)
            pieces = [*tokens, *lost_pieces(known, 100)]
            one = RowPass(known, replace(passed.measured, hooks=source.hooks))
            calls += [(one, pieces), (one, readouts)]
            calls += [(WordPass(rows, None), tokens), (WordPass(rows, source.hooks[0]), readouts)]
        return Read(passed, calls)


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(got) == list(wanted)
    differing = [name for name in got if not np.array_equal(got[name], wanted[name])]
    assert differing == []


@pytest.fixture(scope="module")
def runs() -> list[Tables]:
    """Return two runs that lost parts of steps, with aborted positions and shared prefixes."""
    change = {"n_steps": 250, "rate": 0.04, "cancel_share": 0.1}
    return [
        tables_of(simulate(replace(SCENARIOS[name], **change), seed))  # type: ignore[arg-type]
        for seed, name in enumerate(("mnar_rarity", "mnar_projection"))
    ]


@pytest.fixture(scope="module")
def in_parts(runs: list[Tables]) -> Read:
    return read(runs, Threads(), 9)


def children(pid: int) -> set[int]:
    """Return the processes below one, at any depth."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it ended meanwhile
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


@pytest.fixture(scope="module")
def ray_executor() -> Iterator[Executor]:
    """Yield Ray on this machine; no process of it outlives the context."""
    pytest.importorskip("ray", reason="needs the extra actds[ray]")
    before = children(os.getpid())
    with open_executor("ray") as executor:
        assert list(executor.map(len, [[1], [1, 2]])) == [1, 2]
        own = children(os.getpid()) - before
        assert own
        yield executor
        # A test may have started a process of its own that stays, multiprocessing's tracker.
        started = own.union(*map(children, own))
    for _ in range(300):
        left = {pid for pid in started if Path(f"/proc/{pid}/exe").exists()}
        if not left:
            break
        time.sleep(0.1)
    assert not left


def test_sums_do_not_depend_on_how_the_rows_are_cut(runs: list[Tables], in_parts: Read) -> None:
    whole = read(runs, Threads(), 1).arrays
    parted = in_parts.arrays
    assert list(whole) == list(parted) and len(whole) > 30
    for name, wanted in whole.items():
        got = parted[name]
        if wanted.dtype.kind != "f" or (wanted == np.round(wanted)).all():
            assert np.array_equal(got, wanted), name
        else:
            scale = float(np.abs(wanted).max())
            np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12 * scale, err_msg=name)
    assert in_parts.passed.sums is not None and in_parts.passed.sums.cell_n[1].sum() > 300


def test_threads_give_the_same_bits_again(runs: list[Tables], in_parts: Read) -> None:
    assert_same(read(runs, Threads(), 9).arrays, in_parts.arrays)


@pytest.mark.standard
def test_ray_gives_the_bits_that_threads_give(
    runs: list[Tables], in_parts: Read, ray_executor: Executor
) -> None:
    assert_same(read(runs, ray_executor, 9).arrays, in_parts.arrays)


@pytest.mark.standard
def test_a_part_in_a_worker_of_ray_is_what_it_is_here(
    in_parts: Read, ray_executor: Executor
) -> None:
    for one, parts in in_parts.calls:
        assert len(parts) > 8
        there = list(ray_executor.map(one, parts))
        assert_same(arrays(there, "part"), arrays([one(part) for part in parts], "part"))


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["audit", *(str(arg) for arg in args)], prog_name="actds")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sealed dataset of two runs with drops, preemptions and readouts, in many shards."""
    path = tmp_path_factory.mktemp("passes") / "dataset"
    for seed, name in ((1, "r-b"), (2, "r-a")):
        make_dataset(path, n_requests=40, seed=seed, drops=True, run=name, sealed=seed == 2,
                     readouts=Readouts(3, seed=5))  # fmt: skip
    return path


@pytest.mark.standard
def test_the_command_says_the_same_on_ray(dataset: Path, ray_executor: Executor) -> None:
    told = [run(dataset, "--executor", name, "--json", "-", "--fail-on", "never")
            for name in ("threads", "ray")]  # fmt: skip
    assert [(one.exit_code, one.stderr) for one in told] == [(0, "")] * 2
    threads, ray = (json.loads(one.stdout) for one in told)
    for document, name in ((threads, "threads"), (ray, "ray")):
        assert document.pop("duration_s") > 0 and document.pop("peak_nbytes") > 0
        assert document["options"].pop("engine") == name
    assert ray == threads and len(ray["runs"]) == 2 and ray["accounting"]["dropped"] > 0


def test_a_missing_ray_is_named(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ActdsError) as raised, open_executor("ray"):
        pass
    assert raised.value.code == "E011" and "pip install '.[ray]'" in raised.value.next_step
    told = run(dataset, "--executor", "ray")
    assert told.exit_code == 2 and told.stdout == ""
    assert told.stderr.startswith("E011 --executor ray: the package ray is not installed")


# selection within steps -----------------------------------------------------------------------


def test_selection_within_steps_is_seen_in_every_nth_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = {"n_steps": 800, "rate": 0.05, "strength": 2.0}
    made = tables_of(simulate(replace(SCENARIOS["mnar_rarity"], **change), 3))  # type: ignore[arg-type]
    seen: list[Passed] = []

    def kept(*args: Any, **options: Any) -> Passed:
        seen.append(pass_over(*args, **options))
        return seen[-1]

    monkeypatch.setattr(audit_run, "pass_over", kept)
    rarity = {}
    for limit in (lookup.MAX_ROWS, 1300):
        monkeypatch.setattr(lookup, "MAX_ROWS", limit)
        mechanism = audited(made).mechanism
        assert mechanism is not None
        within = {one.covariate.name: one for one in mechanism.tests if one.name == "within"}
        rarity[limit] = within["rarity"]
    every, some = (passed.lookups["r-0"].within for passed in seen)
    partial = np.flatnonzero(every)
    chosen = np.flatnonzero(some[partial])
    [each] = np.unique(np.diff(chosen))
    assert each > 3 and chosen[0] == 0 and chosen[-1] + each >= len(partial)
    in_all, in_some = (passed.within["content"][0].step for passed in seen)
    assert len(in_some) <= 1.3 * 1300 < len(in_all) / 2
    assert np.array_equal(np.unique(in_some), partial[chosen])
    assert all(one.rejected for one in rarity.values())
