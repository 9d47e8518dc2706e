"""The op inside a graph, the stages beside a stream: on a fake CUDA device, and where there is one.

``make cuda`` runs this file and ``benchmarks/bench_cuda.py``; it needs torch, no vLLM.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import actds
from actds.errors import ActdsError
from actds.format.readouts import Readouts, compute, matrix
from actds.publish.sealing import seal
from actds.store import open_store
from actds_testing.fake_cuda import Stream, current_stream, fake_cuda
from actds_testing.recovery import N_POSITIONS, check_values
from actds_testing.synthetic_engine import (
    HOOKS,
    ResidualStack,
    SyntheticEngine,
    pipeline_for,
    writer_stopped,
)
from actds_validators.validate.validation import validate
from actds_writers.capture import op as capture
from actds_writers.capture.stages import Stages
from actds_writers.capture.transfer import Copier, HostMemory, Mark
from actds_writers.harvest import processes
from actds_writers.ipc.messages import ClientFacts, HookSpec

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(params=["fake", "gpu"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """Return a device of CUDA: one of threads, and the one that is there."""
    if request.param == "gpu":
        if not HAS_GPU:
            pytest.skip("no GPU here: run 'make cuda' where there is one")
        yield torch.device("cuda")
    else:
        with fake_cuda(monkeypatch):
            yield torch.device("cuda")


def is_fake() -> bool:
    return issubclass(torch.cuda.Stream, Stream)


class Layer(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = hidden if residual is None else hidden + residual
        return self.linear(stream), stream


@pytest.mark.parametrize("with_readouts", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.standard)])
def test_a_cuda_graph_replays_the_capture(
    device: torch.device, with_readouts: bool, compiled: bool
) -> None:
    if compiled and is_fake():
        pytest.skip("what a compiler makes of the op is tested in the engine")
    torch.manual_seed(0)
    d_model, n = 256, 32
    model = ResidualStack(Layer(d_model) for _ in range(3)).bfloat16().cuda()
    packed = matrix(Readouts(8, seed=1), None, 2, d_model)
    buffers = capture.install(
        model,
        [HookSpec(f"resid_post.{n}", "resid_post", n, d_model, "bfloat16") for n in (0, 2)],
        max_rows=64,
        device=device,
        form="sum",
        directions=list(packed) if with_readouts else None,
    )
    run = torch.compile(model, fullgraph=True) if compiled else model
    fed = torch.randn(n, d_model, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            run(fed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(fed)
        for seed in range(3):
            torch.manual_seed(seed)
            fresh = torch.randn(n, d_model, device="cuda", dtype=torch.bfloat16)
            buffers.reset()
            for rows in buffers.rows:
                rows.zero_()
            fed.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            assert buffers.seen.tolist() == [n, n]
            stream = fresh
            for index, layer in enumerate(model.layers):
                stream = layer.linear(stream) + stream  # type: ignore[operator]
                if index in (0, 2):
                    got = buffers.rows[index // 2][:n].float()
                    distance = (got - stream.float()).norm() / stream.float().norm()
                    assert distance < 0.02
            if with_readouts:
                stored = buffers.rows[1][:n].float().cpu().numpy()
                want = compute(stored, packed[1])
                scale = 1e-4 * want[:, :1]
                assert (np.abs(buffers.readouts[1, :n].cpu().numpy() - want) <= scale).all()


def test_a_copier_waits_for_the_engine_and_not_the_engine_for_it(device: torch.device) -> None:
    source = torch.zeros(2, 512, 256, device=device)
    target = torch.empty(2, 512, 256).pin_memory()
    busy = torch.randn(n := 16 if is_fake() else 4096, n, device=device)
    copier = Copier(device)
    for value in range(1, 6):
        for _ in range(20):
            busy = busy @ busy / 64
        source.fill_(value)  # behind the products, in the engine's stream
        mark = Mark(device)
        copier.copy([target], [source], None, mark)
        assert (target == value).all()
    index = torch.tensor([5, 7, 300])
    source.copy_(torch.arange(512).to(device)[None, :, None].expand(2, 512, 256))
    some = torch.empty(2, 3, 256).pin_memory()
    copier.copy([some], [source], index, Mark(device), poison=source)
    assert some[:, :, 0].tolist() == [[5, 7, 300]] * 2
    assert (source == -1).all()


def harvest(out: Path, policy: str, n_requests: int, in_flight: int = 1) -> None:
    """Harvest on the device while the writer is stopped, and check every row."""
    stopped_s = 0.5 if policy == "block" else None  # until all requests were served
    with pipeline_for(out, policy, readouts=Readouts(8, seed=2), ring_nbytes=1 << 14) as pipeline:
        engine = SyntheticEngine(pipeline, "cuda", in_flight=in_flight, n_padded=3)
        with closing(engine):
            engine.request(0)
            engine.drain(pipeline)
            with writer_stopped(pipeline, stopped_s):
                for number in range(1, n_requests):
                    engine.request(number)
            engine.drain(pipeline)
        pipeline.send_client_facts(ClientFacts())
        ended = pipeline.finish("finished")
    seal(open_store(out))
    assert not validate(out, level="deep").errors
    dataset = actds.open(out)
    assert dataset.n_rows + ended["census"]["dropped"] == n_requests * N_POSITIONS
    assert dataset.readouts().num_rows == n_requests * N_POSITIONS * len(HOOKS)
    assert (ended["census"]["dropped"] > 0) == (policy != "block")
    check_values(dataset)


@pytest.mark.standard
@pytest.mark.parametrize(("policy", "in_flight"), [("block", 3), ("drop_oldest", 1)])
def test_rows_on_a_device_reach_the_dataset_under_pressure(
    device: torch.device, policy: str, in_flight: int, tmp_path: Path
) -> None:
    harvest(tmp_path / "acts", policy, 30 if is_fake() else 120, in_flight)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
def test_rows_keep_their_names_however_late_the_device_is(
    policy: str, in_flight: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda(monkeypatch, seed):
        harvest(tmp_path / "acts", policy, 30, in_flight)


def without_wait(patch: pytest.MonkeyPatch) -> None:
    """The copier does not wait for the engine's stream."""
    patch.setattr(Stream, "wait_event", lambda stream, event: None)


