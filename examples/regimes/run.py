"""Does the way it was served change what is measured? Four arms, a dictionary, a ladder.

    python examples/regimes/run.py [--model demo/model] [--out DIR]

serves the same documents with the real engine on the CPU: with their own text (H), continued by the
model (G), the model's text read again (R), and their own text at one token a step (D). It fits a
small dictionary on half of H, compares the arms with ``actds regimes``, and writes figures.json
and README.md beside this file (or to --page). What is in --out is kept: a run that was cut off
goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from dictionary import fit
from page import page, summary

HERE = Path(__file__).resolve().parent
HOOKS = ("resid_post.10", "resid_post.20")
HELD_OUT = 0.5
TEMPERATURE = 1.0
ENGINE = ("enforce_eager=true", "block_size=32", "max_model_len=512", "max_num_seqs=64",
          "max_num_batched_tokens=512")  # fmt: skip
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
ONE_A_STEP = "long_prefill_token_threshold=1"
RUNGS: dict[str, list[str]] = {
    "restart": [],
    "neighbours": ["--neighbours", "1"],
    "chunk": ["--engine-arg", "max_num_batched_tokens=64"],
    "alone": ["--alone"],
    "one a step": ["--engine-arg", ONE_A_STEP],
}
"""What differs from the replay that a rung is compared with."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/regimes"), help="datasets")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of the page")
    parser.add_argument("--documents", type=int, default=48, help="one of each topic")
    parser.add_argument("--given", type=int, default=64, help="tokens given of each")
    parser.add_argument("--sampled", type=int, default=200, help="tokens after them")
    parser.add_argument("--ladder", type=int, default=12, help="requests of each rung")
    parser.add_argument("--steps", type=int, default=400, help="batches of a dictionary")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    clock: dict[str, float] = {}
    n_documents = documents(args)
    harvest_all(args, clock)
    fits = [fit_one(args, clock, hook) for hook in HOOKS]
    found = compare_all(args, clock)
    setting = {
        "command": " ".join(["python", "examples/regimes/run.py", *_own_options()]),
        "model": described(args.model), "machine": machine(), "busy": busy(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}", "engine": list(ENGINE),
        "documents": n_documents, "given": args.given, "sampled": args.sampled,
        "temperature": TEMPERATURE, "held_out": HELD_OUT, "ladder_requests": args.ladder,
        "seconds": {name: round(took) for name, took in clock.items()},
    }  # fmt: skip
    figures = summary(setting, fits, found)
    args.page.mkdir(parents=True, exist_ok=True)
    (args.page / "figures.json").write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    (args.page / "README.md").write_text(page(figures))
    print(args.page / "README.md")
    return 0


