"""Record what a real vLLM scheduler makes of traffic, for the calibration of the audit.

    python -m actds_testing.calibration.record_traffic [--out benchmarks/traffic] [--only NAME ...]

An engine with a tiny dummy model harvests prompts that arrive while it steps, and clients that
cancel; nothing is lost. Which tokens a step holds, what waits, what is aborted, preempted or hit in
the prefix cache is vLLM's work, and the tables are those of the harvest. Arrivals and lengths
follow what is published of public traces: Poisson, gamma of CV 2 to 4 (BurstGPT, Wang et al. 2024),
bursts that are on and off, log-normal prompts and answers (ShareGPT, Azure). Each recording leaves
``NAME.parquet`` (request, position and step of every computed token, in that order), and
``NAME-requests``, ``-spans`` and ``-steps``. ``rows.parquet`` holds token ids and readouts of
SmolLM2-135M over the prompts of the demo: what stands in the place of a tiny model's values.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actds_testing.places import BENCHMARKS, ROOT

TRAFFIC = BENCHMARKS / "traffic"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MAX_LEN = 1024
N_PROJECTIONS = 4
N_REAL_PROMPTS = 64
REAL_HOOK = 20


@dataclass(frozen=True)
class Recording:
    """One recording.

    Args:
        name: of its files.
        words: what arrives, for a table.
        cv: coefficient of variation of the time between arrivals; 1 is a Poisson process.
        per_step: arrivals a step in the mean.
        prompt: median and sigma of the log-normal prompt length, in tokens.
        answer: the same of the answer.
        n_steps: steps in which something arrives.
        on_off: mean steps of a burst and of the quiet time between; arrivals come in bursts only.
        warm_up: steps over which the rate grows from a twentieth to all of it.
        later: prompt and answer of the second half, if they change there.
        cancelled: share of the clients that cancel, after a geometric number of steps.
        patience: mean of these steps.
        shared: share of the prompts that begin with one of four common texts of 96 tokens.
        seed: of all of it.
        engine: options beside the common ones.
    """

    name: str
    words: str
    cv: float = 1.0
    per_step: float = 0.4
    prompt: tuple[float, float] = (100.0, 0.9)
    answer: tuple[float, float] = (60.0, 0.9)
    n_steps: int = 3000
    on_off: tuple[float, float] | None = None
    warm_up: int = 0
    later: tuple[tuple[float, float], tuple[float, float]] | None = None
    cancelled: float = 0.0
    patience: float = 30.0
    shared: float = 0.0
    seed: int = 0
    engine: tuple[tuple[str, Any], ...] = ()


RECORDINGS = [
    Recording("poisson", "Poisson arrivals"),
    Recording("gamma", "gamma arrivals of CV 3", cv=3.0, seed=1),
    Recording("bursts", "on and off: bursts of 40 steps, 80 between", on_off=(40.0, 80.0), seed=2),
    Recording(
        "tails", "gamma arrivals of CV 2, prompts and answers of sigma 1.4", cv=2.0, seed=3,
        prompt=(80.0, 1.4), answer=(30.0, 1.4),
    ),
    Recording("warm_up", "the rate grows twentyfold over 1,200 steps", warm_up=1200, seed=4),
    Recording(
        "regimes", "chat, then from one step to the next long prompts and short answers", cv=2.0,
        prompt=(40.0, 0.8), answer=(70.0, 0.8), later=((320.0, 0.6), (10.0, 0.6)), per_step=0.3,
        seed=5,
    ),
    Recording(
        "cancelled", "gamma arrivals of CV 4 for a small engine; a fifth of the clients cancel",
        cv=4.0, cancelled=0.2, seed=6, engine=(("max_num_seqs", 16),),
    ),
    Recording("shared", "half of the prompts begin with one of four texts", shared=0.5, seed=7),
]  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request of a recording: when it comes, in steps, and when its client cancels, if ever."""

    at: float
    text: str
    max_tokens: int
    cancel_at: float


