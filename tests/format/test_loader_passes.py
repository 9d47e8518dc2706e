"""The loader as the loops of a trainer use it: passes, what they leave out, what they are."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.format.arrays import from_torch
from actds.format.readouts import Readouts
from actds.loader.filters import FILTERS
from actds_testing.synthetic import make_dataset
from actds_testing.weights_files import drawn_weights, write_weights_file

HOOKS = ("resid_post.0", "resid_post.1")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two runs whose first positions are flagged, served often and of huge norm."""
    folder = tmp_path_factory.mktemp("passes") / "acts"
    common: dict[str, Any] = {"readouts": Readouts(1, seed=0), "sinks": True, "hooks": HOOKS}
    make_dataset(folder, n_requests=40, seed=3, sealed=False, rows_per_shard=150, **common)
    return make_dataset(folder, n_requests=30, seed=4, run="r-second", **common)


def bits(batch: torch.Tensor) -> bytes:
    return from_torch(batch).tobytes()


def rows_of(batches: list[torch.Tensor]) -> list[bytes]:
    return sorted(row.tobytes() for batch in batches for row in from_torch(batch))


def test_every_for_is_a_full_pass_in_a_new_order(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64, drop_last=False)
    passes = [list(loader) for _ in range(3)]
    assert [len(batches) for batches in passes] == [len(loader)] * 3
    assert len({bits(batches[0]) for batches in passes}) == 3
    everything = rows_of(passes[0])
    assert all(rows_of(batches) == everything for batches in passes)
    # The passes are the epochs of one longer pass.
    whole = list(actds.Loader(path, HOOKS[0], batch=64, drop_last=False, epochs=3))
    assert [bits(b) for b in whole] == [bits(b) for batches in passes for b in batches]


def test_a_pass_that_was_left_early_is_followed_by_a_full_one(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64)
    for step, _ in enumerate(loader):  # what a trainer does to estimate a norm
        if step == 2:
            break
    assert len(list(loader)) == len(loader)
    next(loader)  # a peek begins a pass, and so is not part of the next one
    assert len(list(loader)) == len(loader)


def test_a_pass_of_several_epochs_keeps_its_length(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64, epochs=2)
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader) == 2 * loader.batches_per_epoch
    four = list(actds.Loader(path, HOOKS[0], batch=64, epochs=4))
    assert [bits(b) for b in first + second] == [bits(b) for b in four]


def test_next_ends_with_its_pass_and_then_begins_another(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64)
    passes = []
    for _ in range(2):
        taken = []
        with pytest.raises(StopIteration):
            while True:
                taken.append(bits(next(loader)))
        passes.append(taken)
    assert [len(taken) for taken in passes] == [len(loader)] * 2
    assert passes[0] != passes[1]


def test_an_endless_loader_goes_on_in_every_for(path: Path) -> None:
    n = actds.Loader(path, HOOKS[0], batch=64).batches_per_epoch
    whole = [bits(b) for b in actds.Loader(path, HOOKS[0], batch=64, epochs=3)]
    with actds.Loader(path, HOOKS[0], batch=64, epochs=None) as loader:
        taken = []
        for size in (2, n, n):
            for batch, _ in zip(loader, range(size), strict=False):
                taken.append(bits(batch))
                if len(taken) in (2, n + 2):
                    break
        assert taken == whole[: len(taken)]
        assert len(taken) > n + 2


def test_an_iterator_keeps_its_loader_and_one_that_was_left_behind_says_so(path: Path) -> None:
    alone = iter(actds.Loader(path, HOOKS[0], batch=64))
    assert iter(alone) is alone
    assert len(list(alone)) == len(actds.Loader(path, HOOKS[0], batch=64))
    assert list(alone) == []  # an iterator ends for good, a loader does not
    loader = actds.Loader(path, HOOKS[0], batch=64)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(RuntimeError, match="outdated"):
        next(old)
    assert len(list(new)) == len(loader)
    with pytest.raises(RuntimeError, match="outdated"):
        list(zip(loader, loader, strict=True))


