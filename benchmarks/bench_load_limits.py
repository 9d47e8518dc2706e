"""What the loader costs beside its rate: selections, the first batch of 100 GB, memory.

    python benchmarks/bench_load_limits.py [--d-model 2304] [--rounds 3] [--gb 100]

Three tables. Whole passes in turns, opening included: all rows, these under a pin (whose first pass
in a process hashes every file, and whose later ones do not), the tenth that one request column
chooses (requests that follow each other, so they lie in few shards), and a tenth that is scattered
over all chunks. The time from ``actds.Loader(...)`` to its first batch, over many shards that are
hard links of one file (so it is in the page cache), manifests and token tables their own. Resident
memory before, after one pass and after five.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import load_data
import torch
from bench_load import BATCH, N_WINDOWS, SHARD_ROWS, WINDOW_ROWS, cpu_seconds, spread
from load_data import HOOK

import actds
from actds.store.local import BoundLocalFile

SELECTIONS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "all rows, first pass of a pin": {"seal": "first"},
    "all rows, later pass of a pin": {"seal": "later"},
    "a tenth, by one request column": {"where": f"request.source == '{load_data.CHOSEN}'"},
    "a tenth, scattered": {"where": "position % 10 == 0"},
}


def selections(paths: dict[str, Path], rounds: int) -> None:
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for codec, path in paths.items():
            for name, options in SELECTIONS.items():
                if "seal" in options:
                    if options["seal"] == "first":
                        BoundLocalFile._known.clear()  # what this process has hashed
                    options = {"seal": actds.open(path).digest}
                wall, cpu = time.perf_counter(), cpu_seconds()
                with actds.Loader(path, HOOK, batch=BATCH, **options) as loader:
                    for _ in loader:
                        pass
                spent = time.perf_counter() - wall, cpu_seconds() - cpu
                figures.setdefault((codec, name), []).append(spent)
    print("| codec | rows | wall s | CPU s | CPU to all rows |\n| --- | --- | ---: | ---: | ---: |")
    for (codec, name), results in figures.items():
        whole = figures[codec, "all rows"]
        shares = [one[1] / all_[1] for one, all_ in zip(results, whole, strict=True)]
        cells = [spread([wall for wall, _ in results]), spread([cpu for _, cpu in results])]
        print(f"| {codec} | {name} | {' | '.join(cells)} | {statistics.median(shares):.2f} |")


def first_batch(path: Path, rounds: int) -> None:
    results = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), cpu_seconds()
        with actds.Loader(path, HOOK, batch=BATCH) as loader:
            opened = time.perf_counter() - wall
            next(iter(loader))
            results.append((opened, time.perf_counter() - wall, cpu_seconds() - cpu))
            n_rows = loader.n_rows
    cells = " | ".join(spread([one[i] for one in results]) for i in range(3))
    n_shards = len(actds.open(path).shards)
    print(
        "\n| rows | shards | opened, s | first batch, s | CPU s |\n| ---: | ---: |" + " ---: |" * 3
    )
    print(f"| {n_rows:,} | {n_shards} | {cells} |")


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1e3
    raise AssertionError("no VmRSS")


def memory(paths: dict[str, Path]) -> None:
    print("| codec | before, MB | after 1 pass | 2 | 3 | 4 | 5 |\n| --- |" + " ---: |" * 6)
    for codec, path in paths.items():
        cells = [f"{resident_mb():.0f}"]
        with actds.Loader(path, HOOK, batch=BATCH, epochs=None) as loader:
            batches = iter(loader)
            for _ in range(5):
                for _ in range(loader.batches_per_epoch):
                    next(batches)
                cells.append(f"{resident_mb():.0f}")
        print(f"| {codec} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d-model", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=float, default=100)
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="actds-bench-") as folder:
        root = Path(folder)
        print("making files ...", file=sys.stderr)
        base = load_data.activations(SHARD_ROWS, args.d_model, 0)
        n_shards = N_WINDOWS * WINDOW_ROWS // SHARD_ROWS
        paths = {
            "default": load_data.make_dataset(root / "default", base, n_shards, False),
            "raw": load_data.make_dataset(root / "raw", base, n_shards, True),
        }
        memory(paths)  # first: nothing else has used this process's memory
        selections(paths, args.rounds)
        n_shards = round(args.gb * 1e9 / base.nbytes)
        many = load_data.make_dataset(root / "many", base, n_shards, True, linked=True)
        first_batch(many, args.rounds)


if __name__ == "__main__":
    main()
