"""Real harvests for tests: ``actds write`` in a process of its own, with a real engine."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import actds
from actds.explore.dataset import Dataset
from actds_testing.places import DEMO_MODEL
from actds_testing.warm_engine import WarmEngine
from actds_validators.validate.validation import validate

REAL_MODEL = DEMO_MODEL
TIMEOUT_S = 1500
FORKED_TIMEOUT_S = 400
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# One process instead of three: each imports vLLM for itself, which takes longer than the harvest.
# The processes of a normal engine have tests of their own.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ALONE = ("--engine-arg", "distributed_executor_backend=uni")
TINY = (
    "--engine-arg",
    "load_format=dummy",
    "--engine-arg",
    "dtype=float32",
    "--engine-arg",
    "block_size=32",
)
EAGER = ("--engine-arg", "enforce_eager=true")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of an engine on a small machine."""
    return {**os.environ, **ENGINE_ENVIRONMENT, **extra}


def command(out: Path | str, model: Path, prompts: Path, *options: str) -> list[str]:
    """Return the command line of a harvest."""
    arguments = ["--model", str(model), "--prompts", str(prompts), *options]
    return [sys.executable, "-m", "actds", "write", str(out), *arguments]


def run(
    out: Path | str, model: Path, prompts: Path, *options: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a harvest to its end, whatever that is."""
    return subprocess.run(
        command(out, model, prompts, *options),
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def harvest_alone(
    out: Path | str, model: Path, prompts: Path, *options: str, **extra: str
) -> Dataset:
    """Run a harvest, which must succeed, whose engine lives in the command's own process."""
    done = run_alone(out, model, prompts, *options, **extra)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return validated(out)


def run_alone(
    out: Path | str, model: Path, prompts: Path, *options: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a harvest whose engine lives in the command's own process, to whatever end."""
    return run_warm(out, model, prompts, *options, *ALONE, **ONE_PROCESS, **extra)


def run_warm(
    out: Path | str, model: Path, prompts: Path, *options: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a harvest in a process in which vLLM and transformers are imported already."""
    _, *arguments = command(out, model, prompts, *options)
    return warm_engine().run(arguments, environment(**extra), TIMEOUT_S)


def harvest_warm(
    out: Path | str, model: Path, prompts: Path, *options: str, **extra: str
) -> Dataset:
    """Run such a harvest, which must succeed, and validate what it wrote."""
    done = run_warm(out, model, prompts, *options, **extra)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return validated(out)


def run_forked(
    out: Path | str, model: Path, prompts: Path, *options: str, patch: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a harvest with several workers, forked from a process in which vLLM is imported already.

    Args:
        patch: Python that the command and its workers run before.
    """
    script = f"import sys\n{patch}\nfrom actds.cli import main\nsys.exit(main())"
    arguments = command(out, model, prompts, *options)[3:]
    own = environment(**ONE_PROCESS, ACTDS_FORK_WORKERS="1", **extra)
    return warm_engine().run(["-c", script, *arguments], own, FORKED_TIMEOUT_S)


@functools.cache
def warm_engine() -> WarmEngine:
    """Return the process of this test run in which vLLM is imported already."""
    engine = WarmEngine(environment(**ONE_PROCESS))
    atexit.register(engine.close)
    return engine


def harvest(out: Path | str, model: Path, prompts: Path, *options: str, **extra: str) -> Dataset:
    """Run a harvest that must succeed, and validate what it wrote."""
    done = run(out, model, prompts, *options, **extra)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return validated(out)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in files for child in file.read_text().split()]
    return found + [one for child in found for one in descendants(child)]


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started, and wait until all are gone."""
    handles = [os.pidfd_open(pid) for pid in [process.pid, *descendants(process.pid)]]
    for handle in handles:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    process.wait()
    for handle in handles:  # readable when the process has ended, and holds no lock any more
        select.select([handle], [], [])
        os.close(handle)


def validated(path: Path | str) -> Dataset:
    """Return a dataset that ``actds validate`` finds clean at its deepest level."""
    report = validate(path, "deep")
    assert not report.errors, report.errors[:3]
    return actds.open(path)


def write_prompts(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write prompts as JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def rows_of(dataset: Dataset, hook: str) -> dict[tuple[str, int], np.ndarray]:
    """Return float32 rows by (external id, position)."""
    names = external_ids(dataset)
    found: dict[tuple[str, int], np.ndarray] = {}
    for shard in dataset.shards:
        tokens = shard.tokens(["request", "position"])
        rows = values(shard.array(hook).read_all(), shard.array(hook).dtype)
        keys = zip(tokens["request"].to_pylist(), tokens["position"].to_pylist(), strict=True)
        for (request, position), row in zip(keys, rows, strict=True):
            found[names[shard.manifest.run, request], position] = row
    return found


def token_ids_of(dataset: Dataset) -> dict[tuple[str, int], int]:
    """Return the token that was fed at each captured position, by (external id, position)."""
    names = external_ids(dataset)
    return {
        (names[shard.manifest.run, row["request"]], row["position"]): row["token_id"]
        for shard in dataset.shards
        for row in shard.tokens(["request", "position", "token_id"]).to_pylist()
    }


def values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Return bit patterns as float32."""
    from actds.format.arrays import as_ml_dtypes

    return as_ml_dtypes(bits, dtype).astype(np.float32)


def external_ids(dataset: Dataset) -> dict[tuple[str, int], str]:
    """Return external ids by (run, request)."""
    rows = dataset.requests(run=True).select(["run", "request", "external_id"]).to_pylist()
    return {(row["run"], row["request"]): row["external_id"] for row in rows}


def compare_attention(dataset: Dataset, other: Dataset) -> None:
    """Check that two harvests of the same tokens have the same lines of attention."""
    keys = ["request", "position", "layer", "head"]
    got, want = (
        of.attention().to_pandas().sort_values(keys).reset_index(drop=True)
        for of in (dataset, other)
    )
    assert len(want) and got[keys].equals(want[keys])
    for name in ("keys", "entropy", "first", "prompt", "generated"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-4)


def total(table: pa.Table, column: str) -> int:
    """Return the sum of a column."""
    return int(sum(value or 0 for value in table[column].to_pylist()))


def relative_l2(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the relative L2 distance of each row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows."""
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / norms
