"""Raw memory maps: bytes that say neither type nor width, and what their names and neighbours say.

The doctor looks here for what ``numpy.memmap`` was made with: a shape and a type in the name of the
file, or in a JSON document beside it. What does not fit the size of the file is no guess.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from math import prod
from pathlib import Path

from actds.errors import ActdsError
from actds.exchange.tensors import itemsize, read_document

_SUFFIXES = (".dat", ".raw", ".mmap", ".memmap")
_PICKLE_OR_ZIP = re.compile(rb"\x80[\x00-\x05]|PK\x03\x04")
_DOCUMENTS = ("{0}.json", "{0}_meta.json", "{0}_metadata.json", "{0}_shape.json", "metadata.json",
              "meta.json", "shape.json")  # fmt: skip
_WIDTHS = ("d_model", "hidden_size", "d_in", "width", "dim")
_MAX_WIDTH = 1 << 20
_TYPES = {
    "bfloat16": ("bfloat16", "bf16"), "float16": ("float16", "fp16", "f16", "f2", "half"),
    "float32": ("float32", "fp32", "f32", "f4"), "float64": ("float64", "fp64", "f64", "f8"),
}  # fmt: skip
_WORD = re.compile("[a-z]+[0-9]*")
_SHAPE = re.compile(r"(?<![0-9a-z])[0-9]{1,18}(?:x[0-9]{1,18})+(?![0-9a-z])")


def is_raw(file: Path) -> bool:
    """Return whether a file is a raw memory map: by its name, of ``.bin`` by its first bytes."""
    if file.suffix != ".bin":
        return file.suffix in _SUFFIXES
    try:
        with file.open("rb") as stream:
            return not _PICKLE_OR_ZIP.match(stream.read(4))
    except OSError:
        return False


@dataclass(frozen=True)
class RawFile:
    """A raw file, the type of its values and the channels of a row; None where nothing says it."""

    path: Path
    dtype: str | None
    d_model: int | None

    @classmethod
    def guess(cls, path: Path) -> RawFile:
        """Return what the name of a file says, else a document beside it."""
        nbytes, name = path.stat().st_size, path.stem.lower()
        match = _SHAPE.search(name)
        said = [(tuple(map(int, match[0].split("x"))) if match else (), _dtype(name))]
        said += [_of_document(path.with_name(one.format(path.stem))) for one in _DOCUMENTS]
        shapes = [shape for shape, _ in said if shape and 1 <= shape[-1] <= _MAX_WIDTH]
        dtype = next((dtype for _, dtype in said if dtype), None)
        for shape in shapes:
            if dtype is None and nbytes in (4 * prod(shape), 8 * prod(shape)):
                # Of two bytes there are two types.
                dtype = "float32" if nbytes == 4 * prod(shape) else "float64"
            if nbytes and nbytes % (shape[-1] * (itemsize(dtype) if dtype else 2)) == 0:
                return cls(path, dtype, shape[-1])
        return cls(path, dtype, None)

    @property
    def lacks(self) -> list[str]:
        """Return what has to be put into the line by hand, in words."""
        words = {"float32 its type": self.dtype, "D_MODEL the channels of a row": self.d_model}
        return [one for one, known in words.items() if known is None]

    @property
    def line(self) -> str:
        """Return the line of a shell that makes ``raw/NAME.npy`` of it."""
        # NumPy has no bfloat16: an import takes two bytes without a name as --dtype says.
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype or "float32"
        array = f'np.memmap({str(self.path)!r}, "{dtype}", "r").reshape(-1, '
        array += f"{self.d_model or 'D_MODEL'})"
        return f"python -c {shlex.quote(f'import numpy as np; np.save({self._npy!r}, {array})')}"

    @property
    def _npy(self) -> str:
        return f"raw/{self.path.stem}.npy"


def _dtype(text: str) -> str | None:
    words = set(_WORD.findall(text.lower()))
    return next((dtype for dtype, names in _TYPES.items() if words & {*names}), None)


def _of_document(path: Path) -> tuple[tuple[int, ...], str | None]:
    """Return the shape (or the width alone) and the type that a document says; nothing of none."""
    try:
        document = read_document(path)
    except ActdsError:
        return (), None
    shape, dtype = document.get("shape"), document.get("dtype")
    if not isinstance(shape, list):
        shape = [document[name] for name in _WIDTHS if name in document][:1]
    if not all(type(n) is int and n >= 1 for n in shape):
        shape = []
    return tuple(shape), _dtype(dtype) if isinstance(dtype, str) else None
