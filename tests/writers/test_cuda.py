"""What a CPU cannot show: the op inside a CUDA graph, and the stages beside a CUDA stream.

``make cuda`` runs this file and ``benchmarks/bench_cuda.py``; it needs torch with a GPU, no vLLM.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import actds
from actds.format.readouts import Readouts, compute, matrix
from actds.sealing import seal
from actds.store import open_store
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
from actds_writers.capture.transfer import Copier, Mark
from actds_writers.ipc.messages import ClientFacts, HookSpec

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: run 'make cuda' where there is one"
)


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
@pytest.mark.parametrize("compiled", [False, True])
def test_a_cuda_graph_replays_the_capture(with_readouts: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    d_model, n = 256, 32
    model = ResidualStack(Layer(d_model) for _ in range(3)).cuda().bfloat16()
    packed = matrix(Readouts(8, seed=1), None, 2, d_model)
    buffers = capture.install(
        model,
        [HookSpec(f"resid_post.{n}", "resid_post", n, d_model, "bfloat16") for n in (0, 2)],
        max_rows=64,
        device=torch.device("cuda"),
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
            buffers.rows.zero_()
            fed.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            assert buffers.seen.tolist() == [n, n]
            stream = fresh
            for index, layer in enumerate(model.layers):
                stream = layer.linear(stream) + stream
                if index in (0, 2):
                    got = buffers.rows[index // 2, :n].float()
                    distance = (got - stream.float()).norm() / stream.float().norm()
                    assert distance < 0.02
            if with_readouts:
                rows = buffers.rows[1, :n].float().cpu().numpy()
                want = compute(rows, packed[1])
                scale = 1e-4 * want[:, :1]
                assert (np.abs(buffers.readouts[1, :n].cpu().numpy() - want) <= scale).all()


def test_a_copier_waits_for_the_engine_and_not_the_engine_for_it() -> None:
    device = torch.device("cuda")
    source = torch.zeros(2, 512, 256, device=device)
    target = torch.empty(2, 512, 256).pin_memory()
    busy = torch.randn(4096, 4096, device=device)
    copier = Copier(device)
    for value in range(1, 6):
        for _ in range(20):
            busy = busy @ busy / 64
        source.fill_(value)  # behind the products, in the engine's stream
        mark = Mark(device)
        copier.copy(target, source, None, mark)
        assert (target == value).all()
    index = torch.tensor([5, 7, 300])
    source.copy_(torch.arange(512, device=device)[None, :, None].expand(2, 512, 256))
    some = torch.empty(2, 3, 256).pin_memory()
    copier.copy(some, source, index, Mark(device))
    assert some[:, :, 0].tolist() == [[5, 7, 300]] * 2


@pytest.mark.parametrize("policy", ["block", "drop_oldest", "drop_newest"])
def test_rows_on_a_gpu_reach_the_dataset_under_pressure(policy: str, tmp_path: Path) -> None:
    out = tmp_path / "acts"
    with pipeline_for(out, policy, readouts=Readouts(8, seed=2)) as pipeline:
        engine = SyntheticEngine(pipeline, "cuda")
        engine.request(0)
        engine.drain(pipeline)
        with writer_stopped(pipeline, 1.0):
            for number in range(1, 120):
                engine.request(number)
        engine.drain(pipeline)
        engine.close()
        pipeline.send_client_facts(ClientFacts())
        ended = pipeline.finish("finished")
    seal(open_store(out))
    assert not validate(out, level="deep").errors
    dataset = actds.open(out)
    assert dataset.n_rows + ended["census"]["dropped"] == 120 * N_POSITIONS
    assert dataset.readouts().num_rows == 120 * N_POSITIONS * len(HOOKS)
    assert (ended["census"]["dropped"] > 0) == (policy != "block")
    check_values(dataset)
