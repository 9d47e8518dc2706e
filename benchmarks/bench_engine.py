"""Tokens/s of vLLM with capture against none and against naive hooks, interleaved in one run.

    python benchmarks/bench_engine.py [--variants none,two,...] [--batch 8,32] [--compiled]

One engine per variant stays up for the whole benchmark; rounds go round robin, each the same
requests, as many of them at a time as a batch says, the prefix cache emptied before. CPU seconds
are those of the engine's process; the writer's own stand beside them. Naive hooks are Python
functions that copy and ``np.save``, which only an eager engine calls.

*Inside* is the share of the round that the engine's own thread spent in hooks, worker and scheduler
calls of the capture, by the clock around each call: what two engines that differ by chance cannot
hide. It does not see what other threads cost, and in a compiled engine not the ops either.
*Entropies* is the share of that thread's CPU time that it spent on the logits of sampled tokens.
"""

from __future__ import annotations

import argparse
import functools
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actds_testing.async_engine import allow_async_scheduling

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
TWO, EVERY = "resid_post:10,20", "resid_post:all"
KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "z", "q", "mlp_in", "mlp_out")
EIGHT = ";".join(f"{kind}:10" for kind in KINDS)


ON_LOGITS = ("_read_logits", "_read_tokens")


@dataclass(frozen=True)
class Variant:
    """What an engine does beside serving.

    ``steered``: ``all`` requests have a vector added, or ``none`` of those that are served.
    ``watched``: rows are looked at beside the profile of ``--profile``. ``attention``: layers whose
    attention is looked at, at every 64th token of a tenth of the requests.
    """

    label: str
    hooks: str | None = None
    readouts: bool = True
    n_probes: int = 0
    naive: bool = False
    in_memory: bool = False
    entropy: bool = False
    steered: str | None = None
    watched: bool = False
    attention: str | None = None


class Inside:
    """Seconds that the engine's thread spends in calls of the capture, by a clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock = 0.0, clock

    def timed(self, call: Any, sign: int = 1) -> Any:
        """Return a call whose time is counted, or taken off with ``sign=-1``."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += sign * (self.clock() - began)

        return wrapped

    def watch_logits(self) -> None:
        """Count the calls that read logits and tell the census what was sampled."""
        from actds_writers.engines.vllm.scheduler import VllmSchedulerSide
        from actds_writers.engines.vllm.worker import WorkerCapture

        for owner, names in ((VllmSchedulerSide, ("_tell_sampled",)), (WorkerCapture, ON_LOGITS)):
            for name in names:
                setattr(owner, name, self.timed(getattr(owner, name)))

    def watch(self, *, hooks: bool) -> None:
        """Count scheduler and worker calls, and the hooks unless they are compiled."""
        from actds_writers.capture import op as capture
        from actds_writers.engines.vllm.scheduler import VllmSchedulerSide
        from actds_writers.engines.vllm.worker import WorkerCapture

        for owner, names in (
            (VllmSchedulerSide, ("arrived", "scheduled", "finished", "_tell_sampled")),
            (WorkerCapture, ("before_step", "after_step", *ON_LOGITS)),
        ):
            for name in names:
                setattr(owner, name, self.timed(getattr(owner, name)))
        if hooks:
            from actds_writers.capture import edits
            from actds_writers.engines.vllm import steering

            edits.Edits.set = self.timed(edits.Edits.set)  # type: ignore[method-assign]
            steering.mark_step = self.timed(steering.mark_step)
            watch_tap = capture.watch_tap
            vars(edits)["watch_tap"] = lambda tap, hook: watch_tap(tap, self.timed(hook))
            install = capture.install_tap

            def timing(tap: Any, *args: Any) -> None:
                if tap.wrapped:
                    tap.module.forward = self.timed(tap.module.forward, -1)
                    install(tap, *args)
                    tap.module.forward = self.timed(tap.module.forward)
                    return
                install(tap, *args)
                found = tap.module._forward_pre_hooks if tap.before else tap.module._forward_hooks
                key = next(reversed(found))
                found[key] = self.timed(found[key])

            capture.install_tap = timing  # type: ignore[assignment]


