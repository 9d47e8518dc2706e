"""Loading throughput: our loader against reading and copying alone, zarr-python and HF datasets.

    python benchmarks/bench_load.py [PATH] [--hook HOOK] [--rounds 3] [--passes 3] [--seconds 10]

Without PATH it makes its own dataset in a temporary folder. Contestants take turns, round by
round; files are in the page cache. GB are those of decoded rows. Wall time moves with whatever
else runs; CPU seconds per GB, over all threads, are the steadier figure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

import actds
from actds import layout, schema
from actds.commit import ShardRows, commit_part, commit_shard
from actds.format import tables
from actds.format.tables import TableName
from actds.ledger import Chain
from actds.schema import (
    REQUIRED_PROVENANCE,
    Genesis,
    Hook,
    ProvenanceField,
    RunBody,
    RunRecord,
)
from actds.sealing import seal
from actds.store.local import LocalStore

BATCH = 4096
PROMPT_LEN = 512
Contestant = Callable[[], Generator[int, None, None]]
"""Yields the bytes of each batch, over and over."""


def activations(n_rows: int, d_model: int, seed: int) -> np.ndarray:
    """Return bf16 bits that compress like a residual stream: channels of different scales."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 0.7, d_model)).astype(np.float32)
    rows = rng.standard_normal((n_rows, d_model), dtype=np.float32) * scale
    return rows.astype(ml_dtypes.bfloat16).view(np.uint16)


