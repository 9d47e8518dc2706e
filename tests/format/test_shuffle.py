"""Shuffle: the same rows and the same account in one random order, whatever interrupts it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tensorstore
from click.testing import CliRunner

import actds
from actds.cli import cli
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import canonical, encoding
from actds.format.readouts import Readouts
from actds.publish.sealing import account_run
from actds.rewrite.scatter import RowGroup, shard_cuts
from actds.rewrite.shuffling import Shuffled, shuffle
from actds.store import layout
from actds.store.local import LocalStore, lock_dataset
from actds_testing import synthetic
from actds_testing.independent import IndependentReader
from actds_testing.places import VECTORS
from actds_testing.schedules import busy_shares
from actds_testing.schedules import simulate as simulate_tables
from actds_testing.simulate.dataset import write_dataset
from actds_testing.simulate.run import simulate
from actds_testing.simulate.scenario import Scenario
from actds_testing.synthetic import make_dataset, make_thinned
from actds_validators.validate.validation import validate

# Whole datasets are written, many times: long for a check before each commit.
pytestmark = pytest.mark.standard

WIDTHS = {"resid_post.0": 16, "resid_post.1": 40, "resid_post.2": 5}
TYPES: dict[str, Any] = {
    "resid_post.0": "bfloat16", "resid_post.1": "float16", "resid_post.2": "float32",
}  # fmt: skip
MIXED: dict[str, Any] = {"hooks": tuple(WIDTHS), "d_model": WIDTHS, "dtype": TYPES}
SMALL: dict[str, Any] = {"rows_per_shard": 24, "memory_nbytes": 2 * 160 * 50}
Row = tuple[str, int, int]


def rows_of(path: Path) -> dict[Row, Any]:
    """Return what is known of each row, by run, request and position; no row twice."""
    found: dict[Row, Any] = {}
    for one in actds.open(path).shards:
        tokens = one.tokens().to_pylist()
        bits = {}
        for hook in one.hooks:
            with one.array(hook) as reader:
                bits[hook] = reader.read_all()
        for number, row in enumerate(tokens):
            mine = found.setdefault((one.run, row["request"], row["position"]), {"tokens": row})
            assert mine["tokens"] == row and mine.keys().isdisjoint(bits)
            mine |= {hook: rows[number].tobytes() for hook, rows in bits.items()}
    assert len(found) > 50
    return found


def clean(path: Path) -> None:
    found = validate(path, "deep")
    assert [finding.line() for finding in found.findings] == []
    assert found.exit_code(strict=True) == 0


def contents(path: Path) -> dict[str, str]:
    """Return the digests of tables and arrays, by place in the order of shards."""
    return {
        f"{number} {entry.path}": entry.sha256
        for number, manifest in enumerate(read_catalog(LocalStore(path)).shards)
        for entry in manifest.files
    }


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of two runs whose hooks differ in width and type, with readouts."""
    path = tmp_path_factory.mktemp("mixed") / "acts"
    given = {**MIXED, "readouts": Readouts(1, seed=0), "rows_per_shard": 50}
    make_dataset(path, n_requests=30, seed=1, sealed=False, **given)
    return make_dataset(path, n_requests=12, seed=5, run="r-another", **given)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of one hook with tens of thousands of rows, 20 MB of them."""
    served = Scenario(
        n_steps=500, mean_batch_tokens=220, max_batch_tokens=512, max_num_seqs=64,
        prompt_median=350, generated_median=150, length_sigma=0.5, prefix_share=0.0,
        pool_rows=8192, d_model=256, n_projections=1, readouts=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide") / "acts"
    return write_dataset(simulate(served, 1), path, rows_per_shard=8192)


# ---- what the copy holds


def test_the_copy_has_every_row_once_and_the_same_account(mixed: Path, tmp_path: Path) -> None:
    done = shuffle(mixed, tmp_path / "out", seed=3, **SMALL)
    clean(tmp_path / "out")
    assert rows_of(tmp_path / "out") == rows_of(mixed)
    old, new = read_catalog(LocalStore(mixed)), read_catalog(LocalStore(tmp_path / "out"))
    assert old.seal is not None and new.seal is not None
    assert new.seal.totals == old.seal.totals and new.run_ids == old.run_ids
    assert new.digest == done.digest != old.digest == done.source_digest
    assert new.genesis.dataset != old.genesis.dataset and new.genesis.hooks == old.genesis.hooks
    for name in ("requests", "steps", "spans", "drops", "stalls", "readouts", "multiplicity"):
        assert new.table(name).equals(old.table(name)), name  # type: ignore[arg-type]
    for run in old.run_ids:
        assert account_run(new, run).totals == account_run(old, run).totals
    assert done.n_rows == sum(manifest.n_rows for manifest in old.shards)
    assert done.n_shards == len(new.shards) and not list(tmp_path.glob("*.partial"))


def test_rows_that_were_drawn_keep_their_probability(tmp_path: Path) -> None:
    schedule = simulate_tables(20, 3)
    path = make_thinned(tmp_path / "acts", schedule, busy_shares(schedule), readouts=Readouts(1, 0))
    shuffle(path, tmp_path / "out", seed=3)
    clean(tmp_path / "out")
    before, after = (actds.open(p).tokens().to_pylist() for p in (path, tmp_path / "out"))
    key = itemgetter("request", "position")
    assert sorted(before, key=key) == sorted(after, key=key)
    assert {row["inclusion"] for row in after} == {0.25, 1}


def test_what_was_looked_at_comes_with_the_copy(tmp_path: Path) -> None:
    source = VECTORS / "valid" / "looks"
    shuffle(source, tmp_path / "copy")
    assert not validate(tmp_path / "copy", "deep").errors
    copy, before = actds.open(tmp_path / "copy"), actds.open(source)
    assert copy.alerts().equals(before.alerts()) and copy.attention().num_rows
    (run,) = before.runs
    profile = f"readouts/{run}/profile.json"
    assert (tmp_path / "copy" / profile).read_bytes() == (source / profile).read_bytes()


def test_every_shard_but_the_last_of_a_phase_is_full(mixed: Path, tmp_path: Path) -> None:
    shuffle(mixed, tmp_path / "out", **SMALL)
    shards = read_catalog(LocalStore(tmp_path / "out")).shards
    for run, phase in {(one.run, one.phase) for one in shards}:
        sizes = [one.n_rows for one in shards if (one.run, one.phase) == (run, phase)]
        assert sizes[:-1] == [24] * (len(sizes) - 1) and 0 < sizes[-1] <= 24
    assert len(shards) > 8 and {one.order for one in shards} == {"permuted"}
    assert len({one.permutation_seed for one in shards}) == len(shards)


def test_the_run_records_say_what_was_copied(mixed: Path, tmp_path: Path) -> None:
    done = shuffle(mixed, tmp_path / "out", seed=11, **SMALL)
    old, new = actds.open(mixed), actds.open(tmp_path / "out")
    for run, record in new.runs.items():
        before = old.runs[run]
        added = {k: v.value for k, v in record.fields.items() if k not in before.fields}
        assert added["copy.method"] == "shuffle" and added["copy.seed"] == 11
        assert added["copy.source_digest"] == old.digest == done.source_digest
        assert added["copy.source_dataset"] == old.catalog.genesis.dataset
        assert {k: record.fields[k] for k in before.fields} == before.fields
        assert record.started_ns == before.started_ns


def test_chains_end_as_they_ended_in_the_dataset(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "a", drops=True, n_requests=20)
    shuffle(path, tmp_path / "b")

    def ends(where: Path) -> list[tuple[str, Any]]:
        chains = read_catalog(LocalStore(where)).chains.values()
        return sorted((one.kind, one.close and one.close.model_dump()) for one in chains)

    assert ends(path) == ends(tmp_path / "b") and len(ends(path)) == 2


def test_hooks_in_shards_of_their_own_keep_their_rows_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = synthetic.commit_shard

    def commit(store: Any, writer: Any, rows: Any, *, shard: str, **more: Any) -> None:
        for hook in rows.hooks:
            part = dataclasses.replace(rows, hooks={hook: rows.hooks[hook]})
            real(store, writer, part, shard=f"{shard}-{hook}", **more)

    monkeypatch.setattr(synthetic, "commit_shard", commit)
    path = make_dataset(tmp_path / "a", n_requests=30)
    shuffle(path, tmp_path / "b", **SMALL)
    clean(tmp_path / "b")
    assert rows_of(tmp_path / "b") == rows_of(path)
    catalog = read_catalog(LocalStore(tmp_path / "b"))
    (_, first), (_, second) = catalog.row_sets("r-synthetic")
    assert len(first) == len(second) > 3
    for one, other in zip(first, second, strict=True):
        assert one.hooks != other.hooks and one.tokens().equals(other.tokens())


@pytest.mark.parametrize("codec", ["default", "raw"])
def test_other_readers_see_the_same_rows(mixed: Path, tmp_path: Path, codec: Any) -> None:
    out = tmp_path / "out"
    shuffle(mixed, out, codec=codec, **SMALL)
    known, theirs = rows_of(mixed), IndependentReader(out)
    seal = actds.open(out).seal
    assert seal is not None and theirs.account() == seal.totals
    raw = {shard.manifest["compression"] for shard in theirs.shards}
    assert raw == {"raw" if codec == "raw" else "normal"}
    n_rows = 0
    for shard in theirs.shards:
        manifest, tokens = shard.manifest, theirs.tokens(shard)
        for hook in WIDTHS:
            place = out / layout.shard_dir(manifest["shard"]) / layout.array_dir(hook)
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(place)}}
            values = tensorstore.open(spec, read=True).result().read().result()
            for row, value in zip(tokens, values, strict=True):
                key = manifest["run"], row["request"], row["position"]
                assert known[key]["tokens"] == row and known[key][hook] == value.tobytes()
        n_rows += len(tokens)
    assert n_rows == len(known)


# ---- the order


def test_the_order_follows_from_digest_and_seed(mixed: Path, tmp_path: Path) -> None:
    # Neither the sizes of blocks nor an interruption are in it.
    for name, seed, memory in (("a", 3, 16_000), ("b", 3, 1 << 20), ("c", 4, 16_000)):
        shuffle(mixed, tmp_path / name, seed=seed, rows_per_shard=24, memory_nbytes=memory)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    a, c = contents(tmp_path / "a"), contents(tmp_path / "c")
    same = [key for key in a if key.endswith(("c/0/0", "tokens.parquet")) and a[key] == c[key]]
    assert a.keys() == c.keys() and same == []


@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_the_copy_is_the_same_to_the_byte_wherever_it_is_made(
    executor: Any, mixed: Path, tmp_path: Path
) -> None:
    if executor == "ray":
        pytest.importorskip("ray", reason="needs the extra actds[ray]")
    here = shuffle(mixed, tmp_path / "here", **SMALL)
    there = shuffle(mixed, tmp_path / "there", **SMALL, executor=executor)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    assert (here.n_rows, here.n_shards) == (there.n_rows, there.n_shards)
    # An error of a worker is that of a thread.
    array = next(mixed.glob("shards/*/acts.zarr/*/c/0/0"))
    shutil.copytree(mixed, tmp_path / "damaged")
    damaged = tmp_path / "damaged" / array.relative_to(mixed)
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ActdsError) as caught:
        shuffle(tmp_path / "damaged", tmp_path / "none", **SMALL, executor=executor)
    assert caught.value.code == "E202" and not (tmp_path / "none").exists()


def group_of(n_rows: int, rows_per_shard: int, key: int) -> RowGroup:
    group = RowGroup("g", (key, 7), "r", "decode", [], [], 0, rows_per_shard)
    vars(group)["starts"] = np.array([0, n_rows])
    return group


@pytest.mark.parametrize(("n_rows", "size"), [(1, 1), (7, 7), (1000, 64), (100_003, 999), (50, 99)])
def test_cuts_are_those_of_sorted_words(n_rows: int, size: int) -> None:
    group = group_of(n_rows, size, key=n_rows)
    words = np.sort(group.words(0, n_rows))
    np.testing.assert_array_equal(group.cuts, words[size::size])
    counts = np.bincount(group.target(0, n_rows))
    assert counts.tolist() == [size] * (n_rows // size) + [n_rows % size] * bool(n_rows % size)


def test_cuts_hold_where_all_words_fall_in_one_bin() -> None:
    rng = np.random.default_rng(0)
    words = rng.permutation(np.arange(5000, dtype=np.uint64)) + np.uint64(2**40)

    def parts() -> Iterator[Any]:
        yield from np.array_split(words, 7)

    np.testing.assert_array_equal(shard_cuts(parts, 5000, 600), 2**40 + np.arange(600, 5000, 600))


def test_words_are_found_without_those_before() -> None:
    group = group_of(1000, 10, key=5)
    whole = group.words(0, 1000)
    for start, stop in ((0, 1), (1, 2), (3, 9), (4, 8), (997, 1000), (500, 500)):
        np.testing.assert_array_equal(group.words(start, stop), whole[start:stop])
    assert len(np.unique(whole)) == 1000


def test_every_row_is_equally_likely_in_every_shard() -> None:
    # Two neighbours, over 4,000 seeds: 5 x 5 pairs of shards, as without replacement.
    counts = np.zeros((5, 5))
    for key in range(4000):
        first, second = group_of(20, 4, key).target(0, 20)[8:10]
        counts[first, second] += 1
    expected = np.full((5, 5), 4000 * 4 / (20 * 19) * 4) - np.eye(5) * 4000 * 4 / (20 * 19)
    assert scipy.stats.chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-4


def test_places_are_uniform_over_the_copy(wide: Path, tmp_path: Path) -> None:
    shuffle(wide, tmp_path / "out", seed=2, rows_per_shard=1024)

    def places(path: Path) -> dict[str, dict[Row, int]]:
        found: dict[str, dict[Row, int]] = {"prefill": {}, "decode": {}}
        for one in actds.open(path).shards:
            for row in one.tokens(["request", "position"]).to_pylist():
                mine = found[one.phase]
                mine[one.run, row["request"], row["position"]] = len(mine)
        return found

    before, after = places(wide), places(tmp_path / "out")
    for phase in before:
        pairs = np.array([(place, after[phase][row]) for row, place in before[phase].items()])
        assert len(pairs) > 1000
        table, _, _ = np.histogram2d(*pairs.T, bins=8)
        assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-4
        assert scipy.stats.spearmanr(*pairs.T).pvalue > 1e-4
        within = pairs[:, 1] % 1024
        assert (
            scipy.stats.kstest(within[pairs[:, 1] < len(pairs) // 1024 * 1024] / 1024, "uniform")[1]
            > 1e-4
        )


MEASURED = """
import sys, tracemalloc
from actds.rewrite.shuffling import shuffle
shuffle(sys.argv[1], sys.argv[2] + "-first", rows_per_shard=2048, memory_nbytes=1 << 21)
tracemalloc.start()
shuffle(sys.argv[1], sys.argv[2], rows_per_shard=2048, memory_nbytes=1 << 21)
print(tracemalloc.get_traced_memory()[1])
"""


def test_memory_does_not_grow_with_the_dataset(wide: Path, tmp_path: Path) -> None:
    nbytes = sum(manifest.n_rows for manifest in read_catalog(LocalStore(wide)).shards) * 512
    out = tmp_path / "out"
    # A process of its own, which has no memory of other tests; the first copy imports.
    command = [sys.executable, "-c", MEASURED, str(wide), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert nbytes > 15e6 and int(ended.stdout) < nbytes / 2
    clean(out)


# ---- interruptions


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def end_at(patch: pytest.MonkeyPatch, number: int, end: Callable[[], BaseException]) -> None:
    """Let the file operation of a number, and all that follow, end the process or fail."""
    count = iter(range(1, 10**6))

    def counted(real: Any) -> Any:
        def operation(*args: Any, **named: Any) -> Any:
            if 0 < number <= next(count):
                raise end()
            return real(*args, **named)

        return operation

    for owner, name in (
        (LocalStore, "put_new"),
        (np, "save"),
        (Path, "rename"),
        (shutil, "rmtree"),
    ):
        patch.setattr(owner, name, counted(getattr(owner, name)))


def disk_full() -> BaseException:
    return OSError(28, "No space left on device")


def test_ended_at_any_step_the_next_call_ends_with_the_same_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a kill leaves the page cache
    path = make_dataset(tmp_path / "acts", n_requests=16, **MIXED)
    options: dict[str, Any] = {"seed": 1, "rows_per_shard": 60, "memory_nbytes": 2 * 160 * 60}
    shuffle(path, tmp_path / "whole", **options)
    whole, known = contents(tmp_path / "whole"), rows_of(path)
    ended, number = 0, 0
    while True:
        number += 1 + (number > 12)  # every second one is enough
        out = tmp_path / f"out{number}"
        with monkeypatch.context() as patch:
            end_at(patch, number, Killed)
            try:
                shuffle(path, out, **options)
            except Killed:
                ended += 1
            else:
                break
        assert not out.exists() or (tmp_path / f"out{number}.partial").exists()
        done = shuffle(path, out, **options)
        assert contents(out) == whole and done.seal == 1
        assert not list(out.rglob(".tmp-*")) and not (tmp_path / f"out{number}.partial").exists()
        if number % 10 == 1:
            clean(out)
            assert rows_of(out) == known
        shutil.rmtree(out)
    assert ended > 20


def test_a_full_disk_is_told_and_the_next_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = make_dataset(tmp_path / "acts", n_requests=16), tmp_path / "out"
    for number in (3, 8):
        with monkeypatch.context() as patch:
            end_at(patch, number, disk_full)
            with pytest.raises((ActdsError, OSError), match=r"No space left") as told:
                shuffle(path, out, rows_per_shard=60, memory_nbytes=60 * 64)
            assert isinstance(told.value, ActdsError) and told.value.code == "E503"
            assert "it continues" in told.value.next_step
        assert not out.exists()
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(ActdsError, match=r"E503 .*other.partial: 100 bytes free"):
            shuffle(path, tmp_path / "other")
    shuffle(path, out, rows_per_shard=60, memory_nbytes=60 * 64)
    clean(out)


def test_what_the_disk_changed_is_never_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = make_dataset(tmp_path / "acts", n_requests=16), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            "actds.rewrite.shuffling.Blocks.tokens", lambda *_: (_ for _ in ()).throw(Killed())
        )
        with pytest.raises(Killed):
            shuffle(path, out)
    block = next((tmp_path / "out.partial").rglob("*.rows"))
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 1
    block.write_bytes(data)
    with pytest.raises(ActdsError, match=r"E503 .*\.rows: other bytes in rows"):
        shuffle(path, out)
    shutil.rmtree(block.parent)
    shuffle(path, out)
    assert rows_of(out) == rows_of(path)


KILLED = """
import os, signal, sys
from pathlib import Path
from actds.rewrite.shuffling import shuffle
from actds.store.local import LocalStore
left = [int(sys.argv[3])]
def counted(real):
    def operation(*args, **named):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)
    return operation
