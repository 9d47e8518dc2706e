"""``bench_stress.py``: a short harvest of long-tailed requests, by a real engine."""

from __future__ import annotations

from pathlib import Path

import bench_stress
import numpy as np
import pytest
from bench_stress import BLOCK, MAX_GENERATED, Queue, StressResult, long_tailed, stress

import actds
from actds_testing.faulty_disk import FaultyDisk, unavailable
from actds_testing.tiny import make_random_model
from actds_writers.config import WriteSettings

N_LAYERS, HIDDEN, LIMIT = 8, 512, 384
ROW_NBYTES = N_LAYERS * HIDDEN * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress") / "model"
    return make_random_model(folder, n_layers=N_LAYERS, hidden=HIDDEN, max_len=LIMIT)


def stressed(model: Path, folder: Path, seconds: float) -> StressResult:
    needs = actds.plan(
        model=model, prefill_rate=100, engine="transformers",
        engine_args={"max_num_seqs": 4}, max_step_rows=16, rows_per_shard=16, ring_mib=1,
        staging_mib=1, readouts=0,
    )  # fmt: skip
    return stress(needs, folder, seconds)


def test_lengths_have_a_long_tail_that_ends_at_the_models_limit(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("x\n")
    plan = long_tailed(
        WriteSettings(
            out=str(tmp_path / "acts"), model=model, prompts=str(tmp_path / "p.txt"),
            hooks="resid_post:all", engine="transformers",
        )
    )  # fmt: skip
    length = np.array([len(one.token_ids) for one in plan.encoded])
    assert len(length) % BLOCK == 0 and len(plan.client) == len(length) > 1000
    blocks = length.reshape(-1, BLOCK)
    assert (np.diff(blocks, axis=1) <= 0).all()
    assert (blocks[:, 0] == LIMIT - 8).all()
    assert np.median(length) < 50 < 4 * np.median(length) < length.mean() + 3 * length.std()
    assert all(
        1 <= one.max_tokens <= min(MAX_GENERATED, LIMIT - len(one.token_ids))
        for one in plan.encoded
    )
    special = set(plan.tokens.special)
    assert not any(special & set(one.token_ids) for one in plan.encoded[:200])


@pytest.fixture(scope="module")
def free(model: Path, tmp_path_factory: pytest.TempPathFactory) -> StressResult:
    folder = tmp_path_factory.mktemp("free")
    found = stressed(model, folder, 4.0)
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.standard
def test_a_run_says_what_it_met(free: StressResult) -> None:
    assert free.prompt_len[2] == LIMIT - 8
    assert free.n_tokens > LIMIT / 4 and 0 < free.seconds < 60
    # A model of 80 MB under torch: more than a process alone, less than the machine.
    assert free.peak_nbytes is not None and 100e6 < free.peak_nbytes < 8e9
    assert {queue.stage for queue in free.queues} >= {"staging", "ring"}
    assert any(queue.depth for queue in free.queues)
    assert f"{free.n_tokens:,} tokens in " in "\n".join(free.lines())


@pytest.mark.full
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_disk_that_is_too_slow_shows_before_the_harvest(
    model: Path, free: StressResult, tmp_path: Path
) -> None:
    # Staging, ring and buffers hold some 220 rows; the disk takes 25 a second.
    out = tmp_path / "out"
    out.mkdir()
    disk = FaultyDisk(out, tmp_path / "control")
    disk.throttle(25 * ROW_NBYTES)
    with disk.injected():
        found = stressed(model, out, max(5.0, 600 / free.tokens_per_s))
    assert found.dropped > 0
    assert max(queue.stall_s for queue in found.queues) > 1
    assert f"drop_newest: {found.dropped:,} (" in "\n".join(found.lines())
    assert list(out.iterdir()) == []


def test_the_words_say_what_was_met() -> None:
    queues = (Queue("ring", 31, 3, 1.5), Queue("pool", 1, 0, 0.0))
    found = StressResult(
        40, (20, 300, 376), 5000, 10.0, 900.0, None, 3 << 30, 1 << 20, queues, 50, 0.25
    )
    said = found.lines()
    assert "5,000 tokens in 10.0 s: 500 tokens/s, 900 in the busiest second" in said
    assert "peak memory not known, all processes with the model" in said
    assert "ring: at most 31 steps; 3 waits, 1.5 s" in said
    assert "pool: at most 1 shard" in said
    assert "drop_newest: 50 (1.0%) rows lost" in said


@pytest.mark.standard
def test_memory_of_the_gpus_is_what_their_tool_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(script: str) -> int | None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return bench_stress.device_memory()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert says("echo 1024; echo 512") == 1536 << 20
    assert says("echo '[N/A]'") is says("exit 9") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert bench_stress.device_memory() is None
