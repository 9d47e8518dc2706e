"""Decode steps of a real engine with and without probes, all ways in one eager engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench_probes import by_the_clock, on_paper
from probe_cost import Arm, Timing, TimingTask, fit
from probe_timing import time_probes

import actds
from actds.dataset.reading import read_catalog
from actds.store import open_store
from actds_testing import harvest as h
from actds_testing.tiny import make_random_model
from actds_writers.capture.hooks import hook_specs, parse_hooks
from actds_writers.ipc.messages import HookSpec
from actds_writers.model_folder import model_config

pytestmark = [pytest.mark.engine, pytest.mark.full]

EAGER = {"enforce_eager": True, "dtype": "float32"}
ARMS = (
    Arm("none"),
    Arm("again"),
    Arm("packed", 0),
    Arm("packed", 5),
    Arm("naive", 0),
    Arm("naive", 3),
)
BATCHES, N_ROUNDS = (1, 2), 2


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in h.ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("probes") / "model", n_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datasets")


def hooks_of(model: Path) -> tuple[HookSpec, ...]:
    return hook_specs(parse_hooks("resid_post:0,1", 2), model_config(model), "float32")


@pytest.fixture(scope="module")
def timing(model: Path, folder: Path) -> Timing:
    task = TimingTask(model, EAGER, hooks_of(model), ARMS, BATCHES, N_ROUNDS, folder)
    said: list[str] = []
    found = time_probes(task, said.append)
    assert len(said) == N_ROUNDS and said[-1].startswith("round 2: ")
    return found


def test_every_way_is_timed_in_every_round_at_every_batch(timing: Timing) -> None:
    at = [(one.arm, one.batch, one.round) for one in timing.timed]
    wanted = {(arm, batch, n) for arm in ARMS for batch in BATCHES for n in range(N_ROUNDS)}
    assert len(at) == len(wanted) and set(at) == wanted
    assert all(0 < one.wall < 60 and 0 < one.cpu < 60 for one in timing.timed)
    assert timing.facts["mode"] == "eager" and timing.facts["dtype"] == "float32"
    assert timing.facts["engine"].startswith("vllm ")
    for batch in BATCHES:
        for way in ("packed", "naive"):
            found = fit(timing.timed, way, batch)
            assert all(
                map(math.isfinite, (found.s.value, found.m.low, found.m.high, found.noise.low))
            )


@pytest.mark.parametrize("n_probes", [0, 5])
def test_the_scores_that_were_timed_are_products_of_the_rows_that_were_captured(
    timing: Timing, folder: Path, n_probes: int
) -> None:
    (place,) = folder.glob(f"acts-{n_probes}-*")
    catalog = read_catalog(open_store(place))
    (run,) = catalog.runs_with_data
    readouts = catalog.table("readouts", run)
    # Warm-up and rounds: 16 prompt tokens, and all 16 generated ones but the last are fed.
    n_tokens = (N_ROUNDS * sum(BATCHES) + BATCHES[0]) * (16 + 15)
    assert readouts.num_rows == 2 * n_tokens
    assert sum(shard.n_rows for shard in catalog.shards) == n_tokens
    if n_probes:
        assert_scores(folder, n_probes)


def assert_scores(folder: Path, n_probes: int) -> None:
    """Compare the stored scores with products of the stored rows."""
    (place,) = folder.glob(f"acts-{n_probes}-*")
    probes = np.load(folder / f"probes-{n_probes}.npy")
    assert probes.shape == (2, n_probes, 64)
    actds.seal(place)
    dataset = actds.open(place)
    tokens = dataset.tokens().to_pandas()
    said = dataset.readouts().to_pandas().set_index(["hook", "request", "position"])
    for i, hook in enumerate(("resid_post.0", "resid_post.1")):
        rows = np.asarray(dataset.array(hook)[:], np.float32)
        mine = said.loc[hook].loc[list(zip(tokens.request, tokens.position, strict=True))]
        scores = np.stack(mine["probes"].to_numpy())
        np.testing.assert_allclose(scores, rows @ probes[i].T, rtol=1e-4, atol=1e-4)


def test_a_measurement_has_a_line_for_each_way_and_leaves_nothing_behind(
    model: Path, tmp_path: Path
) -> None:
    found = by_the_clock(
        on_paper(model, 20, "resid_post:1", batches=[2]), model, EAGER, 5, tmp_path
    )
    assert not list(tmp_path.iterdir())
    assert {(one.way, one.clock) for one in found.fits} == {
        (way, clock) for way in ("packed", "naive") for clock in ("wall", "cpu")
    }
    measured = found.as_json()["probes"]["measured"]
    assert [len(line["ratios"]) for line in measured["fits"]] == [4, 3, 4, 3]
    text = "\n".join(found.lines())
    assert "T(N) / T(0) = 1 + s + m N" in text and "naive, batch 2, CPU time" in text


def test_a_compiled_engine_has_the_probes_in_its_graph(model: Path, tmp_path: Path) -> None:
    task = TimingTask(
        model, {"dtype": "float32"}, hooks_of(model),
        (Arm("none"), Arm("packed", 3), Arm("naive", 2)),
        (2,), 1, tmp_path,
    )  # fmt: skip
    found = time_probes(task, lambda line: None)
    assert {one.arm for one in found.timed} == set(task.arms)
    assert found.facts["mode"] == "compiled"
    assert_scores(tmp_path, 3)
