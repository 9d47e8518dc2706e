"""Watching a harvest: each shard once, as it comes, and the verdict at the seal or at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from actds.cli import cli
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.faulty_disk import wait_until
from actds_testing.recovery import harvest_and_kill, shard_records
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import SyntheticEngine, pipeline_for
from actds_validators.validate import shards
from actds_validators.validate.validation import Seen, Watch, watch
from actds_writers.harvest.recover import recover
from actds_writers.ipc.messages import ClientFacts


def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how often each file is hashed."""
    counts: Counter[str] = Counter()
    real = shards.file_sha256

    def count(store: Any, path: str) -> str:
        counts[path] += 1
        return real(store, path)

    monkeypatch.setattr(shards, "file_sha256", count)
    return counts


def test_what_is_there_is_validated_at_once(
    dataset_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = hashed(monkeypatch)
    looks: list[Seen] = []
    found = watch(dataset_path, interval_s=0.01, seen=looks.append)
    assert found.exit_code() == 0 and found.totals["rows"] == looks[-1].n_rows
    assert [one.n_open for one in looks] == [0] and looks[0].findings == []
    again = {path for path, n in counts.items() if n > 1}
    assert again == set(), "the end reads nothing again that has not changed"
    assert any(path.endswith("/c/0/0") for path in counts)


def test_what_changes_after_it_was_hashed_is_read_again(copy_dataset: Callable[[], Path]) -> None:
    path = copy_dataset()
    following = Watch(path)
    assert following.look().findings == []
    array = next(iter(sorted(path.glob("shards/*/acts.zarr/*/c/0/0"))))
    before = array.stat()
    data = bytearray(array.read_bytes())
    data[40] ^= 1
    array.write_bytes(data)
    os.utime(array, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = shards.stamp(following.store, array.relative_to(path).as_posix())
    assert found != following.known[array.relative_to(path).as_posix()]
    from actds_validators.validate.validation import validate

    told = validate(path, known=following.known)
    assert [one.code for one in told.errors] == ["E202"]


def test_a_bad_shard_is_named_when_it_is_committed(copy_dataset: Callable[[], Path]) -> None:
    path = copy_dataset()
    array = next(iter(sorted(path.glob("shards/*/acts.zarr/*/c/0/0"))))
    array.write_bytes(array.read_bytes()[:-1])
    looks: list[Seen] = []
    found = watch(path, interval_s=0.01, seen=looks.append)
    assert {one.code for one in looks[0].findings} == {"E201"}
    assert found.exit_code() == 1


def test_a_broken_chain_is_named_once_and_ends_in_the_verdict(
    copy_dataset: Callable[[], Path],
) -> None:
    path = copy_dataset()
    record = sorted(path.glob("ledger/w-*/*.json"))[1]
    record.write_bytes(record.read_bytes().replace(b'"prev":"', b'"prev":"0'))
    looks: list[Seen] = []
    found = watch(path, interval_s=0.01, idle_s=0.05, seen=looks.append)
    assert sum(len(one.findings) for one in looks) == 1
    assert found.exit_code() == 1


def test_without_a_seal_it_ends_when_nobody_writes(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=3, sealed=False)
    found = watch(path, interval_s=0.01, idle_s=0.05)
    assert {one.code for one in found.errors} == {"E306"}
    nothing = watch(tmp_path / "none", interval_s=0.01, idle_s=0.05)
    assert nothing.exit_code() == 3


def test_levels_below_full_hash_no_array(
    dataset_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = hashed(monkeypatch)
    assert watch(dataset_path, "standard", interval_s=0.01).exit_code() == 0
    assert not counts


@pytest.mark.standard
def test_a_real_harvest_is_validated_shard_by_shard_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "acts"
    counts = hashed(monkeypatch)
    looks: list[Seen] = []
    results: list[Any] = []

    def follow() -> None:
        results.append(watch(out, interval_s=0.02, idle_s=60, seen=looks.append))

    follower = threading.Thread(target=follow)
    follower.start()  # before there is anything
    with pipeline_for(out) as pipeline:
        engine = SyntheticEngine(pipeline)
        for number in range(12):
            engine.request(number)
            if number == 5:
                wait_until(lambda: bool(looks and looks[-1].n_shards), "a shard that is seen")
                assert looks[-1].n_open
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        pipeline.finish("finished")
    seal(open_store(out))
    follower.join(60)
    [found] = results
    assert found.exit_code() == 0, found.findings
    n_shards = [one.n_shards for one in looks]
    assert n_shards == sorted(n_shards) and n_shards[0] == 0 < n_shards[-1]
    assert sum(path.endswith("tokens.parquet") for path in counts) == n_shards[-1]
    arrays = {path: n for path, n in counts.items() if path.endswith("/c/0/0")}
    assert len(arrays) == 2 * n_shards[-1] and set(arrays.values()) == {1}


@pytest.mark.standard
def test_a_harvest_that_is_killed_ends_the_watch_with_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "acts"
    command = [sys.executable, "-m", "actds", "validate", str(out), "--watch", "--interval", "0.05",
               "--idle", "1"]  # fmt: skip
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    harvest_and_kill(out, "census", "writer", facts=ClientFacts())
    stdout, stderr = follower.communicate(timeout=120)
    assert follower.returncode == 1
    assert "REFUSED" in stdout and "E305" in stdout and "actds recover" in stdout
    seen = [line for line in stderr.splitlines() if " hashed, " in line]
    assert int(seen[-1].split(" ")[0]) == len(shard_records(out)) >= 3
    recover(out)
    done = CliRunner().invoke(cli, ["validate", str(out), "--watch", "--interval", "0.05"])
    assert done.exit_code == 0, done.output


@pytest.mark.standard
def test_the_watch_can_be_interrupted(tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", n_requests=3, sealed=False)
    command = [sys.executable, "-m", "actds", "validate", str(path), "--watch", "--idle", "600"]
    follower = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore the signal, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert follower.stderr is not None
    while " hashed, " not in follower.stderr.readline():
        pass
    follower.send_signal(signal.SIGINT)
    _, stderr = follower.communicate(timeout=60)
    assert follower.returncode == 1 and "Traceback" not in stderr
