"""Mixtures, splits by request, frequencies, weights by expression, normalizing and devices."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import actds
from actds.explore.stats import Stats
from actds_testing.synthetic import make_dataset, states

HOOKS = ("resid_post.0", "resid_post.1")
Key = tuple[str, int, int]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "acts"
    return make_dataset(folder, n_requests=60, seed=3, hooks=HOOKS, rows_per_shard=150)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture-other") / "acts"
    return make_dataset(folder, n_requests=40, seed=9, hooks=HOOKS, run="r-other")


def keys(rows: dict[str, Any]) -> list[Key]:
    columns = (rows[name].tolist() for name in ("run", "request", "position"))
    return list(zip(*columns, strict=True))


def batches(*args: Any, **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    return list(actds.Loader(*args, provenance=True, **options))


MIXES: list[dict[str, float]] = [
    {"prefill": 0.5, "decode": 0.5},
    {"prefill": 0.9, "decode": 0.1},
    {
        "position < 4 and phase == 'prefill'": 0.2,
        "position >= 4 and phase == 'prefill'": 0.3,
        "decode": 0.5,
    },
]


@pytest.mark.parametrize("mix", MIXES)
def test_every_batch_has_its_shares_and_no_row_comes_twice(
    path: Path, mix: dict[str, float]
) -> None:
    seen: Counter[Key] = Counter()
    parts: Counter[int] = Counter()
    n = 0
    for acts, rows in batches(path, HOOKS[0], batch=24, mix=mix, window_rows=128):
        n += 1
        assert acts.shape == (24, 16)
        here = Counter(rows["part"].tolist())
        for number, share in enumerate(mix.values()):
            assert abs(here[number] - 24 * share) < 2 * len(mix)
        parts += here
        seen.update(keys(rows))
        for number, name in enumerate(mix):
            chosen = rows["part"] == number
            if name in ("prefill", "decode"):
                assert set(rows["phase"][chosen].tolist()) <= {name}
    assert n > 3 and set(seen.values()) == {1}
    for number, share in enumerate(mix.values()):
        assert abs(parts[number] - 24 * n * share) < len(mix)


def test_a_mixture_ends_before_the_part_that_would_run_out(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=16, mix={"prefill": 0.5, "decode": 0.5})
    rows = {
        phase: actds.Loader(path, HOOKS[0], batch=16, phase=phase).n_rows
        for phase in actds.open(path).phases
    }
    assert abs(len(loader) - 2 * min(rows.values()) / 16) <= 2
    assert loader.n_dropped == sum(rows.values()) - 16 * len(loader)
    assert f"{rows['decode']:,} decode" in repr(loader)


def test_several_datasets_have_their_shares(path: Path, other: Path) -> None:
    mix = {path: 0.25, str(other): 0.75}
    seen: Counter[str] = Counter()
    for _, rows in batches(mix, HOOKS[0], batch=16):
        assert (rows["run"] == "r-other").sum() == 12
        seen.update(rows["run"].tolist())
    assert len(seen) == 2
    for shares in ({path: 0.25, str(other): 0.7}, {path: 0.0, str(other): 1.0}, {}):
        with pytest.raises(actds.ActdsError, match="E014 source"):
            actds.Loader(shares, batch=16)  # type: ignore[arg-type]


def test_datasets_without_shares_are_one_after_the_other_in_one_order(
    path: Path, other: Path
) -> None:
    options: dict[str, Any] = {"batch": 16, "drop_last": False}
    seen = Counter(k for _, rows in batches([path, other], HOOKS[0], **options) for k in keys(rows))
    alone = Counter(
        k
        for one in (path, other)
        for _, rows in batches(one, HOOKS[0], **options)
        for k in keys(rows)
    )
    assert seen == alone and set(seen.values()) == {1}
    first = next(iter(batches([path, other], HOOKS[0], **options)))[1]
    assert len(set(first["run"].tolist())) == 2
    with pytest.raises(actds.ActdsError, match=r"E014 source: .* twice"):
        actds.Loader([path, path], batch=16)


def test_datasets_of_other_widths_are_refused(path: Path, tmp_path: Path) -> None:
    wide = make_dataset(tmp_path / "wide", n_requests=4, seed=1, hooks=HOOKS, d_model=32)
    with pytest.raises(actds.ActdsError, match=r"E014 source: .*of 32 bfloat16.* of 16"):
        actds.Loader([path, wide], batch=16)


@pytest.mark.parametrize("worlds", [(1, 4, 2, 8), (2, 1)])
def test_a_mixture_goes_on_bit_exactly_on_other_world_sizes(
    path: Path, other: Path, worlds: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {
        "batch": 32, "lanes": 8, "window_rows": 256, "epochs": 2, "weights": "multiplicity",
        "frequency": "1 + position", "where": "position > 0",
    }  # fmt: skip
    source = {path: 0.4, other: 0.6}
    expected = [a for a, _ in batches(source, HOOKS[0], **options)]
    got: list[torch.Tensor] = []
    state: dict[str, Any] | None = None
    for i, world in enumerate(worlds):
        parts = []
        for rank in range(world):
            loader = actds.Loader(source, HOOKS[0], rank=rank, world=world, **options)
            if state is not None:
                loader.load_state_dict(state)
            n = 5 if i + 1 < len(worlds) else len(expected)
            parts.append(list(itertools.islice(loader, n)))
            after = loader.state_dict()
            loader.close()
        state = json.loads(json.dumps(after))
        got += [torch.cat(ranks) for ranks in zip(*parts, strict=True)]
    assert len(got) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_state_of_other_shares_is_refused(path: Path) -> None:
    mix = {"prefill": 0.5, "decode": 0.5}
    state = actds.Loader(path, batch=16, mix=mix).state_dict()
    with pytest.raises(actds.ActdsError, match="E014 state mix"):
        actds.Loader(path, batch=16, mix={"prefill": 0.25, "decode": 0.75}).load_state_dict(state)
    with pytest.raises(actds.ActdsError, match="E014 state"):
        actds.Loader(path, batch=16).load_state_dict(state)


@pytest.mark.parametrize(
    "options, got",
    [
        ({"mix": {"prefill": 0.5, "decode": 0.4}}, "E014 mix: .*add up to 0.9"),
        ({"mix": {"prefill": True, "decode": 0.5}}, "E014 mix: .*a share from"),
        ({"mix": {"nothing == 3": 1.0}}, "E014 where: no column 'nothing'"),
        ({"mix": {"position > 100000": 1.0}}, "E014 where: .*true for no row"),
        ({"mix": {"prefill": 1.0}, "phase": "decode"}, "E014 mix"),
        ({"mix": {"prefill": 0.5, "decode": 0.5}, "drop_last": False}, "E014 drop_last"),
        ({"split": "train"}, "E014 held_out"),
        ({"held_out": 0.1}, "E014 split"),
        ({"held_out": 1.5, "split": "train"}, "E014 held_out"),
        ({"held_out": 1e-9, "split": "held_out"}, "E014 held_out: no request in held_out"),
        ({"frequency": "position == 3"}, "E014 frequency: true or false"),
        ({"frequency": "position - 3"}, "E014 frequency: -[123].0 for row .*; expected finite"),
        ({"frequency": "0 * position"}, "E014 frequency: .*0 for every row"),
        ({"weights": "1 / position"}, "E014 weights: inf for row"),
        ({"weights": "no/such/file"}, "E014 weights: no file"),
        ({"normalize": "mean"}, "E014 normalize"),
        ({"normalize": {}}, "E014 normalize: no Stats of 16 channels for resid_post.0"),
        ({"dtype": "int8"}, "E014 dtype"),
        ({"device": "no-such"}, "E014 device"),
    ],
)
def test_what_cannot_be_used_is_refused(path: Path, options: dict[str, Any], got: str) -> None:
    with pytest.raises(actds.ActdsError, match=got):
        actds.Loader(path, batch=16, **options)


def test_a_split_is_by_request_and_the_same_in_every_harvest(path: Path, tmp_path: Path) -> None:
    again = make_dataset(tmp_path / "again", n_requests=60, seed=3, hooks=HOOKS, run="r-again")
    options: dict[str, Any] = {"batch": 4, "drop_last": False, "held_out": 0.3}
    sides = {}
    for split in ("train", "held_out"):
        seen = [keys(rows) for _, rows in batches(path, HOOKS[0], split=split, **options)]
        sides[split] = Counter(itertools.chain.from_iterable(seen))
        assert set(sides[split].values()) == {1}
        theirs = [keys(rows) for _, rows in batches(again, HOOKS[0], split=split, **options)]
        requests = {key[1] for key in sides[split]}
        assert {key[1] for batch in theirs for key in batch} == requests
    train, held = ({key[1] for key in sides[s]} for s in ("train", "held_out"))
    assert not train & held and len(held) >= 8
    assert sum(len(side) for side in sides.values()) == actds.open(path).n_rows


def test_statistics_of_a_side_are_those_of_its_rows(path: Path) -> None:
    options: dict[str, Any] = {"batch": 1, "split": "train", "held_out": 0.3, "drop_last": False}
    rows = torch.cat([acts for acts, _ in batches(path, HOOKS[0], **options)]).double().numpy()
    stats = actds.Loader(path, HOOKS[0], **options).stats()[HOOKS[0]]
    assert stats.count == len(rows)
    np.testing.assert_allclose(stats.mean, rows.mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_side_counts_what_its_requests_were_served(path: Path, split: str) -> None:
    options: dict[str, Any] = {"batch": 1, "split": split, "held_out": 0.3, "drop_last": False}
    own = [keys(rows)[0] for _, rows in batches(path, HOOKS[0], **options)]
    requests = {key[:2] for key in own}
    stored = set(map(tuple, zip(*actds.open(path).tokens(run=True).select(
        ["run", "request", "position"]).to_pydict().values(), strict=True)))  # fmt: skip
    expected = Counter(own)
    for line in actds.open(path).spans(run=True).to_pylist():
        if line["ref_request"] is not None and (line["run"], line["request"]) in requests:
            computed = ((line["run"], line["ref_request"], position)
                        for position in range(line["start"], line["stop"]))  # fmt: skip
            expected.update(key for key in computed if key in stored)
    options["weights"] = "multiplicity"
    read = Counter(keys(rows)[0] for _, rows in batches(path, HOOKS[0], **options))
    assert read == expected
    assert actds.Loader(path, HOOKS[0], **options).batches_per_epoch == expected.total()
    assert {key[:2] for key in read} - requests and max(read.values()) > 1


def test_rows_come_in_proportion_to_an_expression(path: Path) -> None:
    counts: Counter[Key] = Counter()
    loader = actds.Loader(
        path, HOOKS[0], batch=32, frequency="position", epochs=60, provenance=True, drop_last=False
    )
    total = 0
    for acts, rows in loader:
        counts.update(keys(rows))
        total += len(acts)
    dataset = actds.open(path)
    assert total == 60 * dataset.n_rows
    tokens = dataset.tokens(run=True)
    position = tokens["position"].to_numpy().astype(float)
    exact = position / position.sum() * dataset.n_rows * 60
    names = zip(*(tokens[c].to_pylist() for c in ("run", "request", "position")), strict=True)
    got = np.array([counts[name] for name in names])
    assert not got[position == 0].any()
    assert np.abs(got - exact).max() < 5 * np.sqrt(60 / 4)


def test_an_expression_weights_rows_in_a_loss(path: Path) -> None:
    for acts, rows in batches(path, HOOKS[0], batch=32, weights="1 / (1 + position)"):
        assert rows["weight"].dtype == np.float32 and len(acts) == 32
        assert np.array_equal(rows["weight"], (1 / (1 + rows["position"])).astype(np.float32))


def test_normalized_rows_have_mean_norm_or_moments_of_one(path: Path) -> None:
    stats = actds.open(path).stats(HOOKS[0])
    options: dict[str, Any] = {"batch": 1, "lanes": 1, "drop_last": False}
    plain = torch.cat([acts for acts, _ in batches(path, HOOKS[0], **options)])
    by_norm = torch.cat([a for a, _ in batches(path, HOOKS[0], normalize="norm", **options)])
    assert by_norm.dtype == torch.float32
    assert by_norm.norm(dim=1).mean().item() == pytest.approx(4.0, rel=1e-5)
    assert torch.allclose(by_norm, plain.float() * (4.0 / stats.mean_norm))
    for how in ("channel", {HOOKS[0]: stats}):
        rows = torch.cat([a for a, _ in batches(path, HOOKS[0], normalize=how, **options)])
        assert rows.mean(dim=0).abs().max() < 1e-5
        assert torch.allclose(rows.var(dim=0, correction=0), torch.ones(16), atol=1e-4)
        told = actds.Loader(path, HOOKS[0], batch=1, normalize=how).config["normalization"]
        shift, scale = (torch.tensor(told[HOOKS[0]][name]) for name in ("shift", "scale"))
        assert torch.allclose(rows, (plain.float() - shift) * scale, atol=1e-6)
    half = actds.Loader(path, HOOKS[0], batch=16, normalize="norm", dtype="bfloat16")
    assert next(half).dtype == torch.bfloat16
    scale = half.config["normalization"][HOOKS[0]]["scale"]
    assert torch.allclose(by_norm, plain.float() * scale)
    assert actds.Loader(path, batch=16).config["normalization"] is None
    assert half.config["normalize"] == "norm" and len(half.config["normalize_sha256"]) == 64


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "first_position"},
        {"where": "position > 2", "weights": "multiplicity"},
        {"split": "train", "held_out": 0.4, "where": "phase == 'prefill'"},
    ],
)
def test_the_scale_is_that_of_the_rows_that_are_read(path: Path, options: dict[str, Any]) -> None:
    shared: dict[str, Any] = {"batch": 1, "lanes": 1, "drop_last": False, "normalize": "norm"}
    loader = actds.Loader(path, HOOKS[0], **shared, **options)
    rows = torch.cat([batch for batch in loader])
    if "split" in options:
        other = actds.Loader(path, HOOKS[0], **shared, **{**options, "split": "held_out"})
        assert other.config["normalize_sha256"] == loader.config["normalize_sha256"]
        rows = torch.cat([rows, *other])
    assert rows.norm(dim=1).mean().item() == pytest.approx(4.0, rel=1e-5)


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two datasets whose rows are as long as their position, and longer in the second."""

    def scaled(tokens: Any, token_ids: Any, hook: Any) -> np.ndarray[Any, Any]:
        bits = states(tokens, token_ids, hook)
        values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).double()
        factor = (1 + np.asarray(tokens["position"])) * (1 if hook.name == HOOKS[0] else 7)
        values = (values * torch.from_numpy(factor)[:, None]).bfloat16()
        return values.view(torch.int16).numpy().view(np.uint16)

    folder = tmp_path_factory.mktemp("longer")
    with mock.patch("actds_testing.synthetic.states", scaled):
        first = make_dataset(folder / "a", n_requests=60, seed=3, hooks=HOOKS)
        return [first, make_dataset(folder / "b", n_requests=30, seed=4, hooks=HOOKS, run="r-b")]


