"""A dataset and its replays read together: sets of positions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actds
from actds.errors import ActdsError
from actds.explore.requests import RowRanges, lacking
from actds.format import tables
from actds.format.positions import union
from actds_testing import synthetic
from actds_testing.independent import draw
from actds_testing.schedules import Schedule, busy_shares, simulate, table_of, thinned
from actds_testing.synthetic import SALT, make_dataset, make_thinned, thinned_facts

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

    assert places(RowRanges.of(dataset.catalog, run).positions) == have
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


SHARE, FRACTION, SEED = 0.25, 0.5, 7


def made_of(source: actds.Dataset, drawn: set[int], part: Schedule) -> pa.Table:
    """Return origins that make some requests of a schedule replays of those of a source."""
    lines = [line for line in part.requests.to_pylist() if line["request"] in drawn]
    numbers, [run] = [line["request"] for line in lines], source.runs
    columns = {
        "request": numbers,
        "source_dataset": [source.catalog.genesis.dataset] * len(lines),
        "source_seal": ["cd" * 32] * len(lines),
        "source_run": [run] * len(lines),
        "source_request": numbers,
        "n_given": [line["prompt_len"] for line in lines],
    }
    return tables.build("origins", columns)


@dataclass(frozen=True)
class Thinned:
    """A source that drew its rows, and a replay of a part of it; a position by request and number.

    ``owner``: of each position that has a row or would have, the one whose row it is.
    """

    paths: list[Path]
    share: dict[tuple[int, int], float]
    owner: dict[tuple[int, int], tuple[int, int]]
    drawn: set[int]
    """Requests of the replay."""
    unit: str

    def is_stored(self, row: tuple[int, int]) -> bool:
        at = 0 if self.unit == "request" else row[1]
        return draw.number(SALT, row[0], at) < self.share[row]

    def in_union(self, position: tuple[int, int]) -> bool:
        return position[0] in self.drawn or self.is_stored(self.owner[position])

    def weight(self, position: tuple[int, int], fraction: float = FRACTION) -> float:
        return 1 / (1 - (1 - self.share[self.owner[position]]) * (1 - fraction))


@pytest.fixture
def thin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Thinned]:
    def make(
        fraction: float = FRACTION,
        again: Schedule | None = None,
        unit: str = "row",
        leave_out: int = 0,
        policy: str = "thin",
        **facts: Any,
    ) -> Thinned:
        schedule = simulate(30, 5)
        spans = [span for span in schedule.spans.to_pylist() if span["step"] is not None]
        lossy = {span["request"] for span in spans if span["disposition"] == "aborted"}
        # What was lost in a step that was drawn from has no known inclusion.
        whole = {span["step"] for span in spans if span["request"] in lossy}
        shares = {s: p for s, p in busy_shares(schedule, SHARE).items() if s not in whole}
        if policy == "drop_newest":  # what is not drawn lacks a row, and is what a replay fills
            told = thinned(schedule, SALT, shares, unit)
            lines = [
                span | {"disposition": "dropped", "reason": "queue_full"}
                if span["inclusion"]
                else span
                for span in told.spans.to_pylist()
            ]
            told = told.with_(spans=table_of("spans", lines))
            of_run = thinned_facts(unit) | {"capture.overflow_policy": policy}
            path = make_dataset(
                tmp_path / "a", schedule=told, run="r-a", facts=of_run, sealed=False
            )
        else:
            path = make_thinned(tmp_path / "a", schedule, shares, unit, run="r-a")
        source = actds.open(path, i_accept_unsealed=True)
        salt = sha256(
            f"actds replay\n{SEED}\n{source.catalog.genesis.dataset}\nr-a".encode()
        ).digest()
        requests = schedule.requests["request"].to_pylist()
        drawn = {
            r for r in requests if draw.number(int.from_bytes(salt[:8], "big"), r, 0) < fraction
        }
        drawn -= set(sorted(drawn)[:leave_out])
        if policy == "drop_newest":
            drawn &= {request for request, _ in missing_of(source)}
        again = again or simulate(30, 5)
        monkeypatch.setattr(synthetic, "_origin_table", lambda told: made_of(source, drawn, told))
        told = {"replay.only": "all", "replay.fraction": repr(fraction), "replay.seed": SEED}
        make_dataset(
            tmp_path / "b", schedule=again, run="r-b", origins=True, facts={**told, **facts},
            seed=1,
        )  # fmt: skip
        lines = schedule.rows.to_pylist()
        first = {line["request"]: line["step"] for line in reversed(lines)}
        share = {
            (line["request"], line["position"]): shares.get(
                first[line["request"]] if unit == "request" else line["step"], 1.0
            )
            for line in lines
        }
        owner = {}
        for span in schedule.spans.to_pylist():
            for position in range(span["start"], span["stop"]):
                key = span["request"], position
                row = (span["ref_request"], position) if span["disposition"] == "cache_ref" else key
                if row in share:
                    owner[key] = row
        return Thinned([tmp_path / "a", tmp_path / "b"], share, owner, drawn, unit)

    return make


def missing_of(source: actds.Dataset) -> set[tuple[int, int]]:
    lacks = lacking(source.catalog, "r-a")
    return {(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in lacks.start}


@pytest.mark.filterwarnings("ignore:read all the same")
def test_a_backfill_of_steps_of_which_a_part_is_always_stored_weighs_by_both(
    thin: Callable[..., Thinned],
) -> None:
    made = thin(policy="drop_newest", **{"replay.only": "missing"})
    assert 0 < len(made.drawn) < len({request for request, _ in made.owner})
    computed = [at for at, row in made.owner.items() if at == row]
    expected = sum(made.weight(at) for at in computed if made.in_union(at))
    lines = weighed(made.paths, "inclusion", i_accept_unsealed=True)
    assert sum(line[3] for line in lines) == pytest.approx(expected, rel=1e-6)


def weighed(
    paths: list[Path], weights: object, **options: Any
) -> list[tuple[str, int, int, float]]:
    with actds.Loader(
        paths, "resid_post.1", batch=64, once=True, weights=weights, drop_last=False,
        provenance=["run", "request", "position"], **options,
    ) as loader:  # fmt: skip
        return [
            line
            for _, rows in loader
            for line in zip(*(rows[n].tolist() for n in (*_PLACE, "weight")), strict=True)
        ]


_PLACE = ("run", "request", "position")


@pytest.mark.parametrize(
    ("fraction", "unit"), [(FRACTION, "row"), (FRACTION, "request"), (1.0, "row")]
)
def test_the_rows_of_a_drawn_source_and_its_replay_weigh_by_their_inclusion_in_both(
    thin: Callable[..., Thinned], fraction: float, unit: str
) -> None:
    made = thin(fraction, unit=unit)
    assert {*made.share.values()} == {SHARE, 1.0}
    assert fraction == 1 or 0 < len(made.drawn) < 30
    for weights, positions in (
        (["multiplicity", "inclusion"], list(made.owner)),
        ("inclusion", [at for at, row in made.owner.items() if at == row]),
    ):
        lines = weighed(made.paths, weights)
        expected = [made.weight(at, fraction) for at in positions if made.in_union(at)]
        assert sum(line[3] for line in lines) == pytest.approx(sum(expected), rel=1e-6)
        of_source = [line for line in lines if line[0] == "r-a"]
        assert {line[1:3] for line in of_source} == {
            row for row in made.share if made.is_stored(row)
        }
        for _, request, position, weight in of_source:
            assert weight == pytest.approx(made.weight((request, position), fraction), rel=1e-6)
        assert len(lines) > len(of_source) > 0
        assert len({line[3] for line in of_source}) == (2 if fraction < 1 else 1)
    both = ["multiplicity", "inclusion"]
    with actds.Loader(made.paths, "resid_post.1", batch=64, once=True, weights=both) as loader:
        assert (loader.sample is None) == (fraction == 1)


def test_a_union_without_a_known_inclusion_is_refused(
    thin: Callable[..., Thinned], tmp_path: Path
) -> None:
    for n, (words, how) in enumerate((
        ("of the requests alone that lack a row", {"replay.only": "missing"}),
        ("which lacks .* positions of requests", {"again": simulate(30, 5, drops=True)}),
        ("which lacks .* positions of requests", {"leave_out": 1}),
        ("has requests that it did not draw", {"replay.fraction": "0.3"}),
        ("draws rows, or says no fraction", {"replay.seed": None}),
    )):  # fmt: skip
        made = thin(**how)
        with pytest.raises(ActdsError, match=rf"(?s)E014 once: .*{words}.*actds replay"):
            actds.Loader(made.paths, "resid_post.1", batch=16, once=True)
        for path in made.paths:
            path.rename(tmp_path / f"{path.name}{n}")
