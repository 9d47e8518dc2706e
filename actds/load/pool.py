"""Batches made ahead of time by threads: chunk reads into windows, windows into fresh batches."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.format.arrays import DTYPES
from actds.format.shard import Shard
from actds.format.tables import PHASES
from actds.load.dataset import OpenArrays
from actds.load.order import (
    Epoch,
    EpochOrder,
    Geometry,
    Pieces,
    Window,
    frequency_counts,
    visit_counts,
)
from actds.load.pairs import Partners
from actds.load.selection import PROVENANCE_COLUMNS, WEIGHT
from actds.schema import Hook

__all__ = [
    "Batch",
    "BatchSpec",
    "Part",
    "Pipeline",
    "n_batches",
]

Bits = npt.NDArray[Any]
Columns = dict[str, npt.NDArray[Any]]

TOKEN_COLUMNS = ("request", "position", "token_id", "step")
"""Columns that are read from the token table; run and phase are the shard's."""
PART = "part"
"""The column that numbers the parts of a mixture."""
_KINDS: dict[str, npt.DTypeLike] = {
    "run": np.uint16,
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "phase": np.uint8,
    "step": np.uint64,
    PART: np.int64,
    WEIGHT: np.float32,
}
_MAX_TOKEN_ROWS = 1 << 23
_N_AHEAD = 2  # batches that wait for the trainer
_N_KEPT = _N_AHEAD + 4  # batches whose memory is kept for further ones


@dataclass(frozen=True)
class Part:
    """The rows of one part of a mixture: a range of the shards, in an order of its own.

    Args:
        shards: its shards, as a range of those of the spec.
        counts: how often each row of a shard comes; None where each comes once.
        frequencies: what rows come in proportion to, per shard; None where they do not.
        n_entries: entries of an epoch, where rows come in proportion.
        share: its share of every batch, an integer of any sum.
        key: the Philox key.
    """

    shards: range
    counts: Sequence[npt.NDArray[Any] | None]
    frequencies: Sequence[npt.NDArray[np.float64]] | None
    n_entries: int
    share: int
    key: tuple[int, int]


@dataclass(frozen=True)
class BatchSpec:
    """What the batches of a rank are made of.

    Args:
        hooks: the hooks that are read.
        shards: the shards of all parts.
        runs: the runs of the shards.
        parts: the parts of a mixture; one without.
        geometry: the shape of the order.
        lanes: the lanes of this rank.
        provenance: whether the token columns are read too.
        weights: row weights per shard, float32 ``(n_rows,)`` each; None without.
        pinned: make batches in pinned memory, from which a GPU reads by itself.
        paired: hooks of other datasets, with the partner of each row of the shards.
    """

    hooks: Sequence[Hook]
    shards: Sequence[Shard]
    runs: tuple[str, ...]
    parts: Sequence[Part]
    geometry: Geometry
    lanes: range
    provenance: bool
    weights: Sequence[npt.NDArray[np.float32]] | None = None
    pinned: bool = False
    paired: Sequence[Partners] = ()

    @property
    def widths(self) -> dict[str, Hook]:
        """Return the hooks of a batch by what it calls them."""
        own = {hook.name: hook for hook in self.hooks}
        return own | {pair.name: pair.hook for pair in self.paired}

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of a batch."""
        columns = PROVENANCE_COLUMNS if self.provenance else ()
        columns = (*columns, PART) if self.provenance and len(self.parts) > 1 else columns
        return columns if self.weights is None else (*columns, WEIGHT)

    def epoch(self, epoch: int) -> EpochRows:
        """Return the order of an epoch, and how often each row comes in it."""
        orders, counts = [], []
        for part in self.parts:
            part_counts = part.counts
            if part.frequencies is not None:
                part_counts = frequency_counts(part.frequencies, part.n_entries, part.key, epoch)
            n_rows = [self.shards[i].n_rows for i in part.shards]
            pieces = Pieces.of_shards(n_rows, self.geometry.piece_rows, part_counts)
            orders.append(EpochOrder(pieces, self.geometry, part.key, epoch))
            counts.append(part_counts)
        return EpochRows(Epoch(orders, [p.share for p in self.parts], self.geometry), counts)


class _BatchMemory:
    """Memory for batches; what nobody refers to any more is used again.

    A trainer may keep a batch, or a view of it, for as long as it likes: only with the last
    reference does the memory come back. Fresh memory costs a page fault per 4 KiB, which on some
    machines is more than reading and decoding together.

    Args:
        hooks: the hooks of a batch by name.
        max_rows: rows of a batch at most.
        pinned: take pinned memory.
    """

    def __init__(self, hooks: Mapping[str, Hook], max_rows: int, pinned: bool) -> None:
        self._hooks, self._max_rows, self._pinned = hooks, max_rows, pinned
        self._free: dict[str, deque[Any]] = {name: deque(maxlen=_N_KEPT) for name in hooks}

    def take(self, n_rows: int) -> dict[str, Bits]:
        """Return memory for ``(n_rows, d_model)`` bit patterns per hook."""
        return {name: self._one(name, hook, n_rows) for name, hook in self._hooks.items()}

    def _one(self, name: str, hook: Hook, n_rows: int) -> Bits:
        free = self._free[name]
        try:
            memory = free.popleft()
        except IndexError:
            memory = self._fresh(hook)
        # Every view of this array refers to it, since it is itself a view of what is no array.
        whole = np.frombuffer(memory.data, DTYPES[hook.dtype].bits)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole[: n_rows * hook.d_model].reshape(n_rows, hook.d_model)

    def _fresh(self, hook: Hook) -> npt.NDArray[np.uint8]:
        nbytes = self._max_rows * hook.d_model * DTYPES[hook.dtype].itemsize
        if not self._pinned:
            return np.empty(nbytes, np.uint8)
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


@dataclass(frozen=True)
class EpochRows:
    """The order of an epoch, and how often each row of each part comes in it."""

    order: Epoch
    counts: Sequence[Sequence[npt.NDArray[Any] | None]]

    def rows(self, part: int, piece: int) -> npt.NDArray[np.int64]:
        """Return the row of each entry of a piece, from the piece's start, ascending."""
        pieces = self.order.orders[part].pieces
        start, stop = int(pieces.start[piece]), int(pieces.stop[piece])
        rows = np.arange(stop - start, dtype=np.int64)
        counts = self.counts[part][int(pieces.shard[piece])]
        if counts is None:
            return rows
        visit, n_visits = int(pieces.visit[piece]), int(pieces.n_visits[piece])
        return np.repeat(rows, visit_counts(counts[start:stop], visit, n_visits))