GIVEN: dict[str, dict[str, Any]] = {
    "rare": {"mix": {"position < 2": 0.75, "position >= 2": 0.25}},
    "late": {"mix": {"position >= 9": 0.5, "position < 9": 0.5}},
    "frequency": {"frequency": "(position + 1) * (position + 1)"},
    "served": {"weights": "multiplicity"},
    "served in proportion": {"weights": "multiplicity", "frequency": "1 / (1 + position)"},
    "two datasets": {},
    "shares of datasets": {},
    "both": {"mix": {"prefill": 0.2, "decode": 0.8}, "frequency": "position + 1"},
    "weights of a loss": {"weights": "1 / (1 + position)"},
}


@pytest.mark.parametrize("how", ["norm", "channel"])
@pytest.mark.parametrize("name", GIVEN)
def test_what_the_batches_hold_is_normalized_and_can_be_undone(
    longer: list[Path], how: Any, name: str
) -> None:
    sources: dict[str, Any] = {
        "two datasets": longer,
        "shares of datasets": {longer[0]: 0.1, longer[1]: 0.9},
    }
    source = sources.get(name, longer[0])
    stored = {}
    for dataset in map(actds.open, longer):
        values = torch.from_numpy(dataset.array(HOOKS[0])[:])
        tokens = dataset.tokens(run=True)
        columns = (tokens[c].to_pylist() for c in ("run", "request", "position"))
        stored |= dict(zip(zip(*columns, strict=True), values, strict=True))
    with actds.Loader(
        source, HOOKS[0], batch=8, epochs=100, normalize=how, provenance=True, **GIVEN[name]
    ) as loader:
        given, raw = [], []
        for acts, rows in loader:
            given.append(acts)
            raw += [stored[key] for key in keys(rows)]
        told = loader.config["normalization"][HOOKS[0]]
        found = loader.stats()[HOOKS[0]]
    batch, rows = torch.cat(given).double(), torch.stack(raw).double()
    shift = 0 if told["shift"] is None else torch.tensor(told["shift"], dtype=torch.float64)
    undone = batch / torch.tensor(told["scale"], dtype=torch.float64) + shift
    assert torch.allclose(undone, rows, rtol=1e-5, atol=1e-4)
    # Each of 100 epochs leaves out or draws other rows: a sample of what is promised in the mean,
    # and the order is another one for each digest. The tolerances are several standard errors.
    assert np.linalg.norm(rows, axis=1).mean() == pytest.approx(found.mean_norm, rel=0.08)
    if how == "norm":
        assert np.linalg.norm(batch, axis=1).mean() == pytest.approx(4, rel=0.08)
    else:
        variance = batch.numpy().var(axis=0)
        assert variance.mean() == pytest.approx(1, rel=0.15) and abs(variance - 1).max() < 0.5
        assert abs(batch.numpy().mean(axis=0)).max() < 0.12


def test_a_constant_channel_is_not_blown_up() -> None:
    mean = np.array([0.1, 3.0])
    stats = Stats(3, mean, np.array([1e-34, 4.0]), 3.0, np.zeros(13), mean, 3)
    assert stats.std.tolist() == [0.0, 2.0]


def test_a_device_and_a_type_change_no_value(path: Path) -> None:
    plain = actds.Loader(path, HOOKS[0], batch=32)
    sent = actds.Loader(path, HOOKS[0], batch=32, device="cpu", dtype="float32")
    for a, b in zip(plain, sent, strict=True):
        assert b.dtype == torch.float32 and b.device.type == "cpu" and torch.equal(a.float(), b)


def test_progress_counts_what_was_given(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=16)
    assert loader.progress.n_rows == 0 and loader.progress.rows_per_s == 0
    for _ in range(3):
        next(loader)
    progress = loader.progress
    assert (progress.epoch, progress.step, progress.n_rows) == (0, 3, 48)
    assert progress.n_batches == len(loader) and 0 <= progress.waited_s <= progress.seconds
    assert f"batch 3 of {len(loader)}" in str(progress)
    loader.close()
