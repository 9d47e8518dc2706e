"""Capture on a GPU: what the op costs in a CUDA graph, and how fast rows reach the host ring.

    make cuda          (or: python benchmarks/bench_cuda.py [--d-model 4096] [--rows 2048])

Needs torch with a GPU, no vLLM. Variants are interleaved; each figure is the median of the rounds,
with the GPU's name.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from actds.format.readouts import Readouts, matrix
from actds_testing.synthetic_engine import ResidualStack
from actds_writers.capture import op as capture
from actds_writers.capture.transfer import Copier, HostMemory, Mark, typed
from actds_writers.ipc.messages import HookSpec


class Layer(torch.nn.Module):
    """As costly as a decoder layer's projections: 12 d^2 multiplications a row."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(d_model, 6 * d_model, bias=False)
        self.down = torch.nn.Linear(6 * d_model, d_model, bias=False)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = hidden if residual is None else hidden + residual
        return self.down(torch.relu(self.up(stream))), stream


def graph_of(
    args: argparse.Namespace, rows: int, layers: list[int], n_probes: int | None
) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a model that captures some layers."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        stack = ResidualStack(Layer(args.d_model) for _ in range(args.layers))
    model = stack.bfloat16()
    buffers: object = None
    if layers and n_probes == COPIES:
        buffers = copies(stack, layers, rows, args.d_model)
    elif layers:
        packed = None
        if n_probes is not None:
            probes = torch.randn(len(layers), n_probes, args.d_model).numpy() if n_probes else None
            packed = matrix(Readouts(8, 1, n_probes), probes, len(layers), args.d_model)
        buffers = capture.install(
            model,
            [
                HookSpec(f"resid_post.{n}", "resid_post", n, args.d_model, "bfloat16")
                for n in layers
            ],
            max_rows=rows,
            device=torch.device("cuda"),
            form="sum",
            directions=None if packed is None else list(packed),
        )
    fed = torch.randn(rows, args.d_model, device="cuda", dtype=torch.bfloat16) / 64
    with torch.no_grad():
        for _ in range(3):
            model(fed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(fed)

    def replay(_in_use: object = (model, buffers, fed)) -> None:
        graph.replay()  # in memory that nobody else may be given meanwhile

    return replay


COPIES = -1
"""In the place of a number of probes: hooks that copy rows, the least that anyone would do."""


def copies(stack: ResidualStack, layers: list[int], rows: int, d_model: int) -> list[torch.Tensor]:
    """Copy the stream after some layers into buffers; return them."""
    buffers = []
    for number in layers:
        buffer = torch.empty(rows, d_model, device="cuda", dtype=torch.bfloat16)

        def copy(_layer: object, _given: object, out: Any, to: torch.Tensor = buffer) -> None:
            torch.add(*out, out=to)

        stack.layers[number].register_forward_hook(copy)
        buffers.append(buffer)
    return buffers


def milliseconds(work: Callable[[], None], repeats: int) -> float:
    """Return the device time of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def bench_op(args: argparse.Namespace) -> None:
    every, two = list(range(args.layers)), [args.layers // 3, 2 * args.layers // 3]
    variants: dict[str, tuple[list[int], int | None]] = {
        "none": ([], None),
        "2 copies": (two, COPIES),
        "2 hooks": (two, None),
        "2 hooks, readouts": (two, 0),
        "2 hooks, 1000 probes": (two, 1000),
        "all copies": (every, COPIES),
        "all hooks": (every, None),
        "all hooks, readouts": (every, 0),
    }
    print(f"\ncapture in a CUDA graph, d_model {args.d_model}, {args.layers} layers")
    print("| rows a step | variant | ms | ratio to none |\n| --- | --- | --- | --- |")
    for rows in (32, 256, args.rows):
        taken: dict[str, list[float]] = {name: [] for name in variants}
        graphs = {name: graph_of(args, rows, *variant) for name, variant in variants.items()}
        for _ in range(args.rounds):
            for name, replay in graphs.items():
                taken[name].append(milliseconds(replay, 20))
        base = statistics.median(taken["none"])
        for name, times in taken.items():
            median = statistics.median(times)
            print(f"| {rows} | {name} | {median:.3f} | {median / base:.3f} |")
        del graphs, replay
        torch.cuda.empty_cache()


def bench_transfer(args: argparse.Namespace) -> None:
    device = torch.device("cuda")
    shape = (2, args.rows, args.d_model)
    source = torch.randn(shape, device=device).bfloat16()
    nbytes = source.nbytes
    pinned = torch.empty(shape, dtype=torch.bfloat16).pin_memory()
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    ring = typed(HostMemory(memory, device).bytes, 0, shape, torch.bfloat16)
    copier = Copier(device)
    busy = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def plain() -> None:
        pinned.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def ours() -> None:
        copier.copy([ring], [source], None, Mark(device))

    def timed(work: Callable[[], None]) -> float:
        began = time.perf_counter()
        for _ in range(20):
            work()
        return 20 * nbytes / (time.perf_counter() - began) / 1e9

    def compute_ms(beside: Callable[[], None] | None) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            torch.mm(busy, busy)
        end.record()
        if beside is not None:
            for _ in range(20):
                beside()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    mark = Mark(device)
    rates: dict[str, list[float]] = {"plain pinned copy": [], "into the ring": []}
    alone, beside = [], []
    for _ in range(args.rounds):
        rates["plain pinned copy"].append(timed(plain))
        rates["into the ring"].append(timed(ours))
        alone.append(compute_ms(None))
        beside.append(compute_ms(lambda: copier.copy([ring], [source], None, mark)))
    print(f"\ntransfer of {nbytes / 1e6:.0f} MB steps")
    print("| what | GB/s |\n| --- | --- |")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.1f} |")
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"| products beside the transfer, time over alone | {ratio:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d-model", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_cuda: no GPU here; nothing was measured")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bench_op(args)
    bench_transfer(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
