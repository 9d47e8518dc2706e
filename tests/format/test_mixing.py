"""Mixing: the report says what the batches hold, and its ideal is that of a perfect shuffle."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import actds
from actds.errors import ActdsError
from actds.loader.order import MixingReport, mixing_report
from actds_testing.simulate.dataset import write_dataset
from actds_testing.simulate.run import simulate
from actds_testing.simulate.scenario import Scenario
from actds_testing.synthetic import make_dataset

HOOK = "resid_post.0"
SHARD = 1 << 13


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs with prefix-cache hits."""
    path = tmp_path_factory.mktemp("small") / "acts"
    make_dataset(path, n_requests=40, seed=1, sealed=False)
    return make_dataset(path, n_requests=30, seed=2, run="r-another")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of requests of hundreds of tokens, in shards of 8,192 permuted rows."""
    scenario = Scenario(
        n_steps=900, mean_batch_tokens=220, max_batch_tokens=512, max_num_seqs=64,
        prompt_median=350, generated_median=150, length_sigma=0.5, prefix_share=0.0,
        pool_rows=8192, d_model=512, n_projections=1, readouts=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("served") / "acts"
    return write_dataset(simulate(scenario, 1), path, rows_per_shard=SHARD)


def by_hand(path: Path, n_batches: int, **options: Any) -> tuple[list[float], list[float]]:
    """Return partners and neighbours of each batch, counted pair by pair in what a loader gives."""
    partners, beside = [], []
    with actds.Loader(path, HOOK, provenance=True, **options) as loader:
        for (acts, rows), _ in zip(loader, range(n_batches), strict=False):
            places = list(zip(rows["run"], rows["request"], rows["position"], strict=True))
            assert len(places) == len(acts)
            requests = Counter(place[:2] for place in places)
            partners.append(np.mean([requests[place[:2]] - 1 for place in places]))
            at = Counter(places)
            near = [at[a, b, int(c) - 1] + at[a, b, int(c) + 1] for a, b, c in places]
            beside.append(np.mean(near))
    return [float(one) for one in partners], [float(one) for one in beside]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lanes": 1, "window_rows": 16},
        {"phase": "decode", "seed": 4},
        {"weights": "multiplicity"},
        {"exclude": "first_position", "where": "position < 20"},
        {"mix": {"prefill": 0.25, "decode": 0.75}},
        {"mix": {"position < 8": 0.5, "position >= 4": 0.5}},
        {"frequency": "1 + position"},
    ],
    ids=lambda options: ", ".join(options) or "default",
)
def test_the_report_says_what_the_batches_hold(small: Path, options: dict[str, Any]) -> None:
    with actds.Loader(small, HOOK, batch=32, **options) as loader:
        report = mixing_report(loader, 7)
    partners, beside = by_hand(small, 7, batch=32, **options)
    assert report.n_batches == len(partners) > 3 and report.batch == 32
    assert report.partners == pytest.approx(np.mean(partners)) and report.partners > 0
    assert report.adjacent == pytest.approx(np.mean(beside))
    error = np.std(partners, ddof=1) / np.sqrt(len(partners))
    assert report.partners_error == pytest.approx(error)
    assert report.ratio == pytest.approx(report.partners / report.ideal_partners)


def test_the_ideal_is_the_hypergeometric_mean(small: Path) -> None:
    requests, positions = [], []
    for shard in actds.open(small).shards:
        for row in shard.tokens(["request", "position"]).to_pylist():
            requests.append((shard.run, row["request"]))
            positions.append((shard.run, row["request"], row["position"]))
    n, sizes = len(requests), Counter(requests)
    others = [scipy.stats.hypergeom(n - 1, sizes[one] - 1, 31).mean() for one in requests]
    known = set(positions)
    near = [((a, b, c - 1) in known) + ((a, b, c + 1) in known) for a, b, c in positions]
    with actds.Loader(small, HOOK, batch=32) as loader:
        report = mixing_report(loader)
    assert report.ideal_partners == pytest.approx(np.mean(others))
    assert report.ideal_adjacent == pytest.approx(np.mean(near) * 31 / (n - 1))


@pytest.mark.parametrize(
    "options", [{"weights": "multiplicity"}, {"mix": {"position < 8": 0.5, "position >= 4": 0.5}}]
)
def test_the_ideal_is_that_of_random_orders(small: Path, options: dict[str, Any]) -> None:
    with actds.Loader(small, HOOK, batch=32, **options) as loader:
        report = mixing_report(loader)
    parts: dict[int, list[tuple[str, int]]] = {}
    with actds.Loader(
        small, HOOK, batch=32, provenance=True, drop_last="mix" in options, **options
    ) as loader:
        for _, rows in loader:
            part = rows.get("part", np.zeros(len(rows["run"])))
            for one in zip(part, rows["run"], rows["request"], strict=True):
                parts.setdefault(int(one[0]), []).append((str(one[1]), int(one[2])))
    if "mix" in options:  # the longer part is not served to its end: take it from a loader alone
        for number, name in enumerate(options["mix"]):
            with actds.Loader(
                small, HOOK, batch=8, provenance=True, where=name, drop_last=False
            ) as loader:
                rows_of_all = [rows for _, rows in loader]
            parts[number] = [
                (str(run), int(request))
                for rows in rows_of_all
                for run, request in zip(rows["run"], rows["request"], strict=True)
            ]
    names = {one: n for n, one in enumerate({row for part in parts.values() for row in part})}
    pools = [np.array([names[one] for one in parts[number]]) for number in sorted(parts)]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(4000):
        batch = np.concatenate([rng.choice(pool, 32 // len(pools), False) for pool in pools])
        counts = np.bincount(batch)
        drawn.append((counts * (counts - 1)).sum() / 32)
    assert abs(report.ideal_partners - np.mean(drawn)) < 5 * np.std(drawn) / np.sqrt(len(drawn))


@pytest.mark.standard
def test_the_order_on_disk_is_mixed_and_a_shuffled_copy_perfectly(
    served: Path, tmp_path: Path
) -> None:
    """The default order; batch, window and shards are an eighth of the defaults."""
    # One phase: a window of so few pieces holds more of one phase than of the other.
    options: dict[str, Any] = {"batch": 512, "window_rows": SHARD, "phase": "prefill"}
    with actds.Loader(served, **options) as loader:
        before = actds.mixing_report(loader, 200)
    assert 1.1 < before.ratio < 2.5
    actds.shuffle(served, tmp_path / "out", rows_per_shard=SHARD)
    with actds.Loader(tmp_path / "out", **options) as loader:
        after = actds.mixing_report(loader, 200)
    assert abs(after.ratio - 1) < 5 * after.ratio_error < 0.1
    assert after.ideal_partners == before.ideal_partners
    assert abs(after.adjacent - after.ideal_adjacent) < 0.3 * after.ideal_adjacent


def test_rows_in_the_order_of_their_steps_are_told(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=200, order="sequence")
    with actds.Loader(path, HOOK, batch=16, lanes=1, window_rows=16) as loader:
        assert mixing_report(loader, 40).ratio > 3


def test_a_report_moves_no_loader_and_is_the_same_on_every_rank(small: Path) -> None:
    with actds.Loader(small, HOOK, batch=32, world=4, rank=3) as loader:
        next(loader)
        state = loader.state_dict()
        report = mixing_report(loader, 5)
        assert loader.state_dict() == state
    with actds.Loader(small, HOOK, batch=32) as loader:
        assert mixing_report(loader, 5) == report
        assert mixing_report(loader, 5, epoch=1) != report
        assert mixing_report(loader, 10**6).n_batches == loader.batches_per_epoch


def test_the_report_is_a_line() -> None:
    report = MixingReport(4, 4096, 3.0, 2.0, 0.1, 0.5, 0.25, 4096.0)
    assert str(report) == (
        "3 rows of the same request per row of a batch of 4,096, 1.50 (± 0.05) times the ideal 2; "
        "0.5 at the position beside it, ideal 0.25 (4 batches)"
    )
    weighted = MixingReport(4, 4096, 3.0, 2.0, 0.1, 0.5, 0.25, 1234.0)
    assert str(weighted) == f"{report}; weighted, a batch has 1,234 effective rows"


@pytest.mark.parametrize("weights", ["1 + position", ["multiplicity", "1 / (1 + position)"]])
def test_the_report_says_what_weights_leave_of_a_batch(small: Path, weights: Any) -> None:
    options: dict[str, Any] = {"weights": weights, "batch": 32}
    with actds.Loader(small, HOOK, **options) as loader:
        report = mixing_report(loader, 5)
        batches = [rows["weight"].astype(float) for _, rows in islice(loader, 5)]
    kish = np.mean([w.sum() ** 2 / (w**2).sum() for w in batches])
    assert np.isclose(report.effective_rows, kish, rtol=1e-9) and kish < 30
    with actds.Loader(small, HOOK, batch=32) as loader:
        assert mixing_report(loader, 5).effective_rows == 32


def test_refuses_no_batch(small: Path) -> None:
    with (
        actds.Loader(small, HOOK, batch=32) as loader,
        pytest.raises(ActdsError, match="E014 n_batches"),
    ):
        mixing_report(loader, 0)