@dataclass(frozen=True)
class Batch:
    """One batch in host memory of its own.

    Args:
        epoch: epoch of the next batch.
        step: number of the next batch in that epoch.
        acts: bit patterns ``(n, d_model)`` per hook.
        rows: token columns and row weights, each of shape (n,); None when neither is asked for.
    """

    epoch: int
    step: int
    acts: dict[str, Bits]
    rows: Columns | None


class _Tokens:
    """The token columns of shards, the most recent ones kept."""

    def __init__(self, spec: BatchSpec) -> None:
        self._shards, self._runs = spec.shards, spec.runs
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
        columns = _token_columns(self._shards[shard], self._runs)
        with self._lock:
            if shard not in self._tokens:
                self._tokens[shard] = columns
                self._n_token_rows += self._shards[shard].n_rows
            while self._n_token_rows > _MAX_TOKEN_ROWS and len(self._tokens) > 1:
                oldest, _ = self._tokens.popitem(last=False)
                self._n_token_rows -= self._shards[oldest].n_rows
        return columns


def _token_columns(shard: Shard, runs: tuple[str, ...]) -> Columns:
    """Return the provenance of a shard's rows; run and phase as small codes, not as strings."""
    table = shard.tokens(list(TOKEN_COLUMNS))
    columns = {name: table[name].to_numpy() for name in TOKEN_COLUMNS}
    columns["run"] = np.full(shard.n_rows, runs.index(shard.run), np.uint16)
    columns["phase"] = np.full(shard.n_rows, PHASES.index(shard.phase), np.uint8)
    return columns


@dataclass
class _Loaded:
    """A window in serving order, whose rows are in memory or on their way.

    Args:
        epoch: its epoch.
        n_entries: entries that it has.
        acts: bit patterns ``(n_entries or more, d_model)`` per hook.
        columns: provenance and weights, each ``(n_entries,)``.
        at: the next entry to serve.
    """

    epoch: int
    n_entries: int
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


