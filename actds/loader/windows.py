"""Windows of rows, read by threads: chunks into the batches that they are served in."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.explore.lazy import OpenArrays
from actds.format.arrays import DTYPES
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import PHASES, ROLES
from actds.loader.batches import (
    COLUMN_TYPES,
    PART,
    BatchSpec,
    Bits,
    Columns,
    EpochRows,
    n_batches,
)
from actds.loader.order import Epoch, Window
from actds.loader.selection import ROLE, WEIGHT

Target = tuple[int, Bits]
"""Rows of memory, with the number of the first: bit patterns ``(n, d_model)``."""


class BatchMemory:
    """Memory for batches, each with a number, into which rows go before it is complete.

    A trainer may keep a batch, or a view of it, for as long as it likes, and write into it: only
    with the last reference does its memory come back. Fresh memory costs a page fault per 4 KiB,
    which on some machines is more than reading and decoding together.

    ``n_batches`` lie in one block; where more are kept, each has memory of its own. Row ``i`` of
    batch ``b`` has the number ``b * max_rows + i``.

    Args:
        hooks: the hooks of a batch by name.
        max_rows: rows of a batch at most.
        n_batches: batches of the block, at least 1.
        pinned: take pinned memory.
    """

    def __init__(
        self, hooks: Mapping[str, Hook], max_rows: int, n_batches: int, pinned: bool
    ) -> None:
        self.max_rows = max_rows
        self._hooks, self._n_batches = hooks, n_batches
        self._nbytes = {
            name: max_rows * hook.d_model * DTYPES[hook.dtype].itemsize
            for name, hook in hooks.items()
        }
        self._blocks: dict[str, Any] = {
            name: _pinned(n_batches * nbytes) if pinned else _pages(n_batches * nbytes)
            for name, nbytes in self._nbytes.items()
        }
        self._free = deque(range(n_batches))
        self._given: set[int] = set()
        self._further: dict[int, dict[str, Bits]] = {}
        self._numbers = itertools.count(n_batches)
        self._closed = False

    def take(self) -> int:
        """Return the number of memory that is free now."""
        try:
            return self._free.pop()
        except IndexError:
            number = next(self._numbers)
            self._further[number] = {
                name: np.empty((self.max_rows, hook.d_model), DTYPES[hook.dtype].bits)
                for name, hook in self._hooks.items()
            }
            return number

    def targets(self, numbers: Iterable[int]) -> dict[str, list[Target]]:
        """Return the memory of batches per hook, by the numbers of rows: the block, and others."""
        others = [number for number in numbers if number >= self._n_batches]
        return {
            name: [
                (0, self._flat(name, 0, self._n_batches).reshape(-1, hook.d_model)),
                *((number * self.max_rows, self._further[number][name]) for number in others),
            ]
            for name, hook in self._hooks.items()
        }

    def batch(self, number: int, n_rows: int) -> dict[str, Bits]:
        """Return a batch, ``(n_rows, d_model)`` per hook; its memory comes back with the last one.

        Args:
            number: from ``take``; not given out as a batch yet.
            n_rows: its rows, ``max_rows`` at most.
        """
        if number in self._further:
            return {name: rows[:n_rows] for name, rows in self._further[number].items()}
        self._given.add(number)
        released = itertools.count(1)
        found = {}
        for name in self._hooks:
            # Every view of this array refers to it, since it is itself a view of what is no array.
            flat = self._flat(name, number, number + 1)
            weakref.finalize(flat, self._release, number, released).atexit = False
            found[name] = flat.reshape(self.max_rows, -1)[:n_rows]
        return found

    def complete(self, number: int) -> None:
        """Say that a batch has all its rows, so that memory of its own goes with it."""
        self._further.pop(number, None)

    def close(self) -> None:
        """Give the system all memory back that is in no batch; what is, with the batch."""
        self._closed = True
        self._further.clear()
        for number in set(range(self._n_batches)) - self._given:
            self._give_back(number)

    def _flat(self, name: str, first: int, stop: int) -> Bits:
        nbytes = self._nbytes[name]
        block = memoryview(self._blocks[name])[first * nbytes : stop * nbytes]
        return np.frombuffer(block, DTYPES[self._hooks[name].dtype].bits)

    def _release(self, number: int, released: Iterator[int]) -> None:
        if next(released) < len(self._hooks):
            return
        self._given.discard(number)
        if self._closed:
            self._give_back(number)
        else:
            self._free.append(number)

    def _give_back(self, number: int) -> None:
        for name, block in self._blocks.items():
            if isinstance(block, mmap.mmap):
                start = -(-number * self._nbytes[name] // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (number + 1) * self._nbytes[name] // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > start:
                    block.madvise(mmap.MADV_DONTNEED, start, stop - start)


def put(values: Bits, places: npt.NDArray[np.int64], targets: list[Target]) -> None:
    """Put rows where they belong.

    Args:
        values: bit patterns ``(n, d_model)``.
        places: the number of each row, ``(n,)``, all different.
        targets: memory that has these numbers.
    """
    if len(targets) == 1:
        ((first, rows),) = targets
        rows[places - first if first else places] = values
        return
    for first, rows in targets:
        inside = np.flatnonzero((places >= first) & (places < first + len(rows)))
        rows[places[inside] - first] = values[inside]


def _pages(nbytes: int) -> mmap.mmap:
    # Private: memory that is shared has no huge pages, and is not given back.
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _pinned(nbytes: int) -> npt.NDArray[np.uint8]:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


TOKEN_COLUMNS = ("request", "position", "token_id", "step")
"""Columns of the token table; run and phase are the shard's."""
N_AHEAD = 2
"""Batches that wait for the trainer."""
_MAX_TOKEN_ROWS = 1 << 23
_N_KEPT = N_AHEAD + 4  # batches in flight outside the windows: ahead, and with the trainer


