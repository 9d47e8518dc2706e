"""Recompress: the same rows in the same places, whatever interrupts it, and history untouched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import actds
import actds.dataset.commit
from actds.cli import cli
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import arrays, canonical, encoding
from actds.format.schema import ReplaceBody
from actds.publish.sealing import seal
from actds.rewrite.recompression import recompress
from actds.store import Put, layout
from actds.store.local import LocalStore, lock_dataset
from actds_testing import synthetic
from actds_testing.independent import IndependentReader
from actds_testing.schedules import busy_shares, simulate
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.validate.validation import validate

HOOKS = ("resid_post.0", "resid_post.1")
Rows = dict[str, Any]


def raw_dataset(path: Path, *, every: int = 1, **options: Any) -> Path:
    """Write a synthetic dataset in which one of ``every`` shards is raw."""
    count = iter(range(10**6))

    def commit(*args: Any, **named: Any) -> Any:
        return actds.dataset.commit.commit_shard(*args, **named, raw=next(count) % every == 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "commit_shard", commit)
        return (
            make_thinned(path, **options) if "shares" in options else make_dataset(path, **options)
        )


def rows_of(path: Path) -> Rows:
    """Return everything that a reader sees, in its order."""
    catalog = read_catalog(LocalStore(path))
    found: Rows = {hook: [] for hook in HOOKS} | {"tokens": [], "what": []}
    for run in catalog.run_ids:
        for one in catalog.shards_of(run):
            found["tokens"] += one.tokens().to_pylist()
            found["what"].append((one.run, one.phase, one.n_rows, one.manifest.permutation_seed))
            for hook in HOOKS:
                with one.array(hook) as reader:
                    found[hook].append(reader.read_all())
    return found | {hook: np.concatenate(found[hook]) for hook in HOOKS}


def same_rows(one: Rows, other: Rows) -> None:
    assert len(one["tokens"]) > 50 and len(np.unique(one[HOOKS[0]])) > 50
    assert one["tokens"] == other["tokens"] and one["what"] == other["what"]
    for hook in HOOKS:
        np.testing.assert_array_equal(one[hook], other[hook])


def clean(path: Path) -> None:
    found = validate(path, "deep")
    assert [finding.line() for finding in found.findings] == []
    assert found.exit_code(strict=True) == 0


def compressions(path: Path) -> set[str]:
    return {manifest.compression for manifest in read_catalog(LocalStore(path)).shards}


def documents(path: Path) -> dict[str, bytes]:
    """Return the history: ledger, seals and manifests as they are."""
    names = [*path.glob("ledger/*/*"), *path.glob("seal/*"), *path.glob("shards/*/shard.json")]
    return {name.relative_to(path).as_posix(): name.read_bytes() for name in names}


def test_raw_shards_become_normal_with_every_row_in_its_place(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", every=2, rows_per_shard=24)
    make_dataset(path, n_requests=4, seed=7, run="r-second")
    before, history, digest = rows_of(path), documents(path), actds.open(path).digest
    raw = [m for m in read_catalog(LocalStore(path)).shards if m.compression == "raw"]
    assert len(raw) > 2 and compressions(path) == {"raw", "normal"}
    done = recompress(path)
    assert list(done.shards) == [manifest.shard for manifest in raw]
    assert compressions(path) == {"normal"}
    same_rows(before, rows_of(path))
    clean(path)
    now = documents(path)
    assert {name: now[name] for name in history} == history, "history is only added to"
    opened = actds.open(path)
    assert opened.seal is not None and opened.seal.n == done.seal == 3
    assert opened.digest == done.digest != digest
    for manifest in raw:
        left = [file for file in (path / "shards" / manifest.shard).rglob("*") if file.is_file()]
        assert [file.name for file in left] == ["shard.json"]
    assert done.n_removed == sum(len(manifest.files) for manifest in raw)


@pytest.mark.parametrize("unit", ["row", "request"])
def test_rows_that_were_drawn_keep_their_probability(tmp_path: Path, unit: str) -> None:
    schedule = simulate(20, 3)
    shares = busy_shares(schedule)
    path = raw_dataset(tmp_path / "d", schedule=schedule, shares=shares, unit=unit)
    before = rows_of(path)
    assert {row["inclusion"] for row in before["tokens"]} == {0.25, 1}
    assert recompress(path).shards
    same_rows(before, rows_of(path))
    clean(path)


def test_rows_that_compress_take_less_room(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", d_model=256, n_requests=20)
    done = recompress(path)
    assert done.nbytes_before > 1.2 * done.nbytes_after > 0


def test_an_unsealed_dataset_stays_unsealed(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", sealed=False)
    before = rows_of(path)
    assert recompress(path).seal is None
    assert read_catalog(LocalStore(path)).seal is None and compressions(path) == {"normal"}
    seal(path)
    same_rows(before, rows_of(path))
    clean(path)


def test_named_shards_only_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", rows_per_shard=24)
    names = [manifest.shard for manifest in read_catalog(LocalStore(path)).shards]
    assert list(recompress(path, names[1:2]).shards) == names[1:2]
    assert compressions(path) == {"raw", "normal"}
    history = documents(path)
    again = recompress(path, names[1:2])
    assert again.shards == {} and documents(path) == history
    with pytest.raises(ActdsError, match="E009 shards"):
        recompress(path, ["no-such"])
    recompress(path)
    clean(path)


def test_kept_files_are_no_finding_and_go_with_the_next_call(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    arrays_before = {file: file.read_bytes() for file in path.glob("shards/*/acts.zarr/*/c/0/0")}
    kept = recompress(path, keep=True)
    assert kept.n_removed == 0 and kept.n_kept > 4
    assert {file: file.read_bytes() for file in arrays_before} == arrays_before
    clean(path)
    info = json.loads(CliRunner().invoke(cli, ["info", str(path), "--json"]).stdout)
    assert info["unreachable"] == [] and info["raw_shards"] == 0
    assert info["replaced_shards"] == len(kept.shards) and info["removable_nbytes"] > 0
    next(iter(arrays_before)).write_bytes(b"not read any more")
    assert recompress(path).n_removed == kept.n_kept
    assert not any(file.exists() for file in arrays_before)
    clean(path)


def test_a_damaged_shard_is_not_replaced_and_the_others_are(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", rows_per_shard=24)
    raw = read_catalog(LocalStore(path)).shards
    name = raw[1].shard
    file = path / layout.shard_dir(name) / layout.array_dir(HOOKS[1]) / arrays.SHARD_PATH
    # A change that the checksums inside agree with: only the digest shows it.
    bits = np.zeros((raw[1].n_rows, 16), np.uint16) + 0x3F80
    encoded = encoding.encode_array(bits, "bfloat16", raw=True)
    file.write_bytes(b"".join(encoded.parts))
    with pytest.raises(ActdsError, match=f"E202 shards/{name}"):
        recompress(path)
    catalog = read_catalog(LocalStore(path))
    assert catalog.is_sealed and [m.shard for m in catalog.replaced] == [raw[0].shard]
    assert {finding.code for finding in validate(path).findings} == {"E105", "E202"}


def test_refuses_a_dataset_that_is_being_written(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    history = documents(path)
    lock = lock_dataset(path)
    try:
        with pytest.raises(ActdsError, match="E010"):
            recompress(path)
    finally:
        os.close(lock)
    assert documents(path) == history


def test_bits_that_differ_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = raw_dataset(tmp_path / "d")
    real = encoding.encode_array

    def wrong(rows: Any, *args: Any, **named: Any) -> Any:
        return real(np.where(rows == rows[5], rows[4], rows), *args, **named)

    monkeypatch.setattr("actds.rewrite.recompression.encoding.encode_array", wrong)
    with pytest.raises(ActdsError, match="E204 shards/t-"):
        recompress(path)
    monkeypatch.undo()
    catalog = read_catalog(LocalStore(path))
    assert catalog.replaced == [] and compressions(path) == {"raw"}
    recompress(path)
    clean(path)


# ---- crashes


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def end_at(patch: pytest.MonkeyPatch, number: int, end: Callable[[str], BaseException]) -> None:
    """Let put ``number`` and all that follow end the process or fail; 0 lets all succeed.

    Killed before put k is killed after put k - 1: the disk holds the same.
    """
    count, put = iter(range(1, 10**6)), LocalStore.put_new

    def put_new(self: LocalStore, path: str, parts: Any) -> Put:
        if 0 < number <= next(count):
            raise end(path)
        return put(self, path, parts)

    patch.setattr(LocalStore, "put_new", put_new)


def disk_full(path: str) -> ActdsError:
    return ActdsError("E503", path, got="no space left", expected="a durable write")


def small_dataset(path: Path) -> Path:
    """Write a sealed dataset with one raw shard of two."""
    return raw_dataset(path, every=2, n_requests=8, rows_per_shard=1000)


@pytest.mark.parametrize("end", [lambda path: Killed(), disk_full], ids=["killed", "disk-full"])
def test_ended_at_any_put_no_row_is_lost_and_the_next_call_ends_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[str], BaseException]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill leaves the page cache
    template = small_dataset(tmp_path / "template")
    before, history = rows_of(template), documents(template)
    chain = ["open", "replace", "close"]
    paths = ["open", "zarr.json", *["zarr.json", "0"] * 2, "tokens.parquet", "shard.json"]
    n_puts = len([*paths, *chain[1:], "multiplicity", "seal"])
    for number in range(1, n_puts + 1):
        path = tmp_path / f"d{number}"
        shutil.copytree(template, path)
        with monkeypatch.context() as patch:
            end_at(patch, number, end)
            with pytest.raises((Killed, ActdsError), match=r"E503|^$"):
                recompress(path)
        same_rows(before, rows_of(path))
        recompress(path)
        same_rows(before, rows_of(path))
        assert compressions(path) == {"normal"}
        clean(path)
        assert history.items() <= documents(path).items()
    end_at(monkeypatch, n_puts + 1, end)
    recompress(template)  # there is no further put
    clean(template)


def test_killed_while_old_files_go_the_next_call_removes_the_rest(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    before, unlink = rows_of(path), Path.unlink
    count = iter(range(10**6))

    def once(self: Path, missing_ok: bool = False) -> None:
        is_data = "shards" in self.parts and ".tmp-" not in self.name
        if is_data and next(count) == 3:
            raise Killed
        unlink(self, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", once)
        with pytest.raises(Killed):
            recompress(path)
    clean(path)
    assert recompress(path).n_removed > 0
    same_rows(before, rows_of(path))
    clean(path)


KILLED = """
import os, signal, sys
from actds.rewrite.recompression import recompress
from actds.store.local import LocalStore
put, left = LocalStore.put_new, [int(sys.argv[2])]
def put_new(self, path, parts):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, path, parts)
LocalStore.put_new = put_new
recompress(sys.argv[1])
"""


@pytest.mark.standard
def test_a_real_kill_costs_nothing(tmp_path: Path) -> None:
    path = small_dataset(tmp_path / "d")
    before = rows_of(path)
    for number in (5, 8, 11):
        ended = subprocess.run([sys.executable, "-c", KILLED, str(path), str(number)], timeout=120)
        assert ended.returncode == -signal.SIGKILL
        same_rows(before, rows_of(path))
    recompress(path)
    same_rows(before, rows_of(path))
    assert compressions(path) == {"normal"}
    assert not list(path.rglob(".tmp-*"))
    clean(path)


# ---- readers


def test_an_independent_reader_follows_replacements(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d", every=2, rows_per_shard=24, drops=True)
    recompress(path)
    theirs, ours = IndependentReader(path), actds.open(path)
    assert ours.seal is not None and theirs.account() == ours.seal.totals
    assert [shard.name for shard in theirs.shards] == [one.name for one in ours.shards]
    for shard, one in zip(theirs.shards, ours.shards, strict=True):
        assert theirs.tokens(shard) == one.tokens().to_pylist()
        for hook in HOOKS:
            with one.array(hook) as reader:
                np.testing.assert_array_equal(theirs.array(shard, hook), reader.read_all())


def test_a_resumed_training_notices(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    pytest.importorskip("torch")
    with actds.Loader(path, HOOKS[0], batch=8) as loader:
        next(loader)
        state = loader.state_dict()
    recompress(path)
    with actds.Loader(path, HOOKS[0], batch=8) as loader, pytest.raises(ActdsError, match="E014"):
        loader.load_state_dict(state)


def test_a_replacement_can_be_replaced(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    before = rows_of(path)
    recompress(path, keep=True)
    for _ in range(3):  # chains have no order among each other, and ids are drawn at random
        again(path)
    same_rows(before, rows_of(path))
    clean(path)


def again(path: Path) -> None:
    """Replace the first shard by a copy of itself."""
    store = LocalStore(path)
    old = read_catalog(store).shards[0]
    chain = Chain.begin(store, old.dataset, old.run, "tool", "test")
    name = f"{chain.chain}-000000"
    shutil.copytree(path / "shards" / old.shard, path / "shards" / name)
    manifest = old.model_copy(update={"shard": name, "chain": chain.chain})
    data = canonical.dump(manifest.model_dump(mode="json"))
    (path / layout.manifest_path(name)).write_bytes(data)
    digest = canonical.digest(data)
    body = ReplaceBody(replaced=old.shard, shard=name, manifest_sha256=digest, n_rows=old.n_rows)
    chain.append("replace", body)
    chain.close("finished", {})
    seal(store)


# ---- the command


def test_command_says_what_it_did(tmp_path: Path) -> None:
    path = raw_dataset(tmp_path / "d")
    run = CliRunner().invoke(cli, ["info", str(path)])
    assert "shards are stored raw; compress them with actds recompress" in run.stdout
    run = CliRunner().invoke(cli, ["recompress", str(path), "--json", "--keep"])
    assert run.exit_code == 0, run.output
    said = json.loads(run.stdout)
    assert said["format"] == "actds.recompress" and len(said["shards"]) > 1
    run = CliRunner().invoke(cli, ["info", str(path)])
    assert "that are replaced; remove them with actds recompress" in run.stdout
    run = CliRunner().invoke(cli, ["recompress", str(path)])
    assert run.exit_code == 0 and "no raw shard to compress" in run.stdout
    assert f"seal 2 {actds.open(path).digest}" in run.stdout
    run = CliRunner().invoke(cli, ["recompress", str(tmp_path)])
    assert run.exit_code == 3 and "E101" in run.stderr


def test_refuses_an_object_store_because_it_has_no_lock() -> None:
    class Remote:
        uri = "s3://bucket/acts"

    with pytest.raises(ActdsError, match=r"E009 s3://bucket/acts.*no lock"):
        recompress(Remote())  # type: ignore[arg-type]
