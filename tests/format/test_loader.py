"""The training loader, on small conforming datasets."""

from __future__ import annotations

import gc
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.format.arrays import from_torch
from actds.loader.loader import LoaderOptions
from actds.loader.order import ORDER_VERSION
from actds_testing.places import EXAMPLES
from actds_testing.synthetic import make_dataset
from actds_testing.weights_files import drawn_weights, write_weights_file

HOOKS = ("resid_post.0", "resid_post.1")
Key = tuple[str, int, int]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader") / "acts"
    make_dataset(folder, n_requests=40, seed=3, hooks=HOOKS, sealed=False, rows_per_shard=150)
    return make_dataset(folder, n_requests=30, seed=4, hooks=HOOKS, run="r-second")


@pytest.fixture(scope="module")
def dataset(path: Path) -> actds.Dataset:
    return actds.open(path)


@pytest.fixture(scope="module")
def weights(dataset: actds.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "weights.parquet"
    return write_weights_file(file, dataset, drawn_weights(dataset))


@pytest.fixture(scope="module")
def weight_of(dataset: actds.Dataset, weights: Path) -> dict[Key, float]:
    """Return the weight of each row by (run, request, position)."""
    drawn, found = drawn_weights(dataset), {}
    for shard in dataset.shards:
        tokens = shard.tokens().to_pydict()
        for i, weight in enumerate(drawn[shard.name].tolist()):
            found[shard.run, tokens["request"][i], tokens["position"][i]] = weight
    assert len(set(found.values())) > 0.9 * len(found)
    return found


@pytest.fixture(scope="module")
def truth(path: Path) -> dict[Key, tuple[bytes, ...]]:
    """Return token id, phase, step and the bytes of both hooks by (run, request, position)."""
    rows: dict[Key, tuple[Any, ...]] = {}
    for shard in actds.open(path).shards:
        tokens = shard.tokens().to_pydict()
        bits = [shard.array(hook).read_all() for hook in HOOKS]
        for i in range(shard.n_rows):
            key = (shard.run, tokens["request"][i], tokens["position"][i])
            assert key not in rows
            labels = (tokens["token_id"][i], tokens["phase"][i], tokens["step"][i])
            rows[key] = (*labels, *(b[i].tobytes() for b in bits))
    return rows


def keys(rows: dict[str, np.ndarray[Any, Any]]) -> list[Key]:
    columns = (rows["run"].tolist(), rows["request"].tolist(), rows["position"].tolist())
    return list(zip(*columns, strict=True))


def bits(batch: torch.Tensor) -> bytes:
    return from_torch(batch).tobytes()


def our_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("actds")]
    # What a remote store of another test reads ahead with ends with that store, and the heartbeat
    # of a chain that another test left open some seconds after it.
    return [name for name in names if not name.startswith(("actds-ahead", "actds-heartbeat"))]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert our_threads() == []


def test_every_keyword_is_documented_shown_and_typed(path: Path) -> None:
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(actds.Loader) or "", re.M)
    shown = inspect.signature(actds.Loader).parameters
    assert set(documented) - {"dataset", "datasets", "sample", "ActdsError"} == set(shown)
    assert set(shown) == {"source", "hooks", *LoaderOptions.__annotations__}
    with pytest.raises(TypeError, match="unexpected keyword argument 'wher'"):
        actds.Loader(path, wher="position > 3")  # type: ignore[call-arg]


