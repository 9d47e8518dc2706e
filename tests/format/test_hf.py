"""HF ``datasets`` objects over a dataset."""

from __future__ import annotations

import os
import runpy
import sys
from collections import Counter
from collections.abc import Iterable

from actds_testing.places import EXAMPLES, ROOT

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node

import actds
from actds.format.arrays import from_torch
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned
from actds_testing.weights_files import drawn_weights, write_weights_file

HOOKS = ("resid_post.0", "resid_post.1")
LABELS = ("run", "request", "position", "token_id", "phase", "step")
datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(
        tmp_path_factory.mktemp("hf") / "acts", n_requests=12, hooks=HOOKS, rows_per_shard=50
    )


@pytest.fixture(scope="module")
def truth(path: Path) -> list[tuple[Any, ...]]:
    """Return the bytes of both hooks and the labels of every row, in the order of the shards."""
    rows: list[tuple[Any, ...]] = []
    for shard in actds.open(path).shards:
        bits = [shard.array(hook).read_all() for hook in HOOKS]
        for i, labels in enumerate(shard.tokens(list(LABELS[1:])).to_pylist()):
            acts = (b[i].tobytes() for b in bits)
            rows.append((*acts, shard.run, *(labels[name] for name in LABELS[1:])))
    return rows


def told(example: dict[str, Any]) -> tuple[Any, ...]:
    """Return an example as ``truth`` has it."""
    assert all(example[hook].dtype == torch.bfloat16 for hook in HOOKS)
    labels = (example[name] for name in LABELS)
    values = (x.item() if isinstance(x, torch.Tensor) else x for x in labels)
    return (*(from_torch(example[hook]).tobytes() for hook in HOOKS), *values)


def test_a_stream_gives_every_row_without_widening_it(
    path: Path, truth: list[tuple[Any, ...]]
) -> None:
    stream = actds.load_dataset(path, streaming=True)
    assert [told(example) for example in stream] == truth
    assert stream.num_shards == len(actds.open(path).shards)


def test_a_stream_of_chunks_gives_the_same_rows(path: Path, truth: list[tuple[Any, ...]]) -> None:
    stream = actds.load_dataset(
        path, streaming=True, batched_chunks=True, hooks=HOOKS[1], columns=["position"]
    )
    chunks = list(stream)
    assert all(chunk[HOOKS[1]].dtype == torch.bfloat16 for chunk in chunks)
    rows = np.concatenate([from_torch(chunk[HOOKS[1]]) for chunk in chunks])
    positions = np.concatenate([chunk["position"] for chunk in chunks])
    assert set(chunks[0]) == {HOOKS[1], "position"}
    assert [row.tobytes() for row in rows] == [row[1] for row in truth]
    assert positions.tolist() == [row[4] for row in truth]


