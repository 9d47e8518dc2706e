"""How much rows differ in how well they compress, and what of it could be known of a lost row.

    python benchmarks/bench_hardness.py [MODEL] [--json]

A row that is lost is never encoded. Its bytes would be those of its high bytes under the code of a
chunk; here that cost is computed for the rows of a real model, and set against what is cheap to
keep of every row: the readouts (norm and projections), and statistics that are not kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_codec import table

from actds.format.codec import encode_into, frame_capacity
from actds.format.readouts import directions

N_TOKENS = 1536
LAYERS = (5, 10, 20, 28)


def cost(bits: np.ndarray) -> np.ndarray:
    """Return the bits per value of each row under the ideal code of all of them, low bytes raw."""
    high = bits >> 8
    share = np.bincount(high.reshape(-1), minlength=256) / bits.size
    return np.asarray(8 - np.log2(np.maximum(share, 1e-12))[high].mean(axis=1))


def explained(target: np.ndarray, *columns: np.ndarray) -> float:
    """Return the share of the variance that a linear fit to columns explains."""
    design = np.column_stack([np.ones(len(target)), *columns])
    fit = design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return 1 - float(((target - fit) ** 2).sum() / ((target - target.mean()) ** 2).sum())


def encode_seconds(bits: np.ndarray, order: np.ndarray) -> list[float]:
    """Return the seconds of encoding 256 rows at a time, the rows in an order."""
    out = np.empty(frame_capacity(256 * bits.shape[1] * 2, 2), np.uint8)
    spent = []
    for first in range(0, len(order) - 255, 256):
        rows = np.ascontiguousarray(bits[order[first : first + 256]])
        tries = []
        for _ in range(9):
            began = time.thread_time()
            encode_into(rows, out)
            tries.append(time.thread_time() - began)
        spent.append(min(tries))
    return spent


def in_op(rows: object) -> dict[str, Callable[[], object]]:
    """Return what the capture op would do for the readouts, and for the cost by a table."""
    import torch

    assert isinstance(rows, torch.Tensor)
    values = torch.empty(rows.shape)
    packed = torch.from_numpy(directions(8, rows.shape[1], 0))
    lengths = torch.rand(256)

    def readouts() -> object:
        values.copy_(rows)
        return torch.linalg.vector_norm(values, dim=1), values @ packed

    def by_table() -> object:
        return lengths[((rows.view(torch.int16) >> 8) & 255).long()].sum(dim=1)

    return {"readouts": readouts, "table": by_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo/model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    words = AutoTokenizer.from_pretrained(args.model)(
        Path("docs/tour.md").read_text()[:12_000], return_tensors="pt"
    )
    with torch.no_grad():
        states = model(words.input_ids[:, :N_TOKENS], output_hidden_states=True).hidden_states
    results: list[dict[str, object]] = []
    for layer in LAYERS:
        rows = states[layer][0][1:].contiguous()  # the first is an outlier of another kind
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        wide = rows.float().numpy()
        found, norm = cost(bits), np.linalg.norm(wide, axis=1)
        projections = wide @ directions(8, wide.shape[1], 0)
        mean = np.abs(wide).mean(axis=1)
        exponent = ((bits >> 7) & 255).astype(np.float64)
        hard = np.argsort(found)
        spent = encode_seconds(bits, hard)
        times = {}
        for name, work in in_op(rows).items():
            tries = []
            for _ in range(15):
                began = time.thread_time()
                work()
                tries.append(time.thread_time() - began)
            times[name] = statistics.median(tries)
        results.append(
            {
                "layer": layer,
                "bits_per_value": float(found.mean()),
                "sd": float(found.std()),
                "hardest_1_percent": float(np.quantile(found, 0.99) / found.mean()),
                "encode_time_hardest_to_easiest": spent[-1] / spent[0],
                "r2_norm": explained(found, norm, np.log(norm)),
                "r2_readouts": explained(found, norm, np.log(norm), projections, abs(projections)),
                "r2_mean_abs": explained(found, np.log(mean), np.log(mean) ** 2),
                "r2_exponents": explained(found, exponent.std(axis=1), exponent.mean(axis=1)),
                "table_to_readouts": times["table"] / times["readouts"],
            }
        )
    if args.json:
        print(json.dumps({"schema": "actds.bench_hardness/1", "results": results}))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