def test_two_loops_over_one_iterator_are_told_that_they_shared_its_batches(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64)
    n = len(loader)

    def taken(batches: Any, at_most: int) -> int:
        return sum(1 for _ in zip(range(at_most), batches, strict=False))

    shared = iter(loader)
    # zip asks for a number first, so that it takes no batch more than it gives.
    assert taken(shared, 3) == 3
    with pytest.warns(UserWarning, match=f"of the {n} batches .* first .* took 3 and"):
        assert taken(shared, 10**6) == n - 3
    eaten = iter(loader)
    assert taken(eaten, n + 1) == n
    with pytest.warns(UserWarning, match=f"of the {n} batches .* first .* took {n} and"):
        assert taken(eaten, 1) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(loader, 3) == 3 and taken(loader, 10**6) == n  # each is a pass
        peeked = iter(loader)
        next(peeked)
        assert taken(peeked, 10**6) == n - 1
        parts = iter(loader)
        sizes = []
        while size := taken(parts, max(1, n // 3)):
            sizes.append(size)
        assert sum(sizes) == n and len(sizes) > 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_state_of_any_pass_goes_on_on_another_world_size(path: Path, epochs: int) -> None:
    options: dict[str, Any] = {"hooks": HOOKS[0], "batch": 96, "epochs": epochs}
    loader = actds.Loader(path, **options)
    passes = [[bits(b) for b in loader] for _ in range(3)]
    n = len(passes[0])
    for number, at in ((0, 0), (0, n - 1), (1, 3), (1, n)):
        loader = actds.Loader(path, **options)
        for _ in range(number):
            assert len(list(loader)) == n
        it = iter(loader)
        for _ in range(at):
            next(it)
        state = json.loads(json.dumps(loader.state_dict()))
        parts = []
        for rank in range(2):
            part = actds.Loader(path, rank=rank, world=2, **options)
            part.load_state_dict(state)
            parts.append([[bits(b) for b in part], [bits(b) for b in part]])
        joined = [
            [b"".join(both) for both in zip(*p, strict=True)] for p in zip(*parts, strict=True)
        ]
        # The rest of its pass, then a whole one. Behind the last batch the next pass stands.
        rest = passes[number][at:] or passes[number + 1]
        assert joined[0] == rest
        assert len(joined[1]) == n


def test_a_state_from_before_there_were_passes_goes_on(path: Path) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64, epochs=2)
    whole = [bits(b) for b in loader]
    early = actds.Loader(path, HOOKS[0], batch=64, epochs=2)
    next(early)
    state = early.state_dict()
    del state["pass_start"], state["exclude"]
    again = actds.Loader(path, HOOKS[0], batch=64, epochs=2)
    again.load_state_dict(state)
    assert [bits(b) for b in again] == whole[1:]


@pytest.mark.standard
def test_a_loader_in_several_workers_is_refused_unless_each_is_a_rank(path: Path) -> None:
    class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
        def __init__(self, split: bool) -> None:
            self._split = split

        def __iter__(self) -> Iterator[torch.Tensor]:
            info = torch.utils.data.get_worker_info()
            place = {"rank": info.id, "world": info.num_workers} if self._split else {}
            return iter(actds.Loader(path, HOOKS[0], batch=64, threads=1, **place))

    def served(split: bool) -> list[torch.Tensor]:
        return list(torch.utils.data.DataLoader(Rows(split), batch_size=None, num_workers=2))

    # torch tells the error of a worker in one of its own.
    with pytest.raises(RuntimeError, match=r"E014 world[\s\S]*num_workers=0"):
        served(split=False)
    assert rows_of(served(split=True)) == rows_of(list(actds.Loader(path, HOOKS[0], batch=64)))


@pytest.mark.parametrize("n_workers", [0, pytest.param(2, marks=pytest.mark.standard)])
def test_a_data_loader_is_given_no_batch_by_number(path: Path, n_workers: int) -> None:
    loader = actds.Loader(path, HOOKS[0], batch=64)
    given = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=n_workers)
    with pytest.raises(
        Exception, match=r"E014 loader: batch 0 by number[\s\S]*for batch in loader"
    ):
        next(iter(given))

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(loader)

    if not n_workers:  # as the error says
        served = list(torch.utils.data.DataLoader(Batches(), batch_size=None))
        assert rows_of(served) == rows_of(list(actds.Loader(path, HOOKS[0], batch=64)))


