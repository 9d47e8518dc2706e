"""Cost of ``actds validate``: many files, many tokens, and its hashing beside ``sha256sum``.

    python benchmarks/bench_validate.py [--gb 2] [--files 100000] [--tokens 1000000 10000000]
                                        [--rounds 5] [--folder DIR] [--json]

Three tables. *Digests*: ``actds validate --level full`` of ``--gb`` GB of rows beside ``sha256sum``
of the same files by two processes (``xargs -P 2``), both from the page cache and with their start,
interleaved; medians. *Files*: ``--level quick`` of shards whose data files are links to those of
one, so that there are ``--files`` of them in little space. *Tokens*: ``--level standard`` of
simulated runs (10 million tokens each at most) with nearly no values: accounting is all the work.
Every command runs in a process of its own; CPU seconds and the largest resident memory are those
that the kernel counted for it (wait4). Datasets stay in ``--folder`` for a later call.
The default takes less than ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bench_audit import dataset as simulated
from bench_codec import table

ROOT = Path(__file__).resolve().parents[1]
D_MODEL, ROWS_PER_SHARD = 2048, 16_384
GOAL = 0.85
"""Of the rate of ``sha256sum``, at least."""


@dataclass(frozen=True)
class Used:
    """What a command took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Digests:
    """Hashing of the same bytes; medians over the rounds."""

    command: str
    gb: float
    files: int
    wall_s: float
    gb_per_s: float
    of_sha256sum: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Files:
    """One ``quick`` of many files."""

    files: int
    shards: int
    wall_s: float
    files_per_s: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True)
class Tokens:
    """One ``standard`` of many tokens."""

    rows: int
    runs: int
    wall_s: float
    rows_per_s: float
    cpu_s: float
    peak_mb: float
    bytes_per_row: float


def run(command: list[str], *, codes: tuple[int, ...] = (0,)) -> Used:
    """Run a command to its end; return what it took."""
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in codes:
        raise SystemExit(f"{shlex.join(command)[:300]} ended with code {process.returncode}")
    return Used(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def validate(path: Path, level: str, *more: str, codes: tuple[int, ...] = (0,)) -> Used:
    """Run ``actds validate``."""
    words = ["-m", "actds", "validate", str(path), "--level", level, *more]
    return run([sys.executable, *words], codes=codes)


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """Return a dataset, made in another process where it is missing: memory is inherited."""
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        child = os.fork()
        if not child:
            make(partial)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"{path} could not be made")
        partial.rename(path)
    return path


