"""Parts of the first hour on a GPU: page-locked memory, a model, the rows of two harvests.

python benchmarks/gpu/rows.py register
python benchmarks/gpu/rows.py model FOLDER PROMPTS
python benchmarks/gpu/rows.py compare FIRST SECOND
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def register() -> None:
    """Page-lock a ring twice at one address, as two harvests of a process do."""
    import torch

    from actds_writers.capture.transfer import HostMemory

    device = torch.device("cuda")
    torch.zeros(1, device=device)
    for nbytes in (256 << 20, 4 << 30):
        memory = mmap.mmap(-1, nbytes)
        for number in (1, 2):
            began = time.perf_counter()
            host = HostMemory(memory, device)
            print(f"{nbytes >> 20} MiB, time {number}: {time.perf_counter() - began:.3f} s")
            host.close()


def model(folder: Path, prompts: Path) -> None:
    """Make a model of four layers with random weights, and 48 prompts for it."""
    from actds_testing.harvest import write_prompts
    from actds_testing.tiny import make_random_model

    make_random_model(folder)
    words = [
        {"id": f"g{i}", "prompt": f"number {i} goes on " + "x" * (7 * i % 200)} for i in range(48)
    ]
    write_prompts(prompts, words)


def compare(first: Path, second: Path) -> None:
    """Print how far the rows of two harvests of the same prompts lie apart, and what ran them."""
    import numpy as np

    import actds
    from actds_testing.harvest import rows_of

    datasets = [actds.open(path) for path in (first, second)]
    for path, dataset in zip((first, second), datasets, strict=True):
        modes = Counter[str | None](dataset.catalog.table("steps")["kernel_mode"].to_pylist())
        print(f"{path}: {dataset.n_rows:,} rows; steps by kernel mode {dict(modes)}")
        for run in dataset.runs.values():
            check = json.loads(str(run.fields["capture.check"].value))
            print(f"  checked against {check['against']}; graphs from eager {check.get('eager')}")
    print("| hook | rows of both | median distance | largest |\n| --- | ---: | ---: | ---: |")
    for hook in datasets[0].hooks:
        if hook not in datasets[1].hooks:
            continue
        mine, other = (rows_of(dataset, hook) for dataset in datasets)
        keys = sorted(mine.keys() & other.keys())
        if not keys:
            raise SystemExit(f"{hook}: no position is in both")
        a, b = (np.stack([rows[key] for key in keys]) for rows in (mine, other))
        apart = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(a, axis=1), 1e-30)
        print(f"| {hook} | {len(keys):,} | {np.median(apart):.2e} | {apart.max():.2e} |")


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    commands: dict[str, Callable[..., None]] = {
        "register": register, "model": model, "compare": compare
    }  # fmt: skip
    if command not in commands:
        raise SystemExit(__doc__)
    commands[command](*map(Path, rest))


if __name__ == "__main__":
    main()
