"""Does how rows were harvested change the dictionary? Eight corpora, a dictionary per seed.

    python examples/stability/run.py [--model demo/model] [--out DIR]

serves the same chats with the real engine on the CPU, with a prefix cache, without it, and with a
disk that is too slow for all rows; trains dictionaries on these, on the rows weighted by how often
they were served and on half prompts and half answers, with ``actds stability``. Then it serves them
with longer answers, and trains dictionaries on the prompts, on the answers and on half of each. It
writes figures.json and README.md beside this file (or to --page). What is in --out is kept: a run
that was cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from page import of_corpora, page, summary

from actds_testing.faulty_disk import FaultyDisk

HERE = Path(__file__).resolve().parent
HOOK = "resid_post.10"
LABEL = "labels.label == 'code'"
"""What probes should find: that the user asks about code, and not about documentation."""
ENGINE = ("dtype=float32", "enforce_eager=true", "block_size=32", "max_model_len=2048",
          "max_num_seqs=32", "max_num_batched_tokens=512")  # fmt: skip
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": str(os.cpu_count() or 1),
}
SMALL = ("--rows-per-shard", "64", "--ring-mib", "1", "--staging-mib", "1")
"""Queues and shards of a harvest that is to lose rows on a slow disk."""
SHARE = 1.0
"""Of the rate at which the cached harvest was written: what the slow disk takes."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/stability"), help="datasets")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of the page")
    parser.add_argument("--chats", type=int, default=400, help="requests")
    parser.add_argument("--sampled", type=int, default=64, help="tokens of an answer at most")
    parser.add_argument("--long", type=int, default=256, help="tokens of a longer answer at most")
    parser.add_argument("--seeds", type=int, default=8, help="dictionaries of an arm")
    parser.add_argument("--features", type=int, default=1152, help="of a dictionary")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the rows")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    clock: dict[str, float] = {}
    harvest_all(args, clock)
    cached, uncached, dropped = (args.out / n for n in ("cached", "uncached", "dropped"))
    options = ["--seeds", str(args.seeds), "--features", str(args.features),
               "--epochs", str(args.epochs)]  # fmt: skip
    arms = [f"cached={cached}", f"uncached={uncached}", f"weighted={cached}:weights=multiplicity",
            f"dropped={dropped}", f"hybrid={cached}:prefill=0.5,decode=0.5"]  # fmt: skip
    result = train(args, clock, "stability", arms, options)
    setting = {
        "command": "python examples/stability/run.py",
        "model": args.model.name, "machine": machine(), "busy": busy(), "engine": list(ENGINE),
        "chats": args.chats, "sampled": args.sampled, "share": SHARE,
        "lost": lost(dropped),
        "seconds": {name: round(took) for name, took in clock.items()},
    }  # fmt: skip
    figures = {**summary(setting, result), "corpora": corpora(args)}
    args.page.mkdir(parents=True, exist_ok=True)
    (args.page / "figures.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    (args.page / "README.md").write_text(page(figures))
    print(args.page / "README.md")
    return 0


def corpora(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of prompts, of longer answers, and of half of each."""
    clock: dict[str, float] = {}
    harvest(args, clock, "long", asked(args, args.long), 0)
    long = args.out / "long"
    arms = [f"prefill={long}:phase=prefill", f"decode={long}:phase=decode",
            f"hybrid={long}:prefill=0.5,decode=0.5"]  # fmt: skip
    options = ["--label", LABEL, "--seeds", "6", "--epochs", "4", "--rows", "16384",
               "--features", "576", "--held-out", "0.3"]  # fmt: skip
    result = train(args, clock, "corpora", arms, options)
    setting = {"machine": machine(), "busy": busy(), "chats": args.chats, "sampled": args.long,
               "seconds": {name: round(took) for name, took in clock.items()}}  # fmt: skip
    return of_corpora(setting, result)


def harvest_all(args: argparse.Namespace, clock: dict[str, float]) -> None:
    """Harvest the chats with a prefix cache, without it, and to a slow disk."""
    write = asked(args, args.sampled)
    harvest(args, clock, "cached", write, 0)
    rate = SHARE * size(args.out / "cached") / clock["cached"]
    harvest(args, clock, "uncached", [*write, "--engine-arg", "enable_prefix_caching=false"], 0)
    harvest(args, clock, "dropped", [*write, *SMALL, "--overflow", "drop_newest"], int(rate))


def asked(args: argparse.Namespace, n_tokens: int) -> list[str]:
    """Return the options of a harvest of the chats, with answers of so many tokens at most."""
    prompts = args.out / "prompts.jsonl"
    if not prompts.exists():
        made = [str(HERE.parent / "make_prompts.py"), str(prompts), "--n", str(args.chats)]
        run(made, {}, "the prompts")
    layer = HOOK.split(".")[1]
    return ["--prompts", str(prompts), "--model", str(args.model), "--hooks",
             f"resid_post:{layer}", "--max-tokens", str(n_tokens), "--temperature", "1",
             "--quiet", *(part for one in ENGINE for part in ("--engine-arg", one))]  # fmt: skip


def harvest(
    args: argparse.Namespace, clock: dict[str, float], name: str, options: list[str], rate: int
) -> None:
    """Harvest a dataset, unless it is there.

    Args:
        args: the options of the script.
        clock: takes the seconds.
        name: of the dataset.
        options: of ``actds write``.
        rate: bytes a second that the disk takes; 0 for as many as come.
    """
    out, took = args.out / name, args.out / f"{name}.seconds"
    if not took.exists():
        disk = FaultyDisk(out, args.out / f"{name}.control")
        disk.throttle(rate)
        resume = ["--resume"] if out.exists() else []
        began = time.monotonic()
        run(["-m", "actds", "write", str(out), *options, *resume], disk.environment(), name)
        took.write_text(str(time.monotonic() - began))
    clock[name] = float(took.read_text())


def train(
    args: argparse.Namespace,
    clock: dict[str, float],
    name: str,
    arms: list[str],
    options: list[str],
) -> Any:
    """Run ``actds stability``, unless its result is there; return the result."""
    path, took = args.out / f"{name}.json", args.out / f"{name}.seconds"
    if not took.exists():
        began = time.monotonic()
        run(
            ["-m", "actds", "stability", *arms, "--hook", HOOK, *options,
             "--fail-on", "never",
             "--json", str(path), "--html", str(args.out / f"{name}.html")],
            {}, "actds stability",
        )  # fmt: skip
        took.write_text(str(time.monotonic() - began))
    clock[name] = float(took.read_text())
    return json.loads(path.read_text())


def run(words: list[str], environment: dict[str, str], what: str) -> None:
    """Run a Python command; its output is shown where it fails."""
    print("python", *words, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\n{what} failed")


def size(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lost(folder: Path) -> dict[str, int]:
    """Return how many computed rows a harvest stored and lost."""
    import actds

    steps = actds.open(folder).steps(run=False)
    return {name: sum(steps[f"{name}_tokens"].to_pylist()) for name in ("captured", "dropped")}


def busy() -> bool:
    """Return whether the machine does other work at the same time, by its load."""
    return os.getloadavg()[1] > (os.cpu_count() or 1) + 1


def machine() -> str:
    """Return the machine in a few words, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} cores of {next(models, 'an unnamed CPU')}"


if __name__ == "__main__":
    sys.exit(main())
