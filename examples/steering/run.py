"""Does a steering vector still work at token 200? The first decay curves, on a small model.

    python examples/steering/run.py [--model demo/model] [--out build/steering]

serves chats with vLLM on the CPU, takes the direction of code against documentation, and lets
``actds steer`` add it to the answers. It writes figures.json and the tables of README.md beside this
file (or to --page), and the report to --out. A harvest that is in --out is kept. About a quarter of
an hour on two cores; demo/model is made by `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

from actds_studies.steer.result import WAYS, Steering  # noqa: E402
from actds_testing.harvest import ENGINE_ENVIRONMENT, ONE_PROCESS  # noqa: E402

CONTRAST = ("code", "doc")
"""Labels of the prompts; the system prompt, which all share, is in neither mean."""
ENGINE = ("dtype=float32", "enforce_eager=true", "block_size=32", "max_model_len=2048",
          "max_num_seqs=32", "max_num_batched_tokens=1024")  # fmt: skip
LEAST = 21
"""Tokens of an answer after the last step that it is steered at."""
BEGIN, END = "<!-- begin: {} -->\n\n", "\n\n<!-- end: {} -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/steering"), help="dataset, report")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of README and figures")
    parser.add_argument("--chats", type=int, default=160, help="requests that are served")
    parser.add_argument("--requests", type=int, default=24, help="requests that are steered")
    parser.add_argument("--random", type=int, default=4, help="random vectors")
    parser.add_argument("--at", default="1,10,50,200", help="decode steps")
    parser.add_argument("--hook", default="resid_post.10", help="hook that is steered")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    clock = {}
    for name, words in (("harvest", harvest(args)), ("steer", steer(args))):
        if name == "harvest" and (args.out / "acts" / "seal").exists():
            continue
        start = time.monotonic()
        environment = {**os.environ, **ENGINE_ENVIRONMENT, **ONE_PROCESS}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        command = [sys.executable, "-m", "actds", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        clock[name] = round(time.monotonic() - start)
    result = Steering.from_json((args.out / "result.json").read_text())
    figures = {"chats": args.chats, "seconds": clock, **result.model_dump(mode="json")}
    del figures["dataset"]
    (args.page / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(args.page / "README.md", result, clock)
    return 0


def harvest(args: argparse.Namespace) -> list[str]:
    prompts = args.out / "prompts.jsonl"
    words = [str(HERE.parent / "make_prompts.py"), str(prompts), "--n", str(args.chats)]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    longest = max(map(int, args.at.split(","))) + LEAST
    return [
        "write", str(args.out / "acts"), "--model", str(args.model), "--prompts", str(prompts),
        "--hooks", args.hook.replace(".", ":"), "--max-tokens", str(longest),
        "--temperature", "0.7", "--quiet", *engine_words(),
    ]  # fmt: skip


def steer(args: argparse.Namespace) -> list[str]:
    first, second = (f"labels.label == '{label}' and role != 'system'" for label in CONTRAST)
    return [
        "steer", str(args.out / "acts"), "--model", str(args.model), "--hook", args.hook,
        "--from", first, "--against", second, "--refit", "--at", args.at, "--fail-on", "never",
        "--requests", str(args.requests), "--limit", f"random={args.random}",
        "--json", str(args.out / "result.json"), "--html", str(args.out / "steering.html"),
        *engine_words(),
    ]  # fmt: skip


def engine_words() -> list[str]:
    return [word for option in ENGINE for word in ("--engine-arg", option)]


# ---- tables


def write_tables(page: Path, result: Steering, clock: dict[str, int]) -> None:
    """Write the tables into the page between their marks; one that has none is left as it is."""
    text = page.read_text() if page.exists() else ""
    for name, table in tables(result):
        begin, end = BEGIN.format(name), END.format(name)
        if begin in text and end in text:
            text = f"{text.split(begin)[0]}{begin}{table}{end}{text.split(end)[1]}"
        print(table, end="\n\n")
    print(f"seconds: {clock}")
    page.write_text(text)


def tables(result: Steering) -> Iterator[tuple[str, str]]:
    """Yield the tables of the page."""
    steps = sorted({effect.step for effect in result.effects})
    dose = result.dose
    facts = (
        f"{result.n_requests} requests of {result.n_prompts} prompts; a dose of 1 is "
        f"{dose.strength:.3g}, {dose.strength / dose.median_norm:.0%} of the median row; the floor "
        f"is {interval(result.floor)} nats; the unembedding is proved within "
        f"{result.unembedding:.1g} nats."
    )
    yield "answer", f"{facts}\n\n> {result.answer.words}."
    rows = [
        [way, vector, f"{of_dose:g}", str(after)]
        + [interval(e.divergence if e else None)
           for e in (result.effect(way, vector, of_dose, step, after) for step in steps)]
        for way in WAYS
        for vector, of_dose in (("vector", 1.0), ("vector", 0.5), ("vector", 2.0),
                                ("negative", 1.0), ("random", 1.0))
        for after in sorted({e.after for e in result.effects if e.way == way})
    ]  # fmt: skip
    head = ("way", "vector", "dose", "read after", *(f"step {step}" for step in steps))
    yield "divergence", markdown(head, rows)
    rows = [
        [d.way, f"{d.dose:g}", str(d.after), d.outcome, *(interval(r) for r in d.ratio[1:])]
        for d in result.decays
    ]
    head = ("way", "dose", "read after", "outcome", *(f"step {step}" for step in steps[1:]))
    yield "decay", markdown(head, rows)
    if (of := result.components) is None:
        return
    words = (
        f"**{of.outcome}**{f' ({of.reason})' if of.reason else ''}. Directions of prompts and of "
        f"answers have a cosine of {of.cosine:.2f}; two halves of the prompts "
        f"{of.split_half['prompts']:.2f}, of the answers {of.split_half['answers']:.2f}. Positions "
        f"(requests of either side): {', '.join(f'{p} ({n})' for p, n in of.positions)}."
    )
    rows = [
        [arm.arm, arm.dosing, "-" if arm.share is None else f"{arm.share:.3f}",
         interval(arm.aimed), interval(arm.divergence)]
        for arm in of.arms
    ]  # fmt: skip
    head = ("arm", "equal", "strength over norm", "aimed", "nats")
    kept = [[d, interval(of.kept[d]), interval(of.restored[d]), of.by_dosing[d]] for d in of.kept]
    beside = markdown(("equal", "kept", "restored", "reading"), kept)
    yield "components", f"{words}\n\n{markdown(head, rows)}\n\n{beside}"


def interval(value: Any) -> str:
    return "-" if value is None else f"{value.value:.2g} [{value.low:.2g}, {value.high:.2g}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
