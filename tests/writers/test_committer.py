"""Stage 3 under pressure: when shards are written raw, and that they hold the same rows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actds.dataset.catalog import Catalog
from actds.dataset.ledger import Chain
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import codec, schema
from actds.format.schema import Genesis, Hook
from actds.store import Put, layout
from actds.store.local import LocalStore, NewLocalFile
from actds_writers.ipc.messages import HookSpec
from actds_writers.shards import TOKEN_COLUMNS, ShardBuffer, Slice
from actds_writers.shards.writer import RETRY_AFTER, CommitPlan, Committer, RawFallback

D_MODEL, ROWS_PER_SHARD = 16, 32
HOOK = HookSpec("resid_post.1", "resid_post", 1, D_MODEL, "bfloat16")
SHARD_NBYTES = ROWS_PER_SHARD * D_MODEL * 2


def test_raw_begins_at_the_threshold_and_lasts_for_one_shard() -> None:
    fallback = RawFallback(100)
    fallback.waiting(99)
    assert not fallback.take()
    fallback.waiting(100)
    fallback.waiting(0)  # the pressure was there, whatever came after
    assert fallback.is_wanted and fallback.take()
    assert not fallback.is_wanted and not fallback.take()


def test_a_threshold_of_zero_never_writes_raw() -> None:
    fallback = RawFallback(0)
    for nbytes in (0, 1, 1 << 40):
        fallback.waiting(nbytes)
        assert not fallback.take()


def test_raw_ends_where_it_is_no_faster_and_is_tried_again_later() -> None:
    fallback = RawFallback(1)

    def under_pressure() -> bool:
        fallback.waiting(1)
        return fallback.take()

    fallback.learn(1000, 1.0, raw=False)
    assert under_pressure(), "nobody knows yet what raw costs"
    fallback.learn(1000, 0.5, raw=True)
    assert under_pressure(), "raw is faster"
    for _ in range(4):
        fallback.learn(2000, 4.0, raw=True)  # by the byte, not by the shard
    assert [under_pressure() for _ in range(RETRY_AFTER)] == [False] * RETRY_AFTER
    assert under_pressure(), "the disk may have changed"
    fallback.learn(1000, 0.1, raw=True)
    assert under_pressure()


def test_an_empty_commit_teaches_nothing() -> None:
    fallback = RawFallback(1)
    fallback.learn(0, 1.0, raw=True)
    fallback.waiting(1)
    assert fallback.take()


class Loop:
    """The writer's loop around a committer; every value of a row says whose it is."""

    def __init__(self, out: Path, raw_threshold_nbytes: int, n_buffers: int = 3) -> None:
        self.store = LocalStore(out / "acts")
        hooks = [
            Hook(name=HOOK.name, kind="resid_post", layer=1, d_model=D_MODEL, dtype=HOOK.dtype)
        ]
        genesis = Genesis(dataset="1" * 32, created_ns=1, writer="test", hooks=hooks)
        self.store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
        chain = Chain.begin(self.store, genesis.dataset, "r-test", "writer", "test")
        plan = CommitPlan("r-test", "permuted", 3, 1, raw_threshold_nbytes)
        buffers = [ShardBuffer((HOOK,), ROWS_PER_SHARD) for _ in range(n_buffers)]
        self.held = threading.Event()
        self.held.set()
        self.through = 10**9  # the last step of which everything else is durable
        self.committer = Committer(self.store, chain, plan, buffers, self.hold)
        self.buffer = self.committer.spare()
        self.n_shards = 0

    def hold(self, last_step: int) -> int:
        assert self.held.wait(60)
        return min(last_step, self.through)

    def fill(self) -> None:
        number = np.arange(ROWS_PER_SHARD) + self.n_shards * ROWS_PER_SHARD
        columns = {name: (number % 256).astype(kind) for name, kind in TOKEN_COLUMNS.items()}
        columns["request"] = number.astype(np.uint32)
        rows = np.repeat((number + 1).astype(np.uint16)[:, None], D_MODEL, axis=1)[None]
        self.buffer.append(Slice(self.n_shards, (rows,), None, columns))
        self.n_shards += 1

    def shard(self) -> None:
        """Fill a buffer, hand it over and ask for an empty one."""
        self.fill()
        self.committer.commit("prefill", self.buffer)
        self.buffer = self.committer.spare()

    def finish(self) -> Catalog:
        self.committer.finish()
        assert self.committer.error is None
        return read_catalog(self.store)