LocalStore.put_new, Path.rename = counted(LocalStore.put_new), counted(Path.rename)
shuffle(sys.argv[1], sys.argv[2], rows_per_shard=100, memory_nbytes=20000)
"""


def test_real_kills_cost_nothing(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (3, 4, 9, 21, 30):
        command = [sys.executable, "-c", KILLED, str(mixed), str(out), str(number)]
        ended = subprocess.run(command, timeout=120)
        assert ended.returncode == -signal.SIGKILL and not out.exists()
    shuffle(mixed, out, rows_per_shard=100, memory_nbytes=20000)
    clean(out)
    assert rows_of(out) == rows_of(mixed)
    assert not list(tmp_path.rglob(".tmp-*")) and list(tmp_path.iterdir()) == [out]


# ---- what is refused


def half_done(path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    with monkeypatch.context() as patch:
        end_at(patch, 9, Killed)
        with pytest.raises(Killed):
            shuffle(path, out, **options)


def test_refuses_to_continue_with_other_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_dataset(tmp_path / "acts", n_requests=16)
    other = make_dataset(tmp_path / "other", n_requests=16, seed=9)
    out = tmp_path / "out"
    half_done(path, out, monkeypatch, seed=1)
    for place, source, more in (
        ("seed", path, {"seed": 2}),
        ("codec", path, {"seed": 1, "codec": "raw"}),
        ("rows_per_shard", path, {"seed": 1, "rows_per_shard": 9}),
        ("memory_nbytes", path, {"seed": 1, "memory_nbytes": 1 << 24}),
        ("source", other, {"seed": 1}),
    ):
        with pytest.raises(ActdsError, match=rf"E009 {place}.*interrupted call had") as told:
            shuffle(source, out, **more)
        assert "out.partial to start anew" in told.value.next_step
    shuffle(path, out, seed=1)
    assert rows_of(out) == rows_of(path)


def test_refuses_what_it_cannot_copy(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts")
    unsealed = make_dataset(tmp_path / "unsealed", sealed=False)
    (tmp_path / "there").mkdir()
    for code, source, out, more in (
        ("E008", path, "there", {}),
        ("E008", path, "acts", {}),
        ("E306", unsealed, "out", {}),
        ("E101", tmp_path / "none", "out", {}),
        ("E009", path, "out", {"codec": "lz4"}),
        ("E009", path, "out", {"seed": -1}),
        ("E009", path, "out", {"rows_per_shard": 0}),
        ("E009", path, "out", {"memory_nbytes": 1000}),
    ):
        with pytest.raises(ActdsError, match=f"^{code} "):
            shuffle(source, tmp_path / out, **more)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["acts", "there", "unsealed"]


def test_refuses_a_copy_that_another_call_works_on(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts")
    (tmp_path / "out.partial").mkdir()
    lock = lock_dataset(tmp_path / "out.partial")
    try:
        with pytest.raises(ActdsError, match="E010"):
            shuffle(path, tmp_path / "out")
    finally:
        os.close(lock)


def test_a_damaged_shard_is_not_copied(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "acts")
    shard = read_catalog(LocalStore(path)).shards[1]
    file = path / layout.shard_dir(shard.shard) / layout.array_dir("resid_post.1") / "c/0/0"
    # A change that the checksums inside agree with: only the digest shows it.
    bits = np.zeros((shard.n_rows, 16), np.uint16) + 0x3F80
    encoded = b"".join(encoding.encode_array(bits, "bfloat16", raw=True).parts)
    entry = next(e for e in shard.files if e.path.endswith("resid_post.1/c/0/0"))
    assert canonical.digest(encoded) != entry.sha256
    file.write_bytes(encoded)
    with pytest.raises(ActdsError, match=f"E20[12] shards/{shard.shard}"):
        shuffle(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- the command


def test_command_says_what_it_did(mixed: Path, tmp_path: Path) -> None:
    args = ["shuffle", str(mixed), str(tmp_path / "out"), "--codec", "raw", "--seed", "5"]
    run = CliRunner().invoke(cli, args)
    assert run.exit_code == 0, run.output
    digest = actds.open(tmp_path / "out").digest
    assert f"seal 1 {digest}" in run.stdout
    assert f"copy of {actds.open(mixed).digest}, seed 5" in run.stdout
    n_rows = sum(manifest.n_rows for manifest in read_catalog(LocalStore(mixed)).shards)
    for stage in ("scatter", "write"):
        assert f"{stage}: {n_rows:,} of {n_rows:,} rows" in run.stderr
    run = CliRunner().invoke(cli, [*args[:2], str(tmp_path / "other"), "--json"])
    said = json.loads(run.stdout)
    assert (said["format"], said["version"]) == ("actds.shuffle", "1")
    assert said.keys() >= {field.name for field in dataclasses.fields(Shuffled)}
    run = CliRunner().invoke(cli, args)
    assert run.exit_code == 2 and "E008" in run.stderr