@pytest.fixture(scope="module")
def weights(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = actds.open(path)
    file = tmp_path_factory.mktemp("weights") / "weights.parquet"
    return write_weights_file(file, dataset, drawn_weights(dataset))


@pytest.fixture(scope="module")
def stored_weights(path: Path) -> np.ndarray[Any, Any]:
    """Return the weight of every row, in the order of the shards."""
    dataset = actds.open(path)
    drawn = drawn_weights(dataset)
    return np.concatenate([drawn[shard.name] for shard in dataset.shards])


def test_examples_of_a_stream_come_with_their_weights(
    path: Path, weights: Path, truth: list[tuple[Any, ...]], stored_weights: np.ndarray[Any, Any]
) -> None:
    stream = actds.load_dataset(path, streaming=True, weights=weights)
    examples = list(stream)
    assert [told(example) for example in examples] == truth
    assert [example["weight"] for example in examples] == stored_weights.tolist()
    chunks = list(
        actds.load_dataset(path, streaming=True, batched_chunks=True, columns=[], weights=weights)
    )
    assert set(chunks[0]) == {*HOOKS, "weight"}
    assert all(chunk["weight"].dtype == np.float32 for chunk in chunks)
    assert np.array_equal(np.concatenate([chunk["weight"] for chunk in chunks]), stored_weights)
    again = actds.load_dataset(path, streaming=True, weights=str(weights))
    for number, _ in enumerate(stream, 1):
        if number == 77:
            break
    again.load_state_dict(stream.state_dict())
    assert [example["weight"] for example in again] == stored_weights[77:].tolist()


@pytest.mark.standard
def test_data_loader_workers_keep_weights_beside_their_rows(
    path: Path, weights: Path, truth: list[tuple[Any, ...]], stored_weights: np.ndarray[Any, Any]
) -> None:
    stream = actds.load_dataset(path, streaming=True, hooks=HOOKS[0], columns=[], weights=weights)
    loader = torch.utils.data.DataLoader(stream.shuffle(seed=1), batch_size=16, num_workers=2)
    batches = list(loader)
    assert all(batch["weight"].dtype == torch.float32 for batch in batches)
    served = [
        (row.tobytes(), weight)
        for batch in batches
        for row, weight in zip(from_torch(batch[HOOKS[0]]), batch["weight"].tolist(), strict=True)
    ]
    expected = list(zip((row[0] for row in truth), stored_weights.tolist(), strict=True))
    assert served != expected
    assert sorted(served) == sorted(expected)


def test_map_style_rows_come_with_their_weights_and_another_file_is_another_cache(
    path: Path,
    weights: Path,
    truth: list[tuple[Any, ...]],
    stored_weights: np.ndarray[Any, Any],
    tmp_path: Path,
) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path, weights=weights)
    assert rows[:]["weight"].dtype == torch.float32
    assert np.array_equal(rows[:]["weight"].numpy(), stored_weights)
    shuffled = [(told(e), e["weight"].item()) for e in rows.shuffle(seed=0)]
    assert sorted(shuffled) == sorted(zip(truth, stored_weights.tolist(), strict=True))
    dataset = actds.open(path)
    drawn = drawn_weights(dataset, seed=1)
    file = write_weights_file(tmp_path / "w.parquet", dataset, drawn)
    others = actds.load_dataset(path, cache_dir=tmp_path, weights=file)
    expected = np.concatenate([drawn[shard.name] for shard in dataset.shards])
    assert np.array_equal(others[:]["weight"].numpy(), expected)
    assert "weight" not in actds.load_dataset(path, cache_dir=tmp_path).column_names


def test_refuses_weights_of_another_dataset_or_that_changed(
    path: Path, weights: Path, tmp_path: Path
) -> None:
    other = make_dataset(tmp_path / "acts", n_requests=4)
    for streaming in (True, False):
        with pytest.raises(actds.ActdsError, match="E018"):
            actds.load_dataset(other, streaming=streaming, weights=weights, cache_dir=tmp_path)
    dataset = actds.open(other)
    file = write_weights_file(tmp_path / "w.parquet", dataset, drawn_weights(dataset))
    stream = actds.load_dataset(other, streaming=True, weights=file)
    write_weights_file(file, dataset, drawn_weights(dataset, seed=1))
    with pytest.raises(actds.ActdsError, match=r"E018 .*as when it was loaded"):
        list(stream)


def test_nodes_share_the_stream_by_shards(path: Path, truth: list[tuple[Any, ...]]) -> None:
    stream = actds.load_dataset(path, streaming=True)
    parts = [split_dataset_by_node(stream, rank, 2) for rank in range(2)]
    rows = [[told(example) for example in part] for part in parts]
    assert all(rows)
    assert sorted(rows[0] + rows[1]) == sorted(truth)


def test_a_stream_goes_on_from_its_state(path: Path, truth: list[tuple[Any, ...]]) -> None:
    stream = actds.load_dataset(path, streaming=True)
    for number, _ in enumerate(stream, 1):
        if number == 77:
            break
    again = actds.load_dataset(path, streaming=True)
    again.load_state_dict(stream.state_dict())
    assert [told(example) for example in again] == truth[77:]


@pytest.mark.standard
def test_data_loader_workers_share_the_stream(path: Path, truth: list[tuple[Any, ...]]) -> None:
    stream = actds.load_dataset(path, streaming=True, hooks=HOOKS[0], columns=["request"])
    loader = torch.utils.data.DataLoader(stream, batch_size=16, num_workers=2)
    rows = [batch[HOOKS[0]] for batch in loader]
    assert all(row.dtype == torch.bfloat16 for row in rows)
    served = sorted(r.tobytes() for row in rows for r in from_torch(row))
    assert served == sorted(row[0] for row in truth)