class _Tokens:
    """The token columns of shards, the most recent ones kept."""

    def __init__(self, spec: BatchSpec) -> None:
        self._spec, self._shards = spec, spec.shards
        self._lock = threading.Lock()
        self._tokens: OrderedDict[int, Columns] = OrderedDict()
        self._n_token_rows = 0

    def get(self, shard: int) -> Columns:
        """Return the token columns of one shard."""
        with self._lock:
            columns = self._tokens.get(shard)
            if columns is not None:
                self._tokens.move_to_end(shard)
                return columns
        columns = _token_columns(self._shards[shard], self._spec)
        with self._lock:
            if shard not in self._tokens:
                self._tokens[shard] = columns
                self._n_token_rows += self._shards[shard].n_rows
            while self._n_token_rows > _MAX_TOKEN_ROWS and len(self._tokens) > 1:
                oldest, _ = self._tokens.popitem(last=False)
                self._n_token_rows -= self._shards[oldest].n_rows
        return columns


def _token_columns(shard: Shard, spec: BatchSpec) -> Columns:
    """Return the provenance of a shard's rows; words as small codes, not as strings."""
    needed = {*spec.provenance, *(("request", "position") if ROLE in spec.provenance else ())}
    table = shard.tokens([name for name in TOKEN_COLUMNS if name in needed])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns["run"] = np.full(shard.n_rows, spec.runs.index(shard.run), np.uint16)
    columns["phase"] = np.full(shard.n_rows, PHASES.index(shard.phase), np.uint8)
    if ROLE in spec.provenance:
        role = spec.roles[shard.run].of(columns["request"], columns["position"])
        code = pc.index_in(role, pa.array(ROLES, pa.string()))
        columns[ROLE] = pc.fill_null(code, -1).to_numpy().astype(np.int8)
    return columns


