"""The writer's throughput: from the ring to committed shards, against tensorstore and plain files.

    python benchmarks/bench_writer.py [--dir FOLDER ...] [--threads 1,2] [--json]

Rows are those of ``bench_codec.py``: synthetic, or of a dataset. The writer's loop copies steps out
of a ring into shard buffers, and its committer makes shards of them: permuted, compressed, hashed,
written, synced and recorded in the ledger. tensorstore writes the same rows with the same codecs,
chunks and shards, neither permuted nor hashed, two shards at a time; plain files are written and
synced one after the other. They take turns. GB are 10^9 bytes of decoded rows, CPU is that of the
process. ``--stages`` measures the stages one by one, on one thread, and what they make of 16 cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench_codec import load, table, timed
from bench_io import sync_tree, write_durably

from actds.dataset.commit import ShardRows
from actds.dataset.ledger import Chain
from actds.dataset.write_threads import WriteThreads
from actds.format import arrays, encoding, schema
from actds.format.codec import crc32c, encode_into, frame_capacity
from actds.format.schema import Genesis, Hook
from actds.format.shard import row_order
from actds.store import NewFile, Put, layout
from actds.store.local import LocalStore
from actds_writers.ipc.messages import HookSpec
from actds_writers.shards import TOKEN_COLUMNS, ShardBuffer, Slice
from actds_writers.shards.writer import CommitPlan, Committer
from actds_writers.sizing import N_BUFFERS

STEP_ROWS = 2048
CORES = 16


@dataclass(frozen=True)
class Work:
    """What is written: ``n_shards`` times the same rows, by each hook."""

    bits: np.ndarray
    n_hooks: int
    n_shards: int

    @property
    def gigabytes(self) -> float:
        return self.bits.nbytes * self.n_hooks * self.n_shards / 1e9

    @property
    def d_model(self) -> int:
        return int(self.bits.shape[1])


@dataclass(frozen=True)
class Result:
    """Median over the rounds, and the best one."""

    folder: str
    writer: str
    gb_per_s: float
    best_gb_per_s: float
    cpu_s_per_gb: float
    least_cpu_s_per_gb: float


Write = Callable[[Path, Work], None]


def columns(n_rows: int, first: int) -> dict[str, np.ndarray]:
    """Return plausible token columns: requests of 64 rows, any token."""
    row = np.arange(first, first + n_rows)
    found = {
        "request": row // 64,
        "position": row % 64,
        "token_id": row * 7919 % 50_000,
        "step": row // STEP_ROWS,
        "attempt": row * 0,
        "chunk": row % 64 // 32,
        "flags": row * 0,
    }
    # Those of draws and interventions are left out, as by a harvest without.
    return {n: found[n].astype(kind) for n, kind in TOKEN_COLUMNS.items() if n in found}


def steps(work: Work, shard: int) -> Iterator[Slice]:
    """Yield the steps of a shard as they lie in a ring."""
    for first in range(0, len(work.bits), STEP_ROWS):
        part = work.bits[first : first + STEP_ROWS]
        where = shard * len(work.bits) + first
        ring = np.broadcast_to(part, (work.n_hooks, *part.shape))
        yield Slice(where // STEP_ROWS, (ring,), None, columns(len(part), where))


def ours(n_threads: int, raw: bool = False) -> Write:
    def write(folder: Path, work: Work) -> None:
        specs = tuple(
            HookSpec(f"resid_post.{n}", "resid_post", n, work.d_model, "bfloat16")
            for n in range(work.n_hooks)
        )
        store = LocalStore(folder / "acts")
        hooks = [
            Hook(name=s.name, kind=s.kind, layer=s.layer, d_model=s.d_model, dtype=s.dtype)
            for s in specs
        ]
        genesis = Genesis(dataset="1" * 32, created_ns=1, writer="bench", hooks=hooks)
        store.put_new(layout.GENESIS, [schema.to_bytes(genesis)])
        chain = Chain.begin(store, genesis.dataset, "r-bench", "writer", "bench")
        plan = CommitPlan("r-bench", "permuted", 1, n_threads)
        # Two of the writer's buffers are being filled, one per phase; here there is one phase.
        buffers = [ShardBuffer(specs, len(work.bits)) for _ in range(N_BUFFERS - 1)]
        committer = Committer(store, chain, plan, buffers)
        if raw:
            committer.fallback.take = lambda: True  # type: ignore[method-assign]
        for shard in range(work.n_shards):
            buffer = committer.spare()
            for piece in steps(work, shard):
                buffer.append(piece)
            committer.commit("decode", buffer)
        committer.finish()
        if committer.error is not None:
            raise committer.error

    return write


def with_tensorstore(n_threads: int) -> Write:
    import ml_dtypes
    import tensorstore

    context = tensorstore.Context(
        {
            "data_copy_concurrency": {"limit": n_threads},
            "file_io_concurrency": {"limit": n_threads},
            "cache_pool": {"total_bytes_limit": 0},
        }
    )

    def write(folder: Path, work: Work) -> None:
        metadata = json.loads(arrays.array_metadata(len(work.bits), work.d_model, "bfloat16"))
        rows = work.bits.view(ml_dtypes.bfloat16)
        flying: list[list[Any]] = []
        for shard in range(work.n_shards):
            if len(flying) == 2:
                for future in flying.pop(0):
                    future.result()
            begun: list[Any] = []
            for hook in range(work.n_hooks):
                at = f"file://{folder}/{shard}/{hook}/"
                spec = {"driver": "zarr3", "kvstore": at, "metadata": metadata}
                array = tensorstore.open(spec, create=True, context=context).result()
                begun.append(array.write(rows))
            flying.append(begun)
        for begun in flying:
            for future in begun:
                future.result()

    return write


def plain(folder: Path, work: Work) -> None:
    for shard in range(work.n_shards):
        for hook in range(work.n_hooks):
            path = folder / str(shard) / str(hook)
            write_durably(path / "data", (work.bits.reshape(-1).view(np.uint8).data,))
        sync_tree(folder / str(shard))


def measure(folder: Path, work: Work, writers: dict[str, Write], rounds: int) -> list[Result]:
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
    for _ in range(rounds):
        for name, write in writers.items():
            with tempfile.TemporaryDirectory(dir=folder) as base:
                spent[name].append(timed(lambda w=write, b=base: w(Path(b), work)))  # type: ignore[misc]
    gigabytes = work.gigabytes
    return [
        Result(
            str(folder),
            name,
            gigabytes / statistics.median(wall for _, wall in times),
            gigabytes / min(wall for _, wall in times),
            statistics.median(cpu for cpu, _ in times) / gigabytes,
            min(cpu for cpu, _ in times) / gigabytes,
        )
        for name, times in spent.items()
    ]


# ---- the stages, one by one


class Nowhere(NewFile):
    """A file that keeps nothing."""

    def hash(self, parts: object) -> None:
        pass

    write = hash

    def commit(self) -> Put:
        return Put(0, "")

    def abandon(self) -> None:
        pass


def stages(work: Work, folder: Path, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds per GB of every stage, on one thread."""
    bits, gigabytes = work.bits, work.bits.nbytes / 1e9
    n_rows, per_chunk = len(bits), arrays.chunk_rows(work.d_model, 2)
    order, buffer = row_order(n_rows, 1), np.empty_like(bits)
    chunk = np.empty((per_chunk, work.d_model), np.uint16)
    capacity = frame_capacity(chunk.nbytes, 2)
    frames = [np.empty(capacity, np.uint8) for _ in range(0, n_rows, per_chunk)]
    sizes = [0] * len(frames)
    firsts = range(0, n_rows, per_chunk)

    def gather() -> None:
        for first in firsts:
            part = order[first : first + per_chunk]
            np.take(bits, part, axis=0, out=chunk[: len(part)], mode="clip")

    def encode() -> None:
        for n, first in enumerate(firsts):
            sizes[n] = encode_into(bits[first : first + per_chunk], frames[n])

    def views() -> list[np.ndarray]:
        return [frame[:size] for frame, size in zip(frames, sizes, strict=True)]

    def sha256() -> None:
        digest = hashlib.sha256()
        for view in views():
            digest.update(view.data)

    def write() -> None:
        store = LocalStore(folder / "stage")
        file = store.begin("a/b")
        file.write([view.data for view in views()])
        file.commit()
        shutil.rmtree(folder / "stage")

    tokens = columns(n_rows, 0)
    one = ShardRows({"h": bits}, {"h": "bfloat16"}, tokens, "decode", 0, 0)

    def token_table() -> None:
        from actds.dataset.commit import _tokens_table

        _tokens_table(one, order)

    def least(function: Callable[[], object]) -> float:
        return min(timed(function)[0] for _ in range(rounds)) / gigabytes

    found = {
        "copy": least(lambda: np.copyto(buffer, bits)),
        "gather": least(gather),
        "encode": least(encode),
        "crc32c": least(lambda: [crc32c(view) for view in views()]),
        "sha256": least(sha256),
        "write": least(write),
        "tokens": least(token_table),
        "python": python_s_per_chunk() * len(frames) / gigabytes,
    }
    return found