def test_map_style_rows_batches_and_columns_are_the_stored_bits(
    path: Path, truth: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path)
    assert isinstance(rows, datasets.Dataset)
    assert [told(rows[i]) for i in (0, 60, len(rows) - 1)] == [truth[i] for i in (0, 60, -1)]
    batch = rows[[70, 3, 55]]
    assert [told({k: v[i] for k, v in batch.items()}) for i in range(3)] == [
        truth[i] for i in (70, 3, 55)
    ]
    column = rows.with_format("actds")[40:60][HOOKS[0]]
    assert [row.tobytes() for row in from_torch(column)] == [row[0] for row in truth[40:60]]
    shuffled = rows.shuffle(seed=0)
    assert sorted(told(example) for example in shuffled) == sorted(truth)
    kept = rows.filter(lambda phase: phase == "decode", input_columns="phase")
    assert [told(example) for example in kept] == [row for row in truth if row[6] == "decode"]
    # The file below is mapped read-only; a trainer that writes must not meet it.
    batch[HOOKS[0]].zero_()
    assert told(rows[70]) == truth[70]


def test_map_style_is_written_once_and_again_when_the_dataset_went_on(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=6)
    cache = tmp_path / "cache"
    first = actds.load_dataset(path, cache_dir=cache)
    files = {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}
    assert files and all(file.suffix == ".arrow" for file in files)
    again = actds.load_dataset(path, cache_dir=cache)
    assert again._fingerprint == first._fingerprint
    assert files == {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}
    make_dataset(path, n_requests=6, run="r-more", seed=1)
    more = actds.load_dataset(path, cache_dir=cache)
    assert more._fingerprint != first._fingerprint
    assert len(more) > len(first)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_come_as_they_are(tmp_path: Path, dtype: Any) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=4, dtype=dtype)
    wanted = np.concatenate([s.array(HOOKS[0]).read_all() for s in actds.open(path).shards])
    for streaming in (True, False):
        rows = list(
            actds.load_dataset(
                path, streaming=streaming, hooks=HOOKS[0], columns=[], cache_dir=tmp_path
            )
        )
        assert all(row[HOOKS[0]].dtype == getattr(torch, dtype) for row in rows)
        assert np.array_equal(np.stack([from_torch(row[HOOKS[0]]) for row in rows]), wanted)


def test_tables_load_with_plain_datasets(path: Path, tmp_path: Path) -> None:
    dataset = actds.open(path)
    for pattern, table in [
        ("shards/*/tokens.parquet", dataset.tokens()),
        ("census/*/requests-*.parquet", dataset.requests()),
        ("census/*/steps-*.parquet", dataset.steps()),
    ]:
        files = sorted(str(file) for file in path.glob(pattern))
        loaded = datasets.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=str(tmp_path)
        )
        assert loaded.column_names == table.column_names
        assert len(loaded) == table.num_rows > 0


@pytest.mark.parametrize(
    "options, place",
    [
        ({"hooks": "resid_post.9"}, "hooks"),
        ({"phase": "both"}, "phase"),
        ({"columns": ["token"]}, "columns"),
        ({"columns": ["step", "step"]}, "columns"),
        ({"streaming": False, "batched_chunks": True}, "batched_chunks"),
    ],
)
def test_refuses_an_argument_that_cannot_be_used(
    path: Path, options: dict[str, Any], place: str
) -> None:
    with pytest.raises(actds.ActdsError) as caught:
        actds.load_dataset(path, **{"streaming": True, **options})
    assert (caught.value.code, caught.value.place) == ("E014", place)


def test_refuses_an_unsealed_dataset_unless_told_in_so_many_words(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=4, sealed=False)
    with pytest.raises(actds.ActdsError, match="E306"):
        actds.load_dataset(path, streaming=True)
    with pytest.warns(UserWarning, match="E306"):
        stream = actds.load_dataset(path, streaming=True, i_accept_unsealed=True)
        assert next(iter(stream))[HOOKS[0]].dtype == torch.bfloat16


def test_the_example_runs(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["load_hf.py", str(path)])
    example = EXAMPLES / "load_hf.py"
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert "torch.bfloat16" in out and "tokens scheduled" in out
    assert list(tmp_path.glob("actds/*/*.arrow"))


def float64(path: Path) -> np.ndarray[Any, Any]:
    bits = np.concatenate([s.array(HOOKS[0]).read_all() for s in actds.open(path).shards])
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def table_rows(table: Any) -> Any:
    return table.combine_chunks().flatten().to_numpy().reshape(len(table), -1)


@pytest.mark.parametrize(
    "name, values",
    [
        ("actds", lambda rows: rows.float().numpy()),
        ("torch", lambda rows: rows.numpy()),
        ("numpy", lambda rows: rows),
        ("pandas", lambda rows: np.stack(rows.to_list())),
        ("arrow", table_rows),
        (None, np.array),
    ],
)
def test_every_format_gives_the_values_and_none_their_bit_patterns(
    path: Path, tmp_path: Path, name: str | None, values: Any
) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path, hooks=HOOKS[0]).with_format(name)
    got, true = np.asarray(values(rows[:][HOOKS[0]]), np.float64), float64(path)
    assert np.array_equal(got, true)


