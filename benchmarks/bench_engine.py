"""Tokens/s of vLLM with capture of 2 and of all layers against none, interleaved in one run.

    python benchmarks/bench_engine.py [--model demo/model] [--rounds 5] [--compiled]

One engine per variant stays up for the whole benchmark; rounds go round robin, each the same
requests, the prefix cache emptied before. CPU seconds are those of the engine's process; the
writer's own stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
VARIANTS = {"none": None, "2 layers": "resid_post:10,20", "all layers": "resid_post:all"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="requests in the engine at once")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        serve(options)
        return
    results = compare(options)
    print(table(results, options))
    if options.json:
        options.json.write_text(json.dumps(results))


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the rounds of every variant."""
    children = {}
    for name in VARIANTS:
        arguments = [a for a in sys.argv[1:] if not a.startswith("--json")]
        children[name] = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--variant", name],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer(children[name])  # one engine starts at a time
        print(f"{name}: engine is up", file=sys.stderr, flush=True)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    for number in range(options.rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            children[name].stdin.write("go\n")
            children[name].stdin.flush()
            found = answer(children[name])
            if number:  # the first round warms up
                results[name].append(found)
                print(f"round {number} {name}: {found}", file=sys.stderr, flush=True)
    for child in children.values():
        child.stdin.close()
        child.wait()
    return results


def answer(child: subprocess.Popen[str]) -> dict[str, float]:
    for line in child.stdout:
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"a variant ended with code {child.wait()}")


def serve(options: argparse.Namespace) -> None:
    """Run one variant: a line on standard input runs a round."""
    hooks = VARIANTS[options.variant]
    arguments = {
        "dtype": options.dtype,
        "enforce_eager": not options.compiled,
        "max_model_len": 512,
        "max_num_seqs": options.batch,
        "distributed_executor_backend": "uni",
    }
    requests = prompts(options)
    with tempfile.TemporaryDirectory() as folder:
        engine, pipeline = start(options.model, hooks, arguments, Path(folder) / "acts")
        print("RESULT {}", flush=True)
        for _ in sys.stdin:
            engine._engine.reset_prefix_cache()
            began, cpu = time.perf_counter(), time.process_time()
            writer = children_cpu(pipeline)
            n_tokens = one_round(engine, requests, options.max_tokens)
            wall = time.perf_counter() - began
            found = {
                "tokens_per_s": n_tokens / wall,
                "engine_cpu_s": time.process_time() - cpu,
                "writer_cpu_s": children_cpu(pipeline) - writer,
            }
            print(f"RESULT {json.dumps(found)}", flush=True)
        engine.shutdown()
        if pipeline is not None:
            pipeline.finish("finished")
            pipeline.__exit__()


def start(model: Path, hooks: str | None, arguments: dict[str, Any], out: Path) -> tuple[Any, Any]:
    """Return an engine, with a pipeline when it captures."""
    from actds_writers.pipeline import Pipeline
    from actds_writers.plan import WriteOptions, make_plan
    from actds_writers.resume import lock_dataset
    from actds_writers.settings import WriterSettings
    from actds_writers.vllm import engine as engines

    if hooks is None:
        engine = engines.Engine(model, arguments, None, temperature=0.0, seed=0)
        return engine, None
    source = out.parent / "prompts.jsonl"
    source.write_text('{"prompt": "x"}\n')
    plan = make_plan(
        WriteOptions(
            out,
            model,
            str(source),
            hooks,
            1,
            0.0,
            0,
            arguments,
            False,
            False,
            "permuted",
            None,
            256,
            None,
            "block",
        )
    )
    out.mkdir()
    settings = WriterSettings(
        root=str(out), dataset=secrets.token_hex(16), run="r-bench", resume=False,
        started_ns=time.time_ns(), software="bench", facts=plan.facts, tokens=plan.tokens,
        rows_per_shard=plan.rows_per_shard, order="permuted", seed=0, n_threads=1,
    )  # fmt: skip
    pipeline = Pipeline(
        plan.hooks, None, "block", 256 << 20, settings, os.getpid(), lock_dataset(out)
    )
    pipeline.connect()
    engine = engines.Engine(model, arguments, pipeline.link, temperature=0.0, seed=0)
    return engine, pipeline


def prompts(options: argparse.Namespace) -> list[list[int]]:
    generator = random.Random(0)
    return [
        [generator.randrange(100, 40_000) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests)
    ]


def one_round(engine: Any, requests: list[list[int]], max_tokens: int) -> int:
    """Serve every request; return the tokens computed."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for number, ids in enumerate(requests):
        engine._engine.add_request(
            f"{secrets.token_hex(4)}{number}", {"prompt_token_ids": ids}, params
        )
    left, n_tokens = len(requests), 0
    while left:
        for finished in engine._engine.step():
            if finished.finished:
                left -= 1
                n_tokens += len(finished.prompt_token_ids) + len(finished.outputs[0].token_ids) - 1
    return n_tokens


def children_cpu(pipeline: Any) -> float:
    """Return the CPU seconds of writer and census up to now."""
    if pipeline is None:
        return 0.0
    ticks = 0
    for process in pipeline._processes.values():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def table(results: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    base = [r["tokens_per_s"] for r in results["none"]]
    cpu = [r["engine_cpu_s"] for r in results["none"]]
    mode = "compiled" if options.compiled else "eager"
    lines = [
        f"{mode}, {options.dtype}, batch {options.batch}, {options.rounds} rounds, medians; "
        "ratios are per round, with their range",
        "",
        "| capture | tokens/s | ratio to none | range | engine CPU ratio | writer CPU s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, rounds in results.items():
        speed = [r["tokens_per_s"] for r in rounds]
        ratios = sorted(s / b for s, b in zip(speed, base, strict=True))
        engine = statistics.median(r["engine_cpu_s"] / c for r, c in zip(rounds, cpu, strict=True))
        writer = statistics.median(r["writer_cpu_s"] for r in rounds)
        lines.append(
            f"| {name} | {statistics.median(speed):.0f} | {statistics.median(ratios):.3f} | "
            f"{ratios[0]:.2f}-{ratios[-1]:.2f} | {engine:.3f} | {writer:.2f} |"
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return "\n".join([*lines, "", f"largest process: {peak:.0f} MiB"])


if __name__ == "__main__":
    main()