def requests(r: Recording) -> list[Request]:
    """Return the requests in the order of their arrival."""
    import numpy as np
    from scipy import stats  # type: ignore[import-untyped]

    random = np.random.default_rng(r.seed)
    shape = 1 / r.cv**2
    gaps = stats.gamma(shape, scale=1 / (shape * r.per_step))
    clock = np.cumsum(gaps.rvs(int(3 * r.per_step * r.n_steps) + 100, random_state=random))
    if r.on_off:
        clock = _spread(clock, *r.on_off, random)
    if r.warm_up:  # time runs as fast as the rate has grown
        grown = np.cumsum(np.minimum(1.0, np.linspace(0.05, r.n_steps / r.warm_up, r.n_steps)))
        clock = np.interp(clock, grown, np.arange(r.n_steps), right=np.inf)
    texts = ["".join(random.choice(list(string.ascii_lowercase), 96)) for _ in range(4)]
    found = []
    for at in clock[clock < r.n_steps]:
        second = r.later is not None and at >= r.n_steps / 2
        prompt, answer = r.later if second and r.later else (r.prompt, r.answer)
        n, m = (
            int(np.clip(stats.lognorm(s, scale=median).rvs(random_state=random), low, high))
            for (median, s), low, high in ((prompt, 4, 800), (answer, 1, 200))
        )
        text = "".join(random.choice(list(string.ascii_lowercase), n))
        if random.random() < r.shared:
            text = texts[random.integers(4)] + text[: 800 - 96]
        leaves = random.random() < r.cancelled
        cancel_at = at + random.geometric(1 / r.patience) if leaves else np.inf
        found.append(Request(float(at), text, m, float(cancel_at)))
    return found


def _spread(clock: Any, on: float, off: float, random: Any) -> Any:
    """Return times of busy clocks on a clock that also runs while nothing comes."""
    import numpy as np

    rate_up = (on + off) / on  # as many arrivals in all
    n = int(clock[-1] / on) + 100
    busy, quiet = random.exponential(on, n), random.exponential(off, n)
    ends = np.cumsum(busy)
    clock = clock / rate_up
    return clock + np.concatenate([[0.0], np.cumsum(quiet)])[np.searchsorted(ends, clock)]


def harvest(r: Recording, folder: Path) -> Path:
    """Harvest the requests of a recording as they arrive; return the dataset."""
    from actds_testing.tiny import make_tiny_model
    from actds_writers.config import WriteSettings
    from actds_writers.harvest.one_engine import Feed
    from actds_writers.harvest.prepare import request_key
    from actds_writers.harvest.run import harvest as run

    model = make_tiny_model(folder / "model", n_layers=2, dtype="float32", tokenizer=True)
    wanted = requests(r)
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"id": f"{n}", "prompt": one.text}) for n, one in enumerate(wanted)]
    prompts.write_text("\n".join(lines) + "\n")
    engine = {
        "load_format": "dummy", "dtype": "float32", "enforce_eager": True, "block_size": 32,
        "max_model_len": MAX_LEN, "max_num_batched_tokens": 512, "max_num_seqs": 64,
        "distributed_executor_backend": "uni", **dict(r.engine),
    }  # fmt: skip
    settings = WriteSettings(
        out=str(folder / "acts"), model=model, prompts=str(prompts), hooks="resid_post:1",
        max_tokens=200, temperature=1.0, seed=r.seed, engine_args=engine, order="sequence",
        readouts=False,
    )  # fmt: skip

    class Arriving(Feed):
        """Prompts that arrive while the engine steps."""

        def serve(self, engine: Any) -> None:
            plan = {e.prompt.index: e for e in self.queue}
            todo = [(wanted[n], e) for n, e in sorted(plan.items())]
            self.queue, step, leaving = [], 0, {}
            while todo or self.live:
                while todo and todo[0][0].at <= step:
                    one, encoded = todo.pop(0)
                    room = min(one.max_tokens, MAX_LEN - len(encoded.token_ids))
                    self.add(engine, replace(encoded, max_tokens=room))
                    leaving[request_key(encoded.prompt.index)] = one.cancel_at
                gone = {key for key in self.live if leaving[key] <= step}
                if gone:
                    self.abort(engine, gone)
                self.step(engine)
                step += 1

    print(run(settings, feed=Arriving).summary)
    return folder / "acts"