@dataclass
class LoadedWindow:
    """A window in serving order, whose rows are in memory or on their way.

    Args:
        epoch: its epoch.
        stop: the entry to stop before.
        targets: where its rows go, per hook.
        places: the number of each entry's row there, ``(n_entries,)``.
        acts: bit patterns ``(n_entries or more, d_model)`` per hook, to be copied to batches; empty
            where rows go to batches at once.
        columns: provenance and weights, each ``(n_entries,)``.
        at: the next entry to serve.
    """

    epoch: int
    stop: int
    targets: dict[str, list[Target]]
    places: npt.NDArray[np.int64]
    acts: dict[str, Bits]
    columns: Columns
    at: int
    reads: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until every row is there.

        Raises:
            ActdsError: what a read met.
        """
        for read in self.reads:
            read.result()
        self.reads.clear()


class Windows:
    """Starts the reads of windows.

    Rows go to the batches that they are served in. Those of a mixture go to buffers of the window,
    which is used again when it is served, and from there to batches: a part with a small share has
    a few rows in each of very many.

    Args:
        spec: what the batches are made of.
        drop_last: leave out the short batch at the end of an epoch.
        n_threads: threads that read and decode.
        n_batches: batches of an epoch.
    """

    def __init__(self, spec: BatchSpec, drop_last: bool, n_threads: int, n_batches: int) -> None:
        self._spec, self._drop_last = spec, drop_last
        self._arrays = OpenArrays(spec.shards)
        self._partners = [OpenArrays(pair.shards) for pair in spec.paired]
        self._tokens = _Tokens(spec)
        # Where every read waits for a network, threads in flight count, not cores.
        n_readers = max([n_threads, *(shard.store.n_readers for shard in spec.shards[:1])])
        self._threads = ThreadPoolExecutor(n_readers, thread_name_prefix="actds-read")
        self._free: list[dict[str, Bits]] = []
        self._kinds = {name: COLUMN_TYPES[name] for name in spec.columns}
        self._direct = len(spec.parts) == 1
        size = spec.geometry.lane_batch
        n_held = 2 * (spec.geometry.max_window_rows // size + 1) if self._direct else 0
        self.memory = BatchMemory(
            spec.widths,
            len(spec.lanes) * size,
            min(n_held, 2 * n_batches) + _N_KEPT,
            spec.pinned,
        )
        self._numbers: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        """End the threads, close the files that they read, and give memory back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for arrays in (self._arrays, *self._partners):
            arrays.close()
        self.memory.close()

    def number(self, epoch: int, step: int) -> int:
        """Return the number of a batch's memory."""
        if (epoch, step) not in self._numbers:
            self._numbers[epoch, step] = self.memory.take()
        return self._numbers[epoch, step]

    def complete(self, epoch: int, step: int) -> None:
        """Forget the memory of a batch: no window has further rows of it."""
        self.memory.complete(self._numbers.pop((epoch, step)))

    def _buffers(self, n_entries: int) -> dict[str, Bits]:
        """Return memory for a window; a row that comes often may make one longer than others."""
        if self._free and len(next(iter(self._free[-1].values()))) >= n_entries:
            return self._free.pop()
        n_rows = max(n_entries, self._spec.geometry.max_window_rows)
        return {
            name: np.empty((n_rows, hook.d_model), DTYPES[hook.dtype].bits)
            for name, hook in self._spec.widths.items()
        }

    def release(self, window: LoadedWindow) -> None:
        """Take back the buffers of a window that is served; batches are copies of them."""
        if window.acts:
            self._free.append(window.acts)

    def load(
        self, rows: EpochRows, part: int, lane: int, window: Window, epoch: int, skip: int
    ) -> LoadedWindow:
        """Return a window whose reads are started, to be served from entry ``skip``."""
        pieces = rows.order.orders[part].pieces
        loaded = self._placed(rows.order, part, lane, window, epoch, skip)
        # When each entry is served: the inverse of the order.
        turns = np.empty_like(window.order)
        turns[window.order] = np.arange(window.order.size)
        whole = not skip and loaded.stop == window.order.size
        used = 0
        for piece, start, stop in zip(
            window.pieces.tolist(), window.start.tolist(), window.stop.tolist(), strict=True
        ):
            entries = rows.rows(part, piece)[start:stop] + int(pieces.start[piece])
            turn = turns[used : used + entries.size]
            used += entries.size
            if not whole:
                wanted = (turn >= skip) & (turn < loaded.stop)
                entries, turn = entries[wanted], turn[wanted]
            if entries.size:
                shard = self._spec.parts[part].shards[int(pieces.shard[piece])]
                read = self._threads.submit(self._read, loaded, part, shard, entries, turn)
                loaded.reads.append(read)
        return loaded

    def _placed(
        self, order: Epoch, part: int, lane: int, window: Window, epoch: int, skip: int
    ) -> LoadedWindow:
        """Return a window with memory for its rows, of which none is read."""
        n = window.order.size
        columns = {name: np.empty(n, kind) for name, kind in self._kinds.items()}
        end = order.before(part, lane, n_batches(order, self._drop_last)) - window.first
        stop = min(n, max(end, 0))  # what is in no batch is not read
        if not self._direct:
            acts = self._buffers(n)
            targets: dict[str, list[Target]] = {name: [(0, out)] for name, out in acts.items()}
            return LoadedWindow(epoch, stop, targets, np.arange(n), acts, columns, skip)
        size, places, numbers = self._spec.geometry.lane_batch, np.empty(n, np.int64), []
        for step in range((window.first + skip) // size, -(-(window.first + stop) // size)):
            numbers.append(self.number(epoch, step))
            before = sum(order.sizes(i, step)[0] for i in range(self._spec.lanes.start, lane))
            first = numbers[-1] * self.memory.max_rows + before
            begin = step * size - window.first
            a, b = max(begin, skip), min(begin + size, stop)
            places[a:b] = np.arange(first + a - begin, first + b - begin)
        return LoadedWindow(epoch, stop, self.memory.targets(numbers), places, {}, columns, skip)

    def _read(
        self,
        window: LoadedWindow,
        part: int,
        shard: int,
        rows: npt.NDArray[np.int64],
        turns: npt.NDArray[np.int64],
    ) -> None:
        places = window.places[turns]
        for hook in self._spec.hooks:
            targets = window.targets[hook.name]
            for a, b, values in self._arrays.get(shard, hook).by_chunk(rows):
                put(values, places[a:b], targets)
        for pair, arrays in zip(self._spec.paired, self._partners, strict=True):
            targets = window.targets[pair.name]
            partner = pair.rows[shard][rows]
            order = np.argsort(partner, kind="stable")
            bounds = np.searchsorted(partner[order], pair.starts)
            for number in np.flatnonzero(np.diff(bounds)).tolist():
                chosen = order[bounds[number] : bounds[number + 1]]
                there = partner[chosen] - pair.starts[number]
                for a, b, values in arrays.get(number, pair.hook).by_chunk(there):
                    put(values, places[chosen[a:b]], targets)
        tokens = self._tokens.get(shard) if self._spec.provenance else {}
        for name, column in window.columns.items():
            if name == PART:
                column[turns] = part
            elif name == WEIGHT and self._spec.weights is not None:
                column[turns] = self._spec.weights[shard][rows]
            else:
                column[turns] = tokens[name][rows]
