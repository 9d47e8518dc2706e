"""Exports: every value and label of the rows, in one order, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from safetensors import safe_open

import actds
from actds.cli import cli
from actds.errors import ActdsError
from actds.exchange import export as exporting
from actds.exchange.export import RECORD_FILE, ROWS_FILE, TARGETS, ExportRecord
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned

HOOKS = ("resid_post.0", "resid_post.1")
ALL: Any = list(TARGETS)
Keys = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs in many shards, with prefix hits and losses."""
    folder = tmp_path_factory.mktemp("export") / "acts"
    make_dataset(folder, n_requests=20, seed=1, sealed=False, rows_per_shard=37, drops=True)
    return make_dataset(folder, n_requests=12, seed=2, run="a-second", rows_per_shard=41)


def truth(path: Path, hook: str) -> tuple[Keys, np.ndarray[Any, Any], list[dict[str, Any]]]:
    """Return key, float32 values and labels of all rows, by run (in order), request, position."""
    dataset = actds.open(path)
    lines = dataset.tokens(hook, run=True).to_pylist()
    values = np.concatenate([shard.array(hook).read_all() for shard in dataset.shards_of(hook)])
    runs = list(dataset.runs)
    order = sorted(
        range(len(lines)),
        key=lambda i: (runs.index(lines[i]["run"]), lines[i]["request"], lines[i]["position"]),
    )
    keys = [(lines[i]["run"], lines[i]["request"], lines[i]["position"]) for i in order]
    wide = (values.astype(np.uint32) << 16).view(np.float32)
    return keys, wide[order], [lines[i] for i in order]


def exported(path: Path, folder: Path, to: Any, hook: str) -> np.ndarray[Any, Any]:
    """Return the values of a hook in an export, float32, as stock libraries read them."""
    if to == "memmap":
        stored = np.load(folder / f"{hook}.npy", mmap_mode="r")
        assert stored.dtype == np.dtype("V2")  # of which NumPy computes nothing
        return stored.view(ml_dtypes.bfloat16).astype(np.float32)
    if to == "safetensors":
        parts = []
        for n in range(len(list(folder.glob("hs_*.safetensors")))):
            with safe_open(folder / f"hs_{n}.safetensors", "pt") as file:
                states = file.get_tensor("hidden_states")
                assert states.shape[0] == len(file.get_tensor("token_ids"))
                parts.append(states[:, HOOKS.index(hook)].float().numpy())
        return np.concatenate(parts)
    if to == "parquet":
        file = folder / "data" / "train-00000-of-00001.parquet"
        column = pq.read_table(file)[hook].combine_chunks()
    else:
        table = datasets.load_from_disk(str(folder)).data.table
        column = table[f"blocks.{hook[-1]}.hook_resid_post"].combine_chunks().storage.flatten()
    return column.flatten().to_numpy().reshape(len(column), -1)


@pytest.mark.parametrize("to", ALL)
def test_every_form_holds_every_row_in_order(path: Path, tmp_path: Path, to: Any) -> None:
    record = actds.export(path, tmp_path / "out", to=to, context_size=1)
    for hook in HOOKS:
        keys, values, lines = truth(path, hook)
        got = exported(path, tmp_path / "out", to, hook)
        assert got.dtype == np.float32 and np.array_equal(got, values)
    where = ROWS_FILE if to != "parquet" else "data/train-00000-of-00001.parquet"
    told = pq.read_table(tmp_path / "out" / where).to_pylist()
    labels = ("run", "request", "position", "token_id", "phase", "step")
    assert [[line[n] for n in labels] for line in told] == [[s[n] for n in labels] for s in lines]
    assert record.n_rows == len(keys) and record.n_left_out == 0


@pytest.mark.parametrize("to", ALL)
def test_the_record_says_where_the_files_come_from(path: Path, tmp_path: Path, to: Any) -> None:
    where = "position > 1"
    record = actds.export(
        path, tmp_path / "out", to=to, hooks=HOOKS[1], where=where, phase="prefill", context_size=8
    )
    written = (tmp_path / "out" / RECORD_FILE).read_text()
    assert ExportRecord.model_validate_json(written) == record
    dataset = actds.open(path)
    assert record.digest == dataset.digest and record.seal == 1
    assert record.where == where and record.phase == "prefill"
    assert [hook.name for hook in record.hooks] == [HOOKS[1]]
    assert record.hooks[0].stored == "bfloat16"
    assert set(record.runs) == set(dataset.runs)
    for run in record.runs.values():
        assert run.fields["numerics.dtype"]["value"] == "bfloat16"
    on_disk = {
        p.relative_to(tmp_path / "out").as_posix(): p
        for p in (tmp_path / "out").rglob("*")
        if p.is_file() and p.name != RECORD_FILE
    }
    assert {entry.path for entry in record.files} == set(on_disk)
    for entry in record.files:
        assert hashlib.sha256(on_disk[entry.path].read_bytes()).hexdigest() == entry.sha256
    kept = [k for k, line in zip(*truth(path, HOOKS[1])[::2], strict=True)
            if line["phase"] == "prefill" and k[2] > 1]  # fmt: skip
    assert record.n_rows + record.n_left_out == len(kept)


