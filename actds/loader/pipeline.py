"""Batches made ahead of time: threads read windows of rows into the batches they are served in.

``Transform`` then normalizes a batch, casts it and sends it to a device, in the trainer's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from actds.explore.lazy import OpenArrays, Recent
from actds.explore.requests import Partners
from actds.explore.stats import Stats
from actds.format import canonical
from actds.format.arrays import DTYPES, to_torch
from actds.format.schema import Hook
from actds.format.shard import Shard
from actds.format.tables import PHASES, ROLES
from actds.loader.filters import bad
from actds.loader.order import PART, BatchSpec, Epoch, Floats, Ints, Window
from actds.loader.selection import WEIGHT
from actds.loader.where import ROLE

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[Any]
Normalize = Literal["norm", "channel"] | Mapping[str, Stats]
Columns = dict[str, npt.NDArray[Any]]

COLUMN_TYPES: dict[str, npt.DTypeLike] = {
    "run": np.uint16,
    "request": np.uint32,
    "position": np.uint32,
    "token_id": np.uint32,
    "phase": np.uint8,
    ROLE: np.int8,
    "step": np.uint64,
    PART: np.int64,
    WEIGHT: np.float32,
}

TOKEN_COLUMNS = ("request", "position", "token_id", "step")
"""Columns of the token table; run and phase are the shard's."""
N_AHEAD = 2
"""Batches that wait for the trainer."""
_MAX_TOKEN_ROWS = 1 << 23
_DTYPES = ("float32", "bfloat16", "float16")
_HOW = "'norm', 'channel', or Stats by hook"
_N_KEPT = N_AHEAD + 4  # batches in flight outside the windows: ahead, and with the trainer


@dataclass(frozen=True)
class Batch:
    """One batch in host memory of its own.

    Args:
        epoch: epoch of the next batch.
        step: number of the next batch in that epoch.
        acts: bit patterns ``(n, d_model)`` per hook.
    """

    epoch: int
    step: int
    acts: dict[str, Bits]
    rows: Columns | None


Target = tuple[int, Bits]
"""Rows of memory, with the number of the first: bit patterns ``(n, d_model)``."""