def test_what_leaves_through_files_has_the_values(path: Path, tmp_path: Path) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path, hooks=HOOKS[0])
    true = float64(path)
    assert np.array_equal(np.stack(rows.to_pandas()[HOOKS[0]].to_list()), true)
    # What push_to_hub uploads.
    rows.to_parquet(tmp_path / "rows.parquet")
    again = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path))
    assert np.array_equal(again.with_format("numpy")[:][HOOKS[0]], true)
    rows.save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    assert saved[:][HOOKS[0]].dtype == torch.bfloat16
    assert np.array_equal(saved[:][HOOKS[0]].double().numpy(), true)
    assert actds.open(path).digest in saved.info.description


def test_a_mapped_column_keeps_its_values(path: Path, tmp_path: Path) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path, hooks=HOOKS[0], columns=[])
    doubled = rows.map(lambda row: {HOOKS[0]: row[HOOKS[0]] * 2})
    assert np.array_equal(doubled.with_format("numpy")[:][HOOKS[0]], 2 * float64(path))
    # What bfloat16 does not hold is refused, not rounded.
    third = rows.with_format("torch").map(lambda row: {HOOKS[0]: row[HOOKS[0]] / 3})
    with pytest.raises(ValueError, match="bfloat16 does not hold"):
        third.with_format("actds")[:]
    wide = third.with_format("actds", float32=[HOOKS[0]])[:][HOOKS[0]]
    assert np.allclose(wide.numpy(), float64(path) / 3)


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_are_left_out_by_name(tmp_path: Path, streaming: bool) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=20, sinks=True, rows_per_shard=50)
    options: dict[str, Any] = {"streaming": streaming, "cache_dir": tmp_path}
    every = [(e["request"], e["position"]) for e in actds.load_dataset(path, **options)]
    kept = list(actds.load_dataset(path, exclude="bos", **options))
    expected = [(request, position) for request, position in every if position != 0]
    assert 0 < len(expected) < len(every)
    assert [(e["request"], e["position"]) for e in kept] == expected
    assert all(e[HOOKS[0]].float().norm() < 100 for e in kept)
    if streaming:
        chunks = actds.load_dataset(path, batched_chunks=True, exclude="bos", **options)
        assert sum(len(chunk[HOOKS[0]]) for chunk in chunks) == len(expected)
    with pytest.warns(UserWarning, match="'eos' leaves out no row"):
        actds.load_dataset(path, exclude="eos", **options)
    with pytest.raises(actds.ActdsError, match="E014 exclude"):
        actds.load_dataset(path, exclude="padding", **options)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_side_of_a_split_has_the_requests_that_the_loader_has(
    path: Path, tmp_path: Path, streaming: bool
) -> None:
    split: dict[str, Any] = {"split": "train", "held_out": 0.3}
    options = split if streaming else {**split, "cache_dir": tmp_path}
    requests = {
        example["request"] for example in actds.load_dataset(path, streaming=streaming, **options)
    }
    loader = actds.Loader(path, batch=1, provenance=["request"], drop_last=False, **split)
    assert {int(rows["request"][0]) for _, rows in loader} == {int(r) for r in requests}