def make_rows(path: Path, n_shards: int) -> None:
    """Write a dataset of normal rows in raw shards; it is not sealed and has no census."""
    from actds.commit import ShardRows, commit_shard

    store, chain = _begin(path, "resid_post.0", D_MODEL)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((ROWS_PER_SHARD, D_MODEL), np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for number in range(n_shards):
        rows = ShardRows(
            hooks={"resid_post.0": np.roll(bits, number, axis=0)},
            dtypes={"resid_post.0": "bfloat16"},
            tokens=_tokens(ROWS_PER_SHARD, number),
            phase="prefill",
            first_step=number,
            last_step=number,
        )
        commit_shard(
            store, chain, rows, shard=f"s-{number:06d}", run="r-bench", order="sequence", seed=0
        )
    chain.close("finished", {})


def make_links(path: Path, n_files: int) -> None:
    """Write shards whose data files are links to those of one shard; documents are their own."""
    from actds import canonical, layout, schema
    from actds.commit import ShardRows, commit_shard
    from actds.schema import ShardBody, ShardManifest

    os.fsync = lambda handle: None  # type: ignore[assignment]  # 20,000 records; nothing is kept
    store, chain = _begin(path, "resid_post.0", 8)
    bits = np.arange(64 * 8, dtype=np.uint16).reshape(64, 8) + 0x3F80
    rows = ShardRows(
        hooks={"resid_post.0": bits}, dtypes={"resid_post.0": "bfloat16"}, tokens=_tokens(64, 0),
        phase="prefill", first_step=0, last_step=0,
    )  # fmt: skip
    commit_shard(store, chain, rows, shard="s-000000", run="r-bench", order="sequence", seed=0)
    first = path / "shards" / "s-000000"
    text = (first / "shard.json").read_bytes()
    manifest = schema.parse(ShardManifest, text, "shard.json")
    # Of each shard: manifest, four files of data, and a record of the ledger.
    for number in range(1, n_files // (len(manifest.files) + 2)):
        name = f"s-{number:06d}"
        folder = path / "shards" / name
        for entry in manifest.files:
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(first / entry.path, target)
        data = schema.to_bytes(manifest.model_copy(update={"shard": name}))
        store.put_new(layout.manifest_path(name), [data])
        digest = canonical.digest(data)
        chain.append("shard", ShardBody(shard=name, manifest_sha256=digest, n_rows=64))
    chain.close("finished", {})


def _begin(path: Path, hook: str, d_model: int):  # type: ignore[no-untyped-def]
    """Return the store and the writer chain of a new dataset of one hook, with its run record."""
    from actds import layout, schema
    from actds.ledger import Chain
    from actds.schema import (
        REQUIRED_PROVENANCE,
        Genesis,
        Hook,
        ProvenanceField,
        RunBody,
        RunRecord,
    )
    from actds.store.local import LocalStore

    store, software = LocalStore(path), "actds bench"
    one = Hook(name=hook, kind="resid_post", layer=0, d_model=d_model, dtype="bfloat16")
    genesis = Genesis(dataset="b" * 32, created_ns=1, writer=software, hooks=[one])
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    chain = Chain.begin(store, genesis.dataset, "r-bench", "writer", software)
    unknown = ProvenanceField(value=None, origin="unknown", reason="a benchmark has none")
    fields = dict.fromkeys(REQUIRED_PROVENANCE, unknown)
    record = RunRecord(dataset=genesis.dataset, run="r-bench", started_ns=1, fields=fields)
    written = store.put_new(layout.run_path("r-bench"), [schema.to_bytes(record)])
    chain.append("run", RunBody(run="r-bench", sha256=written.sha256))
    return store, chain


def _tokens(n_rows: int, step: int) -> dict[str, np.ndarray]:
    kinds = {"token_id": "u4", "attempt": "u2", "chunk": "u4", "flags": "u2"}
    columns = {name: np.zeros(n_rows, kind) for name, kind in kinds.items()}
    columns["request"] = np.full(n_rows, step, np.uint32)
    columns["position"] = np.arange(n_rows, dtype=np.uint32)
    columns["step"] = np.full(n_rows, step, np.uint64)
    return columns


def digests(path: Path, rounds: int) -> list[Digests]:
    """Return what hashing takes, by actds and by two processes of ``sha256sum``."""
    files = [file for file in path.rglob("*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    listed = f"find {shlex.quote(str(path))} -type f -print0"
    two = ["sh", "-c", f"{listed} | xargs -0 -n 8 -P 2 sha256sum"]
    # Unsealed and without a census: that is what exit code 1 says of it; all is hashed first.
    contestants: dict[str, Callable[[], Used]] = {
        "sha256sum, 2 processes": lambda: run(two),
        "actds validate --level full": lambda: validate(path, "full", codes=(1,)),
        "actds validate --executor processes": lambda: validate(
            path, "full", "--executor", "processes", codes=(1,)
        ),
    }
    run(two)  # into the page cache
    taken: dict[str, list[Used]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            taken[name].append(work())

    def median(name: str, what: str) -> float:
        return statistics.median(getattr(one, what) for one in taken[name])

    base = median("sha256sum, 2 processes", "wall_s")
    return [
        Digests(
            command=name,
            gb=nbytes / 1e9,
            files=len(files),
            wall_s=median(name, "wall_s"),
            gb_per_s=nbytes / 1e9 / median(name, "wall_s"),
            of_sha256sum=base / median(name, "wall_s"),
            cpu_s=median(name, "cpu_s"),
            peak_mb=median(name, "peak_mb"),
        )
        for name in contestants
    ]


def quick(path: Path) -> Files:
    """Return what ``quick`` takes."""
    used = validate(path, "quick", codes=(1,))
    n_files = sum(len(names) for _, _, names in os.walk(path))
    n_shards = sum(1 for _ in (path / "shards").iterdir())
    rate = n_files / used.wall_s
    return Files(n_files, n_shards, used.wall_s, rate, used.cpu_s, used.peak_mb)


def standard(path: Path) -> Tokens:
    """Return what ``standard`` takes."""
    used = validate(path, "standard")
    [seal] = [json.loads(one.read_bytes()) for one in path.glob("seal/[0-9]*.json")]
    n_rows, n_runs = seal["totals"]["rows"], len(list(path.glob("runs/*.json")))
    rate, each = n_rows / used.wall_s, used.peak_mb * 1e6 / n_rows
    return Tokens(n_rows, n_runs, used.wall_s, rate, used.cpu_s, used.peak_mb, each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where datasets stay; temporary when absent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shard_nbytes = ROWS_PER_SHARD * D_MODEL * 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[dict[str, object]]] = {}
        if args.gb:
            n_shards = max(1, round(args.gb * 1e9 / shard_nbytes))
            path = made(folder / f"rows-{n_shards}", lambda p: make_rows(p, n_shards))
            found["digests"] = [asdict(one) for one in digests(path, args.rounds)]
        if args.files:
            path = made(folder / f"links-{args.files}", lambda p: make_links(p, args.files))
            found["files"] = [asdict(quick(path))]
        if args.tokens:
            paths = [simulated(folder, n, readouts=False) for n in args.tokens]
            found["tokens"] = [asdict(standard(path)) for path in paths]
    if args.json:
        print(json.dumps({"format": "actds.bench_validate", "version": "1", **found}))
        return
    for name, rows in found.items():
        print(f"\n{name}\n\n{table(rows)}")
    if "digests" in found:
        best = max(float(str(row["of_sha256sum"])) for row in found["digests"][1:])
        print(f"\n{best:.2f} of the rate of sha256sum; the goal is {GOAL}")


if __name__ == "__main__":
    main()