def test_a_request_has_a_file_with_its_positions(path: Path, tmp_path: Path) -> None:
    actds.export(path, tmp_path / "out", to="safetensors")
    keys, _, lines = truth(path, HOOKS[0])
    requests = list(dict.fromkeys(key[:2] for key in keys))
    assert len(list((tmp_path / "out").glob("hs_*"))) == len(requests)
    sequence = pq.read_table(tmp_path / "out" / ROWS_FILE)["sequence"].to_pylist()
    assert sequence == [requests.index(key[:2]) for key in keys]
    for n, (run, request) in enumerate(requests):
        mine = [line for line in lines if (line["run"], line["request"]) == (run, request)]
        with safe_open(tmp_path / "out" / f"hs_{n}.safetensors", "np") as file:
            assert file.metadata()["run"] == run and file.metadata()["request"] == str(request)
            assert file.get_tensor("positions").tolist() == [one["position"] for one in mine]
            assert file.get_tensor("token_ids").tolist() == [one["token_id"] for one in mine]


def test_windows_leave_out_and_count_the_rows_that_fill_none(path: Path, tmp_path: Path) -> None:
    record = actds.export(path, tmp_path / "out", to="sae-lens", hooks=HOOKS[0], context_size=32)
    _, values, lines = truth(path, HOOKS[0])
    whole = len(values) // 32 * 32
    assert 0 < len(values) - whole == record.n_left_out and record.n_rows == whole
    loaded = datasets.load_from_disk(str(tmp_path / "out")).with_format("numpy")
    assert np.array_equal(loaded[:]["blocks.0.hook_resid_post"].reshape(whole, -1), values[:whole])
    assert loaded[:]["token_ids"].ravel().tolist() == [one["token_id"] for one in lines[:whole]]
    with pytest.raises(ActdsError, match="E014 context_size"):
        actds.export(path, tmp_path / "none", to="sae-lens", context_size=10**6)


@pytest.mark.parametrize("block", [1, 4096])
@pytest.mark.parametrize("to", ALL)
def test_blocks_of_any_size_give_the_same_files(
    path: Path, tmp_path: Path, to: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = actds.export(path, tmp_path / "whole", to=to, context_size=8)
    monkeypatch.setattr(exporting, "BLOCK_NBYTES", block)
    parts = actds.export(path, tmp_path / "parts", to=to, context_size=8)
    assert parts.n_rows == whole.n_rows
    if to in ("parquet", "sae-lens"):
        for hook in HOOKS:
            first, second = (exported(path, tmp_path / n, to, hook) for n in ("whole", "parts"))
            assert np.array_equal(first, second)
    else:
        assert parts.files == whole.files


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"),
     ("bfloat16", "float16"), ("float32", "float16"), ("float16", "bfloat16")],
)  # fmt: skip
def test_types_are_exact_or_rounded_to_the_nearest(
    tmp_path: Path, stored: Any, wanted: Any
) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=4, dtype=stored, hooks=HOOKS[:1])
    record = actds.export(path, tmp_path / "out", to="memmap", dtype=wanted)
    assert (record.hooks[0].stored, record.hooks[0].written) == (stored, wanted)
    got = np.load(tmp_path / "out" / "resid_post.0.npy")
    got = got.view(ml_dtypes.bfloat16) if wanted == "bfloat16" else got
    dataset = actds.open(path)
    table = dataset.tokens()
    order = np.lexsort((table["position"].to_numpy(), table["request"].to_numpy()))
    want = dataset.array("resid_post.0")[:][order]
    kind = ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted
    assert got.dtype == kind and np.array_equal(got, want.astype(kind))


