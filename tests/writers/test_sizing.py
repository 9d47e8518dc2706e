"""Sizing: predictions of ``actds plan`` against the arithmetic, and against what a real run did."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import secrets
import shlex
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import actds
from actds.dataset.reading import read_catalog
from actds.errors import ActdsError
from actds.format import encoding
from actds.format.readouts import NONE, Readouts
from actds.format.schema import REQUIRED_PROVENANCE
from actds.store import open_store
from actds.text import format_nbytes
from actds_testing.synthetic import make_dataset
from actds_testing.synthetic_engine import (
    HOOKS,
    MAX_ROWS,
    RING_NBYTES,
    ResidualStack,
    SyntheticEngine,
    pipeline_for,
)
from actds_writers import sizing
from actds_writers.cli import plan
from actds_writers.config import MIB, HarvestSettings, WriterSettings
from actds_writers.engine_protocol import Workers
from actds_writers.harvest.machine import (
    DEFAULTS,
    DiskRates,
    measure,
    rates_of,
    shared_with,
    until_sustained,
)
from actds_writers.harvest.plan import overhead_of, read_profile
from actds_writers.ipc.link import Link, QueuePage, create_memory, view_memory
from actds_writers.ipc.messages import ClientFacts, Fact, HookSpec, StepRows, WorkerHello
from actds_writers.model_folder import SpecialTokens
from actds_writers.shards import TOKEN_COLUMNS
from actds_writers.shards.writer import PHASES, SPARE_BUFFERS, Writer
from actds_writers.sizing import (
    MEASURED,
    Burst,
    Geometry,
    Load,
    Overhead,
    Rate,
    Sizes,
    Width,
    capacity,
    memory_bound,
    peak_queue,
    stalled,
    stored_nbytes_per_token,
    windows,
)

stages = pytest.importorskip("actds_writers.capture.stages", reason="needs torch")
import torch  # noqa: E402

from actds_testing.fake_cuda import fake_cuda  # noqa: E402
from actds_writers.engines.account import WorkerSide  # noqa: E402
from actds_writers.engines.vllm.worker import room_beside  # noqa: E402

LOAD = Load(prefill=900.0, decode=100.0, tokens_per_request=500.0, tokens_per_step=250.0)


# memory ---------------------------------------------------------------------------------------


def test_constants_are_those_of_the_stages() -> None:
    assert len(PHASES) + SPARE_BUFFERS == sizing.N_BUFFERS
    columns = sum(np.dtype(kind).itemsize for kind in TOKEN_COLUMNS.values())
    assert columns == sizing.TOKEN_COLUMNS_NBYTES


@pytest.mark.standard
@pytest.mark.parametrize("readouts", [None, Readouts(n_projections=8, seed=0)])
def test_memory_of_a_real_pipeline_is_the_predicted_one(
    readouts: Readouts | None, tmp_path: Path
) -> None:
    with pipeline_for(tmp_path / "acts", readouts=readouts) as pipeline:
        engine = SyntheticEngine(pipeline)
        engine.request(0)
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        pipeline.finish("finished")
        written = pipeline.written
    assert written is not None and written.memory_nbytes is not None
    geometry = Geometry.of(HOOKS, readouts.width if readouts else 0)
    link = pipeline.link
    sizes = Sizes(MAX_ROWS, 40, RING_NBYTES, link.staging_nbytes, link.lane_nbytes)
    bound = memory_bound(geometry, sizes)
    # The synthetic engine's hooks have no padding and no matrix; all else is the same, exactly.
    assert written.memory_nbytes == bound.nbytes - bound.hooks + engine.buffers.nbytes
    assert engine.stages.ring_nbytes == bound.ring
    assert (bound.lane > 0) == (readouts is not None)


DIRECT = {"sync": (("--engine-arg", "async_scheduling=false"), 1), "async": ((), 2)}
N_LAYERS, D_MODEL, STEP_ROWS = 4, 64, 96


def worker_on_gpu(folder: Path, readouts: int, in_flight: int, **more: Any) -> Any:
    """Return the worker side of an engine whose model is on the GPU; its link is to nobody."""
    every = tuple((kind, n) for n in range(N_LAYERS) for kind in ("resid_pre", "resid_post"))
    link = Link(
        str(folder), "00", "r-fake", every,
        HarvestSettings(out=str(folder), hooks="as of the link", seed=3), MIB, 0, 1,
        lane_nbytes=sizing.LANE_NBYTES,
        readouts=Readouts(readouts - 1, 5).as_field() if readouts else NONE,
    )  # fmt: skip
    return WorkerSide(
        ResidualStack(torch.nn.Identity() for _ in range(N_LAYERS)), link,
        config={"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS}, computed=torch.bfloat16,
        device=torch.device("cuda"), max_rows=STEP_ROWS, padding=sizing.PADDING_ROWS,
        in_flight=in_flight, **more,
    )  # fmt: skip


@pytest.mark.parametrize("scheduling", DIRECT)
@pytest.mark.parametrize("readouts", [0, 9])
def test_a_worker_takes_of_a_gpu_what_the_plan_says(
    readouts: int, scheduling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "connect", lambda *_: Pipe()[0])
    options, in_flight = DIRECT[scheduling]
    done = run(
        "--d-model", D_MODEL, "--layers", N_LAYERS, "--hooks", "resid_pre:all;resid_post:all",
        "--json", *RATE, "--max-step-rows", STEP_ROWS, "--staging-mib", 0, "--ring-mib", 1,
        "--readouts", readouts, *options,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    planned = json.loads(done.output)["memory"]
    with fake_cuda(monkeypatch) as cuda:
        worker = worker_on_gpu(tmp_path, readouts, in_flight)
        # Rows that are gathered behind a rule are the only ones for which nothing is reserved.
        assert cuda.taken == planned["device_nbytes"] - planned["gathered"]
        assert planned["gathered"] == 2 * D_MODEL * STEP_ROWS * 2 * N_LAYERS
        while sum(cuda.registered.values()) < planned["pinned_nbytes"]:
            time.sleep(0.01)  # a thread of the stages locks its own
        assert sum(cuda.registered.values()) == planned["pinned_nbytes"]
        assert worker.stages.nbytes == sum(
            planned[name] for name in ("device_nbytes", "shared_nbytes", "identified")
        )
        worker.close()
        # The stages of the engine's next run reserve as much while these are still held.
        assert not vars(worker.stages)["_staging_memory"].nbytes


@pytest.mark.parametrize(
    ("short_by", "kv_cache", "utilization", "words"),
    [
        (1, 0, 1.0, "of it free; expected"),
        (1, 1000, 1.0, "free beside kv_cache_memory_bytes=1000;"),
        (1, 0, 0.75, "free beside the 25% that gpu_memory_utilization=0.75 leaves;"),
        (0, 1000, 0.75, ""),
        (0, 0, 0.75, ""),
    ],
)
def test_a_gpu_without_room_is_refused_before_anything_is_taken(
    short_by: int, kv_cache: int, utilization: float, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Link, "connect", lambda *_: Pipe()[0])
    geometry = Geometry((Width(D_MODEL, 2),) * 2 * N_LAYERS, 9)
    sizes = Sizes(STEP_ROWS, 0, MIB, in_flight=2, on_gpu=True)
    needed, weights = sizing.worker_memory(geometry, sizes).device_nbytes, 5000
    budget = needed + weights - short_by
    total = budget + kv_cache if kv_cache else math.ceil(budget / utilization)
    cache = SimpleNamespace(kv_cache_memory_bytes=kv_cache, gpu_memory_utilization=utilization)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache), requested_memory=budget,
        init_snapshot=SimpleNamespace(free_memory=total),
    )  # fmt: skip
    room = functools.partial(room_beside, engine)
    with fake_cuda(monkeypatch, nbytes=total) as cuda:
        torch.empty(weights, dtype=torch.uint8, device="cuda")
        if not short_by:
            worker_on_gpu(tmp_path, 9, 2, room=room).close()
            return
        with pytest.raises(ActdsError, match="E012 memory of the GPU") as refused:
            worker_on_gpu(tmp_path, 9, 2, room=room)
        assert cuda.taken == weights and not cuda.registered
    assert words in str(refused.value) and "Take fewer hooks" in str(refused.value)
    note = (tmp_path / "notes").read_text()
    assert note.startswith(f"Reserving {format_nbytes(needed)} of the GPU for capture, and ")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_memory_grows_with_every_option() -> None:
    geometry, sizes = Geometry((Width(576, 2),) * 2, 9), Sizes(8192, 65_536, 1 << 28)
    small = memory_bound(geometry, sizes).nbytes
    for change in ("max_step_rows", "rows_per_shard", "ring_nbytes", "n_threads"):
        more = dataclasses.replace(sizes, **{change: 2 * getattr(sizes, change)})
        assert memory_bound(geometry, more).nbytes > small, change
    assert memory_bound(geometry, dataclasses.replace(sizes, holds_files=True)).nbytes > small
    for wide in (
        Geometry(geometry.hooks + geometry.hooks, 9),
        Geometry((Width(576, 2), Width(600, 2)), 9),
        Geometry((Width(576, 2), Width(576, 4)), 9),
        Geometry(geometry.hooks, 18),
    ):
        assert memory_bound(wide, sizes).nbytes > small, wide


def test_rows_per_shard_keeps_the_buffers_within_their_budget() -> None:
    assert sizing.rows_per_shard(2_304) == sizing.DEFAULT_ROWS_PER_SHARD
    rows = sizing.rows_per_shard(98_304)
    assert rows * 98_304 * sizing.N_BUFFERS <= sizing.BUFFER_BUDGET_NBYTES
    assert sizing.rows_per_shard(1 << 40) == sizing.MIN_ROWS_PER_SHARD


# disk -----------------------------------------------------------------------------------------


def written_run(out: Path, *, d_model: int, n_rows: int, rows_per_shard: int) -> Path:
    """Write rows of normal values through a real writer, in steps of 256 tokens; one request."""
    out.mkdir()
    hooks = tuple(HookSpec(f"resid_post.{i}", "resid_post", i, d_model, "bfloat16") for i in (1, 2))
    per_step, rng = 256, np.random.default_rng(5)
    nbytes = len(hooks) * per_step * d_model * 2
    memory = create_memory(out.parent / "ring", nbytes)
    QueuePage.beside(out.parent / "ring", new=True)
    settings = WriterSettings(
        harvest=HarvestSettings(out=str(out), hooks="resid_post:1,2", seed=3),
        dataset=secrets.token_hex(16), run="r-size", resume=False, started_ns=1, software="test",
        facts=(), tokens=SpecialTokens(), rows_per_shard=rows_per_shard, n_threads=1,
        readouts=NONE,
    )  # fmt: skip
    facts = tuple(
        Fact(name, "none" if name == "capture.readouts" else "test", "declared")
        for name in REQUIRED_PROVENANCE
        if name != "capture.memory_nbytes"
    )
    hello = WorkerHello(hooks, facts, str(out.parent / "ring"), nbytes, per_step)
    writer = Writer(open_store(out), settings, hello)
    one = np.ones(1, np.int64)
    for step in range(n_rows // per_step):
        values = rng.standard_normal((len(hooks), per_step, d_model), dtype=np.float32)
        rows = view_memory(memory, 0, values.shape, np.uint16)
        rows[:] = (values.view(np.uint32) >> 16).astype(np.uint16)
        positions = np.arange(step * per_step, (step + 1) * per_step)
        writer.step(
            StepRows(step, 0, nbytes, one * 0, one * per_step, one * n_rows, positions,
                     np.minimum(rng.zipf(1.3, per_step), 49_151), ())
        )  # fmt: skip
    writer.finish("finished")
    return out


def test_bytes_on_disk_are_the_predicted_ones(tmp_path: Path) -> None:
    d_model, n_rows, rows_per_shard = 512, 8_192, 4_096
    out = written_run(tmp_path / "d", d_model=d_model, n_rows=n_rows, rows_per_shard=rows_per_shard)
    found = sum(p.stat().st_size for p in out.glob("shards/**/*") if p.is_file())
    found += sum(p.stat().st_size for p in out.glob("ledger/*/*"))
    # How well these rows compress is not what is tested: their own ratio, as of one chunk.
    sample = np.random.default_rng(0).standard_normal((1_024, d_model), dtype=np.float32)
    bits = (sample.view(np.uint32) >> 16).astype(np.uint16)
    ratio = bits.nbytes / sum(map(len, encoding.encode_array(bits, "bfloat16").parts))
    overhead = dataclasses.replace(MEASURED, ratio=ratio, request=0.0, step=0.0)
    parts = stored_nbytes_per_token(
        Geometry((Width(d_model, 2),) * 2), overhead, LOAD, rows_per_shard
    )
    assert found == pytest.approx(sum(parts.values()) * n_rows, rel=0.03)
    assert parts["rows"] == pytest.approx(2 * d_model * 2 / ratio)
    beside = sum(p.stat().st_size for p in out.glob("shards/*/tokens.parquet")) / n_rows
    assert beside == pytest.approx(overhead.token, rel=0.5)


def test_readouts_and_census_are_counted_per_row_and_per_request() -> None:
    overhead = Overhead(2.0, 5.0, 100.0, 50.0, 4.0, 1_000.0, 500.0, "made up")
    parts = stored_nbytes_per_token(Geometry((Width(100, 2),) * 2, 9), overhead, LOAD, 1_000)
    assert parts == {
        "rows": 200.0,
        "tokens": 5.0,
        "readouts": 2 * (36 + 4.0),
        "census": 100 / 500 + 50 / 250,
        "manifests": 2.0,
    }


# queues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bursts", "service", "stall_s", "peak"),
    [
        ((), 2_000.0, 0.0, 0.0),
        ((), 2_000.0, 10.0, 10_000.0),
        ((), 999.0, 10.0, math.inf),
        ((Burst(4.0, 10.0),), 2_000.0, 0.0, 20_000.0),
        ((Burst(2.0, 10.0),), 2_000.0, 0.0, 0.0),
        ((Burst(4.0, 10.0),), 2_000.0, 5.0, 30_000.0),  # 20,000 in the stall, then 2,000/s more
        ((Burst(4.0, 10.0),), 8_000.0, 5.0, 20_000.0),  # drained faster than the burst fills
        ((Burst(4.0, 2.0),), 2_000.0, 5.0, 11_000.0),  # 8,000 in the burst, 3,000 after it
        ((Burst(4.0, 10.0), Burst(1.5, 1_000.0)), 1_100.0, 0.0, 400_000.0),
    ],
)
def test_peak_of_the_queue(
    bursts: tuple[Burst, ...], service: float, stall_s: float, peak: float
) -> None:
    load = dataclasses.replace(LOAD, bursts=bursts)
    assert peak_queue(load, service, stall_s) == pytest.approx(peak)


def test_peak_of_the_queue_is_that_of_a_simulation() -> None:
    rng = np.random.default_rng(11)
    for _ in range(50):
        burst = Burst(float(rng.uniform(1, 6)), float(rng.uniform(1, 20)))
        stall_s, service = float(rng.uniform(0, 20)), float(rng.uniform(1_000, 6_000))
        load = dataclasses.replace(LOAD, bursts=(burst,))
        queue = peak = 0.0
        dt = 0.005
        for t in np.arange(0.0, 60.0, dt):
            queue += dt * load.mean * (burst.factor if t < burst.seconds else 1.0)
            queue = max(0.0, queue - dt * (service if t >= stall_s else 0.0))
            peak = max(peak, queue)
        assert peak_queue(load, service, stall_s) == pytest.approx(peak, rel=0.02, abs=50)


def test_a_stall_costs_what_does_not_fit_the_ring() -> None:
    cost = stalled(LOAD, ring_tokens=4_000, stall_s=10.0)
    assert (cost.filled_s, cost.engine_waits_s) == (4.0, 6.0)
    assert (cost.lost_tokens, cost.lost_share) == (6_000, 0.6)
    assert stalled(LOAD, ring_tokens=10_000, stall_s=10.0).lost_tokens == 0


# stages ---------------------------------------------------------------------------------------

RATES = rates_of({"d2h": 10.0, "copy": 5.0, "encode": 1.0, "disk": 0.5}, {})


def judged(load: Load, rates: dict[str, Rate] = RATES, **options: Any) -> Any:
    facts: dict[str, Any] = {"stall_s": 10.0}
    return capacity(
        Geometry((Width(1_000, 2),) * 2),
        Sizes(512, 65_536, 0, n_threads=2),
        load,
        rates,
        MEASURED,
        **{**facts, **options},
    )


@pytest.mark.parametrize(
    ("name", "slow", "stage"),
    [
        ("d2h", 0.01, "link"),
        ("copy", 0.01, "ring"),
        ("encode", 0.001, "encode"),
        ("disk", 0.001, "disk"),
    ],
)
def test_the_slow_stage_saturates_first(name: str, slow: float, stage: str) -> None:
    rates = {**RATES, name: Rate(slow, "given")}
    found = judged(LOAD, rates)
    assert found.bottleneck.name == stage
    assert found.bottleneck.max_tokens < judged(LOAD).bottleneck.max_tokens
    limits = {s.name: s.max_tokens for s in found.stages}
    assert limits["link"] == pytest.approx(rates["d2h"].gbps * 1e9 / 4_000)
    assert limits["encode"] == pytest.approx(2 * rates["encode"].gbps * 1e9 / 4_000)
    # Shards are on their way side by side: the slower of both counts, not their sum.
    assert found.bottleneck.max_tokens == min(limits.values())


def test_the_ring_holds_burst_and_stall_and_the_stall_then_costs_nothing() -> None:
    load = dataclasses.replace(LOAD, prefill=50_000.0, bursts=(Burst(4.0, 10.0),))
    found = judged(load)
    assert found.fits and not found.fits_burst
    row = found.geometry.row_nbytes
    assert found.ring_burst_nbytes == pytest.approx(
        10.0 * (load.peak - found.bottleneck.max_tokens) * row
    )
    assert found.ring_stall_nbytes == pytest.approx(10.0 * load.mean * row)
    assert found.ring_nbytes > max(found.ring_burst_nbytes, found.ring_stall_nbytes)
    assert found.sizes.ring_nbytes == found.ring_nbytes and found.ring_nbytes % MIB == 0
    assert found.stalls[0].lost_tokens == 0
    small = judged(load, stall_s=0.0)
    assert small.ring_nbytes < found.ring_nbytes


def test_a_mean_that_is_too_much_is_said_and_no_ring_is_proposed() -> None:
    found = judged(dataclasses.replace(LOAD, prefill=1e7))
    assert not found.fits and math.isinf(found.ring_nbytes)
    assert found.sustained_share == pytest.approx(found.bottleneck.max_tokens / found.load.mean)


# profile --------------------------------------------------------------------------------------


def test_windows_see_the_burst_that_the_mean_hides() -> None:
    t_ns = np.arange(0, 100_500_000_000, 500_000_000)  # two steps a second, 100 whole seconds
    tokens = np.where((t_ns >= 50e9) & (t_ns < 60e9), 2_000, 100)
    one = windows([(t_ns, tokens)], 1.0)
    ten = windows([(t_ns, tokens)], 10.0)
    assert one is not None and ten is not None
    assert (one.n, one.p50, one.p99, one.max) == (100, 200.0, 4_000.0, 4_000.0)
    assert one.mean == ten.mean == pytest.approx(0.9 * 200 + 0.1 * 4_000)
    assert one.burst == Burst(4_000 / one.mean, 1.0)
    assert ten.n == 10 and ten.max == 4_000
    twice = windows([(t_ns, tokens), (t_ns + 10**15, tokens)], 1.0)
    assert twice is not None and (twice.n, twice.mean) == (200, one.mean)
    assert windows([(t_ns[:1], tokens[:1])], 1.0) is None


def test_a_profile_of_nothing_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", n_requests=4)
    steps = actds.open(dataset).steps()["t_ns"].to_pylist()
    assert max(steps) - min(steps) < 2e9
    with pytest.raises(ActdsError, match="E009 profile"):
        read_profile(open_store(dataset))


def test_bytes_of_a_dataset_are_those_of_its_files(tmp_path: Path) -> None:
    store = open_store(make_dataset(tmp_path / "d", n_requests=12))
    catalog = read_catalog(store)
    found = overhead_of(catalog, store, n_requests=12, n_steps=4)

    def nbytes(pattern: str) -> int:
        sizes = [path.stat().st_size for path in (tmp_path / "d").glob(pattern)]
        assert sizes, pattern
        return sum(sizes)

    n_rows = sum(shard.n_rows for shard in catalog.shards)
    assert found.token * n_rows == pytest.approx(nbytes("shards/*/tokens.parquet"))
    census = nbytes("census/*/requests-*") + nbytes("census/*/spans-*")
    assert found.request * 12 == pytest.approx(census)
    assert found.step * 4 == pytest.approx(nbytes("census/*/steps-*"))
    rows = sum(s.n_rows * h.d_model * 2 for s in catalog.shards for h in catalog.genesis.hooks)
    assert found.ratio * nbytes("shards/*/acts.zarr/*/c/0/0") == pytest.approx(rows)


# machine --------------------------------------------------------------------------------------


def test_a_measured_machine_leaves_nothing_behind(tmp_path: Path) -> None:
    found, disk = measure(tmp_path, seconds=0.2, nbytes=1 << 20)
    assert set(found) == set(DEFAULTS) and all(rate > 0 for rate in found.values())
    assert found["disk"] == disk.sustained_gbps <= disk.burst_gbps
    assert disk.nbytes % (1 << 20) == 0 and disk.nbytes > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ActdsError, match="E009 measure"):
        measure(tmp_path / "absent", seconds=0.2)


def test_given_rates_come_before_measured_and_these_before_assumed() -> None:
    rates = rates_of({"disk": 3.0, "copy": None}, {"disk": 1.5, "copy": 2.0})
    assert rates["disk"] == Rate(3.0, "given")
    assert rates["copy"] == Rate(2.0, "measured")
    assert rates["encode"] == Rate(DEFAULTS["encode"], "assumed")


@dataclasses.dataclass
class Drive:
    """A drive with a cache, and pauses; the clock is its own."""

    cached: float
    cache_gbps: float
    gbps: float
    pauses: tuple[int, ...] = ()
    now: float = 0.0
    n: int = 0

    def write(self) -> int:
        fast = self.n * 64 * MIB < self.cached
        self.now += 64 * MIB / ((self.cache_gbps if fast else self.gbps) * 1e9)
        self.now += 3.0 * (self.n in self.pauses)
        self.n += 1
        return 64 * MIB

    def measured(self, seconds: float = 60.0) -> DiskRates:
        return until_sustained(self.write, seconds, lambda: self.now)


def test_a_drive_is_written_past_its_cache_and_no_further() -> None:
    found = Drive(cached=40e9, cache_gbps=4.0, gbps=0.8).measured()
    assert found.burst_gbps == pytest.approx(4.0, rel=0.02)
    assert found.sustained_gbps == pytest.approx(0.8, rel=0.02)
    assert found.cache_nbytes == pytest.approx(40e9, abs=8e9 + 64 * MIB)
    assert found.is_steady and found.seconds < 22
    assert "burst 4 GB/s, sustained 0.8 GB/s, after " in found.words


def test_a_drive_without_a_fall_is_written_to_until_the_time_is_over() -> None:
    found = Drive(cached=0, cache_gbps=1.0, gbps=2.0).measured(30)
    assert (found.cache_nbytes, found.is_steady) == (None, True)
    assert found.burst_gbps == pytest.approx(found.sustained_gbps, rel=0.02)
    assert found.seconds == pytest.approx(30, abs=0.1)
    assert "no fall in" in found.words


def test_a_fall_at_the_end_is_not_called_steady_and_a_pause_is_no_fall() -> None:
    late = Drive(cached=54e9, cache_gbps=1.0, gbps=0.1).measured()
    assert late.cache_nbytes is not None and not late.is_steady
    assert "not steady yet" in late.words
    paused = Drive(cached=0, cache_gbps=1.0, gbps=1.0, pauses=(200,)).measured(40)
    assert paused.cache_nbytes is None
    assert paused.sustained_gbps == pytest.approx(1.0, rel=0.02)


def test_who_shares_the_drive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.stat(tmp_path).st_dev
    ours = f"{os.major(number)}:{os.minor(number)}"
    root, out, other = tmp_path / "root", tmp_path / "out", Path("/proc")
    for folder in (out, root / "var/log", root / "proc", root / "sys/dev/block"):
        folder.mkdir(parents=True)
    swap = tmp_path / "swap file"
    swap.touch()
    line = f"{str(swap).replace(' ', chr(92) + '040')} file 8 0 -2"
    (root / "proc/swaps").write_text(
        f"Filename Type Size Used Priority\n{line}\n/dev/gone partition\n"
    )
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert [what.split(" (")[0] for what in shared_with(out, root)] == [
        "temporary files", "logs", "swap"
    ]  # fmt: skip
    # Partitions of one drive, one of them below a mapped volume, are that drive.
    drive = root / "sys/devices/sda"
    for part in ("sda1", "sda2"):
        (drive / part).mkdir(parents=True)
        (drive / part / "partition").touch()
    mapped = root / "sys/devices/dm-0/slaves"
    mapped.mkdir(parents=True)
    (mapped / "sda2").symlink_to(drive / "sda2")
    (root / "sys/dev/block" / ours).symlink_to(drive / "sda1")
    theirs = os.stat(other).st_dev
    (root / "sys/dev/block" / f"{os.major(theirs)}:{os.minor(theirs)}").symlink_to(mapped.parent)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(other))
    assert f"temporary files ({other})" in shared_with(out, root)
    (mapped / "sda2").unlink()
    assert f"temporary files ({other})" not in shared_with(out, root)


# command --------------------------------------------------------------------------------------


def run(*args: object) -> Result:
    return CliRunner().invoke(plan, [str(arg) for arg in args])


MODEL = ("--d-model", 2048, "--layers", 24, "--hooks", "resid_post:10,20")
RATE = ("--prefill-rate", 9_000, "--decode-rate", 1_000)


def test_page_and_json_say_the_same_and_fit_a_terminal() -> None:
    options = (*MODEL, *RATE, "--burst", "3:10", "--disk-gbps", 0.5, "--threads", 2)
    page, facts = run(*options), json.loads(run(*options, "--json").output)
    assert page.exit_code == 0
    assert (facts["format"], facts["version"]) == ("actds.plan", "1")
    assert facts["geometry"]["row_nbytes"] == 2 * 2048 * 2
    assert f"{facts['geometry']['row_nbytes']:,} bytes per token" in page.output
    assert f"{facts['bottleneck']} saturates first" in page.output
    assert f"{facts['disk']['nbytes_per_token']:,.0f} bytes per token" in page.output
    assert "disk 0.5 (given)" in page.output
    assert facts["rates"]["disk"] == {"gbps": 0.5, "origin": "given"}
    assert facts["ring"]["nbytes"] % MIB == 0
    assert max(len(line) for line in page.output.splitlines()) <= 100
    command = shlex.split(page.output[page.output.index("actds write") :].replace("\\\n", " "))
    assert command == facts["options"]
    assert command[command.index("--ring-mib") + 1] == str(facts["ring"]["nbytes"] // MIB)


def test_a_measured_disk_is_said_with_those_who_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actds_writers.harvest.plan.shared_with", lambda folder: ["logs (/x)"])
    monkeypatch.setattr("actds_writers.harvest.machine.MEASURED_NBYTES", 1 << 20)
    words = (*MODEL, *RATE, "--measure", tmp_path, "--measure-seconds", 0.2)
    page, facts = run(*words), json.loads(run(*words, "--json").stdout)
    assert "disk measured: burst" in page.stdout
    assert f"WARNING  {tmp_path} shares its drive with:" in page.stdout
    assert facts["shares_drive_with"] == ["logs (/x)"]
    assert facts["rates"]["disk"] == {
        "gbps": facts["measured_disk"]["sustained_gbps"], "origin": "measured"
    }  # fmt: skip
    plain = json.loads(run(*MODEL, *RATE, "--json").stdout)
    assert (plain["measured_disk"], plain["shares_drive_with"]) == (None, [])


def test_options_that_follow_are_options_of_write() -> None:
    from actds_writers.cli import write

    options = write.get_params(click.Context(write))
    known = {name for option in options for name in option.opts}
    told = json.loads(run(*MODEL, *RATE, "--json").output)["options"]
    assert {word for word in told if word.startswith("--")} <= known


def test_the_mean_decides_the_exit_code() -> None:
    slow = run(*MODEL, *RATE, "--disk-gbps", 0.001)
    assert slow.exit_code == 1
    assert re.search(r"drop_newest, drop_oldest: 9[0-9]% of the rows are lost", slow.output)
    assert "no size is large enough" in slow.output
    facts = json.loads(run(*MODEL, *RATE, "--disk-gbps", 0.001, "--json").output)
    assert facts["ring"]["nbytes"] is None and not facts["fits_mean"]


def test_the_census_of_all_tokens_is_stated_beside_the_bound() -> None:
    facts = json.loads(run(*MODEL, *RATE, "--tokens", 10**9, "--json").output)
    load = facts["load"]
    requests, steps = 1e9 / load["tokens_per_request"], 1e9 / load["tokens_per_step"]
    wanted = 300 * requests + 40 * steps + 3e9
    assert facts["memory"]["census_nbytes"] == pytest.approx(wanted)
    page = run(*MODEL, *RATE, "--tokens", 10**9).output
    assert f"{format_nbytes(wanted)} more for the census" in page


def test_a_given_ring_is_judged() -> None:
    facts = json.loads(run(*MODEL, *RATE, "--ring-mib", 512, "--json").output)
    ring_nbytes = facts["memory"]["ring"]
    assert ring_nbytes == 512 * MIB
    rate = facts["load"]["mean"] * facts["geometry"]["row_nbytes"]
    assert facts["stalls"][0]["filled_s"] == pytest.approx(ring_nbytes / rate)
    assert facts["stalls"][0]["lost_tokens"] > 0


def test_a_model_folder_says_size_and_type(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 6, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = json.loads(run("--model", tmp_path, *RATE, "--readouts", 0, "--json").output)
    assert facts["geometry"] == {
        "hooks": 6 * [{"d_model": 64, "itemsize": 4}], "n_hooks": 6, "n_readouts": 0,
        "row_nbytes": 6 * 64 * 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), "E009"),
        (MODEL, "E009"),
        ((*MODEL, *RATE, "--burst", "3"), "E009"),
        ((*MODEL, *RATE, "--burst", "0.5:10"), "E009"),
        ((*MODEL, *RATE, "--burst", "nan:10"), "E009"),
        ((*MODEL, *RATE, "--hooks", "resid_post:99"), "E007"),
        ((*MODEL, *RATE, "--profile", "/no/such/dataset"), "E101"),
    ],
)
def test_bad_options_are_refused(options: tuple[object, ...], code: str) -> None:
    error = run(*options).exception
    assert isinstance(error, ActdsError) and error.code == code


# stages, replicas, steps in flight -------------------------------------------------------------


def planned(*options: object) -> dict[str, Any]:
    words = ("--d-model", 512, "--layers", 7, "--hooks", "resid_post:all;embed", "--json", *RATE)
    done = run(*words, "--max-step-rows", 1024, "--staging-mib", 0, *options)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.output))


def test_each_stage_and_each_replica_is_said() -> None:
    one = planned("--engine-arg", "async_scheduling=false")
    both = ("--engine-arg", "pipeline_parallel_size=2", "--engine-arg", "data_parallel_size=2")
    found = planned(*both, "--engine-arg", "async_scheduling=false")
    assert [(s["stage"], s["layers"], s["n_hooks"]) for s in found["engines"]["stages"]] == [
        (0, [0, 4], 5), (1, [4, 7], 3),
    ]  # fmt: skip
    stages = found["engines"]["stages"]
    assert sum(s["row_nbytes"] for s in stages) == one["geometry"]["row_nbytes"]
    assert found["memory"]["device_nbytes"] == sum(s["device_nbytes"] for s in stages)
    assert found["memory"]["shared_nbytes"] == sum(s["shared_nbytes"] for s in stages)
    assert found["memory"]["buffers"] == one["memory"]["buffers"]
    assert (found["engines"]["n"], found["engines"]["nbytes"]) == (2, 2 * found["memory"]["nbytes"])
    # Half of the tokens, and 5 of 8 hooks in the larger ring.
    share = found["ring"]["nbytes"] / one["ring"]["nbytes"]
    assert share == pytest.approx(5 / 16, abs=2 * MIB / one["ring"]["nbytes"])
    page = run("--d-model", 512, "--layers", 7, *RATE, *both).output
    assert "stages   stage 0: layers 0-3, 4 hooks: " in page and "stage 1: layers 4-6" in page
    assert "engines  2, each with 1/2 of the load" in page
    assert "pipeline_parallel_size=2" in page


@pytest.mark.parametrize(
    ("options", "in_flight", "staged"),
    [
        (["async_scheduling=false"], 1, 1),
        ([], 2, 3),  # vLLM's default on GPUs
        (["async_scheduling=true"], 2, 3),
        (["pipeline_parallel_size=2", "async_scheduling=false"], 2, 3),
        (["pipeline_parallel_size=2"], 3, 4),
    ],
)
def test_staging_holds_the_steps_in_flight_and_one_more(
    options: list[str], in_flight: int, staged: int
) -> None:
    found = planned(*(word for option in options for word in ("--engine-arg", option)))
    assert found["engines"]["in_flight"] == in_flight
    for stage in found["engines"]["stages"]:
        assert stage["staging_nbytes"] == staged * 1024 * stage["row_nbytes"]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.standard
def test_a_worker_has_the_staging_that_is_predicted(in_flight: int, tmp_path: Path) -> None:
    with pipeline_for(tmp_path / "acts") as pipeline:
        engine = SyntheticEngine(pipeline, in_flight=in_flight)
        geometry = Geometry.of(HOOKS)
        sizes = Sizes(MAX_ROWS, 40, RING_NBYTES, in_flight=in_flight)
        bound = memory_bound(geometry, sizes)
        assert engine.stages.nbytes == bound.nbytes - bound.writer_nbytes - bound.hooks + (
            engine.buffers.nbytes
        )
        engine.close()
        pipeline.finish("interrupted")


@pytest.mark.standard
@pytest.mark.parametrize(("n_layers", "stages"), [(7, 2), (30, 4), (31, 4), (32, 3), (3, 3)])
def test_layers_are_split_as_vllm_splits_them(n_layers: int, stages: int) -> None:
    split = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    mine = Workers(stages).layers(n_layers)
    assert [(one.start, one.stop) for one in mine] == [
        split(n_layers, rank, stages) for rank in range(stages)
    ]


def test_an_engine_option_that_breaks_accounting_is_refused_in_a_plan() -> None:
    done = run(*MODEL, *RATE, "--engine-arg", "enable_dbo=true")
    assert "E012 engine_args enable_dbo" in str(done.exception)


def test_a_plan_says_what_rules_for_a_share_would_store() -> None:
    """300 prompt and 100 generated tokens: a tenth of the former and all of the latter."""
    result = actds.plan(
        d_model=64, layers=2, hooks="resid_post:1", prefill_rate=3000, decode_rate=1000,
        tokens_per_request=400, tokens=4_000_000, keep="decode: 1; 0.1",
    )  # fmt: skip
    sample = result.sample
    assert sample is not None
    assert sample.n_rows == pytest.approx(300_000 + 1_000_000)
    weights = np.repeat([10.0, 1.0], [300_000, 1_000_000])
    effective = weights.sum() ** 2 / (weights**2).sum()
    assert sample.n_effective == pytest.approx(effective)
    assert sample.error_of_mean == pytest.approx(1.96 / effective**0.5)
    assert f"{sample.n_rows:,.0f} rows" in "\n".join(result.lines())
    more = actds.plan(
        d_model=64, layers=2, hooks="resid_post:1", prefill_rate=3000, decode_rate=1000,
        tokens_per_request=400, tokens=4_000_000,
        keep="role user: 0.5; label topic=a: 0.5; decode: 1; 0.1",
    )  # fmt: skip
    assert more.sample is not None and more.sample.n_rows == sample.n_rows
    assert "taken to hold nowhere: rules for roles, requests" in "\n".join(more.lines())
    at = result.command.index("--keep")
    assert result.command[at + 1] == "decode: 1; 0.1"
    assert result.as_json()["sample"]["n_rows"] == sample.n_rows


def test_a_plan_says_how_many_nodes_a_store_carries_beside_a_trainer() -> None:
    fixed: dict[str, Any] = {
        "d_model": 4096, "layers": 32, "dtype": "bfloat16", "hooks": "resid_post:10,20",
        "prefill_rate": 5000, "decode_rate": 5000,
    }  # fmt: skip
    result = actds.plan(**fixed, nodes=16, store_gbps=2.0, train_rows=10_000)
    nodes, stored = result.nodes, result.capacity.stored_nbytes
    assert nodes is not None
    assert nodes.written_gbps == pytest.approx(16 * 10_000 * stored / 1e9)
    assert nodes.read_gbps == pytest.approx(10_000 * stored / 1e9)
    # The trainer reads what one node writes: 2 GB/s carry 17 in all.
    assert nodes.most == (int(2e9 / 10_000 / stored) - 1, "bytes") == (16, "bytes")
    assert result.fits and not actds.plan(**fixed, nodes=17, store_gbps=2.0, train_rows=10_000).fits
    # 12 PUTs for the two hooks of each 65,536 rows, and part and record of readouts.
    few = actds.plan(**fixed, nodes=3, store_puts=4)
    assert few.nodes is not None and not few.fits
    assert few.nodes.most == (int(4 / (10_000 / 65_536 * 12)), "PUTs")
    words = "\n".join(result.lines())
    assert "1.82 GB/s written of 2 (given)" in words and "3,500 (assumed)" in words
    assert "210,938 shards a day" in words
    assert result.as_json()["nodes"]["most"] == (16, "bytes")
    assert actds.plan(**fixed).nodes is None
    with pytest.raises(ActdsError, match="E009 train_rows"):
        actds.plan(**fixed, train_rows=5)