def documents(args: argparse.Namespace) -> int:
    """Write the documents, one of each topic of Python's help that is long enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    needed = args.given + args.sampled
    kept = [
        {"text": text, "id": name}
        for name, text in sorted(topics.items())
        if len(tokenizer(text)["input_ids"]) >= needed
    ][: args.documents]
    (args.out / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    return len(kept)


def harvest_all(args: argparse.Namespace, clock: dict[str, float]) -> None:
    """Harvest the four arms and the rungs of both ladders."""
    layers = ",".join(hook.split(".")[1] for hook in HOOKS)
    write = ["write", "OUT", "--prompts", str(args.out / "documents.jsonl"), "--hooks",
             f"resid_post:{layers}", "--continue", str(args.given), "--max-tokens",
             str(args.sampled), "--engine-arg", "dtype=float32"]  # fmt: skip
    own = [*write, "--continued-by", "document"]
    again = ["replay", str(args.out / "G"), "OUT"]
    harvest(args, clock, "H", own)
    harvest(args, clock, "G", [*write, "--temperature", str(TEMPERATURE)])
    harvest(args, clock, "R", [*again, "--engine-arg", "dtype=float32"])
    harvest(args, clock, "D", [*own, "--engine-arg", ONE_A_STEP])
    few = [*again, "--max-requests", str(args.ladder)]
    for dtype in ("float32", "bfloat16"):
        for rung, options in {"reference": [], **RUNGS}.items():
            if dtype == "float32" and rung == "reference":
                continue  # that is R
            harvest(
                args, clock, folder(dtype, rung),
                [*few, "--engine-arg", f"dtype={dtype}", *options],
            )  # fmt: skip


def folder(dtype: str, rung: str) -> str:
    """Return the name of the dataset of a rung."""
    return f"{dtype}-{rung.replace(' ', '-')}"


def harvest(
    args: argparse.Namespace, clock: dict[str, float], name: str, command: list[str]
) -> None:
    """Run one command of the engine, unless its dataset is there."""
    out, took = args.out / name, args.out / f"{name}.seconds"
    if not took.exists():
        began = time.monotonic()
        mine = [str(out) if part == "OUT" else part for part in command]
        resume = ["--resume"] if out.exists() else []
        first = {option.split("=")[0]: option for option in ENGINE}
        for option in mine:
            first.pop(option.split("=")[0], None)
        options = [part for option in first.values() for part in ("--engine-arg", option)]
        actds(*mine, "--model", str(args.model), "--quiet", *options, *resume)
        took.write_text(str(time.monotonic() - began))
    clock[name] = float(took.read_text())


def fit_one(args: argparse.Namespace, clock: dict[str, float], hook: str) -> dict[str, Any]:
    """Fit the dictionary of a hook, unless it is there; return how it went."""
    out, began = args.out / f"sae-{hook}", time.monotonic()
    done = out / "fit.json"
    if not done.exists():
        made = fit(
            args.out / "H", hook, out,
            held_out=HELD_OUT, features=2304, k=32, steps=args.steps, batch=256,
        )  # fmt: skip
        done.write_text(json.dumps({**made, "seconds": time.monotonic() - began}))
    result: dict[str, Any] = json.loads(done.read_text())
    clock[f"dictionary {hook}"] = result["seconds"]
    return result


def compare_all(args: argparse.Namespace, clock: dict[str, float]) -> dict[str, Any]:
    """Compare the arms, and each rung with its reference; return the results by name."""
    only = f":where=position >= {args.given}"
    out: Path = args.out
    main_arms = [f"{name}={out / name}{only}" for name in "HRGD"]
    pairs = ["R-H", "G-R", "G-H", "D-H"]
    asked = {"arms": (main_arms, pairs)}
    for dtype in ("float32", "bfloat16"):
        reference = out / ("R" if dtype == "float32" else "bfloat16-reference")
        names = {rung: rung.replace(" ", "_") for rung in RUNGS}
        arms = [f"{dtype}={reference}{only}"]
        arms += [f"{n}={out / folder(dtype, rung)}{only}" for rung, n in names.items()]
        asked[dtype] = (arms, [f"{name}-{dtype}" for name in names.values()])
    dtypes = [f"float32={out / 'R'}{only}", f"bfloat16={out / 'bfloat16-reference'}{only}"]
    asked["dtype"] = (dtypes, ["bfloat16-float32"])
    return {name: compare(args, clock, name, *what) for name, what in asked.items()}


def compare(
    args: argparse.Namespace, clock: dict[str, float], name: str, arms: list[str], pairs: list[str]
) -> Any:
    """Run ``actds regimes``, unless its result is there; return the result."""
    path, took = args.out / f"{name}.json", args.out / f"{name}.seconds"
    if not took.exists():
        began = time.monotonic()
        saes = [part for hook in HOOKS for part in ("--sae", f"{hook}={args.out / f'sae-{hook}'}")]
        contrasts = [part for pair in pairs for part in ("--contrast", pair)]
        held_out = ["--held-out", str(HELD_OUT)] if name == "arms" else []
        actds(
            "regimes", *arms, *contrasts, *saes, *held_out, "--fail-on", "never",
            "--json", str(path), "--html", str(args.out / f"{name}.html"),
        )  # fmt: skip
        took.write_text(str(time.monotonic() - began))
    clock[f"regimes {name}"] = float(took.read_text())
    return json.loads(path.read_text())


def actds(*words: str, environment: dict[str, str] | None = None) -> str:
    """Run a command of actds and return what it prints; its output is shown where it fails."""
    print("actds", *words, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "actds", *words],
        env={**os.environ, **ENVIRONMENT, **(environment or {})}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\nactds {words[0]} failed")
    return done.stdout


def described(model: Path) -> str:
    """Return the shape of a model in words."""
    config = json.loads((model / "config.json").read_text())
    (architecture,) = config["architectures"]
    return (
        f"{architecture}, {config['num_hidden_layers']} layers of {config['hidden_size']} channels"
    )


def busy() -> bool:
    """Return whether the machine does other work at the same time, by its load."""
    return os.getloadavg()[1] > (os.cpu_count() or 1) + 1


def machine() -> str:
    """Return the machine in a few words, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} cores of {next(models, 'an unnamed CPU')}"


def _own_options() -> list[str]:
    words = sys.argv[1:]
    for name in ("--out", "--page", "--model"):  # paths of one machine
        if name in words:
            at = words.index(name)
            words = words[:at] + words[at + 2 :]
    return words


if __name__ == "__main__":
    sys.exit(main())