def served(batches: Iterable[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """Return how often each row came: the bits of both hooks, its request and position."""
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        assert all(batch[hook].dtype == torch.bfloat16 for hook in HOOKS)
        bits = (from_torch(batch[hook]) for hook in HOOKS)
        places = (batch[name].tolist() for name in ("request", "position"))
        for first, second, *place in zip(*bits, *places, strict=True):
            found[(first.tobytes(), second.tobytes(), *place)] += 1
    return found


@pytest.mark.parametrize("fmt", [None, "torch"])
@pytest.mark.parametrize(
    "n_workers", [0, pytest.param(2, marks=pytest.mark.standard)], ids=["0-workers", "2-workers"]
)
@pytest.mark.parametrize("n_nodes", [1, 3])
# What datasets says of every tensor that its own format is given.
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_every_row_comes_once_over_nodes_and_workers(
    path: Path, truth: list[tuple[Any, ...]], n_nodes: int, n_workers: int, fmt: str | None
) -> None:
    expected = Counter((*row[:2], row[3], row[4]) for row in truth)
    prefill = Counter((*row[:2], row[3], row[4]) for row in truth if row[6] == "prefill")
    stream = actds.load_dataset(path, streaming=True).with_format(fmt).shuffle(3, buffer_size=20)
    kept = stream.filter(lambda example: example["phase"] == "prefill")
    orders = []
    for epoch, (rows, want) in enumerate(((stream, expected), (stream, expected), (kept, prefill))):
        got: Counter[tuple[Any, ...]] = Counter()
        for rank in range(n_nodes):
            part = split_dataset_by_node(rows, rank, n_nodes)
            part.set_epoch(epoch)
            loader = torch.utils.data.DataLoader(part, batch_size=7, num_workers=n_workers)
            got += served(loader)
        assert got == want
        orders.append(list(got))
    assert orders[0] != orders[1], "set_epoch shuffles anew"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_an_epoch_of_a_shuffled_stream_has_one_order(
    path: Path, truth: list[tuple[Any, ...]]
) -> None:
    stream = actds.load_dataset(path, streaming=True).shuffle(1, buffer_size=30)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append([told(example) for example in stream])
    assert orders[0] == orders[2] != orders[1] and orders[0] != truth
    assert sorted(orders[1]) == sorted(truth)


@pytest.mark.parametrize(
    "n_workers", [0, pytest.param(2, marks=pytest.mark.standard)], ids=["0-workers", "2-workers"]
)
def test_map_style_rows_come_once_over_nodes_and_workers(
    path: Path, truth: list[tuple[Any, ...]], tmp_path: Path, n_workers: int
) -> None:
    rows = actds.load_dataset(path, cache_dir=tmp_path)
    prefill = rows.filter(lambda phase: phase == "prefill", input_columns="phase")
    for some, keep in ((rows, ("prefill", "decode")), (prefill.shuffle(seed=2), ("prefill",))):
        want = Counter((*row[:2], row[3], row[4]) for row in truth if row[6] in keep)
        got: Counter[tuple[Any, ...]] = Counter()
        for rank in range(3):
            part = split_dataset_by_node(some, rank, 3)
            got += served(torch.utils.data.DataLoader(part, batch_size=7, num_workers=n_workers))
        assert got == want
    # In torch's own format the same values, as float32.
    wide = rows.with_format("torch")[:][HOOKS[0]]
    assert wide.dtype == torch.float32 and torch.equal(wide, rows[:][HOOKS[0]].float())
    stream = rows.to_iterable_dataset(num_shards=4).with_format("actds").shuffle(1, buffer_size=9)
    assert sorted(told(example) for example in stream) == sorted(truth)


def test_no_file_asks_to_trust_remote_code() -> None:
    words = "trust_remote" + "_code"
    found = [
        str(file.relative_to(ROOT))
        for room in ("actds", "examples", "docs")
        for file in (ROOT / room).rglob("*")
        if file.suffix in (".py", ".md") and words in file.read_text("utf-8")
    ]
    assert found == []


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_that_were_drawn_come_with_their_weight(tmp_path: Path, streaming: bool) -> None:
    schedule = simulate(20, 3)
    shares, facts = busy_shares(schedule), {"replay.fraction": "0.5"}
    path = make_thinned(tmp_path / "acts", schedule, shares, facts=facts, hooks=HOOKS)
    stored = actds.open(path).tokens(columns=["position", "inclusion"])
    inclusion = stored["inclusion"].to_numpy()
    assert set(inclusion) == {0.25, 1}
    how: dict[str, Any] = {"streaming": streaming}
    how |= {} if streaming else {"cache_dir": tmp_path / "cache"}
    with pytest.warns(UserWarning, match="weights='inclusion'"):
        actds.load_dataset(path, **how)
    columns = ["position", "inclusion"]
    rows = list(actds.load_dataset(path, weights="inclusion", columns=columns, **how))
    assert [row["inclusion"] for row in rows] == (inclusion / 2).tolist()
    assert [float(row["weight"]) for row in rows] == (2 / inclusion).tolist()
    rows = list(
        actds.load_dataset(path, weights="position / inclusion", where="position > 9", **how)
    )
    position = stored["position"].to_numpy()
    expected = (2 * position / inclusion)[position > 9]
    assert [float(row["weight"]) for row in rows] == expected.tolist()
    with pytest.raises(actds.ActdsError, match="E014 weights") as caught:
        list(actds.load_dataset(path, weights="1 / (inclusion - 0.5)", **how))
    assert "finite numbers" in str(caught.value)
