"""Does what is lost look like the rest? A real engine, a disk that is too slow, three policies.

    python examples/backpressure/run.py --out /tmp/backpressure

harvests the same bursts of requests five times with ``actds write``: twice on the disk as it is,
and under each overflow policy on one that is throttled below the engine's rate. Then it reads the
datasets' own tables, and writes README.md, four pictures and figures.json beside this file (or to
--page). Linux with a C compiler; the real engine, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from analysis import read
from page import Arm, Setting, write_page
from traffic import Traffic

from actds_testing.faulty_disk import FaultyDisk, unavailable
from actds_testing.tiny import make_tiny_model

HERE = Path(__file__).resolve().parent
ARMS = ("plain", "block", "drop_oldest", "drop_newest", "plain again")
ENGINE = ("dtype=float32", "enforce_eager=true", "block_size=32", "max_model_len=1024",
          "max_num_seqs=8", "max_num_batched_tokens=64",
          "distributed_executor_backend=uni")  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
REQUESTS_PER_BURST = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="datasets; harvests there are kept")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of README.md and pictures")
    parser.add_argument("--requests", type=int, default=360, help="requests of each harvest")
    parser.add_argument("--minutes", type=float, default=10.0, help="give up after so long")
    parser.add_argument("--share", type=float, default=0.5, help="disk speed over plain writing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="model folder; a small dummy model without")
    parser.add_argument("--hooks", default="resid_post:all")
    parser.add_argument("--again", action="store_true", help="datasets are there: page only")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not args.again and (why := unavailable()):
        print(f"The experiment cannot run here: {why}.", file=sys.stderr)
        return 2
    setting_file = args.out / "setting.json"
    if not args.again:
        args.out.mkdir(parents=True, exist_ok=True)
        setting_file.write_text(json.dumps(asdict(harvest_all(args)), indent=1))
    setting = Setting(**json.loads(setting_file.read_text()))
    write_page(args.page, setting, [Arm(name, args.out / _folder(name)) for name in ARMS])
    print(args.page / "README.md")
    return 0


def harvest_all(args: argparse.Namespace) -> Setting:
    """Harvest every arm; return how."""
    model = args.model or make_tiny_model(
        args.out / "model", n_layers=4, hidden=512, n_heads=4, n_kv_heads=4, head_dim=64,
        dtype="float32", tokenizer=True,
    )  # fmt: skip
    n_bursts = max(4, round(args.requests / REQUESTS_PER_BURST))
    traffic = Traffic(
        n_bursts, REQUESTS_PER_BURST, args.seed, characters_per_token=4 if args.model else 1
    )
    prompts, schedule = traffic.write(args.out)
    command = [
        sys.executable, str(HERE / "traffic.py"), str(schedule), "OUT", "--model", str(model),
        "--prompts", str(prompts), "--hooks", args.hooks, "--rows-per-shard", "64",
        "--ring-mib", "1", "--staging-mib", "1", "--quiet", "--seed", str(args.seed),
        *(part for option in ENGINE for part in ("--engine", option)),
    ]  # fmt: skip
    if not args.model:
        command += ["--engine", "load_format=dummy"]
    deadline = time.monotonic() + args.minutes * 60
    rate = 0
    written: dict[str, int] = {}
    for name in ARMS:
        done_file = args.out / f"{_folder(name)}.json"
        if done_file.exists():
            written[name], rate = json.loads(done_file.read_text())
            continue
        folder = args.out / _folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        disk = FaultyDisk(folder, args.out / f"{folder.name}.control")
        plain = name.startswith("plain")
        disk.throttle(0 if plain else rate)
        mine = [str(folder) if part == "OUT" else part for part in command]
        print(f"{name}: {'no throttle' if plain else f'{rate / 1e6:.2f} MB/s'}", file=sys.stderr)
        done = subprocess.run(
            [*mine, "--overflow", "block" if plain else name],
            env={**os.environ, **ENVIRONMENT, **disk.environment()},
            capture_output=True, text=True, timeout=max(1.0, deadline - time.monotonic()),
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\nthe harvest {name} failed")
        print(done.stdout, file=sys.stderr)
        written[name] = disk.read("n_bytes")
        if name == "plain":
            rate = int(args.share * written[name] / read(folder).busy_s.sum())
        done_file.write_text(json.dumps([written[name], rate]))
    return Setting(
        machine=machine(),
        command=" ".join(["python", "examples/backpressure/run.py", *sys.argv[1:]]),
        model=str(args.model.name) if args.model else "",
        hooks=args.hooks,
        engine=list(ENGINE),
        traffic={**asdict(traffic)},
        share=args.share,
        rate=rate,
        written=written,
    )


def machine() -> str:
    """Return the machine in a few words, without its name."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), "an unnamed CPU",
    )  # fmt: skip
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores of {cpu}; load averages {load} at the end"


def _folder(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