@pytest.mark.parametrize("window_rows, lanes", [(1, 1), (128, 4), (65536, 8)])
def test_every_row_comes_once_per_epoch_with_its_own_states_and_labels(
    path: Path, truth: dict[Key, tuple[Any, ...]], window_rows: int, lanes: int
) -> None:
    loader = actds.Loader(
        path, batch=40, window_rows=window_rows, lanes=lanes, provenance=True, drop_last=False
    )
    seen: list[Key] = []
    for acts, rows in loader:
        assert list(acts) == list(HOOKS)
        assert all(a.dtype == torch.bfloat16 and a.shape[1] == 16 for a in acts.values())
        both = [from_torch(acts[hook]) for hook in HOOKS]
        for i, key in enumerate(keys(rows)):
            labels = tuple(rows[name][i].item() for name in ("token_id", "phase", "step"))
            assert truth[key] == (*labels, *(b[i].tobytes() for b in both))
        seen += keys(rows)
    assert sorted(seen) == sorted(truth)
    assert seen != sorted(seen)
    assert len(loader) == -(-len(truth) // 40)


def test_what_no_column_of_the_token_table_says_can_be_asked_for_alone(
    path: Path, truth: dict[Key, tuple[Any, ...]]
) -> None:
    loader = actds.Loader(path, batch=40, provenance=["run", "phase"], drop_last=False)
    seen = [pair for _, rows in loader for pair in zip(*map(list, rows.values()), strict=True)]
    assert sorted(seen) == sorted((key[0], labels[1]) for key, labels in truth.items())


def test_drop_last_leaves_out_the_remainder_and_other_rows_in_each_epoch(
    path: Path, truth: dict[Key, tuple[Any, ...]]
) -> None:
    loader = actds.Loader(path, batch=128, provenance=True, epochs=2)
    batches = [keys(rows) for _, rows in loader]
    assert [len(batch) for batch in batches] == [128] * len(loader)
    assert len(batches) == 2 * (len(truth) // 128)
    half = len(batches) // 2
    epochs = [{k for b in batches[:half] for k in b}, {k for b in batches[half:] for k in b}]
    assert loader.n_dropped == len(truth) % 128 > 0
    assert [len(truth) - len(epoch) for epoch in epochs] == [loader.n_dropped] * 2
    assert epochs[0] != epochs[1]


def test_what_no_batch_has_is_said_where_rows_are_counted(path: Path) -> None:
    with actds.Loader(path, HOOKS[0], batch=48) as loader:
        given = sum(len(batch) for batch in loader)
        left = loader.n_rows - given
        assert 0 < left < 48 and loader.config["dropped_per_epoch"] == left
        assert f"an epoch, which leaves out {left:,} rows>" in repr(loader)
        assert f"({left:,} rows in no batch)" in str(loader.progress)
        assert f"leaves out {left:,} rows" in loader._repr_html_()
    with actds.Loader(path, HOOKS[0], batch=48, drop_last=False) as loader:
        said = repr(loader) + str(loader.progress) + loader._repr_html_()
        assert "leaves out" not in said and "in no batch" not in said


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_state_goes_on_bit_exactly_on_another_world_size(
    dataset: actds.Dataset, drop_last: bool
) -> None:
    options: dict[str, Any] = {
        "hooks": HOOKS[0],
        "batch": 96,
        "window_rows": 128,
        "epochs": 2,
        "drop_last": drop_last,
        "seed": 11,
    }
    with actds.Loader(dataset, **options) as loader:
        whole = [bits(batch) for batch in loader]
    per_epoch = len(whole) // 2
    # In the first epoch, at its end, and in the second one.
    for at in (0, 3, per_epoch, per_epoch + 2):
        with actds.Loader(dataset, **options) as loader:
            for _ in range(at):
                next(loader)
            state = json.loads(json.dumps(loader.state_dict()))
        for world in (2, 8):
            parts = []
            for rank in range(world):
                part = actds.Loader(dataset, rank=rank, world=world, threads=1, **options)
                part.load_state_dict(state)
                parts.append([bits(batch) for batch in part])
            assert len({len(part) for part in parts}) == 1
            assert [b"".join(step) for step in zip(*parts, strict=True)] == whole[at:]


def test_a_loader_can_be_set_back_while_it_runs(path: Path) -> None:
    with actds.Loader(path, HOOKS[1], batch=64, epochs=None) as loader:
        start = loader.state_dict()
        first = [bits(next(loader)) for _ in range(5)]
        loader.load_state_dict(start)
        assert [bits(next(loader)) for _ in range(5)] == first
        with pytest.raises(TypeError):
            len(loader)


def test_threads_and_hooks_do_not_change_the_order_and_the_seed_does(path: Path) -> None:
    def order(**options: Any) -> list[Key]:
        loader = actds.Loader(path, batch=64, provenance=True, **options)
        return [key for _, rows in loader for key in keys(rows)]

    plain = order()
    assert plain == order(threads=5, hooks=HOOKS[1]) == order(hooks=HOOKS[::-1], drop_last=True)
    assert plain != order(seed=1)


def test_multiplicity_serves_every_row_as_often_as_the_engine_did(
    path: Path, truth: dict[Key, tuple[Any, ...]]
) -> None:
    # Told from the census, not from the multiplicity table that the loader reads.
    expected = Counter(dict.fromkeys(truth, 1))
    for span in actds.open(path).spans(run=True).to_pylist():
        if span["disposition"] == "cache_ref":
            for position in range(span["start"], span["stop"]):
                key = (span["run"], span["ref_request"], position)
                expected[key] += key in truth
    assert max(expected.values()) > 2
    loader = actds.Loader(
        path,
        batch=32,
        weights="multiplicity",
        provenance=True,
        drop_last=False,
        window_rows=64,
        phase="prefill",
    )
    seen: Counter[Key] = Counter()
    for acts, rows in loader:
        values = from_torch(acts[HOOKS[0]])
        for i, key in enumerate(keys(rows)):
            assert truth[key][3] == values[i].tobytes()
            seen[key] += 1
    assert seen == {key: n for key, n in expected.items() if truth[key][1] == "prefill"}


@pytest.mark.parametrize("window_rows, lanes", [(1, 1), (128, 4), (65536, 8)])
def test_every_row_comes_with_its_own_weight(
    path: Path,
    weights: Path,
    weight_of: dict[Key, float],
    truth: dict[Key, tuple[Any, ...]],
    window_rows: int,
    lanes: int,
) -> None:
    loader = actds.Loader(
        path,
        HOOKS[0],
        batch=40,
        weights=weights,
        window_rows=window_rows,
        lanes=lanes,
        provenance=True,
        drop_last=False,
        epochs=2,
    )
    seen: Counter[Key] = Counter()
    for acts, rows in loader:
        assert rows["weight"].dtype == np.float32 and rows["weight"].shape == (len(acts),)
        assert rows["weight"].tolist() == [weight_of[key] for key in keys(rows)]
        values = from_torch(acts)
        assert [truth[key][3] for key in keys(rows)] == [row.tobytes() for row in values]
        seen.update(keys(rows))
    assert seen == dict.fromkeys(truth, 2)


def test_weights_come_without_provenance_and_leave_order_and_rows_alone(
    path: Path, weights: Path
) -> None:
    plain = [bits(batch) for batch in actds.Loader(path, HOOKS[0], batch=64)]
    weighted = list(actds.Loader(path, HOOKS[0], batch=64, weights=str(weights)))
    assert [bits(acts) for acts, _ in weighted] == plain
    assert all(list(rows) == ["weight"] for _, rows in weighted)
    kept = [rows["weight"].copy() for _, rows in weighted]
    for _, rows in weighted:
        rows["weight"].fill(np.nan)
    again = [rows["weight"] for _, rows in actds.Loader(path, HOOKS[0], batch=64, weights=weights)]
    assert all(np.array_equal(a, b) for a, b in zip(kept, again, strict=True))


def test_weights_go_on_with_their_rows_on_another_world_size(
    dataset: actds.Dataset, weights: Path, weight_of: dict[Key, float]
) -> None:
    options: dict[str, Any] = {
        "hooks": HOOKS[0],
        "batch": 96,
        "window_rows": 128,
        "epochs": 2,
        "weights": weights,
        "provenance": True,
        "drop_last": False,
        "seed": 11,
    }
    with actds.Loader(dataset, **options) as loader:
        whole = [rows["weight"].tolist() for _, rows in loader]
    with actds.Loader(dataset, **options) as loader:
        for _ in range(3):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
    # Of eight ranks some have no row of the short last batch.
    for world in (2, 8):
        steps: list[list[float]] = [[] for _ in whole[3:]]
        for rank in range(world):
            part = actds.Loader(dataset, rank=rank, world=world, threads=3, **options)
            part.load_state_dict(state)
            for step, (_, rows) in zip(steps, part, strict=True):
                assert rows["weight"].dtype == np.float32
                assert rows["weight"].tolist() == [weight_of[key] for key in keys(rows)]
                step += rows["weight"].tolist()
        assert steps == whole[3:]


def test_multiplicity_and_a_weights_file_multiply(
    path: Path, weights: Path, weight_of: dict[Key, float]
) -> None:
    def served(asked: Any) -> list[tuple[Key, float | None]]:
        options: dict[str, Any] = {"batch": 32, "provenance": True, "drop_last": False}
        found: list[tuple[Key, float | None]] = []
        for _, rows in actds.Loader(path, HOOKS[0], weights=asked, **options):
            values = rows["weight"].tolist() if "weight" in rows else [None] * len(rows["run"])
            found += zip(keys(rows), values, strict=True)
        return found

    counted = served("multiplicity")
    assert max(Counter(key for key, _ in counted).values()) > 1
    for both in (["multiplicity", weights], (str(weights), "multiplicity")):
        assert served(both) == [(key, weight_of[key]) for key, _ in counted]


def test_a_phase_takes_its_part_of_the_weights(
    path: Path, weights: Path, weight_of: dict[Key, float]
) -> None:
    loader = actds.Loader(path, batch=16, phase="decode", weights=weights, provenance=True)
    for _, rows in loader:
        assert rows["weight"].tolist() == [weight_of[key] for key in keys(rows)]


def test_refuses_a_weights_file_of_another_dataset_and_a_state_of_another_file(
    path: Path, dataset: actds.Dataset, weights: Path, tmp_path: Path
) -> None:
    other = make_dataset(tmp_path / "acts", n_requests=6)
    with pytest.raises(actds.ActdsError, match="E018"):
        actds.Loader(other, batch=16, weights=weights)
    state = actds.Loader(path, batch=32, weights=weights).state_dict()
    file = write_weights_file(tmp_path / "w", dataset, drawn_weights(dataset, seed=1))
    for asked in (file, None):
        with pytest.raises(actds.ActdsError, match="E014 state weights_sha256"):
            actds.Loader(path, batch=32, weights=asked).load_state_dict(state)
    # A state from before there were weights files.
    del state["weights_sha256"]
    actds.Loader(path, batch=32).load_state_dict(state)


def test_a_trainer_may_keep_batches_and_write_into_them(path: Path) -> None:
    clean = [bits(batch) for batch in actds.Loader(path, HOOKS[0], batch=32, epochs=2)]
    kept = []
    for batch in actds.Loader(path, HOOKS[0], batch=32, epochs=2):
        kept.append(batch.clone())
        batch.fill_(torch.nan)
    assert [bits(batch) for batch in kept] == clean
    batches = list(actds.Loader(path, HOOKS[0], batch=32, epochs=2))
    assert [bits(batch) for batch in batches] == clean


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_come_as_they_are(tmp_path: Path, dtype: Any) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6, dtype=dtype, hooks=HOOKS[:1])
    # With one hook the batch is a tensor without being asked for by name.
    batches = list(actds.Loader(path, batch=16, drop_last=False))
    assert all(batch.dtype == getattr(torch, dtype) for batch in batches)
    stored = np.concatenate([s.array(HOOKS[0]).read_all() for s in actds.open(path).shards])
    served = np.concatenate([from_torch(batch) for batch in batches])
    assert sorted(map(bytes, served)) == sorted(map(bytes, stored))


def test_a_phase_is_read_alone(path: Path, truth: dict[Key, tuple[Any, ...]]) -> None:
    loader = actds.Loader(path, batch=16, phase="decode", provenance=True, drop_last=False)
    seen = [key for _, rows in loader for key in keys(rows)]
    assert sorted(seen) == sorted(key for key in truth if truth[key][1] == "decode")


@pytest.mark.parametrize(
    "options, place",
    [
        ({"hooks": "resid_post.9"}, "hooks"),
        ({"hooks": []}, "hooks"),
        ({"hooks": [HOOKS[0], HOOKS[0]]}, "hooks"),
        ({"phase": "both"}, "phase"),
        ({"weights": "served"}, "weights"),
        ({"weights": 2.5}, "weights"),
        ({"weights": []}, "weights"),
        ({"weights": ["multiplicity", "multiplicity"]}, "weights"),
        ({"weights": [Path("a"), Path("b")]}, "weights"),
        ({"batch": 0}, "batch"),
        ({"batch": 10**6}, "batch"),
        ({"batch": 2.5}, "batch"),
        ({"lanes": 3, "batch": 32}, "lanes"),
        ({"world": 3}, "world"),
        ({"rank": 2, "world": 2}, "rank"),
        ({"seed": -1}, "seed"),
        ({"epochs": 0}, "epochs"),
        ({"threads": 0}, "threads"),
        ({"window_rows": True}, "window_rows"),
    ],
)
def test_refuses_an_argument_that_cannot_be_used(
    path: Path, options: dict[str, Any], place: str
) -> None:
    with pytest.raises(actds.ActdsError) as caught:
        actds.Loader(path, **{"batch": 32, **options})
    assert (caught.value.code, caught.value.place) == ("E014", place)


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch": 64}, {"phase": "prefill"}, {"window_rows": 9}]
)
def test_refuses_the_state_of_another_order(path: Path, change: dict[str, Any]) -> None:
    state = actds.Loader(path, batch=32).state_dict()
    with pytest.raises(actds.ActdsError, match="E014 state"):
        actds.Loader(path, **{"batch": 32, **change}).load_state_dict(state)
    with pytest.raises(actds.ActdsError, match="E014 state"):
        actds.Loader(path, batch=32).load_state_dict({})


