"""Loading throughput: our loader against its limits, and against what else holds rows of floats.

    python benchmarks/bench_load.py [--d-model 576 2304 4096] [--rounds 3] [--only NAME]

Peers whose package is missing are skipped with their name; ``requirements-load.txt`` has them all.

Rows are bfloat16 bits, 262,144 of them: four windows of the loader (65,536 rows). Contestants take
turns, in another order each round; files are in the page cache; torch has one thread.

*What is measured is the steady state.* A turn opens its contestant, and the clocks start after the
first batches; for our loader after two windows. These are what it holds, so by then all of its
memory was touched once (which costs more than reading does, and is paid once in a training), and it
has read ahead as far as it does when the clocks stop, four windows later. The limits read the same
bytes; the last four put the rows at random places, without which there is no shuffling, in one
thread or in two, as many as our loader reads with. Peers have a copy of the first 65,536 rows and
pass over it for ``--seconds``.

GB are those of bfloat16 rows, also where a peer stores float32: figures compare rows per second.
CPU seconds are those of all threads and child processes. Both are medians, least and most in
brackets.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load_data
import numpy as np
import torch
from load_data import HOOK

import actds
from actds.explore.lazy import open_array

BATCH = 4096
WINDOW_ROWS = 65_536
N_WINDOWS = 4
SHARD_ROWS = 32_768
PEER_ROWS = 65_536
RECORD_ROWS = (
    128  # rows of a sample of MDS and WebDataset: a record a row is 10 to 100 times slower
)
CONTEXT = 512

Batches = Generator[int, None, None]
"""Yields the rows of each batch, over and over."""


@dataclass(frozen=True)
class Contestant:
    """One way to have rows.

    Args:
        name: what the table says.
        batches: makes the batches of a turn.
        skip_rows: rows before the clocks start.
        n_rows: rows to measure; None measures for so many seconds.
    """

    name: str
    batches: Callable[[], Batches]
    skip_rows: int = BATCH
    n_rows: int | None = None


@dataclass(frozen=True)
class Files:
    """The files of one width.

    Args:
        raw: our dataset, chunks copied.
        default: the same rows in the default codec.
        small: the first rows of ``raw`` as a dataset, for peers.
        folder: where peers put their copies.
        d_model: channels.
    """

    raw: Path
    default: Path
    small: Path
    folder: Path
    d_model: int

    def rows(self) -> np.ndarray:
        """Return the rows of ``small``, bits ``(PEER_ROWS, d_model)``."""
        dataset = actds.open(self.small)
        arrays = [open_array(shard, dataset.hooks[HOOK]) for shard in dataset.shards]
        return np.concatenate([array.read_all() for array in arrays])


def make_files(folder: Path, d_model: int) -> Files:
    base = load_data.activations(SHARD_ROWS, d_model, 0)
    n_shards = N_WINDOWS * WINDOW_ROWS // SHARD_ROWS
    return Files(
        load_data.make_dataset(folder / "raw", base, n_shards, True),
        load_data.make_dataset(folder / "default", base, n_shards, False),
        load_data.make_dataset(folder / "small", base, PEER_ROWS // SHARD_ROWS, True),
        folder,
        d_model,
    )


# Ours and its limits.


def ours(path: Path, **options: Any) -> Batches:
    with actds.Loader(path, HOOK, batch=BATCH, epochs=2, **options) as loader:
        for batch in loader:
            yield len(batch)


def preads(files: Files) -> Batches:
    """Read in pieces of 1 MiB and copy them to batches; nothing else."""
    names = [shard.local_path(f"acts.zarr/{HOOK}/c/0/0") for shard in actds.open(files.raw).shards]
    piece = memoryview(bytearray(1 << 20))
    source = np.frombuffer(piece, np.uint8)
    row_nbytes = 2 * files.d_model
    # As many as the loader turns over.
    batches = itertools.cycle([np.zeros(BATCH * row_nbytes, np.uint8) for _ in range(6)])
    batch, used = next(batches), 0
    for name in itertools.cycle(names):
        fd, at = os.open(name, os.O_RDONLY), 0
        while n := os.preadv(fd, [piece[: batch.size - used]], at):
            batch[used : used + n] = source[:n]
            used, at = used + n, at + n
            if used == batch.size:
                yield BATCH
                batch, used = next(batches), 0
        os.close(fd)


def decode(path: Path) -> Batches:
    """Read, check and decode chunk by chunk into one buffer."""
    dataset = actds.open(path)
    for shard in itertools.cycle(dataset.shards):
        with open_array(shard, dataset.hooks[HOOK]) as array:
            chunk = np.empty((array.rows_per_chunk, array.d_model), np.uint16)
            for index in range(array.n_chunks):
                yield len(array.read_chunks(index, index + 1, chunk))


def placed(path: Path, n_threads: int = 1) -> Batches:
    """Read, check and decode chunk by chunk, and put each row at a random place of a window.

    Each thread takes a shard, and so half a window. A thread costs more beside another one: they
    share the memory's bandwidth, and on many machines a core.
    """
    dataset = actds.open(path)
    rows = np.zeros((WINDOW_ROWS, dataset.hooks[HOOK].d_model), np.uint16)
    places = np.random.default_rng(0).permutation(WINDOW_ROWS)

    def place(number: int) -> int:
        first = number * SHARD_ROWS % WINDOW_ROWS
        shard = dataset.shards[number % len(dataset.shards)]
        with open_array(shard, dataset.hooks[HOOK]) as array:
            for start, stop, values in array.by_chunk(np.arange(array.n_rows)):
                rows[places[first + start : first + stop]] = values
        return array.n_rows

    with ThreadPoolExecutor(n_threads) as pool:
        for first in itertools.count(0, n_threads):
            yield sum(pool.map(place, range(first, first + n_threads)))


# Readers of our files.


def array_folders(path: Path) -> list[Path]:
    shards = actds.open(path).shards
    return [shard.local_path(f"acts.zarr/{HOOK}/zarr.json").parent for shard in shards]


def tensorstore_arrays(path: Path) -> list[Any]:
    import tensorstore

    return [
        tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}},
            context=tensorstore.Context({"data_copy_concurrency": {"limit": 2}}),
        ).result()
        for folder in array_folders(path)
    ]


def tensorstore_chunks(path: Path) -> Batches:
    """Read chunks in random order, four under way; rows of a chunk stay together."""
    arrays = tensorstore_arrays(path)
    per = arrays[0].chunk_layout.read_chunk.shape[0]
    places = [(array, start) for array in arrays for start in range(0, array.shape[0], per)]
    rng, waiting = random.Random(0), []
    while True:
        for array, start in rng.sample(places, len(places)):
            waiting.append(array[start : start + per].read())
            if len(waiting) == 4:
                yield len(waiting.pop(0).result())


def tensorstore_rows(path: Path) -> Batches:
    """Gather random rows of one shard."""
    array, rng = tensorstore_arrays(path)[0], np.random.default_rng(0)
    while True:
        yield len(array[rng.permutation(array.shape[0])[:BATCH]].read().result())


def zarr_chunks(path: Path) -> Batches:
    """Read 4 chunks at a time, in order, with zarr-python and its own threads."""
    import zarr

    import actds.zarr_plugin  # noqa: F401  zarr 3.1 does not load the entry point by itself

    for folder in itertools.cycle(array_folders(path)):
        array = zarr.open_array(folder, mode="r")
        step = 4 * array.chunks[0]
        for start in range(0, array.shape[0], step):
            yield len(array[start : start + step])


# Peers, each with its own files.


def memmap(files: Files) -> list[Contestant]:
    path = files.folder / "rows.npy"
    np.save(path, files.rows())

    def gather() -> Batches:
        rows, rng = np.load(path, mmap_mode="r"), np.random.default_rng(0)
        while True:
            order = rng.permutation(len(rows))
            for start in range(0, len(rows), BATCH):
                yield len(rows[order[start : start + BATCH]])

    return [Contestant("numpy memmap, gather of shuffled rows", gather, PEER_ROWS)]


def hf_arrow(files: Files) -> list[Contestant]:
    import datasets

    datasets.disable_progress_bars()
    cache = files.folder / "hf"
    actds.load_dataset(files.small, hooks=HOOK, cache_dir=cache)  # written before the clocks run

    def mapped() -> Batches:
        rows = actds.load_dataset(files.small, hooks=HOOK, cache_dir=cache).select_columns([HOOK])
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(len(rows))
            for start in range(0, len(rows), BATCH):
                yield len(rows[order[start : start + BATCH]][HOOK])

    def plain() -> Batches:
        files_of_cache = sorted(str(file) for file in cache.rglob("*.arrow"))
        parts = [datasets.Dataset.from_file(file) for file in files_of_cache]
        rows = datasets.concatenate_datasets(parts).select_columns([HOOK]).with_format("numpy")
        rng = np.random.default_rng(0)
        while True:
            order = rng.permutation(len(rows))
            for start in range(0, len(rows), BATCH):
                yield len(rows[order[start : start + BATCH]][HOOK])

    def streamed(chunks: bool) -> Batches:
        rows = actds.load_dataset(files.small, streaming=True, hooks=HOOK, batched_chunks=chunks)
        while True:
            for example in rows:
                yield len(example[HOOK]) if chunks else 1

    return [
        Contestant("HF Arrow map-style, shuffled rows", mapped),
        Contestant('HF Arrow map-style, shuffled rows, with_format("numpy")', plain),
        Contestant("HF streaming, rows in order", lambda: streamed(False)),
        Contestant("HF streaming, chunks in order", lambda: streamed(True)),
    ]


def sae_lens(files: Files) -> list[Contestant]:
    import datasets
    from sae_lens.training.activations_store import ActivationsStore

    path, shape = files.folder / "sae_lens", (CONTEXT, files.d_model)
    features = datasets.Features({HOOK: datasets.Array2D(shape, "float32")})
    wide = files.rows().astype(np.uint32).__lshift__(16).view(np.float32)
    requests = wide.reshape(-1, *shape)
    table = (
        datasets.Dataset.from_dict({HOOK: list(part)}, features=features)
        for part in np.array_split(requests, 8)
    )
    datasets.concatenate_datasets(list(table)).save_to_disk(path)

    def cached() -> Batches:
        store = ActivationsStore(
            model=None,
            dataset=None,
            streaming=False,
            hook_name=HOOK,
            hook_head_index=None,
            context_size=CONTEXT,
            d_in=files.d_model,
            n_batches_in_buffer=PEER_ROWS // 2 // CONTEXT,
            total_training_tokens=PEER_ROWS,
            store_batch_size_prompts=16,
            train_batch_size_tokens=BATCH,
            prepend_bos=False,
            normalize_activations="none",
            device=torch.device("cpu"),
            dtype="float32",
            cached_activations_path=str(path),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of each epoch
            for batch in store:
                yield len(batch)

    n_rows = PEER_ROWS // 2  # its buffer
    return [Contestant("SAELens cached activations, float32", cached, n_rows, n_rows)]


def lance(files: Files) -> list[Contestant]:
    import lance
    import pyarrow as pa

    path, d_model = files.folder / "rows.lance", files.d_model
    values = pa.FixedSizeListArray.from_arrays(pa.array(files.rows().reshape(-1)), d_model)
    lance.write_dataset(pa.table({"acts": values}), str(path))

    def n_rows(table: Any) -> int:
        column = table["acts"]
        chunks = getattr(column, "chunks", [column])
        return sum(len(chunk.flatten().to_numpy().reshape(-1, d_model)) for chunk in chunks)

    def taken() -> Batches:
        rows, rng = lance.dataset(str(path)), np.random.default_rng(0)
        while True:
            order = rng.permutation(PEER_ROWS)
            for start in range(0, PEER_ROWS, BATCH):
                yield n_rows(rows.take(order[start : start + BATCH]))

    def scanned() -> Batches:
        while True:
            yield from map(n_rows, lance.dataset(str(path)).to_batches(batch_size=BATCH))

    return [
        Contestant("Lance, take of shuffled rows", taken),
        Contestant("Lance, batches in order", scanned),
    ]


def mixed(samples: Iterator[np.ndarray]) -> Batches:
    """Shuffle the rows of samples in a buffer, as large as one of our windows."""
    buffer: torch.Tensor | None = None
    for sample in samples:
        if buffer is None:
            buffer, used = torch.zeros((WINDOW_ROWS, sample.shape[1]), dtype=torch.int16), 0
        rows = torch.from_numpy(sample.view(np.int16))
        buffer[used : used + len(rows)] = rows
        used += len(rows)
        if used == WINDOW_ROWS:
            for order in torch.randperm(WINDOW_ROWS).split(BATCH):
                yield len(buffer[order])
            used = 0


def joined(samples: Iterator[np.ndarray]) -> Batches:
    """Join samples to batches; the rows of a sample stay together."""
    while True:
        yield len(np.concatenate(list(itertools.islice(samples, BATCH // RECORD_ROWS))))


def with_and_without_buffer(
    name: str, samples: Callable[[], Iterator[np.ndarray]]
) -> list[Contestant]:
    return [
        Contestant(f"{name}, shuffled samples", lambda: joined(samples())),
        Contestant(f"{name}, shuffled rows", lambda: mixed(samples()), WINDOW_ROWS, WINDOW_ROWS),
    ]


def mosaicml(files: Files) -> list[Contestant]:
    import streaming

    path = files.folder / "mds"
    with streaming.MDSWriter(out=str(path), columns={"acts": "bytes"}, compression=None) as out:
        for record in np.split(files.rows(), PEER_ROWS // RECORD_ROWS):
            out.write({"acts": record.tobytes()})
    streaming.base.util.clean_stale_shared_memory()

    def samples() -> Iterator[np.ndarray]:
        # Long epochs: each begins with a second of waiting, which a real one would not notice.
        data = streaming.StreamingDataset(
            local=str(path), shuffle=True, batch_size=1, epoch_size=100 * PEER_ROWS // RECORD_ROWS
        )
        while True:
            for sample in data:
                # torch wants memory that may be written.
                rows = np.frombuffer(bytearray(sample["acts"]), np.uint16)
                yield rows.reshape(-1, files.d_model)

    return with_and_without_buffer(f"MosaicML MDS, {RECORD_ROWS} rows a sample", samples)


def web_dataset(files: Files) -> list[Contestant]:
    import webdataset

    path = files.folder / "rows-%06d.tar"
    with webdataset.ShardWriter(str(path), maxcount=128, verbose=0) as out:
        for i, record in enumerate(np.split(files.rows(), PEER_ROWS // RECORD_ROWS)):
            out.write({"__key__": f"{i:08d}", "acts": record.tobytes()})

    def samples() -> Iterator[np.ndarray]:
        names = sorted(str(file) for file in files.folder.glob("rows-*.tar"))
        data = webdataset.WebDataset(names, shardshuffle=len(names), empty_check=False)
        while True:
            for sample in data.shuffle(128):
                rows = np.frombuffer(bytearray(sample["acts"]), np.uint16)
                yield rows.reshape(-1, files.d_model)

    return with_and_without_buffer(f"WebDataset, {RECORD_ROWS} rows a sample", samples)


PEERS: dict[str, tuple[str, Callable[[Files], list[Contestant]]]] = {
    "numpy memmap": ("numpy", memmap),
    "HF datasets": ("datasets", hf_arrow),
    "SAELens": ("sae_lens", sae_lens),
    "Lance": ("lance", lance),
    "MosaicML streaming": ("streaming", mosaicml),
    "WebDataset": ("webdataset", web_dataset),
}
"""The package that each peer needs, and what makes its files."""


def contestants(files: Files, only: str) -> list[Contestant]:
    """Return who takes part; peers write their files."""
    n_rows = N_WINDOWS * WINDOW_ROWS
    found = [
        Contestant("limit: preads and one copy", lambda: preads(files), 6 * BATCH, n_rows),
        Contestant(
            "limit: bare decode, default codec", lambda: decode(files.default), BATCH, n_rows
        ),
        *(
            Contestant(
                f"limit: {codec}, rows to random places{', 2 threads' if n == 2 else ''}",
                lambda path=path, n=n: placed(path, n),
                BATCH,
                n_rows,
            )
            for codec, path in (("raw", files.raw), ("default codec", files.default))
            for n in (1, 2)
        ),
        Contestant("actds.Loader, raw", lambda: ours(files.raw), 2 * WINDOW_ROWS, n_rows),
        Contestant(
            "actds.Loader, default codec", lambda: ours(files.default), 2 * WINDOW_ROWS, n_rows
        ),
    ]
    for codec, path in (("raw", files.raw), ("default codec", files.default)):
        found += [
            Contestant(
                f"tensorstore, shuffled chunks, {codec}", lambda path=path: tensorstore_chunks(path)
            ),
            Contestant(
                f"zarr-python, 4 chunks, in order, {codec}", lambda path=path: zarr_chunks(path)
            ),
        ]
    found.append(
        Contestant(
            "tensorstore, gather of rows of one shard, raw", lambda: tensorstore_rows(files.raw)
        )
    )
    for name, (package, make) in PEERS.items():
        if only and only.lower() not in name.lower():
            continue
        if importlib.util.find_spec(package) is None:
            print(f"skipped: {name}, no package {package}", file=sys.stderr)
        else:
            found += make(files)
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, its threads and its children that ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(contestant: Contestant, d_model: int, seconds: float) -> tuple[float, float]:
    """Return GB/s and CPU seconds per GB of a turn."""
    batches = contestant.batches()
    skipped = done = 0
    while skipped < contestant.skip_rows:
        skipped += next(batches)
    wall, cpu = time.perf_counter(), cpu_seconds()
    for n_rows in batches:
        done += n_rows
        if contestant.n_rows is None:
            if time.perf_counter() - wall > seconds:
                break
        elif done >= contestant.n_rows:
            break
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    batches.close()
    return done * d_model * 2 / 1e9 / wall, cpu / (done * d_model * 2 / 1e9)


def compete(
    entered: list[Contestant], d_model: int, rounds: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Return GB/s and CPU seconds per GB of each round; contestants take turns."""
    figures: dict[str, list[tuple[float, float]]] = {one.name: [] for one in entered}
    for turn in range(rounds):
        for one in random.Random(turn).sample(entered, len(entered)):
            figures[one.name].append(measure(one, d_model, seconds))
        print(f"{d_model}: round {turn + 1} of {rounds}", file=sys.stderr)
    return figures


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def print_table(figures: dict[str, list[tuple[float, float]]]) -> None:
    """Print a line per contestant; ratios of CPU are the medians of those of the rounds."""
    limit = {
        name: [cpu for _, cpu in figures[name]] for name in figures if name.startswith("limit")
    }
    names = list(limit)
    heads = ["what", "GB/s", "CPU s per GB", *(f"CPU to {name[7:]}" for name in names)]
    print(f"| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
    for name, results in figures.items():
        cpu = [one for _, one in results]
        cells = [name, spread([rate for rate, _ in results]), spread(cpu)]
        for over in names:
            ratios = [a / b for a, b in zip(cpu, limit[over], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d-model", type=int, nargs="+", default=[576, 2304, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="seconds of a turn of a peer")
    parser.add_argument("--only", default="", help="these beside the limits, by a part of the name")
    args = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    for d_model in args.d_model:
        with tempfile.TemporaryDirectory(prefix="actds-bench-") as folder:
            print(f"{d_model}: making files ...", file=sys.stderr)
            files = make_files(Path(folder), d_model)
            entered = [
                one
                for one in contestants(files, args.only)
                if args.only.lower() in one.name.lower() or one.name.startswith("limit")
            ]
            figures = compete(entered, d_model, args.rounds, args.seconds)
        print(
            f"\n{d_model} channels, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, batch "
            f"{BATCH}, {args.rounds} rounds\n",
            flush=True,
        )
        print_table(figures)


if __name__ == "__main__":
    main()