def test_a_value_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    bits = np.array([0x4780], np.uint16)  # 65,536 in bfloat16
    with pytest.raises(ActdsError, match=r"E009 dtype: 65536 .*float16 cannot hold"):
        exporting.cast(bits, "bfloat16", "float16", "a shard")
    infinite = np.array([0x7F80, 0x7FC0], np.uint16)
    assert np.isinf(exporting.cast(infinite, "bfloat16", "float16", "").view(np.float16)[0])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("E009 to", {"to": "csv"}),
        ("E009 dtype", {"to": "parquet", "dtype": "bfloat16"}),
        ("E009 context_size", {"to": "sae-lens", "context_size": 0}),
        ("E014 hooks", {"to": "memmap", "hooks": "resid_post.9"}),
        ("E014 where", {"to": "memmap", "where": "colour == 1"}),
        ("E014 where", {"to": "memmap", "where": "position > 100000"}),
    ],
)
def test_bad_arguments_leave_nothing(
    path: Path, tmp_path: Path, words: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ActdsError, match=words):
        actds.export(path, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_hooks_of_two_widths_make_no_file_per_request(tmp_path: Path) -> None:
    widths = {"resid_post.0": 16, "resid_post.1": 8}
    path = make_dataset(tmp_path / "acts", n_requests=4, d_model=widths)
    with pytest.raises(ActdsError, match="E009 hooks: bfloat16 rows of 8 and bfloat16 rows of"):
        actds.export(path, tmp_path / "out", to="safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["acts"]
    actds.export(path, tmp_path / "out", to="memmap")
    assert [np.load(tmp_path / "out" / f"{h}.npy").shape[1] for h in widths] == [16, 8]


def test_nothing_is_written_over(path: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="E008"):
        actds.export(path, tmp_path / "out", to="memmap")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ActdsError, match="E009 OUT"):
        actds.export(path, "s3://bucket/out", to="memmap")


@pytest.mark.parametrize("to", ALL)
@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_nothing(
    path: Path, tmp_path: Path, to: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"E503 .*No space left"):
        actds.export(path, tmp_path / "out", to=to, context_size=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ALL)
def test_an_export_that_is_cut_does_not_look_whole(
    path: Path, tmp_path: Path, to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands on the disk just before the end: no OUT, and no record in what is left."""
    seen: list[set[str]] = []
    dump = ExportRecord.model_dump_json

    def look(record: ExportRecord, **options: Any) -> str:
        seen.append({one.name for one in tmp_path.iterdir()})
        (draft,) = tmp_path.iterdir()
        assert not (draft / RECORD_FILE).exists()
        return dump(record, **options)

    monkeypatch.setattr(ExportRecord, "model_dump_json", look)
    actds.export(path, tmp_path / "out", to=to, context_size=1)
    assert len(seen) == 1 and "out" not in seen[0]
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_the_command_says_what_was_written(path: Path, tmp_path: Path) -> None:
    def run(*args: object) -> Any:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="actds")

    done = run("export", path, tmp_path / "out", "--to", "sae-lens", "--hooks", HOOKS[0])
    assert done.exit_code == 0, done.output
    assert "resid_post.0 float32 (stored as bfloat16)" in done.output
    assert "did not fill a window" in done.output and actds.open(path).digest in done.output
    args = ("--to", "memmap", "--where", "phase == 'decode'", "--exclude", "first_position")
    done = run("export", path, tmp_path / "two", *args, "--json")
    record = json.loads(done.stdout)
    assert record["format"] == "actds.export" and record["exclude"] == ["first_position"]
    assert record == json.loads((tmp_path / "two" / RECORD_FILE).read_text())
    assert run("export", path, tmp_path / "two", "--to", "memmap").exit_code == 2


@pytest.mark.parametrize("to", ["memmap", "parquet"])
def test_rows_that_were_drawn_come_with_their_inclusion(tmp_path: Path, to: Any) -> None:
    schedule = simulate(20, 3)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule))
    make_dataset(path, n_requests=5, seed=3, run="a-second")
    actds.export(path, tmp_path / "out", to=to, hooks=HOOKS[0], where="position < 20")
    file = "rows.parquet" if to == "memmap" else "data/train-00000-of-00001.parquet"
    table = pq.read_table(
        tmp_path / "out" / file, columns=["run", "request", "position", "inclusion"]
    )
    tokens = actds.open(path).tokens(columns=["request", "position", "inclusion"], run=True)
    expected = {
        (row["run"], row["request"], row["position"]): row["inclusion"]
        for row in tokens.to_pylist()
        if row["position"] < 20
    }
    assert set(expected.values()) == {None, 0.25, 1}
    lines = {tuple(row.values())[:3]: row["inclusion"] for row in table.to_pylist()}
    assert lines == {key: 1 if share is None else share for key, share in expected.items()}
