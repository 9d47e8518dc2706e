"""Statistics of a hook's rows: as NumPy and SciPy have them, kept, and continued."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import actds
from actds.explore import stats as stats_module
from actds.explore.stats import QUANTILES, Stats, geometric_median, stats_of_rows
from actds.format.arrays import ArrayReader
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned

HOOKS = ("resid_post.0", "resid_post.1")
HOOK = HOOKS[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats") / "acts"
    return make_dataset(folder, n_requests=50, seed=3, hooks=HOOKS, rows_per_shard=120)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACTDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rows(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(actds.open(path).array(HOOK)[:], np.float64)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the shards that are read, as they are."""
    seen: list[str] = []
    array = Shard.array

    def watched(self: Any, hook: str) -> ArrayReader:
        seen.append(self.name)
        return array(self, hook)

    monkeypatch.setattr(Shard, "array", watched)
    return seen


def assert_stats(stats: Stats, rows: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    norms = np.linalg.norm(rows, axis=1)
    assert stats.count == len(rows)
    assert np.allclose(stats.mean, rows.mean(axis=0), rtol=1e-12, atol=1e-12)
    assert np.allclose(stats.variance, rows.var(axis=0), rtol=1e-12)
    assert np.allclose(stats.std, rows.std(axis=0), rtol=1e-12)
    assert np.isclose(stats.mean_norm, norms.mean(), rtol=1e-12)
    expected = np.quantile(norms.astype(np.float32).astype(np.float64), QUANTILES)
    assert np.array_equal(stats.norm_quantiles, expected)
    assert stats.norms[0.5] == expected[QUANTILES.index(0.5)]


@pytest.mark.parametrize("nbytes", [1 << 24, 8 * 16 * 7])
def test_moments_and_quantiles_are_those_of_numpy(
    path: Path, rows: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One block, and many that do not divide the rows.
    monkeypatch.setattr(stats_module, "BLOCK_NBYTES", nbytes)
    dataset = actds.open(path)
    assert_stats(dataset.stats(HOOK), rows)
    with pytest.raises(actds.ActdsError, match="E014"):
        dataset.stats("resid_post.9")


class Rows:
    """A shard of float32 rows that stands in memory."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.name, self.n_rows, self._rows = "rows", len(rows), rows

    def array(self, hook: str) -> Any:
        return contextlib.nullcontext(self)

    def take(self, rows: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        out[:] = self._rows[rows].view(np.uint32)


def test_a_mean_far_from_zero_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (np.random.default_rng(0).normal(size=(5000, 4)) + 1e4).astype(np.float32)
    monkeypatch.setattr(stats_module, "BLOCK_NBYTES", 8 * 4 * 333)
    hook = Hook(name=HOOK, kind="resid_post", layer=0, d_model=4, dtype="float32")
    stats = stats_of_rows(hook, [Rows(rows)], [None], key="rows")  # type: ignore[list-item]
    assert np.allclose(stats.variance, rows.astype(np.float64).var(axis=0), rtol=1e-9)


def test_the_selection_of_a_loader_has_its_own_with_rows_as_often_as_they_come(
    path: Path, rows: Any
) -> None:
    dataset = actds.open(path)
    position = dataset.tokens(columns=["position"])["position"].to_numpy()
    loader = actds.Loader(path, HOOK, batch=8, where="position >= 5")
    assert_stats(loader.stats()[HOOK], rows[position >= 5])
    loader = actds.Loader(path, HOOK, batch=8, where="position < 9", weights="multiplicity")
    served = actds.Loader(
        path, HOOK, batch=8, where="position < 9", weights="multiplicity", drop_last=False
    )
    seen = np.concatenate([b.double().numpy() for b in served])
    assert len(seen) > (position < 9).sum()
    stats = loader.stats()[HOOK]
    assert stats.count == len(seen)
    assert np.allclose(stats.mean, seen.mean(axis=0), rtol=1e-9, atol=1e-12)
    assert np.allclose(stats.variance, seen.var(axis=0), rtol=1e-9)
    norms = np.sort(np.linalg.norm(seen, axis=1).astype(np.float32)).astype(np.float64)
    assert np.allclose(stats.norm_quantiles, np.quantile(norms, QUANTILES), rtol=1e-12)


def test_parts_of_a_mixture_that_share_a_shard_both_count(
    path: Path, rows: np.ndarray[Any, np.dtype[np.float64]], cache: Path
) -> None:
    early = actds.open(path).tokens(columns=["position"])["position"].to_numpy() < 5
    loader = actds.Loader(path, HOOK, batch=8, mix={"position < 5": 0.25, "position >= 5": 0.75})
    found = loader.stats()[HOOK]
    share = np.where(early, 0.25 / early.sum(), 0.75 / (~early).sum())
    norms, mean = np.linalg.norm(rows, axis=1), np.average(rows, axis=0, weights=share)
    assert found.count == len(rows) and share.sum() == pytest.approx(1)
    assert np.allclose(found.mean, mean, rtol=1e-10, atol=1e-12)
    assert np.allclose(found.variance, np.average((rows - mean) ** 2, axis=0, weights=share))
    assert found.mean_norm == pytest.approx(np.average(norms, weights=share), rel=1e-6)
    for q, length in found.norms.items():  # as much of all as q is at most as long
        assert share[norms < length - 1e-5].sum() <= q + 1e-9
        assert share[norms <= length + 1e-5].sum() >= q - 1e-9


def test_what_is_kept_is_not_computed_again(path: Path, reads: list[str], cache: Path) -> None:
    first = actds.open(path).stats(HOOK)
    assert reads
    reads.clear()
    again = actds.open(path).stats(HOOK)
    assert not reads and again.mean.tobytes() == first.mean.tobytes()
    for file in cache.rglob("stats.npz"):
        file.write_bytes(file.read_bytes()[:100])  # a cache that was cut
    assert actds.open(path).stats(HOOK).mean.tobytes() == first.mean.tobytes()
    assert reads
    reads.clear()
    actds.open(path).stats(HOOKS[1])
    assert reads


def test_an_interrupted_pass_continues_and_ends_the_same_to_the_bit(
    path: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = actds.open(path).stats(HOOK)
    order = list(reads)
    assert len(order) >= 4
    monkeypatch.setenv("ACTDS_CACHE", str(tmp_path / "second"))
    reads.clear()
    statistics = stats_module.shard_statistics

    def cut(*args: Any) -> Any:
        if len(reads) == 3:
            raise KeyboardInterrupt
        return statistics(*args)

    monkeypatch.setattr(stats_module, "shard_statistics", cut)
    with pytest.raises(KeyboardInterrupt):
        actds.open(path).stats(HOOK)
    monkeypatch.setattr(stats_module, "shard_statistics", statistics)
    reads.clear()
    continued = actds.open(path).stats(HOOK)
    assert reads and set(reads) < set(order)  # threads go on with what they have begun
    for name in ("mean", "variance", "norm_quantiles", "geometric_median"):
        assert getattr(continued, name).tobytes() == getattr(whole, name).tobytes()
    assert not [
        f for f in (tmp_path / "second").rglob("*") if f.is_file() and f.name != "stats.npz"
    ]


def test_a_cache_that_cannot_be_written_warns_and_changes_nothing(
    path: Path, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("ACTDS_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="statistics are not stored"):
        stats = actds.open(path).stats(HOOK)
    assert_stats(stats, rows)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    rng = np.random.default_rng(0)
    points = rng.standard_t(2, size=(300, 5)) + np.array([0, 5, -3, 100, 0])
    points[0] = 1e6

    def distance(at: np.ndarray[Any, Any]) -> float:
        return float(np.linalg.norm(points - at, axis=1).sum())

    ours = geometric_median(points)
    best = minimize(distance, np.median(points, axis=0), method="BFGS", tol=1e-10)
    assert np.allclose(ours, best.x, atol=1e-3)
    assert distance(ours) <= best.fun * (1 + 1e-9)
    same = np.tile(points[3], (7, 1))
    assert np.allclose(geometric_median(same), points[3])
    heavy = np.concatenate([np.tile(points[3], (50, 1)), points[4:20]])
    assert np.allclose(geometric_median(heavy), points[3])
    assert np.allclose(geometric_median(points[3:20], np.array([50.0] + [1.0] * 16)), points[3])


def weiszfeld(points: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the geometric median of rows that each count once, as Weiszfeld 1937 has it."""
    at = points.mean(axis=0)
    for _ in range(500):
        inverse = 1 / np.maximum(np.linalg.norm(points - at, axis=1), 1e-12)
        at = inverse @ points / inverse.sum()
    return at


@pytest.mark.parametrize("unit", ["counts", "shares"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_geometric_median_counts_a_row_as_often_as_it_comes(
    path: Path, rows: Any, unit: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right value is that of the rows repeated, each as a row of its own."""
    times = np.arange(len(rows)) % 3
    times[rows[:, 0] > np.quantile(rows[:, 0], 0.8)] = 40
    wanted, plain = weiszfeld(np.repeat(rows, times, axis=0)), weiszfeld(rows)
    dataset = actds.open(path)
    bounds = np.cumsum([0, *(shard.n_rows for shard in dataset.shards)])
    parts = [times[a:b] for a, b in itertools.pairwise(bounds)]
    if unit == "shares":
        parts = [part / times.sum() for part in parts]
    if sampled:  # half of the rows
        monkeypatch.setattr(stats_module, "SAMPLE_NBYTES", 4 * 16 * len(rows) // 2)
    stats = stats_of_rows(dataset.hooks[HOOK], dataset.shards, parts, key=f"{unit} {sampled}")
    away = float(np.linalg.norm(stats.geometric_median - wanted))
    scale = float(np.linalg.norm(plain - wanted))
    assert away < (0.2 * scale if sampled else 1e-4 * scale)


def test_the_sample_is_even_and_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = actds.open(path).stats(HOOK)
    assert whole.n_sampled == whole.count
    monkeypatch.setattr(stats_module, "SAMPLE_NBYTES", 4 * 16 * 100)
    monkeypatch.setenv("ACTDS_CACHE", str(path.parent / "other-cache"))
    sampled = actds.open(path).stats(HOOK)
    assert sampled.n_sampled == 100
    assert np.linalg.norm(sampled.geometric_median - whole.geometric_median) < whole.mean_norm / 3


def test_several_datasets_have_the_moments_of_all_rows(
    path: Path, tmp_path: Path, rows: Any
) -> None:
    other = make_dataset(tmp_path / "other", n_requests=9, seed=5, hooks=HOOKS, run="r-other")
    more = np.asarray(actds.open(other).array(HOOK)[:], np.float64)
    loader = actds.Loader([path, other], HOOK, batch=8)
    assert_stats(loader.stats()[HOOK], np.concatenate([rows, more]))


def test_a_saved_file_gives_the_same_statistics(path: Path, tmp_path: Path) -> None:
    stats = actds.open(path).stats(HOOK)
    stats.save(tmp_path / "stats.npz")
    again = Stats.load(tmp_path / "stats.npz")
    assert again.count == stats.count and again.mean.tobytes() == stats.mean.tobytes()
    with pytest.raises(FileNotFoundError):
        Stats.load(tmp_path / "none.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert actds.Loader(path, HOOK, batch=8, normalize={HOOK: again}).config["normalize"]


@pytest.fixture(scope="module", params=["row", "request"])
def thin(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a dataset of long first rows, and one with a quarter of most steps.

    By row all steps without a first row, by request those of many rows.
    """
    folder, schedule = tmp_path_factory.mktemp("thin"), simulate(300, 5, cache=False, budget=6)
    options: dict[str, Any] = {"hooks": [HOOK], "d_model": 8, "sinks": True, "rows_per_shard": 900}
    make_dataset(folder / "all", schedule=schedule, **options)
    shares = busy_shares(schedule, n_rows=5)
    if request.param == "row":
        places = [schedule.rows[name].to_pylist() for name in ("step", "position")]
        with_first = {step for step, position in zip(*places, strict=True) if position == 0}
        shares = dict.fromkeys(set(places[0]) - with_first, 0.25)
    return folder / "all", make_thinned(
        folder / f"by_{request.param}", schedule, shares, request.param, **options
    )


def weighted(path: Path, kept: str = "position >= 0") -> tuple[Any, Any]:
    """Return rows and 1 / inclusion of a thinned dataset, from the stored columns alone."""
    dataset = actds.open(path)
    tokens = dataset.tokens(columns=["position", "inclusion"])
    chosen = eval(kept, {"position": tokens["position"].to_numpy()})
    rows = np.asarray(dataset.array(HOOK)[:], np.float64)
    return rows[chosen], 1 / tokens["inclusion"].to_numpy()[chosen]


def assert_hajek(stats: Stats, rows: Any, w: Any) -> None:
    mean = w @ rows / w.sum()
    norms = np.linalg.norm(rows, axis=1)
    assert stats.count == len(rows)
    assert np.allclose(stats.mean, mean, rtol=1e-12, atol=1e-12)
    assert np.allclose(stats.variance, w @ (rows - mean) ** 2 / w.sum(), rtol=1e-12)
    assert np.isclose(stats.mean_norm, w @ norms / w.sum(), rtol=1e-7)
    assert np.isclose(stats.effective_rows, w.sum() ** 2 / (w**2).sum(), rtol=1e-12)
    order = np.argsort(norms, kind="stable")
    median = norms[order][np.searchsorted(np.cumsum(w[order]), w.sum() / 2)]
    assert np.isclose(stats.norms[0.5], median, rtol=1e-6)


def test_rows_that_were_drawn_count_for_those_that_were_not(thin: tuple[Path, Path]) -> None:
    whole, path = thin
    rows, w = weighted(path)
    assert set(w) == {1, 4} and actds.open(whole).n_rows > 1.5 * len(rows)
    stats, truth = actds.open(path).stats(HOOK), actds.open(whole).stats(HOOK)
    assert_hajek(stats, rows, w)
    assert truth.effective_rows == truth.count == actds.open(whole).n_rows
    norms = np.linalg.norm(rows, axis=1)
    spread = w * (norms - stats.mean_norm)
    request = actds.open(path).tokens(columns=["request"])["request"].to_numpy()
    error = np.sqrt((np.bincount(request, spread) ** 2).sum()) / w.sum()
    assert abs(stats.mean_norm - truth.mean_norm) < 3 * error
    assert np.allclose(stats.variance, truth.variance, rtol=0.3)
    if "by_row" in path.name:  # where each row counts alike, long ones are too many
        assert norms.mean() > 1.5 * truth.mean_norm and norms.mean() > truth.mean_norm + 10 * error


def test_weights_of_inclusion_count_in_what_a_loader_normalizes_by(
    thin: tuple[Path, Path],
) -> None:
    _, path = thin
    rows, w = weighted(path, "position < 9")
    options: dict[str, Any] = {"batch": 8, "where": "position < 9"}
    with pytest.warns(UserWarning, match=r"0\.25 to 1.* effective.* weights='inclusion'"):
        plain = actds.Loader(path, HOOK, **options)
    assert np.allclose(plain.stats()[HOOK].mean, rows.mean(axis=0), rtol=1e-9)  # as they come
    loader = actds.Loader(path, HOOK, weights="inclusion", **options)
    assert_hajek(loader.stats()[HOOK], rows, w)
    assert loader.sample is not None and loader.sample == plain.sample
    assert np.isclose(loader.sample.effective_rows, w.sum() ** 2 / (w**2).sum())
    assert np.isclose(loader.sample.n_represented, w.sum())
    assert loader.config["sample"]["effective_rows"] == loader.sample.effective_rows
    for text in (repr(loader), loader._repr_html_()):
        assert f"{loader.sample.effective_rows:,.0f} effective rows" in text
    # In proportion to it, rows need no weights: the same mean.
    often = actds.Loader(path, HOOK, frequency="1 / inclusion", **options)
    assert_hajek(often.stats()[HOOK], rows, w)
    scaled = actds.Loader(path, HOOK, weights="inclusion", normalize="norm", **options)
    scale = scaled.config["normalization"][HOOK]["scale"]
    mean_norm = w @ np.linalg.norm(rows, axis=1) / w.sum()
    assert np.allclose(scale, np.sqrt(8) / mean_norm, rtol=1e-6)


def test_rows_of_a_shard_count_as_often_as_served_over_inclusion(tmp_path: Path) -> None:
    schedule = simulate(120, 7)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule), hooks=[HOOK])
    weights = ["multiplicity", "inclusion"]
    options: dict[str, Any] = {"batch": 8, "weights": weights, "provenance": True}
    loader = actds.Loader(path, HOOK, drop_last=False, **options)
    batches = [(b.double().numpy(), rows["weight"]) for b, rows in loader]
    rows, w = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert len(rows) > actds.open(path).n_rows and set(w.tolist()) == {1, 4}
    mean = w @ rows / w.sum()
    assert np.allclose(loader.stats()[HOOK].mean, mean, rtol=1e-9, atol=1e-12)
    variance = w @ (rows - mean) ** 2 / w.sum()
    assert np.allclose(loader.stats()[HOOK].variance, variance, rtol=1e-9)


def test_equal_probabilities_change_no_statistics(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_requests": 20, "hooks": [HOOK], "rows_per_shard": 50}
    make_dataset(tmp_path / "a", **options)
    make_dataset(tmp_path / "b", facts={"replay.fraction": "0.25"}, **options)
    a, b = (actds.open(tmp_path / name) for name in "ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = actds.Loader(b, HOOK, batch=8)
    assert loader.sample is not None and not loader.sample.is_unequal
    assert loader.sample.n_represented == 4 * b.n_rows
    for stats in (b.stats(HOOK), loader.stats()[HOOK]):
        assert np.array_equal(stats.mean, a.stats(HOOK).mean)
