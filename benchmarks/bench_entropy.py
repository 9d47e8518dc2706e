"""What reading the logits of a decode step costs, over what the products of that step cost.

    python benchmarks/bench_entropy.py [--batch 8] [--threads 1]

CPU time of one thread for ``Reading``, and for the products of one decoder layer and of the
unembedding, both with weights that are in no cache; a step is that of all layers. Attention over
the keys, norms, sampling and the engine itself come on top and make the share smaller:
``bench_engine.py`` has it in the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from actds_writers.capture.op import Reading


@dataclass(frozen=True)
class Shape:
    """A model, by the sizes of its products."""

    name: str
    n_layers: int
    d_model: int
    d_kv: int
    d_mlp: int
    vocabulary: int


SHAPES = (
    Shape("SmolLM2 135M", 30, 576, 192, 1536, 49_152),
    Shape("Qwen2.5 0.5B", 24, 896, 128, 4864, 151_936),
    Shape("Llama 3.2 1B", 16, 2048, 512, 8192, 128_256),
    Shape("Llama 3.1 8B", 32, 4096, 1024, 14_336, 128_256),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"bfloat16, {options.batch} rows a step, {options.threads} threads\n")
    print("| model | reading a row, µs | products of a step, ms | share |")
    print("| --- | ---: | ---: | ---: |")
    for shape in SHAPES:
        with torch.inference_mode():
            row_s, step_s = measure(shape, options.batch, options.rounds)
        share = row_s * options.batch / step_s
        print(f"| {shape.name} | {row_s * 1e6:.0f} | {step_s * 1e3:.0f} | {share:.2%} |")


def measure(shape: Shape, batch: int, rounds: int) -> tuple[float, float]:
    """Return seconds of reading a row, and of the products of a step."""
    d = shape.d_model
    sizes = [(d, d), (d, 2 * shape.d_kv), (d, d), (d, 2 * shape.d_mlp), (shape.d_mlp, d)]
    layer = [torch.randn(n_out, n_in).bfloat16() for n_in, n_out in sizes]
    head = torch.randn(shape.vocabulary, d).bfloat16()
    inputs = {n: torch.randn(batch, n).bfloat16() for n in (d, shape.d_mlp)}
    tokens = torch.zeros(batch, dtype=torch.int64)
    flush = torch.zeros(16 << 20)

    def products() -> None:
        for weight in layer:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    def unembed() -> torch.Tensor:
        return torch.nn.functional.linear(inputs[d], head)

    logits = unembed()
    layer_s = median_s(products, flush, rounds)
    head_s = median_s(unembed, flush, rounds)
    read_s = median_s(lambda: Reading.of(logits).of_tokens(tokens), flush, rounds)
    return read_s / batch, layer_s * shape.n_layers + head_s


def median_s(call: Callable[[], object], flush: torch.Tensor, rounds: int) -> float:
    """Return the median CPU seconds of a call, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        flush.add_(1.0)
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