def make_dataset(path: Path, n_rows: int, d_model: int, rows_per_shard: int, raw: bool) -> Path:
    """Write a sealed dataset of prompts of 512 tokens, one request per step."""
    hook, run = "resid_post.10", "r-bench"
    store = LocalStore(path)
    genesis = Genesis(
        dataset="0" * 32,
        created_ns=0,
        writer="bench_load",
        hooks=[Hook(name=hook, kind="resid_post", layer=10, d_model=d_model, dtype="bfloat16")],
    )
    store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
    writer = Chain.begin(store, genesis.dataset, run, "writer", "bench_load")
    census = Chain.begin(store, genesis.dataset, run, "census", "bench_load")
    unknown = ProvenanceField(value=None, origin="unknown", reason="made by a benchmark")
    record = RunRecord(
        dataset=genesis.dataset,
        run=run,
        started_ns=0,
        fields=dict.fromkeys(REQUIRED_PROVENANCE, unknown),
    )
    written = store.put_new(layout.run_path(run), [schema.to_bytes(record)])
    writer.append("run", RunBody(run=run, sha256=written.sha256))
    with ThreadPoolExecutor(2) as pool:
        for first in range(0, n_rows, rows_per_shard):
            row = np.arange(first, min(first + rows_per_shard, n_rows))
            request = row // PROMPT_LEN
            zero = np.zeros(row.size, np.uint16)
            rows = ShardRows(
                hooks={hook: activations(row.size, d_model, first)},
                dtypes={hook: "bfloat16"},
                tokens={
                    "request": request,
                    "position": row % PROMPT_LEN,
                    "token_id": row % 50_000,
                    "step": request,
                    "attempt": zero,
                    "chunk": zero,
                    "flags": zero,
                },
                phase="prefill",
                first_step=int(request[0]),
                last_step=int(request[-1]),
            )
            name = f"{run}-{first:08d}"
            commit_shard(
                store,
                writer,
                rows,
                shard=name,
                run=run,
                order="permuted",
                seed=first,
                raw=raw,
                pool=pool,
            )
    for name, table in census_tables(n_rows // PROMPT_LEN).items():
        commit_part(store, census, name, run, 0, table)
    n_requests = n_rows // PROMPT_LEN
    writer.close("finished", {"rows": n_rows, "dropped_tokens": 0, "recomputed_tokens": 0})
    none = dict.fromkeys(tables.DISPOSITIONS, 0)
    totals = {"requests": n_requests, "scheduled_tokens": n_rows, **none, "captured": n_rows}
    census.close("finished", totals)
    seal(store)
    return path


def census_tables(n_requests: int) -> dict[Any, Any]:
    """Return requests, steps and spans: each request is prefilled in a step of its own."""
    index, zero = np.arange(n_requests), np.zeros(n_requests, int)
    length = np.full(n_requests, PROMPT_LEN)
    known: dict[TableName, dict[str, Any]] = {
        "requests": {
            "request": index,
            "external_id": index.astype(str),
            "prompt_len": length,
            "generated_len": zero + 1,
            "cached_tokens": zero,
            "n_preemptions": zero,
            "finish_reason": np.full(n_requests, "length"),
        },
        "steps": {
            **{name: zero for name in tables.SCHEMAS["steps"].names},
            "step": index,
            "batch_tokens": length,
            "n_requests": zero + 1,
            "prefill_tokens": length,
            "captured_tokens": length,
            "max_seq_len": length,
            "kernel_mode": np.full(n_requests, "eager"),
        },
        "spans": {
            "request": index,
            "start": zero,
            "stop": length,
            "disposition": np.full(n_requests, "captured"),
            "step": index,
        },
    }
    return {
        name: tables.build(
            name,
            {
                column: columns.get(column, [None] * n_requests)
                for column in tables.SCHEMAS[name].names
            },
        )
        for name, columns in known.items()
    }


def pread_and_copy(path: Path, hook: str) -> Generator[int, None, None]:
    """Read the array files in pieces of 1 MiB and copy them to fresh batches; nothing else."""
    files = [shard.local_path(f"acts.zarr/{hook}/c/0/0") for shard in actds.open(path).shards]
    piece = bytearray(1 << 20)
    for file in itertools.cycle(files):
        fd, size, at = os.open(file, os.O_RDONLY), os.path.getsize(file), 0
        while at < size:
            batch = np.empty(16 << 20, np.uint8)
            used = 0
            while used < batch.size and at < size:
                n = os.preadv(fd, [piece], at)
                batch[used : used + n] = np.frombuffer(piece, np.uint8)[:n]
                used, at = used + n, at + n
            yield used
        os.close(fd)


def our_loader(path: Path, hook: str, passes: int, **options: Any) -> Generator[int, None, None]:
    # As many epochs as are measured: an endless one would read two windows that nobody counts.
    with actds.Loader(path, hook, batch=BATCH, epochs=passes, drop_last=False, **options) as loader:
        for batch in loader:
            yield (batch[0] if isinstance(batch, tuple) else batch).nbytes


def zarr_chunks(path: Path, hook: str) -> Generator[int, None, None]:
    """Read 4 chunks at a time, in order, with zarr-python and its own threads."""
    import zarr

    import actds.zarr_plugin  # zarr 3.1 does not load the entry point by itself

    for shard in itertools.cycle(actds.open(path).shards):
        array = zarr.open_array(shard.local_path(f"acts.zarr/{hook}/zarr.json").parent, mode="r")
        step = 4 * array.chunks[0]
        for start in range(0, array.shape[0], step):
            yield array[start : start + step].nbytes


def hf_stream(path: Path, hook: str, chunks: bool) -> Generator[int, None, None]:
    stream = actds.load_dataset(path, streaming=True, hooks=hook, batched_chunks=chunks)
    while True:
        for example in stream:
            yield example[hook].nbytes


def hf_map(path: Path, hook: str, cache: Path, shuffled: bool) -> Generator[int, None, None]:
    rows = actds.load_dataset(path, hooks=hook, cache_dir=cache)
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(rows)) if shuffled else np.arange(len(rows))
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            wanted = order[start : start + BATCH]
            key = wanted if shuffled else slice(start, start + BATCH)
            yield rows.select_columns([hook])[key][hook].nbytes