def python_s_per_chunk(n_chunks: int = 4000) -> float:
    """Return the seconds of a chunk in the write threads that hold the interpreter's lock.

    Measured on chunks of as many blocks, each so small that there is nothing else to do.
    """
    d_model, block = 256, 512
    rows = np.zeros((4 * n_chunks, d_model), np.uint16)
    with (
        patch("actds.format.codec.MAX_BLOCK_NBYTES", block),
        patch("actds.format.arrays.TARGET_CHUNK_NBYTES", 4 * d_model * 2),
        WriteThreads(0) as threads,
    ):
        encoder = encoding.ArrayEncoder(rows, "bfloat16")
        began = time.process_time()
        threads.add(encoder, Nowhere())
        return (time.process_time() - began) / encoder.n_chunks


def model(found: dict[str, float], cores: int, n_files: int) -> dict[str, float]:
    """Return the GB/s to which each limit holds the writer on many cores, and the least of them.

    Args:
        n_files: arrays on their way at a time; each is hashed by one thread, and written by one.
    """
    total = sum(value for name, value in found.items() if name != "python")
    limits = {
        "cores": cores / total,
        "hashing": n_files / found["sha256"],
        "writing": n_files / found["write"],
        "copying": 1 / found["copy"],
        "interpreter": 1 / found["python"],
    }
    return {**limits, "rate": min(limits.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", nargs="?")
    parser.add_argument("--acts", nargs="+", default=[], metavar="FILE.npy")
    parser.add_argument("--mib", type=int, default=128, help="bytes of each hook and shard")
    parser.add_argument("--hooks", type=int, default=1)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    shm = ["/dev/shm"] if os.access("/dev/shm", os.W_OK) else []
    parser.add_argument("--dir", nargs="+", default=[*shm, tempfile.gettempdir()])
    parser.add_argument("--only", nargs="+", help="begins of names")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    name, bits = next(iter(load(args).items()))
    work = Work(bits, args.hooks, args.shards)
    writers: dict[str, Write] = {}
    threads = [int(n) for n in args.threads.split(",")]
    for n in threads:
        writers[f"actds, {n} threads"] = ours(n)
    writers[f"actds raw, {threads[-1]} threads"] = ours(threads[-1], raw=True)
    for n in threads:
        writers[f"tensorstore, {n} threads"] = with_tensorstore(n)
    writers["plain files"] = plain
    if args.only:
        writers = {n: w for n, w in writers.items() if n.startswith(tuple(args.only))}
    results: list[dict[str, object]] = []
    parts: list[dict[str, object]] = []
    for folder in args.dir:
        results += map(asdict, measure(Path(folder), work, writers, args.rounds))
        if args.stages:
            with tempfile.TemporaryDirectory(dir=folder) as base:
                found = stages(work, Path(base), args.rounds)
            limits = model(found, CORES, max(2, args.hooks))
            parts.append({"folder": folder, **found, "all": sum(found.values())})
            parts[-1] |= {f"{CORES} cores: {limit}": rate for limit, rate in limits.items()}
    if args.json:
        print(json.dumps({"schema": "actds.bench_writer/1", "results": results, "stages": parts}))
        return
    print(f"{name}: {args.shards} shards of {args.hooks} x {bits.shape[0]:,} x {bits.shape[1]:,}")
    print(table(results))
    for part in parts:
        print(table([{"stage": stage, "value": value} for stage, value in part.items()]))


if __name__ == "__main__":
    main()
