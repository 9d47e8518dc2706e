"""Rows of two datasets in lockstep: the same tokens up to the same position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.format.readouts import Readouts
from actds_testing.synthetic import make_dataset

HOOKS = ("resid_post.0", "resid_post.1")
Prefix = tuple[int, ...]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "acts"
    return make_dataset(folder, n_requests=50, seed=3, hooks=HOOKS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a harvest of the same text, of another width and type, that lost other rows."""
    folder = tmp_path_factory.mktemp("pairs-other") / "acts"
    return make_dataset(
        folder, n_requests=50, seed=3, hooks=HOOKS, drops=True, run="r-other", d_model=24,
        dtype="float32", rows_per_shard=100, order="sequence", readouts=Readouts(1, seed=0),
    )  # fmt: skip


def prefixes(dataset: actds.Dataset) -> dict[int, Prefix]:
    """Return the tokens up to each row, request by request, where all of them are known."""
    found: dict[int, Prefix] = {}
    for line in dataset.requests().to_pylist():
        request = dataset.request(line["request"])
        for position, row in enumerate(request.row.tolist()):
            tokens = request.token_id[: position + 1]
            if row >= 0 and (tokens >= 0).all() and request.owner[position] == line["request"]:
                found[row] = tuple(tokens.tolist())
    return found


def test_each_row_comes_with_the_one_of_the_same_text(path: Path, other: Path) -> None:
    mine, theirs = actds.open(path), actds.open(other)
    places: dict[Prefix, set[int]] = {}
    for row, prefix in prefixes(theirs).items():
        places.setdefault(prefix, set()).add(row)
    expected = {row: prefix for row, prefix in prefixes(mine).items() if prefix in places}
    assert 0.5 * mine.n_rows < len(expected) < mine.n_rows
    order = {
        key: row
        for row, key in enumerate(
            zip(*(mine.tokens()[c].to_pylist() for c in ("request", "position")), strict=True)
        )
    }
    values = {hook: np.asarray(theirs.array(hook)[:]) for hook in HOOKS}
    loader = actds.Loader(
        path, list(HOOKS), paired={"tuned": other}, batch=16, drop_last=False, provenance=True
    )
    assert loader.n_rows == len(expected)
    seen: list[int] = []
    for batch, rows in loader:
        assert list(batch) == [*HOOKS, "tuned/resid_post.0", "tuned/resid_post.1"]
        for i, key in enumerate(zip(rows["request"], rows["position"], strict=True)):
            row = order[key]
            seen.append(row)
            for hook in HOOKS:
                there = batch[f"tuned/{hook}"][i].numpy()
                assert there.dtype == np.float32 and there.shape == (24,)
                candidates = values[hook][sorted(places[expected[row]])]
                assert (candidates == there).all(axis=1).any()
    assert sorted(seen) == sorted(expected)


def test_pairs_go_on_bit_exactly_and_keep_filters_and_shares(path: Path, other: Path) -> None:
    options: dict[str, Any] = {
        "paired": {"tuned": other}, "batch": 16, "where": "position > 1", "epochs": 2,
        "mix": {"prefill": 0.5, "decode": 0.5}, "normalize": "norm", "window_rows": 64,
    }  # fmt: skip
    whole = list(actds.Loader(path, HOOKS[0], **options))
    loader = actds.Loader(path, HOOKS[0], **options)
    for _ in range(3):
        next(loader)
    again = actds.Loader(path, HOOKS[0], **options)
    again.load_state_dict(loader.state_dict())
    loader.close()
    rest = list(again)
    assert len(rest) == len(whole) - 3 > 4
    for a, b in zip(rest, whole[3:], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    other_state = actds.Loader(path, HOOKS[0], **{**options, "paired": None}).state_dict()
    with pytest.raises(actds.ActdsError, match="E014 state paired"):
        again.load_state_dict(other_state)


def test_statistics_are_those_of_the_rows_and_of_their_partners(path: Path, other: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], paired={"b": other}, batch=1, lanes=1, drop_last=False)
    stats = loader.stats()
    batches = list(loader)
    for name in (HOOKS[0], f"b/{HOOKS[0]}"):
        rows = torch.cat([batch[name] for batch in batches]).double().numpy()
        assert stats[name].count == len(rows)
        assert np.allclose(stats[name].mean, rows.mean(axis=0), rtol=1e-9, atol=1e-12)
        assert np.allclose(stats[name].variance, rows.var(axis=0), rtol=1e-9)


def test_what_cannot_be_paired_is_refused(path: Path, other: Path, tmp_path: Path) -> None:
    strange = make_dataset(tmp_path / "strange", n_requests=5, seed=77, hooks=HOOKS[:1])
    with pytest.raises(actds.ActdsError, match=r"E014 .*resid_post.1"):
        actds.Loader(path, list(HOOKS), paired={"b": strange}, batch=4)
    with pytest.raises(actds.ActdsError, match=r"E014 paired: .*no row with a partner in b"):
        actds.Loader(path, HOOKS[0], phase="decode", paired={"b": strange}, batch=4)
    with pytest.raises(actds.ActdsError, match=r"E014 paired: .*without a slash"):
        actds.Loader(path, HOOKS[0], paired={"a/b": other}, batch=4)
    with pytest.raises(actds.ActdsError, match=r"E014 paired: .*several datasets"):
        actds.Loader([path, strange], HOOKS[0], paired={"b": other}, batch=4)
    with pytest.raises(actds.ActdsError, match=r"E014 paired: several datasets for 'b'"):
        actds.Loader(path, HOOKS[0], paired={"b": [other, strange]}, batch=4)  # type: ignore[dict-item]