class BatchMemory:
    """Memory for batches, each with a number, into which rows go before it is complete.

    A trainer may keep a batch, or a view of it, for as long as it likes, and write into it: only
    with the last reference does its memory come back. Fresh memory costs a page fault per 4 KiB,
    which on some machines is more than reading and decoding together.

    ``n_batches`` lie in one block; where more are kept, each has memory of its own. Row ``i`` of
    batch ``b`` has the number ``b * max_rows + i``.
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
        further = [number for number in numbers if number >= self._n_batches]
        return {
            name: [
                (0, self._flat(name, 0, self._n_batches).reshape(-1, hook.d_model)),
                *((number * self.max_rows, self._further[number][name]) for number in further),
            ]
            for name, hook in self._hooks.items()
        }

    def batch(self, number: int, n_rows: int) -> dict[str, Bits]:
        """Return a batch; its memory comes back with the last reference to one of its arrays."""
        if number in self._further:
            return {name: rows[:n_rows] for name, rows in self._further[number].items()}
        self._given.add(number)
        released = itertools.count(1)
        acts = {}
        for name in self._hooks:
            # Every view of this array refers to it, since it is itself a view of what is no array.
            flat = self._flat(name, number, number + 1)
            weakref.finalize(flat, self._release, number, released).atexit = False
            acts[name] = flat.reshape(self.max_rows, -1)[:n_rows]
        return acts

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
        places: the number of each row, ``(n,)``, all different.
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
class _LoadedWindow:
    """A window in serving order, whose rows are in memory or on their way.

    Args:
        acts: bit patterns ``(n_entries or more, d_model)`` per hook, to be copied to batches; empty
            where rows go to batches at once.
    """

    epoch: int
    at: int
    stop: int
    targets: dict[str, list[Target]]
    acts: dict[str, Bits]
    columns: Columns
    reads: list[Future[None]] = field(default_factory=list)

    def wait(self) -> None:
        for read in self.reads:
            read.result()
        self.reads.clear()


@dataclass(frozen=True)
class _PieceRead:
    """Rows of one shard to read: their numbers, when each is served, and where it goes."""

    shard: int
    rows: Ints
    turns: Ints
    places: Ints


class _Lane:
    """The entries of one part in one lane, over all epochs, one window read ahead."""

    def __init__(self, pipeline: Pipeline, part: int, lane: int, epoch: int, step: int) -> None:
        self._pipeline = pipeline
        self._todo = _windows_of(pipeline, part, lane, epoch, step)
        self._loaded: deque[_LoadedWindow] = deque()

    def fill(self, n_windows: int = 2) -> None:
        """Start reads until the window that is served, and the next one, are under way."""
        while len(self._loaded) < n_windows:
            window = next(self._todo, None)
            if window is None:
                return
            self._loaded.append(window)

    def take(
        self, first: int, n: int, acts: dict[str, Bits], columns: dict[str, list[npt.NDArray[Any]]]
    ) -> None:
        """Wait for the next ``n`` entries; fill arrays that they are not in; append columns."""
        stop_row = first + n
        while first < stop_row:
            window = self._loaded[0]
            window.wait()
            start, stop = window.at, min(window.at + stop_row - first, window.stop)
            for hook, rows in window.acts.items():
                acts[hook][first : first + stop - start] = rows[start:stop]
            for name, parts in columns.items():
                parts.append(window.columns[name][start:stop])
            first += stop - start
            window.at = stop
            if stop == window.stop:
                self._drop_window()

    def end_epoch(self, epoch: int) -> None:
        while self._loaded and self._loaded[0].epoch == epoch:
            self._loaded[0].wait()
            self._drop_window()

    def _drop_window(self) -> None:
        window = self._loaded.popleft()
        if window.acts:
            self._pipeline.buffers.append(window.acts)
        self.fill()


def _windows_of(
    pipeline: Pipeline, part: int, lane: int, epoch: int, step: int
) -> Iterator[_LoadedWindow]:
    """Yield the windows of a part in a lane from a step on, each with its reads started.

    A function, not a method: a lane that is referred to by its own generator would keep its
    windows in memory until the garbage collector comes.
    """
    while pipeline.n_epochs is None or epoch < pipeline.n_epochs:
        order = pipeline.epoch(epoch)
        position = order.before(part, lane, step)
        of_part = order.orders[part]
        if position < of_part.lane_entries(lane):
            for index in range(of_part.window_at(lane, position), of_part.n_windows(lane)):
                window = of_part.window(lane, index)
                if window.pieces.size:
                    skip = max(0, position - window.first)
                    yield pipeline.load(part, lane, window, epoch, skip)
        epoch, step = epoch + 1, 0


class Pipeline:
    """Makes the batches of one rank in a thread of its own, a few ahead of the trainer.

    Rows go to the batches that they are served in. Those of a mixture go to buffers of the window,
    which is used again when it is served, and from there to batches: a part with a small share has
    a few rows in each of very many.

    Attributes:
        buffers: buffers of windows that are served.
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
        self._epochs: dict[int, Epoch] = {}
        self._arrays = OpenArrays(spec.shards)
        self._partners = [OpenArrays(pair.shards) for pair in spec.paired]
        self._tokens = Recent[int, Columns](_MAX_TOKEN_ROWS)
        # Where every read waits for a network, threads in flight count, not cores.
        self._n_readers = max([n_threads, *(shard.store.n_readers for shard in spec.shards[:1])])
        self._threads = ThreadPoolExecutor(self._n_readers, thread_name_prefix="actds-read")
        self.buffers: list[dict[str, Bits]] = []
        self._direct = len(spec.parts) == 1
        size = spec.geometry.lane_batch
        n_windows = 2 * (spec.geometry.max_window_rows // size + 1) if self._direct else 0
        self._memory = BatchMemory(
            spec.widths,
            len(spec.lanes) * size,
            min(n_windows, 2 * self.epoch(epoch).n_batches(drop_last)) + _N_KEPT,
            spec.pinned,
        )
        self._numbers: dict[tuple[int, int], int] = {}
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

    def epoch(self, epoch: int) -> Epoch:
        """Return the order of an epoch; those of the last two are kept."""
        if epoch not in self._epochs:
            self._epochs = {e: order for e, order in self._epochs.items() if e >= epoch - 1}
            self._epochs[epoch] = self._spec.epoch(epoch)
        return self._epochs[epoch]

    def load(self, part: int, lane: int, window: Window, epoch: int, skip: int) -> _LoadedWindow:
        """Return a window whose reads are started, to be served from entry ``skip``."""
        order, n = self.epoch(epoch), window.order.size
        end = order.before(part, lane, order.n_batches(self._drop_last)) - window.first
        stop = min(n, max(end, 0))  # what is in no batch is not read
        columns = {name: np.empty(n, COLUMN_TYPES[name]) for name in self._spec.columns}
        # When each entry is served: the inverse of the order.
        turns = np.empty_like(window.order)
        turns[window.order] = np.arange(n)
        if self._direct:
            targets, places = self._in_batches(order, lane, window, epoch, skip, stop)
            places = places[turns]
            loaded = _LoadedWindow(epoch, skip, stop, targets, {}, columns)
        else:
            acts, places = self._buffers(n), turns
            targets = {name: [(0, out)] for name, out in acts.items()}
            loaded = _LoadedWindow(epoch, skip, stop, targets, acts, columns)
        reads, used = [], 0
        for number, rows in order.orders[part].reads(window):
            of_piece = slice(used, used + rows.size)
            turn, place = turns[of_piece], places[of_piece]
            used += rows.size
            if skip or stop < n:
                served = (turn >= skip) & (turn < stop)
                rows, turn, place = rows[served], turn[served], place[served]
            if rows.size:
                shard = self._spec.parts[part].shards[number]
                reads.append(_PieceRead(shard, rows, turn, place))
        # As many tasks as threads: each hands the interpreter over many times, and waits for it.
        for first in range(min(self._n_readers, len(reads))):
            task = reads[first :: self._n_readers]
            loaded.reads.append(self._threads.submit(self._read, loaded, part, task))
        return loaded

    def _in_batches(
        self, order: Epoch, lane: int, window: Window, epoch: int, skip: int, stop: int
    ) -> tuple[dict[str, list[Target]], Ints]:
        """Return the memory of the batches that have a window's rows, and each turn's place there.

        Places of turns outside ``[skip, stop)`` have no meaning.
        """
        position, size = window.first, self._spec.geometry.lane_batch
        steps = range((position + skip) // size, -(-(position + stop) // size))
        numbers = [self._number(epoch, step) for step in steps]
        # Where the lane begins in each batch, from where the batch begins in the lane.
        first = np.empty(len(steps), np.int64)
        for k, step in enumerate(steps):
            n_before = (lane - self._spec.lanes.start) * size
            if step >= order.n_full_batches:
                lanes = range(self._spec.lanes.start, lane)
                n_before = sum(order.sizes(other, step)[0] for other in lanes)
            first[k] = numbers[k] * self._memory.max_rows + n_before - step * size
        places = np.empty(window.order.size, np.int64)
        at = np.arange(position + skip, position + stop)
        places[skip:stop] = first[at // size - steps.start] + at
        return self._memory.targets(numbers), places

    def _number(self, epoch: int, step: int) -> int:
        if (epoch, step) not in self._numbers:
            self._numbers[epoch, step] = self._memory.take()
        return self._numbers[epoch, step]

    def _buffers(self, n_entries: int) -> dict[str, Bits]:
        """Return memory for a window; a row that comes often may make one longer than others."""
        if self.buffers and len(next(iter(self.buffers[-1].values()))) >= n_entries:
            return self.buffers.pop()
        n_rows = max(n_entries, self._spec.geometry.max_window_rows)
        return {
            name: np.empty((n_rows, hook.d_model), DTYPES[hook.dtype].bits)
            for name, hook in self._spec.widths.items()
        }

    def _read(self, window: _LoadedWindow, part: int, reads: list[_PieceRead]) -> None:
        for read in reads:
            for hook in self._spec.hooks:
                targets = window.targets[hook.name]
                for a, b, values in self._arrays.get(read.shard, hook).by_chunk(read.rows):
                    put(values, read.places[a:b], targets)
            for pair, arrays in zip(self._spec.paired, self._partners, strict=True):
                _read_partners(pair, arrays, read, window.targets[pair.name])
            tokens = self._token_columns(read.shard) if self._spec.provenance else {}
            for name, column in window.columns.items():
                if name == PART:
                    column[read.turns] = part
                elif name == WEIGHT and self._spec.weights is not None:
                    column[read.turns] = self._spec.weights[read.shard][read.rows]
                else:
                    column[read.turns] = tokens[name][read.rows]

    def _token_columns(self, number: int) -> Columns:
        shard = self._spec.shards[number]
        return self._tokens.get(number, lambda: _token_columns(shard, self._spec), shard.n_rows)

    def _put(self, item: Batch | BaseException | None) -> bool:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < N_AHEAD or self._closed)
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
            self._threads.shutdown(wait=True, cancel_futures=True)
            for arrays in (self._arrays, *self._partners):
                arrays.close()
            self._memory.close()

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
            order = self.epoch(epoch)
            n_steps = order.n_batches(self._drop_last)
            while step < n_steps:
                sizes = [order.sizes(lane, step) for lane in self._spec.lanes]
                pairs = zip(chain.from_iterable(lanes), chain.from_iterable(sizes), strict=True)
                yield self._batch(list(pairs), epoch, step, n_steps)
                step += 1
            for lane in chain.from_iterable(lanes):
                lane.end_epoch(epoch)
            epoch, step = epoch + 1, 0

    def _batch(self, takes: list[tuple[_Lane, int]], epoch: int, step: int, n_steps: int) -> Batch:
        """Return a batch in memory of its own: trainers keep batches and write into them."""
        number = self._number(epoch, step)
        acts = self._memory.batch(number, sum(n for _, n in takes))
        parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in self._spec.columns}
        first = 0
        for lane, n in takes:
            lane.take(first, n, acts, parts)
            first += n
        # No window has further rows of it.
        self._memory.complete(self._numbers.pop((epoch, step)))
        after = (epoch, step + 1) if step + 1 < n_steps else (epoch + 1, 0)
        return Batch(*after, acts, self._columns(parts) if parts else None)

    def _columns(self, parts: dict[str, list[npt.NDArray[Any]]]) -> Columns:
        # The rank of a short last batch may have no row at all.
        columns = {
            name: np.concatenate([np.empty(0, COLUMN_TYPES[name]), *part])
            for name, part in parts.items()
        }
        words = {"run": self._spec.runs, "phase": PHASES}
        for name in words.keys() & columns.keys():
            columns[name] = np.array(words[name])[columns[name]]
        if ROLE in columns:  # the last of them is of the code -1
            columns[ROLE] = np.array([*ROLES, None], object)[columns[ROLE]]
        return columns


def _read_partners(
    pair: Partners, arrays: OpenArrays, read: _PieceRead, targets: list[Target]
) -> None:
    partner = pair.rows[read.shard][read.rows]
    order = np.argsort(partner, kind="stable")
    bounds = np.searchsorted(partner[order], pair.starts)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        chosen = order[bounds[number] : bounds[number + 1]]
        rows = partner[chosen] - pair.starts[number]
        for a, b, values in arrays.get(number, pair.hook).by_chunk(rows):
            put(values, read.places[chosen[a:b]], targets)


class Transform:
    """Turns the bit patterns of a batch into what the trainer gets.

    ``norm`` divides by one number, so that the mean norm of a row is the square root of
    ``d_model``; ``channel`` subtracts the mean of each channel and divides by its standard
    deviation. Both are computed in float32.

    Raises:
        ActdsError: E014 another name, a hook without statistics, a device that is not there.

    Attributes:
        pinned: whether batches are best made in pinned memory.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        stats: Mapping[str, Stats],
        normalize: Normalize | None,
        dtype: str | None,
        device: str | torch.device | None,
    ) -> None:
        if dtype not in (None, *_DTYPES):
            raise bad("dtype", repr(dtype)[:80], f"None or one of {', '.join(_DTYPES)}")
        self._hooks, self.dtype = hooks, dtype
        if normalize is not None and dtype is None:
            self.dtype = "float32"
        self._device = None if device is None else _checked_device(device)
        self.pinned = self._device is not None and self._device.type == "cuda"
        self._affine = _affine(hooks, stats, normalize)
        self._on_device: dict[str, tuple[Any, Any]] = {}
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    @property
    def identity(self) -> str | None:
        if not self._affine:
            return None
        values = {name: list(constants.values()) for name, constants in self.normalization.items()}
        return canonical.digest(repr(values).encode())

    @property
    def normalization(self) -> dict[str, dict[str, Any]]:
        """Return ``shift`` and ``scale`` by hook, as JSON; empty when rows are not normalized.

        A normalized row is ``(row - shift) * scale``; ``shift`` is None for 0, and ``scale`` one
        number or one for each channel.
        """
        return {
            name: {"shift": None if shift is None else shift.tolist(), "scale": scale.tolist()}
            for name, (shift, scale) in self._affine.items()
        }

    def __call__(self, acts: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for name, hook in self._hooks.items():
            rows = to_torch(acts[name], hook.dtype)
            if self._device is not None:
                rows = self._sent(rows)
            if name in self._affine:
                shift, scale = self._constants(name)
                rows = rows.to(torch.float32, copy=True)
                rows = (rows if shift is None else rows.sub_(shift)).mul_(scale)
            tensors[name] = rows if self.dtype is None else rows.to(getattr(torch, self.dtype))
        return tensors

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which is under way; host memory is held until it is made."""
        import torch

        sent = rows.to(self._device, non_blocking=self.pinned)
        if self.pinned:
            copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._under_way.append((copied, rows))
            while self._under_way[0][0].query() and len(self._under_way) > 1:
                self._under_way.popleft()
        return sent

    def _constants(self, hook: str) -> tuple[Any, Any]:
        import torch

        if hook not in self._on_device:
            self._on_device[hook] = tuple(  # type: ignore[assignment]
                None
                if values is None
                else torch.from_numpy(values.astype(np.float32)).to(self._device)
                for values in self._affine[hook]
            )
        return self._on_device[hook]


def _affine(
    hooks: Mapping[str, Hook], known: Mapping[str, Stats], normalize: Normalize | None
) -> dict[str, tuple[Floats | None, Floats]]:
    if normalize is None:
        return {}
    if not isinstance(normalize, Mapping) and str(normalize) not in ("norm", "channel"):
        raise bad("normalize", repr(normalize)[:80], _HOW)
    affine: dict[str, tuple[Floats | None, Floats]] = {}
    for name, hook in hooks.items():
        stats = (normalize if isinstance(normalize, Mapping) else known).get(name)
        if not isinstance(stats, Stats) or stats.mean.shape != (hook.d_model,):
            raise bad("normalize", f"no Stats of {hook.d_model} channels for {name}", _HOW)
        if normalize == "norm":
            scale = np.array(np.sqrt(hook.d_model) / stats.mean_norm)
            affine[name] = (None, _finite("mean norm", name, scale))
        else:
            # A channel that never changes has nothing to be divided by.
            std = np.where(stats.std > 0, stats.std, 1.0)
            affine[name] = (stats.mean, _finite("variance", name, 1.0 / std))
    return affine


def _finite(what: str, hook: str, scale: Floats) -> Floats:
    if not np.isfinite(scale).all():
        raise bad("normalize", f"a {what} of {hook} that is no number", "rows of finite values")
    return scale


def _checked_device(device: str | torch.device) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).partition("\n")[0][:200]
        raise bad("device", f"{device!r}: {first}", "a device that torch has here") from None
