"""What a file of arrays holds: the arrays of each container by name, type and shape.

It runs in the process of ``actds.exchange.opening``: it parses what strangers made. No length is
believed that the file has no bytes for, and nothing is unpickled but tensors.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from actds.errors import ActdsError
from actds.format import canonical

MAX_HEADER_NBYTES = 100_000_000  # that of the format
_CODES = {"bfloat16": "BF16", "bool": "BOOL", "int8": "I8", "uint8": "U8"} | {
    f"{name}{n_bits}": f"{code}{n_bits}"
    for name, code in (("float", "F"), ("int", "I"), ("uint", "U"))
    for n_bits in (16, 32, 64)
}
_NAMES = {code: name for name, code in _CODES.items()}
Array = npt.NDArray[Any]
ANY = -1
"""Size of an axis that differs, or of which nobody says it."""
MAX_LEAVES, MAX_DEPTH = 1 << 20, 4
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError)
_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def foreign(place: object, got: str, expected: str) -> ActdsError:
    return ActdsError("E019", str(place), got=got, expected=expected)


@contextmanager
def reading(
    place: object, expected: str, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Turn what the system or a library raises at a file into E019."""
    try:
        yield
    except ActdsError:
        raise
    except errors as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise foreign(place, words.splitlines()[0][:200], expected) from None


@dataclass(frozen=True)
class StoredTensor:
    """dtype: torch's name of the type, for others the format's own code; offset in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    end: int

    def map(self) -> npt.NDArray[Any]:
        """Values, mapped; bfloat16 as bit patterns in ``uint16``."""
        kind = np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)
        return _map(self.path, kind.newbyteorder("<"), self.shape, "C", self.offset)


@dataclass(frozen=True)
class NewTensor:
    """dtype: torch's name of the type; pieces are cut along axis 0, bfloat16 as bit patterns."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[npt.NDArray[Any]]


def write_tensors(
    path: Path, tensors: Mapping[str, NewTensor], metadata: Mapping[str, str]
) -> None:
    """Write a file of tensors, a piece at a time."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + math.prod(tensor.shape) * itemsize(tensor.dtype)
        entry = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for piece in tensor.pieces:
                file.write(np.ascontiguousarray(piece).data)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors of a file and words of its header; E019 it is truncated. No values are read."""
    nbytes = path.stat().st_size
    if not path.is_file():
        raise foreign(path, "no regular file", "a safetensors file")
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise foreign(path, f"{nbytes} bytes", f"a header of {length} bytes, and tensors")
        text = file.read(length)
    first, wrong = 8 + length, (ValueError, KeyError, TypeError, AttributeError, IndexError)
    try:
        header = json.loads(text, object_pairs_hook=_once)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(word, str) for word in metadata.values()):
            raise TypeError("metadata that are no words")
        tensors = {name: _stored(path, entry, first) for name, entry in header.items()}
    except (*wrong, OverflowError, RecursionError):
        raise foreign(path, "a header that cannot be read", "a safetensors file") from None
    for name, tensor in tensors.items():
        place, n = f"{path} {name}", tensor.end - tensor.offset
        if tensor.end > nbytes:
            raise foreign(place, f"{nbytes} bytes", f"{tensor.end}: it is truncated")
        known = tensor.dtype in _CODES
        size = math.prod(tensor.shape) * (itemsize(tensor.dtype) if known else 0)
        is_odd = min(tensor.shape, default=1) < 0 or tensor.offset < first
        if is_odd or (known and n != size):
            raise foreign(place, f"{n} bytes of {tensor.dtype} {tensor.shape}", f"{size} bytes")
    at = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].end)):
        if tensor.offset != at:
            got = f"a tensor from byte {tensor.offset}"
            raise foreign(f"{path} {name}", got, f"from {at}: tensors one after the other")
        at = tensor.end
    if at != nbytes:
        raise foreign(path, f"{nbytes} bytes", f"{at}, where its tensors end")
    return tensors, metadata


