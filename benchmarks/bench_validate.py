"""Cost of ``actds validate``: many files, many tokens, and its hashing beside ``sha256sum``.

    python benchmarks/bench_validate.py [--gb 2] [--files 100000] [--tokens 1000000 10000000]
                                        [--requests 1000000] [--shards 500 2000]
                                        [--rounds 5] [--folder DIR] [--json]

Four tables. *Digests*: ``actds validate --level full`` of ``--gb`` GB of rows beside ``sha256sum``
of the same files by two processes (``xargs -P 2``), both from the page cache and with their start,
interleaved; medians. *Files*: ``--level quick`` of shards whose data files are links to those of
one, so that there are ``--files`` of them in little space. *Tokens*: ``--level standard`` of
simulated runs (10 million tokens each at most) with nearly no values: accounting is all the work.
*Many*: ``--level standard`` of honest requests of three tokens each, 50,000 a shard, and of small
shards of one request of eight tokens; memory is that of the command and of the process that parses
for it, together, above that of one request; CPU per shard is above that of the smallest of them.
Every command runs in a process of its own; CPU seconds and the largest resident memory are those
that the kernel counted for it (wait4). Datasets stay in ``--folder`` for a later call.
The default takes less than ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
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
from typing import Any

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
    tree_mb: float
    """Resident memory of all processes together, at its largest; looked at 50 times a second."""


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
    pid = tree_nbytes = 0
    while not pid:
        tree_nbytes = max(tree_nbytes, _resident(process.pid))
        time.sleep(0.02)
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
    wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in codes:
        raise SystemExit(f"{shlex.join(command)[:300]} ended with code {process.returncode}")
    cpu = used.ru_utime + used.ru_stime
    return Used(wall, cpu, used.ru_maxrss * 1024 / 1e6, tree_nbytes / 1e6)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and of all that it started."""
    try:
        n_pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    except OSError:
        return 0
    return n_pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


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
    from actds.dataset.commit import ShardRows, commit_shard

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
    from actds.dataset.commit import ShardRows, commit_shard
    from actds.format import canonical, schema
    from actds.format.schema import ShardBody, ShardManifest
    from actds.store import layout

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


@dataclass(frozen=True)
class Many:
    """One ``standard`` of many requests or shards."""

    requests: int
    shards: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    above_start_mib: float
    cpu_ms_per_shard: float


