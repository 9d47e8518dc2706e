"""What the check of the hooks adds to the start of a harvest: seconds with it and without.

    python benchmarks/bench_check.py [--rounds 3] [--model demo/model]

The same two requests are harvested again and again, with and without the check in turns, each in a
process of its own. CPU seconds are those of that process and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE = ("enforce_eager=true", "max_model_len=512", "distributed_executor_backend=uni")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hooks", default="resid_post:10,20")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"--check": [], "--no-check": []}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"Once upon {n}"}) + "\n" for n in (1, 2)))
        for number in range(args.rounds):
            for option, seconds in found.items():
                out = Path(folder) / f"{number}{option}"
                seconds.append(harvest(args, prompts, out, option))
    print("| start | wall s | CPU s |\n| --- | ---: | ---: |")
    for option, seconds in found.items():
        wall, cpu = (statistics.median(s[i] for s in seconds) for i in (0, 1))
        print(f"| `{option}` | {wall:.1f} | {cpu:.1f} |")
    extra = [
        (a[0] - b[0], a[1] - b[1])
        for a, b in zip(found["--check"], found["--no-check"], strict=True)
    ]
    for index, name in enumerate(("wall", "CPU")):
        values = sorted(pair[index] for pair in extra)
        print(f"{name} added: median {statistics.median(values):.1f} s, "
              f"{values[0]:.1f} to {values[-1]:.1f} s")  # fmt: skip


def harvest(args: argparse.Namespace, prompts: Path, out: Path, option: str) -> tuple[float, float]:
    """Return wall and CPU seconds of a harvest of two short requests."""
    command = [
        sys.executable, "-m", "actds", "write", str(out), "--model", str(args.model),
        "--prompts", str(prompts), "--hooks", args.hooks, "--max-tokens", "2", "--quiet", option,
        *(word for e in (f"dtype={args.dtype}", *ENGINE) for word in ("--engine-arg", e)),
    ]  # fmt: skip
    before, began = cpu_seconds(), time.perf_counter()
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True)
    return time.perf_counter() - began, cpu_seconds() - before


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