class _Windows:
    """Starts the reads of windows, into buffers that are used again when a window is served."""

    def __init__(self, spec: BatchSpec, n_threads: int) -> None:
        self._spec = spec
        self._arrays = OpenArrays(spec.shards)
        self._partners = [OpenArrays(pair.shards) for pair in spec.paired]
        self._tokens = _Tokens(spec)
        # Where every read waits for a network, threads in flight count, not cores.
        n_readers = max([n_threads, *(shard.store.n_readers for shard in spec.shards[:1])])
        self._threads = ThreadPoolExecutor(n_readers, thread_name_prefix="actds-read")
        self._free: list[dict[str, Bits]] = []
        self._kinds = {name: _KINDS[name] for name in spec.columns}

    def close(self) -> None:
        """End the threads, and close the files that they read."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for arrays in (self._arrays, *self._partners):
            arrays.close()

    def _buffers(self, n_entries: int) -> dict[str, Bits]:
        """Return memory for a window; a row that comes often may make one longer than others."""
        if self._free and len(next(iter(self._free[-1].values()))) >= n_entries:
            return self._free.pop()
        n_rows = max(n_entries, self._spec.geometry.max_window_rows)
        return {
            name: np.empty((n_rows, hook.d_model), DTYPES[hook.dtype].bits)
            for name, hook in self._spec.widths.items()
        }

    def release(self, window: _Loaded) -> None:
        """Take back the buffers of a window that is served; batches are copies of them."""
        self._free.append(window.acts)

    def load(self, rows: EpochRows, part: int, window: Window, epoch: int, skip: int) -> _Loaded:
        """Return a window whose reads are started, to be served from entry ``skip``."""
        pieces = rows.order.orders[part].pieces
        # Where each entry is served: the inverse of the order.
        places = np.empty_like(window.order)
        places[window.order] = np.arange(window.order.size)
        buffers = self._buffers(places.size)
        columns = {name: np.empty(places.size, kind) for name, kind in self._kinds.items()}
        loaded = _Loaded(epoch, places.size, buffers, columns, skip)
        used = 0
        for piece, start, stop in zip(
            window.pieces.tolist(), window.start.tolist(), window.stop.tolist(), strict=True
        ):
            entries = rows.rows(part, piece)[start:stop] + int(pieces.start[piece])
            where = places[used : used + entries.size]
            shard = self._spec.parts[part].shards[int(pieces.shard[piece])]
            loaded.reads.append(
                self._threads.submit(self._read, loaded, part, shard, entries, where)
            )
            used += entries.size
        return loaded

    def _read(
        self,
        window: _Loaded,
        part: int,
        shard: int,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
    ) -> None:
        for hook in self._spec.hooks:
            self._arrays.get(shard, hook).scatter(rows, window.acts[hook.name], places)
        for pair, arrays in zip(self._spec.paired, self._partners, strict=True):
            partner = pair.rows[shard][rows]
            order = np.argsort(partner, kind="stable")
            bounds = np.searchsorted(partner[order], pair.starts)
            for number in np.flatnonzero(np.diff(bounds)).tolist():
                chosen = order[bounds[number] : bounds[number + 1]]
                arrays.get(number, pair.hook).scatter(
                    partner[chosen] - pair.starts[number], window.acts[pair.name], places[chosen]
                )
        tokens = self._tokens.get(shard) if self._spec.provenance else {}
        for name, column in window.columns.items():
            if name == PART:
                column[places] = part
            elif name == WEIGHT and self._spec.weights is not None:
                column[places] = self._spec.weights[shard][rows]
            else:
                column[places] = tokens[name][rows]


class _Lane:
    """The entries of one part in one lane, over all epochs, one window read ahead."""

    def __init__(self, pipeline: Pipeline, part: int, lane: int, epoch: int, step: int) -> None:
        self._pipeline = pipeline
        self._todo = _windows_of(pipeline, part, lane, epoch, step)
        self._loaded: deque[_Loaded] = deque()

    def fill(self, n_windows: int = 2) -> None:
        """Start reads until the window that is served, and the next one, are under way."""
        while len(self._loaded) < n_windows:
            window = next(self._todo, None)
            if window is None:
                return
            self._loaded.append(window)

    def take(
        self,
        n: int,
        acts: dict[str, Bits],
        parts: dict[str, list[npt.NDArray[Any]]] | None,
    ) -> None:
        """Fill arrays of ``n`` rows with the next entries; append their columns."""
        done = 0
        while done < n:
            window = self._loaded[0]
            window.wait()
            start, stop = window.at, min(window.at + n - done, window.n_entries)
            for hook, out in acts.items():
                out[done : done + stop - start] = window.acts[hook][start:stop]
            for name, part in (parts or {}).items():
                part.append(window.columns[name][start:stop])
            done += stop - start
            window.at = stop
            if stop == window.n_entries:
                self._drop_window()

    def end_epoch(self, epoch: int) -> None:
        """Leave out what is left of an epoch."""
        while self._loaded and self._loaded[0].epoch == epoch:
            self._loaded[0].wait()
            self._drop_window()

    def _drop_window(self) -> None:
        self._pipeline.windows.release(self._loaded.popleft())
        self.fill()


def _windows_of(
    pipeline: Pipeline, part: int, lane: int, epoch: int, step: int
) -> Iterator[_Loaded]:
    """Yield the windows of a part in a lane from a step on, each with its reads started.

    A function, not a method: a lane that is referred to by its own generator would keep its
    windows in memory until the garbage collector comes.
    """
    while pipeline.n_epochs is None or epoch < pipeline.n_epochs:
        rows = pipeline.rows(epoch)
        order = rows.order.orders[part]
        position = rows.order.before(part, lane, step)
        if position < order.lane_entries(lane):
            for index in range(order.window_at(lane, position), order.n_windows(lane)):
                window = order.window(lane, index)
                if window.pieces.size:
                    skip = max(0, position - window.first)
                    yield pipeline.windows.load(rows, part, window, epoch, skip)
        epoch, step = epoch + 1, 0


class Pipeline:
    """Makes the batches of one rank in a thread of its own, a few ahead of the trainer.

    Args:
        spec: what the batches are made of.
        epoch: epoch of the first batch.
        step: number of the first batch in its epoch.
        n_epochs: epoch to end before; None never ends.
        drop_last: leave out the short batch at the end of an epoch.
        n_threads: threads that read and decode.
    """

    def __init__(
        self,
        spec: BatchSpec,
        *,
        epoch: int,
        step: int,
        n_epochs: int | None,
        drop_last: bool,
        n_threads: int,
    ) -> None:
        self.n_epochs = n_epochs
        self._spec, self._drop_last = spec, drop_last
        self._first = (epoch, step)
        self._epochs: dict[int, EpochRows] = {}
        self.windows = _Windows(spec, n_threads)
        self._memory = _BatchMemory(
            spec.widths, len(spec.lanes) * spec.geometry.lane_batch, spec.pinned
        )
        self._ready: deque[Batch | BaseException | None] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="actds-batch", daemon=True)
        self._thread.start()

    def next(self) -> Batch | None:
        """Return the next batch; None at the end.

        Raises:
            ActdsError: whatever reading met, once per call from then on.
        """
        with self._change:
            self._change.wait_for(lambda: self._ready or self._closed)
            if not self._ready:
                return None
            item = self._ready[0]
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._ready.popleft()
                self._change.notify_all()
            return item

    def close(self) -> None:
        """Stop and join every thread; closing twice is fine."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def rows(self, epoch: int) -> EpochRows:
        """Return the rows of an epoch in their order; those of the last two are kept."""
        if epoch not in self._epochs:
            self._epochs = {e: rows for e, rows in self._epochs.items() if e >= epoch - 1}
            self._epochs[epoch] = self._spec.epoch(epoch)
        return self._epochs[epoch]

    def _put(self, item: Batch | BaseException | None) -> bool:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < _N_AHEAD or self._closed)
            if not self._closed:
                self._ready.append(item)
                self._change.notify_all()
            return not self._closed

    def _run(self) -> None:
        try:
            for batch in self._batches():
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:  # carried to the trainer's thread, and raised there
            self._put(error)
        finally:
            self.windows.close()

    def _batches(self) -> Iterator[Batch]:
        epoch, step = self._first
        lanes = [
            [_Lane(self, part, lane, epoch, step) for part in range(len(self._spec.parts))]
            for lane in self._spec.lanes
        ]
        # Reads are served in turn: the first batch needs a window of every lane, and no second one.
        for n_windows in (1, 2):
            for lane in chain.from_iterable(lanes):
                lane.fill(n_windows)
        while self.n_epochs is None or epoch < self.n_epochs:
            order = self.rows(epoch).order
            n_steps = n_batches(order, self._drop_last)
            while step < n_steps:
                sizes = [order.sizes(lane, step) for lane in self._spec.lanes]
                step += 1
                after = (epoch, step) if step < n_steps else (epoch + 1, 0)
                pairs = zip(chain.from_iterable(lanes), chain.from_iterable(sizes), strict=True)
                yield self._batch(list(pairs), after)
            for lane in chain.from_iterable(lanes):
                lane.end_epoch(epoch)
            epoch, step = epoch + 1, 0

    def _batch(self, takes: list[tuple[_Lane, int]], after: tuple[int, int]) -> Batch:
        """Gather a batch in memory of its own: trainers keep batches and write into them."""
        n_rows = sum(n for _, n in takes)
        acts = self._memory.take(n_rows)
        parts: dict[str, list[npt.NDArray[Any]]] | None = None
        if self._spec.columns:
            parts = {name: [] for name in self._spec.columns}
        at = 0
        for lane, n in takes:
            lane.take(n, {name: out[at : at + n] for name, out in acts.items()}, parts)
            at += n
        return Batch(*after, acts, None if parts is None else self._columns(parts))

    def _columns(self, parts: dict[str, list[npt.NDArray[Any]]]) -> Columns:
        # The rank of a short last batch may have no row at all.
        columns = {
            name: np.concatenate([np.empty(0, _KINDS[name]), *part]) for name, part in parts.items()
        }
        if self._spec.provenance:
            columns["run"] = np.array(self._spec.runs)[columns["run"]]
            columns["phase"] = np.array(PHASES)[columns["phase"]]
        return columns


def n_batches(order: Epoch, drop_last: bool) -> int:
    """Return the batches of an epoch."""
    return order.n_full_batches + (0 if drop_last or not order.n_left else 1)
