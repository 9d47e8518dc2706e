"""Rows on their way to the shards of a shuffled copy: random words, and blocks sorted by them.

A row goes to the new shard in whose range its word of a Philox stream is, so every division of
the rows is equally likely. A *block* of rows is read in the dataset's order and written, sorted by
new shard, to temporary files; then each new shard is a piece of every block. A block whose folder
has its name is whole and durable.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actds.dataset.catalog import Catalog
from actds.errors import ActdsError
from actds.format import arrays, canonical
from actds.format.codec import crc32c
from actds.format.schema import Hook, Phase
from actds.format.shard import Shard, check_sha256
from actds.store import file_sha256, layout
from actds.store.folders import sync

SHUFFLE_VERSION = 1
"""Raised when the same dataset and seed give another order; a resumed call needs the same."""

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_MAX_BINS_LOG2 = 20
_WORDS_AT_A_TIME = 1 << 22
_DRAWN_TOGETHER = 4  # words that Philox makes of one counter


def shard_cuts(words: Callable[[], Iterator[Keys]], n_rows: int, rows_per_shard: int) -> Keys:
    """Return the first word of each new shard but the first, ``(n_shards - 1,)``.

    A row goes to the shard in whose range its random word is. The ranges are chosen so that every
    shard but the last has ``rows_per_shard`` rows, in memory that does not grow with the rows: the
    words, drawn twice in parts, are counted in bins, and only those of the bins in which a shard
    ends are sorted.
    """
    ranks = np.arange(rows_per_shard, n_rows, rows_per_shard)
    bins_log2 = min(_MAX_BINS_LOG2, n_rows.bit_length())
    shift = np.uint64(64 - bins_log2)
    counts = np.zeros(1 << bins_log2, np.int64)
    for part in words():
        counts += np.bincount((part >> shift).astype(np.int64), minlength=len(counts))
    bins = np.searchsorted(np.cumsum(counts), ranks, "right")
    ends = np.zeros(len(counts), np.bool_)
    ends[bins] = True
    near = [part[ends[(part >> shift).astype(np.int64)]] for part in words()]
    below = np.cumsum(np.where(ends, 0, counts))[bins]
    cuts: Keys = np.sort(np.concatenate(near))[ranks - below]
    return cuts


@dataclass(frozen=True)
class RowGroup:
    """The rows that are shuffled together: of one run and phase, for one set of hooks.

    ``key`` are words of the Philox key, ``first`` is the number of the first new shard in the run.
    """

    name: str
    key: tuple[int, int]
    run: str
    phase: Phase
    hooks: list[Hook]
    shards: list[Shard]
    first: int
    rows_per_shard: int

    @cached_property
    def starts(self) -> Ints:
        """First row of each shard of the dataset, and the number of all rows."""
        return np.cumsum([0, *(shard.n_rows for shard in self.shards)])

    @property
    def n_rows(self) -> int:
        return int(self.starts[-1])

    @property
    def n_shards(self) -> int:
        return -(-self.n_rows // self.rows_per_shard)

    def words(self, start: int, stop: int) -> Keys:
        # Raw words of Philox: numpy promises that they never change, and no more than that.
        low = start // _DRAWN_TOGETHER
        counter = np.array([low, 0, 0, 0], np.uint64)
        generator = np.random.Philox(key=np.array(self.key, np.uint64), counter=counter)
        drawn = generator.random_raw(stop - low * _DRAWN_TOGETHER)
        return np.asarray(drawn, np.uint64)[start - low * _DRAWN_TOGETHER :]

    @cached_property
    def cuts(self) -> Keys:
        def words() -> Iterator[Keys]:
            for start in range(0, self.n_rows, _WORDS_AT_A_TIME):
                yield self.words(start, min(start + _WORDS_AT_A_TIME, self.n_rows))

        return shard_cuts(words, self.n_rows, self.rows_per_shard)

    def target(self, start: int, stop: int) -> Ints:
        """The new shard of each row, from 0."""
        return np.searchsorted(self.cuts, self.words(start, stop), "right")

    def segments(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """The parts of shards that rows of the group are."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        for number in range(first, len(self.shards)):
            low = int(self.starts[number])
            if low >= stop:
                return
            shard = self.shards[number]
            yield shard, max(start - low, 0), min(stop - low, shard.n_rows)

    def permutation_seed(self, shard: int) -> int:
        """Seed of the order within a new shard, below 2^63."""
        text = canonical.dump({"key": list(map(str, self.key)), "shard": shard})
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def row_groups(catalog: Catalog, seed: int, rows_per_shard: int) -> list[RowGroup]:
    """Their order, names and keys follow from digest and seed."""
    groups: list[RowGroup] = []
    for run in catalog.runs_with_data:
        shards, first = catalog.shards_of(run), 0
        for phase, hooks in dict.fromkeys((s.phase, tuple(s.hooks)) for s in shards):
            # Without the hooks: those in shards of their own keep rows side by side.
            facts = {"digest": catalog.digest, "phase": phase, "run": run, "seed": seed}
            raw = hashlib.sha256(canonical.dump(facts | {"shuffle": SHUFFLE_VERSION})).digest()
            group = RowGroup(
                name=f"{len(groups):06d}",
                key=(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")),
                run=run,
                phase=phase,
                hooks=[hook for hook in catalog.genesis.hooks if hook.name in hooks],
                shards=[s for s in shards if (s.phase, tuple(s.hooks)) == (phase, hooks)],
                first=first,
                rows_per_shard=rows_per_shard,
            )
            groups.append(group)
            first += group.n_shards
    return groups


@dataclass(frozen=True)
class Blocks:
    """The blocks of a group, in a folder of their own, on a disk that all workers share.

    A block of the widest hook is held in memory twice.
    """

    folder: Path
    group: RowGroup
    rows_per_block: int

    def bounds(self) -> list[tuple[int, int]]:
        """Rows of each block, ``[start, stop)``."""
        n_rows, step = self.group.n_rows, self.rows_per_block
        return [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]

    def write(self, start: int, stop: int, pool: Executor) -> None:
        folder = self.folder / f"{start // self.rows_per_block:06d}"
        if folder.exists():
            return
        segments = list(self.group.segments(start, stop))
        for shard, first, _ in segments:
            if not first:
                _check_digests(shard)
        target = self.group.target(start, stop)
        order = np.argsort(target, kind="stable")
        offsets = np.searchsorted(target[order], np.arange(self.group.n_shards + 1))
        tokens = pa.concat_tables([s.tokens().slice(a, b - a) for s, a, b in segments])
        making = folder.with_suffix(".tmp")
        with on_disk(folder):
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            np.save(making / "offsets.npy", offsets)
            with pa.ipc.new_file(str(making / "tokens.arrow"), tokens.schema) as writer:
                writer.write_table(tokens.take(order).combine_chunks())
        for hook in self.group.hooks:
            rows = _read(segments, hook, stop - start, pool)[order]
            data, row_nbytes = rows.reshape(-1).view(np.uint8), rows[0].nbytes
            bounds = pairwise((offsets * row_nbytes).tolist())
            sums = np.array([crc32c(data[a:b]) for a, b in bounds], np.uint32)
            with on_disk(folder):
                np.save(making / f"{hook.name}.crc32c.npy", sums)
                rows.tofile(making / f"{hook.name}.rows")
            del data, rows
        with on_disk(folder):
            for file in making.iterdir():
                sync(file)
            making.rename(folder)
            sync(folder.parent)

    def tokens(self, number: int) -> pa.Table:
        """Lines of the token table of a new shard, in the order of the blocks."""
        pieces = []
        with on_disk(self.folder):
            for folder, a, b in self._pieces(number):
                with pa.memory_map(str(folder / "tokens.arrow")) as source:
                    pieces.append(pa.ipc.open_file(source).read_all().slice(a, b - a))
        return pa.concat_tables(pieces)

    def gather(self, number: int, hook: Hook, place: Ints) -> npt.NDArray[Any]:
        """Bits ``(n_rows, d_model)``; ``place`` is the new row of each line of ``tokens``."""
        kind = arrays.DTYPES[hook.dtype]
        out = np.empty((len(place), hook.d_model), kind.bits)
        at = 0
        for folder, first, last in self._pieces(number):
            path, row_nbytes = folder / f"{hook.name}.rows", hook.d_model * kind.itemsize
            with on_disk(path):
                n = (last - first) * hook.d_model
                piece = np.fromfile(path, kind.bits, count=n, offset=first * row_nbytes)
                sums = np.load(folder / f"{hook.name}.crc32c.npy", mmap_mode="r")
            if crc32c(piece.view(np.uint8)) != int(sums[number]):
                got = f"other bytes in rows {first} to {last}"
                expected = f"crc32c {int(sums[number]):08x}, as written"
                step = f"Remove {folder} and call it again: the disk changed it."
                raise ActdsError("E503", str(path), got=got, expected=expected, next_step=step)
            out[place[at : at + last - first]] = piece.reshape(-1, hook.d_model)
            at += last - first
        return out

    def _pieces(self, number: int) -> list[tuple[Path, int, int]]:
        """Pieces of a new shard: folder, first row and row after the last."""
        pieces = []
        for folder in sorted(self.folder.glob("[0-9]*[0-9]")):
            offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            pieces.append((folder, int(offsets[number]), int(offsets[number + 1])))
        return [piece for piece in pieces if piece[1] < piece[2]]


def _read(segments: list[tuple[Shard, int, int]], hook: Hook, n_rows: int, pool: Executor) -> Any:
    """Rows of a hook in segments one after the other, ``(n_rows, d_model)``."""
    out = np.empty((n_rows, hook.d_model), arrays.DTYPES[hook.dtype].bits)
    at = 0
    for shard, first, last in segments:
        with shard.array(hook.name) as reader:
            step = reader.rows_per_chunk
            bounds = [first, *range((first // step + 1) * step, last, step), last]

            def read(low: int, high: int, at: int = at - first, reader: Any = reader) -> None:
                reader.read(low, high, out[at + low : at + high])

            list(pool.map(read, bounds[:-1], bounds[1:]))
        at += last - first
    return out


def _check_digests(shard: Shard) -> None:
    """A new array over changed bytes would hide the change."""
    for entry in shard.manifest.files:
        if entry.path.endswith(f"/{arrays.SHARD_PATH}"):
            place = f"{layout.shard_dir(shard.name)}/{entry.path}"
            check_sha256(place, file_sha256(shard.store, place), entry.sha256)


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Reads and writes of temporary files: E503 when the disk refuses one."""
    try:
        yield
    except ActdsError:
        raise  # some are an OSError as well
    except OSError as error:
        got = error.strerror or str(error)
        raise ActdsError("E503", str(path), got=got, expected="a durable write") from error