def measure(contestant: Contestant, nbytes: int, seconds: float) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB, start included, over ``nbytes`` or ``seconds``."""
    done, wall, cpu = 0, time.perf_counter(), time.process_time()
    batches = contestant()
    for size in batches:
        done += size
        if done >= nbytes or time.perf_counter() - wall > seconds:
            break
    batches.close()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return done / 1e9 / wall, cpu / (done / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, help="a sealed dataset")
    parser.add_argument("--hook", help="the first one when not given")
    parser.add_argument("--rows", type=int, default=65536, help="rows of the made dataset")
    parser.add_argument("--d-model", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3, help="passes over the data at most")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of a turn at most")
    args = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="actds-bench-") as folder:
        root = Path(folder)
        if args.path:
            paths = {"": args.path}
        else:
            print(f"making 2 datasets of {args.rows} rows ...", file=sys.stderr)
            rows_per_shard = args.rows // 4
            paths = {
                f", {name}": make_dataset(
                    root / name, args.rows, args.d_model, rows_per_shard, name == "raw"
                )
                for name in ("zstd", "raw")
            }
        run(paths, root / "cache", args)


def contestants(
    paths: dict[str, Path], hook: str, cache: Path, passes: int
) -> dict[str, Contestant]:
    out: dict[str, Contestant] = {}
    last = list(paths)[-1]
    out[f"pread and copy{last}"] = lambda: pread_and_copy(paths[last], hook)
    for name, path in paths.items():
        out[f"actds.Loader, shuffled{name}"] = lambda path=path: our_loader(path, hook, passes)
    first, path = next(iter(paths.items()))
    out[f"actds.Loader, shuffled, provenance{first}"] = lambda: our_loader(
        path, hook, passes, provenance=True
    )
    for name, one in paths.items():
        out[f"zarr-python, 4 chunks, in order{name}"] = lambda path=one: zarr_chunks(path, hook)
    out[f"HF streaming, chunks in order{first}"] = lambda: hf_stream(path, hook, True)
    out[f"HF streaming, rows in order{first}"] = lambda: hf_stream(path, hook, False)
    out["HF map-style, in order"] = lambda: hf_map(path, hook, cache, False)
    out["HF map-style, shuffled"] = lambda: hf_map(path, hook, cache, True)
    return out


def run(paths: dict[str, Path], cache: Path, args: argparse.Namespace) -> None:
    dataset = actds.open(next(iter(paths.values())))
    hook = args.hook or next(iter(dataset.hooks))
    n_rows, d_model = dataset.array(hook).shape
    nbytes = n_rows * d_model * (4 if dataset.hooks[hook].dtype == "float32" else 2)
    stored = sum(
        entry.nbytes
        for shard in dataset.shards_of(hook)
        for entry in shard.manifest.files
        if entry.path == f"acts.zarr/{hook}/c/0/0"
    )
    entered = contestants(paths, hook, cache, args.passes)
    actds.load_dataset(dataset.path, hooks=hook, cache_dir=cache)  # written before the clock runs
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in entered}
    for turn in range(args.rounds + 1):
        # Another order each round: who runs first pays for memory that the machine took back.
        for name, contestant in random.Random(turn).sample(list(entered.items()), len(entered)):
            result = measure(contestant, nbytes * (args.passes if turn else 1), args.seconds)
            if turn:  # the first round fills caches
                figures[name].append(result)
        print(f"round {turn} of {args.rounds}", file=sys.stderr)
    print(
        f"{n_rows} rows of {d_model} {dataset.hooks[hook].dtype}, {nbytes / 1e6:.0f} MB, ratio "
        f"{nbytes / stored:.3f}, {os.cpu_count()} cores, batch {BATCH}; median of "
        f"{args.rounds} rounds, least and most in brackets\n"
    )
    print("| what | GB/s | CPU seconds per GB |\n| --- | ---: | ---: |")
    for name, results in figures.items():
        cells = []
        for values, form in zip(zip(*results, strict=True), (".2f", ".2f"), strict=True):
            middle, least, most = statistics.median(values), min(values), max(values)
            cells.append(f"{middle:{form}} [{least:{form}}, {most:{form}}]")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
