"""A dataset and its replays read together: sets of positions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actds
from actds.errors import ActdsError
from actds.explore.requests import covered, lacking
from actds.format import tables
from actds.format.positions import union
from actds_testing import synthetic
from actds_testing.schedules import Schedule, simulate
from actds_testing.synthetic import make_dataset

Ranges = list[tuple[int, int]]
RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda one: (one[0], sum(one))), max_size=8
)


def keys(ranges: Ranges) -> tuple[np.ndarray, np.ndarray]:
    start, stop = np.array(ranges, np.uint64).reshape(-1, 2).T
    return start, stop


@settings(deadline=None)
@given(RANGES, RANGES)
def test_ranges_are_cut_to_a_set(held: Ranges, asked: Ranges) -> None:
    inside = {key for start, stop in held for key in range(start, stop)}
    which, first, after = union(*keys(held)).cut(*keys(asked))
    found: dict[int, list[int]] = {}
    for number, start, stop in zip(which.tolist(), first.tolist(), after.tolist(), strict=True):
        assert start < stop
        found.setdefault(number, []).extend(range(start, stop))
    want = {n: sorted(inside & set(range(*one))) for n, one in enumerate(asked)}
    assert found == {n: some for n, some in want.items() if some}


def test_a_position_has_a_row_of_its_own_or_that_of_a_hit(tmp_path: Path) -> None:
    dataset = actds.open(make_dataset(tmp_path / "acts", schedule=simulate(12, 5, drops=True)))
    [run] = dataset.runs
    stored = {
        tuple(row.values()) for row in dataset.tokens(columns=["request", "position"]).to_pylist()
    }
    have, owed = set(), set()
    for span in dataset.spans().to_pylist():
        is_hit = span["disposition"] == "cache_ref"
        for position in range(span["start"], span["stop"]):
            place = span["request"], position
            if (span["ref_request"] if is_hit else span["request"], position) in stored:
                have.add(place)
            elif is_hit or (span["step"] is not None and span["disposition"] != "undelivered"):
                owed.add(place)

    def places(found: object) -> set[tuple[int, int]]:
        return {
            (key >> 32, key & 0xFFFFFFFF)
            for start, stop in zip(found.start.tolist(), found.stop.tolist(), strict=True)  # type: ignore[attr-defined]
            for key in range(start, stop)
        }

    assert places(covered(dataset.catalog, run)) == have
    assert places(lacking(dataset.catalog, run)) == owed and owed


def test_datasets_that_are_no_replays_of_each_other_are_refused(tmp_path: Path) -> None:
    one = make_dataset(tmp_path / "one")
    other = make_dataset(tmp_path / "other", seed=1, origins=True)  # of a dataset that is not read
    for source in (one, [one, other]):
        with pytest.raises(ActdsError, match=r"E014 once: no dataset that is a replay"):
            actds.Loader(source, batch=16, once=True)  # type: ignore[arg-type]
    assert actds.Loader([one, other], batch=16).config["once"] is None


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a dataset that lost rows, and a replay of all of its requests."""
    source = make_dataset(tmp_path / "a", schedule=simulate(30, 5, drops=True), run="r-a")
    genesis = actds.open(source).catalog.genesis.dataset

    def origins(told: Schedule) -> pa.Table:
        n, numbers = len(told.requests), told.requests["request"].to_pylist()
        columns = {
            "request": numbers,
            "source_dataset": [genesis] * n,
            "source_seal": ["cd" * 32] * n,
            "source_run": ["r-a"] * n,
            "source_request": numbers,
            "n_given": told.requests["prompt_len"].to_pylist(),
        }
        return tables.build("origins", columns)

    monkeypatch.setattr(synthetic, "_origin_table", origins)
    missing = make_dataset(tmp_path / "b", schedule=simulate(30, 5), run="r-b", origins=True)
    return [source, missing]


def test_each_position_comes_in_one_pass_without_being_asked_for_the_rest(
    replayed: list[Path],
) -> None:
    columns = ["position"]
    stored = [actds.open(path).tokens(columns=columns).num_rows for path in replayed]
    for options, n_rows in (({"once": True}, None), ({}, sum(stored))):
        with actds.Loader(replayed, "resid_post.1", batch=64, **options) as loader:
            n_rows = n_rows or loader.n_rows
            assert n_rows % 64 and sum(len(batch) for batch in loader) == n_rows
            assert loader.n_dropped == loader.config["dropped_per_epoch"] == 0
            assert "leaves out" not in repr(loader) and loader.config["drop_last"] is False
    for source, options in ((replayed, {"epochs": 2}), (replayed[0], {}), (replayed, {"once": 1})):
        drop = None if options.get("once") is None else True
        with actds.Loader(source, "resid_post.1", batch=64, drop_last=drop, **options) as loader:
            assert loader.n_dropped == loader.config["rows_per_epoch"] % 64 > 0


def test_sides_of_a_split_have_what_their_requests_were_served(replayed: list[Path]) -> None:
    def rows(**split: object) -> int:
        loader = actds.Loader(
            replayed, "resid_post.1", batch=1, once=True, weights="multiplicity", **split
        )
        return sum(len(batch) for batch in loader)

    both = rows(split="train", held_out=0.4), rows(split="held_out", held_out=0.4)
    assert sum(both) == rows() and min(both) > 0