def slow_encoder(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> threading.Event:
    """Let the first chunk, whose begin is told, take until a shard has to wait behind its own."""
    left, began = [1], threading.Event()

    def slow(items: Any, out: Any, *, mode: Any, **options: Any) -> int:
        if mode != "raw" and left:
            left.clear()
            began.set()
            for _ in range(20_000):
                if loop.committer.fallback.is_wanted:
                    break
                threading.Event().wait(0.001)
            else:
                raise AssertionError("no shard had to wait")
        return codec.encode_into(items, out, mode=mode, **options)

    monkeypatch.setattr("actds.format.encoding.encode_into", slow)
    return began


def test_a_slow_encoder_makes_the_waiting_shard_raw_and_no_row_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, SHARD_NBYTES, n_buffers=2)
    began = slow_encoder(monkeypatch, loop)
    loop.fill()
    loop.committer.commit("prefill", loop.buffer)
    assert began.wait(60)
    loop.buffer = loop.committer.spare()
    for _ in range(4):
        loop.shard()
    catalog = loop.finish()
    assert [m.compression for m in catalog.shards][:2] == ["normal", "raw"]
    assert [m.n_rows for m in catalog.shards] == [ROWS_PER_SHARD] * 5
    for shard in catalog.shards_of("r-test"):
        label = shard.tokens(["request"])["request"].to_numpy() + 1
        with shard.array(HOOK.name) as reader:
            rows = reader.read_all()
        assert np.array_equal(rows, np.repeat(label[:, None], D_MODEL, axis=1))


def test_a_shard_that_does_not_reach_the_threshold_waits_and_is_compressed(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path, SHARD_NBYTES + 1)
    loop.held.clear()
    loop.shard()
    loop.shard()
    assert loop.committer.backlog_nbytes == 2 * SHARD_NBYTES
    assert not loop.committer.fallback.is_wanted
    loop.held.set()
    assert {m.compression for m in loop.finish().shards} == {"normal"}
    assert loop.committer.backlog_nbytes == 0


def test_what_waits_at_the_end_of_a_run_is_compressed(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 1)
    loop.held.clear()
    loop.shard()
    loop.fill()
    loop.committer.commit("prefill", loop.buffer)  # nobody asks for a buffer any more
    loop.held.set()
    shards = loop.finish().shards
    assert len(shards) == 2 and {m.compression for m in shards} == {"normal"}


def test_rows_of_steps_that_are_not_durable_are_no_part_of_a_shard(tmp_path: Path) -> None:
    buffer = ShardBuffer((HOOK,), 12)

    def fill(steps: range) -> None:
        for step in steps:
            columns = {name: np.full(3, step, kind) for name, kind in TOKEN_COLUMNS.items()}
            rows = np.full((1, 3, D_MODEL), step, np.uint16)
            buffer.append(Slice(step, (rows,), None, columns))

    fill(range(5, 9))
    buffer.keep_through(8)
    assert (buffer.n_rows, buffer.first_step, buffer.last_step) == (12, 5, 8)
    buffer.keep_through(6)
    assert (buffer.n_rows, buffer.first_step, buffer.last_step) == (6, 5, 6)
    assert buffer.columns()["step"].tolist() == [5, 5, 5, 6, 6, 6]
    assert buffer.rows_by_hook()[HOOK.name][:, 0].tolist() == [5, 5, 5, 6, 6, 6]
    buffer.keep_through(4)
    assert buffer.n_rows == 0
    buffer.clear()
    fill(range(2, 4))
    assert (buffer.n_rows, buffer.first_step, buffer.last_step) == (6, 2, 3)

    loop = Loop(tmp_path, 0)
    loop.through = 1
    for _ in range(3):
        loop.shard()  # a step each
    found = loop.finish()
    assert [shard.last_step for shard in found.shards] == [0, 1]
    assert loop.committer.n_rows == 2 * ROWS_PER_SHARD


def test_shards_are_recorded_in_order_though_a_later_one_is_durable_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, real, synced = Loop(tmp_path, 0), NewLocalFile.commit, threading.Event()
    places: list[str] = []

    def commit(file: NewLocalFile) -> Put:
        assert not file.place.endswith("000000/tokens.parquet") or synced.wait(60)
        done = real(file)
        places.append(file.place)
        if file.place.endswith("000002/tokens.parquet"):
            synced.set()
        return done

    monkeypatch.setattr(NewLocalFile, "commit", commit)
    for _ in range(3):
        loop.shard()  # a buffer is free again as soon as its rows are encoded
    catalog = loop.finish()
    ends = [place for place in places if place.startswith("ledger/") or "shard.json" in place]
    assert [place.rpartition("/")[2] for place in ends] == [
        name for n in (1, 2, 3) for name in ("shard.json", f"{n:08d}.json")
    ]
    assert [shard.first_step for shard in catalog.shards] == [0, 1, 2]


def test_nothing_is_recorded_after_a_shard_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, real = Loop(tmp_path, 0), NewLocalFile.write

    def write(file: NewLocalFile, parts: Any) -> None:
        if "000001/acts.zarr" in file.place and file.place.endswith("c/0/0"):
            raise ActdsError("E503", file.place, got="no space", expected="a durable write")
        real(file, parts)

    monkeypatch.setattr(NewLocalFile, "write", write)
    for _ in range(4):
        loop.shard()  # never waits for a buffer that a failed shard would keep
    loop.committer.finish()
    assert loop.committer.error is not None and loop.committer.error.code == "E503"
    monkeypatch.undo()
    assert [shard.first_step for shard in read_catalog(loop.store).shards] == [0]
    assert loop.committer.n_rows == ROWS_PER_SHARD
    assert not [path for path in (tmp_path / "acts").rglob(".tmp-*")]