def keep(name: str, acts: Path, out: Path) -> None:
    """Write what the calibration needs of a harvest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    import actds

    dataset = actds.open(acts)
    tokens = pa.concat_tables(
        shard.tokens(["request", "position", "step", "attempt", "chunk"])
        for shard in dataset.shards
    ).sort_by([("request", "ascending"), ("position", "ascending")])
    _write(out / f"{name}.parquet", tokens, delta=True)
    made = dataset.requests().drop_columns(["token_digest", "block_digests", "sampling"])
    _write(out / f"{name}-requests.parquet", made)
    _write(out / f"{name}-spans.parquet", dataset.spans())
    steps = dataset.steps()
    _write(out / f"{name}-steps.parquet", steps)
    n = pc.quantile(steps["batch_tokens"], [0, 0.1, 0.5, 0.9, 1]).to_pylist()
    print(f"{name}: {len(steps)} steps, {len(tokens)} tokens, tokens per step {n}")


def keep_rows(out: Path) -> None:
    """Harvest the real model over the first prompts of the demo, and write ids and readouts."""
    import numpy as np
    import pyarrow as pa

    from actds_testing.harvest import harvest_alone

    with tempfile.TemporaryDirectory() as folder:
        some = Path(folder) / "prompts.jsonl"
        lines = (ROOT / "demo" / "prompts.jsonl").read_text().splitlines(keepends=True)
        some.write_text("".join(lines[:: len(lines) // N_REAL_PROMPTS][:N_REAL_PROMPTS]))
        dataset = harvest_alone(
            Path(folder) / "acts", ROOT / "demo" / "model", some,
            "--hooks", f"resid_post:{REAL_HOOK}", "--max-tokens", "24",
            "--engine-arg", "dtype=float32", "--engine-arg", "enforce_eager=true",
            "--engine-arg", "enable_prefix_caching=false", "--engine-arg", "max_model_len=2048",
        )  # fmt: skip
        found = dataset.readouts().sort_by([("request", "ascending"), ("position", "ascending")])
        projections = np.stack(found["projections"].to_numpy())[:, :N_PROJECTIONS]
        columns = {
            "request": found["request"].cast(pa.uint16()),
            "token_id": found["token_id"].cast(pa.uint16()),
            "norm": found["norm"].to_numpy().astype(np.float16),
            **{f"projection_{k}": projections[:, k].astype(np.float16)
               for k in range(N_PROJECTIONS)},
        }  # fmt: skip
        _write(out / "rows.parquet", pa.table(columns))
        print(f"rows: {len(found)} of {N_REAL_PROMPTS} prompts")


def _write(path: Path, table: Any, *, delta: bool = False) -> None:
    import pyarrow.parquet as pq

    encoding = {name: "DELTA_BINARY_PACKED" for name in table.column_names} if delta else None
    pq.write_table(
        table, path, compression="zstd", compression_level=19, use_dictionary=not delta,
        column_encoding=encoding,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [r.name for r in RECORDINGS]
    parser.add_argument("--out", type=Path, default=TRAFFIC)
    parser.add_argument("--only", nargs="+", choices=[*names, "rows"], default=[*names, "rows"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT)
    if len(args.only) > 1:  # an engine each, and a process for each engine
        for name in args.only:
            command = [
                sys.executable,
                "-m",
                "actds_testing.calibration.record_traffic",
                "--out",
                str(args.out),
                "--only",
                name,
            ]
            subprocess.run(command, check=True)
        return
    [name] = args.only
    if name == "rows":
        keep_rows(args.out)
        return
    recording = next(r for r in RECORDINGS if r.name == name)
    with tempfile.TemporaryDirectory() as folder:
        keep(name, harvest(recording, Path(folder)), args.out)


if __name__ == "__main__":
    main()
