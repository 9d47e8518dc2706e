"""Durable write and whole read of one hook: actds, tensorstore and plain files.

    python benchmarks/bench_io.py [DATASET] [--acts FILE.npy ...] [--dir FOLDER] [--json]

Data as for ``bench_codec.py``. A write ends with fsync of files and folders; tensorstore's file
driver syncs by default. GB are 10^9 bytes of decoded rows. Reads come from the page cache: what
is compared is the work of the processor. ``--dir`` names a folder on the disk to be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bench_codec import load, table, timed

from actds.format.arrays import ArrayReader, array_metadata
from actds.format.encoding import encode_array
from actds.store.local import LocalFile


@dataclass(frozen=True)
class Store:
    """One way to write an array durably and to read it whole."""

    name: str
    write: Callable[[Path, np.ndarray], object]
    read: Callable[[Path], np.ndarray]


@dataclass(frozen=True)
class Result:
    """Medians over the rounds."""

    data: str
    store: str
    ratio: float
    write_gb_per_s: float
    write_cpu_s_per_gb: float
    read_gb_per_s: float
    read_cpu_s_per_gb: float


def sync_tree(folder: Path) -> None:
    """Make the names below a folder durable."""
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def write_durably(path: Path, parts: tuple[bytes | memoryview, ...]) -> None:
    """Write parts to a new file and sync it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def actds_store(name: str, pool: Executor | None, raw: bool = False) -> Store:
    def write(folder: Path, bits: np.ndarray) -> None:
        encoded = encode_array(bits, "bfloat16", raw=raw, pool=pool)
        write_durably(folder / "zarr.json", (encoded.metadata,))
        write_durably(folder / "c/0/0", encoded.parts)
        sync_tree(folder)

    def read(folder: Path) -> np.ndarray:
        metadata, file = (folder / "zarr.json").read_bytes(), LocalFile(folder / "c/0/0", "c/0/0")
        with ArrayReader(metadata, file, "c/0/0") as reader:
            return reader.read_all(pool)

    return Store(name, write, read)


def tensorstore_store(name: str, n_threads: int) -> Store:
    """Return tensorstore with the very metadata of actds: same codecs, chunks and shard."""
    import ml_dtypes
    import tensorstore

    context = tensorstore.Context(
        {
            "data_copy_concurrency": {"limit": n_threads},
            "file_io_concurrency": {"limit": n_threads},
            "cache_pool": {"total_bytes_limit": 0},
        }
    )

    def spec(folder: Path) -> dict[str, str]:
        return {"driver": "zarr3", "kvstore": f"file://{folder}/"}

    def write(folder: Path, bits: np.ndarray) -> None:
        n_rows, d_model = bits.shape
        metadata = json.loads(array_metadata(n_rows, d_model, "bfloat16"))
        array = tensorstore.open(
            {**spec(folder), "metadata": metadata}, create=True, context=context
        ).result()
        array.write(bits.view(ml_dtypes.bfloat16)).result()

    def read(folder: Path) -> np.ndarray:
        array = tensorstore.open(spec(folder), read=True, context=context).result()
        return array.read().result().view(np.uint16)

    return Store(name, write, read)


def plain_store(d_model: int) -> Store:
    def write(folder: Path, bits: np.ndarray) -> None:
        write_durably(folder / "data", (bits.reshape(-1).view(np.uint8).data,))
        sync_tree(folder)

    def read(folder: Path) -> np.ndarray:
        return np.fromfile(folder / "data", np.uint16).reshape(-1, d_model)

    return Store("plain file, uncompressed", write, read)


def stores(d_model: int, n_threads: int, pool: Executor) -> list[Store]:
    """Return the contenders; those that share a configuration stand side by side."""
    return [
        actds_store("actds, 1 thread", None),
        actds_store(f"actds, {n_threads} threads", pool),
        actds_store(f"actds raw, {n_threads} threads", pool, raw=True),
        tensorstore_store("tensorstore, 1 thread", 1),
        tensorstore_store(f"tensorstore, {n_threads} threads", n_threads),
        plain_store(d_model),
    ]


def measure(
    name: str, bits: np.ndarray, contenders: list[Store], rounds: int, base: Path
) -> list[Result]:
    """Return one result per store; the stores take turns, each in a fresh folder."""
    writes: dict[str, list[tuple[float, float]]] = {}
    reads: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}
    for _ in range(rounds):
        for store in contenders:
            folder = base / "array"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            spent = timed(lambda s=store, f=folder: s.write(f, bits))
            writes.setdefault(store.name, []).append(spent)
            got: list[np.ndarray] = []
            spent = timed(lambda s=store, f=folder, g=got: g.append(s.read(f)))
            reads.setdefault(store.name, []).append(spent)
            if not np.array_equal(got[0], bits):
                raise SystemExit(f"{store.name} does not return the bits of {name}")
            sizes[store.name] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    gigabytes = bits.nbytes / 1e9
    results = []
    for store in contenders:
        figures = []
        for times in (writes[store.name], reads[store.name]):
            cpu, wall = (statistics.median(pair[which] for pair in times) for which in (0, 1))
            figures += [gigabytes / wall, cpu / gigabytes]
        results.append(Result(name, store.name, bits.nbytes / sizes[store.name], *figures))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "demo/acts" if Path("demo/acts/actds.json").exists() else None
    parser.add_argument("dataset", nargs="?", default=default)
    parser.add_argument("--acts", nargs="+", default=[], metavar="FILE.npy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64, help="bytes of each hook that are measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", help="where to write; a temporary folder when absent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(dir=args.dir) as base,
        ThreadPoolExecutor(args.threads) as pool,
    ):
        for name, bits in load(args).items():
            contenders = stores(bits.shape[1], args.threads, pool)
            results += measure(name, bits, contenders, args.rounds, Path(base))
    rows = [asdict(result) for result in results]
    if args.json:
        print(json.dumps({"schema": "actds.bench_io/1", "results": rows}))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