def test_refuses_the_state_of_an_older_order_and_goes_on_as_it_stood(path: Path) -> None:
    with actds.Loader(path, batch=32) as loader:
        state = loader.state_dict()
        assert state["order"] == loader.config["order"] == ORDER_VERSION
        for order in (1, None, ORDER_VERSION + 1):
            with pytest.raises(actds.ActdsError, match="E014 state order"):
                loader.load_state_dict({**state, "order": order, "step": 1})
        assert loader.state_dict() == state


def test_refuses_an_unsealed_dataset_unless_told_in_so_many_words(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6, sealed=False)
    with pytest.raises(actds.ActdsError, match="E306"):
        actds.Loader(path, batch=16)
    with pytest.warns(UserWarning):
        loader = actds.Loader(path, batch=16, i_accept_unsealed=True)
    assert len(list(loader)) > 0


def test_refuses_a_shard_without_provenance(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6)
    shutil.rmtree(path / "runs")
    with pytest.raises(actds.ActdsError) as caught:
        actds.Loader(path, batch=16)
    assert caught.value.code in ("E104", "E401")


def test_damage_reaches_the_trainer_and_ends_the_threads(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=20)
    for file in path.glob("shards/*/acts.zarr/resid_post.1/c/0/0"):
        data = bytearray(file.read_bytes())
        data[40] ^= 1
        file.write_bytes(data)
    loader = actds.Loader(path, batch=16, epochs=None)
    for _ in range(2):
        with pytest.raises(actds.ActdsError, match="E204 shards/"):
            next(loader)
    loader.close()
    assert our_threads() == []
    assert list(actds.Loader(path, "resid_post.0", batch=16))