def _stored(path: Path, entry: dict[str, Any], first: int) -> StoredTensor:
    dtype = _NAMES.get(entry["dtype"], entry["dtype"])
    start, end = (first + int(entry["data_offsets"][i]) for i in (0, 1))
    return StoredTensor(path, dtype, tuple(map(int, entry["shape"])), start, end)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that an object has twice: of two arrays one would be left out in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name twice")
    return members


def read_document(path: Path) -> dict[str, Any]:
    """The object of a stranger's JSON file; E019 it is none, no regular file, or over 16 MiB."""
    with reading(path, "a JSON object"):
        data = canonical.read_bounded(path)
    try:
        document = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise foreign(path, "a document that cannot be read", "a JSON object")
    return document


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(np.dtype(dtype).itemsize)


@dataclass(frozen=True)
class Leaf:
    """One array of a file; ``read`` returns its values, bfloat16 as bit patterns in ``uint16``.

    The type is named as torch names it, or else as the container does.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]


def leaves(name: str, node: Any) -> Iterator[tuple[str, Leaf]]:
    """Arrays of what a reader returned, with their names; ``name`` is that of one without."""
    if isinstance(node, Leaf):
        yield name, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(f"{name}.{key}" if name else key, value)
    elif isinstance(node, list):
        for value in node:
            yield from leaves(name, value)


def _of_safetensors(file: Path) -> dict[str, Leaf]:
    tensors, _ = read_header(file)
    return {name: Leaf(t.dtype, t.shape, t.map) for name, t in tensors.items()}


def _of_torch(file: Path) -> Any:
    try:
        import torch
    except ImportError:
        got, expected = "not installed", "the extra actds[torch]"
        raise ActdsError("E011", "torch", got=got, expected=expected) from None
    with reading(file, "tensors that torch saved, whole; nothing else is read", (Exception,)):
        # Tensors alone: a pickle may run anything.
        data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    nbytes, n = file.stat().st_size, 0

    def node(value: Any, depth: int) -> Any:
        nonlocal n
        n += 1
        if n > MAX_LEAVES:
            raise foreign(file, f"more than {MAX_LEAVES} values", "arrays")
        if isinstance(value, torch.Tensor):
            return _tensor(file, value, nbytes)
        if isinstance(value, dict) and depth < MAX_DEPTH:
            named = {str(key)[:200]: node(part, depth + 1) for key, part in value.items()}
            if len(named) < len(value):
                raise foreign(file, "two keys of one name", "arrays of different names")
            return named
        if isinstance(value, list | tuple) and depth < MAX_DEPTH:
            return [node(part, depth + 1) for part in value]
        return type(value).__name__

    return node(data, 0)


def _tensor(file: Path, tensor: Any, nbytes: int) -> Leaf:
    import torch

    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise foreign(file, f"a tensor {tensor.layout} {tensor.device}", "dense tensors")
    # Strides of 0 make a tensor of any size of four bytes.
    if tensor.numel() * tensor.element_size() > nbytes:
        raise foreign(file, f"a tensor {shape} in {nbytes} bytes", "tensors with their own values")

    def read() -> Array:
        values = tensor.detach()
        if dtype == "bfloat16":
            array: Array = values.view(torch.int16).numpy().view(np.uint16)
            return array
        return np.asarray(values.numpy())

    return Leaf(dtype, shape, read)


def map_npy(file: Path) -> Leaf:
    """The array of a ``.npy`` file, mapped; E019 it is none, truncated, or of objects."""
    if not file.is_file() and file.exists():
        raise foreign(file, "no regular file", "a .npy array")
    with file.open("rb") as opened:
        dtype, shape, order = _npy_header(file, opened)
        start = opened.tell()
    _check_length(file, dtype, shape, file.stat().st_size - start)
    return Leaf(_name(dtype), shape, lambda: _map(file, dtype, shape, order, start))


def _map(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any, at: int) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", at, shape, order)


def _check_length(place: object, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int) -> None:
    if nbytes < dtype.itemsize * math.prod(shape):
        raise foreign(place, f"{nbytes} bytes", f"values of shape {shape}: it is truncated")


def _name(dtype: np.dtype[Any]) -> str:
    """The name of a type; its whole description where it is of another byte order."""
    return dtype.name if dtype.isnative and dtype.kind in "biuf" else str(dtype)


def _npy_header(
    file: Path, opened: Any, name: str = ""
) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    place = f"{file} {name}".strip()
    # Typed as Any: the stubs of NumPy do not know the bound on the header.
    form: Any = np.lib.format
    with reading(place, "a .npy array", (Exception,)):  # of its tokenizer and compiler, too
        version = form.read_magic(opened)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the header")
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, fortran, dtype = read(opened, max_header_size=1 << 16)
    if dtype.hasobject:
        raise foreign(place, "pickled objects, which are not read", "an array of numbers")
    if min(shape, default=0) < 0:
        raise foreign(place, f"an array {shape}", "sizes from 0")
    return dtype, tuple(int(size) for size in shape), "F" if fortran else "C"


def _of_npz(file: Path) -> dict[str, Leaf]:
    arrays: dict[str, Leaf] = {}
    errors = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError)
    with reading(file, "a .npz file, whole", errors), zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            with archive.open(info) as opened:
                dtype, shape, order = _npy_header(file, opened, name)
                start = opened.tell()
            _check_length(f"{file} {name}", dtype, shape, info.file_size - start)
            if name in arrays:
                raise foreign(f"{file} {name}", "two arrays of one name", "different names")
            read = partial(_read_npz, file, info, dtype, shape, order)
            arrays[name] = Leaf(_name(dtype), shape, read)
    return arrays


def _read_npz(
    file: Path, info: zipfile.ZipInfo, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> Array:
    """One array of a zip: mapped where it is stored, else unpacked."""
    with zipfile.ZipFile(file) as archive, archive.open(info) as opened:
        _npy_header(file, opened, info.filename)
        start, nbytes = opened.tell(), dtype.itemsize * math.prod(shape)
        if info.compress_type == zipfile.ZIP_STORED:
            with file.open("rb") as raw:
                raw.seek(info.header_offset + 26)
                n_name, n_extra = np.frombuffer(raw.read(4), "<u2").tolist()
            at = info.header_offset + 30 + n_name + n_extra + start
            _check_length(f"{file} {info.filename}", dtype, shape, file.stat().st_size - at)
            return _map(file, dtype, shape, order, at)
        data = opened.read(nbytes)
    _check_length(f"{file} {info.filename}", dtype, shape, len(data))
    return np.frombuffer(data, dtype).reshape(shape, order=order)


# Arrow: the caches of SAELens and of ``datasets``.


def schema_of(file: Path) -> pa.Schema:
    """Raises as ``batches``."""
    with _opened(file) as (schema, _):
        return schema


def batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow stream or file, each checked; E019 it is none, damaged, or cut."""
    with _opened(file) as (_, every):
        for batch in every:
            batch.validate(full=True)
            yield batch


