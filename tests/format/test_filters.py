"""Filters of the loader: a registry that others add to, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actds
from actds.format.readouts import Readouts
from actds.load.filters import FILTERS, Exclusion, Filter, register_filter
from actds_testing.synthetic import make_dataset

HOOKS = ("resid_post.0", "resid_post.1")
Columns = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filters") / "acts"
    return make_dataset(folder, n_requests=40, seed=3, hooks=HOOKS, readouts=Readouts(1, seed=0))


@pytest.fixture
def odd() -> Iterator[Filter]:
    """Register a filter as another package would."""

    def rows(columns: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
        assert set(columns) == {"token_id", "position"}  # what it asks for, and nothing else
        return (columns["token_id"] % 2 == 1) & (columns["position"] > 3)

    yield register_filter(Filter("odd", "odd token ids", ("token_id", "position"), rows))
    del FILTERS["odd"]


def tokens_of(dataset: actds.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = dataset.tokens()
    request, position, token = (
        table[name].to_numpy() for name in ("request", "position", "token_id")
    )
    return request, position, token


def test_a_filter_from_outside_leaves_rows_out_by_its_name(path: Path, odd: Filter) -> None:
    dataset = actds.open(path)
    request, position, token = tokens_of(dataset)
    out = (token % 2 == 1) & (position > 3)
    assert 0 < out.sum() < len(out)
    expected = sorted(zip(request[~out].tolist(), position[~out].tolist(), strict=True))
    loader = actds.Loader(path, batch=8, exclude="odd", provenance=True, drop_last=False)
    seen: list[tuple[int, int]] = []
    for _, rows in loader:
        seen += zip(rows["request"].tolist(), rows["position"].tolist(), strict=True)
    assert sorted(seen) == expected
    assert loader.excluded == {"odd": int(out.sum())} and loader.config["exclude"] == ["odd"]


def test_a_filter_from_outside_joins_the_named_ones_and_the_state(path: Path, odd: Filter) -> None:
    loader = actds.Loader(path, batch=8, exclude=("odd", "first_position"))
    assert loader.config["exclude"] == ["first_position", "odd"]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    with pytest.raises(actds.ActdsError, match="E014 state exclude"):
        actds.Loader(path, batch=8, exclude="odd").load_state_dict(state)


def test_the_stream_of_datasets_takes_it_too(path: Path, odd: Filter) -> None:
    pytest.importorskip("datasets")
    _, position, token = tokens_of(actds.open(path))
    out = (token % 2 == 1) & (position > 3)
    columns = ["position", "token_id"]
    stream = actds.load_dataset(path, streaming=True, columns=columns, exclude="odd")
    seen = sorted((row["token_id"], row["position"]) for row in stream)
    assert seen == sorted(zip(token[~out].tolist(), position[~out].tolist(), strict=True))


def test_a_filter_by_norm_sees_every_hook_and_its_median(path: Path) -> None:
    dataset = actds.open(path)
    hooks = [dataset.hooks[name] for name in HOOKS]
    norms = np.stack(
        [np.linalg.norm(dataset.array(name)[:].astype(np.float64), axis=1) for name in HOOKS],
        axis=1,
    )
    told = []

    def rows(columns: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
        told.append(columns["norm"])
        assert np.allclose(columns["median_norm"], np.median(norms, axis=0), rtol=1e-4)
        return columns["norm"][:, 1] > columns["median_norm"][1]

    register_filter(Filter("loud", "above the median", ("median_norm", "norm"), rows))
    try:
        exclusion = Exclusion(dataset, hooks, "loud")
    finally:
        del FILTERS["loud"]
    assert np.allclose(np.concatenate(told), norms, rtol=1e-4)
    out = np.concatenate([exclusion.left_out(shard)["loud"] for shard in dataset.shards])
    assert abs(int(out.sum()) - len(out) // 2) <= 1


def test_every_filter_says_what_it_leaves_out() -> None:
    assert tuple(FILTERS) == ("special", "bos", "eos", "first_position", "sink")
    assert all(one.help and one.columns and one.name == name for name, one in FILTERS.items())


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [("bos", ("flags",), "a second 'bos'"), ("mine", ("flags", "colour"), "colour")],
)
def test_a_filter_that_cannot_be_is_refused(
    name: str, columns: tuple[str, ...], message: str
) -> None:
    before = dict(FILTERS)
    with pytest.raises(actds.ActdsError, match=rf"E014 filter[\s\S]*{message}"):
        register_filter(Filter(name, "none", columns, lambda given: given["flags"] > 0))
    assert before == FILTERS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda columns: columns["position"],
        lambda columns: columns["position"][:-1] > 0,
        lambda columns: columns["position"].max() > 0,
    ],
)
def test_what_is_no_mask_of_the_rows_is_refused(path: Path, wrong: Any) -> None:
    register_filter(Filter("wrong", "no mask", ("position",), wrong))
    try:
        with pytest.raises(actds.ActdsError, match=r"E014 filter wrong[\s\S]*bool \("):
            actds.Loader(path, batch=8, exclude="wrong")
    finally:
        del FILTERS["wrong"]


def test_nothing_left_is_refused_by_both_doors(path: Path) -> None:
    register_filter(
        Filter("all", "every row", ("position",), lambda columns: columns["position"] >= 0)
    )
    try:
        with pytest.raises(actds.ActdsError, match="E014 exclude"):
            actds.Loader(path, batch=8, exclude="all")
        pytest.importorskip("datasets")
        with pytest.raises(actds.ActdsError, match="E014 exclude"):
            actds.load_dataset(path, streaming=True, exclude="all")
    finally:
        del FILTERS["all"]


def test_statistics_under_a_filter_from_outside_are_not_kept(path: Path) -> None:
    def by(least: int) -> Filter:
        return Filter("late", "late positions", ("position",), lambda c: c["position"] > least)

    counts = []
    for least in (3, 6):
        register_filter(by(least))
        try:
            loader = actds.Loader(path, HOOKS[0], batch=8, exclude="late")
            counts.append(loader.stats()[HOOKS[0]].count)
            assert counts[-1] == loader.n_rows
        finally:
            del FILTERS["late"]
    assert counts[0] < counts[1]