def test_threads_end_with_the_loader_however_it_ends(path: Path) -> None:
    with actds.Loader(path, batch=32, epochs=None) as loader:
        next(loader)
        assert our_threads()
    assert our_threads() == []
    for use in (next, iter):
        with pytest.raises(ValueError, match="closed"):
            use(loader)
    loader.close()

    list(actds.Loader(path, batch=32))
    assert our_threads() == []

    loader = actds.Loader(path, batch=32, epochs=None)
    next(loader)
    del loader
    gc.collect()
    assert our_threads() == []


def test_examples_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_example(name: str, *arguments: str) -> str:
        # In this process: an import of torch takes longer than all of them.
        monkeypatch.setattr(sys, "argv", [name, str(path), *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    def losses(name: str, *arguments: str) -> list[float]:
        lines = run_example(name, "--steps", "40", "--batch", "64", *arguments).splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]

    for name, *arguments in (
        ["sae.py"],
        ["transcoder.py", "--lr", "0.01"],
        ["crosscoder.py", "--latents", "64", "--lr", "0.01"],
    ):
        told = losses(name, *arguments)
        assert len(told) == 11 and told[-1] < 0.9 * told[0], name
    labels = tmp_path / "labels.csv"
    labels.write_text("id,label\n" + "".join(f"prompt-{n},{n % 2}\n" for n in range(40)))
    assert "held-out requests" in run_example("probe.py", "--labels", str(labels))
    assert "goes on with the same rows: True" in run_example("load_batches.py")


@pytest.mark.standard
def test_a_program_that_forgets_to_close_still_ends(path: Path) -> None:
    code = (
        "import actds, sys\n"
        "loader = actds.Loader(sys.argv[1], batch=32, epochs=None)\n"
        "print(len(next(loader)['resid_post.0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "32\n", "")