@contextmanager
def _opened(file: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    every: Iterator[pa.RecordBatch]
    with reading(file, "an Arrow stream, whole", ARROW_ERRORS), pa.memory_map(str(file)) as source:
        try:
            stream = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_file(source)
            schema = reader.schema
            every = map(reader.get_batch, range(reader.num_record_batches))
        else:
            _check_end(file)
            schema, every = stream.schema, iter(stream)
        if len(set(schema.names)) < len(schema.names):
            raise foreign(file, "two columns of one name", "columns of different names")
        yield schema, every


def _check_end(file: Path) -> None:
    """Refuse a stream without its end marker, which pyarrow takes for a whole one."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(_ARROW_END)))
        if stream.read() != _ARROW_END:
            raise foreign(file, "no end marker", "an Arrow stream, whole")


def _of_arrow(file: Path) -> dict[str, Leaf]:
    schema = schema_of(file)
    n_rows = sum(batch.num_rows for batch in batches(file))
    features = features_of(file.parent)
    columns = {}
    for column in schema:
        dtype, shape = _column(column.type, n_rows, features.get(column.name))
        columns[column.name] = Leaf(dtype, shape, _unread)
    return columns


def features_of(folder: Path) -> dict[str, Any]:
    """What ``datasets`` says of the columns; empty where it says nothing."""
    path = folder / "dataset_info.json"
    features = read_document(path).get("features") if path.exists() else None
    return features if isinstance(features, dict) else {}


def is_list(kind: pa.DataType) -> bool:
    types = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_type(kind) for is_type in types)


def type_name(kind: pa.DataType) -> str:
    """NumPy's name of a type of numbers, of others Arrow's."""
    names = {"float": "float32", "double": "float64", "halffloat": "float16"}
    return names.get(str(kind), str(kind)[:200])


def lists_of(column: pa.Array, name: str, file: Path) -> tuple[Array, pa.Array]:
    """Lengths of the lists of a column, and their elements."""
    if not is_list(column.type):
        raise foreign(file, f"{name} of {column.type}"[:200], "lists of numbers")
    refuse_nulls(column, name, file)
    lengths: Array = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, column.flatten()


def refuse_nulls(column: pa.Array, name: str, file: Path) -> None:
    if column.null_count:
        raise foreign(file, f"{name} with {column.null_count} nulls", "no null")


def numbers_of(flat: pa.Array, name: str, dtype: str, file: Path) -> Array:
    refuse_nulls(flat, name, file)
    values: Array = flat.to_numpy(zero_copy_only=False)
    if values.dtype.name != dtype:
        raise foreign(file, f"{name} of {values.dtype}", dtype)
    return values


def nesting(kind: pa.DataType) -> tuple[int, str]:
    """How deep lists are nested, and the type of their elements."""
    depth = 0
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type
    return depth, type_name(kind)


def _column(kind: pa.DataType, n_rows: int, feature: Any) -> tuple[str, tuple[int, ...]]:
    """Type of a column's values, and its shape as far as somebody says it."""
    given = feature.get("shape") if isinstance(feature, dict) else None
    sizes = [n if isinstance(n, int) else ANY for n in given] if isinstance(given, list) else []
    if isinstance(kind, pa.BaseExtensionType):  # of a library that is imported here
        kind = kind.storage_type
    shape = [n_rows]
    while is_list(kind):
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else ANY
        shape.append(sizes.pop(0) if sizes else size)
        kind = kind.value_type
    return type_name(kind), tuple(shape)


def _of_parquet(file: Path) -> dict[str, Leaf]:
    """Return the columns by their Parquet types alone: a stored Arrow schema is not parsed."""
    with reading(file, "a Parquet file, whole", ARROW_ERRORS), pq.ParquetFile(file) as opened:
        metadata = opened.metadata
        columns = [metadata.schema.column(n) for n in range(metadata.num_columns)]
    arrays = {}
    for column in columns:
        nested = (ANY,) * column.max_repetition_level
        dtype = _PARQUET.get(column.physical_type, column.physical_type.lower())
        arrays[column.path.split(".")[0]] = Leaf(dtype, (metadata.num_rows, *nested), _unread)
    return arrays


def _unread() -> Array:
    raise NotImplementedError("columns are read by batch")


_PARQUET = {"FLOAT": "float32", "DOUBLE": "float64", "BYTE_ARRAY": "bytes"}
READERS: dict[str, Callable[[Path], Any]] = {
    "sae-lens": _of_arrow,
    "datasets": _of_arrow,
    "safetensors": _of_safetensors,
    "pt": _of_torch,
    "npy": map_npy,
    "npz": _of_npz,
    "parquet": _of_parquet,
}
"""What reads the files of each form."""