def make_many(path: Path, n_shards: int, per_shard: int, n_tokens: int, per_step: int) -> None:
    """Write a sealed dataset of requests of one sampled token each, all captured.

    Args:
        path: a folder that is not there.
        n_shards: shards.
        per_shard: requests of a shard, whole steps.
        n_tokens: prompt tokens of a request.
        per_step: requests of a step.
    """
    from actds.dataset.commit import ShardRows, commit_part, commit_shard
    from actds.dataset.ledger import Chain
    from actds.format import schema, tables
    from actds.publish.sealing import seal
    from actds.store import layout

    os.fsync = lambda handle: None  # type: ignore[assignment]  # nothing is kept
    store, chain = _begin(path, "resid_post.0", 1)
    genesis = schema.parse(schema.Genesis, store.read(layout.GENESIS), layout.GENESIS)
    census = Chain.begin(store, genesis.dataset, "r-bench", "census", "actds bench")
    n, rng = n_shards * per_shard, np.random.default_rng(0)
    ids = rng.integers(0, 50_000, (n, n_tokens)).astype("<u4")
    bits = np.full((per_shard * n_tokens, 1), 0x3F80, np.uint16)
    for k in range(n_shards):
        own = np.arange(k * per_shard, (k + 1) * per_shard)
        tokens = _tokens(len(bits), 0)
        tokens["token_id"] = ids[own].reshape(-1)
        tokens["request"] = np.repeat(own, n_tokens).astype(np.uint32)
        tokens["position"] = np.tile(np.arange(n_tokens, dtype=np.uint32), per_shard)
        tokens["step"] = (tokens["request"] // per_step).astype(np.uint64)
        rows = ShardRows(
            hooks={"resid_post.0": bits}, dtypes={"resid_post.0": "bfloat16"}, tokens=tokens,
            phase="prefill", first_step=int(tokens["step"][0]), last_step=int(tokens["step"][-1]),
        )  # fmt: skip
        name = f"s-{k:06d}"
        commit_shard(store, chain, rows, shard=name, run="r-bench", order="sequence", seed=0)
    for k, first in enumerate(range(0, n, 50_000)):
        own = np.arange(first, min(first + 50_000, n))
        zero, none = np.zeros(len(own), np.int64), [None] * len(own)
        columns: dict[str, Any] = {
            field.name: none if field.nullable else zero for field in tables.bare_schema("requests")
        }
        columns |= {
            "request": own,
            "external_id": [f"prompts.jsonl:{i}" for i in own],
            "internal_id": [f"{i}-{hashlib.md5(str(i).encode()).hexdigest()[:8]}" for i in own],
            "source": ["prompts.jsonl"] * len(own),
            "source_row": own,
            "prompt_len": zero + n_tokens,
            "generated_len": zero + 1,
            "engine_cached_tokens": zero,
            "finish_reason": ["length"] * len(own),
            "token_digest": [hashlib.sha256(ids[i].tobytes()).hexdigest() for i in own],
            "sampling": [f'{{"max_tokens":1,"seed":{i},"temperature":1}}' for i in own],
        }
        commit_part(store, census, "requests", "r-bench", k, tables.build("requests", columns))
        columns = {
            "request": own, "start": zero, "stop": zero + n_tokens, "reason": none,
            "disposition": ["captured"] * len(own), "step": own // per_step, "ref_request": none,
        }  # fmt: skip
        commit_part(store, census, "spans", "r-bench", k, tables.build("spans", columns))
    step = np.arange(-(-n // per_step))
    width = np.minimum(per_step, n - step * per_step)
    columns = {
        field.name: [None] * len(step) if field.nullable else np.zeros(len(step), np.int64)
        for field in tables.bare_schema("steps")
    }
    columns |= {
        "step": step,
        "n_requests": width,
        **dict.fromkeys(("batch_tokens", "prefill_tokens", "captured_tokens"), width * n_tokens),
    }
    commit_part(store, census, "steps", "r-bench", 0, tables.build("steps", columns))
    commit_part(store, chain, "stalls", "r-bench", 0, tables.empty("stalls"))
    n_rows = n * n_tokens
    chain.close("finished", {"rows": n_rows, "dropped_tokens": 0, "recomputed_tokens": 0})
    counts = {**dict.fromkeys(tables.DISPOSITIONS, 0), "captured": n_rows}
    census.close("finished", {"requests": n, "scheduled_tokens": n_rows, **counts})
    seal(store)


def many(folder: Path, n_requests: list[int], n_shards: list[int]) -> list[Many]:
    """Return what ``standard`` takes of many requests, and of many small shards."""
    shapes = [(1, 1, 3, 1)]
    shapes += [(-(-n // 50_000), min(n, 50_000), 3, 1000) for n in n_requests]
    shapes += [(n, 1, 8, 1) for n in n_shards]
    found: list[Many] = []
    for shape in shapes:
        name = f"many-{'-'.join(map(str, shape))}"
        path = made(folder / name, lambda p, s=shape: make_many(p, *s))
        used = validate(path, "standard")
        mib = used.tree_mb * 1e6 / 2**20
        first = next((one for one in found[1:] if one.requests == one.shards), None)
        each = 0.0
        if first is not None and shape[0] > first.shards:
            each = 1e3 * (used.cpu_s - first.cpu_s) / (shape[0] - first.shards)
        above = mib - found[0].peak_mib if found else 0.0
        found.append(Many(shape[0] * shape[1], shape[0], used.wall_s, used.cpu_s, mib, above, each))
    return found


def _begin(path: Path, hook: str, d_model: int):  # type: ignore[no-untyped-def]
    """Return the store and the writer chain of a new dataset of one hook, with its run record."""
    from actds.dataset.ledger import Chain
    from actds.format import schema
    from actds.format.schema import (
        REQUIRED_PROVENANCE,
        Genesis,
        Hook,
        ProvenanceField,
        RunBody,
        RunRecord,
    )
    from actds.store import layout
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
    parser.add_argument("--requests", type=int, nargs="*", default=[1_000_000])
    parser.add_argument("--shards", type=int, nargs="*", default=[500, 2000])
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
        if args.requests or args.shards:
            found["many"] = [asdict(one) for one in many(folder, args.requests, args.shards)]
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