def without_synchronize(patch: pytest.MonkeyPatch) -> None:
    """A copy is taken for complete as soon as it is queued."""
    patch.setattr(Stream, "synchronize", lambda stream: None)


def on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """The model runs on a stream that nothing waits for."""
    side, leave = Stream(), SyntheticEngine.leave

    def left(engine: SyntheticEngine, number: int, positions: np.ndarray) -> None:
        with torch.cuda.stream(side):  # type: ignore[arg-type]
            leave(engine, number, positions)

    patch.setattr(SyntheticEngine, "leave", left)


def with_slots_freed_early(patch: pytest.MonkeyPatch) -> None:
    """The identities of every step are staged at one place, whether they were read or not."""
    hand_over, copy = Stages.hand_over, Copier.copy

    def copied_late(*args: Any) -> None:
        time.sleep(0.1)
        copy(*args)

    def handed(stages: Stages, *args: Any, **kwargs: Any) -> None:
        ring = stages._narrow  # noqa: SLF001
        patch.setattr(ring, "reserve", lambda nbytes: 0)
        patch.setattr(ring, "free", lambda offset: None)
        hand_over(stages, *args, **kwargs)

    patch.setattr(Stages, "hand_over", handed)
    patch.setattr(Copier, "copy", copied_late)


@pytest.mark.standard
@pytest.mark.parametrize(
    "without", [without_wait, without_synchronize, on_another_stream, with_slots_freed_early]
)
def test_a_guard_that_is_missing_is_noticed(
    without: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake shows what each guard is for: without it rows are wrong, or the harvest stops."""
    leave = SyntheticEngine.leave

    def leave_late(engine: SyntheticEngine, number: int, positions: np.ndarray) -> None:
        current_stream().put(lambda: time.sleep(0.02))  # the model
        leave(engine, number, positions)

    monkeypatch.setattr(SyntheticEngine, "leave", leave_late)
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 5.0)
    with fake_cuda(monkeypatch):
        without(monkeypatch)
        with pytest.raises((ActdsError, AssertionError)):
            harvest(tmp_path / "acts", "block", 10, in_flight=3)


def test_memory_is_unlocked_so_that_the_next_ring_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_cuda(monkeypatch) as cuda:
        memory, device = mmap.mmap(-1, 1 << 16), torch.device("cuda")
        for _ in range(2):
            host = HostMemory(memory, device)
            assert list(cuda.registered.values()) == [1 << 16]
            host.close()
            assert not cuda.registered
        assert not caplog.messages
        first, second = HostMemory(memory, device), HostMemory(memory, device)
        assert caplog.messages == ["a ring of 65536 bytes is not page-locked (CUDA error 712)"]
        second.close()  # it locked nothing, and unlocks nothing
        assert cuda.registered
        first.close()
        assert not cuda.registered