VARIANTS = {
    "none": Variant("none"),
    "again": Variant("none, a second engine"),
    "two": Variant("2 hooks", TWO),
    "two-entropy": Variant("2 hooks, entropies", TWO, entropy=True),
    "two-idle": Variant("2 hooks, steering idle", TWO, steered="none"),
    "two-steered": Variant("2 hooks, one vector", TWO, steered="all"),
    "two-watched": Variant("2 hooks, beside a profile", TWO, watched=True),
    "two-attention": Variant("2 hooks, attention of 2 layers", TWO, attention="10,20"),
    "two-bare": Variant("2 hooks, no readouts", TWO, readouts=False),
    "two-null": Variant("2 hooks, dataset in memory", TWO, in_memory=True),
    "two-probes": Variant("2 hooks, 1,000 probes", TWO, n_probes=1000),
    "two-naive": Variant("2 hooks, naive np.save", TWO, readouts=False, naive=True),
    "two-naive-readouts": Variant("2 hooks, naive readouts", TWO, naive=True),
    "two-naive-probes": Variant("2 hooks, naive 1,000 probes", TWO, n_probes=1000, naive=True),
    "eight": Variant("eight kinds at one layer", EIGHT),
    "all": Variant("all hooks", EVERY),
    "all-bare": Variant("all hooks, no readouts", EVERY, readouts=False),
    "all-null": Variant("all hooks, dataset in memory", EVERY, in_memory=True),
    "all-naive": Variant("all hooks, naive np.save", EVERY, readouts=False, naive=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, help="of a round; else three for each at once")
    parser.add_argument(
        "--batch", default="8", help="requests in the engine at once; several: 1,32"
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--asynchronous", action="store_true", help="asynchronous scheduling")
    parser.add_argument("--memory-share", type=float, help="of the GPU's, for each engine")
    parser.add_argument("--profile", type=Path, help="of actds profile, for two-watched")
    parser.add_argument("--json", type=Path)
    several = "none,again,two,eight,two-probes,two-naive,all,all-naive"
    parser.add_argument("--variants", default=several)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        serve(options)
        return
    results = compare(options)
    for batch, of_variants in results.items():
        print(table(of_variants, batch, options) + "\n")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"largest process: {peak:.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps(results))


def batches(options: argparse.Namespace) -> list[int]:
    return [int(batch) for batch in str(options.batch).split(",")]


def compare(options: argparse.Namespace) -> dict[int, dict[str, list[dict[str, float]]]]:
    """Return the rounds of every variant, by batch."""
    children = {}
    names = options.variants.split(",")
    for name in names:
        children[name] = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--variant", name],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer(children[name])  # one engine starts at a time
        print(f"{name}: engine is up", file=sys.stderr, flush=True)
    results: dict[int, dict[str, list[dict[str, float]]]] = {}
    order = list(names)
    for batch in batches(options):
        results[batch] = {name: [] for name in names}
        for number in range(options.rounds + 1):
            random.Random(number).shuffle(order)
            for name in order:
                children[name].stdin.write(f"{batch}\n")
                children[name].stdin.flush()
                found = answer(children[name])
                if number:  # the first round warms up
                    results[batch][name].append(found)
                    print(f"batch {batch} {number} {name}: {found}", file=sys.stderr, flush=True)
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
    """Run one variant: a line on standard input, the batch, runs a round."""
    variant = VARIANTS[options.variant]
    arguments = {
        "dtype": options.dtype,
        "enforce_eager": not options.compiled,
        "max_model_len": 512,
        "max_num_seqs": max(batches(options)),
        "distributed_executor_backend": "uni",
    }
    if options.asynchronous:
        allow_async_scheduling()
    if options.memory_share:
        arguments["gpu_memory_utilization"] = options.memory_share
    if not any(options.model.glob("*.safetensors")):
        arguments["load_format"] = "dummy"
    memory = "/dev/shm" if variant.in_memory else None
    inside, entropy = Inside(), Inside(time.thread_time)
    entropy.watch_logits()
    inside.watch(hooks=not options.compiled)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        out = Path(folder) / "acts"
        engine, pipeline = start(options, variant, arguments, out, inside)
        print("RESULT {}", flush=True)
        for line in sys.stdin:
            requests = prompts(options, int(line))
            engine._engine.reset_prefix_cache()
            began, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
            writer = children_cpu(pipeline)
            inside.seconds = entropy.seconds = 0.0
            n_tokens = one_round(engine, requests, int(line), options.max_tokens)
            wall = time.perf_counter() - began
            found = {
                "tokens_per_s": n_tokens / wall,
                "engine_cpu_s": time.process_time() - cpu,
                "writer_cpu_s": children_cpu(pipeline) - writer,
                "inside": inside.seconds / wall,
                "entropy": entropy.seconds / (time.thread_time() - own),
            }
            print(f"RESULT {json.dumps(found)}", flush=True)
        engine.shutdown()
        if pipeline is not None:
            pipeline.finish("finished")
            pipeline.__exit__()


def start(
    given: argparse.Namespace,
    variant: Variant,
    arguments: dict[str, Any],
    out: Path,
    inside: Inside,
) -> tuple[Any, Any]:
    """Return an engine, with a pipeline when it captures."""
    model: Path = given.model
    from actds.store.local import lock_dataset
    from actds_writers.config import WriterSettings, WriteSettings
    from actds_writers.engines import vllm as engines
    from actds_writers.engines.vllm.options import VllmOptions
    from actds_writers.harvest.prepare import make_plan
    from actds_writers.harvest.processes import Pipeline

    if variant.hooks is None or variant.naive:
        engine = engines.VllmEngine(model, VllmOptions(**arguments), None, temperature=0.0, seed=0)
        if variant.naive:
            add_naive_hooks(engine, variant, out, inside)
        return engine, None
    source, probes = out.parent / "prompts.jsonl", None
    source.write_text('{"id": "x", "prompt": "x"}\n')
    if variant.n_probes:
        probes = out.parent / "probes.npy"
        np.save(probes, probe_matrix(variant.n_probes, model).T)
    harvest = WriteSettings(
        out=str(out), model=model, prompts=str(source), hooks=variant.hooks, max_tokens=1,
        readouts=variant.readouts, probes=None if probes is None else str(probes),
        entropy=variant.entropy, intervene=interventions(variant, model, out.parent),
        attention=variant.attention, profile=str(given.profile) if variant.watched else None,
    )  # fmt: skip
    plan = make_plan(harvest, engines.VLLM.options(arguments))
    out.mkdir()
    settings = WriterSettings(
        harvest=harvest, dataset=secrets.token_hex(16), run="r-bench", resume=False,
        started_ns=time.time_ns(), software="bench", facts=plan.facts, tokens=plan.tokens,
        rows_per_shard=plan.rows_per_shard, n_threads=1, readouts=plan.readouts,
    )  # fmt: skip
    lock = lock_dataset(out)
    edits = None if plan.interventions is None else plan.interventions.to_bytes()
    pipeline = Pipeline(
        settings,
        plan.hooks,
        os.getpid(),
        lock,
        files={"probes": plan.probes, "interventions": edits, "profile": plan.profile},
    )
    pipeline.connect()
    options = VllmOptions(**arguments)
    engine = engines.VllmEngine(model, options, pipeline.link, temperature=0.0, seed=0)
    return engine, pipeline


def interventions(variant: Variant, model: Path, folder: Path) -> str | None:
    """Write a file that adds a vector to the stream of every request, or of one never served."""
    if variant.steered is None:
        return None
    np.save(folder / "v.npy", probe_matrix(1, model)[:, 0])
    edit = {"hook": "resid_post.10", "op": "add", "vector": "v.npy", "strength": 0.1}
    item = {"name": "v", "edits": [edit], "requests": [] if variant.steered == "all" else ["id x"]}
    document = {"schema": "actds.interventions/1", "interventions": [item]}
    (folder / "v.json").write_text(json.dumps(document))
    return str(folder / "v.json")


def probe_matrix(n_probes: int, model: Path) -> np.ndarray:
    """Return random probes, float32 ``(d_model, n_probes)``."""
    d_model = int(json.loads((model / "config.json").read_text())["hidden_size"])
    return np.random.default_rng(0).normal(size=(d_model, n_probes)).astype(np.float32)


def add_naive_hooks(engine: Any, variant: Variant, out: Path, inside: Inside) -> None:
    """Hook decoder layers as one does in a notebook: copy out, compute, save, at every step."""
    import torch

    from actds_writers.capture.taps import decoder_layers

    out.mkdir()
    core = engine._engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = decoder_layers(runner.model)
    wanted = sorted(layers) if variant.hooks == EVERY else [10, 20]
    weights = None
    if variant.readouts:
        model = Path(runner.model_config.model)
        weights = torch.from_numpy(probe_matrix(8 + variant.n_probes, model))

    def save(layer: int) -> Any:
        n_steps = 0

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            nonlocal n_steps
            rows = (output[0] + output[1]).float().cpu()
            path = out / f"{layer}-{n_steps % 64}.npy"
            n_steps += 1
            if weights is None:
                np.save(path, rows.numpy().copy())
                return
            norms = rows.norm(dim=1, keepdim=True)
            np.save(path, torch.cat([norms, rows @ weights], dim=1).numpy().copy())

        return hook

    for layer in wanted:
        layers[layer].register_forward_hook(inside.timed(save(layer)))


def prompts(options: argparse.Namespace, batch: int) -> list[list[int]]:
    generator = random.Random(0)
    return [
        [generator.randrange(100, 40_000) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests or 3 * batch)
    ]


def one_round(engine: Any, requests: list[list[int]], batch: int, max_tokens: int) -> int:
    """Serve every request, the next one when another has ended; return the tokens computed."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    waiting, n_running, n_tokens = list(requests), 0, 0
    while waiting or n_running:
        while waiting and n_running < batch:
            ids = {"prompt_token_ids": waiting.pop()}
            engine._engine.add_request(secrets.token_hex(8), ids, params)
            n_running += 1
        for finished in engine._engine.step():
            if finished.finished:
                n_running -= 1
                n_tokens += len(finished.prompt_token_ids) + len(finished.outputs[0].token_ids) - 1
    return n_tokens


def children_cpu(pipeline: Any) -> float:
    """Return the CPU seconds of writer and census up to now."""
    if pipeline is None:
        return 0.0
    ticks = 0
    for process in pipeline.processes.values():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def table(
    results: dict[str, list[dict[str, float]]], batch: int, options: argparse.Namespace
) -> str:
    base = [r["tokens_per_s"] for r in results["none"]]
    cpu = [r["engine_cpu_s"] for r in results["none"]]
    mode = "compiled" if options.compiled else "eager"
    mode += ", asynchronous scheduling" * options.asynchronous
    lines = [
        f"{mode}, {options.dtype}, batch {batch}, {options.rounds} rounds, medians; "
        "ratios are per round, with their range",
        "",
        "| capture | tokens/s | ratio to none | range | engine CPU ratio | writer CPU s | inside "
        "| entropies |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, rounds in results.items():
        label = VARIANTS[name].label
        speed = [r["tokens_per_s"] for r in rounds]
        ratios = sorted(s / b for s, b in zip(speed, base, strict=True))
        engine = statistics.median(r["engine_cpu_s"] / c for r, c in zip(rounds, cpu, strict=True))
        writer = statistics.median(r["writer_cpu_s"] for r in rounds)
        inside = statistics.median(r["inside"] for r in rounds)
        entropy = statistics.median(r["entropy"] for r in rounds)
        lines.append(
            f"| {label} | {statistics.median(speed):.0f} | {statistics.median(ratios):.3f} | "
            f"{ratios[0]:.2f}-{ratios[-1]:.2f} | {engine:.3f} | {writer:.2f} | "
            f"{inside:.2%} | {entropy:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
