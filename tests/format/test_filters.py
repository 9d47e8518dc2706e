"""Filters of the loader: a registry that others add to, and what is refused."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import actds
from actds.format.readouts import Readouts
from actds.loader.filters import FILTERS, Filter, register_filter
from actds.loader.selection import RowFilter
from actds_testing.synthetic import make_dataset, states

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


def test_a_filter_by_norm_that_is_of_another_hook_alone_gives_no_warning(path: Path) -> None:
    dataset = actds.open(path)
    most = {hook: np.linalg.norm(dataset.array(hook)[:], axis=1).max() for hook in HOOKS}
    quiet, loud = sorted(HOOKS, key=lambda hook: most[hook])
    levels = [(most[quiet] + most[loud]) / 2]
    register_filter(
        Filter("loud", "high norms", ("norm",), lambda c: (c["norm"] > levels[-1]).any(axis=1))
    )
    try:
        # Warnings are errors here: what is advised for a dataset holds for each of its hooks.
        assert actds.Loader(path, quiet, batch=8, exclude="loud").excluded == {"loud": 0}
        assert actds.Loader(path, loud, batch=8, exclude="loud").excluded["loud"] > 0
        levels.append(2 * most[loud])
        with pytest.warns(UserWarning, match="'loud' leaves out no row"):
            actds.Loader(path, quiet, batch=8, exclude="loud")
    finally:
        del FILTERS["loud"]


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
        exclusion = RowFilter(dataset, hooks, exclude="loud")
    finally:
        del FILTERS["loud"]
    assert np.allclose(np.concatenate(told), norms, rtol=1e-4)
    out = np.concatenate([exclusion.left_out(shard)["loud"] for shard in dataset.shards])
    assert abs(int(out.sum()) - len(out) // 2) <= 1


def test_every_filter_says_what_it_leaves_out() -> None:
    assert tuple(FILTERS) == ("special", "bos", "eos", "first_position", "sink", "not_finite")
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


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset in which one value is NaN or infinite at every position 2 of one hook."""

    def with_nan(tokens: Any, token_ids: Any, hook: Any) -> np.ndarray[Any, Any]:
        bits = states(tokens, token_ids, hook)
        if hook.name == HOOKS[0]:
            at = np.flatnonzero(np.asarray(tokens["position"]) == 2)
            bits[at[::2], 5], bits[at[1::2], 3] = 0x7FC1, 0xFF80
        return bits

    with mock.patch("actds_testing.synthetic.states", with_nan):
        folder = tmp_path_factory.mktemp("broken") / "acts"
        return make_dataset(folder, n_requests=40, seed=3, hooks=HOOKS)


def refused_values(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(actds.ActdsError) as caught:
        function(*args, **options)
    assert caught.value.code == "E014" and "not_finite" in str(caught.value)
    return str(caught.value)


def test_rows_that_are_not_finite_are_refused_and_counted(broken: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = actds.open(broken).array(HOOKS[0])[:]
    n = int((~np.isfinite(rows)).any(axis=1).sum())
    assert n > 10
    expected = re.compile(rf"{n:,} of {len(rows):,} rows with a value that is NaN or infinite")
    load = actds.load_dataset
    assert expected.search(refused_values(actds.Loader, broken, batch=8))
    assert expected.search(refused_values(load, broken, hooks=HOOKS[0], streaming=True))
    assert expected.search(refused_values(load, broken, cache_dir=tmp_path / "hf"))
    assert expected.search(refused_values(actds.export, broken, tmp_path / "out", to="memmap"))
    refused_values(actds.open(broken).stats, HOOKS[0])
    for options in ({"hooks": HOOKS[1]}, {"where": "position != 2"}):  # none of those rows
        with actds.Loader(broken, batch=8, **options) as loader:
            assert loader.n_rows and all(np.isfinite(s.mean).all() for s in loader.stats().values())


def test_rows_that_are_not_finite_are_left_out_by_name(broken: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    dataset = actds.open(broken)
    rows = dataset.array(HOOKS[0])[:].astype(np.float64)
    finite = np.isfinite(rows).all(axis=1)
    options: dict[str, Any] = {"hooks": HOOKS[0], "exclude": "not_finite"}
    with actds.Loader(broken, batch=8, normalize="norm", drop_last=False, **options) as loader:
        given = np.concatenate([batch.double().numpy() for batch in loader])
        assert f"{(~finite).sum():,} not_finite" in repr(loader)
        assert loader.config["excluded"] == {"not_finite": (~finite).sum()}
        assert loader.config["exclude"] == ["not_finite"] and loader.n_rows == finite.sum()
    assert np.linalg.norm(given, axis=1).mean() == pytest.approx(4, rel=1e-5)
    scale = loader.config["normalization"][HOOKS[0]]["scale"]
    assert np.allclose(np.sort(given.sum(1)), np.sort(rows[finite].sum(1) * scale), atol=1e-4)
    stream = actds.load_dataset(broken, streaming=True, **options)
    assert sum(1 for _ in stream) == finite.sum()
    assert len(actds.load_dataset(broken, cache_dir=tmp_path / "hf", **options)) == finite.sum()
    exported = actds.export(broken, tmp_path / "out", to="memmap", **options)
    assert exported.n_rows == finite.sum()


def test_partners_that_are_not_finite_are_refused_or_left_out(broken: Path, path: Path) -> None:
    options: dict[str, Any] = {"hooks": HOOKS[0], "batch": 8, "paired": {"other": broken}}
    assert "NaN" in refused_values(actds.Loader, path, **options)
    with actds.Loader(path, exclude="not_finite", drop_last=False, **options) as loader:
        seen = [batch[f"other/{HOOKS[0]}"].float() for batch in loader]
    assert all(bool(np.isfinite(rows.numpy()).all()) for rows in seen)
    with contextlib.suppress(StopIteration), actds.Loader(path, HOOKS[0], batch=8) as whole:
        assert 0 < loader.n_rows < whole.n_rows