@pytest.mark.parametrize("state", [{}, None, "", []])
def test_no_state_is_refused(path: Path, state: Any) -> None:
    with (
        actds.Loader(path, HOOKS[0], batch=64) as loader,
        pytest.raises(actds.ActdsError, match=r"E014 state: .*; expected what state_dict"),
    ):
        loader.load_state_dict(state)


@pytest.mark.standard
def test_a_loader_without_torch_says_so_when_it_is_made(path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import actds\n"
        f"print(actds.open({str(path)!r}).array({HOOKS[0]!r})[:3].shape)\n"
        f"actds.Loader({str(path)!r}, batch=8)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "(3, 16)\n" and done.returncode == 1
    assert "E011 actds.Loader: the package torch is not installed" in done.stderr
    assert "the extra torch of actds" in done.stderr


def test_float32_batches_have_the_same_values(path: Path) -> None:
    stored = list(actds.Loader(path, batch=64))
    wide = list(actds.Loader(path, batch=64, dtype="float32"))
    for a, b in zip(stored, wide, strict=True):
        assert all(b[h].dtype == torch.float32 and b[h].equal(a[h].float()) for h in HOOKS)


def truth(path: Path) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = actds.open(path).tokens(run=True).to_pydict()
    found["norm"] = np.linalg.norm(
        np.concatenate(
            [s.array(HOOKS[0]).read_all().astype(np.uint32) << 16 for s in actds.open(path).shards]
        ).view(np.float32),
        axis=1,
    ).tolist()
    return found


def keys(path: Path, **options: Any) -> tuple[Counter[tuple[str, int, int]], actds.Loader]:
    loader = actds.Loader(path, HOOKS[0], batch=8, provenance=True, drop_last=False, **options)
    seen: Counter[tuple[str, int, int]] = Counter()
    for _, rows in loader:
        columns = (rows["run"].tolist(), rows["request"].tolist(), rows["position"].tolist())
        seen.update(zip(*columns, strict=True))
    return seen, loader


@pytest.mark.parametrize("name", ["special", "bos", "first_position", "sink"])
def test_rows_are_left_out_by_name_and_counted(path: Path, name: str) -> None:
    told = truth(path)
    everything = list(zip(told["run"], told["request"], told["position"], strict=True))
    middle = float(np.median(told["norm"]))
    out = {
        "special": [flags & 1 for flags in told["flags"]],
        "bos": [flags & 2 for flags in told["flags"]],
        "first_position": [position == 0 for position in told["position"]],
        "sink": [norm > 10 * middle for norm in told["norm"]],
    }[name]
    expected = Counter(key for key, gone in zip(everything, out, strict=True) if not gone)
    assert 5 < len(everything) - len(expected) < len(everything) / 2
    seen, loader = keys(path, exclude=name)
    assert seen == expected
    assert loader.excluded == {name: len(everything) - len(expected)}
    counted, _ = keys(path, exclude=[name], weights="multiplicity")
    served, _ = keys(path, weights="multiplicity")
    assert counted == Counter({key: n for key, n in served.items() if key in expected})
    assert max(counted.values()) > 1


def test_one_sink_served_to_everybody_no_longer_makes_the_variance(path: Path) -> None:
    def variance(**options: Any) -> float:
        loader = actds.Loader(
            path, HOOKS[0], batch=8, drop_last=False, weights="multiplicity", **options
        )
        return float(torch.cat(list(loader)).double().var(0).mean())

    # The mean square of a synthetic channel is 2, but for the sinks.
    assert variance() > 100
    for exclude in ("first_position", "sink", ("special", "sink")):
        assert abs(variance(exclude=exclude) - 2) < 0.2


def test_order_and_state_know_what_is_left_out(path: Path) -> None:
    options: dict[str, Any] = {"hooks": HOOKS[0], "batch": 32}
    loader = actds.Loader(path, exclude=("sink", "bos"), **options)
    assert loader.config["exclude"] == ["bos", "sink"]
    state = loader.state_dict()
    whole = [bits(b) for b in loader]
    assert whole == [bits(b) for b in actds.Loader(path, exclude=("bos", "sink"), **options)]
    again = actds.Loader(path, exclude=("sink", "bos"), **options)
    again.load_state_dict(state)
    assert [bits(b) for b in again] == whole
    for other in ((), "bos", tuple(FILTERS)[:2]):
        with pytest.raises(actds.ActdsError, match="E014 state exclude"):
            with_other = actds.Loader(path, exclude=other, **options)
            with_other.load_state_dict(state)


def test_refuses_names_that_are_none_and_says_when_one_finds_nothing(
    path: Path, tmp_path: Path
) -> None:
    with pytest.raises(actds.ActdsError, match=r"E014 exclude[\s\S]*first_position"):
        actds.Loader(path, batch=8, exclude="padding")
    with pytest.warns(UserWarning, match="'eos' leaves out no row"):
        loader = actds.Loader(path, batch=8, exclude="eos")
    assert loader.excluded == {"eos": 0}
    plain = make_dataset(tmp_path / "acts", n_requests=4)
    with pytest.raises(actds.ActdsError, match=r"E014 exclude[\s\S]*no norm readouts"):
        actds.Loader(plain, batch=8, exclude="sink")


def test_refuses_sinks_where_a_row_has_no_readout(path: Path, monkeypatch: Any) -> None:
    dataset = actds.open(path)
    whole = dataset.catalog.table

    def cut(self: Any, name: Any, run: str | None = None) -> Any:
        table = whole(name, run)
        return table.slice(0, len(table) // 3) if name == "readouts" else table

    monkeypatch.setattr(type(dataset.catalog), "table", cut)
    with pytest.raises(actds.ActdsError, match="E416 shards/"):
        actds.Loader(dataset, HOOKS[0], batch=8, exclude="sink")


def test_a_config_says_what_the_batches_are(path: Path, tmp_path: Path) -> None:
    dataset = actds.open(path)
    file = write_weights_file(tmp_path / "w.parquet", dataset, drawn_weights(dataset))
    loader = actds.Loader(
        path, HOOKS[1], batch=32, seed=5, phase="prefill", weights=["multiplicity", file],
        exclude="sink", epochs=2,
    )  # fmt: skip
    config = json.loads(json.dumps(loader.config, allow_nan=False))
    assert config == loader.config
    assert config["digest"] == dataset.digest and config["sealed"] is True
    said = [
        {name: record.fields[f"model.{name}"].value for name in ("name", "weights_sha256")}
        for record in dataset.runs.values()
    ]
    assert config["models"] == [one for i, one in enumerate(said) if one not in said[:i]] != []
    assert config["hooks"] == [HOOKS[1]] and config["seed"] == 5 and config["phase"] == "prefill"
    assert config["multiplicity"] is True and len(config["weights_sha256"]) == 64
    assert config["excluded"] == loader.excluded and config["runs"] == sorted(dataset.runs)
    assert config["rows_per_epoch"] == sum(
        len(acts) for acts, _ in actds.Loader(
            path, HOOKS[1], batch=32, phase="prefill", weights=["multiplicity", file],
            exclude="sink", drop_last=False,
        )
    )  # fmt: skip
    # What a config says is enough to make the same batches again.
    names = ("batch", "seed", "phase", "exclude", "lanes", "window_rows", "epochs")
    again = actds.Loader(
        config["dataset"], config["hooks"], weights=["multiplicity", file],
        **{name: config[name] for name in names},
    )  # fmt: skip
    for (a, _), (b, _) in zip(loader, again, strict=True):
        assert bits(a) == bits(b)
