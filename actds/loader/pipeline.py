"""Batches made ahead of time, by a thread, from windows of rows in their order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from actds.format.tables import PHASES, ROLES
from actds.loader.batches import (
    COLUMN_TYPES,
    Batch,
    BatchSpec,
    Bits,
    Columns,
    EpochRows,
    n_batches,
)
from actds.loader.selection import ROLE
from actds.loader.windows import N_AHEAD, LoadedWindow, Windows


class _Lane:
    """The entries of one part in one lane, over all epochs, one window read ahead."""

    def __init__(self, pipeline: Pipeline, part: int, lane: int, epoch: int, step: int) -> None:
        self._pipeline = pipeline
        self._todo = _windows_of(pipeline, part, lane, epoch, step)
        self._loaded: deque[LoadedWindow] = deque()

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
        """Wait for the next ``n`` entries; fill arrays that they are not in; append columns."""
        done = 0
        while done < n:
            window = self._loaded[0]
            window.wait()
            start, stop = window.at, min(window.at + n - done, window.stop)
            for hook, rows in window.acts.items():
                acts[hook][done : done + stop - start] = rows[start:stop]
            for name, part in (parts or {}).items():
                part.append(window.columns[name][start:stop])
            done += stop - start
            window.at = stop
            if stop == window.stop:
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
) -> Iterator[LoadedWindow]:
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
                    yield pipeline.windows.load(rows, part, lane, window, epoch, skip)
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
        n = n_batches(self.rows(epoch).order, drop_last)
        self.windows = Windows(spec, drop_last, n_threads, n)
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
                pairs = zip(chain.from_iterable(lanes), chain.from_iterable(sizes), strict=True)
                yield self._batch(list(pairs), epoch, step, n_steps)
                step += 1
            for lane in chain.from_iterable(lanes):
                lane.end_epoch(epoch)
            epoch, step = epoch + 1, 0

    def _batch(self, takes: list[tuple[_Lane, int]], epoch: int, step: int, n_steps: int) -> Batch:
        """Return a batch in memory of its own: trainers keep batches and write into them."""
        acts = self.windows.memory.batch(self.windows.number(epoch, step), sum(n for _, n in takes))
        parts: dict[str, list[npt.NDArray[Any]]] | None = None
        if self._spec.columns:
            parts = {name: [] for name in self._spec.columns}
        at = 0
        for lane, n in takes:
            lane.take(n, {name: out[at : at + n] for name, out in acts.items()}, parts)
            at += n
        self.windows.complete(epoch, step)
        after = (epoch, step + 1) if step + 1 < n_steps else (epoch + 1, 0)
        return Batch(*after, acts, None if parts is None else self._columns(parts))

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
