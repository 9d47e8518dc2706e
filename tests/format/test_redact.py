"""Redact: of the requests nothing is left in any file, of all others everything is as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import actds
import actds.dataset.commit
from actds.cli import cli
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.dataset.redacted import LINES
from actds.errors import ActdsError
from actds.format.readouts import Readouts
from actds.format.schema import Seal
from actds.rewrite.recompression import recompress
from actds.rewrite.redaction import _begin, redact
from actds.store import Store, open_store
from actds.store.local import LocalStore
from actds_testing import synthetic
from actds_testing.independent.validator import validate as validate_independently
from actds_testing.places import VECTORS
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.validate.validation import validate

RUN = "r-synthetic"
Key = tuple[str, int, int]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def busy_dataset(path: Path, **options: Any) -> Path:
    """Write a dataset with every table that a request can have lines in."""
    named: dict[str, Any] = {"n_requests": 8, "rows_per_shard": 24, "drops": True}
    named |= {"roles": True, "origins": True, "entropy": True, "readouts": Readouts(2, seed=4)}
    return make_dataset(path, **named | options)


def rows_of(path: Path | str) -> dict[Key, dict[str, Any]]:
    """Return the labels and bits of every row, by run, request and position."""
    catalog = read_catalog(open_store(path))
    found: dict[Key, dict[str, Any]] = {}
    for shard in (shard for run in catalog.run_ids for shard in catalog.shards_of(run)):
        bits: dict[str, Any] = {}
        for hook in shard.hooks:
            with shard.array(hook) as reader:
                bits[hook] = reader.read_all()
        for n, line in enumerate(shard.tokens().to_pylist()):
            key = (shard.run, line["request"], line["position"])
            of_row = {hook: rows[n].tobytes() for hook, rows in bits.items()}
            found.setdefault(key, dict(line)).update(of_row)
    return found


def clean(path: Path) -> Seal:
    """Return the seal of a dataset of which both validators find nothing but lost references."""
    found = validate(path, "deep")
    assert {finding.code for finding in found.findings} <= {"E410"}, found.findings
    assert {finding.code for finding in validate_independently(path, deep=True)} <= {"E410"}
    seal = read_catalog(LocalStore(path)).seal
    assert seal is not None
    return seal


def of_requests(rows: dict[Key, Any], numbers: set[int]) -> dict[Key, Any]:
    return {key: row for key, row in rows.items() if key[0] == RUN and key[1] in numbers}


def check_gone(path: Path, numbers: set[int], before: dict[Key, Any]) -> None:
    rows, gone = rows_of(path), of_requests(before, numbers)
    assert gone and rows == {key: row for key, row in before.items() if key not in gone}
    catalog = read_catalog(LocalStore(path))
    assert catalog.redacted(RUN) == numbers and catalog.removable == []
    for table in LINES:
        assert not numbers & {*catalog.table(table, RUN)["request"].to_pylist()}


@pytest.mark.parametrize("numbers", [{0}, {3, 5}, {0, 1, 2, 3, 4, 5, 6}, {1, 7}])
def test_rows_and_lines_of_the_requests_go_and_all_others_stay(
    tmp_path: Path, numbers: set[int]
) -> None:
    path = busy_dataset(tmp_path / "d", filtered=True)
    make_dataset(path, n_requests=4, seed=7, run="r-second")
    before, totals = rows_of(path), clean(path).totals
    done = redact(path, [f"{RUN}/{number}" for number in numbers])
    check_gone(path, numbers, before)
    assert done.requests == {RUN: sorted(numbers)}
    assert done.n_rows == len(of_requests(before, numbers))
    seal = clean(path)
    assert (done.seal, done.digest) == (seal.n, actds.open(path).digest) and seal.n == 3
    moved = totals["captured"] + totals["cache_ref"]
    moved -= seal.totals["captured"] + seal.totals["cache_ref"]
    assert seal.totals["filtered"] == totals["filtered"] + moved > totals["filtered"]
    for name in ("requests", "scheduled", "dropped", "aborted", "undelivered", "recomputed"):
        assert seal.totals[name] == totals[name], "the account says what was served"
    assert not list(path.rglob(".tmp-*"))


def test_searched_byte_by_byte_no_file_holds_what_a_request_was(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        commit = actds.dataset.commit.commit_shard
        patch.setattr(synthetic, "commit_shard", lambda *a, **named: commit(*a, **named, raw=True))
        path = busy_dataset(tmp_path / "d")
    recompress(path, keep=True)
    rows = rows_of(path)
    before = of_requests(rows, {3})
    others = {row[f"resid_post.{n}"] for key, row in rows.items() if key[1] != 3 for n in (0, 1)}
    table = read_catalog(LocalStore(path)).table("requests", RUN)
    line = table.slice(3, 1).to_pylist()[0]
    bits = {row[f"resid_post.{n}"] for row in before.values() for n in (0, 1)} - others
    assert len(bits) > 8  # the others are those of the same tokens at the same positions
    # In files that were written raw a row stands byte for byte.
    assert all(any(needle in data for data in every(path)) for needle in bits)
    redact(path, [line["external_id"]])
    for data in every(path):
        assert not [needle for needle in bits if needle in data]
    for file in path.rglob("*.parquet"):
        values = [str(value) for row in pq.read_table(file).to_pylist() for value in row.values()]
        assert not {line["external_id"], line["token_digest"]} & {*values}
    assert not bits & {row[f"resid_post.{n}"] for row in rows_of(path).values() for n in (0, 1)}
    clean(path)


def every(path: Path) -> Iterator[bytes]:
    return (file.read_bytes() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("unit", ["row", "request"])
def test_what_was_drawn_keeps_its_probability(tmp_path: Path, unit: str) -> None:
    schedule = simulate(16, 3)
    path = make_thinned(tmp_path / "d", schedule=schedule, shares=busy_shares(schedule), unit=unit)
    before = rows_of(path)
    number = next(iter(before))[1]
    redact(path, [f"{RUN}/{number}"])
    rows = rows_of(path)
    assert rows == {key: row for key, row in before.items() if key[1] != number}
    clean(path)


@pytest.mark.standard
@pytest.mark.parametrize("name", sorted(p.name for p in (VECTORS / "valid").iterdir()))
def test_any_request_of_any_vector_can_go(tmp_path: Path, name: str) -> None:
    for number in range(4):
        path = tmp_path / f"d{number}"
        shutil.copytree(VECTORS / "valid" / name, path)
        redact(path, [f"r-vector/{number}"])  # of the vector redacted, one that has been already
        clean(path)
        assert number in read_catalog(LocalStore(path)).redacted("r-vector")
        assert all(key[1] != number for key in rows_of(path))


def test_one_after_the_other_and_none_twice(tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d")
    before = rows_of(path)
    ids = read_catalog(LocalStore(path)).table("requests", RUN)["external_id"].to_pylist()
    redact(path, [ids[5]])
    assert redact(path, [ids[2], ids[6]]).requests == {RUN: [2, 6]}
    check_gone(path, {2, 5, 6}, before)
    assert clean(path).n == 3
    for bad, got in (([ids[5]], ids[5]), (["no-such"], "no-such"), ([], "no request")):
        with pytest.raises(ActdsError, match=f"E009 requests: .*{got}"):
            redact(path, bad)
    recompress(path)
    assert clean(path).n == 3


def test_requests_are_found_by_the_ids_that_a_server_makes_and_by_label(tmp_path: Path) -> None:
    schedule = simulate(6, 1)
    ids = ["chatcmpl-ab", "1_chatcmpl-ab", "cmpl-cd-0", "cmpl-cd-1", "ab", "abc"]
    labels = [f'{{"n":{n // 2},"user":"u{n % 2}"}}' for n in range(6)]
    table = schedule.requests
    for name, column in (("external_id", ids), ("labels", labels)):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(column))
    schedule = replace(schedule, requests=table)
    for wanted, known, numbers in (
        (["ab"], None, [0, 1, 4]),
        (["chatcmpl-ab"], None, [0, 1]),
        (["cmpl-cd"], None, [2, 3]),
        (["abc"], None, [5]),
        ([], {"user": "u1"}, [1, 3, 5]),
        ([], {"user": "u1", "n": "1"}, [3]),
    ):
        path = make_dataset(tmp_path / f"d{len(numbers)}{wanted}", schedule=schedule)
        assert redact(path, wanted, labels=known).requests == {RUN: numbers}
        clean(path)


def test_a_run_that_is_written_still_is_left_alone(tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d")
    store = LocalStore(path)
    dataset = read_catalog(store).genesis.dataset
    chain = Chain.begin(store, dataset, RUN, "writer", "test")
    with pytest.raises(ActdsError, match=r"E305 ledger/w-.*open writer chain"):
        redact(path, [f"{RUN}/1"])
    chain.close("finished", {"rows": 0, "dropped_tokens": 0, "recomputed_tokens": 0})
    assert not read_catalog(store).replacements


def test_an_unsealed_dataset_stays_unsealed(tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d", sealed=False)
    done = redact(path, [f"{RUN}/1"])
    assert done.seal is None and read_catalog(LocalStore(path)).seal is None
    actds.seal(path)
    clean(path)


def test_who_pinned_an_older_seal_is_told_of_the_redaction(tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d")
    pin = actds.open(path).digest
    redact(path, [f"{RUN}/1"])
    with pytest.raises(ActdsError, match=r"E805 ledger/t-\w+/0000000\d.json: a redaction of"):
        read_catalog(LocalStore(path), seal=pin)
    result = CliRunner().invoke(cli, ["validate", str(path), "--seal", pin])
    assert result.exit_code and "E805" in result.output


def test_what_was_made_from_it_is_listed(tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d")
    actds.shuffle(path, tmp_path / "made" / "copy")
    seal = actds.open(path).digest
    (tmp_path / "made" / "probe.safetensors").write_bytes(b"x" * 2**24 + seal.encode() + b"y")
    (tmp_path / "made" / "other.json").write_text("{}")
    arguments = ["redact", str(path), "--request", f"{RUN}/1", "--dependents", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    made = [line for line in result.output.splitlines() if line.startswith("made from")]
    wanted = [tmp_path / "made" / name for name in ("copy", "probe.safetensors")]
    shown = CliRunner().invoke(cli, ["info", str(path)]).output
    assert "1 request redacted: their positions count as filtered" in shown
    assert made == [f"made from this dataset: {name}" for name in wanted]


# ---- crashes


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def end_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """End the process at call ``number`` that changes the store; return what had been called."""
    calls: list[str] = []
    for name in ("put_new", "remove", "replace"):
        real = getattr(LocalStore, name)

        def call(self: LocalStore, path: str, *more: Any, _real: Any = real) -> Any:
            calls.append(path)
            if len(calls) == number:
                raise Killed
            return _real(self, path, *more)

        patch.setattr(LocalStore, name, call)
    return calls


@pytest.mark.standard
def test_killed_at_any_change_the_next_call_ends_what_was_begun(tmp_path: Path) -> None:
    template = busy_dataset(tmp_path / "template", n_requests=5, rows_per_shard=1000)
    before = rows_of(template)
    with pytest.MonkeyPatch.context() as patch:
        calls = end_at(patch, 0)
        shutil.copytree(template, tmp_path / "whole")
        redact(tmp_path / "whole", [f"{RUN}/1"])
        n_calls = len(calls)
    assert n_calls > 40
    for number in range(1, n_calls + 1):
        path = tmp_path / f"d{number}"
        shutil.copytree(template, path)
        with pytest.MonkeyPatch.context() as patch:
            end_at(patch, number)
            with pytest.raises(Killed):
                redact(path, [f"{RUN}/1"])
        others = {key: row for key, row in rows_of(path).items() if key[1] != 1}
        assert others == {key: row for key, row in before.items() if key[1] != 1}
        redact(path, [f"{RUN}/1", f"{RUN}/4"])
        check_gone(path, {1, 4}, before)
        clean(path)
        shutil.rmtree(path)


@pytest.mark.standard
def test_an_object_store_too(s3_root: str, tmp_path: Path) -> None:
    path = busy_dataset(tmp_path / "d")
    before, store = rows_of(path), open_store(s3_root)
    copy(LocalStore(path), store)
    redact(s3_root, [f"{RUN}/3"])
    assert rows_of(s3_root) == {key: row for key, row in before.items() if key[1] != 3}
    copy(store, LocalStore(tmp_path / "back"))
    check_gone(tmp_path / "back", {3}, before)
    clean(tmp_path / "back")


def copy(source: Store, target: Store) -> None:
    for path in source.list():
        target.put_new(path, [source.read(path)])


def test_a_second_call_at_the_same_time_is_refused(tmp_path: Path) -> None:
    catalog = read_catalog(LocalStore(busy_dataset(tmp_path / "d")))
    first = _begin(catalog, RUN)
    with pytest.raises(ActdsError, match=f"E010 ledger/{first.chain}: another redaction of it"):
        _begin(catalog, RUN)


def test_rows_keep_the_order_of_their_seed(tmp_path: Path) -> None:
    whole = busy_dataset(tmp_path / "whole", cache=False, drops=False, rows_per_shard=64)
    redact(whole, [f"{RUN}/2"])
    for shard in read_catalog(LocalStore(whole)).shards_of(RUN):
        seed = shard.manifest.permutation_seed
        assert seed is not None
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(shard.n_rows)
        step = shard.tokens()["step"].to_numpy()
        collected = np.empty_like(step)
        collected[order] = step
        assert (np.diff(collected.astype(np.int64)) >= 0).all()
