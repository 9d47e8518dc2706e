"""The rows of a hook over many shards: arrays that are read when they are indexed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from actds.errors import ActdsError
from actds.format import arrays
from actds.format.schema import Hook
from actds.format.shard import Shard

if TYPE_CHECKING:
    import torch

MAX_OPEN_ARRAYS = 64
"""Files that stay open: a dataset may have more shards than a process may open."""
_MAX_READ_NBYTES = 1 << 26  # rows of all hooks that are read together, unless a chunk has more

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]


def open_array(shard: Shard, hook: Hook) -> arrays.ArrayReader:
    """Return the reader of a hook's rows in a shard."""
    reader = shard.array(hook.name)
    if (reader.dtype, reader.d_model) != (hook.dtype, hook.d_model):
        got = f"{reader.dtype} rows of {reader.d_model}"
        reader.close()
        raise ActdsError(
            "E108",
            f"shards/{shard.name} {hook.name}",
            got=got,
            expected=f"{hook.dtype} rows of {hook.d_model}, as actds.json says",
        )
    return reader


class Recent(Generic[Key, Value]):
    """What was made most recently, up to a size of all together. For any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._made: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[object, ...]:
        # Another process makes its own, and opens its own files: spawned workers of a DataLoader.
        return Recent, (self._most,)

    def get(self, key: Key, make: Callable[[], Value], size: int = 1) -> Value:
        """Return what stands under a key, made where it is not here.

        What is past the size is forgotten, and not closed: another thread may be inside.
        """
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key][0]
        value = make()
        with self._lock:
            self._made[key] = value, size
            while len(self._made) > 1 and sum(n for _, n in self._made.values()) > self._most:
                self._made.popitem(last=False)
        return value

    def empty(self) -> list[Value]:
        """Forget everything; return what it was."""
        values = [value for value, _ in self._made.values()]
        self._made.clear()
        return values


class OpenArrays:
    """The arrays of shards, opened on first use; the most recent ones stay open. For any thread."""

    def __init__(self, shards: Sequence[Shard], n_open: int | None = None) -> None:
        self._shards = shards
        self._readers = Recent[tuple[int, str], arrays.ArrayReader](
            MAX_OPEN_ARRAYS if n_open is None else n_open
        )

    def __len__(self) -> int:
        return len(self._readers)

    def get(self, number: int, hook: Hook) -> arrays.ArrayReader:
        """Return the reader of a hook's rows in the shard of that number, as ``open_array``."""
        return self._readers.get(
            (number, hook.name), lambda: open_array(self._shards[number], hook)
        )

    def close(self) -> None:
        for reader in self._readers.empty():
            reader.close()


def rows_together(rows_per_chunk: Iterable[int], most: int) -> int:
    """Return how many rows to read at a time of hooks that may differ in width.

    Whole chunks of every hook, unless these are more than ``most`` rows; and whole chunks of the
    widest hook in any case. A narrow hook has chunks of many rows, and as many rows of a wide one
    may not fit into memory.

    Args:
        rows_per_chunk: rows of a chunk of each hook, powers of two.
    """
    sizes = sorted(rows_per_chunk)
    return min(sizes[-1], max(sizes[0], 1 << max(most, 1).bit_length() - 1))


def rows_at_a_time(readers: Mapping[str, arrays.ArrayReader]) -> int:
    row_nbytes = sum(r.d_model * arrays.DTYPES[r.dtype].itemsize for r in readers.values())
    sizes = (reader.rows_per_chunk for reader in readers.values())
    return rows_together(sizes, _MAX_READ_NBYTES // row_nbytes)


class LazyArray:
    """The rows of a hook, ``(n_rows, d_model)``, in the order of the shards, read when indexed.

    Indexing reads: an integer, a slice, integers ``(n,)`` or a mask choose rows, and a second
    index chooses channels. The result is a new float32 array, which holds every stored value
    exactly. ``torch`` gives tensors of the stored type, ``bits`` and ``gather`` its bit patterns.
    Use it from any thread.

    There is no ``ml_dtypes.bfloat16`` array: NumPy sums it in 8 bits, so that means come out 98 %
    off, and so do pandas, dask and others.

    Args:
        hook: the hook.
        shards: the shards that hold it.
        n_open: how many of their files stay open at most, `MAX_OPEN_ARRAYS` by default.

    Attributes:
        hook: the hook; ``hook.dtype`` is the stored type.
    """

    def __init__(self, hook: Hook, shards: list[Shard], n_open: int | None = None) -> None:
        self.hook = hook
        self.shards = shards
        self._starts = np.cumsum([0, *(shard.n_rows for shard in shards)], dtype=np.int64)
        self.files = OpenArrays(shards, n_open)

    def __repr__(self) -> str:
        return f"<LazyArray {self.hook.name} {self.shape} {self.hook.dtype}>"

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self), self.hook.d_model)

    @property
    def ndim(self) -> int:
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

        Args:
            index: rows, or a pair of rows and channels. One row gives ``(d_model,)``, ``n`` rows
                ``(n, d_model)``; channels replace ``d_model`` as in NumPy.

        Raises:
            IndexError: a row outside the array, an index of another kind, or lists of rows and
                of channels at once.
            ActdsError: E104, E108, E201 to E204 when a shard is missing or damaged.
        """
        rows, channels = self._split(index)
        return arrays.widen(self._rows(rows), self.hook.dtype)[..., channels]

    def float32(self, index: Any = slice(None)) -> Floats:
        """Return ``array[index]``; its shape and errors are the same."""
        return self[index]

    def torch(self, index: Any = slice(None)) -> torch.Tensor:
        """Return the chosen rows as a new CPU tensor of the stored type, for example bfloat16.

        Args:
            index: rows, or rows and channels, with shapes as in ``array[index]``.

        Raises:
            ImportError: torch is not installed.
            IndexError, ActdsError: as ``array[index]``.
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
        """Return the bit patterns of the rows ``[start, stop)``, ``(stop - start, d_model)``.

        They are ``uint16`` for bfloat16 and float16, ``uint32`` for float32.

        Raises:
            IndexError: the range leaves the array.
            ActdsError: as ``array[index]``.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of {len(self)}")
        out = np.empty((stop - start, self.hook.d_model), arrays.DTYPES[self.hook.dtype].bits)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for number in range(first, len(self.shards)):
            begin, end = int(self._starts[number]), int(self._starts[number + 1])
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, end)
            self.files.get(number, self.hook).read(
                low - begin, high - begin, out[low - start : high - start]
            )
        return out

    def gather(self, rows: npt.ArrayLike) -> Values:
        """Return the bit patterns of rows in the given order, ``(n, d_model)``, as ``bits``.

        Args:
            rows: row numbers ``(n,)``; negative ones count from the end, repeats are allowed.

        Raises:
            IndexError: a number is outside the array, or ``rows`` is no list of integers.
            ActdsError: as ``array[index]``.
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
            out[here] = self.files.get(number, self.hook).gather(
                wanted[here] - self._starts[number]
            )
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
            row: Values = self.gather([int(index)])[0]
            return row
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_:
            if chosen.shape != (len(self),):
                raise IndexError(f"a mask of {chosen.shape}; expected ({len(self)},)")
            chosen = np.flatnonzero(chosen)
        return self.gather(chosen)
