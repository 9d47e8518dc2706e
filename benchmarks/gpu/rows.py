"""Parts of the first hour on a GPU: the card, locked memory, a model, rows compared.

python benchmarks/gpu/rows.py card DEVICE PACKAGE...
python benchmarks/gpu/rows.py register
python benchmarks/gpu/rows.py model FOLDER PROMPTS [N]
python benchmarks/gpu/rows.py large FOLDER [HIDDEN]
python benchmarks/gpu/rows.py compare FIRST SECOND
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import mmap
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

NO_GPU, NO_PACKAGE = 3, 4


def card(device: str, *packages: str) -> int:
    """Print what a step runs on, or the sentence that says why it cannot; return its status."""
    lacks = [name for name in ("torch", *packages) if importlib.util.find_spec(name) is None]
    if lacks:
        where = "benchmarks/gpu/README.md"
        print(f"{sys.executable} has no {', '.join(lacks)}; carry wheels ({where})")
        return NO_PACKAGE
    import torch

    name = f"a CPU ({platform.machine()}), a rehearsal"
    if device == "cuda":
        if not torch.cuda.is_available():
            print(f"needs a GPU, and torch {torch.__version__} sees none (DEVICE=cpu rehearses it)")
            return NO_GPU
        name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}", end="")
    print(f", vllm {importlib.import_module('vllm').__version__}" if "vllm" in packages else "")
    return 0


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


def model(folder: Path, prompts: Path, n_prompts: str | Path = "48") -> None:
    """Make a model of four layers with random weights, and prompts for it."""
    from actds_testing.harvest import write_prompts
    from actds_testing.tiny import make_random_model

    make_random_model(folder)
    words = [
        {"id": f"g{i}", "prompt": f"number {i} goes on " + "x" * (7 * i % 200)}
        for i in range(int(str(n_prompts)))
    ]
    write_prompts(prompts, words)


def large(folder: Path, hidden: str | Path = "3072") -> None:
    """Describe a model like Llama 3.2 3B: the engine makes up its weights."""
    from actds_testing.tiny import make_tiny_model

    d_model = int(str(hidden))
    make_tiny_model(
        folder, n_layers=28, hidden=d_model, n_heads=24, n_kv_heads=8,
        head_dim=max(32, d_model // 24), tokenizer=True,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": 128_256,
        "intermediate_size": d_model * 8 // 3,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))


def compare(first: Path, second: Path) -> None:
    """Print how far the rows of two harvests of the same prompts lie apart, and what ran them.

    Where a token differs, everything behind it is another text, and is left out.
    """
    import numpy as np

    import actds
    from actds_testing.harvest import rows_of, token_ids_of

    datasets = [actds.open(path) for path in (first, second)]
    for path, dataset in zip((first, second), datasets, strict=True):
        modes = Counter[str | None](dataset.catalog.table("steps")["kernel_mode"].to_pylist())
        print(f"{path}: {dataset.n_rows:,} rows; steps by kernel mode {dict(modes)}")
        for run in dataset.runs.values():
            check = json.loads(str(run.fields["capture.check"].value))
            print(f"  checked against {check['against']}; graphs from eager {check.get('eager')}")
    read = [token_ids_of(dataset) for dataset in datasets]
    until = {request: 1 << 31 for request, _ in read[0]}
    for request, position in read[0].keys() & read[1].keys():
        if read[0][request, position] != read[1][request, position]:
            until[request] = min(until[request], position)
    n_apart = sum(position < 1 << 31 for position in until.values())
    print(f"{second}: {n_apart} of {len(until)} requests got another token; rows before it:")
    print("| hook | rows of both | median distance | largest |\n| --- | ---: | ---: | ---: |")
    for hook in datasets[0].hooks:
        if hook not in datasets[1].hooks:
            continue
        mine, other = (rows_of(dataset, hook) for dataset in datasets)
        keys = sorted(key for key in mine.keys() & other.keys() if key[1] < until[key[0]])
        if not keys:
            raise SystemExit(f"{hook}: no position is in both")
        a, b = (np.stack([rows[key] for key in keys]) for rows in (mine, other))
        apart = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(a, axis=1), 1e-30)
        print(f"| {hook} | {len(keys):,} | {np.median(apart):.2e} | {apart.max():.2e} |")


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    if command == "card":
        raise SystemExit(card(*rest))
    commands: dict[str, Callable[..., None]] = {
        "register": register, "model": model, "large": large, "compare": compare
    }  # fmt: skip
    if command not in commands:
        raise SystemExit(__doc__)
    commands[command](*map(Path, rest))


if __name__ == "__main__":
    main()
