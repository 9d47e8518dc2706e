"""Lazy arrays: the rows of one hook over all shards, read when indexed.

NumPy gets float32, which holds every stored value exactly. In ``ml_dtypes.bfloat16`` it adds up in
8 bits, so that means come out 98 % off, and pandas, dask and others do as it does; an array that
has once been handed out cannot be kept from them. So there is none to hand out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import arrays
from actds.format.shard import Shard
from actds.schema import Hook

if TYPE_CHECKING:
    import torch

__all__ = ["LazyArray"]

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]
_MAX_OPEN_ARRAYS = 64  # files: a dataset may have more shards than a process may open


class LazyArray:
    """The rows of a hook, ``(n_rows, d_model)``, in the order of the shards.

    Indexing reads: an integer, a slice, integers ``(n,)`` or a mask choose rows, and a second
    index chooses channels. The result is a fresh float32 array, whatever the stored type: no value
    changes. :meth:`torch` gives tensors of the stored type, :meth:`bits` and :meth:`gather` its
    bit patterns. Files are opened on first use, and the last ones stay open; use it from any
    thread.

    Args:
        hook: the hook.
        shards: the shards that hold it.
    """

    def __init__(self, hook: Hook, shards: list[Shard]) -> None:
        self.hook = hook
        self._shards = shards
        self._starts = np.cumsum([0, *(shard.n_rows for shard in shards)], dtype=np.int64)
        self._readers: OrderedDict[int, arrays.ArrayReader] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<LazyArray {self.hook.name} {self.shape} {self.hook.dtype}>"

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and channels."""
        return (len(self), self.hook.d_model)

    @property
    def ndim(self) -> int:
        """Return 2: rows and channels."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type that indexing gives, float32; ``hook.dtype`` is the stored one."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows as indexing gives them."""
        return len(self) * self.hook.d_model * self.dtype.itemsize

    def __getitem__(self, index: Any) -> Floats:
        """Return the chosen rows, or of each the chosen channels, as float32.

        Raises:
            IndexError: a row outside the array, or an index of an unknown kind.
            ActdsError: E104, E108, E201 to E204 when a shard is missing or damaged.
        """
        rows, channels = self._split(index)
        return arrays.widen(self._rows(rows), self.hook.dtype)[..., channels]

    def float32(self, index: Any = slice(None)) -> Floats:
        """Return what ``array[index]`` returns, by the name of its type."""
        return self[index]

    def torch(self, index: Any = slice(None)) -> torch.Tensor:
        """Return the chosen rows as a fresh tensor of the stored type; indices as in ``[...]``.

        Raises:
            IndexError, ActdsError: as indexing.
        """
        rows, channels = self._split(index)
        return arrays.to_torch(self._rows(rows), self.hook.dtype)[..., channels]

    def _split(self, index: Any) -> tuple[Any, Any]:
        if not isinstance(index, tuple):
            return index, slice(None)
        if len(index) != 2:
            raise IndexError(f"{len(index)} indices; expected rows, or rows and channels")
        rows, channels = index
        if rows is None or channels is None:
            raise IndexError("no new axis; expected rows, or rows and channels")
        if not isinstance(rows, slice | int | np.integer) and np.ndim(channels):
            # NumPy would pair them: row 0 with channel 3, row 1 with channel 4.
            raise IndexError("lists of rows and of channels; take the rows, then the channels")
        return rows, slice(None) if channels is Ellipsis else channels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        if copy is False:
            raise ValueError("a lazy array cannot be viewed without a copy")
        values = self[:]
        return values if dtype is None else values.astype(dtype)

    def bits(self, start: int, stop: int) -> Values:
        """Return the bit patterns of the rows ``[start, stop)``, ``uint16`` or ``uint32``.

        Raises:
            IndexError: the range leaves the array.
            ActdsError: as indexing.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of {len(self)}")
        out = np.empty((stop - start, self.hook.d_model), arrays.DTYPES[self.hook.dtype].bits)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for number in range(first, len(self._shards)):
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, end)
            self._reader(number).read(low - begin, high - begin, out[low - start : high - start])
        return out

    def gather(self, rows: npt.ArrayLike) -> Values:
        """Return the bit patterns of the named rows in the order named; repeats allowed.

        Raises:
            IndexError: a number is no row.
            ActdsError: as indexing.
        """
        wanted = np.asarray(rows)
        if wanted.size == 0:
            wanted = wanted.astype(np.int64)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise IndexError(f"rows of {wanted.dtype} {wanted.shape}; expected integers (n,)")
        wanted = wanted.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(self)):
            raise IndexError(f"rows in [{wanted.min()}, {wanted.max()}] of {len(self)}")
        out = np.empty((len(wanted), self.hook.d_model), arrays.DTYPES[self.hook.dtype].bits)
        shard_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(shard_of).tolist():
            here = shard_of == number
            out[here] = self._reader(number).gather(wanted[here] - self._starts[number])
        return out

    def _rows(self, index: Any) -> Values:
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self.bits(start, max(start, stop))
            return self.gather(np.arange(start, stop, step))
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            one: Values = self.gather([int(index)])[0]
            return one
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of {chosen.shape}; expected ({len(self)},)")
            chosen = np.flatnonzero(chosen)
        return self.gather(chosen)

    def _reader(self, number: int) -> arrays.ArrayReader:
        with self._lock:
            reader = self._readers.get(number)
            if reader is None:
                shard = self._shards[number]
                reader = shard.array(self.hook.name)
                got = (reader.dtype, reader.d_model)
                if got != (self.hook.dtype, self.hook.d_model):
                    reader.close()
                    raise ActdsError(
                        "E108",
                        f"shards/{shard.name} {self.hook.name}",
                        got=f"{got[0]} rows of {got[1]} channels",
                        expected=f"{self.hook.dtype} rows of {self.hook.d_model} channels",
                    )
                self._readers[number] = reader
                while len(self._readers) > _MAX_OPEN_ARRAYS:
                    # Forgotten, not closed: another thread may be inside, and the last one closes.
                    self._readers.popitem(last=False)
            self._readers.move_to_end(number)
            return reader
