"""Does a steering vector still work at token 200? The first decay curves, on a small model.

    python examples/steering/run.py [--model demo/model] [--out build/steering]

lets a model go on with code and with prose, takes the direction of one against the other, and lets
``actds steer`` add it to what is sampled. It writes figures.json and the tables of README.md beside
this file (or to --page), and the report to --out. A harvest that is in --out is kept. About a
quarter of an hour on two cores; demo/model is made by `make demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import make_prompts  # type: ignore[import-not-found]  # noqa: E402

from actds_studies.steer.result import WAYS, Components, Steering  # noqa: E402
from actds_testing.harvest import ENGINE_ENVIRONMENT, ONE_PROCESS  # noqa: E402

CONTRAST = ("code", "prose")
"""Labels of the prompts: functions and docstrings of the standard library, cut somewhere."""
SHORTEST = 120
"""Characters of a prompt: positions that prompts reach are those of others' answers."""
ENGINE = ("dtype=float32", "enforce_eager=true", "block_size=32", "max_model_len=1024",
          "max_num_seqs=32", "max_num_batched_tokens=1024")  # fmt: skip
LEAST = 21
"""Tokens of an answer after the last step that it is steered at."""
BEGIN, END = "<!-- begin: {} -->\n\n", "\n\n<!-- end: {} -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"), help="model folder")
    parser.add_argument("--out", type=Path, default=Path("build/steering"), help="dataset, report")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of README and figures")
    parser.add_argument("--texts", type=int, default=200, help="prompts that are served")
    parser.add_argument("--survival", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--requests", type=int, default=24, help="requests that are steered")
    parser.add_argument("--limit", action="append", help="of actds steer; random=4 if none")
    parser.add_argument("--longest", type=int, default=1100, help="characters of a prompt")
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
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        environment = {**os.environ, **ENGINE_ENVIRONMENT, **ONE_PROCESS}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
        command = [sys.executable, "-m", "actds", *words]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        clock[name] = round(time.monotonic() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        clock[f"{name}, of a core"] = round(after - before)
    result = Steering.from_json((args.out / "result.json").read_text())
    figures = {
        "texts": args.texts,
        "seconds": clock,
        **result.model_dump(mode="json", by_alias=True),
    }
    del figures["dataset"]
    (args.page / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_tables(args.page / "README.md", result, clock)
    return 0


def texts(n: int, longest: int) -> Iterator[dict[str, str]]:
    """Yield prompts: as many functions as docstrings, each cut at a length of its own."""
    rng = random.Random(0)
    pool = list(make_prompts.passages(Path(sysconfig.get_paths()["stdlib"])))
    rng.shuffle(pool)
    for label, kind in zip(CONTRAST, ("code", "doc"), strict=True):
        long = [p for p in pool if p.kind == kind and len(p.text) > SHORTEST]
        for number, passage in enumerate(long[: n // 2]):
            text = passage.text[: rng.randint(SHORTEST, longest)]
            yield {"id": f"{label}-{number}", "label": label, "prompt": text}


def harvest(args: argparse.Namespace) -> list[str]:
    prompts = args.out / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps(record) + "\n" for record in texts(args.texts, args.longest))
    )
    longest = max(map(int, args.at.split(","))) + LEAST
    return [
        "write", str(args.out / "acts"), "--model", str(args.model), "--prompts", str(prompts),
        "--hooks", args.hook.replace(".", ":"), "--max-tokens", str(longest),
        "--temperature", "0.7", "--quiet", *engine_words(),
    ]  # fmt: skip


def steer(args: argparse.Namespace) -> list[str]:
    first, second = (f"labels.label == '{label}'" for label in CONTRAST)
    return [
        "steer", str(args.out / "acts"), "--model", str(args.model), "--hook", args.hook,
        "--from", first, "--against", second, "--refit", "--survival", str(args.survival),
        "--at", args.at, "--requests", str(args.requests),
        *(word for limit in args.limit or ["random=4"] for word in ("--limit", limit)),
        "--fail-on", "never", "--json", str(args.out / "result.json"),
        "--html", str(args.out / "steering.html"), *engine_words(),
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
    of: dict[Any, Any] = {
        (e.way, e.vector, e.dose, e.step, e.after): e.divergence for e in result.effects
    }
    rows = [
        [way, vector, f"{of_dose:g}", str(after)]
        + [interval(of[way, vector, of_dose, step, after]) for step in steps]
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
    if result.components is not None:
        yield "components", components(result.components)
    if result.survival:
        doses = sorted({s.dose for s in result.survival})
        share = {(s.dose, s.step): interval(s.share) for s in result.survival}
        rows = [[f"{dose:g}", *(share[dose, step] for step in steps)] for dose in doses]
        head = ("dose", *(f"from step {step}" for step in steps))
        yield "survival", markdown(head, rows)


def components(of: Components) -> str:
    halves = f"{of.split_half['prompts']:.2f} in prompts, {of.split_half['answers']:.2f} in answers"
    words = (
        f"**{of.outcome.capitalize()}**{f' ({of.reason})' if of.reason else ''}. The directions of "
        f"prompts and of answers have a cosine of {of.cosine:.2f}, those of two halves {halves}. "
        f"Positions (requests of either side): {', '.join(f'{p} ({n})' for p, n in of.positions)}."
    )
    rows = [
        [a.arm, a.dosing, "-" if a.share is None else f"{a.share:.3f}", interval(a.aimed),
         interval(a.divergence)]
        for a in of.arms
    ]  # fmt: skip
    table = markdown(("arm", "equal", "strength over norm", "aimed", "nats"), rows)
    rows = [[d, interval(of.kept[d]), interval(of.restored[d]), of.by_dosing[d]] for d in of.kept]
    return f"{words}\n\n{table}\n\n{markdown(('equal', 'kept', 'restored', 'reading'), rows)}"


def interval(value: Any) -> str:
    return "-" if value is None else f"{value.value:.2g} [{value.low:.2g}, {value.high:.2g}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
