"""Tensors of a file of weights: nothing in it is run, and nothing larger than it is allocated.

Three containers: ``.safetensors``; ``.npz``, a zip of arrays, never of pickles; and the zip of
``torch.save``, whose pickle torch reads with ``weights_only``, which knows tensors and no code.
What a file claims of its sizes is compared with its bytes before an array of that size exists.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from actds.errors import ActdsError, not_installed
from actds.exchange.containers import read_header
from actds.format.apart import Apart, Reply, Request, cpu_seconds
from actds_validators.arrays import Array

MAX_JSON_NBYTES = 1 << 22
"""Of a configuration; those of trainers have a few kilobytes."""
NEXT_STEP = (
    "Give a dictionary of this hook: a SAELens folder, Gemma Scope's params.npz, or the folder "
    "of a dictionary_learning ae.pt."
)
_Config = TypeVar("_Config", bound=BaseModel)


def refused(place: object, got: object, expected: str, next_step: str | None = None) -> ActdsError:
    """Return the error of a dictionary that is not used.

    Args:
        place: the file, and the tensor or field in it.
        got: what is there; cut to 200 characters of one line.
        next_step: what to do; the formats that are read when None.
    """
    words = " ".join(str(got).split())[:200]
    return ActdsError(
        "E015", str(place), got=words, expected=expected, next_step=next_step or NEXT_STEP
    )


def read_config(path: Path, model: type[_Config]) -> _Config:
    try:
        if path.exists() and not path.is_file():
            raise refused(path, "no regular file", "a configuration in JSON")
        with path.open("rb") as file:
            text = file.read(MAX_JSON_NBYTES + 1)
    except OSError as error:
        raise refused(path, error.strerror or error, "a file that can be read") from None
    if len(text) > MAX_JSON_NBYTES:
        raise refused(path, f"more than {MAX_JSON_NBYTES:,} bytes", "a configuration in JSON")
    try:
        config = model.model_validate_json(text)
        # The last of two is no more what is meant than the first.
        json.loads(text, object_pairs_hook=_unique)
        return config
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Input should be ")
        if first["type"] == "json_invalid":
            raise refused(path, words, "a configuration in JSON") from None
        if first["type"] == "missing":
            raise refused(path, f"no {field}", "a configuration with it") from None
        raise refused(f"{path} {field}", repr(first["input"]), words) from None
    except ValueError as error:
        raise refused(path, error, "a configuration in JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} twice")


Tensors = Mapping[str, Array]
"""Arrays of floats or integers by name; bfloat16 as such."""

_FLOATS = ("float64", "float32", "float16")
_INTEGERS = ("int64", "int32", "int16", "uint8", "int8")
_MAX_NPY_HEADER = 4096
_MAX_DEFLATED = 8
"""Times its stored bytes that a member may be: weights hardly get smaller, bombs 1,000 times."""
_ZIP = b"PK\x03\x04"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_npz(path: Path) -> bool:
    """Return whether a file is a zip of ``.npy`` arrays, whatever its name is."""
    names = _members(path)
    return bool(names) and all(name.endswith(".npy") for name in names)


def is_torch(path: Path) -> bool:
    """Return whether a file is one of ``torch.save``, whatever its name is."""
    return any(name.rpartition("/")[2] == "data.pkl" for name in _members(path))


def read_safetensors(path: Path) -> Tensors:
    """Return the tensors of a ``.safetensors`` file, mapped.

    Raises:
        ActdsError: E015 no such file, one that is truncated or has no header, or a tensor of a
            type that is no float or integer.
    """
    try:
        stored, _ = read_header(path)
        for name, tensor in stored.items():
            if tensor.dtype not in (*_FLOATS, "bfloat16", *_INTEGERS):
                raise refused(f"{path} {name}", tensor.dtype, "floats of 16, 32 or 64 bits")
        mapped = {name: tensor.map() for name, tensor in stored.items()}
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, ActdsError):
            raise refused(error.place, error.got, error.expected) from None
        raise refused(path, error, "a whole safetensors file") from None
    return {
        name: array.view(ml_dtypes.bfloat16) if stored[name].dtype == "bfloat16" else array
        for name, array in mapped.items()
    }


def read_npz(path: Path) -> Tensors:
    """Return the arrays of an ``.npz`` file, which is parsed apart.

    Raises:
        ActdsError: E015 no such file, damaged, an array of objects, one whose size is not that
            of its bytes, or a file that ends its parser.
    """
    return _read_apart("npz", path)


def _npz(path: Path) -> Tensors:
    try:
        with zipfile.ZipFile(path) as archive:
            _bounded(path, archive)
            return {
                info.filename.removesuffix(".npy"): _read_npy(path, archive, info)
                for info in archive.infolist()
            }
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, NotImplementedError, MemoryError,
            RuntimeError, SyntaxError, TokenError, zlib.error) as error:  # fmt: skip
        if isinstance(error, ActdsError):
            raise
        raise refused(path, str(error) or "a header too deep", "a whole .npz file") from None


def read_torch(path: Path) -> Tensors:
    """Return the tensors of a file of ``torch.save``, by the names of the state dict it holds.

    The file is parsed apart.

    Raises:
        ActdsError: E011 without torch; E015 no such file, damaged, with anything in its pickle
            but tensors and plain values, no dict of tensors, or a file that ends its parser.
    """
    return _read_apart("torch", path)


def _torch(path: Path) -> Tensors:
    try:
        import torch
    except ImportError:
        raise not_installed("torch", "torch") from None
    import pickle

    try:
        with zipfile.ZipFile(path) as archive:
            _bounded(path, archive, may_deflate=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that it reads or refuses
            # Mapped: a storage that claims more than the file has cannot become a tensor.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise refused(
            path,
            f"a pickle with more than weights: {_global_of(str(error))}",
            "tensors by name",
            "Nothing in it was run. Save the state dict alone: torch.save(ae.state_dict(), PATH).",
        ) from None
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, RuntimeError, TypeError, KeyError,
            AttributeError, IndexError, AssertionError, NotImplementedError) as error:  # fmt: skip
        if isinstance(error, ActdsError):
            raise
        raise refused(path, f"unreadable: {error}", "a whole file of torch.save") from None
    if not isinstance(loaded, Mapping) or not loaded:
        raise refused(path, f"a {type(loaded).__name__}", "a dict of tensors by name")
    nbytes = path.stat().st_size
    arrays = {}
    for name, tensor in loaded.items():
        place = f"{path} {name}"
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise refused(place, f"a {type(tensor).__name__}", "a dict of tensors by name")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise refused(place, f"a tensor {tensor.layout} {tensor.device}", "a dense tensor")
        # Strides of 0 make a tensor of any size of four bytes.
        if tensor.numel() * tensor.element_size() > nbytes:
            raise refused(place, f"{tuple(tensor.shape)} in {nbytes} bytes", "its own values")
        arrays[name] = _from_torch(place, tensor.detach())
    return arrays


_SLACK_NBYTES, _TIMES = 256 << 20, 2 * _MAX_DEFLATED
_reader = Apart(f"{__name__}:answer")


def _read_apart(container: str, path: Path) -> Tensors:
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise refused(path, error.strerror or error, "a file that can be read") from None
    if not path.is_file():
        raise refused(path, "no regular file", "a file of weights")
    request = Request(
        {"container": container, "path": os.path.abspath(path)},
        [],
        str(path),
        "E015",
        "a whole file of weights",
        _SLACK_NBYTES + _TIMES * nbytes,
        cpu_seconds(nbytes) + _TIMES,
        ("torch",) if container == "torch" else (),
    )
    _reader.deaths.clear()
    return {
        words["name"]: np.frombuffer(body, np.dtype(words["dtype"])).reshape(words["shape"])
        for words, body in _reader.ask(request)
    }


def answer(request: dict[str, Any], body: pa.Buffer) -> Iterator[Reply]:
    """Answer with the arrays of a file: the handler in the other process."""
    read = {"npz": _npz, "torch": _torch}[request["container"]]
    for name, array in read(Path(request["path"])).items():
        words = {"name": name, "dtype": array.dtype.name, "shape": array.shape}
        yield Reply(words, [np.ascontiguousarray(array).reshape(-1).view(np.uint8)])


def of_names(
    path: Path, tensors: Tensors, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Array]:
    """Return exactly the named tensors; another one says that the file means something else."""
    missing = [name for name in required if name not in tensors]
    further = sorted(set(tensors) - {*required, *optional})
    if missing or further:
        got = f"no {', '.join(missing)}" if missing else f"also {', '.join(further)}"
        raise refused(path, got, f"tensors {', '.join(required)}")
    for name, array in tensors.items():
        if array.dtype.name not in (*_FLOATS, "bfloat16"):
            raise refused(f"{path} {name}", str(array.dtype), "floats")
    return dict(tensors)


def vector(path: Path, name: str, array: Array, n: int) -> npt.NDArray[np.float32]:
    """Return one number per feature from a tensor that has one for all, or one each."""
    if array.shape not in ((), (1,), (n,)):
        raise refused(f"{path} {name}", str(array.shape), f"({n},), or one number")
    return np.ascontiguousarray(np.broadcast_to(array.astype(np.float32), (n,)))


def _members(path: Path) -> list[str]:
    if not path.is_file():  # nobody waits for a pipe
        return []
    try:
        with path.open("rb") as file:
            if file.read(4) != _ZIP:
                return []
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


def _bounded(path: Path, archive: zipfile.ZipFile, *, may_deflate: bool = True) -> None:
    """Refuse members that are larger than their file can make them."""
    total = 0
    for info in archive.infolist():
        total += info.compress_size
        deflated = info.compress_type != zipfile.ZIP_STORED
        most = info.compress_size * (_MAX_DEFLATED if deflated else 1)
        if (deflated and not may_deflate) or info.file_size > most + _MAX_NPY_HEADER:
            got = f"{info.file_size:,} bytes in {info.compress_size:,}"
            raise refused(f"{path} {info.filename[:80]}", got, "weights as they are")
    if total > path.stat().st_size:
        raise refused(path, f"members of {total:,} bytes", "no more than the file has")


def _read_npy(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    place = f"{path} {info.filename[:80]}"
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise refused(place, f"npy version {version}", "1.0 or 2.0")
        shape, fortran, kind = readers[version](file)  # type: ignore[no-untyped-call]
        if kind.hasobject or kind.kind not in "fiu":
            raise refused(
                place,
                f"values of {kind}, which may be code",
                "floats",
                "Nothing in it was run. Save arrays of floats with numpy.savez.",
            )
        claimed = math.prod(shape) * kind.itemsize
        if min(shape, default=0) < 0 or claimed != info.file_size - file.tell():
            got = f"{info.file_size - file.tell():,} bytes for {kind} {shape}"
            raise refused(place, got, f"{claimed:,} bytes")
        data = bytearray(claimed)
        if file.readinto(memoryview(data)) != claimed:  # type: ignore[attr-defined]
            raise refused(place, "a member that is cut", f"{claimed:,} bytes")
    return np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")


def _from_torch(place: str, tensor: Any) -> Array:
    import torch

    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    if str(tensor.dtype).removeprefix("torch.") not in (*_FLOATS, *_INTEGERS):
        raise refused(place, str(tensor.dtype), "floats of 16, 32 or 64 bits")
    return np.asarray(tensor.numpy())


def _global_of(words: str) -> str:
    """Return the name that torch refused, from its advice of several sentences."""
    for marker in ("GLOBAL ", "Unsupported global: "):
        if marker in words:
            return re.split(r" was not| whose| by default", words.split(marker, 1)[1])[0]
    return words.split("\n", 1)[0]
